"""The two self-checks of a capture with real weights, each on a few samples of the user's own
batch.

1. the captured graph against the eager model: same loss, same gradients, and the same again in a second run    -> compare_with_eager
2. the loss of 4 samples against the sum over parts of 1 and 3                                                   -> compare_parts
A check that cannot be made (dropout that is not a plain one, batch statistics) says so.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from whale.capture.batch import BatchLayout
from whale.capture.export import Task
from whale.capture.graph import CapturedGraph, user_line
from whale.capture.guards import Findings, refuse
from whale.capture.kept_state import attributes, changed_attributes
from whale.capture.prepare import CapturedModel
from whale.compat import tensor_stores
from whale.operations.nodes import op_name, trains_batch_norm
from whale.operations.table import is_random

NUM_EAGER_SAMPLES = 2
PARTS = (1, 3)
# largest difference, in units of the largest value of the whole model, that rounding explains
TOLERANCE = {
    torch.float64: 1e-8,
    torch.complex128: 1e-8,
    torch.float32: 1e-3,
    torch.complex64: 1e-3,
    torch.bfloat16: 1e-1,
    torch.float16: 5e-2,
    torch.complex32: 5e-2,
}
SEED = 0


def compare_with_eager(
    model: torch.nn.Module,
    layout: BatchLayout,
    tensors: Sequence[Tensor],
    task: Task,
    captured: CapturedGraph,
    findings: Findings,
) -> None:
    """Raises when the captured graph gives another loss or other gradients than the model itself.
    Called before the loss is taken apart.
    """
    for num_samples in (min(NUM_EAGER_SAMPLES, layout.batch_size), layout.batch_size):
        if _compare_samples(
            model, layout, _samples(layout, tensors, 0, num_samples), task, captured, findings
        ):
            return
    captured.notes.append(
        "the loss of the sample batch is not a finite number: the capture was not compared with "
        "the model"
    )


def _compare_samples(
    model: torch.nn.Module,
    layout: BatchLayout,
    few: list[Tensor],
    task: Task,
    captured: CapturedGraph,
    findings: Findings,
) -> bool:
    """Compares on these samples; False when their loss is not finite (no valid label among them)
    and nothing can be said.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    buffers = _Buffers(model)
    before = attributes(model)
    with torch.random.fork_rng(devices=[]), _no_gradients(parameters):
        expected = _eager_loss(model, layout, few, task)
        outside = _leaves_outside(expected, model)
        expected_gradients = _gradients(expected, parameters)
        buffers.restore()
        torch.manual_seed(SEED)
        got = _run(captured, model, few)[0]
        got_gradients = _gradients(got, parameters)
        buffers.restore()
        with torch.no_grad():
            again = _eager_loss(model, layout, few, task)
        buffers.restore()
    expected = expected.detach()
    got = got.detach()
    _refuse_trained_outside(outside)
    if not bool(expected.isfinite()) and not bool(got.isfinite()):
        return False
    worst, figure = _worst(expected_gradients, got_gradients)
    limit = _limit(captured)
    loss_error = abs(float(expected) - float(got)) / max(abs(float(expected)), 1e-30)
    if figure <= limit and loss_error <= limit:
        _refuse_other_result(
            expected, again.detach(), limit, changed_attributes(before, attributes(model))
        )
        return True
    refuse(findings)
    raise ValueError(
        f"the captured model does not compute what the model computes: on {len(few[0])} samples "
        f"the loss is {float(got):.6g} instead of "
        f"{float(expected):.6g}, and the gradient of {worst} differs by {figure:.1e} of the "
        f"largest gradient (limit {limit:.0e}). "
        f'Something in forward depends on state that is not a tensor; "check_capture": false skips this check'
    )


def _eager_loss(
    model: torch.nn.Module, layout: BatchLayout, few: list[Tensor], task: Task
) -> Tensor:
    """The loss of the model itself on these samples, with the random numbers of the check."""
    torch.manual_seed(SEED)
    try:
        value: Tensor = task.run(model, layout.rebuild([t.clone() for t in few]))[1]()
        return value
    except Exception as error:
        num_samples = next(
            len(t) for t, described in zip(few, layout.tensors, strict=True) if described.batched
        )
        if num_samples == layout.batch_size:
            raise
        raise _cannot_be_cut(layout, f"its first {num_samples} samples", error) from error


def _cannot_be_cut(layout: BatchLayout, part: str, error: Exception) -> ValueError:
    cut = ", ".join(described.path for described in layout.tensors if described.batched)
    reason = str(error).partition("\n")[0]
    return ValueError(
        f"the model works on the sample batch of {layout.batch_size}, and fails on {part} alone "
        f"with {type(error).__name__}: {reason}\n"
        f"Whale cuts {cut} into parts along dim 0, so a row must be a sample, and no number in it "
        "may point to another row. Way out: give "
        "each sample all that it needs, in rows of one shape (padded); a tensor without samples "
        "needs another dim 0 than the batch"
    )


def _refuse_other_result(
    first: Tensor, second: Tensor, limit: float, changed: Sequence[str]
) -> None:
    """The same samples, weights, buffers and random numbers must give the same loss in
    every call.
    """
    if abs(float(first) - float(second)) <= limit * max(abs(float(first)), 1e-30):
        return
    names = ", ".join(f"`{name}`" for name in changed[:4]) or "something outside the model"
    raise ValueError(
        f"the same samples give the loss {float(first):.6g} in one call of the model and "
        f"{float(second):.6g} in the next: forward keeps "
        f"state in Python ({names}), of which a captured graph would hold the first value for "
        "ever. Way out: make it a buffer "
        f"(`register_buffer`), or compute it outside the model and give it in the batch"
    )


def _leaves_outside(loss: Tensor, model: torch.nn.Module) -> list[weakref.ref[Tensor]]:
    """Tensors that get a gradient and are no parameters of the model, without keeping them."""
    own = {id(parameter) for parameter in model.parameters()}
    return [weakref.ref(tensor) for tensor in _trained_leaves(loss) if id(tensor) not in own]


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
            f"model (shapes: {shapes}): they would never "
            "be trained. Make them part of the model (a module around model and loss), or freeze "
            "them with requires_grad_(False)"
        )


def _trained_leaves(loss: Tensor) -> list[Tensor]:
    """The tensors that `loss.backward()` would give a gradient."""
    found: dict[int, Tensor] = {}
    waiting: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found[id(node.variable)] = node.variable
        waiting.extend(source for source, _ in node.next_functions)
    return list(found.values())


def compare_parts(
    prepared: CapturedModel, model: torch.nn.Module, layout: BatchLayout, tensors: Sequence[Tensor]
) -> str | None:
    """Raises when the loss of 4 samples is not the sum of its parts; gives the reason when that
    cannot be checked.
    """
    captured = prepared.captured
    total = sum(PARTS)
    if layout.batch_size < total:
        return (
            f"the sample batch has {layout.batch_size} samples, the check of the loss's parts "
            f"needs {total}"
        )
    if any(trains_batch_norm(node) for node in captured.compute_nodes()):
        return "batch statistics: the loss's parts were not compared"
    if (
        any(node.meta.get("all_reduce") for node in captured.compute_nodes())
        or prepared.not_additive is not None
    ):
        return "the loss is not a sum over samples: its parts were not compared"
    quiet = [node for node in captured.compute_nodes() if is_random(node)]
    if any(
        "dropout" not in op_name(node) and op_name(node) != "scaled_dot_product_attention"
        for node in quiet
    ):
        return "random operations other than dropout: the loss's parts were not compared"
    buffers = _Buffers(model)
    with torch.no_grad():
        every = _samples(layout, tensors, 0, total)
        whole = _whole_values(prepared, model, every)
        expected = _term_sum(prepared, model, [*every, *whole])
        got = torch.zeros_like(expected)
        start = 0
        for size in PARTS:
            try:
                got += _term_sum(
                    prepared, model, [*_samples(layout, tensors, start, start + size), *whole]
                )
            except Exception as problem:
                raise _cannot_be_cut(
                    layout, f"its samples {start} to {start + size - 1}", problem
                ) from problem
            start += size
    buffers.restore()
    if not bool(expected.isfinite()) and not bool(got.isfinite()):
        return "the loss of the first samples is not a finite number: its parts were not compared"
    limit = _limit(captured)
    error = float((expected - got).abs() / expected.abs().clamp(min=1e-30))
    if not error <= limit:
        terms = ", ".join(user_line(node) for node in prepared.terms)
        raise ValueError(
            f"the loss of {total} samples is {float(expected):.6g}, but its parts of {PARTS[0]} "
            f"and {PARTS[1]} samples add up to "
            f'{float(got):.6g}: samples influence each other in a way that Whale did not see ({terms}). Use "num_micro_batch": 1 on one '
            f'device, or accept it with "loss_per_micro_batch": true'
        )
    return None


def _limit(captured: CapturedGraph) -> float:
    """What rounding explains in the least precise type that the graph computes in."""
    types = {
        node.meta["val"].dtype
        for node in captured.compute_nodes()
        if isinstance(node.meta.get("val"), Tensor)
    }
    return max(TOLERANCE[dtype] for dtype in types | {torch.float64} if dtype in TOLERANCE)


def _term_sum(prepared: CapturedModel, model: torch.nn.Module, inputs: list[Tensor]) -> Tensor:
    values = _run(prepared.captured, model, inputs, quiet=True)
    return torch.stack([value.double() for value in values[: prepared.num_terms]]).sum()


def _whole_values(
    prepared: CapturedModel, model: torch.nn.Module, tensors: list[Tensor]
) -> list[Tensor]:
    graph = prepared.loss.whole_graph
    if graph is None:
        return []
    state = dict(model.named_buffers())
    for attribute, name in prepared.loss.whole_buffers.items():
        graph.register_buffer(attribute, state[name])
    return list(graph(*tensors))


def _run(
    captured: CapturedGraph, model: torch.nn.Module, inputs: Sequence[Tensor], quiet: bool = False
) -> Sequence[Tensor]:
    state = (
        dict(model.named_parameters(remove_duplicate=False))
        | dict(model.named_buffers(remove_duplicate=False))
        | captured.constants
    )
    results: Sequence[Tensor] = _Reader(captured, state, quiet).run(*inputs)
    return results


class _Reader(Interpreter):
    """Runs the captured graph on the user's own tensors; `quiet` leaves dropout out."""

    def __init__(self, captured: CapturedGraph, state: Mapping[str, Tensor], quiet: bool) -> None:
        super().__init__(GraphModule(torch.nn.Module(), torch.fx.Graph()), graph=captured.graph)
        self._state = state
        self._quiet = quiet

    def get_attr(self, target, args, kwargs):  # type: ignore[no-untyped-def]
        return self._state[str(target)]

    def run_node(self, n: Node) -> object:
        region = n.meta.get("autocast")
        if region is None:
            return self._run_node(n)
        device, dtype, enabled, cache = region
        with torch.autocast(device, dtype, enabled=enabled, cache_enabled=cache):
            return self._run_node(n)

    def _run_node(self, n: Node) -> object:
        if self._quiet and n.op == "call_function" and is_random(n):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            if op_name(n) != "scaled_dot_product_attention":
                return args[0]
            return n.target(*args[:4], **{k: v for k, v in kwargs.items() if k != "dropout_p"})  # type: ignore[operator]
        return super().run_node(n)


def _samples(layout: BatchLayout, tensors: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
    return [
        t[start:stop] if described.batched else t
        for t, described in zip(tensors, layout.tensors, strict=True)
    ]


class _no_gradients:
    """Keeps the user's `.grad` fields as they were."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._saved = [(p, p.grad) for p in parameters.values()]

    def __enter__(self) -> None:
        for p, _ in self._saved:
            p.grad = None

    def __exit__(self, *error: object) -> None:
        for p, gradient in self._saved:
            p.grad = gradient


def _gradients(
    loss: Tensor, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, Tensor | None]:
    if loss.requires_grad:
        loss.backward()  # not autograd.grad: hooks on parameters and modules must fire
    gradients = {
        name: p.grad.to_dense() if p.grad is not None and p.grad.is_sparse else p.grad
        for name, p in parameters.items()
    }
    for p in parameters.values():
        p.grad = None
    return gradients


class _Buffers:
    """The buffers of a model as they are now."""

    def __init__(self, model: torch.nn.Module) -> None:
        stores = [tensor_stores(module)[1] for module in model.modules()]
        found = [
            (store, name, tensor)
            for store in stores
            for name, tensor in store.items()
            if tensor is not None
        ]
        self._saved = [
            (store, name, tensor, tensor.detach().clone()) for store, name, tensor in found
        ]

    def restore(self) -> None:
        with torch.no_grad():
            for store, name, tensor, value in self._saved:
                tensor.copy_(value)
                store[name] = tensor  # forward may have put another one there


def _worst(
    expected: Mapping[str, Tensor | None], got: Mapping[str, Tensor | None]
) -> tuple[str, float]:
    """(parameter, difference in units of the largest gradient of the whole model)."""
    largest = max(
        (float(g.abs().max()) for g in expected.values() if g is not None and g.numel()),
        default=0.0,
    )
    worst = ""
    figure = 0.0
    for name, reference in expected.items():
        other = got[name]
        if reference is None and other is None:
            continue
        a = torch.zeros_like(other) if reference is None else reference  # type: ignore[arg-type]
        b = torch.zeros_like(a) if other is None else other
        difference = float((a - b).abs().max()) if a.numel() else 0.0
        scaled = difference / largest if largest else float(difference > 0)
        if not scaled <= figure:
            worst = name
            figure = scaled
    return worst, figure
