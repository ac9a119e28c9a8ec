"""Programs that people write, each of which was once refused or crashed: they train like local."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from copy import deepcopy
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributions, nn

import whale as wh
from tests.exactness import Trace, compare, local_training
from tests.ranks import preload, run_ranks

preload("tests.integration.test_any_program")

WIDTH = 6
DOUBLE = torch.float64


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


class Layered(nn.Module):
    """A layer, something unusual, and a mean of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)

    def unusual(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.unusual(self.layer(x)).square().mean()


class Bag(nn.Module):
    def __init__(self, mode: str, padding: int | None = None) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(9, WIDTH, mode=mode, padding_idx=padding, dtype=DOUBLE)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.bag(tokens).square().mean()


class ListOfNumbers(Layered):
    def unusual(self, x: Tensor) -> Tensor:
        for factor in torch.arange(2, 5).tolist():
            x = x / factor
        return x


class SizesAsInts(Layered):
    def unusual(self, x: Tensor) -> Tensor:
        num_samples, length, width = (int(size) for size in x.shape)
        return x.reshape(num_samples * length, width).tanh().reshape(num_samples, length, width)


class CachedTable(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None, persistent=False)

    def unusual(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table) < x.shape[1]:
            table = torch.arange(x.shape[1], dtype=DOUBLE)[:, None] / 10
            self.register_buffer("table", table, persistent=False)
        return x + self.table[: x.shape[1]]


class EmptyTable(Layered):
    """A buffer that is not saved, empty until forward fills it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(0, dtype=DOUBLE), persistent=False)

    def unusual(self, x: Tensor) -> Tensor:
        if self.table.shape[0] < x.shape[1]:
            self.table = torch.arange(x.shape[1], dtype=DOUBLE)[:, None] / 10
        return x + self.table[: x.shape[1]]


class GrowingMemory(EmptyTable):
    """The same buffer, and every call adds to it."""

    def unusual(self, x: Tensor) -> Tensor:
        shifted = x + self.table.sum()
        self.table = torch.cat([self.table, torch.ones(1, dtype=DOUBLE)])
        return shifted


class Remembering(nn.Module):
    """Reads in a call what an earlier one has left: with the first samples and weights it gives the
    same loss again.
    """

    def __init__(self, keep: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)
        keep(self)

    def remembered(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) - self.remembered(x)).square().mean(-1).mean()


def as_empty_buffer(model: nn.Module) -> None:
    model.register_buffer("kept", torch.zeros(0, dtype=DOUBLE), persistent=False)


def as_missing_buffer(model: nn.Module) -> None:
    model.register_buffer("kept", None, persistent=False)


def as_attribute(model: nn.Module) -> None:
    model.kept = None


class RunningMean(Remembering):
    def remembered(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        is_first = self.kept is None or self.kept.numel() == 0
        self.kept = mean if is_first else 0.9 * self.kept + 0.1 * mean
        return self.kept


class FirstBatch(Remembering):
    def remembered(self, x: Tensor) -> Tensor:
        if self.kept is None or self.kept.numel() == 0:
            self.kept = x.detach().abs().amax(0)
        return self.kept


class FirstWeight(Remembering):
    def remembered(self, x: Tensor) -> Tensor:
        if self.kept is None or self.kept.numel() == 0:
            self.kept = self.layer.weight.detach().clone()
        return (self.layer.weight - self.kept).square().sum()


class BatchBefore(Remembering):
    def remembered(self, x: Tensor) -> Tensor:
        is_first = self.kept is None or self.kept.numel() == 0
        before = x.detach().mean() if is_first else self.kept.mean()
        self.kept = x.detach()
        return before


class FirstWeightInDict(Remembering):
    def __init__(self) -> None:
        super().__init__(lambda model: setattr(model, "kept", {"inner": {}}))

    def remembered(self, x: Tensor) -> Tensor:
        kept = self.kept["inner"]
        if "weight" not in kept:
            kept["weight"] = self.layer.weight.detach().clone()
        return (self.layer.weight - kept["weight"]).square().sum()


@functools.lru_cache
def positions(length: int) -> Tensor:
    return torch.arange(length, dtype=DOUBLE)[:, None] / 10


TABLES: dict[int, Tensor] = {}


class TablesKept(Layered):
    """Tables that forward makes in its first call and keeps in every place but a buffer."""

    of_class: ClassVar[dict[str, tuple[Tensor, ...]]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.own: dict[str, dict[int, Tensor]] = {"nested": {}}

    @functools.cached_property
    def scale(self) -> Tensor:
        return torch.full((WIDTH,), 0.5, dtype=DOUBLE)

    def unusual(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if not hasattr(self, "plain"):
            self.plain = torch.arange(WIDTH, dtype=DOUBLE)
        if length not in TABLES:
            TABLES[length] = torch.ones(length, 1, dtype=DOUBLE)
        if length not in self.own["nested"]:
            self.own["nested"][length] = torch.zeros(length, 1, dtype=DOUBLE)
        if "ones" not in self.of_class:
            self.of_class["ones"] = (torch.ones(WIDTH, dtype=DOUBLE),)
        kept = self.own["nested"][length] + TABLES[length] + self.of_class["ones"][0]
        return x * self.scale + self.plain + kept + positions(length)


class ComplexSlice(nn.Module):
    """A Fourier layer that keeps the lowest frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)
        self.filter = nn.Parameter(torch.randn(2, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.layer(x))
        kept = torch.zeros_like(spectrum)
        kept[:, :2] = spectrum[:, :2] * self.filter
        kept[:, -1] = spectrum[:, -1].conj()
        return torch.fft.irfft(kept, n=WIDTH).square().mean()


class MaskedEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True, dtype=DOUBLE)
        self.encoder = nn.TransformerEncoder(layer, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(3, dtype=DOUBLE)
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x, mask=self.mask)[..., 0].square().mean()


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Transformer(WIDTH, 2, 1, 1, 8, 0.0, batch_first=True, dtype=DOUBLE)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=DOUBLE)
        return self.both(source, target, tgt_mask=mask)[..., 0].square().mean()


class ManySamples(Layered):
    """Takes another path for a large batch; a micro-batch takes that of its mini-batch."""

    def unusual(self, x: Tensor) -> Tensor:
        if x.shape[0] >= 8:
            x = x.contiguous() * 2
        return x


class ManyRows(Layered):
    """The same for three rows of each sample: the branch is at no whole number of samples."""

    def unusual(self, x: Tensor) -> Tensor:
        rows = x[:, None].expand(-1, 3, -1).flatten(0, 1)
        rows = rows * 2 if rows.shape[0] < 25 else rows * 3
        return rows.unflatten(0, (-1, 3)).sum(1)


class Distances(nn.Module):
    """`cdist` computes by products from 26 rows on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)
        self.centres = nn.Parameter(torch.randn(5, WIDTH, dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(self.layer(x), self.centres).mean()


class Halves(Layered):
    """Two views of each sample as one batch, taken apart again."""

    def unusual(self, x: Tensor) -> Tensor:
        first, second = torch.cat([x, x.tanh()]).chunk(2)
        return first - second


class SizeInLoss(Layered):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean() * (2.0 if x.shape[0] > 4 else 1.0)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return -ctx.scale * gradient * x.cos(), None


class TwoResults(torch.autograd.Function):
    """The newer form, with a context of its own, two inputs and two results."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.sign(), x * y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return first.clamp(-1, 1) + second * y, second * x


class WithFunction(Layered):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.last = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)

    def unusual(self, x: Tensor) -> Tensor:
        return self.last(self.function(x))


def through(x: Tensor) -> Tensor:
    return StraightThrough.apply(x)


def reversed_gradient(x: Tensor) -> Tensor:
    return Reversed.apply(x, 0.5)


def two_results(x: Tensor) -> Tensor:
    first, second = TwoResults.apply(x, x.tanh())
    return first + second


class Quantised(nn.Module):
    """Vectors replaced by the nearest of a codebook, straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)
        self.codes = nn.Embedding(7, WIDTH, dtype=DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x)
        nearest = self.codes(torch.cdist(found, self.codes.weight).argmin(-1))
        passed = found + (nearest - found).detach()
        return passed.square().mean() + F.mse_loss(nearest, found.detach())


class Speech(nn.Module):
    """Frames to labels by CTC, with the lengths of padded samples in the batch."""

    def __init__(self, reduction: str, zero_infinity: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 5, dtype=DOUBLE)
        self.loss = nn.CTCLoss(reduction=reduction, zero_infinity=zero_infinity)

    def forward(self, frames: Tensor, labels: Tensor, lengths: Tensor, sizes: Tensor) -> Tensor:
        log_probs = self.layer(frames).log_softmax(-1).transpose(0, 1)
        loss: Tensor = self.loss(log_probs, labels, lengths, sizes)
        return loss


def speech() -> tuple[Tensor, ...]:
    lengths = torch.randint(4, 7, (8,))
    lengths[0] = 1  # too short for two labels: an infinite loss
    sizes = torch.randint(2, 4, (8,))
    return rows(8, 6, WIDTH), torch.randint(1, 5, (8, 3)), lengths, sizes


def long_speech() -> tuple[Tensor, ...]:
    frames, labels, lengths, sizes = speech()
    return frames, labels, lengths.clamp(min=6), sizes


class Uncertain(Layered):
    """Predicts a mean and a variance."""

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x)
        return F.gaussian_nll_loss(found, x, found.exp() / 2)


class Balanced(nn.Module):
    """Classes weigh by how often they occur in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 5, dtype=DOUBLE)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        weight = 1 / (1 + torch.bincount(labels, minlength=5).to(DOUBLE))
        weight = weight + labels.bincount(x[:, 0].square(), 5)
        return F.cross_entropy(self.layer(x), labels, weight=weight)


class Spectral(nn.Module):
    """Filters sounds by their spectrum over time, and makes sounds of them again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64, dtype=DOUBLE)
        self.filter = nn.Parameter(torch.rand(9, 1, dtype=DOUBLE))
        self.register_buffer("window", torch.hann_window(16, dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        shape: dict[str, Any] = {"n_fft": 16, "hop_length": 4, "window": self.window}
        spectrum = torch.stft(self.layer(x), **shape, return_complex=True)
        sound = torch.istft(spectrum * self.filter, **shape, length=60)
        return (sound - (2 * spectrum).istft(**shape)[:, :60]).square().mean()


class QuantisationAware(nn.Module):
    """Weights and activations are rounded as they will be where the model is used."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 4, dtype=DOUBLE)
        self.register_buffer("scale", torch.tensor([0.02, 0.05, 0.01, 0.03]))
        self.register_buffer("zero_point", torch.zeros(4, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.fake_quantize_per_channel_affine(
            self.layer.weight, self.scale, self.zero_point, 0, -8, 7
        )
        hidden = F.linear(x, weight, self.layer.bias)
        return torch.fake_quantize_per_tensor_affine(hidden, 0.05, 3, 0, 15).square().mean()


class MaskToken(nn.Module):
    """Masked places get one learned vector, places that are fixed another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)
        self.token = nn.Parameter(torch.ones(WIDTH, dtype=DOUBLE))
        self.first = nn.Parameter(torch.ones(1, WIDTH, dtype=DOUBLE))
        self.register_buffer("is_first", torch.tensor([True, False, False]))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = self.layer(x) * 2
        other_strides = mask.T.contiguous().T
        hidden[other_strides] = self.token * 2
        hidden[:, self.is_first] = self.first
        return self.layer(hidden.view(-1, WIDTH)).square().mean()


class WithDistributions(nn.Module):
    """Distributions look at all values that they are given, unless they are told not to."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Linear(WIDTH, 3, dtype=DOUBLE)
        self.latent = nn.Linear(WIDTH, 4, dtype=DOUBLE)

    def forward(self, x: Tensor, action: Tensor) -> Tensor:
        choice = distributions.Categorical(logits=self.policy(x))
        mean, scale = self.latent(x).chunk(2, -1)
        posterior = distributions.Normal(mean, scale.exp())
        prior = distributions.Normal(0.0, torch.ones(2, dtype=DOUBLE))
        divergence = distributions.kl_divergence(posterior, prior).sum(-1)
        return (divergence - choice.log_prob(action) - choice.entropy()).mean()


class TwoViews(nn.Module):
    """Two inputs joined before anything says that they have the same number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        both = F.normalize(self.layer(torch.cat([one, other])), dim=-1)
        num_samples = one.shape[0]
        itself = torch.eye(2 * num_samples, dtype=torch.bool)
        scores = (both @ both.T).masked_fill(itself, -1e9)
        place = torch.arange(num_samples)
        return F.cross_entropy(scores, torch.cat([place + num_samples, place]))


class Ungrateful(nn.Module):
    """Takes the labels and does nothing with them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3, dtype=DOUBLE)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.layer(x)


def of_labels(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output, batch["labels"])


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE)


def tokens() -> Tensor:
    return torch.randint(0, 9, (8, 4))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "bag, mean": (lambda: Bag("mean"), tokens),
    "bag, sum": (lambda: Bag("sum"), tokens),
    "bag, max": (lambda: Bag("max"), tokens),
    "bag, mean without padding": (lambda: Bag("mean", padding=2), tokens),
    "arange as a list": (ListOfNumbers, lambda: rows(8, WIDTH)),
    "int of sizes": (SizesAsInts, lambda: rows(8, 3, WIDTH)),
    "buffer made in forward": (CachedTable, lambda: rows(8, 3, WIDTH)),
    "empty buffer filled in forward": (EmptyTable, lambda: rows(8, 3, WIDTH)),
    "complex values written to a slice": (ComplexSlice, lambda: rows(8, WIDTH)),
    "encoder with a mask": (MaskedEncoder, lambda: rows(8, 3, WIDTH)),
    "transformer with a mask": (Translator, lambda: (rows(8, 2, WIDTH), rows(8, 3, WIDTH))),
    "branch on the batch size": (ManySamples, lambda: rows(10, WIDTH)),
    "branch that a small batch does not take": (ManySamples, lambda: rows(6, WIDTH)),
    "halves of a joined batch": (Halves, lambda: rows(8, WIDTH)),
    "batch size in the loss": (SizeInLoss, lambda: rows(6, WIDTH)),
    "cdist of many rows": (Distances, lambda: rows(32, WIDTH)),
    "straight-through Function": (lambda: WithFunction(through), lambda: rows(8, WIDTH)),
    "gradient reversal": (lambda: WithFunction(reversed_gradient), lambda: rows(8, WIDTH)),
    "Function with two results": (lambda: WithFunction(two_results), lambda: rows(8, WIDTH)),
    "recurrent layers": (lambda: Recurrent(), lambda: rows(8, 40, WIDTH)),
    "vector-quantised": (Quantised, lambda: rows(8, WIDTH)),
    "a vector written to masked places": (
        MaskToken,
        lambda: (rows(8, 3, WIDTH), torch.rand(8, 3) < 0.5),
    ),
    "distributions": (WithDistributions, lambda: (rows(8, WIDTH), torch.randint(0, 3, (8,)))),
    "CTC loss, mean": (lambda: Speech("mean"), long_speech),
    "CTC loss, sum without infinities": (lambda: Speech("sum", zero_infinity=True), speech),
    "number of each class": (Balanced, lambda: (rows(8, WIDTH), torch.randint(0, 5, (8,)))),
    "Gaussian loss with a variance": (Uncertain, lambda: rows(8, WIDTH)),
    "rounded weights and activations": (QuantisationAware, lambda: rows(8, WIDTH)),
    "spectrum and back": (Spectral, lambda: rows(8, 64)),
}


WHOLE_BATCH = ("number of each class",)
"""cases whose loss is no sum over parts of the batch"""


@pytest.mark.parametrize("name", CASES)
def test_trains_like_local(name: str) -> None:
    build, batch = CASES[name]
    torch.manual_seed(0)
    model = build()
    data = [batch(), batch()]
    reference = local_training(deepcopy(model), data, None, sgd)
    reference.buffers = None
    wh.init(wh.Config({"num_micro_batch": 1 if name in WHOLE_BATCH else 2}))
    engine = wh.parallelize(model, data[0], optimizer=sgd)
    losses = [engine.step(data[0]).loss]
    gradients = engine.full_gradients()
    losses.append(engine.step(data[1]).loss)
    weights = engine.full_state_dict()
    compare(reference, Trace(losses, gradients, {key: weights[key] for key in reference.weights}))


def test_two_views_are_compared_in_one_place() -> None:
    torch.manual_seed(0)
    model = TwoViews()
    data = [(rows(number, WIDTH), rows(number, WIDTH)) for number in (4, 6)]
    reference = local_training(deepcopy(model), data, None, sgd)
    wh.init(wh.Config({"num_micro_batch": 1}))
    engine = wh.parallelize(model, data[0], optimizer=sgd)
    assert [engine.step(batch).loss for batch in data] == pytest.approx(reference.losses, rel=1e-12)
    assert engine.num_captures == 1


EINX: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "subtract": lambda einx, x: einx.subtract("b i, b j -> b i j", x, x).sum(-1),
    "rearrange": lambda einx, x: einx.rearrange("b (g k) -> b (k g)", x, k=2),
    "sum": lambda einx, x: x + einx.sum("b (g [k])", x, k=2)[:, :1],
    "merged with the samples": lambda einx, x: einx.rearrange(
        "(b g) k -> b (g k)", einx.rearrange("b (g k) -> (b g) k", x, k=2).tanh(), g=WIDTH // 2
    ),
    "where": lambda einx, x: einx.where("b, b i, -> b i", x[:, 0] > 0, x, 0.0),
    "softmax": lambda einx, x: einx.softmax("b [i]", x),
}


class WithEinx(Layered):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def unusual(self, x: Tensor) -> Tensor:
        return EINX[self.name](importlib.import_module("einx"), x)


@pytest.mark.slow
@pytest.mark.parametrize("name", EINX)
def test_einx_which_hashes_sizes(name: str) -> None:
    pytest.importorskip("einx", reason="make setup-integrations")
    torch.manual_seed(0)
    model = WithEinx(name)
    data = [rows(number, WIDTH) for number in (8, 6)]
    reference = local_training(deepcopy(model), data, None, sgd)
    wh.init(wh.Config({"num_micro_batch": 2}))
    engine = wh.parallelize(model, data[0], optimizer=sgd)
    losses = [engine.step(batch).loss for batch in data]
    assert losses == pytest.approx(reference.losses, rel=1e-12)
    assert engine.num_captures == 1


def test_tables_that_forward_keeps_are_not_those_of_the_capture() -> None:
    """Fake tensors of the export stayed in caches, and the model itself met them."""
    torch.manual_seed(0)
    model = TablesKept()
    data = [rows(8, 3, WIDTH), rows(8, 3, WIDTH)]
    before = deepcopy(model)
    wh.init(wh.Config({"num_micro_batch": 2}))
    engine = wh.parallelize(model, data[0], optimizer=sgd)
    losses = [engine.step(batch).loss for batch in data]
    evaluated = engine.evaluate(data[0]).loss  # a capture of its own
    reference = local_training(before, data, None, sgd)
    assert losses == pytest.approx(reference.losses, rel=1e-12)
    assert evaluated == pytest.approx(before(data[0]).item(), rel=1e-12)


def packed(x: Tensor) -> Tensor:
    lengths = (x[..., 0] > -9).sum(1)
    rows = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    output: Tensor = nn.GRU(WIDTH, 2, batch_first=True, dtype=DOUBLE)(rows)[1]
    return output


class GradientInside(Layered):
    """An energy and its gradient, through which the loss goes back to the weights."""

    def unusual(self, x: Tensor) -> Tensor:
        place = x.detach().requires_grad_()
        energy = self.layer(place).square().sum()
        return x + torch.autograd.grad(energy, place, create_graph=True)[0]


def with_function(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: WithFunction(function)


class ByNumber(torch.autograd.Function):
    """Its backward looks at the number of samples: in parts it is another one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * gradient.shape[0]


def by_number(x: Tensor) -> Tensor:
    return ByNumber.apply(x)


def by_count(x: Tensor) -> Tensor:
    return x * torch.bincount((x[:, 0, 0] > 0).long())[:, None]


def by_position(x: Tensor) -> Tensor:
    return x * torch.linspace(0, 1, x.size(0), dtype=DOUBLE)[:, None, None]


class Averaged(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, momentum=None, dtype=DOUBLE)

    def unusual(self, x: Tensor) -> Tensor:
        output: Tensor = self.norm(x)
        return output


TRANSFORM = r"`torch\.func` transform"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "packed sequence": (with_function(packed), "the padded batch"),
    "gradient inside": (GradientInside, r"torch\.autograd\.grad"),
    "torch.func.grad": (with_function(torch.func.grad(lambda x: x.square().sum())), TRANSFORM),
    "backward that counts samples": (
        with_function(by_number),
        "looks at other samples or at their",
    ),
    "batch norm that averages all batches": (Averaged, "give the batch norm a momentum"),
    "number of each class": (with_function(by_count), r"minlength=num_classes"),
    "linspace over the samples": (with_function(by_position), r"torch\.arange\(n\)"),
    "vmap": (with_function(torch.func.vmap(lambda x: x * x.sum())), TRANSFORM),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_graph_can_hold_is_named(name: str) -> None:
    wh.init(wh.Config())
    build, words = REFUSED[name]
    with pytest.raises(ValueError, match=words) as caught:
        wh.parallelize(build(), rows(8, 3, WIDTH), optimizer=sgd)
    assert " at 0x" not in str(caught.value)


def test_a_memory_that_grows_from_call_to_call_is_refused() -> None:
    wh.init(wh.Config())
    with pytest.raises(ValueError, match="buffer of another form `table`"):
        wh.parallelize(GrowingMemory(), rows(8, 3, WIDTH), optimizer=sgd)


@pytest.mark.parametrize(
    "build",
    [
        lambda: RunningMean(as_empty_buffer),
        lambda: RunningMean(as_missing_buffer),
        lambda: RunningMean(as_attribute),
        lambda: FirstBatch(as_empty_buffer),
        lambda: FirstWeight(as_empty_buffer),
        lambda: FirstWeight(as_attribute),
        lambda: BatchBefore(as_empty_buffer),
        FirstWeightInDict,
    ],
)
def test_a_memory_of_samples_or_weights_is_refused(build: Callable[[], nn.Module]) -> None:
    wh.init(wh.Config())
    with pytest.raises(ValueError, match=r"`kept`.* update"):
        wh.parallelize(build(), rows(8, WIDTH), optimizer=sgd)


@pytest.mark.parametrize("build", [ManySamples, ManyRows])
def test_a_branch_is_that_of_the_whole_mini_batch(build: Callable[[], nn.Module]) -> None:
    """Batches on both sides of the branch, in micro-batches that are all on one side of it."""
    torch.manual_seed(0)
    model = build()
    data = [rows(number, WIDTH) for number in (10, 6, 12, 4)]
    reference = local_training(deepcopy(model), data, None, sgd).losses
    wh.init(wh.Config({"num_micro_batch": 2}))
    engine = wh.parallelize(model, data[0], optimizer=sgd)
    assert [engine.step(batch).loss for batch in data] == pytest.approx(reference, rel=1e-12)
    assert engine.num_captures == 2


def test_labels_that_forward_swallows_reach_the_loss() -> None:
    torch.manual_seed(0)
    model = Ungrateful()
    batch = {"x": rows(8, WIDTH), "labels": torch.randint(0, 3, (8,))}
    expected = of_labels(model(**batch), batch).item()
    wh.init(wh.Config({"num_micro_batch": 2}))
    engine = wh.parallelize(model, batch, optimizer=sgd, loss=of_labels)
    assert engine.step(batch).loss == pytest.approx(expected, rel=1e-12)


class TakesMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)

    def forward(self, source: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask:
            source = source * mask
        return self.layer(source)


def test_says_which_element_went_to_which_argument() -> None:
    wh.init(wh.Config())
    batch = (rows(8, WIDTH), rows(8, WIDTH))
    with pytest.raises(ValueError, match=r"\[0\] went to `source`, \[1\] went to `mask`"):
        wh.parallelize(
            TakesMask(),
            batch,
            optimizer=sgd,
            loss=lambda output, given: F.mse_loss(output, given[1]),
        )


NO_WORD_OF_NAMES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "masked entries": (lambda x, y: F.mse_loss(x[y > 0], y[y > 0]), "Python needs a length"),
    "value": (lambda x, y: x.mean() if y.sum() > 0 else y.mean(), "Python needs the value"),
    "numpy": (lambda x, y: x.mean() * float(y.numpy().sum()), "read outside torch"),
    "not written yet": (lambda x, y: nn.Module()(x), "NotImplementedError"),
    "not additive": (lambda x, y: (x - y).mean().exp(), "not a sum over samples"),
}


class OfTwo(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(self.layer(x), y)


@pytest.mark.parametrize("name", NO_WORD_OF_NAMES)
def test_does_not_speak_of_names_where_no_argument_is_wrong(name: str) -> None:
    function, words = NO_WORD_OF_NAMES[name]
    wh.init(wh.Config({"num_micro_batch": 2}))
    with pytest.raises(ValueError, match=words) as caught:
        wh.parallelize(OfTwo(function), (rows(8, WIDTH), rows(8, WIDTH)), optimizer=sgd)
    assert "The batch has no names" not in str(caught.value)


def test_shapes_that_do_not_fit_may_be_the_wrong_argument() -> None:
    wh.init(wh.Config())
    with pytest.raises(ValueError, match=r"\[0\] went to `x`, \[1\] went to `y`"):
        wh.parallelize(OfTwo(torch.matmul), (rows(8, WIDTH), rows(8, 5)), optimizer=sgd)


# ---- on several ranks


def train_column() -> float:
    torch.manual_seed(0)
    model = nn.Linear(1, 1, dtype=DOUBLE)
    column = torch.arange(4, dtype=DOUBLE).view(1, 4).t().contiguous()
    wh.init(wh.Config())
    engine = wh.parallelize(model, column, optimizer=sgd, loss=lambda output, x: output.mean())
    return engine.step(column).loss


def test_a_column_that_was_a_row() -> None:
    torch.manual_seed(0)
    expected = nn.Linear(1, 1, dtype=DOUBLE)(torch.arange(4, dtype=DOUBLE)[:, None]).mean().item()
    assert run_ranks(train_column, 2)[0] == pytest.approx(expected, rel=1e-12)


class GoesThroughSet(nn.Module):
    """Computes its parts in an order that each process has for itself, as strings of a set do."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order
        self.parts = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH, dtype=DOUBLE) for name in "abc"})

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = {name: self.parts[name](x).tanh() for name in self.order}
        joined = found["a"] * found["b"] + found["c"]
        return (joined * (y > 0)).square().sum() / (y > 0).sum() + joined.mean()


def train_set(config: dict[str, Any]) -> list[float]:
    torch.manual_seed(0)
    wh.init(wh.Config(config))
    model = GoesThroughSet("abc" if wh.rank() == 0 else "cab")
    data = [(rows(6, WIDTH), rows(6, WIDTH)) for _ in range(3)]
    engine = wh.parallelize(model, data[0], optimizer=sgd)
    return [engine.step(batch).loss for batch in data]


@pytest.mark.parametrize("config", [{}, {"num_task_graph": 2, "num_micro_batch": 2}])
def test_code_that_goes_through_a_set_trains_on_all_ranks(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = GoesThroughSet("abc")
    data = [(rows(6, WIDTH), rows(6, WIDTH)) for _ in range(3)]
    expected = local_training(model, data, None, sgd).losses
    for losses in run_ranks(train_set, 2, config):
        assert losses == pytest.approx(expected, rel=1e-12)


class Recurrent(nn.Module):
    """Long sequences through recurrent layers, of which the graph has one operation each."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, 4, 2, batch_first=True, dtype=DOUBLE)
        self.lstm = nn.LSTM(4, 5, bidirectional=True, proj_size=3, batch_first=True, dtype=DOUBLE)
        self.rnn = nn.RNN(6, 2, batch_first=True, dtype=DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        out, last = self.rnn(self.lstm(self.gru(x)[0])[0])
        return out.square().mean() + last.mean()


class Carried(nn.Module):
    """A recurrent model whose state goes on from batch to batch, samples first."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True, dtype=DOUBLE)
        self.head = nn.Linear(WIDTH, 1, dtype=DOUBLE)

    def forward(self, x: Tensor, state: Tensor) -> dict[str, Tensor]:
        out, last = self.cell(x, state.transpose(0, 1).contiguous())
        return {"loss": self.head(out).square().mean(), "state": last.transpose(0, 1)}


def carried_batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(6, 4, WIDTH, dtype=DOUBLE, generator=generator) for _ in range(4)]


def train_carried(config: dict[str, Any]) -> tuple[list[float], Tensor]:
    torch.manual_seed(0)
    state = torch.zeros(6, 1, WIDTH, dtype=DOUBLE)
    data = carried_batches()
    wh.init(wh.Config(config))
    engine = wh.parallelize(Carried(), {"x": data[0], "state": state}, optimizer=sgd)
    losses = []
    for x in data:
        result = engine.step({"x": x, "state": state}, outputs=True)
        state = result.outputs["state"]
        losses.append(result.loss)
    return losses, state


@pytest.mark.parametrize(
    ("num_ranks", "config"), [(1, {"num_micro_batch": 2}), (2, {}), (2, {"num_task_graph": 2})]
)
def test_a_state_is_carried_from_batch_to_batch(num_ranks: int, config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Carried()
    optimizer = sgd(model.parameters())
    state = torch.zeros(6, 1, WIDTH, dtype=DOUBLE)
    expected = []
    for x in carried_batches():
        optimizer.zero_grad()
        output = model(x, state)
        output["loss"].backward()
        optimizer.step()
        state = output["state"].detach()
        expected.append(output["loss"].item())
    for losses, last in run_ranks(train_carried, num_ranks, config):
        assert losses == pytest.approx(expected, rel=1e-10)
        assert torch.allclose(last, state, rtol=0, atol=1e-12), "every rank has the state"


class AveragedWeight(nn.Module):
    """A moving average of a weight; `reads`: which of its values are read where."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.reads = reads
        self.first = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)
        self.middle = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)
        self.last = nn.Linear(WIDTH, 5, dtype=DOUBLE)
        self.register_buffer("mean", torch.ones(WIDTH, dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        old = self.mean
        self.mean = 0.9 * self.mean + 0.1 * self.first.weight.detach().mean(0)
        hidden = self.first(x) + (self.mean if self.reads == "new" else old)
        out = self.last(torch.tanh(self.middle(torch.tanh(hidden))))
        if self.reads == "old in both parts":
            out = out * old[0]
        return out.square().mean()


READS = ("new", "old", "old in both parts")


def train_averages(config: dict[str, Any]) -> list[tuple[list[float], dict[str, Tensor]]]:
    found = []
    for reads in READS:
        torch.manual_seed(0)
        model = AveragedWeight(reads)
        data = [rows(6, WIDTH) for _ in range(3)]
        wh.init(wh.Config(config))
        engine = wh.parallelize(model, data[0], optimizer=sgd)
        found.append(([engine.step(batch).loss for batch in data], engine.full_state_dict()))
    return found


def test_a_buffer_is_read_where_it_is_updated() -> None:
    """Stages that did not update it kept its first value, without a word."""
    config = {"num_task_graph": 2, "num_micro_batch": 2}
    trained, _ = run_ranks(train_averages, 2, config)
    for reads, (losses, state) in zip(READS, trained, strict=True):
        torch.manual_seed(0)
        model = AveragedWeight(reads)
        data = [rows(6, WIDTH) for _ in range(3)]
        expected = local_training(model, data, None, sgd, num_micro_batch=2)
        assert losses == pytest.approx(expected.losses, rel=1e-10), reads
        torch.testing.assert_close(state["mean"], model.mean, rtol=1e-12, atol=0)


class ReadTwice(nn.Module):
    """Both parts use the old value of a buffer itself, each with samples of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with wh.replicate(1):
            hidden = self.first(x) + self.mean
        with wh.replicate(1):
            out = self.last(hidden) * self.mean
        self.mean = 0.9 * self.mean + 0.1 * self.first.weight.detach().mean(0)
        return out.square().mean()


def test_a_buffer_that_two_stages_read_is_refused() -> None:
    with pytest.raises(ValueError, match=r"buffer mean gets its new value on stage ., and stage"):
        wh.plan(ReadTwice(), torch.randn(4, WIDTH), cluster=2)
    wh.plan(ReadTwice(), torch.randn(4, WIDTH), cluster=1)


# ---- gradients that hold only the rows that were looked up


class SparseRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, WIDTH, sparse=True, dtype=DOUBLE)
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.rows(x)).square().mean()


def _sparse_rows(is_split: bool) -> Trace:
    torch.manual_seed(0)
    model = SparseRows()
    wh.init(wh.Config({"num_micro_batch": 2}))
    if is_split:
        wh.annotate(model, {"*": wh.split(2)})
    data = sparse_data()
    engine = wh.parallelize(model, data[0], optimizer=sgd)
    losses = [engine.step(data[0]).loss]
    gradients = engine.full_gradients()
    losses.append(engine.step(data[1]).loss)
    return Trace(losses, gradients, engine.full_state_dict())


def sparse_data() -> list[Tensor]:
    return list(torch.randint(0, 8, (2, 8, 4), generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("is_split", [False, True])
def test_sparse_gradients_train_like_local(is_split: bool) -> None:
    torch.manual_seed(0)
    reference = local_training(SparseRows(), sparse_data(), None, sgd)
    for name, gradient in reference.gradients.items():
        reference.gradients[name] = gradient.to_dense() if gradient.is_sparse else gradient
    trace = run_ranks(_sparse_rows, 2, is_split, timeout_s=120)[0]
    for name, gradient in trace.gradients.items():
        trace.gradients[name] = gradient.to_dense() if gradient.is_sparse else gradient
    compare(reference, trace)
