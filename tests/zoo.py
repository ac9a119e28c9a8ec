"""The models that tests train: small, in float64, without dropout, with the same weights in every
process.

`MAIN` are the cases of the exactness table, each chosen for one difficulty. `BREADTH` are further
families of `transformers`, to see that capture copes with what people really write. Configurations
are the default ones but for size and dropout (`use_cache` stays on).

Every case also names where to cut it: `case.cuts(3)` gives the globs of three stages. What no glob
names (embeddings, the last norm, the head) follows its producers, or else its consumers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.exactness import Float64Mode, LossFunction
from tests.zoo_models import (
    NUM_CLASSES,
    NUM_LAYERS,
    NUM_WORDS,
    WIDTH,
    Branches,
    Chain,
    Cut,
    LanguageModel,
    MakeBatch,
    ResidualNet,
    Spectra,
    TwoTerms,
    audio_batch,
    class_batch,
    class_loss,
    image_batch,
    language_batch,
    large_image_batch,
    lora_model,
    masked_batch,
    sentence_pair_batch,
    spectrum_batch,
    two_term_batch,
    two_term_loss,
    uneven_batch,
    vector_batch,
)


@dataclass(frozen=True)
class Case:
    """One model with its data."""

    name: str
    make: Callable[[], nn.Module]
    """builds the model; call `build`"""
    batch: MakeBatch
    loss: LossFunction | None = None
    """None: the model gives the loss itself"""
    stages: Mapping[int, Cut] = field(default_factory=dict)
    batch_statistics: bool = False
    """BatchNorm: the reference is local training with the same micro-batches"""
    layer_drop: bool = False
    """skips layers by a random number in training, which torch.export alone refuses even at
    probability 0
    """

    def build(self) -> nn.Module:
        """The model in float64 and training mode; the same weights at every call, in every process,
        whatever mode is on.
        """
        with torch.random.fork_rng(devices=[]), Float64Mode():
            torch.manual_seed(0)
            return self.make().double().train()

    def cuts(self, num_stages: int) -> list[tuple[str, ...]]:
        """The globs of each stage, to be used with `wh.annotate`."""
        if num_stages not in self.stages:
            raise ValueError(
                f"{self.name} is cut into {sorted(self.stages)} stages, not {num_stages}."
            )
        return list(self.stages[num_stages])


def layer_cuts(prefix: str, num_layers: int = NUM_LAYERS) -> dict[int, Cut]:
    """A chain of layers cut into 2, 3, ... stages of contiguous layers, earlier stages one layer
    longer: `h.[0-1] | h.2 | h.3`.
    """
    cuts: dict[int, Cut] = {}
    for num_stages in range(2, num_layers + 1):
        small, more = divmod(num_layers, num_stages)
        starts = [index * small + min(index, more) for index in range(num_stages + 1)]
        ranges = [(start, end - 1) for start, end in zip(starts, starts[1:])]
        cuts[num_stages] = tuple(
            (f"{prefix}.{first}" if first == last else f"{prefix}.[{first}-{last}]",)
            for first, last in ranges
        )
    return cuts


# ---- models of transformers
# -------------------------------------------------------------------------------------------

SIZES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "vocab_size": NUM_WORDS,
}
"""the names that most families use"""
FEED_FORWARD = {"intermediate_size": 2 * WIDTH}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
POSITIONS = {"max_position_embeddings": 32}
SPECIAL_WORDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ENCODER = {**SIZES, **FEED_FORWARD, **NO_DROPOUT, **POSITIONS}
DECODER = {**SIZES, **FEED_FORWARD, **POSITIONS, **SPECIAL_WORDS}
IMAGE = {"image_size": 16, "patch_size": 4, "num_labels": NUM_CLASSES}
HALF = NUM_LAYERS // 2
"""layers of an encoder and of a decoder where a model has both"""


def hugging_face(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """Builds `transformers.model(transformers.config(**settings))`; imports transformers only then
    (4 s).
    """

    def make() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**settings))

    return make


def encoder_decoder_cuts(encoder: str, decoder: str, layers: str) -> dict[int, Cut]:
    """2: encoder | decoder. 3: encoder | decoder | decoder. 4: two and two."""
    first = f"{decoder}.{layers}.0"
    second = f"{decoder}.{layers}.1"
    return {
        2: ((encoder,), (decoder,)),
        3: ((encoder,), (first,), (second,)),
        4: ((f"{encoder}.{layers}.0",), (f"{encoder}.{layers}.1",), (first,), (second,)),
    }


BART_SIZES = {
    "d_model": WIDTH, "encoder_layers": HALF, "decoder_layers": HALF, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 2 * WIDTH, "decoder_ffn_dim": 2 * WIDTH, "vocab_size": NUM_WORDS, "max_position_embeddings": 32, "dropout": 0.0,
    **SPECIAL_WORDS, "decoder_start_token_id": 2, "forced_eos_token_id": 2,
}  # fmt: skip

MAIN: tuple[Case, ...] = (
    Case("chain", Chain, vector_batch, stages=layer_cuts("layers")),
    Case("branches", Branches, vector_batch, class_loss, layer_cuts("blocks")),
    Case("tied", lambda: LanguageModel(tied=True), language_batch, stages=layer_cuts("blocks")),
    Case("ignored_labels", LanguageModel, uneven_batch, stages=layer_cuts("blocks")),
    Case("two_terms", TwoTerms, two_term_batch, two_term_loss, layer_cuts("blocks")),
    Case("lora", lora_model, language_batch, stages=layer_cuts("blocks")),
    Case("complex", Spectra, vector_batch, stages=layer_cuts("blocks")),
    Case("batch_norm", ResidualNet, image_batch, stages=layer_cuts("blocks"), batch_statistics=True),
    Case(
        "gpt2",
        hugging_face(
            "GPT2LMHeadModel", "GPT2Config", n_embd=WIDTH, n_layer=NUM_LAYERS, n_head=4, vocab_size=NUM_WORDS, n_positions=32,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **SPECIAL_WORDS,
        ),
        language_batch,
        stages=layer_cuts("transformer.h"),
    ),
    Case("bert", hugging_face("BertForMaskedLM", "BertConfig", **ENCODER), masked_batch, stages=layer_cuts("bert.encoder.layer")),
    Case(
        "bert_pretraining", hugging_face("BertForPreTraining", "BertConfig", **ENCODER), sentence_pair_batch,
        stages=layer_cuts("bert.encoder.layer"),
    ),
    Case(
        "llama", hugging_face("LlamaForCausalLM", "LlamaConfig", **DECODER, num_key_value_heads=2), language_batch,
        stages=layer_cuts("model.layers"),
    ),
    Case("vit", hugging_face("ViTForImageClassification", "ViTConfig", **ENCODER, **IMAGE), image_batch, stages=layer_cuts("vit.layers")),
    Case(
        "t5",
        hugging_face(
            "T5ForConditionalGeneration", "T5Config", d_model=WIDTH, d_kv=8, d_ff=2 * WIDTH, num_layers=HALF, num_heads=4,
            vocab_size=NUM_WORDS, dropout_rate=0.0, decoder_start_token_id=0, **SPECIAL_WORDS,
        ),
        language_batch,
        stages=encoder_decoder_cuts("encoder", "decoder", "block"),
    ),
)  # fmt: skip

BREADTH: tuple[Case, ...] = (
    # decoders
    Case(
        "gpt_neo",
        hugging_face(
            "GPTNeoForCausalLM", "GPTNeoConfig", hidden_size=WIDTH, num_layers=NUM_LAYERS, num_heads=4, vocab_size=NUM_WORDS,
            attention_types=[[["global", "local"], 2]], window_size=4, max_position_embeddings=32, **SPECIAL_WORDS,
        ),
        language_batch, stages=layer_cuts("transformer.h"),
    ),
    Case("gpt_neox", hugging_face("GPTNeoXForCausalLM", "GPTNeoXConfig", **DECODER), language_batch, stages=layer_cuts("gpt_neox.layers")),
    Case(
        "opt", hugging_face("OPTForCausalLM", "OPTConfig", **DECODER, ffn_dim=2 * WIDTH, word_embed_proj_dim=WIDTH, dropout=0.0),
        language_batch, stages=layer_cuts("model.decoder.layers"), layer_drop=True,
    ),
    Case(
        "bloom",
        hugging_face(
            "BloomForCausalLM", "BloomConfig", hidden_size=WIDTH, n_layer=NUM_LAYERS, n_head=4, vocab_size=NUM_WORDS, **SPECIAL_WORDS,
        ),
        language_batch, stages=layer_cuts("transformer.h"),
    ),
    Case(
        "mixtral",  # `grouped_mm`, the default, has no float64
        hugging_face(
            "MixtralForCausalLM", "MixtralConfig", **DECODER, num_key_value_heads=2, num_local_experts=5, num_experts_per_tok=2,
            experts_implementation="batched_mm",
        ),
        language_batch, stages=layer_cuts("model.layers"),
    ),
    Case(
        "mistral", hugging_face("MistralForCausalLM", "MistralConfig", **DECODER, num_key_value_heads=2, sliding_window=6), language_batch,
        stages=layer_cuts("model.layers"),
    ),
    Case(
        "qwen2", hugging_face("Qwen2ForCausalLM", "Qwen2Config", **DECODER, num_key_value_heads=2), language_batch,
        stages=layer_cuts("model.layers"),
    ),
    Case(
        "gemma", hugging_face("GemmaForCausalLM", "GemmaConfig", **DECODER, num_key_value_heads=1, head_dim=8), language_batch,
        stages=layer_cuts("model.layers"),
    ),
    Case(
        "phi", hugging_face("PhiForCausalLM", "PhiConfig", **DECODER, resid_pdrop=0.0, embd_pdrop=0.0), language_batch,
        stages=layer_cuts("model.layers"),
    ),
    Case(
        "falcon", hugging_face("FalconForCausalLM", "FalconConfig", **SIZES, **SPECIAL_WORDS), language_batch,
        stages=layer_cuts("transformer.h"),
    ),
    Case(
        "mamba", hugging_face("MambaForCausalLM", "MambaConfig", **SIZES, state_size=4, **SPECIAL_WORDS), language_batch,
        stages=layer_cuts("backbone.layers"),
    ),
    # encoders
    Case(
        "roberta", hugging_face("RobertaForMaskedLM", "RobertaConfig", **ENCODER), masked_batch,
        stages=layer_cuts("roberta.encoder.layer"),
    ),
    Case(
        "distilbert",
        hugging_face(
            "DistilBertForMaskedLM", "DistilBertConfig", dim=WIDTH, n_layers=NUM_LAYERS, n_heads=4, hidden_dim=2 * WIDTH,
            vocab_size=NUM_WORDS, max_position_embeddings=32, dropout=0.0, attention_dropout=0.0,
        ),
        masked_batch, stages=layer_cuts("distilbert.transformer.layer"),
    ),
    Case(
        "electra",
        hugging_face(
            "ElectraForSequenceClassification", "ElectraConfig", **ENCODER, embedding_size=16, num_labels=NUM_CLASSES,
            classifier_dropout=0.0,
        ),
        class_batch, stages=layer_cuts("electra.encoder.layer"),
    ),
    Case(
        "albert",  # one layer called four times
        hugging_face("AlbertForMaskedLM", "AlbertConfig", **ENCODER, embedding_size=16),
        masked_batch,
        stages={
            2: (("albert.embeddings",), ("albert.encoder",)),
            3: (("albert.embeddings",), ("albert.encoder",), ("predictions",)),
        },
    ),
    Case(
        "deberta_v2",
        hugging_face(
            "DebertaV2ForMaskedLM", "DebertaV2Config", **ENCODER, relative_attention=True, position_buckets=8, pos_att_type=["p2c", "c2p"],
        ),
        masked_batch, stages=layer_cuts("deberta.encoder.layer"),
    ),
    Case(
        "modernbert",
        hugging_face("ModernBertForMaskedLM", "ModernBertConfig", **SIZES, **FEED_FORWARD, **POSITIONS, **SPECIAL_WORDS, local_attention=4),
        masked_batch, stages=layer_cuts("model.layers"),
    ),
    # encoders with decoders
    Case("bart", hugging_face("BartForConditionalGeneration", "BartConfig", **BART_SIZES), language_batch,
         stages=encoder_decoder_cuts("model.encoder", "model.decoder", "layers"), layer_drop=True),
    Case("marian", hugging_face("MarianMTModel", "MarianConfig", **BART_SIZES), language_batch,
         stages=encoder_decoder_cuts("model.encoder", "model.decoder", "layers"), layer_drop=True),
    # vision
    Case(
        "deit", hugging_face("DeiTForImageClassification", "DeiTConfig", **ENCODER, **IMAGE), image_batch,
        stages=layer_cuts("deit.layers"),
    ),
    Case(
        "swin",
        hugging_face(
            "SwinForImageClassification", "SwinConfig", image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4],
            window_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, drop_path_rate=0.0, num_labels=NUM_CLASSES,
        ),
        large_image_batch, stages=layer_cuts("swin.encoder.layers", 2),
    ),
    Case(
        "beit", hugging_face("BeitForImageClassification", "BeitConfig", **ENCODER, **IMAGE, drop_path_rate=0.0), image_batch,
        stages=layer_cuts("beit.layers"),
    ),
    Case(
        "convnext",
        hugging_face(
            "ConvNextForImageClassification", "ConvNextConfig", num_stages=3, hidden_sizes=[8, 16, 32], depths=[1, 1, 1],
            num_labels=NUM_CLASSES, image_size=32,
        ),
        large_image_batch, stages=layer_cuts("convnext.encoder.stages", 3),
    ),
    Case(
        "resnet",
        hugging_face(
            "ResNetForImageClassification", "ResNetConfig", embedding_size=8, hidden_sizes=[8, 16, 32], depths=[1, 1, 1],
            layer_type="basic", num_labels=NUM_CLASSES,
        ),
        large_image_batch, stages=layer_cuts("resnet.encoder.stages", 3), batch_statistics=True,
    ),
    # audio
    Case(
        "ast",
        hugging_face(
            "ASTForAudioClassification", "ASTConfig", **ENCODER, max_length=24, num_mel_bins=16, patch_size=4, frequency_stride=4,
            time_stride=4, num_labels=NUM_CLASSES,
        ),
        spectrum_batch, stages=layer_cuts("audio_spectrogram_transformer.layers"),
    ),
    Case(
        "wav2vec2",
        hugging_face(
            "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", **SIZES, **FEED_FORWARD, conv_dim=(16, 16),
            conv_stride=(5, 2), conv_kernel=(10, 3), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, apply_spec_augment=False,
            layerdrop=0.0, hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0,
            num_labels=NUM_CLASSES, classifier_proj_size=16,
        ),
        audio_batch, stages=layer_cuts("wav2vec2.encoder.layers"), layer_drop=True,
    ),
)  # fmt: skip

DEEP: tuple[Case, ...] = (
    Case("deep_chain", lambda: Chain(12), vector_batch, stages=layer_cuts("layers")),
    Case("deep_branches", lambda: Branches(3), vector_batch, class_loss, layer_cuts("blocks")),
)
"""models with enough layers for 16 chunks"""

CASES: dict[str, Case] = {case.name: case for case in MAIN + BREADTH + DEEP}
"""all of them by name; functions on ranks get the name and look here"""
