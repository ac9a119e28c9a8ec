"""What `whale run --emulate` passes on to its ranks, and how many ranks this machine can start.
No torch: the command line reads it.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from whale.cluster.cluster import Cluster
from whale.units import human_bytes

EMULATE_VARIABLE = "WHALE_EMULATE"
"""environment variable of the ranks of an emulated job: `EmulationSettings` as JSON"""
RANK_BYTES = 300 * 10**6
"""memory of one rank of a small job that it shares with no other: measured for torch and Whale
after some steps with stub chunks
"""


@dataclass(frozen=True)
class EmulationSettings:
    """One emulated job."""

    cluster: str
    """path of the cluster file"""
    folder: str
    """where ranks write their timelines"""
    stub: bool = False
    """stub chunks, also where the plan would fit on this machine"""
    stretch: float | None = None
    """times are stretched by this factor; None: by as much as the shortest action needs"""

    def pass_on(self) -> None:
        """Ranks that are started from here on are emulated, on the CPU whatever this
        machine has.
        """
        os.environ[EMULATE_VARIABLE] = json.dumps(asdict(self))
        from whale.devices import hide_accelerators  # brings torch

        hide_accelerators()

    @staticmethod
    def of_this_job() -> EmulationSettings | None:
        """The settings of an emulated job; None where the devices are real."""
        text = os.environ.get(EMULATE_VARIABLE)
        return EmulationSettings(**json.loads(text)) if text else None


def prepare(
    file: Path, folder: Path, stub: bool, stretch: float | None, num_ranks: int | None
) -> int:
    """Number of ranks for an emulated job, whose settings they find in their environment."""
    cluster = Cluster.load(file)
    if num_ranks is not None and num_ranks != cluster.num_devices:
        raise ValueError(
            f"-n {num_ranks}: --emulate starts one rank for each of the {cluster.num_devices} "
            f"devices of {file}; leave -n out"
        )
    if stretch is not None and not 1 <= stretch < float("inf"):
        raise ValueError(
            f"--stretch {stretch:g}: times are stretched, never shrunk; give at least 1"
        )
    free = free_memory_bytes()
    if cluster.num_devices > most_ranks(free):
        raise ValueError(
            f"{file} has {cluster.num_devices} devices, but this machine can start about "
            f"{most_ranks(free)} ranks: {human_bytes(free)} of memory are free and each rank takes "
            f"about {human_bytes(RANK_BYTES)}. Emulate fewer devices, or free memory"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("rank_*.json"):
        old.unlink()
    EmulationSettings(str(file.absolute()), str(folder.absolute()), stub, stretch).pass_on()
    return cluster.num_devices


def most_ranks(free_bytes: int) -> int:
    return free_bytes // RANK_BYTES


def free_memory_bytes() -> int:
    """Memory that new processes may take, within the limit of the container."""
    free = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")]
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        # with caches that the system would give up
        free = [int(lines["MemAvailable"].split()[0]) * 1024]
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        cached = dict(
            line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()
        )
        free.append(limit - used + int(cached.get("inactive_file", 0)))
    except (OSError, ValueError, KeyError):
        pass  # not Linux, or no container with a limit
    return max(0, min(free))
