"""What stands in for functions of torch and Python while a model is exported, because a graph could
not hold them as they are. Each computes the same.

    F.embedding_bag of a matrix       a lookup and a sum over dim 1: torch makes offsets of it,
                                      which say where each sample begins in the batch
    nn.TransformerEncoder(mask=...)   takes the mask as it is; torch reads its values to see whether
                                      it is causal, which only chooses a kernel
    F.ctc_loss of padded targets      the losses of the samples, then their mean or sum
    nn.AdaptiveLogSoftmaxWithLoss     every cluster computes all rows and a mask picks: torch's picks
                                      rows first, whose number depends on the targets
    F.gaussian_nll_loss               a negative variance gives NaN; torch reads all variances to
                                      raise
    torch.distributions               does not look whether values are possible ones: what comes of
                                      others is NaN or infinite, which stops the step
    torch.bincount(x, minlength=5)    counts of so many classes: torch's are as many as x has, or
                                      more; a class beyond them stops the step
    torch.fake_quantize_per_...       the same numbers by elementwise operations: export does not
                                      know the shape of the result
    torch.istft                       the same sums, NaN where no window reaches; torch reads the
                                      sum of the windows to raise
    torch.arange(2, 5).tolist()       the numbers: they depend on nothing
    int(size) for size in x.shape     the size as it is, still a symbol (`sizes_stay_symbols`)
    float(x.shape[0]), len(x)         the same
    x.take_along_dim(places, dim)     a `gather`: torch compares sizes of other dims as numbers
    x.data                            `x.detach()`, the same numbers in the same memory: torch's
                                      leaves the graph. Writes to it are refused
    torch.autograd.grad in forward    refused by its line
    self.layer.to(x.device)           nothing, where all weights are there and of that type already;
                                      else refused by its line
"""

from __future__ import annotations

import builtins
import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.traceback import annotate
from torch.overrides import TorchFunctionMode

from whale.capture.ctc_loss import ctc_loss
from whale.capture.errors import CaptureError, calling_place
from whale.capture.fake_quantize import fake_quantize_per_channel, fake_quantize_per_tensor
from whale.capture.guards import code_swapped
from whale.capture.istft import istft
from whale.capture.out_of_place import DATA_TAG, OTHER_THAN_DATA
from whale.capture.size_numbers import SizeNumbers
from whale.compat import (
    AdaptiveOutput,
    causal_mask_detection,
    conversion_of_modules,
    is_fake,
    is_wrapped_by_transform,
    patched,
    patched_item,
    pytree,
    without_modes,
    without_tracing,
)
from whale.compat.exporting import TORCH_FOLDER
from whale.error_reports import PACKAGE
from whale.names import names_of

NO_BAG = float("-inf")


@contextmanager
def stand_ins() -> Iterator[None]:
    """Puts the functions of this file in the place of torch's, while `torch.export.export` runs
    inside.
    """
    with ExitStack() as stack:
        stack.enter_context(code_swapped(inspect.unwrap(F.embedding_bag), _embedding_bag))
        stack.enter_context(code_swapped(inspect.unwrap(F.ctc_loss), _ctc_loss))
        stack.enter_context(code_swapped(inspect.unwrap(F.gaussian_nll_loss), _gaussian_nll_loss))
        stack.enter_context(
            code_swapped(nn.AdaptiveLogSoftmaxWithLoss.forward, _adaptive_log_softmax)
        )
        stack.enter_context(code_swapped(causal_mask_detection, _is_causal))
        stack.enter_context(patched(torch.distributions.Distribution, "_validate_args", False))
        stack.enter_context(code_swapped(torch.autograd.grad, _refuse_gradient))
        stack.enter_context(code_swapped(conversion_of_modules, _move_nothing))
        stack.enter_context(_KnownNumbers())
        yield


@contextmanager
def not_exporting() -> Iterator[None]:
    """A model that asks whether it is compiled or exported hears that it is not, while
    `torch.export.export` runs inside: it takes its path of training. Torch gets its own answers.
    """
    with (
        code_swapped(torch.compiler.is_compiling, _only_for_torch),
        code_swapped(torch.compiler.is_exporting, _only_for_torch),
    ):
        yield


def _only_for_torch(original: Callable[[], bool]) -> bool:
    """What torch says of itself, if torch asks, or Whale in a hook of a model that is spread."""
    # behind this function, the call of its swapped code and that code itself
    asking = sys._getframe(3)
    while asking.f_back is not None and asking.f_code.co_name == "is_compiling":
        asking = asking.f_back  # `torch._dynamo.is_compiling` asks for somebody else
    return original() and asking.f_code.co_filename.startswith((TORCH_FOLDER, f"{PACKAGE}{os.sep}"))


def _is_causal(
    original: Callable[..., bool],
    mask: Tensor | None,
    is_causal: bool | None = None,
    size: int | None = None,
) -> bool:
    """Whether torch may take a mask for causal; without a word of the user it is used as it is."""
    del original, mask, size
    return bool(is_causal)


def _embedding_bag(original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """`F.embedding_bag`; a matrix of tokens (bag, token) without offsets."""
    given = inspect.signature(original).bind(*args, **kwargs)
    given.apply_defaults()
    options = given.arguments
    tokens = options["input"]
    changes_weights = options["max_norm"] is not None or options["scale_grad_by_freq"]
    if tokens.ndim != 2 or options["offsets"] is not None or changes_weights:
        return original(*args, **kwargs)
    # (bag, token, feature)
    rows = F.embedding(tokens, options["weight"], sparse=options["sparse"])
    if options["per_sample_weights"] is not None:
        rows = rows * options["per_sample_weights"].unsqueeze(-1)
    padding = options["padding_idx"]
    if padding is None:
        if options["mode"] == "max":
            return rows.max(1).values
        return rows.sum(1) if options["mode"] == "sum" else rows.mean(1)
    counts = (tokens != padding % options["weight"].shape[0]).unsqueeze(-1)
    if options["mode"] == "max":
        largest = rows.masked_fill(~counts, NO_BAG).max(1).values
        return torch.where(counts.any(1), largest, 0.0)
    total = torch.where(counts, rows, 0.0).sum(1)
    return total if options["mode"] == "sum" else total / counts.sum(1).clamp(min=1)


def _ctc_loss(original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """`F.ctc_loss`; targets (sample, label) with the lengths of all samples as tensors."""
    given = inspect.signature(original).bind(*args, **kwargs)
    given.apply_defaults()
    options = given.arguments
    lengths = options["target_lengths"]
    is_tensors = isinstance(lengths, Tensor) and isinstance(options["input_lengths"], Tensor)
    if not is_tensors or options["targets"].ndim != 2 or options["log_probs"].ndim != 3:
        return original(*args, **kwargs)
    losses, _ = ctc_loss(
        options["log_probs"],
        options["targets"],
        options["input_lengths"],
        lengths,
        options["blank"],
        options["zero_infinity"],
    )
    if options["zero_infinity"]:
        losses = torch.where(losses == float("inf"), 0.0, losses)
    if options["reduction"] == "mean":
        return (losses / lengths.to(losses).clamp(min=1)).mean()
    return losses.sum() if options["reduction"] == "sum" else losses


def _adaptive_log_softmax(
    original: Callable[..., Any], module: nn.AdaptiveLogSoftmaxWithLoss, x: Tensor, target: Tensor
) -> Any:
    """`nn.AdaptiveLogSoftmaxWithLoss`; x [row, feature], target [row]. Classes below the first
    cutoff are in the head, which has an entry for each further cluster, too.
    """
    if target.ndim != 1 or x.ndim != 2:
        return original(module, x, target)
    in_head = target
    in_tail: Tensor | float = 0.0
    limits = zip(module.cutoffs, module.cutoffs[1:], strict=False)
    for number, (low, high) in enumerate(limits):
        is_here = (target >= low) & (target < high)
        scores = F.log_softmax(module.tail[number](x), dim=1)
        own = (target - low).clamp(0, high - low - 1).unsqueeze(1)
        in_tail = in_tail + torch.where(is_here, scores.gather(1, own).squeeze(1), 0.0)
        in_head = torch.where(is_here, module.shortlist_size + number, in_head)
    head = F.log_softmax(module.head(x), dim=1).gather(1, in_head.unsqueeze(1)).squeeze(1)
    output = head + in_tail
    return AdaptiveOutput(output, -output.mean())


def _gaussian_nll_loss(
    original: Callable[..., Tensor],
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """`F.gaussian_nll_loss`, whose only use of `torch.any` is to refuse negative variances."""
    if isinstance(var, Tensor):
        var = torch.where(var < 0, float("nan"), var)
    with patched(torch, "any", lambda _: False):
        return original(input, target, var, *args, **kwargs)


def _bincount(classes: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """`torch.bincount` of classes (any number) that are all less than `minlength`."""
    if not minlength:
        raise CaptureError(
            "The model cannot be captured.\n"
            f"  at {calling_place().describe()}\n"
            "  What is wrong: the length of what `bincount` gives depends on what the tensor "
            "holds.\n"
            "  Try: say how many classes there are, `torch.bincount(x, minlength=num_classes)`."
        )
    hot = F.one_hot(classes, minlength)  # (number, class)
    if weights is None:
        return hot.sum(0)
    return (hot * weights.unsqueeze(-1)).sum(0)


def _refuse_gradient(original: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
    """A graph holds what forward computes; what autograd does in forward leaves it. Tensors with
    data are those of our own comparisons; transforms of `torch.func` are found in the graph.
    """
    tensors = pytree.tree_leaves(outputs)
    if not any(is_fake(each) and not is_wrapped_by_transform(each) for each in tensors):
        return original(outputs, *args, **kwargs)
    raise CaptureError(
        "The model cannot be captured.\n"
        f"  at {calling_place().describe()}\n"
        "  What is wrong: forward takes a gradient itself (`torch.autograd.grad`, for a gradient "
        "penalty, forces, or derivatives in a physics loss), and a captured graph holds only what "
        "forward computes.\n"
        "  Try: compute the derivative with tensors, layer by layer beside the values (behind `y = "
        "torch.tanh(a)` it is `(1 - y * y) * da`, behind a linear layer `da @ weight.T`; again for "
        "second derivatives), or by differences, `(u(x + h) - u(x - h)) / (2 * h)`."
    )


def _move_nothing(
    original: Callable[..., nn.Module],
    module: nn.Module,
    change: Callable[[Tensor], Tensor],
    *args: Any,
    **kwargs: Any,
) -> nn.Module:
    """`module.to(...)`, `.float()` in forward: torch would put new tensors into the
    places of the fake weights, which it cannot, even if they are the same.
    """
    tensors = [*module.parameters(), *module.buffers()]
    if not any(is_fake(tensor) for tensor in tensors):
        return original(module, change, *args, **kwargs)
    with without_tracing():
        for tensor in tensors:
            changed = change(tensor.detach())
            if (changed.dtype, changed.device) != (tensor.dtype, tensor.device):
                raise CaptureError(
                    "The model cannot be captured.\n"
                    f"  at {calling_place().describe()}\n"
                    f"  What is wrong: forward moves or casts weights of `{type(module).__name__}`"
                    f" itself, from {tensor.dtype} on {tensor.device} to {changed.dtype} on "
                    f"{changed.device}; in a captured graph they stay as they are.\n"
                    "  Try: cast the model before `wh.parallelize`, or what goes into it "
                    "(`layer(x.to(layer.weight.dtype))`)."
                )
    return module


def _data(tensor: Tensor) -> Tensor:
    """`tensor.data`, marked: a write to it would pass by autograd."""
    with annotate({DATA_TAG: True}):
        return tensor.detach()


def _refuse_data(tensor: Tensor, value: Tensor) -> None:
    """`tensor.data = value`."""
    del tensor, value
    raise CaptureError(
        "The model cannot be captured.\n"
        f"  at {calling_place().describe()}\n"
        f"  What is wrong: `.data` gets another tensor, behind the back of the graph.\n"
        f"  Try: {OTHER_THAN_DATA}."
    )


def _take_along_dim(values: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """`torch.take_along_dim`, which compares the sizes of other dims as numbers."""
    if dim is None:
        return values.flatten().gather(0, indices.flatten())
    sizes = []
    for own, other in zip(values.shape, indices.shape, strict=True):
        is_one = isinstance(own, int) and own == 1  # a symbol is never asked
        sizes.append(other if is_one else own)
    place = dim % values.ndim
    of_values = [*sizes]
    of_values[place] = values.shape[place]
    of_indices = [*sizes]
    of_indices[place] = indices.shape[place]
    return values.expand(of_values).gather(place, indices.expand(of_indices))


class _KnownNumbers(TorchFunctionMode):
    """Calls the stand-ins of functions of torch's C++, and remembers tensors that are made of
    Python numbers alone, until somebody asks for these.
    """

    STAND_INS: ClassVar[dict[Callable[..., Any], Callable[..., Any]]] = {
        torch.bincount: _bincount,
        torch.Tensor.bincount: _bincount,
        torch.fake_quantize_per_channel_affine: fake_quantize_per_channel,
        torch.fake_quantize_per_tensor_affine: fake_quantize_per_tensor,
        torch.take_along_dim: _take_along_dim,
        torch.Tensor.take_along_dim: _take_along_dim,
        torch.istft: istft,
        torch.Tensor.istft: istft,
        torch.Tensor.data.__get__: _data,  # type: ignore[attr-defined]
        torch.Tensor.data.__set__: _refuse_data,  # type: ignore[attr-defined]
    }
    """of functions that are no Python code, which could be swapped"""
    MAKERS = (torch.arange, torch.linspace)
    FOLLOWED = names_of("__getitem__ unbind select __mul__ __rmul__ __add__ __radd__ __sub__ flip")
    """operations after which the numbers are still known, where all else is numbers"""

    def __init__(self) -> None:
        super().__init__()
        # by id, with the tensor itself so that the id stays its own, and what computes it
        self.known: dict[int, tuple[Tensor, Callable[[], Any]]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in self.STAND_INS:
            return self.STAND_INS[func](*args, **kwargs)
        if func in self.MAKERS:
            result = func(*args, **kwargs)
            numbers = [*args, *(kwargs.get(name, 0) for name in ("start", "end", "step", "steps"))]
            if all(isinstance(number, int | float) for number in numbers):
                self._know(result, lambda: func(*args, **{**kwargs, "device": "cpu"}))
            return result
        if not self.known or not args or id(args[0]) not in self.known:
            return func(*args, **kwargs)  # nearly always: every call of torch comes through here
        compute = self.known[id(args[0])][1]
        if func in (torch.Tensor.tolist, torch.Tensor.item):
            with without_modes():
                return func(compute())
        result = func(*args, **kwargs)
        plain = all(isinstance(each, int | float | slice) for each in args[1:]) and not kwargs
        if plain and getattr(func, "__name__", "") in self.FOLLOWED:
            self._know(result, lambda: func(compute(), *args[1:]))
        return result

    def _know(self, result: Any, compute: Callable[[], Any]) -> None:
        if isinstance(result, Tensor):
            self.known[id(result)] = (result, compute)
        elif isinstance(result, tuple | list):
            for place, each in enumerate(result):
                self._know(each, partial(lambda place: compute()[place], place))


class _SymbolicNumber(type):
    """The type of `SymbolicInt` and `SymbolicFloat`: they are taken for the types of Python."""

    number: type
    keep: Callable[[torch.SymInt], Any]

    def __call__(cls, value: Any = 0, *args: Any) -> Any:
        return cls.keep(value) if isinstance(value, torch.SymInt) else cls.number(value, *args)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.number)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, cls.number)

    def __eq__(cls, other: object) -> bool:
        return other is cls.number or other is cls

    def __hash__(cls) -> builtins.int:
        return hash(cls.number)


class SymbolicInt(builtins.int, metaclass=_SymbolicNumber):
    """`int` for the files of a model: leaves a symbolic size as it is, where `int` would make it
    the number of the sample batch.
    """

    number = builtins.int
    keep = staticmethod(lambda size: size)


class SymbolicFloat(builtins.float, metaclass=_SymbolicNumber):
    """`float` for the files of a model: of a symbolic size, a symbol."""

    number = builtins.float
    keep = staticmethod(torch.sym_float)


def symbolic_len(value: Any) -> Any:
    """`len` for the files of a model: of a tensor its first size, which may be a symbol."""
    if isinstance(value, Tensor) and value.ndim:
        return value.shape[0]
    return builtins.len(value)


@contextmanager
def sizes_stay_symbols(
    files: Collection[str], hashing: Collection[str] = (), floats: Collection[str] = ()
) -> Iterator[None]:
    """`int(size)` and `len(tensor)` in these files give the symbol, and `float(size)` in `floats`
    one that is a float; in those that hash sizes, `int` gives a number that stands for it.
    """
    lengths = set(map(os.path.abspath, files))
    with_float = set(map(os.path.abspath, floats))
    numbers = SizeNumbers()
    stand_in: dict[str, Any] = dict.fromkeys(map(os.path.abspath, files), SymbolicInt)
    stand_in |= dict.fromkeys(map(os.path.abspath, hashing), numbers.number_of)
    with ExitStack() as stack:
        for module in list(sys.modules.values()) if stand_in or with_float else ():
            file = os.path.abspath(getattr(module, "__file__", None) or "")
            if file in stand_in:
                stack.enter_context(patched_item(vars(module), "int", stand_in[file]))
            if file in lengths:
                stack.enter_context(patched_item(vars(module), "len", symbolic_len))
            if file in with_float:
                stack.enter_context(patched_item(vars(module), "float", SymbolicFloat))
        if hashing:
            stack.enter_context(numbers)
        yield
