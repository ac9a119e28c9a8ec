"""Follows the samples through the graph: where the batch dim of each value is, and which operations mix samples.

Every value gets one state; `s` is the number of samples at hand, and a *part* is any set of samples of the mini-batch:

    Shared     the same for every part                                       weights, masks without a batch dim
    PerSample  dim `dim` has size outer x s x inner; sample i depends on sample i only
    Summed     value(mini-batch) = sum of value(part) over disjoint parts    a sum over the samples, and what is linear in it
    Whole      depends on all samples, but on no weight: computed once on the whole mini-batch, then Shared
    Size       a number made from `s`
    Mixed      none of these: the value of a part says nothing simple about the whole

`capture/losses.py` makes every mean over the samples Summed, so the loss is additive exactly when its state is Summed, Shared or Whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from whale.capture.graph import CapturedGraph, module_name, user_line
from whale.capture.kinds import Kind, is_random, named_args, op_name, trains_batch_norm, value_kinds


@dataclass(frozen=True)
class Irregular:
    """A dim that holds rows of all samples, but not as outer x s x inner. Two such dims match when they were made alike."""

    sizes: tuple[sympy.Expr, ...] = ()
    """of the values that were concatenated"""
    mask: Node | None = None
    """the mask that picked the rows, sample after sample"""


@dataclass(frozen=True)
class Position:
    """The values of sample i are i x stride + something from `low` on: row numbers of sample i in a dim of s x stride rows."""

    stride: int
    low: int = 0
    moved: bool = False
    """a tensor was added, which must stay below `stride`"""


@dataclass(frozen=True)
class Shared:
    pass


@dataclass(frozen=True)
class PerSample:
    dim: int
    outer: int | Irregular = 1
    """how often the samples repeat inside the dim: 1 = the batch is its outermost part, as slicing needs"""
    position: Position | None = None
    """the values say where a sample stands in the batch (`arange(batch)`): good for indexing the batch, and nothing else"""


@dataclass(frozen=True)
class Summed:
    origin: Node
    """the reduction over the samples"""


@dataclass(frozen=True)
class Whole:
    pass


@dataclass(frozen=True)
class Size:
    pass


@dataclass(frozen=True)
class Mixed:
    origin: Node
    reason: str


State = Shared | PerSample | Summed | Whole | Size | Mixed
SHARED = Shared()


@dataclass(frozen=True)
class Mixing:
    """One operation in which a sample depends on other samples, or loses its place."""

    node: Node
    reason: str
    kind: str = "samples"
    """`samples`: parts of the batch give another result. `batch statistics`: batch norm, defined per micro-batch, allowed.
    `inner batch`: exact, but the batch is not the outermost part of its dim here: no bridge can slice it.
    `whole input`: depends on the inputs of all samples; exact once `rewrite_loss` has lifted it"""

    @property
    def line(self) -> str:
        return user_line(self.node)

    @property
    def module(self) -> str:
        return module_name(self.node)


def find_mixing(captured: CapturedGraph) -> list[Mixing]:
    """All operations that mix samples on the way to the loss (its own sums and means excepted), in graph order."""
    kinds = value_kinds(captured)
    flow = SampleFlow(captured, kinds)
    order = {node: index for index, node in enumerate(captured.graph.nodes)}
    found: dict[Node, Mixing] = {}
    for node in flow.live:
        state = flow.states.get(node)
        if trains_batch_norm(node):
            found[node] = Mixing(node, "batch norm takes its statistics over the samples", "batch statistics")
        computed = kinds.get(node) in (Kind.ACTIVATION, Kind.WEIGHT)
        if computed and isinstance(state, Mixed):
            found[state.origin] = Mixing(state.origin, state.reason)
        elif computed and node in flow.inner:
            found[node] = Mixing(node, f"`{op_name(node)}` puts another dim outside the batch", "inner batch")
        elif isinstance(state, PerSample):
            for operand in flow.whole_operands(node):
                reason = f"each sample is combined with `{operand.name}`, which depends on the inputs of all samples"
                found.setdefault(operand, Mixing(operand, reason, "whole input"))
    for name, node in captured.buffer_updates.items():
        if isinstance(flow.states.get(node), Summed | Mixed):
            found.setdefault(node, Mixing(node, f"buffer {name} is updated from a value over the samples", "batch statistics"))
    return sorted(found.values(), key=lambda mixing: order[mixing.node])


# ---------------------------------------------------------------------------------------------------------------------- shapes


def expression(size: Any) -> sympy.Expr:
    """A size (int, symbolic int, or the node that holds one) as a sympy expression."""
    if isinstance(size, Node):
        size = size.meta["val"]
    return size.node.expr if isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool) else sympy.sympify(size)


def batch_dims(value: Any, symbol: sympy.Symbol) -> list[int]:
    """Dims whose size holds the batch symbol."""
    if isinstance(value, Node):
        value = value.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return []
    return [dim for dim, size in enumerate(value.shape) if isinstance(size, torch.SymInt) and symbol in expression(size).free_symbols]


def batch_dim(value: Any, symbol: sympy.Symbol) -> int | None:
    """The dim whose size holds the batch symbol, or None (no such dim, or several)."""
    dims = batch_dims(value, symbol)
    return dims[0] if len(dims) == 1 else None


def _product(sizes: Iterable[Any]) -> sympy.Expr:
    return math.prod((expression(size) for size in sizes), start=sympy.Integer(1))


def _whole_number(value: sympy.Expr) -> int | None:
    value = sympy.simplify(value)
    return int(value) if value.is_Integer and value > 0 else None


def _rank(node: Node) -> int:
    return len(node.meta["val"].shape)


def _wrap(dims: Any, rank: int) -> list[int]:
    """Dims as a list of non-negative numbers; None and [] mean all of them."""
    if dims is None or dims == [] or dims == ():
        return list(range(rank))
    return [int(dim) % max(rank, 1) for dim in (dims if isinstance(dims, Sequence) else [dims])]


def tensor_nodes(arguments: Any) -> list[Node]:
    """All nodes inside (nested) arguments."""
    if isinstance(arguments, Node):
        return [arguments]
    if isinstance(arguments, dict):
        arguments = list(arguments.values())
    return [node for item in arguments for node in tensor_nodes(item)] if isinstance(arguments, list | tuple) else []


# ------------------------------------------------------------------------------------------------------------- operation names


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


CREATORS = _names(
    "zeros ones full empty rand randn randint randperm zeros_like ones_like full_like empty_like rand_like randn_like randint_like"
    " new_zeros new_ones new_full new_empty scalar_tensor empty_strided empty_permuted eye"
)
COUNTERS = _names("arange linspace logspace")
"""creators whose values say the position"""
CASTS = _names("to _to_copy type_as contiguous clone detach alias lift_fresh_copy lift_fresh positive")
VIEWS = _names("view reshape _unsafe_view _reshape_alias flatten unflatten ravel view_as reshape_as squeeze unsqueeze")
PERMUTES = _names("transpose swapaxes swapdims t permute movedim moveaxis numpy_T mT adjoint")
EXPANDS = _names("expand expand_as broadcast_to")
ADDITIVE_REDUCTIONS = {"sum": "sum", "nansum": "sum", "count_nonzero": "sum", "mean": "mean"}
REDUCTIONS = _names(
    "sum nansum count_nonzero mean prod amax amin aminmax max min argmax argmin any all var std var_mean std_mean norm median nanmedian"
    " mode kthvalue linalg_vector_norm logsumexp nanmean quantile nanquantile cosine_similarity"
)
ALONG = _names(
    "softmax _softmax log_softmax _log_softmax softmin cumsum cumprod cummax cummin logcumsumexp sort argsort topk flip roll glu"
    " diff renorm unfold"
)
MATRIX = _names(
    "svd qr cholesky inverse det slogdet logdet pinverse matrix_exp cov corrcoef linalg_svd linalg_svdvals linalg_qr linalg_cholesky"
    " linalg_inv linalg_pinv linalg_det linalg_slogdet linalg_eig linalg_eigh linalg_eigvalsh linalg_solve linalg_lstsq linalg_norm"
    " linalg_matrix_norm linalg_matrix_power tril triu"
)
PRODUCTS = _names("matmul mm bmm mv dot inner")
POINTWISE_TOO = _names(
    "where masked_fill rsub and or xor floor_divide divide multiply subtract true_divide fill copy lerp hardswish dropout"
    " bernoulli alpha_dropout"
)
"""elementwise operations that torch does not tag as such"""
POINTWISE_LOSSES = _names(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div poisson_nll_loss"
    " soft_margin_loss margin_ranking_loss hinge_embedding_loss"
)
CLASS_LOSSES = _names("cross_entropy_loss nll_loss nll_loss_nd nll_loss2d")
SPATIAL = ("conv", "pool", "upsample", "group_norm", "instance_norm", "pixel_", "grid_sampler", "im2col", "col2im")
"""parts of names of operations whose dim 0 is the batch, when they have one"""
LINEAR = (
    CASTS
    | VIEWS
    | PERMUTES
    | EXPANDS
    | _names(
        "sum mean cumsum neg select slice narrow split split_with_sizes chunk tensor_split unbind index index_select gather"
        " repeat flip roll diagonal trace tril triu getitem"
    )
)
"""linear in their first operand, when all others are Shared"""
POSITION_KEEPERS = CASTS | VIEWS | PERMUTES | EXPANDS | _names("add sub mul repeat repeat_interleave stack cat slice")


def is_pointwise(node: Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or op_name(node) in POINTWISE_TOO


def value_slot(node: Node, operand: Node) -> str | None:
    """How `node` uses a number: `tensor` (a tensor may stand there as well), `number`, or None: as a size, index or bound."""
    name = op_name(node)
    if name in CREATORS:
        filled = [value for key, value in named_args(node).items() if key in ("fill_value", "s")]
        return "number" if operand in filled else None
    if not is_pointwise(node):
        return None
    return "tensor" if str(node.target).endswith(".Tensor") and named_args(node).get("other") is operand else "number"


Rule = Callable[["SampleFlow", Node, dict[str, Any]], State | tuple[State, ...]]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


# -------------------------------------------------------------------------------------------------------------------- the walk


class SampleFlow:
    """One walk over the graph that gives every node its state.

    With `all_reduce`, every sum or mean over the samples counts as known to all parts (the runtime all-reduces it): Shared.
    """

    def __init__(self, captured: CapturedGraph, kinds: dict[Node, Kind], all_reduce: bool = False) -> None:
        self.symbol = captured.batch_symbol
        self.symbols = {captured.batch_symbol}
        """sizes that count rows of samples: the batch, and the rows that masks pick"""
        self.masks: list[Node] = []
        self.kinds = kinds
        self.all_reduce = all_reduce
        self.states: dict[Node, State | tuple[State, ...]] = {}
        self.leaves: dict[Node, str] = {}
        """reductions over the samples: `sum`, `mean` (over a number in proportion to the samples), `class mean` (over the targets),
        `row mean` (over rows that a mask picked)"""
        self.inner: set[Node] = set()
        self.live = _ancestors(captured.output)
        for node in captured.graph.nodes:
            if node.op == "placeholder":
                batched = not node.meta.get("whole") and bool(self.dims(node))
                self.states[node] = PerSample(self.dims(node)[0]) if batched else SHARED
            elif node.op == "get_attr":
                self.states[node] = SHARED
            elif node.op == "call_function":
                self.states[node] = self._visit(node)

    def dims(self, value: Any) -> list[int]:
        """Dims that hold samples."""
        return [dim for symbol in self.symbols for dim in batch_dims(value, symbol)]

    def of(self, value: Any) -> State:
        """State of an operand as the operations see it: a Whole value or a size has been lifted, so it is Shared."""
        if not isinstance(value, Node):
            return SHARED
        state = self.states[value]
        if isinstance(state, tuple):
            return next((one for one in state if not isinstance(one, Shared)), SHARED)
        return SHARED if isinstance(state, Whole | Size) else state

    def whole_operands(self, node: Node) -> list[Node]:
        """Operands of a node that stays in the parts, whose values must come from the whole mini-batch."""
        if isinstance(self.states[node], Whole | Size):
            return []
        return [
            operand
            for operand in node.all_input_nodes
            if isinstance(self.states[operand], Whole) or (isinstance(self.states[operand], Size) and value_slot(node, operand))
        ]

    def _visit(self, node: Node) -> State | tuple[State, ...]:
        value = node.meta.get("val")
        if op_name(node) == "getitem" and isinstance(self.states[node.args[0]], tuple):  # type: ignore[index]
            return self.states[node.args[0]][node.args[1]]  # type: ignore[index,call-overload,return-value]
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool):
            return self._number(node, value)
        state = self._tensor(node)
        values = list(value) if isinstance(value, list | tuple) else [value]
        states = state if isinstance(state, tuple) else (state,) * len(values)
        settled = tuple(self._settle(node, one, part) for one, part in zip(states, values, strict=True))
        return settled if isinstance(value, list | tuple) else settled[0]

    def _number(self, node: Node, value: Any) -> State:
        read = [self.states[operand] for operand in node.all_input_nodes if not op_name(node).startswith(("sym_size", "sym_numel"))]
        if any(isinstance(state, Whole | PerSample | Summed | Mixed) for state in read):
            return Whole() if self.kinds[node] is Kind.INPUT else Mixed(node, "a Python number is made from the samples")
        return Size() if self.symbols & expression(value).free_symbols else SHARED

    def _settle(self, node: Node, state: State, value: Any) -> State:
        """The last word on one output: values of inputs only may become Whole; a value may hold the samples in one dim only."""
        dims = self.dims(value)
        if isinstance(state, Mixed):
            pass
        elif len(dims) > 1 or any(value.shape[dim].node.expr.diff(self.symbol).free_symbols & self.symbols for dim in dims):
            state = Mixed(node, f"`{op_name(node)}` compares samples with each other: its result has the batch in more than one place")
        elif isinstance(state, Summed) and dims:
            state = Mixed(node, f"`{op_name(node)}` gives a value over all samples back to each sample")
        elif isinstance(state, PerSample) and state.dim not in dims:
            state = Mixed(node, f"`{op_name(node)}` of all samples gives one value for the whole batch")
        if self.kinds[node] in (Kind.INPUT, Kind.CONSTANT) and not dims:
            lifted = any(isinstance(self.states[operand], Whole) for operand in node.all_input_nodes) or any(
                isinstance(self.states[operand], Size) and value_slot(node, operand) for operand in node.all_input_nodes
            )
            return Whole() if lifted or isinstance(state, Summed | Mixed) else state
        for operand in node.all_input_nodes:
            number = not isinstance(operand.meta.get("val"), torch.Tensor | list | tuple)
            slot = value_slot(node, operand) if number else "tensor"
            if number and isinstance(self.states[operand], Whole) and slot is None:
                return Mixed(node, f"the size of `{op_name(node)}` depends on the data of all samples")
            if isinstance(self.states[operand], Whole | Size) and slot == "number":
                return Mixed(node, f"`{op_name(node)}` takes a number over all samples; make it a tensor operand of + - * /")
        in_order = state.outer == 1 or (isinstance(state.outer, Irregular) and state.outer.mask) if isinstance(state, PerSample) else True
        if not in_order and all(other.outer == 1 for other in map(self.of, node.all_input_nodes) if isinstance(other, PerSample)):
            self.inner.add(node)
        return state

    def _tensor(self, node: Node) -> State | tuple[State, ...]:
        name, args = op_name(node), named_args(node)
        if name in CREATORS or name in COUNTERS:
            dims = self.dims(node)
            return PerSample(dims[0], 1, self._counted(node, args) if name in COUNTERS else None) if dims else SHARED
        operands = node.all_input_nodes[:1] if name in CASTS | {"view_as", "reshape_as", "expand_as"} else node.all_input_nodes
        states = [self.of(operand) for operand in operands]
        for state in states:
            if isinstance(state, Mixed):
                return state
        if any(isinstance(state, Summed) for state in states):
            return linear_state(self, node, args)
        if any(isinstance(state, PerSample) and state.position for state in states):
            if name not in POSITION_KEEPERS and name not in ("index", "index_select", "gather", "index_put", "getitem"):
                return Mixed(node, f"`{name}` uses the position of a sample in the batch, which differs between parts of the batch")
        if name == "repeat_interleave" or any(isinstance(state, PerSample) for state in states):
            return self._rule(node)(self, node, args)
        return self.by_shape(node, 1)

    def _counted(self, node: Node, args: dict[str, Any]) -> Position:
        """Position of the values of `arange(batch x c)`; stride 0 where they count no rows."""
        rows = _whole_number(expression(node.meta["val"].shape[0]) / self.symbol)
        start, step = args.get("start", 0), args.get("step", 1)
        known = op_name(node) == "arange" and rows and isinstance(start, int) and isinstance(step, int)
        return Position(rows * step, start) if known and rows else Position(0)

    def _rule(self, node: Node) -> Rule:
        name = op_name(node)
        if "reduction" in named_args(node):
            return loss_state
        if name in ("max", "min") and is_pointwise(node):
            return pointwise_state
        if name in RULES:
            return RULES[name]
        if is_pointwise(node):
            return pointwise_state
        return spatial_state if any(part in name for part in SPATIAL) else unknown_state

    # ------------------------------------------------------------------------------------------------- shared by the rules

    def reduction(self, node: Node, how: str) -> State:
        self.leaves[node] = how
        return SHARED if self.all_reduce and self.kinds[node] is Kind.ACTIVATION else Summed(node)

    def mean(self, node: Node, outer: int | Irregular) -> State:
        """A mean over a dim of samples. Rows picked by a mask must be counted on the whole mini-batch, so the mask must be an input."""
        mask = outer.mask if isinstance(outer, Irregular) else None
        if mask is None:
            return self.reduction(node, "mean")
        if self.kinds[mask] is Kind.ACTIVATION or not (op_name(node) == "mean" or op_name(node) in POINTWISE_LOSSES):
            return Mixed(node, f"`{op_name(node)}` is a mean over rows picked by a mask, whose number is not known before the step")
        return self.reduction(node, "row mean")

    def by_shape(self, node: Node, outer: int | Irregular, position: Position | None = None) -> State | tuple[State, ...]:
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
                places.add((state.dim + rank - _rank(operand), state.outer))
                positions |= {state.position} if state.position else set()
        if len(places) > 1 or len(positions) > 1:
            return Mixed(node, f"`{op_name(node)}` combines samples that stand in different places")
        for dim, outer in places:
            return PerSample(dim, outer, next(iter(positions), None))
        return SHARED


def _ancestors(node: Node) -> dict[Node, None]:
    found: dict[Node, None] = {}
    stack = [node]
    while stack:
        for operand in stack.pop().all_input_nodes:
            if operand not in found:
                found[operand] = None
                stack.append(operand)
    return found


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
    floating = all(part.is_floating_point() for part in (value if isinstance(value, list | tuple) else [value]))
    first = [operand for operand in tensor_nodes(list(args.values())[:1]) if operand in summed]
    if name == "div":
        linear = len(summed) == 1 and bool(first) and args.get("rounding_mode") is None
    elif name in ("mul", "multiply") or name in PRODUCTS or (name == "linear" and args.get("bias") is None):
        linear = len(summed) == 1
    elif name == "masked_fill":
        linear = summed == first and args["value"] == 0
    elif name == "where":
        numbers = [args[key] for key in ("input", "other") if not isinstance(args[key], Node)]
        linear = args["condition"] not in summed and not any(numbers)
    else:
        linear = name in ("add", "sub", "rsub", "stack", "cat") or (name in LINEAR and len(summed) == len(first))
    if linear and floating:
        return Summed(origin)
    if name in ("mul", "div") and len(summed) > 1:
        return Mixed(node, f"`{name}` of two values over all samples is not a sum over samples; one is {what}")
    return Mixed(node, f"`{name}` is applied to {what}, so the results of two parts of the batch do not add up")


def unknown_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State | tuple[State, ...]:
    """An operation without a rule: the batch is where its symbol is, unless the operation was told to work along that dim."""
    for operand in _tensor_operands(node)[:1]:
        source, dims = flow.of(operand), args.get("dim", args.get("dims"))
        if isinstance(source, PerSample) and isinstance(dims, int | list | tuple) and source.dim in _wrap(dims, _rank(operand)):
            return Mixed(node, f"`{op_name(node)}` works across the samples: its dim is the batch")
    outers = {place.outer for operand in node.all_input_nodes if isinstance(place := flow.of(operand), PerSample)}
    if len(outers) > 1:
        return Mixed(node, f"`{op_name(node)}` combines samples that stand in different places")
    state: State | tuple[State, ...] = flow.by_shape(node, outers.pop())
    if isinstance(state, Shared) or (isinstance(state, tuple) and all(isinstance(one, Shared) for one in state)):
        return Mixed(node, f"`{op_name(node)}` of all samples gives one value for the whole batch")
    return state


def pointwise_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    state = flow.aligned(node, _tensor_operands(node), _rank(node))
    if isinstance(state, PerSample) and state.position and op_name(node) in ("add", "sub", "mul"):
        return PerSample(state.dim, state.outer, _shifted(flow, op_name(node), args, state.position))
    return state


def _shifted(flow: SampleFlow, name: str, args: dict[str, Any], position: Position) -> Position:
    """Position after adding or multiplying; stride 0 where the values count no rows any more."""
    first, other = args["input"], args["other"]
    state = flow.of(first)
    if not (isinstance(state, PerSample) and state.position):
        first, other = other, first
    if name == "mul":
        return Position(position.stride * other, position.low * other, position.moved) if isinstance(other, int) else Position(0)
    if name == "sub" or args.get("alpha", 1) != 1 or (isinstance(state := flow.of(other), PerSample) and state.position):
        return Position(0)
    return Position(position.stride, position.low + other if isinstance(other, int) else position.low, not isinstance(other, int))


def _tensor_operands(node: Node) -> list[Node]:
    return [operand for operand in node.all_input_nodes if isinstance(operand.meta.get("val"), torch.Tensor)]


def spatial_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State | tuple[State, ...]:
    """Convolutions, pooling, resizing: dim 0 of the first operand is the batch, the weights are shared."""
    source = node.all_input_nodes[0]
    state = flow.of(source)
    others = [operand for operand in _tensor_operands(node)[1:] if isinstance(flow.of(operand), PerSample)]
    if not isinstance(state, PerSample) or state.dim != 0 or (others and "grid" not in op_name(node)):
        return Mixed(node, f"the batch of `{op_name(node)}` is not dim 0 of its input")
    return unknown_state(flow, node, args)


# ----------------------------------------------------------------------------------------------------------- rules: reductions


@rule(*REDUCTIONS)
def reduction_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    sources = _tensor_operands(node)
    rank = max(_rank(source) for source in sources)
    state = flow.aligned(node, sources, rank)
    if not isinstance(state, PerSample):
        return state
    dims = _wrap(args.get("dim"), rank)
    if state.dim in dims:
        how = ADDITIVE_REDUCTIONS.get(op_name(node))
        if how == "mean":
            return flow.mean(node, state.outer)
        return flow.reduction(node, how) if how else Mixed(node, f"`{op_name(node)}` is taken over all samples")
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
    if not isinstance(state, PerSample) or state.dim in _wrap(dims, _rank(source)):
        return Mixed(node, f"`{op_name(node)}` works across the samples: its dim is the batch")
    return PerSample(state.dim, state.outer)


@rule("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm")
def layer_norm_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State | tuple[State, ...]:
    source = args["input"]
    state = flow.of(source)
    if not isinstance(state, PerSample) or state.dim >= _rank(source) - len(args["normalized_shape"]):
        return Mixed(node, f"`{op_name(node)}` normalises over the samples")
    return flow.by_shape(node, state.outer)


@rule("batch_norm", "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional", "cudnn_batch_norm")
def batch_norm_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State | tuple[State, ...]:
    """Statistics over the samples are a defined exception (DESIGN section 6): the result counts as per sample."""
    state = flow.of(args["input"])
    if not isinstance(state, PerSample) or state.dim == 1:
        return Mixed(node, "batch norm has the samples in its channel dim")
    return flow.by_shape(node, state.outer)


@rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State | tuple[State, ...]:
    source = args.get("input", args.get("data"))
    state, batch = flow.of(source), 0 if args.get("batch_first") else 1
    if not isinstance(state, PerSample) or state.dim != batch or "data" in args:
        return Mixed(node, f"`{op_name(node)}` runs over the samples as if they were time steps: look at its batch_first")
    return flow.by_shape(node, state.outer)


@rule(*MATRIX)
def matrix_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State | tuple[State, ...]:
    """Operations on matrices, the last two dims; the dims before them are independent."""
    for source in _tensor_operands(node):
        state = flow.of(source)
        if isinstance(state, PerSample) and state.dim >= _rank(source) - 2:
            return Mixed(node, f"`{op_name(node)}` takes the samples as rows of one matrix")
    return unknown_state(flow, node, args | {"dim": None})


# --------------------------------------------------------------------------------------------------------------- rules: shapes


@rule(*VIEWS)
def view_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    """A view keeps the order of the elements: (elements before the batch, s, elements after it) stays the same."""
    source = node.all_input_nodes[0]
    state = flow.of(source)
    dims = flow.dims(node)
    lost = Mixed(node, f"`{op_name(node)}` cuts the batch dim into pieces that are not samples")
    if not isinstance(state, PerSample) or len(dims) != 1:
        return lost
    old, new, dim = source.meta["val"].shape, node.meta["val"].shape, dims[0]
    if isinstance(state.outer, Irregular):
        same = expression(old[state.dim]) == expression(new[dim]) and _product(old[: state.dim]) == _product(new[:dim])
        return PerSample(dim, state.outer, state.position) if same else lost
    outer = _whole_number(_product(old[: state.dim]) * state.outer / _product(new[:dim]))
    inner = _whole_number(expression(new[dim]) / flow.symbol / outer) if outer else None
    return PerSample(dim, outer, state.position) if outer and inner else lost


@rule(*PERMUTES)
def permute_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    state = flow.of(node.all_input_nodes[0])
    assert isinstance(state, PerSample)
    return PerSample(flow.dims(node)[0], state.outer, state.position)


@rule(*EXPANDS)
def expand_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    return flow.aligned(node, node.all_input_nodes[:1], _rank(node))


@rule(*CASTS)
def cast_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    return flow.of(node.all_input_nodes[0])


@rule("repeat", "tile")
def repeat_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    source = node.all_input_nodes[0]
    state = flow.aligned(node, [source], _rank(node))
    repeats = list(args.get("repeats", args.get("dims", ())))
    repeats = [1] * (_rank(node) - len(repeats)) + repeats
    if not isinstance(state, PerSample) or not isinstance(repeats[state.dim], int):
        return Mixed(node, f"`{op_name(node)}` repeats the samples a number of times that depends on the batch")
    if repeats[state.dim] == 1:
        return state
    if isinstance(state.outer, Irregular):
        return Mixed(node, f"`{op_name(node)}` repeats rows that are not ordered by sample")
    return PerSample(state.dim, state.outer * repeats[state.dim], state.position)


@rule("repeat_interleave")
def repeat_interleave_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State | tuple[State, ...]:
    source = args.get("input")
    state = flow.of(source)
    if isinstance(state, Shared):  # every row repeated once per sample: the samples lie inside the rows
        dims = flow.dims(node)
        rows = _whole_number(expression(node.meta["val"].shape[dims[0]]) / flow.symbol) if dims else None
        return PerSample(dims[0], rows) if rows else SHARED
    if not isinstance(state, PerSample) or not isinstance(args.get("repeats"), int) or isinstance(state.outer, Irregular):
        return Mixed(node, "`repeat_interleave` repeats samples a number of times that depends on the data")
    if args.get("dim") is None and state.dim != 0:
        return Mixed(node, "`repeat_interleave` without a dim flattens the samples")
    return PerSample(state.dim, state.outer, state.position)


@rule("select")
def select_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    state, dim = flow.of(args["input"]), int(args["dim"]) % _rank(args["input"])
    if not isinstance(state, PerSample) or dim == state.dim:
        return Mixed(node, "one sample is picked out of the batch by its position")
    return PerSample(state.dim - (dim < state.dim), state.outer)


@rule("slice", "narrow", "split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk")
def slice_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State | tuple[State, ...]:
    """Cutting the batch dim is fine in whole blocks of samples, as in `torch.cat([a, b])` followed by `chunk(2)`."""
    source = args["input"]
    state = flow.of(source)
    assert isinstance(state, PerSample)
    if int(args.get("dim", 0)) % _rank(source) != state.dim:
        return flow.by_shape(node, state.outer, state.position)
    size = expression(source.meta["val"].shape[state.dim])
    lost = Mixed(node, f"`{op_name(node)}` takes some of the samples by their position in the batch")
    results = node.meta["val"] if isinstance(node.meta["val"], list | tuple) else [node.meta["val"]]
    if len(results) == 1 and expression(results[0].shape[state.dim]) == size and args.get("step", 1) == 1:
        return flow.by_shape(node, state.outer, state.position)
    start = args.get("start") or 0
    if isinstance(state.outer, Irregular) or args.get("step", 1) != 1:
        return lost
    block = size / state.outer
    outers = [_whole_number(expression(result.shape[state.dim]) / block) for result in results]
    starts_whole = expression(start) == 0 or _whole_number(expression(start) / block) is not None
    if not starts_whole or not all(outers):
        return lost
    states = tuple(PerSample(state.dim, outer, state.position) for outer in outers if outer)
    return states if isinstance(node.meta["val"], list | tuple) else states[0]


@rule("unbind")
def unbind_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State | tuple[State, ...]:
    state, dim = flow.of(args["input"]), int(args["dim"]) % _rank(args["input"])
    if not isinstance(state, PerSample) or dim == state.dim:
        return Mixed(node, "the batch is cut into single samples")
    return flow.by_shape(node, state.outer)


@rule("cat", "concat")
def cat_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    # torch lets an empty one-dim tensor stand in any `cat`
    sources = [source for source in args["tensors"] if tuple(source.meta["val"].shape) != (0,)]
    state = flow.aligned(node, sources, _rank(node))
    if not isinstance(state, PerSample) or len(sources) == 1 or int(args["dim"]) % _rank(node) != state.dim:
        return state
    if not all(isinstance(flow.of(source), PerSample) for source in sources):
        return Mixed(node, "rows that are not samples are added to the batch")
    sizes = tuple(expression(source.meta["val"].shape[state.dim]) for source in sources)
    if isinstance(state.outer, Irregular):
        return Mixed(node, "rows that are not ordered by sample are joined")
    return PerSample(state.dim, len(sources) if len(set(sizes)) == 1 and state.outer == 1 else Irregular(sizes), state.position)


@rule("stack")
def stack_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    state = flow.aligned(node, args["tensors"], _rank(node) - 1)
    new = int(args["dim"]) % _rank(node)
    return PerSample(state.dim + (new <= state.dim), state.outer, state.position) if isinstance(state, PerSample) else state


@rule("pad", "constant_pad_nd")
def pad_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State | tuple[State, ...]:
    state = flow.of(args["input"])
    assert isinstance(state, PerSample)
    place = 2 * (_rank(node) - 1 - state.dim)
    if any(isinstance(pad, Node) or pad != 0 for pad in args["pad"][place : place + 2]):
        return Mixed(node, "rows that are not samples are added to the batch")
    return state


# ------------------------------------------------------------------------------------------------------------- rules: indexing


def _rows(flow: SampleFlow, index: Any) -> bool:
    """Whether an index says positions in the batch."""
    state = flow.of(index)
    return isinstance(state, PerSample) and state.position is not None


def _own_rows(flow: SampleFlow, index: Any, source: Node) -> bool:
    """Whether an index into the batch dim of `source` gives every sample rows of its own."""
    state, place = flow.of(source), flow.of(index)
    if not isinstance(state, PerSample) or not isinstance(place, PerSample) or place.position is None or state.outer != 1:
        return False
    inner, position = expression(source.meta["val"].shape[state.dim]) / flow.symbol, place.position
    return position.stride == inner and 0 <= position.low < inner and (inner > 1 or not position.moved)


@rule("index", "index_put")
def index_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State | tuple[State, ...]:
    source, indices = args["input"], list(args["indices"])
    state = flow.of(source)
    if any(isinstance(index, Node) and index.meta["val"].dtype is torch.bool for index in indices):
        return _mask_state(flow, node, args, indices)
    at_batch = indices[state.dim] if isinstance(state, PerSample) and state.dim < len(indices) else None
    strangers = [index for index in indices if index is not None and index is not at_batch and _rows(flow, index)]
    if strangers:
        return Mixed(node, f"`{op_name(node)}` uses the position of a sample in the batch, which differs between parts of the batch")
    if at_batch is not None and not _own_rows(flow, at_batch, source):
        return Mixed(node, "samples are picked or reordered by an index into the batch")
    if op_name(node) == "index_put":
        by_sample = any(isinstance(flow.of(index), PerSample) for index in indices)
        if at_batch is None and (by_sample or not isinstance(state, PerSample)):
            return Mixed(node, "`index_put` writes values of samples into rows that are not samples")
        return state
    if at_batch is None and isinstance(state, PerSample):
        return flow.by_shape(node, state.outer)
    together = flow.aligned(node, [index for index in indices if index is not None], max(_rank(i) for i in indices if i is not None))
    return together if isinstance(together, Mixed) else flow.by_shape(node, 1)


def _mask_state(flow: SampleFlow, node: Node, args: dict[str, Any], indices: list[Any]) -> State:
    """`x[mask] = number` is elementwise; `x[mask]` gives a number of rows that depends on the data, sample after sample."""
    state, mask = flow.of(args["input"]), indices[0]
    place = flow.of(mask)
    together = isinstance(place, PerSample) and isinstance(state, PerSample) and (place.dim, place.outer) == (state.dim, state.outer)
    if op_name(node) == "index_put" and len(indices) == 1 and isinstance(state, PerSample) and _rank(args["values"]) == 0:
        if together or isinstance(place, Shared):
            return state
    elif op_name(node) == "index" and len(indices) == 1 and together:
        return _picked_rows(flow, node, mask)
    return Mixed(node, "a mask picks rows that cannot be told apart by sample; multiply by the mask instead")


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
        if one is other or one.op != "call_function" or one.target is not other.target or is_random(one):
            return one is other
        return same_value([one.args, one.kwargs], [other.args, other.kwargs])
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same_value, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_value(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other)


@rule("masked_select")
def masked_select_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    if _rank(args["input"]) != _rank(args["mask"]) or flow.of(args["input"]) != flow.of(args["mask"]):
        return Mixed(node, "a mask picks rows that cannot be told apart by sample; multiply by the mask instead")
    return _picked_rows(flow, node, args["mask"])


@rule("index_select")
def index_select_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State | tuple[State, ...]:
    state, index = flow.of(args["input"]), flow.of(args["index"])
    at_batch = isinstance(state, PerSample) and int(args["dim"]) % _rank(args["input"]) == state.dim
    if (at_batch and not _own_rows(flow, args["index"], args["input"])) or (not at_batch and _rows(flow, args["index"])):
        return Mixed(node, "samples are picked or reordered by an index into the batch")
    return flow.by_shape(node, state.outer if isinstance(state, PerSample) and isinstance(index, Shared) else 1)


@rule("gather", "take_along_dim", "scatter", "scatter_add", "scatter_reduce")
def gather_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    if op_name(node) == "scatter_add" and op_name(args["input"]) in ("zeros", "new_zeros", "zeros_like") and not flow.dims(node):
        places, added = flow.of(args["index"]), flow.of(args["src"])
        if isinstance(places, PerSample) and places == added and places.dim == int(args["dim"]) % _rank(node):
            return flow.reduction(node, "sum")  # a histogram of the samples
    sources = [args["input"], args.get("index", args.get("indices")), args.get("src")]
    state = flow.aligned(node, [source for source in sources if isinstance(source, Node)], _rank(node))
    if isinstance(state, PerSample) and (args.get("dim") is None or int(args["dim"]) % _rank(node) == state.dim):
        if op_name(node) != "gather" or not _own_rows(flow, args["index"], args["input"]):
            return Mixed(node, f"`{op_name(node)}` moves values between samples: its dim is the batch")
        return PerSample(state.dim, state.outer)
    if isinstance(state, PerSample) and state.position:
        return Mixed(node, f"`{op_name(node)}` uses the position of a sample in the batch, which differs between parts of the batch")
    return state


@rule("masked_scatter", "take", "put", "unique", "unique_consecutive", "unique_dim", "nonzero", "kron", "isin")
def reordering_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    return Mixed(node, f"`{op_name(node)}` takes values in the order of the whole batch, so which sample they belong to is not known")


@rule("slice_scatter", "select_scatter")
def slice_scatter_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    source, written, dim = flow.of(args["input"]), flow.of(args["src"]), int(args["dim"]) % _rank(node)
    if isinstance(source, PerSample) and dim == source.dim:
        return Mixed(node, "some samples are overwritten by their position in the batch")
    if isinstance(source, PerSample) and isinstance(written, PerSample):
        shift = int(op_name(node) == "select_scatter" and written.dim >= dim)
        if (written.dim + shift, written.outer) != (source.dim, source.outer):
            return Mixed(node, f"`{op_name(node)}` combines samples that stand in different places")
    return source if isinstance(source, PerSample) else Mixed(node, "samples are written into a value without a batch dim")


@rule("embedding")
def embedding_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    if not isinstance(flow.of(args["weight"]), Shared):
        return Mixed(node, "the table of `embedding` depends on the samples")
    return flow.of(args["indices"])


# ------------------------------------------------------------------------------------------------------------- rules: products


def _role(flow: SampleFlow, operand: Node, left: bool) -> tuple[str, int] | None:
    """Where the samples stand in a matrix product: `inner` (summed over), `free` (a row or column), or `lead` (place from the right)."""
    state = flow.of(operand)
    if not isinstance(state, PerSample):
        return None
    rank = _rank(operand)
    inner = rank - 1 if left or rank == 1 else rank - 2
    if state.dim == inner:
        return "inner", 0
    return ("free", 0) if state.dim >= rank - 2 else ("lead", rank - state.dim)


def _product_state(flow: SampleFlow, node: Node, left: Node, right: Node) -> State | tuple[State, ...]:
    states, roles = (flow.of(left), flow.of(right)), (_role(flow, left, True), _role(flow, right, False))
    outers = {state.outer for state in states if isinstance(state, PerSample)}
    if roles == (("inner", 0), ("inner", 0)) and len(outers) == 1:
        return flow.reduction(node, "sum")
    if ("inner", 0) in roles or (None not in roles and (roles[0] != roles[1] or roles[0] == ("free", 0))) or len(outers) != 1:
        return Mixed(node, f"`{op_name(node)}` combines every sample with every other one")
    return flow.by_shape(node, outers.pop())


@rule(*PRODUCTS)
def matmul_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State | tuple[State, ...]:
    left, right = tensor_nodes(list(args.values()))[:2]
    return _product_state(flow, node, left, right)


@rule("addmm", "baddbmm", "addbmm", "addmv")
def addmm_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State | tuple[State, ...]:
    bias, left, right = tensor_nodes(list(args.values()))[:3]
    if op_name(node) == "addbmm" or _role(flow, left, True) == ("inner", 0):
        return Mixed(node, f"`{op_name(node)}` adds to a product over all samples")
    if not any(isinstance(flow.of(operand), PerSample) for operand in (left, right)):
        return flow.aligned(node, [bias], _rank(node))
    state, added = _product_state(flow, node, left, right), flow.aligned(node, [bias], _rank(node))
    if isinstance(added, PerSample) and added != state:
        return Mixed(node, f"`{op_name(node)}` combines samples that stand in different places")
    return state


@rule("linear")
def linear_layer_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    source = args["input"]
    state = flow.of(source)
    if not isinstance(state, PerSample) or state.dim == _rank(source) - 1 or isinstance(flow.of(args["weight"]), PerSample):
        return Mixed(node, "`linear` combines every sample with every other one")
    return PerSample(state.dim, state.outer)


@rule("einsum")
def einsum_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State | tuple[State, ...]:
    equation, sources = args["equation"].replace(" ", ""), args["tensors"]
    operands, arrow, result = equation.partition("->")
    if "." in equation or not arrow:
        return unknown_state(flow, node, args)
    found: set[tuple[str, int | Irregular]] = set()
    for labels, source in zip(operands.split(","), sources, strict=True):
        state = flow.of(source)
        if isinstance(state, PerSample):
            found.add((labels[state.dim], state.outer))
    label, outer = found.pop()
    if found:
        return Mixed(node, f"`einsum` ({equation}) combines every sample with every other one")
    return flow.by_shape(node, outer) if label in result else flow.reduction(node, "sum")


@rule("scaled_dot_product_attention")
def attention_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    rank = _rank(node)
    state = flow.aligned(node, [args[key] for key in ("query", "key", "value", "attn_mask") if isinstance(args[key], Node)], rank)
    if isinstance(state, PerSample) and state.dim >= rank - 2:
        return Mixed(node, "attention goes across the samples: the batch is not one of its leading dims")
    return state


# --------------------------------------------------------------------------------------------------------------- rules: losses


def loss_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State | tuple[State, ...]:
    """A loss function of torch. Reduction 0 is none, 1 the mean, 2 the sum."""
    name, sources = op_name(node), _tensor_operands(node)
    if name in CLASS_LOSSES:
        wrong = _class_loss_problem(flow, args)
    elif name in POINTWISE_LOSSES:
        wrong = isinstance(flow.aligned(node, sources, max(map(_rank, sources))), Mixed)
    else:
        places = [state.dim for source in sources if isinstance(state := flow.of(source), PerSample)]
        wrong = any(places[1:] if name == "ctc_loss" else places) or (name == "ctc_loss" and places[0] != 1)
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
    """Scores are (N, C, ...), targets (N, ...) classes or (N, C, ...) probabilities; scores of one sample alone are (C)."""
    scores, target = flow.of(args["input"]), flow.of(args["target"])
    class_dim = 1 if _rank(args["input"]) > 1 else 0
    if not isinstance(scores, PerSample) or scores.dim == class_dim:
        return True
    if not isinstance(target, PerSample):
        return True
    removed = int(_rank(args["target"]) < _rank(args["input"]) and scores.dim > class_dim)
    return (target.dim + removed, target.outer) != (scores.dim, scores.outer)


def _class_mean_state(flow: SampleFlow, node: Node, args: dict[str, Any]) -> State:
    """The mean goes over targets that are not `ignore_index`, so the targets must be known for the whole mini-batch."""
    if flow.kinds[args["target"]] in (Kind.INPUT, Kind.CONSTANT):
        return flow.reduction(node, "class mean")
    source = args["target"]
    while isinstance(source, Node) and op_name(source) in CASTS | VIEWS | PERMUTES:
        source = source.args[0]
    target = flow.of(args["target"])
    assert isinstance(target, PerSample)
    if op_name(source) == "argmax" and args["ignore_index"] < 0 and args["weight"] is None:
        return flow.mean(node, target.outer)  # pseudo-labels: none of them can be ignored
    return Mixed(node, f"the targets of `{op_name(node)}` are computed by the model, so their number is not known before the step")
