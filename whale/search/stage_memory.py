"""The memory of a stage in an estimate: what it holds, and which part of it must be recomputed so
that it fits (line (2) of `estimate.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from whale.costs.backward_workspace import COPIES
from whale.planning.offload import ON_DEVICES, Offload
from whale.search.offload_terms import OffloadTerms
from whale.search.outline import Outline
from whale.search.stage_rows import StageRow, prefix_sums
from whale.search.zero_terms import ZeroTerms

MOST_REGIONS = 16
"""parts of a stage that are recomputed one after the other, as far as the estimate goes"""


@dataclass
class OutlineMemory:
    """Bytes of the segments of one outline."""

    outline: Outline
    recompute: bool | str | tuple[str, ...]
    zero: int
    """level of ZeRO"""
    offload: Offload = ON_DEVICES
    """what is at home elsewhere, as it is run"""

    @cached_property
    def saved(self) -> tuple[list[float], list[float]]:
        return prefix_sums(self.outline.saved_fixed_bytes), prefix_sums(
            self.outline.saved_sample_bytes
        )

    @cached_property
    def static(self) -> tuple[list[float], list[float]]:
        """Prefix sums of what segments hold all the time, without and with buckets for gradients
        that are all-reduced.
        """
        return prefix_sums(self.outline.static_bytes(False)), prefix_sums(
            self.outline.static_bytes(True)
        )

    @cached_property
    def workspace(self) -> float:
        return float(self.outline.workspace_sample_bytes.max(initial=0.0))

    @cached_property
    def crossing(self) -> list[float]:
        return [float(each) for each in self.outline.crossing_bytes]

    def static_bytes(self, stage: StageRow, start: int, end: int, part: float) -> float:
        """Bytes that a stage holds all the time. `part`: of what ZeRO cuts, on this device."""
        sums = self.static[stage.is_shared]
        static = sums[end] - sums[start] + self.outline.largest_weight_bytes
        if (self.zero and stage.is_shared) or self.offload.has_blocks:
            others = self.others[end] - self.others[start] + self.outline.largest_weight_bytes
            return others + self.zero_terms.held_bytes(self.trained_in(start, end), part)
        for tied in self.outline.tied:
            is_held = any(start <= segment < end for segment in tied.segments)
            if is_held and not start <= tied.segments[0] < end:
                static += self.outline.tied_bytes(tied)
        return static

    def recomputed(self, stage: StageRow, start: int, end: int, in_flight: int) -> float:
        """Part of a stage that is recomputed, by line (2); infinity: even all is too little."""
        if not stage.devices:
            return 1.0 if self.recompute is True else 0.0
        fixed, per_sample = self.saved
        is_away = self.offload.activations != "device"
        part = 1.0 if self.recompute is True else 0.0
        crossing = self.crossing[start] or self.crossing[end]
        static_bytes: dict[float, float] = {}
        for free, samples, held in stage.devices:
            if held not in static_bytes:
                static_bytes[held] = self.static_bytes(stage, start, end, held)
            left_bytes = free - static_bytes[held]
            saved = fixed[end] - fixed[start] + samples * (per_sample[end] - per_sample[start])
            if is_away:
                stays = in_flight * samples * (self.crossing[start] + self.crossing[end])
                largest = samples * self.workspace / COPIES
                if stays + self.offload_terms.saved_here(saved, largest) > left_bytes:
                    return math.inf
                continue
            if left_bytes >= in_flight * saved and part == 0.0:
                continue
            if self.recompute is False or left_bytes <= 0:
                return math.inf
            # regions are recomputed one after the other: each saves what enters it
            entering = max(1.0, in_flight * samples * crossing)
            regions = min(max(1.0, math.sqrt(saved / entering)), MOST_REGIONS, end - start)
            least = regions * entering + saved / regions
            if least > left_bytes:
                return math.inf
            spare = in_flight * saved - least
            needed = (in_flight * saved - left_bytes) / spare if spare > 0 else 0.0
            # only whole regions are recomputed
            number = max(1, int(regions))
            part = max(part, min(1.0, math.ceil(needed * number) / number))
        return part

    @cached_property
    def zero_terms(self) -> ZeroTerms:
        ratio = self.outline.problem.optimizer_ratio
        block_bytes = self.outline.largest_layer_bytes
        has_slots = self.offload_terms.has_state_slots
        return ZeroTerms(self.zero, ratio, block_bytes, self.overlaps, self.offload, has_slots)

    @cached_property
    def offload_terms(self) -> OffloadTerms:
        problem = self.outline.problem
        return OffloadTerms(
            self.offload,
            self.zero,
            problem.optimizer_ratio,
            self.outline.largest_layer_bytes,
            self.overlaps,
            problem.cluster,
        )

    def saved_bytes(self, start: int, end: int, samples: int) -> float:
        """Bytes that so many samples save for the backward of these segments."""
        fixed, per_sample = self.saved
        return fixed[end] - fixed[start] + samples * (per_sample[end] - per_sample[start])

    @cached_property
    def others(self) -> list[float]:
        return prefix_sums(self.outline.other_bytes)

    def trained_in(self, start: int, end: int) -> float:
        """Bytes of parameters with a gradient that these segments are the first to read."""
        return self.trained[end] - self.trained[start]

    @cached_property
    def trained(self) -> list[float]:
        return prefix_sums(self.outline.trained_bytes)

    @cached_property
    def overlaps(self) -> bool:
        return not any(device.kind.is_cpu for device in self.outline.problem.cluster.devices)
