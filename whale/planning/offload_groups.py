"""Ranks that have the same blocks, and how large these are: who may have something at home outside
of the devices (`offload_account.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from whale.planning.split import Split
from whale.planning.workload import Workload
from whale.planning.zero_blocks import Sharing


class Part(NamedTuple):
    """Bytes of one rank's part of a block."""

    weights: float
    trained: float
    alone: float
    """of the trained ones those whose gradients no other rank has, so that they may leave"""


@dataclass(frozen=True)
class Group:
    """Ranks that have the same blocks."""

    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    blocks: tuple[tuple[str, ...], ...]
    sizes: tuple[Part, ...]
    """of the blocks: whole, or on a grid those of the place that holds most"""
    stages_of: tuple[frozenset[int], ...]
    """of each block: the stages that use it"""
    is_grid: bool

    def parts(self, fraction: float) -> list[Part]:
        """Parts of the blocks on a rank that holds this fraction of them."""
        share = 1.0 if self.is_grid else fraction
        return [Part(*(share * number for number in size)) for size in self.sizes]


def groups_of(sharing: Sharing, split: Split, workload: Workload) -> list[Group]:
    """The groups of all VirtualDevices that hold blocks."""
    sizes = _Sizes(split, workload)
    found = []
    for device in sharing.virtual_devices:
        is_grid = device.grid is not None
        if is_grid or device in sharing.groups:
            found.append(_group(sharing, sizes, device.index, is_grid))
    return found


def _group(sharing: Sharing, sizes: _Sizes, index: int, is_grid: bool) -> Group:
    device = sharing.virtual_devices[index]
    own = {stage for stage, at in enumerate(sharing.device_of_stage) if at == index}
    cut = sizes.split.cut_names if is_grid else None
    blocks = []
    for layer in sharing.layers(device):
        names = tuple(layer)
        if cut is not None:
            names = tuple(name for name in layer if name in cut)
        if names:
            blocks.append(names)
    return Group(
        ranks=tuple(sorted(device.all_ranks)),
        stages=tuple(sorted(own)),
        blocks=tuple(blocks),
        sizes=tuple(sizes.of_block(names, own, is_grid) for names in blocks),
        stages_of=tuple(
            frozenset(stage for name in names for stage in sharing.holders[name]) & own
            for names in blocks
        ),
        is_grid=is_grid,
    )


@dataclass(frozen=True)
class _Sizes:
    """Counts the bytes of blocks, on a grid those of one device."""

    split: Split
    workload: Workload

    def of_block(self, names: Sequence[str], stages: set[int], is_grid: bool) -> Part:
        states = self.workload.captured.state
        weights = trained = alone = 0.0
        for name in names:
            number = float(states[name].num_bytes)
            is_shared = False
            if is_grid:
                number, is_shared = self._on_grid(name, stages)
            weights += number
            if states[name].trainable:
                trained += number
                alone += 0.0 if is_shared else number
        return Part(weights, trained, alone)

    def _on_grid(self, name: str, stages: set[int]) -> tuple[float, bool]:
        """Bytes of a parameter on the device of a grid that holds most of it, and whether others
        hold the same.
        """
        stage = next(each for each in sorted(stages) if name in self.split.shardings[each].stored)
        sharding = self.split.shardings[stage]
        layout = sharding.stored[name]
        item = self.workload.captured.state[name].dtype.itemsize
        is_shared = self.split.placement.num_replicas > 1
        is_shared |= len(layout.same_places(sharding.grid, 0)) > 1
        return float(item * layout.largest_count(sharding.grid)), is_shared
