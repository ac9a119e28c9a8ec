"""What crosses a cut, in bytes: the hidden state and nothing else. Only plans are made here; no
process is started.
"""

from __future__ import annotations

import copy
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale as wh
from tests import zoo_models as zoo
from tests.zoo import CASES, layer_cuts
from tests.zoo_models import NUM_LAYERS
from whale import api
from whale.capture.batch import BatchLayout, read_batch
from whale.capture.prepare import CapturedModel
from whale.lowering.weights import build_on_meta
from whale.model_planner import ModelPlanner

pytestmark = pytest.mark.usefixtures("fresh_session")

FLOAT_BYTES = 4
"""of float32"""

Edges = dict[tuple[int, int], list[int]]
"""(source stage, destination stage) -> bytes for each sample of every value that goes there"""


def edges(plan: wh.Plan) -> Edges:
    found: Edges = {}
    for crossing in plan.crossings:
        found.setdefault((crossing.source, crossing.destination), []).append(crossing.sample_bytes)
    return {edge: sorted(sizes) for edge, sizes in sorted(found.items())}


def chain(num_stages: int, num_bytes: int) -> Edges:
    return {(stage, stage + 1): [num_bytes] for stage in range(num_stages - 1)}


def tied_parameters(plan: wh.Plan) -> dict[str, tuple[int, ...]]:
    parameters = {name for stage in plan.stages for name in stage.parameters}
    return {
        name: stages
        for name, stages in plan.holders.items()
        if len(stages) > 1 and name in parameters
    }


# ---- models of transformers
# -------------------------------------------------------------------------------------------

LAYERS = {
    "gpt2": "transformer.h",
    "bert": "bert.encoder.layer",
    "llama": "model.layers",
    "bloom": "transformer.h",
}
"""where the layers of a model stand"""
LENGTH = 128
WIDTH = 768
NUM_WORDS = 1000
SIZES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 12,
    "intermediate_size": 4 * WIDTH,
}
SPECIAL_WORDS = {"vocab_size": NUM_WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def build_large(name: str) -> nn.Module:
    """Layers of a usual size, so that automatic cuts weigh compute against messages as they would
    for a user. Built on meta.
    """
    import transformers

    if name == "gpt2":
        sizes = {
            "n_embd": WIDTH,
            "n_layer": NUM_LAYERS,
            "n_head": 12,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        }
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **SPECIAL_WORDS))
    if name == "bert":
        no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return transformers.BertForMaskedLM(
            transformers.BertConfig(**SIZES, **SPECIAL_WORDS, **no_dropout)
        )
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, **SPECIAL_WORDS, num_key_value_heads=4)
    )


@cache
def captured(name: str) -> tuple[nn.Module, BatchLayout, CapturedModel]:
    """A model in float32, captured once for all its plans. Those of the zoo have weights (Bloom
    needs them to be accepted).
    """
    if name in ("bloom", "t5"):
        model = CASES[name].build().float()
        batch = CASES[name].batch(0, 4)
    else:
        model = build_on_meta(lambda: build_large(name))
        words = torch.randint(3, NUM_WORDS, (8, LENGTH))
        batch = {
            "input_ids": words,
            "labels": words.clone(),
            "attention_mask": torch.ones_like(words),
        }
    layout, tensors = read_batch(batch)
    return model, layout, api._prepare(model, layout, tensors, None, wh.Config(), "cpu")


def hidden_bytes(name: str) -> int:
    return (zoo.LENGTH * zoo.WIDTH if name in ("bloom", "t5") else LENGTH * WIDTH) * FLOAT_BYTES


def plan_of(
    name: str, cuts: zoo.Cut | None, num_devices: int, config: dict[str, Any] | None = None
) -> wh.Plan:
    """The plan on V100s behind PCIe; cut at the given layers, or by Whale itself."""
    model, layout, prepared = captured(name)
    model = copy.deepcopy(model)  # marks of other plans stay out
    if cuts is not None:
        wh.annotate(model, {"|".join(globs): wh.replicate(1) for globs in cuts})
    cluster = wh.Cluster.uniform(num_devices, "V100-32GB", devices_per_host=8)
    planner = ModelPlanner(model, cluster, wh.Config(config or {}), layout.batch_size)
    return planner.plan(prepared, {})


@pytest.mark.parametrize("name", LAYERS)
def test_only_the_hidden_state_crosses_between_layers(name: str) -> None:
    """Masks, positions, rotary tables and ALiBi biases are needed by every stage, and are computed
    there from the batch.
    """
    for num_stages, cuts in layer_cuts(LAYERS[name]).items():
        plan = plan_of(name, cuts, num_stages)
        assert edges(plan) == chain(num_stages, hidden_bytes(name))
        assert all(crossing.batched and crossing.gradient for crossing in plan.crossings)


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_automatic_cuts_send_the_hidden_state_only(name: str, num_stages: int) -> None:
    """Inside a layer more is alive than between two, so cuts lie between layers. Llama's may lie in
    the first operations of a norm, which balances a little better for one number per position more."""
    plan = plan_of(name, None, num_stages, {"num_task_graph": num_stages})
    hidden = hidden_bytes(name)
    numbers = LENGTH * FLOAT_BYTES  # one for each position
    for edge, sizes in edges(plan).items():
        assert (
            edge[1] == edge[0] + 1 and sizes[-1] == hidden and sum(sizes) - hidden in (0, numbers)
        )
    assert len(edges(plan)) == num_stages - 1


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_t5_sends_the_encoder_output_straight_to_every_decoder_stage(num_stages: int) -> None:
    """Inside the encoder only its hidden state crosses; each stage of the decoder gets the
    encoder's output from the stage that made it.
    """
    plan = plan_of("t5", CASES["t5"].stages[num_stages], num_stages)
    last_of_encoder = {2: 0, 3: 0, 4: 1}[num_stages]
    hidden = hidden_bytes("t5")
    expected: Counter[tuple[int, int]] = Counter()
    for stage in range(num_stages - 1):
        if stage != last_of_encoder:
            expected[stage, stage + 1] += hidden
    for stage in range(last_of_encoder + 1, num_stages):
        expected[last_of_encoder, stage] += hidden
    biases = {name for name in tied_parameters(plan) if "relative_attention_bias" in name}
    extra = Counter({edge: sum(sizes) for edge, sizes in edges(plan).items()})
    extra.subtract(expected)
    heads = 4
    num_buckets = 32
    bias_bytes = heads * zoo.LENGTH * zoo.LENGTH * FLOAT_BYTES
    assert set(extra.values()) <= {0, bias_bytes}
    # the position bias of a half that is cut: its small parameter (buckets x heads) on both sides,
    # or its value sent
    cut_halves = {2: 0, 3: 1, 4: 2}[num_stages]
    assert len(biases) + sum(number > 0 for number in extra.values()) == cut_halves
    if heads * num_buckets * FLOAT_BYTES < bias_bytes:
        assert len(biases) == cut_halves, "the parameter is smaller than what is computed from it"


# ---- values that every stage can compute for itself
# -------------------------------------------------------------------

SMALL = 8


class Masked(nn.Module):
    """Two blocks that use the same mask, rotary table and sizes, all made before the first
    of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, SMALL)
        self.first = nn.Linear(SMALL, SMALL)
        self.second = nn.Linear(SMALL, SMALL)
        self.register_buffer("frequency", torch.arange(1.0, SMALL + 1), persistent=False)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        positions = mask.cumsum(-1)
        table = torch.cos(
            positions.unsqueeze(-1) * self.frequency
        )  # (batch, length, small), as large as the hidden state
        bias = (1.0 - mask.float()).unsqueeze(1) * -1e4  # (batch, 1, length)
        num_samples, length = words.shape
        hidden = self.embedding(words)
        for block in (self.first, self.second):
            hidden = block(hidden * table)
            scores = hidden @ hidden.transpose(1, 2) + bias
            hidden = hidden + (scores.softmax(-1) @ hidden) / (num_samples * length)
        return hidden.square().mean()


def masked_batch(length: int = 6) -> dict[str, Tensor]:
    return {
        "words": torch.randint(0, 20, (4, length)),
        "mask": torch.ones(4, length, dtype=torch.int64),
    }


@pytest.mark.parametrize("length", [3, 6, 40])
def test_masks_tables_and_sizes_never_cross(length: int) -> None:
    """At length 40 mask and table are larger than the weights, at length 3 smaller: it makes no
    difference.
    """
    model = wh.annotate(Masked(), {"first": wh.replicate(1), "second": wh.replicate(1)})
    plan = wh.plan(model, masked_batch(length), cluster=2, config={"num_micro_batch": 2})
    assert edges(plan) == chain(2, length * SMALL * FLOAT_BYTES)
    assert tied_parameters(plan) == {}


# ---- skip connections
# -------------------------------------------------------------------------------------------------


class Sum(nn.Module):
    """A layer that adds up its inputs first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SMALL, SMALL)

    def forward(self, *inputs: Tensor) -> Tensor:
        return torch.tanh(self.linear(torch.stack(inputs).sum(0)))


class Skips(nn.Module):
    """Four blocks; the first one's result is read by all later ones, the second one's by the last
    two.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Sum() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        zero = self.blocks[0](x)
        one = self.blocks[1](zero)
        two = self.blocks[2](one, zero)
        return self.blocks[3](two, zero, one).square().mean()


def test_skip_connections_go_straight_to_each_user() -> None:
    """`zero` is made on stage 0 and used on 1, 2 and 3, `one` on 2 and 3: one crossing for each
    user stage, none through the middle.
    """
    model = wh.annotate(Skips(), {f"blocks.{block}": wh.replicate(1) for block in range(4)})
    plan = wh.plan(model, torch.randn(4, SMALL), cluster=4)
    one = SMALL * FLOAT_BYTES
    assert edges(plan) == {
        (0, 1): [one],
        (0, 2): [one],
        (0, 3): [one],
        (1, 2): [one],
        (1, 3): [one],
        (2, 3): [one],
    }
    by_value: dict[str, set[tuple[int, int]]] = {}
    for crossing in plan.crossings:
        by_value.setdefault(crossing.value, set()).add((crossing.source, crossing.destination))
    assert sorted(map(sorted, by_value.values())) == [
        [(0, 1), (0, 2), (0, 3)],
        [(1, 2), (1, 3)],
        [(2, 3)],
    ]


# ---- weight penalties
# -------------------------------------------------------------------------------------------------


class Penalised(nn.Module):
    """A chain whose loss holds a penalty over all parameters, written in one of the usual ways."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.layers = nn.ModuleList(nn.Linear(SMALL, SMALL) for _ in range(4))
        self.head = nn.Linear(SMALL, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.cross_entropy(self.head(x), labels) + 0.01 * self.penalty()

    def penalty(self) -> Tensor:
        parameters = list(self.parameters())
        if self.form == "sum":
            return torch.stack([parameter.square().sum() for parameter in parameters]).sum()
        if self.form == "loop":
            total = torch.zeros(())
            for parameter in parameters:
                total = total + parameter.norm(2) ** 2
            return total
        return torch.stack([parameter.square().sum() for parameter in parameters]).sum().sqrt()


@pytest.mark.parametrize("form", ["sum", "loop", "norm"])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_penalty_over_all_weights_sends_only_scalars(form: str, num_stages: int) -> None:
    batch = torch.randn(6, SMALL), torch.randint(0, 3, (6,))
    per_stage = 4 // num_stages
    globs = [
        "|".join(f"layers.{stage * per_stage + layer}" for layer in range(per_stage))
        for stage in range(num_stages)
    ]
    model = wh.annotate(Penalised(form), {glob: wh.replicate(1) for glob in globs})
    plan = wh.plan(model, batch, cluster=num_stages)
    assert tied_parameters(plan) == {}, "a weight is held twice only to be penalised"
    hidden = Counter(
        {edge: sizes.count(SMALL * FLOAT_BYTES) for edge, sizes in edges(plan).items()}
    )
    assert +hidden == Counter({(stage, stage + 1): 1 for stage in range(num_stages - 1)})
    others = [
        size for sizes in edges(plan).values() for size in sizes if size != SMALL * FLOAT_BYTES
    ]
    assert set(others) <= {FLOAT_BYTES}, "something larger than a scalar is sent for the penalty"
