"""Fine-tune a pretrained folder with LoRA, QLoRA or in full, by the Trainer of `transformers`, on
devices with different memories.

    python examples/finetune_trainer.py                       one process
    whale run -n 2 examples/finetune_trainer.py               two stages
    whale plan --cluster examples/unlike_memories.yaml examples/finetune_trainer.py

The Trainer is `WhaleTrainer`, and that is all that differs from a stock script. `--weights` names a
folder of `save_pretrained`; without it a small one is made, since this example downloads nothing.
`--quantize` holds the frozen weights as 8-bit numbers with a scale for each row (QLoRA), in plain
PyTorch. Afterwards the adapter alone is saved, and loaded again to generate on rank 0. Beside the log of
the Trainer it prints

    ...
    evaluation loss 3.9118
    ...
    continues 5 6 7 with [12, 12, 12, 12, 12]

(a model with random weights learns little by an adapter alone).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.utils.data import Dataset

import whale as wh
from whale.integrations.transformers import WhaleTrainer

SEQUENCE = 16
VOCABULARY = 64
LARGEST = 127
"""of an 8-bit number with a sign"""


class Quantized(nn.Module):
    """A frozen linear layer whose weight is stored as 8-bit numbers: W = scale * q, row by row."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.in_features = base.in_features
        self.out_features = base.out_features
        weight = base.weight.detach()
        scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / LARGEST
        self.register_buffer("numbers", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = base.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.numbers.to(x.dtype) * self.scale, self.bias)


class CountingUp(Dataset[dict[str, Tensor]]):
    """Sequences that count up from a random start."""

    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        starts = torch.randint(0, VOCABULARY, (num_samples, 1), generator=generator)
        self.words = (starts + torch.arange(SEQUENCE)) % VOCABULARY

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return {"input_ids": self.words[place], "labels": self.words[place]}


def small_folder(folder: Path) -> None:
    """A model for those who have none at hand."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=4 * SEQUENCE,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def adapted(folder: Path, with_quantize: bool) -> Any:
    """The pretrained model with a LoRA adapter; the same on every rank."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    made = get_peft_model(model, lora)
    if with_quantize:  # around the frozen weights only: the adapter stays as it is
        for module in made.modules():
            base = getattr(module, "base_layer", None)
            if isinstance(base, nn.Linear):
                module.base_layer = Quantized(base)
    return made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", type=Path, default=None)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--quantize", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/finetune_trainer"))
    options = parser.parse_args()
    wh.init()
    weights = options.weights or options.out / "pretrained"
    if not weights.exists() and wh.rank() == 0:
        small_folder(weights)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    args = transformers.TrainingArguments(
        output_dir=str(options.out),
        per_device_train_batch_size=16,
        max_steps=options.steps,
        learning_rate=1e-2,
        warmup_steps=3,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.accelerator.is_available(),
    )
    stages = {"num_task_graph": 2, "num_micro_batch": 4} if wh.num_devices() > 1 else {}
    trainer = WhaleTrainer(
        model=adapted(weights, options.quantize),
        args=args,
        train_dataset=CountingUp(256),
        eval_dataset=CountingUp(32),
        whale=stages,
    )
    trainer.train()
    print(f"evaluation loss {trainer.evaluate()['eval_loss']:.4f}", flush=True)
    trainer.engine.save_pretrained(options.out / "adapter")
    if wh.rank() == 0 and not options.quantize:
        base = transformers.AutoModelForCausalLM.from_pretrained(weights)
        model = PeftModel.from_pretrained(base, options.out / "adapter")
        start = torch.tensor([[5, 6, 7]])
        words = model.generate(input_ids=start, max_new_tokens=5, do_sample=False)
        print(f"continues 5 6 7 with {words[0, 3:].tolist()}", flush=True)


if __name__ == "__main__":
    main()
