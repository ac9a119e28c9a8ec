"""The model of the benchmarks: a small GPT-2 of `transformers`, whole and as two pipeline stages
for torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging as transformers_logging

NUM_LAYERS = 4
WIDTH = 256
NUM_HEADS = 4
NUM_WORDS = 1000
LEARNING_RATE = 1e-4
SEED = 0


def build(length: int, tied: bool = True) -> GPT2LMHeadModel:
    """The same weights in every process. `tied`: input and output embedding are one tensor, as in
    the published GPT-2.
    """
    transformers_logging.set_verbosity_error()
    torch.manual_seed(SEED)
    config = GPT2Config(
        n_layer=NUM_LAYERS,
        n_embd=WIDTH,
        n_head=NUM_HEADS,
        vocab_size=NUM_WORDS,
        n_positions=length,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,  # training needs no cache; with it torch's side would fill one in vain
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def batch(step: int, batch_size: int, length: int) -> dict[str, Tensor]:
    """Mini-batch number `step`, the same in every process."""
    generator = torch.Generator().manual_seed(SEED + step)
    ids = torch.randint(0, NUM_WORDS, (batch_size, length), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def make_optimizer(parameters: Iterator[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE)


class Stage(nn.Module):
    """Blocks start to stop of the model; the first stage has the embeddings as well, the last one
    the norm and the head.
    """

    def __init__(self, model: GPT2LMHeadModel, start: int, stop: int) -> None:
        super().__init__()
        whole = model.transformer
        self.is_first = start == 0
        self.is_last = stop == NUM_LAYERS
        if self.is_first:
            self.wte = whole.wte
            self.wpe = whole.wpe
        self.blocks = nn.ModuleList(whole.h[start:stop])
        if self.is_last:
            self.ln_f = whole.ln_f
            self.lm_head = model.lm_head

    def forward(self, x: Tensor) -> Tensor:
        """Words in the first stage, else hidden values; logits out of the last stage."""
        if self.is_first:
            positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
            x = self.wte(x) + self.wpe(positions)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x)) if self.is_last else x


def stage(index: int, num_stages: int, length: int) -> Stage:
    """Stage number `index` of as many with the same number of blocks. Input and output embedding
    are two tensors: torch's pipelines do not keep them tied."""
    per_stage = NUM_LAYERS // num_stages
    return Stage(build(length, tied=False), index * per_stage, (index + 1) * per_stage)


def loss_of_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of a causal language model, as in `transformers`: every word predicts the
    next one.
    """
    return F.cross_entropy(logits[:, :-1].reshape(-1, NUM_WORDS), labels[:, 1:].reshape(-1))
