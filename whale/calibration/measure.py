"""Measures the running ranks: what `whale profile` writes into a cluster file.

All ranks compute at the same time, as they do in training: ranks that share a core, a memory bus or
a power limit see each other. Links are measured one after the other, each with the others silent.

    rate of a product    2 n^3 / time; the rate of a dtype is that of the largest size
    bandwidth            a copy reads and writes every byte
    operations           forward and backward of each at several sizes, and updates of optimizers
                         (`operations.py`)
    all-reduce           over all ranks, as of gradients; each of k devices sends 2 (k - 1) / k
                         times the bytes
    link                 time(n) = latency + n / rate, from a small and a large message there and
                         back, as a pipeline sends them

All but links take turns in several passes (`turns.py`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from whale.calibration.memories import measure_memories
from whale.calibration.operations import operations_of, updates_of
from whale.calibration.turns import Subject, Turn, loop, once, take_turns
from whale.cluster.cluster import ETHERNET_50G, PCIE_3_X16, Cluster, Device, Link
from whale.cluster.discovery import this_kind
from whale.cluster.kinds import (
    DEVICE_KINDS,
    DTYPES,
    EXACT,
    DeviceKind,
    MatmulRate,
    OperationPoint,
)
from whale.cluster.matching import RankPlace, this_place
from whale.distributed.message import Message
from whale.distributed.ranks import Ranks
from whale.distributed.transport import Transport

TORCH_DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
SIZES = {False: (64, 256, 768), True: (512, 2048, 8192)}
"""rows of square matrices, by whether the device is an accelerator"""
MEASURED_DTYPES = {False: ("fp32", "bf16"), True: DTYPES}
"""float16 products on a CPU are no way to train"""
LONGEST_CALL_S = 0.1
"""a size that would take longer for one product is left out: the smaller ones say enough of so
slow a dtype
"""
COPIED_BYTES = {False: 64 * 2**20, True: 1024 * 2**20}
"""larger than any cache"""
SMALL_BYTES = 8
LARGE_BYTES = 8 * 2**20
NUM_SMALL = 60
NUM_LARGE = 30
"""messages there and back"""
SAME = 0.1
"""devices whose figures differ by less than this are of one kind"""
LEAST_LATENCY_S = 1e-9

Progress = Callable[[str], None]


@dataclass(frozen=True)
class MeasuredDevice:
    """What one rank measured of its device."""

    place: RankPlace
    kind: DeviceKind
    """name of the table or of the driver, with the measured figures"""
    small_all_reduce_s: float = 0.0
    large_all_reduce_s: float = 0.0


def measure(ranks: Ranks, progress: Progress) -> Cluster:
    """The cluster of the running ranks. All ranks call it and get the same."""
    pairs = _pairs([place.host for place in ranks.gather(this_place())])
    transport = (
        Transport(ranks, [*pairs, *((b, a) for a, b in pairs)]) if ranks.is_distributed else None
    )
    figures = ranks.gather(_figures(ranks, transport, progress))
    links: dict[bool, list[Link]] = {True: [], False: []}
    for a, b in pairs:
        assert transport is not None
        same_host = figures[a].place.host == figures[b].place.host
        progress(f"link between ranks {a} and {b} ({'one host' if same_host else 'two hosts'})")
        links[same_host].append(ranks.gather(_link(transport, a, b))[a])
    all_reduce = None
    if ranks.is_distributed:
        # an all-reduce is over when its slowest rank is
        small_s = max(each.small_all_reduce_s for each in figures)
        large_s = max(each.large_all_reduce_s for each in figures)
        all_reduce = _fit_link(
            small_s, large_s, LARGE_BYTES * 2 * (ranks.num_ranks - 1) / ranks.num_ranks
        )
    progress("memory and disk of the hosts")
    cluster = _cluster(
        figures,
        _slowest(links[True]) or PCIE_3_X16,
        _slowest(links[False]) or ETHERNET_50G,
        all_reduce,
    )
    return replace(cluster, memories=measure_memories(ranks))


def _figures(ranks: Ranks, transport: Transport | None, progress: Progress) -> MeasuredDevice:
    """Figures of this rank, while all ranks do the same: what a busy neighbour takes away belongs
    to it.
    """
    on_accelerator = ranks.device.is_accelerator
    free_bytes = ranks.device.free_memory_bytes()  # before what is measured takes some
    progress("making ready")
    products = _products(ranks)
    operations = [*operations_of(ranks), *updates_of(ranks)]
    subjects: dict[Hashable, Subject] = {key: product for key, product in products.items()}
    subjects |= {"copy": _copy(ranks, COPIED_BYTES[on_accelerator])}
    subjects |= {number: each.subject for number, each in enumerate(operations)}
    if transport is not None:
        subjects |= {
            "small all-reduce": _all_reduce(transport, SMALL_BYTES),
            "large all-reduce": _all_reduce(transport, LARGE_BYTES),
        }
    seconds = take_turns(subjects, ranks, progress)
    points = [
        MatmulRate(dtype, size, 2.0 * size**3 / seconds[dtype, size][0]) for dtype, size in products
    ]
    operation_points: list[OperationPoint] = []
    for number, each in enumerate(operations):
        operation_points += each.points(seconds[number])
    # sizes ascend, so the last rate of a dtype is that of the largest size
    rates = {point.dtype: point.flop_per_s for point in points}
    local = sum(host == this_place().host for host in ranks.gather(this_place().host))
    kind = replace(
        this_kind(ranks.device, local),
        flop_per_s=rates["fp32"],
        memory_bytes=free_bytes // (1 if on_accelerator else local),
        bytes_per_s=2.0 * COPIED_BYTES[on_accelerator] / seconds["copy"][0],
        tf32_flop_per_s=rates.get("tf32"),
        bf16_flop_per_s=rates.get("bf16"),
        fp16_flop_per_s=rates.get("fp16"),
        matmul_rates=tuple(points),
        operations=tuple(operation_points),
        efficiency=EXACT,  # the rates of the table were replaced by what is reached
    )
    small_s = 0.0
    large_s = 0.0
    if transport is not None:
        (small_s,) = seconds["small all-reduce"]
        (large_s,) = seconds["large all-reduce"]
    return MeasuredDevice(this_place(), kind, small_s, large_s)


def _products(ranks: Ranks) -> dict[tuple[str, int], Subject]:
    """Matrix products to time, by (dtype, rows), smaller ones first."""
    found = {}
    on_accelerator = ranks.device.is_accelerator
    for dtype in MEASURED_DTYPES[on_accelerator]:
        rate = float("inf")
        for size in SIZES[on_accelerator]:
            if 2.0 * size**3 / rate > LONGEST_CALL_S:
                break
            found[dtype, size] = _product(ranks, dtype, size)
            found[dtype, size].turn()  # the first one loads kernels, which takes longer than it
            # the rate of the slowest rank, so that all continue or none
            rate = 2.0 * size**3 / max(ranks.gather(found[dtype, size].turn()[0]))
    return found


def _product(ranks: Ranks, dtype: str, size: int) -> Subject:
    a = torch.randn(size, size, device=ranks.device.name).to(TORCH_DTYPES[dtype])
    b = a.clone()
    out = torch.empty_like(a)
    one = loop(lambda: torch.mm(a, b, out=out), ranks)

    def turn() -> Turn:
        with ranks.device.tf32(dtype == "tf32"):
            return one.turn()

    return Subject(turn)


def _copy(ranks: Ranks, num_bytes: int) -> Subject:
    source = torch.ones(num_bytes // 4, device=ranks.device.name)
    target = torch.empty_like(source)
    return loop(lambda: target.copy_(source), ranks)


def _all_reduce(transport: Transport, num_bytes: int) -> Subject:
    """An all-reduce over all ranks, as of gradients."""
    tensor = torch.zeros(num_bytes // 4, device=transport.ranks.device.name)
    everyone = tuple(range(transport.ranks.num_ranks))
    is_short = num_bytes <= SMALL_BYTES
    if transport.reaches_through_memory(everyone):
        return once(
            lambda: transport.collectives.all_reduce(tensor, everyone),
            transport.ranks,
            True,
            is_short,
        )
    return once(
        lambda: dist.all_reduce(tensor, group=transport.ranks.world),
        transport.ranks,
        True,
        is_short,
    )


def _pairs(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """Neighbours on every host, and the first ranks of neighbouring hosts: enough for two kinds of
    links, and few for many ranks.
    """
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    inside = [(ranks[0], ranks[1]) for ranks in by_host.values() if len(ranks) > 1]
    firsts = [ranks[0] for ranks in by_host.values()]
    return inside + list(zip(firsts, firsts[1:]))


def _link(transport: Transport, a: int, b: int) -> Link | None:
    """Messages there and back between two ranks, as a pipeline sends them; the others wait."""
    dist.barrier()
    rank = transport.ranks.rank
    if rank not in (a, b):
        return None
    peer = b if rank == a else a
    # tags: no two messages between these ranks have the same
    small = _round_trip(transport, rank == a, peer, SMALL_BYTES, range(NUM_SMALL + 1))
    large = _round_trip(
        transport, rank == a, peer, LARGE_BYTES, range(NUM_SMALL + 1, NUM_SMALL + NUM_LARGE + 2)
    )
    return _fit_link(small / 2, large / 2, LARGE_BYTES)


def _round_trip(
    transport: Transport, starts: bool, peer: int, num_bytes: int, tags: Sequence[int]
) -> float:
    """Seconds of a message there and back: the median of the faster half, as in the slower one a
    neighbour may have been on the core.
    """
    sent, received = (
        torch.zeros(num_bytes, dtype=torch.uint8, device=transport.ranks.device.name)
        for _ in range(2)
    )
    found = []
    for tag in tags:
        message = Message(peer, tag, ())
        start = time.perf_counter()
        if starts:
            transport.send(sent, message)
        transport.wait(transport.post(received, message, "a message of whale profile"))
        if not starts:
            transport.send(sent, message)
        transport.ranks.device.synchronise()
        found.append(time.perf_counter() - start)
        transport.drain()
    return sorted(found[1:])[len(found) // 4]  # the first opens the connection


def _fit_link(small_s: float, large_s: float, num_bytes: float) -> Link:
    """The link whose small message takes `small_s` and whose large one `large_s`."""
    return Link(num_bytes / max(large_s - small_s, large_s / 2), max(small_s, LEAST_LATENCY_S))


def _slowest(links: Sequence[Link]) -> Link | None:
    return min(links, key=lambda link: link.bytes_per_s, default=None)


def _cluster(
    figures: Sequence[MeasuredDevice], intra_host: Link, inter_host: Link, all_reduce: Link | None
) -> Cluster:
    """Devices with nearly the same figures become one kind, which has their means; names must
    differ from the table's.
    """
    groups: list[list[DeviceKind]] = []
    group_of = []
    for each in figures:
        near = next(
            (place for place, group in enumerate(groups) if _alike(group[0], each.kind)), None
        )
        if near is None:
            near = len(groups)
            groups.append([])
        groups[near].append(each.kind)
        group_of.append(near)
    names: dict[str, int] = {}
    kinds = []
    for group in groups:
        base = f"{group[0].name}-measured" if group[0].name in DEVICE_KINDS else group[0].name
        names[base] = names.get(base, 0) + 1
        kinds.append(_mean(group, base if names[base] == 1 else f"{base}-{names[base]}"))
    next_local: dict[str, int] = {}
    devices = []
    for rank, (each, group_place) in enumerate(zip(figures, group_of, strict=True)):
        local_rank = next_local.get(each.place.host, 0)
        next_local[each.place.host] = local_rank + 1
        devices.append(Device(rank, each.place.host, local_rank, kinds[group_place]))
    return Cluster(tuple(devices), intra_host, inter_host, (), all_reduce)


def _alike(a: DeviceKind, b: DeviceKind) -> bool:
    pairs = (
        (a.flop_per_s, b.flop_per_s),
        (a.bytes_per_s, b.bytes_per_s),
        (a.memory_bytes, b.memory_bytes),
    )
    return a.name == b.name and all(abs(x - y) <= SAME * max(x, y) for x, y in pairs)


def _mean(group: Sequence[DeviceKind], name: str) -> DeviceKind:
    """One kind with the means of these devices, and the least of their memory."""

    def mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.fmean(known) if known else None

    # devices of one kind were measured at the same sizes, in the same order
    first = group[0]
    rates = []
    for points in zip(*(kind.matmul_rates for kind in group), strict=True):
        mean_rate = statistics.fmean(point.flop_per_s for point in points)
        rates.append(replace(points[0], flop_per_s=mean_rate))
    operations = []
    for measured in zip(*(kind.operations for kind in group), strict=True):
        forward_s = statistics.fmean(point.forward_s for point in measured)
        backward_s = statistics.fmean(point.backward_s for point in measured)
        operations.append(replace(measured[0], forward_s=forward_s, backward_s=backward_s))
    return replace(
        first,
        name=name,
        flop_per_s=statistics.fmean(kind.flop_per_s for kind in group),
        memory_bytes=min(kind.memory_bytes for kind in group),
        bytes_per_s=statistics.fmean(kind.bytes_per_s for kind in group),
        tf32_flop_per_s=mean([kind.tf32_flop_per_s for kind in group]),
        bf16_flop_per_s=mean([kind.bf16_flop_per_s for kind in group]),
        fp16_flop_per_s=mean([kind.fp16_flop_per_s for kind in group]),
        matmul_rates=tuple(rates),
        operations=tuple(operations),
    )
