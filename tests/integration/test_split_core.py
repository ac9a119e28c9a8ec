"""Layouts, rules and local graphs of `split`, without messages: all devices of a grid run in one process (tests/split_oracle.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import whale as wh
from tests.exactness import EXACT_FLOAT64, Float64Mode, run_loss
from tests.split_models import make
from tests.split_oracle import run_sharded, whole_program
from tests.zoo import CASES
from whale import api
from whale.capture.batch import read_batch
from whale.planning.split_stages import grid_shapes
from whale.sharding.exchange_costs import GridCosts
from whale.sharding.grid import Grid
from whale.sharding.record import StageSharding
from whale.sharding.sharding import Sharding
from whale.sharding.solve import solve
from whale.sharding.space import Space

NUM_SAMPLES = 5
BY_BYTES = GridCosts(latency_s=0.0, flop_per_s=1e9, memory_bytes_per_s=1e9, bytes_per_s=dict.fromkeys("xyz", 1e8))
"""small models on small devices: bytes and work count, messages cost nothing, so that everything is cut that can be"""
BY_LATENCY = GridCosts(latency_s=1.0)
"""every exchange is dear, so that as much as possible is done twice"""


@dataclass
class Subject:
    """A captured model, its local loss and gradients, and what its graph is given."""

    space: Space
    weights: Mapping[str, Tensor]
    inputs: list[Tensor]
    loss: float
    gradients: dict[str, Tensor]

    def check(self, sharding: Sharding, num_samples: int) -> None:
        sharding = StageSharding.of(0, sharding, num_samples).sharding(sharding.grid)  # as a plan holds it
        with Float64Mode():
            loss, gradients = run_sharded(self.space, sharding, num_samples, self.weights, self.inputs)
        largest = max(gradient.abs().max().item() for gradient in self.gradients.values())
        assert abs(loss - self.loss) <= EXACT_FLOAT64 * abs(self.loss)
        for name, gradient in self.gradients.items():
            difference = (gradients[name] - gradient).abs().max().item()
            assert difference <= EXACT_FLOAT64 * largest, f"gradient of {name} differs by {difference:.3g} of {largest:.3g}"


def _subject(model: torch.nn.Module, batch: Any, loss: Any = None) -> Subject:
    with Float64Mode():
        layout, tensors = read_batch(batch)
        prepared = api._prepare(model, layout, tensors, loss, wh.Config(), "cpu")
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        value = run_loss(model, batch, loss)
        value.backward()
        whole = prepared.loss.whole_graph
        inputs = [*tensors, *(whole(*tensors) if whole is not None else ())]
    weights = {**dict(model.named_parameters(remove_duplicate=False)), **buffers, **prepared.captured.constants}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return Subject(Space(whole_program(prepared)), weights, inputs, value.item(), gradients)


@cache
def small(name: str, num_samples: int = NUM_SAMPLES) -> Subject:
    return _subject(*make(name, num_samples))


@cache
def from_zoo(name: str) -> Subject:
    case = CASES[name]
    return _subject(case.build(), case.batch(0, NUM_SAMPLES), case.loss)


def slow(*parameters: Any) -> Any:
    return pytest.param(*parameters, marks=pytest.mark.slow)


@pytest.mark.parametrize("costs", [BY_BYTES, slow(BY_LATENCY)], ids=["bytes", "latency"])
@pytest.mark.parametrize("num_devices", [4, slow(6), slow(8)])
@pytest.mark.parametrize("name", ["mlp", "gpt", "swiglu", "mixture", "convolutions"])
def test_every_grid_gives_the_local_loss_and_gradients(name: str, num_devices: int, costs: GridCosts) -> None:
    subject = small(name)
    for shape in grid_shapes(num_devices):
        subject.check(solve(subject.space.program, Grid(*shape), NUM_SAMPLES, costs, space=subject.space), NUM_SAMPLES)


@pytest.mark.parametrize("name", ["mlp", "gpt", "swiglu", "mixture", "convolutions"])
def test_uneven_shards(name: str) -> None:
    subject = small(name)
    for shape in ((2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)):
        work = {axis: (3.0, 1.0) for axis, size in zip("xyz", shape, strict=True) if size == 2}
        memory = {axis: (1.0, 4.0) for axis in work}
        subject.check(
            solve(subject.space.program, Grid(*shape, work=work, memory=memory), NUM_SAMPLES, BY_BYTES, space=subject.space), NUM_SAMPLES
        )


@pytest.mark.parametrize("name", ["mlp", "gpt", "swiglu", "mixture", "convolutions"])
def test_devices_that_get_nothing(name: str) -> None:
    """One sample on four rows of devices, three heads on four columns, and a device of speed 0."""
    subject = small(name, 2)
    for grid in (Grid(1, 1, 4), Grid(1, 4, 2), Grid(4, 2, 1), Grid(2, 2, 1, work={"x": (1.0, 0.0)})):
        subject.check(solve(subject.space.program, grid, 2, BY_BYTES, space=subject.space), 2)


@pytest.mark.parametrize("name", ["gpt2", *map(slow, ["llama", "bert", "vit", "t5", "resnet"])])
def test_hugging_face(name: str) -> None:
    subject = from_zoo(name)
    for shape in ((1, 2, 1), (2, 1, 2), (2, 2, 1), (2, 2, 2)):
        subject.check(solve(subject.space.program, Grid(*shape), NUM_SAMPLES, BY_BYTES, space=subject.space), NUM_SAMPLES)


def test_another_number_of_samples_runs_with_the_same_choices() -> None:
    planned = small("gpt")
    sharding = solve(planned.space.program, Grid(2, 2, 2), NUM_SAMPLES, BY_BYTES, space=planned.space)
    for number in (1, 2, 7):
        other = small("gpt", number) if number > 1 else None
        if other is not None:
            Subject(planned.space, other.weights, other.inputs, other.loss, other.gradients).check(sharding, number)
