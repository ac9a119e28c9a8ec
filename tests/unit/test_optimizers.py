"""Which optimizers may be given parts of parameters: found by trying them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import whale as wh
from tests.integration.layers import build, make_batch
from whale import api
from whale.capture.batch import read_batch
from whale.cluster.cluster import Cluster
from whale.costs.optimizers import note_on_parts, works_by_element
from whale.model_planner import ModelPlanner

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


# ---- optimizers that look at several parameters at once (Prodigy, LAMB with its global clipping)


class Together(torch.optim.Optimizer):
    """Every step is divided by the norm of all gradients that the optimizer sees."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {})

    def step(self, closure=None) -> None:
        trained = [each for group in self.param_groups for each in group["params"]]
        norm = torch.stack([each.grad.norm() for each in trained]).norm()
        for parameter in trained:
            parameter.data -= 0.1 * parameter.grad / norm


def plan_with(make, cluster, **config) -> wh.Plan:
    return wh.plan(build(), make_batch(0), cluster=cluster, config=config, optimizer=make)


def test_stages_are_refused_where_no_rank_sees_all_parameters() -> None:
    """Each rank would divide by the norm of its own gradients: other weights, in silence."""
    with pytest.raises(ValueError, match=r"Together looks at other parameters.*no rank holds them"):
        plan_with(Together, 2, num_task_graph=2)
    plan_with(OPTIM.AdamW, 2, num_task_graph=2)  # the same stages are fine for others


def test_data_parallel_is_chosen_where_every_rank_must_see_all_parameters() -> None:
    cluster = Cluster.uniform(4, kind="V100-32GB", devices_per_host=4)
    plan = plan_with(Together, cluster)
    assert len(plan.stages) == 1
    assert "looks at all parameters at once" in plan.decisions[0].why


# ---- stacks of matrices that are updated in parts, by norms of the whole


class Stack(torch.nn.Module):
    """Four experts, each on its own part of the features."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        done = torch.einsum("bed,edf->ebf", x.unflatten(1, (4, 8)), self.up)
        return done.square().mean((0, 2)).mean()


def test_a_stack_that_cannot_be_updated_in_parts_has_an_owner() -> None:
    """Norms of the whole do not make this optimizer exact on parts."""
    model = wh.annotate(Stack(), {"*": wh.split(2, grid=(1, 2, 1))})
    layout, tensors = read_batch({"x": torch.randn(4, 32)})
    prepared = api._prepare(model, layout, tensors, None, wh.Config(), "cpu")
    planner = ModelPlanner(model, Cluster.uniform(2), wh.Config(), 4, optimizer=NormScaled)
    plan = planner.plan(prepared, {})
    assert set(plan.owners) == {"up"} and not plan.summed_norms
    assert not any("other values" in note for note in plan.notes)


def test_a_given_plan_with_parts_of_a_stack_is_for_adafactor_and_those_that_need_no_norms() -> None:
    model = wh.annotate(Stack(), {"*": wh.split(2, grid=(1, 2, 1))})
    layout, tensors = read_batch({"x": torch.randn(4, 32)})
    prepared = api._prepare(model, layout, tensors, None, wh.Config(), "cpu")
    planner = ModelPlanner(model, Cluster.uniform(2), wh.Config(), 4, optimizer=OPTIM.Adafactor)
    plan = planner.plan(prepared, {})
    assert plan.summed_norms == ("up",)
    assert not plan.owners and not any("other values" in note for note in plan.notes)
    for make in (OPTIM.Adafactor, OPTIM.AdamW):
        replace(planner, optimizer=make).check_optimizer(plan, prepared, is_given=True)
    with pytest.raises(ValueError, match="this plan cuts up"):
        replace(planner, optimizer=NormScaled).check_optimizer(plan, prepared, is_given=True)
