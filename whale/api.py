"""What a user calls: `init`, `parallelize`, `plan`. Each step of the flow stands here in
its order.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from whale.annotation import default_strategy, set_default_strategy
from whale.capture.batch import BatchLayout, digest, read_batch
from whale.capture.capture import Trust, capture_model
from whale.capture.clean import operation_marks, tied_names
from whale.capture.errors import CaptureError
from whale.capture.export import Loss, Task
from whale.capture.lengths import Numbers, declared
from whale.capture.prepare import CapturedModel
from whale.capture.sizes import refuse_unknown_sizes
from whale.cluster.cluster import Cluster
from whale.config import Config
from whale.costs.optimizers import (
    keeps_whole,
    note_on_parts,
    refuse_if_it_looks_at_others,
    state_ratio,
    update_work,
)
from whale.costs.update_work import UpdateWork
from whale.distributed.job_cluster import (
    ClusterLike,
    chosen_cluster,
    cluster_to_plan_for,
    read_cluster,
)
from whale.distributed.ranks import Ranks
from whale.dtypes import as_moved, in_memory
from whale.emulation.emulation import platform_of_this_job
from whale.lowering.weights import (
    Init,
    build_on_meta,
    digest_weights,
    has_real_weights,
    initialise_weights,
    named_tensors,
    refuse_shared_memory,
    take_weights,
)
from whale.notebook import Plan  # one that shows itself in a notebook
from whale.planning.planner import Problem, fingerprint
from whale.planning.workload import ADAM_STATE
from whale.planning.zero import plan_with_owners
from whale.plans.shards import Shards
from whale.runtime.captures import captured_for_each, same_on_all_ranks
from whale.runtime.checkpoints import Pretrained, load_pretrained
from whale.runtime.engine import Engine
from whale.runtime.job import Job
from whale.runtime.local_model import refuse_use
from whale.runtime.update import OptimizerFactory, SchedulerFactory
from whale.search.choose import choose_plan
from whale.search.search import Progress
from whale.units import human_seconds

logger = logging.getLogger("whale")

Model = torch.nn.Module | Callable[[], torch.nn.Module]


@dataclass
class _Session:
    """Settings of this process, made by `init`."""

    config: Config
    ranks: Ranks | None = None
    num_devices: int | None = None
    """set by `whale plan -n N`: pretend to have so many devices"""
    cluster: ClusterLike | None = None
    """given to `init`"""
    planned_cluster: Cluster | None = None
    """set by `whale plan --cluster`"""
    captures_only: bool = False
    """set by `whale profile --model`: `parallelize` captures and goes no further"""
    on_problem: Callable[[Problem], None] | None = None
    """set by `whale plan` and `whale advise`: sees what is to be planned, before it is"""


_session = _Session(Config())


class PlanReady(BaseException):
    """Raised by `parallelize` under `planning_only`: here is the plan, run no further. No `except
    Exception` of a script stops it.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__("the plan is ready")
        self.plan = plan


class CaptureReady(BaseException):
    """Raised by `parallelize` under `capturing_only`: here is the captured model, run no further."""

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
    if _session.ranks is not None:
        set_default_strategy(None)  # a new start; what was said before the first one stays
    _session.config = checked
    _session.cluster = cluster
    if _session.num_devices is None:
        _session.ranks = Ranks(checked.device, checked.timeout_s, checked.stall_timeout_s)


def configure(**changes: Any) -> Config:
    """The settings of this process with these changed; starts Whale where `init` was not called.
    What a trainer knows besides (precision, seed) comes in this way.
    """
    if _session.ranks is None:
        init(_session.config.replace(**changes))
    else:
        _session.config = _session.config.replace(**changes)
    return _session.config


def num_devices() -> int:
    """Number of devices of this job (the seeds' `total_gpu`)."""
    return _session.num_devices if _session.num_devices is not None else _ranks().num_ranks


def rank() -> int:
    """This process's number among the ranks; 0 without a launcher."""
    return 0 if _session.num_devices is not None else _ranks().rank


@contextlib.contextmanager
def planning_only(
    num_devices: int,
    cluster: Cluster | None = None,
    on_problem: Callable[[Problem], None] | None = None,
) -> Iterator[None]:
    """Scripts run under this stop at `parallelize`, which raises `PlanReady`. Used by
    `whale plan` and `whale advise`; `on_problem` gets what is to be planned.
    """
    _session.on_problem = on_problem
    _session.num_devices = num_devices
    _session.planned_cluster = cluster
    try:
        yield
    finally:
        _session.num_devices = _session.planned_cluster = _session.on_problem = None


@contextlib.contextmanager
def capturing_only() -> Iterator[None]:
    """Scripts run under this stop at `parallelize`, which raises `CaptureReady`. Used by
    `whale profile --model`.
    """
    _session.captures_only = True
    _session.num_devices = 1
    try:
        yield
    finally:
        _session.captures_only = False
        _session.num_devices = None


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
    checked = _config(config)
    built = _built(model)
    layout, tensors = read_batch(sample_batch)
    lengths = declared(dynamic, layout)
    layout = layout.with_lengths(lengths.names)
    prepared = _prepare(built, layout, tensors, loss, checked, "cpu")
    ratio = state_ratio(prepared.captured, optimizer) if optimizer is not None else None
    devices = _cluster_without_ranks(cluster, checked)
    numbers = prepared.longest(lengths.longest)
    return _plan(built, prepared, numbers, devices, checked, layout, ratio, optimizer)


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
    config = _session.config
    if _session.captures_only:
        layout, tensors = read_batch(sample_batch)
        captured = _prepare(_built(model), layout, tensors, loss, config, "cpu")
        raise CaptureReady(captured, layout.batch_size)
    if _session.num_devices is not None:
        raise PlanReady(
            globals()["plan"](
                model,
                sample_batch,
                loss=loss,
                cluster=cluster,
                config=config,
                optimizer=optimizer,
                dynamic=dynamic,
            )
        )
    ranks = _ranks()
    ranks.start_watch()
    _check_same_job(ranks, config)
    precision = _one_precision(ranks)
    platform = platform_of_this_job(ranks)
    devices = platform.cluster(chosen_cluster(cluster, _session.cluster, config.cluster))
    built: torch.nn.Module | None = None
    is_real = False
    with ranks.together():
        layout, tensors = read_batch(sample_batch)
        lengths = declared(dynamic, layout)
        layout = layout.with_lengths(lengths.names)
        if platform.captures_everywhere or ranks.rank == 0:
            built = _built(model)
            is_real = has_real_weights(built)
            refuse_shared_memory(built)
            checked = is_real and config.check_capture and ranks.rank == 0
            if prepared is None:
                prepared = _prepare(
                    built, layout, tensors, loss, config, ranks.device.type, check=checked
                )
    if platform.captures_everywhere:
        assert prepared is not None
        prepared = _same_model(prepared, ranks)
    chosen: Plan | None = None
    with ranks.together():
        if ranks.rank == 0:
            assert built is not None and prepared is not None
            if plan is not None:
                chosen = _given_plan(plan, prepared)
                platform.check_plan(chosen, devices)
            else:
                ratio = state_ratio(prepared.captured, optimizer) if optimizer is not None else 0.0
                numbers = prepared.longest(lengths.longest)
                chosen = _plan(built, prepared, numbers, devices, config, layout, ratio, optimizer)
                if precision is not None:
                    chosen = replace(chosen, notes=(*chosen.notes, precision))
    chosen = ranks.from_first(chosen)
    assert chosen is not None
    _check_num_devices(chosen, ranks)
    stand_in = platform.start(chosen, prepared, devices, config)
    if stand_in is not None:
        return Engine(Job.of_stand_in(stand_in, platform), optimizer, scheduler)
    assert built is not None and prepared is not None
    names = tied_names(built)
    held = _weights(built, names, chosen, ranks, is_real, init, config)
    if weights is not None:
        source = weights if isinstance(weights, Pretrained) else Pretrained(weights)
        load_pretrained(held, names, source, ranks, Shards(chosen))
    refuse_use(built)
    # without lengths where the model fixes them
    layout = layout.with_lengths(prepared.capture.layout.length_names)

    def replan(captured: CapturedModel, numbers: Numbers) -> Plan:
        assert built is not None
        ratio = state_ratio(captured.captured, optimizer) if optimizer is not None else 0.0
        return _plan(built, captured, numbers, devices, config, layout, ratio, optimizer)

    job = Job(
        built,
        loss,
        config,
        chosen,
        layout,
        prepared,
        held,
        names,
        platform,
        longest=lengths.longest,
        replan=replan if plan is None else None,
    )
    return Engine(job, optimizer, scheduler)


def _built(model: Model) -> torch.nn.Module:
    if isinstance(model, torch.nn.Module):
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
    task = Task(loss, device, config.autocast)
    if layout.length_names:
        try:
            return capture_model(model, layout, tensors, task, config, trust)
        except CaptureError as error:
            logger.warning("%s", captured_for_each(layout.length_names, error))
            layout = layout.with_lengths({})
    return capture_model(model, layout, tensors, task, config, trust)


def _plan(
    model: torch.nn.Module,
    prepared: CapturedModel,
    numbers: Numbers,
    cluster: Cluster,
    config: Config,
    layout: BatchLayout,
    optimizer_ratio: float | None = None,
    optimizer: OptimizerFactory | None = None,
) -> Plan:
    """The plan for a model with these numbers as lengths."""
    refuse_unknown_sizes(prepared.captured)
    if config.optimizer_state != "fp32":
        optimizer_ratio = _compressed_ratio(config.optimizer_state, optimizer_ratio)
    planned = prepared.at(numbers) if numbers else prepared
    problem = Problem(
        captured=planned.captured,
        kinds=planned.kinds,
        marks=operation_marks(planned.capture, model),
        default_strategy=default_strategy(),
        term_texts=prepared.term_texts(),
        not_additive=prepared.not_additive,
        cluster=cluster,
        config=config,
        batch_size=layout.batch_size,
        optimizer_ratio=ADAM_STATE if optimizer_ratio is None else optimizer_ratio,
        update_work=_update_work(prepared, optimizer, config),
        updates_whole=_updates_whole(prepared, config, optimizer),
        float32_precision=torch.get_float32_matmul_precision(),
    )
    if _session.on_problem is not None:
        _session.on_problem(problem)
    made, _ = choose_plan(problem, _progress)
    # the same for every length: a plan for one is a plan for the model
    made = replace(made, model=fingerprint(prepared.captured))
    if config.optimizer_state != "fp32":
        note = (
            f"optimizer states are held in {config.optimizer_state} between steps "
            '("optimizer_state"): they are rounded, and results are not those of local training'
        )
        made = replace(made, notes=(*made.notes, note))
    if optimizer is None or not made.is_uniform:
        return _with_note_on_parts(made, optimizer)
    stored = [(name, own) for each in made.shardings for name, own in each.stored.items()]
    states = prepared.captured.state
    trained = [name for name, own in stored if own.is_cut and states[name].trainable]
    if not trained or not keeps_whole(optimizer, trained):
        return made
    with_owners = plan_with_owners(made, prepared.captured)
    parts = [name for name in trained if name not in with_owners.owners]
    return _with_note_on_parts(with_owners, optimizer, parts[0]) if parts else with_owners


def _compressed_ratio(kind: str, ratio: float | None) -> float:
    """Bytes of optimizer state for each byte of float32 parameters, where states are held in fewer
    bits; refuses an optimizer that has none.
    """
    if ratio == 0.0:
        raise ValueError(
            f'"optimizer_state": "{kind}" holds the states of the optimizer in fewer bits, and this '
            'optimizer has none of the size of a parameter. Try: "optimizer_state": "fp32", or '
            "AdamW, or SGD with momentum"
        )
    bytes_of_four = {"bf16": 2.0, "int8": 1.0 + 4.0 / 256}[kind]
    return (ADAM_STATE if ratio is None else ratio) * bytes_of_four / 4


def _with_note_on_parts(
    made: Plan, optimizer: OptimizerFactory | None, cut: str | None = None
) -> Plan:
    """The plan with a note where the optimizer sees parts of a parameter, this one say, and gives
    other values on them.
    """
    cut = cut or _first_cut_weight(made)
    note = note_on_parts(optimizer, cut) if optimizer is not None and cut is not None else None
    return made if note is None else replace(made, notes=(*made.notes, note))


def _update_work(
    prepared: CapturedModel, optimizer: OptimizerFactory | None, config: Config
) -> UpdateWork | None:
    """What an update of the user's optimizer launches; None where there is none, or nothing is
    trained.
    """
    states = prepared.captured.state.values()
    names = [state.name for state in states if state.kind == "parameter" and state.trainable]
    is_masked = config.on_nonfinite != "continue" or config.precision == "fp16"
    return update_work(optimizer, names, is_masked) if optimizer is not None and names else None


def _updates_whole(
    prepared: CapturedModel, config: Config, optimizer: OptimizerFactory | None
) -> bool:
    """Whether under ZeRO each parameter must stay whole on the rank that updates it; refuses an
    optimizer that looks at parameters of other ranks.
    """
    asked = f'"zero": {config.zero!r}' if config.zero != 0 else None
    if isinstance(config.offload, dict):
        asked = f'"offload": {config.offload!r}'
    if optimizer is None or asked is None:
        return False
    states = prepared.captured.state.values()
    names = [state.name for state in states if state.kind == "parameter" and state.trainable]
    refuse_if_it_looks_at_others(optimizer, names, asked)
    return bool(names) and keeps_whole(optimizer, names)


def _progress(progress: Progress) -> None:
    """What a search tries, and the best so far: for those who look at the log."""
    best = ""
    if progress.best is not None:
        text = progress.best.candidate.describe()
        best = f"; best: {human_seconds(progress.best.step_s)} a step ({text})"
    logger.info("search: %s %d of %d%s", progress.what, progress.done, progress.of, best)


def _first_cut_weight(plan: Plan) -> str | None:
    """Name of a parameter that is stored in parts; None where all are whole."""
    for template in plan.templates:
        for sharding in template.shardings:
            for name, stored in sharding.stored.items():
                if stored.is_cut:
                    return name
    return None


def _given_plan(given: Plan | str | Path, prepared: CapturedModel) -> Plan:
    chosen = given if isinstance(given, Plan) else Plan.load(given)
    mine = fingerprint(prepared.captured)
    if chosen.model != mine:
        raise ValueError(
            f"this plan was made for another model: the plan's is {chosen.model[:12]} (batch "
            f"{chosen.batch_size}), this is {mine[:12]}. "
            "Try: a new plan by wh.plan or `whale plan`"
        )
    return chosen


def _check_num_devices(chosen: Plan, ranks: Ranks) -> None:
    if chosen.num_devices != ranks.num_ranks:
        raise ValueError(
            f"the plan is for {chosen.num_devices} devices, this job has {ranks.num_ranks}: start "
            "it with that many ranks"
        )


def _same_model(prepared: CapturedModel, ranks: Ranks) -> CapturedModel:
    """The captured model, after all ranks have found theirs to be the same."""
    ranks.agree(
        "a tensor attribute of the model that is neither parameter nor buffer",
        digest(
            [prepared.captured.constants[name] for name in sorted(prepared.captured.constants)]
        ).hex(),
        "Seed all ranks alike before building the model, or register it as a buffer",
    )
    advice = "All ranks must build the same model from the same script, torch and transformers"
    return same_on_all_ranks(prepared, ranks, "the model", advice)


def _check_same_job(ranks: Ranks, config: Config) -> None:
    ranks.agree("the config", config.to_dict(), "Give every rank the same wh.Config")
    versions = {"torch": torch.__version__}
    ranks.agree("the software", versions, "Install the same versions on every host")


def _one_precision(ranks: Ranks) -> str | None:
    """Sees to it that float32 products round alike on all ranks; gives what the plan says about it,
    None where it is what torch does by default.
    """
    precision = torch.get_float32_matmul_precision()
    ranks.agree(
        "torch.get_float32_matmul_precision()",
        precision,
        "Call torch.set_float32_matmul_precision with the same value on every rank",
    )
    have_tf32 = ranks.gather(ranks.device.has_tf32)
    if any(have_tf32) and not all(have_tf32):
        ranks.device.forbid_tf32()
        return (
            'float32 products have precision "highest" on all devices, without TF32: rank '
            f"{have_tf32.index(False)} has no TF32"
        )
    if precision != "highest":
        return f'float32 products have precision "{precision}" on all devices, as torch was told'
    return None


def _weights(
    model: torch.nn.Module,
    names: dict[str, str],
    chosen: Plan,
    ranks: Ranks,
    is_real: bool,
    init: Init | None,
    config: Config,
) -> dict[str, torch.Tensor]:
    view = chosen.of_rank(ranks.rank)
    own = set(view.stages_of_rank(ranks.rank))
    held = [name for name, stages in view.holders.items() if own & set(stages)]
    if 0 in own:  # what the graph does not use stays on stage 0, so that checkpoints are complete
        held.extend(first for first in dict.fromkeys(names.values()) if first not in chosen.holders)
    shards = Shards(chosen)

    def part(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return shards.on(name, ranks.rank).take(tensor)

    if is_real:
        _take_first_ranks_values(model, ranks)
        return take_weights(model, held, ranks.device.name, part)
    return initialise_weights(model, held, names, init, config.seed, ranks.device.name, part)


def _take_first_ranks_values(model: torch.nn.Module, ranks: Ranks) -> None:
    """Rank 0's values count; others that differ are overwritten, with a warning."""
    if not ranks.is_distributed:
        return
    digests = ranks.gather(digest_weights(model))
    different: dict[str, list[int]] = {}
    for name, first in digests[0].items():
        which = [rank for rank, own in enumerate(digests) if own.get(name) != first]
        if which:
            different[name] = which
    if not different:
        return
    if ranks.rank == 0:
        some = next(iter(different))
        warnings.warn(
            f"{len(different)} tensors differ between ranks (first: {some}, on ranks "
            f"{different[some]}): rank 0's values are used. "
            f"Seed all ranks alike before building the model, or pass a function that builds it",
            stacklevel=3,
        )
    done: set[int] = set()
    for name, _, _, tensor in named_tensors(model):
        if name in different and id(tensor) not in done:
            done.add(id(tensor))
            moved = in_memory(tensor.detach()).contiguous().to(ranks.device.name)
            torch.distributed.broadcast(as_moved(moved), src=0, group=ranks.world)
            with torch.no_grad():
                tensor.copy_(moved)


def _ranks() -> Ranks:
    if _session.ranks is None:
        _session.ranks = Ranks(
            _session.config.device, _session.config.timeout_s, _session.config.stall_timeout_s
        )
    return _session.ranks


def _config(config: Config | dict[str, Any] | None) -> Config:
    if config is None:
        return _session.config
    return config if isinstance(config, Config) else Config(config)


def _cluster_without_ranks(cluster: ClusterLike | int | None, config: Config) -> Cluster:
    """The cluster of a plan that is made without ranks: `whale plan --cluster` first, then what the
    script gives, else as many devices as the job has.
    """
    if _session.planned_cluster is not None:
        return _session.planned_cluster
    if cluster is not None:
        return cluster_to_plan_for(cluster, 1)
    given = chosen_cluster(_session.cluster, config.cluster)
    if given is None:
        return cluster_to_plan_for(None, num_devices())
    described = read_cluster(given)
    return described if _session.num_devices is not None else described.first(num_devices())


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
