"""Times of common operations on a running device, forward and backward, at several sizes: the
measured side of the cost model.

Each operation is timed as training calls it: forward with autograd recording, then its backward
alone. On a CPU all operations of one size take turns, forwards first and then backwards, as in a
step of a model:

    F a, F b, F c, ..., B c, B b, B a, and again

Those of transformers are one model and those of convolutional networks another, so that no more
lies between two calls than does there. Alone in a loop an operation finds its data and even its own
code in the caches, and is up to four times faster than in a model. What the autograd engine itself
takes to start is measured with backwards that do nothing, and taken off; what it takes for each
node belongs to the operation.

An optimizer's update is timed too: torch's SGD, which has no state, and AdamW, which has two
averages, at two sizes. Many parameters at once, as in a model: more bytes than the caches hold, so
that an update finds nothing there of the step before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from whale.calibration.turns import Subject, loop, once
from whale.cluster.kinds import OperationPoint
from whale.costs.measured import BATCH_NORM_OVER_DEVICES, WITH_TWO_STATES, WITHOUT_STATE
from whale.distributed.ranks import Ranks
from whale.lowering.sharded_norms import batch_norm
from whale.lowering.subgroups import Subgroup

OF_CONVOLUTIONS = frozenset(
    {"conv2d", "batch_norm", BATCH_NORM_OVER_DEVICES, "max_pool2d", "relu", "sum"}
)
"""what networks with convolutions are made of; all other operations are those of transformers"""
LARGE_WIDTH = 1024
LONG = frozenset({"linear", "scaled_dot_product_attention", "conv2d"})
LEAST_S = 1e-7
"""of a backward, after the engine's own time is taken off"""
WIDTHS = {False: (16, 128, 384, 1024), True: (64, 512, 2048, 4096)}
"""rows of square matrices, by whether the device is an accelerator"""
UPDATE_WIDTHS = {False: ((16, 32), (1024, 8)), True: ((64, 32), (4096, 4))}
"""(rows and columns of a parameter, number of parameters), by whether the device is an
accelerator
"""
MANY_VIEWS = 11
HEADS = 8
HEAD_WIDTH = 64


@dataclass(frozen=True)
class TimedOperation:
    """One operation at one size."""

    name: str
    work: float
    """FLOP of a product, bytes that any other operation moves"""
    run: Callable[[], Tensor]
    inputs: Sequence[Tensor]
    """whose gradients the backward makes"""


def trials(device: str, n: int) -> list[TimedOperation]:
    """What is measured at one size: the operations of `models`."""
    x = _leaf(device, n, n)
    w = _leaf(device, n, n)
    scale = _leaf(device, n)
    shift = _leaf(device, n)
    positive = (x.detach().abs() + 1).requires_grad_()
    size = 4.0 * n * n
    found = [
        TimedOperation("linear", 2.0 * n**3, lambda: F.linear(x, w, shift), (x, w)),
        TimedOperation("add", 3 * size, lambda: x + w, (x, w)),
        TimedOperation("mul", 3 * size, lambda: x * w, (x, w)),
        TimedOperation("relu", 2 * size, lambda: F.relu(x), (x,)),
        TimedOperation("gelu", 2 * size, lambda: F.gelu(x), (x,)),
        TimedOperation("tanh", 2 * size, lambda: torch.tanh(x), (x,)),
        TimedOperation("pow", 2 * size, lambda: positive.pow(3.0), (positive,)),
        TimedOperation("softmax", 2 * size, lambda: torch.softmax(x, -1), (x,)),
        TimedOperation(
            "layer_norm", 2 * size, lambda: F.layer_norm(x, (n,), scale, shift), (x, scale, shift)
        ),
        TimedOperation("sum", size, lambda: x.sum(-1), (x,)),
        TimedOperation("cross_entropy_loss", size, lambda: _loss(x), (x,)),
        TimedOperation(
            "embedding",
            2 * size,
            lambda: F.embedding(torch.arange(len(x), device=x.device), x),
            (x,),
        ),
        TimedOperation("view", size, lambda: x.view(-1), (x,)),
        TimedOperation("transposed_copy", 2 * size, lambda: x.t().contiguous(), (x,)),
    ]
    return found + _attention(device, n) + _convolution(device, n)


def _leaf(device: str, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device).requires_grad_()


def _loss(x: Tensor) -> Tensor:
    return F.cross_entropy(x, torch.zeros(len(x), dtype=torch.long, device=x.device))


def _attention(device: str, length: int) -> list[TimedOperation]:
    """Products of many small matrices, alone and inside attention."""
    tokens = min(length, 512)
    q, k, v = (_leaf(device, HEADS, tokens, HEAD_WIDTH) for _ in range(3))
    one = 2.0 * HEADS * tokens * tokens * HEAD_WIDTH
    return [
        TimedOperation("matmul", one, lambda: torch.matmul(q, k.transpose(-1, -2)), (q, k)),
        TimedOperation(
            "scaled_dot_product_attention",
            2 * one,
            lambda: F.scaled_dot_product_attention(q[None], k[None], v[None]),
            (q, k, v),
        ),
    ]


def _convolution(device: str, width: int) -> list[TimedOperation]:
    channels = max(4, min(width // 8, 64))
    size = 4 * max(4, min(width // 32, 14))
    x = _leaf(device, 4, channels, size, size)
    w = _leaf(device, channels, channels, 3, 3)
    scale = _leaf(device, channels)
    shift = _leaf(device, channels)
    flop = 2.0 * 9 * channels * x.numel()
    moved = 8.0 * x.numel()
    return [
        TimedOperation("conv2d", flop, lambda: F.conv2d(x, w, padding=1), (x, w)),
        TimedOperation(
            "batch_norm",
            moved,
            lambda: F.batch_norm(x, None, None, scale, shift, training=True),
            (x, scale, shift),
        ),
        TimedOperation(
            BATCH_NORM_OVER_DEVICES,
            moved,
            lambda: _norm_over_devices(x, scale, shift),
            (x, scale, shift),
        ),
        TimedOperation("max_pool2d", moved, lambda: F.max_pool2d(x, 3, 2, 1), (x,)),
    ]


@dataclass(frozen=True)
class Operations:
    """Operations that are timed together, and what their times say."""

    subject: Subject
    points: Callable[[Sequence[float]], list[OperationPoint]]
    """from the seconds of each piece of the subject"""


def _norm_over_devices(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """What each device computes itself; the sums in between are measured as sums."""
    return batch_norm(
        x, scale, shift, None, None, momentum=0.1, eps=1e-5, subgroup=Subgroup(1, 0, None)
    )


def operations_of(ranks: Ranks) -> list[Operations]:
    """Every trial, forward and backward."""
    found: list[Operations] = []
    for width in WIDTHS[ranks.device.is_accelerator]:
        chosen = trials(ranks.device.name, width)
        found += [_model(some, ranks) for some in _models(chosen, width)]
    return found


def _models(chosen: Sequence[TimedOperation], width: int) -> list[list[TimedOperation]]:
    """What takes turns. Large operations find nothing in the caches anyway: their long ones go
    alone, so that a stretch stays short.
    """
    alone = []
    if width >= LARGE_WIDTH:
        alone = [trial for trial in chosen if trial.name in LONG]
    others = [trial for trial in chosen if trial not in alone]
    transformer = [trial for trial in others if trial.name not in OF_CONVOLUTIONS]
    convolutional = [trial for trial in others if trial.name in OF_CONVOLUTIONS]
    return [transformer, convolutional, *([trial] for trial in alone)]


def _model(chosen: Sequence[TimedOperation], ranks: Ranks) -> Operations:
    """Operations of one kind of model at one size: in turns on a CPU; each by itself on a device
    that is given work ahead of time.
    """
    leaf = _leaf(ranks.device.name, 1)
    chosen = [
        *chosen,
        *(
            TimedOperation("view", 0.0, partial(_chain, leaf, length), (leaf,))
            for length in (1, MANY_VIEWS)
        ),
    ]
    gradients = [torch.ones_like(trial.run()) for trial in chosen]

    def points(seconds: Sequence[float]) -> list[OperationPoint]:
        forward = seconds[: len(chosen)]
        backward = seconds[len(chosen) :]
        start_s = _start_s(*backward[-2:])
        return [
            OperationPoint(
                trial.name, trial.work, forward[place], max(LEAST_S, backward[place] - start_s)
            )
            for place, trial in enumerate(chosen[:-2])
        ]

    if not ranks.device.is_accelerator:
        return Operations(Subject(partial(_turn, chosen, gradients)), points)
    each = [loop(trial.run, ranks) for trial in chosen]
    each += [
        loop(_backward(trial, gradient), ranks)
        for trial, gradient in zip(chosen, gradients, strict=True)
    ]

    def turn() -> list[float]:
        seconds: list[float] = []
        for subject in each:
            seconds += subject.turn()
        return seconds

    return Operations(Subject(turn), points)


def _turn(chosen: Sequence[TimedOperation], gradients: Sequence[Tensor]) -> list[float]:
    """Seconds of each forward and of each backward, on a CPU. Results and gradients stay until the
    end, as in a step.
    """
    results = []
    gradients_held = []  # freed after the clock stops
    now = time.perf_counter
    forward = [0.0] * len(chosen)
    backward = [0.0] * len(chosen)
    for place, trial in enumerate(chosen):
        start = now()
        results.append(trial.run())
        forward[place] = now() - start
    for place in reversed(range(len(chosen))):
        start = now()
        gradients_held.append(
            torch.autograd.grad(results[place], chosen[place].inputs, gradients[place])
        )
        backward[place] = now() - start
        results.pop()
    return forward + backward


def _chain(leaf: Tensor, length: int) -> Tensor:
    for _ in range(length):
        leaf = leaf.view(1)
    return leaf


def _start_s(one: float, many: float) -> float:
    """What a backward takes before its first node: of a chain of views, less what each of them
    takes.
    """
    return max(0.0, one - max(0.0, many - one) / (MANY_VIEWS - 1))


def _backward(trial: TimedOperation, gradient: Tensor) -> Callable[[], object]:
    """The backward of one forward, as often as one likes."""
    result = trial.run()
    return lambda: torch.autograd.grad(result, trial.inputs, gradient, retain_graph=True)


# ---- updates


def updates_of(ranks: Ranks) -> list[Operations]:
    """Updates of both optimizers at both sizes."""
    found = []
    for width, number in UPDATE_WIDTHS[ranks.device.is_accelerator]:
        found.append(_update(WITHOUT_STATE, torch.optim.SGD, width, number, ranks))
        found.append(_update(WITH_TWO_STATES, torch.optim.AdamW, width, number, ranks))
    return found


def _update(
    name: str,
    make: type[torch.optim.SGD] | type[torch.optim.AdamW],
    width: int,
    number: int,
    ranks: Ranks,
) -> Operations:
    parameters = [
        torch.nn.Parameter(torch.randn(width, width, device=ranks.device.name))
        for _ in range(number)
    ]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)

    def points(seconds: Sequence[float]) -> list[OperationPoint]:
        """Seconds for one parameter."""
        (one,) = (each / number for each in seconds)
        return [OperationPoint(name, 4.0 * width * width, one, one)]

    return Operations(once(make(parameters, lr=1e-4).step, ranks), points)
