"""The price of one cut into stages: schedule, load and memory of every device, without
recomputation and with it where memory asks for that (`PricedCut.choose`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf

from whale import scheduling
from whale.capture.graph import CapturedGraph
from whale.capture.sample_states import batch_dim
from whale.operations.nodes import trains_batch_norm
from whale.planning.balance import DeviceLoads, refuse_unless_it_fits
from whale.planning.cuts import SAME_TIME
from whale.planning.describe import crossings, describe_stages, holders
from whale.planning.offload import Offload
from whale.planning.offload_account import UPDATE_PASSES, OffloadAccount
from whale.planning.pricing import stage_seconds
from whale.planning.problem import Problem
from whale.planning.recompute import Counts, Regions
from whale.planning.recompute_choice import Choice, Demand, Stages, enough
from whale.planning.schedules import (
    FIXED_ORDERS,
    MemoryLimits,
    fastest_schedule,
    fixed_schedule,
    lean_schedule,
    schedule_costs,
)
from whale.planning.split import Split, together_seconds
from whale.planning.split_memory import activations_on_grid, grid_memory, repeated_part
from whale.planning.stages import Assignment
from whale.planning.task_graphs import TaskGraphs
from whale.planning.workload import Workload
from whale.planning.zero import ZeroChoice, level_of
from whale.planning.zero_blocks import Sharing
from whale.plans.away import StageActivations
from whale.plans.blocks import GRADIENTS_TOO, STATES
from whale.plans.plan import Crossing, DeviceMemory, Stage
from whale.plans.shares import Load
from whale.plans.virtual_devices import DevicePlacement, VirtualDevice

FEW_TRIES = 1
"""the least that a search does: known orders and a handful of passes"""


@dataclass(frozen=True)
class Priced:
    """The price of one choice of what is recomputed."""

    stages: tuple[Stage, ...]
    schedule: scheduling.Schedule
    device_loads: DeviceLoads
    fastest: scheduling.Schedule
    """whatever the memory"""

    @property
    def is_lean(self) -> bool:
        """The schedule was made for the memory that there is."""
        return self.schedule is not self.fastest


@dataclass(frozen=True)
class PricedCut:
    """One cut into stages, with the price of every choice of what is recomputed."""

    problem: Problem
    workload: Workload
    task_graphs: TaskGraphs
    split: Split
    assignment: Assignment
    device_of_stage: tuple[int, ...]

    @property
    def placement(self) -> DevicePlacement:
        return self.split.placement

    @cached_property
    def _stages_saved(self) -> Stages:
        """What each stage saves for backward, by what of it is recomputed."""
        wanted = self.problem.config.recompute
        return Stages(self.workload, self.assignment, wanted, is_away=self._is_away)

    @property
    def _is_away(self) -> bool:
        """Activations are at home elsewhere."""
        return self.offload.activations != "device"

    @cached_property
    def _stages_here(self) -> Stages:
        """The same if activations stayed on the device."""
        return replace(self._stages_saved, is_away=False)

    def regions(self, stages: Sequence[Stage]) -> tuple[Regions, ...]:
        """What is recomputed in backward, by stage."""
        return tuple(
            self._stages_saved.regions(stage.index, (stage.num_regions, stage.num_recomputed))
            for stage in stages
        )

    @cached_property
    def crossings(self) -> tuple[Crossing, ...]:
        problem = self.problem
        micro_batch = problem.batch_size / problem.config.num_micro_batch
        return crossings(
            problem.captured,
            self.assignment,
            self.placement,
            self.device_of_stage,
            problem.cluster,
            micro_batch,
        )

    @cached_property
    def stage_graph(self) -> scheduling.StageGraph:
        edges = tuple(sorted({(c.source, c.destination) for c in self.crossings}))
        gradient_edges = tuple(
            sorted({(c.source, c.destination) for c in self.crossings if c.gradient})
        )
        return scheduling.StageGraph(self.device_of_stage, edges, gradient_edges)

    def choose(self) -> tuple[Priced, Priced]:
        """(nothing recomputed, the best); raises where memory is too small."""
        wanted = self.problem.config.recompute
        name = self.problem.config.schedule
        nothing = self.price(self._stages_saved.nothing, name)
        is_short = self.is_short(nothing)
        if wanted is not True and not (wanted == "auto" and is_short):
            self._refuse_unless_it_fits(nothing)
            return nothing, nothing
        candidates = [(choice, name) for choice in self._choices(nothing)]
        if self.problem.is_trial and wanted == "auto" and name not in FIXED_ORDERS:
            # the other choices follow from the fastest order, which is not searched for
            candidates = [(self._stages_saved.nothing, name)]
        if name not in FIXED_ORDERS and is_short:
            # regions for the micro-batches that 1F1B has in flight are others
            with_1f1b = self.price(self._stages_saved.nothing, "1f1b")
            candidates += [(choice, "1f1b") for choice in self._choices(with_1f1b)]
        priced = self._worth_looking_at(candidates)
        fitting = [each for each in priced if self._fits(each)]
        if not fitting:
            self._refuse_unless_it_fits(priced[-1])
        return nothing, min(fitting, key=self.step_seconds)

    def _choices(self, nothing: Priced) -> list[Choice]:
        """What may be recomputed, for the schedule of `nothing`: see `recompute_choice.py`."""
        everything = self._stages_saved.everything(nothing.fastest)
        if self.problem.config.recompute is True:
            return [everything]
        demands = self._demands(nothing)
        some = enough(self._stages_saved, demands, nothing.fastest)
        found = [self._stages_saved.nothing, some, everything]
        if self._is_away and not self._fits_elsewhere(nothing, dict(enumerate(found[0]))):
            saving = replace(self._stages_saved, is_short_elsewhere=True)
            found.append(enough(saving, demands, nothing.fastest))
            found.append(saving.everything(nothing.fastest))
        return list(dict.fromkeys(found))

    def _worth_looking_at(self, candidates: Sequence[tuple[Choice, str]]) -> list[Priced]:
        """Priced; without those for which every order takes longer than one that fits. Known orders
        come first: they need no search.
        """
        found: dict[int, Priced] = {}
        best_s = inf
        for place in sorted(
            range(len(candidates)), key=lambda place: candidates[place][1] not in FIXED_ORDERS
        ):
            choice, name = candidates[place]
            if self._least_seconds(choice) <= best_s * (1 + SAME_TIME):
                found[place] = self.price(choice, name)
                if self._fits(found[place]):
                    best_s = min(
                        best_s, 0.0 if self.problem.is_trial else self.step_seconds(found[place])
                    )
        return [found[place] for place in sorted(found)]

    def _least_seconds(self, choice: Choice) -> float:
        """Least seconds of any order, if these regions are recomputed."""
        count = self.problem.config.num_micro_batch
        return scheduling.lower_bound(
            self.stage_graph, self.costs(self._stages(choice), count), count
        )

    def price(self, choice: Choice, name: str) -> Priced:
        """The choice with the fastest schedule of this name, or where memory limits that one, with
        a schedule made for the memory.
        """
        if (choice, name) not in self._prices:
            self._prices[choice, name] = self._price(choice, name)
        return self._prices[choice, name]

    @cached_property
    def _prices(self) -> dict[tuple[Choice, str], Priced]:
        return {}

    def _price(self, choice: Choice, name: str) -> Priced:
        count = self.problem.config.num_micro_batch
        stages = self._stages(choice)
        costs = self.costs(stages, count)
        is_trial = self.problem.is_trial
        schedule = fastest_schedule(
            "1f1b" if is_trial and name not in FIXED_ORDERS else name,
            self.stage_graph,
            count,
            costs,
            self.problem.schedule_tries,
            self.problem.is_proved,
        )
        fastest = Priced(stages, schedule, self._device_loads(choice, schedule), schedule)
        if name in FIXED_ORDERS or not self.is_short(fastest):
            return fastest
        saved = [self._stages_saved.memory_of(stage, counts) for stage, counts in enumerate(choice)]
        workspace = [self.workload.gradient_workspace(part) for part in self.assignment.slices]
        shares = fastest.device_loads.without_limits().samples_by_rank(
            self.problem.largest_micro_batch
        )
        limits = MemoryLimits(
            self.placement.virtual_devices,
            self.device_of_stage,
            saved,
            workspace,
            fastest.device_loads.memory,
            shares,
        ).limit(costs)
        schedule = lean_schedule(
            name,
            self.stage_graph,
            count,
            limits,
            FEW_TRIES if is_trial else self.problem.schedule_tries,
            self.problem.is_proved,
        )
        lean = Priced(stages, schedule, self._device_loads(choice, schedule), fastest.schedule)
        return lean if self._fits(lean) or not self._fits(fastest) else fastest

    def _stages(self, choice: Choice) -> tuple[Stage, ...]:
        problem = self.problem
        workload = self.workload
        kinds = [
            [problem.cluster.devices[rank].kind for rank in device.all_ranks]
            for device in self.placement.virtual_devices
        ]
        times = []
        for stage, (part, device) in enumerate(
            zip(self.assignment.slices, self.device_of_stage, strict=True)
        ):
            again = self._stages_saved.regions(stage, choice[stage])
            if stage in self.split.shardings:
                part_again = repeated_part(workload, self.split.spaces[stage], again)
                times.append(
                    together_seconds(
                        self.split.shardings[stage], problem.config.num_micro_batch, part_again
                    )
                )
                continue
            times.append(
                stage_seconds(
                    workload, part.operations, kinds[device], problem.config.num_micro_batch, again
                )
            )
        described = describe_stages(
            problem.captured,
            self.task_graphs,
            self.assignment,
            self.device_of_stage,
            workload.costs,
            times,
        )
        return tuple(
            replace(stage, num_regions=regions, num_recomputed=recomputed)
            for stage, (regions, recomputed) in zip(described, choice, strict=True)
        )

    def costs(self, stages: tuple[Stage, ...], num_micro_batch: int) -> scheduling.Costs:
        return schedule_costs(self.stage_graph, stages, self.crossings, num_micro_batch)

    def _fits(self, priced: Priced) -> bool:
        return priced.device_loads.fits(
            self.problem.batch_size, self.problem.config.num_micro_batch
        )

    def is_short(self, priced: Priced) -> bool:
        """Whether memory is short: it makes the step longer, or is too small at all."""
        if priced.is_lean or not self._fits(priced):
            return True
        slowest_s = priced.device_loads.divide(self.problem.largest_micro_batch).slowest_s
        return self.lost_seconds(priced) > SAME_TIME * slowest_s

    def lost_seconds(self, priced: Priced) -> float:
        """How much longer the slowest device takes for its micro-batches because memory keeps
        samples from faster ones.
        """
        size = self.problem.largest_micro_batch
        count = self.problem.config.num_micro_batch
        free_s = priced.device_loads.without_limits().divide(size).slowest_s
        return count * (priced.device_loads.divide(size).slowest_s - free_s)

    def step_seconds(self, priced: Priced) -> float:
        """Seconds of forwards and backwards, in the order of the schedule."""
        costs = self.costs(priced.stages, self.problem.config.num_micro_batch)
        return scheduling.simulate(priced.schedule, costs).step_s + self.lost_seconds(priced)

    def _refuse_unless_it_fits(self, priced: Priced) -> None:
        config = self.problem.config
        choice = tuple((stage.num_regions, stage.num_recomputed) for stage in priced.stages)

        def loads_with(num_micro_batch: int) -> DeviceLoads:
            # 1F1B is what others come to where memory is short
            name = config.schedule if config.schedule in FIXED_ORDERS else "1f1b"
            return self._device_loads(
                choice, fixed_schedule(name, self.stage_graph, num_micro_batch)
            )

        def recompute_fits() -> bool:
            return config.recompute is False and self._fits(
                self.price(self._stages_saved.everything(priced.schedule), config.schedule)
            )

        again = (
            ", even with all activations recomputed in backward"
            if any(number for _, number in choice)
            else ""
        )
        refuse_unless_it_fits(
            priced.device_loads,
            self.problem.batch_size,
            config.num_micro_batch,
            loads_with,
            recompute_fits,
            again,
        )

    def _demands(self, priced: Priced) -> list[Demand]:
        """What every VirtualDevice is to hold if speed alone decides on the schedule and who gets
        which samples.
        """
        shares = priced.device_loads.without_limits().samples_by_rank(
            self.problem.largest_micro_batch
        )
        saved: dict[int, int] = {}
        if self.zero.level:  # regions are chosen for devices that hold everything
            whole = self.whole_loads(priced).memory
            for rank, memory in enumerate(priced.device_loads.memory):
                saved[rank] = whole[rank].static_bytes - memory.static_bytes
        found = []
        for device in self.placement.virtual_devices:
            ranks = []
            for rank in device.all_ranks:
                memory_bytes = self.problem.cluster.devices[rank].kind.memory_bytes
                ranks.append((shares[rank], memory_bytes + saved.get(rank, 0)))
            stages = tuple(self._stages_of(device))
            order = priced.fastest.orders[device.index]
            shared = self._shared_bytes(stages) if device.grid is None else 0
            if self.zero.level:
                shared = 0
            most = (
                partial(self._most_on_grid, stages, priced.fastest)
                if device.grid is not None
                else None
            )
            elsewhere = partial(self._fits_elsewhere, priced) if self._is_away else None
            found.append(Demand(stages, order, shared, tuple(ranks), most, elsewhere))
        return found

    def _fits_elsewhere(self, priced: Priced, choice: Mapping[int, Counts]) -> bool:
        """Whether the hosts have memory for what is at home there, in the schedule of `priced`."""
        whole = tuple(choice[stage] for stage in range(len(choice)))
        activations = self._activations(whole, priced.fastest, priced.device_loads)
        homes = self.account.homes(priced.device_loads, activations)
        return self.account.shortage(homes) is None

    def _most_on_grid(
        self,
        stages: Sequence[int],
        schedule: scheduling.Schedule,
        whole: DeviceMemory,
        choice: Mapping[int, Counts],
    ) -> DeviceMemory:
        """Memory of the place of their grid that needs most, from that of one device that runs these
        stages alone.
        """
        return max(
            self._on_grid(stages, whole, choice, schedule), key=lambda part: part.static_bytes
        )

    def _on_grid(
        self,
        stages: Sequence[int],
        whole: DeviceMemory,
        choice: Mapping[int, Counts],
        schedule: scheduling.Schedule,
    ) -> list[DeviceMemory]:
        """Memory of every place of their grid."""
        flying = [scheduling.peaks_in_flight(schedule)[stage] for stage in stages]
        regions = {stage: self._stages_saved.regions(stage, choice[stage]) for stage in stages}
        return grid_memory(self.workload, self.split, stages, whole, flying, regions, self._is_away)

    def _device_loads(
        self, choice: Choice, schedule: scheduling.Schedule, shares_blocks: bool = True
    ) -> DeviceLoads:
        """Load and memory of every rank. On a grid a sample is one of the replica's, which all its
        devices do together. `shares_blocks`: with the level of ZeRO that is asked for.
        """
        problem = self.problem
        workload = self.workload
        kinds = [device.kind for device in problem.cluster.devices]
        loads = {}
        memory = {}
        for device in self.placement.virtual_devices:
            stages = self._stages_of(device)
            operations = [
                node for stage in stages for node in self.assignment.slices[stage].operations
            ]
            again = {
                node
                for stage in stages
                for node in self._stages_saved.regions(stage, choice[stage])
            }
            is_here = device.grid is not None or not shares_blocks
            known = self._stages_here if is_here else self._stages_saved
            needed = known.memory(stages, dict(enumerate(choice)), schedule.orders[device.index])
            if device.grid is not None:
                load = Load(
                    sum(self._grid_seconds(stage, choice[stage]) for stage in stages)
                    / self.split.num_samples
                )
                for place, part in enumerate(
                    self._on_grid(stages, needed, dict(enumerate(choice)), schedule)
                ):
                    for rank in (members[place] for members in device.ranks):
                        loads[rank], memory[rank] = (
                            load,
                            replace(part, capacity_bytes=kinds[rank].memory_bytes),
                        )
                continue
            if not self.zero.level:
                needed = needed.with_shared(self._shared_bytes(tuple(stages)))
            totals = {
                kind: workload.times(operations, kind, again).total
                for kind in {kinds[rank] for rank in device.all_ranks}
            }
            for rank in device.all_ranks:
                loads[rank] = Load(totals[kinds[rank]].sample_s, totals[kinds[rank]].fixed_s)
                memory[rank] = replace(needed, capacity_bytes=kinds[rank].memory_bytes)
        ranks = range(problem.cluster.num_devices)
        least = _least_samples(problem.captured, self.assignment)
        if self.zero.level >= GRADIENTS_TOO and any(
            len(group.ranks) > 1 for group in self.zero.groups
        ):
            least = 1  # all ranks of a block meet in every backward
        devices = DeviceLoads(
            self.placement.virtual_devices,
            tuple(loads[rank] for rank in ranks),
            tuple(memory[rank] for rank in ranks),
            tuple(kind.name for kind in kinds),
            least,
            workload.batch_bytes / (problem.mini_batch_size or problem.batch_size),
        )
        if not shares_blocks:
            return devices
        if self.zero.level:
            devices = self._with_zero(devices)
        if not self.offload.is_any:
            return devices
        return self.account.apply(devices, self._activations(choice, schedule, devices))

    def _with_zero(self, devices: DeviceLoads) -> DeviceLoads:
        """The devices with parts of the blocks: as much as each has memory for, of what stays on
        devices.
        """
        size = self.problem.largest_micro_batch
        if not self.offload.has_blocks:
            return self.zero.apply(devices, size)
        if self.offload.level == STATES < self.zero.level:
            without = tuple(replace(each, optimizer_bytes=0) for each in devices.memory)
            light = replace(self.zero, ratio=0.0).apply(replace(devices, memory=without), size)
            return self.zero.with_fractions(devices, light.fractions)
        return self.zero.with_fractions(devices, {})

    def _activations(
        self, choice: Choice, schedule: scheduling.Schedule, devices: DeviceLoads
    ) -> dict[int, float]:
        """By rank: bytes of activations that are elsewhere at the same time."""
        if not self._is_away:
            return {}
        shares = devices.without_limits().samples_by_rank(self.problem.largest_micro_batch)
        in_flight = scheduling.peaks_in_flight(schedule)
        return self.account.activation_bytes(self.activations(choice), in_flight, shares)

    def activations(self, choice: Choice) -> list[StageActivations]:
        """What every stage saves of a micro-batch, if that is at home elsewhere."""
        return [self._activations_of(stage, counts) for stage, counts in enumerate(choice)]

    def _activations_of(self, stage: int, counts: Counts) -> StageActivations:
        if stage not in self.split.shardings:
            return self._stages_saved.activations_of(stage, counts)
        if (stage, counts) not in self._known_activations:
            self._known_activations[stage, counts] = activations_on_grid(
                self.workload,
                self.split.spaces[stage],
                self.split.shardings[stage],
                self._stages_saved.regions(stage, counts),
            )
        return self._known_activations[stage, counts]

    @cached_property
    def _known_activations(self) -> dict[tuple[int, Counts], StageActivations]:
        return {}

    @cached_property
    def account(self) -> OffloadAccount:
        """What is at home elsewhere, and what that costs."""
        ratio = self.workload.optimizer_ratio
        passes = UPDATE_PASSES + 2 * ratio
        work = self.problem.update_work
        if self.problem.updates_whole and work is not None:
            passes = work.passes  # torch has no fused form of these on the CPU
        return OffloadAccount(
            self.offload, self.problem.cluster, self.zero, self.split, self.workload, passes
        )

    @cached_property
    def offload(self) -> Offload:
        """Where the classes of tensors are at home."""
        wanted = self.problem.offload or Offload.of(self.problem.config)
        return wanted.as_run(self.problem.cluster.has_accelerators_only)

    @cached_property
    def zero(self) -> ZeroChoice:
        """ZeRO of the level that the config asks for, or that what is at home elsewhere takes."""
        sharing = Sharing(
            self.problem.captured,
            holders(self.problem.captured, self.assignment),
            self.device_of_stage,
            self.placement.virtual_devices,
            self.problem.updates_whole,
            alone=self.offload.is_any,
        )
        level = max(level_of(self.problem.config.zero), self.offload.level)
        return ZeroChoice(sharing, level, self.workload.optimizer_ratio)

    def whole_loads(self, priced: Priced) -> DeviceLoads:
        """Load and memory of every rank if nothing were cut over ranks."""
        choice = tuple((stage.num_regions, stage.num_recomputed) for stage in priced.stages)
        return self._device_loads(choice, priced.schedule, shares_blocks=False)

    def _grid_seconds(self, stage: int, counts: Counts) -> float:
        """Seconds of one micro-batch, its share of the all-reduces of gradients included."""
        sharding = self.split.shardings[stage]
        again = repeated_part(
            self.workload, self.split.spaces[stage], self._stages_saved.regions(stage, counts)
        )
        return sum(together_seconds(sharding, 1, again)) + sharding.sum_seconds

    def _stages_of(self, device: VirtualDevice) -> list[int]:
        return [stage for stage, index in enumerate(self.device_of_stage) if index == device.index]

    def _shared_bytes(self, stages: tuple[int, ...]) -> int:
        """Bytes of gradients on these stages, all those of one VirtualDevice, that are all-reduced
        with other devices.
        """
        return self._shared_bytes_of_device[self.device_of_stage[stages[0]]] if stages else 0

    @cached_property
    def _shared_bytes_of_device(self) -> dict[int, int]:
        problem = self.problem
        replicas = self.placement.num_replicas
        devices = self.placement.virtual_devices
        found = dict.fromkeys(range(len(devices)), 0)
        for name, held_by in holders(problem.captured, self.assignment).items():
            owners = {self.device_of_stage[stage] for stage in held_by}
            state = problem.captured.state[name]
            if (
                state.kind == "parameter"
                and state.trainable
                and (
                    problem.has_other_replicas
                    or len(owners) > 1
                    or replicas * devices[min(owners)].num_devices > 1
                )
            ):
                for owner in owners:
                    found[owner] += state.num_bytes
        return found


def _least_samples(captured: CapturedGraph, assignment: Assignment) -> int:
    """0 where a device may skip a micro-batch: no sums over devices inside it, no buffers to
    update, no value without samples to send.
    """
    sums_inside = any(
        trains_batch_norm(node) or "all_reduce" in node.meta for node in captured.compute_nodes()
    )
    unbatched = any(
        batch_dim(node, captured.batch_symbol) is None for node, _, _ in assignment.crossings
    )
    return 1 if sums_inside or unbatched or captured.buffer_updates else 0
