"""Commands that read saved plans: show, diff, compare, simulate. They need no torch, so they answer
at once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from whale.planning.problem import Problem
    from whale.plans.plan import Plan
    from whale.search.search import Progress

FAILED = 1
WRONG_USE = 2

PlanArgument = Annotated[
    Path, typer.Argument(metavar="PLAN.JSON", help="written by whale plan --save")
]
FirstPlan = Annotated[Path, typer.Argument(metavar="A.JSON")]
SecondPlan = Annotated[Path, typer.Argument(metavar="B.JSON")]
HtmlOption = Annotated[
    Path | None, typer.Option(help="Also write a page with pictures to this file.")
]
JsonOption = Annotated[
    Path | None,
    typer.Option("--json", help="Also write all predicted figures and the timeline to this file."),
]


def show(file: PlanArgument) -> None:
    """Print a saved plan."""
    print_plan(load(file, "show"), str(file))


def diff(a: FirstPlan, b: SecondPlan) -> None:
    """List every value that differs in two saved plans; exit code 1 when there are any."""
    from whale.plans.file import diff as differences

    _print_differences(differences(load(a, "diff"), load(b, "diff")), nothing="no difference")


def compare(a: FirstPlan, b: SecondPlan) -> None:
    """Say what differs in two saved plans: devices, cuts, shares, memory, predicted step; exit code
    1 when something does.
    """
    from whale.report.plan_comparison import compare as differences

    _print_differences(
        differences(load(a, "compare"), load(b, "compare")), nothing="both plans do the same"
    )


def _print_differences(differences: Sequence[str], nothing: str) -> None:
    """Prints them one a line, and ends like the command `diff`: exit code 1 when there are any."""
    for line in differences or [nothing]:
        print(line)
    if differences:
        raise typer.Exit(FAILED)


def simulate(
    file: PlanArgument,
    trace: Annotated[
        Path | None, typer.Option(help="Also write a Chrome trace (ui.perfetto.dev) to this file.")
    ] = None,
    html: HtmlOption = None,
    figures: JsonOption = None,
) -> None:
    """Show one step of a saved plan over time, by the cost model: who computes, waits and idles,
    and how full memory is.
    """
    from whale.report.timeline import print_timeline
    from whale.simulation.simulate import simulate as run

    for option, path in (("--trace", trace), ("--html", html), ("--json", figures)):
        require_folder(path, f"whale simulate: {option}")
    plan = load(file, "simulate")
    try:
        timeline = run(plan)
    except ValueError as error:
        stop(f"whale simulate: {file}: {error}")
    print_timeline(plan, timeline)
    if trace is not None:
        timeline.save_trace(trace)
        print(f"Chrome trace: {trace} (open it in ui.perfetto.dev)")
    write_reports(plan, html, figures)


def write_reports(plan: Plan, page: Path | None, figures: Path | None) -> None:
    """The page of a plan, and the same as JSON, where they are wanted."""
    from whale.report.plan_page import html, plan_json
    from whale.simulation.simulate import simulate as run

    if page is not None:
        page.write_text(html(plan, run(plan)), encoding="utf-8")
        print(f"page written to {page}")
    if figures is not None:
        figures.write_text(json.dumps(plan_json(plan, run(plan))) + "\n", encoding="utf-8")
        print(f"figures written to {figures}")


def write_advice(problem: Problem, launch: str, page: Path | None, figures: Path | None) -> None:
    """The advice for a problem: tables, and where they are wanted the page and the JSON."""
    from whale.report.advice_page import advice_html, advice_json, print_advice
    from whale.search.advice import advise

    try:
        advice = advise(problem, launch, show_progress)
    except ValueError as error:
        stop(f"whale advise: {error}", FAILED)
    print_advice(advice)
    if page is not None:
        page.write_text(str(advice_html(advice)), encoding="utf-8")
        print(f"page written to {page}")
    if figures is not None:
        figures.write_text(json.dumps(advice_json(advice)) + "\n", encoding="utf-8")
        print(f"figures written to {figures}")


def show_progress(progress: Progress) -> None:
    """One line on stderr that is written over, where somebody looks at it."""
    if not sys.stderr.isatty():
        return
    best = "" if progress.best is None else f", best {progress.best.step_s:.4g} s a step"
    text = f"search: {progress.what} {progress.done} of {progress.of}{best}"
    print(f"\r{text:<78}", end="", file=sys.stderr, flush=True)


def load(file: Path, command: str) -> Plan:
    """The plan of a file; one that cannot be read ends the command."""
    from whale.plans.plan import Plan

    try:
        return Plan.load(file)
    except OSError as error:
        stop(f"whale {command}: {file}: {error.strerror}")
    except ValueError as error:
        stop(f"whale {command}: {error}")


def print_plan(made: Plan, name: str = "the plan") -> None:
    """Prints the tables of a plan; one whose parts do not fit together ends the command."""
    from whale.report import print_plan as show_plan

    try:
        show_plan(made)
    except (LookupError, TypeError, ValueError) as error:  # a file whose parts do not fit together
        stop(
            f"whale: {name} contradicts itself ({type(error).__name__}: {error}); make it again "
            "with `whale plan --save`"
        )


def require_folder(path: Path | None, option: str) -> None:
    """Refuses a file that could not be written, before anything is computed for it."""
    if path is not None and not path.absolute().parent.is_dir():
        stop(f"{option} {path}: there is no folder {path.parent}")
    if path is not None and path.is_dir():
        stop(f"{option} {path}: is a folder; give a file")


def stop(message: str, exit_code: int = WRONG_USE) -> NoReturn:
    """Ends the command with one message on stderr."""
    sys.stdout.flush()
    print(message, file=sys.stderr)
    raise typer.Exit(exit_code)
