"""ZeRO in a plan: what its blocks change in the memory of every device, and which rank holds how
much of them.

All of a group of ranks need, beside their parts, the same: at level 3 the pool, and gradients of
two blocks on their way. With parts of nothing rank i has free_i bytes left beside its
activations; line (1) of `zero_blocks.py` divides the state of the group into these. The activations
of all ranks together are the same however the samples are divided, so where the sum of what is free
is too small, no other division of the samples helps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from whale.capture.graph import CapturedGraph
from whale.names import listed
from whale.planning.balance import DeviceLoads
from whale.planning.cuts import SAME_TIME
from whale.planning.problem import Problem
from whale.planning.workload import INSIDE_OPERATIONS
from whale.planning.zero_blocks import (
    Fractions,
    Sharing,
    blocks_of,
    fractions_by_memory,
    owners_of,
)
from whale.plans.blocks import GRADIENTS_TOO, STATES, WEIGHTS_TOO, slots_of
from whale.plans.figures import BLOCKS_ON_THEIR_WAY, UPDATE_COPIES, Figures, ZeroFigures
from whale.plans.plan import Decision, DeviceMemory, Plan
from whale.plans.revise import with_devices
from whale.plans.samples import SampleMap
from whale.plans.shares import DoesNotFit
from whale.plans.virtual_devices import VirtualDevice
from whale.units import human_bytes

ROUNDING = 0.002
"""part of a device's memory that is left free when parts fill it: they end at rows"""
SHOWN = 8


@dataclass(frozen=True)
class GroupBytes:
    """What a group of ranks shares, in bytes."""

    ranks: tuple[int, ...]
    trained: int
    frozen: int
    pool: int
    """of the buffers into which blocks are gathered"""
    largest_block: int
    """of those that are trained"""
    pieces: tuple[tuple[int, int], ...]
    """of every block that is trained: (its largest parameter, all of it)"""

    def state(self, level: int, ratio: float) -> float:
        """All that is cut."""
        found = ratio * self.trained
        if level >= GRADIENTS_TOO:
            found += self.trained
        if level >= WEIGHTS_TOO:
            found += self.trained + self.frozen
        return found

    def memory(
        self, whole: DeviceMemory, level: int, ratio: float, fraction: float
    ) -> DeviceMemory:
        """Memory of a rank that holds this fraction of the blocks, where it would need `whole`
        without ZeRO.
        """
        rest = 1.0 - fraction
        absent = rest * self.state(level, ratio)
        buffers = BLOCKS_ON_THEIR_WAY * self.largest_block
        gradients = whole.gradient_bytes
        weights = whole.parameter_bytes
        if level >= GRADIENTS_TOO:
            gradients -= round(rest * self.trained)
        if level >= WEIGHTS_TOO:
            weights += self.pool - round(rest * (self.trained + self.frozen))
        part = max((min(one, fraction * block) for one, block in self.pieces), default=0.0)
        workspace = round(INSIDE_OPERATIONS * absent)
        return replace(
            whole,
            parameter_bytes=weights,
            gradient_bytes=gradients,
            optimizer_bytes=round(whole.optimizer_bytes - rest * ratio * self.trained),
            buffer_bytes=whole.buffer_bytes + buffers,
            fixed_bytes=max(0, whole.fixed_bytes - workspace),
            update_bytes=min(whole.update_bytes, round(UPDATE_COPIES * part)),
        )


@dataclass(frozen=True)
class ZeroChoice:
    """ZeRO of one level for the devices of one cut."""

    sharing: Sharing
    level: int
    ratio: float
    """bytes of optimizer state for each byte of trained parameters"""

    @cached_property
    def groups(self) -> list[GroupBytes]:
        return [self._group(device) for device in self.sharing.groups]

    def _group(self, device: VirtualDevice) -> GroupBytes:
        states = self.sharing.captured.state
        layers = self.sharing.layers(device)
        sizes = [sum(states[name].num_bytes for name in layer) for layer in layers]
        kinds = [(states[layer[0]].dtype, states[layer[0]].trainable) for layer in layers]
        slots: dict[int, int] = {}
        for slot, size in zip(slots_of(sizes, kinds), sizes, strict=True):
            slots[slot] = max(size, slots.get(slot, 0))
        pieces = []
        for layer, size, (_, is_trained) in zip(layers, sizes, kinds, strict=True):
            if is_trained:
                pieces.append((max(states[name].num_bytes for name in layer), size))
        trained = sum(size for _, size in pieces)
        return GroupBytes(
            ranks=tuple(sorted(device.all_ranks)),
            trained=trained,
            frozen=sum(sizes) - trained,
            pool=sum(slots.values()),
            largest_block=max((size for _, size in pieces), default=0),
            pieces=tuple(dict.fromkeys(pieces)),
        )

    def apply(self, devices: DeviceLoads, largest_micro_batch: int) -> DeviceLoads:
        """The devices with parts of the blocks: even ones where they fit and cost no time, else as
        much as each has free.
        """
        if not self.groups:
            return devices
        even = self.with_fractions(devices, {})
        if _fits_at_full_speed(even, largest_micro_batch):
            return even
        without = self.with_fractions(
            devices, {group.ranks: [0.0] * len(group.ranks) for group in self.groups}
        )
        try:
            shares = without.samples_by_rank(largest_micro_batch)
        except (DoesNotFit, ValueError):
            return even
        fractions: dict[tuple[int, ...], list[float]] = {}
        for group in self.groups:
            free = []
            for rank in group.ranks:
                memory = without.memory[rank]
                usable = memory.capacity_bytes * (1 - ROUNDING)
                free.append(usable - memory.total_bytes(shares[rank]))
            # a byte of state needs some workspace beside it
            state = group.state(self.level, self.ratio) * (1 + INSIDE_OPERATIONS)
            found = fractions_by_memory(free, state)
            if found is None:
                return even
            fractions[group.ranks] = found
        return self.with_fractions(devices, fractions)

    def with_fractions(self, devices: DeviceLoads, fractions: Fractions) -> DeviceLoads:
        """The devices with these parts of the blocks; even ones where nothing is said."""
        memory = list(devices.memory)
        chosen: dict[tuple[int, ...], tuple[float, ...]] = {}
        for group in self.groups:
            number = len(group.ranks)
            shares = tuple(fractions.get(group.ranks) or [1 / number] * number)
            chosen[group.ranks] = shares
            for rank, share in zip(group.ranks, shares, strict=True):
                memory[rank] = group.memory(memory[rank], self.level, self.ratio, share)
        return replace(devices, memory=tuple(memory), fractions=chosen)

    def figures(
        self, fractions: Mapping[tuple[int, ...], tuple[float, ...]]
    ) -> tuple[ZeroFigures, ...]:
        """What the simulation needs to know of every group."""
        found = []
        states = self.sharing.captured.state
        for device, group in zip(self.sharing.groups, self.groups, strict=True):
            stages = [
                stage
                for stage, index in enumerate(self.sharing.device_of_stage)
                if index == device.index
            ]
            layers = self.sharing.layers(device)
            weights = dict.fromkeys(stages, 0)
            trained = dict.fromkeys(stages, 0)
            for name in (name for layer in layers for name in layer):
                for stage in set(self.sharing.holders[name]) & set(stages):
                    weights[stage] += states[name].num_bytes
                    trained[stage] += states[name].num_bytes * states[name].trainable
            state = group.state(self.level, self.ratio)
            shares = fractions[group.ranks]
            found.append(
                ZeroFigures(
                    level=self.level,
                    ranks=group.ranks,
                    fractions=shares,
                    stages=tuple(stages),
                    stage_bytes=tuple(weights.values()),
                    stage_trained_bytes=tuple(trained.values()),
                    trained_bytes=group.trained,
                    frozen_bytes=group.frozen,
                    pool_bytes=group.pool,
                    block_bytes=group.largest_block,
                    num_blocks=len(layers),
                    spared_bytes=tuple(
                        round(INSIDE_OPERATIONS * (1 - share) * state) for share in shares
                    ),
                )
            )
        return tuple(found)


def _fits_at_full_speed(devices: DeviceLoads, size: int) -> bool:
    """Whether memory takes no samples from the device that its speed would give them."""
    if any(memory.most_samples() < 0 for memory in devices.memory):
        return False
    try:
        slowest_s = devices.divide(size).slowest_s
    except (DoesNotFit, ValueError):
        return False
    return slowest_s <= devices.without_limits().divide(size).slowest_s * (1 + SAME_TIME)


def zero_decision(level: int, devices: DeviceLoads, whole: DeviceLoads) -> Decision:
    """What the level saves and who holds how much. `whole`: the same devices without ZeRO."""
    saved = max(
        before.static_bytes - after.static_bytes
        for before, after in zip(whole.memory, devices.memory, strict=True)
    )
    what = {
        STATES: "optimizer state is",
        GRADIENTS_TOO: "optimizer state and gradients are",
        WEIGHTS_TOO: "optimizer state, gradients and weights are",
    }[level]
    parts = []
    for ranks, shares in devices.fractions.items():
        if max(shares) - min(shares) > ROUNDING:
            percent = [f"{100 * share:.3g} %" for share in shares]
            parts.append(f"ranks {listed(ranks, SHOWN)} hold {listed(percent, SHOWN, '+')}")
    how = "; ".join(parts) or "all ranks of a group hold the same"
    messages = {
        STATES: "no more messages than without: a reduce-scatter and a gather for an all-reduce",
        GRADIENTS_TOO: "a reduce-scatter in every micro-batch, a gather in every step",
        WEIGHTS_TOO: "weights gathered in every forward and backward, one layer ahead",
    }[level]
    why = f"{what} cut over the ranks that would hold copies: {human_bytes(saved)} less on one"
    return Decision("ZeRO", f"level {level}", f"{why}; {how}; {messages}")


def with_zero_figures(figures: Figures, groups: tuple[ZeroFigures, ...]) -> Figures:
    """The figures of a plan with what its ranks share; each updates its part."""
    update_s = list(figures.update_s)
    for group in groups:
        for rank, fraction in zip(group.ranks, group.fractions, strict=True):
            update_s[rank] *= fraction
    return replace(figures, zero=groups, update_s=tuple(update_s))


def with_even_blocks(problem: Problem, plan: Plan, level: int) -> Plan:
    """A plan of model replicas that the user has drawn up, with even parts. Its memory stays that
    of whole parameters: it fits without ZeRO.
    """
    if not level:
        return plan
    if not plan.is_uniform:
        raise ValueError(
            f'"zero": {level} cuts what replicas hold alike, and those of "replicas" are not '
            'alike: their ranks do other actions. Try: "zero": 0, or replicas that are all alike'
        )
    sharing = Sharing.of_plan(plan, problem.captured, problem.updates_whole)
    blocks = blocks_of(sharing, {})
    if not blocks:
        return plan
    even = {
        tuple(sorted(device.all_ranks)): (1 / len(device.all_ranks),) * len(device.all_ranks)
        for device in sharing.groups
    }
    choice = ZeroChoice(sharing, level, problem.optimizer_ratio)
    figures = plan.figures
    if figures is not None:
        figures = with_zero_figures(figures, choice.figures(even))
    least = max(plan.least_samples, int(level >= GRADIENTS_TOO))
    return replace(plan, zero=level, blocks=blocks, figures=figures, least_samples=least)


WHOLE_COPIES = 2
"""of a parameter on the rank that updates it whole while a grid cuts it: weights and gradient"""


def plan_with_owners(plan: Plan, captured: CapturedGraph, stacks: Collection[str] = ()) -> Plan:
    """The plan with a rank that updates each cut parameter whole, these stacks of matrices
    included; without them, or as it was, where a device has no memory for that.
    """
    if stacks:
        with_stacks = _with_owners(plan, captured, stacks)
        if with_stacks is not plan:
            return with_stacks
    return _with_owners(plan, captured, ())


def _with_owners(plan: Plan, captured: CapturedGraph, stacks: Collection[str]) -> Plan:
    """The plan with owners; the same where a device has no memory for them, or nothing is cut."""
    owners = owners_of(plan, captured, stacks)
    if not owners:
        return plan
    owned_bytes = [0] * plan.num_devices
    for name, rank in owners.items():
        owned_bytes[rank] += WHOLE_COPIES * captured.state[name].num_bytes
    if plan.memory:
        memory = [
            replace(each, buffer_bytes=each.buffer_bytes + more)
            for each, more in zip(plan.memory, owned_bytes, strict=True)
        ]
        samples = SampleMap.planned(plan).num_by_rank()
        for each, own in zip(memory, samples, strict=True):
            if each.capacity_bytes and each.total_bytes(max(own)) > each.capacity_bytes:
                return plan
        plan = with_devices(plan, {"memory": memory})
    decision = Decision(
        "update of cut parameters",
        "each whole on one rank",
        "the optimizer looks at more than one number of a parameter at a time; up to "
        f"{human_bytes(max(owned_bytes))} more on a rank",
    )
    return replace(plan, owners=owners, decisions=(*plan.decisions, decision))


def level_of(zero: int | str) -> int:
    """The level that a config asks for; `auto` is made a number by the planner before."""
    return zero if isinstance(zero, int) else 0
