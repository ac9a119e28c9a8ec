"""Figures of a plan with something at home outside of the devices: what every rank has where, what
its actions bring and take away, what moves in a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from whale.cluster.cluster import Memories
from whale.planning.balance import DeviceLoads
from whale.planning.offload_account import Homes, OffloadAccount, StepLoad
from whale.planning.offload_groups import Group, Part
from whale.planning.workload import INSIDE_OPERATIONS
from whale.plans.away import AwayFigures, Held, StageAhead, Traffic, Transfers, UpdateTimes
from whale.plans.blocks import Memory
from whale.plans.figures import Figures, ZeroFigures
from whale.plans.plan import DeviceMemory
from whale.scheduling.memory import NOTHING
from whale.simulation.memory import ACTIVATIONS, GRADIENTS, OPTIMIZER, WEIGHTS

CLASS_OF = {
    "weights": WEIGHTS,
    "activations": ACTIVATIONS,
    "gradients": GRADIENTS,
    "optimizer": OPTIMIZER,
}


def with_offload(
    figures: Figures, account: OffloadAccount, devices: DeviceLoads, step: StepLoad
) -> Figures:
    """The figures of a plan with what is at home elsewhere. `figures`: as if activations were
    on the devices, and blocks on those that ZeRO gives them to.
    """
    maker = _OfRank(account, step)
    activations = account.activation_bytes(step.activations, step.in_flight, step.shares)
    homes = account.homes(devices, activations)
    made: dict[object, AwayFigures] = {}
    update_s = list(figures.update_s)
    for number, group in enumerate(account.groups):
        for rank, share in account.shares(group, devices).items():
            device = account.cluster.devices[rank]
            key = (
                number,
                share,
                replace(account.cluster.memories_of(device.host), host=""),
                account.num_ranks[device.host],
                device.kind,
                step.shares[rank],
            )
            if key not in made:
                made[key] = maker.figures(rank, number, share, homes)
            one = made[key]
            made[key] = replace(one, ranks=(*one.ranks, rank))
            update_s[rank] *= _rest(group, one, devices.memory[rank])
    stages = list(figures.stages)
    for number, stage_activations in enumerate(step.activations):
        here = stage_activations.resident(stages[number].memory)
        stages[number] = replace(stages[number], memory=here, moments=())
    away = tuple(made.values())
    absent = {rank: sum(each.absent.values()) for each in away for rank in each.ranks}
    return replace(
        figures,
        stages=tuple(stages),
        update_s=tuple(update_s),
        away=away,
        zero=tuple(_with_spared(group, absent) for group in figures.zero),
    )


def _with_spared(group: ZeroFigures, absent: Mapping[int, float]) -> ZeroFigures:
    """A group of ranks without the workspace of what they have elsewhere. `absent`: bytes of that,
    by rank.
    """
    spared = []
    for rank, known in zip(group.ranks, group.spared_bytes, strict=True):
        spared.append(known + round(INSIDE_OPERATIONS * absent.get(rank, 0.0)))
    return replace(group, spared_bytes=tuple(spared))


def _rest(group: Group, one: AwayFigures, memory: DeviceMemory) -> float:
    """The part of a rank's parameters that it updates as if nothing were elsewhere."""
    if not any(one.absent.values()):
        return 1.0
    if not group.is_grid:
        return 0.0
    total = memory.gradient_bytes + one.absent[GRADIENTS]
    trained = sum(part.trained for part in group.sizes)
    return max(0.0, 1 - trained / total) if total else 0.0


@dataclass(frozen=True)
class _OfRank:
    """Makes the figures of one rank at a time."""

    account: OffloadAccount
    step: StepLoad

    def figures(self, rank: int, number: int, share: float, homes: Homes) -> AwayFigures:
        """What a rank has elsewhere of a group. `share`: its fraction of the blocks."""
        step = self.step
        group = self.account.groups[number]
        parts = group.parts(share)
        host = self.account.cluster.devices[rank].host
        rates = _Rates(self.account.cluster.memories_of(host), self.account.num_ranks[host])
        absent, pool = self.account.absent(homes, number, parts)
        classes = self._by_memory(homes, number, parts)
        trained = sum(part.trained for part in parts)
        update = UpdateTimes()
        if any(absent.values()):
            update = self.account.update_times(
                rank, classes, trained, len(parts), self.account.updated_on
            )
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
            updated_on=self.account.updated_on,
            traffic=tuple(self._traffic(homes, group, classes, rank, step)),
            ahead=self._ahead(homes, number, parts, update),
        )

    def _ahead(
        self, homes: Homes, number: int, parts: Sequence[Part], update: UpdateTimes
    ) -> tuple[StageAhead, ...]:
        """Updates of every stage that may run under the next forward, by `Block.may_wait`. A block
        of several stages is updated for the first of them.
        """
        group = self.account.groups[number]
        trained = sum(part.trained for part in parts)
        if self.account.updated_on != "host" or not trained:
            return ()
        bytes_of = dict.fromkeys(group.stages, 0.0)
        number_of = dict.fromkeys(group.stages, 0)
        for block, part in enumerate(parts):
            is_here = homes.of[number, "weights"][block] == "device"
            if homes.of[number, "optimizer"][block] == "device" or (group.is_grid and is_here):
                continue
            stage = min(group.stages_of[block])
            bytes_of[stage] += part.trained
            number_of[stage] += 1
        second = update.ahead_s() / trained
        found = [StageAhead(second * bytes_of[s], max(1, number_of[s])) for s in group.stages]
        return tuple(found) if any(bytes_of.values()) else ()

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
                    number *= self.account.zero.ratio
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
        group = self.account.groups[number]
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
        if self.account.copied_weights and trained:
            yield Held(WEIGHTS, "host", trained)
        if self.account.copied_gradients and trained:
            yield Held(GRADIENTS, "host", trained)
        by_rank = self.account.activation_bytes(step.activations, step.in_flight, step.shares)
        if by_rank.get(rank):
            yield Held(ACTIVATIONS, homes.activations, by_rank[rank])

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
        is_updated = self.account.offload.has_blocks
        on_device = is_updated and self.account.updated_on == "device"
        for memory, number in classes["weights"].items():
            if memory != "device" and number:
                yield Traffic(WEIGHTS, memory, (2 * times + on_device) * number, on_device * number)
            elif self.account.copied_weights and number:
                yield Traffic(WEIGHTS, "host", number, 0.0)
        for memory, number in classes["gradients"].items():
            if memory != "device" and number:
                yield Traffic(GRADIENTS, memory, on_device * number, times * number)
            elif self.account.copied_gradients and number:
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
class _Rates:
    """Seconds for each byte between a device and the memories of its host."""

    memories: Memories
    num_ranks: int

    def in_s(self, memory: Memory) -> float:
        return 0.0 if memory == "device" else 1 / self.memories.rates(memory, self.num_ranks)[0]

    def out_s(self, memory: Memory) -> float:
        return 0.0 if memory == "device" else 1 / self.memories.rates(memory, self.num_ranks)[1]
