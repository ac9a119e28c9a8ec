"""Activations that live elsewhere between a forward and its backward (docs/memory.md).

What autograd saves of a micro-batch in a stage is caught by hooks, storage by storage: a tensor and
its views go out once. Storages are put one behind the other into segments. A segment goes out when
the one behind it is full, and what is left goes out at the end of the forward, unless its backward
is the next thing that this rank computes. In backward the segment that a node asks for is brought,
and the one that is asked for next (the one before it, or the last one of the micro-batch that the
schedule takes next) is on its way meanwhile.

Weights, buffers, the batch and what a stage received stay: they are here anyway. Segments come into
buffers of their own, not into slots: autograd, and weight gradients that are put off, hold what
they got for as long as they want.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from whale.devices import LocalDevice
from whale.distributed.intervals import Transfer
from whale.plans.away import SEGMENT_BYTES
from whale.plans.blocks import Memory
from whale.runtime.homes import HostHome, aligned, storage_bytes, tensor_in
from whale.runtime.job import Job
from whale.scheduling import Action, Kind

Visit = tuple[int, int]
"""(stage, micro-batch)"""
SMALL_BYTES = 1024
"""storages below this stay: a copy costs more than the memory is worth"""


@dataclass
class _Storage:
    """A storage that goes out with its segment."""

    data: Tensor
    """its bytes"""
    start: int
    """byte of the segment at which it lies"""
    witness: Tensor
    """a tensor in it, and the version that this had when it was saved"""
    version: int


@dataclass(eq=False)
class _Segment:
    """Storages that go out and come back together."""

    home: HostHome
    storages: dict[int, _Storage] | None = field(default_factory=dict)
    """by address, until it goes out"""
    num_bytes: int = 0
    num_waiting: int = 0
    """saved tensors in it that backward has not asked for yet"""
    block: int | None = None
    """number of the block at home, when it is out"""
    buffer: Tensor | None = None
    arriving: Transfer | None = None

    def is_open_with(self, address: int) -> bool:
        """Whether it holds the storage at this address and has not gone out."""
        return self.storages is not None and address in self.storages


@dataclass(frozen=True, eq=False)
class _Saved:
    """What autograd holds in place of a tensor."""

    segment: _Segment
    address: int
    start: int
    """byte of the segment at which its storage lies"""
    offset_bytes: int
    """of the tensor in its storage"""
    empty: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Activations:
    """What the stages of one rank save."""

    def __init__(
        self,
        home_of_stage: Mapping[int, HostHome],
        device: LocalDevice,
        weights: Iterable[Tensor],
    ) -> None:
        """`home_of_stage`: of stages whose activations go out. `weights`: tensors that stay,
        with everything that lies in their memory.
        """
        self._home_of_stage = home_of_stage
        self._device = device
        self._weights = frozenset(_address(tensor) for tensor in weights)
        self._staying: set[int] = set()
        """addresses of storages that stay in this pass"""
        self._segments: dict[Visit, list[_Segment]] = {}
        self._order: Mapping[Visit, Visit] = {}
        self._direct: Collection[Visit] = ()
        self._free: dict[HostHome, list[int]] = {}
        """numbers of blocks that hold nothing now"""
        self._num_blocks: dict[HostHome, int] = {}
        self._leaving: Transfer | None = None

    def goes_out(self, stage: int) -> bool:
        return stage in self._home_of_stage

    def begin(self, order: BackwardOrder, batch: Iterable[Tensor]) -> None:
        """A pass begins. What one before it left behind (it failed) is forgotten."""
        for visit in list(self._segments):
            self.end_backward(visit)
        self._order = order.following
        self._direct = order.direct
        self._staying = {*self._weights, *(_address(tensor) for tensor in batch)}

    @contextlib.contextmanager
    def saving(self, visit: Visit, received: Iterable[Tensor]) -> Iterator[None]:
        """Takes what autograd saves in the forward of a micro-batch that runs inside. `received`:
        what stays until its backward.
        """
        stays = self._staying.union(_address(tensor) for tensor in received)
        segments: list[_Segment] = []
        self._segments[visit] = segments
        home = self._home_of_stage[visit[0]]

        def pack(tensor: Tensor) -> Any:
            if not _can_go(tensor, self._device) or _address(tensor) in stays:
                return tensor
            return self._pack(tensor, segments, home)

        with saved_tensors_hooks(pack, self._unpack):
            yield
        if visit not in self._direct:
            for segment in segments:
                self._send_out(segment)

    def begin_backward(self, visit: Visit) -> None:
        """The backward of a micro-batch begins: the last segment that went out is the first to be
        brought. Where backward comes right after forward, those behind it are still here and are
        used meanwhile.
        """
        for segment in reversed(self._segments.get(visit, ())):
            if segment.block is not None:
                self._fetch(segment)
                return

    def end_backward(self, visit: Visit) -> None:
        """Nothing of the micro-batch is asked for any more."""
        for segment in self._segments.pop(visit, ()):
            if segment.arriving is not None:
                segment.arriving.cancel()
            if segment.block is not None:
                self._free.setdefault(segment.home, []).append(segment.block)
            segment.arriving = segment.buffer = segment.block = None
            segment.storages = None

    # ---- forward

    def _pack(self, tensor: Tensor, segments: list[_Segment], home: HostHome) -> _Saved:
        address = _address(tensor)
        known = [each for each in segments[-2:] if each.is_open_with(address)]
        segment = known[0] if known else self._open_segment(segments, home)
        assert segment.storages is not None
        if not known:
            data = storage_bytes(tensor)
            storage = _Storage(data, segment.num_bytes, tensor, tensor._version)
            segment.storages[address] = storage
            segment.num_bytes += aligned(data.numel())
        elif segment.storages[address].version != tensor._version:
            raise _changed(tensor)
        segment.num_waiting += 1
        return _Saved(
            segment,
            address,
            segment.storages[address].start,
            int(tensor.storage_offset()) * tensor.element_size(),
            tensor.new_empty(0),
            tuple(tensor.shape),
            tensor.stride(),
        )

    def _open_segment(self, segments: list[_Segment], home: HostHome) -> _Segment:
        """The segment that the next storage goes into."""
        if not segments or segments[-1].num_bytes >= SEGMENT_BYTES:
            segments.append(_Segment(home))
            if len(segments) > 2:
                self._send_out(segments[-3])
        return segments[-1]

    def _send_out(self, segment: _Segment) -> None:
        """A segment goes home. The one before it is there then: no more than one is under way."""
        if not segment.storages:
            return
        if self._leaving is not None:
            self._leaving.wait()
        pieces = []
        for storage in segment.storages.values():
            if storage.witness._version != storage.version:
                raise _changed(storage.witness)
            pieces.append((storage.start, storage.data))
        segment.block = self._new_block(segment.home)
        self._leaving = segment.home.begin_store_pieces(segment.block, pieces, segment.num_bytes)
        segment.storages = None

    def _new_block(self, home: HostHome) -> int:
        free = self._free.setdefault(home, [])
        if free:
            return free.pop()
        number = self._num_blocks.get(home, 0)
        self._num_blocks[home] = number + 1
        return number

    # ---- backward

    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        assert isinstance(saved, _Saved)
        segment = saved.segment
        if segment.storages is not None:  # it never went out
            data = segment.storages[saved.address].data
            return _tensor(saved, data, saved.offset_bytes)
        self._fetch(segment)
        if segment.arriving is not None:
            segment.arriving.wait()
            segment.arriving = None
            self._fetch_following(segment)
        buffer = segment.buffer
        assert buffer is not None
        segment.num_waiting -= 1
        if segment.num_waiting <= 0:  # from here on only those that use it hold it
            segment.buffer = None
        return _tensor(saved, buffer, saved.start + saved.offset_bytes)

    def _fetch(self, segment: _Segment) -> None:
        """Begins to bring a segment, unless it is here or on its way."""
        if segment.block is None or segment.buffer is not None:
            return
        if self._leaving is not None:
            self._leaving.wait()
            self._leaving = None
        segment.buffer = torch.empty(segment.num_bytes, dtype=torch.uint8, device=self._device.name)
        segment.arriving = segment.home.begin_fetch(segment.block, segment.buffer)

    def _fetch_following(self, segment: _Segment) -> None:
        """Begins to bring what is asked for after a segment."""
        for visit, segments in self._segments.items():
            if segment in segments:
                place = segments.index(segment)
                if place:
                    self._fetch(segments[place - 1])
                    return
                following = self._order.get(visit)
                if following is not None and self._segments.get(following):
                    self._fetch(self._segments[following][-1])
                return


@dataclass(frozen=True)
class BackwardOrder:
    """What the schedule says about when activations are used."""

    following: Mapping[Visit, Visit]
    """micro-batch of a stage -> the one whose backward this rank runs next"""
    direct: Collection[Visit]
    """those whose backward comes right after their forward"""

    @staticmethod
    def of(actions: Sequence[Action]) -> BackwardOrder:
        computed: list[tuple[bool, Visit]] = []
        for action in actions:
            if action.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT):
                visit = (action.stage, action.micro_batch)
                computed.append((action.kind is Kind.FORWARD, visit))
        backwards = [visit for is_forward, visit in computed if not is_forward]
        direct = set()
        for (is_forward, visit), (is_next_forward, following) in zip(
            computed, computed[1:], strict=False
        ):
            if is_forward and not is_next_forward and visit == following:
                direct.add(visit)
        return BackwardOrder(dict(zip(backwards, backwards[1:], strict=False)), direct)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _can_go(tensor: Tensor, device: LocalDevice) -> bool:
    """Whether a tensor is plain memory of the device, and enough of it."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type == device.type
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.untyped_storage().nbytes() >= SMALL_BYTES
    )


def _tensor(saved: _Saved, buffer: Tensor, start: int) -> Tensor:
    return tensor_in(buffer, start, saved.empty, saved.shape, saved.strides)


def _changed(tensor: Tensor) -> RuntimeError:
    return RuntimeError(
        f"a tensor of shape {list(tensor.shape)} that backward needs was written to after it was "
        'saved, so that "offload" of activations would take other values. Try: '
        '"offload": {"activations": "device"}'
    )


def offloaded_activations(job: Job) -> Activations | None:
    """What takes out the activations of stages whose plan says so; None: there are none."""
    plan = job.plan.of_rank(job.ranks.rank)
    maker = job.homes("activations")
    homes: dict[int, HostHome] = {}
    for stage in plan.stages_of_rank(job.ranks.rank):
        memory: Memory = plan.stages[stage].activations
        if memory != "device":
            homes[stage] = maker.home(memory)
    if not homes:
        return None
    if job.config.compile:
        raise ValueError(
            f'"compile": {job.config.compile!r} and "offload" of activations cannot both be set: '
            "compiled code chooses by itself what it saves. "
            'Try: "compile": false, or "offload": {"activations": "device"}'
        )
    weights = [*job.weights.values(), *job.prepared.captured.constants.values()]
    if job.zero is not None:
        weights += job.zero.computing.values()
    return Activations(homes, job.ranks.device, weights)
