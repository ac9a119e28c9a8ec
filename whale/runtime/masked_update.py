"""The update of a step that nobody waits for: loss and gradient norm stay on the accelerator, and
whether the weights change is decided there.

    totals     [3 + ranks] float64, all-reduced: loss; squared norm of the gradient; denominators of
               the loss that are zero; of each rank the number of a parameter whose gradient is not
               finite: the first one that backward comes to. 0: all are finite
    left out   one number on the device, 1 where the update must not happen. torch's fused kernels
               take it as `found_inf`, which `torch.amp.GradScaler` is built on: neither weights
               nor states change, and steps are not counted
    factor     clipping and loss scale as one number on the device, by which gradients are
               multiplied

The host reads the totals one step late and does then what depends on them: the LR scheduler where a
step may not count, a message, an error (`runtime/update.py`). With `"on_nonfinite": "stop"` nothing
changes weights after the first number that is not finite, so that they are those of that step when
the host comes to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whale.compat import foreach_norm, fused_step, has_fused_step
from whale.config import Config
from whale.devices import LocalDevice
from whale.runtime.gradient_norm import CountedGradient, scale_gradients
from whale.runtime.held import HeldParameter
from whale.runtime.loss_scale import DeviceLossScale

CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_
LOSS = 0
SQUARED_NORM = 1
NUM_EMPTY = 2
FIRST_BAD = 3
"""places in the totals"""


def can_mask(optimizer: torch.optim.Optimizer | None, config: Config, device: LocalDevice) -> bool:
    """Whether this rank's updates can be left out by a number on the device.

    Not where the user chose a form of the optimizer that knows no such number (`foreach`,
    `differentiable`), nor with a first momentum that differs from later ones (`dampening`).
    """
    if not device.is_accelerator:
        return False  # a CPU has computed the numbers when it launches the update
    if optimizer is None or not _leaves_out(config):
        return True
    for group in optimizer.param_groups:
        is_chosen = group.get("fused") is False or group.get("foreach")
        if is_chosen or group.get("differentiable") or group.get("dampening"):
            return False
    return has_fused_step(optimizer, device.type)


def _leaves_out(config: Config) -> bool:
    """Whether a step may be left out at all."""
    return config.on_nonfinite != "continue" or config.precision == "fp16"


@dataclass(frozen=True)
class Norms:
    """What the gradients of some parameters come to, as numbers on the device."""

    squared: Tensor
    """sum of squares"""
    bad: Tensor
    """number of the first parameter whose gradient is not finite; 0: all are"""


class MaskedUpdates:
    """The device's side of the updates of one rank."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        config: Config,
        device: LocalDevice,
        names: Sequence[str],
    ) -> None:
        """`names`: of all parameters of the model in the order in which backward comes to them,
        the same on every rank.
        """
        self._optimizer = optimizer
        self._config = config
        self._device = device
        self._names = names
        self._number_of = {name: len(names) - place for place, name in enumerate(names)}
        self._numbers: dict[tuple[str, ...], Tensor] = {}
        """numbers of the parameters that this rank answers for, on the device"""
        self._is_stopped = torch.zeros((), dtype=torch.bool, device=device.name)
        self.loss_scale = DeviceLossScale(device.name) if config.precision == "fp16" else None

    def resume(self) -> None:
        """Updates happen again, after an error that the user has caught."""
        self._is_stopped = torch.zeros_like(self._is_stopped)

    def bad_parameters(self, totals: Sequence[float]) -> dict[int, str]:
        """Rank -> a parameter whose gradient is not finite there, from totals that were read."""
        found = {}
        for rank, number in enumerate(totals[FIRST_BAD:]):
            if number:
                found[rank] = self._names[len(self._names) - int(number)]
        return found

    # ---- before the all-reduce

    def norms(self, counted: Sequence[CountedGradient], is_scaled: bool) -> Norms:
        """Norms of these gradients, which this rank answers for."""
        zero = torch.zeros((), dtype=torch.float64, device=self._device.name)
        norms = _norms(counted)
        if norms is None:
            return Norms(zero, zero)
        squared = torch.linalg.vector_norm(norms).square()
        if self.loss_scale is not None and is_scaled:
            squared = squared / self.loss_scale.scale**2
        bad = torch.where(norms.isfinite(), 0.0, self._numbers_of(counted)).max()
        return Norms(squared, bad)

    def parts(
        self, loss: Tensor, norms: Norms, num_empty: Tensor | None, place: tuple[int, int]
    ) -> Tensor:
        """This rank's part of the totals. `place`: rank and number of ranks."""
        rank, num_ranks = place
        empty = torch.zeros_like(norms.squared) if num_empty is None else num_empty
        parts = norms.squared.new_zeros(FIRST_BAD + num_ranks)
        parts[:FIRST_BAD] = torch.stack([loss, norms.squared, empty])
        parts[FIRST_BAD + rank] = norms.bad
        return parts

    def _numbers_of(self, counted: Sequence[CountedGradient]) -> Tensor:
        key = tuple(each.name for each in counted)
        if key not in self._numbers:
            numbers = [float(self._number_of[name]) for name in key]
            on_host = torch.tensor(numbers, dtype=torch.float64)
            self._numbers[key] = self._device.start_copy(on_host).take()
        return self._numbers[key]

    # ---- behind it

    def apply(self, held: Sequence[HeldParameter], totals: Tensor, is_scaled: bool) -> None:
        """Steps the optimizer, unless the totals say on the device that it must not."""
        factor = self._factor(totals, is_scaled)
        left_out = self._left_out(totals)
        if self.loss_scale is not None:
            self.loss_scale.update(totals[SQUARED_NORM].isfinite())
        if factor is not None:
            scale_gradients(held, factor)
        if self._optimizer is None:
            return
        if left_out is None:
            self._optimizer.step()
            return
        _prepare_states(self._optimizer)
        with fused_step(self._optimizer, left_out):
            self._optimizer.step()

    def _factor(self, totals: Tensor, is_scaled: bool) -> Tensor | None:
        """What gradients are multiplied by; None: they stay as they are."""
        factor = None
        if self.loss_scale is not None and is_scaled:
            factor = 1.0 / self.loss_scale.scale
        if self._config.clip_grad_norm is not None:
            ratio = self._config.clip_grad_norm / (totals[SQUARED_NORM].sqrt() + CLIP_EPSILON)
            clipped = torch.where(ratio < 1.0, ratio, 1.0)
            factor = clipped if factor is None else factor * clipped
        return factor

    def _left_out(self, totals: Tensor) -> Tensor | None:
        """Whether nothing may change, as `is_left_out` below; None where all steps count."""
        if not _leaves_out(self._config):
            return None
        is_finite = totals[: SQUARED_NORM + 1].isfinite()
        is_overflow = None
        if self.loss_scale is not None:
            is_overflow = is_finite[LOSS] & ~is_finite[SQUARED_NORM]
            if self._config.on_nonfinite == "continue":
                return is_overflow
        left_out = ~is_finite.all()
        if self._config.on_nonfinite == "stop":
            stops = left_out if is_overflow is None else left_out & ~is_overflow
            self._is_stopped = self._is_stopped | stops
            left_out = left_out | self._is_stopped
        return left_out


def _norms(counted: Sequence[CountedGradient]) -> Tensor | None:
    """Norm of each of these gradients, [gradients] float64; None without any."""
    if not counted:
        return None
    norms = [norm.double() for norm in foreach_norm([each.gradient for each in counted])]
    return torch.stack(norms)


def _prepare_states(optimizer: torch.optim.Optimizer) -> None:
    """States as fused kernels want them."""
    for group in optimizer.param_groups:
        if group.get("momentum"):
            # torch leaves a first momentum undefined where its step is left out; without
            # dampening, a momentum of zeros gives the same first step
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                if parameter.grad is not None and state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
    first: dict[str, Any] = next(iter(optimizer.state.values()), {})
    step = first.get("step")
    if isinstance(step, Tensor) and step.device.type == "cpu":
        # loaded from a checkpoint: the other forms count on the host
        for parameter, state in optimizer.state.items():
            state["step"] = state["step"].to(parameter.device, torch.float32)
