"""What a capture changes in torch, Python's random numbers and numpy is taken back at its end, also
after an error.
"""

from __future__ import annotations

import inspect
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.fx.experimental.proxy_tensor as proxy_tensor
import torch.fx.proxy as proxy
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import checkpoint as torch_checkpoint

import whale as wh
from whale.capture.batch import read_batch
from whale.capture.capture import capture_training
from whale.capture.export import Task
from whale.capture.guards import watch
from whale.capture.python_state import random_branches
from whale.compat import causal_mask_detection, patched
from whale.compat.exporting import export_patches

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
PATCHED: tuple[tuple[Any, str], ...] = (
    (proxy, "CapturedTraceback"),
    (proxy.TracerBase, "_filter_traceback_frames"),
    (proxy_tensor, "_extract_tensor_metadata"),
    (torch.fx.GraphModule, "recompile"),
    (ShapeEnv, "__init__"),
    (nn.Module, "__init__"),
    (random, "random"),
    (numpy.random, "rand"),
)
SWAPPED: tuple[Callable[..., Any], ...] = (
    vars(torch.autograd.Function)["apply"].__func__,
    torch.Tensor.register_hook,
    torch.autograd.graph.saved_tensors_hooks.__enter__,
    torch_checkpoint.checkpoint.__wrapped__,  # type: ignore[attr-defined]
    inspect.unwrap(torch.nn.functional.embedding_bag),
    causal_mask_detection,
)
RECURRENT = (torch.ops.aten.gru.input, torch.ops.aten.lstm.input, torch.ops.aten.rnn_tanh.input)


def torch_now() -> list[Any]:
    """Everything that a capture may change, as it is."""
    attributes = [getattr(owner, name) for owner, name in PATCHED]
    codes = [(function.__code__, function.__kwdefaults__) for function in SWAPPED]
    kernels = [dict(operation.py_kernels) for operation in (ATTENTION, *RECURRENT)]
    return [attributes, codes, kernels]


SEEN_INSIDE: list[list[Any]] = []  # not on the model: export takes back what forward writes there


class Net(nn.Module):
    """Watches torch from inside the forward."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        with wh.replicate(1):
            x = self.linear(x)
        SEEN_INSIDE.append(torch_now())
        if self.fails:
            raise RuntimeError("a mistake in forward")
        return x.square().mean()


def capture(model: Net) -> None:
    layout, tensors = read_batch({"x": torch.randn(4, 4)})
    capture_training(model, layout, tensors, Task(None, "cpu"))


@pytest.mark.parametrize("fails", [False, True])
def test_a_capture_leaves_torch_as_it_was(fails: bool) -> None:
    before = torch_now()
    model = Net(fails)
    if fails:
        with pytest.raises(ValueError, match="a mistake in forward"):
            capture(model)
    else:
        capture(model)
    assert torch_now() == before
    attributes, codes, kernels = SEEN_INSIDE.pop()
    changed = [
        name
        for (_, name), now, was in zip(PATCHED, attributes, before[0], strict=True)
        if now is not was
    ]
    assert changed == [name for _, name in PATCHED if (_, name) != (nn.Module, "__init__")]
    assert all(now != was for now, was in zip(codes, before[1], strict=True))
    assert all(now != was for now, was in zip(kernels, before[2], strict=True))


def test_code_of_graph_modules_is_written_at_once_outside_of_an_export() -> None:
    with export_patches():
        inside = torch.fx.symbolic_trace(nn.Linear(2, 2))
    outside = torch.fx.symbolic_trace(nn.Linear(2, 2))
    assert "linear" in outside.code
    assert inside(torch.ones(1, 2)).shape == (1, 2)  # its code is written now
    assert "linear" in inside.code


def test_a_patch_is_taken_back_after_an_error() -> None:
    class Owner:
        value = 1

    with pytest.raises(KeyError), patched(Owner, "value", 2):
        assert Owner.value == 2
        raise KeyError
    assert Owner.value == 1


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def test_calls_of_other_threads_are_no_part_of_a_capture() -> None:
    results: list[Any] = []

    def work() -> None:
        results.append(Double.apply(torch.ones(1, requires_grad=True)).item())  # type: ignore[no-untyped-call]
        results.append(type(random.random()))

    with watch(nn.Linear(1, 1)) as findings, random_branches(None, findings):
        state = random.getstate()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        random.setstate(state)
    assert results == [2.0, float]
    assert findings.entries == []
