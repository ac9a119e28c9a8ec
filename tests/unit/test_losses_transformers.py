"""Losses of models of `transformers`: parts of a mini-batch add up to the whole, or the loss is
refused.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.unit.loss_parts import SAMPLES, Batch, check
from tests.unit.test_kinds import export_graph
from whale.capture.kinds import value_kinds
from whale.capture.losses import rewrite_loss
from whale.capture.samples import SampleFlow


class Float64(TorchFunctionMode):
    """Turns casts to float32 inside models into casts to float64, so that exactness can be measured
    .
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        options = dict(kwargs or {})
        if function is torch.Tensor.float:
            return args[0].double()
        if function in (torch.Tensor.to, torch.Tensor.type):
            args = tuple(map(wide, args))
        return function(
            *args,
            **{key: wide(value) if key == "dtype" else value for key, value in options.items()},
        )


V = 99
TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": V,
}
OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IMAGE = (
    {key: value for key, value in TEXT.items() if key != "vocab_size"}
    | OFF
    | {"image_size": 32, "patch_size": 8}
)
GPT2 = {
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 4,
    "vocab_size": V,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
T5 = {"num_layers": 2, "d_model": 32, "num_heads": 4, "d_kv": 8, "vocab_size": V, "d_ff": 64}
T5 |= {"decoder_start_token_id": 0, "dropout_rate": 0.0}
LLAMA = TEXT | {"num_key_value_heads": 2, "use_cache": False}
MIXTRAL = LLAMA | {
    "num_local_experts": 4,
    "output_router_logits": True,
    "experts_implementation": "batched_mm",
}
HEADS: dict[str, tuple[str, dict[str, Any], str, int]] = {
    # model: its config, options, batch, number of terms
    "GPT2LMHeadModel": ("GPT2Config", GPT2 | {"use_cache": False}, "tokens", 1),
    "LlamaForCausalLM": ("LlamaConfig", LLAMA, "tokens", 1),
    "T5ForConditionalGeneration": ("T5Config", T5 | {"use_cache": False}, "tokens", 1),
    "BertForPreTraining": ("BertConfig", TEXT | OFF, "tokens and sentences", 2),
    "BertForQuestionAnswering": ("BertConfig", TEXT | OFF, "spans", 2),
    "BertForSequenceClassification": ("BertConfig", TEXT | OFF | {"num_labels": 3}, "classes", 1),
    "ElectraForPreTraining": (
        "ElectraConfig",
        TEXT | OFF | {"embedding_size": 32},
        "token bits",
        1,
    ),
    "ViTForMaskedImageModeling": ("ViTConfig", IMAGE | {"encoder_stride": 8}, "masked images", 1),
    "ViTForImageClassification": ("ViTConfig", IMAGE | {"num_labels": 3}, "images", 1),
}


def head_batch(task: str) -> Batch:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(5, V, (SAMPLES, 16), generator=generator)
    labels = ids.clone()
    mask = torch.ones_like(ids)
    labels[0, 3:] = -100
    labels[7] = -100
    mask[1, 10:] = 0
    mask[6, 4:] = 0
    three = torch.randint(0, 3, (SAMPLES,), generator=generator)
    pixels = torch.randn(SAMPLES, 3, 32, 32, generator=generator, dtype=torch.float64)
    spans = torch.randint(0, 20, (2, SAMPLES), generator=generator)  # beyond the 16 tokens: ignored
    return {
        "tokens": {"input_ids": ids, "labels": labels},
        "tokens and sentences": {
            "input_ids": ids,
            "labels": labels,
            "next_sentence_label": three.clamp(max=1),
        },
        "spans": {"input_ids": ids, "start_positions": spans[0], "end_positions": spans[1]},
        "classes": {"input_ids": ids, "attention_mask": mask, "labels": three},
        "token bits": {"input_ids": ids, "attention_mask": mask, "labels": (ids > 50).long()},
        "masked images": {
            "pixel_values": pixels,
            "bool_masked_pos": torch.randint(0, 2, (SAMPLES, 16), generator=generator).bool(),
        },
        "images": {"pixel_values": pixels, "labels": three},
    }[task]


def build(name: str, config: str, options: dict[str, Any]) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    return getattr(transformers, name)(getattr(transformers, config)(**options)).double().train()


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch).loss


TRAINED = (
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "T5ForConditionalGeneration",
    "ViTForImageClassification",
)
"""heads whose one term tests/integration/test_exactness.py trains in micro-batches"""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in TRAINED else []) for name in HEADS],
)
def test_transformers_heads_are_exact(name: str) -> None:
    config, options, task, num_terms = HEADS[name]
    with Float64():
        plan = check(
            build(name, config, options), head_batch(task), own_loss, 1e-10, [(4, 3, 3), (1, 9)]
        )
    assert len(plan.terms) == num_terms


def test_num_items_in_batch_of_transformers() -> None:
    batch = head_batch("tokens") | {"num_items_in_batch": torch.tensor(117)}
    with Float64():
        check(build("LlamaForCausalLM", "LlamaConfig", LLAMA), batch, own_loss, 1e-10, [(4, 3, 3)])


def test_mixtral_router_loss_is_refused() -> None:
    captured = export_graph(
        build("MixtralForCausalLM", "MixtralConfig", MIXTRAL), head_batch("tokens"), own_loss
    )
    plan = rewrite_loss(captured, SampleFlow(captured, value_kinds(captured)))
    assert plan.not_additive is not None
    assert (
        "modeling_mixtral.py" in plan.not_additive.message
        and "aux_loss" in plan.not_additive.message
    )


@pytest.mark.parametrize("masked", [False, True])
def test_mixtral_router_loss_is_exact_with_all_reduced_sums(masked: bool) -> None:
    batch = head_batch("tokens") | (
        {"attention_mask": head_batch("classes")["attention_mask"]} if masked else {}
    )
    with Float64():
        check(
            build("MixtralForCausalLM", "MixtralConfig", MIXTRAL),
            batch,
            own_loss,
            1e-10,
            [(4, 3, 3)],
            all_reduce=True,
        )
