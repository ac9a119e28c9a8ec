"""All-reduce of gradients over the holders of each parameter, bucket by bucket, while the last
backward still runs.

Parameters are grouped by their holders (the set of ranks), and put into buckets in the order in
which backward reaches them. A bucket goes out when all its gradients are final; buckets of one
group always go in the same order, so that ranks meet in the same call. Nothing hides the last
bucket, so a small model gets smaller buckets than the config allows.

Holders that are CPU ranks of one host all-reduce through memory instead, at the end of the step: on
the core that would run the backward, so that there is nothing to hide, and faster: 28 MB between 2
ranks 9.5 instead of 16 to 23 ms (`distributed/same_host_collectives.py`). They go through their
groups in one order, that of the ranks in them, so that no two wait for each other.

Model replicas that are not alike have groups that overlap in many ways: {0, 3}, {0, 4}, {1, 4} ...
Where messages have no tags (GPUs) all ranks then send out their buckets in one order over all
groups, that of backward (`order`): two ranks that meet in two groups would otherwise wait for each
other. Replicas may also cut a parameter differently. Its pieces then go into the buckets of their
own holders, and back into the gradient when the sums are there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from whale.distributed.platform import Platform
from whale.distributed.ranks import Ranks
from whale.distributed.transport import Transport
from whale.plans.buckets import bucket_size
from whale.runtime.block_gradients import BlockGradients
from whale.runtime.held import HeldParameter, Unit


@dataclass
class Bucket:
    units: list[Unit]
    group: dist.ProcessGroup | None
    buffer: Tensor
    views: list[Tensor]
    waiting: int = 0
    work: dist.Work | None = None
    is_full: bool = False
    """to be summed through memory at the end of the step"""


@dataclass
class _Group:
    buckets: list[Bucket]
    through_memory: bool


class GradientSynchroniser:
    """Watches the gradients of one rank's parameters and sums them with the other holders."""

    def __init__(
        self,
        held: Sequence[HeldParameter],
        ranks: Ranks,
        bucket_bytes: int,
        transport: Transport | None,
        platform: Platform,
        blocks: BlockGradients | None = None,
        order: Mapping[str, int] | None = None,
    ) -> None:
        """`transport`: all-reduces go through memory where it reaches all holders that way.
        `blocks`: reduces gradients of parameters that are cut; only what several ranks hold alike
        is all-reduced after it. `order`: of parameters, the same on all ranks, in which buckets of
        all groups go out; None: each group goes by itself.
        """
        self.held = held
        self._blocks = blocks
        self._closed: list[int] = []
        """stages whose parameters wait for the sums of blocks"""
        self._transport = transport
        self._platform = platform
        self._groups: dict[tuple[int, ...], _Group] = {}
        self._buckets_of: dict[str, list[Bucket]] = {}
        self._pending: dict[str, set[int]] = {}
        self._stage: int | None = None
        self._trained: Collection[str] = ()
        self._untrained: list[Tensor] = []
        shared: dict[tuple[int, ...], list[Unit]] = {}
        for parameter in held:
            for unit in parameter.units:
                if len(unit.ranks) > 1:
                    shared.setdefault(unit.ranks, []).append(unit)
        for key, units in shared.items():
            through_memory = transport is not None and transport.reaches_through_memory(key)
            buckets = [self._bucket(part, ranks.group(key)) for part in _cut(units, bucket_bytes)]
            self._groups[key] = _Group(buckets, through_memory)
        for parameter in held:
            if parameter.name in self._buckets_of:
                parameter.tensor.register_post_accumulate_grad_hook(
                    _on_accumulated(weakref.ref(self), parameter)
                )
        self._queues = _queues(self._groups, order)
        self._queues_of: dict[str, list[_Queue]] = {}
        """those that wait for the gradient of a parameter"""
        for queue in self._queues:
            for name in dict.fromkeys(unit.name for each in queue.buckets for unit in each.units):
                self._queues_of.setdefault(name, []).append(queue)

    def _bucket(self, units: list[Unit], group: dist.ProcessGroup | None) -> Bucket:
        sizes = [unit.num_entries for unit in units]
        buffer = torch.zeros(sum(sizes), dtype=units[0].tensor.dtype, device=units[0].tensor.device)
        views = []
        for view, unit in zip(buffer.split(sizes), units, strict=True):
            views.append(_laid_out_like(view, unit.tensor) if unit.cells is None else view)
        bucket = Bucket(units, group, buffer, views)
        for unit in units:
            self._buckets_of.setdefault(unit.name, []).append(bucket)
        return bucket

    def begin(self, trained: Collection[str]) -> None:
        """Start of a step in which the loss reaches the parameters `trained`, the same on all
        ranks; the others get no gradient.
        """
        self._trained = trained
        self._untrained = [each.tensor for each in self.held if each.name not in trained]
        for parameter in self.held:
            parameter.tensor.grad = None
        for queue in self._queues:
            queue.num_sent = 0
        for group in self._groups.values():
            for bucket in group.buckets:
                bucket.waiting = sum(unit.name in trained for unit in bucket.units)
                bucket.work = None
                bucket.is_full = False
        self._pending.clear()
        for parameter in self.held:
            if parameter.name in self._buckets_of and parameter.name in trained:
                self._pending[parameter.name] = set(parameter.stages)
        self._stage = None
        self._closed.clear()
        if self._blocks is not None:
            self._blocks.begin(trained)

    def begin_backward(self, stage: int, is_last: bool) -> None:
        """A whole backward begins. `is_last`: it is the last one of this stage, and what it
        accumulates is final for the stage.
        """
        if is_last:
            self._stage = stage
        if self._blocks is not None:
            self._blocks.begin_backward(stage, is_last)

    def end_backward(self, stage: int, is_second_half: bool = False) -> None:
        """A backward is over, or the weight gradients that it had put off."""
        if self._blocks is not None:
            self._blocks.end_backward(stage, is_second_half)

    def close_stage(self, stage: int) -> None:
        """SYNCHRONISE: parameters of the stage that got no gradient in its last backward are final
        too.
        """
        self._stage = None
        # a later stage that only compares their results, or sorts them, sends zeros back: an
        # optimizer with weight decay or momentum would change what local training leaves alone
        for tensor in self._untrained:
            tensor.grad = None
        self._platform.close_stage(stage)
        if self._blocks is None:
            self._close_parameters(stage)
            return
        self._blocks.close_stage(stage)
        self._closed.append(stage)

    def _close_parameters(self, stage: int) -> None:
        for parameter in self.held:
            if stage in self._pending.get(parameter.name, ()):
                self._final(parameter, stage)

    def finish(self) -> None:
        """Waits for all buckets; every parameter's `.grad` is then the sum over its holders."""
        if self._blocks is not None:
            self._blocks.finish()
            for stage in self._closed:
                self._close_parameters(stage)
        assert not any(self._pending.values()), "a stage was not closed"
        for ranks, group in sorted(self._groups.items()):
            for bucket in group.buckets:
                if bucket.is_full and self._transport is not None:
                    self._transport.collectives.all_reduce(bucket.buffer, ranks)
                elif bucket.work is not None:
                    bucket.work.wait()
                self._put_back(bucket)
        self._platform.wait_for_all_reduces()

    def _accumulated(self, parameter: HeldParameter) -> None:
        if self._stage is not None and self._stage in self._pending.get(parameter.name, ()):
            self._final(parameter, self._stage)

    def _final(self, parameter: HeldParameter, stage: int) -> None:
        pending = self._pending[parameter.name]
        pending.discard(stage)
        if pending:
            return
        for bucket in self._buckets_of[parameter.name]:
            bucket.waiting -= 1
        for queue in self._queues_of[parameter.name]:
            while queue.num_sent < len(queue.buckets) and queue.next_bucket.waiting == 0:
                self._launch(queue.next_bucket, queue.through_memory[queue.num_sent])
                queue.num_sent += 1

    def _launch(self, bucket: Bucket, through_memory: bool) -> None:
        """Sends out a bucket whose gradients are final."""
        if not any(unit.name in self._trained for unit in bucket.units):
            return
        with torch.no_grad():
            for unit, view in zip(bucket.units, bucket.views, strict=True):
                if unit.cells is not None:
                    self._fill_from_pieces(unit, view)
                    continue
                gradient = unit.tensor.grad
                if gradient is None:
                    view.zero_()
                else:
                    view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
                if unit.name in self._trained:
                    unit.tensor.grad = view
        bucket.is_full = through_memory
        if not through_memory:
            bucket.work = dist.all_reduce(bucket.buffer, group=bucket.group, async_op=True)

    def _fill_from_pieces(self, unit: Unit, view: Tensor) -> None:
        """Copies the piece of a gradient into its place in a bucket."""
        if unit.name not in self._trained:
            view.zero_()
            return
        gradient = unit.tensor.grad
        if gradient is None:
            gradient = torch.zeros_like(unit.tensor)
        elif gradient.is_sparse:
            gradient = gradient.to_dense()
        unit.tensor.grad = gradient
        torch.cat([part.reshape(-1) for part in unit.parts(gradient)], out=view)

    def _put_back(self, bucket: Bucket) -> None:
        """Copies the sums of pieces into their gradients."""
        if not bucket.is_full and bucket.work is None:
            return
        with torch.no_grad():
            for unit, view in zip(bucket.units, bucket.views, strict=True):
                gradient = unit.tensor.grad
                if unit.cells is None or unit.name not in self._trained or gradient is None:
                    continue
                parts = unit.parts(gradient)
                for part, summed in zip(
                    parts, view.split([part.numel() for part in parts]), strict=True
                ):
                    part.copy_(summed.view_as(part))


def _laid_out_like(entries: Tensor, tensor: Tensor) -> Tensor:
    """A view of these entries with the shape and strides of a tensor.

    Fused optimizers go through memory entry by entry: a gradient with other strides than its
    parameter (`channels_last`) would update other entries.
    """
    strides = torch.empty_like(tensor, device="meta").stride()  # dense, also where `tensor` is not
    return entries.as_strided(tensor.shape, strides)


@dataclass
class _Queue:
    """Buckets that go out one after the other."""

    buckets: list[Bucket]
    through_memory: list[bool]
    num_sent: int = 0

    @property
    def next_bucket(self) -> Bucket:
        return self.buckets[self.num_sent]


def _queues(
    groups: Mapping[tuple[int, ...], _Group], order: Mapping[str, int] | None
) -> list[_Queue]:
    """One queue for each group, or one for all of them in the given order of parameters."""
    if order is None:
        return [
            _Queue(group.buckets, [group.through_memory] * len(group.buckets))
            for group in groups.values()
        ]
    keyed = []
    for ranks, group in groups.items():
        for number, bucket in enumerate(group.buckets):
            last = max(order[unit.name] for unit in bucket.units)
            keyed.append(((last, ranks, number), bucket, group.through_memory))
    keyed.sort(key=lambda each: each[0])
    return [_Queue([bucket for _, bucket, _ in keyed], [memory for _, _, memory in keyed])]


def _on_accumulated(
    synchroniser: weakref.ref[GradientSynchroniser], parameter: HeldParameter
) -> Callable[[Tensor], None]:
    """A hook that does not keep the synchroniser alive: the collector does not see what hooks of a
    tensor hold.
    """

    def accumulated(_: Tensor) -> None:
        if (own := synchroniser()) is not None:
            own._accumulated(parameter)

    return accumulated


def _cut(units: Sequence[Unit], bucket_bytes: int) -> list[list[Unit]]:
    """Buckets of at most `bucket_bytes` (or one unit), of one dtype each, in order; smaller ones of
    a small model.
    """
    sizes = [unit.num_entries * unit.tensor.element_size() for unit in units]
    bucket_bytes = bucket_size(sum(sizes), bucket_bytes)
    buckets: list[list[Unit]] = []
    size = 0
    for unit, num_bytes in zip(units, sizes, strict=True):
        fits = (
            buckets
            and buckets[-1][0].tensor.dtype == unit.tensor.dtype
            and size + num_bytes <= bucket_bytes
        )
        if not fits:
            buckets.append([])
            size = 0
        buckets[-1].append(unit)
        size += num_bytes
    return buckets
