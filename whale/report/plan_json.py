"""The figures of a plan as JSON: everything that the page shows, for other programs. The plan
itself is `Plan.save`'s file.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from whale.plans.plan import Plan
from whale.plans.sharding import StageSharding
from whale.report.device_table import forward_flop, layers_of, samples_by_rank
from whale.report.plan_table import summary
from whale.simulation.simulate import figures_in
from whale.simulation.timeline import Timeline


def plan_json(plan: Plan, timeline: Timeline) -> dict[str, Any]:
    """Plain data. Keys of `Timeline.to_json` stay where they are; the plan's own figures stand
    beside them.
    """
    predicted = timeline.to_json()
    devices = [
        {**figures, **work}
        for figures, work in zip(predicted.pop("devices"), _work_of_devices(plan), strict=True)
    ]
    return {
        "summary": summary(plan),
        "batch_size": plan.batch_size,
        "num_micro_batch": plan.num_micro_batch,
        "num_replicas": plan.num_replicas,
        "schedule": plan.schedule["name"],
        **predicted,
        "devices": devices,
        "network": asdict(figures_in(plan).network),
        "task_graphs": [asdict(part) for part in plan.task_graphs],
        "stages": [
            {**asdict(stage), "ranks": list(plan.ranks_of_stage(stage.index))}
            for stage in plan.stages
        ],
        "shardings": [_sharding(each) for each in plan.shardings],
        "decisions": [asdict(decision) for decision in plan.decisions],
        "notes": list(plan.notes),
    }


def _sharding(sharding: StageSharding) -> dict[str, Any]:
    """A stage on a grid: every operation with its pattern, bytes and reason."""
    names = ("stage", "num_samples", "seconds", "sent_bytes", "keeps_gathered", "replicated")
    return {
        **{name: getattr(sharding, name) for name in names},
        "operations": [asdict(operation) for operation in sharding.operations],
        "parameters": {name: asdict(stored) for name, stored in sharding.stored.items()},
    }


def _work_of_devices(plan: Plan) -> list[dict[str, Any]]:
    """What each rank does: stages and layers, samples, its part of a grid, FLOP."""
    found = []
    counts = samples_by_rank(plan)
    for rank, samples in enumerate(counts):
        index, replica, place = plan.place_of_rank(rank)
        device = plan.virtual_devices[index]
        own = [plan.stages[stage] for stage in plan.stages_of_rank(rank)]
        found.append(
            {
                "virtual_device": index,
                "replica": replica,
                "stages": [stage.index for stage in own],
                "layers": layers_of(own) if len(plan.stages) > 1 else "all",
                "samples": sum(samples),
                "samples_of_micro_batches": samples,
                "shard": None
                if device.grid is None
                else {"grid": device.grid.name, "place": place, "of": device.num_devices},
                "forward_flop": forward_flop(plan, rank, own, sum(samples)),
            }
        )
    return found
