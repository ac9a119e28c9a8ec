"""Orders made for given costs: many passes of list scheduling, then changes along the critical
path, within a budget that is counted.

1. Known orders (1F1B; wave, interleaved and zero-bubble where the placement is theirs) as far as
   memory allows: never worse than these.
2. Passes (`list_pass`) with different keys and policies (`policies`), and the best of these again
   with weight gradients taken to be shorter than they are. Such a pass puts weight gradients into
   gaps that are too short for them. That delays a device once; what it waits for then arrives in
   time, where before every round had a little gap that nothing fits into.
3. From the best orders, passes whose keys are the latest starts that would not make the step
   longer: what has slack goes back, and what had to wait behind it goes ahead.
4. Exchanges of neighbours on a device, along the critical path (`exchanges`).
5. An input gradient with its weight gradient right behind it becomes a whole backward again where
   that delays nothing.

The budget is a number of tries: one pass or one simulation is one try. The same input gives the
same orders, on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from whale.scheduling.action import Orders, StageGraph
from whale.scheduling.costs import Costs, lower_bound
from whale.scheduling.event_loop import Jobs, StuckError, run_in_order
from whale.scheduling.exchanges import improve, latest_starts
from whale.scheduling.list_pass import NEVER, Policy, list_pass
from whale.scheduling.memory import peak_of
from whale.scheduling.orders import (
    interleaved_orders,
    one_f_one_b,
    wave_orders,
    zero_bubble_orders,
)
from whale.scheduling.placement import num_loops_of, num_waves_of
from whale.scheduling.policies import Keys, policies
from whale.scheduling.problem import OrderProblem

BUDGET = 300_000
"""job visits of a search, one or two microseconds each: divided by the number of jobs, the tries
when none are given
"""
PASS_SHARE = 0.65
PASS_VISITS = 5
"""this part of the budget goes to passes; one takes about as long as so many simulations of the
same jobs
"""
LEAST_PASSES = 5
MOST_PASSES = 120
MOST_AGAIN = 6
MOST_EXCHANGES = 3000
NUM_STARTS = 4
MANY_EXCHANGES = 600
LIGHT = (0.75, 0.6, 0.5)
NUM_LIGHT = 3
LIGHT_SHARE = 12
"""fractions of their time that weight gradients are taken for, and how many of the best policies
are tried so: at most one in so many
"""
NEAR = 1e-9
ROUNDING = 1e-6
"""a pass takes what arrives a little later as if it were there, and errors
accumulate: far less than this part of its time
"""
AGAIN = (Policy(filler=False), Policy(filler=False, wait=0.5), Policy(delay=0.5))
"""policies of passes that start from known orders: their keys are good enough to place weight
gradients too
"""


@dataclass
class Found:
    """Orders that hold, and what they take."""

    jobs: Jobs
    whole: bytearray
    time: float
    peak: float
    """the highest share of its memory that a device uses"""
    name: str

    @property
    def rank(self) -> tuple[float, float]:
        return self.time * (1 - NEAR), self.peak


def list_orders(
    graph: StageGraph,
    costs: Costs,
    num_micro_batch: int,
    *,
    split: bool | None = None,
    tries: int | None = None,
) -> Orders:
    """Compute orders for these costs. `split`: whether backwards are split (None: where it helps).
    `tries`: size of the search.
    """
    problem = OrderProblem(graph, costs, num_micro_batch)
    found = OrderSearch(problem, split, tries).run()
    return problem.orders(found.jobs, found.whole)


class OrderSearch:
    def __init__(self, problem: OrderProblem, split: bool | None, tries: int | None) -> None:
        self.problem = problem
        self.split = split
        num_jobs = 3 * problem.size
        scale = BUDGET // num_jobs if tries is None else tries
        self.num_passes = min(max(LEAST_PASSES, int(PASS_SHARE * scale / PASS_VISITS)), MOST_PASSES)
        self.num_exchanges = min(MOST_EXCHANGES, int((1 - PASS_SHARE) * scale))
        self.num_light = min(NUM_LIGHT, self.num_passes // LIGHT_SHARE)
        self.num_starts = NUM_STARTS if self.num_exchanges >= MANY_EXCHANGES else 1
        """of exchanges"""
        self.bound = lower_bound(
            problem.graph, problem.costs, problem.num_micro_batch, split=split is not False
        )
        self.needs = problem.needs()
        self.found: list[Found] = []
        self.split_passes: list[tuple[float, int, Keys, Policy]] = []
        """passes with split backwards: (time, place among the policies, keys, policy)"""

    def run(self) -> Found:
        for name, orders in self.known_orders():
            self.add(name, *self.problem.jobs(orders))
        self.passes()
        self.light_passes()
        self.justify()
        if not self.found:
            raise ValueError(
                "no order was found that stays within the memory caps. Try: higher caps, or more "
                "micro-batches"
            )
        self.exchange()
        return self.join(min(self.found, key=lambda found: found.rank))

    def known_orders(self) -> Iterator[tuple[str, Orders]]:
        graph = self.problem.graph
        count = self.problem.num_micro_batch
        if self.split is not True:
            yield "1f1b", one_f_one_b(graph, count)
            if num_waves_of(graph.device_of_stage):
                yield "wave", wave_orders(graph, count)
            elif num_loops_of(graph.device_of_stage):
                yield "interleaved", interleaved_orders(graph, count)
        if self.split is not False and num_loops_of(graph.device_of_stage):
            yield "zero-bubble", zero_bubble_orders(graph, count, self.problem.costs.unsplit)

    def add(self, name: str, jobs: Jobs, whole: bytearray) -> None:
        """Keep these orders if they hold."""
        problem = self.problem
        changes = problem.memory_changes(whole)
        peaks = [peak_of(map(changes.__getitem__, row)) for row in jobs]
        if any(peak > cap for peak, cap in zip(peaks, problem.caps, strict=True)):
            return
        try:
            ends, _ = run_in_order(jobs, problem.durations(whole), self.needs)
        except StuckError:
            return
        self.found.append(Found(jobs, whole, max(ends), max(peaks), name))

    def is_at_bound(self) -> bool:
        return any(found.time <= self.bound * (1 + NEAR) for found in self.found)

    def passes(self) -> None:
        problem = self.problem
        kinds = [problem.as_split_as_possible] if self.split is not False else []
        if self.split is False or (self.split is None and problem.costs.action_s > 0):
            kinds.append(problem.all_whole)
        for index, (keys, policy) in enumerate(policies(problem, self.num_passes)):
            if self.is_at_bound():
                break
            whole = kinds[index % len(kinds)]
            before = len(self.found)
            self.try_pass(
                "list",
                keys.of(problem),
                whole,
                policy,
                limit_s=self.limit(whole is problem.as_split_as_possible),
            )
            if whole is problem.as_split_as_possible and len(self.found) > before:
                self.split_passes.append((self.found[-1].time, index, keys, policy))
        if not self.found:
            for whole in kinds:
                self.try_pass("list in turn", Keys().of(problem), whole, Policy(in_turn=True))

    def light_passes(self) -> None:
        """The best policies once more, with shorter weight gradients."""
        problem = self.problem
        costs = self.problem.costs
        best = sorted(self.split_passes, key=lambda each: each[:2])[: self.num_light]
        for part in LIGHT:
            light = replace(
                costs,
                weight_backward_s=tuple(part * seconds for seconds in costs.weight_backward_s),
            )
            shorter = OrderProblem(problem.graph, light, problem.num_micro_batch)
            for _, _, keys, policy in best:
                if self.is_at_bound():
                    return
                self.try_pass(
                    "list, light", keys.of(problem), problem.as_split_as_possible, policy, shorter
                )

    def limit(self, is_split: bool) -> float:
        """Time at which the next pass may be given up: one that takes longer is none of those from
        which the search continues.
        """
        going_on = [
            (
                sorted({found.time for found in self.found}),
                max(self.num_starts, MOST_AGAIN // len(AGAIN)),
            )
        ]
        if is_split and self.num_light:
            going_on.append((sorted(time for time, *_ in self.split_passes), self.num_light))
        longest = (
            times[number - 1] if len(times) >= number else NEVER for times, number in going_on
        )
        return max(longest) * (1 + ROUNDING)

    def try_pass(
        self,
        name: str,
        keys: list[float],
        whole: bytearray,
        policy: Policy,
        problem: OrderProblem | None = None,
        limit_s: float = NEVER,
    ) -> None:
        """`problem`: where the pass takes its times from, if they are not the real ones."""
        own = bytearray(whole)
        result = list_pass(problem or self.problem, keys, own, policy, limit_s)
        if result is not None:
            self.add(name, result[0], own)

    def justify(self) -> None:
        """Passes keyed by the latest starts of the best orders so far."""
        num_left = min(self.num_passes // 4, MOST_AGAIN)
        seen: set[float] = set()
        while num_left >= len(AGAIN) and not self.is_at_bound():
            fresh = [found for found in self.found if found.time not in seen]
            if not fresh:
                return
            best = min(fresh, key=lambda found: found.rank)
            seen.add(best.time)
            keys = latest_starts(best.jobs, self.problem.durations(best.whole), self.needs)
            num_left -= len(AGAIN)
            for policy in AGAIN:
                self.try_pass(f"{best.name}, again", keys, best.whole, policy)

    def exchange(self) -> None:
        """Exchanges from the best orders; where tries are many, also from others of the best, which
        may lie nearer to better ones.
        """
        starts: list[Found] = []
        for found in sorted(self.found, key=lambda found: found.rank):
            if all(found.time != other.time or found.name != other.name for other in starts):
                starts.append(found)
        starts = starts[: self.num_starts]
        for found in starts:
            if not self.is_at_bound():
                jobs = improve(
                    self.problem,
                    found.jobs,
                    found.whole,
                    self.needs,
                    self.num_exchanges // len(starts),
                    self.bound,
                )
                self.add(f"{found.name}, exchanged", jobs, found.whole)

    def join(self, best: Found) -> Found:
        """Whole backwards where the weight gradient follows at once and that delays nothing.

        A gradient that leaves later than it could makes a run less robust, so stages that send one
        are only joined where actions cost.
        """
        problem = self.problem
        size = self.problem.size
        durations = problem.durations(best.whole)
        ends, _ = run_in_order(best.jobs, durations, self.needs)
        latest = latest_starts(best.jobs, durations, self.needs)
        whole = bytearray(best.whole)
        jobs: Jobs = []
        for row in best.jobs:
            joined: list[int] = []
            for job in row:
                place = job - 2 * size
                if place >= 0 and joined and joined[-1] == job - size:
                    stage = place // problem.num_micro_batch
                    slack = latest[job - size] + durations[job - size] - ends[job - size]
                    has_slack = problem.costs.action_s > 0 and slack >= problem.weight_s[stage] * (
                        1 - NEAR
                    )
                    if has_slack or not problem.gradient_producers[stage]:
                        whole[place] = 1
                        continue
                joined.append(job)
            jobs.append(joined)
        before = len(self.found)
        self.add(f"{best.name}, joined", jobs, whole)
        is_better = len(self.found) > before and self.found[-1].time <= best.time * (1 + NEAR)
        return self.found[-1] if is_better else best
