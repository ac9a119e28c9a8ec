"""Schedules on emulated devices against every class of `torch.distributed.pipelining`, in the same
run, taking turns.

A device takes 20 ms for the forward and 40 ms for the backward of a micro-batch, half of it for
weights; its chunks divide that. Both sides sleep by the same function. What is compared is the
order of the actions and the cost of the runtime, not compute: tensors are tiny. Beside every time
stands the time of the same order with free actions and messages (its ideal), and the lower bound of
any order.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # `python benchmarks/pipeline_emulated.py` finds its neighbours, too

import whale as wh
from benchmarks.side_by_side import Claim, Side, Times, alternate, report, run_ranks, say
from benchmarks.torch_schedules import TORCH, TorchJob, torch_side
from whale import scheduling
from whale.emulation.pace import Pace, sleep_until, wake_up_on_time
from whale.plans.revise import revise
from whale.scheduling import Action, Costs, Kind, Schedule
from whale.scheduling.placement import wave

FORWARD_S = 0.020
MESSAGE_S = 0.0006
ACTION_S = 0.0004
"""what a message and an action of our runtime are taken to cost when the order is made; the ideal
has neither
"""
WIDTH = 16
ROUNDS = 5


@dataclass(frozen=True)
class Case:
    """One number of devices and micro-batches."""

    num_devices: int
    num_micro_batch: int
    limit_s: float
    """the whole benchmark takes less than 5 minutes"""
    forward_s: float = FORWARD_S
    """of a device for one micro-batch; a backward takes twice as long"""

    @property
    def backward_s(self) -> float:
        return 2 * self.forward_s

    @property
    def name(self) -> str:
        return f"P={self.num_devices}, m={self.num_micro_batch}"

    def batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        return tuple(
            torch.randn(self.num_micro_batch, WIDTH, generator=generator) for _ in range(2)
        )  # type: ignore[return-value]


CASES = (Case(4, 4, 12.0), Case(4, 8, 20.0), Case(8, 8, 45.0), Case(8, 16, 65.0))
OURS = {"whale, 2 chunks": 1, "whale, 4 chunks": 2}
"""our sides and their number of waves; list-scheduled with split backwards"""
ALLOWED = {"whale, 2 chunks": 1.08, "whale, 4 chunks": 1.13}
"""measured time over own ideal"""


def pace(seconds: float) -> None:
    """What both sides call a compute action."""
    sleep_until(time.perf_counter() + seconds)


# ---- Whale


class Chain(nn.Module):
    """As many layers as there are chunks."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x - y).square().mean()


def whale_schedule(case: Case, num_waves: int) -> Schedule:
    """Made for these devices, with the memory of 1F1B."""
    graph = scheduling.StageGraph.chain(
        2 * num_waves * case.num_devices, wave(case.num_devices, num_waves)
    )
    unsplit = scheduling.stages_without_input_gradient(graph)
    costs = scheduling.even_costs(
        graph,
        case.forward_s,
        case.backward_s,
        message_s=MESSAGE_S,
        action_s=ACTION_S,
        memory_cap=case.num_devices,
        unsplit=unsplit,
    )
    return scheduling.build("zero-bubble", graph, case.num_micro_batch, costs)


def ideal_costs(case: Case, graph: scheduling.StageGraph) -> Costs:
    return scheduling.even_costs(
        graph,
        case.forward_s,
        case.backward_s,
        unsplit=scheduling.stages_without_input_gradient(graph),
    )


def chain_config(case: Case, num_stages: int) -> dict[str, object]:
    return {
        "schedule": "wave",
        "num_waves": num_stages // case.num_devices // 2,
        "num_task_graph": case.num_devices,
        "num_micro_batch": case.num_micro_batch,
        "check_capture": False,
    }


def whale_plan(case: Case, schedule: Schedule) -> wh.Plan:
    """A chain of layers under this schedule: made once, for all ranks."""
    num_stages = schedule.stage_graph.num_stages
    config = chain_config(case, num_stages)
    made = wh.plan(Chain(num_stages), case.batch(), cluster=case.num_devices, config=config)
    assert made.schedule.stage_graph == schedule.stage_graph
    return revise(made, schedule=schedule)


def whale_side(case: Case, name: str, plan: wh.Plan) -> Side:
    torch.manual_seed(0)
    model = Chain(len(plan.stages))
    batch = case.batch()
    num_chunks = len(plan.stages) // case.num_devices
    wh.init(chain_config(case, len(plan.stages)))
    engine = wh.parallelize(
        model,
        batch,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=1e-3),
        plan=plan,
    )
    engine.step(batch)
    (executor,) = engine.executors()
    executor.pace = Pace(
        {
            action: _seconds(case, action) / num_chunks
            for action in executor.program.actions
            if action.is_compute
        }
    )
    return Side(name, lambda step: engine.step(batch))


def _seconds(case: Case, action: Action) -> float:
    """Of a whole device."""
    part_s = case.backward_s / 2
    return {
        Kind.FORWARD: case.forward_s,
        Kind.BACKWARD: case.backward_s,
        Kind.INPUT: part_s,
        Kind.WEIGHT: part_s,
    }[action.kind]


# ---- torch


class _InputPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        pace(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        pace(ctx.backward_s)
        return gradient, None, None


class _WeightPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        pace(ctx.backward_s)
        return gradient, None


class PacedStage(nn.Module):
    """A chunk that takes the time of the emulated device."""

    def __init__(self, case: Case, num_chunks: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.forward_s = case.forward_s / num_chunks
        self.part_s = case.backward_s / 2 / num_chunks

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = _WeightPart.apply(self.weight, self.part_s)  # type: ignore[no-untyped-call]
        paced: Tensor = _InputPart.apply(x, self.forward_s, self.part_s)  # type: ignore[no-untyped-call]
        return paced * weight


def paced_side(case: Case, name: str) -> Side:
    job = TorchJob(
        case.num_micro_batch,
        lambda stage, total: PacedStage(case, total // case.num_devices),
        nn.functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        lambda step: case.batch(),
    )
    side = torch_side(name, TORCH[name], job)
    return Side(side.name, side.step)  # its layers are others than ours: the losses say nothing


# ---- both


def measure(plans: dict[Case, dict[str, wh.Plan]]) -> list[Times]:
    """Runs on every rank: times of all sides of each case."""
    wake_up_on_time()
    found = []
    for case, own in plans.items():
        ours = [whale_side(case, name, plan) for name, plan in own.items()]
        theirs = [
            paced_side(case, name)
            for name, kind in TORCH.items()
            if kind.runs(case.num_devices, case.num_micro_batch)
        ]
        say(f"{case.name}: {len(ours)} of our schedules, {len(theirs)} of torch's")
        found.append(alternate([*ours, *theirs], ROUNDS, 1, case.limit_s, warm_up=1))
    return found


def claims_of(case: Case, times: Times, schedules: dict[str, Schedule]) -> list[Claim]:
    medians = {name: times.median(name) for name in times.seconds}
    ours = min(OURS, key=medians.__getitem__)
    best_torch = min((name for name in medians if name in TORCH), key=medians.__getitem__)
    shown = {name: round(seconds * 1e3, 1) for name, seconds in medians.items()}
    more = {"best of ours": ours, "best of torch": best_torch, "ms": shown}
    found = []
    for name, schedule in schedules.items():
        ideal = scheduling.simulate(schedule, ideal_costs(case, schedule.stage_graph))
        details = {
            "ms": shown[name],
            "ideal ms": round(ideal.step_s * 1e3, 1),
            "lower bound ms": round(ideal.lower_bound_s * 1e3, 1),
        }
        ratio = medians[name] / ideal.step_s
        found.append(
            Claim(
                f"{case.name}: {name} / own ideal",
                ratio,
                ALLOWED[name],
                at_most=True,
                details=details,
            )
        )
    if case.num_devices == 8:
        target = 1.10 if case.num_micro_batch == 8 else 1.04
        found.append(
            Claim(
                f"{case.name}: best torch / whale",
                times.ratio(best_torch, ours),
                target,
                at_most=False,
                details=more,
            )
        )
        if case.num_micro_batch == 8:
            found.append(
                Claim(
                    f"{case.name}: torch 1F1B / whale",
                    times.ratio("torch 1F1B", ours),
                    1.6,
                    at_most=False,
                    details={},
                )
            )
    return found


def main() -> None:
    claims = []
    for num_devices in (4, 8):
        cases = [case for case in CASES if case.num_devices == num_devices]
        schedules = {
            case: {name: whale_schedule(case, num_waves) for name, num_waves in OURS.items()}
            for case in cases
        }
        plans = {
            case: {name: whale_plan(case, each) for name, each in schedules[case].items()}
            for case in cases
        }
        for case, times in zip(
            cases, run_ranks(measure, num_devices, plans, share_cores=True), strict=True
        ):
            claims += claims_of(case, times, schedules[case])
    report("pipeline_emulated", claims)


if __name__ == "__main__":
    main()
