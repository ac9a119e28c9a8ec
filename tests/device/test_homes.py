"""Weights and gradients whose home is the host, on the test device: how they come and go."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import whale as wh
from tests.device import streams
from tests.device.collectives import BACKEND
from tests.device.local_device import use_test_device
from tests.device.memory import NAME
from tests.ranks import ModelServer, preload
from whale.distributed.intervals import Intervals
from whale.distributed.ranks import Ranks
from whale.runtime.homes import HostHome
from whale.runtime.zero import _Peers

preload("tests.device.test_homes")
NUM_ELEMENTS = 4
"""of each rank's interval"""
PATIENCE_S = 10.0
"""for a kernel that nothing holds up"""


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    """Forks ranks that have the test device."""
    with ModelServer(use_test_device) as found:
        yield found


def _is_over_soon(moment: Any) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if moment.query():
            return True
        time.sleep(0.01)
    return False


def _gather_behind_a_slow_copy(_: None) -> tuple[bool, list[float]]:
    """Whether compute runs while the copy of a block from the host has not even begun, and the
    block as all ranks have it then.
    """
    ranks = Ranks()
    device = ranks.device
    group = (0, 1)
    ranks.group(group)
    home = HostHome(device)
    place = home.place(0, NUM_ELEMENTS * 4)
    part = place.view(torch.float32)
    part.fill_(ranks.rank + 1.0)
    start = ranks.rank * NUM_ELEMENTS
    block: Any = SimpleNamespace(
        ranks=group,
        ends=(NUM_ELEMENTS, 2 * NUM_ELEMENTS),
        interval=lambda rank: (start, start + NUM_ELEMENTS),
    )
    peers = _Peers((block,), [part], [home], ranks.rank, Intervals(ranks, None))
    buffer = torch.zeros(2 * NUM_ELEMENTS, device=NAME)
    gate = threading.Event()
    device._stream("incoming blocks").put("a copy that has to wait", gate.wait)  # type: ignore[attr-defined]
    transfer = peers.begin_fetch(0, buffer)
    x = torch.ones(3, device=NAME) + 1
    computes = _is_over_soon(device.event())
    gate.set()
    transfer.wait()
    found = (buffer + 0 * x.sum()).cpu().tolist()
    streams.synchronize()
    return computes, found


def test_compute_does_not_wait_for_the_copy_of_a_block_that_is_gathered(
    server: ModelServer,
) -> None:
    """Before, the gather followed the copy on the compute stream, and so did all compute."""
    expected = [1.0] * NUM_ELEMENTS + [2.0] * NUM_ELEMENTS
    for computes, found in server.run(_gather_behind_a_slow_copy, 2, backend=BACKEND):
        assert computes
        assert found == expected


AT_HOME = {"weights": "host", "optimizer": "host", "gradients": "host"}
NUM_MICRO_BATCHES = 2


def _backward_beside_a_copy(_: None) -> list[bool]:
    """Whether the host has launched all backwards of a step of which the device has done nothing:
    gradients of the first micro-batch are on their way to the host then.
    """
    torch.manual_seed(0)
    wh.init({"offload": AT_HOME, "num_micro_batch": NUM_MICRO_BATCHES, "check_replicas": 0})
    batch = torch.randn(4, 3)
    engine = wh.parallelize(
        nn.Linear(3, 3),
        batch,
        optimizer=torch.optim.AdamW,
        loss=lambda output, target: (output - target).square().mean(),
    )
    engine.step(batch)
    streams.synchronize()
    zero = engine._job.zero
    assert zero is not None and len(zero.blocks) == 1
    assert {each.device.type for each in zero.updated.values()} == {"cpu"}
    launched = threading.Event()
    left = NUM_MICRO_BATCHES * len(zero.computing)

    def note(_: torch.Tensor) -> None:
        """Runs behind the hook of the block."""
        nonlocal left
        left -= 1
        if not left:
            launched.set()

    for parameter in zero.computing.values():
        parameter.register_post_accumulate_grad_hook(note)
    is_launched: list[bool] = []
    streams.current_stream().put("held", lambda: is_launched.append(launched.wait(PATIENCE_S)))
    assert engine.step(batch).loss > 0
    return is_launched


def test_the_host_does_not_wait_for_gradients_on_their_way_home(server: ModelServer) -> None:
    """Before, each micro-batch waited for the gradients of the one before it, block by block."""
    assert server.run(_backward_beside_a_copy, 1, backend=BACKEND) == [[True]]
