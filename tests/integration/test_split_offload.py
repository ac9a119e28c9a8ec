"""Weights, gradients and optimizer states of `split` parameters at home on the host or on disk: same
losses, gradients and weights as local training, on any grid, with optimizers that work number by
number and with those that look at whole parameters.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale as wh
from models.drawings import Drawings
from models.m6_moe import M6MoE, M6MoEConfig
from tests.exactness import Float64Mode, Trace, compare, local_training
from tests.ranks import preload, run_ranks

preload("tests.integration.test_split_offload")

NUM_STEPS = 3
NUM_SAMPLES = 8
EPS1 = 1e-8
"""The gradient of a key's bias is 0 but for rounding, and torch's own default of 2e-16 divides this
noise by itself: local training in another order of sums differs by 5e-7 then.
"""
OPTIMIZERS = {
    "sgd": lambda pairs: torch.optim.SGD(pairs, lr=0.1, momentum=0.9),
    "adamw": lambda pairs: torch.optim.AdamW(pairs, lr=0.01),
    "adafactor": lambda pairs: torch.optim.Adafactor(pairs, lr=0.01, eps=(EPS1, 1e-3)),
}
EXPERTS = {"mixture": (8, 24), "few experts": (2, 24), "few small experts": (2, 2)}
"""of the models with experts: how many, and their features. Few are cut inside of their matrices, but
for small ones, of which some devices hold none
"""
HOST = {"optimizer": "host", "weights": "host", "gradients": "host"}
DISK = {"optimizer": "disk", "weights": "disk", "gradients": "disk"}


class Layers(nn.Module):
    """Linear layers with their loss; one matrix is tied."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(4))
        self.back = nn.ModuleList(nn.Linear(2 * width, width, bias=False) for _ in range(4))
        self.back[1].weight = self.back[0].weight
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for up, down in zip(self.layers, self.back, strict=True):
            out = out + down(torch.tanh(up(self.norm(out))))
        return (out - x.flip(1)).square().mean(-1).mean()


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "layers":
        return Layers().double()
    number, features = EXPERTS[name]
    config = M6MoEConfig.tiny(num_experts=number)
    return M6MoE(dataclasses.replace(config, width=16, expert_features=features)).double()


def batch(name: str, step: int) -> dict[str, Tensor]:
    if name == "layers":
        generator = torch.Generator().manual_seed(step)
        return {"x": torch.randn(NUM_SAMPLES, 12, generator=generator, dtype=torch.float64)}
    first = step * NUM_SAMPLES
    drawn = Drawings(NUM_STEPS * NUM_SAMPLES).batch(range(first, first + NUM_SAMPLES))
    return {key: each.double() if each.is_floating_point() else each for key, each in drawn.items()}


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to run a model."""

    model: str
    optimizer: str
    offload: Mapping[str, str]
    grid: tuple[int, int, int]
    num_ranks: int = 4
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ranks_without_states: tuple[int, ...] = ()
    """that hold none of the experts, whose states are the ones that are elsewhere"""

    def __str__(self) -> str:
        homes = ", ".join(f"{what} {home}" for what, home in self.offload.items())
        words = [self.model, self.optimizer, str(self.grid), homes, str(dict(self.config) or "")]
        return " ".join(word for word in words if word)


def train(case: Case, folder: str) -> tuple[Any, ...]:
    """Three steps on one rank: losses, first gradients, weights, bytes moved by class."""
    with Float64Mode():
        wh.init(
            {
                "num_micro_batch": 2,
                **case.config,
                "offload": dict(case.offload) or False,
                "run_folder": folder,
            }
        )
        model = build(case.model)
        marks = {"*": wh.split(math.prod(case.grid), grid=case.grid)}
        if case.model in EXPERTS:
            wh.set_default_strategy(wh.replicate(math.prod(case.grid)))
            marks = {"*.experts": wh.split(math.prod(case.grid), grid=case.grid)}
        engine = wh.parallelize(
            wh.annotate(model, marks), batch(case.model, 0), optimizer=OPTIMIZERS[case.optimizer]
        )
        losses = []
        gradients: dict[str, Tensor] = {}
        for step in range(NUM_STEPS):
            losses.append(engine.step(batch(case.model, step)).loss)
            if step == 0:
                gradients = engine.full_gradients()
        state = engine.full_state_dict()
        moved = {what: homes.num_bytes_moved for what, homes in engine._job.home_makers.items()}
        evaluated = engine.evaluate(batch(case.model, 0)).loss
        trained = engine.step(batch(case.model, 0)).loss
        assert evaluated is not None and abs(evaluated - trained) < 1e-10 * abs(trained)
        notes = engine.plan.notes
        engine.close()
        return losses, gradients, state, moved, notes


def locally(case: Case) -> Trace:
    with Float64Mode():
        data = [batch(case.model, step) for step in range(NUM_STEPS)]
        return local_training(build(case.model), data, None, OPTIMIZERS[case.optimizer])


SLOW = [
    Case("layers", "sgd", {"weights": "host"}, (2, 2, 1)),
    Case("layers", "adamw", DISK, (1, 1, 4)),
    Case("layers", "adamw", HOST, (2, 2, 1), config={"recompute": True}),
    Case("layers", "adamw", {"weights": "disk"}, (1, 2, 1)),
    Case("layers", "adafactor", HOST, (1, 4, 1)),
    Case("layers", "adafactor", {"optimizer": "disk"}, (2, 2, 1)),
    Case("mixture", "sgd", HOST, (1, 4, 1)),
    Case("mixture", "adamw", DISK, (1, 4, 1)),
    Case("mixture", "adafactor", HOST, (1, 4, 1), config={"recompute": True}),
    Case("mixture", "adafactor", {"optimizer": "host"}, (1, 4, 1)),
    Case("few experts", "adafactor", {}, (1, 3, 1), 3),
    Case("few small experts", "adafactor", {}, (1, 3, 1), 3),
    Case("few small experts", "adafactor", HOST, (1, 4, 1), ranks_without_states=(2, 3)),
]
CASES = [
    Case("layers", "adamw", HOST, (1, 2, 1), 2),
    *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_trains_like_local(case: Case, tmp_path: Path) -> None:
    ranks = run_ranks(train, case.num_ranks, case, str(tmp_path))
    losses, gradients, state, _, notes = ranks[0]
    reference = locally(case)
    weights = {name: state[name] for name in reference.weights}
    compare(reference, Trace(losses, gradients, weights))
    assert not any("refused" in note or "gives other values" in note for note in notes)
    classes = {"optimizer": "states", "weights": "weights"}
    for asked, what in classes.items():
        if asked in case.offload:
            moved = [rank[3].get(what, 0) for rank in ranks]
            still = case.ranks_without_states if what == "states" else ()
            without = tuple(rank for rank, num_bytes in enumerate(moved) if not num_bytes)
            assert without == still, f"{what} moved: {moved}"
    assert not list(tmp_path.glob("spill")), "files are left behind"
