"""All schedule classes of `torch.distributed.pipelining` that train, and how each wants its stages:
what a user would take instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from benchmarks.side_by_side import Side


@dataclass(frozen=True)
class TorchSchedule:
    """A class of torch's, and how it wants its stages."""

    make: Callable[..., Any]
    num_chunks: int = 1
    is_wave: bool = False
    fewest: Callable[[int], int] = lambda num_devices: num_devices
    """micro-batches that it needs"""

    def stages(self, rank: int, num_devices: int) -> list[int]:
        if self.is_wave:
            return [rank, 2 * num_devices - 1 - rank]
        return [rank + chunk * num_devices for chunk in range(self.num_chunks)]

    def runs(self, num_devices: int, num_micro_batch: int) -> bool:
        return num_micro_batch >= self.fewest(num_devices)


TORCH = {
    "torch GPipe": TorchSchedule(pipelining.ScheduleGPipe),
    "torch 1F1B": TorchSchedule(pipelining.Schedule1F1B),
    "torch Interleaved1F1B v=2": TorchSchedule(pipelining.ScheduleInterleaved1F1B, 2),
    "torch ZBV": TorchSchedule(pipelining.ScheduleZBVZeroBubble, 2, is_wave=True),
    "torch InterleavedZeroBubble v=2": TorchSchedule(pipelining.ScheduleInterleavedZeroBubble, 2),
    "torch InterleavedZeroBubble v=4": TorchSchedule(pipelining.ScheduleInterleavedZeroBubble, 4),
    "torch DualPipeV": TorchSchedule(
        pipelining.ScheduleDualPipeV, 2, is_wave=True, fewest=lambda num_devices: 2 * num_devices
    ),
}


@dataclass(frozen=True)
class TorchJob:
    """What a schedule of torch trains."""

    num_micro_batch: int
    make_stage: Callable[[int, int], nn.Module]
    """(stage, number of stages) -> its module"""
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    """step -> (input of the first stage, what the loss of the last one takes)"""


def torch_side(name: str, kind: TorchSchedule, job: TorchJob) -> Side:
    """One training step on this rank. Gradients are of the mean over micro-batches, as torch's
    schedules do it.
    """
    rank = dist.get_rank()
    num_devices = dist.get_world_size()
    total = kind.num_chunks * num_devices
    own = kind.stages(rank, num_devices)
    modules = [job.make_stage(index, total) for index in own]
    stages = [
        pipelining.PipelineStage(module, index, total, torch.device("cpu"))
        for module, index in zip(modules, own, strict=True)
    ]
    schedule = kind.make(
        stages if kind.num_chunks > 1 else stages[0], job.num_micro_batch, loss_fn=job.loss
    )
    optimizer = job.optimizer(
        [parameter for module in modules for parameter in module.parameters()]
    )

    def train(step: int) -> list[Tensor]:
        x, y = job.batch(step)
        losses: list[Tensor] = []
        optimizer.zero_grad()
        given = (x,) if 0 in own else ()
        wanted = {"target": y, "losses": losses} if total - 1 in own else {}
        schedule.step(*given, **wanted, return_outputs=False)
        optimizer.step()
        return losses

    def loss_of(losses: list[Tensor]) -> float:
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.all_reduce(loss)  # all other ranks have none
        return float(loss)

    return Side(name, train, loss_of)
