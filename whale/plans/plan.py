"""The plan: everything decided, as plain frozen data. It is printed, saved as JSON, compared, and
executed without further thought.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from whale.names import count
from whale.plans.figures import Figures
from whale.plans.sharding import StageSharding
from whale.plans.shares import UNLIMITED, Load
from whale.plans.virtual_devices import VirtualDevice
from whale.scheduling import Schedule, check

PLAN_FORMAT = 3  # raised when the meaning of a field changes


@dataclass(frozen=True)
class Decision:
    """One choice of the planner and why it was made."""

    what: str
    choice: str
    why: str


@dataclass(frozen=True)
class TaskGraph:
    """The part of the model under one annotation."""

    index: int
    label: str
    strategy: str
    num_devices: int
    virtual_device: int
    num_operations: int
    forward_flop: float
    """of one mini-batch"""
    parameter_bytes: int


@dataclass(frozen=True)
class Stage:
    """A piece of the model in pipeline order, on one VirtualDevice."""

    index: int
    virtual_device: int
    task_graphs: tuple[int, ...]
    num_operations: int
    forward_flop: float
    """of one mini-batch"""
    forward_s: float
    """of one mini-batch that all devices of this VirtualDevice share by their speed, by the cost
    model
    """
    parameters: tuple[str, ...]
    parameter_bytes: int
    input_backward_s: float = 0.0
    """as `forward_s`: gradients of its inputs"""
    weight_backward_s: float = 0.0
    """as `forward_s`: gradients of its weights, which a split backward does later"""
    num_regions: int = 0
    """parts into which the planner cut its operations, and the number of these, from the first on,
    that are computed again in backward
    """
    num_recomputed: int = 0


@dataclass(frozen=True)
class Crossing:
    """A value that one stage computes and a later stage uses; it is sent straight there."""

    value: str
    source: int
    destination: int
    sample_bytes: int
    """bytes for each sample; for a value without a batch dim, bytes for each micro-batch"""
    batched: bool
    gradient: bool
    """a gradient of the same size comes back"""
    message_s: float
    """time of its message for one micro-batch, by the cost model"""
    line: str


@dataclass(frozen=True)
class LossTerm:
    """One summand of the loss, computed where its numerator is."""

    stage: int
    text: str


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device at the fullest moment of a step."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    buffer_bytes: int
    """buffers of the model, those in which shared gradients are summed, and the mini-batch"""
    fixed_bytes: int
    """activations that do not depend on the samples, of all micro-batches in flight"""
    sample_bytes: float
    """activations for each sample of a micro-batch, of all micro-batches in flight, and room to
    work on one of them
    """
    capacity_bytes: int
    """0: not known"""
    update_bytes: int = 0
    """what the optimizer makes for a moment, when no activations are there any more"""

    @property
    def static_bytes(self) -> int:
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.buffer_bytes
            + self.fixed_bytes
        )

    @property
    def least_bytes(self) -> int:
        """Without samples: before the first one, or in the update."""
        return self.static_bytes + max(0, self.update_bytes - self.fixed_bytes)

    def with_shared(self, num_bytes: int) -> DeviceMemory:
        """With buckets for gradients of so many bytes, which are summed with other devices; in the
        update they lie there alone.
        """
        return replace(
            self,
            buffer_bytes=self.buffer_bytes + num_bytes,
            update_bytes=max(0, self.update_bytes - num_bytes),
        )

    def total_bytes(self, num_samples: int) -> float:
        return max(self.least_bytes, self.static_bytes + num_samples * self.sample_bytes)

    def most_samples(self) -> int:
        """Samples of a micro-batch that fit; -1: not even the weights do."""
        if not self.capacity_bytes:
            return UNLIMITED
        if self.least_bytes > self.capacity_bytes:
            return -1
        room = self.capacity_bytes - self.static_bytes
        return int(room // self.sample_bytes) if self.sample_bytes else UNLIMITED


@dataclass(frozen=True)
class Plan:
    """What runs where, and why."""

    format: int
    model: str
    """hash of the captured graph and the weights' names and shapes: a plan runs only the model that
    it was made for
    """
    config: dict[str, Any]
    num_devices: int
    device_kinds: tuple[str, ...]
    """by rank"""
    batch_size: int
    num_micro_batch: int
    task_graphs: tuple[TaskGraph, ...]
    virtual_devices: tuple[VirtualDevice, ...]
    num_replicas: int
    device_seconds: tuple[float, ...]
    """by rank: time of forward and backward for one sample of a micro-batch, all stages of the
    device
    """
    stages: tuple[Stage, ...]
    stage_of_operation: tuple[int, ...]
    """by position in the graph; -1 = recomputed wherever it is used"""
    crossings: tuple[Crossing, ...]
    holders: dict[str, tuple[int, ...]]
    """parameter or buffer -> stages that hold it; more than one = tied"""
    schedule: dict[str, Any]
    loss_terms: tuple[LossTerm, ...]
    decisions: tuple[Decision, ...]
    notes: tuple[str, ...]
    device_fixed_seconds: tuple[float, ...] = ()
    """by rank: time of a micro-batch that does not depend on its samples"""
    device_flop_per_s: tuple[float, ...] = ()
    """by rank, in the precision of the job"""
    memory: tuple[DeviceMemory, ...] = ()
    """by rank; empty: no limits"""
    least_samples: int = 1
    """0: a device may be left without samples; 1: every device must take part (batch statistics,
    values without samples)
    """
    figures: Figures | None = None
    """what the simulation needs; None: a plan made by hand"""
    shardings: tuple[StageSharding, ...] = ()
    """of the stages on a grid"""

    def loads(self) -> tuple[Load, ...]:
        """By rank: what samples cost there and how many fit."""
        fixed = self.device_fixed_seconds or (0.0,) * self.num_devices
        most = [memory.most_samples() for memory in self.memory] or [UNLIMITED] * self.num_devices
        return tuple(Load(*values) for values in zip(self.device_seconds, fixed, most, strict=True))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json())

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Reads a plan file; every field is checked, nothing is executed."""
        try:
            content = Path(path).read_bytes()
            plan = TypeAdapter(Plan).validate_json(content, strict=True)
            unknown = sorted(json.loads(content).keys() - set(PLAN_FIELDS))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the file"
            more = (
                f" ({count(error.error_count() - 1, 'more problem')})"
                if error.error_count() > 1
                else ""
            )
            raise ValueError(
                f"{path} is not a plan of `whale plan --save`: {where}: {first['msg']}{more}"
            ) from None
        if unknown:
            raise ValueError(
                f"{path} is not a plan: it has fields that a plan does not have: "
                f"{', '.join(unknown[:5])}"
            )
        if plan.format != PLAN_FORMAT:
            raise ValueError(
                f"{path} has plan format {plan.format}, this Whale reads {PLAN_FORMAT}: make the "
                "plan again"
            )
        problem = plan.contradiction()
        if problem:
            raise ValueError(f"{path} contradicts itself: {problem}. Make the plan again")
        return plan

    def contradiction(self) -> str | None:
        """What does not fit together in this plan, if anything; a file may have been edited."""
        ranks = sorted(
            rank for device in self.virtual_devices for replica in device.ranks for rank in replica
        )
        if ranks != list(range(self.num_devices)):
            return (
                f"its VirtualDevices hold ranks {ranks[:8]}, but it is for {self.num_devices} "
                "devices"
            )
        if any(len(device.ranks) != self.num_replicas for device in self.virtual_devices):
            return f"not every VirtualDevice has {self.num_replicas} replicas"
        if any(not 0 <= stage.virtual_device < len(self.virtual_devices) for stage in self.stages):
            return "a stage names a VirtualDevice that is not there"
        places = [
            *self.stage_of_operation,
            *(stage for stages in self.holders.values() for stage in stages),
        ]
        if any(not -1 <= stage < len(self.stages) for stage in places):
            return f"an operation or weight names a stage beyond its {len(self.stages)}"
        if problem := self._sharding_contradiction():
            return problem
        by_rank = (
            self.device_kinds,
            self.device_seconds,
            self.device_fixed_seconds,
            self.device_flop_per_s,
            self.memory,
        )
        if any(
            len(values) not in ((0, self.num_devices) if place > 1 else (self.num_devices,))
            for place, values in enumerate(by_rank)
        ):
            return f"it describes {len(self.device_kinds)} devices of {self.num_devices}"
        try:
            check(Schedule.from_json(self.schedule))
        except (KeyError, TypeError, ValueError) as error:
            return f"its schedule does not hold: {error}"
        return None

    def _sharding_contradiction(self) -> str | None:
        for device in self.virtual_devices:
            if device.grid is not None and any(
                len(ranks) != device.grid.num_devices for ranks in device.ranks
            ):
                return (
                    f"VirtualDevice {device.index} has a grid of {device.grid.name} devices and "
                    f"{device.num_devices} ranks"
                )
        on_grids = {
            stage.index
            for stage in self.stages
            if self.virtual_devices[stage.virtual_device].grid is not None
        }
        if {sharding.stage for sharding in self.shardings} != on_grids or len(
            self.shardings
        ) != len(on_grids):
            said = sorted(sharding.stage for sharding in self.shardings)
            return f"it says how stages {said} are sharded, on grids are {sorted(on_grids)}"
        for sharding in self.shardings:
            for name, stored in sharding.stored.items():
                if sharding.stage not in self.holders.get(name, ()):
                    return f"{name} is cut on stage {sharding.stage}, which does not hold it"
                try:
                    stored.layout()
                except (TypeError, ValueError) as error:
                    return f"{name} is cut in a way that cannot be: {error}"
        return None

    def ranks_of_stage(self, stage: int) -> tuple[int, ...]:
        """All ranks that run a stage, over all replicas."""
        device = self.virtual_devices[self.stages[stage].virtual_device]
        return tuple(rank for replica in device.ranks for rank in replica)

    def place_of_rank(self, rank: int) -> tuple[int, int, int]:
        """(VirtualDevice, replica, place inside it) of a rank."""
        for device in self.virtual_devices:
            for replica, ranks in enumerate(device.ranks):
                if rank in ranks:
                    return device.index, replica, ranks.index(rank)
        raise ValueError(
            f"rank {rank} is in no VirtualDevice of the plan (it has {self.num_devices} devices)"
        )

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        device = self.place_of_rank(rank)[0]
        return tuple(stage.index for stage in self.stages if stage.virtual_device == device)


def diff(a: Plan, b: Plan) -> list[str]:
    """One line for each value that differs: `stages[1].parameter_bytes: 400 -> 800`."""
    return list(_differences("", asdict(a), asdict(b)))


def _differences(path: str, a: Any, b: Any) -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys(), key=str):
            yield from _differences(
                f"{path}.{key}" if path else str(key), a.get(key, "absent"), b.get(key, "absent")
            )
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        for place, (left, right) in enumerate(zip(a, b, strict=True)):
            yield from _differences(f"{path}[{place}]", left, right)
    elif a != b:
        yield f"{path}: {_short(a)} -> {_short(b)}"


def _short(value: Any) -> str:
    text = str(value)
    return (
        text
        if len(text) <= 80
        else f"{text[:60]}... ({len(value) if hasattr(value, '__len__') else len(text)} long)"
    )


PLAN_FIELDS = tuple(field.name for field in fields(Plan))
