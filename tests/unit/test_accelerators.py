"""What accelerators ask of the code around them, as far as it shows without one: device numbers,
and how much memory is free (issue 15, rows 1 and 8 to 10).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale as wh
from whale import api
from whale.capture.batch import read_batch
from whale.capture.clean import forget_device_indices
from whale.capture.graph import CapturedGraph
from whale.cluster.discovery import RESERVE, this_kind, with_least_memory
from whale.cluster.kinds import device_kind
from whale.compat import fake_mode
from whale.devices import CudaDevice, GpuProperties, find_device, float32_precision
from whale.lowering.weights import take_weights
from whale.planning.planner import fingerprint
from whale.runtime.start import one_precision


class Positions(nn.Module):
    """Makes a tensor on the device of its input, as every model with positions does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.table(x) + self.table(places)).square().mean()  # type: ignore[no-any-return]


def _captured() -> CapturedGraph:
    layout, tensors = read_batch(torch.zeros(4, 5, dtype=torch.int64))
    return api._prepare(Positions(), layout, tensors, None, wh.Config(), "cpu").captured


def test_devices_are_no_part_of_the_fingerprint() -> None:
    """Row 1: `cuda:1` is what local rank 1 puts into its graph."""
    captured = _captured()
    before = fingerprint(captured)
    (arange,) = [node for node in captured.graph.nodes if "arange" in str(node.target)]
    arange.kwargs = {**arange.kwargs, "device": torch.device("cuda", 1)}
    assert fingerprint(captured) == before
    forget_device_indices(captured.graph)
    assert arange.kwargs["device"] == torch.device("cuda")


def test_a_model_on_the_first_gpu_is_moved_to_that_of_the_rank() -> None:
    """Row 8: `model.cuda()` before `wh.init` puts the models of all ranks there."""
    model = nn.Module()
    with fake_mode():
        model.register_buffer("scale", torch.empty(3, device="cuda:0"))
        (held,) = take_weights(model, ["scale"], "cuda:1").values()
    assert held.device == torch.device("cuda:1")
    assert model.scale is held


GIB = 2**30


class Gpu(CudaDevice):
    """One of some number of GPUs that a process sees."""

    num_visible = 1

    @staticmethod
    def count() -> int:
        return Gpu.num_visible

    def free_memory_bytes(self) -> int:
        return 70 * GIB

    def reserved_memory_bytes(self) -> int:
        return 4 * GIB

    def gpu_properties(self) -> GpuProperties | None:
        return GpuProperties("NVIDIA A100-SXM4-80GB", 80 * GIB, (8, 0), 108)


@pytest.mark.parametrize(("num_visible", "local_rank", "index"), [(1, 3, 0), (4, 3, 3), (2, 3, 1)])
def test_the_index_counts_among_visible_devices(
    monkeypatch: pytest.MonkeyPatch, num_visible: int, local_rank: int, index: int
) -> None:
    """Row 9: a launcher may show each rank only its own GPU."""
    monkeypatch.setattr(Gpu, "num_visible", num_visible)
    monkeypatch.setattr("whale.devices.ACCELERATORS", [Gpu])
    assert find_device("auto", local_rank).name == f"cuda:{index}"


def test_capacity_is_free_memory_less_a_reserve() -> None:
    """Row 10: the context, communicators and other processes take theirs first."""
    kind = this_kind(Gpu(0))
    assert kind.name == device_kind("A100-80GB").name
    assert kind.memory_bytes == 74 * GIB - round(RESERVE * 80 * GIB)


def test_equal_gpus_stay_equal() -> None:
    """Row 10: the free memory of equal GPUs differs by some MiB, which makes no other kind."""
    a100 = device_kind("A100-80GB")
    sizes = [80 * GIB, 79 * GIB, 40 * GIB]
    kinds = [replace(a100, memory_bytes=size) for size in sizes]
    t4 = device_kind("T4")
    found = [kind.memory_bytes for kind in with_least_memory([*kinds, t4])]
    assert found == [79 * GIB, 79 * GIB, 40 * GIB, t4.memory_bytes]


# ---- streams of the device that is meant, whatever the current one of a thread is


class TwoGpus(CudaDevice):
    """The second of two GPUs, in a thread whose current device is the first."""

    module = SimpleNamespace(
        Stream=lambda device="cuda:0": f"side stream of {device}",
        current_stream=lambda device="cuda:0": SimpleNamespace(
            wait_event=lambda moment: waited.append((device, moment))
        ),
    )


waited: list[tuple[str, str]] = []


def test_streams_are_those_of_the_device() -> None:
    """A batch that a thread copied would have been waited for on another device's stream."""
    gpu = TwoGpus(1)
    assert gpu._stream("of this test") == "side stream of cuda:1"
    gpu.follow("arrived")
    assert waited == [("cuda:1", "arrived")]


# ---- TF32 by torch's newer names

TORCH = torch.backends
PRECISIONS = (
    TORCH,
    TORCH.cuda.matmul,
    TORCH.cudnn,
    TORCH.cudnn.conv,
    TORCH.cudnn.rnn,
)


@pytest.fixture
def tf32_for_all() -> Iterator[None]:
    """What torch's documentation advises since 2.9; its older function then raises."""
    before = [kind.fp32_precision for kind in PRECISIONS]
    for kind in PRECISIONS[1:]:
        kind.fp32_precision = "none"  # as the first one says
    TORCH.fp32_precision = "tf32"
    with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
        torch.get_float32_matmul_precision()
    yield
    for kind, value in zip(PRECISIONS, before, strict=True):
        kind.fp32_precision = value
    # the older names must agree with the newer ones: `torch.export` reads them
    torch.set_float32_matmul_precision("highest")
    TORCH.cudnn.allow_tf32 = True
    assert TORCH.cudnn.allow_tf32


class Alone:
    """A job of two ranks, as one of them sees it."""

    def __init__(self, have_tf32: tuple[bool, bool]) -> None:
        self.device = CudaDevice(0)
        self.have_tf32 = have_tf32

    def agree(self, what: str, value: Any, advice: str) -> None:
        assert value == "high"

    def gather(self, value: bool) -> list[bool]:
        return list(self.have_tf32)


@pytest.mark.usefixtures("tf32_for_all")
def test_tf32_by_the_newer_names_is_found() -> None:
    """Before: `wh.parallelize` raised an error of torch about legacy and new APIs."""
    assert float32_precision() == "high"


@pytest.mark.usefixtures("tf32_for_all")
def test_tf32_by_the_newer_names_is_forbidden_where_a_rank_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, convolutions would have stayed in TF32 on the ranks that have it."""
    monkeypatch.setattr(CudaDevice, "has_tf32", True)
    note = one_precision(Alone((True, False)))  # type: ignore[arg-type]
    assert note is not None and "without TF32: rank 1 has no TF32" in note
    assert {kind.fp32_precision for kind in PRECISIONS[3:]} == {"ieee"}
    assert TORCH.cuda.matmul.fp32_precision == "ieee"
    assert torch.get_float32_matmul_precision() == "highest"
    assert not TORCH.cudnn.allow_tf32


@pytest.mark.usefixtures("tf32_for_all")
def test_measuring_with_tf32_puts_the_setting_back() -> None:
    with CudaDevice(0).tf32(False):
        assert float32_precision() == "highest"
    assert float32_precision() == "high"
