"""Point-to-point messages: posted ahead, never blocking compute, freed when done.

gloo matches messages by tag. NCCL matches by order inside a communicator, so there each directed pair of ranks has its own, and both
sides use it in the order of the sender's program (`scheduling` proves that the receiver's order is the same).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from whale.runtime.ranks import Ranks


class Arrival:
    """A message on its way in."""

    __slots__ = ("buffer", "description", "peer", "work")

    def __init__(self, work: dist.Work, buffer: Tensor, peer: int, description: str) -> None:
        self.work, self.buffer, self.peer, self.description = work, buffer, peer, description


class Transport:
    """Sends and receives of one rank, with the time spent waiting."""

    def __init__(self, ranks: Ranks, pairs: Iterable[tuple[int, int]]) -> None:
        """`pairs`: all (source, destination) ranks of the plan, the same list on every rank."""
        self.ranks = ranks
        self._channels: dict[tuple[int, int], dist.ProcessGroup | None] = {}
        if not ranks.has_channels_by_tag:
            for source, destination in sorted(set(pairs)):
                # one communicator for each direction: a late receive never blocks a send
                self._channels[source, destination] = dist.new_group([source, destination], timeout=ranks.timeout)
                self._open(source, destination)
        self._outgoing: deque[tuple[dist.Work, Tensor]] = deque()
        self.waited_s = 0.0

    def _open(self, source: int, destination: int) -> None:
        """NCCL connects two ranks at their first message and blocks both: done here in one order, never inside a step."""
        greeting = torch.zeros(1, device=self.ranks.device)
        if self.ranks.rank == source:
            dist.send(greeting, destination, group=self._channels[source, destination])
        elif self.ranks.rank == destination:
            dist.recv(greeting, source, group=self._channels[source, destination])

    def send(self, tensor: Tensor, peer: int, tag: int) -> None:
        """Issues the message and returns; the tensor is kept until it has left."""
        group, place = self._channel(self.ranks.rank, peer, peer)
        self._outgoing.append((group.send([tensor], place, tag), tensor))

    def post(self, buffer: Tensor, peer: int, tag: int, description: str) -> Arrival:
        group, place = self._channel(peer, self.ranks.rank, peer)
        return Arrival(group.recv([buffer], place, tag), buffer, peer, description)

    def _channel(self, source: int, destination: int, peer: int) -> tuple[dist.ProcessGroup, int]:
        """The group that carries messages of this pair, and the peer's rank in it."""
        group = self._channels.get((source, destination))
        if group is not None:
            return group, dist.get_group_rank(group, peer)
        assert dist.group.WORLD is not None
        return dist.group.WORLD, peer

    def wait(self, arrival: Arrival) -> None:
        start = time.perf_counter()
        try:
            arrival.work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.ranks.rank} waited {time.perf_counter() - start:.0f} s for {arrival.description} from rank {arrival.peer}: "
                f"that rank is gone or stuck ({str(error).splitlines()[0]})"
            ) from error
        self.waited_s += time.perf_counter() - start

    def retire(self) -> None:
        """Lets go of messages that have left."""
        while self._outgoing and self._outgoing[0][0].is_completed():
            self._outgoing.popleft()

    def drain(self) -> None:
        """End of a step: everything must have left."""
        while self._outgoing:
            work, _ = self._outgoing.popleft()
            work.wait()


def as_message(tensor: Tensor) -> Tensor:
    """Contiguous and without history."""
    return tensor.detach().contiguous()
