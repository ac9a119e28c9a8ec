"""The test device shows what it promises (tests/device/__init__.py): each mistake is found, and
programs without one give the CPU's values.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.device import memory, streams
from tests.device.collectives import BACKEND, communicators, install_collectives
from tests.device.settings import settings
from tests.device.streams import DeviceError, Event, Stream, counters, current_stream, on_stream
from tests.ranks import RankError, preload, run_ranks

preload("tests.device.test_device")
DEVICE = "testgpu"


def on_device(function: Callable[[], object], num_ranks: int = 1, timeout_s: float = 30) -> object:
    """The results of `function` on ranks of their own: the device stays out of this process."""
    return run_ranks(_installed, num_ranks, function, timeout_s=timeout_s)


def _installed(function: Callable[[], object]) -> object:
    install_collectives()
    return function()


# ---- values


def _train(device: str) -> list[float]:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Flatten(), nn.Linear(288, 10)]
    model = nn.Sequential(*layers)
    x = torch.randn(4, 3, 8, 8)
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(device)), torch.arange(4, device=device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _both() -> tuple[list[float], list[float]]:
    return _train("cpu"), _train(DEVICE)


def test_trains_as_the_cpu_does() -> None:
    (cpu, device), = on_device(_both)  # type: ignore[misc, attr-defined]  # fmt: skip
    assert cpu == pytest.approx(device, rel=1e-6)


def _complex_values() -> float:
    x = torch.arange(8, dtype=torch.float64)
    values = torch.fft.fft(x.to(DEVICE)).abs()
    return float((values.cpu() - torch.fft.fft(x).abs()).abs().max())


def test_complex_values() -> None:
    assert on_device(_complex_values) == [0.0]


def _mixed_devices() -> None:
    torch.ones(3, device=DEVICE) + torch.ones(3)


def test_tensors_of_two_devices_do_not_mix() -> None:
    with pytest.raises(RankError, match=r"(?i)expected all tensors to be on the same device"):
        on_device(_mixed_devices)


# ---- streams and races


def _read_without_waiting() -> None:
    x = torch.ones(100, device=DEVICE)
    with on_stream(Stream()):
        x * 2


def _write_without_waiting() -> None:
    x = torch.ones(100, device=DEVICE)
    other = Stream()
    other.wait_stream(current_stream())
    with on_stream(other):
        y = x * 2
    x.fill_(3.0)
    del y


@pytest.mark.parametrize("function", [_read_without_waiting, _write_without_waiting])
def test_a_missing_wait_is_a_race(function: Callable[[], None]) -> None:
    with pytest.raises(RankError, match=r"race: .* nothing makes this stream wait"):
        on_device(function)


def _waits_by_events() -> tuple[float, int]:
    x = torch.ones(100, device=DEVICE)
    other = Stream()
    other.wait_stream(current_stream())
    with on_stream(other):
        y = x * 2
    other.record_event().wait()
    x.fill_(3.0)
    waits = sum(counters.host_waits.values())
    return (x + y).sum().item(), waits


def test_events_order_streams_without_the_host() -> None:
    assert on_device(_waits_by_events) == [(500.0, 0)]


def _parts_do_not_race() -> float:
    """Two streams on two halves of one tensor."""
    x = torch.zeros(100, device=DEVICE)
    other = Stream()
    other.wait_stream(current_stream())
    with on_stream(other):
        x[:50].fill_(1.0)
    x[50:].fill_(2.0)
    current_stream().wait_stream(other)
    return x.sum().item()


def test_disjoint_parts_of_a_tensor_are_no_race() -> None:
    assert on_device(_parts_do_not_race) == [150.0]


# ---- memory


def _freed_while_in_use(record: bool) -> float:
    x = torch.ones(100, device=DEVICE)
    other = Stream()
    other.wait_stream(current_stream())
    with on_stream(other):
        y = x * 2
    if record:
        x.record_stream(other)  # type: ignore[arg-type]
    del x
    current_stream().wait_stream(other)
    return y.sum().item()


def _freed_too_early() -> float:
    return _freed_while_in_use(False)


def _freed_with_record_stream() -> float:
    return _freed_while_in_use(True)


def test_memory_that_another_stream_uses_must_not_be_freed() -> None:
    with pytest.raises(RankError, match=r"is freed and given out again while aten\.mul"):
        on_device(_freed_too_early)
    assert on_device(_freed_with_record_stream) == [200.0]


def _memory() -> tuple[int, int, str]:
    settings.memory_bytes = 10_000
    x = torch.ones(1000, device=DEVICE)
    before = memory.used_memory().now_bytes
    del x
    after = memory.used_memory().now_bytes
    try:
        torch.empty(3000, device=DEVICE)
    except torch.OutOfMemoryError as error:
        return before, after, str(error)
    return before, after, ""


def test_memory_is_counted_and_limited() -> None:
    ((before, after, said),) = on_device(_memory)  # type: ignore[misc, attr-defined]
    assert (before, after) == (4096, 0)
    assert "tried to allocate 12288 bytes, 0 of 10000 are in use" in said


# ---- the host


def _host_waits() -> dict[str, int]:
    x = torch.ones(4, device=DEVICE)
    for _ in range(2):
        x.sum().item()
    x.cpu()
    x.nonzero()
    return dict(counters.host_waits)


def test_host_waits_are_counted_by_line() -> None:
    ((waits),) = on_device(_host_waits)  # type: ignore[misc, attr-defined]
    kinds = {text.partition(" at ")[0]: number for text, number in waits.items()}
    assert kinds == {"item": 2, "copy to host": 1, "aten.nonzero.default": 1}
    assert all(" at test_device.py:" in text for text in waits)


def _late_error() -> str:
    x = torch.tensor([7], device=DEVICE)
    table = torch.ones(3, device=DEVICE)
    found = table[x]  # out of range: only the stream can know
    try:
        found.item()
    except Exception as error:
        return type(error).__name__
    return "nothing"


def test_an_error_of_a_stream_surfaces_at_the_next_wait() -> None:
    assert on_device(_late_error) == ["IndexError"]


def _asynchronous() -> tuple[bool, float]:
    settings.cold_s = 0.01
    gate = threading.Event()
    streams.current_stream().put("gate", gate.wait)  # the device stands here until it opens
    x = torch.ones(4, device=DEVICE) * 3
    launched = streams.current_stream().record_event()
    is_ahead = not launched.query()
    gate.set()
    return is_ahead, x.sum().item()


def test_the_host_does_not_wait_for_kernels() -> None:
    """Otherwise it would hang before the gate opens."""
    assert on_device(_asynchronous) == [(True, 12.0)]


# ---- hardware queues


def _blocked_queue() -> bool:
    """A stream that waits for an event which is recorded behind it in the same queue."""
    settings.num_queues = 1
    first = current_stream()
    second = Stream()
    done = Event()
    done._done.clear()  # recorded later
    second.wait_event(done)
    x = torch.ones(4, device=DEVICE)
    over = first.record_event()
    time.sleep(0.2)
    is_blocked = not over.query()
    done._done.set()
    over._done.wait(5)
    del x
    return is_blocked and over.query()


def test_a_waiting_stream_blocks_others_of_its_queue() -> None:
    assert on_device(_blocked_queue) == [True]


# ---- random numbers


def _draws(num_multiprocessors: int) -> tuple[list[float], float]:
    settings.num_multiprocessors = num_multiprocessors
    torch.manual_seed(0)
    small = torch.rand(4, device=DEVICE)
    large = torch.rand(200_000, device=DEVICE)
    return small.tolist(), large.sum().item()


def _draws_on_80() -> tuple[list[float], float]:
    return _draws(80)


def _draws_on_68() -> tuple[list[float], float]:
    return _draws(68)


def test_large_random_tensors_depend_on_the_multiprocessors() -> None:
    ((small_a, large_a),) = on_device(_draws_on_80)  # type: ignore[misc, attr-defined]
    ((small_b, large_b),) = on_device(_draws_on_68)  # type: ignore[misc, attr-defined]
    assert on_device(_draws_on_80) == [(small_a, large_a)]
    assert small_a == small_b and large_a != large_b


def _random_state() -> bool:
    torch.manual_seed(3)
    torch.rand(4, device=DEVICE)
    state = torch.get_device_module(DEVICE).get_rng_state()
    first = torch.rand(4, device=DEVICE).tolist()
    torch.get_device_module(DEVICE).set_rng_state(state)
    return first == torch.rand(4, device=DEVICE).tolist()


def test_the_random_state_can_be_kept() -> None:
    assert on_device(_random_state) == [True]


class _BusyHost:
    """The CPU's generator, which the host seeds for itself right after anybody else has."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def manual_seed(self, seed: int) -> None:
        self._generator.manual_seed(seed)
        self._generator.manual_seed(1)


def _masks() -> list[float]:
    """Sums of dropouts of numbered entries."""
    torch.get_device_module(DEVICE).manual_seed_all(3)
    x = torch.arange(1000.0, device=DEVICE, requires_grad=True)
    sums = [nn.functional.dropout(x, 0.5).sum() for _ in range(5)]
    return [each.item() for each in sums]


def _masks_beside_a_busy_host() -> tuple[list[float], list[float]]:
    quiet = _masks()
    torch.default_generator = _BusyHost(torch.default_generator)  # type: ignore[assignment]
    return quiet, _masks()


def test_what_the_host_draws_does_not_change_masks() -> None:
    """Kernels run later than their launch, while the host seeds the CPU's generator for the next
    micro-batch: `whale doctor` once found other bits in three runs of "dropout, recomputed".
    """
    ((quiet, busy),) = on_device(_masks_beside_a_busy_host)  # type: ignore[misc, attr-defined]
    assert quiet == busy
    assert len(set(quiet)) == len(quiet)


# ---- copies


def _pinned() -> tuple[bool, int]:
    source = torch.ones(4).pin_memory()
    target = source.to(DEVICE, non_blocking=True)
    back = torch.empty(1, pin_memory=True)
    settings.jitter_s = 0.5
    back.copy_(target.sum(), non_blocking=True)
    was_there = back.item() == 4.0
    streams.synchronize()
    return was_there or back.item() == 4.0, counters.pageable_copies


def test_pinned_copies_do_not_block() -> None:
    assert on_device(_pinned) == [(True, 0)]


def _waits_of_copies_to_the_host() -> list[int]:
    x = torch.ones(8, device=DEVICE)
    found = []
    for is_pinned in (True, False):
        counters.clear()
        torch.empty(8, pin_memory=is_pinned).copy_(x, non_blocking=True)
        found.append(sum(counters.host_waits.values()))
    return found


def test_copies_to_pageable_memory_block() -> None:
    assert on_device(_waits_of_copies_to_the_host) == [[0, 1]]


# ---- collectives


def _group() -> dist.ProcessGroup:
    group = dist.new_group(backend=BACKEND)
    assert group is not None
    return group


def _all_reduce() -> tuple[float, int, int]:
    group = _group()
    x = torch.full((3,), 1.0 + dist.get_rank(), device=DEVICE)
    work = dist.all_reduce(x, group=group, async_op=True)
    assert work is not None
    work.wait()
    waits = sum(counters.host_waits.values())
    return x.sum().item(), waits, len(communicators)


def test_all_reduce_without_a_host_wait() -> None:
    assert on_device(_all_reduce, 2) == [(9.0, 0, 1)] * 2


def _reads_before_the_wait() -> None:
    x = torch.ones(3, device=DEVICE)
    work = dist.all_reduce(x, group=_group(), async_op=True)
    y = x * 2
    del work, y


def test_reading_before_the_wait_is_a_race() -> None:
    with pytest.raises(RankError, match=r"race: .*testccl all_reduce"):
        on_device(_reads_before_the_wait, 2)


def _different_orders() -> None:
    group = _group()
    large = torch.ones(8, device=DEVICE)
    small = torch.ones(2, device=DEVICE)
    first, second = (large, small) if dist.get_rank() == 0 else (small, large)
    dist.all_reduce(first, group=group)
    dist.all_reduce(second, group=group)
    streams.synchronize()


def test_ranks_that_call_in_different_orders_are_named() -> None:
    with pytest.raises(RankError, match=r"call 0 of a communicator is all_reduce of [28] "):
        on_device(_different_orders, 2)


def _messages(tags: tuple[int, int]) -> list[float]:
    """Two messages; the receiver asks for them with these tags."""
    group = _group()
    if dist.get_rank() == 0:
        for number in range(2):
            dist.send(torch.full((2,), float(number), device=DEVICE), 1, group, tag=number)
        streams.synchronize()
        return []
    found = [torch.zeros(2, device=DEVICE) for _ in range(2)]
    for number, tag in enumerate(tags):
        dist.recv(found[number], 0, group, tag=tag)
    return [each[0].item() for each in found]


def _messages_in_order() -> list[float]:
    return _messages((0, 1))


def _messages_with_swapped_tags() -> list[float]:
    return _messages((1, 0))


def test_messages_are_matched_by_order_and_not_by_tag() -> None:
    assert on_device(_messages_in_order, 2) == [[], [0.0, 1.0]]
    assert on_device(_messages_with_swapped_tags, 2) == [[], [0.0, 1.0]]


def _wrong_size() -> None:
    group = _group()
    if dist.get_rank() == 0:
        dist.send(torch.ones(2, device=DEVICE), 1, group)
    else:
        dist.recv(torch.ones(3, device=DEVICE), 0, group)
    streams.synchronize()


def test_a_message_of_another_size_is_an_error() -> None:
    with pytest.raises(
        RankError, match=r"message 0 from rank 0 has 2 torch\.float32, its receive 3"
    ):
        on_device(_wrong_size, 2, timeout_s=10)


def _split_off(waits: bool) -> int:
    """Makes a communicator after an all-reduce of all ranks that nobody waited for, or somebody."""
    dist.all_reduce(torch.ones(2, device=DEVICE), group=_group())
    if waits:
        streams.synchronize()
    dist.new_group([0, 1], backend=BACKEND)
    return len(communicators)


def _split_off_at_work() -> int:
    return _split_off(False)


def _split_off_idle() -> int:
    return _split_off(True)


def test_a_communicator_is_split_off_an_idle_one() -> None:
    with pytest.raises(RankError, match="all_reduce of the group of all ranks may still be under"):
        on_device(_split_off_at_work, 2)
    assert on_device(_split_off_idle, 2) == [2, 2]


def _unsupported_type() -> None:
    dist.all_reduce(torch.ones(2, device=DEVICE, dtype=torch.int16), group=_group())


def test_types_are_those_of_nccl() -> None:
    with pytest.raises(RankError, match=r"unsupported data type torch\.int16"):
        on_device(_unsupported_type, 2)


def _racing_error_type() -> str:
    try:
        _read_without_waiting()
    except DeviceError as error:
        return str(error)
    return ""


def test_a_race_names_both_operations() -> None:
    (said,) = on_device(_racing_error_type)  # type: ignore[misc]
    assert "aten.mul.out on stream 1 reads 400 bytes that aten.fill_.Scalar on stream 0" in said
