"""Tables of the terminal that several commands show, and the words and numbers in them, which pages
show too.

    devices      two rows for each: what it does in a step, and what fills its memory, as simulated
    shardings    one row for each operation of a stage on a grid: pattern, bytes, why; layers that
                 are alike are one row, `h.*.mlp.up: linear`, with their number
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from whale.names import listed
from whale.plans.blocks import Memory
from whale.plans.grid import Grid
from whale.plans.plan import Plan, Stage
from whale.plans.samples import num_samples_by_rank
from whale.plans.sharding import StageSharding
from whale.report.fit_table import add_row, add_words, make_table
from whale.simulation.memory import CLASSES
from whale.simulation.timeline import ELSEWHERE, DeviceTimeline, Timeline
from whale.units import human_bytes, human_flop, human_rate, human_seconds, num_shown, ranges

SHOWN_DEVICES = 16
SHOWN_OPERATIONS = 24
SHOWN_NAMES = 8
OperationRow = tuple[str, str, str, str, str]
"""operation, times, pattern, sent each, why"""


# ---- devices


def num_devices_shown(timeline: Timeline) -> int:
    """Rows of the tables and pictures of devices."""
    return num_shown(len(timeline.devices), SHOWN_DEVICES)


def prediction(timeline: Timeline) -> Text:
    """The step in two lines."""
    text = Text("Predicted step ", style="bold")
    text.append(
        f"{human_seconds(timeline.step_s)}, {human_rate(timeline.samples_per_s)} samples/s, "
        f"bubble {timeline.bubble:.1%}\n"
    )
    text.append("limited by ", style="bold")
    return text.append(timeline.limit, style="not bold")


def work_table(plan: Plan, timeline: Timeline) -> Table:
    """Layers, samples, FLOP and time of every device."""
    title = (
        "Devices in one step (FLOP: forward of its samples; wait: for messages and all-reduces of "
        "gradients)"
    )
    table = make_table(
        title,
        ("rank", "device", "stages", "layers"),
        ("samples", "FLOP", "busy", "wait", "idle"),
        num_keys=2,
    )
    counts = samples_by_rank(plan)
    for device in timeline.devices[: num_devices_shown(timeline)]:
        view = plan.of_rank(device.rank)
        own = [view.stages[stage] for stage in view.stages_of_rank(device.rank)]
        shares = (device.busy_s, device.wait_s, timeline.idle_s(device.rank))
        add_row(
            table,
            str(device.rank),
            f"{device.kind} on {device.host}",
            ranges([stage.index for stage in own]) if own else "left out",
            layers_of(own),
            str(sum(counts[device.rank])),
            human_flop(forward_flop(plan, device.rank, own, sum(counts[device.rank]))),
            *(
                f"{human_seconds(seconds)} ({_percent(seconds, timeline.step_s)})"
                for seconds in shares
            ),
        )
    return _more(table, timeline)


def memory_table(timeline: Timeline) -> Table:
    """What fills the memory of every device at its fullest moment."""
    beside = memories_beside(timeline.devices)
    table = make_table(
        "Memory at its fullest moment in a step",
        ("rank", "device"),
        (*CLASSES, "in all", "of", *(ON_MEMORY[memory] for memory in beside)),
        num_keys=2,
    )
    for device in timeline.devices[: num_devices_shown(timeline)]:
        parts = (human_bytes(device.peak_bytes[name]) for name in CLASSES)
        add_row(
            table,
            str(device.rank),
            device.kind,
            *parts,
            human_bytes(device.peak_total_bytes),
            of_memory(device),
            *(human_bytes(device.elsewhere_bytes[memory]) for memory in beside),
        )
    return _more(table, timeline)


ON_MEMORY = {"host": "on the host", "disk": "on disk"}
"""headings of columns with what a rank has beside its device"""


def memories_beside(devices: Iterable[DeviceTimeline]) -> list[Memory]:
    """Memories of hosts in which some of these devices have something."""
    shown = list(devices)
    return [memory for memory in ELSEWHERE if any(each.elsewhere_bytes[memory] for each in shown)]


def away_table(timeline: Timeline) -> Table | None:
    """What is at home in the memories of the hosts, what moves in a step, and what hides that; None
    where everything is on the devices.
    """
    if not any(device.away for device in timeline.devices):
        return None
    table = make_table(
        "At home elsewhere (in: to the device in a step, under forward, backward and update)",
        ("rank", "what", "where"),
        ("held", "in", "out"),
    )
    for device in timeline.devices[: num_devices_shown(timeline)]:
        first = str(device.rank)
        for what, memory, held, moved in away_rows(device):
            add_row(table, first, what, memory, *map(human_bytes, (held, *moved)))
            first = ""
        if device.away is not None:
            add_row(table, "", "", hidden_text(device), "", "", "")
    return _more(table, timeline)


def hidden_text(device: DeviceTimeline) -> str:
    """How long the transfers of a device take, and under what."""
    assert device.away is not None
    update = device.away.update
    update_s = update.out_s + update.in_s
    parts = []
    if device.moved_s:
        alone_s = device.compute_s - device.exposed_s
        is_hidden = device.exposed_s <= HIDDEN * device.compute_s
        effect = f"take {human_seconds(device.exposed_s)} longer for it"
        parts.append(
            f"{human_seconds(device.moved_s)} of transfers under {human_seconds(alone_s)} of "
            f"forwards and backwards, which {'hide it' if is_hidden else effect}"
        )
    if update_s:
        parts.append(f"{human_seconds(update_s)} around updates on the {device.away.updated_on}")
    if device.ahead_s:
        parts.append(f"{human_seconds(device.ahead_s)} of updates under the next forward")
    return "; ".join(parts) or "nothing moves"


HIDDEN = 0.005
"""of forwards and backwards: less than that is not worth a word"""


AwayRow = tuple[str, str, float, tuple[float, float]]
"""class, memory, bytes held, (bytes in, bytes out) of a step"""


def away_rows(device: DeviceTimeline) -> list[AwayRow]:
    """What one device has elsewhere, by class and memory."""
    if device.away is None:
        return []
    held: dict[tuple[str, str], float] = {}
    moved: dict[tuple[str, str], tuple[float, float]] = {}
    for each in device.away.held:
        key = (each.what, each.memory)
        held[key] = held.get(key, 0.0) + each.num_bytes
    for every in device.away.traffic:
        key = (every.what, every.memory)
        before = moved.get(key, (0.0, 0.0))
        moved[key] = (before[0] + every.in_bytes, before[1] + every.out_bytes)
    keys = dict.fromkeys((*held, *moved))
    return [(*key, held.get(key, 0.0), moved.get(key, (0.0, 0.0))) for key in keys]


def of_memory(device: DeviceTimeline) -> str:
    if not device.memory_bytes:
        return "not known"
    return (
        f"{human_bytes(device.memory_bytes)} "
        f"({_percent(device.peak_total_bytes, device.memory_bytes)})"
    )


def samples_by_rank(plan: Plan) -> list[list[int]]:
    """Number of samples, as [rank][micro-batch]."""
    return num_samples_by_rank(plan)


def forward_flop(plan: Plan, rank: int, stages: Sequence[Stage], num_samples: int) -> float:
    """FLOP of the forward of so many samples on these stages of a rank. Devices of a grid do the
    work for a sample together, each its part.
    """
    plan = plan.of_rank(rank)
    if rank not in plan.ranks:
        return 0.0
    work = {sharding.stage: sharding.work for sharding in plan.shardings}
    place = plan.place_of_rank(rank)[2]
    flop = 0.0
    for stage in stages:
        device = plan.virtual_devices[stage.virtual_device]
        even = 1 / device.num_devices if device.grid is not None else 1.0
        flop += stage.forward_flop * (work[stage.index][place] if work.get(stage.index) else even)
    return flop * num_samples / plan.batch_size


def layers_of(stages: Sequence[Stage]) -> str:
    """Layers as the model numbers them: parameters `h.0.attn.weight` .. `h.5.mlp.bias` are `h.0-5`;
    of several lists each.
    """
    found: dict[str, set[int]] = {}
    for stage in stages:
        for name in stage.parameters:
            match = re.match(r"(?:(.*?)\.)??(\d+)\.", name)
            if match:
                found.setdefault((match[1] or "").rsplit(".", 1)[-1], set()).add(int(match[2]))
    lists = [f"{name}.{ranges(sorted(numbers))}" for name, numbers in found.items()]
    return "; ".join(text.removeprefix(".") for text in lists) or "-"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"


def _more(table: Table, timeline: Timeline) -> Table:
    if left_out := len(timeline.devices) - num_devices_shown(timeline):
        table.add_row(f"... {left_out} more")
    return table


# ---- stages on a grid


def sharding_tables(plan: Plan) -> RenderableType | None:
    """One table for each stage on a grid; None where there is none."""
    if not plan.shardings:
        return None
    parts: list[RenderableType] = []
    for sharding in plan.shardings:
        parts += _sharding_table(plan, sharding)
    return Group(*parts)


def _sharding_table(plan: Plan, sharding: StageSharding) -> list[RenderableType]:
    table = make_table(sharding_title(plan, sharding), ("operation",), ("times",))
    add_words(table, "pattern")
    table.add_column("sent each", justify="right", no_wrap=True)
    add_words(table, "why")
    found = sharding_rows(plan, sharding)
    shown = num_shown(len(found), SHOWN_OPERATIONS)
    for row in found[:shown]:
        add_row(table, *row)
    if len(found) > shown:
        table.add_row(f"... {len(found) - shown} more")
    return [table, *(Text(f"  {remark}") for remark in sharding_remarks(sharding))]


def sharding_title(plan: Plan, sharding: StageSharding) -> str:
    grid = _grid_of(plan, sharding)
    devices = f"{grid.num_devices} devices"
    if len(grid.axes) > 1:
        shape = " x ".join(str(grid.size(axis)) for axis in grid.axes)
        devices = f"a grid of {shape} devices, axes {' and '.join(grid.axes)}"
    total = sharding.sent_bytes + sum(
        operation.exchanged_bytes for operation in sharding.operations
    )
    return (
        f"Operations of stage {sharding.stage} on {devices} (sent: by one device for "
        f"{sharding.num_samples} samples, forward and backward; {human_bytes(total)} in all)"
    )


def _grid_of(plan: Plan, sharding: StageSharding) -> Grid:
    grid = plan.virtual_devices[plan.stages[sharding.stage].virtual_device].grid
    assert grid is not None
    return grid


def _in_words(text: str, grid: Grid) -> str:
    """A pattern or a reason as people say it: `column over y` is `column-parallel` on devices in a
    row, whatever axis of the grid that is, and `column-parallel over y` on a grid of several axes.
    """
    text = re.sub(r"\b(column|row) over\b", r"\1-parallel over", text)
    return text if len(grid.axes) > 1 else re.sub(r" over [xyz]\b", "", text)


def sharding_rows(plan: Plan, sharding: StageSharding) -> list[OperationRow]:
    """Operations in order, those of like layers together."""
    grid = _grid_of(plan, sharding)
    found: Counter[tuple[str, str, float, str]] = Counter()
    for each in sharding.operations:
        found[
            _layer_free(each.what), each.pattern, each.sent_bytes + each.exchanged_bytes, each.why
        ] += 1
    return [
        (
            what,
            str(times),
            _in_words(pattern, grid),
            human_bytes(sent) if sent else "-",
            _in_words(why, grid),
        )
        for (what, pattern, sent, why), times in found.items()
    ]


def sharding_remarks(sharding: StageSharding) -> list[str]:
    """What is stored how, and what runs whole."""
    cut = [name for name, stored in sharding.stored.items() if stored.is_cut]
    gathered = [name for name in cut if sharding.stored[name].stored]
    before_use = f", {len(gathered)} of them gathered before use" if gathered else ""
    found = [f"{len(cut)} of {len(sharding.stored)} parameters are cut{before_use}"]
    names = list(dict.fromkeys(map(_layer_free, sharding.replicated)))
    if names:
        found.append(f"on every device whole, for want of a rule: {listed(names, SHOWN_NAMES)}")
    return found


def _layer_free(what: str) -> str:
    """`transformer.h.3.mlp: addmm` -> `transformer.h.*.mlp: addmm`."""
    return re.sub(r"(?<=\.)\d+(?=[.:])", "*", what)
