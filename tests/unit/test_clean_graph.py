"""Regions, tags and whole programs after cleaning: the graph computes what the module computes,
gradients included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from tests.thorough import slow_cases
from tests.unit.clean_graphs import SAMPLE, Case, Clean, case, compare
from whale.capture.graph import attribute_of, name_at
from whale.operations.nodes import aten_name

# --- regions
# ----------------------------------------------------------------------------------------------------------------


def test_no_grad_region_cuts_the_gradient() -> None:
    def function(m: Case, h: Tensor) -> Tensor:
        with torch.no_grad():
            norm = h.square().sum(1, keepdim=True) + m.scale.sum()
        return h * norm

    clean = case(function)
    assert clean.ops().count("detach") == 2


def test_tensor_that_passes_through_a_no_grad_region_keeps_its_gradient() -> None:
    def function(m: Case, h: Tensor) -> Tensor:
        with torch.no_grad():
            same = h.to(torch.float64).contiguous()
            norm = F.dropout(same, 0.0).sum()
        return h * m.scale + same * norm

    case(function)


def test_enable_grad_inside_no_grad_uses_the_originals() -> None:
    def function(m: Case, h: Tensor) -> Tensor:
        with torch.no_grad():
            cut = h * 2
            with torch.enable_grad():
                kept = h * m.scale + cut
            cut_again = kept.sum()
        return kept + cut_again

    case(function)


def test_reshape_in_place_inside_no_grad() -> None:
    def function(m: Case, h: Tensor) -> Tensor:
        h = h * 1
        with torch.no_grad():
            h.unsqueeze_(0)
            norm = h.sum()
        return h * m.scale + norm

    case(function)


def test_autocast_region_is_noted_on_its_nodes() -> None:
    def function(m: Case, h: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = h.float() @ h.float().t()
            with torch.autocast("cpu", enabled=False):
                high = h.float() @ m.scale.float()
            low.add_(1.0)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            cut = h.float() @ m.scale.float()
        return low.double() + high + cut

    clean = case(function, tolerance=1e-6)
    noted = [node.meta["autocast"][:3] for node in clean.graph.nodes if aten_name(node) == "matmul"]
    assert noted == [
        ("cpu", torch.bfloat16, True),
        ("cpu", torch.bfloat16, False),
        ("cpu", torch.bfloat16, True),
    ]


def test_tags_of_a_region_reach_its_nodes() -> None:
    def function(m: Case, h: Tensor) -> Tensor:
        with torch.fx.traceback.annotate({"scope": 1}), torch.no_grad():
            norm = h.square().sum()
        return h * norm

    torch.manual_seed(1)
    with torch.fx.traceback.preserve_node_meta():
        clean = Clean(Case(function), (SAMPLE,))
    tagged = {
        aten_name(node)
        for node in clean.graph.nodes
        if (node.meta.get("custom") or {}).get("scope") == 1
    }
    assert {"pow", "sum"} <= tagged or {"square", "sum"} <= tagged


def test_control_flow_is_refused_by_name_and_line() -> None:
    def function(m: Case, h: Tensor) -> Tensor:
        return torch.cond(h.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (h,))

    with pytest.raises(ValueError, match=r"`cond`.*without control flow"):
        Clean(Case(function), (SAMPLE,))


# --- simplify
# ---------------------------------------------------------------------------------------------------------------


def test_what_changes_nothing_goes() -> None:
    def function(m: Case, h: Tensor) -> Tensor:
        h = F.dropout(h, 0.0)[...].to(torch.float64).type_as(h)
        h = F.dropout(h, 0.3, training=False)
        h = torch.cat([torch.tensor([], dtype=torch.float64), h], dim=-1)
        return h * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], dtype=torch.float64)

    assert set(case(function).ops()) == {"linear", "mul", "sum"}


def test_what_changes_something_stays() -> None:
    def function(m: Case, h: Tensor) -> Tensor:
        h = F.dropout(h, 0.5).to(torch.float64, copy=True)
        h = torch.cat([torch.tensor([], dtype=torch.float64), h.float().t(), h.float()], dim=-1)
        return h.detach()[:, :6] + h[:, 6:]

    ops = case(function).ops()
    assert ops.count("to") == 3 and {"dropout", "cat", "detach"} <= set(ops)


def test_cat_of_one_transposed_part_can_still_be_viewed() -> None:
    def function(m: Case, h: Tensor) -> Tensor:
        h = torch.cat([torch.tensor([], dtype=torch.float64), h.t()], dim=-1)
        return (h * m.scale).view(-1).view(6, 6)

    assert "cat" not in case(function).ops()


def test_final_value_of_a_buffer_is_kept() -> None:
    def function(m: Case, h: Tensor) -> Tensor:
        m.mean.copy_(h.detach().mean(0).to(torch.float64))
        return h

    assert len(case(function).updates) == 1


# --- random programs
# --------------------------------------------------------------------------------------------------------


RANDOM_VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda t: t[0],
    lambda t: t[..., 1:],
    lambda t: t[::2],
    lambda t: t.reshape(-1),
    lambda t: t.unsqueeze(0),
    lambda t: t.transpose(0, -1),
    lambda t: t.flatten(),
    lambda t: t[...],
    lambda t: t.contiguous(),
    lambda t: t.squeeze(),
    lambda t: t.movedim(0, -1),
    lambda t: t.to(torch.float64),
    lambda t: t.sin(),
    lambda t: t.split(1)[-1].clone(),
]
RANDOM_WRITES: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda t, other: t.add_(other.mean()),
    lambda t, other: t.mul_(0.5),
    lambda t, other: t.copy_(other.sum()),
    lambda t, other: t.masked_fill_(t > 0.5, 0.25),
    lambda t, other: t.relu_(),
    lambda t, other: t.fill_(other.max()),
    lambda t, other: t.clamp_(-1, 1),
]
STEPS = st.lists(
    st.tuples(st.booleans(), st.integers(0, 13), st.integers(0, 20), st.integers(0, 20)),
    min_size=2,
    max_size=12,
)


def random_program(steps: list[tuple[bool, int, int, int]], pool: list[Tensor]) -> Tensor:
    """Views of, and writes to, anything made so far; every tensor counts at the end, and early
    reads must keep old values.
    """
    early = []
    for write, op, first, second in steps:
        chosen = pool[first % len(pool)]
        other = pool[second % len(pool)]
        if write:
            early.append((other * 0.7).sum())
            pool.append(RANDOM_WRITES[op % len(RANDOM_WRITES)](chosen, other))
        elif chosen.ndim and chosen.numel():
            pool.append(RANDOM_VIEWS[op % len(RANDOM_VIEWS)](chosen))
    usable = [each for each in pool if each.numel()]
    return sum(
        ((each.mean() * (place + 1)).sin() for place, each in enumerate(usable)),
        sum(early, torch.zeros((), dtype=torch.float64)),
    )


@settings(max_examples=slow_cases(30), deadline=None, derandomize=True)
@given(STEPS)
def test_random_program_with_gradients(steps: list[tuple[bool, int, int, int]]) -> None:
    case(
        lambda m, h: (
            h + random_program(steps, [h * 1, m.scale * 1, torch.zeros(2, 3, dtype=torch.float64)])
        )
    )


@settings(max_examples=slow_cases(20), deadline=None, derandomize=True)
@given(STEPS)
def test_random_program_on_buffers_without_gradients(
    steps: list[tuple[bool, int, int, int]],
) -> None:
    def function(m: Case, h: Tensor) -> Tensor:
        with torch.no_grad():
            result = random_program(
                steps, [m.mean, m.mean.detach(), h * 1, m.mean.view(2, 3).detach()[1]]
            )
        return h * m.mean + result + h * m.mean.detach()[2:3]

    case(function)


# --- a symbolic batch, and real models
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [2, 5, 9])
def test_symbolic_batch_runs_with_other_sizes(rows: int) -> None:
    def function(m: Case, h: Tensor) -> Tensor:
        with torch.no_grad():
            m.mean.mul_(0.9).add_(h.mean(0))
        h.view(-1, 2, 3)[:, 1].mul_(m.scale[:3])
        h.view(-1)[1:4] = 2.0
        filled = torch.zeros_like(h)
        filled.copy_(m.scale)
        filled.t()[1] = h[:, 0]
        filled.unsqueeze(1)[:, :, 2:4] += 1
        return h + filled.view(-1, 6)

    torch.manual_seed(1)
    compare(
        Case(function), SAMPLE, other=(torch.randn(rows, 4, dtype=torch.float64),), dynamic=True
    )


def hugging_face(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    small: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 50,
    }
    if name == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_layer=2, n_embd=32, n_head=4, vocab_size=50, bos_token_id=0, eos_token_id=0
            )
        )
    if name == "llama":
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**small, num_key_value_heads=2)
        )
    if name == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(**small))
    if name == "t5":
        config = transformers.T5Config(
            num_layers=2,
            d_model=32,
            num_heads=4,
            d_kv=8,
            vocab_size=50,
            d_ff=64,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
        return transformers.T5ForConditionalGeneration(config)
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=5, layer_type="basic"
    )
    return transformers.ResNetForImageClassification(config)


class LossOf(nn.Module):
    def __init__(self, model: nn.Module, main: str) -> None:
        super().__init__()
        self.model = model
        self.main = main

    def forward(self, given: Tensor, labels: Tensor) -> Tensor:
        return self.model(**{self.main: given, "labels": labels}).loss


SHOWN_BY_TRAINING = ("gpt2", "bert", "t5")
"""models whose clean graph tests/integration/test_exactness.py trains; the others have something to
look at in the graph itself
"""


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "resnet",
        *(pytest.param(name, marks=pytest.mark.slow) for name in SHOWN_BY_TRAINING),
    ],
)
def test_real_model_in_training_mode_with_another_batch_size(name: str) -> None:
    torch.manual_seed(3)
    images = name == "resnet"
    model = LossOf(hugging_face(name), "pixel_values" if images else "input_ids").train()

    # float32, because these models cast to float32 inside; eager and graph do the same operations
    # in the same order
    def batch(size: int) -> tuple[Tensor, Tensor]:
        if images:
            return torch.randn(size, 3, 16, 16), torch.randint(0, 5, (size,))
        return torch.randint(1, 50, (size, 8)), torch.randint(1, 50, (size, 8))

    clean = compare(model, *batch(4), other=batch(3), dynamic=True, tolerance=1e-6)
    assert ("batch_norm" in clean.ops()) == images
    if name == "llama":
        # left are the rotary table (1 cat, 1 cast of positions) and the two rotations of each of
        # the 2 layers; the caches are gone
        assert (
            clean.ops().count("cat") == 5
            and clean.ops().count("to") == 1
            and "lift_fresh_copy" not in clean.ops()
        )


# --- names of weights
# ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.b", "code", "graph.weight", "whale_code", "whale_layer.bias"])
def test_a_name_comes_back_from_where_its_tensor_lies(name: str) -> None:
    """`whale_` in front of a name is cut off again: one that begins so by itself lost its own."""
    assert name_at(attribute_of(name)) == name
    assert not hasattr(GraphModule(nn.Module(), Graph()), attribute_of(name).partition(".")[0])
