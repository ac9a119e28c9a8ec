"""Does the damage: in each rank of `tests/faults/train.py`, at the action that the list of faults
names. Nothing of it is inside Whale.

A fault fires once, whatever is started again: before it strikes it leaves a file with the time in
the state folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from whale.checkpoint import CheckpointError, Handle
from whale.runtime.executor import Executor
from whale.scheduling import Action, Kind

MARK = "WHALE_FAULTS_MARK"
"""environment variable by which the processes of one job are found"""

DEADLY = ("kill", "stop", "vanish", "raise", "raise outside", "kill in save")
"""kinds that end one rank, and with it the job"""
DISK = ("full disk", "read only")
"""kinds that make one save impossible"""
DAMAGE = ("tear", "truncate", "lose", "tear index")
"""kinds that damage the latest checkpoint while the job is down"""


REMOUNT_S = 30.0

_open = os.open  # the real one


class InjectedError(Exception):
    """Raised by a fault."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    kind: str
    rank: int
    step: int = 0
    """the first step at or after this one; for damage: the first start after a checkpoint of this
    step or a later one
    """
    place: int = 0
    """which action of the step, or which file operation of the save; too high a number means the
    last that is known to come
    """


class Injector:
    """The faults of one rank."""

    def __init__(self, rank: int, state: Path) -> None:
        self.rank = rank
        self.state = state
        faults = [Fault(**fault) for fault in json.loads((state / "faults.json").read_text())]
        self._faults = {number: fault for number, fault in enumerate(faults) if fault.rank == rank}
        self._operations = 0
        self._saving = -1
        self._restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        (state / f"rank_{os.getpid()}.json").write_text(
            json.dumps({"rank": rank, "restart": self._restart})
        )
        self._watch_actions()
        self._watch_files()

    # ---- where faults are looked for

    def start(self, checkpoints: Path) -> None:
        """Before a checkpoint is loaded: damages the latest one."""
        found = sorted(path for path in checkpoints.glob("step_*") if path.suffix != ".old")
        for number, fault in self._waiting(*DAMAGE):
            if len(found) > 1 and int(found[-1].name.removeprefix("step_")) >= fault.step:
                self._fire(number)
                damage(found[-1], fault)
                return  # the one before stays whole: there is something to go on from

    def between_steps(self, step: int) -> None:
        for number, fault in self._waiting("raise outside"):
            if step >= fault.step and self._fires_alone(number):
                raise InjectedError(f"the data of step {step} cannot be read")

    @contextlib.contextmanager
    def save(self, step: int, folder: Path, previous: Handle | None) -> Iterator[bool]:
        """Around a save: makes it impossible, or is ready to kill in the middle. Gives whether it
        is impossible.
        """
        self._saving = step
        self._operations = 0
        found = [
            (number, fault.kind) for number, fault in self._waiting(*DISK) if step >= fault.step
        ][:1]
        ballast = folder / "ballast"
        for number, kind in found:
            _await_removals(folder, step, previous)
            self._fire(number)
            _fill(ballast) if kind == "full disk" else remount(folder, "ro")
        yield bool(found)
        for _, kind in found:
            ballast.unlink() if kind == "full disk" else remount(folder, "rw")

    def _action(self, step: int, action: Action, place: int) -> bool:
        """Gives whether the gradients of this action are to be poisoned."""
        for number, fault in self._waiting("kill", "stop", "vanish", "raise"):
            if step >= fault.step and place >= fault.place and self._fires_alone(number):
                strike(fault, f"step {step}, action {place}: {action}")
        for number, fault in self._waiting("nan"):
            # a backward that is not the last one: its gradients are not on their way to other ranks
            # yet
            if (
                step >= fault.step
                and action.kind is Kind.BACKWARD
                and action.micro_batch == 0
                and self._fires_alone(number)
            ):
                return True
        return False

    def _file_operation(self) -> None:
        if threading.current_thread().name != "whale-checkpoint":
            return
        for number, fault in self._waiting("kill in save"):
            if (
                self._saving >= fault.step
                and self._operations >= fault.place
                and self._fires_alone(number)
            ):
                strike(fault, "")
        self._operations += 1

    # ---- how they are looked for

    def _watch_actions(self) -> None:
        """Every action of every executor goes through `_action` first."""
        injector = self
        run = Executor.run
        step = 0

        def wrapped(
            executor: Executor, place: int, action: Action, do: Callable[[Any], None]
        ) -> Callable[[Any], None]:
            def with_faults(this: Any) -> None:
                poisons = injector._action(step, action, place)
                do(this)
                if poisons:
                    parameter = next(
                        iter(executor.program.chunks[action.stage].module_for(1).parameters())
                    )
                    assert parameter.grad is not None
                    parameter.grad.view(-1)[0] = torch.nan

            return with_faults

        def run_with_faults(executor: Executor, given: Any, *more: Any) -> Any:
            nonlocal step
            step = given.step
            if not hasattr(executor, "has_faults"):
                executor.has_faults = True  # type: ignore[attr-defined]
                executor._prepared = [
                    each._replace(run=wrapped(executor, place, each.action, each.run))
                    for place, each in enumerate(executor._prepared)
                ]
            return run(executor, given, *more)

        Executor.run = run_with_faults  # type: ignore[method-assign]

    def _watch_files(self) -> None:
        for name in ("fsync", "rename", "replace", "unlink", "makedirs", "open"):
            original = getattr(os, name)

            def operation(*args: Any, _original: Any = original, **options: Any) -> Any:
                self._file_operation()
                return _original(*args, **options)

            setattr(os, name, operation)

    def _waiting(self, *kinds: str) -> list[tuple[int, Fault]]:
        return [
            (n, f)
            for n, f in self._faults.items()
            if f.kind in kinds and not (self.state / f"fired_{n}").exists()
        ]

    def _fire(self, number: int) -> None:
        (self.state / f"fired_{number}").write_text(repr(time.time()))

    def _fires_alone(self, number: int) -> bool:
        """Only one fault ends a job, whichever thread and rank come first: the others wait until it
        runs again.
        """
        try:
            os.close(_open(self.state / f"struck_{self._restart}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        self._fire(number)
        return True


def strike(fault: Fault, where: str) -> None:
    sys.stdout.flush()
    if fault.kind in ("kill", "kill in save"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "vanish":
        os._exit(0)  # for the launcher all is well
    raise InjectedError(where)


def damage(checkpoint: Path, fault: Fault) -> None:
    """Makes one file of a checkpoint wrong."""
    files = sorted(checkpoint.glob("*.safetensors"))
    file = (
        checkpoint / "index.json" if fault.kind == "tear index" else files[fault.place % len(files)]
    )
    content = file.read_bytes()
    if fault.kind == "lose":
        file.unlink()
    elif fault.kind == "truncate":
        file.write_bytes(content[: len(content) * (1 + fault.place % 7) // 8])
    else:  # a block that never reached the disk
        start = len(content) * (fault.place % 8) // 8
        file.write_bytes(
            content[:start]
            + bytes(byte ^ 0x55 for byte in content[start : start + 64])
            + content[start + 64 :]
        )


def _await_removals(folder: Path, step: int, previous: Handle | None) -> None:
    """Waits until older checkpoints and what is left of failed saves are gone: a full disk would
    have space again while the next save is under way.
    """
    if previous is not None:
        with contextlib.suppress(CheckpointError):
            previous.wait()
    deadline = time.monotonic() + REMOUNT_S
    while any(
        path.name < f".tmp_{step:08d}" for path in folder.glob(".tmp_*")
    ):  # this save may be under way on other ranks
        if time.monotonic() > deadline:
            raise OSError(
                f"{folder} still has parts of failed saves: "
                f"{sorted(path.name for path in folder.glob('.tmp_*'))}"
            )
        time.sleep(0.02)


def _fill(ballast: Path) -> None:
    """Takes all space of a small file system."""
    with ballast.open("wb", buffering=0) as file:
        size = 1 << 16
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2


def remount(folder: Path, mode: str) -> None:
    """Waits while a file is open for writing there: the save before may still be under way, on any
    rank.
    """
    deadline = time.monotonic() + REMOUNT_S
    while (
        done := subprocess.run(
            ["mount", "-o", f"remount,{mode}", str(folder)], capture_output=True, text=True
        )
    ).returncode:
        if time.monotonic() > deadline:
            raise OSError(f"{folder} cannot be mounted {mode}: {done.stderr.strip()}")
        time.sleep(0.02)


def write_faults(state: Path, faults: list[Fault]) -> None:
    state.mkdir(parents=True, exist_ok=True)
    (state / "faults.json").write_text(json.dumps([asdict(fault) for fault in faults]))
