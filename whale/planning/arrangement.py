"""Stages whose devices were chosen before they are drafted: of any width, in any order, with the
cuts between them. The search (`whale/search`) makes these; without one, annotations or
`num_task_graph` and an order of the devices say the same (`plans/virtual_devices.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from whale.names import count
from whale.planning.task_graphs import TaskGraphs, from_starts
from whale.plans.virtual_devices import DevicePlacement, VirtualDevice
from whale.scheduling.placement import loop, zigzag


@dataclass(frozen=True)
class Arrangement:
    """Who runs which stage, and where the model is cut."""

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    """[VirtualDevice][replica][place], every rank of the cluster once"""
    starts: tuple[int, ...] | None
    """first operation of every chunk, as places among the ACTIVATIONs in graph order; None: several
    chunks on each VirtualDevice, cut by `chunks.py`
    """
    num_chunks: int = 1
    """chunks on each VirtualDevice"""
    is_loop: bool = False
    """chunks start again at the first VirtualDevice, instead of going back and forth in waves"""
    why_cuts: str = ""

    @property
    def num_replicas(self) -> int:
        return len(self.ranks[0])

    @property
    def device_of_chunk(self) -> tuple[int, ...]:
        place = loop if self.is_loop else zigzag
        return place(len(self.ranks), self.num_chunks)

    @property
    def placement(self) -> DevicePlacement:
        """The VirtualDevices, and which of them each chunk is on."""
        devices = tuple(VirtualDevice(index, ranks) for index, ranks in enumerate(self.ranks))
        widths = " + ".join(str(device.num_devices) for device in devices)
        replicas = count(self.num_replicas, "model replica")
        chunks = f", {self.num_chunks} chunks on each" if self.num_chunks > 1 else ""
        stages = count(len(devices), "stage")
        reason = f"{stages} on {widths} device{'s' * (widths != '1')} x {replicas}{chunks}"
        return DevicePlacement(devices, self.device_of_chunk, self.num_replicas, reason)

    def task_graphs(self, activations: Sequence[Node]) -> TaskGraphs:
        """Every chunk as a TaskGraph of its own."""
        assert self.starts is not None
        widths = [len(self.ranks[device][0]) for device in self.device_of_chunk]
        return from_starts(activations, self.starts, widths, self.why_cuts)
