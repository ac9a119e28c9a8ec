"""Moves of what is not always on a device, as data, and the proof that they hold.

A device does its work in order. Something that lives elsewhere (weights of a block, a piece of what
a stage saved of a micro-batch) has a slot, which others of its size share in turn. It is brought by
a FETCH, which begins before a place of the order, and leaves by a STORE behind one, which frees its
slot. `moves_of` makes them: a fetch one place ahead of the first use where the slot allows it, a
store behind the last use before another one comes. `check_moves` proves of any list of moves:

    arrival    everything that is used has arrived: a fetch of it began, and no store came since
    memory     no slot holds two things, those on their way included: so at no place more bytes are
               here than those of the slots
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class MoveKind(Enum):
    FETCH = "fetch"
    STORE = "store"


@dataclass(frozen=True)
class Move:
    """Something begins to come, or to go."""

    kind: MoveKind
    what: Hashable
    place: int
    """in the order of uses: a fetch begins before it, a store behind it"""


Uses = Sequence[Hashable]
"""what is used, one after the other"""
Slots = Mapping[Hashable, int]
"""the slot of everything, always the same"""


class ResidenceError(ValueError):
    """Moves that do not hold."""


def moves_of(uses: Uses, slot_of: Slots) -> list[Move]:
    """Moves for uses in this order."""
    found = []
    in_slot: dict[int, Hashable] = {}
    last_use: dict[Hashable, int] = {}
    for place, what in enumerate(uses):
        slot = slot_of[what]
        if in_slot.get(slot) != what:
            if slot in in_slot:
                before = in_slot[slot]
                found.append(Move(MoveKind.STORE, before, last_use[before]))
            is_free = place > 0 and slot_of[uses[place - 1]] != slot
            found.append(Move(MoveKind.FETCH, what, place - 1 if is_free else place))
            in_slot[slot] = what
        last_use[what] = place
    return found


def check_moves(uses: Uses, moves: Iterable[Move], slot_of: Slots) -> None:
    """Raises `ResidenceError` with the place at which something is used before it has arrived, or
    a slot would hold two things.
    """
    fetches: dict[int, list[Hashable]] = {}
    stores: dict[int, list[Hashable]] = {}
    for move in moves:
        chosen = fetches if move.kind is MoveKind.FETCH else stores
        chosen.setdefault(move.place, []).append(move.what)
    here: dict[int, Hashable] = {}
    for place, used in enumerate(uses):
        for what in fetches.get(place, ()):
            _take(here, slot_of[what], what, place)
        if here.get(slot_of[used]) != used:
            raise ResidenceError(f"use {place} of {used} comes before it has arrived")
        for what in stores.get(place, ()):
            if here.get(slot_of[what]) != what:
                raise ResidenceError(f"behind use {place} {what} leaves, which is not here")
            del here[slot_of[what]]


def _take(here: dict[int, Hashable], slot: int, what: Hashable, place: int) -> None:
    """Something comes into a slot, which must be free."""
    before = here.get(slot)
    if before is not None:
        raise ResidenceError(f"at use {place} slot {slot} has {before}, and {what} comes into it")
    here[slot] = what
