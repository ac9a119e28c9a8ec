"""Collectives of CPU ranks on one host, through memory: all-reduces, all-gathers of a few numbers,
exchanges of parts between all members of a group.

gloo sums in a thread of each rank, which shares the rank's core, and through sockets. Here the
ranks themselves sum, by the rings that carry their messages (`distributed/same_host.py`): 28 MB
between 2 ranks take 9.5 instead of 16 to 23 ms, 1.3 MB 0.75 instead of 0.9 (docs/log.md). A tensor
is cut into blocks, and of every block each of k ranks answers for one part:

    offer      every rank sends each of the others the part that the other one answers for
    reduce     every rank sums its part: its own, then the others in the order of their ranks (16
               bits in float32, rounded once); it sends the sum to all others
    collect    every rank takes the sums of the other parts: all have the same bits

Two blocks are offered ahead, so that nobody waits for the others' copies:

    offer 0, offer 1, reduce 0, offer 2, reduce 1, collect 0, offer 3, reduce 2, collect 1, ...

and messages are taken in the order in which they were sent. At most four parts are on their way
from one rank to another, so the ring begins again where a few more are free: few of its
bytes are ever touched, and they stay in the caches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from whale.distributed.same_host import RING_BYTES

if TYPE_CHECKING:
    from whale.distributed.transport import Transport

HALF = (torch.float16, torch.bfloat16)
BLOCK_BYTES = 4 * 1024**2
"""smaller blocks take longer in Python than in memory, larger ones do not stay in the caches"""
MOST_GATHERED_BYTES = 4 * 1024**2
"""of one rank; more is left to the group"""
NUM_AHEAD = 5
"""parts for which the beginning of a ring must be free before it is used again: four are on their
way, of sizes that differ by a number
"""
EXCHANGE_SPIN_S = 5e-5
"""how long an exchange is waited for awake. Devices of a grid run the same program, so that parts
come within microseconds, sixteen times and more in a step; to be woken up takes as long as all of
this
"""
FIRST_TAG = 2**41
"""of the parts that go from rank to rank, beyond the tags of all messages"""
TAGS_OF_A_PASS = 2**24
"""so many parts go from one rank to another in a pass at most"""


class SameHostCollectives:
    """One rank's side, with others that it reaches through memory. All members of a group ask for
    the same things in the same order.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._first_tag = FIRST_TAG
        self._num_sent: Counter[int] = Counter()
        self._num_taken: Counter[int] = Counter()
        """by rank"""
        self._members: dict[dist.ProcessGroup | None, tuple[int, ...]] = {}
        """of groups whose members all reach each other through memory, in their order; else none"""
        self._gathers: list[Gather] = []
        """those that began and were not waited for"""

    def begin(self, pass_number: int) -> None:
        """Tags are counted in each pass anew, so that a part that a failed step left behind is
        never taken for one of a later step.
        """
        self._first_tag = FIRST_TAG + pass_number * TAGS_OF_A_PASS
        self._num_sent.clear()
        self._num_taken.clear()
        self._gathers.clear()

    def is_old(self, tag: int) -> bool:
        """Whether a part with this tag belongs to a pass before."""
        return FIRST_TAG <= tag < self._first_tag

    def all_gather(self, value: Tensor, group: dist.ProcessGroup | None) -> Tensor | None:
        """Everyone's value, [members, *shape], in the order of the group, whose members all call
        it; None where memory does not reach.
        """
        members = self._members_of(group)
        own_rank = self._transport.ranks.rank
        if not members or value.nbytes > MOST_GATHERED_BYTES:
            return None
        value = value.resolve_conj().resolve_neg().contiguous()
        peers = [rank for rank in members if rank != own_rank]
        result = value.new_empty((len(members), *value.shape))
        for peer in peers:
            self._send(value, peer, RING_BYTES)
        for place, rank in enumerate(members):
            if rank == own_rank:
                result[place].copy_(value)
            else:
                self._take(result[place], rank, "its part of an all-gather")
        self._transport.push_rings(peers)
        return result

    def _members_of(self, group: dist.ProcessGroup | None) -> tuple[int, ...]:
        """Ranks of a group in its order; none where memory does not reach all of them."""
        if group not in self._members:
            whole = group if group is not None else dist.group.WORLD
            assert whole is not None
            ranks = sorted(
                dist.get_process_group_ranks(whole),
                key=lambda rank: dist.get_group_rank(whole, rank),
            )
            self._members[group] = (
                tuple(ranks) if self._transport.reaches_through_memory(ranks) else ()
            )
        return self._members[group]

    def begin_exchange(
        self,
        outgoing: Sequence[Tensor],
        received: Sequence[Tensor],
        group: dist.ProcessGroup | None,
    ) -> PartsUnderway | None:
        """Sends a flat part to each member of the group, in its order; those of the others come
        into `received` when it is waited for. None where memory does not reach.
        """
        members = self._members_of(group)
        if not members:
            return None
        own_rank = self._transport.ranks.rank
        arriving = []
        peers = []
        for rank, part, into in zip(members, outgoing, received, strict=True):
            if rank == own_rank:
                into.copy_(part)
                continue
            tags = self.reserve(rank, bool(part.numel()), bool(into.numel()))
            if part.numel():
                self._transport.send_through_memory(part, rank, tags[0], NUM_AHEAD * part.nbytes)
                peers.append(rank)
            if into.numel():
                arriving.append((into, rank, tags[1]))
        self._transport.push_rings(peers)
        return PartsUnderway(self._transport, arriving)

    def all_reduce(self, tensor: Tensor, ranks: Sequence[int]) -> None:
        """Turns the tensor, which is flat, into the sum of those of all `ranks`. It is over when
        this returns.
        """
        own_rank = self._transport.ranks.rank
        peers = [rank for rank in ranks if rank != own_rank]
        blocks = [
            dict(zip(ranks, block.tensor_split(len(ranks)), strict=True))
            for block in tensor.split(max(1, BLOCK_BYTES // tensor.element_size()))
        ]
        enough_bytes = NUM_AHEAD * BLOCK_BYTES // len(ranks)
        arrived = torch.empty_like(blocks[0][own_rank])

        def offer(number: int) -> None:
            if number < len(blocks):
                for peer in peers:
                    self._send(blocks[number][peer], peer, enough_bytes)

        offer(0)
        offer(1)
        for number in range(len(blocks) + 1):
            if number < len(blocks):
                own = blocks[number][own_rank]
                self._sum(own, arrived[: own.numel()], peers, "its part of an all-reduce")
                for peer in peers:
                    self._send(own, peer, enough_bytes)
                offer(number + 2)
            if number > 0:
                for peer in peers:
                    self._take(blocks[number - 1][peer], peer, "its part of an all-reduce")
        self._transport.push_rings(peers)

    # ---- tensors of which every rank holds one interval (ZeRO)

    def begin_gather(
        self, buffer: Tensor, ends: Sequence[int], ranks: Sequence[int], own: Tensor | None = None
    ) -> Gather:
        """Sends the interval of this rank to all others, as far as the rings have free bytes; the
        rest goes when it is waited for. `ends[i]`: where the interval of `ranks[i]` ends. `own`:
        this rank's interval where it is not in the buffer.
        """
        gather = Gather(self, buffer, ends, ranks, own)
        gather.offer()
        self._gathers.append(gather)
        return gather

    def reduce_scatter(self, parts: Mapping[int, Tensor]) -> None:
        """Turns the part of this rank into the sum of all ranks' values of it: its own, then the
        others in the order of their ranks. `parts`: what each rank gets, flat, in the order of
        ranks; those of others stay as they are.
        """
        self.finish_gathers()
        own_rank = self._transport.ranks.rank
        peers = [rank for rank in parts if rank != own_rank]
        blocks = {rank: _blocks(part) for rank, part in parts.items()}
        enough_bytes = NUM_AHEAD * BLOCK_BYTES
        own = blocks[own_rank]
        arrived = torch.empty_like(own[0]) if own else None
        for number in range(max(map(len, blocks.values()))):
            for peer in peers:
                if number < len(blocks[peer]):
                    self._send(blocks[peer][number], peer, enough_bytes)
            if number < len(own) and arrived is not None:
                into = arrived[: own[number].numel()]
                self._sum(own[number], into, peers, "its part of a reduce-scatter")
        self._transport.push_rings(peers)

    def _sum(self, own: Tensor, arrived: Tensor, peers: Sequence[int], description: str) -> None:
        """Adds the parts of the others to this rank's own, in the order of their ranks. Numbers of
        16 bits are added in float32 and rounded once.
        """
        is_narrow = len(peers) > 1 and own.dtype in HALF
        total = own.float() if is_narrow else own
        for peer in peers:
            total += self._take(arrived, peer, description)
        if is_narrow:
            own.copy_(total)

    def finish_gathers(self) -> None:
        """Waits for all gathers that began. What others sent for them stands in the rings before
        everything that comes now.
        """
        for gather in tuple(self._gathers):
            gather.wait()

    def reserve(self, peer: int, num_sent: int, num_taken: int) -> tuple[int, int]:
        """Tags of so many parts to and from a rank, which go later: (first sent, first taken)."""
        tags = (
            self._first_tag + self._num_sent[peer],
            self._first_tag + self._num_taken[peer],
        )
        self._num_sent[peer] += num_sent
        self._num_taken[peer] += num_taken
        return tags

    def _send(self, part: Tensor, peer: int, enough_bytes: int) -> None:
        self._transport.send_through_memory(
            part, peer, self._first_tag + self._num_sent[peer], enough_bytes
        )
        self._num_sent[peer] += 1

    def _take(self, part: Tensor, peer: int, description: str) -> Tensor:
        self._transport.take_through_memory(
            part, peer, self._first_tag + self._num_taken[peer], description
        )
        self._num_taken[peer] += 1
        return part


class PartsUnderway:
    """Parts of an exchange that others send to this rank."""

    def __init__(self, transport: Transport, arriving: list[tuple[Tensor, int, int]]) -> None:
        """`arriving`: (what it comes into, from which rank, tag)."""
        self._transport = transport
        self._arriving = arriving

    def wait(self) -> None:
        """Returns when all are there; again, at once."""
        while self._arriving:
            into, rank, tag = self._arriving.pop(0)
            self._transport.take_through_memory(
                into, rank, tag, "its part of an exchange", EXCHANGE_SPIN_S
            )


class Gather:
    """An all-gather under way."""

    def __init__(
        self,
        collectives: SameHostCollectives,
        buffer: Tensor,
        ends: Sequence[int],
        ranks: Sequence[int],
        own: Tensor | None = None,
    ) -> None:
        self._collectives = collectives
        self._transport = collectives._transport
        own_rank = self._transport.ranks.rank
        blocks = {
            rank: _blocks(part) for rank, part in zip(ranks, _parts(buffer, ends), strict=True)
        }
        self._own = blocks.pop(own_rank)
        if own is not None:
            self._own = _blocks(own)
        self._theirs = blocks
        self._sent = dict.fromkeys(blocks, 0)
        """by rank: blocks that were sent to it"""
        self._tags = {
            peer: collectives.reserve(peer, len(self._own), len(parts))
            for peer, parts in blocks.items()
        }
        self._is_over = False

    def offer(self) -> None:
        """Sends what the rings take now."""
        for peer, (tag, _) in self._tags.items():
            while self._sent[peer] < len(self._own):
                number = self._sent[peer]
                ring = self._transport.ring_to(peer)
                if not ring.send_if_free(self._own[number], tag + number, RING_BYTES):
                    break
                self._sent[peer] += 1

    def cancel(self) -> None:
        """Nobody waits for it any more: its pass has failed, or the buffer is not used."""
        self._is_over = True
        if self in self._collectives._gathers:
            self._collectives._gathers.remove(self)

    def wait(self) -> None:
        """Returns when the buffer is whole."""
        if self._is_over:
            return
        self.cancel()
        longest = max(len(self._own), *map(len, self._theirs.values()))
        for number in range(longest):
            for peer, (tag, _) in self._tags.items():
                if self._sent[peer] <= number < len(self._own):
                    self._transport.send_through_memory(
                        self._own[number], peer, tag + number, RING_BYTES
                    )
                    self._sent[peer] += 1
            for peer, (_, tag) in self._tags.items():
                if number < len(self._theirs[peer]):
                    self._transport.take_through_memory(
                        self._theirs[peer][number], peer, tag + number, "its part of a gather"
                    )
        self._transport.push_rings(self._tags)


def _parts(tensor: Tensor, ends: Sequence[int]) -> list[Tensor]:
    """The intervals of a flat tensor that end there."""
    return [tensor[start:stop] for start, stop in zip((0, *ends), ends, strict=False)]


def _blocks(part: Tensor) -> list[Tensor]:
    if not part.numel():
        return []
    return list(part.split(max(1, BLOCK_BYTES // part.element_size())))
