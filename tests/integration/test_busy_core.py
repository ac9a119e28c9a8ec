"""The mechanism of `benchmarks/busy_core.py`: ranks on a core each, one of which is shared; nothing
depends on how long anything takes.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import whale as wh
from benchmarks.busy_core import BATCH_SIZE, busy_process, make_engine, stop
from tests.ranks import preload, run_ranks
from whale.cli.profile_ranks import profile_ranks
from whale.planning.adapt import samples_by_rank

preload("benchmarks.busy_core", "tests.integration.test_busy_core")


def on_a_core(
    folder: str,
) -> tuple[list[tuple[float, float]], tuple[int, ...], set[int], set[int] | None, int | None]:
    """(seconds of a step and of a sample by rank as profiled, planned shares, own cores, cores of
    the busy process, what it ended with)
    """
    rank = torch.distributed.get_rank()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    path = Path(folder) / "cluster.yaml"
    with busy_process() as process:
        busy_cores = os.sched_getaffinity(process.pid) if process is not None else None
        profile_ranks(path, "cpu")
        plan = make_engine(str(path)).plan
        stop(process)
    shares = samples_by_rank(plan, BATCH_SIZE)
    seconds = [(plan.num_micro_batch * load.fixed_s, load.sample_s) for load in plan.loads]
    return (
        seconds,
        shares,
        os.sched_getaffinity(0),
        busy_cores,
        process.returncode if process is not None else None,
    )


@pytest.mark.slow
def test_the_plan_follows_what_was_profiled_beside_a_busy_process(tmp_path: Path) -> None:
    (seconds, shares, *_, nobody, _), (_, other_shares, own, busy, ended) = run_ranks(
        on_a_core, 2, str(tmp_path), timeout_s=200.0
    )
    assert (
        nobody is None and busy == own and len(own) == 1
    )  # it shares the core of rank 1, and of rank 1 alone
    assert ended is not None  # and is gone
    assert shares == other_shares and sum(shares) == BATCH_SIZE

    def step_s(first: int) -> float:
        given = (first, BATCH_SIZE - first)
        return max(
            fixed + sample * share for (fixed, sample), share in zip(seconds, given, strict=True)
        )

    assert step_s(shares[0]) <= min(step_s(first) for first in range(1, BATCH_SIZE)) * (
        1 + 1e-9
    )  # of all divisions the best
    assert wh.Cluster.load(tmp_path / "cluster.yaml").num_devices == 2
