"""The exactness table on the test device: asynchronous streams, races found, NCCL's rules.

What is trained locally on the CPU in float64 must come out of ranks whose accelerator is the test
device. 20 rows run always, and every model under every plan with the slow ones (replicas that are not
alike: only the models that the plan names).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import LATER, TAKEN_IN_TURNS
from tests.device.collectives import BACKEND
from tests.device.training import check_on_device, prepare_on_device, train_on_device
from tests.exactness import Trace, compare
from tests.integration.table import PLANS, UNLIKE_PLANS, PlanCase
from tests.integration.training import has_labels_like_input, merge, train_locally
from tests.ranks import ModelServer, preload
from tests.zoo import CASES, MAIN

preload("tests.integration.training", "tests.device.training")

QUICK = {
    "chain": [
        *(plan.name for plan in PLANS if not plan.one_tensor),
        "1 device with 2 micro-batches beside 4 stages with 3",
    ],
    "batch_norm": ["DP 3, batch 10", "2 stages x DP 2"],
    "tied": ["2 stages x DP 2"],
    "gpt2": ["replicate(2) -> replicate(1)"],
}
"""model -> plans that always run"""
NUM_QUICK = 20
"""rows that `make test` must have"""
ALWAYS = {
    "device/test_exactness.py::test_trains_like_the_cpu",
    "device/test_jobs.py::test_a_job_resumes_on_other_devices",
    "device/test_jobs.py::test_evaluation_gives_the_local_outputs",
    "device/test_jobs.py::test_fp16_skips_what_torch_skips",
    "device/test_jobs.py::test_recomputed_dropout_draws_the_same_numbers",
    "device/test_jobs.py::test_schedules",
    "device/test_jobs.py::test_splits",
    "device/test_mutants.py::test_a_mutant_races",
    "device/test_mutants.py::test_a_host_read_in_every_micro_batch_is_counted",
    "device/test_mutants.py::test_receives_in_another_order_are_caught_by_the_numbers",
    "device/test_streams_of_whale.py::test_row_5_few_queues_do_not_hang",
    "device/test_streams_of_whale.py::test_rows_12_and_13_host_waits_of_a_step",
}
"""what else of this device `make test` must have"""


def _rows() -> list[object]:
    found = []
    for case in MAIN:
        for plan in (*PLANS, *UNLIKE_PLANS):
            if plan.one_tensor and not has_labels_like_input(case):
                continue
            if plan in UNLIKE_PLANS and case.name not in plan.only_for:
                continue  # up to 7 ranks: all models run them on the CPU
            marks = () if plan.name in QUICK.get(case.name, ()) else (pytest.mark.slow,)
            # "-" parts the model from the rest: workers share rows by it (tests/conftest.py)
            found.append(pytest.param(case.name, plan, marks=marks, id=f"{case.name}-{plan.name}"))
    return found


class Servers:
    """One process for each model that has it captured for the device, with its local trainings."""

    def __init__(self) -> None:
        self._name = ""
        self._server: ModelServer | None = None
        self._references: dict[object, Trace] = {}

    def of(self, name: str) -> ModelServer:
        """The server of a model; only the last one is kept."""
        if self._name != name or self._server is None:
            self.close()
            self._name = name
            self._references = {}
            self._server = ModelServer(prepare_on_device, name)
        return self._server

    def reference(self, name: str, plan: PlanCase) -> Trace:
        """Local training on the CPU."""
        key = (plan.one_tensor, plan.num_micro_batch if CASES[name].batch_statistics else 1)
        if key not in self._references:
            self._references[key] = self.of(name).run_local(train_locally, plan)
        return self._references[key]

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._server = None


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    found = Servers()
    yield found
    found.close()


def test_number_of_rows_that_always_run() -> None:
    assert sum(not row.marks for row in _rows()) >= NUM_QUICK  # type: ignore[attr-defined]


def test_nothing_that_always_runs_is_left_to_test_all() -> None:
    assert not ALWAYS & {*LATER, *TAKEN_IN_TURNS}


# not called `plan`: tests/conftest.py would choose which of the table's rows are slow
@pytest.mark.parametrize(("name", "row"), _rows())
def test_trains_like_the_cpu(servers: Servers, name: str, row: PlanCase) -> None:
    server = servers.of(name)
    reference = servers.reference(name, row)
    ranks = server.run(train_on_device, row.num_ranks, row, backend=BACKEND)
    compare(reference, merge([rank.trace for rank in ranks], CASES[name].build()))


@pytest.mark.parametrize("name", ["gpt2", pytest.param("batch_norm", marks=pytest.mark.slow)])
def test_a_capture_is_checked_on_the_device(servers: Servers, name: str) -> None:
    """The user's model is on the CPU; the graph makes its positions and masks on the device."""
    notes = servers.of(name).run_local(check_on_device)
    assert not any("was not compared with" in note for note in notes)
