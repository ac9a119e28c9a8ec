"""Tables that a forward made while it was exported and keeps for its next call.

While a model is exported its tensors have shapes and no data, and so has a table of positions that
its forward computes once and keeps. What it keeps on the model itself is taken back after every
export (`attributes_restored`). What it keeps elsewhere is looked for when something went wrong
(`forget_tables`): in functions under `functools.lru_cache`, in dicts and lists of its classes and of
the Python modules in which they are written.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from whale.capture.memory import containers, copied, refill
from whale.compat import is_fake
from whale.names import names_of

_LRU_CACHE = type(functools.lru_cache(lambda: None))
_OF_TORCH = frozenset(vars(nn.Module()))  # hooks, parameters, buffers, submodules, the mode
_NOT_THE_USERS = frozenset(names_of("torch builtins whale"))


@contextmanager
def attributes_restored(model: nn.Module) -> Iterator[None]:
    """Takes back what forward sets inside as plain attributes of the modules, or puts into dicts,
    lists, sets and objects among these.
    """
    before = []
    seen: set[int] = set()
    for module in model.modules():
        own = {name: value for name, value in vars(module).items() if name not in _OF_TORCH}
        inside = [each for value in own.values() for each in containers(value, seen)]
        held = [(each, copied(each)) for each in inside]
        before.append((vars(module), own, held))
    try:
        yield
    finally:
        for now, own, held in before:
            for name in set(now) - set(own) - _OF_TORCH:
                del now[name]
            now.update(own)
            for container, contents in held:
                refill(container, contents)


def forget_tables(model: nn.Module) -> bool:
    """Empties caches outside of the model that hold tensors without data; whether there were any.

    Goes through all Python modules: for the case that something has failed.
    """
    found = False
    for value in _global_values(model):
        if type(value) is not _LRU_CACHE:
            found = _forget_in(value) or found
        elif any(map(_holds_fake, gc.get_referents(value))):
            value.cache_clear()
            found = True
    return found


def _holds_fake(value: Any) -> bool:
    """Whether it is a tensor without data, or a container of one."""
    if isinstance(value, dict):
        return any(map(_holds_fake, list(value.values())))
    if isinstance(value, (tuple, list)):
        return any(map(_holds_fake, value))
    return is_fake(value)


def _global_values(model: nn.Module) -> Iterator[Any]:
    """Attributes of the modules of a model, of their classes, and of the Python modules that these
    stand in; of all other Python modules functions with a cache.
    """
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    users = [cls for cls in classes if cls.__module__.partition(".")[0] not in _NOT_THE_USERS]
    files = {cls.__module__ for cls in users}
    for owner in (
        *model.modules(),
        *users,
        *(sys.modules[name] for name in files if name in sys.modules),
    ):
        for name, value in list(vars(owner).items()):
            if name not in _OF_TORCH and not name.startswith("__"):
                yield value
    for module in list(sys.modules.values()):
        for value in list(getattr(module, "__dict__", {}).values()):
            if type(value) is _LRU_CACHE:
                yield value


def _forget_in(container: Any) -> bool:
    """Removes tensors without data from a dict or list and those inside of it."""
    if not isinstance(container, (dict, list)) or not _holds_fake(container):
        return False
    inner = list(container.values()) if isinstance(container, dict) else list(container)
    for each in inner:
        _forget_in(each)
    if isinstance(container, dict):
        for key in [key for key, value in container.items() if _holds_fake(value)]:
            del container[key]
    else:
        container[:] = [each for each in container if not _holds_fake(each)]
    return True
