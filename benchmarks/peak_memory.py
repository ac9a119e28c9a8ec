"""Most live bytes of a rank during a step, as torch's profiler sees them.

The buffers of an exchange belong to the rank's own thread and to gloo's, and who lets go last frees
them. The profiler does not watch gloo's thread: what that one frees counts as held for ever after,
another amount in every run (docs/split.md). So where tensor grids are measured a rank pauses
between the arrival of an exchange and its end, and gloo's thread has let go by then.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "KINETO_LOG_LEVEL", "99"
)  # torch's profiler says on every start and stop that it does

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

import whale as wh
from whale.lowering.exchange import PendingExchange

MARK = "measured step"
PAUSE_S = 0.002
GridShape = tuple[int, int, int]


def peak_bytes(watched: profile) -> float:
    """Most live bytes of torch's CPU allocator during the marked step."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        watched.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    step = next(event for event in events if event.get("name") == MARK and event.get("ph") == "X")
    memory = sorted(
        (event for event in events if event.get("name") == "[memory]"),
        key=lambda event: event["ts"],
    )
    # what earlier recordings saw allocated and did not see freed
    before = memory[0]["args"]["Total Allocated"] - memory[0]["args"]["Bytes"]
    inside = [event for event in memory if step["ts"] <= event["ts"] <= step["ts"] + step["dur"]]
    return float(max(event["args"]["Total Allocated"] for event in inside) - before)


def pause_in_exchanges() -> None:
    """From now on in this process; see the head of this file."""
    end = PendingExchange.wait

    def wait(self: PendingExchange) -> Tensor:
        if self.work:
            _ = [work.wait() for work in self.work]
            time.sleep(PAUSE_S)
        return end(self)

    PendingExchange.wait = wait  # type: ignore[method-assign]


def measure_grid(
    build: Callable[[], nn.Module],
    batch: Callable[[], dict[str, Tensor]],
    grid: GridShape,
    config: dict[str, Any],
) -> tuple[float, float]:
    """(predicted, measured) bytes of this rank, in the third step of a model with AdamW.
    `pause_in_exchanges` was called.
    """
    os.environ["LOCAL_RANK"] = str(dist.get_rank())  # by which devices of the cluster are matched
    torch.manual_seed(0)
    gc.collect()  # what is left of the case before must not be freed while this one is recorded
    wh.init({**config, "check_capture": False})
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        tensors = {
            name: tensor.clone() for name, tensor in batch().items()
        }  # in torch's memory, wherever they came from
        model = wh.annotate(build(), {"*": wh.split(dist.get_world_size(), grid=grid)})
        engine = wh.parallelize(
            model, tensors, optimizer=lambda named: torch.optim.AdamW(named, lr=1e-4)
        )
        del model
        for _ in range(2):
            engine.step(tensors)
        with record_function(MARK):
            engine.step(tensors)
    predicted = wh.simulate(engine.plan).devices[dist.get_rank()].peak_total_bytes
    engine.close()
    return predicted, peak_bytes(watched)
