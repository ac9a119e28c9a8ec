"""Cases of `test_sharded_ops.py` with matrix products and random numbers: linear layers on grids,
SUMMA, experts, dropout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.integration.sharded_cases import GRIDS, Cutting, distance, everyone, numbers
from tests.layout_parts import index, meaning
from whale.lowering.communication import Draw, drawing
from whale.lowering.exchange import Groups, exchange, sent
from whale.lowering.overlap import overlap
from whale.lowering.sharded_experts import Experts, expert_mm, grouped_mm_of_same_tokens
from whale.lowering.sharded_linear import LinearPlan, Plane, sharded_linear, summa_linear
from whale.lowering.subgroups import Subgroup
from whale.plans.grid import Grid
from whale.plans.layout import Cut, Layout
from whale.sharding.redistribution import plan_redistribution
from whale.sharding.redistribution_steps import Redistribution


def part(x: Tensor, layout: Layout, grid: Grid) -> Tensor:
    values = np.asarray(x.detach().numpy()[index(layout, grid, dist.get_rank())])
    return torch.from_numpy(values.copy()).requires_grad_(x.requires_grad)


def total_error(local: Tensor, layout: Layout, grid: Grid, expected: Tensor) -> float:
    """How far the value that all devices' parts mean is from what it should be."""
    layouts = [
        np.round(values, 11) for values in everyone(local.detach().numpy())
    ]  # `meaning` wants equal parts to be equal
    return distance(torch.from_numpy(meaning(layouts, layout, grid)), expected.detach())


def linear_layers(groups: Groups) -> Iterator[tuple[str, float]]:
    """Kinds A and B of research/tensor3d.md 0 on several grids: value, gradients, and bytes against
    the formula of 1.1.
    """
    for grid in GRIDS:
        for rows_axis, columns_axis in (("y", "x"), ("x", "y")):
            for keep, num_chunks in ((True, 1), (False, 1), (True, 3)):
                is_even = not grid.work
                m, k, n = (16, 24, 8) if is_even else (13, 11, 7)
                error, num_sent = one_linear(
                    grid, rows_axis, columns_axis, (m, k, n), (keep, num_chunks), groups
                )
                yield "linear", error
                if is_even:
                    out = grid.size(rows_axis)
                    into = grid.size(columns_axis)
                    gz = grid.gz
                    formula = 2 * ((out - 1) * m * k + (gz - 1) * k * n + (into - 1) * m * n)
                    formula += 0 if keep else (out - 1) * m * k + (gz - 1) * k * n
                    yield "linear: bytes", abs(num_sent - 8 * formula // grid.num_devices)


def one_linear(
    grid: Grid,
    rows: str,
    columns: str,
    sizes: tuple[int, int, int],
    way: tuple[bool, int],
    groups: Groups,
) -> tuple[float, int]:
    """`way`: whether gathered tensors are kept, chunks of the gather of x.

    X: rows (z, rows), columns `columns`; W: out `rows`, in (`columns`, z); Y: rows (z, columns),
    columns `rows`."""
    m, k, n = sizes
    place = dist.get_rank()
    x = numbers(m, k)
    w = numbers(n, k)
    b = numbers(n)
    x_cut = (Cut(m), Cut(k))
    w_cut = (Cut(n), Cut(k))
    y_cut = (Cut(m), Cut(n))
    x_layout = Layout(x_cut, (("z", rows), (columns,)))
    x_used = Layout(x_cut, (("z",), (columns,)))
    w_layout = Layout(w_cut, ((rows,), (columns, "z")), stored=frozenset("z"))
    w_used = Layout(w_cut, ((rows,), (columns,)))
    y_product = Layout(y_cut, (("z",), (rows,)), frozenset(columns))
    y_layout = Layout(y_cut, (("z", columns), (rows,)))
    b_layout = Layout((Cut(n),), ((rows,),))
    plan = LinearPlan(
        plan_redistribution(x_layout, x_used, grid, place),
        plan_redistribution(w_layout, w_used, grid, place),
        plan_redistribution(y_product, y_layout, grid, place),
        *way,
    )
    local = part(x, x_layout, grid), part(w, w_layout, grid), part(b, b_layout, grid)
    sent.reset()
    y = sharded_linear(*local, plan, groups)
    expected = torch.nn.functional.linear(x, w, b)
    gradient = numbers(m, n, seed=9).detach()
    got = torch.autograd.grad(y, local, part(gradient, y_layout, grid))
    num_sent = sent.num_bytes
    wanted = torch.autograd.grad(expected, (x, w, b), gradient)
    layouts = (x_layout, w_layout, b_layout)
    errors = [
        total_error(g, layout.conjugate(grid), grid, v)
        for g, layout, v in zip(got, layouts, wanted)
    ]
    return max(total_error(y, y_layout, grid, expected), *errors), num_sent


def summa(groups: Groups) -> Iterator[tuple[str, float]]:
    """2.5-D on 2 x 2 x 2, even (with bytes: 3 (q-1)/q^2 (MK/d + KN)) and uneven."""
    place = dist.get_rank()
    for grid, (m, k, n) in [
        (Grid(2, 2, 2), (8, 12, 4)),
        (Grid(2, 2, 2, work={"x": (2, 1), "y": (2, 1)}), (9, 7, 5)),
    ]:
        x = numbers(3, m, k)
        w = numbers(n, k)
        b = numbers(n)
        x_layout = Layout((Cut(3), Cut(m), Cut(k)), ((), ("z", "y"), ("x",)))
        w_layout = Layout((Cut(n), Cut(k)), (("x",), ("y",)))
        b_layout = Layout((Cut(n),), (("x",),))
        y_layout = Layout((Cut(3), Cut(m), Cut(n)), ((), ("z", "y"), ("x",)))
        panels = tuple(
            b - a for a, b in (x_layout.granules(grid, t, 2) for t in grid.subgroup(0, "x"))
        )
        plane = Plane(
            Subgroup.of(grid, place, "x", groups), Subgroup.of(grid, place, "y", groups), panels
        )
        local = part(x, x_layout, grid), part(w, w_layout, grid), part(b, b_layout, grid)
        sent.reset()
        y = summa_linear(*local, plane)
        expected = torch.nn.functional.linear(x, w, b)
        gradient = numbers(3, m, n, seed=9).detach()
        got = torch.autograd.grad(y, local, part(gradient, y_layout, grid))
        if not grid.work:
            yield "summa: bytes", abs(sent.num_bytes - 8 * 3 * (3 * m * k // 2 + k * n) // 4)
        wanted = torch.autograd.grad(expected, (x, w, b), gradient)
        yield "summa", total_error(y, y_layout, grid, expected)
        for g, layout, v in zip(got, (x_layout, w_layout, b_layout), wanted):
            yield "summa", total_error(g, layout.conjugate(grid), grid, v)


def experts(cutting: Cutting) -> Iterator[tuple[str, float]]:
    """5 experts, different numbers of tokens (none for some), K and N different; the reference does
    one expert after the other.
    """
    num_experts = 5
    k = 3
    n = 4
    weight = numbers(num_experts, k, n)
    places = cutting.grid.subgroup(cutting.place, cutting.axes)
    layout = Layout((Cut(num_experts),), (cutting.axes,))
    of_line = Experts(
        tuple(layout.granules(cutting.grid, place, 0) for place in places),
        cutting.subgroup,
        num_experts,
    )
    mine = cutting.part(weight, 0)
    counts = torch.tensor(
        [[(3 * i + 2 * e) % 4 for e in range(num_experts)] for i in range(len(places))]
    )
    chosen = [torch.arange(num_experts).repeat_interleave(row).flip(0) for row in counts]
    tokens = [numbers(len(ids), k, seed=20 + i) for i, ids in enumerate(chosen)]
    outputs = [torch.einsum("tk,tkn->tn", x, weight[ids]) for x, ids in zip(tokens, chosen)]
    gradients = [numbers(len(ids), n, seed=40 + i).detach() for i, ids in enumerate(chosen)]
    at = cutting.subgroup.index
    d_weight = torch.autograd.grad(outputs, weight, gradients, retain_graph=True)[0]
    d_tokens = torch.autograd.grad(outputs[at], tokens[at], gradients[at], retain_graph=True)[0]

    x = tokens[at].detach().clone().requires_grad_()
    y = expert_mm(x, mine, chosen[at], False, of_line)
    dx, dw = torch.autograd.grad(y, (x, mine), gradients[at])
    yield (
        "expert_mm",
        max(
            distance(y, outputs[at]),
            distance(dx, d_tokens),
            distance(dw, cutting.part(d_weight, 0)),
        ),
    )

    x = tokens[0].detach().clone().requires_grad_()
    y = grouped_mm_of_same_tokens(x.flip(0), mine, counts[0].cumsum(0), of_line).flip(0)
    dx, dw = torch.autograd.grad(y, (x, mine), gradients[0])
    d_weight, d_tokens = torch.autograd.grad(outputs[0], (weight, tokens[0]), gradients[0])
    sums = [sum(everyone(value.detach().numpy())[place] for place in places) for value in (y, dx)]
    yield (
        "grouped_mm of the same tokens",
        max(
            distance(torch.from_numpy(sums[0]), outputs[0]),
            distance(torch.from_numpy(sums[1]), d_tokens),
            distance(dw, cutting.part(d_weight, 0)),
        ),
    )


def random_numbers() -> Iterator[tuple[str, float]]:
    """Equal numbers exactly where the layout is the same; the stream of the chunk is untouched;
    attention draws too.
    """
    grid = Grid(2, 2, 2)
    place = dist.get_rank()
    layout = Layout((Cut(200), Cut(4)), (("z",), ("x",)))
    torch.manual_seed(11)  # the chunk's seed, on all devices
    state = torch.get_rng_state()
    x = torch.ones(layout.local_shape(grid, place), requires_grad=True)
    draws = [Draw.of(number, layout, grid, place) for number in range(3)]
    with drawing(draws[0], x.device):
        first = F.dropout(x, 0.25)
    with drawing(draws[1], x.device):
        second = F.dropout(x, 0.25)
    (gradient,) = torch.autograd.grad(first, x, torch.ones_like(x))
    q = torch.ones(2, 2, 6, 8)
    with drawing(draws[2], q.device):
        attention = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    yield "draws leave the stream alone", float(not torch.equal(state, torch.get_rng_state()))
    yield "backward of dropout", float(not torch.equal(gradient, first.detach()))
    yield "another operation draws other numbers", float(torch.equal(first, second))
    yield "share that is kept", max(0.0, abs(float((first > 0).float().mean()) - 0.75) - 0.08)
    for values in (first.detach(), attention):
        others = everyone(values.numpy())
        for other, value in enumerate(others):
            same = all(
                grid.coordinate(other, axis) == grid.coordinate(place, axis) for axis in "xz"
            )
            yield (
                "draws are equal where the value is the same",
                float(np.array_equal(value, others[place]) != same),
            )


class Exchanged(torch.nn.Module):
    """An exchange as a module of a graph."""

    is_gather = True

    def __init__(self, plan: Redistribution, groups: Groups) -> None:
        super().__init__()
        self.plan = plan
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        return exchange(x, self.plan, self.groups)


def chain(grid: Grid, m: int, width: int, groups: Groups) -> torch.fx.GraphModule:
    """Three linear layers of kinds A, B, A, with an exchange in front of every operand and behind
    every product.
    """
    root = torch.nn.Module()
    graph = torch.fx.Graph()
    place = dist.get_rank()
    cuts = (Cut(m), Cut(width))
    value = graph.placeholder("x")
    for number, (rows, columns) in enumerate([("y", "x"), ("x", "y"), ("y", "x")]):
        weight = Layout((Cut(width), Cut(width)), ((rows,), (columns, "z")), stored=frozenset("z"))
        root.register_parameter(
            f"w{number}",
            torch.nn.Parameter(part(numbers(width, width, seed=number), weight, grid).detach()),
        )
        plans = [
            plan_redistribution(
                Layout(cuts, (("z", rows), (columns,))),
                Layout(cuts, (("z",), (columns,))),
                grid,
                place,
            ),
            plan_redistribution(
                weight, replace(weight, axes=((rows,), (columns,)), stored=frozenset()), grid, place
            ),
            plan_redistribution(
                Layout(cuts, (("z",), (rows,)), frozenset(columns)),
                Layout(cuts, (("z", columns), (rows,))),
                grid,
                place,
            ),
        ]
        for name, plan in zip("xwy", plans):
            root.add_module(f"{name}_{number}", Exchanged(plan, groups))
        gathered = graph.call_module(f"x_{number}", (value,))
        other = graph.call_module(f"w_{number}", (graph.create_node("get_attr", f"w{number}"),))
        product = graph.call_function(torch.ops.aten.linear.default, (gathered, other))
        value = graph.call_function(
            torch.ops.aten.gelu.default, (graph.call_module(f"y_{number}", (product,)),)
        )
    graph.output(value)
    return torch.fx.GraphModule(root, graph)


def overlapped(groups: Groups) -> Iterator[tuple[str, float]]:
    """With messages under the work: the same bits. On the cube linear layers become one call, along
    z the next weight begins early.
    """
    m = 16
    width = 16
    for grid, keep in [
        (Grid(2, 2, 2), True),
        (Grid(2, 2, 2), False),
        (Grid(1, 1, 8), True),
        (Grid(1, 1, 8), False),
    ]:
        modules = [chain(grid, m, width, groups) for _ in range(2)]
        overlap(modules[1], keep)
        x = part(
            numbers(m, width, seed=30).detach(),
            Layout((Cut(m), Cut(width)), (("z", "y"), ("x",))),
            grid,
        )
        results = []
        for module in modules:
            mine = x.clone().requires_grad_()
            y = module(mine)
            results.append(
                [y, *torch.autograd.grad(y, [mine, *module.parameters()], torch.ones_like(y))]
            )
        yield "overlap", max(distance(a, b) for a, b in zip(*results))
        calls = [str(node.target) for node in modules[1].graph.nodes if node.op.startswith("call")]
        if grid.gx > 1:
            yield (
                "overlap: linear layers are one call",
                float(sum(call.startswith("linear_of_") for call in calls) != 3),
            )
        else:
            yield (
                "overlap: weights begin early",
                float(calls.index("w_1_begins") > calls.index("aten.linear.default")),
            )
