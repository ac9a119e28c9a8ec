"""A typical time of something that is repeated, on a machine with neighbours.

One that is there all the time takes the core for a few milliseconds now and then: a median of single calls would not see it, and training
does. One that comes for a moment should not count. So: the median of means, each over a stretch that is long against a turn on the core.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

STRETCH_S = 0.05
"""long against the milliseconds for which the system gives a core to one of several processes"""


def steady_seconds(seconds: Sequence[float]) -> float:
    """Of times in the order in which they were taken. The rest that does not fill a stretch counts where there is no other."""
    means: list[float] = []
    own: list[float] = []
    for each in seconds:
        own.append(each)
        if sum(own) >= STRETCH_S:
            means.append(statistics.fmean(own))
            own = []
    return statistics.median(means or [statistics.fmean(own)])
