"""Numbers as people read them: three significant digits and a unit. 1 KB is 1000 bytes, as on data
sheets.
"""

from __future__ import annotations

from collections.abc import Sequence

from whale.names import count as count
from whale.names import num_shown as num_shown

MILLISECONDS = 1e3
MICROSECONDS = 1e6
"""in a second"""
STEP = 1000.0
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_NOTHING_S = 1e-12
"""what is shorter is the rounding of a difference of two times"""
_LEAST_DIFFERENCE = 0.005
"""of two numbers that are compared: less is no difference to people"""
_LEAST_TIMES = 1.1
"""nobody says that something is 1.01 times faster: up to here it is percent"""


def human_bytes(num_bytes: float) -> str:
    """`1.23 MB`; below 1 KB the exact count."""
    return _scaled(num_bytes, ("B", "KB", "MB", "GB", "TB", "PB"))


def human_flop(flop: float) -> str:
    """`1.23 GFLOP`."""
    return _scaled(flop, ("FLOP", "KFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def human_seconds(seconds: float) -> str:
    """`1.23 ms`."""
    if abs(seconds) < _NOTHING_S:
        return "0 s"
    for size, unit in _SECONDS:
        if seconds >= 0.9995 * size:  # what would be rounded to 1000 of the next smaller unit
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds / 1e-9)} ns"


def human_age(seconds: float) -> str:
    """`42 s`, `39 min`, `5 h`, `3 days`: how long ago something was."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def human_rate(per_s: float) -> str:
    """`131.1`, `26,480`: samples in a second."""
    return f"{per_s:.4g}" if per_s < 10 * STEP else f"{float(f'{per_s:.4g}'):,.0f}"


def compared(ratio: float, more: str, less: str, same: str = "the same") -> str:
    """How one number compares with another, from the first divided by the second: `1.4 times
    slower`, below that `2 % slower`, `the same`, `5 % faster`, `2 times faster` where `more` is
    `slower` and `less` is `faster`.
    """
    if abs(ratio - 1) < _LEAST_DIFFERENCE:
        return same
    word = more if ratio > 1 else less
    times = max(ratio, 1 / ratio)
    if times < _LEAST_TIMES:
        return f"{100 * abs(ratio - 1):.2g} % {word}"
    return f"{times:,.0f} times {word}" if times >= STEP else f"{times:.3g} times {word}"


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers with runs joined: [0, 1, 2, 5] -> `0-2, 5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _scaled(value: float, units: Sequence[str]) -> str:
    if value < STEP:
        return f"{value:.0f} {units[0]}"
    for unit in units[1:]:
        value /= STEP
        if float(f"{value:.3g}") < STEP or unit == units[-1]:
            return f"{_digits(value)} {unit}"
    raise AssertionError("the last unit takes everything")


def _digits(value: float) -> str:
    """Three significant digits, never in powers of ten."""
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
