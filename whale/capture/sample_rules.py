"""Rules of the walk over the samples (capture/samples.py).

Most operations follow the letters of their row of the table of operations (`row_state`,
`linear_state`). The other rules are for what letters do not say: a batch that is cut, repeated or
joined in whole blocks, recurrent layers, batch norm. A row names the rule that it needs
(`Row.samples`). Indices, masks and losses are in sample_pick_rules.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch.fx import Node

from whale.capture.graph import user_line
from whale.capture.sample_states import (
    SHARED,
    Irregular,
    Mixed,
    PerSample,
    Position,
    Shared,
    State,
    Summed,
    rank_of,
    whole_number,
)
from whale.dtypes import is_differentiable
from whale.operations.nodes import op_name, tensor_nodes
from whale.operations.operation import Operation, wrapped
from whale.operations.products import NOT_FIRST
from whale.operations.reductions import OTHER_PLACES
from whale.operations.row import SAME, Dims
from whale.operations.table import CASTS, row_of

if TYPE_CHECKING:
    from whale.capture.samples import SampleFlow

ROWS_IN_ANY_ORDER = "`{name}` may put the rows of the samples in any order"
POSITION_USED = (
    "`{name}` uses the position of a sample in the batch, which differs between parts of the batch"
)
MEANS = ("mean", "mean loss")
"""local forms of the table that are a sum over the letter, divided by its size"""


@dataclass(frozen=True)
class _Samples:
    """The place of the samples in the operands of an operation."""

    letter: str
    outer: Fraction | Irregular
    """how often they repeat in one run of the letter"""
    rows: sympy.Expr
    """size of the dim that has the letter"""
    position: Position | None


def row_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State | tuple[State, ...]:
    """State by the row of the operation: follows the letter that the samples have in the operands
    into the results.
    """
    row = row_of(node)
    op = Operation(node, flow.shapes)
    dims = row.dims(op) if row.dims is not None else None
    if dims is None:
        if row.dims is None and _works_along_all_dims(op):
            return Mixed(node, row.mixes.format(name=op.name))
        if row.batch_first and not _is_batch_first(flow, node, row.batch_first):
            return Mixed(node, NOT_FIRST.format(name=op.name))
        return unknown_state(flow, node, args)
    mixed = Mixed(node, row.mixes.format(name=op.name, equation=op.argument("equation")))
    found: list[_Samples] = []
    for place, source in enumerate(op.inputs[:1] if row.kind == "cast" else op.inputs):
        state = flow.of(source)
        if not isinstance(state, PerSample):
            continue
        letter = dims.inputs[place][state.dim]
        if letter is None:
            return mixed
        outer: Fraction | Irregular
        if isinstance(state.outer, Irregular):
            outer = state.outer
        else:
            outer = Fraction(state.outer, _runs(dims, letter, place))
        rows = flow.size(source.meta["val"].shape[state.dim])
        found.append(_Samples(letter, outer, rows, state.position))
    if not found:
        return flow.by_shape(node, 1)
    positions = {each.position for each in found}
    if len({(each.letter, each.outer) for each in found}) > 1 or len(positions - {None}) > 1:
        return mixed if dims.sums else Mixed(node, OTHER_PLACES.format(name=op.name))
    if row.kind != "cast" and len(found) < len(op.inputs):
        positions.add(None)  # a tensor without samples stands beside the others
    position = joined_position(positions) if row.moves else None
    return _results(flow, node, dims, replace(found[0], position=position)) or mixed


def _works_along_all_dims(op: Operation) -> bool:
    """Whether an operation without a row got no dims, which means all of them (`fft.fftn`)."""
    named = [name for name in ("dim", "dims") if name in op.defaults]
    return any(op.argument(name) is None for name in named)


def joined_position(positions: set[Position | None]) -> Position | None:
    """Position that the entries of joined values say; stride 0 where only some of them say one."""
    if len(positions) > 1:
        return Position(0)
    return next(iter(positions), None)


def _runs(dims: Dims, letter: str, place: int) -> int:
    """Number of runs of the letter in a tensor, inputs before outputs."""
    return dims.segments[letter][place] if letter in dims.segments else 1


def _results(
    flow: SampleFlow, node: Node, dims: Dims, samples: _Samples
) -> State | tuple[State, ...] | None:
    """States of the results; None where the operation mixes the samples."""
    letter = samples.letter
    how = dims.local.get(letter)
    if how in MEANS and letter in dims.sums:
        whole = samples.outer
        return flow.mean(node, whole if isinstance(whole, Irregular) else int(whole))
    if how is not None:
        return None  # parts that exchange numbers are not independent of each other
    value = node.meta["val"]
    states: list[State] = []
    labels = iter(dims.outputs)
    place = len(dims.inputs)
    for part in value if isinstance(value, list | tuple) else [value]:
        if not isinstance(part, torch.Tensor):
            states.append(SHARED)
            continue
        names = list(next(labels))
        if letter in names:
            dim = names.index(letter)
            outer = _outer_of_result(flow, dims, samples, place, flow.size(part.shape[dim]))
            if outer is None:
                return None
            states.append(PerSample(dim, outer, samples.position))
        elif dims.after.get(letter) == SAME:
            states.append(SHARED)
        else:
            is_sum = letter in dims.sums and not dims.added
            return flow.reduction(node, "sum") if is_sum else None
        place += 1
    return tuple(states) if isinstance(value, list | tuple) else states[0]


def _outer_of_result(
    flow: SampleFlow, dims: Dims, samples: _Samples, place: int, rows: sympy.Expr
) -> int | Irregular | None:
    """How often the samples repeat in a result's dim of so many rows; None where a run of rows is
    not a whole sample.
    """
    if isinstance(samples.outer, Irregular):
        in_runs = samples.letter in dims.segments
        return samples.outer if not in_runs or rows == samples.rows else None
    outer = samples.outer * _runs(dims, samples.letter, place)
    if outer.denominator != 1:
        return None
    if samples.letter in dims.segments and not whole_number(rows / flow.symbol / int(outer)):
        return None
    return int(outer)


def linear_state(flow: SampleFlow, node: Node) -> State:
    """Result of an operation on a Summed value: Summed again if the operation is linear in it."""
    name = op_name(node)
    states = [flow.of(operand) for operand in node.all_input_nodes]
    origin = next(state.origin for state in states if isinstance(state, Summed))
    what = f"a value over all samples (`{op_name(origin)}`, {user_line(origin)})"
    if any(isinstance(state, PerSample) for state in states) and name not in CASTS:
        return Mixed(node, f"`{name}` combines each sample with {what}")
    op = Operation(node, flow.shapes)
    row = row_of(node)
    summed: set[int] = set()
    for place, operand in enumerate(op.inputs):
        if isinstance(flow.of(operand), Summed):
            summed.add(place)
    linear = summed in row.linear(op) or any(summed <= group for group in row.affine(op))
    value = node.meta["val"]
    parts = value if isinstance(value, list | tuple) else [value]
    if linear and all(map(is_differentiable, parts)):
        return Summed(origin)
    if len(summed) > 1:
        return Mixed(
            node,
            f"`{name}` of two values over all samples is not a sum over samples; one is {what}",
        )
    return Mixed(
        node,
        f"`{name}` is applied to {what}, so the results of two parts of the batch do not add up",
    )


def unknown_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State | tuple[State, ...]:
    """State of an operation without a row: the batch is where its symbol is, unless the operation
    was given that dim to work along.
    """
    name = op_name(node)
    dims = args.get("dim", args.get("dims"))
    for operand in tensor_nodes(node.all_input_nodes)[:1]:
        source = flow.of(operand)
        if not isinstance(source, PerSample) or not isinstance(dims, int | list | tuple):
            continue
        if source.dim in wrapped(dims, rank_of(operand)):
            return Mixed(node, f"`{name}` works across the samples: its dim is the batch")
    outers: set[int | Irregular] = set()
    num_rows: set[Any] = set()
    for operand in node.all_input_nodes:
        state = flow.of(operand)
        if isinstance(state, PerSample):
            outers.add(state.outer)
            num_rows.add(flow.size(operand.meta["val"].shape[state.dim]))
            if state.position is not None:
                return Mixed(node, POSITION_USED.format(name=name))
    if len(outers) > 1:
        return Mixed(node, OTHER_PLACES.format(name=name))
    result = flow.by_shape(node, outers.pop())
    parts = result if isinstance(result, tuple) else (result,)
    if all(isinstance(part, Shared) for part in parts):
        return Mixed(node, f"`{name}` of all samples gives one value for the whole batch")
    values = node.meta["val"] if isinstance(result, tuple) else (node.meta["val"],)
    for part, value in zip(parts, values, strict=True):
        if isinstance(part, PerSample) and {flow.size(value.shape[part.dim])} != num_rows:
            # another number of rows for each sample: nothing says in which order they stand
            return Mixed(node, ROWS_IN_ANY_ORDER.format(name=name))
    return result


def _is_batch_first(flow: SampleFlow, node: Node, leading: int) -> bool:
    """Whether the first of `leading` tensors and no tensor after them hold samples, in dim 0."""
    states = [flow.of(operand) for operand in tensor_nodes(node.all_input_nodes)]
    dims = [state.dim if isinstance(state, PerSample) else None for state in states]
    return dims[0] == 0 and not any(dims[1:leading]) and set(dims[leading:]) <= {None}


# --------------------------------------------------------------------------------------------------
# rules that rows name


def count_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    """Counts of parts add up. No letters: how many counts there are depends on the values of a
    part.
    """
    return flow.reduction(node, "sum")


def batch_norm_state(
    flow: SampleFlow, node: Node, args: dict[str, Any]
) -> State | tuple[State, ...]:
    """Statistics over the samples are a defined exception (docs/internals.md): the result counts
    as per sample.
    """
    state = flow.of(args["input"])
    if not isinstance(state, PerSample) or state.dim == 1:
        return Mixed(node, "batch norm has the samples in its channel dim")
    return flow.by_shape(node, state.outer)


def recurrent_state(
    flow: SampleFlow, node: Node, args: dict[str, Any]
) -> State | tuple[State, ...]:
    """Recurrent layers: time steps depend on each other, samples do not. Packed sequences (`data`)
    mix both in one dim.
    """
    state = flow.of(args.get("input", args.get("data")))
    batch = 0 if args.get("batch_first") else 1
    if not isinstance(state, PerSample) or state.dim != batch or "data" in args:
        return Mixed(
            node,
            f"`{op_name(node)}` runs over the samples as if they were time steps: look at its "
            "batch_first",
        )
    return flow.by_shape(node, state.outer)


def repeat_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    """The batch may be repeated as a whole: the samples then stand in several runs."""
    state = flow.aligned(node, node.all_input_nodes[:1], rank_of(node))
    repeats = list(args.get("repeats", args.get("dims", ())))
    repeats = [1] * (rank_of(node) - len(repeats)) + repeats
    times = whole_number(flow.size(repeats[state.dim])) if isinstance(state, PerSample) else None
    if not isinstance(state, PerSample) or times is None:
        return Mixed(
            node,
            f"`{op_name(node)}` repeats the samples a number of times that depends on the batch",
        )
    if times == 1:
        return state
    if isinstance(state.outer, Irregular):
        return Mixed(node, f"`{op_name(node)}` repeats rows that are not ordered by sample")
    return PerSample(state.dim, state.outer * times, state.position)


def _is_length(flow: SampleFlow, value: Any) -> bool:
    """Whether a value is a Python number that depends on lengths only, not on the samples."""
    if not isinstance(value, Node) or not isinstance(value.meta.get("val"), int | torch.SymInt):
        return False
    return whole_number(flow.size(value)) is not None


def repeat_interleave_state(
    flow: SampleFlow, node: Node, args: dict[str, Any]
) -> State | tuple[State, ...]:
    """Every entry repeated n times: the samples stay in their order."""
    state = flow.of(args.get("input"))
    if isinstance(state, Shared):
        dims = flow.dims(node)
        if not dims:
            return SHARED
        # every row is repeated once for each sample: the samples lie inside the rows
        rows = whole_number(flow.size(node.meta["val"].shape[dims[0]]) / flow.symbol)
        return PerSample(dims[0], rows) if rows else SHARED
    is_irregular = not isinstance(state, PerSample) or isinstance(state.outer, Irregular)
    repeats = args.get("repeats")
    is_number = isinstance(repeats, int) or _is_length(flow, repeats)
    if is_irregular or not is_number:
        return Mixed(
            node, "`repeat_interleave` repeats samples a number of times that depends on the data"
        )
    assert isinstance(state, PerSample)
    if args.get("dim") is None and state.dim != 0:
        return Mixed(node, "`repeat_interleave` without a dim flattens the samples")
    return PerSample(state.dim, state.outer, state.position)


def slice_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State | tuple[State, ...]:
    """Cutting the batch dim is fine in whole blocks of samples, as in `torch.cat([a, b])` followed
    by `chunk(2)`.
    """
    source = args["input"]
    state = flow.of(source)
    assert isinstance(state, PerSample)
    if int(args.get("dim", 0)) % rank_of(source) != state.dim:
        return flow.by_shape(node, state.outer, state.position)
    size = flow.size(source.meta["val"].shape[state.dim])
    lost = Mixed(
        node, f"`{op_name(node)}` takes some of the samples by their position in the batch"
    )
    if args.get("step", 1) != 1:
        return lost
    value = node.meta["val"]
    results = value if isinstance(value, list | tuple) else [value]
    if len(results) == 1 and flow.size(results[0].shape[state.dim]) == size:
        return flow.by_shape(node, state.outer, state.position)
    if isinstance(state.outer, Irregular):
        return lost
    block = size / state.outer  # rows of all samples, once
    start = flow.size(args.get("start") or 0)
    if start != 0 and whole_number(start / block) is None:
        return lost
    states: list[State] = []
    for result in results:
        outer = whole_number(flow.size(result.shape[state.dim]) / block)
        if outer is None:
            return lost
        states.append(PerSample(state.dim, outer, state.position))
    return tuple(states) if isinstance(value, list | tuple) else states[0]


def cat_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    """Batches of one size that are joined are runs of samples in one dim; others leave rows of
    which only their sizes are known.
    """
    # torch lets an empty one-dim tensor stand in any `cat`
    sources = [source for source in args["tensors"] if tuple(source.meta["val"].shape) != (0,)]
    state = flow.aligned(node, sources, rank_of(node))
    at_batch = isinstance(state, PerSample) and int(args["dim"]) % rank_of(node) == state.dim
    if not isinstance(state, PerSample):
        return state
    states = [flow.of(source) for source in sources]
    positions = {each.position if isinstance(each, PerSample) else None for each in states}
    state = replace(state, position=joined_position(positions))
    if not at_batch or len(sources) == 1:
        return state
    if not all(isinstance(flow.of(source), PerSample) for source in sources):
        return Mixed(node, "rows that are not samples are added to the batch")
    if isinstance(state.outer, Irregular):
        return Mixed(node, "rows that are not ordered by sample are joined")
    sizes = tuple(flow.size(source.meta["val"].shape[state.dim]) for source in sources)
    alike = len(set(sizes)) == 1 and state.outer == 1
    return PerSample(state.dim, len(sources) if alike else Irregular(sizes), state.position)
