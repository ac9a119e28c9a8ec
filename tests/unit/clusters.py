"""Clusters on which only one thing counts, for tests of the planner."""

from __future__ import annotations

from whale.cluster.cluster import Cluster, Device, DeviceKind, Link


def devices(*memories: int, rates: tuple[float, ...] | None = None) -> Cluster:
    """Devices of so many bytes; nothing to read or send, so that FLOP alone count."""
    kinds = [
        DeviceKind(f"k{i}", (rates or (1e12,) * len(memories))[i], memory, 1e18)
        for i, memory in enumerate(memories)
    ]
    return Cluster(
        tuple(Device(i, "h", i, kind) for i, kind in enumerate(kinds)),
        Link(1e18, 0.0),
        Link(1e18, 0.0),
    )
