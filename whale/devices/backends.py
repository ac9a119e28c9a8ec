"""What backends of `torch.distributed` can do, as far as Whale must know."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.distributed as dist


@dataclass(frozen=True)
class Backend:
    """What a backend of `torch.distributed` can do, as far as Whale must know."""

    name: str
    """that of `torch.distributed`"""
    has_tags: bool
    """messages are matched by tag; otherwise by their order inside a communicator"""
    has_even_collectives: bool
    """all-gather, reduce-scatter and all-reduce take the time of their bytes. gloo's reduce-scatter
    is an all-reduce inside, and its rings are slow for small tensors: one all-to-all is faster
    """
    runs_beside_compute: bool
    """collectives do not take time away from the device's own work, so it pays to cut them up"""
    library: str = ""
    """what stands behind the name, where two that cannot talk to each other share one"""


GLOO = Backend("gloo", has_tags=True, has_even_collectives=False, runs_beside_compute=False)
NCCL = Backend("nccl", has_tags=False, has_even_collectives=True, runs_beside_compute=True)
RCCL = replace(NCCL, library="RCCL")
XCCL = Backend("xccl", has_tags=False, has_even_collectives=True, runs_beside_compute=True)
HOST = Backend("hosted", has_tags=True, has_even_collectives=False, runs_beside_compute=False)
"""gloo through host memory, between devices that share no backend (`distributed/host_group.py`)"""
BACKENDS = {backend.name: backend for backend in (GLOO, NCCL, XCCL, HOST)}


def backend_of(group: dist.ProcessGroup | None) -> Backend:
    """The backend of a process group; None is the group of all ranks.

    One that is not in the table is trusted with nothing but what every backend must do.
    """
    name = dist.get_backend(group)
    known = BACKENDS.get(name)
    return known if known is not None else Backend(name, False, False, False)
