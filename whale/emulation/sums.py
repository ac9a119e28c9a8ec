"""Gradient sums of an emulated job: the model of `simulation/communication.py`, on a clock.

The members of a group agree on the latest end that any of them comes to by itself. A rank whose
ring leaves its host takes the card of that host, which all processes share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from whale.cluster.cluster import Cluster
from whale.distributed.ranks import Ranks
from whale.emulation.links import NetworkCards
from whale.emulation.pace import sleep_until
from whale.simulation.communication import AllReduce


class AllReduceClock:
    """When the gradient sums of one rank would be over."""

    def __init__(
        self,
        sums: Sequence[AllReduce],
        ranks: Ranks,
        own_stages: Sequence[int],
        cluster: Cluster,
        cards: NetworkCards | None,
    ) -> None:
        """All ranks make it together, from the same sums."""
        for members in sorted({each.ranks for each in sums}):
            ranks.group(
                members
            )  # on a grid the parts of a weight have groups that nothing else asks for
        self._own = {
            each: set(each.stages) & set(own_stages) for each in sums if ranks.rank in each.ranks
        }
        self._ranks = ranks
        self._cards = cards
        self._host = cluster.devices[ranks.rank].host
        self._host_number = cluster.hosts.index(self._host)
        self._leaves = {each: _leaves_host(each, ranks.rank, cluster) for each in self._own}
        self._open: dict[AllReduce, set[int]] = {}
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
                    self._free[each.ranks] = self._end(
                        each, now, self.last_backward_s.get(stage, 0.0)
                    )

    def _end(self, each: AllReduce, closed: float, last_backward_s: float) -> float:
        """As far as this rank knows."""
        free = self._free.get(each.ranks, 0.0)
        end = each.end(closed, last_backward_s, free)
        if self._cards is not None and self._leaves[each]:
            seconds = dict(each.leaving)[self._host]
            end = max(
                end,
                self._cards.book(
                    self._host_number, seconds, max(each.first_ready(closed, last_backward_s), free)
                ),
            )
        return end

    def finish(self) -> None:
        """Returns when all sums would be over; the members of each group agree on the
        latest end.
        """
        for ranks in sorted(self._free):
            end = torch.tensor([self._free[ranks]], dtype=torch.float64)
            dist.all_reduce(end, op=dist.ReduceOp.MAX, group=self._ranks.group(ranks))
            sleep_until(float(end))


def _leaves_host(each: AllReduce, rank: int, cluster: Cluster) -> bool:
    """Whether the next device of the ring is on another host."""
    after = each.ranks[(each.ranks.index(rank) + 1) % len(each.ranks)]
    return cluster.devices[rank].host != cluster.devices[after].host
