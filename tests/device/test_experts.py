"""Products of tokens with their experts (issue 15, row 14): one launch and no wait, forward and
backward, with the numbers of a loop over the experts.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.device import streams
from tests.device.collectives import BACKEND
from tests.device.local_device import use_test_device
from tests.device.memory import NAME
from tests.device.streams import counters
from tests.ranks import ModelServer, preload
from whale.capture.expert_product import expert_mm, grouped_backward, grouped_forward
from whale.lowering.sharded_experts import Experts, grouped_mm_of_same_tokens
from whale.lowering.subgroups import Subgroup

preload("tests.device.test_experts")
NUM_ROWS = 50
NUM_EXPERTS = 6
INNER = 16
OUTER = 8
EXACT = {torch.float32: 1e-5, torch.bfloat16: 5e-2}
"""largest difference, as a part of the largest value"""


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    """Forks ranks that have the test device."""
    with ModelServer(use_test_device) as found:
        yield found


def _example(transposed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, numbers of experts (some not here, one without rows) and a gradient."""
    torch.manual_seed(3)
    x = torch.randn(NUM_ROWS, INNER, dtype=torch.float64)
    weight = torch.randn(NUM_EXPERTS, INNER, OUTER, dtype=torch.float64)
    experts = torch.randint(-2, NUM_EXPERTS + 2, (NUM_ROWS,))
    experts[experts == 3] = 4
    gradient = torch.randn(NUM_ROWS, OUTER, dtype=torch.float64)
    return x, weight.mT.contiguous() if transposed else weight, experts, gradient


def _by_row(transposed: bool) -> list[Tensor]:
    """Result and gradients of one product for each row, by autograd."""
    x, weight, experts, gradient = _example(transposed)
    x.requires_grad_()
    weight.requires_grad_()
    rows = []
    for row, expert in zip(x, experts.tolist(), strict=True):
        matrix = weight[expert % NUM_EXPERTS]
        product = row @ (matrix.T if transposed else matrix)
        rows.append(product if 0 <= expert < NUM_EXPERTS else product * 0)
    result = torch.stack(rows)
    result.backward(gradient)
    return [result.detach(), x.grad, weight.grad]  # type: ignore[list-item]


def _compare(found: list[Tensor], transposed: bool, exact: float) -> None:
    for one, other in zip(found, _by_row(transposed), strict=True):
        assert (one.double() - other).abs().max() <= exact * other.abs().max()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", EXACT)
def test_one_launch_gives_what_a_loop_gives(transposed: bool, dtype: torch.dtype) -> None:
    """The form of accelerators, with torch's kernel on the CPU."""
    x, weight, experts, gradient = _example(transposed)
    x = x.to(dtype)
    weight = weight.to(dtype)
    matrices = weight.mT if transposed else weight
    of_x, of_matrices = grouped_backward(x, matrices, experts, gradient.to(dtype))
    of_weight = of_matrices.mT if transposed else of_matrices
    result = grouped_forward(x, matrices, experts)
    _compare([result, of_x, of_weight], transposed, EXACT[dtype])


def test_the_cpu_has_a_loop_over_the_experts() -> None:
    x, weight, experts, gradient = _example(False)
    x.requires_grad_()
    weight.requires_grad_()
    result = expert_mm(x, weight, experts, False)
    result.backward(gradient)
    _compare([result.detach(), x.grad, weight.grad], False, 1e-12)  # type: ignore[list-item]


def _on_device(_: None, dtype: torch.dtype, transposed: bool) -> tuple[list[Tensor], int, int]:
    x, weight, experts, gradient = (each.to(NAME) for each in _example(transposed))
    x = x.to(dtype).requires_grad_()
    weight = weight.to(dtype).requires_grad_()
    gradient = gradient.to(dtype)
    streams.synchronize()
    counters.clear()
    result = expert_mm(x, weight, experts, transposed)
    result.backward(gradient)
    num_waits = sum(counters.host_waits.values())
    num_products = counters.launches["aten._grouped_mm.default"]
    found = [each.detach().cpu() for each in (result, x.grad, weight.grad)]
    return found, num_waits, num_products


@pytest.mark.parametrize("transposed", [False, True])
def test_no_wait_for_a_product(server: ModelServer, transposed: bool) -> None:
    """Row 14. Before: a wait in forward, one in backward, and a launch for each expert."""
    ((found, num_waits, num_products),) = server.run(
        _on_device, 1, torch.float32, transposed, backend=BACKEND
    )
    _compare(found, transposed, EXACT[torch.float32])
    assert num_waits == 0
    assert num_products == 3


def _sorted_rows(_: None) -> tuple[Tensor, int]:
    x, weight, _, _ = (each.to(NAME, torch.float32) for each in _example(False))
    ends = torch.tensor([10, 10, 25, 30, 40, 45], dtype=torch.int32).to(NAME)
    around = Experts(((0, NUM_EXPERTS),), Subgroup(1, 0, None), NUM_EXPERTS)
    streams.synchronize()
    counters.clear()
    found = grouped_mm_of_same_tokens(x, weight, ends, around)
    return found.cpu(), sum(counters.host_waits.values()) - 1


def test_rows_that_are_sorted_already(server: ModelServer) -> None:
    ((found, num_waits),) = server.run(_sorted_rows, 1, backend=BACKEND)
    x, weight, _, _ = _example(False)
    expected = torch.zeros(NUM_ROWS, OUTER, dtype=torch.float64)
    start = 0
    for expert, end in enumerate([10, 10, 25, 30, 40, 45]):
        expected[start:end] = x[start:end] @ weight[expert]
        start = end
    assert (found.double() - expected).abs().max() < 1e-5 * expected.abs().max()
    assert num_waits == 0
