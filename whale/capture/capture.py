"""Model and sample batch in, one clean graph with a symbolic batch and the loss as terms out.

The path of a capture, each step a file of this package:

    export   `batch -> loss` by `torch.export` on fake tensors, watched for what a graph loses
             (export; guards, python_state, errors), and called twice where forward leaves
             something for its next call (second_call; forward_state)
    clean    regions inlined, weights as `get_attr`, no in-place operation, nothing superfluous,
             products with experts in token order (clean; inline, functional, simplify, experts)
    check    the clean graph against the eager model (checks)
    losses   sizes and kinds of values, the loss as terms over samples
             (prepare; sizes, kinds, samples, losses, whole_batch)
    check    the loss of 4 samples against its parts (checks)
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

import torch

from whale.capture.batch import BatchLayout
from whale.capture.cache import CaptureCache
from whale.capture.check_eager import compare_other_length, compare_with_eager
from whale.capture.check_parts import compare_parts
from whale.capture.check_runs import fits_for_checks, weights_on
from whale.capture.clean import Capture, clean
from whale.capture.export import Task, export_model
from whale.capture.guards import refuse
from whale.capture.prepare import CapturedModel, prepare
from whale.capture.second_call import Given, refuse_forward_state
from whale.config import Config

logger = logging.getLogger("whale")

WAS_IN_EVAL_MODE = (
    "the model was in eval mode (`from_pretrained` returns it so); engine.step trains it in "
    "training mode, with dropout where it has some"
)


class Trust(Enum):
    """Who knows that the captured graph has the gradients of the model."""

    COMPARE = "this process compares the graph with the model, which has real weights"
    ELSEWHERE = "another rank compares, or `wh.parallelize` will when the plan is run"
    NOBODY = "nobody can compare: what a graph may lose is refused"


def capture_model(
    model: torch.nn.Module,
    layout: BatchLayout,
    tensors: list[torch.Tensor],
    task: Task,
    config: Config,
    trust: Trust,
) -> CapturedModel:
    """Captures a model for training: all steps of the path."""
    capture = capture_training(model, layout, tensors, task)
    if trust is Trust.COMPARE and not fits_for_checks(model, task.device):
        trust = Trust.NOBODY
        capture.captured.notes.append(
            f"the whole model does not fit on {task.device}: the capture was not compared with it"
        )
    if trust is Trust.COMPARE:
        on_device = [tensor.to(task.device) for tensor in tensors]
        with weights_on(model, task.device), _as_trained(model):
            try:
                _compare(capture, model, on_device, task)
            except ValueError as error:
                if capture.cached_in is None:
                    raise
                # the model depends on something that no key can see
                logger.warning(
                    "capture_cache: the graph in %s is not that of the model (%s): %s is captured "
                    "anew",
                    *(capture.cached_in, str(error).splitlines()[0], type(model).__name__),
                )
                capture.cached_in.unlink(missing_ok=True)
                capture = capture_training(model, layout, tensors, task)
                _compare(capture, model, on_device, task)
    elif trust is Trust.NOBODY:
        refuse(capture.findings)
    # a number that is yet to be chosen stays 1 where the loss depends on it
    count = 1 if config.num_micro_batch == "auto" else config.num_micro_batch  # type: ignore[comparison-overlap]
    captured_model = prepare(capture, count, config.loss_per_micro_batch)
    if trust is Trust.COMPARE and not config.loss_per_micro_batch:
        with weights_on(model, task.device), _as_trained(model):
            why_not = compare_parts(captured_model, model, on_device)
        if why_not:
            capture.captured.notes.append(why_not)
    return captured_model


def _compare(
    capture: Capture, model: torch.nn.Module, tensors: list[torch.Tensor], task: Task
) -> None:
    """Raises when the graph gives something else than the model."""
    compare_with_eager(capture, model, tensors, task)
    if capture.captured.lengths:
        compare_other_length(capture, model, tensors, task)


def capture_training(
    model: torch.nn.Module,
    layout: BatchLayout,
    tensors: list[torch.Tensor],
    task: Task,
    with_outputs: bool = False,
    first: BatchLayout | None = None,
) -> Capture:
    """Exports the loss, and with it the outputs on request, in training mode and cleans the graph.
    Submodules that the user put in eval mode (frozen BatchNorm) stay so. `first`: layout of the
    first batch, for a capture for another one.
    """
    with _as_trained(model):
        capture = _captured(model, layout, tensors, task, with_outputs, first)
    if not model.training:
        capture.captured.notes.append(WAS_IN_EVAL_MODE)
    return capture


def capture_evaluation(
    model: torch.nn.Module,
    layout: BatchLayout,
    tensors: list[torch.Tensor],
    task: Task,
    first: BatchLayout | None = None,
) -> Capture:
    """Exports loss and outputs in eval mode and cleans the graph."""
    with _modes_restored(model):
        model.eval()
        return _captured(model, layout, tensors, task, with_outputs=True, first=first)


def _captured(
    model: torch.nn.Module,
    layout: BatchLayout,
    tensors: list[torch.Tensor],
    task: Task,
    with_outputs: bool,
    first: BatchLayout | None,
) -> Capture:
    """The clean graph of the model in its present mode, from its file where there is one."""

    def make() -> Capture:
        exported = export_model(model, layout, tensors, task, with_outputs)
        refuse_forward_state(exported, Given(model, layout, tensors, task, with_outputs), first)
        return clean(exported, model, layout)

    if task.cache_folder is None:
        return make()
    cache = CaptureCache(Path(task.cache_folder).expanduser())
    return cache.capture(model, layout, task, with_outputs, make, first)


@contextmanager
def _as_trained(model: torch.nn.Module) -> Iterator[None]:
    """The modes in which engine.step runs the model."""
    with _modes_restored(model):
        if not model.training:
            model.train()
        yield


@contextmanager
def _modes_restored(model: torch.nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
