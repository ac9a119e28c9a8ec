"""One emulated job on one rank: how long its actions, messages and sums take, what its memory
holds, and what happened when.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whale.capture.batch import read_batch
from whale.capture.capture import tied_names
from whale.capture.prepare import CapturedModel
from whale.cluster.cluster import Cluster
from whale.config import Config
from whale.distributed.ranks import Ranks
from whale.emulation.links import EmulatedTransport, NetworkCards
from whale.emulation.memory import EmulatedOutOfMemory, Memory
from whale.emulation.pace import Pace, stretch_factor, wake_up_on_time
from whale.emulation.settings import Settings, free_memory_bytes
from whale.emulation.stub import Stub, batch_of, make_stub
from whale.emulation.sums import SumClock
from whale.emulation.timeline import Recorder
from whale.lowering.program import Program
from whale.planning.planner import apply_plan
from whale.planning.pricing import price
from whale.plans.figures import Figures
from whale.plans.plan import Plan
from whale.runtime.shapes import Job
from whale.scheduling import Action, check
from whale.scheduling.action import ENDS_BACKWARD
from whale.simulation.memory import shared_bytes
from whale.simulation.simulate import figures_in
from whale.simulation.sums import sums_of
from whale.simulation.times import Times
from whale.units import human_bytes, human_seconds

logger = logging.getLogger("whale")

STATE_PER_WEIGHT = 2
"""Adam's, to guess whether a plan fits on this machine before there is an optimizer"""


def emulated_cluster(settings: Settings, ranks: Ranks) -> Cluster:
    """The cluster of an emulated job: devices in the order of the file, whatever hosts the ranks
    run on. All ranks call it.
    """
    cluster: Cluster | None = None
    error: Exception | None = None
    try:
        if ranks.rank == 0:
            cluster = Cluster.load(settings.cluster)
            if cluster.num_devices != ranks.num_ranks:
                raise ValueError(
                    f"{settings.cluster} has {cluster.num_devices} devices, this job has "
                    f"{ranks.num_ranks} ranks: "
                    f"start it with `whale run --emulate`, which starts one for each device"
                )
    except Exception as problem:
        error = problem
    ranks.together(error)
    found: Cluster = ranks.from_first(cluster)
    return found


@dataclass(frozen=True)
class _Told:
    """What rank 0 tells the others."""

    figures: Figures
    """of the plan on the emulated cluster"""
    is_stub: bool
    cards: str | None


class Emulation:
    """What makes this rank a device of the emulated cluster. All ranks make it together."""

    def __init__(
        self,
        settings: Settings,
        cluster: Cluster,
        plan: Plan,
        prepared: CapturedModel | None,
        ranks: Ranks,
        config: Config,
    ) -> None:
        """`prepared`: the captured model, which only rank 0 needs; None: the plan has figures of
        this cluster, stub chunks run.
        """
        self.cluster = cluster
        self.full_plan = plan
        self.ranks = ranks
        told = _tell(settings, cluster, plan, prepared, ranks, config)
        self.figures = told.figures
        self.times = Times(_on(plan, cluster), told.figures)
        self.factor = settings.stretch or stretch_factor(self.times.shortest_s)
        self.stub: Stub | None = make_stub(plan, told.figures) if told.is_stub else None
        self._cards = _open_cards(told.cards, cluster, ranks)
        sums = sums_of(plan, told.figures, config.bucket_bytes, self.factor)
        own = plan.stages_of_rank(ranks.rank)
        self.sums = SumClock(sums, ranks, own, cluster, self._cards)
        self.memory = self._place_weights(own, config.bucket_bytes)
        self.run_folder = str(Path(settings.folder).parent)
        self.recorder = Recorder(
            Path(settings.folder),
            self.times,
            self.factor,
            ranks.rank,
            self.stub is not None,
            self.memory,
            cluster,
        )
        self._paces: dict[int, Pace] = {}
        wake_up_on_time()
        if ranks.rank == 0:
            self._announce()

    def _place_weights(self, own_stages: Sequence[int], bucket_bytes: int) -> Memory:
        """All ranks refuse together what does not fit from the start."""
        figures = self.figures.on(self.ranks.rank)
        error = None
        shared = shared_bytes(self.full_plan, figures, own_stages)
        memory = Memory(
            self.cluster.devices[self.ranks.rank], figures, own_stages, shared, bucket_bytes
        )
        try:
            memory.place_weights()
        except EmulatedOutOfMemory as problem:
            error = problem
        self.ranks.together(error)
        return memory

    def _announce(self) -> None:
        text = (
            f"emulating {self.cluster.num_devices} devices; times are stretched by "
            f"{self.factor:.4g}, "
        )
        text += (
            f"a step is predicted to take {human_seconds(self.recorder.prediction.gradients_s)} "
        )
        text += "(without the update of the weights, which is not emulated)"
        if self.stub is not None:
            text += "; stub chunks stand for the model: losses mean nothing"
        print(f"whale: {text}", flush=True)

    @property
    def plan(self) -> Plan:
        """What the ranks really run: the plan, or that of the stub."""
        return self.full_plan if self.stub is None else self.stub.plan

    def transport(self, pairs: Iterable[tuple[int, int]], share_memory: bool) -> EmulatedTransport:
        transport = EmulatedTransport(
            self.ranks, pairs, self.cluster, self._cards, self.factor, share_memory
        )
        if self.stub is not None:
            transport.num_bytes = self.stub.num_bytes
        return transport

    def pace(self, program: Program, is_training: bool) -> Pace:
        """Times of all compute actions of a program of this rank."""
        samples = [stop - start for start, stop in program.samples]
        actions = [action for action in program.actions if action.is_compute]
        seconds = {
            a: self.factor * self.times.seconds(a, self.ranks.rank, samples[a.micro_batch])
            for a in actions
        }
        if not is_training:
            return Pace(seconds)
        last = {action.stage: action for action in actions if action.kind in ENDS_BACKWARD}
        last_backward_s = {stage: seconds[action] for stage, action in last.items()}

        def note(action: Action) -> None:
            self.sums.last_backward_s = last_backward_s
            self.memory.start(action, samples[action.micro_batch])
            self.memory.end(
                action, samples[action.micro_batch], is_last=last.get(action.stage) is action
            )

        pace = self._paces[id(program)] = Pace(seconds, note=note)
        return pace

    def stand_in(self, batch: Any) -> Any:
        """With stub chunks only the size of a batch counts."""
        if self.stub is None:
            return batch
        size = getattr(
            batch, "batch_size", None
        )  # a batch of engine.loader, of which this rank may hold nothing
        return batch_of(size if isinstance(size, int) else read_batch(batch)[0].batch_size)

    def begin_step(self) -> None:
        self.memory.begin_step()
        self.sums.begin()

    def end_step(
        self,
        events: list[tuple[Action, float, float]],
        sums: tuple[float, float],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        """`sums`: when this rank began to wait for gradient sums, and when they were there."""
        self.memory.update(optimizer)
        self.recorder.add(events, sums, list(self._paces.values()))

    def stub_weights(self) -> dict[str, Tensor]:
        """This rank's parameters of the stub."""
        assert self.stub is not None
        own = set(self.plan.stages_of_rank(self.ranks.rank))
        return {
            name: self.stub.model.get_parameter(name)
            for name, stages in self.plan.holders.items()
            if own & set(stages)
        }


def _on(plan: Plan, cluster: Cluster) -> Plan:
    """The plan may have been made for another cluster: what counts are the emulated devices."""
    return replace(plan, device_kinds=tuple(device.kind.name for device in cluster.devices))


def _tell(
    settings: Settings,
    cluster: Cluster,
    plan: Plan,
    prepared: CapturedModel | None,
    ranks: Ranks,
    config: Config,
) -> _Told:
    told: _Told | None = None
    error: Exception | None = None
    try:
        if ranks.rank == 0:
            figures = _figures(cluster, plan, prepared, config)
            needed = _bytes_of_all_ranks(Times(plan, figures))
            free = free_memory_bytes()
            is_stub = settings.stub or prepared is None or needed > free
            if is_stub and not settings.stub:
                sizes = human_bytes(needed), human_bytes(free)
                logger.warning(
                    "the plan takes about %s and this machine has %s free: stub chunks stand for "
                    "the model",
                    *sizes,
                )
            told = _Told(figures, is_stub, _create_cards(cluster))
    except Exception as problem:
        error = problem
    ranks.together(error)
    found: _Told = ranks.from_first(told)
    return found


def _figures(
    cluster: Cluster, plan: Plan, prepared: CapturedModel | None, config: Config
) -> Figures:
    """Of the plan on the emulated cluster, which need not be the one that it was made for."""
    if prepared is None:
        return figures_in(plan)
    ratio = plan.figures.optimizer_ratio if plan.figures is not None else STATE_PER_WEIGHT
    assignment = apply_plan(plan, prepared.captured, prepared.kinds)
    return figures_in(price(plan, prepared.captured, assignment, cluster, ratio, config.dtype))


def stub_job(emulation: Emulation, config: Config) -> Job:
    """The job of a rehearsal, which trains the stub in place of the model."""
    stub = emulation.stub
    held = emulation.stub_weights()
    assert stub is not None
    own = config.replace(
        run_folder=emulation.run_folder
    )  # the script's own folder may hold a real run
    return Job(
        stub.model,
        None,
        own,
        stub.plan,
        stub.layout,
        stub.prepared,
        held,
        tied_names(stub.model),
        emulation.ranks,
        emulation,
    )


def _bytes_of_all_ranks(times: Times) -> float:
    """Weights, gradients, their buckets, optimizer state and activations of all devices
    together.
    """
    plan = times.plan
    total = 0.0
    for state in times.figures.states:
        one = state.weight_bytes + state.buffer_bytes + (2 + STATE_PER_WEIGHT) * state.trained_bytes
        total += one * len(_ranks_of(plan, state.stages))
    in_flight = check(times.schedule).peak_in_flight
    for stage, figures in enumerate(times.figures.stages):
        total += (
            in_flight[stage] * figures.kept_sample_bytes * plan.batch_size / plan.num_micro_batch
        )
    return total


def _ranks_of(plan: Plan, stages: tuple[int, ...]) -> set[int]:
    return {rank for stage in stages for rank in plan.ranks_of_stage(stage)}


def _create_cards(cluster: Cluster) -> str | None:
    """A file in which the processes of this machine tell each other when network cards are free;
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
