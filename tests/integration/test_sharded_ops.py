"""Operations of `split` that contain communication, on 8 real ranks, against the same operation of
torch in one process.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain

import pytest

from tests.integration import sharded_cases as cases
from tests.integration import sharded_products as products
from tests.ranks import run_ranks


def run_all() -> dict[str, float | str]:
    groups = cases.make_groups(cases.GRIDS)
    results: dict[str, float | str] = dict(cases.exchange_cases(groups))
    results["types"] = cases.types_of_tensors(groups)
    results["same bits"] = cases.same_bits(groups)
    worst: dict[str, float] = defaultdict(float)
    families = (
        cases.norms,
        cases.softmaxes,
        cases.embeddings,
        cases.cross_entropies,
        products.experts,
    )
    by_line = chain.from_iterable(
        family(cutting) for cutting in cases.cuttings(groups) for family in families
    )
    on_grids = [
        products.linear_layers(groups),
        products.summa(groups),
        products.random_numbers(),
        products.overlapped(groups),
    ]
    for name, error in chain(by_line, *on_grids):
        worst[name] = max(worst[name], error)
    return results | worst


@pytest.fixture(scope="module")
def answers() -> list[dict[str, float | str]]:
    """What each of the 8 ranks found: one start for all cases."""
    return run_ranks(run_all, cases.NUM_RANKS, timeout_s=100)


@pytest.mark.parametrize("way", ["all_to_all", "peer_to_peer", "even_collectives", "types"])
def test_exchanges_between_random_layouts(answers, way) -> None:
    assert [answer[way] for answer in answers] == [""] * cases.NUM_RANKS


OPERATIONS = [
    "same bits",
    "layer_norm",
    "layer_norm without weight",
    "rms_norm",
    "batch_norm",
    "running statistics",
    "softmax",
    "log_softmax",
    "argmax",
    "embedding",
    "cross_entropy",
    "linear",
    "linear: bytes",
    "summa",
    "summa: bytes",
    "expert_mm",
    "grouped_mm of the same tokens",
    "draws leave the stream alone",
    "backward of dropout",
    "another operation draws other numbers",
    "share that is kept",
    "draws are equal where the value is the same",
    "overlap",
    "overlap: linear layers are one call",
    "overlap: weights begin early",
]


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_equal_local_ones(answers, name) -> None:
    assert max(answer[name] for answer in answers) < 1e-10
