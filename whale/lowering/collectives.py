"""Communication inside a forward: sums over all devices of a TaskGraph, with their backward."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from whale.lowering.lines import Line, sum_over_line
from whale.lowering.sharded_norms import batch_norm


def sum_over_devices(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Every device computes the same value, and each one's use of it counts: the backward is a sum,
    too.
    """
    return sum_over_line(value, _line(group))


def _line(group: dist.ProcessGroup | None) -> Line:
    return Line(dist.get_world_size(group), dist.get_rank(group), group)


def batch_norm_over_devices(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """`aten.batch_norm` in training mode with the statistics of all devices' samples."""
    return batch_norm(x, weight, bias, running_mean, running_var, momentum, eps, _line(group))
