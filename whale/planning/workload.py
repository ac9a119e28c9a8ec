"""What a mini-batch asks of a device: time and memory of every stage, as functions of the samples
of a micro-batch.

Both are taken to be affine in the samples: from the cost model at two sizes, and from what autograd
really saves.

    seconds(m) = fixed + m * per sample          forward, and backward where there is one
    bytes(m)   = static + in flight * (fixed + m * per sample)
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from torch.fx import Node

from whale.capture.graph import CapturedGraph
from whale.cluster.cluster import DeviceKind
from whale.cluster.layer_times import LayerTimes
from whale.costs.backward_workspace import COPIES, backward_workspace
from whale.costs.costs import (
    NodeCost,
    backward_bytes,
    backward_factors,
    backward_seconds,
    seconds,
    split_input,
)
from whale.costs.layer_times import MeasuredRegion, measured_regions
from whale.costs.measured import BATCH_NORM_OVER_DEVICES, curves, measured_seconds
from whale.costs.saved import Saved
from whale.costs.update_work import UpdateWork
from whale.planning.graph_facts import GraphFacts
from whale.planning.stages import StageSlice
from whale.plans.figures import UPDATE_COPIES, Seconds, StageTimes
from whale.plans.plan import DeviceMemory
from whale.scheduling import Action
from whale.scheduling.memory import ActionMemory, Bytes, peak_memory, total

ADAM_STATE = 2.0
"""optimizer state in units of the parameters' bytes, where the optimizer is not known: Adam's two
averages
"""


class _Form(NamedTuple):
    """What a node costs for two numbers of samples, and what its backward does."""

    few: NodeCost
    many: NodeCost
    backward_factors: tuple[float, float]
    few_backward_bytes: float
    many_backward_bytes: float


Parts = tuple[float, float, float]
"""seconds of a forward, and of the input gradient and the weight gradient of a backward"""

INSIDE_OPERATIONS = 0.02
"""fraction of weights, gradients and state, and of what is saved, that is held for a moment inside
operations and by messages on their way; measured by benchmarks/prediction.py
"""


@dataclass(frozen=True)
class Workload:
    """One captured graph with a mini-batch of one size."""

    captured: CapturedGraph
    batch_size: int
    gradients: frozenset[Node]
    """values that carry a gradient"""
    optimizer_ratio: float
    """bytes of optimizer state for each byte of trainable parameter"""
    dtype: str = "fp32"
    """in which products are computed"""
    share: int = 1
    """samples of a micro-batch that a device typically gets: times are exact there and at the whole
    mini-batch, straight between
    """
    mini_batch_size: int = 0
    """samples of the whole mini-batch, where the devices of other model replicas do some of them;
    0: as `batch_size`
    """
    update_work: UpdateWork | None = None
    """what an update of the user's optimizer launches; None: not known"""
    layer_times: LayerTimes | None = None
    """measured times of parts of the model, which count before all others"""
    _known: dict[DeviceKind, dict[Node, StageTimes]] = field(
        default_factory=dict, compare=False, repr=False
    )
    _known_saved: dict[tuple[Node, ...], list[Bytes]] = field(
        default_factory=dict, compare=False, repr=False
    )
    _regions: dict[str, list[MeasuredRegion]] = field(
        default_factory=dict, compare=False, repr=False
    )
    """measured parts of the model by kind of device, the same for all shares"""
    facts: GraphFacts = field(default=None, compare=False, repr=False)  # type: ignore[assignment]
    """of the captured graph, shared with other workloads of it"""

    def __post_init__(self) -> None:
        if self.facts is None:
            object.__setattr__(self, "facts", GraphFacts(self.captured))

    def with_share(self, share: int) -> Workload:
        """This workload with times that are exact for another share."""
        return replace(self, share=share, _known={})

    @cached_property
    def costs(self) -> dict[Node, NodeCost]:
        """Costs of every operation for the whole mini-batch."""
        return self.facts.costs(self.batch_size)

    @cached_property
    def _few(self) -> int:
        """Samples of the smaller of two sizes at which times are taken."""
        return self.share if self.share < self.batch_size else max(1, self.batch_size // 2)

    @cached_property
    def saved(self) -> Saved:
        """What autograd saves of the whole mini-batch."""
        return self.facts.saved(self.batch_size)

    def times(
        self, operations: Iterable[Node], kind: DeviceKind, again: Container[Node] = ()
    ) -> StageTimes:
        """Times of these operations together on such a device, for one micro-batch. `again`: those
        whose forward is run once more in backward.
        """
        known = self._times_of_nodes(kind)
        parts = [(known[node], node in again) for node in operations]
        return StageTimes(
            _sum([part.forward for part, _ in parts]),
            _sum(
                [part.input_backward for part, _ in parts]
                + [part.forward for part, repeated in parts if repeated]
            ),
            _sum([part.weight_backward for part, _ in parts]),
        )

    def forward_seconds(self, operations: Sequence[Node], kind: DeviceKind) -> list[float]:
        """Seconds of each operation alone, for a mini-batch in micro-batches of the usual size on
        one such device.
        """
        known = self._times_of_nodes(kind)
        times = self.batch_size / self.share
        return [times * known[node].forward.of(self.share) for node in operations]

    def times_by_operation(self, operations: Sequence[Node], kind: DeviceKind) -> list[StageTimes]:
        """Times of each operation alone on such a device, as functions of the samples."""
        known = self._times_of_nodes(kind)
        return [known[node] for node in operations]

    def _times_of_nodes(self, kind: DeviceKind) -> dict[Node, StageTimes]:
        if kind not in self._known:
            times = {form: self._times_of_form(form, kind) for form in set(self._forms.values())}
            known = {node: times[form] for node, form in self._forms.items()}
            if self.layer_times is not None:
                known |= self._measured_layers(kind, known)
            self._known[kind] = known
        return self._known[kind]

    def measured_regions(self, kind: str) -> list[MeasuredRegion]:
        """Parts of the model that were measured on a kind of this name, found once."""
        if self.layer_times is None:
            return []
        if kind not in self._regions:
            self._regions[kind] = measured_regions(self.captured, self.layer_times, kind)
        return self._regions[kind]

    def _measured_layers(
        self, kind: DeviceKind, modelled: Mapping[Node, StageTimes]
    ) -> dict[Node, StageTimes]:
        """Times of the operations of measured parts of the model: each keeps its share of what the
        cost model gives its part, so that a part may still be cut.
        """
        found: dict[Node, StageTimes] = {}
        for measured in self.measured_regions(kind.name):
            if 1 not in measured.layer.widths:
                continue
            few_forward, few_backward = measured.layer.seconds(self._few)
            many_forward, many_backward = measured.layer.seconds(self.batch_size)
            forward = self._line(few_forward, many_forward)
            backward = self._line(few_backward, many_backward)
            parts = [modelled[node] for node in measured.region.nodes]
            forward_s = sum(part.forward.of(self._few) for part in parts)
            backward_s = sum(part.backward.of(self._few) for part in parts)
            for node, part in zip(measured.region.nodes, parts, strict=True):
                found[node] = StageTimes(
                    _share(forward, part.forward.of(self._few), forward_s),
                    _share(backward, part.input_backward.of(self._few), backward_s),
                    _share(backward, part.weight_backward.of(self._few), backward_s),
                )
        return found

    @cached_property
    def _forms(self) -> dict[Node, _Form]:
        """All that the time of a node depends on; few, since models repeat their layers."""
        few = self.facts.costs(self._few)
        return {
            node: _Form(
                few[node],
                many,
                backward_factors(node, many, self.gradients),
                backward_bytes(node, few, self.gradients),
                backward_bytes(node, self.costs, self.gradients),
            )
            for node, many in self.costs.items()
        }

    def _times_of_form(self, form: _Form, kind: DeviceKind) -> StageTimes:
        return self._lines(
            self._parts(form.few, form.few_backward_bytes, form, kind),
            self._parts(form.many, form.many_backward_bytes, form, kind),
        )

    def _parts(self, cost: NodeCost, moved_back: float, form: _Form, kind: DeviceKind) -> Parts:
        return seconds(cost, kind, self.dtype), *backward_seconds(
            cost, form.backward_factors, kind, self.dtype, moved_back
        )

    def _lines(self, few: Parts, many: Parts) -> StageTimes:
        return StageTimes(
            *(self._line(few_s, many_s) for few_s, many_s in zip(few, many, strict=True))
        )

    def over_devices(self, batch_norm: Node, kind: DeviceKind) -> StageTimes:
        """What the device itself computes more in a batch norm over devices than in torch's own;
        nothing where that was not measured.

        Never less than nothing: both were measured, one after the other, and either may have come
        out too long.
        """
        if BATCH_NORM_OVER_DEVICES not in curves(kind):
            return StageTimes(Seconds(0.0), Seconds(0.0), Seconds(0.0))
        form = self._forms[batch_norm]

        def more(cost: NodeCost) -> Parts:
            alone, over = (
                self._parts(each, 0.0, form, kind)  # measured, so what it moves does not count
                for each in (cost, replace(cost, operation=BATCH_NORM_OVER_DEVICES))
            )
            forward, inputs, weights = (
                max(0.0, here - there) for here, there in zip(over, alone, strict=True)
            )
            return forward, inputs, weights

        return self._lines(more(form.few), more(form.many))

    def accumulate_seconds(self, part: StageSlice, kind: DeviceKind) -> Seconds:
        """Adding the gradients of a micro-batch to those before it, which are read and written; the
        new ones are still in the caches.

        Only where additions were measured.
        """
        one_by_one = (
            measured_seconds(kind, "aten.add", 0.0, 2.0 * num_bytes, False) or 0.0
            for num_bytes in self.trained_bytes(part)
        )
        return Seconds(0.0, sum(one_by_one))

    def trained_bytes(self, part: StageSlice) -> list[int]:
        """Bytes of each parameter of a stage that gets a gradient."""
        states = [self.captured.state[str(node.target)] for node in part.state]
        return [state.num_bytes for state in states if state.trainable]

    def _line(self, few_s: float, many_s: float) -> Seconds:
        """The straight line through the times of two numbers of samples."""
        if self.batch_size == self._few:
            return Seconds(many_s / self.batch_size)
        sample_s = (many_s - few_s) / (self.batch_size - self._few)
        # many samples are slower than few of them, one by one: exact for few
        if few_s < self._few * sample_s:
            return Seconds(few_s / self._few)
        return Seconds(sample_s, few_s - self._few * sample_s)

    def stage_memory(
        self, operations: Sequence[Node], crossing: Iterable[Node], regions: Mapping[Node, Hashable]
    ) -> ActionMemory:
        """What a stage holds of one micro-batch. `crossing`: what it receives and sends; `regions`:
        operations that are recomputed.
        """
        crossing = tuple(crossing)
        saved = self.saved.total(operations, crossing, regions)
        recomputed = self.saved.largest_region(regions)
        # a split backward computes the weight gradients of these operations later, from their
        # inputs and from the gradients of their results
        inputs = set()
        gradient_bytes = 0
        for node in operations:
            source = split_input(node, self.gradients)
            if source is not None:
                inputs.add(source)
                gradient_bytes += self.costs[node].output_bytes
        if regions:
            workspace = self._workspace_of_any_operation(operations)
        else:
            workspace = backward_workspace(operations, self.gradients, self.saved, crossing)
        workspace += recomputed.sample_bytes + INSIDE_OPERATIONS * saved.sample_bytes
        return ActionMemory(
            saved=saved,
            weight_gradient=self.saved.results(inputs) + Bytes(gradient_bytes / self.batch_size),
            workspace=Bytes(workspace, recomputed.fixed_bytes),
        )

    def _workspace_of_any_operation(self, operations: Sequence[Node]) -> float:
        """Bytes for each sample, where what is saved is not freed operation by operation: regions
        are recomputed on the way.
        """
        differentiable = [
            self.costs[node].output_bytes for node in operations if node in self.gradients
        ]
        return COPIES * max(differentiable, default=0) / self.batch_size

    def memory(
        self,
        slices: Sequence[StageSlice],
        stages: Mapping[int, ActionMemory],
        order: tuple[Action, ...],
    ) -> DeviceMemory:
        """Memory of a device that runs these slices in this order of actions; its capacity is left
        at 0. `stages`: by their number.
        """
        names = {str(node.target) for part in slices for node in part.state}
        states = [self.captured.state[name] for name in sorted(names)]
        parameters = sum(state.num_bytes for state in states if state.kind == "parameter")
        trainable = sum(state.num_bytes for state in states if state.trainable)
        buffers = sum(state.num_bytes for state in states if state.kind != "parameter")
        workspaces = [self.gradient_workspace(part) for part in slices]
        activations = peak_memory(order, stages)
        return DeviceMemory(
            parameter_bytes=parameters,
            gradient_bytes=trainable,
            optimizer_bytes=round(self.optimizer_ratio * trainable),
            buffer_bytes=buffers + self.batch_bytes,
            fixed_bytes=round(activations.fixed_bytes) + sum(workspaces),
            sample_bytes=activations.sample_bytes,
            capacity_bytes=0,
            update_bytes=self.update_workspace(workspaces),
        )

    def gradient_workspace(self, part: StageSlice) -> int:
        """Bytes that the backward of a stage works with beside those of its samples."""
        trained = self.trained_bytes(part)
        return self.workspace_of_weights(max(trained, default=0), sum(trained))

    def workspace_of_weights(self, largest_bytes: int, trained_bytes: int) -> int:
        """`gradient_workspace` for trained parameters of so many bytes: a gradient is made before
        it is added to the one that is there.
        """
        return largest_bytes + round(INSIDE_OPERATIONS * (2 + self.optimizer_ratio) * trained_bytes)

    def update_workspace(self, workspaces: Iterable[int]) -> int:
        """Bytes that the optimizer makes for a moment. `workspaces`: `gradient_workspace` of every
        stage of a device.
        """
        return UPDATE_COPIES * max(workspaces, default=0) if self.optimizer_ratio else 0

    @cached_property
    def batch_bytes(self) -> int:
        """Bytes of the whole mini-batch, which every device gets."""
        own_bytes = sum(
            self.costs[node].output_bytes
            for node in self.captured.graph.nodes
            if node.op == "placeholder"
        )
        return own_bytes * (self.mini_batch_size or self.batch_size) // self.batch_size

    def saved_by_operation(self, operations: Sequence[Node]) -> list[Bytes]:
        """What each operation saves that none before it saves."""
        key = tuple(operations)
        if key in self._known_saved:
            return self._known_saved[key]
        seen: set[int] = set()
        found = self._known_saved[key] = []
        # memory that the user's own checkpoints save is not seen here: cuts are safe, not tight
        for node in operations:
            new = self.saved.of_node.get(node, frozenset()) - seen
            seen |= new
            found.append(total(self.saved.storages[storage] for storage in new))
        return found

    def static_by_operation(
        self,
        operations: Sequence[Node],
        names_behind: Callable[[Node], Iterable[str]],
        is_shared: bool,
    ) -> list[float]:
        """Bytes of the parameters that each operation is the first to read, with their gradients
        and optimizer state.

        `is_shared`: gradients are summed over replicas, in buffers of their size.
        """
        trained = 2.0 + is_shared + self.optimizer_ratio
        seen: set[str] = set()
        found = []
        for node in operations:
            new = set(names_behind(node)) - seen
            seen |= new
            states = [self.captured.state[name] for name in new]
            found.append(
                sum(state.num_bytes * (trained if state.trainable else 1.0) for state in states)
            )
        return found


def _share(whole: Seconds, part_s: float, of_s: float) -> Seconds:
    """The part of measured seconds that falls to what takes `part_s` of the modelled `of_s`."""
    share = part_s / of_s if of_s else 0.0
    return Seconds(share * whole.sample_s, share * whole.fixed_s)


def _sum(times: Sequence[Seconds]) -> Seconds:
    return Seconds(sum(time.sample_s for time in times), sum(time.fixed_s for time in times))
