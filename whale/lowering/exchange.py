"""Changes of layout on real tensors: the messages of a `Redistribution`, forward and backward.

What is differentiated is the sum of all devices' losses, so the backward of an exchange is the
exchange of the gradient between the conjugate layouts (docs/split.md, line 1). Both are planned
when the chunk is lowered; here nothing is decided but the way that fits the size of the message.

gloo: one `all_to_all_single` for small messages; a message to each peer for large ones, which needs
no copy where a part of the tensor is contiguous. Its own reduce-scatter is an all-reduce inside,
and its rings are slow for small tensors (research/tensor3d.md 4.3). Small messages of CPU ranks on
one host go through memory instead: they lie there when they are waited for, and no thread of gloo
takes the core from the products that they travel under. Elsewhere: the collective that the plan's
pattern names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from whale.devices import backend_of
from whale.dtypes import as_bytes, as_moved, in_memory, is_differentiable
from whale.sharding.redistribution_steps import (
    MovedBlock,
    Ranges,
    Redistribution,
    RedistributionStep,
    in_order,
)

Groups = Mapping[tuple[int, ...], dist.ProcessGroup | None]
"""places of the grid, in order -> process group of their ranks, in the same order"""


class Arriving(Protocol):
    """Parts of an exchange on their way."""

    def wait(self) -> object:
        """Returns when they are there."""


Exchange = Callable[
    [Sequence[Tensor], Sequence[Tensor], "dist.ProcessGroup | None"], "Arriving | None"
]
"""sends a flat part to each member of a group and takes one of each, through memory, without
waiting; None where memory does not reach all of them
"""


class HostGroups(dict[tuple[int, ...], "dist.ProcessGroup | None"]):
    """Groups whose members may reach each other through memory."""

    exchange: Exchange | None = None


THROUGH_MEMORY_BYTES = 4 << 20
"""largest part that goes through memory, whose rings hold a few of them"""
PEER_TO_PEER_FROM_BYTES = 8 << 20
"""on gloo: from here on the copies that an all-to-all needs cost more than a message to each peer
"""

_TAG = (1 << 31) - 2
"""of messages to peers; bridges of the core count theirs from 0"""


@dataclass
class Sent:
    """What this process has sent in exchanges, for tests, benchmarks and reports."""

    num_bytes: int = 0
    num_messages: int = 0

    def reset(self) -> None:
        self.num_bytes = self.num_messages = 0


sent = Sent()


def exchange(x: Tensor, plan: Redistribution, groups: Groups) -> Tensor:
    """x in the plan's target layout; contiguous. x: this place's part in the source layout."""
    if plan.is_identity:
        return x
    result: Tensor = _Exchange.apply(x, plan, groups)  # type: ignore[no-untyped-call]
    return result


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Redistribution, groups: Groups) -> Tensor:
        ctx.plan = plan
        ctx.groups = groups
        return _fresh(run(x, plan.forward, groups), x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return run(gradients[0], ctx.plan.backward, ctx.groups), None, None


def _fresh(result: Tensor, x: Tensor) -> Tensor:
    """A Function must not give back its argument itself."""
    return result.view_as(result) if result is x else result


def run(x: Tensor, steps: Sequence[RedistributionStep], groups: Groups) -> Tensor:
    """The steps one after the other, without history."""
    for step in steps:
        x = start(x, step, groups).wait()
    return x


@dataclass
class PendingExchange:
    """An exchange under way. `wait` gives the result; nothing that was handed to `start` may change
    before.
    """

    step: RedistributionStep
    x: Tensor
    work: list[Arriving]
    parts: dict[int, Tensor]
    """place -> what comes from there, flat"""
    result: Tensor | None = None
    """already complete when everything has arrived"""
    stacked: Tensor | None = None
    """all terms of a sum, one below the other"""
    outgoing: Sequence[Tensor] = ()

    def wait(self) -> Tensor:
        while self.work:
            self.work.pop().wait()
        self.outgoing = ()  # what was sent goes before the result is made
        if self.result is not None:
            return self.result
        if self.stacked is not None:
            return self.stacked.sum(0, dtype=self.stacked.dtype)
        return _put_together(self.step, self.x, self.parts)


def start(x: Tensor, step: RedistributionStep, groups: Groups) -> PendingExchange:
    """Begins to send what this place has to send and to receive what comes, into buffers that are
    allocated here. All places of `step.places` call it in the same order.
    """
    if not step.places:
        return PendingExchange(step, x, [], {}, result=_local(x, step))
    x = in_memory(x)
    group = groups[step.places]
    sent.num_bytes += step.num_sent * x.element_size()
    sent.num_messages += 1
    if backend_of(group).has_even_collectives:
        return (
            _start_all_to_all(x, step, group)
            if step.pattern == "all-to-all"
            else _start_even(x, step, group)
        )
    largest_bytes = step.largest * x.element_size()  # of all places, which decide alike
    if largest_bytes >= PEER_TO_PEER_FROM_BYTES:
        return _start_peer_to_peer(x, step, group)
    reaches = isinstance(groups, HostGroups) and largest_bytes <= THROUGH_MEMORY_BYTES
    return _start_all_to_all(x, step, group, groups.exchange if reaches else None)  # type: ignore[attr-defined]


def _start_even(
    x: Tensor, step: RedistributionStep, group: dist.ProcessGroup | None
) -> PendingExchange:
    """One even collective, where the backend has fast ones."""
    if step.pattern == "all-reduce":
        total = x.clone(memory_format=torch.contiguous_format)
        return PendingExchange(
            step, x, [_must(dist.all_reduce(total, group=group, async_op=True))], {}, result=total
        )
    if step.pattern == "reduce-scatter":
        outgoing = _packed(x, step.sends, in_order(step.sends, step.input_shape))
        result = x.new_empty(step.shape)
        into = result.view(-1)
        what = outgoing
        if x.is_complex():  # a sum of complex numbers is that of their real and imaginary parts
            into, what = (torch.view_as_real(part).view(-1) for part in (into, what))
        work = dist.reduce_scatter_single(into, what, group=group, async_op=True)
        return PendingExchange(step, x, [_must(work)], {}, result=result, outgoing=[outgoing])
    flat = x.contiguous().view(-1)
    received = x.new_empty(flat.numel() * len(step.places))
    work = _must(
        dist.all_gather_single(as_bytes(received), as_bytes(flat), group=group, async_op=True)
    )
    if step.is_in_order:
        return PendingExchange(
            step, x, [work], {}, result=received.view(step.shape), outgoing=[flat]
        )
    return PendingExchange(
        step, x, [work], dict(zip(step.places, received.split(flat.numel()))), outgoing=[flat]
    )


def _start_all_to_all(
    x: Tensor,
    step: RedistributionStep,
    group: dist.ProcessGroup | None,
    through_memory: Exchange | None = None,
) -> PendingExchange:
    """One message to everyone."""
    outgoing = _packed(x, step.leaving, step.leaves_in_order)
    arriving, leaving = step.sizes
    result = x.new_empty(step.shape) if step.arrives_in_place else None
    received = x.new_empty(sum(arriving)) if result is None else _received_part(result, step)
    work: Arriving | None = None
    if through_memory is not None:
        work = through_memory(outgoing.split(leaving), received.split(arriving), group)
    if work is None:
        to_me, to_others = (
            [number * x.element_size() for number in numbers] for numbers in (arriving, leaving)
        )
        work = _must(
            dist.all_to_all_single(
                as_bytes(received), as_bytes(outgoing), to_me, to_others, group=group, async_op=True
            )
        )
    pending = PendingExchange(step, x, [work], {}, outgoing=[outgoing])
    if result is not None:
        _keep_own(x, step, result)
        pending.result = result
    elif step.is_in_order:
        pending.result = received.view(step.shape)
    elif step.own_travels:
        pending.stacked = received.view(len(step.terms), *step.shape)
    else:
        pending.parts = dict(zip(step.places, received.split(arriving)))
    return pending


def _start_peer_to_peer(
    x: Tensor, step: RedistributionStep, group: dist.ProcessGroup | None
) -> PendingExchange:
    """A message to each peer: straight out of x and straight into the result where the part is
    contiguous there.
    """
    x = x.contiguous()
    pending = PendingExchange(step, x, [], {})
    result = x.new_empty(step.shape) if step.is_made_of_runs else None
    position = {place: index for index, place in enumerate(step.places)}
    for term in step.terms:
        for block in term:
            if block.place != step.place:
                received = (
                    x.new_empty(block.count)
                    if result is None
                    else _part(result, block.ranges).view(-1)
                )
                pending.parts[block.place] = received
                pending.work.append(
                    _must(
                        dist.irecv(
                            as_moved(received),
                            group=group,
                            group_src=position[block.place],
                            tag=_TAG,
                        )
                    )
                )
    outgoing = []
    mine = position[step.place]
    # not all to the same one first
    for block in sorted(
        step.sends, key=lambda block: (position[block.place] - mine) % len(position)
    ):
        if block.place != step.place:
            outgoing.append(_gathered(x, block).contiguous().view(-1))
            pending.work.append(
                _must(
                    dist.isend(
                        as_moved(outgoing[-1]),
                        group=group,
                        group_dst=position[block.place],
                        tag=_TAG,
                    )
                )
            )
    pending.outgoing = outgoing
    if result is not None:
        _keep_own(x, step, result)
        pending.result = result
    return pending


def _received_part(result: Tensor, step: RedistributionStep) -> Tensor:
    """The part of the result that the other one of two places sends, flat."""
    others = [block for block in step.terms[0] if block.place != step.place]
    return _part(result, others[0].ranges).view(-1) if others else result.new_empty(0)


def _keep_own(x: Tensor, step: RedistributionStep, result: Tensor) -> None:
    """Puts what this place keeps into a result that the others write their parts into."""
    if step.own is not None:
        here, there = step.own
        _part(result, there.ranges).copy_(_gathered(x, here))


def _must(work: dist.Work | None) -> dist.Work:
    assert work is not None  # None only for processes outside of the group
    return work


# ---- parts of tensors
# -------------------------------------------------------------------------------------------------


def _local(x: Tensor, step: RedistributionStep) -> Tensor:
    """A step without messages: slice, pad with zeros, or mask."""
    if step.is_filled and step.own is not None:
        return _gathered(x, step.own[0]).contiguous()
    return _put_together(step, x, {})


def _put_together(step: RedistributionStep, x: Tensor, parts: Mapping[int, Tensor]) -> Tensor:
    """The result from what arrived and what this place had: terms are added in order, more than two
    of them in float32 at least.
    """
    values = dict(parts)
    if step.own is not None:
        values[step.place] = _gathered(x, step.own[0])
    if step.is_sum_of_wholes and len(step.terms) == 2:
        first, second = (values[term[0].place].view(step.shape) for term in step.terms)
        return torch.add(first, second)
    is_wide = len(step.terms) > 2 and is_differentiable(x)
    dtype = torch.promote_types(x.dtype, torch.float32) if is_wide else x.dtype
    result = (
        x.new_empty(step.shape, dtype=dtype)
        if step.is_filled
        else x.new_zeros(step.shape, dtype=dtype)
    )
    for number, term in enumerate(step.terms):
        for block in term:
            for where, what in _pieces(block, values[block.place].view(block.shape)):
                part = _part(result, where)
                part.copy_(what) if number == 0 else part.add_(what)
    return result.to(x.dtype)


def _gathered(x: Tensor, block: MovedBlock) -> Tensor:
    """The product of the block's ranges as one tensor: a view where every dim has one range."""
    for dim, ranges in enumerate(block.ranges):
        if ranges != ((0, x.shape[dim]),):
            pieces = [x.narrow(dim, a, b - a) for a, b in ranges]
            x = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
    return x


def _pieces(block: MovedBlock, value: Tensor) -> list[tuple[Ranges, Tensor]]:
    """A block of several ranges as parts with one range for each dim, each with its piece of the
    value.
    """
    pieces: list[tuple[Ranges, Tensor]] = [((), value)]
    for dim, ranges in enumerate(block.ranges):
        starts = list(accumulate((b - a for a, b in ranges), initial=0))
        pieces = [
            ((*where, (interval,)), what.narrow(dim, start, interval[1] - interval[0]))
            for where, what in pieces
            for interval, start in zip(ranges, starts)
        ]
    return pieces


def _part(x: Tensor, ranges: Ranges) -> Tensor:
    """A view; one range for each dim."""
    for dim, ((a, b),) in enumerate(ranges):
        if (a, b) != (0, x.shape[dim]):
            x = x.narrow(dim, a, b - a)
    return x


def _packed(x: Tensor, blocks: Sequence[MovedBlock], is_in_order: bool) -> Tensor:
    """All blocks one after the other, flat: x itself where they already lie so."""
    if is_in_order:
        return x.contiguous().view(-1)
    parts = [_gathered(x, block).reshape(-1) for block in blocks]
    if len(parts) == 1:
        # of two places: not copied twice, except for one column, of which `reshape` gives a view
        # with the stride of its row
        return parts[0].contiguous()
    return torch.cat(parts) if parts else x.new_empty(0)
