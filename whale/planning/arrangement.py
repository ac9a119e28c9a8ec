"""Stages whose devices were chosen before they are drafted: of any width, in any order, with the
cuts between them. The search (`whale/search`) makes these; without one, annotations or
`num_task_graph` and an order of the devices say the same (`plans/virtual_devices.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.fx import Node

from whale.annotation import Strategy
from whale.annotation.scopes import GridShape
from whale.names import count
from whale.planning.task_graphs import TaskGraphs, from_starts, label_of
from whale.plans.grid import Grid
from whale.plans.virtual_devices import DevicePlacement, VirtualDevice
from whale.scheduling.placement import loop, zigzag


@dataclass(frozen=True)
class GroupSplit:
    """A VirtualDevice whose devices split operations, instead of sharing samples."""

    grid: GridShape | None = None
    """None: the planner chooses its shape (`grids.py`)"""
    operations: frozenset[Node] | None = None
    """those that are split; the others share the samples of the same devices. None: all"""


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
    splits: tuple[GroupSplit | None, ...] = ()
    """of each VirtualDevice; None: its devices share samples. Empty: all do"""

    @property
    def num_replicas(self) -> int:
        return len(self.ranks[0])

    @property
    def device_of_chunk(self) -> tuple[int, ...]:
        place = loop if self.is_loop else zigzag
        return place(len(self.ranks), self.num_chunks)

    @property
    def placement(self) -> DevicePlacement:
        """The VirtualDevices, and which of them each TaskGraph is on: the chunks, then the split
        operations of chunks that are split in part.
        """
        devices = tuple(self._device(index) for index in range(len(self.ranks)))
        widths = " + ".join(str(device.num_devices) for device in devices)
        replicas = count(self.num_replicas, "model replica")
        chunks = f", {self.num_chunks} chunks on each" if self.num_chunks > 1 else ""
        stages = count(len(devices), "stage")
        reason = f"{stages} on {widths} device{'s' * (widths != '1')} x {replicas}{chunks}"
        of_chunk = self.device_of_chunk
        split = tuple(of_chunk[chunk] for chunk in self._split_in_part)
        return DevicePlacement(devices, (*of_chunk, *split), self.num_replicas, reason)

    def _device(self, index: int) -> VirtualDevice:
        ranks = self.ranks[index]
        split = self._split(index)
        if split is None:
            return VirtualDevice(index, ranks)
        # where the shape is open, this one stands until the planner has chosen
        shape = split.grid or (1, len(ranks[0]), 1)
        return VirtualDevice(index, ranks, Grid(*shape))

    def _split(self, device: int) -> GroupSplit | None:
        """How a VirtualDevice splits operations; one device alone never does."""
        return self.splits[device] if self.splits and len(self.ranks[device][0]) > 1 else None

    @property
    def _split_in_part(self) -> list[int]:
        """Chunks of which some operations are split and others share samples."""
        found = []
        for chunk, device in enumerate(self.device_of_chunk):
            split = self._split(device)
            if split is not None and split.operations is not None:
                found.append(chunk)
        return found

    @property
    def is_chunked(self) -> bool:
        """Whether every TaskGraph is a stage of its own: not where a stage is split in part."""
        return not self._split_in_part

    def task_graphs(self, activations: Sequence[Node]) -> TaskGraphs:
        """Every chunk as a TaskGraph; what is split of those that are split in part as further
        ones, on the same VirtualDevices.
        """
        assert self.starts is not None
        widths = [len(self.ranks[device][0]) for device in self.device_of_chunk]
        found = from_starts(activations, self.starts, widths, self.why_cuts)
        of_operation = dict(found.of_operation)
        strategies = list(found.strategies)
        labels = list(found.labels)
        for chunk, device in enumerate(self.device_of_chunk):
            split = self._split(device)
            if split is None:
                continue
            strategy = Strategy("split", widths[chunk], split.grid)
            if split.operations is None:
                strategies[chunk] = strategy
                continue
            own = []
            for node in activations:
                if found.of_operation[node] == chunk and node in split.operations:
                    own.append(node)
            of_operation |= dict.fromkeys(own, len(strategies))
            strategies.append(strategy)
            labels.append(label_of(own))
        return replace(
            found, of_operation=of_operation, strategies=tuple(strategies), labels=tuple(labels)
        )
