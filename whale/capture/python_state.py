"""What a forward does in Python and a graph cannot hold: random decisions, and state on the model.

Random branches. LayerDrop in Hugging Face models reads `if self.training and torch.rand([]) <
self.layerdrop: continue`. For torch.export this is a branch on the value of a tensor, and it stops
even at `layerdrop = 0.0`, where the branch is never taken. Under `random_branches` a number r drawn
from [0, 1) is known by its bounds:

    r < p    is False for p <= 0 and True for p >= 1
    r <= p   is False for p < 0  and True for p >= 1
    r > p    is the opposite of r <= p,  r >= p of r < p

and `bool()` of such a comparison needs no value. Anything in between is a real random branch, which
one graph cannot hold. Comparisons that are not used as a Python bool stay operations of the graph,
and so do all draws.

Python's and numpy's random numbers are worse: the export would bake one draw into the graph,
without a word. Each is noted, unless it was only compared with a number that decides by itself
(layerdrop 0 again).

Weights that forward freezes for a while (`p.requires_grad_(False)`, for the second loss of a GAN)
are noted: a graph keeps none of it, and the weights would train through both losses.

State on the model, besides what is written in place:

    self.count = self.count + 1    a buffer          `assigned_buffers_written` makes it a write, as
                                                     `self.count.add_(1)` is
    self.count += 1                a Python number   the graph would hold its first value for ever
    self.mean = 0.9 * self.mean    a plain tensor    the same

The last two are found by `ForwardState`; a model whose next call depends on them is refused
(`second_call`).
"""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from whale.capture.errors import NOWHERE, CaptureError, Place, calling_place, module_names
from whale.capture.guards import FREEZING, PYTHON_RANDOM, Findings
from whale.compat import patched, tensor_stores, unsaved_buffers
from whale.names import names_of

_TRY_RANDOM = (
    "draw with torch (`torch.rand(..., device=x.device)`), switch the random part off (layerdrop "
    "0, SpecAugment off), or draw outside the model and give it in the batch; the captured graph "
    "would repeat this one draw in every step"
)
_TRY_BRANCH = (
    "set the probability to 0 (Hugging Face: `config.layerdrop = 0.0`, `config.encoder_layerdrop "
    "= 0.0` and `decoder_layerdrop`), "
    "or keep the branch as tensors: `torch.where(torch.rand(()) < p, a, b)`"
)
_TRY_FORM = "make it as large as it may become, and cast what is written to it"

_NEW_DRAWS = {torch.rand, torch.rand_like}
_MAY_DRAW = {*_NEW_DRAWS, torch.Tensor.uniform_}
_SET_REQUIRES_GRAD = {torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
# methods of a tensor whose result is the same draw
_SAME_DRAW = {
    getattr(torch.Tensor, name)
    for name in names_of("item squeeze reshape view flatten __getitem__ to cpu detach float double")
}
_COMPARISONS: dict[Any, str] = {}
for _name in ("lt", "le", "gt", "ge"):
    _COMPARISONS[getattr(torch, _name)] = _name
    _COMPARISONS[getattr(torch.Tensor, _name)] = _name
    _COMPARISONS[getattr(torch.Tensor, f"__{_name}__")] = _name
_PYTHON_DRAWS = names_of(
    "random uniform randint randrange getrandbits choice choices sample shuffle gauss "
    "normalvariate betavariate expovariate triangular"
)
_NUMPY_DRAWS = names_of(
    "random random_sample ranf sample rand randn randint uniform normal standard_normal choice "
    "permutation shuffle binomial beta exponential poisson default_rng"
)
_UNIT_DRAWS = names_of(
    "random.random numpy.random.random numpy.random.random_sample numpy.random.rand"
)


# --- random numbers


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


@contextmanager
def random_branches(
    model: nn.Module | None = None, findings: Findings | None = None
) -> Iterator[Findings]:
    """Decides random branches of probability 0 or 1 while `torch.export.export` runs inside,
    refuses others, and notes random numbers of Python.

    With `findings` (of `guards.watch`) the notes go there; `model` gives modules their names in
    errors.
    """
    findings = Findings() if findings is None else findings
    names = module_names(model) if model is not None else {}
    with _python_draws_noted(findings, names), _Branches(names, findings):
        yield findings


class _Branches(TorchFunctionMode):
    """Follows single uniform draws to the comparison and to the `bool()` that asks for it. Notes
    parameters whose `requires_grad` changes.
    """

    def __init__(self, names: dict[int, str], findings: Findings) -> None:
        super().__init__()
        self.names = names
        self.findings = findings
        # by id, with the tensor itself so that the id stays its own; comparisons with what is
        # decided and the number
        self.draws: dict[int, torch.Tensor] = {}
        self.compared: dict[int, tuple[torch.Tensor, bool | None, float]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SET_REQUIRES_GRAD:
            self._note_freezing(*args, **kwargs)
        if not self.draws and func not in _MAY_DRAW:
            return func(*args, **kwargs)  # nearly always: every call of torch comes through here
        first: Any = args[0] if args else None
        if id(first) in self.compared and func in (torch.Tensor.__bool__, torch.Tensor.item):
            return self._answer(*self.compared[id(first)][1:])
        if func is torch.Tensor.item and id(first) in self.draws:
            # a tensor without dims works like the number in arithmetic, and its comparisons can be
            # followed
            result = first.reshape(())
        else:
            result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            self._follow(func, args, kwargs, result)
        return result

    def _note_freezing(self, tensor: torch.Tensor, requires_grad: bool = True) -> None:
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad != requires_grad:
            place = calling_place(self.names)
            if place.file:
                self.findings.add(FREEZING, place.module or place.class_name, place)

    def _follow(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: torch.Tensor,
    ) -> None:
        of_draw = bool(args) and id(args[0]) in self.draws
        is_new = func in _NEW_DRAWS or _is_unit_uniform(func, args, kwargs)
        if is_new or (of_draw and func in _SAME_DRAW):
            # symbolic sizes are never asked: they are never one draw for a branch
            if all(isinstance(size, int) and size == 1 for size in result.shape):
                self.draws[id(result)] = result
        elif of_draw and func in _COMPARISONS:
            if len(args) == 2 and isinstance(args[1], (int, float)):
                decided = decide(_COMPARISONS[func], args[1])
                self.compared[id(result)] = (result, decided, float(args[1]))

    def _answer(self, decided: bool | None, p: float) -> bool:
        if decided is not None:
            return decided
        raise CaptureError(
            f"The model cannot be captured.\n  at {calling_place(self.names).describe()}\n"
            "  What is wrong: a random number decides here which code runs, by comparison with "
            f"{p:g}; one graph has one path.\n"
            f"  Try: {_TRY_BRANCH}."
        )


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
    """Notes calls of `random.*` and `numpy.random.*`, and changes of their states by functions that
    were imported under another name before.
    """
    draws: list[tuple[str, Place, Any]] = []
    thread = threading.get_ident()

    def noted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def draw(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if threading.get_ident() != thread:
                return result  # a data loader, not the model
            is_unit = name in _UNIT_DRAWS or (
                name.endswith(".uniform") and not kwargs and args in ((0, 1), ())
            )
            if is_unit and isinstance(result, float):
                result = _PythonDraw(result)
            draws.append((name, calling_place(names), result))
            return result

        return draw

    before = random.getstate(), _numpy_state()
    try:
        with ExitStack() as stack:
            for module, functions in ((random, _PYTHON_DRAWS), (numpy.random, _NUMPY_DRAWS)):
                for name in functions:
                    handler = noted(f"{module.__name__}.{name}", getattr(module, name))
                    stack.enter_context(patched(module, name, handler))
            yield
    finally:
        for name, place, result in draws:
            if place.file and not getattr(result, "harmless", False):
                findings.add(PYTHON_RANDOM, name, place, _TRY_RANDOM)
        after = random.getstate(), _numpy_state()
        for library, was, now in zip(("random", "numpy.random"), before, after, strict=True):
            if was != now and not any(name.startswith(library + ".") for name, _, _ in draws):
                findings.add(PYTHON_RANDOM, library, NOWHERE, _TRY_RANDOM)


def _numpy_state() -> tuple[Any, ...]:
    kind, keys, position, *rest = numpy.random.get_state()
    return kind, numpy.asarray(keys).tobytes(), position, *rest


# --- state on the model


@contextmanager
def assigned_buffers_written(model: nn.Module, keep_rebuilt: bool = False) -> Iterator[list[str]]:
    """`self.buffer = new` inside becomes `self.buffer.copy_(new)` at the end, which is what a
    capture keeps. Gives the names of buffers that forward made anew.

    A buffer that is not saved and gets another form, or is there for the first time, is a table
    that forward makes when it needs one: the graph makes it every time. That it depends on nothing
    from call to call is looked at by `second_call`, for which it stays there (`keep_rebuilt`).
    """
    before = []
    unsaved = set()
    for prefix, module in model.named_modules():
        store = tensor_stores(module)[1]
        for leaf, old in store.items():
            before.append((_join(prefix, leaf), store, leaf, old))
        unsaved |= {_join(prefix, leaf) for leaf in unsaved_buffers(module)}
    rebuilt: list[str] = []
    yield rebuilt
    known = {name for name, _, _, _ in before}
    for prefix, module in model.named_modules():
        names = [_join(prefix, leaf) for leaf in tensor_stores(module)[1]]
        rebuilt += [name for name in names if name not in known]
    for name, store, leaf, old in before:
        new = store.get(leaf)
        if new is old:
            continue
        if old is None:
            rebuilt.append(name)
            continue
        if new is not None and _form(new) != _form(old) and name in unsaved:
            rebuilt.append(name)
            store[leaf] = new if keep_rebuilt else old
            continue
        store[leaf] = old
        _check_assigned(name, old, new)
        assert new is not None
        with torch.no_grad():
            old.copy_(new)


def _join(prefix: str, leaf: str) -> str:
    return f"{prefix}.{leaf}" if prefix else leaf


def _check_assigned(name: str, old: torch.Tensor, new: torch.Tensor | None) -> None:
    if new is None:
        raise CaptureError(
            f"forward sets the buffer {name} to None or removes it: a captured buffer stays. "
            "Try: write a value instead"
        )
    if new.shape != old.shape or new.dtype != old.dtype:
        raise CaptureError(
            f"forward gives the buffer {name} another form: {_form(old)} becomes {_form(new)}. A "
            f"captured buffer keeps its form. Try: {_TRY_FORM}"
        )
    if new.requires_grad:
        raise CaptureError(
            f"forward assigns to the buffer {name} a value that carries a gradient, which local "
            "training could not go back through in the next step. Try: assign `value.detach()`"
        )


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
