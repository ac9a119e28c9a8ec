"""Candidates whose stages run on grids: t devices of one kind on one host split every operation of
their stage (tensor parallelism), instead of sharing its samples.

To the estimates, t such devices are one device with t times the rates and the memory of one, whose
every segment takes longer by its messages. With c bytes for each sample that cross in front of a
segment (a residual stream, say), a pair of products behind it gathers c and scatters its result,
forward and backward:

    4 c (t - 1) / t bytes for each sample and segment, over the link between the t devices   (1)

So shapes, cuts, memory and bounds are those of any other pipeline, on fewer and larger devices.
Layers that were measured split over t devices take these times (docs/costs.md), which have their
messages inside: line (1) holds for the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from torch.fx import Node

from whale.cluster.cluster import Cluster, Device, DeviceKind
from whale.cluster.layer_times import LayerTimes
from whale.planning.cuts import Floats
from whale.search.candidate import ANY_GRID, Candidate, DeviceGroup, MemoryChoice, ReplicaChoice
from whale.search.outline import Outline, SegmentTimes
from whale.search.point import Estimate
from whale.search.settings import OpenSettings


@dataclass(frozen=True)
class TensorGroups:
    """The devices of a cluster in groups of `width`, each as one device."""

    width: int
    cluster: Cluster
    """of the groups"""
    members: tuple[tuple[int, ...], ...]
    """ranks of each group"""
    seconds_of_byte: float
    """of what a device sends inside its group, over the slowest link"""

    def candidate(
        self,
        estimate: Estimate,
        starts: tuple[int, ...],
        settings: OpenSettings,
        memory: MemoryChoice,
    ) -> Candidate:
        """The estimate on the devices themselves."""
        replicas = []
        point = estimate.point
        for stages in point.shape.replicas:
            groups = []
            for stage in stages:
                ranks = tuple(rank for group in stage for rank in self.members[group])
                groups.append(DeviceGroup(ranks, ANY_GRID))
            schedule = settings.schedule_of(len(groups))
            replicas.append(
                ReplicaChoice(
                    tuple(groups), point.num_micro_batch, schedule, point.num_chunks, starts
                )
            )
        return Candidate(tuple(replicas), memory)


def tensor_groups(cluster: Cluster) -> Iterator[TensorGroups]:
    """Groups of every width that divides the devices of each kind on each host."""
    classes: dict[tuple[DeviceKind, str], list[int]] = {}
    for device in cluster.devices:
        classes.setdefault((device.kind, device.host), []).append(device.rank)
    smallest = min(len(ranks) for ranks in classes.values())
    for width in range(2, smallest + 1):
        if any(len(ranks) % width for ranks in classes.values()):
            continue
        members = []
        for ranks in classes.values():
            for start in range(0, len(ranks), width):
                members.append(tuple(ranks[start : start + width]))
        members.sort()
        devices = []
        for number, own in enumerate(members):
            first = cluster.devices[own[0]]
            devices.append(Device(number, first.host, number, _together(first.kind, width)))
        links = [cluster.link(own[0], rank) for own in members for rank in own[1:]]
        slowest = max(1.0 / link.bytes_per_s for link in links)
        of_groups = replace(
            cluster.in_order(devices), layer_times=_times_together(cluster.layer_times, width)
        )
        yield TensorGroups(width, of_groups, tuple(members), slowest)


def _together(kind: DeviceKind, width: int) -> DeviceKind:
    """A kind that stands for so many devices which compute together."""

    def times(rate: float | None) -> float | None:
        return None if rate is None else width * rate

    return replace(
        kind,
        name=_name_together(kind.name, width),
        flop_per_s=width * kind.flop_per_s,
        memory_bytes=width * kind.memory_bytes,
        bytes_per_s=width * kind.bytes_per_s,
        tf32_flop_per_s=times(kind.tf32_flop_per_s),
        bf16_flop_per_s=times(kind.bf16_flop_per_s),
        fp16_flop_per_s=times(kind.fp16_flop_per_s),
        matmul_rates=(),
        operations=(),
    )


def _name_together(kind: str, width: int) -> str:
    return f"{width} x {kind}"


def _times_together(times: LayerTimes | None, width: int) -> LayerTimes | None:
    """Times of layers that were measured split over so many devices, as those of one group."""
    if times is None:
        return None
    layers = []
    for layer in times.layers:
        points = tuple(replace(time, width=1) for time in layer.times if time.width == width)
        if points:
            kind = _name_together(layer.kind, width)
            layers.append(replace(layer, kind=kind, times=points))
    return replace(times, layers=tuple(layers))


@dataclass
class GroupOutline(Outline):
    """The outline of a model for groups: their messages are in the seconds of segments."""

    width: int = 1
    seconds_of_byte: float = 0.0
    _with_messages: dict[tuple[DeviceKind, int], SegmentTimes] = field(
        default_factory=dict, repr=False
    )
    _modelled: dict[DeviceKind, Floats] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(outline: Outline, groups: TensorGroups) -> GroupOutline:
        """The outline of the same model on groups; what does not depend on devices is computed
        once.
        """
        is_measured = groups.cluster.layer_times is not None
        made = GroupOutline(
            replace(outline.problem, cluster=groups.cluster),
            {} if is_measured else outline._workloads,
            width=groups.width,
            seconds_of_byte=groups.seconds_of_byte,
        )
        for key, value in outline.__dict__.items():
            # the workload of the devices has their layer times, not those of groups
            is_of_devices = is_measured and key == "_any_workload"
            if key not in made.__dict__ and not is_of_devices:
                made.__dict__[key] = value
        return made

    def times(self, kind: DeviceKind, num_samples: int) -> SegmentTimes:
        """Seconds of every segment with its messages: measured, or by line (1)."""
        key = (kind, num_samples)
        if key not in self._with_messages:
            alone = super().times(kind, num_samples)
            part = 2 * (self.width - 1) / self.width * self.seconds_of_byte
            messages = num_samples * part * self.crossing_bytes[:-1] * self._modelled_part(kind)
            self._with_messages[key] = replace(
                alone, forward=alone.forward + messages, backward=alone.backward + messages
            )
        return self._with_messages[key]

    def _modelled_part(self, kind: DeviceKind) -> Floats:
        """(segments,): the part of the operations of each that is in no measured layer."""
        if kind not in self._modelled:
            measured: set[Node] = set()
            for each in self._any_workload.measured_regions(kind.name):
                measured.update(each.region.nodes)
            modelled = self._by_segment([float(node not in measured) for node in self.activations])
            self._modelled[kind] = modelled / np.maximum(1, np.diff(self.points))
        return self._modelled[kind]
