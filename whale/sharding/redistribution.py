"""Redistribution: which part of a tensor goes from which device to which when its layout on a grid
changes. Pure data: nothing is sent here.

The value of an element is the sum of what the devices along the partial axes hold. Along one axis a
redistribution does, by the tensor's role there before and after it:

    from \\ to    cut                       same         partial
    cut          all-to-all (or nothing)   all-gather   pad with zeros, local                   (1)
    same         slice, local              nothing      mask: coordinate 0 keeps it, local
    partial      reduce-scatter            all-reduce   nothing

For a receiver r the senders are the devices that agree with r on every axis where nothing has to
move:

    senders(r) = { s : s_q = r_q on every axis q that is same before, or partial after, it }    (2)

An element's coordinates on the axes that cut it are fixed, so along them exactly one sender has it;
along the partial axes that are reduced all have a term. Where a device already has what it needs it
is its own sender, and of several equal holders the one in r's own subgroup sends: nobody receives
what it has, nobody receives anything twice. Terms are added in the order of the places, so all
receivers of an element get the same bits.

A large all-reduce is a reduce-scatter and an all-gather when these send less:

    direct (g - 1) n          in two steps 2 (g - 1) n / g                                      (3)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from whale.plans.grid import Grid, Interval
from whale.plans.layout import Layout, whole
from whale.sharding.redistribution_steps import (
    MovedBlock,
    Ranges,
    Redistribution,
    RedistributionStep,
)

TWO_STEPS_FROM = 65_536
"""elements that two steps must save to be worth one more message: about the 0.2 ms of a hop at 1.3
GB/s (research/tensor3d.md 4.3)
"""

_sent_cache: dict[tuple[object, ...], int] = {}
_plan_cache: dict[tuple[object, ...], Redistribution] = {}
"""equal layers have equal redistributions"""


def plan_redistribution(
    source: Layout,
    target: Layout,
    grid: Grid,
    place: int,
    *,
    even_collectives: bool = False,
    backward: bool = True,
) -> Redistribution:
    """What the device at `place` does to turn one layout into another, and its gradient back.
    `even_collectives`: the backend has fast ones (`Backend.has_even_collectives`).
    """
    if source.shape != target.shape:
        raise ValueError(
            f"a redistribution keeps the tensor: its shape is {source.shape} before and "
            f"{target.shape} after"
        )
    key = (source, target, *_of_grid(grid), place, even_collectives, backward, TWO_STEPS_FROM)
    if key not in _plan_cache:
        _plan_cache[key] = _plan(source, target, grid, place, even_collectives, backward)
    return _plan_cache[key]


def _of_grid(grid: Grid) -> tuple[object, ...]:
    return (
        grid.gx,
        grid.gy,
        grid.gz,
        tuple(sorted(grid.work.items())),
        tuple(sorted(grid.memory.items())),
    )


def _plan(
    source: Layout, target: Layout, grid: Grid, place: int, even_collectives: bool, backward: bool
) -> Redistribution:
    gradient = target.conjugate(grid), source.conjugate(grid)
    return Redistribution(
        source,
        target,
        forward=_steps(source, target, grid, place, even_collectives),
        backward=_steps(*gradient, grid, place, even_collectives) if backward else (),
        sends=bool(_moving_axes(source, target, grid)),
        sends_back=backward and bool(_moving_axes(*gradient, grid)),
    )


def plan_nothing() -> Redistribution:
    """The plan for a tensor that stays as it is."""
    return Redistribution(whole(()), whole(()), (), ())


def route(source: Layout, target: Layout, grid: Grid, even_collectives: bool) -> tuple[Layout, ...]:
    """The layouts that the tensor goes through: `source`, one in between where that sends less, as
    in line (3), `target`. The same on every device.
    """
    summed = [axis for axis in grid.axes if axis in source.partial - target.partial]
    if not summed or (even_collectives and _is_plain_all_reduce(source, target)):
        return source, target
    if prod(source.shape) * prod(grid.size(axis) for axis in summed) <= TWO_STEPS_FROM:
        return source, target
    direct = _most_sent(source, target, grid)
    best = direct - TWO_STEPS_FROM
    chosen: tuple[Layout, ...] = (source, target)
    for middle in _between(source, target, grid, summed) if best > 0 else ():
        sent = _most_sent(source, middle, grid) + _most_sent(middle, target, grid)
        if sent < best:
            best = sent
            chosen = (source, middle, target)
    return chosen


def _between(source: Layout, target: Layout, grid: Grid, summed: Sequence[str]) -> Iterator[Layout]:
    """Layouts in which every element is already reduced: at the place that needs it, to be gathered
    there, or at the place that has it, to be moved then.
    """
    gathered = [axis for axis in summed if axis in target.same_on(grid)]
    moves = any(axis not in summed for axis in _moving_axes(source, target, grid))
    for dim in range(len(target.cuts)):
        if gathered:
            yield replace(target, axes=_also_cut(target, dim, gathered))
        if moves:
            yield replace(
                source, axes=_also_cut(source, dim, summed), partial=source.partial & target.partial
            )


def _also_cut(layout: Layout, dim: int, axes: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    return tuple((*own, *axes) if d == dim else own for d, own in enumerate(layout.axes))


# ---- one step


def _steps(
    source: Layout, target: Layout, grid: Grid, place: int, even_collectives: bool
) -> tuple[RedistributionStep, ...]:
    hops = route(source, target, grid, even_collectives)
    steps = [_Hop(a, b, grid).step(place) for a, b in zip(hops, hops[1:])]
    return tuple(step for step in steps if not step.is_identity)


class _Hop:
    """One step from one layout to another, seen from all places."""

    def __init__(self, source: Layout, target: Layout, grid: Grid) -> None:
        self.source = source
        self.target = target
        self.grid = grid
        same = source.same_on(grid)
        self.summed = [axis for axis in grid.axes if axis in source.partial - target.partial]
        self.masked = [axis for axis in same if axis in target.partial]
        self.padded = [axis for axis in grid.axes if axis in source.sharded & target.partial]
        self.moving = _moving_axes(source, target, grid)
        self._ranges: dict[tuple[object, ...], tuple[Interval, ...]] = {}
        self._overlaps: dict[
            tuple[object, ...], tuple[tuple[Interval, ...], tuple[Interval, ...]]
        ] = {}
        self._counts: dict[tuple[object, ...], int] = {}

    def _ranges_of(self, layout: Layout, place: int, dim: int) -> tuple[Interval, ...]:
        """`layout.ranges`, computed once for all places that have the same."""
        key = (layout is self.source, dim, self._at(layout, place, dim))
        if key not in self._ranges:
            self._ranges[key] = layout.ranges(self.grid, place, dim)
        return self._ranges[key]

    def _at(self, layout: Layout, place: int, dim: int) -> tuple[int, ...]:
        return tuple(self.grid.coordinate(place, axis) for axis in layout.axes[dim])

    def _overlap_of(
        self, sender: int, receiver: int, dim: int
    ) -> tuple[tuple[Interval, ...], tuple[Interval, ...]]:
        key = (dim, self._at(self.source, sender, dim), self._at(self.target, receiver, dim))
        if key not in self._overlaps:
            self._overlaps[key] = _overlap(
                self._ranges_of(self.source, sender, dim),
                self._ranges_of(self.target, receiver, dim),
            )
        return self._overlaps[key]

    def _count(self, layout: Layout, place: int) -> int:
        """Elements that a place holds."""
        return prod(
            sum(b - a for a, b in self._ranges_of(layout, place, dim))
            for dim in range(len(layout.cuts))
        )

    def step(self, place: int) -> RedistributionStep:
        sends = []
        terms: dict[tuple[int, ...], list[MovedBlock]] = {}
        for other in self.grid.subgroup(place, self.moving):  # line (2): to agree is mutual
            leaving = self.parts(place, other)
            if leaving is not None:
                sends.append(MovedBlock(other, leaving[0]))
            arriving = self.parts(other, place)
            if arriving is not None:
                terms.setdefault(self._term(other), []).append(MovedBlock(other, arriving[1]))
        group = self.grid.subgroup(place, self.moving) if self.moving else ()
        if not any(self.num_sent(member) for member in group):
            group = ()
        counts = [self._count(self.source, member) for member in group]
        counts += [self._count(self.target, member) for member in group]
        return RedistributionStep(
            place=place,
            places=group,
            input_shape=self.source.local_shape(self.grid, place),
            shape=self.target.local_shape(self.grid, place),
            sends=tuple(sends),
            terms=tuple(tuple(terms[key]) for key in sorted(terms)),
            pattern=self._pattern(group) if group else "local",
            largest=max(counts, default=0),
        )

    def num_sent(self, place: int) -> int:
        """Elements that this place sends to others. An axis cuts one dim at most: the sum over
        receivers is a product of sums.
        """
        if any(self.grid.coordinate(place, axis) for axis in self.masked):
            return 0
        dims = range(len(self.source.cuts))
        copies = prod(
            self.grid.size(axis) for axis in self.moving if axis not in self.target.sharded
        )
        return copies * prod(self._num_for_all(place, dim) for dim in dims) - prod(
            self._num_for(place, place, dim) for dim in dims
        )

    def _num_for_all(self, place: int, dim: int) -> int:
        """Entries of a dim that this place has for all receivers that differ along the axes which
        cut it then.
        """
        fixed = tuple(
            self.grid.coordinate(place, axis)
            for axis in self.target.axes[dim]
            if axis not in self.moving
        )
        key = (dim, self._at(self.source, place, dim), fixed)
        if key not in self._counts:
            receivers = self.grid.subgroup(
                place, [axis for axis in self.target.axes[dim] if axis in self.moving]
            )
            self._counts[key] = sum(self._num_for(place, other, dim) for other in receivers)
        return self._counts[key]

    def _num_for(self, sender: int, receiver: int, dim: int) -> int:
        return sum(b - a for a, b in self._overlap_of(sender, receiver, dim)[0])

    def parts(self, sender: int, receiver: int) -> tuple[Ranges, Ranges] | None:
        """What goes from one to the other: ranges of the sender's tensor and of the receiver's;
        None when there is nothing.
        """
        if any(self.grid.coordinate(receiver, axis) for axis in self.masked):
            return None
        held = []
        wanted = []
        for dim in range(len(self.source.cuts)):
            here, there = self._overlap_of(sender, receiver, dim)
            if not here:
                return None
            held.append(here)
            wanted.append(there)
        return tuple(held), tuple(wanted)

    def _term(self, sender: int) -> tuple[int, ...]:
        return tuple(
            self.grid.coordinate(sender, axis) for axis in ("z", "y", "x") if axis in self.summed
        )

    def _pattern(self, group: Sequence[int]) -> str:
        """The collective that does it where every device's part is equally large."""
        inputs = {self._count(self.source, place) for place in group}
        outputs = {self._count(self.target, place) for place in group}
        if len(inputs) > 1 or len(outputs) > 1 or self.masked or self.padded:
            return "all-to-all"
        held = inputs.pop()
        wanted = outputs.pop()
        num_terms = prod(self.grid.size(axis) for axis in self.summed)
        if _is_plain_all_reduce(self.source, self.target) and num_terms == len(group):
            return "all-reduce"
        if not self.summed and wanted == held * len(group):
            return "gather"
        if num_terms == len(group) and held == wanted * len(group):
            return "reduce-scatter"
        return "all-to-all"


def _is_plain_all_reduce(source: Layout, target: Layout) -> bool:
    """Whether both are cut alike, and only partial axes become the same everywhere."""
    if source.partial == target.partial or not target.partial <= source.partial:
        return False
    return replace(source, partial=frozenset()) == replace(target, partial=frozenset())


def _moving_axes(source: Layout, target: Layout, grid: Grid) -> tuple[str, ...]:
    """Axes along which something is sent: summed ones, and those that cut a dim of which a device
    may want what another has.
    """
    if prod(source.shape) == 0:
        return ()
    moving = [axis for axis in grid.axes if axis in source.partial - target.partial]
    for dim, axes in enumerate(source.axes):
        for axis in axes:
            if (
                axis in grid.axes
                and axis not in target.partial
                and _leaves(source, target, grid, dim, axis)
            ):
                moving.append(axis)
    return tuple(axis for axis in grid.axes if axis in moving)


def _leaves(source: Layout, target: Layout, grid: Grid, dim: int, axis: str) -> bool:
    """Whether a device may want a part of this dim from another coordinate of the axis: not if the
    axes down to this one cut alike.
    """
    before, after = ([q for q in layout.axes[dim] if q in grid.axes] for layout in (source, target))
    outer = before[: before.index(axis) + 1]
    if after[: len(outer)] != outer:
        return True
    places = grid.subgroup(0, outer)
    held, wanted = (
        [
            Layout((layout.cuts[dim],), (tuple(outer),), stored=layout.stored).ranges(
                grid, place, 0
            )
            for place in places
        ]
        for layout in (source, target)
    )
    return held != wanted


def _most_sent(source: Layout, target: Layout, grid: Grid) -> int:
    """Elements that the device that sends most sends in one step."""
    key = (source, target, *_of_grid(grid))
    if key not in _sent_cache:
        change = _Hop(source, target, grid)
        _sent_cache[key] = max(change.num_sent(place) for place in range(grid.num_devices))
    return _sent_cache[key]


def _overlap(
    held: Sequence[Interval], wanted: Sequence[Interval]
) -> tuple[tuple[Interval, ...], tuple[Interval, ...]]:
    """Index ranges that both have, counted once from the beginning of what the first holds and once
    of what the second does.
    """
    here: list[Interval] = []
    there: list[Interval] = []
    before = 0
    for a, b in held:
        start = 0
        for c, d in wanted:
            first = max(a, c)
            stop = min(b, d)
            if first < stop:
                _append(
                    here,
                    there,
                    (before + first - a, before + stop - a),
                    (start + first - c, start + stop - c),
                )
            start += d - c
        before += b - a
    return tuple(here), tuple(there)


def _append(here: list[Interval], there: list[Interval], mine: Interval, yours: Interval) -> None:
    """Neighbours on both sides are joined."""
    if here and here[-1][1] == mine[0] and there[-1][1] == yours[0]:
        here[-1] = (here[-1][0], mine[1])
        there[-1] = (there[-1][0], yours[1])
    else:
        here.append(mine)
        there.append(yours)
