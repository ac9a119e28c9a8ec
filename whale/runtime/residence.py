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

from whale.distributed.intervals import Transfer

AHEAD = 8
"""uses of blocks that are here, or on their way, behind which the next one is looked for"""


class Home(Protocol):
    """Where blocks are when they are not here."""

    def begin_fetch(self, block: int, buffer: Tensor) -> Transfer:
        """Brings a block into its buffer. What was launched before may still read the buffer."""

    def begin_store(self, block: int, buffer: Tensor) -> Transfer:
        """Takes the contents of a buffer home. When the transfer is over, the buffer is free."""


class Pool:
    """Buffers for blocks, made once. Blocks of one slot take turns."""

    def __init__(
        self,
        sizes: Sequence[int],
        slot_of: Sequence[int],
        dtypes: Sequence[torch.dtype],
        device: str,
    ) -> None:
        """Takes elements, slot and dtype of each block; all blocks of a slot have one dtype."""
        self.slot_of = tuple(slot_of)
        slots: dict[int, Tensor] = {}
        for slot in sorted(set(slot_of)):
            own = [block for block, other in enumerate(slot_of) if other == slot]
            size = max(sizes[block] for block in own)
            slots[slot] = torch.empty(size, dtype=dtypes[own[0]], device=device)
        self.num_bytes = sum(slot.nbytes for slot in slots.values())
        self._buffers = [slots[slot][:size] for slot, size in zip(self.slot_of, sizes, strict=True)]

    def buffer(self, block: int) -> Tensor:
        """The flat buffer of a block, in its slot."""
        return self._buffers[block]


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
        self._uses: Sequence[tuple[int, ...]] = ()
        self._place = 0

    def begin(self, uses: Sequence[tuple[int, ...]]) -> None:
        """A pass begins that uses blocks in this order, some of them several at once. What a pass
        before it began and never used (it failed) is forgotten.
        """
        for block, transfer in self._arriving.items():
            transfer.cancel()
            self._here.pop(self.pool.slot_of[block], None)
        self._arriving.clear()
        self._uses = uses
        self._place = 0

    def need(self, *blocks: int) -> None:
        """Returns when these blocks are in their slots, and begins the fetch of what is used after
        them, where its slot is not one of theirs.
        """
        for block in blocks:
            self._fetch(block)
        for block in blocks:
            self._arrive(block)
            # a store that still reads the slot is over before anybody writes to it
            leaving = self._leaving.pop(self.pool.slot_of[block], None)
            if leaving is not None:
                leaving.wait()
        self._advance(blocks)
        following = self._following(blocks)
        if following is not None:
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

    def _arrive(self, block: int) -> None:
        """Waits for a fetch, if it is not over. What it has left in the slot when that fails, or
        when Ctrl-C ends the wait, counts for nothing.
        """
        transfer = self._arriving.pop(block, None)
        if transfer is None:
            return
        slot = self.pool.slot_of[block]
        self._here.pop(slot, None)
        transfer.wait()
        self._here[slot] = block

    def _fetch(self, block: int) -> None:
        """Begins a fetch, unless the block is here or on its way."""
        slot = self.pool.slot_of[block]
        before = self._here.get(slot)
        if before == block:
            return
        if before is not None and before in self._arriving:
            self._arrive(before)  # began, and was never used
        if slot in self._leaving:
            self._leaving.pop(slot).wait()
        # nothing is here if the fetch does not begin: an update that failed, or Ctrl-C
        self._here.pop(slot, None)
        self._arriving[block] = self.home.begin_fetch(block, self.pool.buffer(block))
        self._here[slot] = block

    def _advance(self, blocks: tuple[int, ...]) -> None:
        """Moves on to the next place in the order at which these blocks are used."""
        for place in range(self._place, min(self._place + 1 + AHEAD, len(self._uses))):
            if self._uses[place] == blocks:
                self._place = place
                return

    def _following(self, blocks: tuple[int, ...]) -> int | None:
        """The next block of the order that is not here; None where what is used before it lies in
        its slot.
        """
        slot_of = self.pool.slot_of
        wanted = {slot_of[block] for block in blocks}
        for place in range(self._place + 1, min(self._place + 1 + AHEAD, len(self._uses))):
            for block in self._uses[place]:
                slot = slot_of[block]
                if self._here.get(slot) != block:
                    return block if slot not in wanted else None
                wanted.add(slot)
        return None
