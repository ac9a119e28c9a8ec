"""Heterogeneous devices: which of them take which part, how many samples each gets, and what to do
when memory is too small.

The order of the devices decides who runs which stage of which replica (`virtual_devices.py` takes
them in order). Three are tried where devices differ, and the one with the fastest simulated step is
taken (the first, where they tie):

    rank order           as they are numbered
    stage by stage       sorted by memory, then speed; the R fastest run stage 0 of the R replicas,
                         the next stage 1, ... Early stages hold more micro-batches, so they get the
                         larger memories
    replica by replica   sorted the same way; the first s devices are replica 0, ...: equal devices
                         in one replica, whose share follows
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from whale.cluster.cluster import Cluster
from whale.names import listed, num_shown
from whale.plans.plan import DeviceMemory
from whale.plans.samples import Division, divide
from whale.plans.shares import (
    UNLIMITED,
    DoesNotFit,
    Load,
    NotEnoughMemory,
    even_shares,
    micro_batch_sizes,
)
from whale.plans.virtual_devices import VirtualDevice
from whale.units import compared, human_bytes, human_seconds

SHOWN = 8
"""devices whose figures are written out in a message"""


@dataclass(frozen=True)
class Order:
    """A way to hand out the devices."""

    name: str
    ranks: tuple[int, ...]

    def of(self, device: VirtualDevice) -> VirtualDevice:
        """The VirtualDevice with its ranks taken in this order."""
        return replace(
            device,
            ranks=tuple(tuple(self.ranks[place] for place in replica) for replica in device.ranks),
        )


def device_orders(cluster: Cluster, width: int, dtype: str) -> tuple[Order, ...]:
    """Orders worth trying, without repetitions. `width`: devices of one model replica."""
    number = cluster.num_devices
    given = Order("rank order", tuple(range(number)))
    if cluster.is_uniform or width < 2 or number % width:
        return (given,)
    kinds = [device.kind for device in cluster.devices]
    best_first = sorted(
        range(number), key=lambda rank: (-kinds[rank].memory_bytes, -kinds[rank].rate(dtype), rank)
    )
    num_replicas = number // width
    by_stage = tuple(
        best_first[stage * num_replicas + replica]
        for replica in range(num_replicas)
        for stage in range(width)
    )
    orders = (
        given,
        Order("stage by stage, larger memory first", by_stage),
        Order("replica by replica, equal devices", tuple(best_first)),
    )
    distinct: dict[tuple[int, ...], Order] = {}
    for order in orders:
        distinct.setdefault(order.ranks, order)
    return tuple(distinct.values())


@dataclass(frozen=True)
class DeviceLoads:
    """Devices with their loads and memories, and the micro-batches that they are to share."""

    virtual_devices: tuple[VirtualDevice, ...]
    loads: tuple[Load, ...]
    """by rank, without limits"""
    memory: tuple[DeviceMemory, ...]
    """by rank"""
    kinds: tuple[str, ...]
    """by rank"""
    least: int
    batch_sample_bytes: float = 0.0
    """bytes of the mini-batch itself, for each of its samples, on every device"""
    fractions: Mapping[tuple[int, ...], tuple[float, ...]] = field(default_factory=dict)
    """under ZeRO: ranks of a group -> the part of its blocks that each holds"""
    shortage: str | None = None
    """which memory beside those of the devices is too small, with its numbers"""

    def with_smaller_batch(self, num_samples: int) -> DeviceLoads:
        """These devices with a mini-batch of so many samples less."""
        less = int(num_samples * self.batch_sample_bytes)
        return replace(
            self,
            memory=tuple(
                replace(memory, buffer_bytes=memory.buffer_bytes - less) for memory in self.memory
            ),
        )

    def without_limits(self) -> DeviceLoads:
        return self._unlimited

    @cached_property
    def _unlimited(self) -> DeviceLoads:
        return replace(
            self, memory=tuple(replace(memory, capacity_bytes=0) for memory in self.memory)
        )

    def divide(self, size: int) -> Division:
        """The samples of a micro-batch of that size, by speed and under memory; looked up the
        second time.
        """
        if size not in self._divisions:
            self._divisions[size] = self._divide(size)
        return self._divisions[size]

    @cached_property
    def _divisions(self) -> dict[int, Division]:
        return {}

    def _divide(self, size: int) -> Division:
        limited = [
            Load(load.sample_s, load.fixed_s, memory.most_samples())
            for load, memory in zip(self.loads, self.memory, strict=True)
        ]
        return divide(size, self.virtual_devices, limited, self.least)

    def samples_by_rank(self, size: int) -> list[int]:
        """Samples of each rank in a micro-batch of that size."""
        return self.divide(size).by_rank(self.virtual_devices)

    def fits(self, batch_size: int, num_micro_batch: int) -> bool:
        if self.shortage or any(memory.most_samples() < 0 for memory in self.memory):
            return False
        try:
            self.divide(max(micro_batch_sizes(batch_size, num_micro_batch)))
        except (DoesNotFit, ValueError):
            return False
        return True


def refuse_unless_it_fits(
    devices: DeviceLoads,
    batch_size: int,
    num_micro_batch: int,
    with_micro_batches: Callable[[int], DeviceLoads],
    recompute_fits: Callable[[], bool],
    but: str,
) -> None:
    """Raises `DoesNotFit` with what would fit, or `NotEnoughMemory` where that is not to be seen
    from one VirtualDevice.

    `with_micro_batches(n)`: the same with n micro-batches, of which another number is in flight.

    `recompute_fits()`: whether it would fit if activations were recomputed in backward, which the
    config forbids. `but`: what was done already to make it fit.
    """
    if devices.shortage is not None:
        raise NotEnoughMemory(devices.shortage, is_over_full=True)
    full = [rank for rank, memory in enumerate(devices.memory) if memory.most_samples() < 0]
    if full:
        rank = max(
            full,
            key=lambda each: devices.memory[each].least_bytes - devices.memory[each].capacity_bytes,
        )
        memory = devices.memory[rank]
        parts = (
            f"{human_bytes(memory.parameter_bytes)} parameters, "
            f"{human_bytes(memory.gradient_bytes)} gradients, "
            f"{human_bytes(memory.optimizer_bytes)} optimizer state, "
            f"{human_bytes(memory.buffer_bytes)} buffers and mini-batch, the rest workspace"
        )
        raise NotEnoughMemory(
            f"the model does not fit: rank {rank} ({devices.kinds[rank]}) has "
            f"{human_bytes(memory.capacity_bytes)} and needs {human_bytes(memory.least_bytes)} "
            f"before the first sample ({parts}). {_missing(devices)}",
            is_over_full=True,
        )
    if devices.fits(batch_size, num_micro_batch):
        return
    size = max(micro_batch_sizes(batch_size, num_micro_batch))
    refusal = f"a micro-batch of {size} samples does not fit{but}: {_free_memory(devices)}"
    if len(devices.virtual_devices) > 1:
        raise NotEnoughMemory(refusal)
    suggestions = _suggestions(devices, batch_size, num_micro_batch, with_micro_batches)
    if recompute_fits():
        suggestions.insert(
            0,
            '"recompute": "auto", so that activations are recomputed in backward and not saved',
        )
    if not suggestions:
        raise NotEnoughMemory(refusal)
    raise DoesNotFit(f"{refusal}. Try: {'; '.join(suggestions)}")


def _missing(devices: DeviceLoads) -> str:
    """How much is missing in all, and what would have to lie elsewhere."""
    over = [memory.least_bytes - memory.capacity_bytes for memory in devices.memory]
    short = [each for each in over if each > 0]
    ranks = f"{len(short)} device{'s' * (len(short) > 1)}"
    return (
        f"{human_bytes(max(short))} are missing there, {human_bytes(sum(short))} on {ranks} "
        "together: so much of weights, gradients and "
        'optimizer state would have to be at home elsewhere ("zero", or "offload" with memories '
        "of the hosts in the cluster file)"
    )


def _free_memory(devices: DeviceLoads) -> str:
    """Samples that fit on each device, those with fewest first, with the numbers behind them."""
    lines = []
    tightest = sorted(
        range(len(devices.memory)), key=lambda rank: (devices.memory[rank].most_samples(), rank)
    )
    shown = num_shown(len(tightest), SHOWN)
    for rank in sorted(tightest[:shown]):
        memory = devices.memory[rank]
        most = memory.most_samples()
        # a stage may save nothing of a sample
        number = "any number" if most == UNLIMITED else max(0, most)
        lines.append(
            f"rank {rank} ({devices.kinds[rank]}) has memory for {number} "
            f"({human_bytes(memory.capacity_bytes)} less {human_bytes(memory.static_bytes)} for "
            f"weights and the like, {human_bytes(memory.sample_bytes)} a sample)"
        )
    more = len(tightest) - shown
    return ", ".join(lines) + (f" and {more} more" if more else "")


def _suggestions(
    devices: DeviceLoads,
    batch_size: int,
    num_micro_batch: int,
    with_micro_batches: Callable[[int], DeviceLoads],
) -> list[str]:
    """The smallest changes, each alone, that make it fit on one VirtualDevice."""
    ways = []
    widest = max(len(device.ranks) * device.num_sample_parts for device in devices.virtual_devices)
    trials = range(num_micro_batch + 1, batch_size // widest + 1)
    more = next(
        (number for number in trials if with_micro_batches(number).fits(batch_size, number)), None
    )
    if more is not None:
        ways.append(f'"num_micro_batch": {more} instead of {num_micro_batch}')
    smaller = _largest(
        lambda size: devices.with_smaller_batch(batch_size - size).fits(size, num_micro_batch),
        num_micro_batch * widest,
        batch_size,
    )
    if smaller is not None:
        ways.append(f"a batch of {smaller} instead of {batch_size}")
    ways += _more_devices(devices, max(micro_batch_sizes(batch_size, num_micro_batch)))
    return ways


def _more_devices(devices: DeviceLoads, size: int) -> list[str]:
    """How many more devices could share a micro-batch of that size. A device that was alone then
    all-reduces its gradients with others, in buckets.
    """
    memories = devices.memory
    if len(memories) == 1:
        memories = tuple(memory.with_shared(memory.gradient_bytes) for memory in memories)
    most = [max(0, memory.most_samples()) for memory in memories]
    best = max(range(len(most)), key=most.__getitem__)
    missing = -(-(size - sum(most)) // most[best]) if most[best] else 0
    return (
        [f"{missing} more device{'s' * (missing > 1)} like rank {best} ({devices.kinds[best]})"]
        if missing > 0
        else []
    )


def _largest(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    """The largest number from `low` to `high` that fits, given that smaller ones fit better."""
    if low >= high or not fits(low):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def explain_shares(devices: DeviceLoads, size: int) -> tuple[str, str]:
    """(choice, why) for the largest micro-batch."""
    division = devices.divide(size)
    shares = devices.samples_by_rank(size)
    idle = [rank for rank, share in enumerate(shares) if not share]
    even = _even_time(devices, size)
    why = (
        f"of {size} samples in a micro-batch; the slowest device takes "
        f"{human_seconds(division.slowest_s)}"
    )
    if even is not None and even > division.slowest_s:
        gain = compared(division.slowest_s / even, "more", "less", "")
        why += f", {gain} than with even shares" if gain else ""
    limited = []
    for rank, share in enumerate(shares):
        if share and share == devices.memory[rank].most_samples() < UNLIMITED:
            limited.append(rank)
    if limited:
        why += f"; memory of rank {listed(limited, SHOWN)} is full"
    full = [rank for rank in idle if devices.memory[rank].most_samples() < 1]
    slow = [rank for rank in idle if rank not in full]
    for ranks, reason in (
        (full, "not even one sample fits into its memory"),
        (slow, "one sample there would take longer"),
    ):
        if ranks:
            why += f"; rank {listed(ranks, SHOWN)} gets nothing: {reason}"
    return listed(shares, SHOWN, "+"), why


def _even_time(devices: DeviceLoads, size: int) -> float | None:
    """Seconds of the slowest device when all get the same, whether it fits or not."""
    slowest = 0.0
    for device in devices.virtual_devices:
        for ranks, share in zip(device.ranks, even_shares(size, len(device.ranks)), strict=True):
            parts = even_shares(share, len(ranks)) if device.grid is None else (share,) * len(ranks)
            for rank, part in zip(ranks, parts, strict=True):
                slowest = max(slowest, devices.loads[rank].seconds(part))
    return slowest
