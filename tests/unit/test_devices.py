"""The device interface: who asks it, and that nobody goes past it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

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
    monkeypatch.setattr("torch.distributed.get_backend", lambda group: "other")
    found = devices.backend_of(None)
    assert found == devices.Backend("other", False, False, False)


def test_no_other_file_names_a_vendor() -> None:
    """Comments count: what is true of one vendor only belongs behind the interface."""
    package = Path(wh.__file__).parent
    folders = [package, package.parent / "examples", package.parent / "models"]
    named = re.compile("cuda|nccl|rocm|rccl|hip|xpu|xccl", re.IGNORECASE)
    # words of ours in which one of these stands
    innocent = re.compile("ship|chip|hipblas|relationship", re.IGNORECASE)
    found = []
    for file in sorted(file for folder in folders for file in folder.rglob("*.py")):
        if file.is_relative_to(package / "devices"):
            continue
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if named.search(innocent.sub("", line)):
                found.append(f"{file.relative_to(package.parent)}:{number}: {line.strip()}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("hip", "kind"), [(None, devices.CudaDevice), ("6.4", devices.RocmDevice)])
def test_one_name_of_torch_stands_for_two_vendors(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, kind: type[LocalDevice]
) -> None:
    """`torch.cuda` is AMD's where torch was built for it."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = devices.find_device("auto", 3)
    assert type(found) is kind
    assert found.name == "cuda:1"
    assert type(devices.device_of(torch.device("cuda:1"))) is kind
    assert devices.num_accelerators() == 2


def test_hardware_queues_by_vendor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("GPU_MAX_HW_QUEUES", "2")
    assert devices.CudaDevice(0).num_queues == 1
    assert devices.RocmDevice(0).num_queues == 2
    assert devices.XpuDevice(0).num_queues is None
