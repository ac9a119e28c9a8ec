"""What one device does in a redistribution, as data: parts of tensors, rounds of messages.

redistribution.py makes it, lowering/exchange.py runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from whale.plans.layout import Layout
from whale.plans.replica import Ranges


@dataclass(frozen=True)
class MovedBlock:
    """What goes to, or comes from, one place; `ranges` are those of the local tensor that it is
    taken from or put into.
    """

    place: int
    ranges: Ranges

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(sum(b - a for a, b in dim) for dim in self.ranges)

    @cached_property
    def count(self) -> int:
        return prod(self.shape)

    def is_run_of(self, shape: Sequence[int]) -> bool:
        """Contiguous in a contiguous tensor: one range for each dim, and after the first dim longer
        than 1 all of it.
        """
        inner = False
        for ranges, size in zip(self.ranges, shape):
            if len(ranges) != 1 or (inner and ranges != ((0, size),)):
                return False
            inner = inner or ranges[0][1] - ranges[0][0] > 1
        return True


def in_order(blocks: Sequence[MovedBlock], shape: Sequence[int]) -> bool:
    """Whether the blocks, one after the other, are the whole contiguous tensor."""
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    stop = 0
    for block in blocks:
        if (
            not block.is_run_of(shape)
            or sum(ranges[0][0] * stride for ranges, stride in zip(block.ranges, strides)) != stop
        ):
            return False
        stop += block.count
    return stop == prod(shape)


@dataclass(frozen=True)
class RedistributionStep:
    """One round of messages, seen from one place."""

    place: int
    places: tuple[int, ...]
    """everyone who takes part, in order; empty: nothing is sent"""
    input_shape: tuple[int, ...]
    shape: tuple[int, ...]
    """of the local result"""
    sends: tuple[MovedBlock, ...]
    """in the order of the receivers, this place (what it keeps) among them; ranges of the local
    input
    """
    terms: tuple[tuple[MovedBlock, ...], ...]
    """what is summed, in order; the blocks of one term, this place's among them, do not overlap;
    ranges of the local result
    """
    pattern: str
    """gather, reduce-scatter or all-reduce where every device's part is equally large, all-to-all
    otherwise, or local
    """
    largest: int
    """elements of the largest tensor that one of the places holds before or after: all of them
    choose the way of sending by it
    """

    @cached_property
    def own(self) -> tuple[MovedBlock, MovedBlock] | None:
        """What this place keeps: where it is in the input, where it goes in the result."""
        here = [block for block in self.sends if block.place == self.place]
        there = [block for term in self.terms for block in term if block.place == self.place]
        return (here[0], there[0]) if here else None

    @cached_property
    def is_identity(self) -> bool:
        """The local result is the local input."""
        if self.places or self.input_shape != self.shape:
            return False
        return prod(self.shape) == 0 or (self.own is not None and self.own[0].shape == self.shape)

    @cached_property
    def is_filled(self) -> bool:
        """Every element of the result gets a value; otherwise the rest is zero."""
        return (
            sum(block.count for block in self.terms[0]) == prod(self.shape)
            if self.terms
            else prod(self.shape) == 0
        )

    @cached_property
    def is_sum_of_wholes(self) -> bool:
        """Every term comes from one place and covers the result."""
        return self.is_filled and len(self.terms) > 1 and all(len(term) == 1 for term in self.terms)

    @cached_property
    def is_in_order(self) -> bool:
        """What arrives from place after place is the result, one part below the other."""
        return len(self.terms) == 1 and in_order(self.terms[0], self.shape)

    @cached_property
    def is_made_of_runs(self) -> bool:
        """What arrives can be received straight into the result."""
        return (
            self.is_filled
            and len(self.terms) == 1
            and all(block.is_run_of(self.shape) for block in self.terms[0])
        )

    @cached_property
    def arrives_in_place(self) -> bool:
        """Whether in an all-to-all of two places the other one's part is received straight into the
        result.
        """
        return len(self.places) == 2 and self.is_made_of_runs

    @cached_property
    def own_travels(self) -> bool:
        """Whether in an all-to-all what this place keeps goes through the buffers too: then they
        need no putting together.
        """
        return (self.is_in_order and not self.arrives_in_place) or (
            self.is_sum_of_wholes and len(self.terms) > 2
        )

    @cached_property
    def leaving(self) -> tuple[MovedBlock, ...]:
        """What an all-to-all sends, in the order of the places."""
        if self.own_travels:
            return tuple(self.sends)
        return tuple(block for block in self.sends if block.place != self.place)

    @cached_property
    def leaves_in_order(self) -> bool:
        """The contiguous input, as it is, is what an all-to-all sends."""
        return in_order(self.leaving, self.input_shape)

    @cached_property
    def sizes(self) -> tuple[list[int], list[int]]:
        """Elements that come from and go to each of the places in an all-to-all."""
        arriving = {block.place: block.count for term in self.terms for block in term}
        if not self.own_travels:
            arriving.pop(self.place, None)
        leaving = {block.place: block.count for block in self.leaving}
        return [arriving.get(place, 0) for place in self.places], [
            leaving.get(place, 0) for place in self.places
        ]

    @cached_property
    def num_sent(self) -> int:
        """Elements that this place sends to others."""
        return sum(block.count for block in self.sends if block.place != self.place)

    @cached_property
    def most_held(self) -> int:
        """Elements that an all-to-all holds at most beside the input, the result among them: other
        ways of sending hold about as much.

        First what leaves, where it has to be copied, and what arrives; then, what was sent being
        gone, the result."""
        result = prod(self.shape)
        if not self.places:
            return result
        leaving = 0 if self.leaves_in_order else sum(block.count for block in self.leaving)
        arriving = result if self.arrives_in_place else sum(self.sizes[0])
        return max(
            leaving + arriving,
            arriving + (0 if self.arrives_in_place or self.is_in_order else result),
        )


def most_held(steps: Sequence[RedistributionStep]) -> int:
    """Elements that steps, one after the other, hold at most beside the input of the first."""
    return max(
        (
            step.most_held + (prod(step.input_shape) if number else 0)
            for number, step in enumerate(steps)
        ),
        default=0,
    )


@dataclass(frozen=True)
class Redistribution:
    """One device's part of a change of layout, and of the change of the gradient's layout on the
    way back.
    """

    source: Layout
    target: Layout
    forward: tuple[RedistributionStep, ...]
    backward: tuple[RedistributionStep, ...]
    sends: bool = False
    """somewhere on the grid something is sent, forward"""
    sends_back: bool = False
    """the same, backward"""

    @cached_property
    def is_identity(self) -> bool:
        """Here, nothing happens in either direction."""
        return not self.forward and not self.backward

    @cached_property
    def num_sent(self) -> int:
        """Elements that this place sends, there and back."""
        return sum(step.num_sent for step in (*self.forward, *self.backward))

    @property
    def text(self) -> str:
        return (
            f"{self.source.text()} -> {self.target.text()}: "
            f"{', '.join(step.pattern for step in self.forward) or 'nothing moves'}"
        )
