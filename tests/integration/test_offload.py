"""Offload: same loss, gradients and weights as local training whatever lives on the host or on disk,
beside data parallelism, pipelines, waves, recomputation, ZeRO and `split`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.exactness import Trace, compare
from tests.integration.offload_cases import WAYS, OffloadCase, Placement, train
from tests.integration.training import prepare_subject
from tests.integration.zero_cases import trace_of, train_locally
from tests.ranks import ModelServer, preload

preload("tests.integration.offload_cases")

WAY = {case.name: case for case in WAYS}
MODELS = ("tied", "gpt2", "batch_norm")


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
        ("one rank", 0, Placement(states="host")),
        ("DP 2", 0, Placement(states="disk")),
        ("DP 2, uneven", 2, Placement(states="disk")),
        ("DP 2, gpipe", 0, Placement(activations="host")),
        ("2 stages", 0, Placement(activations="disk")),
        ("DP 2, small segments", 0, Placement(activations="disk")),
        ("one rank", 0, Placement(weights="host")),
        ("2 stages", 0, Placement(weights="disk")),
        ("wave", 0, Placement(activations="host", weights="host", states="host")),
        ("DP 2, uneven", 3, Placement("disk", "disk", "device")),
        ("recompute", 0, Placement(activations="disk")),
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
    for what in ("states", "weights", "activations"):
        moved = sum(rank.num_bytes_moved.get(what, 0) for rank in ranks)
        assert (moved > 0) == (getattr(placement, what) != "device"), f"{what}: {moved} bytes"
    assert not list(folder.glob("spill")), "files are left behind"
