"""Batch shares that follow what the devices really do.

Rank i takes m_i seconds for its part of a step and was predicted to take p_i. Its speed against the
prediction, and how far that is from the others (a cost model that is wrong by the same factor
everywhere moves nobody):

    v_i = p_i / m_i,     drift_i = v_i / mean(v) - 1                                            (1)

A drift beyond the threshold in every step of a window is no accident. `rebalance` then corrects the
times of the plan by what the window measured, t_i <- t_i * sum(m_i) / sum(p_i), and the samples are
shared again by `shares.py`. Nothing else of the plan changes: who holds which weights, stages and
schedule stay, so that the next step can follow it.

Pure: no process group. `runtime/adapting.py` collects the times and hands out the new plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite

from whale.names import listed
from whale.plans.plan import Decision, Plan
from whale.plans.revise import revise
from whale.plans.samples import SampleMap
from whale.plans.shares import Load
from whale.units import compared

LEAST_GAIN = 0.02
"""shares that make the slowest device less than this faster are left as they are: rounding would
move samples to and fro
"""
SHOWN = 8
"""ranks whose shares are written out in a message"""


@dataclass(frozen=True)
class StepTimes:
    """What all ranks took for one step."""

    batch_size: int
    compute_s: tuple[float, ...]
    """by rank: forwards and backwards, without waiting"""


@dataclass(frozen=True)
class Rebalanced:
    """New shares, and why."""

    plan: Plan
    shares: tuple[int, ...]
    """by rank, of a whole mini-batch"""
    text: str


def rebalance(
    plan: Plan, window: Sequence[StepTimes], threshold: float, last_step: int
) -> Rebalanced | None:
    """The plan with new shares when a device drifted beyond the threshold in every step of the
    window and samples can be moved.
    """
    predicted = [predicted_seconds(plan, step.batch_size) for step in window]
    drifts = [drift(before, step.compute_s) for before, step in zip(predicted, window, strict=True)]
    worst = _steady(drifts, threshold)
    if worst is None:
        return None
    factors = [
        _factor([before[rank] for before in predicted], [step.compute_s[rank] for step in window])
        for rank in range(plan.num_devices)
    ]
    batch_size = window[-1].batch_size
    known = [factor for factor in factors if factor is not None]
    mean = sum(known) / len(known)
    corrected = _with_times(
        plan, [factor / mean if factor is not None else 1.0 for factor in factors]
    )
    old = samples_by_rank(plan, batch_size)
    new = samples_by_rank(corrected, batch_size)
    before_s = slowest_seconds(corrected, plan, batch_size)
    after_s = slowest_seconds(corrected, corrected, batch_size)
    if old == new or after_s > before_s * (1 - LEAST_GAIN):
        return None
    speed = sum(1.0 + each[worst] for each in drifts) / len(drifts)
    text = (
        f"rank {worst} ({plan.device_kinds[worst]}) ran at {speed:.2f} of its predicted share of "
        f"the speed in the {len(window)} measured steps up to step {last_step} (threshold "
        f"{threshold:g}): samples by rank {_shown(old)} -> {_shown(new)}, which makes the slowest "
        f"device {compared(after_s / before_s, 'slower', 'faster')}"
    )
    decision = Decision(f"samples by rank from step {last_step + 1}", _shown(new), text)
    return Rebalanced(replace(corrected, decisions=(*plan.decisions, decision)), new, text)


def drift(predicted_s: Sequence[float], measured_s: Sequence[float]) -> list[float]:
    """Line (1), by rank; 0 for a rank without samples."""
    speeds = [
        before / now if before > 0 and now > 0 else None
        for before, now in zip(predicted_s, measured_s, strict=True)
    ]
    known = [speed for speed in speeds if speed is not None]
    mean = sum(known) / len(known) if known else 1.0
    return [speed / mean - 1.0 if speed is not None else 0.0 for speed in speeds]


def _steady(drifts: Sequence[Sequence[float]], threshold: float) -> int | None:
    """The rank that is furthest from its prediction, among those that are beyond the threshold, to
    the same side, in every step.
    """
    worst = None
    most = 0.0
    for rank in range(len(drifts[0])):
        own = [each[rank] for each in drifts]
        least = min(map(abs, own))
        if least > threshold and (min(own) > 0 or max(own) < 0) and least > most:
            worst = rank
            most = least
    return worst


def _factor(predicted_s: Sequence[float], measured_s: Sequence[float]) -> float | None:
    """Measured seconds of a rank in units of its predicted ones; None where it had nothing to
    do.
    """
    total = sum(predicted_s)
    return sum(measured_s) / total if total > 0 and isfinite(total) else None


def _with_times(plan: Plan, factors: Sequence[float]) -> Plan:
    """The plan with the times of every device corrected. A device that has samples keeps one:
    without any it could not be measured.
    """
    has_all = all(samples_by_rank(plan, plan.batch_size))
    loads = plan.loads
    return revise(
        plan,
        device_seconds=[
            load.sample_s * factor for load, factor in zip(loads, factors, strict=True)
        ],
        device_fixed_seconds=[
            load.fixed_s * factor for load, factor in zip(loads, factors, strict=True)
        ],
        least_samples=max(plan.least_samples, 1) if has_all else plan.least_samples,
    )


def predicted_seconds(plan: Plan, batch_size: int) -> tuple[float, ...]:
    """Seconds of the forwards and backwards of one mini-batch on every rank, with the shares and
    times of the plan.
    """
    return _seconds(plan.loads, _samples(plan, batch_size))


def slowest_seconds(times: Plan, shares: Plan, batch_size: int) -> float:
    """Seconds of the device that takes longest, with the times of one plan and the shares of
    another.
    """
    return max(_seconds(times.loads, _samples(shares, batch_size)))


def _seconds(loads: Sequence[Load], samples: Sequence[Sequence[int]]) -> tuple[float, ...]:
    return tuple(
        sum(load.seconds(number) for number in numbers)
        for load, numbers in zip(loads, samples, strict=True)
    )


def samples_by_rank(plan: Plan, batch_size: int) -> tuple[int, ...]:
    """Samples of a mini-batch that each rank gets, over all micro-batches."""
    return tuple(map(sum, _samples(plan, batch_size)))


def _samples(plan: Plan, batch_size: int) -> list[list[int]]:
    """Samples by [rank][micro-batch]."""
    return SampleMap(plan, batch_size, plan.num_micro_batch).num_by_rank()


def _shown(shares: Sequence[int]) -> str:
    return listed(shares, SHOWN, "+")
