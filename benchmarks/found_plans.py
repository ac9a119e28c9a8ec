"""Plans that the search found, on emulated GPUs: five clusters, each plan run with stub chunks, every
forward, backward, message and all-reduce at the time of the cost model (docs/emulation.md).

One claim a plan: the emulated step is within 5 % of the predicted one. It measures what the runtime
makes of a plan that nobody wrote, not how fast a GPU is. `--only N`: the N-th plan alone.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

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

FOUND = "found"
WITHIN = 1.05
"""emulated over predicted step, or the other way round"""


@dataclass(frozen=True)
class Setting:
    """A cluster and a batch."""

    name: str
    cluster: str
    batch_size: int
    model: str = "BERT-Large"


SETTINGS = (
    Setting(
        "2 RTX-3090 + 1 RTX-4090 beside 4 V100",
        "hosts: [{name: a, devices: [{kind: RTX-3090}, {kind: RTX-3090}, {kind: RTX-4090}]}, "
        "{name: b, kind: V100-16GB, count: 4}]",
        128,
    ),
    Setting(
        "1 A100-80GB beside 4 T4",
        "hosts: [{name: big, kind: A100-80GB}, {name: small, kind: T4, count: 4}]",
        128,
    ),
    Setting(
        "4 V100 + 4 P100",
        "hosts: [{name: a, kind: V100-32GB, count: 4}, {name: b, kind: P100, count: 4}]",
        128,
    ),
    Setting(
        "6 V100 on two hosts, 10 Gbit/s between",
        "hosts: [{name: a, kind: V100-16GB, count: 3}, {name: b, kind: V100-16GB, count: 3}]\n"
        "links: {inter_host: {gb_per_s: 1.25, latency_us: 30}}",
        96,
    ),
    Setting(
        "3 T4 beside 1 V100, 10 Gbit/s between",
        "hosts: [{name: a, kind: T4, count: 3}, {name: b, kind: V100-16GB}]\n"
        "links: {inter_host: {gb_per_s: 1.25, latency_us: 30}}",
        64,
        "T5-Large",
    ),
)


@dataclass(frozen=True)
class Case:
    """The plan of one setting: what `measure` runs."""

    name: str
    plans: dict[str, Plan]

    @property
    def stretch(self) -> float:
        """Times are longer by this factor, so that what ranks on a shared core take for themselves
        is a small part of a step.
        """
        plan = self.plans[FOUND]
        shortest = PlanTimes(plan, figures_in(plan)).shortest_s
        return max(stretch_factor(shortest), LEAST_STEP_S / simulate(plan).gradients_s)


def claim(model: Captured, setting: Setting) -> Claim:
    cluster = loads(setting.cluster)
    plan = model.searched_plan(cluster, setting.batch_size)
    choice = next(each.choice for each in plan.decisions if each.what == "strategy")
    case = Case(f"{model.name}, {setting.name}", {FOUND: plan})
    predicted = simulate(plan).gradients_s
    say(f"{case.name}: {choice}, predicted {predicted:.4g} s")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.yaml"
        file.write_text(setting.cluster)
        ranks = cluster.num_devices
        results = run_ranks(measure, ranks, [case], str(file), folder, share_cores=True)
    times, late, total = results[0]
    emulated = times.median(FOUND) / case.stretch
    details = {
        "plan": choice,
        "predicted step, s": round(predicted, 5),
        "emulated step, s": round(emulated, 5),
        "late actions": f"{late} of {total}",
        **times.details(),
    }
    off = max(emulated / predicted, predicted / emulated)
    return Claim(f"{case.name}: emulated / predicted", off, WITHIN, at_most=True, details=details)


def main() -> None:
    settings = SETTINGS
    if "--only" in sys.argv[1:]:
        settings = (SETTINGS[int(sys.argv[sys.argv.index("--only") + 1])],)
    models = {name: capture(name) for name in dict.fromkeys(each.model for each in settings)}
    report("found_plans", [claim(models[each.model], each) for each in settings])


if __name__ == "__main__":
    main()
