"""Families of `transformers` beyond the exactness table: one step on two stages must be the step of
local training.

Six of them run every time, chosen so that no two are alike; the rest is marked slow.
"""

from __future__ import annotations

import pytest

from tests.exactness import compare
from tests.integration.table import PlanCase
from tests.integration.training import merge, prepare_subject, train_locally, train_on_rank
from tests.ranks import ModelServer, preload
from tests.zoo import BREADTH, CASES, Case

preload("tests.integration.training")

TWO_STAGES = PlanCase("2 stages", 2, {"num_micro_batch": 2}, (1, 1))

ALWAYS = {
    "opt": "LayerDrop: skips layers by a random number",
    "bloom": "an autograd.Function of its own, whose derivative is that of its forward",
    "mistral": "rotary positions, grouped heads, a sliding window",
    "albert": "one layer called four times",
    "resnet": "convolutions with batch statistics",
    "wav2vec2": "convolutions over sound, weight normalisation",
}
NUM_STEPS = 1


def _parameter(case: Case) -> object:
    return pytest.param(
        case.name, id=case.name, marks=() if case.name in ALWAYS else pytest.mark.slow
    )


@pytest.mark.parametrize("name", [_parameter(case) for case in BREADTH])
def test_two_stages_train_like_local(name: str) -> None:
    with ModelServer(prepare_subject, name) as server:
        reference = server.run_local(train_locally, TWO_STAGES, NUM_STEPS)
        ranks = server.run(train_on_rank, TWO_STAGES.num_ranks, TWO_STAGES, NUM_STEPS)
    assert all(trace.held for trace in ranks), "a stage without a parameter shows nothing"
    compare(reference, merge(ranks, CASES[name].build()))


def test_families_that_run_always_exist() -> None:
    """A renamed family must not silently become a slow one."""
    assert set(ALWAYS) <= {case.name for case in BREADTH}
    assert any(CASES[name].layer_drop for name in ALWAYS)
