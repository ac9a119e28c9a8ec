"""Offload: same loss, gradients and weights as local training whatever lives on the host or on disk,
beside data parallelism, pipelines, waves, recomputation, ZeRO and `split`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.exactness import compare
from tests.integration.offload_cases import WAYS, Placement, train
from tests.integration.zero_cases import MODELS, OPTIMIZERS, Servers, trace_of
from tests.pairs import covering_rows
from tests.ranks import preload

preload("tests.integration.offload_cases")

Row = tuple[str, str, int, Placement, str]
"""model, way, level, placement, optimizer"""
WAY = {case.name: case for case in WAYS}
CLASSES = ("states", "weights", "activations", "gradients")
LEVELS = (0, 1, 2, 3)
PLACEMENTS = tuple(Placement(**{what: memory}) for what in CLASSES for memory in ("host", "disk"))
QUICK: tuple[Row, ...] = (
    ("tied", "one rank", 0, Placement("host", updated_on="device"), "adamw"),
    ("tied", "DP 2", 0, Placement(states="disk"), "sgd"),
    ("tied", "2 stages", 0, Placement(activations="disk"), "adamw"),
    ("tied", "DP 2, small segments", 0, Placement(activations="disk"), "sgd"),
    ("tied", "one rank", 0, Placement(weights="host"), "adamw"),
    ("tied", "wave", 0, Placement("host", "host", "host"), "sgd"),
    ("tied", "DP 2, uneven", 3, Placement("disk", "disk"), "adamw"),
    ("tied", "beside split", 0, Placement("disk", activations="host"), "sgd"),
    ("tied", "DP 2", 0, Placement("host", ahead=True), "adamw"),
    ("tied", "2 stages", 0, Placement("disk", "host", ahead=True), "sgd"),
)
TOGETHER: tuple[Row, ...] = (
    ("mixtral", "DP 2", 0, Placement("disk", updated_on="device"), "adamw"),
    ("lora", "DP 2, uneven", 2, Placement("host", gradients="disk"), "adamw"),
    ("llama", "2 stages x 2", 3, Placement("disk", "disk", "disk", gradients="disk"), "adamw"),
    ("resnet", "wave", 0, Placement("host", "disk", "host", gradients="host"), "sgd"),
    ("gpt2", "DP 2, uneven", 1, Placement("disk", updated_on="host", ahead=True), "adamw"),
    ("mixtral", "DP 2, gloo", 0, Placement("host", ahead=True), "sgd"),
    ("lora", "2 stages x 2", 2, Placement("host", gradients="host", ahead=True), "adamw"),
    ("llama", "recompute", 0, Placement("host", "host", ahead=True), "adamw"),
    ("resnet", "wave", 0, Placement("host", ahead=True), "sgd"),
    ("tied", "zero-bubble", 0, Placement("disk", "host", ahead=True), "adamw"),
    ("tied", "beside split", 0, Placement("host", "host", ahead=True), "adamw"),
)
"""several classes at once, another place of the update than the planner's, or another time"""


def _is_possible(row: Row) -> bool:
    """Gradients of a `split` stage are only elsewhere with its weights."""
    _, way, _, placement, _ = row
    return way != "beside split" or placement.gradients == "device"


def _slow_rows() -> list[Row]:
    """Rows until every two of model, way, level, placement and optimizer have met."""
    every = filter(_is_possible, product(MODELS, WAY, LEVELS, PLACEMENTS, OPTIMIZERS))
    found = [*TOGETHER, *covering_rows(list(every), (*QUICK, *TOGETHER))]
    return sorted(found, key=lambda row: MODELS.index(row[0]))


def _ids(rows: tuple[Row, ...] | list[Row]) -> list[str]:
    return [", ".join(map(str, row)) for row in rows]


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with Servers() as found:
        yield found


@pytest.mark.parametrize("row", QUICK, ids=_ids(QUICK))
def test_tied_weights_train_like_local(servers: Servers, row: Row, tmp_path: Path) -> None:
    _compare(servers, row, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("row", _slow_rows(), ids=_ids(_slow_rows()))
def test_trains_like_local(servers: Servers, row: Row, tmp_path: Path) -> None:
    _compare(servers, row, tmp_path)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_random_placements_train_like_local(servers: Servers, data: st.DataObject) -> None:
    """Any memory for any class and block, of any model, at any level, beside any schedule."""
    way = data.draw(st.sampled_from(tuple(WAY)))
    memory = st.sampled_from(("device", "host", "disk"))
    mixed = data.draw(st.integers(0, 1000))
    placement = Placement(data.draw(memory), data.draw(memory), data.draw(memory), mixed)
    model = data.draw(st.sampled_from(MODELS))
    level = data.draw(st.sampled_from(LEVELS))
    optimizer = data.draw(st.sampled_from(tuple(OPTIMIZERS)))
    with tempfile.TemporaryDirectory() as folder:
        _compare(servers, (model, way, level, placement, optimizer), Path(folder))


def _compare(servers: Servers, row: Row, folder: Path) -> None:
    model, way, level, placement, optimizer = row
    case = WAY[way]
    reference = servers.reference(model, optimizer, case.num_micro_batch)
    ranks = servers[model].run(train, case.num_ranks, case, optimizer, level, placement, folder)
    compare(reference, trace_of(ranks[0], reference))
    for what in CLASSES:
        moved = sum(rank.num_bytes_moved.get(what, 0) for rank in ranks)
        is_away = getattr(placement, what) != "device"
        if what == "activations" and case.is_direct:
            is_away = False
        assert moved == 0 or is_away, f"{what} moved"
        assert moved > 0 or not is_away or placement.mixed is not None, f"{what} never moved"
    assert any(rank.num_updates for rank in ranks) == placement.ahead
    assert not list(folder.glob("spill")), "files are left behind"
