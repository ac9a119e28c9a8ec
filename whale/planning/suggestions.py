"""What would make a model fit that does not: changes of one thing each, all of them tried.

    recompute       allowed, where the config forbids it
    micro-batches   more of them, so that each is smaller
    stages          more of them on the same devices, in fewer model replicas
    devices         more of them, so that every replica has more stages
    batch           a smaller one

Of each kind the smallest change is looked for: doubled until a plan can be made, then halved
between the last two (`_smallest`). A try is a draft of the plan under the schedule that was asked
for (`Problem.is_trial`), so their number is limited, the more the larger the model is; what is
offered is always one that was tried and fitted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from whale.cluster.cluster import Cluster, Device
from whale.planning.problem import Problem
from whale.planning.schedules import FIXED_ORDERS

OPERATIONS_TRIED = 5000
LEAST_TRIES = 3
"""for each kind of change: so many operations are drafted in all, with at least so many tries"""

CUTS = 4
"""so many times more drafts of a try, about, where the order is made for the memory that there is
"""

FIRST_PART = 8
"""of a batch that is first tried to leave out"""

Fits = Callable[[Problem], bool]


def suggestions(problem: Problem, fits: Fits, is_over_full: bool) -> str:
    """A sentence with the changes that help. `fits(problem)`: whether a plan can be made for it.

    `is_over_full`: weights and the like alone are too much, so that only more stages can help.
    """
    more = {"more stages": _Changes.stages, "more devices": _Changes.devices}
    if not is_over_full:
        first = {"recompute": _Changes.recompute, "more micro-batches": _Changes.micro_batches}
        more = {**first, **more, "a smaller batch": _Changes.batch}
    found = []
    tried = []
    for name, change in more.items():
        changes = _Changes(problem, fits)
        suggestion = change(changes)
        if suggestion is not None:
            found.append(suggestion)
        if changes.is_tried:
            tried.append(name)
    if found:
        return f"Try: {'; '.join(found)}"
    if not tried:
        return (
            "It takes devices with more memory, or scopes that give each of them a smaller part "
            "of the model"
        )
    return (
        f"No change helps that was tried ({', '.join(tried)}, one at a time): it takes devices "
        "with more memory"
    )


@dataclass
class _Changes:
    problem: Problem
    fits: Fits

    is_tried: bool = False

    def __post_init__(self) -> None:
        num_cuts = 1 if self.problem.config.schedule in FIXED_ORDERS else CUTS
        self.tries_left = max(LEAST_TRIES, OPERATIONS_TRIED // (num_cuts * len(self.problem.kinds)))

    def recompute(self) -> str | None:
        config = self.problem.config
        if config.recompute in ("auto", True) or not self._try(config={"recompute": "auto"}):
            return None
        return '"recompute": "auto", so that activations are recomputed in backward and not saved'

    def micro_batches(self) -> str | None:
        now = self.problem.config.num_micro_batch
        found = self._smallest(
            now,
            self.problem.batch_size,
            lambda number: self._try(config={"num_micro_batch": number}),
        )
        return None if found is None else f'"num_micro_batch": {found} instead of {now}'

    def stages(self) -> str | None:
        if self._is_annotated:
            return None
        number = self.problem.cluster.num_devices
        now = self.problem.config.num_task_graph or 1
        more = (stages for stages in range(now + 1, number + 1) if number % stages == 0)
        found = next(
            (stages for stages in more if self._try(config={"num_task_graph": stages})), None
        )
        if found is None:
            return None
        replicas = f"{number // found} model replica{'s' * (found < number)}"
        return (
            f'"num_task_graph": {found} instead of {now}: {found} stages x {replicas} on the same '
            "devices"
        )

    def devices(self) -> str | None:
        cluster = self.problem.cluster
        now = self.problem.config.num_task_graph
        if cluster.num_devices == 1:
            now = 1
        if now is None or self._is_annotated:
            return None
        largest = max(cluster.devices, key=lambda device: device.kind.memory_bytes)
        replicas = cluster.num_devices // now
        found = self._smallest(
            now,
            4 * now,
            lambda stages: self._try(
                with_more(cluster, largest, (stages - now) * replicas), {"num_task_graph": stages}
            ),
        )
        if found is None:
            return None
        number = (found - now) * replicas
        more = f"{number} more device{'s' * (number > 1)}"
        return (
            f'{more} like rank {largest.rank} ({largest.kind.name}) and "num_task_graph": {found}'
        )

    def batch(self) -> str | None:
        """A smaller mini-batch, in steps of one sample for each micro-batch."""
        now = self.problem.batch_size
        count = self.problem.config.num_micro_batch
        largest = (now - 1) // count  # samples of a micro-batch
        found = self._smallest(
            -1,
            largest - 1,
            lambda less: self._try(batch_size=(largest - less) * count),
            1 + largest // FIRST_PART,
        )
        return None if found is None else f"a batch of {(largest - found) * count} instead of {now}"

    @property
    def _is_annotated(self) -> bool:
        """Then the model's own scopes say what its stages are."""
        return bool(self.problem.marks) or self.problem.default_strategy is not None

    def _smallest(
        self, low: int, most: int, fits: Callable[[int], bool], step: int = 1
    ) -> int | None:
        """The smallest number above `low` that fits, as far as tries go; more is taken to fit
        better. `step`: the first one.
        """
        high: int | None = None
        while high is None and low < most and self.tries_left:
            number = min(low + step, most)
            low, high = (low, number) if fits(number) else (number, None)
            step *= 2
        while high is not None and high - low > 1 and self.tries_left:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        return high

    def _try(
        self,
        cluster: Cluster | None = None,
        config: dict[str, object] | None = None,
        batch_size: int | None = None,
    ) -> bool:
        if not self.tries_left:
            return False
        self.tries_left -= 1
        self.is_tried = True
        problem = self.problem
        try:
            changed = problem.config.replace(**(config or {}))
        except ValueError:  # it does not go with the other settings
            return False
        batch_size = batch_size or problem.batch_size
        return self.fits(
            replace(
                problem,
                cluster=cluster or problem.cluster,
                config=changed,
                batch_size=batch_size,
                is_trial=True,
            )
        )


def with_more(cluster: Cluster, like: Device, number: int) -> Cluster:
    """The cluster with so many devices more on the host of one of them, of its kind."""
    places = [device.local_rank for device in cluster.devices if device.host == like.host]
    first = max(places) + 1
    rank = cluster.num_devices
    new = (replace(like, rank=rank + place, local_rank=first + place) for place in range(number))
    return replace(cluster, devices=(*cluster.devices, *new))
