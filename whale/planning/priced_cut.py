"""The price of one cut into stages: schedule, load and memory of every device, without
recomputation and with it where memory asks for that (`PricedCut.choose`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf

from whale import scheduling
from whale.planning.balance import DeviceLoads, refuse_unless_it_fits
from whale.planning.cut_account import CutAccount
from whale.planning.cuts import SAME_TIME
from whale.planning.describe import crossings, describe_stages
from whale.planning.pricing import stage_seconds
from whale.planning.recompute import Counts, counts_of
from whale.planning.recompute_choice import Choice, Demand, enough, enough_cheap
from whale.planning.schedules import (
    FIXED_ORDERS,
    MemoryLimits,
    fastest_schedule,
    fixed_schedule,
    lean_schedule,
    schedule_costs,
)
from whale.planning.split import together_seconds
from whale.planning.split_memory import repeated_part
from whale.plans.plan import Crossing, Stage

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
class PricedCut(CutAccount):
    """One cut into stages, with the price of every choice of what is recomputed."""

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
            found.append(enough_cheap(self._stages_saved, demands))
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
            if stage in self.split.shardings:
                regions = self._stages_saved.regions(stage, choice[stage])
                part_again = repeated_part(workload, self.split.spaces[stage], regions)
                times.append(
                    together_seconds(
                        self.split.shardings[stage], problem.config.num_micro_batch, part_again
                    )
                )
                continue
            again = self._stages_saved.again(stage, choice[stage])
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
            replace(
                stage,
                num_regions=counts.num_regions,
                num_recomputed=counts.num_recomputed,
                has_cheap_regions=counts.is_cheap,
            )
            for stage, counts in zip(described, choice, strict=True)
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
        choice = tuple(map(counts_of, priced.stages))

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
            if any(counts.num_recomputed for counts in choice)
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

    def whole_loads(self, priced: Priced) -> DeviceLoads:
        """Load and memory of every rank if nothing were cut over ranks."""
        choice = tuple(map(counts_of, priced.stages))
        return self._device_loads(choice, priced.schedule, shares_blocks=False)
