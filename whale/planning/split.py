"""The stages on grids of one draft: the program of each, their shardings, and what each place of a
grid holds of the weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

from torch.fx import Node

from whale.capture.graph import CapturedGraph
from whale.capture.kinds import ValueKind
from whale.names import listed
from whale.planning.grid_workspace import OnDevice
from whale.planning.stages import Assignment
from whale.plans.grid import Grid
from whale.plans.layout import Layout
from whale.plans.plan import Decision
from whale.plans.sharding import Sharding, StageSharding
from whale.plans.virtual_devices import DevicePlacement
from whale.sharding.space import Space, StageProgram
from whale.units import human_bytes, human_seconds


def stage_program(
    captured: CapturedGraph,
    kinds: Mapping[Node, ValueKind],
    assignment: Assignment,
    stage: int,
    terms: Sequence[Node],
    outputs: Sequence[Node] = (),
    by_samples: frozenset[Node] = frozenset(),
    summa: frozenset[Node] = frozenset(),
) -> StageProgram:
    """One stage as a program to be sharded. `terms`: loss terms of this stage; `outputs`: results
    that the user wants from it.
    """
    part = assignment.slices[stage]
    updates = {}
    for name, node in captured.buffer_updates.items():
        if assignment.result_stage[node] == stage:
            updates[name] = node
    return StageProgram(
        captured=captured,
        kinds=kinds,
        operations=part.operations,
        inputs=part.inputs,
        received=part.received,
        state=part.state,
        sent=tuple(sorted({node for node, source, _ in assignment.crossings if source == stage})),
        outputs=tuple(outputs),
        terms=tuple(terms),
        updates=updates,
        by_samples=by_samples,
        gradients=assignment.gradients,
        summa=summa & frozenset(part.operations),
    )


def together_seconds(
    sharding: Sharding, num_micro_batch: int, recomputed: float = 0.0
) -> tuple[float, float, float]:
    """Seconds of a mini-batch on a grid: forward, input gradient, weight gradient. `recomputed`:
    the fraction of the forward that backward repeats.
    """
    total = (sharding.seconds - sharding.sum_seconds) * num_micro_batch
    forward = sharding.forward_part * total
    gradient = (total - forward) / 2  # one product for the input, one for the weight
    return forward, gradient + recomputed * forward, gradient


class HeldBytes(NamedTuple):
    """Bytes of weights at one place of a grid."""

    parameters: int
    trained: int
    """parameters that get a gradient"""
    largest: int
    """the largest trained parameter"""
    shared: int
    """trained parameters whose gradients are all-reduced with other devices"""


@dataclass(frozen=True)
class Split:
    """The stages on grids of one draft."""

    placement: DevicePlacement
    """with the grids that were chosen"""
    shardings: Mapping[int, Sharding]
    """by stage"""
    spaces: Mapping[int, Space]
    """by stage"""
    num_samples: int
    """samples of a model replica in the largest micro-batch"""
    decisions: tuple[Decision, ...] = ()
    _held: dict[tuple[int, ...], list[HeldBytes]] = field(
        default_factory=dict, repr=False, compare=False
    )
    """cache of `held_bytes`"""
    _on_device: dict[int, OnDevice] = field(default_factory=dict, repr=False, compare=False)
    """cache of `on_device`"""

    @property
    def cut_names(self) -> set[str]:
        """Parameters that a grid cuts."""
        return {
            name
            for sharding in self.shardings.values()
            for name, layout in sharding.stored.items()
            if layout.sharded
        }

    def held_bytes(self, stages: Sequence[int]) -> list[HeldBytes]:
        """Bytes at each place of a grid with these stages."""
        key = tuple(stages)
        if key not in self._held:
            layouts: dict[str, Layout] = {}
            for stage in stages:
                layouts |= self.shardings[stage].stored
            # equal layers have equal layouts: each is looked at once
            state = self.spaces[stages[0]].program.captured.state
            alike = Counter(
                (layout, state[name].dtype.itemsize, state[name].trainable)
                for name, layout in layouts.items()
            )
            grid = self.shardings[stages[0]].grid
            self._held[key] = [
                self._held_at(place, grid, alike) for place in range(grid.num_devices)
            ]
        return self._held[key]

    def _held_at(
        self, place: int, grid: Grid, alike: Mapping[tuple[Layout, int, bool], int]
    ) -> HeldBytes:
        """Bytes at one place. `alike`: number of parameters by (layout, bytes of an entry,
        trained).
        """
        parameters = trained = largest = shared = 0
        for (layout, entry_bytes, is_trained), number in alike.items():
            one = entry_bytes * layout.local_count(grid, place)
            parameters += number * one
            if is_trained:
                trained += number * one
                largest = max(largest, one)
                if self.placement.num_replicas > 1 or len(layout.same_places(grid, place)) > 1:
                    shared += number * one
        return HeldBytes(parameters, trained, largest, shared)

    def on_device(self, stage: int) -> OnDevice:
        """Sizes of the values of a stage, and its redistributions, on one device."""
        if stage not in self._on_device:
            self._on_device[stage] = OnDevice(
                self.spaces[stage], self.shardings[stage], self.num_samples
            )
        return self._on_device[stage]

    def records(self) -> tuple[StageSharding, ...]:
        """The shardings as the plan holds them."""
        return tuple(
            StageSharding.of(stage, sharding, self.num_samples)
            for stage, sharding in sorted(self.shardings.items())
        )

    def gathering_again(self) -> Split:
        """These stages with less saved for backward: what forward gathers is gathered once more
        there.
        """
        shardings = {}
        saved_bytes = 0.0
        for stage, each in self.shardings.items():
            seconds = each.seconds + each.gathered.seconds
            shardings[stage] = replace(each, keeps_gathered=False, seconds=seconds)
            gathered = each.gathered.fixed_bytes + self.num_samples * each.gathered.sample_bytes
            saved_bytes = max(saved_bytes, gathered)
        more_s = sum(each.gathered.seconds for each in self.shardings.values())
        decision = Decision(
            "gathered tensors",
            "gathered again in backward",
            f"memory asks for it, or the config: saves up to {human_bytes(saved_bytes)} on a "
            f"device for {human_seconds(more_s)} more a micro-batch",
        )
        return replace(self, shardings=shardings, decisions=(*self.decisions, decision))

    def notes(self) -> list[str]:
        """Sentences for the user, of all stages."""
        found = []
        for stage, sharding in sorted(self.shardings.items()):
            found += _notes(stage, sharding)
        return found


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
