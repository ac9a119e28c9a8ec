"""A stage as something to be sharded: its operations with their options on each axis, and what is
fixed from outside.

Meaning of the axes. z cuts samples, and what is stored of the weights of products (gathered before
use: ZeRO-3 along z). x and y cut the weights of products in use, one the columns where the other
cuts the rows; everything else follows the cost. So (1, d, 1) is Megatron's column and row, (q, q,
1) 2-D with weights that stay, (q, q, q) the cube.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress

import torch
from torch.fx import Node

from whale.capture.graph import CapturedGraph
from whale.capture.kinds import ValueKind
from whale.capture.sample_states import batch_dim
from whale.capture.samples import SampleFlow
from whale.costs.costs import NodeCost
from whale.operations.nodes import op_name
from whale.operations.operation import Operation, Shapes
from whale.operations.table import row_of
from whale.plans.grid import AXES
from whale.plans.layout import Cut, Layout
from whale.plans.sharding import ORDER, Sharding
from whale.sharding.dims import Granules, Value, tensor_of, value_of
from whale.sharding.expert_rows import journeys
from whale.sharding.options import (
    PARTIAL,
    SAME,
    WHOLE,
    Option,
    Placement,
    is_summa,
    options_of,
    summa_options,
)
from whale.sharding.repeats import Repeats, find_repeats


@dataclass(frozen=True)
class StageProgram:
    """What one stage computes, and what it owes to others."""

    captured: CapturedGraph
    kinds: Mapping[Node, ValueKind]
    operations: tuple[Node, ...]
    """in graph order"""
    inputs: tuple[Node, ...]
    """placeholders: whole on every device"""
    received: tuple[Node, ...]
    """cut by samples over all axes, or whole where they have none"""
    state: tuple[Node, ...]
    """parameters, buffers, constants"""
    sent: tuple[Node, ...] = ()
    """like `received`"""
    outputs: tuple[Node, ...] = ()
    """results that the user asked for: like `received`"""
    terms: tuple[Node, ...] = ()
    """of the loss: partial sums over all devices"""
    updates: Mapping[str, Node] = field(default_factory=dict)
    """new values of buffers: whole"""
    by_samples: frozenset[Node] = frozenset()
    """operations of `replicate` TaskGraphs: samples cut over all axes, weights whole"""
    gradients: frozenset[Node] = frozenset()
    """values that carry a gradient"""
    summa: frozenset[Node] = frozenset()
    """operations of `split` TaskGraphs for which the user asked for SUMMA"""


class Space:
    """All options of a stage. Nodes are of three sorts: `operations` have options, `parameters`
    have a stored layout, all others are fixed.
    """

    def __init__(self, program: StageProgram) -> None:
        self.program = program
        captured = program.captured
        shapes = Shapes(captured.batch_symbol)
        states = SampleFlow(captured, dict(program.kinds)).states
        self.granules = Granules(shapes)
        self._costs: dict[int, Mapping[Node, NodeCost]] = {}
        self._signatures: dict[int, dict[Node, int]] = {}
        self._repeats: dict[tuple[int, frozenset[str]], Repeats] = {}
        self.operations: dict[Node, Operation] = {}
        self._values: dict[Node, tuple[tuple[Value, ...], tuple[Value, ...]]] = {}
        self.parameters = tuple(
            node for node in program.state if captured.state[str(node.target)].kind == "parameter"
        )
        all_options: dict[Node, tuple[Option, ...]] = {}
        for node in program.operations:
            if (
                program.kinds[node] in (ValueKind.ACTIVATION, ValueKind.WEIGHT)
                and op_name(node) != "getitem"
                and shapes.tensors(node)
            ):
                op = Operation(node, shapes)
                self.operations[node] = op
                outputs = tuple((node, place) for place in range(len(op.outputs)))
                self._values[node] = (tuple(value_of(source) for source in op.inputs), outputs)
                all_options[node] = options_of(op, states)
                for option in all_options[node]:
                    self.granules.add(option, self.inputs_of(node), self.outputs_of(node))
        self.granules.close()
        for node in all_options:
            # in the granules that the other options ask for
            all_options[node] += tuple(summa_options(self.operations[node]))
        self.options = {
            node: tuple(option for option in found if self._is_possible(node, option))
            for node, found in all_options.items()
        }
        self._of_samples = {
            node: frozenset(option.name for option in found if self._touches_samples(node, option))
            for node, found in self.options.items()
        }
        self._weights = {node: self._weight_slots(node) for node in self.operations}
        self.gathered = self._gathered_parameters()
        """parameters of products: z always cuts what is stored of them"""
        self.journeys = journeys(program.operations)

    def inputs_of(self, node: Node) -> tuple[Value, ...]:
        """Values that an operation reads, by slot."""
        return self._values[node][0]

    def outputs_of(self, node: Node) -> tuple[Value, ...]:
        return self._values[node][1]

    def chosen(self, sharding: Sharding) -> dict[Node, dict[str, Option]]:
        """Operation -> axis -> option, of a sharding of this stage. What was planned for another
        length may be impossible here (a dim of size 1 has no parts): it is done whole then.
        """
        nodes = list(self.program.captured.graph.nodes)
        found = {}
        for index, names in sharding.choices.items():
            options = {option.name: option for option in self.options[nodes[index]]}
            possible = [name if name in options else WHOLE for name in names if name]
            if any(map(is_summa, names)) and WHOLE in possible:
                # the two options of SUMMA go together
                possible = [WHOLE if is_summa(name) else name for name in possible]
            axes = [axis for axis, name in zip(AXES, names, strict=True) if name]
            chosen = zip(axes, possible, strict=True)
            found[nodes[index]] = {axis: options[name] for axis, name in chosen}
        return found

    def _cut_dims(self, node: Node, option: Option) -> Iterator[tuple[Value, int]]:
        """Gives every tensor that an option cuts, and the dim."""
        values = (*self.inputs_of(node), *self.outputs_of(node))
        for value, placement in zip(values, (*option.inputs, *option.outputs), strict=True):
            if isinstance(placement, int):
                yield value, placement

    def _is_possible(self, node: Node, option: Option) -> bool:
        return all(self.granules.can_cut(value, dim) for value, dim in self._cut_dims(node, option))

    def cuts_samples(self, node: Node, option: Option) -> bool:
        return option.name in self._of_samples[node]

    def _touches_samples(self, node: Node, option: Option) -> bool:
        return any(
            self.granules.is_samples(value, dim) for value, dim in self._cut_dims(node, option)
        )

    def node_costs(
        self, num_samples: int, count: Callable[[CapturedGraph, int], Mapping[Node, NodeCost]]
    ) -> Mapping[Node, NodeCost]:
        """Costs of all nodes for so many samples, counted once."""
        if num_samples not in self._costs:
            self._costs[num_samples] = count(self.program.captured, num_samples)
        return self._costs[num_samples]

    def signatures(self, num_samples: int, costs: Mapping[Node, NodeCost]) -> Mapping[Node, int]:
        """A number for each operation; operations have the same one when all their costs are the
        same on every grid.
        """
        if num_samples not in self._signatures:
            known: dict[tuple[object, ...], int] = {}
            found = self._signatures[num_samples] = {}
            for node, op in self.operations.items():
                cuts = tuple(
                    self.granules.cuts(value, num_samples)
                    for value in (*self.inputs_of(node), *self.outputs_of(node))
                )
                travels = tuple(node in nodes for nodes in self.journeys)
                program = self.program
                sort = (
                    node in program.gradients,
                    self.is_product(node),
                    node in program.by_samples,
                    node in program.summa,
                    *travels,
                )
                found[node] = known.setdefault(
                    (op.name, self.options[node], cuts, costs[node], sort), len(known)
                )
        return self._signatures[num_samples]

    def repeats(
        self, num_samples: int, costs: Mapping[Node, NodeCost], fixed: Mapping[str, Layout]
    ) -> Repeats:
        """Equal layers, found once."""
        key = (num_samples, frozenset(fixed))
        if key not in self._repeats:
            sorts = list(self.signatures(num_samples, costs).values())
            self._repeats[key] = find_repeats(self.operations, self.parameters, sorts, fixed)
        return self._repeats[key]

    def sample_dim(self, node: Node) -> int | None:
        return batch_dim(node, self.program.captured.batch_symbol)

    # ---- weights

    def _weight_slots(self, node: Node) -> list[int]:
        """Inputs of a product that are made of parameters only, and are matrices."""
        if not row_of(node).weighted:
            return []
        kinds = self.program.kinds
        inputs = self.operations[node].inputs
        slots = []
        for slot, source in enumerate(inputs[:3]):
            if kinds[source] is ValueKind.WEIGHT and len(source.meta["val"].shape) >= 2:
                slots.append(slot)
        return slots

    def _gathered_parameters(self) -> frozenset[Node]:
        found: set[Node] = set()
        for node, slots in self._weights.items():
            if node in self.program.by_samples:
                continue
            waiting = [self.operations[node].inputs[slot] for slot in slots]
            while waiting:
                source = waiting.pop()
                if source.op == "get_attr":
                    found.add(source)
                elif source.op == "call_function":
                    waiting.extend(source.all_input_nodes)
        return frozenset(found)

    def is_product(self, node: Node) -> bool:
        """Whether x and y cut a weight of this operation."""
        return bool(self._weights[node]) and node not in self.program.by_samples

    # ---- options by axis

    def axis_options(self, node: Node, axis: str) -> tuple[Option, ...]:
        """Options of an operation on one axis."""
        if axis != "z" and (summa := self._summa(node)):
            return summa[:1] if axis == "x" else summa[1:]
        found = tuple(option for option in self.options[node] if option.local != "summa")
        of_samples = tuple(option for option in found if self.cuts_samples(node, option))
        if node in self.program.by_samples:
            return of_samples[:1] or found[-1:]
        if axis == "z":
            return of_samples or tuple(option for option in found if not option.is_cut)
        slots = self._weights[node]
        if slots:
            cuts_weight = [
                any(isinstance(option.inputs[slot], int) for slot in slots) for option in found
            ]
            return tuple(compress(found, cuts_weight)) or found
        return found

    def _summa(self, node: Node) -> tuple[Option, ...]:
        """The options of SUMMA where it is asked for and possible: along x, then those along y."""
        if node not in self.program.summa or not self.is_product(node):
            return ()
        found = tuple(option for option in self.options[node] if option.local == "summa")
        return found if len(found) > 1 and found[0].name == "summa columns" else ()

    def joint_options(
        self, node: Node, axes: Sequence[str], others: Mapping[str, Option]
    ) -> list[tuple[Option, ...]]:
        """Every choice of one option for each of these axes, with `others` chosen on the rest. x
        and y cut different dims of a product's weight, when it has two that can be cut.
        """
        result: list[tuple[Option, ...]] = [()]
        for axis in axes:
            result = [
                (*before, option) for before in result for option in self.axis_options(node, axis)
            ]
        if not self.is_product(node):
            return result
        apart = []
        for joint in result:
            chosen = {**others, **dict(zip(axes, joint, strict=True))}
            names = [chosen[axis].name for axis in "xy" if axis in chosen]
            if len(set(names)) == len(names):
                apart.append(joint)
        return apart or result

    def stored_options(self, node: Node, axis: str, fixed: Layout | None) -> tuple[Placement, ...]:
        """How a parameter may lie along an axis. `fixed`: its layout, where it is given."""
        if fixed is not None:
            return (next((dim for dim, axes in enumerate(fixed.axes) if axis in axes), SAME),)
        shape = node.meta["val"].shape
        used_by_samples = any(user in self.program.by_samples for user in node.users)
        if used_by_samples and node not in self.gathered:
            return (SAME,)
        cuts = self.granules.cuts((node, 0), 1)
        cut = tuple(dim for dim in range(len(shape)) if cuts[dim].count > 1)
        if axis != "z":
            cut = tuple(dim for dim in cut if self.granules.can_cut((node, 0), dim))
        if axis == "z" and node in self.gathered and cut:
            return cut
        return (*cut, SAME)

    def wanted(self) -> list[tuple[Node, Placement]]:
        """Results, and how each must lie along every axis."""
        program = self.program
        found: dict[tuple[Node, Placement], None] = {}
        for node in (*program.sent, *program.outputs):
            dim = self.sample_dim(node)
            found[node, SAME if dim is None else dim] = None
        found |= dict.fromkeys((node, PARTIAL) for node in program.terms)
        found |= dict.fromkeys((node, SAME) for node in program.updates.values())
        return list(found)

    def fixed_source(self, node: Node) -> Placement:
        """How a value that is not computed here lies along every axis."""
        if node in self.program.received:
            dim = self.sample_dim(node)
            return SAME if dim is None else dim
        return SAME


def layout_of(
    cuts: tuple[Cut, ...], placements: Mapping[str, Placement], stored: frozenset[str] = frozenset()
) -> Layout:
    """A layout from its placement on each axis: axes in the order z, y, x, and last those that only
    store it.
    """
    order = [axis for axis in ORDER if axis not in stored]
    order += [axis for axis in ORDER if axis in stored]
    axes = []
    for dim in range(len(cuts)):
        axes.append(tuple(axis for axis in order if placements.get(axis, SAME) == dim))
    partial = frozenset(axis for axis in order if placements.get(axis) == PARTIAL)
    return Layout(cuts, tuple(axes), partial, stored)


def numel_bytes(value: Value, shapes: Shapes) -> int:
    """Bytes of a whole value at the number of samples of `shapes`."""
    tensor = tensor_of(value)
    return int(torch.Size(shapes.of(tensor)).numel()) * tensor.dtype.itemsize
