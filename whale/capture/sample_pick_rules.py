"""Rules of the walk over the samples: indexing by positions and masks, and losses over classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from whale.capture.kinds import Kind
from whale.capture.sample_rules import row_state, tensor_operands, unknown_state
from whale.capture.sample_states import (
    Irregular,
    Mixed,
    PerSample,
    Shared,
    State,
    expression,
    rank_of,
    rule,
)
from whale.operations.nodes import op_name
from whale.operations.table import CASTS, CLASS_LOSSES, PERMUTES, VIEWS, is_random

if TYPE_CHECKING:
    from whale.capture.samples import SampleFlow


# -------------------------------------------------------------------------------------------------------------
# rules: indexing


def _rows(flow: SampleFlow, index: Any) -> bool:
    """Whether an index says positions in the batch."""
    state = flow.of(index)
    return isinstance(state, PerSample) and state.position is not None


def _own_rows(flow: SampleFlow, index: Any, source: Node) -> bool:
    """Whether an index into the batch dim of `source` gives every sample rows of its own."""
    state = flow.of(source)
    place = flow.of(index)
    if (
        not isinstance(state, PerSample)
        or not isinstance(place, PerSample)
        or place.position is None
        or state.outer != 1
    ):
        return False
    inner = expression(source.meta["val"].shape[state.dim]) / flow.symbol
    position = place.position
    return (
        position.stride == inner and 0 <= position.low < inner and (inner > 1 or not position.moved)
    )


@rule("index", "index_put")
def index_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State | tuple[State, ...]:
    source = args["input"]
    indices = list(args["indices"])
    state = flow.of(source)
    if any(isinstance(index, Node) and index.meta["val"].dtype is torch.bool for index in indices):
        return _mask_state(flow, node, args, indices)
    at_batch = (
        indices[state.dim] if isinstance(state, PerSample) and state.dim < len(indices) else None
    )
    strangers = [
        index
        for index in indices
        if index is not None and index is not at_batch and _rows(flow, index)
    ]
    if strangers:
        return Mixed(
            node,
            f"`{op_name(node)}` uses the position of a sample in the batch, which differs between "
            "parts of the batch",
        )
    if at_batch is not None and not _own_rows(flow, at_batch, source):
        return Mixed(node, "samples are picked or reordered by an index into the batch")
    if op_name(node) == "index_put":
        by_sample = any(isinstance(flow.of(index), PerSample) for index in indices)
        if at_batch is None and (by_sample or not isinstance(state, PerSample)):
            return Mixed(
                node, "`index_put` writes values of samples into rows that are not samples"
            )
        return state
    if at_batch is None and isinstance(state, PerSample):
        return flow.by_shape(node, state.outer)
    together = flow.aligned(
        node,
        [index for index in indices if index is not None],
        max(rank_of(i) for i in indices if i is not None),
    )
    return together if isinstance(together, Mixed) else flow.by_shape(node, 1)


def _mask_state(flow: SampleFlow, node: Node, args: dict[str, Any], indices: list[Any]) -> State:
    """`x[mask] = number` is elementwise; `x[mask]` gives a number of rows that depends on the data,
    sample after sample.
    """
    state = flow.of(args["input"])
    mask = indices[0]
    place = flow.of(mask)
    together = (
        isinstance(place, PerSample)
        and isinstance(state, PerSample)
        and (place.dim, place.outer) == (state.dim, state.outer)
    )
    if (
        op_name(node) == "index_put"
        and len(indices) == 1
        and isinstance(state, PerSample)
        and rank_of(args["values"]) == 0
    ):
        if together or isinstance(place, Shared):
            return state
    elif op_name(node) == "index" and len(indices) == 1 and together:
        return _picked_rows(flow, node, mask)
    return Mixed(
        node, "a mask picks rows that cannot be told apart by sample; multiply by the mask instead"
    )


def _picked_rows(flow: SampleFlow, node: Node, mask: Node) -> State:
    """Dim 0 now counts the rows that the mask picked; equal masks pick equal rows."""
    equal = next((other for other in flow.masks if same_value(other, mask)), None)
    if equal is None:
        flow.masks.append(mask)
    flow.symbols |= expression(node.meta["val"].shape[0]).free_symbols
    return PerSample(0, Irregular(mask=equal or mask))


def same_value(one: Any, other: Any) -> bool:
    """Whether two values are computed alike from the same sources."""
    if isinstance(one, Node) and isinstance(other, Node):
        if (
            one is other
            or one.op != "call_function"
            or one.target is not other.target
            or is_random(one)
        ):
            return one is other
        return same_value([one.args, one.kwargs], [other.args, other.kwargs])
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same_value, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_value(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other)


@rule("masked_select")
def masked_select_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    if rank_of(args["input"]) != rank_of(args["mask"]) or flow.of(args["input"]) != flow.of(
        args["mask"]
    ):
        return Mixed(
            node,
            "a mask picks rows that cannot be told apart by sample; multiply by the mask instead",
        )
    return _picked_rows(flow, node, args["mask"])


@rule("index_select")
def index_select_state(
    flow: SampleFlow, node: Node, args: dict[str, Any]
) -> State | tuple[State, ...]:
    state = flow.of(args["input"])
    index = flow.of(args["index"])
    at_batch = (
        isinstance(state, PerSample) and int(args["dim"]) % rank_of(args["input"]) == state.dim
    )
    if (at_batch and not _own_rows(flow, args["index"], args["input"])) or (
        not at_batch and _rows(flow, args["index"])
    ):
        return Mixed(node, "samples are picked or reordered by an index into the batch")
    return flow.by_shape(
        node, state.outer if isinstance(state, PerSample) and isinstance(index, Shared) else 1
    )


@rule("gather", "take_along_dim", "scatter", "scatter_add", "scatter_reduce")
def gather_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    if (
        op_name(node) == "scatter_add"
        and op_name(args["input"]) in ("zeros", "new_zeros", "zeros_like")
        and not flow.dims(node)
    ):
        places = flow.of(args["index"])
        added = flow.of(args["src"])
        if (
            isinstance(places, PerSample)
            and places == added
            and places.dim == int(args["dim"]) % rank_of(node)
        ):
            return flow.reduction(node, "sum")  # a histogram of the samples
    sources = [args["input"], args.get("index", args.get("indices")), args.get("src")]
    state = flow.aligned(
        node, [source for source in sources if isinstance(source, Node)], rank_of(node)
    )
    if isinstance(state, PerSample) and (
        args.get("dim") is None or int(args["dim"]) % rank_of(node) == state.dim
    ):
        if op_name(node) != "gather" or not _own_rows(flow, args["index"], args["input"]):
            return Mixed(
                node, f"`{op_name(node)}` moves values between samples: its dim is the batch"
            )
        return PerSample(state.dim, state.outer)
    if isinstance(state, PerSample) and state.position:
        return Mixed(
            node,
            f"`{op_name(node)}` uses the position of a sample in the batch, which differs between "
            "parts of the batch",
        )
    return state


@rule(
    "masked_scatter",
    "take",
    "put",
    "unique",
    "unique_consecutive",
    "unique_dim",
    "nonzero",
    "kron",
    "isin",
)
def reordering_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    return Mixed(
        node,
        f"`{op_name(node)}` takes values in the order of the whole batch, so which sample they "
        "belong to is not known",
    )


@rule("embedding")
def embedding_state(
    flow: SampleFlow, node: Node, args: dict[str, Any]
) -> State | tuple[State, ...]:
    if args.get("scale_grad_by_freq") and isinstance(flow.of(args["indices"]), PerSample):
        return Mixed(
            node,
            "`scale_grad_by_freq` divides gradients by how often a token stands in the whole "
            "mini-batch",
        )
    return row_state(flow, node, args)


# --------------------------------------------------------------------------------------------------
# rules: losses


def loss_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State | tuple[State, ...]:
    """A loss function of torch that no row describes. Reduction 0 is none, 1 the mean, 2 the
    sum.
    """
    name = op_name(node)
    sources = tensor_operands(node)
    if name in CLASS_LOSSES:
        wrong = _class_loss_problem(flow, args)
    else:
        places = [
            state.dim for source in sources if isinstance(state := flow.of(source), PerSample)
        ]
        wrong = any(places[1:] if name == "ctc_loss" else places) or (
            name == "ctc_loss" and places[0] != 1
        )
    if wrong:
        return Mixed(node, f"`{name}` combines samples that stand in different places")
    if args["reduction"] == 0:
        return unknown_state(flow, node, args)
    if args["reduction"] == 2:
        return flow.reduction(node, "sum")
    if name in CLASS_LOSSES and not args["target"].meta["val"].is_floating_point():
        return _class_mean_state(flow, node, args)
    outers = [state.outer for source in sources if isinstance(state := flow.of(source), PerSample)]
    return flow.mean(node, outers[0])


def _class_loss_problem(flow: SampleFlow, args: dict[str, Any]) -> bool:
    """Scores are (N, C, ...), targets (N, ...) classes or (N, C, ...) probabilities; scores of one
    sample alone are (C).
    """
    scores = flow.of(args["input"])
    target = flow.of(args["target"])
    class_dim = 1 if rank_of(args["input"]) > 1 else 0
    if not isinstance(scores, PerSample) or scores.dim == class_dim:
        return True
    if not isinstance(target, PerSample):
        return True
    removed = int(rank_of(args["target"]) < rank_of(args["input"]) and scores.dim > class_dim)
    return (target.dim + removed, target.outer) != (scores.dim, scores.outer)


def _class_mean_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    """The mean goes over targets that are not `ignore_index`, so the targets must be known for the
    whole mini-batch.
    """
    if flow.kinds[args["target"]] in (Kind.INPUT, Kind.CONSTANT):
        return flow.reduction(node, "class mean")
    source = args["target"]
    while isinstance(source, Node) and op_name(source) in CASTS | VIEWS | PERMUTES:
        source = source.args[0]
    target = flow.of(args["target"])
    assert isinstance(target, PerSample)
    if op_name(source) == "argmax" and args["ignore_index"] < 0 and args["weight"] is None:
        return flow.mean(node, target.outer)  # pseudo-labels: none of them can be ignored
    return Mixed(
        node,
        f"the targets of `{op_name(node)}` are computed by the model, so their number is not "
        "known before the step",
    )
