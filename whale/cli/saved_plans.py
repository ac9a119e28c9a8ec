"""Commands that read saved plans: show, diff, compare, simulate. They need no torch, so they answer
at once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whale.cli.options import FAILED, HtmlOption, JsonOption, require_folder, stop

if TYPE_CHECKING:
    from whale.plans.plan import Plan

PlanArgument = Annotated[
    Path, typer.Argument(metavar="PLAN.JSON", help="written by whale plan --save")
]
FirstPlan = Annotated[Path, typer.Argument(metavar="A.JSON", help="one saved plan")]
SecondPlan = Annotated[Path, typer.Argument(metavar="B.JSON", help="the other one")]


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
