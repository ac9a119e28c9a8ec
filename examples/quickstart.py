"""A first distributed training: a small transformer learns to tell drawn shapes apart.

    python examples/quickstart.py                            one process
    whale run -n 4 examples/quickstart.py                    2 stages x 2 model replicas: the same losses
    torchrun --nproc-per-node 4 examples/quickstart.py       the same
    whale plan -n 4 examples/quickstart.py                   what would run where, without running it

The model is plain PyTorch. The four lines that make it a Whale job are marked with "# line".
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from torch import Tensor, nn

import whale as wh
from whale.report import print_plan

SHAPES = ("circle", "square", "diamond", "cross")
IMAGE, PATCH, WIDTH, HEADS = 16, 4, 48, 4  # pixels of an image, pixels of a patch, features of a token, attention heads
NUM_PATCHES = (IMAGE // PATCH) ** 2
NOISE = 0.25

# Suffixes of tensors: B samples, T patches of an image, D features.


class Block(nn.Module):
    """One transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x_BTD: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm1(x_BTD)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(query, key, value)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).flatten(2))
        return x_BTD + self.mlp(self.norm2(x_BTD))


class Patches(nn.Module):
    """Cuts an image into patches: one token for each, with its place."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Conv2d(1, WIDTH, PATCH, stride=PATCH)
        self.places = nn.Embedding(NUM_PATCHES, WIDTH)

    def forward(self, images: Tensor) -> Tensor:
        tokens_BTD = self.tokens(images).flatten(2).transpose(1, 2)
        return tokens_BTD + self.places(torch.arange(NUM_PATCHES, device=images.device))


class Net(nn.Module):
    """Image -> one score for each shape. Like the models of Hugging Face it returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        with wh.replicate(1):  # line 2: everything built here is TaskGraph 0
            self.bottom = nn.Sequential(Patches(), Block(), Block())
        with wh.replicate(1):  # line 3: TaskGraph 1
            self.top = nn.Sequential(Block(), Block(), nn.LayerNorm(WIDTH))
            self.head = nn.Linear(WIDTH, len(SHAPES))

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.head(self.top(self.bottom(images)).mean(1))
        return {"loss": F.cross_entropy(scores, labels), "scores": scores}


def draw(num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Outlines of random size at random places, in noise. The same generator gives the same images on every rank."""

    def uniform() -> Tensor:
        return torch.rand(num_samples, generator=generator).view(-1, 1, 1)

    radius = 3 + 3 * uniform()
    room = IMAGE - 1 - 2 * radius
    pixels = torch.arange(IMAGE)
    down = (pixels.view(1, -1, 1) - (radius + room * uniform())).abs()  # distance of each pixel from the middle of the shape
    right = (pixels.view(1, 1, -1) - (radius + room * uniform())).abs()
    inside = torch.maximum(down, right) <= radius
    distances = torch.stack(
        [
            (down**2 + right**2).sqrt() - radius,
            torch.maximum(down, right) - radius,
            (down + right) - radius,
            torch.where(inside, torch.minimum(down, right), float("inf")),
        ]
    )
    labels = torch.randint(len(SHAPES), (num_samples,), generator=generator)
    outlines = (distances[labels, torch.arange(num_samples)].abs() < 0.7).float()
    noise = NOISE * torch.randn(outlines.shape, generator=generator)
    return {"images": (outlines + noise).unsqueeze(1), "labels": labels}


class Progress:
    """One line that is refreshed on a terminal, a line every few steps elsewhere. Says something on rank 0 only."""

    PLAIN_EVERY = 10

    def __init__(self, console: Console, num_steps: int, batch_size: int) -> None:
        self.console, self.num_steps, self.batch_size = console, num_steps, batch_size
        self.step = 0
        self.timings: list[wh.Timing] = []
        self.status = console.status("training") if console.is_terminal else None

    def __enter__(self) -> Progress:
        if self.status is not None:
            self.status.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.status is not None:
            self.status.stop()

    def add(self, loss: float, timing: wh.Timing) -> None:
        pass
