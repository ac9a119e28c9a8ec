"""The account of what is at home outside of the devices: how much of it each memory holds, what
stays on the devices, and where the optimizer runs. What moves in a step: `offload_figures.py`.

With own parts of blocks of W bytes of weights (trained: T) on a rank, states of r T:

    optimizer on the host    out: gradients T; work: (3 + 2 r) T at the rate of the host's memory;
                             in: weights T; one after the other. The host has a copy of the
                             weights, and the gradients                                     (1)
    optimizer on the device  in: states r T; out: states r T, two blocks of them at a time  (2)

whichever is shorter for the slowest rank. Weights and gradients that are at home elsewhere are
updated there: they need neither go out nor in for (1). CPU ranks update states where they lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from whale.cluster.cluster import Cluster
from whale.planning.balance import DeviceLoads
from whale.planning.offload import Offload
from whale.planning.offload_groups import Group, Part, groups_of
from whale.planning.split import Split
from whale.planning.workload import Workload
from whale.planning.zero import ZeroChoice
from whale.plans.away import StageActivations, UpdateTimes
from whale.plans.blocks import STATES, WEIGHTS_TOO, Block, Memory, slots_of
from whale.plans.plan import DeviceMemory
from whale.simulation.memory import GRADIENTS, OPTIMIZER, WEIGHTS
from whale.units import human_bytes

PRIORITY = ("weights", "activations", "gradients", "optimizer")
"""what gets the memory of the host first where disks must help: what moves most often"""
ROUNDING = 1e-9


@dataclass(frozen=True)
class OffloadAccount:
    """What is at home elsewhere in one cut of the model."""

    offload: Offload
    cluster: Cluster
    zero: ZeroChoice
    split: Split
    workload: Workload
    update_passes: float
    """bytes that an update moves for each byte of trained parameters"""

    # ---- who has what

    @cached_property
    def groups(self) -> list[Group]:
        return groups_of(self.zero.sharing, self.split, self.workload)

    # ---- homes

    @cached_property
    def num_ranks(self) -> dict[str, int]:
        """Ranks of every host, which share its memory."""
        found: dict[str, int] = {}
        for device in self.cluster.devices:
            found[device.host] = found.get(device.host, 0) + 1
        return found

    @cached_property
    def _homes(self) -> dict[object, Homes]:
        return {}

    def homes(self, devices: DeviceLoads, activations: Mapping[int, float]) -> Homes:
        """Where every block is at home. `activations`: by rank, bytes of activations elsewhere."""
        key = (tuple(devices.fractions.items()), tuple(activations.items()))
        if key not in self._homes:
            self._homes[key] = self._find_homes(devices, activations)
        return self._homes[key]

    def _find_homes(self, devices: DeviceLoads, activations: Mapping[int, float]) -> Homes:
        used: dict[tuple[str, Memory], float] = {}
        found: dict[tuple[int, str], list[Memory]] = {}
        stage_home: Memory = self.offload.activations
        ratio = self.zero.ratio
        for what in PRIORITY:
            if what == "activations":
                needed = self._by_host(activations)
                stage_home = self._place(stage_home, needed, used)
                continue
            for number, group in enumerate(self.groups):
                shares = self.shares(group, devices)
                per_host = self._by_host(shares)
                homes: list[Memory] = []
                for size in group.sizes:
                    one = self._class_bytes(size, what, ratio)
                    needed = {host: one * share for host, share in per_host.items()}
                    homes.append(self._place(getattr(self.offload, what), needed, used))
                found[number, what] = homes
        return Homes(found, stage_home, used)

    def shares(self, group: Group, devices: DeviceLoads) -> dict[int, float]:
        """Fraction of the sizes of a group that each rank holds."""
        if group.is_grid:
            return dict.fromkeys(group.ranks, 1.0)
        even = (1 / len(group.ranks),) * len(group.ranks)
        return dict(zip(group.ranks, devices.fractions.get(group.ranks) or even, strict=True))

    def _class_bytes(self, size: Part, what: str, ratio: float) -> float:
        if what == "weights":
            return size.weights
        if what == "gradients":
            return size.alone
        return (ratio + self.copied_weights + self.copied_gradients) * size.trained

    def _by_host(self, by_rank: Mapping[int, float]) -> dict[str, float]:
        found: dict[str, float] = {}
        for rank, number in by_rank.items():
            host = self.cluster.devices[rank].host
            found[host] = found.get(host, 0.0) + number
        return found

    def _place(
        self, wanted: Memory, needed: Mapping[str, float], used: dict[tuple[str, Memory], float]
    ) -> Memory:
        """Takes memory for so many bytes on each host: of the one that is wanted, or where the host
        is full and disks may help, of the disk.
        """
        if wanted == "device":
            return wanted
        home = wanted
        if wanted == "host" and self.offload.spills:
            for host, number in needed.items():
                free = self.cluster.memories_of(host).size("host") - used.get((host, "host"), 0.0)
                if number > free:
                    home = "disk"
        for host, number in needed.items():
            used[host, home] = used.get((host, home), 0.0) + number
        return home

    def shortage(self, homes: Homes) -> str | None:
        """What is too small, with its numbers; None: everything fits."""
        for (host, memory), number in homes.used.items():
            size = self.cluster.memories_of(host).size(memory)
            if number > size * (1 + ROUNDING):
                name = "memory" if memory == "host" else "disk"
                sizes = []
                for each in ("host", "disk"):
                    own = homes.used.get((host, each), 0.0)
                    has = self.cluster.memories_of(host).size(each)
                    sizes.append(f"{each} {human_bytes(own)} of {human_bytes(has)}")
                return (
                    f"the {name} of {host} is too small for what is at home there: "
                    f"{human_bytes(number)} of {human_bytes(size)} ({', '.join(sizes)} for "
                    f"{self.num_ranks.get(host, 0)} ranks)"
                )
        return None

    # ---- memory of the devices

    def apply(self, devices: DeviceLoads, activations: Mapping[int, float]) -> DeviceLoads:
        """The devices without what is at home elsewhere."""
        homes = self.homes(devices, activations)
        memory = list(devices.memory)
        for number, group in enumerate(self.groups):
            for rank, share in self.shares(group, devices).items():
                parts = group.parts(share)
                memory[rank] = self._on_device(memory[rank], homes, number, parts)
        shortage = self._refusal or self.shortage(homes)
        return replace(devices, memory=tuple(memory), shortage=shortage)

    @cached_property
    def _refusal(self) -> str | None:
        """What the runtime would refuse of gradients elsewhere; None: nothing."""
        offload = self.offload
        if offload.gradients == "device":
            return None
        if offload.weights == "device" and any(group.is_grid for group in self.groups):
            return "gradients of weights that `split` cuts are summed on the device"
        if not self.on_accelerators:
            return None
        if self._held_alike is not None:
            return (
                f"several devices of a grid hold the same part of {self._held_alike}, and cannot "
                "sum its gradient on their hosts (a grid that cuts it over all of them can)"
            )
        if offload.weights == "device" and self.zero.level == WEIGHTS_TOO:
            return "at level 3 of ZeRO gradients are where the weights are, on the device"
        if self._tied is not None:
            return (
                f"{self._tied} is tied between stages on different devices, which cannot sum its "
                "gradient on their hosts"
            )
        return None

    @cached_property
    def _held_alike(self) -> str | None:
        """A trained parameter that a grid cuts, with parts that more than one device holds."""
        for group in self.groups:
            for names, size in zip(group.blocks, group.sizes, strict=True):
                if group.is_grid and size.alone < size.trained:
                    return names[0]
        return None

    @cached_property
    def _tied(self) -> str | None:
        """A parameter that several groups have."""
        seen: set[str] = set()
        for group in self.groups:
            names = {name for block in group.blocks for name in block}
            if seen & names:
                return min(seen & names)
            seen |= names
        return None

    def _on_device(
        self, memory: DeviceMemory, homes: Homes, group: int, parts: Sequence[Part]
    ) -> DeviceMemory:
        absent, pool = self.absent(homes, group, parts)
        on_host = self.updated_on == "host"
        update_bytes = memory.update_bytes
        if on_host and all(home != "device" for home in homes.of[group, "optimizer"]):
            update_bytes = 0
        return replace(
            memory,
            parameter_bytes=max(0, memory.parameter_bytes - round(absent[WEIGHTS])),
            gradient_bytes=max(0, memory.gradient_bytes - round(absent[GRADIENTS])),
            optimizer_bytes=max(0, memory.optimizer_bytes - round(absent[OPTIMIZER])),
            buffer_bytes=memory.buffer_bytes + round(pool),
            update_bytes=update_bytes,
        )

    def absent(
        self, homes: Homes, group: int, parts: Sequence[Part]
    ) -> tuple[dict[str, float], float]:
        """(bytes of every class that the device does not hold, its buffers for what comes and
        goes)
        """
        ratio = self.zero.ratio
        absent = dict.fromkeys((WEIGHTS, GRADIENTS, OPTIMIZER), 0.0)
        pool = 0.0
        slots: dict[int, float] = {}
        own = self.groups[group]
        slot_of = slots_of([round(part.weights) for part in parts], [0] * len(parts))
        for block, part in enumerate(parts):
            if homes.of[group, "weights"][block] != "device":
                absent[WEIGHTS] += part.weights
                if own.is_grid:  # else the pool of ZeRO counts them
                    slot = slot_of[block]
                    slots[slot] = max(part.weights, slots.get(slot, 0.0))
            if homes.of[group, "gradients"][block] != "device":
                absent[GRADIENTS] += part.alone
            if homes.of[group, "optimizer"][block] != "device":
                absent[OPTIMIZER] += ratio * part.trained
        if absent[OPTIMIZER] and self.updated_on == "device":
            pool += self._state_slots(homes.of[group, "optimizer"], parts)
        if absent[GRADIENTS]:  # those of one block are on their way to their home
            pool += max((part.trained for part in parts), default=0.0)
        return absent, pool + sum(slots.values())

    def _state_slots(self, homes: Sequence[Memory], parts: Sequence[Part]) -> float:
        """Bytes of the slots through which optimizer states come and go."""
        sizes = []
        for home, part in zip(homes, parts, strict=True):
            if home != "device" and part.trained:
                sizes.append(round(self.zero.ratio * part.trained))
        slots: dict[int, int] = {}
        for slot, size in zip(slots_of(sizes, [0] * len(sizes)), sizes, strict=True):
            slots[slot] = max(size, slots.get(slot, 0))
        return float(sum(slots.values()))

    # ---- times

    @cached_property
    def updated_on(self) -> str:
        """Where the optimizer runs: where weights or gradients are at home, else where the slowest
        rank takes less time.
        """
        offload = self.offload
        if offload.optimizer == "device":
            return "device"
        if not self.on_accelerators or {offload.weights, offload.gradients} != {"device"}:
            return "host"
        times = {}
        for where in ("host", "device") if self._may_update_on_host else ("device",):
            slowest = 0.0
            for group in self.groups:
                parts = group.parts(1 / len(group.ranks))
                for host in {self.cluster.devices[rank].host for rank in group.ranks}:
                    rank = next(r for r in group.ranks if self.cluster.devices[r].host == host)
                    trained = sum(part.trained for part in parts)
                    classes = {
                        what: {getattr(self.offload, what): number}
                        for what, number in (
                            ("weights", trained),
                            ("gradients", sum(part.alone for part in parts)),
                            ("optimizer", self.zero.ratio * trained),
                        )
                    }
                    update = self.update_times(rank, classes, trained, len(parts), where)
                    slowest = max(slowest, update.seconds())
            times[where] = slowest
        return min(times, key=lambda where: times[where])

    @property
    def on_accelerators(self) -> bool:
        return self.cluster.has_accelerators_only

    @property
    def _may_update_on_host(self) -> bool:
        """Whether a copy of the weights on the host may be updated (`runtime/zero.py`). Levels
        above 1 have parts of gradients on the device in every backward; a grid cuts weights itself;
        and gradients on hosts of accelerators are not all-reduced.
        """
        return (
            self.zero.level == STATES
            and self._tied is None
            and not any(group.is_grid for group in self.groups)
            and all(self.cluster.memories_of(host).memory for host in self.cluster.hosts)
        )

    def update_times(
        self,
        rank: int,
        classes: Mapping[str, Mapping[Memory, float]],
        trained: float,
        num_blocks: int,
        where: str,
    ) -> UpdateTimes:
        """Lines (1) and (2). `classes`: bytes of each class in each memory."""
        device = self.cluster.devices[rank]
        memories = self.cluster.memories_of(device.host)
        number = self.num_ranks[device.host]
        in_s = out_s = gradients_s = 0.0
        if where == "host":
            byte_s = device.kind.byte_s
            if memories.memory is not None:
                byte_s = number / memories.memory.memory_bytes_per_s
            work_s = self.update_passes * trained * byte_s
            if self.on_accelerators and self.offload.weights == "device":
                num_blocks = 1
                rate_in, rate_out = memories.rates("host", number)
                out_s = gradients_s = classes["gradients"].get("device", 0.0) / rate_out
                in_s = trained / rate_in
            for what, is_written in (("weights", True), ("gradients", False), ("optimizer", True)):
                on_disk = classes[what].get("disk", 0.0)
                if on_disk and memories.disk is not None:
                    in_s += on_disk * number / memories.disk.read_bytes_per_s
                    out_s += is_written * on_disk * number / memories.disk.write_bytes_per_s
            return UpdateTimes(out_s, work_s, in_s, max(1, num_blocks), gradients_s)
        for what, homes in classes.items():
            for memory, held in homes.items():
                if memory == "device":
                    continue
                rate_in, rate_out = memories.rates(memory, number)
                in_s += held / rate_in
                out_s += held / rate_out if what != "gradients" else 0.0
        work_s = self.update_passes * trained * device.kind.byte_s
        return UpdateTimes(out_s, work_s, in_s, max(1, num_blocks))

    def activation_bytes(
        self,
        activations: Sequence[StageActivations],
        in_flight: Sequence[int],
        shares: Sequence[int],
    ) -> dict[int, float]:
        """Bytes of activations of each rank that are elsewhere at the same time. `activations`: by
        stage; `shares`: by rank, samples of the largest micro-batch.
        """
        if self.offload.activations == "device":
            return {}
        found = {}
        for group in self.groups:
            for rank in group.ranks:
                found[rank] = sum(
                    in_flight[stage] * activations[stage].moved.of(shares[rank])
                    for stage in group.stages
                )
        return found

    @property
    def copied_weights(self) -> bool:
        """Whether the host has a copy of weights that are at home on the device: to update it."""
        is_on_host = self.on_accelerators and self.updated_on == "host"
        return is_on_host and self.offload.weights == "device"

    @property
    def copied_gradients(self) -> bool:
        """Whether it has their gradients for the update."""
        return self.copied_weights and self.offload.gradients == "device"


@dataclass(frozen=True)
class StepLoad:
    """What a step has of micro-batches."""

    num_micro_batch: int
    in_flight: Sequence[int]
    """by stage: most micro-batches at the same time"""
    shares: Sequence[int]
    """by rank: samples of the largest micro-batch"""
    activations: Sequence[StageActivations] = ()
    """by stage: what it saves; empty where that stays on the device"""


@dataclass(frozen=True)
class Homes:
    """Where everything is."""

    of: Mapping[tuple[int, str], Sequence[Memory]]
    """(group, class) -> the home of each of its blocks"""
    activations: Memory
    used: Mapping[tuple[str, Memory], float]
    """(host, memory) -> bytes"""


def with_homes(blocks: Sequence[Block], account: OffloadAccount, homes: Homes) -> list[Block]:
    """The blocks of a plan with where they are at home."""
    places: dict[tuple[tuple[int, ...], str], tuple[int, int]] = {}
    for number, group in enumerate(account.groups):
        for place, names in enumerate(group.blocks):
            places[group.ranks, names[0]] = (number, place)
    found = []
    for block in blocks:
        # an optimizer that wants whole parameters has them in another order
        number, place = next(
            places[block.ranks, name] for name in block.parameters if (block.ranks, name) in places
        )
        weights, gradients, states = (
            homes.of[number, what][place] for what in ("weights", "gradients", "optimizer")
        )
        on_host = account.updated_on == "host" and states != "device"
        found.append(
            replace(
                block,
                weights=weights,
                gradients=gradients,
                states=states,
                updated_on="host" if on_host else "device",
            )
        )
    return found
