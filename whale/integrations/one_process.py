"""Accelerate's picture of the job: every rank runs the loop of a single process.

Whale cuts the mini-batch itself, so each rank must see the whole one, in the order of a run on one
device: no sampler is sharded, nothing is gathered or averaged again. Ranks keep their number, by
which one of them writes and prints.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from accelerate.state import AcceleratorState, DistributedType, PartialState

from whale import api


def pretend_one_process() -> None:
    """Makes Accelerate's shared state that of one process."""
    api.configure()  # joins the other ranks, if nothing did so far
    shared: list[Any] = [PartialState._shared_state, AcceleratorState._shared_state]
    for state in shared:
        if state:
            state["num_processes"] = 1
            state["distributed_type"] = DistributedType.NO
    PartialState._shared_state["process_index"] = api.rank()


def sample_of(loader: Any, size: int) -> Any:
    """A batch to capture the model with, in the form of the loader's, without moving the loader or
    any random number.
    """
    dataset = getattr(loader, "dataset", None)
    collate = getattr(loader, "collate_fn", None)
    with same_random_numbers():
        if dataset is None or collate is None:
            return next(iter(loader))
        if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
            return collate([dataset[place] for place in range(min(size, len(dataset)))])
        return collate(list(islice(iter(dataset), size)))


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Random numbers drawn inside are drawn again afterwards."""
    import numpy

    python = random.getstate()
    of_numpy = numpy.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(of_numpy)
