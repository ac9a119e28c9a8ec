"""Methods of the engine that all ranks call in the same order, and what is said where they do not:
under `if rank == 0:`, say, or in a loop that is longer on one rank.

Each rank counts its calls. The watch sends number and name to the hub, which compares. A rank about
to do something rare (save, gather, the first evaluation after training) waits there for the others
before it sends them anything: a message that meets another call's would be read as its own.
"""

from __future__ import annotations

import enum
import linecache
import sys
import threading
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from whale.error_reports import PACKAGE
from whale.names import listed
from whale.units import ranges

WRITES_ONCE = "take it out of `if rank == 0:`; rank 0 alone writes the files"
EMPTY_ELSEWHERE = "take it out of `if rank == 0:`; the other ranks get nothing, but take part"
SAME_BATCHES = (
    "give every rank the same batches, and equally many: no `if rank == 0:` around it, no "
    "DistributedSampler. All ranks get the same loss, so print it on one"
)
ADVICE = {
    "engine.save_pretrained": WRITES_ONCE,
    "engine.export": WRITES_ONCE,
    "engine.trace": WRITES_ONCE,
    "engine.save": "take it out of `if rank == 0:`; every rank writes its own part",
    "engine.load": "take it out of `if rank == 0:`; every rank reads its own part",
    "engine.full_state_dict": EMPTY_ELSEWHERE,
    "engine.full_gradients": EMPTY_ELSEWHERE,
    "engine.module": EMPTY_ELSEWHERE,
    "engine.gathered": "take it out of `if rank == 0:`; every rank gets all weights",
    "engine.give_back": "take it out of `if rank == 0:`; every rank gets all weights",
}
"""what to try, by method; for all others it is `SAME_BATCHES`"""
SHOWN_DEEDS = 3
"""of other ranks, in a message"""


class Meets(enum.Enum):
    """Whether ranks wait for each other before a call sends anything."""

    ALWAYS = "always"
    AFTER_ANOTHER = "after another"
    """where the call before was another one: evaluations follow each other in a loop"""
    NEVER = "never"
    """training, in which every microsecond counts"""


class CallsDifferError(RuntimeError):
    """This rank called a method that all ranks must call, and another did something else."""


@dataclass(frozen=True)
class Call:
    """The latest call of a rank."""

    number: int = 0
    """calls up to this one"""
    name: str = ""
    waits: bool = False
    """it has sent nothing yet, and waits until all ranks have made this call"""


NO_CALL = Call()


def have_met(calls: Mapping[int, Call]) -> bool:
    """Whether all ranks wait in the same call."""
    return all(call.waits for call in calls.values()) and len(set(calls.values())) == 1


def awaited(calls: Mapping[int, Call]) -> tuple[int, str] | None:
    """The first rank for which others wait, and what it should print before the line at which it
    stands; None where nobody waits.
    """
    waiting = [rank for rank in sorted(calls) if calls[rank].waits]
    if not waiting:
        return None
    call = min((calls[rank] for rank in waiting), key=lambda call: call.number)
    missing = [rank for rank in sorted(calls) if calls[rank] != call]
    text = (
        f"{call.name} must be called by all ranks: {named(waiting)} called it and "
        f"wait{'s' if len(waiting) == 1 else ''} for {named(missing)}. If that is for ever, try: "
        f"{ADVICE.get(call.name, SAME_BATCHES)}"
    )
    return missing[0], text


def difference(calls: Mapping[int, Call], left: Set[int]) -> tuple[int | None, str] | None:
    """What to say where ranks make different calls, and the rank that can say it with the line of
    its script: one that waits. None while all may still make the same. `left`: ranks that have
    ended.
    """
    chosen = _chosen(calls, left)
    if chosen is None:
        return None
    call = calls[chosen]
    others: dict[str, list[int]] = {}
    alike = []
    for rank in sorted(calls):
        did = _instead(calls[rank], call, rank in left)
        if did is not None:
            others.setdefault(did, []).append(rank)
        elif calls[rank] == call:
            alike.append(rank)
    if not others:
        return None
    instead = listed([f"{named(ranks)} {did}" for did, ranks in others.items()], SHOWN_DEEDS)
    text = (
        f"{call.name} must be called by all ranks: {named(alike)} called it, {instead}. "
        f"Try: {ADVICE.get(call.name, SAME_BATCHES)}"
    )
    return chosen if call.waits else None, text


def _chosen(calls: Mapping[int, Call], left: Set[int]) -> int | None:
    """A rank whose call others may not make: the first that waits, else one of two that made
    different calls, else the one with the most calls where another has ended.
    """
    chosen: int | None = None
    last: int | None = None
    first_of: dict[int, int] = {}
    differs: int | None = None
    for rank, call in calls.items():
        if call.waits and (chosen is None or call.number < calls[chosen].number):
            chosen = rank
        same = first_of.setdefault(call.number, rank)
        if differs is None and calls[same].name != call.name:
            differs = same
        if last is None or call.number > calls[last].number:
            last = rank
    if chosen is not None or differs is not None:
        return differs if chosen is None else chosen
    return last if left else None


def _instead(other: Call, call: Call, has_left: bool) -> str | None:
    """What a rank did in the place of this call; None: it made it, or still may."""
    if other.number < call.number:
        times = f"{other.number} call{'s' if other.number != 1 else ''}"
        return f"ended its script after {times} of the engine" if has_left else None
    if other.number == call.number and other.name != call.name:
        return f"called {other.name} in its place"
    if other.number > call.number and call.waits:
        return f"went on to {other.name} without it"
    return None


def named(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0-2, 5`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}"


def script_line() -> str:
    """`line 26 of train.py: dist.barrier()`, where the main thread of this process is in the user's
    script; empty where there is none.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_globals.get("__name__") != "__main__":
        frame = frame.f_back
    if frame is None or Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
        return ""
    file = frame.f_code.co_filename
    return f"line {frame.f_lineno} of {file}: {linecache.getline(file, frame.f_lineno).strip()}"
