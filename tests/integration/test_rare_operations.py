"""Layers, losses and operations that few models use, each once refused or wrong: they train like
local.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributions, nn

import whale as wh
from tests.integration.programs import DOUBLE, WIDTH, Cases, Layered, rows, trains_like_local


class Bag(nn.Module):
    def __init__(self, mode: str, padding: int | None = None) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(9, WIDTH, mode=mode, padding_idx=padding, dtype=DOUBLE)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.bag(tokens).square().mean()


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


class Distances(nn.Module):
    """`cdist` computes by products from 26 rows on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)
        self.centres = nn.Parameter(torch.randn(5, WIDTH, dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(self.layer(x), self.centres).mean()


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


class Tagger(nn.Module):
    """The log-likelihood of tags in a chain, for each token that a mask keeps; the mask takes its
    dtype from the scores.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 4, dtype=DOUBLE)
        self.follow = nn.Parameter(torch.randn(4, 4, dtype=DOUBLE))

    def forward(self, x: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        scores = self.layer(x).transpose(0, 1)
        tags, mask = tags.t(), mask.t()
        samples = torch.arange(tags.shape[1])
        score = scores[0, samples, tags[0]]
        total = scores[0]
        for step in range(1, len(tags)):
            score += self.follow[tags[step - 1], tags[step]] * mask[step]
            score += scores[step, samples, tags[step]] * mask[step]
            following = torch.logsumexp(total[..., None] + self.follow + scores[step][:, None], 1)
            total = torch.where(mask[step][:, None], following, total)
        found = total.logsumexp(1) - score
        return found.sum() / mask.type_as(scores).sum()


class MaskedImage(Layered):
    """The error of the elements that a mask of the samples keeps, in the shape of the result."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        found = self.layer(x)
        kept = mask[:, None, None].expand_as(found).to(DOUBLE)
        return ((found - x).square() * kept).sum() / kept.sum()


class Ranked(nn.Module):
    """A loss of pairs, and the norms of their vectors for each sample of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(9, WIDTH, dtype=DOUBLE)
        self.items = nn.Embedding(9, WIDTH, dtype=DOUBLE)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        user, item = self.users(users), self.items(items)
        loss = F.softplus(-(user * item).sum(1)).mean()
        norms = user.norm(2).pow(2) + item.norm(2).pow(2)
        return loss + 0.1 * norms / float(len(users)) + user.sum() / float(users.shape[0])


class Normed(Layered):
    """Norms of the whole batch: one that divides, and the square of one as a number."""

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x)
        squared = torch.norm(found - 1, p=2).pow(2).detach()
        return (found / found.norm()).sum() * squared + torch.norm(found.relu() - found.relu())


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


class TopRows(Layered):
    """The rows with the largest first entries, in their order, and one entry of each."""

    def unusual(self, x: Tensor) -> Tensor:
        order = x[..., 0].argsort(1, descending=True)
        top = x.take_along_dim(order[:, :2, None], 1)
        one = torch.take_along_dim(x, order[:, None, :1], dim=-1)
        return top.flatten(1) * one.sum(1)


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


def tokens() -> Tensor:
    return torch.randint(0, 9, (8, 4))


CASES: Cases = {
    "bag, mean": (lambda: Bag("mean"), tokens),
    "bag, sum": (lambda: Bag("sum"), tokens),
    "bag, max": (lambda: Bag("max"), tokens),
    "bag, mean without padding": (lambda: Bag("mean", padding=2), tokens),
    "complex values written to a slice": (ComplexSlice, lambda: rows(8, WIDTH)),
    "encoder with a mask": (MaskedEncoder, lambda: rows(8, 3, WIDTH)),
    "transformer with a mask": (Translator, lambda: (rows(8, 2, WIDTH), rows(8, 3, WIDTH))),
    "cdist of many rows": (Distances, lambda: rows(32, WIDTH)),
    "recurrent layers": (lambda: Recurrent(), lambda: rows(8, 40, WIDTH)),
    "vector-quantised": (Quantised, lambda: rows(8, WIDTH)),
    "a vector written to masked places": (
        MaskToken,
        lambda: (rows(8, 3, WIDTH), torch.rand(8, 3) < 0.5),
    ),
    "rows picked along a dim": (TopRows, lambda: rows(8, 3, WIDTH)),
    "distributions": (WithDistributions, lambda: (rows(8, WIDTH), torch.randint(0, 3, (8,)))),
    "CTC loss, mean": (lambda: Speech("mean"), long_speech),
    "CTC loss, sum without infinities": (lambda: Speech("sum", zero_infinity=True), speech),
    "number of each class": (Balanced, lambda: (rows(8, WIDTH), torch.randint(0, 5, (8,)))),
    "chain of tags": (
        Tagger,
        lambda: (rows(8, 5, WIDTH), torch.randint(0, 4, (8, 5)), torch.rand(8, 5) < 0.7),
    ),
    "mask in the shape of the result": (
        MaskedImage,
        lambda: (rows(8, 3, WIDTH), torch.arange(8) % 3 > 0),
    ),
    "norms divided by the number of samples": (
        Ranked,
        lambda: (torch.randint(0, 9, (8,)), torch.randint(0, 9, (8,))),
    ),
    "norms of the whole batch": (Normed, lambda: rows(8, WIDTH)),
    "Gaussian loss with a variance": (Uncertain, lambda: rows(8, WIDTH)),
    "rounded weights and activations": (QuantisationAware, lambda: rows(8, WIDTH)),
    "spectrum and back": (Spectral, lambda: rows(8, 64)),
}
WHOLE_BATCH = ("number of each class", "norms of the whole batch")
"""cases whose loss is no sum over parts of the batch"""


@pytest.mark.parametrize("name", CASES)
def test_trains_like_local(name: str) -> None:
    trains_like_local(*CASES[name], num_micro_batch=1 if name in WHOLE_BATCH else 2)


def test_norms_of_the_whole_batch_are_all_reduced() -> None:
    """Data parallelism without micro-batches sums them in the forward, and is not refused."""
    annotated = wh.annotate(Normed(), {"*": wh.replicate(2)})
    plan = wh.plan(annotated, rows(8, WIDTH), cluster=2, config={"num_micro_batch": 1})
    assert plan.num_devices == 2
