"""The checks of `whale doctor --gpu`, as ranks run them. Every rank runs every row.

Exactness compares with plain training of the same model on the CPU of rank 0, in float64. Rows that
are prone to races run several times and must give the same bits each time. Nothing here knows a
vendor.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import whale as wh
from whale.distributed.ranks import Ranks
from whale.dtypes import rounding

EXACT = rounding(torch.float64).same_work
"""of the largest value of the whole model"""
NUM_STEPS = 3
NUM_LAYERS = 8
MAX_STAGES = 4
NUM_RUNS = 3
"""of a row that is prone to races"""
STALL_S = 60.0
MIB = 1 << 20


@dataclass(frozen=True)
class Sizes:
    """How large the checks are."""

    width: int = 64
    batch_size: int = 32
    speed_width: int = 1024
    speed_layers: int = 4
    speed_tokens: int = 512
    speed_batch: int = 8
    """samples of each rank"""
    num_timed: int = 10
    message_bytes: int = 64 * MIB


SMALL = Sizes(16, 16, 32, 2, 8, 2, 2, MIB)
"""for tests of the logic"""


@dataclass(frozen=True)
class Outcome:
    """What one row gave."""

    part: str
    row: str
    ok: bool
    text: str
    figures: dict[str, float] = field(default_factory=dict)


class Layers(nn.Module):
    """A stack of residual layers that can be cut into stages or sharded."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(NUM_LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(NUM_LAYERS))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, 7)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + self.dropout(torch.tanh(layer(norm(x))))
        return F.cross_entropy(self.head(x), labels)


def build(sizes: Sizes, dropout: float = 0.0) -> Layers:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Layers(sizes.width, dropout).double()


def batch_of(step: int, sizes: Sizes) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(sizes.batch_size, sizes.width, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(0, 7, (sizes.batch_size,), generator=generator)}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


# ---- jobs


@dataclass(frozen=True)
class CheckedJob:
    """One way to train."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    split: int = 0
    """devices that all layers are sharded over; 0: none"""
    grid: tuple[int, int, int] | None = None
    dropout: float = 0.0
    saves: bool = False
    """a checkpoint is written while the next step trains"""


def exact_jobs(num_ranks: int) -> list[CheckedJob]:
    """Rows that are compared with plain training."""
    jobs = [CheckedJob("1 micro-batch")]
    jobs.append(CheckedJob("4 micro-batches", {"num_micro_batch": 4}))
    if num_ranks == 1:
        return jobs
    stages = max(size for size in range(2, MAX_STAGES + 1) if num_ranks % size == 0 or size == 2)
    if num_ranks % stages == 0:
        for schedule in ("1f1b", "gpipe", "interleaved", "wave", "zero-bubble"):
            config = {"num_task_graph": stages, "num_micro_batch": 2 * stages, "schedule": schedule}
            jobs.append(CheckedJob(f"{stages} stages, {schedule}", config))
    if num_ranks % 4 == 0 and stages != 2:
        jobs.append(CheckedJob("2 stages x replicas", {"num_task_graph": 2, "num_micro_batch": 4}))
    jobs.append(CheckedJob("split, 1-D", split=num_ranks, grid=(1, num_ranks, 1)))
    jobs.append(CheckedJob("split, ZeRO-3", split=num_ranks, grid=(1, 1, num_ranks)))
    if num_ranks % 4 == 0:
        jobs.append(CheckedJob("split, 2-D", {"colocate": True}, split=4, grid=(2, 2, 1)))
    return jobs


def racy_jobs(num_ranks: int) -> list[CheckedJob]:
    """Rows in which streams, events and the allocator have most to do."""
    jobs = [
        CheckedJob("many small buckets", {"bucket_bytes": 1024, "num_micro_batch": 4}),
        CheckedJob("dropout, recomputed", {"recompute": True, "num_micro_batch": 4}, dropout=0.2),
        CheckedJob("checkpoint beside training", {"num_micro_batch": 2}, saves=True),
    ]
    if num_ranks % 2 == 0:
        config = {"num_task_graph": 2, "num_micro_batch": 8, "num_posted_receives": 8}
        jobs.append(CheckedJob("receives far ahead", {**config, "schedule": "zero-bubble"}))
        jobs.append(CheckedJob("waves", {**config, "schedule": "wave", "num_waves": 2}))
    return jobs


@dataclass(frozen=True)
class Trained:
    """What a job left behind; the weights on rank 0 only."""

    losses: list[float]
    weights: dict[str, Tensor]


def train(job: CheckedJob, sizes: Sizes) -> Trained:
    wh.init({**job.config, "stall_timeout_s": STALL_S})
    model: nn.Module = build(sizes, job.dropout)
    if job.split:
        wh.annotate(model, {"*": wh.split(job.split, job.grid)})
    engine = wh.parallelize(model, batch_of(0, sizes), optimizer=sgd)
    losses = []
    with tempfile.TemporaryDirectory(prefix="whale-doctor-") as own:
        everyone: list[str] = [own]
        if dist.is_initialized():
            dist.broadcast_object_list(everyone, 0)
        for step in range(NUM_STEPS):
            losses.append(engine.step(batch_of(step, sizes)).loss)
            if job.saves:
                engine.save(Path(everyone[0]) / "checkpoints")
        state = engine.full_state_dict()
        engine.close()
        if dist.is_initialized():
            dist.barrier()  # the folder is rank 0's
    return Trained(losses, state)


def train_locally(sizes: Sizes) -> Trained:
    model = build(sizes)
    optimizer = sgd(model.parameters())
    losses = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = model(**batch_of(step, sizes))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, copy.deepcopy(model.state_dict()))


def difference(found: Trained, expected: Trained) -> float:
    """Largest difference of losses and weights, in units of the largest value."""
    worst = 0.0
    for own, other in zip(found.losses, expected.losses, strict=True):
        worst = max(worst, abs(own - other) / abs(other))
    if found.weights:
        largest = max(float(tensor.abs().max()) for tensor in expected.weights.values())
        for name, tensor in expected.weights.items():
            off = float((found.weights[name].cpu() - tensor).abs().max())
            worst = max(worst, off / largest)
    return worst


def check_exactness(sizes: Sizes, num_ranks: int, part: str = "exactness") -> list[Outcome]:
    expected = train_locally(sizes)
    outcomes = []
    for job in exact_jobs(num_ranks):
        off = difference(train(job, sizes), expected)
        text = f"differs from plain training by {off:.1e}, allowed {EXACT:.0e}"
        outcomes.append(Outcome(part, job.name, off <= EXACT, text, {"difference": off}))
    return outcomes


def check_races(sizes: Sizes, num_ranks: int, part: str = "races") -> list[Outcome]:
    """The same job several times: same bits; and plain training's numbers where it has no dropout."""
    expected = train_locally(sizes)
    outcomes = []
    for job in racy_jobs(num_ranks):
        runs = [train(job, sizes) for _ in range(NUM_RUNS)]
        is_same = all(run.losses == runs[0].losses for run in runs)
        for run in runs:
            for name, tensor in run.weights.items():
                is_same = is_same and torch.equal(tensor, runs[0].weights[name])
        off = 0.0 if job.dropout else difference(runs[0], expected)
        same = "the same bits" if is_same else "other bits"
        text = f"{same} in {NUM_RUNS} runs, differs from plain training by {off:.1e}"
        outcomes.append(Outcome(part, job.name, is_same and off <= EXACT, text))
    return outcomes


# ---- bandwidth


def check_bandwidth(sizes: Sizes, num_ranks: int) -> list[Outcome]:
    """Bytes per second of copies, messages and all-reduces."""
    ranks = Ranks()
    device = ranks.device
    tensor = torch.ones(sizes.message_bytes // 4, device=device.name)
    num_bytes = sizes.message_bytes
    other = torch.empty_like(tensor)
    host = device.empty_on_host(tensor.shape, tensor.dtype)
    found = [
        _rate("copy on the device", lambda: other.copy_(tensor), 2 * num_bytes, ranks, sizes),
        _rate(
            "host to device", lambda: other.copy_(host, non_blocking=True), num_bytes, ranks, sizes
        ),
    ]
    if num_ranks > 1:
        pair = ranks.group((0, 1), "doctor")

        def message() -> None:
            if ranks.rank == 0:
                dist.send(tensor, 1, group=pair)
            elif ranks.rank == 1:
                dist.recv(other, 0, group=pair)

        found.append(_rate("message of rank 0 to 1", message, num_bytes, ranks, sizes))
        moved = 2 * num_bytes * (num_ranks - 1) // num_ranks
        found.append(
            _rate(
                "all-reduce", lambda: dist.all_reduce(other, group=ranks.world), moved, ranks, sizes
            )
        )
    return found


def _rate(
    row: str, call: Callable[[], object], num_bytes: int, ranks: Ranks, sizes: Sizes
) -> Outcome:
    seconds = _median_s(call, ranks, sizes.num_timed)
    rate = num_bytes / seconds
    text = f"{rate / 1e9:.2f} GB/s"
    return Outcome("bandwidth", row, True, text, {"bytes_per_s": rate, "seconds": seconds})


def _median_s(call: Callable[[], object], ranks: Ranks, number: int) -> float:
    """Seconds of one call, by the host's clock around all work of the device."""
    times = []
    for repeat in range(number + 2):
        ranks.device.synchronise()
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        call()
        ranks.device.synchronise()
        if repeat >= 2:  # the first ones load kernels and connect
            times.append(time.perf_counter() - start)
    return statistics.median(times)


# ---- speed


class Blocks(nn.Module):
    """Attention blocks with a loss, of about the shape of a language model."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.speed_width
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(sizes.speed_layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        target = x.roll(1, 1)
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, target)


def check_speed(sizes: Sizes, num_ranks: int) -> list[Outcome]:
    """Samples per second beside those of torch's own ways to use the same devices."""
    ranks = Ranks()
    shape = (sizes.speed_batch, sizes.speed_tokens, sizes.speed_width)
    own = torch.randn(shape, generator=torch.Generator().manual_seed(ranks.rank))
    everyone = [
        torch.randn(shape, generator=torch.Generator().manual_seed(rank))
        for rank in range(num_ranks)
    ]
    whole = torch.cat(everyone)
    seconds: dict[str, float] = {}
    outcomes = []
    ways: list[tuple[str, Callable[[], Callable[[], object]]]] = [
        ("whale", lambda: _whale_step(sizes, whole)),
    ]
    if num_ranks > 1:
        ways.append(("DDP", lambda: _ddp_step(sizes, own, ranks)))
        ways.append(("FSDP2", lambda: _fsdp_step(sizes, own, ranks)))
    else:
        ways.append(("torch", lambda: _plain_step(sizes, own, ranks)))
    for name, make in ways:
        try:
            seconds[name] = _median_s(make(), ranks, sizes.num_timed)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            text = f"could not run: {str(error).splitlines()[0]}"
            outcomes.append(Outcome("speed", name, name != "whale", text))
            continue
        rate = sizes.speed_batch * num_ranks / seconds[name]
        text = f"{seconds[name] * 1e3:.1f} ms a step, {rate:.1f} samples/s"
        if name != "whale" and "whale" in seconds:
            text += f"; whale takes {seconds['whale'] / seconds[name]:.2f} times as long"
        outcomes.append(Outcome("speed", name, True, text, {"seconds": seconds[name]}))
    return outcomes


def _blocks(sizes: Sizes, device: str) -> Blocks:
    torch.manual_seed(0)
    return Blocks(sizes).to(device)


def _whale_step(sizes: Sizes, whole: Tensor) -> Callable[[], object]:
    wh.init({"stall_timeout_s": STALL_S})
    engine = wh.parallelize(_blocks(sizes, "cpu"), whole, optimizer=sgd)
    return lambda: engine.step(whole)


def _plain_step(sizes: Sizes, own: Tensor, ranks: Ranks) -> Callable[[], object]:
    return _step_of(_blocks(sizes, ranks.device.name), own, ranks)


def _ddp_step(sizes: Sizes, own: Tensor, ranks: Ranks) -> Callable[[], object]:
    from torch.nn.parallel import DistributedDataParallel

    return _step_of(DistributedDataParallel(_blocks(sizes, ranks.device.name)), own, ranks)


def _fsdp_step(sizes: Sizes, own: Tensor, ranks: Ranks) -> Callable[[], object]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(ranks.device.type, (ranks.num_ranks,))
    model = _blocks(sizes, ranks.device.name)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _step_of(model, own, ranks)


def _step_of(model: nn.Module, own: Tensor, ranks: Ranks) -> Callable[[], object]:
    optimizer = sgd(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(ranks.device.start_copy(own).take()).backward()
        optimizer.step()

    return step


CHECKS: dict[str, Callable[[Sizes, int], Sequence[Outcome]]] = {
    "exactness": check_exactness,
    "races": check_races,
    "one queue": lambda sizes, num_ranks: check_races(sizes, num_ranks, "one queue"),
    "bandwidth": check_bandwidth,
    "speed": check_speed,
}
"""part -> its rows"""
