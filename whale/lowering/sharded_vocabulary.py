"""Operations on a dim of classes that is cut over a subgroup of devices: nobody ever gathers the
classes.

Cross entropy. With logits l, the largest one M and s = sum exp(l - M), a row's loss is, for
coefficients a_c of the classes,

    loss = sum_c a_c (log s - (l_c - M)),     a_c = (1 - e) w_t [c = t] + (e / C) w_c          (1)

(target t, class weights w, label smoothing e; a_c = w_c p_c for targets p that are probabilities).
Each device gives the part of its own classes: the result is a partial sum over the subgroup, its
gradient is therefore the same on all of it, and backward needs no message:

    d l_c = (softmax_c sum a - a_c) d loss                                                     (2)
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from whale.lowering.subgroups import Subgroup, all_gather, all_reduce, wide
from whale.operations.reductions import MEAN, NONE


def embedding(
    weight: Tensor, indices: Tensor, first: int, num_embeddings: int, padding_idx: int = -1
) -> Tensor:
    """Rows of a table of which this device has those from `first` on; zero for all others: a
    partial sum over the subgroup. Numbers outside the whole table are an error, as in one device's
    table."""
    num_rows = weight.shape[0]
    here = (indices >= first) & (indices < first + num_rows)
    wrong = _is_outside(indices, num_embeddings)
    _check("a token", indices, wrong, num_embeddings)
    if num_rows == 0:
        # zero, with a history
        return weight.new_zeros((*indices.shape, weight.shape[1])) + weight.sum()
    local = torch.where(here | wrong, indices - first, 0)
    padding = padding_idx - first if first <= padding_idx < first + num_rows else -1
    return torch.embedding(weight, local, padding) * here.unsqueeze(-1).to(weight.dtype)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    num_classes: int,
    first: int,
    subgroup: Subgroup,
) -> Tensor:
    """`aten.cross_entropy_loss`, this device having the classes from `first` on: its part of the
    loss (partial over the subgroup).

    `weight`, and `target` where it is probabilities, are cut like the classes. A mean is over the
    rows that are here.
    """
    if torch.is_autocast_enabled(logits.device.type):
        logits = wide(logits)  # torch takes losses out of autocast: their sums would lose digits
    is_single = logits.ndim == 1
    if is_single:
        logits = logits.unsqueeze(0)
        target = target.unsqueeze(0)
    by_class = logits.movedim(1, -1)
    rows = by_class.reshape(prod(by_class.shape[:-1]), by_class.shape[-1])
    is_index = not target.is_floating_point()
    labels = target.reshape(-1) if is_index else target.movedim(1, -1).reshape(rows.shape)
    classes = _Classes(first, num_classes, ignore_index, label_smoothing, subgroup)
    losses, weights = _CrossEntropy.apply(rows, labels, weight, classes)  # type: ignore[no-untyped-call]
    if reduction == NONE:
        return losses.view(() if is_single else by_class.shape[:-1])
    total: Tensor = losses.sum()
    return total / weights if reduction == MEAN else total


@dataclass(frozen=True)
class _Classes:
    """What is known of the classes beside their logits."""

    first: int
    num_classes: int
    ignore_index: int
    label_smoothing: float
    subgroup: Subgroup


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, weight: Tensor | None, classes: _Classes
    ) -> tuple[Tensor, Tensor]:
        """[rows, classes here] -> this device's part of each row's loss, and what a mean divides
        by.
        """
        values = wide(logits)
        largest, exponentials = _exponentials(values)
        rows = _Rows(values, labels, None if weight is None else wide(weight), classes)
        known = [largest, exponentials.sum(1)] + (
            [] if rows.own is None else [rows.own, rows.weight_sum.expand(1)]
        )
        everyone = all_gather(torch.cat(known), classes.subgroup)
        n = len(largest)
        largest_of_all, total = _combine(everyone[:, :n], everyone[:, n : 2 * n])
        own, weight_sum = (
            (None, None)
            if rows.own is None
            else (everyone[:, 2 * n : 3 * n].sum(0), everyone[:, 3 * n].sum())
        )
        coefficient, divisor = rows.coefficient_sum(own, weight_sum)
        here = rows.coefficient_here()
        losses = here * total.log() - (rows.weighted_logits() - here * largest_of_all)
        probabilities = exponentials.mul_(
            ((largest - largest_of_all).exp() / total).nan_to_num_(0.0).unsqueeze(1)
        )
        ctx.save_for_backward(probabilities, labels, weight, coefficient)
        ctx.classes = classes
        ctx.dtype = logits.dtype
        ctx.mark_non_differentiable(divisor)
        return losses.to(logits.dtype), divisor.to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, labels, weight, coefficient = ctx.saved_tensors
        rows = _Rows(probabilities, labels, None if weight is None else wide(weight), ctx.classes)
        d_logits = probabilities * coefficient.unsqueeze(1)
        rows.subtract_coefficients(d_logits)
        # line (2)
        return (
            d_logits.mul_(wide(gradients[0]).unsqueeze(1)).to(ctx.dtype),
            None,
            None,
            None,
        )


class _Rows:
    """The coefficients of line (1), of the classes that are here."""

    def __init__(
        self, values: Tensor, labels: Tensor, weight: Tensor | None, classes: _Classes
    ) -> None:
        self.values = values
        self.weight = weight
        self.smoothing = classes.label_smoothing
        self.num_here = values.shape[1]
        self.num_classes = classes.num_classes
        self.weight_sum = (
            values.new_full((), float(self.num_here)) if weight is None else weight.sum()
        )
        self.probabilities: Tensor | None = None
        self.own: Tensor | None = None
        """a sum over the classes here that the whole subgroup needs: of the target's weight, or of
        a
        """
        if labels.is_floating_point():
            share = labels * (1 - self.smoothing) + self.smoothing / self.num_classes
            self.probabilities = share.to(values.dtype) if weight is None else share * weight
            self.own = self.probabilities.sum(1)
            return
        counted = labels != classes.ignore_index
        wrong = counted & _is_outside(labels, classes.num_classes)
        _check("a label", labels, wrong, classes.num_classes)
        here = counted & (labels >= classes.first) & (labels < classes.first + self.num_here)
        self.counted = counted.to(values.dtype)
        self.here = here.to(values.dtype)
        self.local = torch.where(here | wrong, labels - classes.first, 0).unsqueeze(1)
        if weight is not None:
            self.own = self._at_target(weight.expand_as(values))

    def _at_target(self, values: Tensor) -> Tensor:
        """The target's entry where it is here, else 0."""
        if self.num_here == 0:
            return self.here
        return torch.where(self.here > 0, values.gather(1, self.local).squeeze(1), 0.0)

    def _target_here(self) -> Tensor:
        """w_t [t is here]"""
        return self.here if self.own is None else self.own

    def coefficient_sum(
        self, own: Tensor | None, weight_sum: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(sum of a over all classes by row, what a mean divides by); `own`, `weight_sum`: those of
        the whole subgroup.
        """
        if self.probabilities is not None:
            assert own is not None
            return own, own.new_full((), float(len(own)))
        target = self.counted if own is None else own
        all_weights = self.num_classes if weight_sum is None else weight_sum
        return (
            1 - self.smoothing
        ) * target + self.smoothing / self.num_classes * all_weights * self.counted, target.sum()

    def coefficient_here(self) -> Tensor:
        """The sum of a over the classes here, by row."""
        if self.probabilities is not None:
            return self.probabilities.sum(1)
        return (
            1 - self.smoothing
        ) * self._target_here() + self.smoothing / self.num_classes * self.weight_sum * self.counted

    def weighted_logits(self) -> Tensor:
        """sum a_c l_c over the classes here, by row."""
        if self.probabilities is not None:
            return (self.probabilities * self.values).sum(1)
        picked = (
            self._at_target(self.values)
            if self.weight is None
            else self._at_target(self.values * self.weight)
        )
        if not self.smoothing:
            return picked
        everything = self.values.sum(1) if self.weight is None else self.values @ self.weight
        return (
            1 - self.smoothing
        ) * picked + self.smoothing / self.num_classes * self.counted * everything

    def subtract_coefficients(self, result: Tensor) -> None:
        """Subtracts the coefficients a of line (1) from the result, in place."""
        if self.probabilities is not None:
            result -= self.probabilities
            return
        if self.smoothing:
            flat = self.counted.unsqueeze(1) * (self.smoothing / self.num_classes)
            result -= flat if self.weight is None else flat * self.weight
        if self.num_here:
            result.scatter_add_(
                1, self.local, ((self.smoothing - 1) * self._target_here()).unsqueeze(1)
            )


def _is_outside(numbers: Tensor, stop: int) -> Tensor:
    return (numbers < 0) | (numbers >= stop)


def _check(what: str, numbers: Tensor, is_wrong: Tensor, stop: int) -> None:
    """A GPU is not waited for: there, a lookup outside of the own part stops it, as it does in
    torch.
    """
    if numbers.device.type == "cpu" and is_wrong.any():
        raise IndexError(
            f"{what} is {int(numbers[is_wrong][0])}: only 0 to {stop - 1} exist. Check the batch"
        )


def _exponentials(values: Tensor) -> tuple[Tensor, Tensor]:
    """The largest entry of every row here, and exp(entry - largest)."""
    if values.shape[-1] == 0:
        return values.new_full(values.shape[:-1], float("-inf")), values.new_empty(values.shape)
    largest = values.amax(-1)
    finite = torch.where(largest == float("-inf"), 0.0, largest)
    return largest, (values - finite.unsqueeze(-1)).exp_()


def _combine(largest: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """M and s of all devices from theirs, [devices, rows]."""
    of_all = largest.amax(0)
    finite = torch.where(of_all == float("-inf"), 0.0, of_all)
    return finite, (sums * (largest - finite).exp()).sum(0)


# ---- softmax
# --------------------------------------------------------------------------------------------------


def softmax(x: Tensor, dim: int, subgroup: Subgroup) -> Tensor:
    """`aten.softmax` over a dim of which the devices of the subgroup have a part each."""
    result: Tensor = _Softmax.apply(x, dim, subgroup, False)  # type: ignore[no-untyped-call]
    return result


def log_softmax(x: Tensor, dim: int, subgroup: Subgroup) -> Tensor:
    """`aten.log_softmax`, cut in the same way."""
    result: Tensor = _Softmax.apply(x, dim, subgroup, True)  # type: ignore[no-untyped-call]
    return result


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, subgroup: Subgroup, is_log: bool) -> Tensor:
        values = wide(x).movedim(dim, -1)
        largest, exponentials = _exponentials(values)
        everyone = all_gather(torch.stack([largest, exponentials.sum(-1)]), subgroup)
        of_all, total = _combine(everyone[:, 0], everyone[:, 1])
        if is_log:
            result = values - (of_all + total.log()).unsqueeze(-1)
        else:
            result = (values - of_all.unsqueeze(-1)).exp_().div_(total.unsqueeze(-1))
        result = result.movedim(-1, dim).to(x.dtype).contiguous()
        ctx.save_for_backward(result)
        ctx.subgroup = subgroup
        ctx.dim = dim
        ctx.is_log = is_log
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (result,) = ctx.saved_tensors
        dy = wide(gradients[0])
        y = wide(result)
        if ctx.is_log:
            dx = dy - y.exp() * all_reduce(dy.sum(ctx.dim, keepdim=True), ctx.subgroup)
        else:
            dx = y * (dy - all_reduce((dy * y).sum(ctx.dim, keepdim=True), ctx.subgroup))
        return dx.to(result.dtype), None, None, None


def argmax(x: Tensor, dim: int, keepdim: bool, first: int, subgroup: Subgroup) -> Tensor:
    """`aten.argmax` over a cut dim, the first of several equal ones: the same on all devices.
    `first`: number of the first entry here.
    """
    shape = [size for d, size in enumerate(x.shape) if d != dim % x.ndim]
    if x.shape[dim]:
        value, index = x.max(dim)
        index = index + first
    else:
        lowest = float("-inf") if x.is_floating_point() else torch.iinfo(x.dtype).min
        value = x.new_full(shape, lowest)
        index = torch.full(shape, torch.iinfo(torch.int64).max, device=x.device)
    values = all_gather(value, subgroup)
    indices = all_gather(index, subgroup)
    is_best = (values == values.amax(0)) | (values != values)
    best = torch.where(is_best, indices, torch.iinfo(torch.int64).max).amin(0)
    return best.unsqueeze(dim) if keepdim else best
