"""What a checkpoint folder holds, as plain frozen data.

    folder/
      step_00000012/                 complete: renamed into place last
        index.json                   which tensor is where, checksums, values
        rank_00000.safetensors       what rank 0 wrote
        rank_00001.safetensors
      .tmp_00000013_<save id>/       being written, or left over from a crash
      step_00000012.old/             counts as step 12: only after a crash while that step was
                                     saved a second time

`index.json` starts with the SHA-256 of the rest of the file: an index that was edited or cut short
is refused. Everything in it is checked for type, size and sense before it is used, and nothing in
it can name a file outside the folder.

Values are JSON. What JSON cannot hold (tuples, infinities, dicts with number keys, counters, 0-dim
tensors) is written as `{"!tuple": [1, 2]}`: an object with one key that starts with "!". Reading
makes only the kinds listed here, so nothing from a file is ever called or imported.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

from whale.checkpoint.errors import CheckpointError
from whale.checkpoint.pieces import Box, volume, why_not_cover
from whale.checkpoint.tensor_files import (
    CHECKSUM_DIGITS,
    DTYPES,
    PAGE_BYTES,
    num_blocks,
    open_regular,
)

FORMAT = 1  # raised when the meaning of a field changes
INDEX = "index.json"
MAX_INDEX_BYTES = 1 << 30  # an index of a million pieces has about 200 MB
MAX_BLOCK_BYTES = 1 << 30
FILE_NAME = re.compile(r"rank_[0-9]{5,9}\.safetensors")
CHECKPOINT_NAME = re.compile(r"step_([0-9]{8,18})(\.old)?")
SAVE_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
HEXADECIMAL = re.compile(r"[0-9a-f]*")
STRICT = ConfigDict(strict=True, extra="forbid")


@dataclass(frozen=True)
class SavedPiece:
    """A part of a tensor in one rank's file."""

    __pydantic_config__ = STRICT

    file: str
    key: str
    """its name in the file"""
    ranges: Box
    checksums: str
    """CRC-32 of each block, 8 digits each"""


@dataclass(frozen=True)
class Entry:
    """One tensor of the checkpoint: its pieces hold every element exactly once."""

    __pydantic_config__ = STRICT

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[SavedPiece, ...]


@dataclass(frozen=True)
class FileInfo:
    __pydantic_config__ = STRICT

    num_bytes: int
    checksum: str
    """SHA-256 of the header and of all blocks' checksums"""


@dataclass(frozen=True)
class RankReport:
    """What one rank wrote; it leaves this beside its file for rank 0."""

    __pydantic_config__ = STRICT

    rank: int
    tensors: dict[str, Entry]
    files: dict[str, FileInfo]
    values: dict[str, Any]


@dataclass(frozen=True)
class Index:
    """The whole checkpoint."""

    __pydantic_config__ = STRICT

    format: int
    save_id: str
    step: int
    block_bytes: int
    """length of the blocks that have a checksum each"""
    files: dict[str, FileInfo]
    tensors: dict[str, Entry]
    values: dict[str, Any]
    """of the job, as rank 0 gave them (see `encode`)"""
    rank_values: tuple[dict[str, Any], ...]
    """by rank"""


@dataclass(frozen=True)
class _IndexFile:
    __pydantic_config__ = STRICT

    checksum: str
    index: Index


INDEX_FILE = TypeAdapter(_IndexFile)
RANK_REPORT = TypeAdapter(RankReport)


@dataclass(frozen=True)
class Target:
    """Where a save goes. `save_id` is the same on all ranks and new for every save, so that no two
    saves ever share a temporary folder.
    """

    folder: Path
    step: int
    save_id: str

    def __post_init__(self) -> None:
        if not SAVE_ID.fullmatch(self.save_id):
            raise ValueError(
                f"a save id has 1 to 64 letters, digits, '_' or '-', not {self.save_id!r}"
            )
        if self.step < 0:
            raise ValueError(f"the step of a checkpoint is at least 0, not {self.step}")

    @property
    def temporary(self) -> Path:
        return self.folder / f".tmp_{self.step:08d}_{self.save_id}"

    @property
    def final(self) -> Path:
        return self.folder / f"step_{self.step:08d}"


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def rank_report(rank: int) -> str:
    return f"rank_{rank:05d}.json"


def rank_failure(rank: int) -> str:
    return f"rank_{rank:05d}.failed"


def index_bytes(index: Index) -> bytes:
    """`{"checksum":"<sha-256 of what follows>","index":{...}}`"""
    body = (
        b'"index":'
        + json.dumps(asdict(index), separators=(",", ":"), allow_nan=False).encode()
        + b"}\n"
    )
    return _prefix(body) + body


def read_index(path: Path) -> Index:
    """The index of a checkpoint folder, every field checked; nothing is executed."""
    file = path / INDEX
    content = _read_small(file)
    start = len(_prefix(b""))
    if content[:start] != _prefix(content[start:]):
        raise CheckpointError(
            f"{file} was changed or cut short after it was written: its checksum is wrong. Load "
            "another checkpoint"
        )
    try:
        index = INDEX_FILE.validate_json(content).index
    except ValidationError as error:
        _check_format(content, file)
        raise CheckpointError(f"{file} is not an index: {_first_problem(error)}") from None
    _check_format(content, file)
    check_index(index, file)
    return index


def report_bytes(report: RankReport) -> bytes:
    return json.dumps(asdict(report), separators=(",", ":"), allow_nan=False).encode()


def read_report(file: Path) -> RankReport:
    try:
        return RANK_REPORT.validate_json(_read_small(file))
    except ValidationError as error:
        raise CheckpointError(f"{file} is not a rank's report: {_first_problem(error)}") from None


def check_index(index: Index, file: Path) -> None:
    """Raises when the index does not make sense as a whole, naming the tensor."""
    if not 0 <= index.step < 10**18 or not SAVE_ID.fullmatch(index.save_id):
        raise CheckpointError(
            f"{file} has step {index.step} and save id {index.save_id[:80]!r}: it was not written "
            "by Whale"
        )
    if not PAGE_BYTES <= index.block_bytes <= MAX_BLOCK_BYTES:
        raise CheckpointError(
            f"{file} has blocks of {index.block_bytes} bytes, allowed are {PAGE_BYTES} to "
            f"{MAX_BLOCK_BYTES}"
        )
    for name, info in index.files.items():
        if not FILE_NAME.fullmatch(name):
            raise CheckpointError(
                f"{file} names the file {name[:80]!r}: only files like {rank_file(0)!r} in its "
                "own folder are read"
            )
        if info.num_bytes < 8:
            raise CheckpointError(
                f"{file} says that {name} has {info.num_bytes} bytes, a safetensors file has at "
                "least 8"
            )
    places: set[tuple[str, str]] = set()
    for name, entry in index.tensors.items():
        problem = _problem_of_entry(entry, index)
        for piece in entry.pieces:
            if (piece.file, piece.key) in places:
                problem = problem or f"its data in {piece.file} belongs to another tensor too"
            places.add((piece.file, piece.key))
        if problem:
            raise CheckpointError(f"{file}: tensor {name[:200]!r} is wrong: {problem}")


def _problem_of_entry(entry: Entry, index: Index) -> str:
    if entry.dtype not in DTYPES:
        return f"its dtype {entry.dtype[:20]!r} is not one of {', '.join(DTYPES)}"
    itemsize = DTYPES[entry.dtype].itemsize
    if (
        any(size < 0 for size in entry.shape)
        or math.prod(max(size, 1) for size in entry.shape) * itemsize >= 1 << 62
    ):
        return f"its shape {list(entry.shape)[:8]} is impossible"
    problem = why_not_cover([piece.ranges for piece in entry.pieces], entry.shape)
    if problem:
        return problem
    for piece in entry.pieces:
        num_bytes = volume(piece.ranges) * itemsize
        if piece.file not in index.files:
            return f"its file {piece.file[:80]!r} is not listed"
        if num_bytes > index.files[piece.file].num_bytes:
            return (
                f"its piece has {num_bytes:,} bytes, {piece.file} has "
                f"{index.files[piece.file].num_bytes:,} in all"
            )
        expected = num_blocks(num_bytes, index.block_bytes) * CHECKSUM_DIGITS
        if len(piece.checksums) != expected or not HEXADECIMAL.fullmatch(piece.checksums):
            return f"it has {len(piece.checksums)} digits of checksums, not {expected}"
    return ""


def _prefix(body: bytes) -> bytes:
    return b'{"checksum":"' + hashlib.sha256(body).hexdigest().encode() + b'",'


def _check_format(content: bytes, file: Path) -> None:
    """The format stands first, so that it can be read even when the rest means something else."""
    found = re.match(rb'"index":\{"format":([0-9]{1,9}),', content[len(_prefix(b"")) :])
    if found and int(found[1]) != FORMAT:
        raise CheckpointError(
            f"{file} has checkpoint format {int(found[1])}, this Whale reads {FORMAT}: load it "
            "with the Whale that wrote it"
        )
    if not found:
        raise CheckpointError(f"{file} is not an index: it does not start with a format")


def _read_small(file: Path) -> bytes:
    descriptor = open_regular(file, follow_links=False)
    with os.fdopen(descriptor, "rb") as opened:
        size = os.fstat(descriptor).st_size
        if size > MAX_INDEX_BYTES:
            raise CheckpointError(
                f"{file} has {size:,} bytes, at most {MAX_INDEX_BYTES:,} are read: it was not "
                "written by Whale"
            )
        return opened.read(size)  # more would be allocated, whatever the file has


def _first_problem(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part)[:80] for part in first["loc"]) or "the file"
    return f"{where}: {first['msg']} ({error.error_count()} problems)"


# ---- values

SCALAR_DTYPES = {
    str(dtype): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    )
}


def encode(value: Any, where: str) -> Any:
    """`value` in terms of JSON. `where` names it in the refusal of what cannot be held: functions,
    open files, whole tensors.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, np.generic):
        return encode(value.item(), where)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"!float": repr(float(value))}
    if isinstance(value, torch.Tensor):
        if value.dim() != 0 or str(value.dtype) not in SCALAR_DTYPES:
            raise CheckpointError(
                f"{where} is a tensor of shape {list(value.shape)} and {value.dtype}: only a 0-dim "
                "tensor can stand among the values. Save it as a tensor, or drop it"
            )
        return {"!tensor": [str(value.dtype), encode(value.item(), where)]}
    if isinstance(value, (list, tuple)):
        items = [encode(item, f"{where}[{place}]") for place, item in enumerate(value)]
        return {"!tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return _encode_dict(value, where)
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint "
        "cannot hold (numbers, text, lists, dicts and 0-dim tensors can). Leave it out of the "
        "state, and build it again before loading"
    )


def decode(value: Any) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value)) if len(value) == 1 else ""
    if not tag.startswith("!"):
        return {key: decode(item) for key, item in value.items()}
    inner = value[tag]
    try:
        if tag == "!tuple":
            return tuple(decode(item) for item in inner)
        if tag == "!float" and inner in ("inf", "-inf", "nan"):
            return float(inner)
        if tag == "!dict":
            return {decode(key): decode(item) for key, item in inner}
        if tag == "!counter":
            return Counter({decode(key): decode(item) for key, item in inner})
        if tag == "!tensor":
            return torch.tensor(decode(inner[1]), dtype=SCALAR_DTYPES[inner[0]])
    except (TypeError, ValueError, KeyError, IndexError, RuntimeError):
        pass
    raise CheckpointError(
        f"a value of the checkpoint is marked {tag!r} but is not one: the file was damaged or "
        "made by something else"
    )


def _encode_dict(value: dict[Any, Any], where: str) -> Any:
    plain = not isinstance(value, Counter) and all(
        isinstance(key, str) and not key.startswith("!") for key in value
    )
    if plain:
        return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
    pairs = [
        [encode(key, f"a key of {where}"), encode(item, f"{where}[{key!r}]")]
        for key, item in value.items()
    ]
    return {"!counter" if isinstance(value, Counter) else "!dict": pairs}
