"""All ways in which one operation can run along one mesh axis, read from its row of the table
(`whale/operations/row.py`).

An **option** says for one axis how all tensors of an operation lie along it: each is cut on one of
its dims, the same everywhere, or a partial sum.

1. one option for each letter of the row: cutting a letter cuts every tensor that has it; a tensor
   without it is the same everywhere; a result without it is a partial sum when the letter is summed
   over
2. one for each group of inputs in which the operation is linear: they are partial sums, and so are
   the results
3. an operation without letters: by samples, where the capture has shown that it treats samples one
   by one
4. always: whole on every device. An operation that has nothing else is listed in the plan
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from whale.capture.sample_states import PerSample, Shared, Size, Whole
from whale.dtypes import is_differentiable
from whale.operations.elementwise import keeps_precision
from whale.operations.operation import Operation
from whale.operations.row import PARTIAL, SAME, Dims, Row
from whale.operations.table import EXPANDS, NEW_LIKE, SPLITS, VIEWS, is_random, row_of

Placement = int | str
"""along one axis: the dim that is cut, SAME or PARTIAL"""
RESIZED = VIEWS | EXPANDS | SPLITS | NEW_LIKE
"""operations that get local sizes in `local.py` in place of those that they are given"""
TRAVEL = "travel"
"""name of the option that sends tokens to their experts"""
WHOLE = "whole"
"""name of the option that every operation has: all of it on every device"""


@dataclass(frozen=True)
class Option:
    """One way to run an operation along one axis."""

    name: str
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    local: str = ""
    """what runs instead of the operation itself: one of `emit.SPECIAL`, or for a mean the sum of
    the part, divided by the whole number
    """
    segments: tuple[int, ...] = ()
    """how many runs of the dim each input, then each output has in proportion to the others; () =
    all alike
    """
    apart: tuple[int, ...] = ()
    """inputs that are cut in granules of their own: experts, while the tokens are cut by samples"""

    @property
    def is_cut(self) -> bool:
        """Whether any tensor is cut."""
        return any(isinstance(placement, int) for placement in (*self.inputs, *self.outputs))


def options_of(op: Operation, states: Mapping[Node, Any]) -> tuple[Option, ...]:
    """Every option; `states`: where the samples are, from the walk in capture/samples.py."""
    row = row_of(op.node)
    found: list[Option] = []
    dims = row.dims(op) if row.dims is not None else None
    if dims is not None:
        found = _letter_options(op, dims)
        if op.name == "expert_mm":
            # the rows are cut as well, and travel to their experts and back
            found.append(Option(TRAVEL, (0, 0, 0), (0,), local="experts", apart=(1,)))
        found += _partial_options(op, row)
    if not any(option.is_cut for option in found):
        found += _by_samples(op, states)
    whole = Option(WHOLE, (SAME,) * len(op.inputs), (SAME,) * len(op.outputs))
    return (*found, whole)


def summa_options(op: Operation) -> list[Option]:
    """A linear layer whose output stays where it is computed (`lowering/sharded_linear.py`):
    columns of x and of the result, and rows of the weight, along x; rows of x and of the result,
    and columns of the weight, along y. These two go together, and with nothing else."""
    if op.name != "linear" or len(op.shapes[1]) != 2 or len(op.shapes[0]) < 2:
        return []
    last = len(op.shapes[0]) - 1
    bias = op.slot("bias") is not None
    options = [Option("summa columns", (last, 0, *([0] if bias else [])), (last,), "summa")]
    for dim in range(last):
        inputs: tuple[Placement, ...] = (dim, 1, SAME) if bias else (dim, 1)
        options.append(Option(f"summa rows {dim}", inputs, (dim,), "summa"))
    return options


def is_summa(name: str) -> bool:
    """Whether this is the name of an option of SUMMA."""
    return name.startswith("summa ")


def _letter_options(op: Operation, dims: Dims) -> list[Option]:
    """One option for each letter that can be cut; letters that stand in several segments come
    last.
    """
    letters: dict[str, None] = {}
    for labels in (*dims.inputs, *dims.outputs):
        for label in labels:
            if label is not None:
                letters[label] = None
    options = []
    for letter in sorted(letters, key=lambda each: each in dims.segments):
        placements = _cut(op, letter, dims)
        if placements is None:
            continue
        inputs, outputs = placements
        local = dims.local.get(letter, "")
        segments = dims.segments.get(letter, ())
        options.append(Option(letter, inputs, outputs, local, segments))
    return options


def _cut(
    op: Operation, letter: str, dims: Dims
) -> tuple[tuple[Placement, ...], tuple[Placement, ...]] | None:
    """Placements of inputs and outputs when this letter is cut; None when that cannot be."""
    shapes = [*op.shapes, *op.outputs]
    labels = [*dims.inputs, *dims.outputs]
    is_summed = letter in dims.sums
    without = PARTIAL if is_summed else dims.after.get(letter)
    cut_dims: list[list[int]] = []
    for shape, names in zip(shapes, labels, strict=True):
        own = [dim for dim, name in enumerate(names) if name == letter]
        # a dim of size 1 is broadcast: the same for all
        cut_dims.append([dim for dim in own if shape[dim] > 1])
    if not any(cut_dims) or any(len(own) > 1 for own in cut_dims):
        return None
    placements: list[Placement] = []
    for place, own in enumerate(cut_dims):
        if own:
            placements.append(own[0])
        elif place < len(op.inputs):
            # what is added to a partial sum must be a partial sum itself, or it is added repeatedly
            placements.append(PARTIAL if is_summed and place in dims.added else SAME)
        elif without is not None:
            placements.append(without)
        else:
            return None
    number = len(op.inputs)
    return tuple(placements[:number]), tuple(placements[number:])


def _partial_options(op: Operation, row: Row) -> list[Option]:
    """Options in which some inputs are partial sums, and so are the results."""
    if row.kind == "cast" and not keeps_precision(op):
        return []
    values = op.node.meta["val"]
    results = values if isinstance(values, list | tuple) else [values]
    sources = [source.meta["val"] for source in op.inputs]
    if any(map(is_differentiable, sources)) and not all(map(is_differentiable, results)):
        return []  # `x.sum(dtype=torch.int64)` rounds
    options = []
    for number, group in enumerate(row.linear(op)):
        inputs = tuple(PARTIAL if place in group else SAME for place in range(len(op.inputs)))
        options.append(Option(f"partial {number}", inputs, (PARTIAL,) * len(op.outputs)))
    return options


def _by_samples(op: Operation, states: Mapping[Node, Any]) -> list[Option]:
    """Samples stay apart from each other: each device runs its own. Values that count the samples
    (`arange(batch)`) would be wrong then, and so would arguments that hold the size of the whole
    batch."""
    if _is_given_a_size(op) and op.name not in RESIZED and not is_random(op.node):
        return []
    state = states.get(op.node)
    results = list(state) if isinstance(state, tuple) else [state] * len(op.outputs)
    if len(results) != len(op.outputs):
        return []
    found: list[tuple[Placement, int]] = []
    for each in (*(states.get(source) for source in op.inputs), *results):
        place = _sample_dim(each)
        if place is None:
            return []
        found.append(place)
    number = len(op.inputs)
    placements = tuple(placement for placement, _ in found)
    if not any(isinstance(placement, int) for placement in placements[number:]):
        return []
    segments = tuple(runs for _, runs in found)
    return [Option("samples", placements[:number], placements[number:], segments=segments)]


def _is_given_a_size(op: Operation) -> bool:
    """Whether an argument is a number that follows from the number of samples."""
    return any(
        isinstance(source.meta.get("val"), torch.SymInt | torch.SymFloat)
        for source in op.node.all_input_nodes
    )


def _sample_dim(state: Any) -> tuple[Placement, int] | None:
    """(dim of the samples or SAME, how often they repeat in it), or None where samples are mixed or
    counted.
    """
    if isinstance(state, PerSample):
        in_runs = isinstance(state.outer, int) and state.position is None
        return (state.dim, state.outer) if in_runs else None  # type: ignore[return-value]
    return (SAME, 1) if isinstance(state, Shared | Whole | Size) else None
