"""What a host has that training needs, found without starting a rank."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from whale.cluster.kinds import recognise
from whale.devices import ACCELERATORS, LocalDevice, host_memory_bytes
from whale.units import human_bytes

Status = Literal["ok", "look", "missing"]
PACKAGES = {
    "torch": "",
    "numpy": "",
    "safetensors": "",
    "transformers": "Hugging Face models. Try: pip install transformers",
    "tensorboard": "metrics as TensorBoard files. Try: pip install 'whale-parallel[tensorboard]'",
    "triton": "torch.compile on GPUs. Try: pip install triton",
}
"""package -> what it is for, where Whale works without it"""
TESTED_TORCH = "2.13"
"""the version that the tests run with: the capture changes functions of torch in place"""
LEAST_SHARED_BYTES = 1 << 30
"""workers of a DataLoader hand batches over through /dev/shm"""
LEAST_OPEN_FILES = 4096
"""each pair of ranks has a socket or two, and so has each worker"""
VARIABLES = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "MASTER_ADDR", "WHALE_HOST", "WHALE_CLUSTER")


@dataclass(frozen=True)
class Fact:
    """One line of the report."""

    section: str
    name: str
    value: str
    status: Status = "ok"
    advice: str = ""
    """what to do, where it is not ok"""


def all_facts() -> list[Fact]:
    """Everything, in the order of the report."""
    return [
        *_software(),
        *_devices(),
        *_backends(),
        *_links(),
        *_memory(),
        *_compilers(),
        *_limits(),
    ]


def _software() -> list[Fact]:
    section = "software"
    found = [
        Fact(section, "whale", _version("whale-parallel") or "not installed, run from its folder"),
        Fact(section, "Python", platform.python_version()),
        Fact(section, "system", platform.platform()),
    ]
    for name, purpose in PACKAGES.items():
        version = _version(name)
        if name == "torch" and version is not None and not version.startswith(f"{TESTED_TORCH}."):
            advice = (
                f'Whale is tested with {TESTED_TORCH}. Try: pip install "torch=={TESTED_TORCH}.*"'
            )
            found.append(Fact(section, name, version, "look", advice))
        elif version is not None:
            found.append(Fact(section, name, version))
        else:
            status: Status = "look" if purpose else "missing"
            advice = f"needed for {purpose}" if purpose else f"Try: pip install {name}"
            found.append(Fact(section, name, "not there", status, advice))
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def why_no_accelerators() -> str | None:
    """Why torch finds none here, with what to try; None where it finds some."""
    if any(kind.count() for kind in ACCELERATORS):
        return None
    return "; ".join(reason for kind in ACCELERATORS if (reason := kind.why_none()) is not None)


def _devices() -> list[Fact]:
    section = "devices"
    found = []
    for kind in ACCELERATORS:
        for index in range(kind.count()):
            found += _device(kind(index))
    reason = why_no_accelerators()
    if reason is not None:
        found.append(Fact(section, "accelerators", "none: ranks run on CPUs", "look", reason))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found.append(Fact(section, "CPU cores", str(cores)))
    return found


def _device(device: LocalDevice) -> list[Fact]:
    section = "devices"
    gpu = device.gpu_properties()
    if gpu is None:
        return [Fact(section, device.name, "no properties")]
    free = human_bytes(device.free_memory_bytes())
    text = (
        f"{gpu.name}, {human_bytes(gpu.memory_bytes)}, {free} free, "
        f"{gpu.num_multiprocessors} multiprocessors"
    )
    is_known = recognise(gpu.name, gpu.memory_bytes) is not None
    advice = "" if is_known else "not in Whale's table: its speed is a guess. Try: whale profile"
    found = [Fact(section, device.name, text, "ok" if is_known else "look", advice)]
    for name, value in device.facts().items():
        found.append(Fact(section, f"{device.name} {name}", value))
    reason = device.why_no_kernels()
    if reason is not None:
        found.append(Fact(section, f"{device.name} kernels", "not there", "missing", reason))
    return found


def _backends() -> list[Fact]:
    section = "communication"
    if not dist.is_available() or not dist.is_gloo_available():
        advice = "every job needs it. Try: another build of torch"
        return [Fact(section, "gloo", "not there", "missing", advice)]
    found = [Fact(section, "gloo", "there")]
    for kind in ACCELERATORS:
        if kind.count() > 0:
            name = kind.backend.library or kind.backend.name
            is_there = dist.is_backend_available(kind.backend.name)
            status: Status = "ok" if is_there else "missing"
            advice = "" if is_there else "several GPUs need it. Try: another build of torch"
            found.append(Fact(section, name, "there" if is_there else "not there", status, advice))
    return found


def _links() -> list[Fact]:
    """Network interfaces that are up, with the speed that their driver reports."""
    section = "links"
    found = []
    for folder in sorted(Path("/sys/class/net").glob("*")):
        try:
            is_up = (folder / "operstate").read_text().strip() in ("up", "unknown")
            speed = (folder / "speed").read_text().strip()
        except OSError:
            speed = ""
            is_up = folder.exists()
        if is_up:
            is_known = speed.isdigit() and int(speed) > 0
            found.append(Fact(section, folder.name, f"{speed} Mbit/s" if is_known else "up"))
    return found or [Fact(section, "network", "not known here")]


def _memory() -> list[Fact]:
    section = "memory"
    found = [Fact(section, "host", human_bytes(host_memory_bytes()))]
    shared = Path("/dev/shm")
    if not shared.is_dir():
        advice = "loaders with workers need it. Try: mount a tmpfs there"
        return [*found, Fact(section, "/dev/shm", "not there", "look", advice)]
    usage = shutil.disk_usage(shared)
    text = f"{human_bytes(usage.total)}, {human_bytes(usage.free)} free"
    if usage.free >= LEAST_SHARED_BYTES:
        found.append(Fact(section, "/dev/shm", text))
    else:
        advice = "workers of a loader may fail. Try: docker run --shm-size=8g"
        found.append(Fact(section, "/dev/shm", text, "look", advice))
    has_files = hasattr(os, "memfd_create")
    value = "there" if has_files else "not there"
    advice = "" if has_files else "CPU ranks of one host talk through sockets"
    found.append(Fact(section, "memfd", value, "ok" if has_files else "look", advice))
    return found


def _compilers() -> list[Fact]:
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        advice = '"compile": true needs it on CPUs. Try: apt-get install g++'
        return [Fact("compiler", "C++", "not there", "look", advice)]
    return [Fact("compiler", "C++", compiler)]


def _limits() -> list[Fact]:
    section = "limits"
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_enough = open_files >= LEAST_OPEN_FILES or open_files == resource.RLIM_INFINITY
    advice = "" if is_enough else f"many ranks need more. Try: ulimit -n {LEAST_OPEN_FILES}"
    found = [Fact(section, "open files", str(open_files), "ok" if is_enough else "look", advice)]
    found.append(Fact(section, "torch threads", str(torch.get_num_threads())))
    for name in VARIABLES:
        if name in os.environ:
            found.append(Fact(section, name, os.environ[name]))
    return found
