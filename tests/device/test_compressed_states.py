"""Optimizer states in fewer bits, on the test device: nobody waits for what they hold."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from tests.device import streams
from tests.device.collectives import BACKEND
from tests.device.local_device import use_test_device
from tests.device.memory import NAME
from tests.device.streams import counters
from tests.ranks import ModelServer, preload
from whale.runtime.compressed_states import CompressedStates, Packed

preload("tests.device.test_compressed_states")
NUM_STEPS = 3


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    """Forks ranks that have the test device."""
    with ModelServer(use_test_device) as found:
        yield found


def _drawn(number: int) -> Tensor:
    return torch.randn(30, 20, generator=torch.Generator().manual_seed(number))


def _updates(_: None, kind: str) -> dict[str, int]:
    """Host waits of the updates of a parameter: its states are new, then brought back."""
    parameter = nn.Parameter(_drawn(0).to(NAME))
    states = CompressedStates(torch.optim.AdamW([parameter]), kind)
    waits: dict[str, int] = {}
    for step in range(NUM_STEPS):
        parameter.grad = _drawn(step).to(NAME)
        streams.synchronize()
        counters.clear()
        states.step()
        waits |= counters.host_waits
    return waits


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_no_wait_for_states_in_fewer_bits(server: ModelServer, kind: str) -> None:
    """Before, `int8` waited once for each state: are all its numbers at least zero?"""
    assert server.run(_updates, 1, kind, backend=BACKEND) == [{}]


def _packed(_: None, state: Tensor) -> tuple[bool, Tensor, Tensor]:
    packed = Packed.of(state.to(NAME))
    return bool(packed.is_root.cpu()), packed.numbers.cpu(), packed.expanded().cpu()


@pytest.mark.parametrize("is_root", [True, False])
def test_the_device_packs_like_the_cpu(server: ModelServer, is_root: bool) -> None:
    state = _drawn(7).square() if is_root else _drawn(7)
    ((found, numbers, expanded),) = server.run(_packed, 1, state, backend=BACKEND)
    reference = Packed.of(state)
    assert found is is_root
    assert torch.equal(numbers, reference.numbers)
    assert torch.equal(expanded, reference.expanded())
    largest = state.abs().max()
    torch.testing.assert_close(expanded, state, rtol=0.05, atol=0.05 * float(largest))
