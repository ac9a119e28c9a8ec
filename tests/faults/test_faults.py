"""Jobs that are disturbed: they end everywhere in time, with one message, leave nothing behind, and
continue from the last checkpoint.

The weights in the end are those of an undisturbed run, to the bit, and no checkpoint ever loads as
something else than what was trained.
"""

from __future__ import annotations

import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.faults.injector import DAMAGE, DEADLY, DISK, Fault
from tests.faults.supervise import PROMISED_S, Jobs, Outcome, check_checkpoints

WATCHED = tuple(kind for kind in DEADLY if kind != "raise outside")
"""kinds about which the watch itself has something to say, however the script was started"""
STEPS = 24
pytestmark = pytest.mark.timeout(400)  # on a machine that does something else besides


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    with Jobs(forked=True) as started:
        yield started


class References(dict[int, Outcome]):
    """Number of ranks -> undisturbed run with all its checkpoints, made when it is asked for."""

    def __init__(self, jobs: Jobs, folders: pytest.TempPathFactory) -> None:
        super().__init__()
        self._jobs = jobs
        self._folders = folders

    def __missing__(self, num_ranks: int) -> Outcome:
        outcome = self._jobs.run(
            self._folders.mktemp("reference"), [], num_ranks=num_ranks, steps=STEPS, keep=1000
        )
        assert outcome.exit_code == 0, outcome.output
        assert not outcome.verdicts
        self[num_ranks] = outcome
        return outcome


@pytest.fixture(scope="module")
def references(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(jobs, tmp_path_factory)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder whose `checkpoints` is a file system of 1 MiB."""
    place = tmp_path / "checkpoints"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)],
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(
            f"a small file system cannot be mounted here (needs root): {mounted.stderr.strip()}"
        )
    yield tmp_path
    subprocess.run(["umount", "-l", str(place)], check=True)


def check(outcome: Outcome, jobs: Jobs, reference: Outcome) -> tuple[int, int]:
    """Everything that must hold after a disturbed job. Gives the numbers of good and refused
    checkpoints in its folder.
    """
    output = outcome.output[-6000:]
    assert outcome.exit_code == 0, output
    missing = [
        fault
        for number, fault in enumerate(outcome.faults)
        if number not in outcome.fired and fault.kind not in DAMAGE
    ]
    assert not missing, f"{missing} never happened: the test shows nothing\n{output}"
    assert not jobs.orphans()
    for number, seconds in outcome.ended_s.items():
        assert seconds < PROMISED_S, (
            f"{outcome.faults[number]}: the last rank ended after {seconds:.1f} s\n{output}"
        )
    in_order = sorted(outcome.fired, key=lambda number: outcome.fired[number])
    expected = [
        outcome.faults[number] for number in in_order if outcome.faults[number].kind in WATCHED
    ]
    told = [text for text in outcome.verdicts if "InjectedError: the data of" not in text]
    assert len(told) == len(expected), f"{len(told)} messages about {expected}\n{output}"
    for fault, text in zip(expected, told):
        wanted = {"raise": "failed at", "stop": "has been silent for"}.get(
            fault.kind, "died without a word"
        )
        assert text.startswith(f"rank {fault.rank} {wanted}"), f"{fault}: {text}"
        assert "The others stood: rank" in text
    weights = outcome.weights
    undisturbed = reference.weights
    assert weights.keys() == undisturbed.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, undisturbed[name]), (
            f"{name} is not that of an undisturbed run\n{output}"
        )
    good, refused = check_checkpoints(
        outcome.folder / "checkpoints", reference.folder / "checkpoints"
    )
    assert good > 0
    return good, refused


# ---- the small table, part of `make test`


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (
            Fault("raise", 1, step=3, place=2),
            r"rank 1 failed at step 3, action \d+ of \d+, .*: InjectedError: step 3, action 2",
        ),
        (
            Fault("raise outside", 1, step=3),
            r"rank 1 failed at step 2, its end: InjectedError: the data of step 3 cannot be read",
        ),
        (
            Fault("kill", 1, step=3, place=2),
            r"rank 1 died without a word \(killed, or crashed\). It was last heard of .* at (step \d, |the start)",
        ),
        (
            Fault("kill", 0, step=3, place=2),
            r"rank 0 died without a word \(killed, or crashed\). It was last heard of at (step \d, |the start)",
        ),
        (
            Fault("vanish", 1, step=3, place=2),
            r"rank 1 died without a word \(killed, or crashed\). It was last heard of .* at (step \d, |the start)",
        ),
        (
            Fault("stop", 1, step=3, place=2),
            r"rank 1 has been silent for \d+ s: it hangs, is stopped or is cut off. It was last heard of ",
        ),
    ],
    ids=lambda value: f"{value.kind} {value.rank}" if isinstance(value, Fault) else "",
)
def test_one_fault_ends_the_job_everywhere(
    jobs: Jobs, tmp_path: Path, fault: Fault, told: str
) -> None:
    """One message that names rank, action and peer; every rank ends, with an error; nothing is left
    over.

    Where a dead rank stood is known from its last beat: on a busy machine, ten steps of a few
    milliseconds ago.
    """
    outcome = jobs.run(tmp_path, [fault], restarts=0)
    assert outcome.exit_code != 0 and 0 in outcome.fired
    assert len(outcome.verdicts) == 1, outcome.output[-3000:]
    assert re.match(told, outcome.verdicts[0]), outcome.verdicts[0]
    other = 1 - fault.rank
    stood = outcome.verdicts[0].partition("The others stood: ")[2]
    assert re.match(rf"rank {other} at step \d, ", stood), outcome.verdicts[0]
    if fault.kind != "raise outside":  # the other one is in the same step, and waits for this one
        assert re.search(
            rf"action \d+ of \d+, receive .* from rank {fault.rank}|all-reduce of gradients", stood
        ), outcome.verdicts[0]
    assert outcome.ended_s[0] < PROMISED_S
    assert not jobs.orphans()
    assert not (tmp_path / "final.safetensors").exists()


def test_a_fault_in_replicas_that_are_not_alike_is_named(jobs: Jobs, tmp_path: Path) -> None:
    """Rank 2 is the second stage of a pipeline beside rank 0, which gets no message of it: both
    others hear of its end.
    """
    (tmp_path / "unlike").touch()
    outcome = jobs.run(tmp_path, [Fault("kill", 2, step=3, place=2)], num_ranks=3, restarts=0)
    assert outcome.exit_code != 0 and 0 in outcome.fired
    assert len(outcome.verdicts) == 1, outcome.output[-3000:]
    told, _, stood = outcome.verdicts[0].partition("The others stood: ")
    assert told.startswith("rank 2 died without a word (killed, or crashed)"), told
    assert "rank 0 at step" in stood and "rank 1 at step" in stood
    assert outcome.ended_s[0] < PROMISED_S
    assert not jobs.orphans()


def test_four_faults_in_one_job(jobs: Jobs, references: References, tmp_path: Path) -> None:
    faults = [
        Fault("kill", 1, step=2, place=4),
        Fault("kill in save", 0, step=6, place=5),
        Fault("tear", 0, step=6, place=3),
        Fault("nan", 1, step=14),
    ]
    outcome = jobs.run(tmp_path, faults, steps=STEPS)
    check(outcome, jobs, references[2])
    assert len(outcome.fired) == len(faults)
    assert "not finite: layers.2.weight on rank 1" in outcome.output
    assert 'or continue with "on_nonfinite": "skip"' in outcome.output


def test_disk_faults_do_not_stop_training(
    jobs: Jobs, references: References, small_disk: Path
) -> None:
    faults = [
        Fault("full disk", 0, step=4),
        Fault("read only", 0, step=8),
        Fault("full disk", 0, step=12),
    ]
    outcome = jobs.run(small_disk, faults, steps=STEPS, restarts=0)
    check(outcome, jobs, references[2])
    full = [
        line
        for line in outcome.output.splitlines()
        if line.startswith("not saved:") and "the disk is full" in line
    ]
    assert len(full) == 2 and "Free some space" in full[0]
    assert "the file system is read-only. Save to a folder that you can write to" in outcome.output


# the same with forked ranks stands above, restarts of `whale run` are in test_cli.py
@pytest.mark.slow
def test_whale_run_continues_after_a_kill(references: References, tmp_path: Path) -> None:
    with Jobs(forked=False) as jobs:
        outcome = jobs.run(tmp_path, [Fault("kill", 1, step=7, place=2)], steps=STEPS, restarts=1)
        check(outcome, jobs, references[2])


# ---- the longer ones


@pytest.mark.slow
def test_seven_faults_in_one_job(jobs: Jobs, references: References, tmp_path: Path) -> None:
    faults = [
        Fault("kill", 1, step=2, place=4),
        Fault("kill in save", 0, step=6, place=5),
        Fault("tear", 0, step=6, place=3),
        Fault("raise", 1, step=10, place=2),
        Fault("nan", 1, step=14),
        Fault("stop", 1, step=18, place=1),
        Fault("kill", 0, step=22),
    ]
    outcome = jobs.run(tmp_path, faults, steps=STEPS)
    check(outcome, jobs, references[2])
    assert len(outcome.fired) == len(faults)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "faults",
    [
        [Fault("kill", 0, step=3, place=2), Fault("stop", 0, step=7)],
        [Fault("raise outside", 1, step=3), Fault("stop", 1, step=7, place=3)],
    ],
    ids=lambda faults: ", ".join(fault.kind for fault in faults),
)
def test_whale_run_continues_after_faults(
    references: References, tmp_path: Path, faults: list[Fault]
) -> None:
    with Jobs(forked=False) as jobs:
        outcome = jobs.run(tmp_path, faults, steps=STEPS)
        check(outcome, jobs, references[2])


# ---- a hundred


def random_faults(number: int, num_ranks: int, num_faults: int) -> list[Fault]:
    """Faults at random actions, some steps apart, so that each meets a job that runs again."""
    random_ = random.Random(f"{number}|{num_ranks}")
    faults = []
    for place in range(num_faults):
        kind = random_.choice(
            (
                "kill",
                "kill",
                "kill in save",
                "kill in save",
                "raise",
                "raise outside",
                "vanish",
                "nan",
                "stop",
            )
        )
        faults.append(
            Fault(kind, random_.randrange(num_ranks), 3 * place + 2, random_.randrange(7))
        )
    # done when the job starts again after one of the faults above
    damage = [
        Fault(random_.choice(DAMAGE), 0, step, random_.randrange(8))
        for step in random_.sample(range(4, 3 * num_faults, 3), 3)
    ]
    return faults + damage


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_faults(
    jobs: Jobs, references: References, tmp_path: Path, small_disk: Path
) -> None:
    counted: dict[str, int] = {}
    slowest_s = 0.0
    num_good = 0
    num_refused = 0
    for number in range(14):
        num_ranks = 2 + number % 2
        folder = tmp_path / f"job_{number}"
        if number == 0:
            folder = small_disk
            faults = [Fault(kind, 0, step) for step, kind in zip(range(2, STEPS, 4), 3 * DISK)]
        else:
            folder.mkdir()
            faults = random_faults(number, num_ranks, 7)
        outcome = jobs.run(folder, faults, num_ranks=num_ranks, steps=STEPS)
        good, refused = check(outcome, jobs, references[num_ranks])
        for fired in outcome.fired:
            counted[faults[fired].kind] = counted.get(faults[fired].kind, 0) + 1
        slowest_s = max([slowest_s, *outcome.ended_s.values()])
        num_good = num_good + good
        num_refused = num_refused + refused
    print(
        f"\n{sum(counted.values())} faults {counted}; slowest end {slowest_s:.1f} s; checkpoints: "
        f"{num_good} good, {num_refused} refused"
    )
    assert sum(counted.values()) >= 100
