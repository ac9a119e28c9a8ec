"""When samples move to other devices, and how many: by hand-worked examples, and never for the
worse.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import whale as wh
from whale.planning.adapt import (
    StepTimes,
    drift,
    predicted_seconds,
    rebalance,
    samples_by_rank,
    slowest_seconds,
)
from whale.plans.plan import Plan
from whale.plans.revise import revise

pytestmark = pytest.mark.usefixtures("fresh_session")

WIDTH = 4
BATCH_SIZE = 16
THRESHOLD = 0.15


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def plan_of(num_devices: int, seconds: Sequence[float], **config: object) -> Plan:
    """A plan whose devices take so many seconds for a sample, and nothing else."""
    plan = wh.plan(Net(), torch.randn(BATCH_SIZE, WIDTH), cluster=num_devices, config=dict(config))
    return revise(plan, device_seconds=tuple(seconds), device_fixed_seconds=(0.0,) * num_devices)


def measured(plan: Plan, slower: Sequence[float], num_steps: int = 3) -> list[StepTimes]:
    """Steps in which every rank takes so many times its prediction."""
    times = tuple(
        time * factor
        for time, factor in zip(predicted_seconds(plan, BATCH_SIZE), slower, strict=True)
    )
    return [StepTimes(BATCH_SIZE, times)] * num_steps


def test_drift_is_the_speed_against_the_prediction_and_against_the_others() -> None:
    # speeds 1 and 1/2 of what was predicted, 3/4 on average
    assert drift([4.0, 2.0], [4.0, 4.0]) == pytest.approx([1 / 3, -1 / 3])
    assert drift([4.0, 2.0], [12.0, 6.0]) == pytest.approx(
        [0.0, 0.0]
    )  # a cost model that is wrong for all moves nobody
    assert drift([4.0, 0.0], [4.0, 0.1]) == [0.0, 0.0]  # a rank without samples says nothing


def test_a_device_at_half_its_speed_gives_up_samples_and_gets_them_back() -> None:
    plan = plan_of(2, (1.0, 1.0))
    assert samples_by_rank(plan, BATCH_SIZE) == (8, 8)
    slow = rebalance(plan, measured(plan, (1.0, 2.0)), THRESHOLD, last_step=20)
    assert slow is not None and slow.shares == samples_by_rank(slow.plan, BATCH_SIZE) == (
        11,
        5,
    )  # 11 x 1 against 5 x 2; 10 x 1 and 6 x 2 take 12
    assert slow.text == (
        f"rank 1 ({plan.device_kinds[1]}) ran at 0.67 of its predicted share of the speed in the "
        "3 measured steps up to step 20 "
        "(threshold 0.15): samples by rank 8+8 -> 11+5, which makes the slowest device 1.45 times "
        "faster"
    )
    assert slow.plan.decisions[-1].what == "samples by rank from step 21"
    again = rebalance(slow.plan, measured(slow.plan, (1.0, 0.5)), THRESHOLD, last_step=40)
    assert again is not None and again.shares == (8, 8)


@pytest.mark.parametrize(
    "slower",
    [
        [(1.0, 1.1)] * 3,
        [(3.0, 3.0)] * 3,
        [(1.0, 2.0), (1.0, 1.0), (1.0, 2.0)],
        [(1.0, 2.0), (2.0, 1.0), (1.0, 2.0)],
    ],
    ids=["within the threshold", "all alike", "not in every step", "now one, now the other"],
)
def test_nothing_moves_without_a_steady_reason(slower: list[tuple[float, float]]) -> None:
    plan = plan_of(2, (1.0, 1.0))
    window = [measured(plan, each, 1)[0] for each in slower]
    assert rebalance(plan, window, THRESHOLD, last_step=3) is None


def test_replicas_of_a_pipeline_share_again_and_stages_stay() -> None:
    plan = plan_of(4, (1.0, 1.0, 1.0, 1.0), num_task_graph=2, num_micro_batch=2)
    assert samples_by_rank(plan, BATCH_SIZE) == (8, 8, 8, 8)
    found = rebalance(
        plan, measured(plan, (1.0, 1.0, 1.0, 3.0)), THRESHOLD, last_step=3
    )  # stage 1 of replica 1
    assert found is not None and found.shares == (12, 12, 4, 4)  # a micro-batch of 8 becomes 6 + 2
    assert (
        found.plan.stage_of_operation == plan.stage_of_operation
        and found.plan.holders == plan.holders
    )


def test_a_pipeline_of_one_replica_has_nothing_to_move() -> None:
    plan = plan_of(2, (1.0, 1.0), num_task_graph=2, num_micro_batch=2)
    assert rebalance(plan, measured(plan, (1.0, 3.0)), THRESHOLD, last_step=3) is None


def test_a_device_keeps_a_sample_so_that_it_can_be_measured() -> None:
    plan = plan_of(2, (1.0, 1.0))
    found = rebalance(plan, measured(plan, (1.0, 1000.0)), THRESHOLD, last_step=3)
    assert found is not None and found.shares == (15, 1)


PLAN = None


@given(
    st.lists(st.floats(0.2, 5.0), min_size=3, max_size=3),
    st.lists(st.floats(0.2, 5.0), min_size=3, max_size=3),
)
def test_new_shares_are_faster_on_what_was_measured_and_drop_no_sample(
    seconds: list[float], slower: list[float]
) -> None:
    global PLAN
    PLAN = PLAN or plan_of(3, (1.0, 1.0, 1.0))
    plan = revise(PLAN, device_seconds=tuple(seconds))
    found = rebalance(plan, measured(plan, slower), THRESHOLD, last_step=3)
    if found is not None:
        known = [
            factor
            for factor, samples in zip(slower, samples_by_rank(plan, BATCH_SIZE), strict=True)
            if samples
        ]
        usual = sum(known) / len(
            known
        )  # what is taken for a device without samples, which nobody measured
        factors = [
            factor if samples else usual
            for factor, samples in zip(slower, samples_by_rank(plan, BATCH_SIZE), strict=True)
        ]
        truth = revise(
            plan,
            device_seconds=tuple(
                time * factor for time, factor in zip(seconds, factors, strict=True)
            ),
        )
        assert slowest_seconds(truth, found.plan, BATCH_SIZE) < slowest_seconds(
            truth, plan, BATCH_SIZE
        )
        assert sum(found.shares) == BATCH_SIZE
