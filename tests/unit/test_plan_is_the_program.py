"""A saved plan is the program: another cost model, another solver and another scheduler change
nothing of what runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

import whale as wh
from tests.unit.test_plan_files import PLANS, pipeline
from whale.plans.moves import weight_uses
from whale.plans.plan import Plan
from whale.plans.revise import revise
from whale.plans.samples import SampleMap
from whale.plans.shards import Shards

pytestmark = pytest.mark.usefixtures("fresh_session")


DECIDES = (
    "whale.plans.samples.divide",
    "whale.plans.samples.best_shares",
    "whale.plans.samples.shares_of_series",
    "whale.plans.layout.Layout.granules",
    "whale.scheduling.build",
    "whale.planning.schedules.fastest_schedule",
    "whale.planning.schedules.lean_schedule",
    "whale.planning.recompute.cut_regions",
    "whale.planning.recompute.cheap_regions",
    "whale.planning.workload.Workload.times",
    "whale.planning.zero_blocks.ends_at_rows",
    "whale.planning.zero_blocks.balanced_places",
    "whale.planning.zero.fractions_by_memory",
    "whale.planning.offload_account.OffloadAccount.homes",
)
"""what decides when a plan is made"""


def refuse(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("somebody decides again")


def program(plan: Plan) -> list[Any]:
    """What every device does: actions, samples, and the order in which it uses blocks of weights."""
    found: list[Any] = []
    for view in plan.by_template:
        found += [view.schedule.orders, SampleMap.planned(view).num_by_rank()]
        found += [weight_uses(view, device) for device in range(len(view.virtual_devices))]
    return found


@pytest.mark.parametrize("make", PLANS)
def test_who_does_what_is_read(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples, actions, shards and figures of a loaded plan need nothing that decides."""
    wh.init()
    made = make()
    actions = program(made)
    shards = [Shards(made).of(name) for name in made.holders]
    step_s = wh.simulate(made).step_s
    made.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    for name in DECIDES:
        monkeypatch.setattr(name, refuse)
    assert program(loaded) == actions
    assert loaded.blocks == made.blocks
    assert [Shards(loaded).of(name) for name in loaded.holders] == shards
    assert wh.simulate(loaded).step_s == step_s


def test_a_part_that_plans_do_not_have_is_refused() -> None:
    """Exchanging it would change nothing, without a word."""
    made = pipeline()
    assert revise(made, notes=("other",)).notes == ("other",)
    for name in ("device_second", "sums_s", "templates"):
        with pytest.raises(TypeError, match=f"a plan has no part '{name}'"):
            revise(made, **{name: ()})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def test_training_follows_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine from a saved plan runs its actions on its samples and recomputes its regions, with
    everything that decides gone.
    """
    config = {"num_micro_batch": 3, "recompute": True, "schedule": "gpipe"}
    wh.init(config)
    batch = torch.randn(7, 8)
    made = wh.plan(Net(), batch, cluster=1, config=config)
    assert made.stages[0].recomputed
    made.save(tmp_path / "plan.json")
    for name in DECIDES:
        monkeypatch.setattr(name, refuse)
    engine = wh.parallelize(
        Net(),
        batch,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        plan=tmp_path / "plan.json",
    )
    engine.step(batch)
    (executor,) = engine._shapes.executors()
    program = executor.program
    assert tuple(program.actions) == made.schedule.orders[0]
    assert list(program.samples) == [(0, 3), (3, 5), (5, 7)]
    modules = dict(program.chunks[0].module_for(3).named_modules())
    regions = [name for name in modules if name.startswith("recomputed_") and "." not in name]
    assert len(regions) == len(made.stages[0].recomputed)
