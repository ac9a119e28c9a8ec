"""What one model replica runs: its TaskGraphs, stages, the values that cross between them, who
holds which tensor, its schedule and its samples. Parts of a `Plan`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator

from whale.plans.blocks import Memory
from whale.plans.grid import Grid
from whale.plans.sharding import StageSharding
from whale.scheduling import Schedule


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
    has_cheap_regions: bool = False
    """these parts are cheap operations with the product that saves their result, which does not run
    again, and those that free most come first (`planning/cheap_regions.py`)
    """
    recomputed: tuple[tuple[int, ...], ...] = ()
    """regions that are recomputed in backward, each as places of its operations in the graph; those
    that the user asked for included
    """
    activations: Memory = "device"
    """where what forward saves lies until backward. Elsewhere: it goes out piece by piece under
    forward and comes back one piece ahead in backward
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


Ranges = tuple[tuple[tuple[int, int], ...], ...]
"""for each dim of a tensor, the index ranges [start, stop) that are held, in order"""

WHOLE = -1
"""stands in `Holding.boxes` for a tensor that is not cut"""


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
