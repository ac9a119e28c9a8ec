"""Unlike devices that are real: two ranks on a core each, and a busy process on the core of rank 1.

1. `whale profile` measures the ranks while the process runs. The plan made for what it found is timed against even shares: at least 1.25
   times faster. Rank 1 has half a core, so even shares take 2 units of time and the best shares 4/3: the ceiling is 1.5.
2. The busy process stops in the middle of a run with `"adapt": "on"`: the shares must come back to even ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # `python benchmarks/busy_core.py` finds its neighbours, too

import whale as wh
from benchmarks.side_by_side import Claim, Side, Times, alternate, report, run_ranks, say
from whale.cli.profile_ranks import profile_ranks
from whale.planning.adapt import samples_by_rank

NUM_RANKS = 2
WIDTH = 768
NUM_LAYERS = 8
BATCH_SIZE = 768
TARGET = 1.25
CEILING = 1.5
NUM_ROUNDS = 12
STEPS_PER_BLOCK = 2
WARM_UP = 2
LIMIT_S = 60.0
BUSY_STEPS = 12
MOST_FREE_STEPS = 60
ADAPT = {"adapt": "on", "adapt_steps": 4, "adapt_threshold": 0.1}
NEAR_EVEN = 0.1
"""shares count as even when they differ by at most this part of the mini-batch"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(BATCH_SIZE, WIDTH, generator=torch.Generator().manual_seed(step))


def make_engine(cluster: Any, **config: Any) -> wh.Engine:
    wh.init(wh.Config({"strategy": "data", **config}))
    return wh.parallelize(
        Net(),
        batch(0),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        cluster=cluster,
    )


@contextmanager
def busy_process() -> Iterator[subprocess.Popen[bytes] | None]:
    """Counts for ever on the core of rank 1, which it inherits from that rank."""
    process = (
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        if dist.get_rank() == 1
        else None
    )
    try:
        yield process
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes] | None) -> None:
    if process is not None:
        process.kill()
        process.wait()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(measure, NUM_RANKS, folder)
    away = found.pop("shares while busy")
    back = found.pop("shares afterwards")
    details = {"ceiling": CEILING, "shares while busy": away, "shares afterwards": back, **found}
    is_back = abs(back[0] - back[1]) <= NEAR_EVEN * BATCH_SIZE < abs(away[0] - away[1])
    claims = [
        Claim(
            "even shares / planned shares", found["ratio"], TARGET, at_most=False, details=details
        ),
        Claim(
            "difference of the shares afterwards",
            abs(back[0] - back[1]) / BATCH_SIZE,
            NEAR_EVEN,
            at_most=True,
            details={"ok": is_back},
        ),
    ]
    report("busy_core", claims)


def measure(folder: str) -> dict[str, Any]:
    """Runs on every rank."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    path = Path(folder) / "cluster.yaml"
    with busy_process() as process:
        cluster = profile_ranks(path, "cpu")
        even = make_engine(None)
        planned = make_engine(str(path))
        shares = samples_by_rank(planned.plan, BATCH_SIZE)
        say(f"planned shares {shares}")
        times = compare({"even": even, "planned": planned}, process)
        adapting = make_engine(str(path), **ADAPT)
        for step in range(BUSY_STEPS):
            adapting.step(batch(step))
        while_busy = samples_by_rank(adapting.plan, BATCH_SIZE)
        say(f"the busy process stops; shares {while_busy}")
        stop(process)
        steps_until_even = follow(adapting)
    rates = [round(device.kind.rate("fp32") / 1e9, 1) for device in cluster.devices]
    return {
        "ratio": times.ratio("even", "planned"),
        **times.details(),
        "profiled GFLOP/s": rates,
        "planned shares": shares,
        "shares while busy": while_busy,
        "shares afterwards": samples_by_rank(adapting.plan, BATCH_SIZE),
        "steps until the shares were even": steps_until_even,
    }


def compare(engines: dict[str, wh.Engine], busy: subprocess.Popen[bytes] | None) -> Times:
    """In turns. Rounds in which something else than the busy process was on the cores are left out,
    as long as enough are left.
    """
    sides = [
        Side(name, lambda step, engine=engine: engine.step(batch(step)))
        for name, engine in engines.items()
    ]  # type: ignore[misc]
    return alternate(
        sides, NUM_ROUNDS, STEPS_PER_BLOCK, LIMIT_S, WARM_UP, busy.pid if busy is not None else None
    )


def follow(engine: wh.Engine) -> int | None:
    """Steps until the shares are even again; None: they did not come back."""
    found = None
    for step in range(MOST_FREE_STEPS):
        engine.step(batch(step))
        first, second = samples_by_rank(engine.plan, BATCH_SIZE)
        is_even = abs(first - second) <= NEAR_EVEN * BATCH_SIZE
        found = (step + 1 if found is None else found) if is_even else None
    return found


if __name__ == "__main__":
    main()
