"""What a capture depends on, as one hash: the name of its file in the folder of `"capture_cache"`.

    model      classes of all modules, their attributes, shapes and ties of weights (never values)
    code       of every class and function that these reach: the code itself, what closures,
               defaults and globals hold, the files of their modules
    batch      structure, shapes, types, constants, lengths
    settings   device type, autocast, modes of torch, versions of Python and torch, Whale's code

Attributes are followed as deep as they go. What cannot be described (a lock, an open file) makes
the capture one that is not cached: never one whose hash leaves something out.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import logging
import platform
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from whale.capture.batch import BatchLayout
from whale.capture.cache_code import (
    CannotDescribe,
    attribute_names,
    cell_content,
    file_hash,
    global_names,
    kind_of,
    slots,
    version_of,
)
from whale.capture.export import Task
from whale.compat import Operation, OperationPacket, active_modes
from whale.devices.vendors import attention_kernels
from whale.dtypes import as_bytes

PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), range, slice)
OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
CONSTANT = (tuple, frozenset, types.CodeType)
WEIGHTS = ("_parameters", "_buffers")
NOT_PART = ("_whale_mark", "_whale_refusals", "_apply")
"""attributes that Whale gives to modules; a plan reads the mark from the model itself"""
NOT_CODE = ("__dict__", "__weakref__", "__doc__", "__module__", "_abc_impl")
OWN_SOURCES = ("annotation", "capture", "operations", "compat", "dtypes.py", "names.py")
"""of Whale: whose code makes the graph"""


def content_key(
    model: torch.nn.Module,
    layout: BatchLayout,
    task: Task,
    with_outputs: bool,
    first: BatchLayout | None = None,
) -> str:
    """Hash of all that the captured graph depends on, 32 hexadecimal digits; raises
    `CannotDescribe`.
    """
    content = _Content()
    try:
        content.add("settings", _settings(task, with_outputs))
        content.add("batch", _of_batch(layout))
        # what batches before leave for this one was looked at for their layout
        # (`refuse_forward_state`)
        if first is not None and first.with_lengths({}).key != layout.with_lengths({}).key:
            content.add("first batch", _of_batch(first))
        content.add("modes", [type(mode) for mode in active_modes()])
        content.add("model", model)
        content.add("loss", task.loss)
    except CannotDescribe:
        raise
    except Exception as error:  # objects of others may answer in any way
        where = ".".join(content.path)
        raise CannotDescribe(f"{where}: {type(error).__name__}: {error}") from error
    return content.finish()


def _settings(task: Task, with_outputs: bool) -> tuple[Any, ...]:
    versions = (platform.python_version(), torch.__version__)
    state = (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_enabled(task.device),
        attention_kernels(),
    )
    return versions, _own_sources(), state, task.device, task.autocast, with_outputs


@functools.lru_cache(maxsize=1)
def _own_sources() -> str:
    """Hash of the code of Whale that makes graphs: a changed working copy has the same version."""
    state = hashlib.blake2b(digest_size=16)
    folder = Path(__file__).parents[1]
    for name in OWN_SOURCES:
        place = folder / name
        for file in sorted(place.glob("*.py")) if place.is_dir() else [place]:
            state.update(f"{file.name}\n".encode() + file.read_bytes())
    return state.hexdigest()


def _of_batch(layout: BatchLayout) -> tuple[Any, ...]:
    tensors = []
    for each in layout.tensors:
        tensors.append((each.path, each.shape, each.dtype, each.batched, each.lengths))
    constants = tuple((place, repr(value)) for place, value in layout.constants)
    return str(layout.structure), layout.paths, constants, tuple(tensors), layout.batch_size


class _Content:
    """Follows values and hashes what they are. Each object counts once: a second visit adds the
    number of the first, so that cycles end and ties are part of the hash.
    """

    def __init__(self) -> None:
        self._state = hashlib.blake2b(digest_size=16)
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []
        """what has a number, so that ids stay their own"""
        self.path: list[str] = []
        """to what is being described"""
        self._rules: list[tuple[Any, Callable[[Any], None]]] = [
            (torch.nn.Module, self._module),
            (torch.Tensor, self._tensor),
            ((torch.Generator, RemovableHandle), self._by_type),
            (logging.Logger, lambda value: self._text("logger", value.name)),
            (enum.Enum, lambda value: self._text("enum", str(type(value)), value.name)),
            (Mapping, self._mapping),
            ((list, tuple), self._sequence),
            ((set, frozenset), self._set),
            (type, self._class),
            (types.ModuleType, self._python_module),
            (types.CodeType, self._code),
            (types.FunctionType, self._function),
            (types.MethodType, self._method),
            (functools.partial, self._partial),
            ((staticmethod, classmethod), lambda value: self.value(value.__func__)),
            (property, self._property),
            (functools.cached_property, lambda value: self.value(value.func)),
            ((types.BuiltinFunctionType, types.MethodDescriptorType), self._by_name),
            ((types.WrapperDescriptorType, types.GetSetDescriptorType), self._by_name),
            (types.MemberDescriptorType, self._by_name),
        ]

    def add(self, name: str, value: Any) -> None:
        self.path.append(name)
        self._text("name", name)
        self.value(value)
        self.path.pop()

    def finish(self) -> str:
        return self._state.hexdigest()

    def value(self, value: Any) -> None:
        """Adds a value of any type."""
        if type(value) in PLAIN or isinstance(value, OF_TORCH):
            self._text(type(value).__name__, repr(value))
            return
        # whether two equal constants are one object depends on who compiled the file
        if not isinstance(value, CONSTANT):
            if id(value) in self._numbers:
                self._text("again", str(self._numbers[id(value)]))
                return
            self._numbers[id(value)] = len(self._numbers)
            self._alive.append(value)
        for kind, rule in self._rules:
            if isinstance(value, kind):
                rule(value)
                return
        self._object(value)

    def _text(self, *parts: str) -> None:
        for part in parts:
            encoded = part.encode(errors="surrogatepass")
            # the length first: ("ab", "c") is not ("a", "bc")
            self._state.update(len(encoded).to_bytes(8, "little") + encoded)

    def _items(self, items: Iterable[tuple[str, Any]]) -> None:
        for name, value in items:
            self.add(name, value)

    # --- data

    def _mapping(self, value: Mapping[Any, Any]) -> None:
        self._text("mapping", str(len(value)))
        self._type_name(value)
        for key, item in value.items():  # in its order, in which a forward may go through it
            self.value(key)
            self.add(str(key), item)
        self._attributes(value)

    def _sequence(self, value: Any) -> None:
        self._text("sequence", str(len(value)))
        self._type_name(value)
        for place, item in enumerate(value):
            self.add(str(place), item)
        self._attributes(value)

    def _set(self, value: Any) -> None:
        """The members in an order that does not depend on the process."""
        hashes = []
        for member in value:
            own = _Content()
            own.value(member)
            hashes.append(own.finish())
        self._text("set", type(value).__name__, *sorted(hashes))

    def _tensor(self, value: torch.Tensor) -> None:
        """A tensor that is neither parameter nor buffer becomes a constant of the graph."""
        self._form(value)
        if value.device.type != "meta":
            self._state.update(as_bytes(value.detach()).cpu().numpy().data)

    def _form(self, value: torch.Tensor) -> None:
        sizes = (tuple(value.shape), tuple(value.stride()), value.dtype, value.requires_grad)
        self._text("tensor", type(value).__qualname__, repr(sizes))

    def _module(self, module: torch.nn.Module) -> None:
        self._text("module")
        self.value(type(module))
        own = vars(module)
        for store in WEIGHTS:
            for name, value in own.get(store, {}).items():
                self.add(f"{store}.{name}", None if value is None else _Weight(value))
        for name in sorted(own.keys() - {*WEIGHTS, *NOT_PART}):
            # keys of hooks count those of the whole process
            is_hooks = name.startswith("_") and "hooks" in name and isinstance(own[name], dict)
            self.add(name, list(own[name].values()) if is_hooks else own[name])

    def _object(self, value: Any) -> None:
        """Any other object: its type and its attributes, or what `copy` would make it from."""
        if isinstance(value, _Weight):
            self._weight(value.tensor)
            return
        if _is_operation(value):
            self._text("operation", str(value))
            return
        self._text("object")
        if isinstance(value, (str, bytes, int, float)):
            self._text(repr(value))
        if hasattr(value, "__dict__") or slots(type(value)):
            self.value(type(value))
            self._attributes(value)
            return
        try:
            made_from = value.__reduce_ex__(4)
        except TypeError as error:
            where = ".".join(self.path)
            name = f"{type(value).__module__}.{type(value).__qualname__}"
            raise CannotDescribe(f"{where} is a {name}, which has no content to compare") from error
        self.value(made_from)

    def _weight(self, value: torch.Tensor) -> None:
        """The form of a parameter or buffer; where it was met before, which one it is."""
        if id(value) in self._numbers:
            self._text("tied", str(self._numbers[id(value)]))
            return
        self._numbers[id(value)] = len(self._numbers)
        self._alive.append(value)
        self._form(value)

    def _attributes(self, value: Any) -> None:
        own = dict(getattr(value, "__dict__", {}))
        for name in slots(type(value)):
            if hasattr(value, name):
                own[name] = getattr(value, name)
        self._items((name, own[name]) for name in sorted(own))

    def _type_name(self, value: Any) -> None:
        if type(value).__module__ != "builtins":
            self.value(type(value))

    def _by_type(self, value: Any) -> None:
        self._text("type", str(type(value)))

    def _by_name(self, value: Any) -> None:
        owner = getattr(value, "__self__", None)
        if owner is not None and not isinstance(owner, types.ModuleType):
            self.add("self", owner)
        name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value)}"
        self._text("builtin", name)

    # --- code

    def _class(self, value: type) -> None:
        self._text("class", value.__module__, value.__qualname__)
        if not self._follows(value.__module__):
            return
        for base in value.__bases__:
            self.value(base)
        for name, member in sorted(vars(value).items()):
            if name not in NOT_CODE:
                self.add(name, member)

    def _function(self, value: types.FunctionType) -> None:
        self._text("function", value.__module__ or "", value.__qualname__)
        self._items([("defaults", value.__defaults__), ("named", value.__kwdefaults__)])
        cells = [cell_content(cell) for cell in value.__closure__ or ()]
        self.add("closure", cells)
        self._attributes(value)
        if self._follows(value.__module__):
            self.value(value.__code__)
            for name in sorted(global_names(value.__code__) & value.__globals__.keys()):
                self.add(name, value.__globals__[name])
                self._used_of(value.__globals__[name], value.__code__)

    def _used_of(self, module: Any, code: types.CodeType) -> None:
        """What a function may read of another module of the user: `settings.SCALE`."""
        if not isinstance(module, types.ModuleType) or not self._follows(module.__name__):
            return
        for name in sorted(set(attribute_names(code)) & vars(module).keys()):
            self.add(name, vars(module)[name])

    def _code(self, value: types.CodeType) -> None:
        self._text("code", value.co_code.hex(), *value.co_names, *value.co_varnames)
        for place, constant in enumerate(value.co_consts):
            self.add(str(place), constant)

    def _method(self, value: types.MethodType) -> None:
        self.add("self", value.__self__)
        self.add("function", value.__func__)

    def _partial(self, value: functools.partial[Any]) -> None:
        self._items([("func", value.func), ("args", value.args), ("keywords", value.keywords)])

    def _property(self, value: property) -> None:
        self._items([("get", value.fget), ("set", value.fset)])

    def _python_module(self, value: types.ModuleType) -> None:
        self._text("python module", value.__name__)
        self._follows(value.__name__)

    def _follows(self, name: str | None) -> bool:
        """Whether the code of a Python module is followed: that of the user is. Of an installed
        package its version counts, and the file. The file counts in either case.
        """
        module = sys.modules.get(name or "")
        file = getattr(module, "__file__", None)
        if name == "__main__" and file is not None and kind_of(file) != "own":
            return True  # a script that a command of Python runs
        if module is None or file is None:
            return name not in sys.builtin_module_names  # typed into a notebook, or made by `exec`
        kind = kind_of(file)
        if kind != "standard" and id(module) not in self._numbers:
            self._numbers[id(module)] = len(self._numbers)
            self._alive.append(module)
            self._text("file", module.__name__, file_hash(file))
            if kind == "installed":
                self._text("version", version_of(module.__name__.partition(".")[0]))
        return kind == "own"


class _Weight:
    """Marks a parameter or buffer, of which only the form counts."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _is_operation(value: Any) -> bool:
    return isinstance(value, Operation | OperationPacket)
