"""Saving: failing disks and crashes at any operation never leave a checkpoint that loads wrong; old
ones go; training continues beside it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.checkpoints import SECOND, assert_same, cut, read_all, save_cut, saver_of
from whale.checkpoint import (
    AsyncSaver,
    CheckpointError,
    Reader,
    Snapshot,
    Target,
    TensorPart,
    export_safetensors,
    find_checkpoints,
    finish,
    take_snapshot,
    write_rank,
)
from whale.checkpoint.format import rank_failure

# ---- writing that fails


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        sys.platform != "linux"
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True
        ).returncode
    ):
        pytest.skip("mounting a small file system needs root on Linux")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_keeps_earlier_checkpoints_and_training(small_disk: Path) -> None:
    saver = saver_of(small_disk)
    small = torch.randn(1000)
    large = torch.randn(400_000)
    saver.save(1, {"w": small}).wait()
    handle = saver.save(2, {"w": large})
    with pytest.raises(
        CheckpointError,
        match=r"disk is full: this file needs 1,600,000 bytes, [\d,]+ are free\. Free some space",
    ):
        handle.wait()
    assert [item.name for item in small_disk.iterdir()] == ["step_00000001"]
    assert_same(read_all(small_disk)["w"], small)
    saver.save(3, {"w": small + 1}).wait()  # there is room again
    assert_same(read_all(small_disk)["w"], small + 1)
    with pytest.raises(CheckpointError, match="disk is full"):
        export_safetensors(small_disk / "model.safetensors", {"w": large})
    assert sorted(item.name for item in small_disk.iterdir()) == ["step_00000001", "step_00000003"]


def test_a_full_disk_of_another_rank_is_reported_to_all(small_disk: Path) -> None:
    savers = [saver_of(small_disk, rank=rank, num_ranks=3) for rank in range(3)]
    handles = {rank: savers[rank].save(5, {f"w{rank}": torch.randn(10)}) for rank in (0, 2)}
    while (
        len(list(small_disk.glob(".tmp_*/rank_*.json"))) < 2
    ):  # while rank 1 takes all room, they could not write either
        time.sleep(0.01)
    handles[1] = savers[1].save(5, {"w1": torch.randn(400_000)})
    with pytest.raises(CheckpointError, match=r"rank 1 could not write its part.*disk is full"):
        handles[0].wait()
    with pytest.raises(CheckpointError, match=r"disk is full"):
        handles[1].wait()
    with pytest.raises(CheckpointError, match=r"rank 0 gave up"):
        handles[2].wait()
    assert list(small_disk.iterdir()) == []
    again = [
        saver.save(5, {f"w{rank}": torch.full((10,), rank)}) for rank, saver in enumerate(savers)
    ]
    assert {handle.wait() for handle in again} == {small_disk / "step_00000005"}


def test_a_disk_too_full_for_the_reason_is_reported_as_full(tmp_path: Path) -> None:
    target = Target(tmp_path, 5, "job_1")
    write_rank(target, 0, take_snapshot({"w": torch.ones(3)}))
    (
        target.temporary / rank_failure(1)
    ).touch()  # what rank 1 leaves when not even the reason finds room
    with pytest.raises(
        CheckpointError,
        match=r"rank 1 could not write its part.*the disk is full: .* are free\. Free some space",
    ):
        finish(target, 2, {})


def test_a_rank_that_still_writes_when_rank_0_gives_up_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def removed_meanwhile(descriptor: int) -> None:
        fsync(descriptor)
        shutil.rmtree(tmp_path / ".tmp_00000005_job_1")  # what rank 0 does

    monkeypatch.setattr(os, "fsync", removed_meanwhile)
    with pytest.raises(
        CheckpointError,
        match=r"failed: it was removed meanwhile\. Rank 0 gave up this save \(its message says why\)",
    ):
        write_rank(Target(tmp_path, 5, "job_1"), 1, take_snapshot({"w": torch.ones(3)}))


def test_a_read_only_folder_says_so(small_disk: Path) -> None:
    saver = saver_of(small_disk)
    saver.save(1, {"w": torch.ones(3)}).wait()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(CheckpointError, match=r"read-only.*Save to a folder that you can write to"):
        saver.save(2, {"w": torch.ones(3)}).wait()
    assert read_all(small_disk)["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("how", ["read-only", "disk is full"])
def test_a_disk_that_fails_before_another_rank_has_written_ends_the_save(
    small_disk: Path, how: str
) -> None:
    """The other rank cannot even leave a note: rank 0 finds out by itself, long before its patience
    is over.
    """
    saver = AsyncSaver(small_disk, job_id="job", rank=0, num_ranks=2, timeout_s=3600.0)
    handle = saver.save(1, {"w": torch.ones(3)})
    reports = small_disk / ".tmp_00000001_job_1" / "rank_00000.json"
    while not reports.exists():
        time.sleep(0.01)
    if how == "read-only":
        while subprocess.run(
            ["mount", "-o", "remount,ro", small_disk], capture_output=True
        ).returncode:
            time.sleep(0.01)
    else:
        with contextlib.suppress(OSError), (small_disk / "ballast").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
    with pytest.raises(CheckpointError, match=how):
        handle.wait(60.0)


def test_a_folder_without_permission_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write everywhere, so the refusal of the system is played."""

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "makedirs", refuse)
    with pytest.raises(CheckpointError, match="may not write there"):
        saver_of(tmp_path).save(2, {"w": torch.ones(3)}).wait()


LIMITED = """
import resource, sys, torch
from whale.checkpoint import AsyncSaver, CheckpointError, Reader

saver = AsyncSaver(sys.argv[1], job_id="job", timeout_s=5.0)
saver.save(1, {"w": torch.ones(1000)}).wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    saver.save(2, {"w": torch.ones(100_000)}).wait()
except CheckpointError as error:
    print(error)
saver.save(3, {"w": torch.full((1000,), 3.0)}).wait()
"""


def test_a_file_that_may_not_grow_keeps_earlier_checkpoints_and_training(tmp_path: Path) -> None:
    """A write that the system cuts short, on any machine: a full disk of the same kind needs root
    to be made.
    """
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (
        "a file of 400,000 bytes is larger than" in done.stdout
        and "Raise `ulimit -f`" in done.stdout
    )
    assert sorted(item.name for item in tmp_path.iterdir()) == ["step_00000001", "step_00000003"]
    assert read_all(tmp_path)["w"].tolist() == [3.0] * 1000


def test_a_file_in_place_of_the_folder_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"writing .* failed: Not a directory"):
        saver_of(tmp_path / "file").save(2, {"w": torch.ones(3)}).wait()


class Crash(BaseException):
    """The process is gone: nothing that it does after this has any effect."""


OPERATIONS = ("open", "write", "fsync", "replace", "rename", "unlink", "rmdir", "mkdir")


RENAME = os.rename


class Faults:
    """Lets the first `allowed` operations on files through, then fails: one of them, or (a crash)
    all from there on.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, allowed: int, error: BaseException) -> None:
        self.count = 0
        self.allowed = allowed
        self.error = error
        self.renamed = self.error_after_rename = False
        for name in OPERATIONS:
            monkeypatch.setattr(os, name, self.wrap(getattr(os, name)))

    def wrap(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            if self.count == self.allowed + 1 or (
                self.count > self.allowed and isinstance(self.error, Crash)
            ):
                self.error_after_rename = self.renamed
                raise self.error
            self.renamed = self.renamed or real is RENAME
            return real(*arguments, **options)

        return call


def contents(step: int, save: int) -> dict[str, Tensor]:
    return {
        "x": torch.full((6, 2), float(100 * step + save)),
        "y": torch.full((3,), float(100 * step + save)),
    }


def check_what_is_there(folder: Path, allowed: dict[int, set[int]]) -> list[int]:
    """Every checkpoint that is found loads, and is one of the saves of its step as a whole."""
    steps = []
    for path in find_checkpoints(folder):
        with Reader(path) as reader:
            got = {name: set(reader.read(name).reshape(-1).tolist()) for name in reader.names()}
        assert got.keys() == {"x", "y"} and got["x"] == got["y"] and len(got["x"]) == 1
        step, save = divmod(int(got["x"].pop()), 100)
        assert step == reader.step and save in allowed[step]
        steps.append(step)
    return steps


def two_saves(folder: Path) -> None:
    """Step 2 for the first time, then step 2 again, with the last two to be kept of steps
    0 and 1.
    """
    save_cut(folder, contents(2, 1), 2, 0, step=2, save_id="job_2", keep=2)
    save_cut(folder, contents(2, 2), 2, 0, step=2, save_id="job_3", keep=2)


def prepared_folder(folder: Path) -> Path:
    for step in (0, 1):
        save_cut(folder, contents(step, 0), 2, 0, step=step, save_id=f"job_{step}")
    return folder


@pytest.mark.parametrize("kind", ["crash", "full"])
def test_a_failure_at_any_operation_never_leaves_a_checkpoint_that_loads_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    possible = {0: {0}, 1: {0}, 2: {1, 2}}
    outcomes = Counter[tuple[int, ...]]()
    template = prepared_folder(tmp_path / "template")
    for allowed in itertools.count():
        folder = shutil.copytree(template, tmp_path / f"{kind}{allowed}")
        error = Crash() if kind == "crash" else OSError(errno.ENOSPC, "No space left on device")
        with monkeypatch.context() as patch:
            faults = Faults(patch, allowed, error)
            try:
                two_saves(folder)
                raised: BaseException | None = None
            except (Crash, CheckpointError) as problem:
                raised = problem
        steps = check_what_is_there(folder, possible)
        outcomes[tuple(steps)] += 1
        assert 1 in steps and (raised is not None or 2 in steps)
        save_cut(
            folder, contents(3, 7), 1, 0, step=3, save_id="job_9", keep=2
        )  # and life goes on, other rank count included
        assert check_what_is_there(folder, {**possible, 3: {7}})[0] == 3
        leftovers = [item.name for item in folder.iterdir() if not item.name.startswith("step_")]
        assert leftovers == []
        if faults.count <= allowed:
            break
    assert allowed > 30  # there were that many operations to fail
    assert outcomes.keys() >= {(1, 0), (2, 1)}


def test_an_error_at_any_operation_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process lives, so the saver cleans up after itself; the earlier checkpoint stays; the
    next save works.
    """
    num_errors = 0
    for allowed in itertools.count():
        folder = tmp_path / str(allowed)
        saver = saver_of(folder, keep=1)
        saver.save(1, {"w": torch.ones(3)}).wait()
        with monkeypatch.context() as patch:
            faults = Faults(patch, allowed, OSError(errno.EIO, "Input/output error"))
            try:
                saver.save(2, {"w": torch.full((3,), 2.0)}).wait()
                was_saved = True
            except CheckpointError as error:
                assert "Input/output error. Check the disk" in str(error)
                was_saved = False
        num_errors += not was_saved
        names = {item.name for item in folder.iterdir()}
        if was_saved:
            assert "step_00000002" in names  # at worst the older one could not be removed
        elif faults.error_after_rename:
            assert "step_00000002" in names or "step_00000001" in names
        else:
            assert names == {"step_00000001"}
        assert all(
            set(read_all(path)["w"].tolist()) == {float(path.name[-1])}
            for path in find_checkpoints(folder)
        )
        saver.save(3, {"w": torch.full((3,), 3.0)}).wait()
        assert [item.name for item in folder.iterdir()] == ["step_00000003"]
        if faults.count <= allowed:
            break
    assert num_errors > 10


def test_a_stale_folder_of_the_same_step_is_never_mixed_in(tmp_path: Path) -> None:
    """Rank 1 wrote step 5 before a crash; the next run of the job saves step 5 again and must not
    take that file.
    """
    write_rank(Target(tmp_path, 5, "first_1"), 1, Snapshot({"old": torch.ones(2)}, {}, {}))
    target = Target(tmp_path, 5, "second_1")
    write_rank(target, 0, Snapshot({"a": torch.zeros(2)}, {}, {}))
    with pytest.raises(
        CheckpointError,
        match=r"rank 1 of 2 did not write for 1 s.*same step and see the same folder",
    ):
        finish(target, 2, {}, timeout_s=SECOND)
    assert find_checkpoints(tmp_path) == [] and not target.temporary.exists()


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (((0, 2),), ((2, 3),), "hold 3 of the 4"),
        (((0, 3),), ((2, 4),), "overlap"),
    ],
)
def test_ranks_that_do_not_fit_together_are_found_when_saving(
    tmp_path: Path, first: Any, second: Any, message: str
) -> None:
    target = Target(tmp_path, 1, "job_1")
    for rank, ranges in enumerate((first, second)):
        size = ranges[0][1] - ranges[0][0]
        write_rank(
            target,
            rank,
            take_snapshot({"x": torch.ones(size)}, parts={"x": TensorPart((4,), ranges)}),
        )
    with pytest.raises(CheckpointError, match=f"'x' is wrong: .*{message}"):
        finish(target, 2, {})
    assert list(tmp_path.iterdir()) == []


# ---- which checkpoints stay


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    saver = saver_of(tmp_path, keep=2)
    for step in (3, 20, 100):
        saver.save(step, {"w": torch.full((2,), float(step))}).wait()
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step_00000100", "step_00000020"]
    saver.save(
        50, {"w": torch.full((2,), 50.0)}
    ).wait()  # after going back to step 20: later steps are not this run's to remove
    assert [path.name for path in find_checkpoints(tmp_path)] == [
        "step_00000100",
        "step_00000050",
        "step_00000020",
    ]
    assert sorted(item.name[:5] for item in tmp_path.iterdir()) == ["step_"] * 3
    with pytest.raises(ValueError, match="keep=0"):
        saver_of(tmp_path, keep=0)


def test_a_living_save_of_another_job_is_not_removed(tmp_path: Path) -> None:
    theirs = Target(tmp_path, 1, "other_1")
    write_rank(theirs, 0, take_snapshot({"w": torch.ones(2)}))
    saver_of(tmp_path).save(2, {"w": torch.zeros(2)}).wait()
    assert finish(theirs, 1, {}).exists()
    abandoned = Target(tmp_path, 3, "third_1")
    write_rank(abandoned, 0, take_snapshot({"w": torch.ones(2)}))
    for item in (*abandoned.temporary.iterdir(), abandoned.temporary):
        os.utime(item, (1, 1))
    saver_of(tmp_path).save(4, {"w": torch.zeros(2)}).wait()
    assert not abandoned.temporary.exists()


# ---- beside training


def test_save_returns_before_the_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (go.wait(10), real(descriptor))[1])
    weight = torch.ones(5)
    handle = saver_of(tmp_path).save(1, {"w": weight}, {"lr": 0.5})
    weight.zero_()
    assert not handle.done() and find_checkpoints(tmp_path) == []
    go.set()
    assert handle.wait() == tmp_path / "step_00000001" and handle.done()
    assert read_all(tmp_path)["w"].tolist() == [1] * 5


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    saver = saver_of(tmp_path)
    handles = [saver.save(step, {"w": torch.full((1000,), float(step))}) for step in range(4)]
    assert all(handle.done() for handle in handles[:-1])
    handles[-1].wait()
    for step, path in enumerate(reversed(find_checkpoints(tmp_path))):
        assert read_all(path)["w"].unique().tolist() == [step]


def test_several_ranks_at_once(tmp_path: Path) -> None:
    tensor = torch.randn(30, 4)
    savers = [
        AsyncSaver(tmp_path, job_id="job", rank=rank, num_ranks=4, timeout_s=20)
        for rank in range(4)
    ]
    for step in (1, 2):
        handles = []
        for saver, (piece, part) in zip(savers, cut(tensor * step, 4, 0)):
            handles.append(
                saver.save(
                    step, {"x": piece}, {"from": saver._rank}, {"rank": saver._rank}, {"x": part}
                )
            )
        assert {handle.wait() for handle in handles} == {tmp_path / f"step_{step:08d}"}
    with Reader(tmp_path) as reader:
        assert reader.values == {"from": 0} and [
            values["rank"] for values in reader.rank_values
        ] == [0, 1, 2, 3]
        assert_same(reader.read("x"), tensor * 2)


def test_a_script_that_ends_after_save_still_gets_its_checkpoint(tmp_path: Path) -> None:
    script = (
        "import sys, torch; from whale.checkpoint import AsyncSaver\n"
        "AsyncSaver(sys.argv[1], job_id='job').save(7, {'w': torch.ones(300000)})"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=60)
    assert read_all(tmp_path)["w"].sum() == 300000


def test_values_that_cannot_be_saved_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"values\.sampler is a"):
        saver_of(tmp_path).save(1, {"w": torch.ones(1)}, {"sampler": object()})
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        Reader(tmp_path)
