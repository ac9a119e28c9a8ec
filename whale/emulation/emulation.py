"""One emulated job on one rank: how long its actions, messages and all-reduces take, what its
memory holds, and what happened when.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whale.capture.batch import read_batch
from whale.capture.prepare import CapturedModel
from whale.cluster.cluster import Cluster
from whale.config import Config
from whale.distributed.job_cluster import ClusterLike
from whale.distributed.platform import Event, Platform, StandIn
from whale.distributed.ranks import Ranks
from whale.emulation.links import AllReduceClock, EmulatedTransport, NetworkCards
from whale.emulation.memory import EmulatedMemory
from whale.emulation.pace import (
    TRIAL_STEPS,
    Pace,
    Trial,
    enough_stretch,
    stretch_factor,
    wake_up_on_time,
)
from whale.emulation.settings import EmulationSettings, free_memory_bytes
from whale.emulation.stub import Stub, batch_of, make_stub
from whale.emulation.timeline import Recorder
from whale.planning.join import joined_figures
from whale.planning.pricing import price
from whale.planning.problem import product_dtype
from whale.planning.stages import apply_plan
from whale.plans.figures import Figures
from whale.plans.plan import Plan
from whale.plans.revise import with_devices
from whale.scheduling import Action, check
from whale.scheduling.action import ENDS_BACKWARD
from whale.simulation.communication import all_reduces_of
from whale.simulation.memory import shared_bytes
from whale.simulation.simulate import figures_in
from whale.simulation.times import Times
from whale.units import human_bytes, human_seconds

logger = logging.getLogger("whale")

STATE_PER_WEIGHT = 2
"""Adam's, to guess whether a plan fits on this machine before there is an optimizer"""


def platform_of_this_job(ranks: Ranks) -> Platform:
    """Emulated devices under `whale run --emulate`, else the real ones."""
    settings = EmulationSettings.of_this_job()
    return Platform(ranks) if settings is None else EmulatedPlatform(ranks, settings)


@dataclass(frozen=True)
class _Start:
    """What rank 0 finds out for all."""

    figures: Figures
    """of the plan on the emulated cluster"""
    is_stub: bool
    cards: str | None
    """path of the file with the network cards"""


class EmulatedPlatform(Platform):
    """Makes each rank a device of the emulated cluster: actions, messages and all-reduces take the
    time of the cost model, memory is counted, and everything is written down.
    """

    updates_during_step = False  # updates are not emulated: they take their own time at the end

    def __init__(self, ranks: Ranks, settings: EmulationSettings) -> None:
        super().__init__(ranks)
        self._settings = settings
        self.stub: Stub | None = None
        self._paces: list[Pace] = []
        self._paces_without_count: list[Pace] = []
        """of evaluations"""
        self._transports: list[EmulatedTransport] = []
        self._trial = Trial() if settings.stretch is None else None
        """while it is not settled how far times are stretched"""
        self._num_trial_steps = 0
        self._has_ended_step = False

    @property
    def captures_everywhere(self) -> bool:
        """Not with stub chunks: nobody needs the model but rank 0, which plans."""
        return not self._settings.stub

    def cluster(self, given: ClusterLike | None) -> Cluster:
        """The devices of the emulated cluster in the order of its file, whatever hosts the ranks
        run on and whatever the script gives.
        """
        cluster: Cluster | None = None
        with self.ranks.together():
            if self.ranks.rank == 0:
                cluster = Cluster.load(self._settings.cluster)
                if cluster.num_devices != self.ranks.num_ranks:
                    raise ValueError(
                        f"{self._settings.cluster} has {cluster.num_devices} devices, this job has "
                        f"{self.ranks.num_ranks} ranks. Try: `whale run --emulate`, which starts "
                        "one for each device"
                    )
        found: Cluster = self.ranks.from_first(cluster)
        return found

    def check_plan(self, plan: Plan, cluster: Cluster) -> None:
        """An emulated job may follow the plan of any cluster."""

    def start(
        self, plan: Plan, prepared: CapturedModel | None, cluster: Cluster, config: Config
    ) -> StandIn | None:
        """Prices the plan on the emulated cluster and fills its memories with the weights.

        Without `prepared` on rank 0 the plan has figures of this cluster, and stub chunks run.
        """
        ranks = self.ranks
        settings = self._settings
        start = self._start(plan, prepared, cluster, config)
        self.full_plan = plan
        self._cluster = cluster
        self.figures = start.figures
        self.times = Times(_on(plan, cluster), start.figures)
        self.factor = settings.stretch or stretch_factor(self.times.shortest_s)
        self.stub = make_stub(plan, start.figures) if start.is_stub else None
        self._cards = _open_cards(start.cards, cluster, ranks)
        self._all_reduces = self._all_reduce_clock()
        own = plan.of_rank(ranks.rank).stages_of_rank(ranks.rank)
        self.memory = self._place_weights(own, plan.settings.bucket_bytes)
        self.recorder = Recorder(
            Path(settings.folder),
            self.times,
            self.factor,
            ranks.rank,
            self.stub is not None,
            self.memory,
            cluster,
        )
        wake_up_on_time()
        if ranks.rank == 0:
            self._announce()
        return self._stand_in(config)

    def _start(
        self, plan: Plan, prepared: CapturedModel | None, cluster: Cluster, config: Config
    ) -> _Start:
        start: _Start | None = None
        with self.ranks.together():
            if self.ranks.rank == 0:
                figures = _figures(cluster, plan, prepared, config)
                needed = _bytes_of_all_ranks(Times(plan, figures))
                free = free_memory_bytes()
                is_stub = self._settings.stub or prepared is None or needed > free
                if is_stub and not self._settings.stub:
                    logger.warning(
                        "the plan takes about %s and this machine has %s free: stub chunks stand "
                        "for the model",
                        human_bytes(needed),
                        human_bytes(free),
                    )
                start = _Start(figures, is_stub, _create_cards(cluster))
        found: _Start = self.ranks.from_first(start)
        return found

    def _all_reduce_clock(self) -> AllReduceClock:
        """The clock of this rank's all-reduces, as far as times are stretched now. All ranks make
        it together.
        """
        plan = self.full_plan
        return AllReduceClock(
            all_reduces_of(plan, self.figures, plan.settings.bucket_bytes, self.factor),
            self.ranks,
            plan.of_rank(self.ranks.rank).stages_of_rank(self.ranks.rank),
            self._cluster,
            self._cards,
        )

    def _place_weights(self, own_stages: Sequence[int], bucket_bytes: int) -> EmulatedMemory:
        """The memory of this rank with the weights in it; all ranks refuse together where they do
        not fit.
        """
        times = self.times.of_rank(self.ranks.rank)
        figures = times.figures.on(self.ranks.rank)
        shared = shared_bytes(times.plan, figures, own_stages)
        device = self._cluster.devices[self.ranks.rank]
        memory = EmulatedMemory(device, figures, own_stages, shared, bucket_bytes)
        with self.ranks.together():
            memory.place_weights()
        return memory

    def _announce(self) -> None:
        predicted = self.recorder.prediction
        update_s = predicted.step_s - predicted.gradients_s
        text = (
            f"emulating {self._cluster.num_devices} devices; times are stretched by "
            f"{self.factor:.4g}, a step is predicted to take {human_seconds(predicted.step_s)}, "
            f"{human_seconds(update_s)} of it for the update of the weights, which is not emulated"
        )
        if self.stub is not None:
            text += "; stub chunks stand for the model: losses mean nothing"
        print(f"whale: {text}", flush=True)

    def _stand_in(self, config: Config) -> StandIn | None:
        stub = self.stub
        if stub is None:
            return None
        view = stub.plan.of_rank(self.ranks.rank)
        own = set(view.stages_of_rank(self.ranks.rank))
        weights: dict[str, Tensor] = {}
        for name, stages in view.holders.items():
            if own & set(stages):
                weights[name] = stub.model.get_parameter(name)
        # the script's own run folder may hold a real run
        folder = str(Path(self._settings.folder).parent)
        return StandIn(
            stub.model,
            stub.prepared,
            stub.layout,
            stub.plan,
            config.replace(run_folder=folder),
            weights,
        )

    @property
    def missing_model(self) -> str | None:
        return None if self.stub is None else "stub chunks stand for the model"

    def transport(self, pairs: Iterable[tuple[int, int]], share_memory: bool) -> EmulatedTransport:
        transport = EmulatedTransport(
            self.ranks, pairs, self._cluster, self._cards, self.factor, share_memory
        )
        if self.stub is not None:
            template = self.full_plan.template_of_rank(self.ranks.rank)
            transport.num_bytes = partial(self.stub.num_bytes, template=template)
        self._transports.append(transport)
        return transport

    def pace(
        self, actions: Sequence[Action], num_samples: Sequence[int], is_training: bool
    ) -> Pace:
        """Times of all compute actions of a program of this rank; in training they fill the
        emulated memory, too.
        """
        seconds: dict[Action, float] = {}
        last: dict[int, Action] = {}
        for action in actions:
            if not action.is_compute:
                continue
            samples = num_samples[action.micro_batch]
            seconds[action] = self.factor * self.times.seconds(action, self.ranks.rank, samples)
            if action.kind in ENDS_BACKWARD:
                last[action.stage] = action
        pace = Pace(seconds)
        if not is_training:
            self._paces_without_count.append(pace)
            return pace

        def note(action: Action) -> None:
            samples = num_samples[action.micro_batch]
            self._all_reduces.last_backward_s = {
                stage: pace.seconds[each] for stage, each in last.items()
            }
            self.memory.start(action, samples)
            self.memory.end(action, samples, is_last=last.get(action.stage) is action)

        pace.note = note
        pace.trial = self._trial
        self._paces.append(pace)
        return pace

    # ---- in every step

    def read_batch(self, batch: Any) -> Any:
        """The batch itself, or with stub chunks a small one of the same number of samples."""
        if self.stub is None:
            return batch
        # a batch of engine.loader, of which this rank may hold nothing
        size = getattr(batch, "batch_size", None)
        return batch_of(size if isinstance(size, int) else read_batch(batch)[0].batch_size)

    def begin_step(self) -> None:
        if self._trial is not None and self._has_ended_step:
            self._has_ended_step = False
            self._settle_stretch(self._trial)
        self.memory.begin_step()
        self._all_reduces.begin()

    def close_stage(self, stage: int) -> None:
        self._all_reduces.close_stage(stage, time.perf_counter())

    def wait_for_all_reduces(self) -> None:
        self._all_reduces.finish()

    def end_step(
        self,
        events: list[Event],
        all_reduces: tuple[float, float],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self.memory.update(optimizer)
        self.recorder.add(events, all_reduces, self._paces)
        self._has_ended_step = True

    def _settle_stretch(self, trial: Trial) -> None:
        """Stretches times further where this machine was too slow for those of the first steps. All
        ranks do it together, before a step: so there is one that counts.
        """
        self._num_trial_steps += 1
        wanted = [number for own in self.ranks.gather(trial.wanted) for number in own]
        before = self.factor
        self.factor = enough_stretch(before, wanted, self.recorder.prediction.step_s)
        if self._num_trial_steps == TRIAL_STEPS:
            self._trial = None
            for pace in self._paces:
                pace.trial = None
        if self.factor == before:
            return
        trial.wanted.clear()
        for pace in (*self._paces, *self._paces_without_count):
            pace.restretch(self.factor / before)
        for transport in self._transports:
            transport.factor = self.factor
        self._all_reduces = self._all_reduce_clock()
        self.recorder.restretch(self.factor)
        if self.ranks.rank == 0:
            print(
                "whale: this machine was too slow for these times, so they are now stretched by "
                f"{self.factor:.4g} instead of {before:.4g}: a step is predicted to take "
                f"{human_seconds(self.recorder.prediction.step_s)} (--stretch sets this)",
                flush=True,
            )

    def close(self) -> None:
        self.recorder.write()


def _on(plan: Plan, cluster: Cluster) -> Plan:
    """The plan may have been made for another cluster: what counts are the emulated devices."""
    kinds = [device.kind.name for device in cluster.devices]
    return with_devices(plan, {"kind": kinds})


def _figures(
    cluster: Cluster, plan: Plan, prepared: CapturedModel | None, config: Config
) -> Figures:
    """Figures of the plan on the emulated cluster, which need not be the one it was made for."""
    if prepared is None:
        return figures_in(plan)
    ratio = plan.figures.optimizer_ratio if plan.figures is not None else STATE_PER_WEIGHT
    captured = prepared.captured
    dtype = product_dtype(config, cluster, plan.settings.float32_precision)
    known = []
    for view in plan.by_template:
        assignment = apply_plan(view, captured, prepared.kinds)
        known.append(figures_in(price(view, captured, assignment, cluster, ratio, dtype)))
    return known[0] if plan.is_uniform else joined_figures(captured, plan, known, cluster)


def _bytes_of_all_ranks(times: Times) -> float:
    """Weights, gradients, their buckets, optimizer state and activations of all devices
    together.
    """
    plan = times.plan
    total = 0.0
    for state in times.figures.states:
        one = state.weight_bytes + state.buffer_bytes + (2 + STATE_PER_WEIGHT) * state.trained_bytes
        total += one * len(_ranks_of(plan, state.stages))
    for own in times.by_template:
        in_flight = check(own.schedule).peak_in_flight
        for stage, figures in enumerate(own.figures.stages):
            total += (
                in_flight[stage]
                * figures.memory.saved.sample_bytes
                * own.plan.batch_size
                / own.plan.num_micro_batch
            )
    return total


def _ranks_of(plan: Plan, stages: tuple[int, ...]) -> set[int]:
    found: set[int] = set()
    for stage in stages:
        found.update(plan.ranks_of_stage(stage))
    return found


def _create_cards(cluster: Cluster) -> str | None:
    """A file in which the processes of this machine share when network cards are free;
    None for one host.
    """
    if len(cluster.hosts) == 1:
        return None
    handle, path = tempfile.mkstemp(prefix="whale-cards-")
    os.close(handle)
    NetworkCards.create(Path(path), len(cluster.hosts))
    return path


def _open_cards(path: str | None, cluster: Cluster, ranks: Ranks) -> NetworkCards | None:
    if path is None:
        return None
    cards = NetworkCards(Path(path), len(cluster.hosts))
    ranks.gather(None)  # all have it open
    if ranks.rank == 0:
        os.unlink(path)
    return cards
