"""Saving beside training: the copy is made at once, everything slow happens in a background thread.

One save at a time: a second `save` waits for the first (and says how long), because both would need
memory for a copy of the state. The thread runs at low priority, so that on a machine whose cores
are all busy training keeps them.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import Tensor

from whale.checkpoint.commit import TIMEOUT_S, await_outcome, finish, give_up
from whale.checkpoint.errors import CheckpointError, explain
from whale.checkpoint.format import Target, encode
from whale.checkpoint.pieces import TensorPart
from whale.checkpoint.writer import Snapshot, take_snapshot, write_rank

logger = logging.getLogger("whale")

# a niced thread gets about 3 % of a core that somebody else wants, and all of one that nobody wants
# (Linux)
NICENESS = 15


class Handle:
    """A save under way."""

    def __init__(self, path: Path, snapshot: Snapshot | None, future: Future[Path]) -> None:
        self.path = path
        """where the checkpoint will be"""
        self.num_bytes = snapshot.num_bytes if snapshot is not None else 0
        """of this rank's tensors"""
        self.before_changes: Callable[[], None] = lambda: None
        """to be called before the saved tensors change: on an accelerator they are still being
        copied, and what is launched after this call waits for that
        """
        if snapshot is not None:
            self.before_changes = snapshot.follow
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> Path:
        """Returns the folder when the checkpoint is in place on every rank's behalf; raises
        `CheckpointError` when it went wrong.
        """
        try:
            return self._future.result(timeout_s)
        except TimeoutError:
            raise TimeoutError(f"{self.path} is still being written after {timeout_s} s") from None


def nothing_to_save(path: Path) -> Handle:
    """A save that is over and wrote nothing."""
    future: Future[Path] = Future()
    future.set_result(path)
    return Handle(path, None, future)


class AsyncSaver:
    """Saves one rank's part of checkpoints into a folder. Each rank makes one, with the same
    `job_id`, and calls `save` at the same steps.

    `job_id`: any name that all ranks of this run share and no other run has (rank 0 draws it and
    sends it to the others). `keep`: how many checkpoints stay; None = all. `timeout_s`: how long
    ranks wait for each other without progress. The memory of the copy stays allocated between
    saves, which makes the copy about five times faster.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        job_id: str,
        rank: int = 0,
        num_ranks: int = 1,
        keep: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        if keep is not None and keep < 1:
            raise ValueError(
                f"keep={keep}: at least the checkpoint just written must stay. Use keep=None to "
                "keep all"
            )
        self.folder = Path(folder)
        self._job_id = job_id
        self._rank = rank
        self._num_ranks = num_ranks
        self.keep = keep
        self._timeout_s = timeout_s
        self._buffers: dict[str, Tensor] = {}
        self._num_saves = 0
        self._current: Handle | None = None

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        values: Mapping[str, Any] | None = None,
        rank_values: Mapping[str, Any] | None = None,
        parts: Mapping[str, TensorPart] | None = None,
    ) -> Handle:
        """Copies this rank's state and starts writing it. Training can change the tensors after
        `before_changes` of what this returns; those of a CPU at once.

        `values`: of the job; rank 0's count. `rank_values`: of this rank. `parts`: for tensors that
        are only a part of the whole one. What cannot be saved at all (a function among the values,
        a sparse tensor) is refused here; everything later comes from `wait`.
        """
        self._wait_for_previous()
        self._num_saves += 1
        target = Target(self.folder, step, f"{self._job_id}_{self._num_saves}")
        job_values = encode(dict(values or {}), "values")
        snapshot = take_snapshot(tensors, rank_values, parts, self._buffers)
        future: Future[Path] = Future()
        handle = Handle(target.final, snapshot, future)
        # not a daemon: a script that ends right after `save` still gets its checkpoint
        threading.Thread(
            target=self._run, args=(target, snapshot, job_values, future), name="whale-checkpoint"
        ).start()
        self._current = handle
        return handle

    def wait(self) -> Path | None:
        """Waits for the save under way, if any."""
        return self._current.wait() if self._current is not None else None

    def _wait_for_previous(self) -> None:
        if self._current is None or self._current.done():
            return
        start = time.monotonic()
        try:
            self._current.wait()
        except Exception:  # it was logged, and its own handle raises it
            pass
        waited_s = time.monotonic() - start
        if waited_s > 0.1:
            logger.warning(
                "this save waited %.1f s for %s to be written: save less often, or to a faster "
                "disk",
                waited_s,
                self._current.path,
            )

    def _run(
        self, target: Target, snapshot: Snapshot, values: dict[str, Any], future: Future[Path]
    ) -> None:
        """The background thread. Whatever happens ends in the future."""
        _lower_priority()
        try:
            future.set_result(self._write(target, snapshot, values))
        except BaseException as error:
            known = explain(error, "saving", target.final) if isinstance(error, OSError) else error
            logger.error(
                "the checkpoint of step %d was not saved on rank %d: %s",
                target.step,
                self._rank,
                known,
            )
            future.set_exception(
                known
                if isinstance(known, CheckpointError)
                else CheckpointError(f"saving {target.final} failed: {known!r}")
            )

    def _write(self, target: Target, snapshot: Snapshot, values: dict[str, Any]) -> Path:
        try:
            write_rank(target, self._rank, snapshot)
        except Exception:
            if self._rank == 0:
                give_up(target, self._timeout_s)
            raise
        if self._rank == 0:
            return finish(target, self._num_ranks, values, self.keep, self._timeout_s)
        return await_outcome(target, self._timeout_s)


def _lower_priority() -> None:
    """Makes this thread yield its core to training. Only on Linux, where the niceness of a thread
    is its own; elsewhere it would be the whole process's.
    """
    if sys.platform == "linux":
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        except OSError:
            pass
