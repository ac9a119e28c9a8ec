"""Every schedule trains like local PyTorch: few and many devices, micro-batches that fit and that
do not, replicas, skips, tied weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

import whale as wh
from tests.exactness import Trace, compare
from tests.integration.table import BATCH_SIZE, PlanCase
from tests.integration.training import merge, prepare_subject, train_locally, train_on_rank
from tests.pairs import covering_rows
from tests.ranks import ModelServer, preload
from tests.zoo import CASES

preload("tests.integration.training")

SCHEDULES = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved"},
    "wave": {"schedule": "wave"},
    "2 waves": {"schedule": "wave", "num_waves": 2},
    "zero-bubble": {"schedule": "zero-bubble"},
    "zero-bubble wave": {"schedule": "zero-bubble", "num_waves": 1},
    "auto": {"schedule": "auto"},
}
MODELS = ("deep_chain", "deep_branches", "tied", "gpt2", "bert")
NUM_STEPS = 2


COUNTS = ("fewer", "equal", "more", "indivisible")
"""micro-batches in comparison with devices"""
Row = tuple[str, str, int, int, str]
"""model, schedule, devices, replicas, micro-batches"""


def _num_micro_batch(kind: str, devices: int, replicas: int) -> int:
    most = BATCH_SIZE // replicas
    return {
        "fewer": devices - 1,
        "equal": devices,
        "more": min(2 * devices, most),
        "indivisible": min(devices + 1, most),
    }[kind]


def _all_rows() -> list[Row]:
    found = []
    for row in product(MODELS, SCHEDULES, (2, 3, 4), (1, 2), COUNTS):
        _, _, devices, replicas, kind = row
        number = _num_micro_batch(kind, devices, replicas)
        before = COUNTS[: COUNTS.index(kind)]
        # 4 devices x DP 2 have samples for 5 micro-batches: the same plan again
        if all(number != _num_micro_batch(other, devices, replicas) for other in before):
            found.append(row)
    return found


def _quick_rows() -> list[Row]:
    """Every schedule on every number of devices once, with models in turns."""
    found: list[Row] = []
    num_plans = 0
    for which, schedule in enumerate(SCHEDULES):
        for devices in (2, 3, 4):
            kind = COUNTS[(which + devices) % 4]
            replicas = 1 + which % 2 * (devices == 2)
            num_plans += 1
            for model in _models_in_turns(num_plans):
                found.append((model, schedule, devices, replicas, kind))
        num_plans += which % 2 == 0  # that of `_uneven_rows`
    return found


def _models_in_turns(number: int) -> list[str]:
    """One of the small models, sometimes with one of Hugging Face, which take longer."""
    large = [m for place, m in enumerate(MODELS) if place > 2 and (number + place) % 4 == 0]
    return [MODELS[number % 3], *large]


def _plan_case(row: Row) -> PlanCase:
    _, schedule, devices, replicas, kind = row
    number = _num_micro_batch(kind, devices, replicas)
    settings = {**SCHEDULES[schedule], "num_micro_batch": number, "num_task_graph": devices}
    name = f"{schedule}, {devices} devices x DP {replicas}, {kind}: {number} micro-batches"
    return PlanCase(name, devices * replicas, settings)


def _uneven_rows() -> list[tuple[str, PlanCase]]:
    """Stages of different width: every schedule once, with models in turns."""
    found = []
    for which, (schedule, config) in enumerate(SCHEDULES.items()):
        name = f"{schedule}, replicate(2) -> replicate(1)"
        plan = PlanCase(name, 3, {**config, "num_micro_batch": 3}, (2, 1))
        found.append((MODELS[which % len(MODELS)], plan))
    return found


def _columns(row: Row) -> tuple[str, tuple[str, int], int, str]:
    """A schedule and its number of devices are one column: orders depend on both together."""
    model, schedule, devices, replicas, kind = row
    return model, (schedule, devices), replicas, kind


def _parameters() -> list[object]:
    """Quick rows, then slow ones until every schedule on every number of devices has met every
    other value (`tests/pairs.py`).
    """
    quick = _quick_rows()
    covering = covering_rows(list(map(_columns, _all_rows())), map(_columns, quick))
    rows = [(row[0], _plan_case(row), True) for row in quick]
    for model, (schedule, devices), replicas, kind in covering:
        rows.append((model, _plan_case((model, schedule, devices, replicas, kind)), False))
    for which, (model, plan) in enumerate(_uneven_rows()):
        rows.append((model, plan, which % 2 == 0))
    found = []
    for model, plan, is_quick in rows:
        marks = () if is_quick else pytest.mark.slow
        found.append(pytest.param(model, plan, id=f"{model}, {plan.name}", marks=marks))
    return sorted(found, key=lambda parameter: MODELS.index(parameter.values[0]))


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, tuple[ModelServer, Trace]]]:
    found: dict[str, tuple[ModelServer, Trace]] = {}
    yield found
    for server, _ in found.values():
        server.__exit__(None, None, None)


@pytest.mark.parametrize(("model", "plan"), _parameters())
def test_trains_like_local(
    servers: dict[str, tuple[ModelServer, Trace]], model: str, plan: PlanCase
) -> None:
    if model not in servers:
        server = ModelServer(prepare_subject, model).__enter__()
        servers[model] = (server, server.run_local(train_locally, plan, NUM_STEPS))
    server, reference = servers[model]
    compare(
        reference,
        merge(server.run(train_on_rank, plan.num_ranks, plan, NUM_STEPS), CASES[model].build()),
    )


def _plan_of(config: dict[str, object], num_devices: int) -> wh.Plan:
    case = CASES["deep_chain"]
    return wh.plan(
        case.build(),
        case.batch(0, BATCH_SIZE),
        cluster=num_devices,
        config={"check_capture": False, **config},
    )


def test_the_plan_holds_what_was_asked_for() -> None:
    """The exactness above would also hold if every schedule were 1F1B."""
    waves = _plan_of(
        {"schedule": "wave", "num_waves": 2, "num_task_graph": 2, "num_micro_batch": 4}, 2
    )
    assert [stage.virtual_device for stage in waves.stages] == [0, 1, 1, 0, 0, 1, 1, 0]
    loop = _plan_of({"schedule": "interleaved", "num_task_graph": 3, "num_micro_batch": 3}, 3)
    assert [stage.virtual_device for stage in loop.stages] == [0, 1, 2, 0, 1, 2]
    split = _plan_of({"schedule": "zero-bubble", "num_task_graph": 3, "num_micro_batch": 4}, 3)
    kinds = [
        {action.kind for action in order if action.is_compute} for order in split.schedule.orders
    ]
    assert kinds[0] == {"F", "B"}  # nobody waits for the gradients of the first stage's inputs
    assert all({"F", "I", "W"} <= each for each in kinds[1:])
    with_replicas = _plan_of({"schedule": "wave", "num_task_graph": 2, "num_micro_batch": 2}, 4)
    assert with_replicas.num_replicas == 2


def test_more_waves_than_points_to_cut_are_refused() -> None:
    said = r'"schedule": "wave" with "num_waves": 9 needs 18 chunks on each of 2 VirtualDevices, 36 in all: .*at most'
    with pytest.raises(ValueError, match=said):
        _plan_of({"schedule": "wave", "num_waves": 9, "num_task_graph": 2, "num_micro_batch": 2}, 2)


def test_auto_says_what_it_compared() -> None:
    plan = _plan_of({"schedule": "auto", "num_task_graph": 2, "num_micro_batch": 4}, 2)
    why = next(decision.why for decision in plan.decisions if decision.what == "schedule")
    assert "chunks on each VirtualDevice take least time (1: " in why
    assert (
        "; with 0.1 ms for each action of the runtime)" in why
    )  # which a simulated step does not count
