"""Hardware-aware plans against even ones on emulated V100 and P100: 16 devices data parallel, and 4
stages x 2 replicas on 8.

Both plans run in turns in the same processes with stub chunks; every forward, backward, message and
sum takes the time of the cost model (docs/emulation.md), so this measures what the runtime makes of
a better plan, not how fast a V100 is. The ceiling beside each ratio is the best that whole samples
and whole pieces of the model allow, found by trying all of them on the cost model
(whole_splits.py): a proof, not a search. `python benchmarks/hardware_aware.py ResNet50` runs one
model only.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # `python benchmarks/hardware_aware.py` finds its neighbours, too

from benchmarks.paper_models import Captured, capture
from benchmarks.side_by_side import Claim, Side, Times, alternate, report, run_ranks, say
from benchmarks.whole_splits import Best, best_data_parallel, best_pipeline
from whale.cluster.file import loads
from whale.config import Config
from whale.distributed.ranks import Ranks
from whale.emulation.emulation import EmulatedPlatform
from whale.emulation.pace import stretch_factor
from whale.emulation.settings import EmulationSettings
from whale.plans.plan import Plan
from whale.runtime.engine import Engine
from whale.runtime.shapes import Job
from whale.simulation import simulate
from whale.simulation.simulate import figures_in
from whale.simulation.times import Times as PlanTimes

CLUSTER = "hosts: [{name: big, kind: V100-32GB, count: %d}, {name: small, kind: P100, count: %d}]"
NUM_STAGES = 4
NUM_MICRO_BATCH = 8
DATA_PARALLEL = {"BERT-Large": 16 * 24, "ResNet50": 16 * 64}
"""samples of a mini-batch"""
PIPELINE = {"BERT-Large": 8 * 16, "ResNet50": 8 * 64}
PIECES = 32
"""of about equal time, between which the ceiling of the pipeline may cut"""
FREE_LINKS = "links: {intra_host: {gb_per_s: 1.0e+9}, inter_host: {gb_per_s: 1.0e+9}}"
"""the pieces are cut as if messages took no time"""
ROUNDS = 8
LIMIT_S = 20.0
LEAST_STEP_S = 1.0
ALLOWED = {"data parallel": 0.98, "pipeline": 0.97}
AWARE = "hardware-aware"
EVEN = "even"


@dataclass(frozen=True)
class Case:
    """One model on one cluster."""

    name: str
    kind: str
    plans: dict[str, Plan]
    best: Best

    @property
    def ceiling(self) -> float:
        """Best ratio of the step times, even over aware."""
        return simulate(self.plans[EVEN]).gradients_s / self.best.step_s

    @property
    def stretch(self) -> float:
        """All times are longer by this factor, so that what ranks that share a core take for
        themselves is a small part of a step.
        """
        shortest = min(PlanTimes(plan, figures_in(plan)).shortest_s for plan in self.plans.values())
        return max(stretch_factor(shortest), LEAST_STEP_S / self.best.step_s)


def data_parallel(model: Captured) -> Case:
    cluster = loads(CLUSTER % (8, 8))
    batch_size = DATA_PARALLEL[model.name]
    plans = {AWARE: model.plan(cluster, batch_size), EVEN: model.even_plan(cluster, batch_size)}
    return Case(
        f"{model.name}, 8 V100 + 8 P100", "data parallel", plans, best_data_parallel(plans[EVEN])
    )


def pipeline(model: Captured) -> Case:
    cluster = loads(CLUSTER % (4, 4))
    batch_size = PIPELINE[model.name]
    config = {"num_task_graph": NUM_STAGES, "num_micro_batch": NUM_MICRO_BATCH, "schedule": "1f1b"}
    plans = {
        AWARE: model.plan(cluster, batch_size, **config),
        EVEN: model.even_plan(cluster, batch_size, **config),
    }
    every_kind = loads(
        f"hosts: [{{name: a, kind: V100-32GB, count: {PIECES}}}, "
        f"{{name: b, kind: P100, count: {PIECES}}}]\n{FREE_LINKS}"
    )
    pieces = model.even_plan(every_kind, batch_size, **{**config, "num_task_graph": PIECES})
    # the planner may cut at more points: its own plan is possible as well
    best = best_pipeline(pieces, plans[EVEN], simulate(plans[AWARE]).gradients_s)
    return Case(f"{model.name}, 4 V100 + 4 P100", "pipeline", plans, best)


# ---- measured


def measure(cases: list[Case], cluster_file: str, folder: str) -> list[tuple[Times, int, int]]:
    """Runs on every rank: times of both plans of every case, late actions, all actions."""
    ranks = Ranks("cpu")
    found = []
    for case in cases:
        sides = []
        emulations = []
        factor = case.stretch
        for name, plan in case.plans.items():
            config = Config(num_micro_batch=plan.num_micro_batch)
            settings = EmulationSettings(
                cluster_file, f"{folder}/{name}", stub=True, stretch=factor
            )
            emulation = EmulatedPlatform(ranks, settings)
            cluster = loads(Path(cluster_file).read_text())
            stub = emulation.start(plan, None, cluster, config)
            assert stub is not None
            engine = Engine(
                Job.of_stand_in(stub, emulation),
                lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
                None,
            )
            batch = torch.ones(plan.batch_size, 1)
            sides.append(Side(name, lambda step, engine=engine, batch=batch: engine.step(batch)))  # type: ignore[misc]
            emulations.append(emulation)
        say(f"{case.name}: times stretched by {factor:.3g}")
        times = alternate(sides, ROUNDS, 1, LIMIT_S, warm_up=2)
        paces = [pace for emulation in emulations for pace in emulation._paces]
        late = ranks.gather(
            (sum(pace.num_overruns for pace in paces), sum(pace.num_actions for pace in paces))
        )
        found.append((times, sum(each[0] for each in late), sum(each[1] for each in late)))
    return found


def claims(cases: list[Case], cluster: str, num_ranks: int) -> list[Claim]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.yaml"
        file.write_text(cluster)
        results = run_ranks(measure, num_ranks, cases, str(file), folder, share_cores=True)
    found = []
    for case, (times, late, total) in zip(cases, results, strict=True):
        ratio = times.ratio(EVEN, AWARE)
        simulated = simulate(case.plans[EVEN]).gradients_s / simulate(case.plans[AWARE]).gradients_s
        details = {
            "even / aware, measured": round(ratio, 3),
            "simulated": round(simulated, 3),
            "best with whole samples and pieces": round(case.ceiling, 3),
            "splits tried": case.best.num_tried,
            "late actions": f"{late} of {total}",
            **times.details(),
        }
        name = f"{case.kind}: {case.name}: ratio / best"
        found.append(
            Claim(name, ratio / case.ceiling, ALLOWED[case.kind], at_most=False, details=details)
        )
    return found


def main() -> None:
    models = [capture(name) for name in sys.argv[1:] or DATA_PARALLEL]
    say("planning")
    parallel = [data_parallel(model) for model in models]
    staged = [pipeline(model) for model in models]
    report(
        "hardware_aware",
        [*claims(parallel, CLUSTER % (8, 8), 16), *claims(staged, CLUSTER % (4, 4), 8)],
    )


if __name__ == "__main__":
    main()
