"""Holders of the same weights have the same weights: checked at the start and every so many steps.

Holders of a shard start alike, get the same gradients to the bit and do the same updates, so their
weights stay equal to the bit. Where they are not, something is wrong that no loss shows: another
initial value, a batch that one rank got alone, a broken device. Optimizer kernels of different GPUs
may also round differently.

    hash      each rank: one number for all weights that it shares with the same ranks, made on the
              device; one all-reduce of a few numbers compares them. Looked at a step later, so
              that nobody waits
    values    only where hashes differ: the first holder's values are broadcast. Within rounding,
              all holders take them, with a message; beyond, the job ends with names

A hash is a sum over 64-bit words, each times an odd number of its position: differences of rounding
do not cancel as they do in a plain sum.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from whale.distributed.ranks import Ranks
from whale.dtypes import as_bytes, rounding
from whale.names import listed
from whale.plans.shards import Piece, Shard, Shards

logger = logging.getLogger("whale")

WORD_BYTES = 8
TILE = 1 << 13
"""words of a tensor that have a number of their own (64 KiB); tiles follow each other"""
NUM_TILES = 512
"""tiles that are multiplied at once: workspace of at most 32 MiB"""
FACTOR = 0x9E3779B97F4A7C15 - 2**64
"""odd, with bits all over: what came before counts otherwise than what follows"""
ABSENT = torch.iinfo(torch.int64).min
"""hash of who does not hold: below all others"""
SHOWN = 4
"""parameters that a message names"""


class ReplicaError(RuntimeError):
    """Holders of the same weights have different ones. Raised on every rank alike."""


@dataclass(frozen=True)
class SharedWeights:
    """Weights of this rank that the same ranks hold."""

    ranks: tuple[int, ...]
    tensors: Mapping[str, Tensor]
    """by name, in the same order on all of them"""


@dataclass(frozen=True)
class Difference:
    """A parameter whose values differ from those of its first holder."""

    name: str
    rank: int
    first: int
    largest: float
    allowed: float

    @property
    def is_rounding(self) -> bool:
        return self.largest <= self.allowed

    def __str__(self) -> str:
        return f"{self.name} on rank {self.rank} by {self.largest:.3g} from rank {self.first}"


class ReplicaCheck:
    """Compares this rank's weights with those of the other holders."""

    def __init__(
        self, weights: Mapping[str, Tensor], shards: Shards, ranks: Ranks, every: int
    ) -> None:
        """`every`: number of steps between checks; 0: there are none."""
        self._ranks = ranks
        self._every = every
        self._pending: tuple[int, Tensor, dist.Work] | None = None
        holders: set[tuple[int, ...]] = set()
        views: dict[tuple[int, ...], dict[str, Tensor]] = {}
        for name in sorted(shards.plan.holders):
            for piece in shards.pieces(name):
                if len(piece.ranks) > 1:
                    holders.add(piece.ranks)
                    is_mine = ranks.rank in piece.ranks
                    if is_mine and isinstance(weights[name], torch.nn.Parameter):
                        views.setdefault(piece.ranks, {}).update(
                            _views(name, weights[name], piece, shards.on(name, ranks.rank))
                        )
        self._holders = sorted(holders)
        """sets of ranks that share weights in this plan, the same list on every rank"""
        self._shared = [SharedWeights(group, views[group]) for group in sorted(views)]

    def check(self) -> None:
        """Compares now, before the first step."""
        self._begin(0)
        self._finish()

    def reads_after(self, step_count: int) -> bool:
        """Whether `after_step` may read or write weights, the same on all ranks."""
        is_due = bool(self._every) and step_count % self._every == 0
        return self._pending is not None or (is_due and bool(self._holders))

    def after_step(self, step_count: int) -> None:
        """Looks at what was begun a step before, and begins after every so many steps."""
        self._finish()
        if self._every and step_count % self._every == 0:
            self._begin(step_count)

    def _begin(self, step_count: int) -> None:
        """Hashes the weights and compares the hashes of all ranks, without waiting for them."""
        if not self._every or not self._holders:
            return
        # [2, holders]: hashes and their complements. The largest complement is that of the smallest
        # hash, so one maximum of both says whether all are equal
        with torch.no_grad():
            hashes = torch.full((2, len(self._holders)), ABSENT, device=self._ranks.device.name)
            numbers = self._position_numbers()
            for shared in self._shared:
                own = _hash(shared, numbers)
                column = self._holders.index(shared.ranks)
                hashes[0, column] = own
                hashes[1, column] = ~own
        world = self._ranks.world
        work = dist.all_reduce(hashes, dist.ReduceOp.MAX, group=world, async_op=True)
        assert work is not None
        self._pending = (step_count, hashes, work)

    def _finish(self) -> None:
        """Makes differences that were found good, or raises `ReplicaError` on all ranks. They come
        here at the same place of their programs.
        """
        if self._pending is None:
            return
        step, hashes, work = self._pending
        self._pending = None
        work.wait()
        is_held = hashes[0] != ABSENT  # buffers may be all that some ranks share
        is_different = is_held & (hashes[0] != ~hashes[1])
        different = is_different.tolist()
        if not any(different):
            return
        found: list[Difference] = []
        for group, differs in zip(self._holders, different, strict=True):
            process_group = self._ranks.group(group)  # all ranks, in the same order
            for shared in self._shared:
                if differs and shared.ranks == group:
                    found += self._compare(shared, process_group)
        self._judge(step, [each for part in self._ranks.gather(found) for each in part])

    def _position_numbers(self) -> Tensor:
        """The odd numbers that positions of a tile count with, the same on every rank; made anew
        for each check, so that no memory is taken in between.
        """
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randint(1 << 62, (TILE,), generator=generator) * 2 + 1
        return self._ranks.device.start_copy(numbers).take()  # `to` would wait for the device

    def _compare(self, shared: SharedWeights, group: dist.ProcessGroup | None) -> list[Difference]:
        """Parameters of this rank that differ from the first holder's, whose values they get if
        all of them differ by rounding.
        """
        first = shared.ranks[0]
        found = []
        taken: list[tuple[Tensor, Tensor]] = []
        for name, tensor in shared.tensors.items():
            own = tensor.detach()
            theirs = own.clone(memory_format=torch.contiguous_format)
            dist.broadcast(as_bytes(theirs), first, group=group)
            if torch.equal(as_bytes(own), as_bytes(theirs)):
                continue
            largest = _largest(own.to(torch.promote_types(own.dtype, torch.float64)) - theirs)
            allowed = rounding(own.dtype).same_work * _largest(theirs)
            found.append(Difference(name, self._ranks.rank, first, largest, allowed))
            taken.append((own, theirs))
        if all(difference.is_rounding for difference in found):
            for own, theirs in taken:
                own.copy_(theirs)
        return found

    def _judge(self, step: int, found: list[Difference]) -> None:
        """Logs differences that rounding explains and raises for others, on every rank alike."""
        wrong = [difference for difference in found if not difference.is_rounding]
        when = f"after step {step - 1}" if step else "before the first step"
        if wrong:
            names = listed([str(each) for each in wrong], SHOWN)
            raise ReplicaError(
                f"{when}, weights that must be the same on several ranks differ: {names}; rounding "
                f"explains {wrong[0].allowed:.3g} at most. A rank got another batch or other "
                "weights, changed them by itself, or its device computes wrong. Try: the last "
                'checkpoint, and "check_replicas": 1 to find the step'
            )
        if found and self._ranks.rank == 0:
            logger.warning(
                "%s, weights on several ranks differed by rounding and were set to those of the "
                "first holder: %s",
                when,
                listed([str(each) for each in found], SHOWN),
            )


def _views(name: str, weight: Tensor, piece: Piece, shard: Shard) -> dict[str, Tensor]:
    """What this rank holds of a piece, by name: the weight, or where other replicas cut it
    otherwise, views of its cells.
    """
    if piece.cells is None:
        return {name: weight}
    whole = weight.detach()
    return {
        f"{name}{[list(interval) for interval in cell]}": whole[own]
        for cell, own in zip(piece.cells, piece.inside(shard), strict=True)
    }


def _hash(shared: SharedWeights, numbers: Tensor) -> Tensor:
    """One number of all bits of these weights, on the device."""
    total = numbers.new_zeros(())
    for tensor in shared.tensors.values():
        total = total * FACTOR + hash_bits(tensor.detach(), numbers)
    return total


def hash_bits(tensor: Tensor, numbers: Tensor) -> Tensor:
    """A number, int64 on the tensor's device, that depends on every bit and its position.

    `numbers`: odd ones for the positions in a tile. Sums and products wrap around.
    """
    plain = as_bytes(tensor)
    if plain.storage_offset() % WORD_BYTES:
        plain = plain.clone()  # as words it must lie at a multiple of 8
    num_words = plain.numel() // WORD_BYTES
    words = plain[: num_words * WORD_BYTES].view(torch.int64)
    rest = plain[num_words * WORD_BYTES :].to(torch.int64)
    total = (rest * numbers[: len(rest)]).sum()
    for piece in words.split(TILE * NUM_TILES):
        num_whole = len(piece) // TILE
        tiles = piece[: num_whole * TILE].view(num_whole, TILE)
        last = piece[num_whole * TILE :]
        if num_whole:
            of_tiles = (tiles * numbers).sum(1)
            total = total * FACTOR + (of_tiles * numbers[:num_whole]).sum()
        if len(last):
            total = total * FACTOR + (last * numbers[: len(last)]).sum()
    return total


def _largest(tensor: Tensor) -> float:
    """Largest magnitude; infinite where some are not numbers."""
    if not tensor.numel():
        return 0.0
    found = float(tensor.abs().max())
    return math.inf if math.isnan(found) else found
