"""The optimizer step in pieces: each stage's parameters as soon as their gradients are final, while
the pipeline still drains.

Only where nothing needs all gradients first: no clipping, no loss scale, and `"on_nonfinite":
"continue"` (other values look at the loss and the gradient norm of the whole model before any
weight changes). Parameters that other stages or ranks hold too wait for the end of the step, and so
do those of a stage that lends a parameter: hands on a slice of it, say, which lies in its memory,
and which a weight product of a later stage may still have to read.

The optimizer stays one object with one state. Each call of its `step()` sees only some of its
parameters, which comes to the same bits where it treats every parameter by itself. That is known of
torch's own classes in `BY_PARAMETER` and of no other, and it does not hold for hooks on `step()`,
which would run several times: in both cases all is updated at the end.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from whale.compat import has_step_hooks
from whale.config import Config
from whale.costs.optimizer_factory import BY_PARAMETER
from whale.runtime.held import HeldParameter


class StageUpdates:
    """The update of one rank, stage by stage."""

    def __init__(self, optimizer: torch.optim.Optimizer, held: Sequence[HeldParameter]) -> None:
        self._optimizer = optimizer
        own: dict[int, list[int]] = {}
        for parameter in held:
            if len(parameter.stages) == 1 and len(parameter.ranks) == 1:
                own.setdefault(parameter.stages[0], []).append(id(parameter.tensor))
        self._of_stage = {stage: frozenset(parameters) for stage, parameters in own.items()}
        self._done: set[int] = set()
        self._lending: Collection[int] = ()
        self.ready: list[int] = []
        """stages whose gradients are final, and which are not updated yet"""

    @staticmethod
    def possible(optimizer: torch.optim.Optimizer | None, config: Config) -> bool:
        """Whether the step of this optimizer may be taken in pieces."""
        return (
            type(optimizer) in BY_PARAMETER
            and config.needs_all_gradients is None
            and not has_step_hooks(optimizer)
        )

    def begin(self, lending: Collection[int] = ()) -> None:
        """A step begins; one that failed may have left something behind. `lending`: stages that are
        left to the end (`Lowered.lending`).
        """
        self._lending = lending
        self._forget()

    def close_stage(self, stage: int) -> None:
        """Marks a stage whose gradients are final on this rank as ready for its update."""
        if stage in self._of_stage and stage not in self._lending:
            self.ready.append(stage)

    def run(self) -> None:
        """Updates the stages that are ready."""
        chosen = frozenset[int]().union(*(self._of_stage[stage] for stage in self.ready))
        self.ready.clear()
        step_some(self._optimizer, chosen)
        self._done |= chosen

    def finish(self) -> None:
        """Updates all that is left, at the end of a step."""
        everything: set[int] = set()
        for group in self._optimizer.param_groups:
            everything.update(map(id, group["params"]))
        step_some(self._optimizer, everything - self._done)
        self._forget()

    def _forget(self) -> None:
        self._done.clear()
        self.ready.clear()


def step_some(optimizer: torch.optim.Optimizer, chosen: Collection[int]) -> None:
    """One `step()` that sees only the parameters with these ids."""
    groups = optimizer.param_groups
    whole = [group["params"] for group in groups]
    try:
        for group, parameters in zip(groups, whole, strict=True):
            group["params"] = [parameter for parameter in parameters if id(parameter) in chosen]
        optimizer.step()
    finally:
        for group, parameters in zip(groups, whole, strict=True):
            group["params"] = parameters
