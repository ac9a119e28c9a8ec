"""How the errors of ranks are shown: each once, whatever number of ranks has it.

    report_of   in a rank: what is worth showing of its error, which it writes down for the launcher
    Reports     in the launcher: shows what ranks have written down, those that are alike together

What Whale refuses is shown as its message and the line of the script. The whole traceback is there
when `WHALE_TRACEBACK` is set. Any other error is shown with its traceback from the script on.
"""

from __future__ import annotations

import json
import linecache
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from whale.units import ranges

TRACEBACK_VARIABLE = "WHALE_TRACEBACK"
PACKAGE = Path(__file__).parent
SETTLE_S = 1.0
"""after the first report: ranks that fail alike fail at about the same time"""
LOOK_S = 0.1
LONGEST_LINE = 120
"""letters of a line of the script, and of an error that follows from another"""


class FailedElsewhereError(ValueError):
    """Another rank failed in what all ranks do together; this one has nothing else to say."""

    @classmethod
    def of(cls, rank: int, text: str) -> FailedElsewhereError:
        """The error that says what the other rank said."""
        # not an `__init__` of two arguments: an error that is pickled is made again from one text
        return cls(f"rank {rank} failed while all ranks were preparing: {text}")


@dataclass(frozen=True)
class Report:
    """What one rank has to say."""

    text: str
    is_refusal: bool = False
    """Whale refused something: the text is its message"""
    follows: str = ""
    """where another rank is to blame: the error in one line"""


def report_of(error: BaseException, script: Path) -> Report:
    """What the launcher shows of an error of this rank."""
    whole = script_traceback(error, script)
    if isinstance(error, FailedElsewhereError):
        return Report(whole, follows=str(error).partition(":")[0])
    if is_refusal(error):
        place = _line_of_script(error, script)
        if os.environ.get(TRACEBACK_VARIABLE):
            return Report(whole, is_refusal=True)
        hint = f"  ({TRACEBACK_VARIABLE}=1 shows the whole traceback)\n"
        return Report(f"{error}\n{place}{hint}", is_refusal=True)
    # causes.py brings torch, which a script that failed early may not have imported
    causes = sys.modules.get("whale.distributed.causes")
    if causes is not None and causes.follows_from_another(error):
        return Report(whole, follows=_shortened(causes.first_line(error)))
    return Report(whole)


def is_refusal(error: BaseException) -> bool:
    """Whether Whale raised this with a message for the user. A `ValueError` that some function
    raised under Whale, or code of the user's that Whale calls, is none.
    """
    if not (isinstance(error, ValueError) or type(error).__module__.startswith("whale.")):
        return False
    *_, last = [None, *_frames(error.__traceback__)]
    if last is None or not _is_ours(last):
        return False
    line = linecache.getline(last.tb_frame.f_code.co_filename, last.tb_lineno)
    return line.strip().startswith("raise")


def script_traceback(error: BaseException, script: Path) -> str:
    """The traceback from the script on, without the frames that started it."""
    trace = next(_frames_of_script(error, script), None)
    return "".join(traceback.format_exception(type(error), error, trace))


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _frames_of_script(error: BaseException, script: Path) -> Iterator[TracebackType]:
    """Frames from the script on."""
    is_reached = False
    for frame in _frames(error.__traceback__):
        is_reached = is_reached or frame.tb_frame.f_code.co_filename == str(script)
        if is_reached:
            yield frame


def _is_ours(frame: TracebackType) -> bool:
    return Path(frame.tb_frame.f_code.co_filename).is_relative_to(PACKAGE)


def _line_of_script(error: BaseException, script: Path) -> str:
    """The last line of the user's code before it came to Whale; empty where there is none."""
    last = None
    for frame in _frames_of_script(error, script):
        if _is_ours(frame):
            break
        last = frame
    if last is None:
        return ""
    file = last.tb_frame.f_code.co_filename
    source = linecache.getline(file, last.tb_lineno).strip()
    return f"  {file}, line {last.tb_lineno}: {_shortened(source)}\n"


def _shortened(line: str) -> str:
    return line if len(line) <= LONGEST_LINE else line[:LONGEST_LINE] + "..."


# ---- in the launcher


@dataclass
class _Attempt:
    """What the ranks said that were started together."""

    since: float
    waiting: dict[Report, list[int]] = field(default_factory=dict)
    shown: set[Report] = field(default_factory=set)


class Reports:
    """Shows what ranks write into error files below a folder: a thread, while ranks run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: set[Path] = set()
        self._attempts: dict[Path, _Attempt] = {}
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="whale-reports", daemon=True)

    def __enter__(self) -> Reports:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        self.look(is_last=True)

    def _run(self) -> None:
        while not self._ends.wait(LOOK_S):
            self.look()

    def look(self, is_last: bool = False) -> None:
        """Reads what is new and shows what has settled, or all of it."""
        now = time.monotonic()
        for file in sorted(self._folder.glob("**/error.json")):
            found = None if file in self._read else _read(file)
            if found is None:
                continue
            self._read.add(file)
            rank, report = found
            # .../attempt_0/<local rank>/error.json
            attempt = self._attempts.setdefault(file.parent.parent, _Attempt(now))
            attempt.waiting.setdefault(report, []).append(rank)
        for attempt in self._attempts.values():
            if attempt.waiting and (is_last or now - attempt.since >= SETTLE_S):
                sys.stderr.write(_shown(attempt))
                sys.stderr.flush()


def _read(file: Path) -> tuple[int, Report] | None:
    """Rank and report; None where the file is not whole yet or has no report."""
    try:
        record: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    if "report" not in record:
        return None
    return int(record["rank"]), Report(**record["report"])


def _shown(attempt: _Attempt) -> str:
    """What was not shown yet: causes first, then in one line each what followed from them."""
    waiting = attempt.waiting
    attempt.waiting = {}
    is_cause_known = any(not report.follows for report in (*waiting, *attempt.shown))
    texts = []
    for report, ranks in sorted(waiting.items(), key=lambda item: bool(item[0].follows)):
        who = f"rank{'s' if len(ranks) > 1 else ''} {ranges(sorted(ranks))}"
        if report in attempt.shown:
            texts.append(f"{who}: the same error\n")
        elif report.follows and is_cause_known:
            texts.append(f"{who} ended because of it ({report.follows})\n")
        else:
            texts.append(f"\n{who}: {report.text}")
    attempt.shown.update(waiting)
    return "".join(texts)


def as_record(report: Report, rank: int) -> dict[str, Any]:
    """What stands in an error file."""
    return {"rank": rank, "report": asdict(report)}
