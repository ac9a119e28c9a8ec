"""Buffers and parameters that a forward writes: updates that are kept, and writes that are refused
with their line.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.unit.clean_graphs import SAMPLE, WEIGHTS, Case, Clean, case, compare

# --- state and inputs
# -------------------------------------------------------------------------------------------------------


def test_moving_average_of_a_buffer_and_a_counter() -> None:
    def function(m: Case, h: Tensor) -> Tensor:
        old = m.mean * 1
        with torch.no_grad():
            m.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
            m.count.add_(1)
        return h * m.mean + old + m.count * h

    clean = case(function)
    assert {clean.names[node.name] for node in clean.updates} == {"mean", "count"}


def test_part_of_a_buffer_written_in_no_grad_through_detach() -> None:
    def function(m: Case, h: Tensor) -> Tensor:
        with torch.no_grad():
            m.mean[1:3] = h[0, :2]
            m.mean.view(2, 3)[1].mul_(2)
        m.mean.detach()[0].add_(1)
        return h * m.mean

    case(function)


def test_value_with_gradient_written_through_detach_stays_off_the_base() -> None:
    def function(m: Case, h: Tensor) -> Tensor:
        cut = m.mean.detach()
        cut.mul_(m.scale)
        return h * cut + h.sin() * m.mean

    case(function)


def test_view_with_a_gradient_whose_data_changes_elsewhere_is_refused() -> None:
    def function(m: Case, h: Tensor) -> Tensor:
        cut = m.mean.detach()
        cut.mul_(m.scale)
        m.mean.add_(1)
        return h * cut

    with pytest.raises(ValueError, match=r"add_.*past that gradient"):
        Clean(Case(function), (SAMPLE,))


def test_gradient_written_to_a_buffer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"b_mean.*no_grad"):
        Clean(Case(lambda m, h: h * m.mean.add_(h.mean())), (SAMPLE,))


def test_buffer_under_two_names() -> None:
    class Tied(Case):
        def __init__(self) -> None:
            super().__init__(lambda m, h: h)
            self.register_buffer("alias", self.mean)

        def forward(self, x: Tensor) -> Tensor:
            self.mean.add_(1)
            return (self.linear(x) * self.alias * WEIGHTS).sum()

    clean = compare(Tied(), SAMPLE)
    assert {clean.names[node.name] for node in clean.updates} == {"mean", "alias"}


def test_input_of_the_batch_written() -> None:
    class WritesInput(Case):
        def forward(self, x: Tensor) -> Tensor:
            x.relu_()
            x[:, 0] = 1.0
            return (self.linear(x) * WEIGHTS).sum()

    compare(WritesInput(lambda m, h: h), SAMPLE)


def test_batch_norm_and_instance_norm_keep_their_own_updates() -> None:
    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(2, 3, 2)
            self.batch = nn.BatchNorm1d(3)
            self.instance = nn.InstanceNorm1d(3, affine=True, track_running_stats=True)
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            return (
                F.relu(self.instance(F.relu(self.batch(self.conv(x)), inplace=True)), inplace=True)
                .square()
                .sum()
            )

    clean = compare(Norms(), torch.randn(4, 2, 8, dtype=torch.float64))
    assert {clean.names[node.name] for node in clean.updates} == {"batch.num_batches_tracked"}
    assert "batch_norm" in clean.ops()


@pytest.mark.parametrize(
    "function",
    [
        lambda m, h: h * 2 + m.scale.detach().mul_(0.5).sum(),
        lambda m, h: h * m.scale.detach()[1:2].clamp_(0, 1),
    ],
)
def test_written_parameter_is_refused(function: Callable[..., Tensor]) -> None:
    with pytest.raises(ValueError, match=r"scale.*parameter"):
        Clean(Case(function), (SAMPLE,))


def test_parameter_written_in_no_grad_is_refused_with_its_line() -> None:
    def function(m: Case, h: Tensor) -> Tensor:
        with torch.no_grad():
            m.scale.mul_(0.5)
        return h * m.scale

    with pytest.raises(ValueError, match=r"`aten.mul_.Tensor`.*clean_graphs.py:\d+: .*p_scale"):
        Clean(Case(function), (SAMPLE,))


@pytest.mark.parametrize("block", ["no_grad", "detach"])
def test_tensor_with_gradient_changed_past_it_is_refused_when_used_again(block: str) -> None:
    def function(m: Case, h: Tensor) -> Tensor:
        h = h * 1
        if block == "no_grad":
            with torch.no_grad():
                h.mul_(2)
        else:
            h.detach().mul_(2)
        return h * m.scale

    with pytest.raises(ValueError, match=r"past that gradient.*clone it"):
        Clean(Case(function), (SAMPLE,))


def test_tensor_with_gradient_changed_past_it_and_not_used_again() -> None:
    case(lambda m, h: (h * 1).detach().mul_(2) + m.scale)


@pytest.mark.parametrize("name", ["expand", "unfold", "view.dtype"])
def test_view_that_cannot_be_written_back_is_refused(name: str) -> None:
    def function(m: Case, h: Tensor) -> Tensor:
        view = {
            "expand": lambda: m.mean.expand(3, 6)[:1],
            "unfold": lambda: m.mean.unfold(0, 2, 2),
            "view.dtype": lambda: m.mean.view(torch.int64),
        }[name]()
        return h + view.add_(1).sum()

    with pytest.raises(ValueError, match=rf"add_.*aten.{name}.*out-of-place"):
        Clean(Case(function), (SAMPLE,))
