"""Plans with grids as data: who holds which part of a tensor, which samples enter a device, and
that files of such plans are checked.
"""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import whale as wh
from whale.checkpoint import CheckpointError, Reader, Target, finish, take_snapshot, write_rank
from whale.checkpoint.pieces import StatePart, pieces, read_shard, read_state, state_pieces
from whale.plans.file import diff
from whale.plans.grid import Grid
from whale.plans.layout import Cut, Layout
from whale.plans.plan import Plan
from whale.plans.revise import revise
from whale.plans.samples import SampleMap, divide
from whale.plans.sharding import ShardedOperation, StageSharding, StoredLayout
from whale.plans.shards import Shard, Shards
from whale.plans.shares import Load
from whale.plans.virtual_devices import VirtualDevice
from whale.report.plan_table import print_plan

WIDTH = 6


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).square().mean()


FUSED = Layout((Cut(count=2, segments=3), Cut(WIDTH)), (("y",), ("x",)))
"""of `second.weight`: q, k and v with two heads of one entry each, over y; columns over x"""


@pytest.fixture(scope="module")
def plan() -> Plan:
    """2 model replicas; stage 0 on two devices with half of the samples each, stage 1 on a grid 2 x
    2 x 1 that shards second.weight.
    """
    model = wh.annotate(TwoLayers(), {"first": wh.replicate(2), "second": wh.replicate(4)})
    made = wh.plan(model, torch.randn(24, WIDTH), cluster=12, config={"num_micro_batch": 2})
    grid = Grid(2, 2, 1, work={"x": (1.0, 3.0)})
    devices = (made.virtual_devices[0], replace(made.virtual_devices[1], grid=grid))
    sharding = StageSharding(1, {"second.weight": StoredLayout.of(FUSED)})
    return revise(made, virtual_devices=devices, shardings=(sharding,))


def test_holders_are_the_same_place_of_all_replicas_along_axes_that_do_not_cut(plan: Plan) -> None:
    assert [device.ranks for device in plan.virtual_devices] == [
        ((0, 1), (6, 7)),
        ((2, 3, 4, 5), (8, 9, 10, 11)),
    ]
    shards = Shards(plan)
    assert [shard.ranks for shard in shards.of("second.weight")] == [
        (2, 8),
        (3, 9),
        (4, 10),
        (5, 11),
    ]
    assert [shard.ranks for shard in shards.of("second.bias")] == [(2, 3, 4, 5, 8, 9, 10, 11)]
    assert shards.of("first.weight")[0].ranges is None


def test_parts_put_together_give_the_whole(plan: Plan) -> None:
    whole = nn.Parameter(torch.randn(WIDTH, WIDTH))
    again = torch.full_like(whole, torch.nan)
    for shard in Shards(plan).of("second.weight"):
        part = shard.take(whole)
        assert (
            isinstance(part, nn.Parameter)
            and tuple(part.shape) == shard.shape
            and part.is_contiguous()
        )
        with torch.no_grad():
            shard.put(part, again)
    assert torch.equal(again, whole)
    last = Shards(plan).on(
        "second.weight", 11
    )  # the second head of q, k and v; the columns after the first two of six
    assert torch.equal(last.take(whole), whole[[1, 3, 5]][:, 2:])
    assert [box for box, _ in last.boxes(whole.shape)] == [
        ((row, row + 1), (2, 6)) for row in (1, 3, 5)
    ]


def test_a_weight_that_lies_whole_on_a_grid_is_summed_with_its_other_holders(plan: Plan) -> None:
    """`first.bias` used by the stage without a grid and by the one on the grid, which holds it
    whole.
    """
    stored = {**plan.shardings[0].stored, "first.bias": StoredLayout(((WIDTH, 1, 1),), ("",))}
    tied = revise(
        plan,
        holders={**plan.holders, "first.bias": (0, 1)},
        shardings=(replace(plan.shardings[0], stored=stored),),
    )
    assert [(shard.ranks, shard.ranges) for shard in Shards(tied).of("first.bias")] == [
        (tuple(range(12)), None)
    ]


def test_an_empty_part_meets_nobody() -> None:
    model = wh.annotate(TwoLayers(), {"*": wh.replicate(4)})
    made = wh.plan(model, torch.randn(8, WIDTH), cluster=4)
    layout = Layout((Cut(2, 3), Cut(WIDTH)), (("y",), ()))  # two granules over four devices
    device = replace(made.virtual_devices[0], grid=Grid(1, 4, 1))
    shards = Shards(
        revise(
            made,
            virtual_devices=(device,),
            shardings=(StageSharding(0, {"second.weight": StoredLayout.of(layout)}),),
        )
    )
    assert [(shard.ranks, shard.shape) for shard in shards.of("second.weight")] == [
        ((0,), (3, WIDTH)),
        ((1,), (3, WIDTH)),
        ((2,), (0, WIDTH)),
        ((3,), (0, WIDTH)),
    ]
    assert shards.on("second.weight", 3).boxes((WIDTH, WIDTH)) == []


def test_a_grid_runs_on_the_samples_of_its_replica_and_cuts_what_enters(plan: Plan) -> None:
    """12 samples in a micro-batch, 6 for a replica; a grid 2 x 2 whose x devices have speeds 1 and
    3 cuts 3 + 3 into 1 + 2 (0.75, 2.25).
    """
    samples = SampleMap(plan, 24, 2)
    assert samples.replicas(1) == ((12, 18), (18, 24))
    assert samples.devices(1, 1, 0) == ((18, 21), (21, 24)) == samples.runs(1, 1, 0)
    assert samples.devices(1, 1, 1) == ((18, 19), (19, 21), (21, 22), (22, 24))
    assert samples.runs(1, 1, 1) == ((18, 24),) * 4


def test_a_grid_needs_one_sample_for_each_replica_only(plan: Plan) -> None:
    alone = revise(
        plan,
        device_kinds=("CPU",) * 8,
        stages=(replace(plan.stages[1], index=0, virtual_device=0),),
        holders={},
        shardings=(),
        batch_size=2,
        num_micro_batch=1,
        virtual_devices=(
            replace(plan.virtual_devices[1], index=0, ranks=((0, 1, 2, 3), (4, 5, 6, 7))),
        ),
        device_seconds=(1.0,) * 8,
        device_fixed_seconds=(0.0,) * 8,
        memory=(),
    )
    assert [SampleMap(alone, 2, 1).devices(0, replica, 0) for replica in (0, 1)] == [
        ((0, 0), (0, 1), (1, 1), (1, 1)),
        ((1, 1), (1, 2), (2, 2), (2, 2)),
    ]
    with pytest.raises(ValueError, match="cut over 2 devices"):
        SampleMap(alone, 1, 1)


def test_replicas_share_samples_by_the_slowest_device_of_their_grid(plan: Plan) -> None:
    device = replace(plan.virtual_devices[1], index=0, ranks=((0, 1, 2, 3), (4, 5, 6, 7)))
    loads = [Load(1.0), Load(1.0), Load(2.0), Load(1.0), Load(1.0), Load(1.0), Load(1.0), Load(0.5)]
    division = divide(6, [device], loads, 0)
    assert [share.num_samples for share in division.shares] == [2, 4] and division.slowest_s == 4.0
    assert [share.runs for share in division.shares] == [((2,) * 4,), ((4,) * 4,)]


def test_the_printed_plan_shows_patterns_bytes_and_what_runs_whole(plan: Plan) -> None:
    why = "next best is row over y: 2 ms more"
    operations = [
        ShardedOperation(n, f"blocks.{n}.up: linear", "column over y", 3e6, why=why)
        for n in range(2)
    ]
    operations.append(
        ShardedOperation(
            2, "model: cross_entropy_loss", "by classes over x", 0.0, 2e6, "the only way"
        )
    )
    sharding = replace(
        plan.shardings[0],
        operations=tuple(operations),
        sent_bytes=6e6,
        num_samples=6,
        replicated=("blocks.0: sort", "blocks.1: sort"),
    )
    console = Console(width=160, record=True, file=io.StringIO())
    print_plan(revise(plan, shardings=(sharding,), figures=None), console)
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert (
        "Operations of stage 1 on a grid of 2 x 2 devices, axes x and y (sent: by one device for 6 "
        "samples, forward and backward; 8.00 MB in all)" in lines
    )
    why_in_words = "next best is row-parallel over y: 2 ms more"
    assert f"blocks.*.up: linear 2 column-parallel over y 3.00 MB {why_in_words}" in lines
    assert (
        "model: cross_entropy_loss 1 by classes over x 2.00 MB the only way" in lines
    )  # what it tells others is sent, too
    assert (
        "on every device whole, for want of a rule: blocks.*: sort" in lines
        and "1 of 1 parameters are cut" in lines
    )
    assert any("6 together" in line for line in lines)


def test_a_plan_with_a_grid_is_saved_loaded_and_compared(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    other = replace(
        plan.shardings[0],
        stored={"second.weight": StoredLayout.of(replace(FUSED, axes=(("x",), ("y",))))},
    )
    lines = diff(plan, revise(plan, shardings=(other,)))
    assert [line for line in lines if "stored" in line] == [
        "templates[0].shardings[0].stored.second.weight.axes[0]: y -> x",
        "templates[0].shardings[0].stored.second.weight.axes[1]: x -> y",
    ]
    assert {line.split(".")[1].split("[")[0] for line in lines} == {"boxes", "shardings"}


def edited(plan: Plan, **changes: Any) -> Plan:
    """The plan as somebody would edit its file: nothing else follows."""
    return replace(plan, templates=(replace(plan.template, **changes),))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda plan: edited(plan, shardings=()), r"stages \[\] are sharded, on grids are \[1\]"),
        (
            lambda plan: edited(
                plan,
                shardings=(
                    replace(plan.shardings[0], stored={"first.weight": StoredLayout.of(FUSED)}),
                ),
            ),
            "first.weight is cut on stage 1, which does not hold it",
        ),
        (
            lambda plan: edited(plan, grids=(None, Grid(3, 1, 1))),
            "grid of 3 x 1 x 1 devices and 4 ranks",
        ),
        (
            lambda plan: edited(
                plan,
                shardings=(
                    replace(
                        plan.shardings[0],
                        stored={"second.weight": StoredLayout(((6, 1, 1),) * 2, ("x", "x"))},
                    ),
                ),
            ),
            "an axis may be used once",
        ),
    ],
)
def test_a_plan_file_that_contradicts_itself_is_refused(
    plan: Plan, tmp_path: Path, change, words: str
) -> None:
    change(plan).save(tmp_path / "plan.json")
    with pytest.raises(ValueError, match=words):
        Plan.load(tmp_path / "plan.json")


def on_grid(plan: Plan, grid: Grid, layout: Layout) -> Shards:
    """The weight `second.weight` of the model above, cut like this."""
    stage = replace(plan.stages[1], index=0, virtual_device=0)
    ranks = (tuple(range(grid.num_devices)), tuple(range(grid.num_devices, 2 * grid.num_devices)))
    device = VirtualDevice(0, ranks, grid)
    stored = {"second.weight": StoredLayout.of(layout)}
    shardings = (StageSharding(0, stored),)
    return Shards(
        revise(
            plan,
            device_kinds=("CPU",) * 2 * grid.num_devices,
            stages=(stage,),
            virtual_devices=(device,),
            holders={"second.weight": (0,)},
            shardings=shardings,
        )
    )


GRIDS = {
    "fused, 2 x 2": (Grid(2, 2, 1), FUSED),
    "rows over 3, the first with nothing": (
        Grid(3, 1, 1, work={"x": (0.0, 1.0, 3.0)}),
        Layout((Cut(WIDTH), Cut(WIDTH)), (("x",), ())),
    ),
    "columns over 2, stored over 2": (
        Grid(1, 2, 2),
        Layout((Cut(3, 2), Cut(WIDTH)), (("z",), ("y",)), stored=frozenset("z")),
    ),
    "whole": (Grid(1, 1, 1), Layout((Cut(WIDTH), Cut(WIDTH)), ((), ()))),
}


@pytest.mark.parametrize("source", GRIDS)
def test_any_grid_loads_what_another_saved(plan: Plan, tmp_path: Path, source: str) -> None:
    """Weight, a moment of the same shape, and a step: each rank writes its own; every other grid
    reads its parts of all.
    """
    whole = torch.randn(WIDTH, WIDTH)
    moment = torch.randn(WIDTH, WIDTH)
    shards = on_grid(plan, *GRIDS[source])
    parts = shards.of("second.weight")
    target = Target(tmp_path, 3, "job_1")
    shape = (WIDTH, WIDTH)
    for rank, shard in enumerate(parts):
        is_first = shard is shards.first("second.weight")
        written = [pieces("w", shard.take(whole), shard, shape)]
        state = {"o/m": shard.take(moment), "o/t": torch.tensor(7)}
        written += [
            state_pieces(key, value, StatePart(shard, shape), is_first)
            for key, value in state.items()
        ]
        tensors = {key: value for each, _ in written for key, value in each.items()}
        write_rank(
            target,
            rank,
            take_snapshot(
                tensors, {}, {key: part for _, each in written for key, part in each.items()}
            ),
        )
    finish(target, len(parts), {})
    with Reader(tmp_path) as reader:
        for grid, layout in GRIDS.values():
            for shard in on_grid(plan, grid, layout).of("second.weight"):
                assert torch.equal(
                    read_shard(reader.read, "w", shard, shape, whole.dtype), shard.take(whole)
                )
                part = StatePart(shard, shape)
                assert torch.equal(
                    read_state(reader.read, reader.shapes(), "o/m", part), shard.take(moment)
                )
                assert read_state(reader.read, reader.shapes(), "o/t", part).item() == 7


def test_state_of_another_shape_fits_its_own_part_only(plan: Plan, tmp_path: Path) -> None:
    shards = on_grid(plan, *GRIDS["fused, 2 x 2"])
    shape = (WIDTH, WIDTH)
    target = Target(tmp_path, 3, "job_1")
    for rank, shard in enumerate(shards.of("second.weight")):
        tensors, parts = state_pieces(
            "o/row", torch.full((3, 1), float(rank)), StatePart(shard, shape), rank == 0
        )
        write_rank(target, rank, take_snapshot(tensors, {}, parts))
    finish(target, 4, {})
    with Reader(tmp_path) as reader:
        for rank, shard in enumerate(shards.of("second.weight")):
            assert torch.equal(
                read_state(reader.read, reader.shapes(), "o/row", StatePart(shard, shape)),
                torch.full((3, 1), float(rank)),
            )
        other = on_grid(plan, *GRIDS["columns over 2, stored over 2"]).of("second.weight")[0]
        with pytest.raises(
            CheckpointError,
            match=r"'o/row' belongs to another part .* the grid and the number of devices",
        ):
            read_state(reader.read, reader.shapes(), "o/row", StatePart(other, shape))


STACK = (5, 4, 3)
"""experts and their matrices"""


def stack_parts(*ends: int) -> list[Shard]:
    """A stack cut over its experts, which end there; one part for each rank."""
    matrix = (((0, STACK[1]),), ((0, STACK[2]),))
    return [
        Shard("w", (((start, stop),), *matrix), (rank,), STACK)
        for rank, (start, stop) in enumerate(pairwise((0, *ends)))
    ]


STACKS = {
    "over 2": stack_parts(2, 5),
    "over 3, one without experts": stack_parts(1, 1, 5),
    "an expert each": stack_parts(1, 2, 3, 4, 5),
    "whole": [Shard("w", None, (0,))],
}


@pytest.mark.parametrize("source", STACKS)
def test_statistics_of_the_matrices_of_a_stack_are_cut_anew(tmp_path: Path, source: str) -> None:
    """Row and column means of Adafactor: of each expert, wherever it lies."""
    means = {"o/row": torch.randn(5, 4, 1), "o/column": torch.randn(5, 1, 3)}
    target = Target(tmp_path, 3, "job_1")
    shards = STACKS[source]
    for rank, shard in enumerate(shards):
        experts = slice(*shard.ranges[0][0]) if shard.ranges is not None else slice(None)
        tensors: dict[str, Tensor] = {}
        parts = {}
        for name, whole in means.items():
            part = StatePart(shard, STACK, is_stack=True)
            for found, more in zip(
                (tensors, parts), state_pieces(name, whole[experts], part, False)
            ):
                found.update(more)
        write_rank(target, rank, take_snapshot(tensors, {}, parts))
    finish(target, len(shards), {})
    with Reader(tmp_path) as reader:
        for shard in (shard for every in STACKS.values() for shard in every):
            experts = slice(*shard.ranges[0][0]) if shard.ranges is not None else slice(None)
            for name, whole in means.items():
                part = StatePart(shard, STACK, is_stack=True)
                read = read_state(reader.read, reader.shapes(), name, part)
                assert torch.equal(read, whole[experts])


def test_statistics_of_matrices_that_are_cut_themselves_are_refused(tmp_path: Path) -> None:
    target = Target(tmp_path, 3, "job_1")
    write_rank(target, 0, take_snapshot({"o/row": torch.randn(5, 4, 1)}, {}, {}))
    finish(target, 1, {})
    columns = Shard("w", (((0, 5),), ((0, 4),), ((0, 2),)), (0,), STACK)
    with Reader(tmp_path) as reader, pytest.raises(CheckpointError, match="cannot be cut anew"):
        read_state(reader.read, reader.shapes(), "o/row", StatePart(columns, STACK, is_stack=True))
