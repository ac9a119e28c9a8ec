"""Where the metrics of a run are, and how they are read. No torch here: `whale top` starts at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def metrics_file(run_folder: str | Path, rank: int) -> Path:
    return Path(run_folder) / "metrics" / f"rank_{rank:05d}.jsonl"


def read_metrics(run_folder: str | Path) -> dict[int, list[dict[str, Any]]]:
    """Lines of every rank; a half-written last line is left out."""
    found: dict[int, list[dict[str, Any]]] = {}
    for path in sorted((Path(run_folder) / "metrics").glob("rank_*.jsonl")):
        lines = []
        for text in path.read_text().splitlines():
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                break
        found[int(path.stem.removeprefix("rank_"))] = lines
    return found
