"""Batches of many lengths: one capture, and the losses, gradients and weights of local training."""

from __future__ import annotations

import logging
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale as wh
from tests.exactness import Float64Mode, Trace, compare, local_training
from tests.ranks import preload, run_ranks

preload("tests.integration.test_lengths")

WIDTH = 8
WORDS = 30
IGNORED = -100
LENGTHS = (7, 12, 3, 20, 9, 2, 17, 5)
DYNAMIC = {"tokens": {1: "length"}, "labels": {1: "length"}}


class Block(nn.Module):
    """Causal attention with a mask of padding, and a layer over the features."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x_BTD: Tensor, keep_BT: Tensor) -> Tensor:
        num_samples, length, _ = x_BTD.shape
        heads = self.qkv(self.norm(x_BTD)).view(num_samples, length, 3, 2, WIDTH // 2)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        causal = torch.ones(length, length, dtype=torch.bool, device=x_BTD.device).tril()
        mask = causal & keep_BT[:, None, None, :]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x_BTD + self.out(mixed.transpose(1, 2).reshape(num_samples, length, WIDTH))


class Text(nn.Module):
    """A small language model; the loss is a mean over the labels that are not padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.first = Block()
        self.second = Block()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        keep = tokens != 0
        keep[:, 0] = True
        positions = torch.arange(tokens.shape[1], device=tokens.device) / 10
        x = self.embed(tokens) + positions[:, None]
        x = self.second(self.first(x, keep), keep)
        return F.cross_entropy(self.head(x).view(-1, WORDS), labels.view(-1))


def text() -> nn.Module:
    torch.manual_seed(0)
    return Text().double()


def mini_batch(step: int, length: int, num_samples: int = 6) -> dict[str, Tensor]:
    """Texts of different lengths, padded to the longest."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(1, WORDS, (num_samples, length), generator=generator)
    ends = torch.randint(1, length + 1, (num_samples,), generator=generator)
    ends[0] = length
    is_padding = torch.arange(length) >= ends[:, None]
    labels = torch.randint(0, WORDS, (num_samples, length), generator=generator)
    return {
        "tokens": tokens.masked_fill(is_padding, 0),
        "labels": labels.masked_fill(is_padding, IGNORED),
    }


def mini_batches() -> list[dict[str, Tensor]]:
    return [mini_batch(step, length) for step, length in enumerate(LENGTHS)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3)


def train(
    config: dict[str, Any], marks: dict[str, Any], dynamic: dict[str, Any] | None
) -> tuple[Trace, int, list[float]]:
    """(what a run left behind, captures, losses of evaluations)."""
    model = text()
    wh.init(wh.Config(config))
    wh.annotate(
        model,
        {
            glob: wh.split(2) if mark == "split" else wh.replicate(mark)
            for glob, mark in marks.items()
        },
    )
    data = mini_batches()
    engine = wh.parallelize(model, data[0], optimizer=sgd, dynamic=dynamic)
    # what runs at another length is in the plan
    with patch("whale.lowering.sharded_chunk.solve", side_effect=AssertionError("solved again")):
        losses = [engine.step(data[0]).loss]
        gradients = engine.full_gradients()
        losses += [engine.step(batch).loss for batch in data[1:]]
    evaluated = [engine.evaluate(batch).loss for batch in data[:3]]
    trace = Trace(losses, gradients, engine.full_state_dict())
    return trace, engine.num_captures, evaluated


STAGES = {"embed|first": 1, "second|head": 1}
PLANS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one device": (1, {}, {}),
    "data parallel, 3 micro-batches": (2, {"num_micro_batch": 3}, {}),
    "2 stages": (2, {"num_micro_batch": 2}, STAGES),
    "2 stages, wave, recomputed": (
        2,
        {"num_micro_batch": 2, "schedule": "wave", "recompute": True},
        STAGES,
    ),
    "2 stages, zero-bubble over gloo": (
        2,
        {"num_micro_batch": 3, "schedule": "zero-bubble", "share_memory": False},
        STAGES,
    ),
    "split": (2, {}, {"first": "split", "second": "split", "head": "split"}),
}


LONG = ("2 stages", "2 stages, wave, recomputed")


@pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=pytest.mark.slow if plan in LONG else ()) for plan in PLANS]
)
def test_one_capture_trains_every_length_like_local(plan: str) -> None:
    num_ranks, config, marks = PLANS[plan]
    reference = local_training(text(), mini_batches(), None, sgd)
    reference.buffers = None
    trace, num_captures, evaluated = run_ranks(train, num_ranks, config, marks, DYNAMIC)[0]
    compare(reference, trace)
    assert num_captures == 1
    trained = text()
    trained.load_state_dict(reference.weights)
    expected = [trained(**batch).item() for batch in mini_batches()[:3]]
    assert evaluated == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("recompute", [False, True])
def test_lengths_are_found_from_the_first_two_batches(recompute: bool) -> None:
    """The graph of all lengths is not the one that was planned: regions that are recomputed are cut
    anew in it.
    """
    reference = local_training(text(), mini_batches(), None, sgd)
    reference.buffers = None
    config = {"num_micro_batch": 2, "recompute": recompute}
    trace, num_captures, _ = run_ranks(train, 1, config, {}, None)[0]
    compare(reference, trace)
    assert num_captures == 2, "the sample's length, and one graph for all others"


# ---- what a forward asks of lengths


class Halves(nn.Module):
    """Joins neighbours: works for even lengths only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x_BTD: Tensor) -> Tensor:
        if x_BTD.shape[1] % 2:
            x_BTD = F.pad(x_BTD, (0, 0, 0, 1), value=1.0)
        return self.layer(x_BTD).unflatten(1, (-1, 2)).sum(2).square().mean()


class Window(nn.Module):
    """Takes another path for long samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = self.layer(x_BTD)
        if x_BTD.shape[1] > 10:
            x_BTD = x_BTD[:, -10:] * 2
        return x_BTD.square().mean()


class Fixed(nn.Module):
    """Has a weight for each of 6 positions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 4, dtype=torch.float64))

    def forward(self, x_BTD: Tensor) -> Tensor:
        rows = torch.cat([self.weight, self.weight])[: x_BTD.shape[1]]
        if x_BTD.shape[1] == 6:
            rows = self.weight
        return (x_BTD * rows).square().mean()


@pytest.mark.parametrize("build", [Halves, Window, Fixed])
def test_lengths_that_take_another_path_are_captured_apart(build: Any) -> None:
    torch.manual_seed(0)
    data = [torch.randn(4, length, 4, dtype=torch.float64) for length in (6, 8, 7, 12, 5, 11, 1, 9)]
    model = build()
    reference = local_training(deepcopy(model), data, None, sgd)
    reference.buffers = None
    wh.init(wh.Config({"num_micro_batch": 2}))
    engine = wh.parallelize(model, data[0], optimizer=sgd, dynamic={1: "length"})
    losses = [engine.step(data[0]).loss]
    gradients = engine.full_gradients()
    losses += [engine.step(batch).loss for batch in data[1:]]
    compare(reference, Trace(losses, gradients, engine.full_state_dict()))


class FixedView(nn.Module):
    """Can be captured for one length at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x_BTD: Tensor) -> Tensor:
        total = self.layer(x_BTD[:, 0])
        for step in range(1, int(x_BTD.shape[1])):
            total = total + self.layer(x_BTD[:, step])
        return total.square().mean()


def test_a_model_that_fixes_lengths_says_how_to_have_few(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    data = [torch.randn(4, length, 4, dtype=torch.float64) for length in (6, 3, 4, 3)]
    model = FixedView()
    reference = local_training(deepcopy(model), data, None, sgd).losses
    wh.init(wh.Config())
    engine = wh.parallelize(model, data[0], optimizer=sgd)
    with caplog.at_level(logging.WARNING, logger="whale"):
        assert [engine.step(batch).loss for batch in data] == pytest.approx(reference, rel=1e-12)
    told = [record.message for record in caplog.records if "pad_to_multiple_of" in record.message]
    assert len(told) == 1, "said once, not for each length"
    assert "test_lengths.py" in told[0] and "dim 1" in told[0]
    assert engine.num_captures == 3


# ---- what the user declares


@pytest.mark.parametrize(
    ("dynamic", "words"),
    [
        ({"token": {1: "length"}}, "Did you mean 'tokens'"),
        ({"tokens": {2: "length"}}, "has 2 dims"),
        ({"tokens": {0: "length"}}, "is the batch"),
        ({"tokens": {1: 512}}, "needs a name"),
        ({"tokens": {1: ("length", 5)}}, "the longest 'length' is 5, but the sample batch has 7"),
    ],
)
def test_mistakes_in_dynamic_are_named(dynamic: Any, words: str) -> None:
    wh.init(wh.Config())
    with pytest.raises(ValueError, match=words):
        wh.parallelize(text(), mini_batches()[0], optimizer=sgd, dynamic=dynamic)


def test_the_plan_has_memory_for_the_longest() -> None:
    sample = mini_batches()[0]
    short = wh.plan(text(), sample, cluster=1, dynamic=DYNAMIC)
    long = wh.plan(
        text(),
        sample,
        cluster=1,
        dynamic={"tokens": {1: ("length", 70)}, "labels": {1: "length"}},
    )
    assert short.model == long.model, "a plan for one length is a plan for the model"
    assert long.stages[0].forward_flop > 10 * short.stages[0].forward_flop


# ---- few lengths


def test_batches_are_padded_to_few_lengths() -> None:
    """The model ignores padding, so losses stay; 8 lengths become 3."""
    values = {"tokens": 0, "labels": IGNORED}
    padded = [wh.pad_lengths(batch, 8, values) for batch in mini_batches()]
    assert {batch["tokens"].shape[1] for batch in padded} == {8, 16, 24}
    model = text()
    for before, after in zip(mini_batches(), padded, strict=True):
        assert model(**after).item() == pytest.approx(model(**before).item(), rel=1e-12)
    first, second = wh.pad_lengths((torch.ones(2, 3), torch.ones(2)), 4, {0: -1.0})
    assert first.tolist() == [[1, 1, 1, -1]] * 2 and second.tolist() == [1, 1]
    with pytest.raises(ValueError, match="Did you mean 'tokens'"):
        wh.pad_lengths(mini_batches()[0], 8, {"token": 0})


def test_a_longer_batch_is_planned_anew() -> None:
    data = [mini_batch(0, 7), mini_batch(1, 7), mini_batch(2, 21)]
    wh.init(wh.Config())
    engine = wh.parallelize(text(), data[0], optimizer=sgd, dynamic=DYNAMIC)
    for batch in data[:2]:
        engine.step(batch)
    short = engine.plan
    engine.step(data[2])
    assert engine.plan.devices[0].sample_s > 2 * short.devices[0].sample_s
    assert engine.plan.decisions[-1].choice == "length 21"
    engine.step(data[0])
    assert engine.plan.decisions[-1].choice == "length 21", "a shorter one changes nothing"


# ---- models of Hugging Face, 20 lengths


def hugging_face(name: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    small: dict[str, Any] = {"vocab_size": 60, "use_cache": False}
    if name == "gpt2":
        sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 64}
        off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = transformers.GPT2Config(**small, **sizes, **off, bos_token_id=1, eos_token_id=1)
        return transformers.GPT2LMHeadModel(config).double()
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 32, "max_position_embeddings": 64}
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, **sizes)).double()
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=60, **sizes, **off)
    return transformers.BertForMaskedLM(config).double()


def padded(step: int) -> dict[str, Tensor]:
    """Batches as a collator gives them: 20 lengths, padding masked."""
    length = 6 + 2 * ((7 * step) % 20)
    batch = mini_batch(step, length)
    tokens = batch["tokens"]
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": batch["labels"]}


def fine_tune(name: str, config: dict[str, Any], is_declared: bool) -> tuple[list[float], int]:
    keys = ("input_ids", "attention_mask", "labels")
    dynamic = {key: {1: ("length", 44)} for key in keys} if is_declared else None
    with Float64Mode():
        wh.init(wh.Config(config))
        engine = wh.parallelize(hugging_face(name), padded(0), optimizer=sgd, dynamic=dynamic)
        losses = [engine.step(padded(step)).loss for step in range(20)]
    return losses, engine.num_captures


@pytest.mark.slow
@pytest.mark.parametrize("is_declared", [True, False])
@pytest.mark.parametrize(
    ("num_ranks", "config"),
    [(1, {}), (2, {}), (2, {"num_task_graph": 2, "num_micro_batch": 2})],
    ids=["one device", "data parallel", "2 stages"],
)
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_fine_tuning_with_20_lengths(
    name: str, num_ranks: int, config: dict[str, Any], is_declared: bool
) -> None:
    with Float64Mode():
        data = [padded(step) for step in range(20)]
        reference = local_training(hugging_face(name), data, None, sgd).losses
    run = run_ranks(fine_tune, num_ranks, name, config, is_declared, timeout_s=200)
    losses, num_captures = run[0]
    assert losses == pytest.approx(reference, rel=1e-10)
    assert num_captures == (1 if is_declared else 2)
