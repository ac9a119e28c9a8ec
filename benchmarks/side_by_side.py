"""Two ways to do the same work, timed in the same processes in turns, and the JSON line that says
how they compare.

Every rank is a process with one thread on one core of its own. Both sides live in the same
processes and take turns, a few steps at a time, so that whatever else this machine does hits both.
A ratio is the median over rounds of the ratio of the two times of one round. Rounds in which other
processes used the cores are left out, as long as enough are left.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

SAME_LOSS = 1e-4
"""largest relative difference between the losses of the two sides, over all steps, float32"""
ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_MMAP_THRESHOLD_": str(2**30)}
"""glibc keeps freed memory. By default it gives some back now and then and takes it again: up to 3
% of a step, by chance on either side
"""
QUIET = 0.05
"""a round counts when other processes used at most this part of every rank's core"""
PATIENCE_S = 2.0
"""how long a round waits for a quiet moment before it begins all the same"""
LOOK_S = 0.2
"""how long a look at the cores takes"""
FEWEST_ROUNDS = 8
"""so many rounds count in any case, the quietest ones"""
JIFFY_S = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Side:
    """One of the things compared."""

    name: str
    step: Callable[[int], Any]
    """one whole training step on mini-batch number i; gives something that `loss` understands"""
    loss: Callable[[Any], float] | None = None
    """the loss of the whole mini-batch, from what `step` gave; called outside the timing; None
    where the side has no loss of its own
    """
    seconds_per_step: Callable[[list[Any]], float] | None = None
    """the time of a block, from what its steps gave, where that is not the time on the clock"""


@dataclass(frozen=True)
class Claim:
    """A ratio that must reach its target, or stay below it."""

    name: str
    ratio: float
    target: float
    at_most: bool
    details: dict[str, Any]

    @property
    def margin(self) -> float:
        """How far the ratio is on the right side of the target, relative to it."""
        gain = self.ratio / self.target - 1.0
        return -gain if self.at_most else gain


@dataclass
class Times:
    """Seconds per step of every side, one figure for each round."""

    seconds: dict[str, list[float]]
    cpu_seconds: dict[str, list[float]]
    """the same of CPU time on rank 0, threads of gloo included"""
    busy_elsewhere: list[float]
    """of each round: the part of the time in which the core of a rank, the worst one, ran other
    processes
    """

    def join(self, other: Times) -> Times:
        """Rounds of two runs of the same sides: a process keeps the luck of its memory layout, up
        to 2 % either way, for all its rounds.
        """
        return Times(
            {name: [*values, *other.seconds[name]] for name, values in self.seconds.items()},
            {
                name: [*values, *other.cpu_seconds[name]]
                for name, values in self.cpu_seconds.items()
            },
            [*self.busy_elsewhere, *other.busy_elsewhere],
        )

    @property
    def rounds(self) -> list[int]:
        """The ones that count."""
        by_quiet = sorted(range(len(self.busy_elsewhere)), key=self.busy_elsewhere.__getitem__)
        return [
            number
            for place, number in enumerate(by_quiet)
            if place < FEWEST_ROUNDS or self.busy_elsewhere[number] <= QUIET
        ]

    def ratio(self, above: str, below: str) -> float:
        """Median over rounds of time(above) / time(below)."""
        return statistics.median(
            self.seconds[above][number] / self.seconds[below][number] for number in self.rounds
        )

    def median(self, name: str) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds[name][number] for number in self.rounds)

    def cpu_ratio(self, above: str, below: str) -> float:
        """The same of CPU time on rank 0: less disturbed by other processes, and blind to
        waiting.
        """
        return statistics.median(
            self.cpu_seconds[above][number] / self.cpu_seconds[below][number]
            for number in self.rounds
        )

    def details(self) -> dict[str, Any]:
        """Medians in milliseconds, and how far the figures can be trusted."""
        found: dict[str, Any] = {}
        for name in self.seconds:
            found[f"{name} ms"] = round(self.median(name) * 1e3, 1)
            found[f"{name} cpu ms"] = round(
                statistics.median(self.cpu_seconds[name][number] for number in self.rounds) * 1e3, 1
            )
        worst = max(self.busy_elsewhere[number] for number in self.rounds)
        return {
            **found,
            "rounds": f"{len(self.rounds)} of {len(self.busy_elsewhere)}",
            "busy elsewhere": round(worst, 3),
        }


def run_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, share_cores: bool = False
) -> Any:
    """`function(*args)` on ranks that are pinned to a core each; gives what rank 0 returned.
    `share_cores`: ranks that mostly sleep.
    """
    context = multiprocessing.get_context("spawn")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < num_ranks and not share_cores:
        raise SystemExit(
            f"this benchmark needs {num_ranks} cores, one for each rank; this process may use "
            f"{len(cores)}"
        )
    os.environ.update(ALLOCATOR)  # read by a process when it starts
    with tempfile.TemporaryDirectory() as folder:
        answer, child = context.Pipe(duplex=False)
        processes = [
            context.Process(
                target=_rank,
                args=(
                    function,
                    rank,
                    num_ranks,
                    cores[rank % len(cores)],
                    folder,
                    child if rank == 0 else None,
                    args,
                ),
                daemon=True,
            )
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        child.close()
        result = _wait(answer, processes)
        for process in processes:
            process.join()
        return result


def _wait(answer: Any, processes: Sequence[Any]) -> Any:
    """Rank 0's answer; when a rank dies, all are ended."""
    while not answer.poll(0.2):
        dead = [rank for rank, process in enumerate(processes) if process.exitcode not in (None, 0)]
        if dead:
            for process in processes:
                process.kill()
            raise SystemExit(
                f"rank {dead[0]} failed with exit code {processes[dead[0]].exitcode}: see its "
                "error above"
            )
    return answer.recv()


def _rank(
    function: Callable[..., Any],
    rank: int,
    num_ranks: int,
    core: int,
    folder: str,
    answer: Any,
    args: tuple[Any, ...],
) -> None:
    os.sched_setaffinity(0, {core})  # before any thread of gloo exists: they inherit it
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    if num_ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=num_ranks
        )
    result = function(*args)
    if num_ranks > 1:
        dist.barrier()
        dist.destroy_process_group()
    if answer is not None:
        answer.send(result)


def alternate(
    sides: Sequence[Side],
    num_rounds: int,
    steps_per_block: int,
    limit_s: float,
    warm_up: int = 4,
    beside: int | None = None,
) -> Times:
    """Times the sides in turns until `num_rounds` quiet rounds are there or `limit_s` seconds are
    over. All sides must see the same losses.

    A block is timed from a barrier to a barrier: the time of the slowest rank. `beside`: a process
    on this rank's core that is part of the measurement, so that the core counts as quiet while it
    runs.
    """
    for step in range(warm_up):
        check_losses([_one(side, step) for side in sides], step)
    step = warm_up
    begin = time.perf_counter()
    times = Times({side.name: [] for side in sides}, {side.name: [] for side in sides}, [])
    while (
        _largest(time.perf_counter() - begin) < limit_s
        and sum(busy <= QUIET for busy in times.busy_elsewhere) < num_rounds
    ):
        number = len(times.busy_elsewhere)
        losses: list[list[float | None]] = []
        busy = 0.0
        wait_for_quiet(beside)
        for side in (
            sides if number % 2 == 0 else reversed(sides)
        ):  # no side always runs behind the same other one
            _barrier()
            usage = Usage(beside)
            got = [side.step(step + i) for i in range(steps_per_block)]
            _barrier()
            elapsed, cpu, elsewhere = usage.since()
            times.seconds[side.name].append(
                side.seconds_per_step(got) if side.seconds_per_step else elapsed / steps_per_block
            )
            times.cpu_seconds[side.name].append(cpu / steps_per_block)
            busy = max(busy, elsewhere)
            losses.append([side.loss(each) if side.loss else None for each in got])
        times.busy_elsewhere.append(_largest(busy))
        for i in range(steps_per_block):
            check_losses([each[i] for each in losses], step + i)
        step += steps_per_block
        if number % 5 == 4:
            so_far = ", ".join(
                f"{side.name} {statistics.median(times.seconds[side.name]) * 1e3:.1f} ms"
                for side in sides
            )
            quiet = sum(busy <= QUIET for busy in times.busy_elsewhere)
            say(f"{number + 1} rounds, {quiet} of {num_rounds} quiet: {so_far}")
    return times


def wait_for_quiet(beside: int | None = None) -> None:
    """Sleeps until no rank's core is busy, or for `PATIENCE_S` seconds."""
    end = time.perf_counter() + PATIENCE_S
    busy = 1.0
    while busy > QUIET:
        usage = Usage(beside)
        time.sleep(LOOK_S)
        busy = _largest(usage.since()[2])
        if _largest(float(time.perf_counter() > end)):
            return


def _one(side: Side, step: int) -> float | None:
    result = side.step(step)
    return side.loss(result) if side.loss else None


def check_losses(losses: Sequence[float | None], step: int) -> None:
    """Both sides must be doing the same training."""
    known = [loss for loss in losses if loss is not None]
    if known and max(known) - min(known) > SAME_LOSS * max(map(abs, known)):
        raise SystemExit(
            f"the sides do not train the same model: at step {step} their losses are {known}"
        )


def say(text: str) -> None:
    """Progress, from rank 0 only."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)


def claim_against_torch(name: str, times: Times, target: float) -> Claim:
    """How many times faster than torch, at least; beside it what the machine allows."""
    details = {"ceiling": round(times.ratio("torch", "ideal"), 4), **times.details()}
    return Claim(name, times.ratio("torch", "whale"), target, at_most=False, details=details)


def report(name: str, claims: Sequence[Claim]) -> None:
    """Prints every claim and then the JSON line; the exit code says whether all hold."""
    for claim in claims:
        sign = "at most" if claim.at_most else "at least"
        verdict = "ok" if claim.margin >= 0 else "MISSED"
        print(
            f"{claim.name}: {claim.ratio:.3f} (target: {sign} {claim.target:.2f}) {verdict}  "
            f"{claim.details}"
        )
    worst = min(claims, key=lambda claim: claim.margin)
    details = {
        claim.name: {
            "ratio": round(claim.ratio, 4),
            "target": claim.target,
            "at_most": claim.at_most,
            **claim.details,
        }
        for claim in claims
    }
    line = {
        "name": name,
        "ratio": round(worst.ratio, 4),
        "target": worst.target,
        "ok": worst.margin >= 0,
        "details": details,
    }
    print(json.dumps(line))
    sys.exit(0 if worst.margin >= 0 else 1)


def _largest(value: float) -> float:
    """Of all ranks, so that all decide alike."""
    largest = torch.tensor(value)
    if dist.is_initialized():
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


class Usage:
    """What this process and others did on its core since this was made. `beside`: a process that
    does not count as another one.
    """

    def __init__(self, beside: int | None = None) -> None:
        self.beside = beside
        self.start = self._now()

    def _now(self) -> tuple[float, float, float]:
        core = min(os.sched_getaffinity(0))
        with open("/proc/stat") as file:
            fields = next(line for line in file if line.startswith(f"cpu{core} ")).split()
        user, nice, system, _, _, interrupt, soft_interrupt, stolen = map(int, fields[1:9])
        busy = (user + nice + system + interrupt + soft_interrupt + stolen) * JIFFY_S
        return time.perf_counter(), time.process_time(), busy - self._beside_s()

    def _beside_s(self) -> float:
        if self.beside is None:
            return 0.0
        with open(f"/proc/{self.beside}/schedstat") as file:
            return int(file.read().split()[0]) * 1e-9  # time on a core

    def since(self) -> tuple[float, float, float]:
        """Seconds on the clock, seconds of CPU, and the part of the time in which the core ran no
        rank and yet was busy. A collective.
        """
        elapsed, cpu, busy = (now - then for now, then in zip(self._now(), self.start, strict=True))
        return elapsed, cpu, max(0.0, busy - _cpu_of_ranks_here(cpu)) / elapsed


def _cpu_of_ranks_here(cpu: float) -> float:
    """CPU seconds of all ranks that share this core."""
    if not dist.is_initialized():
        return cpu
    own = torch.tensor([float(min(os.sched_getaffinity(0))), cpu], dtype=torch.float64)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    return float(sum(each[1] for each in everyone if each[0] == own[0]))
