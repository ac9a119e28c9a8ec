"""What the operations of an annotated model may become that carry no mark.

    as the planner has it   they join their neighbours (`planning/task_graphs.py`)
    together                one TaskGraph on the devices of the marked ones, where all share them
    on devices of their own one or more TaskGraphs, cut by time and memory

Each is given to the planner as marks, so every plan is one that a user could annotate. Own devices
are so many that those of all TaskGraphs divide the number of devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from torch.fx import Node

from whale.annotation import Mark, Strategy
from whale.names import count, listed
from whale.planning.balance import Order, device_orders
from whale.planning.pipeline_cuts import PipelineCuts
from whale.planning.pricing import typical_share
from whale.planning.problem import Problem
from whale.planning.task_graphs import TaskGraphs, label_of
from whale.search.outline import Outline
from whale.search.shapes import compositions
from whale.search.split_parts import parameter_readers

ALL_WIDTHS = 4
"""so many own devices are given to TaskGraphs in all ways, more of them to equally wide ones"""
SHOWN = 8
"""marks that are written out"""

Groups = list[tuple[int, ...]]
"""the ranks of one TaskGraph in every model replica"""


@dataclass(frozen=True, eq=False)
class Rest:
    """What unmarked operations become."""

    marks: Mapping[Node, Mark]
    """of the whole model: those of the user with their strategies, and those of the rest"""
    text: str


@dataclass(frozen=True)
class RestCuts(PipelineCuts):
    """Cuts of some operations on devices that are given."""

    given: list[Groups]

    @property
    def annotated(self) -> TaskGraphs | None:
        return None

    @property
    def num_stages(self) -> int:
        return len(self.given)

    @property
    def ranks(self) -> list[Groups]:
        return self.given


@dataclass(frozen=True)
class Unmarked:
    """The unmarked operations of one problem, whose number of micro-batches is a usual one."""

    problem: Problem
    outline: Outline
    most_cuts: int

    @cached_property
    def runs(self) -> list[list[Node]]:
        """Unmarked operations that lie together and read parameters, in their order. Others (a
        loss, a residual) are best where their neighbours are.
        """
        runs: list[list[Node]] = [[]]
        for node in self.outline.activations:
            if node in self.problem.marks:
                runs.append([])
            else:
                runs[-1].append(node)
        reading = {node for nodes in parameter_readers(self.outline).values() for node in nodes}
        return [run for run in runs if not reading.isdisjoint(run)]

    @cached_property
    def nodes(self) -> list[Node]:
        return [node for run in self.runs for node in run]

    @cached_property
    def marked(self) -> list[Mark]:
        """The user's marks, in the order of the model."""
        marks = self.problem.marks
        found = [marks[node] for node in self.outline.activations if node in marks]
        return list(dict.fromkeys(found))

    def rests(self) -> Iterator[Rest]:
        """What they may become, each once; first as the planner has it."""
        problem = self.problem
        number = problem.cluster.num_devices
        yield Rest(problem.marks, "joined to its neighbours")
        is_given = problem.default_strategy is not None or not self.runs
        if is_given or not self.marked or number == 1 or not problem.updates_alone:
            return
        wanted = [mark.strategy.num_devices for mark in self.marked]
        if problem.config.colocate or set(wanted) == {number}:
            yield self._rest([self.nodes], wanted[:1])
            return
        seen: list[Mapping[Node, Mark]] = []
        for parts, widths in self._cuts():
            rest = self._rest(parts, widths)
            if rest.marks not in seen:
                seen.append(rest.marks)
                yield rest

    def _rest(self, parts: Sequence[Sequence[Node]], widths: Sequence[int]) -> Rest:
        """Unmarked operations as these TaskGraphs. All marks are numbered in the order of the
        model, in which devices are given out.
        """
        marks = dict(self.problem.marks)
        for number, (part, width) in enumerate(zip(parts, widths, strict=True)):
            marks |= dict.fromkeys(part, Mark(("rest", number), Strategy("replicate", width)))
        in_order = dict.fromkeys(marks[node] for node in self.outline.activations if node in marks)
        numbered = {
            mark: replace(mark, order=("forward", number)) for number, mark in enumerate(in_order)
        }
        marks = {node: numbered[mark] for node, mark in marks.items() if mark in numbered}
        task_graphs = count(len(parts), "TaskGraph")
        devices = f"{' + '.join(map(str, widths))} device{'s' * (sum(widths) > 1)}"
        return Rest(marks, f"{task_graphs} on {devices}")

    def text(self, rest: Rest) -> str:
        """What is marked, and what the other operations become."""
        problem = self.problem
        strategies = []
        for mark in self.marked:
            own = [node for node in self.outline.activations if problem.marks.get(node) == mark]
            strategies.append(f"{mark.label or label_of(own)}: {mark.strategy}")
        if problem.default_strategy is not None:
            strategies.append(f"everything else: {problem.default_strategy}")
        text = f"as marked: {listed(strategies, SHOWN)}"
        is_open = problem.default_strategy is None and self.runs
        return f"{text}; not marked: {label_of(self.nodes)}, {rest.text}" if is_open else text

    # ---- on devices of their own

    def _cuts(self) -> Iterator[tuple[list[list[Node]], tuple[int, ...]]]:
        """(operations, devices) of every TaskGraph, for all widths and orders of the devices."""
        left = self.most_cuts
        for widths in self._widths():
            for order in self._orders(widths):
                if not left:
                    return
                left -= 1
                for parts in self._parts(widths, order):
                    yield parts, widths

    def _widths(self) -> list[tuple[int, ...]]:
        """Devices of TaskGraphs of their own, few TaskGraphs first."""
        number = self.problem.cluster.num_devices
        marked = sum(mark.strategy.num_devices for mark in self.marked)
        found: list[tuple[int, ...]] = []
        for total in range(marked + 1, number + 1):
            own = total - marked
            if number % total == 0:
                for widths in compositions([own]):
                    if own <= ALL_WIDTHS or max(widths) - min(widths) <= 1:
                        found.append(widths)
        return sorted(found, key=lambda widths: (len(widths), sum(widths), widths))

    def _orders(self, widths: tuple[int, ...]) -> tuple[Order, ...]:
        """Orders of the devices for which the cuts may differ."""
        total = sum(widths) + sum(mark.strategy.num_devices for mark in self.marked)
        orders = device_orders(self.problem.cluster, total, self.problem.dtype)
        return orders if len(widths) > 1 else orders[:1]

    def _parts(self, widths: tuple[int, ...], order: Order) -> Iterator[list[list[Node]]]:
        """Operations of every TaskGraph, cut for the devices that it has in this order; once more
        with cuts where marked operations lie between, so that no TaskGraph is entered twice.
        """
        if len(widths) == 1:
            yield [self.nodes]
            return
        problem = self.problem
        share = typical_share(
            problem.batch_size, problem.config.num_micro_batch, problem.cluster.num_devices
        )
        workload = self.outline.workload(share)
        cuts = RestCuts(problem, workload, self.nodes, order, self._groups(widths, order))
        try:
            task_graphs, _ = next(cuts.each())
        except ValueError:  # more TaskGraphs than there are points, or none that fit into memory
            return
        of_node = [task_graphs.of_operation[node] for node in self.nodes]
        starts = tuple(np.searchsorted(of_node, range(len(widths))).tolist())
        for each in dict.fromkeys([starts, self._between_runs(starts)]):
            yield [self.nodes[start:stop] for start, stop in pairwise([*each, len(self.nodes)])]

    def _groups(self, widths: tuple[int, ...], order: Order) -> list[Groups]:
        """The ranks of every TaskGraph of the rest. Marked ones stand before that which is cut
        about where they are in the model.
        """
        places = self.outline.places
        own = [places[node] for node in self.nodes]
        wanted: list[tuple[float, int, int]] = []
        for number, width in enumerate(widths):
            wanted.append((number, width, number))
        for mark in self.marked:
            first = next(node for node in places if self.problem.marks.get(node) == mark)
            before = np.searchsorted(own, places[first]) / len(own)
            wanted.append((round(before * len(widths)) - 0.5, mark.strategy.num_devices, -1))
        wanted.sort(key=lambda each: each[0])
        total = sum(width for _, width, _ in wanted)
        found: dict[int, Groups] = {}
        first_place = 0
        for _, width, number in wanted:
            groups = []
            for start in range(first_place, len(order.ranks), total):
                groups.append(order.ranks[start : start + width])
            found[number] = groups
            first_place += width
        return [found[number] for number in range(len(widths))]

    def _between_runs(self, starts: tuple[int, ...]) -> tuple[int, ...]:
        """The starts with the nearest one moved to every border between two runs."""
        borders = np.cumsum([len(run) for run in self.runs])[:-1].tolist()
        free = list(starts[1:])
        if len(borders) > len(free):
            return starts
        for border in borders:
            free.remove(min(free, key=lambda start: abs(start - border)))
        moved = sorted({0, *borders, *free})
        return tuple(moved) if len(moved) == len(starts) else starts
