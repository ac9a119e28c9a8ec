"""Python code in `forward` that computes with sizes or goes through sets: it trains like local."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale as wh
from tests.exactness import local_training
from tests.integration.programs import DOUBLE, WIDTH, Cases, Layered, rows, sgd, trains_like_local
from tests.ranks import preload, run_ranks

preload("tests.integration.test_python_in_forward")


class ListOfNumbers(Layered):
    def unusual(self, x: Tensor) -> Tensor:
        for factor in torch.arange(2, 5).tolist():
            x = x / factor
        return x


class SizesAsInts(Layered):
    def unusual(self, x: Tensor) -> Tensor:
        num_samples, length, width = (int(size) for size in x.shape)
        return x.reshape(num_samples * length, width).tanh().reshape(num_samples, length, width)


class Lengths(Layered):
    """Sizes by `len`, of tensors and of what is none."""

    def unusual(self, x: Tensor) -> Tensor:
        parts = [x, x.tanh()]
        found = torch.cat(parts).view(len(parts), len(x), -1).sum(0)
        zeros = torch.zeros(len(found), 1, dtype=x.dtype)
        return torch.cat([found, zeros], 1) * len({"a": 1})


class ManySamples(Layered):
    """Takes another path for a large batch; a micro-batch takes that of its mini-batch."""

    def unusual(self, x: Tensor) -> Tensor:
        if x.shape[0] >= 8:
            x = x.contiguous() * 2
        return x


class ManyRows(Layered):
    """The same for three rows of each sample: the branch is at no whole number of samples."""

    def unusual(self, x: Tensor) -> Tensor:
        rows = x[:, None].expand(-1, 3, -1).flatten(0, 1)
        rows = rows * 2 if rows.shape[0] < 25 else rows * 3
        return rows.unflatten(0, (-1, 3)).sum(1)


class Halves(Layered):
    """Two views of each sample as one batch, taken apart again."""

    def unusual(self, x: Tensor) -> Tensor:
        first, second = torch.cat([x, x.tanh()]).chunk(2)
        return first - second


class SizeInLoss(Layered):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean() * (2.0 if x.shape[0] > 4 else 1.0)


class SizesAsFloats(Layered):
    """A sum divided by a float of a size, in a file that takes `float` for the type that it is."""

    def forward(self, x: Tensor) -> Tensor:
        total = self.layer(x).square().sum() + torch.ones(len(x), dtype=torch.float64).sum()
        return total / float(x.shape[0]) * (2.0 if isinstance(1.0, float) else 0.0)


CASES: Cases = {
    "arange as a list": (ListOfNumbers, lambda: rows(8, WIDTH)),
    "len of tensors": (Lengths, lambda: rows(8, 3, WIDTH)),
    "int of sizes": (SizesAsInts, lambda: rows(8, 3, WIDTH)),
    "float of sizes": (SizesAsFloats, lambda: rows(8, WIDTH)),
    "branch on the batch size": (ManySamples, lambda: rows(10, WIDTH)),
    "branch that a small batch does not take": (ManySamples, lambda: rows(6, WIDTH)),
    "halves of a joined batch": (Halves, lambda: rows(8, WIDTH)),
    "batch size in the loss": (SizeInLoss, lambda: rows(6, WIDTH)),
}


@pytest.mark.parametrize("name", CASES)
def test_trains_like_local(name: str) -> None:
    trains_like_local(*CASES[name])


@pytest.mark.parametrize("build", [ManySamples, ManyRows])
def test_a_branch_is_that_of_the_whole_mini_batch(build: Callable[[], nn.Module]) -> None:
    """Batches on both sides of the branch, in micro-batches that are all on one side of it."""
    torch.manual_seed(0)
    model = build()
    data = [rows(number, WIDTH) for number in (10, 6, 12, 4)]
    reference = local_training(deepcopy(model), data, None, sgd).losses
    wh.init(wh.Config({"num_micro_batch": 2}))
    engine = wh.parallelize(model, data[0], optimizer=sgd)
    assert [engine.step(batch).loss for batch in data] == pytest.approx(reference, rel=1e-12)
    assert engine.num_captures == 2


class TwoViews(nn.Module):
    """Two inputs joined before anything says that they have the same number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        both = F.normalize(self.layer(torch.cat([one, other])), dim=-1)
        num_samples = one.shape[0]
        itself = torch.eye(2 * num_samples, dtype=torch.bool)
        scores = (both @ both.T).masked_fill(itself, -1e9)
        place = torch.arange(num_samples)
        return F.cross_entropy(scores, torch.cat([place + num_samples, place]))


def test_two_views_are_compared_in_one_place() -> None:
    torch.manual_seed(0)
    model = TwoViews()
    data = [(rows(number, WIDTH), rows(number, WIDTH)) for number in (4, 6)]
    reference = local_training(deepcopy(model), data, None, sgd)
    wh.init(wh.Config({"num_micro_batch": 1}))
    engine = wh.parallelize(model, data[0], optimizer=sgd)
    assert [engine.step(batch).loss for batch in data] == pytest.approx(reference.losses, rel=1e-12)
    assert engine.num_captures == 1


EINX: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "subtract": lambda einx, x: einx.subtract("b i, b j -> b i j", x, x).sum(-1),
    "rearrange": lambda einx, x: einx.rearrange("b (g k) -> b (k g)", x, k=2),
    "sum": lambda einx, x: x + einx.sum("b (g [k])", x, k=2)[:, :1],
    "merged with the samples": lambda einx, x: einx.rearrange(
        "(b g) k -> b (g k)", einx.rearrange("b (g k) -> (b g) k", x, k=2).tanh(), g=WIDTH // 2
    ),
    "where": lambda einx, x: einx.where("b, b i, -> b i", x[:, 0] > 0, x, 0.0),
    "softmax": lambda einx, x: einx.softmax("b [i]", x),
}


class WithEinx(Layered):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def unusual(self, x: Tensor) -> Tensor:
        return EINX[self.name](importlib.import_module("einx"), x)


@pytest.mark.slow
@pytest.mark.parametrize("name", EINX)
def test_einx_which_hashes_sizes(name: str) -> None:
    pytest.importorskip("einx", reason="make setup-integrations")
    torch.manual_seed(0)
    model = WithEinx(name)
    data = [rows(number, WIDTH) for number in (8, 6)]
    reference = local_training(deepcopy(model), data, None, sgd)
    wh.init(wh.Config({"num_micro_batch": 2}))
    engine = wh.parallelize(model, data[0], optimizer=sgd)
    losses = [engine.step(batch).loss for batch in data]
    assert losses == pytest.approx(reference.losses, rel=1e-12)
    assert engine.num_captures == 1


class GoesThroughSet(nn.Module):
    """Computes its parts in an order that each process has for itself, as strings of a set do."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order
        self.parts = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH, dtype=DOUBLE) for name in "abc"})

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = {name: self.parts[name](x).tanh() for name in self.order}
        joined = found["a"] * found["b"] + found["c"]
        return (joined * (y > 0)).square().sum() / (y > 0).sum() + joined.mean()


def train_set(config: dict[str, Any]) -> list[float]:
    torch.manual_seed(0)
    wh.init(wh.Config(config))
    model = GoesThroughSet("abc" if wh.rank() == 0 else "cab")
    data = [(rows(6, WIDTH), rows(6, WIDTH)) for _ in range(3)]
    engine = wh.parallelize(model, data[0], optimizer=sgd)
    return [engine.step(batch).loss for batch in data]


@pytest.mark.parametrize("config", [{}, {"num_task_graph": 2, "num_micro_batch": 2}])
def test_code_that_goes_through_a_set_trains_on_all_ranks(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = GoesThroughSet("abc")
    data = [(rows(6, WIDTH), rows(6, WIDTH)) for _ in range(3)]
    expected = local_training(model, data, None, sgd).losses
    for losses in run_ranks(train_set, 2, config):
        assert losses == pytest.approx(expected, rel=1e-12)


class NamedAsTorch(nn.Module):
    """Weights and layers with names that a graph module of torch has itself; the class weights of a
    loss lie in buffers whose names differ by a dot.
    """

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.full((WIDTH,), 0.5, dtype=DOUBLE))
        self.graph = nn.Linear(WIDTH, 3, dtype=DOUBLE)
        self.register_buffer("meta", torch.ones(WIDTH, dtype=DOUBLE))
        self.register_buffer("recompile", torch.tensor([1.0, 2.0, 3.0], dtype=DOUBLE))
        self.register_buffer("a_b", torch.tensor([3.0, 1.0, 2.0], dtype=DOUBLE))
        self.a = nn.Module()
        self.a.register_buffer("b", torch.tensor([1.0, 5.0, 2.0], dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        self.meta += self.code.detach()
        labels = x[:, 0].abs().long() % 3
        losses = F.cross_entropy(self.graph(x * self.code + self.meta), labels, reduction="none")
        found = torch.zeros((), dtype=DOUBLE)
        for weight in (self.a_b, self.a.b, self.recompile):
            found = found + (losses * weight[labels]).sum() / weight[labels].sum()
        return found


@pytest.mark.parametrize("marks", [{}, {"*": wh.split(1)}])
def test_names_that_torch_has_itself(marks: dict[str, wh.Strategy]) -> None:
    """`code` ended in a traceback; of two buffers in denominators one was read twice."""
    torch.manual_seed(0)
    model = NamedAsTorch()
    data = [rows(8, WIDTH), rows(8, WIDTH)]
    reference = local_training(deepcopy(model), data, None, sgd)
    wh.init(wh.Config({"clip_grad_norm": 100.0}))
    engine = wh.parallelize(wh.annotate(model, marks) if marks else model, data[0], optimizer=sgd)
    losses = [engine.step(batch).loss for batch in data]
    assert losses == pytest.approx(reference.losses, rel=1e-12)
    assert engine.full_state_dict().keys() == NamedAsTorch().state_dict().keys()
