"""Runs benchmarks and writes their JSON lines to docs/results.jsonl, from which the page of results
is made. `make results` runs all of them, `python benchmarks/results.py dp_vs_ddp planning` some.
Those that compare with measurements of real GPUs by others want `--measurements DIR`
(benchmarks/gpu_measurements.py says what is in it) and are left out without.

A line of an earlier run stays until its benchmark is run again: every line carries its own commit,
date and machine.
"""

from __future__ import annotations

import argparse
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
    """of the script, with its options behind it"""
    how: str
    """`measured on CPU`, `emulated` or `predicted`"""
    claim: str
    against: str
    """what the figure is compared with"""
    at_most: bool = False
    """whether small figures are the good ones"""
    needs_measurements: bool = False
    """of real GPUs, `--measurements DIR`"""

    @property
    def script(self) -> str:
        """`benchmarks/search.py`"""
        return f"benchmarks/{self.name.split()[0]}.py"

    @property
    def options(self) -> list[str]:
        return self.name.split()[1:]

    @property
    def command(self) -> str:
        """What a reader types to make its figures again."""
        measurements = " --measurements DIR" if self.needs_measurements else ""
        return " ".join(["python", self.script, *self.options]) + measurements


NOT_DETAILS = {"name", "ratio", "target", "at_most", "ok"}
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
    Benchmark(
        "search",
        MEASURED,
        "Time and memory of the search, and the step that it finds, as parts of what is allowed",
        "the limit of each case",
        at_most=True,
    ),
    Benchmark(
        "search --growth",
        MEASURED,
        "CPU seconds of the search for GPT 96 x 12288 on 64 to 8,192 GPUs of 4 kinds, as a part of 180",
        "the limit of 3 minutes, capture included",
        at_most=True,
    ),
    Benchmark(
        "search --by-hand",
        PREDICTED,
        "GPT-2 of 1.3 B parameters on 7 mixed GPUs: the plan that the search finds, times faster",
        "the best of 14 plans made by hand",
    ),
    Benchmark(
        "searched_seeds",
        PREDICTED,
        "Models of the seeds without annotations: the plans that the search finds, times faster",
        "the plans of the papers, made by hand",
    ),
    Benchmark(
        "found_plans",
        EMULATED,
        "Five plans that the search found: emulated against predicted step",
        "the simulation of the same plans",
        at_most=True,
    ),
    Benchmark(
        "largest_model",
        PREDICTED,
        "Parameters of the largest GPT on one RTX 3090, one V100-16GB and one RTX 2080 Ti, times more",
        "even shards (FSDP2's rule), by the same account of memory",
    ),
    Benchmark(
        "offload",
        PREDICTED,
        "Optimizer states or activations on the host, step as a part of what is allowed",
        "the same step on devices that hold everything, and the bound of their links",
        at_most=True,
    ),
    Benchmark(
        "giant_models",
        PREDICTED,
        "M6-MoE with 100 billion to 10 trillion parameters on V100-32GB: fits, and is planned in time",
        "the limit of each case",
    ),
    Benchmark(
        "busy_core",
        MEASURED,
        "Two ranks of which one shares its core: shares by what was measured, times faster",
        "even shares",
    ),
    Benchmark(
        "action_cost",
        MEASURED,
        "What the runtime itself takes for an action, in milliseconds",
        "schedule classes of torch with as many chunks",
        at_most=True,
    ),
    Benchmark(
        "pipeline_real",
        MEASURED,
        "GPT-2 in 16 micro-batches on 2 ranks, times faster",
        "every class of torch.distributed.pipelining that runs it",
    ),
    Benchmark(
        "grid_memory",
        MEASURED,
        "Peak memory of grids of `split` on 2 and 4 ranks: predicted over measured, the least",
        "torch's own account of live bytes",
    ),
    Benchmark(
        "scheduling",
        MEASURED,
        "List scheduling of up to 64 devices and 256 micro-batches as a part of what is allowed",
        "the limit of each case, in CPU seconds",
        at_most=True,
    ),
    Benchmark(
        "large_classifier",
        PREDICTED,
        "ResNet50 with 100,000 and a million classes: copied backbone and split classifier",
        "pure data parallelism, and figures 13 and 14 of the Whale paper",
    ),
    Benchmark(
        "real_gpus",
        PREDICTED,
        "Errors of the cost model as parts of what is allowed",
        "times and memory that others measured on seven kinds of real GPUs",
        at_most=True,
        needs_measurements=True,
    ),
    Benchmark(
        "vs_planners",
        PREDICTED,
        "Whale's plans for OPT-350 on 32 to 128 GPUs, alike and mixed, times faster",
        "the best plan of AMP, FlashFlex, Galvatron and Sailor, on the same times and links",
        needs_measurements=True,
    ),
    Benchmark(
        "zero_vs_torch",
        MEASURED,
        "ZeRO 1 and 3 on 2 ranks",
        "ZeroRedundancyOptimizer with DistributedDataParallel, and FSDP2 (`fully_shard`)",
    ),
    Benchmark(
        "trainers",
        MEASURED,
        "A step of Accelerate, transformers and Lightning on 1 and 2 ranks, times faster",
        "the same trainer as it comes: one process, or DistributedDataParallel",
    ),
    Benchmark(
        "lengths",
        MEASURED,
        "Batches of 20 lengths from one capture, times as long",
        "batches of one length with as many tokens",
        at_most=True,
    ),
    Benchmark(
        "hanayo_claim",
        PREDICTED,
        "Hanayo's waves, times faster at equal memory",
        "Chimera, list-scheduled for the memory that it has left",
    ),
    Benchmark(
        "tensor_grids",
        EMULATED,
        "1-D, 2-D and 3-D grids of `split`",
        "the formula of bytes, the plan's own account, and each other",
    ),
    Benchmark(
        "unlike_devices",
        EMULATED,
        "A pipeline over 4 V100 and 4 P100, list-scheduled waves, times faster",
        "1F1B and interleaved 1F1B on the same cut",
    ),
    Benchmark(
        "unlike_split",
        EMULATED,
        "Uneven shards over 4 V100 and 4 P100, as a part of the best division",
        "enumeration of all divisions into whole granules",
    ),
)


def main(arguments: list[str]) -> int:
    """The exit code: 0 where every benchmark ran and reached its targets."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", help="benchmarks to run; all without names")
    parser.add_argument("--measurements", type=Path, help="folder of measurements of real GPUs")
    options = parser.parse_args(arguments)
    known = {benchmark.name: benchmark for benchmark in BENCHMARKS}
    unknown = sorted(set(options.names) - known.keys())
    if unknown:
        raise SystemExit(f"no benchmark is called {unknown[0]!r}. There are: {', '.join(known)}")
    is_ok = True
    for benchmark in BENCHMARKS:
        if options.names and benchmark.name not in options.names:
            continue
        if benchmark.needs_measurements and options.measurements is None:
            print(f"results: {benchmark.name} is left out. Try: --measurements DIR", flush=True)
            continue
        line = run(benchmark, options.measurements)
        is_ok = is_ok and line is not None and line["ok"]
        if line is not None:
            write(record(benchmark, line))
    return 0 if is_ok else 1


def run(benchmark: Benchmark, measurements: Path | None = None) -> dict[str, Any] | None:
    """The JSON line of one benchmark; None where it printed none."""
    print(f"results: {benchmark.name} ...", flush=True)
    words = [sys.executable, str(ROOT / benchmark.script), *benchmark.options]
    if benchmark.needs_measurements:
        words += ["--measurements", str(measurements)]
    done = subprocess.run(
        words,
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
        "command": benchmark.command,
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
        "details": {
            name: value
            for name, value in figures.items()
            if name not in NOT_DETAILS and isinstance(value, int | float | str)
        },
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
