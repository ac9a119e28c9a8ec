"""Algorithm 1 of the paper: hand-worked vectors, and Whale's own shares, which are never slower."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithm_1 import algorithm_1
from tests.thorough import many
from whale.cluster.cluster import device_kind
from whale.plans.shares import DoesNotFit, Load, best_shares


def formula_1(loads: tuple[float, ...], rates: list[float]) -> float:
    return sum(abs(load - rate / sum(rates)) for load, rate in zip(loads, rates, strict=True))


def test_figure_4_v100_and_t4_at_mini_batch_6() -> None:
    rates = [device_kind("V100-32GB").flop_per_s, device_kind("T4").flop_per_s]
    found = algorithm_1(rates, [32.0, 16.0], 1.0, 1.0)
    assert [round(6 * load) for load in found.load_ratios] == [4, 2] and not found.out_of_memory
    assert best_shares(6, [Load(1 / rate) for rate in rates]) == (4, 2)


def test_out_of_memory_the_literal_shift_overshoots() -> None:
    """DF = [15, 10], DM = [16, 32], TG_mem = 40: from [.6, .4] the largest shift is .4, the least
    that fits .2.
    """
    rates = [15.0, 10.0]
    literal = algorithm_1(rates, [16.0, 32.0], 1.0, 40.0)
    assert literal.load_ratios == pytest.approx((0.2, 0.8)) and not literal.out_of_memory
    assert formula_1(literal.load_ratios, rates) == pytest.approx(0.8)
    # 100 samples of 0.4 each: 40 fit on the first, 80 on the second
    ours = best_shares(100, [Load(1 / 15, most=40), Load(1 / 10, most=80)])
    assert ours == (40, 60)
    assert formula_1(tuple(share / 100 for share in ours), rates) == pytest.approx(0.4)


def test_infeasible_is_left_as_it_is_by_the_paper_and_refused_by_us() -> None:
    assert algorithm_1([1.0, 1.0], [16.0, 16.0], 1.0, 40.0).out_of_memory == (0, 1)
    with pytest.raises(DoesNotFit, match=r"10 samples are to be shared, but memory holds 4 \+ 4"):
        best_shares(10, [Load(1.0, most=4), Load(1.0, most=4)])


def test_a_valley_without_enough_memory_is_passed_over() -> None:
    """Three devices: the emptier valley cannot take what the peak must give, the other can."""
    found = algorithm_1([10.0, 5.0, 5.0], [10.0, 11.0, 30.0], 1.0, 40.0)
    assert found.out_of_memory == () and sum(found.load_ratios) == pytest.approx(1)
    assert all(
        load * 40 <= memory + 1e-9
        for load, memory in zip(found.load_ratios, [10.0, 11.0, 30.0], strict=True)
    )


@settings(max_examples=many(2000))
@given(
    devices=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=2, max_size=4),
    memory=st.integers(1, 60),
)
def test_ours_is_never_slower(devices: list[tuple[int, int]], memory: int) -> None:
    """Loads of the paper cut down to whole samples that fit: the slowest device is no faster than
    with our shares.
    """
    rates = [float(rate) for rate, _ in devices]
    capacities = [float(capacity) for _, capacity in devices]
    total = 60
    paper = algorithm_1(rates, capacities, 1.0, float(memory))
    assert sum(paper.load_ratios) == pytest.approx(1)
    most = [int(total * capacity / memory + 1e-9) for capacity in capacities]
    rounded = [int(load * total + 1e-9) for load in paper.load_ratios]
    for index in sorted(
        range(len(rounded)), key=lambda i: rounded[i] - paper.load_ratios[i] * total
    )[: total - sum(rounded)]:
        rounded[index] += 1
    if paper.out_of_memory or any(
        share > limit for share, limit in zip(rounded, most, strict=True)
    ):
        return
    ours = best_shares(
        total, [Load(1 / rate, most=limit) for rate, limit in zip(rates, most, strict=True)]
    )
    assert max(s / r for s, r in zip(ours, rates, strict=True)) <= max(
        s / r for s, r in zip(rounded, rates, strict=True)
    ) * (1 + 1e-12)
