"""Discrete events over the action lists of a plan: every rank, every message, every all-reduce, in
the order of time.

A rank does its actions in their order. A compute action takes the time that the cost model gives
this device for its own samples. A send is issued at once and takes its link while the rank
continues; a receive waits until all its pieces are there. A stage that is closed (SYNCHRONISE) lets
its gradients be all-reduced under way; when all of a rank's are there it waits for the others (the
step's loss and gradient norm are reduced over all ranks) and updates its weights. Updates on hosts
that run under the next forward are those of the step before: all steps are alike, and the first
forward of a stage waits for them.

Events are taken in the order of time because messages and all-reduces share links and network
cards, first come, first served. Where nothing is shared but the devices, `scheduling.simulate`
gives the same times from costs alone, with a loop that needs no such order
(`scheduling/event_loop.py`).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from whale.plans.figures import Figures
from whale.plans.plan import Plan
from whale.scheduling import Action, Edge, Kind
from whale.scheduling.action import ENDS_BACKWARD
from whale.simulation.communication import AllReduce, Links, all_reduces_of
from whale.simulation.memory import Account, shared_bytes
from whale.simulation.timeline import (
    ALL_REDUCE,
    UPDATE,
    DeviceTimeline,
    Event,
    MemoryPoint,
    Timeline,
)
from whale.simulation.times import Times

ROUNDING = 1e-12
"""a message that comes later than a rank by this fraction of the time comes with it: else stretched
times would show other waits
"""
MessageKey = tuple[Edge, int, bool, int]
"""edge, micro-batch, gradient, rank that receives"""


def simulate(plan: Plan) -> Timeline:
    """What one step of this plan does on its cluster, by the cost model: times and memory of every
    device. Nothing is run.
    """
    return run(plan, figures_in(plan))


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of one step."""

    gradients_s: float
    """until the last gradient is reduced everywhere"""
    step_s: float


def step_seconds(plan: Plan) -> StepSeconds:
    """The seconds of `simulate` alone, without what happens on each device and in its memory."""
    return _Simulation(Times(plan, figures_in(plan)), 1.0, is_recorded=False).seconds()


def peak_bytes(plan: Plan) -> list[float]:
    """The fullest moment of every device in `simulate`, by rank: the order of actions alone decides
    on it, so nothing is timed.
    """
    times = Times(plan, figures_in(plan))
    found = []
    for rank in range(plan.num_devices):
        state = _rank_of(times, rank)
        account = state.account
        account.place_weights()
        account.place_optimizer(times.figures.optimizer_ratio)
        for action in state.actions:
            if action.is_compute:
                samples = state.samples[action.micro_batch]
                account.start(action, samples)
                account.end(action, samples, state.is_last(action))
        account.begin_update()
        found.append(sum(account.peak.values()))
    return found


def figures_in(plan: Plan) -> Figures:
    if plan.figures is None:
        raise ValueError(
            "this plan has no figures of its cluster, so it cannot be simulated: make it again "
            "with wh.plan or `whale plan`"
        )
    return plan.figures


def run(plan: Plan, figures: Figures, factor: float = 1.0) -> Timeline:
    """`simulate` with other figures, all times stretched by `factor`."""
    return _Simulation(Times(plan, figures), factor).run()


class _Rank:
    """Where one rank is in its list of actions."""

    def __init__(
        self,
        rank: int,
        actions: Sequence[Action],
        samples: Sequence[int],
        times: Times,
        account: Account,
    ) -> None:
        """`times`: of the replicas that are like this rank's. A rank that the plan leaves out has
        no actions.
        """
        self.rank = rank
        self.actions = actions
        self.samples = samples
        self.times = times
        self.replica = times.plan.place_of_rank(rank)[1] if actions else -1
        self.account = account
        self.place = 0
        self.waits_since: float | None = None
        self.events: list[Event] = []
        self.memory: list[MemoryPoint] = []
        self.last_backward: dict[int, tuple[float, float]] = {}
        """stage -> start and end"""
        self.last_of_stage = {
            action.stage: action for action in actions if action.kind in ENDS_BACKWARD
        }
        self.done_s = 0.0
        """its last action is over"""
        self.moved_s = 0.0
        """of transfers from and to the memories of its host, one after the other"""
        self.exposed_s = 0.0
        """by which its forwards and backwards are longer for them"""
        self.fixed_s = 0.0
        """of its forwards and backwards, whatever the number of samples"""
        self.begun: set[int] = set()
        """stages whose first forward has begun, where it waits for updates"""

    def is_last(self, action: Action) -> bool:
        """Whether no other backward of its stage comes in this step."""
        return self.last_of_stage.get(action.stage) is action

    def note_memory(self, now: float) -> None:
        self.memory += [MemoryPoint(now, *point) for point in self.account.points()]


def _rank_of(times: Times, rank: int) -> _Rank:
    """A rank in front of its first action."""
    own_times = times.of_rank(rank)
    plan = own_times.plan
    own = plan.stages_of_rank(rank)
    figures = own_times.figures.on(rank)
    bucket_bytes = times.plan.settings.bucket_bytes
    account = Account(figures, own, shared_bytes(plan, figures, own), bucket_bytes)
    if not own:
        return _Rank(rank, (), (), own_times, account)
    device = plan.place_of_rank(rank)[0]
    orders = own_times.schedule.orders
    return _Rank(rank, orders[device], own_times.num_samples(rank), own_times, account)


class _Simulation:
    def __init__(self, times: Times, factor: float, is_recorded: bool = True) -> None:
        """`is_recorded`: events, messages and memory are noted."""
        self.is_recorded = is_recorded
        self.times = times
        self.factor = factor
        self.plan = times.plan
        self.figures = times.figures
        self.bucket_bytes = self.plan.settings.bucket_bytes
        self.links = Links(self.figures.network, factor, self.is_recorded)
        self.ranks = [_rank_of(times, rank) for rank in range(self.plan.num_devices)]
        self.arrivals: dict[MessageKey, list[float]] = {}
        """arrival of each piece that was sent"""
        self.waiting: dict[MessageKey, _Rank] = {}
        self.queue: list[tuple[float, int]] = []
        self.all_reduces = all_reduces_of(self.plan, self.figures, self.bucket_bytes, factor)
        self.open: dict[AllReduce, set[tuple[int, int]]] = {}
        """(rank, stage) that an all-reduce still waits for"""
        self.free: dict[tuple[int, ...], float] = {}
        """by group: end of the all-reduces that it began"""
        self.reduced_at: dict[int, float] = {}
        """by rank: end of its last all-reduce"""
        # a host that computes the forward itself (CPU ranks) has nothing to gain
        self.is_ahead = self.plan.updates_ahead and self.figures.overlaps
        """updates on hosts run under the next forward"""

    def run(self) -> Timeline:
        self._run()
        return self._finish()

    def seconds(self) -> StepSeconds:
        self._run()
        all_there, update_s = self._ends()
        return StepSeconds(all_there, all_there + max(update_s))

    def _run(self) -> None:
        """Does all actions of all ranks."""
        for each in self.all_reduces:
            self.open[each] = {
                (rank, stage)
                for rank in each.ranks
                for stage in each.stages_of(rank)
                if stage in self.ranks[rank].account.own_stages
            }
        for state in self.ranks:
            if self.is_recorded:
                state.account.place_weights()
                state.account.place_optimizer(self.figures.optimizer_ratio)
                state.note_memory(0.0)
            heapq.heappush(self.queue, (0.0, state.rank))
        while self.queue:
            now, rank = heapq.heappop(self.queue)
            self._advance(self.ranks[rank], now)
        stuck = [state for state in self.ranks if state.place < len(state.actions)]
        if stuck:
            rank = stuck[0].rank
            action = stuck[0].actions[stuck[0].place]
            raise ValueError(
                f"deadlock: rank {rank} never passes action {stuck[0].place} ({action}) of the "
                "plan's schedule. Try: make the plan again"
            )

    def _advance(self, state: _Rank, now: float) -> None:
        """Does actions of one rank until one takes time or waits for others."""
        while state.place < len(state.actions):
            action = state.actions[state.place]
            if action.is_compute:
                if state.waits_since is None:
                    self._begin(state, action, now)
                    return
                self._end(state, action, now)
            elif action.kind is Kind.SEND:
                self._send(state, action, now)
            elif action.kind is Kind.RECEIVE:
                if not self._receive(state, action, now):
                    return
            elif action.kind is Kind.SYNCHRONISE:
                self._close(state, action.stage, now)
            state.place += 1
        state.done_s = now

    def _begin(self, state: _Rank, action: Action, now: float) -> None:
        samples = state.samples[action.micro_batch]
        state.waits_since = now  # until its own end
        took_s = state.times.seconds(action, state.rank, samples)
        if self.is_ahead and action.kind is Kind.FORWARD and action.stage not in state.begun:
            state.begun.add(action.stage)
            waited_s = self._wait_for_update_s(state, action.stage, now, self.factor * took_s)
            if self.is_recorded and waited_s > 0:
                state.events.append(Event(UPDATE, now, now + waited_s))
            now = state.waits_since = now + waited_s
        transfers = state.times.transfers(action, state.rank) if samples else None
        if transfers is not None:
            alone_s = state.times.alone_seconds(action, state.rank, samples)
            state.moved_s += self.factor * transfers.moved_s(samples)
            state.exposed_s += self.factor * (took_s - alone_s)
        if self.is_recorded:
            if samples:
                state.fixed_s += self.factor * state.times.fixed_seconds(action, state.rank)
            state.account.start(action, samples)
            state.note_memory(now)
        heapq.heappush(self.queue, (now + self.factor * took_s, state.rank))

    def _end(self, state: _Rank, action: Action, now: float) -> None:
        assert state.waits_since is not None
        if action.kind is not Kind.FORWARD:
            state.last_backward[action.stage] = (state.waits_since, now)
        if self.is_recorded:
            state.events.append(Event(str(action), state.waits_since, now))
            samples = state.samples[action.micro_batch]
            state.account.end(action, samples, state.is_last(action))
            state.note_memory(now)
        state.waits_since = None

    def _send(self, state: _Rank, action: Action, now: float) -> None:
        edge = action.edge
        name = str(action) if self.is_recorded else ""
        for piece in state.times.pieces(edge, action.micro_batch, state.replica, action.gradient):
            if piece.source != state.rank:
                continue
            key = (edge, action.micro_batch, action.gradient, piece.destination)
            arrival = self.links.send(name, piece.source, piece.destination, piece.num_bytes, now)
            self.arrivals.setdefault(key, []).append(arrival)
            if key in self.waiting and self._is_on_its_way(key, state):
                heapq.heappush(
                    self.queue, (max(now, *self.arrivals[key]), self.waiting.pop(key).rank)
                )

    def _receive(self, state: _Rank, action: Action, now: float) -> bool:
        """Whether everything is there; if not, the rank is called again when it is."""
        edge = action.edge
        key = (edge, action.micro_batch, action.gradient, state.rank)
        if not self._is_on_its_way(key, state):
            state.waits_since = now
            self.waiting[key] = state
            return False
        there = max(self.arrivals.get(key, ()), default=now)
        if there > now * (1 + ROUNDING):
            state.waits_since = now if state.waits_since is None else state.waits_since
            heapq.heappush(self.queue, (there, state.rank))
            return False
        if state.waits_since is not None:
            if self.is_recorded:
                state.events.append(Event(str(action), state.waits_since, now))
            state.waits_since = None
        return True

    def _is_on_its_way(self, key: MessageKey, state: _Rank) -> bool:
        """Whether all pieces of a message were sent; `state`: a rank of the same replica."""
        edge, micro_batch, gradient, rank = key
        pieces = state.times.pieces(edge, micro_batch, state.replica, gradient)
        return len(self.arrivals.get(key, ())) == sum(piece.destination == rank for piece in pieces)

    def _close(self, state: _Rank, stage: int, now: float) -> None:
        """All gradients of the stage are final on this rank; an all-reduce is timed when that is so
        on all its ranks.
        """
        for each, left in list(self.open.items()):
            if (state.rank, stage) in left:
                left.discard((state.rank, stage))
                if not left:
                    del self.open[each]
                    self._reduce(each)

    def _reduce(self, each: AllReduce) -> None:
        before = self.free.get(each.ranks, 0.0)
        first = 0.0
        end = 0.0
        for rank in each.ranks:
            closings = [
                times
                for stage, times in self.ranks[rank].last_backward.items()
                if stage in each.stages_of(rank)
            ]
            start, closed = max(closings, key=lambda times: times[1])
            first = max(first, each.first_ready(closed, closed - start))
            end = max(end, each.end(closed, closed - start, before))
        for host, seconds in each.leaving:
            end = max(end, self.links.book_card(host, seconds, max(first, before)))
        self.free[each.ranks] = end
        for rank in each.ranks:
            self.reduced_at[rank] = max(end, self.reduced_at.get(rank, 0.0))

    def _there_s(self, state: _Rank) -> float:
        """When all gradients of a rank are reduced."""
        return max(state.done_s, self.reduced_at.get(state.rank, 0.0))

    def _ends(self) -> tuple[float, list[float]]:
        """(when all gradients of all ranks are reduced, seconds of the update of every rank)"""
        update_s = [
            self.factor * (seconds + self._update_elsewhere_s(state))
            for seconds, state in zip(self.figures.update_s, self.ranks, strict=True)
        ]
        return max(map(self._there_s, self.ranks)), update_s

    def _finish(self) -> Timeline:
        """Waiting for all-reduces, then for all ranks, then the update."""
        all_there, update_s = self._ends()
        devices = []
        for state in self.ranks:
            state.events.append(Event(ALL_REDUCE, state.done_s, self._there_s(state)))
            state.events.append(Event(UPDATE, all_there, all_there + update_s[state.rank]))
            state.account.begin_update()
            state.note_memory(all_there)
            devices.append(
                DeviceTimeline(
                    rank=state.rank,
                    kind=self.plan.device_kinds[state.rank],
                    host=self.figures.network.hosts[state.rank],
                    events=tuple(state.events),
                    memory=tuple(state.memory),
                    peak_bytes=state.account.peak,
                    memory_bytes=self.figures.memory_bytes[state.rank],
                    away=state.account.away,
                    moved_s=state.moved_s,
                    exposed_s=state.exposed_s,
                    fixed_s=state.fixed_s,
                    ahead_s=self._ahead_s(state),
                )
            )
        step_s = all_there + max(update_s)
        return Timeline(
            tuple(devices), tuple(self.links.messages), all_there, step_s, self.plan.batch_size
        )

    def _update_elsewhere_s(self, state: _Rank) -> float:
        """Seconds of the update of what has its optimizer state elsewhere."""
        away = state.account.away
        if away is None:
            return 0.0
        seconds = away.update.seconds(self.figures.overlaps)
        # what is left of it when the rest runs under the next forward, of which this step has one
        return max(0.0, seconds - away.ahead_s) if self.is_ahead else seconds

    def _ahead_s(self, state: _Rank) -> float:
        """Seconds of updates of a rank that the step hides."""
        away = state.account.away
        if not self.is_ahead or away is None:
            return 0.0
        waited_s = sum(event.seconds for event in state.events[:-1] if event.name == UPDATE)
        return max(0.0, self.factor * away.ahead_s - waited_s)

    def _wait_for_update_s(self, state: _Rank, stage: int, now: float, seconds: float) -> float:
        """How long the first forward of a stage waits for weights that are still updated when the
        step begins: all steps are alike, so the updates are those of the step before.
        """
        away = state.account.away
        if away is None or not away.ahead or stage not in away.stages:
            return 0.0
        place = away.stages.index(stage)
        before_s = self.factor * sum(each.seconds for each in away.ahead[:place])
        own = away.ahead[place]
        own = own._replace(seconds=self.factor * own.seconds)
        return max(0.0, own.end_s(now, seconds, before_s) - now - seconds)
