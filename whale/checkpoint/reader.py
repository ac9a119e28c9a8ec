"""Reading a checkpoint: any tensor, whole or a box of it, whoever wrote which part. Only what is
needed is read, and all of it is checked.

A whole tensor costs its own bytes and nothing else. A box costs the blocks that it touches: a range
of dim 0 at most one block more on each side of each piece, a range of an inner dim up to all rows
that it crosses (unless its runs are longer than a block).
"""

from __future__ import annotations

import logging
import os
import stat
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from whale.checkpoint.errors import CheckpointError
from whale.checkpoint.format import (
    CHECKPOINT_NAME,
    INDEX,
    Entry,
    Index,
    SavedPiece,
    decode,
    read_index,
)
from whale.checkpoint.pieces import Box, extents, intersect, is_inside, relative, slices, whole
from whale.checkpoint.tensor_files import (
    CHECKSUM_DIGITS,
    DTYPES,
    TensorFile,
    block_checksum,
    file_checksum,
)
from whale.names import nearest

logger = logging.getLogger("whale")

MAX_OPEN_FILES = 64  # far below the usual limit of 1,024 for a process


def find_checkpoints(folder: str | Path) -> list[Path]:
    """Complete checkpoints in a folder, the latest step first. What is damaged or incomplete is
    left out, with a warning.
    """
    root = Path(folder)
    if not root.is_dir():
        return []
    found: dict[int, Path] = {}
    # `step_12.old` comes before `step_12`, which replaces it
    for path in sorted(root.iterdir(), reverse=True):
        match = CHECKPOINT_NAME.fullmatch(path.name)
        if not match:
            continue
        try:
            check_files(path, read_index(path))
            found[int(match[1])] = path
        except CheckpointError as error:
            logger.warning("%s is left out: %s", path, error)
    return [found[step] for step in sorted(found, reverse=True)]


def resolve(path: str | Path) -> Path:
    """A checkpoint itself, or the latest one in a folder of checkpoints."""
    given = Path(path)
    if (given / INDEX).exists() or CHECKPOINT_NAME.fullmatch(given.name):
        return given
    found = find_checkpoints(given)
    if not found:
        names = sorted(item.name for item in given.iterdir())[:5] if given.is_dir() else []
        there = f"it holds {', '.join(names) or 'nothing'}" if given.is_dir() else "it is no folder"
        raise CheckpointError(
            f"{given} has no complete checkpoint ({there}): give a folder that engine.save wrote to"
        )
    return found[0]


def check_files(path: Path, index: Index) -> None:
    """Every file of the index is there, a plain file, and of the right size."""
    for name, info in index.files.items():
        file = path / name
        try:
            status = os.lstat(file)
        except OSError:
            raise CheckpointError(
                f"{file} is missing: the checkpoint is not complete. Load another one"
            ) from None
        if stat.S_ISLNK(status.st_mode):
            raise CheckpointError(
                f"{file} is a symbolic link: a checkpoint is read from its own folder only"
            )
        if not stat.S_ISREG(status.st_mode) or status.st_size != info.num_bytes:
            raise CheckpointError(
                f"{file} has {status.st_size:,} bytes, it was written with {info.num_bytes:,}: it "
                "was cut short or changed. Load another checkpoint"
            )


class Reader:
    """A checkpoint opened for reading."""

    def __init__(self, path: str | Path) -> None:
        self.path = resolve(path)
        self.index = read_index(self.path)
        check_files(self.path, self.index)
        self.step = self.index.step
        self.values: dict[str, Any] = decode(self.index.values)
        """of the job"""
        self.rank_values: list[dict[str, Any]] = [
            decode(values) for values in self.index.rank_values
        ]
        """by rank of the job that saved"""
        self._by_file: dict[str, dict[str, tuple[Entry, SavedPiece]]] = {
            name: {} for name in self.index.files
        }
        for entry in self.index.tensors.values():
            for piece in entry.pieces:
                self._by_file[piece.file][piece.key] = (entry, piece)
        self._open: OrderedDict[str, TensorFile] = OrderedDict()
        self._closed_bytes_read = (self.path / INDEX).stat().st_size

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __contains__(self, name: str) -> bool:
        return name in self.index.tensors

    def close(self) -> None:
        while self._open:
            self._close_oldest()

    def names(self, prefix: str = "") -> list[str]:
        return [name for name in self.index.tensors if name.startswith(prefix)]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self.index.tensors.items()}

    @property
    def num_bytes_read(self) -> int:
        """Bytes read from all files so far: index, headers and tensors."""
        return self._closed_bytes_read + sum(file.num_bytes_read for file in self._open.values())

    def read(self, name: str, ranges: Box | None = None) -> Tensor:
        """A tensor, or the box `ranges` of it, on the CPU. Every byte that was read has been
        checked.
        """
        entry = self._entry(name)
        wanted = whole(entry.shape) if ranges is None else ranges
        if not is_inside(wanted, entry.shape):
            raise CheckpointError(
                f"{name} in {self.path} has shape {list(entry.shape)}, it has no {wanted}"
            )
        if 0 in extents(wanted):
            return torch.empty(extents(wanted), dtype=DTYPES[entry.dtype])
        if len(entry.pieces) == 1:
            return self._read_piece(name, entry.pieces[0], wanted)
        result = torch.empty(extents(wanted), dtype=DTYPES[entry.dtype])
        for piece in entry.pieces:
            both = intersect(piece.ranges, wanted)
            if both is not None:
                result[slices(relative(both, wanted))] = self._read_piece(name, piece, both)
        return result

    def _entry(self, name: str) -> Entry:
        if name not in self.index.tensors:
            raise CheckpointError(
                f"{self.path} has no tensor {name!r}: it was saved from another model, optimizer "
                f"or setting.{nearest(name, self.index.tensors)}"
            )
        return self.index.tensors[name]

    def _read_piece(self, name: str, piece: SavedPiece, wanted: Box) -> Tensor:
        check = self._checker(name, piece)
        return self._file(piece.file).read(
            piece.key, relative(wanted, piece.ranges), self.index.block_bytes, check
        )

    def _checker(self, name: str, piece: SavedPiece) -> Callable[[int, memoryview], None]:
        def check(block: int, content: memoryview) -> None:
            expected = piece.checksums[block * CHECKSUM_DIGITS : (block + 1) * CHECKSUM_DIGITS]
            if block_checksum(content) != expected:
                raise CheckpointError(
                    f"{self.path / piece.file} is damaged inside {name!r}: block {block} has "
                    f"checksum {block_checksum(content)}, "
                    f"it was written with {expected}. Load another checkpoint"
                )

        return check

    def _file(self, name: str) -> TensorFile:
        """An open file whose header agrees with the index. The file's checksum covers header and
        blocks' checksums.
        """
        if name not in self._open:
            while len(self._open) >= MAX_OPEN_FILES:
                self._close_oldest()
            file = TensorFile(self.path / name)
            try:
                self._check_header(file, name)
            except BaseException:
                file.close()
                raise
            self._open[name] = file
        self._open.move_to_end(name)
        return self._open[name]

    def _check_header(self, file: TensorFile, name: str) -> None:
        pieces = self._by_file[name]
        wrong = next(iter(pieces.keys() ^ file.tensors.keys()), None)
        for key, (entry, piece) in pieces.items() if wrong is None else ():
            stored = file.tensors[key]
            if (stored.dtype, stored.shape) != (entry.dtype, extents(piece.ranges)):
                wrong = key
        if wrong is None:
            order = sorted(
                file.tensors, key=lambda key: (file.tensors[key].start, file.tensors[key].num_bytes)
            )
            # empty tensors have no blocks, so their order among equals does not matter
            if (
                file_checksum(file.header, (pieces[key][1].checksums for key in order))
                == self.index.files[name].checksum
            ):
                return
        about = f": they disagree about {wrong[:200]!r}" if wrong is not None else ""
        raise CheckpointError(
            f"{file.path} is not the file that {INDEX} describes{about}. It was swapped or "
            "changed; load another checkpoint"
        )

    def _close_oldest(self) -> None:
        _, file = self._open.popitem(last=False)
        self._closed_bytes_read += file.num_bytes_read
        file.close()
