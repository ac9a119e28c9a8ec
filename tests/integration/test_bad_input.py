"""Mistakes of a user, each with its message: what was wrong, the number, and the way out. None hangs, none is ignored."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale as wh
from tests.ranks import ModelServer, preload
from whale.cluster.cluster import ETHERNET_50G, PCIE_3_X16, Device, DeviceKind, device_kind

preload("tests.integration.test_bad_input")

WIDTH, NUM_CLASSES, BATCH_SIZE = 8, 3, 8
FOUND_WITHIN_S = 15.0
"""a mistake on one rank is seen by all in about a second; on a busy machine it may take a few more"""


class Net(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH if not i else width, width) for i in range(2))
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.cross_entropy(self.head(x), labels)


class NoLoss(Net):
    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(x)}


class LossOfEachSample(Net):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), labels, reduction="none")


class Decides(Net):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if x.sum() > 0:  # what a graph cannot hold
            x = -x
        return super().forward(x, labels)


def make_batch(seed: int = 0, batch_size: int = BATCH_SIZE) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch_size, WIDTH, generator=generator)
    return {"x": x, "labels": torch.randint(0, NUM_CLASSES, (batch_size,), generator=generator)}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.fixture(autouse=True)
def fresh_session() -> Iterator[None]:
    wh.init()
    yield
    wh.init()


def message_of(call: Callable[[], Any]) -> str:
    """What a user reads; every mistake is a ValueError."""
    with pytest.raises(ValueError) as caught:
        call()
    return str(caught.value)


def assert_says(message: str, *words: str) -> None:
    for word in words:
        assert word in message, f"{word!r} is missing in: {message}"


# ---- words and numbers that the user typed ----------------------------------------------------------------------------


def test_an_unknown_config_key_names_the_nearest() -> None:
    assert_says(message_of(lambda: wh.Config({"num_microbatch": 8})), "'num_microbatch'", "num_micro_batch")
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
def test_a_config_value_that_makes_no_sense_is_named(values: dict[str, Any], words: tuple[str, ...]) -> None:
    assert_says(message_of(lambda: wh.Config(values)), *words)


def test_a_glob_without_a_match_names_the_nearest_module() -> None:
    message = message_of(lambda: wh.annotate(Net(), {"layer.0": wh.replicate(1)}))
    assert_says(message, "'layer.0'", "none of the model's 5 modules", "layers.0")


def test_one_part_of_a_joined_glob_without_a_match_is_named() -> None:
    assert_says(message_of(lambda: wh.annotate(Net(), {"layers.0|haed": wh.replicate(1)})), "'haed'", "head")


def test_a_module_in_two_globs_is_named_with_both() -> None:
    strategies = {"layers.0": wh.replicate(1), "layers.*": wh.replicate(1)}
    assert_says(message_of(lambda: wh.annotate(Net(), strategies)), "'layers.0'", "'layers.*'")


@pytest.mark.parametrize("number", [0, -1, 1.5, True, "2"])
def test_a_device_count_that_is_no_count_is_named(number: Any) -> None:
    assert_says(message_of(lambda: wh.replicate(number)), f"wh.replicate({number!r})", "at least 1")


def two_stages(model: nn.Module) -> nn.Module:
    return wh.annotate(model, {"layers.0": wh.replicate(1), "layers.1": wh.replicate(1)})


def test_a_device_count_that_does_not_divide_offers_the_next_counts() -> None:
    message = message_of(lambda: wh.plan(two_stages(Net()), make_batch(), cluster=3))
    assert_says(message, "1 + 1 = 2 devices", "does not divide 3 devices", "use 2 or 4 devices")


def test_more_task_graphs_than_the_model_can_be_cut_into() -> None:
    message = message_of(lambda: wh.plan(Net(), make_batch(), cluster=64, config={"num_task_graph": 64}))
    assert_says(message, "64", "num_task_graph")
    assert re.search(r"at most \d+", message), f"the largest possible number is missing in: {message}"


def test_num_task_graph_beside_annotations() -> None:
    message = message_of(lambda: wh.plan(two_stages(Net()), make_batch(), cluster=2, config={"num_task_graph": 2}))
    assert_says(message, '"num_task_graph": 2', "annotated", "leave one of the two out")


def test_num_task_graph_beside_a_default_strategy() -> None:
    wh.set_default_strategy(wh.replicate(2))
    message = message_of(lambda: wh.plan(Net(), make_batch(), cluster=2, config={"num_task_graph": 2}))
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
    assert_says(message, "split(4)", "inside replicate(2)", "do not nest", "wh.set_default_strategy(wh.replicate(2))")
    wh.plan(Net(), make_batch(), cluster=2)  # the failed scope left nothing behind


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: wh.split(4, grid=(2, 3, 1)), ("wh.split(4, grid=(2, 3, 1))", "2 x 3 x 1 = 6 devices, not 4", "(1, 4, 1)", "leave")),
        (lambda: wh.split(4, grid=(2, 2)), ("wh.split(4, grid=(2, 2))", "three whole numbers", "(1, 4, 1)")),
        (lambda: wh.split(4, grid=(0, 4, 1)), ("three whole numbers of at least 1",)),
        (lambda: wh.split(4, method="suma"), ("method='suma'", "Did you mean 'summa'?")),
        (lambda: wh.split(4, grid=(1, 4, 1), method="summa"), ("as many devices along x as along y", "1 and 4")),
        (lambda: wh.split(4, grid=(1, 1, 4), method="summa"), ("two at least", "1 and 1")),
        (lambda: wh.split(6, method="summa"), ("(q, q, d)", "6 devices have none")),
    ],
)
def test_grids_and_methods_that_do_not_fit(make: Callable[[], Any], words: tuple[str, ...]) -> None:
    assert_says(message_of(make), *words)


def test_a_split_says_what_was_asked_for() -> None:
    assert repr(wh.split(4, grid=[1, 4, 1])) == "wh.split(4, grid=(1, 4, 1))"
    assert repr(wh.split(8, (2, 2, 2), method="summa")) == "wh.split(8, grid=(2, 2, 2), method='summa')"
    assert wh.split(8).strategy.grid is None


def test_nested_split() -> None:
    def nested() -> None:
        with wh.split(4), wh.split(2):
            pass

    assert_says(message_of(nested), "split(2) is opened inside split(4)", "do not nest")


def test_more_devices_than_classes_is_allowed_and_said() -> None:
    """16 devices along an axis, weights with 8 rows and columns, and a batch of 8."""
    plan = wh.plan(wh.annotate(Net(), {"*": wh.split(16, grid=(1, 16, 1))}), make_batch(), cluster=16)
    said = [note for note in plan.notes if "layers.0.weight" in note]
    assert len(said) == 1
    assert_says(said[0], "stage 0", "can be cut into 8 parts only, for 16 devices", "some hold none of it")


def test_two_grids_for_the_same_devices() -> None:
    model = wh.annotate(Net(), {"layers": wh.split(4, grid=(2, 2, 1)), "head": wh.split(4, grid=(1, 4, 1))})
    message = message_of(lambda: wh.plan(model, make_batch(), cluster=4))
    assert_says(message, "wh.split(4, grid=(2, 2, 1)) on layers", "wh.split(4, grid=(1, 4, 1)) on head", "give both the same")


def test_summa_beside_a_grid_that_it_cannot_use() -> None:
    model = wh.annotate(Net(), {"layers": wh.split(4, method="summa"), "head": wh.split(4, grid=(1, 4, 1))})
    message = message_of(lambda: wh.plan(model, make_batch(), cluster=4))
    assert_says(message, "wh.split(4, method='summa') on layers", "wh.split(4, grid=(1, 4, 1)) on head", "(2, 2, 1)")


def test_split_around_an_operation_whose_shape_depends_on_data() -> None:
    class Picks(Net):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            with wh.split(2):
                x = torch.tanh(self.layers[0](x))
                return self.head(x[x.sum(-1) > 0]).square().sum()

    message = message_of(lambda: wh.plan(Picks(), make_batch(), cluster=2))
    assert_says(message, "the shape of `index` depends on what the tensors hold", "test_bad_input.py", "torch.where(mask, x, 0)")


def test_a_loss_that_is_no_sum_on_several_split_replicas() -> None:
    class Spread(Net):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            out = self.head(torch.tanh(self.layers[0](x)))
            return (out.mean(0) * out.square().mean(0)).sum()

    model = wh.annotate(Spread(), {"*": wh.split(2)})
    message = message_of(lambda: wh.plan(model, make_batch(), cluster=4, config={"colocate": True}))
    assert_says(message, "not a sum over samples", "2 model replicas that are split", "one replica", '"loss_per_micro_batch": true')
    assert wh.plan(model, make_batch(), cluster=2).num_replicas == 1


def test_an_optimizer_that_looks_at_whole_tensors_is_said() -> None:
    model = wh.annotate(Net(), {"*": wh.split(2)})
    plan = wh.plan(model, make_batch(), cluster=2, optimizer=lambda p: torch.optim.Adafactor(p))
    assert any(note.startswith("Adafactor looks at more than one number at a time") for note in plan.notes)
    assert not any("at a time" in note for note in wh.plan(model, make_batch(), cluster=2, optimizer=sgd).notes)


def test_a_sharded_model_that_has_no_room_is_refused_with_numbers() -> None:
    tiny = wh.Cluster.uniform(2, DeviceKind("tiny", 1e12, 3000, 1e11))
    message = message_of(lambda: wh.plan(wh.annotate(Net(width=64), {"*": wh.split(2)}), make_batch(), cluster=tiny))
    assert_says(message, "does not fit", "rank 0 (tiny)", "0.003 MB", "parameters", "optimizer state")


# ---- batches ----------------------------------------------------------------------------------------------------------


def test_a_batch_smaller_than_micro_batches_times_shares() -> None:
    message = message_of(lambda: wh.plan(Net(), make_batch(), cluster=4, config={"num_micro_batch": 4}))
    assert_says(message, "batch size 8", "4 micro-batches", "2 samples", "4 devices", "at least 16", "at most 2")


def test_a_smaller_batch_at_a_step_is_refused_in_the_same_words() -> None:
    wh.init({"num_micro_batch": 4})
    engine = wh.parallelize(Net(), make_batch(), optimizer=sgd)
    message = message_of(lambda: engine.step(make_batch(batch_size=3)))
    assert_says(message, "batch size 3", "4 micro-batches", "at least 4")
    engine.step(make_batch(batch_size=4))  # the smallest that fits


OTHER_BATCHES: dict[str, tuple[Callable[[dict[str, Any]], Any], tuple[str, ...]]] = {
    "missing key": (lambda batch: {"x": batch["x"]}, ("labels", "missing")),
    "another key": (lambda batch: {"x": batch["x"], "lables": batch["labels"]}, ("lables", "labels")),
    "one key more": (lambda batch: {**batch, "mask": batch["x"]}, ("mask", "not in the sample")),
    "a tuple": (lambda batch: (batch["x"], batch["labels"]), ("disagrees with the sample batch",)),
    "other dtype": (lambda batch: {**batch, "x": batch["x"].double()}, ("x", "float64", "float32")),
    "other ndim": (lambda batch: {**batch, "x": batch["x"].unsqueeze(1)}, ("x", "3 dims", "2 dims", "[8, 1, 8]", "[8, 8]")),
    "uneven dim 0": (lambda batch: {**batch, "labels": batch["labels"][:7]}, ("labels", "7", "8", "same dim 0")),
    "a number": (lambda batch: {**batch, "labels": 3}, ("labels",)),
    "an object": (lambda batch: {**batch, "labels": object()}, ("labels", "object")),
    "empty": (lambda batch: {}, ("no tensor",)),
}


@pytest.fixture(scope="module")
def engine() -> wh.Engine:
    wh.init()
    return wh.parallelize(Net(), make_batch(), optimizer=sgd)


@pytest.mark.parametrize("name", OTHER_BATCHES)
def test_a_batch_that_disagrees_with_the_sample(engine: wh.Engine, name: str) -> None:
    change, words = OTHER_BATCHES[name]
    before = {name: tensor.clone() for name, tensor in engine.full_state_dict().items()}
    assert_says(message_of(lambda: engine.step(change(make_batch()))), *words)
    for name, tensor in engine.full_state_dict().items():
        assert torch.equal(tensor, before[name]), f"{name} was changed by a refused batch"


def test_a_sample_batch_without_a_batch_dimension() -> None:
    assert_says(message_of(lambda: wh.plan(Net(), {"x": torch.tensor(1.0)}, cluster=1)), "no tensor with a batch dimension", "x")


# ---- models -----------------------------------------------------------------------------------------------------------


def test_a_decision_on_the_data_names_its_line_and_the_way_out() -> None:
    message = message_of(lambda: wh.parallelize(Decides(), make_batch(), optimizer=sgd))
    number = Decides.forward.__code__.co_firstlineno + 1
    assert_says(message, f"test_bad_input.py:{number}", "if x.sum() > 0:", "torch.where")


@pytest.mark.parametrize("build", [NoLoss, LossOfEachSample])
def test_a_model_without_a_scalar_loss(build: type[Net]) -> None:
    message = message_of(lambda: wh.plan(build(), make_batch(), cluster=1))
    assert_says(message, "loss=lambda output, batch:", "a scalar", "NoneType" if build is NoLoss else "a tensor of shape")


def test_a_loss_function_that_gives_no_scalar() -> None:
    message = message_of(lambda: wh.plan(NoLoss(), make_batch(), loss=lambda output, batch: output["logits"], cluster=1))
    assert_says(message, "loss(output, batch)", "scalar", "3")


def test_a_step_without_an_optimizer_says_how_to_give_one() -> None:
    engine = wh.parallelize(Net(), make_batch())
    assert engine.evaluate(make_batch()).loss is not None
    assert_says(message_of(lambda: engine.step(make_batch())), "needs an optimizer", "optimizer=lambda params:")


def test_a_builder_that_builds_nothing() -> None:
    assert_says(message_of(lambda: wh.parallelize(lambda: None, make_batch(), optimizer=sgd)), "NoneType", "torch.nn.Module")  # type: ignore[arg-type,return-value]


def test_a_model_half_on_meta() -> None:
    model = Net()
    model.head.to("meta")
    assert_says(message_of(lambda: wh.parallelize(model, make_batch(), optimizer=sgd)), "head.weight", "meta", "2 in all")


# ---- plan files -------------------------------------------------------------------------------------------------------


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
    words = ("another cluster", "rank 0 is a T4 in the plan and a CPU here", "1 of 1 ranks differ", "--cluster")
    assert_says(message_of(lambda: use(plan)), *words)
    assert wh.parallelize(Net(), make_batch(), optimizer=sgd, plan=plan, cluster=t4).plan == plan


def broken(text: str, change: Callable[[dict[str, Any]], None]) -> str:
    data = json.loads(text)
    change(data)
    return json.dumps(data)


CORRUPTIONS: dict[str, tuple[Callable[[str], str], tuple[str, ...]]] = {
    "cut off": (lambda text: text[: len(text) // 2], ("plan.json", "is not a plan")),
    "empty": (lambda text: "", ("plan.json", "is not a plan")),
    "not JSON": (lambda text: "num_devices: 1", ("plan.json", "is not a plan")),
    "another JSON": (lambda text: "[1, 2]", ("plan.json", "is not a plan")),
    "field missing": (lambda text: broken(text, lambda data: data.pop("stages")), ("plan.json", "stages", "required")),
    "wrong type": (lambda text: broken(text, lambda data: data.update(num_devices="many")), ("plan.json", "num_devices")),
    "other format": (lambda text: broken(text, lambda data: data.update(format=99)), ("plan.json", "99", "make the plan again")),
    "operations missing": (lambda text: broken(text, lambda data: data["stage_of_operation"].pop()), ("places 6 operations", "has 7")),
    "no such stage": (lambda text: broken(text, lambda data: data["holders"].update({"head.weight": [7]})), ("plan.json", "beyond its 1")),
    "action missing": (lambda text: broken(text, lambda data: data["schedule"]["orders"][0].remove("F0.1")), ("F0.1", "missing")),
    "backward first": (lambda text: broken(text, lambda data: data["schedule"]["orders"][0].reverse()), ("the last backward",)),
    "no such action": (lambda text: broken(text, lambda data: data["schedule"]["orders"][0].append("fly")), ("'fly'", "no action")),
}  # fmt: skip


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


# ---- ranks that do not agree ------------------------------------------------------------------------------------------


def warm_up() -> None:
    """The first capture of a process takes a second longer than the others: ranks inherit what it leaves."""
    wh.plan(Net(), make_batch(), cluster=1)


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer(warm_up) as started:
        yield started


def disagree(prepared: None, mistake: str) -> tuple[str, float]:
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
        ("config", ("the config differs between ranks", "rank 1", "'seed': 5", "the same wh.Config")),
        ("another model", ("the model differs between ranks", "rank 1", "the same model")),
        ("a model that cannot be captured", ("if x.sum() > 0:", "torch.where")),
        ("another sample", ("differs between ranks", "rank 1")),
        ("a sample without tensors", ("no tensor with a batch dimension",)),
        ("another batch", ("the batch of step 1 differs between ranks", "rank 1", "DistributedSampler")),
        ("a batch of another size", ("the batch of step 1 differs between ranks", "rank 1")),
        ("a batch of another dtype", ("the batch of step 1 differs between ranks", "rank 1")),
        ("a batch with another key", ("the batch of step 1 differs between ranks", "rank 1")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ranks_that_disagree_all_say_so(server: ModelServer, mistake: str, words: tuple[str, ...]) -> None:
    """Every rank raises within seconds, and the message says which rank is the odd one."""
    for rank, (message, seconds) in enumerate(server.run(disagree, 3, mistake, timeout_s=FOUND_WITHIN_S)):
        assert_says(message, *words)
        if mistake == "a model that cannot be captured" and rank != 1:
            assert_says(message, "rank 1 failed")
        assert seconds < FOUND_WITHIN_S


def plan_on_rank(prepared: None, path: str) -> str:
    wh.init()
    try:
        wh.parallelize(Net(), make_batch(), optimizer=sgd, plan=path)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def test_a_bad_plan_file_ends_every_rank(server: ModelServer, tmp_path: Path) -> None:
    """Only rank 0 reads the file; the others hear of it."""
    path = tmp_path / "plan.json"
    wh.plan(Net(), make_batch(), cluster=3).save(path)
    for message in server.run(plan_on_rank, 2, str(path)):
        assert_says(message, "3 devices", "this job has 2")
    path.write_text("{}")
    for message in server.run(plan_on_rank, 2, str(path)):
        assert_says(message, "is not a plan")
