"""Starts the ranks of a job on this machine, through torch's own elastic launcher, and says which
rank failed first and why.

    launch           in the launcher: starts the ranks, waits, gives the first failure
    run_as_rank      in each rank, whose program is this file: runs the script as `python script.py`
                     would, and writes down how it failed
    run_script       a script as the main program of this process; also used by `whale plan`

Ranks write their error with a time in nanoseconds (`error_file.py`); the launcher shows each once
(`error_reports.py`). A rank ends itself when its launcher is gone, however that ended.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import io
import logging
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from whale.config import RUN_FOLDER_VARIABLE
from whale.error_file import error_file, write_error
from whale.error_reports import Report, Reports, as_record, report_of
from whale.metric_files import note_failure
from whale.progress import PROGRESS_VARIABLE, watch_output

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

GRACE_S = 5
"""how long a rank gets to end itself, before it is killed"""
WATCH_S = 1.0
"""how often a rank looks whether its launcher is still there"""
LONGEST_TEXT = 500
QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
"""environment of all ranks of a host but the first, unless the user sets it: every rank would
repeat the warnings and progress bars of transformers. Errors are shown by all
"""


@dataclass(frozen=True)
class Failure:
    """How a job ended that did not end well."""

    rank: int
    text: str
    """the last line of the rank's traceback, or the signal that ended it"""
    exit_code: int
    """for the shell: the rank's own, or 128 + signal"""
    num_failed: int
    is_shown: bool = False
    """the text is Whale's message, which was shown already"""

    def __str__(self) -> str:
        others = f" ({self.num_failed - 1} more failed after it)" if self.num_failed > 1 else ""
        text = ", its message is above" if self.is_shown else f": {self.text}"
        return f"rank {self.rank} failed{text}{others}"


def default_num_ranks() -> int:
    """One rank for each accelerator, else for each CPU core that this process may use."""
    from whale.devices import num_accelerators  # torch takes its time; not every command needs it

    if num_accelerators():
        return num_accelerators()
    if hasattr(os, "sched_getaffinity"):  # inside a container fewer than the machine has
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def launch(
    script: Path, arguments: list[str], num_ranks: int, num_restarts: int = 0
) -> Failure | None:
    """Runs the script on `num_ranks` ranks of this machine; None when all ended well. Ctrl-C ends
    all ranks and is raised on.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: ranks share the cores
    os.environ.setdefault(RUN_FOLDER_VARIABLE, str(Path("runs") / script.stem))
    os.environ.setdefault(PROGRESS_VARIABLE, "1")
    # a store that outlives the ranks still holds the addresses of dead ones when they are started
    # again (pytorch issue 135712)
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    # of this process only, not of the ranks: `whale run` prints the failure itself, in one line
    logging.disable(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="whale-run-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",  # the host's own name may lead nowhere
            max_restarts=num_restarts,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            # Ctrl-C stays a KeyboardInterrupt: then ranks get SIGTERM, which also ends a wait
            signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",
            shutdown_timeout=GRACE_S,
        )
        try:
            # the program of a rank is this file: see its end
            with Reports(Path(folder)):
                elastic_launch(config, sys.executable)(__file__, str(script), *arguments)
        except ChildFailedError as error:
            return first_failure(error.failures)
    return None


def first_failure(failures: dict[int, ProcessFailure]) -> Failure:
    """The failure that the others followed from.

    A rank killed by a signal comes first, since no other rank's error can do that; then the
    earliest exception that does not follow from another. SIGTERM is what the launcher itself sends
    to the ranks that were left.
    """

    def order(rank: int) -> tuple[bool, bool, bool, int]:
        failure = failures[rank]
        return (
            failure.exitcode == -signal.SIGTERM,
            failure.exitcode >= 0 or _written(failure) is not None,
            bool(_report(failure).follows),
            _time_ns(failure),
        )

    rank = min(failures, key=order)
    failure = failures[rank]
    text = _written(failure)
    num_failed = sum(other.exitcode != -signal.SIGTERM for other in failures.values())
    if text is not None:
        is_shown = _report(failure).is_refusal
        return Failure(rank, text, max(failure.exitcode, 1), num_failed, is_shown)
    if failure.exitcode < 0:
        is_killed = failure.exitcode == -signal.SIGKILL
        hint = ", often by the system when memory runs out" if is_killed else ""
        text = f"ended by signal {-failure.exitcode} ({failure.signal_name()}{hint})"
        return Failure(rank, text, 128 - failure.exitcode, num_failed)
    return Failure(rank, f"exit code {failure.exitcode}", failure.exitcode, num_failed)


def _written(failure: ProcessFailure) -> str | None:
    """What the rank wrote down."""
    message: Any = failure.error_file_data.get("message")
    return message["message"] if isinstance(message, dict) else None


def _report(failure: ProcessFailure) -> Report:
    """What was shown of the rank's error; empty for one that only ended."""
    found: Any = failure.error_file_data.get("report")
    return Report(**found) if isinstance(found, dict) else Report("")


def _time_ns(failure: ProcessFailure) -> int:
    return int(failure.error_file_data.get("time_ns", failure.timestamp * 10**9))


def run_as_rank() -> NoReturn:
    """The program of each rank: `sys.argv[1:]` is the script and its arguments."""
    script, *arguments = sys.argv[1:]
    threading.Thread(target=_end_with_launcher, args=(os.getppid(),), daemon=True).start()
    faulthandler.enable()  # a crash in C++ shows where Python was
    if isinstance(sys.stdout, io.TextIOWrapper):
        # lines are seen at once, each in one write: without a buffer, or with PYTHONUNBUFFERED, the
        # end of a line is a write of its own, and lines of several ranks mix
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
    watch_output()
    _end_process(_exit_code(script, arguments))


def _exit_code(script: str, arguments: list[str]) -> int:
    """Runs the script and returns the exit code that `python script.py` would give."""
    try:
        run_script(Path(script), arguments)
    except SystemExit as stop:
        if stop.code in (None, 0):
            return 0
        _write_down(f"sys.exit({stop.code!r})")
        if isinstance(stop.code, int):
            return stop.code
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.last_value = error  # as Python does for exit functions, which look at it
        _report_to_watch(error)
        report = report_of(error, Path(script))
        if not _write_down(_last_line(error), report):  # there is no launcher to show it
            sys.stderr.write(f"\nrank {os.environ.get('RANK', '?')}: {report.text}")
        return 1
    return 0


def _end_process(code: int) -> NoReturn:
    """Ends this rank as Python does, threads and exit functions first, but for one thing: the
    interpreter is not taken apart.

    Threads of torch's process groups live until their last reference goes. One of them can meet a
    half-destroyed interpreter, and C++ then aborts the process: a job that had finished and saved
    everything was reported as failed by signal 6.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a closed pipe; a stream that was closed
            stream.flush()
    os._exit(code & 0xFF)


def run_script(script: Path, arguments: list[str]) -> None:
    """Runs a script as `python script.py arguments` would, in this process."""
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    runpy.run_path(str(script), run_name="__main__")
    _say_if_nothing_was_parallelized(script)


def _say_if_nothing_was_parallelized(script: Path) -> None:
    """One rank of several says that each of them ran the whole script by itself."""
    session = sys.modules.get("whale.session")
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks == 1 or os.environ.get("RANK") != "0":
        return
    if session is None or not session.session.is_parallelized:
        print(
            f"whale run: {script} ended without calling wh.parallelize, so each of the {num_ranks} "
            "processes ran all of it by itself. Try: engine = wh.parallelize(model, sample_batch, "
            "optimizer=...), and engine.step(batch) in the loop",
            file=sys.stderr,
        )


def _last_line(error: BaseException) -> str:
    """`ValueError: what was wrong`: first line of the message, which torch's C++ errors follow with
    pages.
    """
    line = "".join(traceback.format_exception_only(error)).strip()
    if isinstance(error, SyntaxError):  # file and place come first there
        line = f"{line.splitlines()[-1]} ({error.filename}:{error.lineno})"
    line = line.splitlines()[0]
    return line if len(line) <= LONGEST_TEXT else line[:LONGEST_TEXT] + "..."


def _report_to_watch(error: BaseException) -> None:
    """Lets the other ranks know, and waits until this one may end. Errors inside `engine.step` were
    reported there.
    """
    # where it is not imported, the script never came as far as other ranks
    watch = sys.modules.get("whale.distributed.watch")
    if watch is not None and isinstance(error, Exception):
        watch.report_failure(error)


def _write_down(text: str, report: Report | None = None) -> bool:
    """Writes down how the script of this rank failed, for the launcher and for the metrics; whether
    there is a launcher.
    """
    note_failure()
    file = error_file()
    if file is None:
        return False
    more = None if report is None else as_record(report, int(os.environ.get("RANK", "0")))
    write_error(file, text, more)
    return True


def _end_with_launcher(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(WATCH_S)
    os._exit(1)


# a rank; it has not imported torch yet, so the script decides what it needs
if __name__ == "__main__":
    del sys.path[0]  # the folder of this file
    run_as_rank()
