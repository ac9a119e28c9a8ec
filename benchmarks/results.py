"""Runs benchmarks and writes their JSON lines to docs/results.jsonl, from which the page of results
is made. `make results` runs all of them, `python benchmarks/results.py dp_vs_ddp planning` some.

A line of an earlier run stays until its benchmark is run again: every line carries its own commit,
date and machine.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results.jsonl"
LONGEST_S = 3600


@dataclass(frozen=True)
class Benchmark:
    """What a script claims, for the page."""

    name: str
    how: str
    """`measured on CPU`, `emulated` or `predicted`"""
    claim: str
    against: str
    """what the figure is compared with"""
    at_most: bool = False
    """whether small figures are the good ones"""


MEASURED = "measured on CPU"
EMULATED = "emulated"
PREDICTED = "predicted"

BENCHMARKS = (
    Benchmark(
        "mixed_gpus",
        PREDICTED,
        "GPT-2 of 1.3 B parameters on 2 RTX 3090, an RTX 4090 and 4 V100: Whale's choice, times faster",
        "even pipelines of 7 stages, and even shards of weights and samples (FSDP's rule)",
    ),
    Benchmark(
        "dp_vs_ddp",
        MEASURED,
        "Data parallelism on 2 ranks, times faster",
        "DistributedDataParallel of torch, alternating in one run",
    ),
    Benchmark(
        "local_overhead",
        MEASURED,
        "`engine.step` on one rank, times as long",
        "a plain PyTorch loop of the same model",
        at_most=True,
    ),
    Benchmark(
        "pipeline_vs_torch",
        MEASURED,
        "A pipeline of 2 stages on 2 ranks, times faster",
        "torch.distributed.pipelining, 1F1B, the same cut",
    ),
    Benchmark(
        "split_vs_torch",
        MEASURED,
        "`wh.split(2)` of a GPT block, times faster",
        "torch.distributed.tensor.parallel on the same model",
    ),
    Benchmark(
        "pipeline_emulated",
        EMULATED,
        "Schedules of Whale, times faster",
        "every schedule class of torch.distributed.pipelining",
    ),
    Benchmark(
        "planning",
        MEASURED,
        "Planning time as a part of what is allowed",
        "the limit of each case, in seconds",
        at_most=True,
    ),
    Benchmark(
        "hardware_aware",
        EMULATED,
        "Plans that know the devices, as a part of the best speed that whole samples allow",
        "enumeration of all divisions",
    ),
    Benchmark(
        "unlike_replicas",
        EMULATED,
        "Model replicas that are not alike: emulated against predicted step",
        "the simulation of the same plan",
        at_most=True,
    ),
    Benchmark(
        "reproduce_whale",
        PREDICTED,
        "Order of the systems in the figures of the Whale paper",
        "the published figures",
    ),
    Benchmark(
        "prediction",
        MEASURED,
        "Predicted against measured step time and peak memory of 2 CPU ranks",
        "the clock, and torch's memory profiler",
        at_most=True,
    ),
    Benchmark(
        "checkpoint",
        MEASURED,
        "Steps beside a save, times as long",
        "the same steps without one",
        at_most=True,
    ),
)


def main(names: list[str]) -> int:
    """The exit code: 0 where every benchmark ran and reached its targets."""
    known = {benchmark.name: benchmark for benchmark in BENCHMARKS}
    unknown = sorted(set(names) - known.keys())
    if unknown:
        raise SystemExit(f"no benchmark is called {unknown[0]!r}. There are: {', '.join(known)}")
    is_ok = True
    for benchmark in BENCHMARKS:
        if names and benchmark.name not in names:
            continue
        line = run(benchmark)
        is_ok = is_ok and line is not None and line["ok"]
        if line is not None:
            write(record(benchmark, line))
    return 0 if is_ok else 1


def run(benchmark: Benchmark) -> dict[str, Any] | None:
    """The JSON line of one benchmark; None where it printed none."""
    print(f"results: {benchmark.name} ...", flush=True)
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / f"{benchmark.name}.py")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"name"')]
    if not lines:
        print(f"results: {benchmark.name} printed no JSON line (exit code {done.returncode})")
        return None
    print(f"results: {lines[-1]}", flush=True)
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def record(benchmark: Benchmark, line: dict[str, Any]) -> dict[str, Any]:
    """What the page needs: the claims one by one, and where, when and at which commit."""
    claims = {}
    for name, details in (line.get("details") or {}).items():
        if isinstance(details, dict) and "ratio" in details and "target" in details:
            claims[name] = _claim(benchmark, details)
    if not claims:
        claims = {benchmark.name: _claim(benchmark, line)}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return {
        "name": benchmark.name,
        "how": benchmark.how,
        "claim": benchmark.claim,
        "against": benchmark.against,
        "command": f"python benchmarks/{benchmark.name}.py",
        "commit": commit.stdout.strip(),
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores of {_processor()}, torch {torch.__version__}",
        "claims": claims,
    }


def _claim(benchmark: Benchmark, figures: dict[str, Any]) -> dict[str, Any]:
    ratio = figures["ratio"]
    target = figures["target"]
    at_most = figures.get("at_most", benchmark.at_most)
    reached = ratio <= target if at_most else ratio >= target
    return {
        "ratio": ratio,
        "target": target,
        "at_most": at_most,
        "ok": figures.get("ok", reached),
    }


def _processor() -> str:
    description = Path("/proc/cpuinfo")  # Linux; platform knows no model names there
    if description.exists():
        for line in description.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def write(new: dict[str, Any]) -> None:
    """Puts one record into the place of the last one of its name, or at the end."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    records = {json.loads(line)["name"]: json.loads(line) for line in lines}
    records[new["name"]] = new
    RESULTS.write_text("".join(json.dumps(records[name]) + "\n" for name in sorted(records)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
