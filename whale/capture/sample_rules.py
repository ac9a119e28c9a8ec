"""Rules of the walk over the samples: what reductions, views and pointwise operations do to the
state of their operands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from whale.capture.graph import user_line
from whale.capture.kinds import op_name
from whale.capture.sample_states import (
    ADDITIVE_REDUCTIONS,
    ALONG,
    CASTS,
    EXPANDS,
    LINEAR,
    MATRIX,
    PERMUTES,
    PRODUCTS,
    REDUCTIONS,
    SHARED,
    VIEWS,
    Irregular,
    Mixed,
    PerSample,
    Position,
    Shared,
    State,
    Summed,
    expression,
    product_of,
    rank_of,
    rule,
    tensor_nodes,
    whole_number,
    wrap_dims,
)
from whale.dtypes import is_differentiable

if TYPE_CHECKING:
    from whale.capture.samples import SampleFlow


def linear_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    """Result of an operation on a Summed value: Summed again if the operation is linear in it."""
    name = op_name(node)
    operands = tensor_nodes(list(args.values()))
    summed = [operand for operand in operands if isinstance(flow.of(operand), Summed)]
    origin = flow.of(summed[0]).origin  # type: ignore[union-attr]
    what = f"a value over all samples (`{op_name(origin)}`, {user_line(origin)})"
    if any(isinstance(flow.of(operand), PerSample) for operand in operands) and name not in CASTS:
        return Mixed(node, f"`{name}` combines each sample with {what}")
    value = node.meta["val"]
    floating = all(map(is_differentiable, value if isinstance(value, list | tuple) else [value]))
    first = [operand for operand in tensor_nodes(list(args.values())[:1]) if operand in summed]
    if name == "div":
        linear = len(summed) == 1 and bool(first) and args.get("rounding_mode") is None
    elif (
        name in ("mul", "multiply")
        or name in PRODUCTS
        or (name == "linear" and args.get("bias") is None)
    ):
        linear = len(summed) == 1
    elif name == "masked_fill":
        linear = summed == first and args["value"] == 0
    elif name == "where":
        numbers = [args[key] for key in ("input", "other") if not isinstance(args[key], Node)]
        linear = args["condition"] not in summed and not any(numbers)
    else:
        linear = name in ("add", "sub", "rsub", "stack", "cat") or (
            name in LINEAR and len(summed) == len(first)
        )
    if linear and floating:
        return Summed(origin)
    if name in ("mul", "div") and len(summed) > 1:
        return Mixed(
            node,
            f"`{name}` of two values over all samples is not a sum over samples; one is {what}",
        )
    return Mixed(
        node,
        f"`{name}` is applied to {what}, so the results of two parts of the batch do not add up",
    )


def unknown_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State | tuple[State, ...]:
    """An operation without a rule: the batch is where its symbol is, unless the operation was told
    to work along that dim.
    """
    for operand in tensor_operands(node)[:1]:
        source = flow.of(operand)
        dims = args.get("dim", args.get("dims"))
        if (
            isinstance(source, PerSample)
            and isinstance(dims, int | list | tuple)
            and source.dim in wrap_dims(dims, rank_of(operand))
        ):
            return Mixed(node, f"`{op_name(node)}` works across the samples: its dim is the batch")
    outers = {
        place.outer
        for operand in node.all_input_nodes
        if isinstance(place := flow.of(operand), PerSample)
    }
    if len(outers) > 1:
        return Mixed(node, f"`{op_name(node)}` combines samples that stand in different places")
    state: State | tuple[State, ...] = flow.by_shape(node, outers.pop())
    if isinstance(state, Shared) or (
        isinstance(state, tuple) and all(isinstance(one, Shared) for one in state)
    ):
        return Mixed(node, f"`{op_name(node)}` of all samples gives one value for the whole batch")
    return state


def pointwise_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    state = flow.aligned(node, tensor_operands(node), rank_of(node))
    if isinstance(state, PerSample) and state.position and op_name(node) in ("add", "sub", "mul"):
        return PerSample(
            state.dim, state.outer, _shifted(flow, op_name(node), args, state.position)
        )
    return state


def _shifted(flow: SampleFlow, name: str, args: dict[str, Any], position: Position) -> Position:
    """Position after adding or multiplying; stride 0 where the values count no rows any more."""
    first = args["input"]
    other = args["other"]
    state = flow.of(first)
    if not (isinstance(state, PerSample) and state.position):
        first, other = other, first
    if name == "mul":
        return (
            Position(position.stride * other, position.low * other, position.moved)
            if isinstance(other, int)
            else Position(0)
        )
    if (
        name == "sub"
        or args.get("alpha", 1) != 1
        or (isinstance(state := flow.of(other), PerSample) and state.position)
    ):
        return Position(0)
    return Position(
        position.stride,
        position.low + other if isinstance(other, int) else position.low,
        not isinstance(other, int),
    )


def tensor_operands(node: Node) -> list[Node]:
    return [
        operand
        for operand in node.all_input_nodes
        if isinstance(operand.meta.get("val"), torch.Tensor)
    ]


def spatial_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State | tuple[State, ...]:
    """Convolutions, pooling, resizing: dim 0 of the first operand is the batch, the weights are
    shared.
    """
    source = node.all_input_nodes[0]
    state = flow.of(source)
    others = [
        operand for operand in tensor_operands(node)[1:] if isinstance(flow.of(operand), PerSample)
    ]
    if (
        not isinstance(state, PerSample)
        or state.dim != 0
        or (others and "grid" not in op_name(node))
    ):
        return Mixed(node, f"the batch of `{op_name(node)}` is not dim 0 of its input")
    return unknown_state(flow, node, args)


# -----------------------------------------------------------------------------------------------------------
# rules: reductions


@rule(*REDUCTIONS)
def reduction_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    sources = tensor_operands(node)
    rank = max(rank_of(source) for source in sources)
    state = flow.aligned(node, sources, rank)
    if not isinstance(state, PerSample):
        return state
    dims = wrap_dims(args.get("dim"), rank)
    if state.dim in dims:
        how = ADDITIVE_REDUCTIONS.get(op_name(node))
        if how == "mean":
            return flow.mean(node, state.outer)
        return (
            flow.reduction(node, how)
            if how
            else Mixed(node, f"`{op_name(node)}` is taken over all samples")
        )
    if args.get("keepdim"):
        return state
    return PerSample(state.dim - sum(dim < state.dim for dim in dims), state.outer)


@rule("bincount")
def bincount_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    return flow.reduction(node, "sum")


@rule(*ALONG)
def along_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    source = node.all_input_nodes[0]
    state = flow.of(source)
    dims = args.get("dim", args.get("dims", args.get("dimension")))
    if not isinstance(state, PerSample) or state.dim in wrap_dims(dims, rank_of(source)):
        return Mixed(node, f"`{op_name(node)}` works across the samples: its dim is the batch")
    return PerSample(state.dim, state.outer)


@rule("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm")
def layer_norm_state(
    flow: SampleFlow, node: Node, args: dict[str, Any]
) -> State | tuple[State, ...]:
    source = args["input"]
    state = flow.of(source)
    if not isinstance(state, PerSample) or state.dim >= rank_of(source) - len(
        args["normalized_shape"]
    ):
        return Mixed(node, f"`{op_name(node)}` normalises over the samples")
    return flow.by_shape(node, state.outer)


@rule(
    "batch_norm",
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional",
    "cudnn_batch_norm",
)
def batch_norm_state(
    flow: SampleFlow, node: Node, args: dict[str, Any]
) -> State | tuple[State, ...]:
    """Statistics over the samples are a defined exception (DESIGN section 6): the result counts as
    per sample.
    """
    state = flow.of(args["input"])
    if not isinstance(state, PerSample) or state.dim == 1:
        return Mixed(node, "batch norm has the samples in its channel dim")
    return flow.by_shape(node, state.outer)


@rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent_state(
    flow: SampleFlow, node: Node, args: dict[str, Any]
) -> State | tuple[State, ...]:
    source = args.get("input", args.get("data"))
    state = flow.of(source)
    batch = 0 if args.get("batch_first") else 1
    if not isinstance(state, PerSample) or state.dim != batch or "data" in args:
        return Mixed(
            node,
            f"`{op_name(node)}` runs over the samples as if they were time steps: look at its "
            "batch_first",
        )
    return flow.by_shape(node, state.outer)


@rule(*MATRIX)
def matrix_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State | tuple[State, ...]:
    """Operations on matrices, the last two dims; the dims before them are independent."""
    for source in tensor_operands(node):
        state = flow.of(source)
        if isinstance(state, PerSample) and state.dim >= rank_of(source) - 2:
            return Mixed(node, f"`{op_name(node)}` takes the samples as rows of one matrix")
    return unknown_state(flow, node, args | {"dim": None})


# ---------------------------------------------------------------------------------------------------------------
# rules: shapes


@rule(*VIEWS)
def view_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    """A view keeps the order of the elements: (elements before the batch, s, elements after it)
    stays the same.
    """
    source = node.all_input_nodes[0]
    state = flow.of(source)
    dims = flow.dims(node)
    lost = Mixed(node, f"`{op_name(node)}` cuts the batch dim into pieces that are not samples")
    if not isinstance(state, PerSample) or len(dims) != 1:
        return lost
    old = source.meta["val"].shape
    new = node.meta["val"].shape
    dim = dims[0]
    if isinstance(state.outer, Irregular):
        same = expression(old[state.dim]) == expression(new[dim]) and product_of(
            old[: state.dim]
        ) == product_of(new[:dim])
        return PerSample(dim, state.outer, state.position) if same else lost
    outer = whole_number(product_of(old[: state.dim]) * state.outer / product_of(new[:dim]))
    inner = whole_number(expression(new[dim]) / flow.symbol / outer) if outer else None
    return PerSample(dim, outer, state.position) if outer and inner else lost


@rule(*PERMUTES)
def permute_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    state = flow.of(node.all_input_nodes[0])
    assert isinstance(state, PerSample)
    return PerSample(flow.dims(node)[0], state.outer, state.position)


@rule(*EXPANDS)
def expand_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    return flow.aligned(node, node.all_input_nodes[:1], rank_of(node))


@rule(*CASTS)
def cast_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    return flow.of(node.all_input_nodes[0])


@rule("repeat", "tile")
def repeat_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    source = node.all_input_nodes[0]
    state = flow.aligned(node, [source], rank_of(node))
    repeats = list(args.get("repeats", args.get("dims", ())))
    repeats = [1] * (rank_of(node) - len(repeats)) + repeats
    if not isinstance(state, PerSample) or not isinstance(repeats[state.dim], int):
        return Mixed(
            node,
            f"`{op_name(node)}` repeats the samples a number of times that depends on the batch",
        )
    if repeats[state.dim] == 1:
        return state
    if isinstance(state.outer, Irregular):
        return Mixed(node, f"`{op_name(node)}` repeats rows that are not ordered by sample")
    return PerSample(state.dim, state.outer * repeats[state.dim], state.position)


@rule("repeat_interleave")
def repeat_interleave_state(
    flow: SampleFlow, node: Node, args: dict[str, Any]
) -> State | tuple[State, ...]:
    source = args.get("input")
    state = flow.of(source)
    if isinstance(
        state, Shared
    ):  # every row repeated once per sample: the samples lie inside the rows
        dims = flow.dims(node)
        rows = (
            whole_number(expression(node.meta["val"].shape[dims[0]]) / flow.symbol)
            if dims
            else None
        )
        return PerSample(dims[0], rows) if rows else SHARED
    if (
        not isinstance(state, PerSample)
        or not isinstance(args.get("repeats"), int)
        or isinstance(state.outer, Irregular)
    ):
        return Mixed(
            node, "`repeat_interleave` repeats samples a number of times that depends on the data"
        )
    if args.get("dim") is None and state.dim != 0:
        return Mixed(node, "`repeat_interleave` without a dim flattens the samples")
    return PerSample(state.dim, state.outer, state.position)


@rule("select")
def select_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    state = flow.of(args["input"])
    dim = int(args["dim"]) % rank_of(args["input"])
    if not isinstance(state, PerSample) or dim == state.dim:
        return Mixed(node, "one sample is picked out of the batch by its position")
    return PerSample(state.dim - (dim < state.dim), state.outer)


@rule(
    "slice",
    "narrow",
    "split",
    "split_with_sizes",
    "chunk",
    "tensor_split",
    "unsafe_split",
    "unsafe_chunk",
)
def slice_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State | tuple[State, ...]:
    """Cutting the batch dim is fine in whole blocks of samples, as in `torch.cat([a, b])` followed
    by `chunk(2)`.
    """
    source = args["input"]
    state = flow.of(source)
    assert isinstance(state, PerSample)
    if int(args.get("dim", 0)) % rank_of(source) != state.dim:
        return flow.by_shape(node, state.outer, state.position)
    size = expression(source.meta["val"].shape[state.dim])
    lost = Mixed(
        node, f"`{op_name(node)}` takes some of the samples by their position in the batch"
    )
    results = node.meta["val"] if isinstance(node.meta["val"], list | tuple) else [node.meta["val"]]
    if (
        len(results) == 1
        and expression(results[0].shape[state.dim]) == size
        and args.get("step", 1) == 1
    ):
        return flow.by_shape(node, state.outer, state.position)
    start = args.get("start") or 0
    if isinstance(state.outer, Irregular) or args.get("step", 1) != 1:
        return lost
    block = size / state.outer
    outers = [whole_number(expression(result.shape[state.dim]) / block) for result in results]
    starts_whole = expression(start) == 0 or whole_number(expression(start) / block) is not None
    if not starts_whole or not all(outers):
        return lost
    states = tuple(PerSample(state.dim, outer, state.position) for outer in outers if outer)
    return states if isinstance(node.meta["val"], list | tuple) else states[0]


@rule("unbind")
def unbind_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State | tuple[State, ...]:
    state = flow.of(args["input"])
    dim = int(args["dim"]) % rank_of(args["input"])
    if not isinstance(state, PerSample) or dim == state.dim:
        return Mixed(node, "the batch is cut into single samples")
    return flow.by_shape(node, state.outer)


@rule("cat", "concat")
def cat_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    # torch lets an empty one-dim tensor stand in any `cat`
    sources = [source for source in args["tensors"] if tuple(source.meta["val"].shape) != (0,)]
    state = flow.aligned(node, sources, rank_of(node))
    if (
        not isinstance(state, PerSample)
        or len(sources) == 1
        or int(args["dim"]) % rank_of(node) != state.dim
    ):
        return state
    if not all(isinstance(flow.of(source), PerSample) for source in sources):
        return Mixed(node, "rows that are not samples are added to the batch")
    sizes = tuple(expression(source.meta["val"].shape[state.dim]) for source in sources)
    if isinstance(state.outer, Irregular):
        return Mixed(node, "rows that are not ordered by sample are joined")
    return PerSample(
        state.dim,
        len(sources) if len(set(sizes)) == 1 and state.outer == 1 else Irregular(sizes),
        state.position,
    )


@rule("stack")
def stack_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    state = flow.aligned(node, args["tensors"], rank_of(node) - 1)
    new = int(args["dim"]) % rank_of(node)
    return (
        PerSample(state.dim + (new <= state.dim), state.outer, state.position)
        if isinstance(state, PerSample)
        else state
    )


@rule("pad", "constant_pad_nd")
def pad_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State | tuple[State, ...]:
    state = flow.of(args["input"])
    assert isinstance(state, PerSample)
    place = 2 * (rank_of(node) - 1 - state.dim)
    if any(isinstance(pad, Node) or pad != 0 for pad in args["pad"][place : place + 2]):
        return Mixed(node, "rows that are not samples are added to the batch")
    return state
