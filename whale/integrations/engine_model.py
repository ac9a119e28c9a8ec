"""An engine behind the faces that a training loop knows: a module whose loss has a `backward`, and
an optimizer with `step` and `zero_grad`.

Calling the module in training runs forward *and* backward of the batch on all ranks at once, as
the plan says; the loss that it gives is one number of a graph with a single parameter, the engine.
What a loop does with it (divide it for accumulation, add another one) reaches the engine as one
factor when `loss.backward()` runs: the gradient of f(loss) is f'(loss) times that of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from whale import api
from whale.compat import pytree
from whale.distributed.ranks import Ranks
from whale.dtypes import in_memory
from whale.integrations.optimizers import EngineOptimizer, Remade
from whale.integrations.outside import refuse_gradients_from_outside
from whale.runtime.engine import Engine

SAME = 1e-5
"""relative difference up to which two losses of one batch, in eval mode, are taken for equal"""


@dataclass(frozen=True)
class Spread:
    """A model given to the ranks, and its faces for a training loop."""

    engine: Engine
    model: EngineModel
    optimizer: EngineOptimizer


def spread(
    model: torch.nn.Module,
    sample: Any,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Any, Any], Tensor] | None = None,
) -> Spread:
    """Parallelizes a model with the optimizer that a script has made for it."""
    factory = Remade(optimizer, model)
    sample = tuple(sample) if isinstance(sample, list) else sample
    engine = api.parallelize(model, sample, optimizer=factory.make, loss=loss)
    own = engine.optimizer or factory.without_parameters()
    # a schedule that still holds the script's optimizer sets the rates of this one
    optimizer.param_groups = own.param_groups
    named = sample if isinstance(sample, Mapping) else {}
    names = tuple(name for name, value in named.items() if isinstance(value, Tensor))
    return Spread(engine, EngineModel(engine, model, names), EngineOptimizer(engine, own))


class Output(dict[str, Any]):
    """What the engine's model gives: `output.loss`, `output["loss"]` or `output[0]`."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, (int, slice)):
            return tuple(self.values())[key]
        return super().__getitem__(key)

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(
            f"the output has no '{name}' here, only {', '.join(self) or 'nothing'}: in training "
            "the ranks give the loss alone. Try: model.eval() for other outputs, or a loss that "
            "is computed in the model's forward"
        )


class EngineModel(torch.nn.Module):
    """Stands where a loop has its model. Its parameters are the engine's: it has none."""

    def __init__(self, engine: Engine, model: torch.nn.Module, names: tuple[str, ...] = ()) -> None:
        """`names`: of the tensors that every batch has."""
        super().__init__()
        self.engine = engine
        self.with_outputs = True
        """whether an evaluation gives more than the loss"""
        self._described = [model]  # in a list: no submodule, its weights are not all here
        self._anchor = torch.zeros((), requires_grad=True)
        self._names = names
        self._number = 0
        self._kind: str | None = None
        refuse_gradients_from_outside(engine, model)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # config, generation settings and the like
            return getattr(self.__dict__["_described"][0], name)

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        """This rank's parameters that are trained."""
        return (parameter for _, parameter in self.engine.named_parameters())

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The same with their names in the model."""
        start = f"{prefix}." if prefix else ""
        return ((start + name, parameter) for name, parameter in self.engine.named_parameters())

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.engine.zero_gradients()

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        """The whole model's, on rank 0; empty elsewhere. All ranks must call it."""
        return self.engine.full_state_dict()

    def save_pretrained(self, folder: str | Path, **named: Any) -> None:
        """Writes the model for `from_pretrained`. All ranks must call it; who writes, and what, is
        known here.
        """
        for known in ("is_main_process", "save_function", "state_dict"):
            named.pop(known, None)
        self.engine.save_pretrained(folder, **named)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        batch = self._batch(arguments, named)
        known = batch if isinstance(batch, Mapping) else self._names
        missing = [name for name in self._names if name not in known]
        if missing and self.training and torch.is_grad_enabled():
            raise ValueError(
                f"the model is called without {', '.join(map(repr, missing))}, which the sample "
                "batch has: in training the ranks need the whole batch, and give the loss alone. "
                "Try: model(**batch).loss; where the script makes a loss of the outputs itself, "
                "prepare(..., loss=lambda output, batch: ...)"
            )
        return self.run(batch)

    def run(self, batch: Any) -> Any:
        """Trains on a batch, or evaluates it in eval mode and under `no_grad`."""
        batch = tuple(batch) if isinstance(batch, list) else batch
        # the captured graph has its own casts
        with torch.autocast(self.engine.ranks.device.type, enabled=False):
            if not (self.training and torch.is_grad_enabled()):
                return self._evaluated(batch)
            fitting, times = self._large_enough(batch)
            factor = 1.0 / times if times > 1 and self._is_sum(fitting) else 1.0
            self._number += 1
            value = self.engine.forward_backward(fitting).loss * factor
            plain = torch.tensor(value, dtype=self._dtype(), device=self.engine.ranks.device.name)
            loss = _LossOfEngine.apply(self._anchor, plain, self, self._number, factor)
        return loss if self.engine.model_returns_loss else Output(loss=loss)

    def accumulate(self, number: int, factor: float) -> None:
        """`loss.backward()` of batch `number`."""
        if number != self._number:
            raise RuntimeError(
                f"backward of the loss of batch {number}, but batch {self._number} was run since: "
                "the ranks hold the gradient of the latest batch only. "
                "Try: call backward before the model is called again"
            )
        self.engine.accumulate(factor)

    def _evaluated(self, batch: Any) -> Any:
        fitting, times = self._large_enough(batch)
        result = self.engine.evaluate(fitting, outputs=self.with_outputs)
        loss = result.loss
        if times > 1 and loss is not None and self._is_sum(fitting):
            loss /= times
        outputs = from_first(result.outputs, self.engine.ranks) if self.with_outputs else None
        plain = None if loss is None else torch.tensor(loss, dtype=self._dtype())
        if self.engine.model_returns_loss:
            return plain
        if not isinstance(outputs, dict):
            rest = {} if outputs is None else {"output": outputs}
            return Output(loss=plain, **rest) if plain is not None else outputs
        size = batch_size_of(fitting)
        cut = pytree.tree_map(lambda leaf: _first_rows(leaf, size, times), outputs)
        named = {"loss": plain, **{key: value for key, value in cut.items() if key != "loss"}}
        return Output({key: value for key, value in named.items() if value is not None})

    def _large_enough(self, batch: Any) -> tuple[Any, int]:
        """The batch, repeated where it has fewer samples than the devices that it is cut over, and
        how many times.
        """
        size = batch_size_of(batch)
        times = -(-self.engine.smallest_batch // size)
        return (batch, 1) if times <= 1 else (_repeated(batch, size, times), times)

    def _is_sum(self, repeated: Any) -> bool:
        """Whether the loss of a batch that is given twice is twice the loss; False where it is the
        same. Anything else is refused.
        """
        if self._kind is None:
            once = self.engine.evaluate(repeated).loss
            twice = self.engine.evaluate(_repeated(repeated, batch_size_of(repeated), 2)).loss
            for kind, factor in (("mean", 1.0), ("sum", 2.0)):
                if once and twice and abs(twice - factor * once) <= SAME * abs(twice):
                    self._kind = kind
        if self._kind is None:
            raise ValueError(
                f"a batch has fewer samples than the {self.engine.smallest_batch} devices that it "
                "is cut over, and the loss is neither a mean nor a sum over samples. "
                "Try: drop_last=True in the loader"
            )
        return self._kind == "sum"

    def _batch(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The batch in the form of the sample that the engine was made with."""
        if not arguments:
            return named
        if self.engine.takes_named:
            names = list(signature(self._described[0].forward).parameters)
            return {**dict(zip(names, arguments, strict=False)), **named}
        return arguments[0] if len(arguments) == 1 else tuple(arguments)

    def _dtype(self) -> torch.dtype:
        dtypes = {parameter.dtype for parameter in self._described[0].parameters()}
        return torch.float64 if torch.float64 in dtypes else torch.float32


class _LossOfEngine(torch.autograd.Function):
    """The loss of a batch; its backward tells the engine how much the batch's gradient counts."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, anchor: Tensor, loss: Tensor, model: EngineModel, number: int, factor: float
    ) -> Tensor:
        ctx.model = model
        ctx.number = number
        ctx.factor = factor
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        ctx.model.accumulate(ctx.number, float(gradient) * ctx.factor)
        return None, None, None, None, None


def from_first(outputs: Any, ranks: Ranks) -> Any:
    """Rank 0's tensors in their structure, on the CPU of every rank."""
    if not ranks.is_distributed:
        return outputs
    leaves, structure = pytree.tree_flatten(outputs)
    described = [
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves
    ]
    described, structure = ranks.from_first((described, structure))
    received = []
    for place, what in enumerate(described):
        if not isinstance(what, tuple):
            received.append(what)
            continue
        tensor = torch.empty(what[0], dtype=what[1], device=ranks.device.name)
        if ranks.rank == 0:
            tensor.copy_(leaves[place])
        if tensor.numel():
            dist.broadcast(in_memory(tensor), src=0)
        received.append(tensor.cpu())
    return pytree.tree_unflatten(received, structure)


def batch_size_of(batch: Any) -> int:
    """Number of samples: the size that most tensors begin with."""
    sizes = [leaf.shape[0] for leaf in pytree.tree_leaves(batch) if _has_rows(leaf)]
    return max(set(sizes), key=sizes.count)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0


def _repeated(batch: Any, size: int, times: int) -> Any:
    def repeat(leaf: Any) -> Any:
        return torch.cat([leaf] * times) if _has_rows(leaf) and leaf.shape[0] == size else leaf

    return pytree.tree_map(repeat, batch)


def _first_rows(leaf: Any, size: int, times: int) -> Any:
    if times > 1 and _has_rows(leaf) and leaf.shape[0] == size:
        return leaf[: size // times]
    return leaf
