"""`split` is exact for every kind of model on every grid: the table of models x
factorisations of the number of devices.

All sizes are such that most numbers of devices do not divide them: heads, classes, experts,
samples. Rows cover every pair of model, number of devices and side of the grid; most are slow.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.exactness import compare
from tests.integration.test_split import Case, Servers, everything, merged, servers, train_on_rank  # noqa: F401  (a fixture)
from tests.pairs import covering_rows
from tests.ranks import preload
from whale.planning.grids import grid_shapes

preload("torch", "transformers", "whale", "tests.integration.test_split_grids")

MODELS = (
    "chain",
    "mlp",
    "gpt",
    "swiglu",
    "classifier",
    "mixture",
    "gpt2",
    "bert",
    "llama",
    "mixtral",
    "vit",
)
QUICK = (("gpt", 4, 2, 2, 1), ("mixture", 4, 1, 1, 4))
HEADS = {"resnet": ("resnet", "classifier")}
"""model -> features that are data parallel, the head that is split"""


Row = tuple[str, int, int, int, int]
"""model, devices, and the sides of the grid on x, y and z"""


def _rows() -> list[Any]:
    """Quick rows, then slow ones until every pair of values occurs (`tests/pairs.py`)."""
    every: list[Row] = []
    for model, num_devices in product(MODELS, (4, 6, 8)):
        for grid in grid_shapes(num_devices):
            every.append((model, num_devices, *grid))
    rows = [*QUICK, *covering_rows(every, QUICK)]
    found = []
    for row in sorted(rows, key=lambda row: MODELS.index(row[0])):
        model, num_devices, *grid = row
        case = Case(model, num_devices, everything(num_devices, tuple(grid)))
        marks = () if row in QUICK else (pytest.mark.slow,)
        found.append(pytest.param(case, marks=marks, id=f"{model}-{tuple(grid)}"))
    return found


def check(servers: Servers, case: Case, timeout_s: float = 110) -> None:  # noqa: F811
    server, local = servers.of(case.model)
    ranks = server.run(train_on_rank, case.num_ranks, case, timeout_s=timeout_s)
    compare(local, merged(ranks, local.weights))


@pytest.mark.parametrize("case", _rows())
def test_every_grid(servers: Servers, case: Case) -> None:  # noqa: F811
    check(servers, case)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [4, 6, 8])
def test_head_of_a_resnet(servers: Servers, num_devices: int) -> None:  # noqa: F811
    """Features data parallel with batch statistics over all devices, the classifier split."""
    check(
        servers,
        Case(
            "resnet",
            num_devices,
            {"resnet": ("replicate", num_devices), "classifier*": ("split", num_devices, None)},
        ),
    )


UNEVEN = ("V100-32GB", "P100", "P100", "P100")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "swiglu", "mixture", "llama", "mixtral"])
def test_uneven_shards(servers: Servers, model: str) -> None:  # noqa: F811
    for grid in ((1, 2, 1), (1, 1, 2)):
        check(servers, Case(model, 2, everything(2, grid), kinds=("CPU", "A100-40GB")))
    check(servers, Case(model, 4, everything(4, (2, 2, 1)), kinds=UNEVEN))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "mixture", "mixtral"])
def test_more_devices_than_heads_experts_or_samples(servers: Servers, model: str) -> None:  # noqa: F811
    """Zero-size shards: 8 columns for 3 heads or 5 experts, 8 rows for 6 samples."""
    for grid in ((1, 8, 1), (1, 1, 8)):
        check(servers, Case(model, 8, everything(8, grid)))


@pytest.mark.slow
@pytest.mark.parametrize("case", [
    Case("llama", 4, {"model.layers.[01]": ("split", 2, None), "model.layers.[23]": ("split", 2, (1, 2, 1))}, {"num_micro_batch": 3}),
    Case("mixtral", 4, {"model.layers.[01]": ("split", 2, None), "model.layers.[23]": ("split", 2, (1, 1, 2))}, {"num_micro_batch": 2}),
    Case("bert", 8, {"bert.encoder.layer.[01]": ("split", 2, None), "bert.encoder.layer.[23]": ("split", 2, None)}, {"num_micro_batch": 2}),
    Case("mixtral", 8, {"model.layers.[01]": ("split", 2, None), "model.layers.[23]": ("split", 2, None)}, {"num_micro_batch": 2}),
], ids=lambda case: f"{case.model}-{case.num_ranks}")  # fmt: skip
def test_pipelines_of_split_stages(servers: Servers, case: Case) -> None:  # noqa: F811
    """8 ranks are 2 replicas x 2 stages x split over 2."""
    check(servers, case)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("model", "side"), [("mlp", 3), ("gpt", 3), ("mlp", 4)])
def test_large_cubes(servers: Servers, model: str, side: int) -> None:  # noqa: F811
    """27 and 64 ranks."""
    check(servers, Case(model, side**3, everything(side**3, (side, side, side))), timeout_s=500)
