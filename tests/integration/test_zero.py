"""ZeRO: same loss, gradients and weights as local training at every level, on even and uneven parts,
beside pipelines, waves, recomputation and `split`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.exactness import Trace, compare
from tests.integration.training import prepare_subject
from tests.integration.zero_cases import WAYS, ZeroCase, trace_of, train, train_locally
from tests.ranks import ModelServer, preload

preload("tests.integration.zero_cases")

MODELS = ("tied", "gpt2", "llama", "batch_norm", "mixtral", "lora")


@pytest.fixture(scope="module", params=MODELS)
def subject(request: pytest.FixtureRequest) -> Iterator[tuple[ModelServer, dict[object, Trace]]]:
    with ModelServer(prepare_subject, request.param) as server:
        yield server, {}


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("case", WAYS, ids=lambda case: case.name)
def test_trains_like_local(
    subject: tuple[ModelServer, dict[object, Trace]], case: ZeroCase, level: int
) -> None:
    server, references = subject
    _compare(server, references, case, level)


@pytest.mark.parametrize(
    ("number", "level"),
    [(0, 1), (1, 2), (2, 3), (3, 3), (6, 3), (8, 3), (9, 2), (10, 3), (11, 1), (12, 3), (12, 1)],
)
def test_tied_weights_train_like_local(tied: ModelServer, number: int, level: int) -> None:
    """One model under every kind of way; the table above has the others."""
    _compare(tied, {}, WAYS[number], level)


@pytest.fixture(scope="module")
def tied() -> Iterator[ModelServer]:
    with ModelServer(prepare_subject, "tied") as server:
        yield server


@pytest.mark.slow
@settings(max_examples=25)
@given(data=st.data())
def test_random_placements_train_like_local(tied: ModelServer, data: st.DataObject) -> None:
    """Any parts of any group, at any level, beside any schedule."""
    way = data.draw(st.sampled_from(WAYS))
    number = {4: 2}.get(way.num_ranks, way.num_ranks) if way.stages or "x 2" in way.name else None
    number = number or way.num_ranks
    parts = data.draw(st.lists(st.floats(0, 1), min_size=number, max_size=number))
    total = sum(parts)
    fractions = tuple(part / total for part in parts) if total > 0.01 else ()
    level = data.draw(st.integers(1, 3))
    _compare(tied, {}, replace(way, fractions=fractions), level)


def _compare(
    server: ModelServer, references: dict[object, Trace], case: ZeroCase, level: int
) -> None:
    optimizer = ("adamw", "sgd")[(level + len(case.name)) % 2]
    key = (optimizer, case.num_micro_batch)
    if key not in references:
        references[key] = server.run_local(train_locally, *key)
    ranks = server.run(train, case.num_ranks, case, optimizer, level)
    assert ranks[0].level == level
    compare(references[key], trace_of(ranks[0], references[key]))
