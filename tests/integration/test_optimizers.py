"""Updates like local PyTorch: clipping, groups by name, frozen parameters, plans from a file,
numbers that are not finite.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale as wh
from tests.exactness import local_training, run_loss
from tests.integration.layers import EXACT, Layers, build, in_two_stages, make_batch, sgd
from tests.ranks import run_ranks
from whale.lowering.weights import build_on_meta
from whale.runtime.step_update import NonFiniteError

# ---- ranks that are not copies of each other
# --------------------------------------------------------------------------


def train_after_other_work() -> tuple[list[str], dict[str, Tensor], dict[str, Tensor]]:
    """Rank 1 has captured other models before, so that nothing lies at the same address as on rank
    0.
    """
    wh.init()
    kept = [wh.plan(build(), make_batch(0), cluster=1) for _ in range(3 * int(os.environ["RANK"]))]
    engine = wh.parallelize(build(), make_batch(0), optimizer=sgd)
    engine.step(make_batch(0))
    del kept
    gradients = {name: gradient.clone() for name, gradient in engine.gradients().items()}
    return [name for name, _ in engine.named_parameters()], gradients, engine.full_state_dict()


def test_ranks_sum_the_same_parameters() -> None:
    """Each rank captures for itself: what goes into a bucket, and in which order, may depend on the
    graph and on nothing else.
    """
    (names, gradients, state), (other_names, other_gradients, _) = run_ranks(
        train_after_other_work, 2
    )
    assert names == other_names
    model = build()
    loss = run_loss(model, make_batch(0), None)
    loss.backward()
    sgd(model.named_parameters()).step()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(gradients[name], other_gradients[name]), (
            f"{name} has another gradient on rank 1"
        )
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=EXACT, atol=EXACT)
        torch.testing.assert_close(state[name], parameter.detach(), rtol=EXACT, atol=EXACT)


# ---- clipping
# ---------------------------------------------------------------------------------------------------------

CLIP = 0.05


def train_clipped(num_stages: int) -> tuple[list[float], dict[str, Tensor]]:
    wh.init({"num_micro_batch": 2, "clip_grad_norm": CLIP})
    model = in_two_stages(build()) if num_stages == 2 else build()
    engine = wh.parallelize(model, make_batch(0), optimizer=sgd)
    norms = [engine.step(make_batch(step)).grad_norm for step in range(3)]
    return norms, engine.full_state_dict()


@pytest.mark.parametrize(("num_ranks", "num_stages"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_clipping_uses_the_norm_of_the_whole_model(num_ranks: int, num_stages: int) -> None:
    ranks = run_ranks(train_clipped, num_ranks, num_stages)
    model = build()
    optimizer = sgd(model.named_parameters())
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        run_loss(model, make_batch(step), None).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    assert min(norms) > CLIP, "nothing was clipped: the test shows nothing"
    for rank_norms, _ in ranks:
        assert rank_norms == pytest.approx(norms, rel=EXACT)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ranks[0][1][name], parameter.detach(), rtol=EXACT, atol=EXACT)


# ---- optimizers
# -------------------------------------------------------------------------------------------------------


def adamw(pairs: Any) -> torch.optim.Optimizer:
    """The usual two groups: no decay for biases and norms, told apart by name."""
    named = list(pairs)
    decayed = [parameter for name, parameter in named if name.endswith("weight")]
    plain = [parameter for name, parameter in named if not name.endswith("weight")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01)


def step_lr(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)


def train_with_adamw(
    plan: Any = None, num_steps: int = 5
) -> tuple[list[float], list[float], dict[str, Tensor], int]:
    wh.init({"num_micro_batch": 2})
    engine = wh.parallelize(
        in_two_stages(build()), make_batch(0), optimizer=adamw, scheduler=step_lr, plan=plan
    )
    results = [engine.step(make_batch(step)) for step in range(num_steps)]
    losses = [result.loss for result in results]
    assert engine.optimizer is not None
    states = sum(
        len(engine.optimizer.state[p]) > 0
        for group in engine.optimizer.param_groups
        for p in group["params"]
    )
    return losses, [result.learning_rate for result in results], engine.full_state_dict(), states


def adamw_locally(num_steps: int = 5) -> tuple[list[float], list[float], nn.Module]:
    model = build()
    optimizer = adamw(model.named_parameters())
    scheduler = step_lr(optimizer)
    losses = []
    rates = []
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = run_loss(model, make_batch(step), None)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        rates.append(float(scheduler.get_last_lr()[0]))
    return losses, rates, model


def assert_state_is(state: dict[str, Tensor], model: nn.Module, tolerance: float = EXACT) -> None:
    """The state dict of rank 0 loads into the plain model and holds the values of the one trained
    locally.
    """
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, strict=True)
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_adamw_with_groups_by_name_and_a_scheduler_is_exact(num_ranks: int) -> None:
    """AdamW divides by small numbers, so rounding grows to some 1e-9 here."""
    ranks = run_ranks(train_with_adamw, num_ranks)
    losses, rates, model = adamw_locally()
    assert rates == pytest.approx([0.01, 0.001, 0.001, 0.0001, 0.0001])
    for rank, (got, got_rates, _, num_states) in enumerate(ranks):
        assert got == pytest.approx(losses, rel=1e-8)
        assert got_rates == pytest.approx(rates)
        num_own = (
            8 if rank % 2 == 0 else 10
        )  # weights and biases of 4 layers; the head is on the second stage
        assert num_states == num_own, "optimizer state is only for what this rank holds"
    assert_state_is(ranks[0][2], model, 1e-8)


def marked() -> Layers:
    """Some parameters say themselves that they do not decay, as those of state-space models do."""
    model = build()
    for layer in model.layers:
        layer.bias._no_weight_decay = True
    return model


def adamw_by_attribute(pairs: Any) -> torch.optim.Optimizer:
    parameters = [parameter for _, parameter in pairs]
    plain = [p for p in parameters if getattr(p, "_no_weight_decay", False)]
    decayed = [p for p in parameters if not getattr(p, "_no_weight_decay", False)]
    groups = [{"params": decayed, "weight_decay": 0.5}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.1, eps=1e-3)


def train_marked(config: dict[str, Any], marks: dict[str, wh.Strategy]) -> list[float]:
    wh.init(config)
    model = wh.annotate(marked(), marks) if marks else marked()
    engine = wh.parallelize(model, make_batch(0), optimizer=adamw_by_attribute)
    return [engine.step(make_batch(step)).loss for step in range(3)]


@pytest.mark.parametrize(
    ("config", "marks"),
    [
        ({"num_task_graph": 2, "num_micro_batch": 2}, {}),
        ({"zero": 1}, {}),
        ({}, {"*": wh.split(2)}),
    ],
)
def test_groups_by_an_attribute_of_the_parameters(
    config: dict[str, Any], marks: dict[str, wh.Strategy]
) -> None:
    """Tensors of a rank had no attributes: a split trained with the decay of the other group."""
    data = [make_batch(step) for step in range(3)]
    expected = local_training(marked(), data, None, adamw_by_attribute).losses
    for losses in run_ranks(train_marked, 2, config, marks):
        assert losses == pytest.approx(expected, rel=1e-10)


def test_a_builder_keeps_attributes_of_parameters() -> None:
    kept = build_on_meta(marked_before_it_is_registered)
    assert [name for name, p in kept.named_parameters() if hasattr(p, "_no_weight_decay")] == ["w"]


def marked_before_it_is_registered() -> nn.Module:
    model = nn.Module()
    weight = nn.Parameter(torch.ones(2))
    weight._no_weight_decay = True  # type: ignore[attr-defined]
    model.w = weight
    model.b = nn.Parameter(torch.ones(2))
    return model


def test_a_saved_plan_trains_the_same(tmp_path: Path) -> None:
    """Saved, read again, and followed: by path and as an object, to the bit."""
    path = tmp_path / "plan.json"
    made = wh.plan(in_two_stages(build()), make_batch(0), cluster=2, config={"num_micro_batch": 2})
    made.save(path)
    assert wh.Plan.load(path) == made and wh.diff(wh.Plan.load(path), made) == []
    without = run_ranks(train_with_adamw, 2, None, 2)
    for given in (str(path), made):
        with_plan = run_ranks(train_with_adamw, 2, given, 2)
        assert [rank[0] for rank in with_plan] == [rank[0] for rank in without]
        assert all(
            torch.equal(tensor, without[0][2][name]) for name, tensor in with_plan[0][2].items()
        )


def train_frozen(
    frozen: str,
) -> tuple[list[str], list[str], list[str], int, bool, dict[str, Tensor]]:
    """(trained here, with gradient, frozen with gradient or state, gradient messages, has an
    optimizer, state).
    """
    wh.init({"num_micro_batch": 3})
    model = in_two_stages(build())
    freeze(model, frozen)
    engine = wh.parallelize(model, make_batch(0), optimizer=adamw)
    for step in range(2):
        engine.step(make_batch(step))
    fixed = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    state = engine.optimizer.state if engine.optimizer is not None else {}
    touched = [
        n
        for n, p in model.named_parameters()
        if n in fixed and not p.is_meta and (p.grad is not None or p in state)
    ]
    messages = sum(
        str(action).startswith("send B")
        for order in engine.plan.schedule.orders
        for action in order
    )
    trained = [name for name, _ in engine.named_parameters()]
    return (
        trained,
        sorted(engine.gradients()),
        touched,
        messages,
        engine.optimizer is not None,
        engine.full_state_dict(),
    )


def freeze(model: nn.Module, prefixes: str) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(prefixes.split("|"))))


@pytest.mark.parametrize(
    ("frozen", "messages"),
    [("layers.0|layers.1|layers.2|layers.3", 0), ("layers.1|layers.6|head", 3)],
    ids=["the whole first stage", "parts of both"],
)
def test_frozen_parameters_get_no_gradient_state_or_message(frozen: str, messages: int) -> None:
    """With a frozen first stage nothing goes back over the cut; otherwise one gradient for each
    micro-batch.
    """
    model = build()
    freeze(model, frozen)
    optimizer = adamw(
        [
            (name, parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]
    )
    for step in range(2):
        optimizer.zero_grad()
        run_loss(model, make_batch(step), None).backward()
        optimizer.step()
    ranks = run_ranks(train_frozen, 2, frozen)
    expected = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name for trained, *_ in ranks for name in trained} == expected
    for trained, with_gradient, touched, num_sent, has_optimizer, _ in ranks:
        assert sorted(trained) == with_gradient and not touched and num_sent == messages
        assert has_optimizer == bool(trained)
    assert_state_is(ranks[0][5], model, 1e-8)


def train_head_only() -> tuple[list[float], bool, dict[str, Tensor]]:
    """The optimizer picks parameters by name, and the first stage has none of them."""
    wh.init({"num_micro_batch": 2})
    engine = wh.parallelize(in_two_stages(build()), make_batch(0), optimizer=head_only)
    losses = [engine.step(make_batch(step)).loss for step in range(3)]
    return losses, engine.optimizer is not None, engine.full_state_dict()


def head_only(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [parameter for name, parameter in parameters if name.startswith("head.")], lr=0.1
    )


def test_an_optimizer_may_find_nothing_on_a_rank() -> None:
    """torch refuses an optimizer without parameters; a rank whose stages have none of those that
    were picked goes without.
    """
    model = build()
    reference = local_training(model, [make_batch(step) for step in range(3)], None, head_only)
    ranks = run_ranks(train_head_only, 2)
    assert [has_optimizer for _, has_optimizer, _ in ranks] == [False, True]
    for losses, _, _ in ranks:
        assert losses == pytest.approx(reference.losses, rel=EXACT)
    assert_state_is(ranks[0][2], model, 1e-8)


# ---- numbers that are not finite
# --------------------------------------------------------------------------------------


def train_nonfinite(mode: str) -> tuple[str, list[bool], list[float], dict[str, Tensor]]:
    """Step 1 has an infinite input for one sample of rank 1's; gives the message, what was skipped,
    losses, and the state.
    """
    wh.init({"num_micro_batch": 2, "on_nonfinite": mode})
    engine = wh.parallelize(in_two_stages(build()), make_batch(0), optimizer=sgd)
    message = ""
    results = []
    for step in range(3):
        batch = make_batch(step)
        if step == 1:
            batch["x"][-1, 0] = float("inf")
        try:
            results.append(engine.step(batch))
        except NonFiniteError as error:
            message = str(error)
            break
    return (
        message,
        [result.skipped for result in results],
        [result.loss for result in results],
        engine.full_state_dict(),
    )


@pytest.mark.parametrize("mode", ["stop", "skip", "continue"])
def test_a_number_that_is_not_finite(mode: str) -> None:
    model = build()
    optimizer = sgd(model.named_parameters())
    for step in {"stop": (0,), "skip": (0, 2), "continue": ()}[mode]:
        optimizer.zero_grad()
        run_loss(model, make_batch(step), None).backward()
        optimizer.step()
    ranks = run_ranks(train_nonfinite, 4, mode)
    for message, skipped, losses, _ in ranks:
        if mode == "stop":
            assert skipped == [False]
            assert (
                message.startswith("step 1: ")
                and "weights are unchanged" in message
                and '"on_nonfinite": "skip"' in message
            )
            # the last sample belongs to the second replica: ranks 2 and 3; sums over the holders
            # bring it to 0 and 1 as well
            assert all(f"on rank {rank}" in message for rank in range(4)) and "layers." in message
        else:
            assert message == ""
            assert skipped == [False, mode == "skip", False]
            assert (
                math.isfinite(losses[0])
                and not math.isfinite(losses[1])
                and math.isfinite(losses[2]) == (mode == "skip")
            )
    state = ranks[0][3]
    if mode == "continue":
        assert not all(bool(tensor.isfinite().all()) for tensor in state.values())
    else:
        assert_state_is(state, model)


# ---- a plan that was made for another optimizer


def follow_a_plan_of_sgd() -> str:
    """Makes a plan of `split` for SGD, whose parts need no owner, and follows it with Adafactor."""
    wh.init()
    made = wh.plan(wh.annotate(build(), {"layers.*": wh.split(2)}), make_batch(0), optimizer=sgd)
    model = wh.annotate(build(), {"layers.*": wh.split(2)})
    try:
        wh.parallelize(model, make_batch(0), optimizer=torch.optim.Adafactor, plan=made)
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def test_a_given_plan_is_checked_against_the_optimizer() -> None:
    for text in run_ranks(follow_a_plan_of_sgd, 2):
        assert "this plan cuts layers.0" in text and "looks at whole parameters" in text
