"""Putting a checkpoint into place, once every rank has written its file: rank 0 checks that every
tensor is there exactly once, and one rename makes the checkpoint visible.

    rank 0        finish         waits for all reports, writes index.json, flushes, renames the
                                 folder into place, removes what is too old
    other ranks   await_outcome  wait until rank 0 has renamed the folder, or given up

No collective is called: ranks meet in the folder only, so all of this runs beside training. A crash
at any point leaves a temporary folder that nobody reads.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from whale.checkpoint.errors import CheckpointError, explain, plain_errors
from whale.checkpoint.format import (
    CHECKPOINT_NAME,
    FORMAT,
    INDEX,
    Entry,
    FileInfo,
    Index,
    RankReport,
    Target,
    check_index,
    index_bytes,
    rank_failure,
    rank_file,
    rank_report,
    read_report,
)
from whale.checkpoint.tensor_files import BLOCK_BYTES, sync_folder, write_bytes
from whale.names import listed

logger = logging.getLogger("whale")

TIMEOUT_S = 300.0
"""how long ranks wait for each other without any sign of progress"""
AHEAD_BYTES = 96  # the save id stands in these first bytes of an index, after its checksum
SHOWN = 8
"""ranks that are written out in a message"""
OLD = ".old"
EXIT_TIMEOUT_S = 60.0
"""longest patience once the script has ended: a job with a dead rank must not hang for long"""
POLL_S = 0.05
PROGRESS_S = 1.0  # how often sizes are looked at for progress
PROBE = "probe"


def finish(
    target: Target,
    num_ranks: int,
    values: Mapping[str, Any],
    keep: int | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Path:
    """Rank 0, after its own `write_rank`: makes the checkpoint from all ranks' files and puts it
    into place.

    `values`: of the whole job, as JSON. `keep`: how many checkpoints stay, this one included; None
    = all.
    """
    if keep is not None and keep < 1:
        raise ValueError(
            f"keep={keep}: at least the checkpoint just written must stay. Use keep=None to keep "
            "all"
        )
    try:
        reports = _await_reports(target, num_ranks, timeout_s)
        with plain_errors("finishing", target.temporary):
            _write_index(target, reports, values)
            _rename_into_place(target)
    except Exception:
        give_up(target, timeout_s)
        raise
    try:
        _remove_old(target, keep)
        _remove_stale(target, timeout_s)
    except OSError as error:
        logger.warning(
            "%s is saved, but older checkpoints could not be removed: %s", target.final, error
        )
    return target.final


def give_up(target: Target, timeout_s: float = TIMEOUT_S) -> None:
    """Rank 0, when a save failed: removes the folder for whose end the other ranks wait.

    Waits for nobody: on a full disk the others cannot say that they failed too. They may make the
    folder only later, and on a disk that cannot be written to it may not be removable yet; so it is
    looked for again for some time.
    """
    shutil.rmtree(target.temporary, ignore_errors=True)

    def keep_removing() -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            time.sleep(PROGRESS_S)
            shutil.rmtree(target.temporary, ignore_errors=True)

    threading.Thread(target=keep_removing, name="whale-abandoned-checkpoint", daemon=True).start()


def await_outcome(target: Target, timeout_s: float = TIMEOUT_S) -> Path:
    """The other ranks, after `write_rank`: returns when rank 0 has put the checkpoint into place,
    raises when it gave up.
    """
    # twice as long: rank 0 may itself be waiting for another rank
    patience = Patience(target.temporary, 2 * timeout_s)
    while target.temporary.exists():
        if patience.looks_now():
            with (
                plain_errors("finishing", target.temporary),
                contextlib.suppress(FileNotFoundError),
            ):
                # on a disk that can no longer be written to, rank 0 cannot even say so
                os.utime(target.temporary)
        if patience.is_over():
            raise CheckpointError(
                f"{target.final} was not finished: rank 0 gave no sign for {patience.limit_s:.0f} "
                "s. See its log"
            )
        patience.pause()
    try:
        with open(target.final / INDEX, "rb") as index:
            is_ours = f'"save_id":"{target.save_id}"'.encode() in index.read(2 * AHEAD_BYTES + 128)
    except OSError:
        is_ours = False
    if not is_ours:
        raise CheckpointError(
            f"{target.final} was not finished: rank 0 gave up this save. Its message says why"
        )
    return target.final


def _await_reports(target: Target, num_ranks: int, timeout_s: float) -> list[RankReport]:
    """All ranks' reports, in order. Waits until every rank has reported or failed: then nobody
    writes there any more.
    """
    folder = target.temporary
    patience = Patience(folder, timeout_s)
    while True:
        try:
            names = set(os.listdir(folder))
        except OSError as error:
            raise CheckpointError(
                f"{folder} cannot be listed while it is being written ({error.strerror}): did "
                "another job remove it?"
            ) from None
        failed = [rank for rank in range(num_ranks) if rank_failure(rank) in names]
        missing = [
            rank
            for rank in range(num_ranks)
            if names.isdisjoint((rank_report(rank), rank_failure(rank)))
        ]
        if not missing:
            break
        if patience.looks_now():
            with plain_errors("finishing", folder):
                # on a disk that can no longer be written to, the others cannot even say so
                try_to_write(folder)
        if patience.is_over():
            raise CheckpointError(
                f"{target.final} was not finished: rank{'s' if len(missing) > 1 else ''} "
                f"{_list(missing)} of {num_ranks} did not write for {patience.limit_s:.0f} s. All "
                "ranks must call save at the same step and see the same folder (a shared file "
                "system when there are several hosts). Earlier checkpoints are untouched"
            )
        patience.pause()
    if failed:
        text = (folder / rank_failure(failed[0])).read_text(errors="replace")
        if not text:  # not even the reason fitted on the disk
            text = str(explain(OSError(errno.ENOSPC, ""), "writing", folder / rank_file(failed[0])))
        more = f" (ranks {_list(failed)} failed)" if len(failed) > 1 else ""
        raise CheckpointError(
            f"rank {failed[0]} could not write its part of {target.final}{more}: {text}"
        )
    return [read_report(folder / rank_report(rank)) for rank in range(num_ranks)]


def _write_index(target: Target, reports: Sequence[RankReport], values: Mapping[str, Any]) -> None:
    folder = target.temporary
    tensors: dict[str, Entry] = {}
    files: dict[str, FileInfo] = {}
    for report in reports:
        files.update(report.files)
        for name, entry in report.tensors.items():
            known = tensors.get(name, Entry(entry.dtype, entry.shape, ()))
            if (known.dtype, known.shape) != (entry.dtype, entry.shape):
                raise CheckpointError(
                    f"tensor {name!r} is {entry.dtype} {list(entry.shape)} on rank {report.rank}, "
                    f"elsewhere {known.dtype} {list(known.shape)}"
                )
            tensors[name] = Entry(known.dtype, known.shape, known.pieces + entry.pieces)
    rank_values = tuple(report.values for report in reports)
    index = Index(
        FORMAT, target.save_id, target.step, BLOCK_BYTES, files, tensors, dict(values), rank_values
    )
    check_index(index, folder / INDEX)
    for name, info in files.items():
        size = (folder / name).stat().st_size
        if size != info.num_bytes:
            raise CheckpointError(
                f"{folder / name} has {size:,} bytes, its rank wrote {info.num_bytes:,}: did "
                "another job write there?"
            )
    write_bytes(folder / INDEX, index_bytes(index))
    for report in reports:
        os.unlink(folder / rank_report(report.rank))
    sync_folder(folder)


def _rename_into_place(target: Target) -> None:
    """A checkpoint of the same step is set aside first, and put back if the rename fails."""
    final = target.final
    old = target.final.with_name(target.final.name + OLD)
    has_old = final.exists()
    if has_old:
        shutil.rmtree(old, ignore_errors=True)
        os.rename(final, old)
    try:
        os.rename(target.temporary, final)
    except OSError:
        if has_old:
            os.rename(old, final)
        raise
    sync_folder(target.folder)


# ---- removing


def _remove_old(target: Target, keep: int | None) -> None:
    """Removes checkpoints before the last `keep`, counted down from this step. Later steps (of
    another run) stay, with a warning.
    """
    steps: dict[int, list[Path]] = {}
    for path in target.folder.iterdir():
        match = CHECKPOINT_NAME.fullmatch(path.name)
        if match and path != target.final:
            steps.setdefault(int(match[1]), []).append(path)
    for path in steps.pop(target.step, []):
        _remove(path)
    if keep is None:
        return
    later = sorted(step for step in steps if step > target.step)
    if later:
        logger.warning(
            "%s holds checkpoints of later steps (%s) from another run: they are not removed",
            target.folder,
            _list(later),
        )
    for step in sorted((step for step in steps if step < target.step), reverse=True)[keep - 1 :]:
        for path in steps[step]:
            _remove(path)


def _remove(path: Path) -> None:
    """Removes a checkpoint, out of sight first: a half-removed one is never listed."""
    hidden = path.with_name(f".tmp_removed_{path.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    os.rename(path, hidden)
    shutil.rmtree(hidden)


def _remove_stale(target: Target, timeout_s: float) -> None:
    """Temporary folders that no living save can own: of this job's earlier saves, or untouched for
    long.

    A later save of this job may be under way already: other ranks continue as soon as this one is
    in place.
    """
    job, _, number = target.save_id.rpartition("_")
    for path in target.folder.glob(".tmp_*"):
        name, _, other = path.name.rpartition("_")
        own = (
            bool(job)
            and name.endswith(f"_{job}")
            and f"{number}{other}".isdigit()
            and int(other) < int(number)
        )
        with contextlib.suppress(OSError):
            touched = max((item.stat().st_mtime for item in (path, *path.iterdir())), default=0.0)
            if path != target.temporary and (
                own
                or path.name.startswith(".tmp_removed_")
                or time.time() - touched > 2 * timeout_s
            ):
                shutil.rmtree(path, ignore_errors=True)


# ---- waiting


class Patience:
    """Waiting for other ranks, for as long as files in a folder appear or grow."""

    def __init__(self, folder: Path, limit_s: float) -> None:
        self.folder = folder
        self._limit_s = limit_s
        self._last_progress = self._last_look = time.monotonic()
        self._seen: object = None

    @property
    def limit_s(self) -> float:
        return (
            self._limit_s
            if threading.main_thread().is_alive()
            else min(self._limit_s, EXIT_TIMEOUT_S)
        )

    def pause(self) -> None:
        time.sleep(POLL_S)

    def looks_now(self) -> bool:
        """Whether `is_over` will look at the folder: not each time, file systems can be slow."""
        return time.monotonic() - self._last_look >= PROGRESS_S

    def is_over(self) -> bool:
        now = time.monotonic()
        if now - self._last_look >= PROGRESS_S:
            self._last_look = now
            seen = _sizes(self.folder)
            if seen != self._seen:
                self._seen = seen
                self._last_progress = now
        return now - self._last_progress > self.limit_s


def try_to_write(folder: Path) -> None:
    """Raises what the system says on a disk that is full or read-only."""
    probe = folder / PROBE
    try:
        probe.write_bytes(b"x")
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)


def _sizes(folder: Path) -> list[tuple[str, int]]:
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as items:
        for item in items:
            with contextlib.suppress(OSError):
                if item.name != PROBE:
                    found.append((item.name, item.stat().st_size))
    return sorted(found)


def _list(numbers: Iterable[int]) -> str:
    return listed(list(numbers), SHOWN)
