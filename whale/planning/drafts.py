"""The best draft of a plan for one order of the devices.

OrderDrafts.best        for every number of chunks on a device that the config allows ...
  _with_chunks          for every cut into so many that is worth a look (`pipeline_cuts.py`,
                        `chunks.py`) ...
    _draft              its stages, the layouts on its grids (`grids.py`), then the best schedule
                        and choice of what is recomputed (`priced_cut.py`)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from torch.fx import Node

from whale import scheduling
from whale.capture.graph import user_line
from whale.capture.kinds import ValueKind
from whale.capture.sample_states import batch_dim
from whale.costs.costs import value_bytes
from whale.planning.arrangement import Arrangement
from whale.planning.balance import DeviceLoads, Order
from whale.planning.chunks import ChunkCuts, chunk_counts
from whale.planning.grids import GridProblem, with_grids
from whale.planning.offload_account import OffloadAccount
from whale.planning.pipeline_cuts import PipelineCuts
from whale.planning.priced_cut import Priced, PricedCut
from whale.planning.problem import Problem, check_loss_and_buffers
from whale.planning.recompute import Regions, counts_of
from whale.planning.recompute_choice import Choice
from whale.planning.schedules import ACTION_S
from whale.planning.split import Split
from whale.planning.stages import (
    Assignment,
    assign_stages,
    make_assignment,
    move_free_operations,
)
from whale.planning.task_graphs import TaskGraphs
from whale.planning.workload import Workload
from whale.planning.zero import ZeroChoice
from whale.plans.away import StageActivations
from whale.plans.plan import Crossing, Stage
from whale.plans.shares import DoesNotFit, check_batch, those_that_fit
from whale.plans.virtual_devices import DevicePlacement, place
from whale.units import human_seconds

CHUNKED_CUTS = 2
"""cuts into chunks that are drafted where memory makes the first one slower"""


@dataclass(frozen=True)
class Draft:
    """Everything that follows from one order of the devices."""

    order: Order
    task_graphs: TaskGraphs
    why_task_graphs: str
    split: Split
    assignment: Assignment
    stages: tuple[Stage, ...]
    crossings: tuple[Crossing, ...]
    schedule: scheduling.Schedule
    costs: scheduling.Costs
    """that the schedule was made for"""
    device_loads: DeviceLoads
    slowest_s: float
    """of the device that takes longest for the largest micro-batch"""
    loads_without_recompute: DeviceLoads
    """what it would be if nothing were recomputed"""
    zero: ZeroChoice
    """what ranks share that would hold the same parameters"""
    loads_without_zero: DeviceLoads
    """what it would be if they did not"""
    account: OffloadAccount
    """what is at home elsewhere"""
    lost_s: float
    """how much longer the slowest device takes because memory keeps samples from faster ones"""
    is_short_of_memory: bool
    """with more of it the step would be shorter"""
    regions: tuple[Regions, ...] = ()
    """of every stage: what is recomputed in backward"""
    activations: tuple[StageActivations, ...] = ()
    """of every stage: what it saves; empty where that stays on the device"""
    why_chunks: str = ""

    @cached_property
    def predicted_s(self) -> float:
        """Seconds of the forwards and backwards of a step."""
        return scheduling.simulate(self.schedule, self.costs).step_s + self.lost_s

    @property
    def placement(self) -> DevicePlacement:
        return self.split.placement

    @property
    def num_actions(self) -> int:
        """Actions of all devices in a step."""
        devices = self.placement.virtual_devices
        return sum(
            len(order) * device.num_devices * len(device.ranks)
            for order, device in zip(self.schedule.orders, devices, strict=True)
        )

    @property
    def choice(self) -> Choice:
        return tuple(map(counts_of, self.stages))


@dataclass(frozen=True)
class StageCut:
    """One way to cut the model."""

    task_graphs: TaskGraphs
    why: str
    placement: DevicePlacement
    is_chunked: bool
    """every TaskGraph is a stage of its own"""


@dataclass(frozen=True)
class OrderDrafts:
    """The drafts for one order of the devices."""

    problem: Problem
    workload: Workload
    order: Order
    arrangement: Arrangement | None = field(default=None, kw_only=True)
    """devices and cuts that were chosen before; None: by annotations, or `num_task_graph`"""

    def best(self) -> Draft:
        """The draft with the best number of chunks; raises where memory is too small for each."""
        problem = self.problem
        drafts: dict[int, Draft] = {}
        refused: list[ValueError] = []
        counts = chunk_counts(problem.config, len(self._placement.virtual_devices))
        if self.arrangement is not None:
            counts = (self.arrangement.num_chunks,)
        is_first_only = problem.is_trial or problem.keeps_marks
        for num_chunks in counts[:1] if is_first_only else counts:
            try:
                drafts[num_chunks] = self._with_chunks(num_chunks)
            except DoesNotFit as error:  # "auto": other numbers of chunks lie otherwise in memory
                refused.append(error)
            except ValueError as error:  # "auto": more chunks than the model has points
                refused.append(error)
                break
        if not drafts:
            raise refused[0]
        if len(drafts) == 1:
            return next(iter(drafts.values()))
        best = min(drafts, key=lambda number: drafts[number].predicted_s)
        compared = ", ".join(
            f"{number}: {human_seconds(each.predicted_s)}" for number, each in drafts.items()
        )
        why = (
            f"; {best} chunks on each VirtualDevice take least time ({compared}; with "
            f"{ACTION_S * 1e3:g} ms for each action of the runtime)"
        )
        return replace(drafts[best], why_chunks=why)

    @cached_property
    def _operations(self) -> list[Node]:
        return list(self.problem.facts.operations)

    @cached_property
    def _cuts(self) -> PipelineCuts:
        return PipelineCuts(self.problem, self.workload, self._operations, self.order)

    @cached_property
    def _placement(self) -> DevicePlacement:
        """VirtualDevices with the ranks of this order; refuses a batch that they cannot share."""
        problem = self.problem
        config = problem.config
        placement = self._wanted_placement()
        devices = placement.virtual_devices
        widest = max(placement.num_replicas * device.num_sample_parts for device in devices)
        check_batch(problem.batch_size, config.num_micro_batch, widest)
        check_loss_and_buffers(
            problem.captured, problem.not_additive, widest, config.num_micro_batch
        )
        return replace(
            placement, virtual_devices=tuple(self.order.of(device) for device in devices)
        )

    def _wanted_placement(self) -> DevicePlacement:
        """VirtualDevices as they were chosen, or in the order that annotations give."""
        if self.arrangement is not None:
            return self.arrangement.placement
        wanted = self._cuts.wanted
        placement = place(
            [strategy.num_devices for strategy in wanted.strategies],
            self.problem.cluster.num_devices,
            colocate=self.problem.config.colocate,
        )
        return with_grids(placement, wanted)

    def _with_chunks(self, num_chunks: int) -> Draft:
        if self.arrangement is not None and self.arrangement.starts is not None:
            return self._fastest(self._arranged_cuts(self.arrangement), 1)
        if num_chunks == 1:
            return self._fastest(self._whole_cuts(), 1)
        return self._fastest(
            self._chunked_cuts(num_chunks), 1 if self.problem.is_trial else CHUNKED_CUTS
        )

    def _arranged_cuts(self, arrangement: Arrangement) -> Iterator[StageCut]:
        kinds = self.problem.kinds
        activations = [node for node in self._operations if kinds[node] is ValueKind.ACTIVATION]
        task_graphs = arrangement.task_graphs(activations)
        is_chunked = arrangement.is_chunked
        yield StageCut(task_graphs, task_graphs.reason, self._placement, is_chunked=is_chunked)

    def _whole_cuts(self) -> Iterator[StageCut]:
        for task_graphs, why in self._cuts.each():
            yield StageCut(task_graphs, why, self._placement, is_chunked=False)

    def _chunked_cuts(self, num_chunks: int) -> Iterator[StageCut]:
        problem = self.problem
        cuts = ChunkCuts(
            self.workload, problem.cluster, self._placement, num_chunks, problem.config
        )
        for task_graphs, placement in cuts.each(self._operations, problem.kinds):
            yield StageCut(task_graphs, task_graphs.reason, placement, is_chunked=True)

    def _fastest(self, cuts: Iterable[StageCut], number: int) -> Draft:
        """The fastest of the first so many that fit, or the first where memory does not make its
        step longer. Raises what the last one lacks if none fits.
        """
        found: list[Draft] = []
        for draft in those_that_fit(partial(self._draft, cut) for cut in cuts):
            found.append(draft)
            if len(found) == number or not draft.is_short_of_memory:
                break
        return min(found, key=lambda draft: draft.predicted_s) if len(found) > 1 else found[0]

    def _draft(self, cut: StageCut) -> Draft:
        """Stages, schedule and shares of one cut."""
        problem = self.problem
        assignment, device_of_stage = self._assign(cut)
        _refuse_cut_sums(problem, assignment, cut.placement, device_of_stage)
        split = self._split(cut, assignment, device_of_stage)
        priced_cut, plain, best = _choose(
            PricedCut(
                problem, self.workload, cut.task_graphs, split, assignment, tuple(device_of_stage)
            )
        )
        choice = tuple(map(counts_of, best.stages))
        is_away = priced_cut.offload.activations != "device"
        return Draft(
            order=self.order,
            task_graphs=cut.task_graphs,
            why_task_graphs=cut.why,
            split=priced_cut.split,
            assignment=assignment,
            stages=best.stages,
            crossings=priced_cut.crossings,
            schedule=best.schedule,
            costs=priced_cut.costs(best.stages, problem.config.num_micro_batch),
            device_loads=best.device_loads,
            slowest_s=best.device_loads.divide(problem.largest_micro_batch).slowest_s,
            loads_without_recompute=plain.device_loads,
            zero=priced_cut.zero,
            loads_without_zero=priced_cut.whole_loads(best),
            account=priced_cut.account,
            lost_s=priced_cut.lost_seconds(best),
            is_short_of_memory=priced_cut.is_short(plain),
            regions=priced_cut.regions(best.stages),
            activations=tuple(priced_cut.activations(choice)) if is_away else (),
        )

    def _assign(self, cut: StageCut) -> tuple[Assignment, list[int]]:
        """(stage of every operation, VirtualDevice of every stage)"""
        problem = self.problem
        captured = problem.captured
        of_task_graph = cut.placement.of_task_graph
        if cut.is_chunked:
            stage_of = dict(cut.task_graphs.of_operation)
            device_of_stage = list(of_task_graph)
        else:
            device_of = {
                node: of_task_graph[index] for node, index in cut.task_graphs.of_operation.items()
            }
            stage_of, device_of_stage = assign_stages(self._operations, problem.kinds, device_of)
        move_free_operations(
            self._operations, stage_of, lambda node: value_bytes(node, captured.batch_symbol, 1)
        )
        assignment = make_assignment(
            captured,
            problem.kinds,
            stage_of,
            len(device_of_stage),
            problem.config.num_micro_batch,
        )
        return assignment, device_of_stage

    def _split(
        self, cut: StageCut, assignment: Assignment, device_of_stage: Sequence[int]
    ) -> Split:
        """Grids and layouts of the stages that are sharded, for the largest part of a micro-batch
        that a replica gets.
        """
        problem = self.problem
        return GridProblem(
            captured=problem.captured,
            kinds=problem.kinds,
            assignment=assignment,
            device_of_stage=device_of_stage,
            placement=cut.placement,
            task_graphs=cut.task_graphs,
            cluster=problem.cluster,
            dtype=problem.dtype,
            num_samples=-(-problem.largest_micro_batch // cut.placement.num_replicas),
            num_micro_batch=problem.config.num_micro_batch,
            state_per_weight=2.0 + self.workload.optimizer_ratio,
            regions_on=self.workload.measured_regions,
        ).solve()


def _refuse_cut_sums(
    problem: Problem,
    assignment: Assignment,
    placement: DevicePlacement,
    device_of_stage: Sequence[int],
) -> None:
    """Refuses a cut behind a sum over samples next to a stage of several devices: each has the sum
    of its own samples, and a value without a batch dim is sent by one of them, to all.
    """
    captured = problem.captured
    if any("all_reduce" in node.meta for node in captured.compute_nodes()):
        return  # sums over samples are all-reduced where they are taken
    for node, source, destination in assignment.crossings:
        if problem.kinds[node] is not ValueKind.ACTIVATION:
            continue
        ends = [placement.virtual_devices[device_of_stage[end]] for end in (source, destination)]
        # several devices in front each have a part; several behind would each count the whole
        if all(device.num_devices == 1 or device.grid is not None for device in ends):
            continue
        if batch_dim(node, captured.batch_symbol) is None:
            raise ValueError(
                f"`{node.name}` ({user_line(node)}) is a sum over samples, and stage "
                f"{destination} ({ends[1].num_devices} devices) would read it from stage {source} "
                f"({ends[0].num_devices} devices), each of which has the sum of its own samples. "
                "Try: put what reads the sum into the same TaskGraph, or use fewer stages or chunks"
            )


def _choose(saving: PricedCut) -> tuple[PricedCut, Priced, Priced]:
    """The cut with what its grids gather saved for backward, or gathered again there where that is
    asked for, or memory makes it faster: (cut, its price without recomputation, its best price).
    """
    wanted = saving.problem.config.keep_gathered
    if not saving.split.shardings or wanted is True:
        return _chosen(saving)
    again = replace(saving, split=saving.split.gathering_again())
    if wanted is False:
        return _chosen(again)
    found: list[tuple[PricedCut, Priced, Priced]] = []
    for chosen in those_that_fit(partial(_chosen, each) for each in (saving, again)):
        found.append(chosen)
        plain = chosen[1]
        if not chosen[0].is_short(plain):
            break  # memory is no reason to gather again
    return min(found, key=lambda each: each[0].step_seconds(each[2]))


def _chosen(cut: PricedCut) -> tuple[PricedCut, Priced, Priced]:
    return cut, *cut.choose()
