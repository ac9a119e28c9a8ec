"""What a user calls: `parallelize` and `plan`. Each step of the flow stands here in its order;
`init` and the settings of this process are in `session.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from whale.capture.batch import BatchLayout, read_batch
from whale.capture.capture import WAS_IN_EVAL_MODE, Trust, capture_model
from whale.capture.clean import tied_names
from whale.capture.errors import CaptureError
from whale.capture.export import Task
from whale.capture.lengths import declared
from whale.capture.model_call import Loss
from whale.capture.prepare import CapturedModel
from whale.cluster.cluster import Cluster
from whale.config import Config
from whale.costs.optimizer_factory import knowing_attributes
from whale.distributed.job_cluster import (
    ClusterLike,
    chosen_cluster,
    cluster_to_plan_for,
    read_cluster,
)
from whale.distributed.platform import Platform
from whale.distributed.ranks import Ranks
from whale.emulation.emulation import platform_of_this_job
from whale.lowering.weights import (
    Init,
    build_on_meta,
    has_real_weights,
    refuse_shared_memory,
)
from whale.model_planner import ModelPlanner
from whale.notebook import Plan  # one that shows itself in a notebook
from whale.planning.planner import fingerprint
from whale.plans.plan import LEFT_OUT
from whale.plans.shards import Shards
from whale.runtime.captures import captured_for_each
from whale.runtime.checkpoints import Pretrained, load_pretrained
from whale.runtime.engine import Engine
from whale.runtime.job import Job
from whale.runtime.local_model import refuse_use
from whale.runtime.start import (
    check_num_devices,
    check_same_job,
    one_precision,
    own_weights,
    same_model,
)
from whale.runtime.update import OptimizerFactory, SchedulerFactory, check_factories
from whale.session import (
    CaptureReady,
    PlanReady,
    capturing_only,
    checked_config,
    configure,
    init,
    num_devices,
    planning_only,
    rank,
    ranks_of_job,
    session,
)

logger = logging.getLogger("whale")

WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")
"""of torch, around a model"""

Model = torch.nn.Module | Callable[[], torch.nn.Module]


def plan(
    model: Model,
    sample_batch: Any,
    *,
    loss: Loss | None = None,
    cluster: ClusterLike | int | None = None,
    config: Config | dict[str, Any] | None = None,
    optimizer: OptimizerFactory | None = None,
    dynamic: Mapping[Any, Any] | None = None,
) -> Plan:
    """The plan for a model on a cluster. Needs no processes, no GPUs and no weights: the model may
    be on `meta`.

    `cluster`: a `Cluster`, the path of a cluster file (its devices in its order), a number of
    devices, or None for the devices of this job. `optimizer`: as for `parallelize`, for the memory
    of its state; without one, that of Adam is counted. `dynamic`: as for `parallelize`.
    """
    checked = checked_config(config)
    built = _built(model)
    layout, tensors = read_batch(sample_batch)
    lengths = declared(dynamic, layout)
    layout = layout.with_lengths(lengths.names)
    prepared = _prepare(built, layout, tensors, loss, checked, "cpu")
    planner = ModelPlanner(
        built,
        _cluster_without_ranks(cluster, checked),
        checked,
        layout.batch_size,
        knowing_attributes(optimizer, built),
        on_problem=session.on_problem,
        on_progress=session.on_progress,
    )
    return planner.plan(prepared, prepared.longest(lengths.longest))


def parallelize(
    model: Model,
    sample_batch: Any,
    *,
    optimizer: OptimizerFactory | None = None,
    scheduler: SchedulerFactory | None = None,
    loss: Loss | None = None,
    init: Init | None = None,
    plan: Plan | str | Path | None = None,
    cluster: ClusterLike | None = None,
    weights: Pretrained | str | Path | None = None,
    prepared: CapturedModel | None = None,
    dynamic: Mapping[Any, Any] | None = None,
) -> Engine:
    """Captures the model, plans it onto the devices of this job, and gives the engine that trains
    it.

    `model`: a module (rank 0's weights count) or a function that builds one. `optimizer`: called
    with (name, parameter) pairs. `cluster`: a `Cluster` or cluster file whose devices are matched
    to the ranks by host name and local rank. `loss(output, batch)`: without it the model returns a
    scalar or something with `.loss`. `plan`: a plan to follow instead of making one. `weights`: a
    safetensors file or Hugging Face folder to start from; each rank reads only its own part.
    `prepared`: a capture made before by the caller, in the same process (tests capture once and run
    many plans). `dynamic`: dims that vary between batches, `{"input_ids": {1: "length"}}`, or with
    the longest one that the plan must have memory for, `{1: ("length", 512)}`; dims of one name are
    equal in every batch. Without it Whale finds them at the first batch of another length.
    """
    session.is_parallelized = True
    check_factories(optimizer, scheduler)
    _refuse_wrapper(model)
    config = session.config
    if session.captures_only or session.num_devices is not None:
        _stop_before_ranks(
            model, sample_batch, loss=loss, cluster=cluster, optimizer=optimizer, dynamic=dynamic
        )
    ranks = ranks_of_job()
    ranks.start_watch()
    check_same_job(ranks, config)
    precision = one_precision(ranks)
    platform = platform_of_this_job(ranks)
    devices = platform.cluster(chosen_cluster(cluster, session.cluster, config.cluster))
    found = _captured(model, sample_batch, loss, dynamic, prepared, platform)
    if found.built is not None:
        optimizer = knowing_attributes(optimizer, found.built)
    planner = found.planner(devices, optimizer)
    chosen = _chosen_plan(plan, found, planner, platform, precision)
    _say_who_is_left_out(chosen, ranks)
    stand_in = platform.start(chosen, found.prepared, devices, config)
    if stand_in is not None:
        return Engine(Job.of_stand_in(stand_in, platform), optimizer, scheduler)
    job = found.job(chosen, platform, init, weights)
    if plan is None and planner is not None:
        job.replan = planner.plan
    return Engine(job, optimizer, scheduler)


def _refuse_wrapper(model: Model) -> None:
    """A model that another framework already distributes is taken out of its wrapper first."""
    for kind in type(model).__mro__:
        if kind.__name__ in WRAPPERS:
            raise ValueError(
                f"the model is wrapped in {kind.__name__}, and Whale distributes it itself. "
                f"Try: wh.parallelize(model.module, ...), and leave {kind.__name__} out"
            )


def _say_who_is_left_out(plan: Plan, ranks: Ranks) -> None:
    """One rank says which devices the plan does not use, and why."""
    for decision in plan.decisions:
        if decision.what == LEFT_OUT and ranks.rank == 0:
            logger.warning("the plan leaves out %s: %s", decision.choice, decision.why)


def _stop_before_ranks(
    model: Model, sample_batch: Any, loss: Loss | None, **options: Any
) -> NoReturn:
    """Under `whale profile --model` and `whale plan` a script ends at `parallelize`."""
    if session.captures_only:
        layout, tensors = read_batch(sample_batch)
        prepared = _prepare(_built(model), layout, tensors, loss, session.config, "cpu")
        raise CaptureReady(prepared, layout.batch_size)
    raise PlanReady(plan(model, sample_batch, loss=loss, config=session.config, **options))


@dataclass(frozen=True)
class _Captured:
    """What this rank knows of the model before it is planned. Where stub chunks run, only rank 0
    has the model.
    """

    loss: Loss | None
    layout: BatchLayout
    longest: Mapping[str, int]
    """sizes that the user declared, by name"""
    built: torch.nn.Module | None = None
    prepared: CapturedModel | None = None
    is_real: bool = False
    """the model has weights of its own"""

    def planner(self, devices: Cluster, optimizer: OptimizerFactory | None) -> ModelPlanner | None:
        """What plans the model, where it is here. Without an optimizer nothing is trained, so there
        is no state of one.
        """
        if self.built is None:
            return None
        size = self.layout.batch_size
        return ModelPlanner(
            self.built,
            devices,
            session.config,
            size,
            optimizer,
            ratio_without=0.0,
            on_problem=session.on_problem,
            on_progress=session.on_progress,
        )

    def job(
        self,
        chosen: Plan,
        platform: Platform,
        init: Init | None,
        weights: Pretrained | str | Path | None,
    ) -> Job:
        """What the engine of this rank is made from, with the weights that the plan gives it."""
        built = self.built
        prepared = self.prepared
        assert built is not None and prepared is not None
        ranks = platform.ranks
        config = session.config
        names = tied_names(built)
        held = own_weights(built, names, chosen, ranks, self.is_real, init, config)
        if weights is not None:
            source = weights if isinstance(weights, Pretrained) else Pretrained(weights)
            load_pretrained(held, names, source, ranks, Shards(chosen))
        refuse_use(built)
        # without lengths where the model fixes them
        layout = self.layout.with_lengths(prepared.capture.layout.length_names)
        return Job(
            model=built,
            loss=self.loss,
            config=config,
            plan=chosen,
            sample=layout,
            prepared=prepared,
            weights=held,
            names=names,
            platform=platform,
            longest=self.longest,
        )


def _captured(
    model: Model,
    sample_batch: Any,
    loss: Loss | None,
    dynamic: Mapping[Any, Any] | None,
    prepared: CapturedModel | None,
    platform: Platform,
) -> _Captured:
    """Builds and captures the model on the ranks that need it. All ranks call it."""
    ranks = platform.ranks
    config = session.config
    with ranks.together():
        layout, tensors = read_batch(sample_batch)
        lengths = declared(dynamic, layout)
        layout = layout.with_lengths(lengths.names)
        found = _Captured(loss, layout, lengths.longest, prepared=prepared)
        if platform.captures_everywhere or ranks.rank == 0:
            built = _built(model)
            is_real = has_real_weights(built)
            refuse_shared_memory(built)
            checked = is_real and config.check_capture and ranks.rank == 0
            if prepared is None:
                prepared = _prepare(
                    built, layout, tensors, loss, config, ranks.device.type, check=checked
                )
                # one rank says so; in what `whale plan` prints it is a note
                if ranks.rank == 0 and WAS_IN_EVAL_MODE in prepared.captured.notes:
                    logger.warning(WAS_IN_EVAL_MODE)
            found = _Captured(loss, layout, lengths.longest, built, prepared, is_real)
    if platform.captures_everywhere:
        assert prepared is not None
        found = replace(found, prepared=same_model(prepared, ranks))
    return found


def _chosen_plan(
    given: Plan | str | Path | None,
    found: _Captured,
    planner: ModelPlanner | None,
    platform: Platform,
    precision: str | None,
) -> Plan:
    """The plan that all ranks follow: the one that the user gives, or that rank 0 makes.
    `precision`: what the plan says of float32 products.
    """
    ranks = platform.ranks
    chosen: Plan | None = None
    with ranks.together():
        if ranks.rank == 0:
            prepared = found.prepared
            assert prepared is not None and planner is not None
            if given is not None:
                chosen = _given_plan(given, prepared)
                platform.check_plan(chosen, planner.cluster)
                planner.check_optimizer(chosen, prepared, is_given=True)
            else:
                chosen = planner.plan(prepared, prepared.longest(found.longest))
                if precision is not None:
                    chosen = replace(chosen, notes=(*chosen.notes, precision))
    plan: Plan | None = ranks.from_first(chosen)
    assert plan is not None
    check_num_devices(plan, ranks)
    return plan


def _built(model: Model) -> torch.nn.Module:
    if isinstance(model, torch.nn.Module):
        if any(isinstance(each, torch.jit.ScriptModule) for each in model.modules()):
            raise ValueError(
                "the model is, or has, a module of torch.jit, which cannot be captured. Try: give "
                "the Python module that was scripted or traced"
            )
        return model
    if not callable(model):
        raise ValueError(
            f"the model is a {type(model).__name__}: give a torch.nn.Module, or a function that "
            "builds one"
        )
    return build_on_meta(model)


def _prepare(
    model: torch.nn.Module,
    layout: BatchLayout,
    tensors: list[torch.Tensor],
    loss: Loss | None,
    config: Config,
    device: str,
    check: bool = False,
) -> CapturedModel:
    """Captures the model, with self-checks where they are asked for and can be made. A model that
    fixes the lengths which the user declared is captured for those of the sample.
    """
    if check:
        trust = Trust.COMPARE
    elif has_real_weights(model) and config.check_capture:
        trust = Trust.ELSEWHERE
    else:
        trust = Trust.NOBODY
    task = Task(loss, device, config.autocast, config.capture_cache)
    if layout.length_names:
        try:
            return capture_model(model, layout, tensors, task, config, trust)
        except CaptureError as error:
            logger.warning("%s", captured_for_each(layout.length_names, error))
            layout = layout.with_lengths({})
    return capture_model(model, layout, tensors, task, config, trust)


def _given_plan(given: Plan | str | Path, prepared: CapturedModel) -> Plan:
    chosen = given if isinstance(given, Plan) else Plan.load(given)
    mine = fingerprint(prepared.captured)
    if chosen.model != mine:
        raise ValueError(
            f"this plan was made for another model: the plan's is {chosen.model[:12]} (batch "
            f"{chosen.batch_size}), this is {mine[:12]}. Try: a new plan by wh.plan or `whale plan`"
        )
    return chosen


def _cluster_without_ranks(cluster: ClusterLike | int | None, config: Config) -> Cluster:
    """The cluster of a plan that is made without ranks: `whale plan --cluster` first, then what the
    script gives, else as many devices as the job has.
    """
    if session.planned_cluster is not None:
        return session.planned_cluster
    if cluster is not None:
        return cluster_to_plan_for(cluster, 1)
    given = chosen_cluster(session.cluster, config.cluster)
    if given is None:
        return cluster_to_plan_for(None, num_devices())
    described = read_cluster(given)
    return described if session.num_devices is not None else described.first(num_devices())


__all__ = [
    "CaptureReady",
    "Engine",
    "Plan",
    "PlanReady",
    "capturing_only",
    "configure",
    "init",
    "num_devices",
    "parallelize",
    "plan",
    "planning_only",
    "rank",
]
