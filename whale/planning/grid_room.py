"""Room that a stage on a grid works in, beside what it keeps for backward: gradients on their way,
and what exchanges hold for a moment.

As `costs/backward_room.py`, with the sizes that tensors have on one device. While operation i
is differentiated there are

    its own work       kept(i) + pending(i) + COPIES of the largest of its result and its inputs + gradients of gathered weights       (1)
    its inputs         kept(i - 1) + pending(i) + gradients of those that were exchanged for it + what the exchanges of these hold:
                       what leaves, what arrives, the result. A linear layer does this while it still has what it kept
                       (`lowering/sharded_linear.py`)                                                                                   (2)
    gathered weights   the same. Their gradients travel under the operations before, until those of the weight before are there
                       (`lowering/overlap.py`)                                                                                          (3)

and in its forward kept(i - 1) + its inputs as they were + what their exchanges hold.                                                   (4)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch.fx import Node

from whale.costs.backward_room import COPIES
from whale.costs.saved import Kept, Saved
from whale.plans.grid import AXES
from whale.plans.layout import Layout
from whale.plans.sharding import Sharding
from whale.sharding.describe import layout_of
from whale.sharding.dims import Value, tensor_of, value_of
from whale.sharding.emit import is_alike
from whale.sharding.operation import Option, Placement
from whale.sharding.redistribution import plan_redistribution
from whale.sharding.redistribution_steps import most_held
from whale.sharding.space import Space

Bytes = npt.NDArray[np.float64]
"""[whatever the samples, for each sample]"""
NOTHING: Bytes = np.zeros(2)


@dataclass(frozen=True)
class Change:
    """An exchange of one value, on the device that has most of it."""

    before: Bytes
    """nothing where it is a weight or a part of the batch, which are there anyway"""
    after: Bytes
    there: Bytes
    """held at most beside the value, the result among it"""
    back: Bytes
    """the same beside its gradient"""
    is_weight: bool
    is_gather: bool
    """backward may keep the result"""
    is_fused: bool
    """into the linear layer that reads it"""


class OnDevice:
    """Sizes of the values of a stage on one device of a grid."""

    def __init__(self, space: Space, sharding: Sharding, num_samples: int) -> None:
        self.space = space
        self.sharding = sharding
        self.grid = sharding.grid
        self.num_samples = num_samples
        self.operations = space.program.operations
        nodes = list(space.program.captured.graph.nodes)
        self.chosen: dict[Node, dict[str, Option]] = {}
        for index, names in sharding.choices.items():
            known = {option.name: option for option in space.options[nodes[index]]}
            self.chosen[nodes[index]] = {
                axis: known[name] for axis, name in zip(AXES, names, strict=True) if name
            }
        self._layouts: dict[Value, Layout] = {}
        self.changes = self._changes()
        self.rooms: dict[bool, Kept] = {}
        """what `room_on_grid` found, where gathered tensors are kept or not, and nothing is
        computed again
        """

    def lies(self, value: Value) -> Layout:
        """As it is made, received or stored."""
        if value not in self._layouts:
            node, number = value
            placements: dict[str, Placement] = dict.fromkeys(
                self.grid.axes, self.space.fixed_source(node)
            )
            if node in self.chosen:
                placements = {
                    axis: option.outputs[number] for axis, option in self.chosen[node].items()
                }
            stored = self.sharding.stored.get(str(node.target)) if node.op == "get_attr" else None
            self._layouts[value] = stored or self._layout(value, placements)
        return self._layouts[value]

    def _layout(self, value: Value, placements: Mapping[str, Placement]) -> Layout:
        return layout_of(self.space.granules.cuts(value, self.num_samples), placements)

    def part(self, value: Value) -> float:
        """Of a value, what the device that has most of it has."""
        layout = self.lies(value)
        return layout.largest_count(self.grid) / max(1, prod(layout.shape))

    def size(self, value: Value, count: int) -> Bytes:
        """Of so many of its numbers."""
        num_bytes = count * tensor_of(value).dtype.itemsize
        has_samples = any(isinstance(size, torch.SymInt) for size in tensor_of(value).shape)
        return np.array([0.0, num_bytes / self.num_samples] if has_samples else [num_bytes, 0.0])

    def needed(self, node: Node, slot: int, value: Value) -> Layout:
        return self._layout(
            value, {axis: option.inputs[slot] for axis, option in self.chosen[node].items()}
        )

    def _changes(self) -> dict[int, list[Change]]:
        """By the operation that is the first to read the result; those of results of the stage
        behind all operations.
        """
        found: dict[tuple[Value, Layout], tuple[int, Node | None, int]] = {}
        num_readers: Counter[tuple[Value, Layout]] = Counter()
        for index, node in enumerate(self.operations):
            for slot, value in enumerate(self.space.inputs_of(node)) if node in self.chosen else ():
                target = self.needed(node, slot, value)
                if not is_alike(self.lies(value), target):
                    found.setdefault((value, target), (index, node, slot))
                    num_readers[value, target] += 1
        for node, placement in self.space.wanted():
            value = value_of(node)
            target = self._layout(value, dict.fromkeys(self.grid.axes, placement))
            if isinstance(node.meta.get("val"), torch.Tensor) and not is_alike(
                self.lies(value), target
            ):
                found.setdefault((value, target), (len(self.operations), None, 0))
        fused = {
            node
            for key, (_, node, slot) in found.items()
            if self._is_fused(key, node, slot) and num_readers[key] == 1
        }
        changes: dict[int, list[Change]] = {}
        for (value, target), (index, reader, _) in found.items():
            is_fused = reader in fused and num_readers[value, target] == 1
            changes.setdefault(index, []).append(self._change(value, target, is_fused))
        return changes

    def _is_fused(self, key: tuple[Value, Layout], node: Node | None, slot: int) -> bool:
        """Whether a linear layer takes in the exchange of its input."""
        if (
            node is None
            or slot
            or node.target is not torch.ops.aten.linear.default
            or key[0][0] not in self.space.program.gradients
        ):
            return False
        return plan_redistribution(self.lies(key[0]), key[1], self.grid, 0).sends_back

    def _change(self, value: Value, target: Layout, is_fused: bool) -> Change:
        source = self.lies(value)
        gradient = value[0] in self.space.program.gradients
        places = range(self.grid.num_devices) if self.grid.work or self.grid.memory else (0,)
        plans = [
            plan_redistribution(source, target, self.grid, place, backward=gradient)
            for place in places
        ]
        return Change(
            before=self.size(value, source.largest_count(self.grid))
            if value[0].op == "call_function"
            else NOTHING,
            after=self.size(value, target.largest_count(self.grid)),
            there=self.size(value, max(most_held(plan.forward) for plan in plans)),
            back=self.size(value, max(most_held(plan.backward) for plan in plans)),
            is_weight=value[0].op == "get_attr",
            is_gather=not source.partial and bool(source.sharded - target.sharded - target.partial),
            is_fused=is_fused,
        )


def room_on_grid(
    device: OnDevice, saved: Saved, parts: Mapping[int, float], keeps_gathered: bool
) -> Kept:
    """The largest of lines (1) to (4), less all that is kept. `parts`: of each storage that is
    kept, what this device keeps of it.
    """
    operations = device.operations
    gradients = device.space.program.gradients
    let_go = _let_go(device, saved, parts, keeps_gathered)
    (begins, ends) = _waiting(device, saved)
    moments = [_sum([each.before + each.there for each in device.changes.get(len(operations), ())])]
    moments.append(
        _sum([each.after + each.back for each in device.changes.get(len(operations), ())])
    )
    freed = pending = travelling = NOTHING
    for index in reversed(range(len(operations))):
        node = operations[index]
        changes = device.changes.get(index, ())
        pending = pending - ends.get(index, NOTHING)
        there = pending - freed
        gone = pending - freed - let_go.get(index, NOTHING)
        moments.append(gone - pending + _sum([each.before + each.there for each in changes]))
        if node in gradients:
            own, largest = _largest(device, node)
            of_weights, of_inputs = (
                [each for each in changes if each.is_weight is kind] for kind in (True, False)
            )
            again = _sum([each.there for each in changes if each.is_gather and not keeps_gathered])
            moments.append(
                there
                + COPIES * largest
                + _sum([each.after for each in of_weights])
                + again
                + travelling
            )
            leaving = _sum([each.after + each.back for each in of_inputs])
            fused = _sum([each.after + each.back for each in of_weights if each.is_fused])
            is_fused = any(each.is_fused for each in of_inputs)
            moments.append(
                (there + own + fused + again if is_fused else gone) + leaving + travelling
            )
            if of_weights:
                travelling = _sum(
                    [each.after + each.back for each in of_weights if not each.is_fused]
                )
                moments.append(gone + largest + travelling)
        pending = pending + begins.get(index, NOTHING)
        freed = freed + let_go.get(index, NOTHING)
    fixed, per_sample = max(moments, key=partial(_at, device.num_samples))
    return Kept(float(per_sample), round(float(fixed)))


def most_exchanged(device: OnDevice) -> Kept:
    """Of one exchange, with what it is given: where regions are computed again, and nothing is let
    go one by one.
    """
    found = [each.before + each.there for changes in device.changes.values() for each in changes]
    found += [each.after + each.back for changes in device.changes.values() for each in changes]
    most = max(found, key=partial(_at, device.num_samples), default=NOTHING)
    return Kept(float(most[1]), round(float(most[0])))


def _let_go(
    device: OnDevice, saved: Saved, parts: Mapping[int, float], keeps_gathered: bool
) -> dict[int, Bytes]:
    """By operation: what is not kept any more once it is differentiated. What crosses stages stays
    until the backward is over.
    """
    program = device.space.program
    seen = {
        storage
        for node in (*program.received, *program.sent)
        for storage in saved.result_of_node.get(node, ())
    }
    found: dict[int, Bytes] = {}
    for index, node in enumerate(device.operations):
        new = saved.of_node.get(node, frozenset()) - seen
        seen |= new
        for storage in new:
            kept = saved.kept[storage]
            size = np.array([kept.fixed_bytes, kept.sample_bytes])
            found[index] = found.get(index, NOTHING) + parts.get(storage, 0.0) * size
        if node in program.gradients and keeps_gathered:
            copies = _sum([each.after for each in device.changes.get(index, ()) if each.is_gather])
            found[index] = found.get(index, NOTHING) + copies
    return found


def _waiting(device: OnDevice, saved: Saved) -> tuple[dict[int, Bytes], dict[int, Bytes]]:
    """Gradients that are there once an operation is differentiated, until the one that made the
    value: by where they begin and end.
    """
    gradients = device.space.program.gradients
    place = {node: index for index, node in enumerate(device.operations)}
    made: dict[int, int] = {}
    last_read: dict[int, int] = {}
    for index, node in enumerate(device.operations):
        for storage in saved.result_of_node.get(node, ()):
            made.setdefault(storage, index)
        for source in node.all_input_nodes if node in gradients else ():
            if source in place and source in gradients:
                last_read |= dict.fromkeys(saved.result_of_node.get(source, ()), index)
    begins: dict[int, Bytes] = {}
    ends: dict[int, Bytes] = {}
    for storage, index in last_read.items():
        maker = device.operations[made.get(storage, 0)]
        part = device.part((maker, 0)) if maker in device.chosen else 1.0
        size = np.array([0.0, part * saved.kept[storage].sample_bytes])
        begins[index] = begins.get(index, NOTHING) + size
        ends[made.get(storage, 0)] = ends.get(made.get(storage, 0), NOTHING) + size
    return begins, ends


def _largest(device: OnDevice, node: Node) -> tuple[Bytes, Bytes]:
    """(the largest of its results, the largest of these and of the inputs that get a gradient)"""
    if node not in device.chosen:
        return NOTHING, NOTHING
    size = partial(_at, device.num_samples)
    own = max(
        (
            device.size(value, device.lies(value).largest_count(device.grid))
            for value in device.space.outputs_of(node)
        ),
        key=size,
    )
    found = [own]
    for slot, value in enumerate(device.space.inputs_of(node)):
        if value[0] in device.space.program.gradients and value[0].op == "call_function":
            found.append(
                device.size(value, device.needed(node, slot, value).largest_count(device.grid))
            )
    return own, max(found, key=size)


def _at(num_samples: int, size: Bytes) -> float:
    return float(size[0] + num_samples * size[1])


def _sum(found: Sequence[Bytes]) -> Bytes:
    return np.sum(found, axis=0) if len(found) else NOTHING
