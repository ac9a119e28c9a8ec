"""Which operations of a model are worth splitting over a group of devices, while everything else
shares samples on the same devices: those whose weights are large and whose activations are small (a
classifier of very many classes, experts, a vocabulary).

With w bytes of a trained parameter, n devices and b samples of a micro-batch, of which there are M,
data parallelism all-reduces 2 w (n - 1) / n bytes of gradients in a step. Split, nothing of it is
sent; instead activations are, in each micro-batch forward and backward. With i and o bytes for each
sample that the operation reads and gives,

    gathered    2 b i (n - 1) / n, and unless everything behind is split too 2 b o (n - 1) / n^2 (1)
    all to all  2 b (i + o) (n - 1) / n^2, where the weight has a dim for this (experts)         (1)

A parameter is heavy where 2 w (n - 1) / n is more than M times (1). What the step really takes is
left to the planner of grids (`planning/grids.py`); lines (1) only say what is worth its time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from torch.fx import Node

from whale.capture.graph import module_name
from whale.operations.table import row_of
from whale.planning.stages import state_behind
from whale.search.outline import Outline

LARGE_PART = 0.005
"""of all trained bytes: smaller parameters are never worth a split of their own"""
FACTORS = (1.0, 4.0)
"""a parameter is taken where its gradient is so many times what its activations would send"""


@dataclass(frozen=True)
class LargeWeight:
    """A parameter that may be worth splitting, and what its operations read and give."""

    name: str
    trained_bytes: int
    input_bytes: float
    """for each sample"""
    output_bytes: float
    """for each sample; 0 where nothing behind needs it whole again"""
    has_experts: bool

    def sent_bytes(self, num_samples: float, number: int) -> float:
        """Bytes that a device sends for a micro-batch by lines (1), forward and backward."""
        part = (number - 1) / number
        gathered = 2 * num_samples * part * (self.input_bytes + self.output_bytes / number)
        if not self.has_experts:
            return gathered
        both = self.input_bytes + self.output_bytes
        return min(gathered, 2 * num_samples * part * both / number)

    def saved_bytes(self, number: int) -> float:
        """Bytes of gradients that a device does not send in a step."""
        return 2 * self.trained_bytes * (number - 1) / number


def large_weights(outline: Outline) -> list[LargeWeight]:
    """Parameters of products that are a notable part of the model, the largest first."""
    state = outline.problem.captured.state
    total = sum(tensor.num_bytes for tensor in state.values() if tensor.trainable)
    readers = parameter_readers(outline)
    tail = _tail(outline, readers)
    costs = outline.costs
    size = outline.problem.batch_size
    found = []
    for name, nodes in readers.items():
        tensor = state[name]
        is_large = tensor.trainable and tensor.num_bytes > LARGE_PART * total
        if not is_large or any(not row_of(node).weighted for node in nodes):
            continue
        read = 0.0
        given = 0.0
        for node in nodes:
            sources = [source for source in node.all_input_nodes if source in outline.places]
            read += max((costs[source].output_bytes for source in sources), default=0.0) / size
            if not all(user in tail for user in node.users):
                given += costs[node].output_bytes / size
        has_experts = len(tensor.shape) > 2
        found.append(LargeWeight(name, tensor.num_bytes, read, given, has_experts))
    return sorted(found, key=lambda each: -each.trained_bytes)


def heavy_sets(
    weights: Sequence[LargeWeight], num_samples: float, num_micro_batch: int, number: int
) -> list[tuple[LargeWeight, ...]]:
    """Sets of parameters that a group of so many devices may split, each once: all that are heavy,
    and those that are so by far.
    """
    found: dict[tuple[str, ...], tuple[LargeWeight, ...]] = {}
    for factor in FACTORS:
        chosen = []
        for weight in weights:
            sent = num_micro_batch * weight.sent_bytes(num_samples, number)
            if weight.saved_bytes(number) > factor * sent:
                chosen.append(weight)
        if chosen:
            found.setdefault(tuple(each.name for each in chosen), tuple(chosen))
    return list(found.values())


def split_operations(outline: Outline, parameters: Iterable[str]) -> frozenset[Node]:
    """The operations that are split where these parameters are: those that read them, the others of
    the same modules, what stands between two of them (the activation function of an expert), and
    all that comes behind up to the loss, where nothing else is trained there.
    """
    names = set(parameters)
    readers = parameter_readers(outline)
    chosen = {node for name in names for node in readers.get(name, ())}
    modules = {name.rpartition(".")[0] for name in names} - {""}
    for node in outline.activations:
        own = module_name(node)
        if any(own == module or own.startswith(f"{module}.") for module in modules):
            chosen.add(node)
    reading = {node for name in readers.keys() - names for node in readers[name]}
    after = _reached(outline.activations, chosen, reading, lambda node: node.all_input_nodes)
    before = _reached(outline.activations[::-1], chosen, reading, lambda node: list(node.users))
    tail = _tail(outline, readers, names)
    return frozenset(chosen | (after & before) | (after & tail))


def _reached(
    nodes: Sequence[Node],
    start: Set[Node],
    barred: Set[Node],
    neighbours: Callable[[Node], Sequence[Node]],
) -> set[Node]:
    """Nodes to which a path leads from one of `start` that no node of `barred` is on. `nodes`: in
    the order of the paths; `neighbours`: of a node, those that come before it on a path.
    """
    found = set(start)
    for node in nodes:
        if node not in barred and any(each in found for each in neighbours(node)):
            found.add(node)
    return found


def parameter_readers(outline: Outline) -> dict[str, list[Node]]:
    """Parameter -> the activations that read it."""
    kinds = outline.problem.kinds
    state = outline.problem.captured.state
    found: dict[str, list[Node]] = {}
    for node in outline.activations:
        for name, _ in state_behind(node, kinds):
            if state[name].kind == "parameter":
                found.setdefault(name, []).append(node)
    return found


def _tail(
    outline: Outline, readers: Mapping[str, Sequence[Node]], split: Iterable[str] = ()
) -> frozenset[Node]:
    """Activations behind which no parameter is read, but for those that are split, and that read
    none themselves.
    """
    ignored = set(split)
    reading = {node for name, nodes in readers.items() if name not in ignored for node in nodes}
    found: set[Node] = set()
    for node in reversed(outline.activations):
        users = [user for user in node.users if user in outline.places]
        if node not in reading and all(user in found for user in users):
            found.add(node)
    return frozenset(found)
