"""Times of an optimizer's update: torch's SGD, which has no state, and AdamW, which keeps two
averages, at two sizes of parameters.

Many parameters at once, as in a model: more bytes than the caches hold, so that an update finds
nothing there of the step before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from whale.calibration.operations import Operations
from whale.calibration.turns import once
from whale.cluster.kinds import OperationPoint
from whale.costs.measured import WITH_TWO_STATES, WITHOUT_STATE
from whale.distributed.ranks import Ranks

WIDTHS = {False: ((16, 32), (1024, 8)), True: ((64, 32), (4096, 4))}
"""(rows and columns of a parameter, number of parameters), by whether the device is an
accelerator
"""


def updates_of(ranks: Ranks) -> list[Operations]:
    """By optimizer and size."""
    return [
        _update(name, make, width, number, ranks)
        for name, make in ((WITHOUT_STATE, torch.optim.SGD), (WITH_TWO_STATES, torch.optim.AdamW))
        for width, number in WIDTHS[ranks.device.is_accelerator]
    ]


def _update(
    name: str,
    make: type[torch.optim.SGD] | type[torch.optim.AdamW],
    width: int,
    number: int,
    ranks: Ranks,
) -> Operations:
    parameters = [
        torch.nn.Parameter(torch.randn(width, width, device=ranks.device.name))
        for _ in range(number)
    ]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)

    def points(seconds: Sequence[float]) -> list[OperationPoint]:
        """Of one parameter."""
        (one,) = (each / number for each in seconds)
        return [OperationPoint(name, 4.0 * width * width, one, one)]

    return Operations(once(make(parameters, lr=1e-4).step, ranks), points)
