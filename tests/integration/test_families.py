"""Models that others wrote (tests/families.py) under data parallelism, 2 stages, a split and a wave:
losses, gradients and weights of local training.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

import whale as wh
from tests.exactness import Float64Mode
from tests.families import BY_NAME, FAMILIES
from tests.ranks import ModelServer
from whale import api
from whale.capture.batch import read_batch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_STEPS = 2
PLANS: dict[str, dict[str, Any]] = {
    "data parallel": {},
    "2 stages": {"num_task_graph": 2, "num_micro_batch": 2},
    "split": {},
    "wave": {"num_task_graph": 2, "num_micro_batch": 2, "schedule": "wave"},
}
Trained = tuple[list[float], dict[str, torch.Tensor]]


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def prepare(name: str) -> Any:
    """Runs in the model server: the model, captured once for all plans."""
    torch.set_num_threads(1)
    family = BY_NAME[name]
    model = family.build()
    with Float64Mode():
        layout, tensors = read_batch(family.batch(0))
        captured = api._prepare(model, layout, tensors, None, wh.Config(), "cpu", True)
    return family, model, captured


def train_locally(subject: Any, num_micro_batch: int) -> Trained:
    family, model, _ = subject
    made = optimizer(model.parameters())
    losses = []
    with Float64Mode():
        for step in range(NUM_STEPS):
            made.zero_grad()
            batch = family.batch(step)
            parts = [
                {key: t.chunk(num_micro_batch)[k] for key, t in batch.items()}
                for k in range(num_micro_batch)
            ]
            total = 0.0
            for part in parts:  # with batch norm the micro-batches are part of the result
                loss = model(**part) / num_micro_batch
                loss.backward()
                total += loss.item()
            losses.append(total)
            made.step()
    return losses, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def train_on_rank(subject: Any, plan: str) -> Trained:
    family, model, captured = subject
    wh.init(PLANS[plan])
    if plan == "split":
        wh.annotate(model, {"inner": wh.split(2)})
    with Float64Mode():
        engine = wh.parallelize(model, family.batch(0), optimizer=optimizer, prepared=captured)
        losses = [engine.step(family.batch(step)).loss for step in range(NUM_STEPS)]
        return losses, engine.full_state_dict()


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_trains_like_local(name: str) -> None:
    package = BY_NAME[name].package
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make setup-integrations")
    with ModelServer(prepare, name) as server:
        for plan, config in PLANS.items():
            micro_batches = (
                config.get("num_micro_batch", 1) if BY_NAME[name].batch_statistics else 1
            )
            losses, weights = server.run_local(train_locally, micro_batches)
            found, state = server.run(train_on_rank, 2, plan)[0]
            assert found == pytest.approx(losses, rel=1e-9), plan
            for key, tensor in state.items():
                difference = (tensor - weights[key]).abs().max().item()
                assert difference <= 1e-10 * max(1.0, weights[key].abs().max().item()), (plan, key)
