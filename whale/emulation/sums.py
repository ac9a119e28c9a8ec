"""Gradient sums take the time of a ring over the slowest link of their group.

A ring of k devices that sums n bytes sends 2 (k - 1) / k n bytes over each of its links, in 2 (k - 1) steps:

    T = 2 (k - 1) (n / k / rate + latency).                                                    (1)

The gradients of a stage go out in b buckets while its last backward, from t - d to t, still runs. Bucket i is ready at
t - d + d i / b and takes T / b, so that the last one is there at

    max(t - d + d / b + T,  t + T / b).                                                        (2)

A group sums one thing after the other, and begins when the last of its members is ready: the latest end that any member comes to by
itself is the end for all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from whale.cluster.cluster import Cluster, Link
from whale.emulation.load import Load
from whale.emulation.pace import sleep_until
from whale.planning.plan import Plan
from whale.runtime.gradients import MANY_BUCKETS, SMALL_BUCKET_BYTES
from whale.runtime.ranks import Ranks


def ring_s(num_bytes: float, links: Sequence[Link], num_devices: int) -> float:
    """Line (1) over the slowest of these links."""
    if num_devices < 2:
        return 0.0
    rate, latency = min(link.bytes_per_s for link in links), max(link.latency_s for link in links)
    return 2 * (num_devices - 1) * (num_bytes / num_devices / rate + latency)


@dataclass(frozen=True)
class Sum:
    """Gradients of the parameters that the same stages hold, summed over all their ranks."""

    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    seconds: float
    num_buckets: int

    def end(self, closed: float, last_backward_s: float, free: float) -> float:
        """Line (2), where the last backward of these stages on a rank ends at `closed` and its group is free at `free`."""
        start = max(closed - last_backward_s + last_backward_s / self.num_buckets, free)
        return max(start + self.seconds, closed + self.seconds / self.num_buckets)


def sums_of(plan: Plan, load: Load, cluster: Cluster, bucket_bytes: int, factor: float) -> list[Sum]:
    """All sums of a step, their times stretched."""
    found = []
    for state in load.states:
        ranks = tuple(sorted({rank for stage in state.stages for rank in plan.ranks_of_stage(stage)}))
        if len(ranks) > 1 and state.trained_bytes:
            links = [cluster.link(a, b) for a, b in zip(ranks, (*ranks[1:], ranks[0]))]
            size = min(bucket_bytes, max(state.trained_bytes // MANY_BUCKETS, SMALL_BUCKET_BYTES))
            seconds = factor * ring_s(state.trained_bytes, links, len(ranks))
            found.append(Sum(state.stages, ranks, seconds, math.ceil(state.trained_bytes / size)))
    return found


class SumClock:
    """When the gradient sums of one rank would be over."""

    def __init__(self, sums: Sequence[Sum], ranks: Ranks, own_stages: Sequence[int]) -> None:
        self._own = {each: set(each.stages) & set(own_stages) for each in sums if ranks.rank in each.ranks}
        self._ranks = ranks
        self._open: dict[Sum, set[int]] = {}
        self._free: dict[tuple[int, ...], float] = {}
        self.last_backward_s: Mapping[int, float] = {}
        """of each stage of this rank; set with its program"""

    def begin(self) -> None:
        self._open = {each: set(stages) for each, stages in self._own.items()}
        self._free = {}

    def close_stage(self, stage: int, now: float) -> None:
        """All gradients of the stage are final."""
        for each, stages in self._open.items():
            if stage in stages:
                stages.discard(stage)
                if not stages:
                    free = self._free.get(each.ranks, 0.0)
                    self._free[each.ranks] = each.end(now, self.last_backward_s.get(stage, 0.0), free)

    def finish(self) -> None:
        """Returns when all sums would be over; the members of each group agree on the latest end."""
        for ranks in sorted(self._free):
            end = torch.tensor([self._free[ranks]], dtype=torch.float64)
            dist.all_reduce(end, op=dist.ReduceOp.MAX, group=self._ranks.group(ranks))
            sleep_until(float(end))
