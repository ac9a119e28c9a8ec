"""The optimizer that a script has made, made again for the parameters of one rank; and the one that
a training loop calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from whale.capture.clean import tied_names
from whale.runtime.engine import Engine
from whale.runtime.result import StepResult


class Remade:
    """Makes an optimizer of the same class, with the same groups and options, for whichever
    parameters a rank holds.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
        if optimizer.state:
            raise ValueError(
                f"this {type(optimizer).__name__} has made steps already: its state belongs to the "
                "whole model. Try: a new optimizer, and a checkpoint of Whale to resume from"
            )
        self._template = optimizer
        first = tied_names(model)
        named = {
            id(parameter): first[name]
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        self._groups: list[tuple[list[str], dict[str, Any]]] = []
        for group in optimizer.param_groups:
            missing = [p for p in group["params"] if id(p) not in named]
            if missing:
                raise ValueError(
                    f"the {type(optimizer).__name__} trains a parameter of shape "
                    f"{list(missing[0].shape)} that is not in the model. "
                    "Try: make the optimizer from the parameters of the model that is prepared"
                )
            options = {key: value for key, value in group.items() if key != "params"}
            self._groups.append(([named[id(p)] for p in group["params"]], options))

    def make(self, pairs: Iterator[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        """The optimizer of the rank that holds these parameters."""
        own = dict(pairs)
        return self._with([[own[n] for n in names if n in own] for names, _ in self._groups])

    def without_parameters(self) -> torch.optim.Optimizer:
        """The optimizer of a rank that trains nothing: schedulers still need the groups."""
        return self._with([[] for _ in self._groups])

    def _with(self, parameters: list[list[torch.nn.Parameter]]) -> torch.optim.Optimizer:
        made = object.__new__(type(self._template))
        made.__dict__.update(self._template.__dict__)
        # a scheduler has wrapped `step` of the first one, on the instance
        made.__dict__.pop("step", None)
        made.state = defaultdict(dict)
        made.param_groups = []
        for own, (names, options) in zip(parameters, self._groups, strict=True):
            group = {**options, "params": own}
            if "param_names" in options:
                group["param_names"] = list(names)
            made.param_groups.append(group)
        return made


class EngineOptimizer(torch.optim.Optimizer):
    """Stands where a loop has its optimizer: `step` updates the weights on all ranks."""

    _is_accelerate_prepared = True
    """Accelerate wraps it no further"""

    def __init__(self, engine: Engine | None, own: torch.optim.Optimizer) -> None:
        # monitors of learning rates name them by the class
        self.__class__ = type(type(own).__name__, (EngineOptimizer,), {})
        # not Optimizer.__init__: groups and state are those of this rank's optimizer
        self.engine = engine
        """None until there is one"""
        self.own = own
        self.result: StepResult | None = None
        """of the last update"""
        self._opt_called = False  # schedulers look at it

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.own.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.own.state

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        return self.own.defaults

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last update was left out on all ranks."""
        return self.result is not None and self.result.skipped

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = closure() if closure is not None else None
        self._opt_called = True
        assert self.engine is not None, "no batch was trained on"
        self.result = self.engine.update()
        return loss

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # nothing overrode it

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.engine is None:
            self.own.zero_grad(set_to_none)
        else:
            self.engine.zero_gradients()

    def state_dict(self) -> dict[str, Any]:
        """This rank's part; whole checkpoints are those of the engine."""
        return self.own.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.own.load_state_dict(state_dict)


def follow(scheduler: Any, optimizer: EngineOptimizer) -> Any:
    """Makes a scheduler that was made for another optimizer schedule this one."""
    for attribute in ("_schedulers", "schedulers"):  # SequentialLR, ChainedScheduler
        for inner in getattr(scheduler, attribute, ()):
            follow(inner, optimizer)
    scheduler.optimizer = optimizer
    return scheduler
