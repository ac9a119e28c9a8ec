"""`replicate` and `split`: context managers around module construction or around operations in
`forward`.

Around construction, every module built inside gets the scope's mark. In `forward`, while a capture
runs, every operation called inside carries the mark through `torch.export`
(`torch.fx.traceback.annotate`). Outside both, a scope does nothing. Each `with` is its own
TaskGraph (the part of the model under one annotation): two `with wh.replicate(1):` are two marks.
`annotate` marks the modules of a model from outside.
"""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch.fx.traceback import annotate as annotate_nodes

from whale.compat import patched
from whale.names import nearest

GridShape = tuple[int, int, int]
METHODS = ("summa",)
"""algorithms for a sharded matrix product that a user can name, besides the default: docs/split.md
"""
FORWARD_TAG = "whale_scope"
"""key in `node.meta["custom"]` of operations under a scope in `forward`; the value is the scope's
index
"""
_ATTRIBUTE = "_whale_mark"  # of a module: its mark

ModuleContainer = torch.nn.ModuleList | torch.nn.ModuleDict
Model = TypeVar("Model", bound=torch.nn.Module)


@dataclass(frozen=True)
class Strategy:
    """How a TaskGraph uses its devices."""

    kind: str
    """`replicate`: each micro-batch is cut over the devices; `split`: the operations are sharded
    over them
    """
    num_devices: int
    grid: GridShape | None = None
    """devices along x, y and z, where the user fixed them; None: chosen by cost"""
    method: str | None = None
    """one of `METHODS`, where the user named one"""

    def __str__(self) -> str:
        grid = f", grid={self.grid}" if self.grid is not None else ""
        method = f", method={self.method!r}" if self.method is not None else ""
        return f"{self.kind}({self.num_devices}{grid}{method})"


@dataclass(frozen=True)
class Mark:
    """One annotation, that is one TaskGraph."""

    order: tuple[str, int]
    """(place of the annotation: `construction`, `glob` or `forward`; index among those)"""
    strategy: Strategy
    label: str = ""

    def __deepcopy__(self, memo: Any) -> Mark:
        return self  # a module copied inside a scope belongs to the same TaskGraph


def marks_by_module(model: torch.nn.Module) -> dict[str, Mark]:
    """Name -> mark for every module that carries one, under all its names. A list of modules is
    never called: its mark is its members'.
    """
    found: dict[str, Mark] = {}
    for name, module in model.named_modules(remove_duplicate=False):  # parents before children
        parent = name.rpartition(".")[0]
        mark = vars(module).get(_ATTRIBUTE)
        if mark is None and name and isinstance(model.get_submodule(parent), ModuleContainer):
            mark = found.get(parent)
        if mark is not None:
            found[name] = mark
    return found


_construction_marks = itertools.count()
_glob_marks = itertools.count()
_open_scopes: list[Scope] = []
_forward_marks: list[Mark] | None = None  # a list while a capture runs
_default: Strategy | None = None


class Scope:
    """What `wh.replicate(n)` and `wh.split(n)` return: a context manager, and the value that
    `wh.annotate` takes.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self._exit: contextlib.ExitStack | None = None

    def __enter__(self) -> Scope:
        if _open_scopes:
            outer = _open_scopes[-1].strategy
            default = ""
            if outer.kind == "replicate":
                default = (
                    f", or make the outer one the default: wh.set_default_strategy(wh.{outer})"
                )
            raise ValueError(
                f"{self.strategy} is opened inside {outer}: scopes do not nest. Try: close the "
                f"outer `with` first{default}"
            )
        self._exit = contextlib.ExitStack()
        # outside of a capture a scope marks modules: in a plain forward none is built, so it does
        # nothing there
        if _forward_marks is None:
            mark = Mark(("construction", next(_construction_marks)), self.strategy)
            self._exit.enter_context(_mark_new_modules(mark))
        else:
            mark = Mark(("forward", len(_forward_marks)), self.strategy)
            _forward_marks.append(mark)
            self._exit.enter_context(annotate_nodes({FORWARD_TAG: mark.order[1]}))
        _open_scopes.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _open_scopes.pop()
        assert self._exit is not None
        self._exit.close()
        self._exit = None

    def __repr__(self) -> str:
        return f"wh.{self.strategy}"


def replicate(num_devices: int = 1) -> Scope:
    """The part of the model under this scope is copied to `num_devices` devices, which share each
    micro-batch.
    """
    return Scope(Strategy("replicate", _device_count("replicate", num_devices)))


def split(
    num_devices: int, grid: Sequence[int] | None = None, *, method: str | None = None
) -> Scope:
    """The operations under this scope are sharded over `num_devices` devices.

    `grid`: (gx, gy, gz), whose product is `num_devices`: (1, n, 1) is Megatron with sequence
    sharding, (q, q, 1) 2-D, (q, q, q) the cube, (1, 1, n) ZeRO-3. Without it the grid that takes
    least time is chosen. `method`: "summa" for SUMMA on a grid (q, q, 1) or (q, q, d).
    """
    count = _device_count("split", num_devices)
    shape = None if grid is None else _grid_shape(count, grid)
    if method is not None:
        _check_method(count, shape, method)
    return Scope(Strategy("split", count, shape, method))


def _grid_shape(num_devices: int, grid: Sequence[int]) -> GridShape:
    """Three sizes whose product is the number of devices."""
    said = f"wh.split({num_devices}, grid={grid!r})"
    sizes = tuple(grid) if isinstance(grid, Sequence) and not isinstance(grid, str) else ()
    if len(sizes) != 3 or any(
        not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in sizes
    ):
        raise ValueError(
            f"{said}: a grid is three whole numbers of at least 1, the devices along x, y and z, "
            f"like (1, {num_devices}, 1)"
        )
    if math.prod(sizes) != num_devices:
        product = " x ".join(map(str, sizes))
        raise ValueError(
            f"{said}: {product} = {math.prod(sizes)} devices, not {num_devices}. Use a grid that "
            f"multiplies to {num_devices}, like "
            f"(1, {num_devices}, 1), or leave the grid out and the best one is chosen"
        )
    return sizes[0], sizes[1], sizes[2]


def _check_method(num_devices: int, grid: GridShape | None, method: str) -> None:
    said = f"wh.split({num_devices}, method={method!r})"
    if method not in METHODS:
        known = " or ".join(map(repr, METHODS))
        raise ValueError(
            f"{said}: there is no such method, use {known} or leave it "
            f"out.{nearest(method, METHODS)}"
        )
    if grid is not None and not grid[0] == grid[1] > 1:
        found = f"the grid {grid} has {grid[0]} and {grid[1]}"
        raise ValueError(
            f"{said}: SUMMA needs as many devices along x as along y, two at least; {found}"
        )
    if grid is None and all(num_devices % (q * q) for q in range(2, num_devices + 1)):
        raise ValueError(
            f"{said}: SUMMA needs a grid (q, q, d) with q of at least 2, and {num_devices} "
            "devices have none"
        )


def _device_count(word: str, num_devices: int) -> int:
    if not isinstance(num_devices, int) or isinstance(num_devices, bool) or num_devices < 1:
        raise ValueError(
            f"wh.{word}({num_devices!r}): the number of devices must be a whole number of at "
            "least 1"
        )
    return num_devices


def annotate(model: Model, strategies: Mapping[str, Scope]) -> Model:
    """Marks modules by name, for a model whose source one cannot touch.

    `strategies` maps a glob over module names (`"bert.encoder.layer.[0-5]"`; several joined by `|`)
    to `wh.replicate(n)` or `wh.split(n)`. Each entry is one TaskGraph and includes everything below
    the modules that match. Returns the model.
    """
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    owner: dict[int, str] = {}
    for pattern, scope in strategies.items():
        if not isinstance(scope, Scope):
            raise ValueError(
                f"wh.annotate: the value for '{pattern}' is {scope!r}; it must be "
                "wh.replicate(n) or wh.split(n)"
            )
        mark = Mark(("glob", next(_glob_marks)), scope.strategy, label=pattern)
        for name in _matching(pattern, names):
            module = model.get_submodule(name)
            if owner.get(id(module), pattern) != pattern:
                raise ValueError(
                    f"wh.annotate: module '{name}' is matched by both '{owner[id(module)]}' and "
                    f"'{pattern}': it can be in one TaskGraph"
                )
            owner[id(module)] = pattern
            vars(module)[_ATTRIBUTE] = mark
    return model


def _matching(pattern: str, names: list[str]) -> list[str]:
    """Names that one of the globs of `pattern`, joined by `|`, matches; each must match one."""
    matching: set[str] = set()
    for glob in pattern.split("|"):
        found = fnmatch.filter(names, glob)
        if not found:
            raise ValueError(
                f"wh.annotate: '{glob}' matches none of the model's {len(names)} "
                f"modules.{nearest(glob, names)}"
            )
        matching.update(found)
    return [name for name in names if name in matching]


def set_default_strategy(strategy: Scope | None) -> None:
    """Everything that no other annotation marks forms one TaskGraph with this strategy; `None`
    takes it back.
    """
    global _default
    if strategy is not None and not isinstance(strategy, Scope):
        raise ValueError(f"set_default_strategy takes wh.replicate(n), not {strategy!r}")
    if strategy is not None and strategy.strategy.kind != "replicate":
        raise ValueError(
            f"set_default_strategy takes wh.replicate(n), not {strategy!r}: mark what is to be "
            f"split with `with {strategy!r}:`"
        )
    _default = strategy.strategy if strategy is not None else None


def default_strategy() -> Strategy | None:
    return _default


@contextlib.contextmanager
def collect_forward_marks() -> Iterator[list[Mark]]:
    """Called by `capture` around the export: scopes entered inside mark operations; gives the marks
    in order of entry.
    """
    global _forward_marks
    _forward_marks = []
    try:
        yield _forward_marks
    finally:
        _forward_marks = None


def _mark_new_modules(mark: Mark) -> contextlib.AbstractContextManager[None]:
    original: Callable[..., None] = torch.nn.Module.__init__

    def marking_init(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        vars(self)[_ATTRIBUTE] = mark

    return patched(torch.nn.Module, "__init__", marking_init)
