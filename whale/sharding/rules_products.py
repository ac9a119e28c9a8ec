"""Rules of products, lookups, norms, attention and convolutions: where the work and the weights
are.

Letters: m rows, n columns of the weight, k what is summed over.
"""

from __future__ import annotations

from collections.abc import Sequence

from whale.capture.kinds import trains_batch_norm
from whale.sharding.operation import (
    SAME,
    Label,
    Operation,
    Option,
    labelled,
    letters,
    partial_options,
    rule,
)


@rule("linear")
def linear(op: Operation) -> list[Option]:
    """x [..., k], weight [n, k], bias [n]. Cut n: column-parallel. Cut k: row-parallel, and the
    bias is added once.
    """
    if len(op.shapes[1]) != 2:
        return []
    rows = letters("m", len(op.shapes[0]) - 1)
    inputs = op.named(input=[*rows, "k"], weight=["n", "k"], bias=["n"])
    return _product(op, inputs, [*rows, "n"], added=op.slot("bias"), factors=(0, 1))


def summa_options(op: Operation) -> list[Option]:
    """A linear layer whose output stays where it is computed (`lowering/summa.py`): columns of x
    and of the result, and rows of the weight, along x; rows of x and of the result, and columns of
    the weight, along y. These two go together, and with nothing else."""
    if op.name != "linear" or len(op.shapes[1]) != 2 or len(op.shapes[0]) < 2:
        return []
    last = len(op.shapes[0]) - 1
    bias = op.slot("bias") is not None
    columns = Option("summa columns", (last, 0, *([0] if bias else [])), (last,), "summa")
    rows = [
        Option(f"summa rows {dim}", (dim, 1, *([SAME] if bias else [])), (dim,), "summa")
        for dim in range(last)
    ]
    return [columns, *rows]


@rule("addmm addmv")
def addmm(op: Operation) -> list[Option]:
    """An input that is added once, and a product."""
    right: list[Label] = ["k", "n"] if op.name == "addmm" else ["k"]
    result: list[Label] = ["m", "n"] if op.name == "addmm" else ["m"]
    own = result[len(result) - len(op.shapes[0]) :]
    return _product(op, [own, ["m", "k"], right], result, added=0, factors=(1, 2))


@rule("mm bmm matmul mv dot inner")
def matmul(op: Operation) -> list[Option]:
    left, right = op.shapes
    if op.name == "inner" and (len(left) > 1 or len(right) > 1):
        return []
    outer = max(len(left), len(right), 2) - 2
    batch = letters("b", outer)
    first: list[Label] = ["k"] if len(left) == 1 else [*batch[outer - len(left) + 2 :], "m", "k"]
    second: list[Label] = ["k"] if len(right) == 1 else [*batch[outer - len(right) + 2 :], "k", "n"]
    result: list[Label] = [
        *batch,
        *(["m"] if len(left) > 1 else []),
        *(["n"] if len(right) > 1 else []),
    ]
    return _product(op, [first, second], result, factors=(0, 1))


@rule("baddbmm")
def baddbmm(op: Operation) -> list[Option]:
    result: list[Label] = ["b", "m", "n"]
    inputs = op.named(
        self=result[3 - len(op.shapes[0]) :], batch1=["b", "m", "k"], batch2=["b", "k", "n"]
    )
    return _product(op, inputs, result, added=0, factors=(1, 2))


@rule("einsum")
def einsum(op: Operation) -> list[Option]:
    """Every letter of the equation, as it stands there. Dims under `...` are counted from the
    right.
    """
    equation = str(op.argument("equation")).replace(" ", "")
    left, _, right = equation.partition("->")
    terms = left.split(",")
    if "->" not in equation:
        once = sorted(letter for letter in set(left) - set(",.") if left.count(letter) == 1)
        right = ("..." if "..." in left else "") + "".join(once)
    widest = max(
        len(shape) - len(term.replace("...", ""))
        for term, shape in zip(terms, op.shapes, strict=True)
    )
    inputs = [
        _spelt(term, len(shape), widest) for term, shape in zip(terms, op.shapes, strict=True)
    ]
    result = _spelt(right, len(op.outputs[0]), widest)
    sums = {
        letter for term in inputs for letter in term if letter is not None and letter not in result
    }
    options = labelled(op, inputs, [result], sums=sums)
    return options + partial_options(op, [{place} for place in range(len(op.inputs))])


def _spelt(term: str, rank: int, widest: int) -> list[Label]:
    before, dots, after = term.partition("...")
    hidden = rank - len(before) - len(after) if dots else 0
    return [*before, *(f"{widest - place}" for place in range(hidden, 0, -1)), *after]


def _product(
    op: Operation,
    inputs: Sequence[Sequence[Label]],
    result: Sequence[Label],
    *,
    added: int | None = None,
    factors: tuple[int, int],
) -> list[Option]:
    options = labelled(op, inputs, [result], sums={"k"}, added={added})
    return options + partial_options(op, [{factors[0], added}, {factors[1], added}])


TRAVEL = "travel"
"""name of the option that sends tokens to their experts"""


@rule("_grouped_mm grouped_mm grouped_mm_fallback")
def grouped_mm(op: Operation) -> list[Option]:
    """Rows sorted by expert, [rows, k], times the matrix of their expert, [experts, k, n]. Cut by
    experts, every device does the rows of its own and gives zeros for the others."""
    if [len(shape) for shape in op.shapes] != [2, 3, 1] or op.argument("out_dtype") is not None:
        return []
    inputs: list[Sequence[Label]] = [[None, "k"], ["experts", "k", "n"], [None]]
    local = dict.fromkeys(("experts", "k", "n"), "experts")
    return labelled(
        op, inputs, [[None, "n"]], sums={"experts", "k"}, local=local
    ) + partial_options(op, [{0}])


@rule("expert_mm")
def expert_mm(op: Operation) -> list[Option]:
    """Each row with the matrix of its own expert (capture/experts.py). Cut by experts, either every
    device has all rows and gives zeros for those of other experts, or the rows are cut as well and
    travel to their experts and back."""
    matrix = ["n", "k"] if op.argument("transposed") else ["k", "n"]
    inputs: list[Sequence[Label]] = [["m", "k"], ["experts", *matrix], ["m"]]
    options = labelled(
        op, inputs, [["m", "n"]], sums={"experts", "k"}, local={"experts": "experts"}
    )
    travel = Option(TRAVEL, (0, 0, 0), (0,), local="experts", apart=(1,))
    return [*options, travel, *partial_options(op, [{0}, {1}])]


@rule("embedding")
def embedding(op: Operation) -> list[Option]:
    """Cut by vocabulary, every device looks up the words that it has and gives zeros for the
    others.
    """
    words = letters("m", len(op.shapes[1]))
    options = labelled(
        op,
        op.named(weight=["v", "h"], indices=words),
        [[*words, "h"]],
        sums={"v"},
        local={"v": "embedding"},
    )
    if op.argument("scale_grad_by_freq"):
        return []
    return options + partial_options(op, [{0}])


@rule("layer_norm native_layer_norm rms_norm _fused_rms_norm")
def layer_norm(op: Operation) -> list[Option]:
    """The normalised dims may be cut: sums of each row are exchanged."""
    shape = op.shapes[0]
    width = len(op.argument("normalized_shape"))
    rows = letters("m", len(shape) - width)
    inner = [f"h{dim}" for dim in range(width)]
    whole: Sequence[Label] = [*rows, *inner]
    statistics: Sequence[Label] = [*rows, *([None] * width)]
    results = [whole] + [statistics] * (len(op.outputs) - 1)
    options = labelled(
        op,
        op.named(input=whole, weight=inner, bias=inner),
        results,
        local=dict.fromkeys(inner, "norm"),
    )
    can_cut = width == 1 and op.name in ("layer_norm", "rms_norm")
    return [option for option in options if can_cut or option.name not in inner]


@rule("scaled_dot_product_attention")
def attention(op: Operation) -> list[Option]:
    """Heads and samples are apart from each other. Fewer key heads: each serves a run of query
    heads, so the runs are cut. Without a causal mask of its own the queries are apart as well."""
    rank = len(op.outputs[0])
    outer = [f"b{dim}" if dim < rank - 3 else "heads" for dim in range(rank - 2)]
    queries: Label = None if op.argument("is_causal") else "queries"
    inputs = op.named(
        query=[*outer, queries, None],
        key=[*outer, None, None],
        value=[*outer, None, None],
        attn_mask=[*outer, queries, None][-len(op.shape("attn_mask") or ()) :],
    )
    if op.slot("attn_mask") is None:
        inputs = inputs[:3]
    return labelled(op, inputs, [[*outer, queries, None]])


@rule("conv1d conv2d conv3d")
def convolution(op: Operation) -> list[Option]:
    """By samples; in one group also by output channels (n) and by input channels (k)."""
    window = [None] * (len(op.shapes[1]) - 2)
    if len(op.shapes[0]) != len(op.shapes[1]):
        return []
    is_one_group = op.argument("groups") == 1
    inner, outer = ("k", "n") if is_one_group else (None, None)
    inputs = op.named(input=["m", inner, *window], weight=[outer, inner, *window], bias=[outer])
    return labelled(op, inputs, [["m", outer, *window]], sums={"k"}, added={op.slot("bias")})


@rule("batch_norm")
def batch_norm(op: Operation) -> list[Option]:
    """By channels, with its statistics; by samples, whose sums are exchanged when it trains."""
    space = [None] * (len(op.shapes[0]) - 2)
    channel: Sequence[Label] = ["c"]
    inputs = op.named(
        input=["m", "c", *space],
        weight=channel,
        bias=channel,
        running_mean=channel,
        running_var=channel,
    )
    training = trains_batch_norm(op.node)
    options = labelled(
        op, inputs, [["m", "c", *space]], local={"m": "batch norm"} if training else None
    )
    return [option for option in options if option.name == "m" or not training]


POOLINGS = (
    "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d "
    "adaptive_avg_pool2d adaptive_avg_pool3d"
    " adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d max_pool2d_with_indices "
    "upsample_nearest2d upsample_bilinear2d"
)


@rule(POOLINGS)
def pooling(op: Operation) -> list[Option]:
    """Samples and channels are apart from each other."""
    space = next(int(letter) for letter in op.name if letter.isdigit())
    if len(op.shapes[0]) != space + 2:
        return []
    labels: list[Label] = ["m", "c", *([None] * space)]
    return labelled(op, [labels], [labels] * len(op.outputs))


@rule("group_norm instance_norm")
def group_norm(op: Operation) -> list[Option]:
    if op.name == "instance_norm" and op.argument("running_mean") is not None:
        return []
    labels: list[Label] = ["m", *([None] * (len(op.shapes[0]) - 1))]
    inputs: list[Sequence[Label]] = [labels, *([None] * len(shape) for shape in op.shapes[1:])]
    return labelled(op, inputs, [labels])
