"""Memory of a device by accounting: what the plan puts there, action by action.

weights, buffers     from the start; buffers are the model's own, the buckets in which shared
                     gradients are all-reduced, and the mini-batch
gradients            of a stage from its first backward of a step to the next step
optimizer state      from the first update on, as many bytes for a byte of weights as the user's
                     optimizer makes
under ZeRO           of all these this rank's part; the buffers into which weights are gathered
                     count as weights. Gradients of blocks on their way count as buffers while they
                     are there: from level 2 on inside of every backward, and one flat copy behind
                     it until the next; at level 1 while blocks are reduced, under the last backward
                     or in front of the update
elsewhere            what is at home on the host or its disk is not here but for its buffers, which
                     count as buffers; `plans/away.py` says how much of activations is
activations          what a stage saves of a micro-batch and the workspace of a backward, by the
                     table of `scheduling/memory.py`
"""

from __future__ import annotations

from collections.abc import Sequence

from whale.plans.blocks import GRADIENTS_TOO, WEIGHTS_TOO
from whale.plans.buckets import bucket_size
from whale.plans.figures import BLOCKS_ON_THEIR_WAY, UPDATE_COPIES, Figures, StateFigures
from whale.plans.plan import Plan
from whale.scheduling import Action, Kind
from whale.scheduling.action import ENDS_BACKWARD
from whale.scheduling.memory import memory_changes

WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, BUFFERS = CLASSES = (
    "weights",
    "gradients",
    "optimizer state",
    "activations",
    "buffers",
)


class Account:
    """What one device holds, by class, now and when it was fullest."""

    def __init__(
        self, figures: Figures, own_stages: Sequence[int], shared_bytes: int, bucket_bytes: int = 0
    ) -> None:
        """`shared_bytes`: gradients that this device all-reduces with others, in buckets of at most
        `bucket_bytes`.
        """
        self.figures = figures
        self.shared_bytes = shared_bytes
        self.bucket_bytes = bucket_bytes
        self.own_stages = tuple(own_stages)
        self.held = tuple(state for state in figures.states if set(state.stages) & set(own_stages))
        self.used = dict.fromkeys(CLASSES, 0.0)
        self.peak: dict[str, float] = {}
        """of every class at the moment at which most was used in all"""
        self._high = (0.0, 0.0)
        """most in all since it was last asked for, and the activations of that moment"""
        self._with_gradients: set[int] = set()
        self._copied_bytes = 0.0
        """the flat copy of the block that was reduced last"""
        alone = [group for group in figures.zero if len(group.ranks) == 1]
        self.zero = alone[0] if alone else None
        """what this rank shares with others"""
        self.away = figures.away[0] if len(figures.away) == 1 else None
        """what this rank has elsewhere, in figures of this rank alone"""

    @property
    def total(self) -> float:
        return sum(self.used.values())

    def place_weights(self) -> None:
        """What is there before the first step."""
        weights = float(sum(state.weight_bytes for state in self.held))
        buffers = float(sum(state.buffer_bytes for state in self.held))
        buffers += self.shared_bytes + self.figures.batch_bytes
        if self.zero is not None and self.zero.level >= WEIGHTS_TOO:
            absent = self.zero.absent(self.zero.trained_bytes + self.zero.frozen_bytes)
            weights += self.zero.pool_bytes - absent
        if self.away is not None:
            weights -= self.away.absent.get(WEIGHTS, 0.0)
            buffers += self.away.pool_bytes
        self.take(WEIGHTS, weights, "the start")
        self.take(BUFFERS, buffers, "the start")

    @property
    def _trained_bytes(self) -> float:
        """Bytes of the parameters that this rank updates."""
        whole = sum(state.trained_bytes for state in self.held)
        return whole - (self.zero.absent(self.zero.trained_bytes) if self.zero is not None else 0)

    def place_optimizer(self, ratio: float) -> None:
        """Adds the optimizer's state: `ratio` bytes for each byte of trained weights."""
        absent = self.away.absent.get(OPTIMIZER, 0.0) if self.away is not None else 0.0
        self.take(OPTIMIZER, max(0.0, ratio * self._trained_bytes - absent), "update")

    def begin_step(self) -> None:
        """Gradients and activations of the step before are gone."""
        self.used[GRADIENTS] = self.used[ACTIVATIONS] = 0.0
        self._drop_copied()
        self._with_gradients = set()

    def start(self, action: Action, num_samples: int) -> None:
        """A compute action begins."""
        at_start, _, _ = self._changes(action, num_samples)
        self.take(ACTIVATIONS, at_start, str(action))
        moving = self._moving_bytes(action, num_samples)  # the copy that is there included
        self._pass_through(moving - self._copied_bytes, str(action))

    def end(self, action: Action, num_samples: int, is_last: bool = False) -> None:
        """It is over. Gradients grow while activations are freed: most is there at either end, or
        at a moment between that is known (`Moment`).

        `is_last`: no other backward of this stage comes in this step.
        """
        _, computed, at_end = self._changes(action, num_samples)
        if self._knows_moments(action):
            computed += at_end
            at_end = 0.0
        moving = self._reduced_under(action, is_last)
        self._pass_through(moving, str(action))
        self.take(ACTIVATIONS, computed, str(action))
        if action.kind in ENDS_BACKWARD:
            self._grow_gradients(action, is_last)
            self._pass_through(moving, str(action))
            if self._reduces_in_backward:
                self._drop_copied()
                self._copied_bytes = self._block_bytes
                self.take(BUFFERS, self._copied_bytes, str(action))
        self.take(ACTIVATIONS, at_end, str(action))

    def _changes(self, action: Action, num_samples: int) -> tuple[float, float, float]:
        memory = self.figures.stages[action.stage].memory
        return memory_changes(
            action.kind,
            memory.saved.of(num_samples),
            memory.weight_gradient.of(num_samples),
            max(0.0, memory.workspace.of(num_samples) - self._spared_bytes(action.stage)),
        )

    def _spared_bytes(self, stage: int) -> float:
        """Workspace of a stage that parts do not need and whole parameters would."""
        zero = self.zero
        if zero is None or stage not in zero.stages or not sum(zero.stage_bytes):
            return 0.0
        part = zero.stage_bytes[zero.stages.index(stage)] / sum(zero.stage_bytes)
        return part * sum(zero.spared_bytes)

    # ---- gradients of blocks on their way

    @property
    def _reduces_in_backward(self) -> bool:
        return self.zero is not None and self.zero.level >= GRADIENTS_TOO

    @property
    def _block_bytes(self) -> float:
        """The largest block that is trained."""
        return self.zero.block_bytes if self.zero is not None else 0.0

    def _knows_moments(self, action: Action) -> bool:
        """Whether the figures say what is there inside of a backward."""
        is_whole = action.kind is Kind.BACKWARD and self._reduces_in_backward
        return is_whole and bool(self.figures.stages[action.stage].moments)

    def _moving_bytes(self, action: Action, num_samples: int) -> float:
        """Most that the gradients of blocks need inside of a backward, beyond what is saved when it
        begins and its workspace.
        """
        zero = self.zero
        if zero is None or not self._reduces_in_backward or action.stage not in zero.stages:
            return 0.0
        if action.kind is Kind.WEIGHT:  # all gradients of the stage are made, then reduced
            whole = zero.stage_trained_bytes[zero.stages.index(action.stage)]
            return whole + self._block_bytes
        if action.kind is not Kind.BACKWARD:
            return 0.0
        if not self._knows_moments(action):
            return BLOCKS_ON_THEIR_WAY * self._block_bytes
        is_first = action.stage not in self._with_gradients
        part = self._part_of_gradients * self._summed_here if is_first else 0.0
        most = 0.0
        for each in self.figures.stages[action.stage].moments:
            moving = each.moving_bytes + num_samples * each.sample_bytes
            moving += part * each.reduced_bytes + each.is_before * self._copied_bytes
            most = max(most, moving)
        return most

    def _reduced_under(self, action: Action, is_last: bool) -> float:
        """What is on its way at level 1 where blocks are reduced under the last backward."""
        at_end = is_last and action.kind in ENDS_BACKWARD and not self._reduces_in_backward
        if not at_end or not self.figures.overlaps:
            return 0.0
        return BLOCKS_ON_THEIR_WAY * self._block_bytes

    def _pass_through(self, num_bytes: float, action: str) -> None:
        """Something is there for a moment."""
        if num_bytes > 0:
            self.take(BUFFERS, num_bytes, action)
            self.take(BUFFERS, -num_bytes, action)

    def _drop_copied(self) -> None:
        self.used[BUFFERS] -= self._copied_bytes
        self._copied_bytes = 0.0

    def begin_update(self) -> None:
        """Shared gradients lie in their buckets now. An optimizer with state makes tensors of the
        size of a weight, for a moment.
        """
        self._drop_copied()
        if not self._reduces_in_backward:
            self._pass_through(self._block_bytes, "update")
        own_bytes = self._trained_bytes - self.shared_bytes
        self.used[GRADIENTS] = min(self.used[GRADIENTS], own_bytes)
        largest = max(
            (self.figures.stages[stage].gradient_workspace_bytes for stage in self.own_stages),
            default=0.0,
        )
        if self.zero is not None:
            blocks = BLOCKS_ON_THEIR_WAY * self._block_bytes
            largest = min(largest, self.zero.fractions[0] * blocks)
        workspace = UPDATE_COPIES * largest if self.used[OPTIMIZER] else 0.0
        if self.away is not None and self.away.absent.get(OPTIMIZER):
            workspace = UPDATE_COPIES * largest if self.away.updated_on == "device" else 0.0
        self.take(ACTIVATIONS, workspace, "update")
        self.take(ACTIVATIONS, -workspace, "update")

    def _grow_gradients(self, action: Action, is_last: bool) -> None:
        """Adds the gradients that a stage makes in its first backward. If it is the last one too,
        all but the last bucket have gone into theirs.
        """
        for state in self._new_gradients(action.stage):
            left = state.trained_bytes
            if self._reduces_in_backward:
                left = round(left * self._part_of_gradients)
            left = round(left * self._summed_here)
            if is_last and self.shared_bytes and self.bucket_bytes:
                left = min(left, bucket_size(left, self.bucket_bytes))
            self.take(GRADIENTS, left, str(action))
        self._with_gradients.add(action.stage)

    @property
    def _part_of_gradients(self) -> float:
        """The part of the gradients of its stages that this rank holds from level 2 on."""
        whole = sum(each.trained_bytes for each in self.held)
        return self._trained_bytes / whole if whole else 0.0

    @property
    def _summed_here(self) -> float:
        """The part of the gradients of this rank that the device holds."""
        trained = self._trained_bytes
        if self.away is None or not trained:
            return 1.0
        return max(0.0, 1 - self.away.absent.get(GRADIENTS, 0.0) / trained)

    def _new_gradients(self, stage: int) -> list[StateFigures]:
        """States that get their first gradient of the step from this stage."""
        if stage in self._with_gradients:
            return []
        own = [state for state in self.held if stage in state.stages]
        return [state for state in own if self._with_gradients.isdisjoint(state.stages)]

    def take(self, what: str, num_bytes: float, action: str) -> None:
        """Adds `num_bytes` (less than 0: frees them). An emulated device overrides this, to refuse
        what does not fit.
        """
        self.used[what] += num_bytes
        total = self.total
        if total > self._high[0]:
            self._high = (total, self.used[ACTIVATIONS])
        if total > sum(self.peak.values()):
            self.peak = dict(self.used)

    def points(self) -> list[tuple[float, float]]:
        """(in all, activations): the fullest moment since the last call, if more was there then,
        and now.
        """
        high = self._high
        now = (self.total, self.used[ACTIVATIONS])
        self._high = now
        return [high, now] if high[0] > now[0] else [now]


def shared_bytes(plan: Plan, figures: Figures, own_stages: Sequence[int]) -> int:
    """Trained bytes on these stages whose gradients are all-reduced with other devices."""
    own = [state for state in figures.states if set(state.stages) & set(own_stages)]
    shared = sum(
        state.trained_bytes
        for state in own
        if any(len(ranks) > 1 for ranks in state.groups(plan.ranks_of_stage))
    )
    cut = sum(group.trained_bytes for group in figures.zero if set(group.stages) & set(own_stages))
    return max(0, shared - cut)
