"""A layer that a team of ranks splits to be timed (`calibration/split_layers.py`) computes what the
layer alone does: results, and gradients of what enters it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import whale as wh
from tests import split_models
from tests.ranks import preload, run_ranks
from whale import api
from whale.calibration.layers import TimedRegion, layer_groups
from whale.calibration.split_layers import SplitRegion, make_team, teams_of
from whale.capture.batch import read_batch
from whale.capture.prepare import CapturedModel
from whale.capture.sample_states import batch_dim
from whale.cluster.cluster import Cluster
from whale.costs.layer_times import LayerRegion
from whale.distributed.ranks import Ranks
from whale.distributed.transport import Transport
from whale.plans.grid import Grid
from whale.plans.layout import Layout

preload("tests.integration.test_split_layers")

SAMPLES = 3
"""which two ranks cannot share evenly"""
TOLERANCE = 1e-10
PRODUCTS = ("qkv.weight", "out.weight", "up.weight", "down.weight", "gate_up.weight")
"""names of weights that a grid cuts"""


def prepared_model(name: str) -> CapturedModel:
    model, batch = split_models.make(name, 4)
    layout, tensors = read_batch(batch)
    return api._prepare(model, layout, tensors, None, wh.Config(), "cpu")


def errors_of_layers(name: str) -> dict[str, float]:
    """Layer -> how far results and gradients are from those of the layer alone."""
    prepared = prepared_model(name)
    ranks = Ranks("cpu")
    cluster = Cluster.uniform(ranks.num_ranks, "CPU")
    transport = Transport(ranks, ())
    team = make_team(teams_of(cluster, ranks.num_ranks), cluster, ranks, transport)
    assert team is not None
    found = {}
    for group in layer_groups(prepared.captured):
        split = SplitRegion(prepared, group.region, team, ranks)
        alone = TimedRegion(prepared.captured, group.region, ranks)
        found[group.modules[0]] = _error(prepared, group.region, split, alone)
    return found


def _error(
    prepared: CapturedModel, region: LayerRegion, split: SplitRegion, alone: TimedRegion
) -> float:
    torch.manual_seed(1)
    values = dict(zip(alone._edges.entering, alone._inputs(SAMPLES), strict=True))
    results = dict(zip(alone._edges.results, alone._module(*values.values()), strict=True))
    program = split.program
    parts = {}
    for node in (*program.received, *program.inputs):
        part = _part(values[node].detach(), split.input_layout(node, SAMPLES))
        parts[node] = part.requires_grad_(values[node].requires_grad)
    modules = split.modules(SAMPLES)
    products = [name for name in modules.sharding.stored if name.endswith(PRODUCTS)]
    assert all(modules.sharding.stored[name].sharded for name in products), "nothing is split"
    own = dict(zip(program.sent, modules(SAMPLES)(*parts.values()), strict=True))
    symbol = prepared.captured.batch_symbol
    dims = {node: batch_dim(node, symbol) for node in (*program.sent, *program.received)}
    error = max(_difference(own[node], results[node], dims[node]) for node in program.sent)
    by_samples = [node for node in program.sent if dims[node] is not None]
    trained = [node for node in program.received if values[node].requires_grad]
    if by_samples and trained:
        of_parts = _gradients([own[node] for node in by_samples], [parts[n] for n in trained])
        of_whole = _gradients([results[node] for node in by_samples], [values[n] for n in trained])
        for node, part, whole in zip(trained, of_parts, of_whole, strict=True):
            error = max(error, _difference(part, whole, dims[node]))
    return error


def _part(value: Tensor, layout: Layout) -> Tensor:
    """What this rank holds of a value."""
    grid = _grid()
    for dim in range(value.dim()):
        ranges = layout.ranges(grid, dist.get_rank(), dim)
        value = torch.cat([value.narrow(dim, a, b - a) for a, b in ranges], dim)
    return value.clone()


def _grid() -> Grid:
    return Grid(1, dist.get_world_size(), 1)


def _gradients(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    total = sum((result * result).sum() for result in results)
    assert isinstance(total, Tensor)
    return list(torch.autograd.grad(total, inputs))


def _difference(own: Tensor, whole: Tensor, dim: int | None) -> float:
    """Largest difference to the whole value, whose samples the ranks hold in order."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own.detach())
    found = everyone[0] if dim is None else torch.cat(everyone, dim)
    whole = whole.detach()
    assert found.shape == whole.shape
    return float((found - whole).abs().max() / whole.abs().max().clamp_min(1e-30))


@pytest.mark.parametrize(
    "name",
    [
        "gpt",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("mlp", "swiglu", "mixture", "convolutions")
        ),
    ],
)
def test_a_split_layer_computes_what_it_does_alone(name: str) -> None:
    answers = run_ranks(errors_of_layers, 2, name)
    assert answers[0] and answers[0] == answers[1]
    assert max(answers[0].values()) < TOLERANCE, answers[0]
