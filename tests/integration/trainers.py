"""A stock `transformers.Trainer` script as a function of its Trainer class, for tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils.data import Dataset

VOCABULARY = 24
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


class Sentences(Dataset[dict[str, Any]]):
    """Sequences of two lengths, each with some labels that do not count."""

    def __init__(self, num_samples: int, lengths: tuple[int, ...] = (7, 9)) -> None:
        generator = torch.Generator().manual_seed(0)
        self.samples = []
        for place in range(num_samples):
            length = lengths[place % len(lengths)]
            words = torch.randint(1, VOCABULARY, (length,), generator=generator)
            labels = words.clone()
            labels[: place % 3] = -100
            self.samples.append({"input_ids": words, "labels": labels})

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, place: int) -> dict[str, Any]:
        return self.samples[place]


def padded(samples: list[dict[str, Tensor]], length: int = 9) -> dict[str, Tensor]:
    """The collator: all sequences of one length."""

    def column(name: str, fill: int) -> Tensor:
        rows = [
            torch.nn.functional.pad(s[name], (0, length - len(s[name])), value=fill)
            for s in samples
        ]
        return torch.stack(rows)

    mask = [torch.arange(length) < len(sample["input_ids"]) for sample in samples]
    return {
        "input_ids": column("input_ids", 0),
        "attention_mask": torch.stack(mask).long(),
        "labels": column("labels", -100),
    }


def classified(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    batch = padded(samples)
    batch["labels"] = batch["input_ids"][:, 0] % 3
    return batch


def model(head: type[transformers.PreTrainedModel]) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=16,
        n_head=2,
        vocab_size=VOCABULARY,
        n_positions=16,
        num_labels=3,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        **NO_DROPOUT,
    )
    return head(config)


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


class Log(transformers.TrainerCallback):
    """What a logging callback is given."""

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.lines.append(dict(logs))


def settings(folder: str | Path, **changes: Any) -> transformers.TrainingArguments:
    chosen: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 20,
        "learning_rate": 1e-2,
        "warmup_steps": 4,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "per_device_eval_batch_size": 4,
    }
    return transformers.TrainingArguments(**{**chosen, **changes})


def language_model(trainer: type[Any], folder: str, named: dict[str, Any], **changes: Any) -> Any:
    """Causal language modelling: losses, gradient norms and learning rates of all steps, and the
    trainer.
    """
    log = Log()
    resume = changes.pop("resume", None)
    made = trainer(
        model=model(transformers.GPT2LMHeadModel),
        args=settings(folder, **changes),
        train_dataset=Sentences(23),
        eval_dataset=Sentences(9),
        data_collator=padded,
        callbacks=[log],
        **named,
    )
    made.train(resume_from_checkpoint=resume)
    return log.lines, made


def classification(trainer: type[Any], folder: str, named: dict[str, Any], **changes: Any) -> Any:
    log = Log()
    chosen = {"eval_strategy": "steps", "eval_steps": 5, **changes}
    made = trainer(
        model=model(transformers.GPT2ForSequenceClassification),
        args=settings(folder, **chosen),
        train_dataset=Sentences(23),
        eval_dataset=Sentences(9),
        data_collator=classified,
        compute_metrics=accuracy,
        callbacks=[log],
        **named,
    )
    made.train()
    return log.lines, made


def kept(lines: list[dict[str, float]]) -> list[dict[str, float]]:
    """Logged figures without those that are times."""
    names = ("loss", "grad_norm", "learning_rate", "epoch", "eval_loss", "eval_accuracy")
    found = []
    for line in lines:
        line = {name: line[name] for name in names if name in line}
        if len(line) > 1:
            found.append(line)
    return found


def on_rank() -> int:
    return int(os.environ.get("RANK", "0"))
