"""What stands in for functions of torch during a capture computes the same."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

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
