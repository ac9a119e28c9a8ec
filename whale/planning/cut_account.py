"""What one cut into stages asks of every device: its load, its memory, what ranks share of it
(ZeRO) and what is at home elsewhere, for any choice of what is recomputed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch.fx import Node

from whale import scheduling
from whale.capture.graph import CapturedGraph
from whale.capture.sample_states import batch_dim
from whale.cluster.kinds import DeviceKind
from whale.operations.nodes import sums_over_devices
from whale.planning.balance import DeviceLoads
from whale.planning.describe import holders
from whale.planning.offload import Offload
from whale.planning.offload_account import OffloadAccount
from whale.planning.pricing import UPDATE_PASSES
from whale.planning.problem import Problem
from whale.planning.recompute import Counts, Regions, counts_of
from whale.planning.recompute_choice import Choice, Stages
from whale.planning.split import Split, together_seconds
from whale.planning.split_memory import activations_on_grid, grid_memory, repeated_part
from whale.planning.stages import Assignment
from whale.planning.task_graphs import TaskGraphs
from whale.planning.workload import Workload
from whale.planning.zero import ZeroChoice, level_of
from whale.planning.zero_blocks import Sharing
from whale.plans.away import StageActivations
from whale.plans.blocks import GRADIENTS_TOO, STATES
from whale.plans.plan import DeviceMemory, Stage
from whale.plans.shares import Load
from whale.plans.virtual_devices import DevicePlacement, VirtualDevice


@dataclass(frozen=True)
class CutAccount:
    """One cut into stages, with the load and memory of every rank."""

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
        """Whether activations are at home elsewhere."""
        return self.offload.activations != "device"

    @cached_property
    def _stages_here(self) -> Stages:
        """The stages if activations stayed on the device."""
        return replace(self._stages_saved, is_away=False)

    def regions(self, stages: Sequence[Stage]) -> tuple[Regions, ...]:
        """What is recomputed in backward, by stage."""
        return tuple(self._stages_saved.regions(stage.index, counts_of(stage)) for stage in stages)

    def _most_on_grid(
        self,
        stages: Sequence[int],
        schedule: scheduling.Schedule,
        whole: DeviceMemory,
        choice: Mapping[int, Counts],
    ) -> DeviceMemory:
        """Memory of the place of their grid that needs most, from that of one device that runs
        these stages alone.
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
        loads: dict[int, Load] = {}
        memory: dict[int, DeviceMemory] = {}
        for device in self.placement.virtual_devices:
            is_here = device.grid is not None or not shares_blocks
            known = self._stages_here if is_here else self._stages_saved
            stages = self._stages_of(device)
            needed = known.memory(stages, dict(enumerate(choice)), schedule.orders[device.index])
            if device.grid is not None:
                loads |= self._grid_loads(device, choice)
                found = self._on_grid(stages, needed, dict(enumerate(choice)), schedule)
                for members in device.ranks:
                    memory |= dict(zip(members, found, strict=True))
                continue
            loads |= self._replicated_loads(device, choice)
            if not self.zero.level:
                needed = needed.with_shared(self._shared_bytes(tuple(stages)))
            elif self.zero.level >= GRADIENTS_TOO and shares_blocks:
                more = self._whole_gradients(stages, schedule.orders[device.index])
                needed = replace(needed, buffer_bytes=needed.buffer_bytes + more)
            memory |= dict.fromkeys(device.all_ranks, needed)
        ranks = range(problem.cluster.num_devices)
        least = _least_samples(problem.captured, self.assignment)
        if self.zero.level >= GRADIENTS_TOO and any(
            len(group.ranks) > 1 for group in self.zero.groups
        ):
            least = 1  # all ranks of a block meet in every backward
        devices = DeviceLoads(
            self.placement.virtual_devices,
            tuple(loads[rank] for rank in ranks),
            tuple(replace(memory[rank], capacity_bytes=kinds[rank].memory_bytes) for rank in ranks),
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

    def _grid_loads(self, device: VirtualDevice, choice: Choice) -> dict[int, Load]:
        """Load of every rank of a grid: a sample of the replica, which all its devices do."""
        seconds = sum(self._grid_seconds(stage, choice[stage]) for stage in self._stages_of(device))
        return dict.fromkeys(device.all_ranks, Load(seconds / self.split.num_samples))

    def _replicated_loads(self, device: VirtualDevice, choice: Choice) -> dict[int, Load]:
        """Load of every rank that runs the stages of a VirtualDevice alone."""
        operations: list[Node] = []
        again: set[Node] = set()
        for stage in self._stages_of(device):
            own = self.assignment.slices[stage].operations
            repeated = self._stages_saved.again(stage, choice[stage])
            operations += own
            again.update(node for node in own if node in repeated)
        of_kind: dict[DeviceKind, Load] = {}
        loads = {}
        for rank in device.all_ranks:
            kind = self.problem.cluster.devices[rank].kind
            if kind not in of_kind:
                total = self.workload.times(operations, kind, again).total
                of_kind[kind] = Load(total.sample_s, total.fixed_s)
            loads[rank] = of_kind[kind]
        return loads

    def _whole_gradients(self, stages: Sequence[int], order: Sequence[scheduling.Action]) -> int:
        """Bytes of gradients that the second half of a split backward makes before ZeRO reduces
        them: those of a whole stage.
        """
        split = {action.stage for action in order if action.kind is scheduling.Kind.WEIGHT}
        slices = [self.assignment.slices[stage] for stage in stages if stage in split]
        return max((sum(self.workload.trained_bytes(part)) for part in slices), default=0)

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
        """Bytes of activations of each rank that are elsewhere at the same time."""
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
    sums_inside = any(sums_over_devices(node) for node in captured.compute_nodes())
    unbatched = any(
        batch_dim(node, captured.batch_symbol) is None for node, _, _ in assignment.crossings
    )
    return 1 if sums_inside or unbatched or captured.buffer_updates else 0
