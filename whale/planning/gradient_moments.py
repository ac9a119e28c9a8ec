"""Which gradients a backward holds at which moment, where ZeRO reduces them in every backward (from
level 2 on), beside the saved tensors that it frees on the way.

Backward goes through the operations from the last to the first, and the blocks of the stage are
reduced in one order as soon as all their gradients are final (`runtime/block_gradients.py`):

    made        gradients of parameters, from the backward of the last operation that reads one to
                the flat copy of its block
    flat copy   of a block, from its reduce-scatter until the next block is reduced, by the next
                backward perhaps
    reduced     what is done: of this a rank holds its part

At moment i a rank that holds the fraction f of the blocks has, with n samples,

    n live(i) + made(i) + flat copy(i) + f reduced(i)                                            (1)

with live(i) by `costs/backward_workspace.py`; in its first backward of a step without the flat copy
of one before, in later ones with all its part already there. Of all moments those are kept at which
one of these is largest for some n.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from whale.costs.backward_workspace import backward_live, backward_workspace
from whale.planning.drafts import Draft
from whale.planning.workload import Workload
from whale.planning.zero_blocks import Sharing
from whale.plans.figures import Figures, Moment


@dataclass
class _Walk:
    """A backward on its way: gradients in bytes."""

    sizes: Mapping[str, int]
    """of the parameters that get a gradient"""
    waiting: list[Sequence[str]]
    """blocks in the order in which they are reduced"""
    made: float = 0.0
    copied: float = 0.0
    reduced: float = 0.0
    is_before: bool = True
    """no block is reduced yet"""
    final: set[str] = field(default_factory=set)
    moments: list[Moment] = field(default_factory=list)

    def note(self, live: float, more: float = 0.0) -> None:
        moving = self.made + self.copied + more
        self.moments.append(Moment(live, moving, self.reduced, self.is_before))

    def reduce_ready(self, live: float) -> None:
        """Blocks whose gradients are all final, in their order."""
        while self.waiting and self.final.issuperset(self.waiting[0]):
            size = sum(self.sizes[name] for name in self.waiting.pop(0))
            self.take_copied(live)
            self.note(live, more=size)  # beside its flat copy
            self.made -= size
            self.copied = size

    def take_copied(self, live: float) -> None:
        """Adds the rank's part of the block before to its gradients, and frees the flat copy."""
        self.reduced += self.copied
        self.note(live)
        self.copied = 0.0
        self.is_before = False


def moments_of(
    live: Sequence[float],
    reads: Sequence[Iterable[str]],
    sizes: Mapping[str, int],
    blocks: Iterable[Sequence[str]],
) -> list[Moment]:
    """All moments of a backward. `live`: of every operation; `reads`: trained parameters that it
    reads; `sizes`: of these; `blocks`: in the order in which they are reduced.
    """
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for index, names in enumerate(reads):
        for name in names:
            first.setdefault(name, index)
            last[name] = index
    walk = _Walk(sizes, list(blocks))
    for index in reversed(range(len(live))):
        for name in reads[index]:
            walk.made += sizes[name] if last[name] == index else 0
        walk.note(live[index])
        walk.final.update(name for name in reads[index] if first[name] == index)
        walk.reduce_ready(live[index])
    end = live[0] if live else 0.0
    for name in sizes.keys() - first.keys():  # nothing here reads it: it is reduced as zeros
        walk.made += sizes[name]
        walk.final.add(name)
    walk.reduce_ready(end)
    walk.take_copied(end)
    return walk.moments


def largest_moments(
    moments: Sequence[Moment], fractions: Iterable[float], left_bytes: float
) -> tuple[Moment, ...]:
    """Those at which line (1) is largest for some number of samples, for a rank with one of these
    fractions, in its first backward or a later one. `left_bytes`: the flat copy that one before has
    left.
    """
    found: dict[Moment, None] = {}
    for fraction in (None, *sorted(set(fractions))):
        lines = {}
        for each in moments:
            more = fraction * each.reduced_bytes if fraction else each.is_before * left_bytes
            lines[each.sample_bytes, each.moving_bytes + more] = each
        found |= dict.fromkeys(lines[line] for line in _envelope(lines))
    return tuple(found)


def _envelope(lines: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The lines (slope, height at 0) that are highest somewhere at 0 or behind it."""
    kept: list[tuple[float, float]] = []
    for line in sorted(lines, reverse=True):
        if kept and line[1] <= kept[-1][1]:
            continue
        while len(kept) > 1 and _crossing(kept[-2], kept[-1]) <= _crossing(kept[-1], line):
            kept.pop()
        kept.append(line)
    return kept


def _crossing(steep: tuple[float, float], flat: tuple[float, float]) -> float:
    """Where a line of less slope and more height at 0 is no longer above."""
    return (flat[1] - steep[1]) / (steep[0] - flat[0])


def with_moments(figures: Figures, workload: Workload, draft: Draft) -> Figures:
    """The figures of a plan with the moments of stages whose blocks are reduced in every backward.
    Not of those that recompute something: their saved tensors are not freed one by one.
    """
    sharing = draft.zero.sharing
    stages = list(figures.stages)
    for device, group in zip(sharing.groups, draft.zero.groups, strict=True):
        fractions = draft.device_loads.fractions[group.ranks]
        for stage, index in enumerate(sharing.device_of_stage):
            if index != device.index or draft.regions[stage]:
                continue
            blocks = _blocks_of_stage(sharing, sharing.layers(device), stage)
            moments = _moments_of_stage(workload, draft, stage, blocks)
            found = largest_moments(moments, fractions, group.largest_block)
            stages[stage] = replace(stages[stage], moments=found)
    return replace(figures, stages=tuple(stages))


def _blocks_of_stage(
    sharing: Sharing, layers: Iterable[Sequence[str]], stage: int
) -> list[Sequence[str]]:
    """Trained blocks of a stage, in the order in which its backward reduces them."""
    states = sharing.captured.state
    own = []
    for layer in layers:
        if stage in sharing.holders[layer[0]] and states[layer[0]].trainable:
            own.append(layer)
    return sorted(own, key=lambda layer: -max(sharing.first_use[name] for name in layer))


def _moments_of_stage(
    workload: Workload, draft: Draft, stage: int, blocks: Sequence[Sequence[str]]
) -> list[Moment]:
    """Moments beyond what the stage saves and its workspace, which counts one gradient."""
    assignment = draft.assignment
    part = assignment.slices[stage]
    crossing = [node for node, *ends in assignment.crossings if stage in ends]
    live = backward_live(part.operations, workload.gradients, workload.saved, crossing)
    states = workload.captured.state
    sizes = {name: states[name].num_bytes for layer in blocks for name in layer}
    reads = []
    for node in part.operations:
        sources = [source for source in node.all_input_nodes if source.op == "get_attr"]
        reads.append({str(each.target) for each in sources if str(each.target) in sizes})
    workspace = backward_workspace(part.operations, workload.gradients, workload.saved, crossing)
    counted = max(workload.trained_bytes(part), default=0)
    found = []
    for each in moments_of(live, reads, sizes, blocks):
        beyond = min(0.0, each.sample_bytes - workspace)
        moving = each.moving_bytes - counted
        found.append(each._replace(sample_bytes=beyond, moving_bytes=moving))
    return found
