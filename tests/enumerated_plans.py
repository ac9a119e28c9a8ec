"""Every candidate of a small case, by brute force: which devices take part, model replicas alike or
not, stages of any width in any order, every cut, every number of micro-batches.

Devices that nothing tells apart (kind, host) are interchangeable, so each arrangement comes once.
All that could be faster than a given time is drafted and simulated, as the search does it; what a
lower bound proves to be slower is not. For b samples of a replica in M micro-batches, stage s works
at least until

    M I_s(b / M) + b / M (sum over earlier stages t of w_t)                                     (1)

where I_s(n) are the seconds of the busiest device when n whole samples are shared as well as can be,
and w_t those of one sample on all devices of t together (the first micro-batch must come to s, the
last must go back; the messages between count as w). Then the gradients of what s holds are
all-reduced over whoever holds them, unless they are so many that this begins earlier, and the weights
are updated. All replicas share the B samples of a mini-batch as well as whole samples can be.
`faster_than` checks the bound against every score that it sees.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from whale.planning.pricing import update_seconds
from whale.planning.problem import Problem
from whale.planning.schedules import ACTION_S
from whale.search.candidate import Candidate, DeviceGroup, MemoryChoice, ReplicaChoice
from whale.search.drafting import Drafted, Drafting
from whale.search.outline import Outline
from whale.simulation.communication import all_reduce_seconds

FORWARD = 0.25
"""of a forward and backward, less than what a forward takes: of a replica whose samples do not divide
into its micro-batches the first ones are larger, so only their way to a stage is surely as long
"""
Label = tuple[str, str]
"""kind and host of a device"""
Stages = tuple[tuple[int, ...], ...]
"""the ranks of every stage of a replica"""


@dataclass(frozen=True)
class Option:
    """One way to run one model replica."""

    stages: Stages
    cuts: tuple[int, ...]
    """first segment of every stage"""
    num_micro_batch: int
    seconds: tuple[tuple[float, ...], ...] = ()
    """[stage][samples of the replica]: by line (1)"""

    @property
    def least(self) -> int:
        """Samples that it needs: one for each micro-batch and device of a stage."""
        return self.num_micro_batch * max(map(len, self.stages))

    def series(self, after_s: Sequence[float]) -> list[float]:
        """Seconds for any number of samples or more. `after_s`: what follows each stage."""
        found = []
        for samples in range(len(self.seconds[0])):
            times = [own[samples] + after for own, after in zip(self.seconds, after_s, strict=True)]
            found.append(max(times))
        for samples in reversed(range(len(found) - 1)):
            found[samples] = min(found[samples], found[samples + 1])
        return found


@dataclass(frozen=True)
class EnumeratedPlans:
    """The candidates of one problem."""

    problem: Problem
    counts: tuple[int, ...]
    """numbers of micro-batches"""
    has_unlike: bool
    """also model replicas that are not alike"""

    def faster_than(self, limit_s: float) -> tuple[Drafted | None, int]:
        """The first candidate found with a score below `limit_s`, and how many were drafted."""
        drafting = Drafting(self.problem, self.outline)
        number = 0
        for bound_s, candidate in sorted(self.candidates(limit_s), key=lambda each: each[0]):
            try:
                drafted = drafting.draft(candidate)
            except ValueError:  # does not fit, or may not be cut so
                continue
            number += 1
            assert bound_s <= drafted.score_s * (1 + 1e-9), f"no bound: {candidate.describe()}"
            if drafted.score_s < limit_s:
                return drafted, number
        return None, number

    def candidates(self, limit_s: float) -> Iterator[tuple[float, Candidate]]:
        """(lower bound of the score, candidate) of all that may be below the limit."""
        for ranks in self._subsets():
            yield from self._alike(ranks, limit_s)
            if self.has_unlike and len(ranks) > 1:
                yield from self._unlike(ranks, limit_s)

    # ---- what the bound needs

    @cached_property
    def outline(self) -> Outline:
        return Outline(self.problem)

    @cached_property
    def _labels(self) -> list[Label]:
        return [(device.kind.name, device.host) for device in self.problem.cluster.devices]

    @cached_property
    def _sums(self) -> list[list[float]]:
        """[rank][segment]: seconds of a sample up to there, forward and backward, at the best
        price of any number of samples.
        """
        found: dict[str, list[float]] = {}
        for device in self.problem.cluster.devices:
            if device.kind.name in found:
                continue
            best = [math.inf] * self.outline.num_segments
            for samples in range(1, self.problem.batch_size + 1):
                times = self.outline.times(device.kind, samples)
                for place, each in enumerate((times.forward + times.backward).tolist()):
                    best[place] = min(best[place], each / samples)
            found[device.kind.name] = [0.0, *itertools.accumulate(best)]
        return [found[device.kind.name] for device in self.problem.cluster.devices]

    @cached_property
    def _trained(self) -> list[float]:
        return [0.0, *itertools.accumulate(self.outline.trained_bytes.tolist())]

    def _sample_s(self, ranks: Sequence[int], start: int, end: int) -> float:
        """Seconds of a sample on these devices together."""
        speed = 0.0
        for rank in ranks:
            seconds = self._sums[rank][end] - self._sums[rank][start]
            if seconds <= 0:
                return 0.0
            speed += 1 / seconds
        return 1 / speed

    def _shared_s(self, ranks: tuple[int, ...], start: int, end: int, samples: int) -> float:
        """Seconds of the busiest of these devices when whole samples are shared by speed."""
        key = (ranks, start, end, samples)
        if key not in self._known_shared:
            series = []
            for rank in ranks:
                own = self._sums[rank][end] - self._sums[rank][start]
                series.append([number * own for number in range(samples + 1)])
            self._known_shared[key] = _least_slowest(series, samples, [0] * len(ranks))
        return self._known_shared[key]

    @cached_property
    def _known_shared(self) -> dict[tuple[tuple[int, ...], int, int, int], float]:
        return {}

    @cached_property
    def _known_after(self) -> dict[tuple[frozenset[int], int, int], float]:
        return {}

    def _after_s(self, ranks: Sequence[int], start: int, end: int) -> float:
        """Seconds of the all-reduce over these devices and of the update of what segments train."""
        key = (frozenset(ranks), start, end)
        if key not in self._known_after:
            own_s = self._reduced_s(ranks, start, end) + self._update_s(ranks, start, end)
            self._known_after[key] = own_s
        return self._known_after[key]

    @cached_property
    def _known_least_after(self) -> dict[tuple[tuple[int, ...], int, int], float]:
        return {}

    def _least_after_s(self, ranks: tuple[int, ...], start: int, end: int) -> float:
        """The same for a stage of one of several replicas, whatever the others are: at least one
        more device holds each of its segments.
        """
        key = (ranks, start, end)
        if key not in self._known_least_after:
            found = 0.0
            others = [r for r in range(self.problem.cluster.num_devices) if r not in ranks]
            more = [
                each
                for number in range(1, len(others) + 1)
                for each in itertools.combinations(others, number)
            ]
            for segment in range(start, end):
                times = [self._after_s((*ranks, *each), segment, segment + 1) for each in more]
                found = max(found, min(times, default=0.0))
            is_early = self._trained[end] - self._trained[start] > self.problem.config.bucket_bytes
            self._known_least_after[key] = 0.0 if is_early else found
        return self._known_least_after[key]

    def _reduced_s(self, ranks: Sequence[int], start: int, end: int) -> float:
        """Seconds of the all-reduce of what these segments train; 0 where it may begin early."""
        num_bytes = self._trained[end] - self._trained[start]
        if len(ranks) < 2 or not num_bytes or num_bytes > self.problem.config.bucket_bytes:
            return 0.0
        network = self.problem.cluster.network
        return all_reduce_seconds(num_bytes, 1, tuple(sorted(ranks)), network)[0]

    def _message_s(self, here: Sequence[int], there: Sequence[int], cut: int) -> float:
        """Seconds of a sample on its way to the next stage and of its gradient on the way back, at
        least: all pairs of devices send at the same time, at the rate of the best link.
        """
        network = self.problem.cluster.network
        rate = max(network.link(a, b).bytes_per_s for a in here for b in there)
        pairs = len(here) * len(there)
        return 2 * float(self.outline.crossing_bytes[cut]) / (rate * pairs)

    def _update_s(self, ranks: Sequence[int], start: int, end: int) -> float:
        """Seconds of the update of what these segments train on the slowest of these devices."""
        num_bytes = int(self._trained[end] - self._trained[start])
        problem = self.problem
        kinds = {problem.cluster.devices[rank].kind for rank in ranks}
        ratio = problem.optimizer_ratio
        work = problem.update_work
        return max(update_seconds(num_bytes, 0, 1, ratio, kind, work) for kind in kinds)

    # ---- devices

    def _subsets(self) -> list[tuple[int, ...]]:
        """Ranks that take part, once for devices that nothing tells apart."""
        found: dict[tuple[Label, ...], tuple[int, ...]] = {}
        everything = range(self.problem.cluster.num_devices)
        for number in everything:
            for ranks in itertools.combinations(everything, number + 1):
                found.setdefault(tuple(sorted(self._labels[rank] for rank in ranks)), ranks)
        return list(found.values())

    def _orders(self, ranks: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """The ranks in every order that differs."""
        for labels in set(itertools.permutations(self._labels[rank] for rank in ranks)):
            left = {
                label: [each for each in ranks if self._labels[each] == label] for label in labels
            }
            yield tuple(left[label].pop(0) for label in labels)

    def _named(self, stages: Stages) -> tuple[tuple[Label, ...], ...]:
        return tuple(tuple(sorted(self._labels[rank] for rank in each)) for each in stages)

    # ---- alike replicas

    def _alike(self, ranks: tuple[int, ...], limit_s: float) -> Iterator[tuple[float, Candidate]]:
        seen = set()
        for order in sorted(self._orders(ranks)):
            for num_replicas in range(1, len(ranks) + 1):
                size, rest = divmod(len(ranks), num_replicas)
                if rest:
                    continue
                for edges in _edges(size):
                    replicas = []
                    for first in range(0, len(ranks), size):
                        own = order[first : first + size]
                        pairs = itertools.pairwise(edges)
                        replicas.append(tuple(tuple(sorted(own[a:b])) for a, b in pairs))
                    key = tuple(sorted(map(self._named, replicas)))
                    if key not in seen:
                        seen.add(key)
                        yield from self._with_cuts(replicas, limit_s)

    def _with_cuts(
        self, replicas: Sequence[Stages], limit_s: float
    ) -> Iterator[tuple[float, Candidate]]:
        widest = max(sum(map(len, stage)) for stage in zip(*replicas, strict=True))
        for count in self.counts:
            if count * widest > self.problem.batch_size:
                continue
            for bound_s, cuts in self._cuts(replicas, count, limit_s):
                options = [Option(stages, cuts, count) for stages in replicas]
                yield bound_s, self._candidate(options)

    def _cuts(
        self, replicas: Sequence[Stages], count: int, limit_s: float
    ) -> Iterator[tuple[float, tuple[int, ...]]]:
        """(bound, cuts) of alike replicas below the limit, stage by stage."""
        number = self.outline.num_segments
        num_stages = len(replicas[0])
        actions_s = 2 * count * ACTION_S

        def next_cut(
            cuts: tuple[int, ...], before: Sequence[float], least_s: float
        ) -> Iterator[tuple[float, tuple[int, ...]]]:
            stage = len(cuts) - 1
            start = cuts[-1]
            is_last = stage == num_stages - 1
            for end in range(number if is_last else start + 1, number + 1):
                own = [self._sample_s(each[stage], start, end) for each in replicas]
                samples = self.problem.batch_size // count
                series = []
                for stages, way in zip(replicas, before, strict=True):
                    times = []
                    for share in range(samples + 1):
                        shared_s = self._shared_s(stages[stage], start, end, share)
                        times.append(count * (shared_s + way * share))
                    series.append(times)
                work_s = _least_slowest(series, samples, [0] * len(series))
                holders = [rank for each in replicas for rank in each[stage]]
                bound_s = work_s + self._after_s(holders, start, end) + actions_s
                if bound_s >= limit_s:
                    continue
                bound_s = max(bound_s, least_s)
                if is_last:
                    yield bound_s, cuts
                elif number - end >= num_stages - stage - 1:
                    way = []
                    for stages, a, b in zip(replicas, before, own, strict=True):
                        sent = self._message_s(stages[stage], stages[stage + 1], end)
                        way.append(a + (b + sent) / count)
                    yield from next_cut((*cuts, end), way, bound_s)

        yield from next_cut((0,), [0.0] * len(replicas), 0.0)

    # ---- replicas that are not alike

    def _unlike(self, ranks: tuple[int, ...], limit_s: float) -> Iterator[tuple[float, Candidate]]:
        for blocks in self._partitions(ranks):
            options = [self._options(block, limit_s) for block in blocks]
            if all(options):
                yield from self._combined(options, limit_s)

    def _partitions(self, ranks: tuple[int, ...]) -> list[tuple[tuple[int, ...], ...]]:
        found = {}
        for blocks in _set_partitions(list(ranks)):
            if len(blocks) > 1:
                key = tuple(sorted(tuple(sorted(self._labels[r] for r in each)) for each in blocks))
                found.setdefault(key, tuple(tuple(each) for each in blocks))
        return list(found.values())

    @cached_property
    def _known_options(self) -> dict[tuple[int, ...], list[Option]]:
        return {}

    def _options(self, ranks: tuple[int, ...], limit_s: float) -> list[Option]:
        """Every way to run one replica on these devices, the fastest first."""
        if ranks in self._known_options:
            return self._known_options[ranks]
        found: dict[object, Option] = {}
        for order in sorted(self._orders(ranks)):
            for edges in _edges(len(ranks)):
                stages = tuple(tuple(sorted(order[a:b])) for a, b in itertools.pairwise(edges))
                widest = max(map(len, stages))
                inner = range(1, self.outline.num_segments)
                for cuts in itertools.combinations(inner, len(stages) - 1):
                    for count in self.counts:
                        key = (self._named(stages), cuts, count)
                        if count * widest >= self.problem.batch_size or key in found:
                            continue
                        seconds = self._seconds(stages, (0, *cuts), count)
                        option = Option(stages, (0, *cuts), count, seconds)
                        if self._most(option, limit_s) >= option.least:
                            found[key] = option
        options = sorted(found.values(), key=lambda each: -self._most(each, limit_s))
        self._known_options[ranks] = options
        return options

    def _seconds(
        self, stages: Stages, cuts: tuple[int, ...], count: int
    ) -> tuple[tuple[float, ...], ...]:
        """Line (1) for every stage and every number of samples."""
        bounds = (*cuts, self.outline.num_segments)
        found = []
        way = 0.0
        for stage, ranks in enumerate(stages):
            start, end = bounds[stage], bounds[stage + 1]
            times = []
            for samples in range(self.problem.batch_size + 1):
                if samples % count:
                    shared_s = self._shared_s(ranks, start, end, samples)
                    times.append(shared_s + FORWARD * way * samples)
                else:
                    shared_s = self._shared_s(ranks, start, end, samples // count)
                    times.append(count * shared_s + way * samples)
            found.append(tuple(times))
            if stage + 1 < len(stages):
                sent = self._message_s(ranks, stages[stage + 1], end)
                way += (self._sample_s(ranks, start, end) + sent) / count
        return tuple(found)

    def _most(self, option: Option, limit_s: float) -> int:
        """Samples that it may do within the limit."""
        limit_s -= 2 * option.num_micro_batch * ACTION_S
        bounds = (*option.cuts, self.outline.num_segments)
        after_s = []
        for ranks, start, end in zip(option.stages, bounds, bounds[1:], strict=False):
            after_s.append(self._least_after_s(ranks, start, end))
        times = option.series(after_s)
        return max((number for number, each in enumerate(times) if each < limit_s), default=0)

    def _combined(
        self, options: Sequence[Sequence[Option]], limit_s: float
    ) -> Iterator[tuple[float, Candidate]]:
        """One option for each block, of those that do all samples in time together."""
        batch_size = self.problem.batch_size
        most = [[self._most(option, limit_s) for option in each] for each in options]
        most_after = [sum(each[0] for each in most[place + 1 :]) for place in range(len(options))]

        def next_block(chosen: tuple[Option, ...], samples: int) -> Iterator[tuple[Option, ...]]:
            place = len(chosen)
            if place == len(options):
                yield chosen
                return
            for option, own in zip(options[place], most[place], strict=True):
                if samples + own + most_after[place] < batch_size:
                    return
                yield from next_block((*chosen, option), samples + own)

        seen = set()
        for chosen in next_block((), 0):
            first = chosen[0]
            if all(_is_like(first, option) for option in chosen):
                continue
            key = tuple(sorted((self._named(o.stages), o.cuts, o.num_micro_batch) for o in chosen))
            if key in seen:
                continue
            seen.add(key)
            bound_s = self._bound(chosen)
            if bound_s < limit_s:
                yield bound_s, self._candidate(chosen)

    def _bound(self, chosen: Sequence[Option]) -> float:
        """Line (1) with the all-reduce and the update of what each stage holds."""
        number = self.outline.num_segments
        edges = sorted({cut for option in chosen for cut in option.cuts} | {number})
        after_s = [[0.0] * len(option.stages) for option in chosen]
        for start, end in itertools.pairwise(edges):
            places = []
            holders: list[int] = []
            for option in chosen:
                stage = max(s for s, cut in enumerate(option.cuts) if cut <= start)
                places.append(stage)
                holders += option.stages[stage]
            own_s = self._after_s(holders, start, end)
            for after, stage in zip(after_s, places, strict=True):
                after[stage] = max(after[stage], own_s)
        series = [option.series(after) for option, after in zip(chosen, after_s, strict=True)]
        least = [option.least for option in chosen]
        actions_s = max(2 * option.num_micro_batch * ACTION_S for option in chosen)
        return _least_slowest(series, self.problem.batch_size, least) + actions_s

    # ---- candidates

    def _candidate(self, options: Sequence[Option]) -> Candidate:
        replicas = []
        for option in options:
            groups = tuple(map(DeviceGroup, option.stages))
            starts = self.outline.starts(option.cuts)
            replicas.append(ReplicaChoice(groups, option.num_micro_batch, "1f1b", starts=starts))
        return Candidate(tuple(replicas), MemoryChoice(recompute=False))


def _is_like(one: Option, other: Option) -> bool:
    """Whether both run the same stages: such replicas are enumerated as alike ones."""
    return (
        one.cuts == other.cuts
        and one.num_micro_batch == other.num_micro_batch
        and [len(ranks) for ranks in one.stages] == [len(ranks) for ranks in other.stages]
    )


def _edges(number: int) -> Iterator[tuple[int, ...]]:
    """Where stages begin, and the end, for every way to cut so many devices."""
    for num_inner in range(number):
        for inner in itertools.combinations(range(1, number), num_inner):
            yield (0, *inner, number)


def _set_partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Every way to put items into blocks."""
    if not items:
        yield []
        return
    first, *rest = items
    for blocks in _set_partitions(rest):
        yield [[first], *blocks]
        for place in range(len(blocks)):
            yield [*blocks[:place], [first, *blocks[place]], *blocks[place + 1 :]]


def _least_slowest(series: Sequence[Sequence[float]], total: int, least: Sequence[int]) -> float:
    """The least that the slowest takes when so many whole samples are shared. `series`: seconds of
    each for any number of samples, which rise; `least`: samples that each gets.
    """
    shares = [*least]
    if sum(shares) > total:
        return math.inf
    for _ in range(total - sum(shares)):
        best = min(range(len(shares)), key=lambda place: series[place][shares[place] + 1])
        shares[best] += 1
    return max(own[share] for own, share in zip(series, shares, strict=True))
