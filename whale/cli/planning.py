"""`whale plan` and `whale advise`: what a training script would do on several devices. The script
runs up to `wh.parallelize`; no process is started.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from whale.cli.options import (
    FAILED,
    WRONG_USE,
    ClusterOption,
    DebugOption,
    HtmlOption,
    JsonOption,
    NumDevicesOption,
    OwnArguments,
    ScriptArgument,
    passed_on,
    require_folder,
    require_script,
    stop,
)
from whale.cli.saved_plans import print_plan, write_reports

if TYPE_CHECKING:
    from whale.cluster.cluster import Cluster
    from whale.planning.problem import Problem
    from whale.plans.plan import Plan
    from whale.search.tries import SearchProgress


PORT = 29500
"""of the first host: the one that torchrun takes where none is given"""


def plan(
    script: ScriptArgument,
    arguments: OwnArguments = None,
    num_devices: NumDevicesOption = None,
    save: Annotated[
        Path | None, typer.Option(help="Also write the plan to this JSON file.")
    ] = None,
    debug: DebugOption = False,
    cluster: ClusterOption = None,
    html: HtmlOption = None,
    figures: JsonOption = None,
) -> None:
    """Show how a training script would run on several devices, without starting any process.

    The script runs up to wh.parallelize. Options of Whale may stand before the script or right
    behind it.
    """
    require_script(script, "plan")
    for option, path in (("--save", save), ("--html", html), ("--json", figures)):
        require_folder(path, f"whale plan: {option}")
    described, number = _devices("plan", cluster, num_devices)
    asked = _Asked("plan", script, tuple(arguments or ()), number, described, debug)
    problems: list[Problem] = []
    made = _plan_of_script(asked, problems.append)
    print_plan(made)
    _print_hint(made, problems)
    if save is not None:
        made.save(save)
        print(f"saved as {save}")
    write_reports(made, html, figures)


def _print_hint(made: Plan, problems: Sequence[Problem]) -> None:
    """One line on what the search would give instead of a hand-made plan."""
    from whale.search.hint import hint

    try:
        text = hint(problems[0], made, show_progress) if problems else None
    except KeyboardInterrupt:  # the plan is there; only the comparison is not
        text = "what the search would give instead: interrupted"
    finally:
        clear_progress()
    if text is not None:
        print(text)


def advise(
    script: ScriptArgument,
    arguments: OwnArguments = None,
    num_devices: NumDevicesOption = None,
    debug: DebugOption = False,
    cluster: ClusterOption = None,
    html: HtmlOption = None,
    figures: JsonOption = None,
) -> None:
    """Say which plans are best for a script on a cluster, what every device contributes, what one
    more or a faster link would give, and which precision the cards want. No GPU, no processes.
    """
    require_script(script, "advise")
    for option, path in (("--html", html), ("--json", figures)):
        require_folder(path, f"whale advise: {option}")
    described, number = _devices("advise", cluster, num_devices)
    asked = _Asked("advise", script, tuple(arguments or ()), number, described, debug)
    problem = _problem_of_script(asked)
    words = shlex.join([str(script), *(arguments or [])])

    def launch(ranks: Collection[int]) -> str:
        if described is None:
            return f"whale run -n {number} {words}"
        return launch_lines(described, ranks, str(cluster), words)

    write_advice(problem, launch, html, figures)


def launch_lines(cluster: Cluster, ranks: Collection[int], file: str, words: str) -> str:
    """What to start on each host for a plan in which these ranks of the cluster take part
    (docs/hosts.md).

    Ranks find their devices by host and local rank, and devices without a rank are left out. So
    a host starts its devices up to the last one that takes part; one before that joins, idle.
    """
    numbers: dict[str, int] = {}
    idle = []
    for device in cluster.devices:
        if device.rank in ranks:
            numbers[device.host] = max(device.local_rank + 1, numbers.get(device.host, 0))
    for device in cluster.devices:
        if device.rank not in ranks and device.local_rank < numbers.get(device.host, 0):
            idle.append(device)
    several = len(cluster.hosts) > 1
    lines = []
    for place, (host, number) in enumerate(numbers.items()):
        if len(numbers) > 1:
            command = _torchrun_line(list(numbers), place, number, file)
        else:
            is_all = number == sum(device.host == host for device in cluster.devices)
            fewer = "" if is_all else f"-n {number} "
            command = f"whale run {fewer}--cluster {shlex.quote(file)}"
        lines.append(f"# on {host}\n{command} {words}" if several else f"{command} {words}")
    for host in cluster.hosts:
        if host not in numbers:
            lines.append(f"# {host} needs no start: the plan leaves all of its devices out")
    for device in idle:
        lines.append(
            f"# local rank {device.local_rank} of {device.host} ({device.kind.name}) is started "
            "and idle: the plan leaves it out, and devices are found by local rank"
        )
    return "\n".join(lines)


def _torchrun_line(hosts: Sequence[str], place: int, number: int, file: str) -> str:
    """The command that starts so many ranks on one of several hosts, up to the script."""
    from whale.config import CLUSTER_VARIABLE

    return (
        f"{CLUSTER_VARIABLE}={shlex.quote(file)} torchrun --nnodes {len(hosts)} "
        f"--node-rank {place} --nproc-per-node {number} --master-addr {hosts[0]} "
        f"--master-port {PORT} --shutdown-timeout 5"
    )


def write_advice(
    problem: Problem,
    launch: Callable[[Collection[int]], str],
    page: Path | None,
    figures: Path | None,
) -> None:
    """The advice for a problem: tables, and where they are wanted the page and the JSON."""
    from whale.report.advice_page import advice_html, advice_json, print_advice
    from whale.search.advice import advise

    try:
        advice = advise(problem, launch, show_progress)
    except ValueError as error:
        clear_progress()
        stop(f"whale advise: {error}", FAILED)
    clear_progress()
    print_advice(advice)
    if page is not None:
        page.write_text(str(advice_html(advice)), encoding="utf-8")
        print(f"page written to {page}")
    if figures is not None:
        figures.write_text(json.dumps(advice_json(advice)) + "\n", encoding="utf-8")
        print(f"figures written to {figures}")


def show_progress(progress: SearchProgress) -> None:
    """One line on stderr that is written over, where somebody looks at it."""
    if not sys.stderr.isatty():
        return
    width = shutil.get_terminal_size().columns - 1
    print(f"\r{progress.text[:width]:<{width}}", end="", file=sys.stderr, flush=True)


def clear_progress() -> None:
    """Takes that line away."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(f"\r{'':<{width}}\r", end="", file=sys.stderr, flush=True)


class _ProblemReady(BaseException):
    """Here is what is to be planned, run no further."""


@dataclass(frozen=True)
class _Asked:
    """A script that is to be planned, and for what."""

    command: str
    """which command asks: messages begin with it"""
    script: Path
    arguments: tuple[str, ...]
    num_devices: int
    cluster: Cluster | None
    is_debugged: bool

    def stop(self, message: str, exit_code: int = WRONG_USE) -> NoReturn:
        stop(f"whale {self.command}: {message}", exit_code)


def _problem_of_script(asked: _Asked) -> Problem:
    """What the script asks to be planned; nothing is planned."""
    problems: list[Problem] = []

    def take(problem: Problem) -> None:
        problems.append(problem)
        raise _ProblemReady

    with contextlib.suppress(_ProblemReady):
        _plan_of_script(asked, take)
    return problems[0]


def _plan_of_script(asked: _Asked, on_problem: Callable[[Problem], None]) -> Plan:
    from whale.error_reports import script_traceback
    from whale.launcher import run_script
    from whale.session import PlanReady, planning_only

    script = asked.script
    exit_code: object = None
    try:
        with planning_only(asked.num_devices, asked.cluster, on_problem, show_progress):
            try:
                run_script(script, list(asked.arguments))
            finally:
                clear_progress()
    except PlanReady as ready:
        return ready.plan
    except SystemExit as ended:
        exit_code = ended.code
    except Exception as error:
        if asked.is_debugged:
            traceback.print_exc()
            raise typer.Exit(FAILED) from None
        if isinstance(error, ValueError) and _comes_from_whale(error):
            asked.stop(str(error), FAILED)
        where = (
            "inside of wh.parallelize"
            if _was_reached(error)
            else "before it reached wh.parallelize"
        )
        stop(
            f"{script_traceback(error, script)}whale {asked.command}: {script} failed {where}",
            FAILED,
        )
    if exit_code not in (None, 0):
        asked.stop(
            f"{script} ended with sys.exit({exit_code!r}) before it reached "
            f"wh.parallelize{passed_on(asked.arguments)}",
            FAILED,
        )
    asked.stop(f"{script} ended without calling wh.parallelize, so there is nothing to plan")


def _was_reached(error: BaseException) -> bool:
    """Whether `wh.parallelize` raised this, or code of the script's that it runs."""
    from whale import api

    code = api.parallelize.__code__
    return any(frame.f_code is code for frame, _ in traceback.walk_tb(error.__traceback__))


def _comes_from_whale(error: BaseException) -> bool:
    """Whether Whale refused something, in contrast to an error of the script's own."""
    commands = Path(__file__).parent
    package = commands.parent
    for frame in traceback.extract_tb(error.__traceback__):
        file = Path(frame.filename)
        launches = file.is_relative_to(commands) or file == package / "launcher.py"
        if file.is_relative_to(package) and not launches:
            return True
    return False


def _devices(
    command: str, file: Path | None, num_devices: int | None
) -> tuple[Cluster | None, int]:
    """The cluster of the file, or its first devices where a number of them is asked for; and how
    many devices there are.
    """
    from whale.cluster.cluster import Cluster
    from whale.launcher import default_num_ranks

    if num_devices is not None and num_devices < 1:
        stop(f"whale {command}: -n {num_devices}: at least 1 device is needed")
    if file is None:
        return None, num_devices or default_num_ranks()
    try:
        cluster = Cluster.load(file)
        if num_devices is not None:
            cluster = cluster.first(num_devices)
    except ValueError as error:
        stop(f"whale {command}: {error}")
    return cluster, cluster.num_devices
