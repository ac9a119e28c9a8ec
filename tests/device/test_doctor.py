"""`whale doctor --gpu` on test devices: its rows run and pass, and what is broken is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.device import streams
from tests.device.collectives import BACKEND
from tests.device.local_device import use_test_device
from tests.device.settings import settings
from tests.device.test_mutants import no_wait_for_all_reduces
from tests.ranks import ModelServer, RankError, preload
from whale.doctor.gpu_check import report, run_parts
from whale.doctor.jobs import (
    SMALL,
    CheckedJob,
    difference,
    exact_jobs,
    racy_jobs,
    train_locally,
)
from whale.doctor.rank import run_part
from whale.doctor.rows import CHECKS, Outcome

preload("tests.device.test_doctor")


MANY = 4
ON_FEWER = {"races", "one queue"}
"""parts whose rows are the same on 2 ranks, and take minutes on 4 test devices"""


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer(use_test_device) as found:
        yield found


def _part(_: None, part: str, folder: Path, mutate: Any) -> None:
    if mutate is not None:
        mutate()
    if part == "one queue":  # the command says so by a variable, which ranks read at their start
        settings.num_queues = 1
    run_part(part, folder, SMALL)
    streams.synchronize()


def _checked(server: ModelServer, num_ranks: int, mutate: Any = None) -> list[Outcome]:
    """All parts on ranks with the test device, as the command runs them on GPUs."""

    def run(part: str, folder: Path) -> str | None:
        if num_ranks == MANY and part in ON_FEWER:
            return None
        try:
            server.run(_part, num_ranks, part, folder, mutate, backend=BACKEND, timeout_s=250)
        except RankError as error:
            return str(error).strip().splitlines()[-1]
        return None

    return run_parts(run)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_ranks", [1, MANY])  # 2: by the command itself, below
def test_all_rows_pass_on_test_devices(server: ModelServer, num_ranks: int) -> None:
    outcomes = _checked(server, num_ranks)
    left_out = ON_FEWER if num_ranks == MANY else set()
    assert {outcome.part for outcome in outcomes} == set(CHECKS) - left_out
    wrong = [outcome for outcome in outcomes if not outcome.ok]
    assert not wrong
    rows = {outcome.row for outcome in outcomes}
    racy = [] if left_out else racy_jobs(num_ranks)
    assert {job.name for job in (*exact_jobs(num_ranks), *racy)} <= rows


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_missing_wait_is_found(server: ModelServer) -> None:
    outcomes = _checked(server, 2, no_wait_for_all_reduces)
    failed = {outcome.part: outcome for outcome in outcomes if not outcome.ok}
    assert {"exactness", "races"} <= set(failed)
    assert "race" in failed["races"].text


def test_a_part_that_fails_is_a_line_of_the_report() -> None:
    def run(part: str, folder: Path) -> str | None:
        if part == "races":
            return "rank 1 failed: ended by signal 11"
        line = json.dumps({"part": part, "row": "a", "ok": part != "speed", "text": "x | y"})
        (folder / f"{part}.jsonl").write_text(line + "\n")
        return None

    outcomes = run_parts(run)
    assert [outcome.part for outcome in outcomes] == list(CHECKS)
    text = report([], outcomes, 2)
    assert "2 of 5 rows failed" in text
    assert "| **FAILED** | races | all | rank 1 failed: ended by signal 11 |" in text
    assert r"| ok | bandwidth | a | x \| y |" in text
    data = json.loads(text.split("```json\n")[1].split("\n```")[0])
    assert [row["ok"] for row in data["outcomes"]] == [True, False, True, True, False]


def test_parts_that_would_begin_too_late_are_left_out() -> None:
    outcomes = run_parts(lambda part, folder: None, budget_s=-1.0)
    assert all("left out" in outcome.text for outcome in outcomes)
    assert not any(outcome.ok for outcome in outcomes)


@pytest.mark.parametrize("num_ranks", range(1, 17))
def test_every_number_of_ranks_has_rows(num_ranks: int) -> None:
    for job in (*exact_jobs(num_ranks), *racy_jobs(num_ranks)):
        stages = job.config.get("num_task_graph", 1)
        assert num_ranks % stages == 0
        assert job.split == 0 or num_ranks % job.split == 0


def test_plain_training_of_the_rows_differs() -> None:
    """Otherwise a row could not fail: what clipping, ties and optimizers do is far above rounding."""
    plain = {}
    for job in exact_jobs(2):
        plain[repr(job.plain)] = job.plain
    jobs = list(plain.values())
    assert len(jobs) == 5  # SGD, AdamW, clipping, fp16, tied weights
    trained = [train_locally(job, SMALL) for job in jobs]
    basis = trained[jobs.index(CheckedJob("plain training"))]
    for job, own in zip(jobs, trained, strict=True):
        if own is basis:
            continue
        if job.is_fp16:
            assert 0.0 < difference(own, basis) < job.allowed
        else:
            assert difference(own, basis) > 1e4 * job.allowed, job


# ---- the command itself, with ranks that the launcher starts

ROOT = Path(__file__).parents[2]
ON_TEST_DEVICES = {"PYTHONPATH": f"{ROOT / 'tests' / 'device' / 'site'}{os.pathsep}{ROOT}"}


def _command(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "whale", "doctor", "--gpu", "-o", str(folder / "r.md"), *options],
        cwd=folder,
        env={**os.environ, "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command_on_test_devices(tmp_path: Path) -> None:
    """`whale doctor --gpu` starts its ranks by the launcher, which know their device by themselves."""
    done = _command(tmp_path, "-n", "2", "--small", **ON_TEST_DEVICES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all is well, see" in done.stdout
    text = (tmp_path / "r.md").read_text()
    assert "2 ranks, device testgpu" in text
    data = json.loads(text.split("```json\n")[1].split("\n```")[0])
    rows = {row["row"] for row in data["outcomes"]}
    assert {job.name for job in (*exact_jobs(2), *racy_jobs(2))} <= rows
    assert {row["part"] for row in data["outcomes"]} == set(CHECKS)
