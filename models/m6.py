"""M6: an encoder-decoder transformer that reads an image and a text, and writes a text.

The image is cut into patches, each patch becomes one token by a linear projection, and the tokens
of the prompt follow: one sequence for the encoder, which sees all of it at once. The decoder writes
the caption, each token from those before it and from the encoder. Blocks normalise their inputs
(pre-LN). Prompt, caption and output head share one table of words.

Suffixes of tensors:
    B samples      P patches     Q prompt tokens     S tokens of the encoder = P + Q     T caption tokens
    D width        H heads       K features of a head     F features of a patch = channels x patch x patch     V words
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAD = 0
START = 1
END = 2
"""the first words of every vocabulary: filling, start of a caption, end of a caption"""


@dataclass(frozen=True, kw_only=True)
class M6Config:
    """Size of an M6. Everything that a checkpoint needs to be read again."""

    vocabulary_size: int
    """number of words, `PAD`, `START` and `END` included"""
    image_size: int
    """height and width of the images in pixels"""
    patch_size: int
    """height and width of a patch in pixels; divides `image_size`"""
    prompt_length: int
    """tokens of a prompt, filled up with `PAD`"""
    caption_length: int
    """tokens of a caption at most, with its `END`"""
    width: int
    """features of a token"""
    num_heads: int
    """attention heads; divides `width`"""
    num_encoder_layers: int
    num_decoder_layers: int
    num_channels: int = 3
    """colours of a pixel"""
    mlp_ratio: int = 4
    """features between the two layers of an MLP, in units of `width`"""
    dropout: float = 0.0
    """share of features dropped after each attention and each MLP, in training"""
    tie_embeddings: bool = True
    """the output head is the table of words"""

    def __post_init__(self) -> None:
        if self.image_size % self.patch_size:
            raise ValueError(
                f"M6Config: patch_size {self.patch_size} does not divide image_size "
                f"{self.image_size}"
            )
        if self.width % self.num_heads:
            raise ValueError(
                f"M6Config: num_heads {self.num_heads} does not divide width {self.width}"
            )
        if self.vocabulary_size <= END:
            raise ValueError(
                f"M6Config: vocabulary_size {self.vocabulary_size} is too small: the first "
                f"{END + 1} words are PAD, START and END"
            )

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def patch_features(self) -> int:
        return self.num_channels * self.patch_size**2

    @classmethod
    def small(cls) -> M6Config:
        """0.24 million parameters: learns the drawings of `models/drawings.py` on a laptop."""
        return cls(
            vocabulary_size=28,
            image_size=24,
            patch_size=6,
            prompt_length=5,
            caption_length=11,
            width=64,
            num_heads=4,
            num_encoder_layers=2,
            num_decoder_layers=2,
        )

    @classmethod
    def m6_10b(cls) -> M6Config:
        """10.1 billion parameters: 24 encoder and 24 decoder layers, as M6-10B in the Whale paper;
        the paper does not print the width.
        """
        return cls(
            vocabulary_size=50000,
            image_size=256,
            patch_size=16,
            prompt_length=128,
            caption_length=118,
            width=3840,
            num_heads=30,
            num_encoder_layers=24,
            num_decoder_layers=24,
        )


class Linear(nn.Linear):
    """A linear layer whose outputs are of the size of its inputs at the start."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.in_features**-0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Table(nn.Embedding):
    """Rows of features by number. Rows have length 1, so that products with them (logits) are
    small; a lookup gives features of size 1.
    """

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.embedding_dim**0.5

    def first(self, count: int) -> Tensor:
        """Rows 0 .. count-1: places in a sequence."""
        return self(torch.arange(count, device=self.weight.device))


class Attention(nn.Module):
    """Each token of `x` takes from the tokens of `memory`; with `causal`, only from those up to its
    own place.
    """

    def __init__(self, config: M6Config, causal: bool = False) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.causal = causal
        self.query = Linear(config.width, config.width)
        self.key = Linear(config.width, config.width)
        self.value = Linear(config.width, config.width)
        self.out = Linear(config.width, config.width)

    def forward(self, x_BTD: Tensor, memory_BSD: Tensor) -> Tensor:
        query_BHTK = self._heads(self.query(x_BTD))
        key_BHSK = self._heads(self.key(memory_BSD))
        value_BHSK = self._heads(self.value(memory_BSD))
        mixed_BHTK = F.scaled_dot_product_attention(
            query_BHTK, key_BHSK, value_BHSK, is_causal=self.causal
        )
        return self.out(mixed_BHTK.transpose(1, 2).flatten(2))

    def _heads(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class MLP(nn.Module):
    """Works on each token alone."""

    def __init__(self, config: M6Config) -> None:
        super().__init__()
        self.up = Linear(config.width, config.mlp_ratio * config.width)
        self.down = Linear(config.mlp_ratio * config.width, config.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BTD)))


class EncoderLayer(nn.Module):
    """Self-attention over everything, then MLP."""

    def __init__(self, config: M6Config) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BSD: Tensor) -> Tensor:
        normal_BSD = self.attention_norm(x_BSD)
        x_BSD = x_BSD + self.dropout(self.attention(normal_BSD, normal_BSD))
        return x_BSD + self.dropout(self.mlp(self.mlp_norm(x_BSD)))


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the encoder's tokens, MLP."""

    def __init__(self, config: M6Config) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config, causal=True)
        self.cross_norm = nn.LayerNorm(config.width)
        self.cross = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, memory_BSD: Tensor) -> Tensor:
        normal_BTD = self.attention_norm(x_BTD)
        x_BTD = x_BTD + self.dropout(self.attention(normal_BTD, normal_BTD))
        x_BTD = x_BTD + self.dropout(self.cross(self.cross_norm(x_BTD), memory_BSD))
        return x_BTD + self.dropout(self.mlp(self.mlp_norm(x_BTD)))


class Encoder(nn.Module):
    """Image and embedded prompt -> what the decoder reads."""

    def __init__(self, config: M6Config) -> None:
        super().__init__()
        self.patch_size = config.patch_size
        self.patches = Linear(config.patch_features, config.width)
        self.places = Table(config.num_patches + config.prompt_length, config.width)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_encoder_layers))
        self.norm = nn.LayerNorm(config.width)

    def forward(self, pixels: Tensor, prompt_BQD: Tensor) -> Tensor:
        image_BPD = self.patches(cut_patches(pixels, self.patch_size))
        x_BSD = torch.cat([image_BPD, prompt_BQD], 1)
        x_BSD = x_BSD + self.places.first(x_BSD.shape[1])
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        return self.norm(x_BSD)


class Decoder(nn.Module):
    """Embedded caption and the encoder's tokens -> features that the head turns into words."""

    def __init__(self, config: M6Config) -> None:
        super().__init__()
        self.places = Table(config.caption_length, config.width)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_decoder_layers))
        self.norm = nn.LayerNorm(config.width)

    def forward(self, caption_BTD: Tensor, memory_BSD: Tensor) -> Tensor:
        x_BTD = caption_BTD + self.places.first(caption_BTD.shape[1])
        for layer in self.layers:
            x_BTD = layer(x_BTD, memory_BSD)
        return self.norm(x_BTD)


class M6(nn.Module):
    """Image and prompt -> caption."""

    def __init__(self, config: M6Config) -> None:
        super().__init__()
        self.config = config
        self.words = Table(config.vocabulary_size, config.width)
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.head = Linear(config.width, config.vocabulary_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.words.weight

    def forward(
        self, pixels: Tensor, prompt_ids: Tensor, caption_ids: Tensor, labels: Tensor | None = None
    ) -> Tensor:
        """Logits (B, T, V) of the word after each of `caption_ids`; with `labels` (B, T), the mean
        loss over those that are not `PAD`.

        `pixels` (B, channels, image, image); `prompt_ids` (B, Q); `caption_ids` (B, T) begins with
        `START`.
        """
        memory_BSD = self.encoder(pixels, self.words(prompt_ids))
        logits_BTV = self.head(self.decoder(self.words(caption_ids), memory_BSD))
        if labels is None:
            return logits_BTV
        return F.cross_entropy(logits_BTV.flatten(0, 1), labels.flatten(), ignore_index=PAD)

    @torch.no_grad()
    def generate(self, pixels: Tensor, prompt_ids: Tensor) -> Tensor:
        """Captions (B, caption_length), the likeliest word at each place; `PAD` after the `END`."""
        memory_BSD = self.encoder(pixels, self.words(prompt_ids))
        ids_BT = torch.full((len(pixels), 1), START, device=pixels.device)
        ended_B = torch.zeros(len(pixels), dtype=torch.bool, device=pixels.device)
        for _ in range(self.config.caption_length):
            logits_BV = self.head(self.decoder(self.words(ids_BT), memory_BSD)[:, -1])
            next_B = logits_BV.argmax(-1).masked_fill(ended_B, PAD)
            ids_BT = torch.cat([ids_BT, next_B.unsqueeze(1)], 1)
            ended_B = ended_B | (next_B == END)
            if bool(ended_B.all()):
                break
        return F.pad(
            ids_BT[:, 1:], (0, self.config.caption_length + 1 - ids_BT.shape[1]), value=PAD
        )


def cut_patches(pixels: Tensor, patch_size: int) -> Tensor:
    """(B, channels, image, image) -> (B, P, F): patches row by row, each as one list of numbers."""
    grid = pixels.unflatten(3, (-1, patch_size)).unflatten(
        2, (-1, patch_size)
    )  # B, channels, row, y, column, x
    return grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
