"""An optimizer step in pieces changes the same bits as a whole one, and is not tried where it could
not.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import whale as wh
from whale.config import Config
from whale.costs.optimizer_factory import BY_PARAMETER
from whale.runtime.held import HeldParameter
from whale.runtime.stage_updates import StageUpdates

SETTINGS = {
    torch.optim.SGD: {"momentum": 0.9, "weight_decay": 0.1},
    torch.optim.AdamW: {"amsgrad": True},
}


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(3, place + 2, generator=generator)) for place in range(5)]


def optimizer_of(
    kind: type[torch.optim.Optimizer], params: list[nn.Parameter]
) -> torch.optim.Optimizer:
    return kind(
        [{"params": params[:2], "lr": 0.02}, {"params": params[2:]}],
        lr=0.05,
        **SETTINGS.get(kind, {}),
    )  # type: ignore[call-arg, arg-type]


@pytest.mark.parametrize(
    "kind", sorted(BY_PARAMETER, key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__
)
def test_pieces_change_the_same_bits_as_the_whole(kind: type[torch.optim.Optimizer]) -> None:
    """Parameters 1 and 3 are stage 7's, 0 is stage 8's, 2 is used by both, and 4 is on another rank
    too.
    """
    whole = parameters()
    cut = parameters()
    one = optimizer_of(kind, whole)
    other = optimizer_of(kind, cut)
    stages = [(8,), (7,), (7, 8), (7,), (7,)]
    ranks = [(0,), (0,), (0,), (0,), (0, 1)]
    updates = StageUpdates(
        other,
        [
            HeldParameter(str(p), *held)
            for p, held in enumerate(zip(cut, ranks, stages, strict=True))
        ],
    )
    for step in range(3):
        for a, b in zip(whole, cut, strict=True):
            a.grad = torch.randn(a.shape, generator=torch.Generator().manual_seed(step))
            b.grad = a.grad.clone()
        before = [parameter.detach().clone() for parameter in cut]
        updates.begin()
        updates.close_stage(7)
        updates.run()
        assert [torch.equal(old, new) for old, new in zip(before, cut, strict=True)] == [
            True,
            False,
            True,
            False,
            True,
        ]
        updates.close_stage(8)  # nothing to wait for: left to the end
        updates.finish()
        one.step()
        assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))
    assert one.state_dict()["param_groups"] == other.state_dict()["param_groups"]
    assert str(sorted(one.state_dict()["state"].items())) == str(
        sorted(other.state_dict()["state"].items())
    )
    assert [len(group["params"]) for group in other.param_groups] == [2, 3]


def test_a_stage_that_lends_a_parameter_is_left_to_the_end() -> None:
    params = parameters()
    before = [parameter.detach().clone() for parameter in params]
    updates = StageUpdates(
        torch.optim.SGD(params, lr=0.1),
        [HeldParameter(str(p), each, (0,), (p,)) for p, each in enumerate(params)],
    )
    for each in params:
        each.grad = torch.ones_like(each)
    updates.begin(lending={1})
    for stage in range(3):
        updates.close_stage(stage)
    updates.run()
    assert [torch.equal(old, new) for old, new in zip(before, params, strict=True)] == [
        False,
        True,
        False,
        True,
        True,
    ]
    updates.finish()
    assert all(torch.equal(old - 0.1, new) for old, new in zip(before, params, strict=True))


def test_not_where_something_needs_all_gradients_or_every_step() -> None:
    class Own(torch.optim.SGD):
        """may do anything"""

    free = Config({"on_nonfinite": "continue"})
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    assert StageUpdates.possible(optimizer, free)
    assert not StageUpdates.possible(optimizer, Config({}))
    assert not StageUpdates.possible(
        optimizer, Config({"on_nonfinite": "continue", "clip_grad_norm": 1.0})
    )
    assert not StageUpdates.possible(
        optimizer, Config({"on_nonfinite": "continue", "precision": "fp16"})
    )
    assert not StageUpdates.possible(Own(parameters(), lr=0.1), free)
    assert not StageUpdates.possible(None, free)
    optimizer.register_step_post_hook(lambda *args: None)
    assert not StageUpdates.possible(optimizer, free)


@pytest.mark.parametrize(
    ("config", "choice", "why"),
    [
        ({"on_nonfinite": "continue"}, "per stage", "nothing needs all gradients"),
        ({}, "at the end", '"on_nonfinite": "stop"'),
        (
            {"on_nonfinite": "continue", "clip_grad_norm": 0.5},
            "at the end",
            '"clip_grad_norm": 0.5',
        ),
        ({"on_nonfinite": "continue", "precision": "fp16"}, "at the end", '"precision": "fp16"'),
    ],
)
def test_the_plan_says_when_stages_are_updated(
    config: dict[str, object], choice: str, why: str
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    given = {"num_task_graph": 2, "num_micro_batch": 2, **config}
    plan = wh.plan(
        model, torch.randn(4, 4), loss=lambda out, _: out.square().mean(), cluster=2, config=given
    )
    (decision,) = (each for each in plan.decisions if each.what == "optimizer steps")
    assert choice in decision.choice
    assert why in decision.why
