"""Rows of products, lookups in tables of weights, norms, attention and convolutions: where the work
and the weights are.

Letters: m rows, n columns of the weight, k what is summed over.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch.fx import Node

from whale.operations import flops
from whale.operations.nodes import trains_batch_norm
from whale.operations.operation import Label, Labels, Operation, letters
from whale.operations.row import (
    Dims,
    Groups,
    LinearRule,
    add_rows,
    dims,
    first_argument,
    in_each,
    in_first,
    needed_whole,
    none_of_them,
    row,
)

EVERY_PAIR = "`{name}` combines every sample with every other one"


def _factors(first: int, second: int, added: str) -> LinearRule:
    """A product is linear in each factor, together with what is added to it."""

    def groups(op: Operation) -> Groups:
        beside = op.slots.get(added, [])
        return [{first, *beside}, {second, *beside}]

    return groups


@row("linear", mixes=EVERY_PAIR, linear=_factors(0, 1, "bias"))
def linear(op: Operation) -> Dims | None:
    """x [..., k], weight [n, k], bias [n]. Cut n: column-parallel. Cut k: row-parallel, and the
    bias is added once.
    """
    if len(op.shapes[1]) != 2:
        return None
    rows = letters("m", len(op.shapes[0]) - 1)
    inputs = op.named(input=[*rows, "k"], weight=["n", "k"], bias=["n"])
    return dims(inputs, [[*rows, "n"]], sums={"k"}, added={op.slot("bias")})


@row("addmm addmv", mixes=EVERY_PAIR, linear=_factors(1, 2, "self"))
def addmm(op: Operation) -> Dims | None:
    """An input that is added once, and a product."""
    right: list[Label] = ["k", "n"] if op.name == "addmm" else ["k"]
    result: list[Label] = ["m", "n"] if op.name == "addmm" else ["m"]
    own = result[len(result) - len(op.shapes[0]) :]
    return dims([own, ["m", "k"], right], [result], sums={"k"}, added={0})


@row("mm bmm matmul mv dot inner", mixes=EVERY_PAIR, linear=in_each)
def matmul(op: Operation) -> Dims | None:
    """Two matrices, vectors or batches of matrices; leading dims are matched from the right."""
    left, right = op.shapes
    if op.name == "inner" and (len(left) > 1 or len(right) > 1):
        return None
    outer = max(len(left), len(right), 2) - 2
    batch = letters("b", outer)
    first: list[Label] = ["k"]
    second: list[Label] = ["k"]
    result: list[Label] = [*batch]
    if len(left) > 1:
        first = [*batch[outer - len(left) + 2 :], "m", "k"]
        result.append("m")
    if len(right) > 1:
        second = [*batch[outer - len(right) + 2 :], "k", "n"]
        result.append("n")
    return dims([first, second], [result], sums={"k"})


@row("baddbmm", mixes=EVERY_PAIR, linear=_factors(1, 2, "self"))
def baddbmm(op: Operation) -> Dims | None:
    """An input that is added once, and a batch of products."""
    result: list[Label] = ["b", "m", "n"]
    own = result[3 - len(op.shapes[0]) :]
    inputs: list[Labels] = [own, ["b", "m", "k"], ["b", "k", "n"]]
    return dims(inputs, [result], sums={"k"}, added={0})


@row("addbmm", mixes=EVERY_PAIR, linear=_factors(1, 2, "self"))
def addbmm(op: Operation) -> Dims | None:
    """An input that is added once, and the sum over a batch of products."""
    result: list[Label] = ["m", "n"]
    own = result[2 - len(op.shapes[0]) :]
    inputs: list[Labels] = [own, ["b", "m", "k"], ["b", "k", "n"]]
    return dims(inputs, [result], sums={"b", "k"}, added={0})


@row(
    "einsum",
    mixes="`{name}` ({equation}) combines every sample with every other one",
    linear=in_each,
)
def einsum(op: Operation) -> Dims | None:
    """Every letter of the equation, as it stands there. Dims under `...` are counted from the
    right.
    """
    equation = str(op.argument("equation"))
    inputs, result = flops.einsum_labels(equation, [len(shape) for shape in op.shapes])
    # a letter that stands twice in one operand takes a diagonal, which needs it whole
    twice: set[str] = set()
    for term in inputs:
        twice.update(letter for letter in term if term.count(letter) > 1)
    sums = set().union(*inputs) - set(result) - twice
    labels = [_without(twice, term) for term in (*inputs, result)]
    return dims(labels[:-1], labels[-1:], sums=sums)


def _without(whole: set[str], names: list[str]) -> list[Label]:
    """The labels, those in `whole` replaced by None."""
    return [None if name in whole else name for name in names]


@row(
    "cross linalg_cross",
    linear=in_each,
    mixes="`{name}` works across the samples: its dim is the batch, or would be where there are 3 "
    "of them. Try: dim=-1",
)
def cross(op: Operation) -> Dims | None:
    """Whole along the dim of three entries. `cross` without a dim takes the first of that size: a
    part of a dim before it could have three entries, too.
    """
    shape = op.outputs[0]
    given = op.argument("dim")
    if given is None:
        whole = range(shape.index(3) + 1)
    else:
        whole = range(int(given) % len(shape), int(given) % len(shape) + 1)
    labels = letters("d", len(shape), whole)
    return dims([labels] * len(op.inputs), [labels])


@row(
    "_grouped_mm grouped_mm grouped_mm_fallback",
    kind="grouped product",
    linear=in_first,
    samples="by shape",  # the letters need the tokens of all experts, but each is one sample's
)
def grouped_mm(op: Operation) -> Dims | None:
    """Rows sorted by expert, [rows, k], times the matrix of their expert, [experts, k, n]. Cut by
    experts, every device does the rows of its own and gives zeros for the others."""
    if [len(shape) for shape in op.shapes] != [2, 3, 1] or op.argument("out_dtype") is not None:
        return None
    inputs: list[Labels] = [[None, "k"], ["experts", "k", "n"], [None]]
    local = dict.fromkeys(("experts", "k", "n"), "experts")
    return dims(inputs, [[None, "n"]], sums={"experts", "k"}, local=local)


def _rows_and_matrices(op: Operation) -> Groups:
    return [{0}, {1}]


@row(
    "expert_mm",
    mixes="rows and the numbers of their experts belong to different samples",
    linear=_rows_and_matrices,
)
def expert_mm(op: Operation) -> Dims | None:
    """Each row with the matrix of its own expert (capture/experts.py). Cut by experts, every device
    has all rows and gives zeros for those of other experts (the rows may also travel to their
    experts and back: `sharding/options.py`)."""
    matrix = ["n", "k"] if op.argument("transposed") else ["k", "n"]
    inputs: list[Labels] = [["m", "k"], ["experts", *matrix], ["m"]]
    return dims(inputs, [["m", "n"]], sums={"experts", "k"}, local={"experts": "experts"})


@row(
    "embedding",
    mixes="the table of `embedding` depends on the samples, or its `scale_grad_by_freq` divides "
    "gradients by how often a token stands in the whole mini-batch",
    linear=in_first,
    lookup=True,
)
def embedding(op: Operation) -> Dims | None:
    """Cut by vocabulary, every device looks up the words that it has and gives zeros for the
    others. `scale_grad_by_freq` counts the words of the whole mini-batch in the backward.
    """
    if op.argument("scale_grad_by_freq"):
        return needed_whole(op)
    words = letters("m", len(op.shapes[1]))
    inputs = op.named(weight=["v", "h"], indices=words)
    return dims(inputs, [[*words, "h"]], sums={"v"}, local={"v": "embedding"})


@row(
    "layer_norm native_layer_norm rms_norm _fused_rms_norm",
    mixes="`{name}` normalises over the samples",
    backward_passes=5,  # gradients of the input (3) and of its weights (2) are two kernels
)
def layer_norm(op: Operation) -> Dims | None:
    """One normalised dim may be cut: sums of each row are exchanged."""
    width = len(op.argument("normalized_shape"))
    rows = letters("m", len(op.shapes[0]) - width)
    can_cut = width == 1 and op.name in ("layer_norm", "rms_norm")
    inner: list[Label] = ["h0"] if can_cut else [None] * width
    statistics: Labels = [*rows, *([None] * width)]
    results: list[Labels] = [[*rows, *inner], *([statistics] * (len(op.outputs) - 1))]
    inputs = op.named(input=[*rows, *inner], weight=inner, bias=inner)
    return dims(inputs, results, local={"h0": "norm"})


@row(
    "scaled_dot_product_attention",
    mixes="attention goes across the samples: the batch is not one of its leading dims",
)
def attention(op: Operation) -> Dims | None:
    """Heads and samples are apart from each other. Fewer key heads: each serves a run of query
    heads, so the runs are cut. Without a causal mask of its own the queries are apart as well."""
    rank = len(op.outputs[0])
    outer = [f"b{dim}" if dim < rank - 3 else "heads" for dim in range(rank - 2)]
    queries: Label = None if op.argument("is_causal") else "queries"
    result: Labels = [*outer, queries, None]
    keys: Labels = [*outer, None, None]
    mask = result[-len(op.shape("attn_mask") or ()) :]
    inputs = op.named(query=result, key=keys, value=keys, attn_mask=mask)
    return dims(inputs, [result])


NOT_FIRST = "the batch of `{name}` is not dim 0 of its input"


@row("conv1d conv2d conv3d", mixes=NOT_FIRST, batch_first=1)
def convolution(op: Operation) -> Dims | None:
    """Samples are apart; in one group output channels (n) and input channels (k) may be cut too."""
    if len(op.shapes[0]) != len(op.shapes[1]):
        return None
    window = [None] * (len(op.shapes[1]) - 2)
    is_one_group = op.argument("groups") == 1
    inner: Label = "k" if is_one_group else None
    outer: Label = "n" if is_one_group else None
    inputs = op.named(input=["m", inner, *window], weight=[outer, inner, *window], bias=[outer])
    return dims(inputs, [["m", outer, *window]], sums={"k"}, added={op.slot("bias")})


@row("batch_norm", backward_passes=5)  # sums of the gradient and of its product, then the input's
def batch_norm(op: Operation) -> Dims | None:
    """When it trains, sums over the samples are exchanged; otherwise channels are apart as well."""
    training = trains_batch_norm(op.node)
    channel: Label = None if training else "c"
    whole: Labels = ["m", channel, *([None] * (len(op.shapes[0]) - 2))]
    statistics: Labels = [channel]
    inputs = op.named(
        input=whole,
        weight=statistics,
        bias=statistics,
        running_mean=statistics,
        running_var=statistics,
    )
    return dims(inputs, [whole], local={"m": "batch norm"} if training else None)


add_rows(
    "batch_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional "
    "cudnn_batch_norm",
    samples="batch norm",
)
add_rows("batch_norm", statistics="training")
add_rows("instance_norm", statistics="use_input_stats")


@row(
    "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d "
    "adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d "
    "adaptive_max_pool3d max_pool2d_with_indices upsample_nearest2d upsample_bilinear2d",
    kind="pool",
    mixes=NOT_FIRST,
    batch_first=1,
)
def pooling(op: Operation) -> Dims | None:
    """Samples and channels are apart from each other."""
    space = next(int(letter) for letter in op.name if letter.isdigit())
    if len(op.shapes[0]) != space + 2:
        return None
    labels: list[Label] = ["m", "c", *([None] * space)]
    return dims([labels], [labels] * len(op.outputs))


@row("group_norm instance_norm", mixes=NOT_FIRST, batch_first=1)
def group_norm(op: Operation) -> Dims | None:
    """Samples are apart; a norm that keeps running statistics is left whole."""
    if op.name == "instance_norm" and op.argument("running_mean") is not None:
        return None
    labels: list[Label] = ["m", *([None] * (len(op.shapes[0]) - 1))]
    weights: list[Labels] = [[None] * len(shape) for shape in op.shapes[1:]]
    return dims([labels, *weights], [labels])


add_rows(
    "convolution _convolution _convolution_mode conv_transpose1d conv_transpose2d "
    "conv_transpose3d native_group_norm im2col col2im pixel_shuffle pixel_unshuffle "
    "fractional_max_pool2d fractional_max_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d "
    "max_pool1d_with_indices max_pool3d_with_indices",
    batch_first=1,
)
add_rows(
    "upsample_nearest1d upsample_nearest3d upsample_linear1d upsample_bicubic2d "
    "upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    batch_first=1,
)
add_rows("max_unpool2d max_unpool3d", batch_first=2)  # with the places of the maxima
add_rows("grid_sampler grid_sampler_2d grid_sampler_3d", batch_first=2)  # with the grid


# --------------------------------------------------------------------------------------------------
# work

add_rows(
    "linear addmm mm bmm matmul baddbmm einsum embedding _grouped_mm grouped_mm_fallback expert_mm",
    weighted=True,
)
add_rows("linear", flop=flops.linear)
add_rows("matmul mv dot inner expert_mm", flop=flops.matmul)
add_rows("addmv addbmm", flop=flops.added_matmul)
add_rows("bilinear", flop=flops.bilinear)
add_rows("_grouped_mm grouped_mm_fallback", flop=flops.grouped_matmul)
add_rows("tensordot", flop=flops.tensordot)
add_rows("einsum", flop=flops.einsum)
# the gradient that goes out, and copies of its input and of that one, laid out as it likes
add_rows("conv1d conv2d conv3d", flop=flops.convolution, backward_copies=3)
add_rows(
    "conv_transpose1d conv_transpose2d conv_transpose3d",
    flop=flops.transposed_convolution,
    backward_copies=3,
    timed_as="conv2d",
)
add_rows("scaled_dot_product_attention", flop=flops.attention, random=("dropout_p", None))
add_rows(
    "lstm gru rnn_tanh rnn_relu",
    flop=flops.recurrent,
    random=("dropout", "train"),
    samples="recurrent",
    timed_as="linear",
)

# products of two factors; of a layer the second one is a weight
add_rows("linear mm matmul conv1d conv2d conv3d", factors=(0, 1), layer=True)
add_rows("addmm", factors=(1, 2), layer=True)
add_rows("bmm mv conv_transpose1d conv_transpose2d conv_transpose3d", factors=(0, 1))
add_rows("addmv addbmm baddbmm", factors=(1, 2))


def _bias(node: Node) -> Collection[Any]:
    return node.args[2:3]


def _only_operand(node: Node) -> Collection[Any]:
    """The operand of an einsum that multiplies nothing: it transposes one tensor, or sums it."""
    operands: Any = node.args[1]
    return operands if len(operands) == 1 else ()


add_rows("mm matmul bmm embedding embedding_bag", passes_gradient_to=none_of_them)
add_rows("conv1d conv2d conv3d", passes_gradient_to=none_of_them)
add_rows("_grouped_mm grouped_mm grouped_mm_fallback", passes_gradient_to=none_of_them)
add_rows(
    "layer_norm rms_norm group_norm batch_norm instance_norm",
    passes_gradient_to=none_of_them,
)
add_rows("linear", passes_gradient_to=_bias)
add_rows("addmm", passes_gradient_to=first_argument)
add_rows("einsum", passes_gradient_to=_only_operand)

add_rows("addmm mm einsum bilinear addbmm tensordot", timed_as="linear")
add_rows("bmm baddbmm _grouped_mm expert_mm mv dot", timed_as="matmul")
add_rows("conv1d conv3d", timed_as="conv2d")
add_rows("rms_norm group_norm native_layer_norm", timed_as="layer_norm")
add_rows("_native_batch_norm_legit native_batch_norm instance_norm", timed_as="batch_norm")
add_rows("avg_pool2d adaptive_avg_pool2d", timed_as="sum")
add_rows("max_pool2d_with_indices max_pool1d", timed_as="max_pool2d")
