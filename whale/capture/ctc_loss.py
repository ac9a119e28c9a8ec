"""The CTC loss of padded targets, as an operation of torch whose results have shapes that are known
before it runs: `whale::ctc_loss`. Torch's own has tables as wide as the longest target of its
batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("whale::ctc_loss", mutates_args=())
def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor]:
    """The loss of every sample, and the table that backward needs. `log_probs`: (time, sample,
    class); `targets`: (sample, label); table: (sample, time, 2 x labels + 1).
    """
    losses, table = torch.ops.aten._ctc_loss.Tensor(
        log_probs, targets, input_lengths, target_lengths, blank, zero_infinity
    )
    whole = table.new_zeros(_table_shape(log_probs, targets))
    whole[..., : table.shape[-1]] = table
    return losses, whole


@ctc_loss.register_fake
def _(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor]:
    table = log_probs.new_empty(_table_shape(log_probs, targets))
    return log_probs.new_empty(log_probs.shape[1]), table


def _table_shape(log_probs: Tensor, targets: Tensor) -> tuple[int, int, int]:
    return log_probs.shape[1], log_probs.shape[0], 2 * targets.shape[1] + 1


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    log_probs, targets, input_lengths, target_lengths, losses, table = ctx.saved_tensors
    longest = int(target_lengths.max())
    of_log_probs: Tensor = torch.ops.aten._ctc_loss_backward.Tensor(
        gradient.contiguous(),
        log_probs,
        targets,
        input_lengths,
        target_lengths,
        losses,
        table[..., : 2 * longest + 1].contiguous(),
        ctx.blank,
        ctx.zero_infinity,
    )
    return of_log_probs, None, None, None, None, None


ctc_loss.register_autograd(_backward, setup_context=_save)
