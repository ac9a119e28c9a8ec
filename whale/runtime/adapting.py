"""Measures what steps really take on every rank, and has the samples shared again when a device is
steadily not as fast as planned.

Ranks exchange their times once in `adapt_steps` steps; rank 0 decides (`planning/adapt.py`) and all
get its plan. Only compute counts: a rank that waits for a slow one is not slow. A step whose
program was just made is left out: it takes longer for other reasons.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from weakref import WeakSet

from whale.operations.nodes import sums_over_devices
from whale.planning.adapt import Rebalanced, StepTimes, rebalance
from whale.plans.plan import Plan
from whale.runtime.executor import Executor
from whale.runtime.job import Job

logger = logging.getLogger("whale")


class Adapting:
    """The measuring side of one rank. All ranks call `after_step` after every step."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._config = job.config
        self._ranks = job.ranks
        self.num_rebalanced = 0
        self._own: list[tuple[int, Callable[[], float]]] = []
        """(samples of the mini-batch, what gives the seconds of this rank) of the steps since the
        last exchange
        """
        self._known_executors: WeakSet[Executor] = WeakSet()
        """those that ran before; not by `id`, which a later executor may get again, on one rank and
        not on the other
        """
        self._suggested: tuple[int, ...] | None = None
        self.is_on = (
            self._config.adapt != "off" and self._ranks.is_distributed and self._can_measure()
        )

    def _can_measure(self) -> bool:
        reason = None
        if not self._job.plan.is_uniform or self._job.plan.left_out:
            reason = "samples move only between model replicas that are alike, on all devices"
        elif self._job.plan.shardings:
            reason = (
                "devices of a sharded part wait for each other inside a forward, so all seem as "
                "slow as the slowest"
            )
        elif any(sums_over_devices(node) for node in self._job.prepared.captured.compute_nodes()):
            reason = (
                "batch statistics are summed over the devices inside a forward, so all seem as "
                "slow as the slowest"
            )
        if reason is not None and self._ranks.rank == 0:
            logger.warning('"adapt": "%s" has no effect: %s', self._config.adapt, reason)
        return reason is None

    def after_step(
        self, executor: Executor, compute_s: Callable[[], float], batch_size: int, step: int
    ) -> Plan | None:
        """The plan to follow from the next step on, when it is a new one; the same on all ranks.
        `compute_s` gives the seconds of forward and backward on this rank, and is called only when
        ranks exchange them. `step`: the one that is over.
        """
        if not self.is_on:
            return None
        if executor not in self._known_executors:
            self._known_executors.add(executor)
            return None
        self._own.append((batch_size, compute_s))
        if len(self._own) < self._config.adapt_steps:
            return None
        everyone = self._ranks.gather([(size, seconds()) for size, seconds in self._own])
        self._own = []
        found: Rebalanced | None = None
        if self._ranks.rank == 0:
            window = []
            for of_ranks in zip(*everyone, strict=True):  # one step: (samples, seconds) by rank
                batch_size = of_ranks[0][0]
                window.append(StepTimes(batch_size, tuple(seconds for _, seconds in of_ranks)))
            found = rebalance(self._job.plan, window, self._config.adapt_threshold, step)
            self._log(found, step)
        found = self._ranks.from_first(found)
        return found.plan if found is not None and self._config.adapt == "on" else None

    def followed(self) -> None:
        """The plan of `after_step` is the job's now."""
        self.num_rebalanced += 1
        self._known_executors.clear()
        self._own = []

    def _log(self, found: Rebalanced | None, step: int) -> None:
        if found is None:
            self._suggested = None
        elif self._config.adapt == "on":
            logger.warning("step %d: %s", step, found.text)
        elif found.shares != self._suggested:  # said once, and again when it changes
            self._suggested = found.shares
            logger.warning(
                'step %d: %s; nothing is changed, "adapt": "on" would do it', step, found.text
            )
