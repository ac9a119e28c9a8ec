"""Optimizers that look at whole matrices, on grids and on uneven ZeRO; states and checkpoints that
change their places.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale as wh
from tests.exactness import Float64Mode, Trace, compare, local_training, mean_square
from tests.ranks import run_ranks
from whale import api
from whale.capture.batch import read_batch
from whale.emulation.emulation import platform_of_this_job
from whale.model_planner import ModelPlanner
from whale.planning.zero_blocks import Sharing, balanced_places, blocks_of, matrix_work
from whale.runtime.compressed_states import CompressedStates
from whale.session import ranks_of_job

WIDTH = 12


class Matrices(nn.Module):
    """Layers without biases: Muon takes matrices only."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (WIDTH, *(2 * WIDTH, WIDTH, 3 * WIDTH, WIDTH) * 2)
        self.layers = nn.ModuleList(
            nn.Linear(a, b, bias=False) for a, b in zip(sizes, sizes[1:], strict=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def build() -> nn.Module:
    torch.manual_seed(0)
    return Matrices().double()


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, WIDTH, generator=generator, dtype=torch.float64)


def muon(pairs: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(pairs, lr=0.01)


def adafactor(pairs: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(pairs, lr=0.01)


class Together(torch.optim.SGD):
    """Scales every gradient by the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for parameter in parameters:
            parameter.grad /= norm
        return super().step(closure)


def together(pairs: Any) -> torch.optim.Optimizer:
    return Together(pairs, lr=0.01)


OPTIMIZERS = {
    "muon": muon,
    "adafactor": adafactor,
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}
GRIDS = {"1-D": (1, 4, 1), "2-D": (2, 2, 1), "z": (1, 1, 4)}


def train(
    optimizer: str,
    level: int,
    grid: tuple[int, int, int] | None,
    fractions: tuple[float, ...] = (),
) -> tuple[Any, ...]:
    """Three steps; (losses, gradients, state, work of this rank's updates). `fractions`: of what
    every rank has memory for, under ZeRO; even without.
    """
    with Float64Mode():
        config = {"zero": level, "num_micro_batch": 2}
        wh.init(config)
        model = build()
        if grid is not None:
            wh.annotate(model, {"layers*": wh.split(math.prod(grid), grid=grid)})
        given = uneven(model, optimizer, config, fractions) if fractions else {}
        engine = wh.parallelize(
            model, batch(0), optimizer=OPTIMIZERS[optimizer], loss=mean_square, **given
        )
        losses = []
        gradients: dict[str, Tensor] = {}
        for step in range(3):
            losses.append(engine.step(batch(step)).loss)
            if step == 0:
                gradients = engine.full_gradients()
        held = engine.optimizer.param_groups[0]["params"] if engine.optimizer is not None else []
        work = sum(matrix_work(tuple(parameter.shape)) for parameter in held)
        return losses, gradients, engine.full_state_dict(), work


def uneven(
    model: nn.Module, optimizer: str, config: dict[str, Any], fractions: tuple[float, ...]
) -> dict[str, Any]:
    """The capture and a plan in which these parts of the model are on the ranks, as if their memories
    were so different.
    """
    layout, tensors = read_batch(batch(0))
    settings = wh.Config(config)
    prepared = api._prepare(model, layout, tensors, mean_square, settings, "cpu")
    cluster = platform_of_this_job(ranks_of_job()).cluster(None)
    factory = OPTIMIZERS[optimizer]
    planner = ModelPlanner(model, cluster, settings, layout.batch_size, optimizer=factory)
    made = planner.plan(prepared, {})
    sharing = Sharing.of_plan(made, prepared.captured, updates_whole=True)
    groups = {block.ranks for block in made.blocks}
    blocks = blocks_of(sharing, dict.fromkeys(groups, fractions))
    return {"prepared": prepared, "plan": dataclasses.replace(made, blocks=blocks)}


def locally(optimizer: str) -> Trace:
    with Float64Mode():
        return local_training(
            build(), [batch(step) for step in range(3)], mean_square, OPTIMIZERS[optimizer]
        )


@pytest.mark.parametrize(
    ("optimizer", "num_ranks", "level", "grid"),
    [
        pytest.param("muon", 3, 3, None, marks=pytest.mark.slow),
        ("adafactor", 2, 1, None),
        pytest.param("muon", 4, 2, None, marks=pytest.mark.slow),
        pytest.param("adafactor", 3, 3, None, marks=pytest.mark.slow),
        ("muon", 4, 0, "2-D"),
        pytest.param("adafactor", 4, 0, "2-D", marks=pytest.mark.slow),
        pytest.param("muon", 4, 0, "1-D", marks=pytest.mark.slow),
        pytest.param("adafactor", 4, 0, "1-D", marks=pytest.mark.slow),
        pytest.param("muon", 4, 0, "z", marks=pytest.mark.slow),
        pytest.param("adafactor", 4, 0, "z", marks=pytest.mark.slow),
    ],
)
def test_matrix_optimizers_train_like_local(
    optimizer: str, num_ranks: int, level: int, grid: str | None
) -> None:
    ranks = run_ranks(train, num_ranks, optimizer, level, GRIDS[grid] if grid else None)
    losses, gradients, state, _ = ranks[0]
    compare(locally(optimizer), Trace(losses, gradients, state))
    work = [rank[3] for rank in ranks]
    largest = max(matrix_work(tuple(p.shape)) for p in build().parameters())
    assert max(work) <= max(1.1 * sum(work) / len(work), largest)


@pytest.mark.parametrize(
    ("optimizer", "level", "fractions"),
    [
        ("muon", 3, (0.6, 0.0, 0.4)),
        pytest.param("muon", 1, (0.2, 0.8), marks=pytest.mark.slow),
        pytest.param("adafactor", 3, (0.15, 0.55, 0.3), marks=pytest.mark.slow),
        pytest.param("adafactor", 2, (0.7, 0.0, 0.3), marks=pytest.mark.slow),
    ],
)
def test_matrix_optimizers_train_like_local_on_uneven_parts(
    optimizer: str, level: int, fractions: tuple[float, ...]
) -> None:
    ranks = run_ranks(train, len(fractions), optimizer, level, None, fractions)
    losses, gradients, state, _ = ranks[0]
    compare(locally(optimizer), Trace(losses, gradients, state))
    for fraction, (*_, work) in zip(fractions, ranks, strict=True):
        assert (work > 0) == (fraction > 0), "who has no memory updates nothing"


@pytest.mark.parametrize("num_places", [2, 3, 4, 8])
def test_work_of_holders_is_balanced(num_places: int) -> None:
    """GPT of 24 layers: the slowest holder's Newton-Schulz work."""
    width = 1024
    shapes = {}
    for layer in range(24):
        shapes[f"{layer}.qkv"] = (3 * width, width)
        shapes[f"{layer}.out"] = (width, width)
        shapes[f"{layer}.up"] = (4 * width, width)
        shapes[f"{layer}.down"] = (width, 4 * width)
    places = balanced_places(shapes, [1 / num_places] * num_places)
    work = [0.0] * num_places
    for name, place in places.items():
        work[place] += matrix_work(shapes[name])
    assert max(work) <= 1.1 * sum(work) / num_places


def train_with(optimizer: str, level: int) -> None:
    wh.init({"zero": level})
    factory = together if optimizer == "together" else OPTIMIZERS[optimizer]
    wh.parallelize(build(), batch(0), optimizer=factory, loss=mean_square)


def test_an_optimizer_that_looks_at_other_parameters_is_refused() -> None:
    with pytest.raises(Exception, match="Together looks at other parameters"):
        run_ranks(train_with, 2, "together", 3)


# ---- checkpoints


def save(folder: str, level: int, optimizer: str) -> list[float]:
    wh.init({"zero": level})
    engine = wh.parallelize(build(), batch(0), optimizer=OPTIMIZERS[optimizer], loss=mean_square)
    for step in range(2):
        engine.step(batch(step))
    engine.save(folder).wait()
    return [engine.step(batch(step)).loss for step in (2, 3)]


def load(folder: str, level: int, optimizer: str, grid: tuple[int, int, int] | None) -> list[float]:
    wh.init({"zero": level})
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    if grid is not None:
        wh.annotate(model, {"layers*": wh.split(math.prod(grid), grid=grid)})
    engine = wh.parallelize(model, batch(0), optimizer=OPTIMIZERS[optimizer], loss=mean_square)
    assert engine.load(folder) == 2
    return [engine.step(batch(step)).loss for step in (2, 3)]


@pytest.mark.parametrize(
    ("optimizer", "saved", "loaded"),
    [
        ("adamw", (2, 3), (3, 1, None)),
        pytest.param("adamw", (3, 1), (1, 0, None), marks=pytest.mark.slow),
        pytest.param("adamw", (4, 2), (4, 0, (2, 2, 1)), marks=pytest.mark.slow),
        ("muon", (3, 3), (2, 0, None)),
        pytest.param("muon", (2, 3), (4, 0, (2, 2, 1)), marks=pytest.mark.slow),
        pytest.param("adafactor", (3, 2), (4, 0, (1, 4, 1)), marks=pytest.mark.slow),
    ],
)
def test_checkpoints_load_under_any_other_placement(
    tmp_path: Path, optimizer: str, saved: tuple[int, int], loaded: tuple[int, int, Any]
) -> None:
    before = run_ranks(save, saved[0], str(tmp_path), saved[1], optimizer)
    after = run_ranks(load, loaded[0], str(tmp_path), loaded[1], optimizer, loaded[2])
    assert after[0] == pytest.approx(before[0], rel=1e-10)


# ---- states in fewer bits


def adamw_like(num_steps: int, kind: str) -> tuple[Tensor, int]:
    """(weights after some steps, bytes of compressed states)"""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(64, 48))
    optimizer = torch.optim.AdamW([parameter], lr=0.01)
    states = CompressedStates(optimizer, kind) if kind != "fp32" else None
    for step in range(num_steps):
        parameter.grad = torch.randn(64, 48, generator=torch.Generator().manual_seed(step))
        if states is None:
            optimizer.step()
        else:
            states.step()
    return parameter.detach(), states.num_bytes if states is not None else 0


@pytest.mark.parametrize(
    ("kind", "bytes_per_number", "tolerance"), [("bf16", 2, 0.02), ("int8", 1, 0.2)]
)
def test_states_in_fewer_bits_take_less_and_train_nearly_alike(
    kind: str, bytes_per_number: float, tolerance: float
) -> None:
    exact, _ = adamw_like(10, "fp32")
    start, _ = adamw_like(0, "fp32")
    rounded, num_bytes = adamw_like(10, kind)
    assert not torch.equal(exact, rounded)
    moved = (exact - start).norm()
    assert (rounded - exact).norm() <= tolerance * moved
    assert num_bytes <= 2 * 64 * 48 * (bytes_per_number + 4 / 256)


def test_states_in_fewer_bits_of_an_optimizer_without_states_are_refused() -> None:
    with pytest.raises(ValueError, match="this optimizer has none"):
        wh.plan(
            build(),
            batch(0),
            cluster=1,
            config={"optimizer_state": "int8"},
            optimizer=lambda pairs: torch.optim.SGD(pairs, lr=0.1),
            loss=mean_square,
        )
    made = wh.plan(
        build(),
        batch(0),
        cluster=1,
        config={"optimizer_state": "int8"},
        optimizer=OPTIMIZERS["adamw"],
        loss=mean_square,
    )
    assert any("not those of local training" in note for note in made.notes)
