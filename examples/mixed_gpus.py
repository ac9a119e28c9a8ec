"""A Hugging Face model on GPUs of three kinds, without a word about parallelism in it.

    python examples/mixed_gpus.py                                     one process, a small model
    whale run -n 4 examples/mixed_gpus.py                             4 CPU ranks: the same losses

    whale plan --cluster examples/mixed_gpus.yaml examples/mixed_gpus.py --large
    whale advise --cluster examples/mixed_gpus.yaml examples/mixed_gpus.py --large
    whale run --emulate examples/mixed_gpus.yaml --stub examples/mixed_gpus.py --large

The last three are about 1.3 B parameters on two RTX 3090, an RTX 4090 and four V100, and need no
GPU: what would run where, which other plans there are and what each card adds, and a rehearsal by 7
processes that take the time that the GPUs would.

It prints

    step 1/8  loss 4.8559
    ...
    step 8/8  loss 3.8487
"""

from __future__ import annotations

import argparse

import torch
import transformers

import whale as wh


def model_config(is_large: bool) -> transformers.GPT2Config:
    """GPT-2 with 1.3 B parameters, or one that trains on a laptop."""
    size = {"n_layer": 24, "n_embd": 2048, "n_head": 16, "vocab_size": 50257, "n_positions": 512}
    if not is_large:
        size = {"n_layer": 4, "n_embd": 64, "n_head": 4, "vocab_size": 128, "n_positions": 64}
    return transformers.GPT2Config(
        **size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, loss_type="ForCausalLM"
    )


def batches(
    number: int, size: int, config: transformers.GPT2Config
) -> list[dict[str, torch.Tensor]]:
    """Counting, from random starts: something that a language model learns fast."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(number):
        start = torch.randint(config.vocab_size, (size, 1), generator=generator)
        words = (start + torch.arange(config.n_positions)) % config.vocab_size
        made.append({"input_ids": words, "labels": words.clone()})
    return made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--large", action="store_true", help="1.3 B parameters, 64 x 512 tokens")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    config = model_config(options.large)
    data = batches(options.steps, 64 if options.large else 16, config)

    wh.init({"seed": 1})
    engine = wh.parallelize(
        lambda: transformers.GPT2LMHeadModel(config),  # built on `meta`: nobody holds all weights
        data[0],
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    )
    for step, batch in enumerate(data, start=1):
        result = engine.step(batch)
        if wh.rank() == 0:
            print(f"step {step}/{options.steps}  loss {result.loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
