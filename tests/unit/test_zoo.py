"""The models of the tests, and the comparison itself: a comparison that cannot fail would prove
nothing.
"""

from __future__ import annotations

import copy
import fnmatch
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.exactness import (
    EXACT_FLOAT64,
    Float64Mode,
    Trace,
    compare,
    local_training,
    micro_batches,
    run_loss,
)
from tests.ranks import ModelServer
from tests.zoo import BREADTH, CASES, DEEP, MAIN, Case, layer_cuts
from tests.zoo_models import IGNORED, NUM_CLASSES, uneven_batch

BATCH_SIZE = 6


def by_name(cases: tuple[Case, ...]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def sgd(parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(case: Case, num_steps: int = 2, num_micro_batch: int = 1) -> Trace:
    with Float64Mode():
        batches = [case.batch(step, BATCH_SIZE) for step in range(num_steps)]
        return local_training(case.build(), batches, case.loss, sgd, num_micro_batch)


# ---- the cases
# --------------------------------------------------------------------------------------------------------


def check_case(case: Case) -> None:
    """One step in float64 with a finite loss; no random numbers in the forward; no gradient on what
    is frozen.
    """
    model = case.build()
    assert model.training
    dtypes = {item.dtype for item in model.parameters()}
    assert dtypes <= {torch.float64, torch.complex128}
    with Float64Mode():
        loss = run_loss(model, case.batch(0, BATCH_SIZE), case.loss)
        again = run_loss(model, case.batch(0, BATCH_SIZE), case.loss)
    assert loss.dtype == torch.float64 and loss.dim() == 0 and torch.isfinite(loss)
    assert torch.equal(loss, again), "dropout is on somewhere"
    loss.backward()
    gradients = {
        name: item.grad for name, item in model.named_parameters() if item.grad is not None
    }
    assert gradients and all(torch.isfinite(gradient).all() for gradient in gradients.values())
    assert all(dict(model.named_parameters())[name].requires_grad for name in gradients)


@by_name(MAIN)
def test_a_main_case_trains(case: Case) -> None:
    check_case(case)


@pytest.mark.slow
@by_name(BREADTH)
def test_a_breadth_case_trains(case: Case) -> None:
    check_case(case)


def test_there_are_enough_families() -> None:
    assert len(CASES) == len(MAIN) + len(BREADTH) + len(DEEP), "two cases have the same name"
    assert sum(not case.layer_drop for case in BREADTH) >= 16 and any(
        case.layer_drop for case in BREADTH
    )


@by_name(MAIN)
def test_cuts_of_a_main_case(case: Case) -> None:
    assert {2, 3, 4} <= set(case.stages)
    check_cuts(case)


@pytest.mark.slow
@by_name(BREADTH)
def test_cuts_of_a_breadth_case(case: Case) -> None:
    assert 2 in case.stages
    check_cuts(case)


def check_cuts(case: Case) -> None:
    """Every glob matches a module that has parameters, and no module is in two stages."""
    modules = dict(case.build().named_modules())
    for num_stages in case.stages:
        cut = case.cuts(num_stages)
        assert len(cut) == num_stages
        owner: dict[str, int] = {}
        for stage, globs in enumerate(cut):
            for glob in globs:
                matches = fnmatch.filter(modules, glob)
                assert matches, f"{case.name}: {glob} matches no module"
                for match in matches:
                    assert any(True for _ in modules[match].parameters())
                    inside = {
                        name for name in modules if name == match or name.startswith(match + ".")
                    }
                    assert all(owner.setdefault(name, stage) == stage for name in inside), (
                        f"{case.name}: {match} is in two stages"
                    )


def test_layer_cuts_by_hand() -> None:
    cuts = layer_cuts("h", 4)
    assert cuts[2] == (("h.[0-1]",), ("h.[2-3]",))
    assert cuts[3] == (("h.[0-1]",), ("h.2",), ("h.3",))
    assert cuts[4] == (("h.0",), ("h.1",), ("h.2",), ("h.3",))


def test_a_cut_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"chain is cut into \[2, 3, 4\] stages, not 9"):
        CASES["chain"].cuts(9)


@pytest.mark.parametrize("name", ["lora", "llama", "t5"])
def test_weights_are_the_same_with_and_without_the_mode(name: str) -> None:
    torch.rand(7)
    outside = CASES[name].build().state_dict()
    with Float64Mode():
        inside = CASES[name].build().state_dict()
    assert outside.keys() == inside.keys() and all(
        torch.equal(outside[key], inside[key]) for key in outside
    )


def weight_sum(prepared: None, name: str) -> tuple[float, float]:
    case = CASES[name]
    batch = case.batch(3, 4)
    return sum(item.sum().item() for item in case.build().parameters()), float(
        sum(item.sum() for item in batch.values())
    )


def nothing() -> None:
    return None


def test_another_process_builds_the_same_weights_and_batches() -> None:
    with ModelServer(nothing) as server:
        assert server.run_local(weight_sum, "gpt2") == weight_sum(None, "gpt2")


def test_building_leaves_the_random_state_alone() -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    CASES["chain"].build()
    assert torch.equal(torch.rand(3), wanted)


def test_uneven_batch_has_samples_without_labels() -> None:
    valid = (uneven_batch(0, 6)["labels"] != IGNORED).sum(dim=1).tolist()
    assert valid == [1, 0, 7, 10, 0, 6]


def test_tied_and_frozen_parameters() -> None:
    tied = CASES["tied"].build()
    assert tied.head.weight is tied.embedding.weight
    trained = [
        name for name, item in CASES["lora"].build().named_parameters() if item.requires_grad
    ]
    assert len(trained) == 4 * 4 * 2 and all(name.endswith((".down", ".up")) for name in trained)


# ---- float64 mode
# -----------------------------------------------------------------------------------------------------


def test_float64_mode_widens_every_way_to_ask_for_float32() -> None:
    x = torch.ones(2, dtype=torch.float64)
    with Float64Mode():
        results = [
            x.float(), x.to(torch.float32), x.to("cpu", torch.float32), x.to(dtype=torch.float32), x.type(torch.float32),
            x.type("torch.FloatTensor"), x.type(torch.FloatTensor), torch.zeros(2), torch.zeros(2, dtype=torch.float32), torch.tensor(0.5),
            F.softmax(x, dim=-1, dtype=torch.float32), x.sum(dtype=torch.float32), torch.ones(2, dtype=torch.long).float(),
        ]  # fmt: skip
        assert x.half().dtype == torch.float16 and x.long().dtype == torch.int64
    assert {result.dtype for result in results} == {torch.float64}
    assert torch.zeros(2).dtype == torch.float32 and x.float().dtype == torch.float32


def test_float64_mode_can_be_nested_and_ends_with_an_error() -> None:
    mode = Float64Mode()
    with pytest.raises(KeyError), mode:
        with mode, Float64Mode():
            pass
        assert torch.get_default_dtype() == torch.float64
        raise KeyError
    assert torch.get_default_dtype() == torch.float32


def test_float64_mode_is_what_makes_gpt2_exact() -> None:
    """GPT-2's loss is computed in float32: summed over parts it differs by 1e-8 or so, with the
    mode by 1e-15.
    """
    case = CASES["gpt2"]
    model = case.build()

    def difference() -> float:
        """the largest of some batches: in float32 a sum may be right by chance"""
        worst = 0.0
        for seed in range(5):
            batch = case.batch(seed, BATCH_SIZE)
            parts = sum(
                run_loss(model, part, None).item() * share
                for part, share in micro_batches(batch, 3)
            )
            worst = max(worst, abs(parts - run_loss(model, batch, None).item()))
        return worst

    without = difference()
    with Float64Mode():
        within = difference()
    assert within < 1e-14 < 1e-10 < without


# ---- local training and the comparison
# --------------------------------------------------------------------------------


def test_local_training_by_hand() -> None:
    """One weight w = 3, loss = mean(w x), x = 1 and 2: gradient 1.5 at every step, lr 0.1 without
    momentum.
    """
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 3.0)
    batch = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    trace = local_training(
        model,
        [batch, batch],
        lambda output, batch: output.mean(),
        lambda items: torch.optim.SGD(items, lr=0.1),
    )
    assert trace.losses == pytest.approx([4.5, 4.275], abs=1e-15)
    assert trace.gradients["weight"].item() == 1.5
    assert trace.weights["weight"].item() == pytest.approx(2.7, abs=1e-15)


def test_micro_batches_by_hand() -> None:
    batch = {"x": torch.arange(10), "table": torch.zeros(3), "number": 4}
    parts = micro_batches(batch, 3)
    assert [part["x"].tolist() for part, _ in parts] == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert [share for _, share in parts] == [0.4, 0.3, 0.3]
    assert all(len(part["table"]) == 3 and part["number"] == 4 for part, _ in parts)


def test_parts_of_a_mean_over_samples_add_up() -> None:
    compare(train(CASES["branches"]), train(CASES["branches"], num_micro_batch=4))


def test_parts_of_a_model_with_batch_statistics_do_not() -> None:
    with pytest.raises(AssertionError, match="loss differs"):
        compare(train(CASES["batch_norm"]), train(CASES["batch_norm"], num_micro_batch=2))


@pytest.fixture(scope="module")
def reference() -> Trace:
    return train(CASES["ignored_labels"])


def test_the_same_training_compares_equal(reference: Trace) -> None:
    compare(reference, train(CASES["ignored_labels"]), tolerance=0.0)


@pytest.mark.parametrize("group", ["gradients", "weights"])
def test_a_small_error_in_one_element_is_found(reference: Trace, group: str) -> None:
    largest = max(item.abs().max().item() for item in getattr(reference, group).values())
    for factor, fails in ((0.9, False), (1.1, True)):
        wrong = copy.deepcopy(reference)
        getattr(wrong, group)["blocks.2.up.weight"][3, 4] += factor * EXACT_FLOAT64 * largest
        if fails:
            with pytest.raises(
                AssertionError,
                match=rf"{group[:-1]} differs from local training, most in blocks.2.up.weight: .* 1.1e-10",
            ):
                compare(reference, wrong)
        else:
            compare(reference, wrong)


def test_wrong_losses_names_shapes_and_values_are_found(reference: Trace) -> None:
    def refused(message: str, **changes: Any) -> None:
        with pytest.raises(AssertionError, match=message):
            compare(reference, replace(reference, **changes))

    less = {name: item for name, item in reference.weights.items() if name != "norm.bias"}
    refused("most in step 2", losses=[reference.losses[0], reference.losses[1] + 1e-8])
    refused("2 steps in local training, 1 here", losses=reference.losses[:1])
    refused(r"weight names differ: missing \['norm.bias'\]", weights=less)
    refused(
        r"gradient names differ: .*not in local training \['more'\]",
        gradients={**reference.gradients, "more": torch.zeros(1)},
    )
    refused("weight norm.bias: shape", weights={**less, "norm.bias": torch.zeros(1)})
    refused(
        "weight norm.bias is not finite",
        weights={**less, "norm.bias": reference.weights["norm.bias"] * float("nan")},
    )


def test_buffers_are_compared_when_given() -> None:
    reference = train(CASES["batch_norm"])
    assert reference.buffers and reference.buffers["stem.1.num_batches_tracked"] == 2
    compare(reference, replace(reference, buffers=None))
    wrong = {**reference.buffers, "stem.1.num_batches_tracked": torch.tensor(4)}
    with pytest.raises(AssertionError, match=r"buffer differs .* stem.1.num_batches_tracked"):
        compare(reference, replace(reference, buffers=wrong))


def test_labels_stay_in_range() -> None:
    for case in CASES.values():
        batch = case.batch(0, BATCH_SIZE)
        labels = batch["labels"] if isinstance(batch, dict) else batch[1]
        assert len(labels) == BATCH_SIZE and (labels.dim() == 2 or int(labels.max()) < NUM_CLASSES)
