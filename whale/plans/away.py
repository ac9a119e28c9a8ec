"""What is at home outside of the devices, as figures: bytes in each memory, what moves in a step,
and how long that takes. Simulation, emulation and report compute on it.

What forward saves goes out in segments, while the next ones are made, and comes back in segments,
one ahead of its use (`runtime/activations.py`): at most `SEGMENTS_HERE` of them are on the device.
Weights come block by block in the same way. An action that moves i seconds in and o seconds out, in
n pieces, and computes for c seconds takes

    max(c, i, o) + (i + o) / n                                                                   (1)

since the first piece in and the last one out have nothing to hide under. Links go both ways at
once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from whale.plans.blocks import Memory
from whale.scheduling.memory import ActionMemory, Bytes

SEGMENT_BYTES = 32 * 1024**2
"""saved tensors go out and come back in segments of at least so much: a segment is full with the
tensor that reaches it
"""
SEGMENTS_HERE = 3
"""in forward one that fills, a full one, and one on its way out; in backward one that is used, the
one before it as far as something still holds it, and one on its way in
"""


class Held(NamedTuple):
    """Bytes of one class of memory that a rank has elsewhere."""

    what: str
    """as in `simulation.memory.CLASSES`"""
    memory: Memory
    num_bytes: float


class Traffic(NamedTuple):
    """Bytes that a rank moves in a step."""

    what: str
    memory: Memory
    in_bytes: float
    out_bytes: float


class Transfers(NamedTuple):
    """Seconds of the transfers of a stage in one action."""

    fixed_in_s: float = 0.0
    fixed_out_s: float = 0.0
    sample_in_s: float = 0.0
    """for each sample"""
    sample_out_s: float = 0.0
    num_pieces: int = 1

    def longest_s(self, compute_s: float, num_samples: float, overlaps: bool) -> float:
        """Line (1); where nothing overlaps (CPU ranks), all of it in turn."""
        in_s = self.fixed_in_s + num_samples * self.sample_in_s
        out_s = self.fixed_out_s + num_samples * self.sample_out_s
        if not overlaps:
            return compute_s + in_s + out_s
        return max(compute_s, in_s, out_s) + (in_s + out_s) / self.num_pieces

    def moved_s(self, num_samples: float) -> float:
        """Seconds of all transfers, one after the other."""
        samples_s = num_samples * (self.sample_in_s + self.sample_out_s)
        return self.fixed_in_s + self.fixed_out_s + samples_s


class UpdateTimes(NamedTuple):
    """Seconds of an update block by block: gradients or states out, the work, weights or states in;
    each under the others.
    """

    out_s: float = 0.0
    work_s: float = 0.0
    in_s: float = 0.0
    num_blocks: int = 1
    gradients_s: float = 0.0
    """the part of `out_s` that is gradients, which go to the host before the first update begins"""

    def seconds(self, overlaps: bool = True) -> float:
        """All of it, with nothing else to hide under."""
        parts = (self.out_s, self.work_s, self.in_s)
        if not overlaps:
            return sum(parts)
        return max(parts) + (sum(parts) - max(parts)) / self.num_blocks

    def ahead_s(self) -> float:
        """What may run under the next forward: all of it but the gradients."""
        return self._replace(out_s=self.out_s - self.gradients_s).seconds()


class StageAhead(NamedTuple):
    """The update of one stage on the host, as far as it may run under the next forward."""

    seconds: float = 0.0
    num_blocks: int = 1

    def end_s(self, start_s: float, compute_s: float, before_s: float) -> float:
        """When the first forward of the stage is over that begins at `start_s`, if updates of
        stages before it are over at `before_s`: block by block the update, then the forward.

            max(start + c, before + u / n + c, before + u + c / n)                           (2)
        """
        number = max(1, self.num_blocks)
        if not self.seconds:
            return start_s + compute_s
        first_s = before_s + self.seconds / number
        last_s = before_s + self.seconds
        return max(start_s + compute_s, first_s + compute_s, last_s + compute_s / number)


@dataclass(frozen=True)
class AwayFigures:
    """Ranks that are alike in what they have elsewhere; all numbers are those of one of them."""

    ranks: tuple[int, ...]
    held: tuple[Held, ...]
    absent: dict[str, float]
    """class of memory -> bytes that the device does not hold for it"""
    pool_bytes: float
    """buffers on the device for what comes and goes, beside those of ZeRO"""
    stages: tuple[int, ...]
    forward: tuple[Transfers, ...]
    """by these stages"""
    backward: tuple[Transfers, ...]
    update: UpdateTimes
    updated_on: str = "device"
    traffic: tuple[Traffic, ...] = ()
    ahead: tuple[StageAhead, ...] = ()
    """by these stages, in the order of their forwards; empty: nothing may run under the next
    forward
    """

    @property
    def ahead_s(self) -> float:
        """Seconds of updates that may run under the next forward."""
        return sum(each.seconds for each in self.ahead)

    def in_memory(self, memory: Memory) -> float:
        """Bytes that a rank has in one of the memories of its host."""
        return sum(each.num_bytes for each in self.held if each.memory == memory)


@dataclass(frozen=True)
class StageActivations:
    """What a stage saves of a micro-batch, where that is at home elsewhere."""

    moved: Bytes
    """goes out and comes back"""
    stays: Bytes
    """what the stage receives and sends, which stays on the device"""
    segments: Bytes
    """as many segments as are here at the same time"""
    here: Bytes
    """most that is on the device of what moves: the segments, or all of it where that is less; less
    what operations would hold inside of them for a moment if all of it were here
    """

    @staticmethod
    def of(
        moved: Bytes, stays: Bytes, largest: Bytes, batch_size: float, inside: float
    ) -> StageActivations:
        """`largest`: as many of the largest tensors as segments are here; each may be the last of
        one. `batch_size`: samples by which it is decided what is less. `inside`: the part of what
        is here that the workspace of a backward counts besides.
        """
        segments = largest + Bytes(fixed_bytes=SEGMENTS_HERE * SEGMENT_BYTES)
        here = min(moved, segments, key=lambda size: size.of(batch_size))
        besides = inside * Bytes(moved.sample_bytes - here.sample_bytes)
        return StageActivations(moved, stays, segments, here - besides)

    def num_pieces(self, num_samples: float) -> int:
        """Segments of a micro-batch."""
        one = self.segments.of(num_samples) / SEGMENTS_HERE
        return max(1, int(self.moved.of(num_samples) / one)) if one else 1

    def resident(self, memory: ActionMemory) -> ActionMemory:
        """What the stage holds on the device. `memory`: if its activations stayed there."""
        return replace(memory, saved=self.stays, workspace=memory.workspace + self.here)
