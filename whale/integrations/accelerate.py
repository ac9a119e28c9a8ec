"""Hugging Face Accelerate on the ranks of a Whale job. One call of a script changes:

    from whale.integrations.accelerate import prepare
    model, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, loader, scheduler)

in place of `accelerator.prepare(...)`. The loop stays: `accelerator.accumulate`, `backward`,
`clip_grad_norm_`, `save_state` and `load_state` go to the engine. The model's forward must give
the loss (or something with `.loss`), or `loss=` says how it is made of output and batch.

The loader's batch size is that of the whole job, on any number of ranks: losses are those of the
script in one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch.utils.data import DataLoader

from whale import api
from whale.capture.errors import CaptureError
from whale.capture.model_call import Loss
from whale.config import Config
from whale.integrations.engine_model import Spread, spread
from whale.integrations.one_process import as_first_process, follow_one_process, sample_of
from whale.integrations.optimizers import follow

CHECKPOINT = "whale"
"""folder of the engine's checkpoint inside one of Accelerate's"""
PRECISIONS = {"no": "default", "bf16": "bf16", "fp16": "fp16"}


def prepare(
    accelerator: Accelerator,
    *objects: Any,
    loss: Loss | None = None,
    sample: Any = None,
    whale: Config | Mapping[str, Any] | None = None,
) -> Any:
    """What `accelerator.prepare` gives for these objects, in their order, with the model spread
    over all ranks.

    `loss(output, batch)`: for a model whose forward gives no loss; the prepared model then takes
    whole batches and gives the loss. `sample`: a batch to capture the model with; default: one in
    the form of the first loader's. `whale`: settings as for `wh.init`.
    """
    precision = PRECISIONS.get(accelerator.mixed_precision)
    if precision is None:
        raise ValueError(
            f'whale: mixed_precision="{accelerator.mixed_precision}" is not supported. '
            f"Try: one of {', '.join(PRECISIONS)}"
        )
    given = whale.to_dict() if isinstance(whale, Config) else dict(whale or {})
    api.configure(**{**given, "precision": precision, "clip_grad_norm": None})
    follow_one_process(accelerator)
    model = _only(objects, torch.nn.Module, "model")
    optimizer = _only(objects, torch.optim.Optimizer, "optimizer")
    loaders = {id(one): one for one in objects if isinstance(one, DataLoader)}
    if sample is None:
        first = next(iter(loaders.values()), None)
        if first is None:
            raise ValueError(
                "whale: there is no loader to take a sample batch from. Try: prepare(..., sample=)"
            )
        of_sampler = getattr(first.batch_sampler, "batch_size", None)
        sample = sample_of(first, first.batch_size or of_sampler or 1)
    trained = {id(each) for group in optimizer.param_groups for each in group["params"]}
    made = _spread(model, sample, optimizer, loss)
    prepared = _Optimizer(made.optimizer, device_placement=False)
    prepared._is_accelerate_prepared = True
    accelerator._optimizers.append(prepared)
    _redirect(accelerator, made, trained)
    results = []
    for one in objects:
        if one is model:
            results.append(made.model)
        elif one is optimizer:
            results.append(prepared)
        elif id(one) in loaders:
            results.append(accelerator.prepare_data_loader(one))
        elif isinstance(one, torch.optim.lr_scheduler.LRScheduler):
            results.append(accelerator.prepare_scheduler(follow(one, made.optimizer)))
        else:
            results.append(one)
    return results[0] if len(results) == 1 else tuple(results)


def _spread(
    model: torch.nn.Module, sample: Any, optimizer: torch.optim.Optimizer, loss: Loss | None
) -> Spread:
    try:
        return spread(model, sample, optimizer, loss)
    except CaptureError as error:
        if loss is not None:
            raise
        raise CaptureError(
            f"{error}\n  A script that makes the loss of the model's output itself gives it to the "
            "ranks: prepare(..., loss=lambda output, batch: F.cross_entropy(output, batch[1])); "
            "model(*batch).loss is then the loss."
        ) from error


class _Optimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Accelerate's optimizer, which steps where gradients are complete. Its state is saved by the
    engine.
    """

    @property
    def step_was_skipped(self) -> bool:
        return bool(self.optimizer.step_was_skipped)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        pass


def _redirect(accelerator: Accelerator, made: Spread, trained: set[int]) -> None:
    """Lets the accelerator's own calls reach the engine. `trained`: ids of the parameters of the
    optimizer that the script has made.
    """
    engine = made.engine
    stock_load_state = accelerator.load_state

    def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        if norm_type != 2:
            raise ValueError(f"whale: norm_type={norm_type} is not supported. Try: 2")
        one = isinstance(parameters, torch.Tensor)
        given = {id(each) for each in ([parameters] if one else parameters)}
        if not (given >= trained or given >= {id(each) for each in made.model.parameters()}):
            raise ValueError(
                f"whale: clip_grad_norm_ is given {len(given)} parameters, some of those that are "
                "trained: the engine clips all of them by one norm. Try: model.parameters()"
            )
        return torch.tensor(engine.clip_grad_norm(max_norm))

    def clip_grad_value_(*_: Any) -> None:
        raise ValueError("whale: clip_grad_value_ is not supported. Try: clip_grad_norm_")

    def save(_: Any, __: Any, folder: str) -> None:
        engine.save(Path(folder) / CHECKPOINT, data={"step": accelerator.step}).wait()

    def load(_: Any, folder: str) -> None:
        position = _Position()
        if engine.load(Path(folder) / CHECKPOINT, data=position) is None:
            raise ValueError(
                f"{folder} has no checkpoint of the engine: it was saved without "
                "whale.integrations.accelerate. Try: another folder"
            )
        accelerator.step = position.step

    def load_state(*arguments: Any, **named: Any) -> None:
        with as_first_process():
            stock_load_state(*arguments, **named)

    accelerator.load_state = load_state
    accelerator.clip_grad_norm_ = clip_grad_norm_
    accelerator.clip_grad_value_ = clip_grad_value_
    accelerator.get_state_dict = lambda model, unwrap=True: model.state_dict()
    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


class _Position:
    """Batches that the accelerator has counted."""

    step = 0

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = int(state["step"])


def _only(objects: tuple[Any, ...], kind: type[Any], name: str) -> Any:
    found = [one for one in objects if isinstance(one, kind)]
    if len(found) != 1:
        raise ValueError(
            f"whale: prepare was given {len(found)} {name}s, and needs one. "
            f"Try: one call with one {name}; loaders may be several"
        )
    return found[0]
