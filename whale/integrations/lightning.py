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
import logging
import shutil
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from whale import api
from whale.config import Config
from whale.devices import find_device
from whale.integrations.engine_model import Spread, spread
from whale.integrations.optimizers import EngineOptimizer, follow
from whale.runtime.engine import Engine

logger = logging.getLogger("whale")

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
        self._spread: Spread | None = None
        self._loaded: Path | None = None
        self._whole = contextlib.ExitStack()
        self._failed = False
        self._logged = _LoggedNames()

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
        return self.engine.ranks.from_first(obj) if self._spread is not None else obj

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
                "WhaleStrategy: automatic_optimization=False is not there. "
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

    def training_step(self, batch: Any, *_: Any) -> Any:
        if self._spread is None:
            self._start(batch)
        assert self._spread is not None
        output = self._spread.model.run(batch)
        loss = output if isinstance(output, Tensor) else output["loss"]
        for name, options in self._logged.options.items():
            self.lightning_module.log(name, loss.detach(), **options)
        return output

    def _start(self, batch: Any) -> None:
        """Spreads the module over the ranks, with this batch as its sample."""
        precision = PRECISIONS.get(str(self.precision_plugin.precision))
        if precision is None:
            raise ValueError(
                f"WhaleStrategy: precision={self.precision_plugin.precision!r} is not there. "
                f"Try: one of {', '.join(PRECISIONS)}"
            )
        api.configure(precision=precision, clip_grad_norm=None)
        (optimizer,) = self.optimizers
        step = _TrainingStep(self.lightning_module, isinstance(batch, Tensor), self._logged)
        self._spread = spread(step, batch, optimizer.own)
        # a rank may have been given the graph of rank 0, and have run nothing
        self._logged.options = self.engine.ranks.from_first(self._logged.options)
        optimizer.engine = self._spread.engine
        optimizer.own = self._spread.optimizer.own
        if self._loaded is not None:
            self.engine.load(self._loaded)
            self._loaded = None

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
            self._spread = None
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
        if folder.is_dir():
            self._loaded = folder
        elif self.lightning_module.trainer.training:
            raise ValueError(
                f"{checkpoint_path} has no {folder.name} beside it, where the state of the "
                "optimizer would be: it was saved by another strategy. "
                "Try: load_from_checkpoint for the weights alone, and a new run"
            )
        return super().load_checkpoint(checkpoint_path, *arguments, **named)

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_folder(filepath), ignore_errors=True)


class _LoggedNames:
    """Names under which `training_step` logs its loss, with the options.

    The strategy holds it, the module only a weak reference: what forward leaves on a model is taken
    back after a capture.
    """

    def __init__(self) -> None:
        self.options: dict[str, dict[str, Any]] = {}


class _TrainingStep(torch.nn.Module):
    """A LightningModule whose forward is its `training_step`: what the engine captures. It has the
    very modules and tensors of the LightningModule, under the same names.
    """

    def __init__(self, module: Any, is_single: bool, logged: _LoggedNames) -> None:
        super().__init__()
        self._logged = weakref.ref(logged)
        self._lightning = [module]  # in a list: no submodule
        for stores in ("_modules", "_parameters", "_buffers"):
            self.__dict__[stores] = module.__dict__[stores]
        self._non_persistent_buffers_set = module._non_persistent_buffers_set
        self.training = module.training
        self.is_single = is_single

    def forward(self, *batch: Any, **named: Any) -> Any:
        given: Any = named or (batch[0] if self.is_single else batch)
        with self._recording() as calls:
            output = self._lightning[0].training_step(given, 0)
        loss = output if isinstance(output, Tensor) else output["loss"]
        logged = self._logged()
        assert logged is not None, "the strategy holds it"
        for name, value, options in calls:
            if value is loss:
                logged.options[name] = options
            else:
                logger.warning(
                    "training_step logs %r, which is not the loss: it is not known on all ranks "
                    "and left out. Try: log it in validation_step",
                    name,
                )
        return output

    @contextlib.contextmanager
    def _recording(self) -> Iterator[list[tuple[str, Any, dict[str, Any]]]]:
        """Takes what is logged meanwhile: in a capture there are no values."""
        calls: list[tuple[str, Any, dict[str, Any]]] = []

        def log(name: str, value: Any, **options: Any) -> None:
            calls.append((name, value, options))

        def log_dict(values: Mapping[str, Any], **options: Any) -> None:
            for name, value in values.items():
                log(name, value, **options)

        attributes = self._lightning[0].__dict__
        attributes.update(log=log, log_dict=log_dict)
        try:
            yield calls
        finally:
            del attributes["log"], attributes["log_dict"]


def _no_clipping_by_value(*_: Any) -> None:
    raise ValueError(
        'WhaleStrategy: gradient_clip_algorithm="value" is not there. Try: "norm", the default'
    )


def _folder(path: Any) -> Path:
    return Path(f"{path}{CHECKPOINT}")
