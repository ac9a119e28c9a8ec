"""Slots of boundary tensors: as many as are in flight at a time, never two tensors in one slot,
none kept for longer than wanted.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from whale import scheduling
from whale.devices import LocalDevice
from whale.lowering.chunk import Chunk, CrossingValue
from whale.lowering.messages import Bridges, MessagePart
from whale.lowering.program import Program
from whale.runtime.boundaries import boundary_slots
from whale.scheduling import Kind, Schedule, StageGraph, even_costs
from whale.scheduling.placement import loop, wave
from whale.scheduling.slots import assign_slots


@given(st.lists(st.lists(st.integers(0, 8), max_size=4), max_size=12))
def test_as_few_slots_as_things_live_at_a_time(mentioned: list[list[int]]) -> None:
    slots = assign_slots(mentioned)
    places = {
        thing: [place for place, things in enumerate(mentioned) if thing in things]
        for things in mentioned
        for thing in things
    }
    alive = [
        {thing for thing, own in places.items() if own[0] <= place <= own[-1]}
        for place in range(len(mentioned))
    ]
    assert slots.count == max(map(len, alive), default=0)
    for things in alive:
        assert len({slots.of[thing] for thing in things}) == len(things)
    for place, freed in enumerate(slots.freed):
        assert sorted(freed) == sorted(
            slots.of[thing] for thing, own in places.items() if own[-1] == place
        )


def program_of(schedule: Schedule, device: int) -> Program:
    """One rank's program for a chain of stages with one tensor between neighbours; nothing in it
    can run.
    """
    graph = schedule.stage_graph
    values = [
        CrossingValue(s, f"value {s}", torch.float32, 0, True, (1,), None)
        for s in range(graph.num_stages - 1)
    ]

    def chunk(stage: int) -> Chunk:
        received = tuple(values[max(stage - 1, 0) : stage])
        sent = tuple(values[stage : stage + 1])
        return Chunk(stage, lambda samples: None, received, (), sent, 0, not sent, (), False)  # type: ignore[arg-type, return-value]

    parts = {
        (s, s + 1, m): (MessagePart(values[s], 0, 0, 1, True),)
        for s in range(len(values))
        for m in range(schedule.num_micro_batch)
    }
    nothing: Any = ()
    return Program(
        actions=schedule.orders[device],
        arrived_by={},
        chunks={
            stage: chunk(stage)
            for stage, holder in enumerate(graph.device_of_stage)
            if holder == device
        },
        source_of={(s + 1, s): s for s in range(len(values))},
        bridges=Bridges(parts, parts, {}),
        samples=nothing,
        edges=nothing,
        batched=(),
        batch_size=0,
        num_micro_batch=schedule.num_micro_batch,
        device=LocalDevice(),
        seed_parts=(0, 0, 0),
    )


def most_in_flight(schedule: Schedule, device: int) -> int:
    """Counted by hand, one action after the other: what comes into being, what is there,
    what goes.
    """
    graph = schedule.stage_graph
    order = schedule.orders[device]
    last = graph.num_stages - 1
    there: set[tuple[str, int, int]] = set()
    most = 0
    for action in order:
        s = action.stage
        m = action.micro_batch
        gone: set[tuple[str, int, int]] = set()
        if action.kind is Kind.RECEIVE:
            there.add(("gradient" if action.gradient else "input", s, m))
        elif action.kind is Kind.SEND:
            gone = {("returned" if action.gradient else "result", s, m)}
        elif action.kind is Kind.FORWARD:
            there |= {("input", s, m)} if s > 0 else set()
            there |= {("result", s, m)} if s < last else set()
            if s > 0 and not graph.crosses_devices((s - 1, s)):
                gone = {("result", s - 1, m)}
        elif action.kind in (Kind.BACKWARD, Kind.INPUT):
            gone = {("input", s, m), ("gradient", s, m)}
            if s > 0:
                there.add(
                    ("returned", s, m)
                    if graph.crosses_devices((s - 1, s))
                    else ("gradient", s - 1, m)
                )
        most = max(most, len(there))
        there -= gone
    assert not there
    return most


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "wave", "zero-bubble"])
@pytest.mark.parametrize("num_devices", [2, 3, 4])
def test_a_program_has_as_many_slots_as_boundary_tensors_in_flight(
    name: str, num_devices: int
) -> None:
    num_chunks = 1 if name in ("gpipe", "1f1b") else 2
    place = (
        wave(num_devices, 1) if name in ("wave", "zero-bubble") else loop(num_devices, num_chunks)
    )
    graph = StageGraph.chain(num_devices * num_chunks, place)
    cap = num_devices if name == "zero-bubble" else None
    costs = even_costs(
        graph,
        message_s=0.1,
        memory_cap=cap,
        unsplit=scheduling.stages_without_input_gradient(graph),
    )
    counts = []
    for num_micro_batch in (2 * num_devices, 4 * num_devices):
        schedule = scheduling.build(name, graph, num_micro_batch, costs)
        found = [
            boundary_slots(program_of(schedule, device)).count for device in range(num_devices)
        ]
        assert found == [most_in_flight(schedule, device) for device in range(num_devices)]
        counts.append(max(found))
    if name in ("1f1b", "interleaved"):
        assert counts[0] == counts[1]  # however many micro-batches there are
