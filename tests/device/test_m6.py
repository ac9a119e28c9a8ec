"""The main job on the test device (tests/device/m6.py): losses of CPU ranks, and a step that waits
for the device once.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.device.local_device import use_test_device
from tests.device.m6 import run_on_cpus, run_on_devices
from tests.ranks import ModelServer, preload

preload("tests.device.m6")
ROUNDING = 1e-4
"""of float32, over some steps with AdamW"""
MOST_WAITS = 2.0
"""a step, both for the step before: its loss and norm, and its times for the metrics"""
MOST_COMMUNICATORS = 5


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer(use_test_device) as found:
        yield found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_ranks", [1, 4, 8])
def test_m6_trains_as_on_cpus(server: ModelServer, num_ranks: int) -> None:
    """A rank has a communicator of all ranks, one of its stage's replicas, one for each direction
    to the other stage and one of the ranks that hold the tied table of words.
    """
    ranks = run_on_devices(server, num_ranks)
    expected = run_on_cpus(num_ranks)
    for cost in ranks:
        assert cost.losses == pytest.approx(expected, rel=ROUNDING)
        assert cost.host_waits <= MOST_WAITS, cost.waits_by_line
        assert cost.pageable_copies == 0
        assert cost.communicators <= MOST_COMMUNICATORS
