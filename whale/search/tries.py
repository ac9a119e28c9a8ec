"""What any search has: what it tried, the best of it, progress, and an end at an interrupt."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from whale.names import count
from whale.planning.problem import Problem
from whale.plans.shares import DoesNotFit
from whale.search.budget import Budget
from whale.search.candidate import Candidate
from whale.search.drafting import Drafted, prove
from whale.search.settings import OpenSettings
from whale.units import human_seconds

if TYPE_CHECKING:
    from whale.search.slices import Slices


@dataclass(frozen=True)
class Tried:
    """A candidate that was drafted, for the record."""

    candidate: Candidate
    step_s: float
    """infinite: it could not be"""
    problem: str = ""


@dataclass(frozen=True)
class SearchProgress:
    """How far a search has come."""

    what: str
    done: int
    of: int
    """0: not known"""
    best: Drafted | None

    @property
    def text(self) -> str:
        """What is tried, and the best so far, in one line."""
        tried = f"{self.what} {self.done} of {self.of}" if self.of else f"{self.what} {self.done}"
        if self.best is None:
            return f"search: {tried}; no plan yet"
        best = f"{human_seconds(self.best.step_s)} a step, {self.best.candidate.describe()}"
        return f"search: {tried}; best so far: {best}"


@dataclass
class Tries:
    """The plans that a search made, and those that could not be. Budgets are counts."""

    problem: Problem
    settings: OpenSettings
    budget: Budget
    progress: Callable[[SearchProgress], None] = lambda _: None
    drafted: list[Drafted] = field(default_factory=list)
    tried: list[Tried] = field(default_factory=list)
    num_estimates: int = 0
    is_interrupted: bool = False
    slices: Slices | None = None
    """of a large cluster, one of which was searched; None: the whole cluster was"""

    @property
    def best(self) -> Drafted | None:
        return min(self.drafted, key=lambda each: each.score_s, default=None)

    @property
    def summary(self) -> str:
        """What was estimated and made, in words."""
        interrupted = ", interrupted" if self.is_interrupted else ""
        sliced = "" if self.slices is None else f", {self.slices.text}"
        estimates = count(self.num_estimates, "arrangement")
        return f"{estimates} estimated, {count(len(self.tried), 'plan')} made{sliced}{interrupted}"

    def run(self) -> None:
        """Fills `drafted`; an interrupt ends it with what is there, which is proved as well."""
        try:
            self._draft_everything()
        except KeyboardInterrupt:
            self.is_interrupted = True
        try:
            self._prove_best()
        except KeyboardInterrupt:
            if self.is_interrupted:
                raise  # the second one: nothing is wanted any more
            self.is_interrupted = True
            self._prove_best()

    def _draft_everything(self) -> None:
        """What this kind of search tries."""
        raise NotImplementedError

    def _prove_best(self) -> None:
        """Proves the best plan. One that is over-full at some action is no plan: the next one is
        the best then.
        """
        while (best := self.best) is not None:
            try:
                return prove(best.plan)
            except DoesNotFit as error:
                self.drafted = [each for each in self.drafted if each is not best]
                self.tried.append(Tried(best.candidate, math.inf, str(error)))

    def report(self, what: str, done: int, of: int) -> None:
        self.progress(SearchProgress(what, done, of, self.best))
