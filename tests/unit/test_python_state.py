"""What a forward keeps from one call to the next: buffers in every form train as locally, Python
state is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale as wh
from tests.exactness import Trace, compare, local_training

WIDTH = 6
NUM_CLASSES = 4
BATCH_SIZE = 6


class Net(nn.Module):
    """Two layers and whatever a test adds."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, NUM_CLASSES)

    def head(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.b(torch.tanh(self.a(x))), labels)


class AssignedCount(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.count = self.count + 1
        return self.head(x, labels) * self.count


class AssignedTwice(Net):
    """Assigned, read, and assigned again from what was read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1
        shifted = x - self.mean
        self.mean = self.mean * 2
        return self.head(shifted, labels)


class WrittenNeverRead(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(WIDTH))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            self.last.copy_(self.a(x)[-1])
        return self.head(x, labels)


class SpectralNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.head(x, labels)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH_SIZE, WIDTH, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(0, NUM_CLASSES, (BATCH_SIZE,), generator=generator)}


def built(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().double()


@pytest.mark.parametrize("build", [AssignedCount, AssignedTwice, WrittenNeverRead, SpectralNorm])
def test_buffers_train_as_locally(build: Callable[[], nn.Module]) -> None:
    data = [batch(step) for step in range(3)]
    reference = local_training(built(build), data, None, sgd)
    wh.init()
    model = built(build)
    engine = wh.parallelize(model, data[0], optimizer=sgd)
    losses = []
    gradients = {}
    for each in data:
        losses.append(engine.step(each).loss)
        gradients = gradients or {
            name: gradient.clone() for name, gradient in engine.gradients().items()
        }
    state = engine.full_state_dict()
    buffers = {name: state[name] for name, _ in model.named_buffers()}
    compare(
        reference,
        Trace(
            losses, gradients, {name: state[name] for name, _ in model.named_parameters()}, buffers
        ),
    )


def test_an_assigned_buffer_of_the_users_model_stays_as_it_was() -> None:
    model = built(AssignedCount)
    count = model.count
    wh.init()
    wh.parallelize(model, batch(0), optimizer=sgd)
    assert model.count is count and float(count) == 0.0


# ---- refusals


class PythonCount(Net):
    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.num_calls += 1
        return self.head(x, labels) * min(1.0, self.num_calls / 10)


class GrowingList(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.seen.append(1)
        return self.head(x, labels) * len(self.seen)


class PlainTensor(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones((), dtype=torch.float64)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.scale = self.scale * 1.1
        return self.head(x * self.scale, labels)


@pytest.mark.parametrize(
    ("build", "name"), [(PythonCount, "num_calls"), (GrowingList, "seen"), (PlainTensor, "scale")]
)
def test_state_in_python_is_refused_by_name(build: Callable[[], nn.Module], name: str) -> None:
    wh.init()
    with pytest.raises(ValueError, match=rf"state kept in Python `{name}`.*register_buffer"):
        wh.parallelize(built(build), batch(0), optimizer=sgd)


class ActivationsKept(Net):
    """Keeps something for others to look at; its own result does not depend on it."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.looked_at = self.a(x)
        return self.head(x, labels)


def test_state_that_changes_nothing_is_not_refused() -> None:
    wh.init()
    engine = wh.parallelize(built(ActivationsKept), batch(0), optimizer=sgd)
    assert engine.step(batch(0)).loss == pytest.approx(
        float(built(ActivationsKept)(**batch(0)).detach()), rel=1e-12
    )


class AssignedGradient(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.mean = self.a.weight.mean(0)
        return self.head(x - self.mean, labels)


class AssignedShape(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.mean = torch.ones(WIDTH)
        return self.head(x - self.mean, labels)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (AssignedGradient, r"the buffer mean a value that carries a gradient.*detach"),
        (AssignedShape, r"float64 \[1\] becomes float32 \[6\]"),
    ],
)
def test_buffers_that_cannot_be_assigned(build: Callable[[], nn.Module], message: str) -> None:
    wh.init()
    with pytest.raises(ValueError, match=message):
        wh.parallelize(built(build), batch(0), optimizer=sgd)


# ---- tensors from outside the model


class Scale(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(NUM_CLASSES, dtype=torch.float64))

    def forward(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(output * self.weight, batch["labels"])


class Logits(Net):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def test_weights_of_the_loss_are_refused_unless_frozen() -> None:
    wh.init()
    loss = Scale()
    with pytest.raises(
        ValueError,
        match=r"1 tensor\(s\) that are no parameters of the model \(shapes: \[4\]\).*requires_grad_\(False\)",
    ):
        wh.parallelize(built(Logits), batch(0), loss=loss, optimizer=sgd)
    loss.requires_grad_(False)
    engine = wh.parallelize(built(Logits), batch(0), loss=loss, optimizer=sgd)
    assert engine.step(batch(0)).loss == pytest.approx(
        float(loss(built(Logits)(**batch(0)), batch(0)).detach()), rel=1e-12
    )


class AsksForGradient(Net):
    """Makes a leaf of its own, as models do that checkpoint their first layer."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x * 1.0
        if not torch.compiler.is_exporting():
            x.requires_grad_(True)
        return self.head(x, labels)


def test_a_leaf_that_forward_makes_is_not_taken_for_a_weight() -> None:
    wh.init()
    engine = wh.parallelize(built(AsksForGradient), batch(0), optimizer=sgd)
    assert engine.step(batch(0)).loss == pytest.approx(
        float(built(AsksForGradient)(**batch(0)).detach()), rel=1e-12
    )
