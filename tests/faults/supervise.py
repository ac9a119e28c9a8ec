"""Runs disturbed jobs, and looks at what is left: processes, times, messages, checkpoints,
weights.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch
from safetensors.torch import load_file

from tests.faults.injector import DEADLY, MARK, Fault, write_faults
from whale.checkpoint import CheckpointError, Reader

ROOT = Path(__file__).parents[2]
JOB_S = 110.0
"""how long a job may go on without a word before the test gives it up: a hang is seen long before,
by its own time
"""
LOOK_S = 0.05
PROMISED_S = 30.0
"""from a fault to the end of all ranks"""


@dataclass
class Outcome:
    """What became of a job."""

    folder: Path
    faults: list[Fault]
    exit_code: int
    output: str
    ended_s: dict[int, float] = field(default_factory=dict)
    """number of a deadly fault that fired -> seconds until all ranks of that time were gone"""
    fired: dict[int, float] = field(default_factory=dict)
    """number of a fault -> when it happened"""

    @property
    def verdicts(self) -> list[str]:
        """Messages of the watch."""
        return re.findall(r"^whale: (rank .*)$", self.output, re.MULTILINE)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "final.safetensors")


class _Looker:
    """Notes when each rank's process is gone."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self.lives: dict[int, tuple[float, float | None]] = {}
        """pid -> when it reported itself, when it was gone"""
        self._stops = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stops.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        for file in self._state.glob("rank_*.json"):
            self.lives.setdefault(
                int(file.stem.removeprefix("rank_")), (file.stat().st_mtime, None)
            )
        for pid, (start, end) in list(self.lives.items()):
            if end is None and not _is_alive(pid):
                self.lives[pid] = (start, time.time())

    def stop(self) -> None:
        self._stops.set()
        self._thread.join()
        self._look()


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def marked(mark: str) -> list[int]:
    """Processes with this mark in the environment that they were started with."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}\0".encode() in (folder / "environ").read_bytes() and _is_alive(
                int(folder.name)
            ):
                found.append(int(folder.name))
    return found


class Jobs:
    """Starts jobs one after the other; `forked` takes warm ranks, otherwise each job is one `whale
    run`.
    """

    def __init__(self, forked: bool) -> None:
        self.mark = uuid.uuid4().hex
        self._environment = os.environ | {
            MARK: self.mark,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self._server: subprocess.Popen[str] | None = (
            self._start([sys.executable, "-m", "tests.faults.forks"]) if forked else None
        )

    def run(
        self,
        folder: Path,
        faults: list[Fault],
        *,
        num_ranks: int = 2,
        steps: int = 12,
        restarts: int | None = None,
        keep: int = 3,
    ) -> Outcome:
        """One job with these faults, and as many restarts as it needs."""
        state = folder / "state"
        shutil.rmtree(state, ignore_errors=True)
        write_faults(state, faults)
        (folder / "output.txt").unlink(missing_ok=True)
        restarts = len(faults) if restarts is None else restarts
        looker = _Looker(state)
        try:
            if self._server is not None:
                exit_code = self._ask(
                    {
                        "folder": str(folder),
                        "num_ranks": num_ranks,
                        "steps": steps,
                        "restarts": restarts,
                        "keep": keep,
                    }
                )
            else:
                exit_code = self._whale_run(folder, num_ranks, steps, restarts, keep)
        finally:
            looker.stop()
        outcome = Outcome(folder, faults, exit_code, (folder / "output.txt").read_text())
        for number, fault in enumerate(faults):
            file = state / f"fired_{number}"
            if not file.exists():
                continue
            at = outcome.fired[number] = float(file.read_text())
            if fault.kind in DEADLY:
                ends = [
                    end
                    for start, end in looker.lives.values()
                    if start <= at and (end is None or end >= at)
                ]
                outcome.ended_s[number] = (
                    max((end or float("inf")) - at for end in ends) if ends else 0.0
                )
        return outcome

    def orphans(self) -> list[int]:
        """Processes of our jobs that are still there after a job."""
        own = {self._server.pid} if self._server is not None else set()
        deadline = time.monotonic() + 5.0  # the last one may be on its way out
        while (
            left := [pid for pid in marked(self.mark) if pid not in own]
        ) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        return left

    def close(self) -> None:
        if self._server is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()
        for pid in marked(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def __enter__(self) -> Jobs:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self, words: list[str], **options: object) -> subprocess.Popen[str]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE} | options
        return subprocess.Popen(
            words, env=self._environment, cwd=ROOT, start_new_session=True, text=True, **pipes
        )  # type: ignore[call-overload, no-any-return]

    def _whale_run(self, folder: Path, num_ranks: int, steps: int, restarts: int, keep: int) -> int:
        words = [
            str(Path(sys.executable).parent / "whale"),
            "run",
            "-n",
            str(num_ranks),
            "--restarts",
            str(restarts),
        ]
        with (folder / "output.txt").open("w") as output:
            script = [
                str(ROOT / "tests/faults/train.py"),
                str(folder),
                "--steps",
                str(steps),
                "--keep",
                str(keep),
            ]
            self._environment["WHALE_RUN_FOLDER"] = str(folder / "run")
            process = self._start(
                words + script, stdout=output, stderr=output, stdin=subprocess.DEVNULL
            )
            return process.wait(JOB_S)

    def _ask(self, request: Mapping[str, object]) -> int:
        assert (
            self._server is not None
            and self._server.stdin is not None
            and self._server.stdout is not None
        )
        print(json.dumps(request), file=self._server.stdin, flush=True)
        timer = threading.Timer(JOB_S, self.close)
        timer.start()
        line = self._server.stdout.readline()
        timer.cancel()
        if not line:
            output = (Path(str(request["folder"])) / "output.txt").read_text()
            raise AssertionError(
                f"the job did not end within {JOB_S:.0f} s, or its agent died:\n{output[-3000:]}"
            )
        return int(json.loads(line)["exit_code"])


def check_checkpoints(folder: Path, reference: Path) -> tuple[int, int]:
    """Every checkpoint is refused, or holds what the undisturbed run had at that step, to the bit.
    Gives (good, refused).
    """
    good = refused = 0
    for path in sorted(folder.glob("step_*")):
        try:
            with Reader(path) as reader:
                tensors = {
                    name: reader.read(name)
                    for name in reader.names()
                    if not name.startswith("rng/")
                }
                values = (reader.step, reader.values["data"])
        except CheckpointError:
            refused += 1
            continue
        with Reader(reference / path.name.removesuffix(".old")) as expected:
            assert values == (expected.step, expected.values["data"]), (
                f"{path} is of another step or position"
            )
            names = {name for name in expected.names() if not name.startswith("rng/")}
            assert names == set(tensors), f"{path} has other tensors"
            for name, tensor in tensors.items():
                assert torch.equal(tensor, expected.read(name)), (
                    f"{path} loads, but {name} is not what was trained"
                )
        good += 1
    return good, refused
