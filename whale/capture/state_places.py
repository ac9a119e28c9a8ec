"""Places in which a forward can keep something for its next call: what each of them holds now, what
was changed since, and how it becomes as it was.
"""

from __future__ import annotations

import gc
import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import Tensor, nn

OF_TORCH = frozenset(vars(nn.Module()))  # hooks, parameters, buffers, submodules, the mode
DEEPEST_OUTSIDE = 3
CONTAINERS = (dict, list, set, deque, tuple)
PLAIN_CONTAINERS = (*CONTAINERS, OrderedDict, defaultdict)
"""looked into outside of models: a mapping of transformers imports what it is asked for"""
PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CODE = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, staticmethod, classmethod)

_SYMBOLIC = (Tensor, torch.SymInt, torch.SymFloat)
_DATA = (*_SYMBOLIC, int, float, complex)
MISSING = object()

Change = tuple[Any, Any]
"""(value before, value now)"""


class Namespace:
    """The names of a module of the model, of a class, or of a Python module."""

    def __init__(self, prefix: str, owner: Any, is_outside: bool) -> None:
        self._prefix = prefix
        self._owner = owner
        self._is_outside = is_outside
        self.before = self._now()

    def _now(self) -> dict[str, Any]:
        found = {}
        for name, value in list(vars(self._owner).items()):
            # a module that forward imports is a name of its package from then on
            if name not in OF_TORCH and not name.startswith("__") and not isinstance(value, _CODE):
                found[name] = value
        return found

    def changed(self) -> Iterator[tuple[str, Change]]:
        now = self._now()
        for name in {**self.before, **now}:
            before = self.before.get(name, MISSING)
            value = now.get(name, MISSING)
            if is_same(before, value):
                continue
            if not self._is_outside or _holds_data(before) or _holds_data(value):
                yield dotted(self._prefix, name), (before, value)

    def restore(self) -> None:
        # not by the owner's own `__setattr__`: a module of torch keeps tensors elsewhere
        setter: Any = type if isinstance(self._owner, type) else object
        for name in self._now().keys() - self.before.keys():
            setter.__delattr__(self._owner, name)
        for name, value in self.before.items():
            if not is_same(vars(self._owner).get(name, MISSING), value):
                setter.__setattr__(self._owner, name, value)


class Container:
    """A dict, list, set or deque."""

    def __init__(self, name: str, container: Any, is_outside: bool) -> None:
        self._name = name
        self._container = container
        self._is_outside = is_outside
        is_dict = isinstance(container, dict)
        self._contents: Any = dict(container) if is_dict else list(container)

    def changed(self) -> Iterator[tuple[str, Change]]:
        now = self._container
        before = self._contents
        is_same = len(now) == len(before) and _are_same(now, before)
        if is_same and isinstance(now, dict):
            is_same = _are_same(now.values(), before.values())
        if not is_same and not (self._is_outside and not _holds_data(now)):
            yield self._name, (before, now)

    def restore(self) -> None:
        self._container.clear()
        if isinstance(self._container, (dict, set)):
            self._container.update(self._contents)
        else:
            self._container.extend(self._contents)


@dataclass
class Cache:
    """A function under `functools.lru_cache`. Only what holds tensors counts: others are functions
    of their arguments.
    """

    name: str
    function: Any

    def __post_init__(self) -> None:
        self._misses = self.function.cache_info().misses

    def changed(self) -> Iterator[tuple[str, Change]]:
        if self.function.cache_info().misses != self._misses:
            if any(_holds_data(each, _SYMBOLIC) for each in gc.get_referents(self.function)):
                yield self.name, (None, self.function)

    def restore(self) -> None:
        self.function.cache_clear()
        self._misses = self.function.cache_info().misses


@dataclass
class Cell:
    """A variable of a closure, which a function inside of it can set."""

    name: str
    cell: CellType

    def __post_init__(self) -> None:
        self._before = content_of(self.cell)

    def changed(self) -> Iterator[tuple[str, Change]]:
        now = content_of(self.cell)
        if not is_same(self._before, now) and (_holds_data(now) or _holds_data(self._before)):
            yield self.name, (self._before, now)

    def restore(self) -> None:
        if self._before is MISSING:
            del self.cell.cell_contents
        else:
            self.cell.cell_contents = self._before


class Attributes:
    """Slots of a module of the model or of an object, or what an object of the user's own holds
    outside of the model. Of the latter only tensors and sizes count: other threads of a script may
    set its attributes meanwhile.
    """

    def __init__(
        self, prefix: str, owner: Any, slots: Mapping[str, Any], outside: bool = False
    ) -> None:
        self._prefix = prefix
        self._owner = owner
        self._slots = slots
        self._kinds: tuple[type, ...] = _SYMBOLIC if outside else (object,)
        self._has_names = outside and hasattr(owner, "__dict__")
        self._before = self._now()

    def _now(self) -> dict[str, Any]:
        found = {name: read_slot(slot, self._owner) for name, slot in self._slots.items()}
        return {**found, **vars(self._owner)} if self._has_names else found

    def _changes(self) -> dict[str, Change]:
        now = self._now()
        found = {}
        for name in {**self._before, **now}:
            change = (self._before.get(name, MISSING), now.get(name, MISSING))
            if not is_same(*change) and any(_holds_data(each, self._kinds) for each in change):
                found[name] = change
        return found

    def changed(self) -> Iterator[tuple[str, Change]]:
        for name, change in self._changes().items():
            yield dotted(self._prefix, name), change

    def restore(self) -> None:
        for name, (before, _) in self._changes().items():
            if name not in self._slots:
                names = vars(self._owner)
                names.pop(name)
                if before is not MISSING:
                    names[name] = before
            elif before is MISSING:
                self._slots[name].__delete__(self._owner)
            else:
                self._slots[name].__set__(self._owner, before)


Place = Namespace | Container | Cache | Cell | Attributes


def is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return type(one) is type(other) and isinstance(one, PLAIN) and bool(one == other)


def _are_same(some: Iterable[Any], others: Iterable[Any]) -> bool:
    """Whether all items are the same. The samples of a user's script may be a list of millions,
    which nobody touches: these are looked at without a call of Python for each.
    """
    return all(map(operator.is_, some, others)) or all(map(is_same, some, others))


def _holds_data(value: Any, kinds: tuple[type, ...] = _DATA, depth: int = DEEPEST_OUTSIDE) -> bool:
    """Whether it is a tensor or number, or has one inside. What else packages fill outside of
    models, objects that they look up by type, is no part of a forward.
    """
    if isinstance(value, kinds):
        return True
    if not depth or type(value) not in PLAIN_CONTAINERS:
        return False
    items = value.values() if isinstance(value, dict) else value
    return any(_holds_data(each, kinds, depth - 1) for each in items)


def content_of(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that is not set yet
        return MISSING


def slot_attributes(owner: Any) -> dict[str, Any]:
    """The attributes that an object holds without a dict, by name."""
    found: dict[str, Any] = {}
    for cls in type(owner).__mro__:
        if "__slots__" in vars(cls):
            for name, slot in vars(cls).items():
                if isinstance(slot, MemberDescriptorType):
                    found.setdefault(name, slot)
    return found


def read_slot(slot: Any, owner: Any) -> Any:
    try:
        return slot.__get__(owner)
    except AttributeError:  # not set yet
        return MISSING


def dotted(prefix: str, leaf: str) -> str:
    return f"{prefix}.{leaf}" if prefix else leaf
