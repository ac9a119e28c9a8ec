"""Which optimizers may be given parts of parameters: found by trying them."""

from __future__ import annotations

import pytest
import torch

from whale.costs.optimizers import note_on_parts, works_by_element

OPTIM = torch.optim


@pytest.mark.parametrize(
    "make",
    [
        lambda p: OPTIM.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda p: OPTIM.AdamW(p, lr=0.1),
        lambda p: OPTIM.Adagrad(p),
        lambda p: OPTIM.RMSprop(p),
        lambda p: OPTIM.Adamax(p),
        lambda p: OPTIM.NAdam(p),
    ],
)
def test_optimizers_that_treat_every_number_alone(make) -> None:
    assert works_by_element(make, "w") is True and note_on_parts(make, "w") is None


class NormScaled(torch.optim.Optimizer):
    """Like LAMB: the step depends on the norm of the whole tensor."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {})

    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= 0.1 * parameter.grad / parameter.grad.norm()


@pytest.mark.parametrize("make", [lambda p: OPTIM.Adafactor(p), NormScaled])
def test_optimizers_that_look_at_whole_tensors_are_named(make) -> None:
    assert works_by_element(make, "w") is False
    note = note_on_parts(make, "head.weight")
    assert (
        note is not None
        and "looks at more than one number at a time" in note
        and "head.weight" in note
        and "AdamW" in note
    )
    assert note.startswith(("Adafactor", "NormScaled"))


def test_one_that_cannot_be_tried_is_left_alone() -> None:
    def make(parameters):
        raise RuntimeError("needs a GPU")

    assert works_by_element(make, "w") is None and note_on_parts(make, "w") is None
