"""Numbers in Python that a script changes between steps: the next step has them, as locally."""

from __future__ import annotations

import argparse
import dis
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import whale as wh
from tests.exactness import run_loss
from whale.capture.python_numbers import PythonNumbers
from whale.integrations.training_step import _reads_index
from whale.runtime.batches import Batches

WIDTH = 6
DOUBLE = torch.float64
BETA = 1.0
FACTORS = {"penalty": 1.0, "other": 1.0}
ARGS = argparse.Namespace(weight=1.0, unread=1.0)
LATE = torch.ones((), dtype=DOUBLE)


def as_in_the_beginning() -> None:
    globals()["BETA"] = 1.0
    FACTORS.update(penalty=1.0, other=1.0)
    ARGS.weight = 1.0
    LATE.fill_(1.0)


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    yield
    as_in_the_beginning()


class Settings:
    def __init__(self) -> None:
        self.shift = 1.0
        self.unread = 1.0


class Net(nn.Module):
    """A number of its own, settings in three forms, a layer with one, and a count that is only written."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)
        self.norm = nn.LayerNorm(WIDTH, dtype=DOUBLE)
        self.statistics = nn.BatchNorm1d(WIDTH, dtype=DOUBLE)
        self.temperature = 1.0
        self.calls = 0
        self.settings = Settings()
        self.given = argparse.Namespace(factor=1.0)
        self.table = {"scale": 1.0}
        self.phase = "first"
        self._bias = 0.0
        self.weights = [1.0, 1.0]
        self.late: float | None = None

    def count(self) -> int:
        return self.calls

    def forward(self, x: Tensor) -> Tensor:
        found = self.statistics(self.norm(self.layer(x))) / self.temperature
        found = found * self.settings.shift * self.given.factor * self.table["scale"]
        found = found * self.weights[0] + self._bias
        if self.late is not None:
            found = found * self.late
        return found if self.phase == "first" else found.tanh()

    def set_bias(self, value: float) -> None:
        self._bias = value


def scaled(value: Tensor) -> Tensor:
    return value * FACTORS["penalty"] * ARGS.weight * LATE


def loss(output: Tensor, x: Tensor) -> Tensor:
    return output.square().mean() * BETA + scaled((output - x).square().mean())


def with_variable() -> tuple[Callable[[Tensor, Tensor], Tensor], Callable[[float], None]]:
    factor = 1.0

    def in_closure(output: Tensor, x: Tensor) -> Tensor:
        return factor * output.square().mean()

    def change(value: float) -> None:
        nonlocal factor
        factor = value

    return in_closure, change


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, WIDTH, dtype=DOUBLE, generator=generator) for _ in range(3)]


def change_number(model: Net) -> None:
    model.temperature = 0.5


def change_layer(model: Net) -> None:
    model.norm.eps = 0.5


def freeze_statistics(model: Net) -> None:
    model.statistics.eval()


def change_global(model: Net) -> None:
    globals()["BETA"] = 0.25


def change_dict(model: Net) -> None:
    FACTORS["penalty"] = 3.0


def change_arguments(model: Net) -> None:
    ARGS.weight = 3.0


def change_tensor(model: Net) -> None:
    LATE.mul_(2)


def change_settings(model: Net) -> None:
    model.settings.shift = 0.5


def change_namespace(model: Net) -> None:
    model.given.factor = 0.5


def change_table(model: Net) -> None:
    model.table["scale"] = 0.5


def change_word(model: Net) -> None:
    model.phase = "second"


def change_by_method(model: Net) -> None:
    model.set_bias(0.5)


def change_list(model: Net) -> None:
    model.weights[0] = 0.5


def change_nothing_to_something(model: Net) -> None:
    model.late = 0.5


CHANGES = [
    change_number,
    change_word,
    change_by_method,
    change_list,
    change_nothing_to_something,
    change_settings,
    change_namespace,
    change_table,
    change_layer,
    freeze_statistics,
    change_global,
    change_dict,
    change_arguments,
    change_tensor,
]


def local_losses(change: Callable[[Net], None], loss: Any = loss) -> list[float]:
    model = Net()
    optimizer = sgd(model.parameters())
    losses = []
    for step, x in enumerate(batches()):
        if step == 1:
            change(model)
        optimizer.zero_grad()
        value = run_loss(model, x, loss)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


@pytest.mark.parametrize("change", CHANGES)
def test_the_next_step_has_the_new_number(
    change: Callable[[Net], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The graph had that of its capture for ever, without a word."""
    model = Net()
    data = batches()
    wh.init()
    engine = wh.parallelize(model, data[0], optimizer=sgd, loss=loss)
    losses = [engine.step(data[0]).loss]
    change(model)
    losses += [engine.step(x).loss for x in data[1:]]
    assert engine.num_captures == 2
    assert sum("captured again whenever" in record.message for record in caplog.records) == 1
    as_in_the_beginning()
    assert losses == pytest.approx(local_losses(change), rel=1e-12)


def test_a_tensor_is_not_taken_for_one_that_is_gone() -> None:
    """Python gives the memory, and so the `id`, of what is gone to the next object."""

    def with_tensor(output: Tensor, x: Tensor) -> Tensor:
        return output.square().mean() * factor.item()

    factor: Any = torch.ones(())
    numbers = PythonNumbers(Net(), with_tensor)
    before = numbers.now(in_training=True)
    assert numbers.now(in_training=True) == before
    first = id(factor)
    factor = None
    others = [torch.zeros(()) for _ in range(1000)]
    (factor,) = (each for each in others if id(each) == first)
    assert numbers.now(in_training=True) != before


class Prepared(nn.Module):
    """Has places for what a script prepares between two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Any = None
        self.parts: list[Any] = [None]

    def forward(self, x: Tensor) -> Tensor:
        return x if self.table is None and self.parts[0] is None else -x


@pytest.mark.parametrize("make", [lambda: np.zeros(3), lambda: [torch.zeros(3)], object])
def test_what_is_no_number_any_more_is_compared_as_itself(make: Callable[[], Any]) -> None:
    """An array gives an array when it is asked whether it is equal, and that has no truth."""
    model = Prepared()
    numbers = PythonNumbers(model)
    values = [numbers.now(in_training=True)]
    for _ in range(2):
        model.table = make()
        model.parts[0] = make()
        values.append(numbers.now(in_training=True))
        assert numbers.now(in_training=True) == values[-1]
        assert values[-1] != values[-2]
    said = numbers.difference(values[0], values[1])
    assert said is not None and said.startswith("table is ")


def test_classes_of_a_notebook_are_the_users_own() -> None:
    """There `__main__` has no file, and words were left as they were captured."""

    class Typed(Prepared):
        __module__ = "__main__"

    model = Typed()
    numbers = PythonNumbers(model)
    before = numbers.now(in_training=True)
    model.table = "another"
    assert numbers.now(in_training=True) != before


def test_an_index_is_read_where_python_loads_two_names_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python 3.13 does so for `batch * index`. The index of the first batch stayed in the graph."""

    def training_step(self: Any, batch: Tensor, index: int) -> Tensor:
        return batch * index

    assert _reads_index(training_step)
    both = SimpleNamespace(opname="LOAD_FAST_LOAD_FAST", argval=("batch", "index"))
    monkeypatch.setattr(dis, "get_instructions", lambda code: [both])
    assert _reads_index(training_step)


def test_a_variable_of_a_closure() -> None:
    in_closure, change = with_variable()
    data = batches()
    wh.init()
    engine = wh.parallelize(Net(), data[0], optimizer=sgd, loss=in_closure)
    losses = [engine.step(data[0]).loss]
    change(2.0)
    losses += [engine.step(x).loss for x in data[1:]]
    change(1.0)
    assert losses == pytest.approx(local_losses(lambda _: change(2.0), in_closure), rel=1e-12)


def test_numbers_that_nothing_depends_on_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """The model is captured once more to find that out, and then no more."""
    model = Net()
    data = batches()
    wh.init()
    engine = wh.parallelize(model, data[0], optimizer=sgd, loss=loss)
    for step, x in enumerate(data):
        model.calls = step
        FACTORS["other"] = ARGS.unread = float(step)
        engine.step(x)
    assert engine.num_captures == 1
    said = [each.message for each in caplog.records if "captured" in each.message]
    assert len(said) == 1 and said[0].startswith("calls is 1, and was 0, which did not change")


def test_ranks_compare_which_numbers_changed_and_not_their_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A measured time on the model is another one on every rank: the watch ended the job for it."""
    notes: list[str] = []
    monkeypatch.setattr(Batches, "_note", lambda self, shapes: notes.append(str(shapes)))
    x = batches()[0]
    for value in (2, 3):
        model = Net()
        wh.init()
        engine = wh.parallelize(model, x, optimizer=sgd, loss=loss)
        model.calls = value
        engine.step(next(iter(engine.loader(list(x), 4))))
        model.temperature = float(value)
        engine.step(x)
    assert notes[:2] == notes[2:]
    assert notes[0].endswith("with another calls")
    assert notes[1].endswith("with another temperature")  # nothing depends on `calls`


class OtherInEvaluation(Net):
    """Divides by its number in evaluation only."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if self.training else self.layer(x) / self.temperature


def test_a_number_that_only_evaluation_depends_on() -> None:
    model = OtherInEvaluation()
    x = batches()[0]
    wh.init()
    engine = wh.parallelize(model, x, optimizer=sgd, loss=loss)
    engine.evaluate(x)
    model.temperature = 0.5
    engine.step(x)
    local = engine.module()
    assert local is not None and local.temperature == 0.5
    expected = loss(local.eval()(x), x).item()
    assert engine.evaluate(x).loss == pytest.approx(expected, rel=1e-12)


def test_an_evaluation_and_a_loader_have_the_new_number() -> None:
    model = Net()
    x = batches()[0]
    wh.init()
    engine = wh.parallelize(model, x, optimizer=sgd, loss=loss)
    engine.evaluate(x)
    model.temperature = 0.5
    local = Net().eval()
    local.temperature = 0.5
    expected = loss(local(x), x).item()
    assert engine.evaluate(x).loss == pytest.approx(expected, rel=1e-12)
    batch = next(iter(engine.loader(list(x), 4)))
    expected = loss(local.train()(x), x).item()
    assert engine.step(batch).loss == pytest.approx(expected, rel=1e-12)


def test_parameters_that_are_frozen_later_are_refused() -> None:
    model = Net()
    x = batches()[0]
    wh.init()
    engine = wh.parallelize(model, x, optimizer=sgd, loss=loss)
    engine.step(x)
    model.layer.requires_grad_(False)
    with pytest.raises(ValueError, match=r"requires_grad of layer\.weight was set to False.*Try: "):
        engine.step(x)
