"""Rules of elementwise operations, reductions and what works along one dim."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from whale.dtypes import is_differentiable
from whale.sharding.operation import (
    PARTIAL,
    SAME,
    Label,
    Operation,
    Option,
    Placement,
    dims_of,
    labelled,
    letters,
    partial_options,
    rule,
)

LINEAR_UNARY = frozenset(
    [
        "neg",
        "positive",
        "clone",
        "contiguous",
        "detach",
        "alias",
        "real",
        "imag",
        "conj",
        "masked_fill",
        "zeros_like",
        "lift_fresh_copy",
    ]
)
"""linear in their first tensor"""
BILINEAR = frozenset(["mul", "multiply"])
LINEAR_PAIR = frozenset(["add", "sub", "subtract"])
QUOTIENTS = frozenset(["div", "divide", "true_divide"])


def pointwise(op: Operation) -> list[Option]:
    """Dims are matched from the right, dims of size 1 are the same for all."""
    rank = len(op.outputs[0])
    labels = letters("d", rank)
    inputs = [labels[rank - len(shape) :] for shape in op.shapes]
    return labelled(op, inputs, [labels] * len(op.outputs)) + partial_options(
        op, _linear_groups(op)
    )


def _linear_groups(op: Operation) -> list[set[int]]:
    """Groups of inputs in which a pointwise operation is linear."""
    tensors = len(op.inputs)
    if op.name in LINEAR_PAIR and tensors == 2:
        return [{0, 1}]
    if op.name in BILINEAR:
        return [{place} for place in range(tensors)]
    if op.name in QUOTIENTS and op.argument("rounding_mode") is None and op.slot("self") == 0:
        return [{0}]
    if op.name == "where" and tensors == 3:
        return [{1, 2}]
    if op.name == "masked_fill":
        return [{0}] if op.argument("value") == 0 else []
    if op.name in LINEAR_UNARY or op.name == "to" or op.name == "_to_copy":
        return [{0}] if _keeps_precision(op) else []
    return []


def _keeps_precision(op: Operation) -> bool:
    """A partial sum is not rounded on its way."""
    before = op.inputs[0].meta["val"].dtype
    after = op.node.meta["val"].dtype
    return bool(is_differentiable(before) and torch.promote_types(before, after) == after)


@rule("dropout native_dropout alpha_dropout bernoulli")
def dropout(op: Operation) -> list[Option]:
    labels = letters("d", len(op.outputs[0]))
    return labelled(op, [labels], [labels] * len(op.outputs)) + partial_options(op, [])


@rule("feature_dropout")
def feature_dropout(op: Operation) -> list[Option]:
    """Channels are dropped as one: only samples and channels may be cut."""
    labels: list[Label] = [
        label if dim < 2 else None for dim, label in enumerate(letters("d", len(op.outputs[0])))
    ]
    return labelled(op, [labels], [labels])


@rule(
    "to _to_copy type_as contiguous clone detach alias lift_fresh_copy positive zeros_like "
    "ones_like full_like empty_like"
)
def like(op: Operation) -> list[Option]:
    labels = letters("d", len(op.outputs[0]))
    return labelled(op, [labels] * len(op.inputs), [labels]) + partial_options(
        op, _linear_groups(op)
    )


# ---------------------------------------------------------------------------------------------------------------------
# reductions


@rule("sum mean nansum")
def additive(op: Operation) -> list[Option]:
    """Summed over a dim that is cut: a partial sum. A mean divides by the whole size."""
    labels, result, reduced = _reduced(op)
    names = [label for dim, label in enumerate(labels) if dim in reduced and label is not None]
    local = dict.fromkeys(names, "mean") if op.name == "mean" else None
    options = labelled(op, [labels], [result], sums=names, local=local)
    return options + (partial_options(op, [{0}]) if op.name != "nansum" else [])


@rule(
    "prod amax amin aminmax max min argmin any all var std var_mean std_mean norm median "
    "nanmedian mode kthvalue"
    " linalg_vector_norm logsumexp nanmean count_nonzero"
)
def reduction(op: Operation) -> list[Option]:
    """Whole along what is reduced."""
    if op.name in ("max", "min") and len(op.inputs) == 2:
        return pointwise(op)
    labels, result, reduced = _reduced(op)
    kept: list[Label] = [None if dim in reduced else label for dim, label in enumerate(labels)]
    return labelled(op, [kept], [result] * len(op.outputs))


def _reduced(op: Operation) -> tuple[list[Label], list[Label], set[int]]:
    """(labels of the input, labels of the result, dims that are reduced)."""
    rank = len(op.shapes[0])
    reduced = set(dims_of(op, rank))
    labels = letters("d", rank)
    keeps = len(op.outputs[0]) == rank and rank > 0
    result: list[Label] = [
        None if dim in reduced else label
        for dim, label in enumerate(labels)
        if keeps or dim not in reduced
    ]
    return labels, result, reduced


@rule("softmax log_softmax")
def normalised(op: Operation) -> list[Option]:
    """Along the normalised dim maxima and sums of rows are exchanged."""
    rank = len(op.shapes[0])
    dim = dims_of(op, rank)[0]
    labels = letters("d", rank)
    return labelled(op, [labels], [labels], local={f"d{dim}": "softmax"})


@rule("_softmax _log_softmax softmin glu")
def along(op: Operation) -> list[Option]:
    """Whole along the dim that is normalised."""
    rank = len(op.shapes[0])
    dim = dims_of(op, rank)[0]
    labels: list[Label] = [None if place == dim else f"d{place}" for place in range(rank)]
    return labelled(op, [labels], [labels])


@rule("argmax")
def argmax(op: Operation) -> list[Option]:
    """The largest of everyone's largest; the same on all devices then."""
    if op.argument("dim") is None:
        return []
    labels, result, (dim, *_) = _reduced(op)
    return labelled(op, [labels], [result], local={f"d{dim}": "argmax"}, after={f"d{dim}": SAME})


@rule("tril triu")
def triangle(op: Operation) -> list[Option]:
    labels: list[Label] = [*letters("d", len(op.shapes[0]) - 2), None, None]
    return labelled(op, [labels], [labels]) + partial_options(op, [{0}])


# -------------------------------------------------------------------------------------------------------------------------
# losses

REDUCTIONS = ("none", "mean", "sum")
"""what the argument `reduction` of torch's losses means"""


@rule(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits kl_div poisson_nll_loss"
    " soft_margin_loss"
)
def pointwise_loss(op: Operation) -> list[Option]:
    how = REDUCTIONS[op.argument("reduction")]
    rank = max(len(shape) for shape in op.shapes)
    labels = letters("d", rank)
    inputs = [labels[rank - len(shape) :] for shape in op.shapes]
    if how == "none":
        return labelled(op, inputs, [labels])
    names = [str(label) for label in labels]
    return labelled(
        op,
        inputs,
        [[]],
        sums=names,
        local=dict.fromkeys(names, "mean loss") if how == "mean" else None,
    )


@rule("cross_entropy_loss nll_loss_nd nll_loss nll_loss2d")
def class_loss(op: Operation) -> list[Option]:
    """Rows of logits and targets run along each other. The classes may be cut too: only maxima,
    sums and target logits are exchanged.
    """
    how = REDUCTIONS[op.argument("reduction")]
    logits = op.shapes[0]
    target = op.shapes[1]
    if how == "mean" or len(logits) < 2:
        return []
    rows: list[Label] = [f"r{dim}" for dim in range(len(logits) - 1)]
    own: Sequence[Label] = [rows[0], "classes", *rows[1:]]
    has_probabilities = len(target) == len(logits)
    of_target = (
        [rows[0], "classes" if has_probabilities else None, *rows[1:]]
        if has_probabilities
        else rows
    )
    inputs = op.named(self=own, target=of_target, weight=["classes"])
    sums = [str(row) for row in rows] if how == "sum" else []
    can_cut = op.name == "cross_entropy_loss"
    after: dict[str, Placement] = {"classes": PARTIAL}
    options = labelled(
        op,
        inputs,
        [[] if how == "sum" else rows],
        sums=sums,
        local={"classes": "class loss"},
        after=after,
    )
    return [option for option in options if option.name != "classes" or can_cut]
