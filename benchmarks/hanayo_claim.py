"""Hanayo's claim, up to 30.4 % faster than Chimera, at equal memory: GPT- and BERT-like models on 8
to 32 devices.

As many micro-batches as devices. A device's memory holds what Hanayo needs there: its share of the
weights once, and the activations of P micro-batches. Chimera keeps two shares of the weights and
has that much less for activations; where not even two micro-batches are left it cannot run. Its
order is list-scheduled for this memory, and the sum of its two replicas' gradients is not counted:
both help it.

    hanayo      the order of the paper's figure, the best of 1, 2 and 4 waves
    list        the list-scheduled wave with split backwards, the best of 1 and 2 waves
    emulated    both with 2 waves on 8 and 16 emulated devices (benchmarks/pipeline_emulated.py), whose messages take what they take on
                this machine, about 0.6 ms; Chimera as simulated, over NVLink. 32 ranks take minutes to start on 2 cores: left out

Ratios above 1: Chimera is slower. All assumptions are in this file. The models are stand-ins of the
sizes that such papers use, not the paper's own tables.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # `python benchmarks/hanayo_claim.py` finds its neighbours, too

import whale as wh
from benchmarks import pipeline_emulated
from benchmarks.pipeline_emulated import Case
from benchmarks.side_by_side import Claim, Times, alternate, report, run_ranks, say
from whale.emulation.pace import wake_up_on_time
from whale.scheduling import (
    Schedule,
    StageGraph,
    add_messages,
    even_costs,
    list_orders,
    simulate,
    stages_without_input_gradient,
    wave_orders,
)
from whale.scheduling.compare import Question, chimera
from whale.scheduling.placement import wave

Ratios = dict[str, float]
"""Chimera's step over ours, by the name of ours"""

CLAIMED = 1.304
DEVICE_FLOP_PER_S = 312e12 * 0.45
"""an A100 in bf16, at what large layers reach of its peak"""
LINKS = {"NVLink": (250e9, 5e-6), "network": (12e9, 20e-6)}
"""bytes per second, latency in seconds"""
STATE_BYTES = 16
"""of a parameter under mixed precision: weight, gradient, and master weight with two moments in
float32
"""
WAVES = (1, 2, 4)
LISTED_WAVES = (1, 2)
EMULATED_WAVES = 2
TRIES = 16
HANAYO = "hanayo"
LISTED = "list"


@dataclass(frozen=True)
class Model:
    """Transformer layers; a micro-batch is one sequence."""

    name: str
    num_layers: int
    width: int
    num_heads: int
    length: int

    def forward_s(self, num_devices: int) -> float:
        """Of a device's share, one micro-batch."""
        flop = self.length * (24 * self.width**2 + 4 * self.length * self.width)
        return self.num_layers / num_devices * flop / DEVICE_FLOP_PER_S

    def message_s(self, link: str) -> float:
        bytes_per_s, latency_s = LINKS[link]
        return 2 * self.length * self.width / bytes_per_s + latency_s

    def weights_in_micro_batches(self) -> float:
        """State of a layer over its activations of one micro-batch (34 bytes a number, and the
        scores of the heads).
        """
        activation = self.length * (34 * self.width + 5 * self.num_heads * self.length)
        return 12 * self.width**2 * STATE_BYTES / activation


MODELS = (Model("GPT-like", 128, 1024, 16, 1024), Model("BERT-like", 64, 2560, 64, 512))
DEVICES = (8, 16, 32)


def wave_graph(num_devices: int, num_waves: int) -> StageGraph:
    return StageGraph.chain(2 * num_devices * num_waves, wave(num_devices, num_waves))


def wave_steps(num_devices: int, message: float) -> tuple[dict[int, float], dict[int, float]]:
    """Steps of the paper's order and of the list-scheduled one, by number of waves, in units of a
    device's forward.
    """
    paper = {}
    listed = {}
    for num_waves in WAVES:
        graph = wave_graph(num_devices, num_waves)
        costs = even_costs(
            graph,
            message_s=message,
            memory_cap=num_devices,
            unsplit=stages_without_input_gradient(graph),
        )
        paper[num_waves] = simulate(
            Schedule("wave", graph, num_devices, wave_orders(graph, num_devices)), costs
        ).step_s
        if num_waves in LISTED_WAVES:
            orders = list_orders(graph, costs, num_devices, split=True, tries=TRIES)
            listed[num_waves] = simulate(Schedule("list", graph, num_devices, orders), costs).step_s
    return paper, listed


@dataclass(frozen=True)
class Row:
    """One model on so many devices. `best_waves`: of Hanayo's own order."""

    model: Model
    num_devices: int
    link: str
    best_waves: int
    paper_step: float
    listed_step: float
    """in units of a device's forward, as all steps here"""

    @property
    def message(self) -> float:
        return self.model.message_s(self.link) / self.model.forward_s(self.num_devices)

    @property
    def memory_of_chimera(self) -> dict[str, float]:
        """In micro-batches: as much for activations as Hanayo has, and as much memory in all."""
        return {
            "activations": float(self.num_devices),
            "memory": self.num_devices - self.model.weights_in_micro_batches(),
        }

    def chimera_steps(self) -> dict[str, float | None]:
        """None: it does not fit."""
        return {
            equal: chimera_step(self.num_devices, self.message, room) if room >= 2 else None
            for equal, room in self.memory_of_chimera.items()
        }

    def text(self, ratios: dict[str, Ratios | None]) -> str:
        found = (
            f"{self.model.name:<10}{self.num_devices:>8}  "
            f"{self.link:<8}{self.message:>10.3f}{self.best_waves:>7}"
        )
        for ratio in ratios.values():
            found += (
                "     does not fit"
                if ratio is None
                else f"{ratio[HANAYO]:>9.3f}{ratio[LISTED]:>8.3f}"
            )
        return found


HEADER = f"{'':<45}{'equal activations':>17}{'equal memory':>17}\n" + (
    f"{'model':<10}{'devices':>8}  {'link':<8}{'message':>10}{'waves':>7}"
    + f"{HANAYO:>9}{LISTED:>8}" * 2
)


def chimera_step(num_devices: int, message: float, memory: float) -> float:
    question = Question(
        num_devices=num_devices,
        num_micro_batch=num_devices,
        message_s=message,
        tries=TRIES,
        memory=memory,
    )
    return chimera(question).timeline.step_s


def simulated_row(model: Model, num_devices: int, link: str) -> Row:
    message = model.message_s(link) / model.forward_s(num_devices)
    paper, listed = wave_steps(num_devices, message)
    best = min(paper, key=paper.__getitem__)
    return Row(model, num_devices, link, best, paper[best], min(listed.values()))


def compared(
    chimera_steps: dict[str, float | None], ours: dict[str, float]
) -> dict[str, Ratios | None]:
    """`ours`: steps by name."""
    return {
        equal: None
        if theirs is None
        else {name: round(theirs / step, 3) for name, step in ours.items()}
        for equal, theirs in chimera_steps.items()
    }


# ---- emulated

CASES = (
    pipeline_emulated.Case(8, 8, 25.0),
    pipeline_emulated.Case(16, 16, 40.0, forward_s=0.050),
)
"""the more devices on these cores, the longer their actions: the runtime of all together must fit
in between
"""


def emulated_schedules(case: Case) -> dict[str, Schedule]:
    graph = wave_graph(case.num_devices, EMULATED_WAVES)
    orders = add_messages(graph, wave_orders(graph, case.num_micro_batch))
    return {
        HANAYO: Schedule("wave", graph, case.num_micro_batch, orders),
        LISTED: pipeline_emulated.whale_schedule(case, EMULATED_WAVES),
    }


def measure(case: Case, plans: dict[str, wh.Plan]) -> Times:
    """Runs on every rank."""
    wake_up_on_time()
    sides = [pipeline_emulated.whale_side(case, name, plan) for name, plan in plans.items()]
    say(
        f"{case.name}, {EMULATED_WAVES} waves, forward {1e3 * case.forward_s:.0f} ms: "
        f"{', '.join(plans)}"
    )
    return alternate(sides, 5, 1, case.limit_s, warm_up=1)


def emulated_steps(case: Case) -> dict[str, float]:
    """Measured, in units of a device's forward."""
    plans = {
        name: pipeline_emulated.whale_plan(case, schedule)
        for name, schedule in emulated_schedules(case).items()
    }
    times: Times = run_ranks(measure, case.num_devices, case, plans, share_cores=True)
    return {name: times.median(name) / case.forward_s for name in (HANAYO, LISTED)}


def main() -> None:
    rows = [
        simulated_row(model, num_devices, link)
        for model in MODELS
        for num_devices in DEVICES
        for link in LINKS
    ]
    print(f"simulated: Chimera's step over ours, claimed {CLAIMED}\n{HEADER}")
    chimeras = {row: row.chimera_steps() for row in rows}
    simulated = {
        row: compared(chimeras[row], {HANAYO: row.paper_step, LISTED: row.listed_step})
        for row in rows
    }
    for row, ratios in simulated.items():
        print(row.text(ratios), flush=True)
    steps = {case.num_devices: emulated_steps(case) for case in CASES}
    near = [row for row in rows if row.link == "NVLink" and row.num_devices in steps]
    emulated = {row: compared(chimeras[row], steps[row.num_devices]) for row in near}
    print(f"emulated, {EMULATED_WAVES} waves\n{HEADER}")
    for row, ratios in emulated.items():
        print(replace(row, best_waves=EMULATED_WAVES).text(ratios), flush=True)
    claims = []
    for num_devices in steps:
        here = {
            row.model.name: ratios
            for row, ratios in emulated.items()
            if row.num_devices == num_devices
        }
        least = min(
            ratios["activations"][HANAYO]
            for ratios in here.values()
            if ratios["activations"] is not None
        )
        details = {"claimed": CLAIMED, "emulated": here, "steps in forwards": steps[num_devices]}
        details["simulated"] = {
            f"{r.model.name}, {r.link}": ratios
            for r, ratios in simulated.items()
            if r.num_devices == num_devices
        }
        claims.append(
            Claim(
                f"chimera (simulated) / hanayo (emulated), {num_devices} devices",
                least,
                1.0,
                at_most=False,
                details=details,
            )
        )
    report("hanayo_claim", claims)


if __name__ == "__main__":
    main()
