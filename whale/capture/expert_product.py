"""The product of tokens with the weights of their experts, as an operation of torch: `expert_mm`.

On a CPU it is a loop over the experts, each of which has its rows. An accelerator would wait at the
host for the number of rows of each expert, and launch small products one by one; there torch's
`grouped_mm` takes all rows, sorted by expert, in one launch:

    rows       sorted by expert, those of no expert here last
    ends       [experts]: row behind the last one of each expert, on the device
    y          grouped_mm(x sorted, weight, ends), put back into the order of the tokens
    of x       grouped_mm(gradient sorted, weight transposed, ends)
    of weight  grouped_mm(x sorted and transposed, gradient sorted, ends): [experts, K, N]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

GROUPED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ALIGNMENT_BYTES = 16
"""what rows of all operands of `grouped_mm` must be a multiple of"""


@torch.library.custom_op("whale::expert_mm", mutates_args=())
def expert_mm(x: Tensor, weight: Tensor, experts: Tensor, transposed: bool) -> Tensor:
    """Row i of x [rows, K] times the matrix [K, N] of expert `experts[i]`: weight [experts, K, N],
    or [experts, N, K] if transposed. A row whose expert is not among them gives 0. Result: [rows,
    N]."""
    matrices = weight.transpose(1, 2) if transposed else weight
    if takes_grouped_mm(x, weight):
        return grouped_forward(x, matrices, experts)
    result = x.new_zeros(len(x), matrices.shape[2])
    for rows, matrix in zip(rows_by_expert(experts, len(weight)), matrices):
        result[rows] = x[rows] @ matrix
    return result


@expert_mm.register_fake
def _(x: Tensor, weight: Tensor, experts: Tensor, transposed: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1 if transposed else 2])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, experts, ctx.transposed = inputs
    ctx.save_for_backward(x, weight, experts)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
    x, weight, experts = ctx.saved_tensors
    if takes_grouped_mm(x, weight):
        matrices = weight.transpose(1, 2) if ctx.transposed else weight
        of_x, of_matrices = grouped_backward(x, matrices, experts, gradient)
        of_weight = of_matrices.transpose(1, 2) if ctx.transposed else of_matrices
        return of_x, of_weight, None, None
    of_x = torch.zeros_like(x)
    of_weight = torch.zeros_like(weight)
    for expert, rows in enumerate(rows_by_expert(experts, len(weight))):
        matrix = weight[expert] if ctx.transposed else weight[expert].T  # [N, K]
        of_x[rows] = gradient[rows] @ matrix
        of_weight[expert] = (
            gradient[rows].T @ x[rows] if ctx.transposed else x[rows].T @ gradient[rows]
        )
    return of_x, of_weight, None, None


expert_mm.register_autograd(_backward, setup_context=_save)
EXPERT_MM = torch.ops.whale.expert_mm.default


def rows_by_expert(experts: Tensor, num_experts: int) -> Sequence[Tensor]:
    """The numbers of each expert's rows, in order. The host waits for how many there are."""
    order = experts.argsort(stable=True)
    starts = torch.searchsorted(
        experts[order], torch.arange(num_experts + 1, device=experts.device, dtype=experts.dtype)
    ).tolist()
    return [order[start:stop] for start, stop in zip(starts, starts[1:])]


# ---- in one launch


def takes_grouped_mm(x: Tensor, weight: Tensor) -> bool:
    """Whether the product is one `grouped_mm`: on an accelerator, where dtype and sizes fit."""
    if x.device.type == "cpu" or x.dtype not in GROUPED_DTYPES or weight.dtype != x.dtype:
        return False
    sizes = weight.shape[1:]
    are_aligned = all(size * x.element_size() % ALIGNMENT_BYTES == 0 for size in sizes)
    return len(x) > 0 and are_aligned and weight.is_contiguous()


@dataclass(frozen=True)
class Groups:
    """Rows sorted by expert. All of it stays on the device."""

    order: Tensor
    """[rows]: numbers of the rows, sorted; those of no expert here are last"""
    ends: Tensor
    """[experts] int32"""

    @staticmethod
    def of(experts: Tensor, num_experts: int) -> Groups:
        is_here = (experts >= 0) & (experts < num_experts)
        keys = torch.where(is_here, experts, num_experts)
        in_order, order = keys.sort(stable=True)
        numbers = torch.arange(num_experts, device=experts.device, dtype=experts.dtype)
        ends = torch.searchsorted(in_order, numbers, right=True)
        return Groups(order, ends.to(torch.int32))

    def put_back(self, rows: Tensor) -> Tensor:
        """Sorted rows in the order of the tokens; 0 for those of no expert here, of which
        `grouped_mm` leaves whatever there was in memory.
        """
        places = torch.arange(len(rows), device=rows.device)
        kept = torch.where((places < self.ends[-1]).unsqueeze(1), rows, 0)
        return torch.empty_like(kept).index_copy_(0, self.order, kept)


def grouped_forward(x: Tensor, matrices: Tensor, experts: Tensor) -> Tensor:
    """`matrices`: [experts, K, N]. Result: [rows, N]."""
    groups = Groups.of(experts, len(matrices))
    return groups.put_back(F.grouped_mm(x[groups.order], matrices, offs=groups.ends))


def grouped_backward(
    x: Tensor, matrices: Tensor, experts: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x [rows, K] and of the matrices [experts, K, N]."""
    groups = Groups.of(experts, len(matrices))
    sorted_gradient = gradient.contiguous()[groups.order]
    sorted_x = x[groups.order]
    of_x = F.grouped_mm(sorted_gradient, matrices.transpose(1, 2), offs=groups.ends)
    of_matrices = F.grouped_mm(sorted_x.t(), sorted_gradient, offs=groups.ends)
    num_rows = groups.ends.diff(prepend=groups.ends.new_zeros(1))
    has_rows = (num_rows > 0).view(-1, 1, 1)  # a product of no rows is not written everywhere
    return groups.put_back(of_x), torch.where(has_rows, of_matrices, 0)
