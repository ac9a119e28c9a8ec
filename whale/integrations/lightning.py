"""Lightning on the ranks of a Whale job. Two lines of a script change:

    from whale.integrations.lightning import WhaleStrategy
    trainer = Trainer(..., strategy=WhaleStrategy(whale={"num_task_graph": 2}), devices=1)

`training_step` is captured with its loss, and runs on all ranks as the plan says; loops, schedules,
accumulation, callbacks and loggers are Lightning's own, as in one process. Of what `training_step`
logs, the loss is known on every rank. Validation, test and prediction run on copies of the whole
model. The loader's batch size is that of the whole job: losses are those of one process.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from whale import api
from whale.config import Config
from whale.devices import find_device
from whale.integrations.engine_model import Spread, spread
from whale.integrations.optimizers import EngineOptimizer, follow
from whale.integrations.training_step import Noted, TrainingStep
from whale.runtime.engine import Engine
from whale.session import ranks_of_job, session

CHECKPOINT = ".whale"
"""added to the name of a checkpoint: folder with that of the engine"""
PRECISIONS = {
    "32-true": "default",
    "64-true": "default",
    "bf16-true": "default",
    "16-true": "default",
    "bf16-mixed": "bf16",
    "16-mixed": "fp16",
}


class WhaleStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """Spreads the LightningModule over all ranks. `whale`: settings as for `wh.init`."""

    strategy_name = "whale"

    def __init__(self, whale: Config | Mapping[str, Any] | None = None, **named: Any) -> None:
        given = whale.to_dict() if isinstance(whale, Config) else dict(whale or {})
        config = api.configure(**given)
        super().__init__(find_device(config.device).type, **named)
        self.global_rank = api.rank()
        # loggers of other ranks write nothing; Lightning has asked for RANK when it was imported
        rank_zero_only.rank = self.global_rank
        self._spread: Spread | None = None
        self._step: TrainingStep | None = None
        self._loaded: Path | None = None
        self._whole = contextlib.ExitStack()
        self._failed = False
        self._noted = Noted()

    @property
    def engine(self) -> Engine:
        """The engine; made with the first batch of training."""
        if self._spread is None:
            raise ValueError("WhaleStrategy: there is no engine yet. Try: trainer.fit first")
        return self._spread.engine

    @property
    def is_global_zero(self) -> bool:
        return api.rank() == 0

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        # folders of loggers and checkpoints are agreed on before there is an engine
        is_planned = session.num_devices is not None  # by `whale plan`: there are no ranks
        return obj if is_planned else ranks_of_job().from_first(obj)

    def barrier(self, *_: Any, **__: Any) -> None:
        if dist.is_initialized():
            dist.barrier()

    def model_to_device(self) -> None:
        """Nothing: the engine takes each rank's part."""

    # ---- training

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        made: list[torch.optim.Optimizer] = getattr(self, "optimizers")  # noqa: B009
        if len(made) != 1:
            raise ValueError(
                f"WhaleStrategy: configure_optimizers gave {len(made)} optimizers, and "
                "needs one. Try: one optimizer with parameter groups"
            )
        if not self.lightning_module.automatic_optimization:
            raise ValueError(
                "WhaleStrategy: automatic_optimization=False is not supported. "
                "Try: automatic optimization, or engine.forward_backward of whale itself"
            )
        optimizer = EngineOptimizer(None, made[0])
        self.optimizers = [optimizer]
        for config in self.lr_scheduler_configs:
            follow(config.scheduler, optimizer)

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        plugin = self.precision_plugin
        plugin.clip_grad_by_norm = lambda _, limit: self.engine.clip_grad_norm(limit)
        plugin.clip_grad_by_value = _no_clipping_by_value
        plugin.scaler = None  # the engine scales the loss for fp16 itself

    def training_step(self, batch: Any, *index: Any) -> Any:
        if self._step is None:
            is_single = isinstance(batch, Tensor)
            self._step = TrainingStep(self.lightning_module, is_single, self._noted)
        self._step.note_place(index)
        if self._spread is None:
            self._start(self._step, batch)
        assert self._spread is not None
        output = self._spread.model.run(batch)
        loss = output if isinstance(output, Tensor) else output["loss"]
        self._noted.repeat(self.lightning_module, loss.detach(), batch)
        return output

    def _start(self, step: TrainingStep, batch: Any) -> None:
        """Spreads the module over the ranks, with this batch as its sample."""
        precision = PRECISIONS.get(str(self.precision_plugin.precision))
        if precision is None:
            raise ValueError(
                f"WhaleStrategy: precision={self.precision_plugin.precision!r} is not supported. "
                f"Try: one of {', '.join(PRECISIONS)}"
            )
        api.configure(precision=precision, clip_grad_norm=None)
        (optimizer,) = self.optimizers
        self._spread = spread(step, batch, optimizer.own)
        # a rank may have been given the graph of rank 0, and have run nothing
        self._noted.take(self.engine.ranks.from_first(vars(self._noted)))
        self._refuse_readers()
        optimizer.engine = self._spread.engine
        optimizer.own = self._spread.optimizer.own
        if self._loaded is not None:
            self.engine.load(self._loaded)
            self._loaded = None

    def _refuse_readers(self) -> None:
        """Refuses callbacks that read weights between steps where this rank has not all of them."""
        module = self.lightning_module
        readers = (StochasticWeightAveraging, WeightAveraging)
        for callback in module.trainer.callbacks:
            if isinstance(callback, readers) and any(p.is_meta for p in module.parameters()):
                raise ValueError(
                    f"WhaleStrategy: {type(callback).__name__} reads the weights while the module "
                    "trains, and they lie on several ranks. Try: leave it out, or data "
                    "parallelism, where every rank has all of them"
                )

    # ---- everything else runs on whole copies

    def _gather(self) -> None:
        if self._spread is not None:
            self._whole.enter_context(self.engine.gathered())

    def _spread_again(self) -> None:
        self._whole.close()

    on_validation_start = on_test_start = on_predict_start = _gather
    on_validation_end = on_test_end = on_predict_end = _spread_again

    def on_exception(self, exception: BaseException) -> None:
        self._failed = True  # other ranks may be anywhere: nothing is gathered any more

    def teardown(self) -> None:
        """Gives the module its weights back, whole, on every rank."""
        if self._failed:
            return
        if self._spread is not None:
            self._whole.close()
            self.engine.give_back()
            self._spread = self._step = None
        super().teardown()

    # ---- checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._spread is None:
            state: dict[str, Any] = super().lightning_module_state_dict()
            return state
        return self.engine.full_state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Tensor]:
        return {}  # saved by the engine

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        pass

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self._spread is not None:
            self.engine.save(_folder(filepath)).wait()

    def load_checkpoint(self, checkpoint_path: Any, *arguments: Any, **named: Any) -> Any:
        folder = _folder(checkpoint_path)
        if self.lightning_module.trainer.training:  # a test reads the weights alone
            if not folder.is_dir():
                raise ValueError(
                    f"{checkpoint_path} has no {folder.name} beside it, where the state of the "
                    "optimizer would be: it was saved by another strategy. "
                    "Try: load_from_checkpoint for the weights alone, and a new run"
                )
            self._loaded = folder
        return super().load_checkpoint(checkpoint_path, *arguments, **named)

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_folder(filepath), ignore_errors=True)


def _no_clipping_by_value(*_: Any) -> None:
    raise ValueError(
        'WhaleStrategy: gradient_clip_algorithm="value" is not supported. Try: "norm", the default'
    )


def _folder(path: Any) -> Path:
    return Path(f"{path}{CHECKPOINT}")
