"""Numbers in Python that a forward and its loss read. A graph holds those of its capture, and a
script may change them between steps:

    model.temperature = 0.5            attributes of modules that their methods name, `training`
    model.phase = "second"             in classes of the user's own also words, None, lists of them
    model.args.weight = 2.0            the same of dicts and objects of the user's own on modules
    BETA = min(1.0, BETA + 0.01)       globals and closures that functions of the user's own name,
    args.weight = 2.0                  and attributes of objects there

Each is compared before a step, as constants of the batch are: another value is another capture.
So are tensors beside the model, by how often they were written to. Not looked at: numbers deeper
inside of objects, and what installed packages keep.

A module may stand for others whose code its forward runs (`STANDS_FOR`): theirs count as well.
"""

from __future__ import annotations

import argparse
import enum
import functools
import numbers
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

from whale.capture.cache_code import attribute_names, global_names, kind_of
from whale.compat import num_writes
from whale.names import names_of

Numbers = tuple[Any, ...]

_KINDS = (bool, int, float, complex)
_SWITCHES = (*_KINDS, str, type(None), enum.Enum)
"""what decides in code of the user's own"""
_PLAIN = frozenset((*_KINDS, str, type(None)))
"""types of nearly all values, which are compared as they are"""
_MOST_IN_LIST = 64
_NOT_IN_FORWARD = frozenset(
    names_of("__init__ extra_repr __repr__ reset_parameters _init_weights __setstate__")
)
_MODE = "training"
_OTHER_MODE = "a module is in another mode (train or eval)"
STANDS_FOR = "stands_for"
"""attribute of a module: a tuple of those that it stands for, which are no modules of its own"""
DEEPEST = 4
"""functions that call each other"""


@dataclass(frozen=True)
class _Place:
    """Where a number is: a key of a dict, or a variable of a closure."""

    name: str
    """for messages"""
    holder: Any
    key: str

    def value(self) -> Any:
        if isinstance(self.holder, CellType):
            try:
                return self.holder.cell_contents
            except ValueError:  # not set any more
                return None
        return self.holder.get(self.key)


class _Written:
    """A tensor as it is now: which one it is, and how often it was written to. Not by its `id`:
    that of one that is gone may be another's.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._num_writes = num_writes(tensor)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Written):
            return NotImplemented
        tensor = self._tensor()
        is_same = tensor is not None and tensor is other._tensor()
        return is_same and self._num_writes == other._num_writes

    def __repr__(self) -> str:
        return "a tensor"


class _Object:
    """Something else that stands where a number was, or None: it is the same as itself alone. Many
    objects cannot be asked whether they are equal: an array gives an array.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and self._value is other._value

    def __repr__(self) -> str:
        return f"an object of {type(self._value).__name__}"


def _comparable(value: Any) -> Any:
    """The value in a form that `==` compares without an error."""
    if isinstance(value, Tensor):
        return _Written(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_comparable, value))
    return value if isinstance(value, (*_SWITCHES, numbers.Number)) else _Object(value)


class PythonNumbers:
    """The numbers that a model and its loss may read."""

    def __init__(self, model: nn.Module, loss: Any = None) -> None:
        self._model = model
        # one that stands for another (`torch.compile`) has no mode of its own
        self._modes = [vars(module) for module in model.modules() if _MODE in vars(module)]
        self._last_modes = self._modes_in_training()
        places: dict[tuple[int, str], _Place] = {}
        for place in (*_of_model(model), *_of_loss(loss)):
            places.setdefault((id(place.holder), place.key), place)
        self._places = list(places.values())

    def _modes_in_training(self) -> Numbers:
        """Modes of all modules when the model is in training mode."""
        before = [each[_MODE] for each in self._modes]
        if not self._model.training:
            self._model.train()  # a model's own method may leave some modules in eval mode
        modes = tuple([each[_MODE] for each in self._modes])
        for each, mode in zip(self._modes, before, strict=True):
            each[_MODE] = mode
        return modes

    def now(self, in_training: bool) -> Numbers:
        """All numbers as they are. In evaluation every module is in eval mode."""
        found = []
        # in every step, so without a call for those in dicts: most of them
        for place in self._places:
            holder = place.holder
            value = holder.get(place.key) if type(holder) is dict else place.value()
            found.append(value if type(value) in _PLAIN else _comparable(value))
        if not in_training:
            return tuple(found)
        if self._model.training:  # else `engine.step` sets the mode, as it was before
            self._last_modes = tuple([each[_MODE] for each in self._modes])
        return (*found, *self._last_modes)

    def difference(self, before: Numbers, after: Numbers) -> str | None:
        """The first number that changed, for messages."""
        for place, old, new in self._changed(before, after):
            if isinstance(new, _Written):
                return f"the tensor {place.name} was changed"
            return f"{place.name} is {new}, and was {old}"
        return _OTHER_MODE if before != after else None

    def names_of_changed(self, before: Numbers, after: Numbers) -> list[str]:
        """What changed, without values: those of a number on which no operation depends (a measured
        time) may differ between ranks.
        """
        names = [place.name for place, _, _ in self._changed(before, after)]
        num_places = len(self._places)
        return names + [_OTHER_MODE] * (before[num_places:] != after[num_places:])

    def _changed(self, before: Numbers, after: Numbers) -> Iterator[tuple[_Place, Any, Any]]:
        """Places of numbers that changed, with the old and the new one."""
        for place, old, new in zip(self._places, before, after, strict=False):
            if old is not new and old != new:
                yield place, old, new

    def is_tensor_changed(self, before: Numbers, after: Numbers) -> bool:
        """Whether a tensor was written to: graphs may hold its very memory, and look alike then."""
        return any(isinstance(new, _Written) for _, _, new in self._changed(before, after))

    def leave_out(self, before: Numbers, after: Numbers) -> Callable[[Numbers], Numbers]:
        """Looks no more at the numbers that changed: no operation depends on them. Gives what makes
        numbers of before those that are looked at from now on.
        """
        stays = [
            old is new or old == new
            for _, old, new in zip(self._places, before, after, strict=False)
        ]
        self._places = [
            place for place, is_left in zip(self._places, stays, strict=True) if is_left
        ]

        def shortened(values: Numbers) -> Numbers:
            own = [each for each, is_left in zip(values, stays, strict=False) if is_left]
            return (*own, *values[len(stays) :])

        return shortened


# ---- where numbers are


def _of_model(model: nn.Module) -> Iterator[_Place]:
    functions: dict[int, FunctionType] = {}
    for prefix, module in _modules(model):
        cls: type = type(module)
        is_number = _is_switch if _is_own_class(cls) else _is_number
        named = _attributes_named(cls) | read_by_own_methods(cls)
        for name, value in vars(module).items():
            full_name = f"{prefix}.{name}" if prefix else name
            if is_number(value):
                if name != _MODE and name in named:
                    yield _Place(full_name, vars(module), name)
            elif _holds_settings(value):
                yield from _of_object(full_name, value, read_by_own_methods(cls))
        for function in _own_methods(cls):
            functions[id(function)] = function
    for function in functions.values():
        yield from _of_function(function, DEEPEST)


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for prefix, module in model.named_modules():
        yield prefix, module
        for other in getattr(module, STANDS_FOR, ()):
            yield prefix, other


def _holds_settings(value: Any) -> bool:
    """Whether a script may keep numbers there that it changes: a dict, a namespace, or an object of
    a class of its own.
    """
    cls: type = type(value)
    return isinstance(value, (dict, argparse.Namespace, SimpleNamespace)) or _is_own_class(cls)


@functools.cache
def _is_own_class(cls: type) -> bool:
    if cls.__module__ == "__main__":  # a notebook has no file
        return True
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return file is not None and kind_of(file) == "own"


def _is_number(value: Any) -> bool:
    return isinstance(value, _KINDS)


def _is_switch(value: Any) -> bool:
    """A number, a word or nothing, or a short list of them."""
    if isinstance(value, list):
        return len(value) <= _MOST_IN_LIST and all(isinstance(each, _SWITCHES) for each in value)
    return isinstance(value, _SWITCHES)


def _of_loss(loss: Any) -> Iterator[_Place]:
    if isinstance(loss, nn.Module):
        yield from _of_model(loss)
    elif isinstance(loss, functools.partial):
        yield from _of_loss(loss.func)
        for value in (*loss.args, *loss.keywords.values()):
            yield from _of_object("the loss", value, None)  # what it does with them is not known
    elif isinstance(loss, MethodType):
        yield from _of_loss(loss.__func__)
        if isinstance(loss.__func__, FunctionType) and _is_own(loss.__func__.__code__):
            names = frozenset(attribute_names(loss.__func__.__code__))
            yield from _of_object(type(loss.__self__).__name__, loss.__self__, names)
    elif isinstance(loss, FunctionType):
        yield from _of_function(loss, DEEPEST)


def _of_function(function: FunctionType, depth: int) -> Iterator[_Place]:
    """Numbers that a function of the user's own names, and those that it calls."""
    code = function.__code__
    if not depth or not _is_own(code):
        return
    attributes = frozenset((*attribute_names(code), *_strings(code)))
    cells = zip(code.co_freevars, function.__closure__ or (), strict=False)
    read = [_Place(f"{name} of {function.__name__}", cell, name) for name, cell in cells]
    for name in global_names(code):
        if name in function.__globals__:
            module = function.__globals__.get("__name__", "")
            read.append(_Place(f"{module}.{name}", function.__globals__, name))
    for place in read:
        value = place.value()
        if isinstance(value, Tensor) or _is_switch(value):
            yield place
        elif isinstance(value, FunctionType):
            yield from _of_function(value, depth - 1)
        else:
            yield from _of_object(place.name, value, attributes)


def _of_object(name: str, value: Any, attributes: frozenset[str] | None) -> Iterator[_Place]:
    """Numbers that an object or a dict holds. `attributes`: names and keys in the code; None: all
    of them count.
    """
    if isinstance(value, (nn.Module, type)):
        return
    holder = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    if not isinstance(holder, dict):
        return
    for key in holder if attributes is None else attributes & holder.keys():
        if isinstance(key, str) and _is_switch(holder[key]):
            yield _Place(f"{name}.{key}", holder, key)


def _strings(code: CodeType) -> Iterator[str]:
    """Strings in a function or one inside of it, which may be keys of a dict."""
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _strings(constant)


def _is_own(code: CodeType) -> bool:
    return kind_of(code.co_filename) == "own"


@functools.cache
def _attributes_named(cls: type) -> frozenset[str]:
    """What methods of a class look up by name, on whatever object."""
    found: set[str] = set()
    for function in _methods(cls):
        found.update(attribute_names(function.__code__))
    return frozenset(name for name in found if not name.startswith("_"))


@functools.cache
def read_by_own_methods(cls: type) -> frozenset[str]:
    """Attributes and keys that stand in the methods of the user's own."""
    found: set[str] = set()
    for function in _own_methods(cls):
        found.update(attribute_names(function.__code__), _strings(function.__code__))
    return frozenset(found)


def _own_methods(cls: type) -> list[FunctionType]:
    return [function for function in _methods(cls) if _is_own(function.__code__)]


@functools.cache
def _methods(cls: type) -> tuple[FunctionType, ...]:
    """The functions of a class and its parents that a forward may call."""
    found: list[FunctionType] = []
    for each in cls.__mro__:
        if each in (nn.Module, object):
            continue
        members: Mapping[str, Any] = vars(each)
        for name, member in members.items():
            function = (
                member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
            )
            if isinstance(function, property):
                function = function.fget
            if isinstance(function, FunctionType) and name not in _NOT_IN_FORWARD:
                found.append(function)
    return tuple(found)
