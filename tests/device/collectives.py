"""Process group `testccl` for the test device, with the rules of NCCL. Data travels through gloo.

order       a communicator runs operations in the order of their calls; tags mean nothing. The
            k-th send to a rank meets the k-th receive from this one. Where both ends do not
            fit (kind, size, dtype) it raises: NCCL would hang or mix the data up
streams     messages and collectives with async_op=True run on the communicator's own stream,
            which waits for the current one; others on the current stream. `work.wait()` makes
            the current stream wait, never the host
rendezvous  a send is over when its receive runs: unlike orders on two ranks hang
types       those of NCCL: no int16, no complex
splitting   a communicator is split off that of all ranks, on which nothing may be under way:
            what the host has not waited for is an error
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.device import streams
from tests.device.backend import install
from tests.device.memory import NAME, bytes_of, is_on_device, launch
from tests.device.streams import (
    DeviceError,
    Event,
    Stream,
    current_stream,
    on_stream,
    raise_stream_error,
)

BACKEND = "testccl"
DTYPES = [
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.bool,
    torch.bfloat16,
]
KINDS = [
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "barrier",
]
FLUSH_S = 20.0
"""seconds that the end of a process waits for what was issued"""
communicators: list[TestGroup] = []
"""all that this process is a member of and has used"""


class TestWork(dist.Work):
    """An operation of a communicator. It keeps its tensors until it is waited for."""

    __test__ = False  # no test case of pytest

    def __init__(self, end: Event, stream: Stream, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._end = end
        self._stream = stream
        self._tensors: Sequence[Tensor] = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._stream is not current_stream():
            current_stream().wait_event(self._end)
        self._tensors = ()
        raise_stream_error()
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        return self._end._done.is_set()

    def is_success(self) -> bool:
        return self._end._done.is_set() and not streams.errors

    def __del__(self) -> None:
        # nobody waits: NCCL's watchdog keeps the tensors until the operation is over
        if self._tensors and not self._end._done.is_set():
            _never_waited_for.append((self._end, self._tensors))


_never_waited_for: list[tuple[Event, Sequence[Tensor]]] = []


class TestGroup(dist.ProcessGroup):
    """One communicator."""

    __test__ = False
    supports_splitting = False

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        _check_that_nothing_is_under_way()
        self._last: tuple[str, int, int] | None = None
        """of the operations that were launched: name, stream, number on it"""
        self._own_rank = rank
        self._own_size = size
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._stream: Stream | None = None
        self._num_calls = 0
        self._num_over = 0
        self._turns = threading.Condition()
        self._num_sent: Counter[int] = Counter()
        self._num_received: Counter[int] = Counter()
        communicators.append(self)

    is_aborted = False

    def abort(self) -> None:
        """What is under way is given up; nobody waits for it."""
        self.is_aborted = True

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(NAME)]

    def _get_backend(self, device: torch.device) -> TestGroup:
        return self

    # ---- launching

    def _launch(
        self,
        what: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        run: Callable[[], object],
        is_async: bool,
    ) -> TestWork:
        """Queues `run` behind all earlier operations of this communicator."""
        for tensor in (*reads, *writes):
            self._check(what, tensor)
        stream = self._own_stream() if is_async else current_stream()
        if stream is not current_stream():
            stream.wait_event(current_stream().record_event())
        number = self._num_calls
        self._num_calls += 1

        def work() -> None:
            with self._turns:
                self._turns.wait_for(lambda: self._num_over == number)
            try:
                run()
            finally:
                with self._turns:
                    self._num_over += 1
                    self._turns.notify_all()

        with on_stream(stream):
            launch(f"{BACKEND} {what}", work, reads, writes)
        self._last = (what, stream.id, stream.clock[stream.id])
        return TestWork(stream.record_event(), stream, (*reads, *writes))

    def _own_stream(self) -> Stream:
        if self._stream is None:
            number = len(communicators)
            self._stream = Stream(what=f"communicator {number} of {self._own_size} ranks")
        return self._stream

    def _check(self, what: str, tensor: Tensor) -> None:
        if not is_on_device(tensor):
            raise RuntimeError(f"{BACKEND}: {what}: no backend for tensors on {tensor.device}")
        if tensor.dtype not in DTYPES:
            raise RuntimeError(f"{BACKEND}: {what}: unsupported data type {tensor.dtype}")
        if tensor.is_conj() or tensor.is_neg():
            raise ValueError(f"{BACKEND}: {what}: the memory of a view does not hold its values")
        if not tensor.is_contiguous():
            raise ValueError(f"{BACKEND}: {what}: tensors must be contiguous")

    def _meet(self, kind: str, numel: int, dtype: torch.dtype, number: int) -> None:
        """Raises unless all ranks call the same collective at this place of their order."""
        own = torch.tensor([KINDS.index(kind), numel, DTYPES.index(dtype)])
        found = [torch.zeros_like(own) for _ in range(self._own_size)]
        self._gloo.allgather([found], [own]).wait()
        for rank, other in enumerate(found):
            if not torch.equal(other, own):
                other_kind, other_numel, other_dtype = other.tolist()
                raise RuntimeError(
                    f"{BACKEND}: call {number} of a communicator is {kind} of {numel} {dtype} on "
                    f"its rank {self._own_rank} and {KINDS[other_kind]} of {other_numel} "
                    f"{DTYPES[other_dtype]} on its rank {rank}: NCCL would hang or mix them up"
                )

    # ---- collectives

    def allreduce(self, tensors: Any, opts: Any = None) -> TestWork:
        opts = opts or dist.AllreduceOptions()
        (tensor,) = tensors
        values = bytes_of(tensor)
        number = self._num_calls

        def run() -> None:
            self._meet("all_reduce", values.numel(), values.dtype, number)
            self._gloo.allreduce([values], opts).wait()

        return self._launch("all_reduce", [], [tensor], run, opts.asyncOp)

    def reduce(self, tensors: Any, opts: Any) -> TestWork:
        (tensor,) = tensors
        values = bytes_of(tensor)
        number = self._num_calls

        def run() -> None:
            self._meet("reduce", values.numel(), values.dtype, number)
            self._gloo.reduce([values], opts).wait()

        return self._launch("reduce", [], [tensor], run, opts.asyncOp)

    def broadcast(self, tensors: Any, opts: Any) -> TestWork:
        (tensor,) = tensors
        values = bytes_of(tensor)
        number = self._num_calls

        def run() -> None:
            self._meet("broadcast", values.numel(), values.dtype, number)
            self._gloo.broadcast([values], opts).wait()

        is_source = opts.rootRank == self._own_rank
        reads = [tensor] if is_source else []
        writes = [] if is_source else [tensor]
        return self._launch("broadcast", reads, writes, run, opts.asyncOp)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> TestWork:
        opts = opts or dist.AllgatherOptions()
        (found,) = outputs
        (tensor,) = inputs
        values = bytes_of(tensor)
        targets = [bytes_of(each) for each in found]
        number = self._num_calls

        def run() -> None:
            self._meet("all_gather", values.numel(), values.dtype, number)
            self._gloo.allgather([targets], [values]).wait()

        return self._launch("all_gather", [tensor], list(found), run, opts.asyncOp)

    def all_gather_single(self, output: Any, tensor: Any, opts: Any = None) -> TestWork:
        opts = opts or dist.AllgatherOptions()
        values = bytes_of(tensor).reshape(-1)
        target = bytes_of(output).view(-1)
        number = self._num_calls
        if target.numel() != values.numel() * self._own_size:
            raise ValueError("output tensor size must be world_size times input tensor size")

        def run() -> None:
            self._meet("all_gather", values.numel(), values.dtype, number)
            if values.numel():
                parts = list(target.split(values.numel()))
                self._gloo.allgather([parts], [values]).wait()

        return self._launch("all_gather", [tensor], [output], run, opts.asyncOp)

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any = None) -> TestWork:
        opts = opts or dist.ReduceScatterOptions()
        values = bytes_of(tensor).reshape(-1)
        target = bytes_of(output).view(-1)
        number = self._num_calls
        if values.numel() != target.numel() * self._own_size:
            raise ValueError("input tensor size must be world_size times output tensor size")

        def run() -> None:
            self._meet("reduce_scatter", values.numel(), values.dtype, number)
            total = values.clone()
            self._gloo.allreduce([total]).wait()
            target.copy_(total.view(self._own_size, -1)[self._own_rank])

        return self._launch("reduce_scatter", [tensor], [output], run, opts.asyncOp)

    _reduce_scatter_base = reduce_scatter_single

    def all_to_all_single(
        self, output: Any, tensor: Any, received: Any, sent: Any, opts: Any = None
    ) -> TestWork:
        opts = opts or dist.AllToAllOptions()
        values = bytes_of(tensor)
        target = bytes_of(output)
        number = self._num_calls

        def run() -> None:
            self._meet("all_to_all", 0, values.dtype, number)  # sizes differ between ranks
            self._gloo.alltoall_base(target, values, list(received), list(sent)).wait()

        return self._launch("all_to_all", [tensor], [output], run, opts.asyncOp)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> TestWork:
        number = self._num_calls

        def run() -> None:
            self._meet("barrier", 0, torch.uint8, number)

        work = self._launch("barrier", [], [], run, False)
        streams.host_waits("barrier")
        return work

    # ---- messages: a header, an answer that the receive runs, the data

    def send(self, tensors: Any, peer: int, tag: int = 0) -> TestWork:
        (tensor,) = tensors
        values = bytes_of(tensor).reshape(-1)
        number = self._num_sent[peer]
        self._num_sent[peer] += 1

        def run() -> None:
            header = torch.tensor([values.numel(), DTYPES.index(values.dtype)])
            self._gloo.send([header], peer, _header_tag(number)).wait()
            answer = torch.zeros(1, dtype=torch.uint8)
            self._gloo.recv([answer], peer, _answer_tag(number)).wait()
            if values.numel():
                self._gloo.send([values], peer, _data_tag(number)).wait()

        return self._launch(f"send {number} to {peer}", [tensor], [], run, True)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> TestWork:
        (tensor,) = tensors
        target = bytes_of(tensor).view(-1)
        number = self._num_received[peer]
        self._num_received[peer] += 1

        def run() -> None:
            header = torch.zeros(2, dtype=torch.int64)
            self._gloo.recv([header], peer, _header_tag(number)).wait()
            if header.tolist() != [target.numel(), DTYPES.index(target.dtype)]:
                raise RuntimeError(
                    f"{BACKEND}: message {number} from rank {peer} has {header[0]} "
                    f"{DTYPES[int(header[1])]}, its receive {target.numel()} {target.dtype}: NCCL "
                    f"would hang or cut it off"
                )
            answer = torch.zeros(1, dtype=torch.uint8)
            self._gloo.send([answer], peer, _answer_tag(number)).wait()
            if target.numel():
                self._gloo.recv([target], peer, _data_tag(number)).wait()

        return self._launch(f"receive {number} from {peer}", [], [tensor], run, True)


def _check_that_nothing_is_under_way() -> None:
    """Raises where a communicator is made while that of all ranks may be at work."""
    if not communicators or communicators[0].size() != dist.get_world_size():
        return  # it is the first, or the group of all ranks is another backend's
    last = communicators[0]._last
    if last is None:
        return
    what, stream, number = last
    if streams.known_over.get(stream, 0) < number:
        raise DeviceError(
            f"{BACKEND}: a communicator is made while {what} of the group of all ranks may still be "
            "under way: NCCL may deadlock when it is split. Try: wait for the device before"
        )


def _header_tag(number: int) -> int:
    return 4 * number


def _data_tag(number: int) -> int:
    return 4 * number + 1


def _answer_tag(number: int) -> int:
    return 4 * number + 2


def _finish_all() -> None:
    """What `destroy_process_group` does with NCCL: all that was issued runs first. Unless it was
    aborted: the process of a rank that failed ends then with its streams, as with those of a driver.
    A thread of Python that waits in gloo cannot be ended otherwise, and may abort the interpreter.
    """
    if any(group.is_aborted for group in communicators):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    for stream in streams.all_streams:
        if not stream.record_event()._done.wait(FLUSH_S):
            print(f"{BACKEND}: something never finished: {streams.describe_streams()}", flush=True)
            return


def _new_group(store: Any, rank: int, size: int, timeout: timedelta) -> TestGroup:
    return TestGroup(store, rank, size, timeout)


def install_collectives() -> None:
    """Makes device `testgpu` and backend `testccl` known to torch in this process."""
    install()
    if BACKEND not in dist.Backend.backend_list:
        atexit.register(_finish_all)
        dist.Backend.register_backend(BACKEND, _new_group, devices=[NAME])
