"""What is to be planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Node

from whale.annotation import Mark, Strategy
from whale.capture.graph import CapturedGraph
from whale.capture.kinds import ValueKind
from whale.capture.losses import NotAdditive
from whale.cluster.cluster import Cluster
from whale.config import Config
from whale.planning.workload import ADAM_STATE
from whale.plans.shares import micro_batch_sizes


@dataclass(frozen=True)
class Problem:
    """A captured model, the devices that there are, and what the user asked for."""

    captured: CapturedGraph
    """with the loss already split into terms"""
    kinds: Mapping[Node, ValueKind]
    marks: Mapping[Node, Mark]
    default_strategy: Strategy | None
    term_texts: tuple[str, ...]
    not_additive: NotAdditive | None
    """why the loss may not be cut over micro-batches or devices, if so"""
    cluster: Cluster
    config: Config
    batch_size: int
    optimizer_ratio: float = ADAM_STATE
    """bytes of optimizer state for each byte of trainable parameters"""
    is_trial: bool = False
    """only whether it fits is asked: the first draft that does is enough, with one chunk on a
    device where their number is free. Less is searched than for a plan, and nothing else, so that a
    plan can be made where a trial fits"""

    @property
    def largest_micro_batch(self) -> int:
        return max(micro_batch_sizes(self.batch_size, self.config.num_micro_batch))
