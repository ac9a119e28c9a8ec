"""Optimizer states in fewer bits between steps."""

from __future__ import annotations

import pytest
import torch

from whale.runtime.compressed_states import CompressedStates, Packed


def _steps(kind: str, reads: int) -> torch.Tensor:
    """A parameter after some steps, between which states are read so many times, as by a save."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(40, 30))
    optimizer = torch.optim.AdamW([parameter], lr=0.01)
    states = CompressedStates(optimizer, kind)
    for _ in range(6):
        parameter.grad = torch.randn(40, 30)
        states.step()
        for _ in range(reads):
            states.expand()
            assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape
            states.collapse()
            assert "exp_avg" not in optimizer.state[parameter]
    return parameter.detach()


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_reading_states_changes_nothing(kind: str) -> None:
    assert torch.equal(_steps(kind, 0), _steps(kind, 3))


def test_what_was_stored_gives_the_same_numbers() -> None:
    """Second averages are rounded up: twice is no further up than once, and none becomes zero."""
    state = torch.rand(5000) ** 6
    once = Packed.of(state)
    again = Packed.of(once.expanded())
    assert once.is_root and torch.equal(once.numbers, again.numbers)
    assert bool((once.expanded() > 0).all())


def test_parameters_without_a_gradient_keep_their_states() -> None:
    parameters = [torch.nn.Parameter(torch.randn(64, 8)) for _ in range(2)]
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    states = CompressedStates(optimizer, "int8")
    for parameter in parameters:
        parameter.grad = torch.randn(64, 8)
    states.step()
    before = states._held[parameters[1]]["exp_avg_sq"]
    parameters[1].grad = None
    states.step()
    assert states._held[parameters[1]]["exp_avg_sq"] is before
