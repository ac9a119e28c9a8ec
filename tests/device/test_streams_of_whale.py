"""How Whale uses streams, communicators and the host, on the test device.

The rows are those of the table of findings on the accelerator path.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.device.collectives import BACKEND
from tests.device.settings import settings
from tests.device.training import DeviceTrace, prepare_on_device, train_on_device
from tests.exactness import compare
from tests.integration.table import PLANS, PlanCase
from tests.integration.training import Subject, merge, train_locally
from tests.ranks import ModelServer, preload
from tests.zoo import CASES

preload("tests.integration.training", "tests.device.training", "tests.device.test_streams_of_whale")

MODEL = "chain"
PLAN_NAMED = {plan.name: plan for plan in PLANS}
WAVE = PlanCase("wave", 2, {"num_micro_batch": 5, "num_task_graph": 2, "schedule": "wave"})


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer(prepare_on_device, MODEL) as found:
        yield found


# ---- row 6: communicators


def test_row_6_only_ranks_that_talk_have_a_communicator(server: ModelServer) -> None:
    """2 stages x DP 4: each of the 4 replicas has one for each direction, 8 in all.

    Before there was one for every pair of ranks of the two stages: 32.
    """
    plan = PlanCase("2 stages x DP 4", 8, {"num_micro_batch": 2}, (1, 1))
    ranks = server.run(train_on_device, plan.num_ranks, plan, 1, backend=BACKEND)
    num_pairs = sum(rank.communicator_sizes.count(2) for rank in ranks) // 2
    assert num_pairs == 8


# ---- row 5: receives wait on hardware queues that compute needs


def train_with_queues(subject: Subject, plan: PlanCase, num_queues: int) -> DeviceTrace:
    settings.num_queues = num_queues
    return train_on_device(subject, plan)


@pytest.mark.parametrize("num_queues", [1, 2, 8])
@pytest.mark.parametrize(
    "row",  # not `plan`: tests/conftest.py would choose which are slow
    [PLAN_NAMED["2 stages"], PLAN_NAMED["replicate(1) -> replicate(3)"], WAVE],
    ids=lambda plan: plan.name,
)
def test_row_5_few_queues_do_not_hang(server: ModelServer, row: PlanCase, num_queues: int) -> None:
    ranks = server.run(
        train_with_queues, row.num_ranks, row, num_queues, backend=BACKEND, timeout_s=30
    )
    reference = server.run_local(train_locally, row)
    compare(reference, merge([rank.trace for rank in ranks], CASES[MODEL].build()))
