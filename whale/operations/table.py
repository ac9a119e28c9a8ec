"""Looks operations up in the table, and names the families that several packages ask for."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Node

# these modules register their rows when they are imported
from whale.operations import products, reductions, views  # noqa: F401
from whale.operations.elementwise import dropout, pointwise
from whale.operations.nodes import named_args, op_name
from whale.operations.row import TABLE, Row, add_rows, not_linear

# `whale profile` times a few operations; others are taken to need the time of one that works alike
add_rows("addmm mm einsum bilinear addbmm tensordot lstm gru rnn_tanh rnn_relu", timed_as="linear")
add_rows("bmm baddbmm _grouped_mm expert_mm mv dot", timed_as="matmul")
add_rows("conv1d conv3d conv_transpose1d conv_transpose2d conv_transpose3d", timed_as="conv2d")
add_rows("div where masked_fill dropout native_dropout", timed_as="mul")
add_rows(
    "neg clone _to_copy to type_as abs sign ge le gt lt eq ne hardtanh leaky_relu",
    timed_as="relu",
)
add_rows("erf exp log sigmoid silu softplus mish logsigmoid elu", timed_as="gelu")
add_rows("sin cos", timed_as="tanh")
add_rows("sqrt rsqrt reciprocal", timed_as="pow")
add_rows("log_softmax _safe_softmax logsumexp", timed_as="softmax")
add_rows("rms_norm group_norm native_layer_norm", timed_as="layer_norm")
add_rows("_native_batch_norm_legit native_batch_norm instance_norm", timed_as="batch_norm")
add_rows(
    "mean amax max min argmax var norm linalg_vector_norm avg_pool2d adaptive_avg_pool2d",
    timed_as="sum",
)
add_rows("max_pool2d_with_indices max_pool1d", timed_as="max_pool2d")
add_rows("nll_loss nll_loss_nd mse_loss l1_loss", timed_as="cross_entropy_loss")
add_rows("index gather index_select take_along_dim", timed_as="embedding")
add_rows("contiguous cat stack pad constant_pad_nd repeat roll flip", timed_as="transposed_copy")


def names_of_kind(*kinds: str) -> frozenset[str]:
    """Names of all operations of these kinds."""
    return frozenset(name for name, each in TABLE.items() if each.kind in kinds)


CASTS = names_of_kind("cast")
CASTS_IN_PLACE = frozenset({"to", "type_as"})
"""casts that hand back their input, and cost nothing, when the dtype stays; others always copy"""
VIEWS = names_of_kind("view")
PERMUTES = names_of_kind("permute")
EXPANDS = names_of_kind("expand")
SPLITS = names_of_kind("split")
CREATORS = names_of_kind("create")
NEW_LIKE = frozenset(name for name in CREATORS if name.startswith("new_"))
"""creators whose second argument is a size"""
COUNTERS = names_of_kind("count")
"""creators whose values say the position"""
HISTOGRAMS = names_of_kind("histogram")
GROUPED_PRODUCTS = names_of_kind("grouped product")
DROPOUTS = names_of_kind("dropout")
POOLINGS = names_of_kind("pool")
POINTWISE_LOSSES = names_of_kind("loss")
CLASS_LOSSES = names_of_kind("class loss")
AFFINE = frozenset(name for name, each in TABLE.items() if each.affine is not not_linear)
"""operations that may add something to a sum over the samples, which must count once"""
LAYERS = frozenset(name for name, each in TABLE.items() if each.layer)
FREE = frozenset(name for name, each in TABLE.items() if each.free)


def timed_as(name: str) -> str | None:
    """The measured operation whose time an operation is taken to need, where one does about the
    same to memory.
    """
    known = TABLE.get(name)
    return known.timed_as if known is not None else None


def row_of(node: Node) -> Row:
    """The row of a node's operation: elementwise where torch or the table says so, and an empty row
    for what is unknown.
    """
    name = op_name(node)
    known = TABLE.get(name, Row(name))
    if known.dims is None and is_pointwise(node):
        return replace(known, dims=pointwise)
    return known


def is_pointwise(node: Node) -> bool:
    """Whether a node treats every entry on its own, operands broadcast to one shape."""
    if isinstance(node.meta.get("val"), list | tuple):
        return False  # `torch.where(mask)` gives indices
    if torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return True
    known = TABLE.get(op_name(node))
    return known is not None and (known.kind == "pointwise" or known.dims is dropout)


def is_random(node: Node) -> bool:
    """Whether this node draws random numbers (dropout that is off does not)."""
    if node.op != "call_function":
        return False
    known = TABLE.get(op_name(node))
    if known is None or known.random is None:
        return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    probability, trains = known.random
    args = named_args(node)
    if probability is not None and not args.get(probability, 1.0):
        return False
    return trains is None or args.get(trains) is not False
