"""How much of each stage is recomputed in backward: as little as memory asks for.

Without limits by memory nothing is. Otherwise three drafts are priced and the one with the shortest
step is taken (`PricedCut.choose`):

    nothing      where it fits; memory may then give samples to slower devices, or ask for a
                 schedule that has less in flight and waits more
    enough       every device gets the samples that its speed asks for, in the fastest schedule, and
                 recomputes as few regions as make them fit
    everything   all regions of all stages: the smallest memory that there is

Where activations are at home elsewhere and do not all fit there, also the cheapest regions that do
(`cheap_regions.py`).

A stage is cut into the number of regions that makes  in flight * what the regions save + the
largest region  smallest.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch.fx import Node

from whale import scheduling
from whale.costs.costs import NodeCost
from whale.names import listed
from whale.planning.cheap_regions import is_cheap
from whale.planning.recompute import Counts, Recompute, Regions, regions_of_stage
from whale.planning.stages import Assignment
from whale.planning.workload import INSIDE_OPERATIONS, Workload
from whale.plans.away import SEGMENTS_HERE, StageActivations
from whale.plans.plan import DeviceMemory
from whale.scheduling.memory import ActionMemory
from whale.units import human_bytes

TRIED_REGIONS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""numbers of regions of a stage that are compared"""
PATIENCE = 2
"""so many larger numbers in a row that need more end the comparison"""
SHOWN = 8
"""stages that are written out in a reason"""

Choice = tuple[Counts, ...]
"""of every stage"""


@dataclass(frozen=True)
class Stages:
    """The stages of one draft, and what they hold under any choice."""

    workload: Workload
    assignment: Assignment
    wanted: Recompute
    is_away: bool = False
    """activations are at home elsewhere: the device holds some pieces of them"""
    is_short_elsewhere: bool = False
    """and there is little memory for them"""

    @property
    def nothing(self) -> Choice:
        return (Counts(),) * len(self.assignment.slices)

    @cached_property
    def _crossing(self) -> list[list[Node]]:
        """What each stage receives and sends."""
        found: list[list[Node]] = [[] for _ in self.assignment.slices]
        for node, source, destination in self.assignment.crossings:
            found[source].append(node)
            found[destination].append(node)
        return found

    @cached_property
    def _known(self) -> dict[tuple[int, Counts], tuple[Regions, ActionMemory]]:
        return {}

    def regions(self, stage: int, counts: Counts) -> Regions:
        return self._of(stage, counts)[0]

    def again(self, stage: int, counts: Counts) -> Container[Node]:
        """Operations whose forward runs once more in backward. The products of cheap regions do
        not; in others all are counted, though their last product need not run either.
        """
        regions = self.regions(stage, counts)
        if not counts.is_cheap:
            return regions
        asked = self.regions(stage, Counts())
        cheap = {node for node in regions if is_cheap(node, self._sizes)}
        return cheap | (regions.keys() & asked.keys())

    def num_cheap_regions(self, stage: int) -> int:
        """Cheap regions that the stage has."""
        everything = Counts(num_recomputed=sys.maxsize, is_cheap=True)
        return len(set(self.regions(stage, everything).values())) - len(
            set(self.regions(stage, Counts()).values())
        )

    @cached_property
    def _sizes(self) -> Mapping[Node, NodeCost]:
        """Costs for the sample batch."""
        return self.workload.facts.costs(self.workload.captured.batch_size)

    def memory_of(self, stage: int, counts: Counts) -> ActionMemory:
        """What the stage holds of a micro-batch under this choice."""
        return self._of(stage, counts)[1]

    def activations_of(self, stage: int, counts: Counts) -> StageActivations:
        """What the stage saves of a micro-batch, if that is at home elsewhere."""
        return self._activations(stage, self.regions(stage, counts))

    def _activations(self, stage: int, regions: Regions) -> StageActivations:
        saved = self.workload.saved
        operations = self.assignment.slices[stage].operations
        staying = saved.storages_of((), self._crossing[stage])
        moving = saved.storages_of(operations, (), regions) - staying
        return StageActivations.of(
            saved.bytes_of(moving),
            saved.bytes_of(staying),
            saved.largest(dict.fromkeys(moving, 1.0), SEGMENTS_HERE),
            self.workload.batch_size,
            INSIDE_OPERATIONS,
        )

    def _of(self, stage: int, counts: Counts) -> tuple[Regions, ActionMemory]:
        if (stage, counts) not in self._known:
            operations = self.assignment.slices[stage].operations
            regions = regions_of_stage(
                self.workload.captured,
                operations,
                self.assignment.gradients,
                counts,
                self.wanted,
                self._sizes,
                self.workload.saved,
            )
            memory = self.workload.stage_memory(operations, self._crossing[stage], regions)
            if self.is_away:
                memory = self._activations(stage, regions).resident(memory)
            self._known[stage, counts] = (regions, memory)
        return self._known[stage, counts]

    def best_regions(self, stage: int, in_flight: int) -> int:
        """The number of regions with which the stage needs least, all of them recomputed."""

        def peak(count: int) -> float:
            counts = Counts(count, count)
            needed = self.memory_of(stage, counts)
            saved = needed.saved
            if self.is_short_elsewhere:
                saved += self.activations_of(stage, counts).moved
            return in_flight * saved.sample_bytes + needed.workspace.sample_bytes

        best = 1
        least = peak(1)
        tries_left = PATIENCE
        for count in TRIED_REGIONS[1:]:
            needed = peak(count)
            if needed < least:
                best = count
                least = needed
                tries_left = PATIENCE
            else:
                tries_left -= 1
            if not tries_left:
                break
        return best

    def everything(self, schedule: scheduling.Schedule) -> Choice:
        best = [
            self.best_regions(stage, flying)
            for stage, flying in enumerate(scheduling.peaks_in_flight(schedule))
        ]
        return tuple(Counts(count, count) for count in best)

    def memory(
        self,
        stages: Sequence[int],
        choice: Mapping[int, Counts],
        order: tuple[scheduling.Action, ...],
    ) -> DeviceMemory:
        """Memory of a device that runs these stages."""
        slices = [self.assignment.slices[stage] for stage in stages]
        return self.workload.memory(
            slices, {stage: self.memory_of(stage, choice[stage]) for stage in stages}, order
        )


@dataclass(frozen=True)
class Demand:
    """What one VirtualDevice is to hold."""

    stages: tuple[int, ...]
    order: tuple[scheduling.Action, ...]
    shared_bytes: int
    """bytes of gradients that are all-reduced with other devices"""
    ranks: tuple[tuple[int, int], ...]
    """(samples of a micro-batch, bytes of the device or 0 where they are not known) of every rank
    """
    on_grid: Callable[[DeviceMemory, Mapping[int, Counts]], DeviceMemory] | None = None
    """on a grid: from the memory of one device that runs everything, and the choice, that of the
    place that needs most
    """
    elsewhere: Callable[[Mapping[int, Counts]], bool] | None = None
    """where activations are at home elsewhere: whether the hosts have memory for those of a choice
    """

    def fits(self, memory: DeviceMemory, choice: Mapping[int, Counts]) -> bool:
        if self.on_grid is not None:
            memory = self.on_grid(memory, choice)
        static = memory.static_bytes + self.shared_bytes
        for samples, capacity in self.ranks:
            if capacity and static + samples * memory.sample_bytes > capacity:
                return False
        return self.elsewhere is None or self.elsewhere(choice)


def enough(stages: Stages, demands: Sequence[Demand], schedule: scheduling.Schedule) -> Choice:
    """Recomputes as few regions as make the samples of every device fit; all of them where even
    that is too much.
    """
    choice = dict(enumerate(stages.nothing))
    in_flight = scheduling.peaks_in_flight(schedule)
    for demand in demands:
        _add_regions(stages, demand, choice, in_flight)
    return tuple(choice[stage] for stage in range(len(choice)))


def _add_regions(
    stages: Stages, demand: Demand, choice: dict[int, Counts], in_flight: Sequence[int]
) -> None:
    if demand.fits(stages.memory(demand.stages, choice, demand.order), choice):
        return
    for stage in demand.stages:
        count = stages.best_regions(stage, in_flight[stage])
        for number in range(1, count + 1):
            choice[stage] = Counts(count, number)
            if demand.fits(stages.memory(demand.stages, choice, demand.order), choice):
                return


def enough_cheap(stages: Stages, demands: Sequence[Demand]) -> Choice:
    """Recomputes as few cheap regions as make the samples of every device fit; all of them where
    even that is too much. Stages on grids have none.
    """
    choice = dict(enumerate(stages.nothing))
    for demand in demands:
        if demand.on_grid is None:
            _add_cheap_regions(stages, demand, choice)
    return tuple(choice[stage] for stage in range(len(choice)))


def _add_cheap_regions(stages: Stages, demand: Demand, choice: dict[int, Counts]) -> None:
    for stage in demand.stages:
        count = stages.num_cheap_regions(stage)

        def fits(number: int, stage: int = stage, count: int = count) -> bool:
            tried = {**choice, stage: Counts(count, number, is_cheap=number > 0)}
            return demand.fits(stages.memory(demand.stages, tried, demand.order), tried)

        if fits(0):
            return
        number = bisect_left(range(count), True, key=fits)  # all of them where none of these fits
        if number:
            choice[stage] = Counts(count, number, is_cheap=True)


def explain(
    choice: Choice, wanted: Recompute, more_work: float, saved_bytes: float
) -> tuple[str, str] | None:
    """(choice, why) for the plan; None where the planner recomputes nothing. Figures are of
    the device with most of each.
    """
    texts = []
    for stage, counts in enumerate(choice):
        if counts.num_recomputed:
            kind = "cheap regions" if counts.is_cheap else "regions"
            texts.append(f"{stage} ({counts.num_recomputed} of {counts.num_regions} {kind})")
    if not texts:
        return None
    parts = listed(texts, SHOWN)
    reason = "asked for" if wanted is True else "memory asks for it"
    figures = (
        f"saves up to {human_bytes(saved_bytes)} on a device, for up to {100 * more_work:.3g} % "
        "more work"
    )
    return f"stage {parts}", f"{reason}: {figures}"
