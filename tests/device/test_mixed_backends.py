"""Devices with different backends in one job: test devices and plain CPU ranks.

Each group of ranks takes the backend that all its members have; where there is none, tensors go
through host memory. What comes out is local training.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

import whale as wh
from tests.device import streams
from tests.device.collectives import BACKEND
from tests.device.local_device import TestGpu, use_test_device
from tests.exactness import Float64Mode, Trace, compare, run_loss
from tests.integration.table import NUM_STEPS, PlanCase
from tests.integration.training import (
    RankTrace,
    Subject,
    batches,
    cluster_of,
    engine_on_rank,
    merge,
    train_locally,
)
from tests.ranks import ModelServer, RankError, preload
from tests.zoo import CASES
from whale import devices
from whale.devices import GLOO, HOST, NCCL, RCCL
from whale.distributed.ranks import Ranks
from whale.distributed.transport import Transport

preload("tests.integration.training", "tests.device.test_mixed_backends")

GPU, CPU = "test GPU", "CPU"
SPLIT = "split over 2"


@dataclass(frozen=True)
class MixedTrace:
    """What one rank saw, and how its tensors travelled."""

    trace: RankTrace
    device: str
    backends: dict[tuple[int, ...], str]
    """ranks of a group -> its backend"""


def _take_device(devices_of_ranks: Sequence[str]) -> None:
    """Makes this rank see what its host has."""
    if devices_of_ranks[dist.get_rank()] == CPU:
        devices.ACCELERATORS.remove(TestGpu)


def _start_again(port: int) -> None:
    """Leaves the group that the test made, so that Whale makes its own."""
    dist.barrier()
    dist.destroy_process_group()
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)


def train_mixed(
    prepared: None, name: str, plan: PlanCase, devices_of_ranks: Sequence[str], port: int | None
) -> MixedTrace:
    """One rank of a job whose ranks have these devices."""
    _take_device(devices_of_ranks)
    if port is not None:
        _start_again(port)
    case = CASES[name]
    with Float64Mode():
        subject = Subject(case, case.build(), None)
        if plan.name == SPLIT:
            wh.init(wh.Config(plan.config))
            wh.annotate(subject.model, {"*": wh.split(2)})
        engine = engine_on_rank(subject, plan)
        losses = []
        gradients: dict[str, torch.Tensor] = {}
        for batch in batches(case, False, NUM_STEPS):
            losses.append(engine.step(batch).loss)
            gradients = gradients or {
                key: value.cpu().clone() for key, value in engine.gradients().items()
            }
        evaluated = engine.evaluate(batches(case, False, 1)[0]).loss
        assert evaluated is not None
        losses.append(evaluated)
        held = [key for key, _ in engine.named_parameters()]
        trace = RankTrace(losses, gradients, engine.full_state_dict(), held)
    if devices_of_ranks[dist.get_rank()] == GPU:
        streams.synchronize()  # raises races that nobody has noticed yet
    ranks = engine._job.ranks
    backends = {}
    for (members, _), group in ranks._groups.items():
        if ranks.rank in members:
            backends[members] = dist.get_backend(group)
    return MixedTrace(trace, ranks.device.type, backends)


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer(use_test_device) as found:
        yield found


def _reference(name: str, plan: PlanCase) -> Trace:
    """Local training, with the loss of the first batch at its end."""
    case = CASES[name]
    trace = train_locally(Subject(case, case.build(), None), plan)
    model = case.build()
    with Float64Mode(), torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(trace.weights[key])
        model.eval()
        (batch,) = batches(case, False, 1)
        trace.losses.append(float(run_loss(model, batch, case.loss)))
    return trace


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


ALIKE = "T4"
"""what every rank is taken for, so that each gets work"""
JOBS = [
    (PlanCase("DP 2", 2, kinds=(ALIKE,) * 2), (GPU, CPU)),
    (PlanCase("2 stages", 2, {"num_micro_batch": 5}, (1, 1), kinds=(ALIKE,) * 2), (CPU, GPU)),
    (PlanCase(SPLIT, 2, {"num_micro_batch": 2}, kinds=(ALIKE,) * 2), (GPU, CPU)),
    (
        PlanCase("replicas apart", 4, {"num_micro_batch": 2}, (1, 1), kinds=(ALIKE,) * 4),
        (GPU, GPU, CPU, CPU),
    ),
    (
        PlanCase("stages apart", 3, {"num_micro_batch": 3}, (2, 1), kinds=(ALIKE,) * 3),
        (GPU, GPU, CPU),
    ),
]
SLOW = ("DP 2", "2 stages", "replicas apart")
"""what the others show as well: "DP 2" is the job that Whale starts itself, below"""


@pytest.mark.parametrize(
    ("row", "devices_of_ranks"),
    [
        pytest.param(*job, id=job[0].name, marks=pytest.mark.slow if job[0].name in SLOW else ())
        for job in JOBS
    ],
)
def test_trains_like_local_training(
    server: ModelServer, row: PlanCase, devices_of_ranks: Sequence[str]
) -> None:
    ranks = server.run(train_mixed, row.num_ranks, "chain", row, devices_of_ranks, None)
    _check(ranks, "chain", row, devices_of_ranks)


def _check(
    ranks: list[MixedTrace], name: str, row: PlanCase, devices_of_ranks: Sequence[str]
) -> None:
    for rank, found in enumerate(ranks):
        assert (found.device == "cpu") == (devices_of_ranks[rank] == CPU)
        for members, backend in found.backends.items():
            kinds = {devices_of_ranks[member] for member in members}
            expected = {frozenset([GPU]): BACKEND, frozenset([CPU]): GLOO.name}
            assert backend == expected.get(frozenset(kinds), HOST.name)
    reference = _reference(name, row)
    if row.name == SPLIT:  # each rank has its part of a gradient
        reference.gradients = {}
        for found in ranks:
            found.trace.gradients = {}
    compare(reference, merge([found.trace for found in ranks], CASES[name].build()))


def test_whale_starts_a_job_of_different_devices(server: ModelServer) -> None:
    """Ranks tell each other what they have before the first group is made: the backend of one of
    them would wait for the others for ever.
    """
    row, devices_of_ranks = JOBS[0]
    ranks = server.run(train_mixed, row.num_ranks, "chain", row, devices_of_ranks, _free_port())
    _check(ranks, "chain", row, devices_of_ranks)


# ---- autocast: each type of device has a list of operations of its own


class Normed(nn.Module):
    """A layer norm: float32 under autocast on accelerators, 16 bits on CPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.tanh(self.first(x))).float().square().mean()


class Plain(nn.Module):
    """Operations that every list treats alike."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))).float().square().mean()


def _in_16_bits(_: None, build: type[nn.Module]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of training under autocast, on a test device beside a CPU."""
    _take_device((GPU, CPU))
    wh.init({"precision": "bf16", "strategy": "data"})
    cluster = cluster_of(JOBS[0][0])
    torch.manual_seed(0)
    data = [torch.randn(6, 8) for _ in range(NUM_STEPS)]
    engine = wh.parallelize(build(), data[0], optimizer=_sgd, cluster=cluster)
    losses = [engine.step(batch).loss for batch in data]
    return losses, {name: tensor.cpu() for name, tensor in engine.full_state_dict().items()}


def _sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)  # type: ignore[arg-type]


def test_operations_that_autocast_treats_differently_are_refused_by_name(
    server: ModelServer,
) -> None:
    said = (
        r"layer_norm \(.*test_mixed_backends.py.*\) gives float32 on rank 0 \(testgpu\), and rank 1 "
        r"\(cpu\) has layer_norm in bfloat16 there"
    )
    with pytest.raises(RankError, match=said):
        server.run(_in_16_bits, 2, Normed, timeout_s=40)


def test_operations_that_autocast_treats_alike_train(server: ModelServer) -> None:
    ranks = server.run(_in_16_bits, 2, Plain, timeout_s=40)
    torch.manual_seed(0)
    data = [torch.randn(6, 8) for _ in range(NUM_STEPS)]
    model = Plain()
    optimizer = _sgd(model.parameters())
    losses = []
    for batch in data:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for found, _ in ranks:
        assert found == ranks[0][0]
        assert found == pytest.approx(losses, rel=1e-2)  # 8 bits of mantissa
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(ranks[0][1][name], tensor, rtol=1e-2, atol=1e-2)


# ---- groups


def test_vendors_that_share_a_name_share_no_backend() -> None:
    """torch calls the library of AMD by the name of NVIDIA's."""
    ranks = Ranks()
    ranks.backends = [NCCL, NCCL, RCCL, RCCL, GLOO]
    assert ranks.backend_among([0, 1]) == NCCL
    assert ranks.backend_among([2, 3]) == RCCL
    assert ranks.backend_among([1, 2]) == HOST
    assert ranks.backend_among([0, 4]) == HOST
    assert ranks.needs_channels
    ranks.backends = [NCCL, RCCL, GLOO]
    assert not ranks.needs_channels


def _collectives(_: None) -> list[list[float]]:
    """What comes out of every collective of a group through host memory, on this rank."""
    _take_device((GPU, CPU, GPU))
    ranks = Ranks()
    world = ranks.world
    device = ranks.device.name
    found = []

    def keep(tensor: torch.Tensor) -> None:
        found.append(tensor.cpu().flatten().tolist())

    own = torch.full((2,), float(ranks.rank + 1), device=device)
    total = own.clone()
    dist.all_reduce(total, group=world)
    keep(total)
    copy = own.clone()
    dist.broadcast(copy, 2, group=world)
    keep(copy)
    parts = [torch.empty(2, device=device) for _ in range(3)]
    dist.all_gather(parts, own, group=world)
    keep(torch.stack(parts))
    received = torch.empty(6, device=device)
    dist.all_to_all_single(received, own.repeat(3), group=world)
    keep(received)
    # two collectives and a message under way, waited for in another order
    first = own.clone()
    second = own * 10
    works = [dist.all_reduce(each, group=world, async_op=True) for each in (first, second)]
    assert works[0] is not None
    assert works[1] is not None
    own.mul_(0)  # what is on its way was read before
    works[1].wait()
    works[0].wait()
    keep(torch.stack([first, second]))
    objects: list[object] = [None] * 3
    dist.all_gather_object(objects, ranks.rank, group=world)
    assert objects == [0, 1, 2]
    dist.barrier(group=world)
    return found


def test_collectives_through_host_memory(server: ModelServer) -> None:
    expected = [
        [6.0, 6.0],
        [3.0, 3.0],
        [1.0, 1.0, 2.0, 2.0, 3.0, 3.0],
        [1.0, 1.0, 2.0, 2.0, 3.0, 3.0],
        [6.0, 6.0, 60.0, 60.0],
    ]
    assert server.run(_collectives, 3) == [expected] * 3


def _messages(_: None) -> list[float]:
    """Messages between a test device and a CPU, received in another order than sent."""
    _take_device((GPU, CPU))
    ranks = Ranks()
    transport = Transport(ranks, {(0, 1), (1, 0)})
    transport.begin()
    other = 1 - ranks.rank
    for tag in range(3):
        transport._issue(torch.full((2,), float(tag + 10), device=ranks.device.name), other, tag)
    group, place = transport._from[other]
    found = []
    for tag in (2, 0, 1):
        buffer = torch.zeros(2, device=ranks.device.name)
        group.recv([buffer], place, tag).wait()
        found.append(float(buffer.sum()))
    transport.drain()
    return found


def test_messages_have_tags(server: ModelServer) -> None:
    assert server.run(_messages, 2) == [[24.0, 20.0, 22.0]] * 2


def _fails_on_rank_1(_: None) -> None:
    _take_device((GPU, CPU))
    ranks = Ranks()
    if ranks.rank == 1:
        raise RuntimeError("this rank stops")
    total = torch.ones(1, device=ranks.device.name)
    dist.all_reduce(total, group=ranks.world)


def test_the_end_of_the_other_side_is_noticed(server: ModelServer) -> None:
    with pytest.raises(RankError, match="this rank stops"):
        server.run(_fails_on_rank_1, 2, timeout_s=20)


def test_equal_devices_need_no_host_memory(server: ModelServer) -> None:
    found = server.run(_worlds, 2, backend=BACKEND)
    assert found == [(BACKEND, True)] * 2


def _worlds(_: None) -> tuple[str, bool]:
    ranks = Ranks()
    return ranks.backend.name, ranks.world is dist.group.WORLD
