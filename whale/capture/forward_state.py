"""What a forward can keep for its next call besides parameters and buffers.

    on the model       attributes of its modules, in `__slots__` too, and dicts, lists, objects and
                       functions inside of these
    outside            names of the classes of its modules and of the Python modules that these
                       stand in, dicts, lists and functions there, and objects of the user's own
                       classes
    in functions       variables of closures, defaults and attributes
    in caches          of functions under `functools.lru_cache`

An export leaves tensors without data there, a comparison those of its samples:
`ForwardState.restore` takes both back. What a forward reads again in its next call is found by
`second_call`.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodType,
    ModuleType,
)
from typing import Any

from torch import Tensor, nn

from whale.capture.errors import is_user_file
from whale.capture.state_places import (
    CONTAINERS,
    DEEPEST_OUTSIDE,
    MISSING,
    OF_TORCH,
    PLAIN,
    PLAIN_CONTAINERS,
    Attributes,
    Cache,
    Cell,
    Change,
    Container,
    Namespace,
    Place,
    content_of,
    dotted,
    read_slot,
    slot_attributes,
)
from whale.compat import hook_stores, tensor_stores
from whale.names import names_of

_LRU_CACHE = type(functools.lru_cache(lambda: None))
_NOT_THE_USERS = frozenset({*names_of("torch numpy sympy whale"), *sys.stdlib_module_names})
DEEPEST = 6
"""containers and objects inside of each other that are looked into on the model"""
OF_LOSS = "the loss"
_OPAQUE = (Tensor, type, ModuleType, BuiltinFunctionType, staticmethod, classmethod)
"""what is not looked into"""

_NAMES_OF_PYTHON = frozenset(names_of("__builtins__ __path__ __all__ __annotations__ __doc__"))


class ForwardState:
    """What a forward can keep, as it is now."""

    def __init__(self, model: nn.Module, loss: Any = None) -> None:
        self._places: list[Place] = []
        seen: set[int] = {id(module) for module in model.modules()}
        for prefix, module in model.named_modules():
            self._places.append(Namespace(prefix, module, is_outside=False))
            if slots := slot_attributes(module):
                self._places.append(Attributes(prefix, module, slots))
            for leaf, value in list(vars(module).items()):
                if leaf not in OF_TORCH:
                    self._places += _places_in(dotted(prefix, leaf), value, seen)
            for leaf, slot in slots.items():
                self._places += _places_in(dotted(prefix, leaf), read_slot(slot, module), seen)
        self._places += _places_outside(OF_LOSS, loss, seen)
        self._hooks = [
            (store, set(store)) for each in model.modules() for store in hook_stores(each)
        ]
        for prefix, owner in _outside(model):
            self._places.append(Namespace(prefix, owner, is_outside=True))
            for leaf, value in list(vars(owner).items()):
                if leaf not in _NAMES_OF_PYTHON and not _keeps_nothing(value):
                    self._places += _places_outside(dotted(prefix, leaf), value, seen)

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
        # an attribute that says that hooks are there has gone: with the hooks left, the next call
        # would register each a second time (transformers records hidden states by such hooks)
        for store, before in self._hooks:
            for number in [each for each in store if each not in before]:
                del store[number]


def numbers_of(changes: Mapping[str, Change]) -> dict[str, Change]:
    """The plain numbers among changes."""
    numbers = {}
    for name, (before, after) in changes.items():
        if isinstance(before, (int, float)) and isinstance(after, (int, float)):
            numbers[name] = (before, after)
    return numbers


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


def _places_in(name: str, value: Any, seen: set[int]) -> Iterator[Place]:
    """Everything at and inside of a value of the model that can be changed: dicts, lists, sets,
    deques, objects and functions.
    """
    waiting = [(value, DEEPEST)]
    while waiting:
        each, left = waiting.pop()
        if id(each) in seen or each is MISSING or isinstance(each, (*PLAIN, *_OPAQUE)):
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
        elif isinstance(each, CONTAINERS):
            if not isinstance(each, tuple):
                yield Container(name, each, is_outside=False)
            inside = each.values() if isinstance(each, dict) else each
        else:
            if slots := slot_attributes(each):
                yield Attributes(name, each, slots)
            inside = [read_slot(slot, each) for slot in slots.values()]
            names = getattr(each, "__dict__", None)
            if isinstance(names, dict) and id(names) not in seen:
                seen.add(id(names))
                yield Container(name, names, is_outside=False)
                inside = [*inside, *names.values()]
        if left > 1:
            # a script may hold millions of numbers in a list
            waiting += [(item, left - 1) for item in inside if type(item) not in PLAIN]


def _places_outside(name: str, value: Any, seen: set[int]) -> Iterator[Place]:
    """The same of a name outside of the model, where a package has thousands: objects of the
    user's own classes only, and nothing inside of them.
    """
    waiting = [(value, DEEPEST_OUTSIDE)]
    while waiting:
        each, left = waiting.pop()
        if isinstance(each, (staticmethod, classmethod)):
            each = each.__func__
        kind = type(each)  # a proxy of a package may import or fail when it is asked for its class
        if id(each) in seen or kind in PLAIN or issubclass(kind, _OPAQUE):
            continue
        seen.add(id(each))
        inside: Iterable[Any] = ()
        if kind is _LRU_CACHE:
            yield Cache(name, each)
        elif issubclass(kind, nn.Module):
            yield from _places_of_module(name, each, seen)
        elif kind is MethodType:
            inside = [each.__func__, each.__self__]
        elif kind is FunctionType:
            inside = _held_by(each)
            if _is_own((each.__module__ or "").partition(".")[0]):
                yield from _cells(name, each)
                inside = [*inside, vars(each)]
        elif kind in PLAIN_CONTAINERS:
            if kind is not tuple:
                yield Container(name, each, is_outside=True)
            inside = each.values() if isinstance(each, dict) else each
        elif _is_own(kind.__module__.partition(".")[0]):
            yield Attributes(name, each, slot_attributes(each), outside=True)
        if left > 1:
            # a script may hold millions of numbers in a list
            waiting += [(item, left - 1) for item in inside if type(item) not in PLAIN]


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
    return kind in PLAIN or issubclass(kind, _OPAQUE)


def _places_of_module(name: str, module: nn.Module, seen: set[int]) -> Iterator[Place]:
    """Attributes and buffers of a module that is no part of the model: a loss with a running
    centre, a teacher in a list.
    """
    for prefix, each in module.named_modules():
        if each is module or id(each) not in seen:
            seen.add(id(each))
            own = dotted(name, prefix) if prefix else name
            yield Namespace(own, each, is_outside=True)
            for store in tensor_stores(each):
                yield Container(own, store, is_outside=True)


def _cells(name: str, function: FunctionType) -> Iterator[Cell]:
    for cell in function.__closure__ or ():
        yield Cell(name, cell)


def _held_by(function: FunctionType) -> list[Any]:
    """What a function keeps from call to call, but for its own attributes."""
    held = [*map(content_of, function.__closure__ or ()), *(function.__defaults__ or ())]
    return [*held, *(function.__kwdefaults__ or {}).values()]
