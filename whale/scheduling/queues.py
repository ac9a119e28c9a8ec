"""How far ahead receives may be posted where streams share the queues of a device.

A GPU has few hardware queues (`LocalDevice.num_queues`) and many streams. A receive that was
posted is a kernel that spins until its message comes. It blocks nobody by itself, but whatever must
wait for it does, with all that was launched later into the same queue on whatever stream: compute,
and the very sends that the other rank needs before it sends this message.

Which streams share a queue nobody says, so the proof takes the worst: all of them share one. Then
what a rank launches runs in the order of its host, and

    send or receive   begins when the one before it in its channel is over, and blocks until then
    wait              blocks until the receive is over
    a message         is over when its send and its receive have begun

More queues have fewer constraints: what finishes with one queue finishes with any number. Whatever
can begin stays able to, so going round all ranks until nothing moves finds out whether they finish.

A kernel is loaded when it is first called, and its first calls may allocate memory. Both may make
the host wait until the device has done all that it was given ("Lazy Loading" in NVIDIA's
programming guide), posted receives and sends that nobody receives yet among it. So the first pass
over an action list has a window of its own:

    load              blocks until all sends and receives before it are over
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple


class QueuedTransfer(NamedTuple):
    """A send or receive of a rank's action list, with all ranks that it has a message for."""

    is_send: bool
    peers: tuple[int, ...]
    loads: bool = False
    """between the one before it and this one, kernels are called for the first time"""


class LaunchedStep(Enum):
    """What is launched."""

    SEND = auto()
    RECEIVE = auto()
    WAIT = auto()
    LOAD = auto()


class Launch(NamedTuple):
    """Something that a rank puts into its queue."""

    step: LaunchedStep
    peer: int = -1
    number: int = 0
    """of a message that is waited for, counted in its channel"""


def last_posted(num_posted: int, num_received: int, window: int, num_receives: int) -> int:
    """Number of receives that are posted when `num_received` are over or waited for next.

    Several at a time, whenever less than half of the window is posted: each wakes up a thread of
    the sender.
    """
    if num_posted - num_received > window // 2:
        return num_posted
    return max(num_posted, min(num_receives, num_received + window))


def safe_window(
    transfers: Mapping[int, Sequence[QueuedTransfer]], most: int, is_first: bool = False
) -> int | None:
    """Largest number of receives, at most `most`, that every rank may post ahead so that all ranks
    finish with a single queue; None: there is none, 0 included.

    `transfers`: of each rank, the sends and receives in its order; all ranks that talk. `is_first`:
    in the first pass, which loads kernels.
    """
    for window in range(most, -1, -1):
        if finishes({rank: launches(own, window, is_first) for rank, own in transfers.items()}):
            return window
    return None


def launches(
    transfers: Sequence[QueuedTransfer], window: int, is_first: bool = False
) -> list[Launch]:
    """What a rank launches for its sends and receives, as the executor does it."""
    return list(_launches(transfers, window, is_first))


def _launches(transfers: Sequence[QueuedTransfer], window: int, is_first: bool) -> Iterator[Launch]:
    receives = [transfer.peers for transfer in transfers if not transfer.is_send]
    num_posted = 0
    num_received = 0
    of_channel: Counter[int] = Counter()

    def post(num_received: int) -> Iterator[Launch]:
        nonlocal num_posted
        stop = last_posted(num_posted, num_received, window, len(receives))
        for peers in receives[num_posted:stop]:
            yield from (Launch(LaunchedStep.RECEIVE, peer) for peer in peers)
        num_posted = stop

    yield from post(0)
    for is_send, peers, loads in transfers:
        if loads and is_first:
            yield Launch(LaunchedStep.LOAD)
        if is_send:
            yield from (Launch(LaunchedStep.SEND, peer) for peer in peers)
            continue
        num_received += 1
        yield from post(num_received)
        for peer in peers:
            yield Launch(LaunchedStep.WAIT, peer, of_channel[peer])
            of_channel[peer] += 1


def finishes(of_rank: Mapping[int, Sequence[Launch]]) -> bool:
    """Whether every rank gets through its launches with a single queue."""
    sent: Counter[tuple[int, int]] = Counter()
    received: Counter[tuple[int, int]] = Counter()
    places = dict.fromkeys(of_rank, 0)

    def num_over(channel: tuple[int, int]) -> int:
        return min(sent[channel], received[channel])

    def is_through(rank: int) -> bool:
        own_sent = (number <= num_over(each) for each, number in sent.items() if each[0] == rank)
        own_received = (
            number <= num_over(each) for each, number in received.items() if each[1] == rank
        )
        return all(own_sent) and all(own_received)

    def begins(rank: int, launch: Launch) -> bool:
        if launch.step is LaunchedStep.LOAD:
            return is_through(rank)
        outward = (rank, launch.peer)
        inward = (launch.peer, rank)
        if launch.step is LaunchedStep.WAIT:
            return num_over(inward) > launch.number
        begun, channel = (sent, outward) if launch.step is LaunchedStep.SEND else (received, inward)
        if num_over(channel) < begun[channel]:
            return False
        begun[channel] += 1
        return True

    moves = True
    while moves:
        moves = False
        for rank, own in of_rank.items():
            while places[rank] < len(own) and begins(rank, own[places[rank]]):
                places[rank] += 1
                moves = True
    return all(places[rank] == len(own) for rank, own in of_rank.items()) and sent == received
