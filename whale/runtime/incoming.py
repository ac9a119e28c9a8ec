"""A checkpoint on its way into a rank. Everything is read and checked before anything changes, and
loading takes no more memory than training does (docs/memory.md):

    here        is read once, and held in host memory until all ranks have read theirs
    elsewhere   weights and states whose home is not the device, and states in fewer bits, are read
                to be checked, and again, a few at a time, when they go home
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whale.checkpoint import CheckpointError, Reader, merge_values
from whale.checkpoint.pieces import StatePart, read_shard, read_state
from whale.checkpoint.training_state import parameter_name, state_name
from whale.plans.shards import Shard

MODEL = "model/"
RNG = "rng/0/"


@dataclass(frozen=True)
class Wanted:
    """The part of a tensor of the model, or of its optimizer states, that a rank takes."""

    shard: Shard
    shape: tuple[int, ...]
    """of the whole tensor"""
    dtype: torch.dtype
    is_away: bool
    """it does not stay on the device"""
    is_stack: bool = False
    """as in `StatePart`"""


class Incoming:
    """A checkpoint, read and checked by this rank; not yet applied."""

    def __init__(
        self, path: Path, weights: Mapping[str, Wanted], states: Mapping[str, Wanted]
    ) -> None:
        """Raises where something is damaged, or of another model."""
        self._weights = weights
        self._states = states
        self._reader = Reader(path)
        self._shapes = self._reader.shapes()
        self._held: dict[str, Tensor] = {}
        try:
            self.optimizer = merge_values(
                values.get("optimizer") for values in self._reader.rank_values
            )
            self._check()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._held.clear()
        self._reader.close()

    @property
    def step(self) -> int:
        return self._reader.step

    @property
    def values(self) -> Mapping[str, Any]:
        """What the checkpoint says of the whole job."""
        return self._reader.values

    @property
    def scheduler(self) -> Mapping[str, Any] | None:
        """State of the LR scheduler; None where there was none."""
        every = self._reader.rank_values
        return next((values["scheduler"] for values in every if "scheduler" in values), None)

    @property
    def num_bytes_read(self) -> int:
        return self._reader.num_bytes_read

    def take(self, stored: str) -> Tensor:
        """A tensor by its name in the checkpoint, on the CPU; to be asked for once."""
        return self._held.pop(stored) if stored in self._held else self._read(stored)

    def _check(self) -> None:
        for name, wanted in self._weights.items():
            shape = self._reader.shape(MODEL + name)
            if shape != wanted.shape:
                raise CheckpointError(
                    f"{name} has shape {list(shape)} in {self._reader.path}, in this model "
                    f"{list(wanted.shape)}: another model"
                )
            self._check_tensor(MODEL + name, wanted.is_away)
        for name, wanted in self._states.items():
            saved = self.optimizer.get("state", {}).get(name, {})
            for key in saved.get("tensors", ()):
                self._check_tensor(state_name(name, key), wanted.is_away)
        for name in self._reader.names(RNG):
            self._check_tensor(name, is_away=False)

    def _check_tensor(self, stored: str, is_away: bool) -> None:
        tensor = self._read(stored)
        if not is_away:
            self._held[stored] = tensor

    def _read(self, stored: str) -> Tensor:
        read = self._reader.read
        if stored.startswith(MODEL):
            wanted = self._weights[stored.removeprefix(MODEL)]
            return read_shard(read, stored, wanted.shard, wanted.shape, wanted.dtype)
        if stored.startswith(RNG):
            return read(stored)
        wanted = self._states[parameter_name(stored)]
        part = StatePart(wanted.shard, wanted.shape, wanted.is_stack)
        return read_state(read, self._shapes, stored, part)
