"""Writing a checkpoint: each rank its own file, then rank 0 the index, then one rename makes it
visible.

    every rank    write_rank     rank_00003.safetensors, flushed; then rank_00003.json, which says that it is whole
    rank 0        finish         waits for all reports, checks that every tensor is there exactly once, writes index.json, flushes,
                                 renames the folder into place, removes what is too old
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whale.checkpoint.boxes import Box, extents, is_inside, whole
from whale.checkpoint.errors import CheckpointError, explain
from whale.checkpoint.format import (
    CHECKPOINT_NAME,
    FORMAT,
    INDEX,
    Entry,
    FileInfo,
    Index,
    Piece,
    RankReport,
    Target,
    check_index,
    index_bytes,
    rank_failure,
    rank_file,
    rank_report,
    read_report,
    report_bytes,
)
from whale.checkpoint.json_values import encode
from whale.checkpoint.patience import PROGRESS_S, Patience, try_to_write
from whale.checkpoint.tensor_files import (
    BLOCK_BYTES,
    dtype_name,
    sync_folder,
    write_bytes,
    write_tensors,
)
from whale.devices import LocalDevice, device_of
from whale.names import listed

logger = logging.getLogger("whale")

TIMEOUT_S = 300.0
"""how long ranks wait for each other without any sign of progress"""
AHEAD_BYTES = 96  # the save id stands in these first bytes of an index, after its checksum
SHOWN = 8
"""ranks that are written out in a message"""
OLD = ".old"


@dataclass(frozen=True)
class Part:
    """Where a rank's tensor lies in the whole one."""

    shape: tuple[int, ...]
    ranges: Box
    name: str = ""
    """of the whole tensor, where the rank writes several parts of it, each under a name of its own
    """


@dataclass(frozen=True)
class Snapshot:
    """A rank's state at one moment: copies on the CPU, which training does not touch."""

    tensors: dict[str, Tensor]
    parts: dict[str, Part]
    """of tensors that are only a part; the others are whole"""
    values: dict[str, Any]
    """as JSON"""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def take_snapshot(
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any] | None = None,
    parts: Mapping[str, Part] | None = None,
    buffers: dict[str, Tensor] | None = None,
) -> Snapshot:
    """Copies of all tensors, and the values as JSON. Returns when the copies are whole, so that
    training can go on at once.

    `buffers`: memory kept from save to save, changed here. Copying into memory that was used before
    took 0.08 s for 256 MiB, into new memory 0.40 s (the system must clear new pages first). Buffers
    for tensors of a GPU are pinned.
    """
    parts = dict(parts or {})
    kept = buffers if buffers is not None else {}
    for name in kept.keys() - tensors.keys():
        del kept[name]
    copies: dict[str, Tensor] = {}
    devices: dict[torch.device, LocalDevice] = {}
    for name, tensor in tensors.items():
        dtype_name(tensor, name)
        _check_part(name, tensor, parts.get(name))
        device = devices.setdefault(tensor.device, device_of(tensor.device))
        copy = kept.get(name)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = device.empty_on_host(tensor.shape, tensor.dtype)
        copies[name] = kept[name] = copy
        copy.copy_(tensor.detach(), non_blocking=device.is_accelerator)
    for device in devices.values():
        device.synchronise()
    return Snapshot(copies, parts, encode(dict(values or {}), "values"))


def assign_writers(
    holders: Mapping[str, Sequence[int]], num_bytes: Mapping[str, int]
) -> dict[str, int]:
    """Which rank writes each tensor that several ranks hold: the largest first, each to the holder
    with the fewest bytes so far.

    All ranks get the same answer from the same arguments.
    """
    load: dict[int, int] = {}
    chosen: dict[str, int] = {}
    for name in sorted(holders, key=lambda name: (-num_bytes[name], name)):
        rank = min(holders[name], key=lambda rank: (load.get(rank, 0), rank))
        load[rank] = load.get(rank, 0) + num_bytes[name]
        chosen[name] = rank
    return chosen


def write_rank(target: Target, rank: int, snapshot: Snapshot) -> RankReport:
    """Writes this rank's file, then its report. On an error the file is removed and a note left for
    rank 0.
    """
    folder = target.temporary
    file = folder / rank_file(rank)
    try:
        with _plain_errors("writing", file, snapshot.num_bytes):
            os.makedirs(folder, exist_ok=True)
            written = write_tensors(file, snapshot.tensors, {"format": "pt"})
            tensors = _entries(snapshot, file.name, written.block_checksums)
            report = RankReport(
                rank,
                tensors,
                {file.name: FileInfo(written.num_bytes, written.checksum)},
                snapshot.values,
            )
            write_bytes(folder / rank_report(rank), report_bytes(report))
        return report
    except Exception as error:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
            (folder / (rank_report(rank) + ".part")).unlink(missing_ok=True)
            try:
                write_bytes(folder / rank_failure(rank), str(error).encode())
            except OSError:
                (folder / rank_failure(rank)).touch()  # a full disk often has room for a name
        raise


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
        with _plain_errors("finishing", target.temporary):
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
    patience = Patience(
        target.temporary, 2 * timeout_s
    )  # rank 0 may itself be waiting for another rank
    while target.temporary.exists():
        if patience.looks_now():
            with (
                _plain_errors("finishing", target.temporary),
                contextlib.suppress(FileNotFoundError),
            ):
                os.utime(
                    target.temporary
                )  # on a disk that can no longer be written to, rank 0 cannot even say so
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


# ---- inside


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
            if rank_report(rank) not in names and rank not in failed
        ]
        if not missing:
            break
        if patience.looks_now():
            with _plain_errors("finishing", folder):
                try_to_write(
                    folder
                )  # on a disk that can no longer be written to, the others cannot even say so
        if patience.is_over():
            raise CheckpointError(
                f"{target.final} was not finished: rank{'s' if len(missing) > 1 else ''} "
                f"{_list(missing)} of {num_ranks} did not write "
                f"for {patience.limit_s:.0f} s. All ranks must call save at the same step and see "
                "the same folder "
                "(a shared file system when there are several hosts). Earlier checkpoints are "
                "untouched"
            )
        patience.pause()
    if failed:
        text = (folder / rank_failure(failed[0])).read_text(errors="replace")
        if not text:  # not even the reason found room
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
    """Out of sight first: a half-removed checkpoint is never listed."""
    hidden = path.with_name(f".tmp_removed_{path.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    os.rename(path, hidden)
    shutil.rmtree(hidden)


def _remove_stale(target: Target, timeout_s: float) -> None:
    """Temporary folders that no living save can own: of this job's earlier saves, or untouched for
    long.

    A later save of this job may be under way already: other ranks go on as soon as this one is in
    place.
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


def _entries(snapshot: Snapshot, file: str, checksums: Mapping[str, str]) -> dict[str, Entry]:
    """What one rank wrote, by the names of the whole tensors."""
    found: dict[str, Entry] = {}
    for key, tensor in snapshot.tensors.items():
        part = snapshot.parts.get(key) or Part(tuple(tensor.shape), whole(tensor.shape))
        name = part.name or key
        before = found[name].pieces if name in found else ()
        found[name] = Entry(
            dtype_name(tensor, key),
            part.shape,
            (*before, Piece(file, key, part.ranges, checksums[key])),
        )
    return found


def _check_part(name: str, tensor: Tensor, part: Part | None) -> None:
    if part is not None and not (
        is_inside(part.ranges, part.shape) and extents(part.ranges) == tuple(tensor.shape)
    ):
        raise ValueError(
            f"{name} has shape {list(tensor.shape)}, but its part is {part.ranges} of "
            f"{list(part.shape)}"
        )


@contextlib.contextmanager
def _plain_errors(doing: str, path: Path, num_bytes: int | None = None) -> Iterator[None]:
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
            "Earlier checkpoints are untouched, and training can go on"
        ) from error
    except OSError as error:
        raise explain(error, doing, path, num_bytes) from error


def _list(numbers: Iterable[int]) -> str:
    return listed(list(numbers), SHOWN)
