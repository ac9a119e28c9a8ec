"""Equal layers one after the other: the solver looks at three of them and gives the others what the
middle one gets.

A run of R equal layers is found in the sequence of operations: layer r has the same operations as
layer r - 1, and each of them reads from the same positions, one layer later, or from the very same
value (what all layers share). Parameters that only some of the layers share make no run.

    kept          layers 0, 1 and R - 1; layer 1 counts R - 2 times                             (1)
    left out      layers 2 .. R - 2, which do as layer 1 does; who reads from layer R - 2 reads
                  from layer 1
    in between    what layer 0 hands on lies as what layer 1 hands on, so that the redistribution
                  from layer 0 to layer 1 is that between any two of them and counts R - 2 times;
                  that from layer 1 to layer R - 1 counts once                                  (2)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch.fx import Node

from whale.operations.operation import Operation
from whale.sharding.dims import Value, value_of

FEWEST = 5
"""layers that make a run worth while"""
LONGEST = 1000
"""operations of a layer"""


FIRST, MIDDLE, LAST = range(3)
"""the layers that are kept"""


@dataclass(frozen=True)
class Repeats:
    """What is left out, and what stands for it."""

    alike: Mapping[Node, Node] = field(default_factory=dict)
    """operation or parameter that is left out -> the one in layer 1"""
    times: Mapping[Node, int] = field(default_factory=dict)
    """how often operations and parameters of layer 1 count"""
    layer: Mapping[Node, tuple[int, int]] = field(default_factory=dict)
    """of operations that are kept: (run, one of FIRST, MIDDLE, LAST)"""
    following: Mapping[Node, Node] = field(default_factory=dict)
    """operation of layer 0 -> the same one of layer 1"""

    def of(self, value: Value) -> Value:
        """The value that stands for this one."""
        return self.alike.get(value[0], value[0]), value[1]

    def weight(self, producer: Node, readers: Iterable[Node]) -> int:
        """How often the redistributions of a value count: line (2)."""
        if producer not in self.layer:
            return self.times.get(producer, 1)
        run, layer = self.layer[producer]
        goes_to = set()
        for reader in readers:
            if reader in self.layer and self.layer[reader][0] == run:
                goes_to.add(self.layer[reader][1])
        if layer == FIRST:
            return self.times[self.following[producer]] if MIDDLE in goes_to else 1
        return self.times[producer] if layer == MIDDLE and LAST not in goes_to else 1

    def ties(self, producer: Node, readers: Iterable[Node]) -> bool:
        """Whether a value is handed on from layer 0 to layer 1."""
        return self.layer.get(producer, (0, LAST))[1] == FIRST and any(
            self.layer.get(reader, (0, LAST))[1] == MIDDLE for reader in readers
        )


def find_repeats(
    operations_of: Mapping[Node, Operation],
    parameters: Collection[Node],
    sorts: Sequence[int],
    fixed: Collection[str],
) -> Repeats:
    """All runs of a stage. `sorts`: a number for each operation, equal where nothing tells two of
    them apart; `fixed`: parameters whose layout is given, which are left alone.
    """
    operations = list(operations_of)
    free = frozenset(node for node in parameters if str(node.target) not in fixed)
    alike: dict[Node, Node] = {}
    times: dict[Node, int] = {}
    layer_of: dict[Node, tuple[int, int]] = {}
    following: dict[Node, Node] = {}
    num_runs = 0
    waiting = [(0, len(operations))]
    while waiting:
        begin, end = waiting.pop()
        run = _longest_run(np.array(sorts[begin:end]))
        if run is None:
            continue
        offset, length, number = run
        start = begin + offset
        waiting += [(begin, start), (start + length * number, end)]
        layers = [operations[start + r * length : start + (r + 1) * length] for r in range(number)]
        run_of_layers = _Run(operations_of, frozenset(parameters), free, layers)
        if not all(run_of_layers.reads_alike(r) for r in range(2, number)):
            continue
        if not run_of_layers.has_own_parameters():
            continue
        num_runs += 1
        own = run_of_layers.alike()
        alike |= own
        times |= dict.fromkeys({*layers[1], *own.values()}, number - 2)
        for each, r in ((FIRST, 0), (MIDDLE, 1), (LAST, -1)):
            layer_of |= dict.fromkeys(layers[r], (num_runs, each))
        following |= dict(zip(layers[0], layers[1], strict=True))
    return Repeats(alike, times, layer_of, following)


def _longest_run(sorts: npt.NDArray[np.intp]) -> tuple[int, int, int] | None:
    """(start, operations of a layer, layers) of the run that covers most operations."""
    best: tuple[int, int, int, int] | None = None
    for length in range(1, min(LONGEST, len(sorts) // FEWEST) + 1):
        different = np.flatnonzero(np.append(sorts[:-length] != sorts[length:], True))
        starts = np.insert(different[:-1] + 1, 0, 0)
        longest = int(np.argmax(different - starts))
        start = int(starts[longest])
        number = int(different[longest] - starts[longest]) // length + 1
        if number >= FEWEST and (best is None or number * length > best[0]):
            best = (number * length, start, length, number)
    return best[1:] if best is not None else None


class _Run:
    """Whether the layers of a run read alike, and which of their parameters stand for each
    other.
    """

    def __init__(
        self,
        operations: Mapping[Node, Operation],
        parameters: frozenset[Node],
        free: frozenset[Node],
        layers: Sequence[Sequence[Node]],
    ) -> None:
        """`free`: the parameters whose layout is not given."""
        self.operations = operations
        self.parameters = parameters
        self.free = free
        self.layers = layers
        self.position = {
            node: (r, i) for r, layer in enumerate(layers) for i, node in enumerate(layer)
        }
        self.before: list[dict[Node, Node]] = [{} for _ in layers]
        """by layer from 2 on: parameter -> the one of the layer before"""

    def reads_alike(self, r: int) -> bool:
        """Whether layer r reads as the layer before it does."""
        for before, node in zip(self.layers[r - 1], self.layers[r], strict=True):
            inputs = zip(self.operations[before].inputs, self.operations[node].inputs, strict=True)
            if not all(self._is_next(r, value_of(a), value_of(b)) for a, b in inputs):
                return False
        return True

    def _is_next(self, r: int, earlier: Value, later: Value) -> bool:
        """Whether `later` is to layer r what `earlier` is to layer r - 1."""
        first, first_result = earlier
        second, second_result = later
        if first is second:  # shared by all layers, so it may not be of one of them
            return first not in self.position
        if first_result != second_result:
            return False
        if first in self.parameters and second in self.parameters:
            if first not in self.free or second not in self.free:
                return False
            return self.before[r].setdefault(second, first) is first
        if first in self.position and second in self.position:
            first_layer, first_index = self.position[first]
            return self.position[second] == (first_layer + 1, first_index)
        return first not in self.operations and second not in self.operations

    def has_own_parameters(self) -> bool:
        """Whether no two layers read a parameter that the others do not: what a later layer left
        out would have to stand for itself.
        """
        seen = set()
        for node in (*self.layers[0], *self.layers[1]):
            seen |= {value_of(source)[0] for source in self.operations[node].inputs}
        for parameters in self.before[2:]:
            if not seen.isdisjoint(parameters):
                return False
            seen |= set(parameters)
        return True

    def alike(self) -> dict[Node, Node]:
        """Operations and parameters of layers 2 .. R - 2 -> those of layer 1."""
        found: dict[Node, Node] = {}
        for layer in self.layers[2:-1]:
            found |= dict(zip(layer, self.layers[1], strict=True))
        for parameters in self.before[2:-1]:
            for node, before in parameters.items():
                found[node] = found.get(before, before)
        return found
