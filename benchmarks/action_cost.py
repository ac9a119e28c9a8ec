"""What the runtime itself costs: pipelines of 2 ranks, 16 micro-batches, 4 chunks on a device, whose chunks have next to nothing to do.

The time of a step over the number of compute actions of a rank (forward, backward or its two parts), messages, waiting and update
included; beside it the same for the classes of torch that have several chunks, on the same layers in the same run. Wanted: at most 0.35 ms.
Messages go through memory, as they do between CPU ranks of one host; the same over gloo, which torch's side uses, stands beside it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed import pipelining

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `python benchmarks/action_cost.py` finds its neighbours, too

import whale as wh
from benchmarks.side_by_side import Claim, Side, Times, alternate, report, run_ranks, say
from benchmarks.torch_schedules import TORCH, TorchJob, TorchSchedule, torch_side

NUM_DEVICES, NUM_MICRO_BATCH, NUM_CHUNKS, WIDTH = 2, 16, 4, 4
MOST_MS = 0.35
ROUNDS, STEPS_PER_BLOCK, LIMIT_S = 30, 5, 90.0
OURS = {
    "whale wave": {"schedule": "wave", "num_waves": NUM_CHUNKS // 2},
    "whale zero-bubble wave": {"schedule": "zero-bubble", "num_waves": NUM_CHUNKS // 2},
}
OVER_GLOO = {f"{name}, over gloo": {**config, "share_memory": False} for name, config in OURS.items()}
THEIRS = {
    "torch Interleaved1F1B v=4": TorchSchedule(pipelining.ScheduleInterleaved1F1B, NUM_CHUNKS),
    **{name: TORCH[name] for name in ("torch InterleavedZeroBubble v=4", "torch ZBV", "torch DualPipeV")},
}


class Chain(nn.Module):
    """A tiny layer for each chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_DEVICES * NUM_CHUNKS))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(x, y)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(NUM_MICRO_BATCH, WIDTH, generator=generator) for _ in range(2))
    return x, y


def whale_side(name: str) -> tuple[Side, int]:
    """(the side, compute actions of this rank)"""
    torch.manual_seed(0)
    wh.init({**(OURS | OVER_GLOO)[name], "num_task_graph": NUM_DEVICES, "num_micro_batch": NUM_MICRO_BATCH, "check_capture": False})
    engine = wh.parallelize(Chain(), batch(0), optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=1e-3))
    engine.step(batch(0))
    (executor,) = engine.executors()
    return Side(name, lambda step: engine.step(batch(step))), sum(action.is_compute for action in executor.program.actions)


def their_side(name: str) -> tuple[Side, int]:
    kind = THEIRS[name]
    whole = "Interleaved1F1B" in name
    job = TorchJob(
        NUM_MICRO_BATCH,
        lambda stage, total: nn.Linear(WIDTH, WIDTH),
        nn.functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        batch,
    )
    return torch_side(name, kind, job), kind.num_chunks * NUM_MICRO_BATCH * (2 if whole else 3)


def measure() -> tuple[Times, dict[str, int]]:
    """Runs on every rank: times of all sides, and compute actions of each."""
    say("preparing all sides")
    sides = {name: whale_side(name) for name in OURS | OVER_GLOO} | {name: their_side(name) for name in THEIRS}
    only = [Side(side.name, side.step) for side, _ in sides.values()]  # the layers are not the same in all of them
    times = alternate(only, ROUNDS, STEPS_PER_BLOCK, LIMIT_S, warm_up=2)
    return times, {name: count for name, (_, count) in sides.items()}


def main() -> None:
    times, counts = run_ranks(measure, NUM_DEVICES)
    cost_ms = {name: times.median(name) / count * 1e3 for name, count in counts.items()}
    shown = {f"{name}, ms an action": round(cost, 3) for name, cost in cost_ms.items()}
    details = {**shown, "actions of a rank": counts, **times.details()}
    report("action_cost", [Claim(f"{name}: ms an action", cost_ms[name], MOST_MS, at_most=True, details=details) for name in OURS])


if __name__ == "__main__":
    main()
