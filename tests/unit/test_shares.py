"""Shares of samples: sums, evenness, and fair shares against trying everything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import many
from whale.plans.shares import (
    DoesNotFit,
    Load,
    best_shares,
    check_batch,
    even_shares,
    intervals,
    micro_batch_sizes,
    shares_of_series,
    slowest_times,
)


def fair_shares(total: int, seconds_per_sample: Sequence[float]) -> tuple[int, ...]:
    """Best shares of devices with memory for everything."""
    return best_shares(total, [Load(seconds) for seconds in seconds_per_sample])


def all_shares(total: int, count: int) -> Iterator[tuple[int, ...]]:
    if count == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in all_shares(total - first, count - 1):
            yield (first, *rest)


@given(total=st.integers(0, 500), count=st.integers(1, 40))
def test_even_shares(total: int, count: int) -> None:
    shares = even_shares(total, count)
    assert sum(shares) == total and len(shares) == count
    assert max(shares) - min(shares) <= 1
    assert list(shares) == sorted(shares, reverse=True)


def test_micro_batches_of_ten() -> None:
    assert micro_batch_sizes(10, 3) == (4, 3, 3)
    with pytest.raises(ValueError, match="batch size 3 in 4 micro-batches"):
        micro_batch_sizes(3, 4)


def test_paper_figure_4() -> None:
    # mini-batch 6 on a V100 (15.7 TFLOPS) and a T4 (8.1)
    assert fair_shares(6, [1 / 15.7, 1 / 8.1]) == (4, 2)


def test_ties_go_to_the_lower_index() -> None:
    assert fair_shares(5, [1.0, 1.0, 1.0]) == (2, 2, 1)
    assert fair_shares(2, [1.0, 2.0]) == (2, 0)  # both would finish at 2


@given(total=st.integers(0, 9), seconds=st.lists(st.floats(0.01, 10.0), min_size=1, max_size=4))
def test_fair_shares_equal_brute_force(total: int, seconds: list[float]) -> None:
    def slowest(shares: tuple[int, ...]) -> float:
        return max(share * second for share, second in zip(shares, seconds, strict=True))

    shares = fair_shares(total, seconds)
    assert sum(shares) == total and min(shares) >= 0
    assert slowest(shares) == min(slowest(other) for other in all_shares(total, len(seconds)))


def slowest_of(shares: tuple[int, ...], loads: list[Load]) -> float:
    """Line (2) of the module, from its definition."""
    return max(
        load.fixed_s + share * load.sample_s if share else 0.0
        for share, load in zip(shares, loads, strict=True)
    )


# small whole numbers: ties and full memories are frequent, and sums are exact
any_load = st.builds(
    Load, st.integers(0, 6).map(float), st.integers(0, 4).map(float), st.integers(0, 5)
)


@settings(max_examples=many(3000))
@given(
    total=st.integers(0, 9),
    loads=st.lists(any_load, min_size=1, max_size=4),
    least=st.integers(0, 1),
)
def test_best_shares_equal_brute_force_under_memory(
    total: int, loads: list[Load], least: int
) -> None:
    allowed = [
        shares
        for shares in all_shares(total, len(loads))
        if all(least <= share <= load.most for share, load in zip(shares, loads, strict=True))
    ]
    if not allowed:
        with pytest.raises(DoesNotFit, match=f"{total} samples"):
            best_shares(total, loads, least)
        assert total == 0 or slowest_times(total, loads, least)[total] == float("inf")
        return
    best = min(slowest_of(shares, loads) for shares in allowed)
    found = best_shares(total, loads, least)
    assert found in allowed
    assert slowest_of(found, loads) == best
    assert total == 0 or slowest_times(total, loads, least)[total] == best


any_replica = st.lists(st.lists(any_load, min_size=1, max_size=2), min_size=1, max_size=2)


@settings(max_examples=many(1000))
@given(total=st.integers(1, 7), replicas=st.lists(any_replica, min_size=1, max_size=3))
def test_shares_over_replicas_of_stages_equal_brute_force(
    total: int, replicas: list[list[list[Load]]]
) -> None:
    """A replica is a list of VirtualDevices: it takes as long as the slowest of them, each shared
    best inside.
    """
    series = [
        [max(slowest_times(total, device)[m] for device in devices) for m in range(total + 1)]
        for devices in replicas
    ]

    def seconds(devices: list[list[Load]], samples: int) -> float:
        slowest = 0.0
        for loads in devices:
            inner = [
                s
                for s in all_shares(samples, len(loads))
                if all(x <= load.most for x, load in zip(s, loads, strict=True))
            ]
            slowest = max(
                slowest, min((slowest_of(shares, loads) for shares in inner), default=float("inf"))
            )
        return slowest

    def slowest(shares: tuple[int, ...]) -> float:
        return max(seconds(devices, share) for devices, share in zip(replicas, shares, strict=True))

    best = min(slowest(shares) for shares in all_shares(total, len(replicas)))
    if best == float("inf"):
        with pytest.raises(DoesNotFit):
            shares_of_series(total, series)
        return
    found = shares_of_series(total, series)
    assert sum(found) == total
    assert slowest(found) == best


def test_a_slow_device_may_get_nothing() -> None:
    assert best_shares(8, [Load(1.0), Load(1.0), Load(100.0)]) == (4, 4, 0)
    assert best_shares(8, [Load(1.0), Load(1.0), Load(100.0)], least=1) == (4, 3, 1)
    assert best_shares(8, [Load(1.0, fixed_s=0.0), Load(1.0, fixed_s=50.0)]) == (
        8,
        0,
    )  # not even worth starting


@given(
    total=st.integers(0, 100), count=st.integers(1, 10), seconds=st.sampled_from([0.0, 0.5, 3.0])
)
def test_equal_devices_get_even_shares(total: int, count: int, seconds: float) -> None:
    assert fair_shares(total, [seconds] * count) == even_shares(total, count)


@pytest.mark.parametrize("seconds", [[], [1.0, -1.0], [float("nan")], [float("inf"), 1.0]])
def test_bad_times_are_refused(seconds: list[float]) -> None:
    with pytest.raises(ValueError, match=r"device"):
        fair_shares(4, seconds)


def test_intervals() -> None:
    assert intervals((4, 0, 3)) == ((0, 4), (4, 4), (4, 7))


@given(
    batch_size=st.integers(1, 60),
    num_micro_batch=st.integers(1, 12),
    num_replicas=st.integers(1, 4),
    num_devices=st.integers(1, 4),
)
def test_check_batch_is_right(
    batch_size: int, num_micro_batch: int, num_replicas: int, num_devices: int
) -> None:
    """Refused exactly when some device gets no sample; the micro-batch is cut over replicas, then
    over devices.
    """
    shares = [
        share
        for size in even_shares(batch_size, num_micro_batch)
        for part in even_shares(size, num_replicas)
        for share in even_shares(part, num_devices)
    ]
    if min(shares) > 0:
        check_batch(batch_size, num_micro_batch, num_replicas * num_devices)
    else:
        with pytest.raises(
            ValueError,
            match=f"(batch size|mini-batch of) {batch_size} .*Try: a batch of at least",
        ):
            check_batch(batch_size, num_micro_batch, num_replicas * num_devices)


def test_check_batch_offers_what_works() -> None:
    with pytest.raises(
        ValueError,
        match=r"over 3 devices, .* Try: a batch of at least 12, or num_micro_batch of at most 2, or "
        r'fewer devices, or pipeline stages, which do not cut it \(`"num_task_graph"`\)$',
    ):
        check_batch(8, 4, 3)
    check_batch(12, 4, 3)
    check_batch(8, 2, 3)
    with pytest.raises(
        ValueError,
        match=r"^a mini-batch of 2 samples cannot be cut over 3 devices, each needs one\. Try: a "
        r"batch of at least 3, or fewer devices, or ",
    ):
        check_batch(2, 1, 3)
