"""ZeRO: same loss, gradients and weights as local training at every level, on even and uneven parts,
beside pipelines, waves, recomputation and `split`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.exactness import compare
from tests.integration.zero_cases import MODELS, OPTIMIZERS, WAYS, Servers, trace_of, train
from tests.pairs import covering_rows
from tests.ranks import preload

preload("tests.integration.zero_cases")

LEVELS = (1, 2, 3)
Row = tuple[str, str, int, str]
"""model, way, level, optimizer"""
WAY = {case.name: case for case in WAYS}
QUICK: tuple[Row, ...] = (
    ("tied", "DP 2", 1, "adamw"),
    ("tied", "DP 3, 2 micro-batches", 2, "sgd"),
    ("tied", "DP 2, uneven", 3, "sgd"),
    ("tied", "DP 3, one holds nothing", 3, "adamw"),
    ("tied", "2 stages x 2, uneven", 3, "sgd"),
    ("tied", "wave x 2", 3, "sgd"),
    ("tied", "zero-bubble x 2", 2, "sgd"),
    ("tied", "recompute", 3, "adamw"),
    ("tied", "beside split", 1, "sgd"),
    ("tied", "by gloo, uneven", 3, "adamw"),
    ("tied", "by gloo, uneven", 1, "sgd"),
)
"""one model under every kind of way; every second row is for `make test`"""


def _slow_rows() -> list[Row]:
    """Rows until every model has met every way, and both every level and optimizer."""
    found = covering_rows(list(product(MODELS, WAY, LEVELS, OPTIMIZERS)), QUICK)
    return sorted(found, key=lambda row: MODELS.index(row[0]))


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with Servers() as found:
        yield found


def _ids(rows: Any) -> list[str]:
    return [", ".join(map(str, row)) for row in rows]


@pytest.mark.parametrize("row", QUICK, ids=_ids(QUICK))
def test_tied_weights_train_like_local(servers: Servers, row: Row) -> None:
    _compare(servers, row)


@pytest.mark.slow
@pytest.mark.parametrize("row", _slow_rows(), ids=_ids(_slow_rows()))
def test_trains_like_local(servers: Servers, row: Row) -> None:
    _compare(servers, row)


@pytest.mark.slow
@settings(max_examples=25)
@given(data=st.data())
def test_random_placements_train_like_local(servers: Servers, data: st.DataObject) -> None:
    """Any parts of any group, of any model, at any level, beside any schedule."""
    row = tuple(
        data.draw(st.sampled_from(tuple(each))) for each in (MODELS, WAY, LEVELS, OPTIMIZERS)
    )
    way = WAY[row[1]]
    number = way.num_ranks
    if way.stages or "x 2" in way.name:
        number = 2  # ranks that run the same stage
    parts = data.draw(st.lists(st.floats(0, 1), min_size=number, max_size=number))
    total = sum(parts)
    fractions = tuple(part / total for part in parts) if total > 0.01 else ()
    _compare(servers, row, fractions)


def _compare(servers: Servers, row: Row, fractions: tuple[float, ...] | None = None) -> None:
    model, way, level, optimizer = row
    case = WAY[way] if fractions is None else replace(WAY[way], fractions=fractions)
    reference = servers.reference(model, optimizer, case.num_micro_batch)
    ranks = servers[model].run(train, case.num_ranks, case, optimizer, level)
    assert ranks[0].level == level
    compare(reference, trace_of(ranks[0], reference))
