"""What `whale advise` says: the best plans of different kinds, what every device contributes, what
a change of the cluster would give, and the precision that the cards want.

Other clusters get a quick search that starts from the plans found for this one (`carried_over`), so
that a small budget does not look like a slow cluster. A plan that leaves devices out is a plan of
the whole cluster, too: what is found without some of them is taken over where it is faster, and one
more card, which may be left out, never makes a step longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from whale.cluster.cluster import Cluster, Device
from whale.planning.problem import Problem
from whale.planning.suggestions import with_more
from whale.plans.plan import Plan
from whale.search.budget import Budget
from whale.search.candidate import Candidate, DeviceGroup, ReplicaChoice
from whale.search.choose import DATA_PARALLEL, RUNTIME_ADDS, data_parallel, is_kept, why_fixed
from whale.search.drafting import Drafted
from whale.search.micro_batches import plan_by_hand
from whale.search.other_clusters import (
    FASTER_LINK,
    carried_over,
    devices_alike,
    faster_links,
    on_ranks,
    one_of_each,
    one_of_each_kind,
    with_card,
)
from whale.search.point import Point
from whale.search.precision import precision_notes
from whale.search.refusals import fixed_names, is_annotated, none_fits, opened_up
from whale.search.search import Search, new_search, search
from whale.search.settings import OpenSettings
from whale.search.shapes import MOST_CLASSES
from whale.search.tries import SearchProgress
from whale.simulation.simulate import simulate, step_seconds
from whale.simulation.timeline import ELSEWHERE, Timeline
from whale.units import count, human_bytes, human_seconds, ranges

QUICK = Budget(
    estimates=60,
    cut_moves=60,
    drafts=3,
    heterogeneous=1,
    smaller=1,
    split=1,
    tensor=1,
    zero=3,
    neighbours=8,
    polished=1,
)
"""of the searches on changed clusters"""
CARRIED = 3
"""plans from which the search on a changed cluster starts"""
OF_A_KIND = 40
"""estimates for each kind of plan that the search did not come to"""
HETEROGENEOUS = "replicas that are not alike"
OWN = "as the script asks for"
ONE_CARD = "one card alone"
OWN_SETTINGS = ("num_task_graph", "replicas", "colocate", "zero", "offload")
"""settings that make a plan by hand"""


@dataclass(frozen=True)
class RankedPlan:
    """One plan of those that are worth a look."""

    kind: str
    text: str
    plan: Plan
    timeline: Timeline

    @property
    def step_s(self) -> float:
        return self.timeline.step_s

    @property
    def peak_bytes(self) -> float:
        return max(device.peak_total_bytes for device in self.timeline.devices)

    @property
    def elsewhere_bytes(self) -> dict[str, float]:
        """Memory of hosts -> bytes of the device that has most there."""
        devices = self.timeline.devices
        return {
            memory: max(device.elsewhere_bytes[memory] for device in devices)
            for memory in ELSEWHERE
        }

    @property
    def traffic_bytes(self) -> float:
        """Bytes that move in a step between a device and the memories of its host, at most."""
        return max(device.traffic_bytes for device in self.timeline.devices)


@dataclass(frozen=True)
class OneCard:
    """What the best device of the cluster would do alone."""

    rank: int
    kind: str
    best: RankedPlan | None
    """None: the model does not fit"""
    text: str
    """its plan, or why there is none"""


@dataclass(frozen=True)
class Change:
    """Another cluster, and how long a step takes there."""

    what: str
    ratio: float
    """of the step to that of the cluster as it is; infinite: nothing fits"""
    ranks: tuple[int, ...] = ()
    """the devices that it would be without: each of them alone, or all together a host"""
    num_ranks: int = 0
    """how many of them: 1, or all"""


@dataclass(frozen=True)
class Advice:
    """Everything that is said."""

    plans: tuple[RankedPlan, ...]
    """the fastest first"""
    without: tuple[Change, ...]
    """without some of the devices"""
    changes: tuple[Change, ...]
    """with more, or faster ones"""
    alone: OneCard | None
    """None: there is one device, or the answer was interrupted"""
    left_out: tuple[str, ...]
    """devices that the best plan does without"""
    precision: tuple[str, ...]
    launch: str
    job: str = ""
    """what a job of the script as it is takes, where that is not the first of the plans"""
    is_interrupted: bool = False
    """the plans are the best so far, and not all was asked about other clusters"""

    @property
    def best(self) -> RankedPlan:
        return self.plans[0]


def advise(
    problem: Problem,
    launch: Callable[[Collection[int]], str],
    progress: Callable[[SearchProgress], None] = lambda _: None,
) -> Advice:
    """Raises ValueError where no plan fits. An interrupt ends it with what is known so far.

    `launch`: the lines that start a plan in which these ranks take part.
    """
    asked = problem
    own, refused = _own_plan(problem)
    # a script that says how it is to be cut counts on all devices
    is_searched = why_fixed(problem) is None and not is_annotated(problem)
    problem = opened_up(problem)
    done = new_search(problem, OpenSettings.of(problem), progress=progress)
    done.run()
    plain: Plan | None = None
    try:
        made, _ = data_parallel(problem)
        plain = None if made is None else made[0]
    except KeyboardInterrupt:  # what the search found is not lost with what it is compared with
        done.is_interrupted = True
    if plain is None and done.best is None:
        if done.is_interrupted:
            raise KeyboardInterrupt
        raise ValueError(none_fits(problem, done))
    asking = _Asking(problem, done, plain, own)
    without: list[Change] = []
    changes: list[Change] = []
    alone: OneCard | None = None
    is_interrupted = done.is_interrupted
    if not is_interrupted:
        try:
            _draft_other_kinds(done)
            for each in asking.without():  # what was answered before an interrupt stays
                without.append(each)
            for each in asking.changes():
                changes.append(each)
            alone = asking.one_card()
        except KeyboardInterrupt:
            is_interrupted = True
    ranked = asking.ranked()
    step_s = ranked[0].step_s
    taking_part = ranked[0].plan.ranks if is_searched else range(problem.cluster.num_devices)
    return Advice(
        plans=ranked,
        without=tuple(
            replace(each, ratio=max(1.0, asking.known_without(each) / step_s)) for each in without
        ),
        changes=tuple(replace(each, ratio=min(1.0, each.ratio / step_s)) for each in changes),
        alone=alone,
        left_out=tuple(_left_out(problem.cluster, ranked[0].plan)),
        precision=tuple(precision_notes(problem)),
        launch=launch(taking_part),
        job=_job_text(asked, own, refused, ranked[0]) or asking.taken_text(ranked[0]),
        is_interrupted=is_interrupted,
    )


def _own_plan(problem: Problem) -> tuple[RankedPlan | None, str]:
    """The plan by the annotations and settings of the script, or why it cannot be made; neither
    where the script has none. Raises ValueError where `"strategy"` contradicts them.
    """
    why = why_fixed(problem)
    config = problem.config
    is_set = any(config.is_given(key) and getattr(config, key) for key in OWN_SETTINGS)
    if why is None or not (is_annotated(problem) or is_set):
        return None, ""
    try:
        plan, _ = plan_by_hand(replace(problem, is_advised=False))
    except ValueError as error:
        return None, str(error)
    return RankedPlan(OWN, why, plan, simulate(plan)), ""


def _job_text(problem: Problem, own: RankedPlan | None, refused: str, best: RankedPlan) -> str:
    """What the script fixes, which the plans leave open, and how a job takes the first of them;
    empty where a job searches as the advice did.
    """
    why = why_fixed(problem)
    config = problem.config
    held = ["annotations"] if is_annotated(problem) else []
    held += fixed_names(config)
    held += [f'"{key}"' for key in ("replicas", "colocate") if getattr(config, key)]
    if why is None:
        return f"A job keeps {', '.join(held)}; these plans leave that open." if held else ""
    taken = DATA_PARALLEL if own is None else OWN
    if taken == best.kind:
        return ""
    without = f" without {', '.join(held)}" if held else ""
    first = f'For the first plan: "strategy": "auto"{without}.'
    if refused:
        return f"A job of this script as it is would be refused: {refused.rstrip('.')}. {first}"
    return f"A job of this script as it is takes the plan `{taken}` ({why}). {first}"


def _draft_other_kinds(done: Search) -> None:
    """Drafts the best of each kind of plan that the search left out, because others are faster."""
    number = done.problem.cluster.num_devices
    known = {kind_of(each.candidate, number) for each in done.drafted}
    points: dict[str, list[Point]] = {}
    for point in done.points():
        points.setdefault(_kind_of_point(point), []).append(point)
    for kind, own in points.items():
        if kind not in known:
            for estimate in done.estimated(own, done.estimator, OF_A_KIND)[:2]:
                done.draft(done.candidate_of(estimate))
    if HETEROGENEOUS not in known:
        for _, candidate in done.partitions.candidates()[:1]:
            done.draft(candidate)


def _kind_of_point(point: Point) -> str:
    """The kind of the plan of a point on all devices."""
    shape = point.shape
    if shape.num_stages == 1:
        return DATA_PARALLEL
    what = "waves" if point.num_chunks > 1 else "pipeline"
    return f"{what} x data parallel" if shape.num_devices > shape.num_stages else what


@dataclass
class _Asking:
    """What other clusters would give."""

    problem: Problem
    done: Search
    """on the cluster as it is"""
    plain: Plan | None
    """data parallelism on it"""
    own: RankedPlan | None
    """what the script asks for"""

    def ranked(self) -> tuple[RankedPlan, ...]:
        """The best plan of each kind, the fastest first."""
        found: dict[str, RankedPlan] = {}
        if self.plain is not None:
            timeline = simulate(self.plain)
            number = self.problem.cluster.num_devices
            text = f"the whole model on each of {number} devices, samples by speed"
            found[DATA_PARALLEL] = RankedPlan(DATA_PARALLEL, text, self.plain, timeline)
        for drafted in sorted(self.done.drafted, key=lambda each: each.score_s):
            kind = kind_of(drafted.candidate, self.problem.cluster.num_devices)
            if kind not in found or drafted.step_s < found[kind].step_s:
                text = drafted.candidate.describe()
                found[kind] = RankedPlan(kind, text, drafted.plan, simulate(drafted.plan))
        if self.own is not None:
            found[self.own.kind] = self.own
        return tuple(sorted(found.values(), key=lambda each: each.step_s))

    def taken_text(self, first: RankedPlan) -> str:
        """The plan that a search takes, where that is not the one with the shortest step."""
        best = self.done.best
        if best is None or first.kind == DATA_PARALLEL:
            return ""
        if self.plain is not None and is_kept(self.plain, best):
            step_s = step_seconds(self.plain).step_s
            return f"A job takes {DATA_PARALLEL}, {human_seconds(step_s)}: {RUNTIME_ADDS}."
        if best.step_s <= first.step_s:
            return ""
        what = best.candidate.describe()
        return f"A job takes {what}, {human_seconds(best.step_s)}: {RUNTIME_ADDS}."

    @property
    def _best(self) -> list[Candidate]:
        """The best candidates so far, from which searches on other clusters start."""
        drafted = sorted(self.done.drafted, key=lambda each: each.score_s)
        return [each.candidate for each in drafted[:CARRIED]]

    def without(self) -> Iterator[Change]:
        """Seconds of a step without one device of each class, and without each host. Plans that are
        faster than the best so far are taken over.
        """
        cluster = self.problem.cluster
        found: list[tuple[Change, set[int]]] = []
        for alike in devices_alike(cluster):
            rank = alike[-1]
            kind = cluster.devices[rank].kind.name
            others = "" if len(alike) == 1 else f", or any other of ranks {ranges(alike)}"
            text = f"without rank {rank} ({kind}{others})"
            found.append((Change(text, math.inf, alike, 1), {rank}))
        if 1 < len(cluster.hosts) <= MOST_CLASSES:
            for host in cluster.hosts:
                ranks = {device.rank for device in cluster.devices if device.host == host}
                text = f"without host {host}"
                found.append((Change(text, math.inf, tuple(sorted(ranks)), len(ranks)), ranks))
        for number, (change, ranks) in enumerate(found, start=1):
            self.done.report("clusters without some devices", number, len(found))
            left = [device for device in cluster.devices if device.rank not in ranks]
            if left:
                yield replace(change, ratio=self._on(left).step_s)

    def known_without(self, change: Change) -> float:
        """Seconds of the fastest plan so far that does without so many of the devices of a change:
        a quick search on the others may have found less.
        """
        known = [change.ratio]
        for drafted in self.done.drafted:
            if len(set(change.ranks) - set(drafted.candidate.ranks)) >= change.num_ranks:
                known.append(drafted.step_s)
        return min(known)

    def one_card(self) -> OneCard | None:
        """The fastest device alone; where none holds the model, the one with the most memory. None
        where there are no others.
        """
        cluster = self.problem.cluster
        if cluster.num_devices == 1:
            return None
        best: tuple[RankedPlan, Device] | None = None
        cards = one_of_each_kind(cluster)
        for number, device in enumerate(cards, start=1):
            self.done.report("one card alone", number, len(cards))
            found = self._on([device])
            if found.plan is not None and (best is None or found.step_s < best[0].step_s):
                text = f"{device.kind.name} (rank {device.rank}), {found.text}"
                timeline = simulate(found.plan)
                best = (RankedPlan(ONE_CARD, text, found.plan, timeline), device)
        if best is not None:
            return OneCard(best[1].rank, best[1].kind.name, best[0], best[0].text)
        largest = max(cluster.devices, key=lambda device: device.kind.memory_bytes)
        return OneCard(largest.rank, largest.kind.name, None, self._why_not(largest))

    def _why_not(self, device: Device) -> str:
        """Why a device cannot hold the model alone."""
        needed = float(self.done.outline.static_bytes(False).sum())
        memory = device.kind.memory_bytes
        more = ", activations more than the rest" if needed <= memory else ""
        return (
            f"does not fit on {device.kind.name} (rank {device.rank}): weights, gradients and "
            f"optimizer state take {human_bytes(needed)}, it has {human_bytes(memory)}{more}"
        )

    def _on(self, left: Sequence[Device]) -> _Quick:
        """The best plan that a quick search finds on some of the devices."""
        cluster = self.problem.cluster.in_order(left)
        old_ranks = [device.rank for device in left]
        seeds = [carried_over(each, old_ranks) for each in self._best]
        found = self._quick(cluster, [each for each in seeds if each is not None])
        known = self.done.best
        if known is None or found.step_s < known.step_s:
            # a plan of the whole cluster, too, which leaves the others out
            shared = ReplicaChoice((DeviceGroup(tuple(old_ranks)),))
            self.done.draft(Candidate((shared,)))
            if found.searched is not None:
                self.done.draft(on_ranks(found.searched.candidate, old_ranks))
        return found

    def changes(self) -> Iterator[Change]:
        """Seconds of a step with one more card of each kind, and with faster links."""
        cluster = self.problem.cluster
        for device in one_of_each(cluster):
            self.done.report(f"one more {device.kind.name}", 1, 1)
            more = with_more(cluster, device, 1)
            seeds = [*self._best, *(with_card(each, more) for each in self._best)]
            what = f"one more {device.kind.name} on host {device.host}"
            yield Change(what, self._quick(more, seeds).step_s)
        if len(cluster.hosts) > 1:
            changed = faster_links(cluster)
            what = f"links between hosts {FASTER_LINK:g} times as fast"
            yield Change(what, self._quick(changed, self._best).step_s)

    def _quick(self, cluster: Cluster, seeds: Sequence[Candidate]) -> _Quick:
        """The best plan of a quick search, or data parallelism where that is faster."""
        problem = replace(self.problem, cluster=cluster)
        best = search(problem, OpenSettings.of(problem), QUICK, seeds=seeds).best
        found = _Quick(math.inf, None, best)
        if best is not None:
            found = replace(found, step_s=best.step_s, plan=best.plan)
        plain, _ = data_parallel(problem)
        if plain is not None:
            plain_s = step_seconds(plain[0]).step_s
            if plain_s < found.step_s:
                found = replace(found, step_s=plain_s, plan=plain[0])
        return found


@dataclass(frozen=True)
class _Quick:
    """What a quick search found on another cluster."""

    step_s: float
    """infinite: nothing fits"""
    plan: Plan | None
    searched: Drafted | None
    """the best plan of the search, which data parallelism may beat"""

    @property
    def text(self) -> str:
        """What the plan does on one device."""
        if self.plan is None:
            return "nothing fits"
        memory = ""
        if self.searched is not None and self.searched.plan is self.plan:
            memory = self.searched.candidate.memory.text
        micro_batches = count(self.plan.num_micro_batch, "micro-batch")
        return f"{micro_batches}, {memory}" if memory else micro_batches


def _left_out(cluster: Cluster, plan: Plan) -> list[str]:
    """The devices that a plan does without, in words."""
    used = {rank for replica in plan.replicas for ranks in replica.ranks for rank in ranks}
    found: dict[tuple[str, str], list[int]] = {}
    for device in cluster.devices:
        if device.rank not in used:
            found.setdefault((device.kind.name, device.host), []).append(device.rank)
    return [
        f"rank {ranges(ranks)} ({kind} on host {host})" for (kind, host), ranks in found.items()
    ]


def kind_of(candidate: Candidate, num_devices: int) -> str:
    """What kind of plan it is, in words."""
    if len(candidate.ranks) < num_devices:
        return "fewer devices"
    if not candidate.are_alike:
        return HETEROGENEOUS
    first = candidate.replicas[0]
    if any(group.grid is not None for group in first.groups):
        return "split" if len(first.groups) == 1 else "pipeline of split stages"
    if candidate.memory.zero:
        return "data parallel with ZeRO" if len(first.groups) == 1 else "pipeline with ZeRO"
    if len(first.groups) == 1:
        return DATA_PARALLEL
    what = "waves" if first.num_chunks > 1 else "pipeline"
    is_shared = len(candidate.replicas) > 1 or max(first.widths) > 1
    return f"{what} x data parallel" if is_shared else what
