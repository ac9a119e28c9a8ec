"""What one operation saves for its backward, and where its results lie: torch says it, as it says
FLOP (`flops.py`), so no row repeats it.

An operation is run once on fake tensors for each form of its arguments, while autograd is watched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from whale.compat import enter_autocast, exit_autocast


@dataclass(frozen=True, slots=True)
class TensorForm:
    """All that an operation sees of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> TensorForm:
        return TensorForm(
            tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
        )

    def make(self) -> Tensor:
        return torch.empty_strided(
            self.shape,
            self.stride,
            dtype=self.dtype,
            device=self.device,
            requires_grad=self.requires_grad,
        )


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor of the graph: its form, and the number of the storage that it lies in."""

    form: TensorForm
    storage: int


@dataclass(frozen=True)
class Effect:
    """What an operation does with storages. They are numbered: first those of its tensor arguments
    in order, then new ones.
    """

    result: Any
    """as the operation gives it, tensors as `Placed` with such numbers"""
    saved: frozenset[int]
    new_bytes: tuple[int, ...]
    """of each new storage"""


class Effects:
    """Runs each operation once for each form of its arguments."""

    def __init__(self) -> None:
        self._known: dict[Any, Effect] = {}
        self._packed: list[Any] | None = None

    def of(self, node: Node, args: Any, kwargs: Any) -> Effect:
        region = node.meta.get("autocast")
        key = (node.target, _hashable(region), _hashable(args), _hashable(kwargs))
        if key not in self._known:
            self._known[key] = self._run(node, region, args, kwargs)
        return self._known[key]

    def pack(self, tensor: Tensor) -> Tensor:
        """Called by autograd for all that it saves."""
        if self._packed is not None:
            self._packed.append(tensor.untyped_storage())
        return tensor

    def _run(self, node: Node, region: Any, args: Any, kwargs: Any) -> Effect:
        storages: list[Any] = []  # kept alive until the end, so that the id of each stays its own

        def make(value: Any) -> Any:
            if not isinstance(value, Placed):
                return value
            tensor = value.form.make()
            storages.append(tensor.untyped_storage())
            return tensor

        fake_args = mapped(args, make)
        fake_kwargs = mapped(kwargs, make)
        num_given = len(storages)
        number = {id(storage): place for place, storage in enumerate(storages)}

        def place(storage: Any) -> int:
            if id(storage) not in number:
                number[id(storage)] = len(storages)
                storages.append(storage)
            return number[id(storage)]

        self._packed = []
        entered = enter_autocast(*region) if region is not None else None
        try:
            assert callable(node.target)
            result = node.target(*fake_args, **fake_kwargs)
        finally:
            if entered is not None:
                exit_autocast(entered)
            packed = self._packed
            self._packed = None
        placed = mapped(
            list(result) if isinstance(result, tuple) else result,
            lambda value: (
                Placed(TensorForm.of(value), place(value.untyped_storage()))
                if isinstance(value, Tensor)
                else value
            ),
        )
        saved = frozenset(map(place, packed))
        return Effect(
            placed, saved, tuple(int(storage.nbytes()) for storage in storages[num_given:])
        )


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Lists, tuples, dicts and slices with every element changed."""
    return map_aggregate(value, change)


def _hashable(value: Any) -> Any:
    """Arguments as a key; a number keeps its type, since 1, 1.0 and True are equal but not the same
    to an operation.
    """
    if isinstance(value, (list, tuple)):
        return tuple(map(_hashable, value))
    if isinstance(value, dict):
        return tuple((key, _hashable(item)) for key, item in value.items())
    if isinstance(value, slice):
        return ("slice", value.start, value.stop, value.step)
    return value.form if isinstance(value, Placed) else (type(value), value)
