"""What the tests of programs that people write share: a model around something unusual, its data,
and the comparison with local training.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

import whale as wh
from tests.exactness import Trace, compare, local_training

WIDTH = 6
DOUBLE = torch.float64


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


class Layered(nn.Module):
    """A layer, something unusual, and a mean of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)

    def unusual(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.unusual(self.layer(x)).square().mean()


class WithFunction(Layered):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.last = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)

    def unusual(self, x: Tensor) -> Tensor:
        return self.last(self.function(x))


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE)


Cases = dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]]
"""name -> (builder of a model, maker of a batch)"""


def trains_like_local(
    build: Callable[[], nn.Module], batch: Callable[[], Any], num_micro_batch: int = 2
) -> None:
    """Two steps on one device, in micro-batches, have the losses, gradients and weights of local
    training.
    """
    torch.manual_seed(0)
    model = build()
    data = [batch(), batch()]
    reference = local_training(deepcopy(model), data, None, sgd)
    reference.buffers = None
    wh.init(wh.Config({"num_micro_batch": num_micro_batch}))
    engine = wh.parallelize(model, data[0], optimizer=sgd)
    losses = [engine.step(data[0]).loss]
    gradients = engine.full_gradients()
    losses.append(engine.step(data[1]).loss)
    weights = engine.full_state_dict()
    compare(reference, Trace(losses, gradients, {key: weights[key] for key in reference.weights}))
