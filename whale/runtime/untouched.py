"""What a script does to its model and optimizer behind the engine's back."""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from whale.compat import ONLY_LOOKS, num_writes
from whale.error_reports import PACKAGE

logger = logging.getLogger("whale")

USE_ENGINE = (
    "after wh.parallelize this model is only a description: its weights are spread over the ranks. "
    "Try: engine.step and engine.evaluate to run it, engine.module() for a whole local model "
    "(generate, state_dict, to), engine.save_pretrained(folder) to save it"
)


class Untouched:
    """Notices a script that freezes parameters of the model between steps, or writes to those that
    are on `meta`: no rank would do either.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._seen = []
        for name, parameter in model.named_parameters():
            writes = num_writes(parameter) if parameter.is_meta else None
            self._seen.append((name, weakref.ref(parameter), parameter.requires_grad, writes))

    def check(self) -> None:
        for name, reference, is_trained, writes in self._seen:
            parameter = reference()
            if parameter is None:
                continue
            if parameter.requires_grad is not is_trained:
                raise ValueError(
                    f"requires_grad of {name} was set to {parameter.requires_grad} after "
                    "wh.parallelize, which has planned who trains what. Try: set it before, and "
                    "call wh.parallelize again where it changes (engine.module() has the weights "
                    "so far), or a group of its own in the optimizer with lr 0 for some steps"
                )
            if writes is not None and num_writes(parameter) != writes:
                raise ValueError(f"{name} was written to, but {USE_ENGINE}")


_TRAINED: weakref.WeakValueDictionary[int, torch.nn.Parameter] = weakref.WeakValueDictionary()
"""parameters of all engines of this process, by id"""


def refuse_steps_of_script(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Makes `step()` of any optimizer an error in a script, that of the engine or one left from an
    old loop: it would update the weights a second time.
    """
    _register()
    _TRAINED.update({id(parameter): parameter for parameter in parameters})


@cache
def _register() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if _is_call_of_whale():
        return
    for group in optimizer.param_groups:
        if any(_TRAINED.get(id(parameter)) is parameter for parameter in group["params"]):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() after wh.parallelize would update the weights "
                "a second time: engine.step(batch) does it. Try: leave it out; for a step in "
                "parts, engine.forward_backward, engine.accumulate and engine.update"
            )


setattr(_before_step, ONLY_LOOKS, True)


def warn_of_training(model: torch.nn.Module) -> RemovableHandle:
    """Says once that a script trains a model whose weights are all here without the engine."""
    warning = _TrainingWarning()
    warning.handle = model.register_forward_pre_hook(warning)
    return warning.handle


class _TrainingWarning:
    """The hook: no function inside of another one, so that such a model can be pickled."""

    handle: RemovableHandle | None = None

    def __call__(self, module: torch.nn.Module, _: Any) -> None:
        is_evaluation = not module.training or not torch.is_grad_enabled()
        if is_evaluation or torch.compiler.is_exporting() or _is_call_of_whale():
            return
        if self.handle is not None:
            self.handle.remove()
        logger.warning(
            "the model was called in training mode after wh.parallelize: gradients of that are "
            "this rank's own, and no step of the engine has them. Try: engine.step(batch), which "
            "is forward, backward, all-reduce and update; torch.no_grad() where none are wanted"
        )


def _is_call_of_whale() -> bool:
    """Whether Whale called what a hook of this file belongs to, and not the script."""
    passed = (f"{Path(torch.__file__).parent}{os.sep}", __file__)
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(passed):
        frame = frame.f_back
    return Path(frame.f_code.co_filename).is_relative_to(PACKAGE)
