"""The program of each rank of `whale profile`: measures devices and links, with a script also the
layers of its model; rank 0 writes the files.

python profile_ranks.py cluster.yaml device [train.py [arguments of the script]]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from whale.calibration.layers import measure_layers
from whale.calibration.measure import measure
from whale.cluster.cluster import Cluster, Memories
from whale.cluster.layer_times import LayerTimes, beside, save_layer_times
from whale.cluster.matching import match, this_place
from whale.distributed.ranks import Ranks
from whale.launcher import run_script
from whale.session import CaptureReady, capturing_only
from whale.units import human_bytes, human_flop, human_seconds


def joined(device: str) -> Ranks:
    """The running ranks, with their watch."""
    ranks = Ranks(device)
    ranks.start_watch()
    return ranks


def progress_of(ranks: Ranks) -> Callable[[str], None]:
    """Says on rank 0 what is done, and after how many seconds."""
    start = time.monotonic()

    def progress(what: str) -> None:
        if ranks.rank == 0:
            print(f"{time.monotonic() - start:5.1f} s  {what}", file=sys.stderr, flush=True)

    return progress


def profile_ranks(path: Path, device: str = "auto", ranks: Ranks | None = None) -> Cluster:
    """Measures the running ranks and writes the file; says on rank 0 what it does and what it
    found. `ranks`: where the caller has joined them already.
    """
    ranks = ranks or joined(device)
    start = time.monotonic()
    cluster = measure(ranks, progress_of(ranks))
    with ranks.together():
        if ranks.rank == 0:
            cluster.save(path)
            print(describe_cluster(cluster))
            print(f"written to {path} in {time.monotonic() - start:.1f} s")
    return cluster


def captured_by(script: Path, arguments: list[str]) -> CaptureReady:
    """What the script gives to `wh.parallelize`, captured; a ValueError where it never calls it."""
    try:
        with capturing_only():
            run_script(script, arguments)
    except CaptureReady as ready:
        return ready
    except SystemExit:
        pass
    raise ValueError(f"{script} ended before it called wh.parallelize: there is no model to time")


def profile_model(path: Path, device: str, script: Path, arguments: list[str]) -> LayerTimes:
    """Times the layers of the script's model. A cluster file that is there already stays."""
    ready = captured_by(script, arguments)
    ranks = joined(device)
    if all(ranks.gather(path.exists())):
        cluster = match(Cluster.load(path), ranks.gather(this_place()))
    else:
        cluster = profile_ranks(path, device, ranks)
    times = measure_layers(ready.prepared, ready.batch_size, cluster, ranks, progress_of(ranks))
    with ranks.together():
        if ranks.rank == 0:
            save_layer_times(times, beside(path))
            print(describe_layers(times))
            print(f"written to {beside(path)}; whale plan --cluster {path} takes them")
    return times


def describe_cluster(cluster: Cluster) -> str:
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
            f"{human_bytes(memory.link_bytes_per_s)}/s of it, all together "
            f"{human_bytes(together)}/s"
        )
    disk = memories.disk
    if disk is not None:
        lines.append(
            f"disk of {memories.host}: {human_bytes(disk.memory_bytes)} free, reads "
            f"{human_bytes(disk.read_bytes_per_s)}/s, writes "
            f"{human_bytes(disk.write_bytes_per_s)}/s"
        )
    return lines


def describe_layers(times: LayerTimes) -> str:
    """One line for each layer and shard width: what it takes for the fewest and for the most
    samples.
    """
    lines = []
    for layer in times.layers:
        name = layer.modules[0] + (f" and {len(layer.modules) - 1} more" * (len(layer.modules) > 1))
        for width in sorted(layer.widths):
            own = [point for point in layer.times if point.width == width]
            points = []
            for point in (own[0], own[-1]):
                seconds = f"{human_seconds(point.forward_s)} + {human_seconds(point.backward_s)}"
                points.append(f"{point.samples} samples {seconds}")
            split = f", split over {width}" if width > 1 else ""
            lines.append(f"{layer.kind}  {name}{split}: {', '.join(dict.fromkeys(points))}")
    return "\n".join(lines)


if __name__ == "__main__":
    given = sys.argv[1:]
    if len(given) > 2:
        profile_model(Path(given[0]), given[1], Path(given[2]), given[3:])
    else:
        profile_ranks(Path(given[0]), given[1] if len(given) > 1 else "auto")
