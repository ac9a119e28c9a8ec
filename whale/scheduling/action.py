"""The data of a schedule: actions, the stages that they work on, and one ordered list of actions
for each device.

A device here is a VirtualDevice of one model replica: all its ranks, in all replicas, do the same
actions, each on its own samples.

Text form of an action, used in JSON plans and in errors:

    F2.0                forward of stage 2, micro-batch 0
    B2.0                its whole backward
    I2.0                first half of a split backward, the input gradient: gradients of what the
                        stage received
    W2.0                second half, the weight gradient: gradients of its parameters, later than
                        I2.0; a micro-batch has either B, or I and W
    send F 2>3.0        stage 2 sends its activation of micro-batch 0 to stage 3
    receive B 3>2.0     stage 2 receives the gradient of that activation from stage 3 (always
                        source>destination)
    synchronise 2.7     all-reduce the gradients of stage 2 over their holders; 7 was the last
                        micro-batch to add to them
    update              the optimizer step of this device
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

NONE = -1
"""stands where an action has no stage, micro-batch or peer"""


Edge = tuple[int, int]
"""(producer stage, consumer stage), producer < consumer"""


class Kind(StrEnum):
    """What a device does in one action."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    """gradients of what the stage received: what other stages wait for"""
    WEIGHT = "W"
    """gradients of parameters: nobody waits for it before the stage synchronises"""
    SEND = "send"
    RECEIVE = "receive"
    SYNCHRONISE = "synchronise"
    UPDATE = "update"


COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
GIVES_GRADIENT = (Kind.BACKWARD, Kind.INPUT)
"""after these the gradients of a stage's inputs go out"""
ENDS_BACKWARD = (Kind.BACKWARD, Kind.WEIGHT)
"""after these a micro-batch has added all that it adds to the gradients of a stage"""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a device does; `stage` is always the stage on the device that does it."""

    kind: Kind
    stage: int = NONE
    micro_batch: int = NONE
    peer: int = NONE
    """the other stage of a message"""
    gradient: bool = False
    """False: an activation, from an earlier stage to a later one; True: a gradient going back"""

    @property
    def is_compute(self) -> bool:
        return self.kind in COMPUTE

    @property
    def is_message(self) -> bool:
        return self.kind in (Kind.SEND, Kind.RECEIVE)

    @property
    def source(self) -> int:
        """Stage that sends this message."""
        return self.stage if self.kind is Kind.SEND else self.peer

    @property
    def destination(self) -> int:
        """Stage that receives this message."""
        return self.peer if self.kind is Kind.SEND else self.stage

    @property
    def edge(self) -> Edge:
        """Edge of the stage graph that this message goes along, for a gradient against it."""
        if self.gradient:
            return self.destination, self.source
        return self.source, self.destination

    @property
    def counterpart(self) -> Action:
        """The action of the other end of this message."""
        other = Kind.RECEIVE if self.kind is Kind.SEND else Kind.SEND
        return Action(other, self.peer, self.micro_batch, self.stage, self.gradient)

    def __str__(self) -> str:
        if self.is_message:
            return (
                f"{self.kind} {'B' if self.gradient else 'F'} "
                f"{self.source}>{self.destination}.{self.micro_batch}"
            )
        if self.is_compute:
            return f"{self.kind}{self.stage}.{self.micro_batch}"
        if self.kind is Kind.SYNCHRONISE:
            return f"{self.kind} {self.stage}.{self.micro_batch}"
        return str(self.kind)


_WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "input gradient",
    Kind.WEIGHT: "weight gradient",
}


def in_words(action: Action) -> str:
    """A compute action for people: `the forward of stage 2, micro-batch 0 (F2.0)`; others as
    `str` has them.
    """
    if not action.is_compute:
        return str(action)
    place = f"stage {action.stage}, micro-batch {action.micro_batch}"
    return f"the {_WORDS[action.kind]} of {place} ({action})"


def forward(stage: int, micro_batch: int) -> Action:
    return Action(Kind.FORWARD, stage, micro_batch)


def backward(stage: int, micro_batch: int) -> Action:
    return Action(Kind.BACKWARD, stage, micro_batch)


def input_backward(stage: int, micro_batch: int) -> Action:
    return Action(Kind.INPUT, stage, micro_batch)


def weight_backward(stage: int, micro_batch: int) -> Action:
    return Action(Kind.WEIGHT, stage, micro_batch)


def send(source: int, destination: int, micro_batch: int) -> Action:
    """The sending half of a message; data only flows to later stages, so the direction says whether
    it is a gradient.
    """
    return Action(Kind.SEND, source, micro_batch, destination, gradient=source > destination)


def receive(source: int, destination: int, micro_batch: int) -> Action:
    return send(source, destination, micro_batch).counterpart


_COMPUTE_TEXT = re.compile(r"([FBIW])(\d+)\.(\d+)")
_MESSAGE_TEXT = re.compile(r"(send|receive) ([FB]) (\d+)>(\d+)\.(\d+)")
_SYNCHRONISE_TEXT = re.compile(r"synchronise (\d+)\.(\d+)")


def parse_action(text: str) -> Action:
    """The action whose `str` is `text`."""
    if match := _COMPUTE_TEXT.fullmatch(text):
        return Action(Kind(match[1]), int(match[2]), int(match[3]))
    if match := _MESSAGE_TEXT.fullmatch(text):
        source = int(match[3])
        destination = int(match[4])
        micro_batch = int(match[5])
        sent = Action(Kind.SEND, source, micro_batch, destination, gradient=match[2] == "B")
        return sent if match[1] == Kind.SEND else sent.counterpart
    if match := _SYNCHRONISE_TEXT.fullmatch(text):
        return Action(Kind.SYNCHRONISE, int(match[1]), int(match[2]))
    if text == Kind.UPDATE:
        return Action(Kind.UPDATE)
    examples = (
        "F2.0, B2.0, I2.0, W2.0, 'send F 2>3.0', 'receive B 3>2.0', 'synchronise 2.7' or 'update'"
    )
    raise ValueError(f"{text!r} is no action; write it like {examples}")


Orders = tuple[tuple[Action, ...], ...]
"""for each device, its actions in the order in which it does them"""


@dataclass(frozen=True)
class StageGraph:
    """Which device holds each stage, and what flows between stages. Edges may skip stages; a device
    may hold several stages (chunks).
    """

    device_of_stage: tuple[int, ...]
    edges: tuple[Edge, ...]
    gradient_edges: tuple[Edge, ...]
    """those edges that also carry a gradient back"""

    def __post_init__(self) -> None:
        if not self.device_of_stage:
            raise ValueError("a stage graph needs at least one stage; device_of_stage is empty")
        if min(self.device_of_stage) < 0:
            raise ValueError(
                f"device_of_stage {self.device_of_stage} holds a negative device; devices are "
                "numbered from 0"
            )
        # only as many numbers as there are stages: a damaged file may name device 10^15
        used = set(self.device_of_stage)
        idle = [device for device in range(len(self.device_of_stage)) if device not in used]
        if idle and idle[0] < self.num_devices:
            raise ValueError(
                f"device {idle[0]} of {self.num_devices} holds no stage; number only the devices "
                "that hold stages, from 0"
            )
        for name, edges in (("edges", self.edges), ("gradient_edges", self.gradient_edges)):
            if repeated := [edge for edge, count in Counter(edges).items() if count > 1]:
                raise ValueError(
                    f"{name} lists {_arrow(repeated[0])} twice; join the tensors of one edge into "
                    "one message"
                )
        for producer, consumer in self.edges:
            if not (0 <= producer < self.num_stages and 0 <= consumer < self.num_stages):
                raise ValueError(
                    f"edge {_arrow((producer, consumer))} names a stage outside "
                    f"0..{self.num_stages - 1}"
                )
            if producer >= consumer:
                raise ValueError(
                    f"edge {_arrow((producer, consumer))} does not go to a later stage; number "
                    "stages along the data"
                )
        if foreign := sorted(set(self.gradient_edges) - set(self.edges)):
            raise ValueError(
                f"gradient edge {_arrow(foreign[0])} is not among the edges; a gradient only "
                "returns where an activation went"
            )

    @classmethod
    def chain(cls, num_stages: int, device_of_stage: Iterable[int] | None = None) -> StageGraph:
        """Stages one after the other, every edge with its gradient; by default one stage for each
        device.
        """
        edges = tuple((stage, stage + 1) for stage in range(num_stages - 1))
        return cls(
            tuple(range(num_stages)) if device_of_stage is None else tuple(device_of_stage),
            edges,
            edges,
        )

    @property
    def num_stages(self) -> int:
        return len(self.device_of_stage)

    @property
    def num_devices(self) -> int:
        return max(self.device_of_stage) + 1

    def producers(self, stage: int) -> tuple[int, ...]:
        """Stages whose activations this stage reads, ascending."""
        return self._producers[stage]

    def consumers(self, stage: int) -> tuple[int, ...]:
        """Stages that read activations of this stage, ascending."""
        return self._consumers[stage]

    def gradient_producers(self, stage: int) -> tuple[int, ...]:
        """Producers that get a gradient back from this stage."""
        return self._gradient_producers[stage]

    def gradient_consumers(self, stage: int) -> tuple[int, ...]:
        """Consumers whose gradients the backward of this stage needs."""
        return self._gradient_consumers[stage]

    def stages_of(self, device: int) -> tuple[int, ...]:
        """Stages on one device, ascending: its chunks."""
        return tuple(stage for stage, holder in enumerate(self.device_of_stage) if holder == device)

    def crosses_devices(self, edge: Edge) -> bool:
        """Whether this edge needs messages; stages on one device hand over locally."""
        return self.device_of_stage[edge[0]] != self.device_of_stage[edge[1]]

    @cached_property
    def _producers(self) -> tuple[tuple[int, ...], ...]:
        return _neighbours(
            self.num_stages, ((consumer, producer) for producer, consumer in self.edges)
        )

    @cached_property
    def _consumers(self) -> tuple[tuple[int, ...], ...]:
        return _neighbours(self.num_stages, self.edges)

    @cached_property
    def _gradient_producers(self) -> tuple[tuple[int, ...], ...]:
        return _neighbours(
            self.num_stages, ((consumer, producer) for producer, consumer in self.gradient_edges)
        )

    @cached_property
    def _gradient_consumers(self) -> tuple[tuple[int, ...], ...]:
        return _neighbours(self.num_stages, self.gradient_edges)


def _neighbours(num_stages: int, pairs: Iterable[Edge]) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = [[] for _ in range(num_stages)]
    for here, there in pairs:
        found[here].append(there)
    return tuple(tuple(sorted(stages)) for stages in found)


def _arrow(edge: Edge) -> str:
    return f"{edge[0]} -> {edge[1]}"


@dataclass(frozen=True)
class Schedule:
    """The ordered actions of every device of a model replica: plain data, made and checked before
    anything runs.
    """

    name: str
    stage_graph: StageGraph
    num_micro_batch: int
    orders: Orders

    def __post_init__(self) -> None:
        require_micro_batches(self.num_micro_batch)
        if len(self.orders) != self.stage_graph.num_devices:
            needed = self.stage_graph.num_devices
            raise ValueError(
                f"schedule {self.name!r} has orders for {len(self.orders)} devices, but its "
                f"stages lie on {needed}"
            )

    def to_json(self) -> dict[str, Any]:
        """A dict of plain lists, numbers and strings, for `json.dumps`."""
        graph = self.stage_graph
        return {
            "name": self.name,
            "num_micro_batch": self.num_micro_batch,
            "device_of_stage": list(graph.device_of_stage),
            "edges": [list(edge) for edge in graph.edges],
            "gradient_edges": [list(edge) for edge in graph.gradient_edges],
            "orders": [[str(action) for action in order] for order in self.orders],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Schedule:
        """The schedule that `to_json` wrote. It is not checked again here: call `check`."""
        edges, gradient_edges = (
            tuple((int(a), int(b)) for a, b in data[name]) for name in ("edges", "gradient_edges")
        )
        graph = StageGraph(
            tuple(int(device) for device in data["device_of_stage"]), edges, gradient_edges
        )
        orders = tuple(tuple(parse_action(text) for text in order) for order in data["orders"])
        return cls(str(data["name"]), graph, int(data["num_micro_batch"]), orders)


def require_micro_batches(num_micro_batch: int) -> None:
    if num_micro_batch < 1:
        raise ValueError(f"num_micro_batch is {num_micro_batch}; it must be at least 1")
