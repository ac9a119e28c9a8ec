"""Random numbers of the test device: a seed and an offset as Philox has them."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tests.device.settings import settings

aten = torch.ops.aten
THREADS_PER_MULTIPROCESSOR = 2048
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class RandomState:
    """State of the device's generator: as Philox, a seed and how much was drawn."""

    seed: int = 0
    offset: int = 0


random_state = RandomState()
DRAWN_PER_OPERATION = 4
_cpu_generator = threading.Lock()


def next_draw(tensors: list[Any]) -> int:
    """A seed for all that one operation draws.

    A grid of threads is at most as large as the GPU and each thread has its own stream of numbers:
    tensors larger than the grid get other numbers on a GPU with more multiprocessors.
    """
    sizes = [tensor.numel() for tensor in tensors if isinstance(tensor, torch.Tensor)]
    grid = settings.num_multiprocessors * THREADS_PER_MULTIPROCESSOR
    depends = settings.num_multiprocessors if max(sizes, default=0) > grid else ""
    text = f"{random_state.seed}|{random_state.offset}|{depends}"
    random_state.offset += DRAWN_PER_OPERATION
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def _native_dropout(
    generator: torch.Generator, x: torch.Tensor, p: float, train: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The values and the mask of a dropout."""
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = torch.empty(x.shape, dtype=x.dtype).bernoulli_(1 - p, generator=generator)
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return x * mask * scale, mask.bool()


DRAWN: dict[Any, Callable[..., Any]] = {aten.native_dropout.default: _native_dropout}
"""operations that take no generator, with one: the host may use the CPU's own at the same time"""


def needs_the_cpu_generator(op: Any) -> bool:
    """Whether only the CPU's default generator can draw for an operation: then the host has to wait
    for it, since it seeds that generator itself (before every micro-batch, say).
    """
    takes_one = any(each.name == "generator" for each in op._schema.arguments)
    gives_tensors = any(str(each.type) == "Tensor" for each in op._schema.returns)
    return gives_tensors and not takes_one and op not in DRAWN


@contextlib.contextmanager
def drawing(op: Any, draw: int | None, arguments: Arguments) -> Iterator[Arguments]:
    """The operation's arguments such that its CPU kernel draws the numbers of `draw`."""
    if draw is None:
        yield arguments
        return
    args, kwargs = arguments
    if any(each.name == "generator" for each in op._schema.arguments):
        yield args, {**kwargs, "generator": torch.Generator().manual_seed(draw)}
        return
    with _cpu_generator:  # the kernel takes the CPU's default generator: lent to one at a time
        before = torch.random.get_rng_state()
        torch.default_generator.manual_seed(draw)
        try:
            yield arguments
        finally:
            torch.random.set_rng_state(before)
