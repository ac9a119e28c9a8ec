"""A row of the table: what Whale knows of an operation beyond what torch says itself.

A row names the dims of an operation's tensors as an einsum does (`Dims`): dims with the same letter
run along each other. Everything that asks "what happens if this dim is cut" reads these letters:

    cut along a letter                   samples of the batch           devices of a mesh axis
    ---------------------------------    ---------------------------    ----------------------
    a tensor that has the letter         PerSample                      Shard
    a tensor without it                  Shared                         Replicate
    a result, the letter is summed over  Summed                         Partial

`capture/sample_rules.py` reads the middle column, `sharding/options.py` the right one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import Node

from whale.operations.flops import Formula
from whale.operations.operation import Labels, Operation

SAME = "same"
PARTIAL = "partial"


@dataclass(frozen=True)
class Dims:
    """How the dims of one call's tensors run along each other."""

    inputs: tuple[Labels, ...]
    """labels of the dims of each input tensor; None: the operation needs this dim whole"""
    outputs: tuple[Labels, ...]
    sums: frozenset[str] = frozenset()
    """letters that results are summed over: with such a letter cut they are partial sums"""
    added: frozenset[int] = frozenset()
    """inputs that are added to the sum, so only once"""
    local: Mapping[str, str] = field(default_factory=dict)
    """letter -> what runs instead of the operation when the letter is cut; most of these exchange
    numbers between the parts (maxima and sums of a softmax), some divide (`mean`)"""
    after: Mapping[str, str] = field(default_factory=dict)
    """letter -> SAME or PARTIAL: how a result without this letter lies when a `local` form runs"""
    segments: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """letter -> how many runs of it each input, then each output has in its dim, in proportion to
    the others: [q k v] has three for one of its parts"""


def dims(
    inputs: Collection[Labels],
    outputs: Collection[Labels],
    *,
    sums: Collection[Any] = (),
    added: Collection[int | None] = (),
    local: Mapping[str, str] | None = None,
    after: Mapping[str, str] | None = None,
) -> Dims:
    """`Dims` from any collections; a None in `added` stands for an argument that is not there."""
    return Dims(
        tuple(inputs),
        tuple(outputs),
        frozenset(sums),
        frozenset(place for place in added if place is not None),
        local or {},
        after or {},
    )


def needed_whole(op: Operation) -> Dims:
    """Every tensor is needed whole."""
    return dims(op.named(), [(None,) * len(shape) for shape in op.outputs])


Groups = list[set[int]]
"""groups of input tensors; an operation is linear in each group as a whole, others held fixed"""
LinearRule = Callable[[Operation], Groups]
DimsRule = Callable[[Operation], Dims | None]


def not_linear(op: Operation) -> Groups:
    """No input."""
    return []


def in_first(op: Operation) -> Groups:
    """Linear in the first tensor."""
    return [{0}]


def in_each(op: Operation) -> Groups:
    """Linear in every tensor for itself, as a product is."""
    return [{place} for place in range(len(op.inputs))]


def in_all(op: Operation) -> Groups:
    """Linear in all tensors together, as a sum or a concatenation is."""
    return [set(range(len(op.inputs)))]


ArgumentsRule = Callable[[Node], Collection[Any]]
"""some of the arguments of a call"""


def none_of_them(node: Node) -> Collection[Any]:
    """No argument."""
    return ()


def first_argument(node: Node) -> Collection[Any]:
    """The first argument."""
    return node.args[:1]


@dataclass(frozen=True)
class Row:
    """What is known of one operation."""

    name: str
    dims: DimsRule | None = None
    """labels of one call; None, or a result of None: not known, go by the batch's symbol"""
    linear: LinearRule = not_linear
    """groups of inputs in which the operation is linear"""
    affine: LinearRule = not_linear
    """groups of inputs of which any part may be a sum: what stands beside it is added, and the
    rewriting of the loss counts that once (`capture/losses.py`)"""
    mixes: str = "`{name}` works across the samples: its dim is the batch"
    """what the user reads when the samples stand in a dim that the operation needs whole; `{name}`
    is that of the operation, `{equation}` that of an einsum"""
    kind: str = ""
    """family that readers treat alike: `pointwise` where torch has no tag for it, `cast`, `view`
    (reshapes), `permute`, `expand`, `split`, `create`, `count`, `histogram`, `grouped product`,
    `pool`, `loss`, `class loss`"""
    moves: bool = False
    """entries are moved or repeated, never changed"""
    batch_first: int = 0
    """number of leading tensors whose dim 0 is the batch where they hold samples, none of the
    others holds any; 0: the batch may be any dim
    """
    samples: str = ""
    """rule of the walk over the samples for what the letters do not say, by its name in `RULES` of
    `capture/samples.py`; none: the letters say all"""
    reads_position: bool = False
    """a rule of the walk over the samples knows what becomes of the position of a sample in the
    batch (`arange(batch)`); other operations must not use it, unless they only move it"""
    returns: str = ""
    """when the result is the first argument itself, no view and no copy of it: `always`, `real`
    (for real numbers), `same shape`, `same format` (dtype, device, strides), `same memory`, `off`
    (a dropout that is); none: never"""
    equals: str = ""
    """when the result, a view or a copy, has the values of the first argument: `always`,
    `same shape`, `no gradient` (where none flows); none: as `returns` says"""
    joined_along: int | None = None
    """another name of `cat`, along this dim of tensors that have it"""
    reads_strides: bool = False
    """fails on other strides than those of the eager model"""
    statistics: str | None = None
    """running statistics are written if this argument is true, though the schema does not say so"""
    free: bool = False
    """costs nothing: a view of its input (`reshape` and `flatten` sometimes copy, and are counted
    as if they never did)"""
    lookup: bool = False
    """reads of its first tensor as many bytes as it writes"""
    flop: Formula | None = None
    """FLOP of the forward; None: those of torch's own counter, or none"""
    backward_passes: float | None = None
    """bytes that the backward moves for each operand with a gradient, in units of the result's;
    None: not known, twice what the forward moves"""
    backward_copies: int | None = None
    """tensors of the size of its largest that the backward holds beside the gradient that comes in;
    None: one gradient that goes out"""
    factors: tuple[int, int] | None = None
    """places of the two arguments of a product, each of whose gradients is such a product"""
    passes_gradient_to: ArgumentsRule | None = None
    """arguments that get the gradient of the result itself or a view of it where they have as many
    entries; the gradients of all others lie in new memory. None: not known, may be all"""
    layer: bool = False
    """the split backward puts off the gradient of the second factor, the weight; the first one is
    saved until then"""
    timed_as: str | None = None
    """operation whose time it is taken to need, of the few that `whale profile` measures
    (`costs/measured.py`); None: its own, or that of moving bytes"""
    weighted: bool = False
    """a product whose weights the axes x and y of a grid cut"""
    random: tuple[str | None, str | None] | None = None
    """draws random numbers if the first argument (a probability) is above zero and the second one
    (whether the model trains) is true, None in place of either: always; no pair at all: as torch
    tags the operation"""


TABLE: dict[str, Row] = {}
"""rows by the name of the operation (`op_name`); filled by the modules of this package"""


def row(names: str, **facts: Any) -> Callable[[DimsRule], DimsRule]:
    """Registers rows for these names, separated by blanks; the decorated function gives their
    dims.
    """

    def register(rule: DimsRule) -> DimsRule:
        add_rows(names, dims=rule, **facts)
        return rule

    return register


def add_rows(names: str, **facts: Any) -> None:
    """Adds rows, or facts to rows that are there."""
    for name in names.split():
        TABLE[name] = replace(TABLE.get(name, Row(name)), **facts)
