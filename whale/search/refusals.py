"""What a refusal says where no plan fits: why, which of the user's settings are to blame, a plan
that would fit, and the least change that helps.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace

from whale.cluster.cluster import Device
from whale.config import Config
from whale.names import count
from whale.planning.offload_auto import may_offload
from whale.planning.problem import Problem
from whale.planning.suggestions import with_more
from whale.plans.shares import DoesNotFit
from whale.search.budget import Budget
from whale.search.drafting import Drafted
from whale.search.search import Search, search
from whale.search.settings import AUTO, OpenSettings, is_open
from whale.units import human_bytes, human_seconds

OFFER = Budget(estimates=100, cut_moves=40, drafts=1, split=1, tensor=0, zero=1, polished=0)
"""what is tried to offer a plan that fits"""
FURTHER = (1, 2, 4, 8)
SMALLER = (2, 4, 8)
"""devices more, and parts of the batch, that are tried where nothing fits"""

_CHOSEN = ("num_task_graph", "num_micro_batch", "schedule", "recompute", "num_waves", "zero")
"""settings that the search chooses where they are open"""


def is_annotated(problem: Problem) -> bool:
    return bool(problem.marks) or problem.default_strategy is not None


def nothing_fits(problem: Problem, done: Search, refused: ValueError | None) -> ValueError:
    """The refusal: what keeps every plan from fitting, and the least change."""
    problems = [each.problem for each in done.tried if each.problem]
    first = next(iter(problems), "no plan fits")
    if refused is not None:
        first = str(refused)
    try:
        why = _without_fixed(problem, done)
    except KeyboardInterrupt:  # what is refused is known, what would help is not
        why = (
            f"Searched: {done.summary}, none fits; interrupted before a change was found that helps"
        )
    return DoesNotFit(f"{first}. {why}")


def fixed_names(config: Config) -> list[str]:
    """The settings that hold, as the user wrote them."""
    return [as_written(config, name) for name in _fixed(config)]


def _fixed(config: Config) -> list[str]:
    return [name for name in _CHOSEN if not is_open(config, name)]


def as_written(config: Config, name: str) -> str:
    """A setting as the user wrote it."""
    value = getattr(config, name)
    return f'"{name}": {json.dumps(value) if isinstance(value, str | list) else value}'


def _without_fixed(problem: Problem, done: Search) -> str:
    """Whether it is settings that make every plan impossible, and which of them."""
    fixed = _fixed(problem.config)
    if problem.config.offload is False and _has_memories(problem):
        fixed.append("offload")
    best = _best_without(problem, fixed) if fixed else None
    if best is None:
        return none_fits(problem, done)
    alone = [(name, _best_without(problem, [name])) for name in fixed] if len(fixed) > 1 else []
    to_blame = [(name, found) for name, found in alone if found is not None]
    if to_blame:  # opening one of them is enough
        fixed = [name for name, _ in to_blame]
        best = min((found for _, found in to_blame), key=lambda each: each.score_s)
    names = [as_written(problem.config, name) for name in fixed]
    fits = f"{best.candidate.describe()} fits, {human_seconds(best.step_s)} a step"
    if len(to_blame) > 1:
        return (
            f"{', '.join(names)} make every plan impossible together. Try: leave one open: {fits}"
        )
    verb = "makes" if len(fixed) == 1 else "make"
    open_it = "it open" if len(fixed) == 1 else "them open"
    return f"{', '.join(names)} {verb} every plan impossible. Try: leave {open_it}: {fits}"


def _best_without(problem: Problem, names: list[str]) -> Drafted | None:
    """The best plan that a short search finds where these settings are open."""
    opened = replace(problem, config=_left_open(problem.config, names))
    return search(opened, OpenSettings.of(opened), budget=OFFER).best


def _has_memories(problem: Problem) -> bool:
    """Whether the cluster has memories beside its devices that a plan may use."""
    config = problem.config.replace(offload=AUTO)
    return may_offload(replace(problem, config=config))


def with_offer(problem: Problem, error: DoesNotFit) -> DoesNotFit:
    """The refusal of a hand-made plan with one that fits, found by the search; as it is where
    a change of the annotations is known to help, or nothing fits.
    """
    is_helped = "Try: " in str(error)
    is_marked = is_annotated(problem) or problem.config.colocate
    if is_marked and is_helped:
        return error
    opened = opened_up(problem)
    try:
        done = search(opened, OpenSettings.of(opened), budget=OFFER)
        best = done.best
        if best is None:
            if is_marked or is_helped:
                return error
            return DoesNotFit(f"{error}. {none_fits(problem, done)}")
    except KeyboardInterrupt:  # the refusal is not lost with what would be offered
        return error
    text, tries, changes = str(error).partition(" No change helps")[0].partition(" Try: ")
    config = problem.config
    is_set = fixed_names(config) or config.strategy or config.replicas or config.colocate
    without = " without these settings" if is_set else ""
    if is_annotated(problem):
        without = " without annotations"
    offer = (
        f'{text.rstrip(".")}. "strategy": "auto"{without} finds a plan that fits: '
        f"{best.candidate.describe()}, {human_seconds(best.step_s)} a step"
    )
    return DoesNotFit(f"{offer}.{tries}{changes}" if tries else offer)


def open_up(config: Config) -> Config:
    """The config with everything that the search chooses left open."""
    return _left_open(config, (*_CHOSEN, "replicas", "colocate")).replace(strategy=AUTO)


def _left_open(config: Config, names: Collection[str]) -> Config:
    """The config without these settings."""
    given = {key: value for key, value in config.to_dict().items() if config.is_given(key)}
    return Config({key: value for key, value in given.items() if key not in names})


def opened_up(problem: Problem) -> Problem:
    """The problem with everything that the search chooses left open, annotations too."""
    config = open_up(problem.config)
    return replace(problem, config=config, marks={}, default_strategy=None)


def none_fits(problem: Problem, done: Search) -> str:
    """Why no plan fits: proved where weights alone are too much for all devices together, and for
    the memories beside them where these may be used.
    """
    outline = done.outline
    needed = float(outline.static_bytes(False).sum())
    memories = [device.kind.memory_bytes for device in problem.cluster.devices]
    if not all(memories):
        return f"Searched: {done.summary}, none fits"
    beside = _bytes_beside(problem)
    others = f" and {human_bytes(beside)} beside them" if beside else ""
    missing = needed - sum(memories) - beside
    if missing > 0:
        largest = _largest_device(problem).kind
        further = f"{-int(-missing // largest.memory_bytes)} further {largest.name}"
        return (
            "No plan fits: weights, gradients and optimizer state take "
            f"{human_bytes(needed)}, all {count(len(memories), 'device')} together have "
            f"{human_bytes(sum(memories))}{others}. Try: {human_bytes(missing)} more memory, so at "
            f"least {further}, or an optimizer with less state"
        )
    return (
        f"Searched: {done.summary}, none fits; weights, gradients and optimizer state take "
        f"{human_bytes(needed)} of {human_bytes(sum(memories))}{others}, the rest must hold "
        f"activations. Try: {_least_change(problem)}"
    )


def _bytes_beside(problem: Problem) -> int:
    """What hosts and disks have for what does not fit on the devices."""
    if not may_offload(problem):
        return 0
    memories = [problem.cluster.memories_of(host) for host in problem.cluster.hosts]
    return sum(each.size("host") + each.size("disk") for each in memories)


def _largest_device(problem: Problem) -> Device:
    return max(problem.cluster.devices, key=lambda device: device.kind.memory_bytes)


def _least_change(problem: Problem) -> str:
    """The fewest further devices and the largest smaller batch that fit, each tried by a short
    search in steps of two.
    """
    opened = opened_up(problem)
    largest = _largest_device(problem)
    found = []
    for number in FURTHER:
        more = replace(opened, cluster=with_more(problem.cluster, largest, number))
        if _fits(more):
            found.append(f"{number} further {largest.kind.name}")
            break
    for part in SMALLER:
        size = problem.batch_size // part
        if size and _fits(replace(opened, batch_size=size)):
            found.append(f"a batch of {size} instead of {problem.batch_size}")
            break
    if found:
        return " or ".join(found)
    return (
        f"more than {FURTHER[-1]} further {largest.kind.name}, or devices with more memory: "
        f"neither these nor a batch of 1/{SMALLER[-1]} fits"
    )


def _fits(problem: Problem) -> bool:
    return search(problem, OpenSettings.of(problem), budget=OFFER).best is not None
