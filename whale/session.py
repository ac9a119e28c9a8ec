"""Settings of this process: what `wh.init` read, the ranks of the job, and where a script stops
that `whale plan`, `whale advise` or `whale profile` runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from whale.annotation import set_default_strategy
from whale.capture.prepare import CapturedModel
from whale.cluster.cluster import Cluster
from whale.config import Config
from whale.distributed.job_cluster import ClusterLike
from whale.distributed.ranks import Ranks
from whale.planning.problem import Problem
from whale.plans.plan import Plan
from whale.search.tries import SearchProgress


@dataclass
class Session:
    """Settings of this process, made by `init`."""

    config: Config
    ranks: Ranks | None = None
    num_devices: int | None = None
    """set by `whale plan -n N`: pretend to have so many devices"""
    cluster: ClusterLike | None = None
    """given to `init`"""
    planned_cluster: Cluster | None = None
    """set by `whale plan --cluster`"""
    is_parallelized: bool = False
    """whether the script has called `parallelize`"""
    captures_only: bool = False
    """set by `whale profile --model`: `parallelize` captures and stops"""
    on_problem: Callable[[Problem], None] | None = None
    """set by `whale plan` and `whale advise`: sees what is to be planned, before it is"""
    on_progress: Callable[[SearchProgress], None] | None = None
    """set by `whale plan`: sees how far the search has come"""


session = Session(Config())


class PlanReady(BaseException):
    """Raised by `parallelize` under `planning_only`: here is the plan, run no further. No `except
    Exception` of a script stops it.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__("the plan is ready")
        self.plan = plan


class CaptureReady(BaseException):
    """Raised by `parallelize` under `capturing_only`; has the captured model."""

    def __init__(self, prepared: CapturedModel, batch_size: int) -> None:
        super().__init__("the model is captured")
        self.prepared = prepared
        self.batch_size = batch_size


def init(
    config: Config | dict[str, Any] | None = None, *, cluster: ClusterLike | None = None
) -> None:
    """Starts Whale in this process: reads the config and, under a launcher, joins the other ranks.

    `cluster`: a `Cluster` or the path of a cluster file, also `{"cluster": path}` in the config;
    without one, ranks find their devices.
    """
    checked = config if isinstance(config, Config) else Config(config)
    if session.ranks is not None:
        set_default_strategy(None)  # a new start; what was said before the first one stays
    session.config = checked
    session.cluster = cluster
    if session.num_devices is None:
        session.ranks = Ranks(checked.device, checked.timeout_s, checked.stall_timeout_s)


def configure(**changes: Any) -> Config:
    """The settings of this process with these changed; starts Whale where `init` was not called.
    What a trainer knows besides (precision, seed) comes in this way.
    """
    if session.ranks is None:
        init(session.config.replace(**changes))
    else:
        session.config = session.config.replace(**changes)
    return session.config


def num_devices() -> int:
    """Number of devices of this job (the seeds' `total_gpu`)."""
    return session.num_devices if session.num_devices is not None else ranks_of_job().num_ranks


def rank() -> int:
    """This process's number among the ranks; 0 without a launcher."""
    return 0 if session.num_devices is not None else ranks_of_job().rank


def ranks_of_job() -> Ranks:
    """This process among those of the job; joins them where `init` was not called."""
    if session.ranks is None:
        session.ranks = Ranks(
            session.config.device, session.config.timeout_s, session.config.stall_timeout_s
        )
    return session.ranks


def checked_config(config: Config | dict[str, Any] | None) -> Config:
    """What was given, read; the settings of this process where nothing was."""
    if config is None:
        return session.config
    return config if isinstance(config, Config) else Config(config)


@contextlib.contextmanager
def planning_only(
    num_devices: int,
    cluster: Cluster | None = None,
    on_problem: Callable[[Problem], None] | None = None,
    on_progress: Callable[[SearchProgress], None] | None = None,
) -> Iterator[None]:
    """Scripts run under this stop at `parallelize`, which raises `PlanReady`. Used by
    `whale plan` and `whale advise`; `on_problem` gets what is to be planned, `on_progress` how far
    the search has come.
    """
    session.on_problem = on_problem
    session.on_progress = on_progress
    session.num_devices = num_devices
    session.planned_cluster = cluster
    try:
        yield
    finally:
        session.num_devices = session.planned_cluster = None
        session.on_problem = session.on_progress = None


@contextlib.contextmanager
def capturing_only() -> Iterator[None]:
    """Scripts run under this stop at `parallelize`, which raises `CaptureReady`. Used by
    `whale profile --model`.
    """
    session.captures_only = True
    session.num_devices = 1
    try:
        yield
    finally:
        session.captures_only = False
        session.num_devices = None
