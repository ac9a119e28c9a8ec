"""What a plan costs on its cluster, by the cost model: the part of a plan that the simulation and
the emulation compute on.

Times are affine in the samples of a micro-batch, bytes as well. No torch here: a saved plan is
simulated at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from whale.cluster.network import Network
from whale.costs.update_work import UpdateWork
from whale.plans.away import AwayFigures
from whale.scheduling import ActionMemory

UPDATE_COPIES = 2
"""of the largest weight, that an optimizer with state makes for a moment: the root of Adam's second
average, and that divided
"""

BLOCKS_ON_THEIR_WAY = 2
"""gradients of so many blocks at once: those that backward makes and the flat copy of the block
before, or a block and its own flat copy
"""


@dataclass(frozen=True)
class Seconds:
    """fixed + samples * per sample; nothing to do takes no time."""

    sample_s: float
    fixed_s: float = 0.0

    def of(self, num_samples: float) -> float:
        return self.fixed_s + num_samples * self.sample_s if num_samples else 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.sample_s + other.sample_s, self.fixed_s + other.fixed_s)


@dataclass(frozen=True)
class StageTimes:
    """Times of one stage on one kind of device, for one micro-batch."""

    forward: Seconds
    input_backward: Seconds
    weight_backward: Seconds
    """products of weight gradients, which a split backward does later"""
    accumulate: Seconds = Seconds(0.0)
    """adding the gradients of weights to those of earlier micro-batches: in every backward of a
    step but the first
    """

    def __add__(self, other: StageTimes) -> StageTimes:
        forward = self.forward + other.forward
        inputs = self.input_backward + other.input_backward
        return StageTimes(
            forward,
            inputs,
            self.weight_backward + other.weight_backward,
            self.accumulate + other.accumulate,
        )

    @property
    def backward(self) -> Seconds:
        return self.input_backward + self.weight_backward

    @property
    def total(self) -> Seconds:
        return self.forward + self.backward


class Moment(NamedTuple):
    """What a backward holds at one moment, beyond what its stage saves and its workspace, under
    ZeRO that reduces gradients in every backward.
    """

    sample_bytes: float
    """for each sample; less than 0: saved tensors are freed on the way"""
    moving_bytes: float
    """gradients of blocks on their way, less what the workspace counts of them"""
    reduced_bytes: float
    """gradients, whole, of blocks that are reduced: of these a rank holds its part"""
    is_before: bool
    """no block is reduced yet: the flat copy that the backward before has left is still there"""


@dataclass(frozen=True)
class StageFigures:
    """One stage: how long its actions take and what they hold."""

    times: dict[str, StageTimes]
    """by kind of device"""
    memory: ActionMemory
    """what its actions hold of a micro-batch"""
    gradient_workspace_bytes: float = 0.0
    """the part of its workspace that does not depend on the samples nor on a grid: a gradient
    before it is added to that of earlier micro-batches. The optimizer works in copies of it
    """
    moments: tuple[Moment, ...] = ()
    """of its backward under ZeRO from level 2 on: those at which most may be held, for any number
    of samples; empty: not known
    """


@dataclass(frozen=True)
class StateFigures:
    """All parameters and buffers that the same stages hold, or that a grid cuts alike: then the
    bytes are those of the largest part.
    """

    stages: tuple[int, ...]
    weight_bytes: int = 0
    trained_bytes: int = 0
    """of these the part that gets gradients"""
    buffer_bytes: int = 0
    parts: tuple[tuple[int, ...], ...] = ()
    """on a grid: for each part the ranks that hold it; empty: all ranks of the stages hold
    everything
    """
    part_bytes: tuple[tuple[int, int], ...] = ()
    """of each part: bytes of weights, and those of them that get gradients"""

    def on(self, rank: int) -> StateFigures:
        """What this rank holds of it; some may hold nothing where there are more devices than
        heads, say.
        """
        own = [held for ranks, held in zip(self.parts, self.part_bytes) if rank in ranks]
        if not own:
            return self
        return replace(
            self,
            weight_bytes=sum(weights for weights, _ in own),
            trained_bytes=sum(trained for _, trained in own),
        )

    def groups(self, ranks_of_stage: Callable[[int], Iterable[int]]) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks that hold the same and all-reduce its gradients."""
        return self.parts or (
            tuple(sorted({rank for stage in self.stages for rank in ranks_of_stage(stage)})),
        )


@dataclass(frozen=True)
class ZeroFigures:
    """What a group of ranks shares under ZeRO, in bytes."""

    level: int
    ranks: tuple[int, ...]
    fractions: tuple[float, ...]
    """by these ranks: the part of the blocks that each holds"""
    stages: tuple[int, ...]
    """whose parameters they are"""
    stage_bytes: tuple[int, ...]
    """of each of these stages: weights that its forward gathers"""
    stage_trained_bytes: tuple[int, ...]
    """of each: gradients that its backward reduces"""
    trained_bytes: int
    frozen_bytes: int
    pool_bytes: int
    """buffers into which weights are gathered"""
    block_bytes: int
    """of the largest block that is trained"""
    num_blocks: int
    spared_bytes: tuple[int, ...] = ()
    """by rank: workspace that whole parameters on the device would need, and parts of them, or what
    is at home elsewhere, do not
    """

    @property
    def most(self) -> float:
        """The largest part: in a ring each step takes as long as its largest message."""
        return max(self.fractions)

    def on(self, rank: int) -> ZeroFigures:
        """These figures with this rank alone."""
        place = self.ranks.index(rank)
        return replace(
            self,
            ranks=(rank,),
            fractions=(self.fractions[place],),
            spared_bytes=self.spared_bytes[place : place + 1],
        )

    def absent(self, num_bytes: float) -> float:
        """What of so many bytes is not on the one rank of these figures."""
        return (1 - self.fractions[0]) * num_bytes


@dataclass(frozen=True)
class Figures:
    """The whole plan."""

    stages: tuple[StageFigures, ...]
    states: tuple[StateFigures, ...]
    network: Network
    update_s: tuple[float, ...]
    """by rank: time of the optimizer"""
    memory_bytes: tuple[int, ...]
    """by rank: what the device has; 0: not known"""
    optimizer_ratio: float
    """bytes of optimizer state for each byte of trained parameters"""
    batch_bytes: int
    """of the mini-batch, which every device gets"""
    overlaps: bool = True
    """whether gradients are all-reduced while a backward runs. Not on CPU ranks: an all-reduce
    takes the core that the backward needs
    """
    zero: tuple[ZeroFigures, ...] = ()
    """by group of ranks that share parameters"""
    update_work: UpdateWork | None = None
    """what an update of the user's optimizer launches; None: not known"""
    away: tuple[AwayFigures, ...] = ()
    """what is at home elsewhere, by ranks that are alike in it"""

    def on(self, rank: int) -> Figures:
        """The figures with the states that this rank holds."""
        return replace(
            self,
            states=tuple(state.on(rank) for state in self.states),
            zero=tuple(group.on(rank) for group in self.zero if rank in group.ranks),
            away=tuple(replace(each, ranks=(rank,)) for each in self.away if rank in each.ranks),
        )

    def zero_of(self, ranks: Iterable[int]) -> ZeroFigures | None:
        """What exactly these ranks share; None: nothing."""
        wanted = tuple(sorted(ranks))
        return next((group for group in self.zero if group.ranks == wanted), None)
