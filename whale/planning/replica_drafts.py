"""The best draft of model replicas that are alike and whose devices are given: cuts, recomputation,
schedule and shares, as in any plan, for their own devices and samples.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch.fx import Node

from whale.capture.kinds import ValueKind
from whale.planning.assemble import assemble
from whale.planning.balance import Order
from whale.planning.drafts import Draft, OrderDrafts, StageCut
from whale.planning.grids import with_grids
from whale.planning.pipeline_cuts import PipelineCuts
from whale.planning.pricing import typical_share
from whale.planning.problem import Problem, check_loss_and_buffers
from whale.planning.replica_specs import ReplicaSpec, activations
from whale.planning.task_graphs import TaskGraphs, label_of
from whale.planning.workload import Workload
from whale.plans.plan import Plan
from whale.plans.shares import DoesNotFit, check_batch
from whale.plans.virtual_devices import DevicePlacement, VirtualDevice
from whale.simulation.simulate import step_seconds

MOST_KEPT = 400_000
"""operations of all drafts that are kept together: thousands of drafts of a tiny model, few of a
large one
"""


@dataclass(frozen=True)
class GroupDraft:
    """Alike replicas with the samples that they get, on devices that are counted from 0."""

    problem: Problem
    workload: Workload
    draft: Draft
    model: str
    """fingerprint of the graph"""

    @cached_property
    def plan(self) -> Plan:
        return assemble(self.problem, self.workload, self.draft, self.model)

    @cached_property
    def gradients_s(self) -> float:
        """Seconds until all gradients are there."""
        return step_seconds(self.plan).gradients_s


@dataclass(frozen=True)
class GroupDrafts:
    """Drafts of groups of alike replicas for one problem, each made once: the candidates of a
    search have most of their replicas in common.
    """

    problem: Problem
    model: str
    """fingerprint of the graph"""
    _known: dict[Hashable, GroupDraft | ValueError] = field(default_factory=dict, repr=False)
    """drafts, and why there is none"""
    _workloads: dict[Hashable, Workload] = field(default_factory=dict, repr=False)

    def with_problem(self, problem: Problem) -> GroupDrafts:
        """These drafts for another candidate of a search, which differs in its settings alone."""
        return replace(self, problem=problem)

    def of(
        self, group: Sequence[ReplicaSpec], num_samples: int, is_trial: bool = False
    ) -> GroupDraft:
        """The best draft for these replicas; raises where memory is too small."""
        problem = replace(self.problem, is_trial=True) if is_trial else self.problem
        memory = (problem.config.zero, problem.offload)
        key = (tuple(group), num_samples, memory, problem.schedule_tries, problem.is_trial)
        if key not in self._known:
            while len(self._known) * len(problem.kinds) > MOST_KEPT:
                del self._known[next(iter(self._known))]
            try:
                self._known[key] = self._draft(problem, group, num_samples)
            except ValueError as error:
                self._known[key] = error
        found = self._known[key]
        if isinstance(found, ValueError):
            raise found.with_traceback(None)
        return found

    def _draft(
        self, problem: Problem, group: Sequence[ReplicaSpec], num_samples: int
    ) -> GroupDraft:
        spec = group[0]
        config = problem.config.replace(
            replicas=None,
            num_task_graph=None,
            num_micro_batch=spec.num_micro_batch,
            schedule=spec.schedule,
            num_waves=spec.num_waves,
            recompute=list(spec.recompute) if isinstance(spec.recompute, tuple) else spec.recompute,
        )
        devices = [problem.cluster.devices[rank] for rank in ranks_of_group(group)]
        own = replace(
            problem,
            cluster=problem.cluster.in_order(devices),
            config=config,
            batch_size=num_samples,
            mini_batch_size=problem.batch_size if num_samples < problem.batch_size else 0,
            # devices of other replicas have a say in it
            float32_precision=problem.float32_precision if problem.dtype == "tf32" else "highest",
        )
        share = typical_share(num_samples, spec.num_micro_batch, len(group))
        workload = self._workload(own, share)
        order = Order(spec.why, tuple(range(len(devices))))
        names = ", ".join(str(rank) for rank in group[0].ranks)
        try:
            best = ReplicaDrafts(own, workload, order, spec.local()).best()
            return GroupDraft(own, workload, best, self.model)
        except DoesNotFit as error:
            raise DoesNotFit(f"the model replica on ranks {names}: {error}") from None
        except ValueError as error:
            raise ValueError(f"the model replica on ranks {names}: {error}") from None

    def _workload(self, problem: Problem, share: int) -> Workload:
        key = (problem.batch_size, problem.mini_batch_size, share)
        if key not in self._workloads:
            self._workloads[key] = problem.workload(share)
        return self._workloads[key]


def ranks_of_group(group: Sequence[ReplicaSpec]) -> list[int]:
    """The ranks of alike replicas, one replica after the other."""
    return [rank for spec in group for rank in spec.ranks]


@dataclass(frozen=True)
class ReplicaDrafts(OrderDrafts):
    """The drafts of alike replicas whose stages are given."""

    spec: ReplicaSpec
    """with its devices counted from 0"""

    def best(self) -> Draft:
        starts = self.spec.starts
        if starts is None:
            return super().best()
        task_graphs = self._given_cut(starts)
        devices = self.spec.devices
        of_stage = tuple(devices.index(stage.ranks) for stage in self.spec.stages)
        placement = replace(self._placement, of_task_graph=of_stage)
        return self._draft(StageCut(task_graphs, self.spec.why, placement, is_chunked=True))

    def _given_cut(self, starts: Sequence[int]) -> TaskGraphs:
        """Every stage from its first operation to that of the next."""
        nodes = activations(self.problem.captured, self.problem.kinds)
        of_operation: dict[Node, int] = {}
        labels = []
        for stage, start in enumerate(starts):
            stop = starts[stage + 1] if stage + 1 < len(starts) else len(nodes)
            own = nodes[start:stop]
            if not own:
                raise ValueError(
                    f"stage {stage} from operation {start} to {stop} of the graph does nothing. "
                    f"Try: starts between 1 and {len(nodes) - 1} that rise from stage to stage"
                )
            of_operation |= dict.fromkeys(own, stage)
            labels.append(label_of(own))
        strategies = tuple(stage.strategy for stage in self.spec.stages)
        return TaskGraphs(of_operation, strategies, tuple(labels), self.spec.why)

    @cached_property
    def _cuts(self) -> PipelineCuts:
        return ReplicaCuts(self.problem, self.workload, self._operations, self.order, self.spec)

    @cached_property
    def _placement(self) -> DevicePlacement:
        problem = self.problem
        spec = self.spec
        width = len(spec.ranks)
        num_replicas = problem.cluster.num_devices // width
        devices = []
        for index, members in enumerate(spec.devices):
            ranks = tuple(
                tuple(replica * width + rank for rank in members) for replica in range(num_replicas)
            )
            devices.append(VirtualDevice(index, ranks))
        strategies = tuple(
            next(stage.strategy for stage in spec.stages if stage.ranks == members)
            for members in spec.devices
        )
        wanted = TaskGraphs({}, strategies, ("a part of the model",) * len(devices), "")
        placement = DevicePlacement(
            tuple(devices), tuple(range(len(devices))), num_replicas, spec.why
        )
        placement = with_grids(placement, wanted)
        widest = max(num_replicas * each.num_sample_parts for each in placement.virtual_devices)
        check_batch(problem.batch_size, spec.num_micro_batch, widest)
        check_loss_and_buffers(problem.captured, problem.not_additive, widest, spec.num_micro_batch)
        return placement


@dataclass(frozen=True)
class ReplicaCuts(PipelineCuts):
    """Cuts into stages whose devices are given: of any width, and `split` or not."""

    spec: ReplicaSpec

    @property
    def annotated(self) -> TaskGraphs | None:
        """One stage needs no cut; several are cut by time."""
        if len(self.spec.devices) > 1:
            return None
        activations = [
            node for node in self.operations if self.problem.kinds[node] is ValueKind.ACTIVATION
        ]
        of_operation = dict.fromkeys(activations, 0)
        strategies = (self.spec.stages[0].strategy,)
        return TaskGraphs(
            of_operation, strategies, ("the whole model",), f"one stage, {self.spec.why}"
        )

    @property
    def wanted(self) -> TaskGraphs:
        strategies = tuple(stage.strategy for stage in self.spec.stages)
        return TaskGraphs({}, strategies, ("a part of the model",) * len(strategies), "")

    @property
    def num_stages(self) -> int:
        return len(self.spec.devices)

    @cached_property
    def ranks(self) -> list[list[tuple[int, ...]]]:
        width = len(self.spec.ranks)
        num_replicas = self.problem.cluster.num_devices // width
        return [
            [tuple(replica * width + rank for rank in members) for replica in range(num_replicas)]
            for members in self.spec.devices
        ]

    def each(self) -> Iterator[tuple[TaskGraphs, str]]:
        for task_graphs, _ in super().each():
            strategies = tuple(stage.strategy for stage in self.spec.stages)
            yield replace(task_graphs, strategies=strategies), task_graphs.reason
