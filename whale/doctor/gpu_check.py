"""Starts the parts of `whale doctor --gpu` one after the other, and writes one report file.

A part that fails, hangs or crashes is a line of the report; the others run all the same. A host
without accelerators is refused, unless the same parts are to run on CPU ranks (`--cpu`): that tries
this command and says nothing about GPUs, and so does its report.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from whale.devices import DETERMINISTIC, find_device
from whale.doctor.facts import Fact, all_facts
from whale.doctor.rows import CHECKS, Outcome

BUDGET_S = 600.0
"""for all parts; one that would begin later is left out, and the report says so"""
Run = Callable[[str, Path], str | None]
"""runs a part; gives why it failed, or None. Its outcomes are in the folder"""


def check_gpus(num_ranks: int, output: Path, is_small: bool = False) -> bool:
    """Runs everything on ranks of this host and writes the report; whether all is well."""
    from whale import launcher

    script = Path(__file__).parent / "rank.py"

    def run(part: str, folder: Path) -> str | None:
        size = "small" if is_small else "full"
        with _environment(part):
            failure = launcher.launch(script, [part, str(folder), size], num_ranks)
        return None if failure is None else str(failure)

    outcomes = run_parts(run)
    output.write_text(report(all_facts(), outcomes, num_ranks))
    return all(outcome.ok for outcome in outcomes)


@contextmanager
def _environment(part: str) -> Iterator[None]:
    """Variables that ranks of this part are started with: results that do not change from run to
    run, and for `one queue` a single hardware queue.
    """
    variables = dict(DETERMINISTIC)
    queues = find_device().queues_variable
    if part == "one queue" and queues:
        variables[queues] = "1"
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name)
        os.environ.update(before)


def run_parts(run: Run, budget_s: float = BUDGET_S) -> list[Outcome]:
    """The outcomes of all parts, in order."""
    start = time.monotonic()
    found: list[Outcome] = []
    for part in CHECKS:
        if time.monotonic() - start > budget_s:
            found.append(Outcome(part, "all", False, f"left out: {budget_s:.0f} s were over"))
            continue
        with tempfile.TemporaryDirectory(prefix="whale-doctor-") as name:
            folder = Path(name)
            failure = run(part, folder)
            found += _outcomes(folder / f"{part}.jsonl")
        if failure is not None:
            found.append(Outcome(part, "all", False, failure))
    return found


def _outcomes(file: Path) -> list[Outcome]:
    if not file.exists():
        return []
    return [Outcome(**json.loads(line)) for line in file.read_text().splitlines()]


def report(facts: Sequence[Fact], outcomes: Sequence[Outcome], num_ranks: int) -> str:
    """The report as Markdown: a verdict, a table of rows, the facts of the host, and all of it as
    JSON for machines.
    """
    wrong = [outcome for outcome in outcomes if not outcome.ok]
    device = find_device()
    verdict = (
        f"{len(wrong)} of {len(outcomes)} rows failed"
        if wrong
        else f"all {len(outcomes)} rows are as they should be"
    )
    if not device.is_accelerator:
        verdict = f"No accelerator was tried: these are CPU ranks. Of their rows, {verdict}"
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    lines = [
        "# whale doctor --gpu",
        "",
        f"{verdict}. {num_ranks} ranks, device {device.type}, {platform.node()}, {now}.",
        "Attach this file to an issue.",
        "",
        "| | part | row | result |",
        "|---|---|---|---|",
    ]
    for outcome in outcomes:
        mark = "ok" if outcome.ok else "**FAILED**"
        text = outcome.text.replace("|", "\\|")
        lines.append(f"| {mark} | {outcome.part} | {outcome.row} | {text} |")
    lines += ["", "| section | what | value | |", "|---|---|---|---|"]
    for fact in facts:
        note = "" if fact.status == "ok" else f"{fact.status}: {fact.advice}"
        lines.append(f"| {fact.section} | {fact.name} | {fact.value} | {note} |")
    data = {
        "num_ranks": num_ranks,
        "device": device.type,
        "outcomes": [asdict(outcome) for outcome in outcomes],
        "facts": [asdict(fact) for fact in facts],
    }
    lines += ["", "```json", json.dumps(data), "```", ""]
    return "\n".join(lines)
