"""Hardware-aware plans against even ones on emulated V100 and P100: 16 devices data parallel, and 4 stages x 2 replicas on 8.

Both plans run in turns in the same processes with stub chunks; every forward, backward, message and sum takes the time of the cost model
(docs/emulation.md), so this measures what the runtime makes of a better plan, not how fast a V100 is. The ceiling beside each ratio is the
best that whole samples and whole layers allow, found by trying all of them on the cost model:

    data parallel   the least T for which the devices together can do all samples, each within T
    pipeline        all cuts between layers x all orders of devices x all shares of the two replicas, by a formula;
                    the best of them by simulation
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `python benchmarks/hardware_aware.py` finds its neighbours, too

from benchmarks.paper_models import Captured, capture
from benchmarks.side_by_side import Claim, Side, Times, alternate, report, run_ranks, say
from whale import scheduling
from whale.cluster.file import loads
from whale.cluster.network import Network
from whale.config import Config
from whale.emulation.emulation import Emulation, stub_job
from whale.emulation.pace import stretch_factor
from whale.emulation.settings import Settings
from whale.planning.figures import Seconds, StageFigures, StageTimes
from whale.planning.plan import Plan, Stage
from whale.planning.virtual_devices import VirtualDevice
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
LAYERS = {"BERT-Large": 24, "ResNet50": 24}
"""pieces of about equal time between which the ceiling of the pipeline may cut"""
FREE_LINKS = "links: {intra_host: {gb_per_s: 1.0e+9}, inter_host: {gb_per_s: 1.0e+9}}"
"""the pieces are cut as if messages took no time"""
KINDS = ("V100-32GB", "P100")
SIMULATED = 400
"""candidates for the ceiling of the pipeline that are simulated, in all"""
EACH = 20
"""and at most for each order of the devices"""
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
    number = LAYERS[model.name]
    every_kind = loads(f"hosts: [{{name: a, kind: V100-32GB, count: {number}}}, {{name: b, kind: P100, count: {number}}}]\n{FREE_LINKS}")
    layers = model.even_plan(every_kind, batch_size, **{**config, "num_task_graph": number})
    return Case(
        f"{model.name}, 4 V100 + 4 P100", "pipeline", plans, simulate(plans[EVEN]).gradients_s / _best_pipeline(layers, plans[EVEN])
    )


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


def _merged(layers: Plan, starts: tuple[int, ...], ranks: list[tuple[int, int]], even: Plan, seconds: tuple[float, ...]) -> Plan:
    """The pipeline whose stages are these layers together. `ranks[stage]`: of both replicas; `seconds`: of a sample, by rank."""
    fine = figures_in(layers)
    edges = [*starts, len(layers.stages)]
    stage_of = [next(stage for stage in reversed(range(NUM_STAGES)) if layer >= starts[stage]) for layer in range(len(layers.stages))]
    stages, states = [], []
    for first, last in itertools.pairwise(edges):
        parts, kinds = fine.stages[first:last], fine.stages[first].times
        times = {kind: _joined([part.times[kind] for part in parts]) for kind in kinds}
        kept = sum(part.kept_sample_bytes for part in parts)
        stages.append(StageFigures(times, kept, 0.0, max(part.working_sample_bytes for part in parts)))
    for state in fine.states:
        states.append(replace(state, stages=tuple(sorted({stage_of[layer] for layer in state.stages}))))
    crossings = [replace(c, source=stage_of[c.source], destination=stage_of[c.destination]) for c in layers.crossings]
    crossings = [c for c in crossings if c.source != c.destination]
    pairs = tuple(sorted({(c.source, c.destination) for c in crossings}))
    backward = tuple(sorted({(c.source, c.destination) for c in crossings if c.gradient}))
    graph = scheduling.StageGraph(tuple(range(NUM_STAGES)), pairs, backward)
    return replace(
        even,
        virtual_devices=tuple(VirtualDevice(stage, tuple((rank,) for rank in both)) for stage, both in enumerate(ranks)),
        stages=tuple(Stage(stage, stage, (), 1, 1.0, 1.0, (), 0) for stage in range(NUM_STAGES)),
        crossings=tuple(crossings),
        schedule=scheduling.build("1f1b", graph, NUM_MICRO_BATCH).to_json(),
        device_seconds=seconds,
        device_fixed_seconds=(),
        memory=(),
        figures=replace(figures_in(even), stages=tuple(stages), states=tuple(states)),
    )


def _joined(parts: list[StageTimes]) -> StageTimes:
    def total(times: list[Seconds]) -> Seconds:
        return Seconds(sum(each.sample_s for each in times), sum(each.fixed_s for each in times))

    return StageTimes(
        total([part.forward for part in parts]),
        total([part.input_backward for part in parts]),
        total([part.weight_backward for part in parts]),
    )


def _best_pipeline(layers: Plan, even: Plan) -> float:
    """Step of the best of all cuts, orders and shares: every one by a formula, and the best of them by simulation.

    `layers`: a plan with a stage for each layer, in one replica on V100 and in one on P100.
    """
    size = even.batch_size // NUM_MICRO_BATCH
    found = []
    for first, second in sorted(_replicas()):
        ranks = _ranks(first, second, even)
        for starts, share, step in _by_formula(layers, figures_in(even).network, first, second, size):
            found.append((step, starts, ranks, share))
    best = float("inf")
    for _, starts, ranks, share in sorted(found)[:SIMULATED]:
        # speeds that make the shares come out so
        of_replica = (1.0 / max(share, 1e-9), 1.0 / max(size - share, 1e-9))
        seconds = [0.0] * even.num_devices
        for both in ranks:
            for replica, rank in enumerate(both):
                seconds[rank] = of_replica[replica]
        step_s = simulate(_merged(layers, starts, ranks, even, tuple(seconds))).gradients_s
        best = min(best, step_s)
    return best


def _by_formula(
    layers: Plan, network: Network, first: tuple[str, ...], second: tuple[str, ...], size: int
) -> list[tuple[tuple[int, ...], int, float]]:
    """(starts, share, step) of the best cuts for these two pipelines: sum of the stages and messages + (M - 1) * the slowest of them."""
    fine = figures_in(layers)
    cuts = np.array(list(itertools.combinations(range(1, len(layers.stages)), NUM_STAGES - 1)))
    edges = np.concatenate([np.zeros((len(cuts), 1), int), cuts, np.full((len(cuts), 1), len(layers.stages))], axis=1)
    lines = {
        kind: np.concatenate([[0.0], np.cumsum([stage.times[kind].total.sample_s for stage in fine.stages])])
        for kind in fine.stages[0].times
    }
    bytes_before = np.array(
        [0.0, *(sum(c.sample_bytes for c in layers.crossings if c.source < p <= c.destination) for p in range(1, len(layers.stages)))]
    )
    candidates = []
    for share in range(size // 2, size - size // 5):
        steps = []
        for order, samples in ((first, share), (second, size - share)):
            parts = [samples * (lines[kind][edges[:, place + 1]] - lines[kind][edges[:, place]]) for place, kind in enumerate(order)]
            for place in range(1, NUM_STAGES):
                link = network.intra_host if order[place - 1] == order[place] else network.inter_host
                parts.append(samples * bytes_before[edges[:, place]] / link.bytes_per_s)
            steps.append(np.sum(parts, axis=0) + (NUM_MICRO_BATCH - 1) * np.max(parts, axis=0))
        total = np.maximum(*steps)
        for place in np.argsort(total)[:EACH]:
            candidates.append(((0, *map(int, cuts[place])), share, float(total[place])))
    return sorted(candidates, key=lambda each: each[2])[:EACH]


def _replicas() -> set[tuple[tuple[str, ...], tuple[str, ...]]]:
    """All ways to make two pipelines of four devices of each kind."""
    found = set()
    for order in itertools.product(KINDS, repeat=NUM_STAGES):
        rest = [kind for kind in KINDS for _ in range(4 - order.count(kind))]
        found |= {(order, tuple(second)) for second in itertools.permutations(rest)}
    return found


def _ranks(first: tuple[str, ...], second: tuple[str, ...], plan: Plan) -> list[tuple[int, int]]:
    """Devices of these kinds for every stage of both replicas."""
    free = {kind: [rank for rank, each in enumerate(plan.device_kinds) if each == kind] for kind in KINDS}
    return [(free[a].pop(0), free[b].pop(0)) for a, b in zip(first, second, strict=True)]


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
