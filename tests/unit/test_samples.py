"""Where the batch is, and which operations mix samples: what must be found, and what must
not be.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

import whale as wh
from tests.unit.test_kinds import export_graph, find
from whale.capture.graph import CapturedGraph, module_name, user_line
from whale.capture.kinds import ValueKind, value_kinds
from whale.capture.sample_states import Mixed, PerSample, Summed, batch_dim
from whale.capture.samples import SampleFlow
from whale.operations.nodes import op_name, trains_batch_norm

transformers = pytest.importorskip("transformers")
logging.getLogger("transformers").setLevel(logging.ERROR)

Batch = dict[str, Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)


@dataclass(frozen=True)
class Mixing:
    """One operation in which a sample depends on other samples, or loses its place."""

    node: Node
    reason: str
    kind: str = "samples"
    """`samples`: parts of the batch give another result. `batch statistics`: batch norm, defined
    per micro-batch, allowed. `inner batch`: exact, but the batch is not the outermost part of its
    dim here: no bridge can slice it. `whole input`: depends on the inputs of all samples; exact
    once `rewrite_loss` has lifted it"""

    @property
    def line(self) -> str:
        return user_line(self.node)

    @property
    def module(self) -> str:
        return module_name(self.node)


def find_mixing(captured: CapturedGraph) -> list[Mixing]:
    """All operations that mix samples on the way to the loss (its own sums and means excepted), in
    graph order.
    """
    kinds = value_kinds(captured)
    flow = SampleFlow(captured, kinds)
    order = {node: index for index, node in enumerate(captured.graph.nodes)}
    found: dict[Node, Mixing] = {}
    for node in flow.live:
        state = flow.states.get(node)
        if trains_batch_norm(node):
            found[node] = Mixing(
                node, "batch norm takes its statistics over the samples", "batch statistics"
            )
        computed = kinds.get(node) in (ValueKind.ACTIVATION, ValueKind.WEIGHT)
        if computed and isinstance(state, Mixed):
            found[state.origin] = Mixing(state.origin, state.reason)
        elif computed and node in flow.inner:
            found[node] = Mixing(
                node, f"`{op_name(node)}` puts another dim outside the batch", "inner batch"
            )
        elif isinstance(state, PerSample):
            for operand in flow.whole_operands(node):
                reason = (
                    f"each sample is combined with `{operand.name}`, which depends on the inputs "
                    "of all samples"
                )
                found.setdefault(operand, Mixing(operand, reason, "whole input"))
    for name, node in captured.buffer_updates.items():
        if isinstance(flow.states.get(node), Summed | Mixed):
            found.setdefault(
                node,
                Mixing(
                    node,
                    f"buffer {name} is updated from a value over the samples",
                    "batch statistics",
                ),
            )
    return sorted(found.values(), key=lambda mixing: order[mixing.node])


def mixings(body: Callable[[nn.Module, Tensor, Batch], Tensor]) -> list[Mixing]:
    """What is found in `body(model, hidden state (samples, 6, 4), batch)`, whose result is summed
    to a loss.
    """
    batch = {
        "x": torch.randn(5, 6, 4),
        "mask": torch.ones(5, 6),
        "ids": torch.randint(0, 4, (5, 6)),
    }
    captured = export_graph(Net(), batch, lambda m, b: body(m, m.layer(b["x"]), b).sum())
    return find_mixing(captured)


def rows(b: Batch) -> Tensor:
    return torch.arange(b["x"].shape[0])


MIXES: dict[str, tuple[str, Callable[[nn.Module, Tensor, Batch], Tensor]]] = {
    "centred": ("sub", lambda m, h, b: h - h.mean(0)),
    "centred, kept dim": ("sub", lambda m, h, b: h - h.mean((0, 1), keepdim=True)),
    "divided by its norm": ("linalg_vector_norm", lambda m, h, b: h / torch.linalg.vector_norm(h)),
    "softmax": ("softmax", lambda m, h, b: h.softmax(0)),
    "softmax, negative dim": ("softmax", lambda m, h, b: h.softmax(-3)),
    "softmax after a transpose": ("softmax", lambda m, h, b: h.transpose(0, 1).softmax(1)),
    "log_softmax of flattened tokens": (
        "log_softmax",
        lambda m, h, b: h.flatten(0, 1).log_softmax(0),
    ),
    "cumsum": ("cumsum", lambda m, h, b: h.cumsum(0)),
    "sort": ("sort", lambda m, h, b: h.sort(0).values),
    "topk": ("topk", lambda m, h, b: h.transpose(0, 2).topk(2).values),
    "flip": ("flip", lambda m, h, b: h * h.flip(0)),
    "roll": ("roll", lambda m, h, b: h * h.roll(1, 0)),
    "roll of everything": ("roll", lambda m, h, b: h * h.roll(1)),
    "max": ("max", lambda m, h, b: h / h.max()),
    "standard deviation": ("std", lambda m, h, b: h / h.std(0)),
    "layer norm over samples": (
        "layer_norm",
        lambda m, h, b: F.layer_norm(h.permute(1, 2, 0), (b["x"].shape[0],)),
    ),
    "gram": ("mm", lambda m, h, b: torch.mm(h[:, 0], h[:, 0].t()) ** 2),
    "distances": ("sub", lambda m, h, b: (h[:, None] - h[None]) ** 2),
    "matmul over samples": ("matmul", lambda m, h, b: h @ (h[:, 0].t() @ h[:, 1])),
    "einsum over pairs": ("einsum", lambda m, h, b: torch.einsum("bsd,csd->bc", h, h)),
    "attention across samples": (
        "scaled_dot_product_attention",
        lambda m, h, b: F.scaled_dot_product_attention(*[h.transpose(0, 1)] * 3),
    ),
    "one sample": ("select", lambda m, h, b: h * h[0]),
    "fourier transform over samples": ("fft_fft", lambda m, h, b: torch.fft.fft(h, dim=0).real),
    "rows added": ("pad", lambda m, h, b: F.pad(h, (0, 0, 0, 0, 0, 1))),
    "filled in batch order": (
        "masked_scatter",
        lambda m, h, b: h.masked_scatter(b["mask"][..., None] > 0, h.tanh()),
    ),
    "index into the batch": ("index", lambda m, h, b: h[b["ids"][:, 0]]),
    "index_select on the batch": (
        "index_select",
        lambda m, h, b: h.index_select(0, b["ids"][:, 0]),
    ),
    "gather over the batch": (
        "gather",
        lambda m, h, b: h.gather(0, b["ids"][:, :, None].expand(-1, -1, 4)),
    ),
    "shuffled": ("index", lambda m, h, b: h[torch.randperm(h.shape[0])]),
    "table by position": ("index", lambda m, h, b: h + m.layer.weight[rows(b) % 4][:, None]),
    "next sample": ("index", lambda m, h, b: h[rows(b) + 1]),
    "sample at a distance": ("index", lambda m, h, b: h[rows(b) + b["ids"][:, 0]]),
    "first rows of flattened tokens": ("index", lambda m, h, b: h.view(-1, 4)[rows(b)]),
    "rows of the next sample": ("index", lambda m, h, b: h.view(-1, 4)[rows(b) * 6 + 6]),
    "samples as a matrix": (
        "linalg_svd",
        lambda m, h, b: torch.linalg.svd(h[:, 0], full_matrices=False)[0],
    ),
    "samples as a matrix, a tolerance as a tensor": (
        "linalg_pinv",
        lambda m, h, b: torch.linalg.pinv(h[:, 0], rtol=torch.tensor(1e-3)).t(),
    ),
    "norm over slices of all samples": ("renorm", lambda m, h, b: h.renorm(2, 1, 0.1)),
    "an index beside positions": (
        "index",
        lambda m, h, b: h[torch.stack([rows(b), b["ids"][:, 0]], 1)[:, 1]],
    ),
    "an index joined with positions": (
        "index",
        lambda m, h, b: h[torch.cat([rows(b)[:, None], b["ids"]], 1)[:, 1]],
    ),
    "positions looked up": (
        "index",
        lambda m, h, b: h * rows(b)[:, None].expand(-1, 4)[:, torch.tensor([1, 3, 0, 0])][:, None],
    ),
    "positions selected": (
        "index_select",
        lambda m, h, b: h * rows(b).index_select(0, rows(b))[:, None, None],
    ),
    "positions gathered": (
        "gather",
        lambda m, h, b: h * rows(b).gather(0, rows(b))[:, None, None],
    ),
    "positions written": (
        "index_put",
        lambda m, h, b: h * b["ids"].index_put((rows(b),), rows(b)[:, None])[..., None],
    ),
    "all but the first": ("index", lambda m, h, b: h[rows(b).bool()]),
    "the batch twice, cut into pairs": (
        "view",
        lambda m, h, b: h[rows(b).repeat(2)].view(-1, 2, 6, 4).prod(1),
    ),
    "the batch twice by index_select, cut into pairs": (
        "view",
        lambda m, h, b: h.index_select(0, rows(b).repeat(2)).view(-1, 2, 6, 4).prod(1),
    ),
    "fourier transform over everything": ("fft_fftn", lambda m, h, b: torch.fft.fftn(h).real),
    "shifted along every dim": ("fft_fftshift", lambda m, h, b: h * torch.fft.fftshift(h)),
    "upside down": ("flipud", lambda m, h, b: h * torch.flipud(h)),
    "left to right": (
        "fliplr",
        lambda m, h, b: h.transpose(0, 1) * torch.fliplr(h.transpose(0, 1)),
    ),
    "turned": ("rot90", lambda m, h, b: torch.rot90(h[:, :, None].transpose(1, 2), 2) * h[:, None]),
    "samples as a matrix, in two factors": (
        "linalg_lu_factor",
        lambda m, h, b: torch.linalg.lu_factor(h[:, 0])[0],
    ),
    "mean given back": ("expand", lambda m, h, b: h[:, 0, 0].mean().expand(b["x"].shape[0])),
    "scaled by position": ("mul", lambda m, h, b: h * rows(b)[:, None, None]),
    "inputs softmax": ("softmax", lambda m, h, b: h * b["mask"].softmax(0)[..., None]),
    "inputs rolled": ("roll", lambda m, h, b: h * b["mask"].roll(1, 0)[..., None]),
    "wrong broadcast": ("sub", lambda m, h, b: h[:, 0, 0] - h[:, 0, :1]),
}


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cross(self.layer(x), x).square().mean()


@pytest.mark.filterwarnings("ignore:Using torch.cross")
def test_a_cross_product_without_a_dim_is_refused() -> None:
    """Of a part of 3 samples torch takes the batch, of others the last dim."""
    config = {"num_micro_batch": 2, "check_capture": False}
    with pytest.raises(ValueError, match=r"`cross` works across the samples.* Try: dim=-1"):
        wh.plan(Products(), torch.randn(6, 5, 3), cluster=1, config=config)


@pytest.mark.parametrize("name", MIXES)
def test_found(name: str) -> None:
    operation, body = MIXES[name]
    found = [mixing for mixing in mixings(body) if mixing.kind == "samples"]
    assert found, "not found"
    if name not in (
        "scaled by position",
        "table by position",
    ):  # found where the position is used as a value
        assert op_name(found[0].node) == operation
    assert found[0].line and found[0].reason


FINE: dict[str, Callable[[nn.Module, Tensor, Batch], Tensor]] = {
    "product along a dim of size 3": lambda m, h, b: torch.cross(h[..., :3], h[..., 1:], dim=-1),
    "equations of each sample": lambda m, h, b: torch.linalg.solve(
        h[:, :4] + 9 * torch.eye(4), h[:, :4]
    ),
    "one right-hand side for each sample": lambda m, h, b: torch.linalg.solve(
        h[:, :4] + 9 * torch.eye(4), h[:, 0]
    ),
    "left to right": lambda m, h, b: h * torch.fliplr(h),
    "softmax over classes": lambda m, h, b: h.softmax(-1) + h.softmax(1) + h.log_softmax(2),
    "samples in the middle": lambda m, h, b: h.transpose(0, 1).softmax(0).permute(1, 2, 0),
    "flattened and back": lambda m, h, b: m.layer(h.view(-1, 4)).view(-1, 6, 4) * h,
    "heads": lambda m, h, b: (
        h.view(-1, 6, 2, 2).transpose(1, 2).reshape(-1, 6, 2).softmax(1).view(-1, 2, 6, 2)
    ),
    "windows": lambda m, h, b: h.view(-1, 2, 3, 4).permute(0, 2, 1, 3).reshape(-1, 2, 4).mean(1),
    "attention": lambda m, h, b: F.scaled_dot_product_attention(
        h, h, h, b["mask"][:, None, :].bool()
    ),
    "rows by arange": lambda m, h, b: h[rows(b), b["ids"][:, 0]],
    "rows of flattened tokens": lambda m, h, b: h.view(-1, 4)[rows(b) * 6 + b["ids"][:, 0]],
    "last tokens of flattened tokens": lambda m, h, b: h.view(-1, 4)[
        torch.arange(b["x"].shape[0]) * 6 + 5
    ],
    "rows by one of two indices": lambda m, h, b: h[
        torch.stack([rows(b), rows(b)], 1)[:, 1], torch.stack([b["ids"][:, 0]] * 2)[1]
    ],
    "quantiles": lambda m, h, b: (
        h.quantile(0.5, dim=-1, keepdim=True)
        + h.quantile(torch.tensor([0.2, 0.5]), dim=2).sum(0)[..., None]
    ),
    "similarity": lambda m, h, b: torch.cosine_similarity(h, m.layer.weight[0], dim=-1),
    "norms of matrices": lambda m, h, b: (
        torch.linalg.matrix_norm(h) + torch.linalg.norm(h, dim=-1).sum(1)
    ),
    "recurrent": lambda m, h, b: nn.GRU(4, 4, batch_first=True)(h)[0],
    "recurrent, time first": lambda m, h, b: nn.GRU(4, 4)(h.transpose(0, 1))[0],
    "one matrix for each sample": lambda m, h, b: torch.linalg.svd(h, full_matrices=False)[1],
    "gather inside a sample": lambda m, h, b: h.gather(1, b["ids"][:, :, None].expand(-1, -1, 4)),
    "table lookup": lambda m, h, b: h * m.layer.weight[b["ids"]],
    "sample norms": lambda m, h, b: h / h.norm(dim=(1, 2), keepdim=True),
    "layer norm": lambda m, h, b: F.layer_norm(h, (6, 4)) + F.group_norm(h, 2),
    "batched matmul": lambda m, h, b: torch.bmm(h, h.transpose(1, 2)).softmax(-1) @ h,
    "einsum inside a sample": lambda m, h, b: torch.einsum("bsd,btd->bst", h, h),
    "mask filled": lambda m, h, b: h.masked_fill(b["mask"][..., None] == 0, float("-inf")).exp(),
    "repeated for beams": lambda m, h, b: h.repeat_interleave(3, dim=0).view(-1, 3, 6, 4).mean(1),
    "per-sample count": lambda m, h, b: h.sum(1) / b["mask"].sum(1, keepdim=True),
    "per-sample maximum": lambda m, h, b: h * b["ids"].amax(1)[:, None, None],
    "class token": lambda m, h, b: torch.cat([m.layer.bias.expand(h.shape[0], 1, -1), h], 1),
    "padded tokens": lambda m, h, b: F.pad(h, (0, 0, 1, 2)),
    "cumulative inside a sample": lambda m, h, b: h.cumsum(1) * b["ids"].cumsum(-1)[..., None],
    "split heads": lambda m, h, b: torch.stack([part.tanh() for part in h.split(2, -1)], 0).sum(0),
    "conv": lambda m, h, b: F.conv1d(h.transpose(1, 2), m.layer.weight[:, :, None]),
    "shape only": lambda m, h, b: (
        h + torch.zeros_like(h) + h.new_ones(h.shape[0], 1, 1) + torch.rand(h.shape[0], 1, 4)
    ),
}


@pytest.mark.parametrize("name", FINE)
def test_no_false_alarm(name: str) -> None:
    assert mixings(FINE[name]) == []


def test_batch_norm_is_reported_as_allowed() -> None:
    found = mixings(lambda m, h, b: m.norm(h.transpose(1, 2)))
    assert [mixing.kind for mixing in found] == ["batch statistics"]
    assert found[0].module == "model.norm"


def test_batch_norm_in_eval_mode_does_not_mix() -> None:
    def body(m: nn.Module, h: Tensor, b: Batch) -> Tensor:
        return F.batch_norm(h.transpose(1, 2), m.norm.running_mean, m.norm.running_var)

    assert mixings(body) == []


def test_values_of_all_inputs_used_by_the_model_are_reported() -> None:
    found = mixings(lambda m, h, b: h * b["mask"].any() + h / b["ids"].max())
    assert [(mixing.kind, op_name(mixing.node)) for mixing in found] == [
        ("whole input", "any"),
        ("whole input", "max"),
    ]


def test_denominators_of_the_loss_are_not_reported() -> None:
    assert mixings(lambda m, h, b: h.sum() / b["mask"].sum()) == []


def test_the_batch_inside_another_dim_is_reported_as_exact_but_not_sliceable() -> None:
    found = mixings(lambda m, h, b: m.layer(h.transpose(0, 1).reshape(-1, 4)))
    assert [(mixing.kind, op_name(mixing.node)) for mixing in found] == [("inner batch", "reshape")]
    found = mixings(lambda m, h, b: m.layer(torch.cat([h, -h])))
    assert [(mixing.kind, op_name(mixing.node)) for mixing in found] == [("inner batch", "cat")]


def test_what_does_not_reach_the_loss_is_not_reported() -> None:
    def body(m: nn.Module, h: Tensor, b: Batch) -> Tensor:
        h.softmax(0)
        return h

    assert mixings(body) == []


def test_batch_dim_of_values() -> None:
    captured = export_graph(
        Net(),
        {"x": torch.randn(5, 6, 4)},
        lambda m, b: (m.layer(b["x"]).transpose(0, 1).tanh().sum(0) * 1).sum(),
    )
    assert batch_dim(find(captured, "linear"), captured.batch_symbol) == 0
    assert batch_dim(find(captured, "tanh"), captured.batch_symbol) == 1
    assert batch_dim(find(captured, "sum"), captured.batch_symbol) == 0
    assert batch_dim(captured.output.args[0][0], captured.batch_symbol) is None
    assert batch_dim(find(captured, "linear").meta["val"], sympy.Symbol("other")) is None


# ---------------------------------------------------------------------------------------------------------------
# real models

V = 99
TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": V,
}
IMAGE = {k: v for k, v in TEXT.items() if k != "vocab_size"} | {
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 5,
}
SWIN = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
    "num_labels": 5,
}
GPT2 = {
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 4,
    "vocab_size": V,
    "num_labels": 5,
    "pad_token_id": 0,
    "use_cache": False,
}
T5 = {
    "num_layers": 2,
    "d_model": 32,
    "num_heads": 4,
    "d_kv": 8,
    "vocab_size": V,
    "d_ff": 64,
    "decoder_start_token_id": 0,
}
OPT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "ffn_dim": 64,
    "num_attention_heads": 4,
    "vocab_size": V,
    "word_embed_proj_dim": 32,
}
BART = {
    f"{side}_{what}": n
    for side in ("encoder", "decoder")
    for what, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
}
KV = {"num_key_value_heads": 2, "use_cache": False}
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "GPT2LMHeadModel": ("GPT2Config", GPT2, "tokens"),
    "GPT2ForSequenceClassification": ("GPT2Config", GPT2, "text classes"),
    "BertForMaskedLM": ("BertConfig", TEXT, "tokens"),
    "BertForQuestionAnswering": ("BertConfig", TEXT, "spans"),
    "LlamaForCausalLM": ("LlamaConfig", TEXT | KV, "tokens"),
    "MistralForCausalLM": ("MistralConfig", TEXT | KV | {"sliding_window": 8}, "tokens"),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", TEXT | {"use_cache": False}, "tokens"),
    "BloomForCausalLM": (
        "BloomConfig",
        {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": V, "use_cache": False},
        "tokens",
    ),
    "T5ForConditionalGeneration": ("T5Config", T5 | {"use_cache": False}, "tokens"),
    "OPTForCausalLM": ("OPTConfig", OPT | {"use_cache": False}, "tokens"),
    "BartForConditionalGeneration": (
        "BartConfig",
        BART | {"d_model": 32, "vocab_size": V, "use_cache": False},
        "tokens",
    ),
    "DistilBertForMaskedLM": (
        "DistilBertConfig",
        {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": V},
        "tokens",
    ),
    "ElectraForPreTraining": ("ElectraConfig", TEXT, "token bits"),
    "RobertaForMaskedLM": ("RobertaConfig", TEXT, "tokens"),
    "AlbertForMaskedLM": ("AlbertConfig", TEXT | {"embedding_size": 16}, "tokens"),
    "ViTForImageClassification": ("ViTConfig", IMAGE, "image classes"),
    "DeiTForImageClassification": ("DeiTConfig", IMAGE, "image classes"),
    "SwinForImageClassification": ("SwinConfig", SWIN, "image classes"),
    "ResNetForImageClassification": (
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
        "image classes",
    ),
    "MambaForCausalLM": (
        "MambaConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": V, "use_cache": False},
        "tokens",
    ),
}
NEEDS_EVAL = {
    "OPTForCausalLM",
    "BartForConditionalGeneration",
}  # a layer-drop branch on random data stops their export in training


TRAINED = {
    *(
        "GPT2LMHeadModel",
        "BertForMaskedLM",
        "LlamaForCausalLM",
        "T5ForConditionalGeneration",
        "ViTForImageClassification",
    ),
    *(
        "MistralForCausalLM",
        "BloomForCausalLM",
        "OPTForCausalLM",
        "BartForConditionalGeneration",
        "RobertaForMaskedLM",
    ),
    *("AlbertForMaskedLM", "ResNetForImageClassification"),
}
"""those that tests/integration trains in micro-batches every time: a false alarm would refuse them
there
"""


def sample_batch(task: str) -> Batch:
    ids = torch.randint(5, V, (4, 16))
    mask = torch.ones_like(ids)
    mask[1, 10:] = 0
    text = {"input_ids": ids, "attention_mask": mask}
    return {
        "tokens": text | {"labels": ids.clone()},
        "token bits": text | {"labels": (ids > 50).long()},
        "text classes": text | {"labels": torch.randint(0, 2, (4,))},
        "spans": text
        | {
            "start_positions": torch.randint(0, 9, (4,)),
            "end_positions": torch.randint(0, 9, (4,)),
        },
        "image classes": {
            "pixel_values": torch.randn(4, 3, 32, 32),
            "labels": torch.randint(0, 2, (4,)),
        },
    }[task]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in TRAINED else []) for name in FAMILIES],
)
def test_no_false_alarm_on_transformers(name: str) -> None:
    config, options, task = FAMILIES[name]
    model = getattr(transformers, name)(getattr(transformers, config)(**options)).train(
        name not in NEEDS_EVAL
    )
    captured = export_graph(model, sample_batch(task), lambda m, b: m(**b).loss)
    found = [mixing for mixing in find_mixing(captured) if mixing.kind != "batch statistics"]
    assert found == [], [(mixing.line, mixing.reason) for mixing in found]


def test_clip_contrastive_loss_is_found() -> None:
    text = TEXT | {"projection_dim": 16, "eos_token_id": 98, "max_position_embeddings": 16}
    vision = {k: v for k, v in IMAGE.items() if k != "num_labels"} | {"projection_dim": 16}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    batch = {"input_ids": torch.randint(0, 98, (4, 16)), "pixel_values": torch.randn(4, 3, 32, 32)}
    batch["input_ids"][:, -1] = 98

    def loss(model: nn.Module, b: Batch) -> Tensor:
        scores = model(**b).logits_per_text
        return F.cross_entropy(scores, torch.arange(b["input_ids"].shape[0]))

    found = find_mixing(export_graph(transformers.CLIPModel(config), batch, loss))
    assert [mixing.kind for mixing in found] == ["samples"]
    assert op_name(found[0].node) == "matmul" and "modeling_clip.py" in found[0].line


def test_mixtral_auxiliary_loss_is_found() -> None:
    options = (
        TEXT
        | KV
        | {
            "num_local_experts": 4,
            "output_router_logits": True,
            "experts_implementation": "batched_mm",
        }
    )
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**options))
    ids = torch.randint(5, V, (4, 16))
    found = find_mixing(
        export_graph(model, {"input_ids": ids, "labels": ids.clone()}, lambda m, b: m(**b).loss)
    )
    assert [mixing.kind for mixing in found] == ["samples"]
    assert "aux_loss" in found[0].line and "modeling_mixtral.py" in found[0].line
