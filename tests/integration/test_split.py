"""`split` trains like local PyTorch: loss, all gradients, weights after three steps, on grids of every
shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import whale as wh
from tests import split_models, zoo
from tests.exactness import Float64Mode, Trace, compare, local_training
from tests.ranks import ModelServer, preload
from whale import api
from whale.capture.batch import read_batch
from whale.capture.prepare import CapturedModel
from whale.cluster.cluster import ETHERNET_50G, PCIE_3_X16, Device, device_kind

preload("tests.integration.test_split")

BATCH_SIZE = 6
NUM_STEPS = 3
LEARNING_RATE = 0.1
WIDTH, HIDDEN, NUM_CLASSES = 8, 12, 7  # 7 classes: no number of devices divides them


class Mlp(nn.Module):
    """Two linear layers, column then row."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

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
        layers = [
            (nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
            for _ in range(4)
        ]
        self.blocks = nn.ModuleList(nn.Sequential(*each) for each in layers)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x), labels)


class SharedBias(nn.Module):
    """A value made of weights alone, used by both stages."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, WIDTH)
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        bias = self.table(torch.arange(4, device=x.device)).mean(0)
        x = torch.tanh(self.b(torch.tanh(self.a(x) + bias)) + bias)
        return F.cross_entropy(self.head(x), labels)


class Images(nn.Module):
    """Batch statistics, a convolution and a part under torch.utils.checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, HIDDEN, 3, padding=1)
        self.norm = nn.BatchNorm2d(HIDDEN)
        self.hidden = nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        features = F.relu(self.norm(self.conv(x.view(-1, 1, 2, WIDTH // 2)))).mean((2, 3))
        hidden = checkpoint(
            lambda value: torch.tanh(self.hidden(value)), features, use_reentrant=False
        )
        return F.cross_entropy(self.head(hidden), labels)


class Balanced(nn.Module):
    """A loss that is no sum over samples, as mixtures of experts have it: products of batch means,
    one of them of the inputs alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, NUM_CLASSES)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.head = nn.Linear(HIDDEN, NUM_CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        wish = self.gate(x).softmax(-1)
        chosen = F.one_hot(wish.argmax(-1), NUM_CLASSES).to(x.dtype).mean(0)
        there = F.one_hot(labels, NUM_CLASSES).to(x.dtype).mean(0)
        loss = F.cross_entropy(self.head(F.gelu(self.up(x))) * wish, labels)
        return loss + (wish.mean(0) * (chosen + 2 * there)).sum()


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=31,
        n_positions=16,
        n_embd=12,
        n_layer=2,
        n_head=3,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def wide_mixtral() -> nn.Module:
    """Its experts weigh more than its tokens, so that tokens travel."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=31, hidden_size=16, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=7, num_experts_per_tok=2, max_position_embeddings=16, experts_implementation="batched_mm",
    )  # fmt: skip
    return MixtralForCausalLM(config)


def vectors(seed: int, batch_size: int = BATCH_SIZE) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch_size, WIDTH, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(0, NUM_CLASSES, (batch_size,), generator=generator)}


def tokens(seed: int, batch_size: int = BATCH_SIZE) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, 31, (batch_size, 10), generator=generator)
    return {"input_ids": words, "labels": words.clone()}


def small(name: str) -> tuple[Any, Any]:
    """One of tests/split_models.py."""
    model, batch = split_models.MODELS[name]
    return model, lambda seed, batch_size=BATCH_SIZE: batch(
        torch.Generator().manual_seed(seed), batch_size
    )


def from_zoo(name: str) -> tuple[Any, Any]:
    """One of tests/zoo.py."""
    case = zoo.CASES[name]
    return case.make, lambda seed, batch_size=BATCH_SIZE: case.batch(seed, batch_size)


MODELS: dict[str, tuple[Any, Any]] = {
    **{name: small(name) for name in ("gpt", "swiglu", "mixture")},
    **{name: from_zoo(name) for name in ("bert", "llama", "mixtral", "vit", "resnet", "complex")},
    "mlp": (Mlp, vectors),
    "classifier": (Classifier, vectors),
    "chain": (Chain, vectors),
    "shared bias": (SharedBias, vectors),
    "images": (Images, vectors),
    "balanced": (Balanced, vectors),
    "gpt2": (gpt2, tokens),
    "wide mixtral": (wide_mixtral, tokens),
}


@dataclass(frozen=True)
class Case:
    """A model, its annotations and the number of ranks."""

    model: str
    num_ranks: int
    marks: dict[str, tuple[Any, ...]]
    """glob -> ("split", n, grid or None, method if any) or ("replicate", n)"""
    config: dict[str, Any] = field(default_factory=dict)
    kinds: tuple[str, ...] = ()
    """kinds of devices by rank; none: all alike"""

    @property
    def name(self) -> str:
        marks = " ".join(f"{what[0]}{what[1:]}" for what in self.marks.values())
        return f"{self.model} on {' '.join(self.kinds) or self.num_ranks}: {marks} {self.config or ''}".strip()

    @property
    def cluster(self) -> wh.Cluster | None:
        devices = tuple(
            Device(rank, "localhost", rank, device_kind(kind))
            for rank, kind in enumerate(self.kinds)
        )
        return wh.Cluster(devices, PCIE_3_X16, ETHERNET_50G) if devices else None


def everything(
    num_devices: int, grid: tuple[int, int, int] | None = None
) -> dict[str, tuple[Any, ...]]:
    return {"*": ("split", num_devices, grid)}


TWO_OF_TWO = {"blocks.[01]*": ("split", 2, None), "blocks.[23]*|head": ("split", 2, None)}
GPT2_IN_TWO = {
    "transformer.wte|transformer.wpe|transformer.h.0": ("split", 2, None),
    "transformer.h.1|transformer.ln_f|lm_head": ("split", 2, None),
}

CASES = [
    Case("mlp", 4, everything(4, (2, 2, 1))),
    Case(
        "classifier",
        3,
        {"features*": ("replicate", 3), "classifier": ("split", 3, None)},
        {"num_micro_batch": 2},
    ),
    Case("classifier", 2, everything(2, (1, 2, 1)), kinds=("P100", "V100-32GB")),  # uneven shards
    Case(
        "chain", 8, TWO_OF_TWO, {"num_micro_batch": 2}
    ),  # 2 model replicas x 2 stages x split over 2
    Case("balanced", 4, everything(2), {"colocate": True}),  # 2 model replicas
    Case("gpt2", 2, everything(2)),
    Case("complex", 2, everything(2, (1, 2, 1))),
]
SLOW_CASES = [
    Case("complex", 2, everything(2)),
    Case("complex", 4, everything(4, (2, 2, 1))),
    Case("complex", 2, everything(2, (1, 1, 2))),
    Case("complex", 4, {"*": ("split", 4, (2, 2, 1), "summa")}),
    Case(
        "complex",
        4,
        {
            "stem|blocks.[01]*": ("split", 2, (1, 2, 1)),
            "blocks.[23]*|head": ("split", 2, (1, 1, 2)),
        },
        {"num_micro_batch": 2, "schedule": "zero-bubble"},
    ),
    Case("mlp", 2, everything(2, (1, 2, 1))),
    Case("mlp", 8, everything(8, (2, 2, 2))),
    Case("mlp", 6, everything(6, (1, 6, 1))),
    Case("mlp", 4, everything(4, (1, 1, 4))),
    Case("mlp", 4, everything(2, (1, 2, 1)), {"colocate": True}),
    Case(
        "classifier",
        4,
        {"features*": ("replicate", 4), "classifier": ("split", 4, None)},
        {"num_micro_batch": 2},
    ),
    Case("classifier", 4, everything(4, (2, 2, 1))),
    Case(
        "chain",
        4,
        {"blocks.[01]*": ("split", 2, (1, 2, 1)), "blocks.[23]*|head": ("split", 2, (1, 1, 2))},
        {"num_micro_batch": 2},
    ),
    Case(
        "chain",
        3,
        {"blocks.[01]*": ("split", 2, None), "blocks.[23]*|head": ("replicate", 1)},
        {"num_micro_batch": 3},
    ),
    Case(
        "chain",
        5,
        {"blocks.[01]*": ("replicate", 3), "blocks.[23]*|head": ("split", 2, None)},
        {"num_micro_batch": 2},
    ),
    Case("chain", 4, TWO_OF_TWO, {"num_micro_batch": 3, "schedule": "zero-bubble"}),
    Case("chain", 4, TWO_OF_TWO, {"num_micro_batch": 3, "schedule": "wave"}),
    Case("balanced", 6, everything(2, (1, 1, 2)), {"colocate": True}),
    Case("balanced", 8, everything(4, (2, 2, 1)), {"colocate": True}),
    Case("balanced", 8, {"gate": ("split", 2, None), "up|head": ("split", 2, None)}),
    Case(
        "shared bias",
        4,
        {"table|a": ("split", 2, None), "b|head": ("split", 2, None)},
        {"num_micro_batch": 2},
    ),
    Case(
        "shared bias",
        3,
        {"table|a": ("replicate", 1), "b|head": ("split", 2, None)},
        {"num_micro_batch": 2},
    ),
    Case("images", 3, {"conv|norm": ("replicate", 3), "hidden|head": ("split", 3, None)}),
    Case(
        "images",
        4,
        {"conv|norm": ("replicate", 2), "hidden|head": ("split", 2, None)},
        {"colocate": True},
    ),
    Case("images", 4, everything(4, (2, 2, 1))),
    Case("gpt2", 4, everything(4, (2, 2, 1))),
    Case("gpt2", 4, everything(4, (1, 4, 1))),
    Case("gpt2", 4, everything(4, (1, 1, 4))),
    Case("gpt2", 8, everything(8, (2, 2, 2))),
    Case("gpt2", 4, GPT2_IN_TWO, {"num_micro_batch": 2}),
    Case("mlp", 4, everything(4, (2, 2, 1)), kinds=("T4", "V100-32GB", "P100", "V100-32GB")),
    Case(
        "chain",
        4,
        TWO_OF_TWO,
        {"num_micro_batch": 2},
        kinds=("T4", "V100-32GB", "P100", "A100-40GB"),
    ),
    Case("gpt2", 2, everything(2, (1, 1, 2)), kinds=("T4", "A100-40GB")),
    Case("gpt2", 2, everything(2, (1, 2, 1)), kinds=("CPU", "A100-40GB")),
]


@dataclass
class Subject:
    name: str
    model: nn.Module
    prepared: CapturedModel


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    with Float64Mode():
        return MODELS[name][0]().double()


def prepare_model(name: str) -> Subject:
    torch.set_num_threads(1)
    model = build(name)
    with Float64Mode():
        layout, tensors = read_batch(MODELS[name][1](0))
        return Subject(
            name, model, api._prepare(model, layout, tensors, None, wh.Config(), "cpu", check=True)
        )


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def train_locally(subject: Subject) -> Trace:
    model = build(subject.name)
    with Float64Mode():
        return local_training(
            model, [MODELS[subject.name][1](step) for step in range(NUM_STEPS)], None, sgd
        )


def scope(what: tuple[Any, ...]) -> Any:
    return (
        wh.replicate(what[1])
        if what[0] == "replicate"
        else wh.split(what[1], what[2], method=what[3] if len(what) > 3 else None)
    )


def train_on_rank(
    subject: Subject, case: Case
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """(losses, whole gradients of the first step, whole state after the last) on rank 0."""
    with Float64Mode():
        wh.init(wh.Config(case.config))
        wh.annotate(subject.model, {glob: scope(what) for glob, what in case.marks.items()})
        data = [MODELS[case.model][1](step) for step in range(NUM_STEPS)]
        engine = wh.parallelize(
            subject.model, data[0], optimizer=sgd, prepared=subject.prepared, cluster=case.cluster
        )
        losses = []
        gradients = {}
        for batch in data:
            losses.append(engine.step(batch).loss)
            if len(losses) == 1:
                gradients = engine.full_gradients()
        return losses, gradients, engine.full_state_dict()


def merged(ranks: list[Any], names: Iterable[str]) -> Trace:
    """What the ranks give, with these weights."""
    assert all(losses == ranks[0][0] for losses, _, _ in ranks)
    losses, gradients, state = ranks[0]
    return Trace(losses, gradients, {name: state[name] for name in names})


class Servers:
    """One process for each model that has it captured, started when a test first asks, with its
    local training.
    """

    def __init__(self) -> None:
        self.started: dict[str, tuple[ModelServer, Trace]] = {}

    def of(self, model: str) -> tuple[ModelServer, Trace]:
        if model not in self.started:
            server = ModelServer(prepare_model, model)
            self.started[model] = server, server.run_local(train_locally)
        return self.started[model]


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    found = Servers()
    yield found
    for server, _ in found.started.values():
        server.close()


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_CASES)],
    ids=lambda case: case.name,
)
def test_trains_like_local(servers: Servers, case: Case) -> None:
    server, reference = servers.of(case.model)
    compare(reference, merged(server.run(train_on_rank, case.num_ranks, case), reference.weights))
