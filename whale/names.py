"""Words of messages: the name that the user probably meant, names that were replaced, numbers of
things, and lists that leave some of them out.
"""

from __future__ import annotations

import difflib
import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

logger = logging.getLogger("whale")

SIMILARITY = 0.6
"""difflib's ratio above which a name is worth offering; its own default"""


def nearest(name: str, choices: Iterable[str]) -> str:
    """` Did you mean 'num_micro_batch'?`, to be put after an error message; `''` when nothing is
    near.
    """
    by_lower_case = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(name.lower(), list(by_lower_case), n=1, cutoff=SIMILARITY)
    return f" Did you mean {by_lower_case[found[0]]!r}?" if found else ""


@functools.cache  # so each is said once in a process
def say_renamed(old: str, new: str, where: str) -> None:
    """Logs that `old` still works and what to write instead."""
    logger.warning("%s: %r is now %r. The old name still works; change it.", where, old, new)


def current_names(
    given: Mapping[str, Any], renamed: Mapping[str, str], where: str
) -> dict[str, Any]:
    """`given` with every old name of `renamed` (old -> new) replaced by its new one."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        current = renamed.get(name, name)
        if current != name:
            say_renamed(name, current, where)
            if current in given:
                raise ValueError(f"{where}: {name!r} is now {current!r}, and both are given.")
        found[current] = value
    return found


def count(number: int, word: str) -> str:
    """`1 stage`, `2 stages`."""
    if number == 1:
        return f"{number} {word}"
    ending = "es" if word.endswith("ch") else "s"
    return f"{number} {word}{ending}"


def num_shown(number: int, most: int) -> int:
    """How many of `number` rows are shown where `most` fit. All, where one would be left out: a row
    that says so takes as much space.
    """
    return number if number <= most + 1 else most


def listed(things: Sequence[object], most: int, separator: str = ", ") -> str:
    """`a, b, c and 5 more`, shown as `num_shown` says."""
    shown = num_shown(len(things), most)
    more = f" and {len(things) - shown} more" if len(things) > shown else ""
    return separator.join(map(str, things[:shown])) + more


def names_of(text: str) -> frozenset[str]:
    """The words of a text as a set of names."""
    return frozenset(text.split())
