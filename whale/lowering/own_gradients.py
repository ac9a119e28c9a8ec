"""Parameters whose gradient may lie in the memory of another gradient.

    x + a[None] + b[None]        a.grad and b.grad are the same memory

Autograd hands the gradient of a sum on to all that was added, and through `[None]` as a view of it.
Nothing else refers to these views, so torch takes each for the gradient itself. What changes one in
place, a second micro-batch or a clip, then changes the other as well. Such parameters get gradients
in memory of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from torch import Tensor
from torch.fx import Graph, Node

from whale.operations.nodes import op_name
from whale.operations.table import GROUPED_PRODUCTS, LAYERS, PERMUTES, SPLITS, VIEWS

NORMS = {"layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm"}
PRODUCTS = {"mul", "bmm", "einsum", "embedding", "embedding_bag"}
FRESH = LAYERS | GROUPED_PRODUCTS | NORMS | PRODUCTS
"""operations that compute the gradients of what they read into new memory"""
ONE_SOURCE = VIEWS | PERMUTES | SPLITS | {"getitem", "select", "slice", "unbind"}
"""operations whose gradient has as much memory to itself as that of their result"""
SUMS = {"add", "sub"}
"""operations that reduce a gradient to new memory for what they broadcast"""


def may_share_gradients(graph: Graph) -> frozenset[str]:
    """Names of these parameters. Of an operation that is not known, all that it reads."""
    reads = (node for node in graph.nodes if node.op == "get_attr")
    return frozenset(str(node.target) for node in reads if _may_share(node))


def _may_share(value: Node) -> bool:
    """Whether the gradient of a value may lie in memory that another gradient lies in, too."""
    for user in value.users:
        name = op_name(user)
        if name in FRESH or (name in SUMS and _is_broadcast(value, user)):
            continue
        if name in ONE_SOURCE and not _may_share(user):
            continue
        return True
    return False


def _is_broadcast(value: Node, result: Node) -> bool:
    own, whole = value.meta.get("val"), result.meta.get("val")
    if not isinstance(own, Tensor) or not isinstance(whole, Tensor):
        return False
    sizes = (*own.shape, *whole.shape)
    if not all(isinstance(size, int) for size in sizes):
        return own.dim() < whole.dim()
    return math.prod(own.shape) != math.prod(whole.shape)


def give_own_memory(weights: Mapping[str, Tensor], names: Iterable[str]) -> None:
    """From now on the gradients of these parameters are copied before they are taken."""
    for name in names:
        tensor = weights.get(name)
        if tensor is not None and tensor.requires_grad:
            tensor.register_hook(_copied)


def _copied(gradient: Tensor) -> Tensor:
    return gradient.clone()
