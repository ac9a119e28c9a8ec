"""What a run writes about itself: one line of metrics for each step and rank, and traces.

Metrics are lines of JSON that can be read at any time.

`run_folder/metrics/rank_00000.jsonl`, ... Each rank writes its own file, so nothing is sent for it.
`whale top run_folder` reads them.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import math
import sys
import time
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from whale.config import Config
from whale.devices import LocalDevice
from whale.distributed.ranks import Ranks
from whale.metric_files import finished_file, has_failed, metrics_file, write_finished
from whale.plans.plan import Plan
from whale.runtime.executor import StepOutcome
from whale.runtime.result import StepResult
from whale.runtime.trackers import TRACKED, TensorBoard, Tracker
from whale.units import MICROSECONDS

BACKWARD_AND_FORWARD = 3.0
"""a step costs about three forwards: a backward is taken for two"""


@dataclass(frozen=True)
class StepShares:
    """Who did how much of a step."""

    num_samples: int
    """of the mini-batch"""
    own_samples: int
    """of these on this rank, over all micro-batches"""
    num_rebalanced: int
    """how often samples had been shared again before"""


@dataclass
class Metrics:
    """Writes this rank's lines."""

    run_folder: Path | None
    """None: only trackers are given the figures"""
    rank: int
    plan: Plan
    peak_flop_per_s: float
    """of all devices together: what model FLOP utilisation is measured against"""
    device: LocalDevice
    tensorboard: bool = False
    trackers: list[Tracker] = field(default_factory=list)
    """on rank 0"""
    _last_step: int | None = None
    _file: IO[str] | None = None
    _unwritten: tuple[int, StepResult, StepShares] | None = None

    def __post_init__(self) -> None:
        if self.run_folder is None:
            return
        # on every rank, so that all refuse alike
        if self.tensorboard and importlib.util.find_spec("tensorboard") is None:
            raise ValueError(
                '"tensorboard": true needs the extra. Try: '
                'pip install "whale-parallel[tensorboard]", or leave it out'
            )
        path = metrics_file(self.run_folder, self.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1)  # a line reaches the file when its step ends
        if not _ends_with_line(path):
            self._file.write("\n")  # a run that was killed has left half a line
        if self.rank == 0:
            finished_file(self.run_folder).unlink(missing_ok=True)
            if self.tensorboard:
                self.trackers.append(TensorBoard(self.run_folder / "tensorboard"))
        atexit.register(_close_at_exit, weakref.ref(self))

    def note(self, step: int, result: StepResult, shares: StepShares) -> None:
        """Takes what there is to say of a step, and writes the line of the one before: its loss has
        arrived, so that nothing is waited for.
        """
        self._flush()
        self._unwritten = (step, result, shares)

    def _flush(self) -> None:
        if self._unwritten is not None:
            self._write(*self._unwritten)
            self._unwritten = None

    def _write(self, step: int, result: StepResult, shares: StepShares) -> None:
        timing = result.timing
        num_samples = shares.num_samples
        flop = (
            BACKWARD_AND_FORWARD
            * sum(stage.forward_flop for stage in self.plan.stages)
            * num_samples
            / self.plan.batch_size
        )
        line = {
            "step": step,
            "time": time.time(),
            "rank": self.rank,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.learning_rate,
            "samples_per_s": num_samples / timing.total_s,
            "model_flop_utilisation": flop / timing.total_s / self.peak_flop_per_s,
            "total_s": timing.total_s,
            "compute_s": timing.compute_s,
            "communication_s": timing.communication_s,
            "bubble_s": timing.bubble_s,
            "memory_bytes": self.device.peak_memory_bytes(),
            "own_samples": shares.own_samples,
            "num_rebalanced": shares.num_rebalanced,
        }
        self._last_step = step
        try:
            if self._file is not None:
                self._file.write(json.dumps(line) + "\n")
        except OSError as error:  # a full disk must not end the training
            print(
                f"whale: metrics of step {step} could not be written to {self.run_folder}: {error}",
                file=sys.stderr,
            )
        for tracker in self.trackers:
            tracker.log({name: float(str(line[name])) for name in TRACKED}, step)

    def close(self) -> None:
        """Writes the last line, and closes the files and trackers."""
        atexit.unregister(_close_at_exit)
        self._flush()
        if self._file is not None:
            self._file.close()
        for tracker in self.trackers:
            tracker.close()
        self.trackers.clear()
        if self.rank == 0 and self.run_folder is not None and not has_failed():
            write_finished(self.run_folder, self._last_step)


def _close_at_exit(metrics: weakref.ref[Metrics]) -> None:
    """A script that never closed its engine: its last line is still there to be written."""
    own = metrics()
    if own is not None and own._file is not None and not own._file.closed:
        if has_failed():  # the last step may wait for ranks that are gone
            own._unwritten = None
        own.close()


def open_metrics(
    config: Config, plan: Plan, ranks: Ranks, without_folder: bool = False
) -> Metrics | None:
    """The metrics of a job on this rank; None without a run folder, unless that is asked for."""
    if config.folder is None:
        if config.tensorboard:
            raise ValueError(
                '"tensorboard": true needs a place to write to. Try: set "run_folder", or '
                "start the script with whale run"
            )
        if not without_folder:
            return None
    peak_flop_per_s = sum(plan.devices[index].flop_per_s for index in plan.device_of_rank)
    return Metrics(
        Path(config.folder) if config.folder is not None else None,
        ranks.rank,
        plan,
        peak_flop_per_s or math.inf,
        ranks.device,
        config.tensorboard,
    )


def _ends_with_line(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            return True
        file.seek(-1, 2)
        return file.read() == b"\n"


# ---- traces


def write_trace(path: str | Path, outcome: StepOutcome | None, ranks: Ranks) -> None:
    """Writes the last step of all ranks as a Chrome trace, a row for each rank, on rank 0.

    Clocks are compared by wall time, so hosts need a synchronised clock.
    """
    if outcome is None:
        raise ValueError("there is no step to trace yet: call engine.step first")
    shift = time.time() - time.perf_counter()
    events = [
        (str(action), str(action.kind), start + shift, end + shift)
        for action, start, end in outcome.events
    ]
    everyone = ranks.gather(events)
    if ranks.rank != 0:
        return
    names: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    origin = min(rank_events[0][2] for rank_events in everyone if rank_events)
    for rank, rank_events in enumerate(everyone):
        names.append(
            {
                "name": "thread_name",
                "ph": "M",
                "pid": 0,
                "tid": rank,
                "args": {"name": f"rank {rank}"},
            }
        )
        for name, kind, start, end in rank_events:
            rows.append(
                {
                    "name": name,
                    "cat": kind,
                    "ph": "X",
                    "pid": 0,
                    "tid": rank,
                    "ts": (start - origin) * MICROSECONDS,
                    "dur": (end - start) * MICROSECONDS,
                }
            )
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps({"traceEvents": names + rows}))
