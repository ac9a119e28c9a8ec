"""This process among the others: rank, device, process groups, and agreement between ranks."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from whale.compat import abort_process_groups
from whale.devices import GLOO, HOST, Backend, LocalDevice, backend_of, find_device
from whale.distributed.calls import Meets
from whale.distributed.host_group import register_host_groups
from whale.distributed.watch import Watch, start_watch
from whale.error_reports import FailedElsewhereError
from whale.names import listed

LATER_THAN_THE_WATCH = datetime.timedelta(seconds=60)
_joins = itertools.count()
SHOWN_RANKS = 4
"""whose values are written out when they differ"""


class Ranks:
    """Who this process is. One process without a launcher is rank 0 of 1 and has no
    process group.
    """

    def __init__(
        self, device: str = "auto", timeout_s: float = 20.0, stall_timeout_s: float = 1800.0
    ) -> None:
        self.device = find_device(device, int(os.environ.get("LOCAL_RANK", "0")))
        _check_kernels(self.device)
        self.device.select()
        self.timeout = datetime.timedelta(seconds=stall_timeout_s)
        self.timeout_s = timeout_s
        self.watch: Watch | None = None
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
            _join(self.device, self.timeout)
            # an all-reduce still on its way at exit would abort the process
            atexit.register(_leave)
        self.is_distributed = dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if self.is_distributed else 0
        self.num_ranks = dist.get_world_size() if self.is_distributed else 1
        self.backends: list[Backend] = self.gather(self.device.backend)
        """of each rank's device"""
        self.backend = self.backend_among(range(self.num_ranks))
        """that all ranks have"""
        self._groups: dict[tuple[tuple[int, ...], str], dist.ProcessGroup | None] = {}
        self.world = self._world()
        """the group that carries tensors of all ranks, each from its own device"""

    def start_watch(self) -> None:
        """Starts the watch: a rank that dies or hangs ends the job everywhere. Called by all."""
        if self.is_distributed and self.watch is None:
            self.watch = start_watch(
                self.rank,
                self.num_ranks,
                self.timeout_s,
                self.from_first,
                self.timeout.total_seconds(),
            )

    def note_call(self, name: str, meets: Meets = Meets.ALWAYS) -> None:
        """This rank calls a method of the engine that all ranks must call; where another does not,
        the job ends with a message that says so. `meets`: whether this waits for the others.
        """
        if self.watch is not None:
            self.watch.note_call(name, meets)

    def backend_among(self, ranks: Iterable[int]) -> Backend:
        """What carries tensors between these ranks: the backend that all their devices have, or
        host memory where they have different ones.
        """
        found = {self.backends[rank] for rank in ranks}
        return found.pop() if len(found) == 1 else HOST

    @property
    def is_mixed(self) -> bool:
        """Whether the ranks have devices with different backends."""
        return len(set(self.backends)) > 1

    @property
    def needs_channels(self) -> bool:
        """Whether messages between some two ranks are matched by order, so that these need
        communicators of their own.
        """
        by_order = [backend for backend in self.backends if not backend.has_tags]
        return len(by_order) > len(set(by_order))

    def _world(self) -> dist.ProcessGroup | None:
        if not self.is_distributed:
            return None
        if self.is_mixed:
            register_host_groups()
        if backend_of(None).name == self.backend.name:
            return dist.group.WORLD
        # of a job with different devices, or one that the user's script started with another
        # backend
        return self.new_group(range(self.num_ranks))

    def new_group(self, ranks: Iterable[int]) -> dist.ProcessGroup | None:
        """A process group of these ranks, in this order, with the backend that they have in common.
        All ranks call it.
        """
        members = list(ranks)
        backend = self.backend_among(members)
        # a backend of accelerators ends the process without a word when its time is over: the watch
        # comes first and says which rank stood where
        longer = datetime.timedelta() if backend.has_tags else LATER_THAN_THE_WATCH
        timeout = self.timeout + longer
        if not backend.has_tags:
            # it is split off the group of all ranks, on which nothing may be under way. The groups
            # and channels of a plan are made before its first step, so that no step waits here
            self.device.synchronise()
        return dist.new_group(members, timeout=timeout, backend=backend.name, sort_ranks=False)

    def group(self, ranks: Sequence[int], purpose: str = "") -> dist.ProcessGroup | None:
        """The process group of these ranks, in this order. Every rank must ask for the same groups
        in the same order.

        Messages of groups with another `purpose` never meet, even between the same ranks.
        """
        key = (tuple(ranks), purpose)
        if key not in self._groups:
            whole_world = not purpose and key[0] == tuple(range(self.num_ranks))
            self._groups[key] = self.world if whole_world else self._connected(key[0])
        return self._groups[key]

    def _connected(self, members: tuple[int, ...]) -> dist.ProcessGroup | None:
        """A new group whose members have met.

        Without tags, ranks connect at the first collective of a group and block their hosts until
        all have called it. That happens here, in an order that is the same on all ranks: inside a
        step one rank could wait for another whose launches are stuck behind a message of the first.
        """
        group = self.new_group(members)
        if self.rank in members and not self.backend_among(members).has_tags:
            dist.all_reduce(torch.zeros(1, device=self.device.name), group=group)
            self.device.synchronise()
        return group

    @cached_property
    def generators(self) -> list[str]:
        """What random numbers depend on, by rank (`LocalDevice.generator`). All ranks must ask for
        it the first time together.
        """
        return self.gather(self.device.generator)

    def gather(self, value: Any) -> list[Any]:
        """Everyone's value, on every rank. For small things at set-up."""
        if not self.is_distributed:
            return [value]
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value)
        return values

    def from_first(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if not self.is_distributed:
            return value
        holder = [value if self.rank == 0 else None]
        dist.broadcast_object_list(holder, src=0)
        return holder[0]

    def agree(self, what: str, value: Any, advice: str) -> None:
        """Raises on every rank, naming those that differ from rank 0."""
        values = self.gather(value)
        different = [rank for rank, other in enumerate(values) if other != values[0]]
        if different:
            raise ValueError(
                f"{what} differs between ranks: rank 0 has {values[0]!r}, "
                f"{_named(different, values)}. {advice}"
            )

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What stands inside may fail on some ranks only; afterwards all ranks raise: those that
        failed their own error, the others one that names the first of them.

        All ranks must enter it. It ends with a collective, so nothing inside may wait for another
        rank that could have failed before.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as problem:
            error = problem
        errors = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, text in enumerate(errors):
            if text is not None:
                raise FailedElsewhereError.of(rank, text)


def _check_kernels(device: LocalDevice) -> None:
    """Refuses a device on which every operation would fail, before any rank waits for it."""
    reason = device.why_no_kernels()
    if reason is not None:
        raise ValueError(f"{device.name} cannot be used: {reason}, or hide it from this job")


def _join(device: LocalDevice, timeout: datetime.timedelta) -> None:
    """Makes the group of all ranks, with the backend of their devices; gloo where these differ,
    which every rank has.
    """
    if not device.backend.has_tags:
        timeout = timeout + LATER_THAN_THE_WATCH
    store, rank, num_ranks = next(dist.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    # the store may outlive a group that was destroyed; all ranks join equally often
    prefix = f"whale/{next(_joins)}"
    kind = f"{prefix}/{device.backend}"
    store.add(kind, 1)
    if device.identity is not None:
        note_device(store, prefix, rank, device.identity)
    if store.add(f"{prefix}/arrived", 1) == num_ranks:
        store.set(f"{prefix}/all arrived", "")
    store.wait([f"{prefix}/all arrived"])
    refuse_shared_devices(store, prefix)
    is_alike = store.add(kind, 0) == num_ranks
    dist.init_process_group(
        device.backend.name if is_alike else GLOO.name,
        store=dist.PrefixStore("default_pg", store),
        rank=rank,
        world_size=num_ranks,
        timeout=timeout,
        device_id=device.bound_device if is_alike else None,
    )


def note_device(store: dist.Store, prefix: str, rank: int, identity: str) -> None:
    """Leaves word of this rank's accelerator, and of another rank that has the same."""
    first = f"{prefix}/first on {identity}"
    if store.add(f"{prefix}/on {identity}", 1) == 1:
        store.set(first, str(rank))
        return
    other = store.get(first).decode()
    store.set(f"{prefix}/shared", f"ranks {other} and {rank} have the same device ({identity})")


def refuse_shared_devices(store: dist.Store, prefix: str) -> None:
    """Raises on every rank where two of them have one accelerator: their collectives would fail
    without a name, or hang, and each would plan with memory that the other takes.
    """
    shared = f"{prefix}/shared"
    if store.check([shared]):
        raise ValueError(
            f"{store.get(shared).decode()}: a rank needs one of its own. Try: as many processes on "
            "each host as it has devices (--nproc-per-node, whale run -n), and show each process "
            "all devices of its host or only its own"
        )


def _leave() -> None:
    """Leaves the job when the process exits. A script that failed may have left receives whose
    messages never come: their communicators are aborted. Otherwise all that was issued runs first.
    """
    if not dist.is_initialized():
        return
    has_failed = getattr(sys, "last_value", None) is not None
    if has_failed and not backend_of(None).has_tags:
        abort_process_groups()
    else:
        dist.destroy_process_group()


def _named(ranks: Sequence[int], values: Sequence[Any]) -> str:
    return listed([f"rank {rank} has {values[rank]!r}" for rank in ranks], SHOWN_RANKS)
