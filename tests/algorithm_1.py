"""Algorithm 1 of the Whale paper, to the letter, for comparison; Whale itself plans with
`shares.py` and `cuts.py`.

A TaskGraph of TG_flop FLOP and TG_mem bytes is shared over devices with DF_i FLOP/s and DM_i bytes.
L_i, the load of device i, starts at DF_i / sum DF. While some device is out of memory and some is
not, load moves from the fullest (the peak) to the one with the lowest (flop_util, mem_util) (the
valley):

    mem_util_i = L_i * TG_mem / DM_i          flop_util_i = L_i * TG_flop / DF_i

The paper says of a shift only that it is the largest that does not put the valley out of memory. We
call it a success when the peak fits afterwards, since a peak is not looked at again after a
success.

Where it falls short (compare `tests/unit/test_algorithm_1.py`): memory is taken to shrink with the
load, though replicated weights do not; the largest shift empties the peak more than it must; loads
are no whole samples; and what still does not fit is not reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SAME = 1e-12
"""rounding of a load"""


@dataclass(frozen=True)
class Balance:
    """What Algorithm 1 ends with."""

    load_ratios: tuple[float, ...]
    """L_i, 1 in all"""
    out_of_memory: tuple[int, ...]
    """devices that still do not fit; the paper's text leaves them as they are"""


def algorithm_1(
    device_flop_per_s: Sequence[float], device_memory: Sequence[float], flop: float, memory: float
) -> Balance:
    """Lines 1 to 18 of the paper."""
    total = sum(device_flop_per_s)
    loads = [rate / total for rate in device_flop_per_s]
    mem_utils = [
        load * memory / capacity for load, capacity in zip(loads, device_memory, strict=True)
    ]
    flop_utils = [load * flop / rate for load, rate in zip(loads, device_flop_per_s, strict=True)]
    oom_devices = [device for device, used in enumerate(mem_utils) if used > 1 + SAME]
    free_devices = [device for device, used in enumerate(mem_utils) if used <= 1 + SAME]
    while oom_devices and free_devices:
        peak = max(oom_devices, key=lambda device: mem_utils[device])
        valley = min(free_devices, key=lambda device: (flop_utils[device], mem_utils[device]))
        if _shift_load(peak, valley, loads, device_memory, memory):
            for device in (peak, valley):
                mem_utils[device] = loads[device] * memory / device_memory[device]
                flop_utils[device] = loads[device] * flop / device_flop_per_s[device]
            oom_devices.remove(peak)
        else:
            free_devices.remove(valley)
    left = [device for device, used in enumerate(mem_utils) if used > 1 + SAME]
    return Balance(tuple(loads), tuple(left))


def _shift_load(
    peak: int, valley: int, loads: list[float], device_memory: Sequence[float], memory: float
) -> bool:
    """Moves the largest load that the valley takes; nothing, and no success, where the peak would
    not fit then.
    """
    shift = min(loads[peak], device_memory[valley] / memory - loads[valley])
    if shift <= 0 or (loads[peak] - shift) * memory > device_memory[peak] * (1 + SAME):
        return False
    loads[peak] -= shift
    loads[valley] += shift
    return True
