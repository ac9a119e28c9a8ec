"""What a step under ZeRO launches and copies on CPU ranks, counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import whale as wh
from tests.exactness import mean_square
from tests.ranks import run_ranks
from whale.runtime.offloaded_states import can_fuse

WIDTH = 16


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, WIDTH, generator=generator)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def in_loops(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, foreach=False)


def launches(optimizer: Any, level: int) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Operations of the third step on this rank, and the weights afterwards."""
    wh.init({"zero": level})
    engine = wh.parallelize(build(), batch(0), optimizer=optimizer, loss=mean_square)
    engine.step(batch(0))
    engine.step(batch(1))
    with profile(activities=[ProfilerActivity.CPU]) as found:
        engine.step(batch(2))
    count = {each.key.removeprefix("aten::"): each.count for each in found.key_averages()}
    return count, engine.full_state_dict()


def test_parts_are_updated_in_one_launch() -> None:
    states = []
    for level in (1, 3):
        for count, state in run_ranks(launches, 2, adamw, level):
            assert count["_fused_adamw_"] == 1
            assert "lerp_" not in count  # of a loop over parameters
            assert "clone" not in count  # sums are made where they stay
            states.append(state)
    (count, expected), _ = run_ranks(launches, 2, in_loops, 1)
    assert "_fused_adamw_" not in count
    assert count["lerp_"] > 1  # the form that the user chose
    for state in (states[0], states[2]):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-7)


def copies_of_weights() -> tuple[int, int]:
    """Parameters that lie whole on this rank at level 3, and how many of these chunks do not compute
    with where they are.
    """
    wh.init({"zero": 3})
    engine = wh.parallelize(build(), batch(0), optimizer=adamw, loss=mean_square)
    engine.step(batch(0))
    zero = engine._job.zero
    assert zero is not None
    num_whole = num_copied = 0
    for name, own in zero.updated.items():
        used = zero.computing[name]
        if own.shape == used.shape:
            num_whole += 1
            num_copied += own.data_ptr() != used.data_ptr()
    return num_whole, num_copied


def test_what_a_rank_holds_whole_is_used_where_it_is() -> None:
    counts = run_ranks(copies_of_weights, 2)
    assert sum(num_whole for num_whole, _ in counts) >= 4
    assert not any(num_copied for _, num_copied in counts)


def weight(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    made = nn.Parameter(torch.ones(2, 3, 2, 2, dtype=dtype))
    made.grad = torch.ones_like(made)
    return made


def of_momentum(*parameters: nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
def test_other_dtypes_take_the_form_of_local_training(dtype: torch.dtype) -> None:
    assert not can_fuse(torch.optim.AdamW([weight(dtype)]))


def test_what_fused_kernels_would_take_for_something_else_is_not_fused() -> None:
    assert can_fuse(torch.optim.AdamW([weight()]))
    other_strides = nn.Parameter(weight().detach().to(memory_format=torch.channels_last))
    assert not can_fuse(torch.optim.AdamW([weight(), other_strides]))
    sparse = weight()
    assert sparse.grad is not None
    sparse.grad = sparse.grad.to_sparse()
    assert not can_fuse(torch.optim.SGD([sparse]))
    assert not can_fuse(torch.optim.NAdam([weight()]))
    first, second = weight(), weight()
    some = of_momentum(first, second)
    assert can_fuse(some)
    second.grad = None
    some.step()
    second.grad = torch.ones_like(second)
    assert not can_fuse(some)  # the kernel begins the momentum of all or of none
