"""Layouts, rules and local graphs of `split`, without messages: all devices of a grid run in one
process (tests/split_oracle.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale as wh
from tests.exactness import EXACT_FLOAT64, Float64Mode, run_loss
from tests.split_models import WORDS, FusedBlock, make
from tests.split_oracle import run_sharded, whole_program
from tests.zoo import CASES
from whale import api
from whale.capture.batch import read_batch
from whale.capture.lengths import declared
from whale.operations.nodes import op_name
from whale.planning.grids import grid_shapes
from whale.plans.grid import Grid
from whale.plans.sharding import Sharding, StageSharding
from whale.sharding.options import SAME
from whale.sharding.redistribution_costs import GridCosts
from whale.sharding.solve import solve
from whale.sharding.space import Space

NUM_SAMPLES = 5
BY_BYTES = GridCosts(
    latency_s=0.0, flop_per_s=1e9, memory_bytes_per_s=1e9, bytes_per_s=dict.fromkeys("xyz", 1e8)
)
"""small models on small devices: bytes and work count, messages cost nothing, so that everything is
cut that can be
"""
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
        sharding = StageSharding.of(0, sharding, num_samples).sharding(
            sharding.grid
        )  # as a plan holds it
        with Float64Mode():
            loss, gradients = run_sharded(
                self.space, sharding, num_samples, self.weights, self.inputs
            )
        largest = max(gradient.abs().max().item() for gradient in self.gradients.values())
        assert abs(loss - self.loss) <= EXACT_FLOAT64 * abs(self.loss)
        for name, gradient in self.gradients.items():
            difference = (gradients[name] - gradient).abs().max().item()
            assert difference <= EXACT_FLOAT64 * largest, (
                f"gradient of {name} differs by {difference:.3g} of {largest:.3g}"
            )


def _subject(model: torch.nn.Module, batch: Any, loss: Any = None) -> Subject:
    with Float64Mode():
        layout, tensors = read_batch(batch)
        prepared = api._prepare(model, layout, tensors, loss, wh.Config(), "cpu")
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        value = run_loss(model, batch, loss)
        value.backward()
        whole = prepared.loss.whole_graph
        inputs = [*tensors, *(whole(*tensors) if whole is not None else ())]
    weights = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **buffers,
        **prepared.captured.constants,
    }
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
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
def test_every_grid_gives_the_local_loss_and_gradients(
    name: str, num_devices: int, costs: GridCosts
) -> None:
    subject = small(name)
    for shape in grid_shapes(num_devices):
        subject.check(
            solve(subject.space.program, Grid(*shape), NUM_SAMPLES, costs, space=subject.space),
            NUM_SAMPLES,
        )


@pytest.mark.parametrize("name", ["mlp", "gpt", "swiglu", "mixture", "convolutions"])
def test_uneven_shards(name: str) -> None:
    subject = small(name)
    for shape in ((2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)):
        work = {axis: (3.0, 1.0) for axis, size in zip("xyz", shape, strict=True) if size == 2}
        memory = {axis: (1.0, 4.0) for axis in work}
        subject.check(
            solve(
                subject.space.program,
                Grid(*shape, work=work, memory=memory),
                NUM_SAMPLES,
                BY_BYTES,
                space=subject.space,
            ),
            NUM_SAMPLES,
        )


@pytest.mark.parametrize("name", ["mlp", "gpt", "swiglu", "mixture", "convolutions"])
def test_devices_that_get_nothing(name: str) -> None:
    """One sample on four rows of devices, three heads on four columns, and a device of speed 0."""
    subject = small(name, 2)
    for grid in (
        Grid(1, 1, 4),
        Grid(1, 4, 2),
        Grid(4, 2, 1),
        Grid(2, 2, 1, work={"x": (1.0, 0.0)}),
    ):
        subject.check(solve(subject.space.program, grid, 2, BY_BYTES, space=subject.space), 2)


@pytest.mark.parametrize("name", ["gpt2", *map(slow, ["llama", "bert", "vit", "t5", "resnet"])])
def test_hugging_face(name: str) -> None:
    subject = from_zoo(name)
    for shape in ((1, 2, 1), (2, 1, 2), (2, 2, 1), (2, 2, 2)):
        subject.check(
            solve(subject.space.program, Grid(*shape), NUM_SAMPLES, BY_BYTES, space=subject.space),
            NUM_SAMPLES,
        )


def test_another_number_of_samples_runs_with_the_same_choices() -> None:
    planned = small("gpt")
    sharding = solve(
        planned.space.program, Grid(2, 2, 2), NUM_SAMPLES, BY_BYTES, space=planned.space
    )
    for number in (1, 2, 7):
        other = small("gpt", number) if number > 1 else None
        if other is not None:
            Subject(planned.space, other.weights, other.inputs, other.loss, other.gradients).check(
                sharding, number
            )


class Texts(nn.Module):
    """Fused attention and a head, for texts of any length, in rows that a grid may cut."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 15)
        self.block = FusedBlock(15, 3)
        self.head = nn.Linear(15, WORDS)

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        positions = torch.arange(words.shape[1], device=words.device, dtype=torch.float64)
        x = self.block(self.words(words) + positions[:, None] / 10)
        return F.cross_entropy(self.head(x).view(-1, WORDS), labels.view(-1))


def _texts(length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [torch.randint(WORDS, (NUM_SAMPLES, length), generator=generator) for _ in range(2)]


@pytest.mark.parametrize("has_summa", [slow(False), True])
def test_another_length_runs_with_the_same_choices(has_summa: bool) -> None:
    """Where a choice is impossible (6 rows can be cut, one cannot), the operation is done whole."""
    torch.manual_seed(0)
    model = Texts().double()
    layout, tensors = read_batch(_texts(6))
    named = layout.with_lengths(declared({0: {1: "length"}, 1: {1: "length"}}, layout).names)
    prepared = api._prepare(model, named, tensors, None, wh.Config(), "cpu")
    (symbol,) = prepared.longest({})
    planned = whole_program(prepared.at({symbol: 6}))
    summa = frozenset(planned.operations) if has_summa else frozenset()
    at_other: dict[int, Subject] = {}
    for length in (2, 9):
        at_length = prepared.at({symbol: length})
        local = _subject(model, _texts(length))
        at_other[length] = replace(local, space=Space(whole_program(at_length)))
        model.zero_grad()
    for shape in grid_shapes(4):
        program = replace(planned, summa=summa)
        sharding = solve(program, Grid(*shape), NUM_SAMPLES, BY_BYTES)
        for subject in at_other.values():
            subject.check(sharding, NUM_SAMPLES)


def test_an_option_that_a_length_has_not_is_done_whole() -> None:
    """By hand: queries are cut over y at length 6; at length 2 nobody may cut them."""
    subject = small("gpt")
    space = Space(subject.space.program)
    (first, *_) = [node for node in space.operations if op_name(node) == "linear"]
    place = list(space.program.captured.graph.nodes).index(first)
    rows = next(option.name for option in space.options[first] if option.inputs[0] == 1)
    sharding = Sharding(Grid(1, 2, 1), {place: ("", rows, "")}, {})
    assert space.chosen(sharding)[first]["y"].name == rows
    space.options[first] = tuple(each for each in space.options[first] if each.name != rows)
    assert space.chosen(sharding)[first]["y"].name == "whole"
    both = Sharding(Grid(2, 2, 1), {place: ("summa columns", "summa rows 7", "")}, {})
    assert [option.name for option in space.chosen(both)[first].values()] == ["whole", "whole"]


class Between(nn.Module):
    """Something between two linear layers, x [samples, LENGTH, 5]."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.between = between
        self.up = nn.Linear(5, 8)
        self.down = nn.Linear(8, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(self.between(self.up(x))), y)


BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "pad": lambda h: h * F.pad(h, (0, 0, 1, -1)),
    "new_full": lambda h: h * h.new_full((h.shape[0], 1, 1), 2.0),
    "new_zeros": lambda h: torch.cat([h.new_zeros(h.shape[0], 1, 8), h[:, :-1]], 1),
    "diff": lambda h: torch.diff(h, dim=1, prepend=h[:, :1]),
    "narrow": lambda h: torch.narrow(h, 2, 0, 8) * torch.narrow(h, 0, 0, h.shape[0]),
    "repeat_interleave": lambda h: torch.repeat_interleave(h, 2, dim=1, output_size=2 * h.shape[1])[
        :, ::2
    ],
    # a single entry cannot be cut: every device has it, and repeats it for its part of the result
    "repeat_interleave of one": lambda h: h * torch.repeat_interleave(h[:, :1], h.shape[1], dim=1),
}


def _rows(num_samples: int = NUM_SAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (
        torch.randn(num_samples, 4, 5, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    return x, y


@pytest.mark.parametrize("name", BETWEEN)
def test_every_way_to_cut_an_operation(name: str) -> None:
    subject = _subject(Between(BETWEEN[name]).double(), _rows())
    program = subject.space.program
    operation = name.split()[0]
    nodes = [node for node in subject.space.operations if op_name(node) == operation]
    assert nodes
    for node in nodes:
        for option in subject.space.options[node]:
            space = Space(program)
            space.options[node] = (option,)
            replace(subject, space=space).check(
                solve(program, Grid(1, 2, 1), NUM_SAMPLES, BY_BYTES, space=space), NUM_SAMPLES
            )


def test_channels_are_dropped_as_one() -> None:
    subject = _subject(
        Between(lambda h: F.dropout1d(h * 1.0, 0.5, training=True) * 0.0).double(), _rows()
    )
    (node,) = [node for node in subject.space.operations if op_name(node) == "feature_dropout"]
    assert {option.outputs[0] for option in subject.space.options[node]} == {0, 1, SAME}


class Average(nn.Module):
    """A buffer follows the mean of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 8)
        self.down = nn.Linear(8, 5)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.relu(self.up(x))
        loss = F.mse_loss(self.down(h - self.average), y)
        self.average.mul_(0.9).add_(h.detach().mean((0, 1)), alpha=0.1)
        return loss


class Copies(nn.Module):
    """The matrix of its expert is copied for every row; numbers below 0 count from the
    last expert.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 6)
        self.experts = nn.Parameter(torch.randn(4, 7, 6) / 3)

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        return torch.bmm(self.experts[numbers], self.up(x).unsqueeze(-1)).square().mean()


GRIDS = ((2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2))


def test_a_buffer_that_follows_the_batch() -> None:
    subject = _subject(Average().double(), _rows())
    for shape in GRIDS:
        subject.check(
            solve(subject.space.program, Grid(*shape), NUM_SAMPLES, BY_BYTES, space=subject.space),
            NUM_SAMPLES,
        )


def test_numbers_of_experts_are_read_as_indices() -> None:
    subject = _subject(Copies().double(), (_rows()[0][:, 0], torch.tensor([0, -1, 3, -4, -2])))
    assert any(op_name(node) == "expert_mm" for node in subject.space.operations)
    for shape in GRIDS:
        sharding = solve(
            subject.space.program, Grid(*shape), NUM_SAMPLES, BY_BYTES, space=subject.space
        )
        subject.check(sharding, NUM_SAMPLES)
        wrong = [subject.inputs[0], torch.tensor([0, 1, 2, 3, 4]), *subject.inputs[2:]]
        with pytest.raises(IndexError, match="4 is out of bounds"):
            run_sharded(subject.space, sharding, NUM_SAMPLES, subject.weights, wrong)
