"""Rows of elementwise operations, casts, dropouts and what makes new tensors."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Node

from whale.dtypes import is_differentiable
from whale.operations.operation import Label, Labels, Operation, letters
from whale.operations.row import (
    Dims,
    Groups,
    add_rows,
    dims,
    in_all,
    in_each,
    in_first,
    none_of_them,
    row,
)


@row(
    "rsub and or xor floor_divide fill copy lerp hardswish where masked_fill multiply divide "
    "subtract true_divide",
    kind="pointwise",  # elementwise operations that torch does not tag as such
)
def pointwise(op: Operation) -> Dims | None:
    """Dims are matched from the right, dims of size 1 are the same for all."""
    if len(op.outputs) != 1:
        return None  # `torch.where(mask)` gives indices
    rank = len(op.outputs[0])
    labels = letters("d", rank)
    return dims([labels[rank - len(shape) :] for shape in op.shapes], [labels])


def _pair(op: Operation) -> Groups:
    """A sum of two tensors; with a number beside one of them it is not linear."""
    return [{0, 1}] if len(op.inputs) == 2 else []


def _numerator(op: Operation) -> Groups:
    exact = op.argument("rounding_mode") is None and op.slot("self") == 0
    return [{0}] if exact else []


def _branches(op: Operation) -> Groups:
    """The values of `where`, not its condition. A number that is not zero would be added in every
    part.
    """
    if len(op.inputs) == 3:
        return [{1, 2}]
    numbers = [op.argument(name) for name in ("self", "other") if op.slot(name) is None]
    return [{1}] if len(op.inputs) == 2 and numbers == [0] else []


def _filled_with_zero(op: Operation) -> Groups:
    return [{0}] if op.argument("value") == 0 else []


def _unrounded(op: Operation) -> Groups:
    """The only tensor, of real numbers that keep their precision."""
    return [{0}] if keeps_precision(op) else []


def keeps_precision(op: Operation) -> bool:
    """Whether the result can hold every value of the first input: a partial sum must not be rounded
    on its way.
    """
    before = op.inputs[0].meta["val"].dtype
    after = op.node.meta["val"].dtype
    return bool(is_differentiable(before) and torch.promote_types(before, after) == after)


add_rows("add sub subtract rsub", dims=pointwise, linear=_pair, affine=in_all)
add_rows("mul multiply", dims=pointwise, linear=in_each)
add_rows("add sub mul", samples="counting", reads_position=True)
add_rows("div divide true_divide", dims=pointwise, linear=_numerator)
add_rows("where", linear=_branches, affine=_branches)
add_rows("masked_fill", linear=_filled_with_zero)
add_rows("neg real imag conj", dims=pointwise, linear=_unrounded)


@row(
    "to _to_copy type_as contiguous clone detach alias lift_fresh lift_fresh_copy positive",
    kind="cast",
    linear=in_first,
    moves=True,
)
def like(op: Operation) -> Dims | None:
    """All dims as they are. Of a second tensor (`to.other`) only the dtype is read."""
    labels = letters("d", len(op.outputs[0]))
    others: list[Labels] = [[None] * len(shape) for shape in op.shapes[1:]]
    return dims([labels, *others], [labels])


add_rows("alias detach", free=True)
add_rows("positive lift_fresh", returns="always")
add_rows("real conj resolve_conj resolve_neg", returns="real")
add_rows("to type_as", returns="same format")
add_rows("contiguous", returns="same memory", timed_as="transposed_copy")
add_rows("alias lift_fresh_copy", equals="always")
add_rows("detach", equals="no gradient")

# a creator takes at most the shape of another tensor: only that of its result counts
add_rows("zeros_like", kind="create", dims=like, linear=_unrounded)
add_rows("ones_like full_like empty_like", kind="create", dims=like)
add_rows(
    "zeros ones full empty rand randn randint randperm rand_like randn_like randint_like new_zeros "
    "new_ones new_full new_empty scalar_tensor empty_strided empty_permuted eye",
    kind="create",
)
add_rows("arange linspace logspace", kind="count")


@row("dropout alpha_dropout native_dropout bernoulli")
def dropout(op: Operation) -> Dims | None:
    """Every entry draws for itself."""
    labels = letters("d", len(op.outputs[0]))
    return dims([labels], [labels] * len(op.outputs)) if len(op.inputs) == 1 else None


@row("feature_dropout")
def feature_dropout(op: Operation) -> Dims | None:
    """Channels are dropped as one: only samples and channels may be cut."""
    rank = len(op.outputs[0])
    labels: list[Label] = [*letters("d", rank)[:2], *([None] * (rank - 2))]
    return dims([labels], [labels])


add_rows("bernoulli", kind="pointwise")
add_rows("dropout alpha_dropout feature_dropout feature_alpha_dropout", returns="off")
add_rows(
    "dropout alpha_dropout feature_dropout feature_alpha_dropout native_dropout",
    random=("p", "train"),
)
add_rows("rrelu rrelu_with_noise", random=(None, "training"))

# Passes over memory that the backward of an operation takes for one operand, by torch's formulas
# (derivatives.yaml): one reads the gradient, one what was saved, one writes the result
add_rows("add sub subtract rsub", backward_passes=0)  # the gradient itself
add_rows("neg div divide true_divide to _to_copy type_as contiguous clone", backward_passes=2)
add_rows("mul multiply where dropout native_dropout", backward_passes=3)
add_rows(
    "relu gelu silu tanh sigmoid exp leaky_relu hardtanh elu softplus mish hardswish",
    backward_passes=3,
)


def _both(node: Node) -> Collection[Any]:
    return node.args[:2]


add_rows("add sub", passes_gradient_to=_both)
add_rows("mul", passes_gradient_to=none_of_them)

add_rows("div where masked_fill dropout native_dropout", timed_as="mul")
add_rows(
    "neg clone _to_copy to type_as abs sign ge le gt lt eq ne hardtanh leaky_relu",
    timed_as="relu",
)
add_rows("erf exp log sigmoid silu softplus mish logsigmoid elu", timed_as="gelu")
add_rows("sin cos", timed_as="tanh")
add_rows("sqrt rsqrt reciprocal", timed_as="pow")
