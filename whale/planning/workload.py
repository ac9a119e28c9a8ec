"""What a mini-batch asks of a device: time and memory of every stage, as functions of the samples of a micro-batch.

Both are taken to be affine in the samples: from the cost model at two sizes, and from what autograd really saves.

    seconds(m) = fixed + m * per sample          forward, and backward where there is one
    bytes(m)   = static + in flight * (fixed + m * per sample)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch.fx import Node

from whale.capture.graph import CapturedGraph
from whale.cluster.cluster import DeviceKind
from whale.planning.plan import DeviceMemory
from whale.planning.shares import Load
from whale.planning.stages import StageSlice
from whale.profiling.costs import BACKWARD_PER_FORWARD, NodeCost, node_costs
from whale.profiling.saved import Kept, Saved, saved_for_backward

ADAM_STATE = 2.0
"""optimizer state in units of the parameters' bytes, where the optimizer is not known: Adam's two averages"""
WORKING_COPIES = 2
"""while an operation runs backward there are a gradient that comes in and one that goes out, about as large as its result"""


@dataclass(frozen=True)
class Work:
    """Time on any kind of device, before its rates are known; affine in the samples."""

    fixed_flop: float
    fixed_moved_bytes: float
    sample_flop: float
    sample_moved_bytes: float

    def load(self, kind: DeviceKind, dtype: str) -> Load:
        rate = kind.rate(dtype)
        return Load(
            sample_s=self.sample_flop / rate + self.sample_moved_bytes / kind.bytes_per_s,
            fixed_s=self.fixed_flop / rate + self.fixed_moved_bytes / kind.bytes_per_s,
        )


@dataclass(frozen=True)
class Workload:
    """One captured graph with a mini-batch of one size."""

    captured: CapturedGraph
    batch_size: int
    gradients: frozenset[Node]
    """values that carry a gradient"""
    optimizer_ratio: float
    """bytes of optimizer state for each byte of trainable parameter"""

    @cached_property
    def costs(self) -> dict[Node, NodeCost]:
        """Of the whole mini-batch."""
        return node_costs(self.captured, self.batch_size)

    @cached_property
    def _costs_of_one(self) -> dict[Node, NodeCost]:
        return self.costs if self.batch_size == 1 else node_costs(self.captured, 1)

    @cached_property
    def saved(self) -> Saved:
        return saved_for_backward(self.captured, self.batch_size)

    def work(self, operations: Iterable[Node]) -> Work:
        """Forward and backward of these operations."""
        whole_flop = whole_moved = one_flop = one_moved = 0.0
        for node in operations:
            times = 1.0 + (BACKWARD_PER_FORWARD if node in self.gradients else 0.0)
            whole_flop += times * self.costs[node].flop
            whole_moved += times * self.costs[node].moved_bytes
            one_flop += times * self._costs_of_one[node].flop
            one_moved += times * self._costs_of_one[node].moved_bytes
        if self.batch_size == 1:
            return Work(0.0, 0.0, whole_flop, whole_moved)
        sample_flop = (whole_flop - one_flop) / (self.batch_size - 1)
        sample_moved = (whole_moved - one_moved) / (self.batch_size - 1)
        return Work(max(0.0, one_flop - sample_flop), max(0.0, one_moved - sample_moved), sample_flop, sample_moved)

    def memory(self, slices: Sequence[StageSlice], crossings: Sequence[Sequence[Node]], in_flight: Sequence[int]) -> DeviceMemory:
        """Of a device that runs these stages; capacity is left at 0. `crossings[i]`: what stage i receives and sends."""
        names = {str(node.target) for part in slices for node in part.state}
        states = [self.captured.state[name] for name in sorted(names)]
        parameters = sum(state.num_bytes for state in states if state.kind == "parameter")
        trainable = sum(state.num_bytes for state in states if state.kind == "parameter" and state.trainable)
        buffers = sum(state.num_bytes for state in states if state.kind != "parameter")
        fixed, per_sample, largest = 0, 0.0, 0.0
        for part, crossing, flying in zip(slices, crossings, in_flight, strict=True):
            kept = self.saved.total(part.operations, crossing)
            fixed += flying * kept.fixed_bytes
            per_sample += flying * kept.sample_bytes
            differentiable = [self.costs[node].output_bytes for node in part.operations if node in self.gradients]
            largest = max(largest, max(differentiable, default=0) / self.batch_size)
        return DeviceMemory(
            parameter_bytes=parameters,
            gradient_bytes=trainable,
            optimizer_bytes=round(self.optimizer_ratio * trainable),
            buffer_bytes=buffers + self.batch_bytes,
            fixed_bytes=fixed,
            sample_bytes=per_sample + WORKING_COPIES * largest,
            capacity_bytes=0,
        )

    @cached_property
    def batch_bytes(self) -> int:
        """Of the whole mini-batch, which every device gets."""
        return sum(self.costs[node].output_bytes for node in self.captured.graph.nodes if node.op == "placeholder")

    def kept_by_operation(self, operations: Sequence[Node]) -> list[Kept]:
        """What each operation adds to what those before it keep."""
        seen: set[int] = set()
        found = []
        for node in operations:
            new = self.saved.of_node.get(node, frozenset()) - seen
            seen |= new
            found.append(Kept(sum(self.saved.kept[i].sample_bytes for i in new), sum(self.saved.kept[i].fixed_bytes for i in new)))
        return found

    def static_by_operation(self, operations: Sequence[Node], names_behind: Callable[[Node], Iterable[str]]) -> list[float]:
        """Bytes of the parameters that each operation is the first to read, with their gradients and optimizer state."""
        seen: set[str] = set()
        found = []
        for node in operations:
            new = set(names_behind(node)) - seen
            seen |= new
            states = [self.captured.state[name] for name in new]
            found.append(sum(state.num_bytes * (2.0 + self.optimizer_ratio if state.trainable else 1.0) for state in states))
        return found
