"""Models, plan files and ranks that do not fit are refused by name, on every rank, with what to
change.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import whale as wh
from tests.integration.refused import (
    BATCH_SIZE,
    FOUND_WITHIN_S,
    Decides,
    LossOfEachSample,
    Net,
    NoLoss,
    assert_says,
    make_batch,
    message_of,
    sgd,
    two_stages,
)
from tests.ranks import run_ranks
from whale.cluster.cluster import ETHERNET_50G, PCIE_3_X16, Device, device_kind

pytestmark = pytest.mark.usefixtures("fresh_session")


# ---- models
# -----------------------------------------------------------------------------------------------------------


def test_a_decision_on_the_data_names_its_line_and_what_to_try() -> None:
    message = message_of(lambda: wh.parallelize(Decides(), make_batch(), optimizer=sgd))
    number = Decides.forward.__code__.co_firstlineno + 1
    assert_says(message, f"refused.py:{number}", "if x.sum() > 0:", "torch.where")


@pytest.mark.parametrize("build", [NoLoss, LossOfEachSample])
def test_a_model_without_a_scalar_loss(build: type[Net]) -> None:
    message = message_of(lambda: wh.plan(build(), make_batch(), cluster=1))
    assert_says(
        message,
        "loss=lambda output, batch:",
        "a scalar",
        "NoneType" if build is NoLoss else "a tensor of shape",
    )


def test_a_loss_function_that_gives_no_scalar() -> None:
    message = message_of(
        lambda: wh.plan(
            NoLoss(), make_batch(), loss=lambda output, batch: output["logits"], cluster=1
        )
    )
    assert_says(message, "loss(output, batch)", "scalar", "3")


def test_a_step_without_an_optimizer_says_how_to_give_one() -> None:
    engine = wh.parallelize(Net(), make_batch())
    assert engine.evaluate(make_batch()).loss is not None
    assert_says(
        message_of(lambda: engine.step(make_batch())),
        "needs an optimizer",
        "optimizer=lambda params:",
    )


def test_a_builder_that_builds_nothing() -> None:
    assert_says(
        message_of(lambda: wh.parallelize(lambda: None, make_batch(), optimizer=sgd)),
        "NoneType",
        "torch.nn.Module",
    )  # type: ignore[arg-type,return-value]


def test_a_model_half_on_meta() -> None:
    model = Net()
    model.head.to("meta")
    assert_says(
        message_of(lambda: wh.parallelize(model, make_batch(), optimizer=sgd)),
        "head.weight",
        "meta",
        "2 in all",
    )


# ---- plan files
# -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan_text() -> str:
    wh.init()
    return wh.plan(Net(), make_batch(), cluster=1, config={"num_micro_batch": 2}).to_json()


def use(plan: wh.Plan | Path, model: nn.Module | None = None) -> wh.Engine:
    return wh.parallelize(model or Net(), make_batch(), optimizer=sgd, plan=plan)


def test_a_plan_of_another_model() -> None:
    plan = wh.plan(Net(width=4), make_batch(), cluster=1)
    assert_says(message_of(lambda: use(plan)), "another model", plan.model[:12], "wh.plan")


def test_a_plan_for_another_number_of_devices(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    wh.plan(two_stages(Net()), make_batch(), cluster=2).save(path)
    assert_says(message_of(lambda: use(path)), "2 devices", "this job has 1", "that many ranks")


def test_a_plan_for_another_cluster() -> None:
    t4 = wh.Cluster((Device(0, "localhost", 0, device_kind("T4")),), PCIE_3_X16, ETHERNET_50G)
    plan = wh.plan(Net(), make_batch(), cluster=t4)
    words = (
        "another cluster",
        "rank 0 is a T4 in the plan and a CPU here",
        "1 of 1 ranks differ",
        "--cluster",
    )
    assert_says(message_of(lambda: use(plan)), *words)
    assert wh.parallelize(Net(), make_batch(), optimizer=sgd, plan=plan, cluster=t4).plan == plan


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[str], str]:
    """Edits the fields of a plan file."""

    def edited(text: str) -> str:
        data = json.loads(text)
        change(data)
        return json.dumps(data)

    return edited


def edit_replica(change: Callable[[dict[str, Any]], Any]) -> Callable[[str], str]:
    """Edits what a model replica runs."""
    return edit(lambda data: change(data["templates"][0]))


def edit_order(change: Callable[[list[str]], Any]) -> Callable[[str], str]:
    """Edits the actions of the only device."""
    return edit_replica(lambda template: change(template["schedule"]["orders"][0]))


CORRUPTIONS: dict[str, tuple[Callable[[str], str], tuple[str, ...]]] = {
    "cut off": (lambda text: text[: len(text) // 2], ("plan.json", "is not a plan")),
    "empty": (lambda text: "", ("plan.json", "is not a plan")),
    "not JSON": (lambda text: "num_devices: 1", ("plan.json", "is not a plan")),
    "another JSON": (lambda text: "[1, 2]", ("plan.json", "is not a plan")),
    "field missing": (
        edit_replica(lambda template: template.pop("stages")),
        ("plan.json", "stages", "required"),
    ),
    "wrong type": (
        edit(lambda data: data.update(batch_size="many")),
        ("plan.json", "batch_size"),
    ),
    "other format": (
        edit(lambda data: data.update(format=99)),
        ("plan.json", "99", "make the plan again"),
    ),
    "of 0.1.0": (
        edit(lambda data: data.update(format=3, schedule={}, num_devices=1)),
        ("plan format 3", "Try: whale plan TRAIN.PY --save plan.json"),
    ),
    "operations missing": (
        edit_replica(lambda template: template["stage_of_operation"].pop()),
        ("places 6 operations", "has 7"),
    ),
    "no such stage": (
        edit_replica(lambda template: template["tensors"]["head.weight"].update(stages=[7])),
        ("plan.json", "beyond its 1"),
    ),
    "samples missing": (
        edit(lambda data: data["shares"][0].update(num_samples=1)),
        ("gives", "of 1 samples to its devices"),
    ),
    "action missing": (edit_order(lambda order: order.remove("F0.1")), ("F0.1", "missing")),
    "backward first": (edit_order(lambda order: order.reverse()), ("the last backward",)),
    "no such action": (edit_order(lambda order: order.append("fly")), ("'fly'", "no action")),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corrupted_plan_file(plan_text: str, tmp_path: Path, name: str) -> None:
    """Whatever is wrong with the file is said before the first step."""
    corrupt, words = CORRUPTIONS[name]
    path = tmp_path / "plan.json"
    path.write_text(corrupt(plan_text))
    wh.init({"num_micro_batch": 2})
    assert_says(message_of(lambda: use(path)), *words)


def test_a_plan_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=r"nowhere\.json"):
        use(tmp_path / "nowhere.json")


# ---- ranks that do not agree
# ------------------------------------------------------------------------------------------


def disagree(mistake: str) -> tuple[str, float]:
    """Rank 1 does something else than rank 0; gives the message and how long it took."""
    odd = int(torch.distributed.get_rank()) == 1
    start = time.monotonic()
    try:
        wh.init({"num_micro_batch": 2, "seed": 5 if odd and mistake == "config" else 1})
        model: Any = Net()
        batch: Any = make_batch()
        if odd and mistake == "another model":
            model = Net(width=4)
        if odd and mistake == "a model that cannot be captured":
            model = Decides()
        if odd and mistake == "another sample":
            batch = {"x": batch["x"].double(), "labels": batch["labels"]}
        if odd and mistake == "a sample without tensors":
            batch = {"x": None}
        engine = wh.parallelize(model, batch, optimizer=sgd)
        engine.step(make_batch())
        if odd and mistake == "another batch":
            batch = make_batch(seed=1)
        if odd and mistake == "a batch of another size":
            batch = make_batch(batch_size=BATCH_SIZE - 2)
        if odd and mistake == "a batch of another dtype":
            batch = {"x": batch["x"].double(), "labels": batch["labels"]}
        if odd and mistake == "a batch with another key":
            batch = {"x": batch["x"], "lables": batch["labels"]}
        engine.step(batch)
    except ValueError as error:
        return str(error), time.monotonic() - start
    return "nothing was raised", time.monotonic() - start


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (
            "config",
            ("the config differs between ranks", "rank 1", "'seed': 5", "the same wh.Config"),
        ),
        ("another model", ("the model differs between ranks", "rank 1", "the same model")),
        ("a model that cannot be captured", ("if x.sum() > 0:", "torch.where")),
        ("another sample", ("differs between ranks", "rank 1")),
        ("a sample without tensors", ("no tensor with a batch dimension",)),
        (
            "another batch",
            ("the batch of step 1 differs between ranks", "rank 1", "DistributedSampler"),
        ),
        ("a batch of another size", ("the batch of step 1 differs between ranks", "rank 1")),
        ("a batch of another dtype", ("the batch of step 1 differs between ranks", "rank 1")),
        ("a batch with another key", ("the batch of step 1 differs between ranks", "rank 1")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ranks_that_disagree_all_say_so(mistake: str, words: tuple[str, ...]) -> None:
    """Every rank raises within seconds, and the message says which rank is the odd one."""
    for rank, (message, seconds) in enumerate(
        run_ranks(disagree, 3, mistake, timeout_s=FOUND_WITHIN_S)
    ):
        assert_says(message, *words)
        if mistake == "a model that cannot be captured" and rank != 1:
            assert_says(message, "rank 1 failed")
        assert seconds < FOUND_WITHIN_S


def plan_on_rank(path: str) -> str:
    wh.init()
    try:
        wh.parallelize(Net(), make_batch(), optimizer=sgd, plan=path)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def test_a_bad_plan_file_ends_every_rank(tmp_path: Path) -> None:
    """Only rank 0 reads the file; the others hear of it."""
    path = tmp_path / "plan.json"
    wh.plan(Net(), make_batch(), cluster=3).save(path)
    for message in run_ranks(plan_on_rank, 2, str(path)):
        assert_says(message, "3 devices", "this job has 2")
    path.write_text("{}")
    for message in run_ranks(plan_on_rank, 2, str(path)):
        assert_says(message, "is not a plan")
