"""The plan says where gradients are summed over devices in 16 bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import whale as wh


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


@pytest.mark.parametrize(
    ("dtype", "num_devices", "is_said"),
    [(torch.bfloat16, 2, True), (torch.bfloat16, 1, False), (torch.float32, 2, False)],
)
def test_sums_in_16_bits_are_said(dtype: torch.dtype, num_devices: int, is_said: bool) -> None:
    plan = wh.plan(Net().to(dtype), torch.randn(8, 4, dtype=dtype), cluster=num_devices)
    found = [note for note in plan.notes if "summed over devices in 16 bits" in note]
    assert len(found) == is_said
    if is_said:
        assert found[0].startswith("gradients of 2 parameters in 16 bits")
