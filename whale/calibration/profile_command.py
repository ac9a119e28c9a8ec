"""The program of each rank of `whale profile`: measures, and rank 0 writes the cluster file.

python profile_command.py cluster.yaml [device]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from whale.calibration.measure import measure
from whale.cluster.cluster import Cluster, Memories
from whale.distributed.ranks import Ranks
from whale.units import human_bytes, human_flop, human_seconds


def profile_ranks(path: Path, device: str = "auto", ranks: Ranks | None = None) -> Cluster:
    """Measures the running ranks and writes the file; says on rank 0 what it does and what it
    found. `ranks`: where the caller has joined them already.
    """
    if ranks is None:
        ranks = Ranks(device)
        ranks.start_watch()
    start = time.monotonic()

    def progress(what: str) -> None:
        if ranks.rank == 0:
            print(f"{time.monotonic() - start:5.1f} s  {what}", file=sys.stderr, flush=True)

    cluster = measure(ranks, progress)
    with ranks.together():
        if ranks.rank == 0:
            cluster.save(path)
            print(describe(cluster))
            print(f"written to {path} in {time.monotonic() - start:.1f} s")
    return cluster


def describe(cluster: Cluster) -> str:
    """What was found, one line for each device and link."""
    lines = []
    for device in cluster.devices:
        kind = device.kind
        measured = dict.fromkeys(point.dtype for point in kind.matmul_rates)
        rates = ", ".join(f"{human_flop(kind.rate(dtype))}/s {dtype}" for dtype in measured)
        where = f"rank {device.rank}  {device.host} local rank {device.local_rank}"
        lines.append(
            f"{where}  {kind.name}: {rates}; {human_bytes(kind.memory_bytes)} free, "
            f"{human_bytes(kind.bytes_per_s)}/s"
        )
    named = (
        [("inside a host", cluster.intra_host)] if len(cluster.hosts) < cluster.num_devices else []
    )
    named += [("between hosts", cluster.inter_host)] if len(cluster.hosts) > 1 else []
    named += [("all-reduce", cluster.all_reduce)] if cluster.all_reduce is not None else []
    for name, link in named:
        assert link is not None
        lines.append(
            f"{name}: {human_bytes(link.bytes_per_s)}/s, {human_seconds(link.latency_s)} latency"
        )
    for each in cluster.memories:
        lines += _of_host(each)
    return "\n".join(lines)


def _of_host(memories: Memories) -> list[str]:
    """What a host has beside its devices."""
    lines = []
    memory = memories.memory
    if memory is not None:
        together = memory.links_bytes_per_s or memory.link_bytes_per_s
        lines.append(
            f"memory of {memories.host}: {human_bytes(memory.memory_bytes)} free, "
            f"{human_bytes(memory.memory_bytes_per_s)}/s, a device reaches "
            f"{human_bytes(memory.link_bytes_per_s)}/s of it, all together {human_bytes(together)}/s"
        )
    disk = memories.disk
    if disk is not None:
        lines.append(
            f"disk of {memories.host}: {human_bytes(disk.memory_bytes)} free, reads "
            f"{human_bytes(disk.read_bytes_per_s)}/s, writes {human_bytes(disk.write_bytes_per_s)}/s"
        )
    return lines


if __name__ == "__main__":
    profile_ranks(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "auto")
