"""Which device of a cluster file each rank runs on: by host name and local rank. Pure, so that
every rank comes to the same answer.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from whale.cluster.cluster import Cluster, Device
from whale.names import listed, nearest

HOST_VARIABLE = "WHALE_HOST"
"""environment variable with the name of this host in the cluster file, where the system's own name
is another
"""
ANY_HOST = "localhost"
"""a file with this one host fits whatever machine the ranks run on"""
SHOWN_RANKS = 8


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs."""

    host: str
    local_rank: int


def this_place() -> RankPlace:
    """Host and local rank of this process."""
    return RankPlace(
        os.environ.get(HOST_VARIABLE) or socket.gethostname(),
        int(os.environ.get("LOCAL_RANK", "0")),
    )


def match(cluster: Cluster, places: Sequence[RankPlace]) -> Cluster:
    """The devices that the ranks at `places` run on, in rank order. Devices that no rank runs on
    are left out.
    """
    if len(places) > cluster.num_devices:
        raise ValueError(
            f"the cluster file has {_devices(cluster.num_devices)}, but {len(places)} ranks run; "
            f"start {cluster.num_devices} ranks or add {len(places) - cluster.num_devices} to the "
            "file"
        )
    chosen: list[Device | None] = [None] * len(places)
    for host, ranks in _by_host(places).items():
        devices = {
            device.local_rank: device
            for device in cluster.devices
            if device.host == _name_in_file(cluster, host, ranks, places)
        }
        if len(ranks) > len(devices):
            raise ValueError(
                f"{len(ranks)} ranks ({_list(ranks)}) run on host {host!r}, which has "
                f"{_devices(len(devices))} in the cluster file; "
                f"start {len(devices)} there (--nproc-per-node {len(devices)}) or correct its count"
            )
        taken: dict[int, int] = {}
        for rank in ranks:
            local_rank = places[rank].local_rank
            if local_rank in taken:
                raise ValueError(
                    f"ranks {taken[local_rank]} and {rank} are both local rank {local_rank} of "
                    f"host {host!r}; if two launchers share this machine, give each its own host "
                    f"name: {HOST_VARIABLE}=<name in the cluster file>"
                )
            taken[local_rank] = rank
            if local_rank not in devices:
                raise ValueError(
                    f"rank {rank} is local rank {local_rank} of host {host!r}, whose "
                    f"{_devices(len(devices))} in the cluster file "
                    f"are local ranks 0 to {len(devices) - 1}"
                )
            chosen[rank] = devices[local_rank]
    return cluster.in_order([device for device in chosen if device is not None])


def num_local_devices(cluster: Cluster) -> int:
    """Devices that the cluster gives to the host of this process."""
    place = this_place()
    name = _name_in_file(cluster, place.host, [0], [place])
    return sum(device.host == name for device in cluster.devices)


def _name_in_file(
    cluster: Cluster, host: str, ranks: Sequence[int], places: Sequence[RankPlace]
) -> str:
    """The file's name of a host: the same, or the same up to the first dot."""
    names = cluster.hosts
    if host in names:
        return host
    short = [name for name in names if name.partition(".")[0] == host.partition(".")[0]]
    if len(short) == 1:
        return short[0]
    if names == (ANY_HOST,) and len({place.host for place in places}) == 1:
        return ANY_HOST
    subject = f"rank {ranks[0]} runs" if len(ranks) == 1 else f"ranks {_list(ranks)} run"
    raise ValueError(
        f"{subject} on host {host!r}, which is not in the cluster file (it has "
        f"{', '.join(names[:SHOWN_RANKS])}).{nearest(host, names)} "
        f"Add the host, or set {HOST_VARIABLE} there to its name in the file"
    )


def _by_host(places: Sequence[RankPlace]) -> dict[str, list[int]]:
    hosts: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        hosts.setdefault(place.host, []).append(rank)
    return hosts


def _list(ranks: Sequence[int]) -> str:
    return listed(ranks, SHOWN_RANKS)


def _devices(number: int) -> str:
    return f"{number} device{'s' * (number != 1)}"
