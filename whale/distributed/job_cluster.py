"""The cluster of this job: a file or `Cluster` matched to the running ranks, or what the ranks find
under themselves.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

from whale.cluster.cluster import DEVICE_KINDS, Cluster
from whale.cluster.discovery import discovered, this_kind, this_memories
from whale.cluster.kinds import DeviceKind
from whale.cluster.matching import match, this_place
from whale.config import CLUSTER_VARIABLE
from whale.devices import find_device
from whale.distributed.ranks import Ranks

logger = logging.getLogger("whale")

ClusterLike = Cluster | str | Path


def read_cluster(given: ClusterLike) -> Cluster:
    return given if isinstance(given, Cluster) else Cluster.load(given)


def chosen_cluster(*given: ClusterLike | None) -> ClusterLike | None:
    """What counts: the command line (`whale run --cluster`), else the first that is given."""
    return next(
        (each for each in (os.environ.get(CLUSTER_VARIABLE) or None, *given) if each is not None),
        None,
    )


def cluster_of_ranks(given: ClusterLike | None, ranks: Ranks) -> Cluster:
    """Devices in rank order. All ranks call it; rank 0 reads the file, and all refuse together."""
    cluster: Cluster | None = None
    with ranks.together():
        if given is not None and ranks.rank == 0:
            cluster = read_cluster(given)
    cluster = ranks.from_first(cluster)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    found = ranks.gather((this_place(), this_kind(ranks.device, local), this_memories()))
    places = [place for place, _, _ in found]
    kinds = [kind for _, kind, _ in found]
    if cluster is None:
        return discovered(places, kinds, [memories for _, _, memories in found])
    matched = match(cluster, places)
    if ranks.rank == 0 and ranks.device.is_accelerator:
        _warn_of_other_kinds(matched, kinds)
    return matched


def cluster_to_plan_for(given: ClusterLike | int | None, num_devices: int) -> Cluster:
    """The cluster of a plan that is made without ranks: the devices of the file in its order, or
    `num_devices` like the one of this process.
    """
    if given is not None and not isinstance(given, int):
        return read_cluster(given)
    device = find_device()
    if device.is_accelerator:
        kind = this_kind(device)
    else:
        # what memory the CPUs of a cluster have that nobody described is not known
        kind = replace(DEVICE_KINDS["CPU"], memory_bytes=0)
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", "8"))
    return Cluster.uniform(num_devices if given is None else given, kind, devices_per_host=per_host)


def _warn_of_other_kinds(cluster: Cluster, kinds: list[DeviceKind]) -> None:
    """A file that names other GPUs than the ranks have is a slip; own kinds and CPU ranks that
    stand in for GPUs are not.
    """
    for device, kind in zip(cluster.devices, kinds, strict=True):
        if (
            device.kind.name in DEVICE_KINDS
            and kind.name in DEVICE_KINDS
            and device.kind.name != kind.name
        ):
            logger.warning(
                "rank %d runs on a %s, but the cluster file says %s for local rank %d of host %s: "
                "the plan is made for the file's",
                device.rank,
                kind.name,
                device.kind.name,
                device.local_rank,
                device.host,
            )
