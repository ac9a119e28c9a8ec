"""A first distributed training: a small transformer learns to tell drawn shapes apart.

    python examples/quickstart.py                            one process
    whale run -n 4 examples/quickstart.py                    2 stages x 2 model replicas: the same
                                                             losses, to the rounding of float32
    torchrun --nproc-per-node 4 examples/quickstart.py       the same
    whale plan -n 4 examples/quickstart.py                   what would run where, without a run

The model is plain PyTorch. The four lines that make it a Whale job end with "# line 1" to "# line
4". Each of the first three, with `--steps 11 --batch 32`, prints

    ...
    on 512 drawings that it has never seen: 38.9% right, loss 1.181793
    ...
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale as wh
from whale.report import print_plan

SHAPES = ("circle", "square", "diamond", "cross")
IMAGE, PATCH = 16, 4  # pixels along one side
WIDTH = 48
HEADS = 4
NUM_PATCHES = (IMAGE // PATCH) ** 2
NOISE = 0.1
REPORT_EVERY = 10  # steps

# Suffixes of tensors: B samples, T patches of an image, D features, H down and W right in an image.


class Block(nn.Module):
    """One transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        query, key, value = (
            self.qkv(self.norm1(x_BTD))
            .unflatten(-1, (3, HEADS, -1))
            .permute(2, 0, 3, 1, 4)
            .unbind()
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).flatten(2))
        return x_BTD + self.mlp(self.norm2(x_BTD))


class Patches(nn.Module):
    """Cuts an image into patches and makes a token of each, with its place."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Conv2d(1, WIDTH, PATCH, stride=PATCH)
        self.places = nn.Embedding(NUM_PATCHES, WIDTH)

    def forward(self, images: Tensor) -> Tensor:
        tokens_BTD = self.tokens(images).flatten(2).transpose(1, 2)
        return tokens_BTD + self.places(torch.arange(NUM_PATCHES, device=images.device))


class Net(nn.Module):
    """Image -> one score for each shape. Like the models of Hugging Face it returns its
    loss, too.
    """

    def __init__(self) -> None:
        super().__init__()
        with wh.replicate(1):  # line 2: what is built here is TaskGraph 0
            self.bottom = nn.Sequential(Patches(), Block())
        with wh.replicate(1):  # line 3: TaskGraph 1
            self.top = nn.Sequential(Block(), nn.LayerNorm(WIDTH))
            self.head = nn.Linear(WIDTH, len(SHAPES))

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.head(self.top(self.bottom(images)).mean(1))
        return {"loss": F.cross_entropy(scores, labels), "scores": scores}


def draw(num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Outlines of random size, not quite in the middle, in noise. The same generator gives the same
    images on every rank.
    """

    def between(low: float, high: float) -> Tensor:
        return (low + (high - low) * torch.rand(num_samples, generator=generator)).view(-1, 1, 1)

    radius = between(3.5, 6)
    pixels = torch.arange(IMAGE)
    down_BHW = (
        (pixels.view(1, -1, 1) - between(6.5, 8.5)).abs().expand(-1, IMAGE, IMAGE)
    )  # how far each pixel is from the middle
    right_BHW = (pixels.view(1, 1, -1) - between(6.5, 8.5)).abs().expand(-1, IMAGE, IMAGE)
    furthest = torch.maximum(down_BHW, right_BHW)
    nearest = torch.minimum(down_BHW, right_BHW)
    from_outline = torch.stack(
        [
            torch.hypot(down_BHW, right_BHW) - radius,
            furthest - radius,
            down_BHW + right_BHW - radius,
            torch.where(furthest <= radius, nearest, IMAGE),
        ]
    )
    labels = torch.randint(len(SHAPES), (num_samples,), generator=generator)
    images = (from_outline[labels, torch.arange(num_samples)].abs() < 0.7).float()
    images += NOISE * torch.randn(images.shape, generator=generator)
    return {"images": images.unsqueeze(1), "labels": labels}


def train(
    engine: wh.Engine, num_steps: int, batch_size: int, is_first: bool
) -> list[wh.StepResult]:
    """A refreshed line on a terminal, a line every few steps elsewhere; figures are of rank 0 since
    the line before.
    """
    generator = torch.Generator().manual_seed(1)
    results: list[wh.StepResult] = []
    refreshed = sys.stdout.isatty()
    start = time.perf_counter()
    for step in range(1, num_steps + 1):
        results.append(engine.step(draw(batch_size, generator)))
        loss = results[-1].loss  # the same on every rank
        if step % REPORT_EVERY == 0 or step in (1, num_steps):
            recent = results[-REPORT_EVERY:]
            total_s = sum(result.timing.total_s for result in recent)
            bubble = sum(result.timing.bubble_s for result in recent) / total_s
            speed = batch_size * len(recent) / total_s
            line = (
                f"step {step:4}/{num_steps}   loss {loss:.6f}   {speed:6.0f} samples/s   bubble "
                f"{bubble:4.0%}"
            )
            if is_first:
                print(
                    f"\r{line}" if refreshed else line,
                    end="" if refreshed and step < num_steps else "\n",
                    flush=True,
                )
    if is_first:
        print(f"{num_steps} steps in {time.perf_counter() - start:.1f} s")
    return results


def print_times(results: list[wh.StepResult]) -> None:
    """Where the time went on rank 0."""
    total_s = sum(result.timing.total_s for result in results)
    parts = {
        "compute": sum(result.timing.compute_s for result in results),
        "waiting for other stages (bubble)": sum(result.timing.bubble_s for result in results),
        "waiting for all-reduces": sum(result.timing.communication_s for result in results),
    }
    parts["the rest"] = total_s - sum(parts.values())
    print(
        "time of rank 0: "
        + ", ".join(f"{name} {seconds / total_s:.0%}" for name, seconds in parts.items())
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=128)
    options = parser.parse_args()
    is_first = os.environ.get("RANK", "0") == "0"

    wh.init(wh.Config({"num_micro_batch": 4}))  # line 1
    sample = draw(options.batch, torch.Generator().manual_seed(0))
    engine = wh.parallelize(
        Net, sample, optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3)
    )  # line 4
    if is_first:
        print_plan(engine.plan)
    results = train(engine, options.steps, options.batch, is_first)
    held_out = draw(512, torch.Generator().manual_seed(2))
    outcome = engine.evaluate(held_out, outputs=True)
    loss = outcome.loss
    if is_first:  # only rank 0 has the outputs
        right = (outcome.outputs["scores"].argmax(1) == held_out["labels"]).float().mean().item()
        print(f"on 512 drawings that it has never seen: {right:.1%} right, loss {loss:.6f}")
        print_times(results)


if __name__ == "__main__":
    main()
