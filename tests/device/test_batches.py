"""Mini-batches on their way to the device (issue 15, row 13): only the samples that a rank needs,
through pinned memory, while the step before still runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale as wh
from tests.device import streams
from tests.device.collectives import BACKEND
from tests.device.local_device import use_test_device
from tests.device.settings import settings
from tests.device.streams import counters
from tests.ranks import ModelServer, preload

preload("tests.device.test_batches")
WIDTH = 16
NUM_CLASSES = 5
BATCH_SIZE = 8
NUM_STEPS = 3
KERNEL_S = 0.005
EXACT = 1e-10


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    """Forks ranks that have the test device."""
    with ModelServer(use_test_device) as found:
        yield found


def _model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, NUM_CLASSES)).double()


class Labelled(nn.Module):
    """The loss divides by the number of labels that count, which needs all labels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _model()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), labels, ignore_index=-1)


def _batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH_SIZE, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(-1, NUM_CLASSES, (BATCH_SIZE,), generator=generator)
    return {"x": x, "labels": labels}


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """All batches, sample by sample."""

    def __len__(self) -> int:
        return NUM_STEPS * BATCH_SIZE

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        batch = _batch(index // BATCH_SIZE)
        return {name: tensor[index % BATCH_SIZE] for name, tensor in batch.items()}


def _train_locally() -> list[float]:
    model = Labelled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = model(**_batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _engine(stages: int) -> Any:
    wh.init({"num_micro_batch": 2, "check_batches": False, "check_replicas": 0})
    model = Labelled()
    if stages == 2:
        wh.annotate(model, {"net.0|net.1": wh.replicate(1), "net.2": wh.replicate(1)})
    return wh.parallelize(model, _batch(0), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))


@dataclass(frozen=True)
class Seen:
    losses: list[float]
    step_bytes: list[int]
    """copied to the device, step by step"""
    num_pageable: int


def _given(engine: Any, source: str) -> Iterator[Any]:
    batches = [_batch(step) for step in range(NUM_STEPS)]
    if source == "loader":
        return iter(engine.loader(Samples(), BATCH_SIZE))
    return engine.prefetch(batches) if source == "prefetch" else iter(batches)


def _train(_: None, stages: int, source: str) -> Seen:
    engine = _engine(stages)
    streams.synchronize()
    counters.clear()
    results = []
    step_bytes = []
    for batch in _given(engine, source):
        results.append(engine.step(batch))
        step_bytes.append(counters.incoming_bytes)
        counters.incoming_bytes = 0
    num_pageable = counters.pageable_copies
    return Seen([result.loss for result in results], step_bytes, num_pageable)


X_BYTES = BATCH_SIZE * WIDTH * 8
LABEL_BYTES = BATCH_SIZE * 8
ONCE_BYTES = 4 * 8
"""the numbers of 4 parameters, in the first step"""


@pytest.mark.parametrize(
    ("stages", "source"),
    [
        (1, "whole batches"),
        (1, "loader"),
        (2, "prefetch"),
        pytest.param(1, "prefetch", marks=pytest.mark.slow),
        pytest.param(2, "whole batches", marks=pytest.mark.slow),
        pytest.param(2, "loader", marks=pytest.mark.slow),
    ],
)
def test_only_the_rows_of_a_rank_are_copied(server: ModelServer, stages: int, source: str) -> None:
    """Before, every rank copied all samples of every tensor that it reads."""
    reference = _train_locally()
    ranks = server.run(_train, 2, stages, source, backend=BACKEND)
    for rank, seen in enumerate(ranks):
        assert seen.losses == pytest.approx(reference, rel=EXACT)
        if stages == 1:
            # half of the samples; the number of labels that count needs all labels, which a
            # loader's ranks put together
            labels = LABEL_BYTES // 2 if source == "loader" else LABEL_BYTES * 3 // 2
            expected = X_BYTES // 2 + labels
        elif rank == 0:
            expected = X_BYTES
        else:
            expected = LABEL_BYTES if source == "loader" else 2 * LABEL_BYTES
        assert sum(seen.step_bytes) <= expected * NUM_STEPS + ONCE_BYTES
        assert seen.num_pageable == 0


def _arrival(_: None, source: str) -> tuple[list[bool], list[bool]]:
    """Whether the next batch is there, and whether the device is done, at the end of each step but
    the last.
    """
    engine = _engine(1)
    device = engine._job.ranks.device
    engine.step(_batch(0))
    streams.synchronize()
    arrived = []
    done = []
    copies = []
    ahead = engine._batches.ahead

    def note(batch: Any, num_rebalanced: int) -> Any:
        found = ahead(batch, num_rebalanced)
        copies.append(found.copied.tensors[0].moment)
        return found

    engine._batches.ahead = note
    settings.kernel_s = KERNEL_S
    for batch in _given(engine, source):
        engine.step(batch)
        if len(copies) < NUM_STEPS or len(arrived) < NUM_STEPS - 1:
            streams.time.sleep(KERNEL_S)
            arrived.append(device.is_over(copies[-1]))
            done.append(device.is_over(device.event()))
    settings.kernel_s = 0.0
    return arrived[: NUM_STEPS - 1], done[: NUM_STEPS - 1]


@pytest.mark.parametrize("source", ["prefetch", "loader"])
def test_the_next_batch_arrives_while_a_step_runs(server: ModelServer, source: str) -> None:
    ((arrived, done),) = server.run(_arrival, 1, source, backend=BACKEND)
    assert arrived == [True] * (NUM_STEPS - 1)
    assert done == [False] * (NUM_STEPS - 1)


def test_a_loader_that_counts_is_refused() -> None:
    wh.init()
    engine = wh.parallelize(Labelled(), _batch(0), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    loader = engine.loader(Samples(), BATCH_SIZE)
    assert len(list(engine.prefetch(loader))) == NUM_STEPS

    class Counting(list[Any]):
        def state_dict(self) -> dict[str, int]:
            return {}

    with pytest.raises(ValueError, match="one batch too far"):
        next(engine.prefetch(Counting([_batch(0)])))
