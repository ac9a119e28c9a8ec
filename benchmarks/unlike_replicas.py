"""Model replicas that are not alike on emulated GPUs: one A100-80GB beside a pipeline of four T4,
and seven V100 as a pipeline of three stages and one of four.

All plans of a case run in turns in the same processes with stub chunks; every forward, backward,
message and all-reduce takes the time of the cost model (docs/emulation.md). So this measures what
the runtime makes of such a plan, and how well the simulation predicts it, not how fast a GPU is.
One claim a case: the emulated step is within 5 % of the predicted one. The best plan of alike
replicas on the same devices runs beside it, as the figure that says whether such a plan pays; which
one is faster depends on the model (one that fits on every device is better off data parallel), and
is for the search to find.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.hardware_aware import LEAST_STEP_S, measure
from benchmarks.paper_models import Captured, capture
from benchmarks.side_by_side import Claim, report, run_ranks, say
from whale.cluster.file import loads
from whale.emulation.pace import stretch_factor
from whale.plans.plan import Plan
from whale.simulation import simulate
from whale.simulation.simulate import figures_in
from whale.simulation.times import Times as PlanTimes

UNLIKE = "not alike"
ALIKE = "alike"
WITHIN = 1.05
"""emulated over predicted step"""
NUM_MICRO_BATCH = (4, 8, 16)
"""tried for alike pipelines"""


@dataclass(frozen=True)
class Setting:
    """A cluster, and model replicas that are not alike for it."""

    name: str
    cluster: str
    num_ranks: int
    batch_size: int
    replicas: list[dict[str, Any]]


SETTINGS = (
    Setting(
        "1 A100-80GB beside 4 T4",
        "hosts: [{name: big, kind: A100-80GB}, {name: small, kind: T4, count: 4}]",
        5,
        128,
        [
            {"stages": [[0]], "num_micro_batch": 4},
            {"stages": [[1], [2], [3], [4]], "num_micro_batch": 8},
        ],
    ),
    Setting(
        "7 V100 as 3 stages and 4 stages",
        "hosts: [{name: a, kind: V100-16GB, count: 3}, {name: b, kind: V100-16GB, count: 4}]",
        7,
        112,
        [
            {"stages": [[0], [1], [2]], "num_micro_batch": 12},
            {"stages": [[3], [4], [5], [6]], "num_micro_batch": 12},
        ],
    ),
)


@dataclass(frozen=True)
class Case:
    """Plans of one setting: what `measure` runs."""

    name: str
    plans: dict[str, Plan]
    what_is_alike: str

    @property
    def stretch(self) -> float:
        """Times are longer by this factor, so that what ranks on a shared core take for themselves
        is a small part of a step.
        """
        shortest = min(PlanTimes(plan, figures_in(plan)).shortest_s for plan in self.plans.values())
        least = min(simulate(plan).gradients_s for plan in self.plans.values())
        return max(stretch_factor(shortest), LEAST_STEP_S / least)


def alike_plans(model: Captured, setting: Setting) -> dict[str, Plan]:
    """Plans of alike replicas that fit, by what they are."""
    cluster = loads(setting.cluster)
    wanted: dict[str, dict[str, Any]] = {"data parallel": {}}
    for number in NUM_MICRO_BATCH:
        name = f"{setting.num_ranks} stages, {number} micro-batches"
        wanted[name] = {"num_task_graph": setting.num_ranks, "num_micro_batch": number}
    found = {}
    for name, config in wanted.items():
        try:
            found[name] = model.plan(cluster, setting.batch_size, **config)
        except ValueError as error:
            say(f"{setting.name}, {name}: {str(error)[:120]}")
    return found


def case_of(model: Captured, setting: Setting) -> Case:
    found = alike_plans(model, setting)
    best = min(found, key=lambda name: simulate(found[name]).gradients_s)
    plans = {
        UNLIKE: model.plan(loads(setting.cluster), setting.batch_size, replicas=setting.replicas),
        ALIKE: found[best],
    }
    return Case(f"{model.name}, {setting.name}", plans, best)


def claims(model: Captured, setting: Setting) -> list[Claim]:
    case = case_of(model, setting)
    predicted = {name: simulate(plan).gradients_s for name, plan in case.plans.items()}
    say(f"{case.name}: predicted {predicted}, best of the alike plans: {case.what_is_alike}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.yaml"
        file.write_text(setting.cluster)
        results = run_ranks(measure, setting.num_ranks, [case], str(file), folder, share_cores=True)
    times, late, total = results[0]
    emulated = times.median(UNLIKE) / case.stretch
    ratio = times.ratio(ALIKE, UNLIKE)
    details = {
        "predicted step, s": round(predicted[UNLIKE], 5),
        "emulated step, s": round(emulated, 5),
        "samples": [view.batch_size for view in case.plans[UNLIKE].by_template],
        "best alike plan": case.what_is_alike,
        "alike / not alike, simulated": round(predicted[ALIKE] / predicted[UNLIKE], 3),
        "alike / not alike, emulated": round(ratio, 3),
        "late actions": f"{late} of {total}",
        **times.details(),
    }
    off = max(emulated / predicted[UNLIKE], predicted[UNLIKE] / emulated)
    return [
        Claim(f"{case.name}: emulated / predicted", off, WITHIN, at_most=True, details=details),
    ]


def main() -> None:
    model = capture("BERT-Large")
    found = []
    for setting in SETTINGS:
        found += claims(model, setting)
    report("unlike_replicas", found)


if __name__ == "__main__":
    main()
