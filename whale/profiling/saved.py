"""What autograd keeps from forward to backward: found by running the graph once on fake tensors and watching what it saves.

A *kept* storage is counted once in each stage, however many operations save it. Weights, buffers and the batch itself do not count:
they are there anyway. What a stage receives and sends it keeps as well (`runtime/actions.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from whale.capture.graph import CapturedGraph
from whale.capture.guards import RECOMPUTE_TAG
from whale.capture.sample_states import batch_dim
from whale.compat import enter_autocast, exit_autocast, fake_mode
from whale.profiling.costs import concrete_shape


@dataclass(frozen=True)
class Kept:
    """Bytes of one storage."""

    sample_bytes: float
    """for each sample"""
    fixed_bytes: int
    """the same for any number of samples"""


@dataclass(frozen=True)
class Saved:
    """Which storages each operation keeps, and which its result lies in."""

    kept: tuple[Kept, ...]
    of_node: Mapping[Node, frozenset[int]]
    """indices into `kept`"""
    result_of_node: Mapping[Node, frozenset[int]]

    def total(self, operations: Iterable[Node], crossing: Iterable[Node] = ()) -> Kept:
        """Kept by these operations together, and the values that cross into or out of their stage."""
        found: set[int] = set()
        for node in operations:
            found |= self.of_node.get(node, frozenset())
        for node in crossing:
            found |= self.result_of_node.get(node, frozenset())
        return Kept(sum(self.kept[i].sample_bytes for i in found), sum(self.kept[i].fixed_bytes for i in found))


def saved_for_backward(captured: CapturedGraph, batch_size: int) -> Saved:
    """Runs the captured graph on fake tensors with a batch of that size."""
    watch = _Watch(captured, batch_size)
    with fake_mode(), torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(watch.pack, lambda tensor: tensor):
        values: dict[Node, Any] = {}
        for node in captured.graph.nodes:
            if node.op == "output":
                break
            values[node] = watch.run(node, values)
    return watch.result()


class _Watch:
    def __init__(self, captured: CapturedGraph, batch_size: int) -> None:
        self.captured, self.batch_size = captured, batch_size
        self.storages: dict[int, tuple[Any, Node | None]] = {}
        """id -> (storage, node whose result it holds; None: a temporary of some operation). Kept alive, so that ids stay"""
        self.given: set[int] = set()
        """storages of weights, buffers and the batch"""
        self.node: Node | None = None
        self.saved: dict[Node, set[int]] = {}
        self.results: dict[Node, set[int]] = {}

    def run(self, node: Node, values: Mapping[Node, Any]) -> Any:
        if node.op in ("placeholder", "get_attr"):
            value = self._given(node)
            self.given.add(self._see(value, None))
            return value
        self.node = node
        region = node.meta.get("autocast")
        entered = enter_autocast(*region) if region is not None else None
        try:
            assert callable(node.target)
            result = node.target(*map_arg(node.args, values.__getitem__), **map_arg(node.kwargs, values.__getitem__))  # type: ignore[misc]
        finally:
            if entered is not None:
                exit_autocast(entered)
            self.node = None
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, Tensor):
                self.results.setdefault(node, set()).add(self._see(each, node))
        self._enter_region(node)
        return result

    def pack(self, tensor: Tensor) -> Tensor:
        if self.node is not None and _region(self.node) is None:
            self.saved.setdefault(self.node, set()).add(self._see(tensor, None))
        return tensor

    def _enter_region(self, node: Node) -> None:
        """A checkpointed region keeps what enters it, and nothing else."""
        if (tag := _region(node)) is not None:
            for source in node.all_input_nodes:
                if _region(source) != tag:
                    self.saved.setdefault(node, set()).update(self.results.get(source, ()))

    def _given(self, node: Node) -> Tensor:
        if node.op == "placeholder":
            value = node.meta["val"]
            shape = concrete_shape(value.shape, self.captured.batch_symbol, self.batch_size)
            return torch.empty(shape, dtype=value.dtype, device=value.device)
        state = self.captured.state[str(node.target)]
        value = node.meta.get("val")
        device = value.device if isinstance(value, Tensor) else "cpu"
        return torch.empty(state.shape, dtype=state.dtype, device=device, requires_grad=state.trainable)

    def _see(self, tensor: Tensor, node: Node | None) -> int:
        storage = tensor.untyped_storage()
        known = self.storages.get(id(storage))
        if known is None or known[1] is None:
            self.storages[id(storage)] = (storage, node)
        return id(storage)

    def result(self) -> Saved:
        index: dict[int, int] = {}
        kept: list[Kept] = []
        for key, (storage, node) in self.storages.items():
            if key in self.given:
                continue
            index[key] = len(kept)
            num_bytes = int(storage.nbytes())
            has_samples = node is None or not isinstance(node.meta.get("val"), Tensor) or self._has_samples(node)
            kept.append(Kept(num_bytes / self.batch_size, 0) if has_samples else Kept(0.0, num_bytes))

        def known(found: Mapping[Node, set[int]]) -> dict[Node, frozenset[int]]:
            return {node: frozenset(index[key] for key in keys if key in index) for node, keys in found.items()}

        return Saved(tuple(kept), known(self.saved), known(self.results))

    def _has_samples(self, node: Node) -> bool:
        return batch_dim(node, self.captured.batch_symbol) is not None


def _region(node: Node) -> Any:
    return (node.meta.get("custom") or {}).get(RECOMPUTE_TAG)
