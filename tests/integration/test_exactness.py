"""Same loss, gradients and weights as local training, whatever the plan."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.exactness import Trace, compare
from tests.integration.table import PLANS, UNLIKE_PLANS, PlanCase
from tests.integration.training import (
    has_labels_like_input,
    merge,
    prepare_subject,
    train_locally,
    train_on_rank,
)
from tests.ranks import ModelServer, RankError, preload
from tests.zoo import CASES, MAIN

preload("tests.integration.training")


Subject = tuple[str, ModelServer, dict[object, Trace]]
"""a model of the zoo, the server that has it captured, and its local training"""


@pytest.fixture(scope="module", params=[case.name for case in MAIN])
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    with ModelServer(prepare_subject, request.param) as server:
        yield request.param, server, {}


@pytest.mark.parametrize(
    "plan", [plan for plan in PLANS if not plan.kinds], ids=lambda plan: plan.name
)
def test_trains_like_local(subject: Subject, plan: PlanCase) -> None:
    _compare_with_local(subject, plan)


@pytest.mark.parametrize("plan", UNLIKE_PLANS, ids=lambda plan: plan.name)
def test_trains_like_local_with_different_replicas(subject: Subject, plan: PlanCase) -> None:
    if CASES[subject[0]].batch_statistics and len(plan.config["replicas"]) > 1:
        with pytest.raises(RankError, match="a batch norm takes the statistics"):
            subject[1].run(train_on_rank, plan.num_ranks, plan)
        return
    _compare_with_local(subject, plan)


@pytest.mark.slow  # tests/integration/test_clusters.py has the quick ones
@pytest.mark.parametrize("plan", [plan for plan in PLANS if plan.kinds], ids=lambda plan: plan.name)
def test_trains_like_local_on_heterogeneous_devices(subject: Subject, plan: PlanCase) -> None:
    _compare_with_local(subject, plan)


def _compare_with_local(subject: Subject, plan: PlanCase) -> None:
    name, server, references = subject
    case = CASES[name]
    if plan.one_tensor and not has_labels_like_input(case):
        pytest.skip("this model has no labels of the shape of its input")
    key = (plan.one_tensor, plan.num_micro_batch if case.batch_statistics else 1)
    if key not in references:
        references[key] = server.run_local(train_locally, plan)
    compare(references[key], merge(server.run(train_on_rank, plan.num_ranks, plan), case.build()))
