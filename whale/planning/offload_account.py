"""The account of what is at home outside of the devices: how much of it each memory holds, what stays
on the devices, what moves in a step, and where the optimizer runs.

With own parts of blocks of W bytes of weights (trained: T) on a rank, states of r T:

    optimizer on the host    out: gradients T; work: (3 + 2 r) T at the rate of the host's memory;
                             in: weights T; one after the other. The host has a copy of the
                             weights, and the gradients                                     (1)
    optimizer on the device  in: states r T; out: states r T, two blocks of them at a time  (2)

whichever is shorter for the slowest rank. Weights and gradients that are at home elsewhere are
updated there: they need neither go out nor in for (1). CPU ranks update states where they lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from whale.cluster.cluster import Cluster, Memories
from whale.planning.balance import DeviceLoads
from whale.planning.offload import Offload
from whale.planning.split import Split
from whale.planning.workload import Workload
from whale.planning.zero import ZeroChoice
from whale.plans.away import (
    AwayFigures,
    Held,
    StageActivations,
    Traffic,
    Transfers,
    UpdateTimes,
)
from whale.plans.blocks import STATES, WEIGHTS_TOO, Block, Memory, slots_of
from whale.plans.figures import Figures
from whale.plans.plan import DeviceMemory
from whale.scheduling.memory import NOTHING
from whale.simulation.memory import ACTIVATIONS, GRADIENTS, OPTIMIZER, WEIGHTS
from whale.units import human_bytes

UPDATE_PASSES = 3
"""weights are read and written, gradients read; states are read and written besides"""
PRIORITY = ("weights", "activations", "gradients", "optimizer")
"""what gets the memory of the host first where disks must help: what moves most often"""
CLASS_OF = {
    "weights": WEIGHTS,
    "activations": ACTIVATIONS,
    "gradients": GRADIENTS,
    "optimizer": OPTIMIZER,
}
ROUNDING = 1e-9


class Part(NamedTuple):
    """Bytes of one rank's part of a block."""

    weights: float
    trained: float
    alone: float
    """of the trained ones those whose gradients no other rank has, so that they may leave"""


@dataclass(frozen=True)
class Group:
    """Ranks that have the same blocks."""

    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    blocks: tuple[tuple[str, ...], ...]
    sizes: tuple[Part, ...]
    """of the blocks: whole, or on a grid those of the place that holds most"""
    stages_of: tuple[frozenset[int], ...]
    """of each block: the stages that use it"""
    is_grid: bool

    def parts(self, fraction: float) -> list[Part]:
        """Parts of the blocks on a rank that holds this fraction of them."""
        share = 1.0 if self.is_grid else fraction
        return [Part(*(share * number for number in size)) for size in self.sizes]


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
        return [
            self._group(device.index, device.grid is not None)
            for device in self.zero.sharing.virtual_devices
            if device.grid is not None or device in self.zero.sharing.groups
        ]

    def _group(self, index: int, is_grid: bool) -> Group:
        sharing = self.zero.sharing
        device = sharing.virtual_devices[index]
        own = {stage for stage, at in enumerate(sharing.device_of_stage) if at == index}
        cut = self.split.cut_names if is_grid else None
        blocks = []
        for layer in sharing.layers(device):
            names = tuple(name for name in layer if cut is None or name in cut)
            if names:
                blocks.append(names)
        return Group(
            ranks=tuple(sorted(device.all_ranks)),
            stages=tuple(sorted(own)),
            blocks=tuple(blocks),
            sizes=tuple(self._size(names, own, is_grid) for names in blocks),
            stages_of=tuple(
                frozenset(stage for name in names for stage in sharing.holders[name]) & own
                for names in blocks
            ),
            is_grid=is_grid,
        )

    def _size(self, names: Sequence[str], stages: set[int], is_grid: bool) -> Part:
        states = self.workload.captured.state
        weights = trained = alone = 0.0
        for name in names:
            number = float(states[name].num_bytes)
            is_shared = False
            if is_grid:
                number, is_shared = self._on_grid(name, stages)
            weights += number
            if states[name].trainable:
                trained += number
                alone += 0.0 if is_shared else number
        return Part(weights, trained, alone)

    def _on_grid(self, name: str, stages: set[int]) -> tuple[float, bool]:
        """Bytes of a parameter on the device of a grid that holds most of it, and whether others
        hold the same.
        """
        stage = next(each for each in sorted(stages) if name in self.split.shardings[each].stored)
        sharding = self.split.shardings[stage]
        layout = sharding.stored[name]
        item = self.workload.captured.state[name].dtype.itemsize
        is_shared = self.split.placement.num_replicas > 1
        is_shared |= len(layout.same_places(sharding.grid, 0)) > 1
        return float(item * layout.largest_count(sharding.grid)), is_shared

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
                shares = self._shares(group, devices)
                per_host = self._by_host(shares)
                homes: list[Memory] = []
                for size in group.sizes:
                    one = self._class_bytes(size, what, ratio)
                    needed = {host: one * share for host, share in per_host.items()}
                    homes.append(self._place(getattr(self.offload, what), needed, used))
                found[number, what] = homes
        return Homes(found, stage_home, used)

    def _shares(self, group: Group, devices: DeviceLoads) -> dict[int, float]:
        """By rank: the fraction of the sizes of a group that it holds."""
        if group.is_grid:
            return dict.fromkeys(group.ranks, 1.0)
        even = (1 / len(group.ranks),) * len(group.ranks)
        return dict(zip(group.ranks, devices.fractions.get(group.ranks) or even, strict=True))

    def _class_bytes(self, size: Part, what: str, ratio: float) -> float:
        if what == "weights":
            return size.weights
        if what == "gradients":
            return size.alone
        return (ratio + self._copied_weights + self._copied_gradients) * size.trained

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
            for rank, share in self._shares(group, devices).items():
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
        if offload.weights == "device" and self.zero.level == WEIGHTS_TOO:
            return "at level 3 of ZeRO gradients are where the weights are, on the device"
        if self._tied is not None:
            return (
                f"{self._tied} is tied between stages on different devices, which cannot sum its "
                "gradient on their hosts"
            )
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
        absent, pool = self._absent(homes, group, parts)
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

    def _absent(
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
        if absent[GRADIENTS] and own.is_grid:
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
                    update = self._update(rank, classes, trained, len(parts), where)
                    slowest = max(slowest, update.seconds())
            times[where] = slowest
        return min(times, key=lambda where: times[where])

    @property
    def on_accelerators(self) -> bool:
        return self.cluster.has_accelerators_only

    @property
    def _may_update_on_host(self) -> bool:
        """Whether a copy of the weights on the host may be updated (`runtime/zero.py`). Levels above
        1 have parts of gradients on the device in every backward; a grid cuts weights itself; and
        gradients on hosts of accelerators are not all-reduced.
        """
        return (
            self.zero.level == STATES
            and self._tied is None
            and not any(group.is_grid for group in self.groups)
            and all(self.cluster.memories_of(host).memory for host in self.cluster.hosts)
        )

    def _update(
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
        in_s = out_s = 0.0
        if where == "host":
            byte_s = device.kind.byte_s
            if memories.memory is not None:
                byte_s = number / memories.memory.memory_bytes_per_s
            work_s = self.update_passes * trained * byte_s
            if self.on_accelerators and self.offload.weights == "device":
                num_blocks = 1
                rate_in, rate_out = memories.rates("host", number)
                out_s = classes["gradients"].get("device", 0.0) / rate_out
                in_s = trained / rate_in
            for what, is_written in (("weights", True), ("gradients", False), ("optimizer", True)):
                on_disk = classes[what].get("disk", 0.0)
                if on_disk and memories.disk is not None:
                    in_s += on_disk * number / memories.disk.read_bytes_per_s
                    out_s += is_written * on_disk * number / memories.disk.write_bytes_per_s
            return UpdateTimes(out_s, work_s, in_s, max(1, num_blocks))
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
        """By rank: bytes of activations that are elsewhere at the same time. `activations`: by
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

    def figures(self, figures: Figures, devices: DeviceLoads, step: StepLoad) -> Figures:
        """The figures of a plan with what is at home elsewhere. `figures`: as if activations were
        on the devices, and blocks on those that ZeRO gives them to.
        """
        activations = self.activation_bytes(step.activations, step.in_flight, step.shares)
        homes = self.homes(devices, activations)
        made: dict[object, AwayFigures] = {}
        update_s = list(figures.update_s)
        for number, group in enumerate(self.groups):
            for rank, share in self._shares(group, devices).items():
                device = self.cluster.devices[rank]
                key = (
                    number,
                    share,
                    replace(self.cluster.memories_of(device.host), host=""),
                    self.num_ranks[device.host],
                    device.kind,
                    step.shares[rank],
                )
                if key not in made:
                    made[key] = self._of_rank(rank, number, share, homes, step)
                one = made[key]
                made[key] = replace(one, ranks=(*one.ranks, rank))
                update_s[rank] *= self._rest(group, one, devices.memory[rank])
        stages = list(figures.stages)
        for number, stage_activations in enumerate(step.activations):
            here = stage_activations.resident(stages[number].memory)
            stages[number] = replace(stages[number], memory=here)
        return replace(
            figures, stages=tuple(stages), update_s=tuple(update_s), away=tuple(made.values())
        )

    def _rest(self, group: Group, one: AwayFigures, memory: DeviceMemory) -> float:
        """The part of a rank's parameters that it updates as if nothing were elsewhere."""
        if not any(one.absent.values()):
            return 1.0
        if not group.is_grid:
            return 0.0
        total = memory.gradient_bytes + one.absent[GRADIENTS]
        trained = sum(part.trained for part in group.sizes)
        return max(0.0, 1 - trained / total) if total else 0.0

    def _of_rank(
        self,
        rank: int,
        number: int,
        share: float,
        homes: Homes,
        step: StepLoad,
    ) -> AwayFigures:
        group = self.groups[number]
        parts = group.parts(share)
        host = self.cluster.devices[rank].host
        rates = _Rates(self.cluster.memories_of(host), self.num_ranks[host])
        absent, pool = self._absent(homes, number, parts)
        classes = self._by_memory(homes, number, parts)
        trained = sum(part.trained for part in parts)
        update = UpdateTimes()
        if any(absent.values()):
            update = self._update(rank, classes, trained, len(parts), self.updated_on)
        own_step = replace(step, shares=(step.shares[rank],))
        forward, backward = self._transfers(homes, number, parts, own_step, rates)
        return AwayFigures(
            ranks=(),
            held=tuple(self._held(homes, classes, trained, rank, step)),
            absent=absent,
            pool_bytes=pool,
            stages=group.stages,
            forward=tuple(forward),
            backward=tuple(backward),
            update=update,
            updated_on=self.updated_on,
            traffic=tuple(self._traffic(homes, group, classes, rank, step)),
        )

    def _by_memory(
        self, homes: Homes, group: int, parts: Sequence[Part]
    ) -> dict[str, dict[Memory, float]]:
        """Class -> memory -> bytes of this rank's parts of blocks."""
        found: dict[str, dict[Memory, float]] = {}
        for what in ("weights", "gradients", "optimizer"):
            own: dict[Memory, float] = {}
            for home, part in zip(homes.of[group, what], parts, strict=True):
                number = part.weights if what == "weights" else part.trained
                if what == "optimizer":
                    number *= self.zero.ratio
                if what == "gradients" and home != "device":
                    own["device"] = own.get("device", 0.0) + part.trained - part.alone
                    number = part.alone
                own[home] = own.get(home, 0.0) + number
            found[what] = own
        return found

    def _transfers(
        self,
        homes: Homes,
        number: int,
        parts: Sequence[Part],
        step: StepLoad,
        rates: _Rates,
    ) -> tuple[list[Transfers], list[Transfers]]:
        """What the forwards and backwards of every stage move. `step`: with the share of this rank
        alone.
        """
        group = self.groups[number]
        forward = []
        backward = []
        for stage in group.stages:
            own = [block for block, stages in enumerate(group.stages_of) if stage in stages]
            weights_s = sum(
                parts[block].weights * rates.in_s(homes.of[number, "weights"][block])
                for block in own
            )
            gradients_s = sum(
                parts[block].alone * rates.out_s(homes.of[number, "gradients"][block])
                for block in own
            )
            out_s = rates.out_s(homes.activations)
            in_s = rates.in_s(homes.activations)
            size = NOTHING
            pieces = [len(own)] if weights_s or gradients_s else []
            if step.activations:
                size = step.activations[stage].moved
                pieces.append(step.activations[stage].num_pieces(step.shares[0]))
            count = max(1, min(pieces, default=1))
            forward.append(
                Transfers(
                    weights_s, size.fixed_bytes * out_s, 0.0, size.sample_bytes * out_s, count
                )
            )
            in_again = weights_s + size.fixed_bytes * in_s
            backward.append(Transfers(in_again, gradients_s, size.sample_bytes * in_s, 0.0, count))
        return forward, backward

    def _held(
        self,
        homes: Homes,
        classes: Mapping[str, Mapping[Memory, float]],
        trained: float,
        rank: int,
        step: StepLoad,
    ) -> Iterator[Held]:
        for what, own in classes.items():
            for memory, number in own.items():
                if memory != "device" and number:
                    yield Held(CLASS_OF[what], memory, number)
        if self._copied_weights and trained:
            yield Held(WEIGHTS, "host", trained)
        if self._copied_gradients and trained:
            yield Held(GRADIENTS, "host", trained)
        by_rank = self.activation_bytes(step.activations, step.in_flight, step.shares)
        if by_rank.get(rank):
            yield Held(ACTIVATIONS, homes.activations, by_rank[rank])

    @property
    def _copied_weights(self) -> bool:
        """Whether the host has a copy of weights that are at home on the device: to update it."""
        is_on_host = self.on_accelerators and self.updated_on == "host"
        return is_on_host and self.offload.weights == "device"

    @property
    def _copied_gradients(self) -> bool:
        """Whether it has their gradients for the update."""
        return self._copied_weights and self.offload.gradients == "device"

    def _traffic(
        self,
        homes: Homes,
        group: Group,
        classes: Mapping[str, Mapping[Memory, float]],
        rank: int,
        step: StepLoad,
    ) -> Iterator[Traffic]:
        """Bytes of a step by class and memory."""
        times = step.num_micro_batch
        is_updated = self.offload.has_blocks
        on_device = is_updated and self.updated_on == "device"
        for memory, number in classes["weights"].items():
            if memory != "device" and number:
                yield Traffic(WEIGHTS, memory, (2 * times + on_device) * number, on_device * number)
            elif self._copied_weights and number:
                yield Traffic(WEIGHTS, "host", number, 0.0)
        for memory, number in classes["gradients"].items():
            if memory != "device" and number:
                yield Traffic(GRADIENTS, memory, on_device * number, times * number)
            elif self._copied_gradients and number:
                yield Traffic(GRADIENTS, "host", 0.0, number)
        for memory, number in classes["optimizer"].items():
            if memory != "device" and number and (on_device or memory == "disk"):
                yield Traffic(OPTIMIZER, memory, number, number)
        if homes.activations != "device":
            number = sum(
                step.activations[stage].moved.of(step.shares[rank]) for stage in group.stages
            )
            yield Traffic(ACTIVATIONS, homes.activations, times * number, times * number)


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


@dataclass(frozen=True)
class _Rates:
    """Seconds for each byte between a device and the memories of its host."""

    memories: Memories
    num_ranks: int

    def in_s(self, memory: Memory) -> float:
        return 0.0 if memory == "device" else 1 / self.memories.rates(memory, self.num_ranks)[0]

    def out_s(self, memory: Memory) -> float:
        return 0.0 if memory == "device" else 1 / self.memories.rates(memory, self.num_ranks)[1]


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
