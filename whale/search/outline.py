"""The captured model as a chain of segments: all that estimates compute on.

A segment lies between two neighbouring points where a stage may start. Of the points that the
operations have, those where little crosses are kept, at most `MOST_POINTS`, so that an estimate
takes microseconds whatever the model; more where the smallest device would hold few segments.

    seconds   of a segment on each kind of device, forward and backward, for any number of samples
    static    bytes of weights with gradients and optimizer state, where they are first read
    saved     bytes that backward needs: of a micro-batch, and for each of its samples
    crossing  bytes for each sample that cross in front of a segment
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
from torch.fx import Node

from whale.capture.kinds import ValueKind
from whale.capture.sample_states import batch_dim
from whale.cluster.cluster import DeviceKind
from whale.costs.backward_workspace import COPIES, live_between
from whale.costs.costs import NodeCost
from whale.planning.cuts import Floats
from whale.planning.problem import Problem
from whale.planning.stages import state_behind
from whale.planning.task_graphs import cuttable, thin_points
from whale.planning.workload import INSIDE_OPERATIONS, Workload
from whale.planning.zero_blocks import layer_name

MOST_POINTS = 160
"""points where a stage may start, in the outline"""
ON_A_DEVICE = 3
"""segments that the smallest device should hold: fewer leave it no choice of a stage, or none that
fits
"""
MOST_OF_A_GIANT = 480
"""points of models that need more than `MOST_POINTS` for that"""
WEIGHTS_ONLY = frozenset(
    ["tied", "trained_bytes", "whole_trained_bytes", "other_bytes"]
    + ["largest_weight_bytes", "largest_layer_bytes"]
)
"""what depends on how weights are cut"""


@dataclass(frozen=True)
class SegmentTimes:
    """Seconds of every segment for one number of samples on one kind of device."""

    forward: Floats
    """(segments,)"""
    backward: Floats

    @cached_property
    def total(self) -> float:
        """Seconds of the whole model, forward and backward."""
        return float(self.forward.sum() + self.backward.sum())


@dataclass(frozen=True)
class TiedBytes:
    """A parameter that distant segments read: each of their stages holds it."""

    segments: tuple[int, ...]
    trained_bytes: float


@dataclass
class Outline:
    """One captured model with a mini-batch of one size."""

    problem: Problem
    _workloads: dict[int, Workload] = field(default_factory=dict, repr=False)
    _times: dict[tuple[DeviceKind, int], SegmentTimes] = field(default_factory=dict, repr=False)
    _lines: dict[tuple[DeviceKind, int], tuple[Floats, Floats]] = field(
        default_factory=dict, repr=False
    )
    split: Mapping[str, int] = field(default_factory=dict, repr=False)
    """parameter -> over how many devices it is cut, each of which holds a part of it; others are
    whole on every device
    """

    def on(self, problem: Problem) -> Outline:
        """The outline for some of the devices."""
        made = replace(self, problem=problem)
        for key, value in self.__dict__.items():
            made.__dict__.setdefault(key, value)  # nothing of it depends on who takes part
        return made

    def with_split(self, names: Iterable[str], number: int) -> Outline:
        """The outline with some parameters cut over so many devices."""
        made = replace(self, split=dict.fromkeys(names, number))
        for key, value in self.__dict__.items():
            if key not in made.__dict__ and key not in WEIGHTS_ONLY:
                made.__dict__[key] = value  # all that does not depend on it is computed once
        return made

    @cached_property
    def places(self) -> dict[Node, int]:
        """Activation -> its place among them."""
        return {node: place for place, node in enumerate(self.activations)}

    @property
    def costs(self) -> Mapping[Node, NodeCost]:
        """Costs of every operation for the whole mini-batch."""
        return self._any_workload.costs

    def _held_bytes(self, name: str) -> float:
        """Bytes of a parameter or buffer on a device that holds it."""
        return self.problem.captured.state[name].num_bytes / self.split.get(name, 1)

    @cached_property
    def operations(self) -> list[Node]:
        return list(self.problem.facts.operations)

    @cached_property
    def activations(self) -> list[Node]:
        kinds = self.problem.kinds
        return [node for node in self.operations if kinds[node] is ValueKind.ACTIVATION]

    def workload(self, share: int) -> Workload:
        """The cost model, exact for `share` samples of a micro-batch on a device."""
        if share not in self._workloads:
            self._workloads[share] = self._any_workload.with_share(share)
        return self._workloads[share]

    @cached_property
    def _any_workload(self) -> Workload:
        problem = self.problem
        return Workload(
            problem.captured,
            problem.batch_size,
            problem.facts.gradients,
            problem.optimizer_ratio,
            problem.dtype,
            update_work=problem.update_work,
            layer_times=problem.cluster.layer_times,
            facts=problem.facts,
        )

    # ---- points

    @cached_property
    def points(self) -> npt.NDArray[np.int64]:
        """(segments + 1,): places among the activations where segments start, and their number."""
        activations = self.activations
        kind = max(
            (device.kind for device in self.problem.cluster.devices),
            key=lambda each: each.reached_flop_per_s(self.problem.dtype),
        )
        times = np.array(self._any_workload.forward_seconds(activations, kind))
        crossing = np.array(self._alive[:-1])
        allowed = cuttable(activations, times, crossing) & ~self._crosses_sums
        inner = np.flatnonzero(thin_points(allowed, crossing, self._least_points))
        if len(inner) > self._most_points:
            inner = self._thinned(inner, np.cumsum(times), crossing)
        return np.concatenate([[0], inner, [len(activations)]]).astype(np.int64)

    @cached_property
    def _crosses_sums(self) -> npt.NDArray[np.bool_]:
        """(activations,): a sum over samples crosses here, of which devices that share samples
        would each have a part.
        """
        symbol = self.problem.captured.batch_symbol

        def is_sum(node: Node) -> float:
            return float(batch_dim(node, symbol) is None)

        return np.array(live_between(self.activations, is_sum)[:-1]) > 0

    @property
    def _least_points(self) -> int:
        """Stages that are wanted at most: devices times chunks."""
        return 4 * self.problem.cluster.num_devices

    @cached_property
    def _most_points(self) -> int:
        """The number of points that the outline has at most."""
        problem = self.problem
        smallest = min(device.kind.memory_bytes for device in problem.cluster.devices)
        if not smallest:
            return MOST_POINTS
        state = problem.captured.state.values()
        trained = sum(tensor.num_bytes for tensor in state if tensor.trainable)
        needed = ON_A_DEVICE * (2.0 + problem.optimizer_ratio) * trained / smallest
        return max(MOST_POINTS, min(MOST_OF_A_GIANT, math.ceil(needed)))

    def _thinned(self, inner: np.ndarray, elapsed: Floats, crossing: Floats) -> np.ndarray:
        """The one where least crosses, of all points that are close to each other in time."""
        bins = (elapsed[inner - 1] / elapsed[-1] * self._most_points).astype(np.int64)
        best: dict[int, int] = {}
        for point, place in zip(inner.tolist(), bins.tolist(), strict=True):
            if place not in best or crossing[point] < crossing[best[place]]:
                best[place] = point
        return np.array(sorted(best.values()))

    @property
    def num_segments(self) -> int:
        return len(self.points) - 1

    def starts(self, cuts: Sequence[int]) -> tuple[int, ...]:
        """First operations of stages that start with these segments."""
        return tuple(int(self.points[cut]) for cut in cuts)

    # ---- bytes

    @cached_property
    def _alive(self) -> list[float]:
        """Bytes for each sample that cross in front of each activation."""
        workload = self._any_workload
        size = workload.batch_size
        return live_between(self.activations, lambda node: workload.costs[node].output_bytes / size)

    @cached_property
    def crossing_bytes(self) -> Floats:
        """(segments + 1,): bytes for each sample in front of a segment; 0 at both ends."""
        alive = np.array(self._alive)[np.minimum(self.points, len(self.activations))]
        alive[0] = alive[-1] = 0.0
        return alive

    def _by_segment(self, values: Sequence[float]) -> Floats:
        sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
        by_segment: Floats = np.diff(sums[self.points])
        return by_segment

    @cached_property
    def saved_sample_bytes(self) -> Floats:
        """(segments,): bytes that backward needs of each sample."""
        saved = self._any_workload.saved_by_operation(self.activations)
        return self._by_segment([each.sample_bytes for each in saved])

    @cached_property
    def saved_fixed_bytes(self) -> Floats:
        """(segments,): bytes that backward needs of a micro-batch, whatever its samples."""
        saved = self._any_workload.saved_by_operation(self.activations)
        return self._by_segment([each.fixed_bytes for each in saved])

    @cached_property
    def workspace_sample_bytes(self) -> Floats:
        """(segments,): bytes for each sample that backward works with, at most."""
        workload = self._any_workload
        largest = np.array(
            [
                COPIES * workload.costs[node].output_bytes / workload.batch_size
                for node in self.activations
            ]
        )
        return np.array(
            [
                largest[start:end].max(initial=0.0)
                for start, end in zip(self.points[:-1], self.points[1:], strict=True)
            ]
        )

    @cached_property
    def _readers(self) -> dict[str, list[int]]:
        """Parameter or buffer -> segments that read it, in order."""
        kinds = self.problem.kinds
        segment_of = np.searchsorted(self.points, np.arange(len(self.activations)), "right") - 1
        found: dict[str, list[int]] = {}
        for place, node in enumerate(self.activations):
            for name, _ in state_behind(node, kinds):
                segments = found.setdefault(name, [])
                if not segments or segments[-1] != segment_of[place]:
                    segments.append(int(segment_of[place]))
        return found

    @cached_property
    def tied(self) -> tuple[TiedBytes, ...]:
        """Parameters that several segments read, the large ones: others change nothing."""
        state = self.problem.captured.state
        largest = max((tensor.num_bytes for tensor in state.values()), default=0)
        found = []
        for name, segments in self._readers.items():
            tensor = state[name]
            is_large = tensor.num_bytes > 0.01 * largest
            if len(segments) > 1 and tensor.kind == "parameter" and tensor.trainable and is_large:
                found.append(TiedBytes(tuple(segments), self._held_bytes(name)))
        return tuple(found)

    def _bytes_where_first_read(
        self, trained_factor: float, other_factor: float, without: Container[str] = ()
    ) -> Floats:
        state = self.problem.captured.state
        found = np.zeros(self.num_segments)
        for name, segments in self._readers.items():
            if name in without:
                continue
            tensor = state[name]
            factor = trained_factor if tensor.trainable else other_factor
            found[segments[0]] += factor * self._held_bytes(name)
        return found

    @cached_property
    def trained_bytes(self) -> Floats:
        """(segments,): bytes of parameters with a gradient, where they are first read."""
        return self._bytes_where_first_read(1.0, 0.0)

    @cached_property
    def whole_trained_bytes(self) -> Floats:
        """(segments,): the same without parameters that are cut over the devices of a group, of
        which no two hold the same.
        """
        return self._bytes_where_first_read(1.0, 0.0, self.split)

    def static_bytes(self, is_shared: bool) -> Floats:
        """(segments,): weights, gradients and optimizer state, where they are first read.
        `is_shared`: gradients lie in buckets to be all-reduced, too.
        """
        ratio = self.problem.optimizer_ratio
        trained = 2.0 + is_shared + ratio + INSIDE_OPERATIONS * (2 + ratio)
        return self._bytes_where_first_read(trained, 1.0)

    def tied_bytes(self, tied: TiedBytes) -> float:
        """What a stage holds of a tied parameter that is first read elsewhere: weight, gradient and
        its bucket to be all-reduced, optimizer state.
        """
        return tied.trained_bytes * (3.0 + self.problem.optimizer_ratio)

    @cached_property
    def largest_weight_bytes(self) -> float:
        state = self.problem.captured.state
        trained = [name for name, tensor in state.items() if tensor.trainable]
        return max(map(self._held_bytes, trained), default=0.0)

    @cached_property
    def largest_layer_bytes(self) -> float:
        """Bytes of the largest layer: what ZeRO gathers and reduces at once."""
        layers: dict[str, float] = {}
        for name, tensor in self.problem.captured.state.items():
            if tensor.trainable:
                layer = layer_name(name)
                layers[layer] = layers.get(layer, 0.0) + self._held_bytes(name)
        return max(layers.values(), default=0.0)

    @cached_property
    def other_bytes(self) -> Floats:
        """(segments,): bytes of buffers and frozen parameters, where they are first read."""
        return self._bytes_where_first_read(0.0, 1.0)

    @property
    def batch_bytes(self) -> int:
        return self._any_workload.batch_bytes

    # ---- seconds

    def times(self, kind: DeviceKind, num_samples: int) -> SegmentTimes:
        """Seconds of every segment for so many samples of a micro-batch."""
        key = (kind, num_samples)
        if key not in self._times:
            # shares that are close have the same line: models of this size see few of them
            share = 1 << max(0, num_samples.bit_length() - 1)
            fixed, per_sample = self._line(kind, min(share, self.problem.batch_size))
            forward, inputs, weights = fixed + num_samples * per_sample
            self._times[key] = SegmentTimes(forward, inputs + weights)
        return self._times[key]

    def _line(self, kind: DeviceKind, share: int) -> tuple[Floats, Floats]:
        """(3, segments) each: fixed seconds and seconds of a sample of forward, input gradient and
        weight gradient, exact for `share` samples.
        """
        key = (kind, share)
        if key not in self._lines:
            each = self.workload(share).times_by_operation(self.activations, kind)
            parts = [[times.forward, times.input_backward, times.weight_backward] for times in each]
            fixed = [self._by_segment([row[place].fixed_s for row in parts]) for place in range(3)]
            slopes = [
                self._by_segment([row[place].sample_s for row in parts]) for place in range(3)
            ]
            self._lines[key] = np.array(fixed), np.array(slopes)
        return self._lines[key]
