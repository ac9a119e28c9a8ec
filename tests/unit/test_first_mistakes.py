"""What people type first: plain (x, y) batches, an optimizer that is already made, a loss of
torch.nn, a mask as an index.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale as wh
from tests.exactness import run_loss
from whale.checkpoint import CheckpointError
from whale.runtime.engine import Engine
from whale.runtime.other_names import INSTEAD

WIDTH = 6
NUM_CLASSES = 4
BATCH_SIZE = 6


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def x_and_y() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(BATCH_SIZE, WIDTH, generator=generator), torch.randint(
        0, NUM_CLASSES, (BATCH_SIZE,), generator=generator
    )


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.layer(x if mask is None else x * mask)


# ---- the loss takes what the forward has no argument for


def test_a_plain_pair_trains_as_locally() -> None:
    x, y = x_and_y()
    model = nn.Linear(WIDTH, NUM_CLASSES)
    local = nn.Linear(WIDTH, NUM_CLASSES)
    local.load_state_dict(model.state_dict())
    optimizer = sgd(local.parameters())
    wh.init({"num_micro_batch": 2})
    engine = wh.parallelize(
        model, (x, y), loss=lambda output, batch: F.cross_entropy(output, batch[1]), optimizer=sgd
    )
    assert "[1]: forward has no such argument, only the loss gets it" in engine.plan.notes
    for _ in range(3):
        expected = F.cross_entropy(local(x), y)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        assert engine.step((x, y)).loss == pytest.approx(expected.item(), rel=1e-5)
    outputs = engine.evaluate((x, y), outputs=True).outputs
    assert torch.allclose(outputs, local(x).detach(), rtol=1e-4, atol=1e-6)


class OverSamples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        logits = self.layer(x)
        return logits, logits.amax(0), logits.mean(0), logits - logits.mean(0)


def test_outputs_that_parts_of_the_batch_do_not_give_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x, y = x_and_y()
    model = OverSamples()
    wh.init({"num_micro_batch": 2})
    engine = wh.parallelize(
        model,
        (x, y),
        loss=lambda output, batch: F.cross_entropy(output[0], batch[1]),
        optimizer=sgd,
    )
    outputs, _ = (engine.evaluate((x, y), outputs=True).outputs for _ in range(2))
    with torch.no_grad():
        logits, _, mean, _ = model(x)
    assert outputs[1] is None
    torch.testing.assert_close((outputs[0], outputs[2]), (logits, mean))
    told = [record.message for record in caplog.records if "engine.evaluate" in record.message]
    assert len(told) == 2 and "is None" in told[0] and "mixes samples" in told[1], "each once"
    assert all("test_first_mistakes.py" in message for message in told)


def test_a_misspelt_argument_is_refused() -> None:
    x, y = x_and_y()
    wh.init()
    with pytest.raises(
        ValueError, match=r"\['maks'\] of the batch: neither forward.* Did you mean 'mask'\?"
    ):
        wh.parallelize(
            Masked(),
            {"x": x, "y": y, "maks": x},
            loss=lambda output, batch: F.cross_entropy(output, batch["y"]),
            optimizer=sgd,
        )


# ---- refusals with advice


def of_pair(loss: Callable[[Any, Any], Tensor]) -> None:
    wh.parallelize(nn.Linear(WIDTH, NUM_CLASSES), x_and_y(), loss=loss, optimizer=sgd)


class Indices(nn.Module):
    """Each row points to another row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        output = self.layer(x)
        return F.mse_loss(output, output[other])


class TwoResults(Masked):
    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        output = self.layer(x)
        return F.cross_entropy(output, labels), output


def already_made() -> None:
    model = nn.Linear(WIDTH, NUM_CLASSES)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    wh.parallelize(
        model,
        x_and_y(),
        loss=lambda output, batch: F.cross_entropy(output, batch[1]),
        optimizer=optimizer,
    )


def scheduler_already_made() -> None:
    model = nn.Linear(WIDTH, NUM_CLASSES)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(sgd(model.parameters()), 1)
    wh.parallelize(
        model,
        x_and_y(),
        loss=lambda output, batch: F.cross_entropy(output, batch[1]),
        optimizer=sgd,
        scheduler=scheduler,
    )


def no_optimizer_made() -> None:
    make: Any = lambda parameters: None  # noqa: E731
    wh.parallelize(
        nn.Linear(WIDTH, NUM_CLASSES),
        x_and_y(),
        loss=lambda output, batch: F.cross_entropy(output, batch[1]),
        optimizer=make,
    )


def parameters_of_the_model() -> None:
    """The function does not look at what it is given."""
    model = nn.Linear(WIDTH, NUM_CLASSES)
    wh.parallelize(
        model,
        x_and_y(),
        loss=lambda output, batch: F.cross_entropy(output, batch[1]),
        optimizer=lambda _: sgd(deepcopy(model).parameters()),
    )


def same_memory() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model[1].weight.data = model[0].weight.data
    wh.parallelize(model, x_and_y()[0], loss=lambda output, batch: output.mean(), optimizer=sgd)


def counted_gradients() -> None:
    y = x_and_y()[1]
    model = nn.Sequential(
        nn.Embedding(NUM_CLASSES, WIDTH, scale_grad_by_freq=True), nn.Linear(WIDTH, NUM_CLASSES)
    )
    wh.init({"num_micro_batch": 2})
    wh.parallelize(
        model, y, loss=lambda output, batch: F.cross_entropy(output, batch), optimizer=sgd
    )


CENTRE = torch.zeros(NUM_CLASSES)


def centred_loss(output: Tensor) -> Tensor:
    value = (output - CENTRE).square().mean()
    CENTRE.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
    return value


class Experts(nn.Module):
    """A mixture that gives each expert its tokens, in ways that a graph cannot hold."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.asks = asks

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if self.asks and not (chosen == number).any():
                continue
            rows, places = torch.where(chosen == number)
            out = out.index_add(0, rows, expert(x[rows]) * weight[rows, places, None])
        return out.square().mean()


def of_experts(asks: bool) -> None:
    wh.parallelize(Experts(asks), x_and_y()[0], optimizer=sgd)


def gradient_in_forward(output: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(output.sum(), output, create_graph=True)
    return slope.square().mean()


def not_a_model() -> None:
    model: Any = "gpt2"
    wh.parallelize(model, x_and_y(), optimizer=sgd)


def wrapped_in_ddp() -> None:
    class DistributedDataParallel(nn.Module):  # the real one wants a process group
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(4, 2)

    wh.parallelize(DistributedDataParallel(), x_and_y(), optimizer=sgd)


MISTAKES: dict[str, tuple[Callable[[], None], str]] = {
    "optimizer already made": (
        already_made,
        r"optimizer= is an optimizer that is already made \(AdamW\).*lambda params: torch.optim.AdamW\(params",
    ),
    "scheduler already made": (
        scheduler_already_made,
        r"scheduler= is a scheduler that is already made \(StepLR\).*lambda optimizer",
    ),
    "still wrapped": (wrapped_in_ddp, r"DistributedDataParallel.*Try: .*model\.module"),
    "no optimizer made": (no_optimizer_made, r"the function given as optimizer= returned NoneType"),
    "parameters from elsewhere": (
        parameters_of_the_model,
        r"a SGD with a parameter of shape \[4, 6\] that it was not given.*Try: pass on what",
    ),
    "loss of torch.nn": (
        lambda: of_pair(nn.CrossEntropyLoss()),
        r"(?s)the loss raised TypeError.*loss=lambda output, batch",
    ),
    "mask as an index": (
        lambda: of_pair(lambda o, b: o[b[1] > 1].pow(2).mean()),
        r"depends on what the tensors hold \(test_.*torch.where",
    ),
    "a decision in the loss": (
        lambda: of_pair(lambda o, b: o.mean() if torch.any(o > 0) else o.sum()),
        r"(?s)the loss function, test_first_mistakes.py.*Python needs the value of a tensor here.*torch.where",
    ),
    "tokens of each expert": (
        lambda: of_experts(asks=False),
        r"the shape of `where` depends on what the tensors hold.*Try: experts that each take their "
        r"tokens: stack.*torch\.bmm\(x\.unsqueeze\(1\), stacked\[chosen\]\)",
    ),
    "has an expert tokens": (
        lambda: of_experts(asks=True),
        r"(?s)the model itself \(Experts\), test_first_.*which experts have tokens.*torch\.bmm",
    ),
    "a gradient in forward": (
        lambda: of_pair(lambda o, b: gradient_in_forward(o)),
        r"(?s)at the loss function, test_first_.*: `\(slope,\) =.*forward takes a gradient itself",
    ),
    "a loss of shape [1]": (
        lambda: of_pair(lambda o, b: o.mean().reshape(1)),
        r"^loss\(output, batch\) gave a tensor of shape \[1\]",
    ),
    "several results": (
        lambda: wh.parallelize(TwoResults(), x_and_y(), optimizer=sgd) and None,
        r"^the model gave a tuple: name the loss in it, such as loss=lambda output, batch: output\[0\]",
    ),
    "rows that point to rows": (
        lambda: (
            wh.parallelize(
                Indices(),
                {"x": x_and_y()[0], "other": torch.arange(BATCH_SIZE).flip(0)},
                optimizer=sgd,
            )
            and None
        ),
        r"fails on its first 2 samples alone with IndexError.*\n.*cuts \['x'\], \['other'\] into parts",
    ),
    "one memory, two parameters": (
        same_memory,
        r"0.weight and 1.weight are two tensors in the same memory.*b.weight = a.weight",
    ),
    "vmap": (
        lambda: of_pair(lambda o, b: torch.func.vmap(lambda row: row.square().sum())(o).mean()),
        r"is part of a `torch.func` transform \(vmap, grad\)\. Try: write it with batched operations",
    ),
    "scale_grad_by_freq": (
        counted_gradients,
        r"`scale_grad_by_freq` divides gradients by how often a token stands",
    ),
    "scripted": (
        lambda: (
            wh.parallelize(
                torch.jit.script(nn.Linear(WIDTH, NUM_CLASSES)), x_and_y()[0], optimizer=sgd
            )
            and None
        ),
        r"a module of torch\.jit, which cannot be captured\. Try: give the Python module",
    ),
    "a write to a tensor of the loss": (
        lambda: of_pair(lambda output, batch: centred_loss(output)),
        r"writes to a tensor that is no buffer of the model.*Try: make it a buffer of the model",
    ),
    "no model": (not_a_model, r"the model is a str: give a torch.nn.Module"),
}


def test_a_checkpoint_of_another_model_is_not_taken_for_none(tmp_path: Path) -> None:
    """A run that starts anew without a word would look like one that continues."""
    wh.init()
    pair = x_and_y()
    engine = wh.parallelize(
        Masked(), pair[0], loss=lambda output, batch: output.mean(), optimizer=sgd
    )
    assert engine.load(tmp_path) is None
    engine.step(pair[0])
    engine.save(tmp_path).wait()
    other = wh.parallelize(
        nn.Linear(WIDTH, NUM_CLASSES),
        pair[0],
        loss=lambda output, batch: output.mean(),
        optimizer=sgd,
    )
    before = {name: tensor.clone() for name, tensor in other.full_state_dict().items()}
    with pytest.raises(
        CheckpointError,
        match=r"cannot be loaded \(give another folder.*no tensor 'model/weight'.*another model",
    ):
        other.load(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        other.load(tmp_path / "step_00000001")
    assert (
        all(torch.equal(tensor, before[name]) for name, tensor in other.full_state_dict().items())
        and other.step_count == 0
    )


def test_the_loader_says_what_it_needs_and_what_it_is_for() -> None:
    wh.init()
    x = x_and_y()[0]
    engine = wh.parallelize(Masked(), x, loss=lambda output, batch: output.mean(), optimizer=sgd)
    endless: Any = iter([x])
    with pytest.raises(
        ValueError,
        match=r"needs a data set with __getitem__ and __len__, which list_iterator has not",
    ):
        engine.loader(endless, 2)
    with pytest.raises(ValueError, match=r"engine.evaluate takes whole batches.*use a DataLoader"):
        engine.evaluate(next(iter(engine.loader(torch.utils.data.TensorDataset(x), 2))))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_says_what_is_wrong_and_what_to_try(mistake: str) -> None:
    make, message = MISTAKES[mistake]
    wh.init()
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda engine: engine.backward(None), r"no 'backward'\. Try: engine\.step\(batch\)"),
        (lambda engine: engine.train(), r"no 'train'\. Try: .*engine\.evaluate\(batch\)"),
        (lambda engine: engine.state_dict(), r"no 'state_dict'\. Try: engine\.full_state_dict"),
        (lambda engine: engine.wheels, r"no 'wheels'$"),
        (lambda engine: engine(None), r"not called like a model\. Try: engine\.step\(batch\)"),
    ],
)
def test_an_engine_that_is_used_like_a_model(use: Callable[[Any], Any], said: str) -> None:
    engine = Engine.__new__(Engine)
    with pytest.raises((AttributeError, TypeError), match=said):
        use(engine)
    assert not hasattr(engine, "parameters")


def test_what_an_engine_has_instead_is_there() -> None:
    for name, advice in INSTEAD.items():
        assert not hasattr(Engine, name)
        for method in re.findall(r"engine\.(\w+)", advice):
            assert hasattr(Engine, method), method


def test_a_failed_capture_prints_no_graph(capfd: pytest.CaptureFixture[str]) -> None:
    wh.init()
    with pytest.raises(ValueError, match="Python needs the value"):
        of_pair(lambda o, b: o.mean() if torch.any(o > 0) else o.sum())
    assert "def forward(" not in capfd.readouterr().err


def test_an_argument_of_the_forward_goes_there_with_a_loss_too() -> None:
    x = x_and_y()[0]
    model = Masked()
    expected = run_loss(
        model, (x, x), lambda output, batch: output.mean()
    ).item()  # local training, which gives the model everything
    wh.init()
    engine = wh.parallelize(model, (x, x), loss=lambda output, batch: output.mean(), optimizer=sgd)
    assert engine.step((x, x)).loss == pytest.approx(expected, rel=1e-5)
