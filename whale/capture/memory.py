"""Tensors that a forward leaves on the model for its next call: tables that it would make anew, or
a memory of samples and weights that no graph has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from whale.capture.errors import NOWHERE
from whale.capture.guards import KEPT, REBUILT, Findings
from whale.compat import tensor_stores

_OF_TORCH = frozenset(vars(nn.Module()))  # hooks, parameters, buffers, submodules, the mode
DEEPEST = 6
"""containers and objects inside of each other that are looked into"""
_NOT_LOOKED_INTO = (
    Tensor,
    nn.Module,
    type,
    ModuleType,
    FunctionType,
    MethodType,
    BuiltinFunctionType,
)

State = list[tuple[Any, Any]]
"""container -> its contents"""


class Memory:
    """What the modules of a model keep besides parameters, as it is now. Buffers are looked at only
    as far as forward puts other tensors in their place with another form, or where none was.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = self.now()
        self._tensors = _tensors(model)
        self._buffers = []
        for prefix, module in model.named_modules():
            store = tensor_stores(module)[1]
            for leaf, old in store.items():
                value = None if old is None else old.detach().clone()
                self._buffers.append((_join(prefix, leaf), store, leaf, old, value))

    def left(self) -> Findings:
        """What forward has left since: buffers of another form, and attributes with other tensors."""
        found = Findings()
        known = {id(store): set[str]() for _, store, _, _, _ in self._buffers}
        for name, store, leaf, old, _ in self._buffers:
            known[id(store)].add(leaf)
            if _is_rebuilt(old, store.get(leaf)):
                found.add(REBUILT, name, NOWHERE)
        for prefix, module in self._model.named_modules():
            store = tensor_stores(module)[1]
            for leaf in store.keys() - known.get(id(store), set()):
                found.add(REBUILT, _join(prefix, leaf), NOWHERE)
        for name, tensors in _tensors(self._model).items():
            before = self._tensors.get(name, [])
            if tensors and [id(each) for each in tensors] != [id(each) for each in before]:
                found.add(KEPT, name, NOWHERE)
        return found

    def now(self) -> State:
        """The attributes and the buffers as they are."""
        state: State = []
        seen: set[int] = set()
        for module in self._model.modules():
            own = {name: value for name, value in vars(module).items() if name not in _OF_TORCH}
            state.append((module, own))
            for value in own.values():
                for container in containers(value, seen, DEEPEST):
                    state.append((container, copied(container)))
            store = tensor_stores(module)[1]
            state.append((store, dict(store)))
        return state

    def restore(self, state: State | None = None) -> None:
        """Makes everything as it was in the beginning; with `state`, only what forward kept is as it
        was then.
        """
        for container, contents in self._before if state is None else state:
            if isinstance(container, nn.Module):
                now = vars(container)
                for name in set(now) - set(contents) - _OF_TORCH:
                    del now[name]
                now.update(contents)
            else:
                refill(container, contents)
        with torch.no_grad():
            for _, store, leaf, old, value in self._buffers:
                if old is not None and value is not None:
                    old.copy_(value)
                if not _is_rebuilt(old, store.get(leaf)):
                    store[leaf] = old


def _is_rebuilt(old: Tensor | None, new: Tensor | None) -> bool:
    if new is None or new is old:
        return False
    return old is None or new.shape != old.shape or new.dtype != old.dtype


def _join(prefix: str, leaf: str) -> str:
    return f"{prefix}.{leaf}" if prefix else leaf


def _tensors(model: nn.Module) -> dict[str, list[Tensor]]:
    """The tensors in each attribute of the modules, also deep inside."""
    found: dict[str, list[Tensor]] = {}
    for prefix, module in model.named_modules():
        for leaf, value in vars(module).items():
            if leaf not in _OF_TORCH:
                found[_join(prefix, leaf)] = list(_inside(value, set(), DEEPEST))
    return found


def _inside(value: Any, seen: set[int], depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for each in _items(_container(value), seen, depth):
            yield from _inside(each, seen, depth - 1)


def containers(value: Any, seen: set[int], depth: int = DEEPEST) -> Iterator[Any]:
    """Every dict, list, set and deque at and inside of the value, attributes of objects too."""
    container = _container(value)
    if container is not None and id(container) not in seen and not isinstance(container, tuple):
        yield container
    for each in _items(container, seen, depth):
        yield from containers(each, seen, depth - 1)


def _container(value: Any) -> Any:
    """What holds the value's items; None for what has none, or is looked at elsewhere."""
    if isinstance(value, (dict, list, set, deque, tuple)):
        return value
    if isinstance(value, _NOT_LOOKED_INTO):
        return None
    return getattr(value, "__dict__", None)


def _items(container: Any, seen: set[int], depth: int) -> list[Any]:
    if container is None or not depth or id(container) in seen:
        return []
    seen.add(id(container))
    return list(container.values()) if isinstance(container, dict) else list(container)


def copied(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def refill(container: Any, contents: Any) -> None:
    """Puts back the items that a container had before."""
    if isinstance(container, dict):
        now = [(key, id(value)) for key, value in container.items()]
        if now != [(key, id(value)) for key, value in contents.items()]:
            container.clear()
            container.update(contents)
    elif [id(each) for each in container] != [id(each) for each in contents]:
        container.clear()
        if isinstance(container, set):
            container.update(contents)
        else:
            container.extend(contents)
