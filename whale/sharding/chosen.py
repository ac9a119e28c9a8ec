"""What a sharding chose, to be asked: how every value lies, how its readers need it, and what it
costs to bring it there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch.fx import Node

from whale.plans.layout import Layout
from whale.plans.sharding import Sharding
from whale.sharding.dims import Value, value_of
from whale.sharding.options import SAME, Option, Placement
from whale.sharding.redistribution_costs import Placements, sent_bytes
from whale.sharding.space import numel_bytes
from whale.sharding.terms import Terms, output_of


class ChosenLayouts:
    """A sharding of a stage with the terms that it was solved with."""

    def __init__(self, sharding: Sharding, terms: Terms) -> None:
        self.terms = terms
        self.space = terms.space
        self.grid = sharding.grid
        self.axes = self.grid.axes
        self.sizes = [self.grid.size(axis) for axis in self.axes]
        self.chosen: Mapping[Node, Mapping[str, Option]] = self.space.chosen(sharding)
        self.stored = {
            node: _placements(sharding.stored[str(node.target)], self.axes)
            for node in self.space.parameters
        }
        self.readers: dict[Value, list[tuple[Node, int]]] = {}
        for node, op in self.space.operations.items():
            for slot, source in enumerate(op.inputs):
                self.readers.setdefault(value_of(source), []).append((node, slot))
        self.wanted: dict[Value, list[Placements]] = {}
        for node, placement in self.space.wanted():
            self.wanted.setdefault(value_of(node), []).append((placement,) * len(self.axes))

    def lies(self, value: Value) -> Placements:
        """How a value lies where it is made or stored."""
        if value[0] in self.chosen:
            return tuple(output_of(self.chosen[value[0]][axis], value[1]) for axis in self.axes)
        stored = self.stored.get(value[0])
        return tuple(
            stored[axis] if stored else self.space.fixed_source(value[0]) for axis in self.axes
        )

    def needs(self, value: Value, but: Node | None = None) -> list[Placements]:
        """How everyone who reads a value needs it."""
        return [
            self._needs_it(reader, slot)
            for reader, slot in self.readers.get(value, [])
            if reader is not but
        ]

    def _needs_it(self, reader: Node, slot: int) -> Placements:
        return tuple(self.chosen[reader][axis].inputs[slot] for axis in self.axes)

    def redistribute(
        self, value: Value, source: Placements, target: Placements
    ) -> tuple[float, float]:
        """(seconds, bytes sent) of one redistribution, with its backward where there is one."""
        gradient = value[0] in self.space.program.gradients
        plain = value[0].op == "get_attr" or not self.terms.costs.is_counted
        sent = sent_bytes(
            float(numel_bytes(value, self.terms.shapes)),
            source,
            target,
            self.sizes,
            gradient,
            plain,
        )
        if not any(sent):
            return 0.0, 0.0
        seconds = self.terms.costs.latency_s * (1 + gradient)
        return seconds + sum(
            number / self.terms.costs.rate(axis) for number, axis in zip(sent, self.axes)
        ), sum(sent)

    def message_seconds(self, nodes: Collection[Node]) -> float:
        """Seconds of all messages that some of these operations take part in, as the solver counts
        them: inside of an operation, of what it reads, and of what it gives.
        """
        total = 0.0
        for node in nodes:
            if node in self.chosen:
                total += self.terms.inside(node, self.chosen[node])
        for value in {**self.readers, **self.wanted}:
            producer = value[0]
            is_solved = producer in self.chosen or producer in self.stored
            if not is_solved and producer not in self.space.program.received:
                continue  # whole on every device, and nothing is sent
            source = self.lies(value)
            targets = []
            for reader, slot in self.readers.get(value, []):
                if producer in nodes or reader in nodes:
                    targets.append(self._needs_it(reader, slot))
            results = self.wanted.get(value, []) if producer in nodes else []
            for target in (*dict.fromkeys(targets), *results):
                total += self.redistribute(value, source, target)[0]
        return total


def _placements(layout: Layout, axes: Sequence[str]) -> dict[str, Placement]:
    return {
        axis: next((dim for dim, cut_by in enumerate(layout.axes) if axis in cut_by), SAME)
        for axis in axes
    }
