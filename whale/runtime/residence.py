"""What lives elsewhere and is here from one use to another: one mechanism for weights that are
gathered from other ranks (ZeRO-3) and for weights, optimizer states and activations whose home is
the host's memory or a disk. docs/memory.md has the words and the picture.

    Home         where a block is when it is not here: `begin_fetch`, `begin_store`
    Pool         buffers, made once; every block has its own slot in it for ever
    Residence    which block is in which slot now; `need` waits for one and begins the next

A block whose slot another block has taken meanwhile is fetched again. Who writes into a block says
`changed`: it goes back to its home before its slot is given away.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Transfer(Protocol):
    """A block on its way."""

    def wait(self) -> None:
        """Returns when it has arrived: for the launches that follow, not for the host."""


class Home(Protocol):
    """Where blocks are when they are not here."""

    def begin_fetch(self, block: int, buffer: Tensor) -> Transfer:
        """Brings a block into its buffer. What was launched before may still read the buffer."""

    def begin_store(self, block: int, buffer: Tensor) -> Transfer:
        """Takes the contents of a buffer home. When the transfer is over, the buffer is free."""


class Pool:
    """Buffers for blocks, made once. Blocks of one slot take turns."""

    def __init__(
        self, sizes: Sequence[int], slot_of: Sequence[int], dtype: torch.dtype, device: str
    ) -> None:
        """`sizes`: elements of every block; `slot_of`: its slot."""
        self.sizes = tuple(sizes)
        self.slot_of = tuple(slot_of)
        largest = [0] * (max(slot_of, default=-1) + 1)
        for size, slot in zip(sizes, slot_of, strict=True):
            largest[slot] = max(largest[slot], size)
        self._slots = [torch.empty(size, dtype=dtype, device=device) for size in largest]

    def buffer(self, block: int) -> Tensor:
        """The flat buffer of a block, in its slot."""
        return self._slots[self.slot_of[block]][: self.sizes[block]]


class Residence:
    """One rank's blocks of one kind."""

    def __init__(self, pool: Pool, home: Home) -> None:
        self.pool = pool
        self.home = home
        self._here: dict[int, int] = {}
        """slot -> the block that it holds, or that is on its way into it"""
        self._arriving: dict[int, Transfer] = {}
        """block -> its fetch, until it is waited for"""
        self._leaving: dict[int, Transfer] = {}
        """slot -> the store of what was in it"""
        self._uses: Sequence[int] = ()
        self._place = 0
        self.num_fetched = 0
        """fetches since the start, for tests and figures"""

    def begin(self, uses: Sequence[int]) -> None:
        """A pass begins that uses blocks in this order."""
        self._uses = uses
        self._place = 0

    def need(self, block: int) -> None:
        """Returns when the block is in its slot, and begins the fetch of the one that is used
        after it, where its slot is not this block's.
        """
        self._fetch(block)
        transfer = self._arriving.pop(block, None)
        if transfer is not None:
            transfer.wait()
        self._advance(block)
        following = self._following(block)
        if following is not None and self.pool.slot_of[following] != self.pool.slot_of[block]:
            self._fetch(following)

    def changed(self, block: int) -> None:
        """The block was written to: it goes home."""
        slot = self.pool.slot_of[block]
        self._leaving[slot] = self.home.begin_store(block, self.pool.buffer(block))

    def drain(self) -> None:
        """Waits for everything on its way."""
        for transfer in (*self._arriving.values(), *self._leaving.values()):
            transfer.wait()
        self._arriving.clear()
        self._leaving.clear()

    def forget(self) -> None:
        """What is in the slots is old: other ranks have changed their parts."""
        self.drain()
        self._here.clear()

    def _fetch(self, block: int) -> None:
        """Begins a fetch, unless the block is here or on its way."""
        slot = self.pool.slot_of[block]
        before = self._here.get(slot)
        if before == block:
            return
        if before is not None and before in self._arriving:
            self._arriving.pop(before).wait()  # began, and was never used
        if slot in self._leaving:
            self._leaving.pop(slot).wait()
        self._here[slot] = block
        self._arriving[block] = self.home.begin_fetch(block, self.pool.buffer(block))
        self.num_fetched += 1

    def _advance(self, block: int) -> None:
        """Moves on to the next place in the order at which this block is used."""
        place = self._place
        while place < len(self._uses) and self._uses[place] != block:
            place += 1
        if place < len(self._uses):
            self._place = place

    def _following(self, block: int) -> int | None:
        """The block that is used after this use; None at the end of the order."""
        for place in range(self._place + 1, len(self._uses)):
            if self._uses[place] != block:
                return self._uses[place]
        return None
