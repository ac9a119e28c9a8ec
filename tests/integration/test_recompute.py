"""Computing activations again is exact under every schedule, and memory goes down by what the plan
says.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import whale as wh
from tests.exactness import Trace, compare
from tests.integration.table import PlanCase
from tests.integration.test_memory import allocated
from tests.integration.training import merge, prepare_subject, train_locally, train_on_rank
from tests.ranks import ModelServer, preload
from tests.unit.test_recompute import WIDTH, Net, sgd
from tests.zoo import CASES

preload("tests.integration.training")

CASE = "deep_chain"
PLANS = (
    PlanCase("DP 2", 2, {"num_micro_batch": 2}),
    PlanCase("gpipe", 2, {"schedule": "gpipe", "num_micro_batch": 4, "num_task_graph": 2}),
    PlanCase("1f1b x DP 2", 4, {"num_micro_batch": 3, "num_task_graph": 2}),
    PlanCase("wave", 2, {"schedule": "wave", "num_micro_batch": 4, "num_task_graph": 2}),
    PlanCase(
        "zero-bubble", 2, {"schedule": "zero-bubble", "num_micro_batch": 4, "num_task_graph": 2}
    ),
    PlanCase("auto", 2, {"schedule": "auto", "num_micro_batch": 4, "num_task_graph": 2}),
)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[ModelServer, Trace]]:
    with ModelServer(prepare_subject, CASE) as started:
        yield started, started.run_local(train_locally, PLANS[0])


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_trains_like_local(server: tuple[ModelServer, Trace], plan: PlanCase) -> None:
    again = PlanCase(plan.name, plan.num_ranks, {**plan.config, "recompute": True})
    compare(
        server[1], merge(server[0].run(train_on_rank, again.num_ranks, again), CASES[CASE].build())
    )


def peak_of_a_step(recompute: bool) -> tuple[int, float]:
    """(bytes that a step takes beside weights, gradients and optimizer state; the same as
    predicted), 4 micro-batches in flight.
    """
    wh.init(wh.Config({"recompute": recompute, "schedule": "gpipe", "num_micro_batch": 4}))
    batch = torch.randn(4096, WIDTH)
    engine = wh.parallelize(Net(), batch, optimizer=sgd)
    engine.step(batch)
    with allocated() as found:
        engine.step(batch)
    memory = engine.plan.memory[0]
    return found.peak, memory.fixed_bytes + memory.sample_bytes * len(batch) / 4


def test_measured_bytes_go_down_as_predicted() -> None:
    (kept, kept_predicted) = peak_of_a_step(False)
    (again, again_predicted) = peak_of_a_step(True)
    wh.init()
    assert again < 0.6 * kept
    assert (kept - again) == pytest.approx(kept_predicted - again_predicted, rel=0.1)
