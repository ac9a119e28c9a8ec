"""Saving beside training adds at most 5 % to the steps that it overlaps; loading reads at most
1.05x the bytes that a rank needs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # `python benchmarks/checkpoint.py` finds its neighbours, too

import whale as wh
from benchmarks import gpt2
from benchmarks.side_by_side import Claim, Side, Times, alternate, report, run_ranks, say

BATCH_SIZE = 16
LENGTH = 128
STEPS_PER_BLOCK = 6
"""steps that one save overlaps: the save starts with the first, and its time is counted where it
falls
"""
NUM_ROUNDS = 16
LIMIT_S = 220.0
SLOWER = 1.05
BYTES = 1.05


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        times, read = run_ranks(measure, 2, folder)
    details: dict[str, Any] = {
        "cpu ratio": round(times.cpu_ratio("saving", "plain"), 4),
        **times.details(),
    }
    report(
        "checkpoint",
        [
            Claim(
                "steps with a save / without",
                times.ratio("saving", "plain"),
                SLOWER,
                at_most=True,
                details=details,
            ),
            Claim("bytes read / bytes needed", read, BYTES, at_most=True, details={}),
        ],
    )


def measure(folder: str) -> tuple[Times, float]:
    say("preparing both sides")
    plain = make_engine()
    saving = make_engine()
    plain_side = Side(
        "plain",
        lambda step: plain.step(gpt2.batch(step, BATCH_SIZE, LENGTH)),
        lambda result: result.loss,
    )

    def step_and_save(step: int) -> wh.StepResult:
        if saving.step_count % STEPS_PER_BLOCK == 0:
            saving.save(Path(folder) / "checkpoints")
        return saving.step(gpt2.batch(step, BATCH_SIZE, LENGTH))

    times = alternate(
        [plain_side, Side("saving", step_and_save, lambda result: result.loss)],
        NUM_ROUNDS,
        STEPS_PER_BLOCK,
        LIMIT_S,
        warm_up=6,
    )
    saving.close()
    dist.barrier()
    plain.load(Path(folder) / "checkpoints")
    return times, plain._checkpoints.num_bytes_read / needed_bytes(plain)


def make_engine() -> wh.Engine:
    wh.init(wh.Config({"keep_checkpoints": 1}))
    return wh.parallelize(
        gpt2.build(LENGTH), gpt2.batch(0, BATCH_SIZE, LENGTH), optimizer=gpt2.make_optimizer
    )


def needed_bytes(engine: wh.Engine) -> int:
    """This rank's weights and optimizer state."""
    assert engine.optimizer is not None
    tensors = [*engine._job.weights.values()]
    tensors += [
        value
        for state in engine.optimizer.state.values()
        for value in state.values()
        if hasattr(value, "numel")
    ]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


if __name__ == "__main__":
    main()
