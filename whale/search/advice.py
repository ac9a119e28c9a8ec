"""What `whale advise` says: the best plans of different kinds, what every device contributes, what a
change of the cluster would give, and the precision that the cards want.

Losses and gains are ratios of two quick searches with the same budget, so that a small budget does
not look like a slow cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from whale.cluster.cluster import Cluster, Device, DeviceKind
from whale.cluster.network import Link
from whale.planning.problem import Problem
from whale.planning.suggestions import with_more
from whale.plans.plan import Plan
from whale.search.budget import Budget
from whale.search.candidate import Candidate
from whale.search.choose import data_parallel, none_fits, open_up
from whale.search.search import Progress, search
from whale.search.settings import OpenSettings
from whale.search.shapes import MOST_CLASSES, device_classes
from whale.simulation.simulate import simulate
from whale.simulation.timeline import Timeline

QUICK = Budget(
    estimates=60, cut_moves=60, drafts=3, unlike=0, smaller=0, split=0, tensor=0, zero=1, polished=0
)
"""of the searches on changed clusters"""
BETTER_WITHOUT = 0.99
"""a device is better left out where the step is shorter by more than a hundredth without it"""
FASTER_LINK = 2.0
"""how much faster the links between hosts are in the question of what that would give"""
PRECISIONS = ("fp32", "bf16", "fp16")


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


@dataclass(frozen=True)
class Change:
    """Another cluster, and how long a step takes there."""

    what: str
    ratio: float
    """of the step to that of the cluster as it is; infinite: nothing fits"""


@dataclass(frozen=True)
class Advice:
    """Everything that is said."""

    plans: tuple[RankedPlan, ...]
    """the fastest first"""
    without: tuple[Change, ...]
    """without some of the devices"""
    changes: tuple[Change, ...]
    """with more, or faster ones"""
    precision: tuple[str, ...]
    launch: str

    @property
    def best(self) -> RankedPlan:
        return self.plans[0]

    @property
    def better_left_out(self) -> tuple[str, ...]:
        return tuple(
            change.what.removeprefix("without ")
            for change in self.without
            if change.ratio < BETTER_WITHOUT
        )


def advise(
    problem: Problem, launch: str, progress: Callable[[Progress], None] = lambda _: None
) -> Advice:
    """Raises ValueError where no plan fits."""
    problem = replace(problem, config=open_up(problem.config))
    settings = OpenSettings.of(problem)
    done = search(problem, settings, progress=progress)
    found: dict[str, RankedPlan] = {}
    plain, _ = data_parallel(problem)
    if plain is not None:
        timeline = simulate(plain[0])
        found["data parallel"] = RankedPlan("data parallel", "data parallel", plain[0], timeline)
    for drafted in sorted(done.drafted, key=lambda each: each.score_s):
        kind = kind_of(drafted.candidate, problem.cluster.num_devices)
        if kind not in found or drafted.step_s < found[kind].step_s:
            text = drafted.candidate.describe()
            found[kind] = RankedPlan(kind, text, drafted.plan, simulate(drafted.plan))
    if not found:
        raise ValueError(none_fits(problem, done))
    ranked = tuple(sorted(found.values(), key=lambda each: each.step_s))
    base = quick_seconds(problem)
    return Advice(
        plans=ranked,
        without=tuple(_without(problem, base)),
        changes=tuple(_changes(problem, base)),
        precision=tuple(precision_notes(problem)),
        launch=launch,
    )


def kind_of(candidate: Candidate, num_devices: int) -> str:
    """What kind of plan it is, in words."""
    if len(candidate.ranks) < num_devices:
        return "fewer devices"
    if not candidate.are_alike:
        return "replicas that are not alike"
    first = candidate.replicas[0]
    if any(group.grid is not None for group in first.groups):
        return "split" if len(first.groups) == 1 else "pipeline of split stages"
    if candidate.memory.zero:
        return "data parallel with ZeRO" if len(first.groups) == 1 else "pipeline with ZeRO"
    if len(first.groups) == 1:
        return "data parallel"
    what = "waves" if first.num_chunks > 1 else "pipeline"
    is_shared = len(candidate.replicas) > 1 or max(first.widths) > 1
    return f"{what} x data parallel" if is_shared else what


def quick_seconds(problem: Problem) -> float:
    """Seconds of the best plan of a quick search; infinite where nothing fits."""
    best = search(problem, OpenSettings.of(problem), QUICK).best
    steps = [] if best is None else [best.step_s]
    plain, _ = data_parallel(problem)
    if plain is not None:
        steps.append(simulate(plain[0]).step_s)
    return min(steps, default=float("inf"))


def _without(problem: Problem, base: float) -> list[Change]:
    """The step without one device of each class, and without each host."""
    cluster = problem.cluster
    found: list[tuple[str, set[int]]] = []
    for each in device_classes(cluster):
        rank = each.ranks[-1]
        alike = f", as each of {len(each.ranks)} {each.kind.name}" if len(each.ranks) > 1 else ""
        found.append((f"without rank {rank} ({each.kind.name}{alike})", {rank}))
    if 1 < len(cluster.hosts) <= MOST_CLASSES:
        for host in cluster.hosts:
            ranks = {device.rank for device in cluster.devices if device.host == host}
            found.append((f"without host {host}", ranks))
    changes = []
    for what, ranks in found:
        left = [device for device in cluster.devices if device.rank not in ranks]
        if left:
            changes.append(Change(what, _ratio(problem, cluster.in_order(left), base)))
    return changes


def _changes(problem: Problem, base: float) -> list[Change]:
    """The step with one more card of each kind, and with faster links between hosts."""
    cluster = problem.cluster
    changes = []
    for device in _one_of_each(cluster):
        more = with_more(cluster, device, 1)
        what = f"one more {device.kind.name} on host {device.host}"
        changes.append(Change(what, _ratio(problem, more, base)))
    if len(cluster.hosts) > 1:
        link = cluster.inter_host
        faster = Link(FASTER_LINK * link.bytes_per_s, link.latency_s)
        changed = replace(cluster, inter_host=faster, host_links=())
        changes.append(
            Change(
                f"links between hosts {FASTER_LINK:g} times as fast", _ratio(problem, changed, base)
            )
        )
    return changes


def _one_of_each(cluster: Cluster) -> list[Device]:
    found: dict[tuple[DeviceKind, str], Device] = {}
    for device in cluster.devices:
        found.setdefault((device.kind, device.host), device)
    return list(found.values())[:MOST_CLASSES]


def _ratio(problem: Problem, cluster: Cluster, base: float) -> float:
    return quick_seconds(replace(problem, cluster=cluster)) / base


def precision_notes(problem: Problem) -> list[str]:
    """Which precision the cards want: rates of matrix products, as far as they are known."""
    asked = problem.config.dtype
    notes = []
    for kind in dict.fromkeys(device.kind for device in problem.cluster.devices):
        rates = {name: kind.rate(name) for name in PRECISIONS}
        best = max(rates, key=lambda name: (rates[name], name == asked))
        if rates[best] > 1.05 * rates[asked]:
            gain = rates[best] / rates[asked]
            slow = " (it has no tensor cores for it)" if rates[asked] == kind.flop_per_s else ""
            notes.append(
                f"{kind.name}: {asked}{slow} multiplies at {rates[asked] / 1e12:.3g} TFLOP/s; "
                f'"precision": "{best}" at {rates[best] / 1e12:.3g}, {gain:.2g} times as fast'
            )
    return notes
