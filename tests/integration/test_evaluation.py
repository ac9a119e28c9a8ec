"""Evaluation gives the local outputs, and batches of other lengths and sizes are exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale as wh
from tests.exactness import Trace, compare, local_training
from tests.integration.layers import EXACT, NUM_CLASSES, WIDTH, make_batch, sgd
from tests.ranks import run_ranks

# ---- evaluation
# -------------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    logits: Tensor
    hidden: Tensor | None = None
    missing: Tensor | None = None
    loss: Tensor | None = None


class Pair(NamedTuple):
    logits: Tensor
    hidden: Tensor


class Answers(nn.Module):
    """Two layers with something to look at on each stage; gives it in the form that is asked for.
    Dropout and a batch norm are in it.
    """

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, NUM_CLASSES)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        hidden = self.dropout(self.norm(torch.tanh(self.first(x))))
        logits = self.second(hidden)
        loss = F.cross_entropy(logits, labels) if labels is not None else None
        if self.form == "tensor":
            return logits
        if self.form == "tuple":
            return logits, None, (hidden.T, [logits.argmax(-1), x])
        if self.form == "dict":
            return {
                "loss": loss,
                "logits": logits,
                "none": None,
                "nested": {"hidden": hidden, "scale": self.second.weight * 2},
            }
        if self.form == "over all samples":
            return self.over_all_samples(x, hidden, logits, labels, loss)
        if self.form == "named tuple":
            return Pair(logits, hidden)
        return Answer(logits, hidden, None, loss)

    def over_all_samples(
        self, x: Tensor, hidden: Tensor, logits: Tensor, labels: Tensor | None, loss: Tensor | None
    ) -> dict[str, Any]:
        """Values without a batch dim: sums, means and what is linear in them; of inputs only; part
        of the loss as well; with an addend.
        """
        penalty = 0.1 * hidden.square().mean()
        found = {
            "logits": logits,
            "loss": None if loss is None else loss + penalty,
            "penalty": penalty,
            "inputs": x.amax(),
        }
        found |= {"means": hidden.mean(0), "shifted": logits.sum() + self.second.bias.sum()}
        return (
            found
            if labels is None
            else found | {"right": (logits.argmax(-1) == labels).sum(), "labels": labels.sum()}
        )


FORMS = ("tensor", "tuple", "dict", "named tuple", "dataclass", "over all samples")

HAVE_LOSS = ("dict", "dataclass", "over all samples")

WITHOUT_LABELS = ("tensor", "dict", "over all samples")

"""forms that are also asked for without labels: the loss is made by `loss=`, or by the model"""


def answers(form: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Answers(form).double()


def loss_of_output(output: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output if isinstance(output, Tensor) else output[0], batch["labels"])


ON_REPLICAS = ("tuple", "dict", "over all samples")

"""forms that are also put together from 2 model replicas; the others from 2 stages"""


def evaluate_forms(
    forms: Sequence[str],
) -> dict[str, tuple[float | None, Any, Any, dict[str, Tensor]]]:
    """Loss and outputs with labels, outputs without, and the state after two steps, for each
    form.
    """
    found = {}
    for form in forms:
        wh.init({"num_micro_batch": 2})
        model = wh.annotate(
            answers(form), {"first|norm": wh.replicate(1), "second": wh.replicate(1)}
        )
        engine = wh.parallelize(
            model, make_batch(0), optimizer=sgd, loss=None if form in HAVE_LOSS else loss_of_output
        )
        for step in range(2):
            engine.step(make_batch(step))
        result = engine.evaluate(make_batch(7), outputs=True)
        without = (
            engine.evaluate({"x": make_batch(7)["x"]}, outputs=True)
            if form in WITHOUT_LABELS
            else None
        )
        assert without is None or without.loss is None, "there are no labels"
        found[form] = (
            result.loss,
            result.outputs,
            without and without.outputs,
            engine.full_state_dict(),
        )
    return found


Evaluated = list[dict[str, tuple[float | None, Any, Any, dict[str, Tensor]]]]

"""what `evaluate_forms` gave on each rank"""


@pytest.fixture(scope="module")
def evaluated_on_replicas() -> Evaluated:
    return run_ranks(evaluate_forms, 4, ON_REPLICAS)


@pytest.fixture(scope="module")
def evaluated_on_stages() -> Evaluated:
    return run_ranks(evaluate_forms, 2, [form for form in FORMS if form not in ON_REPLICAS])


def plain(output: Any) -> Any:
    """Fields by name, sequences as lists."""
    if is_dataclass(output) and not isinstance(output, type):
        return {field.name: plain(getattr(output, field.name)) for field in fields(output)}
    if isinstance(output, dict):
        return {key: plain(value) for key, value in output.items()}
    if isinstance(output, (tuple, list)):
        return [plain(value) for value in output]
    return output


@pytest.mark.parametrize("form", FORMS)
def test_evaluation_gives_the_local_outputs_in_sample_order(
    request: pytest.FixtureRequest, form: str
) -> None:
    """9 samples over 2 micro-batches, 2 stages and 1 or 2 replicas; running statistics instead of
    those of the batch, and no dropout.
    """
    evaluated: Evaluated = request.getfixturevalue(
        "evaluated_on_replicas" if form in ON_REPLICAS else "evaluated_on_stages"
    )
    _, outputs, without, state = evaluated[0][form]
    model = answers(form)
    assert not torch.equal(state["norm.running_mean"], model.state_dict()["norm.running_mean"]), (
        "training changed the statistics"
    )
    model.load_state_dict(state, strict=True)
    model.eval()
    batch = make_batch(7)
    with torch.no_grad():
        expected = model(**batch)
        expected_without = model(x=batch["x"])
        own_loss = (
            expected.get("loss") if isinstance(expected, dict) else getattr(expected, "loss", None)
        )
        local_loss = loss_of_output(expected, batch) if own_loss is None else own_loss
    for rank in evaluated:
        assert rank[form][0] == pytest.approx(local_loss.item(), rel=EXACT)
    torch.testing.assert_close(plain(outputs), plain(expected), rtol=EXACT, atol=EXACT)
    if form in WITHOUT_LABELS:
        torch.testing.assert_close(plain(without), plain(expected_without), rtol=EXACT, atol=EXACT)
    assert all(rank[form][1] is None for rank in evaluated[1:]), "outputs are on rank 0 only"


# ---- batches of many shapes
# -------------------------------------------------------------------------------------------


class Sequences(nn.Module):
    """Attention over positions, one layer called three times and another on both stages, and batch
    entries without samples.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, words: Tensor, labels: Tensor, scale: Tensor, temperature: Tensor) -> Tensor:
        x = self.embedding(words) * scale
        with wh.replicate(1):
            for _ in range(3):
                x = x + torch.tanh(self.first(x))
            x = self.attend(x, temperature)
        with wh.replicate(1):
            x = self.attend(self.second(x), temperature)
            return F.cross_entropy(
                (x @ self.embedding.weight.T).flatten(0, 1), labels.flatten(), ignore_index=-100
            )

    def attend(self, x: Tensor, temperature: Tensor) -> Tensor:
        return x + F.softmax(self.mix(x) @ x.transpose(1, 2) / temperature, -1) @ x


def sequence_batch(seed: int, batch_size: int, length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, 20, (batch_size, length), generator=generator)
    labels = words.masked_fill(torch.rand(words.shape, generator=generator) < 0.4, -100)
    scale = torch.rand(WIDTH, generator=generator, dtype=torch.float64)
    return {
        "words": words,
        "labels": labels,
        "scale": scale,
        "temperature": torch.tensor(2.0 + seed, dtype=torch.float64),
    }


SHAPES = [(9, 5), (9, 3), (9, 5), (4, 5), (11, 3)]

"""(samples, length) of each step; 4 is the smallest batch for 2 micro-batches over 2 replicas"""


def sequences() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Sequences().double()


def train_on_shapes() -> tuple[Trace, list[dict[str, float]], tuple[str, ...]]:
    wh.init({"num_micro_batch": 2})
    data = [sequence_batch(step, *shape) for step, shape in enumerate(SHAPES)]
    engine = wh.parallelize(sequences(), data[0], optimizer=sgd)
    losses = []
    gradients = {}
    timings = []
    for batch in data:
        result = engine.step(batch)
        losses.append(result.loss)
        gradients = gradients or {
            name: gradient.clone() for name, gradient in engine.gradients().items()
        }
        timings.append(vars(result.timing))
    return Trace(losses, gradients, engine.full_state_dict()), timings, engine.plan.notes


@pytest.fixture(scope="module", params=[2, 4])
def shaped(
    request: pytest.FixtureRequest,
) -> list[tuple[Trace, list[dict[str, float]], tuple[str, ...]]]:
    """2 stages, and 2 stages x 2 replicas."""
    return run_ranks(train_on_shapes, request.param)


def test_other_lengths_and_batch_sizes_are_exact(shaped: list[Any]) -> None:
    """Each length is captured once. Shared modules are tied over the stages; entries without
    samples go whole to every device.
    """
    ranks = shaped
    data = [sequence_batch(step, *shape) for step, shape in enumerate(SHAPES)]
    gradients = {
        name: gradient for trace, _, _ in ranks for name, gradient in trace.gradients.items()
    }
    compare(
        local_training(sequences(), data, None, sgd),
        Trace(ranks[0][0].losses, gradients, ranks[0][0].weights),
    )
    for path in ("scale", "temperature"):
        assert any(path in note and "no batch dimension" in note for note in ranks[0][2])


def test_the_times_of_a_step_add_up(shaped: list[Any]) -> None:
    for _, timings, _ in shaped:
        for timing in timings:
            parts = timing["compute_s"] + timing["communication_s"] + timing["bubble_s"]
            assert all(seconds >= 0 for seconds in timing.values())
            assert timing["compute_s"] > 0 and parts <= timing["total_s"] * 1.05
