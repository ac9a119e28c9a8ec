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
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from whale.compat import foreach_mul_
from whale.distributed.platform import Platform
from whale.distributed.ranks import Ranks
from whale.distributed.transport import Transport
from whale.plans.buckets import bucket_size
from whale.runtime.block_gradients import BlockGradients

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Held:
    """A trainable parameter on this rank."""

    name: str
    tensor: torch.nn.Parameter
    ranks: tuple[int, ...]
    """all holders, this rank included"""
    stages: tuple[int, ...]
    """stages of this rank that use it"""


@dataclass
class Bucket:
    parameters: list[Held]
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
    num_sent: int = 0


class GradientSynchroniser:
    """Watches the gradients of one rank's parameters and sums them with the other holders."""

    def __init__(
        self,
        held: Sequence[Held],
        ranks: Ranks,
        bucket_bytes: int,
        transport: Transport | None,
        platform: Platform,
        blocks: BlockGradients | None = None,
    ) -> None:
        """`transport`: all-reduces go through memory where it reaches all holders that way.
        `blocks`: reduces gradients of parameters that are cut; only what several ranks hold alike
        is all-reduced after it.
        """
        self.held = held
        self._blocks = blocks
        self._closed: list[int] = []
        """stages whose parameters wait for the sums of blocks"""
        self._transport = transport
        self._platform = platform
        self._groups: dict[tuple[int, ...], _Group] = {}
        self._bucket_of: dict[str, Bucket] = {}
        self._pending: dict[str, set[int]] = {}
        self._stage: int | None = None
        self._trained: Collection[str] = ()
        shared: dict[tuple[int, ...], list[Held]] = {}
        for parameter in held:
            if len(parameter.ranks) > 1:
                shared.setdefault(parameter.ranks, []).append(parameter)
        for key, parameters in shared.items():
            through_memory = transport is not None and transport.reaches_through_memory(key)
            buckets = [
                self._bucket(part, ranks.group(key)) for part in _cut(parameters, bucket_bytes)
            ]
            self._groups[key] = _Group(buckets, through_memory)
            for parameter in parameters:
                parameter.tensor.register_post_accumulate_grad_hook(
                    _on_accumulated(weakref.ref(self), parameter)
                )

    def _bucket(self, parameters: list[Held], group: dist.ProcessGroup | None) -> Bucket:
        sizes = [p.tensor.numel() for p in parameters]
        buffer = torch.zeros(
            sum(sizes), dtype=parameters[0].tensor.dtype, device=parameters[0].tensor.device
        )
        views = [
            view.view_as(p.tensor) for view, p in zip(buffer.split(sizes), parameters, strict=True)
        ]
        bucket = Bucket(parameters, group, buffer, views)
        for p in parameters:
            self._bucket_of[p.name] = bucket
        return bucket

    def begin(self, trained: Collection[str]) -> None:
        """Start of a step in which the loss reaches the parameters `trained`, the same on all
        ranks; the others get no gradient.
        """
        self._trained = trained
        for parameter in self.held:
            parameter.tensor.grad = None
        for group in self._groups.values():
            group.num_sent = 0
            for bucket in group.buckets:
                bucket.waiting = sum(p.name in trained for p in bucket.parameters)
                bucket.work = None
                bucket.is_full = False
        self._pending = {
            p.name: set(p.stages)
            for p in self.held
            if p.name in self._bucket_of and p.name in trained
        }
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
        self._platform.wait_for_all_reduces()

    def _accumulated(self, parameter: Held) -> None:
        if self._stage is not None and self._stage in self._pending.get(parameter.name, ()):
            self._final(parameter, self._stage)

    def _final(self, parameter: Held, stage: int) -> None:
        pending = self._pending[parameter.name]
        pending.discard(stage)
        if pending:
            return
        self._bucket_of[parameter.name].waiting -= 1
        group = self._groups[parameter.ranks]
        while group.num_sent < len(group.buckets) and group.buckets[group.num_sent].waiting == 0:
            self._close(group.buckets[group.num_sent], group.through_memory)
            group.num_sent += 1

    def _close(self, bucket: Bucket, through_memory: bool) -> None:
        """Sends out a bucket whose gradients are final."""
        if not any(parameter.name in self._trained for parameter in bucket.parameters):
            return
        with torch.no_grad():
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                gradient = parameter.tensor.grad
                if gradient is None:
                    view.zero_()
                else:
                    view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
                if parameter.name in self._trained:
                    parameter.tensor.grad = view
        bucket.is_full = through_memory
        if not through_memory:
            bucket.work = dist.all_reduce(bucket.buffer, group=bucket.group, async_op=True)


def _on_accumulated(
    synchroniser: weakref.ref[GradientSynchroniser], parameter: Held
) -> Callable[[Tensor], None]:
    """A hook that does not keep the synchroniser alive: the collector does not see what hooks of a
    tensor hold.
    """

    def accumulated(_: Tensor) -> None:
        if (own := synchroniser()) is not None:
            own._accumulated(parameter)

    return accumulated


def _cut(parameters: Sequence[Held], bucket_bytes: int) -> list[list[Held]]:
    """Pieces of at most `bucket_bytes` (or one parameter), of one dtype each, in order; smaller
    ones of a small model.
    """
    total = sum(
        parameter.tensor.numel() * parameter.tensor.element_size() for parameter in parameters
    )
    bucket_bytes = bucket_size(total, bucket_bytes)
    pieces: list[list[Held]] = []
    size = 0
    for parameter in parameters:
        num_bytes = parameter.tensor.numel() * parameter.tensor.element_size()
        fits = (
            pieces
            and pieces[-1][0].tensor.dtype == parameter.tensor.dtype
            and size + num_bytes <= bucket_bytes
        )
        if not fits:
            pieces.append([])
            size = 0
        pieces[-1].append(parameter)
        size += num_bytes
    return pieces


def counted_parameters(held: Sequence[Held], rank: int) -> list[Held]:
    """Parameters with a gradient that this rank answers for in the norm of all: each counts on one
    of its holders, which share the work.

    All holders of a set of parameters have them in the same order, so they agree on who counts
    what.
    """
    num_counted: dict[
        tuple[int, ...], list[int]
    ] = {}  # numbers that each holder of these parameters counts
    found = []
    for parameter in held:
        counted = num_counted.setdefault(parameter.ranks, [0] * len(parameter.ranks))
        place = counted.index(min(counted))
        counted[place] += parameter.tensor.numel()
        if parameter.ranks[place] == rank and parameter.tensor.grad is not None:
            found.append(parameter)
    return found


def squared_norm(counted: Sequence[Held], device: str) -> Tensor:
    """Sum of squares of the gradients of these parameters."""
    dense = []
    for parameter in counted:
        gradient = parameter.tensor.grad
        assert gradient is not None
        dense.append(gradient.coalesce().values() if gradient.is_sparse else gradient)
    if not dense:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.nn.utils.get_total_norm(dense).double().square()


def scale_gradients(held: Sequence[Held], factor: float | Tensor) -> None:
    """Multiplies all gradients, in one launch for each dtype. A tensor stands for a number that
    only the device knows.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in held:
        gradient = parameter.tensor.grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            gradient.mul_(factor)
        elif isinstance(factor, Tensor) and gradient.dtype in HALF:
            # a number on the device takes the dtype of what it is multiplied with: one of 16 bits
            # would be up to 0.4 % off
            gradient.copy_(gradient.float() * factor)
        else:
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for dtype, gradients in by_dtype.items():
        foreach_mul_(gradients, factor.to(dtype) if isinstance(factor, Tensor) else factor)


def by_backward_order(names: Sequence[str], first_use: Mapping[str, int]) -> list[str]:
    """Parameters in the order in which backward finishes them: used last in forward, first here.
    The same on every rank.
    """
    return sorted(names, key=lambda name: (-first_use.get(name, -1), name))
