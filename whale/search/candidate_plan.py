"""A candidate whose model replicas are not alike, or that leaves devices out, as a plan
(`planning/replicas.py`).
"""

from __future__ import annotations

from whale.annotation import Strategy
from whale.planning.replica_drafts import GroupDrafts
from whale.planning.replica_specs import ReplicaSpec, StageSpec
from whale.planning.replicas import plan_of_replicas
from whale.planning.stages import Assignment
from whale.plans.plan import Plan
from whale.scheduling.placement import loop, zigzag
from whale.search.candidate import (
    ANY_GRID,
    CHOSEN,
    Candidate,
    DeviceGroup,
    Recompute,
    ReplicaChoice,
)


def plan_of_candidate(drafts: GroupDrafts, candidate: Candidate) -> tuple[Plan, Assignment]:
    """The plan of any candidate without offload; ranks that no replica names take no part.
    Raises ValueError where it cannot be.
    """
    specs = [_spec(replica, candidate.memory.recompute) for replica in candidate.replicas]
    return plan_of_replicas(drafts, specs, may_leave_out=True)


def _spec(replica: ReplicaChoice, recompute: Recompute) -> ReplicaSpec:
    """One replica as planning takes it, when they are given one by one."""
    place = loop if replica.schedule == "interleaved" else zigzag
    stages = []
    for stage, group in enumerate(place(len(replica.groups), replica.num_chunks)):
        # the first stage starts at the first operation, whatever that is
        start = replica.starts[stage] if replica.starts is not None and stage else None
        stages.append(_stage(replica.groups[group], start))
    return ReplicaSpec(
        stages=tuple(stages),
        num_samples=replica.num_samples,
        num_micro_batch=replica.num_micro_batch,
        schedule=replica.schedule,
        num_waves=replica.num_chunks // 2 if replica.num_chunks > 1 else None,
        recompute=recompute,
        why=CHOSEN,
    )


def _stage(group: DeviceGroup, start: int | None = None) -> StageSpec:
    """One stage as planning takes it; raises ValueError where only some of it is split."""
    if group.grid is None:
        return StageSpec(group.ranks, start)
    if group.split:
        raise ValueError(
            "a stage of which only some operations are split needs model replicas that are alike, "
            "on all devices"
        )
    grid = None if group.grid == ANY_GRID else group.grid
    return StageSpec(group.ranks, start, Strategy("split", group.num_devices, grid))
