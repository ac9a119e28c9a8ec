"""Schedules of all kinds for tests."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from hypothesis import strategies as st

from whale.scheduling import (
    Action,
    Orders,
    StageGraph,
    parse_action,
)


def text(order: tuple[Action, ...]) -> str:
    """`F0 F1 B0`: kinds and micro-batches, without the stage."""
    return " ".join(f"{action.kind}{action.micro_batch}" for action in order)


def actions(line: str) -> tuple[Action, ...]:
    return tuple(parse_action(part.strip()) for part in line.split(","))


@st.composite
def stage_graphs(draw_from: st.DrawFn) -> StageGraph:
    num_stages = draw_from(st.integers(1, 7))
    raw = draw_from(st.lists(st.integers(0, 4), min_size=num_stages, max_size=num_stages))
    number = {device: index for index, device in enumerate(dict.fromkeys(raw))}
    pairs = [(a, b) for b in range(num_stages) for a in range(b)]
    edges = [pair for pair in pairs if draw_from(st.booleans())]
    gradient_edges = [edge for edge in edges if draw_from(st.booleans())]
    return StageGraph(tuple(number[device] for device in raw), tuple(edges), tuple(gradient_edges))


def longest_path(graph: StageGraph, stage: int) -> int:
    return 1 + max((longest_path(graph, b) for a, b in graph.edges if a == stage), default=0)


def has_circle(graph: StageGraph, num_micro_batch: int, orders: Orders) -> bool:
    """Independent of the checker: the order on each device and all data dependencies, as one graph
    of compute actions.
    """
    needs: dict[str, set[str]] = {}
    for order in orders:
        names = [str(action) for action in order if action.is_compute]
        for before, after in pairwise(names):
            needs.setdefault(after, set()).add(before)
    for m in range(num_micro_batch):
        for a, b in graph.edges:
            needs.setdefault(f"F{b}.{m}", set()).add(f"F{a}.{m}")
        for a, b in graph.gradient_edges:
            needs.setdefault(f"B{a}.{m}", set()).add(f"B{b}.{m}")
        for s in range(graph.num_stages):
            needs.setdefault(f"B{s}.{m}", set()).add(f"F{s}.{m}")
    try:
        list(TopologicalSorter(needs).static_order())
    except CycleError:
        return True
    return False
