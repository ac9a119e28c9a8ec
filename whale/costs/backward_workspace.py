"""Workspace of a backward, beside what the forward saved: gradients on their way, while saved
tensors are freed one after the other.

Backward goes through the operations from the last to the first. While it does operation i there
are, of the samples,

    saved(i)      what operations up to i saved; the rest was freed. Not so what crosses into the
                  stage or out of it: the runtime holds what came in until the backward is over, and
                  for every result the gradient that came back, of the same size
    pending(i)    gradients of values that were made before i and read behind it: a residual waits
                  while its branch is differentiated
    work(i)       COPIES of the largest of its result and its inputs: a gradient that comes in and
                  one that goes out

so that the backward needs  max_i saved(i) + pending(i) + work(i),  of which all that was saved is
there anyway; the rest is workspace.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

from torch.fx import Node

from whale.costs.saved import Saved
from whale.operations.table import row_of
from whale.scheduling.memory import Size, live

COPIES = 2
"""for operations whose row does not say `backward_copies`"""


def live_between(operations: Sequence[Node], size_of: Callable[[Node], float]) -> list[float]:
    """Summed size of the values that are live in front of each operation, and behind the last one:
    between the operation that makes a value and the last one that reads it.
    """
    position = {node: index for index, node in enumerate(operations)}
    ranges = []
    for node, index in position.items():
        last = max((position[user] for user in node.users if user in position), default=index)
        ranges.append((index + 1, last + 1, size_of(node)))
    # sums that go up and down again may end below zero by rounding
    return [max(0.0, size) for size in live(ranges, len(operations) + 1, 0.0)]


@dataclass(frozen=True)
class Lifetimes:
    """How long the storages of a stage are alive in its backward, in places of its operations."""

    num_operations: int
    first_saved: dict[int, int]
    """storage -> the first operation that saves it; freed once that one is differentiated"""
    made: dict[int, int]
    """storage -> the operation that makes it"""
    last_read: dict[int, int]
    """storage -> the last operation that reads it and gives it a gradient"""

    def saved(self, size: Callable[[int], Size], zero: Size) -> list[Size]:
        """saved(i) of every operation, where `size` gives that of a storage."""
        ranges = (
            (first, self.num_operations, size(storage))
            for storage, first in self.first_saved.items()
        )
        return live(ranges, self.num_operations, zero)

    def pending(self, size: Callable[[int], Size], zero: Size) -> list[Size]:
        """pending(i) of every operation: a gradient is there once its last reader is
        differentiated, until the operation that made the value is.
        """
        ranges = (
            (self.made.get(storage, 0) + 1, last, size(storage))
            for storage, last in self.last_read.items()
        )
        return live(ranges, self.num_operations, zero)


def lifetimes(
    operations: Sequence[Node],
    gradients: Container[Node],
    saved: Saved,
    crossing: Iterable[Node] = (),
) -> Lifetimes:
    """`gradients`: values that carry a gradient; `crossing`: values that the stage receives or
    sends.
    """
    own = set(operations)
    crossing_storages: set[int] = set()
    for node in crossing:
        crossing_storages |= saved.result_of_node.get(node, frozenset())
    found = Lifetimes(len(operations), {}, {}, {})
    for index, node in enumerate(operations):
        for storage in saved.of_node.get(node, frozenset()) - crossing_storages:
            found.first_saved.setdefault(storage, index)
        for storage in saved.result_of_node.get(node, ()):
            found.made.setdefault(storage, index)
        if node not in gradients:
            continue
        for source in node.all_input_nodes:
            if source in own and source in gradients:
                for storage in saved.result_of_node.get(source, ()):
                    found.last_read[storage] = index
    return found


def backward_workspace(
    operations: Sequence[Node],
    gradients: Container[Node],
    saved: Saved,
    crossing: Iterable[Node] = (),
) -> float:
    """Bytes for each sample; arguments as for `lifetimes`."""
    live = backward_live(operations, gradients, saved, crossing)
    own = (size for node, size in zip(operations, live, strict=True) if node in gradients)
    return max(0.0, max(own, default=0.0))


def backward_live(
    operations: Sequence[Node],
    gradients: Container[Node],
    saved: Saved,
    crossing: Iterable[Node] = (),
) -> list[float]:
    """Bytes for each sample that are there while backward does each of the operations, less what is
    saved in all: the largest is the workspace. Arguments as for `lifetimes`.
    """
    times = lifetimes(operations, gradients, saved, crossing)

    def size(storage: int) -> float:
        return saved.storages[storage].sample_bytes

    saved_until = times.saved(size, 0.0)
    pending = times.pending(size, 0.0)
    found = []
    for index, node in enumerate(operations):
        work = _work(node, gradients, saved) if node in gradients else 0.0
        found.append(saved_until[index] + pending[index] + work - saved_until[-1])
    return found


def _work(node: Node, gradients: Container[Node], saved: Saved) -> float:
    sources = []
    for source in node.all_input_nodes:
        if source in gradients and source.op == "call_function":
            sources.append(source)
    own, *others = (saved.results([value]).sample_bytes for value in (node, *sources))
    largest = max(own, *others) if others else own
    copies = row_of(node).backward_copies
    return COPIES * largest if copies is None else own + copies * largest
