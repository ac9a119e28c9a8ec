"""Equal layers one after the other: the solver looks at three of them and gives the others what the
middle one gets.

A run of R equal layers is found in the sequence of operations: layer r has the same operations as
layer r - 1, and each of them reads from the same places, one layer later, or from the very same
value (what all layers share).

    kept          layers 0, 1 and R - 1; layer 1 counts R - 2 times                                                           (1)
    left out      layers 2 .. R - 2, which do as layer 1 does; who reads from layer R - 2 reads from layer 1
    in between    what layer 0 hands on lies as what layer 1 hands on, so that the way from layer 0 to layer 1 is the way
                  between any two of them and counts R - 2 times; that from layer 1 to layer R - 1 counts once                 (2)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from torch.fx import Node

from whale.sharding.dims import Value, value_of

if TYPE_CHECKING:
    from whale.sharding.space import Space

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
        return self.alike.get(value[0], value[0]), value[1]

    def weight(self, producer: Node, readers: Iterable[Node]) -> int:
        """How often the exchanges of a value count: line (2)."""
        if producer not in self.layer:
            return self.times.get(producer, 1)
        run, layer = self.layer[producer]
        goes_to = {
            self.layer[reader][1]
            for reader in readers
            if reader in self.layer and self.layer[reader][0] == run
        }
        if layer == FIRST:
            return self.times[self.following[producer]] if MIDDLE in goes_to else 1
        return self.times[producer] if layer == MIDDLE and LAST not in goes_to else 1

    def ties(self, producer: Node, readers: Iterable[Node]) -> bool:
        """Whether a value is handed on from layer 0 to layer 1."""
        return self.layer.get(producer, (0, LAST))[1] == FIRST and any(
            self.layer.get(reader, (0, LAST))[1] == MIDDLE for reader in readers
        )


def find_repeats(space: Space, sorts: Sequence[int], fixed: Collection[str]) -> Repeats:
    """All runs of a stage. `sorts`: a number for each operation, equal where nothing tells two of
    them apart; `fixed`: parameters whose layout is given, which are left alone."""
    operations = list(space.operations)
    found = Repeats()
    num_runs = 0
    waiting = [(0, len(operations))]
    while waiting:
        begin, end = waiting.pop()
        run = _longest_run(np.array(sorts[begin:end]))
        if run is None:
            continue
        start = begin + run[0]
        length = run[1]
        number = run[2]
        waiting += [(begin, start), (start + length * number, end)]
        layers = [operations[start + r * length : start + (r + 1) * length] for r in range(number)]
        same = _Same(space, layers, fixed)
        if all(same.layer(r) for r in range(2, number)):
            num_runs += 1
            found = Repeats(
                {**found.alike, **same.alike()},
                {**found.times, **same.times()},
                {
                    **found.layer,
                    **{
                        node: (num_runs, each)
                        for each, r in ((FIRST, 0), (MIDDLE, 1), (LAST, -1))
                        for node in layers[r]
                    },
                },
                {**found.following, **dict(zip(layers[0], layers[1], strict=True))},
            )
    return found


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


class _Same:
    """Whether the layers of a run read alike, and which of their parameters stand for each
    other.
    """

    def __init__(
        self, space: Space, layers: Sequence[Sequence[Node]], fixed: Collection[str]
    ) -> None:
        self.space = space
        self.layers = layers
        self.fixed = fixed
        self.place = {
            node: (r, i) for r, layer in enumerate(layers) for i, node in enumerate(layer)
        }
        self.own = frozenset(space.parameters)
        self.parameters: list[dict[Node, Node]] = [{} for _ in layers]
        """of each layer from 2 on: parameter -> the one of the layer before"""

    def layer(self, r: int) -> bool:
        return all(
            self._reads_alike(r, before, node)
            for before, node in zip(self.layers[r - 1], self.layers[r], strict=True)
        )

    def _reads_alike(self, r: int, before: Node, node: Node) -> bool:
        inputs = zip(
            self.space.operations[before].inputs, self.space.operations[node].inputs, strict=True
        )
        for (first, first_result), (second, second_result) in (
            (value_of(a), value_of(b)) for a, b in inputs
        ):
            if first is second:
                if first in self.place:
                    return False
                continue
            if first_result != second_result:
                return False
            if first in self.own and second in self.own:
                if {str(first.target), str(second.target)} & set(self.fixed) or self.parameters[
                    r
                ].setdefault(second, first) is not first:
                    return False
            elif first in self.place and second in self.place:
                (r1, i1) = self.place[first]
                (r2, i2) = self.place[second]
                if i1 != i2 or r2 != r1 + 1:
                    return False
            elif first in self.space.operations or second in self.space.operations:
                return False
        return True

    def alike(self) -> dict[Node, Node]:
        """Layers 2 .. R - 2 -> layer 1."""
        found = {
            node: self.layers[1][i] for layer in self.layers[2:-1] for i, node in enumerate(layer)
        }
        for parameters in self.parameters[2:-1]:
            for node, before in parameters.items():
                found[node] = found.get(before, before)
        return found

    def times(self) -> dict[Node, int]:
        found = self.alike()
        return dict.fromkeys({*self.layers[1], *found.values()}, len(self.layers) - 2)
