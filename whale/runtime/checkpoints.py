"""Checkpoints of an engine: which tensors this rank writes, and how all ranks load together, under
whatever plan it was saved.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whale.checkpoint import (
    AsyncSaver,
    CheckpointError,
    Handle,
    PretrainedReader,
    TensorPart,
    assign_writers,
    export_safetensors,
    find_checkpoints,
    pack_optimizer,
    pack_rng,
    pack_scheduler,
    unpack_optimizer,
    unpack_rng,
    unpack_scheduler,
)
from whale.checkpoint.pieces import Pieces, StatePart, pieces, read_shard, state_pieces
from whale.checkpoint.reader import CHECKPOINT_NAME
from whale.checkpoint.training_state import parameter_name
from whale.distributed.ranks import Ranks
from whale.plans.shards import Shard, Shards
from whale.runtime.incoming import MODEL, RNG, Incoming, Wanted
from whale.runtime.job import Job
from whale.runtime.update import Updater

logger = logging.getLogger("whale")


@dataclass(frozen=True)
class Pretrained:
    """Weights in a safetensors file, or a folder in the Hugging Face layout, to start from."""

    path: str | Path
    rename: Callable[[str], str | None] | None = None
    """name in the model -> name in the file; None for a tensor that is not in the file and keeps
    its initial value
    """


class Checkpoints:
    """Saves and loads the state of one engine."""

    def __init__(self, job: Job, updater: Updater) -> None:
        self._job = job
        self._updater = updater
        self._savers: dict[Path, AsyncSaver] = {}
        self._whole = _whole_tensors(job.model, job.names)
        self._own = _own_shards(self._whole, job.shards, job.ranks.rank)
        self._own_states = self._own
        """parts of parameters whose optimizer state this rank writes"""
        self._states = job.state_shards
        if job.plan.owners:
            self._states = Shards(job.plan, "owned")
        if self._states is not job.shards:
            self._own_states = _own_shards(self._whole, self._states, job.ranks.rank)

    def save(self, folder: Path, step: int, data: Any) -> Handle:
        """Copies this rank's part and writes it in the background. All ranks call it at the same
        step.
        """
        ranks = self._job.ranks
        updater = self._updater
        if folder not in self._savers:
            job_id = ranks.from_first(secrets.token_hex(4))
            keep = self._job.config.keep_checkpoints
            self._savers[folder] = AsyncSaver(
                folder, job_id=job_id, rank=ranks.rank, num_ranks=ranks.num_ranks, keep=keep
            )
        tensors: dict[str, Tensor] = {}
        parts: dict[str, TensorPart] = {}
        for name, shard in self._own.items():
            _add(
                tensors,
                parts,
                pieces(MODEL + name, self._to_save(name), shard, self._whole[name].shape),
            )
        rank_values: dict[str, Any] = {}
        if updater.optimizer is not None:
            with updater.states_at_hand():
                state, rank_values["optimizer"] = pack_optimizer(
                    updater.optimizer, self._names_of(), only=set(self._own_states)
                )
            for key, tensor in state.items():
                name = parameter_name(key)
                shard = self._own_states[name]
                is_first = shard is self._states.first(name)
                is_stack = name in self._job.plan.summed_norms
                part = StatePart(shard, tuple(self._whole[name].shape), is_stack)
                _add(tensors, parts, state_pieces(key, tensor, part, is_first))
        if updater.scheduler is not None:
            rank_values["scheduler"] = pack_scheduler(updater.scheduler)
        values = {
            "step": step,
            "data": _state_of(data),
            "loss_scale": updater.loss_scale.state() if updater.loss_scale else None,
        }
        if ranks.rank == 0:
            random_tensors, values["rng"] = pack_rng(RNG)
            tensors |= random_tensors
        handle = self._savers[folder].save(step, tensors, values, rank_values, parts)
        if self._job.zero is not None:
            handle.before_changes()  # parts of weights move with every step
        else:
            updater.before_update(handle.before_changes)
        return handle

    def _to_save(self, name: str) -> Tensor:
        """A tensor of this rank that nothing but an update changes: of a buffer, which a forward
        may write, a copy on the device.
        """
        tensor = self._job.weights[name].detach()
        is_parameter = isinstance(self._job.weights[name], torch.nn.Parameter)
        return tensor if is_parameter or tensor.device.type == "cpu" else tensor.clone()

    def load(self, path: Path, data: Any) -> int | None:
        """Loads the latest good checkpoint and gives its step; None when there is none. Nothing
        changes unless all ranks could read all.

        Where there are some and none can be loaded, it raises: starting from nothing would look
        like a resumed run.
        """
        ranks = self._job.ranks
        candidates: list[Path] = ranks.from_first(_candidates(path) if ranks.rank == 0 else None)
        refused: list[str] = []
        for candidate in candidates:
            incoming: Incoming | None = None
            error: Exception | None = None
            try:
                incoming = self._incoming(candidate)
            except CheckpointError as problem:
                error = problem
            problems = [text for text in ranks.gather(str(error) if error else None) if text]
            if not problems and incoming is not None:
                with closing(incoming):
                    self._apply(incoming, data)
                return incoming.step
            if incoming is not None:
                incoming.close()
            refused.append(problems[0])
            if candidate != candidates[-1]:
                logger.warning(
                    "%s cannot be loaded, an older one is tried: %s", candidate, problems[0]
                )
        if not refused:
            return None
        which = "the checkpoint" if len(refused) == 1 else f"none of the {len(refused)} checkpoints"
        verb = "cannot" if len(refused) == 1 else "can"
        raise CheckpointError(
            f"{which} in {path} {verb} be loaded (give another folder, or remove it to start "
            f"anew): {refused[0]}"
        )

    def _incoming(self, path: Path) -> Incoming:
        """What this rank takes of a checkpoint."""
        rank = self._job.ranks.rank
        elsewhere: set[str] = set()
        for block in self._job.plan.blocks:
            if block.weights != "device" and rank in block.ranks:
                elsewhere.update(block.parameters)
        weights = {}
        for name, tensor in self._job.weights.items():
            shard = self._job.shards.on(name, rank)
            shape = tuple(self._whole[name].shape)
            weights[name] = Wanted(shard, shape, tensor.dtype, name in elsewhere)
        states = {}
        away = set(map(id, self._updater.away))
        names_of = self._names_of()
        groups = self._updater.optimizer.param_groups if self._updater.optimizer else ()
        for tensor in (tensor for group in groups for tensor in group["params"]):
            parameter = names_of.get(tensor)
            if parameter is None:
                continue  # not a parameter of the model: `unpack_optimizer` refuses it
            states[parameter] = Wanted(
                self._states.on(parameter, rank),
                tuple(self._whole[parameter].shape),
                tensor.dtype,
                id(tensor) in away,
                parameter in self._job.plan.summed_norms,
            )
        return Incoming(path, weights, states)

    def _apply(self, incoming: Incoming, data: Any) -> None:
        updater = self._updater
        if self._job.zero is not None:
            self._job.zero.forget_late()
        updater.wait_for_copies()
        with torch.no_grad():
            for name, tensor in self._job.weights.items():
                tensor.copy_(incoming.take(MODEL + name))
        if updater.optimizer is not None:
            unpack_optimizer(
                updater.optimizer,
                self._names_of(),
                incoming.take,
                incoming.optimizer,
                updater.loaded_in_portions(),
            )
            if updater.scheduler is not None and incoming.scheduler is not None:
                unpack_scheduler(updater.scheduler, incoming.scheduler, updater.optimizer)
        if updater.loss_scale is not None and incoming.values.get("loss_scale"):
            updater.loss_scale.restore(incoming.values["loss_scale"])
        unpack_rng(RNG, incoming.take, incoming.values["rng"])
        if data is not None and incoming.values.get("data") is not None:
            data.load_state_dict(incoming.values["data"])
        self.num_bytes_read = incoming.num_bytes_read

    def export(self, path: Path, state: Mapping[str, Tensor]) -> None:
        """Rank 0 writes the whole model; returns when the file is there, and raises on every rank
        when it cannot be written.
        """
        error: Exception | None = None
        try:
            if self._job.ranks.rank == 0:
                export_safetensors(path, state)
        except (CheckpointError, ValueError) as problem:
            error = problem
        text = self._job.ranks.from_first(str(error) if error else None)
        if text is not None:
            raise error or CheckpointError(text)

    def wait(self) -> None:
        """Waits until every save is in place."""
        for saver in self._savers.values():
            saver.wait()

    def _names_of(self) -> dict[torch.nn.Parameter | Tensor, str]:
        return {
            tensor: name
            for name, tensor in self._updated().items()
            if isinstance(tensor, torch.nn.Parameter)
        }

    def _updated(self) -> Mapping[str, Tensor]:
        """What the optimizer of this rank updates, by name."""
        whole = self._updater.whole
        if whole is None:
            return self._job.updated
        updated = self._job.updated.items()
        parts = {name: tensor for name, tensor in updated if name not in self._job.plan.owners}
        return parts | whole.parameters


def load_pretrained(
    weights: Mapping[str, Tensor],
    names: Mapping[str, str],
    source: Pretrained,
    ranks: Ranks,
    shards: Shards,
) -> None:
    """Overwrites this rank's tensors with those of the file, each rank reading only its own, and of
    a cut one only its part.

    Every parameter must be there. A buffer that is not keeps the value that the model gave it: only
    some are saved with a model.
    """
    reader = PretrainedReader(source.path)
    wanted = {name: source.rename(name) if source.rename is not None else name for name in weights}
    renamed = {name: str(stored) for name, stored in wanted.items() if stored is not None}
    parameters = [name for name in renamed if isinstance(weights[name], torch.nn.Parameter)]
    buffers = [name for name in renamed if name not in parameters]
    aliases = {} if source.rename is not None else dict(names)
    match = reader.match(
        [renamed[name] for name in parameters],
        aliases,
        optional=[renamed[name] for name in buffers],
    )
    own = parameters + [name for name in buffers if renamed[name] in match.stored]
    if match.unexpected and ranks.num_ranks == 1:
        logger.info(
            "%d tensors of %s are not in the model, the first is %s",
            len(match.unexpected),
            source.path,
            match.unexpected[0],
        )
    with torch.no_grad():
        for name in own:
            stored = match.stored[renamed[name]]
            shard = shards.on(name, ranks.rank)
            shape = reader.shape(stored)
            expected = tuple(weights[name].shape) if shard.ranges is None else shard.whole_shape
            if shape != expected:
                raise CheckpointError(
                    f"{name} has shape {list(shape)} in {source.path}, in the model "
                    f"{list(expected)}"
                )
            weights[name].copy_(read_shard(reader.read, stored, shard, shape, weights[name].dtype))
    reader.close()


def _own_shards(whole: Mapping[str, Tensor], shards: Shards, rank: int) -> dict[str, Shard]:
    """What this rank writes: of each part of a tensor one of its holders, so that all write about
    as much.
    """
    parts: dict[str, tuple[str, Shard]] = {}
    sizes: dict[str, int] = {}
    for name, tensor in whole.items():
        for number, shard in enumerate(shards.of(name)):
            shape = shard.shape if shard.shape is not None else tensor.shape
            key = f"{name}[{number}]"
            parts[key] = (name, shard)
            sizes[key] = math.prod(shape) * tensor.element_size()
    writers = assign_writers({key: shard.ranks for key, (_, shard) in parts.items()}, sizes)
    return {name: shard for key, (name, shard) in parts.items() if writers[key] == rank}


def _whole_tensors(model: torch.nn.Module, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Every tensor of the model under its first name: those that this rank does not hold are on
    `meta`, with the whole shape.
    """
    found = dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )
    return {name: found[name] for name, first in names.items() if name == first}


def _add(tensors: dict[str, Tensor], parts: dict[str, TensorPart], more: Pieces) -> None:
    tensors.update(more[0])
    parts.update(more[1])


def _candidates(path: Path) -> list[Path]:
    """A checkpoint itself, or all complete ones in a folder, the latest first."""
    return [path] if CHECKPOINT_NAME.fullmatch(path.name) else find_checkpoints(path)


def _state_of(data: Any) -> Any:
    return data.state_dict() if hasattr(data, "state_dict") else data
