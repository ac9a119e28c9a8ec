"""A process group whose members share no transport for device memory: GPUs of two vendors, or GPUs
and CPUs. Tensors travel through host memory, by gloo.

    send, collective   the tensor is copied to pinned memory on a stream of its own; a thread hands
                       the copy to gloo when it is there. The host does not wait
    receive            gloo is asked at once, into pinned memory
    `work.wait()`      the host waits for gloo, as a CPU rank does; what came is copied to the
                       device on the current stream

All that a process gives to gloo in such groups goes through one thread in the order of its calls,
so that collectives keep their order. Tensors of CPU ranks are handed over as they are. Messages
have tags, as those of gloo.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from whale.devices import ACCELERATORS, HOST, HostCopy, LocalDevice, Moment, device_of

Host = Callable[[Tensor], Tensor]
"""gives the host memory that stands for a tensor"""


class HostWork(dist.Work):
    """An operation on its way through host memory. It keeps its tensors until it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[HostCopy, Tensor]] = []
        """tensors of the device that are being copied to the host"""
        self.writes: list[tuple[Tensor, Tensor]] = []
        """(tensor of the device, its host memory) to be filled at the end"""
        self._device: LocalDevice | None = None
        self._filled: Moment | None = None
        """when the tensors of the device have what came"""
        self._issued = threading.Event()
        self._work: dist.Work | None = None
        self._error: Exception | None = None

    def issue(self, call: Callable[[], dist.Work]) -> None:
        """Hands it over to gloo; runs in the thread that does so."""
        try:
            for copy, _ in self.reads:
                copy.read()
            self._work = call()
        except Exception as error:  # raised where it is waited for
            self._error = error
        self._issued.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._issued.wait()
        if self._error is not None:
            raise self._error
        if self._work is not None:
            self._work.wait() if timeout is None else self._work.wait(timeout)
            self._work = None
        for copy, tensor in self.reads:  # whoever overwrites the tensor comes after its copy
            device_of(tensor.device).follow(copy.moment)
        for tensor, host in self.writes:
            self._device = device_of(tensor.device)
            tensor.copy_(host, non_blocking=True)
        if self.writes and self._device is not None:
            self._filled = self._device.event()
        elif self._device is not None:  # waited for again, perhaps on another stream
            self._device.follow(self._filled)
        self.reads = []
        self.writes = []
        return True

    def is_completed(self) -> bool:
        if not self._issued.is_set():
            return False
        return self._work is None or self._work.is_completed()

    def is_success(self) -> bool:
        return self._error is None and self.is_completed()


class _Departures:
    """The thread that waits for copies and hands them to gloo, in order."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[HostWork, Callable[[], dist.Work]]] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._run, name="whale-departures", daemon=True).start()

    def put(self, work: HostWork, call: Callable[[], dist.Work]) -> None:
        self._waiting.put((work, call))

    def _run(self) -> None:
        while True:
            work, call = self._waiting.get()
            work.issue(call)
            del work, call  # tensors must not live until the next one comes


_departures: list[_Departures] = []


def _hand_over(work: HostWork, call: Callable[[], dist.Work]) -> None:
    if not _departures:
        _departures.append(_Departures())
    _departures[0].put(work, call)


class HostGroup(dist.ProcessGroup):
    """One rank's side of such a group."""

    supports_splitting = False

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        # its methods are missing in the types of torch
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

    def getBackendName(self) -> str:
        return HOST.name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]  # objects are sent from there

    def _get_backend(self, device: torch.device) -> HostGroup:  # type: ignore[override]
        return self

    def _run(
        self, reads: Sequence[Tensor], writes: Sequence[Tensor], call: Callable[[Host], dist.Work]
    ) -> dist.Work:
        """Calls gloo with host memory in place of the tensors; `writes` get what it gives."""
        is_on_device = any(tensor.device.type != "cpu" for tensor in (*reads, *writes))
        if not is_on_device and not _departures:
            return call(lambda tensor: tensor)
        work = HostWork()
        hosts: dict[int, Tensor] = {}
        for tensor in reads:
            if tensor.device.type != "cpu":
                device = device_of(tensor.device)
                with device.beside():
                    copy = device.to_host(tensor)
                hosts[id(tensor)] = copy.tensor
                work.reads.append((copy, tensor))
        for tensor in writes:
            if tensor.device.type != "cpu":
                if id(tensor) not in hosts:
                    device = device_of(tensor.device)
                    hosts[id(tensor)] = device.empty_on_host(tensor.shape, tensor.dtype)
                work.writes.append((tensor, hosts[id(tensor)]))
        _hand_over(work, lambda: call(lambda tensor: hosts.get(id(tensor), tensor)))
        return work

    # ---- collectives

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        opts = opts or dist.AllreduceOptions()
        (tensor,) = tensors
        return self._run(
            [tensor], [tensor], lambda host: self._gloo.allreduce([host(tensor)], opts)
        )

    def broadcast(self, tensors: Any, opts: Any) -> dist.Work:  # type: ignore[override]
        (tensor,) = tensors
        is_source = opts.rootRank == self.rank()
        reads = [tensor] if is_source else []
        writes = [] if is_source else [tensor]
        return self._run(reads, writes, lambda host: self._gloo.broadcast([host(tensor)], opts))

    def reduce(self, tensors: Any, opts: Any) -> dist.Work:  # type: ignore[override]
        (tensor,) = tensors
        # what others have afterwards is undefined, as everywhere
        return self._run([tensor], [tensor], lambda host: self._gloo.reduce([host(tensor)], opts))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        (found,) = outputs
        (tensor,) = inputs

        def call(host: Host) -> dist.Work:
            return self._gloo.allgather([[host(each) for each in found]], [host(tensor)])

        return self._run([tensor], found, call)

    def all_to_all_single(
        self, output: Any, tensor: Any, received: Any, sent: Any, opts: Any = None
    ) -> dist.Work:
        def call(host: Host) -> dist.Work:
            return self._gloo.alltoall_base(host(output), host(tensor), list(received), list(sent))

        return self._run([tensor], [output], call)

    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._run([], [], lambda host: self._gloo.barrier())

    # ---- messages

    def send(self, tensors: Any, peer: int, tag: int = 0) -> dist.Work:
        (tensor,) = tensors
        return self._run([tensor], [], lambda host: self._gloo.send([host(tensor)], peer, tag))

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> dist.Work:
        (tensor,) = tensors
        if tensor.device.type == "cpu":
            return self._gloo.recv([tensor], peer, tag)
        work = HostWork()
        host = device_of(tensor.device).empty_on_host(tensor.shape, tensor.dtype)
        work.writes.append((tensor, host))
        work.issue(lambda: self._gloo.recv([host], peer, tag))  # matched by tag: order is nothing
        return work


def _new_group(store: Any, rank: int, size: int, timeout: timedelta) -> HostGroup:
    return HostGroup(store, rank, size, timeout)


def register_host_groups() -> None:
    """Makes the backend known to torch in this process."""
    if HOST.name not in dist.Backend.backend_list:
        types = [LocalDevice.type, *dict.fromkeys(kind.type for kind in ACCELERATORS)]
        dist.Backend.register_backend(HOST.name, _new_group, devices=types)
