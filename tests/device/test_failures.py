"""Failures on the device path: the job ends everywhere in seconds, with one message that names the
rank and what it was doing, and nothing hangs at exit.

A device works behind the host, so a rank dies with kernels queued, an error of a kernel is raised
somewhere later, and a collective that never completes blocks nobody until somebody looks.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.device.memory import used_memory
from tests.device.settings import settings
from tests.device.streams import current_stream
from tests.device.supervise import FAULT, Ended, Request, supervise
from tests.device.training import prepare_on_device
from tests.exactness import Float64Mode
from tests.integration.table import PLANS
from tests.integration.training import Subject, batches, engine_on_rank
from tests.ranks import ModelServer, preload
from whale.runtime.batches import CHECKED_STEPS
from whale.runtime.executor import Executor

preload("tests.integration.training", "tests.device.training", "tests.device.test_failures")

PLAN = next(plan for plan in PLANS if plan.name == "replicate(2) -> replicate(1)")
FAULTY = 1
"""the rank that fails: one of two that run the first stage"""
FAULT_STEP = CHECKED_STEPS + 1
"""before, ranks compare their batches at the start of a step, and wait there"""
NUM_STEPS = FAULT_STEP + 4
STALL_S = 2.0
KERNEL_S = 0.01
"""slow enough that kernels are still queued when the host has launched a step"""
PROMISED_S = 25.0
"""from the fault to the end of all ranks, on a machine that does something else besides. On a quiet
one it is some 2 s, and `STALL_S` more where only time tells
"""


# ---- faults: each is called on the faulty rank before its step begins


def dies_with_kernels_queued(strike: Callable[[], None]) -> None:
    settings.kernel_s = KERNEL_S

    def kill() -> None:
        strike()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Timer(5 * KERNEL_S, kill).start()


def a_kernel_never_ends(strike: Callable[[], None]) -> None:
    current_stream().put("a kernel that never ends", lambda: time.sleep(1e6))
    strike()


def the_host_never_comes(strike: Callable[[], None]) -> None:
    """The collectives of the others never complete: this rank does not even start its own."""
    strike()
    time.sleep(1e6)


def out_of_memory(strike: Callable[[], None]) -> None:
    """Takes the memory in the middle of the step: its first actions have enough."""
    run = Executor.run

    def run_with_little(self: Executor, *args: object, **options: object) -> object:
        prepared = list(self._prepared)
        middle = len(prepared) // 2

        def fill(state: object) -> None:
            settings.memory_bytes = used_memory().now_bytes
            strike()
            prepared[middle].run(state)  # type: ignore[arg-type]

        self._prepared[middle] = prepared[middle]._replace(run=fill)
        return run(self, *args, **options)  # type: ignore[arg-type]

    Executor.run = run_with_little  # type: ignore[method-assign, assignment]


def an_error_that_surfaces_later(strike: Callable[[], None]) -> None:
    def fail() -> None:
        strike()
        raise RuntimeError("testgpu error: an illegal memory access was encountered")

    current_stream().put("a kernel that fails", fail)


def rank_main(subject: object, folder: Path, fault: Callable[[Callable[[], None]], None]) -> None:
    """One rank of the job; `fault` happens on one of them."""
    assert isinstance(subject, Subject)
    with Float64Mode():
        engine = engine_on_rank(subject, PLAN, timeout_s=10.0, stall_timeout_s=STALL_S)
        for step, batch in enumerate(batches(subject.case, PLAN.one_tensor, NUM_STEPS)):
            if step == FAULT_STEP and dist.get_rank() == FAULTY:
                fault((folder / FAULT).touch)
            engine.step(batch)


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer(prepare_on_device, "chain") as found:
        yield found


def _run(server: ModelServer, fault: Callable[[Callable[[], None]], None]) -> list[Ended]:
    request = Request(partial(rank_main, fault=fault), PLAN.num_ranks, 2 * PROMISED_S)
    return server.run_local(supervise, request, timeout_s=3 * PROMISED_S)  # type: ignore[no-any-return]


STEP = rf"step {FAULT_STEP}, "


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            dies_with_kernels_queued,
            rf"rank {FAULTY} died without a word .* It was last heard of .* at step \d",
        ),
        (
            a_kernel_never_ends,
            rf"rank {FAULTY} failed at {STEP}action \d+ of \d+, F0\..*: its device has been there for",
        ),
        pytest.param(
            the_host_never_comes,
            rf"rank \d failed at {STEP}.*: its device has been there for .*"
            rf"rank {FAULTY} at step {FAULT_STEP - 1}, its end",
            marks=pytest.mark.slow,  # it waits for time to pass
        ),
        (
            out_of_memory,
            rf"rank {FAULTY} failed at {STEP}action \d+ of \d+, .*: OutOfMemoryError: testgpu out "
            r"of memory: tried to allocate \d+ bytes",
        ),
        (
            an_error_that_surfaces_later,
            # how far the device came is known to a tenth of a second only
            rf"rank {FAULTY} failed at step ({FAULT_STEP - 1}|{FAULT_STEP}), .*: RuntimeError: "
            "testgpu error: an illegal memory",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_job_ends_everywhere(
    server: ModelServer, fault: Callable[[Callable[[], None]], None], said: str
) -> None:
    ranks = _run(server, fault)
    verdicts = re.findall(r"^whale: (rank .*)$", "".join(rank.output for rank in ranks), re.M)
    everything = "\n".join(f"--- rank {rank}: {ended}" for rank, ended in enumerate(ranks))
    assert len(verdicts) == 1, everything
    assert re.match(said, verdicts[0]), everything
    for ended in ranks:
        assert ended.exit_code not in (None, 0), everything
        assert ended.after_s < PROMISED_S, everything


def test_without_a_fault_all_ranks_end_well(server: ModelServer) -> None:
    for ended in _run(server, no_fault):
        assert ended.exit_code == 0, ended.output


def no_fault(strike: Callable[[], None]) -> None:
    pass
