"""`split` is exact (DESIGN rule 1) for every kind of model on every grid: the table of models x
factorisations of the number of devices.

All sizes are such that most numbers of devices do not divide them: heads, classes, experts,
samples. Most rows are slow.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.exactness import compare
from tests.integration.test_split import Case, Servers, everything, merged, servers, train_on_rank  # noqa: F401  (a fixture)
from tests.ranks import preload
from whale.planning.split_stages import grid_shapes

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
FAST = {("gpt", (2, 2, 1)), ("mixture", (1, 1, 4))}
HEADS = {"resnet": ("resnet", "classifier")}
"""model -> features that are data parallel, the head that is split"""


def rows(num_devices: int) -> list[Any]:
    found = []
    for model in MODELS:
        for grid in grid_shapes(num_devices):
            marks = () if (model, grid) in FAST else (pytest.mark.slow,)
            found.append(
                pytest.param(
                    Case(model, num_devices, everything(num_devices, grid)),
                    marks=marks,
                    id=f"{model}-{grid}",
                )
            )
    return found


def check(servers: Servers, case: Case, timeout_s: float = 110) -> None:  # noqa: F811
    server, local = servers.of(case.model)
    ranks = server.run(train_on_rank, case.num_ranks, case, timeout_s=timeout_s)
    compare(local, merged(ranks, local.weights))


@pytest.mark.parametrize("case", [*rows(4), *rows(6), *rows(8)])
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
    """On 8 ranks: 2 replicas x 2 stages x split over 2."""
    check(servers, case)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("model", "side"), [("mlp", 3), ("gpt", 3), ("mlp", 4)])
def test_large_cubes(servers: Servers, model: str, side: int) -> None:  # noqa: F811
    """27 and 64 ranks."""
    check(servers, Case(model, side**3, everything(side**3, (side, side, side))), timeout_s=500)
