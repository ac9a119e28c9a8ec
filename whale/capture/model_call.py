"""How a model is called with a batch, where its loss comes from, and which tensors its output
has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from inspect import Parameter, signature
from typing import Any

import torch

from whale.compat import pytree

Loss = Callable[[Any, Any], torch.Tensor]
"""`loss(output, batch)` gives the scalar to be trained on"""


def call_model(model: torch.nn.Module, batch: Any) -> Any:
    """A dict is keyword arguments, a tuple or list positional ones, a tensor the only one."""
    if isinstance(batch, dict):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


def taken_by_forward(model: torch.nn.Module, batch: Any) -> Any:
    """The part of a batch that `forward` has arguments for, when the rest is there for
    `loss(output, batch)`: `(x, y)` for `forward(x)`.
    """
    arguments = signature(model.forward).parameters.values()
    kinds = [argument.kind for argument in arguments]
    if isinstance(batch, dict):
        if Parameter.VAR_KEYWORD in kinds:
            return batch
        named = {each.name for each in arguments if each.kind is not Parameter.POSITIONAL_ONLY}
        return {name: value for name, value in batch.items() if name in named}
    if not isinstance(batch, (tuple, list)) or Parameter.VAR_POSITIONAL in kinds:
        return batch
    return tuple(batch[: len(kinds) - kinds.count(Parameter.KEYWORD_ONLY)])


def left_to_the_loss(model: torch.nn.Module, batch: Any) -> list[str]:
    """Keys or places of a batch that only the loss gets."""
    taken = taken_by_forward(model, batch)
    if isinstance(batch, dict):
        return [f"[{key!r}]" for key in batch if key not in taken]
    if isinstance(batch, (tuple, list)):
        return [f"[{place}]" for place in range(len(taken), len(batch))]
    return []


def loss_of(output: Any, batch: Any, loss: Loss | None) -> Any:
    """The scalar to be trained on: `loss(output, batch)`, `output.loss`, `output["loss"]` or the
    output itself.
    """
    if loss is not None:
        return loss(output, batch)
    if isinstance(output, dict):
        return output.get("loss")
    return output.loss if hasattr(output, "loss") else output


def no_loss(output: Any, value: Any, loss: Loss | None) -> str:
    """The message for a model or loss function that gave something else than a scalar."""
    is_tensor = isinstance(value, torch.Tensor)
    got = f"a tensor of shape {list(value.shape)}" if is_tensor else type(value).__name__
    if loss is not None:
        return f"loss(output, batch) gave {got}: it must give a scalar tensor"
    if isinstance(output, (tuple, list)) and not hasattr(output, "loss"):
        return (
            f"the model gave a {type(output).__name__}: name the loss in it, such as loss=lambda "
            "output, batch: output[0]"
        )
    gave = got if value is output else f"{type(output).__name__} whose loss is {got}"
    return (
        f"the model gave {gave}: pass loss=lambda output, batch: ..., or give the model its labels "
        "so that it returns a scalar or something with .loss"
    )


def output_leaves(output: Any) -> tuple[list[torch.Tensor | None], Any, list[str]]:
    """Leaves of the model's output (None where there is no tensor), their structure, and the names
    of what is left out, such as caches.
    """
    dropped: list[str] = []

    def plain(value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor) or value is None:
            return value
        if isinstance(value, dict):
            return {key: plain(item, f"{path}.{key}") for key, item in value.items()}
        if is_dataclass(value) and not isinstance(value, type):
            return {
                field.name: plain(getattr(value, field.name), f"{path}.{field.name}")
                for field in fields(value)
            }
        if isinstance(value, (tuple, list)):
            items = [plain(item, f"{path}[{place}]") for place, item in enumerate(value)]
            if hasattr(value, "_fields"):
                return type(value)(*items)  # a named tuple
            return tuple(items) if isinstance(value, tuple) else items
        dropped.append(path)
        return None

    leaves, structure = pytree.tree_flatten(
        plain(output, "output"), is_leaf=lambda leaf: leaf is None
    )
    return leaves, structure, dropped
