"""The checks of `whale doctor --gpu`, as ranks run them. Every rank runs every row.

Exactness compares with plain training of the same model on the CPU, in float64 (fp16: in float32
under torch's autocast and loss scaling, within the rounding of 16 bits). Rows that are prone to
races run several times and must give the same bits each time. Nothing here knows a vendor.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import whale as wh
from whale.distributed.ranks import Ranks
from whale.doctor.jobs import (
    STALL_S,
    CheckedJob,
    Sizes,
    Trained,
    difference,
    exact_jobs,
    racy_jobs,
    sgd,
    train,
    train_locally,
)
from whale.units import compared

NUM_RUNS = 3
"""of a row that is prone to races"""


@dataclass(frozen=True)
class Outcome:
    """What one row gave."""

    part: str
    row: str
    ok: bool
    text: str
    figures: dict[str, float] = field(default_factory=dict)


def check_exactness(sizes: Sizes, num_ranks: int, part: str = "exactness") -> list[Outcome]:
    expected: dict[str, Trained] = {}
    outcomes = []
    for job in exact_jobs(num_ranks):
        plain = repr(job.plain)
        if plain not in expected:
            expected[plain] = train_locally(job.plain, sizes)
        off = difference(train(job, sizes), expected[plain])
        text = f"differs from plain training by {off:.1e}, allowed {job.allowed:.0e}"
        outcomes.append(Outcome(part, job.name, off <= job.allowed, text, {"difference": off}))
    return outcomes


def check_races(sizes: Sizes, num_ranks: int, part: str = "races") -> list[Outcome]:
    """Outcomes of one job that is run several times: are its bits the same every time, and those of
    plain training where it has no dropout?
    """
    expected = train_locally(CheckedJob("plain training"), sizes)
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
        outcomes.append(Outcome(part, job.name, is_same and off <= job.allowed, text))
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


class AttentionBlocks(nn.Module):
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
            ratio = seconds["whale"] / seconds[name]
            text += f"; whale takes {compared(ratio, 'longer', 'less', 'as long')}"
        outcomes.append(Outcome("speed", name, True, text, {"seconds": seconds[name]}))
    return outcomes


def _blocks(sizes: Sizes, device: str) -> AttentionBlocks:
    torch.manual_seed(0)
    return AttentionBlocks(sizes).to(device)


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
