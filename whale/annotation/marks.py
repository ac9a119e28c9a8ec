"""Marks on modules: put there by construction scopes or by `wh.annotate` from outside."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from whale.names import nearest

if TYPE_CHECKING:
    from whale.annotation.scopes import Scope, Strategy

FORWARD_TAG = "whale_scope"  # key in node.meta["custom"] of operations under a scope in `forward`
_ATTRIBUTE = "_whale_mark"
_glob_marks = itertools.count()

Model = TypeVar("Model", bound=torch.nn.Module)


@dataclass(frozen=True)
class Mark:
    """One annotation, that is one TaskGraph."""

    order: tuple[str, int]
    """(where it was said, how many were said there before): construction, then globs, then forward
    """
    strategy: Strategy
    label: str = ""

    def __deepcopy__(self, memo: Any) -> Mark:
        return self  # a module copied inside a scope belongs to the same TaskGraph


def attach_mark(module: torch.nn.Module, mark: Mark) -> None:
    module.__dict__[_ATTRIBUTE] = mark


def mark_of_module(module: torch.nn.Module) -> Mark | None:
    mark: Mark | None = module.__dict__.get(_ATTRIBUTE)
    return mark


def marks_by_module(model: torch.nn.Module) -> dict[str, Mark]:
    """Name -> mark for every module that carries one, under all its names. A list of modules is
    never called: its mark is its members'.
    """
    found: dict[str, Mark] = {}
    for name, module in model.named_modules(remove_duplicate=False):  # parents before children
        parent = name.rpartition(".")[0]
        in_list = bool(name) and isinstance(
            model.get_submodule(parent), torch.nn.ModuleList | torch.nn.ModuleDict
        )
        mark = mark_of_module(module) or (found.get(parent) if in_list else None)
        if mark is not None:
            found[name] = mark
    return found


def annotate(model: Model, strategies: Mapping[str, Scope]) -> Model:
    """Marks modules by name, for a model whose source one cannot touch.

    `strategies` maps a glob over module names (`"bert.encoder.layer.[0-5]"`; several joined by `|`)
    to `wh.replicate(n)` or `wh.split(n)`. Each entry is one TaskGraph and includes everything below
    the modules that match. Returns the model.
    """
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    owner: dict[int, str] = {}
    for pattern, scope in strategies.items():
        matches = [
            name
            for name in names
            if any(fnmatch.fnmatchcase(name, part) for part in pattern.split("|"))
        ]
        for part in pattern.split("|"):
            if not any(fnmatch.fnmatchcase(name, part) for name in names):
                raise ValueError(
                    f"wh.annotate: '{part}' matches none of the model's {len(names)} "
                    f"modules.{nearest(part, names)}"
                )
        mark = Mark(("glob", next(_glob_marks)), _strategy_of(pattern, scope), label=pattern)
        for name in matches:
            module = model.get_submodule(name)
            if owner.get(id(module), pattern) != pattern:
                raise ValueError(
                    f"wh.annotate: module '{name}' is matched by both '{owner[id(module)]}' and "
                    f"'{pattern}': it can be in one TaskGraph"
                )
            owner[id(module)] = pattern
            attach_mark(module, mark)
    return model


def _strategy_of(pattern: str, scope: Scope) -> Strategy:
    from whale.annotation.scopes import Scope as ScopeClass

    if not isinstance(scope, ScopeClass):
        raise ValueError(
            f"wh.annotate: the value for '{pattern}' is {scope!r}; it must be wh.replicate(n) or "
            "wh.split(n)"
        )
    return scope.strategy
