"""How a training job behaves beyond one exact step: optimizers, dropout, evaluation, other shapes, precision, data, and what it reports."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import whale as wh
from tests.exactness import Trace, compare, local_training, run_loss
from tests.ranks import ModelServer, preload
from whale.runtime.metrics import metrics_file
from whale.runtime.update import NonFiniteError

preload("tests.integration.training")

WIDTH, NUM_CLASSES, NUM_LAYERS, BATCH_SIZE = 8, 3, 8, 9
EXACT = 1e-10


class Layers(nn.Module):
    """Many parameters of the same shape, two of them read by every operation: an exchange of any two changes the training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.cross_entropy(self.head(x), labels)


def make_batch(seed: int, batch_size: int = BATCH_SIZE) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch_size, WIDTH, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(0, NUM_CLASSES, (batch_size,), generator=generator)}


def build() -> Layers:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Layers().double()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def in_two_stages(model: nn.Module) -> nn.Module:
    return wh.annotate(model, {"layers.[0-3]": wh.replicate(1), "layers.[4-7]": wh.replicate(1)})


def warm_up() -> None:
    """The first capture of a process takes a second longer than the others: ranks inherit what it leaves."""
    wh.plan(build(), make_batch(0), cluster=1)


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer(warm_up) as started:
        yield started


# ---- ranks that are not copies of each other --------------------------------------------------------------------------


def train_after_other_work(prepared: None) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor]]:
    """Rank 1 has captured other models before, so that nothing lies at the same address as on rank 0."""
    wh.init()
    kept = [wh.plan(build(), make_batch(0), cluster=1) for _ in range(3 * int(os.environ["RANK"]))]
    engine = wh.parallelize(build(), make_batch(0), optimizer=sgd)
    engine.step(make_batch(0))
    del kept
    gradients = {name: gradient.clone() for name, gradient in engine.gradients().items()}
    return [name for name, _ in engine.named_parameters()], gradients, engine.full_state_dict()


def test_ranks_sum_the_same_parameters(server: ModelServer) -> None:
    """Each rank captures for itself: what goes into a bucket, and in which order, may depend on the graph and on nothing else."""
    (names, gradients, state), (other_names, other_gradients, _) = server.run(train_after_other_work, 2)
    assert names == other_names
    model = build()
    loss = run_loss(model, make_batch(0), None)
    loss.backward()
    sgd(model.named_parameters()).step()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(gradients[name], other_gradients[name]), f"{name} has another gradient on rank 1"
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=EXACT, atol=EXACT)
        torch.testing.assert_close(state[name], parameter.detach(), rtol=EXACT, atol=EXACT)


# ---- clipping ---------------------------------------------------------------------------------------------------------

CLIP = 0.05


def train_clipped(prepared: None, num_stages: int) -> tuple[list[float], dict[str, Tensor]]:
    wh.init({"num_micro_batch": 2, "clip_grad_norm": CLIP})
    model = in_two_stages(build()) if num_stages == 2 else build()
    engine = wh.parallelize(model, make_batch(0), optimizer=sgd)
    norms = [engine.step(make_batch(step)).grad_norm for step in range(3)]
    return norms, engine.full_state_dict()


@pytest.mark.parametrize(("num_ranks", "num_stages"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_clipping_uses_the_norm_of_the_whole_model(server: ModelServer, num_ranks: int, num_stages: int) -> None:
    ranks = server.run(train_clipped, num_ranks, num_stages)
    model = build()
    optimizer = sgd(model.named_parameters())
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        run_loss(model, make_batch(step), None).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    assert min(norms) > CLIP, "nothing was clipped: the test shows nothing"
    for rank_norms, _ in ranks:
        assert rank_norms == pytest.approx(norms, rel=EXACT)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ranks[0][1][name], parameter.detach(), rtol=EXACT, atol=EXACT)


# ---- dropout ----------------------------------------------------------------------------------------------------------

NUM_MASKED = 64  # entries of a mask: two masks are equal by chance with probability 2**-64


class Dropped(nn.Module):
    """Its gradient shows the mask: entry j gets 2 x the sum of 2**i over the samples i whose entry j was kept."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(NUM_MASKED, dtype=torch.float64))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x * self.weight).sum()


def powers(batch_size: int) -> Tensor:
    return (2.0 ** torch.arange(batch_size, dtype=torch.float64)).unsqueeze(1).expand(batch_size, NUM_MASKED).contiguous()


def masks_of(gradient: Tensor, batch_size: int) -> list[list[int]]:
    """For each sample the entries that were kept, read from the bits of the gradient."""
    numbers = [int(number) // 2 for number in gradient.tolist()]
    return [[number >> sample & 1 for number in numbers] for sample in range(batch_size)]


def drop(prepared: None, seed: int) -> tuple[list[float], list[Tensor], float | None]:
    """(losses, gradients of two steps, loss in evaluation)."""
    wh.init({"num_micro_batch": 2, "seed": seed})
    engine = wh.parallelize(Dropped(), powers(8), optimizer=lambda params: torch.optim.SGD(params, lr=0.0))
    losses, gradients = [], []
    for _ in range(2):
        losses.append(engine.step(powers(8)).loss)
        gradients.append(engine.gradients()["weight"].clone())
    return losses, gradients, engine.evaluate(powers(8)).loss


def test_dropout_differs_between_samples_and_comes_again_with_the_seed(server: ModelServer) -> None:
    """2 devices x 2 micro-batches of 2 samples each: no two samples of a step, and no two steps, get the same mask."""
    first, again, other = (server.run(drop, 2, seed)[0] for seed in (1, 1, 2))
    assert first[0] == again[0] and all(torch.equal(a, b) for a, b in zip(first[1], again[1], strict=True))
    assert first[0] != other[0]
    seen = [tuple(mask) for gradient in (*first[1], *other[1]) for mask in masks_of(gradient, 8)]
    assert len(set(seen)) == len(seen), "two samples got the same mask"
    assert 0.35 < sum(map(sum, seen)) / (len(seen) * NUM_MASKED) < 0.65
    assert first[2] == powers(8).sum().item(), "there is no dropout in evaluation"


# ---- optimizers -------------------------------------------------------------------------------------------------------


def adamw(pairs: Any) -> torch.optim.Optimizer:
    """The usual two groups: no decay for biases and norms, told apart by name."""
    named = list(pairs)
    decayed = [parameter for name, parameter in named if name.endswith("weight")]
    plain = [parameter for name, parameter in named if not name.endswith("weight")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01)


def step_lr(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)


def train_with_adamw(prepared: None, plan: Any = None, num_steps: int = 5) -> tuple[list[float], list[float], dict[str, Tensor], int]:
    wh.init({"num_micro_batch": 2})
    engine = wh.parallelize(in_two_stages(build()), make_batch(0), optimizer=adamw, scheduler=step_lr, plan=plan)
    results = [engine.step(make_batch(step)) for step in range(num_steps)]
    losses = [result.loss for result in results]
    assert engine.optimizer is not None
    states = sum(len(engine.optimizer.state[p]) > 0 for group in engine.optimizer.param_groups for p in group["params"])
    return losses, [result.learning_rate for result in results], engine.full_state_dict(), states


def adamw_locally(num_steps: int = 5) -> tuple[list[float], list[float], nn.Module]:
    model = build()
    optimizer = adamw(model.named_parameters())
    scheduler = step_lr(optimizer)
    losses, rates = [], []
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = run_loss(model, make_batch(step), None)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        rates.append(float(scheduler.get_last_lr()[0]))
    return losses, rates, model


def assert_state_is(state: dict[str, Tensor], model: nn.Module, tolerance: float = EXACT) -> None:
    """The state dict of rank 0 loads into the plain model and holds the values of the one trained locally."""
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, strict=True)
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_adamw_with_groups_by_name_and_a_scheduler_is_exact(server: ModelServer, num_ranks: int) -> None:
    """AdamW divides by small numbers, so rounding grows to some 1e-9 here."""
    ranks = server.run(train_with_adamw, num_ranks)
    losses, rates, model = adamw_locally()
    assert rates == pytest.approx([0.01, 0.001, 0.001, 0.0001, 0.0001])
    for rank, (got, got_rates, _, num_states) in enumerate(ranks):
        assert got == pytest.approx(losses, rel=1e-8)
        assert got_rates == pytest.approx(rates)
        num_own = 8 if rank % 2 == 0 else 10  # weights and biases of 4 layers; the head is on the second stage
        assert num_states == num_own, "optimizer state is only for what this rank holds"
    assert_state_is(ranks[0][2], model, 1e-8)


def test_a_saved_plan_trains_the_same(server: ModelServer, tmp_path: Path) -> None:
    """Saved, read again, and followed: by path and as an object, to the bit."""
    path = tmp_path / "plan.json"
    made = wh.plan(in_two_stages(build()), make_batch(0), cluster=2, config={"num_micro_batch": 2})
    made.save(path)
    assert wh.Plan.load(path) == made and wh.diff(wh.Plan.load(path), made) == []
    without = server.run(train_with_adamw, 2, None, 2)
    for given in (str(path), made):
        with_plan = server.run(train_with_adamw, 2, given, 2)
        assert [rank[0] for rank in with_plan] == [rank[0] for rank in without]
        assert all(torch.equal(tensor, without[0][2][name]) for name, tensor in with_plan[0][2].items())


def train_frozen(prepared: None, frozen: str) -> tuple[list[str], list[str], list[str], int, bool, dict[str, Tensor]]:
    """(trained here, with gradient, frozen with gradient or state, gradient messages, has an optimizer, state)."""
    wh.init({"num_micro_batch": 3})
    model = in_two_stages(build())
    freeze(model, frozen)
    engine = wh.parallelize(model, make_batch(0), optimizer=adamw)
    for step in range(2):
        engine.step(make_batch(step))
    fixed = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    state = engine.optimizer.state if engine.optimizer is not None else {}
    touched = [n for n, p in model.named_parameters() if n in fixed and not p.is_meta and (p.grad is not None or p in state)]
    messages = sum(action.startswith("send B") for order in engine.plan.schedule["orders"] for action in order)
    trained = [name for name, _ in engine.named_parameters()]
    return trained, sorted(engine.gradients()), touched, messages, engine.optimizer is not None, engine.full_state_dict()


def freeze(model: nn.Module, prefixes: str) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(prefixes.split("|"))))


@pytest.mark.parametrize(
    ("frozen", "messages"),
    [("layers.0|layers.1|layers.2|layers.3", 0), ("layers.1|layers.6|head", 3)],
    ids=["the whole first stage", "parts of both"],
)
def test_frozen_parameters_get_no_gradient_state_or_message(server: ModelServer, frozen: str, messages: int) -> None:
    """With a frozen first stage nothing goes back over the cut; otherwise one gradient for each micro-batch."""
    model = build()
    freeze(model, frozen)
    optimizer = adamw([(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad])
    for step in range(2):
        optimizer.zero_grad()
        run_loss(model, make_batch(step), None).backward()
        optimizer.step()
    ranks = server.run(train_frozen, 2, frozen)
    expected = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name for trained, *_ in ranks for name in trained} == expected
    for trained, with_gradient, touched, num_sent, has_optimizer, _ in ranks:
        assert sorted(trained) == with_gradient and not touched and num_sent == messages
        assert has_optimizer == bool(trained)
    assert_state_is(ranks[0][5], model, 1e-8)


def train_head_only(prepared: None) -> tuple[list[float], bool, dict[str, Tensor]]:
    """The optimizer picks parameters by name, and the first stage has none of them."""
    wh.init({"num_micro_batch": 2})
    engine = wh.parallelize(in_two_stages(build()), make_batch(0), optimizer=head_only)
    losses = [engine.step(make_batch(step)).loss for step in range(3)]
    return losses, engine.optimizer is not None, engine.full_state_dict()


def head_only(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for name, parameter in parameters if name.startswith("head.")], lr=0.1)


def test_an_optimizer_may_find_nothing_on_a_rank(server: ModelServer) -> None:
    """torch refuses an optimizer without parameters; a rank whose stages have none of those that were picked goes without."""
    model = build()
    reference = local_training(model, [make_batch(step) for step in range(3)], None, head_only)
    ranks = server.run(train_head_only, 2)
    assert [has_optimizer for _, has_optimizer, _ in ranks] == [False, True]
    for losses, _, _ in ranks:
        assert losses == pytest.approx(reference.losses, rel=EXACT)
    assert_state_is(ranks[0][2], model, 1e-8)


# ---- evaluation -------------------------------------------------------------------------------------------------------


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
    """Two layers with something to look at on each stage; gives it in the form that is asked for. Dropout and a batch norm are in it."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, NUM_CLASSES)
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        hidden = self.dropout(self.norm(torch.tanh(self.first(x))))
        logits = self.second(hidden)
        loss = F.cross_entropy(logits, labels) if labels is not None else None
        if self.form == "tensor":
            return logits
        if self.form == "tuple":
            return logits, None, (hidden.T, [logits.argmax(-1), x])
        if self.form == "dict":
            return {"loss": loss, "logits": logits, "none": None, "nested": {"hidden": hidden, "scale": self.second.weight * 2}}
        if self.form == "named tuple":
            return Pair(logits, hidden)
        return Answer(logits, hidden, None, loss)


FORMS = ("tensor", "tuple", "dict", "named tuple", "dataclass")
HAVE_LOSS = ("dict", "dataclass")
WITHOUT_LABELS = ("tensor", "dict")
"""forms that are also asked for without labels: the loss is made by `loss=`, or by the model"""


def answers(form: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Answers(form).double()


def loss_of_output(output: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output if isinstance(output, Tensor) else output[0], batch["labels"])


ON_REPLICAS = ("tuple", "dict")
"""forms that are also put together from 2 model replicas; the others from 2 stages"""


def evaluate_forms(prepared: None, forms: Sequence[str]) -> dict[str, tuple[float | None, Any, Any, dict[str, Tensor]]]:
    """For each form: loss and outputs with labels, outputs without, and the state after two steps."""
    found = {}
    for form in forms:
        wh.init({"num_micro_batch": 2})
        model = wh.annotate(answers(form), {"first|norm": wh.replicate(1), "second": wh.replicate(1)})
        engine = wh.parallelize(model, make_batch(0), optimizer=sgd, loss=None if form in HAVE_LOSS else loss_of_output)
        for step in range(2):
            engine.step(make_batch(step))
        result = engine.evaluate(make_batch(7), outputs=True)
        without = engine.evaluate({"x": make_batch(7)["x"]}, outputs=True) if form in WITHOUT_LABELS else None
        assert without is None or without.loss is None, "there are no labels"
        found[form] = result.loss, result.outputs, without and without.outputs, engine.full_state_dict()
    return found


def plain(output: Any) -> Any:
    """Fields by name, sequences as lists."""
    if is_dataclass(output) and not isinstance(output, type):
        return {field.name: plain(getattr(output, field.name)) for field in fields(output)}
    if isinstance(output, dict):
        return {key: plain(value) for key, value in output.items()}
    if isinstance(output, (tuple, list)):
        return [plain(value) for value in output]
    return output


Evaluated = list[dict[str, tuple[float | None, Any, Any, dict[str, Tensor]]]]
"""what `evaluate_forms` gave on each rank"""


@pytest.fixture(scope="module")
def evaluated_on_replicas(server: ModelServer) -> Evaluated:
    return server.run(evaluate_forms, 4, ON_REPLICAS)


@pytest.fixture(scope="module")
def evaluated_on_stages(server: ModelServer) -> Evaluated:
    return server.run(evaluate_forms, 2, [form for form in FORMS if form not in ON_REPLICAS])


@pytest.mark.parametrize("form", FORMS)
def test_evaluation_gives_the_local_outputs_in_sample_order(request: pytest.FixtureRequest, form: str) -> None:
    """9 samples over 2 micro-batches, 2 stages and 1 or 2 replicas; running statistics instead of those of the batch, and no dropout."""
    evaluated: Evaluated = request.getfixturevalue("evaluated_on_replicas" if form in ON_REPLICAS else "evaluated_on_stages")
    _, outputs, without, state = evaluated[0][form]
    model = answers(form)
    assert not torch.equal(state["norm.running_mean"], model.state_dict()["norm.running_mean"]), "training changed the statistics"
    model.load_state_dict(state, strict=True)
    model.eval()
    batch = make_batch(7)
    with torch.no_grad():
        expected, expected_without = model(**batch), model(x=batch["x"])
        local_loss = expected["loss"] if form == "dict" else expected.loss if form == "dataclass" else loss_of_output(expected, batch)
    for rank in evaluated:
        assert rank[form][0] == pytest.approx(local_loss.item(), rel=EXACT)
    torch.testing.assert_close(plain(outputs), plain(expected), rtol=EXACT, atol=EXACT)
    if form in WITHOUT_LABELS:
        torch.testing.assert_close(plain(without), plain(expected_without), rtol=EXACT, atol=EXACT)
    assert all(rank[form][1] is None for rank in evaluated[1:]), "outputs are on rank 0 only"


# ---- batches of many shapes -------------------------------------------------------------------------------------------


class Sequences(nn.Module):
    """Attention over positions, one layer called three times and another on both stages, and batch entries without samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, words: Tensor, labels: Tensor, scale: Tensor, temperature: Tensor) -> Tensor:
        x = self.embedding(words) * scale
        with wh.replicate(1):
            for _ in range(3):
                x = x + torch.tanh(self.first(x))
            x = self.attend(x, temperature)
        with wh.replicate(1):
            x = self.attend(self.second(x), temperature)
            return F.cross_entropy((x @ self.embedding.weight.T).flatten(0, 1), labels.flatten(), ignore_index=-100)

    def attend(self, x: Tensor, temperature: Tensor) -> Tensor:
        return x + F.softmax(self.mix(x) @ x.transpose(1, 2) / temperature, -1) @ x


def sequence_batch(seed: int, batch_size: int, length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, 20, (batch_size, length), generator=generator)
    labels = words.masked_fill(torch.rand(words.shape, generator=generator) < 0.4, -100)
    scale = torch.rand(WIDTH, generator=generator, dtype=torch.float64)
    return {"words": words, "labels": labels, "scale": scale, "temperature": torch.tensor(2.0 + seed, dtype=torch.float64)}


SHAPES = [(9, 5), (9, 3), (9, 7), (9, 5), (4, 5), (5, 3), (11, 7)]
"""(samples, length) of each step; 4 is the smallest batch for 2 micro-batches over 2 replicas"""


def sequences() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Sequences().double()


def train_on_shapes(prepared: None) -> tuple[Trace, list[dict[str, float]], tuple[str, ...]]:
    wh.init({"num_micro_batch": 2})
    data = [sequence_batch(step, *shape) for step, shape in enumerate(SHAPES)]
    engine = wh.parallelize(sequences(), data[0], optimizer=sgd)
    losses, gradients, timings = [], {}, []
    for batch in data:
        result = engine.step(batch)
        losses.append(result.loss)
        gradients = gradients or {name: gradient.clone() for name, gradient in engine.gradients().items()}
        timings.append(vars(result.timing))
    return Trace(losses, gradients, engine.full_state_dict()), timings, engine.plan.notes


@pytest.fixture(scope="module", params=[2, 4])
def shaped(request: pytest.FixtureRequest, server: ModelServer) -> list[tuple[Trace, list[dict[str, float]], tuple[str, ...]]]:
    """2 stages, and 2 stages x 2 replicas."""
    return server.run(train_on_shapes, request.param)


def test_other_lengths_and_batch_sizes_are_exact(shaped: list[Any]) -> None:
    """Each length is captured once. Shared modules are tied over the stages; entries without samples go whole to every device."""
    ranks = shaped
    data = [sequence_batch(step, *shape) for step, shape in enumerate(SHAPES)]
    gradients = {name: gradient for trace, _, _ in ranks for name, gradient in trace.gradients.items()}
    compare(local_training(sequences(), data, None, sgd), Trace(ranks[0][0].losses, gradients, ranks[0][0].weights))
    for path in ("scale", "temperature"):
        assert any(path in note and "no batch dimension" in note for note in ranks[0][2])


def test_the_times_of_a_step_add_up(shaped: list[Any]) -> None:
    for _, timings, _ in shaped:
        for timing in timings:
            parts = timing["compute_s"] + timing["communication_s"] + timing["bubble_s"]
            assert all(seconds >= 0 for seconds in timing.values())
            assert timing["compute_s"] > 0 and parts <= timing["total_s"] * 1.05


# ---- mixed precision --------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """What crosses is the result of a matrix product: bfloat16 under autocast. With `residual` it is a sum with the float32 input."""

    def __init__(self, residual: bool) -> None:
        super().__init__()
        self.residual = residual
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x) if self.residual else layer(x)
        return F.cross_entropy(self.head(x), labels)


def chain(residual: bool) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Chain(residual)


def float_batch(seed: int) -> dict[str, Tensor]:
    batch = make_batch(seed)
    return {"x": batch["x"].float(), "labels": batch["labels"]}


def train_bf16(prepared: None, residual: bool) -> tuple[list[float], list[int], set[torch.dtype]]:
    wh.init({"num_micro_batch": 3, "precision": "bf16"})
    model = wh.annotate(chain(residual), {"layers.[0-1]": wh.replicate(1), "layers.[2-3]|head": wh.replicate(1)})
    engine = wh.parallelize(model, float_batch(0), optimizer=sgd)
    losses = [engine.step(float_batch(step)).loss for step in range(3)]
    dtypes = {parameter.dtype for _, parameter in engine.named_parameters()} | {g.dtype for g in engine.gradients().values()}
    return losses, [crossing.sample_bytes for crossing in engine.plan.crossings], dtypes


@pytest.mark.parametrize(("residual", "itemsize"), [(False, 2), (True, 4)])
def test_bf16_sends_tensors_in_their_own_dtype(server: ModelServer, residual: bool, itemsize: int) -> None:
    model = chain(residual)
    optimizer = sgd(model.named_parameters())
    expected = []
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = run_loss(model, float_batch(step), None)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for losses, sizes, dtypes in server.run(train_bf16, 2, residual):
        assert losses == pytest.approx(expected, rel=1e-2)
        assert sizes == [WIDTH * itemsize]
        assert dtypes == {torch.float32}, "weights and gradients stay in float32"


# ---- activations computed again ---------------------------------------------------------------------------------------


class Recomputing(Layers):
    """The same layers, those from 2 to 5 under torch.utils.checkpoint: two regions on each stage."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = checkpoint(self.block, layer, x, use_reentrant=False) if 2 <= number <= 5 else self.block(layer, x)
        return F.cross_entropy(self.head(x), labels)

    def block(self, layer: nn.Module, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(layer(x))
        return x


class Keeping(Recomputing):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.block(layer, x)
        return F.cross_entropy(self.head(x), labels)


def recomputing(kind: type[Recomputing]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind().double()


def train_recomputing(prepared: None) -> list[tuple[dict[str, Tensor], int, dict[str, Tensor]]]:
    """Gradients, tensors that autograd kept in a step, and state: with regions computed again, and without."""
    found = []
    for kind in (Recomputing, Keeping):
        wh.init({"num_micro_batch": 2})
        engine = wh.parallelize(in_two_stages(recomputing(kind)), make_batch(0), optimizer=sgd)
        kept: list[None] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor, kept=kept: (kept.append(None), tensor)[1], lambda tensor: tensor):
            engine.step(make_batch(0))
        found.append((engine.gradients(), len(kept), engine.full_state_dict()))
    return found


def test_checkpointed_regions_are_exact_and_keep_fewer_tensors(server: ModelServer) -> None:
    reference = local_training(recomputing(Keeping), [make_batch(0)], None, sgd)
    ranks = server.run(train_recomputing, 2)
    for kind in (0, 1):
        gradients = {name: gradient for rank in ranks for name, gradient in rank[kind][0].items()}
        compare(reference, Trace(reference.losses, gradients, ranks[0][kind][2]))
    for (_, fewer, _), (_, all_kept, _) in ranks:
        assert fewer < 0.8 * all_kept, "two of four layers on each stage keep their inputs only"


# ---- data -------------------------------------------------------------------------------------------------------------


class Counted(torch.utils.data.Dataset[dict[str, Tensor]]):
    """40 samples; every third label does not count. Notes which samples were read."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.x = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.read.append(index)
        return {"x": self.x[index], "labels": torch.tensor(-100 if index % 3 == 1 else index % NUM_CLASSES)}


def shuffled(epoch: int) -> list[int]:
    return torch.randperm(40, generator=torch.Generator().manual_seed(100 + epoch)).tolist()


def collated(dataset: Counted, samples: list[int]) -> dict[str, Tensor]:
    return torch.utils.data.default_collate([dataset[sample] for sample in samples])


def load(prepared: None, num_stages: int, position: dict[str, int] | None, num_steps: int) -> tuple[list[float], list[int], dict[str, int]]:
    """(losses, samples that this rank read, position after the last step)."""
    wh.init({"num_micro_batch": 2})
    dataset = Counted()
    layers = [f"layers.[{4 * s // num_stages * 2}-{4 * (s + 1) // num_stages * 2 - 1}]" for s in range(num_stages)]
    model = wh.annotate(build(), {glob: wh.replicate(1) for glob in layers}) if num_stages > 1 else build()
    engine = wh.parallelize(model, collated(dataset, shuffled(0)[:BATCH_SIZE]), optimizer=lambda pairs: torch.optim.SGD(pairs, lr=0.0))
    dataset.read.clear()
    loader = engine.loader(dataset, BATCH_SIZE, sampler=shuffled)
    if position is not None:
        loader.load_state_dict(position)
    losses: list[float] = []
    while len(losses) < num_steps:
        for batch in loader:
            losses.append(engine.step(batch).loss)
            if len(losses) == num_steps:
                break
    return losses, dataset.read, loader.state_dict()


def expected_batches(num_steps: int) -> list[list[int]]:
    """4 full batches of 9 in each epoch; the 4 samples that are left over are not seen."""
    order = [samples[start : start + BATCH_SIZE] for samples in map(shuffled, range(2)) for start in range(0, 36, BATCH_SIZE)]
    return order[:num_steps]


def test_each_rank_loads_only_its_own_samples(server: ModelServer) -> None:
    """4 stages: the two in the middle read nothing of the batch. 2 stages x 2 replicas: half of the samples each."""
    batches = expected_batches(6)
    dataset = Counted()
    expected = [run_loss(build(), collated(dataset, samples), None).item() for samples in batches]
    for num_stages in (1, 2, 4):
        ranks = server.run(load, 4, num_stages, None, 6)
        for losses, _, position in ranks:
            assert losses == pytest.approx(expected, rel=EXACT)
            assert position == {"epoch": 1, "position": 2 * BATCH_SIZE}
        everything = [sample for samples in batches for sample in samples]
        per_stage = [[rank for rank in range(4) if rank % num_stages == stage] for stage in range(num_stages)]
        for stage, members in enumerate(per_stage):
            read = sorted(sample for rank in members for sample in ranks[rank][1])
            assert read == (sorted(everything) if stage in (0, num_stages - 1) else []), f"stage {stage} of {num_stages}"
        assert all(len(read) < len(everything) or num_stages == 4 for _, read, _ in ranks)


def test_the_position_fits_another_number_of_ranks(server: ModelServer) -> None:
    """Stopped after 3 steps on 4 ranks, continued on 2 and on 1: the same samples, each once, over the end of the epoch."""
    dataset, batches = Counted(), expected_batches(6)
    expected = [run_loss(build(), collated(dataset, samples), None).item() for samples in batches]
    (losses, _, position), *_ = server.run(load, 4, 2, None, 3)
    assert losses == pytest.approx(expected[:3], rel=EXACT) and position == {"epoch": 0, "position": 3 * BATCH_SIZE}
    for num_ranks, num_stages in ((2, 2), (2, 1), (1, 1)):
        ranks = server.run(load, num_ranks, num_stages, position, 3)
        assert ranks[0][0] == pytest.approx(expected[3:], rel=EXACT)
        assert {sample for rank in ranks for sample in rank[1]} == {sample for samples in batches[3:] for sample in samples}


# ---- numbers that are not finite --------------------------------------------------------------------------------------


def train_nonfinite(prepared: None, mode: str) -> tuple[str, list[bool], list[float], dict[str, Tensor]]:
    """Step 1 has an infinite input for one sample of rank 1's; gives the message, what was skipped, losses, and the state."""
    wh.init({"num_micro_batch": 2, "on_nonfinite": mode})
    engine = wh.parallelize(in_two_stages(build()), make_batch(0), optimizer=sgd)
    message, results = "", []
    for step in range(3):
        batch = make_batch(step)
        if step == 1:
            batch["x"][-1, 0] = float("inf")
        try:
            results.append(engine.step(batch))
        except NonFiniteError as error:
            message = str(error)
            break
    return message, [result.skipped for result in results], [result.loss for result in results], engine.full_state_dict()


@pytest.mark.parametrize("mode", ["stop", "skip", "continue"])
def test_a_number_that_is_not_finite(server: ModelServer, mode: str) -> None:
    model = build()
    optimizer = sgd(model.named_parameters())
    for step in {"stop": (0,), "skip": (0, 2), "continue": ()}[mode]:
        optimizer.zero_grad()
        run_loss(model, make_batch(step), None).backward()
        optimizer.step()
    ranks = server.run(train_nonfinite, 4, mode)
    for message, skipped, losses, _ in ranks:
        if mode == "stop":
            assert skipped == [False]
            assert message.startswith("step 1: ") and "weights are unchanged" in message and '"on_nonfinite": "skip"' in message
            # the last sample belongs to the second replica: ranks 2 and 3; sums over the holders bring it to 0 and 1 as well
            assert all(f"on rank {rank}" in message for rank in range(4)) and "layers." in message
        else:
            assert message == ""
            assert skipped == [False, mode == "skip", False]
            assert math.isfinite(losses[0]) and not math.isfinite(losses[1]) and math.isfinite(losses[2]) == (mode == "skip")
    state = ranks[0][3]
    if mode == "continue":
        assert not all(bool(tensor.isfinite().all()) for tensor in state.values())
    else:
        assert_state_is(state, model)


# ---- looking at a run -------------------------------------------------------------------------------------------------


def train_and_look(prepared: None, folder: str) -> tuple[list[float], list[str]]:
    """(losses, this rank's actions in the schedule)."""
    wh.init({"num_micro_batch": 3, "run_folder": folder})
    engine = wh.parallelize(in_two_stages(build()), make_batch(0), optimizer=sgd)
    losses = [engine.step(make_batch(step)).loss for step in range(3)]
    engine.trace(f"{folder}/trace.json")
    engine.close()
    return losses, engine.plan.schedule["orders"][int(os.environ["RANK"]) % 2]


def test_metrics_and_trace_of_a_run(server: ModelServer, tmp_path: Path) -> None:
    """One line for each step and rank; in the trace every action of every rank, once and in order."""
    ranks = server.run(train_and_look, 4, str(tmp_path))
    assert len(list(metrics_file(tmp_path, 0).parent.iterdir())) == 4
    for rank, (losses, _) in enumerate(ranks):
        lines = [json.loads(line) for line in metrics_file(tmp_path, rank).read_text().splitlines()]
        assert [line["step"] for line in lines] == [0, 1, 2] and [line["loss"] for line in lines] == losses
        for line in lines:
            assert line["rank"] == rank and line["lr"] == 0.1 and line["memory_bytes"] > 0
            assert line["samples_per_s"] == pytest.approx(BATCH_SIZE / line["total_s"]) and line["grad_norm"] > 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for rank, (_, actions) in enumerate(ranks):
        own = sorted((event for event in events if event["ph"] == "X" and event["tid"] == rank), key=lambda event: event["ts"])
        assert [event["name"] for event in own] == actions
        assert all(event["dur"] >= 0 for event in own)
