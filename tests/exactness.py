"""Local training in plain PyTorch, and the comparison with it: rule 1 of the design, exact to 1e-10
in float64.

This file knows nothing of Whale. `local_training` is the reference; a test fills a `Trace` from the
engine and calls `compare`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

EXACT_FLOAT64 = 1e-10
EXACT_FLOAT32 = 1e-5

Batch = Mapping[str, Any] | Sequence[Any] | Tensor
LossFunction = Callable[[Any, Any], Tensor]
MakeOptimizer = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


class Float64Mode(TorchFunctionMode):
    """Turns every request for float32 into one for float64, and makes float64 the default.

    Many models cast to float32 inside (softmax, norms, rotary tables, logits), which alone makes a
    perfect program differ from local training by 1e-7. Both sides run under this mode, capture
    included.
    """

    def __enter__(self) -> Float64Mode:
        self._defaults = [*getattr(self, "_defaults", []), torch.get_default_dtype()]
        torch.set_default_dtype(torch.float64)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(self._defaults.pop())

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(
            *map(_wide, args), **{name: _wide(value) for name, value in (kwargs or {}).items()}
        )


def _wide(argument: Any) -> Any:
    if isinstance(argument, torch.dtype) and argument is torch.float32:
        return torch.float64
    if isinstance(argument, str) and argument == "torch.FloatTensor":  # x.type("torch.FloatTensor")
        return "torch.DoubleTensor"
    return torch.DoubleTensor if argument is torch.FloatTensor else argument


@dataclass
class Trace:
    """What a training run left behind."""

    losses: list[float]
    """of every step"""
    gradients: dict[str, Tensor]
    """of the first step, for each parameter that got one, under the parameter's first name"""
    weights: dict[str, Tensor]
    """all parameters after the last step, frozen ones too, each under its first name"""
    buffers: dict[str, Tensor] | None = None
    """the buffers of the state dict after the last step; None: not looked at"""


def local_training(
    model: nn.Module,
    batches: Iterable[Batch],
    loss: LossFunction | None,
    make_optimizer: MakeOptimizer,
    num_micro_batch: int = 1,
) -> Trace:
    """Trains the model itself, one step for each batch, and tells what happened.

    `num_micro_batch` above 1 is for models with batch statistics, whose result depends on the
    micro-batches. Their losses are weighted by samples, which is right for a mean over samples
    only.
    """
    optimizer = make_optimizer(
        [
            (name, parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]
    )
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for batch in batches:
        optimizer.zero_grad()
        total = 0.0
        for part, share in micro_batches(batch, num_micro_batch):
            value = run_loss(model, part, loss) * share
            value.backward()
            total += value.item()
        if not losses:
            gradients = {
                name: item.grad.detach().clone()
                for name, item in model.named_parameters()
                if item.grad is not None
            }
        losses.append(total)
        optimizer.step()
    kept = set(model.state_dict())
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return Trace(
        losses,
        gradients,
        weights,
        {name: buffer.clone() for name, buffer in model.named_buffers() if name in kept},
    )


def three_layers() -> nn.Module:
    """Three layers of width 6 in float64, drawn one after the other from the present random state,
    as small scripts do.
    """
    layers = [nn.Linear(6, 6, dtype=torch.float64) for _ in range(3)]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def mean_square(output: Tensor, batch: Tensor) -> Tensor:
    """A loss that needs no labels."""
    return output.square().mean()


def run_loss(model: nn.Module, batch: Batch, loss: LossFunction | None) -> Tensor:
    """The loss of one batch: a dict is keyword arguments, a tuple positional ones, a tensor the
    only one.
    """
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, Tensor):
        output = model(batch)
    else:
        output = model(*batch)
    if loss is not None:
        return loss(output, batch)
    return output if isinstance(output, Tensor) else output.loss


def micro_batches(batch: Batch, number: int) -> list[tuple[Any, float]]:
    """Contiguous parts of the batch with their share of the samples; sizes differ by at most one,
    larger ones first.
    """
    if number == 1:
        return [(batch, 1.0)]
    tensors = (
        [batch]
        if isinstance(batch, Tensor)
        else list(batch.values() if isinstance(batch, Mapping) else batch)
    )
    num_samples = next(len(item) for item in tensors if isinstance(item, Tensor))
    small, more = divmod(num_samples, number)
    ends = [index * small + min(index, more) for index in range(number + 1)]
    parts = []
    for start, end in zip(ends, ends[1:]):
        cut = [
            item[start:end]
            if isinstance(item, Tensor) and item.dim() and len(item) == num_samples
            else item
            for item in tensors
        ]
        part = (
            cut[0]
            if isinstance(batch, Tensor)
            else dict(zip(batch, cut))
            if isinstance(batch, Mapping)
            else tuple(cut)
        )
        parts.append((part, (end - start) / num_samples))
    return parts


def compare(reference: Trace, got: Trace, tolerance: float = EXACT_FLOAT64) -> None:
    """Asserts |a - b| <= tolerance x the largest |a| of the whole model, for losses, gradients and
    weights each.
    """
    assert len(reference.losses) == len(got.losses), (
        f"{len(reference.losses)} steps in local training, {len(got.losses)} here"
    )
    steps = {
        f"step {number}": torch.tensor(loss, dtype=torch.float64)
        for number, loss in enumerate(reference.losses, 1)
    }
    got_steps = {
        f"step {number}": torch.tensor(loss, dtype=torch.float64)
        for number, loss in enumerate(got.losses, 1)
    }
    _compare_tensors("loss", steps, got_steps, tolerance)
    _compare_tensors("gradient", reference.gradients, got.gradients, tolerance)
    _compare_tensors("weight", reference.weights, got.weights, tolerance)
    if got.buffers is not None:
        _compare_tensors("buffer", reference.buffers or {}, got.buffers, tolerance)


def _compare_tensors(
    what: str, reference: Mapping[str, Tensor], got: Mapping[str, Tensor], tolerance: float
) -> None:
    """One group of named tensors; the message names the worst."""
    missing = sorted(set(reference) - set(got))
    extra = sorted(set(got) - set(reference))
    assert not missing and not extra, (
        f"{what} names differ: missing {missing[:8]}, not in local training {extra[:8]}"
    )
    if not reference:
        return
    largest = max(_largest(tensor) for tensor in reference.values())
    worst_name = ""
    worst = -1.0
    for name, tensor in reference.items():
        other = got[name]
        assert tensor.shape == other.shape, (
            f"{what} {name}: shape {tuple(other.shape)}, in local training {tuple(tensor.shape)}"
        )
        assert tensor.dtype == other.dtype, (
            f"{what} {name}: {other.dtype}, in local training {tensor.dtype}"
        )
        wide = torch.promote_types(tensor.dtype, torch.float64)
        difference = _largest(tensor.to(wide) - other.to(wide))
        if not math.isfinite(difference):
            raise AssertionError(
                f"{what} {name} is not finite: largest {_largest(other)}, in local training "
                f"{_largest(tensor)}"
            )
        if difference > worst:
            worst_name = name
            worst = difference
    assert worst <= tolerance * largest, (
        f"{what} differs from local training, most in {worst_name}: {worst:.3g}, which is "
        f"{worst / (largest or 1):.3g} of the largest "
        f"{what} {largest:.3g}; allowed {tolerance:.3g}"
    )


def _largest(tensor: Tensor) -> float:
    return tensor.detach().abs().max().item() if tensor.numel() else 0.0
