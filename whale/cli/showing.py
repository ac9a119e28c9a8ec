"""Commands that only show something: this host, schedules, runs, settings."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from whale.cli.options import FAILED, require_folder, stop
from whale.names import say_renamed

SCHEDULE_TRIES = 60
"""enough for 8 devices and 16 micro-batches to come within about 1 % of the full search, in a
second in all
"""


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
    cpu: Annotated[
        bool,
        typer.Option(
            "--cpu", help="With --gpu, on a host without any: its rows on CPU ranks, to try them."
        ),
    ] = False,
    small: Annotated[bool, typer.Option("--small", hidden=True)] = False,
) -> None:
    """Say what this host has for training, what is missing and how to get it; exit code 1 when
    something is, and for --gpu on a host without accelerators.
    """
    from whale.doctor.facts import all_facts  # brings torch

    facts = all_facts()
    table = Table(title="whale doctor", show_header=False)
    for name in ("section", "name", "value", "mark", "advice"):
        table.add_column(name, overflow="fold")
    section = ""
    for fact in facts:
        if fact.section != section:
            section = fact.section
            table.add_section()
        mark = {"ok": "", "look": "[yellow]look[/yellow]", "missing": "[red]missing[/red]"}
        table.add_row(
            fact.section,
            fact.name,
            Text(fact.value),
            mark[fact.status],
            fact.advice,
        )
    Console().print(table)
    is_well = all(fact.status != "missing" for fact in facts)
    if gpu:
        is_well &= _check_gpus(num_ranks, output, cpu, small)
    if not is_well:
        raise typer.Exit(FAILED)


def _check_gpus(num_ranks: int | None, output: Path, cpu: bool, small: bool) -> bool:
    """Whether all rows on the accelerators of this host are as they should be. A host without any
    is refused unless `cpu` asks for CPU ranks: a report of these would look like one of GPUs.
    """
    from whale import launcher
    from whale.doctor.facts import why_no_accelerators
    from whale.doctor.gpu_check import check_gpus

    if not output.absolute().parent.is_dir():
        stop(f"whale doctor: -o {output}: there is no folder {output.parent}")
    if num_ranks is not None and num_ranks < 1:
        stop(f"whale doctor: -n {num_ranks}: at least 1 rank is needed")
    reason = why_no_accelerators()
    if reason is not None and not cpu:
        stop(
            "whale doctor --gpu: torch finds no accelerator on this host, so nothing was tried and "
            f"no report is written ({reason}). To try the command itself on CPU ranks: whale "
            "doctor --gpu --cpu",
            FAILED,
        )
    is_well = check_gpus(num_ranks or launcher.default_num_ranks(), output, small)
    where = "" if reason is None else " on CPU ranks, which says nothing about GPUs"
    found = "all is well" if is_well else "something is wrong"
    print(f"whale doctor: {found}{where}, see {output}")
    return is_well


InputGradient = Annotated[
    float, typer.Option(help="Fraction of a backward that computes the input gradient.")
]
MemoryCap = Annotated[
    float | None,
    typer.Option(help="Cap of auto, in micro-batches on a device. [default: as many as devices]"),
]
SvgFile = Annotated[Path | None, typer.Option(help="Also write pictures of all to this SVG file.")]
HtmlFile = Annotated[
    Path | None, typer.Option(help="Also write table and pictures to this HTML file.")
]


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
    input_gradient: InputGradient = 0.5,
    input_share: Annotated[float | None, typer.Option(hidden=True)] = None,
    latency: Annotated[float, typer.Option(help="Time of a message between two devices.")] = 0.0,
    action_cost: Annotated[
        float, typer.Option(help="Time that the runtime adds to every action.")
    ] = 0.0,
    memory: MemoryCap = None,
    draw: Annotated[
        str, typer.Option(help="Which one to draw: the start of its name, `best` or `all`.")
    ] = "best",
    tries: Annotated[int, typer.Option(help="Size of the search of auto.")] = SCHEDULE_TRIES,
    svg: SvgFile = None,
    html: HtmlFile = None,
) -> None:
    """Compare all pipeline schedules on devices of one kind: bubble, peak activations, lower bound,
    picture. Starts no process.
    """
    from whale.report import schedule_page
    from whale.scheduling.compare import Question, compare

    require_folder(svg, "whale schedule: --svg")
    require_folder(html, "whale schedule: --html")
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
        stop(f"whale schedule: {error}")
    schedule_page.show(question, rows, drawn, Console())
    if svg is not None:
        _save(svg, schedule_page.svg(rows))
    if html is not None:
        _save(html, schedule_page.html(question, rows))


def _save(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")
    print(f"saved as {file}")


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
        stop(f"whale top: {error}", FAILED)
    except KeyboardInterrupt:
        return


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
        stop(f"whale board: {error}", FAILED)
    with server:
        address = f"http://{host}:{server.server_address[1]}/"
        print(f"{address} shows {folder}; Ctrl-C ends it", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


def config() -> None:
    """Print all settings of wh.Config: as a table on a terminal, as Markdown into a file."""
    from whale.config import document, rows

    console = Console()
    if not console.is_terminal:
        print(document(), end="")
        return
    table = Table(show_lines=True)
    for name in ("key", "values", "default", "meaning"):
        table.add_column(name, overflow="fold")
    for row in rows():
        table.add_row(*map(Text, row))
    console.print(table)
