"""Parameters of the user's model that a script changes behind the engine's back."""

from __future__ import annotations

import weakref

import torch

from whale.compat import num_writes

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
