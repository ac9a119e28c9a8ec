"""Seconds of the actions of a plan and bytes of its messages, from the figures of the plan.
Simulation and emulation take the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from whale.plans.away import AwayFigures, Transfers
from whale.plans.figures import Figures, Seconds
from whale.plans.plan import Plan
from whale.plans.samples import SampleMap
from whale.plans.slices import Interval, bridge, whole
from whale.scheduling import Action, Edge, Kind, Schedule
from whale.scheduling.action import ENDS_BACKWARD
from whale.simulation.communication import messages_of_blocks

NEXT_TO_NOTHING = 0.01
"""an action that takes less than this part of the longest one does not set the stretch of an
emulation
"""


@dataclass(frozen=True)
class SentPiece:
    """What one rank sends another of one message."""

    source: int
    destination: int
    num_bytes: float


@dataclass(frozen=True)
class Times:
    """A plan with its figures; nothing is stretched here."""

    plan: Plan
    figures: Figures

    @cached_property
    def by_template(self) -> tuple[Times, ...]:
        """The times of the replicas of each template, whose stages are counted from 0."""
        if self.plan.is_uniform:
            return (self,)
        views = replace(self.plan, figures=self.figures).by_template
        return tuple(Times(view, view.figures) for view in views if view.figures is not None)

    def of_rank(self, rank: int) -> Times:
        """The times of the replicas that are like this rank's."""
        return self.by_template[
            self.plan.template_of_rank(rank) if len(self.by_template) > 1 else 0
        ]

    @cached_property
    def schedule(self) -> Schedule:
        return self.plan.schedule

    @cached_property
    def _of_kind(self) -> list[dict[str, dict[Kind, Seconds]]]:
        """[stage][kind of device][kind of action]"""
        return [
            {
                kind: {
                    Kind.FORWARD: times.forward,
                    Kind.BACKWARD: times.backward,
                    Kind.INPUT: times.input_backward,
                    Kind.WEIGHT: times.weight_backward,
                }
                for kind, times in stage.times.items()
            }
            for stage in self.figures.stages
        ]

    def seconds(self, action: Action, rank: int, num_samples: float) -> float:
        """Seconds of a compute action on the device of this rank."""
        alone_s = self.alone_seconds(action, rank, num_samples)
        transfers = self.transfers(action, rank) if num_samples else None
        if transfers is None:
            return alone_s
        return transfers.longest_s(alone_s, num_samples, self.figures.overlaps)

    def alone_seconds(self, action: Action, rank: int, num_samples: float) -> float:
        """Seconds of an action if nothing moved from and to the memories of the host."""
        if not self.plan.is_uniform:
            return self.of_rank(rank).alone_seconds(action, rank, num_samples)
        kind = self.plan.device_kinds[rank]
        seconds = self._of_kind[action.stage][kind][action.kind].of(num_samples)
        if action.kind in ENDS_BACKWARD and action != self._first_of_stage[action.stage]:
            seconds += self.figures.stages[action.stage].times[kind].accumulate.of(num_samples)
        if not num_samples:
            return seconds
        messages = self._messages_of_blocks(action.stage, action.kind, rank)
        if messages is not None:
            message_s, num_blocks = messages
            if not self.figures.overlaps:
                seconds += message_s
            else:
                # all but one block come or go under the work on another one
                seconds = max(seconds, message_s) + message_s / num_blocks
        return seconds

    def fixed_seconds(self, action: Action, rank: int) -> float:
        """The part of `alone_seconds` that any number of samples takes, without messages."""
        if not self.plan.is_uniform:
            return self.of_rank(rank).fixed_seconds(action, rank)
        kind = self.plan.device_kinds[rank]
        return self._of_kind[action.stage][kind][action.kind].fixed_s

    def transfers(self, action: Action, rank: int) -> Transfers | None:
        """What an action moves from and to the memories of the host of this rank."""
        if not self.plan.is_uniform:
            return self.of_rank(rank).transfers(action, rank)
        if not self.figures.away or action.kind is Kind.WEIGHT:
            return None
        away = self._away_of_rank.get(rank)
        if away is None or action.stage not in away.stages:
            return None
        own = away.forward if action.kind is Kind.FORWARD else away.backward
        return own[away.stages.index(action.stage)]

    @cached_property
    def _away_of_rank(self) -> dict[int, AwayFigures]:
        return {rank: each for each in self.figures.away for rank in each.ranks}

    def _messages_of_blocks(self, stage: int, kind: Kind, rank: int) -> tuple[float, int] | None:
        """Seconds of the gathers and reduce-scatters inside an action, and of how many blocks; None
        where there are none.
        """
        if not self.figures.zero:
            return None
        if (stage, kind, rank) not in self._known_messages:
            found = None
            for group in self.figures.zero:
                if rank in group.ranks and stage in group.stages:
                    found = messages_of_blocks(group, stage, kind, self.figures)
            self._known_messages[stage, kind, rank] = found
        return self._known_messages[stage, kind, rank]

    @cached_property
    def _known_messages(self) -> dict[tuple[int, Kind, int], tuple[float, int] | None]:
        return {}

    @cached_property
    def _first_of_stage(self) -> dict[int, Action]:
        """The action of each stage that makes its first gradients in a step."""
        found: dict[int, Action] = {}
        for order in self.schedule.orders:
            for action in order:
                if action.kind in ENDS_BACKWARD:
                    found.setdefault(action.stage, action)
        return found

    @cached_property
    def samples(self) -> SampleMap:
        return SampleMap.planned(self.plan)

    @cached_property
    def _num_samples(self) -> list[list[int]]:
        return self.samples.num_by_rank()

    def num_samples(self, rank: int) -> list[int]:
        """Samples of each micro-batch of the planned mini-batch that this rank runs on."""
        return self._num_samples[rank]

    def pieces(self, edge: Edge, micro_batch: int, replica: int, gradient: bool) -> list[SentPiece]:
        """Pieces of the message between two stages, or of its gradient on the way back; everything
        between the same two ranks is one.
        """
        key = (
            edge,
            self.samples.micro_batches[micro_batch][1] - self.samples.micro_batches[micro_batch][0],
            replica,
            gradient,
        )
        if key not in self._pieces:
            self._pieces[key] = list(self._make_pieces(edge, micro_batch, replica, gradient))
        return self._pieces[key]

    @cached_property
    def _pieces(self) -> dict[tuple[Edge, int, int, bool], list[SentPiece]]:
        return {}  # micro-batches of one size are cut alike

    def _make_pieces(
        self, edge: Edge, micro_batch: int, replica: int, gradient: bool
    ) -> Iterator[SentPiece]:
        crossings = [c for c in self.plan.crossings if (c.source, c.destination) == edge]
        if gradient:
            crossings = [c for c in crossings if c.gradient]
        here, there = (self.plan.stages[stage].virtual_device for stage in edge)
        ranks = [self.plan.virtual_devices[device].ranks[replica] for device in (here, there)]
        total: dict[tuple[int, int], float] = {}
        batched = sum(c.sample_bytes for c in crossings if c.batched)
        if batched:
            for part in bridge(
                self._intervals(micro_batch, replica, here),
                self._intervals(micro_batch, replica, there),
            ):
                total[part.source, part.destination] = part.num_samples * float(batched)
        unbatched = sum(c.sample_bytes for c in crossings if not c.batched)
        if unbatched:
            for source, destination in whole(len(ranks[0]), len(ranks[1])):
                total[source, destination] = total.get((source, destination), 0.0) + unbatched
        for (source, destination), num_bytes in total.items():
            a = ranks[0][source]
            b = ranks[1][destination]
            yield SentPiece(b, a, num_bytes) if gradient else SentPiece(a, b, num_bytes)

    def _intervals(self, micro_batch: int, replica: int, device: int) -> tuple[Interval, ...]:
        return self.samples.devices(micro_batch, replica, device)

    @cached_property
    def shortest_s(self) -> float:
        """Seconds of the shortest compute action of any rank, but for those that take next to
        nothing: they would stretch a step to hours.
        """
        times = []
        for rank in self.plan.ranks:
            own = self.of_rank(rank)
            samples = own.num_samples(rank)
            device = own.plan.place_of_rank(rank)[0]
            times += [
                own.seconds(a, rank, samples[a.micro_batch])
                for a in own.schedule.orders[device]
                if a.is_compute
            ]
        return min((time for time in times if time >= NEXT_TO_NOTHING * max(times)), default=0.0)
