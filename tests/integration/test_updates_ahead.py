"""Updates on the host under the next forward, on real ranks: the numbers of local training whatever
is done between steps, a forward that waits for each block and for no other, and clear ends.

Updates are held back until somebody waits for them (`held_updates.py`), so that whoever does not
wait finds old weights. The table of `test_offload.py` has models and plans; here is what a run does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale as wh
from tests.exactness import mean_square
from tests.integration.held_updates import held_updates
from tests.ranks import ModelServer, RankError, preload
from whale import api
from whale.capture.batch import read_batch
from whale.capture.prepare import CapturedModel
from whale.emulation.emulation import platform_of_this_job
from whale.model_planner import ModelPlanner
from whale.plans.revise import revise
from whale.runtime.engine import Engine
from whale.session import ranks_of_job

preload("tests.integration.test_updates_ahead")

WIDTH = 6
NUM_LAYERS = 4
NUM_SAMPLES = 8
MAX_NORM = 0.05
"""below the norm of these gradients"""
DATA = {"strategy": "data"}
STATES = {**DATA, "offload": {"optimizer": "host"}}
WEIGHTS = {**DATA, "offload": {"optimizer": "host", "weights": "host"}}
TWO_STAGES = {"num_task_graph": 2, "num_micro_batch": 2, "offload": {"optimizer": "host"}}


@dataclass
class Made:
    """Captured once for all tests."""

    model: nn.Module
    prepared: CapturedModel


def build() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(NUM_LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers).double()


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(NUM_SAMPLES, WIDTH, generator=generator, dtype=torch.float64)


def prepare() -> Made:
    torch.set_num_threads(1)
    layout, tensors = read_batch(batch(0))
    model = build()
    prepared = api._prepare(model, layout, tensors, mean_square, wh.Config(), "cpu", False)
    return Made(model, prepared)


def sgd(pairs: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(pairs, lr=0.2, momentum=0.9, weight_decay=0.01)


def adamw(pairs: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(pairs, lr=0.05)


def halved(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


OPTIMIZERS = {"sgd": sgd, "adamw": adamw}


def engine_of(
    made: Made,
    settings: dict[str, Any],
    optimizer: str = "adamw",
    scheduler: Any = None,
    **changes: Any,
) -> Engine:
    """The engine of one rank, with a plan that updates ahead: by cost none on CPU ranks does.
    `changes`: other parts of the plan.
    """
    config = wh.Config({"check_replicas": 0, **settings})
    wh.init(config)
    cluster = platform_of_this_job(ranks_of_job()).cluster(None)
    plan = ModelPlanner(made.model, cluster, config, NUM_SAMPLES).plan(made.prepared, {})
    return wh.parallelize(
        made.model,
        batch(0),
        optimizer=OPTIMIZERS[optimizer],
        scheduler=scheduler,
        loss=mean_square,
        prepared=made.prepared,
        plan=revise(plan, updates_ahead=True, **changes),
    )


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer(prepare) as found:
        yield found


def largest_difference(state: dict[str, Tensor], model: nn.Module) -> float:
    wanted = model.state_dict()
    assert state.keys() == wanted.keys()
    scale = max(float(each.abs().max()) for each in wanted.values())
    return max(float((state[name] - wanted[name]).abs().max()) for name in wanted) / scale


# ---- a run with everything that reads weights and states between steps


@dataclass
class Run:
    """What a rank, or local training, saw."""

    losses: list[float]
    rate: float
    state: dict[str, Tensor]
    num_updates: int = 0


NUM_STEPS = 6


def whole_run(made: Made, settings: dict[str, Any], optimizer: str, folder: Path) -> Run:
    """Steps, one of them in two parts, with clipping and a scheduler; evaluation and a checkpoint
    between them, which is loaded again.
    """
    with held_updates() as held:
        settings = {**settings, "clip_grad_norm": MAX_NORM}
        engine = engine_of(made, settings, optimizer, halved)
        losses = []
        for step in range(NUM_STEPS):
            if step == 3:
                losses.append(engine.forward_backward(batch(step)).loss)
                engine.accumulate()
                engine.update()
            else:
                losses.append(engine.step(batch(step)).loss)
            if step == 2:
                losses.append(float(engine.evaluate(batch(0)).loss or 0.0))
            if step == 4:
                engine.save(folder).wait()
        assert engine.load(folder) == NUM_STEPS - 1
        losses.append(engine.step(batch(NUM_STEPS - 1)).loss)
        assert engine.optimizer is not None
        rate = engine.optimizer.param_groups[0]["lr"]
        run = Run(losses, rate, engine.full_state_dict(), held.num_updates)
        engine.close()
        return run


def whole_run_locally(optimizer: str) -> tuple[Run, nn.Module]:
    model = build()
    made = OPTIMIZERS[optimizer](model.parameters())
    scheduler = halved(made)
    losses = []
    for step in range(NUM_STEPS):
        loss = mean_square(model(batch(step)), batch(step))
        losses.append(loss.item())
        made.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        made.step()
        scheduler.step()
        if step == 2:
            losses.append(mean_square(model(batch(0)), batch(0)).item())
    losses.append(losses[-1])  # the last step is made again, from the checkpoint before it
    return Run(losses, made.param_groups[0]["lr"], {}), model


RUNS = [
    pytest.param(STATES, "adamw", id="DP 2, states, adamw"),
    pytest.param(TWO_STAGES, "sgd", id="2 stages, states, sgd"),
    pytest.param(WEIGHTS, "sgd", id="DP 2, weights, sgd", marks=pytest.mark.slow),
    pytest.param(
        {**TWO_STAGES, **WEIGHTS, "strategy": None},
        "adamw",
        id="2 stages, weights, adamw",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("settings", "optimizer"), RUNS)
def test_a_run_is_that_of_local_training(
    server: ModelServer, settings: dict[str, Any], optimizer: str, tmp_path: Path
) -> None:
    settings = {key: value for key, value in settings.items() if value is not None}
    wanted, model = whole_run_locally(optimizer)
    ranks = server.run(whole_run, 2, settings, optimizer, tmp_path)
    assert all(rank.num_updates for rank in ranks), "no update ran under a forward"
    assert ranks[0].losses == pytest.approx(wanted.losses, rel=1e-10)
    assert ranks[0].rate == pytest.approx(wanted.rate, rel=1e-12)
    assert largest_difference(ranks[0].state, model) < 1e-10


# ---- who waits for what


def events_of(made: Made, settings: dict[str, Any]) -> list[tuple[str, int]]:
    """What happened in the forward of the third step, whose blocks the second one left behind."""
    with held_updates() as held:
        engine = engine_of(made, settings)
        engine.step(batch(0))  # states come to be: nothing is left behind
        assert not held.events
        engine.step(batch(1))
        assert not held.num_updates, "the step has waited"
        engine.step(batch(2))
        found = list(held.events)
        engine.close()
        return found


BOTH = pytest.mark.parametrize(
    "settings",
    [
        pytest.param(STATES, id="states"),
        pytest.param(WEIGHTS, id="weights", marks=pytest.mark.slow),
    ],
)


@BOTH
def test_the_forward_waits_for_each_block(server: ModelServer, settings: dict[str, Any]) -> None:
    """It is through with the first blocks before the update of the last one has even begun."""
    (events,) = server.run(events_of, 1, settings)
    blocks = sorted({block for _, block in events})
    assert len(blocks) == NUM_LAYERS
    for block in blocks:
        assert events.index(("updated", block)) < events.index(("waited", block))
    last = blocks[-1]
    ahead = 1 if settings is STATES else 2  # weights at home are fetched one ahead
    assert events.index(("waited", blocks[-1 - ahead])) < events.index(("begun", last))


def state_without_waiting(made: Made, settings: dict[str, Any], waits: bool) -> dict[str, Tensor]:
    with held_updates(waits):
        engine = engine_of(made, settings)
        for step in range(3):
            engine.step(batch(step))
        state = engine.full_state_dict()
        engine.close()
        return state


@BOTH
def test_a_forward_that_does_not_wait_is_wrong(
    server: ModelServer, settings: dict[str, Any]
) -> None:
    """The mistake that the tests of this file must find."""
    model = build()
    optimizer = adamw(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        mean_square(model(batch(step)), batch(step)).backward()
        optimizer.step()
    (right,) = server.run(state_without_waiting, 1, settings, True)
    (wrong,) = server.run(state_without_waiting, 1, settings, False)
    assert largest_difference(right, model) < 1e-10
    assert largest_difference(wrong, model) > 1e-6


def readers() -> dict[str, Callable[[Engine], Any]]:
    """What gives weights or states to a user."""

    def gathered(engine: Engine) -> None:
        with engine.gathered():
            pass

    return {
        "full_state_dict": Engine.full_state_dict,
        "optimizer": lambda engine: engine.optimizer,
        "named_parameters": lambda engine: list(engine.named_parameters()),
        "module": Engine.module,
        "gathered": gathered,
        "evaluate": lambda engine: engine.evaluate(batch(0)),
    }


def left_after_reading(made: Made) -> dict[str, int]:
    """Updates that still run when a reader has returned."""
    found = {}
    with held_updates():
        engine = engine_of(made, STATES)
        engine.step(batch(0))
        assert engine._job.zero is not None and engine._job.zero.ahead is not None
        for step, (name, read) in enumerate(readers().items()):
            engine.step(batch(step))
            assert len(engine._job.zero.ahead._pending) == NUM_LAYERS
            read(engine)
            found[name] = len(engine._job.zero.ahead._pending)
        engine.close()
    return found


def test_whoever_reads_waits_for_all(server: ModelServer) -> None:
    (found,) = server.run(left_after_reading, 1)
    assert found == dict.fromkeys(readers(), 0)


def without_samples(made: Made) -> tuple[list[float], dict[str, Tensor]]:
    """The second rank is so slow that it gets none."""
    with held_updates() as held:
        engine = engine_of(made, STATES, device_seconds=(1.0, 1e6))
        assert len(engine.own_samples(NUM_SAMPLES)) == 1
        start, stop = engine.own_samples(NUM_SAMPLES)[0]
        assert stop - start == (NUM_SAMPLES, 0)[engine.ranks.rank]
        losses = [engine.step(batch(step)).loss for step in range(4)]
        state = engine.full_state_dict()
        assert held.num_updates
        engine.close()
        return losses, state


def test_ranks_without_samples_meet_the_others(server: ModelServer) -> None:
    """They update their part, too, and the others gather it."""
    model = build()
    optimizer = adamw(model.parameters())
    wanted = []
    for step in range(4):
        optimizer.zero_grad()
        loss = mean_square(model(batch(step)), batch(step))
        wanted.append(loss.item())
        loss.backward()
        optimizer.step()
    losses, state = server.run(without_samples, 2)[0]
    assert losses == pytest.approx(wanted, rel=1e-10)
    assert largest_difference(state, model) < 1e-10


# ---- faults


def torn(made: Made, folder: Path, read: str | None) -> None:
    """The states of the first rank are damaged behind the first step; the update behind the second
    one finds that.
    """
    offload = {"offload": {"optimizer": "disk"}, "run_folder": str(folder)}
    engine = engine_of(made, {**DATA, **offload})
    engine.step(batch(0))
    if engine.ranks.rank == 0:
        for path in (folder / "spill" / "rank-0").glob("*.spill"):
            os.truncate(path, 8)
    engine.step(batch(1))
    if read is None:
        engine.step(batch(2))
    elif read == "close":
        engine.close()
    else:
        readers()[read](engine)


@pytest.mark.parametrize(
    ("num_ranks", "read"),
    [
        (2, None),
        (1, "close"),
        *(pytest.param(1, name, marks=pytest.mark.slow) for name in readers()),
    ],
)
def test_an_update_that_fails_ends_the_job_by_name(
    server: ModelServer, num_ranks: int, read: str | None, tmp_path: Path
) -> None:
    with pytest.raises(RankError) as caught:
        server.run(torn, num_ranks, tmp_path, read)
    text = str(caught.value)
    assert "UpdateAheadError: rank 0: the update of block" in text
    assert "block 0 (0.bias to 0.weight)" in text
    assert "SpillError: rank 0" in text and "states-" in text
    if read == "close":
        assert not (tmp_path / "spill").exists(), "files are left behind"
