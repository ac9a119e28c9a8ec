"""Messages and sums through memory: small and large, more than socket and ring hold, in any order
of waiting, and from a peer that dies.
"""

from __future__ import annotations

import gc
import mmap
import os
import socket
import time
import weakref
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import whale as wh
from tests.ranks import RankError, preload, run_ranks
from whale.distributed import same_host, same_host_collectives
from whale.distributed.message import NUM_EPOCHS, Message
from whale.distributed.ranks import Ranks
from whale.distributed.same_host import RING_BYTES, RING_START, IncomingRing, OutgoingRing
from whale.distributed.transport import Transport

preload("tests.integration.test_same_host")


def content(number: int, num_bytes: int) -> Tensor:
    return torch.arange(num_bytes, dtype=torch.int64).mul_(number + 3).to(torch.uint8)


def exchange(sizes: list[int], order: list[int], pause_s: float = 0.0) -> tuple[int, bool]:
    """Both ranks send all messages and only then wait for those of the other, in that order. (lines
    to others, whether all was right)
    """
    ranks = Ranks("cpu")
    peer = 1 - ranks.rank
    transport = Transport(ranks, [(0, 1), (1, 0)])
    transport.begin()
    messages = [Message(peer, number * NUM_EPOCHS, ()) for number in range(len(sizes))]
    for number, (size, message) in enumerate(zip(sizes, messages, strict=True)):
        tensor = content(number + 10 * ranks.rank, size)
        transport.send(tensor, message)
        if size <= RING_BYTES // 4:
            tensor.zero_()  # what is small enough for the ring was taken along
    if ranks.rank == 1:
        time.sleep(pause_s)
    right = True
    for number in order:
        buffer = torch.zeros(sizes[number], dtype=torch.uint8)
        transport.wait(transport.post(buffer, messages[number], "a message"))
        right = right and torch.equal(buffer, content(number + 10 * peer, sizes[number]))
    transport.drain()
    ranks.gather(None)
    return len(transport._rings_to), right


def test_messages_of_all_sizes_arrive_whole() -> None:
    sizes = [0, 1, 1023, 1024, 1025, 100_000, 3, 2_000_000, 5]
    assert run_ranks(exchange, 2, sizes, list(range(len(sizes)))) == [(1, True)] * 2


def test_they_may_be_waited_for_in_another_order_than_they_were_sent() -> None:
    sizes = [10, 2000, 30, 4000]
    assert run_ranks(exchange, 2, sizes, [2, 3, 0, 1]) == [(1, True)] * 2


def test_more_packets_than_a_socket_holds_block_nobody() -> None:
    sizes = [900] * 3000
    assert run_ranks(exchange, 2, sizes, list(range(len(sizes))), 0.2) == [(1, True)] * 2


def many_rounds(num_rounds: int, num_bytes: int) -> bool:
    """Messages of nearly a third of the ring, so that its end is met at every place."""
    ranks = Ranks("cpu")
    transport = Transport(ranks, [(0, 1)])
    right = True
    for number in range(num_rounds):
        transport.begin()
        message = Message(1 - ranks.rank, 0, ())
        if ranks.rank == 0:
            transport.send(content(number, num_bytes + number), message)
        else:
            buffer = torch.zeros(num_bytes + number, dtype=torch.uint8)
            transport.wait(transport.post(buffer, message, "a message"))
            right = right and torch.equal(buffer, content(number, num_bytes + number))
        transport.drain()
    ranks.gather(None)
    return right


def test_the_ring_goes_round_and_what_does_not_fit_goes_by_gloo() -> None:
    assert run_ranks(with_small_ring, 2, 40, 27_001) == [
        True,
        True,
    ]  # faster sender than receiver: also with a full ring
    assert run_ranks(with_small_ring, 2, 4, 100_001) == [True, True]  # larger than the ring


def with_small_ring(num_rounds: int, num_bytes: int) -> bool:
    same_host.RING_BYTES = 90_000
    return many_rounds(num_rounds, num_bytes)


def dies() -> None:
    ranks = Ranks("cpu")
    transport = Transport(ranks, [(0, 1), (1, 0)])
    transport.begin()
    if ranks.rank == 1:
        os._exit(3)
    transport.wait(transport.post(torch.zeros(1), Message(1, 0, ()), "receive F 0>1.2"))


def test_a_peer_that_dies_is_named() -> None:
    with pytest.raises(RankError) as error:
        run_ranks(dies, 2)
    assert "Rank 1" in str(
        error.value
    ) or "receive F 0>1.2 from rank 1: that rank is gone or stuck" in str(error.value)


def test_ranks_of_two_hosts_have_no_line() -> None:
    assert run_ranks(on_two_hosts, 2) == [0, 0]


def on_two_hosts() -> int:
    ranks = Ranks("cpu")
    same_host._host = lambda: f"host {ranks.rank}"
    return len(Transport(ranks, [(0, 1), (1, 0)])._rings_to)


# ---- a few numbers of every rank


def exchanges(num_passes: int, reads: bool) -> tuple[bool, list[list[list[float]]]]:
    """(through memory, what this rank gathered in each pass); a pass that is never read is over
    before the next.
    """
    ranks = Ranks("cpu")
    transport = Transport(ranks, [(0, 1)])
    gathered = []
    finish = None
    for number in range(num_passes):
        transport.begin()
        finish = transport.exchange(torch.tensor([number, 10.0 * ranks.rank], dtype=torch.float64))
        if finish is None:
            return False, []
        if reads or number == num_passes - 1:
            gathered.append(finish().tolist())
    assert finish is not None and finish().tolist() == gathered[-1]  # as often as one likes
    return True, gathered


@pytest.mark.parametrize("reads", [True, False], ids=["read at once", "only the last is read"])
def test_every_rank_gathers_the_numbers_of_all(reads: bool) -> None:
    """Three ranks, of which only two send each other anything else."""
    for through_memory, gathered in run_ranks(exchanges, 3, 1000, reads):
        assert through_memory
        assert gathered == [
            [[number, 0.0], [number, 10.0], [number, 20.0]]
            for number in (range(1000) if reads else [999])
        ]


# ---- sums


def numbers(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, whose sums no rounding touches, in any order."""
    return (torch.arange(size) * (rank + 1) % 61).to(dtype)


def sums(groups: list[tuple[int, ...]], sizes: list[int], dtype: torch.dtype) -> list[bool]:
    """Whether this rank got the sum, for each of its groups and each size. One message lies in the
    ring meanwhile.
    """
    same_host_collectives.BLOCK_BYTES = 64 * 1024
    ranks = Ranks("cpu")
    transport = Transport(ranks, [(0, 1)])
    transport.begin()
    message = Message(1 - ranks.rank, 0, ())
    if ranks.rank == 0:
        transport.send(content(1, 5000), message)
    right = []
    for group in groups:
        for size in sizes if ranks.rank in group else ():
            assert transport.reaches_through_memory(group)
            tensor = numbers(ranks.rank, size, dtype)
            transport.collectives.all_reduce(tensor, group)
            right.append(
                torch.equal(
                    tensor,
                    sum(
                        (numbers(rank, size, dtype) for rank in group),
                        torch.zeros(size, dtype=dtype),
                    ),
                )
            )
    if ranks.rank == 1:
        buffer = torch.zeros(5000, dtype=torch.uint8)
        transport.wait(transport.post(buffer, message, "a message"))
        right.append(torch.equal(buffer, content(1, 5000)))
    transport.drain()
    ranks.gather(None)
    return right


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_sums_are_those_of_all_ranks(dtype: torch.dtype) -> None:
    """Sums of fewer numbers than ranks, up to many blocks, over several groups that share ranks."""
    groups = [(0, 1), (0, 1, 2, 3), (0, 3), (1, 2, 3)]
    found = run_ranks(sums, 4, groups, [0, 1, 3, 1000, 16_385, 300_001], dtype)
    assert [len(right) for right in found] == [18, 19, 12, 18]
    assert all(all(right) for right in found)


def same_bits() -> bytes:
    ranks = Ranks("cpu")
    tensor = torch.randn(10_000, generator=torch.Generator().manual_seed(ranks.rank))
    Transport(ranks, []).collectives.all_reduce(tensor, (0, 1, 2))
    ranks.gather(None)
    return tensor.numpy().tobytes()


def test_sums_that_are_rounded_are_the_same_on_all_ranks() -> None:
    first, *others = run_ranks(same_bits, 3)
    assert others == [first, first]


def half_sums(scattered: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A sum of 16 bits over 4 ranks through memory, and everyone's numbers."""
    ranks = Ranks("cpu")
    generator = torch.Generator().manual_seed(ranks.rank)
    own = torch.randn(40_000, generator=generator).to(torch.bfloat16)
    tensor = own.clone()
    everyone = tuple(range(ranks.num_ranks))
    collectives = Transport(ranks, []).collectives
    if scattered:
        parts = tensor.split(10_000)
        collectives.reduce_scatter(dict(zip(everyone, parts, strict=True)))
        tensor = parts[ranks.rank]
    else:
        collectives.all_reduce(tensor, everyone)
    ranks.gather(None)
    return tensor, own


@pytest.mark.parametrize("scattered", [False, True])
def test_sums_of_16_bits_are_rounded_once(scattered: bool) -> None:
    """Before, every addition rounded to 8 bits of mantissa."""
    found = run_ranks(half_sums, 4, scattered)
    expected = torch.stack([own for _, own in found]).float()
    rounded_once = expected.sum(0).to(torch.bfloat16)
    got = torch.cat([part for part, _ in found]) if scattered else found[2][0]
    off = (got.float() - rounded_once.float()).abs()
    # float32 adds in another order: one in some thousands falls on the other side of a rounding
    assert (off > 0).sum() < 40
    assert (off <= rounded_once.float().abs() * 2**-7).all()


def touched_bytes(enough_bytes: int) -> int:
    """How far a ring was written by twice the bytes that it has, in parts of 64 KiB of which one or
    two are on their way.
    """
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ring, group = (
        mmap.mmap(-1, RING_START + RING_BYTES),
        cast(dist.ProcessGroup, None),
    )  # there is always room
    outgoing = OutgoingRing(first, ring, group, 1)
    incoming = IncomingRing(second, ring, group, 0, {})
    part = torch.ones(65_536, dtype=torch.uint8)
    buffer = torch.zeros(65_536, dtype=torch.uint8)
    num_parts = 2 * RING_BYTES // part.nbytes
    assert outgoing.send_if_free(part, 0, enough_bytes)
    for number in range(1, num_parts):
        assert outgoing.send_if_free(part * (1 + number % 100), number, enough_bytes)
        incoming.wait(buffer, number - 1)
        assert buffer.eq(1 + (number - 1) % 100).all()
    first.close()
    second.close()
    return len(bytes(ring).rstrip(b"\0"))


def test_a_long_sum_touches_few_bytes_of_the_rings() -> None:
    assert touched_bytes(5 * 65_536) < 10 * 65_536
    assert touched_bytes(RING_BYTES) > RING_BYTES // 2  # what asks for the whole ring gets it


def sums_with_full_rings() -> list[bool]:
    """Both ranks have sent a message that nearly fills the ring, and wait for it only after the
    sums.
    """
    same_host.RING_BYTES = 90_000
    same_host_collectives.BLOCK_BYTES = 64 * 1024
    ranks = Ranks("cpu")
    transport = Transport(ranks, [(0, 1), (1, 0)])
    message = Message(1 - ranks.rank, 0, ())
    transport.begin()
    transport.send(content(ranks.rank, 80_000), message)
    gathered = transport.collectives.all_gather(content(ranks.rank, 20_000), None)
    tensor = numbers(ranks.rank, 50_000, torch.float32)
    transport.collectives.all_reduce(tensor, (0, 1))
    buffer = torch.zeros(80_000, dtype=torch.uint8)
    transport.wait(transport.post(buffer, message, "a message"))
    ranks.gather(None)
    assert gathered is not None
    return [
        torch.equal(gathered, torch.stack([content(0, 20_000), content(1, 20_000)])),
        torch.equal(tensor, numbers(0, 50_000, torch.float32) + numbers(1, 50_000, torch.float32)),
        torch.equal(buffer, content(1 - ranks.rank, 80_000)),
    ]


def test_two_ranks_with_full_rings_do_not_wait_for_each_other() -> None:
    assert run_ranks(sums_with_full_rings, 2, timeout_s=20.0) == [[True] * 3] * 2


def after_a_failed_pass() -> list[list[float]]:
    """What is gathered in a pass, after one in which the ranks gathered values of
    unlike sizes.
    """
    ranks = Ranks("cpu")
    transport = Transport(ranks, [])
    transport.begin()
    with pytest.raises(RuntimeError, match="do not run the same program"):
        transport.collectives.all_gather(torch.zeros(1 + ranks.rank), None)
    transport.begin()
    found = transport.collectives.all_gather(torch.tensor([1.0 + ranks.rank]), None)
    ranks.gather(None)
    assert found is not None
    return found.tolist()


def test_what_a_failed_pass_left_behind_is_no_part_of_a_later_sum() -> None:
    assert run_ranks(after_a_failed_pass, 2, timeout_s=20.0) == [[[1.0], [2.0]]] * 2


def conjugated() -> list[complex]:
    ranks = Ranks("cpu")
    found = Transport(ranks, []).collectives.all_gather(
        torch.tensor([complex(1, 1 + ranks.rank)]).conj(), None
    )
    ranks.gather(None)
    assert found is not None
    return found.view(-1).tolist()


def test_a_conjugate_that_is_only_noted_is_gathered_as_it_is() -> None:
    assert run_ranks(conjugated, 2) == [[1 - 1j, 1 - 2j]] * 2


def dies_before_an_all_reduce() -> None:
    ranks = Ranks("cpu")
    transport = Transport(ranks, [])
    if ranks.rank == 1:
        os._exit(3)
    transport.collectives.all_reduce(torch.zeros(10), (0, 1))


def test_a_peer_that_dies_before_an_all_reduce_is_named() -> None:
    with pytest.raises(RankError) as error:
        run_ranks(dies_before_an_all_reduce, 2)
    message = str(error.value)  # of whichever rank was seen first
    waited = "its part of an all-reduce from rank 1: that rank is gone or stuck"
    assert "Rank 1" in message or waited in message


def gathered(sizes: list[int]) -> list[bool]:
    """Among three ranks and between two of them, in another order than that of their ranks."""
    ranks = Ranks("cpu")
    transport = Transport(ranks, [])
    group = ranks.group((2, 0))
    right = []
    for size in sizes:
        for members, own in (((0, 1, 2), None), ((2, 0), group)):
            if ranks.rank in members:
                found = transport.collectives.all_gather(
                    content(ranks.rank, size).view(1, -1).expand(2, -1), own
                )
                assert found is not None
                right.append(
                    torch.equal(
                        found, torch.stack([content(rank, size).expand(2, -1) for rank in members])
                    )
                )
    ranks.gather(None)
    return right


def test_everyone_gathers_the_values_of_a_group_in_its_order() -> None:
    assert run_ranks(gathered, 3, [0, 3, 600, 70_000]) == [[True] * 8, [True] * 4, [True] * 8]


def dropped() -> bool:
    batch = torch.ones(4, 3)
    engine = wh.parallelize(
        torch.nn.Linear(3, 2),
        batch,
        optimizer=torch.optim.SGD,
        loss=lambda output, _: output.square().mean(),
    )
    engine.step(batch)
    transport = weakref.ref(engine._shapes.transport)
    engine.close()
    del engine
    gc.collect()
    return transport() is None


def test_an_engine_that_is_dropped_gives_its_lines_back() -> None:
    assert run_ranks(dropped, 2) == [True, True]
