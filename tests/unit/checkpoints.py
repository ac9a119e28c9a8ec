"""What the tests of checkpoints share: tensors of every kind, saved by ranks that are simulated in
one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whale.checkpoint import (
    AsyncSaver,
    Reader,
    Target,
    TensorPart,
    finish,
    take_snapshot,
    write_rank,
)

SECOND = 1.0  # time-out of tests that wait for a rank that never comes


def cut(tensor: Tensor, num_ranks: int, dim: int) -> list[tuple[Tensor, TensorPart]]:
    """`tensor` in `num_ranks` parts along `dim`, uneven when it does not divide."""
    bounds = [round(place * tensor.shape[dim] / num_ranks) for place in range(num_ranks + 1)]
    parts = []
    for start, stop in zip(bounds, bounds[1:]):
        ranges = tuple(
            (start, stop) if each == dim else (0, size) for each, size in enumerate(tensor.shape)
        )
        parts.append(
            (tensor.narrow(dim, start, stop - start), TensorPart(tuple(tensor.shape), ranges))
        )
    return parts


def example() -> dict[str, Tensor]:
    """One tensor of each kind that matters."""
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "model/a.weight": torch.randn(13, 7, generator=generator),
        "model/b.weight": torch.randn(5, 6, 4, generator=generator, dtype=torch.float64),
        "model/half": torch.randn(9, 8, generator=generator).bfloat16(),
        "model/flags": torch.rand(11, generator=generator) > 0.5,
        "model/scalar": torch.tensor(3.25),
        "model/empty": torch.zeros(0, 4),
        "model/counts": torch.arange(12).reshape(3, 4).t(),  # not contiguous
    }
    return tensors


def save_cut(
    folder: Path,
    tensors: dict[str, Tensor],
    num_ranks: int,
    dim: int,
    step: int = 1,
    save_id: str = "job_1",
    **options: Any,
) -> Path:
    """Saves `tensors` from `num_ranks` ranks, all but the small ones cut along `dim`."""
    target = Target(folder, step, save_id)
    pieces: list[dict[str, Tensor]] = [{} for _ in range(num_ranks)]
    parts: list[dict[str, TensorPart]] = [{} for _ in range(num_ranks)]
    for place, (name, tensor) in enumerate(tensors.items()):
        if tensor.dim() > dim and tensor.shape[dim] >= num_ranks:
            for rank, (piece, part) in enumerate(cut(tensor, num_ranks, dim)):
                pieces[rank][name] = piece
                parts[rank][name] = part
        else:
            pieces[place % num_ranks][name] = tensor
    for rank in reversed(range(num_ranks)):
        write_rank(target, rank, take_snapshot(pieces[rank], {"rank": rank}, parts[rank]))
    return finish(target, num_ranks, options.pop("values", {"step": step}), **options)


def assert_same(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape
    assert torch.equal(got, expected)


def read_all(path: Path) -> dict[str, Tensor]:
    with Reader(path) as reader:
        return {name: reader.read(name) for name in reader.names()}


def saver_of(folder: Path, **options: Any) -> AsyncSaver:
    return AsyncSaver(folder, job_id="job", timeout_s=SECOND, **options)
