"""The two self-checks of a capture with real weights, each on a few samples of the user's own
batch.

1. `compare_with_eager`: the captured graph against the eager model; same loss, same gradients, and
   the same loss for other samples and weights in a second call of the model
2. `compare_parts`: the loss of 4 samples against the sum over parts of 1 and 3

A check that cannot be made (random operations other than dropout, batch statistics) says so.
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
    ATTENTION,
    BuffersBefore,
    gradients_restored,
    model_restored,
    run_backward,
    run_graph,
)
from whale.capture.clean import Capture
from whale.capture.export import Task
from whale.capture.functions import NAMESPACE
from whale.capture.graph import CapturedGraph, user_line
from whale.capture.guards import refuse
from whale.capture.lengths import LEAST, NotSymbolic, conditions_of
from whale.capture.memory import Memory
from whale.capture.prepare import CapturedModel
from whale.compat import is_fake
from whale.devices import device_of
from whale.dtypes import rounding
from whale.operations.nodes import op_name, trains_batch_norm
from whale.operations.table import is_random

NUM_EAGER_SAMPLES = 2
PARTS = (1, 3)
FUNCTION_ROUNDING = 100.0
"""times the rounding of a loss that sums of gradients may differ by"""
SEED = 0
TINY = 1e-30
"""smallest loss that a difference is divided by"""


# --- the graph against the eager model


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
    with model_restored(model, task.loss) as (
        memory,
        buffers,
    ):  # another comparison starts from the same
        return _compare_from(memory, buffers, capture, model, few, task)


def _compare_from(
    memory: Memory,
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
    limit = _limit(capture.captured)
    if difference <= limit and _relative_error(expected, got) <= limit:
        of_model, of_graph = in_second_call
        if math.isfinite(of_model) or math.isfinite(of_graph):
            if not _relative_error(of_model, of_graph) <= limit:
                raise ValueError(_other_result(of_model, of_graph, list(memory.changed())))
        return True
    refuse(capture.findings)
    raise ValueError(
        f"the captured model does not compute what the model computes: on {len(few[0])} samples "
        f"the loss is {got:.6g} instead of {expected:.6g}, and the gradient of {worst} differs by "
        f"{difference:.1e} of the largest gradient (limit {limit:.0e}). Something in forward "
        'depends on state that is not a tensor. Try: make it a buffer; "check_capture": false '
        "skips this check"
    )


def _relative_error(expected: float, got: float) -> float:
    return abs(expected - got) / max(abs(expected), TINY)


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
        raise _cannot_be_cut(layout, f"its first {num_samples} samples", error) from error


def _run_model(model: torch.nn.Module, layout: BatchLayout, few: list[Tensor], task: Task) -> Any:
    value = task.run(model, layout.rebuild([t.clone() for t in few]))[1]()
    if is_fake(value):
        raise ValueError(
            "the model reads a tensor that forward left when it was captured, in a place that Whale "
            "does not know (an attribute in `__slots__`, a cache of another package). Try: make it a "
            "buffer (`register_buffer`), or a function of the arguments of forward"
        )
    return value


def _cannot_be_cut(layout: BatchLayout, part: str, error: Exception) -> ValueError:
    cut = ", ".join(described.path for described in layout.tensors if described.batched)
    reason = str(error).partition("\n")[0]
    return ValueError(
        f"the model works on the sample batch of {layout.batch_size}, and fails on {part} alone "
        f"with {type(error).__name__}: {reason}\n"
        f"Whale cuts {cut} into parts along dim 0, so a row must be a sample, and no number in it "
        "may point to another row. Try: give each sample all that it needs, in rows of one shape "
        "(padded); a tensor without samples needs another dim 0 than the batch"
    )


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
        f"in its second call the model gives the loss {of_model:.6g} where the captured graph gives "
        f"{of_graph:.6g}: forward keeps state in Python ({names}), of which a captured graph would "
        "hold the first value for ever. Try: make it a buffer (`register_buffer`), or compute it "
        "outside the model and give it in the batch"
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


# --- the loss against its parts


def compare_parts(
    captured_model: CapturedModel, model: torch.nn.Module, tensors: Sequence[Tensor]
) -> str | None:
    """Raises when the loss of 4 samples is not the sum of its parts; gives the reason when that
    cannot be checked.
    """
    captured = captured_model.captured
    layout = captured_model.capture.layout
    total = sum(PARTS)
    reason = _why_not_comparable(captured_model, total)
    if reason is not None:
        return reason
    buffers = BuffersBefore(model)
    with torch.no_grad():
        every = layout.samples(tensors, 0, total)
        whole = _whole_values(captured_model, model, every)
        expected = _term_sum(captured_model, model, [*every, *whole])
        got = 0.0
        start = 0
        for size in PARTS:
            part = layout.samples(tensors, start, start + size)
            try:
                got += _term_sum(captured_model, model, [*part, *whole])
            except Exception as problem:
                samples = f"its samples {start} to {start + size - 1}"
                raise _cannot_be_cut(layout, samples, problem) from problem
            start += size
    buffers.restore()
    if not math.isfinite(expected) and not math.isfinite(got):
        return "the loss of the first samples is not a finite number: its parts were not compared"
    if not _relative_error(expected, got) <= _limit(captured):
        terms = ", ".join(user_line(node) for node in captured_model.terms)
        raise ValueError(
            f"the loss of {total} samples is {expected:.6g}, but its parts of {PARTS[0]} and "
            f"{PARTS[1]} samples add up to {got:.6g}: samples influence each other in a way that "
            f'Whale did not see ({terms}). Try: "num_micro_batch": 1 on one device, or accept it '
            'with "loss_per_micro_batch": true'
        )
    _refuse_mixing_backward(captured_model, model, tensors)
    return None


def _refuse_mixing_backward(
    captured_model: CapturedModel, model: torch.nn.Module, tensors: Sequence[Tensor]
) -> None:
    """Raises when gradients of parts do not add up although losses do: the backward that the user
    wrote for a `torch.autograd.Function` looks at other samples, or at their number.
    """
    nodes = captured_model.captured.compute_nodes()
    written = [node for node in nodes if str(node.target).startswith(NAMESPACE)]
    trained = [each for each in model.parameters() if each.requires_grad]
    if not written or not trained:
        return
    layout = captured_model.capture.layout
    every = layout.samples(tensors, 0, sum(PARTS))
    with torch.no_grad():
        whole = _whole_values(captured_model, model, every)
    buffers = BuffersBefore(model)
    expected = _gradient_of(captured_model, model, [*every, *whole], trained)
    got = torch.zeros_like(expected)
    start = 0
    for size in PARTS:
        part = layout.samples(tensors, start, start + size)
        got += _gradient_of(captured_model, model, [*part, *whole], trained)
        start += size
    buffers.restore()
    difference = float((expected - got).abs().max() / expected.abs().max().clamp_min(1e-300))
    if difference > FUNCTION_ROUNDING * _limit(captured_model.captured):
        raise ValueError(
            f"the gradients of {sum(PARTS)} samples differ from the sum of those of {PARTS[0]} and "
            f"{PARTS[1]} by {difference:.1e} of the largest: the backward of a "
            f"torch.autograd.Function ({user_line(written[0])}) looks at other samples or at their "
            "number, and no part of the mini-batch has those of the others. Try: a backward that "
            "treats every sample by itself"
        )


def _gradient_of(
    captured_model: CapturedModel,
    model: torch.nn.Module,
    inputs: list[Tensor],
    trained: Sequence[Tensor],
) -> Tensor:
    """Gradients of the terms of the loss, all in one row."""
    values = run_graph(captured_model.captured, model, inputs, quiet=True)
    terms = [term for term in values[: captured_model.num_terms] if term.requires_grad]
    found = torch.autograd.grad(sum(terms), trained, allow_unused=True) if terms else ()  # type: ignore[arg-type]
    rows = []
    for gradient in found:
        if gradient is not None:
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            rows.append(torch.view_as_real(dense) if dense.is_complex() else dense)
    return torch.cat([row.double().flatten() for row in rows]) if rows else torch.zeros(1).double()


def _why_not_comparable(captured_model: CapturedModel, num_samples: int) -> str | None:
    batch_size = captured_model.capture.layout.batch_size
    if batch_size < num_samples:
        return (
            f"the sample batch has {batch_size} samples, the check of the loss's parts needs "
            f"{num_samples}"
        )
    nodes = list(captured_model.captured.compute_nodes())
    if any(trains_batch_norm(node) for node in nodes):
        return "batch statistics: the loss's parts were not compared"
    is_reduced = any(node.meta.get("all_reduce") for node in nodes)
    if is_reduced or captured_model.not_additive is not None:
        return "the loss is not a sum over samples: its parts were not compared"
    random_names = {op_name(node) for node in nodes if is_random(node)}
    if not all("dropout" in name or name == ATTENTION for name in random_names):
        return "random operations other than dropout: the loss's parts were not compared"
    return None


def _limit(captured: CapturedGraph) -> float:
    """What rounding explains in the least precise type that the graph computes in."""
    limit = rounding(torch.float64).other_order
    for node in captured.compute_nodes():
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            limit = max(limit, rounding(value.dtype).other_order)
    return limit


def _term_sum(captured_model: CapturedModel, model: torch.nn.Module, inputs: list[Tensor]) -> float:
    values = run_graph(captured_model.captured, model, inputs, quiet=True)
    terms = values[: captured_model.num_terms]
    return float(torch.stack([term.double() for term in terms]).sum())


def _whole_values(
    captured_model: CapturedModel, model: torch.nn.Module, tensors: list[Tensor]
) -> list[Tensor]:
    graph = captured_model.loss.whole_graph
    if graph is None:
        return []
    state = dict(model.named_buffers())
    for attribute, name in captured_model.loss.whole_buffers.items():
        graph.register_buffer(attribute, state[name])
    return list(graph(*tensors))
