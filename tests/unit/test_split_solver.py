"""The solver of `split`: the optimum of small problems by brute force, patterns and bytes as the
formulas of tensor parallelism say.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import Node

import whale as wh
from tests.split_oracle import Nothing, local_weights, whole_program
from tests.thorough import many
from whale import api
from whale.capture.batch import read_batch
from whale.planning.grids import grid_shapes
from whale.plans.grid import Grid
from whale.plans.layout import Layout
from whale.plans.sharding import Sharding
from whale.sharding import eliminate
from whale.sharding.eliminate import Tables
from whale.sharding.emit import emit
from whale.sharding.reasons import with_reasons
from whale.sharding.redistribution import plan_redistribution
from whale.sharding.redistribution_costs import GridCosts
from whale.sharding.solve import solve
from whale.sharding.space import Space

BYTES_ONLY = GridCosts(
    latency_s=0.0,
    flop_per_s=1e30,
    memory_bytes_per_s=1e30,
    bytes_per_s=dict.fromkeys("xyz", 1.0),
    memory_price=1e-12,
)
WIDTH = 64
HEADS = 16
LENGTH = 32
SAMPLES = 64
ITEM = 4
"""bytes of a number"""


@settings(max_examples=many(300), deadline=None)
@given(st.data())
def test_elimination_finds_the_optimum(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    tables = Tables(sizes)
    generator = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    for _ in range(data.draw(st.integers(1, 8))):
        chosen = data.draw(
            st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=3, unique=True)
        )
        tables.add(
            chosen, generator.integers(0, 9, [sizes[variable] for variable in chosen]).astype(float)
        )

    def cost(choice: tuple[int, ...]) -> float:
        return sum(
            float(table.costs[tuple(choice[variable] for variable in table.variables)])
            for table in tables.tables
        )

    found, total = tables.solve()
    assert (
        total == min(cost(choice) for choice in product(*map(range, sizes))) == cost(tuple(found))
    )


def test_variables_are_settled_where_tables_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in a loop over time ended in a traceback: 12,288,000 entries on a single axis."""
    monkeypatch.setattr(eliminate, "LARGEST_TABLE", 30)
    generator = np.random.default_rng(0)
    pairs = [(one, other) for one in range(6) for other in range(one)]
    tables = Tables([3] * 6)
    costs = {pair: generator.random((3, 3)) for pair in pairs}
    for pair, table in costs.items():
        tables.add(pair, table)
    tables.add([0], np.array([1.0, 0.0, 2.0]))
    with pytest.raises(eliminate.TooWide):
        tables.solve()

    def cost(chosen: Sequence[int]) -> float:
        alone = (1.0, 0.0, 2.0)[chosen[0]]
        return alone + sum(table[chosen[i], chosen[j]] for (i, j), table in costs.items())

    everything = [cost(chosen) for chosen in product(range(3), repeat=6)]
    chosen, total = tables.solve(is_exact=False)
    assert total == pytest.approx(cost(chosen))
    assert total <= np.quantile(everything, 0.05)


class Block(nn.Module):
    """Attention and MLP of a transformer, without biases and norms: what the formulas count."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Blocks(nn.Module):
    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


@cache
def space_of(num_blocks: int) -> Space:
    layout, tensors = read_batch(torch.zeros(2, LENGTH, WIDTH))
    return Space(
        whole_program(api._prepare(Blocks(num_blocks), layout, tensors, None, wh.Config(), "cpu"))
    )


def sharded(num_blocks: int, shape: tuple[int, int, int]) -> Sharding:
    space = space_of(num_blocks)
    return solve(space.program, Grid(*shape), SAMPLES, BYTES_ONLY, space=space)


def formula(shape: tuple[int, int, int]) -> float:
    """research/tensor3d.md 1.1 for qkv (kind A), out (B), up (A), down (B); of both ways to lay the
    axes the better one.
    """
    rows = SAMPLES * LENGTH

    def sent(gx: int, gy: int, gz: int) -> float:
        products = (
            (WIDTH, 3 * WIDTH, gx, gy),
            (WIDTH, WIDTH, gy, gx),
            (WIDTH, 4 * WIDTH, gx, gy),
            (4 * WIDTH, WIDTH, gy, gx),
        )
        elements = sum(
            (b - 1) * rows * k + (gz - 1) * k * n + (a - 1) * rows * n for k, n, a, b in products
        )
        return 2 * elements / (gx * gy * gz) * ITEM

    gx, gy, gz = shape
    return min(sent(gx, gy, gz), sent(gy, gx, gz))


@pytest.mark.parametrize("shape", [*grid_shapes(8), (4, 4, 4), (2, 8, 4), (8, 8, 1)], ids=str)
def test_a_block_is_predicted_to_send_what_the_formula_says(shape: tuple[int, int, int]) -> None:
    assert sharded(3, shape).sent_bytes - sharded(2, shape).sent_bytes == pytest.approx(
        formula(shape)
    )


class Counted(Nothing):
    """Counts what the exchanges of one device would send."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.elements = 0

    def exchange(self, source: Layout, target: Layout, place: int, gradient: bool) -> nn.Module:
        plan = plan_redistribution(source, target, self.grid, place, backward=gradient)
        self.elements += sum(step.num_sent for step in (*plan.forward, *plan.backward))
        return nn.Identity()


@pytest.mark.parametrize("shape", grid_shapes(8), ids=str)
def test_the_graphs_of_a_block_send_what_the_formula_says(shape: tuple[int, int, int]) -> None:
    counted = []
    for num_blocks in (2, 3):
        space = space_of(num_blocks)
        sharding = sharded(num_blocks, shape)
        count = Counted(Grid(*shape))
        weights = {
            str(node.target): torch.zeros(node.meta["val"].shape) for node in space.program.state
        }
        emit(space, sharding, 0, SAMPLES, local_weights(space, sharding, 0, weights), count)
        counted.append(count.elements)
    assert (counted[1] - counted[0]) * ITEM == pytest.approx(formula(shape))


def test_one_axis_is_column_then_row() -> None:
    space = space_of(2)
    names = [node.name for node in space.program.captured.graph.nodes]
    choices = {
        names[index]: choice[1]
        for index, choice in sharded(2, (1, 4, 1)).choices.items()
        if names[index].startswith("linear")
    }
    assert [choices[name] for name in list(choices)[1:]] == ["n", "k", "n", "k"] * 2


def test_gathered_weights_are_stored_in_parts() -> None:
    """(1, 1, 8) is ZeRO-3: every weight is an eighth, and cut only to be stored."""
    sharding = sharded(2, (1, 1, 8))
    total = sum(torch.Size(layout.shape).numel() for layout in sharding.stored.values()) * ITEM
    assert sharding.weight_bytes == total / 8
    assert all(layout.stored == {"z"} for layout in sharding.stored.values())


def test_readers_share_one_gather() -> None:
    """q, k and v as three products gather their input once, and its gradient is summed once."""

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.q, self.k, self.v = (
                nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
            )

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            return (self.q(x).tanh() + self.k(x).tanh() + self.v(x).tanh()).square().sum()

    layout, tensors = read_batch(torch.zeros(2, LENGTH, WIDTH))
    space = Space(whole_program(api._prepare(Three(), layout, tensors, None, wh.Config(), "cpu")))
    sharding = solve(space.program, Grid(1, 4, 1), SAMPLES, BYTES_ONLY, space=space)
    once = 2 * 3 / 4 * SAMPLES * LENGTH * WIDTH * ITEM  # a gather and, backward, a reduce-scatter
    assert sharding.sent_bytes == pytest.approx(once)


class Layers(nn.Module):
    """Equal layers between an embedding and a head; each also gives something to the end."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.words = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(number))
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        means = []
        for block in self.blocks:
            x = block(x)
            means.append(x.mean(-1))
        return (
            F.cross_entropy(self.head(x).flatten(0, 1), words.flatten())
            + torch.stack(means).square().mean()
        )


@pytest.mark.parametrize("shape", [(1, 4, 1), (2, 2, 1), (2, 2, 2), (1, 2, 4)])
def test_three_of_many_equal_layers_say_it_all(shape: tuple[int, int, int]) -> None:
    """The result is as cheap as with all seven layers looked at, but for what layers at the ends
    could gain by themselves.
    """
    space = layers_space()
    grid = Grid(*shape)
    costs = GridCosts(bytes_per_s=dict.fromkeys("xyz", 1e9))
    quick, whole = (
        solve(space.program, grid, SAMPLES, costs, space=space, every_layer=every)
        for every in (False, True)
    )
    assert len(space.repeats(SAMPLES, {}, {}).alike) > 4 * 10, (
        "four layers of more than ten operations are left out"
    )
    assert quick.seconds == pytest.approx(whole.seconds, rel=0.02)
    assert (
        quick.sent_bytes == pytest.approx(whole.sent_bytes, rel=0.02)
        and quick.weight_bytes == whole.weight_bytes
    )


@cache
def layers_space() -> Space:
    layout, tensors = read_batch((torch.zeros(4, LENGTH, dtype=torch.long),))
    return Space(whole_program(api._prepare(Layers(7), layout, tensors, None, wh.Config(), "cpu")))


def test_layers_that_are_used_again_make_no_run() -> None:
    """Three layers in three rounds: a layer of the second round has no parameters of its own."""

    class Rounds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                for layer in self.layers:
                    x = torch.tanh(layer(x))
            return x.square().sum()

    layout, tensors = read_batch(torch.zeros(2, LENGTH, WIDTH))
    space = Space(whole_program(api._prepare(Rounds(), layout, tensors, None, wh.Config(), "cpu")))
    quick, whole = (
        solve(space.program, Grid(1, 2, 1), SAMPLES, BYTES_ONLY, space=space, every_layer=every)
        for every in (False, True)
    )
    assert quick.seconds == whole.seconds and quick.sent_bytes == whole.sent_bytes


@pytest.mark.parametrize("shape", [(1, 4, 1), (2, 2, 1)])
def test_a_reason_names_the_next_best_pattern_and_what_it_would_cost(
    shape: tuple[int, int, int],
) -> None:
    """Against solving again with everything else as it was, for every other option of the
    operation.
    """
    space = space_of(2)
    grid = Grid(*shape)
    costs = GridCosts(bytes_per_s=dict.fromkeys("xyz", 1e9))
    chosen = solve(space.program, grid, SAMPLES, costs, space=space, every_layer=True)
    reasons = {
        each.node: each.why for each in with_reasons(space, chosen, SAMPLES, costs).operations
    }
    nodes = list(space.program.captured.graph.nodes)
    compared = 0
    for index, why in reasons.items():
        found = re.fullmatch(r"next best is (.*): ([0-9.]+) (s|ms|us) more.*", why)
        if found is None or compared == 4:
            continue
        compared += 1
        more = min(
            _pinned(space, chosen, nodes[index], names, grid, costs)
            for names in _one_axis_changed(space, chosen, index, grid)
        )
        assert float(found[2]) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[found[3]] == pytest.approx(
            more - chosen.seconds, rel=0.01
        )
    assert compared == 4


def _one_axis_changed(
    space: Space, chosen: Sharding, index: int, grid: Grid
) -> list[tuple[str, str, str]]:
    names = chosen.choices[index]
    node = list(space.program.captured.graph.nodes)[index]
    return [
        (*names[:place], option.name, *names[place + 1 :])  # type: ignore[misc]
        for place, axis in enumerate("xyz")
        for option in (space.axis_options(node, axis) if axis in grid.axes else ())
        if option.name != names[place]
    ]


def _pinned(
    space: Space,
    chosen: Sharding,
    node: Node,
    names: tuple[str, str, str],
    grid: Grid,
    costs: GridCosts,
) -> float:
    """Seconds of the stage when this operation does so and all others as chosen."""
    pinned = Space(space.program)
    nodes = list(space.program.captured.graph.nodes)
    wanted = {nodes[index]: choice for index, choice in chosen.choices.items()} | {node: names}
    pinned.joint_options = lambda each, axes, _: [  # type: ignore[method-assign]
        tuple(
            next(o for o in pinned.options[each] if o.name == wanted[each]["xyz".index(axis)])
            for axis in axes
        )
    ]
    own = {each: number for number, each in enumerate(pinned.operations)}
    pinned.signatures = lambda *_: own  # type: ignore[method-assign]  # operations alike would all do as the first of them
    if (
        node in (each for each in space.operations if space.is_product(each))
        and grid.gx > 1
        and len(set(names[:2])) == 1
    ):
        return float("inf")  # x and y cut different dims of a weight
    return solve(space.program, grid, SAMPLES, costs, space=pinned, every_layer=True).seconds
