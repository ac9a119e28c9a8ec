"""What a job does beside plain steps, on the test device: waves, zero-bubble, split grids, resuming,
evaluation, fp16 scaling, dropout that is recomputed.

The jobs are those of tests/integration, which compare with local training on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import whale as wh
from tests.device import streams
from tests.device.collectives import BACKEND
from tests.device.local_device import use_test_device
from tests.device.memory import NAME
from tests.device.settings import settings
from tests.device.training import prepare_on_device, train_on_device
from tests.exactness import Float64Mode, compare
from tests.integration import test_evaluation, test_precision, test_resume, test_split
from tests.integration.layers import EXACT, NUM_CLASSES, WIDTH, make_batch, sgd
from tests.integration.table import PlanCase
from tests.integration.test_waves import SCHEDULES
from tests.integration.training import Subject, merge, train_locally
from tests.ranks import ModelServer, preload
from tests.zoo import CASES
from whale import api
from whale.capture.batch import read_batch

preload("tests.device.test_jobs")


def on_device(_: None, function: Callable[..., Any], *args: Any) -> Any:
    """`function` on a rank with the test device; what it gives, on the CPU."""
    found = function(*args)
    streams.synchronize()  # raises races that nobody has noticed yet
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.cpu(), found)


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer(use_test_device) as found:
        yield found


# ---- schedules

WAVES_MODEL = "deep_chain"
NUM_STEPS = 2


@pytest.fixture(scope="module")
def deep_chain() -> Iterator[ModelServer]:
    with ModelServer(prepare_on_device, WAVES_MODEL) as found:
        yield found


def train_on_queues(subject: Subject, plan: PlanCase, num_queues: int) -> Any:
    settings.num_queues = num_queues
    return train_on_device(subject, plan, NUM_STEPS)


def _waves(schedule: str, num_devices: int, num_queues: int) -> Any:
    config = {**SCHEDULES[schedule], "num_micro_batch": 4, "num_task_graph": num_devices}
    name = f"{schedule}, {num_devices} devices, {num_queues or 'many'} queues"
    return pytest.param(PlanCase(name, num_devices, config), num_queues, id=name)


@pytest.mark.parametrize(
    ("row", "num_queues"),
    [
        _waves("wave", 2, 1),
        _waves("2 waves", 2, 0),
        _waves("zero-bubble", 3, 1),
        _waves("zero-bubble wave", 2, 0),
    ],
)
def test_schedules(deep_chain: ModelServer, row: PlanCase, num_queues: int) -> None:
    ranks = deep_chain.run(
        train_on_queues, row.num_ranks, row, num_queues, backend=BACKEND, timeout_s=40
    )
    reference = deep_chain.run_local(train_locally, row, NUM_STEPS)
    compare(reference, merge([rank.trace for rank in ranks], CASES[WAVES_MODEL].build()))


# ---- split

TWO_GRIDS = {"blocks.[01]*": ("split", 2, None), "blocks.[23]*|head": ("split", 2, None)}
QUICK_SPLITS = [
    test_split.Case("mlp", 2, test_split.everything(2, (1, 1, 2))),
    test_split.Case("mlp", 4, test_split.everything(4, (2, 2, 1))),
    test_split.Case(
        "mlp", 2, test_split.everything(2, (1, 2, 1)), kinds=("P100", "V100-32GB")
    ),  # uneven shards
    test_split.Case(
        "classifier",
        3,
        {"features*": ("replicate", 3), "classifier": ("split", 3, None)},
        {"num_micro_batch": 2},
    ),
    test_split.Case(
        "chain",
        3,
        {"blocks.[01]*": ("split", 2, None), "blocks.[23]*|head": ("replicate", 1)},
        {"num_micro_batch": 3},
    ),
    test_split.Case("chain", 4, TWO_GRIDS, {"num_micro_batch": 3, "schedule": "zero-bubble"}),
]


def prepare_split(name: str) -> test_split.Subject:
    """Runs in a model server: the model is captured for the device."""
    use_test_device()
    torch.set_num_threads(1)
    model = test_split.build(name)
    with Float64Mode():
        layout, tensors = read_batch(test_split.MODELS[name][1](0))
        config = wh.Config()
        prepared = api._prepare(model, layout, tensors, None, config, NAME, check=False)
    return test_split.Subject(name, model, prepared)


def train_split(subject: test_split.Subject, case: test_split.Case) -> Any:
    found = test_split.train_on_rank(subject, case)
    streams.synchronize()
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.cpu(), found)


@pytest.fixture(scope="module")
def split_servers() -> Iterator[dict[str, ModelServer]]:
    found: dict[str, ModelServer] = {}
    yield found
    for server in found.values():
        server.close()


def _split_rows() -> list[Any]:
    """Sorted by model, so that each is captured once."""
    rows = [pytest.param(case, id=case.name) for case in QUICK_SPLITS]
    known = {case.name for case in QUICK_SPLITS}
    for case in (*test_split.CASES, *test_split.SLOW_CASES):
        if case.name not in known:
            rows.append(pytest.param(case, id=case.name, marks=pytest.mark.slow))
    return sorted(rows, key=lambda row: row.values[0].model)


@pytest.mark.parametrize("case", _split_rows())
def test_splits(split_servers: dict[str, ModelServer], case: test_split.Case) -> None:
    if case.model not in split_servers:
        for other in list(split_servers):
            split_servers.pop(other).close()
        split_servers[case.model] = ModelServer(prepare_split, case.model)
    server = split_servers[case.model]
    reference = server.run_local(test_split.train_locally)
    ranks = server.run(train_split, case.num_ranks, case, backend=BACKEND)
    compare(reference, test_split.merged(ranks, reference.weights))


# ---- checkpoints


def test_a_job_resumes_on_other_devices(server: ModelServer, tmp_path: Path) -> None:
    """2 test devices in two stages, then 2 CPU ranks, then 2 test devices."""
    legs = [
        (test_resume.Leg(2, 2, {"num_micro_batch": 2}, test_resume.TWO_STAGES), BACKEND),
        (test_resume.Leg(2, 1), "gloo"),
        (test_resume.Leg(2, 2), BACKEND),
    ]
    losses: list[float] = []
    for leg, backend in legs:
        function = _leg if backend == BACKEND else _leg_on_cpu
        outcomes = server.run(function, leg.num_ranks, leg, tmp_path, backend=backend)
        assert outcomes[0].loaded == (len(losses) or None)
        losses += outcomes[0].losses
    local = test_resume.train_locally(len(losses))
    assert losses == pytest.approx(local.trace.losses, rel=EXACT)
    for name, tensor in local.trace.weights.items():
        torch.testing.assert_close(outcomes[0].state[name], tensor, rtol=EXACT, atol=EXACT)


def _leg(_: None, leg: test_resume.Leg, folder: Path) -> test_resume.RankOutcome:
    found = test_resume.train_leg(None, leg, folder)
    streams.synchronize()
    found.moments = {}  # on the device
    return found


def _leg_on_cpu(_: None, leg: test_resume.Leg, folder: Path) -> test_resume.RankOutcome:
    wh.init({"device": "cpu"})
    leg.config["device"] = "cpu"
    found = test_resume.train_leg(None, leg, folder)
    found.moments = {}
    return found


# ---- evaluation


@pytest.mark.parametrize(
    ("form", "num_ranks"), [pytest.param("tuple", 4, marks=pytest.mark.slow), ("dict", 2)]
)
def test_evaluation_gives_the_local_outputs(server: ModelServer, form: str, num_ranks: int) -> None:
    function = test_evaluation.evaluate_forms
    ranks = server.run(on_device, num_ranks, function, [form], backend=BACKEND)
    _, outputs, _, state = ranks[0][form]
    model = test_evaluation.answers(form)
    model.load_state_dict(state)
    model.eval()
    batch = make_batch(7)
    with torch.no_grad():
        expected = model(**batch)
        has_loss = form in test_evaluation.HAVE_LOSS
        loss = expected["loss"] if has_loss else test_evaluation.loss_of_output(expected, batch)
    for rank in ranks:
        assert rank[form][0] == pytest.approx(loss.item(), rel=EXACT)
    plain = test_evaluation.plain
    torch.testing.assert_close(plain(outputs), plain(expected), rtol=EXACT, atol=EXACT)


# ---- fp16


@pytest.mark.parametrize("stages", [pytest.param(False, marks=pytest.mark.slow), True])
def test_fp16_skips_what_torch_skips(server: ModelServer, stages: bool) -> None:
    skipped, losses, scale, weights = test_precision.train_locally()
    ranks = server.run(on_device, 2, test_precision.train, stages, backend=BACKEND)
    for found in ranks:
        assert found[0] == skipped
        assert found[1] == pytest.approx(losses, rel=1e-2)  # half precision
        assert found[2] == scale
    for name, tensor in ranks[0][3].items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-2, atol=1e-3)


# ---- dropout that is recomputed


class Dropped(nn.Module):
    """Dropout in a part that is recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.5))
        self.top = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Tanh())
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.top(self.bottom(x))), labels)


def train_dropped(recompute: bool) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, gradients of the last step and weights."""
    wh.init({"num_micro_batch": 2, "recompute": recompute})
    torch.manual_seed(0)
    model = wh.annotate(
        Dropped().double(), {"bottom": wh.replicate(1), "top|head": wh.replicate(1)}
    )
    engine = wh.parallelize(model, make_batch(0), optimizer=sgd)
    assert bool(engine.plan.stages[0].recomputed) == recompute
    losses = [engine.step(make_batch(step)).loss for step in range(3)]
    return losses, engine.gradients(), engine.full_state_dict()


def test_recomputed_dropout_draws_the_same_numbers(server: ModelServer) -> None:
    saved = server.run(on_device, 2, train_dropped, False, backend=BACKEND)
    recomputed = server.run(on_device, 2, train_dropped, True, backend=BACKEND)
    for (losses, gradients, state), (own_losses, own_gradients, own_state) in zip(
        saved, recomputed, strict=True
    ):
        assert own_losses == losses
        assert len(set(losses)) == len(losses)
        for expected, found in ((gradients, own_gradients), (state, own_state)):
            assert expected.keys() == found.keys()
            assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
