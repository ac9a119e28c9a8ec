"""Rules of the walk over the samples: indexing by positions and masks, and losses over classes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.fx import Node

from whale.capture.kinds import ValueKind
from whale.capture.sample_rules import POSITION_USED, row_state, unknown_state
from whale.capture.sample_states import (
    Irregular,
    Mixed,
    PerSample,
    Position,
    Shared,
    State,
    rank_of,
)
from whale.operations.nodes import op_name, tensor_nodes
from whale.operations.table import CASTS, CLASS_LOSSES, PERMUTES, VIEWS, is_random
from whale.operations.views import MASK_DTYPES

if TYPE_CHECKING:
    from whale.capture.samples import SampleFlow


UNKNOWN_ROWS = "a mask picks rows that cannot be told apart by sample; multiply by the mask instead"

# --------------------------------------------------------------------------------------------------
# rules: positions of samples in the batch, and indexing by them


def _position(flow: SampleFlow, value: Any) -> Position | None:
    """The position that a value's entries say, as `arange(batch)` does."""
    state = flow.of(value)
    return state.position if isinstance(state, PerSample) else None


def arithmetic_state(
    flow: SampleFlow, node: Node, args: dict[str, Any]
) -> State | tuple[State, ...]:
    """Elementwise, and positions in the batch can be counted on: `arange(batch) * 4 + 1`."""
    state = row_state(flow, node, args)
    if isinstance(state, PerSample):
        for operand in node.all_input_nodes:
            position = _position(flow, operand)
            if position is not None:
                return replace(state, position=_shifted(flow, op_name(node), args, position))
    return state


def _shifted(flow: SampleFlow, name: str, args: dict[str, Any], position: Position) -> Position:
    """Position after adding or multiplying; stride 0 where the values count no rows any more."""
    other = args["other"] if _position(flow, args["input"]) is not None else args["input"]
    if name == "mul":
        if not isinstance(other, int):
            return Position(0)
        return Position(position.stride * other, position.low * other, position.moved)
    if name == "sub" or args.get("alpha", 1) != 1 or _position(flow, other) is not None:
        return Position(0)
    if isinstance(other, int):
        return Position(position.stride, position.low + other, position.moved)
    return Position(position.stride, position.low, True)


def _own_rows(flow: SampleFlow, index: Any, source: Node) -> bool:
    """Whether an index into the batch dim of `source` gives every sample rows of its own."""
    state = flow.of(source)
    position = _position(flow, index)
    if position is None or not isinstance(state, PerSample) or state.outer != 1:
        return False
    inner = flow.size(source.meta["val"].shape[state.dim]) / flow.symbol  # rows of one sample
    begins_inside = position.stride == inner and 0 <= position.low < inner
    return begins_inside and (inner > 1 or not position.moved)


def index_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State | tuple[State, ...]:
    """`x[:, i, j]`, or writing there. Indices may say rows of the batch dim only if each sample
    gets its own ones.
    """
    source = args["input"]
    indices = list(args["indices"])
    given = tensor_nodes(indices)
    state = flow.of(source)
    if _moves_positions(flow, source, args.get("values")):
        return Mixed(node, POSITION_USED.format(name=op_name(node)))
    if any(index.meta["val"].dtype in MASK_DTYPES for index in given):
        return _mask_state(flow, node, args, indices)
    at_batch = None
    if isinstance(state, PerSample) and state.dim < len(indices):
        at_batch = indices[state.dim]
    for index in given:
        if index is not at_batch and _position(flow, index) is not None:
            return Mixed(node, POSITION_USED.format(name=op_name(node)))
    if at_batch is not None and not _own_rows(flow, at_batch, source):
        return Mixed(node, "samples are picked or reordered by an index into the batch")
    if op_name(node) == "index_put":
        by_sample = any(isinstance(flow.of(index), PerSample) for index in given)
        if at_batch is None and (by_sample or not isinstance(state, PerSample)):
            return Mixed(
                node, "`index_put` writes values of samples into rows that are not samples"
            )
        return state
    if at_batch is None and isinstance(state, PerSample):
        return flow.by_shape(node, state.outer)
    together = flow.aligned(node, given, max(map(rank_of, given)))
    if isinstance(together, Mixed):
        return together
    # the rows of the result stand as the indices do, whose samples may repeat
    return flow.by_shape(node, together.outer if isinstance(together, PerSample) else 1)


def _moves_positions(flow: SampleFlow, *moved: Any) -> bool:
    """Whether values that count rows of the batch are looked up or written: nobody follows them
    further.
    """
    return any(_position(flow, value) is not None for value in moved)


def _mask_state(flow: SampleFlow, node: Node, args: dict[str, Any], indices: list[Any]) -> State:
    """`x[mask] = number` is elementwise; `x[mask]` gives a number of rows that depends on the data,
    sample after sample.
    """
    state = flow.of(args["input"])
    mask = indices[0]
    place = flow.of(mask)
    if any(_position(flow, index) is not None for index in tensor_nodes(indices)):
        return Mixed(node, POSITION_USED.format(name=op_name(node)))
    together = (
        isinstance(place, PerSample)
        and isinstance(state, PerSample)
        and (place.dim, place.outer) == (state.dim, state.outer)
    )
    if len(indices) == 1 and op_name(node) == "index" and together:
        return _picked_rows(flow, node, mask)
    if len(indices) == 1 and op_name(node) == "index_put" and isinstance(state, PerSample):
        is_number = rank_of(args["values"]) == 0
        if is_number and (together or isinstance(place, Shared)):
            return state
    return Mixed(node, UNKNOWN_ROWS)


def _picked_rows(flow: SampleFlow, node: Node, mask: Node) -> State:
    """Dim 0 now counts the rows that the mask picked; equal masks pick equal rows."""
    equal = next((other for other in flow.masks if same_value(other, mask)), None)
    if equal is None:
        flow.masks.append(mask)
    flow.symbols |= flow.size(node.meta["val"].shape[0]).free_symbols
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


def masked_select_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    """The entries that a mask of the same shape picks."""
    source = args["input"]
    mask = args["mask"]
    if rank_of(source) != rank_of(mask) or flow.of(source) != flow.of(mask):
        return Mixed(node, UNKNOWN_ROWS)
    return _picked_rows(flow, node, mask)


def index_select_state(
    flow: SampleFlow, node: Node, args: dict[str, Any]
) -> State | tuple[State, ...]:
    """One dim looked up; in the batch dim each sample must look up rows of its own."""
    source = args["input"]
    index = args["index"]
    state = flow.of(source)
    if _moves_positions(flow, source):
        return Mixed(node, POSITION_USED.format(name=op_name(node)))
    at_batch = isinstance(state, PerSample) and int(args["dim"]) % rank_of(source) == state.dim
    if at_batch:
        is_allowed = _own_rows(flow, index, source)
    else:
        is_allowed = _position(flow, index) is None
    if not is_allowed:
        return Mixed(node, "samples are picked or reordered by an index into the batch")
    picked = flow.of(index)
    order = picked if isinstance(picked, PerSample) else state
    return flow.by_shape(node, order.outer if isinstance(order, PerSample) else 1)


def gather_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    """Entries moved along one dim, by indices of the same rank."""
    name = op_name(node)
    if name == "scatter_add" and _is_histogram(flow, node, args):
        return flow.reduction(node, "sum")
    if _moves_positions(flow, args["input"], args.get("src")):
        return Mixed(node, POSITION_USED.format(name=name))
    sources = [args["input"], args.get("index", args.get("indices")), args.get("src")]
    state = flow.aligned(node, tensor_nodes(sources), rank_of(node))
    if not isinstance(state, PerSample):
        return state
    if args.get("dim") is None or int(args["dim"]) % rank_of(node) == state.dim:
        if name != "gather" or not _own_rows(flow, args["index"], args["input"]):
            return Mixed(node, f"`{name}` moves values between samples: its dim is the batch")
        return PerSample(state.dim, state.outer)
    return Mixed(node, POSITION_USED.format(name=name)) if state.position else state


def _is_histogram(flow: SampleFlow, node: Node, args: dict[str, Any]) -> bool:
    """Whether values of the samples are added into zeros that have no batch dim."""
    if op_name(args["input"]) not in ("zeros", "new_zeros", "zeros_like") or flow.dims(node):
        return False
    places = flow.of(args["index"])
    alike = isinstance(places, PerSample) and places == flow.of(args["src"])
    return alike and places.dim == int(args["dim"]) % rank_of(node)  # type: ignore[union-attr]


# --------------------------------------------------------------------------------------------------
# rules: losses


def loss_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State | tuple[State, ...]:
    """A loss function of torch that no row describes. Reduction 0 is none, 1 the mean, 2 the
    sum.
    """
    name = op_name(node)
    states: list[PerSample] = []
    for source in tensor_nodes(node.all_input_nodes):
        state = flow.of(source)
        if isinstance(state, PerSample):
            states.append(state)
    if name in CLASS_LOSSES:
        wrong = _class_loss_problem(flow, args)
    else:
        places = [state.dim for state in states]
        # scores of ctc_loss are (time, batch, classes), everything else has the batch first
        wrong = places[0] != int(name == "ctc_loss") or any(places[1:])
    if wrong:
        return Mixed(node, f"`{name}` combines samples that stand in different places")
    if args["reduction"] == 0:
        return unknown_state(flow, node, args)
    if args["reduction"] == 2:
        return flow.reduction(node, "sum")
    if name in CLASS_LOSSES and not args["target"].meta["val"].is_floating_point():
        return _class_mean_state(flow, node, args)
    return flow.mean(node, states[0].outer)


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
    if flow.kinds[args["target"]] in (ValueKind.INPUT, ValueKind.CONSTANT):
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
