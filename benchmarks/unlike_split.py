"""`wh.split(8)` over 4 V100 and 4 P100 (emulated): uneven shards against even ones on the same
grid.

With even shards every device waits for the slowest, so that side is the same grid on 8 P100. Whale
puts the devices in order of speed along one axis and cuts it unevenly, in whole granules (samples,
heads, entries of a width). Ceiling: the best of all divisions into whole granules along any axis,
by enumeration, with the same messages. Bar: 95 % of the ceiling, for the grid that Whale picks and
for three that are asked for. All sides run in the same processes with stub chunks, taking turns.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # `python benchmarks/unlike_split.py` finds its neighbours, too

import whale as wh
from benchmarks.side_by_side import Claim, Side, Times, alternate, report, run_ranks, say
from benchmarks.tensor_grids import Model
from whale.cluster.kinds import device_kind
from whale.emulation.emulation import EmulatedPlatform
from whale.emulation.settings import EmulationSettings
from whale.plans.grid import Grid

FAST = "V100-16GB"
SLOW = "P100"
NUM_EACH = 4
NUM_DEVICES = 2 * NUM_EACH
UNLIKE = (
    f"hosts: [{{name: big, kind: {FAST}, count: {NUM_EACH}}}, "
    f"{{name: small, kind: {SLOW}, count: {NUM_EACH}}}]"
)
ALIKE = (
    f"hosts: [{{name: one, kind: {SLOW}, count: {NUM_EACH}}}, "
    f"{{name: two, kind: {SLOW}, count: {NUM_EACH}}}]"
)
WIDTH = 2048
NUM_HEADS = 32
NUM_BLOCKS = 2
LENGTH = 512
SAMPLES = 40
GRIDS: dict[str, tuple[int, int, int] | None] = {
    "picked": None,
    "1-D": (1, 8, 1),
    "ZeRO-3": (1, 1, 8),
    "the cube": (2, 2, 2),
}
TARGET = 0.95
STRETCH = 2.0
"""of all times: 8 processes on few cores take some 20 ms a step for themselves"""
ROUNDS = 6
LIMIT_S = 50.0


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder) / name) for name in ("unlike.yaml", "alike.yaml")]
        for file, text in zip(files, (UNLIKE, ALIKE)):
            Path(file).write_text(text)
        times, plans = run_ranks(measure, NUM_DEVICES, files, folder, share_cores=True)
    report("unlike_split", [claim(name, times, *plans[name]) for name in GRIDS])


def claim(name: str, times: Times, uneven: wh.Plan, even: wh.Plan) -> Claim:
    """How much of the ceiling the measured ratio reaches."""
    ratio = times.ratio(f"{name}, even", f"{name}, uneven")
    steps = {each: wh.simulate(plan).step_s for each, plan in (("uneven", uneven), ("even", even))}
    found = products_s(uneven)
    least = least_products_s(even)
    ceiling = steps["even"] / (steps["uneven"] - found + min(found, least))
    grid = uneven.virtual_devices[0].grid
    assert grid is not None
    cut = "; ".join(
        f"{axis} {':'.join(f'{weight:.4g}' for weight in weights)}"
        for axis, weights in grid.work.items()
    )
    print(
        f"{name} ({grid.name}, {cut}): even / uneven {ratio:.3f}, ceiling {ceiling:.3f}", flush=True
    )
    milliseconds = {
        side: round(times.median(f"{name}, {side}") * 1e3, 1) for side in ("even", "uneven")
    }
    details = {
        "even / uneven": round(ratio, 3),
        "ceiling": round(ceiling, 3),
        "ms": milliseconds,
        "cut": cut,
    }
    return Claim(
        f"{name} ({grid.name}): reached of the best ratio",
        ratio / ceiling,
        TARGET,
        at_most=False,
        details=details,
    )


# ---- the ceiling
# --------------------------------------------------------------------------------------------------------


def products_s(plan: wh.Plan) -> float:
    """Seconds of the products with weights of a step, by the sizes that every device really has:
    the slowest device of each counts.
    """
    device = plan.virtual_devices[0]
    grid = device.grid
    total = 0.0
    assert grid is not None
    for stored in (
        stored
        for sharding in plan.shardings
        for stored in sharding.stored.values()
        if len(stored.cuts) == 2
    ):
        layout = stored.layout()
        used = type(layout)(
            layout.cuts,
            tuple(tuple(a for a in axes if a not in layout.stored) for axes in layout.axes),
        )
        times = []
        for place, rank in enumerate(device.ranks[0]):
            first, stop = grid.cut((0, SAMPLES), "z", grid.coordinate(place, "z"))
            times.append(
                seconds((stop - first) * used.local_count(grid, place), plan.device_kinds[rank])
            )
        total += max(times)
    return total


def least_products_s(even: wh.Plan) -> float:
    """The same if each weight were divided along one axis in the best way: every number of granules
    for the faster half is tried.
    """
    grid = even.virtual_devices[0].grid
    assert grid is not None
    return min(along(even, grid, axis) for axis in grid.axes if grid.size(axis) % 2 == 0)


def along(even: wh.Plan, grid: Grid, axis: str) -> float:
    total = 0.0
    for stored in (
        stored
        for sharding in even.shardings
        for stored in sharding.stored.values()
        if len(stored.cuts) == 2
    ):
        work = (
            SAMPLES
            * stored.layout().shape[0]
            * stored.layout().shape[1]
            / grid.num_devices
            * grid.size(axis)
        )
        counts = [
            cut[0]
            for cut, axes in zip(stored.cuts, stored.axes)
            if axis in axes and axis not in stored.stored
        ]
        granules = SAMPLES if axis == "z" else (counts or [1])[0]
        total += best_of_two_kinds(granules, grid.size(axis) // 2, work)
    return total


def best_of_two_kinds(granules: int, number: int, work: float) -> float:
    """`number` slices of each kind share so many granules: the time of the slowest one, best of all
    divisions between the two kinds.
    """
    return min(
        max(
            seconds(work * -(-fast // number) / granules, FAST),
            seconds(work * -(-(granules - fast) // number) / granules, SLOW),
        )
        for fast in range(granules + 1)
    )


def seconds(num_products: float, kind: str) -> float:
    """Of forward and backward of so many multiplications for each token."""
    return 6 * LENGTH * num_products / device_kind(kind).rate("fp32")


# ---- emulated
# -----------------------------------------------------------------------------------------------------------


def measure(files: Sequence[str], folder: str) -> tuple[Times, dict[str, tuple[wh.Plan, wh.Plan]]]:
    """Runs on every rank: times of all sides, and their plans."""
    sides: list[Side] = []
    plans = {}
    for name, sizes in GRIDS.items():
        uneven = plan_and_add(sides, f"{name}, uneven", files[0], folder, sizes)
        grid = uneven.virtual_devices[0].grid
        assert grid is not None
        plans[name] = (
            uneven,
            plan_and_add(sides, f"{name}, even", files[1], folder, (grid.gx, grid.gy, grid.gz)),
        )
    say("4 V100 + 4 P100 against 8 P100, on the same grids")
    return alternate(sides, ROUNDS, 1, LIMIT_S, warm_up=1), plans


def plan_and_add(
    sides: list[Side], name: str, file: str, folder: str, sizes: tuple[int, int, int] | None
) -> wh.Plan:
    """Adds a side; gives its plan."""
    EmulationSettings(file, folder, stub=True, stretch=STRETCH).pass_on()
    wh.init({"check_capture": False})
    with torch.device("meta"):
        model = Model(WIDTH, NUM_HEADS, NUM_BLOCKS)
        batch = torch.empty(SAMPLES, LENGTH, WIDTH), torch.empty(SAMPLES, LENGTH, WIDTH)
    wh.annotate(model, {"blocks": wh.split(NUM_DEVICES, grid=sizes)})
    engine = wh.parallelize(
        model, batch, optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=1e-3)
    )
    emulation = engine._job.platform
    assert isinstance(emulation, EmulatedPlatform)
    sides.append(Side(name, lambda step: engine.step(torch.zeros(SAMPLES, 1))))
    return emulation.full_plan


if __name__ == "__main__":
    main()
