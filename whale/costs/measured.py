"""Measured times of operations, for any size: log-log between the points that `whale profile`
measured.

    below the smallest point    its time, which is overhead
    between two points          a straight line of the logarithms of work and time
    above the largest           in proportion to the work

Products were measured on square matrices. One of the same work that is not square moves more bytes
(a few rows times a large weight): they take their time at the memory's bandwidth besides.

An operation that was not measured itself goes by one that does about the same to memory
(`operations/table.py`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

from whale.cluster.kinds import DeviceKind
from whale.operations.table import row_named

OTHERS = "add"
"""for whatever is in no list: it moves bytes"""
VIEW = "view"
BATCH_NORM_OVER_DEVICES = "batch_norm_over_devices"
"""with the statistics of all ranks"""
WITHOUT_STATE = "sgd"
WITH_TWO_STATES = "adamw"
"""updates of one parameter of so many bytes, by an optimizer without state and by one that keeps
two averages
"""
PRODUCT = "linear"


@dataclass(frozen=True)
class Curve:
    """Times of one operation over its work, in logarithms."""

    work: tuple[float, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]

    def seconds(self, work: float, backward: bool) -> float:
        times = self.backward if backward else self.forward
        if work <= 0:
            return math.exp(times[0])
        at = math.log(work)
        place = bisect_right(self.work, at)
        if place == 0:
            return math.exp(times[0])
        if place == len(self.work):
            return math.exp(times[-1] + at - self.work[-1])
        share = (at - self.work[place - 1]) / (self.work[place] - self.work[place - 1])
        return math.exp(times[place - 1] + share * (times[place] - times[place - 1]))


@lru_cache(maxsize=256)
def curves(kind: DeviceKind) -> dict[str, Curve]:
    """Curves of a kind that was measured; empty for figures of a data sheet."""
    points: dict[str, dict[float, tuple[float, float]]] = {}
    for point in kind.operations:
        points.setdefault(point.name, {})[point.work] = (
            math.log(point.forward_s),
            math.log(point.backward_s),
        )
    found = {}
    for name, by_work in points.items():
        works = sorted(by_work)
        forward, backward = ([by_work[work][place] for work in works] for place in (0, 1))
        found[name] = Curve(
            tuple(math.log(work) for work in works), tuple(forward), tuple(backward)
        )
    return found


def measured_seconds(
    kind: DeviceKind, operation: str, flop: float, moved_bytes: float, backward: bool
) -> float | None:
    """Seconds of one call of `aten.linear` or the like; None where nothing was measured that could
    stand for it.
    """
    known = curves(kind)
    if not known:
        return None
    name = operation.removeprefix("aten.")
    if not flop and not moved_bytes:
        name = VIEW
    elif name not in known:
        name = row_named(name).timed_as or OTHERS
    curve = known.get(name)
    if curve is None:
        return None
    seconds = curve.seconds(flop or moved_bytes, backward)
    if name == PRODUCT and flop:
        square_bytes = 3 * 4.0 * (flop / 2) ** (2 / 3)
        seconds += max(0.0, moved_bytes - square_bytes) / kind.bytes_per_s * (2 if backward else 1)
    return seconds


def update_costs(kind: DeviceKind, state_ratio: float) -> tuple[float, float] | None:
    """Seconds of an update for each parameter, and for each byte of parameters, with `state_ratio`
    bytes of state for each of them.

    None where no update was measured. One that was measured at one size only takes no time beside
    its bytes.
    """
    found = []
    for name in (WITHOUT_STATE, WITH_TWO_STATES):
        points = sorted(
            (point.work, point.forward_s) for point in kind.operations if point.name == name
        )
        if not points:
            return None
        (small, small_s) = points[0]
        (large, large_s) = points[-1]
        byte_s = max(0.0, large_s - small_s) / (large - small) if large > small else small_s / small
        found.append((max(0.0, small_s - byte_s * small), byte_s))
    (call_s, byte_s), (call_2_s, byte_2_s) = found
    share = state_ratio / 2
    return call_s + share * (call_2_s - call_s), byte_s + share * (byte_2_s - byte_s)
