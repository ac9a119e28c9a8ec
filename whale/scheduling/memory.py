"""One account of the memory that actions take: sizes, what a stage holds of a micro-batch and for
how long, and the peak of a device. Search, checks, planning, simulation and emulation all count
with what is here.

What the actions of a stage do to the activation memory of their device, in this order:

    action               when it starts    when it has computed              when it ends
    F, forward           + saved
    B, whole backward    + workspace       - saved                           - workspace
    I, input gradient    + workspace       + weight_gradient - saved         - workspace
    W, weight gradient                     - weight_gradient

`saved` is what autograd saves for backward. `weight_gradient` is what a split backward leaves for
its second half: inputs of the layers, and gradients of their results. `workspace` is needed only
while a backward runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from whale.scheduling.action import ENDS_BACKWARD, Action, Kind

ROUNDING = 1e-9
"""sums of sizes may exceed a capacity by this fraction of it"""


@dataclass(frozen=True, slots=True)
class Bytes:
    """A size that is affine in the number of samples: fixed + samples * per sample."""

    sample_bytes: float = 0.0
    """for each sample"""
    fixed_bytes: float = 0
    """the same for any number of samples"""

    def of(self, num_samples: float) -> float:
        """Bytes for so many samples; a device without samples holds nothing."""
        if not num_samples:
            return 0.0
        return max(0.0, self.fixed_bytes + num_samples * self.sample_bytes)

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(
            self.sample_bytes + other.sample_bytes,
            self.fixed_bytes + other.fixed_bytes,
        )

    def __sub__(self, other: Bytes) -> Bytes:
        return Bytes(
            self.sample_bytes - other.sample_bytes,
            self.fixed_bytes - other.fixed_bytes,
        )

    def __rmul__(self, factor: float) -> Bytes:
        return Bytes(factor * self.sample_bytes, factor * self.fixed_bytes)


NOTHING = Bytes()


def total(sizes: Iterable[Bytes]) -> Bytes:
    """The sum of all sizes."""
    sizes = list(sizes)
    return Bytes(
        sum(size.sample_bytes for size in sizes),
        sum(size.fixed_bytes for size in sizes),
    )


@dataclass(frozen=True)
class ActionMemory:
    """What a stage holds of one micro-batch; the table above says when."""

    saved: Bytes
    weight_gradient: Bytes = NOTHING
    workspace: Bytes = NOTHING


def memory_changes(
    kind: Kind, saved: float, weight_gradient: float, workspace: float
) -> tuple[float, float, float]:
    """A row of the table above: change when an action starts, when it has computed, when it ends.

    All are 0 for actions that compute nothing.
    """
    if kind is Kind.FORWARD:
        return saved, 0.0, 0.0
    if kind is Kind.BACKWARD:
        return workspace, -saved, -workspace
    if kind is Kind.INPUT:
        return workspace, weight_gradient - saved, -workspace
    if kind is Kind.WEIGHT:
        return 0.0, -weight_gradient, 0.0
    return 0.0, 0.0, 0.0


def peak_memory(order: Sequence[Action], stages: Mapping[int, ActionMemory]) -> Bytes:
    """Most activation memory of a device that does its actions in this order.

    The peaks of the fixed and of the per-sample bytes are taken each for itself, so the result is
    an upper bound for any number of samples.
    """
    fixed = {}
    per_sample = {}
    for stage, memory in stages.items():
        parts = (memory.saved, memory.weight_gradient, memory.workspace)
        fixed[stage] = tuple(part.fixed_bytes for part in parts)
        per_sample[stage] = tuple(part.sample_bytes for part in parts)
    return Bytes(_peak(order, per_sample), _peak(order, fixed))


def _peak(order: Sequence[Action], stages: Mapping[int, tuple[float, ...]]) -> float:
    changes: list[float] = []
    for action in order:
        if action.is_compute:
            changes += memory_changes(action.kind, *stages[action.stage])
    return peak_of(changes)


def peak_of(changes: Iterable[float]) -> float:
    """Highest running total of these changes, which begin at nothing."""
    return max(accumulate(changes, initial=0.0))


def in_flight(order: Iterable[Action], stages: Sequence[int]) -> list[tuple[int, ...]]:
    """Micro-batches in flight of each of these stages of a device, at first and after each change:
    those that have begun their forward and not ended their backward (of a split one: its weight
    gradient).
    """
    column = {stage: index for index, stage in enumerate(stages)}
    now = [0] * len(stages)
    moments = [tuple(now)]
    for action in order:
        if action.kind is Kind.FORWARD:
            now[column[action.stage]] += 1
            moments.append(tuple(now))
        elif action.kind in ENDS_BACKWARD:
            now[column[action.stage]] -= 1
            moments.append(tuple(now))
    return moments


Size = TypeVar("Size", float, Bytes)


def live(ranges: Iterable[tuple[int, int, Size]], num_points: int, zero: Size) -> list[Size]:
    """What is alive at each of `num_points` points, where (start, stop, size) is alive from point
    `start` up to but not at `stop`. `zero`: nothing, in the type of the sizes.
    """
    changes = [zero] * (num_points + 1)
    for start, stop, size in ranges:
        changes[start] += size
        changes[stop] -= size
    return list(accumulate(changes[:num_points]))


def fits(needed: float, capacity: float) -> bool:
    """Whether `needed` fits into `capacity`, rounding apart."""
    return needed <= capacity * (1 + ROUNDING)
