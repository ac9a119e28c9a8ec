"""The longest batch so far, and the plan for a longer one: samples and memory follow, weights stay
where they are.
"""

from __future__ import annotations

import logging

from whale.capture.batch import BatchLayout
from whale.capture.lengths import Numbers, Place
from whale.plans.plan import Plan
from whale.plans.revise import plan_for_longer
from whale.runtime.captures import Family
from whale.runtime.job import Job

logger = logging.getLogger("whale")


class Longest:
    """Sizes that the plan has memory for."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._replans = job.replan is not None
        self._sizes: dict[Place, int] = {}
        for tensor in job.sample.tensors:
            names = dict(tensor.lengths)
            for dim, size in enumerate(tensor.shape):
                self._sizes[tensor.path, dim] = job.longest.get(names.get(dim, ""), size)

    def plan_for(self, layout: BatchLayout, family: Family, numbers: Numbers) -> Plan | None:
        """The plan to follow from this batch on; None where it is no longer than those before. The
        same on all ranks; raises where the batch does not fit.
        """
        longer = {}
        for tensor in layout.with_lengths(family.layout.length_names).tensors:
            for dim, name in tensor.lengths:
                if tensor.shape[dim] > self._sizes.get((tensor.path, dim), 0):
                    longer[name] = self._sizes[tensor.path, dim] = tensor.shape[dim]
        if not longer or not self._replans:
            return None
        made = self._planned(family, numbers)
        said = ", ".join(f"{name} {size}" for name, size in longer.items())
        plan = plan_for_longer(self._job.plan, made, said)
        if plan is None:
            self._replans = False  # it would be the same for every longer one
            if self._job.ranks.rank == 0:
                logger.warning(
                    "a batch is longer than planned (%s): a plan for it would put weights "
                    "elsewhere, so the present one stays, and memory may not be enough. Try: "
                    "wh.parallelize(..., dynamic=...) with the longest size, or a sample batch of "
                    "the largest shape",
                    said,
                )
        return plan

    def _planned(self, family: Family, numbers: Numbers) -> Plan:
        """Rank 0's plan for these lengths."""
        job = self._job
        made: Plan | None = None
        with job.ranks.together():
            if job.ranks.rank == 0:
                assert job.replan is not None
                made = job.replan(family.prepared, numbers)
        plan: Plan = job.ranks.from_first(made)
        return plan
