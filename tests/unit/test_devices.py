"""The device interface: who asks it, and that nobody goes past it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

import whale as wh
from whale import devices
from whale.capture.clean import tied_names
from whale.devices import LocalDevice
from whale.lowering.weights import initialise_weights


class Counting(LocalDevice):
    """A CPU that counts how often random numbers were drawn apart."""

    num_forks = 0

    @contextlib.contextmanager
    def fork_random(self) -> Iterator[None]:
        Counting.num_forks += 1
        with super().fork_random():
            yield


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> type[Counting]:
    monkeypatch.setattr(devices, "ACCELERATORS", [Counting])
    monkeypatch.setattr(Counting, "num_forks", 0)
    return Counting


def test_weights_are_drawn_beside_the_random_numbers_of_the_device(
    counting: type[Counting],
) -> None:
    """`torch.manual_seed` reseeds every device; only the device itself can put its state back."""
    with torch.device("meta"):
        model = torch.nn.Linear(3, 2)
    names = tied_names(model)
    before = torch.get_rng_state()
    initialise_weights(model, names, names, None, 0, "cpu")
    assert counting.num_forks == 1
    assert torch.equal(torch.get_rng_state(), before)


def test_a_capture_is_checked_beside_the_random_numbers_of_the_device(
    counting: type[Counting],
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout(0.5))
    before = torch.get_rng_state()
    wh.parallelize(model, torch.ones(4, 3), loss=lambda output, batch: output.mean())
    assert counting.num_forks > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_a_device_that_is_not_there_is_refused() -> None:
    if devices.CudaDevice.count() == 0:
        with pytest.raises(ValueError, match='"device": "cuda" was asked for, but torch sees no'):
            devices.find_device("cuda")
    assert devices.find_device("cpu").name == "cpu"


def test_an_unknown_backend_is_trusted_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.dist, "get_backend", lambda group: "other")
    found = devices.backend_of(None)
    assert found == devices.Backend("other", False, False, False)
