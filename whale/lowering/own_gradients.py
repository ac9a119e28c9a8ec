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
from whale.operations.table import row_named


def may_share_gradients(graph: Graph) -> frozenset[str]:
    """Names of these parameters; all that an unknown operation reads are among them."""
    reads = (node for node in graph.nodes if node.op == "get_attr")
    return frozenset(str(node.target) for node in reads if _may_share(node))


def _may_share(value: Node) -> bool:
    """Whether the gradient of a value may lie in memory that another gradient lies in, too."""
    for user in value.users:
        receivers_of = row_named(op_name(user)).passes_gradient_to
        # the rules go by place: an argument by name is rare
        if receivers_of is None or value in user.kwargs.values():
            return True
        receivers = receivers_of(user)
        if value not in receivers or _is_broadcast(value, user):
            continue
        # alone with the gradient of the result, it has as much memory to itself as that one
        if len(receivers) > 1 or _may_share(user):
            return True
    return False


def _is_broadcast(value: Node, result: Node) -> bool:
    own = value.meta.get("val")
    whole = result.meta.get("val")
    if not isinstance(own, Tensor) or not isinstance(whole, Tensor):
        return False
    sizes = (*own.shape, *whole.shape)
    if not all(isinstance(size, int) for size in sizes):
        return own.dim() < whole.dim()
    return math.prod(own.shape) != math.prod(whole.shape)


def give_own_memory(weights: Mapping[str, Tensor], names: Iterable[str]) -> None:
    """Makes autograd copy the gradients of these parameters before it hands them over."""
    for name in names:
        tensor = weights.get(name)
        if tensor is not None and tensor.requires_grad:
            tensor.register_hook(_copied)


def _copied(gradient: Tensor | None) -> Tensor | None:
    # a region that is recomputed gives none where the gradients of inputs alone are wanted
    return gradient.clone() if gradient is not None else None
