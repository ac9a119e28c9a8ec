"""What `"check_replicas"` costs (issue 15): launches, host waits and collectives of a check."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale as wh
from tests.device import streams
from tests.device.collectives import BACKEND
from tests.device.local_device import use_test_device
from tests.device.streams import counters
from tests.ranks import ModelServer, preload

preload("tests.device.test_costs_of_checks")
WIDTH = 8
NUM_LAYERS = 3
NUM_PARAMETERS = 2 * NUM_LAYERS
LAUNCHES_OF_A_PARAMETER = 9
"""of a small one: bits as words, products with numbers of their positions, sums"""
LAUNCHES_OF_A_CHECK = 12
"""once for all: the numbers, the hashes of all holders and their all-reduce, the comparison"""


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    """Forks ranks that have the test device."""
    with ModelServer(use_test_device) as found:
        yield found


def _batch() -> Tensor:
    return torch.ones(4, WIDTH)


def _launches_of_steps(_: None, every: int) -> tuple[int, int, int]:
    """Launches, host waits and all-reduces of two steps, the first of which ends with a check where
    `every` says so; the second looks at it.
    """
    wh.init({"check_replicas": every, "check_batches": False, "on_nonfinite": "continue"})
    torch.manual_seed(0)
    engine: Any = wh.parallelize(
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))),
        _batch(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        loss=lambda output, batch: (output - batch).square().mean(),
    )
    engine.step(_batch())
    streams.synchronize()
    counters.clear()
    engine.step(_batch())
    engine.step(_batch())
    num_launches = sum(counters.launches.values())
    num_waits = sum(counters.host_waits.values())
    streams.synchronize()
    return num_launches, num_waits, counters.launches[f"{BACKEND} all_reduce"]


def test_what_a_check_of_replicas_costs(server: ModelServer) -> None:
    """One collective, one host wait for a check of the step before, and some launches for each
    parameter.
    """
    plain = server.run(_launches_of_steps, 2, 0, backend=BACKEND)
    checked = server.run(_launches_of_steps, 2, 2, backend=BACKEND)
    for without, with_check in zip(plain, checked, strict=True):
        launches = with_check[0] - without[0]
        most = LAUNCHES_OF_A_PARAMETER * NUM_PARAMETERS + LAUNCHES_OF_A_CHECK
        assert 0 < launches <= most, launches
        assert with_check[1] - without[1] <= 1
        assert with_check[2] - without[2] == 1
