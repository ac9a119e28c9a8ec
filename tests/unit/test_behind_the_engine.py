"""A script that goes on with its old loop beside the engine hears so."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import whale as wh

WARNING = "the model was called in training mode after wh.parallelize"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


def engine_of(model: nn.Module) -> wh.Engine:
    wh.init()
    return wh.parallelize(
        model, torch.randn(6, 4), optimizer=lambda pairs: torch.optim.SGD(pairs, lr=0.1)
    )


@pytest.mark.parametrize("whose", ["engine", "before", "behind"])
def test_an_optimizer_that_is_left_in_the_loop_is_refused(whose: str) -> None:
    """It updated the weights twice, without a word."""
    model = Net()
    old = torch.optim.AdamW(model.parameters())
    engine = engine_of(model)
    if whose != "before":
        old = engine.optimizer if whose == "engine" else torch.optim.AdamW(model.parameters())
    engine.step(torch.randn(6, 4))
    before = {name: each.clone() for name, each in engine.full_state_dict().items()}
    with pytest.raises(RuntimeError, match=r"a second time.*Try: leave it out"):
        old.step()
    for name, tensor in engine.full_state_dict().items():
        assert torch.equal(tensor, before[name])
    engine.step(torch.randn(6, 4))  # the engine still does


def test_other_models_are_trained_as_ever() -> None:
    engine_of(Net()).step(torch.randn(6, 4))
    other = Net()
    before = other.layer.weight.clone()
    other(torch.randn(6, 4)).backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert not torch.equal(other.layer.weight, before)


def test_a_model_that_is_trained_beside_the_engine_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Net()
    engine = engine_of(model)
    engine.step(torch.randn(6, 4))
    engine.step(torch.randn(3, 4))  # another batch size: Whale itself looks at the model again
    engine.evaluate(torch.randn(6, 4))
    with torch.no_grad():
        model(torch.randn(2, 4))
    copy.deepcopy(model).eval()(torch.randn(2, 4))
    assert WARNING not in caplog.text
    for _ in range(2):
        model(torch.randn(2, 4)).backward()
    assert caplog.text.count(WARNING) == 1


def test_such_a_model_is_still_pickled() -> None:
    model = Net()
    engine = engine_of(model)
    engine.step(torch.randn(6, 4))
    again = pickle.loads(pickle.dumps(model))
    x = torch.randn(2, 4)
    assert torch.equal(again.eval()(x), model.eval()(x))
