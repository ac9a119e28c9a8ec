"""Model replicas as they are asked for, one by one: `"replicas"` of the config, or a search.

    {"replicas": [{"stages": [[0]], "samples": 24},
                  {"stages": [[1], [2], [3, 4]], "num_micro_batch": 4}]}

Rank 0 runs the whole model on 24 samples of every mini-batch, ranks 1 to 4 are a pipeline of three
stages, the last on two devices, and do the others in 4 micro-batches. What is not said is chosen:
samples by speed, cuts by time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Node

from whale.annotation import Strategy
from whale.capture.graph import CapturedGraph, module_name
from whale.capture.kinds import ValueKind
from whale.cluster.cluster import Cluster
from whale.config import Config
from whale.names import listed, nearest
from whale.planning.stages import live_operations

SET_BY_USER = 'set by you ("replicas")'
"""why a model replica is as it is, where the config says so"""


@dataclass(frozen=True)
class StageSpec:
    """One stage of a model replica."""

    ranks: tuple[int, ...]
    """its devices; those of an earlier stage of the replica once more: a further chunk on them"""
    start: int | None = None
    """place of its first operation among the activations of the graph (`activations`); None: the
    planner cuts. Given for all stages of a replica but the first, or for none
    """
    split: Strategy | None = None
    """`split` over its devices; None: they share its samples"""

    @property
    def strategy(self) -> Strategy:
        return self.split or Strategy("replicate", len(self.ranks))


@dataclass(frozen=True)
class ReplicaSpec:
    """One model replica."""

    stages: tuple[StageSpec, ...]
    """in pipeline order"""
    num_samples: int | None = None
    """of the mini-batch; None: by speed"""
    num_micro_batch: int = 1
    schedule: str = "1f1b"
    num_waves: int | None = None
    recompute: bool | str | tuple[str, ...] = "auto"
    why: str = SET_BY_USER
    """who decided on its devices and stages"""

    @property
    def ranks(self) -> tuple[int, ...]:
        """All its devices, in the order in which stages first name them."""
        return tuple(dict.fromkeys(rank for stage in self.stages for rank in stage.ranks))

    @property
    def starts(self) -> tuple[int, ...] | None:
        """First operation of every stage; None where the planner cuts."""
        starts = [stage.start for stage in self.stages[1:] if stage.start is not None]
        if self.stages[1:] and not starts:
            return None
        return (0, *starts)

    @property
    def devices(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every VirtualDevice: stages on the same ranks share one."""
        return tuple(dict.fromkeys(stage.ranks for stage in self.stages))

    def local(self) -> ReplicaSpec:
        """The replica with its devices counted from 0: equal for alike replicas."""
        place = {rank: number for number, rank in enumerate(self.ranks)}
        stages = tuple(
            replace(stage, ranks=tuple(place[rank] for rank in stage.ranks))
            for stage in self.stages
        )
        return replace(self, stages=stages)


def alike(specs: Sequence[ReplicaSpec], cluster: Cluster) -> list[list[ReplicaSpec]]:
    """Replicas that can share a template, in groups. Where samples are given, their devices must be
    of the same kinds, too: samples inside a template are shared by speed.
    """
    groups: dict[Any, list[ReplicaSpec]] = {}
    for spec in specs:
        kinds = tuple(cluster.devices[rank].kind for rank in spec.ranks)
        key = (spec.local(), kinds if spec.num_samples is not None else None)
        groups.setdefault(key, []).append(spec)
    return list(groups.values())


def check_specs(
    specs: Sequence[ReplicaSpec], num_devices: int, batch_size: int, may_leave_out: bool
) -> None:
    """Refuses replicas that use a device twice, or none of them (unless devices may be left out),
    or that do not fit the mini-batch.
    """
    owner: dict[int, int] = {}
    for number, spec in enumerate(specs):
        for rank in spec.ranks:
            if not 0 <= rank < num_devices:
                raise ValueError(
                    f'"replicas": replica {number} has rank {rank}, but there are {num_devices} '
                    f"devices: ranks go from 0 to {num_devices - 1}"
                )
            if owner.setdefault(rank, number) != number:
                raise ValueError(
                    f'"replicas": rank {rank} is in replica {owner[rank]} and in replica {number}; '
                    "a device belongs to one model replica"
                )
        members = [rank for ranks in spec.devices for rank in ranks]
        if len(set(members)) < len(members):
            twice = next(rank for rank in members if members.count(rank) > 1)
            raise ValueError(
                f'"replicas": rank {twice} of replica {number} is in two stages of different '
                "devices; stages share all their devices or none"
            )
        given = [stage.start is not None for stage in spec.stages[1:]]
        if any(given) and not all(given):
            raise ValueError(
                f'"replicas": replica {number} says where some of its stages start; say it for all '
                "but the first, or for none"
            )
    missing = sorted(set(range(num_devices)) - owner.keys())
    if missing and not may_leave_out:
        raise ValueError(
            f'"replicas": no model replica has {listed([f"rank {rank}" for rank in missing], 8)}. '
            "Try: give these ranks a stage, or leave their devices out of the cluster"
        )
    samples = [spec.num_samples for spec in specs if spec.num_samples is not None]
    is_all = len(samples) == len(specs)
    if sum(samples) > batch_size or (is_all and sum(samples) != batch_size):
        raise ValueError(
            f'"replicas": their samples are {" + ".join(map(str, samples))} = {sum(samples)}, the '
            f"mini-batch has {batch_size}. Try: leave the samples of one replica out"
        )


def activations(captured: CapturedGraph, kinds: Mapping[Node, ValueKind]) -> list[Node]:
    """Operations on samples, in the order of the graph: what is cut into stages."""
    return [node for node in live_operations(captured) if kinds[node] is ValueKind.ACTIVATION]


def specs_of_config(config: Config, operations: Sequence[Node]) -> tuple[ReplicaSpec, ...]:
    """The replicas that the user wrote. `Config` has checked their form. `operations`: the
    activations of the graph.
    """
    assert config.replicas is not None
    found = []
    for number, given in enumerate(config.replicas):
        stages = [_stage(operations, number, stage) for stage in given["stages"]]
        recompute = given.get("recompute", config.recompute)
        found.append(
            ReplicaSpec(
                stages=tuple(stages),
                num_samples=given.get("samples"),
                num_micro_batch=given.get("num_micro_batch", config.num_micro_batch),
                schedule=given.get("schedule", config.schedule),
                num_waves=given.get("num_waves", config.num_waves),
                recompute=tuple(recompute) if isinstance(recompute, list) else recompute,
            )
        )
    return tuple(found)


def _stage(
    operations: Sequence[Node], replica: int, given: Sequence[int] | Mapping[str, Any]
) -> StageSpec:
    if not isinstance(given, Mapping):
        return StageSpec(tuple(given))
    ranks = tuple(given["ranks"])
    grid = given.get("grid")
    split = None
    if len(ranks) > 1 and (given.get("split") or grid is not None):
        split = Strategy("split", len(ranks), tuple(grid) if grid is not None else None)
    start = given.get("start")
    if isinstance(start, str):
        start = _first_operation(operations, replica, start)
    return StageSpec(ranks, start, split)


def _first_operation(operations: Sequence[Node], replica: int, module: str) -> int:
    """Place of the first operation of a module."""
    names: dict[str, int] = {}
    for place, node in enumerate(operations):
        for name in _modules(node):
            names.setdefault(name, place)
    if module not in names:
        raise ValueError(
            f'"replicas": replica {replica} has a stage that starts with {module!r}, which is no '
            f"module of the model.{nearest(module, names)}"
        )
    return names[module]


def _modules(node: Node) -> list[str]:
    """Names of the module that a node was called in and of those around it."""
    parts = module_name(node).split(".")
    return [".".join(parts[:number]) for number in range(1, len(parts) + 1)]
