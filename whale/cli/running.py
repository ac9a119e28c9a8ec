"""`whale run`: a training script on several ranks of this machine, on real or emulated devices."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from whale.cli.options import (
    FAILED,
    ClusterOption,
    OwnArguments,
    ScriptArgument,
    require_script,
    stop,
)
from whale.names import count

INTERRUPTED = 130
"""what shells give for Ctrl-C: 128 + SIGINT"""


def run(
    script: ScriptArgument,
    arguments: OwnArguments = None,
    num_ranks: Annotated[
        int | None,
        typer.Option(
            "-n", "--num-ranks", help="How many ranks. [default: accelerators, else CPU cores]"
        ),
    ] = None,
    restarts: Annotated[
        int, typer.Option(help="How often all ranks are started again after a failure.")
    ] = 0,
    cluster: ClusterOption = None,
    emulate: Annotated[
        Path | None,
        typer.Option(help="A cluster file: rehearse it here, one process for each device."),
    ] = None,
    stub: Annotated[
        bool,
        typer.Option(
            "--stub", help="With --emulate: small stand-ins for the model, whatever its size."
        ),
    ] = False,
    stretch: Annotated[
        float | None,
        typer.Option(
            help="With --emulate: times are stretched by this. [default: as the machine needs]"
        ),
    ] = None,
) -> None:
    """Run a training script on several ranks of this machine.

    Options of Whale come before the script: everything behind it is the script's own.
    """
    require_script(script, "run")
    if num_ranks is not None and num_ranks < 1:
        stop(f"whale run: -n {num_ranks}: at least 1 rank is needed")
    if restarts < 0:
        stop(f"whale run: --restarts {restarts}: it cannot be negative")
    if emulate is not None:
        num_ranks = _ranks_of_emulation(script, emulate, stub, stretch, num_ranks, cluster)
    elif stub or stretch is not None:
        stop("whale run: --stub and --stretch belong to --emulate CLUSTER.YAML, which is missing")
    if cluster is not None:
        num_ranks = _ranks_of_cluster(cluster, num_ranks)
    _launch(script, arguments or [], num_ranks, restarts)
    if emulate is not None:
        from whale.report.fit_table import wide_console
        from whale.report.rehearsal import print_rehearsal

        if not print_rehearsal(_emulation_folder(), wide_console()):
            raise typer.Exit(FAILED)


def _launch(script: Path, arguments: list[str], num_ranks: int | None, restarts: int) -> None:
    """Runs all ranks to their end; a failure ends the command with its message and exit code."""
    from whale import launcher

    try:
        failure = launcher.launch(
            script, arguments, num_ranks or launcher.default_num_ranks(), restarts
        )
    except KeyboardInterrupt:
        stop("whale run: interrupted, all ranks are ended", INTERRUPTED)
    except Exception as error:
        # torch's SignalException, by its only attribute: its module is slow to import
        signal_number = getattr(error, "sigval", None)
        if signal_number is None:
            raise
        stop(f"whale run: got {signal_number.name}, all ranks are ended", 128 + signal_number)
    if failure is not None:
        stop(f"whale run: {failure}", failure.exit_code)


def _ranks_of_emulation(
    script: Path,
    file: Path,
    stub: bool,
    stretch: float | None,
    num_ranks: int | None,
    cluster: Path | None,
) -> int:
    """Number of ranks of `whale run --emulate`: one for each device of the file, whatever its host.
    The ranks read from the run folder that they are emulated.
    """
    from whale.config import RUN_FOLDER_VARIABLE
    from whale.emulation.settings import prepare

    if cluster is not None:
        stop("whale run: --cluster says what is there, --emulate what is not; give one of them")
    os.environ.setdefault(RUN_FOLDER_VARIABLE, str(Path("runs") / f"{script.stem}-emulated"))
    try:
        return prepare(file, _emulation_folder(), stub, stretch, num_ranks)
    except ValueError as error:
        stop(f"whale run: {error}")


def _emulation_folder() -> Path:
    from whale.config import RUN_FOLDER_VARIABLE

    return Path(os.environ[RUN_FOLDER_VARIABLE]) / "emulation"


def _ranks_of_cluster(file: Path, num_ranks: int | None) -> int:
    """Number of ranks of `whale run --cluster`: one for each device that the file gives this host,
    unless -n says fewer. The ranks read the file.
    """
    from whale.cluster.cluster import Cluster
    from whale.cluster.matching import num_local_devices
    from whale.config import CLUSTER_VARIABLE

    try:
        here = num_local_devices(Cluster.load(file))
    except ValueError as error:
        stop(f"whale run: {error}")
    if num_ranks is not None and num_ranks > here:
        given = f"{file} gives this host {count(here, 'device')}"
        stop(
            f"whale run: -n {num_ranks}: {given}; ask for at most {here} or add devices to the file"
        )
    os.environ[CLUSTER_VARIABLE] = str(file.absolute())
    return num_ranks or here
