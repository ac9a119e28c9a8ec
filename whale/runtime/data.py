"""Each rank loads only the samples that its stages need; the order of samples is that of local
training.

The mini-batch is a list of sample numbers, the same on every rank. From it a rank takes the parts
that the plan gives its device in each micro-batch, and a stage that reads no input loads nothing.
The position is one number (samples seen), so it fits any number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

if TYPE_CHECKING:
    from whale.runtime.engine import Engine

Sampler = Callable[[int], Sequence[int]]
"""epoch -> sample numbers in order, the same on every rank"""


@dataclass(frozen=True)
class ShardedBatch:
    """One mini-batch of which this rank holds only its own samples."""

    batch: Any
    """collated samples of this rank in order of micro-batches; None when it needs none"""
    batch_size: int
    """of the whole mini-batch"""
    digest: bytes
    """of the sample numbers: ranks compare it"""
    num_rebalanced: int = 0
    """how often samples had been shared again when it was loaded"""


class ShardedLoader:
    """Made by `engine.loader(...)`: iterate for batches to give to `engine.step`; `state_dict()` is
    the position.
    """

    def __init__(
        self,
        engine: Engine,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        sampler: Sampler | None = None,
        collate: Callable[[list[Any]], Any] = default_collate,
        num_workers: int = 0,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size {batch_size}: a mini-batch needs at least 1 sample")
        self.engine = engine
        self.dataset = dataset
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.collate = collate
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise ValueError(
                "engine.loader needs a data set with __getitem__ and __len__, which "
                f"{type(dataset).__name__} has not: each rank reads its own samples by number. "
                "Give batches of another source whole to engine.step, the same on every rank"
            )
        self.num_samples = len(dataset)  # type: ignore[arg-type]
        if self.num_samples < batch_size:
            raise ValueError(
                f"the data set has {self.num_samples} samples, fewer than one mini-batch of "
                f"{batch_size}"
            )
        self._order = sampler or _default_order(self.num_samples, shuffle, seed)
        self.epoch = 0
        self.position = 0
        """samples of this epoch that were already given out"""

    def __len__(self) -> int:
        """Mini-batches of an epoch; a last one that is not full is left out, as every step must see
        the whole batch size.
        """
        return self.num_samples // self.batch_size

    def __iter__(self) -> Iterator[Any]:
        """The rest of the present epoch; the next call starts the next epoch."""
        self.engine.take_new_shares()  # not later: samples are loaded ahead
        num_rebalanced = self.engine.num_rebalanced
        order = list(self._order(self.epoch))
        starts = range(self.position, len(self) * self.batch_size, self.batch_size)
        batches = [order[start : start + self.batch_size] for start in starts]
        own = [self._own_samples(samples) for samples in batches]
        loaded = iter(
            DataLoader(
                self.dataset,
                batch_sampler=_NonEmpty(own),
                collate_fn=self.collate,
                num_workers=self.num_workers,
            )
        )
        given = (
            ShardedBatch(
                next(loaded) if mine else None,
                self.batch_size,
                hashlib.blake2b(repr(samples).encode(), digest_size=8).digest(),
                num_rebalanced,
            )
            for samples, mine in zip(batches, own, strict=True)
        )
        for batch in self.engine.copied_ahead(given):
            # before the step: a checkpoint after it continues with the next batch
            self.position += self.batch_size
            yield batch
        self.epoch += 1
        self.position = 0

    def _own_samples(self, samples: list[int]) -> list[int]:
        """The sample numbers of a mini-batch that this rank reads."""
        own: list[int] = []
        for start, stop in self.engine.own_samples(self.batch_size):
            own += samples[start:stop]
        return own

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues there, whatever the number of ranks."""
        if state["position"] % self.batch_size:
            raise ValueError(
                f"the position {state['position']} is not a multiple of batch_size "
                f"{self.batch_size}: use the batch size of the saved run"
            )
        self.epoch = int(state["epoch"])
        self.position = int(state["position"])


class _NonEmpty:
    """Batch sampler without the batches of which this rank needs nothing."""

    def __init__(self, batches: Sequence[list[int]]) -> None:
        self.batches = [batch for batch in batches if batch]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def _default_order(num_samples: int, shuffle: bool, seed: int) -> Sampler:
    def order(epoch: int) -> Sequence[int]:
        if not shuffle:
            return range(num_samples)
        generator = torch.Generator().manual_seed(
            int.from_bytes(
                hashlib.blake2b(f"{seed}|{epoch}".encode(), digest_size=7).digest(), "little"
            )
        )
        return torch.randperm(num_samples, generator=generator).tolist()

    return order
