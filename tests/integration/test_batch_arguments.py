"""Elements of the batch and arguments of `forward`: which goes where, and what is said where it is
the wrong one.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale as wh
from tests.integration.programs import DOUBLE, WIDTH, rows, sgd
from tests.ranks import preload, run_ranks

preload("tests.integration.test_batch_arguments")


class Ungrateful(nn.Module):
    """Takes the labels and does nothing with them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3, dtype=DOUBLE)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.layer(x)


def of_labels(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output, batch["labels"])


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


class TakesMore(nn.Module):
    """An optional tensor, and a dict in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)

    def forward(self, weight: Tensor | None, x: Tensor, more: dict[str, Tensor]) -> Tensor:
        out = self.layer(x) * more["scale"] + more["shift"]
        return (out if weight is None else out * weight[:, None]).square().mean()


def test_keys_in_another_order_are_the_same_batch() -> None:
    """A tensor where the sample had None is another capture, whatever stands behind it."""
    torch.manual_seed(0)
    local = TakesMore()
    more = {"scale": rows(5, 1), "shift": rows(WIDTH)}
    batch = {"weight": None, "x": rows(5, WIDTH), "more": more}
    turned = {
        "more": dict(reversed(more.items())),
        "x": rows(5, WIDTH) + 1,
        "weight": None,
    }
    weighted = {"x": rows(5, WIDTH) - 1, "weight": rows(5), "more": more}
    wh.init(wh.Config({"num_micro_batch": 2}))
    engine = wh.parallelize(deepcopy(local), batch, optimizer=sgd)
    optimizer = sgd(local.parameters())
    for given in (batch, turned, weighted, turned):
        optimizer.zero_grad()
        loss = local(**given)
        loss.backward()
        optimizer.step()
        assert engine.step(given).loss == pytest.approx(loss.item(), rel=1e-12)
        assert engine.evaluate(given).loss == pytest.approx(local(**given).item(), rel=1e-12)
    assert engine.num_captures == 2
