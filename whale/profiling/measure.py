"""Measures the running ranks: what `whale profile` writes into a cluster file.

All ranks compute at the same time, as they do in training: ranks that share a core, a memory bus or a power limit see each other. Links are
measured one after the other, each with the others silent.

    rate of a product    2 n^3 / time, the median of several rounds; the rate of a dtype is that of the largest size
    bandwidth            a copy reads and writes every byte
    operations           forward and backward of each at several sizes (`operations.py`)
    link                 time(n) = latency + n / rate, from a small and a large message there and back
    sum over all ranks   each of k devices sends 2 (k - 1) / k times the bytes
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from whale.cluster.cluster import ETHERNET_50G, PCIE_3_X16, Cluster, Device, Link
from whale.cluster.discovery import free_memory_bytes, this_kind
from whale.cluster.kinds import DEVICE_KINDS, DTYPES, DeviceKind, MatmulRate
from whale.cluster.matching import Place, this_place
from whale.profiling.operations import measure_operations
from whale.profiling.updates import measure_updates
from whale.runtime.ranks import Ranks

TORCH_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIZES = {"cpu": (64, 256, 768), "cuda": (512, 2048, 8192)}
MEASURED_DTYPES = {"cpu": ("fp32", "bf16"), "cuda": DTYPES}
"""float16 products on a CPU are no way to train"""
POINT_S = 0.1
"""how long one round of a point is repeated; enough for the clock and for a busy neighbour to show"""
NUM_ROUNDS = 3
LONGEST_CALL_S = 0.5
"""a size that would take longer for one product is left out: the smaller ones tell enough of so slow a dtype"""
COPIED_BYTES = {"cpu": 64 * 2**20, "cuda": 1024 * 2**20}
"""larger than any cache"""
SMALL_BYTES, LARGE_BYTES = 8, 8 * 2**20
NUM_SMALL, NUM_LARGE = 60, 30
SAME = 0.1
"""devices whose figures differ by less than this are of one kind"""
LEAST_LATENCY_S = 1e-9

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Figures:
    """What one rank measured of its device."""

    place: Place
    kind: DeviceKind
    """name of the table or of the driver, with the measured figures"""


def measure(ranks: Ranks, progress: Progress) -> Cluster:
    """The cluster of the running ranks. All ranks call it and get the same."""
    device_type = torch.device(ranks.device).type
    kind = _measured_kind(ranks, device_type, progress)
    figures = ranks.gather(Figures(this_place(), kind))
    pairs = _pairs([each.place for each in figures])
    links: dict[bool, list[Link]] = {True: [], False: []}
    for a, b in pairs:
        same_host = figures[a].place.host == figures[b].place.host
        progress(f"link between ranks {a} and {b} ({'one host' if same_host else 'two hosts'})")
        links[same_host].append(ranks.gather(_link(ranks, a, b))[a])
    all_reduce = None
    if ranks.is_distributed:
        progress(f"sum over all {ranks.num_ranks} ranks")
        all_reduce = ranks.from_first(_all_reduce(ranks))
    return _cluster(figures, _slowest(links[True]) or PCIE_3_X16, _slowest(links[False]) or ETHERNET_50G, all_reduce)


def _measured_kind(ranks: Ranks, device_type: str, progress: Progress) -> DeviceKind:
    points = []
    for dtype in MEASURED_DTYPES[device_type]:
        slowest = float("inf")
        for size in SIZES[device_type]:
            if 2.0 * size**3 / slowest > LONGEST_CALL_S:
                break
            progress(f"products of {size} x {size} in {dtype}")
            points.append(MatmulRate(dtype, size, _matmul_rate(ranks, dtype, size)))
            slowest = min(ranks.gather(points[-1].flop_per_s))  # of all ranks, so that all go on or none
    progress("memory bandwidth")
    bandwidth = _bandwidth(ranks, COPIED_BYTES[device_type])
    progress("operations, forward and backward")
    operations = measure_operations(ranks)
    progress("updates of parameters")
    operations += measure_updates(ranks)
    rates = {point.dtype: point.flop_per_s for point in points}  # the last, which is the largest size
    local = sum(host == this_place().host for host in ranks.gather(this_place().host))
    return replace(
        this_kind(ranks.device, local),
        flop_per_s=rates["fp32"],
        memory_bytes=free_memory_bytes(ranks.device) // (local if device_type == "cpu" else 1),
        bytes_per_s=bandwidth,
        tf32_flop_per_s=rates.get("tf32"),
        bf16_flop_per_s=rates.get("bf16"),
        fp16_flop_per_s=rates.get("fp16"),
        matmul_rates=tuple(points),
        operations=operations,
    )


def _matmul_rate(ranks: Ranks, dtype: str, size: int) -> float:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    try:
        a = torch.randn(size, size, device=ranks.device).to(TORCH_DTYPES[dtype])
        b, out = a.clone(), torch.empty_like(a)
        return 2.0 * size**3 / _typical_seconds(ranks, lambda: torch.mm(a, b, out=out))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _bandwidth(ranks: Ranks, num_bytes: int) -> float:
    source = torch.ones(num_bytes // 4, device=ranks.device)
    target = torch.empty_like(source)
    return 2.0 * num_bytes / _typical_seconds(ranks, lambda: target.copy_(source))


def _typical_seconds(ranks: Ranks, run: Callable[[], object]) -> float:
    """Time of one call while all ranks do the same: what a busy neighbour takes away belongs to it."""
    run()  # warm
    return statistics.median(_round(ranks, run) for _ in range(NUM_ROUNDS))


def _round(ranks: Ranks, run: Callable[[], object]) -> float:
    """Mean time of a call over POINT_S."""
    _finish(ranks)
    _together(ranks)
    start, number = time.perf_counter(), 0
    while True:
        run()
        number += 1
        if number & (number - 1) == 0 or ranks.device == "cpu":  # seldom on CUDA: looking at the clock means waiting for the device
            _finish(ranks)
            if (passed := time.perf_counter() - start) > POINT_S:
                return passed / number


def _finish(ranks: Ranks) -> None:
    if ranks.device != "cpu":
        torch.cuda.synchronize()


def _together(ranks: Ranks) -> None:
    if ranks.is_distributed:
        dist.barrier()


def _pairs(places: Sequence[Place]) -> list[tuple[int, int]]:
    """Neighbours on every host, and the first ranks of neighbouring hosts: enough for two kinds of links, and few for many ranks."""
    by_host: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        by_host.setdefault(place.host, []).append(rank)
    inside = [(ranks[0], ranks[1]) for ranks in by_host.values() if len(ranks) > 1]
    firsts = [ranks[0] for ranks in by_host.values()]
    return inside + list(zip(firsts, firsts[1:]))


def _link(ranks: Ranks, a: int, b: int) -> Link | None:
    """There and back between two ranks; the others wait."""
    _together(ranks)
    if ranks.rank not in (a, b):
        return None
    peer = b if ranks.rank == a else a
    small, large = (_round_trip(ranks, ranks.rank == a, peer, *what) for what in ((SMALL_BYTES, NUM_SMALL), (LARGE_BYTES, NUM_LARGE)))
    return _line(small / 2, large / 2, LARGE_BYTES)


def _round_trip(ranks: Ranks, starts: bool, peer: int, num_bytes: int, times: int) -> float:
    """Median seconds of a message there and back."""
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=ranks.device)
    found = []
    for _ in range(times + 1):
        start = time.perf_counter()
        for send in (starts, not starts):
            dist.send(message, peer) if send else dist.recv(message, peer)
        _finish(ranks)
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])  # the first opens the connection


def _all_reduce(ranks: Ranks) -> Link:
    """By what each device sends."""
    seconds = []
    for num_bytes, times in ((SMALL_BYTES, NUM_SMALL), (LARGE_BYTES, NUM_LARGE)):
        tensor = torch.zeros(num_bytes // 4, device=ranks.device)
        found = []
        for _ in range(times + 1):
            _together(ranks)
            start = time.perf_counter()
            dist.all_reduce(tensor)
            _finish(ranks)
            found.append(time.perf_counter() - start)
        seconds.append(statistics.median(found[1:]))
    return _line(seconds[0], seconds[1], LARGE_BYTES * 2 * (ranks.num_ranks - 1) / ranks.num_ranks)


def _line(small_s: float, large_s: float, num_bytes: float) -> Link:
    """The link whose small message takes `small_s` and whose large one `large_s`."""
    return Link(num_bytes / max(large_s - small_s, large_s / 2), max(small_s, LEAST_LATENCY_S))


def _slowest(links: Sequence[Link]) -> Link | None:
    return min(links, key=lambda link: link.bytes_per_s, default=None)


def _cluster(figures: Sequence[Figures], intra_host: Link, inter_host: Link, all_reduce: Link | None) -> Cluster:
    """Devices with nearly the same figures become one kind, which has their means; names must differ from the table's."""
    groups: list[list[DeviceKind]] = []
    group_of = []
    for each in figures:
        near = next((place for place, group in enumerate(groups) if _alike(group[0], each.kind)), None)
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
    pairs = ((a.flop_per_s, b.flop_per_s), (a.bytes_per_s, b.bytes_per_s), (a.memory_bytes, b.memory_bytes))
    return a.name == b.name and all(abs(x - y) <= SAME * max(x, y) for x, y in pairs)


def _mean(group: Sequence[DeviceKind], name: str) -> DeviceKind:
    def mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.fmean(known) if known else None

    first = group[0]
    points = tuple(
        replace(point, flop_per_s=statistics.fmean(kind.matmul_rates[place].flop_per_s for kind in group))
        for place, point in enumerate(first.matmul_rates)
    )
    return replace(
        first,
        name=name,
        flop_per_s=statistics.fmean(kind.flop_per_s for kind in group),
        memory_bytes=min(kind.memory_bytes for kind in group),
        bytes_per_s=statistics.fmean(kind.bytes_per_s for kind in group),
        tf32_flop_per_s=mean([kind.tf32_flop_per_s for kind in group]),
        bf16_flop_per_s=mean([kind.bf16_flop_per_s for kind in group]),
        fp16_flop_per_s=mean([kind.fp16_flop_per_s for kind in group]),
        matmul_rates=points,
        operations=tuple(
            replace(
                point,
                forward_s=statistics.fmean(kind.operations[place].forward_s for kind in group),
                backward_s=statistics.fmean(kind.operations[place].backward_s for kind in group),
            )
            for place, point in enumerate(first.operations)
        ),
    )
