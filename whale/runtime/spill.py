"""The folder with what one rank has spilled to disk: a file for each block, mapped into memory.

A file has all its bytes on disk before it is mapped, so that a full disk is found when a block gets
its file and not in the middle of a copy, where the system could only kill the process. Before a
file is read its size is looked at, for the same reason. Nothing in the folder outlives a run:
files of an earlier one, which may have been killed, are removed unread.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import weakref
from pathlib import Path

import torch
from torch import Tensor

from whale.units import human_bytes

SPILL = "spill"
"""folder in the run folder with those of all ranks"""
_RANK = re.compile(r"rank-(\d+)")
_folders = itertools.count()
_owner_of: dict[Path, tuple[int, int]] = {}
"""process and number of the last `SpillFolder` of each path: an engine that is made anew takes over
the folder of the one before, which may be let go later
"""


class SpillError(RuntimeError):
    """A file with what a rank has spilled cannot be written, or is not what it was."""


class SpillFolder:
    """The files of one rank."""

    def __init__(self, folder: str | Path, rank: int, num_ranks: int) -> None:
        """`folder`: of the run. What an earlier run has left of this rank, or of ranks that this
        job has not, is removed.
        """
        self.rank = rank
        self.path = Path(folder) / SPILL / f"rank-{rank}"
        remove_leftovers(folder, rank, num_ranks)
        try:
            self.path.mkdir(parents=True)
            probe = self.path / "probe"
            probe.write_bytes(b"whale")
            probe.unlink()
        except OSError as error:
            raise SpillError(
                f'rank {rank}: "offload" to disk cannot write to {self.path}: {error.strerror}. '
                'Try: another "run_folder", or "host" in place of "disk"'
            ) from None
        owner = (os.getpid(), next(_folders))
        _owner_of[self.path] = owner
        self._remove = weakref.finalize(self, _remove_own, self.path, owner)

    def file(self, name: str) -> Path:
        return self.path / f"{name}.spill"

    def map(self, name: str, num_bytes: int) -> Tensor:
        """Memory of so many bytes, [num_bytes] uint8, that is a file; what was in it is gone."""
        path = self.file(name)
        try:
            path.unlink(missing_ok=True)
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            return torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
        except (OSError, RuntimeError) as error:
            raise SpillError(self._refusal(path, num_bytes, error)) from None

    def check(self, name: str, num_bytes: int) -> None:
        """Raises where the file is not there with all its bytes."""
        path = self.file(name)
        try:
            found = path.stat().st_size
        except OSError as error:
            problem = f"is gone ({error.strerror})"
        else:
            if found == num_bytes:
                return
            problem = f"has {human_bytes(found)} of the {human_bytes(num_bytes)} that were written"
        raise SpillError(
            f"rank {self.rank}: the spill file {path} {problem}: something else has changed the "
            "folder. Start again from the last checkpoint (engine.load)"
        )

    def _refusal(self, path: Path, num_bytes: int, error: Exception) -> str:
        text = f"rank {self.rank} cannot write {human_bytes(num_bytes)} to the spill file {path}: "
        if getattr(error, "errno", None) != errno.ENOSPC:
            return text + str(error)
        free = shutil.disk_usage(self.path).free
        return (
            f'{text}the disk is full ({human_bytes(free)} free). Try: a "run_folder" on a larger '
            'disk, or "host" in place of "disk" in "offload"'
        )

    def close(self) -> None:
        """Removes all files. Memory that is mapped stays valid."""
        self._remove()


def remove_leftovers(folder: str | Path, rank: int, num_ranks: int) -> None:
    """Removes what an earlier run has left of this rank, and of ranks that this job has not."""
    for path in Path(folder, SPILL).glob("rank-*"):
        found = _RANK.fullmatch(path.name)
        if found is not None and (int(found[1]) == rank or int(found[1]) >= num_ranks):
            shutil.rmtree(path, ignore_errors=True)


def _remove_own(path: Path, owner: tuple[int, int]) -> None:
    is_forked = os.getpid() != owner[0]  # a process that loads data, say
    if is_forked or _owner_of.get(path) != owner:
        return
    del _owner_of[path]
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):  # other ranks still have files
        path.parent.rmdir()
