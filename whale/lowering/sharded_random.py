"""Random operations on tensors that lie on a grid: the same numbers where devices hold the same
values, others where the tensor is cut.

The chunk's seed is the same on all devices of the grid. A random operation draws from

    seed = hash(chunk's seed, number of the operation, coordinates on the axes that cut its result)                     (1)

and leaves the stream of the chunk as it was, so operations do not depend on each other.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from whale.plans.grid import Grid
from whale.plans.layout import Layout


@dataclass(frozen=True)
class Draw:
    """Line (1) without the chunk's seed, which is known when it runs."""

    number: int
    """of the operation in its TaskGraph"""
    coordinates: tuple[tuple[str, int], ...]

    @staticmethod
    def of(number: int, layout: Layout, grid: Grid, place: int) -> Draw:
        """`layout`: of the operation's result."""
        return Draw(
            number,
            tuple(
                (axis, grid.coordinate(place, axis)) for axis in grid.axes if axis in layout.sharded
            ),
        )

    def seed(self, chunk_seed: int) -> int:
        text = f"{chunk_seed}|{self.number}|{self.coordinates}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


@contextlib.contextmanager
def drawing(draw: Draw, device: torch.device) -> Iterator[None]:
    """Operations inside draw from line (1). `torch.manual_seed` has set the chunk's seed."""
    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
        torch.manual_seed(draw.seed(torch.initial_seed()))
        yield
