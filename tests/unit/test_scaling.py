"""Loss scaling moves exactly as torch's own scaler does, and an overflow is skipped."""

from __future__ import annotations

import pytest
import torch

import whale as wh
from whale.runtime.loss_scale import DeviceLossScale, LossScale


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_scale_moves_like_torch(interval: int) -> None:
    """torch.amp.GradScaler on the CPU, fed finite and infinite gradients in turn, is the oracle."""
    pattern = [True, True, False, True, True, True, True, False, False, True, True, True]
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    oracle = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=interval)
    ours = LossScale(growth_interval=interval)
    on_device = DeviceLossScale("cpu", growth_interval=interval)
    for is_finite in pattern:
        assert ours.scale == oracle.get_scale()
        oracle.scale(parameter.sum())  # lets the scaler set itself up
        parameter.grad = torch.full((2,), 1.0 if is_finite else float("inf"))
        oracle.step(optimizer)
        oracle.update()
        ours.update(is_finite)
        on_device.update(torch.tensor(is_finite))
        assert on_device.state() == ours.state()
    assert ours.scale == oracle.get_scale()
    assert ours.num_skipped == pattern.count(False)


def test_state_comes_back() -> None:
    scale = LossScale()
    for is_finite in (True, False, True):
        scale.update(is_finite)
    other = LossScale()
    other.restore(scale.state())
    assert other == scale


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x).float() ** 2).mean()


def test_fp16_trains_and_skips_an_overflow() -> None:
    """Huge inputs overflow in half precision: the step is skipped, the scale halves, the weights
    stay.
    """
    torch.manual_seed(0)
    wh.init({"precision": "fp16"})
    model = Small()
    x = torch.randn(8, 4)
    engine = wh.parallelize(model, x, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    first = engine.step(x)
    assert not first.skipped
    with torch.autocast("cpu", torch.float16):
        assert abs(first.loss - Small.forward(_fresh(), x).item()) < 1e-3
    before = {name: tensor.clone() for name, tensor in engine.full_state_dict().items()}
    scale = engine._training.updater.loss_scale.scale
    result = engine.step(torch.full((8, 4), 100.0))
    assert result.skipped
    assert engine._training.updater.loss_scale.scale == scale / 2
    assert all(
        torch.equal(before[name], tensor) for name, tensor in engine.full_state_dict().items()
    )
    wh.init()


def _fresh() -> Small:
    torch.manual_seed(0)
    return Small()
