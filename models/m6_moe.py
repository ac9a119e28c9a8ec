"""M6-MoE: an M6 in which every layer has, in the place of its MLP, a mixture of many experts of
which each token visits two.

The tokens of one sample are a group. An expert takes at most `capacity` tokens of a group, those
that come first; what finds no room passes by on the residual stream. So a sample never looks at
another one, and the loss is a mean over samples like any other.

Suffixes of tensors, beside those of `models/m6.py`:
    E experts      C places of an expert for one group     F features inside an expert
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.m6 import PAD, Attention, Linear, M6Config, Table, cut_patches


@dataclass(frozen=True, kw_only=True)
class M6MoEConfig(M6Config):
    """Size of an M6-MoE."""

    num_experts: int
    """of each layer"""
    expert_features: int
    """between the two products of an expert"""
    capacity_factor: float = 2.0
    """places of an expert, in units of the tokens that it would get if all experts got as many; 2:
    every token has two
    """
    balance_weight: float = 0.01
    """of the term that keeps experts equally busy, in the loss"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_experts < 2:
            raise ValueError(
                "M6MoEConfig: every token visits two experts, but num_experts is "
                f"{self.num_experts}"
            )

    def capacity(self, num_tokens: int) -> int:
        """Places that an expert has for the tokens of one sample."""
        return max(1, -(-int(self.capacity_factor * num_tokens) // self.num_experts))

    @classmethod
    def tiny(cls, num_experts: int = 8) -> M6MoEConfig:
        """Trains on a laptop."""
        return cls(
            vocabulary_size=28,
            image_size=24,
            patch_size=6,
            prompt_length=5,
            caption_length=11,
            width=32,
            num_heads=4,
            num_encoder_layers=1,
            num_decoder_layers=1,
            num_experts=num_experts,
            expert_features=64,
        )

    @classmethod
    def m6_moe_100b(cls) -> M6MoEConfig:
        """103 billion parameters."""
        return cls._giant(num_experts=512, expert_features=4096)

    @classmethod
    def m6_moe_1t(cls) -> M6MoEConfig:
        """1.0 trillion parameters."""
        return cls._giant(num_experts=960, expert_features=21248)

    @classmethod
    def m6_moe_10t(cls) -> M6MoEConfig:
        """10.1 trillion parameters: 20 TB in half precision."""
        return cls._giant(num_experts=10240, expert_features=20096)

    @classmethod
    def m6_moe_10t_copy(cls) -> M6MoEConfig:
        """10.1 million parameters: a millionth of `m6_moe_10t`, with its layers and most of its
        parameters in experts, for the drawings of `models/drawings.py`.
        """
        return dataclasses.replace(
            cls.tiny(num_experts=40),
            num_encoder_layers=12,
            num_decoder_layers=12,
            expert_features=161,
        )

    @classmethod
    def _giant(cls, num_experts: int, expert_features: int) -> M6MoEConfig:
        """24 layers of width 1024; the papers print the totals, the division between experts and
        features is ours.
        """
        return cls(
            vocabulary_size=21128,
            image_size=256,
            patch_size=16,
            prompt_length=128,
            caption_length=128,
            width=1024,
            num_heads=16,
            num_encoder_layers=12,
            num_decoder_layers=12,
            num_experts=num_experts,
            expert_features=expert_features,
        )


class Experts(nn.Module):
    """The MLPs of all experts, each on its own places."""

    def __init__(self, config: M6MoEConfig) -> None:
        super().__init__()
        self.up = nn.Parameter(
            torch.empty(config.num_experts, config.width, config.expert_features)
        )
        self.down = nn.Parameter(
            torch.empty(config.num_experts, config.expert_features, config.width)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.up, std=self.up.shape[1] ** -0.5)
        nn.init.normal_(self.down, std=self.down.shape[1] ** -0.5)

    def forward(self, x_EBCD: Tensor) -> Tensor:
        hidden_EBCF = F.gelu(torch.einsum("ebcd,edf->ebcf", x_EBCD, self.up))
        return torch.einsum("ebcf,efd->ebcd", hidden_EBCF, self.down)


class Mixture(nn.Module):
    """Sends every token to its two best experts and adds what they say, weighted by how much it
    wanted them.
    """

    def __init__(self, config: M6MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = Linear(config.width, config.num_experts, bias=False)
        self.experts = Experts(config)

    def forward(self, x_BTD: Tensor, balance: list[Tensor]) -> Tensor:
        """Appends its term (B,) to `balance`: 1 where all experts are equally busy, more
        elsewhere.
        """
        wish_BTE = self.gate(x_BTD).softmax(-1)
        first_BTE = _best(wish_BTE)
        second_BTE = _best(wish_BTE * (1 - first_BTE))
        balance.append((first_BTE.mean(1) * wish_BTE.mean(1)).sum(-1) * self.config.num_experts)
        combine_BTEC = self._places(wish_BTE, first_BTE, second_BTE)
        entering_EBCD = torch.einsum("btec,btd->ebcd", (combine_BTEC > 0).to(x_BTD.dtype), x_BTD)
        return torch.einsum("btec,ebcd->btd", combine_BTEC, self.experts(entering_EBCD))

    def _places(self, wish_BTE: Tensor, first_BTE: Tensor, second_BTE: Tensor) -> Tensor:
        """(B, T, E, C): the weight of each token at its place in each of its experts; second
        choices come after all first ones.
        """
        capacity = self.config.capacity(wish_BTE.shape[1])
        taken_BTE = first_BTE.cumsum(1)
        place_first_BTE = (taken_BTE - 1) * first_BTE
        place_second_BTE = (second_BTE.cumsum(1) - 1 + taken_BTE[:, -1:]) * second_BTE
        weights_BTE = wish_BTE * (first_BTE + second_BTE)
        weights_BTE = weights_BTE / weights_BTE.sum(-1, keepdim=True)
        places_C = torch.arange(capacity, device=wish_BTE.device, dtype=wish_BTE.dtype)
        at_BTEC = ((place_first_BTE + place_second_BTE).unsqueeze(-1) == places_C).to(
            wish_BTE.dtype
        )
        return at_BTEC * weights_BTE.unsqueeze(-1)


def _best(wish_BTE: Tensor) -> Tensor:
    """1 at the largest wish of each token, 0 elsewhere."""
    experts_E = torch.arange(wish_BTE.shape[-1], device=wish_BTE.device)
    return (wish_BTE.argmax(-1, keepdim=True) == experts_E).to(wish_BTE.dtype)


class Layer(nn.Module):
    """Attention to its own tokens and, in the decoder, to the encoder's; then the mixture."""

    def __init__(self, config: M6MoEConfig, is_decoder: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config, causal=is_decoder)
        if is_decoder:
            self.cross_norm = nn.LayerNorm(config.width)
            self.cross = Attention(config)
        self.mixture_norm = nn.LayerNorm(config.width)
        self.mixture = Mixture(config)

    def forward(self, x_BTD: Tensor, memory_BSD: Tensor | None, balance: list[Tensor]) -> Tensor:
        normal_BTD = self.attention_norm(x_BTD)
        x_BTD = x_BTD + self.attention(normal_BTD, normal_BTD)
        if memory_BSD is not None:
            x_BTD = x_BTD + self.cross(self.cross_norm(x_BTD), memory_BSD)
        return x_BTD + self.mixture(self.mixture_norm(x_BTD), balance)


class M6MoE(nn.Module):
    """Image and prompt -> caption."""

    def __init__(self, config: M6MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.words = Table(config.vocabulary_size, config.width)
        self.patches = Linear(config.patch_features, config.width)
        self.encoder_places = Table(config.num_patches + config.prompt_length, config.width)
        self.decoder_places = Table(config.caption_length, config.width)
        self.encoder = nn.ModuleList(
            Layer(config, is_decoder=False) for _ in range(config.num_encoder_layers)
        )
        self.decoder = nn.ModuleList(
            Layer(config, is_decoder=True) for _ in range(config.num_decoder_layers)
        )
        self.encoder_norm = nn.LayerNorm(config.width)
        self.decoder_norm = nn.LayerNorm(config.width)
        self.head = Linear(config.width, config.vocabulary_size, bias=False)

    def forward(
        self, pixels: Tensor, prompt_ids: Tensor, caption_ids: Tensor, labels: Tensor | None = None
    ) -> Tensor:
        """As `M6`: logits (B, T, V); with `labels` the mean loss over words, plus the balance of
        the experts as a mean over samples.
        """
        balance: list[Tensor] = []
        image_BPD = self.patches(cut_patches(pixels, self.config.patch_size))
        memory_BSD = torch.cat([image_BPD, self.words(prompt_ids)], 1)
        memory_BSD = memory_BSD + self.encoder_places.first(memory_BSD.shape[1])
        for layer in self.encoder:
            memory_BSD = layer(memory_BSD, None, balance)
        memory_BSD = self.encoder_norm(memory_BSD)
        x_BTD = self.words(caption_ids) + self.decoder_places.first(caption_ids.shape[1])
        for layer in self.decoder:
            x_BTD = layer(x_BTD, memory_BSD, balance)
        logits_BTV = self.head(self.decoder_norm(x_BTD))
        if labels is None:
            return logits_BTV
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), labels.flatten(), ignore_index=PAD)
        return loss + self.config.balance_weight * torch.stack(balance).mean()
