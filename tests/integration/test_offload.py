"""Offload: same loss, gradients and weights as local training whatever lives on the host or on disk,
beside data parallelism, pipelines, waves, recomputation, ZeRO and `split`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.exactness import Trace, compare
from tests.integration.offload_cases import WAYS, OffloadCase, Placement, train
from tests.integration.training import prepare_subject
from tests.integration.zero_cases import trace_of, train_locally
from tests.ranks import ModelServer, preload

preload("tests.integration.offload_cases")

WAY = {case.name: case for case in WAYS}
MODELS = ("tied", "gpt2", "batch_norm")
CLASSES = ("states", "weights", "activations")
PLACEMENTS = tuple(Placement(**{what: memory}) for what in CLASSES for memory in ("host", "disk"))


@pytest.fixture(scope="module", params=MODELS)
def subject(request: pytest.FixtureRequest) -> Iterator[tuple[ModelServer, dict[object, Trace]]]:
    with ModelServer(prepare_subject, request.param) as server:
        yield server, {}


@pytest.fixture(scope="module")
def tied() -> Iterator[tuple[ModelServer, dict[object, Trace]]]:
    with ModelServer(prepare_subject, "tied") as server:
        yield server, {}


@pytest.mark.parametrize(
    ("way", "level", "placement"),
    [
        ("one rank", 0, Placement(states="host", updated_on="device")),
        ("DP 2", 0, Placement(states="disk")),
        pytest.param(
            "DP 2", 0, Placement(states="disk", updated_on="device"), marks=pytest.mark.slow
        ),
        pytest.param("DP 2", 0, Placement(states="host", gradients="disk"), marks=pytest.mark.slow),
        pytest.param("DP 2, uneven", 2, Placement(states="disk"), marks=pytest.mark.slow),
        pytest.param("DP 2, gpipe", 0, Placement(activations="host"), marks=pytest.mark.slow),
        ("2 stages", 0, Placement(activations="disk")),
        ("DP 2, small segments", 0, Placement(activations="disk")),
        ("one rank", 0, Placement(weights="host")),
        pytest.param("2 stages", 0, Placement(weights="disk"), marks=pytest.mark.slow),
        ("wave", 0, Placement("host", "host", "host")),
        ("DP 2, uneven", 3, Placement("disk", "disk")),
        pytest.param("recompute", 0, Placement(activations="disk"), marks=pytest.mark.slow),
        ("beside split", 0, Placement("disk", activations="host")),
    ],
    ids=str,
)
def test_tied_weights_train_like_local(
    tied: tuple[ModelServer, dict[object, Trace]],
    way: str,
    level: int,
    placement: Placement,
    tmp_path: Path,
) -> None:
    _compare(tied, WAY[way], level, placement, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("case", WAYS, ids=lambda case: case.name)
def test_trains_like_local(
    subject: tuple[ModelServer, dict[object, Trace]],
    case: OffloadCase,
    placement: Placement,
    tmp_path: Path,
) -> None:
    _compare(subject, case, 0, placement, tmp_path)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_random_placements_train_like_local(
    tied: tuple[ModelServer, dict[object, Trace]], data: st.DataObject
) -> None:
    """Any memory for any class and block, at any level, beside any schedule."""
    case = data.draw(st.sampled_from([way for way in WAYS if way.name != "beside split"]))
    memory = st.sampled_from(("device", "host", "disk"))
    mixed = data.draw(st.integers(0, 1000))
    placement = Placement(data.draw(memory), data.draw(memory), data.draw(memory), mixed)
    with tempfile.TemporaryDirectory() as folder:
        _compare(tied, case, data.draw(st.integers(0, 3)), placement, Path(folder))


def _compare(
    subject: tuple[ModelServer, dict[object, Trace]],
    case: OffloadCase,
    level: int,
    placement: Placement,
    folder: Path,
) -> None:
    server, references = subject
    optimizer = ("adamw", "sgd")[(level + len(case.name)) % 2]
    key = (optimizer, case.num_micro_batch)
    if key not in references:
        references[key] = server.run_local(train_locally, *key)
    ranks = server.run(train, case.num_ranks, case, optimizer, level, placement, folder)
    compare(references[key], trace_of(ranks[0], references[key]))
    for what in CLASSES:
        moved = sum(rank.num_bytes_moved.get(what, 0) for rank in ranks)
        is_away = getattr(placement, what) != "device"
        if what == "activations" and case.is_direct:
            is_away = False
        assert moved == 0 or is_away, f"{what} moved"
        assert moved > 0 or not is_away or placement.mixed is not None, f"{what} never moved"
    assert not list(folder.glob("spill")), "files are left behind"
