"""What went wrong with a checkpoint, said so that the reader knows what to do next."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
NOT_ALLOWED = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or must not be loaded. The model and optimizer in memory
    are as they were.
    """


def explain(
    error: OSError, doing: str, path: Path, num_bytes: int | None = None
) -> CheckpointError:
    """The error of an operating system call in plain words: what happened, where, the bytes, and
    what to do.
    """
    if error.errno in FULL:
        needed = (
            f"this file needs {num_bytes:,} bytes"
            if num_bytes is not None
            else "more space is needed"
        )
        what = (
            f"the disk is full: {needed}, {_free_bytes(path)} are free. Free some space, keep "
            "fewer checkpoints (keep=...), or save to another folder"
        )
    elif error.errno == errno.EFBIG:
        size = f" of {num_bytes:,} bytes" if num_bytes is not None else ""
        what = (
            f"a file{size} is larger than the file system or a limit allows. Raise `ulimit -f`, "
            "or save to another folder"
        )
    elif error.errno in NOT_ALLOWED:
        why = (
            "the file system is read-only"
            if error.errno == errno.EROFS
            else "this user may not write there"
        )
        what = f"{why}. Save to a folder that you can write to, or change its permissions"
    else:
        what = f"{error.strerror or error}. Check the disk, or save to another folder"
    return CheckpointError(
        f"{doing} {path} failed: {what}. Earlier checkpoints are untouched, and training can "
        "continue"
    )


def _free_bytes(path: Path) -> str:
    for folder in (path, *path.parents):
        try:
            return f"{shutil.disk_usage(folder).free:,}"
        except OSError:
            continue
    return "unknown"


@contextlib.contextmanager
def plain_errors(doing: str, path: Path, num_bytes: int | None = None) -> Iterator[None]:
    """Errors of the system inside become `CheckpointError`, with `path` and what to do."""
    try:
        yield
    except FileNotFoundError as error:  # every folder that is written to was made just before
        who = (
            "Rank 0 gave up this save (its message says why), or another"
            if doing == "writing"
            else "Another"
        )
        raise CheckpointError(
            f"{doing} {path} failed: it was removed meanwhile. {who} job works there. "
            "Earlier checkpoints are untouched, and training can continue"
        ) from error
    except OSError as error:
        raise explain(error, doing, path, num_bytes) from error
