"""One rank of a part of `whale doctor --gpu`; the launcher starts it.

    rank.py PART FOLDER small|full

Rank 0 writes what came out as JSON lines.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from whale.doctor.jobs import SMALL, Sizes
from whale.doctor.rows import CHECKS, Outcome


def run_part(part: str, folder: Path, sizes: Sizes) -> list[Outcome]:
    """Runs the rows of a part on this rank; all ranks call it."""
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    outcomes = list(CHECKS[part](sizes, num_ranks))
    if os.environ.get("RANK", "0") == "0":
        lines = [json.dumps(asdict(outcome)) for outcome in outcomes]
        (folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
    return outcomes


def main(arguments: list[str]) -> None:
    part, folder, size = arguments
    run_part(part, Path(folder), SMALL if size == "small" else Sizes())


if __name__ == "__main__":
    main(sys.argv[1:])
