"""What a forward can keep for its next call besides parameters and buffers.

    on the model       attributes of its modules, and dicts, lists and objects inside of these
    outside            names of the classes of its modules and of the Python modules that these stand
                       in, dicts and lists there, in closures and in defaults of functions
    in caches          of functions under `functools.lru_cache`

An export leaves tensors without data there, a comparison those of its samples: `Memory.restore`
takes both back. What a forward reads again in its next call is found by `second_call`.
"""

from __future__ import annotations

import functools
import gc
import operator
import os
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from whale.capture.errors import is_user_file
from whale.names import names_of

_OF_TORCH = frozenset(vars(nn.Module()))  # hooks, parameters, buffers, submodules, the mode
_LRU_CACHE = type(functools.lru_cache(lambda: None))
_NOT_THE_USERS = frozenset({*names_of("torch numpy sympy whale"), *sys.stdlib_module_names})
DEEPEST = 6
"""containers and objects inside of each other that are looked into on the model"""
DEEPEST_OUTSIDE = 3
_CONTAINERS = (dict, list, set, deque, tuple)
_PLAIN_CONTAINERS = (*_CONTAINERS, OrderedDict, defaultdict)
"""looked into outside of models: a mapping of transformers imports what it is asked for"""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CODE = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, staticmethod, classmethod)
_NOT_LOOKED_INTO = (Tensor, nn.Module, *_CODE)

_SYMBOLIC = (Tensor, torch.SymInt, torch.SymFloat)
_DATA = (*_SYMBOLIC, int, float, complex)
_NAMES_OF_PYTHON = frozenset(names_of("__builtins__ __path__ __all__ __annotations__ __doc__"))

_MISSING = object()

Change = tuple[Any, Any]
"""(value before, value now)"""


class Memory:
    """What a forward can keep, as it is now."""

    def __init__(self, model: nn.Module) -> None:
        self._places: list[_Namespace | _Held | _Cache] = []
        seen: set[int] = set()
        for prefix, module in model.named_modules():
            own = _Namespace(prefix, module, is_outside=False)
            self._places.append(own)
            for leaf, value in own.before.items():
                for container in containers(value, seen, DEEPEST):
                    self._places.append(_Held(_join(prefix, leaf), container, is_outside=False))
        for prefix, owner in _outside(model):
            self._places.append(_Namespace(prefix, owner, is_outside=True))
            for leaf, value in list(vars(owner).items()):
                self._add_outside(prefix, leaf, value, seen)

    def _add_outside(self, prefix: str, leaf: str, value: Any, seen: set[int]) -> None:
        if type(value) is _LRU_CACHE:
            self._places.append(_Cache(_join(prefix, leaf), value))
            return
        values: list[Any] = [value]
        function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        if isinstance(function, FunctionType):
            values = [*_closure(function), *(function.__defaults__ or ())]
            values += (function.__kwdefaults__ or {}).values()
        for each in values:
            if type(each) in _PLAIN_CONTAINERS and leaf not in _NAMES_OF_PYTHON:
                for container in containers(each, seen, DEEPEST_OUTSIDE, with_objects=False):
                    self._places.append(_Held(_join(prefix, leaf), container, is_outside=True))

    def changed(self) -> dict[str, Change]:
        """What was set or changed since, by name."""
        found: dict[str, Change] = {}
        for place in self._places:
            for name, change in place.changed():
                found.setdefault(name, change)
        return found

    def restore(self) -> None:
        """Makes everything as it was in the beginning."""
        for place in self._places:
            if any(True for _ in place.changed()):
                place.restore()


def numbers_of(changes: Mapping[str, Change]) -> dict[str, Change]:
    """The plain numbers among changes."""
    numbers = {}
    for name, (before, after) in changes.items():
        if isinstance(before, (int, float)) and isinstance(after, (int, float)):
            numbers[name] = (before, after)
    return numbers


# --- places


class _Namespace:
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
            if name not in _OF_TORCH and not name.startswith("__") and not isinstance(value, _CODE):
                found[name] = value
        return found

    def changed(self) -> Iterator[tuple[str, Change]]:
        now = self._now()
        for name in {**self.before, **now}:
            before = self.before.get(name, _MISSING)
            value = now.get(name, _MISSING)
            if _is_same(before, value):
                continue
            if not self._is_outside or _holds_data(before) or _holds_data(value):
                yield _join(self._prefix, name), (before, value)

    def restore(self) -> None:
        # not by the owner's own `__setattr__`: a module of torch keeps tensors elsewhere
        setter: Any = type if isinstance(self._owner, type) else object
        for name in self._now().keys() - self.before.keys():
            setter.__delattr__(self._owner, name)
        for name, value in self.before.items():
            if not _is_same(vars(self._owner).get(name, _MISSING), value):
                setter.__setattr__(self._owner, name, value)


class _Held:
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
class _Cache:
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


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return type(one) is type(other) and isinstance(one, _PLAIN) and bool(one == other)


def _are_same(some: Iterable[Any], others: Iterable[Any]) -> bool:
    """Whether all items are the same. The samples of a user's script may be a list of millions, which
    nobody touches: these are looked at without a call of Python for each.
    """
    return all(map(operator.is_, some, others)) or all(map(_is_same, some, others))


def _holds_data(value: Any, kinds: tuple[type, ...] = _DATA, depth: int = DEEPEST_OUTSIDE) -> bool:
    """Whether it is a tensor or number, or has one inside. What else packages fill outside of models,
    objects that they look up by type, is no part of a forward.
    """
    if isinstance(value, kinds):
        return True
    if not depth or type(value) not in _PLAIN_CONTAINERS:
        return False
    items = value.values() if isinstance(value, dict) else value
    return any(_holds_data(each, kinds, depth - 1) for each in items)


# --- where to look


def _outside(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Classes of the modules of a model, Python modules of their packages and those that are the
    user's own, each with its name.
    """
    packages = set()
    for cls in {cls for module in model.modules() for cls in type(module).__mro__}:
        package = cls.__module__.partition(".")[0]
        if package not in _NOT_THE_USERS:
            packages.add(package)
            yield cls.__qualname__, cls
    for name, module in list(sys.modules.items()):
        package = name.partition(".")[0]
        if (package in packages or _is_own(package)) and isinstance(module, ModuleType):
            yield name, module


@functools.cache
def _is_own(package: str) -> bool:
    """Whether it is the user's script or beside it, not an installed package."""
    if package == "__main__" or package in _NOT_THE_USERS:
        return package == "__main__"
    module = sys.modules.get(package)
    folders = [*getattr(module, "__path__", ())]
    file = getattr(module, "__file__", None) or (folders[0] if folders else None)
    return isinstance(file, str) and is_user_file(file) and f"-packages{os.sep}" not in file


def _closure(function: FunctionType) -> list[Any]:
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # a name that is not set yet
            continue
    return found


def containers(value: Any, seen: set[int], depth: int, with_objects: bool = True) -> Iterator[Any]:
    """Every dict, list, set and deque at and inside of the value, attributes of objects too."""
    waiting = [(value, depth)]
    while waiting:
        each, left = waiting.pop()
        container = each
        is_container = type(each) in _PLAIN_CONTAINERS or (
            with_objects and isinstance(each, _CONTAINERS)
        )
        if not is_container:
            if not with_objects or isinstance(each, _NOT_LOOKED_INTO):
                continue
            container = getattr(each, "__dict__", None)
        if container is None or id(container) in seen:
            continue
        seen.add(id(container))
        if not isinstance(container, tuple):
            yield container
        if left > 1:
            items = container.values() if isinstance(container, dict) else container
            waiting += [(item, left - 1) for item in items if not isinstance(item, _PLAIN)]


def _join(prefix: str, leaf: str) -> str:
    return f"{prefix}.{leaf}" if prefix else leaf
