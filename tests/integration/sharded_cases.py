"""Cases of `test_sharded_ops.py`: each runs on every rank and gives how far it is from the same
thing in one process.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tests.layout_parts import local_parts, meaning
from tests.thorough import IS_THOROUGH
from whale.lowering import exchange as exchanges
from whale.lowering.exchange import Groups, exchange, sent
from whale.lowering.sharded_norms import batch_norm, layer_norm, rms_norm
from whale.lowering.sharded_vocabulary import argmax, cross_entropy, embedding, log_softmax, softmax
from whale.lowering.subgroups import Subgroup
from whale.plans.grid import AXES, Grid
from whale.plans.layout import Cut, Layout, whole
from whale.sharding import redistribution
from whale.sharding.redistribution import plan_redistribution

NUM_RANKS = 8
GRIDS = [
    Grid(2, 2, 2),
    Grid(1, 8, 1),
    Grid(2, 4, 1, work={"y": (3, 1, 0, 2)}),
    Grid(4, 1, 2, work={"x": (1, 2, 1, 1), "z": (3, 1)}),
]


def make_groups(grids: list[Grid]) -> Groups:
    """All subgroups of all grids, made by all ranks in one order."""
    sets = [axes for count in (1, 2, 3) for axes in itertools.combinations(AXES, count)]
    subgroups = {
        grid.subgroup(place, axes)
        for grid in grids
        for axes in sets
        for place in range(grid.num_devices)
    }
    return {places: dist.new_group(list(places)) for places in sorted(subgroups) if len(places) > 1}


# ---- exchanges
# ----------------------------------------------------------------------------------------------------------


def random_layout(draw: random.Random, shape: tuple[int, ...]) -> Layout:
    cuts = []
    for size in shape:
        segments = draw.choice([n for n in (1, 2, 3) if size % n == 0])
        unit = draw.choice([n for n in (1, 2, 3) if (size // segments) % n == 0])
        cuts.append(Cut(size // segments // unit, unit, segments))
    axes: list[list[str]] = [[] for _ in shape]
    partial = set()
    for axis in draw.sample(AXES, 3):
        role = draw.choice(["same", "partial", *range(len(shape))])
        if role == "partial":
            partial.add(axis)
        elif role != "same":
            axes[role].append(axis)
    return Layout(tuple(cuts), tuple(map(tuple, axes)), frozenset(partial))


def everyone(value: np.ndarray) -> list[np.ndarray]:
    values: list[np.ndarray] = [np.empty(0)] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check_exchange(source: Layout, target: Layout, grid: Grid, groups: Groups) -> str:
    """Value and gradient after one exchange of random parts, and the counted bytes; what is wrong,
    or nothing.
    """
    place = dist.get_rank()
    draw = np.random.default_rng(3)
    value, gradient = (draw.integers(-9, 9, source.shape).astype(float) for _ in range(2))
    plan = plan_redistribution(source, target, grid, place)
    x = torch.from_numpy(local_parts(value, source, grid)[place]).requires_grad_()
    sent.reset()
    y = exchange(x, plan, groups)
    arriving = torch.from_numpy(local_parts(gradient, target.conjugate(grid), grid)[place])
    (dx,) = torch.autograd.grad(y, x, arriving)
    problems = []
    if sent.num_bytes != 8 * plan.num_sent:
        problems.append(f"{sent.num_bytes} bytes counted, {8 * plan.num_sent} planned")
    if not y.is_contiguous():
        problems.append("not contiguous")
    if not np.array_equal(meaning(everyone(y.detach().numpy()), target, grid), value):
        problems.append("wrong value")
    if not np.array_equal(meaning(everyone(dx.numpy()), source.conjugate(grid), grid), gradient):
        problems.append("wrong gradient")
    return f"{plan.text} on {grid.name}: {problems}" if problems else ""


def exchange_cases(groups: Groups) -> Iterator[tuple[str, str]]:
    """The three ways of sending: all-to-all, a message to each peer, and (as NCCL does) even
    collectives.
    """
    draw = random.Random(0)
    pairs = []
    for _ in range(40 if IS_THOROUGH else 20):
        shape = tuple(draw.choice([0, 1, 4, 6, 12]) for _ in range(draw.choice([0, 1, 2, 3])))
        pairs.append((random_layout(draw, shape), random_layout(draw, shape), draw.choice(GRIDS)))
    yield "all_to_all", "; ".join(filter(None, (check_exchange(*pair, groups) for pair in pairs)))
    before = exchanges.PEER_TO_PEER_FROM_BYTES, redistribution.TWO_STEPS_FROM
    try:
        exchanges.PEER_TO_PEER_FROM_BYTES = redistribution.TWO_STEPS_FROM = 0
        yield (
            "peer_to_peer",
            "; ".join(filter(None, (check_exchange(*pair, groups) for pair in pairs))),
        )
    finally:
        exchanges.PEER_TO_PEER_FROM_BYTES, redistribution.TWO_STEPS_FROM = before
    yield "even_collectives", "; ".join(even_collectives(groups))


def even_collectives(groups: Groups) -> Iterator[str]:
    """gloo has the collectives of NCCL too, so the code for NCCL runs here."""
    grid = Grid(2, 2, 2)
    cuts = (Cut(8), Cut(4, 3))
    same = whole(cuts)
    for axes in (("x",), ("y",), ("z", "x")):
        for dim in (0, 1):
            shard = replace(same, axes=tuple(axes if d == dim else () for d in range(2)))
            partial = replace(same, partial=frozenset(axes))
            for source, target, name in [
                (shard, same, "gather"),
                (partial, shard, "reduce-scatter"),
                (partial, same, "all-reduce"),
            ]:
                draw = np.random.default_rng(3)
                value = draw.integers(-9, 9, same.shape).astype(float)
                (step,) = plan_redistribution(
                    source, target, grid, dist.get_rank(), even_collectives=True
                ).forward
                x = torch.from_numpy(local_parts(value, source, grid)[dist.get_rank()])
                y = exchanges._start_even(x, step, groups[step.places]).wait()
                if step.pattern != name or not np.array_equal(
                    meaning(everyone(y.numpy()), target, grid), value
                ):
                    yield f"{name} over {axes} of dim {dim}: {step.pattern}"


def types_of_tensors(groups: Groups) -> str:
    """What is only moved may have any type, those that gloo does not know as well; small integers
    also where their largest is sought.
    """
    grid = Grid(2, 2, 2)
    place = dist.get_rank()
    wrong = []
    same = whole([Cut(4), Cut(6)])
    rows, columns = (replace(same, axes=axes) for axes in ((("x", "y"), ()), ((), ("x",))))
    value = np.random.default_rng(3).integers(0, 2, same.shape)
    subgroup = Subgroup.of(grid, place, ("x",), groups)
    for dtype in (torch.bool, torch.int16, torch.uint16, torch.float8_e4m3fn, torch.complex64):
        for target in (columns, same):
            parts = (
                torch.from_numpy(local_parts(value, layout, grid)[place]).to(dtype)
                for layout in (rows, target)
            )
            found = exchange(next(parts), plan_redistribution(rows, target, grid, place), groups)
            expected = next(parts)
            if found.dtype != dtype or not torch.equal(
                found.to(torch.complex64), expected.to(torch.complex64)
            ):
                wrong.append(f"{dtype} to {target.axes}")
    best = argmax(
        torch.from_numpy(local_parts(value, columns, grid)[place]).to(torch.int16),
        1,
        False,
        3 * subgroup.index,
        subgroup,
    )
    return "; ".join(wrong + ["int16: argmax"] * (best.tolist() != value.argmax(1).tolist()))


def same_bits(groups: Groups) -> float:
    """Sums of floating-point numbers are equal to the bit wherever the layout says that they are
    the same; and two may be under way.
    """
    grid = Grid(2, 2, 2)
    torch.manual_seed(dist.get_rank())
    a = torch.randn(5, 33, dtype=torch.float64)
    b = torch.randn(5, 33, dtype=torch.float64)
    same = whole([Cut(5), Cut(33)])
    worst = 0.0
    for limit in (0, 1 << 30):
        before = exchanges.PEER_TO_PEER_FROM_BYTES
        exchanges.PEER_TO_PEER_FROM_BYTES = limit
        (step,) = plan_redistribution(same.conjugate(grid), same, grid, dist.get_rank()).forward
        first = exchanges.start(a, step, groups)
        second = exchanges.start(b, step, groups)
        exchanges.PEER_TO_PEER_FROM_BYTES = before
        results = [second.wait(), first.wait()]
        for result, own in zip(results, (b, a)):
            others = everyone(result.numpy())
            total = sum(everyone(own.numpy()))
            worst = max(
                worst,
                *(float(np.abs(other - others[0]).max()) * 1e20 for other in others),
                float(np.abs(total - others[0]).max()),
            )
    return worst


# ---- operations
# ---------------------------------------------------------------------------------------------------------


class Cutting:
    """One dim of size n cut over a subgroup of a grid, with uneven and empty parts."""

    def __init__(self, number: int, grid: Grid, axes: tuple[str, ...], groups: Groups) -> None:
        self.number = number
        self.grid = grid
        self.axes = axes
        self.place = dist.get_rank()
        self.subgroup = Subgroup.of(grid, self.place, axes, groups)

    def bounds(self, n: int) -> tuple[int, int]:
        return Layout((Cut(n),), (self.axes,)).granules(self.grid, self.place, 0)

    def part(self, x: Tensor, dim: int) -> Tensor:
        first, stop = self.bounds(x.shape[dim])
        return x.detach().narrow(dim, first, stop - first).clone().requires_grad_(x.requires_grad)


def cuttings(groups: Groups) -> Iterator[Cutting]:
    lines = [(0, "x"), (0, "zy"), (1, "y"), (2, "y"), (3, "x"), (3, "y")]
    for number, (grid, axes) in enumerate(lines):
        yield Cutting(number, GRIDS[grid], tuple(axes), groups)


def distance(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    if a.shape != b.shape:
        return float("inf")
    return float((a - b).detach().abs().max()) if a.numel() else 0.0


def compared(
    expected: Tensor, result: Tensor, leaves, parts, cutting: Cutting, dim: int, dims
) -> float:
    """A result that is cut like its input, and the gradients of leaves cut on `dims`."""
    gradient = torch.randn(
        expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(1)
    )
    worst = distance(result, cutting.part(expected, dim))
    wanted = torch.autograd.grad(expected, leaves, gradient)
    got = torch.autograd.grad(result, parts, cutting.part(gradient, dim).detach())
    return max(
        worst, *(distance(g, cutting.part(w, d).detach()) for g, w, d in zip(got, wanted, dims))
    )


def numbers(*shape: int, seed: int = 0, offset: float = 0.0) -> Tensor:
    values = torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 7 * len(shape))
    )
    return (values + offset).requires_grad_()


def norms(cutting: Cutting) -> Iterator[tuple[str, float]]:
    x = numbers(3, 5, 11, offset=100.0)
    w = numbers(11, seed=1)
    b = numbers(11, seed=2)
    px = cutting.part(x, 2)
    pw = cutting.part(w, 0)
    pb = cutting.part(b, 0)
    yield "layer_norm", compared(
        torch.layer_norm(x, [11], w, b, 1e-5),
        layer_norm(px, 1, pw, pb, 1e-5, cutting.subgroup),
        (x, w, b), (px, pw, pb), cutting, 2, (2, 0, 0),
    )  # fmt: skip
    yield (
        "layer_norm without weight",
        compared(
            torch.layer_norm(x, [5, 11]),
            layer_norm(px, 2, None, None, 1e-5, cutting.subgroup),
            (x,),
            (px,),
            cutting,
            2,
            (2,),
        ),
    )
    yield (
        "rms_norm",
        compared(
            torch.rms_norm(x, [11], w, 1e-6),
            rms_norm(px, 1, pw, 1e-6, cutting.subgroup),
            (x, w),
            (px, pw),
            cutting,
            2,
            (2, 0),
        ),
    )
    samples = numbers(13, 4, 3, offset=10.0)
    weight = numbers(4, seed=1)
    bias = numbers(4, seed=2)
    mine = cutting.part(samples, 0)
    statistics = (
        [torch.zeros(4, dtype=torch.float64) for _ in range(2)],
        [torch.zeros(4, dtype=torch.float64) for _ in range(2)],
    )
    yield "batch_norm", compared(
        torch.batch_norm(samples, weight, bias, *statistics[0], True, 0.1, 1e-5, False),
        batch_norm(mine, weight, bias, *statistics[1], 0.1, 1e-5, cutting.subgroup),
        (samples,), (mine,), cutting, 0, (0,),
    )  # fmt: skip
    yield "running statistics", max(distance(a, b) for a, b in zip(*statistics))


def softmaxes(cutting: Cutting) -> Iterator[tuple[str, float]]:
    for dim, x in [(2, numbers(2, 3, 11)), (1, numbers(3, 9, 2))]:
        part = cutting.part(x, dim)
        yield (
            "softmax",
            compared(
                x.softmax(dim),
                softmax(part, dim, cutting.subgroup),
                (x,),
                (part,),
                cutting,
                dim,
                (dim,),
            ),
        )
        yield (
            "log_softmax",
            compared(
                x.log_softmax(dim),
                log_softmax(part, dim, cutting.subgroup),
                (x,),
                (part,),
                cutting,
                dim,
                (dim,),
            ),
        )
        rounded = (x.detach() * 2).round()  # with equal ones
        first = cutting.bounds(x.shape[dim])[0]
        for keepdim in (False, True):
            best = argmax(cutting.part(rounded, dim), dim, keepdim, first, cutting.subgroup)
            yield "argmax", distance(best, rounded.argmax(dim, keepdim))


def embeddings(cutting: Cutting) -> Iterator[tuple[str, float]]:
    table = numbers(11, 3)
    tokens = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(0))
    part = cutting.part(table, 0)
    first = cutting.bounds(11)[0]
    for padding in (-1, 4):
        expected = torch.embedding(table, tokens, padding)
        result = embedding(part, tokens, first, len(table), padding)
        total = sum_of_parts(result.detach(), cutting)
        gradient = numbers(2, 5, 3, seed=3).detach()
        (wanted,) = torch.autograd.grad(expected, table, gradient)
        (got,) = torch.autograd.grad(result, part, gradient)
        yield "embedding", max(distance(total, expected), distance(got, cutting.part(wanted, 0)))


def sum_of_parts(value: Tensor, cutting: Cutting) -> Tensor:
    """Along the subgroup, in an independent way."""
    values = everyone(value.numpy())
    return torch.from_numpy(
        np.asarray(
            sum(values[place] for place in cutting.grid.subgroup(cutting.place, cutting.axes))
        )
    )


def cross_entropies(cutting: Cutting) -> Iterator[tuple[str, float]]:
    """Every kind of target, class weights, reduction and smoothing, each on two of the six
    cuttings; backward sends nothing.
    """
    generator = torch.Generator().manual_seed(5)
    num = 11
    first = cutting.bounds(11)[0]
    results = []
    wanted = []
    for shape in [(6, num), (2, num, 3), (num,)]:
        logits = (numbers(*shape).detach() * 5 + 30).requires_grad_()
        dim = 0 if len(shape) == 1 else 1
        rows = [size for d, size in enumerate(shape) if d != dim]
        labels = torch.randint(0, num, rows, generator=generator)
        ignored = (
            torch.where(torch.rand(rows, generator=generator) < 0.3, -100, labels)
            if rows
            else labels
        )
        soft = numbers(*shape, seed=2).detach().softmax(dim)
        kinds = list(
            itertools.product((labels, ignored, soft), (0, 1, 2), (False, True), (0.0, 0.1))
        )
        for target, reduction, weighted, smoothing in (
            kinds if IS_THOROUGH else kinds[cutting.number % 3 :: 3]
        ):
            weight = numbers(num, seed=4).detach().abs() if weighted else None
            name = ("none", "mean", "sum")[reduction]
            expected = torch.nn.functional.cross_entropy(
                logits, target, weight, reduction=name, label_smoothing=smoothing
            )
            part = cutting.part(logits, dim)
            mine = cutting.part(target, dim) if target is soft else target
            here = cutting.part(weight, 0) if weight is not None else None
            result = cross_entropy(
                part, mine, here, reduction, -100, smoothing, num, first, cutting.subgroup
            )
            gradient = (
                numbers(*expected.shape, seed=6).detach()
                if expected.ndim
                else torch.tensor(1.5, dtype=torch.float64)
            )
            d_logits = torch.autograd.grad(expected, logits, gradient)[0]
            before = sent.num_bytes
            got = torch.autograd.grad(result, part, gradient)[0]
            yield (
                "cross_entropy",
                distance(got, cutting.part(d_logits, dim)) + (sent.num_bytes - before),
            )
            results.append(result.detach().reshape(-1))
            wanted.append(expected.detach().reshape(-1))
    yield "cross_entropy", distance(sum_of_parts(torch.cat(results), cutting), torch.cat(wanted))
