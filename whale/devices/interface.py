"""The interface of a device. `LocalDevice` is the CPU, `Accelerator` what GPUs have in common."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from whale.devices.backends import GLOO, Backend
from whale.devices.copies import DeviceCopy, HostCopy, rows_of
from whale.units import MILLISECONDS

CLOCK_HZ = 1.4e9
MEMORY_BYTES_PER_S = 300e9
"""where the driver does not say: the low end of today's GPUs"""
FIRST_WITH_TF32 = (8, 0)
"""compute capability of the first GPUs that have it (Ampere)"""
Moment = Any
"""a point in the work of a device: seconds of the host on a CPU, an event of an accelerator"""


@dataclass(frozen=True)
class GpuProperties:
    """What the driver says about a GPU."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    num_multiprocessors: int
    clock_hz: float = CLOCK_HZ
    memory_bytes_per_s: float = MEMORY_BYTES_PER_S


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

    queues_variable: ClassVar[str] = ""
    """environment variable with the number of hardware queues that streams are spread over"""

    @property
    def num_queues(self) -> int | None:
        """Hardware queues that streams share: one that waits blocks what was launched later into
        its queue. None: nothing is shared.
        """
        return None

    loading_at_start: ClassVar[tuple[str, ...]] = ()
    """environment variable, and the value of it, with which all kernels are loaded at the start"""

    @property
    def loads_at_start(self) -> bool:
        """Whether no kernel is loaded when it is first called, which may wait for all that runs."""
        return True

    def facts(self) -> dict[str, str]:
        """What a report about this device says, by its name."""
        return {}

    @staticmethod
    def why_none() -> str | None:
        """Why this process sees none of this type; None: nobody would expect one."""
        return None

    def why_no_kernels(self) -> str | None:
        """Why this build of torch can compute nothing on it, with what to try; None: it can."""
        return None

    @staticmethod
    def begin_replays() -> None:
        """A step begins whose launches are replayed as graphs: tensors of the last step are not
        read any more, and their memory may be written again.
        """
        torch.compiler.cudagraph_mark_step_begin()

    def has_failed(self) -> bool:
        """Whether an error has ended the device's work for good: whatever is asked of it raises."""
        return False

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

    def is_over(self, moment: Moment) -> bool:
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
        return DeviceCopy(rows_of(tensor, intervals).to(self.name))

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

    @contextlib.contextmanager
    def behind(self, moment: Moment) -> Iterator[None]:
        """Work that is launched inside runs after that moment and beside compute, which waits for
        neither.
        """
        yield

    def used_here(self, tensor: Tensor) -> None:
        """The current stream reads a tensor that was made on another one: its memory stays until
        that is done.
        """

    def copy_beside(
        self, copies: Sequence[tuple[Tensor, Tensor]], direction: str, after: Sequence[Moment]
    ) -> Moment:
        """Copies between host and device, each (source, target), beside compute and after these
        moments; gives the moment at which all are over. Copies of one direction (`incoming`,
        `outgoing`) run one after the other.
        """
        with torch.no_grad():
            for source, target in copies:
                target.copy_(source)
        return self.event()

    def to_host(self, tensor: Tensor) -> HostCopy:
        """A copy of the tensor in host memory, on its way: it has the values that all work
        launched so far gives.
        """
        return HostCopy(tensor, self.event(), self)

    def gpu_properties(self) -> GpuProperties | None:
        """What the driver says about it; None for a CPU."""
        return None

    @property
    def identity(self) -> str | None:
        """What no other device has, as its driver says; None for a CPU, which processes share."""
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
        """Makes float32 products and convolutions of this process run in float32 from here on."""
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
    def identity(self) -> str | None:
        found = getattr(self.module.get_device_properties(self.name), "uuid", None)
        return None if found is None else str(found)

    def facts(self) -> dict[str, str]:
        found = {"hardware queues": str(self.num_queues or "not known")}
        peers = []
        for other in range(self.count()):
            if other != self.index and self.reaches(other):
                peers.append(str(other))
        if self.count() > 1:
            found["reads memory of devices"] = ", ".join(peers) or "none"
        return found

    @property
    def loads_at_start(self) -> bool:
        if not self.loading_at_start:
            return False
        variable, value = self.loading_at_start
        return os.environ.get(variable) == value

    def reaches(self, other: int) -> bool:
        """Whether it can read the memory of another device of this host directly."""
        asked = getattr(self.module, "can_device_access_peer", None)
        return asked is not None and bool(asked(self.index, other))

    def has_failed(self) -> bool:
        try:
            self.event().query()
        except RuntimeError:
            return True
        return False

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

    def is_over(self, moment: Moment) -> bool:
        # threads begin with device 0 as their current one, and a query would make a context there
        self.select()
        return bool(moment.query())

    def wait_for(self, moment: Moment) -> None:
        if not self.is_over(moment):
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
        stream.wait_stream(self.module.current_stream(self.name))
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
        """The device's stream for this purpose. The device is named: a thread of the user's, one
        that reads batches ahead, say, begins with device 0 as its current one.
        """
        key = (self.name, purpose)
        if key not in _SIDE_STREAMS:
            _SIDE_STREAMS[key] = self.module.Stream(self.name)
        return _SIDE_STREAMS[key]

    def follow(self, moment: Moment) -> None:
        self.module.current_stream(self.name).wait_event(moment)

    @contextlib.contextmanager
    def behind(self, moment: Moment) -> Iterator[None]:
        stream = self._stream("behind a moment")
        stream.wait_event(moment)
        with self.module.stream(stream):
            yield

    def used_here(self, tensor: Tensor) -> None:
        tensor.record_stream(self.module.current_stream(self.name))

    def copy_beside(
        self, copies: Sequence[tuple[Tensor, Tensor]], direction: str, after: Sequence[Moment]
    ) -> Moment:
        stream = self._stream(f"{direction} blocks")
        with torch.no_grad(), self.module.stream(stream):
            for moment in after:
                stream.wait_event(moment)
            for source, target in copies:
                target.copy_(source, non_blocking=True)
                # whoever drops the device's side early must not get its memory given away
                for tensor in (source, target):
                    if tensor.device.type == self.type:
                        self.used_here(tensor)
            return self.event()

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
