"""Times of an optimizer's update: torch's SGD, which has no state, and AdamW, which keeps two averages, at two sizes of parameters.

Many parameters at once, as in a model: more bytes than the caches hold, so that an update finds nothing there of the step before.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from whale.cluster.kinds import OperationPoint
from whale.profiling.calibration import WITH_TWO_STATES, WITHOUT_STATE
from whale.profiling.steady import steady_seconds
from whale.runtime.ranks import Ranks

WIDTHS = {"cpu": ((16, 32), (1024, 8)), "cuda": ((64, 32), (8192, 2))}
"""(rows and columns of a parameter, number of parameters)"""
TRIAL_S = 0.3
"""how long each is repeated"""


def measure_updates(ranks: Ranks) -> tuple[OperationPoint, ...]:
    """Seconds of one parameter. All ranks call it and measure at the same time."""
    found = []
    for name, make in ((WITHOUT_STATE, torch.optim.SGD), (WITH_TWO_STATES, torch.optim.AdamW)):
        for width, number in WIDTHS[torch.device(ranks.device).type]:
            parameters = [torch.nn.Parameter(torch.randn(width, width, device=ranks.device)) for _ in range(number)]
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            seconds = _step_s(make(parameters, lr=1e-4), ranks) / number
            found.append(OperationPoint(name, 4.0 * width * width, seconds, seconds))
    return tuple(found)


def _step_s(optimizer: torch.optim.Optimizer, ranks: Ranks) -> float:
    optimizer.step()  # makes its state
    if ranks.is_distributed:
        dist.barrier()
    found: list[float] = []
    while sum(found) < TRIAL_S:
        start = time.perf_counter()
        optimizer.step()
        if ranks.device != "cpu":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return steady_seconds(found)
