"""Hanayo's claim, up to 30.4 % faster than Chimera, at equal memory: GPT- and BERT-like models on 8 to 32 devices.

As many micro-batches as devices. A device's memory holds what Hanayo needs there: its share of the weights once, and the activations of
P micro-batches. Chimera keeps two shares of the weights and has that much less for activations; where not even two micro-batches are
left it cannot run. Its order is list-scheduled for this memory, and the sum of its two replicas' gradients is not counted: both help it.

    hanayo      the order of the paper's figure, the best of 1, 2 and 4 waves
    list        the list-scheduled wave with split backwards, the best of 1 and 2 waves
    emulated    both on 8 emulated devices without message times (benchmarks/pipeline_emulated.py), Chimera as simulated

All assumptions are in this file. The models are stand-ins of the sizes that such papers use, not the paper's own tables.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `python benchmarks/hanayo_claim.py` finds its neighbours, too

from benchmarks import pipeline_emulated
from benchmarks.side_by_side import Claim, Times, alternate, report, run_ranks, say
from whale.emulation.pace import wake_up_on_time
from whale.scheduling import Schedule, StageGraph, add_messages, even_costs, list_orders, simulate, stages_without_input_part, wave_orders
from whale.scheduling.compare import Question, chimera
from whale.scheduling.placement import wave

CLAIMED = 1.304
DEVICE_FLOP_PER_S = 312e12 * 0.45
"""an A100 in bf16, at what large layers reach of its peak"""
LINKS = {"NVLink": (250e9, 5e-6), "network": (12e9, 20e-6)}
"""bytes per second, latency in seconds"""
STATE_BYTES = 16
"""of a parameter under mixed precision: weight, gradient, and master weight with two moments in float32"""
WAVES, LISTED_WAVES, TRIES = (1, 2, 4), (1, 2), 16


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
        """State of a layer over its activations of one micro-batch (34 bytes a number, and the scores of the heads)."""
        activation = self.length * (34 * self.width + 5 * self.num_heads * self.length)
        return 12 * self.width**2 * STATE_BYTES / activation


MODELS = (Model("GPT-like", 128, 1024, 16, 1024), Model("BERT-like", 64, 2560, 64, 512))
DEVICES = (8, 16, 32)


def wave_graph(num_devices: int, num_waves: int) -> StageGraph:
    return StageGraph.chain(2 * num_devices * num_waves, wave(num_devices, num_waves))


def wave_steps(num_devices: int, message: float) -> tuple[dict[int, float], dict[int, float]]:
    """Steps of the paper's order and of the list-scheduled one, by number of waves, in units of a device's forward."""
    paper, listed = {}, {}
    for num_waves in WAVES:
        graph = wave_graph(num_devices, num_waves)
        costs = even_costs(graph, message_s=message, memory_cap=num_devices, unsplit=stages_without_input_part(graph))
        paper[num_waves] = simulate(Schedule("wave", graph, num_devices, wave_orders(graph, num_devices)), costs).step_s
        if num_waves in LISTED_WAVES:
            orders = list_orders(graph, costs, num_devices, split=True, tries=TRIES)
            listed[num_waves] = simulate(Schedule("list", graph, num_devices, orders), costs).step_s
    return paper, listed


def row(model: Model, num_devices: int, link: str) -> dict[str, object]:
    """One line of the table; ratios above 1: Chimera is slower."""
    message = model.message_s(link) / model.forward_s(num_devices)
    room = num_devices - model.weights_in_micro_batches()
    paper, listed = wave_steps(num_devices, message)
    best = min(paper, key=paper.__getitem__)
    found: dict[str, object] = {
        "model": model.name,
        "devices": num_devices,
        "link": link,
        "message / forward": round(message, 3),
        "waves": best,
        "room of Chimera": round(room, 1),
    }
    for name, memory in (("equal activations", float(num_devices)), ("equal memory", room)):
        if memory < 2:
            found[name] = "Chimera does not fit"
            continue
        question = Question(num_devices=num_devices, num_micro_batch=num_devices, message_s=message, tries=TRIES, memory=memory)
        theirs = chimera(question).timeline.step_s
        found[name] = {"hanayo": round(theirs / paper[best], 3), "list": round(theirs / min(listed.values()), 3)}
    return found


# ---- emulated

CASE = pipeline_emulated.Case(8, 8, 60.0)
HANAYO, LISTED = "hanayo", "list-scheduled"


def emulated_schedules() -> dict[str, Schedule]:
    graph = wave_graph(CASE.num_devices, 2)
    orders = add_messages(graph, CASE.num_micro_batch, wave_orders(graph, CASE.num_micro_batch))
    return {
        HANAYO: Schedule("wave", graph, CASE.num_micro_batch, orders),
        LISTED: pipeline_emulated.whale_schedule(CASE, 2),
    }


def measure(schedules: dict[str, Schedule]) -> Times:
    """Runs on every rank."""
    wake_up_on_time()
    sides = [pipeline_emulated.whale_side(CASE, name, schedule) for name, schedule in schedules.items()]
    say(f"{CASE.name}, 2 waves: {', '.join(schedules)}")
    return alternate(sides, 10, 1, CASE.limit_s, warm_up=2)


def emulated() -> dict[str, float]:
    """Chimera's simulated step over measured steps."""
    times: Times = run_ranks(measure, CASE.num_devices, emulated_schedules(), share_cores=True)
    question = Question(num_devices=CASE.num_devices, num_micro_batch=CASE.num_micro_batch, tries=TRIES)
    theirs = chimera(question).timeline.step_s * pipeline_emulated.FORWARD_S
    return {name: round(theirs / times.median(name), 3) for name in (HANAYO, LISTED)}


def main() -> None:
    rows = [row(model, num_devices, link) for model in MODELS for num_devices in DEVICES for link in LINKS]
    for each in rows:
        print(each, flush=True)
    measured = emulated()
    known = [each[memory] for each in rows for memory in ("equal activations", "equal memory")]
    ratios = [ratio["hanayo"] for ratio in known if isinstance(ratio, dict)]
    details = {"claimed": CLAIMED, "hanayo, least and most": [min(ratios), max(ratios)], "emulated, 8 devices": measured, "table": rows}
    name = "chimera (simulated) / hanayo (emulated), 8 devices"
    report("hanayo_claim", [Claim(name, measured[HANAYO], 1.0, at_most=False, details=details)])


if __name__ == "__main__":
    main()
