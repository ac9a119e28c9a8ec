"""Memory of the test device: blocks, the allocator, and tensors made of them through DLPack.

torch tells that the last reference to a tensor is gone by calling a function of C, in any thread and
also while an exception is on its way, when Python must not run. So the function is one of the C
library that changes the tensor's slot in a table; before anything happens on the device, changed
slots are collected (`collect_freed`).

The allocator is ordered by streams, as CUDA's caching allocator is. When the host drops the last
reference to a tensor, its block may be given out again at once, to what follows on the stream that
it was made on. Whoever uses it on another stream must make the first stream wait, or say so with
`record_stream`; otherwise freeing it is an error.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.device.settings import settings
from tests.device.streams import (
    DeviceError,
    Stream,
    all_streams,
    call_before_waits,
    current_stream,
    errors,
    load,
    lock,
)

NAME = "testgpu"
BLOCK_BYTES = 512
"""allocations are rounded up to it"""
FRESH_BYTE = 0xAB
"""what memory holds that was never written"""


class Access(NamedTuple):
    """Operation `number` of a stream reads or writes bytes [start, stop) of a block."""

    stream: int
    number: int
    name: str
    start: int
    stop: int
    is_write: bool

    def conflicts_with(self, other: Access) -> bool:
        overlap = self.start < other.stop and other.start < self.stop
        return overlap and (self.is_write or other.is_write)

    def makes_redundant(self, old: Access) -> bool:
        """Whether who is ordered after this access is ordered after the old one, too."""
        covers = self.start <= old.start and old.stop <= self.stop
        same_reader = old.stream == self.stream and not old.is_write
        return covers and (self.is_write or same_reader)


@dataclass(eq=False)
class Block:
    """A piece of device memory; `cpu` holds its bytes, for streams only."""

    cpu: torch.Tensor
    num_bytes: int
    stream: Stream
    accesses: list[Access] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)
    """streams named by `record_stream`: the block is not given out before they are done"""

    def __post_init__(self) -> None:
        self.address = self.cpu.data_ptr()
        self._typed: dict[torch.dtype, torch.Tensor] = {}

    def elements(self, dtype: torch.dtype) -> torch.Tensor:
        """All its bytes as a flat tensor of this type."""
        if dtype not in self._typed:
            self._typed[dtype] = self.cpu.view(dtype)
        return self._typed[dtype]


@dataclass
class Usage:
    """Bytes that tensors occupy."""

    now_bytes: int = 0
    peak_bytes: int = 0


_usage = Usage()
blocks: dict[int, Block] = {}
"""blocks in use, by address"""
_free: dict[tuple[int, int], list[Block]] = {}
"""blocks to be given out again, by size and stream"""


def used_memory() -> Usage:
    """Bytes in use now and at most."""
    collect_freed()
    return _usage


def forget_peak() -> None:
    used_memory().peak_bytes = _usage.now_bytes


def launch(name: str, work: Any, reads: Sequence[Any], writes: Sequence[Any]) -> None:
    """Queues `work` on the current stream; raises `DeviceError` where it would race."""
    load(name)
    stream = current_stream()
    with lock:
        collect_freed()
        number = stream.tick(name)
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                _touch(stream, number, name, tensor, is_write)
        stream.put(name, work)


def _touch(stream: Stream, number: int, name: str, tensor: torch.Tensor, is_write: bool) -> None:
    block = block_of(tensor)
    new = Access(stream.id, number, name, *span_of(tensor), is_write)
    for old in block.accesses:
        if new.conflicts_with(old) and not stream.is_after(old.stream, old.number):
            raise DeviceError(
                f"race: {name} on {stream.what} {'writes' if is_write else 'reads'} "
                f"{new.stop - new.start} bytes that {old.name} on stream {old.stream} may still "
                f"{'write' if old.is_write else 'read'}: nothing makes this stream wait for it"
            )
    block.accesses = [old for old in block.accesses if not new.makes_redundant(old)]
    block.accesses.append(new)


# ---- the allocator


def _take_block(num_bytes: int) -> Block:
    """A block for the current stream: one that was freed there, or a new one."""
    num_bytes = max(BLOCK_BYTES, -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES)
    if _usage.now_bytes + num_bytes > settings.memory_bytes:
        raise torch.OutOfMemoryError(
            f"{NAME} out of memory: tried to allocate {num_bytes} bytes, {_usage.now_bytes} of "
            f"{settings.memory_bytes} are in use"
        )
    _usage.now_bytes += num_bytes
    _usage.peak_bytes = max(_usage.peak_bytes, _usage.now_bytes)
    stream = current_stream()
    for old in _free.get((num_bytes, stream.id), []):
        if not _is_in_use_elsewhere(old):
            _free[num_bytes, stream.id].remove(old)
            return Block(old.cpu, num_bytes, stream, old.accesses)
    fresh = torch.full((num_bytes,), FRESH_BYTE, dtype=torch.uint8)
    return Block(fresh, num_bytes, stream)


def _is_in_use_elsewhere(block: Block) -> bool:
    """Whether a stream named by `record_stream` may still use it."""
    return any(
        access.stream in block.recorded and not block.stream.is_after(access.stream, access.number)
        for access in block.accesses
    )


def _give_back(block: Block) -> None:
    _usage.now_bytes -= block.num_bytes
    for access in block.accesses:
        is_ordered = block.stream.is_after(access.stream, access.number)
        if access.stream != block.stream.id and not is_ordered:
            if not _is_recorded(block, access):
                errors.append(_freed_too_early(block, access))
    _free.setdefault((block.num_bytes, block.stream.id), []).append(block)


def _is_recorded(block: Block, access: Access) -> bool:
    """Whether a stream named by `record_stream` is that of the access, or comes after it."""
    if access.stream in block.recorded:
        return True
    recorded = [stream for stream in all_streams if stream.id in block.recorded]
    return any(stream.is_after(access.stream, access.number) for stream in recorded)


def _freed_too_early(block: Block, access: Access) -> DeviceError:
    return DeviceError(
        f"memory of {block.num_bytes} bytes is freed and given out again while {access.name} on "
        f"stream {access.stream} may still use it. Try: keep the tensor until its stream was waited "
        f"for, or record_stream"
    )


# ---- tensors, through DLPack (the structures of dlpack.h)

_MANAGED_TENSOR = struct.Struct("<QiiiBBHQQQQQ")
"""DLManagedTensor: data; type and index of the device; number of dims; code, bits and lanes of the
type; addresses of shape and strides; offset in bytes; context; deleter
"""
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_EXTERNAL_DEVICE = 12
"""kDLExtDev, which torch reads as PrivateUse1"""
_INT, _UINT, _FLOAT, _BFLOAT, _COMPLEX, _BOOL = 0, 1, 2, 4, 5, 6


@cache
def _numbers(*numbers: int) -> ctypes.Array[ctypes.c_int64]:
    """Sizes or strides where C can read them, for ever."""
    return (ctypes.c_int64 * len(numbers))(*numbers)


@cache
def _address_of_numbers(*numbers: int) -> int:
    return ctypes.addressof(_numbers(*numbers))


class _Slots:
    """A table of DLPack's structures, one for each tensor that torch has not let go of yet.

    The deleter is `rand_r(unsigned *)`: it replaces the first four bytes of its argument, which are
    those of the data pointer here, by others (its generator has no fixed point), and nothing else.
    """

    NUM_SLOTS = 1 << 17

    def __init__(self) -> None:
        self._memory = np.zeros((self.NUM_SLOTS, _MANAGED_TENSOR.size), dtype=np.uint8)
        self._bytes = self._memory.reshape(-1)
        self._start = self._memory.ctypes.data
        self._marks = self._memory.view(np.uint32)[:, 0]
        self._expected = np.zeros(self.NUM_SLOTS, dtype=np.uint32)
        self._blocks: dict[int, Block] = {}
        self._unused: list[int] = []
        self._num_touched = 0
        library = ctypes.CDLL(ctypes.util.find_library("c"))
        self._deleter = ctypes.cast(library.rand_r, ctypes.c_void_p).value

    def managed_tensor(
        self, block: Block, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype
    ) -> int:
        """Address of a structure whose deleter marks it; `freed` gives the block back then."""
        number = self._unused.pop() if self._unused else self._num_touched
        self._num_touched = max(self._num_touched, number + 1)
        place = number * _MANAGED_TENSOR.size
        _MANAGED_TENSOR.pack_into(
            self._bytes,
            place,
            block.address,
            _EXTERNAL_DEVICE,
            0,
            len(sizes),
            _type_code(dtype),
            dtype.itemsize * 8,
            1,
            _address_of_numbers(*sizes),
            _address_of_numbers(*strides),
            0,
            0,
            self._deleter,
        )
        self._expected[number] = self._marks[number]
        self._blocks[number] = block
        return self._start + place

    def freed(self) -> list[Block]:
        """Blocks whose tensors torch has let go of since the last call."""
        touched = slice(0, self._num_touched)
        changed = np.flatnonzero(self._marks[touched] != self._expected[touched]).tolist()
        for number in changed:
            self._expected[number] = self._marks[number]
        self._unused += changed
        return [self._blocks.pop(number) for number in changed]


_slots = _Slots()


def collect_freed() -> None:
    """Gives back the blocks of tensors that the host has dropped; called before anything that
    changes the order of streams, so that a block counts as freed where the host dropped it.
    """
    with lock:
        for block in _slots.freed():
            del blocks[block.address]
            _give_back(block)


call_before_waits(collect_freed)


@cache
def _type_code(dtype: torch.dtype) -> int:
    if dtype == torch.bool:
        return _BOOL
    if dtype == torch.bfloat16:
        return _BFLOAT
    if dtype.is_complex:
        return _COMPLEX
    if dtype.is_floating_point:
        return _FLOAT
    return _UINT if dtype == torch.uint8 else _INT


def allocate(size: Sequence[Any], stride: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the device without values."""
    sizes = [int(number) for number in size]
    strides = [int(number) for number in stride]
    with lock:
        collect_freed()
        block = _take_block(_num_elements_spanned(sizes, strides) * dtype.itemsize)
        blocks[block.address] = block
        managed = _slots.managed_tensor(block, sizes, strides, dtype)
    capsule = _new_capsule(managed, b"dltensor", None)
    made: torch.Tensor = torch._C._from_dlpack(capsule)  # type: ignore[attr-defined]
    return made


def _num_elements_spanned(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements between the first and the last one of a strided tensor, both included."""
    if 0 in size:
        return 0
    return 1 + sum((number - 1) * step for number, step in zip(size, stride, strict=True))


def is_on_device(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def block_of(tensor: torch.Tensor) -> Block:
    return blocks[tensor.untyped_storage().data_ptr()]


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and end of a tensor in its block."""
    num_bytes = tensor.element_size()
    start = tensor.storage_offset() * num_bytes
    if tensor.is_contiguous():
        return start, start + tensor.numel() * num_bytes
    return start, start + _num_elements_spanned(tensor.size(), tensor.stride()) * num_bytes


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that CPU kernels take; only streams may use it."""
    elements = block_of(tensor).elements(tensor.dtype)
    view = elements.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    if tensor.is_conj():
        view = view.conj()
    return torch._neg_view(view) if tensor.is_neg() else view


def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    """The tensor's block is not given out again before `stream` is done with it."""
    with lock:
        block_of(tensor).recorded.add(stream.id)
