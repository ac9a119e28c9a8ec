"""How long list scheduling takes, and Hanayo's claim over Chimera: one JSON line.

Scheduling, with messages and the whole proof: P = 8, m = 16, W = 2 under 1 s; P = 64, m = 256, W = 2 under 30 s, both with latency, so that
the search does not end at the lower bound at once. It is one thread; judged by its CPU time, which other programs on the machine do not
lengthen as they do the time on the clock.

The claim (up to 30.4 % over Chimera) at equal activation memory, simulated, like devices, B = P, Tb = 2 Tf: for each number of devices and
message time in parts of Tf, Chimera's step over that of the best of 1, 2 and 4 waves in the paper's order, and over that of the
list-scheduled wave with split backwards. Chimera keeps the weights twice, and the sum of its two replicas' gradients is not counted.
"""

from __future__ import annotations

import json
import sys
import time

from whale.scheduling import Schedule, StageGraph, build, even_costs, list_orders, simulate, wave_orders
from whale.scheduling.compare import Question, chimera
from whale.scheduling.placement import wave

CASES = ((8, 16, 2, 1.0), (64, 256, 2, 30.0))
"""devices, micro-batches, waves, limit in seconds"""
MESSAGE = 0.1
CLAIM_DEVICES, CLAIM_MESSAGES, CLAIM_WAVES, CLAIM_TRIES = (8, 16, 32), (0.0, 0.02, 0.05, 0.1), (1, 2, 4), 60


def waved(num_devices: int, num_waves: int) -> StageGraph:
    return StageGraph.chain(2 * num_devices * num_waves, wave(num_devices, num_waves))


def measure(num_devices: int, num_micro_batch: int, num_waves: int) -> dict[str, float]:
    graph = waved(num_devices, num_waves)
    costs = even_costs(graph, message_s=MESSAGE, memory_cap=num_devices)
    start, start_cpu = time.perf_counter(), time.process_time()
    schedule = build("auto", graph, num_micro_batch, costs)
    seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    timeline = simulate(schedule, costs)
    return {
        "seconds": round(seconds, 2),
        "cpu seconds": round(cpu, 2),
        "actions": sum(map(len, schedule.orders)),
        "bubble %": round(100 * timeline.bubble, 2),
        "over the lower bound %": round(100 * (timeline.step_s / timeline.lower_bound_s - 1), 2),
    }


def claim(num_devices: int, message_s: float) -> dict[str, float]:
    """Steps at B = P, all with at most P activations on a device."""
    theirs = chimera(Question(num_devices=num_devices, num_micro_batch=num_devices, message_s=message_s, tries=CLAIM_TRIES)).timeline.step_s
    paper, listed = {}, {}
    for num_waves in CLAIM_WAVES:
        graph = waved(num_devices, num_waves)
        costs = even_costs(graph, message_s=message_s, memory_cap=num_devices)
        paper[num_waves] = simulate(Schedule("wave", graph, num_devices, wave_orders(graph, num_devices)), costs).step_s
        orders = list_orders(graph, costs, num_devices, split=True, tries=CLAIM_TRIES)
        listed[num_waves] = simulate(Schedule("list", graph, num_devices, orders), costs).step_s
    best = min(paper, key=lambda num_waves: paper[num_waves])
    return {
        "waves": best,
        "chimera / hanayo": round(theirs / paper[best], 3),
        "chimera / list-scheduled wave": round(theirs / min(listed.values()), 3),
    }


def main() -> None:
    times = {f"P={devices} m={count} W={waves}": measure(devices, count, waves) for devices, count, waves, _ in CASES}
    worst = max(times[f"P={devices} m={count} W={waves}"]["cpu seconds"] / limit for devices, count, waves, limit in CASES)
    claims = {f"P={devices} Tc={message:g}": claim(devices, message) for devices in CLAIM_DEVICES for message in CLAIM_MESSAGES}
    details = {"scheduling": times, "claim": claims}
    print(json.dumps({"name": "scheduling", "ratio": round(worst, 3), "target": 1.0, "ok": worst <= 1.0, "details": details}))
    sys.exit(0 if worst <= 1.0 else 1)


if __name__ == "__main__":
    main()
