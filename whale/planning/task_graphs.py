"""Which TaskGraph each operation belongs to: by annotation, by the default strategy, or by cutting
an unannotated model.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch.fx import Node

from whale.annotation import Mark, Strategy
from whale.capture.graph import module_name
from whale.capture.kinds import ValueKind
from whale.costs.backward_workspace import live_between
from whale.planning.cuts import SAME_TIME, Cuts, Floats, StageMemory, cut

THIN = 1.5
"""a cut is thin where at most so many times as much crosses as where least does"""
_WHERE = {"construction": 0, "glob": 1, "forward": 2}
"""order of TaskGraphs that were annotated in different ways"""


@dataclass(frozen=True)
class TaskGraphs:
    """The TaskGraph of each ACTIVATION, and the strategy and label of each TaskGraph. A TaskGraph
    is the part of the captured graph under one annotation.
    """

    of_operation: dict[Node, int]
    strategies: tuple[Strategy, ...]
    labels: tuple[str, ...]
    reason: str


def from_marks(
    operations: Sequence[Node],
    kinds: Mapping[Node, ValueKind],
    marks: Mapping[Node, Mark],
    default: Strategy | None,
) -> TaskGraphs:
    """TaskGraphs of an annotated model. Unmarked operations get the default strategy; without one
    they join the TaskGraph of their latest producer, else of their earliest consumer.
    """
    activations = [node for node in operations if kinds[node] is ValueKind.ACTIVATION]
    said = sorted(
        {marks[node] for node in activations if node in marks},
        key=lambda mark: (_WHERE[mark.order[0]], mark.order[1]),
    )
    if not said:
        strategy = default or Strategy("replicate", 1)
        why = "set_default_strategy" if default else "no annotation: data parallel"
        return TaskGraphs(dict.fromkeys(activations, 0), (strategy,), ("the whole model",), why)
    index = {mark: place for place, mark in enumerate(said)}
    of_operation = {node: index[marks[node]] for node in activations if node in marks}
    strategies = [mark.strategy for mark in said]
    labels = [
        mark.label or label_of([n for n in activations if of_operation.get(n) == index[mark]])
        for mark in said
    ]
    unmarked = [node for node in activations if node not in of_operation]
    if default is not None and unmarked:
        of_operation |= dict.fromkeys(unmarked, len(said))
        strategies.append(default)
        labels.append("everything unmarked")
    else:
        _adopt(activations, of_operation)
    return TaskGraphs(of_operation, tuple(strategies), tuple(labels), f"{len(said)} annotations")


def _adopt(activations: Sequence[Node], of_operation: dict[Node, int]) -> None:
    """Unmarked operations join the latest TaskGraph among their producers, else the earliest among
    their consumers.

    One that has neither (a weight penalty in the loss) joins the last TaskGraph: every weight lies
    before it, and only scalars are sent.
    """
    in_order = dict.fromkeys(of_operation[n] for n in activations if n in of_operation)
    first_seen = {task_graph: position for position, task_graph in enumerate(in_order)}
    for node in activations:
        if node not in of_operation:
            producers = [of_operation[p] for p in node.all_input_nodes if p in of_operation]
            if producers:
                of_operation[node] = max(producers, key=first_seen.__getitem__)
    last = max(first_seen, key=first_seen.__getitem__)
    for node in reversed(activations):
        if node not in of_operation:
            consumers = [of_operation[user] for user in node.users if user in of_operation]
            of_operation[node] = min(consumers, key=first_seen.__getitem__, default=last)


class CutCosts(Protocol):
    """Seconds of a whole mini-batch on the devices that are to run the stages."""

    @property
    def boundary_weights(self) -> Sequence[float]:
        """Factor on `crossing_seconds` in front of every stage but the first: links differ."""

    def times(self, operations: Sequence[Node]) -> Floats:
        """(stages, operations): seconds of each operation on the devices of each stage."""

    def crossing_seconds(self, node: Node) -> float:
        """Seconds to send one value over a link inside a host."""

    def step_seconds(self, stages: Floats, crossings: Floats) -> float:
        """Seconds of a step, given those of the stages and of the crossings in front of every
        stage but the first.
        """


@dataclass(frozen=True)
class CutMoves:
    """How single cuts are moved after the dynamic programme, each move kept if the step gets
    shorter.
    """

    num_tries: Callable[[Floats, Floats], int]
    """moves that are tried, given the seconds of stages and crossings"""
    over_full: Callable[[Sequence[int]], float] | None = None
    """by how much devices are over-full, given the starts of the stages; moves that make that less
    come before shorter steps
    """


@dataclass(frozen=True)
class _ModelChain:
    """The operations of a model as the chain that is cut."""

    times: Floats
    """(stages, operations)"""
    crossing: Floats
    """(operations,): seconds of all values that are live in front of an operation"""
    allowed: npt.NDArray[np.bool_]
    """(operations,): a stage may start here"""
    memory: StageMemory | None
    costs: CutCosts

    def cut(self, message_part: float) -> Cuts:
        """The best cuts where messages count for this part of their time."""
        return cut(
            self.times,
            message_part * self.crossing,
            len(self.times),
            allowed=self.allowed,
            memory=self.memory,
            boundary_weights=self.costs.boundary_weights,
        )

    @cached_property
    def _elapsed(self) -> Floats:
        """(stages, operations + 1): prefix sums of `times`."""
        return np.concatenate(
            [np.zeros((len(self.times), 1)), np.cumsum(self.times, axis=1)], axis=1
        )

    def stages_and_crossings(self, starts: Sequence[int]) -> tuple[Floats, Floats]:
        """Seconds of each stage, and of the crossing in front of every stage but the first."""
        bounds = [*starts, self.times.shape[1]]
        numbers = np.arange(len(starts))
        stages: Floats = self._elapsed[numbers, bounds[1:]] - self._elapsed[numbers, bounds[:-1]]
        crossings: Floats = self.crossing[bounds[1:-1]] * np.array(self.costs.boundary_weights)
        return stages, crossings

    def step_seconds(self, starts: Sequence[int]) -> float:
        return self.costs.step_seconds(*self.stages_and_crossings(starts))


def from_cuts(
    operations: Sequence[Node],
    kinds: Mapping[Node, ValueKind],
    num_task_graph: int,
    costs: CutCosts,
    *,
    memory_of: Callable[[Sequence[Node]], StageMemory] | None = None,
    only_thin: bool = False,
    moves: CutMoves | None = None,
    barred: Callable[[Sequence[Node]], Collection[int]] | None = None,
) -> TaskGraphs:
    """TaskGraphs of an unannotated model, cut so that the slowest is fastest, each `replicate(1)`.

    `memory_of` gives what each stage may hold. `only_thin`: cut where little crosses, as far as
    there are such points, since what crosses is saved for every micro-batch in flight. `barred`
    gives places in front of which no stage may start.
    """
    activations = [node for node in operations if kinds[node] is ValueKind.ACTIVATION]
    times = costs.times(activations)
    crossing = np.array(live_between(activations, costs.crossing_seconds)[:-1])
    allowed = cuttable(activations, times.max(axis=0), crossing)
    if barred is not None:
        allowed[list(barred(activations))] = False
    if only_thin:
        allowed = thin_points(allowed, crossing, num_task_graph - 1)
    memory = memory_of(activations) if memory_of is not None else None
    chain = _ModelChain(times, crossing, allowed, memory, costs)
    cuts = _best_message_part(chain)
    if moves is not None:
        cuts = _moved(chain, cuts, moves)
    return from_starts(activations, cuts.starts, (1,) * num_task_graph, cuts.reason)


def from_starts(
    activations: Sequence[Node], starts: Sequence[int], widths: Sequence[int], reason: str
) -> TaskGraphs:
    """TaskGraphs that start at these activations, each `replicate` over so many devices."""
    of_operation: dict[Node, int] = {}
    labels = []
    for index, (start, end) in enumerate(pairwise([*starts, len(activations)])):
        part = activations[start:end]
        of_operation |= dict.fromkeys(part, index)
        labels.append(label_of(part))
    strategies = tuple(Strategy("replicate", width) for width in widths)
    return TaskGraphs(of_operation, strategies, tuple(labels), reason)


MESSAGE_PARTS = (1.0, 0.5, 0.25, 0.1, 0.0)
"""parts of the time of messages with which cuts are tried: messages may hide under compute"""
SMALL_MESSAGE = 0.05
"""fraction of the slowest stage: messages below change no cut that matters"""


def _best_message_part(chain: _ModelChain) -> Cuts:
    """The cuts of the fastest step among those that count messages in full and in part."""
    whole = chain.cut(1.0)
    stages, crossings = chain.stages_and_crossings(whole.starts)
    if crossings.max(initial=0.0) <= SMALL_MESSAGE * stages.max():
        return whole
    tried = {1.0: whole}
    for part in MESSAGE_PARTS[1:]:
        found = chain.cut(part)
        if found.starts not in {each.starts for each in tried.values()}:
            tried[part] = found
    if len(tried) == 1:
        return whole
    best = min(tried, key=lambda part: chain.step_seconds(tried[part].starts))
    counted = (
        f"these times count {best:.3g} of what messages take, the best of "
        f"{len(MESSAGE_PARTS)} parts that were tried"
    )
    return replace(tried[best], reason=f"{tried[best].reason}; {counted}")


def _moved(chain: _ModelChain, cuts: Cuts, moves: CutMoves) -> Cuts:
    """The cuts after moves of single ones."""
    num_tries = moves.num_tries(*chain.stages_and_crossings(cuts.starts))
    if not num_tries:
        return cuts

    def cost_of(starts: Sequence[int]) -> tuple[float, float]:
        excess = moves.over_full(starts) if moves.over_full is not None else 0.0
        return excess, chain.step_seconds(starts)

    starts = _move_cuts(cuts.starts, np.flatnonzero(chain.allowed), cost_of, num_tries)
    num_moved = sum(before != after for before, after in zip(cuts.starts, starts, strict=True))
    if not num_moved:
        return cuts
    reason = f"{cuts.reason}; then {num_moved} of the cuts moved, for a shorter step"
    return replace(cuts, starts=starts, reason=reason)


MOVES = (1, -1, 2, -2, 4, -4, 8, -8)
"""by how many points a cut is moved"""


def _move_cuts(
    starts: Sequence[int],
    points: np.ndarray,
    cost_of: Callable[[Sequence[int]], tuple[float, float]],
    tries: int,
) -> tuple[int, ...]:
    """Starts of stages from which no move of one cut costs less, or those found after so many
    tries. Of the two costs the first counts before the second.
    """
    # positions in `points` of all boundaries, both ends of the model included
    places = [-1, *np.searchsorted(points, starts[1:]).tolist(), len(points)]

    def starts_at(places: Sequence[int]) -> tuple[int, ...]:
        return (0, *(int(points[place]) for place in places[1:-1]))

    best = cost_of(starts_at(places))
    is_better = True
    while is_better:
        is_better = False
        for cut_index in range(1, len(places) - 1):
            for move in MOVES:
                moved = [*places]
                moved[cut_index] += move
                if not moved[cut_index - 1] < moved[cut_index] < moved[cut_index + 1]:
                    continue
                if not tries:
                    return starts_at(places)
                tries -= 1
                cost = cost_of(starts_at(moved))
                is_less_full = cost[0] < best[0] * (1 - SAME_TIME)
                is_shorter = cost[0] <= best[0] and cost[1] < best[1] * (1 - SAME_TIME)
                if is_less_full or is_shorter:
                    best = cost
                    places = moved
                    is_better = True
    return starts_at(places)


def cuttable(activations: Sequence[Node], times: np.ndarray, crossing: np.ndarray) -> np.ndarray:
    """(operations,): whether a stage may start here. Of positions with only free operations between
    them it is the one where least crosses.
    """
    allowed = np.zeros(len(activations), dtype=bool)
    work_before = np.concatenate([[0.0], np.cumsum(times)])[:-1]
    best: dict[float, int] = {}
    for position in range(1, len(activations)):
        if activations[position].target is operator.getitem:
            continue  # a list is never cut from its parts
        work = float(work_before[position])
        if work > 0 and (work not in best or crossing[position] < crossing[best[work]]):
            best[work] = position
    allowed[list(best.values())] = True
    return allowed


def thin_points(allowed: np.ndarray, crossing: np.ndarray, needed: int) -> np.ndarray:
    """The allowed points where at most `THIN` times as much crosses as at the thinnest of the
    middle half of the model, or all of them if these are fewer than `needed`.
    """
    quarter = len(allowed) // 4
    half = slice(quarter, len(allowed) - quarter)
    middle = crossing[half][allowed[half]]
    thin: np.ndarray = allowed & (crossing <= THIN * middle.min(initial=np.inf))
    return thin if thin.sum() >= needed else allowed


def label_of(operations: Sequence[Node]) -> str:
    """`transformer.h.0 .. transformer.h.5`: the modules at both ends."""
    names = [name for name in (module_name(node) for node in operations) if name]
    if not names:
        return "operations of the model itself"
    return names[0] if names[0] == names[-1] else f"{names[0]} .. {names[-1]}"
