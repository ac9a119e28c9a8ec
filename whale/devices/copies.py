"""Tensors on their way between a device and the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from whale.devices.interface import LocalDevice, Moment


class HostCopy:
    """A tensor on its way from a device to the host."""

    def __init__(self, tensor: Tensor, moment: Moment, device: LocalDevice) -> None:
        self.tensor = tensor
        """on the host; it has its values from `moment` on"""
        self.moment = moment
        """when it has arrived"""
        self._device = device

    def read(self) -> Tensor:
        """The tensor on the host. Waits until it has arrived."""
        self._device.wait_for(self.moment)
        return self.tensor


class DeviceCopy:
    """A tensor on its way from the host to a device."""

    def __init__(
        self, tensor: Tensor, moment: Moment | None = None, device: LocalDevice | None = None
    ) -> None:
        self._tensor = tensor
        self.moment = moment
        """when it has arrived; None: it is there"""
        self._device = device

    def take(self) -> Tensor:
        """The tensor, for work that is launched after this call; the host does not wait."""
        if self._device is not None:
            self._device.follow(self.moment)
            self._device.used_here(self._tensor)
        return self._tensor


def rows_of(tensor: Tensor, intervals: Sequence[tuple[int, int]] | None) -> Tensor:
    """Rows of these intervals, one behind the other; None: all."""
    if intervals is None:
        return tensor
    return torch.cat([tensor[start:stop] for start, stop in intervals])
