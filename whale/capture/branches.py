"""Random branches in a forward: decided when chance has no say in them, refused when it has.

LayerDrop in Hugging Face models reads `if self.training and torch.rand([]) < self.layerdrop:
continue`. For torch.export this is a branch on the value of a tensor, and it stops even at
`layerdrop = 0.0`, where the branch is never taken. Under `random_branches` a number r drawn from
[0, 1) is known by its bounds:

    r < p    is False for p <= 0 and True for p >= 1
    r <= p   is False for p < 0  and True for p >= 1
    r > p    is the opposite of r <= p,  r >= p of r < p

and `bool()` of such a comparison needs no value. Anything in between is a real random branch, which
one graph cannot hold. Comparisons that are not used as a Python bool stay operations of the graph,
and so do all draws.

Python's and numpy's random numbers are worse: the export would keep one draw for ever, without a
word. Each is noted, unless it was only compared with a number that decides by itself (layerdrop 0
again).
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from whale.capture.errors import NOWHERE, CaptureError, Place, calling_place, module_names
from whale.capture.guards import PYTHON_RANDOM, Findings

_WAY_OUT_RANDOM = (
    "the capture keeps this one draw for every step. Draw with torch (`torch.rand(..., "
    "device=x.device)`), switch the random part off "
    "(layerdrop 0, SpecAugment off), or draw outside the model and give it in the batch"
)
_WAY_OUT_BRANCH = (
    "set the probability to 0 (Hugging Face: `config.layerdrop = 0.0`, `config.encoder_layerdrop "
    "= 0.0` and `decoder_layerdrop`), "
    "or keep the branch as tensors: `torch.where(torch.rand(()) < p, a, b)`"
)

_NEW_DRAWS = {torch.rand, torch.rand_like}
_MAY_DRAW = {*_NEW_DRAWS, torch.Tensor.uniform_}
_SAME_DRAW = {
    *(
        torch.Tensor.item,
        torch.Tensor.squeeze,
        torch.Tensor.reshape,
        torch.Tensor.view,
        torch.Tensor.flatten,
        torch.Tensor.__getitem__,
    ),
    *(
        torch.Tensor.to,
        torch.Tensor.cpu,
        torch.Tensor.detach,
        torch.Tensor.float,
        torch.Tensor.double,
    ),
}
_COMPARISONS = {
    function: name
    for name in ("lt", "le", "gt", "ge")
    for function in (
        getattr(torch, name),
        getattr(torch.Tensor, name),
        getattr(torch.Tensor, f"__{name}__"),
    )
}
_PYTHON_DRAWS = (
    *(
        "random",
        "uniform",
        "randint",
        "randrange",
        "getrandbits",
        "choice",
        "choices",
        "sample",
        "shuffle",
    ),
    *("gauss", "normalvariate", "betavariate", "expovariate", "triangular"),
)
_NUMPY_DRAWS = (
    *(
        "random",
        "random_sample",
        "ranf",
        "sample",
        "rand",
        "randn",
        "randint",
        "uniform",
        "normal",
        "standard_normal",
    ),
    *(
        "choice",
        "permutation",
        "shuffle",
        "binomial",
        "beta",
        "exponential",
        "poisson",
        "default_rng",
    ),
)
_UNIT_DRAWS = {
    "random.random",
    "numpy.random.random",
    "numpy.random.random_sample",
    "numpy.random.rand",
}


def decide(comparison: str, p: float) -> bool | None:
    """What r < p (`lt`; also `le`, `gt`, `ge`) gives for every r in [0, 1), or None when it depends
    on r.
    """
    if comparison in ("gt", "ge"):
        opposite = decide("le" if comparison == "gt" else "lt", p)
        return None if opposite is None else not opposite
    if p >= 1:
        return True
    return False if p < 0 or (p == 0 and comparison == "lt") else None


class _RandomBranches(TorchFunctionMode):
    """Follows single uniform draws to the comparison and to the `bool()` that asks for it."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names = names
        # id -> the tensor itself (so that the id stays its own), and for comparisons what is known
        # and the number
        self.draws: dict[int, torch.Tensor] = {}
        self.compared: dict[int, tuple[torch.Tensor, bool | None, float]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if (
            not self.draws and func not in _MAY_DRAW
        ):  # nearly always: every call of torch comes through here
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        first: Any = args[0] if args else None
        if id(first) in self.compared and func in (torch.Tensor.__bool__, torch.Tensor.item):
            return self._answer(*self.compared[id(first)][1:])
        if func is torch.Tensor.item and id(first) in self.draws:
            # a tensor without dims works like the number in arithmetic, and its comparisons can be
            # followed
            result = first.reshape(())
        else:
            result = func(*args, **kwargs)
        self._follow(func, args, kwargs, result)
        return result

    def _follow(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        if not isinstance(result, torch.Tensor):
            return
        drawn = args and id(args[0]) in self.draws
        if (
            func in _NEW_DRAWS
            or _is_unit_uniform(func, args, kwargs)
            or (drawn and func in _SAME_DRAW)
        ):
            if _is_single(result):
                self.draws[id(result)] = result
        elif (
            drawn and func in _COMPARISONS and len(args) == 2 and isinstance(args[1], (int, float))
        ):
            self.compared[id(result)] = (
                result,
                decide(_COMPARISONS[func], args[1]),
                float(args[1]),
            )

    def _answer(self, known: bool | None, p: float) -> bool:
        if known is not None:
            return known
        raise CaptureError(
            f"The model cannot be captured.\n  at {calling_place(self.names).describe()}\n"
            "  What is wrong: a random number decides here which code runs, by comparison with "
            f"{p:g}; one graph has one path.\n"
            f"  Way out: {_WAY_OUT_BRANCH}."
        )


def _is_single(tensor: torch.Tensor) -> bool:
    """One number, without looking at symbolic sizes: those are never one draw for a branch."""
    return all(isinstance(size, int) and size == 1 for size in tensor.shape)


def _is_unit_uniform(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """`uniform_()`, `uniform_(0, 1)` and the same by keyword."""
    if func is not torch.Tensor.uniform_:
        return False
    bounds = dict(zip(("from", "to"), args[1:], strict=False)) | kwargs
    return (bounds.get("from", 0), bounds.get("to", 1)) == (0, 1)


class _PythonDraw(float):
    """A number that `random` or `numpy.random` drew from [0, 1); it knows whether chance mattered
    when it was compared.
    """

    harmless = False

    def _compare(self, comparison: str, p: Any) -> Any:
        if isinstance(p, (int, float)) and decide(comparison, p) is not None:
            self.harmless = True
        return getattr(float, f"__{comparison}__")(self, p)

    def __lt__(self, p: Any) -> Any:
        return self._compare("lt", p)

    def __le__(self, p: Any) -> Any:
        return self._compare("le", p)

    def __gt__(self, p: Any) -> Any:
        return self._compare("gt", p)

    def __ge__(self, p: Any) -> Any:
        return self._compare("ge", p)


@contextmanager
def _python_draws_noted(findings: Findings, names: dict[int, str]) -> Iterator[None]:
    """Notes calls of `random.*` and `numpy.random.*`, and changes of their states for names that
    were imported before.
    """
    draws: list[tuple[str, Place, Any]] = []

    def noted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def draw(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            unit = name in _UNIT_DRAWS or (
                name.endswith(".uniform") and (args, kwargs) in (((0, 1), {}), ((), {}))
            )
            result = _PythonDraw(result) if unit and isinstance(result, float) else result
            draws.append((name, calling_place(names), result))
            return result

        return draw

    before = random.getstate(), _numpy_state()
    try:
        with ExitStack() as stack:
            for module, functions in ((random, _PYTHON_DRAWS), (numpy.random, _NUMPY_DRAWS)):
                for name in functions:
                    original = getattr(module, name)
                    stack.callback(setattr, module, name, original)
                    setattr(module, name, noted(f"{module.__name__}.{name}", original))
            yield
    finally:
        for name, place, result in draws:
            if place.file and not getattr(result, "harmless", False):
                findings.add(PYTHON_RANDOM, name, place, _WAY_OUT_RANDOM)
        after = random.getstate(), _numpy_state()
        for library, was, now in zip(("random", "numpy.random"), before, after, strict=True):
            if was != now and not any(name.startswith(library + ".") for name, _, _ in draws):
                findings.add(PYTHON_RANDOM, library, NOWHERE, _WAY_OUT_RANDOM)


def _numpy_state() -> tuple[Any, ...]:
    kind, keys, position, *rest = numpy.random.get_state()
    return kind, numpy.asarray(keys).tobytes(), position, *rest


@contextmanager
def random_branches(
    model: nn.Module | None = None, findings: Findings | None = None
) -> Iterator[Findings]:
    """Around `torch.export.export`: decides random branches of probability 0 or 1, refuses others,
    notes random numbers of Python.

    With `findings` (of `guards.watch`) the notes go there; `model` gives modules their names in
    errors.
    """
    findings = Findings() if findings is None else findings
    names = module_names(model) if model is not None else {}
    with _python_draws_noted(findings, names), _RandomBranches(names):
        yield findings
