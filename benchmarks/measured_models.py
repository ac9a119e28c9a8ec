"""The models whose layers were timed on real GPUs, written as they were run: one fused product for
queries, keys and values, scores that are masked and kept, no dropout, float32.

Only what the captured graph needs to know is written: shapes, and which operations run. Nothing
here holds weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SEQUENCE = 2048


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one of the measured models."""

    name: str
    num_blocks: int
    width: int
    num_heads: int
    vocabulary: int
    inner_width: int
    activation: str = "relu"
    num_key_heads: int | None = None
    """heads of keys and values, where they are fewer; None: as many as of queries"""
    gated: bool = False
    """two products into the inner width, multiplied with each other"""

    @property
    def head_width(self) -> int:
        return self.width // self.num_heads

    @property
    def key_heads(self) -> int:
        return self.num_key_heads or self.num_heads

    @property
    def block_parameters(self) -> int:
        """Numbers in the weights of one block."""
        attention = self.width * (2 * self.width + 2 * self.key_heads * self.head_width)
        inner = (3 if self.gated else 2) * self.width * self.inner_width
        return attention + inner + 2 * self.width

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.width

    @property
    def num_layers(self) -> int:
        """Blocks, the embedding before them and the head behind them."""
        return self.num_blocks + 2


MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("OPT-350", 24, 1024, 16, 50272, 4096),
        ModelShape("GPT-Neo-2.7", 32, 2560, 20, 50257, 10240, activation="gelu"),
        ModelShape("OPT-30", 48, 7168, 56, 50272, 28672),
        ModelShape("LLAMA-3-8", 32, 4096, 32, 128256, 14336, "silu", num_key_heads=8, gated=True),
    )
}


class RootMeanSquareNorm(nn.Module):
    """Written out in single operations, as it was run."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


class Attention(nn.Module):
    """Attention of which all scores are kept for backward."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        own = shape.num_heads * shape.head_width
        shared = shape.key_heads * shape.head_width
        self.project = nn.Linear(shape.width, own + 2 * shared, bias=not shape.gated)
        self.output = nn.Linear(own, shape.width, bias=not shape.gated)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        shape = self.shape
        own = shape.num_heads * shape.head_width
        shared = shape.key_heads * shape.head_width
        q, k, v = self.project(x).split([own, shared, shared], dim=-1)
        q, k, v = (self._heads(part) for part in (q, k, v))
        if shape.gated:  # positions are turned into the heads
            q = self._rotated(q)
            k = self._rotated(k)
        if shape.key_heads != shape.num_heads:
            repeats = shape.num_heads // shape.key_heads
            k = k.repeat_interleave(repeats, dim=1)
            v = v.repeat_interleave(repeats, dim=1)
        scores = torch.matmul(q, k.transpose(-1, -2)).masked_fill(mask, -10000.0)
        mixed = torch.matmul(torch.softmax(scores, dim=-1), v)
        return self.output(mixed.transpose(1, 2).reshape(x.shape[0], x.shape[1], own))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], -1, self.shape.head_width).transpose(1, 2)

    @staticmethod
    def _rotated(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
        angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None].expand(-1, x.shape[-1])
        return x * angle.cos() + turned * angle.sin()


class Block(nn.Module):
    """One transformer block, norms first."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        norm = RootMeanSquareNorm if shape.gated else nn.LayerNorm
        self.norm_1 = norm(shape.width)
        self.attention = Attention(shape)
        self.norm_2 = norm(shape.width)
        self.up = nn.Linear(shape.width, shape.inner_width, bias=False)
        self.gate = nn.Linear(shape.width, shape.inner_width, bias=False) if shape.gated else None
        self.down = nn.Linear(shape.inner_width, shape.width, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x), mask)
        normal = self.norm_2(x)
        inner = self.up(normal)
        if self.gate is not None:
            inner = inner * self.gate(normal)
        return x + self.down(getattr(F, self.shape.activation)(inner))


class BlocksOnly(nn.Module):
    """Some blocks between an input that has a gradient and a sum: what is around them costs
    little.
    """

    def __init__(self, shape: ModelShape, num_blocks: int = 1) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(shape.width))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        x = x + self.start
        for block in self.blocks:
            x = block(x, mask)
        return x.sum(dim=(1, 2)).mean()


class WholeModel(nn.Module):
    """Embedding, blocks and head with its loss: what is planned."""

    MODULES = {"embedding": "embedding", "block": "blocks.*", "head": "head"}
    """names of the modules that the measured layers are"""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embedding = _Embedding(shape)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_blocks))
        self.head = _Head(shape)

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        length = words.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class _Embedding(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(SEQUENCE, shape.width)

    def forward(self, words: Tensor) -> Tensor:
        return self.words(words) + self.positions(torch.arange(words.shape[1]))


class _Head(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width)
        self.project = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.norm(x))
