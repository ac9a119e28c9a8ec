"""The first self-check of a capture with real weights, on a few samples of the user's own batch:
the captured graph against the eager model. Same loss, same gradients, and the same loss for other
samples and weights in a second call of the model.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from whale.capture.batch import BatchLayout, read_batch
from whale.capture.check_runs import (
    BuffersBefore,
    cannot_be_cut,
    gradients_restored,
    model_restored,
    relative_error,
    rounding_limit,
    run_backward,
    run_graph,
)
from whale.capture.clean import Capture
from whale.capture.export import Task
from whale.capture.forward_state import ForwardState
from whale.capture.guards import refuse
from whale.capture.lengths import LEAST, NotSymbolic, conditions_of
from whale.compat import is_fake
from whale.devices import device_of

NUM_EAGER_SAMPLES = 2
SEED = 0


def compare_with_eager(
    capture: Capture, model: torch.nn.Module, tensors: Sequence[Tensor], task: Task
) -> None:
    """Raises when the captured graph gives another loss or other gradients than the model itself.
    Called before the loss is taken apart.
    """
    batch_size = capture.layout.batch_size
    sizes = [min(NUM_EAGER_SAMPLES, batch_size), batch_size]
    if conditions_of(capture.captured).limits_batch:
        sizes = [batch_size]  # a few samples would take another path through the model
    for num_samples in sizes:
        few = capture.layout.samples(tensors, 0, num_samples)
        if _compare_samples(capture, model, few, task):
            return
    capture.captured.notes.append(
        "the loss of the sample batch is not a finite number: the capture was not compared with "
        "the model"
    )


def compare_other_length(
    capture: Capture, model: torch.nn.Module, tensors: Sequence[Tensor], task: Task
) -> None:
    """Raises `NotSymbolic` when a graph with lengths gives another loss or other gradients than the
    model on a shorter part of the sample batch.
    """
    captured = capture.captured
    shorter = list(tensors)
    for length in captured.lengths:
        for place, dim in length.places:
            size = max(LEAST, length.size // 2)
            shorter[place] = shorter[place].narrow(dim, 0, size).contiguous()
    layout, _ = read_batch(capture.layout.rebuild(shorter), capture.layout)
    if conditions_of(captured).numbers(layout) is None:
        return  # the graph is not for this length, and will not run it
    few = capture.layout.samples(shorter, 0, min(NUM_EAGER_SAMPLES, layout.batch_size))
    try:
        with model_restored(model, task.loss), torch.no_grad():
            _eager_loss(model, capture.layout, few, task)
    except Exception:
        return  # half a sample is none of this model's batches
    try:
        _compare_samples(capture, model, few, task)
    except Exception as error:
        raise NotSymbolic(f"with half of each length, {error}") from error


def _compare_samples(
    capture: Capture, model: torch.nn.Module, few: list[Tensor], task: Task
) -> bool:
    """Compares on these samples; False when their loss is not finite (no valid label among them)
    and nothing can be said.
    """
    # another comparison starts from the same
    with model_restored(model, task.loss) as (state, buffers):
        return _compare_from(state, buffers, capture, model, few, task)


def _compare_from(
    state: ForwardState,
    buffers: BuffersBefore,
    capture: Capture,
    model: torch.nn.Module,
    few: list[Tensor],
    task: Task,
) -> bool:
    layout = capture.layout
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    random = device_of(torch.device(task.device)).fork_random()
    with random, gradients_restored(parameters):
        loss = _eager_loss(model, layout, few, task)
        outside = _leaves_outside(loss, model)
        expected, expected_gradients = run_backward(loss, parameters)
        del loss  # with its graph, so that `outside` holds only tensors that somebody else has
        buffers.restore()
        torch.manual_seed(SEED)
        got, gradients = run_backward(run_graph(capture.captured, model, few)[0], parameters)
        buffers.restore()
        in_second_call = _second_call(capture, model, few, task, buffers)
    _refuse_trained_outside(outside)
    if not math.isfinite(expected) and not math.isfinite(got):
        return False
    worst, difference = _worst(expected_gradients, gradients)
    limit = rounding_limit(capture.captured)
    if difference <= limit and relative_error(expected, got) <= limit:
        of_model, of_graph = in_second_call
        if math.isfinite(of_model) or math.isfinite(of_graph):
            if not relative_error(of_model, of_graph) <= limit:
                raise ValueError(_other_result(of_model, of_graph, list(state.changed())))
        return True
    refuse(capture.findings)
    raise ValueError(
        f"the captured model does not compute what the model computes: on {len(few[0])} samples "
        f"the loss is {got:.6g} instead of {expected:.6g}, and the gradient of {worst} differs by "
        f"{difference:.1e} of the largest gradient (limit {limit:.0e}). Something in forward "
        'depends on state that is not a tensor. Try: make it a buffer; "check_capture": false '
        "skips this check"
    )


def _eager_loss(
    model: torch.nn.Module, layout: BatchLayout, few: list[Tensor], task: Task
) -> Tensor:
    """The loss of the model itself on these samples, with the random numbers of the check."""
    torch.manual_seed(SEED)
    try:
        value: Tensor = _run_model(model, layout, few, task)
        return value
    except Exception as error:
        described = zip(few, layout.tensors, strict=True)
        num_samples = next(len(t) for t, description in described if description.batched)
        if num_samples == layout.batch_size:
            raise
        raise cannot_be_cut(layout, f"its first {num_samples} samples", error) from error


def _run_model(model: torch.nn.Module, layout: BatchLayout, few: list[Tensor], task: Task) -> Any:
    value = task.run(model, layout.rebuild([t.clone() for t in few]))[1]()
    if is_fake(value):
        raise ValueError(
            "the model reads a tensor that forward left when it was captured, in a place that "
            "Whale does not know (an attribute in `__slots__`, a cache of another package). Try: "
            "make it a buffer (`register_buffer`), or a function of the arguments of forward"
        )
    return value


def _second_call(
    capture: Capture, model: torch.nn.Module, few: list[Tensor], task: Task, buffers: BuffersBefore
) -> tuple[float, float]:
    """Losses of the model and of the graph on other samples with other weights. It is the model's
    second call: it may read what its first one has left anywhere.
    """
    layout = capture.layout
    with _other_weights(model):
        for samples in (_other_samples(layout, few), few):
            try:
                # with gradients, as in training: a forward may ask for one
                of_model = float(_eager_loss(model, layout, samples, task).detach())
            except Exception:
                if samples is few:
                    raise
                continue  # none of this model's batches
            finally:
                buffers.restore()
            torch.manual_seed(SEED)
            with torch.no_grad():
                of_graph = float(run_graph(capture.captured, model, samples)[0])
            buffers.restore()
            break
    return of_model, of_graph


def _other_result(of_model: float, of_graph: float, changed: Sequence[str]) -> str:
    names = ", ".join(f"`{name}`" for name in changed[:4]) or "something outside the model"
    return (
        f"in its second call the model gives the loss {of_model:.6g} where the captured graph "
        f"gives {of_graph:.6g}: forward keeps state in Python ({names}), of which a captured graph "
        "would hold the first value for ever. Try: make it a buffer (`register_buffer`), or "
        "compute it outside the model and give it in the batch"
    )


def _other_samples(layout: BatchLayout, few: Sequence[Tensor]) -> list[Tensor]:
    """The same number of samples with other values: copies of the last one, fractions made a little
    smaller; a single sample of whole numbers is rolled.
    """
    others = []
    for tensor, description in zip(few, layout.tensors, strict=True):
        other = tensor
        if description.batched:
            other = tensor[-1:].expand(tensor.shape)
            if len(tensor) == 1 and tensor.ndim > 1 and not tensor.is_floating_point():
                other = other.roll(1, -1)
        if other.is_floating_point():
            other = other * (1 - torch.rand_like(other, dtype=torch.float32).to(other.dtype) / 2)
        others.append(other.contiguous())
    return others


@contextmanager
def _other_weights(model: torch.nn.Module) -> Iterator[None]:
    """The weights that are trained have other values inside."""
    saved = []
    for p in model.parameters():
        if p.requires_grad and p.is_floating_point():
            saved.append((p, p.detach().clone()))
    try:
        with torch.no_grad():
            for p, _ in saved:
                p.mul_(1 - torch.rand_like(p) / 2).add_(torch.rand_like(p) / 16)
        yield
    finally:
        with torch.no_grad():
            for p, value in saved:
                p.copy_(value)


def _leaves_outside(loss: Tensor, model: torch.nn.Module) -> list[weakref.ref[Tensor]]:
    """Tensors that `loss.backward()` would give a gradient and that are no parameters of the model,
    without keeping them alive.
    """
    own = {id(parameter) for parameter in model.parameters()}
    found: dict[int, weakref.ref[Tensor]] = {}
    waiting: list[Any] = [loss.grad_fn]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") and id(node.variable) not in own:
            found[id(node.variable)] = weakref.ref(node.variable)
        waiting.extend(source for source, _ in node.next_functions)
    return list(found.values())


def _refuse_trained_outside(outside: Sequence[weakref.ref[Tensor]]) -> None:
    """A loss may have weights of its own, or use those of another model: nobody would train them.

    Called when the graph of the loss is gone: what forward itself made (an input that it asks a
    gradient of, as wav2vec2 does) is gone too.
    """
    alive = [tensor for reference in outside if (tensor := reference()) is not None]
    if alive:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in alive[:4])
        raise ValueError(
            f"the loss has gradients for {len(alive)} tensor(s) that are no parameters of the "
            f"model (shapes: {shapes}): they would never be trained. Try: make them part of the "
            "model (a module around model and loss), or freeze them with requires_grad_(False)"
        )


def _worst(
    expected: Mapping[str, Tensor | None], got: Mapping[str, Tensor | None]
) -> tuple[str, float]:
    """(parameter, difference in units of the largest gradient of the whole model)."""
    given: list[Tensor] = []
    for gradient in expected.values():
        if gradient is not None and gradient.numel():
            given.append(gradient)
    largest = max((float(g.abs().max()) for g in given), default=0.0)
    worst = ""
    figure = 0.0
    for name, reference in expected.items():
        other = got[name]
        # a parameter without gradient on one side has a gradient of zero there
        if reference is None:
            difference = other
        else:
            difference = reference if other is None else reference - other
        if difference is None or not difference.numel():
            continue
        largest_difference = float(difference.abs().max())
        scaled = largest_difference / largest if largest else float(largest_difference > 0)
        if not scaled <= figure:  # a NaN counts as the worst
            worst = name
            figure = scaled
    return worst, figure
