"""Safetensors files: written with a checksum for each block of bytes, read slice by slice.

    u64 header length | JSON header: key -> dtype, shape, data_offsets | bytes of the tensors

Checksums are CRC-32 (`zlib`), measured on one core of the build machine: 3.2 GiB/s, against 1.4 for
SHA-256 and 0.7 for BLAKE2b; all three let other threads run meanwhile. They find damage and
mix-ups. They are no signature: who can write to the folder can write new checksums. A file's own
checksum is the SHA-256 of its header and its blocks' checksums: a rank checks it without reading
the tensors of others.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whale.checkpoint.errors import CheckpointError
from whale.checkpoint.pieces import Box, byte_segments, extents, slices
from whale.dtypes import as_bytes

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "C128": torch.complex128,
    "C32": torch.complex32,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
PAIRS = {"C128": "F64", "C32": "F16"}
"""complex types that the safetensors format does not know: a file holds them as pairs of real
numbers, [..., 2], and says so under `COMPLEX` in its metadata
"""
COMPLEX = "whale.complex_as_pairs"
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

BLOCK_BYTES = 1 << 18
"""of one checksum. Small, because a slice costs whole blocks. 256 KiB, 1 MiB and 4 MiB slowed
training beside a save alike, as far as a noisy machine could tell"""
WRITE_BYTES = 1 << 22  # of one write call; a multiple of BLOCK_BYTES, or blocks would be cut
CHECKSUM_DIGITS = 8  # CRC-32 in hexadecimal
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
PAGE_BYTES = 4096  # what a disk reads at least
SHORT_RUN_BYTES = 256  # shorter runs of a slice are not worth a call each: their pages are read


@dataclass(frozen=True)
class Written:
    """What a file holds, known once it is written."""

    num_bytes: int
    checksum: str
    block_checksums: dict[str, str]
    """key -> checksums of its blocks, one after the other"""


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies in a file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """first byte, counted from the start of the file"""
    num_bytes: int


def dtype_name(tensor: Tensor, name: str) -> str:
    if tensor.dtype not in DTYPE_NAMES or tensor.layout != torch.strided or tensor.is_quantized:
        raise CheckpointError(
            f"{name} is {tensor.dtype}, {tensor.layout}: safetensors files cannot hold that. "
            "Convert it before saving"
        )
    return DTYPE_NAMES[tensor.dtype]


def num_blocks(num_bytes: int, block_bytes: int = BLOCK_BYTES) -> int:
    return -(-num_bytes // block_bytes)


def file_checksum(header: bytes, block_checksums: Iterator[str]) -> str:
    """SHA-256 of the header and of all blocks' checksums in the order of the file."""
    total = hashlib.sha256(header)
    for text in block_checksums:
        total.update(text.encode())
    return total.hexdigest()


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> Written:
    """Writes a safetensors file and flushes it to the disk. Tensors may be on any device; they are
    taken one at a time.
    """
    # large items first: all are aligned
    order = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))
    header = _header(order, tensors, metadata)
    checksums: dict[str, str] = {}
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        _write_all(descriptor, memoryview(header))
        for key in order:
            checksums[key] = _write_tensor(descriptor, tensors[key])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    num_bytes = len(header) + sum(
        tensor.numel() * tensor.element_size() for tensor in tensors.values()
    )
    return Written(num_bytes, file_checksum(header, (checksums[key] for key in order)), checksums)


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a small file aside and renames it into place, so that nobody ever sees half of it."""
    aside = path.with_name(path.name + ".part")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        _write_all(descriptor, memoryview(content))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(aside, path)


def sync_folder(path: Path) -> None:
    """Names in a folder reach the disk only when the folder itself is flushed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path, follow_links: bool) -> int:
    """Opens a file for reading: a plain file, not a pipe or device, and no link unless links are
    followed.
    """
    flags = (
        os.O_RDONLY
        | getattr(os, "O_NONBLOCK", 0)
        | (0 if follow_links else getattr(os, "O_NOFOLLOW", 0))
    )
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing: the checkpoint is not complete. Load another one"
        ) from None
    except OSError as error:
        if path.is_symlink() and not follow_links:
            raise CheckpointError(
                f"{path} is a symbolic link: a checkpoint is read from its own folder only"
            ) from None
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}. Check the disk and the permissions"
        ) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a plain file")
    return descriptor


class TensorFile:
    """A safetensors file opened for reading. Only the header is read at first; every offset in it
    is checked against the file's size.
    """

    def __init__(self, path: Path, follow_links: bool = False) -> None:
        self.path = path
        self._descriptor = open_regular(path, follow_links)
        try:
            self.num_bytes = os.fstat(self._descriptor).st_size
            self.header = b""
            self.num_bytes_read = 0
            self.header = self._read_header()
            self.metadata, self.tensors = self._parse()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def read(
        self,
        key: str,
        box: Box | None = None,
        block_bytes: int = 0,
        check: Callable[[int, memoryview], None] | None = None,
    ) -> Tensor:
        """A tensor, or the box of it. With `check`, whole blocks are read and each is shown to
        `check(number, bytes)`.
        """
        stored = self.tensors[key]
        if stored.dtype not in DTYPES:
            raise CheckpointError(
                f"{key} in {self.path} is {stored.dtype}, which Whale does not know. It knows "
                f"{', '.join(DTYPES)}"
            )
        dtype = DTYPES[stored.dtype]
        if stored.num_bytes == 0 or (box is not None and 0 in extents(box)):
            return torch.empty(stored.shape if box is None else extents(box), dtype=dtype)
        # bytes that are not read cost no memory: the system gives pages when written
        buffer = np.empty(stored.num_bytes, dtype=np.uint8)
        view = buffer.data
        for start, stop in self._segments(stored, box, block_bytes if check else 0):
            self._read_into(view[start:stop], stored.start + start, key)
            if check is not None:
                for begin in range(start, stop, block_bytes):
                    check(begin // block_bytes, view[begin : min(begin + block_bytes, stop)])
        tensor = torch.from_numpy(buffer).view(dtype).reshape(stored.shape)
        if box is None or extents(box) == stored.shape:
            return tensor
        return tensor[slices(box)].clone(memory_format=torch.contiguous_format)

    def _segments(self, stored: Stored, box: Box | None, block_bytes: int) -> list[tuple[int, int]]:
        if box is None:
            return [(0, stored.num_bytes)]
        itemsize = DTYPES[stored.dtype].itemsize
        grain = block_bytes
        if not grain:
            cut = max(
                (dim for dim, (r, size) in enumerate(zip(box, stored.shape)) if r != (0, size)),
                default=0,
            )
            grain = 1 if math.prod(extents(box)[cut:]) * itemsize >= SHORT_RUN_BYTES else PAGE_BYTES
        return byte_segments(stored.shape, box, itemsize, grain)

    def _read_into(self, view: memoryview, offset: int, what: str) -> None:
        while len(view):
            try:
                count = os.preadv(self._descriptor, [view], offset)
            except OSError as error:
                raise CheckpointError(
                    f"reading {what} from {self.path} failed: {error.strerror}. Check the disk"
                ) from None
            if count == 0:
                raise CheckpointError(
                    f"{self.path} ends inside {what}: it was cut short. Load another checkpoint, "
                    "or copy it again"
                )
            self.num_bytes_read += count
            view = view[count:]
            offset = offset + count

    def _read_header(self) -> bytes:
        if self.num_bytes < 8:
            raise CheckpointError(
                f"{self.path} is not a safetensors file: it has {self.num_bytes} bytes. It was "
                "cut short, or never written"
            )
        prefix = bytearray(8)
        self._read_into(memoryview(prefix), 0, "the header")
        length = int.from_bytes(prefix, "little")
        if length > min(MAX_HEADER_BYTES, self.num_bytes - 8):
            is_pickle = prefix[:2] == b"PK" or prefix[0] == 0x80
            kind = "It looks like a pickle, which Whale never opens. " if is_pickle else ""
            raise CheckpointError(
                f"{self.path} is not a whole safetensors file: a header of {length:,} bytes does "
                f"not fit in {self.num_bytes:,}. {kind}Load another file"
            )
        header = bytearray(length)
        self._read_into(memoryview(header), 8, "the header")
        return bytes(prefix) + bytes(header)

    def _parse(self) -> tuple[dict[str, str], dict[str, Stored]]:
        try:
            raw = json.loads(self.header[8:], object_pairs_hook=_no_twins)
            metadata = raw.pop("__metadata__", {})
            base = len(self.header)
            if not isinstance(metadata, dict):
                metadata = {}
            pairs = set(json.loads(metadata.get(COMPLEX, "[]")))
            tensors = {key: _stored(item, base, key in pairs) for key, item in raw.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{self.path} is not a safetensors file: its header cannot be read ({error})"
            ) from None
        end = base
        for key, stored in sorted(
            tensors.items(), key=lambda pair: (pair[1].start, pair[1].num_bytes)
        ):
            size = (
                math.prod(stored.shape) * DTYPES[stored.dtype].itemsize
                if stored.dtype in DTYPES
                else stored.num_bytes
            )
            if stored.start != end or stored.num_bytes != size:
                raise CheckpointError(
                    f"{self.path} is damaged: {key} of shape {list(stored.shape)} does not have "
                    f"{stored.num_bytes:,} bytes"
                )
            end += stored.num_bytes
        if end != self.num_bytes:
            raise CheckpointError(
                f"{self.path} has {self.num_bytes:,} bytes, its header says {end:,}: it was cut "
                "short or changed"
            )
        return metadata, tensors


def _header(order: list[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    pairs = [key for key in order if dtype_name(tensors[key], key) in PAIRS]
    if pairs:
        metadata = {**metadata, COMPLEX: json.dumps(pairs)}
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for key in order:
        tensor = tensors[key]
        if key == "__metadata__":
            raise CheckpointError(
                "a tensor cannot have the name '__metadata__': safetensors files use it for "
                "themselves"
            )
        stop = offset + tensor.numel() * tensor.element_size()
        name = dtype_name(tensor, key)
        entries[key] = {
            "dtype": PAIRS.get(name, name),
            "shape": [*tensor.shape, *([2] if name in PAIRS else [])],
            "data_offsets": [offset, stop],
        }
        offset = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_tensor(descriptor: int, tensor: Tensor) -> str:
    """Writes a tensor's bytes; gives its blocks' checksums."""
    if tensor.numel() == 0:
        return ""
    flat = as_bytes(tensor.detach().cpu())
    view = flat.numpy().data
    checksums = []
    for start in range(0, len(view), WRITE_BYTES):
        part = view[start : start + WRITE_BYTES]
        for begin in range(0, len(part), BLOCK_BYTES):
            checksums.append(block_checksum(part[begin : begin + BLOCK_BYTES]))
        _write_all(descriptor, part)
    return "".join(checksums)


def block_checksum(block: memoryview) -> str:
    return f"{zlib.crc32(block):08x}"


def _write_all(descriptor: int, view: memoryview) -> None:
    while len(view):
        view = view[os.write(descriptor, view) :]


def _stored(item: dict[str, Any], base: int, is_complex: bool) -> Stored:
    if set(item) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"an entry has the fields {sorted(item)}")
    start, stop = item["data_offsets"]
    numbers = [start, stop, *item["shape"]]
    if (
        not isinstance(item["dtype"], str)
        or any(type(number) is not int or not 0 <= number < 1 << 62 for number in numbers)
        or stop < start
    ):
        raise ValueError(
            f"an entry has the shape {item['shape']} and offsets {item['data_offsets']}"
        )
    dtype = item["dtype"]
    shape = tuple(item["shape"])
    if is_complex:
        dtype = {real: name for name, real in PAIRS.items()}[dtype]
        if shape[-1:] != (2,):
            raise ValueError(f"complex numbers of shape {list(shape)} are not pairs")
        shape = shape[:-1]
    return Stored(dtype, shape, base + start, stop - start)


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found
