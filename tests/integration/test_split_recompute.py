"""Regions that are computed again in backward, on a grid: exact, and what was gathered for them is gathered again, not kept."""

from __future__ import annotations

from typing import Any

import pytest

from tests.exactness import compare
from tests.integration.test_split import Case, Subject, everything, merged, prepare_model, train_locally, train_on_rank
from tests.ranks import ModelServer, preload
from whale.lowering.exchange import sent

preload("tests.integration.test_split", "tests.integration.test_split_recompute")


def train_and_count(subject: Subject, case: Case) -> tuple[Any, int]:
    """(what training gave, messages that this rank sent)."""
    sent.reset()
    return train_on_rank(subject, case), sent.num_messages


@pytest.mark.parametrize("grid", [(1, 2, 1), (1, 1, 2)], ids=["weights cut", "weights gathered"])
def test_recomputed_blocks_are_exact_and_gather_again(grid: tuple[int, int, int]) -> None:
    with ModelServer(prepare_model, "chain") as server:
        reference = server.run_local(train_locally)
        kept = server.run(train_and_count, 2, Case("chain", 2, everything(2, grid)))
        again = server.run(train_and_count, 2, Case("chain", 2, everything(2, grid), {"recompute": ["blocks.*"]}))
    for results in (kept, again):
        compare(reference, merged([trained for trained, _ in results], reference.weights))
    assert again[0][1] > kept[0][1], "what was gathered for a region is gathered again in its backward"
