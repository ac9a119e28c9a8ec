"""The step of devices in replicas and stages, before anything is drafted: a bound that nothing can
beat, then cuts and an estimate that is near to what the simulation will give.

R replicas of K stages share micro-batches of m samples by their speed; the devices of a stage share
those of their replica. With F and B the prefix sums of forward and backward over the segments, on
the slowest device of stage k for its samples, a stage [p, q) takes for one micro-batch

    t_k(p, q) = F_k[q] - F_k[p] + B_k[q] - B_k[p] + r_k(p, q) (F_k[q] - F_k[p])                  (1)

where r is the part of the stage that must be recomputed in backward, so that it fits:

    static + in flight ((1 - r) saved + r crossing) + r largest region + workspace <= memory     (2)

in flight: as 1F1B has. t grows with q and falls with p, so the smallest T for which all stages keep
within T is found by bisection, each stage taking as many segments as it can (`cuts_of`).

The step: every stage must do all its micro-batches, after the way to it and before the way back:

    T = max over k of  (ways to k) + M t_k + (ways back from k)                                  (3)

or a link or network card must carry its messages of all micro-batches, which may take longer;
and at the end gradients are all-reduced, stage by stage as they close, and weights updated. The
bound is the same with no ways, no messages and all devices busy all the time.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from whale.cluster.cluster import DeviceKind
from whale.planning.offload import ON_DEVICES, Offload
from whale.planning.pricing import update_seconds
from whale.planning.schedules import ACTION_S
from whale.plans.shares import Load, best_shares, shares_of_series
from whale.search.outline import Outline
from whale.search.point import Estimate, Point, Shape
from whale.search.stage_memory import OutlineMemory
from whale.search.stage_rows import PointStages, StageRow, prefix_sums
from whale.search.step_messages import StepMessages

SAME_SECONDS = 1e-4
"""the slowest stage is found to this part of its time"""
ANY_SECONDS = 1e30
"""a limit that every stage keeps that fits, whatever it sends or moves"""
NEAR_CUTS = 4
"""segments by which a cut is moved to where less crosses"""
MEMORY_PART = 0.97
"""of the memory of a device is taken to be there: an estimate may be a little low"""


@dataclass(frozen=True)
class _Devices:
    """What the bound needs of a shape."""

    numbers: tuple[int, ...]
    """devices of each of the different kinds"""
    byte_s: float
    """seconds of the all-reduce of a byte over the devices of the first stage"""


@dataclass
class Estimator:
    """Estimates for one model on one cluster."""

    outline: Outline
    recompute: bool | str | tuple[str, ...] = "auto"
    num_samples: int | None = None
    """of the mini-batch; None: all"""
    zero: int = 0
    """level of ZeRO"""
    offload: Offload = ON_DEVICES
    """what is at home elsewhere"""
    _rows: dict[frozenset[tuple[DeviceKind, int]], tuple[list[float], list[float]]] = field(
        default_factory=dict, repr=False
    )
    _bounds: dict[tuple[tuple[int, ...], int], float] = field(default_factory=dict, repr=False)
    _known: dict[Shape, _Devices] = field(default_factory=dict, repr=False)
    _last: tuple[Point, PointStages] | None = field(default=None, repr=False)

    @cached_property
    def _is_away(self) -> bool:
        """Something is at home elsewhere."""
        return self.offload.is_any

    @cached_property
    def memory(self) -> OutlineMemory:
        on_accelerators = self.outline.problem.cluster.has_accelerators_only
        homes = self.offload.as_run(on_accelerators)
        return OutlineMemory(self.outline, self.recompute, self.zero, homes)

    @cached_property
    def messages(self) -> StepMessages:
        return StepMessages(self.outline, self.memory, self.zero)

    @property
    def batch_size(self) -> int:
        return self.num_samples or self.outline.problem.batch_size

    @cached_property
    def _kinds(self) -> list[DeviceKind]:
        return [device.kind for device in self.outline.problem.cluster.devices]

    def sample_seconds(self, rank: int, num_samples: int) -> float:
        """Seconds of one sample of the whole model on a device that gets so many at once."""
        return self.outline.times(self._kinds[rank], max(1, num_samples)).total / max(
            1, num_samples
        )

    # ---- bound

    def bound(self, point: Point) -> float:
        """Seconds that no plan of these devices with so many micro-batches can beat: all of them
        busy from start to end, each sample at the best price that a device has for it.
        """
        batch_size = self.batch_size
        most = -(-batch_size // point.num_micro_batch)
        counts = self._devices(point.shape).numbers
        key = (counts, most)
        if key not in self._bounds:
            speed = 0.0
            for kind, number in zip(self._different_kinds, counts, strict=True):
                if number:
                    speed += number * most / self.outline.times(kind, most).total
            self._bounds[key] = batch_size / speed
        return self._bounds[key]

    @cached_property
    def _different_kinds(self) -> list[DeviceKind]:
        return list(dict.fromkeys(self._kinds))

    @cached_property
    def _kind_numbers(self) -> list[int]:
        """Place of the kind of every rank among the different ones."""
        numbers = {kind: number for number, kind in enumerate(self._different_kinds)}
        return [numbers[kind] for kind in self._kinds]

    def _devices(self, shape: Shape) -> _Devices:
        """Counted once for all points of a shape."""
        if shape not in self._known:
            numbers = [0] * len(self._different_kinds)
            for stages in shape.replicas:
                for ranks in stages:
                    for rank in ranks:
                        numbers[self._kind_numbers[rank]] += 1
            first = tuple(sorted(rank for stages in shape.replicas for rank in stages[0]))
            byte_s = self.messages.ring(first)[0] if len(first) > 1 else 0.0
            self._known[shape] = _Devices(tuple(numbers), byte_s)
        return self._known[shape]

    def guess(self, point: Point) -> float:
        """The bound with the time in which a pipeline of equal stages fills and drains, and with
        the all-reduce of an equal part of the gradients.
        """
        shape = point.shape
        count = point.num_micro_batch
        filling = (count + (shape.num_stages - 1) / point.num_chunks) / count
        actions = 2 * ACTION_S * count * point.num_chunks
        reduced = self._devices(shape).byte_s * self.memory.trained[-1] / shape.num_stages
        return self.bound(point) * filling + actions + 0.5 * reduced

    def can_hold(self, shape: Shape) -> bool:
        """Whether the weights of the model fit into the groups at all, each as large as the
        smallest memory in it: if not, no cut does.
        """
        if self.zero:
            return True  # by how much it is too large depends on the cut
        memory_bytes = 0.0
        is_shared = True
        for groups in zip(*shape.replicas, strict=True):
            memories = [self._kinds[rank].memory_bytes for ranks in groups for rank in ranks]
            is_shared = is_shared and len(memories) > 1
            memory_bytes += min(memory or math.inf for memory in memories)
        return self.memory.static[is_shared][-1] <= memory_bytes

    # ---- estimate

    def estimate(self, point: Point) -> Estimate:
        """Cuts and step; infinite where nothing fits."""
        cuts = self.cuts_of(point, self._ready(point).stages)
        if cuts is None:
            return Estimate(point, math.inf)
        found = self.with_cuts(point, cuts)
        thin = self._where_least_crosses(cuts)
        if thin == cuts:
            return found
        return min(found, self.with_cuts(point, thin), key=lambda each: each.step_s)

    def _where_least_crosses(self, cuts: tuple[int, ...]) -> tuple[int, ...]:
        """Cuts near to these where least crosses: these even out work and know of no messages."""
        crossing = self.memory.crossing
        found = [0]
        ends = [*cuts[1:], self.outline.num_segments]
        for cut, end in zip(cuts[1:], ends[1:], strict=True):
            near = range(max(found[-1] + 1, cut - NEAR_CUTS), min(end - 1, cut + NEAR_CUTS) + 1)
            found.append(min(near, key=lambda each: (crossing[each], abs(each - cut)), default=cut))
        return tuple(found)

    def with_cuts(self, point: Point, cuts: tuple[int, ...]) -> Estimate:
        """The estimate for given cuts."""
        ready = self._ready(point)
        stages = ready.stages
        bounds = [*cuts, self.outline.num_segments]
        parts = []
        for index, stage in enumerate(stages):
            flying = point.flying[index]
            parts.append(self.memory.recomputed(stage, bounds[index], bounds[index + 1], flying))
        if not all(math.isfinite(part) for part in parts):
            return Estimate(point, math.inf, cuts, tuple(parts))
        step_s = self._step(point, ready, bounds, parts)
        return Estimate(point, step_s, cuts, tuple(parts))

    def _ready(self, point: Point) -> PointStages:
        """What all cuts of a point have in common; of the last point that was asked for."""
        if self._last is None or self._last[0] != point:
            samples = self._samples(point)
            groups = [self._group(point, index, samples) for index in range(point.shape.num_stages)]
            stages = [groups[group] for group in point.group_of_stage]
            ranks = [group.ranks for group in groups]
            kinds = [tuple(dict.fromkeys(self._kinds[rank] for rank in own)) for own in ranks]
            boundaries = self.messages.boundaries(point, samples)
            self._last = (point, PointStages(stages, boundaries, ranks, kinds))
        return self._last[1]

    def _samples(self, point: Point) -> tuple[int, ...]:
        """Samples of the largest micro-batch for every replica, by the speed of its devices."""
        shape = point.shape
        size = -(-self.batch_size // point.num_micro_batch)
        number = shape.num_replicas
        if number == 1:
            return (size,)
        typical = max(1, size // number)
        speeds = [
            sum(1.0 / self.sample_seconds(rank, typical) for ranks in stages for rank in ranks)
            for stages in shape.replicas
        ]
        if max(speeds) <= min(speeds) * (1 + 1e-9):
            share, rest = divmod(size, number)
            return (share + 1,) * rest + (share,) * (number - rest)
        series = [[samples / speed for samples in range(size + 1)] for speed in speeds]
        least = max(len(ranks) for stages in shape.replicas for ranks in stages)
        return shares_of_series(size, series, min(least, size // number))

    def _group(self, point: Point, index: int, samples: Sequence[int]) -> StageRow:
        """One group of devices, in all replicas."""
        loads: set[tuple[DeviceKind, int]] = set()
        different = dict.fromkeys(
            (self._signature(stages[index]), share)
            for stages, share in zip(point.shape.replicas, samples, strict=True)
        )
        for kinds, share in different:
            loads |= self._loads(kinds, share)
        ranks = tuple(sorted(rank for stages in point.shape.replicas for rank in stages[index]))
        total = sum(self._kinds[rank].memory_bytes for rank in ranks)
        forward, backward = self._row(frozenset(loads))
        devices = set()
        for kind, share in loads:
            if kind.memory_bytes:
                free = MEMORY_PART * kind.memory_bytes - self.outline.batch_bytes
                # the stages of a group share its memory evenly
                free = (free - share * self.memory.workspace) / point.num_chunks
                part = kind.memory_bytes / total if self.zero else 0.0
                if self.offload.has_blocks:
                    part = 1 / len(ranks)  # memory of the devices is no reason for parts elsewhere
                devices.add((free, share, part))
        return StageRow(forward, backward, tuple(sorted(devices)), ranks)

    def _signature(self, ranks: Sequence[int]) -> tuple[DeviceKind, ...]:
        return tuple(sorted((self._kinds[rank] for rank in ranks), key=lambda kind: kind.name))

    def _loads(self, kinds: tuple[DeviceKind, ...], share: int) -> set[tuple[DeviceKind, int]]:
        """(kind, samples) of the devices of one stage of a replica with so many samples."""
        if len(set(kinds)) == 1:
            return {(kinds[0], -(-share // len(kinds)))}
        typical = max(1, share // len(kinds))
        times = {kind: self.outline.times(kind, typical).total / typical for kind in set(kinds)}
        shares = best_shares(share, [Load(times[kind]) for kind in kinds])
        return {(kind, number) for kind, number in zip(kinds, shares, strict=True) if number}

    def _row(self, loads: frozenset[tuple[DeviceKind, int]]) -> tuple[list[float], list[float]]:
        if loads not in self._rows:
            times = [self.outline.times(kind, share) for kind, share in loads]
            slowest = max(times, key=lambda each: each.total)
            self._rows[loads] = prefix_sums(slowest.forward), prefix_sums(slowest.backward)
        return self._rows[loads]

    # ---- cuts

    def cuts_of(self, point: Point, stages: Sequence[StageRow]) -> tuple[int, ...] | None:
        """First segment of every stage, for the smallest time of the slowest; None: nothing
        fits.
        """
        number = self.outline.num_segments
        if len(stages) > number:
            return None
        whole = [stage.forward[-1] + stage.backward[-1] for stage in stages]
        low = 1.0 / sum(1.0 / max(each, 1e-30) for each in whole)
        best = self._within(point, stages, ANY_SECONDS)
        if best is None:
            return None
        high = self._slowest(point, stages, best)
        while high > low * (1 + SAME_SECONDS):
            middle = math.sqrt(low * high)
            found = self._within(point, stages, middle)
            if found is None:
                low = middle
            else:
                high = self._slowest(point, stages, found)  # at most `middle`
                best = found
        return best

    def _slowest(self, point: Point, stages: Sequence[StageRow], cuts: tuple[int, ...]) -> float:
        """Seconds of the slowest stage for one micro-batch."""
        ends = [*cuts[1:], self.outline.num_segments]
        slowest = 0.0
        for stage, start, end, flying in zip(stages, cuts, ends, point.flying, strict=True):
            slowest = max(slowest, self._stage_seconds(stage, start, end, flying))
        return slowest

    def _within(
        self, point: Point, stages: Sequence[StageRow], limit: float
    ) -> tuple[int, ...] | None:
        """Cuts that keep every stage within `limit` seconds, each stage as long as it may be."""
        number = self.outline.num_segments
        cuts = []
        start = 0
        for index, stage in enumerate(stages):
            cuts.append(start)
            left = len(stages) - index - 1
            end = self._furthest(stage, start, number - left, point.flying[index], limit)
            if end == start:
                return None
            start = end
        return tuple(cuts) if start == number else None

    def _furthest(
        self, stage: StageRow, start: int, most: int, in_flight: int, limit: float
    ) -> int:
        """Where a stage ends, at most, that starts here and takes at most `limit` seconds."""
        low = start
        high = most
        if not (self.zero and stage.is_shared) and not self._is_away:
            # what is recomputed only adds to the prefix sums
            high = min(high, bisect_right(stage.both, stage.both[start] + limit) - 1)
            if high > start and self.memory.recomputed(stage, start, high, in_flight) == 0.0:
                return high
        while low < high:
            middle = (low + high + 1) // 2
            if self._stage_seconds(stage, start, middle, in_flight) <= limit:
                low = middle
            else:
                high = middle - 1
        return low

    def _stage_seconds(self, stage: StageRow, start: int, end: int, in_flight: int) -> float:
        """Seconds of a stage for one micro-batch, line (1); infinite where it does not fit."""
        part = self.memory.recomputed(stage, start, end, in_flight)
        if part == math.inf:
            return math.inf
        return sum(self._actions(stage, start, end, part))

    def _actions(
        self, stage: StageRow, start: int, end: int, recomputed: float
    ) -> tuple[float, float]:
        """Seconds of a forward and of a backward, with what ZeRO sends in them and what comes from
        elsewhere or goes there.
        """
        forward = stage.forward[end] - stage.forward[start]
        backward = stage.backward[end] - stage.backward[start] + recomputed * forward
        shares = self.zero and stage.is_shared
        if not shares and not self._is_away:
            return forward, backward
        trained = self.memory.trained_in(start, end)
        if shares:
            byte_s = self.messages.ring(stage.ranks)[0]
            zero = self.memory.zero_terms
            forward = zero.forward_s(forward, trained, byte_s)
            backward = zero.backward_s(backward, trained, byte_s)
        if self._is_away:
            samples = max((each[1] for each in stage.devices), default=0)
            saved = self.memory.saved_bytes(start, end, samples)
            terms = self.memory.offload_terms
            forward = terms.forward_s(forward, trained, saved, stage.ranks)
            backward = terms.backward_s(backward, trained, saved, stage.ranks)
        return forward, backward

    # ---- step

    def _step(
        self,
        point: Point,
        ready: PointStages,
        bounds: Sequence[int],
        parts: Sequence[float],
    ) -> float:
        """Seconds of the step by line (3), all-reduces and updates included."""
        stages = ready.stages
        forward = []
        backward = []
        for index, stage in enumerate(stages):
            own = self._actions(stage, bounds[index], bounds[index + 1], parts[index])
            forward.append(own[0])
            backward.append(own[1])
        messages, cards = self.messages.messages(ready.boundaries, bounds)
        busy = [0.0] * point.shape.num_stages
        for index, group in enumerate(point.group_of_stage):
            busy[group] += point.num_micro_batch * (forward[index] + backward[index])
        link_s = self.messages.busiest_link_seconds(point, ready.boundaries, bounds)
        longest = point.num_micro_batch * max([link_s, *cards.values()])
        way = 0.0
        for index in range(point.shape.num_stages):  # the first stage of every group
            longest = max(longest, way + busy[index])
            if index < len(messages):
                way += forward[index] + backward[index] + 2 * messages[index]
        # a stage closes when what comes after its last backward is done elsewhere
        closes = []
        tail = 0.0
        for index in range(len(stages)):
            closes.append(longest - tail)
            tail += backward[index] + (messages[index] if index < len(messages) else 0.0)
        end_s = self.messages.reduced(point, ready, bounds, closes, backward)
        # as a draft is scored (`drafting.py`): what the runtime adds counts on the busiest rank
        actions_s = 2 * ACTION_S * point.num_micro_batch * point.num_chunks
        return end_s + self._update(point, ready, bounds) + actions_s

    def _update(self, point: Point, ready: PointStages, bounds: Sequence[int]) -> float:
        """Seconds of the optimizer on the slowest device."""
        ratio = self.outline.problem.optimizer_ratio
        work = self.outline.problem.update_work
        trained = [0.0] * point.shape.num_stages
        for index, group in enumerate(point.group_of_stage):
            trained[group] += (
                self.memory.trained[bounds[index + 1]] - self.memory.trained[bounds[index]]
            )
        slowest = 0.0
        for group, num_bytes in enumerate(trained):
            ranks = ready.ranks[group]
            shared = num_bytes if len(ranks) > 1 else 0.0
            for kind in ready.kinds[group]:
                seconds = update_seconds(int(num_bytes), int(shared), 1, ratio, kind, work)
                if self.zero:
                    seconds /= len(ranks)
                if self.offload.has_blocks:
                    seconds = self.memory.offload_terms.update_s(num_bytes, ranks, seconds)
                slowest = max(slowest, seconds)
        return slowest
