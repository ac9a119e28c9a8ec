"""Unlike devices: which of them take which part, how many samples each gets, and what to do when
memory is too small.

The order of the devices decides who runs which stage of which replica (`virtual_devices.py` takes
them in order). Three are tried where devices differ, and the one with the fastest simulated step is
taken (the first, where they tie):

    as given        rank order
    stage by stage  sorted by memory, then speed; the R fastest run stage 0 of the R replicas, the next stage 1, ...
                    Early stages hold more micro-batches, so they get the larger memories
    replica by replica   sorted the same way; the first s devices are replica 0, ...: like devices in one replica, whose share follows
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from whale.cluster.cluster import Cluster
from whale.names import listed, num_shown
from whale.plans.plan import DeviceMemory
from whale.plans.samples import Division, divide
from whale.plans.shares import (
    UNLIMITED,
    DoesNotFit,
    Load,
    NoRoom,
    even_shares,
    micro_batch_sizes,
)
from whale.plans.virtual_devices import VirtualDevice
from whale.units import human_bytes, human_seconds

SHOWN = 8
"""devices whose figures are written out in a message"""


@dataclass(frozen=True)
class Order:
    """A way to hand out the devices."""

    name: str
    ranks: tuple[int, ...]

    def of(self, device: VirtualDevice) -> VirtualDevice:
        """The VirtualDevice with the ranks that stand at its places."""
        return replace(
            device,
            ranks=tuple(tuple(self.ranks[place] for place in replica) for replica in device.ranks),
        )


def device_orders(cluster: Cluster, width: int, dtype: str) -> tuple[Order, ...]:
    """`width`: devices of one model replica."""
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
        Order("replica by replica, like devices", tuple(best_first)),
    )
    return tuple(
        order
        for place, order in enumerate(orders)
        if order.ranks not in [other.ranks for other in orders[:place]]
    )


@dataclass(frozen=True)
class Situation:
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
    """of the mini-batch itself, for each of its samples, on every device"""

    def with_smaller_batch(self, num_samples: int) -> Situation:
        """The same with a mini-batch of so many samples less."""
        less = int(num_samples * self.batch_sample_bytes)
        return replace(
            self,
            memory=tuple(
                replace(memory, buffer_bytes=memory.buffer_bytes - less) for memory in self.memory
            ),
        )

    def without_limits(self) -> Situation:
        return replace(
            self, memory=tuple(replace(memory, capacity_bytes=0) for memory in self.memory)
        )

    def divide(self, size: int) -> Division:
        limited = [
            Load(load.sample_s, load.fixed_s, memory.most_samples())
            for load, memory in zip(self.loads, self.memory, strict=True)
        ]
        return divide(size, self.virtual_devices, limited, self.least)

    def samples_by_rank(self, size: int) -> list[int]:
        """Of a micro-batch of that size."""
        return self.divide(size).by_rank(self.virtual_devices)

    def fits(self, batch_size: int, num_micro_batch: int) -> bool:
        if any(memory.most_samples() < 0 for memory in self.memory):
            return False
        try:
            self.divide(max(micro_batch_sizes(batch_size, num_micro_batch)))
        except (DoesNotFit, ValueError):
            return False
        return True


def refuse_unless_it_fits(
    situation: Situation,
    batch_size: int,
    num_micro_batch: int,
    with_micro_batches: Callable[[int], Situation],
    recompute_fits: Callable[[], bool] = lambda: False,
    but: str = "",
) -> None:
    """Raises `DoesNotFit` with what would fit, or `NoRoom` where that is not to be seen from one
    VirtualDevice.

    `with_micro_batches(n)`: the same with n micro-batches, of which another number is in flight.

    `recompute_fits()`: whether it would fit if activations were computed again in backward, which
    the config forbids. `but`: what was done already to make it fit.
    """
    full = [rank for rank, memory in enumerate(situation.memory) if memory.most_samples() < 0]
    if full:
        rank = max(
            full,
            key=lambda each: (
                situation.memory[each].least_bytes - situation.memory[each].capacity_bytes
            ),
        )
        memory = situation.memory[rank]
        parts = (
            f"{human_bytes(memory.parameter_bytes)} parameters, "
            f"{human_bytes(memory.gradient_bytes)} gradients, "
            f"{human_bytes(memory.optimizer_bytes)} optimizer state, "
            f"{human_bytes(memory.buffer_bytes)} buffers and mini-batch, "
            "the rest room to work"
        )
        raise NoRoom(
            f"the model does not fit: rank {rank} ({situation.kinds[rank]}) has "
            f"{human_bytes(memory.capacity_bytes)} and needs "
            f"{human_bytes(memory.least_bytes)} before the first sample ({parts}). "
            f"{_missing(situation)}",
            is_over_full=True,
        )
    if situation.fits(batch_size, num_micro_batch):
        return
    size = max(micro_batch_sizes(batch_size, num_micro_batch))
    refusal = f"a micro-batch of {size} samples does not fit{but}: {_room(situation)}"
    if len(situation.virtual_devices) > 1:
        raise NoRoom(refusal)
    ways = _ways_out(situation, batch_size, num_micro_batch, with_micro_batches)
    if recompute_fits():
        ways.insert(
            0,
            '"recompute": "auto", so that activations are computed again in backward and not kept',
        )
    if not ways:
        raise NoRoom(refusal)
    raise DoesNotFit(f"{refusal}. What would fit: {'; '.join(ways)}")


def _missing(situation: Situation) -> str:
    """How much is missing in all, and what would have to lie elsewhere."""
    over = [memory.least_bytes - memory.capacity_bytes for memory in situation.memory]
    short = [each for each in over if each > 0]
    ranks = f"{len(short)} device{'s' * (len(short) > 1)}"
    return (
        f"{human_bytes(max(short))} are missing there, {human_bytes(sum(short))} on {ranks} "
        "together: so much of weights, gradients and "
        "optimizer state would have to lie in the memory of the hosts (offloading, which Whale "
        "does not do yet)"
    )


def _room(situation: Situation) -> str:
    """Samples that fit on each device, those with least room first, with the numbers
    behind them.
    """
    lines = []
    tightest = sorted(
        range(len(situation.memory)), key=lambda rank: (situation.memory[rank].most_samples(), rank)
    )
    shown = num_shown(len(tightest), SHOWN)
    for rank in sorted(tightest[:shown]):
        memory = situation.memory[rank]
        lines.append(
            f"rank {rank} ({situation.kinds[rank]}) has room for {max(0, memory.most_samples())} "
            f"({human_bytes(memory.capacity_bytes)} less {human_bytes(memory.static_bytes)} for "
            "weights "
            f"and the like, {human_bytes(memory.sample_bytes)} a sample)"
        )
    more = len(tightest) - shown
    return ", ".join(lines) + (f" and {more} more" if more else "")


def _ways_out(
    situation: Situation,
    batch_size: int,
    num_micro_batch: int,
    with_micro_batches: Callable[[int], Situation],
) -> list[str]:
    """The smallest changes, each alone, that make it fit on one VirtualDevice."""
    ways = []
    widest = max(
        len(device.ranks) * device.num_sample_parts for device in situation.virtual_devices
    )
    trials = range(num_micro_batch + 1, batch_size // widest + 1)
    more = next(
        (number for number in trials if with_micro_batches(number).fits(batch_size, number)), None
    )
    if more is not None:
        ways.append(f'"num_micro_batch": {more} instead of {num_micro_batch}')
    smaller = _largest(
        lambda size: situation.with_smaller_batch(batch_size - size).fits(size, num_micro_batch),
        num_micro_batch * widest,
        batch_size,
    )
    if smaller is not None:
        ways.append(f"a batch of {smaller} instead of {batch_size}")
    ways += _more_devices(situation, max(micro_batch_sizes(batch_size, num_micro_batch)))
    return ways


def _more_devices(situation: Situation, size: int) -> list[str]:
    """How many, to share a micro-batch of that size. A device that was alone then sums its
    gradients with others, in buckets.
    """
    memories = situation.memory
    if len(memories) == 1:
        memories = tuple(memory.with_shared(memory.gradient_bytes) for memory in memories)
    rooms = [max(0, memory.most_samples()) for memory in memories]
    best = max(range(len(rooms)), key=rooms.__getitem__)
    missing = -(-(size - sum(rooms)) // rooms[best]) if rooms[best] else 0
    return (
        [f"{missing} more device{'s' * (missing > 1)} like rank {best} ({situation.kinds[best]})"]
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


def explain_shares(situation: Situation, size: int) -> tuple[str, str]:
    """(choice, why) for the largest micro-batch."""
    division = situation.divide(size)
    shares = situation.samples_by_rank(size)
    idle = [rank for rank, share in enumerate(shares) if not share]
    even = _even_time(situation, size)
    why = (
        f"of {size} samples in a micro-batch; the slowest device takes "
        f"{human_seconds(division.slowest_s)}"
    )
    if even is not None and even > division.slowest_s * (1 + 1e-9):
        why += f", {even / division.slowest_s:.3g} times less than with even shares"
    limited = [
        rank
        for rank, share in enumerate(shares)
        if share and share == situation.memory[rank].most_samples() < UNLIMITED
    ]
    if limited:
        why += f"; memory of rank {listed(limited, SHOWN)} is full"
    full = [rank for rank in idle if situation.memory[rank].most_samples() < 1]
    slow = [rank for rank in idle if rank not in full]
    for ranks, reason in (
        (full, "memory has no room for a sample there"),
        (slow, "one sample there would take longer"),
    ):
        if ranks:
            why += f"; rank {listed(ranks, SHOWN)} gets nothing: {reason}"
    return listed(shares, SHOWN, "+"), why


def _even_time(situation: Situation, size: int) -> float | None:
    """Seconds of the slowest device when all get the same, whether it fits or not."""
    slowest = 0.0
    for device in situation.virtual_devices:
        for ranks, share in zip(device.ranks, even_shares(size, len(device.ranks)), strict=True):
            parts = even_shares(share, len(ranks)) if device.grid is None else (share,) * len(ranks)
            for rank, part in zip(ranks, parts, strict=True):
                slowest = max(slowest, situation.loads[rank].seconds(part))
    return slowest
