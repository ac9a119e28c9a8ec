"""What was found wrong on accelerators by reading (issue 15, part 3), each as a test that failed
before it was mended. The row of the issue's table stands in each test.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import Graph

import whale as wh
from tests.device import streams
from tests.device.collectives import BACKEND
from tests.device.local_device import TESTCCL, TestGpu, use_test_device
from tests.device.memory import NAME
from tests.device.settings import settings
from tests.device.streams import counters
from tests.integration.training import prepare_subject
from tests.ranks import ModelServer, RankError, preload, run_ranks
from whale import api
from whale.calibration import measure
from whale.capture.batch import read_batch
from whale.distributed.ranks import Ranks
from whale.distributed.transport import Transport
from whale.lowering import program
from whale.lowering.communication import RealCommunication
from whale.lowering.subgroups import GridGroups
from whale.planning.planner import fingerprint
from whale.plans.grid import Grid
from whale.plans.layout import Cut, whole
from whale.sharding.emit import Special

preload("tests.integration.training", "tests.device.test_found")
WIDTH = 512
"""a layer has more weights than a GPU has threads"""
BATCH_SIZE = 512


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    """Forks ranks that have the test device."""
    with ModelServer(use_test_device) as found:
        yield found


def _batch(step: int = 0) -> Tensor:
    return torch.randn(BATCH_SIZE, WIDTH, generator=torch.Generator().manual_seed(step))


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _loss(output: Tensor, batch: Tensor) -> Tensor:
    return (output - batch).square().mean()


# ---- row 1: devices in captured graphs


class Positions(nn.Module):
    """Makes a tensor on the device of its input, as GPT-2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)

    def forward(self, words: Tensor) -> Tensor:
        places = torch.arange(words.shape[1], device=words.device)
        loss: Tensor = (self.table(words) + self.table(places)).square().mean()
        return loss


def _fingerprints(name: str) -> tuple[str, str]:
    """The hashes of a model captured for the CPU and for the test device."""
    use_test_device()
    found = []
    for device in ("cpu", NAME):
        if name == "positions":
            layout, tensors = read_batch(torch.zeros(4, 5, dtype=torch.int64))
            config = wh.Config()
            prepared = api._prepare(Positions(), layout, tensors, None, config, device, False)
        else:
            prepared = prepare_subject(name, device, check=False).prepared
        assert prepared is not None
        found.append(fingerprint(prepared.captured))
    return found[0], found[1]


@pytest.mark.parametrize("name", ["positions", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_a_plan_made_on_the_cpu_fits_on_the_device(name: str) -> None:
    """Row 1: GPT-2 makes its positions on the device of its input."""
    ((on_cpu, on_device),) = run_ranks(_fingerprints, 1, name)
    assert on_cpu == on_device


# ---- row 3: random numbers of different GPUs


def _large() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def _weights_of_different_gpus(_: None) -> dict[str, Tensor]:
    """This rank's weights after two steps; the ranks have different GPUs."""
    settings.num_multiprocessors = (80, 68)[dist.get_rank()]
    wh.init({"check_replicas": 0})
    engine = wh.parallelize(_large, _batch(), optimizer=_sgd, loss=_loss)
    for step in range(2):
        engine.step(_batch(step))
    return {name: tensor.detach().cpu() for name, tensor in engine.named_parameters()}


def test_initial_weights_do_not_depend_on_the_gpu(server: ModelServer) -> None:
    """Row 3."""
    first, second = server.run(_weights_of_different_gpus, 2, backend=BACKEND)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def _dropout_of_a_whole_tensor(_: None) -> tuple[Tensor, Tensor]:
    """Dropout on a grid of two different GPUs that both have the whole tensor, and its gradient."""
    settings.num_multiprocessors = (80, 68)[dist.get_rank()]
    ranks = Ranks()
    grid = Grid(1, 2, 1)
    layout = whole([Cut(WIDTH), Cut(WIDTH)])
    graph = Graph()
    node = graph.call_function(torch.ops.aten.dropout.default, (graph.placeholder("x"), 0.5, True))
    for each in graph.nodes:
        each.meta["val"] = torch.empty(WIDTH, WIDTH, device="meta")
    special = Special("random", node, (), (layout,), (layout,), 0)
    draws_alike = len(set(ranks.generators)) == 1
    groups = GridGroups(grid, ranks.rank, {}, {})
    run = RealCommunication(groups, TESTCCL, draws_alike).operation(special)
    x = torch.ones(WIDTH, WIDTH, device=NAME, requires_grad=True)
    torch.manual_seed(3)  # the seed of the chunk
    result = run(x)
    result.sum().backward()
    assert x.grad is not None
    return result.detach().cpu(), x.grad.cpu()


def test_dropout_of_holders_that_must_agree_does_not_depend_on_the_gpu(
    server: ModelServer,
) -> None:
    """Row 3."""
    (first, gradient), (second, _) = server.run(_dropout_of_a_whole_tensor, 2, backend=BACKEND)
    assert torch.equal(first, second)
    assert torch.equal(first, gradient)
    assert set(first.unique().tolist()) == {0.0, 2.0}
    assert float(first.mean()) == pytest.approx(1.0, abs=0.02)


def _draw_on_the_gpu(module: nn.Module, name: str) -> None:
    """A user's `init=` that draws on the device."""
    if isinstance(module, nn.Linear):
        module.weight.copy_(torch.rand(WIDTH, WIDTH, device=NAME))
        module.bias.zero_()


def _checked(_: None, multiprocessors: tuple[int, int], num_steps: int) -> tuple[int, int]:
    """Trains with a check after every step; number of times that the host waited for it, and number
    of copies from pageable memory.
    """
    settings.num_multiprocessors = multiprocessors[dist.get_rank()]
    wh.init({"check_replicas": 1, "check_batches": False})
    engine = wh.parallelize(_large, _batch(), optimizer=_sgd, loss=_loss, init=_draw_on_the_gpu)
    before = sum(number for line, number in counters.host_waits.items() if "replicas.py" in line)
    num_pageable = counters.pageable_copies
    for step in range(num_steps):
        engine.step(_batch(step))
    streams.synchronize()
    waits = sum(number for line, number in counters.host_waits.items() if "replicas.py" in line)
    return waits - before, counters.pageable_copies - num_pageable


def test_replicas_that_differ_are_found_at_the_start(server: ModelServer) -> None:
    """Row 3: an initialisation of the user's own that draws on different GPUs."""
    with pytest.raises(
        RankError, match=r"before the first step, weights .* differ: (0|2)\.weight on rank 1 by"
    ):
        server.run(_checked, 2, (80, 68), 1, backend=BACKEND)


def test_a_check_of_replicas_waits_once(server: ModelServer) -> None:
    """Row 3: for the check of the step before, whatever the number of parameters, and for no copy
    from pageable memory.
    """
    assert server.run(_checked, 2, (80, 80), 4, backend=BACKEND) == [(3, 0), (3, 0)]


# ---- row 4: kernels that are not loaded yet

COLD_S = 0.3
SIZES = (4, 8, 16)


def _measured_products(_: None) -> list[int]:
    """Sizes of products that are measured where loading a kernel takes longer than any of them."""
    settings.cold_s = COLD_S
    measure.SIZES[True] = SIZES
    measure.MEASURED_DTYPES[True] = ("fp32",)
    return [size for _, size in measure._products(Ranks())]


def test_loading_kernels_is_no_part_of_a_measurement(server: ModelServer) -> None:
    """Row 4: the first product took as long as loading it, so that larger ones, by which a device is
    judged, were left out as too slow.
    """
    (found,) = server.run(_measured_products, 1, backend=BACKEND)
    assert tuple(found) == SIZES


# ---- row 11: edges outside the plan


def _message_of_another_edge(_: None) -> tuple[float, float]:
    """A message from rank 0 to rank 2, which the plan has no edge for, beside a collective of all
    ranks that they call in different orders: (the message's value, the sum of the collective).
    """
    ranks = Ranks()
    transport = Transport(ranks, {(0, 1)})
    transport.connect({(0, 2)})
    transport.begin()
    total = torch.ones(2, device=NAME)
    value = torch.full((3,), 7.0 if ranks.rank == 0 else 0.0, device=NAME)
    if ranks.rank == 0:
        transport._issue(value, 2, 0)
    work = dist.all_reduce(total, async_op=True)
    assert work is not None
    if ranks.rank == 2:
        group, place = transport._from[0]
        group.recv([value], place, 0).wait()
    work.wait()
    transport.drain()
    streams.synchronize()
    return value.sum().item(), total.sum().item()


def test_edges_outside_the_plan_have_channels_of_their_own(server: ModelServer) -> None:
    """Row 11: in the group of all ranks the message would meet their collective."""
    found = server.run(_message_of_another_edge, 3, backend=BACKEND, timeout_s=20)
    assert found == [(21.0, 6.0), (0.0, 6.0), (21.0, 6.0)]


# ---- row "low": one precision for all ranks


def _with_precision(
    _: None, precisions: tuple[str, str], have_tf32: tuple[bool, bool]
) -> tuple[str, list[str]]:
    """The precision that the job has, and what its plan notes."""
    rank = dist.get_rank()
    torch.set_float32_matmul_precision(precisions[rank])
    TestGpu.has_tf32 = have_tf32[rank]  # type: ignore[method-assign, assignment]
    wh.init()
    engine = wh.parallelize(_large, _batch(), optimizer=_sgd, loss=_loss)
    notes = [note for note in engine.plan.notes if "float32" in note]
    return torch.get_float32_matmul_precision(), notes


def test_different_precisions_are_refused_by_name(server: ModelServer) -> None:
    with pytest.raises(
        RankError, match=r"precision\(\) differs .* rank 0 has 'highest', rank 1 has 'high'"
    ):
        server.run(_with_precision, 2, ("highest", "high"), (True, True), backend=BACKEND)


def test_generations_with_and_without_tf32_compute_alike(server: ModelServer) -> None:
    for precision, notes in server.run(
        _with_precision, 2, ("high", "high"), (True, False), backend=BACKEND
    ):
        assert precision == "highest"
        assert notes == [
            'float32 products have precision "highest" on all devices, without TF32: rank 1 has no '
            "TF32"
        ]


def test_the_plan_says_which_precision(server: ModelServer) -> None:
    for _, notes in server.run(_with_precision, 2, ("high", "high"), (True, True), backend=BACKEND):
        assert notes == ['float32 products have precision "high" on all devices, as torch is set']


# ---- who draws alike


def _draws(_: None, multiprocessors: tuple[int, ...]) -> list[bool]:
    """What lowering finds about the devices of this rank's grid: whether they draw alike."""
    settings.num_multiprocessors = multiprocessors[dist.get_rank()]
    found: list[bool] = []
    made = program.RealCommunication

    def note(*args: Any, draws_alike: bool, **others: Any) -> RealCommunication:
        found.append(draws_alike)
        return made(*args, draws_alike=draws_alike, **others)

    program.RealCommunication = note  # type: ignore[assignment, misc]
    wh.init({"check_replicas": 0})
    model = _large()
    wh.annotate(model, {"*": wh.split(2)})
    wh.parallelize(model, _batch(), optimizer=_sgd, loss=_loss)
    return found


@pytest.mark.parametrize(
    ("multiprocessors", "draw_alike"),
    [((80, 80), True), ((80, 68), False), ((80, 80, 68, 68), True)],
    ids=["same GPUs", "different GPUs", "different replicas"],
)
def test_lowering_knows_who_draws_alike(
    server: ModelServer, multiprocessors: tuple[int, ...], draw_alike: bool
) -> None:
    """Row 3: devices of one grid have to, those of other replicas do not."""
    ranks = server.run(_draws, len(multiprocessors), multiprocessors, backend=BACKEND)
    for found in ranks:
        assert found and set(found) == {draw_alike}
