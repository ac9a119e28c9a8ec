"""Where the first points are that fit, in a long queue whose first ones do not.

Points are queued by how fast they could be, whatever they need. Where memory is short, thousands
may come first that are too large; neighbours in the queue are too large alike.
"""

from __future__ import annotations

from collections.abc import Callable


def first_fit(fits: Callable[[int], bool], start: int, end: int, tries: int) -> int:
    """A place between `start` and `end` that fits while the place before it that was tried does
    not; `end` where none is found. So many places are tried evenly from `start` to `end`, then
    those between two of them by halves.
    """
    stride = max(1, -(-(end - start) // max(1, tries)))
    refused = start - 1
    for place in range(start, end, stride):
        if fits(place):
            break
        refused = place
    else:
        return end
    while place - refused > 1:
        middle = (refused + place) // 2
        if fits(middle):
            place = middle
        else:
            refused = middle
    return place
