"""Follows the samples through the graph: where the batch dim of each value is, and which operations
mix samples.

Every value gets one state; `s` is the number of samples at hand, and a *part* is any set of samples
of the mini-batch:

    Shared     the same for every part: weights, masks without a batch dim
    PerSample  dim `dim` has size outer x s x inner; sample i depends on sample i only
    Summed     value(mini-batch) = sum of value(part) over disjoint parts: a sum over the samples,
               and what is linear in it
    Whole      depends on all samples, but on no weight: computed once on the whole mini-batch, then
               Shared
    Size       a number made from `s`
    Mixed      none of these: the value of a part says nothing simple about the whole

`capture/losses.py` makes every mean over the samples Summed, so the loss is additive exactly when
its state is Summed, Shared or Whole. What an operation does to the states of its operands is read
from the table of operations (docs/operations.md); `sharding/options.py` reads the same rows for the
axes of a mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch.fx import Node

from whale.capture.graph import CapturedGraph
from whale.capture.kinds import ValueKind
from whale.capture.sample_pick_rules import (
    arithmetic_state,
    gather_state,
    index_select_state,
    index_state,
    loss_state,
    masked_select_state,
)
from whale.capture.sample_rules import (
    POSITION_USED,
    batch_norm_state,
    cat_state,
    count_state,
    linear_state,
    recurrent_state,
    repeat_interleave_state,
    repeat_state,
    row_state,
    slice_state,
    unknown_state,
)
from whale.capture.sample_states import (
    SHARED,
    Irregular,
    Mixed,
    PerSample,
    Position,
    Shared,
    Size,
    State,
    Summed,
    Whole,
    batch_dims,
    expression,
    rank_of,
    value_slot,
    whole_number,
)
from whale.operations.nodes import named_args, op_name
from whale.operations.operation import ONLY_FIRST, Shapes, other_prime
from whale.operations.table import CASTS, COUNTERS, CREATORS, POINTWISE_LOSSES, row_of

Rule = Callable[["SampleFlow", Node, dict[str, Any]], State | tuple[State, ...]]
RULES: Mapping[str, Rule] = {
    "": row_state,
    "batch norm": batch_norm_state,
    "blocks": slice_state,
    "by shape": unknown_state,
    "counting": arithmetic_state,
    "gather": gather_state,
    "index": index_state,
    "interleave": repeat_interleave_state,
    "join": cat_state,
    "mask": masked_select_state,
    "pick": index_select_state,
    "recurrent": recurrent_state,
    "repeat": repeat_state,
    "sum": count_state,
}
"""by the name that a row has in `samples`; none: the letters of the row say all"""


@lru_cache(maxsize=65536)  # a graph holds few different expressions, each in thousands of shapes
def _slope_symbols(size: sympy.Expr, symbol: sympy.Symbol) -> frozenset[sympy.Symbol]:
    """Symbols that the growth of a size with the batch depends on; none where it is in
    proportion.
    """
    return frozenset(size.diff(symbol).free_symbols)


class SampleFlow:
    """One walk over the graph that gives every node its state.

    With `all_reduce`, every sum or mean over the samples counts as known to all parts (the runtime
    all-reduces it): Shared.
    """

    def __init__(
        self, captured: CapturedGraph, kinds: dict[Node, ValueKind], all_reduce: bool = False
    ) -> None:
        self.symbol = captured.batch_symbol
        self._lengths = {
            length.symbol: sympy.Integer(other_prime(str(length.symbol)))
            for length in captured.lengths
        }
        self.shapes = Shapes(captured.batch_symbol)
        self.symbols = {captured.batch_symbol}
        """sizes that count rows of samples: the batch, and the rows that masks pick"""
        self.masks: list[Node] = []
        self.kinds = kinds
        self.all_reduce = all_reduce
        self.states: dict[Node, State | tuple[State, ...]] = {}
        self.leaves: dict[Node, str] = {}
        """reductions over the samples: `sum`, `mean` (over a number in proportion to the samples),
        `class mean` (over the targets), `row mean` (over rows that a mask picked)"""
        self.inner: set[Node] = set()
        """operations that make the batch an inner part of its dim: no bridge can slice it there"""
        self.live = ancestors(captured.output)
        for node in captured.graph.nodes:
            if node.op == "placeholder":
                batched = not node.meta.get("whole") and bool(self.dims(node))
                self.states[node] = PerSample(self.dims(node)[0]) if batched else SHARED
            elif node.op == "get_attr":
                self.states[node] = SHARED
            elif node.op == "call_function":
                self.states[node] = self._visit(node)

    def size(self, size: Any) -> sympy.Expr:
        """A size as an expression of the number of samples. Lengths are read at primes: what holds
        there holds for every length, since no size of a model is a multiple of them by chance.
        """
        found = expression(size)
        return found.xreplace(self._lengths) if self._lengths else found

    def dims(self, value: Any) -> list[int]:
        """Dims that hold samples."""
        return [dim for symbol in self.symbols for dim in batch_dims(value, symbol)]

    def of(self, value: Any) -> State:
        """State of an operand as the operations see it: a Whole value or a size has been lifted, so
        it is Shared.
        """
        if not isinstance(value, Node):
            return SHARED
        state = self.states[value]
        if isinstance(state, tuple):
            return next((one for one in state if not isinstance(one, Shared)), SHARED)
        return SHARED if isinstance(state, Whole | Size) else state

    def whole_operands(self, node: Node) -> list[Node]:
        """Operands of a node that stays in the parts, whose values must come from the whole
        mini-batch.
        """
        if isinstance(self.states[node], Whole | Size):
            return []
        return [operand for operand in node.all_input_nodes if self._reads_whole(node, operand)]

    def _visit(self, node: Node) -> State | tuple[State, ...]:
        value = node.meta.get("val")
        if op_name(node) == "getitem":
            source, place = node.args
            parts = self.states[source]  # type: ignore[index]
            if isinstance(parts, tuple):
                return parts[place]  # type: ignore[index,no-any-return]
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool):
            return self._number(node, value)
        state = self._tensor(node)
        values = list(value) if isinstance(value, list | tuple) else [value]
        states = state if isinstance(state, tuple) else (state,) * len(values)
        pairs = zip(states, values, strict=True)
        settled = tuple(self._settle(node, one, part) for one, part in pairs)
        return settled if isinstance(value, list | tuple) else settled[0]

    def _number(self, node: Node, value: Any) -> State:
        """State of a node that gives a Python number."""
        is_shape = op_name(node).startswith(("sym_size", "sym_numel"))
        read = [] if is_shape else [self.states[operand] for operand in node.all_input_nodes]
        if any(isinstance(state, Whole | PerSample | Summed | Mixed) for state in read):
            if self.kinds[node] is ValueKind.INPUT:
                return Whole()
            return Mixed(node, "a Python number is made from the samples")
        return Size() if self.symbols & expression(value).free_symbols else SHARED

    def _settle(self, node: Node, state: State, value: Any) -> State:
        """The last word on one output: values of inputs only may become Whole; a value may hold the
        samples in one dim only.
        """
        dims = self.dims(value)
        if not isinstance(state, Mixed):
            state = self._checked_by_shape(node, state, value, dims)
        if self.kinds[node] in (ValueKind.INPUT, ValueKind.CONSTANT) and not dims:
            lifted = any(self._reads_whole(node, operand) for operand in node.all_input_nodes)
            return Whole() if lifted or isinstance(state, Summed | Mixed) else state
        for operand in node.all_input_nodes:
            refused = self._refused_number(node, operand)
            if refused is not None:
                return refused
        if isinstance(state, PerSample) and not _is_in_order(state):
            before = [self.of(operand) for operand in node.all_input_nodes]
            if all(each.outer == 1 for each in before if isinstance(each, PerSample)):
                self.inner.add(node)  # here the batch became an inner part of its dim
        return state

    def _checked_by_shape(self, node: Node, state: State, value: Any, dims: list[int]) -> State:
        """The state, or Mixed where the result's shape contradicts it. `dims`: those that hold
        samples.
        """
        name = op_name(node)
        # a size like s * s grows with the batch by more than a constant for each sample
        slopes = [_slope_symbols(value.shape[dim].node.expr, self.symbol) for dim in dims]
        if len(dims) > 1 or any(slope & self.symbols for slope in slopes):
            reason = (
                "compares samples with each other: its result has the batch in more than one place"
            )
        elif isinstance(state, Summed) and dims:
            reason = "gives a value over all samples back to each sample"
        elif isinstance(state, PerSample) and state.dim not in dims:
            reason = "of all samples gives one value for the whole batch"
        else:
            return state
        return Mixed(node, f"`{name}` {reason}")

    def _reads_whole(self, node: Node, operand: Node) -> bool:
        """Whether a node uses a value that is known on the whole mini-batch only."""
        state = self.states[operand]
        if isinstance(state, Whole):
            return True
        return isinstance(state, Size) and value_slot(node, operand) is not None

    def _refused_number(self, node: Node, operand: Node) -> Mixed | None:
        """Why an operand that is a Python number over all samples cannot be used here."""
        state = self.states[operand]
        is_tensor = isinstance(operand.meta.get("val"), torch.Tensor | list | tuple)
        if is_tensor or not isinstance(state, Whole | Size):
            return None
        slot = value_slot(node, operand)
        name = op_name(node)
        if slot is None and isinstance(state, Whole):
            return Mixed(node, f"the size of `{name}` depends on the data of all samples")
        if slot == "number":
            return Mixed(
                node,
                f"`{name}` takes a number over all samples; make it a tensor operand of + - * /",
            )
        return None

    def _tensor(self, node: Node) -> State | tuple[State, ...]:
        """State of a node that gives tensors, before its shapes are looked at."""
        name = op_name(node)
        args = named_args(node)
        if name in CREATORS or name in COUNTERS:
            dims = self.dims(node)
            if not dims:
                return SHARED
            position = self._counted(node, args) if name in COUNTERS else None
            return PerSample(dims[0], 1, position)
        operands = node.all_input_nodes
        if name in CASTS or name in ONLY_FIRST:
            operands = operands[:1]
        states = [self.of(operand) for operand in operands]
        for state in states:
            if isinstance(state, Mixed):
                return state
        if any(isinstance(state, Summed) for state in states):
            return linear_state(self, node)
        row = row_of(node)
        samples = [state for state in states if isinstance(state, PerSample)]
        uses_position = any(state.position for state in samples)
        if uses_position and not row.moves and not row.reads_position:
            return Mixed(node, POSITION_USED.format(name=name))
        # rows that are repeated once for each sample have the samples inside of them
        if samples or row.samples == "interleave":
            is_loss = "reduction" in args and name not in POINTWISE_LOSSES
            rule: Rule = loss_state if is_loss else RULES[row.samples]
            return rule(self, node, args)
        return self.by_shape(node, 1)

    def _counted(self, node: Node, args: dict[str, Any]) -> Position:
        """Position of the values of `arange(batch x c)`; stride 0 where they count no rows."""
        rows = whole_number(self.size(node.meta["val"].shape[0]) / self.symbol)
        start = args.get("start", 0)
        step = args.get("step", 1)
        known = (
            op_name(node) == "arange" and rows and isinstance(start, int) and isinstance(step, int)
        )
        return Position(rows * step, start) if known and rows else Position(0)

    # ----------------------------------------------------------------------------------------------
    # shared by the rules

    def reduction(self, node: Node, how: str) -> State:
        """State of a sum or mean over the samples; notes it as one of `leaves`."""
        self.leaves[node] = how
        return (
            SHARED if self.all_reduce and self.kinds[node] is ValueKind.ACTIVATION else Summed(node)
        )

    def mean(self, node: Node, outer: int | Irregular) -> State:
        """A mean over a dim of samples. Rows picked by a mask must be counted on the whole
        mini-batch, so the mask must be an input.
        """
        mask = outer.mask if isinstance(outer, Irregular) else None
        if mask is None:
            return self.reduction(node, "mean")
        is_plain = op_name(node) == "mean" or op_name(node) in POINTWISE_LOSSES
        if self.kinds[mask] is ValueKind.ACTIVATION or not is_plain:
            return Mixed(
                node,
                f"`{op_name(node)}` is a mean over rows picked by a mask, whose number is not "
                "known before the step",
            )
        return self.reduction(node, "row mean")

    def by_shape(
        self, node: Node, outer: int | Irregular, position: Position | None = None
    ) -> State | tuple[State, ...]:
        """PerSample where a result has the batch symbol, Shared where it has not."""
        value = node.meta["val"]
        states: list[State] = []
        for part in value if isinstance(value, list | tuple) else [value]:
            dims = self.dims(part)
            states.append(PerSample(dims[0], outer, position) if dims else SHARED)
        return tuple(states) if isinstance(value, list | tuple) else states[0]

    def aligned(self, node: Node, operands: Iterable[Node], rank: int) -> State:
        """State of an operation that broadcasts its operands from the right to `rank` dims."""
        places: set[tuple[int, int | Irregular]] = set()
        positions: set[Position] = set()
        for operand in operands:
            state = self.of(operand)
            if isinstance(state, PerSample):
                places.add((state.dim + rank - rank_of(operand), state.outer))
                positions |= {state.position} if state.position else set()
        if len(places) > 1 or len(positions) > 1:
            return Mixed(node, f"`{op_name(node)}` combines samples that stand in different places")
        for dim, outer in places:
            return PerSample(dim, outer, next(iter(positions), None))
        return SHARED


def _is_in_order(state: PerSample) -> bool:
    """Whether the rows of a value stand sample after sample."""
    if isinstance(state.outer, Irregular):
        return state.outer.mask is not None
    return state.outer == 1


def ancestors(node: Node) -> dict[Node, None]:
    """All nodes that a node depends on; a dict keeps the order in which they were found."""
    found: dict[Node, None] = {}
    stack = [node]
    while stack:
        for operand in stack.pop().all_input_nodes:
            if operand not in found:
                found[operand] = None
                stack.append(operand)
    return found
