"""Times of common operations on a running device, forward and backward, at several sizes: the measured side of the cost model.

Each operation is timed as training calls it: forward with autograd recording, then its backward alone. What the autograd engine itself
takes to start is measured with backwards that do nothing, and taken off; what it takes for each node belongs to the operation.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from whale.cluster.kinds import OperationPoint

ROUND_S = 0.02
"""how long one round of a point is repeated"""
NUM_ROUNDS = 3
LEAST_S = 1e-7
"""of a backward, after the engine's own time is taken off"""
WIDTHS = {"cpu": (16, 128, 384, 1024), "cuda": (64, 512, 2048, 8192)}
"""of square matrices"""
MANY_VIEWS = 11
HEADS, HEAD_WIDTH = 8, 64


@dataclass(frozen=True)
class Trial:
    """One operation at one size."""

    name: str
    work: float
    """FLOP of a product, bytes that any other operation moves"""
    run: Callable[[], Tensor]
    inputs: Sequence[Tensor]
    """whose gradients the backward makes"""


def trials(device: str) -> list[Trial]:
    """What is measured: the operations of `models`, each at sizes from overhead to memory."""
    found: list[Trial] = []
    for n in WIDTHS[torch.device(device).type]:
        x, w = _leaf(device, n, n), _leaf(device, n, n)
        scale, shift = _leaf(device, n), _leaf(device, n)
        positive = (x.detach().abs() + 1).requires_grad_()
        size = 4.0 * n * n
        found += [
            Trial("linear", 2.0 * n**3, lambda x=x, w=w, b=shift: F.linear(x, w, b), (x, w)),  # type: ignore[misc]
            Trial("add", 3 * size, lambda x=x, w=w: x + w, (x, w)),  # type: ignore[misc]
            Trial("mul", 3 * size, lambda x=x, w=w: x * w, (x, w)),  # type: ignore[misc]
            Trial("relu", 2 * size, lambda x=x: F.relu(x), (x,)),  # type: ignore[misc]
            Trial("gelu", 2 * size, lambda x=x: F.gelu(x), (x,)),  # type: ignore[misc]
            Trial("tanh", 2 * size, lambda x=x: torch.tanh(x), (x,)),  # type: ignore[misc]
            Trial("pow", 2 * size, lambda x=positive: x.pow(3.0), (positive,)),  # type: ignore[misc]
            Trial("softmax", 2 * size, lambda x=x: torch.softmax(x, -1), (x,)),  # type: ignore[misc]
            Trial("layer_norm", 2 * size, lambda x=x, s=scale, b=shift: F.layer_norm(x, (len(s),), s, b), (x, scale, shift)),  # type: ignore[misc]
            Trial("sum", size, lambda x=x: x.sum(-1), (x,)),  # type: ignore[misc]
            Trial("cross_entropy_loss", size, lambda x=x: _loss(x), (x,)),  # type: ignore[misc]
            Trial("embedding", 2 * size, lambda x=x: F.embedding(torch.arange(len(x), device=x.device), x), (x,)),  # type: ignore[misc]
            Trial("view", size, lambda x=x: x.view(-1), (x,)),  # type: ignore[misc]
            Trial("transposed_copy", 2 * size, lambda x=x: x.t().contiguous(), (x,)),  # type: ignore[misc]
        ]
        found += _attention(device, n) + _convolution(device, n)
    return found


def _leaf(device: str, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device).requires_grad_()


def _loss(x: Tensor) -> Tensor:
    return F.cross_entropy(x, torch.zeros(len(x), dtype=torch.long, device=x.device))


def _attention(device: str, length: int) -> list[Trial]:
    """Products of many small matrices, alone and inside attention."""
    tokens = min(length, 512)
    q, k, v = (_leaf(device, HEADS, tokens, HEAD_WIDTH) for _ in range(3))
    one = 2.0 * HEADS * tokens * tokens * HEAD_WIDTH
    return [
        Trial("matmul", one, lambda: torch.matmul(q, k.transpose(-1, -2)), (q, k)),
        Trial("scaled_dot_product_attention", 2 * one, lambda: F.scaled_dot_product_attention(q[None], k[None], v[None]), (q, k, v)),
    ]


def _convolution(device: str, width: int) -> list[Trial]:
    channels, size = max(4, min(width // 8, 64)), 4 * max(4, min(width // 32, 14))
    x, w = _leaf(device, 4, channels, size, size), _leaf(device, channels, channels, 3, 3)
    scale, shift = _leaf(device, channels), _leaf(device, channels)
    flop, moved = 2.0 * 9 * channels * x.numel(), 8.0 * x.numel()
    return [
        Trial("conv2d", flop, lambda: F.conv2d(x, w, padding=1), (x, w)),
        Trial("batch_norm", moved, lambda: F.batch_norm(x, None, None, scale, shift, training=True), (x, scale, shift)),
        Trial("max_pool2d", moved, lambda: F.max_pool2d(x, 3, 2, 1), (x,)),
    ]


def measure_operations(device: str, together: Callable[[], None]) -> tuple[OperationPoint, ...]:
    """Every trial, forward and backward. `together`: called before each, so that all ranks measure at the same time."""
    start_s = _engine_start_s(device, together)
    points = []
    for trial in trials(device):
        forward_s = _typical(trial.run, device, together)
        backward_s = max(LEAST_S, _backward_s(trial, device, together) - start_s)
        points.append(OperationPoint(trial.name, trial.work, forward_s, backward_s))
    return tuple(points)


def _engine_start_s(device: str, together: Callable[[], None]) -> float:
    """What a backward takes before its first node: a chain of views, less what each of them takes."""
    leaf = _leaf(device, 1)

    def chain(length: int) -> Tensor:
        result = leaf
        for _ in range(length):
            result = result.view(1)
        return result

    one, many = (_backward_s(Trial("view", 0.0, lambda n=n: chain(n), (leaf,)), device, together) for n in (1, MANY_VIEWS))  # type: ignore[misc]
    return max(0.0, one - max(0.0, many - one) / (MANY_VIEWS - 1))


def _backward_s(trial: Trial, device: str, together: Callable[[], None]) -> float:
    result = trial.run()
    gradient = torch.ones_like(result)

    def run() -> object:
        return torch.autograd.grad(result, trial.inputs, gradient, retain_graph=True)

    return _typical(run, device, together)


def _typical(run: Callable[[], object], device: str, together: Callable[[], None]) -> float:
    """Seconds of one call: the median of several rounds."""
    run()  # warm
    together()
    return statistics.median(_round(run, device) for _ in range(NUM_ROUNDS))


def _round(run: Callable[[], object], device: str) -> float:
    _finish(device)
    start, number, calls = time.perf_counter(), 0, 1
    while True:
        for _ in range(calls):
            run()
        number += calls
        _finish(device)
        passed = time.perf_counter() - start
        if passed > ROUND_S:
            return passed / number
        calls = 2 * calls  # looking at the clock, and at a device, takes time as well


def _finish(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
