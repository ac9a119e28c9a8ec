"""Workspace of a stage on a grid, beside what it saves for backward: gradients on their way, and
what exchanges hold for a moment.

As `costs/backward_workspace.py`, with the sizes that tensors have on one device. While operation i
is differentiated there are

    its own work       saved(i) + pending(i) + COPIES of the largest of its result and its inputs
                       + gradients of gathered weights                                           (1)
    its inputs         saved(i - 1) + pending(i) + gradients of those that were exchanged for it
                       + what the exchanges of these hold: what leaves, what arrives, the result.
                       A linear layer does this while it still has what it saved
                       (`lowering/sharded_linear.py`)                                            (2)
    gathered weights   the same. Their gradients travel under the operations before, until those
                       of the weight before are there (`lowering/overlap.py`)                    (3)

and in its forward saved(i - 1) + its inputs as they were + what their exchanges hold.           (4)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch.fx import Node

from whale.costs.backward_workspace import COPIES, lifetimes
from whale.costs.saved import Saved
from whale.plans.layout import Layout
from whale.plans.sharding import Sharding
from whale.scheduling.memory import NOTHING, Bytes, total
from whale.sharding.dims import Value, tensor_of, value_of
from whale.sharding.emit import is_alike
from whale.sharding.options import Placement
from whale.sharding.redistribution import plan_redistribution
from whale.sharding.redistribution_steps import most_held
from whale.sharding.space import Space, layout_of


@dataclass(frozen=True)
class ValueExchange:
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
    """the result may be saved for backward"""
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
        self.chosen = space.chosen(sharding)
        self._layouts: dict[Value, Layout] = {}
        self.changes = self._changes()
        self.workspaces: dict[bool, Bytes] = {}
        """what `grid_workspace` found where gathered tensors are saved or not, and nothing is
        recomputed
        """

    def lies(self, value: Value) -> Layout:
        """Layout of a value as it is made, received or stored."""
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
        """Largest fraction of `value` that any device holds."""
        layout = self.lies(value)
        return layout.largest_count(self.grid) / max(1, prod(layout.shape))

    def size(self, value: Value, count: int) -> Bytes:
        """Bytes of `count` elements of a value."""
        num_bytes = count * tensor_of(value).dtype.itemsize
        has_samples = any(isinstance(size, torch.SymInt) for size in tensor_of(value).shape)
        if has_samples:
            return Bytes(num_bytes / self.num_samples)
        return Bytes(fixed_bytes=num_bytes)

    def at(self, size: Bytes) -> float:
        """Bytes for the samples of this stage."""
        return size.of(self.num_samples)

    def needed(self, node: Node, slot: int, value: Value) -> Layout:
        return self._layout(
            value, {axis: option.inputs[slot] for axis, option in self.chosen[node].items()}
        )

    def _changes(self) -> dict[int, list[ValueExchange]]:
        """Exchanges of each operation that is the first to read their result; those of the results
        of the stage stand behind all operations.
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
        fused = set()
        for key, (_, reader, slot) in found.items():
            if num_readers[key] == 1 and self._is_fused(key, reader, slot):
                fused.add(reader)
        changes: dict[int, list[ValueExchange]] = {}
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

    def _change(self, value: Value, target: Layout, is_fused: bool) -> ValueExchange:
        source = self.lies(value)
        gradient = value[0] in self.space.program.gradients
        places = range(self.grid.num_devices) if self.grid.work or self.grid.memory else (0,)
        plans = [
            plan_redistribution(source, target, self.grid, place, backward=gradient)
            for place in places
        ]
        return ValueExchange(
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


def grid_workspace(
    device: OnDevice, saved: Saved, parts: Mapping[int, float], keeps_gathered: bool
) -> Bytes:
    """The largest of lines (1) to (4), less all that is saved. `parts`: storage that is saved ->
    the fraction of it that this device saves.
    """
    operations = device.operations
    gradients = device.space.program.gradients
    saved_until, pending = _curves(device, saved, parts, keeps_gathered)
    all_saved = saved_until[-1] if saved_until else NOTHING
    outputs = device.changes.get(len(operations), ())
    moments = [
        all_saved + total(each.before + each.there for each in outputs),
        all_saved + total(each.after + each.back for each in outputs),
    ]
    travelling = NOTHING
    for index in reversed(range(len(operations))):
        node = operations[index]
        changes = device.changes.get(index, ())
        saved_before = saved_until[index - 1] if index else NOTHING
        held = saved_until[index] + pending[index]
        left = saved_before + pending[index]
        moments.append(saved_before + total(each.before + each.there for each in changes))  # (4)
        if node not in gradients:
            continue
        own, largest = _largest(device, node)
        of_weights = [each for each in changes if each.is_weight]
        of_inputs = [each for each in changes if not each.is_weight]
        gathered_again = NOTHING
        if not keeps_gathered:
            gathered_again = total(each.there for each in changes if each.is_gather)
        weight_gradients = total(each.after for each in of_weights)
        # (1)
        moments.append(held + COPIES * largest + weight_gradients + gathered_again + travelling)
        leaving = total(each.after + each.back for each in of_inputs)
        if any(each.is_fused for each in of_inputs):
            fused = total(each.after + each.back for each in of_weights if each.is_fused)
            left_then = held + own + fused + gathered_again
        else:
            left_then = left
        moments.append(left_then + leaving + travelling)  # (2)
        if of_weights:
            travelling = total(each.after + each.back for each in of_weights if not each.is_fused)
            moments.append(left + largest + travelling)  # (3)
    most = max(moments, key=device.at) - all_saved
    return Bytes(most.sample_bytes, round(most.fixed_bytes))


def most_exchanged(device: OnDevice) -> Bytes:
    """The largest exchange, with what it is given: where regions are recomputed, and nothing is
    freed operation by operation.
    """
    found = [NOTHING]
    for changes in device.changes.values():
        for each in changes:
            found.append(each.before + each.there)
            found.append(each.after + each.back)
    most = max(found, key=device.at)
    return Bytes(most.sample_bytes, round(most.fixed_bytes))


def _curves(
    device: OnDevice, saved: Saved, parts: Mapping[int, float], keeps_gathered: bool
) -> tuple[list[Bytes], list[Bytes]]:
    """saved(i) and pending(i) of every operation, as `costs/backward_workspace.py` defines them, on
    this device.
    """
    program = device.space.program
    crossing = (*program.received, *program.sent)
    times = lifetimes(device.operations, program.gradients, saved, crossing)

    def saved_size(storage: int) -> Bytes:
        return parts.get(storage, 0.0) * saved.storages[storage]

    def gradient_size(storage: int) -> Bytes:
        maker = device.operations[times.made.get(storage, 0)]
        part = device.part((maker, 0)) if maker in device.chosen else 1.0
        return Bytes(part * saved.storages[storage].sample_bytes)

    saved_until = times.saved(saved_size, NOTHING)
    if keeps_gathered:
        copies = NOTHING
        for index, node in enumerate(device.operations):
            if node in program.gradients:
                changes = device.changes.get(index, ())
                copies = copies + total(each.after for each in changes if each.is_gather)
            saved_until[index] = saved_until[index] + copies
    return saved_until, times.pending(gradient_size, NOTHING)


def _largest(device: OnDevice, node: Node) -> tuple[Bytes, Bytes]:
    """(the largest of its results, the largest of these and of the inputs that get a gradient)"""
    if node not in device.chosen:
        return NOTHING, NOTHING
    results = []
    for value in device.space.outputs_of(node):
        results.append(device.size(value, device.lies(value).largest_count(device.grid)))
    own = max(results, key=device.at)
    found = [own]
    for slot, value in enumerate(device.space.inputs_of(node)):
        if value[0] in device.space.program.gradients and value[0].op == "call_function":
            needed = device.needed(node, slot, value)
            found.append(device.size(value, needed.largest_count(device.grid)))
    return own, max(found, key=device.at)
