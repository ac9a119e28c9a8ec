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

and at the end gradients are all-reduced, stage by stage as they close, and weights updated. The
bound is the same with no ways, no messages and all devices busy all the time.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from whale.cluster.cluster import DeviceKind
from whale.planning.pricing import update_seconds
from whale.planning.schedules import ACTION_S
from whale.plans.shares import Load, best_shares, shares_of_series
from whale.search.crossing import Boundary, Crossing, boundary_of, crossing_of
from whale.search.outline import Floats, Outline
from whale.search.point import Estimate, Point, Shape
from whale.search.zero_terms import ZeroTerms
from whale.simulation.communication import all_reduce_seconds

SAME_SECONDS = 1e-4
"""the slowest stage is found to this part of its time"""
MOST_REGIONS = 16
"""parts of a stage that are recomputed one after the other, as far as the estimate goes"""
MEMORY_PART = 0.97
"""of the memory of a device is taken to be there: an estimate may be a little low"""


@dataclass
class _Stage:
    """One stage in all replicas: prefix sums over the segments of its slowest device."""

    forward: list[float]
    backward: list[float]
    devices: tuple[tuple[float, int, float], ...]
    """(bytes for weights and for what is saved, samples, part of what ZeRO cuts) of every different
    device
    """
    ranks: tuple[int, ...]

    @cached_property
    def is_shared(self) -> bool:
        return len(self.ranks) > 1

    @cached_property
    def both(self) -> list[float]:
        """Forward and backward together."""
        return [sum(each) for each in zip(self.forward, self.backward, strict=True)]


@dataclass(frozen=True)
class _Ready:
    """What does not depend on the cuts of a point."""

    stages: Sequence[_Stage]
    boundaries: Sequence[Boundary]
    ranks: Sequence[tuple[int, ...]]
    """of every group of devices, over all replicas"""
    kinds: Sequence[tuple[DeviceKind, ...]]
    """different ones of every group"""


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
    _rows: dict[frozenset[tuple[DeviceKind, int]], tuple[list[float], list[float]]] = field(
        default_factory=dict, repr=False
    )
    _bounds: dict[tuple[tuple[int, ...], int], float] = field(default_factory=dict, repr=False)
    _rings: dict[tuple[int, ...], tuple[float, float, list[tuple[str, float]]]] = field(
        default_factory=dict, repr=False
    )
    _crossings: dict[tuple[tuple[int, ...], tuple[int, ...]], Crossing] = field(
        default_factory=dict, repr=False
    )
    _known: dict[Shape, _Devices] = field(default_factory=dict, repr=False)
    _last: tuple[Point, _Ready] | None = field(default=None, repr=False)

    @property
    def batch_size(self) -> int:
        return self.num_samples or self.outline.problem.batch_size

    @cached_property
    def _kinds(self) -> list[DeviceKind]:
        return [device.kind for device in self.outline.problem.cluster.devices]

    @cached_property
    def _overlaps(self) -> bool:
        return not any(kind.is_cpu for kind in self._kinds)

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
        """Of every rank, the place of its kind among the different ones."""
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
            byte_s = self._ring(first)[0] if len(first) > 1 else 0.0
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
        reduced = self._devices(shape).byte_s * self._trained[-1] / shape.num_stages
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
        return self._static[is_shared][-1] <= memory_bytes

    # ---- estimate

    def estimate(self, point: Point) -> Estimate:
        """Cuts and step; infinite where nothing fits."""
        cuts = self.cuts_of(point, self._ready(point).stages)
        if cuts is None:
            return Estimate(point, math.inf)
        return self.with_cuts(point, cuts)

    def with_cuts(self, point: Point, cuts: tuple[int, ...]) -> Estimate:
        """The estimate for given cuts."""
        ready = self._ready(point)
        stages = ready.stages
        bounds = [*cuts, self.outline.num_segments]
        parts = []
        for index, stage in enumerate(stages):
            flying = point.flying[index]
            parts.append(self._recomputed(stage, bounds[index], bounds[index + 1], flying))
        if not all(math.isfinite(part) for part in parts):
            return Estimate(point, math.inf, cuts, tuple(parts))
        step_s = self._step(point, ready, bounds, parts)
        return Estimate(point, step_s, cuts, tuple(parts))

    def _ready(self, point: Point) -> _Ready:
        """What all cuts of a point have in common; of the last point that was asked for."""
        if self._last is None or self._last[0] != point:
            samples = self._samples(point)
            groups = [self._group(point, index, samples) for index in range(point.shape.num_stages)]
            stages = [groups[group] for group in point.group_of_stage]
            ranks = [group.ranks for group in groups]
            kinds = [tuple(dict.fromkeys(self._kinds[rank] for rank in own)) for own in ranks]
            boundaries = self._boundaries(point, samples)
            self._last = (point, _Ready(stages, boundaries, ranks, kinds))
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

    def _group(self, point: Point, index: int, samples: Sequence[int]) -> _Stage:
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
                free = (free - share * self._workspace) / point.num_chunks
                part = kind.memory_bytes / total if self.zero else 0.0
                devices.add((free, share, part))
        return _Stage(forward, backward, tuple(sorted(devices)), ranks)

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
            self._rows[loads] = _sums(slowest.forward), _sums(slowest.backward)
        return self._rows[loads]

    # ---- memory

    @cached_property
    def _saved(self) -> tuple[list[float], list[float]]:
        return _sums(self.outline.saved_fixed_bytes), _sums(self.outline.saved_sample_bytes)

    @cached_property
    def _static(self) -> tuple[list[float], list[float]]:
        """Without and with buckets for gradients that are all-reduced."""
        return _sums(self.outline.static_bytes(False)), _sums(self.outline.static_bytes(True))

    @cached_property
    def _workspace(self) -> float:
        return float(self.outline.workspace_sample_bytes.max(initial=0.0))

    @cached_property
    def _crossing(self) -> list[float]:
        return [float(each) for each in self.outline.crossing_bytes]

    def _static_bytes(self, stage: _Stage, start: int, end: int, part: float) -> float:
        """`part`: of what ZeRO cuts, on this device."""
        sums = self._static[stage.is_shared]
        static = sums[end] - sums[start] + self.outline.largest_weight_bytes
        if self.zero and stage.is_shared:
            others = self._others[end] - self._others[start] + self.outline.largest_weight_bytes
            return others + self._zero_terms.held_bytes(self._trained_in(start, end), part)
        for tied in self.outline.tied:
            is_held = any(start <= segment < end for segment in tied.segments)
            if is_held and not start <= tied.segments[0] < end:
                static += self.outline.tied_bytes(tied)
        return static

    def _recomputed(self, stage: _Stage, start: int, end: int, in_flight: int) -> float:
        """Part of a stage that is recomputed, by line (2); infinity where even all is too little."""
        if not stage.devices:
            return 1.0 if self.recompute is True else 0.0
        fixed, per_sample = self._saved
        part = 1.0 if self.recompute is True else 0.0
        crossing = self._crossing[start] or self._crossing[end]
        static_bytes: dict[float, float] = {}
        for free, samples, held in stage.devices:
            if held not in static_bytes:
                static_bytes[held] = self._static_bytes(stage, start, end, held)
            left_bytes = free - static_bytes[held]
            saved = fixed[end] - fixed[start] + samples * (per_sample[end] - per_sample[start])
            if left_bytes >= in_flight * saved and part == 0.0:
                continue
            if self.recompute is False or left_bytes <= 0:
                return math.inf
            # regions are recomputed one after the other: each saves what enters it
            entering = max(1.0, in_flight * samples * crossing)
            regions = min(max(1.0, math.sqrt(saved / entering)), MOST_REGIONS, end - start)
            least = regions * entering + saved / regions
            if least > left_bytes:
                return math.inf
            spare = in_flight * saved - least
            needed = (in_flight * saved - left_bytes) / spare if spare > 0 else 0.0
            part = max(part, min(1.0, needed))
        return part

    # ---- cuts

    def cuts_of(self, point: Point, stages: Sequence[_Stage]) -> tuple[int, ...] | None:
        """First segment of every stage, for the smallest time of the slowest; None: nothing
        fits.
        """
        number = self.outline.num_segments
        if len(stages) > number:
            return None
        whole = [stage.forward[-1] + stage.backward[-1] for stage in stages]
        low = 1.0 / sum(1.0 / max(each, 1e-30) for each in whole)
        best = self._within(point, stages, 3.0 * max(whole))
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

    def _slowest(self, point: Point, stages: Sequence[_Stage], cuts: tuple[int, ...]) -> float:
        """Seconds of the slowest stage for one micro-batch."""
        ends = [*cuts[1:], self.outline.num_segments]
        slowest = 0.0
        for stage, start, end, flying in zip(stages, cuts, ends, point.flying, strict=True):
            slowest = max(slowest, self._stage_seconds(stage, start, end, flying))
        return slowest

    def _within(
        self, point: Point, stages: Sequence[_Stage], limit: float
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

    def _furthest(self, stage: _Stage, start: int, most: int, in_flight: int, limit: float) -> int:
        """Where a stage ends, at most, that starts here and takes at most `limit` seconds."""
        low, high = start, most
        if not (self.zero and stage.is_shared):
            # what is recomputed and what ZeRO sends only add to the prefix sums
            high = min(high, bisect_right(stage.both, stage.both[start] + limit) - 1)
            if high > start and self._recomputed(stage, start, high, in_flight) == 0.0:
                return high
        while low < high:
            middle = (low + high + 1) // 2
            if self._stage_seconds(stage, start, middle, in_flight) <= limit:
                low = middle
            else:
                high = middle - 1
        return low

    def _stage_seconds(self, stage: _Stage, start: int, end: int, in_flight: int) -> float:
        """Line (1)."""
        part = self._recomputed(stage, start, end, in_flight)
        if part == math.inf:
            return math.inf
        return sum(self._actions(stage, start, end, part))

    def _actions(
        self, stage: _Stage, start: int, end: int, recomputed: float
    ) -> tuple[float, float]:
        """Seconds of a forward and of a backward, with what ZeRO sends in them."""
        forward = stage.forward[end] - stage.forward[start]
        backward = stage.backward[end] - stage.backward[start] + recomputed * forward
        if not self.zero or not stage.is_shared:
            return forward, backward
        trained = self._trained_in(start, end)
        byte_s = self._ring(stage.ranks)[0]
        terms = self._zero_terms
        return (
            terms.forward_s(forward, trained, byte_s),
            terms.backward_s(backward, trained, byte_s),
        )

    @cached_property
    def _zero_terms(self) -> ZeroTerms:
        ratio = self.outline.problem.optimizer_ratio
        return ZeroTerms(self.zero, ratio, self.outline.largest_layer_bytes, self._overlaps)

    @cached_property
    def _others(self) -> list[float]:
        return _sums(self.outline.other_bytes)

    def _trained_in(self, start: int, end: int) -> float:
        """Bytes of parameters with a gradient that these segments are the first to read."""
        return self._trained[end] - self._trained[start]

    # ---- step

    def _step(
        self,
        point: Point,
        ready: _Ready,
        bounds: Sequence[int],
        parts: Sequence[float],
    ) -> float:
        """Seconds of the step by line (3), all-reduces and updates included."""
        stages = ready.stages
        forward = []
        backward = []
        for index, stage in enumerate(stages):
            own = self._actions(stage, bounds[index], bounds[index + 1], parts[index])
            forward.append(own[0] + ACTION_S)
            backward.append(own[1] + ACTION_S)
        messages, cards = self._messages(ready.boundaries, bounds)
        busy = [0.0] * point.shape.num_stages
        for index, group in enumerate(point.group_of_stage):
            busy[group] += point.num_micro_batch * (forward[index] + backward[index])
        longest = max(cards.values(), default=0.0) * point.num_micro_batch
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
        end_s = self._reduced(point, ready, bounds, closes, backward)
        return end_s + self._update(point, ready, bounds)

    def _messages(
        self, boundaries: Sequence[Boundary], bounds: Sequence[int]
    ) -> tuple[list[float], dict[str, float]]:
        """Seconds of a message behind every stage but the last, and for every host the seconds that
        its network card is taken by one micro-batch.
        """
        seconds = []
        cards: dict[str, float] = {}
        for index, boundary in enumerate(boundaries):
            crossing = self._crossing[bounds[index + 1]]
            for host, taken in boundary.card_seconds.items():
                cards[host] = cards.get(host, 0.0) + taken * crossing
            seconds.append(boundary.seconds(crossing))
        return seconds, cards

    def _boundaries(self, point: Point, samples: Sequence[int]) -> list[Boundary]:
        """What is sent behind every stage but the last."""
        found: list[Boundary] = []
        for source, destination in pairwise(point.group_of_stage):
            crossings = []
            for stages, share in zip(point.shape.replicas, samples, strict=True):
                if source != destination:  # else the turn of a wave
                    crossings.append((self._between(stages[source], stages[destination]), share))
            found.append(boundary_of(crossings))
        return found

    def _between(self, here: tuple[int, ...], there: tuple[int, ...]) -> Crossing:
        key = (here, there)
        if key not in self._crossings:
            self._crossings[key] = crossing_of(here, there, self.outline.problem.cluster.network)
        return self._crossings[key]

    def _ring(self, ranks: tuple[int, ...]) -> tuple[float, float, list[tuple[str, float]]]:
        """(seconds of a byte, of a bucket, [(host, seconds of a byte on its card)])"""
        if ranks not in self._rings:
            network = self.outline.problem.cluster.network
            unit = 1e9
            fixed, _ = all_reduce_seconds(0.0, 1, ranks, network)
            both, leaving = all_reduce_seconds(unit, 1, ranks, network)
            cards = [(host, seconds / unit) for host, seconds in leaving]
            self._rings[ranks] = (both - fixed) / unit, fixed, cards
        return self._rings[ranks]

    def _reduced(
        self,
        point: Point,
        ready: _Ready,
        bounds: Sequence[int],
        closes: Sequence[float],
        backward: Sequence[float],
    ) -> float:
        """When the last all-reduce has ended; the stages close from the last to the first."""
        sums = self._trained if point.shape.num_replicas > 1 else self._whole_trained
        bucket_bytes = self.outline.problem.config.bucket_bytes
        free: dict[str, float] = {}
        end_s = max(closes)
        groups = point.group_of_stage
        all_ranks = ready.ranks
        wanted = [
            (index, all_ranks[groups[index]], sums[bounds[index + 1]] - sums[bounds[index]])
            for index in reversed(range(len(groups)))
        ]
        for tied in self.outline.tied:
            held = [
                index
                for index in range(len(groups))
                if any(bounds[index] <= segment < bounds[index + 1] for segment in tied.segments)
            ]
            owners = {groups[index] for index in held}
            if len(owners) > 1:
                members = tuple(sorted(rank for owner in owners for rank in all_ranks[owner]))
                wanted.append((held[0], members, float(tied.trained_bytes)))
        left = self._zero_terms.left_to_reduce if self.zero else 1.0
        for index, ranks, num_bytes in wanted:
            if len(ranks) < 2 or not num_bytes or not left:
                continue
            byte_s, bucket_s, cards = self._ring(ranks)
            buckets = max(1, math.ceil(num_bytes / bucket_bytes)) if self._overlaps else 1
            seconds = (num_bytes * byte_s + buckets * bucket_s) * left
            ready_s = closes[index] - backward[index] * (1 - 1 / buckets)
            start = max([ready_s, *(free.get(host, 0.0) for host, _ in cards)])
            end = max(start + seconds, closes[index] + seconds / buckets)
            for host, each in cards:
                free[host] = max(start, free.get(host, 0.0)) + left * num_bytes * each
                end = max(end, free[host])
            end_s = max(end_s, end)
        return end_s

    def whole_reduced_seconds(self, ranks: tuple[int, ...]) -> float:
        """Seconds of an all-reduce of all gradients over these ranks."""
        if len(ranks) < 2:
            return 0.0
        byte_s, bucket_s, _ = self._ring(ranks)
        return self._trained[-1] * byte_s + bucket_s

    @cached_property
    def _whole_trained(self) -> list[float]:
        return _sums(self.outline.whole_trained_bytes)

    @cached_property
    def _trained(self) -> list[float]:
        return _sums(self.outline.trained_bytes)

    def _update(self, point: Point, ready: _Ready, bounds: Sequence[int]) -> float:
        """Seconds of the optimizer on the slowest device."""
        ratio = self.outline.problem.optimizer_ratio
        work = self.outline.problem.update_work
        trained = [0.0] * point.shape.num_stages
        for index, group in enumerate(point.group_of_stage):
            trained[group] += self._trained[bounds[index + 1]] - self._trained[bounds[index]]
        slowest = 0.0
        for group, num_bytes in enumerate(trained):
            ranks = ready.ranks[group]
            shared = num_bytes if len(ranks) > 1 else 0.0
            for kind in ready.kinds[group]:
                seconds = update_seconds(int(num_bytes), int(shared), 1, ratio, kind, work)
                if self.zero:
                    seconds /= len(ranks)
                slowest = max(slowest, seconds)
        return slowest


def _sums(values: Floats) -> list[float]:
    """Prefix sums, from 0."""
    found = [0.0]
    for value in values.tolist():
        found.append(found[-1] + value)
    return found
