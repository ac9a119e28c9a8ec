"""Why an operation runs as it does: what its next best pattern would cost, or what left no choice.

The choice is made for all operations of a stage at once. The reason is given for one of them, the
others staying as they are: its pattern is changed on one axis, and

    more = work + redistribution of what it reads + redistribution of what it gives,
           with the other pattern - with the chosen one                                         (1)

in seconds and bytes of one micro-batch, forward and backward. A weight that nobody else reads may
then be stored otherwise, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from torch.fx import Node

from whale.costs.costs import node_costs
from whale.plans.sharding import ShardedOperation, Sharding
from whale.sharding.chosen import ChosenLayouts
from whale.sharding.describe import pattern
from whale.sharding.dims import Value
from whale.sharding.options import Option, Placement
from whale.sharding.redistribution_costs import GridCosts, Placements
from whale.sharding.space import Space
from whale.sharding.terms import Terms, output_of
from whale.units import human_bytes, human_seconds

Pattern = Mapping[str, Option]
"""axis -> option"""
SAME_SECONDS = 1e-9
"""relative to the stage: patterns so close are equally fast"""


def with_reasons(space: Space, sharding: Sharding, num_samples: int, costs: GridCosts) -> Sharding:
    """The sharding with a reason for every operation that it lists; those of equal layers have the
    same.
    """
    costs_of_nodes = space.node_costs(num_samples, node_costs)
    reasons = _Reasons(sharding, Terms(space, sharding.grid, num_samples, costs, costs_of_nodes))
    nodes = list(space.program.captured.graph.nodes)
    alike = space.repeats(num_samples, reasons.terms.node_costs, {}).alike
    known: dict[Node, str] = {}
    operations: list[ShardedOperation] = []
    for each in sharding.operations:
        node = alike.get(nodes[each.node], nodes[each.node])
        if node not in known:
            known[node] = reasons.why(node)
        operations.append(replace(each, why=known[node]))
    return replace(sharding, operations=tuple(operations))


class _Reasons(ChosenLayouts):
    def __init__(self, sharding: Sharding, terms: Terms) -> None:
        super().__init__(sharding, terms)
        self.seconds = sharding.seconds

    def why(self, node: Node) -> str:
        chosen = self.chosen[node]
        others = list(self._others(node, chosen))
        if not others:
            return self._no_choice(node, chosen)
        seconds, num_bytes = self._cost(node, chosen)
        compared = [
            (*self._cost(node, options), pattern(self.space, node, options)) for options in others
        ]
        next_s, next_bytes, name = min(compared, key=lambda each: each[0])
        more_s = next_s - seconds
        more_bytes = next_bytes - num_bytes
        if abs(more_s) <= SAME_SECONDS * self.seconds:
            return f"as fast as {name}"
        if more_s < 0:
            return f"least time of the whole stage, in which {name} does not fit its neighbours"
        sent = (
            f", {human_bytes(abs(more_bytes))} {'more' if more_bytes > 0 else 'less'} sent"
            if more_bytes
            else ""
        )
        return f"next best is {name}: {human_seconds(more_s)} more{sent}"

    def _others(self, node: Node, chosen: Pattern) -> Iterator[Pattern]:
        """Patterns that differ on one axis."""
        for axis in self.axes:
            rest = {other: option for other, option in chosen.items() if other != axis}
            for (option,) in self.space.joint_options(node, [axis], rest):
                if option.name != chosen[axis].name:
                    yield {each: option if each == axis else chosen[each] for each in self.axes}

    def _no_choice(self, node: Node, chosen: Pattern) -> str:
        if node in self.space.program.by_samples:
            return "under `replicate`: its samples are cut over all devices"
        if any(option.local == "summa" for option in chosen.values()):
            return "SUMMA was asked for"
        if not any(option.is_cut for option in self.space.options[node]):
            return "no rule cuts it: whole on every device"
        if self.space.is_product(node):
            return "the only way to cut its weight over these axes"
        return "the only way to cut it over these axes"

    # ---- line (1)

    def _cost(self, node: Node, options: Pattern) -> tuple[float, float]:
        """(seconds, bytes sent) of one operation with this pattern."""
        seconds = float(self.terms.work(node, [options])[0])
        num_bytes = self.terms.exchanged_bytes(node, options)
        num_bytes += sum(self.terms.travelling_bytes(node, options).values())
        num_bytes += sum(self.terms.panel_bytes(node, options).values())
        slots: dict[Value, dict[Placements, None]] = {}
        for slot, value in enumerate(self.space.inputs_of(node)):
            slots.setdefault(value, {})[tuple(options[axis].inputs[slot] for axis in self.axes)] = (
                None
            )
        for value, targets in slots.items():
            more_s, more_bytes = self._read(node, value, list(targets))
            seconds = seconds + more_s
            num_bytes = num_bytes + more_bytes
        for value in self.space.outputs_of(node):
            source = tuple(output_of(options[axis], value[1]) for axis in self.axes)
            targets_of = dict.fromkeys((*self.needs(value), *self.wanted.get(value, [])))
            for target in targets_of:
                more_s, more_bytes = self.redistribute(value, source, target)
                seconds = seconds + more_s
                num_bytes = num_bytes + more_bytes
        return seconds, num_bytes

    def _read(self, node: Node, value: Value, targets: Sequence[Placements]) -> tuple[float, float]:
        """(seconds, bytes sent) to bring one input here; what others bring into the same layout
        costs nothing more.
        """
        others = set(self.needs(value, but=node))
        targets = [target for target in targets if target not in others]
        if value[0] in self.stored and not others:
            return min(
                self._from_store(value, stored, targets) for stored in self._ways_to_store(value[0])
            )
        source = self.lies(value)
        found = [self.redistribute(value, source, target) for target in targets]
        return sum(one for one, _ in found), sum(one for _, one in found)

    def _from_store(
        self, value: Value, stored: Mapping[str, Placement], targets: Sequence[Placements]
    ) -> tuple[float, float]:
        source = tuple(stored[axis] for axis in self.axes)
        found = [self.redistribute(value, source, target) for target in targets]
        return float(self.terms.stored(value[0], [stored])[0]) + sum(one for one, _ in found), sum(
            one for _, one in found
        )

    def _ways_to_store(self, node: Node) -> list[Mapping[str, Placement]]:
        options = (self.space.stored_options(node, axis, None) for axis in self.axes)
        return [dict(zip(self.axes, each, strict=True)) for each in product(*options)]
