"""ZeRO and offloaded weights on one rank: where weights, gradients and what the optimizer updates
lie (docs/memory.md).

level 1, 2   every block is one flat buffer with whole weights. The optimizer updates this rank's
             rows, which are views of it; then the block is gathered in place
level 3      this rank's interval of every block is one flat tensor of its own, which the
             optimizer updates. Chunks compute with parameters in the slots of a pool, and a
             `Residence` brings a block before it is used
offload      of weights: the same, and the interval is memory of the host, or of a file, where the
             optimizer updates it; of optimizer states at level 1, 2 where the plan updates on
             the host of an accelerator: a copy of the interval there, which comes back after it
grids        a block of a grid whose weights are at home elsewhere is one of this rank alone, as at
             level 3: its parts of the parameters

Where the plan updates ahead, the optimizer still works while the next forward runs: a block of
level 3 is fetched when its own part is new, and a whole block of levels 1 and 2 is copied and
gathered when the forward first needs it (`runtime/updates_ahead.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from whale.devices import HostCopy, Moment
from whale.distributed.intervals import Intervals, Transfer
from whale.distributed.ranks import Ranks
from whale.lowering.blocks import Bringer
from whale.plans.blocks import WEIGHTS_TOO, Block, slots_of
from whale.plans.plan import Plan
from whale.plans.shards import Shards
from whale.runtime.homes import HomeMaker, HostHome, tensor_in
from whale.runtime.residence import Pool, Residence
from whale.runtime.updates_ahead import LateBlocks, UpdatesAhead

Weights = dict[str, Tensor]


class Zero:
    """The blocks of one rank."""

    def __init__(
        self,
        plan: Plan,
        weights: Weights,
        ranks: Ranks,
        intervals: Intervals,
        homes: Callable[[str], HomeMaker],
        is_ahead: bool = False,
    ) -> None:
        """`weights`: this rank's tensors, whole or at level 3 its rows; they are moved into flat
        buffers and stay the same objects. `homes`: of a class that lives elsewhere. `is_ahead`:
        updates on the host may run under the next forward.
        """
        self.blocks = own_blocks(plan, ranks.rank, weights)
        is_at_home = any(block.weights != "device" for block in self.blocks)
        self.level = WEIGHTS_TOO if is_at_home else plan.zero
        self._homes = homes("weights")
        self._gradient_homes = homes("gradients")
        for block in self.blocks:
            if block.gradients != "device":  # what cannot be is refused before the first step
                self._gradient_homes.home(block.gradients)
        if ranks.device.is_accelerator:
            _refuse_on_accelerators(plan, self.blocks)
        self.ranks = ranks
        self.intervals = intervals
        self.computing: Weights = dict(weights)
        """by name: what chunks compute with"""
        self.updated: Weights = dict(weights)
        """by name: what the optimizer updates"""
        self.block_of = {
            name: number for number, block in enumerate(self.blocks) for name in block.parameters
        }
        if ranks.device.is_accelerator:
            trained = tuple(block for block in self.blocks if self.is_trained(block))
            _refuse_parts_held_alike(plan, trained, ranks.rank)
        self.residence: Residence | None = None
        self._buffers: list[Tensor] = []
        """level 1, 2: of each block the whole weights"""
        self._on_host: dict[int, Tensor] = {}
        """by block: this rank's interval on the host of an accelerator, where it is updated"""
        self.ahead = UpdatesAhead(ranks.rank) if is_ahead else None
        """runs updates under the next forward; None: there are none"""
        self.late: LateBlocks | None = None
        """level 1, 2: brings whole weights that are new"""
        if is_ahead and self.level != WEIGHTS_TOO:
            self.late = LateBlocks(self._bring_whole)
        self._copied: dict[int, Moment] = {}
        """by block: when its new weights are on the device, where they were copied ahead"""
        if self.level == WEIGHTS_TOO:
            self._home_on_peers(weights)
        else:
            self._home_here(weights)

    @property
    def hides_reduces(self) -> bool:
        """Whether a reduce-scatter runs beside the backward."""
        return not any(self.intervals.is_through_memory(block.ranks) for block in self.blocks)

    def sums_through_memory(self, block: Block) -> bool:
        """Whether a reduce-scatter of a block is done when its call returns."""
        is_on_host = not self.ranks.device.is_accelerator
        return is_on_host and self.intervals.is_through_memory(block.ranks)

    def is_trained(self, block: Block) -> bool:
        return self.computing[block.parameters[0]].requires_grad

    def after_update(self) -> None:
        """The optimizer has changed this rank's part: the others' is to come."""
        if self.residence is not None:
            self.residence.forget()
            return
        if self.late is not None:
            trained = (n for n, block in enumerate(self.blocks) if self.is_trained(block))
            self.late.expect(trained)
            return
        with torch.no_grad():
            for number, part in self._on_host.items():
                self._own(number).copy_(part, non_blocking=True)
            transfers = [
                self.intervals.begin_gather(buffer, block.ends, block.ranks)
                for block, buffer in zip(self.blocks, self._buffers, strict=True)
                if self.is_trained(block)
            ]
            for transfer in transfers:
                transfer.wait()

    # ---- updates under the next forward

    @property
    def bringer(self) -> Bringer | None:
        """What brings blocks in front of their readers; None: all are always here."""
        return self.residence if self.residence is not None else self.late

    @property
    def slot_of(self) -> tuple[int, ...]:
        """The buffer of each block: whole weights have one each."""
        if self.residence is not None:
            return self.residence.pool.slot_of
        return tuple(range(len(self.blocks)))

    def copy_behind(self, number: int) -> Callable[[], None] | None:
        """What takes a block, when it is updated on the host of an accelerator, to the device,
        behind all that is launched so far; None: it is where it is used. Called in a thread.
        """
        part = self._on_host.get(number)
        if part is None or self.late is None:
            return None
        device = self.ranks.device
        own = self._own(number)
        now = device.event()

        def copy() -> None:
            device.select()
            self._copied[number] = device.copy_beside([(part, own)], "incoming", [now])

        return copy

    def _bring_whole(self, number: int) -> None:
        """The new weights of a block come here: those of this rank, then those of the others."""
        assert self.ahead is not None
        self.ahead.wait(number)
        block = self.blocks[number]
        with torch.no_grad():
            moment = self._copied.pop(number, None)
            if moment is not None:
                self.ranks.device.follow(moment)
            elif number in self._on_host:  # updated before the step was over, or left out
                self._own(number).copy_(self._on_host[number], non_blocking=True)
            buffer = self._buffers[number]
            self.intervals.begin_gather(buffer, block.ends, block.ranks).wait()

    def bring_late(self) -> None:
        """Returns when all weights are new here. All ranks call it together."""
        if self.late is not None:
            self.late.bring_all()

    def forget_late(self) -> None:
        """All weights are replaced: what is on its way no longer counts."""
        if self.ahead is not None:
            self.ahead.forget()
        for moment in self._copied.values():
            self.ranks.device.follow(moment)
        self._copied.clear()
        if self.late is not None:
            self.late.forget()

    def loaded(self) -> None:
        """Weights came from a file: at level 3 those in the slots are old, and so are copies on
        the host.
        """
        if self.residence is not None:
            self.residence.forget()
        for number, part in self._on_host.items():
            part.copy_(self._own(number))

    def _own(self, number: int) -> Tensor:
        """This rank's interval in the whole weights of a block."""
        start, stop = self.blocks[number].interval(self.ranks.rank)
        return self._buffers[number][start:stop]

    def _home_here(self, weights: Weights) -> None:
        for number, block in enumerate(self.blocks):
            buffer = _like(weights[block.parameters[0]], block.num_elements)
            self._buffers.append(buffer)
            for name, (start, stop) in block.intervals.items():
                _move(weights[name], buffer[start:stop])
            part = self._own(number)
            if self._is_updated_on_host(block) and part.numel():
                place = self._homes.home("host").place(number, part.nbytes)
                part = tensor_in(place, 0, part.new_empty(0), part.shape, (1,)).copy_(part)
                self._on_host[number] = part
            begin = block.interval(self.ranks.rank)[0]
            for name, (start, _) in block.intervals.items():
                tensor = weights[name]
                if tensor.requires_grad:
                    first, last = block.rows(name, self.ranks.rank)
                    rows = tensor.data[first:last]
                    low = max(start - begin, 0)
                    own = part[low : low + rows.numel()].view(rows.shape)
                    self.updated[name] = torch.nn.Parameter(own)

    def _is_updated_on_host(self, block: Block) -> bool:
        """Whether the optimizer updates a copy on the host: a CPU rank is there anyway."""
        return (
            self.ranks.device.is_accelerator
            and block.updated_on == "host"
            and self.is_trained(block)
        )

    def gradient_home(self, name: str, own: Tensor) -> Tensor | None:
        """Where gradients of this rank's interval of the block of a parameter, `own` say, are
        summed: where the plan says, and on the host where the part is; None: on the device.
        """
        number = self.block_of[name]
        memory = self.blocks[number].gradients
        is_here = self.updated[name].device.type == own.device.type
        if not own.numel() or (memory == "device" and is_here):
            return None
        home = self._gradient_homes.home("host" if memory == "device" else memory)
        place = home.place(number, own.nbytes)
        home.check(number)
        if memory != "device":
            home.num_bytes_moved += own.nbytes
        return tensor_in(place, 0, own[:0], own.shape, (1,))

    def begin_copy_to_host(self, own: Tensor, home: Tensor | None) -> HostCopy:
        """Gradients on their way from an accelerator to its host: to their home where that is
        pinned, which a file is not, else to memory of their own.
        """
        device = self.ranks.device
        is_pinned = home is not None and home.is_pinned()
        target = home if is_pinned else device.empty_on_host(own.shape, own.dtype)
        assert target is not None
        moment = device.copy_beside([(own, target)], "outgoing", [device.event()])
        return HostCopy(target, moment, device)

    def _part(self, number: int, like: Tensor, num_elements: int) -> Tensor:
        """Memory for this rank's interval of a block, where the plan says."""
        memory = self.blocks[number].weights
        if memory == "device" or not num_elements:
            return _like(like, num_elements)
        place = self._homes.home(memory).place(number, num_elements * like.element_size())
        return tensor_in(place, 0, like.new_empty(0), (num_elements,), (1,))

    def _home_on_peers(self, weights: Weights) -> None:
        device = self.ranks.device.name
        parts: list[Tensor] = []
        for block in self.blocks:
            begin, end = block.interval(self.ranks.rank)
            part = self._part(len(parts), weights[block.parameters[0]], end - begin)
            for name, (start, stop) in block.intervals.items():
                low = min(max(start, begin), stop)
                high = min(max(end, low), stop)
                _move(weights[name], part[low - begin : high - begin])
            parts.append(part)
        first = [weights[block.parameters[0]] for block in self.blocks]
        kinds = [(tensor.dtype, tensor.requires_grad) for tensor in first]
        sizes = [block.num_elements for block in self.blocks]
        pool = Pool(sizes, slots_of(sizes, kinds), [dtype for dtype, _ in kinds], device)
        elsewhere = [
            None if block.weights == "device" else self._homes.home(block.weights)
            for block in self.blocks
        ]
        in_place = [self._in_place(block) for block in self.blocks]
        home = _Peers(
            self.blocks, parts, elsewhere, self.ranks.rank, self.intervals, self.ahead, in_place
        )
        self.residence = Residence(pool, home)
        for number, block in enumerate(self.blocks):
            begin = block.interval(self.ranks.rank)[0]
            for (name, (start, stop)), shape in zip(
                block.intervals.items(), block.shapes, strict=True
            ):
                memory = pool.buffer(number)[start:stop]
                if name in in_place[number]:
                    memory = parts[number][start - begin : stop - begin]
                # .data: autograd must not take a gather into the slot for a write to the weight
                view = memory.view(shape).data
                self.computing[name] = torch.nn.Parameter(view, weights[name].requires_grad)

    def _in_place(self, block: Block) -> frozenset[str]:
        """Parameters with which chunks compute where this rank holds them: whole ones, of ranks
        that share memory. Elsewhere a gather wants them in the slot.
        """
        if block.weights != "device" or not self.sums_through_memory(block):
            return frozenset()
        start, stop = block.interval(self.ranks.rank)
        found = set()
        for name, (first, last) in block.intervals.items():
            if start <= first and last <= stop:
                found.add(name)
        return frozenset(found)


class _Peers:
    """The home of blocks that lie on the ranks of their group, an interval on each."""

    def __init__(
        self,
        blocks: tuple[Block, ...],
        parts: list[Tensor],
        elsewhere: list[HostHome | None],
        rank: int,
        intervals: Intervals,
        ahead: UpdatesAhead | None = None,
        in_place: Sequence[Collection[str]] = (),
    ) -> None:
        """Takes this rank's interval of each block, and its home where that is not the device.
        `ahead`: updates intervals under the forward. `in_place`: of each block the parameters that
        are used where they are at home, and so are not copied to the slot.
        """
        self._blocks = blocks
        self._parts = parts
        self._elsewhere = elsewhere
        self._rank = rank
        self._intervals = intervals
        self._ahead = ahead
        self._in_place = in_place or [()] * len(blocks)

    def begin_fetch(self, block: int, buffer: Tensor) -> Transfer:
        if self._ahead is not None:
            self._ahead.wait(block)
        planned = self._blocks[block]
        start, stop = planned.interval(self._rank)
        home = self._elsewhere[block]
        in_place = self._in_place[block]
        with torch.no_grad():
            if in_place:
                part = self._parts[block]
                for name, (first, last) in planned.intervals.items():
                    low = max(start, first)
                    high = min(stop, last)
                    if low < high and name not in in_place:
                        buffer[low:high].copy_(part[low - start : high - start])
                return self._intervals.begin_gather(buffer, planned.ends, planned.ranks, part)
            if home is None or start == stop:
                buffer[start:stop].copy_(self._parts[block])
            else:
                own = home.begin_fetch(block, buffer[start:stop])
                if len(planned.ranks) == 1:
                    return own
                with own.before():
                    return self._intervals.begin_gather(buffer, planned.ends, planned.ranks)
            return self._intervals.begin_gather(buffer, planned.ends, planned.ranks)

    def begin_store(self, block: int, buffer: Tensor) -> Transfer:
        raise AssertionError("weights of other ranks are never written to")


def own_blocks(plan: Plan, rank: int, weights: Mapping[str, Tensor]) -> tuple[Block, ...]:
    """Blocks of a rank that are cut by rows, and those of a grid whose weights are at home
    elsewhere, as blocks of this rank alone. `weights`: its parts of them.
    """
    found = []
    for block in plan.blocks:
        if rank not in block.ranks:
            continue
        if block.ends:
            found.append(block)
        elif block.weights != "device":
            shapes = tuple(tuple(weights[name].shape) for name in block.parameters)
            number = sum(map(math.prod, shapes))
            found.append(replace(block, shapes=shapes, ranks=(rank,), ends=(number,)))
    return tuple(found)


def _refuse_on_accelerators(plan: Plan, blocks: tuple[Block, ...]) -> None:
    """torch has gradients on the device of their parameter, and its backends for accelerators
    all-reduce nothing that is on the host.
    """
    holders: dict[str, int] = {}
    for block in plan.blocks:
        for name in block.parameters:
            holders[name] = holders.get(name, 0) + 1
    for block in blocks:
        tied = next((name for name in block.parameters if holders[name] > 1), None)
        is_on_host = block.weights != "device" or block.updated_on == "host"
        if tied is not None and is_on_host:
            raise ValueError(
                f'"offload": {tied} would be updated on the host and is tied between stages on '
                "different devices, which sum its gradient. Try: a cut that has both uses in "
                'one stage, or "offload" without weights and gradients'
            )
        if block.gradients != "device" and not is_on_host:
            raise ValueError(
                f'"offload" of gradients to {block.gradients} takes weights or optimizer states '
                'that are at home there, too. Try: "offload": {"optimizer": "host", '
                '"gradients": "host"}'
            )
        if plan.zero == WEIGHTS_TOO and block.weights == "device" and is_on_host:
            raise ValueError(
                "at level 3 of ZeRO weights on the device are updated there. Try: "
                '"offload": {"weights": "host", "optimizer": "host"}, or "zero": 2'
            )


def _refuse_parts_held_alike(plan: Plan, blocks: tuple[Block, ...], rank: int) -> None:
    """Gradients of weights that are at home on the host are there, and nothing sums them there."""
    shards = Shards(plan, "states")
    for block in blocks:
        for name in block.parameters if block.ranks == (rank,) else ():
            others = [each for each in shards.on(name, rank).ranks if each != rank]
            if others:
                raise ValueError(
                    f'"offload" of weights to {block.weights}: ranks {rank} and {others[0]} hold '
                    f"the same part of {name}, and accelerators sum no gradients on their hosts. "
                    "Try: a grid that cuts it over all devices, one model replica, or "
                    '"offload": {"optimizer": "host"}'
                )


def _like(tensor: Tensor, num_elements: int) -> Tensor:
    return torch.empty(num_elements, dtype=tensor.dtype, device=tensor.device)


def _move(tensor: Tensor, flat: Tensor) -> None:
    """Gives a tensor this memory, with its values in it."""
    view = flat.view(tensor.shape)
    view.copy_(tensor.detach())
    tensor.data = view


def trained_parts(zero: Zero | None, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """What the optimizer of this rank updates, by name: parts that hold nothing left out."""
    if zero is None:
        return weights
    found = {}
    for name, tensor in zero.updated.items():
        if tensor.numel() or name not in zero.block_of:
            found[name] = tensor
    return found
