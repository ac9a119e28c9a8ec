"""The fastest step that whole samples and whole pieces of a model allow on two kinds of devices,
found by enumeration with the cost model.

Data parallel. Devices of a kind are alike, and a step only gets longer when the fullest device of a kind gets more. So if any shares have
at most v samples on a device of the first kind and p on one of the second, then v on all of the first kind and even shares of the rest on
the second are as good: one try for every v is a try of all shares.                             (`best_data_parallel`)

Pipeline. Tried are all cuts between the pieces, all ways to make the replicas of these devices and
all shares of the replicas. No schedule 1F1B, which starts P - k micro-batches on stage k before its
first backward, takes less than

    max_k  sum_{j<k} (F_j + B_j + 2 c_j) + max( M (F_k + B_k),
                                                F_k + sum_{j>k} (F_j + B_j + 2 c_{j-1}) + M (F_k + B_k) - (P - k) F_k )

(before a stage begins and after it ends, the first and last micro-batch pass the stages before it; its first backward waits for the stages
behind it). Everything whose bound is below the best step so far is simulated, the lowest bound first; the rest cannot be better: so the
result is the best of all.                                                                      (`best_pipeline`)
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from whale import scheduling
from whale.cluster.network import Network
from whale.plans.figures import Seconds, StageFigures, StageTimes
from whale.plans.plan import Plan, Stage
from whale.plans.revise import revise
from whale.plans.shares import even_shares
from whale.plans.virtual_devices import VirtualDevice
from whale.scheduling.memory import ActionMemory, Bytes
from whale.simulation import simulate
from whale.simulation.simulate import figures_in

Floats = npt.NDArray[np.float64]
Kinds = tuple[str, ...]
"""of the devices of one replica, in the order of its stages"""
ROUNDING = 1e-9
NUM_REPLICAS = 2


@dataclass(frozen=True)
class Best:
    """The fastest step, and how it was found."""

    step_s: float
    num_tried: int
    num_simulated: int


# ---- data parallel


def best_data_parallel(plan: Plan) -> Best:
    """`plan`: any data-parallel plan of one micro-batch on the devices."""
    first, _ = kinds = tuple(dict.fromkeys(plan.device_kinds))
    ranks = {
        kind: [rank for rank, each in enumerate(plan.device_kinds) if each == kind]
        for kind in kinds
    }
    steps = []
    for samples in range(plan.batch_size // len(ranks[first]) + 1):
        shares = [samples] * plan.num_devices
        rest = plan.batch_size - samples * len(ranks[first])
        for rank, share in zip(
            ranks[kinds[1]], even_shares(rest, len(ranks[kinds[1]])), strict=True
        ):
            shares[rank] = share
        steps.append(simulate(with_shares(plan, shares)).gradients_s)
    return Best(min(steps), len(steps), len(steps))


def with_shares(plan: Plan, shares: list[int]) -> Plan:
    """The plan with speeds for which these shares are the best ones: device i does its samples in 1
    second, and one more only later.
    """
    seconds = tuple(1.0 / share if share else 1e9 for share in shares)
    return revise(plan, device_seconds=seconds, device_fixed_seconds=(), memory=(), least_samples=0)


# ---- pipelines


def best_pipeline(pieces: Plan, even: Plan, known_s: float) -> Best:
    """The fastest pipeline of two replicas on the devices of `even`.

    `pieces`: a plan with a stage for each piece, in one replica for each kind of device; `known_s`:
    a step that is known to be possible.
    """
    problem = _Pipelines(pieces, even)
    best = known_s
    num_tried = 0
    found = []
    for orders in _replicas(even):
        for share in range(1, problem.size):
            bounds = problem.bounds(orders, share)
            num_tried += len(bounds)
            for place in np.flatnonzero(bounds * (1 + ROUNDING) < best):
                found.append((float(bounds[place]), int(place), orders, share))
    found.sort(key=lambda each: each[0])
    num_simulated = 0
    for bound, place, orders, share in found:
        if bound >= best:
            break
        num_simulated += 1
        best = min(best, simulate(problem.plan(place, orders, share)).gradients_s)
    return Best(best, num_tried, num_simulated)


def _replicas(even: Plan) -> list[tuple[Kinds, Kinds]]:
    """All ways to make two pipelines of these devices; which of the two is called the first makes
    no difference.
    """
    count = len(even.device_kinds) // NUM_REPLICAS
    found = set()
    for chosen in itertools.combinations(range(len(even.device_kinds)), count):
        first = [even.device_kinds[rank] for rank in chosen]
        second = [
            even.device_kinds[rank] for rank in range(len(even.device_kinds)) if rank not in chosen
        ]
        for one, other in itertools.product(
            set(itertools.permutations(first)), set(itertools.permutations(second))
        ):
            found.add(max((one, other), (other, one)))
    return sorted(found)


class _Pipelines:
    """All pipelines of two replicas that can be made of the pieces."""

    def __init__(self, pieces: Plan, even: Plan) -> None:
        self.pieces = pieces
        self.even = even
        self.num_stages = len(even.stages)
        self.num_micro_batch = even.num_micro_batch
        self.size = even.batch_size // self.num_micro_batch
        self.network: Network = figures_in(even).network
        count = len(pieces.stages)
        cuts = np.array(list(itertools.combinations(range(1, count), self.num_stages - 1)))
        self.edges = np.concatenate(
            [np.zeros((len(cuts), 1), int), cuts, np.full((len(cuts), 1), count)], axis=1
        )
        """(cuts, stages + 1): piece at which each stage starts"""
        stages = figures_in(pieces).stages
        self._forward = {
            kind: _sums([stage.times[kind].forward for stage in stages]) for kind in stages[0].times
        }
        self._backward = {
            kind: _sums([stage.times[kind].backward for stage in stages])
            for kind in stages[0].times
        }
        crossings = [(c.source, c.destination, c.sample_bytes) for c in pieces.crossings]
        self._bytes_before = np.array(
            [sum(size for a, b, size in crossings if a < piece <= b) for piece in range(count)]
        )

    def bounds(self, orders: tuple[Kinds, Kinds], share: int) -> Floats:
        """No step of each cut is faster. `share`: samples of the first replica."""
        return np.maximum(self._bound(orders[0], share), self._bound(orders[1], self.size - share))

    def _bound(self, kinds: Kinds, samples: int) -> Floats:
        forward, backward = (
            self._of_stages(times, kinds, samples) for times in (self._forward, self._backward)
        )
        work = forward + backward
        count = self.num_micro_batch
        crossing = self._messages(kinds, samples)
        passed = work + 2 * np.concatenate(
            [crossing, np.zeros((len(work), 1))], axis=1
        )  # a stage and the message behind it
        before = np.concatenate(
            [np.zeros((len(work), 1)), np.cumsum(passed, axis=1)[:, :-1]], axis=1
        )
        behind = (
            np.cumsum(passed[:, ::-1], axis=1)[:, ::-1] - work
        )  # of a stage: what lies behind it, its own messages there included
        warm_up = np.minimum(self.num_stages - np.arange(self.num_stages), count)
        alone = np.maximum(count * work, forward + behind + count * work - warm_up * forward)
        bound: Floats = (before + alone).max(axis=1)
        return bound

    def _of_stages(
        self, sums: dict[str, tuple[Floats, Floats]], kinds: Kinds, samples: int
    ) -> Floats:
        """(cuts, stages): seconds of a micro-batch of so many samples."""
        rows = []
        for place, kind in enumerate(kinds):
            each, fixed = (
                line[self.edges[:, place + 1]] - line[self.edges[:, place]] for line in sums[kind]
            )
            rows.append(samples * each + fixed)
        return np.stack(rows, axis=1)

    def _messages(self, kinds: Kinds, samples: int) -> Floats:
        """(cuts, stages - 1): seconds of the message in front of each stage but the first."""
        rows = []
        for place in range(1, self.num_stages):
            link = (
                self.network.intra_host
                if kinds[place - 1] == kinds[place]
                else self.network.inter_host
            )
            rows.append(
                samples * self._bytes_before[self.edges[:, place]] / link.bytes_per_s
                + link.latency_s
            )
        return np.stack(rows, axis=1)

    def plan(self, place: int, orders: tuple[Kinds, Kinds], share: int) -> Plan:
        """The pipeline with these cuts, devices and shares."""
        fine = figures_in(self.pieces)
        starts = self.edges[place]
        stage_of = np.searchsorted(starts, np.arange(len(self.pieces.stages)), side="right") - 1
        stages = [_joined(fine.stages[first:last]) for first, last in itertools.pairwise(starts)]
        states = [
            replace(state, stages=tuple(sorted({int(stage_of[piece]) for piece in state.stages})))
            for state in fine.states
        ]
        moved = [
            replace(c, source=int(stage_of[c.source]), destination=int(stage_of[c.destination]))
            for c in self.pieces.crossings
        ]
        crossings = [c for c in moved if c.source != c.destination]
        edges = tuple(sorted({(c.source, c.destination) for c in crossings}))
        backward = tuple(sorted({(c.source, c.destination) for c in crossings if c.gradient}))
        graph = scheduling.StageGraph(tuple(range(self.num_stages)), edges, backward)
        free = {
            kind: [rank for rank, each in enumerate(self.even.device_kinds) if each == kind]
            for kind in set(self.even.device_kinds)
        }
        ranks = [(free[a].pop(0), free[b].pop(0)) for a, b in zip(*orders, strict=True)]
        shares = [0] * self.even.num_devices
        for first, second in ranks:
            shares[first] = share
            shares[second] = self.size - share
        plan = revise(
            self.even,
            virtual_devices=tuple(
                VirtualDevice(stage, tuple((rank,) for rank in both))
                for stage, both in enumerate(ranks)
            ),
            stages=tuple(
                Stage(stage, stage, (), 1, 1.0, 1.0, (), 0) for stage in range(self.num_stages)
            ),
            crossings=tuple(crossings),
            schedule=scheduling.build("1f1b", graph, self.num_micro_batch),
            figures=replace(figures_in(self.even), stages=tuple(stages), states=tuple(states)),
        )
        return with_shares(plan, shares)


def _sums(times: list[Seconds]) -> tuple[Floats, Floats]:
    """Prefix sums of the seconds a sample, and of the fixed ones."""
    each, fixed = (
        [0.0, *values]
        for values in ([time.sample_s for time in times], [time.fixed_s for time in times])
    )
    return np.cumsum(each), np.cumsum(fixed)


def _joined(parts: tuple[StageFigures, ...]) -> StageFigures:
    def total(times: list[Seconds]) -> Seconds:
        return Seconds(sum(each.sample_s for each in times), sum(each.fixed_s for each in times))

    times = {}
    for kind in parts[0].times:
        forward, inputs, weights = (
            total([getattr(part.times[kind], name) for part in parts])
            for name in ("forward", "input_backward", "weight_backward")
        )
        times[kind] = StageTimes(forward, inputs, weights)
    return StageFigures(
        times,
        ActionMemory(
            saved=Bytes(sum(part.memory.saved.sample_bytes for part in parts)),
            workspace=Bytes(max(part.memory.workspace.sample_bytes for part in parts)),
        ),
    )
