"""What homes outside of the devices change in an estimate: seconds of a forward, of a backward and
of the update (`planning/offload_account.py` and `offload_figures.py` have the exact figures, the
latter of what moves; `zero_terms.py` has the bytes that stay on a device).

A rank with the part f of trained parameters of T bytes, with s bytes of optimizer state for each
byte of a parameter and S bytes that a micro-batch saves, moves

    at home elsewhere    in every forward    in every backward    in the update
    optimizer                                                 2 s f T, or 2 f T and the host's work
    weights              f T in              f T in
    gradients                                f T out
    activations          S out               S in

at the rate that it has when all ranks of its host move at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from whale.cluster.cluster import Cluster
from whale.planning.offload import Offload
from whale.planning.pricing import UPDATE_PASSES
from whale.plans.away import SEGMENT_BYTES, SEGMENTS_HERE, Transfers, UpdateTimes
from whale.plans.blocks import STATES


@dataclass
class OffloadTerms:
    """One choice of homes, for one model on one cluster."""

    offload: Offload
    """as it is run (`Offload.as_run`)"""
    level: int
    """of ZeRO"""
    ratio: float
    """bytes of optimizer state for each byte of trained parameters"""
    block_bytes: float
    """of the largest block that moves at once"""
    overlaps: bool
    """transfers go under compute"""
    cluster: Cluster
    _rates: dict[tuple[tuple[int, ...], str], tuple[float, float]] = field(
        default_factory=dict, repr=False
    )
    _num_ranks: dict[str, int] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for device in self.cluster.devices:
            self._num_ranks[device.host] = self._num_ranks.get(device.host, 0) + 1

    @property
    def has_activations(self) -> bool:
        """What forward saves is at home elsewhere."""
        return self.offload.activations != "device"

    def saved_here(self, saved_bytes: float, largest_bytes: float) -> float:
        """Bytes on the device of what a micro-batch saves. `largest_bytes`: of one tensor."""
        return min(saved_bytes, SEGMENTS_HERE * (SEGMENT_BYTES + largest_bytes))

    def forward_s(
        self, seconds: float, trained_bytes: float, saved_bytes: float, ranks: tuple[int, ...]
    ) -> float:
        """Seconds of a forward with its transfers."""
        in_s = self._weights_s(trained_bytes, ranks)
        out_s = 0.0
        if self.has_activations:
            out_s = saved_bytes / self._rate(ranks, self.offload.activations)[1]
        return self._with(seconds, in_s, out_s, trained_bytes, saved_bytes)

    def backward_s(
        self, seconds: float, trained_bytes: float, saved_bytes: float, ranks: tuple[int, ...]
    ) -> float:
        """Seconds of a backward with its transfers."""
        in_s = self._weights_s(trained_bytes, ranks)
        if self.has_activations:
            in_s += saved_bytes / self._rate(ranks, self.offload.activations)[0]
        out_s = 0.0
        if self.offload.gradients != "device":
            out_s = trained_bytes / len(ranks) / self._rate(ranks, self.offload.gradients)[1]
        return self._with(seconds, in_s, out_s, trained_bytes, saved_bytes)

    def _weights_s(self, trained_bytes: float, ranks: tuple[int, ...]) -> float:
        if self.offload.weights == "device":
            return 0.0
        return trained_bytes / len(ranks) / self._rate(ranks, self.offload.weights)[0]

    def _with(
        self, seconds: float, in_s: float, out_s: float, trained_bytes: float, saved_bytes: float
    ) -> float:
        pieces = []
        if self.offload.weights != "device" or self.offload.gradients != "device":
            pieces.append(trained_bytes / max(1.0, self.block_bytes))
        if self.has_activations:
            pieces.append(saved_bytes / SEGMENT_BYTES)
        number = max(1, int(min(pieces, default=1.0)))
        moved = Transfers(in_s, out_s, num_pieces=number)
        return moved.longest_s(seconds, 0.0, self.overlaps)

    def update_s(self, trained_bytes: float, ranks: tuple[int, ...], work_s: float) -> float:
        """Seconds of the update of a stage on its slowest rank. `work_s`: on the device."""
        return min(self._updates(trained_bytes / len(ranks), ranks, work_s).values())

    @cached_property
    def has_state_slots(self) -> bool:
        """Whether states come to the device to be updated, as far as the first rank says."""
        if self.offload.optimizer == "device":
            return False
        seconds = self._updates(self.block_bytes, (0,), 0.0)
        return min(seconds, key=lambda where: seconds[where]) == "device"

    def _updates(self, own_bytes: float, ranks: tuple[int, ...], work_s: float) -> dict[str, float]:
        """Seconds of an update of so many bytes of a rank's parameters, where it may run."""
        homes = self.offload
        are_here = homes.weights == homes.gradients == "device"
        found = {}
        if are_here:
            in_s, out_s = self._moved_s(self.ratio * own_bytes, ranks, homes.optimizer)
            found["device"] = UpdateTimes(out_s, work_s, in_s).seconds(self.overlaps)
        if not are_here or self.level == STATES:
            found["host"] = self._on_host(own_bytes, ranks).seconds(self.overlaps)
        return found

    def _on_host(self, own_bytes: float, ranks: tuple[int, ...]) -> UpdateTimes:
        """An update at the rate of the host's memory, of what is at home there or was brought."""
        byte_s = 0.0
        for host in self._hosts(ranks):
            memory = self.cluster.memories_of(host).memory
            if memory is not None:
                byte_s = max(byte_s, self._num_ranks[host] / memory.memory_bytes_per_s)
        in_s = out_s = 0.0
        if self.offload.weights == "device":
            in_s, out_s = self._moved_s(own_bytes, ranks, "host")
        if self.offload.optimizer == "disk":
            read_s, write_s = self._moved_s(self.ratio * own_bytes, ranks, "disk")
            in_s += read_s
            out_s += write_s
        return UpdateTimes(out_s, (UPDATE_PASSES + 2 * self.ratio) * own_bytes * byte_s, in_s)

    def _moved_s(
        self, num_bytes: float, ranks: tuple[int, ...], memory: str
    ) -> tuple[float, float]:
        """Seconds of so many bytes (to the device, from it)."""
        rate_in, rate_out = self._rate(ranks, memory)
        return num_bytes / rate_in, num_bytes / rate_out

    def _rate(self, ranks: tuple[int, ...], memory: str) -> tuple[float, float]:
        """Bytes per second (to the device, from it) of the slowest of these ranks."""
        key = (ranks, memory)
        if key not in self._rates:
            rates = [
                self.cluster.memories_of(host).rates(memory, self._num_ranks[host])
                for host in self._hosts(ranks)
            ]
            self._rates[key] = min(each[0] for each in rates), min(each[1] for each in rates)
        return self._rates[key]

    def _hosts(self, ranks: Sequence[int]) -> set[str]:
        return {self.cluster.devices[rank].host for rank in ranks}
