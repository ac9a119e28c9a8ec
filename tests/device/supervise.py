"""Runs a job on test devices whose ranks may die or hang, and tells how each of them ended.

`tests/ranks.py` ends a job at the first failure of a rank; here the ranks must end by themselves.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from tests.device.collectives import BACKEND
from whale.distributed.watch import report_failure

LOOK_S = 0.02
FAULT = "fault"
"""file that the faulty rank makes when it strikes"""


@dataclass(frozen=True)
class Ended:
    """How one rank ended."""

    exit_code: int | None
    """None: it had to be killed; below 0: the signal that ended it"""
    after_s: float
    """seconds after the fault"""
    output: str


@dataclass(frozen=True)
class Request:
    """A job that is to be run."""

    rank_main: Callable[[object, Path], None]
    """what a rank does, with what the server prepared and a folder of the job"""
    num_ranks: int
    timeout_s: float


def supervise(prepared: object, request: Request) -> list[Ended]:
    """Forks the ranks and waits for all of them; runs in a process without threads."""
    folder = Path(tempfile.mkdtemp(prefix="whale-supervise-"))
    pids = [_fork(prepared, request, rank, folder) for rank in range(request.num_ranks)]
    codes, times = _wait(pids, request.timeout_s)
    fault = folder / FAULT
    struck_at = fault.stat().st_mtime if fault.exists() else float("nan")
    found = []
    for rank, code in enumerate(codes):
        output = (folder / f"{rank}.txt").read_text()
        found.append(Ended(code, times[rank] - struck_at, output))
    shutil.rmtree(folder)
    return found


def _wait(pids: list[int], timeout_s: float) -> tuple[list[int | None], list[float]]:
    """Exit codes and the times at which ranks ended; what is left after `timeout_s` is killed."""
    codes: list[int | None] = [None] * len(pids)
    times = [float("inf")] * len(pids)
    left = dict(enumerate(pids))
    deadline = time.time() + timeout_s
    while left and time.time() < deadline:
        for rank, pid in list(left.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[rank] = os.waitstatus_to_exitcode(status)
                times[rank] = time.time()
                del left[rank]
        time.sleep(LOOK_S)
    for pid in left.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return codes, times


def _fork(prepared: object, request: Request, rank: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    output = os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = 1
    try:
        _join(request, rank, folder)
        request.rank_main(prepared, folder)
        code = 0
    except BaseException as error:
        if isinstance(error, Exception):
            report_failure(error)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        atexit._run_exitfuncs()  # as at the end of a program: groups are left there
        os._exit(code)
    raise AssertionError("not reached")


def _join(request: Request, rank: int, folder: Path) -> None:
    size = str(request.num_ranks)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        BACKEND,
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=request.num_ranks,
        timeout=timedelta(seconds=2 * request.timeout_s),
    )
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
