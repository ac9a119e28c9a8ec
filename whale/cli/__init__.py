"""The command `whale`. torch is imported by the commands that need it, so that `whale --help`
answers at once.

Exit codes: 0 all is well; 1 the job failed, the plan cannot be made, or the plans differ; 2 the
command line is wrong. `whale run` ends with the exit code of the rank that failed first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer
from typer.core import TyperCommand

from whale.cli.options import OptionsAroundScript, OptionsBeforeScript, Spelled, own_options_first
from whale.cli.planning import advise, plan
from whale.cli.profiling import profile
from whale.cli.running import run
from whale.cli.saved_plans import compare, diff, show, simulate
from whale.cli.showing import board, config, doctor, schedule, top

app = typer.Typer(
    name="whale",
    help="Write a PyTorch model for one device; Whale plans it onto the devices that you have, and "
    "trains it there.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from whale import __version__

        print(f"whale {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and stop.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    pass


OF_SCRIPTS: dict[Callable[..., None], type[TyperCommand]] = {
    run: OptionsBeforeScript,
    plan: OptionsAroundScript,
    advise: OptionsAroundScript,
}
"""commands that pass words on to a script"""
OTHERS = (profile, doctor, show, diff, compare, simulate, schedule, top, board, config)

for _command, _class in OF_SCRIPTS.items():
    app.command(cls=_class, context_settings={"allow_interspersed_args": False})(_command)
for _command in OTHERS:
    app.command(cls=Spelled)(_command)


def main() -> None:
    app()


__all__ = ["app", "main", "own_options_first"]
