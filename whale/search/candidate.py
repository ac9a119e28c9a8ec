"""What the search chooses, as typed data: one `Candidate` is one way to train the model on the
cluster. Everything in it is decided; a plan follows from it without further choice but the shares
of samples (`planning/balance.py`) and the order of actions (`scheduling`).

    Candidate          model replicas, alike or not; devices that none of them names take no part
      ReplicaChoice    groups of devices in pipeline order, cuts, micro-batches, schedule
        DeviceGroup    the devices of one stage: they share its samples, or split its operations
      MemoryChoice     what is not simply held: recomputed, sharded (ZeRO), offloaded
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from whale.annotation.scopes import GridShape
from whale.names import count
from whale.planning.offload import ON_DEVICES, Offload
from whale.planning.offload_auto import Try
from whale.units import ranges

ANY_GRID: GridShape = (0, 0, 0)
"""the shape that the planner finds best (`planning/grids.py`)"""
CHOSEN = "chosen by the search"
"""why something is as it is, in the decisions of a plan"""
Recompute = bool | str | tuple[str, ...]
"""as the setting `recompute`: "auto", True, False, or names of modules"""


@dataclass(frozen=True)
class DeviceGroup:
    """The devices that run one stage of one model replica (or its chunks) together."""

    ranks: tuple[int, ...]
    grid: GridShape | None = None
    """None: they share the samples of a micro-batch by their speed (`replicate`); else operations
    are split over a grid of this shape
    """
    split: tuple[str, ...] = ()
    """parameters whose operations are split over the grid, while everything else shares samples on
    the same devices; empty: all operations are split
    """

    @property
    def num_devices(self) -> int:
        return len(self.ranks)

    def __str__(self) -> str:
        if self.grid is None:
            return ranges(self.ranks)
        shape = "" if self.grid == ANY_GRID else f" {'x'.join(map(str, self.grid))}"
        return f"{ranges(self.ranks)} split{shape}"


@dataclass(frozen=True)
class MemoryChoice:
    """What lies not simply on its device from start to end."""

    recompute: Recompute = "auto"
    """"auto": as little as memory asks for"""
    zero: int = 0
    """what ranks that hold the same parameter share instead of each holding all of it: 0 nothing,
    1 optimizer state, 2 gradients too, 3 weights too
    """
    offload: Offload = ON_DEVICES
    """what has its home in the memory of the host, or on its disk"""

    @property
    def text(self) -> str:
        """`ZeRO 1 with optimizer on the host`; empty where everything is held on its device."""
        return Try(self.zero, self.offload).text


@dataclass(frozen=True)
class ReplicaChoice:
    """One copy of the model."""

    groups: tuple[DeviceGroup, ...]
    """in pipeline order"""
    num_micro_batch: int = 1
    schedule: str = "1f1b"
    num_chunks: int = 1
    """chunks of the model on each group; a wave has two"""
    starts: tuple[int, ...] | None = None
    """first operation of every chunk, as places among the activations of the captured graph in
    their order; the first is 0. None: cut by the dynamic programme of `planning/cuts.py`
    """
    num_samples: int | None = None
    """of the mini-batch. None: by speed, under memory (`planning/balance.py`)"""

    @property
    def num_stages(self) -> int:
        return len(self.groups) * self.num_chunks

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(group.num_devices for group in self.groups)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for group in self.groups for rank in group.ranks)

    @property
    def is_whole(self) -> bool:
        """Whether every device runs the whole model, on samples of its own."""
        return self.num_stages == 1 and self.groups[0].grid is None

    def is_like(self, other: ReplicaChoice) -> bool:
        """Whether both run the same stages in the same order, on groups of the same shape."""
        return (
            self.widths == other.widths
            and [(each.grid, each.split) for each in self.groups]
            == [(each.grid, each.split) for each in other.groups]
            and replace(self, groups=(), num_samples=None)
            == replace(other, groups=(), num_samples=None)
        )


@dataclass(frozen=True)
class Candidate:
    """One way to train the model on the cluster."""

    replicas: tuple[ReplicaChoice, ...]
    memory: MemoryChoice = field(default_factory=MemoryChoice)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that take part, in rank order."""
        return tuple(sorted(rank for replica in self.replicas for rank in replica.ranks))

    @property
    def are_alike(self) -> bool:
        """Whether all replicas run the same stages: then one template of a plan serves them all."""
        return all(self.replicas[0].is_like(replica) for replica in self.replicas)

    def left_out(self, num_devices: int) -> tuple[int, ...]:
        """Ranks of the cluster that no replica names."""
        return tuple(sorted(set(range(num_devices)) - set(self.ranks)))

    def with_all(self, **changes: object) -> Candidate:
        """The candidate with these fields of every replica changed."""
        changed = tuple(replace(each, **changes) for each in self.replicas)  # type: ignore[arg-type]
        return replace(self, replicas=changed)

    def in_fewest_replicas(self) -> Candidate:
        """This plan by its best name: replicas of different width that each run the whole model
        at once are one replica, whose samples are divided over all devices together.
        """
        if self.are_alike or any(
            not replica.is_whole or replica.num_micro_batch > 1 or replica.num_samples is not None
            for replica in self.replicas
        ):
            return self
        group = DeviceGroup(tuple(rank for replica in self.replicas for rank in replica.ranks))
        return replace(self, replicas=(replace(self.replicas[0], groups=(group,)),))

    def without_lone_zero(self) -> Candidate:
        """The same plan without a level of ZeRO that has nothing to share: every stage is on one
        device, and there is one model replica.
        """
        memory = self.memory
        is_shared = len(self.replicas) > 1 or max(self.replicas[0].widths) > 1
        if is_shared or not memory.zero or memory.offload.is_any:
            return self
        return replace(self, memory=replace(memory, zero=0))

    def signature(self, labels: Sequence[str]) -> object:
        """Equal for candidates that differ only in which of several devices with the same label
        stands where, in the order of their replicas, or in whether devices that each run the whole
        model are one replica or several.
        """
        replicas: list[tuple[Any, str]] = []
        for replica in self.replicas:
            names = [labels[rank] for rank in replica.ranks]
            if replica.is_whole and (replica.num_micro_batch == 1 or len(set(names)) == 1):
                each = replica.num_samples if len(names) == 1 else None
                rest = f"{replica.num_micro_batch} {each}"
                replicas += [((((name,), "", ()),), rest) for name in names]
                continue
            groups = []
            for group in replica.groups:
                own = tuple(sorted(labels[rank] for rank in group.ranks))
                groups.append((own, str(group.grid), group.split))
            replicas.append((tuple(groups), str(replace(replica, groups=()))))
        return tuple(sorted(replicas)), self.memory

    def describe(self) -> str:
        """One line for people: `2 stages on 3 + 4 devices, 8 micro-batches, schedule auto`."""
        memory = f", {self.memory.text}" if self.memory.text else ""
        if not self.are_alike:
            parts = [_describe_replica(replica) for replica in self.replicas]
            number = count(len(parts), "model replica")
            return f"{number} that are not alike: {'; '.join(parts)}{memory}"
        first = _describe_replica(self.replicas[0])
        if len(self.replicas) == 1:
            return f"{first}{memory}"
        return f"{len(self.replicas)} model replicas, each {first}{memory}"


def _describe_replica(replica: ReplicaChoice) -> str:
    stages = count(len(replica.groups), "stage")
    chunks = f" x {replica.num_chunks} chunks" if replica.num_chunks > 1 else ""
    devices = _widths(replica.widths)
    split = _split(replica)
    pipeline = "" if len(replica.groups) == 1 else f", schedule {replica.schedule}"
    micro_batches = count(replica.num_micro_batch, "micro-batch")
    return f"{stages}{chunks} on {devices}{split}, {micro_batches}{pipeline}"


def _split(replica: ReplicaChoice) -> str:
    """` with classifier split`: what is split of a replica, if something is."""
    grids = [group for group in replica.groups if group.grid is not None]
    if not grids:
        return ""
    modules = dict.fromkeys(_numberless(name) for group in grids for name in group.split)
    return f" with {', '.join(modules)} split" if modules else " split"


def _numberless(parameter: str) -> str:
    """`layers.*.experts` of `layers.3.experts.up`."""
    module = parameter.split(".")[:-1] or [parameter]
    return ".".join("*" if part.isdigit() else part for part in module)


def _widths(widths: Sequence[int]) -> str:
    """`3 + 4 devices`, or `8 x 4 devices` where many stages are equally wide."""
    if len(widths) > 2 and len(set(widths)) == 1:
        return f"{len(widths)} x {count(widths[0], 'device')}"
    return f"{' + '.join(map(str, widths))} device{'s' * (sum(widths) > 1)}"
