"""Gradients on their way inside of a backward under ZeRO, against examples worked by hand, and the
account of memory that counts them only while they are there.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import whale as wh
from whale.planning.gradient_moments import largest_moments, moments_of
from whale.plans.figures import Moment
from whale.plans.plan import Plan
from whale.scheduling import Kind
from whale.simulation.memory import BUFFERS, GRADIENTS, Account

WIDTH = 64
NUM_LAYERS = 4
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


def test_blocks_are_made_copied_and_reduced_one_after_the_other() -> None:
    """Three operations, each with a parameter; the first two are one block."""
    found = moments_of([10.0, 20.0, 30.0], ["a", "b", "c"], {"a": 1, "b": 2, "c": 4}, ["c", "ab"])
    assert found == [
        Moment(30.0, 4.0, 0.0, True),  # c is made
        Moment(30.0, 4.0, 0.0, True),  # a flat copy of the backward before is freed
        Moment(30.0, 8.0, 0.0, False),  # c and its flat copy
        Moment(20.0, 2.0 + 4.0, 0.0, False),  # b beside the flat copy of c
        Moment(10.0, 3.0 + 4.0, 0.0, False),
        Moment(10.0, 3.0 + 4.0, 4.0, False),  # the part of c, before its flat copy is freed
        Moment(10.0, 3.0 + 3.0, 4.0, False),
        Moment(10.0, 3.0, 7.0, False),  # the flat copy of the last
    ]


def test_a_block_waits_for_its_turn_and_for_its_first_reader() -> None:
    """A tied parameter has its gradient from its last reader on to its first."""
    found = moments_of(
        [0.0, 0.0], [["tied"], ["tied", "own"]], {"tied": 8, "own": 1}, [["own"], ["tied"]]
    )
    assert max(each.moving_bytes for each in found) == 8 + 8
    assert found[0] == Moment(0.0, 9.0, 0.0, True)
    assert found[-1] == Moment(0.0, 8.0, 9.0, False)


moments = st.builds(
    Moment,
    st.integers(-20, 0).map(float),
    st.integers(-5, 30).map(float),
    st.integers(0, 30).map(float),
    st.booleans(),
)


@given(
    st.lists(moments, min_size=1, max_size=30),
    st.sampled_from([(0.25, 0.0), (1.0, 0.0), (0.0, 7.0)]),
)
def test_no_moment_that_is_left_out_is_the_largest(
    every: list[Moment], factors: tuple[float, float]
) -> None:
    """In the first backward parts come to be, in later ones a flat copy is left of the one before."""
    kept = largest_moments(every, [0.25, 1.0], left_bytes=7.0)
    assert set(kept) <= set(every)
    fraction, left = factors

    def largest(some: Iterable[Moment], samples: float) -> float:
        heights = []
        for each in some:
            height = each.moving_bytes + fraction * each.reduced_bytes + left * each.is_before
            heights.append(height + samples * each.sample_bytes)
        return max(heights)

    for samples in (0.0, 0.3, 1.0, 2.5, 7.0, 100.0):
        assert largest(kept, samples) == pytest.approx(largest(every, samples))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def made(batch_size: int, **config: object) -> Plan:
    options = {"strategy": "data", **config}
    return wh.plan(Layers(), torch.randn(batch_size, WIDTH), cluster=2, config=options)


def account_of(plan: Plan) -> Account:
    assert plan.figures is not None
    account = Account(plan.figures.on(0), (0,), 0)
    account.place_weights()
    account.place_optimizer(2.0)
    return account


def test_gradients_on_their_way_count_inside_of_the_backward_only() -> None:
    plan = made(2, zero=3)
    account = account_of(plan)
    before = account.used[BUFFERS]
    forward, backward = (
        next(each for each in plan.schedule.orders[0] if each.kind is kind)
        for kind in (Kind.FORWARD, Kind.BACKWARD)
    )
    account.start(forward, 1)
    account.end(forward, 1)
    assert account.used[BUFFERS] == account.peak[BUFFERS] == before
    account.start(backward, 1)
    # few samples: most is there where the first layer is reduced, and the parts of all others
    # are there, less the one gradient that the workspace counts
    own = 2 * LAYER_BYTES + 0.5 * (NUM_LAYERS - 1) * LAYER_BYTES - 4 * WIDTH * WIDTH
    freed = 4 * WIDTH * NUM_LAYERS  # of the one sample
    assert account.peak[BUFFERS] - before == pytest.approx(own - freed, rel=0.01)
    account.end(backward, 1, is_last=True)
    assert account.used[BUFFERS] - before == LAYER_BYTES  # the last flat copy
    assert account.used[GRADIENTS] == pytest.approx(0.5 * NUM_LAYERS * LAYER_BYTES)
    account.begin_update()
    assert account.used[BUFFERS] == before


def test_a_peak_of_activations_counts_no_gradients() -> None:
    """With many samples the fullest moment is the beginning of the backward."""
    moving = []
    for samples in (1, 4096):
        plan = made(2 * samples, zero=3)
        account = account_of(plan)
        before = account.used[BUFFERS]
        for action in plan.schedule.orders[0]:
            if action.is_compute:
                account.start(action, samples)
                account.end(action, samples, is_last=True)
        moving.append(account.peak[BUFFERS] - before)
    assert moving[0] > 2 * LAYER_BYTES > LAYER_BYTES + 4 * WIDTH >= moving[1]


def test_level_1_copies_a_block_in_front_of_the_update_on_cpu_ranks() -> None:
    plan = made(2, zero=1)
    assert plan.figures is not None and plan.figures.zero[0].block_bytes == LAYER_BYTES
    account = account_of(plan)
    before = account.used[BUFFERS]
    for action in plan.schedule.orders[0]:
        if action.is_compute:
            account.start(action, 1)
            account.end(action, 1, is_last=True)
            assert account.used[BUFFERS] == before
    whole = account.total
    account.begin_update()
    assert account.used[BUFFERS] == before
    assert sum(account.peak.values()) >= whole + LAYER_BYTES
    assert account.used[GRADIENTS] == pytest.approx(0.5 * NUM_LAYERS * LAYER_BYTES)
