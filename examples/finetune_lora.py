"""Fine-tune a Hugging Face model from safetensors with LoRA, over any number of ranks.

    python examples/finetune_lora.py                         one process
    whale run -n 2 examples/finetune_lora.py                 two stages: the same losses
    whale run --emulate examples/mixed_gpus.yaml --stretch 100 examples/finetune_lora.py
                                                             the same on emulated GPUs of 3 kinds

The weights go straight from the safetensors file into the rank that needs them; the frozen ones get
no gradient, no optimizer state and no message. Point `--weights` at a folder that
`model.save_pretrained` wrote. Without it a small model is made first, since this example downloads
nothing. It prints

    step 0: loss 4.208632
    step 5: loss 4.183129
    ...
    step 29: loss 3.967858
    trained 4096 numbers on rank 0; the whole model is in runs/finetune_lora/model.safetensors
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

import whale as wh

RANK_OF_UPDATE = 4
SEQUENCE = 16
VOCABULARY = 64
BATCH = 16


class LoRA(nn.Module):
    """A frozen linear layer plus a trained update of low rank: y = W x + B A x."""

    def __init__(self, base: nn.Module, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.empty(num_inputs, RANK_OF_UPDATE))
        self.up = nn.Parameter(torch.empty(RANK_OF_UPDATE, num_outputs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.down, std=1 / math.sqrt(self.down.shape[0]))
        nn.init.zeros_(self.up)  # the update starts as nothing

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down @ self.up


def config() -> transformers.GPT2Config:
    return transformers.GPT2Config(
        n_layer=4,
        n_embd=64,
        n_head=4,
        vocab_size=VOCABULARY,
        n_positions=SEQUENCE,
        bos_token_id=None,
        eos_token_id=None,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    )


def build() -> nn.Module:
    """GPT-2 with all weights frozen but the updates of its attention projections. Called on every
    rank, allocates nothing.
    """
    model = transformers.GPT2LMHeadModel(config()).requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = LoRA(block.attn.c_attn, model.config.n_embd, 3 * model.config.n_embd)
    return model


def stored_name(name: str) -> str | None:
    """Name in the safetensors file of a weight of our model; None for the updates, which
    are new.
    """
    return None if name.endswith((".down", ".up")) else name.replace(".base.", ".")


def init(module: nn.Module, name: str) -> None:
    """Initial values of what the file does not hold; the rest is overwritten by it."""
    if isinstance(module, LoRA):
        module.reset_parameters()
    else:
        for parameter in module.parameters(recurse=False):
            nn.init.zeros_(parameter)


def batches(num_steps: int) -> list[dict[str, Tensor]]:
    """Sequences that count up from a random start: something the small model can still learn."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(0, VOCABULARY, (num_steps, BATCH, 1), generator=generator)
    words = (starts + torch.arange(SEQUENCE)) % VOCABULARY
    return [{"input_ids": step, "labels": step} for step in words]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", type=Path, default=None)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    # which layers go where is Whale's affair; a model this small would be fastest on one device
    stages = {"num_task_graph": 2} if wh.num_devices() > 1 else {}
    wh.init({"num_micro_batch": 4, **stages})
    weights = options.weights or Path("runs/finetune_lora/pretrained")
    if not weights.exists() and wh.rank() == 0:
        torch.manual_seed(0)
        transformers.GPT2LMHeadModel(config()).save_pretrained(weights)
    data = batches(options.steps)
    engine = wh.parallelize(
        build,
        data[0],
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        init=init,
        weights=wh.Pretrained(weights, stored_name),
    )
    for step, batch in enumerate(data):
        loss = engine.step(batch).loss
        if wh.rank() == 0 and (step % 5 == 0 or step == len(data) - 1):
            print(f"step {step}: loss {loss:.6f}", flush=True)
    engine.export("runs/finetune_lora/model.safetensors")
    if wh.rank() == 0:
        num_trained = sum(p.numel() for name, p in engine.named_parameters())
        print(
            f"trained {num_trained} numbers on rank 0; the whole model is in "
            "runs/finetune_lora/model.safetensors"
        )


if __name__ == "__main__":
    main()
