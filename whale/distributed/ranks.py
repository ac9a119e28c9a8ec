"""This process among the others: rank, device, process groups, and agreement between ranks."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from whale.devices import backend_of, find_device
from whale.distributed.watch import Watch, start_watch
from whale.names import listed

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
        self.device.select()
        self.timeout = datetime.timedelta(seconds=stall_timeout_s)
        self.timeout_s = timeout_s
        self.watch: Watch | None = None
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
            dist.init_process_group(
                self.device.backend.name, timeout=self.timeout, device_id=self.device.bound_device
            )
            # an all-reduce still on its way at exit would abort the process
            atexit.register(_leave)
        self.is_distributed = dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if self.is_distributed else 0
        self.num_ranks = dist.get_world_size() if self.is_distributed else 1
        self.backend = backend_of(None) if self.is_distributed else self.device.backend
        self._groups: dict[tuple[tuple[int, ...], str], dist.ProcessGroup | None] = {}

    def start_watch(self) -> None:
        """Starts the watch: a rank that dies or hangs ends the job everywhere. All ranks call it."""
        if self.is_distributed and self.watch is None:
            self.watch = start_watch(self.rank, self.num_ranks, self.timeout_s, self.from_first)

    def group(self, ranks: Sequence[int], purpose: str = "") -> dist.ProcessGroup | None:
        """The process group of these ranks, in this order. Every rank must ask for the same groups
        in the same order.

        Messages of groups with another `purpose` never meet, even between the same ranks.
        """
        key = (tuple(ranks), purpose)
        if key not in self._groups:
            whole_world = not purpose and key[0] == tuple(range(self.num_ranks))
            self._groups[key] = (
                dist.group.WORLD
                if whole_world
                else dist.new_group(list(key[0]), timeout=self.timeout, sort_ranks=False)
            )
        return self._groups[key]

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
                raise ValueError(f"rank {rank} failed while all ranks were preparing: {text}")


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _named(ranks: Sequence[int], values: Sequence[Any]) -> str:
    return listed([f"rank {rank} has {values[rank]!r}" for rank in ranks], SHOWN_RANKS)
