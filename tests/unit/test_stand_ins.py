"""What stands in for functions of torch during a capture computes the same."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale as wh
from whale.capture.errors import CaptureError
from whale.capture.fake_quantize import fake_quantize_per_channel, fake_quantize_per_tensor
from whale.capture.istft import istft

WAYS: list[dict[str, Any]] = [
    {
        "n_fft": n_fft,
        "hop_length": hop,
        "center": center,
        "normalized": normalized,
        "length": length,
    }
    for n_fft, hop, center, normalized, length in product(
        (15, 16), (None, 3), (True, False), (True, False), (None, 30, 70)
    )
]


@pytest.mark.filterwarnings("ignore:The length of signal is shorter")
@pytest.mark.parametrize("sides", ["one", "both", "complex"])
@pytest.mark.parametrize("num_dims", [2, 3])
def test_istft(sides: str, num_dims: int) -> None:
    torch.manual_seed(0)
    for way in WAYS:
        n_fft = way["n_fft"]
        num_frequencies = n_fft // 2 + 1 if sides == "one" else n_fft
        spectrum = torch.randn(2, num_frequencies, 11, dtype=torch.complex128)
        spectrum = spectrum if num_dims == 3 else spectrum[0]
        for size in (None, 12):
            options: dict[str, Any] = {**way, "win_length": size}
            options["return_complex"] = sides == "complex"
            options["window"] = torch.rand(size or n_fft, dtype=torch.float64) + 0.1
            try:
                expected = torch.istft(spectrum, **options)
            except RuntimeError as error:  # some places are in no window
                assert "window overlap add min" in str(error)
                assert istft(spectrum, **options).isnan().any()
                continue
            torch.testing.assert_close(istft(spectrum, **options), expected, rtol=0, atol=1e-13)


class UsesData(nn.Module):
    """Flows read their batch statistics with `.data`, and old code writes masks with it."""

    def __init__(self, use: Callable[[UsesData, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, dtype=torch.float64)
        self.register_buffer("seen", torch.ones(3, dtype=torch.float64))
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.use(self, self.layer(x))
        return (hidden - self.seen).square().mean()


def read_data(model: UsesData, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        model.seen.mul_(0.5).add_(hidden.mean(0).data)
    return hidden - hidden.data.square() * model.layer.weight.data.sum()


def test_data_is_read_as_what_detach_gives() -> None:
    torch.manual_seed(0)
    model = UsesData(read_data)
    local = deepcopy(model)
    optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
    x = torch.randn(4, 3, dtype=torch.float64)
    wh.init()
    engine = wh.parallelize(model, x, optimizer=lambda given: torch.optim.SGD(given, lr=0.1))
    for _ in range(2):
        optimizer.zero_grad()
        loss = local(x)
        loss.backward()
        optimizer.step()
        assert engine.step(x).loss == pytest.approx(loss.item(), rel=1e-12)
    for name, tensor in engine.full_state_dict().items():
        torch.testing.assert_close(tensor, local.state_dict()[name], rtol=0, atol=1e-12)


def write_to_a_weight(model: UsesData, hidden: Tensor) -> Tensor:
    model.layer.weight.data *= 0.5
    return hidden


def write_to_a_part_of_a_value(model: UsesData, hidden: Tensor) -> Tensor:
    hidden.data[:, 0] = 0.0
    return hidden


def write_to_a_buffer_that_a_gradient_needs(model: UsesData, hidden: Tensor) -> Tensor:
    hidden = hidden * model.seen
    model.seen.data.mul_(0.5)
    return hidden


def set_data(model: UsesData, hidden: Tensor) -> Tensor:
    model.layer.bias.data = model.layer.bias * 0.5
    return hidden


@pytest.mark.parametrize(
    "use",
    [
        write_to_a_weight,
        write_to_a_part_of_a_value,
        write_to_a_buffer_that_a_gradient_needs,
        set_data,
    ],
)
def test_a_write_to_data_is_refused(use: Callable[[UsesData, Tensor], Tensor]) -> None:
    """Autograd does not see it, and may need what was there before."""
    wh.init({"check_capture": False})
    x = torch.randn(4, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"(?s)test_stand_ins\.py:\d+.*`\.data`.*Try: `with torch"):
        wh.parallelize(UsesData(use), x, optimizer=torch.optim.SGD)


def result_and_gradient(function: Callable[..., Tensor], x: Tensor, *args: Any) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    result = function(leaf, *args)
    result.sum().backward()
    assert leaf.grad is not None
    return [result, leaf.grad]


@pytest.mark.parametrize("limits", [(-128, 127), (0, 255), (0, 15)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_fake_quantize(dtype: torch.dtype, limits: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = (5 * torch.randn(40, 6, dtype=torch.float64)).to(dtype)
    ways: list[tuple[Any, Any, tuple[Any, ...]]] = []
    whole = torch.fake_quantize_per_tensor_affine, fake_quantize_per_tensor
    for scale in (0.013, 1 / 3):
        ways.append((*whole, (scale, 7)))
        tensors = torch.tensor([scale]), torch.tensor([7], dtype=torch.int32)
        ways.append((*whole, tensors))
    channels = torch.fake_quantize_per_channel_affine, fake_quantize_per_channel
    for axis, number in enumerate(x.shape):
        for integer in (torch.int32, torch.float32):
            zero_points = torch.randint(0, 9, (number,)).to(integer)
            ways.append((*channels, (torch.rand(number) + 0.01, zero_points, axis)))
    for original, stand_in, args in ways:
        expected = result_and_gradient(original, x, *args, *limits)
        found = result_and_gradient(stand_in, x, *args, *limits)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


class OtherPathForExports(nn.Module):
    """As the masks of transformers: made where the model is exported, left out in training."""

    def __init__(self, asks: Callable[[], bool]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, dtype=torch.float64)
        self.asks = asks

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(7, dtype=x.dtype) if self.asks() else None
        hidden = self.layer(x)
        if mask is not None:
            hidden = hidden * mask
        return hidden.square().mean()


@pytest.mark.parametrize(
    "asks",
    [
        torch.compiler.is_exporting,
        torch.compiler.is_compiling,
        lambda: torch.compiler.is_compiling(),
        torch._dynamo.is_compiling,
    ],
    ids=["exporting", "compiling", "by its name", "old name"],
)
def test_path_for_exports_that_fails(asks: Callable[[], bool]) -> None:
    torch.manual_seed(0)
    model = OtherPathForExports(asks)
    local = deepcopy(model)
    x = torch.randn(4, 3, dtype=torch.float64)
    wh.init()
    engine = wh.parallelize(model, x, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = local(x)
        loss.backward()
        optimizer.step()
        assert engine.step(x).loss == pytest.approx(loss.item(), rel=1e-12)


class FailsOnBothPaths(OtherPathForExports):
    def forward(self, x: Tensor) -> Tensor:
        if not self.asks() and x.sum() > 0:
            x = -x
        return super().forward(x)


def test_both_paths_fail() -> None:
    """The message has the line of each path."""
    model = FailsOnBothPaths(torch.compiler.is_exporting)
    x = torch.randn(4, 3, dtype=torch.float64)
    with pytest.raises(CaptureError) as caught:
        wh.plan(model, x)
    first, second = str(caught.value).split("Tried again with `torch.compiler.is_exporting()`")
    assert "hidden = hidden * mask" in first
    assert "x.sum() > 0" in second


class MovesItself(nn.Module):
    """Old code brings its layers to the device and the dtype of what comes in."""

    def __init__(self, move: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)
        self.move = move

    def forward(self, x: Tensor) -> Tensor:
        self.move(self, x)
        return self.norm(self.layer(x)).square().sum()


@pytest.mark.parametrize(
    "move",
    [
        lambda model, x: model.to(x.device),
        lambda model, x: model.layer.to(x),
        lambda model, x: model.norm.to(x.device, x.dtype),
        lambda model, x: setattr(model, "layer", model.layer.to(x.dtype).cpu()),
    ],
    ids=["all", "like a tensor", "with buffers", "assigned"],
)
def test_module_that_stays_where_it_is(move: Callable[[nn.Module, Tensor], Any]) -> None:
    torch.manual_seed(0)
    model = MovesItself(move)
    local = deepcopy(model)
    x = torch.randn(4, 3, dtype=torch.float64)
    wh.init()
    engine = wh.parallelize(model, x, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = local(x)
        loss.backward()
        optimizer.step()
        assert engine.step(x).loss == pytest.approx(loss.item(), rel=1e-12)


def test_module_that_is_cast_in_forward() -> None:
    model = MovesItself(lambda model, x: model.layer.float())
    with pytest.raises(
        CaptureError, match=r"(?s)model.layer.float\(\).*from torch.float64 on cpu"
    ) as e:
        wh.plan(model, torch.randn(4, 3, dtype=torch.float64))
    assert "Try: cast the model before" in str(e.value)


class ManyWords(nn.Module):
    def __init__(self, num_unused: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 8, dtype=torch.float64)
        num_classes = 11 + num_unused
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(
            8, num_classes, [3, 5], div_value=2.0, head_bias=True, dtype=torch.float64
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        output, loss = self.loss(self.layer(x), y)
        return loss + output.square().mean()


@pytest.mark.parametrize("num_unused", [0, 4])
def test_adaptive_log_softmax(num_unused: int) -> None:
    """Every step has other numbers of rows in each cluster, once none."""
    torch.manual_seed(0)
    model = ManyWords(num_unused)
    local = deepcopy(model)
    steps = [
        torch.tensor(y) for y in ([0, 1, 3, 10, 4, 2], [5, 6, 5, 7, 9, 10], [0, 0, 1, 2, 3, 4])
    ]
    x = torch.randn(6, 3, dtype=torch.float64)
    wh.init({"num_micro_batch": 3})
    engine = wh.parallelize(model, (x, steps[0]), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
    for y in steps:
        optimizer.zero_grad()
        loss = local(x, y)
        loss.backward()
        optimizer.step()
        assert engine.step((x, y)).loss == pytest.approx(loss.item(), rel=1e-12)
    for name, tensor in engine.full_state_dict().items():
        torch.testing.assert_close(tensor, local.state_dict()[name], rtol=0, atol=1e-12)
