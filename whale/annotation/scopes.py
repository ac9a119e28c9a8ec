"""`replicate` and `split`: context managers around module construction or around operations in
`forward`.

Around construction, every module built inside gets the scope's mark. In `forward`, while a capture
runs, every operation called inside carries the mark through `torch.export`
(`torch.fx.traceback.annotate`). Outside both, a scope does nothing. Each `with` is its own
TaskGraph: two `with wh.replicate(1):` are two marks.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.fx.traceback import annotate as annotate_nodes

from whale.annotation.marks import FORWARD_TAG, Mark, attach_mark
from whale.names import nearest

GridShape = tuple[int, int, int]
METHODS = ("summa",)
"""of sharding a matrix product, beside the one that is taken by itself: see docs/split.md"""


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


_construction_marks = itertools.count()
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
            default = (
                f", or make the outer one the default with wh.set_default_strategy(wh.{outer})"
                if outer.kind == "replicate"
                else ""
            )
            raise ValueError(
                f"{self.strategy} is opened inside {outer}: scopes do not nest. Close the outer "
                f"`with` first{default}"
            )
        self._exit = contextlib.ExitStack()
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


@contextlib.contextmanager
def _mark_new_modules(mark: Mark) -> Iterator[None]:
    original: Callable[..., None] = torch.nn.Module.__init__

    def marking_init(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        attach_mark(self, mark)

    torch.nn.Module.__init__ = marking_init  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.__init__ = original  # type: ignore[method-assign]
