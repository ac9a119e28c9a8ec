"""All-gather and reduce-scatter of tensors of which every rank of a group holds one interval, of
any length, none included.

CPU ranks of one host do it through memory (`same_host_collectives.py`). Elsewhere by the group:
where all intervals are equal one collective, else a broadcast and a reduce for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from whale.distributed.ranks import Ranks
from whale.distributed.transport import Transport


class Transfer(Protocol):
    """Something on its way."""

    def wait(self) -> None:
        """Returns when it has arrived: for the launches that follow, not for the host."""

    def cancel(self) -> None:
        """Nobody wants it any more: the pass that began it has failed on all ranks."""


class Arrived:
    """Nothing has to come."""

    def wait(self) -> None:
        return

    def cancel(self) -> None:
        return


class Works:
    """Collectives of torch that began."""

    def __init__(self, works: Sequence[dist.Work | None]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            if work is not None:
                work.wait()
        self._works = ()

    def cancel(self) -> None:
        self.wait()  # collectives of torch that began on all ranks end on all


class Intervals:
    """One rank's side of these collectives. All ranks of a group call them in the same order."""

    def __init__(self, ranks: Ranks, transport: Transport | None) -> None:
        """`transport`: None where this process is the only one."""
        self._ranks = ranks
        self._transport = transport

    def is_through_memory(self, ranks: tuple[int, ...]) -> bool:
        """Whether these ranks share memory: the rank itself copies, nothing runs beside it."""
        return len(ranks) == 1 or self._through_memory(ranks) is not None

    def _through_memory(self, ranks: tuple[int, ...]) -> Transport | None:
        transport = self._transport
        if transport is None or not transport.reaches_through_memory(ranks):
            return None
        return transport

    def begin_gather(
        self,
        buffer: Tensor,
        ends: Sequence[int],
        ranks: tuple[int, ...],
        own: Tensor | None = None,
    ) -> Transfer:
        """Fills the buffer with the intervals of the other ranks; this rank's own is there. `own`:
        it is here instead, which only ranks that share memory can do.
        """
        if len(ranks) == 1:
            return Arrived()
        through = self._through_memory(ranks)
        if through is not None:
            return through.collectives.begin_gather(buffer, ends, ranks, own)
        assert own is None, "these ranks share no memory"
        group = self._ranks.group(ranks)
        parts = _parts(buffer, ends)
        if self._ranks.backend_among(ranks).has_even_collectives and _is_even(parts):
            mine = parts[ranks.index(self._ranks.rank)]
            return Works([dist.all_gather_into_tensor(buffer, mine, group=group, async_op=True)])
        return Works(
            [
                dist.broadcast(part, rank, group=group, async_op=True)
                for rank, part in zip(ranks, parts, strict=True)
                if part.numel()
            ]
        )

    def begin_reduce(self, buffer: Tensor, ends: Sequence[int], ranks: tuple[int, ...]) -> Transfer:
        """Turns this rank's interval into the sum over all ranks; the rest of the buffer is
        undefined afterwards.
        """
        parts = _parts(buffer, ends)
        if self.is_through_memory(ranks):
            self.reduce(dict(zip(ranks, parts, strict=True)))
            return Arrived()
        group = self._ranks.group(ranks)
        if self._ranks.backend_among(ranks).has_even_collectives and _is_even(parts):
            own = parts[ranks.index(self._ranks.rank)]
            return Works([dist.reduce_scatter_tensor(own, buffer, group=group, async_op=True)])
        return Works(
            [
                dist.reduce(part, rank, group=group, async_op=True)
                for rank, part in zip(ranks, parts, strict=True)
                if part.numel()
            ]
        )

    def reduce(self, parts: Mapping[int, Tensor]) -> None:
        """Turns this rank's part into the sum over all ranks, through memory. `parts`: of each rank
        the values that it gets, in the order of ranks; they need not lie behind each other.
        """
        if len(parts) > 1:
            through = self._through_memory(tuple(parts))
            assert through is not None, "these ranks share no memory"
            through.collectives.reduce_scatter(parts)


def _parts(buffer: Tensor, ends: Sequence[int]) -> list[Tensor]:
    return [buffer[start:stop] for start, stop in zip((0, *ends), ends, strict=False)]


def _is_even(parts: Sequence[Tensor]) -> bool:
    return len({part.numel() for part in parts}) == 1
