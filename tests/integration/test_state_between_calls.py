"""What `forward` leaves for its next call: tables and buffers train like local, a memory of samples
or weights is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from copy import deepcopy
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale as wh
from tests.exactness import local_training
from tests.integration.programs import DOUBLE, WIDTH, Cases, Layered, rows, sgd, trains_like_local
from tests.ranks import preload, run_ranks

preload("tests.integration.test_state_between_calls")


class CachedTable(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None, persistent=False)

    def unusual(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table) < x.shape[1]:
            table = torch.arange(x.shape[1], dtype=DOUBLE)[:, None] / 10
            self.register_buffer("table", table, persistent=False)
        return x + self.table[: x.shape[1]]


class EmptyTable(Layered):
    """A buffer that is not saved, empty until forward fills it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(0, dtype=DOUBLE), persistent=False)

    def unusual(self, x: Tensor) -> Tensor:
        if self.table.shape[0] < x.shape[1]:
            self.table = torch.arange(x.shape[1], dtype=DOUBLE)[:, None] / 10
        return x + self.table[: x.shape[1]]


CASES: Cases = {
    "buffer made in forward": (CachedTable, lambda: rows(8, 3, WIDTH)),
    "empty buffer filled in forward": (EmptyTable, lambda: rows(8, 3, WIDTH)),
}


@pytest.mark.parametrize("name", CASES)
def test_trains_like_local(name: str) -> None:
    trains_like_local(*CASES[name])


@functools.lru_cache
def positions(length: int) -> Tensor:
    return torch.arange(length, dtype=DOUBLE)[:, None] / 10


TABLES: dict[int, Tensor] = {}


class TablesKept(Layered):
    """Tables that forward makes in its first call and keeps in every place but a buffer."""

    of_class: ClassVar[dict[str, tuple[Tensor, ...]]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.own: dict[str, dict[int, Tensor]] = {"nested": {}}

    @functools.cached_property
    def scale(self) -> Tensor:
        return torch.full((WIDTH,), 0.5, dtype=DOUBLE)

    def unusual(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if not hasattr(self, "plain"):
            self.plain = torch.arange(WIDTH, dtype=DOUBLE)
        if length not in TABLES:
            TABLES[length] = torch.ones(length, 1, dtype=DOUBLE)
        if length not in self.own["nested"]:
            self.own["nested"][length] = torch.zeros(length, 1, dtype=DOUBLE)
        if "ones" not in self.of_class:
            self.of_class["ones"] = (torch.ones(WIDTH, dtype=DOUBLE),)
        kept = self.own["nested"][length] + TABLES[length] + self.of_class["ones"][0]
        return x * self.scale + self.plain + kept + positions(length)


def test_tables_that_forward_keeps_are_not_those_of_the_capture() -> None:
    """Fake tensors of the export stayed in caches, and the model itself met them."""
    torch.manual_seed(0)
    model = TablesKept()
    data = [rows(8, 3, WIDTH), rows(8, 3, WIDTH)]
    before = deepcopy(model)
    wh.init(wh.Config({"num_micro_batch": 2}))
    engine = wh.parallelize(model, data[0], optimizer=sgd)
    losses = [engine.step(batch).loss for batch in data]
    evaluated = engine.evaluate(data[0]).loss  # a capture of its own
    reference = local_training(before, data, None, sgd)
    assert losses == pytest.approx(reference.losses, rel=1e-12)
    assert evaluated == pytest.approx(before(data[0]).item(), rel=1e-12)


class GrowingMemory(EmptyTable):
    """The same buffer, and every call adds to it."""

    def unusual(self, x: Tensor) -> Tensor:
        shifted = x + self.table.sum()
        self.table = torch.cat([self.table, torch.ones(1, dtype=DOUBLE)])
        return shifted


def test_a_memory_that_grows_from_call_to_call_is_refused() -> None:
    wh.init(wh.Config())
    with pytest.raises(ValueError, match="buffer of another form `table`"):
        wh.parallelize(GrowingMemory(), rows(8, 3, WIDTH), optimizer=sgd)


class Remembering(nn.Module):
    """Reads in a call what an earlier one has left: with the first samples and weights it gives the
    same loss again.
    """

    def __init__(self, keep: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)
        keep(self)

    def remembered(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) - self.remembered(x)).square().mean(-1).mean()


def as_empty_buffer(model: nn.Module) -> None:
    model.register_buffer("kept", torch.zeros(0, dtype=DOUBLE), persistent=False)


def as_missing_buffer(model: nn.Module) -> None:
    model.register_buffer("kept", None, persistent=False)


def as_attribute(model: nn.Module) -> None:
    model.kept = None


class RunningMean(Remembering):
    def remembered(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        is_first = self.kept is None or self.kept.numel() == 0
        self.kept = mean if is_first else 0.9 * self.kept + 0.1 * mean
        return self.kept


class FirstBatch(Remembering):
    def remembered(self, x: Tensor) -> Tensor:
        if self.kept is None or self.kept.numel() == 0:
            self.kept = x.detach().abs().amax(0)
        return self.kept


class FirstWeight(Remembering):
    def remembered(self, x: Tensor) -> Tensor:
        if self.kept is None or self.kept.numel() == 0:
            self.kept = self.layer.weight.detach().clone()
        return (self.layer.weight - self.kept).square().sum()


class BatchBefore(Remembering):
    def remembered(self, x: Tensor) -> Tensor:
        is_first = self.kept is None or self.kept.numel() == 0
        before = x.detach().mean() if is_first else self.kept.mean()
        self.kept = x.detach()
        return before


class FirstWeightInDict(Remembering):
    def __init__(self) -> None:
        super().__init__(lambda model: setattr(model, "kept", {"inner": {}}))

    def remembered(self, x: Tensor) -> Tensor:
        kept = self.kept["inner"]
        if "weight" not in kept:
            kept["weight"] = self.layer.weight.detach().clone()
        return (self.layer.weight - kept["weight"]).square().sum()


@pytest.mark.parametrize(
    "build",
    [
        lambda: RunningMean(as_empty_buffer),
        lambda: RunningMean(as_missing_buffer),
        lambda: RunningMean(as_attribute),
        lambda: FirstBatch(as_empty_buffer),
        lambda: FirstWeight(as_empty_buffer),
        lambda: FirstWeight(as_attribute),
        lambda: BatchBefore(as_empty_buffer),
        FirstWeightInDict,
    ],
)
def test_a_memory_of_samples_or_weights_is_refused(build: Callable[[], nn.Module]) -> None:
    wh.init(wh.Config())
    with pytest.raises(ValueError, match=r"`kept`.* update"):
        wh.parallelize(build(), rows(8, WIDTH), optimizer=sgd)


class Carried(nn.Module):
    """A recurrent model whose state goes on from batch to batch, samples first."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True, dtype=DOUBLE)
        self.head = nn.Linear(WIDTH, 1, dtype=DOUBLE)

    def forward(self, x: Tensor, state: Tensor) -> dict[str, Tensor]:
        out, last = self.cell(x, state.transpose(0, 1).contiguous())
        return {"loss": self.head(out).square().mean(), "state": last.transpose(0, 1)}


def carried_batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(6, 4, WIDTH, dtype=DOUBLE, generator=generator) for _ in range(4)]


def train_carried(config: dict[str, Any]) -> tuple[list[float], Tensor]:
    torch.manual_seed(0)
    state = torch.zeros(6, 1, WIDTH, dtype=DOUBLE)
    data = carried_batches()
    wh.init(wh.Config(config))
    engine = wh.parallelize(Carried(), {"x": data[0], "state": state}, optimizer=sgd)
    losses = []
    for x in data:
        result = engine.step({"x": x, "state": state}, outputs=True)
        state = result.outputs["state"]
        losses.append(result.loss)
    return losses, state


@pytest.mark.parametrize(
    ("num_ranks", "config"), [(1, {"num_micro_batch": 2}), (2, {}), (2, {"num_task_graph": 2})]
)
def test_a_state_is_carried_from_batch_to_batch(num_ranks: int, config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Carried()
    optimizer = sgd(model.parameters())
    state = torch.zeros(6, 1, WIDTH, dtype=DOUBLE)
    expected = []
    for x in carried_batches():
        optimizer.zero_grad()
        output = model(x, state)
        output["loss"].backward()
        optimizer.step()
        state = output["state"].detach()
        expected.append(output["loss"].item())
    for losses, last in run_ranks(train_carried, num_ranks, config):
        assert losses == pytest.approx(expected, rel=1e-10)
        assert torch.allclose(last, state, rtol=0, atol=1e-12), "every rank has the state"


class AveragedWeight(nn.Module):
    """A moving average of a weight; `reads`: which of its values are read where."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.reads = reads
        self.first = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)
        self.middle = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)
        self.last = nn.Linear(WIDTH, 5, dtype=DOUBLE)
        self.register_buffer("mean", torch.ones(WIDTH, dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        old = self.mean
        self.mean = 0.9 * self.mean + 0.1 * self.first.weight.detach().mean(0)
        hidden = self.first(x) + (self.mean if self.reads == "new" else old)
        out = self.last(torch.tanh(self.middle(torch.tanh(hidden))))
        if self.reads == "old in both parts":
            out = out * old[0]
        return out.square().mean()


READS = ("new", "old", "old in both parts")


def train_averages(config: dict[str, Any]) -> list[tuple[list[float], dict[str, Tensor]]]:
    found = []
    for reads in READS:
        torch.manual_seed(0)
        model = AveragedWeight(reads)
        data = [rows(6, WIDTH) for _ in range(3)]
        wh.init(wh.Config(config))
        engine = wh.parallelize(model, data[0], optimizer=sgd)
        found.append(([engine.step(batch).loss for batch in data], engine.full_state_dict()))
    return found


def test_a_buffer_is_read_where_it_is_updated() -> None:
    """Stages that did not update it kept its first value, without a word."""
    config = {"num_task_graph": 2, "num_micro_batch": 2}
    trained, _ = run_ranks(train_averages, 2, config)
    for reads, (losses, state) in zip(READS, trained, strict=True):
        torch.manual_seed(0)
        model = AveragedWeight(reads)
        data = [rows(6, WIDTH) for _ in range(3)]
        expected = local_training(model, data, None, sgd, num_micro_batch=2)
        assert losses == pytest.approx(expected.losses, rel=1e-10), reads
        torch.testing.assert_close(state["mean"], model.mean, rtol=1e-12, atol=0)


class ReadTwice(nn.Module):
    """Both parts use the old value of a buffer itself, each with samples of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with wh.replicate(1):
            hidden = self.first(x) + self.mean
        with wh.replicate(1):
            out = self.last(hidden) * self.mean
        self.mean = 0.9 * self.mean + 0.1 * self.first.weight.detach().mean(0)
        return out.square().mean()


def test_a_buffer_that_two_stages_read_is_refused() -> None:
    with pytest.raises(ValueError, match=r"buffer mean gets its new value on stage ., and stage"):
        wh.plan(ReadTwice(), torch.randn(4, WIDTH), cluster=2)
    wh.plan(ReadTwice(), torch.randn(4, WIDTH), cluster=1)


class RunningInputs(nn.Module):
    """Inputs scaled by running statistics of their own, as those of a policy are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.layer(x - self.mean).square().mean()


class SeenClasses(nn.Module):
    """Rare classes count more, by all that were seen so far."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 5, dtype=DOUBLE)
        self.register_buffer("seen", torch.ones(5, dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        labels = x[:, 0].abs().long() % 5
        self.seen += torch.bincount(labels, minlength=5)
        return F.cross_entropy(self.layer(x), labels, weight=1 / self.seen)


@pytest.mark.parametrize("build", [RunningInputs, SeenClasses])
def test_statistics_of_the_whole_mini_batch_are_updated_once(build: Callable[[], Any]) -> None:
    """Every micro-batch updated them by the same numbers again."""
    torch.manual_seed(0)
    model = build()
    data = [rows(8, WIDTH), rows(8, WIDTH)]
    reference = local_training(deepcopy(model), data, None, sgd).losses
    wh.init(wh.Config({"num_micro_batch": 2}))
    with pytest.raises(ValueError, match=r'local training does so once.*"num_micro_batch": 1'):
        wh.parallelize(deepcopy(model), data[0], optimizer=sgd)
    wh.init(wh.Config())
    engine = wh.parallelize(model, data[0], optimizer=sgd)
    assert [engine.step(batch).loss for batch in data] == pytest.approx(reference, rel=1e-12)
