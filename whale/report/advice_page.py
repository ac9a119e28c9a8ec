"""`whale advise` in the terminal, as JSON and as one page: the same numbers in all three."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup
from rich.console import Console
from rich.table import Table

from whale.plans.blocks import Memory
from whale.report.fit_table import add_row, make_table, wide_console
from whale.report.plan_page import Cell, Figure, Sheet
from whale.report.svg import render
from whale.report.tables import ON_MEMORY, memories_beside
from whale.search.advice import ONE_CARD, Advice, Change, OneCard, RankedPlan
from whale.units import compared, human_bytes, human_rate, human_seconds

INTERRUPTED = (
    "Interrupted: these are the best plans so far, and what is missing in the tables was not "
    "looked at."
)
NO_GAIN = "no faster plan found"
NO_PRECISION = "These cards multiply fastest in the precision of the job."


def advice_json(advice: Advice) -> dict[str, Any]:
    """All figures, for other programs. What does not fit has null for its ratio."""
    return {
        "plans": [_plan_json(each) for each in advice.plans],
        "alone": _alone_json(advice.alone),
        "without": [_change_json(each) for each in advice.without],
        "changes": [_change_json(each) for each in advice.changes],
        "left_out": list(advice.left_out),
        "precision": list(advice.precision),
        "launch": advice.launch,
        "job": advice.job,
        "interrupted": advice.is_interrupted,
    }


def _plan_json(each: RankedPlan) -> dict[str, Any]:
    return {
        "kind": each.kind,
        "plan": each.text,
        "step_s": each.step_s,
        "samples_per_s": each.timeline.samples_per_s,
        "peak_bytes": each.peak_bytes,
        "elsewhere_bytes": each.elsewhere_bytes,
        "traffic_bytes": each.traffic_bytes,
        "limit": _limit(each),
    }


def _alone_json(alone: OneCard | None) -> dict[str, Any] | None:
    """One card alone; without a step where the model does not fit."""
    if alone is None:
        return None
    figures = {"kind": ONE_CARD, "plan": alone.text, "step_s": None}
    if alone.best is not None:
        figures = _plan_json(alone.best)
    return {"rank": alone.rank, "device": alone.kind, **figures}


def _limit(each: RankedPlan) -> str:
    """What limits the step. One card waits for nobody, and its plan knows no other rank than 0."""
    limit = each.timeline.limit
    return limit.partition(":")[0] if each.kind == ONE_CARD else limit


def _change_json(change: Change) -> dict[str, Any]:
    ratio = change.ratio if math.isfinite(change.ratio) else None
    return {"what": change.what, "ranks": list(change.ranks), "ratio": ratio}


def effect(ratio: float, same: str = "the same") -> str:
    """`2 % slower`, `1.4 times slower`, `nothing fits`. `same`: what is said where nothing
    changes.
    """
    if not math.isfinite(ratio):
        return "nothing fits"
    return compared(ratio, "slower", "faster", same)


def left_out_text(advice: Advice) -> str:
    if not advice.left_out:
        return "No device is better left out."
    return f"Better left out, as the best plan does: {'; '.join(advice.left_out)}."


def alone_text(advice: Advice) -> str:
    """What the cluster gives over its best card; empty where that was not asked."""
    alone = advice.alone
    if alone is None:
        return ""
    if alone.best is None:
        return "No card can train this model alone."
    card = f"{alone.kind} (rank {alone.rank})"
    difference = compared(alone.best.step_s / advice.best.step_s, "faster", "slower", "")
    if not difference:
        return f"The best plan is as fast as the best card alone, {card}."
    return f"The best plan is {difference} than the best card alone, {card}."


def print_advice(advice: Advice, console: Console | None = None) -> None:
    """Prints the tables."""
    console = console or wide_console()
    beside = _memories_beside(advice)
    plans = make_table(
        "The best plans of different kinds (memory: of the fullest device)",
        ("kind", "plan", "limited by"),
        ("step", "samples/s", "memory", *_headings(beside)),
    )
    for each in _rows(advice):
        elsewhere = [human_bytes(each.elsewhere_bytes[memory]) for memory in beside]
        if beside:
            elsewhere.append(human_bytes(each.traffic_bytes))
        add_row(
            plans,
            each.kind,
            each.text,
            _limit(each),
            human_seconds(each.step_s),
            human_rate(each.timeline.samples_per_s),
            human_bytes(each.peak_bytes),
            *elsewhere,
        )
    if advice.alone is not None and advice.alone.best is None:
        empty = ["-"] * (len(plans.columns) - 3)
        add_row(plans, ONE_CARD, advice.alone.text, "its memory", *empty)
    console.print(plans)
    if text := alone_text(advice):
        console.print(text, markup=False, highlight=False)
    if advice.is_interrupted:
        console.print(INTERRUPTED)
    console.print()
    if advice.without:
        console.print(_changes_table("What devices contribute", advice.without))
    console.print(left_out_text(advice))
    console.print()
    if advice.changes:
        console.print(_changes_table("What a change would give", advice.changes, NO_GAIN))
        console.print()
    for note in advice.precision or (NO_PRECISION,):
        console.print(note)
    if advice.job:
        console.print(advice.job, soft_wrap=True, markup=False, highlight=False)
    console.print("\nStart it:")
    console.print(advice.launch, soft_wrap=True, markup=False, highlight=False)


def _rows(advice: Advice) -> list[RankedPlan]:
    """The plans of the table: the fastest first, and last what one card does alone."""
    alone = [] if advice.alone is None or advice.alone.best is None else [advice.alone.best]
    return [*advice.plans, *alone]


def _memories_beside(advice: Advice) -> list[Memory]:
    """Memories of hosts in which some plan has something."""
    return memories_beside(device for each in _rows(advice) for device in each.timeline.devices)


def _headings(beside: Sequence[Memory]) -> list[str]:
    """Headings of the columns with what plans have beside their devices; none where that is
    nothing.
    """
    return [*(ON_MEMORY[memory] for memory in beside), "moved in a step"] if beside else []


def _changes_table(title: str, changes: Sequence[Change], same: str = "the same") -> Table:
    table = make_table(title, ("change", "step"))
    for change in changes:
        add_row(table, change.what, effect(change.ratio, same))
    return table


def advice_html(advice: Advice) -> Markup:
    """One page without anything from elsewhere; every number carries its place in the JSON."""
    rows: list[Sequence[Cell]] = []
    beside = _memories_beside(advice)
    for index, each in enumerate(_rows(advice)):
        key = f"plans.{index}" if index < len(advice.plans) else "alone"
        rate = each.timeline.samples_per_s
        sizes = {"peak_bytes": each.peak_bytes}
        for memory in beside:
            sizes[f"elsewhere_bytes.{memory}"] = each.elsewhere_bytes[memory]
        if beside:
            sizes["traffic_bytes"] = each.traffic_bytes
        rows.append(
            (
                each.kind,
                each.text,
                _limit(each),
                Figure(f"{key}.step_s", each.step_s, human_seconds(each.step_s)),
                Figure(f"{key}.samples_per_s", rate, human_rate(rate)),
                *(Figure(f"{key}.{at}", size, human_bytes(size)) for at, size in sizes.items()),
            )
        )
    words = ("kind", "plan", "limited by")
    numbers = ("step", "samples/s", "memory", *_headings(beside))
    if advice.alone is not None and advice.alone.best is None:
        rows.append((ONE_CARD, advice.alone.text, "its memory", *["-"] * len(numbers)))
    best = advice.best
    return render(
        "advice.html",
        title="Whale advice",
        summary=f"{best.text}: {human_seconds(best.step_s)} a step",
        plans=Sheet(words, numbers, rows, best=rows[0]),
        alone=alone_text(advice),
        without=_sheet("without", advice.without),
        changes=_sheet("changes", advice.changes, NO_GAIN),
        left_out=left_out_text(advice),
        precision=advice.precision or (NO_PRECISION,),
        launch=advice.launch,
        job=advice.job,
        interrupted=INTERRUPTED if advice.is_interrupted else "",
    )


def _sheet(name: str, changes: Sequence[Change], same: str = "the same") -> Sheet:
    rows: list[Sequence[Cell]] = []
    for index, change in enumerate(changes):
        cell: Cell = effect(change.ratio, same)
        if math.isfinite(change.ratio):
            cell = Figure(f"{name}.{index}.ratio", change.ratio, effect(change.ratio, same))
        rows.append((change.what, cell))
    return Sheet(("change",), ("step",), rows)
