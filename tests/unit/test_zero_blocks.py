"""Blocks of ZeRO: cuts at rows, parts by free memory, slots, the order of uses, and plans that need
them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import whale as wh
from whale.cluster.cluster import ETHERNET_50G, PCIE_3_X16, Cluster, Device
from whale.cluster.kinds import GIGA, TERA, DeviceKind
from whale.lowering.blocks import Use, backward_uses
from whale.planning.zero_blocks import fractions_by_memory
from whale.plans.blocks import Block, ends_at_rows, slots_of
from whale.plans.check import contradiction
from whale.plans.plan import Plan
from whale.plans.shards import Shards
from whale.plans.shares import DoesNotFit
from whale.runtime.residence import Pool, Residence
from whale.simulation.simulate import simulate

SHAPES = st.lists(
    st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5
)
SHARES = st.lists(st.floats(0, 1), min_size=1, max_size=5).filter(lambda each: sum(each) > 0.01)


@given(SHAPES, SHARES)
def test_parts_end_at_rows_and_cover_every_row_once(
    shapes: list[tuple[int, ...]], shares: list[float]
) -> None:
    names = [f"p{number}" for number in range(len(shapes))]
    total = sum(map(math.prod, shapes))
    wanted = [share / sum(shares) * total for share in shares]
    ends = ends_at_rows(names, dict(zip(names, shapes, strict=True)), wanted)
    block = Block(tuple(names), tuple(shapes), tuple(range(len(shares))), ends)
    assert ends[-1] == total
    assert list(ends) == sorted(ends)
    for name, shape in zip(names, shapes, strict=True):
        rows: list[int] = []
        for rank in range(len(shares)):
            start, stop = block.rows(name, rank)
            rows += range(start, stop)
        assert rows == list(range(shape[0]))
    for rank, share in enumerate(shares):
        if not share:
            start, stop = block.interval(rank)
            assert start == stop, "a rank without memory holds something"


@given(st.lists(st.floats(0, 100), min_size=1, max_size=6), st.floats(0.1, 300))
def test_parts_are_even_unless_memory_says_otherwise(free: list[float], needed: float) -> None:
    found = fractions_by_memory(free, needed)
    if found is None:
        assert sum(free) < needed
        return
    assert sum(found) == pytest.approx(1.0)
    largest = max(found)
    for part, room in zip(found, free, strict=True):
        assert part * needed <= room * (1 + 1e-9)
        is_full = part * needed == pytest.approx(room)
        assert is_full or part == pytest.approx(largest), "less than others, though it has room"


@given(st.lists(st.integers(1, 100), min_size=1, max_size=12), st.booleans())
def test_neighbours_of_usual_size_never_share_a_slot(sizes: list[int], alike: bool) -> None:
    kinds = ["kind"] * len(sizes)
    slots = slots_of([10] * len(sizes) if alike else sizes, kinds)
    if alike:
        assert all(a != b for a, b in zip(slots, slots[1:], strict=False))
    assert len(set(slots)) <= 3


class CountingHome:
    """Notes what is fetched, and what a slot holds."""

    def __init__(self) -> None:
        self.fetched: list[int] = []

    def begin_fetch(self, block: int, buffer: Tensor) -> CountingHome:
        self.fetched.append(block)
        buffer.fill_(block)
        return self

    def begin_store(self, block: int, buffer: Tensor) -> CountingHome:
        return self

    def wait(self) -> None:
        return

    def cancel(self) -> None:
        return


@given(st.data())
def test_every_use_finds_its_blocks(data: st.DataObject) -> None:
    """Whatever the order, announced or not: a block that is needed lies in its slot, and so do all
    others of the same operation.
    """
    number = data.draw(st.integers(1, 6))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=number, max_size=number))
    slot_of = slots_of(sizes, [0] * number)
    pool = Pool(sizes, slot_of, [torch.float32] * number, "cpu")
    residence = Residence(pool, CountingHome())
    place = st.integers(0, number - 1)
    uses = data.draw(st.lists(place.map(lambda block: (block,)), max_size=30))
    announced = data.draw(st.lists(place.map(lambda block: (block,)), max_size=30))
    residence.begin(uses if data.draw(st.booleans()) else announced)
    for blocks in uses:
        residence.need(*blocks)
        for block in blocks:
            assert bool((pool.buffer(block) == block).all())


def test_blocks_come_one_ahead_and_once_each_way() -> None:
    """Four layers in two slots: three fetches more in backward, since the last two are here."""
    home = CountingHome()
    pool = Pool([4] * 4, slots_of([4] * 4, [0] * 4), [torch.float32] * 4, "cpu")
    residence = Residence(pool, home)
    forward = [(0,), (1,), (2,), (3,)]
    residence.begin(forward + forward[::-1])
    residence.need(0)
    assert home.fetched == [0, 1]
    residence.need(1)
    assert home.fetched == [0, 1, 2]
    for blocks in (2, 3, 3, 2, 1, 0):
        residence.need(blocks)
    assert home.fetched == [0, 1, 2, 3, 1, 0]


class BrokenOnce(CountingHome):
    """One fetch fails, when it begins or when it is waited for."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.is_broken = False

    def begin_fetch(self, block: int, buffer: Tensor) -> CountingHome:
        if self.is_broken and self.where == "begin":
            raise KeyboardInterrupt
        super().begin_fetch(block, buffer)
        if self.is_broken:
            buffer.fill_(-1)
        return self

    def wait(self) -> None:
        if self.is_broken:
            raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["begin", "wait"])
def test_a_block_whose_fetch_failed_is_fetched_again(where: str) -> None:
    """A script catches Ctrl-C, or an error, and continues."""
    home = BrokenOnce(where)
    pool = Pool([4, 4], [0, 0], [torch.float32] * 2, "cpu")
    residence = Residence(pool, home)
    residence.begin([(0,), (1,)])
    residence.need(0)
    home.is_broken = True
    with pytest.raises(KeyboardInterrupt):
        residence.need(1)
    home.is_broken = False
    residence.begin([(1,)])
    residence.need(1)
    assert pool.buffer(1).tolist() == [1.0] * 4


def test_recomputed_regions_run_forward_again() -> None:
    uses = [Use((0,), None), Use((1,), 0), Use((2,), 0), Use((3,), None)]
    assert backward_uses(uses) == [(3,), (1,), (2,), (2,), (1,), (0,)]


# ---- plans

WIDTH = 64


def model(num_layers: int = 8) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(num_layers):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers)


def planned(memory_bytes: tuple[int, ...], **settings: Any) -> Plan:
    devices = []
    for rank, memory in enumerate(memory_bytes):
        kind = DeviceKind(f"GPU-{memory}", 10 * TERA, memory, 500 * GIGA)
        devices.append(Device(rank, "host", rank, kind))
    cluster = Cluster(tuple(devices), PCIE_3_X16, ETHERNET_50G)
    return wh.plan(
        model(),
        torch.zeros(6, WIDTH),
        loss=lambda output, batch: output.square().mean(),
        cluster=cluster,
        config=settings,
    )


NUM_BYTES = 4 * sum(parameter.numel() for parameter in model().parameters())


def test_parts_follow_free_memory_and_the_plan_says_so() -> None:
    """Where a third of the state does not fit on the smallest device, it holds less."""
    roomy = planned((10**9,) * 3, zero=3)
    assert (
        len(
            {
                block.interval(rank)[1] - block.interval(rank)[0]
                for block in roomy.blocks
                for rank in range(3)
            }
        )
        <= 2
    )
    small = NUM_BYTES * 3 // 2
    plan = planned((10**9, 10**9, small), zero=3)
    held = [
        sum(block.interval(rank)[1] - block.interval(rank)[0] for block in plan.blocks)
        for rank in range(3)
    ]
    assert held[2] < min(held[:2])
    assert sum(held) * 4 == NUM_BYTES
    text = next(decision.why for decision in plan.decisions if decision.what == "ZeRO")
    assert "ranks 0, 1, 2 hold" in text
    timeline = simulate(plan)
    for device in timeline.devices:
        assert sum(device.peak_bytes.values()) <= device.memory_bytes


def test_auto_takes_the_lowest_level_that_fits() -> None:
    levels = []
    for memory in (20, 9, 7, 5):
        plan = planned((memory * NUM_BYTES // 2,) * 4, zero="auto")
        levels.append(plan.zero)
    assert levels == sorted(levels)
    assert levels[0] == 0 and levels[-1] >= 2
    with pytest.raises(DoesNotFit):
        planned((5 * NUM_BYTES // 2,) * 4, zero=0, strategy="data")


def test_shards_of_a_plan_are_rows_of_every_rank() -> None:
    plan = planned((10**9,) * 3, zero=2)
    weights = Shards(plan)
    states = Shards(plan, "states")
    name = next(name for name in plan.blocks[0].parameters if name.endswith("weight"))
    assert weights.of(name)[0].ranges is None
    parts = [shard for shard in states.of(name) if shard.boxes(shard.whole_shape)]
    assert sum(math.prod(shard.shape or ()) for shard in parts) == WIDTH * WIDTH


def test_a_plan_with_blocks_comes_back_from_its_file(tmp_path: Any) -> None:
    plan = planned((10**9,) * 2, zero=3)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"zero": 4}, "level 4"),
        ({"zero": 0}, "no ZeRO"),
        ({"ends": (74, 4160)}, "in the middle of a row"),
        ({"ends": (4160, 4160, 4160)}, "parts for 3 of 2 ranks"),
        ({"ends": (4160, 64)}, "backwards"),
        ({"ranks": (0, 5)}, "ranks"),
        ({"parameters": ("0.bias", "nobody")}, "nobody"),
        ({"least": 0}, "without samples"),
    ],
)
def test_blocks_that_cannot_be_are_refused(change: dict[str, Any], what: str) -> None:
    plan = planned((10**9,) * 2, zero=3)
    assert contradiction(plan) is None
    first = {key: value for key, value in change.items() if key not in ("zero", "least")}
    blocks = (replace(plan.blocks[0], **first), *plan.blocks[1:])
    broken = replace(
        plan,
        blocks=blocks,
        zero=change.get("zero", 3),
        least_samples=change.get("least", plan.least_samples),
    )
    problem = contradiction(broken)
    assert problem is not None and what in problem


def test_messages_of_levels_are_counted() -> None:
    """A level 3 step is never predicted shorter than one without ZeRO."""
    steps = [
        simulate(planned((10**9,) * 2, strategy="data", zero=level)).step_s for level in range(4)
    ]
    assert steps[3] > steps[1]
    assert steps[1] == pytest.approx(steps[0], rel=0.3)
