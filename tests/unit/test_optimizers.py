"""Which optimizers may be given parts of parameters: found by trying them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import whale as wh
from tests.integration.layers import build, make_batch
from whale import api
from whale.capture.batch import read_batch
from whale.capture.graph import StateTensor
from whale.cluster.cluster import Cluster
from whale.costs.optimizer_factory import make_optimizer
from whale.costs.optimizers import looks_at_others, note_on_parts, works_by_element
from whale.model_planner import ModelPlanner
from whale.runtime.optimizer_groups import check_groups, settings_of_whole

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


class ByGroup(torch.optim.Optimizer):
    """The same for each group by itself."""

    def __init__(self, groups) -> None:
        super().__init__(groups, {})

    def step(self, closure=None) -> None:
        for group in self.param_groups:
            norm = torch.stack([each.grad.norm() for each in group["params"]]).norm()
            for parameter in group["params"]:
                parameter.data -= 0.1 * parameter.grad / norm


def weights_and_biases(pairs) -> torch.optim.Optimizer:
    named = list(pairs)
    biases = [pair for pair in named if pair[0].endswith("bias")]
    weights = [pair for pair in named if not pair[0].endswith("bias")]
    return ByGroup([{"params": each} for each in (weights, biases) if each])


def clipped_by_a_hook(pairs) -> torch.optim.Optimizer:
    """Clips by a norm that small gradients do not reach."""
    named = list(pairs)
    made = OPTIM.SGD(named, lr=0.1)
    parameters = [parameter for _, parameter in named]

    def clip(*_) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 100.0)

    made.register_step_pre_hook(clip)
    return made


def groups_by_place(pairs) -> torch.optim.Optimizer:
    named = list(pairs)
    return OPTIM.SGD([{"params": named[:1], "lr": 0.1}, {"params": named[1:], "lr": 0.01}])


@pytest.mark.parametrize("make", [weights_and_biases, clipped_by_a_hook, groups_by_place])
def test_what_depends_on_other_parameters_is_found(make) -> None:
    """The first and the last parameter of the model alone did not show any of these."""
    names = [f"{layer}.{kind}" for layer in range(3) for kind in ("weight", "bias")]
    found = looks_at_others(make, names)
    assert found is not None and "looks at other parameters" in found
    with pytest.raises(ValueError, match="looks at other parameters"):
        plan_with(make, 2, num_task_graph=2)


def decay_by_name(pairs) -> torch.optim.Optimizer:
    named = list(pairs)
    biases = [pair for pair in named if pair[0].endswith("bias")]
    weights = [pair for pair in named if not pair[0].endswith("bias")]
    return OPTIM.AdamW([{"params": weights, "weight_decay": 0.1}, {"params": biases}], lr=0.1)


@pytest.mark.parametrize("make", [decay_by_name, OPTIM.Muon, OPTIM.Adafactor, OPTIM.Rprop])
def test_what_treats_every_parameter_by_itself_is_not_accused(make) -> None:
    names = [f"{layer}.{kind}" for layer in range(3) for kind in ("weight", "bias")]
    assert looks_at_others(make, names) is None


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_group_that_is_empty_on_a_rank(name: str) -> None:
    """torch refused it beside a group with names, and such optimizers counted as ones that look at
    whole parameters.
    """
    made = make_optimizer(decay_by_name, named_parameters(**{name: (4, 4)}))
    assert sorted(len(group["params"]) for group in made.param_groups) == [0, 1]
    assert works_by_element(decay_by_name, name) is True


def named_parameters(**shapes: tuple[int, ...]) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, torch.nn.Parameter(torch.ones(shape))) for name, shape in shapes.items()]


def groups_by_size(pairs) -> torch.optim.Optimizer:
    named = list(pairs)
    large = [pair for pair in named if pair[1].numel() > 10]
    small = [pair for pair in named if pair[1].numel() <= 10]
    return OPTIM.SGD([{"params": large, "lr": 0.1}, {"params": small, "lr": 0.01}])


def of_all(**shapes: tuple[int, ...]) -> list[StateTensor]:
    return [StateTensor(n, "parameter", shape, torch.float32, True) for n, shape in shapes.items()]


def test_groups_that_are_others_for_the_part_of_a_rank_are_refused() -> None:
    whole = of_all(first=(4, 4), last=(4, 4))
    rows = named_parameters(first=(4, 4), last=(2, 4))
    for make in (groups_by_size, groups_by_place):
        own = rows[1:]
        of_whole = settings_of_whole(make, own, whole)
        with pytest.raises(ValueError, match=r"treats last in another way.*lr 0\.\d+ instead of"):
            check_groups(make_optimizer(make, own), own, of_whole)
    for make in (decay_by_name, OPTIM.AdamW):
        check_groups(make_optimizer(make, rows), rows, settings_of_whole(make, rows, whole))
    given_all = named_parameters(first=(4, 4), last=(4, 4))
    assert settings_of_whole(groups_by_size, given_all, whole) is None


def test_parameters_that_the_function_leaves_out_on_some_ranks_are_refused() -> None:
    def first_only(pairs) -> torch.optim.Optimizer:
        return OPTIM.SGD(list(pairs)[:1], lr=0.1)

    own = named_parameters(last=(4, 4))
    of_whole = settings_of_whole(first_only, own, of_all(first=(4, 4), last=(4, 4)))
    with pytest.raises(ValueError, match=r"last in another way.*trained instead of left out"):
        check_groups(first_only(iter(own)), own, of_whole)


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
