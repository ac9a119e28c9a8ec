"""Gradients that a loop gives to weights itself, beside the engine: those of a penalty on weights that
it adds to the loss.

A rank may hold a part of the weights, of which such a term sees no other; and what the loop makes
of the loss reaches the engine as one factor, which is that of the batch alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from whale.runtime.engine import Engine


def refuse_gradients_from_outside(engine: Engine, model: torch.nn.Module) -> None:
    """From here on a backward that reaches the model's parameters, but is not the engine's own, is
    an error that names the parameter.
    """
    own = {id(each): (name, each) for name, each in model.named_parameters()}
    own |= {id(each): (name, each) for name, each in engine.named_parameters()}
    for name, parameter in own.values():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_refusal(weakref.ref(engine), name))


def _refusal(engine: weakref.ref[Engine], name: str) -> Callable[[Tensor], None]:
    """A hook that does not keep the engine alive: the collector does not see what hooks of a tensor
    hold.
    """

    def accumulated(parameter: Tensor) -> None:
        known = engine()
        if known is None or known.is_in_step or known.is_closed:
            return
        raise ValueError(
            f"backward reaches the parameter '{name}' of shape {list(parameter.shape)} beside the "
            "model's own loss, as that of a penalty on weights does: a rank may hold a part of the "
            "weights, and the ranks would train on another loss. Try: have the term in the loss "
            "that is captured, made of the model as it was before: prepare(..., loss=lambda "
            "output, batch: output.loss + penalty(model)) for Accelerate, compute_loss for "
            "transformers, training_step for Lightning"
        )

    return accumulated
