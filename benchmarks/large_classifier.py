"""ResNet50 with very many classes on V100s: `replicate` for the features and `split` for the
classifier, against pure data parallelism.

By simulation of the plans, under the assumptions of `large_classifier.yaml` (one number fitted).
The bar is the shape of the paper's figure: the hybrid is ahead at every size and its lead grows;
with a million classes data parallelism is refused for its memory, and the hybrid scales. On 8 GPUs
both plans also run, emulated with stub chunks, in turns in the same processes: that measures the
runtime, not the cost model.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # `python benchmarks/large_classifier.py` finds its neighbours, too

import whale as wh
from benchmarks.side_by_side import Claim, Side, Times, alternate, report, run_ranks
from models.resnet import ResNet, ResNetConfig
from whale.cluster.cluster import GIGA, Cluster, Device, DeviceKind, Link, device_kind
from whale.config import Config
from whale.distributed.ranks import Ranks
from whale.emulation.emulation import EmulatedPlatform
from whale.emulation.pace import stretch_factor
from whale.emulation.settings import EmulationSettings
from whale.runtime.engine import Engine
from whale.runtime.shapes import Job
from whale.simulation.simulate import figures_in
from whale.simulation.times import Times as PlanTimes

PAPER = yaml.safe_load((Path(__file__).parent / "large_classifier.yaml").read_text())
OPEN = PAPER["not_said"]
SIZES = (8, 16, 32)
EMULATED = 8
ROUNDS = 8
LIMIT_S = 60.0
STRETCH = 4.0
"""of the emulated step, which is two actions: what 8 processes on 2 cores take to end a step, about
10 ms, is then about 1 % of it
"""
DATA_PARALLEL = "data parallel"
HYBRID = "hybrid"


def cluster(num_devices: int) -> Cluster:
    known = device_kind("V100-32GB")
    efficiency = PAPER["fitted"]["efficiency"]
    per_host = PAPER["cluster"]["devices_per_host"]
    kind = DeviceKind(
        "V100-32GB",
        efficiency * known.flop_per_s,
        known.memory_bytes,
        efficiency * known.bytes_per_s,
    )
    links = [
        Link(PAPER["cluster"][name]["gb_per_s"] * GIGA, PAPER["cluster"][name]["latency_us"] / 1e6)
        for name in ("intra_host", "inter_host")
    ]
    return Cluster(
        tuple(
            Device(rank, f"host{rank // per_host}", rank % per_host, kind)
            for rank in range(num_devices)
        ),
        *links,
    )


def planned(num_classes: int, num_devices: int, hybrid: bool) -> wh.Plan:
    with torch.device("meta"):
        model = ResNet(ResNetConfig.resnet50(num_classes))
    if hybrid:  # the loss follows the classifier
        wh.annotate(
            model, {"backbone": wh.replicate(num_devices), "classifier": wh.split(num_devices)}
        )
    number = num_devices * OPEN["samples_per_device"]
    size = OPEN["image_size"]
    batch = {
        "images": torch.zeros(number, 3, size, size, device="meta"),
        "labels": torch.zeros(number, dtype=torch.long, device="meta"),
    }
    config = {"num_micro_batch": 1} | ({} if hybrid else {"strategy": "data"})
    return wh.plan(model, batch, cluster=cluster(num_devices), config=config)


def speed(plan: wh.Plan, hybrid: bool) -> tuple[float, dict[str, Any]]:
    """(samples/s, what is on a device)"""
    timeline = wh.simulate(plan)
    found: dict[str, Any] = {
        "GB on a device": round(sum(timeline.devices[0].peak_bytes.values()) / GIGA, 1)
    }
    if hybrid:
        found["grid"] = (
            plan.virtual_devices[0].grid.name
            if plan.virtual_devices[0].grid is not None
            else "none"
        )
    return timeline.samples_per_s, found


def measure(plans: dict[str, wh.Plan], folder: str, factor: float) -> Times:
    """Runs on every rank: times of both plans."""
    ranks = Ranks("cpu")
    sides = []
    for name, plan in plans.items():
        config = Config(num_micro_batch=plan.num_micro_batch)
        settings = EmulationSettings("", f"{folder}/{name}", stub=True, stretch=factor)
        emulation = EmulatedPlatform(ranks, settings)
        stub = emulation.start(plan, None, cluster(EMULATED), config)
        assert stub is not None
        engine = Engine(
            Job.of_stand_in(stub, emulation),
            lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
            None,
        )
        batch = torch.ones(plan.batch_size, 1)
        sides.append(Side(name, lambda step, engine=engine, batch=batch: engine.step(batch)))  # type: ignore[misc]
    return alternate(sides, ROUNDS, 1, LIMIT_S, warm_up=2)


def emulated(plans: dict[str, wh.Plan]) -> Claim:
    """The hybrid is ahead in a run, too, and by as much as the simulation says."""
    factor = max(
        STRETCH,
        stretch_factor(
            min(PlanTimes(plan, figures_in(plan)).shortest_s for plan in plans.values())
        ),
    )
    with tempfile.TemporaryDirectory() as folder:
        times = run_ranks(measure, EMULATED, plans, folder, factor, share_cores=True)
    updates = {
        name: max(figures_in(plan).update_s) for name, plan in plans.items()
    }  # a stub has next to no weights to update
    seconds = {name: times.median(name) + factor * updates[name] for name in plans}
    simulated = {name: wh.simulate(plan).step_s for name, plan in plans.items()}
    details = {
        "simulated": round(simulated[DATA_PARALLEL] / simulated[HYBRID], 3),
        "emulated / simulated": {
            name: round(seconds[name] / factor / simulated[name], 3) for name in plans
        },
        "update ms, by the cost model": {name: round(updates[name] * 1e3, 1) for name in plans},
        "stretched by": round(factor, 2),
        **times.details(),
    }
    ratio = seconds[DATA_PARALLEL] / seconds[HYBRID]
    return Claim(
        f"100K classes, {EMULATED} GPUs, emulated: hybrid / data parallel",
        ratio,
        1.0,
        at_most=False,
        details=details,
    )


def hundred_thousand() -> list[Claim]:
    claims = []
    leads = []
    print(
        f"{'GPUs':>5}{'DP paper':>10}{'DP ours':>9}{'hybrid paper':>14}{'hybrid ours':>13}{'lead paper':>12}{'lead ours':>11}"
    )
    for number in SIZES:
        plans = {
            DATA_PARALLEL: planned(100_000, number, False),
            HYBRID: planned(100_000, number, True),
        }
        if number == EMULATED:
            claims.append(emulated(plans))
        (alone, _) = speed(plans[DATA_PARALLEL], False)
        (hybrid, details) = speed(plans[HYBRID], True)
        paper = [PAPER["published"][name][number] for name in ("data_parallel", "hybrid")]
        leads.append(hybrid / alone)
        print(
            f"{number:>5}{paper[0]:>10}{alone:>9.0f}{paper[1]:>14}{hybrid:>13.0f}{paper[1] / paper[0]:>12.2f}{leads[-1]:>11.2f}"
        )
        details |= {
            "paper": round(paper[1] / paper[0], 2),
            "samples/s": {"data parallel": round(alone), "hybrid": round(hybrid)},
        }
        claims.append(
            Claim(
                f"100K classes, {number} GPUs: hybrid / data parallel",
                leads[-1],
                1.0,
                at_most=False,
                details=details,
            )
        )
    growth = min(after / before for before, after in zip(leads, leads[1:]))
    claims.append(
        Claim(
            "100K classes: the lead grows",
            growth,
            1.0,
            at_most=False,
            details={"leads": [round(lead, 3) for lead in leads]},
        )
    )
    return claims


def million() -> list[Claim]:
    try:
        planned(1_000_000, 8, False)
    except ValueError as error:
        print(f"1M classes, data parallel: {error}")
        refused = 1.0
    else:
        refused = 0.0
    speeds = {number: speed(planned(1_000_000, number, True), True) for number in SIZES}
    scaling = speeds[32][0] / speeds[8][0] / 4
    details = {
        str(number): {"samples/s": round(found), **more} for number, (found, more) in speeds.items()
    }
    return [
        Claim(
            "1M classes: data parallelism is refused for its memory",
            refused,
            1.0,
            at_most=False,
            details={},
        ),
        Claim(
            "1M classes: scaling of the hybrid from 8 to 32 GPUs",
            scaling,
            0.95,
            at_most=False,
            details=details,
        ),
    ]


def main() -> None:
    report("large_classifier", [*hundred_thousand(), *million()])


if __name__ == "__main__":
    main()
