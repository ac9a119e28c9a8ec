"""Rows of operations that only move entries: reshapes, transposes, slices, joins, lookups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch.fx import Node

from whale.operations.nodes import op_name
from whale.operations.operation import (
    PRIME,
    Label,
    Labels,
    Operation,
    Shape,
    dims_of,
    letters,
)
from whale.operations.row import (
    Dims,
    Groups,
    add_rows,
    dims,
    first_argument,
    in_all,
    in_first,
    needed_whole,
    row,
)

SEPARATE = 7
"""smallest size used to see where each dim of a permutation goes: sizes 7, 8, 9, ... tell the dims
apart
"""


def _same_numbers(op: Operation) -> Groups:
    """Linear in the first tensor, unless its bits are read as numbers of another type."""
    return [] if reads_bits(op.node) else [{0}]


def reads_bits(node: Node) -> bool:
    """Whether this is a view of the same bits as numbers of another type."""
    return str(node.target) == "aten.view.dtype"


@row(
    "view reshape _unsafe_view _reshape_alias flatten unflatten ravel view_as reshape_as squeeze "
    "unsqueeze",
    kind="view",
    linear=_same_numbers,
    moves=True,
    free=True,
    passes_gradient_to=first_argument,
    mixes="`{name}` cuts the batch dim into pieces that are not samples",
)
def reshape(op: Operation) -> Dims | None:
    """Sizes are multiplied or factored in groups. In each group the outermost dims run along each
    other (heads of a width); where the first part is taken apart afterwards (q, k, v), or the
    samples stand inside, the next ones do, and the flat dim is cut in each segment."""
    if reads_bits(op.node) or not op.outputs:
        return None
    inputs: list[Label] = [None] * len(op.shapes[0])
    outputs: list[Label] = [None] * len(op.outputs[0])
    segments: dict[str, tuple[int, ...]] = {}
    for number, (before, after) in enumerate(groups(op.shapes[0], op.outputs[0])):
        pair = _partners(op, before, after)
        if pair is not None:
            source, target, runs = pair
            inputs[source] = outputs[target] = f"d{number}"
            segments[f"d{number}"] = runs
    return replace(dims([inputs], [outputs]), segments=segments)


def groups(before: Shape, after: Shape) -> list[tuple[list[int], list[int]]]:
    """Dims of both shapes that hold the same entries: the smallest runs with equal products. Dims
    of size 1 belong to none.
    """
    found: list[tuple[list[int], list[int]]] = []
    sources = [dim for dim, size in enumerate(before) if size != 1]
    targets = [dim for dim, size in enumerate(after) if size != 1]
    while sources and targets:
        left = [sources.pop(0)]
        right = [targets.pop(0)]
        held = before[left[0]]
        wanted = after[right[0]]
        while held != wanted:
            if held < wanted and sources:
                left.append(sources.pop(0))
                held *= before[left[-1]]
            elif held > wanted and targets:
                right.append(targets.pop(0))
                wanted *= after[right[-1]]
            else:
                return found
        found.append((left, right))
    return found


def _partners(
    op: Operation, before: list[int], after: list[int]
) -> tuple[int, int, tuple[int, int]] | None:
    """(dim before, dim after, segments of each) that run along each other in one group."""
    source = op.shapes[0]
    target = op.outputs[0]
    first = _outermost(before, source)
    second = _outermost(after, target)
    if len(before) == 1 and len(after) > 1 and second == 0 and _is_taken_apart(op.node, after[0]):
        second = 1
    outside_first = prod(source[dim] for dim in before[:first])
    outside_second = prod(target[dim] for dim in after[:second])
    a = before[first]
    b = after[second]
    if outside_second % outside_first == 0 and source[a] % (outside_second // outside_first) == 0:
        return a, b, (outside_second // outside_first, 1)
    if outside_first % outside_second == 0 and target[b] % (outside_first // outside_second) == 0:
        return a, b, (1, outside_first // outside_second)
    return None


def _outermost(dims: Sequence[int], shape: Shape) -> int:
    """The dim of samples, else the first one."""
    return next((place for place, dim in enumerate(dims) if shape[dim] % PRIME == 0), 0)


def _is_taken_apart(node: Node, dim: int) -> bool:
    """Whether the entries of this dim are used one by one: `q, k, v = x.view(b, s, 3, heads,
    width).permute(2, 0, 3, 1, 4)`.
    """
    for user in node.users:
        name = op_name(user)
        if name in PERMUTES.split():
            if _is_taken_apart(user, permutation(user).index(dim)):
                return True
        elif name in ("unbind", "select", "split", "chunk"):
            rank = len(node.meta["val"].shape)
            place = {"unbind": 1, "select": 1, "split": 2, "chunk": 2}[name]
            given: Any = user.kwargs.get("dim", user.args[place] if len(user.args) > place else 0)
            if given % rank == dim:
                return True
    return False


PERMUTES = "transpose swapaxes swapdims t permute movedim moveaxis numpy_T mT adjoint"


def permutation(node: Node) -> list[int]:
    """The dims of the input in the order in which the result has them."""
    rank = len(node.args[0].meta["val"].shape)  # type: ignore[union-attr]
    probe = torch.empty(tuple(range(SEPARATE, SEPARATE + rank)), device="meta")
    result = node.target(probe, *node.args[1:], **node.kwargs)  # type: ignore[operator]
    return [size - SEPARATE for size in result.shape]


@row(
    PERMUTES,
    kind="permute",
    linear=in_first,
    moves=True,
    free=True,
    passes_gradient_to=first_argument,
)
def permute(op: Operation) -> Dims | None:
    """The dims of the input in another order."""
    labels = letters("d", len(op.shapes[0]))
    return dims([labels], [[labels[dim] for dim in permutation(op.node)]])


@row("expand expand_as broadcast_to", kind="expand", linear=in_first, moves=True, free=True)
def expand(op: Operation) -> Dims | None:
    """A dim that is expanded may be cut: every device repeats what it needs."""
    labels = letters("d", len(op.outputs[0]))
    own = labels[len(labels) - len(op.shapes[0]) :]
    return dims([own], [labels])


ALWAYS_ALONG = {"flipud": 0, "fliplr": 1}
"""dims of operations that are not given one"""


@row(
    "slice narrow select unbind roll flip flipud fliplr cumsum cumprod cummax cummin logcumsumexp "
    "sort argsort topk unfold diff select_scatter slice_scatter"
)
def along_dim(op: Operation) -> Dims | None:
    """Whole along the dims that are named; a slice of everything is no slice. The others run
    along.
    """
    shape = op.shapes[0]
    named = "dims" if "dims" in op.defaults else "dim"
    whole = set(dims_of(op, len(shape), "dimension" if op.name == "unfold" else named))
    if op.name in ALWAYS_ALONG:
        whole = {ALWAYS_ALONG[op.name]}
    if op.name == "slice" and shape == op.outputs[0]:
        whole = set()
    labels = letters("d", len(shape), whole)
    others: list[Label] = [label for dim, label in enumerate(labels) if dim not in whole]
    result = others if op.name in ("select", "unbind") else labels
    if op.name == "unfold":
        result = [*labels, None]
    sources: list[Labels] = [labels]
    if op.name in ("select_scatter", "slice_scatter"):
        sources.append(others if op.name == "select_scatter" else labels)
    if len(sources) != len(op.inputs):
        return None  # `diff` with something in front
    return dims(sources, [result] * len(op.outputs))


add_rows("slice narrow select unbind roll flip flipud fliplr cumsum", linear=in_first)
add_rows("diff", linear=in_all)  # together with what stands in front and behind
add_rows("slice narrow select unbind", moves=True, free=True)
add_rows("slice select unbind getitem", passes_gradient_to=first_argument)
add_rows("slice narrow unsafe_split unsafe_chunk", samples="blocks")
add_rows("select", mixes="one sample is picked out of the batch by its position")
add_rows("unbind", mixes="the batch is cut into single samples")
add_rows(
    "select_scatter slice_scatter",
    mixes="some samples are overwritten by their position in the batch",
)
add_rows("as_strided diagonal", free=True)
add_rows("view_as_complex as_strided", reads_strides=True)
add_rows("view reshape expand", equals="same shape")
add_rows("flatten atleast_1d atleast_2d atleast_3d", returns="same shape")
add_rows("diagonal trace", linear=in_first)


@row(
    "split split_with_sizes chunk tensor_split",
    kind="split",
    linear=in_first,
    moves=True,
    free=True,
    passes_gradient_to=first_argument,
    samples="blocks",
)
def split(op: Operation) -> Dims | None:
    """Parts of one size can be cut alike: the whole dim is then cut in each of its segments."""
    shape = op.shapes[0]
    dim = dims_of(op, len(shape))[0] if op.argument("dim") is not None else 0
    labels = letters("d", len(shape))
    number = len(op.outputs)
    sizes = {result[dim] for result in op.outputs}
    if len(sizes) == 1 and shape[dim] == sizes.pop() * number:
        runs = {f"d{dim}": (number, *(1,) * number)}
    else:
        labels[dim] = None
        runs = {}
    return replace(dims([labels], [labels] * number), segments=runs)


@row(
    "cat concat concatenate",
    linear=in_all,
    moves=True,
    mixes="rows that are not samples are added to the batch",
    samples="join",
)
def join(op: Operation) -> Dims | None:
    """The other way round: parts of one size are the segments of the result."""
    rank = len(op.outputs[0])
    dim = dims_of(op, rank)[0] if op.argument("dim") is not None else 0
    if any(len(shape) != rank for shape in op.shapes):
        return None  # torch lets an empty one-dim tensor stand in any `cat`
    labels = letters("d", rank)
    number = len(op.inputs)
    if len({shape[dim] for shape in op.shapes}) == 1:
        runs = {f"d{dim}": (*(1,) * number, number)}
    else:
        labels[dim] = None
        runs = {}
    return replace(dims([labels] * number, [labels]), segments=runs)


add_rows("cat stack", affine=in_all)
add_rows("vstack row_stack", joined_along=0)
add_rows("hstack column_stack", joined_along=1)
add_rows("dstack", joined_along=2)


@row("stack", linear=in_all, moves=True)
def stack(op: Operation) -> Dims | None:
    """A new dim, whole."""
    rank = len(op.outputs[0])
    dim = int(op.argument("dim") or 0) % rank
    labels = letters("d", rank - 1)
    return dims([labels] * len(op.inputs), [[*labels[:dim], None, *labels[dim:]]])


@row("repeat_interleave", linear=in_first, moves=True, samples="interleave")
def repeat_interleave(op: Operation) -> Dims | None:
    """Entries are repeated one by one, so the dim itself can be cut too (keys for several query
    heads).
    """
    if len(op.inputs) != 1 or op.argument("dim") is None:
        return None
    labels = letters("d", len(op.shapes[0]))
    return dims([labels], [labels])


@row("repeat tile", linear=in_first, moves=True, samples="repeat")
def repeat(op: Operation) -> Dims | None:
    """Whole along what is repeated."""
    rank = len(op.outputs[0])
    own: Shape = (1,) * (rank - len(op.shapes[0])) + op.shapes[0]
    labels: list[Label] = [
        f"d{dim}" if own[dim] == size else None for dim, size in enumerate(op.outputs[0])
    ]
    return dims([labels[rank - len(op.shapes[0]) :]], [labels])


@row("pad constant_pad_nd", mixes="rows that are not samples are added to the batch")
def pad(op: Operation) -> Dims | None:
    """Whole where something is added at an edge or taken away there. `pad` has two numbers for each
    dim, the last dim first.
    """
    edges = op.argument("pad")
    rank = len(op.outputs[0])
    labels: list[Label] = []
    for place in reversed(range(rank)):
        is_padded = any(edge != 0 for edge in edges[2 * place : 2 * place + 2])
        labels.append(None if is_padded else f"d{rank - 1 - place}")
    return dims([labels], [labels])


# --------------------------------------------------------------------------------------------------
# lookups


@row("index_select", linear=in_first, lookup=True, samples="pick", timed_as="embedding")
def index_select(op: Operation) -> Dims | None:
    """Whole along the dim that is looked up."""
    dim = dims_of(op, len(op.shapes[0]))[0]
    labels = letters("d", len(op.shapes[0]), [dim])
    picked = [*labels[:dim], "picked", *labels[dim + 1 :]]
    return dims(op.named(self=labels, index=["picked"]), [picked])


MASK_DTYPES = (torch.bool, torch.uint8)
"""types of indices that torch takes as masks"""


@row("index", linear=in_first, lookup=True, samples="index", timed_as="embedding")
def index(op: Operation) -> Dims | None:
    """One tensor of indices: it is whole along the dim that is looked up, and its own dims run
    along. A mask has no dims of its own.
    """
    indices = op.argument("indices")
    looked_up = [place for place, each in enumerate(indices) if each is not None]
    if len(looked_up) != 1 or indices[looked_up[0]].meta["val"].dtype in MASK_DTYPES:
        return None
    dim = looked_up[0]
    labels = letters("d", len(op.shapes[0]), [dim])
    picked = letters("i", len(op.shapes[1]))
    return dims([labels, picked], [[*labels[:dim], *picked, *labels[dim + 1 :]]])


@row(
    "gather take_along_dim scatter scatter_add",
    mixes="`{name}` moves values between samples: its dim is the batch",
)
def gather(op: Operation) -> Dims | None:
    """Along the other dims each row has its own indices."""
    if len({len(shape) for shape in op.shapes}) > 1 or op.argument("dim") is None:
        return None
    whole = dims_of(op, len(op.shapes[0]))[0]
    labels: list[Label] = []
    for dim in range(len(op.shapes[0])):
        sizes = {shape[dim] for shape in (*op.shapes, *op.outputs)}
        labels.append(f"d{dim}" if dim != whole and len(sizes) == 1 else None)
    return dims([labels] * len(op.inputs), [labels])


add_rows("gather take_along_dim", lookup=True, timed_as="embedding")
add_rows("cat stack pad constant_pad_nd repeat roll flip", timed_as="transposed_copy")
add_rows("gather", linear=in_first)
add_rows("gather take_along_dim scatter scatter_add scatter_reduce", samples="gather")
add_rows("index_put", samples="index")
add_rows("masked_select", samples="mask")
add_rows("index index_select gather index_put getitem", reads_position=True)


add_rows(
    "masked_scatter take put unique_consecutive unique_dim nonzero kron isin",
    dims=needed_whole,
    mixes="`{name}` takes values in the order of the whole batch, so which sample they belong to "
    "is not known",
)


@row("one_hot")
def one_hot(op: Operation) -> Dims | None:
    """A new dim of classes, whole."""
    labels = letters("d", len(op.shapes[0]))
    return dims([labels], [[*labels, None]])
