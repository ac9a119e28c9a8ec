"""The device that this process runs on, behind one interface: memory, random state, synchronisation
and the backend of its process groups.

No other module asks whether a device is a GPU of some vendor. A new kind of device is a subclass of
`LocalDevice`, listed in `ACCELERATORS`, and a `Backend`. Both are plain facts about hardware; what
an emulated job adds to them stands in `distributed/platform.py`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

TRANSFERS_PER_CLOCK = 2
"""memory moves data twice in a clock"""
MILLISECONDS = 1e3
CLOCK_HZ = 1.4e9
MEMORY_BYTES_PER_S = 300e9
"""where the driver does not say: the low end of today's GPUs"""
FIRST_WITH_TF32 = (8, 0)
"""compute capability of the first GPUs that have it (Ampere)"""
MAX_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""environment variable with the number of hardware queues that streams are spread over"""
NUM_CONNECTIONS = 8
"""hardware queues of a GPU where that is not set"""
ROCM_MAX_QUEUES = "GPU_MAX_HW_QUEUES"
ROCM_NUM_QUEUES = 4
ROCM_ALLOWS_TF32 = "HIPBLASLT_ALLOW_TF32"
NO_CAPABILITY = (0, 0)
"""of GPUs that have no compute capability"""
Moment = Any
"""a point in the work of a device: seconds of the host on a CPU, an event of an accelerator"""
VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""environment variables that hide accelerators from processes that are started later"""


# ---- backends of torch.distributed


@dataclass(frozen=True)
class Backend:
    """What a backend of `torch.distributed` can do, as far as Whale must know."""

    name: str
    has_tags: bool
    """messages are matched by tag; otherwise by their order inside a communicator"""
    has_even_collectives: bool
    """all-gather, reduce-scatter and all-reduce take the time of their bytes. gloo's reduce-scatter
    is an all-reduce inside, and its rings are slow for small tensors: one all-to-all is faster
    """
    runs_beside_compute: bool
    """collectives do not take time away from the device's own work, so it pays to cut them up"""


GLOO = Backend("gloo", has_tags=True, has_even_collectives=False, runs_beside_compute=False)
NCCL = Backend("nccl", has_tags=False, has_even_collectives=True, runs_beside_compute=True)
XCCL = Backend("xccl", has_tags=False, has_even_collectives=True, runs_beside_compute=True)
BACKENDS = {backend.name: backend for backend in (GLOO, NCCL, XCCL)}


def backend_of(group: dist.ProcessGroup | None) -> Backend:
    """The backend of a process group; None is the group of all ranks.

    One that is not in the table is trusted with nothing but what every backend must do.
    """
    name = dist.get_backend(group)
    known = BACKENDS.get(name)
    return known if known is not None else Backend(name, False, False, False)


# ---- devices


@dataclass(frozen=True)
class GpuProperties:
    """What the driver says about a GPU."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    num_multiprocessors: int
    clock_hz: float = CLOCK_HZ
    memory_bytes_per_s: float = MEMORY_BYTES_PER_S


class HostCopy:
    """A tensor on its way from a device to the host."""

    def __init__(self, tensor: Tensor, moment: Moment, device: LocalDevice) -> None:
        self._tensor = tensor
        self.moment = moment
        """when it has arrived"""
        self._device = device

    def read(self) -> Tensor:
        """The tensor on the host. Waits until it has arrived."""
        self._device.wait_for(self.moment)
        return self._tensor


class DeviceCopy:
    """A tensor on its way from the host to a device."""

    def __init__(
        self, tensor: Tensor, moment: Moment | None = None, device: LocalDevice | None = None
    ) -> None:
        self._tensor = tensor
        self.moment = moment
        """when it has arrived; None: it is there"""
        self._device = device

    def take(self) -> Tensor:
        """The tensor, for work that is launched after this call; the host does not wait."""
        if self._device is not None:
            self._device.follow(self.moment)
            self._device.used_here(self._tensor)
        return self._tensor


def _rows(tensor: Tensor, intervals: Sequence[tuple[int, int]] | None) -> Tensor:
    """Rows of these intervals, one behind the other; None: all."""
    if intervals is None:
        return tensor
    return torch.cat([tensor[start:stop] for start, stop in intervals])


class LocalDevice:
    """The device of this process. This class is the CPU; accelerators override what differs."""

    type: ClassVar[str] = "cpu"
    backend: ClassVar[Backend] = GLOO
    is_accelerator: ClassVar[bool] = False
    """it has a memory of its own and works through a queue: calls return before their work is
    done, so that the clock of the host says nothing until `synchronise`
    """

    def __init__(self, index: int | None = None) -> None:
        self.index = index

    @property
    def name(self) -> str:
        """What torch calls it: `cpu` or, say, `cuda:1`."""
        return self.type if self.index is None else f"{self.type}:{self.index}"

    @staticmethod
    def count() -> int:
        """Number of devices of this type that this process sees."""
        return 1

    def select(self) -> None:
        """Makes it the current device of this process."""

    def synchronise(self) -> None:
        """Returns when the device has done all work that it was given."""

    @property
    def num_queues(self) -> int | None:
        """Hardware queues that streams share: one that waits blocks what was launched later into
        its queue. None: nothing is shared.
        """
        return None

    @property
    def bound_device(self) -> torch.device | None:
        """The device that process groups are tied to at their start; None where they need none."""
        return None

    # ---- time

    @property
    def event(self) -> Callable[[], Moment]:
        """Gives the moment at which the device has done all that it was given so far."""
        return time.perf_counter  # itself: the executor calls it twice for each action

    def elapsed_s(self, start: Moment, end: Moment) -> float:
        """Seconds from one moment to another; both are over."""
        return float(end - start)

    @staticmethod
    def is_over(moment: Moment) -> bool:
        """Whether the device has come there."""
        return True

    def wait_for(self, moment: Moment) -> None:
        """Returns when the device has come there."""

    # ---- memory

    def free_memory_bytes(self) -> int:
        """Bytes that are free now: on an accelerator, or on the host of a CPU rank."""
        try:
            with open("/proc/meminfo") as file:
                figures = dict(line.split(":") for line in file)
            return min(int(figures["MemAvailable"].split()[0]) * 1024, host_memory_bytes())
        except (OSError, KeyError, ValueError):
            return host_memory_bytes()  # not Linux

    def reserved_memory_bytes(self) -> int:
        """Bytes of an accelerator that torch's allocator holds for this process; 0 on the CPU."""
        return 0

    def peak_memory_bytes(self) -> int:
        """Most bytes in use so far: of torch's allocator on an accelerator, else of the process."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def empty_on_host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Host memory for a copy of one of the device's tensors; pinned on accelerators, so that
        the copy need not wait.
        """
        return torch.empty(tuple(shape), dtype=dtype)

    def start_copy(
        self, tensor: Tensor, intervals: Sequence[tuple[int, int]] | None = None
    ) -> DeviceCopy:
        """A tensor of the user on its way to this device, or only its rows in these intervals, one
        behind the other. The host does not wait for it, the user may change his tensor at once, and
        it arrives beside compute.
        """
        return DeviceCopy(_rows(tensor, intervals).to(self.name))

    # ---- streams

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Work that is launched inside runs beside compute, after all that was launched before.

        What compute launches later does not wait for it (`follow` makes it), and the memory of a
        tensor of compute's must not be given away meanwhile (`used_here`).
        """
        yield

    def follow(self, moment: Moment) -> None:
        """Work that is launched later runs after that moment; the host does not wait."""

    def used_here(self, tensor: Tensor) -> None:
        """The current stream reads a tensor that was made on another one: its memory stays until
        that is done.
        """

    def to_host(self, tensor: Tensor) -> HostCopy:
        """A copy of the tensor in host memory, on its way: it has the values that all work
        launched so far gives.
        """
        return HostCopy(tensor, self.event(), self)

    def gpu_properties(self) -> GpuProperties | None:
        """What the driver says about it; None for a CPU."""
        return None

    # ---- random numbers

    @property
    def generator(self) -> str:
        """What the numbers depend on that a seed gives: devices that differ in it draw different
        large tensors. A GPU has a stream of numbers for each thread that it can run.
        """
        gpu = self.gpu_properties()
        if gpu is None:
            return self.type
        return f"{self.type} {gpu.capability}, {gpu.num_multiprocessors} multiprocessors"

    def random_states(self) -> list[Tensor]:
        """State of every generator that `torch.manual_seed` sets: the CPU's, then the device's."""
        return [torch.random.get_rng_state()]

    def set_random_states(self, states: Sequence[Tensor]) -> None:
        """Puts back what `random_states` gave."""
        torch.random.set_rng_state(states[0])

    @contextlib.contextmanager
    def fork_random(self) -> Iterator[None]:
        """Random numbers that are drawn inside do not change those that are drawn afterwards."""
        with torch.random.fork_rng(devices=[]):
            yield

    # ---- arithmetic

    @property
    def has_tf32(self) -> bool:
        """Whether float32 products may run in TF32, which has 10 bits of mantissa."""
        gpu = self.gpu_properties()
        return gpu is not None and gpu.capability >= FIRST_WITH_TF32

    def forbid_tf32(self) -> None:
        """From here on float32 products and convolutions of this process run in float32."""
        torch.set_float32_matmul_precision("highest")

    @contextlib.contextmanager
    def tf32(self, is_allowed: bool) -> Iterator[None]:
        """Whether float32 products inside may use TF32 arithmetic, where the device has it."""
        yield


_SIDE_STREAMS: dict[tuple[str, str], Any] = {}
"""(device, purpose) -> a stream beside compute"""


class Accelerator(LocalDevice):
    """A device with streams and events, behind the module of torch that has its name. What torch's
    modules have in common stands here; a vendor says what its own has not, or has differently.
    """

    is_accelerator = True

    @property
    def module(self) -> Any:
        """`torch.cuda`, `torch.xpu` and so on."""
        return torch.get_device_module(self.type)

    def select(self) -> None:
        self.module.set_device(self.name)

    def synchronise(self) -> None:
        self.module.synchronize(self.name)

    @property
    def bound_device(self) -> torch.device | None:
        return torch.device(self.name)

    # ---- time

    @property
    def event(self) -> Callable[[], Moment]:
        new_event = self.module.Event

        def record() -> Moment:
            moment = new_event(enable_timing=True)
            moment.record()
            return moment

        return record

    def elapsed_s(self, start: Moment, end: Moment) -> float:
        return float(start.elapsed_time(end)) / MILLISECONDS

    @staticmethod
    def is_over(moment: Moment) -> bool:
        return bool(moment.query())

    def wait_for(self, moment: Moment) -> None:
        if not moment.query():
            moment.synchronize()

    # ---- memory

    def free_memory_bytes(self) -> int:
        return int(self.module.mem_get_info(self.name)[0])

    def reserved_memory_bytes(self) -> int:
        return int(self.module.memory_reserved(self.name))

    def peak_memory_bytes(self) -> int:
        return int(self.module.max_memory_allocated(self.name))

    def empty_on_host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    # ---- streams

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        stream = self._stream("outgoing")
        stream.wait_stream(self.module.current_stream())
        with self.module.stream(stream):
            yield

    def _pinned(self, tensor: Tensor, intervals: Sequence[tuple[int, int]] | None) -> Tensor:
        """A copy of these rows in pinned memory."""
        if intervals is None:
            return self.empty_on_host(tensor.shape, tensor.dtype).copy_(tensor)
        num_rows = sum(stop - start for start, stop in intervals)
        pinned = self.empty_on_host((num_rows, *tensor.shape[1:]), tensor.dtype)
        place = 0
        for start, stop in intervals:
            pinned[place : place + stop - start] = tensor[start:stop]
            place += stop - start
        return pinned

    def _stream(self, purpose: str) -> Any:
        """The device's stream for this purpose."""
        key = (self.name, purpose)
        if key not in _SIDE_STREAMS:
            _SIDE_STREAMS[key] = self.module.Stream()
        return _SIDE_STREAMS[key]

    def follow(self, moment: Moment) -> None:
        self.module.current_stream().wait_event(moment)

    def used_here(self, tensor: Tensor) -> None:
        tensor.record_stream(self.module.current_stream())

    def to_host(self, tensor: Tensor) -> HostCopy:
        copy = self.empty_on_host(tensor.shape, tensor.dtype)
        copy.copy_(tensor, non_blocking=True)
        self.used_here(tensor)
        return HostCopy(copy, self.event(), self)

    def start_copy(
        self, tensor: Tensor, intervals: Sequence[tuple[int, int]] | None = None
    ) -> DeviceCopy:
        if tensor.device.type != "cpu":
            return super().start_copy(tensor, intervals)
        pinned = self._pinned(tensor, intervals)
        # a stream of its own, which waits for nothing: the batch of the next step arrives while
        # this one runs
        with self.module.stream(self._stream("incoming")):
            copy = pinned.to(self.name, non_blocking=True)
            return DeviceCopy(copy, self.event(), self)

    # ---- random numbers

    def random_states(self) -> list[Tensor]:
        return [torch.random.get_rng_state(), self.module.get_rng_state(self.name)]

    def set_random_states(self, states: Sequence[Tensor]) -> None:
        # torch.manual_seed reseeds all devices, so both are put back
        torch.random.set_rng_state(states[0])
        self.module.set_rng_state(states[1], self.name)

    @contextlib.contextmanager
    def fork_random(self) -> Iterator[None]:
        before = self.random_states()
        try:
            yield
        finally:
            self.set_random_states(before)


class CudaDevice(Accelerator):
    """A GPU of NVIDIA behind torch's `cuda` module, with NCCL between processes."""

    type = "cuda"
    backend = NCCL

    @staticmethod
    def count() -> int:
        is_there = torch.cuda.is_available() and torch.version.hip is None
        return torch.cuda.device_count() if is_there else 0

    @property
    def num_queues(self) -> int | None:
        return int(os.environ.get(MAX_CONNECTIONS, NUM_CONNECTIONS))

    def gpu_properties(self) -> GpuProperties | None:
        found = torch.cuda.get_device_properties(self.name)
        # the driver says kHz, and newer versions of torch pass it on
        clock_hz = float(getattr(found, "clock_rate", 0)) * 1e3
        memory_hz = float(getattr(found, "memory_clock_rate", 0)) * 1e3
        bus_bits = float(getattr(found, "memory_bus_width", 0))
        return GpuProperties(
            found.name,
            found.total_memory,
            (found.major, found.minor),
            found.multi_processor_count,
            clock_hz or CLOCK_HZ,
            memory_hz * TRANSFERS_PER_CLOCK * bus_bits / 8 or MEMORY_BYTES_PER_S,
        )

    def forbid_tf32(self) -> None:
        super().forbid_tf32()
        torch.backends.cudnn.allow_tf32 = False  # convolutions, allowed unless told otherwise

    @contextlib.contextmanager
    def tf32(self, is_allowed: bool) -> Iterator[None]:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = is_allowed
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before


class RocmDevice(CudaDevice):
    """A GPU of AMD. torch calls it `cuda`, too, and RCCL `nccl`; what differs is around it."""

    @staticmethod
    def count() -> int:
        is_there = torch.cuda.is_available() and torch.version.hip is not None
        return torch.cuda.device_count() if is_there else 0

    @property
    def num_queues(self) -> int | None:
        return int(os.environ.get(ROCM_MAX_QUEUES, ROCM_NUM_QUEUES))

    @property
    def has_tf32(self) -> bool:
        """Capabilities count otherwise here. Its xf32 is off unless hipBLASLt is told so."""
        return os.environ.get(ROCM_ALLOWS_TF32) == "1"


class XpuDevice(Accelerator):
    """A GPU of Intel behind torch's `xpu` module, with oneCCL between processes. Never tried."""

    type = "xpu"
    backend = XCCL

    @staticmethod
    def count() -> int:
        return torch.xpu.device_count() if torch.xpu.is_available() else 0

    def gpu_properties(self) -> GpuProperties | None:
        found = torch.xpu.get_device_properties(self.name)
        units = int(getattr(found, "max_compute_units", 1))
        return GpuProperties(found.name, found.total_memory, NO_CAPABILITY, units)


ACCELERATORS: list[type[LocalDevice]] = [CudaDevice, RocmDevice, XpuDevice]
"""kinds of accelerator, in the order in which `auto` looks for them"""


def device_types() -> list[str]:
    """What "device" in a config may be."""
    return list(dict.fromkeys(["auto", LocalDevice.type, *(kind.type for kind in ACCELERATORS)]))


def device_of(device: torch.device) -> LocalDevice:
    """The interface of a tensor's device."""
    kinds = [kind for kind in ACCELERATORS if kind.type == device.type]
    for kind in kinds:
        if kind.count() > 0:
            return kind(device.index)
    return kinds[0](device.index) if kinds else LocalDevice()


def find_device(wanted: str = "auto", index: int = 0) -> LocalDevice:
    """The device of this process: of the type that is wanted, or with `auto` an accelerator where
    there is one.

    `index`: this process's number on its host. A launcher may show every process all accelerators
    of the host, or each only its own; the index counts among those that it sees. Raises where the
    wanted type is not there.
    """
    kinds = [kind for kind in ACCELERATORS if wanted in ("auto", kind.type)]
    for kind in kinds:
        if kind.count() > 0:
            return kind(index % kind.count())
    if wanted not in ("auto", LocalDevice.type):
        raise ValueError(
            f'"device": "{wanted}" was asked for, but torch sees no {wanted.upper()} device here'
        )
    return LocalDevice()


def used_accelerator() -> LocalDevice | None:
    """The accelerator that this process has begun to use: the current one; None before the first
    use, and on CPUs.
    """
    for kind in ACCELERATORS:
        module = getattr(torch, kind.type)
        if kind.count() > 0 and module.is_initialized():
            return kind(module.current_device())
    return None


def num_accelerators() -> int:
    """Number of accelerators that this process sees; 0 where there is only the CPU."""
    return max((kind.count() for kind in ACCELERATORS), default=0)


def hide_accelerators() -> None:
    """Processes that are started from here on see only the CPU."""
    for variable in VISIBLE_DEVICES:
        os.environ[variable] = ""


def host_memory_bytes() -> int:
    """Physical memory of this host, within the limit of its container."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as file:
                memory = min(memory, int(file.read()))  # `max`: no limit
        except (OSError, ValueError):
            continue
    return memory
