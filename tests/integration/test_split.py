"""`split` trains like local PyTorch: loss, all gradients, weights after three steps (DESIGN rule 1), on grids of every shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale as wh
from tests.exactness import Float64Mode, Trace, compare, local_training
from tests.ranks import ModelServer, preload
from whale import api
from whale.capture.batch import read_batch
from whale.capture.prepare import Prepared

preload("torch", "transformers", "whale", "tests.integration.test_split")

BATCH_SIZE, NUM_STEPS, LEARNING_RATE = 6, 3, 0.1
WIDTH, HIDDEN, NUM_CLASSES = 8, 12, 7  # 7 classes: no number of devices divides them


class Mlp(nn.Module):
    """Two linear layers, column then row."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.mse_loss(x + self.down(F.gelu(self.up(x))), x.roll(1, 1))


class Classifier(nn.Module):
    """The issue's first snippet: features data parallel, the large classifier sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH))
        self.classifier = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier(self.features(x)), labels)


class Chain(nn.Module):
    """Four blocks and a head, to be cut into stages."""

    def __init__(self) -> None:
        super().__init__()
        layers = [(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(4)]
        self.blocks = nn.ModuleList(nn.Sequential(*each) for each in layers)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x), labels)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=31, n_positions=16, n_embd=12, n_layer=2, n_head=3, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return GPT2LMHeadModel(config)


def vectors(seed: int, batch_size: int = BATCH_SIZE) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch_size, WIDTH, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(0, NUM_CLASSES, (batch_size,), generator=generator)}


def tokens(seed: int, batch_size: int = BATCH_SIZE) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, 31, (batch_size, 10), generator=generator)
    return {"input_ids": words, "labels": words.clone()}


MODELS: dict[str, tuple[Any, Any]] = {
    "mlp": (Mlp, vectors),
    "classifier": (Classifier, vectors),
    "chain": (Chain, vectors),
    "gpt2": (gpt2, tokens),
}


@dataclass(frozen=True)
class Case:
    """A model, its annotations and the number of ranks."""

    model: str
    num_ranks: int
    marks: dict[str, tuple[Any, ...]]
    """glob -> ("split", n, grid or None) or ("replicate", n)"""
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        marks = " ".join(f"{what[0]}{what[1:]}" for what in self.marks.values())
        return f"{self.model} on {self.num_ranks}: {marks} {self.config or ''}".strip()


def everything(num_devices: int, grid: tuple[int, int, int] | None = None) -> dict[str, tuple[Any, ...]]:
    return {"*": ("split", num_devices, grid)}


CASES = [
    Case("mlp", 2, everything(2, (1, 2, 1))),
    Case("mlp", 4, everything(4, (2, 2, 1))),
    Case("classifier", 3, {"features*": ("replicate", 3), "classifier": ("split", 3, (1, 3, 1))}),
    Case("chain", 4, {"blocks.[01]*": ("split", 2, (1, 2, 1)), "blocks.[23]*|head": ("split", 2, (1, 1, 2))}, {"num_micro_batch": 2}),
    Case("gpt2", 2, everything(2)),
]


@dataclass
class Subject:
    name: str
    model: nn.Module
    prepared: Prepared


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]().double()


def prepare_model(name: str) -> Subject:
    torch.set_num_threads(1)
    model = build(name)
    with Float64Mode():
        layout, tensors = read_batch(MODELS[name][1](0))
        return Subject(name, model, api._prepare(model, layout, tensors, None, wh.Config(), "cpu", check=True))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def train_locally(subject: Subject) -> Trace:
    model = build(subject.name)
    with Float64Mode():
        return local_training(model, [MODELS[subject.name][1](step) for step in range(NUM_STEPS)], None, sgd)


def scope(what: tuple[Any, ...]) -> Any:
    return wh.replicate(what[1]) if what[0] == "replicate" else wh.split(*what[1:])


def train_on_rank(subject: Subject, case: Case) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """(losses, whole gradients of the first step, whole state after the last) on rank 0."""
    with Float64Mode():
        wh.init(wh.Config(case.config))
        wh.annotate(subject.model, {glob: scope(what) for glob, what in case.marks.items()})
        data = [MODELS[case.model][1](step) for step in range(NUM_STEPS)]
        engine = wh.parallelize(subject.model, data[0], optimizer=sgd, prepared=subject.prepared)
        losses, gradients = [], {}
        for batch in data:
            losses.append(engine.step(batch).loss)
            if len(losses) == 1:
                gradients = engine.full_gradients()
        return losses, gradients, engine.full_state_dict()


def merged(ranks: list[Any], model: nn.Module) -> Trace:
    assert all(losses == ranks[0][0] for losses, _, _ in ranks)
    losses, gradients, state = ranks[0]
    return Trace(losses, gradients, {name: state[name] for name, _ in model.named_parameters()})


Server = tuple[ModelServer, dict[str, Trace]]


@pytest.fixture(scope="module", params=list(MODELS))
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, ModelServer, Trace]]:
    with ModelServer(prepare_model, request.param) as started:
        yield request.param, started, started.run_local(train_locally)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_trains_like_local(server: tuple[str, ModelServer, Trace], case: Case) -> None:
    name, started, reference = server
    if case.model != name:
        pytest.skip("another model")
    compare(reference, merged(started.run(train_on_rank, case.num_ranks, case), build(name)))
