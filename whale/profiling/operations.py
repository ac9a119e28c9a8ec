"""Times of common operations on a running device, forward and backward, at several sizes: the measured side of the cost model.

Each operation is timed as training calls it: forward with autograd recording, then its backward alone. On a CPU all operations of one
size take turns, forwards first and then backwards, as in a step of a model:

    F a, F b, F c, ..., B c, B b, B a, and again

Those of transformers are one model and those of convolutional networks another, so that no more lies between two calls than does there.
Alone in a loop an operation finds its data and even its own code in the caches, and is up to four times faster than in a model. What the
autograd engine itself takes to start is measured with backwards that do nothing, and taken off; what it takes for each node belongs to
the operation.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from whale.cluster.kinds import OperationPoint
from whale.lowering.collectives import batch_norm_over_devices
from whale.profiling.calibration import BATCH_NORM_OVER_DEVICES
from whale.profiling.steady import steady_seconds
from whale.runtime.ranks import Ranks

TURNS_S = 0.5
"""how long the operations of one size and one kind of model take turns"""
FEWEST_TURNS = 4
OF_CONVOLUTIONS = frozenset({"conv2d", "batch_norm", "max_pool2d", "relu", "sum"})
"""what networks with convolutions are made of; all other operations are those of transformers"""
TURNS_TOGETHER = 11
"""of operations in which ranks wait for each other"""
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


def trials(device: str, n: int) -> list[Trial]:
    """What is measured at one size: the operations of `models`."""
    x, w = _leaf(device, n, n), _leaf(device, n, n)
    scale, shift = _leaf(device, n), _leaf(device, n)
    positive = (x.detach().abs() + 1).requires_grad_()
    size = 4.0 * n * n
    found = [
        Trial("linear", 2.0 * n**3, lambda: F.linear(x, w, shift), (x, w)),
        Trial("add", 3 * size, lambda: x + w, (x, w)),
        Trial("mul", 3 * size, lambda: x * w, (x, w)),
        Trial("relu", 2 * size, lambda: F.relu(x), (x,)),
        Trial("gelu", 2 * size, lambda: F.gelu(x), (x,)),
        Trial("tanh", 2 * size, lambda: torch.tanh(x), (x,)),
        Trial("pow", 2 * size, lambda: positive.pow(3.0), (positive,)),
        Trial("softmax", 2 * size, lambda: torch.softmax(x, -1), (x,)),
        Trial("layer_norm", 2 * size, lambda: F.layer_norm(x, (n,), scale, shift), (x, scale, shift)),
        Trial("sum", size, lambda: x.sum(-1), (x,)),
        Trial("cross_entropy_loss", size, lambda: _loss(x), (x,)),
        Trial("embedding", 2 * size, lambda: F.embedding(torch.arange(len(x), device=x.device), x), (x,)),
        Trial("view", size, lambda: x.view(-1), (x,)),
        Trial("transposed_copy", 2 * size, lambda: x.t().contiguous(), (x,)),
    ]
    return found + _attention(device, n) + _convolution(device, n)


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


def measure_operations(ranks: Ranks) -> tuple[OperationPoint, ...]:
    """Every trial, forward and backward. All ranks call it and measure at the same time."""
    points: list[OperationPoint] = []
    for width in WIDTHS[torch.device(ranks.device).type]:
        chosen = trials(ranks.device, width)
        if ranks.device == "cpu":
            points += _in_turns([trial for trial in chosen if trial.name not in OF_CONVOLUTIONS], ranks)
            points += _in_turns([trial for trial in chosen if trial.name in OF_CONVOLUTIONS], ranks)
        else:
            points += _alone(chosen, ranks)
        if ranks.is_distributed:
            points.append(_over_devices(chosen, ranks))
    return tuple(points)


def _in_turns(chosen: Sequence[Trial], ranks: Ranks) -> list[OperationPoint]:
    """Medians of each operation, all stretched by what whole turns take in the long run: a busy neighbour takes the core for a few
    milliseconds now and then, which no single operation shows."""
    leaf = _leaf(ranks.device, 1)
    chosen = [*chosen, *(Trial("view", 0.0, partial(_chain, leaf, length), (leaf,)) for length in (1, MANY_VIEWS))]
    gradients = [torch.ones_like(trial.run()) for trial in chosen]
    _turn(chosen, gradients)  # warm
    _together(ranks)
    turns: list[tuple[list[float], list[float]]] = []
    begin = time.perf_counter()
    while len(turns) < FEWEST_TURNS or time.perf_counter() - begin < TURNS_S:  # a slow rank is not waited for: all go on computing
        turns.append(_turn(chosen, gradients))
    forward, backward = ([statistics.median(turn[side][place] for turn in turns) for place in range(len(chosen))] for side in (0, 1))
    stretch = steady_seconds([sum(turn[0]) + sum(turn[1]) for turn in turns]) / (sum(forward) + sum(backward))
    start_s = _start_s(*backward[-2:])
    return [
        OperationPoint(trial.name, trial.work, stretch * forward[place], stretch * max(LEAST_S, backward[place] - start_s))
        for place, trial in enumerate(chosen[:-2])
    ]


def _turn(chosen: Sequence[Trial], gradients: Sequence[Tensor], device: str = "cpu") -> tuple[list[float], list[float]]:
    """Seconds of each forward and of each backward. Results and gradients stay until the end, as in a step."""
    results, kept = [], []

    def now() -> float:
        _finish(device)
        return time.perf_counter()

    forward, backward = [0.0] * len(chosen), [0.0] * len(chosen)
    for place, trial in enumerate(chosen):
        start = now()
        results.append(trial.run())
        forward[place] = now() - start
    for place in reversed(range(len(chosen))):
        start = now()
        kept.append(torch.autograd.grad(results[place], chosen[place].inputs, gradients[place]))
        backward[place] = now() - start
        results.pop()
    return forward, backward


def _over_devices(chosen: Sequence[Trial], ranks: Ranks) -> OperationPoint:
    """Batch norm with the statistics of all ranks, between other operations: waiting for each other is part of it."""
    by_name = {trial.name: trial for trial in chosen}
    norm = by_name["batch_norm"]
    x, scale, shift = norm.inputs
    mean, variance = torch.zeros_like(scale), torch.ones_like(scale)
    run = partial(batch_norm_over_devices, x, scale, shift, mean, variance, momentum=0.1, eps=1e-5, group=None)
    some = [by_name["conv2d"], replace(norm, name=BATCH_NORM_OVER_DEVICES, run=run), by_name["relu"]]
    gradients = [torch.ones_like(trial.run()) for trial in some]
    turns = [_turn(some, gradients, ranks.device) for _ in range(TURNS_TOGETHER + 1)][1:]  # the first is warm-up
    return OperationPoint(
        BATCH_NORM_OVER_DEVICES, norm.work, *(statistics.median(turn[side][1] for turn in turns) for side in (0, 1))
    )


def _alone(chosen: Sequence[Trial], ranks: Ranks) -> list[OperationPoint]:
    """Each in a loop, for devices that are given work ahead of time."""
    leaf = _leaf(ranks.device, 1)
    start_s = _start_s(*(_backward_s(Trial("view", 0.0, partial(_chain, leaf, length), (leaf,)), ranks) for length in (1, MANY_VIEWS)))
    return [
        OperationPoint(trial.name, trial.work, _typical(trial.run, ranks), max(LEAST_S, _backward_s(trial, ranks) - start_s))
        for trial in chosen
    ]


def _chain(leaf: Tensor, length: int) -> Tensor:
    for _ in range(length):
        leaf = leaf.view(1)
    return leaf


def _start_s(one: float, many: float) -> float:
    """What a backward takes before its first node: of a chain of views, less what each of them takes."""
    return max(0.0, one - max(0.0, many - one) / (MANY_VIEWS - 1))


def _backward_s(trial: Trial, ranks: Ranks) -> float:
    result = trial.run()
    gradient = torch.ones_like(result)

    def run() -> object:
        return torch.autograd.grad(result, trial.inputs, gradient, retain_graph=True)

    return _typical(run, ranks)


def _typical(run: Callable[[], object], ranks: Ranks) -> float:
    """Seconds of one call: the median of several rounds."""
    run()  # warm
    _together(ranks)
    return statistics.median(_round(run, ranks.device) for _ in range(NUM_ROUNDS))


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


def _together(ranks: Ranks) -> None:
    if ranks.is_distributed:
        dist.barrier()
