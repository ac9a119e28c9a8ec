"""Gradients that hold only the rows that were looked up train like local."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale as wh
from tests.exactness import Trace, compare, local_training
from tests.integration.programs import DOUBLE, WIDTH, sgd
from tests.ranks import preload, run_ranks

preload("tests.integration.test_sparse_gradients")


class SparseRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, WIDTH, sparse=True, dtype=DOUBLE)
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.rows(x)).square().mean()


def sparse_data() -> list[Tensor]:
    return list(torch.randint(0, 8, (2, 8, 4), generator=torch.Generator().manual_seed(1)))


def _sparse_rows(is_split: bool) -> Trace:
    torch.manual_seed(0)
    model = SparseRows()
    wh.init(wh.Config({"num_micro_batch": 2}))
    if is_split:
        wh.annotate(model, {"*": wh.split(2)})
    data = sparse_data()
    engine = wh.parallelize(model, data[0], optimizer=sgd)
    losses = [engine.step(data[0]).loss]
    gradients = engine.full_gradients()
    losses.append(engine.step(data[1]).loss)
    return Trace(losses, gradients, engine.full_state_dict())


@pytest.mark.parametrize("is_split", [False, True])
def test_sparse_gradients_train_like_local(is_split: bool) -> None:
    torch.manual_seed(0)
    reference = local_training(SparseRows(), sparse_data(), None, sgd)
    for name, gradient in reference.gradients.items():
        reference.gradients[name] = gradient.to_dense() if gradient.is_sparse else gradient
    trace = run_ranks(_sparse_rows, 2, is_split, timeout_s=120)[0]
    for name, gradient in trace.gradients.items():
        trace.gradients[name] = gradient.to_dense() if gradient.is_sparse else gradient
    compare(reference, trace)


class SparseBag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(8, WIDTH, mode="sum", sparse=True, dtype=DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        return self.bag(x).square().mean()


def sparse_adam(pairs: Any) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam([parameter for _, parameter in pairs], lr=0.1)


def test_a_bag_has_sparse_gradients_for_optimizers_that_need_them() -> None:
    """They were dense, which SparseAdam refuses."""
    torch.manual_seed(0)
    model = SparseBag()
    data = sparse_data()
    expected = local_training(deepcopy(model), data, None, sparse_adam).losses
    wh.init(wh.Config({"num_micro_batch": 2}))
    engine = wh.parallelize(model, data[0], optimizer=sparse_adam)
    assert [engine.step(batch).loss for batch in data] == pytest.approx(expected, rel=1e-12)
