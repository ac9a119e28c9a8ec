"""Plans whose model replicas are not alike, seen template by template.

Replicas of one template are alike: they share stages, crossings and schedule, and cut their samples
of the mini-batch into the same micro-batches. So what the replicas of one template do is a plan of
its own, on some of the ranks and on a contiguous range of the samples:

    mini-batch   | samples of template 0 | samples of template 1 | ...                          (1)

Nothing goes from one template to another but gradients, which are summed over whoever holds the
same parameter, and the loss. Whoever deals with one rank therefore takes the view of its template
(`plan.of_rank(rank)`), in which stages, VirtualDevices and replicas are counted from 0, and need
not know that there are others. Ranks keep their numbers.

In the whole plan stages and VirtualDevices are counted through all templates, those of template 0
first; figures and holders use these numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from whale.plans.figures import Figures, StateFigures
from whale.plans.plan import Plan, Replica, Stage, TaskGraph


@dataclass(frozen=True)
class TemplatePlan(Plan):
    """What the replicas of one template do. `batch_size` is their part of the mini-batch."""

    number: int = 0
    """of the template in the whole plan"""
    whole: Plan | None = None

    @property
    def mini_batch_size(self) -> int:
        assert self.whole is not None
        return self.whole.batch_size

    @property
    def first_replica(self) -> int:
        """Replicas of earlier templates: what the replicas of this one are counted from."""
        assert self.whole is not None
        return sum(len(view.replicas) for view in self.whole.by_template[: self.number])


def stage_offsets(plan: Plan) -> list[int]:
    """Number of stages in all templates before each one, and in all of them."""
    found = [0]
    for template in plan.templates:
        found.append(found[-1] + len(template.stages))
    return found


def device_offsets(plan: Plan) -> list[int]:
    """Number of VirtualDevices in all templates before each one, and in all of them."""
    found = [0]
    for template in plan.templates:
        found.append(found[-1] + len(template.grids))
    return found


def views(plan: Plan) -> tuple[TemplatePlan, ...]:
    """One view for each template."""
    return tuple(_view(plan, number) for number in range(len(plan.templates)))


def _view(plan: Plan, number: int) -> TemplatePlan:
    template = plan.templates[number]
    replicas = tuple(
        replace(replica, template=0) for replica in plan.replicas if replica.template == number
    )
    used = sorted({index for stage in template.stages for index in stage.task_graphs})
    first_device = device_offsets(plan)[number]
    task_graphs = tuple(
        replace(
            plan.task_graphs[index],
            index=place,
            virtual_device=plan.task_graphs[index].virtual_device - first_device,
        )
        for place, index in enumerate(used)
    )
    stages = tuple(
        replace(stage, task_graphs=tuple(used.index(index) for index in stage.task_graphs))
        for stage in template.stages
    )
    return TemplatePlan(
        format=plan.format,
        model=plan.model,
        settings=plan.settings,
        batch_size=num_samples(plan, replicas),
        num_micro_batch=template.schedule.num_micro_batch,
        devices=plan.devices,
        device_of_rank=plan.device_of_rank,
        task_graphs=task_graphs,
        templates=(replace(template, stages=stages),),
        replicas=replicas,
        shares=plan.shares,
        decisions=plan.decisions,
        notes=plan.notes,
        least_samples=plan.least_samples,
        figures=_figures(plan, number),
        number=number,
        whole=plan,
    )


def num_samples(plan: Plan, replicas: Sequence[Replica]) -> int:
    """Samples of the planned mini-batch that these replicas get."""
    return sum(
        plan.shares[index].num_samples * times
        for replica in replicas
        for index, times in replica.shares
    )


def _figures(plan: Plan, number: int) -> Figures | None:
    """The figures with the stages of one template; who shares which gradients is said by ranks."""
    figures = plan.figures
    if figures is None:
        return None
    first, last = stage_offsets(plan)[number : number + 2]
    states = []
    for state in figures.states:
        own = tuple(stage - first for stage in state.stages if first <= stage < last)
        if own:
            states.append(_with_groups(plan, state, own))
    return replace(figures, stages=figures.stages[first:last], states=tuple(states))


def _with_groups(plan: Plan, state: StateFigures, stages: tuple[int, ...]) -> StateFigures:
    return replace(
        state,
        stages=stages,
        parts=state.groups(plan.ranks_of_stage),
        part_bytes=state.part_bytes or ((state.weight_bytes, state.trained_bytes),),
    )


def all_stages(plan: Plan) -> tuple[Stage, ...]:
    """The stages of all templates, with the numbers that they have in the whole plan."""
    found = []
    offsets = zip(stage_offsets(plan), device_offsets(plan))
    for template, (first, first_device) in zip(plan.templates, offsets):
        for stage in template.stages:
            found.append(
                replace(
                    stage,
                    index=first + stage.index,
                    virtual_device=first_device + stage.virtual_device,
                )
            )
    return tuple(found)


def renumbered_task_graphs(
    task_graphs: Sequence[TaskGraph], first: int, first_device: int
) -> tuple[TaskGraph, ...]:
    """The TaskGraphs of one template as the whole plan counts them."""
    return tuple(
        replace(
            part,
            index=first + part.index,
            virtual_device=first_device + part.virtual_device,
        )
        for part in task_graphs
    )
