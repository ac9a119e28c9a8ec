"""What a forward keeps on the model from one call to the next, besides what it writes in place.

    self.count = self.count + 1      `count` is a buffer     assigned_buffers_written: becomes a write, as `self.count.add_(1)` is
    self.count += 1                  a Python number         the captured graph would keep its first value for ever
    self.mean = 0.9 * self.mean      a plain tensor          the same

The last two are no part of a graph. `changed_attributes` names them; the self-check runs the model
twice and refuses one whose result depends on them (`compare_with_eager`), and the others are told
in the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from whale.capture.errors import CaptureError
from whale.compat import tensor_stores

Attributes = dict[str, Any]
"""name inside the model -> value, or what stands for it"""

_OF_TORCH = tuple(vars(nn.Module()))  # hooks, parameters, buffers, submodules, the mode


@contextmanager
def assigned_buffers_written(model: nn.Module) -> Iterator[None]:
    """`self.buffer = new` inside becomes `self.buffer.copy_(new)` at the end, which is what a
    capture keeps.
    """
    before = [(name, store, leaf, store[leaf]) for name, store, leaf in _buffers(model)]
    yield
    for name, store, leaf, old in before:
        new = store.get(leaf)
        if new is old or old is None:
            continue
        store[leaf] = old
        _check_assigned(name, old, new)
        assert new is not None
        with torch.no_grad():
            old.copy_(new)


def _buffers(model: nn.Module) -> list[tuple[str, dict[str, torch.Tensor | None], str]]:
    found: list[tuple[str, dict[str, torch.Tensor | None], str]] = []
    for module_name, module in model.named_modules():
        store = tensor_stores(module)[1]
        found.extend(
            (f"{module_name}.{leaf}" if module_name else leaf, store, leaf) for leaf in store
        )
    return found


def _check_assigned(name: str, old: torch.Tensor, new: torch.Tensor | None) -> None:
    if new is None:
        raise CaptureError(
            f"forward sets the buffer {name} to None or removes it: a captured buffer stays. "
            "Write a value instead"
        )
    if new.shape != old.shape or new.dtype != old.dtype:
        raise CaptureError(
            f"forward gives the buffer {name} another form: {_form(old)} becomes {_form(new)}. A "
            "captured buffer keeps its form: "
            f"make it as large as it may become, and cast what is written to it"
        )
    if new.requires_grad:
        raise CaptureError(
            f"forward assigns to the buffer {name} a value that carries a gradient, which local "
            "training could not go back through in the "
            f"next step: assign `value.detach()`"
        )


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def attributes(model: nn.Module) -> Attributes:
    """The Python attributes of all modules of a model: numbers and text as they are, a container by
    its items, others by identity.
    """
    found: Attributes = {}
    for module_name, module in model.named_modules():
        for leaf, value in vars(module).items():
            if leaf not in _OF_TORCH:
                found[f"{module_name}.{leaf}" if module_name else leaf] = _stand_in(value)
    return found


def _stand_in(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, dict):
        return (
            dict,
            {key: id(item) for key, item in value.items()},
            value,
        )  # the value itself too: an id lives as long as its object
    if isinstance(value, (list, tuple, set)):
        return type(value), [id(item) for item in value], value
    return _Same(value)


class _Same:
    """Equal to itself only."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


def changed_attributes(before: Attributes, after: Attributes) -> list[str]:
    """Names of what was set or changed in between."""
    return [
        name
        for name, value in after.items()
        if name not in before or not _is_equal(before[name], value)
    ]


def changed_numbers(before: Attributes, after: Attributes) -> dict[str, tuple[Any, Any]]:
    """Numbers among them: name -> (before, after)."""
    return {
        name: (before[name], after[name])
        for name in changed_attributes(before, after)
        if isinstance(after[name], (bool, int, float))
        and isinstance(before.get(name), (bool, int, float))
    }


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return bool(one[:2] == other[:2])
    return bool(one == other)
