"""Every schedule trains like local PyTorch: few and many devices, micro-batches that fit and that
do not, replicas, skips, tied weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import whale as wh
from tests.exactness import Trace, compare
from tests.integration.table import BATCH_SIZE, PlanCase
from tests.integration.training import merge, prepare_subject, train_locally, train_on_rank
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


def _cases() -> Iterator[tuple[PlanCase, bool]]:
    """(plan, whether it runs always): a quick run takes every schedule on every number of devices
    once, with models in turns.
    """
    for which, (name, config) in enumerate(SCHEDULES.items()):
        for devices in (2, 3, 4):
            for replicas in (1, 2):
                most = BATCH_SIZE // replicas
                counts = {
                    "fewer": devices - 1,
                    "equal": devices,
                    "more": min(2 * devices, most),
                    "indivisible": min(devices + 1, most),
                }
                for place, (kind, count) in enumerate(counts.items()):
                    if (
                        count in list(counts.values())[:place]
                    ):  # 4 devices x DP 2 have samples for 5: the same plan again
                        continue
                    always = (
                        replicas == 1 + which % 2 * (devices == 2)
                        and place == (which + devices) % 4
                    )
                    settings = {**config, "num_micro_batch": count, "num_task_graph": devices}
                    title = (
                        f"{name}, {devices} devices x DP {replicas}, {kind}: {count} micro-batches"
                    )
                    yield PlanCase(title, devices * replicas, settings), always
        uneven = PlanCase(
            f"{name}, replicate(2) -> replicate(1)", 3, {**config, "num_micro_batch": 3}, (2, 1)
        )
        yield uneven, which % 2 == 0


def _parameters() -> list[object]:
    found = []
    chosen = 0
    for plan, always in _cases():
        chosen += always
        for number, model in enumerate(MODELS):
            runs = always and (
                number == chosen % 3 or (number > 2 and (chosen + number) % 4 == 0)
            )  # Hugging Face models take longer
            found.append(
                pytest.param(
                    model, plan, id=f"{model}, {plan.name}", marks=() if runs else pytest.mark.slow
                )
            )
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
        {action[0] for action in order if action[1].isdigit()} for order in split.schedule["orders"]
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
