"""Messages of every type, and the end of a rank that failed with a receive under way (issue 15,
the row of low findings).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import whale as wh
from tests.device import streams
from tests.device.collectives import BACKEND, FLUSH_S
from tests.device.local_device import use_test_device
from tests.device.memory import NAME
from tests.ranks import ModelServer, preload
from whale.distributed.message import Message
from whale.distributed.ranks import Ranks
from whale.distributed.transport import Transport

preload("tests.device.test_messages")
TYPES = (torch.int16, torch.complex64, torch.float32, torch.bool)


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    """Forks ranks that have the test device."""
    with ModelServer(use_test_device) as found:
        yield found


def _values(dtype: torch.dtype) -> Tensor:
    return torch.arange(6).to(torch.float32).to(dtype).view(2, 3)


def _send_all_types(_: None) -> list[Tensor]:
    """Tensors of all types from rank 0 to rank 1."""
    ranks = Ranks()
    transport = Transport(ranks, {(0, 1)})
    transport.begin()
    received = []
    for number, dtype in enumerate(TYPES):
        values = _values(dtype)
        if ranks.rank == 0:
            transport._issue(values.to(NAME), 1, number)
        else:
            buffer = torch.zeros(values.shape, dtype=torch.uint8).to(dtype).to(NAME)
            message = Message(0, number, ())
            arrival = transport.post(buffer, message, "a message")
            transport.wait(arrival)
            received.append(buffer)
    transport.drain()
    streams.synchronize()
    return [each.cpu() for each in received]


def test_messages_of_every_type(server: ModelServer) -> None:
    """Before, int16 was refused by the backend: "unsupported data type"."""
    _, received = server.run(_send_all_types, 2, backend=BACKEND)
    for dtype, found in zip(TYPES, received, strict=True):
        assert found.dtype == dtype
        assert torch.equal(found.view(torch.uint8), _values(dtype).view(torch.uint8))


class WithBuffer(torch.nn.Module):
    """Its last stage has a buffer of int16."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.last = torch.nn.Linear(4, 4)
        self.last.register_buffer("counts", torch.arange(5, dtype=torch.int16))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)).square().mean() + 0.0 * self.last.counts.sum()


def _whole_state(_: None) -> dict[str, Tensor]:
    wh.init({"num_micro_batch": 1})
    torch.manual_seed(0)
    model = WithBuffer()
    wh.annotate(model, {"first": wh.replicate(1), "last": wh.replicate(1)})
    batch = torch.ones(4, 4)
    engine = wh.parallelize(model, batch, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    engine.step(batch)
    return engine.full_state_dict()


def test_a_state_of_every_type_comes_to_rank_0(server: ModelServer) -> None:
    state, _ = server.run(_whole_state, 2, backend=BACKEND)
    assert torch.equal(state["last.counts"], torch.arange(5, dtype=torch.int16))


FAILING = """
import sys, time
import torch, torch.distributed as dist
from tests.device.local_device import use_test_device
use_test_device()
from whale.distributed.ranks import Ranks
ranks = Ranks()
torch.zeros(1, device="testgpu")
ranks.group([0, 1])
if ranks.rank == 1:
    time.sleep(60)
work = dist.irecv(torch.zeros(3, device="testgpu"), 1)
raise RuntimeError("this rank fails")
"""


def test_a_rank_that_failed_does_not_wait_for_its_receives(tmp_path: Path) -> None:
    """Before, its end waited for a message that never comes."""
    environment = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OMP_NUM_THREADS": "1",
    }
    ranks = []
    for rank in range(2):
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", FAILING],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        lines = []
        assert ranks[0].stderr is not None
        for line in ranks[0].stderr:
            lines.append(line)
            if "this rank fails" in line and "raise" not in line:
                break
        failed_at = time.monotonic()
        assert ranks[0].wait(FLUSH_S) == 1, "".join(lines)
        assert time.monotonic() - failed_at < FLUSH_S / 2
    finally:
        for rank in ranks:
            rank.kill()


def _free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
