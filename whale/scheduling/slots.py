"""Numbered slots for what a device holds between its actions; a slot is used again as soon as what
it held is not wanted any more.

A thing lives from the first action that mentions it to the last one. Going through the things in
the order of their beginnings, each takes the lowest slot that is free. So there are as many slots
as things live at the same time, never more: when a new slot is opened, all others are taken by
things that live right then.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Thing = TypeVar("Thing", bound=Hashable)


@dataclass(frozen=True)
class Slots(Generic[Thing]):
    """Slot of each thing that a device holds between its actions."""

    of: dict[Thing, int]
    freed: tuple[tuple[int, ...], ...]
    """slots that are free after each action"""
    count: int


def assign_slots(mentioned: Sequence[Iterable[Thing]]) -> Slots[Thing]:
    """`mentioned`: for each action of a device, in order, the things that it makes or wants."""
    last = {thing: place for place, things in enumerate(mentioned) for thing in things}
    slot_of: dict[Thing, int] = {}
    free: list[int] = []
    count = 0
    freed = []
    for place, things in enumerate(mentioned):
        own = list(dict.fromkeys(things))
        for thing in own:
            if thing not in slot_of:
                if not free:
                    heapq.heappush(free, count)
                    count += 1
                slot_of[thing] = heapq.heappop(free)
        freed.append(tuple(slot_of[thing] for thing in own if last[thing] == place))
        for slot in freed[-1]:
            heapq.heappush(free, slot)
    return Slots(slot_of, tuple(freed), count)
