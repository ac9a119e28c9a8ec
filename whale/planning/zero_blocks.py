"""ZeRO: the parameters of a plan as blocks, and how much of them each rank holds.

A block is a layer: parameters whose names agree up to the first number in them (`h.3.attn.weight`,
`h.3.mlp.weight`), those before and behind the layers by their modules, and neighbours together as
long as they are no larger than the largest layer. Of one dtype, all trained or none. What is tied
between VirtualDevices is a block of its own in each, cut alike.

The fractions f_i of a group of ranks are even where memory allows. With free_i bytes beside the
activations of rank i, and S bytes of state in all:

    f_i = min(c, free_i / S),    c the least number for which sum_i f_i = 1                      (1)
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from whale.capture.graph import CapturedGraph, StateTensor
from whale.plans.blocks import Block, ends_at_rows
from whale.plans.plan import Plan
from whale.plans.virtual_devices import VirtualDevice

Fractions = Mapping[tuple[int, ...], Sequence[float]]
"""ranks of a group -> the fraction of its blocks that each of them holds"""


@dataclass(frozen=True)
class Sharing:
    """Who would hold the same parameters."""

    captured: CapturedGraph
    holders: Mapping[str, tuple[int, ...]]
    """parameter or buffer -> stages that hold it"""
    device_of_stage: Sequence[int]
    virtual_devices: Sequence[VirtualDevice]
    updates_whole: bool = False
    """no parameter is cut: each lies whole on one rank of its group, which updates it"""
    alone: bool = False
    """VirtualDevices of one rank have blocks, too: they are at home elsewhere"""

    @staticmethod
    def of_plan(plan: Plan, captured: CapturedGraph, updates_whole: bool = False) -> Sharing:
        devices = [stage.virtual_device for stage in plan.stages]
        return Sharing(captured, plan.holders, devices, plan.virtual_devices, updates_whole)

    @cached_property
    def first_use(self) -> dict[str, int]:
        """Place in the graph at which each parameter is read first."""
        found: dict[str, int] = {}
        for place, node in enumerate(self.captured.graph.nodes):
            for source in node.all_input_nodes:
                if source.op == "get_attr":
                    found.setdefault(str(source.target), place)
        return found

    @cached_property
    def groups(self) -> list[VirtualDevice]:
        """VirtualDevices whose ranks hold the same parameters, each on all of them."""
        least = 0 if self.alone else 2
        replicated = [device for device in self.virtual_devices if device.grid is None]
        return [device for device in replicated if len(device.all_ranks) >= least]

    @cached_property
    def tied(self) -> dict[str, bool]:
        """Tensors that several VirtualDevices hold, and whether they can be cut: all alike, on as
        many ranks each.
        """
        found = {}
        for name, stages in self.holders.items():
            devices = {self.device_of_stage[stage] for stage in stages}
            if len(devices) > 1:
                groups = [self.virtual_devices[device] for device in devices]
                sizes = {len(group.all_ranks) for group in groups}
                can_cut = len(sizes) == 1 and all(group.grid is None for group in groups)
                found[name] = can_cut and (self.alone or sizes != {1})
        return found

    def layers(self, device: VirtualDevice) -> list[list[str]]:
        """Names of the parameters of every block of a VirtualDevice, in the order of their use."""
        names = self._own_parameters(device)
        alone = [[name] for name in names if self.tied.get(name, False)]
        free = [name for name in names if name not in self.tied]
        together = _layers(free, self.captured.state, self.holders)
        return sorted([*alone, *together], key=lambda layer: self.first_use[layer[0]])

    def _own_parameters(self, device: VirtualDevice) -> list[str]:
        """Parameters with dims on the stages of a VirtualDevice, in the order of their use."""
        own = {stage for stage, index in enumerate(self.device_of_stage) if index == device.index}
        names = []
        for name, stages in self.holders.items():
            state = self.captured.state[name]
            has_rows = bool(state.shape) and math.prod(state.shape) > 0
            is_used = name in self.first_use and bool(own & set(stages))
            if state.kind == "parameter" and has_rows and is_used:
                names.append(name)
        return sorted(names, key=lambda name: (self.first_use[name], name))


def blocks_of(sharing: Sharing, fractions: Fractions) -> tuple[Block, ...]:
    """The blocks of a plan, in the order of their first use; even where `fractions` names no
    group.
    """
    found: list[tuple[int, Block]] = []
    states = sharing.captured.state
    for device in sharing.groups:
        ranks = tuple(sorted(device.all_ranks))
        even = [1 / len(ranks)] * len(ranks)
        shares = fractions.get(ranks) or even
        layers = sharing.layers(device)
        place_of = _places(layers, sharing, shares) if sharing.updates_whole else {}
        for layer in layers:
            if place_of:
                block = _whole_block(layer, states, ranks, place_of)
                found.append((sharing.first_use[layer[0]], block))
                continue
            block = _block(layer, states, ranks, even if layer[0] in sharing.tied else shares)
            found.append((sharing.first_use[layer[0]], block))
    return _by_first_use(found)


def _by_first_use(found: list[tuple[int, Block]]) -> tuple[Block, ...]:
    """Blocks in the order of their first use, which is given with each."""
    found.sort(key=lambda each: (each[0], each[1].ranks))
    return tuple(block for _, block in found)


def grid_blocks(sharing: Sharing, cut: Container[str]) -> tuple[Block, ...]:
    """Blocks of the parameters that grids `cut` already; in the order of their first use."""
    states = sharing.captured.state
    found: list[tuple[int, Block]] = []
    for device in sharing.virtual_devices:
        if device.grid is None:
            continue
        ranks = tuple(sorted(device.all_ranks))
        for layer in sharing.layers(device):
            own = tuple(name for name in layer if name in cut)
            shapes = tuple(tuple(states[name].shape) for name in own)
            if own:
                found.append((sharing.first_use[own[0]], Block(own, shapes, ranks, ())))
    return _by_first_use(found)


def _layers(
    names: Sequence[str],
    states: Mapping[str, StateTensor],
    holders: Mapping[str, tuple[int, ...]],
) -> list[list[str]]:
    """Names in groups: one a layer, small neighbours of the same stages together."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name in names:
        state = states[name]
        key = (state.dtype, state.trainable, holders[name], layer_name(name))
        groups.setdefault(key, []).append(name)
    largest = max((_num_bytes(group, states) for group in groups.values()), default=0)
    merged: list[tuple[tuple[object, ...], list[str]]] = []
    for (*same, _), group in groups.items():
        kind = tuple(same)
        last = next((each for each in reversed(merged) if each[0] == kind), None)
        together = _num_bytes([*(last[1] if last else ()), *group], states)
        if last is not None and together <= largest:
            last[1].extend(group)
        else:
            merged.append((kind, list(group)))
    return [group for _, group in merged]


def layer_name(name: str) -> str:
    """`transformer.h.3` of `transformer.h.3.attn.weight`; without a number, the module."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return ".".join(parts[:-1])


def _num_bytes(names: Sequence[str], states: Mapping[str, StateTensor]) -> int:
    return sum(states[name].num_bytes for name in names)


def _block(
    names: Sequence[str],
    states: Mapping[str, StateTensor],
    ranks: tuple[int, ...],
    shares: Sequence[float],
) -> Block:
    shapes = {name: tuple(states[name].shape) for name in names}
    total = sum(map(math.prod, shapes.values()))
    ends = ends_at_rows(names, shapes, [share * total for share in shares])
    return Block(tuple(names), tuple(shapes.values()), ranks, ends)


def _places(
    layers: Sequence[Sequence[str]], sharing: Sharing, fractions: Sequence[float]
) -> dict[str, int]:
    """Parameter -> the place in its group that holds and updates it. Tied ones lie on the first
    place of every group.
    """
    states = sharing.captured.state
    shapes = {name: tuple(states[name].shape) for layer in layers for name in layer}
    tied = {name: 0 for name in shapes if name in sharing.tied}
    free = {name: shape for name, shape in shapes.items() if name not in tied}
    return tied | balanced_places(free, fractions)


def balanced_places(
    shapes: Mapping[str, tuple[int, ...]], fractions: Sequence[float]
) -> dict[str, int]:
    """Gives whole parameters to places, the costliest first, each to the one with least work so far
    among those that have memory for it: all, where fractions are even.
    """
    places = range(len(fractions))
    work = [0.0] * len(fractions)
    is_even = max(fractions) - min(fractions) < EVEN
    total = sum(map(math.prod, shapes.values()))
    free = [math.inf if is_even else fraction * total * (1 + EVEN) for fraction in fractions]
    found = {}
    for name, shape in sorted(shapes.items(), key=lambda each: (-matrix_work(each[1]), each[0])):
        number = math.prod(shape)
        able = [place for place in places if number <= free[place]]
        if not able:
            able = [max(places, key=free.__getitem__)]
        chosen = min(able, key=lambda place: (work[place], place))
        found[name] = chosen
        work[chosen] += matrix_work(shape)
        free[chosen] -= number
    return found


EVEN = 0.02
"""parts that differ by less are even"""


def matrix_work(shape: tuple[int, ...]) -> float:
    """Work of an update that looks at a whole matrix, m x n: Newton-Schulz takes products of
    min(m, n) x m x n; of anything else its elements.
    """
    number = float(math.prod(shape))
    return number * min(shape) if len(shape) == 2 else number


def _whole_block(
    names: Sequence[str],
    states: Mapping[str, StateTensor],
    ranks: tuple[int, ...],
    place_of: Mapping[str, int],
) -> Block:
    """A block in which every parameter lies whole on one rank."""
    ordered: list[str] = []
    ends: list[int] = []
    for place in range(len(ranks)):
        ordered += [name for name in names if place_of[name] == place]
        ends.append(sum(math.prod(states[name].shape) for name in ordered))
    shapes = tuple(tuple(states[name].shape) for name in ordered)
    return Block(tuple(ordered), shapes, ranks, tuple(ends))


def fractions_by_memory(free_bytes: Sequence[float], needed_bytes: float) -> list[float] | None:
    """Line (1); None where there is not so much free memory. The caller takes care that nothing is
    less than nothing.
    """
    free = [max(0.0, each) for each in free_bytes]
    if needed_bytes <= 0:
        return [1 / len(free)] * len(free)
    if sum(free) < needed_bytes:
        return None
    found = [0.0] * len(free)
    left = needed_bytes
    order = sorted(range(len(free)), key=lambda place: free[place])
    for number, place in enumerate(order):
        found[place] = min(free[place], left / (len(order) - number))
        left -= found[place]
    return [each / needed_bytes for each in found]


def owners_of(plan: Plan, captured: CapturedGraph, stacks: Container[str] = ()) -> dict[str, int]:
    """A rank for every trained vector and matrix that a grid cuts, so that the ranks of a
    VirtualDevice have about as much work with their updates; and for these `stacks` of matrices
    (experts). Others stay cut: one device may not have the memory for a whole one.
    """
    found: dict[str, int] = {}
    shapes: dict[tuple[int, ...], dict[str, tuple[int, ...]]] = {}
    stored = [pair for sharding in plan.shardings for pair in sharding.stored.items()]
    cut = {name for name, layout in stored if layout.is_cut}
    for name, holding in plan.template.tensors.items():
        state = captured.state[name]
        is_owned = len(state.shape) <= 2 or name in stacks
        if name in cut and state.trainable and is_owned:
            held_by = {rank for stage in holding.stages for rank in plan.ranks_of_stage(stage)}
            shapes.setdefault(tuple(sorted(held_by)), {})[name] = tuple(state.shape)
    for ranks, own in shapes.items():
        places = balanced_places(own, [1 / len(ranks)] * len(ranks))
        found |= {name: ranks[place] for name, place in places.items()}
    return found
