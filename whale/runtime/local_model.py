"""The model as one process has it: gathered again from all ranks, saved for others to load, and a
clear answer for whoever calls the emptied one.

After `wh.parallelize` a rank keeps its own part of the weights; the rest of the user's model is
on `meta`. `engine.module()` puts a whole one together.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from whale.checkpoint import CheckpointError, export_safetensors
from whale.compat import tensor_stores
from whale.distributed.ranks import Ranks
from whale.dtypes import as_moved, in_memory
from whale.lowering.weights import named_tensors
from whale.runtime.job import Job
from whale.runtime.state import gather_tensors
from whale.runtime.untouched import USE_ENGINE, warn_of_training

REFUSALS = "_whale_refusals"
"""attribute of a model whose use is refused: handles of the hooks that do it"""
SINGLE_FILE = "model.safetensors"


class SpreadModelError(RuntimeError):
    """The user's model was called after its weights had been given to the ranks."""


def refuse_use(model: torch.nn.Module) -> None:
    """Makes a model whose weights are not all here say so when it is called, moved or saved, and
    any other one when it is trained without the engine.

    A capture may still run it: that happens under `torch.export`, on fake weights.
    """
    if not any(tensor.is_meta for _, _, _, tensor in named_tensors(model)):
        model.__dict__[REFUSALS] = [warn_of_training(model)]
        return

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise SpreadModelError(USE_ENGINE)

    def before_forward(_: torch.nn.Module, __: Any) -> None:
        if not torch.compiler.is_exporting():
            refuse()

    def before_state_dict(_: torch.nn.Module, __: str, keep_vars: bool) -> None:
        if not keep_vars:  # with it, one asks for shapes, as Whale does
            refuse()

    handles = [
        model.register_forward_pre_hook(before_forward, prepend=True),
        model.register_state_dict_pre_hook(before_state_dict),
    ]
    model.__dict__["_apply"] = refuse  # `.to`, `.half` and so on
    model.__dict__[REFUSALS] = handles


def _allow_use(model: torch.nn.Module) -> None:
    """Takes back what `refuse_use` did."""
    for handle in model.__dict__.pop(REFUSALS, ()):
        handle.remove()
    model.__dict__.pop("_apply", None)


def local_model(job: Job, everywhere: bool) -> torch.nn.Module | None:
    """A copy of the model with all weights, on the CPU of rank 0, or of every rank; None elsewhere.
    All ranks must call it.
    """
    whole = _whole(job, everywhere)
    if not whole:
        return None
    # deepcopy takes these instead of copying what they stand for: nothing is held twice
    memo: dict[int, Any] = {}
    for name, _, _, tensor in named_tensors(job.model):
        value = whole[job.names[name]]
        if isinstance(tensor, Parameter) and not isinstance(value, Parameter):
            value = Parameter(value, requires_grad=tensor.requires_grad)
            whole[job.names[name]] = value
        memo[id(tensor)] = value
    _allow_use(job.model)
    try:
        made: torch.nn.Module = copy.deepcopy(job.model, memo)
    finally:
        refuse_use(job.model)
    return made


@contextlib.contextmanager
def gathered(job: Job) -> Iterator[torch.nn.Module]:
    """Inside, the model that was parallelized has copies of all weights on every rank, and may be
    used; what is written to them is lost. All ranks must enter it together.
    """
    before = give_back(job)
    try:
        yield job.model
    finally:
        for owner, leaf, tensor in before:
            _put(owner, leaf, tensor)
        refuse_use(job.model)


def give_back(job: Job) -> list[tuple[torch.nn.Module, str, Tensor]]:
    """Puts copies of all weights into the model that was parallelized, on every rank; gives what
    was there: (module, name in it, tensor).
    """
    before: list[tuple[torch.nn.Module, str, Tensor]] = []
    whole = _whole(job, everywhere=True)
    _allow_use(job.model)
    for name, owner, leaf, tensor in list(named_tensors(job.model)):
        value = whole[job.names[name]].to(job.ranks.device.name)
        if isinstance(tensor, Parameter) and not isinstance(value, Parameter):
            value = Parameter(value, requires_grad=tensor.requires_grad)
        whole[job.names[name]] = value
        before.append((owner, leaf, tensor))
        _put(owner, leaf, value)
    return before


def _put(owner: torch.nn.Module, leaf: str, tensor: Tensor) -> None:
    parameters, buffers = tensor_stores(owner)
    store = parameters if leaf in parameters else buffers
    store[leaf] = tensor


def _whole(job: Job, everywhere: bool) -> dict[str, Tensor]:
    """Every tensor of the model by its first name, whole; empty where no model is wanted."""
    shapes = {}
    for name, _, _, tensor in named_tensors(job.model):
        if job.names[name] == name:
            shapes[name] = tensor
    found = gather_tensors(shapes, job.weights, job.shards, job.ranks)
    if not everywhere or not job.ranks.is_distributed:
        return found
    for name in sorted(shapes):
        like = shapes[name]
        found[name] = _from_first(found.get(name), tuple(like.shape), like.dtype, job.ranks)
    return found


def _from_first(
    tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, ranks: Ranks
) -> Tensor:
    """Rank 0's tensor, on the CPU of every rank."""
    device = ranks.device.name
    if tensor is None:
        moved = torch.empty(shape, dtype=dtype, device=device)
    else:
        moved = in_memory(tensor).contiguous().to(device)
    if moved.numel():
        dist.broadcast(as_moved(moved), src=0, group=ranks.world)
    return moved.cpu()


def save_pretrained(
    job: Job, folder: Path, tokenizer: Any = None, options: Mapping[str, Any] | None = None
) -> None:
    """Writes what `from_pretrained` reads, on rank 0: config, safetensors with their index,
    tokenizer; of a PEFT model the adapter only. `options` go to the model's own `save_pretrained`.
    All ranks must call it, and all raise when it cannot be written.
    """
    model = job.model
    names = _saved_names(model)
    shapes = {job.names[name]: tensor for name, tensor in names.items()}
    gathered = gather_tensors(shapes, job.weights, job.shards, job.ranks)
    error: Exception | None = None
    if job.ranks.rank == 0:
        state = {name: gathered[job.names[name]] for name in names}
        try:
            _write(model, folder, state, dict(options or {}))
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
        except Exception as problem:  # whatever it is, the other ranks must hear of it
            error = problem
    text = job.ranks.from_first(f"{type(error).__name__}: {error}" if error else None)
    if text is not None:
        raise error or CheckpointError(f"rank 0 could not save the model to {folder}: {text}")


def _write(
    model: torch.nn.Module, folder: Path, state: dict[str, Tensor], options: dict[str, Any]
) -> None:
    save = getattr(model, "save_pretrained", None)
    if callable(save):
        save(folder, state_dict=state, **options)
    else:  # no config to write: the weights, for `load_model`
        export_safetensors(folder / SINGLE_FILE, state)


def _saved_names(model: torch.nn.Module) -> dict[str, Tensor]:
    """Tensors that the model's own `save_pretrained` writes: all of its state, or those of the
    adapters and whatever else is trained of a PEFT model.
    """
    everything = model.state_dict(keep_vars=True)
    adapters = getattr(model, "peft_config", None)
    if not isinstance(adapters, dict):
        return everything
    wanted = {}
    for name, tensor in everything.items():
        is_adapter = not set(name.split(".")).isdisjoint(adapters)
        if is_adapter or tensor.requires_grad:
            wanted[name] = tensor
    return wanted
