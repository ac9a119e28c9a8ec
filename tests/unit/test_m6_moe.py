"""M6-MoE against a loop over tokens, and what a mixture must never do."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.drawings import Drawings
from models.m6_moe import M6MoE, M6MoEConfig, Mixture


def config(**changes: object) -> M6MoEConfig:
    return dataclasses.replace(M6MoEConfig.tiny(num_experts=4), width=16, num_heads=2, **changes)


def one_by_one(mixture: Mixture, x_TD: Tensor) -> Tensor:
    """One sample: first choices in the order of the tokens, then second choices, each while its
    expert has room.
    """
    wish_TE = mixture.gate(x_TD).softmax(-1)
    chosen = wish_TE.topk(2).indices.tolist()
    room = [mixture.config.capacity(len(x_TD))] * mixture.config.num_experts
    result = torch.zeros_like(x_TD)
    for choice in (0, 1):
        for token, experts in enumerate(chosen):
            expert = experts[choice]
            room[expert] -= 1
            if room[expert] >= 0:
                hidden = (
                    F.gelu(x_TD[token] @ mixture.experts.up[expert]) @ mixture.experts.down[expert]
                )
                result[token] += hidden * wish_TE[token, expert] / wish_TE[token, experts].sum()
    return result


@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0])
def test_tokens_visit_their_two_best_experts_within_their_capacity(factor: float) -> None:
    mixture = Mixture(config(capacity_factor=factor)).double()
    x_BTD = torch.randn(3, 7, 16, dtype=torch.float64)
    balance: list[Tensor] = []
    got = mixture(x_BTD, balance)
    expected = torch.stack([one_by_one(mixture, x_TD) for x_TD in x_BTD])
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert balance[0].shape == (3,)


def test_equal_experts_are_balanced() -> None:
    """All tokens to one expert: as unbalanced as can be, the number of experts times the share that
    wanted it.
    """
    mixture = Mixture(config())
    torch.nn.init.zeros_(mixture.gate.weight)
    balance: list[Tensor] = []
    mixture(
        torch.randn(1, 8, 16), balance
    )  # equal wishes: the mean wish of the chosen expert is 1 / E
    torch.testing.assert_close(balance[0], torch.ones(1))


def test_samples_do_not_look_at_each_other() -> None:
    model = M6MoE(config(capacity_factor=0.7)).double()
    batch = Drawings(20).batch(range(6))
    batch = {
        name: value.double() if value.is_floating_point() else value
        for name, value in batch.items()
    }
    labels = batch.pop("labels")
    together = model(**batch)
    alone = torch.cat(
        [model(**{name: value[i : i + 1] for name, value in batch.items()}) for i in range(6)]
    )
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
    assert model(**batch, labels=labels).ndim == 0


@pytest.mark.parametrize(
    ("name", "billions"), [("m6_moe_100b", 103.3), ("m6_moe_1t", 1002.8), ("m6_moe_10t", 10115.1)]
)
def test_giants_have_the_size_of_their_names(name: str, billions: float) -> None:
    with torch.device("meta"):
        model = M6MoE(getattr(M6MoEConfig, name)())
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 1) == billions


def test_two_experts_are_needed() -> None:
    with pytest.raises(ValueError, match="num_experts is 1"):
        M6MoEConfig.tiny(num_experts=1)
