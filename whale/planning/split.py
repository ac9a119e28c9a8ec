"""The stages on grids of one draft: their shardings, what each place holds, and what the plan says
of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

from whale.names import listed
from whale.planning.grid_room import OnDevice
from whale.plans.grid import Grid
from whale.plans.layout import Layout
from whale.plans.plan import Decision
from whale.plans.sharding import Sharding, StageSharding
from whale.plans.virtual_devices import Placement
from whale.sharding.space import Space
from whale.units import human_bytes, human_seconds


class HeldBytes(NamedTuple):
    """What one place of a grid holds."""

    parameters: int
    trained: int
    """of these"""
    largest: int
    """of its trained parameters"""
    shared: int
    """of the trained ones those whose gradients are summed with other devices"""


@dataclass(frozen=True)
class Split:
    """The stages on grids of one draft."""

    placement: Placement
    """with the grids that were chosen"""
    shardings: Mapping[int, Sharding]
    """by stage"""
    spaces: Mapping[int, Space]
    num_samples: int
    """of a replica in the largest micro-batch"""
    decisions: tuple[Decision, ...] = ()
    _held: dict[tuple[int, ...], list[HeldBytes]] = field(
        default_factory=dict, repr=False, compare=False
    )
    """what `held_bytes` has found"""
    _on_device: dict[int, OnDevice] = field(default_factory=dict, repr=False, compare=False)
    """what `on_device` has found"""

    def held_bytes(self, stages: Sequence[int]) -> list[HeldBytes]:
        """By place of a grid with these stages. Parameters that lie alike, which are most of those
        of equal layers, are looked at once.
        """
        known = self._held.get(tuple(stages))
        if known is None:
            alike: Counter[tuple[Layout, int, bool]] = Counter()
            state = self.spaces[stages[0]].program.captured.state
            for name, layout in {
                name: layout
                for stage in stages
                for name, layout in self.shardings[stage].stored.items()
            }.items():
                alike[layout, state[name].dtype.itemsize, state[name].trainable] += 1
            grid = self.shardings[stages[0]].grid
            known = self._held[tuple(stages)] = [
                self._held_at(place, grid, alike) for place in range(grid.num_devices)
            ]
        return known

    def _held_at(
        self, place: int, grid: Grid, alike: Mapping[tuple[Layout, int, bool], int]
    ) -> HeldBytes:
        """`alike`: how many parameters lie so, have entries of so many bytes, and are trained or
        not.
        """
        parameters = trained = largest = shared = 0
        for (layout, entry_bytes, is_trained), number in alike.items():
            one = entry_bytes * layout.local_count(grid, place)
            parameters += number * one
            if is_trained:
                trained = trained + number * one
                largest = max(largest, one)
                shared += (
                    number
                    * one
                    * (self.placement.num_replicas > 1 or len(layout.same_places(grid, place)) > 1)
                )
        return HeldBytes(parameters, trained, largest, shared)

    def on_device(self, stage: int) -> OnDevice:
        """Sizes of the values of a stage, and its exchanges, on one device."""
        if stage not in self._on_device:
            self._on_device[stage] = OnDevice(
                self.spaces[stage], self.shardings[stage], self.num_samples
            )
        return self._on_device[stage]

    def records(self) -> tuple[StageSharding, ...]:
        return tuple(
            StageSharding.of(stage, sharding, self.num_samples)
            for stage, sharding in sorted(self.shardings.items())
        )

    def gathering_again(self) -> Split:
        """The same with less kept for backward: what is gathered in forward is gathered once more
        there.
        """
        shardings = {
            stage: replace(each, keeps_gathered=False, seconds=each.seconds + each.gathered.seconds)
            for stage, each in self.shardings.items()
        }
        saved = max(
            each.gathered.fixed_bytes + self.num_samples * each.gathered.sample_bytes
            for each in self.shardings.values()
        )
        more_s = sum(each.gathered.seconds for each in self.shardings.values())
        figures = (
            f"saves up to {human_bytes(saved)} on a device for {human_seconds(more_s)} more a "
            "micro-batch"
        )
        decision = Decision(
            "gathered tensors",
            "gathered again in backward",
            f"memory asks for it, or the config: {figures}",
        )
        return replace(self, shardings=shardings, decisions=(*self.decisions, decision))

    def notes(self) -> list[str]:
        return [
            note
            for stage, sharding in sorted(self.shardings.items())
            for note in _notes(stage, sharding)
        ]


def _notes(stage: int, sharding: Sharding) -> list[str]:
    """What a user should know of one stage."""
    found = [f"stage {stage}: {note}" for note in sharding.notes]
    if sharding.replicated:
        shown = ", ".join(dict.fromkeys(sharding.replicated))
        found.append(
            f"stage {stage} runs {len(sharding.replicated)} operations whole on every device of "
            f"its grid: {shown}"
        )
    few: dict[tuple[int, int], list[str]] = {}
    for name, layout in sharding.stored.items():
        for cut, axes in zip(layout.cuts, layout.axes, strict=True):
            parts = prod(sharding.grid.size(axis) for axis in axes)
            if cut.count < parts:
                few.setdefault((cut.count, parts), []).append(name)
    for (count, parts), names in few.items():
        which = listed(list(dict.fromkeys(names)), 1)
        found.append(
            f"stage {stage}: {which} can be cut into {count} parts only, for {parts} devices: "
            "some hold none of it"
        )
    return found
