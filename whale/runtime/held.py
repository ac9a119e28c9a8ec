"""This rank's trainable parameters: who else holds them, in which order their gradients are
all-reduced, and what the optimizer gets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from whale.lowering.program import Lowered
from whale.runtime.job import Job
from whale.runtime.summed_norms import SummedNorms, holders_of
from whale.runtime.whole_updates import WholeUpdates

Cells = tuple[tuple[slice, ...], ...]
"""boxes of a parameter as it lies on this rank"""
NamedParameters = list[tuple[str, torch.nn.Parameter]]


@dataclass(frozen=True)
class HeldPiece:
    """Entries of a parameter that the same ranks hold."""

    ranks: tuple[int, ...]
    cells: Cells


@dataclass(frozen=True)
class HeldParameter:
    """A trainable parameter on this rank."""

    name: str
    tensor: torch.nn.Parameter
    ranks: tuple[int, ...]
    """all holders, this rank included"""
    stages: tuple[int, ...]
    """stages of this rank that use it"""
    pieces: tuple[HeldPiece, ...] = ()
    """where other replicas cut it otherwise: its pieces, each with its own holders"""

    @cached_property
    def units(self) -> list[Unit]:
        """What is summed as a whole."""
        if not self.pieces:
            return [Unit(self, self.ranks)]
        return [Unit(self, piece.ranks, piece.cells) for piece in self.pieces]


@dataclass(frozen=True)
class Unit:
    """A parameter, or a piece of one, with those that sum its gradient."""

    parameter: HeldParameter
    ranks: tuple[int, ...]
    cells: Cells | None = None
    """None: the whole parameter"""

    @property
    def name(self) -> str:
        return self.parameter.name

    @property
    def tensor(self) -> torch.nn.Parameter:
        return self.parameter.tensor

    @cached_property
    def num_entries(self) -> int:
        if self.cells is None:
            return self.tensor.numel()
        return sum(self.tensor[cell].numel() for cell in self.cells)

    def parts(self, whole: Tensor) -> list[Tensor]:
        """Views of a tensor of the parameter's shape."""
        return [whole] if self.cells is None else [whole[cell] for cell in self.cells]


def by_backward_order(names: Sequence[str], first_use: Mapping[str, int]) -> list[str]:
    """Parameters in the order in which backward finishes them: used last in forward, first here.
    The same on every rank.
    """
    return sorted(names, key=lambda name: (-first_use.get(name, -1), name))


def trainable(job: Job) -> NamedParameters:
    """(name, parameter) pairs of this rank, in the model's own order."""
    order = {name: place for place, name in enumerate(job.names)}
    found = []
    for name, tensor in job.updated.items():
        if isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad:
            found.append((name, tensor))
    return sorted(found, key=lambda pair: order[pair[0]])


def held_parameters(job: Job, lowered: Lowered) -> list[HeldParameter]:
    """This rank's trainable parameters, in the order in which backward reaches them. Another
    shape of the batch may train others.
    """
    rank = job.ranks.rank
    view = job.plan.of_rank(rank)
    own = set(view.stages_of_rank(rank))
    shards = job.state_shards
    updated = job.updated
    trained = {name for name, _ in trainable(job)}
    names = []
    for name, stages in view.holders.items():
        if name in trained and own & set(stages):
            names.append(name)
    held = []
    for name in by_backward_order(names, lowered.first_use):
        tensor = updated[name]
        assert isinstance(tensor, torch.nn.Parameter)
        own_stages = tuple(sorted(own & set(view.holders[name])))
        shard = shards.on(name, rank)
        pieces = []
        for piece in shards.pieces(name):
            if rank in piece.ranks and piece.cells is not None:
                pieces.append(HeldPiece(piece.ranks, piece.inside(shard)))
        holders = {each for piece in pieces for each in piece.ranks} or shard.ranks
        held.append(HeldParameter(name, tensor, tuple(sorted(holders)), own_stages, tuple(pieces)))
    return held


def make_groups(job: Job) -> None:
    """Makes the process groups of all sets of holders. Every rank makes every group, in the same
    order.
    """
    groups: set[tuple[int, ...]] = set()
    for name in job.plan.holders:
        for shards in (job.shards, job.state_shards):
            groups.update(piece.ranks for piece in shards.pieces(name) if len(piece.ranks) > 1)
    groups.update(block.ranks for block in job.plan.blocks if len(block.ranks) > 1)
    groups.update(holders_of(job.state_shards, name) for name in job.plan.summed_norms)
    for ranks in sorted(groups):
        job.ranks.group(ranks)


def all_reduce_order(job: Job, lowered: Lowered) -> dict[str, int] | None:
    """The order in which all ranks all-reduce gradients: parameters that backward reaches first
    come first. None where replicas are alike, or where tags distinguish messages.
    """
    if job.plan.is_uniform or not job.ranks.needs_channels:
        return None
    names = by_backward_order(list(job.plan.holders), lowered.first_use)
    return {name: place for place, name in enumerate(names)}


def whole_updates(job: Job) -> WholeUpdates | None:
    """What brings parameters together that the optimizer wants whole; None where it does not, or
    nothing is cut.
    """
    owners = job.plan.owners
    if not owners:
        return None
    states = job.prepared.captured.state
    shapes = {name: tuple(states[name].shape) for name in owners}
    return WholeUpdates(owners, job.weights, shapes, job.shards, job.ranks)


def summed_norms(job: Job, optimizer: torch.optim.Optimizer | None) -> SummedNorms | None:
    """What gives the optimizer norms of whole parameters of which each holder updates a part; None
    where it needs none.
    """
    names = job.plan.summed_norms
    if not names or not isinstance(optimizer, torch.optim.Adafactor):
        return None  # the plan was made for another optimizer, and this one needs no norms
    own = {id(each) for group in optimizer.param_groups for each in group["params"]}
    updated = {name: each for name, each in trainable(job) if id(each) in own}
    states = job.prepared.captured.state
    shapes = {name: tuple(states[name].shape) for name in names}
    return SummedNorms(names, updated, shapes, job.state_shards, job.ranks)


def for_optimizer(job: Job, whole: WholeUpdates | None) -> NamedParameters:
    """(name, parameter) pairs that the optimizer of this rank gets: whole parameters that this rank
    owns in place of parts. Parts that hold nothing are left out, of fewer experts than devices,
    say: there is nothing to update, and torch's Adafactor divides by their number of elements.
    """
    states = job.prepared.captured.state
    own = []
    for name, parameter in trainable(job):
        if parameter.numel() or not math.prod(states[name].shape):
            own.append((name, parameter))
    if whole is None:
        return own
    order = {name: place for place, name in enumerate(job.names)}
    parts = [pair for pair in own if pair[0] not in job.plan.owners]
    return sorted([*parts, *whole.parameters.items()], key=lambda pair: order[pair[0]])
