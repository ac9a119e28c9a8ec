"""The second self-check of a capture with real weights, on a few samples of the user's own batch:
the loss of 4 samples against the sum over parts of 1 and 3, and the same of their gradients where
the user wrote a backward. A check that cannot be made (random operations other than dropout, batch
statistics) says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from whale.capture.check_runs import (
    ATTENTION,
    BuffersBefore,
    cannot_be_cut,
    relative_error,
    rounding_limit,
    run_graph,
)
from whale.capture.functions import NAMESPACE
from whale.capture.graph import user_line
from whale.capture.prepare import CapturedModel
from whale.operations.nodes import op_name, trains_batch_norm
from whale.operations.table import is_random

PARTS = (1, 3)
FUNCTION_ROUNDING = 100.0
"""times the rounding of a loss that sums of gradients may differ by"""


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
                raise cannot_be_cut(layout, samples, problem) from problem
            start += size
    buffers.restore()
    if not math.isfinite(expected) and not math.isfinite(got):
        return "the loss of the first samples is not a finite number: its parts were not compared"
    if not relative_error(expected, got) <= rounding_limit(captured):
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
    if difference > FUNCTION_ROUNDING * rounding_limit(captured_model.captured):
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
