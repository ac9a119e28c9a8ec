"""The last step of all ranks as a Chrome trace, on one clock."""

from __future__ import annotations

import json
import time
from pathlib import Path

from whale.distributed.ranks import Ranks
from whale.runtime.executor import StepOutcome

MICROSECONDS = 1e6


def write_trace(path: str | Path, outcome: StepOutcome | None, ranks: Ranks) -> None:
    """Rank 0 writes one file with a row for each rank. Clocks are compared by wall time, so hosts
    need a synchronised clock.
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
    origin = min(start for rank_events in everyone for _, _, start, _ in rank_events)
    rows = [
        {
            "name": name,
            "cat": kind,
            "ph": "X",
            "pid": 0,
            "tid": rank,
            "ts": (start - origin) * MICROSECONDS,
            "dur": (end - start) * MICROSECONDS,
        }
        for rank, rank_events in enumerate(everyone)
        for name, kind, start, end in rank_events
    ]
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
        for rank in range(len(everyone))
    ]
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps({"traceEvents": names + rows}))
