"""What an emulated run showed: predicted beside measured, for people and for a trace viewer."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from whale.emulation.pace import MOST_OVERRUNS
from whale.emulation.timeline import PREDICTION_FILE, Event, RankRecord, read_records
from whale.report.fit_table import add_row, make_table
from whale.report.timeline import LEGEND, picture
from whale.scheduling.action import in_words, parse_action
from whale.simulation.timeline import ALL_REDUCE
from whale.units import MICROSECONDS, human_bytes, human_seconds


@dataclass(frozen=True)
class TimeShares:
    """What a device does with its time in a step, as fractions of the step."""

    busy: float
    wait: float
    idle: float


@dataclass(frozen=True)
class Rehearsal:
    """All that the ranks of an emulated run wrote down."""

    records: list[RankRecord]
    predicted: list[list[Event]]
    predicted_step_s: float
    """as `whale simulate` says, stretched"""
    predicted_gradients_s: float
    """the part of it that is rehearsed: all but the update of the weights"""
    factor: float
    is_stub: bool

    @property
    def step_s(self) -> float:
        """Median over the steps of the seconds from the first action of any rank to the last
        all-reduce.
        """
        seconds = []
        for spans in zip(*(record.steps for record in self.records if record.num_actions)):
            starts, ends = zip(*spans)
            seconds.append(max(ends) - min(starts))
        return statistics.median(seconds)

    @property
    def measured(self) -> list[list[Event]]:
        """The last step of every rank, from its first action on."""
        origin = min(record.events[0][1] for record in self.records if record.events)
        return [
            [(name, start - origin, end - origin) for name, start, end in record.events]
            for record in self.records
        ]

    @property
    def last_step_s(self) -> float:
        """Seconds of the last step, over all ranks."""
        longest = 0.0
        for row in self.measured:
            longest = max([longest, *(end for _, _, end in row)])
        return longest

    @property
    def overruns(self) -> tuple[int, int]:
        return sum(record.num_overruns for record in self.records), sum(
            record.num_actions for record in self.records
        )

    @property
    def is_valid(self) -> bool:
        late, total = self.overruns
        return late <= MOST_OVERRUNS * total


def read_rehearsal(folder: Path) -> Rehearsal | None:
    """None where no rank came to a second step."""
    records = read_records(folder)
    if not records or not (folder / PREDICTION_FILE).is_file():
        return None
    content = json.loads((folder / PREDICTION_FILE).read_text())
    if len(records) < len(content["events"]):
        return None
    return Rehearsal(
        records,
        content["events"],
        content["step_s"],
        content["gradients_s"],
        content["factor"],
        content["is_stub"],
    )


def shares(events: Sequence[Event], step_s: float) -> TimeShares:
    """Busy with compute, waiting for others, and the rest."""
    busy = sum(end - start for name, start, end in events if name[0] in "FBIW") / step_s
    wait = (
        sum(end - start for name, start, end in events if name.startswith(("receive", ALL_REDUCE)))
        / step_s
    )
    return TimeShares(busy, wait, max(0.0, 1 - busy - wait))


def write_trace(rehearsal: Rehearsal, path: Path) -> None:
    """A Chrome trace: a process for each rank, in it a row of what was measured and a row of what
    was predicted.
    """
    rows: list[dict[str, Any]] = []
    for record, *both in zip(
        rehearsal.records, rehearsal.measured, rehearsal.predicted, strict=True
    ):
        title = f"rank {record.rank}: {record.kind} on {record.host}"
        rows.append(
            {"name": "process_name", "ph": "M", "pid": record.rank, "args": {"name": title}}
        )
        for row, (what, events) in enumerate(zip(("measured", "predicted"), both, strict=True)):
            rows.append(
                {
                    "name": "thread_name",
                    "ph": "M",
                    "pid": record.rank,
                    "tid": row,
                    "args": {"name": what},
                }
            )
            rows += [
                {
                    "name": name,
                    "cat": name.split(" ")[0].rstrip("0123456789."),
                    "ph": "X",
                    "pid": record.rank,
                    "tid": row,
                    "ts": start * MICROSECONDS,
                    "dur": (end - start) * MICROSECONDS,
                }
                for name, start, end in events
            ]
    path.write_text(json.dumps({"traceEvents": rows}))


def print_rehearsal(folder: Path, console: Console) -> bool:
    """The comparison at the end of `whale run --emulate`; whether the run was valid."""
    rehearsal = read_rehearsal(folder)
    if rehearsal is None:
        console.print(
            "emulation: no rank finished two steps (the first one is not counted), so there is "
            "nothing to compare",
            markup=False,
        )
        return True
    write_trace(rehearsal, folder / "trace.json")
    step_s = rehearsal.step_s
    predicted_s = rehearsal.predicted_gradients_s
    labels = [f"rank {record.rank} {record.kind}" for record in rehearsal.records]
    last_s = rehearsal.last_step_s
    text = [
        f"\npredicted, {human_seconds(rehearsal.predicted_step_s)} with the update of the "
        "weights, which is not emulated",
        picture(rehearsal.predicted, labels, rehearsal.predicted_step_s, console.width),
        f"\nmeasured, the last step, {human_seconds(last_s)}",
        picture(rehearsal.measured, labels, last_s, console.width),
    ]
    console.print("\n".join(text), markup=False, highlight=False, soft_wrap=True)
    console.print(LEGEND, markup=False, highlight=False)
    console.print()
    console.print(_table(rehearsal))
    console.print()
    num_steps = len(rehearsal.records[0].steps)
    console.print(
        f"step up to the last all-reduce of gradients: measured {human_seconds(step_s)} (median of "
        f"{num_steps}), predicted "
        f"{human_seconds(predicted_s)}, measured / predicted {step_s / predicted_s:.3f}",
        f"All times are stretched {rehearsal.factor:.4g} times: on the cluster itself the plan's "
        "step would take "
        f"{human_seconds(rehearsal.predicted_step_s / rehearsal.factor)} by the cost model, "
        f"{human_seconds((rehearsal.predicted_step_s - predicted_s) / rehearsal.factor)} of them "
        "for the update",
        "This measures the runtime (schedule, messages, overlap) with the cost model's own times; "
        "it does not test the cost model.",
        *(["Stub chunks stood for the model: losses mean nothing."] if rehearsal.is_stub else []),
        _verdict(rehearsal),
        f"Chrome trace, measured and predicted: {folder / 'trace.json'} (open it in "
        "ui.perfetto.dev)",
        sep="\n",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return rehearsal.is_valid


def _table(rehearsal: Rehearsal) -> Table:
    table = make_table(
        "Devices in the last step (predicted: busy; memory: at its fullest moment)",
        ("rank", "device"),
        ("busy", "wait", "idle", "predicted", "memory", "of"),
        num_keys=2,
    )
    last_s = rehearsal.last_step_s
    for record, measured, predicted in zip(
        rehearsal.records, rehearsal.measured, rehearsal.predicted, strict=True
    ):
        now = shares(measured, last_s)
        ideal = shares(predicted, rehearsal.predicted_gradients_s)
        cells = [f"{100 * share:.1f} %" for share in (now.busy, now.wait, now.idle, ideal.busy)]
        peak = human_bytes(sum(record.peak_bytes.values()))
        add_row(
            table,
            str(record.rank),
            f"{record.kind} on {record.host}",
            *cells,
            peak,
            human_bytes(record.memory_bytes),
        )
    return table


def _verdict(rehearsal: Rehearsal) -> str:
    late, total = rehearsal.overruns
    late_s, action, rank = max((*record.worst_overrun, record.rank) for record in rehearsal.records)
    counted = (
        f"{late} of {total} actions ({100 * late / max(1, total):.1f} %) took longer than their "
        "time"
    )
    if not late:
        return f"valid: {counted}"
    named = in_words(parse_action(action))
    worst = f"the worst was {named} on rank {rank}, {human_seconds(late_s)} late"
    if rehearsal.is_valid:
        return f"valid: {counted}; {worst}"
    # twice the worst of this run: the next one has other moments in which the machine is busy
    enough = math.ceil(2 * rehearsal.factor * max(each.worst_ratio for each in rehearsal.records))
    others = "" if rehearsal.is_stub else ", or take stub chunks (--stub)"
    losses = "" if rehearsal.is_stub else " Only the times do not count: the losses are right."
    return (
        f"INVALID: {counted}, more than {100 * MOST_OVERRUNS:.0f} %; {worst}. This machine is too "
        f"slow or too busy for these times.{losses} Try: stretch them more (--stretch {enough})"
        f"{others}"
    )
