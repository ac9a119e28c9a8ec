"""Hardware-aware plans against even ones on emulated V100 and P100: 16 devices data parallel, and 4 stages x 2 replicas on 8.

Both plans run in turns in the same processes with stub chunks; every forward, backward, message and sum takes the time of the cost model
(docs/emulation.md), so this measures what the runtime makes of a better plan, not how fast a V100 is. The ceiling beside each ratio is the
best that whole samples and whole layers allow, found by trying all of them on the cost model:

    data parallel   the least T for which the devices together can do all samples, each within T
    pipeline        all cuts between layers x all orders of devices x all shares of the two replicas, by
                    step = sum of the stages + (micro-batches - 1) * slowest stage, the slower replica counts
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `python benchmarks/hardware_aware.py` finds its neighbours, too

from benchmarks.paper_models import Captured, capture
from benchmarks.side_by_side import Claim, Side, Times, alternate, report, run_ranks, say
from whale.cluster.file import loads
from whale.config import Config
from whale.emulation.emulation import Emulation, stub_job
from whale.emulation.pace import stretch_factor
from whale.emulation.settings import Settings
from whale.planning.plan import Plan
from whale.runtime.engine import Engine
from whale.runtime.ranks import Ranks
from whale.simulation import simulate
from whale.simulation.simulate import figures_in
from whale.simulation.sums import sums_of
from whale.simulation.times import Times as PlanTimes

CLUSTER = "hosts: [{name: big, kind: V100-32GB, count: %d}, {name: small, kind: P100, count: %d}]"
NUM_STAGES, NUM_MICRO_BATCH = 4, 8
DATA_PARALLEL = {"BERT-Large": 16 * 24, "ResNet50": 16 * 64}
"""samples of a mini-batch"""
PIPELINE = {"BERT-Large": 8 * 16, "ResNet50": 8 * 64}
LAYERS = {"BERT-Large": 24, "ResNet50": 16}
"""pieces of about equal time between which the ceiling of the pipeline may cut"""
ROUNDS, LIMIT_S = 4, 50.0
ALLOWED = {"data parallel": 0.98, "pipeline": 0.97}
AWARE, EVEN = "hardware-aware", "even"


@dataclass(frozen=True)
class Case:
    """One model on one cluster."""

    name: str
    kind: str
    plans: dict[str, Plan]
    ceiling: float
    """best ratio of the step times, even over aware"""


def data_parallel(model: Captured) -> Case:
    cluster, batch_size = loads(CLUSTER % (8, 8)), DATA_PARALLEL[model.name]
    plans = {AWARE: model.plan(cluster, batch_size), EVEN: model.even_plan(cluster, batch_size)}
    return Case(f"{model.name}, 8 V100 + 8 P100", "data parallel", plans, _step_of_even(plans[EVEN]) / _best_step(plans[EVEN]))


def pipeline(model: Captured) -> Case:
    cluster, batch_size = loads(CLUSTER % (4, 4)), PIPELINE[model.name]
    config = {"num_task_graph": NUM_STAGES, "num_micro_batch": NUM_MICRO_BATCH, "schedule": "1f1b"}
    plans = {AWARE: model.plan(cluster, batch_size, **config), EVEN: model.even_plan(cluster, batch_size, **config)}
    every_kind = loads(
        f"hosts: [{{name: a, kind: V100-32GB, count: {LAYERS[model.name]}}}, {{name: b, kind: P100, count: {LAYERS[model.name]}}}]"
    )
    layers = model.even_plan(every_kind, batch_size, **{**config, "num_task_graph": LAYERS[model.name]})
    return Case(f"{model.name}, 4 V100 + 4 P100", "pipeline", plans, _even_pipeline(plans[EVEN]) / _best_pipeline(layers, batch_size))


# ---- ceilings


def _sample_seconds(plan: Plan, stage: int, kind: str, num_samples: int) -> float:
    return figures_in(plan).stages[stage].times[kind].total.of(num_samples)


def _dp_step(plan: Plan, shares: dict[str, int]) -> float:
    """Of a data-parallel plan when every device of a kind has at most so many samples."""
    times = figures_in(plan).stages[0].times
    closed = {kind: times[kind].total.of(number) for kind, number in shares.items()}
    last = max(closed, key=closed.__getitem__)
    (one,) = sums_of(plan, figures_in(plan), int(plan.config["bucket_bytes"]))
    backward_s = times[last].backward.of(shares[last])
    end = one.end(closed[last], backward_s, 0.0)
    ready = one.first_ready(closed[last], backward_s)
    return max([end, *(ready + seconds for _, seconds in one.leaving)]) + max(figures_in(plan).update_s)


def _step_of_even(plan: Plan) -> float:
    each = plan.batch_size // plan.num_devices
    return _dp_step(plan, dict.fromkeys(plan.device_kinds, each))


def _best_step(plan: Plan) -> float:
    times = figures_in(plan).stages[0].times
    found = []
    for kind, number in itertools.product(times, range(1, plan.batch_size + 1)):
        limit = _sample_seconds(plan, 0, kind, number)
        shares = {}
        for other, each in times.items():
            shares[other] = max(0, int((limit * (1 + 1e-9) - each.total.fixed_s) / each.total.sample_s))
        if sum(shares[each] for each in plan.device_kinds) >= plan.batch_size:
            found.append((limit, _dp_step(plan, shares)))
    return min(found)[1]


def _even_pipeline(plan: Plan) -> float:
    times = PlanTimes(plan, figures_in(plan))
    worst = 0.0
    for replica in range(plan.num_replicas):
        ranks = [plan.virtual_devices[stage.virtual_device].ranks[replica][0] for stage in plan.stages]
        stages = [_sample_seconds(plan, s, plan.device_kinds[rank], times.num_samples(rank)[0]) for s, rank in enumerate(ranks)]
        worst = max(worst, sum(stages) + (plan.num_micro_batch - 1) * max(stages))
    return worst


def _best_pipeline(layers: Plan, batch_size: int) -> float:
    """`layers`: a plan with a stage for each layer, in one replica on V100 and in one on P100."""
    size, kinds = batch_size // NUM_MICRO_BATCH, ("V100-32GB", "P100")
    cuts = np.array(list(itertools.combinations(range(1, len(layers.stages)), NUM_STAGES - 1)))
    edges = np.concatenate([np.zeros((len(cuts), 1), int), cuts, np.full((len(cuts), 1), len(layers.stages))], axis=1)
    parts: dict[str, list[np.ndarray[Any, Any]]] = {}  # (fixed, per sample) of every stage, for all cuts at once
    for kind in kinds:
        totals = [stage.times[kind].total for stage in figures_in(layers).stages]
        parts[kind] = [np.concatenate([[0.0], np.cumsum(values)]) for values in zip(*((each.fixed_s, each.sample_s) for each in totals))]

    def steps(order: tuple[str, ...], num_samples: int) -> np.ndarray[Any, Any]:
        """Of one replica, for every cut."""
        if not num_samples:
            return np.zeros(len(cuts))
        stages = []
        for place, kind in enumerate(order):
            fixed, per_sample = (line[edges[:, place + 1]] - line[edges[:, place]] for line in parts[kind])
            stages.append(fixed + num_samples * per_sample)
        found: np.ndarray[Any, Any] = np.sum(stages, axis=0) + (NUM_MICRO_BATCH - 1) * np.max(stages, axis=0)
        return found

    best = float("inf")
    for first, second in _replicas(kinds):
        for share in range(size + 1):
            best = min(best, float(np.maximum(steps(first, share), steps(second, size - share)).min()))
    return best


def _replicas(kinds: tuple[str, str]) -> set[tuple[tuple[str, ...], tuple[str, ...]]]:
    """All ways to make two pipelines of four devices of each kind."""
    found = set()
    for order in itertools.product(kinds, repeat=NUM_STAGES):
        rest = [kind for kind in kinds for _ in range(4 - order.count(kind))]
        found |= {(order, tuple(second)) for second in itertools.permutations(rest)}
    return found


# ---- measured


def measure(cases: list[Case], cluster_file: str, folder: str, factor: float) -> list[tuple[Times, int, int]]:
    """Runs on every rank: times of both plans of every case, late actions, all actions."""
    ranks = Ranks("cpu")
    found = []
    for case in cases:
        sides, emulations = [], []
        for name, plan in case.plans.items():
            config = Config(plan.config)
            settings = Settings(cluster_file, f"{folder}/{name}", stub=True, stretch=factor)
            emulation = Emulation(settings, loads(Path(cluster_file).read_text()), plan, None, ranks, config)
            engine = Engine(stub_job(emulation, config), lambda named: torch.optim.SGD([p for _, p in named], lr=0.1), None)
            batch = torch.ones(plan.batch_size, 1)
            sides.append(Side(name, lambda step, engine=engine, batch=batch: engine.step(batch)))  # type: ignore[misc]
            emulations.append(emulation)
        say(f"{case.name}: times stretched by {factor:.3g}")
        times = alternate(sides, ROUNDS, 1, LIMIT_S, warm_up=2)
        paces = [pace for emulation in emulations for pace in emulation._paces.values()]
        late = ranks.gather((sum(pace.num_overruns for pace in paces), sum(pace.num_actions for pace in paces)))
        found.append((times, sum(each[0] for each in late), sum(each[1] for each in late)))
    return found


def claims(cases: list[Case], cluster: str, num_ranks: int) -> list[Claim]:
    shortest = min(PlanTimes(plan, figures_in(plan)).shortest_s for case in cases for plan in case.plans.values())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.yaml"
        file.write_text(cluster)
        results = run_ranks(measure, num_ranks, cases, str(file), folder, stretch_factor(shortest), share_cores=True)
    found = []
    for case, (times, late, total) in zip(cases, results, strict=True):
        ratio = times.ratio(EVEN, AWARE)
        simulated = simulate(case.plans[EVEN]).gradients_s / simulate(case.plans[AWARE]).gradients_s
        details = {
            "even / aware, measured": round(ratio, 3),
            "simulated": round(simulated, 3),
            "best with whole samples and layers": round(case.ceiling, 3),
            "late actions": f"{late} of {total}",
            **times.details(),
        }
        name = f"{case.kind}: {case.name}: ratio / best"
        found.append(Claim(name, ratio / case.ceiling, ALLOWED[case.kind], at_most=False, details=details))
    return found


def main() -> None:
    models = [capture(name) for name in DATA_PARALLEL]
    say("planning")
    parallel, staged = [data_parallel(model) for model in models], [pipeline(model) for model in models]
    report("hardware_aware", [*claims(parallel, CLUSTER % (8, 8), 16), *claims(staged, CLUSTER % (4, 4), 8)])


if __name__ == "__main__":
    main()
