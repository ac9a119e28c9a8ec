"""`transformers.Trainer` on the ranks of a Whale job. Two lines of a script change:

    from whale.integrations.transformers import WhaleTrainer as Trainer
    trainer = Trainer(model=model, args=args, ..., whale={"num_task_graph": 2})

Every rank runs the stock loop as one process would: samplers, accumulation, schedules, callbacks
and logs are the Trainer's own. Forward, backward, clipping and update are the engine's.
`per_device_train_batch_size` times `gradient_accumulation_steps` is the mini-batch of the whole
job, on any number of ranks: losses are those of the stock script in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from whale import api
from whale.config import Config
from whale.integrations.engine_model import EngineModel, Output, Spread, spread
from whale.integrations.one_process import (
    follow_one_process,
    pretend_one_process,
    sample_of,
)
from whale.integrations.optimizers import follow
from whale.runtime.engine import Engine

CHECKPOINT = "whale"
"""folder of the engine's checkpoint inside one of the Trainer's"""
SCHEDULER = "scheduler.pt"
NUM_ITEMS = "num_items_in_batch"


class WhaleTrainer(transformers.Trainer):
    """A Trainer whose model is spread over all ranks. `whale`: settings as for `wh.init`."""

    def __init__(
        self, *arguments: Any, whale: Config | Mapping[str, Any] | None = None, **named: Any
    ) -> None:
        given = whale.to_dict() if isinstance(whale, Config) else dict(whale or {})
        api.configure(**given)
        self._spread: Spread | None = None
        self._loader: Any = None
        super().__init__(*arguments, **named)
        # perhaps that of a subclass; the loop calls the engine in its place
        self._own_compute_loss: Callable[..., Tensor] = getattr(self, "compute_loss")  # noqa: B009
        self.__dict__["compute_loss"] = self._loss_of_engine
        refused = {
            "deepspeed": self.is_deepspeed_enabled,
            "fsdp": self.is_fsdp_enabled,
            "auto_find_batch_size": self.args.auto_find_batch_size,
            "torch_compile": self.args.torch_compile,
            "bf16_full_eval": self.args.bf16_full_eval,
            "fp16_full_eval": self.args.fp16_full_eval,
            "neftune_noise_alpha": self.args.neftune_noise_alpha is not None,
        }
        for name, is_set in refused.items():
            if is_set:
                raise ValueError(
                    f"WhaleTrainer: TrainingArguments({name}=...) does what the plan decides "
                    f"here, or what it cannot follow. Try: leave {name} out"
                )

    @property
    def engine(self) -> Engine:
        """The engine; made when training or the first evaluation begins."""
        if self._spread is None:
            raise ValueError("WhaleTrainer: there is no engine yet. Try: trainer.train() first")
        return self._spread.engine

    # ---- one process

    def create_accelerator_and_postprocess(self) -> None:
        self.args.device  # noqa: B018 (joins the process group before its state is changed)
        pretend_one_process()
        self.args._n_gpu = min(self.args._n_gpu, 1)  # no DataParallel
        super().create_accelerator_and_postprocess()
        follow_one_process(self.accelerator)

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        start = getattr(loader, "worker_init_fn", None)
        if start is not None and "rank" in getattr(start, "keywords", {}):
            start.keywords["rank"] = 0  # workers of all ranks draw the same random numbers
        return loader

    # ---- the engine

    def create_optimizer(self, model: Any = None) -> Any:
        """Of the whole model; made again for this rank's part when the model is spread. A subclass
        may have another.
        """
        if self._spread is not None and self.optimizer is None:
            raise ValueError(
                "WhaleTrainer: model_init makes another model, but the ranks have one already, of "
                "an earlier train() or evaluate(). Try: a new trainer for each training"
            )
        return super().create_optimizer(model)

    def _start(self) -> Spread:
        """Spreads the model over the ranks."""
        args = self.args
        precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "default"
        api.configure(precision=precision, seed=args.seed, clip_grad_norm=None)
        sample = self._batch(sample_of(self._loader, self._sample_size()))
        if not self._has_labels(sample):
            raise ValueError(
                "WhaleTrainer: the first batch that the ranks are given has no "
                f"{' or '.join(map(repr, self.label_names))}, and the model is captured with its "
                "loss. Try: trainer.train() or trainer.evaluate() before trainer.predict() on "
                "samples without labels"
            )
        made: torch.optim.Optimizer = self.__dict__["optimizer"]
        self._spread = spread(self.model, sample, made, self._loss)
        self.optimizer = self._spread.optimizer
        if self.lr_scheduler is not None:  # the script's own
            follow(self.lr_scheduler, self._spread.optimizer)
        self.model_wrapped = self._spread.model
        return self._spread

    def _sample_size(self) -> int:
        return int(getattr(self._loader, "total_batch_size", 0) or self._train_batch_size)

    def _batch(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """What the engine is given: the collator's batch, and how many labels count in it."""
        prepared = dict(self._prepare_inputs(inputs))
        num_items = self._get_num_items_in_batch([prepared], self.args.device)
        return _with_items(prepared, num_items)

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        if self._spread is None:
            if self.optimizer is None:
                self.create_optimizer()
            return self._start().model
        if self.optimizer is not self._spread.optimizer:
            raise ValueError(
                f"WhaleTrainer: create_optimizer made another {type(self.optimizer).__name__}, but "
                "the ranks have one already, of an earlier train() or evaluate(). "
                "Try: make it if self.optimizer is None, as the stock Trainer does, or a new "
                "trainer for each training"
            )
        return self._spread.model

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume: Any) -> Any:
        self._loader = train_dataloader
        return super()._prepare_for_training(max_steps, train_dataloader, resume)

    def evaluation_loop(self, dataloader: Any, *arguments: Any, **named: Any) -> Any:
        self._loader = self._loader or dataloader
        return super().evaluation_loop(dataloader, *arguments, **named)

    # ---- loss

    def _loss(self, output: Any, batch: Mapping[str, Any]) -> Tensor:
        """The Trainer's loss (label smoothing, `compute_loss_func`, a subclass's `compute_loss`)
        of what the model has given. Captured with the model.
        """
        if not self._has_labels(batch):
            raise KeyError(self.label_names[0])  # a prediction: outputs only
        inputs = {key: value for key, value in batch.items() if key != NUM_ITEMS}
        accumulates = self.args.gradient_accumulation_steps > 1 and self.model_accepts_loss_kwargs
        labels = tuple(self.label_names)
        needs_items = accumulates and NUM_ITEMS in batch
        model: Any = _Computed(self.model, output, batch, labels, needs_items)
        return self._own_compute_loss(model, inputs, num_items_in_batch=batch.get(NUM_ITEMS))

    def _has_labels(self, batch: Mapping[str, Any]) -> bool:
        return not self.label_names or any(name in batch for name in self.label_names)

    def _loss_of_engine(
        self,
        model: EngineModel,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        output: Output = model.run(_with_items(dict(inputs), num_items_in_batch))
        return (output.loss, output) if return_outputs else output.loss

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        model.with_outputs = not prediction_loss_only
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def _clip_grad_norm(self, model: Any) -> Tensor:
        return torch.tensor(self.engine.clip_grad_norm(self.args.max_grad_norm))

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self.engine.clip_grad_norm(float("inf")) if grad_norm is None else grad_norm

    # ---- checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes what `from_pretrained` reads. All ranks must call it."""
        if self._spread is None:
            super().save_model(output_dir, _internal_call)
            return
        folder = Path(output_dir or self.args.output_dir)
        collators = getattr(self.data_collator, "tokenizer", None)
        self.engine.save_pretrained(folder, self.processing_class or collators)
        if self.args.should_save:
            torch.save(self.args, folder / "training_args.bin")
        if self.args.push_to_hub and not _internal_call and self.args.should_save:
            self.push_to_hub(commit_message="Model save")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.engine.save(Path(output_dir) / CHECKPOINT).wait()
        if self.args.should_save and self.lr_scheduler is not None:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # the same on all ranks
            super()._save_rng_state(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not _has_engine(resume_from_checkpoint):  # of the stock Trainer: weights only
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if not _has_engine(checkpoint):
            raise ValueError(
                f"{checkpoint} was not saved by WhaleTrainer: it has no state of the optimizer "
                "that other ranks can read. Try: from_pretrained(...) on it and a new run, or "
                "save_only_model=True where no state is wanted"
            )
        self.engine.load(Path(checkpoint) / CHECKPOINT)
        saved = torch.load(Path(checkpoint) / SCHEDULER, weights_only=True)
        self.lr_scheduler.load_state_dict(saved)

    def _load_best_model(self) -> None:
        if self.args.save_only_model:
            raise ValueError(
                "WhaleTrainer: load_best_model_at_end needs whole checkpoints. "
                "Try: save_only_model=False"
            )
        self.engine.load(Path(str(self.state.best_model_checkpoint)) / CHECKPOINT)


class _Computed:
    """The model in the eyes of `compute_loss`, when its output has been computed already."""

    def __init__(
        self,
        model: torch.nn.Module,
        output: Any,
        batch: Mapping[str, Any],
        label_names: tuple[str, ...],
        needs_items: bool,
    ) -> None:
        self._model = model
        self._output = output
        self._batch = batch
        self._label_names = (*label_names, "labels")
        self._needs_items = needs_items
        """whether the model's loss is another one without the number of labels of all batches"""
        self._was_called = False

    def __call__(self, **inputs: Any) -> Any:
        if self._was_called:
            raise ValueError(
                "compute_loss calls the model 2 times, but the ranks run it once for each batch: "
                "dropout would be the same in both. Try: use the output of the first call"
            )
        self._was_called = True
        for name, value in inputs.items():
            if value is not self._batch.get(name):
                raise ValueError(
                    f"compute_loss calls the model with another '{name}' than the collator gives: "
                    "the ranks run the model on the batch as it comes. "
                    "Try: change it in the collator or in the model's forward"
                )
        self._refuse_missing(inputs)
        return self._output

    def _refuse_missing(self, inputs: Mapping[str, Any]) -> None:
        """Refuses a call without what changes the model's output."""
        for name in signature(self._model.forward).parameters:
            # without labels a model gives the same outputs, and no loss
            is_missing = name in self._batch and name not in inputs
            if is_missing and name not in (*self._label_names, NUM_ITEMS):
                raise ValueError(
                    f"compute_loss calls the model without '{name}', which the collator gives: "
                    "the ranks run the model on the batch as it comes. "
                    "Try: leave it out in the collator"
                )
        has_labels = any(name in inputs for name in self._label_names)
        if self._needs_items and has_labels and NUM_ITEMS not in inputs:
            raise ValueError(
                f"compute_loss calls the model with labels and without {NUM_ITEMS}: with "
                "gradient_accumulation_steps the ranks divide the loss by the labels of all "
                f"batches. Try: model(**inputs, {NUM_ITEMS}={NUM_ITEMS}), or leave the labels out "
                "of the call"
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _with_items(inputs: dict[str, Any], num_items: Any) -> dict[str, Any]:
    if num_items is None:
        return inputs
    # a tensor, so that another number is no other capture
    return {**inputs, NUM_ITEMS: torch.as_tensor(num_items)}


def _has_engine(checkpoint: str) -> bool:
    return (Path(checkpoint) / CHECKPOINT).is_dir()
