"""One row for each device: its samples, how long they keep it busy, and what fills its memory."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from whale.planning.plan import DeviceMemory, Plan
from whale.planning.samples import SampleMap
from whale.planning.shares import Load
from whale.report.units import human_bytes, human_seconds

SHOWN_DEVICES = 16


def device_table(plan: Plan) -> Table | None:
    """None for a plan without figures of memory."""
    if not plan.memory:
        return None
    title = "Devices (samples and busy time of one mini-batch, forward and backward; memory at its fullest, as predicted)"
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=box.SIMPLE_HEAD)
    table.show_edge = table.pad_edge = False
    table.add_column("rank", no_wrap=True)
    table.add_column("kind", overflow="fold")
    for name in ("samples", "busy", "parameters", "gradients", "optimizer", "activations", "other", "of memory"):
        table.add_column(name, justify="right", no_wrap=True)
    counts, loads = samples_by_rank(plan), plan.loads()
    for rank in range(min(plan.num_devices, SHOWN_DEVICES)):
        memory, shares = plan.memory[rank], counts[rank]
        largest = max(shares)
        cells = (
            str(rank),
            plan.device_kinds[rank],
            str(sum(shares)),
            human_seconds(busy_seconds(shares, loads[rank])),
            human_bytes(memory.parameter_bytes),
            human_bytes(memory.gradient_bytes),
            human_bytes(memory.optimizer_bytes),
            human_bytes(memory.fixed_bytes + largest * memory.sample_bytes),
            human_bytes(memory.buffer_bytes),
            _of_memory(memory, largest),
        )
        table.add_row(*map(Text, cells))
    if plan.num_devices > SHOWN_DEVICES:
        table.add_row(f"... {plan.num_devices - SHOWN_DEVICES} more")
    return table


def _of_memory(memory: DeviceMemory, num_samples: int) -> str:
    total = memory.total_bytes(num_samples)
    if not memory.capacity_bytes:
        return f"{human_bytes(total)} of ?"
    return f"{total / memory.capacity_bytes:.1%} of {human_bytes(memory.capacity_bytes)}"


def samples_by_rank(plan: Plan) -> list[list[int]]:
    """[rank][micro-batch]"""
    samples = SampleMap(plan, plan.batch_size, plan.num_micro_batch)
    counts: list[list[int]] = [[] for _ in range(plan.num_devices)]
    for micro_batch in range(plan.num_micro_batch):
        division = samples.division(micro_batch)
        for device in plan.virtual_devices:
            for replica, ranks in enumerate(device.ranks):
                for rank, share in zip(ranks, division.runs[replica][device.index], strict=True):
                    counts[rank].append(share)
    return counts


def busy_seconds(shares: list[int], load: Load) -> float:
    return sum(load.seconds(share) for share in shares)
