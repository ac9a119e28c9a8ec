"""A pipeline over 4 V100 and 4 P100 (emulated), cut by speed: the list-scheduled wave against 1F1B
and interleaved 1F1B on the same cut.

40 like blocks, so that every schedule can be given the same cut: 6 blocks on a V100 and 4 on a
P100, whole for 1F1B, in two chunks for the others. As many micro-batches as devices. All sides are
`whale run --emulate` jobs with stub chunks in the same processes, taking turns. Beside every time
stands what the simulation of the same schedule says: it is the run's ceiling.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # `python benchmarks/unlike_devices.py` finds its neighbours, too

import whale as wh
from benchmarks.side_by_side import Claim, Side, Times, alternate, report, run_ranks, say
from whale.emulation.emulation import EmulatedPlatform
from whale.emulation.settings import EmulationSettings

CLUSTER = """
hosts: [{name: big, kind: V100-16GB, count: 4}, {name: small, kind: P100, count: 4}]
"""
NUM_DEVICES = 8
BLOCKS_ON = {"V100-16GB": 6, "P100": 4}
NUM_BLOCKS = 4 * sum(BLOCKS_ON.values())
WIDTH = 2048
LENGTH = 128
SAMPLES = 4
"""of a block, of a sequence, and in a micro-batch"""
STRETCH = 2.5
"""of all times: then the shortest action takes about 18 ms"""
SCHEDULES = {
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved", "num_waves": 1},
    "wave (Hanayo)": {"schedule": "wave", "num_waves": 1},
    "wave, list-scheduled": {"schedule": "zero-bubble", "num_waves": 1},
}
OURS = "wave, list-scheduled"
RIVALS = ("1f1b", "interleaved")
TARGET = 1.2
ROUNDS = 8
LIMIT_S = 120.0


class Block(nn.Module):
    """The feed-forward part of a transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.mean()


def blocks_of(plan: wh.Plan) -> list[int]:
    """Of each device, all its chunks together: the cut. A block is found by its first weight."""
    counts = [0] * NUM_DEVICES
    for name, stages in plan.holders.items():
        if name.endswith("up.weight"):
            counts[plan.stages[stages[0]].virtual_device] += 1
    return counts


def side(name: str, cluster: str, folder: str) -> tuple[Side, float, list[int]]:
    """(the side, its predicted time, the cut)"""
    EmulationSettings(cluster, folder, stub=True, stretch=STRETCH).pass_on()
    wh.init(
        {
            **SCHEDULES[name],
            "num_task_graph": NUM_DEVICES,
            "num_micro_batch": NUM_DEVICES,
            "check_capture": False,
        }
    )
    batch = torch.zeros(NUM_DEVICES * SAMPLES, LENGTH, WIDTH)
    engine = wh.parallelize(
        Blocks, batch, optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=1e-3)
    )
    emulation = engine._job.platform
    assert isinstance(emulation, EmulatedPlatform)
    return (
        Side(name, lambda step: engine.step(batch)),
        emulation.recorder.prediction.step_s,
        blocks_of(emulation.full_plan),
    )


def measure(cluster: str, folder: str) -> tuple[Times, dict[str, float], dict[str, list[int]]]:
    """Runs on every rank: times, predicted times and cuts of all sides."""
    made = {name: side(name, cluster, folder) for name in SCHEDULES}
    say(f"4 V100 + 4 P100, {NUM_DEVICES} micro-batches, all times stretched by {STRETCH:g}")
    times = alternate([each for each, _, _ in made.values()], ROUNDS, 1, LIMIT_S, warm_up=2)
    return (
        times,
        {name: each[1] for name, each in made.items()},
        {name: each[2] for name, each in made.items()},
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        cluster = Path(folder) / "cluster.yaml"
        cluster.write_text(CLUSTER)
        times, predicted, cuts = run_ranks(
            measure, NUM_DEVICES, str(cluster), folder, share_cores=True
        )
    if len({tuple(cut) for cut in cuts.values()}) > 1:
        raise SystemExit(f"the schedules were given different cuts (blocks of each device): {cuts}")
    shown = {name: round(times.median(name) * 1e3, 1) for name in SCHEDULES}
    over = {name: round(times.median(name) / predicted[name], 3) for name in SCHEDULES}
    ideal = {name: round(seconds * 1e3, 1) for name, seconds in predicted.items()}
    more = {"ms": shown, "predicted ms": ideal, "measured / predicted": over}
    claims = []
    for rival in RIVALS:
        ceiling = round(predicted[rival] / predicted[OURS], 3)
        details = {"ceiling (simulated)": ceiling, "blocks of each device": cuts[OURS], **more}
        claims.append(
            Claim(
                f"{rival} / {OURS}",
                times.ratio(rival, OURS),
                TARGET,
                at_most=False,
                details=details,
            )
        )
    report("unlike_devices", claims)


if __name__ == "__main__":
    main()
