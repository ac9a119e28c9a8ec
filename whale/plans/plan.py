"""The plan: everything decided, as plain frozen data. It is printed, saved as JSON, compared, and
executed without further thought. docs/plan.md says what it holds and how alike replicas are stored.

A **model replica** is one full copy of the model on devices of its own. Replicas that run the same
stages name the same `ReplicaTemplate`, so a plan for 256 alike replicas holds their stages,
operations, crossings and schedule once; each `Replica` adds its ranks and its samples.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator, TypeAdapter, ValidationError

from whale.names import count
from whale.plans.blocks import Block, Memory
from whale.plans.check import contradiction, number_problem
from whale.plans.figures import Figures
from whale.plans.grid import Grid
from whale.plans.sharding import StageSharding
from whale.plans.shares import UNLIMITED, Load
from whale.plans.virtual_devices import VirtualDevice
from whale.scheduling import Schedule

PLAN_FORMAT = 4
"""raised when the meaning of a field changes; 3 was Whale 0.1.0"""

DEFAULT_BUCKET_BYTES = 25 * 1024**2
"""the config's `bucket_bytes`, for plans that are made by hand"""


def _read_schedule(data: Any) -> Schedule:
    """The schedule from its JSON form, or as it is; raises ValueError for anything else."""
    if isinstance(data, Schedule):
        return data
    try:
        return Schedule.from_json(data)
    except KeyError as error:
        raise ValueError(f"{error} is required in a schedule") from None
    except (TypeError, AttributeError) as error:
        raise ValueError(f"it is no schedule: {error}") from None


StoredSchedule = Annotated[
    Schedule, PlainValidator(_read_schedule), PlainSerializer(Schedule.to_json)
]
"""a schedule that is written with actions as text, `F2.0`, which a person can read"""


@dataclass(frozen=True)
class Settings:
    """What of the config a plan depends on and does not say elsewhere."""

    colocate: bool = False
    recompute: bool | str | tuple[str, ...] = "auto"
    """what the user asked for; what is recomputed of the planned graph stands in each `Stage`"""
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    """largest bucket in which gradients are all-reduced"""
    float32_precision: str = "highest"
    """`torch.get_float32_matmul_precision()` when the plan was made: float32 products run in TF32
    unless it is "highest", on devices that have it"""


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
    """parts into which the planner cut its operations"""
    num_recomputed: int = 0
    """how many of these parts, from the first on, are recomputed in backward"""
    recomputed: tuple[tuple[int, ...], ...] = ()
    """regions that are recomputed in backward, each as places of its operations in the graph; those
    that the user asked for included
    """


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
    """activations for each sample of a micro-batch, of all micro-batches in flight, and the workspace for
    one of them
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
        """Bytes that are held without samples: before the first one, or in the update."""
        return self.static_bytes + max(0, self.update_bytes - self.fixed_bytes)

    def with_shared(self, num_bytes: int) -> DeviceMemory:
        """The memory with buckets for gradients of so many bytes, which are all-reduced with other
        devices; in the update they lie there alone.
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
        free_bytes = self.capacity_bytes - self.static_bytes
        return int(free_bytes // self.sample_bytes) if self.sample_bytes else UNLIMITED


@dataclass(frozen=True)
class PlannedDevice:
    """One kind of device with what it has to do, by the cost model. Ranks that are alike in all of
    it share one.
    """

    kind: str
    sample_s: float
    """seconds of forward and backward for one sample of a micro-batch, all stages of the device"""
    fixed_s: float = 0.0
    """seconds of a micro-batch that do not depend on its samples"""
    flop_per_s: float = 0.0
    """in the precision of the job; 0: not known"""
    memory: DeviceMemory | None = None
    """None: no limit"""

    @property
    def load(self) -> Load:
        most = UNLIMITED if self.memory is None else self.memory.most_samples()
        return Load(self.sample_s, self.fixed_s, most)


Ranges = tuple[tuple[tuple[int, int], ...], ...]
"""for each dim of a tensor, the index ranges [start, stop) that are held, in order"""


@dataclass(frozen=True)
class Boxes:
    """Which part of a tensor each device of a VirtualDevice holds. Tensors that are cut alike share
    one.
    """

    shape: tuple[int, ...]
    """of the whole tensor"""
    places: tuple[Ranges, ...]
    """by place in the VirtualDevice: the product of its ranges, a few boxes of the tensor"""


@dataclass(frozen=True)
class Holding:
    """Who holds one parameter or buffer."""

    stages: tuple[int, ...]
    """more than one: tied"""
    boxes: tuple[int, ...] = ()
    """for each of these stages the index into `ReplicaTemplate.boxes`, `WHOLE` where its devices
    hold everything; empty: they all do
    """
    memory: Memory = "device"


WHOLE = -1
"""stands in `Holding.boxes` for a tensor that is not cut"""


@dataclass(frozen=True)
class ReplicaTemplate:
    """What one model replica runs, whichever devices it has."""

    grids: tuple[Grid | None, ...]
    """by VirtualDevice: its devices as a block, where a `split` TaskGraph runs there"""
    stages: tuple[Stage, ...]
    stage_of_operation: tuple[int, ...]
    """by place in the graph; -1: recomputed wherever it is used"""
    crossings: tuple[Crossing, ...]
    tensors: dict[str, Holding]
    """every parameter and buffer"""
    schedule: StoredSchedule
    loss_terms: tuple[LossTerm, ...] = ()
    boxes: tuple[Boxes, ...] = ()
    shardings: tuple[StageSharding, ...] = ()
    """of the stages on a grid"""


@dataclass(frozen=True)
class ReplicaShare:
    """How many samples of one micro-batch a model replica gets, and each of its devices."""

    num_samples: int
    runs: tuple[tuple[int, ...], ...]
    """[VirtualDevice][place]: samples that the device runs on; on a grid, all of the replica's"""
    edges: tuple[tuple[int, ...], ...]
    """the same for samples of what enters and leaves the device: on a grid a part of them"""


@dataclass(frozen=True)
class Replica:
    """One copy of the model on its devices."""

    template: int
    ranks: tuple[tuple[int, ...], ...]
    """[VirtualDevice][place]"""
    shares: tuple[tuple[int, int], ...] = ()
    """its micro-batches in order, as runs: (index into `Plan.shares`, number of micro-batches)"""


@dataclass(frozen=True)
class Plan:
    """What runs where, and why."""

    format: int
    model: str
    """hash of the captured graph and the weights' names and shapes: a plan runs only the model that
    it was made for
    """
    settings: Settings
    batch_size: int
    num_micro_batch: int
    devices: tuple[PlannedDevice, ...]
    """every different one"""
    device_of_rank: tuple[int, ...]
    """by rank: index into `devices`"""
    task_graphs: tuple[TaskGraph, ...]
    templates: tuple[ReplicaTemplate, ...]
    replicas: tuple[Replica, ...]
    shares: tuple[ReplicaShare, ...] = ()
    """every different one"""
    decisions: tuple[Decision, ...] = ()
    notes: tuple[str, ...] = ()
    least_samples: int = 1
    """0: a device may be left without samples; 1: every device must take part (batch statistics,
    values without samples)
    """
    figures: Figures | None = None
    """what the simulation needs; None: a plan made by hand"""
    zero: int = 0
    """what the ranks of a block share instead of each holding all of it: 1 optimizer state, 2 and
    gradients, 3 and weights (docs/memory.md)
    """
    blocks: tuple[Block, ...] = ()
    """parameters that are cut over ranks which would hold the same, in the order of their use"""
    owners: dict[str, int] = field(default_factory=dict)
    """parameters that a grid cuts and the optimizer wants whole -> the rank that updates each"""

    # What follows reads the fields above. In a plan of several templates stages and VirtualDevices
    # are counted through all of them (`templates.py`).

    @property
    def is_uniform(self) -> bool:
        """All model replicas are alike."""
        return len(self.templates) == 1

    @cached_property
    def by_template(self) -> tuple[Plan, ...]:
        """For each template the plan of its replicas alone; of a uniform plan itself."""
        from whale.plans.templates import views

        return (self,) if self.is_uniform else views(self)

    def of_rank(self, rank: int) -> Plan:
        """The plan of the replicas that are like this rank's."""
        return self.by_template[self.template_of_rank(rank)]

    def template_of_rank(self, rank: int) -> int:
        """Number of the template of the replica that this rank belongs to; of a rank that is left
        out the first.
        """
        place = self._place_of_rank.get(rank)
        return self.replicas[place[1]].template if place is not None else 0

    @property
    def mini_batch_size(self) -> int:
        """Samples of the whole mini-batch, of which the replicas of one template get a part."""
        return self.batch_size

    @property
    def first_replica(self) -> int:
        """What replicas are counted from in the whole plan."""
        return 0

    @property
    def template(self) -> ReplicaTemplate:
        """The only one."""
        assert self.is_uniform, "the model replicas of this plan differ: take plan.of_rank(rank)"
        return self.templates[0]

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        from whale.plans.templates import all_stages

        return self.template.stages if self.is_uniform else all_stages(self)

    @property
    def crossings(self) -> tuple[Crossing, ...]:
        return self.template.crossings

    @property
    def schedule(self) -> Schedule:
        return self.template.schedule

    @property
    def shardings(self) -> tuple[StageSharding, ...]:
        return self.template.shardings

    @property
    def loss_terms(self) -> tuple[LossTerm, ...]:
        return self.template.loss_terms

    @property
    def stage_of_operation(self) -> tuple[int, ...]:
        return self.template.stage_of_operation

    @property
    def num_replicas(self) -> int:
        return len(self.replicas)

    @property
    def num_devices(self) -> int:
        """Devices of the job, also where this is the plan of some of its replicas."""
        return len(self.device_of_rank)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that run this plan, in order."""
        return tuple(sorted(self._place_of_rank))

    @property
    def left_out(self) -> tuple[int, ...]:
        """Ranks of the job that no model replica of this plan has."""
        return tuple(sorted(set(range(self.num_devices)) - set(self.ranks)))

    @cached_property
    def holders(self) -> dict[str, tuple[int, ...]]:
        """Parameter or buffer -> stages that hold it; more than one in a template: tied."""
        found: dict[str, tuple[int, ...]] = {}
        first = 0
        for template in self.templates:
            for name, holding in template.tensors.items():
                own = tuple(first + stage for stage in holding.stages)
                found[name] = found.get(name, ()) + own
            first += len(template.stages)
        return found

    @cached_property
    def virtual_devices(self) -> tuple[VirtualDevice, ...]:
        """The ordered devices of each VirtualDevice in every replica that has it."""
        found: list[VirtualDevice] = []
        for number, template in enumerate(self.templates):
            replicas = [replica for replica in self.replicas if replica.template == number]
            for index, grid in enumerate(template.grids):
                ranks = tuple(replica.ranks[index] for replica in replicas)
                found.append(VirtualDevice(len(found), ranks, grid))
        return tuple(found)

    @cached_property
    def device_kinds(self) -> tuple[str, ...]:
        """Name of the kind of device of every rank."""
        return tuple(self.devices[index].kind for index in self.device_of_rank)

    @cached_property
    def memory(self) -> tuple[DeviceMemory, ...]:
        """Memory of every rank; empty where a device has no limit."""
        known = [device.memory for device in self.devices if device.memory is not None]
        if len(known) < len(self.devices):
            return ()
        return tuple(known[index] for index in self.device_of_rank)

    @cached_property
    def loads(self) -> tuple[Load, ...]:
        """What samples cost on every rank, and how many fit."""
        loads = [device.load for device in self.devices]
        return tuple(loads[index] for index in self.device_of_rank)

    @cached_property
    def shares_by_size(self) -> dict[int, tuple[ReplicaShare, ...]]:
        """Samples in a micro-batch -> the share of every replica, for the sizes that were planned.
        Micro-batches of one size are divided alike. In a plan of one template.
        """
        runs = [
            [index for index, times in replica.shares for _ in range(times)]
            for replica in self.replicas
        ]
        found: dict[int, tuple[ReplicaShare, ...]] = {}
        for indices in dict.fromkeys(zip(*runs, strict=True)):
            shares = tuple(self.shares[index] for index in indices)
            found[sum(share.num_samples for share in shares)] = shares
        return found

    def to_json(self) -> str:
        return _PLAN.dump_json(self, indent=1).decode()

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json())

    @staticmethod
    def load(path: str | Path) -> Plan:
        """The plan in a file. It is checked as a whole (`check.py`), and nothing is executed."""
        content = Path(path).read_bytes()
        data = _read_json(path, content)
        if data["format"] != PLAN_FORMAT:
            raise ValueError(
                f"{path} has plan format {data['format']}, this Whale reads {PLAN_FORMAT}: make "
                "the plan again. Try: whale plan TRAIN.PY --save plan.json"
            )
        if problem := number_problem(data):
            raise ValueError(f"{path} is not a plan: {problem}")
        try:
            plan = _PLAN.validate_json(content, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the file"
            num_more = error.error_count() - 1
            more = f" ({count(num_more, 'more problem')})" if num_more else ""
            raise ValueError(
                f"{path} is not a plan of `whale plan --save`: {where}: {first['msg']}{more}"
            ) from None
        if problem := contradiction(plan):
            raise ValueError(
                f"{path} contradicts itself: {problem}. Make the plan again. "
                "Try: whale plan TRAIN.PY --save plan.json"
            )
        return plan

    def ranks_of_stage(self, stage: int) -> tuple[int, ...]:
        """All ranks that run a stage, over all replicas."""
        return self.virtual_devices[self.stages[stage].virtual_device].all_ranks

    def place_of_rank(self, rank: int) -> tuple[int, int, int]:
        """(VirtualDevice, replica, place inside it) of a rank; in a plan of one template."""
        assert self.is_uniform, "the model replicas of this plan differ: take plan.of_rank(rank)"
        if rank not in self._place_of_rank:
            raise ValueError(
                f"rank {rank} is in no VirtualDevice of the plan, which has {self.num_devices} "
                "devices"
            )
        return self._place_of_rank[rank]

    @cached_property
    def _place_of_rank(self) -> dict[int, tuple[int, int, int]]:
        found = {}
        for number, replica in enumerate(self.replicas):
            for device, ranks in enumerate(replica.ranks):
                for place, rank in enumerate(ranks):
                    found[rank] = (device, number, place)
        return found

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """Stages of a rank, none where it is left out; in a plan of one template."""
        if rank not in self._place_of_rank:
            return ()
        device = self.place_of_rank(rank)[0]
        return tuple(stage.index for stage in self.stages if stage.virtual_device == device)


def diff(a: Plan, b: Plan) -> list[str]:
    """One line for each value that differs: `stages[1].parameter_bytes: 400 -> 800`."""
    return list(_differences("", json.loads(a.to_json()), json.loads(b.to_json())))


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


FIGURES = {"summary", "batch_size", "devices", "network"}
"""keys of what `whale plan --json` writes, which is no plan"""


def _read_json(path: str | Path, content: bytes) -> dict[str, Any]:
    """The fields of a plan file; raises ValueError where it is none, or has other fields."""
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict) or "format" not in data:
        what = ""
        if isinstance(data, dict) and data.keys() >= FIGURES:
            what = ": it holds the figures of `--json`. Try: the file of `whale plan --save`"
        raise ValueError(f"{path} is not a plan of `whale plan --save`{what}")
    unknown = sorted(data.keys() - {field.name for field in fields(Plan)})
    if unknown and data["format"] == PLAN_FORMAT:
        raise ValueError(
            f"{path} is not a plan: it has fields that a plan does not have: "
            f"{', '.join(unknown[:5])}"
        )
    return data


_PLAN = TypeAdapter(Plan)
