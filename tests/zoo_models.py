"""Own models of the zoo, and the batches of all models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 32
NUM_LAYERS = 4
NUM_WORDS = 100
LENGTH = 10
NUM_CLASSES = 5
IGNORED = -100
"""label of a position that does not count: torch's and Hugging Face's default"""

Cut = tuple[tuple[str, ...], ...]
"""for each stage its globs of module names; one glob is one TaskGraph"""
MakeBatch = Callable[[int, int], Any]
"""(seed, number of samples) -> batch"""


# ---- batches
# ----------------------------------------------------------------------------------------------------------


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + seed)


def _words(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(
        3, NUM_WORDS, shape, generator=generator
    )  # 0, 1, 2 are special words in many families


def language_batch(seed: int, batch_size: int) -> dict[str, Tensor]:
    generator = _random(seed)
    return {
        "input_ids": _words(generator, batch_size, LENGTH),
        "labels": _words(generator, batch_size, LENGTH),
    }


def masked_batch(seed: int, batch_size: int) -> dict[str, Tensor]:
    """About a quarter of the positions count; the ends of some sequences are padding."""
    generator = _random(seed)
    words = _words(generator, batch_size, LENGTH)
    counts = torch.rand(batch_size, LENGTH, generator=generator) < 0.25
    counts[0, 0] = True
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (batch_size, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths).long()
    return {
        "input_ids": words,
        "attention_mask": mask,
        "labels": words.masked_fill(~counts, IGNORED),
    }


def uneven_batch(seed: int, batch_size: int) -> dict[str, Tensor]:
    """Every third sample has no valid label, the others 1, 2, 3, ... of them."""
    batch = language_batch(seed, batch_size)
    for sample in range(batch_size):
        num_valid = 0 if sample % 3 == 1 else 1 + (3 * sample) % LENGTH
        batch["labels"][sample, num_valid:] = IGNORED
    return batch


def sentence_pair_batch(seed: int, batch_size: int) -> dict[str, Tensor]:
    next_sentence = torch.randint(0, 2, (batch_size,), generator=_random(seed + 500))
    return {**masked_batch(seed, batch_size), "next_sentence_label": next_sentence}


def two_term_batch(seed: int, batch_size: int) -> dict[str, Tensor]:
    generator = _random(seed + 500)
    mask = (torch.rand(batch_size, LENGTH, generator=generator) < 0.5).double()
    mask[0, 0] = 1.0
    scores = torch.randn(batch_size, LENGTH, generator=generator, dtype=torch.float64)
    return {**uneven_batch(seed, batch_size), "scores": scores, "mask": mask}


def vector_batch(seed: int, batch_size: int) -> tuple[Tensor, Tensor]:
    generator = _random(seed)
    vectors = torch.randn(batch_size, WIDTH, generator=generator, dtype=torch.float64)
    return vectors, torch.randint(0, NUM_CLASSES, (batch_size,), generator=generator)


def image_batch(seed: int, batch_size: int, size: int = 16) -> dict[str, Tensor]:
    generator = _random(seed)
    pixels = torch.randn(batch_size, 3, size, size, generator=generator, dtype=torch.float64)
    return {
        "pixel_values": pixels,
        "labels": torch.randint(0, NUM_CLASSES, (batch_size,), generator=generator),
    }


def large_image_batch(seed: int, batch_size: int) -> dict[str, Tensor]:
    return image_batch(seed, batch_size, size=32)


def class_batch(seed: int, batch_size: int) -> dict[str, Tensor]:
    generator = _random(seed)
    return {
        "input_ids": _words(generator, batch_size, LENGTH),
        "labels": torch.randint(0, NUM_CLASSES, (batch_size,), generator=generator),
    }


def audio_batch(seed: int, batch_size: int, *shape: int) -> dict[str, Tensor]:
    generator = _random(seed)
    values = torch.randn(batch_size, *(shape or (200,)), generator=generator, dtype=torch.float64)
    return {
        "input_values": values,
        "labels": torch.randint(0, NUM_CLASSES, (batch_size,), generator=generator),
    }


def spectrum_batch(seed: int, batch_size: int) -> dict[str, Tensor]:
    return audio_batch(seed, batch_size, 24, 16)


# ---- own models
# -------------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """The plainest pipeline: one layer after the other, positional inputs, the loss inside."""

    def __init__(self, num_layers: int = NUM_LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(num_layers)
        )
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, vectors: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            vectors = layer(vectors)
        return F.cross_entropy(self.head(vectors), labels)


class Branches(nn.Module):
    """Values used by several later blocks, some of them two and three stages away; `num_rounds`
    times.
    """

    def __init__(self, num_rounds: int = 1) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        blocks = (
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())
            for _ in range(4 * num_rounds)
        )
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(3 * WIDTH, NUM_CLASSES)

    def forward(self, vectors: Tensor, labels: Tensor) -> Tensor:
        fourth = self.stem(vectors)
        for start in range(0, len(self.blocks), 4):
            stem = fourth
            first = self.blocks[start](stem)
            second = self.blocks[start + 1](first + stem)
            third = self.blocks[start + 2](second * torch.sigmoid(first))
            fourth = self.blocks[start + 3](third + first - stem)
        return self.head(torch.cat([fourth, second, first], dim=-1))


def class_loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(output, batch[1])


class Block(nn.Module):
    """A decoder layer. `linear` makes its four projections."""

    def __init__(self, linear: Callable[[int, int], nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH)
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.qkv = linear(WIDTH, 3 * WIDTH)
        self.out = linear(WIDTH, WIDTH)
        self.up = linear(WIDTH, 2 * WIDTH)
        self.down = linear(2 * WIDTH, WIDTH)

    def forward(self, x_BLD: Tensor) -> Tensor:
        q_BHLK, k_BHLK, v_BHLK = (
            part.unflatten(-1, (4, -1)).transpose(1, 2)
            for part in self.qkv(self.norm_1(x_BLD)).chunk(3, dim=-1)
        )
        mixed_BHLK = F.scaled_dot_product_attention(q_BHLK, k_BHLK, v_BHLK, is_causal=True)
        x_BLD = x_BLD + self.out(mixed_BHLK.transpose(1, 2).flatten(2))
        return x_BLD + self.down(F.gelu(self.up(self.norm_2(x_BLD))))


class LanguageModel(nn.Module):
    """A decoder with the mean over the labels that count as its loss."""

    def __init__(
        self, tied: bool = False, linear: Callable[[int, int], nn.Module] = nn.Linear
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.3)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block(linear) for _ in range(NUM_LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, NUM_WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def hidden(self, input_ids: Tensor) -> Tensor:
        x_BLD = self.embedding(input_ids) + self.positions
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return self.norm(x_BLD)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return F.cross_entropy(
            self.head(self.hidden(input_ids)).flatten(0, 1), labels.flatten(), ignore_index=IGNORED
        )


class TwoTerms(LanguageModel):
    """Gives a dict, from which `two_term_loss` makes two means with different denominators and a
    weight penalty.
    """

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 1)

    def forward(
        self, input_ids: Tensor, labels: Tensor, scores: Tensor, mask: Tensor
    ) -> dict[str, Tensor]:
        hidden = self.hidden(input_ids)
        penalty = torch.stack([parameter.square().sum() for parameter in self.parameters()]).sum()
        return {
            "logits": self.head(hidden),
            "scores": self.score(hidden).squeeze(-1),
            "penalty": penalty,
        }


def two_term_loss(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    words = F.cross_entropy(
        output["logits"].flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED
    )
    scores = ((output["scores"] - batch["scores"]).square() * batch["mask"]).sum() / batch[
        "mask"
    ].sum()
    return words + 0.5 * scores + 1e-3 * output["penalty"]


class LoraLinear(nn.Module):
    """A frozen linear layer and a trained change of low rank."""

    RANK = 4

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.base = nn.Linear(num_in, num_out)
        self.down = nn.Parameter(torch.randn(self.RANK, num_in) * 0.2)
        self.up = nn.Parameter(
            torch.randn(num_out, self.RANK) * 0.2
        )  # not zero as usual: otherwise `down` has no gradient

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


def lora_model() -> nn.Module:
    model = LanguageModel(linear=LoraLinear)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, LoraLinear):
            module.down.requires_grad_(True)
            module.up.requires_grad_(True)
    return model


class ComplexBlock(nn.Module):
    """A trained complex layer and a frozen complex filter. What it gives is a conjugate view: its
    memory does not hold its values.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=torch.complex128)
        filters = torch.randn(width, dtype=torch.complex128)
        self.filter = nn.Parameter(filters, requires_grad=False)
        self.register_buffer("shift", torch.randn(width, dtype=torch.complex128))

    def forward(self, z: Tensor) -> Tensor:
        z = self.linear(z) + self.filter * z
        return (z / (1 + z.abs()) + self.shift).conj()


class Spectra(nn.Module):
    """Real, complex and real again: gradients pass through complex values, and a tensor in two
    halves, the second of them a negative view, goes past the blocks.
    """

    def __init__(self) -> None:
        super().__init__()
        width = WIDTH // 2 + 1
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(ComplexBlock(width) for _ in range(NUM_LAYERS))
        self.head = nn.Linear(3 * width, NUM_CLASSES)

    def forward(self, vectors: Tensor, labels: Tensor) -> Tensor:
        z = torch.fft.rfft(self.stem(vectors), norm="ortho")
        phase = z.conj().imag
        for block in self.blocks:
            z = block(z)
        features = torch.cat([z.abs(), z.real, z.imag * phase], dim=-1)
        return F.cross_entropy(self.head(features), labels)


class ResidualBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_1 = nn.BatchNorm2d(channels)
        self.conv_2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BCHW = self.relu(self.norm_1(self.conv_1(x_BCHW)))
        y_BCHW = self.norm_2(self.conv_2(y_BCHW))
        y_BCHW += x_BCHW
        return self.relu(y_BCHW)


class ResidualNet(nn.Module):
    """Convolutions with batch statistics and operations in place."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        convolution = nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False)
        self.stem = nn.Sequential(convolution, nn.BatchNorm2d(channels), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList(ResidualBlock(channels) for _ in range(NUM_LAYERS))
        self.head = nn.Linear(channels, NUM_CLASSES)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        x_BCHW = self.stem(pixel_values)
        for block in self.blocks:
            x_BCHW = block(x_BCHW)
        return F.cross_entropy(self.head(x_BCHW.mean((2, 3))), labels)
