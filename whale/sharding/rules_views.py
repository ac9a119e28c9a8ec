"""Rules of operations that only move entries: reshapes, transposes, slices, joins."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.fx import Node

from whale.capture.kinds import op_name
from whale.sharding.operation import (
    PRIME,
    Label,
    Operation,
    Option,
    Shape,
    dims_of,
    labelled,
    letters,
    partial_options,
    rule,
)

RESHAPES = (
    "view reshape _unsafe_view _reshape_alias flatten unflatten ravel view_as reshape_as squeeze "
    "unsqueeze"
)
EXPANDS = "expand expand_as broadcast_to"
SPLITS = "split split_with_sizes chunk tensor_split"
CREATORS = "new_zeros new_ones new_full new_empty"
"""their second argument is a size"""
PERMUTES = "transpose swapaxes swapdims t permute movedim moveaxis numpy_T mT adjoint"
SEPARATE = 7
"""smallest size used to see where each dim of a permutation goes: sizes 7, 8, 9, ... tell the dims
apart
"""


@rule(RESHAPES)
def reshape(op: Operation) -> list[Option]:
    """Sizes are multiplied or factored in groups. In each group the outermost dims run along each
    other (heads of a width); where the first part is taken apart afterwards (q, k, v), or the
    samples stand inside, the next ones do, and the flat dim is cut in each segment."""
    if str(op.node.target) == "aten.view.dtype" or not op.outputs:
        return []
    options = []
    for number, (before, after) in enumerate(groups(op.shapes[0], op.outputs[0])):
        pair = _partners(op, before, after)
        if pair is not None:
            source, target, segments = pair
            options.append(Option(f"d{number}", (source,), (target,), segments=segments))
    return options + partial_options(op, [{0}])


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
        while (held := prod(before[dim] for dim in left)) != (
            wanted := prod(after[dim] for dim in right)
        ):
            side, rest = (left, sources) if held < wanted else (right, targets)
            if not rest:
                return found
            side.append(rest.pop(0))
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


def permutation(node: Node) -> list[int]:
    """For each dim of the result the dim of the input that it is."""
    rank = len(node.args[0].meta["val"].shape)  # type: ignore[union-attr]
    probe = torch.empty(tuple(range(SEPARATE, SEPARATE + rank)), device="meta")
    result = node.target(probe, *node.args[1:], **node.kwargs)  # type: ignore[operator]
    return [size - SEPARATE for size in result.shape]


@rule(PERMUTES)
def permute(op: Operation) -> list[Option]:
    labels = letters("d", len(op.shapes[0]))
    return labelled(
        op, [labels], [[labels[dim] for dim in permutation(op.node)]]
    ) + partial_options(op, [{0}])


@rule(EXPANDS)
def expand(op: Operation) -> list[Option]:
    """A dim that is expanded may be cut: every device repeats what it needs."""
    labels = letters("d", len(op.outputs[0]))
    own = labels[len(labels) - len(op.shapes[0]) :]
    return labelled(op, [own], [labels]) + partial_options(op, [{0}])


@rule(
    "slice narrow select unbind roll flip cumsum cumprod logcumsumexp sort argsort topk unfold "
    "diff select_scatter slice_scatter"
)
def along_dim(op: Operation) -> list[Option]:
    """Whole along the dims that are named; a slice of everything is no slice. The others
    run along.
    """
    shape = op.shapes[0]
    named = "dims" if "dims" in op._defaults else "dim"
    whole = set(dims_of(op, len(shape), "dimension" if op.name == "unfold" else named))
    if op.name == "slice" and shape == op.outputs[0]:
        whole = set()
    labels: list[Label] = [None if dim in whole else f"d{dim}" for dim in range(len(shape))]
    drops = op.name in ("select", "unbind")
    result = [label for dim, label in enumerate(labels) if not (drops and dim in whole)]
    if op.name == "unfold":
        result = [*labels, None]
    sources: list[Sequence[Label]] = [labels]
    if op.name in ("select_scatter", "slice_scatter"):
        part = [
            label
            for dim, label in enumerate(labels)
            if not (op.name == "select_scatter" and dim in whole)
        ]
        sources.append(part)
    if len(sources) != len(op.inputs):
        return []  # `diff` with something in front
    options = labelled(op, sources, [result] * len(op.outputs))
    linear = op.name in ("slice", "narrow", "select", "unbind", "roll", "flip", "cumsum", "diff")
    return options + (partial_options(op, [{0}]) if linear else [])


@rule(SPLITS)
def split(op: Operation) -> list[Option]:
    """Parts of one size can be cut alike: the whole dim is then cut in each of its segments."""
    shape = op.shapes[0]
    dim = dims_of(op, len(shape))[0] if op.argument("dim") is not None else 0
    labels: list[Label] = [None if place == dim else f"d{place}" for place in range(len(shape))]
    options = labelled(op, [labels], [labels] * len(op.outputs))
    sizes = {result[dim] for result in op.outputs}
    if len(sizes) == 1 and shape[dim] == sizes.pop() * len(op.outputs):
        number = len(op.outputs)
        options.append(
            Option(f"d{dim}", (dim,), (dim,) * number, segments=(number, *(1,) * number))
        )
    return options + partial_options(op, [{0}])


@rule("cat concat concatenate")
def join(op: Operation) -> list[Option]:
    """The other way round: parts of one size are the segments of the result."""
    dim = dims_of(op, len(op.outputs[0]))[0] if op.argument("dim") is not None else 0
    labels: list[Label] = [
        None if place == dim else f"d{place}" for place in range(len(op.outputs[0]))
    ]
    options = labelled(op, [labels] * len(op.inputs), [labels])
    number = len(op.inputs)
    if len({shape[dim] for shape in op.shapes}) == 1:
        options.append(
            Option(f"d{dim}", (dim,) * number, (dim,), segments=(*(1,) * number, number))
        )
    return options + partial_options(op, [set(range(number))])


@rule("stack")
def stack(op: Operation) -> list[Option]:
    rank = len(op.outputs[0])
    dim = int(op.argument("dim") or 0) % rank
    labels = letters("d", rank - 1)
    options = labelled(op, [labels] * len(op.inputs), [[*labels[:dim], None, *labels[dim:]]])
    return options + partial_options(op, [set(range(len(op.inputs)))])


@rule("repeat_interleave")
def repeat_interleave(op: Operation) -> list[Option]:
    """Entries are repeated one by one, so the dim itself can be cut too (keys for several query
    heads).
    """
    if len(op.inputs) != 1 or op.argument("dim") is None:
        return []
    labels = letters("d", len(op.shapes[0]))
    return labelled(op, [labels], [labels]) + partial_options(op, [{0}])


@rule("repeat tile")
def repeat(op: Operation) -> list[Option]:
    rank = len(op.outputs[0])
    own: Shape = (1,) * (rank - len(op.shapes[0])) + op.shapes[0]
    labels: list[Label] = [
        f"d{dim}" if own[dim] == size else None for dim, size in enumerate(op.outputs[0])
    ]
    return labelled(op, [labels[rank - len(op.shapes[0]) :]], [labels]) + partial_options(op, [{0}])


@rule("pad constant_pad_nd")
def pad(op: Operation) -> list[Option]:
    """Whole where something is added at an edge or taken away there. `pad` has two numbers for each
    dim, the last dim first.
    """
    edges = op.argument("pad")
    rank = len(op.outputs[0])
    alone = [
        all(edge == 0 for edge in edges[2 * place : 2 * place + 2])
        for place in reversed(range(rank))
    ]
    labels: list[Label] = [f"d{dim}" if unchanged else None for dim, unchanged in enumerate(alone)]
    return labelled(op, [labels], [labels])


@rule("index_select")
def index_select(op: Operation) -> list[Option]:
    dim = dims_of(op, len(op.shapes[0]))[0]
    labels: list[Label] = [
        None if place == dim else f"d{place}" for place in range(len(op.shapes[0]))
    ]
    picked = [*labels[:dim], "picked", *labels[dim + 1 :]]
    return labelled(op, op.named(self=labels, index=["picked"]), [picked])


@rule("index")
def index(op: Operation) -> list[Option]:
    """One tensor of indices: it is whole along the dim that is looked up, and its own dims run
    along. A mask has no rule.
    """
    indices = op.argument("indices")
    looked_up = [place for place, each in enumerate(indices) if each is not None]
    if len(looked_up) != 1 or indices[looked_up[0]].meta["val"].dtype == torch.bool:
        return []
    dim = looked_up[0]
    labels: list[Label] = [
        None if place == dim else f"d{place}" for place in range(len(op.shapes[0]))
    ]
    picked = letters("i", len(op.shapes[1]))
    return labelled(op, [labels, picked], [[*labels[:dim], *picked, *labels[dim + 1 :]]])


@rule("gather take_along_dim scatter scatter_add")
def gather(op: Operation) -> list[Option]:
    """Along the other dims each row has its own indices."""
    if len({len(shape) for shape in op.shapes}) > 1 or op.argument("dim") is None:
        return []
    dim = dims_of(op, len(op.shapes[0]))[0]
    alike = [
        len({shape[place] for shape in (*op.shapes, *op.outputs)}) == 1
        for place in range(len(op.shapes[0]))
    ]
    labels: list[Label] = [
        f"d{place}" if same and place != dim else None for place, same in enumerate(alike)
    ]
    return labelled(op, [labels] * len(op.inputs), [labels])


@rule("one_hot")
def one_hot(op: Operation) -> list[Option]:
    labels = letters("d", len(op.shapes[0]))
    return labelled(op, [labels], [[*labels, None]])
