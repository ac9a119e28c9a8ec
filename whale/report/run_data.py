"""What `whale board` shows of a folder of runs, as plain data: from the files of the runs alone.

Names come from listing the folder; nothing that a browser sends ever becomes part of a path. Files
may be written while they are read, be torn, or vanish: then there is less to show.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whale.metric_files import finished_file, lines_of, rank_files, read_finished

MOST_POINTS = 600
"""of a curve; a browser draws no more"""
PARTS = ("compute_s", "communication_s", "bubble_s")


@dataclass
class _Followed:
    """A metrics file of which everything up to `offset` has been read."""

    offset: int = 0
    lines: list[dict[str, Any]] = field(default_factory=list)


class Runs:
    """The runs below one folder, which may itself be a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._followed: dict[Path, _Followed] = {}
        self._lock = threading.Lock()  # one thread for each request

    def folders(self) -> dict[str, Path]:
        """Run folders by name. A link that leads out of the folder is no run of it."""
        candidates = [self.folder, *_subfolders(self.folder)]
        found = {}
        for path in candidates:
            inside = path.resolve()
            if inside.is_relative_to(self.folder) and _files(inside):
                found[path.name] = inside
        return found

    def overview(self) -> list[dict[str, Any]]:
        """One record for each run, newest first: name, step, loss, when it was last heard of."""
        records: list[dict[str, Any]] = []
        for name, folder in self.folders().items():
            newest = _newest(self._last_lines(folder))
            if newest is not None:
                records.append({"name": name, **_numbers(newest, ("step", "loss", "time"))})
        records.sort(key=lambda record: -(record["time"] or 0.0))
        return records

    def run(self, name: str) -> dict[str, Any] | None:
        """Curves, the time split of every rank, checkpoints, whether it ended well; None for a name
        that is no run's.
        """
        folder = self.folders().get(name)
        if folder is None:
            return None
        last = self._last_lines(folder)
        ranks = [
            {"rank": rank, **_numbers(line, ("step", "time", "total_s", "memory_bytes", *PARTS))}
            for rank, line in sorted(last.items())
        ]
        curve = self._lines(_files(folder)[min(last)]) if last else []
        return {
            "name": name,
            "curves": {key: _curve(curve, key) for key in ("loss", "samples_per_s")},
            "ranks": ranks,
            "checkpoints": _checkpoints(folder),
            "has_plan": _plan_file(folder) is not None,
            "is_finished": _is_finished(folder),
        }

    def plan_file(self, name: str) -> Path | None:
        """The plan of a run; None where there is none."""
        folder = self.folders().get(name)
        return None if folder is None else _plan_file(folder)

    def _last_lines(self, folder: Path) -> dict[int, dict[str, Any]]:
        found = {}
        for rank, path in _files(folder).items():
            lines = self._lines(path)
            if lines:
                found[rank] = lines[-1]
        return found

    def _lines(self, path: Path) -> list[dict[str, Any]]:
        """All whole lines so far. Only what is new since the last call is read."""
        with self._lock:
            followed = self._followed.setdefault(path, _Followed())
            try:
                with path.open("rb") as file:
                    if file.seek(0, 2) < followed.offset:  # a new run in the same folder
                        followed.offset = 0
                        followed.lines = []
                    file.seek(followed.offset)
                    content = file.read()
            except OSError:
                return list(followed.lines)
            whole, _, torn = content.rpartition(b"\n")
            followed.offset += len(content) - len(torn)
            followed.lines += [line for line in lines_of(whole) if isinstance(line, dict)]
            return list(followed.lines)


def _files(folder: Path) -> dict[int, Path]:
    """The metrics files of a run by rank, without links that lead out of it."""
    files = rank_files(folder)
    return {rank: path for rank, path in files.items() if path.resolve().is_relative_to(folder)}


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []


def _newest(last: Mapping[int, dict[str, Any]]) -> dict[str, Any] | None:
    return max(last.values(), key=lambda line: _number(line.get("time")) or 0.0, default=None)


def _number(value: Any) -> float | None:
    """A finite number, or None: JSON has no NaN, and a damaged line may hold anything."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None


def _numbers(line: Mapping[str, Any], keys: Sequence[str]) -> dict[str, float | None]:
    return {key: _number(line.get(key)) for key in keys}


def _curve(lines: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    """(step, value), thinned out evenly; the last point is always there."""
    points = []
    for line in lines:
        step = _number(line.get("step"))
        value = _number(line.get(key))
        if step is not None and value is not None:
            points.append((step, value))
    every = -(-len(points) // MOST_POINTS) or 1
    return points[::-1][::every][::-1]


def _checkpoints(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in (folder / "checkpoints").glob("step_*"))
    except OSError:
        return []


def _is_finished(folder: Path) -> bool:
    """Whether rank 0 wrote that the run ended well; a link out of the run says nothing about it."""
    is_inside = finished_file(folder).resolve().is_relative_to(folder)
    return is_inside and read_finished(folder) is not None


def _plan_file(folder: Path) -> Path | None:
    """The plan beside the metrics, unless it is a link out of the run."""
    path = folder / "plan.json"
    return path if path.is_file() and path.resolve().is_relative_to(folder) else None
