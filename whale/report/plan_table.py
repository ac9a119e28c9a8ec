"""A plan in the terminal: what runs where, what crosses each cut, the schedule as a picture, and
why.

`render_plan` gives the parts in reading order; each part is one function below. No torch here:
saved plans print at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from whale.plans.plan import Crossing, Plan
from whale.plans.samples import SampleMap
from whale.plans.shares import micro_batch_sizes
from whale.report.fit_table import add_row, add_words, make_table, wide_console
from whale.report.tables import (
    away_table,
    memory_table,
    prediction,
    sharding_tables,
    work_table,
)
from whale.scheduling.action import Schedule
from whale.scheduling.picture import draw
from whale.simulation.simulate import simulate
from whale.units import count, human_bytes, human_flop, human_seconds, num_shown, ranges

SHOWN_REPLICAS = 4
"""model replicas listed one by one; the rest in one line"""
SHOWN_CROSSINGS = 24
"""the largest; the rest in one line"""
SHOWN_NAMES = 12
SHOWN_SHARES = 6
"""devices of a VirtualDevice whose unequal shares are written out"""
NARROWEST_PICTURE = 60


def summary(plan: Plan) -> str:
    """The plan in one line."""
    kinds = ", ".join(f"{number} x {kind}" for kind, number in Counter(plan.device_kinds).items())
    if not plan.is_uniform:
        return (
            f"{count(plan.num_devices, 'device')} ({kinds}): "
            f"{count(plan.num_replicas, 'model replica')} that are not alike, batch "
            f"{plan.batch_size}: {'; '.join(map(replicas_of, plan.by_template))}"
        )
    return (
        f"{count(plan.num_devices, 'device')} ({kinds}): {count(len(plan.stages), 'stage')} x "
        f"{count(plan.num_replicas, 'model replica')}, batch {plan.batch_size} in "
        f"{count(plan.num_micro_batch, 'micro-batch')}, schedule {plan.schedule.name}"
    )


def replicas_of(view: Plan) -> str:
    """The alike replicas of one template in a few words."""
    first = view.first_replica
    which = "replica" if view.num_replicas == 1 else "replicas"
    widths = "+".join(str(device.num_devices) for device in view.virtual_devices)
    devices = f"{widths} device{'s' * (widths != '1')}"
    return (
        f"{which} {ranges(range(first, first + view.num_replicas))}: "
        f"{count(len(view.stages), 'stage')} on {devices}, {view.batch_size} samples in "
        f"{count(view.num_micro_batch, 'micro-batch')}, schedule {view.schedule.name}"
    )


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Prints the plan, as wide as the terminal; without one it has no colours."""
    console = console or wide_console()
    console.print(render_plan(plan))


def render_plan(plan: Plan) -> Group:
    """All parts of the plan, as something that rich can print."""
    parts: list[RenderableType] = [Text(summary(plan), style="bold")]
    if plan.figures is not None:
        timeline = simulate(plan)
        parts += [prediction(timeline), work_table(plan, timeline), memory_table(timeline)]
        elsewhere = away_table(timeline)
        if elsewhere is not None:
            parts.append(elsewhere)
    for view in plan.by_template:
        if not plan.is_uniform:
            parts.append(Text(replicas_of(view).capitalize(), style="bold"))
        parts += _parts_of_template(view)
    parts.append(_decisions(plan))
    if plan.notes:
        parts.append(_lines("Notes", plan.notes))
    spaced: list[RenderableType] = []
    for part in parts:
        spaced += [part, Text()]
    return Group(*spaced)


def _parts_of_template(plan: Plan) -> list[RenderableType]:
    """What the replicas of one template do."""
    parts: list[RenderableType] = [_task_graphs(plan), _devices(plan)]
    for part in (sharding_tables(plan), _crossings(plan), _tied(plan), _losses(plan)):
        if part is not None:
            parts.append(part)
    return [*parts, _Picture(plan.schedule)]


def _task_graphs(plan: Plan) -> Table:
    table = make_table(
        "TaskGraphs (FLOP: forward of one mini-batch)",
        ("TaskGraph", "what", "strategy", "VirtualDevice"),
        ("operations", "FLOP", "parameters"),
    )
    for part in plan.task_graphs:
        add_row(
            table,
            str(part.index),
            part.label,
            part.strategy,
            str(part.virtual_device),
            str(part.num_operations),
            human_flop(part.forward_flop),
            human_bytes(part.parameter_bytes),
        )
    return table


def _devices(plan: Plan) -> Table:
    """One row for each VirtualDevice in each model replica; the work is the same in all replicas,
    the share of the samples may differ.
    """
    title = (
        "VirtualDevices (samples of a micro-batch by device; forward FLOP and time of a "
        "mini-batch: of a device on average)"
    )
    words = ("VirtualDevice", "stages", "replica", "ranks", "kind", "samples")
    table = make_table(title, words, ("FLOP", "parameters", "time"), num_keys=4)
    samples = SampleMap.planned(plan)
    shown = num_shown(plan.num_replicas, SHOWN_REPLICAS)
    for device in plan.virtual_devices:
        stages = [stage for stage in plan.stages if stage.virtual_device == device.index]
        share = plan.num_replicas * device.num_devices
        work = (
            human_flop(sum(stage.forward_flop for stage in stages) / share),
            _parameters_of(plan, device.index),
            human_seconds(sum(stage.forward_s for stage in stages)),
        )
        for replica, ranks in enumerate(device.ranks[:shown]):
            first = (
                (str(device.index), ranges([stage.index for stage in stages]))
                if replica == 0
                else ("", "")
            )
            kinds = ", ".join(dict.fromkeys(plan.device_kinds[rank] for rank in ranks))
            shares = _samples(plan, samples, replica, device.index)
            add_row(
                table,
                *first,
                str(plan.first_replica + replica),
                ranges(ranks),
                kinds,
                shares,
                *(work if replica == 0 else ()),
            )
        if plan.num_replicas > shown:
            add_row(table, "", "", "...", f"{plan.num_replicas - shown} more")
    return table


def _parameters_of(plan: Plan, virtual_device: int) -> str:
    """Bytes of parameters on one device, on a grid the one that holds most. A parameter that two
    stages of the device share counts twice: then it is an upper bound."""
    device = plan.virtual_devices[virtual_device]
    if device.grid is not None and plan.memory:
        return human_bytes(max(plan.memory[rank].parameter_bytes for rank in device.ranks[0]))
    stages = [stage for stage in plan.stages if stage.virtual_device == virtual_device]
    names: Counter[str] = Counter()
    for stage in stages:
        names.update(stage.parameters)
    bound = "at most " if any(times > 1 for times in names.values()) else ""
    return bound + human_bytes(sum(stage.parameter_bytes for stage in stages))


def _samples(plan: Plan, samples: SampleMap, replica: int, virtual_device: int) -> str:
    """`4` each, `3+2` for unequal devices, `4 together` on a grid; micro-batches of unequal size
    one after the other: `2 (3x), 1 (1x)`.
    """
    sizes = micro_batch_sizes(plan.batch_size, plan.num_micro_batch)
    texts: Counter[str] = Counter()
    known: dict[int, str] = {}
    for micro_batch, size in enumerate(sizes):  # micro-batches of one size are cut alike
        if size not in known:
            shares = [
                stop - start for start, stop in samples.runs(micro_batch, replica, virtual_device)
            ]
            known[size] = (
                _shares(shares)
                if plan.virtual_devices[virtual_device].grid is None
                else f"{shares[0]} together"
            )
        texts[known[size]] += 1
    if len(texts) == 1:
        return next(iter(texts))
    return ", ".join(f"{text} ({times}x)" for text, times in texts.items())


def _shares(shares: list[int]) -> str:
    if len(shares) == 1:
        return str(shares[0])
    if len(set(shares)) == 1:
        return f"{shares[0]} each"
    if len(shares) <= SHOWN_SHARES:
        return "+".join(map(str, shares))
    return f"{min(shares)} to {max(shares)} each"


def _crossings(plan: Plan) -> Table | None:
    """What crosses each cut: the largest first, the rest in one row."""
    if not plan.crossings:
        return None
    table = make_table(
        "What crosses between stages (gradient yes: as many bytes come back)",
        ("value", "stages"),
        ("sample", "mini-batch"),
    )
    table.add_column("gradient")
    add_words(table, "source line")
    by_size = sorted(plan.crossings, key=lambda crossing: -_mini_batch_bytes(plan, crossing))
    shown = num_shown(len(by_size), SHOWN_CROSSINGS)
    for crossing in sorted(
        by_size[:shown], key=lambda crossing: (crossing.source, crossing.destination)
    ):
        on_one_device = (
            plan.stages[crossing.source].virtual_device
            == plan.stages[crossing.destination].virtual_device
        )
        add_row(
            table,
            crossing.value,
            f"{crossing.source} -> {crossing.destination}"
            + (" (same device)" if on_one_device else ""),
            human_bytes(crossing.sample_bytes) if crossing.batched else "no samples",
            human_bytes(_mini_batch_bytes(plan, crossing)),
            "yes" if crossing.gradient else "no",
            crossing.line,
        )
    if rest := by_size[shown:]:
        total = human_bytes(sum(_mini_batch_bytes(plan, crossing) for crossing in rest))
        add_row(table, f"... {len(rest)} more", "", "", total, "", "")
    return table


def _mini_batch_bytes(plan: Plan, crossing: Crossing) -> int:
    """Bytes that go one way in one mini-batch, all model replicas together; a value without samples
    goes whole to every device.
    """
    if crossing.batched:
        return crossing.sample_bytes * plan.batch_size
    return (
        crossing.sample_bytes
        * plan.num_micro_batch
        * len(plan.ranks_of_stage(crossing.destination))
    )


def _tied(plan: Plan) -> RenderableType | None:
    parameters = set().union(*(stage.parameters for stage in plan.stages))
    tied = {}
    for name, stages in plan.holders.items():
        if len(stages) > 1 and name in parameters:
            tied[name] = stages
    if not tied:
        return None
    return _lines(
        "Tied weights",
        (
            f"{name}: on stages {ranges(stages)}, gradients all-reduced over them"
            for name, stages in tied.items()
        ),
    )


def _losses(plan: Plan) -> RenderableType | None:
    if not plan.loss_terms:
        return None
    return _lines("Loss", (f"stage {term.stage}: {term.text}" for term in plan.loss_terms))


def _decisions(plan: Plan) -> Table:
    table = make_table("Decisions", ("what", "choice", "why"))
    for decision in plan.decisions:
        add_row(table, decision.what, decision.choice, decision.why)
    return table


class _Picture:
    """The schedule, as wide as the terminal; forward and backward in the ratio 1 to 2 of the cost
    model.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        title = (
            "Schedule (one row for each VirtualDevice of a model replica, drawn with backward = 2 "
            "x forward and free messages)"
        )
        yield Text(title, style="bold")
        yield Text(
            draw(self.schedule, width=max(options.max_width, NARROWEST_PICTURE)),
            no_wrap=True,
            overflow="ignore",
        )


def _lines(title: str, lines: Iterable[str]) -> Text:
    """A heading and one line for each item."""
    listed = list(lines)
    shown = num_shown(len(listed), SHOWN_NAMES)
    more = [f"... {len(listed) - shown} more"] * (len(listed) > shown)
    text = Text(title, style="bold")
    for line in listed[:shown] + more:
        text.append(f"\n  {line}", style="not bold")
    return text
