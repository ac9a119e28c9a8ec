"""Captured graph, cluster and config in, `Plan` out. Pure: no process group, no weights.

    make_plan               for every order of the devices (`balance.py`) ...
      OrderDrafts.best      the best cut, schedule and choice of what is recomputed (`drafts.py`)
    assemble                the best of them as a plan, with the reason for every choice

What does not fit is refused with changes that were tried and help (`suggestions.py`).
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from whale.capture.graph import CapturedGraph
from whale.planning.assemble import SAMPLES, assemble
from whale.planning.balance import Order, device_orders
from whale.planning.drafts import Draft, OrderDrafts
from whale.planning.idle_devices import idle_decision
from whale.planning.offload import Offload
from whale.planning.offload_auto import (
    MANY,
    fitting,
    may_offload,
    refuse_without_memory,
    too_many_bytes,
)
from whale.planning.pricing import typical_share
from whale.planning.problem import Problem
from whale.planning.recompute import check_names
from whale.planning.replica_drafts import GroupDrafts
from whale.planning.replica_specs import activations, specs_of_config
from whale.planning.replicas import plan_of_replicas
from whale.planning.stages import Assignment, live_operations
from whale.planning.suggestions import suggestions
from whale.planning.task_graphs import from_marks
from whale.planning.workload import Workload
from whale.planning.zero import level_of, with_even_blocks
from whale.plans.blocks import GRADIENTS_TOO, STATES, WEIGHTS_TOO
from whale.plans.plan import Decision, Plan
from whale.plans.shares import DoesNotFit, NotEnoughMemory
from whale.simulation.simulate import step_seconds
from whale.units import human_seconds

MOST_ACTIONS = 10_000
"""orders of devices are compared by simulation if their steps have at most so many actions, else by
the slowest device
"""


def make_plan(problem: Problem) -> tuple[Plan, Assignment]:
    """The plan, and where every operation of the graph runs."""
    if problem.config.replicas is not None:
        specs = specs_of_config(problem.config, activations(problem.captured, problem.kinds))
        check_names(problem.captured, problem.config.recompute)
        level = level_of(problem.config.zero)
        if Offload.of(problem.config).is_any:
            raise ValueError(
                f'"offload": {problem.config.offload!r} is for model replicas that are all alike. '
                'Try: "offload": false, or leave "replicas" out'
            )
        drafts = GroupDrafts(_with_level(problem, 0), fingerprint(problem.captured))
        given, assignment = plan_of_replicas(drafts, specs)
        return with_even_blocks(problem, given, level), assignment
    refuse_without_memory(problem)
    plan, assignment = _least_memory(problem)
    idle = idle_decision(plan)
    return _after_samples(plan, idle) if idle is not None else plan, assignment


def _least_memory(problem: Problem) -> tuple[Plan, Assignment]:
    """The best plan with everything on the devices; where that does not fit and other memories are
    there, with what has to leave.
    """
    if not may_offload(problem):
        return _least_zero(problem)
    try:
        hopeless = too_many_bytes(problem, Offload())
        if hopeless is not None and len(problem.kinds) > MANY:
            raise DoesNotFit(hopeless)
        return _least_zero(problem, is_trial=True)
    except DoesNotFit as error:
        return fitting(problem, partial(_best_plan, is_trial=True), error)


def _least_zero(problem: Problem, is_trial: bool = False) -> tuple[Plan, Assignment]:
    """The best plan with the level of ZeRO that the config asks for; `auto`: the lowest that
    fits.
    """
    if problem.config.zero != "auto":
        return _best_plan(problem, is_trial)
    for level in (0, STATES, GRADIENTS_TOO):
        try:
            return _best_plan(_with_level(problem, level), is_trial=True)
        except DoesNotFit:
            continue
    return _best_plan(_with_level(problem, WEIGHTS_TOO), is_trial)


def _with_level(problem: Problem, level: int) -> Problem:
    return replace(problem, config=problem.config.replace(zero=level))


def _best_plan(problem: Problem, is_trial: bool = False) -> tuple[Plan, Assignment]:
    """The best plan over all orders of the devices. `is_trial`: where it does not fit, nobody wants
    to know what would.
    """
    captured = problem.captured
    config = problem.config
    check_names(captured, config.recompute)
    workload = _workload(problem)
    drafts = []
    errors = []
    for order in _orders(problem):
        try:
            drafts.append(OrderDrafts(problem, workload, order).best())
        except DoesNotFit as error:
            errors.append(error)
    if not drafts:
        raise errors[0] if is_trial else _advised(errors[0], problem, workload)
    model = fingerprint(captured)
    if len(drafts) == 1:
        return assemble(problem, workload, drafts[0], model), drafts[0].assignment
    if max(draft.num_actions for draft in drafts) > MOST_ACTIONS:
        best = min(drafts, key=lambda draft: draft.slowest_s)
        times = ", ".join(
            f"{draft.order.name} {human_seconds(draft.slowest_s)}" for draft in drafts
        )
        why = f"the slowest device for one micro-batch: {times}"
        return _with_order(assemble(problem, workload, best, model), best, why), best.assignment
    plans = [assemble(problem, workload, draft, model) for draft in drafts]
    steps = [step_seconds(plan).gradients_s for plan in plans]
    fastest = steps.index(min(steps))
    best = drafts[fastest]
    times = ", ".join(
        f"{draft.order.name} {human_seconds(step_s)}"
        for draft, step_s in zip(drafts, steps, strict=True)
    )
    return _with_order(plans[fastest], best, f"a simulated step: {times}"), best.assignment


def _with_order(plan: Plan, draft: Draft, why: str) -> Plan:
    """The plan with the reason for its order of devices, which stands before the samples that
    follow from it.
    """
    place = _place_of_samples(plan)
    decisions = (
        *plan.decisions[:place],
        Decision("order of devices", draft.order.name, why),
        *plan.decisions[place:],
    )
    return replace(plan, decisions=decisions)


def _after_samples(plan: Plan, decision: Decision) -> Plan:
    place = _place_of_samples(plan) + 1  # devices that are all alike have samples, all of them
    return replace(plan, decisions=(*plan.decisions[:place], decision, *plan.decisions[place:]))


def _place_of_samples(plan: Plan) -> int:
    return next(index for index, decision in enumerate(plan.decisions) if decision.what == SAMPLES)


def _workload(problem: Problem) -> Workload:
    config = problem.config
    share = typical_share(
        problem.batch_size, config.num_micro_batch, problem.cluster.num_devices // _width(problem)
    )
    return problem.workload(share)


def _orders(problem: Problem) -> tuple[Order, ...]:
    return device_orders(problem.cluster, _width(problem), problem.dtype)


def _advised(error: DoesNotFit, problem: Problem, workload: Workload) -> DoesNotFit:
    """The refusal with what would fit."""
    if not isinstance(error, NotEnoughMemory) or not problem.is_advised:
        return error  # it says so itself

    def fits(changed: Problem) -> bool:
        # the size of micro-batches makes no difference to what a sample takes
        known = workload if changed.batch_size == problem.batch_size else _workload(changed)
        for order in _orders(changed):
            try:
                OrderDrafts(changed, known, order).best()
            except ValueError:  # memory, or a number that does not go
                continue
            return True
        return False

    return DoesNotFit(f"{error}. {suggestions(problem, fits, error.is_over_full)}")


def fingerprint(captured: CapturedGraph) -> str:
    """Hash of the graph (operations, arguments, shapes) and of the weights' names, shapes and
    types.

    A plan made on a CPU host fits on GPUs: devices are no part of it, nor names of nodes, which
    count operations that the capture has dropped.
    """
    state = hashlib.blake2b(digest_size=16)
    places: dict[Node, str] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, Node):
            return places[value]
        return "device" if isinstance(value, torch.device) else value

    for place, node in enumerate(captured.graph.nodes):
        places[node] = f"%{place}"
        value = node.meta.get("val")
        shape = (
            (*(str(size) for size in value.shape), value.dtype)
            if isinstance(value, torch.Tensor)
            else ""
        )
        arguments = map_aggregate((node.args, node.kwargs), plain)
        state.update(f"{node.op}|{node.target}|{arguments}|{shape}\n".encode())
    for name in sorted(captured.state):
        tensor = captured.state[name]
        facts = (tensor.kind, tensor.shape, tensor.dtype, tensor.trainable, tensor.aliases)
        state.update(f"{name}|{'|'.join(map(str, facts))}\n".encode())
    return state.hexdigest()


def _width(problem: Problem) -> int:
    """Devices of one model replica, as far as that is known before the TaskGraphs are: 1 where
    order makes no difference.
    """
    if problem.cluster.num_devices == 1 or problem.config.colocate:
        return 1
    if problem.config.num_task_graph is not None:
        return problem.config.num_task_graph
    strategies = from_marks(
        live_operations(problem.captured), problem.kinds, problem.marks, problem.default_strategy
    ).strategies
    return sum(strategy.num_devices for strategy in strategies)
