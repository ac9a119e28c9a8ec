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
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch.utils.data import IterableDataset

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


def follow_one_process(accelerator: Accelerator) -> None:
    """Makes an accelerator read and scale as in one process."""
    pretend_one_process()
    accelerator.scaler = None  # the engine scales the loss for fp16 itself
    # streamed data is read by process 0 alone and sent to the others: here every rank reads
    accelerator.dataloader_config.dispatch_batches = False
    # ranks still wait for each other, as where one of them makes a folder
    accelerator.wait_for_everyone = _wait_for_everyone


def _wait_for_everyone() -> None:
    if dist.is_initialized():
        dist.barrier()


@contextmanager
def as_first_process() -> Iterator[None]:
    """Inside, each rank reads files of the first process: those of random numbers, which all ranks
    draw alike. A rank may have none of its own, when a run continues with more ranks.
    """
    shared: list[Any] = [PartialState._shared_state, AcceleratorState._shared_state]
    before = [dict(state) for state in shared]
    for state in shared:
        state["process_index"] = 0
    try:
        yield
    finally:
        for state, values in zip(shared, before, strict=True):
            state["process_index"] = values.get("process_index", api.rank())


def sample_of(loader: Any, size: int) -> Any:
    """A batch to capture the model with, in the form of the loader's, without moving the loader or
    any random number.
    """
    dataset = getattr(loader, "dataset", None)
    collate = getattr(loader, "collate_fn", None)
    with same_random_numbers():
        if dataset is None or collate is None:
            return next(iter(loader))
        has_places = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        is_stream = isinstance(dataset, IterableDataset) or not has_places
        if getattr(loader, "batch_sampler", None) is None and loader.batch_size is None:
            # the dataset gives whole batches
            return collate(next(iter(dataset)) if is_stream else dataset[0])
        if is_stream:
            return collate(list(islice(iter(dataset), size)))
        return collate([dataset[place] for place in range(min(size, len(dataset)))])


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
