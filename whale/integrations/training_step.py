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

logger = logging.getLogger("whale")


class LoggedNames:
    """Names under which `training_step` logs its loss, with the options.

    The strategy holds it, the module only a weak reference: what forward leaves on a model is taken
    back after a capture.
    """

    def __init__(self) -> None:
        self.options: dict[str, dict[str, Any]] = {}


class TrainingStep(torch.nn.Module):
    """A LightningModule whose forward is its `training_step`: what the engine captures. It has the
    very modules and tensors of the LightningModule, under the same names.
    """

    def __init__(self, module: Any, is_single: bool, logged: LoggedNames) -> None:
        super().__init__()
        self.stands_for = (module,)
        self._logged = weakref.ref(logged)
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
        with self._recording() as calls:
            output = self._lightning[0].training_step(given, *self._given_index)
        if output is None:
            raise ValueError(
                "WhaleStrategy: training_step gave None, which would leave out a batch: ranks "
                "train on every batch that they are given. Try: leave it out in the loader"
            )
        loss = output if isinstance(output, Tensor) else output["loss"]
        logged = self._logged()
        assert logged is not None, "the strategy holds it"
        for name, value, options in calls:
            if value is loss:
                logged.options[name] = options
            else:
                logger.warning(
                    "training_step logs %r, which is not the loss: it is not known on all ranks "
                    "and left out. Try: log it in validation_step",
                    name,
                )
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
