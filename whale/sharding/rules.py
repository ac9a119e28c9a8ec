"""All ways in which one operation can run along one axis.

1. its own rule (rules_products, rules_views, rules_elementwise), by name; torch tags elementwise operations itself
2. otherwise by samples, where the capture has shown that the operation treats samples one by one
3. always: whole on every device. An operation that has nothing else is listed in the plan
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from whale.capture.kinds import is_random
from whale.capture.sample_states import PerSample, Shared, Size, Whole, is_pointwise
from whale.sharding import rules_products, rules_views  # noqa: F401  (both register their rules)
from whale.sharding.operation import RULES, SAME, Operation, Option, Placement, whole_option
from whale.sharding.rules_elementwise import pointwise

RESIZED = frozenset(
    " ".join(
        (rules_views.RESHAPES, rules_views.EXPANDS, rules_views.SPLITS, rules_views.CREATORS)
    ).split()
)
"""get local sizes in `local.py` in place of those that they are given"""


def options_of(op: Operation, states: Mapping[Node, Any]) -> tuple[Option, ...]:
    """Every option; `states`: where the samples are, from the walk in capture/samples.py."""
    if op.name in RULES:
        found = RULES[op.name](op)
    elif is_pointwise(op.node) and len(op.outputs) == 1:
        found = pointwise(op)
    else:
        found = []
    if not any(option.is_cut for option in found):
        found = [*found, *_by_samples(op, states)]
    return (*found, whole_option(op))


def _by_samples(op: Operation, states: Mapping[Node, Any]) -> list[Option]:
    """Samples stay apart from each other: each device runs its own. Values that count the samples
    (`arange(batch)`) would be wrong then, and so would arguments that hold the size of the whole
    batch."""
    if _is_given_a_size(op) and op.name not in RESIZED and not is_random(op.node):
        return []
    before = [_sample_dim(states.get(source)) for source in op.inputs]
    state = states.get(op.node)
    after = [
        _sample_dim(part)
        for part in (state if isinstance(state, tuple) else (state,) * len(op.outputs))
    ]
    if any(found is None for found in (*before, *after)) or not any(
        isinstance(found[0], int) for found in after if found
    ):
        return []
    if len(after) != len(op.outputs):
        return []
    placements = [found[0] for found in (*before, *after) if found is not None]
    segments = tuple(found[1] for found in (*before, *after) if found is not None)
    number = len(before)
    return [
        Option("samples", tuple(placements[:number]), tuple(placements[number:]), segments=segments)
    ]


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
        return (
            (state.dim, state.outer)
            if isinstance(state.outer, int) and state.position is None
            else None
        )
    return (SAME, 1) if isinstance(state, Shared | Whole | Size) else None
