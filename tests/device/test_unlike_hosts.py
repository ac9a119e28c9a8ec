"""Jobs over hosts that differ: GPUs with other multiprocessor counts, one visible GPU a rank, two
hosts, models that were put on a device too early. They train exactly or are refused by name
(`test_found.py` has those that are refused: different precisions).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import whale as wh
from tests.device import streams
from tests.device.collectives import BACKEND
from tests.device.local_device import use_test_device
from tests.device.memory import NAME
from tests.device.settings import settings
from tests.device.training import DeviceTrace, prepare_on_device, train_on_device
from tests.exactness import Trace, compare, local_training
from tests.integration import layers, test_evaluation
from tests.integration.table import PlanCase
from tests.integration.training import Subject, merge, train_locally
from tests.ranks import ModelServer, preload
from tests.zoo import CASES
from whale.session import ranks_of_job

preload("tests.integration.training", "tests.device.training", "tests.device.test_unlike_hosts")

MODEL = "chain"
MULTIPROCESSORS = (80, 68, 108, 80)
RANKS_OF_HOST = 2


@pytest.fixture(scope="module")
def chain() -> Iterator[ModelServer]:
    with ModelServer(prepare_on_device, MODEL) as found:
        yield found


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer(use_test_device) as found:
        yield found


def train_on_two_hosts(subject: Subject, plan: PlanCase) -> tuple[DeviceTrace, list[str]]:
    """One rank; every two ranks have a host, and each sees one GPU, the first, of its own kind."""
    rank = dist.get_rank()
    host, local_rank = divmod(rank, RANKS_OF_HOST)
    os.environ["WHALE_HOST"] = f"host-{host}"
    os.environ["LOCAL_RANK"] = str(local_rank)
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS_OF_HOST)
    settings.num_multiprocessors = MULTIPROCESSORS[rank]
    found = train_on_device(subject, plan)
    return found, [ranks_of_job().device.name]


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(PlanCase("DP 4", 4), id="DP 4", marks=pytest.mark.slow),
        pytest.param(
            PlanCase("2 stages x DP 2", 4, {"num_micro_batch": 2}, (1, 1)), id="2 stages x DP 2"
        ),
    ],
)
def test_two_hosts_with_different_gpus(chain: ModelServer, row: PlanCase) -> None:
    """LOCAL_RANK 1 is device 0 where a rank sees one."""
    ranks = chain.run(train_on_two_hosts, row.num_ranks, row, backend=BACKEND)
    assert [names for _, names in ranks] == [[f"{NAME}:0"]] * row.num_ranks
    reference = chain.run_local(train_locally, row)
    compare(reference, merge([found.trace for found, _ in ranks], CASES[MODEL].build()))


# ---- a model that is on the device before `wh.init` (row 8)


def train_early() -> list[float]:
    model = layers.build().to(NAME)
    wh.init()
    engine = wh.parallelize(model, layers.make_batch(0), optimizer=layers.sgd)
    losses = [engine.step(layers.make_batch(step)).loss for step in range(2)]
    streams.synchronize()
    return losses


def _call(_: None, function: Any) -> Any:
    return function()


def test_row_8_a_model_that_is_on_the_device_already(server: ModelServer) -> None:
    data = [layers.make_batch(step) for step in range(2)]
    expected = local_training(layers.build(), data, None, layers.sgd).losses
    for losses in server.run(_call, 2, train_early, backend=BACKEND):
        assert losses == pytest.approx(expected, rel=1e-12)


# ---- edges that the plan has not (row 11): batches of other shapes are captured anew


def train_on_shapes() -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    trace, _, _ = test_evaluation.train_on_shapes()
    streams.synchronize()
    gradients = {name: tensor.cpu() for name, tensor in trace.gradients.items()}
    return trace.losses, gradients, trace.weights


@pytest.mark.slow  # test_found.py has the channels of row 11 always
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_row_11_other_lengths_and_batch_sizes(server: ModelServer, num_ranks: int) -> None:
    ranks = server.run(_call, num_ranks, train_on_shapes, backend=BACKEND)
    shapes = test_evaluation.SHAPES
    data = [test_evaluation.sequence_batch(step, *shape) for step, shape in enumerate(shapes)]
    gradients: dict[str, Tensor] = {}
    for _, own, _ in ranks:
        gradients.update(own)
    reference = local_training(test_evaluation.sequences(), data, None, layers.sgd)
    compare(reference, Trace(ranks[0][0], gradients, ranks[0][2]))


# ---- weights that Whale draws itself (row 3)

WIDTH = 512
"""a layer has more weights than a GPU has threads"""


def _large() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 3))


def drawn_weights(on_cpu: bool) -> dict[str, Tensor]:
    """The weights of a model that Whale builds, before the first step."""
    if not on_cpu and dist.is_initialized():
        settings.num_multiprocessors = MULTIPROCESSORS[dist.get_rank()]
    wh.init({"device": "cpu" if on_cpu else "auto"})
    batch = torch.zeros(4, WIDTH)
    engine = wh.parallelize(_large, batch, optimizer=layers.sgd, loss=lambda y, x: y.mean())
    return engine.full_state_dict()


def _drawn(_: None, on_cpu: bool) -> dict[str, Tensor]:
    return drawn_weights(on_cpu)


def test_row_3_weights_are_those_of_a_cpu_run(server: ModelServer) -> None:
    on_devices = server.run(_drawn, 2, False, backend=BACKEND)[0]
    on_cpu = server.run_local(_drawn, True)
    for name, tensor in on_cpu.items():
        assert torch.equal(on_devices[name], tensor), name
