"""ZeRO: same loss, gradients and weights as local training at every level, on even and uneven parts,
beside pipelines, waves, recomputation and `split`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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
    optimizer = ("adamw", "sgd")[(level + len(case.name)) % 2]
    key = (optimizer, case.num_micro_batch)
    if key not in references:
        references[key] = server.run_local(train_locally, *key)
    ranks = server.run(train, case.num_ranks, case, optimizer, level)
    assert ranks[0].level == level
    compare(references[key], trace_of(ranks[0], references[key]))
