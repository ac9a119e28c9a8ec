"""Rows of tokens between two products with their experts (capture/experts.py): do they come back in
between, or stay where they are?

`up`, an activation and `down` of an expert need only rows of its own. So tokens travel to the
device of their expert before the first product and back after the last one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable

import torch
from torch.fx import Node

from whale.operations.nodes import op_name
from whale.operations.table import SPLITS

ROW_DIM = (0, -2)
"""names of the first dim of [rows, features]"""


def journeys(operations: Iterable[Node]) -> tuple[frozenset[Node], frozenset[Node]]:
    """(products whose rows have to come, products whose results have to go back) where tokens
    travel to all of them.
    """
    products = [node for node in operations if op_name(node) == "expert_mm"]
    staying: set[Node] = set()
    following: set[Node] = set()
    for product in products:
        ends = readers_in_place(
            product,
            lambda node, experts=product.args[2]: (  # type: ignore[misc]
                op_name(node) == "expert_mm" and node.args[2] is experts
            ),
        )
        if ends:
            staying.add(product)
            following.update(ends)
    return frozenset(products) - following, frozenset(products) - staying


def readers_in_place(start: Node, is_end: Callable[[Node], bool]) -> list[Node] | None:
    """The ends that read the rows of `start`, through operations that treat rows one by one; None
    where something else reads them.
    """
    rows = {start}
    ends = []
    waiting = set(start.users)
    node = start.next
    while waiting:
        if node in waiting:
            waiting.discard(node)
            if is_end(node):
                ends.append(node)
            elif _is_row_by_row(node, rows):
                rows.add(node)
                waiting.update(node.users)
            else:
                return None
        node = node.next
    return ends


def _is_row_by_row(node: Node, rows: Collection[Node]) -> bool:
    """Stricter than its namesake in capture/experts.py: it is also asked of lowered graphs, whose
    nodes know no shapes.
    """
    if node.op != "call_function" or not all(source in rows for source in node.all_input_nodes):
        return False
    if node.target is operator.getitem or torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return True
    if op_name(node) not in SPLITS:
        return False
    dim = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else 0)
    return dim not in ROW_DIM
