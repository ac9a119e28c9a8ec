"""What autograd saves for backward: found by running operations on fake tensors and watching what
they save.

A storage is counted once in each stage, however many operations save it. Weights, buffers and the
batch itself do not count: they are there anyway. What a stage receives and sends it holds as well
(`runtime/actions.py`).

Models repeat their layers, so an operation is run once for each form of its arguments
(`operations/saves.py`), and what it did is then written down for all others: which arguments it
saves, which new storages it makes, and where its results lie.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from whale.capture.graph import CapturedGraph
from whale.capture.sample_states import batch_dim
from whale.compat import fake_mode
from whale.operations.saves import Effects, Placed, TensorForm, mapped
from whale.operations.sizes import shape_at
from whale.scheduling.memory import NOTHING, Bytes, total


@dataclass(frozen=True)
class Saved:
    """Which storages each operation saves for backward, and which its result lies in."""

    storages: tuple[Bytes, ...]
    """size of each storage"""
    of_node: Mapping[Node, frozenset[int]]
    """storages that each operation saves, as places in `storages`"""
    result_of_node: Mapping[Node, frozenset[int]]
    """storages that the result of each operation lies in"""

    def total(
        self,
        operations: Iterable[Node],
        crossing: Iterable[Node] = (),
        regions: Mapping[Node, Hashable] | None = None,
    ) -> Bytes:
        """What these operations save together, and the values that cross into or out of their
        stage.

        `regions`: a region that is recomputed saves what enters it, and nothing else.
        """
        return self.bytes_of(self.storages_of(operations, crossing, regions))

    def storages_of(
        self,
        operations: Iterable[Node],
        crossing: Iterable[Node] = (),
        regions: Mapping[Node, Hashable] | None = None,
    ) -> set[int]:
        """The storages of `total`, as places in `storages`."""
        regions = regions or {}
        found: set[int] = set()
        for node in operations:
            region = regions.get(node)
            if region is None:
                found |= self.of_node.get(node, frozenset())
                continue
            for source in node.all_input_nodes:
                if regions.get(source) != region:
                    found |= self.result_of_node.get(source, frozenset())
        for node in crossing:
            found |= self.result_of_node.get(node, frozenset())
        return found

    def largest(self, parts: Mapping[int, float], number: int) -> Bytes:
        """Size of so many of the largest of these storages, of each of which this part counts."""
        per_sample = [part * self.storages[i].sample_bytes for i, part in parts.items()]
        fixed = [part * self.storages[i].fixed_bytes for i, part in parts.items()]
        return Bytes(sum(nlargest(number, per_sample)), sum(nlargest(number, fixed)))

    def largest_region(self, regions: Mapping[Node, Hashable]) -> Bytes:
        """What the region with most activations saves while it is recomputed."""
        found: dict[Hashable, set[int]] = {}
        for node, region in regions.items():
            found.setdefault(region, set()).update(self.of_node.get(node, frozenset()))
        return max(
            map(self.bytes_of, found.values()),
            key=lambda size: size.sample_bytes,
            default=NOTHING,
        )

    def results(self, nodes: Iterable[Node]) -> Bytes:
        """Size of the storages that hold these values."""
        return self.bytes_of({i for node in nodes for i in self.result_of_node.get(node, ())})

    def bytes_of(self, found: Iterable[int]) -> Bytes:
        """Size of these storages."""
        return total(self.storages[i] for i in found)


def saved_for_backward(captured: CapturedGraph, batch_size: int) -> Saved:
    """Follows the storages of the captured graph for a batch of that size."""
    watch = _StorageWalk(captured, batch_size)
    effects = Effects()
    values: dict[Node, Any] = {}
    with (
        fake_mode(),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(effects.pack, lambda tensor: tensor),
    ):
        for node in captured.graph.nodes:
            if node.op == "output":
                break
            values[node] = (
                watch.given_value(node)
                if node.op != "call_function"
                else watch.run(node, values, effects)
            )
    return watch.result()


class _StorageWalk:
    """Numbers the storages of a graph, and notes who saves them."""

    def __init__(self, captured: CapturedGraph, batch_size: int) -> None:
        self.captured = captured
        self.batch_size = batch_size
        self.storages: list[tuple[int, Node | None]] = []
        """(bytes, node whose result it holds; None: a temporary of some operation)"""
        self.given: set[int] = set()
        """storages of weights, buffers and the batch"""
        self.saved: dict[Node, set[int]] = {}
        self.results: dict[Node, set[int]] = {}

    def given_value(self, node: Node) -> Placed:
        """A tensor of the batch, a weight or a buffer."""
        self.given.add(len(self.storages))
        self.storages.append((0, None))
        return Placed(self._given_form(node), len(self.storages) - 1)

    def run(self, node: Node, values: Mapping[Node, Any], effects: Effects) -> Any:
        args = map_arg(node.args, values.__getitem__)
        kwargs = map_arg(node.kwargs, values.__getitem__)
        effect = effects.of(node, args, kwargs)
        numbers: list[int] = []
        mapped(
            (args, kwargs),
            lambda value: numbers.append(value.storage) if isinstance(value, Placed) else None,
        )
        first_new = len(numbers)
        numbers.extend(range(len(self.storages), len(self.storages) + len(effect.new_bytes)))
        own: set[int] = set()

        def place(value: Any) -> Any:
            if not isinstance(value, Placed):
                return value
            own.add(numbers[value.storage])
            return Placed(value.form, numbers[value.storage])

        result = mapped(effect.result, place)
        for number, num_bytes in zip(numbers[first_new:], effect.new_bytes, strict=True):
            self.storages.append((num_bytes, node if number in own else None))
        if own:
            self.results[node] = own
        if effect.saved:
            self.saved[node] = {numbers[place] for place in effect.saved}
        return result

    def _given_form(self, node: Node) -> TensorForm:
        value: Any = node.meta.get("val")
        if node.op == "placeholder":
            shape = shape_at(value.shape, self.captured.batch_symbol, self.batch_size)
            return TensorForm(shape, _contiguous(shape), value.dtype, value.device, False)
        state = self.captured.state[str(node.target)]
        device = value.device if isinstance(value, Tensor) else torch.device("cpu")
        return TensorForm(
            state.shape, _contiguous(state.shape), state.dtype, device, state.trainable
        )

    def result(self) -> Saved:
        index: dict[int, int] = {}
        sizes: list[Bytes] = []
        for number, (num_bytes, node) in enumerate(self.storages):
            if number in self.given:
                continue
            index[number] = len(sizes)
            if self._has_samples(node):
                sizes.append(Bytes(num_bytes / self.batch_size))
            else:
                sizes.append(Bytes(fixed_bytes=num_bytes))

        def known(found: Mapping[Node, set[int]]) -> dict[Node, frozenset[int]]:
            return {
                node: frozenset(index[number] for number in numbers if number in index)
                for node, numbers in found.items()
            }

        return Saved(tuple(sizes), known(self.saved), known(self.results))

    def _has_samples(self, node: Node | None) -> bool:
        """Whether a storage grows with the batch. Temporaries and lists are taken to do so."""
        if node is None or not isinstance(node.meta.get("val"), Tensor):
            return True
        return batch_dim(node, self.captured.batch_symbol) is not None


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor that lies in memory without gaps, the last dim innermost."""
    return (
        tuple(accumulate((max(1, size) for size in reversed(shape[1:])), mul, initial=1))[::-1]
        if shape
        else ()
    )
