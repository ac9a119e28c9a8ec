"""TaskGraphs of a model: as it is annotated, or cut into `num_task_graph` stages under the memory
of their devices.

A stage holds as many micro-batches at once as its schedule lets it. How many, is known only when
the schedule is there, so cuts are made one after the other for less and less memory, until one of
them can be drafted:

    1F1B's micro-batches in flight (all of them for gpipe)
    the same, with everything computed again in backward              where the config lets the planner do so
    as many in flight as there is room for, half of these, ... one    where the schedule is made for the memory that there is; with
                                                                      everything computed again, then without
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from torch.fx import Node

from whale.annotation import Strategy
from whale.planning.balance import Order
from whale.planning.chunks import FIXED_ORDERS
from whale.planning.pipeline_cuts import CutProblem
from whale.planning.problem import Problem
from whale.planning.stages import state_behind
from whale.planning.task_graphs import TaskGraphs, from_cuts, from_marks
from whale.planning.workload import Workload
from whale.plans.shares import NoRoom


@dataclass(frozen=True)
class Cutting:
    """One order of the devices, and the ways to cut the model for it."""

    problem: Problem
    workload: Workload
    operations: list[Node]
    order: Order

    @cached_property
    def annotated(self) -> TaskGraphs | None:
        """None: the model is to be cut."""
        problem = self.problem
        wanted = self.problem.config.num_task_graph
        if wanted is None or problem.cluster.num_devices == 1:
            return from_marks(
                self.operations, problem.kinds, problem.marks, problem.default_strategy
            )
        if problem.marks or problem.default_strategy:
            raise ValueError(
                f'"num_task_graph": {wanted} cuts a model without annotations, but this one is annotated: leave one of the two out'
            )
        return None

    @property
    def wanted(self) -> TaskGraphs:
        """What each TaskGraph is, whatever operations it gets."""
        if self.annotated is not None:
            return self.annotated
        number = self.problem.config.num_task_graph or 1
        return TaskGraphs(
            {}, (Strategy("replicate", 1),) * number, ("a part of the model",) * number, ""
        )

    def each(self) -> Iterator[tuple[TaskGraphs, str]]:
        """(TaskGraphs, why), each for less memory than the one before; raises `NoRoom` where none
        fits.
        """
        if self.annotated is not None:
            yield self.annotated, self.annotated.reason
            return
        found: list[TaskGraphs] = []
        refused: list[NoRoom] = []
        for most, again, why in self._memories():
            try:
                cut = self._cut(most, again)
            except NoRoom as error:
                refused.append(error)
                continue
            if all(cut.of_operation != other.of_operation for other in found):
                found.append(cut)
                yield cut, f'"num_task_graph": {len(cut.strategies)}; {cut.reason}{why}'
        if not found:
            raise refused[-1]

    def _memories(self) -> Iterator[tuple[int, bool, str]]:
        """(most micro-batches in flight on a stage, whether everything is computed again, what to
        say of it)
        """
        config = self.problem.config
        count = config.num_micro_batch
        recompute = config.recompute
        yield count, recompute is True, ""
        if recompute == "auto":
            yield count, True, ""
        if config.schedule not in FIXED_ORDERS:
            for again in (True, False) if recompute == "auto" else (recompute is True,):
                most = self._most_in_flight(again)
                while most:
                    yield (
                        most,
                        again,
                        f"; cut for at most {most} in flight on a stage, as memory is short",
                    )
                    most //= 2

    def _most_in_flight(self, again: bool) -> int:
        """The largest number for which there is a cut, 1 where there is none; by bisection."""
        low = 1
        high = min(self._cuts.num_stages, self.problem.config.num_micro_batch)
        while low < high:
            middle = (low + high + 1) // 2
            try:
                self._cut(middle, again)
                low = middle
            except NoRoom:
                high = middle - 1
        return low

    @cached_property
    def _cuts(self) -> CutProblem:
        problem = self.problem
        config = self.problem.config
        number = len(self.wanted.strategies)
        return CutProblem(
            self.workload,
            problem.cluster,
            self.order,
            number,
            config.num_micro_batch,
            config.schedule,
            config.dtype,
        )

    def _cut(self, most_in_flight: int, again: bool) -> TaskGraphs:
        cuts = self._cuts
        kinds = self.problem.kinds

        def names_behind(node: Node) -> list[str]:
            return [name for name, _ in state_behind(node, kinds)]

        try:
            return from_cuts(
                self.operations,
                kinds,
                cuts.num_stages,
                cuts.times,
                cuts.crossing_seconds,
                lambda nodes: cuts.memory(nodes, names_behind, most_in_flight, again),
                cuts.step_seconds,
                only_thin=again,
                boundary_weights=cuts.boundary_weights,
            )
        except NoRoom:
            raise
        except ValueError as error:
            raise ValueError(f'"num_task_graph": {cuts.num_stages}: {error}') from None
