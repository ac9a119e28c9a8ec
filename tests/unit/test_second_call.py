"""A model whose next call depends on what an earlier one has left is refused by name, whoever can
compare it; one that leaves tables or figures for others to look at trains like local.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import whale as wh
from tests.exactness import local_training
from whale.capture.batch import read_batch
from whale.capture.capture import capture_training
from whale.capture.export import Task
from whale.capture.forward_state import ForwardState
from whale.capture.state_places import is_same

WIDTH = 6
DOUBLE = torch.float64
KEPT: dict[str, Any] = {}
SAMPLES: list[float] = []
TENSOR: Tensor | None = None


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def rows(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=DOUBLE, generator=generator)


def largest(x: Tensor) -> Tensor:
    return x.detach().abs().amax()


class Scaled(nn.Module):
    """A layer times what `scale` gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)
        self.kept: Any = None
        self.inner: dict[str, Any] = {"deep": {}}

    def scale(self, x: Tensor) -> Any:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.scale(x)).square().mean()


# --- memories


class InAttribute(Scaled):
    def scale(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = largest(x)
        return self.kept


class InDict(Scaled):
    def scale(self, x: Tensor) -> Tensor:
        return self.inner["deep"].setdefault("kept", largest(x))


class OfBatchBefore(Scaled):
    def scale(self, x: Tensor) -> Tensor:
        before = largest(x) if self.kept is None else self.kept
        self.kept = largest(x)
        return before


class OfWeights(Scaled):
    def scale(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = self.layer.weight.detach().clone()
        return 1 + (self.layer.weight - self.kept).square().sum()


class OfRandomNumbers(Scaled):
    def scale(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = torch.rand(WIDTH, dtype=DOUBLE)
        return self.kept


class OfBatchSize(Scaled):
    def scale(self, x: Tensor) -> float:
        if self.kept is None:
            self.kept = x.shape[0]
        return 1.0 / self.kept


class Counted(Scaled):
    def scale(self, x: Tensor) -> float:
        self.kept = 1 if self.kept is None else self.kept + 1
        return 1.0 / self.kept


class InGlobalDict(Scaled):
    def scale(self, x: Tensor) -> Tensor:
        return KEPT.setdefault("kept", largest(x))


class InGlobal(Scaled):
    def scale(self, x: Tensor) -> Tensor:
        global TENSOR
        if TENSOR is None:
            TENSOR = largest(x)
        return TENSOR


class InClass(Scaled):
    of_class: ClassVar[Tensor | None] = None

    def scale(self, x: Tensor) -> Tensor:
        if InClass.of_class is None:
            InClass.of_class = largest(x)
        return InClass.of_class


class Given:
    """Equal to every other, so that a cache gives what it has."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Given)

    def __hash__(self) -> int:
        return 0


@functools.lru_cache
def cached(given: Given) -> Tensor:
    return largest(given.x)


class InLruCache(Scaled):
    def scale(self, x: Tensor) -> Tensor:
        return cached(Given(x))


def remembering() -> Callable[[Tensor], Tensor]:
    kept: list[Tensor] = []

    def first(x: Tensor) -> Tensor:
        if not kept:
            kept.append(largest(x))
        return kept[0]

    return first


in_closure = remembering()


class InClosure(Scaled):
    def scale(self, x: Tensor) -> Tensor:
        return in_closure(x)


def rebinding() -> Callable[[Tensor], Tensor]:
    kept: Tensor | None = None

    def first(x: Tensor) -> Tensor:
        nonlocal kept
        if kept is None:
            kept = largest(x)
        return kept

    return first


in_variable = rebinding()


class InVariable(Scaled):
    def scale(self, x: Tensor) -> Tensor:
        return in_variable(x)


class InOwnClosure(Scaled):
    """The function is the model's: no module of Python has it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = rebinding()

    def scale(self, x: Tensor) -> Tensor:
        return self.first(x)


class InSlot(Scaled):
    """Beside the dict of the module."""

    __slots__ = ("slot",)

    def scale(self, x: Tensor) -> Tensor:
        if not hasattr(self, "slot"):
            self.slot = largest(x)
        return self.slot


class Slotted:
    __slots__ = ("__own", "kept")

    def __init__(self) -> None:
        self.__own: Tensor | None = None

    def first(self, x: Tensor) -> Tensor:
        if self.__own is None:
            self.__own = largest(x)
        return self.__own


class InSlotOfObject(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.helper = [Slotted()]

    def scale(self, x: Tensor) -> Tensor:
        return self.helper[0].first(x)


class Holder:
    kept: Tensor | None = None


class InObject(Scaled):
    def scale(self, x: Tensor) -> Tensor:
        if HOLDER.kept is None:
            HOLDER.kept = largest(x)
        return HOLDER.kept


class InGlobalSlot(Scaled):
    def scale(self, x: Tensor) -> Tensor:
        return SLOTTED.first(x)


def counted(x: Tensor) -> Tensor:
    if not hasattr(counted, "kept"):
        counted.kept = largest(x)  # type: ignore[attr-defined]
    found: Tensor = counted.kept  # type: ignore[attr-defined]
    return found


class InFunction(Scaled):
    def scale(self, x: Tensor) -> Tensor:
        return counted(x)


HOLDER = Holder()
SLOTTED = Slotted()

MEMORIES: dict[str, tuple[type[Scaled], str]] = {
    "attribute": (InAttribute, "`kept`"),
    "dict": (InDict, "`inner`"),
    "the batch before": (OfBatchBefore, "`kept`"),
    "weights": (OfWeights, "`kept`"),
    "random numbers": (OfRandomNumbers, "`kept`"),
    "batch size": (OfBatchSize, "`kept`"),
    "count": (Counted, "`kept`"),
    "global dict": (InGlobalDict, r"test_second_call\.KEPT`"),
    "global": (InGlobal, r"test_second_call\.TENSOR`"),
    "class": (InClass, r"`InClass\.of_class`"),
    "lru_cache": (InLruCache, r"test_second_call\.cached`"),
    "closure": (InClosure, r"test_second_call\.in_closure`"),
    "variable of a closure": (InVariable, r"test_second_call\.in_variable`"),
    "closure on the model": (InOwnClosure, "`first`"),
    "slot": (InSlot, "`slot`"),
    "slot of an object": (InSlotOfObject, r"`helper\._Slotted__own`"),
    "global object": (InObject, r"test_second_call\.HOLDER\.kept`"),
    "global slot": (InGlobalSlot, r"test_second_call\.SLOTTED\._Slotted__own`"),
    "function": (InFunction, r"test_second_call\.counted`"),
}
CONFIGS: dict[str, dict[str, Any]] = {"compared": {}, "not compared": {"check_capture": False}}


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    global TENSOR, in_closure, in_variable, SLOTTED
    TENSOR = InClass.of_class = None
    KEPT.clear()
    cached.cache_clear()
    in_closure = remembering()
    in_variable = rebinding()
    SLOTTED = Slotted()
    vars(HOLDER).clear()
    vars(counted).clear()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", MEMORIES)
def test_a_memory_is_refused_by_name(name: str, config: str) -> None:
    build, words = MEMORIES[name]
    wh.init(wh.Config(CONFIGS[config]))
    with pytest.raises(ValueError, match=rf"in Python `?.*{words}.*register_buffer"):
        wh.parallelize(build(), rows(4, WIDTH), optimizer=sgd)
    assert not KEPT and TENSOR is None and InClass.of_class is None, "as before the capture"


def test_a_memory_of_a_model_without_weights_is_refused() -> None:
    wh.init(wh.Config())
    with pytest.raises(ValueError, match="`kept`"):
        wh.parallelize(InAttribute, rows(4, WIDTH), optimizer=sgd)


class Centred(nn.Module):
    """A loss that follows the mean of what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(WIDTH, dtype=DOUBLE))

    def forward(self, output: Tensor, x: Tensor) -> Tensor:
        value = (output - self.centre).square().mean()
        self.centre = 0.9 * self.centre + 0.1 * output.detach().mean(0)
        return value


@pytest.mark.parametrize("config", CONFIGS)
def test_a_memory_of_the_loss_is_refused(config: str) -> None:
    wh.init(wh.Config(CONFIGS[config]))
    centred = Centred()
    with pytest.raises(ValueError, match="in Python `the loss`"):
        wh.parallelize(
            nn.Linear(WIDTH, WIDTH, dtype=DOUBLE),
            rows(4, WIDTH),
            optimizer=sgd,
            loss=lambda output, x: centred(output, x),
        )
    assert torch.equal(centred.centre, torch.zeros(WIDTH, dtype=DOUBLE))


# --- what stays allowed


class LookedAt(Scaled):
    def scale(self, x: Tensor) -> Tensor:
        self.kept = KEPT["seen"] = largest(x)
        return self.kept


class Table(Scaled):
    """Made for the longest sequence so far."""

    def scale(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if self.kept is None or len(self.kept) < length:
            self.kept = torch.arange(length, dtype=DOUBLE)[:, None] / 10
        return self.kept[:length]


class TableOfLength(Scaled):
    """Made anew for every other length."""

    def scale(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if self.kept is None or len(self.kept) != length:
            self.kept = torch.arange(length, dtype=DOUBLE)[:, None] / length
        return self.kept


class TableOfBuffer(Scaled):
    """Made of a buffer that nobody writes, as the slopes of ALiBi are; its last rows are read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.full((1,), 0.5, dtype=DOUBLE))
        self.register_buffer("bias", None, persistent=False)
        self.bias: Tensor | None

    def scale(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if self.bias is None or len(self.bias) < length:
            self.register_buffer("bias", torch.ones(length, 1, dtype=DOUBLE) * self.slopes)
        assert self.bias is not None
        return self.bias[-length:]


class TableOfWrittenBuffer(TableOfBuffer):
    def scale(self, x: Tensor) -> Tensor:
        found = super().scale(x)
        self.slopes.add_(0.5)
        return found


class CountedAndUpdated(Scaled):
    """A buffer of its own and a number that nothing depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones((), dtype=DOUBLE))
        self.calls = 0

    def scale(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = 0.5 * self.mean + 0.5
        return self.mean * 1.0


class Recorded(Scaled):
    """Registers a hook that records results at its first call, as models of transformers do for
    hidden states.
    """

    def scale(self, x: Tensor) -> Tensor:
        recorded: list[Tensor] = []
        self.inner["results"] = recorded
        if not hasattr(self, "has_hooks"):
            keep = self.inner
            self.layer.register_forward_hook(lambda _, __, result: keep["results"].append(result))
            self.has_hooks = True
        result = self.layer(x)
        self.inner["results"] = []
        return result + len(recorded)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    "build", [LookedAt, Table, TableOfLength, TableOfBuffer, CountedAndUpdated, Recorded]
)
def test_what_the_next_call_does_not_depend_on_trains(build: type[Scaled], config: str) -> None:
    data = [rows(4, length, WIDTH, seed=length) for length in (8, 6, 7, 5)]
    torch.manual_seed(0)
    expected = local_training(build(), data, None, sgd).losses
    KEPT.clear()
    torch.manual_seed(0)
    wh.init(wh.Config(CONFIGS[config]))
    engine = wh.parallelize(build(), data[0], optimizer=sgd)
    assert [engine.step(batch).loss for batch in data] == pytest.approx(expected, rel=1e-12)


def test_a_table_of_a_buffer_needs_no_values() -> None:
    assert wh.plan(TableOfBuffer, rows(4, 5, WIDTH), cluster=1).num_devices == 1


def test_a_table_of_a_buffer_that_changes_is_refused() -> None:
    wh.init(wh.Config())
    with pytest.raises(ValueError, match="`bias`"):
        wh.parallelize(TableOfWrittenBuffer(), rows(4, 5, WIDTH), optimizer=sgd)


# --- the length of the first batch


class TableOfFirstLength(Scaled):
    def scale(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = torch.arange(x.shape[1], dtype=DOUBLE)[:, None] / x.shape[1]
        return self.kept[: x.shape[1]]


class FirstLength(Scaled):
    def scale(self, x: Tensor) -> float:
        if self.kept is None:
            self.kept = x.shape[1]
        return x.shape[1] / self.kept


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("build", [TableOfFirstLength, FirstLength])
def test_a_memory_of_the_first_length_is_refused(build: type[Scaled], config: str) -> None:
    """The first batch shows one length only: refused when another comes, before a step with it."""
    wh.init(wh.Config(CONFIGS[config]))
    engine = wh.parallelize(build(), rows(4, 8, WIDTH), optimizer=sgd)
    with pytest.raises(ValueError, match=r"`kept`.*register_buffer"):
        engine.step(rows(4, 6, WIDTH))


class TableOfLongest(Scaled):
    """Grows with the longest batch, as rotary tables of the dynamic kind do."""

    def scale(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if self.kept is None or len(self.kept) < length:
            self.kept = torch.arange(length, dtype=DOUBLE)[:, None] / length
        return self.kept[:length]


@pytest.mark.parametrize("config", CONFIGS)
def test_a_memory_of_the_longest_batch_is_refused(config: str) -> None:
    """A longer batch gives what it gives alone; the shorter ones behind it do not."""
    wh.init(wh.Config(CONFIGS[config]))
    engine = wh.parallelize(TableOfLongest(), rows(4, 6, WIDTH), optimizer=sgd)
    engine.step(rows(4, 6, WIDTH))
    with pytest.raises(ValueError, match=r"`kept`.*register_buffer"):
        engine.step(rows(4, 8, WIDTH))


class LongerThanFirst(Scaled):
    def scale(self, x: Tensor) -> float:
        if self.kept is None:
            self.kept = x.shape[1]
        return max(1.0, x.shape[1] / self.kept)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_memory_that_longer_batches_show_is_refused_where_lengths_vary(config: str) -> None:
    """A batch as long as the first, and a shorter one, give what they give alone."""
    wh.init(wh.Config(CONFIGS[config]))
    with pytest.raises(ValueError, match=r"`kept`.*register_buffer"):
        wh.parallelize(LongerThanFirst(), rows(4, 8, WIDTH), optimizer=sgd, dynamic={1: "length"})


def test_a_cached_capture_is_one_for_the_same_first_batch(tmp_path: Path) -> None:
    """A capture for the length 6 that was made for a first batch says nothing about length 6 behind
    length 8.
    """
    task = Task(None, "cpu", cache_folder=str(tmp_path / "captures"))
    first, _ = read_batch(rows(4, 8, WIDTH))
    layout, tensors = read_batch(rows(4, 6, WIDTH))
    assert capture_training(TableOfFirstLength(), layout, tensors, task).cached_in is None
    assert capture_training(TableOfFirstLength(), layout, tensors, task).cached_in is not None
    with pytest.raises(ValueError, match=r"`kept`.*register_buffer"):
        capture_training(TableOfFirstLength(), layout, tensors, task, first=first)


def test_samples_that_a_script_holds_are_not_compared_one_by_one() -> None:
    SAMPLES.extend(float(number) for number in range(100_000))
    try:
        state = ForwardState(Table())
        with patch("whale.capture.state_places.is_same", side_effect=is_same) as compared:
            assert not any(name.endswith("SAMPLES") for name in state.changed())
        assert compared.call_count < len(SAMPLES)
        SAMPLES[-1] = -1.0
        assert any(name.endswith("SAMPLES") for name in state.changed())
    finally:
        SAMPLES.clear()
