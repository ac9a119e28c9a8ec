"""The jobs that `whale doctor --gpu` trains, and plain training of the same on one CPU."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import whale as wh
from whale.dtypes import rounding

EXACT = rounding(torch.float64).same_work
"""of the largest value of the whole model"""
EXACT_FP16 = rounding(torch.float16).same_work
CLIPPED_NORM = 0.05
"""below the norm of every step, so that all of them clip"""
NUM_STEPS = 3
NUM_LAYERS = 8
MAX_STAGES = 4
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


class Layers(nn.Module):
    """A stack of residual layers that can be cut into stages or sharded."""

    def __init__(self, width: int, dropout: float = 0.0, is_tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(NUM_LAYERS))
        if is_tied:  # the first layer and the last: in a pipeline they are on two devices
            self.layers[-1].weight = self.layers[0].weight
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(NUM_LAYERS))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, 7)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + self.dropout(torch.tanh(layer(norm(x))))
        return F.cross_entropy(self.head(x), labels)


def build(sizes: Sizes, job: CheckedJob) -> Layers:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Layers(sizes.width, job.dropout, job.is_tied).to(job.dtype)


def batch_of(step: int, sizes: Sizes, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(sizes.batch_size, sizes.width, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 7, (sizes.batch_size,), generator=generator)
    return {"x": x.to(dtype), "labels": labels}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


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
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    is_tied: bool = False

    @property
    def is_fp16(self) -> bool:
        return self.config.get("precision") == "fp16"

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights and inputs."""
        return torch.float32 if self.is_fp16 else torch.float64

    @property
    def allowed(self) -> float:
        """Largest difference from plain training."""
        return EXACT_FP16 if self.is_fp16 else EXACT

    @property
    def plain(self) -> CheckedJob:
        """What of it plain training on one CPU does as well: the same for many jobs."""
        kept = ("clip_grad_norm", "precision")
        config = {name: self.config[name] for name in kept if name in self.config}
        return CheckedJob("plain training", config, optimizer=self.optimizer, is_tied=self.is_tied)


def exact_jobs(num_ranks: int) -> list[CheckedJob]:
    """Rows that are compared with plain training."""
    jobs = [CheckedJob("1 micro-batch")]
    jobs.append(CheckedJob("4 micro-batches", {"num_micro_batch": 4}))
    jobs += update_jobs(num_ranks)
    if num_ranks == 1:
        return jobs
    divisors = [size for size in range(2, MAX_STAGES + 1) if num_ranks % size == 0]
    stages = max(divisors, default=2)
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


def update_jobs(num_ranks: int) -> list[CheckedJob]:
    """Rows of the update, and of where weights, states and activations are at home."""
    clipped = {"clip_grad_norm": CLIPPED_NORM, "num_micro_batch": 2}
    gpipe = {"num_micro_batch": 4, "schedule": "gpipe"}
    jobs = [
        CheckedJob("AdamW", optimizer=adamw),
        CheckedJob("clipping", clipped),
        CheckedJob("fp16", {"precision": "fp16", "num_micro_batch": 2}),
        CheckedJob("states on the host", {"offload": {"optimizer": "host"}}, optimizer=adamw),
        CheckedJob("activations on the host", {**gpipe, "offload": {"activations": "host"}}),
        CheckedJob(
            "weights on the host",
            {"offload": {"weights": "host", "optimizer": "host"}, "num_micro_batch": 2},
            optimizer=adamw,
        ),
    ]
    stages = 2 if num_ranks % 2 == 0 else 1
    tied = {"num_task_graph": stages, "num_micro_batch": 2}
    jobs.append(CheckedJob("tied weights", tied, is_tied=True))
    if num_ranks > 1:
        for level in (1, 2, 3):
            config = {"zero": level, "num_micro_batch": 2}
            jobs.append(CheckedJob(f"ZeRO, level {level}", config, optimizer=adamw))
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
    model: nn.Module = build(sizes, job)
    if job.split:
        wh.annotate(model, {"*": wh.split(job.split, job.grid)})
    engine = wh.parallelize(model, batch_of(0, sizes, job.dtype), optimizer=job.optimizer)
    losses = []
    with tempfile.TemporaryDirectory(prefix="whale-doctor-") as own:
        everyone: list[str] = [own]
        if dist.is_initialized():
            dist.broadcast_object_list(everyone, 0)
        for step in range(NUM_STEPS):
            losses.append(engine.step(batch_of(step, sizes, job.dtype)).loss)
            if job.saves:
                engine.save(Path(everyone[0]) / "checkpoints")
        state = engine.full_state_dict()
        engine.close()
        if dist.is_initialized():
            dist.barrier()  # the folder is rank 0's
    return Trained(losses, state)


def train_locally(job: CheckedJob, sizes: Sizes) -> Trained:
    """Plain training of `job.plain` on the CPU."""
    model = build(sizes, job)
    optimizer = job.optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=job.is_fp16)
    losses = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=job.is_fp16):
            loss = model(**batch_of(step, sizes, job.dtype))
        scaler.scale(loss).backward()
        if "clip_grad_norm" in job.config:
            nn.utils.clip_grad_norm_(model.parameters(), job.config["clip_grad_norm"])
        scaler.step(optimizer)
        scaler.update()
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
