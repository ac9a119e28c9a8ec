"""One pass of list scheduling: time passes, and a device that is free takes the best of what it may
do now.

What decides:

    key       every job has a number; the lowest one that is ready goes first
    filler    weight gradients only fill gaps: they go when nothing else is ready. Of several, the
              longest one that ends before the next known arrival; one that would delay it by more
              than `delay` of its own length does not start
    wait      a ready job also waits for a better one that arrives within `wait` of its own length
    memory    a forward needs free memory for itself and for the later chunks of its micro-batch on
              this device
    admit     at most so many micro-batches are between the first forward and the last backward of a
              first stage

Memory never stops a pass on a chain. Let m be the micro-batch that is stopped furthest along, at
stage s on device d. Micro-batches beyond it are through their forward and need no more memory, so
they finish and free theirs. What is left on d was started by chunks before s, the last of them with
memory for all later chunks. Where branches of a graph make this untrue, a pass can get stuck;
`in_turn` then admits micro-batches to a device one after the other, each with memory for all that
it will ever hold there: the oldest one can always continue.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

from whale.scheduling.event_loop import Jobs
from whale.scheduling.problem import OrderProblem

NEVER = float("inf")
NEAR = 1e-10
"""sums of times that should be equal differ by rounding: what arrives within this part of the time
is there
"""


@dataclass(frozen=True)
class Policy:
    """How a pass decides; see above."""

    admit: int | None = None
    delay: float = 1.0
    wait: float = 0.0
    filler: bool = True
    in_turn: bool = False


def list_pass(
    problem: OrderProblem,
    keys: list[float],
    whole: bytearray,
    policy: Policy,
    limit_s: float = NEVER,
) -> tuple[Jobs, float] | None:
    """Orders and the time that they take; None when the pass got stuck, or is given up because it
    will take longer than `limit_s`.

    `whole` is changed where there is no memory for a split.
    """
    return _Pass(problem, keys, whole, policy).run(limit_s)


class _Pass:
    def __init__(
        self, problem: OrderProblem, keys: list[float], whole: bytearray, policy: Policy
    ) -> None:
        self.problem = problem
        self.keys = keys
        self.whole = whole
        self.policy = policy
        graph = problem.graph
        count = problem.num_micro_batch
        size = problem.size
        stages = range(graph.num_stages)
        self.device = graph.device_of_stage
        self.missing = [len(problem.producers[s]) for s in stages for _ in range(count)]
        self.missing += [
            len(problem.gradient_consumers[s]) + 1 for s in stages for _ in range(count)
        ]
        self.arrival = [0.0] * (2 * size)
        self.next_forward = [0] * graph.num_stages
        self.next_backward = [0] * graph.num_stages
        self.waiting_weights: list[list[int]] = [[] for _ in stages]
        self.live = [0.0] * graph.num_devices
        self.needed = [0.0] * graph.num_stages
        for chunks in problem.chunks:
            rest = 0.0
            for stage in reversed(chunks):
                rest += problem.saved[stage]
                self.needed[stage] = rest
        self.is_first = [not problem.producers[s] for s in stages]
        self.free = [0.0] * graph.num_devices
        self.jobs: Jobs = [[] for _ in range(graph.num_devices)]
        self.rest_s = [
            count * sum(problem.forward_s[s] + problem.whole_s[s] for s in chunks)
            for chunks in problem.chunks
        ]
        """for each device, least time of what it has not begun"""
        self.events: list[tuple[float, int]] = [
            (0.0, device) for device in range(graph.num_devices)
        ]
        self.admitted = [0] * graph.num_devices
        self.finished = [[0] * count for _ in range(graph.num_devices)] if policy.in_turn else []
        self.num_finished = [0] * graph.num_devices

    def run(self, limit_s: float) -> tuple[Jobs, float] | None:
        events = self.events
        free = self.free
        rest_s = self.rest_s
        while events:
            now, device = heappop(events)
            if now + rest_s[device] > limit_s:
                return None
            if free[device] <= now:
                self.decide(device, now * (1 + NEAR))
        total = 2 * self.problem.size + self.whole.count(0)
        if sum(map(len, self.jobs)) < total:
            return None
        return self.jobs, max(free)

    def decide(self, device: int, now: float) -> None:
        """Start a job on this free device, or wait."""
        problem = self.problem
        keys = self.keys
        policy = self.policy
        count = problem.num_micro_batch
        size = problem.size
        arrival = self.arrival
        missing = self.missing
        free_memory = problem.caps[device] - self.live[device]
        needed = self.needed
        is_limited = policy.admit is not None or policy.in_turn
        next_forward = self.next_forward
        next_backward = self.next_backward
        best = -1
        best_key = NEVER
        coming: list[tuple[float, float]] = []
        is_full = False
        for stage in problem.chunks[device]:
            micro_batch = next_backward[stage]
            if micro_batch < count:
                job = size + stage * count + micro_batch
                if not missing[job]:
                    key = keys[job]
                    if arrival[job] <= now:
                        if key < best_key:
                            best = job
                            best_key = key
                    else:
                        coming.append((arrival[job], key))
            micro_batch = next_forward[stage]
            if micro_batch < count:
                job = stage * count + micro_batch
                if not missing[job]:
                    if needed[stage] > free_memory or (
                        is_limited and not self.is_admitted(device, stage, micro_batch)
                    ):
                        is_full = is_full or arrival[job] <= now
                        continue
                    key = keys[job]
                    if arrival[job] <= now:
                        if key < best_key:
                            best = job
                            best_key = key
                    else:
                        coming.append((arrival[job], key))
        if policy.wait and best >= 0 and coming:
            patience = now + policy.wait * self.duration(best)
            if any(time <= patience and key < best_key for time, key in coming):
                best = -1
                if policy.filler:
                    self.fill(device, now, min(time for time, _ in coming), False)
                return
        if best >= 0 and policy.filler:
            self.start(device, best, now)
        elif policy.filler:
            self.fill(device, now, min((time for time, _ in coming), default=NEVER), is_full)
        else:
            self.by_key(device, now, best, best_key, coming)

    def is_admitted(self, device: int, stage: int, micro_batch: int) -> bool:
        policy = self.policy
        if (
            policy.admit is not None
            and self.is_first[stage]
            and micro_batch - self.next_backward[stage] >= policy.admit
        ):
            return False
        if not policy.in_turn or micro_batch < self.admitted[device]:
            return True
        in_flight = self.admitted[device] - self.num_finished[device] + 1
        share = self.needed[self.problem.chunks[device][0]]
        return (
            micro_batch == self.admitted[device] and in_flight * share <= self.problem.caps[device]
        )

    def fill(self, device: int, now: float, until: float, is_full: bool) -> None:
        """Start the weight gradient that fits best before `until`."""
        problem = self.problem
        gap = until - now
        best = -1
        longest = -1.0
        shortest = NEVER
        for stage in problem.chunks[device]:
            if self.waiting_weights[stage]:
                length = problem.weight_s[stage]
                if length <= gap * (1 + 1e-9):
                    if length > longest:
                        best = stage
                        longest = length
                elif longest < 0 and length < shortest:
                    best = stage
                    shortest = length
        if best < 0:
            return
        if (
            longest < 0
            and not is_full
            and shortest - gap > self.policy.delay * shortest * (1 + 1e-9)
        ):
            return
        self.start(
            device,
            2 * problem.size + best * problem.num_micro_batch + self.waiting_weights[best][0],
            now,
        )

    def by_key(
        self, device: int, now: float, best: int, best_key: float, coming: list[tuple[float, float]]
    ) -> None:
        """Weight gradients stand in line with everything else."""
        problem = self.problem
        for stage in problem.chunks[device]:
            if self.waiting_weights[stage]:
                job = (
                    2 * problem.size
                    + stage * problem.num_micro_batch
                    + self.waiting_weights[stage][0]
                )
                if self.keys[job] < best_key:
                    best = job
                    best_key = self.keys[job]
        if best < 0:
            return
        if self.policy.wait and coming:
            patience = now + self.policy.wait * self.duration(best)
            if any(time < patience and key < best_key for time, key in coming):
                return
        self.start(device, best, now)

    def duration(self, job: int) -> float:
        problem = self.problem
        lane, place = divmod(job, problem.size)
        stage = place // problem.num_micro_batch
        if lane == 1:
            return problem.whole_s[stage] if self.whole[place] else problem.input_s[stage]
        return problem.weight_s[stage] if lane else problem.forward_s[stage]

    def start(self, device: int, job: int, now: float) -> None:
        problem = self.problem
        size = problem.size
        count = problem.num_micro_batch
        lane, place = divmod(job, size)
        stage, micro_batch = divmod(place, count)
        if lane == 1 and not self.whole[place]:
            more = problem.weight_gradient[stage] - problem.saved[stage]
            if more > 0 and self.live[device] + more > problem.caps[device]:
                pending = [s for s in problem.chunks[device] if self.waiting_weights[s]]
                if pending:
                    freed = max(pending, key=lambda s: problem.weight_gradient[s])
                    self.start(
                        device, 2 * size + freed * count + self.waiting_weights[freed][0], now
                    )
                    return
                self.whole[place] = 1
        seconds = self.duration(job)
        end = now + seconds
        self.jobs[device].append(job)
        self.free[device] = end
        # a weight gradient counts without what the runtime adds: the backward might have been whole
        self.rest_s[device] -= (
            seconds if lane < 2 else problem.whole_s[stage] - problem.input_s[stage]
        )
        heappush(self.events, (end, device))
        if lane == 0:
            self.next_forward[stage] += 1
            self.live[device] += problem.saved[stage]
            if micro_batch == self.admitted[device]:
                self.admitted[device] += 1
            self.deliver(size + place, stage, end)
            for consumer, time in problem.consumers[stage]:
                self.deliver(consumer * count + micro_batch, consumer, end + time)
        elif lane == 1:
            self.next_backward[stage] += 1
            self.live[device] -= problem.saved[stage]
            if self.whole[place]:
                self.finish(device, micro_batch)
            else:
                self.live[device] += problem.weight_gradient[stage]
                self.waiting_weights[stage].append(micro_batch)
            for producer, time in problem.gradient_producers[stage]:
                self.deliver(size + producer * count + micro_batch, producer, end + time)
        else:
            self.waiting_weights[stage].pop(0)
            self.live[device] -= problem.weight_gradient[stage]
            self.finish(device, micro_batch)

    def finish(self, device: int, micro_batch: int) -> None:
        if self.finished:
            self.finished[device][micro_batch] += 1
            if self.finished[device][micro_batch] == len(self.problem.chunks[device]):
                self.num_finished[device] += 1

    def deliver(self, job: int, stage: int, time: float) -> None:
        """One of the things that this job needs will be there at this time."""
        if time > self.arrival[job]:
            self.arrival[job] = time
        self.missing[job] -= 1
        # a device that is busy until then looks for itself when it is free
        if not self.missing[job] and self.arrival[job] > self.free[self.device[stage]]:
            heappush(self.events, (self.arrival[job], self.device[stage]))
