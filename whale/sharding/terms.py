"""The terms of the solver's objective (solve.py), as tables over the choices of one operation, or
of a value's producer and readers. All are seconds of one micro-batch, forward and backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import ceil, prod

import numpy as np
import numpy.typing as npt
from torch.fx import Node

from whale.costs.costs import BACKWARD_PER_FORWARD, NodeCost
from whale.operations.operation import Shapes
from whale.plans.grid import Grid
from whale.plans.sharding import ORDER
from whale.sharding.dims import Value
from whale.sharding.eliminate import Array
from whale.sharding.options import SAME, Option, Placement
from whale.sharding.redistribution_costs import GridCosts, Placements, sent_bytes
from whale.sharding.row_messages import LOCAL_FORMS, row_messages
from whale.sharding.space import Space, numel_bytes

MOST_SHARING = 3
"""readers of one value whose shared redistributions are counted together"""
MOST_ENTRIES = 400_000
"""entries of one table of readers"""

AxisChoice = Option | Placement
"""on one axis: the option of an operation, or how something stored or received lies"""
State = dict[str, AxisChoice]
"""axis -> choice, for all axes that are chosen"""


def output_of(choice: AxisChoice, result: int) -> Placement:
    """How a result lies along an axis."""
    return choice.outputs[result] if isinstance(choice, Option) else choice


@dataclass(frozen=True)
class Read:
    """One value and who reads it."""

    value: Value
    readers: tuple[Node, ...]
    """each once"""
    slots: tuple[tuple[int, int], ...]
    """(position in `readers`, input of that reader)"""
    wanted: tuple[Placement, ...]
    """how it must lie as a result of the stage"""
    key: int | None
    """equal for equal values that are read by equal operations"""
    times: int = 1
    """how often its redistributions count"""

    @property
    def producer(self) -> Node:
        return self.value[0]


@dataclass(frozen=True)
class _Source:
    """A value that others read: how it may lie, and what it weighs."""

    placements: tuple[Placements, ...]
    axes: tuple[str, ...]
    num_bytes: float
    gradient: bool
    is_parameter: bool


class Terms:
    """Seconds of one micro-batch of a stage on one grid."""

    def __init__(
        self,
        space: Space,
        grid: Grid,
        num_samples: int,
        costs: GridCosts,
        node_costs: Mapping[Node, NodeCost],
    ) -> None:
        self.space = space
        self.grid = grid
        self.num_samples = num_samples
        self.costs = costs
        self.node_costs = node_costs
        self.shapes = Shapes(space.program.captured.batch_symbol, num_samples)
        self._unit_costs: dict[tuple[object, ...], tuple[Array, Array]] = {}

    # ---- operations

    def work(self, node: Node, joint: Sequence[Mapping[str, Option]]) -> Array:
        """(choices,): seconds of an operation for each joint choice (axis -> option): its own work,
        and messages inside of it.
        """
        cost = self.node_costs[node]
        seconds = (
            cost.flop / self.costs.flop_per_s + cost.moved_bytes / self.costs.memory_bytes_per_s
        )
        if node in self.space.program.gradients:
            seconds *= 1 + BACKWARD_PER_FORWARD
        return np.array(
            [seconds * self.share(node, options) + self.inside(node, options) for options in joint]
        )

    def share(self, node: Node, options: Mapping[str, Option]) -> float:
        """Largest fraction of an operation's work that one device has."""
        along: dict[str, list[int]] = {}
        counts: dict[str, int] = {}
        for axis in ORDER:
            option = options.get(axis)
            if option is None or not option.is_cut:
                continue
            along.setdefault(option.name, []).append(self.grid.size(axis))
            if option.name not in counts:
                value, dim = self.cut_value(node, option)
                counts[option.name] = self.space.granules.cuts(value, self.num_samples)[dim].count
        return prod(largest_share(counts[name], tuple(sizes)) for name, sizes in along.items())

    def cut_value(self, node: Node, option: Option) -> tuple[Value, int]:
        """A tensor of an operation that an option cuts, and the dim: its granules are those of the
        work.
        """
        values = (*self.space.inputs_of(node), *self.space.outputs_of(node))
        if option.apart:  # the work is where the experts are
            return values[option.apart[0]], option.inputs[option.apart[0]]  # type: ignore[return-value]
        return next(
            (v, p) for v, p in zip(values, (*option.inputs, *option.outputs)) if isinstance(p, int)
        )

    def inside(self, node: Node, options: Mapping[str, Option]) -> float:
        """Seconds of messages inside of an operation: all-reduces of rows for norms and losses over
        a cut dim, panels of SUMMA, tokens that travel to their experts.
        """
        if panels := self.panel_bytes(node, options):
            messages = 6 * sum(self.grid.size(axis) for axis in panels)  # research/tensor3d.md 1.1
            return messages * self.costs.latency_s + sum(
                number / self.costs.rate(axis) for axis, number in panels.items()
            )
        axes, messages_bytes = self._row_messages(node, options)
        if not messages_bytes:
            return self.travel(node, options)
        rate = min(self.costs.rate(axis) for axis in axes)
        return sum(self.costs.latency_s + number / rate for number in messages_bytes)

    def exchanged_bytes(self, node: Node, options: Mapping[str, Option]) -> float:
        """Bytes that one device sends inside of an operation: maxima and sums of rows."""
        return sum(self._row_messages(node, options)[1])

    def _row_messages(
        self, node: Node, options: Mapping[str, Option]
    ) -> tuple[list[str], list[float]]:
        """The axes along which devices exchange numbers of rows, and the bytes of each message."""
        axes = [axis for axis, option in options.items() if option.local in LOCAL_FORMS]
        if not axes:
            return [], []
        op = self.space.operations[node]
        option = options[axes[0]]
        shape = self.shapes.of(op.inputs[0].meta["val"])
        along = option.inputs[0]
        assert isinstance(along, int)
        if option.local == "batch norm":  # its rows are channels
            num_rows = float(shape[1])
        else:
            num_rows = float(prod(size for dim, size in enumerate(shape) if dim != along))
        others = [axis for axis in options if axis not in axes]
        cutting = [axis for axis in others if options[axis].is_cut]
        num_rows *= prod(1 / self.grid.size(axis) for axis in cutting)
        num_devices = prod(self.grid.size(axis) for axis in axes)
        has_backward = op.inputs[0] in self.space.program.gradients
        messages = row_messages(op, option.local, num_rows, has_backward)
        return axes, [message.sent_bytes(num_devices) for message in messages]

    def travel(self, node: Node, options: Mapping[str, Option]) -> float:
        """Seconds of the all-to-alls of tokens to their experts and back, in forward and in
        backward.
        """
        num_messages = 2 * sum(node in nodes for nodes in self.space.journeys)
        travelling = self.travelling_bytes(node, options)
        return sum(
            num_messages * self.costs.latency_s + number / self.costs.rate(axis)
            for axis, number in travelling.items()
        )

    def travelling_bytes(self, node: Node, options: Mapping[str, Option]) -> dict[str, float]:
        """Bytes that one device sends along each axis of the tokens that travel: rows in and rows
        out, forward and backward. Rows stay at their experts between two products, so the next one
        is taken to travel as well.
        """
        axes = [axis for axis, option in options.items() if option.apart]
        if not axes:
            return {}
        coming, going = self.space.journeys
        sizes = [numel_bytes(self.space.inputs_of(node)[0], self.shapes)] if node in coming else []
        sizes += [numel_bytes(self.space.outputs_of(node)[0], self.shapes)] if node in going else []
        held = (
            2
            * sum(sizes)
            * prod(1 / self.grid.size(axis) for axis, option in options.items() if option.is_cut)
        )
        return {axis: held * (self.grid.size(axis) - 1) / self.grid.size(axis) for axis in axes}

    def panel_bytes(self, node: Node, options: Mapping[str, Option]) -> dict[str, float]:
        """Bytes that a device sends along each axis for SUMMA: of the input along x, of the weight
        along y. Each panel goes to the q - 1 others in forward, and once more for each of the two
        gradients, or comes from them as a term of one: 3 (q - 1) / q^2 (MK / d + KN) in all.
        """
        axes = [axis for axis, option in options.items() if option.local == "summa"]
        if not axes:
            return {}
        x, weight = self.space.inputs_of(node)[:2]
        times = 1 + sum(value[0] in self.space.program.gradients for value in (x, weight))
        part = {axis: 1 / self.grid.size(axis) for axis in options}
        held = {
            "x": numel_bytes(x, self.shapes) * prod(part.values()),
            "y": numel_bytes(weight, self.shapes) * prod(part[axis] for axis in axes),
        }
        return {axis: times * (self.grid.size(axis) - 1) * held[axis] for axis in axes}

    # ---- parameters

    def stored(self, node: Node, joint: Sequence[Mapping[str, Placement]]) -> Array:
        """(choices,): seconds of a parameter for each joint choice: the all-reduce of its gradient
        over equal holders, and the price of memory.
        """
        num_bytes = float(numel_bytes((node, 0), self.shapes))
        trained = node in self.space.program.gradients
        cuts = self.space.granules.cuts((node, 0), self.num_samples)
        result = np.zeros(len(joint))
        for number, placements in enumerate(joint):
            held = num_bytes
            for dim, cut in enumerate(cuts):
                sizes = tuple(self.grid.size(axis) for axis in ORDER if placements.get(axis) == dim)
                held *= largest_share(cut.count, sizes) if sizes else 1.0
            result[number] = held * self.costs.memory_price * self.costs.state_per_weight
            if trained:
                same = [axis for axis, placement in placements.items() if placement == SAME]
                result[number] += self.sum_seconds(held, same) / self.costs.num_micro_batch
        return result

    def sum_seconds(self, num_bytes: float, axes: Sequence[str]) -> float:
        """Seconds to all-reduce gradients over all places that differ along these axes: one ring,
        as slow as the slowest of its links.
        """
        size = prod(self.grid.size(axis) for axis in axes)
        if size == 1:
            return 0.0
        return 2 * num_bytes * (size - 1) / size / min(self.costs.rate(axis) for axis in axes)

    # ---- redistribution

    def reads(self, read: Read, states: Sequence[Sequence[State]]) -> list[tuple[list[int], Array]]:
        """(positions, costs) of all redistributions of one value. `states`: the choices of its
        producer, which is position 0, and of its readers.
        """
        axes = tuple(states[0][0])
        placements = []
        for state in states[0]:
            placements.append(tuple(output_of(each, read.value[1]) for each in state.values()))
        source = _Source(
            tuple(placements),
            axes,
            float(numel_bytes(read.value, self.shapes)),
            read.producer in self.space.program.gradients,
            read.producer.op == "get_attr",
        )
        # by reader, for each input that reads the value: how it must lie, for each of its choices
        uses: dict[int, list[list[Placements]]] = {}
        for reader, slot in read.slots:
            needed = []
            for state in states[reader + 1]:
                needed.append(tuple(each.inputs[slot] for each in state.values()))  # type: ignore[union-attr]
            uses.setdefault(reader + 1, []).append(needed)
        num_states = {reader: len(found[0]) for reader, found in uses.items()}
        listed: list[list[tuple[int, Sequence[Placements]]]] = []
        for group in _grouped(num_states, MOST_ENTRIES // max(len(placements), 1)):
            listed.append([(reader, each) for reader in group for each in uses[reader]])
        for placement in read.wanted:
            listed.append([(0, [(placement,) * len(axes)])])
        tables = [self._table(source, each, num_states) for each in listed]
        return [table for table in tables if table is not None]

    def _table(
        self,
        source: _Source,
        uses: Sequence[tuple[int, Sequence[Placements]]],
        num_states: Mapping[int, int],
    ) -> tuple[list[int], Array] | None:
        """Costs for some readers: one redistribution for each different layout that they need."""
        distinct = tuple(dict.fromkeys(target for _, targets in uses for target in targets))
        per_byte, latency = self._between(source, distinct)
        costs = per_byte * source.num_bytes + latency  # [sources, distinct targets]
        if not costs.any():
            return None
        variables = [0, *dict.fromkeys(reader for reader, _ in uses if reader)]
        numbers = {target: number for number, target in enumerate(distinct)}
        sizes = [len(source.placements), *(num_states[reader] for reader in variables[1:])]
        total = np.zeros(sizes)
        before: list[npt.NDArray[np.intp]] = []
        for reader, targets in uses:
            shape = [1] * len(variables)
            shape[variables.index(reader)] = len(targets)
            at = np.broadcast_to(
                np.array([numbers[target] for target in targets]).reshape(shape), [1, *sizes[1:]]
            )
            term = costs[:, at[0]]
            for earlier in before:
                term = np.where(earlier == at, 0.0, term)  # one redistribution serves both
            before.append(at)
            total = total + term
        return variables, total

    def _between(self, source: _Source, targets: tuple[Placements, ...]) -> tuple[Array, Array]:
        """[sources, targets]: seconds for one byte, and seconds whatever the size."""
        always_plain = source.is_parameter or not self.costs.is_counted
        key = (source.placements, targets, source.axes, source.gradient, always_plain)
        if key not in self._unit_costs:
            sizes = tuple(self.grid.size(axis) for axis in source.axes)
            rates = [self.costs.rate(axis) for axis in source.axes]
            per_byte = np.zeros((len(source.placements), len(targets)))
            latency = np.zeros((len(source.placements), len(targets)))
            for i, before in enumerate(source.placements):
                for j, after in enumerate(targets):
                    sent = sent_bytes(1.0, before, after, sizes, source.gradient, always_plain)
                    per_byte[i, j] = sum(
                        number / rate for number, rate in zip(sent, rates, strict=True)
                    )
                    if any(sent):
                        latency[i, j] = self.costs.latency_s * (1 + source.gradient)
            self._unit_costs[key] = (per_byte, latency)
        return self._unit_costs[key]


def _grouped(num_states: Mapping[int, int], most_entries: int) -> list[list[int]]:
    """Readers in groups, each of which fits one table."""
    groups: list[list[int]] = []
    for reader in num_states:
        last = groups[-1] if groups else []
        num_entries = prod(num_states[one] for one in (*last, reader))
        if last and len(last) < MOST_SHARING and num_entries <= most_entries:
            last.append(reader)
        else:
            groups.append([reader])
    return groups


@lru_cache(maxsize=65536)
def largest_share(count: int, sizes: tuple[int, ...]) -> float:
    """Largest fraction of so many granules on one device, cut by one axis after the other."""
    *_, left = accumulate(sizes, lambda held, size: ceil(held / size), initial=count)
    return left / count if count else 1.0
