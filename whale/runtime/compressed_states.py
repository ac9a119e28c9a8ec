"""Optimizer states held in fewer bits between steps: `"optimizer_state": "bf16"` or `"int8"`.
Results are not those of local training, and the plan says so.

    bf16    rounded to the nearest
    int8    blocks of 256 numbers with a scale each: x = scale * q, |q| <= 127. States that are
            never negative (second averages) are stored as roots and rounded up, in 255 steps: what
            they divide never grows

Before a step the states of a few parameters at a time are brought back, updated, and stored again,
so that memory never holds all of them. States of another shape than their parameter stay as they
are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whale.compat import has_step_hooks
from whale.costs.optimizer_factory import BY_PARAMETER
from whale.runtime.stage_updates import step_some

BLOCK = 256
"""numbers that share a scale"""
SIGNED_STEPS = 127
UNSIGNED_STEPS = 255
STORED_BEFORE = 1e-3
"""steps by which a number may be above a whole one by rounding"""
AT_ONCE_BYTES = 32 * 1024**2
"""parameters whose states are brought back together"""


@dataclass(frozen=True)
class Packed:
    """A state in 8 bits. Only its device knows whether it holds roots: nobody waits for that."""

    shape: torch.Size
    dtype: torch.dtype
    numbers: Tensor
    """[blocks, BLOCK] uint8; of signed numbers their two's complement"""
    scales: Tensor
    """[blocks, 1] float32"""
    is_root: Tensor
    """one bool"""

    @staticmethod
    def of(state: Tensor) -> Packed:
        flat = state.detach().reshape(-1).to(torch.float32)
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
        is_root = (flat >= 0).all()
        padded = torch.where(is_root, padded.abs().sqrt(), padded)
        scales = padded.abs().amax(1, keepdim=True)
        parts = padded / scales.clamp_min(torch.finfo(torch.float32).tiny) * _num_steps(is_root)
        # what was stored before gives the same numbers again, and nothing becomes zero
        up = (parts - STORED_BEFORE).ceil().maximum((parts > 0).float())
        numbers = torch.where(is_root, up, parts.round()).to(torch.int16).to(torch.uint8)
        return Packed(state.shape, state.dtype, numbers, scales, is_root)

    def expanded(self) -> Tensor:
        signed = self.numbers.view(torch.int8).to(torch.float32)
        numbers = torch.where(self.is_root, self.numbers.to(torch.float32), signed)
        values = numbers * (self.scales / _num_steps(self.is_root))
        values = torch.where(self.is_root, values.square(), values)
        return values.reshape(-1)[: self.shape.numel()].view(self.shape).to(self.dtype)


def _num_steps(is_root: Tensor) -> Tensor:
    """Steps between zero and the largest number of a block."""
    return is_root * float(UNSIGNED_STEPS - SIGNED_STEPS) + float(SIGNED_STEPS)


@dataclass(frozen=True)
class Halved:
    """A state in bfloat16."""

    dtype: torch.dtype
    numbers: Tensor

    @staticmethod
    def of(state: Tensor) -> Halved:
        return Halved(state.dtype, state.detach().to(torch.bfloat16))

    def expanded(self) -> Tensor:
        return self.numbers.to(self.dtype)


class CompressedStates:
    """Steps an optimizer whose states are held in fewer bits."""

    def __init__(self, optimizer: torch.optim.Optimizer, kind: str) -> None:
        self.optimizer = optimizer
        self._pack = Packed.of if kind == "int8" else Halved.of
        self._held: dict[Tensor, dict[str, Packed | Halved]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all states that are held in fewer bits."""
        total = 0
        for states in self._held.values():
            for state in states.values():
                total += state.numbers.nbytes
                total += state.scales.nbytes if isinstance(state, Packed) else 0
        return total

    def step(self) -> None:
        """One step, some parameters at a time where the optimizer treats each by itself, and has no
        hooks that would run several times.
        """
        if type(self.optimizer) not in BY_PARAMETER or has_step_hooks(self.optimizer):
            self.expand()
            self.optimizer.step()
            self.compress()
            return
        for few in list(self._few()):
            own = [parameter for parameter in few if parameter.grad is not None]
            self.expand(own)
            step_some(self.optimizer, set(map(id, own)))
            self.compress(own)

    def expand(self, parameters: Any = None) -> None:
        """Brings the states of these parameters (all) back to the optimizer."""
        for parameter in list(self._held) if parameters is None else parameters:
            for key, packed in self._held.get(parameter, {}).items():
                self.optimizer.state[parameter][key] = packed.expanded()

    def compress(self, parameters: Any = None) -> None:
        """Takes the states of these parameters (all) from the optimizer."""
        known = self.optimizer.state
        for parameter in list(known) if parameters is None else parameters:
            states = known.get(parameter, {})
            for key, state in list(states.items()):
                is_tensor = isinstance(state, Tensor) and state.is_floating_point()
                if is_tensor and state.shape == parameter.shape and state.numel() > 1:
                    self._held.setdefault(parameter, {})[key] = self._pack(state)
                    del states[key]
            if not states and parameter in self._held:
                known[parameter] = {}

    def collapse(self) -> None:
        """Takes back what `expand` gave to be read: it is as it was."""
        for parameter, states in self._held.items():
            for key in states:
                self.optimizer.state[parameter].pop(key, None)

    @property
    def parameters(self) -> list[Tensor]:
        """Those whose states are held in fewer bits: all."""
        return [each for group in self.optimizer.param_groups for each in group["params"]]

    def loaded_in_portions(self) -> Iterator[list[Tensor]]:
        """Parameters, a few at a time where the optimizer treats each by itself. When the next are
        asked for, the optimizer has the states of these from a checkpoint, and they are compressed.
        """
        self._held.clear()
        few = self._few() if type(self.optimizer) in BY_PARAMETER else iter([self.parameters])
        for portion in few:
            yield portion
            self.compress(portion)

    def _few(self) -> Iterator[list[Tensor]]:
        """Parameters, a few at a time."""
        chosen: list[Tensor] = []
        num_bytes = 0
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                chosen.append(parameter)
                num_bytes += parameter.nbytes
                if num_bytes >= AT_ONCE_BYTES:
                    yield chosen
                    chosen = []
                    num_bytes = 0
        if chosen:
            yield chosen
