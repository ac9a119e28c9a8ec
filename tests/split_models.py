"""Small models for `split`, each with one difficulty. Sizes are such that no number of devices
divides them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS = 53
LENGTH = 7
NUM_CLASSES = 11


class Mlp(nn.Module):
    """Two linear layers; widths 5, 13 and 7."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 13)
        self.down = nn.Linear(13, 7)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.down(F.gelu(self.up(x))), labels % 7)


class FusedBlock(nn.Module):
    """Fused q, k, v of 3 heads, taken apart as timm does: one view to five dims."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1 = nn.LayerNorm(width)
        self.norm_2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width + 2)
        self.down = nn.Linear(4 * width + 2, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        fused = self.qkv(self.norm_1(x)).reshape(
            samples, length, 3, self.num_heads, width // self.num_heads
        )
        q, k, v = fused.permute(2, 0, 3, 1, 4).unbind(0)
        y = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(samples, length, width)
        )
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    """Embedding, positions, two fused blocks, tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 15)
        self.positions = nn.Embedding(LENGTH, 15)
        self.blocks = nn.ModuleList(FusedBlock(15, 3) for _ in range(2))
        self.norm = nn.LayerNorm(15)
        self.head = nn.Linear(15, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        x = self.words(words) + self.positions(torch.arange(LENGTH, device=words.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(
            self.head(self.norm(x)).view(-1, WORDS), labels.view(-1), ignore_index=3
        )


class RmsNorm(nn.Module):
    """The norm as Hugging Face writes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Swiglu(nn.Module):
    """6 query heads, 3 key heads, separate q, k, v, rotary positions, SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 18)
        self.norm_1 = RmsNorm(18)
        self.norm_2 = nn.RMSNorm(18)
        self.q = nn.Linear(18, 24, bias=False)
        self.k = nn.Linear(18, 12, bias=False)
        self.v = nn.Linear(18, 12, bias=False)
        self.o = nn.Linear(24, 18, bias=False)
        self.gate_up = nn.Linear(18, 2 * 25)
        self.down = nn.Linear(25, 18)
        self.head = nn.Linear(18, NUM_CLASSES)
        angles = torch.outer(torch.arange(LENGTH), 1 / 10 ** torch.arange(2))
        self.register_buffer("cos", torch.cat([angles, angles], -1).cos())
        self.register_buffer("sin", torch.cat([angles, angles], -1).sin())

    def _turn(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return x * self.cos + torch.cat([-right, left], -1) * self.sin

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        x = self.words(words)
        h = self.norm_1(x)
        q = self._turn(self.q(h).unflatten(-1, (6, 4)).transpose(1, 2))
        k = self._turn(self.k(h).unflatten(-1, (3, 4)).transpose(1, 2)).repeat_interleave(2, 1)
        v = self.v(h).unflatten(-1, (3, 4)).transpose(1, 2).repeat_interleave(2, 1)
        x = x + self.o(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, -1)
        x = x + self.down(F.silu(gate) * up)
        return F.cross_entropy(
            self.head(x.mean(1)), labels[:, 0] % NUM_CLASSES, label_smoothing=0.1
        )


class Mixture(nn.Module):
    """5 experts as batched einsums, the two best for every token, capacity by group: a group is a
    sample.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 14)
        self.gate = nn.Linear(14, 5, bias=False)
        self.up = nn.Parameter(torch.randn(5, 14, 9) / 4)
        self.down = nn.Parameter(torch.randn(5, 9, 14) / 3)
        self.head = nn.Linear(14, NUM_CLASSES)

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        x = self.words(words)
        wish = self.gate(x).softmax(-1)  # [samples, tokens, experts]
        best, chosen = wish.topk(2, -1)
        masks = F.one_hot(chosen, 5).to(x.dtype)  # [samples, tokens, 2, experts]
        order = (
            masks.transpose(1, 2).flatten(1, 2).cumsum(1).unflatten(1, (2, LENGTH)).transpose(1, 2)
            - 1
        )
        places = F.one_hot((order * masks).sum(-1).long(), 2 * LENGTH)[..., :4].to(
            x.dtype
        )  # capacity 4, in order of the tokens
        combine = torch.einsum(
            "gske,gskc,gsk->gsec", masks, places, best / best.sum(-1, keepdim=True)
        )
        entering = torch.einsum("gsec,gsm->egcm", (combine > 0).to(x.dtype), x)
        inside = torch.einsum(
            "egch,ehm->egcm", F.relu(torch.einsum("egcm,emh->egch", entering, self.up)), self.down
        )
        x = x + torch.einsum("gsec,egcm->gsm", combine, inside)
        return F.cross_entropy(self.head(x.mean(1)), labels[:, 0] % NUM_CLASSES)


class Convolutions(nn.Module):
    """Convolutions, batch norm, pooling and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(3, 6, 3, padding=1)
        self.conv_2 = nn.Conv2d(6, 10, 3, stride=2)
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.Linear(10, NUM_CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv_1(images))), 2)
        return F.cross_entropy(
            self.head(F.adaptive_avg_pool2d(F.relu(self.conv_2(x)), 1).flatten(1)), labels
        )


def _words(generator: torch.Generator, num_samples: int) -> tuple[Tensor, Tensor]:
    words, labels = (
        torch.randint(0, WORDS, (num_samples, LENGTH), generator=generator) for _ in range(2)
    )
    return words, labels


def _vectors(generator: torch.Generator, num_samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(num_samples, 5, generator=generator, dtype=torch.float64), torch.randint(
        0, 7, (num_samples,), generator=generator
    )


def _images(generator: torch.Generator, num_samples: int) -> tuple[Tensor, Tensor]:
    images = torch.randn(num_samples, 3, 8, 8, generator=generator, dtype=torch.float64)
    return images, torch.randint(0, NUM_CLASSES, (num_samples,), generator=generator)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator, int], Any]]] = {
    "mlp": (Mlp, _vectors),
    "gpt": (Gpt, _words),
    "swiglu": (Swiglu, _words),
    "mixture": (Mixture, _words),
    "convolutions": (Convolutions, _images),
}


def make(name: str, num_samples: int) -> tuple[nn.Module, Any]:
    """A model in float64 and a batch for it, the same at every call."""
    build, batch = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().double().train(), batch(torch.Generator().manual_seed(1), num_samples)
