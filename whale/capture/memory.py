"""What a forward can keep for its next call besides parameters and buffers.

    on the model       attributes of its modules, in `__slots__` too, and dicts, lists, objects and
                       functions inside of these
    outside            names of the classes of its modules and of the Python modules that these stand
                       in, dicts, lists and functions there, and objects of the user's own classes
    in functions       variables of closures, defaults and attributes
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

from whale.capture.errors import is_user_file
from whale.compat import tensor_stores
from whale.names import names_of

_OF_TORCH = frozenset(vars(nn.Module()))  # hooks, parameters, buffers, submodules, the mode
_LRU_CACHE = type(functools.lru_cache(lambda: None))
_NOT_THE_USERS = frozenset({*names_of("torch numpy sympy whale"), *sys.stdlib_module_names})
DEEPEST = 6
"""containers and objects inside of each other that are looked into on the model"""
DEEPEST_OUTSIDE = 3
OF_LOSS = "the loss"
_CONTAINERS = (dict, list, set, deque, tuple)
_PLAIN_CONTAINERS = (*_CONTAINERS, OrderedDict, defaultdict)
"""looked into outside of models: a mapping of transformers imports what it is asked for"""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CODE = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, staticmethod, classmethod)
_OPAQUE = (Tensor, type, ModuleType, BuiltinFunctionType, staticmethod, classmethod)
"""what is not looked into"""

_SYMBOLIC = (Tensor, torch.SymInt, torch.SymFloat)
_DATA = (*_SYMBOLIC, int, float, complex)
_NAMES_OF_PYTHON = frozenset(names_of("__builtins__ __path__ __all__ __annotations__ __doc__"))

_MISSING = object()

Change = tuple[Any, Any]
"""(value before, value now)"""


class Memory:
    """What a forward can keep, as it is now."""

    def __init__(self, model: nn.Module, loss: Any = None) -> None:
        self._places: list[_Place] = []
        seen: set[int] = {id(module) for module in model.modules()}
        for prefix, module in model.named_modules():
            self._places.append(_Namespace(prefix, module, is_outside=False))
            if slots := _slots_of(module):
                self._places.append(_Attributes(prefix, module, slots))
            for leaf, value in list(vars(module).items()):
                if leaf not in _OF_TORCH:
                    self._places += _places_in(_join(prefix, leaf), value, seen)
            for leaf, slot in slots.items():
                self._places += _places_in(_join(prefix, leaf), _read(slot, module), seen)
        self._places += _places_outside(OF_LOSS, loss, seen)
        for prefix, owner in _outside(model):
            self._places.append(_Namespace(prefix, owner, is_outside=True))
            for leaf, value in list(vars(owner).items()):
                if leaf not in _NAMES_OF_PYTHON and not _keeps_nothing(value):
                    self._places += _places_outside(_join(prefix, leaf), value, seen)

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


@dataclass
class _Cell:
    """A variable of a closure, which a function inside of it can set."""

    name: str
    cell: CellType

    def __post_init__(self) -> None:
        self._before = _content(self.cell)

    def changed(self) -> Iterator[tuple[str, Change]]:
        now = _content(self.cell)
        if not _is_same(self._before, now) and (_holds_data(now) or _holds_data(self._before)):
            yield self.name, (self._before, now)

    def restore(self) -> None:
        if self._before is _MISSING:
            del self.cell.cell_contents
        else:
            self.cell.cell_contents = self._before


class _Attributes:
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
        found = {name: _read(slot, self._owner) for name, slot in self._slots.items()}
        return {**found, **vars(self._owner)} if self._has_names else found

    def _changes(self) -> dict[str, Change]:
        now = self._now()
        found = {}
        for name in {**self._before, **now}:
            change = (self._before.get(name, _MISSING), now.get(name, _MISSING))
            if not _is_same(*change) and any(_holds_data(each, self._kinds) for each in change):
                found[name] = change
        return found

    def changed(self) -> Iterator[tuple[str, Change]]:
        for name, change in self._changes().items():
            yield _join(self._prefix, name), change

    def restore(self) -> None:
        for name, (before, _) in self._changes().items():
            if name not in self._slots:
                names = vars(self._owner)
                names.pop(name)
                if before is not _MISSING:
                    names[name] = before
            elif before is _MISSING:
                self._slots[name].__delete__(self._owner)
            else:
                self._slots[name].__set__(self._owner, before)


_Place = _Namespace | _Held | _Cache | _Cell | _Attributes


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


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that is not set yet
        return _MISSING


def _slots_of(owner: Any) -> dict[str, Any]:
    """The attributes that an object holds without a dict, by name."""
    found: dict[str, Any] = {}
    for cls in type(owner).__mro__:
        if "__slots__" in vars(cls):
            for name, slot in vars(cls).items():
                if isinstance(slot, MemberDescriptorType):
                    found.setdefault(name, slot)
    return found


def _read(slot: Any, owner: Any) -> Any:
    try:
        return slot.__get__(owner)
    except AttributeError:  # not set yet
        return _MISSING


def _places_in(name: str, value: Any, seen: set[int]) -> Iterator[_Place]:
    """Everything at and inside of a value of the model that can be changed: dicts, lists, sets,
    deques, objects and functions.
    """
    waiting = [(value, DEEPEST)]
    while waiting:
        each, left = waiting.pop()
        if id(each) in seen or each is _MISSING or isinstance(each, (*_PLAIN, *_OPAQUE)):
            continue
        seen.add(id(each))
        inside: Iterable[Any] = ()
        if isinstance(each, nn.Module):
            yield from _places_of_module(name, each, seen)
        elif isinstance(each, MethodType):
            inside = [each.__func__]  # what it is bound to may be a whole trainer
        elif isinstance(each, FunctionType):
            yield from _cells(name, each)
            inside = [*_held_by(each), vars(each)]
        elif isinstance(each, _CONTAINERS):
            if not isinstance(each, tuple):
                yield _Held(name, each, is_outside=False)
            inside = each.values() if isinstance(each, dict) else each
        else:
            if slots := _slots_of(each):
                yield _Attributes(name, each, slots)
            inside = [_read(slot, each) for slot in slots.values()]
            names = getattr(each, "__dict__", None)
            if isinstance(names, dict) and id(names) not in seen:
                seen.add(id(names))
                yield _Held(name, names, is_outside=False)
                inside = [*inside, *names.values()]
        if left > 1:
            # a script may hold millions of numbers in a list
            waiting += [(item, left - 1) for item in inside if type(item) not in _PLAIN]


def _places_outside(name: str, value: Any, seen: set[int]) -> Iterator[_Place]:
    """The same of a name outside of the model, where a package has thousands: objects of the
    user's own classes only, and nothing inside of them.
    """
    waiting = [(value, DEEPEST_OUTSIDE)]
    while waiting:
        each, left = waiting.pop()
        if isinstance(each, (staticmethod, classmethod)):
            each = each.__func__
        kind = type(each)  # a proxy of a package may import or fail when it is asked for its class
        if id(each) in seen or kind in _PLAIN or issubclass(kind, _OPAQUE):
            continue
        seen.add(id(each))
        inside: Iterable[Any] = ()
        if kind is _LRU_CACHE:
            yield _Cache(name, each)
        elif issubclass(kind, nn.Module):
            yield from _places_of_module(name, each, seen)
        elif kind is MethodType:
            inside = [each.__func__, each.__self__]
        elif kind is FunctionType:
            inside = _held_by(each)
            if _is_own((each.__module__ or "").partition(".")[0]):
                yield from _cells(name, each)
                inside = [*inside, vars(each)]
        elif kind in _PLAIN_CONTAINERS:
            if kind is not tuple:
                yield _Held(name, each, is_outside=True)
            inside = each.values() if isinstance(each, dict) else each
        elif _is_own(kind.__module__.partition(".")[0]):
            yield _Attributes(name, each, _slots_of(each), outside=True)
        if left > 1:
            # a script may hold millions of numbers in a list
            waiting += [(item, left - 1) for item in inside if type(item) not in _PLAIN]


def _keeps_nothing(value: Any) -> bool:
    """Whether it is one of the many names of a package that `_places_outside` finds nothing at: a
    class, a module, a plain function, a number. A package has tens of thousands of them.
    """
    kind = type(value)
    if kind is FunctionType:
        held = value.__closure__ or value.__defaults__ or value.__kwdefaults__
        return not held and not _is_own((value.__module__ or "").partition(".")[0])
    if kind is staticmethod or kind is classmethod:
        return False
    return kind in _PLAIN or issubclass(kind, _OPAQUE)


def _places_of_module(name: str, module: nn.Module, seen: set[int]) -> Iterator[_Place]:
    """Attributes and buffers of a module that is no part of the model: a loss with a running centre,
    a teacher in a list.
    """
    for prefix, each in module.named_modules():
        if each is module or id(each) not in seen:
            seen.add(id(each))
            own = _join(name, prefix) if prefix else name
            yield _Namespace(own, each, is_outside=True)
            for store in tensor_stores(each):
                yield _Held(own, store, is_outside=True)


def _cells(name: str, function: FunctionType) -> Iterator[_Cell]:
    for cell in function.__closure__ or ():
        yield _Cell(name, cell)


def _held_by(function: FunctionType) -> list[Any]:
    """What a function keeps from call to call, but for its own attributes."""
    held = [*map(_content, function.__closure__ or ()), *(function.__defaults__ or ())]
    return [*held, *(function.__kwdefaults__ or {}).values()]


def _join(prefix: str, leaf: str) -> str:
    return f"{prefix}.{leaf}" if prefix else leaf
