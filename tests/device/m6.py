"""The main job (examples/train_m6.py) on the test device: its losses, and what a step costs.

    python -m tests.device.m6 -n 1 4 8

prints for each number of ranks the losses beside those of CPU ranks, how often the host waited for
the device in a step, how many operations were launched and how many communicators were made. Times
mean nothing on this device.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.device import streams
from tests.device.collectives import BACKEND, communicators
from tests.device.local_device import use_test_device
from tests.device.streams import counters
from tests.ranks import ModelServer, run_ranks
from whale.runtime.batches import CHECKED_STEPS

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_m6.py"
NUM_STEPS = CHECKED_STEPS + 3
"""in the first ones ranks compare their batches, which waits"""
BATCH_SIZE = 16


@dataclass(frozen=True)
class Cost:
    """What the last steps of one rank cost, per step."""

    losses: list[float]
    host_waits: float
    waits_by_line: dict[str, float]
    launches: float
    pageable_copies: float
    communicators: int


def train(_: object, folder: str) -> Cost:
    """One rank; `folder` is the same on all."""
    example = _example()
    options = argparse.Namespace(
        steps=400, batch=BATCH_SIZE, micro_batches=4, lr=5e-3, warmup=40, seed=0,
        folder=Path(folder),
    )  # fmt: skip
    drawings = example.Drawings(NUM_STEPS * BATCH_SIZE, options.seed, "train")
    engine = example.make_engine(options, drawings)
    results = []
    for step in range(NUM_STEPS):
        if step == CHECKED_STEPS:
            counters.clear()
        first = step * BATCH_SIZE
        results.append(engine.step(drawings.batch(range(first, first + BATCH_SIZE))))
    num_steps = NUM_STEPS - CHECKED_STEPS
    waits = {line: number / num_steps for line, number in counters.host_waits.items()}
    launches = sum(counters.launches.values()) / num_steps
    pageable = counters.pageable_copies / num_steps
    losses = [float(result.loss) for result in results]
    engine.close()
    if communicators:
        streams.synchronize()  # raises races that nobody has noticed yet
    return Cost(losses, sum(waits.values()), waits, launches, pageable, len(communicators))


def _example() -> Any:
    spec = importlib.util.spec_from_file_location("train_m6", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_m6"] = module
    spec.loader.exec_module(module)
    return module


def run_on_devices(server: ModelServer, num_ranks: int) -> list[Cost]:
    with tempfile.TemporaryDirectory(prefix="whale-m6-") as folder:
        found: list[Cost] = server.run(train, num_ranks, folder, backend=BACKEND, timeout_s=300)
    return found


def run_on_cpus(num_ranks: int) -> list[float]:
    """Losses of the same job on CPU ranks."""
    with tempfile.TemporaryDirectory(prefix="whale-m6-") as folder:
        found: list[Cost] = run_ranks(train, num_ranks, None, folder, timeout_s=300)
    return found[0].losses


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", "--num-ranks", type=int, nargs="+", default=[1, 4, 8])
    options = parser.parse_args(arguments)
    with ModelServer(use_test_device) as server:
        for num_ranks in options.num_ranks:
            ranks = run_on_devices(server, num_ranks)
            on_cpus = run_on_cpus(num_ranks)
            for rank, cost in enumerate(ranks):
                print(json.dumps({"ranks": num_ranks, "rank": rank, **asdict(cost)}))
            largest = max(
                abs(own - other) / abs(other)
                for own, other in zip(ranks[0].losses, on_cpus, strict=True)
            )
            print(f"{num_ranks} ranks: losses differ from CPU ranks by {largest:.2g} at most")


if __name__ == "__main__":
    main()
