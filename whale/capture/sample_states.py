"""States of values in the walk over the samples (capture/samples.py), and what the rules need to
know of shapes and operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch.fx import Node

from whale.capture.kinds import named_args, op_name

if TYPE_CHECKING:
    from whale.capture.samples import SampleFlow


@dataclass(frozen=True)
class Irregular:
    """A dim that holds rows of all samples, but not as outer x s x inner. Two such dims match when
    they were made alike.
    """

    sizes: tuple[sympy.Expr, ...] = ()
    """of the values that were concatenated"""
    mask: Node | None = None
    """the mask that picked the rows, sample after sample"""


@dataclass(frozen=True)
class Position:
    """The values of sample i are i x stride + something from `low` on: row numbers of sample i in a
    dim of s x stride rows.
    """

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
    """how often the samples repeat inside the dim: 1 = the batch is its outermost part, as slicing
    needs
    """
    position: Position | None = None
    """the values say where a sample stands in the batch (`arange(batch)`): good for indexing the
    batch, and nothing else
    """


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


# ----------------------------------------------------------------------------------------------------------------------
# shapes


def expression(size: Any) -> sympy.Expr:
    """A size (int, symbolic int, or the node that holds one) as a sympy expression."""
    if isinstance(size, Node):
        size = size.meta["val"]
    return (
        size.node.expr
        if isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool)
        else sympy.sympify(size)
    )


def batch_dims(value: Any, symbol: sympy.Symbol) -> list[int]:
    """Dims whose size holds the batch symbol."""
    if isinstance(value, Node):
        value = value.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return []
    return [
        dim
        for dim, size in enumerate(value.shape)
        if isinstance(size, torch.SymInt) and symbol in expression(size).free_symbols
    ]


def batch_dim(value: Any, symbol: sympy.Symbol) -> int | None:
    """The dim whose size holds the batch symbol, or None (no such dim, or several)."""
    dims = batch_dims(value, symbol)
    return dims[0] if len(dims) == 1 else None


def product_of(sizes: Iterable[Any]) -> sympy.Expr:
    return math.prod((expression(size) for size in sizes), start=sympy.Integer(1))


def whole_number(value: sympy.Expr) -> int | None:
    value = sympy.simplify(value)
    return int(value) if value.is_Integer and value > 0 else None


def rank_of(node: Node) -> int:
    return len(node.meta["val"].shape)


def wrap_dims(dims: Any, rank: int) -> list[int]:
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
    return (
        [node for item in arguments for node in tensor_nodes(item)]
        if isinstance(arguments, list | tuple)
        else []
    )


# -------------------------------------------------------------------------------------------------------------
# operation names


def names_of(text: str) -> frozenset[str]:
    return frozenset(text.split())


CREATORS = names_of(
    "zeros ones full empty rand randn randint randperm zeros_like ones_like full_like empty_like "
    "rand_like randn_like randint_like"
    " new_zeros new_ones new_full new_empty scalar_tensor empty_strided empty_permuted eye"
)
COUNTERS = names_of("arange linspace logspace")
"""creators whose values say the position"""
CASTS = names_of(
    "to _to_copy type_as contiguous clone detach alias lift_fresh_copy lift_fresh positive"
)
VIEWS = names_of(
    "view reshape _unsafe_view _reshape_alias flatten unflatten ravel view_as reshape_as squeeze "
    "unsqueeze"
)
PERMUTES = names_of("transpose swapaxes swapdims t permute movedim moveaxis numpy_T mT adjoint")
EXPANDS = names_of("expand expand_as broadcast_to")
ADDITIVE_REDUCTIONS = {"sum": "sum", "nansum": "sum", "count_nonzero": "sum", "mean": "mean"}
REDUCTIONS = names_of(
    "sum nansum count_nonzero mean prod amax amin aminmax max min argmax argmin any all var std "
    "var_mean std_mean norm median nanmedian"
    " mode kthvalue linalg_vector_norm logsumexp nanmean quantile nanquantile cosine_similarity"
)
ALONG = names_of(
    "softmax _softmax log_softmax _log_softmax softmin cumsum cumprod cummax cummin logcumsumexp "
    "sort argsort topk flip roll glu"
    " diff renorm unfold"
)
MATRIX = names_of(
    "svd qr cholesky inverse det slogdet logdet pinverse matrix_exp cov corrcoef linalg_svd "
    "linalg_svdvals linalg_qr linalg_cholesky"
    " linalg_inv linalg_pinv linalg_det linalg_slogdet linalg_eig linalg_eigh linalg_eigvalsh "
    "linalg_solve linalg_lstsq linalg_norm"
    " linalg_matrix_norm linalg_matrix_power tril triu"
)
PRODUCTS = names_of("matmul mm bmm mv dot inner")
POINTWISE_TOO = names_of(
    "where masked_fill rsub and or xor floor_divide divide multiply subtract true_divide fill "
    "copy lerp hardswish dropout"
    " bernoulli alpha_dropout"
)
"""elementwise operations that torch does not tag as such"""
POINTWISE_LOSSES = names_of(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits kl_div poisson_nll_loss"
    " soft_margin_loss margin_ranking_loss hinge_embedding_loss"
)
CLASS_LOSSES = names_of("cross_entropy_loss nll_loss nll_loss_nd nll_loss2d")
SPATIAL = (
    "conv",
    "pool",
    "upsample",
    "group_norm",
    "instance_norm",
    "pixel_",
    "grid_sampler",
    "im2col",
    "col2im",
)
"""parts of names of operations whose dim 0 is the batch, when they have one"""
LINEAR = (
    CASTS
    | VIEWS
    | PERMUTES
    | EXPANDS
    | names_of(
        "sum mean cumsum neg select slice narrow split split_with_sizes chunk tensor_split unbind "
        "index index_select gather"
        " repeat flip roll diagonal trace tril triu getitem"
    )
)
"""linear in their first operand, when all others are Shared"""
POSITION_KEEPERS = (
    CASTS
    | VIEWS
    | PERMUTES
    | EXPANDS
    | names_of("add sub mul repeat repeat_interleave stack cat slice")
)


def is_pointwise(node: Node) -> bool:
    if isinstance(node.meta.get("val"), list | tuple):
        return False  # `torch.where(mask)` gives indices
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or op_name(node) in POINTWISE_TOO


def value_slot(node: Node, operand: Node) -> str | None:
    """How `node` uses a number: `tensor` (a tensor may stand there as well), `number`, or None: as
    a size, index or bound.
    """
    name = op_name(node)
    if name in CREATORS:
        filled = [value for key, value in named_args(node).items() if key in ("fill_value", "s")]
        return "number" if operand in filled else None
    if not is_pointwise(node):
        return None
    return (
        "tensor"
        if str(node.target).endswith(".Tensor") and named_args(node).get("other") is operand
        else "number"
    )


Rule = Callable[["SampleFlow", Node, dict[str, Any]], State | tuple[State, ...]]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register
