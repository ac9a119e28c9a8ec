"""The command `whale`. torch is imported by the commands that need it, so that `whale --help`
answers at once.

Exit codes: 0 all is well; 1 the job failed, the plan cannot be made, or the plans differ; 2 the
command line is wrong. `whale run` ends with the exit code of the rank that failed first.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from whale import cli_plans
from whale.cli_plans import FAILED
from whale.cli_plans import stop as _stop
from whale.names import count, nearest, say_renamed

if TYPE_CHECKING:
    from whale.cluster.cluster import Cluster
    from whale.planning.problem import Problem
    from whale.plans.plan import Plan

INTERRUPTED = 130
"""what shells give for Ctrl-C: 128 + SIGINT"""
PLAN_OPTIONS_WITH_VALUE = ("-n", "--num-devices", "--save", "--cluster", "--html", "--json")
PLAN_FLAGS = ("--debug",)
SCHEDULE_TRIES = 60
"""enough for 8 devices and 16 micro-batches to come within about 1 % of the full search, in a
second in all
"""

app = typer.Typer(
    name="whale",
    help="Write a PyTorch model for one device; Whale plans it onto the devices that you have, and "
    "trains it there.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ScriptArgument = Annotated[
    Path, typer.Argument(metavar="SCRIPT", help="a training script that calls wh.parallelize")
]
NumDevicesOption = Annotated[
    int | None,
    typer.Option("-n", "--num-devices", help="How many devices. [default: as for whale run]"),
]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]
ClusterOption = Annotated[
    Path | None,
    typer.Option(help="A cluster file: hosts, kinds of devices, links (docs/cluster.md)."),
]
OwnArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGUMENTS", help="the script's own arguments, passed on as they are"),
]


def own_options_first(words: Sequence[str]) -> list[str]:
    """`whale plan train.py -n 8 --lr 3` means `whale plan -n 8 train.py --lr 3`: Whale's options
    may also stand right behind the script.

    From the first other word on, everything is the script's; `--` ends Whale's options where the
    script has some of the same name.
    """
    before = _num_own_words(words)
    if before == len(words) or words[before].startswith("-"):
        return list(words)
    script = words[before]
    rest = list(words[before + 1 :])
    after = _num_own_words(rest)
    own = rest[:after]
    passed_on = rest[after:]
    return [
        *words[:before],
        *own,
        script,
        *(passed_on[1:] if passed_on[:1] == ["--"] else passed_on),
    ]


def _num_own_words(words: Sequence[str]) -> int:
    """How many words at the start are options of `whale plan` and their values."""
    place = 0
    while place < len(words):
        word = words[place]
        if word in PLAN_OPTIONS_WITH_VALUE:
            place += 2
        elif word in PLAN_FLAGS or re.fullmatch(
            r"-n\d+|--(num-devices|save|cluster|html|json)=.*", word
        ):
            place += 1
        else:
            break
    return min(place, len(words))


class _Spelled(TyperCommand):
    """A command that says what an option it does not know may have been meant for."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        refuse_misspelt(args, self)
        return super().parse_args(ctx, args)


class _OptionsAroundScript(_Spelled):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, own_options_first(args))


def refuse_misspelt(words: Sequence[str], command: TyperCommand) -> None:
    """Refuses the first option before the script that the command does not have."""
    flags = {"--help"}
    with_value: set[str] = set()
    for parameter in command.params:
        if getattr(parameter, "param_type_name", "") == "option":
            names = flags if getattr(parameter, "is_flag", False) else with_value
            names.update(parameter.opts)
    place = 0
    while place < len(words) and words[place].startswith("-") and words[place] != "--":
        name, has_value, _ = words[place].partition("=")
        known = name in flags or name in with_value or re.fullmatch(r"-\w.+", name) is not None
        if not known:
            hint = nearest(name, flags | with_value)
            _stop(f"whale {command.name}: there is no option {name}.{hint}")
        place += 2 if name in with_value and not has_value else 1


def _passed_on(arguments: Sequence[str]) -> str:
    """A hint where the script was given an option that is nearly one of `whale plan`'s."""
    for word in arguments:
        if word.startswith("--"):
            hint = nearest(word.partition("=")[0], (*PLAN_OPTIONS_WITH_VALUE, *PLAN_FLAGS))
            if hint:
                return f". {word.partition('=')[0]} was passed on to the script.{hint}"
    return ""


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


@app.command(cls=_Spelled, context_settings={"allow_interspersed_args": False})
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
        typer.Option(help="With --emulate: times are stretched by this. [default: 5 ms at least]"),
    ] = None,
) -> None:
    """Run a training script on several ranks of this machine.

    Options of Whale come before the script: everything behind it is the script's own.
    """
    from whale import launcher

    _require_script(script, "run")
    if num_ranks is not None and num_ranks < 1:
        _stop(f"whale run: -n {num_ranks}: at least 1 rank is needed")
    if restarts < 0:
        _stop(f"whale run: --restarts {restarts}: it cannot be negative")
    if emulate is not None:
        num_ranks = _ranks_of_emulation(script, emulate, stub, stretch, num_ranks, cluster)
    elif stub or stretch is not None:
        _stop("whale run: --stub and --stretch belong to --emulate CLUSTER.YAML, which is missing")
    if cluster is not None:
        num_ranks = _ranks_of_cluster(cluster, num_ranks)
    try:
        failure = launcher.launch(
            script, arguments or [], num_ranks or launcher.default_num_ranks(), restarts
        )
    except KeyboardInterrupt:
        _stop("whale run: interrupted, all ranks are ended", INTERRUPTED)
    except Exception as error:
        # torch's SignalException, by its only attribute: its module is slow to import
        signal_number = getattr(error, "sigval", None)
        if signal_number is None:
            raise
        _stop(f"whale run: got {signal_number.name}, all ranks are ended", 128 + signal_number)
    if failure is not None:
        _stop(f"whale run: {failure}", failure.exit_code)
    if emulate is not None:
        from whale.report.rehearsal import print_rehearsal

        if not print_rehearsal(_emulation_folder(), Console()):
            raise typer.Exit(FAILED)


@app.command(cls=_OptionsAroundScript, context_settings={"allow_interspersed_args": False})
def plan(
    script: ScriptArgument,
    arguments: OwnArguments = None,
    num_devices: NumDevicesOption = None,
    save: Annotated[
        Path | None, typer.Option(help="Also write the plan to this JSON file.")
    ] = None,
    debug: DebugOption = False,
    cluster: ClusterOption = None,
    html: cli_plans.HtmlOption = None,
    figures: cli_plans.JsonOption = None,
) -> None:
    """Show how a training script would run on several devices, without starting any process.

    The script runs up to wh.parallelize. Options of Whale may stand before the script or right
    behind it.
    """
    from whale.launcher import default_num_ranks

    _require_script(script, "plan")
    if num_devices is not None and num_devices < 1:
        _stop(f"whale plan: -n {num_devices}: at least 1 device is needed")
    for option, path in (("--save", save), ("--html", html), ("--json", figures)):
        cli_plans.require_folder(path, f"whale plan: {option}")
    described = None if cluster is None else _first_devices(cluster, num_devices)
    num_devices = (
        described.num_devices if described is not None else num_devices or default_num_ranks()
    )
    problems: list[Problem] = []
    made = _plan_of_script(script, arguments or [], num_devices, debug, described, problems.append)
    cli_plans.print_plan(made)
    _print_hint(made, problems)
    if save is not None:
        made.save(save)
        print(f"saved as {save}")
    cli_plans.write_reports(made, html, figures)


def _print_hint(made: Plan, problems: Sequence[Problem]) -> None:
    """One line on what the search would give instead of a hand-made plan."""
    from whale.search.hint import hint

    text = hint(problems[0], made) if problems else None
    if text is not None:
        print(text)


@app.command(cls=_OptionsAroundScript, context_settings={"allow_interspersed_args": False})
def advise(
    script: ScriptArgument,
    arguments: OwnArguments = None,
    num_devices: NumDevicesOption = None,
    debug: DebugOption = False,
    cluster: ClusterOption = None,
    html: cli_plans.HtmlOption = None,
    figures: cli_plans.JsonOption = None,
) -> None:
    """Say which plans are best for a script on a cluster, what every device contributes, what one
    more or a faster link would give, and which precision the cards want. No GPU, no processes.
    """
    from whale.launcher import default_num_ranks

    _require_script(script, "advise")
    for option, path in (("--html", html), ("--json", figures)):
        cli_plans.require_folder(path, f"whale advise: {option}")
    described = None if cluster is None else _first_devices(cluster, num_devices)
    number = described.num_devices if described is not None else num_devices or default_num_ranks()
    options = f"--cluster {cluster}" if cluster is not None else f"-n {number}"
    problem = _problem_of_script(script, arguments or [], number, debug, described)
    command = f"whale run {options} {shlex.join([str(script), *(arguments or [])])}"
    cli_plans.write_advice(problem, command, html, figures)


class _ProblemReady(BaseException):
    """Here is what is to be planned, run no further."""


def _problem_of_script(
    script: Path, arguments: list[str], num_devices: int, debug: bool, cluster: Cluster | None
) -> Problem:
    """What the script asks to be planned; nothing is planned."""
    problems: list[Problem] = []

    def stop(problem: Problem) -> None:
        problems.append(problem)
        raise _ProblemReady

    with contextlib.suppress(_ProblemReady):
        _plan_of_script(script, arguments, num_devices, debug, cluster, stop)
    return problems[0]


def _plan_of_script(
    script: Path,
    arguments: list[str],
    num_devices: int,
    debug: bool,
    cluster: Cluster | None,
    on_problem: Callable[[Problem], None] | None = None,
) -> Plan:
    from whale.api import PlanReady, planning_only
    from whale.launcher import run_script, script_traceback

    exit_code: object = None
    try:
        with planning_only(num_devices, cluster, on_problem):
            run_script(script, arguments)
    except PlanReady as ready:
        return ready.plan
    except SystemExit as stop:
        exit_code = stop.code
    except Exception as error:
        if debug:
            traceback.print_exc()
            raise typer.Exit(FAILED) from None
        if isinstance(error, ValueError) and _comes_from_whale(error):
            _stop(f"whale plan: {error}", FAILED)
        _stop(
            f"{script_traceback(error, script)}whale plan: {script} failed before it reached "
            "wh.parallelize",
            FAILED,
        )
    if exit_code not in (None, 0):
        _stop(
            f"whale plan: {script} ended with sys.exit({exit_code!r}) before it reached "
            f"wh.parallelize{_passed_on(arguments)}",
            FAILED,
        )
    _stop(f"whale plan: {script} ended without calling wh.parallelize, so there is nothing to plan")


def _comes_from_whale(error: BaseException) -> bool:
    """Whether Whale refused something, in contrast to an error of the script's own."""
    own = Path(__file__).parent
    launching = (str(own / "cli.py"), str(own / "launcher.py"))
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return any(Path(file).is_relative_to(own) and file not in launching for file in files)


@app.command(cls=_Spelled)
def profile(
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The cluster file to write.")
    ] = Path("cluster.yaml"),
    num_ranks: Annotated[
        int | None,
        typer.Option("-n", "--num-ranks", help="How many ranks. [default: as for whale run]"),
    ] = None,
    device: Annotated[
        str, typer.Option(help='What "device" in a config may be: auto, cpu or an accelerator.')
    ] = "auto",
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            help="A training script: the layers of its model are timed too, and written beside the "
            "cluster file, which is kept if it is there.",
        ),
    ] = None,
    arguments: OwnArguments = None,
) -> None:
    """Measure the devices and links of this machine, or of all ranks of torchrun, and write a
    cluster file. With --model also the layers of a model.

    On several hosts: torchrun ... -m whale profile -o cluster.yaml
    """
    if not output.absolute().parent.is_dir():
        _stop(f"whale profile: -o {output}: there is no folder {output.parent}")
    from whale.devices import device_types  # not at the top: torch takes a while

    if device not in device_types():
        *first, last = device_types()
        may_be = f"{', '.join(first)} or {last}"
        _stop(f"whale profile: --device {device}: it may be {may_be}")
    if model is not None and not model.is_file():
        _stop(f"whale profile: --model {model}: there is no such script")
    if "RANK" in os.environ and model is not None:  # under a launcher
        from whale.cli_profile import profile_model

        profile_model(output, device, model, arguments or [])
        return
    if "RANK" in os.environ:
        from whale.calibration.profile_command import profile_ranks

        profile_ranks(output, device)
        return
    from whale import launcher

    if num_ranks is not None and num_ranks < 1:
        _stop(f"whale profile: -n {num_ranks}: at least 1 rank is needed")
    script = Path(__file__).parent / "calibration" / "profile_command.py"
    words = [str(output), device]
    if model is not None:
        script = Path(__file__).parent / "cli_profile.py"
        words += [str(model), *(arguments or [])]
    failure = launcher.launch(script, words, num_ranks or launcher.default_num_ranks())
    if failure is not None:
        _stop(f"whale profile: {failure}", failure.exit_code)


@app.command(cls=_Spelled)
def doctor(
    gpu: Annotated[
        bool,
        typer.Option(
            "--gpu",
            help="Also train on the accelerators of this host: exactness, races, bandwidth, speed. "
            "At most ten minutes.",
        ),
    ] = False,
    num_ranks: Annotated[
        int | None,
        typer.Option("-n", "--num-ranks", help="With --gpu: how many ranks. [default: as for run]"),
    ] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="With --gpu: the report to write.")
    ] = Path("whale-doctor.md"),
    small: Annotated[bool, typer.Option("--small", hidden=True)] = False,
) -> None:
    """Say what this host has for training, what is missing and how to get it; exit code 1 when
    something is.
    """
    from whale.doctor.facts import all_facts  # brings torch

    facts = all_facts()
    table = Table(title="whale doctor", show_header=False)
    section = ""
    for fact in facts:
        if fact.section != section:
            section = fact.section
            table.add_section()
        mark = {"ok": "", "look": "[yellow]look[/yellow]", "missing": "[red]missing[/red]"}
        table.add_row(fact.section, fact.name, Text(fact.value), mark[fact.status], fact.advice)
    Console().print(table)
    is_well = all(fact.status != "missing" for fact in facts)
    if gpu:
        from whale import launcher
        from whale.doctor.gpu_check import check_gpus

        if not output.absolute().parent.is_dir():
            _stop(f"whale doctor: -o {output}: there is no folder {output.parent}")
        if num_ranks is not None and num_ranks < 1:
            _stop(f"whale doctor: -n {num_ranks}: at least 1 rank is needed")
        is_well &= check_gpus(num_ranks or launcher.default_num_ranks(), output, small)
        print(f"whale doctor: {'all is well' if is_well else 'something is wrong'}, see {output}")
    if not is_well:
        raise typer.Exit(FAILED)


for _command in (cli_plans.show, cli_plans.diff, cli_plans.compare, cli_plans.simulate):
    app.command(cls=_Spelled)(_command)


@app.command(cls=_Spelled)
def schedule(
    num_devices: Annotated[int, typer.Option("--devices", help="How many devices.")],
    num_micro_batch: Annotated[
        int, typer.Option("--micro-batches", help="How many micro-batches.")
    ],
    num_waves: Annotated[
        int, typer.Option("--waves", help="Waves; a wave is two chunks on each device.")
    ] = 2,
    forward: Annotated[
        float, typer.Option(help="Time of a device for the forward of one micro-batch.")
    ] = 1.0,
    backward: Annotated[float, typer.Option(help="The same for the backward.")] = 2.0,
    input_gradient: Annotated[
        float, typer.Option(help="Fraction of a backward that computes the input gradient.")
    ] = 0.5,
    input_share: Annotated[float | None, typer.Option(hidden=True)] = None,
    latency: Annotated[float, typer.Option(help="Time of a message between two devices.")] = 0.0,
    action_cost: Annotated[
        float, typer.Option(help="Time that the runtime adds to every action.")
    ] = 0.0,
    memory: Annotated[
        float | None,
        typer.Option(
            help="Cap of auto, in micro-batches on a device. [default: as many as devices]"
        ),
    ] = None,
    draw: Annotated[
        str, typer.Option(help="Which one to draw: the start of its name, `best` or `all`.")
    ] = "best",
    tries: Annotated[int, typer.Option(help="Size of the search of auto.")] = SCHEDULE_TRIES,
    svg: Annotated[
        Path | None, typer.Option(help="Also write pictures of all to this SVG file.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Also write table and pictures to this HTML file.")
    ] = None,
) -> None:
    """Compare all pipeline schedules on devices of one kind: bubble, peak activations, lower bound,
    picture. Starts no process.
    """
    from whale.report import schedule_page
    from whale.scheduling.compare import Question, compare

    for option, file in (("--svg", svg), ("--html", html)):
        cli_plans.require_folder(file, f"whale schedule: {option}")
    if input_share is not None:  # the name until 0.1.0
        say_renamed("--input-share", "--input-gradient", "whale schedule")
        input_gradient = input_share
    try:
        question = Question(
            num_devices=num_devices,
            num_micro_batch=num_micro_batch,
            num_waves=num_waves,
            forward_s=forward,
            backward_s=backward,
            input_share=input_gradient,
            message_s=latency,
            action_s=action_cost,
            memory=memory,
            tries=tries,
        )
        rows = compare(question)
        drawn = schedule_page.pick(rows, draw)
    except ValueError as error:
        _stop(f"whale schedule: {error}")
    schedule_page.show(question, rows, drawn, Console())
    for file, text in (
        (svg, schedule_page.svg),
        (html, lambda all_rows: schedule_page.html(question, all_rows)),
    ):
        if file is not None:
            file.write_text(text(rows), encoding="utf-8")
            print(f"saved as {file}")


@app.command(cls=_Spelled)
def top(
    run_folder: Annotated[
        Path, typer.Argument(metavar="RUN_FOLDER", help="where the run writes its metrics")
    ],
    every: Annotated[float, typer.Option(help="seconds between updates")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="print the table once and end")] = False,
) -> None:
    """Follow a run: one row for each rank."""
    from whale.report.top import follow

    try:
        follow(run_folder, Console(), every, once)
    except ValueError as error:
        _stop(f"whale top: {error}", FAILED)
    except KeyboardInterrupt:
        return


@app.command(cls=_Spelled)
def board(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="where the runs are")] = Path(
        "runs"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free")] = 8080,
    host: Annotated[str, typer.Option(help="an address of this machine itself")] = "127.0.0.1",
) -> None:
    """Follow runs in a browser: loss, samples/s, time split of every rank, plan, checkpoints.

    Shown to this machine only, and read only.
    """
    from whale.report.board import make_server

    try:
        server = make_server(folder, host, port)
    except ValueError as error:
        _stop(f"whale board: {error}", FAILED)
    with server:
        address = f"http://{host}:{server.server_address[1]}/"
        print(f"{address} shows {folder}; Ctrl-C ends it", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


@app.command(cls=_Spelled)
def config() -> None:
    """Print all settings of wh.Config: as a table on a terminal, as Markdown into a file."""
    from whale.config import document, rows

    console = Console()
    if not console.is_terminal:
        print(document(), end="")
        return
    table = Table(show_lines=True)
    for name in ("key", "type", "default", "meaning"):
        table.add_column(name)
    for row in rows():
        table.add_row(*map(Text, row))
    console.print(table)


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
        _stop("whale run: --cluster says what is there, --emulate what is not; give one of them")
    os.environ.setdefault(RUN_FOLDER_VARIABLE, str(Path("runs") / f"{script.stem}-emulated"))
    try:
        return prepare(file, _emulation_folder(), stub, stretch, num_ranks)
    except ValueError as error:
        _stop(f"whale run: {error}")


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
        _stop(f"whale run: {error}")
    if num_ranks is not None and num_ranks > here:
        given = f"{file} gives this host {count(here, 'device')}"
        _stop(
            f"whale run: -n {num_ranks}: {given}; ask for at most {here} or add devices to the file"
        )
    os.environ[CLUSTER_VARIABLE] = str(file.absolute())
    return num_ranks or here


def _first_devices(file: Path, num_devices: int | None) -> Cluster:
    from whale.cluster.cluster import Cluster

    try:
        cluster = Cluster.load(file)
        return cluster if num_devices is None else cluster.first(num_devices)
    except ValueError as error:
        _stop(f"whale plan: {error}")


def _require_script(script: Path, command: str) -> None:
    if not script.is_file():
        what = "is a folder" if script.is_dir() else "no such file"
        _stop(f"whale {command}: {script}: {what}; give a Python script")


def main() -> None:
    app()


if __name__ == "__main__":
    main()
