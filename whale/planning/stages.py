"""Which stage computes which operation, and what crosses from stage to stage.

Objective: data flows only to later stages, and little of it crosses.

 1. every ACTIVATION has a TaskGraph (task_graphs.py), and a TaskGraph a VirtualDevice: their order
    gives the stages                                                        -> assign_stages
 2. free operations (views, casts) move over a cut where less crosses then  -> move_free_operations
 3. a WEIGHT value is recomputed where its parameters are held anyway, or where holding them takes
    fewer bytes than sending it; else it is sent                            -> place_weights
    what reads a buffer is on the stage that updates it                     -> gather_buffer_reads
 4. INPUT and CONSTANT values are recomputed wherever they are used: their stage is RECOMPUTED

What a stage runs is then the backward slice from its results               -> slice_stage

The planner makes an `Assignment` of a draft; ranks make the same one again from the plan.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from whale.capture.graph import CapturedGraph, user_line
from whale.capture.kinds import ValueKind
from whale.capture.ops import could_carry_gradient
from whale.costs.costs import value_bytes
from whale.operations.nodes import named_args, op_name, trains_batch_norm
from whale.operations.table import CASTS_IN_PLACE, FREE, is_random
from whale.plans.plan import Plan

RECOMPUTED = -1


@dataclass(frozen=True)
class StageSlice:
    """What one stage runs: operations in graph order, and everything that enters and leaves it."""

    operations: tuple[Node, ...]
    inputs: tuple[Node, ...]
    """batch placeholders"""
    received: tuple[Node, ...]
    """values computed by earlier stages"""
    state: tuple[Node, ...]
    """get_attr nodes"""


@dataclass(frozen=True)
class Assignment:
    """A plan applied to one captured graph: what lowering needs beside the plan itself."""

    stage_of: Mapping[Node, int]
    result_stage: Mapping[Node, int]
    """stage of every result (loss term, output, buffer update)"""
    slices: tuple[StageSlice, ...]
    crossings: tuple[tuple[Node, int, int], ...]
    """(value, stage that has it, stage that needs it)"""
    gradients: frozenset[Node]
    """values that carry a gradient"""


def assign_stages(
    operations: Sequence[Node],
    kinds: Mapping[Node, ValueKind],
    virtual_device_of: Mapping[Node, int],
) -> tuple[dict[Node, int], list[int]]:
    """(stage of each ACTIVATION, VirtualDevice of each stage). See docs/internals.md section 4."""
    activations = [node for node in operations if kinds[node] is ValueKind.ACTIVATION]
    stages = list(dict.fromkeys(virtual_device_of[node] for node in activations))
    stage_of: dict[Node, int] = {}
    for node in activations:
        producers = [
            stage_of[producer] for producer in node.all_input_nodes if producer in stage_of
        ]
        latest = max(producers, default=-1)
        device = virtual_device_of[node]
        if node.target is operator.getitem and producers:
            stage_of[node] = latest  # a list never crosses: its parts do
        elif latest >= 0 and stages[latest] == device:
            stage_of[node] = latest
        else:
            later = [stage for stage in range(latest + 1, len(stages)) if stages[stage] == device]
            if not later:
                stages.append(device)
            stage_of[node] = later[0] if later else len(stages) - 1
    return stage_of, stages


def move_free_operations(
    operations: Sequence[Node], stage_of: dict[Node, int], sample_bytes: Callable[[Node], int]
) -> None:
    """Moves views and casts over a cut where less crosses then."""
    # forward over the cut: send the small input, not its expanded or upcast form
    for node in reversed(operations):
        producer = _only_activation_input(node, stage_of)
        if producer is None or not is_free(node):
            continue
        users = {stage_of.get(user, RECOMPUTED) for user in node.users}
        if (
            len(users) == 1
            and min(users) > stage_of[node]
            and sample_bytes(producer) <= sample_bytes(node)
        ):
            stage_of[node] = min(users)
    for node in operations:  # back over the cut: send the slice that is used, not the whole
        producer = _only_activation_input(node, stage_of)
        if producer is None or not is_free(node) or stage_of[producer] == stage_of[node]:
            continue
        is_used_later = any(
            stage_of.get(user, RECOMPUTED) >= stage_of[node]
            for user in producer.users
            if user is not node
        )
        if not is_used_later and sample_bytes(node) < sample_bytes(producer):
            stage_of[node] = stage_of[producer]


def is_free(node: Node) -> bool:
    """Views and casts: worth doing on either side of a cut."""
    return op_name(node) in FREE | CASTS_IN_PLACE


def _only_activation_input(node: Node, stage_of: Mapping[Node, int]) -> Node | None:
    """The one placed input of a placed single-input operation."""
    if node not in stage_of or node.target is operator.getitem:
        return None
    placed = [producer for producer in node.all_input_nodes if producer in stage_of]
    return placed[0] if len(placed) == 1 and hasattr(placed[0].meta.get("val"), "dtype") else None


def place_weights(
    captured: CapturedGraph,
    kinds: Mapping[Node, ValueKind],
    stage_of: dict[Node, int],
    value_bytes: Callable[[Node], int],
    num_micro_batch: int,
    holders: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[Node, int]:
    """Places WEIGHT operations in `stage_of` (or leaves them recomputed); gives the stage of each
    result of the graph.

    A WEIGHT value that several stages need is sent when that takes fewer bytes in a step than
    holding its parameters there too. `holders`: where the parameters already are, when another
    graph of a planned model is placed; then a missing one is never tied.
    """
    closure = _parameter_closure(captured, kinds)
    held: dict[int, set[str]] = {}
    for node, stage in stage_of.items():
        held.setdefault(stage, set()).update(
            str(a.target) for a in node.all_input_nodes if a.op == "get_attr"
        )
    for name, stages_of_name in (holders or {}).items():
        for stage in stages_of_name:
            held.setdefault(stage, set()).add(name)
    home = {
        name: min(stage for stage, names in held.items() if name in names)
        for name in set().union(*held.values())
    }
    result_stage = {}
    for result in captured.output.all_input_nodes:
        default = max((home.get(name, 0) for name in closure.get(result, ())), default=0)
        result_stage[result] = stage_of.get(result, default)
    needed: dict[Node, set[int]] = {}
    for node in reversed(list(captured.compute_nodes())):
        if kinds[node] is not ValueKind.WEIGHT:
            continue
        stages = {result_stage[node]} if node in result_stage else set()
        for user in node.users:
            stages |= {stage_of[user]} if user in stage_of else needed.get(user, set())
        needed[node] = stages
        if not stages:
            continue
        missing = 0
        for stage in stages:
            absent = closure[node].intersection(home).difference(held.get(stage, ()))
            missing += sum(captured.state[name].num_bytes for name in absent)
        source = max((home[name] for name in closure[node] if name in home), default=min(stages))
        sent = (
            value_bytes(node) * num_micro_batch * len(stages - {source}) if holders is None else 0
        )
        if missing > sent and source <= min(stages) and node.target is not operator.getitem:
            stage_of[node] = source
            continue
        for stage in stages:
            held.setdefault(stage, set()).update(closure[node])
    return result_stage


def _parameter_closure(
    captured: CapturedGraph, kinds: Mapping[Node, ValueKind]
) -> dict[Node, frozenset[str]]:
    closure: dict[Node, frozenset[str]] = {}
    for node in captured.graph.nodes:
        if node.op == "get_attr" and captured.state[str(node.target)].kind == "parameter":
            closure[node] = frozenset([str(node.target)])
        elif kinds.get(node) is ValueKind.WEIGHT:
            closure[node] = frozenset().union(
                *(closure.get(a, frozenset()) for a in node.all_input_nodes)
            )
    return closure


def slice_stage(results: Iterable[Node], stage: int, stage_of: Mapping[Node, int]) -> StageSlice:
    """Everything that `stage` must run to give `results`, walking back until values of other
    stages, weights or the batch.
    """

    def is_here(node: Node) -> bool:
        return stage_of.get(node, RECOMPUTED) in (stage, RECOMPUTED)

    seen: set[Node] = set()
    waiting = list(results)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "call_function" and is_here(node):
            waiting.extend(node.all_input_nodes)
    ordered = sorted(seen)  # fx orders nodes by their place in the graph
    computed = [n for n in ordered if n.op == "call_function"]
    return StageSlice(
        operations=tuple(n for n in computed if is_here(n)),
        inputs=tuple(n for n in ordered if n.op == "placeholder"),
        received=tuple(n for n in computed if not is_here(n)),
        state=tuple(n for n in ordered if n.op == "get_attr"),
    )


def slice_stages(
    num_stages: int, results: Mapping[Node, int], stage_of: Mapping[Node, int]
) -> tuple[StageSlice, ...]:
    """The slice of every stage, given the stage of each result of the graph; later stages first,
    since they say what earlier ones send.
    """
    wanted: list[list[Node]] = [
        [node for node, stage in results.items() if stage == s] for s in range(num_stages)
    ]
    slices: dict[int, StageSlice] = {}
    for stage in reversed(range(num_stages)):
        slices[stage] = slice_stage(wanted[stage], stage, stage_of)
        for node in slices[stage].received:
            assert stage_of[node] < stage, (
                f"{node} flows back from stage {stage_of[node]} to {stage}"
            )
            wanted[stage_of[node]].append(node)
    return tuple(slices[stage] for stage in range(num_stages))


def changes_statistics(node: Node) -> bool:
    """Whether a batch norm changes its running statistics, which it does also where nobody reads
    what it gives.
    """
    return trains_batch_norm(node) and isinstance(named_args(node).get("running_mean"), Node)


def live_operations(captured: CapturedGraph) -> list[Node]:
    """Operations that results, buffer updates or running statistics need, in graph order."""
    results = [
        *captured.output.all_input_nodes,
        *captured.buffer_updates.values(),
        *(node for node in captured.compute_nodes() if changes_statistics(node)),
    ]
    return list(slice_stage(results, RECOMPUTED, {}).operations)


def apply_plan(plan: Plan, captured: CapturedGraph, kinds: Mapping[Node, ValueKind]) -> Assignment:
    """The assignment of a plan that was made for this very graph."""
    nodes = list(captured.compute_nodes())
    if len(nodes) != len(plan.stage_of_operation):
        raise ValueError(
            f"the plan places {len(plan.stage_of_operation)} operations, the model has "
            f"{len(nodes)}: make the plan again"
        )
    stage_of = {
        node: stage
        for node, stage in zip(nodes, plan.stage_of_operation, strict=True)
        if stage != RECOMPUTED
    }
    results = dict(
        zip(captured.output.all_input_nodes, (term.stage for term in plan.loss_terms), strict=True)
    )
    return _finish(captured, stage_of, results, len(plan.stages))


def follow_plan(plan: Plan, captured: CapturedGraph, kinds: Mapping[Node, ValueKind]) -> Assignment:
    """An assignment for another graph of the same model (evaluation, another sequence length):
    operations go where their weights are.
    """
    stage_of: dict[Node, int] = {}
    for node in live_operations(captured):
        if kinds[node] is not ValueKind.ACTIVATION:
            continue
        latest = max((stage_of[p] for p in node.all_input_nodes if p in stage_of), default=0)
        for name, is_direct in state_behind(node, kinds):
            holders = [stage for stage in plan.holders.get(name, ()) if stage >= latest]
            if not holders and is_direct and name in plan.holders:
                raise ValueError(
                    f"{name} is on stage {plan.holders[name]}, but this graph uses it after stage "
                    f"{latest} ({user_line(node)}): the model calls its parts in another order "
                    "here than in training"
                )
            latest = min(holders, default=latest)
        stage_of[node] = latest
    return make_assignment(
        captured, kinds, stage_of, len(plan.stages), plan.num_micro_batch, plan.holders
    )


def state_behind(node: Node, kinds: Mapping[Node, ValueKind]) -> list[tuple[str, bool]]:
    """(parameter or buffer, whether it must be on the same stage) that an operation reads, also
    through values that are not ACTIVATION.

    A parameter behind a WEIGHT value need not be there: the value may be sent.
    """
    names: dict[str, bool] = {}
    waiting = [(source, True) for source in node.all_input_nodes]
    seen: set[Node] = set()
    while waiting:
        source, is_direct = waiting.pop()
        if source in seen:
            continue
        seen.add(source)
        if source.op == "get_attr":
            names[str(source.target)] = names.get(str(source.target), False) or is_direct
        elif source.op == "call_function" and kinds[source] is not ValueKind.ACTIVATION:
            waiting.extend(
                (each, is_direct and kinds[source] is not ValueKind.WEIGHT)
                for each in source.all_input_nodes
            )
    return sorted(names.items())


def make_assignment(
    captured: CapturedGraph,
    kinds: Mapping[Node, ValueKind],
    stage_of: dict[Node, int],
    num_stages: int,
    num_micro_batch: int,
    holders: Mapping[str, tuple[int, ...]] | None = None,
) -> Assignment:
    def micro_batch_bytes(node: Node) -> int:
        return value_bytes(node, captured.batch_symbol, captured.batch_size)

    gather_buffer_reads(captured, kinds, stage_of)
    results = place_weights(captured, kinds, stage_of, micro_batch_bytes, num_micro_batch, holders)
    return _finish(captured, stage_of, results, num_stages)


def gather_buffer_reads(
    captured: CapturedGraph, kinds: Mapping[Node, ValueKind], stage_of: dict[Node, int]
) -> None:
    """Moves the update of a buffer, and what reads it without samples, to one stage: only the stage
    that updates a buffer has its present value, and sends what others need of it.
    """
    free = _without_samples(captured, kinds)
    for name, update in captured.buffer_updates.items():
        readers = [node for node in _readers_of_state(captured, name) if node in stage_of]
        group = dict.fromkeys([*readers, update] if update in stage_of else readers)
        if len({stage_of[node] for node in group}) < 2:
            continue
        fixed = [stage_of[node] for node in group if node not in free]
        home = max(fixed) if fixed else min(stage_of[node] for node in group)
        moved = _with_producers([node for node in group if node in free], free)
        if all(_may_move(node, home, moved, stage_of) for node in moved):
            stage_of.update(dict.fromkeys(moved, home))


def _without_samples(captured: CapturedGraph, kinds: Mapping[Node, ValueKind]) -> set[Node]:
    """ACTIVATION values that are made of buffers, weights and constants alone."""
    found: set[Node] = set()
    for node in captured.compute_nodes():
        if kinds[node] is not ValueKind.ACTIVATION or is_random(node) or trains_batch_norm(node):
            continue
        if all(
            each.op == "get_attr"
            or each in found
            or kinds[each] in (ValueKind.WEIGHT, ValueKind.CONSTANT)
            for each in node.all_input_nodes
        ):
            found.add(node)
    return found


def _readers_of_state(captured: CapturedGraph, name: str) -> list[Node]:
    """Operations that read a parameter or buffer."""
    readers: list[Node] = []
    for node in captured.graph.nodes:
        if node.op == "get_attr" and str(node.target) == name:
            readers += [user for user in node.users if user.op == "call_function"]
    return readers


def _with_producers(nodes: Iterable[Node], among: set[Node]) -> set[Node]:
    """These nodes and what they are computed from, as far as it is in `among`."""
    found: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(each for each in node.all_input_nodes if each in among)
    return found


def _may_move(node: Node, stage: int, moved: set[Node], stage_of: Mapping[Node, int]) -> bool:
    """Whether nothing would flow back when `node` is on `stage`, together with `moved`."""
    is_late = any(
        stage_of.get(each, stage) > stage for each in node.all_input_nodes if each not in moved
    )
    is_early = any(stage_of.get(each, stage) < stage for each in node.users if each not in moved)
    return not is_late and not is_early


def _finish(
    captured: CapturedGraph, stage_of: dict[Node, int], results: dict[Node, int], num_stages: int
) -> Assignment:
    for value in captured.buffer_updates.values():
        results.setdefault(value, stage_of.get(value, 0))
    statistics = {node: stage_of[node] for node in stage_of if changes_statistics(node)}
    slices = slice_stages(num_stages, {**statistics, **results}, stage_of)
    _refuse_old_buffers(captured, slices, results, statistics)
    crossings = tuple(
        (node, stage_of[node], stage) for stage, part in enumerate(slices) for node in part.received
    )
    return Assignment(stage_of, results, slices, crossings, carries_gradient(captured))


def _refuse_old_buffers(
    captured: CapturedGraph,
    slices: Sequence[StageSlice],
    results: Mapping[Node, int],
    statistics: Mapping[Node, int],
) -> None:
    """A stage that reads a buffer which another one updates would have its first value for ever."""
    updated = {name: results[value] for name, value in captured.buffer_updates.items()}
    for node, stage in statistics.items():
        for each in ("running_mean", "running_var"):
            buffer = named_args(node).get(each)
            if isinstance(buffer, Node) and buffer.op == "get_attr":
                updated.setdefault(str(buffer.target), stage)
    for stage, part in enumerate(slices):
        for node in part.state:
            name = str(node.target)
            if updated.get(name, stage) == stage:
                continue
            reader = next(each for each in part.operations if node in each.all_input_nodes)
            raise ValueError(
                f"buffer {name} gets its new value on stage {updated[name]}, and stage {stage} "
                f"reads it too ({user_line(reader)}), where it would keep its first value. Try: "
                f"wh.annotate(model, ...) with everything that reads {name} in one TaskGraph, or "
                "fewer stages"
            )


def carries_gradient(captured: CapturedGraph) -> frozenset[Node]:
    """Real and complex values that depend on a trainable parameter other than through `detach`."""
    found: set[Node] = set()
    for node in captured.graph.nodes:
        if node.op == "get_attr":
            # not `requires_grad` of its value: export also sets that on buffers
            carries = captured.state[str(node.target)].trainable
        else:
            carries = node.op == "call_function" and could_carry_gradient(node, found)
        if carries:
            found.add(node)
    return frozenset(found)
