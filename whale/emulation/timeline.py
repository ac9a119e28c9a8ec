"""What one emulated rank did: times of every step, the actions of the last one, overruns, memory.
Written when the script ends.

All ranks of an emulation are processes of one machine, so they share the clock of `perf_counter`.
"""

from __future__ import annotations

import atexit
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from whale.cluster.cluster import Cluster
from whale.emulation.memory import EmulatedMemory
from whale.emulation.pace import Pace
from whale.scheduling import Action
from whale.simulation.simulate import run
from whale.simulation.timeline import ALL_REDUCE
from whale.simulation.times import Times

PREDICTION_FILE = "prediction.json"
Event = tuple[str, float, float]
"""(action, start, end) in seconds"""


@dataclass(frozen=True)
class RankRecord:
    """One rank's file."""

    rank: int
    kind: str
    host: str
    memory_bytes: int
    """that the device has"""
    peak_bytes: dict[str, float]
    """by class of tensors, when most was used"""
    steps: list[tuple[float, float]]
    """start and end of every step, all-reduces included"""
    events: list[Event]
    """of the last step"""
    num_actions: int
    num_overruns: int
    worst_overrun: tuple[float, str]
    worst_ratio: float
    """see `Pace`"""


class Recorder:
    """Notes steps and writes them down at the end of the process. The first step, in which much is
    made for the first time, is left out.
    """

    def __init__(
        self,
        folder: Path,
        times: Times,
        factor: float,
        rank: int,
        is_stub: bool,
        memory: EmulatedMemory,
        cluster: Cluster,
    ) -> None:
        self._folder = folder
        self._times = times
        self._rank = rank
        self._cluster = cluster
        self._is_stub = is_stub
        self._memory = memory
        self._num_seen = 0
        self._steps: list[tuple[float, float]] = []
        self._events: list[Event] = []
        self._paces: list[Pace] = []
        self.restretch(factor)
        atexit.register(self.write)

    def restretch(self, factor: float) -> None:
        """All times are stretched by this factor from here on; steps before do not count."""
        self._factor = factor
        self._steps = []
        self._events = []
        # updates are not emulated: they take their own time at the end of a step
        plan = replace(self._times.plan, updates_ahead=False)
        self.prediction = run(plan, self._times.figures, factor)

    def add(
        self,
        events: Sequence[tuple[Action, float, float]],
        sums: tuple[float, float],
        paces: list[Pace],
    ) -> None:
        """One step."""
        self._num_seen += 1
        if self._num_seen == 1:
            for pace in paces:
                pace.forget()
            return
        self._paces = paces
        # a rank that the plan leaves out has no actions
        start = events[0][1] if events else sums[0]
        self._steps.append((start, sums[1]))
        done = [(str(action), start, end) for action, start, end in events]
        self._events = [*done, (ALL_REDUCE, *sums)] if done else []

    def write(self) -> None:
        """Writes the record of this rank. `engine.close` calls it: a job that failed has written
        nothing.
        """
        if not self._steps:
            return
        device = self._cluster.devices[self._rank]
        record = RankRecord(
            rank=self._rank,
            kind=device.kind.name,
            host=device.host,
            memory_bytes=device.kind.memory_bytes,
            peak_bytes=self._memory.peak,
            steps=self._steps,
            events=self._events,
            num_actions=sum(pace.num_actions for pace in self._paces),
            num_overruns=sum(pace.num_overruns for pace in self._paces),
            worst_overrun=max((pace.worst_overrun for pace in self._paces), default=(0.0, "")),
            worst_ratio=max((pace.worst_ratio for pace in self._paces), default=1.0),
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        _write(self._folder / f"rank_{self._rank:05d}.json", asdict(record))
        if self._rank == 0:
            predicted = {
                "events": [device.events for device in self.prediction.devices],
                "step_s": self.prediction.step_s,
                "gradients_s": self.prediction.gradients_s,
                "factor": self._factor,
                "is_stub": self._is_stub,
            }
            _write(self._folder / PREDICTION_FILE, predicted)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))


def read_records(folder: Path) -> list[RankRecord]:
    """Records of all ranks, in their order."""
    return [
        RankRecord(**json.loads(path.read_text())) for path in sorted(folder.glob("rank_*.json"))
    ]
