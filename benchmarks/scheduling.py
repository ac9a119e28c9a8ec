"""How long list scheduling takes: one JSON line.

With messages and the whole proof: P = 8, m = 16, W = 2 under 1 s; P = 64, m = 256, W = 2 under 30
s, both with latency, so that the search does not end at the lower bound at once. It is one thread;
judged by its CPU time, which other programs on the machine do not lengthen as they do the time on
the clock.
"""

from __future__ import annotations

import json
import sys
import time

from whale.scheduling import StageGraph, build, even_costs, simulate
from whale.scheduling.placement import wave

CASES = ((8, 16, 2, 1.0), (64, 256, 2, 30.0))
"""devices, micro-batches, waves, limit in seconds"""
MESSAGE = 0.1


def waved(num_devices: int, num_waves: int) -> StageGraph:
    return StageGraph.chain(2 * num_devices * num_waves, wave(num_devices, num_waves))


def measure(num_devices: int, num_micro_batch: int, num_waves: int) -> dict[str, float]:
    graph = waved(num_devices, num_waves)
    costs = even_costs(graph, message_s=MESSAGE, memory_cap=num_devices)
    start = time.perf_counter()
    start_cpu = time.process_time()
    schedule = build("auto", graph, num_micro_batch, costs)
    seconds = time.perf_counter() - start
    cpu = time.process_time() - start_cpu
    timeline = simulate(schedule, costs)
    return {
        "seconds": round(seconds, 2),
        "cpu seconds": round(cpu, 2),
        "actions": sum(map(len, schedule.orders)),
        "bubble %": round(100 * timeline.bubble, 2),
        "over the lower bound %": round(100 * (timeline.step_s / timeline.lower_bound_s - 1), 2),
    }


def main() -> None:
    times = {
        f"P={devices} m={count} W={waves}": measure(devices, count, waves)
        for devices, count, waves, _ in CASES
    }
    worst = max(
        times[f"P={devices} m={count} W={waves}"]["cpu seconds"] / limit
        for devices, count, waves, limit in CASES
    )
    print(
        json.dumps(
            {
                "name": "scheduling",
                "ratio": round(worst, 3),
                "target": 1.0,
                "ok": worst <= 1.0,
                "details": times,
            }
        )
    )
    sys.exit(0 if worst <= 1.0 else 1)


if __name__ == "__main__":
    main()
