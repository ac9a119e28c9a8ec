"""The plan: everything decided, as plain frozen data. It is printed, saved as JSON, compared, and
executed without further thought. docs/plan.md says what it holds and how alike replicas are stored.

A **model replica** is one full copy of the model on devices of its own. Replicas that run the same
stages name the same `ReplicaTemplate`, so a plan for 256 alike replicas holds their stages,
operations, crossings and schedule once; each `Replica` adds its ranks and its samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from whale.plans.blocks import Block
from whale.plans.figures import Figures
from whale.plans.planned_device import DeviceMemory, PlannedDevice
from whale.plans.replica import (
    WHOLE,
    Boxes,
    Crossing,
    Holding,
    LossTerm,
    Ranges,
    Replica,
    ReplicaShare,
    ReplicaTemplate,
    Stage,
    TaskGraph,
)
from whale.plans.sharding import StageSharding
from whale.plans.shares import Load
from whale.plans.virtual_devices import VirtualDevice
from whale.scheduling import Schedule

PLAN_FORMAT = 4
"""raised when the meaning of a field changes; 3 was Whale 0.1.0"""
DEFAULT_BUCKET_BYTES = 25 * 1024**2
"""the config's `bucket_bytes`, for plans that are made by hand"""


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


LEFT_OUT = "devices left out"
"""what a decision is called that leaves devices idle"""


@dataclass(frozen=True)
class Decision:
    """One choice of the planner and why it was made."""

    what: str
    choice: str
    why: str


@dataclass(frozen=True)
class Alternative:
    """Another plan that the search made and simulated, for comparison."""

    what: str
    """in one line, as `Decision.choice` has it"""
    step_s: float


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
    alternatives: tuple[Alternative, ...] = ()
    """what the search made besides, fastest first; empty where nothing was searched"""
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
    summed_norms: tuple[str, ...] = ()
    """parameters that a grid cuts and each holder updates in part, by norms of the whole
    (`runtime/summed_norms.py`)
    """
    folders: dict[str, str] = field(default_factory=dict)
    """host -> folder for what is at home on its disk; not there: the run folder"""
    updates_ahead: bool = False
    """blocks that are updated on the host (`Block.may_wait`) are updated under the next forward,
    which waits for each of them before its first use
    """

    # What follows reads the fields above. In a plan of several templates stages and VirtualDevices
    # are counted through all of them (`templates.py`).

    @property
    def is_uniform(self) -> bool:
        """All model replicas are alike."""
        return len(self.templates) == 1

    @cached_property
    def by_template(self) -> tuple[Plan, ...]:
        """The plan of the replicas of each template alone; a uniform plan itself."""
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
        from whale.plans.file import plan_json

        return plan_json(self)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json())

    @staticmethod
    def load(path: str | Path) -> Plan:
        """The plan in a file. It is checked as a whole (`check.py`), and nothing is executed."""
        from whale.plans.file import load_plan

        return load_plan(path)

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


__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "PLAN_FORMAT",
    "WHOLE",
    "Alternative",
    "Boxes",
    "Crossing",
    "Decision",
    "DeviceMemory",
    "Holding",
    "LossTerm",
    "Plan",
    "PlannedDevice",
    "Ranges",
    "Replica",
    "ReplicaShare",
    "ReplicaTemplate",
    "Settings",
    "Stage",
    "TaskGraph",
]
