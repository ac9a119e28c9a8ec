"""Which TaskGraph each operation belongs to: by annotation, by the default strategy, or by cutting
an unannotated model.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch.fx import Node

from whale.annotation import Mark, Strategy
from whale.capture.graph import module_name
from whale.capture.kinds import Kind
from whale.planning.cuts import SAME_TIME, Floats, StageMemory, cut

THIN = 1.5
_WHERE = {
    "construction": 0,
    "glob": 1,
    "forward": 2,
}  # order of TaskGraphs that were said in different places


@dataclass(frozen=True)
class TaskGraphs:
    """TaskGraph of each ACTIVATION, and what each TaskGraph is."""

    of_operation: dict[Node, int]
    strategies: tuple[Strategy, ...]
    labels: tuple[str, ...]
    reason: str


def from_marks(
    operations: Sequence[Node],
    kinds: Mapping[Node, Kind],
    marks: Mapping[Node, Mark],
    default: Strategy | None,
) -> TaskGraphs:
    """TaskGraphs of an annotated model. Unmarked: default strategy, else the latest producer's,
    else the earliest consumer's.
    """
    activations = [node for node in operations if kinds[node] is Kind.ACTIVATION]
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
        mark.label or _module_label([n for n in activations if of_operation.get(n) == index[mark]])
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
    first_seen = {
        task_graph: place
        for place, task_graph in enumerate(
            dict.fromkeys(of_operation[n] for n in activations if n in of_operation)
        )
    }
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


MESSAGE_WEIGHTS = (1.0, 0.5, 0.25, 0.1, 0.0)
"""parts of the time of messages with which cuts are tried"""
SMALL_MESSAGE = 0.05
"""of the slowest stage: messages below change no cut that matters"""


def from_cuts(
    operations: Sequence[Node],
    kinds: Mapping[Node, Kind],
    num_task_graph: int,
    times_of: Callable[[Sequence[Node]], Floats],
    crossing_seconds: Callable[[Node], float],
    memory_of: Callable[[Sequence[Node]], StageMemory] | None = None,
    step_of: Callable[[Floats, Floats], float] | None = None,
    only_thin: bool = False,
    boundary_weights: Sequence[float] | None = None,
    num_moves_of: Callable[[Floats, Floats], int] | None = None,
    over_full: Callable[[Sequence[int]], float] | None = None,
) -> TaskGraphs:
    """An unannotated model cut into `num_task_graph` TaskGraphs whose slowest is fastest, each
    `replicate(1)`.

    `times_of` gives (stages, operations), each stage on its own devices; `memory_of` what each
    stage may hold. `step_of(stage seconds, crossing seconds before each stage but the first)`: how
    long a step takes. With it, cuts are made with messages counted in full and in part, for they
    may be hidden under compute, and the fastest is taken. `boundary_weights`: by what the crossing
    in front of every stage but the first is longer, where links differ. `num_moves_of(the same)`:
    how many moves of single cuts are tried in the end, each kept if the step is shorter.
    `over_full(starts of the stages)`: by how much devices would be over-full. Moves that make that
    less come before shorter steps. `only_thin`: cut where little crosses, as far as there are such
    points: what crosses is kept for every micro-batch in flight.
    """
    activations = [node for node in operations if kinds[node] is Kind.ACTIVATION]
    place = {node: index for index, node in enumerate(activations)}
    times = times_of(activations)
    # a value is live between the operation that makes it and the last one that reads it
    change = np.zeros(len(activations) + 1)
    for node, index in place.items():
        last = max((place[user] for user in node.users if user in place), default=index)
        cost = crossing_seconds(node)
        change[index + 1] += cost
        change[last + 1] -= cost
    crossing = np.cumsum(change)[: len(activations)]
    memory = memory_of(activations) if memory_of is not None else None
    allowed = _cuttable(activations, times.max(axis=0), crossing)
    if only_thin:
        allowed = _thin(allowed, crossing, num_task_graph - 1)
    sums = np.concatenate([np.zeros((num_task_graph, 1)), np.cumsum(times, axis=1)], axis=1)

    def stages_and_crossings(starts: Sequence[int]) -> tuple[Floats, Floats]:
        ends = (*starts[1:], len(activations))
        stages = [
            sums[k, end] - sums[k, start]
            for k, (start, end) in enumerate(zip(starts, ends, strict=True))
        ]
        return np.array(stages), crossing[list(starts[1:])] * (
            1.0 if boundary_weights is None else np.array(boundary_weights)
        )

    cuts = cut(
        times,
        crossing,
        num_task_graph,
        allowed=allowed,
        memory=memory,
        boundary_weights=boundary_weights,
    )
    stages, crossed = stages_and_crossings(cuts.starts)
    if step_of is not None and crossed.max(initial=0.0) > SMALL_MESSAGE * stages.max():
        tried = {1.0: cuts}
        for weight in MESSAGE_WEIGHTS[1:]:
            found = cut(
                times,
                weight * crossing,
                num_task_graph,
                allowed=allowed,
                memory=memory,
                boundary_weights=boundary_weights,
            )
            if found.starts not in {each.starts for each in tried.values()}:
                tried[weight] = found
        if len(tried) > 1:
            best = min(
                tried, key=lambda weight: step_of(*stages_and_crossings(tried[weight].starts))
            )
            counted = (
                f"these times count {best:.3g} of what messages take, the best of "
                f"{len(MESSAGE_WEIGHTS)} parts that were tried"
            )
            cuts = replace(tried[best], reason=f"{tried[best].reason}; {counted}")
    if (
        step_of is not None
        and num_moves_of is not None
        and (tries := num_moves_of(*stages_and_crossings(cuts.starts)))
    ):

        def cost_of(starts: Sequence[int]) -> tuple[float, float]:
            return over_full(starts) if over_full is not None else 0.0, step_of(
                *stages_and_crossings(starts)
            )

        starts = _move_cuts(cuts.starts, np.flatnonzero(allowed), cost_of, tries)
        moved = sum(before != after for before, after in zip(cuts.starts, starts, strict=True))
        if moved:
            cuts = replace(
                cuts,
                starts=starts,
                reason=f"{cuts.reason}; then {moved} of the cuts moved, for a shorter step",
            )
    bounds = [*cuts.starts, len(activations)]
    of_operation = {
        node: index
        for index in range(num_task_graph)
        for node in activations[bounds[index] : bounds[index + 1]]
    }
    labels = [_module_label(activations[bounds[i] : bounds[i + 1]]) for i in range(num_task_graph)]
    return TaskGraphs(
        of_operation, (Strategy("replicate", 1),) * num_task_graph, tuple(labels), cuts.reason
    )


MOVES = (1, -1, 2, -2, 4, -4, 8, -8)
"""by how many points a cut is moved"""


def _move_cuts(
    starts: Sequence[int],
    points: np.ndarray,
    cost_of: Callable[[Sequence[int]], tuple[float, float]],
    tries: int,
) -> tuple[int, ...]:
    """Starts of stages from which no move of one cut costs less, or what is found after so many
    tries. Of two costs the first one counts before the second."""
    places = [
        -1,
        *(int(place) for place in np.searchsorted(points, starts[1:])),
        len(points),
    ]  # in `points`, both ends included

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
                if cost[0] < best[0] * (1 - SAME_TIME) or (
                    cost[0] <= best[0] and cost[1] < best[1] * (1 - SAME_TIME)
                ):
                    best = cost
                    places = moved
                    is_better = True
    return starts_at(places)


def _cuttable(activations: Sequence[Node], times: np.ndarray, crossing: np.ndarray) -> np.ndarray:
    """Where a stage may start: of positions with only free operations between them, the one where
    least crosses.
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


def _thin(allowed: np.ndarray, crossing: np.ndarray, needed: int) -> np.ndarray:
    """Of the allowed points those where at most `THIN` times as much crosses as at the thinnest of
    the middle half, if they are enough.
    """
    quarter = len(allowed) // 4
    middle = crossing[quarter : len(allowed) - quarter][allowed[quarter : len(allowed) - quarter]]
    thin: np.ndarray = allowed & (crossing <= THIN * middle.min(initial=np.inf))
    return thin if thin.sum() >= needed else allowed


def _module_label(operations: Sequence[Node]) -> str:
    """`transformer.h.0 .. transformer.h.5`: the modules at both ends."""
    names = [name for name in (module_name(node) for node in operations) if name]
    if not names:
        return "operations of the model itself"
    return names[0] if names[0] == names[-1] else f"{names[0]} .. {names[-1]}"
