"""`torch.autograd.Function` as an operation of the graph, with the backward that the user wrote.

An export keeps what the forward of a Function does, and autograd then differentiates that: the
straight-through gradient of `x.round()` would be zero. Where the two gradients differ, the call
becomes an operation of its own (`torch.library.custom_op`), whose backward is the Function's:

    is_own_gradient   do both give the same gradients, on random inputs of the same form?
    operation_of      the operation for a class and the Python numbers that it was called with

A Function that only saves memory (the GELU of some models) has the gradient of its forward, and its
forward stays in the graph, where it can be sharded.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor

from whale.compat import stored_alike, without_modes, without_tracing

NAMESPACE = "whale_functions"
MOST_ELEMENTS = 1 << 24
"""of the inputs on which gradients are compared"""
TOLERANCE = 1e-3
TINY = 1e-6
"""gradients below this count as zero"""

Arguments = Sequence[Any]


class CannotBecomeOperation(Exception):
    """A Function that takes or gives something else than tensors and plain values."""


class Context:
    """What stands in for `ctx` of a Function."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        del tensors

    def mark_non_differentiable(self, *tensors: Any) -> None:
        del tensors

    def set_materialize_grads(self, value: bool) -> None:
        del value

    def mark_dirty(self, *tensors: Any) -> None:
        del tensors
        raise CannotBecomeOperation("it writes to its inputs")


def run_forward(cls: Any, args: Arguments) -> tuple[Context, Any]:
    """(what the forward left for the backward, its result)."""
    needs = tuple(isinstance(each, Tensor) and each.requires_grad for each in args)
    context = Context(needs)
    if cls.setup_context is torch.autograd.Function.setup_context:
        return context, cls.forward(context, *args)
    result = cls.forward(*args)
    cls.setup_context(context, tuple(args), result)
    return context, result


def is_own_gradient(apply: Callable[..., Any], cls: Any, args: Arguments) -> bool:
    """Whether the gradients of a Function are those of what its forward computes; False where they
    differ or cannot be compared. `apply`: torch's own.
    """
    tensors = [each for each in args if isinstance(each, Tensor)]
    if sum(int(_known_numel(each)) for each in tensors) > MOST_ELEMENTS:
        return False
    try:
        with without_modes(), torch.random.fork_rng(devices=()), torch.enable_grad():
            torch.manual_seed(0)
            inputs = [_random_like(each) if isinstance(each, Tensor) else each for each in args]
            written = _gradients(apply(cls, *inputs), inputs)
            traced = _gradients(run_forward(cls, inputs)[1], inputs)
            return all(map(_is_close, written, traced))
    except Exception:
        return False


def _is_close(one: Tensor, other: Tensor) -> bool:
    if not one.numel():
        return True
    return float((one - other).abs().max()) <= TOLERANCE * max(float(one.abs().max()), TINY)


def _known_numel(tensor: Tensor) -> int:
    number = 1
    for size in tensor.shape:
        number *= size if isinstance(size, int) else size.node.hint
    return number


def _random_like(tensor: Tensor) -> Tensor:
    """A real tensor of the same form; integers are zero, which every index may be."""
    shape = [size if isinstance(size, int) else size.node.hint for size in tensor.shape]
    if not tensor.is_floating_point() and not tensor.is_complex():
        return torch.zeros(shape, dtype=tensor.dtype)
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return torch.randn(shape, dtype=wide).to(tensor.dtype).requires_grad_()


def _needs_gradient(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.requires_grad


def _gradients(result: Any, inputs: Arguments) -> list[Tensor]:
    """Gradients of the inputs for a fixed random gradient of the results; zero where none comes."""
    outputs = [result] if isinstance(result, Tensor) else list(result)
    wanted = list(filter(_needs_gradient, inputs))
    used = list(filter(_needs_gradient, outputs))
    if not used:
        return [torch.zeros_like(each) for each in wanted]
    torch.manual_seed(1)
    seeds = [torch.randn_like(each) for each in used]
    found = torch.autograd.grad(used, wanted, seeds, allow_unused=True)
    return [
        torch.zeros_like(each) if gradient is None else gradient
        for gradient, each in zip(found, wanted, strict=True)
    ]


@dataclass
class _Call:
    """The form of one call: which arguments are tensors or sizes, and the values of the others."""

    cls: Any
    values: tuple[Any, ...]
    """None in place of a tensor or size"""
    places: tuple[int, ...]
    """of tensors and sizes among the arguments"""
    kinds: tuple[str, ...]
    """`Tensor` or `SymInt`, of each of them"""
    num_results: int | None = None
    """None: one tensor, not in a tuple"""
    contexts: list[Context] = field(default_factory=list)
    """what a forward left, until autograd asks for it"""

    @property
    def key(self) -> str:
        plain = [(place, repr(value)) for place, value in enumerate(self.values)]
        parts = (self.cls.__module__, self.cls.__qualname__, plain, self.places, self.kinds)
        return repr((*parts, self.num_results))

    @property
    def name(self) -> str:
        """A name that all ranks give to this function alike."""
        short = re.sub(r"\W", "_", self.cls.__qualname__)
        return f"{short}_{hashlib.blake2b(self.key.encode(), digest_size=4).hexdigest()}"

    def arguments(self, given: Arguments) -> list[Any]:
        found = list(self.values)
        for place, value in zip(self.places, given, strict=True):
            found[place] = value
        return found

    def forward(self, *given: Any) -> Any:
        context, result = run_forward(self.cls, self.arguments(given))
        self.contexts = [context]
        if self.num_results is None:
            return _own(result, given)
        return tuple(_own(each, given) for each in result)

    def set_up(self, ctx: Any, inputs: Arguments, output: Any) -> None:
        del inputs, output  # names that torch passes
        context = self.contexts.pop()
        tensors = [isinstance(each, Tensor) for each in context.saved_tensors]
        ctx.others = [
            None if is_tensor else each
            for is_tensor, each in zip(tensors, context.saved_tensors, strict=True)
        ]
        ctx.is_tensor = tensors
        ctx.save_for_backward(*(each for each in context.saved_tensors if isinstance(each, Tensor)))
        context.saved_tensors = ()
        ctx.own = context

    def backward(self, ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)
        context = ctx.own
        context.saved_tensors = tuple(
            next(saved) if is_tensor else other
            for is_tensor, other in zip(ctx.is_tensor, ctx.others, strict=True)
        )
        needs = [False] * len(self.values)
        for place, needed in zip(self.places, ctx.needs_input_grad, strict=True):
            needs[place] = needed
        context.needs_input_grad = tuple(needs)
        try:
            found = self.cls.backward(context, *gradients)
        finally:
            context.saved_tensors = ()
        everything = found if isinstance(found, tuple | list) else (found,)
        chosen = []
        for place, kind in zip(self.places, self.kinds, strict=True):
            is_given = kind == "Tensor" and place < len(everything)
            chosen.append(everything[place] if is_given else None)
        return tuple(chosen)


def _own(result: Any, inputs: Arguments) -> Tensor:
    """A result in memory of its own: an operation may not hand on its inputs."""
    if not isinstance(result, Tensor):
        raise CannotBecomeOperation(f"it gives a {type(result).__name__}")
    shared = any(isinstance(each, Tensor) and stored_alike(result, each) for each in inputs)
    return result.clone() if shared else result


_made: dict[str, Any] = {}
"""operations of this process, by their name: torch keeps them for ever"""


def operation_of(cls: Any, args: Arguments) -> Callable[..., Any]:
    """A function that calls the operation with the tensors and sizes among these arguments."""
    values: list[Any] = []
    places: list[int] = []
    kinds: list[str] = []
    for place, value in enumerate(args):
        kind = "Tensor" if isinstance(value, Tensor) else "SymInt"
        if isinstance(value, Tensor | torch.SymInt):
            places.append(place)
            kinds.append(kind)
            values.append(None)
        elif isinstance(value, int | float | str | type(None) | torch.dtype | torch.Size):
            values.append(value)
        else:
            raise CannotBecomeOperation(f"it takes a {type(value).__name__}")
    call = _Call(cls, tuple(values), tuple(places), tuple(kinds))
    with without_tracing():
        result = run_forward(cls, args)[1]
    if not isinstance(result, Tensor):
        if not isinstance(result, tuple | list) or not all(isinstance(r, Tensor) for r in result):
            raise CannotBecomeOperation("it gives something else than tensors")
        call.num_results = len(result)
    if call.name not in _made:
        _made[call.name] = _define(call)
    operation = _made[call.name]
    return lambda *given: operation(*(given[place] for place in call.places))


def _define(call: _Call) -> Any:
    parameters = ", ".join(f"{kind} a{place}" for place, kind in zip(call.places, call.kinds))
    results = "Tensor"
    if call.num_results is not None:
        results = f"({', '.join(['Tensor'] * call.num_results)})"
    operation = torch.library.custom_op(
        f"{NAMESPACE}::{call.name}",
        call.forward,
        mutates_args=(),
        schema=f"({parameters}) -> {results}",
    )
    operation.register_fake(call.forward)
    operation.register_autograd(call.backward, setup_context=call.set_up)
    return operation
