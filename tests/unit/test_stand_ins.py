"""What stands in for functions of torch during a capture computes the same."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

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
