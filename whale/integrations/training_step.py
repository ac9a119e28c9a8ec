"""The `training_step` of a LightningModule as a model that is captured."""

from __future__ import annotations

import contextlib
import dis
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from whale.capture.python_numbers import read_by_own_methods
from whale.compat import pytree
from whale.integrations.engine_model import batch_size_of

logger = logging.getLogger("whale")

OF_BATCH = "of the batch"
"""stands for `batch_size=` of a log where that is the number of samples"""


class Noted:
    """What `training_step` does with its loss besides giving it, seen in a capture and repeated with
    the loss of every batch.

    The strategy holds it, the module only a weak reference: what forward leaves on a model is taken
    back after a capture.
    """

    def __init__(self) -> None:
        self.options: dict[str, dict[str, Any]] = {}
        """how it is logged, by name"""
        self.lists: list[str] = []
        """attributes of the module that it is appended to"""
        self.metrics: list[str] = []
        """modules of the module that count what they see, and see no batch"""

    def take(self, values: dict[str, Any]) -> None:
        """What another rank has seen."""
        self.__dict__.update(values)

    def repeat(self, module: Any, loss: Tensor, batch: Any) -> None:
        """Logs and keeps the loss of a batch that was run."""
        for name, options in self.options.items():
            if options.get("batch_size") == OF_BATCH:
                options = {**options, "batch_size": batch_size_of(batch)}
            module.log(name, loss, **options)
        for name in self.lists:
            getattr(module, name).append(loss)
        for name in self.metrics:
            _refuse_result(name, module.get_submodule(name))


class TrainingStep(torch.nn.Module):
    """A LightningModule whose forward is its `training_step`: what the engine captures. It has the
    very modules and tensors of the LightningModule, under the same names.
    """

    def __init__(self, module: Any, is_single: bool, noted: Noted) -> None:
        super().__init__()
        self.stands_for = (module,)
        self._noted = weakref.ref(noted)
        self._lightning = [module]  # in a list: no submodule
        for stores in ("_modules", "_parameters", "_buffers"):
            self.__dict__[stores] = module.__dict__[stores]
        self._non_persistent_buffers_set = module._non_persistent_buffers_set
        self.training = module.training
        self.is_single = is_single
        # numbers that the graph may depend on, where code of the module reads them: with each new
        # value it is captured again
        cls: type = type(module)
        read = read_by_own_methods(cls)
        self.watched: list[str] = [
            each for each in ("current_epoch", "global_step") if each in read
        ]
        if _reads_index(module.training_step):
            self.watched.append("index")
        self._given_index: tuple[Any, ...] = ()

    def note_place(self, index: tuple[Any, ...]) -> None:
        """Takes over where the loop is. `index`: what `training_step` is called with besides the
        batch.
        """
        trainer = self._lightning[0].trainer
        self._given_index = index
        if "index" in self.watched:
            self.index = index[0] if index else 0
        if "current_epoch" in self.watched:
            self.current_epoch = trainer.current_epoch
        if "global_step" in self.watched:
            self.global_step = trainer.global_step

    def forward(self, *batch: Any, **named: Any) -> Any:
        given: Any = named or (batch[0] if self.is_single else batch)
        module = self._lightning[0]
        noted = self._noted()
        assert noted is not None, "the strategy holds it"
        before = _lengths_of_lists(module)
        updates = _updates_of_metrics(module)
        with self._recording() as calls:
            output = module.training_step(given, *self._given_index)
        if output is None:
            raise ValueError(
                "WhaleStrategy: training_step gave None, which would leave out a batch: ranks "
                "train on every batch that they are given. Try: leave it out in the loader"
            )
        loss = output if isinstance(output, Tensor) else output["loss"]
        for name, value, options in calls:
            if _is_same(value, loss):
                earlier = noted.options.get(name, {}).get("batch_size", OF_BATCH)
                noted.options[name] = _without_sizes(name, options, given, earlier)
            else:
                logger.warning(
                    "training_step logs %r, which is not the loss: it is not known on all ranks "
                    "and left out. Try: log it in validation_step",
                    name,
                )
        noted.lists = _take_back(module, before, loss)
        after = _updates_of_metrics(module)
        noted.metrics = [name for name, number in after.items() if number != updates[name]]
        return output

    @contextlib.contextmanager
    def _recording(self) -> Iterator[list[tuple[str, Any, dict[str, Any]]]]:
        """Takes what is logged meanwhile: in a capture there are no values."""
        calls: list[tuple[str, Any, dict[str, Any]]] = []

        def log(name: str, value: Any, **options: Any) -> None:
            calls.append((name, value, options))

        def log_dict(values: Mapping[str, Any], **options: Any) -> None:
            for name, value in values.items():
                log(name, value, **options)

        attributes = self._lightning[0].__dict__
        attributes.update(log=log, log_dict=log_dict)
        try:
            yield calls
        finally:
            del attributes["log"], attributes["log_dict"]


def _reads_index(training_step: Callable[..., Any]) -> bool:
    """Whether code looks at the number of the batch, which most only take."""
    code = inspect.unwrap(getattr(training_step, "__func__", training_step)).__code__
    if code.co_argcount < 3:  # self, batch
        return False
    name = code.co_varnames[2]
    for each in dis.get_instructions(code):
        # newer Pythons load two names with one instruction
        names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
        if "LOAD" in each.opname and name in names:
            return True
    return False


def _is_same(value: Any, loss: Tensor) -> bool:
    """Whether something is the loss, detached or not."""
    if not isinstance(value, Tensor) or value.shape != loss.shape or value.dtype != loss.dtype:
        return False
    return value is loss or value.untyped_storage() is loss.untyped_storage()


def _size(value: Any) -> Any:
    """A number of samples as that of the sample batch, without fixing it in a graph."""
    return value.node.hint if isinstance(value, torch.SymInt) else value


def _without_sizes(name: str, options: dict[str, Any], batch: Any, earlier: Any) -> dict[str, Any]:
    """Options of a log whose batch size is that of each batch, not of the captured one. `earlier`:
    what it was found to be with another batch.
    """
    weight = options.get("batch_size")
    if weight is None:
        return options
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    sizes = [_size(leaf.shape[0]) for leaf in leaves]
    if _size(weight) == max(sizes, key=sizes.count, default=None) and earlier == OF_BATCH:
        return {**options, "batch_size": OF_BATCH}
    if isinstance(weight, torch.SymInt):
        raise ValueError(
            f"WhaleStrategy: training_step logs {name!r} with batch_size={weight}, which is not "
            "the number of samples: it is not known outside of the ranks. "
            "Try: batch_size=x.shape[0], or leave it out"
        )
    return options


def _lengths_of_lists(module: Any) -> dict[str, int]:
    return {name: len(each) for name, each in vars(module).items() if isinstance(each, list)}


def _take_back(module: Any, before: dict[str, int], loss: Tensor) -> list[str]:
    """Removes what `training_step` has appended to lists of the module, as the values are those of a
    capture. Gives the names of the lists that hold losses.
    """
    found = []
    for name, number in before.items():
        now = vars(module).get(name)
        if not isinstance(now, list) or len(now) <= number:
            continue
        added = now[number:]
        del now[number:]
        if len(added) > 1 or not _is_same(added[0], loss):
            raise ValueError(
                f"WhaleStrategy: training_step appends to self.{name} what is not the loss: in "
                "training the ranks give the loss alone. Try: append the loss, or collect it in "
                "validation_step"
            )
        found.append(name)
    return found


def _updates_of_metrics(module: Any) -> dict[str, int]:
    """How often each metric of torchmetrics was updated."""
    found = {}
    for name, each in module.named_modules():
        if hasattr(each, "update_count") and hasattr(each, "compute"):
            found[name] = each.update_count
    return found


def _refuse_result(name: str, metric: Any) -> None:
    """Refuses the result of a metric that has seen no batch: it would be that of nothing at all."""
    if isinstance(metric.compute, _Compute):
        return
    metric.compute = _Compute(name, metric, metric.compute)


class _Compute:
    """`compute` of a metric that `training_step` updates: in a capture there are no values."""

    def __init__(self, name: str, metric: Any, compute: Callable[[], Any]) -> None:
        self._name = name
        self._metric = weakref.ref(metric)
        self._compute = compute

    def __call__(self) -> Any:
        metric = self._metric()
        if metric is not None and metric.update_called:  # in validation
            return self._compute()
        raise ValueError(
            f"WhaleStrategy: the metric self.{self._name} is updated in training_step, where the "
            "ranks give the loss alone: it has seen no batch. "
            "Try: update it in validation_step, or leave it out"
        )
