"""`"offload": "auto"`: what is done where a model does not fit on its devices. Levels of ZeRO,
where the user left them open, and homes outside of the device are tried, those first that move
least; of those that fit, the one with the shortest simulated step is taken. Something that is at
home elsewhere in one that fits need not be tried with more beside it.

Recomputation is part of every try (`priced_cut.py`); more stages are what the search tries besides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from whale.planning.offload import Offload
from whale.planning.problem import Problem
from whale.planning.stages import Assignment
from whale.planning.zero import level_of
from whale.plans.blocks import GRADIENTS_TOO, STATES, WEIGHTS_TOO, Memory
from whale.plans.plan import Decision, Plan
from whale.plans.shares import DoesNotFit
from whale.simulation.simulate import simulate
from whale.units import human_bytes, human_seconds

Made = tuple[Plan, Assignment]
Make = Callable[[Problem], Made]

LARGE = 5000
"""operations of a graph from which on the first try that fits is taken"""
MANY = 1000
"""operations of a graph from which on a plan is not tried that its bytes alone rule out"""
STEPS: tuple[tuple[str, ...], ...] = (
    ("optimizer",),
    ("activations",),
    ("optimizer", "activations"),
    ("optimizer", "gradients"),
    ("optimizer", "weights"),
    ("optimizer", "weights", "gradients"),
    ("optimizer", "weights", "gradients", "activations"),
)
"""classes at home elsewhere, in the order in which they are tried"""


@dataclass(frozen=True)
class Try:
    """One way to make a model fit."""

    level: int
    offload: Offload

    @property
    def away(self) -> set[str]:
        names = ("optimizer", "weights", "gradients", "activations")
        return {name for name in names if getattr(self.offload, name) != "device"}

    def is_less_than(self, other: Try) -> bool:
        """Whether the other one moves everything that this one does, and more."""
        if self.offload.spills and not other.offload.spills:
            return False
        return self.away <= other.away and self.level <= other.level

    @property
    def text(self) -> str:
        words = [f"ZeRO {self.level}"] if self.level else []
        if self.away:
            rest = " and disk" if self.offload.spills else ""
            words.append(f"{', '.join(sorted(self.away))} on the host{rest}")
        return " with ".join(words)


def may_offload(problem: Problem) -> bool:
    """Whether something may be at home elsewhere that the user did not name: hosts of accelerators
    have memory for it. The memory of CPU ranks is that of their host.
    """
    if problem.config.offload != "auto" or problem.offload is not None:
        return False
    return any(_has(problem, memory) for memory in ("host", "disk"))


def _has(problem: Problem, memory: Memory) -> bool:
    """Whether every host has such a memory beside its devices."""
    cluster = problem.cluster
    if memory == "host" and not cluster.has_accelerators_only:
        return False
    return all(cluster.memories_of(host).size(memory) for host in cluster.hosts)


def tries(problem: Problem) -> Iterator[Try]:
    """What is tried, that which moves least first."""
    given = level_of(problem.config.zero)
    is_open = not problem.config.is_given("zero") and problem.updates_alone
    if is_open:
        for level in (STATES, GRADIENTS_TOO, WEIGHTS_TOO):
            yield Try(level, Offload())
    memories: list[tuple[Memory, bool]] = []
    if _has(problem, "host"):
        memories.append(("host", False))
    if _has(problem, "disk"):
        memories.append(("host", True) if _has(problem, "host") else ("disk", False))
    for home, spills in memories:
        for step in STEPS:
            offload = Offload(**dict.fromkeys(step, home), spills=spills)
            if not _is_run(problem, offload):
                continue
            yield Try(max(given, offload.level), offload)


def _is_run(problem: Problem, offload: Offload) -> bool:
    """Whether the runtime takes such homes beside the other settings."""
    if offload.has_blocks and not problem.updates_alone:
        return False
    if offload.optimizer != "device" and problem.config.optimizer_state != "fp32":
        return False
    return offload.activations == "device" or not problem.config.compile


def too_many_bytes(problem: Problem, offload: Offload) -> str | None:
    """Why no plan with these homes fits: every parameter, gradient and state is on some device at
    least once, unless it is at home elsewhere. None: it may fit.
    """
    capacity = [device.kind.memory_bytes for device in problem.cluster.devices]
    if not all(capacity):
        return None  # there are devices without limit
    offload = offload.as_run(problem.cluster.has_accelerators_only)
    sizes = dict.fromkeys(("weights", "gradients", "optimizer"), 0.0)
    for state in problem.captured.state.values():
        if state.kind == "parameter":
            sizes["weights"] += state.num_bytes
            sizes["gradients"] += state.trainable * state.num_bytes
    sizes["optimizer"] = problem.optimizer_ratio * sizes["gradients"]
    held: dict[str, float] = {"device": 0.0, "host": 0.0, "disk": 0.0}
    for what, size in sizes.items():
        held[getattr(offload, what)] += size
    cluster = problem.cluster
    on_hosts = sum(cluster.memories_of(host).size("host") for host in cluster.hosts)
    is_too_much = held["host"] > on_hosts and not offload.spills
    if held["device"] <= sum(capacity) and not is_too_much:
        return None
    return (
        "the model does not fit: its weights, gradients and optimizer state take "
        f"{human_bytes(sum(sizes.values()))}, each held once, and the devices have "
        f"{human_bytes(sum(capacity))} together"
    )


def fitting(problem: Problem, make: Make, first: DoesNotFit) -> Made:
    """The best plan in which less is on the devices; raises with the numbers of every memory where
    there is none. `make`: makes the plan of a problem; `first`: why the plain one does not fit.
    """
    found: list[tuple[float, Try, Made]] = []
    last: DoesNotFit = first
    is_large = len(problem.kinds) > LARGE
    for each in tries(problem):
        if any(fits.is_less_than(each) for _, fits, _ in found) or (found and is_large):
            continue
        if too_many_bytes(problem, each.offload) is not None:
            continue
        changed = replace(
            problem,
            config=problem.config.replace(zero=each.level),
            offload=each.offload,
        )
        try:
            made = make(changed)
        except DoesNotFit as error:
            last = error
            continue
        found.append((simulate(made[0]).step_s, each, made))
    if not found:
        raise DoesNotFit(f"{first}. {_all_memories(problem)}: {last}")
    found.sort(key=lambda one: one[0])
    step_s, best, (plan, assignment) = found[0]
    others = ", ".join(f"{each.text} {human_seconds(time)}" for time, each, _ in found[1:4])
    why = f"nothing fits on the devices alone; a simulated step takes {human_seconds(step_s)}"
    decision = Decision("memory", best.text, why + (f"; next: {others}" if others else ""))
    return replace(plan, decisions=(*plan.decisions, decision)), assignment


def _all_memories(problem: Problem) -> str:
    """What all memories of the cluster have."""
    cluster = problem.cluster
    devices = sum(device.kind.memory_bytes for device in cluster.devices)
    sizes = [f"devices {human_bytes(devices)}"]
    for memory in ("host", "disk"):
        total = sum(cluster.memories_of(host).size(memory) for host in cluster.hosts)
        sizes.append(f"{memory}s {human_bytes(total)}")
    return f"Not even with memories beside the devices ({', '.join(sizes)} in all)"


def refuse_without_memory(problem: Problem) -> None:
    """Refuses homes that the cluster file does not have."""
    config = problem.config
    offload = problem.offload or Offload.of(config)
    is_alone = offload.gradients != "device" and {offload.weights, offload.optimizer} == {"device"}
    if problem.cluster.has_accelerators_only and is_alone:
        raise ValueError(
            f'"offload": {config.offload!r}: gradients at home elsewhere are for weights or '
            "optimizer states that are, too: accelerators update parameters with gradients on the "
            'device. Try: "offload": {"optimizer": "host", "gradients": "host"}'
        )
    for memory in sorted(offload.memories):
        for host in problem.cluster.hosts:
            if problem.cluster.memories_of(host).size(memory):
                continue
            entry = {
                "host": "host: {memory_gb: 512, memory_gb_per_s: 100, link_gb_per_s: 12}",
                "disk": "disk: {memory_gb: 2000, gb_per_s: 3}",
            }[memory]
            raise ValueError(
                f'"offload": {config.offload!r} puts something on the {memory} of {host}, of which '
                f"the cluster says nothing. Try: `{entry}` in the cluster file, whale profile, "
                'which measures it, or "offload": false'
            )
