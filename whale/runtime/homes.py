"""Homes of blocks in the memory of the host and on disk (docs/memory.md).

    HostHome   host memory, pinned where the device is an accelerator, which copies on streams of
               its own, beside compute
    DiskHome   a file for each block, mapped into memory (`runtime/spill.py`). A thread copies, so
               that a block is read or written while the rank computes
    Homes      each block in the one of them that the plan says

A block is bytes here, [num_bytes] uint8: its home knows nothing of shapes and dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from whale.devices import LocalDevice, Moment
from whale.distributed.intervals import Transfer
from whale.plans.blocks import Memory
from whale.runtime.spill import SpillFolder
from whale.units import human_bytes

Piece = tuple[int, Tensor]
"""(byte of a block at which it lies, its bytes)"""
Copies = list[tuple[Tensor, Tensor]]
"""(source, target) of each"""
ALIGNMENT = 64
"""tensors in a block begin at multiples of so many bytes: more than any dtype needs"""


def aligned(num_bytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def bytes_of(flat: Tensor) -> Tensor:
    """A contiguous tensor as bytes, [num_bytes] uint8."""
    return flat.detach().view(-1).view(torch.uint8)


def storage_bytes(tensor: Tensor) -> Tensor:
    """The whole storage that a tensor lies in, [num_bytes] uint8."""
    storage = tensor.untyped_storage()
    found = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    with torch.no_grad():
        return found.set_(storage, 0, (storage.nbytes(),), (1,))


def tensor_in(
    buffer: Tensor, start: int, empty: Tensor, shape: Sequence[int], strides: Sequence[int]
) -> Tensor:
    """A tensor of this shape at byte `start` of a buffer of bytes. `empty`: any tensor of its
    dtype; none is named, so that a mode that widens dtypes does not see it.
    """
    found = torch.empty_like(empty, device=buffer.device)
    first = buffer.storage_offset() + start
    with torch.no_grad():
        storage = buffer.untyped_storage()
        return found.set_(storage, first // empty.element_size(), tuple(shape), tuple(strides))


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    found = []
    size = 1
    for each in reversed(shape):
        found.append(size)
        size *= max(1, each)
    return tuple(reversed(found))


class HostMemoryError(RuntimeError):
    """The host has no memory for a block."""


class Copy(Transfer, Protocol):
    """A block on its way from its home or to it."""

    def before(self) -> AbstractContextManager[None]:
        """What is launched inside runs after the copy; compute does not wait for it."""


class HostHome:
    """Blocks in the memory of the host."""

    def __init__(self, device: LocalDevice, what: str = "blocks") -> None:
        """`what`: the class of blocks, which messages and files are called by."""
        self._device = device
        self._what = what
        self._held: dict[int, Tensor] = {}
        self._size: dict[int, int] = {}
        """by block: bytes that it has now; its memory may be larger"""
        self._last: dict[int, Moment] = {}
        """by block: when the last copy from or to it is over"""
        self.num_bytes_moved = 0
        """since the start, both ways, for tests and figures"""

    @property
    def num_bytes(self) -> int:
        """Bytes that this home has taken."""
        return sum(held.numel() for held in self._held.values())

    def place(self, block: int, num_bytes: int) -> Tensor:
        """Memory on the host for a block of so many bytes, where it is from now on."""
        known = self._held.get(block)
        if known is None or known.numel() < num_bytes:
            self._held.pop(block, None)
            known = self._held[block] = self._new(block, num_bytes)
        self._size[block] = num_bytes
        return known[:num_bytes]

    def where(self, block: int) -> Tensor:
        """The bytes of a block on the host. What was begun must be over."""
        return self._held[block][: self._size[block]]

    def check(self, block: int) -> None:
        """Raises where a block is no longer as it was left."""

    def close(self) -> None:
        """Nothing comes or goes any more."""

    def begin_fetch(self, block: int, buffer: Tensor) -> Copy:
        return self._begin(block, [(self.where(block), bytes_of(buffer))], "incoming")

    def begin_store(self, block: int, buffer: Tensor) -> Transfer:
        return self.begin_store_pieces(block, [(0, bytes_of(buffer))], buffer.nbytes)

    def begin_store_pieces(self, block: int, pieces: Sequence[Piece], num_bytes: int) -> Transfer:
        """Takes a block home that lies in several pieces."""
        target = self.place(block, num_bytes)
        copies = [(piece, target[start : start + piece.numel()]) for start, piece in pieces]
        return self._begin(block, copies, "outgoing")

    def _new(self, block: int, num_bytes: int) -> Tensor:
        try:
            return self._device.empty_on_host((num_bytes,), torch.uint8)
        except (RuntimeError, MemoryError) as error:
            in_use = human_bytes(self.num_bytes)
            reason = str(error).partition("\n")[0]
            raise HostMemoryError(
                f'"offload" of {self._what} cannot get {human_bytes(num_bytes)} of host memory for '
                f'block {block}, beside {in_use} that it has ({reason}). Try: "disk" in place of '
                '"host" in "offload", less memory_gb of `host` in the cluster file, or fewer '
                "processes on this host; then start again from the last checkpoint (engine.load)"
            ) from error

    def _begin(self, block: int, copies: Copies, direction: str) -> Copy:
        self.num_bytes_moved += sum(source.numel() for source, _ in copies)
        moment = self._device.copy_beside(copies, direction, self._after(block))
        self._last[block] = moment
        return _Following(self._device, moment)

    def _after(self, block: int) -> list[Moment]:
        """What a copy that begins now must follow: all that was launched, and the last copy of the
        same block.
        """
        last = self._last.get(block)
        now = self._device.event()
        return [now] if last is None else [now, last]


class DiskHome(HostHome):
    """A home whose blocks are files on a disk of the host."""

    def __init__(self, device: LocalDevice, folder: SpillFolder, what: str) -> None:
        super().__init__(device, what)
        self._folder = folder
        # one thread: copies of one block, or of one slot, never pass each other
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"whale-spill-{what}")

    def check(self, block: int) -> None:
        """Raises where the file of a block is not there with all its bytes: to touch the memory
        that is mapped to it would end the process.
        """
        self._folder.check(self._name(block), self._held[block].numel())

    def close(self) -> None:
        self._thread.shutdown()

    def _name(self, block: int) -> str:
        return f"{self._what}-{block}"

    def _new(self, block: int, num_bytes: int) -> Tensor:
        return self._folder.map(self._name(block), num_bytes)

    def _begin(self, block: int, copies: Copies, direction: str) -> Copy:
        self.num_bytes_moved += sum(source.numel() for source, _ in copies)
        now = self._device.event()
        return _Copying(
            self._device, self._thread.submit(self._copy, block, copies, direction, now)
        )

    def _copy(self, block: int, copies: Copies, direction: str, after: Moment) -> Moment:
        """Copies a block, in the thread. When it returns, the host's side of the copy is over."""
        self.check(block)
        self._device.select()
        moment = self._device.copy_beside(copies, direction, [after])
        self._device.wait_for(moment)
        # who waits for the copy frees what was copied, at once; this thread may hold its arguments
        # until it runs again
        copies.clear()
        return moment


class BlockHomes:
    """Each block in the home that the plan gives it."""

    def __init__(self, of: Sequence[HostHome]) -> None:
        self._of = of

    def begin_fetch(self, block: int, buffer: Tensor) -> Transfer:
        return self._of[block].begin_fetch(block, buffer)

    def begin_store(self, block: int, buffer: Tensor) -> Transfer:
        return self._of[block].begin_store(block, buffer)


class HomeMaker:
    """Makes the homes of one class of blocks, one of each kind."""

    def __init__(self, device: LocalDevice, folder: Callable[[], SpillFolder], what: str) -> None:
        """`folder`: gives the folder for files; called when the first block has one."""
        self._device = device
        self._folder = folder
        self._what = what
        self._made: dict[Memory, HostHome] = {}

    @property
    def num_bytes_moved(self) -> int:
        """Bytes since the start, both ways."""
        return sum(home.num_bytes_moved for home in self._made.values())

    def close(self) -> None:
        """Ends what copies; blocks stay where they are."""
        for home in self._made.values():
            home.close()

    def home(self, memory: Memory) -> HostHome:
        if memory not in self._made:
            self._made[memory] = (
                DiskHome(self._device, self._folder(), self._what)
                if memory == "disk"
                else HostHome(self._device, self._what)
            )
        return self._made[memory]


class _Following:
    """A copy on a stream of the device."""

    def __init__(self, device: LocalDevice, moment: Moment) -> None:
        self._device = device
        self._moment = moment

    def wait(self) -> None:
        self._device.follow(self._moment)

    def before(self) -> AbstractContextManager[None]:
        return self._device.behind(self._moment)

    def cancel(self) -> None:
        self.wait()


class _Copying:
    """A copy in a thread."""

    def __init__(self, device: LocalDevice, future: Future[Moment]) -> None:
        self._device = device
        self._future = future

    def wait(self) -> None:
        self._device.follow(self._future.result())

    def before(self) -> AbstractContextManager[None]:
        return self._device.behind(self._future.result())

    def cancel(self) -> None:
        self._future.exception()  # waits; what went wrong no longer matters
