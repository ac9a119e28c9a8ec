"""How Whale uses streams, communicators and the host, on the test device.

The rows are those of the table of findings on the accelerator path.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import whale as wh
from tests.device import streams
from tests.device.collectives import BACKEND, communicators
from tests.device.memory import NAME
from tests.device.settings import settings
from tests.device.streams import counters
from tests.device.training import DeviceTrace, prepare_on_device, train_on_device
from tests.exactness import compare
from tests.integration.table import PLANS, PlanCase
from tests.integration.training import (
    Subject,
    batches,
    engine_on_rank,
    merge,
    train_locally,
)
from tests.ranks import ModelServer, preload
from tests.zoo import CASES
from whale.distributed.watch import Watch
from whale.lowering.sharded_norms import layer_norm, rms_norm
from whale.lowering.subgroups import Subgroup
from whale.runtime.batches import CHECKED_STEPS
from whale.runtime.executor import DevicePosition
from whale.runtime.result import Timing
from whale.scheduling import Action, Kind

preload("tests.integration.training", "tests.device.training", "tests.device.test_streams_of_whale")

SLOW = pytest.mark.slow
MODEL = "chain"
PLAN_NAMED = {plan.name: plan for plan in PLANS}
WAVE = PlanCase("wave", 2, {"num_micro_batch": 5, "num_task_graph": 2, "schedule": "wave"})


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer(prepare_on_device, MODEL) as found:
        yield found


# ---- row 7: times are those of the device


@dataclass(frozen=True)
class Times:
    """What a rank says about its last step."""

    timing: Timing
    traced_compute_s: float
    traced_wait_s: float
    """for messages of the other stage"""


KERNEL_S = 0.005


def measure_slow_kernels(subject: Subject, plan: PlanCase, folder: str) -> Times:
    """Two steps in which every kernel takes `KERNEL_S`, launched within less."""
    engine = engine_on_rank(subject, plan)
    (batch,) = batches(subject.case, False, 1)
    engine.step(batch)
    streams.synchronize()
    settings.kernel_s = KERNEL_S
    timing = engine.step(batch).timing
    settings.kernel_s = 0.0
    path = Path(folder) / "trace.json"
    engine.trace(path)
    dist.barrier()
    rows = json.loads(path.read_text())["traceEvents"]
    return Times(timing, _traced_s(rows, "F", "B"), _traced_s(rows, "receive"))


def _traced_s(rows: list[dict[str, Any]], *kinds: str) -> float:
    """Seconds that this rank spent in actions of these kinds, by its trace."""
    own = [row for row in rows if row["tid"] == dist.get_rank() and row.get("cat") in kinds]
    return float(sum(row["dur"] for row in own)) / 1e6


def test_row_7_times_are_those_of_the_device(server: ModelServer, tmp_path: Path) -> None:
    """Before, `compute_s` was the time of the launches and `bubble_s` nothing.

    How long a rank waits for the other depends on what else the machine does: only that it is the
    device's own wait is compared.
    """
    plan = PLAN_NAMED["2 stages"]
    ranks = server.run(measure_slow_kernels, plan.num_ranks, plan, str(tmp_path), backend=BACKEND)
    # a forward and a backward of a layer are some kernels each; two of each is the least
    least_s = 2 * 2 * plan.num_micro_batch * KERNEL_S
    for rank in ranks:
        timing = rank.timing
        assert rank.traced_compute_s >= least_s
        assert timing.compute_s >= rank.traced_compute_s
        assert timing.bubble_s > 0
        assert timing.bubble_s == pytest.approx(rank.traced_wait_s, rel=1e-3)  # microseconds
        assert timing.compute_s + timing.bubble_s <= timing.total_s


def test_row_7_the_watch_says_where_the_device_stands() -> None:
    """The host has launched two actions and is at the third; the device is at the second."""
    watch = Watch(0, 1, 1.0)
    watch.during = "step 4"
    over = {"end of 0"}
    has_failed = False

    def is_over(moment: str) -> bool:
        if has_failed:
            raise RuntimeError("an error of the device, raised by whatever asks it")
        return moment in over

    moments: list[tuple[Action, str, str]] = []
    position = DevicePosition(watch, moments, is_over)
    for number in range(2):
        position.position = f"action {number}"
        moments.append((Action(Kind.FORWARD, 0, number), "", f"end of {number}"))
    position.position = "action 2"
    assert watch.where == "step 4, action 1 (launched so far: step 4, action 2)"
    assert position.pending is not None
    assert not position.pending.waits_for_others
    has_failed = True
    assert watch.where == "step 4, action 1 or later (launched so far: step 4, action 2)"
    has_failed = False
    watch.stand_at("its end")
    assert watch.where == "step 4, action 1 (launched so far: step 4, its end)"
    watch.during = "step 5"
    watch.stand_at("its start")
    assert watch.where == "step 4, action 1 (launched so far: step 5, its start)"
    later = DevicePosition(watch, [], is_over)  # the device is still in step 4
    later.position = "action 0"
    assert watch.where == "step 4, action 1 (launched so far: step 5, action 0)"
    over.add("end of 1")
    assert watch.where == "step 5, action 0"


# ---- row 6: communicators


def test_row_6_only_ranks_that_talk_have_a_communicator(server: ModelServer) -> None:
    """2 stages x DP 3: each of the 3 replicas has one for each direction, 6 in all.

    Before there was one for every pair of ranks of the two stages: 18.
    """
    plan = PlanCase("2 stages x DP 3", 6, {"num_micro_batch": 2}, (1, 1))
    ranks = server.run(train_on_device, plan.num_ranks, plan, 1, backend=BACKEND)
    num_pairs = sum(rank.communicator_sizes.count(2) for rank in ranks) // 2
    assert num_pairs == 6


def count_channels(subject: Subject, plan: PlanCase) -> tuple[int, int]:
    """Communicators of this rank before the first step and after it."""
    engine = engine_on_rank(subject, plan)
    before = len(communicators)
    (batch,) = batches(subject.case, False, 1)
    engine.step(batch)
    return before, len(communicators)


@pytest.mark.parametrize(
    "name", ["replicate(1) -> replicate(3)", pytest.param("auto cut into 4", marks=SLOW)]
)
def test_row_6_channels_are_made_before_the_first_step(server: ModelServer, name: str) -> None:
    """In a step the group of all ranks, which they are split off, may be at work."""
    row = PLAN_NAMED[name]
    for before, after in server.run(count_channels, row.num_ranks, row, backend=BACKEND):
        assert before == after > 1


# ---- rows 12 and 13: the host waits for the device

SPLIT = PlanCase("split over 2", 2, {"num_micro_batch": 2})


@dataclass(frozen=True)
class Waits:
    """What a rank waited for in `NUM_COUNTED` steps."""

    host_waits: dict[str, int]
    """each step with a look at its loss"""
    without_looks: dict[str, int]
    num_pageable: int


NUM_COUNTED = 2


def count_waits(subject: Subject, plan: PlanCase) -> Waits:
    if plan.name == SPLIT.name:
        wh.init(wh.Config(plan.config))
        wh.annotate(subject.model, {"*": wh.split(2)})
    engine = engine_on_rank(subject, plan)
    assert bool(engine.plan.shardings) == (plan.name == SPLIT.name)
    (batch,) = batches(subject.case, False, 1)
    for _ in range(CHECKED_STEPS):  # in these ranks compare their batches
        assert engine.step(batch).loss > 0  # nothing of them is looked at later
    counters.clear()
    for _ in range(NUM_COUNTED):
        assert engine.step(batch).loss > 0
    with_looks = dict(counters.host_waits)
    num_pageable = counters.pageable_copies
    counters.clear()
    for _ in range(NUM_COUNTED):
        engine.step(batch)
    return Waits(with_looks, dict(counters.host_waits), num_pageable)


MOST_WAITS = {
    "1 rank": 1,
    "DP 2": 1,
    "2 stages": 1,
    "2 stages x DP 2": 1,
    "wave": 1,
    "zero-bubble": 1,
    "split over 2": 1,
}
"""job -> host waits of a step at most: for its loss, where somebody looks, else for that of the step
before
"""
ZERO_BUBBLE = PlanCase(
    "zero-bubble", 2, {"num_micro_batch": 4, "num_task_graph": 2, "schedule": "zero-bubble"}
)
COUNTED = {plan.name: plan for plan in (*PLANS, SPLIT, WAVE, ZERO_BUBBLE)}


@pytest.mark.parametrize("name", MOST_WAITS)
def test_rows_12_and_13_host_waits_of_a_step(server: ModelServer, name: str) -> None:
    """Before: 2 waits a step (norm of this rank, then loss and norm of all), and 1 in 1b36873.

    Nothing comes from pageable memory. Before: 3 copies a step, and 7 with a split.
    """
    row = COUNTED[name]
    ranks = server.run(count_waits, row.num_ranks, row, backend=BACKEND)
    for rank in ranks:
        most = MOST_WAITS[name] * NUM_COUNTED
        assert sum(rank.host_waits.values()) <= most, rank.host_waits
        assert sum(rank.without_looks.values()) <= most, rank.without_looks
        assert rank.num_pageable == 0


def count_waits_of_norms(_: Subject) -> list[dict[str, int]]:
    """Host waits of a layer norm and of an RMS norm whose normalised dim two ranks share."""
    around = Subgroup(2, dist.get_rank(), None)
    x = torch.randn(3, 4, device=NAME, requires_grad=True)
    found = []
    for norm in (
        lambda: layer_norm(x, 1, None, None, 1e-5, around),
        lambda: rms_norm(x, 1, None, 1e-5, around),
    ):
        norm()  # loads kernels, connects the group
        counters.clear()
        norm().sum().backward()
        found.append(dict(counters.host_waits))
    return found


def test_norms_that_a_grid_cuts_do_not_wait(server: ModelServer) -> None:
    """Before: one wait for each norm and micro-batch, for the number of its entries."""
    for rank in server.run(count_waits_of_norms, 2, backend=BACKEND):
        assert rank == [{}, {}]


# ---- row 5: receives wait on hardware queues that compute needs


def train_with_queues(subject: Subject, plan: PlanCase, num_queues: int) -> DeviceTrace:
    settings.num_queues = num_queues
    return train_on_device(subject, plan)


def _queue_rows() -> list[Any]:
    """`make test` has the plan that was found to hang, on one queue; waves and zero-bubble on one
    queue are rows of `test_jobs.py`.
    """
    rows = []
    found_hanging = PLAN_NAMED["replicate(1) -> replicate(3)"]
    for plan in (PLAN_NAMED["2 stages"], found_hanging, WAVE):
        for num_queues in (1, 2, 8):
            is_quick = plan is found_hanging and num_queues == 1
            marks = () if is_quick else (pytest.mark.slow,)
            rows.append(pytest.param(plan, num_queues, marks=marks, id=f"{plan.name}-{num_queues}"))
    return rows


# not called `plan`: tests/conftest.py would choose which rows are slow
@pytest.mark.parametrize(("row", "num_queues"), _queue_rows())
def test_row_5_few_queues_do_not_hang(server: ModelServer, row: PlanCase, num_queues: int) -> None:
    ranks = server.run(
        train_with_queues, row.num_ranks, row, num_queues, backend=BACKEND, timeout_s=30
    )
    reference = server.run_local(train_locally, row)
    compare(reference, merge([rank.trace for rank in ranks], CASES[MODEL].build()))


# ---- kernels are loaded at their first call, which may wait for what spins


def train_with_loading(subject: Subject, plan: PlanCase) -> DeviceTrace:
    settings.loading_waits = 1
    return train_on_device(subject, plan)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(PLAN_NAMED["2 stages"], id="2 stages"),
        pytest.param(WAVE, id="wave", marks=SLOW),
        pytest.param(ZERO_BUBBLE, id="zero-bubble", marks=SLOW),
        pytest.param(PLAN_NAMED["2 stages x DP 2"], id="2 stages x DP 2", marks=SLOW),
    ],
)
def test_loading_kernels_does_not_hang(server: ModelServer, row: PlanCase) -> None:
    """Before: the first gradient's receive was posted in front of the first forward, whose kernels
    could not be loaded before it was over.
    """
    ranks = server.run(train_with_loading, row.num_ranks, row, backend=BACKEND, timeout_s=30)
    reference = server.run_local(train_locally, row)
    compare(reference, merge([rank.trace for rank in ranks], CASES[MODEL].build()))
