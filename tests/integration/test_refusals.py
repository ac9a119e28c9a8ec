"""What Whale cannot run exactly it refuses, by name, with the line and what to try. What it can
run, it runs exactly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale as wh
from tests.exactness import Trace, compare, local_training
from tests.integration.table import PlanCase
from tests.integration.training import (
    RankTrace,
    Subject,
    batches,
    make_optimizer,
    merge,
    train_on_rank,
)
from tests.ranks import ModelServer, RankError, preload
from tests.zoo import Case

pytestmark = pytest.mark.usefixtures("fresh_session")

preload("tests.integration.training")

WIDTH = 6
BATCH_SIZE = 10


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer(warm_up) as started:
        yield started


def warm_up() -> None:
    """The first capture of a process takes a second longer than the others: ranks inherit what it
    leaves.
    """
    wh.plan(Net, vectors(0, 4).float(), cluster=1)


def line_of(function: Callable[..., Any], text: str) -> str:
    """`test_refusals.py:12`: where a piece of code stands in a function of this file."""
    code = function.__code__
    with open(code.co_filename) as file:
        lines = file.read().splitlines()
    number = next(n for n in range(code.co_firstlineno, len(lines) + 1) if text in lines[n - 1])
    return f"test_refusals.py:{number}"


def vectors(seed: int, batch_size: int) -> Tensor:
    return torch.randn(
        batch_size, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


# ---- gradients that the captured graph would lose
# ---------------------------------------------------------------------


class RoundStraightThrough(torch.autograd.Function):
    """Takes a dict, which no operation of a graph can."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, options: dict[str, Any]) -> Tensor:
        return torch.round(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class ReverseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, options: dict[str, Any]) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -gradient, None


class SameDerivative(torch.autograd.Function):
    """A Function as people write them to save memory: its backward is the derivative of its
    forward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class Net(nn.Module):
    """Two linear layers with something between them."""

    def __init__(self) -> None:
        super().__init__()
        self.below = nn.Linear(WIDTH, WIDTH)
        self.above = nn.Linear(WIDTH, WIDTH)

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.above(self.between(self.below(x))).square().mean()


class StraightThrough(Net):
    def between(self, x: Tensor) -> Tensor:
        return RoundStraightThrough.apply(x, {})


class Reversed(Net):
    def between(self, x: Tensor) -> Tensor:
        return ReverseGradient.apply(x, {})


class Squared(Net):
    def between(self, x: Tensor) -> Tensor:
        return SameDerivative.apply(x)


class TensorHook(Net):
    def between(self, x: Tensor) -> Tensor:
        x = x * 1.0
        if x.requires_grad:
            x.register_hook(half)
        return x


def half(gradient: Tensor) -> Tensor:
    return gradient * 0.5


def halve_inputs(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(None if gradient is None else gradient * 0.5 for gradient in inputs)


class ModuleHook(Net):
    def __init__(self) -> None:
        super().__init__()
        self.above.register_full_backward_hook(halve_inputs)


LOST = [
    pytest.param(
        StraightThrough,
        "RoundStraightThrough",
        line_of(StraightThrough.between, "apply"),
        "torch.library.custom_op",
        id="straight",
    ),
    pytest.param(
        Reversed,
        "ReverseGradient",
        line_of(Reversed.between, "apply"),
        "torch.library.custom_op",
        id="reversal",
    ),
    pytest.param(
        TensorHook,
        "half",
        line_of(TensorHook.between, "register_hook"),
        "put the change into the forward",
        id="tensor hook",
    ),
    pytest.param(
        ModuleHook,
        "above: halve_inputs",
        line_of(halve_inputs, "def"),
        "remove the hook",
        id="module hook",
    ),
]


@pytest.mark.parametrize("given", ["real weights", "builder", "meta", "plan of a builder"])
@pytest.mark.parametrize(("build", "name", "line", "advice"), LOST)
def test_changed_gradients_are_refused(
    build: type[Net], name: str, line: str, advice: str, given: str
) -> None:
    batch = vectors(0, BATCH_SIZE).float()
    with pytest.raises(ValueError, match=re.escape(advice)) as caught:
        if given == "plan of a builder":
            wh.plan(build, batch, cluster=2)
        elif given == "meta":
            with torch.device("meta"):
                model = build()
            wh.parallelize(model, batch, optimizer=make_optimizer)
        else:
            wh.parallelize(
                build() if given == "real weights" else build, batch, optimizer=make_optimizer
            )
    assert name in str(caught.value) and line in str(caught.value)


def test_function_with_the_same_derivative_passes_with_real_weights() -> None:
    """The self-check compares gradients: there is nothing to refuse, and training is exact."""
    batch = vectors(0, BATCH_SIZE).float()
    model = Squared()
    twin = Squared()
    twin.load_state_dict(model.state_dict())
    engine = wh.parallelize(model, batch, optimizer=make_optimizer)
    reference = local_training(twin, [batch], None, make_optimizer)
    got = Trace([engine.step(batch).loss], engine.gradients(), engine.full_state_dict())
    compare(reference, got, 1e-5)


def test_function_with_the_same_derivative_is_refused_without_weights() -> None:
    """On meta nothing can be compared."""
    batch = vectors(0, BATCH_SIZE).float()
    with pytest.raises(ValueError, match="SameDerivative"):
        wh.parallelize(Squared, batch, optimizer=make_optimizer)


def test_checks_switched_off_refuse_every_finding() -> None:
    wh.init({"check_capture": False})
    with pytest.raises(ValueError, match="SameDerivative"):
        wh.parallelize(Squared(), vectors(0, BATCH_SIZE).float(), optimizer=make_optimizer)


def small_bloom() -> nn.Module:
    import transformers

    config = transformers.BloomConfig(
        hidden_size=16,
        n_layer=2,
        n_head=2,
        vocab_size=50,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pad_token_id=0,
    )
    return transformers.BloomForCausalLM(config).train()


def test_bloom_passes_with_weights_and_is_refused_without() -> None:
    """Bloom's GeLUFunction has the derivative of its forward, to rounding."""
    words = torch.randint(3, 50, (4, 7))
    batch = {"input_ids": words, "labels": words}
    engine = wh.parallelize(small_bloom(), batch, optimizer=make_optimizer)
    assert engine.step(batch).loss > 0
    with pytest.raises(ValueError, match="GeLUFunction"):
        wh.plan(small_bloom, batch, cluster=2)


# ---- losses that are no sum over samples
# ------------------------------------------------------------------------------


class ProductOfMeans(Net):
    """Two means over the batch, multiplied: the load-balancing loss of a mixture of experts."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.below(x))
        return (
            hidden.mean(0) * self.above(hidden).softmax(-1).mean(0)
        ).sum() + hidden.square().mean()


class Contrastive(Net):
    def forward(self, x: Tensor) -> Tensor:
        left = F.normalize(self.below(x), dim=-1)
        right = F.normalize(self.above(x), dim=-1)
        logits = left @ right.T
        return F.cross_entropy(logits, torch.arange(x.shape[0]))


class Centred(Net):
    """Batch statistics by hand in a method of the model; the loss itself is a plain mean."""

    def between(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


NOT_ADDITIVE = {
    "product": Case("product", ProductOfMeans, vectors),
    "contrastive": Case("contrastive", Contrastive, vectors),
    "centred": Case("centred", Centred, vectors),
}
MICRO_BATCHES = PlanCase("1 rank, 2 micro-batches", 1, {"num_micro_batch": 2})
DATA_PARALLEL = PlanCase("DP 2", 2)
LINES = {
    "product": line_of(ProductOfMeans.forward, "softmax"),
    "contrastive": line_of(Contrastive.forward, "left @ right"),
    "centred": line_of(Centred.between, "x.mean(0)"),
}


def train(prepared: None, name: str, plan: PlanCase, num_steps: int = 2) -> RankTrace:
    case = NOT_ADDITIVE[name]
    return train_on_rank(Subject(case, case.build(), None), plan, num_steps)


def train_locally(name: str, num_steps: int = 2) -> Trace:
    case = NOT_ADDITIVE[name]
    return local_training(case.build(), batches(case, False, num_steps), None, make_optimizer)


@pytest.mark.parametrize("name", NOT_ADDITIVE)
def test_loss_that_is_no_sum_is_refused_with_micro_batches(name: str) -> None:
    with pytest.raises(ValueError, match="not a sum over samples") as caught:
        train(None, name, MICRO_BATCHES)
    message = str(caught.value)
    assert LINES[name] in message
    assert '"num_micro_batch": 1' in message and '"loss_per_micro_batch": true' in message


@pytest.mark.parametrize("name", ["product", "centred"])
def test_batch_means_are_exact_on_two_devices_with_one_micro_batch(
    server: ModelServer, name: str
) -> None:
    """Means over the batch are shared between the devices inside the forward, and so are their
    gradients.
    """
    compare(
        train_locally(name),
        merge(server.run(train, 2, name, DATA_PARALLEL), NOT_ADDITIVE[name].build()),
    )


def all_pairs(output: Tensor, batch: Tensor) -> Tensor:
    similar = output @ output.T
    return similar.logsumexp(-1).mean()


class Encoder(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.above(torch.tanh(self.below(x)))


def test_the_line_of_a_loss_function_is_named() -> None:
    """With `loss=` the line is in the user's function, not in Whale."""
    with pytest.raises(ValueError, match="not a sum over samples") as caught:
        wh.plan(
            Encoder(),
            vectors(0, BATCH_SIZE).float(),
            loss=all_pairs,
            cluster=1,
            config={"num_micro_batch": 2},
        )
    assert line_of(all_pairs, "output @ output") in str(caught.value)


def test_contrastive_loss_is_refused_on_two_devices(server: ModelServer) -> None:
    """Its logits are batch x batch: no sum can be shared. One device with one micro-batch is
    what to try.
    """
    with pytest.raises(RankError) as caught:
        server.run(train, 2, "contrastive", DATA_PARALLEL)
    message = str(caught.value)
    assert (
        "not a sum over samples" in message
        and LINES["contrastive"] in message
        and '"loss_per_micro_batch": true' in message
    )
    # "num_micro_batch" is 1 here already, so that alone does not help
    assert "one device" in message


@pytest.mark.parametrize("name", NOT_ADDITIVE)
def test_any_loss_is_exact_on_one_device_with_one_micro_batch(name: str) -> None:
    compare(
        train_locally(name),
        merge([train(None, name, PlanCase("1 rank", 1))], NOT_ADDITIVE[name].build()),
    )


@pytest.mark.parametrize("name", ["product", "contrastive"])
def test_loss_per_micro_batch_is_the_mean_over_the_parts(name: str) -> None:
    """Accepted when asked for: what comes out is the mean of the losses of the parts, each weighted
    by its samples.
    """
    config = {"num_micro_batch": 2, "loss_per_micro_batch": True}
    case = NOT_ADDITIVE[name]
    reference = local_training(
        case.build(), batches(case, False, 2), None, make_optimizer, num_micro_batch=2
    )
    compare(
        reference, merge([train(None, name, PlanCase("per micro-batch", 1, config))], case.build())
    )


def test_loss_per_micro_batch_runs_on_two_devices(server: ModelServer) -> None:
    """Each device's share of a micro-batch is a part of its own: 4 parts of 3, 2, 3, 2 samples."""
    config = {"num_micro_batch": 2, "loss_per_micro_batch": True}
    case = NOT_ADDITIVE["contrastive"]
    got = merge(
        server.run(train, 2, "contrastive", PlanCase("per part", 2, config), 1), case.build()
    )
    model = case.build()
    batch = case.batch(0, BATCH_SIZE)
    parts = batch.split([3, 2, 3, 2])
    expected = sum(model(part).item() * len(part) / BATCH_SIZE for part in parts)
    assert got.losses[0] == pytest.approx(expected, rel=1e-10)


def test_loss_with_one_value_per_sample_says_so() -> None:
    class PerSample(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.above(self.below(x)).square().mean(-1)

    with pytest.raises(ValueError, match=r"scalar|one value for each sample"):
        wh.parallelize(PerSample(), vectors(0, BATCH_SIZE).float(), optimizer=make_optimizer)
