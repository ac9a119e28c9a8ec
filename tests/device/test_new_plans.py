"""Plans beyond the exactness table, on the test device: ZeRO at every level, offload, batches of many
lengths. (Model replicas that are not alike are rows of `test_exactness.py`.)

The jobs are those of tests/integration, which compare with local training on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.device import streams
from tests.device.collectives import BACKEND
from tests.device.local_device import use_test_device
from tests.device.training import prepare_on_device
from tests.exactness import Trace, compare, local_training
from tests.integration import offload_cases, test_lengths, zero_cases
from tests.integration.offload_cases import OffloadCase, Placement
from tests.integration.training import Subject
from tests.integration.zero_cases import WAYS, ZeroCase, trace_of
from tests.ranks import ModelServer, preload

preload("tests.integration.zero_cases", "tests.integration.test_lengths", "tests.device.training")
preload("tests.integration.offload_cases")
MODEL = "tied"
SLOW = pytest.mark.slow


def _on_cpu(found: Any) -> Any:
    """What a rank found, on the CPU; raises what went wrong on its streams."""
    streams.synchronize()
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.cpu(), found)


# ---- ZeRO

ON_DEVICES = [case for case in WAYS if "gloo" not in case.name]
QUICK = {("DP 2", 2), ("DP 2, uneven", 3)}
"""(way, level) that always run: even parts by one collective, uneven ones one by one"""


def _zero_rows() -> list[Any]:
    """Every way at one level at least, every level; all pairs would be three times as many."""
    rows = []
    for number, case in enumerate(ON_DEVICES):
        levels = {1 + number % 3, *(level for name, level in QUICK if name == case.name)}
        for level in sorted(levels):
            marks = () if (case.name, level) in QUICK else (pytest.mark.slow,)
            rows.append(pytest.param(case, level, marks=marks, id=f"{case.name}, level {level}"))
    return rows


def train_zero(subject: Subject, case: ZeroCase, level: int) -> zero_cases.ZeroTrace:
    """One rank."""
    trace = zero_cases.train(subject, case, "adamw", level)
    trace.gradients = _on_cpu(trace.gradients)
    trace.state = _on_cpu(trace.state)
    return trace


@pytest.fixture(scope="module")
def tied() -> Iterator[ModelServer]:
    with ModelServer(prepare_on_device, MODEL) as server:
        yield server


@pytest.mark.parametrize(("case", "level"), _zero_rows())
def test_zero(tied: ModelServer, case: ZeroCase, level: int) -> None:
    reference = tied.run_local(zero_cases.train_locally, "adamw", case.num_micro_batch)
    ranks = tied.run(train_zero, case.num_ranks, case, level, backend=BACKEND)
    assert ranks[0].level == level
    compare(reference, trace_of(ranks[0], reference))


# ---- offload

OFFLOADED = [
    pytest.param("DP 2", Placement("host", updated_on="host"), id="states, updated on host"),
    pytest.param(
        "DP 2, gpipe", Placement("host", updated_on="device"), id="states, streamed", marks=SLOW
    ),
    pytest.param(
        "DP 2, gpipe", Placement("host", gradients="host"), id="states, gradients", marks=SLOW
    ),
    pytest.param("DP 2", Placement("host", updated_on="host", ahead=True), id="states, ahead"),
    pytest.param("DP 2", Placement("host", "host", ahead=True), id="weights, ahead", marks=SLOW),
    pytest.param("DP 2, gpipe", Placement(activations="host"), id="activations, host"),
    pytest.param("DP 2, uneven", Placement(states="disk"), id="states, disk", marks=SLOW),
    pytest.param("2 stages", Placement(activations="disk"), id="activations, disk", marks=SLOW),
    pytest.param("DP 2", Placement(weights="host"), id="weights, host", marks=SLOW),
    pytest.param("DP 2", Placement("disk", "disk"), id="states, weights, disk", marks=SLOW),
]


def train_offloaded(
    subject: Subject, case: OffloadCase, placement: Placement, folder: Path
) -> offload_cases.OffloadTrace:
    """One rank."""
    trace = offload_cases.train(subject, case, "adamw", 0, placement, folder)
    trace.gradients = _on_cpu(trace.gradients)
    trace.state = _on_cpu(trace.state)
    return trace


@pytest.mark.parametrize(("way", "placement"), OFFLOADED)
def test_offload(tied: ModelServer, way: str, placement: Placement, tmp_path: Path) -> None:
    case = next(each for each in offload_cases.WAYS if each.name == way)
    reference = tied.run_local(zero_cases.train_locally, "adamw", case.num_micro_batch)
    ranks = tied.run(train_offloaded, case.num_ranks, case, placement, tmp_path, backend=BACKEND)
    assert any(ranks[0].num_bytes_moved.values())
    assert bool(ranks[0].num_updates) == placement.ahead
    compare(reference, trace_of(ranks[0], reference))


# ---- lengths


def train_lengths(_: None, plan: str) -> tuple[Trace, int, list[float]]:
    """One rank; batches of many lengths."""
    _, config, marks = test_lengths.PLANS[plan]
    trace, num_captures, evaluated = test_lengths.train(config, marks, test_lengths.DYNAMIC)
    return (
        Trace(trace.losses, _on_cpu(trace.gradients), _on_cpu(trace.weights)),
        num_captures,
        evaluated,
    )


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer(use_test_device) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("way", test_lengths.PLANS)
def test_many_lengths(server: ModelServer, way: str) -> None:
    num_ranks = test_lengths.PLANS[way][0]
    reference = local_training(
        test_lengths.text(), test_lengths.mini_batches(), None, test_lengths.sgd
    )
    reference.buffers = None
    ranks = server.run(train_lengths, num_ranks, way, backend=BACKEND)
    trace, num_captures, evaluated = ranks[0]
    compare(reference, trace)
    assert num_captures == 1
    trained = test_lengths.text()
    trained.load_state_dict(reference.weights)
    expected = [trained(**batch).item() for batch in test_lengths.mini_batches()[:3]]
    assert evaluated == pytest.approx(expected, rel=1e-12)
