"""Mistakes of a user, each with its message: what was wrong, the number, and what to try. None
hangs, none is ignored.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale as wh
from tests.integration.refused import (
    NUM_CLASSES,
    WIDTH,
    Net,
    assert_says,
    make_batch,
    message_of,
    sgd,
    two_stages,
)
from whale.cluster.cluster import DeviceKind

pytestmark = pytest.mark.usefixtures("fresh_session")


@pytest.fixture(scope="module")
def engine() -> wh.Engine:
    wh.init()
    return wh.parallelize(Net(), make_batch(), optimizer=sgd)


# ---- words and numbers that the user typed
# ----------------------------------------------------------------------------


def test_an_unknown_config_key_names_the_nearest() -> None:
    assert_says(
        message_of(lambda: wh.Config({"num_microbatch": 8})), "'num_microbatch'", "num_micro_batch"
    )
    assert_says(message_of(lambda: wh.init({"shedule": "gpipe"})), "'shedule'", "schedule")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_micro_batch": 0}, ("num_micro_batch", "at least 1", "0")),
        ({"num_micro_batch": "8"}, ("num_micro_batch", "whole number", "'8'")),
        ({"schedule": "1F1B"}, ("schedule", "'1f1b'", "'gpipe'", "'1F1B'")),
        ({"clip_grad_norm": -1.0}, ("clip_grad_norm", "above 0", "-1.0")),
    ],
    ids=["zero", "text", "choice", "negative"],
)
def test_a_config_value_that_makes_no_sense_is_named(
    values: dict[str, Any], words: tuple[str, ...]
) -> None:
    assert_says(message_of(lambda: wh.Config(values)), *words)


def test_a_glob_without_a_match_names_the_nearest_module() -> None:
    message = message_of(lambda: wh.annotate(Net(), {"layer.0": wh.replicate(1)}))
    assert_says(message, "'layer.0'", "none of the model's 5 modules", "layers.0")


def test_one_part_of_a_joined_glob_without_a_match_is_named() -> None:
    assert_says(
        message_of(lambda: wh.annotate(Net(), {"layers.0|haed": wh.replicate(1)})), "'haed'", "head"
    )


def test_a_module_in_two_globs_is_named_with_both() -> None:
    strategies = {"layers.0": wh.replicate(1), "layers.*": wh.replicate(1)}
    assert_says(message_of(lambda: wh.annotate(Net(), strategies)), "'layers.0'", "'layers.*'")


@pytest.mark.parametrize("number", [0, -1, 1.5, True, "2"])
def test_a_device_count_that_is_no_count_is_named(number: Any) -> None:
    assert_says(message_of(lambda: wh.replicate(number)), f"wh.replicate({number!r})", "at least 1")


def test_a_device_count_that_does_not_divide_offers_the_next_counts() -> None:
    message = message_of(lambda: wh.plan(two_stages(Net()), make_batch(), cluster=3))
    assert_says(message, "1 + 1 = 2 devices", "does not divide 3 devices", "use 2 or 4 devices")


def test_more_task_graphs_than_the_model_can_be_cut_into() -> None:
    message = message_of(
        lambda: wh.plan(Net(), make_batch(), cluster=64, config={"num_task_graph": 64})
    )
    assert_says(message, "64", "num_task_graph")
    assert re.search(r"at most \d+", message), (
        f"the largest possible number is missing in: {message}"
    )


def test_num_task_graph_beside_annotations() -> None:
    message = message_of(
        lambda: wh.plan(two_stages(Net()), make_batch(), cluster=2, config={"num_task_graph": 2})
    )
    assert_says(message, '"num_task_graph": 2', "annotated", "leave one of the two out")


def test_num_task_graph_beside_a_default_strategy() -> None:
    wh.set_default_strategy(wh.replicate(2))
    message = message_of(
        lambda: wh.plan(Net(), make_batch(), cluster=2, config={"num_task_graph": 2})
    )
    assert_says(message, '"num_task_graph": 2', "leave one of the two out")


@pytest.mark.parametrize("where", ["construction", "forward"])
def test_nested_scopes(where: str) -> None:
    class Nested(Net):
        def __init__(self) -> None:
            super().__init__()
            if where == "construction":
                with wh.replicate(2), wh.split(4):
                    self.head = nn.Linear(WIDTH, NUM_CLASSES)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            if where == "construction":
                return super().forward(x, labels)
            with wh.replicate(2), wh.split(4):
                return super().forward(x, labels)

    message = message_of(lambda: wh.plan(Nested(), make_batch(), cluster=2))
    assert_says(
        message,
        "split(4)",
        "inside replicate(2)",
        "do not nest",
        "wh.set_default_strategy(wh.replicate(2))",
    )
    wh.plan(Net(), make_batch(), cluster=2)  # the failed scope left nothing behind


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: wh.split(4, grid=(2, 3, 1)),
            ("wh.split(4, grid=(2, 3, 1))", "2 x 3 x 1 = 6 devices, not 4", "(1, 4, 1)", "leave"),
        ),
        (
            lambda: wh.split(4, grid=(2, 2)),
            ("wh.split(4, grid=(2, 2))", "three whole numbers", "(1, 4, 1)"),
        ),
        (lambda: wh.split(4, grid=(0, 4, 1)), ("three whole numbers of at least 1",)),
        (lambda: wh.split(4, method="suma"), ("method='suma'", "Did you mean 'summa'?")),
        (
            lambda: wh.split(4, grid=(1, 4, 1), method="summa"),
            ("as many devices along x as along y", "1 and 4"),
        ),
        (lambda: wh.split(4, grid=(1, 1, 4), method="summa"), ("two at least", "1 and 1")),
        (lambda: wh.split(6, method="summa"), ("(q, q, d)", "6 devices have none")),
    ],
)
def test_grids_and_methods_that_do_not_fit(make: Callable[[], Any], words: tuple[str, ...]) -> None:
    assert_says(message_of(make), *words)


def test_a_split_says_what_was_asked_for() -> None:
    assert repr(wh.split(4, grid=[1, 4, 1])) == "wh.split(4, grid=(1, 4, 1))"
    assert (
        repr(wh.split(8, (2, 2, 2), method="summa"))
        == "wh.split(8, grid=(2, 2, 2), method='summa')"
    )
    assert wh.split(8).strategy.grid is None


def test_nested_split() -> None:
    def nested() -> None:
        with wh.split(4), wh.split(2):
            pass

    assert_says(message_of(nested), "split(2) is opened inside split(4)", "do not nest")
    assert "set_default_strategy" not in message_of(nested)  # which refuses split


def test_more_devices_than_classes_is_allowed_and_said() -> None:
    """16 devices along an axis, weights with 8 rows and columns, and a batch of 8."""
    model = wh.annotate(Net(), {"*": wh.split(16, grid=(1, 16, 1))})
    plan = wh.plan(model, make_batch(), cluster=16)
    said = [note for note in plan.notes if "layers.0.weight" in note]
    assert len(said) == 1
    assert_says(
        said[0], "stage 0", "can be cut into 8 parts only, for 16 devices", "some hold none of it"
    )
    (sharding,) = plan.shardings
    whole = sum(
        p.numel() * p.element_size()
        for name, p in model.named_parameters()
        if not sharding.stored[name].is_cut
    )
    cut = sum(
        p.numel() * p.element_size()
        for name, p in model.named_parameters()
        if sharding.stored[name].is_cut
    )
    held = [device.peak_bytes["weights"] for device in wh.simulate(plan).devices]
    assert held[-1] == whole and sum(held) == 16 * whole + cut  # each device's own figure
    assert sharding.work[0] > sharding.work[-1] == 0


def test_two_grids_for_the_same_devices() -> None:
    model = wh.annotate(
        Net(), {"layers": wh.split(4, grid=(2, 2, 1)), "head": wh.split(4, grid=(1, 4, 1))}
    )
    message = message_of(lambda: wh.plan(model, make_batch(), cluster=4))
    assert_says(
        message,
        "wh.split(4, grid=(2, 2, 1)) on layers",
        "wh.split(4, grid=(1, 4, 1)) on head",
        "give both the same",
    )


def test_summa_beside_a_grid_that_it_cannot_use() -> None:
    model = wh.annotate(
        Net(), {"layers": wh.split(4, method="summa"), "head": wh.split(4, grid=(1, 4, 1))}
    )
    message = message_of(lambda: wh.plan(model, make_batch(), cluster=4))
    assert_says(
        message,
        "wh.split(4, method='summa') on layers",
        "wh.split(4, grid=(1, 4, 1)) on head",
        "(2, 2, 1)",
    )


PICKS: dict[str, tuple[Callable[[Tensor], Tensor], str, str]] = {
    "mask": (lambda x: x[x.sum(-1) > 0], "`x[mask]`", "torch.where(mask, x, 0).sum()"),
    "nonzero": (
        lambda x: x[(x.sum(-1) > 0).nonzero().squeeze(-1)],
        "`nonzero`",
        "keep the mask instead of its indices",
    ),
    "where": (
        lambda x: x[torch.where(x.sum(-1) > 0)[0]],
        "`where`",
        "keep the mask instead of its indices",
    ),
    "unique": (lambda x: x * torch.unique(x.round()).sum(), "`unique`", "one_hot"),
}


@pytest.mark.parametrize("name", PICKS)
def test_split_around_an_operation_whose_shape_depends_on_data(name: str) -> None:
    pick, operation, advice = PICKS[name]

    class Picks(Net):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            with wh.split(2):
                return self.head(pick(torch.tanh(self.layers[0](x)))).square().sum()

    message = message_of(lambda: wh.plan(Picks(), make_batch(), cluster=2))
    line = pick.__code__.co_firstlineno
    assert_says(
        message,
        f"the shape of {operation} depends on what the tensors hold",
        f"test_bad_input.py:{line}",
        advice,
    )


def test_a_loss_that_is_no_sum_is_exact_with_one_micro_batch_and_said() -> None:
    class Spread(Net):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            out = self.head(torch.tanh(self.layers[0](x)))
            return (out.mean(0) * out.square().mean(0)).sum()

    model = wh.annotate(Spread(), {"*": wh.split(2)})
    plan = wh.plan(model, make_batch(), cluster=4, config={"colocate": True})
    assert plan.num_replicas == 2
    assert any(
        "not a sum over samples" in note and "all-reduced inside the forward" in note
        for note in plan.notes
    )
    message = message_of(
        lambda: wh.plan(
            model, make_batch(), cluster=4, config={"colocate": True, "num_micro_batch": 2}
        )
    )
    assert_says(
        message, "test_bad_input.py", 'Try: "num_micro_batch": 1', '"loss_per_micro_batch": true'
    )
    plan = wh.plan(
        model,
        make_batch(),
        cluster=4,
        config={"colocate": True, "num_micro_batch": 2, "loss_per_micro_batch": True},
    )
    assert any(note.startswith("loss_per_micro_batch: the loss") for note in plan.notes)


def test_an_optimizer_that_looks_at_whole_tensors_is_said() -> None:
    model = wh.annotate(Net(), {"*": wh.split(2)})
    plan = wh.plan(model, make_batch(), cluster=2, optimizer=lambda p: torch.optim.Adafactor(p))
    assert plan.owners
    assert any(decision.choice == "each whole on one rank" for decision in plan.decisions)
    assert not wh.plan(model, make_batch(), cluster=2, optimizer=sgd).owners


def test_a_sharded_model_that_does_not_fit_is_refused_with_numbers() -> None:
    tiny = wh.Cluster.uniform(2, DeviceKind("tiny", 1e12, 3000, 1e11))
    message = message_of(
        lambda: wh.plan(wh.annotate(Net(width=64), {"*": wh.split(2)}), make_batch(), cluster=tiny)
    )
    assert_says(
        message, "does not fit", "rank 0 (tiny)", "3.00 KB", "parameters", "optimizer state"
    )


# ---- batches
# ----------------------------------------------------------------------------------------------------------


def test_a_batch_smaller_than_micro_batches_times_shares() -> None:
    message = message_of(
        lambda: wh.plan(Net(), make_batch(), cluster=4, config={"num_micro_batch": 4})
    )
    assert_says(
        message,
        "batch size 8",
        "4 micro-batches",
        "2 samples",
        "4 devices",
        "at least 16",
        "at most 2",
    )


def test_a_smaller_batch_at_a_step_trains_in_fewer_micro_batches() -> None:
    """Too small for the planned 4: no mistake, the last batch of an epoch often is."""
    wh.init({"num_micro_batch": 4})
    local = Net()
    engine = wh.parallelize(copy.deepcopy(local), make_batch(), optimizer=sgd)
    small = make_batch(batch_size=3)
    assert engine.step(small).loss == pytest.approx(local(**small).item(), rel=1e-6)


OTHER_BATCHES: dict[str, tuple[Callable[[dict[str, Any]], Any], tuple[str, ...]]] = {
    "missing key": (lambda batch: {"x": batch["x"]}, ("labels", "missing")),
    "another key": (
        lambda batch: {"x": batch["x"], "lables": batch["labels"]},
        ("lables", "labels"),
    ),
    "one key more": (lambda batch: {**batch, "mask": batch["x"]}, ("mask", "not in the sample")),
    "a tuple": (lambda batch: (batch["x"], batch["labels"]), ("disagrees with the sample batch",)),
    "other dtype": (lambda batch: {**batch, "x": batch["x"].double()}, ("x", "float64", "float32")),
    "other ndim": (
        lambda batch: {**batch, "x": batch["x"].unsqueeze(1)},
        ("x", "3 dims", "2 dims", "[8, 1, 8]", "[8, 8]"),
    ),
    "uneven dim 0": (
        lambda batch: {**batch, "labels": batch["labels"][:7]},
        ("labels", "7", "8", "same dim 0"),
    ),
    "a number": (lambda batch: {**batch, "labels": 3}, ("labels",)),
    "an object": (lambda batch: {**batch, "labels": object()}, ("labels", "object")),
    "empty": (lambda batch: {}, ("no tensor",)),
}


@pytest.mark.parametrize("name", OTHER_BATCHES)
def test_a_batch_that_disagrees_with_the_sample(engine: wh.Engine, name: str) -> None:
    change, words = OTHER_BATCHES[name]
    before = {name: tensor.clone() for name, tensor in engine.full_state_dict().items()}
    assert_says(message_of(lambda: engine.step(change(make_batch()))), *words)
    for name, tensor in engine.full_state_dict().items():
        assert torch.equal(tensor, before[name]), f"{name} was changed by a refused batch"


def test_a_sample_batch_without_a_batch_dimension() -> None:
    assert_says(
        message_of(lambda: wh.plan(Net(), {"x": torch.tensor(1.0)}, cluster=1)),
        "no tensor with a batch dimension",
        "x",
    )
