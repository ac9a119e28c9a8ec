"""What the ranks of a job run on, as the API and the runtime see it.

`Platform` is real devices: a step takes the time that it takes, and every hook does nothing.
`emulation/emulation.py` overrides the hooks for devices and links that are not there. Which of the
two a job has is decided once, when it starts; nobody asks later.

The executor's loop is hot (some hundred actions in a few milliseconds), so what happens after an
action is no method of this class: `pace` gives an object, or None, once for each program.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from whale.capture.batch import BatchLayout
from whale.capture.prepare import CapturedModel
from whale.cluster.cluster import Cluster
from whale.config import Config
from whale.distributed.job_cluster import ClusterLike, cluster_of_ranks
from whale.distributed.ranks import Ranks
from whale.distributed.transport import Transport
from whale.plans.plan import Plan
from whale.scheduling import Action

Event = tuple[Action, float, float]
"""(action, start, end), in seconds of this process's clock"""


class PaceLike(Protocol):
    """How long compute actions take."""

    def finish(self, action: Action, start: float) -> None:
        """Returns when the action, which began at `start` and is computed, has taken its time."""


@dataclass(frozen=True)
class StandIn:
    """A small model that is trained in place of the user's, which is too large for this machine."""

    model: torch.nn.Module
    prepared: CapturedModel
    layout: BatchLayout
    plan: Plan
    config: Config
    weights: dict[str, Tensor]
    """this rank's parameters"""


class Platform:
    """Real devices."""

    updates_during_step: ClassVar[bool] = True
    """stages may be updated before the step is over"""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    @property
    def captures_everywhere(self) -> bool:
        """Whether every rank captures the model; otherwise rank 0 does, and only to plan."""
        return True

    # ---- before the first step

    def cluster(self, given: ClusterLike | None) -> Cluster:
        """The devices of the job in rank order. All ranks call it."""
        return cluster_of_ranks(given, self.ranks)

    def check_plan(self, plan: Plan, cluster: Cluster) -> None:
        """Refuses a plan whose shares and stages were made for other devices. Another number of
        them is for the caller to refuse.
        """
        here = [device.kind.name for device in cluster.devices]
        if len(here) != plan.num_devices:
            return
        different = [rank for rank, kind in enumerate(plan.device_kinds) if kind != here[rank]]
        if different:
            first = different[0]
            raise ValueError(
                f"this plan was made for another cluster: rank {first} is a "
                f"{plan.device_kinds[first]} in the plan and a {here[first]} here "
                f"({len(different)} of {len(here)} ranks differ). Make a plan for these devices, "
                "or give the plan's own cluster (cluster=..., `whale run --cluster`)"
            )

    def start(
        self, plan: Plan, prepared: CapturedModel | None, cluster: Cluster, config: Config
    ) -> StandIn | None:
        """The plan is made: gets ready to run it. Gives what is trained in place of the model, or
        None. All ranks call it; only rank 0 needs `prepared`.
        """
        return None

    def transport(self, pairs: Iterable[tuple[int, int]], share_memory: bool) -> Transport:
        """Carries messages between these (source, destination) ranks. All ranks call it."""
        return Transport(self.ranks, pairs, share_memory)

    def pace(
        self, actions: Sequence[Action], num_samples: Sequence[int], is_training: bool
    ) -> PaceLike | None:
        """How long the actions of a program take; None: as long as they do.

        `num_samples`: of this rank in each micro-batch.
        """
        return None

    @property
    def missing_model(self) -> str | None:
        """Why there is no model of the user's whose weights could be read or saved; None: it is
        there.
        """
        return None

    # ---- in every step

    def read_batch(self, batch: Any) -> Any:
        """What a step trains on when it is given this batch."""
        return batch

    def begin_step(self) -> None:
        """A training step begins."""

    def close_stage(self, stage: int) -> None:
        """Called when all gradients of the stage are final on this rank: all-reduces may begin."""

    def wait_for_all_reduces(self) -> None:
        """Called when all gradients are reduced here; returns when that is so on this platform's
        clock, too.
        """

    def end_step(
        self,
        events: list[Event],
        all_reduces: tuple[float, float],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        """The step is over. `all_reduces`: when this rank began to wait for gradients of other
        ranks, and when they were there.
        """

    def close(self) -> None:
        """The job is over."""
