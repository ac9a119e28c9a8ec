"""How the self-checks of a capture run the user's model and the captured graph: on the device where
the graph makes its tensors, with everything that forward changes taken back. And what both checks
(`check_eager.py`, `check_parts.py`) allow and say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from whale.capture.batch import BatchLayout
from whale.capture.forward_state import ForwardState
from whale.capture.graph import CapturedGraph
from whale.compat import tensor_stores
from whale.devices import device_of
from whale.dtypes import rounding
from whale.operations.nodes import op_name
from whale.operations.table import is_random

ATTENTION = "scaled_dot_product_attention"
CHECK_COPIES = 3
"""of the weights on the device: these and the gradients of both sides"""
TINY = 1e-30
"""smallest loss that a difference is divided by"""


def fits_for_checks(model: torch.nn.Module, device: str) -> bool:
    """Whether the device has memory for the whole model and its gradients."""
    tensors = [*model.parameters(), *model.buffers()]
    if all(tensor.device == torch.device(device) for tensor in tensors):
        return True
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    target = device_of(torch.device(device))
    return not target.is_accelerator or CHECK_COPIES * num_bytes <= target.free_memory_bytes()


@contextmanager
def weights_on(model: torch.nn.Module, device: str) -> Iterator[None]:
    """The model's weights lie on `device` inside, wherever the user has put them: the captured
    graph makes its tensors there.

    The tensors stay the same objects, so hooks on them still fire.
    """
    before: list[tuple[Tensor, Tensor]] = []
    try:
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.device != torch.device(device):
                before.append((tensor, tensor.data))
                tensor.data = tensor.data.to(device)
        yield
    finally:
        for tensor, data in before:
            tensor.data = data


def run_graph(
    captured: CapturedGraph, model: torch.nn.Module, inputs: Sequence[Tensor], quiet: bool = False
) -> Sequence[Tensor]:
    """Results of the captured graph on the weights of the model; `quiet` leaves dropout out."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    state = parameters | buffers | captured.constants
    results: Sequence[Tensor] = GraphReader(captured, state, quiet).run(*inputs)
    return results


class GraphReader(Interpreter):
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
            if op_name(n) != ATTENTION:
                return args[0]
            options = {key: value for key, value in kwargs.items() if key != "dropout_p"}
            return n.target(*args[:4], **options)  # type: ignore[operator]
        return super().run_node(n)


@contextmanager
def gradients_restored(parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Keeps the user's `.grad` fields as they were."""
    saved = [(p, p.grad) for p in parameters.values()]
    for p, _ in saved:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in saved:
            p.grad = gradient


def run_backward(
    loss: Tensor, parameters: Mapping[str, torch.nn.Parameter]
) -> tuple[float, dict[str, Tensor | None]]:
    """(loss, gradients by parameter); the `.grad` fields are empty before and after."""
    if loss.requires_grad:
        loss.backward()  # not autograd.grad: hooks on parameters and modules must fire
    gradients = {}
    for name, p in parameters.items():
        is_sparse = p.grad is not None and p.grad.is_sparse
        gradients[name] = p.grad.to_dense() if is_sparse else p.grad  # type: ignore[union-attr]
        p.grad = None
    return float(loss.detach()), gradients


class BuffersBefore:
    """The buffers of a model as they are now."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._saved = []
        self._names = []
        for module in model.modules():
            store = tensor_stores(module)[1]
            self._names.append((store, set(store)))
            for name, tensor in store.items():
                value = None if tensor is None else tensor.detach().clone()
                self._saved.append((store, name, tensor, value))

    def restore(self) -> None:
        for store, names in self._names:
            for name in store.keys() - names:
                del store[name]
        with torch.no_grad():
            for store, name, tensor, value in self._saved:
                if tensor is not None and value is not None:
                    tensor.copy_(value)
                store[name] = tensor  # forward may have put another one there


@contextmanager
def model_restored(
    model: torch.nn.Module, loss: Any = None
) -> Iterator[tuple[ForwardState, BuffersBefore]]:
    """Takes back everything that forward and loss change inside, but for the weights."""
    state = ForwardState(model, loss)
    buffers = BuffersBefore(model)
    try:
        yield state, buffers
    finally:
        state.restore()
        buffers.restore()


def relative_error(expected: float, got: float) -> float:
    """Difference of two losses over the expected one."""
    return abs(expected - got) / max(abs(expected), TINY)


def rounding_limit(captured: CapturedGraph) -> float:
    """What rounding explains in the least precise type that the graph computes in."""
    limit = rounding(torch.float64).other_order
    for node in captured.compute_nodes():
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            limit = max(limit, rounding(value.dtype).other_order)
    return limit


def cannot_be_cut(layout: BatchLayout, part: str, error: Exception) -> ValueError:
    """The error for a model that fails on part of the sample batch."""
    cut = ", ".join(described.path for described in layout.tensors if described.batched)
    reason = str(error).partition("\n")[0]
    return ValueError(
        f"the model works on the sample batch of {layout.batch_size}, and fails on {part} alone "
        f"with {type(error).__name__}: {reason}\n"
        f"Whale cuts {cut} into parts along dim 0, so a row must be a sample, and no number in it "
        "may point to another row. Try: give each sample all that it needs, in rows of one shape "
        "(padded); a tensor without samples needs another dim 0 than the batch"
    )
