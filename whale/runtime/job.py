"""What an engine is made from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from whale.capture.batch import BatchLayout
from whale.capture.clean import tied_names
from whale.capture.export import Task
from whale.capture.lengths import Numbers
from whale.capture.model_call import Loss
from whale.capture.prepare import CapturedModel
from whale.config import Config
from whale.distributed.platform import Platform, StandIn
from whale.distributed.ranks import Ranks
from whale.plans.plan import Plan
from whale.plans.shards import Shards
from whale.runtime.homes import HomeMaker
from whale.runtime.spill import SpillFolder
from whale.runtime.zero import Zero, trained_parts

logger = logging.getLogger("whale")


@dataclass
class Job:
    """What an engine is made from: the same on every rank, but for `weights`."""

    model: torch.nn.Module
    loss: Loss | None
    config: Config
    plan: Plan
    sample: BatchLayout
    prepared: CapturedModel
    weights: dict[str, Tensor]
    """this rank's parameters and buffers, by first name"""
    names: dict[str, str]
    """every tensor name of the model -> first name of the same tensor"""
    platform: Platform
    zero: Zero | None = None
    """parameters that are cut over ranks; None: each holder has all of what it holds"""
    longest: Mapping[str, int] = field(default_factory=dict)
    """lengths that were planned for, by name; others are those of the sample"""
    home_makers: dict[str, HomeMaker] = field(default_factory=dict)
    """class of blocks (`weights`, `states`, `activations`) -> what makes their homes"""
    replan: Callable[[CapturedModel, Numbers], Plan] | None = None
    """the plan for a graph with these numbers as lengths, made on rank 0; None: never anew"""

    warned: set[str] = field(default_factory=set)
    """warnings that were given"""

    @staticmethod
    def of_stand_in(stand_in: StandIn, platform: Platform) -> Job:
        """The job that trains a small model in place of the user's."""
        return Job(
            stand_in.model,
            None,
            stand_in.config,
            stand_in.plan,
            stand_in.layout,
            stand_in.prepared,
            stand_in.weights,
            tied_names(stand_in.model),
            platform,
        )

    @property
    def ranks(self) -> Ranks:
        return self.platform.ranks

    @cached_property
    def shards(self) -> Shards:
        """Who holds which part of which tensor."""
        return Shards(self.plan)

    @cached_property
    def state_shards(self) -> Shards:
        """Who updates which part of which parameter, and has its gradient and optimizer state."""
        return Shards(self.plan, "states") if self.plan.blocks else self.shards

    @property
    def updated(self) -> Mapping[str, Tensor]:
        """This rank's parameters as its optimizer updates them: of those that are cut its rows."""
        return trained_parts(self.zero, self.weights)

    def warn_once(self, warning: str) -> None:
        """Logs a warning for the first time that it is given, on rank 0."""
        if self.ranks.rank == 0 and warning not in self.warned:
            self.warned.add(warning)
            logger.warning(warning)

    @cached_property
    def spill(self) -> SpillFolder:
        """The folder with what this rank has on disk, made when it is first asked for."""
        folder = self.config.folder
        if self.plan.folders and self.plan.figures is not None:
            host = self.plan.figures.network.hosts[self.ranks.rank]
            folder = self.plan.folders.get(str(host), folder)
        if folder is None:
            raise ValueError(
                '"offload" to disk needs a folder for its files. Try: "run_folder" in the config, '
                'a folder in the cluster file, or "host" in place of "disk"'
            )
        return SpillFolder(Path(folder), self.ranks.rank, self.ranks.num_ranks)

    def homes(self, what: str) -> HomeMaker:
        """Makes homes for blocks of one class."""
        if what not in self.home_makers:
            self.home_makers[what] = HomeMaker(self.ranks.device, lambda: self.spill, what)
        return self.home_makers[what]

    def remove_spilled(self) -> None:
        """Ends what copies to files of this rank, and removes them, if there are any."""
        for maker in self.home_makers.values():
            maker.close()
        if "spill" in self.__dict__:
            self.spill.close()

    @property
    def task(self) -> Task:
        config = self.config
        return Task(self.loss, self.ranks.device.type, config.autocast, config.capture_cache)
