"""Where the metrics of a run are, and how they are read. No torch here: `whale top` starts
at once.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

TAIL_BYTES = 1 << 16
"""more than any line: enough to find the last one of a long run"""


def metrics_file(run_folder: str | Path, rank: int) -> Path:
    """Where a rank writes its metrics, one JSON object a line."""
    return Path(run_folder) / "metrics" / f"rank_{rank:05d}.jsonl"


def finished_file(run_folder: str | Path) -> Path:
    """Where rank 0 writes that the run has finished."""
    return Path(run_folder) / "metrics" / "finished.json"


def write_finished(run_folder: str | Path, step: int | None) -> None:
    """Notes that the run ended well; `step` was its last, None when it made none."""
    with contextlib.suppress(OSError):  # a full disk must not end the training
        text = json.dumps({"step": step, "time": time.time()})
        finished_file(run_folder).write_text(text + "\n")


def read_finished(run_folder: str | Path) -> dict[str, Any] | None:
    """The last step and the time at which a run ended well; None while it runs, or failed."""
    try:
        found = json.loads(finished_file(run_folder).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "time" in found else None


_failed: list[bool] = []


def note_failure() -> None:
    """The script of this process failed: its run is not finished, though it ends."""
    _failed.append(True)


def has_failed() -> bool:
    return bool(_failed) or getattr(sys, "last_exc", getattr(sys, "last_value", None)) is not None


def read_metrics(run_folder: str | Path) -> dict[int, list[dict[str, Any]]]:
    """All lines of every rank, by rank; a half-written last line is left out."""
    return {rank: lines_of(path.read_bytes()) for rank, path in rank_files(run_folder).items()}


def last_metrics(run_folder: str | Path) -> dict[int, dict[str, Any] | None]:
    """The last whole line of every rank, None before there is one. Reads the ends of the files
    only.
    """
    found: dict[int, dict[str, Any] | None] = {}
    for rank, path in rank_files(run_folder).items():
        with path.open("rb") as file:
            start = max(0, file.seek(0, 2) - TAIL_BYTES)
            file.seek(start)
            content = file.read()
        lines = lines_of(content.partition(b"\n")[2] if start else content)
        found[rank] = lines[-1] if lines else None
    return found


def rank_files(run_folder: str | Path) -> dict[int, Path]:
    """The metrics files of a run, by rank."""
    return {
        int(path.stem.removeprefix("rank_")): path
        for path in sorted((Path(run_folder) / "metrics").glob("rank_*.jsonl"))
        if path.stem.removeprefix("rank_").isdecimal()
    }


def lines_of(content: bytes) -> list[dict[str, Any]]:
    """The lines that are JSON. Another one was cut off when its rank was killed: those behind it
    are of the next run.
    """
    found = []
    for text in content.splitlines():
        try:
            found.append(json.loads(text))
        except ValueError:
            continue
    return found
