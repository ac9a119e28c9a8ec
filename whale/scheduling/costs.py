"""What actions, messages and activations cost: the input of the list scheduler and of the
simulation.

The least time of a step that any order can reach with these costs (`lower_bound`): every device
must do all its work, cannot begin before the first of its stages is reached, and after its last
action something of the micro-batch may be left to do elsewhere:

    step >= max over devices of  earliest start of its stages + its work
                                 + least time that is left after one of its actions

On P equal devices with C chunks each, backwards split, this is  work + (P - 1)(Tf / C + Tc). And
every stage must do all its forwards, and after the last of them that micro-batch still has its way
to the end and back:

    step >= max over stages of  earliest start of its forward + M times its forward
                                + way from there to the end of the backward

which is more where messages are slow and micro-batches few.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from whale.scheduling.action import Edge, StageGraph
from whale.scheduling.memory import ActionMemory, Bytes, fits


@dataclass(frozen=True)
class Costs:
    """Times in seconds (any unit does, if it is the same everywhere) and sizes in bytes (or any
    other unit), one entry for each stage.
    """

    forward_s: tuple[float, ...]
    input_backward_s: tuple[float, ...]
    weight_backward_s: tuple[float, ...]
    """a whole backward takes input gradient and weight gradient together"""
    message_s: Mapping[Edge, float] = field(default_factory=dict)
    """from the end of a producer until its activation is there, for edges that cross devices; an
    edge that is not listed takes no time
    """
    gradient_message_s: Mapping[Edge, float] | None = None
    """the same for gradients, keyed by (producer, consumer) too; None: as long as the activation"""
    action_s: float = 0.0
    """what the runtime adds to every compute action"""
    saved: tuple[float, ...] = ()
    """memory that is saved for backward, from the start of a stage's forward on; empty: 1 for each
    stage"""
    weight_gradient: tuple[float, ...] = ()
    """what a split backward holds between its input gradient and its weight gradient; empty: as
    much as `saved`. With recompute it can be more
    """
    memory_cap: tuple[float, ...] | None = None
    """for each device, how much its activations may take"""
    unsplit: frozenset[int] = frozenset()
    """stages whose backward is always whole"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "saved", self.saved or (1.0,) * self.num_stages)
        object.__setattr__(self, "weight_gradient", self.weight_gradient or self.saved)
        for name in (
            "forward_s",
            "input_backward_s",
            "weight_backward_s",
            "saved",
            "weight_gradient",
        ):
            values = getattr(self, name)
            if len(values) != self.num_stages:
                raise ValueError(
                    f"costs: {name} has {len(values)} entries, but forward_s has "
                    f"{self.num_stages}; give one for each stage"
                )
            if min(values) < 0:
                raise ValueError(f"costs: {name} holds {min(values)}; nothing takes less than 0")
        if (
            self.action_s < 0
            or min([*self.message_s.values(), *(self.gradient_message_s or {}).values(), 0.0]) < 0
        ):
            raise ValueError("costs: a message or action takes less than 0 seconds")

    @property
    def num_stages(self) -> int:
        return len(self.forward_s)

    def backward_s(self, stage: int) -> float:
        """A whole backward."""
        return self.input_backward_s[stage] + self.weight_backward_s[stage]

    def memory(self, stage: int) -> ActionMemory:
        """What a stage holds of a micro-batch."""
        return ActionMemory(
            saved=Bytes(fixed_bytes=self.saved[stage]),
            weight_gradient=Bytes(fixed_bytes=self.weight_gradient[stage]),
        )

    def transfer_s(self, graph: StageGraph, edge: Edge, gradient: bool = False) -> float:
        """How long after its producer the result is there; nothing between stages of one device."""
        if not graph.crosses_devices(edge):
            return 0.0
        times = (
            self.gradient_message_s
            if gradient and self.gradient_message_s is not None
            else self.message_s
        )
        return times.get(edge, 0.0)

    def require_fit(self, graph: StageGraph) -> None:
        """Refuse costs for other stages or devices, and caps below one micro-batch."""
        if self.num_stages != graph.num_stages:
            raise ValueError(
                f"the costs are for {self.num_stages} stages, but there are {graph.num_stages}"
            )
        if self.memory_cap is None:
            return
        if len(self.memory_cap) != graph.num_devices:
            raise ValueError(
                f"memory_cap has {len(self.memory_cap)} entries, but there are "
                f"{graph.num_devices} devices; give one for each"
            )
        for device, cap in enumerate(self.memory_cap):
            least = sum(self.saved[stage] for stage in graph.stages_of(device))
            if not fits(least, cap):
                raise ValueError(
                    f"device {device} has a memory cap of {cap:g}, but one micro-batch alone "
                    f"saves {least:g} there. "
                    "Try: more micro-batches (smaller ones), more devices, or recompute"
                )


def even_costs(
    graph: StageGraph,
    forward_s: float = 1.0,
    backward_s: float = 2.0,
    *,
    input_share: float = 0.5,
    message_s: float = 0.0,
    action_s: float = 0.0,
    memory_cap: float | None = None,
    unsplit: frozenset[int] = frozenset(),
) -> Costs:
    """Costs of equal devices, which need these times for one micro-batch, cut evenly into chunks.

    The unit of memory is one micro-batch on one device, so a chunk saves 1 / chunks of it.
    """
    chunks = [len(graph.stages_of(device)) for device in graph.device_of_stage]
    return Costs(
        forward_s=tuple(forward_s / count for count in chunks),
        input_backward_s=tuple(backward_s * input_share / count for count in chunks),
        weight_backward_s=tuple(backward_s * (1 - input_share) / count for count in chunks),
        message_s={edge: message_s for edge in graph.edges},
        action_s=action_s,
        saved=tuple(1 / count for count in chunks),
        memory_cap=None if memory_cap is None else (float(memory_cap),) * graph.num_devices,
        unsplit=unsplit,
    )


def stages_without_input_gradient(graph: StageGraph) -> frozenset[int]:
    """Stages that send no gradient back: nobody waits for their input gradients."""
    return frozenset(
        stage for stage in range(graph.num_stages) if not graph.gradient_producers(stage)
    )


def lower_bound(
    graph: StageGraph, costs: Costs, num_micro_batch: int, *, split: bool = True
) -> float:
    """No order takes less than this, whatever the memory. `split`: backwards may be split (stages
    in `costs.unsplit` are not).
    """
    heads = _heads(graph, costs)
    whole = [not split or stage in costs.unsplit for stage in range(graph.num_stages)]
    tails = _tails(graph, costs, whole)
    work = [0.0] * graph.num_devices
    for stage, device in enumerate(graph.device_of_stage):
        work[device] += num_micro_batch * (
            costs.forward_s[stage] + costs.backward_s(stage) + 2 * costs.action_s
        )
    bound = 0.0
    for device in range(graph.num_devices):
        stages = graph.stages_of(device)
        # the last action of a device is a backward of one of its stages: a weight gradient
        # leaves nothing to do, a whole one its gradient's way
        left = min(tails[stage] if whole[stage] else 0.0 for stage in stages)
        bound = max(bound, min(heads[stage] for stage in stages) + work[device] + left)
    ways = _ways(graph, costs, tails, whole)
    for stage in range(graph.num_stages):
        bound = max(
            bound,
            heads[stage]
            + num_micro_batch * (costs.forward_s[stage] + costs.action_s)
            + ways[stage],
        )
    return bound


def _ways(
    graph: StageGraph, costs: Costs, tails: Sequence[float], whole: Sequence[bool]
) -> list[float]:
    """Least time from the end of a stage's forward to the end of the step, for one micro-batch."""
    # from the start of a backward on: itself, then its weight gradient, or what waits for what it
    # sends
    ways = []
    for stage in range(graph.num_stages):
        first = costs.input_backward_s[stage] + costs.action_s
        second = costs.weight_backward_s[stage]
        ways.append(
            first + second + tails[stage] if whole[stage] else first + max(second, tails[stage])
        )
    for stage in reversed(range(graph.num_stages)):
        for consumer in graph.consumers(stage):
            forward = (
                costs.transfer_s(graph, (stage, consumer))
                + costs.forward_s[consumer]
                + costs.action_s
            )
            ways[stage] = max(ways[stage], forward + ways[consumer])
    return ways


def _heads(graph: StageGraph, costs: Costs) -> list[float]:
    """Earliest start of each stage's first forward."""
    heads = [0.0] * graph.num_stages
    for stage in range(graph.num_stages):
        for producer in graph.producers(stage):
            ready = (
                heads[producer]
                + costs.forward_s[producer]
                + costs.action_s
                + costs.transfer_s(graph, (producer, stage))
            )
            heads[stage] = max(heads[stage], ready)
    return heads


def _tails(graph: StageGraph, costs: Costs, whole: Sequence[bool]) -> list[float]:
    """Least time from the end of a stage's backward (input gradient, if it is split) until the
    gradients that it gave are used up.
    """
    tails = [0.0] * graph.num_stages
    for stage in range(graph.num_stages):
        for producer in graph.gradient_producers(stage):
            first = costs.input_backward_s[producer] + costs.action_s
            second = costs.weight_backward_s[producer]
            own = (
                first + second + tails[producer]
                if whole[producer]
                else first + max(second, tails[producer])
            )
            tails[stage] = max(
                tails[stage], costs.transfer_s(graph, (producer, stage), gradient=True) + own
            )
    return tails
