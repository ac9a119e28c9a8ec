"""Which operations of a captured model a measured layer is: by the names of its modules, and by
what they run where the file says that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch.fx import Node

from whale.capture.graph import CapturedGraph
from whale.cluster.layer_times import Layer, LayerTimes

SIGNATURE_DIGITS = 12


@dataclass(frozen=True)
class LayerRegion:
    """The operations of one module, in the order of the graph."""

    module: str
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class MeasuredRegion:
    """A region with the layer whose times it has."""

    region: LayerRegion
    layer: Layer


def module_names(node: Node) -> list[str]:
    """Names of all modules that an operation runs inside of, the outermost first."""
    return [name for name, _ in (node.meta.get("nn_module_stack") or {}).values() if name]


def regions_of_modules(captured: CapturedGraph, names: Iterable[str]) -> list[LayerRegion]:
    """The operations of each of these modules."""
    wanted = {name: [] for name in names}  # type: dict[str, list[Node]]
    for node in captured.compute_nodes():
        for name in module_names(node):
            if name in wanted:
                wanted[name].append(node)
    return [LayerRegion(name, tuple(nodes)) for name, nodes in wanted.items() if nodes]


def all_modules(captured: CapturedGraph) -> list[str]:
    """Names of all modules that run something, in the order in which they first do."""
    found: dict[str, None] = {}
    for node in captured.compute_nodes():
        found.update(dict.fromkeys(module_names(node)))
    return list(found)


def signature(region: LayerRegion) -> str:
    """A short hash of what a region runs: operations, shapes and dtypes, in order. Layers that
    repeat have the same.
    """
    digest = hashlib.sha256()
    for node in region.nodes:
        digest.update(f"{node.target}{_form(node.meta.get('val'))}".encode())
        for source in node.all_input_nodes:
            digest.update(_form(source.meta.get("val")).encode())
    return digest.hexdigest()[:SIGNATURE_DIGITS]


def _form(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(map(str, value.shape))}{value.dtype}"
    if isinstance(value, (tuple, list)):
        return "".join(map(_form, value))
    return type(value).__name__


def measured_regions(captured: CapturedGraph, times: LayerTimes, kind: str) -> list[MeasuredRegion]:
    """Regions of the model that were measured on this kind of device, no two of which overlap: a
    module inside of a measured one is part of it.
    """
    layers = times.of_kind(kind)
    if not layers:
        return []
    found: list[MeasuredRegion] = []
    taken: set[Node] = set()
    for region in regions_of_modules(captured, all_modules(captured)):
        layer = _layer_of(region, layers)
        if layer is None or taken & set(region.nodes):
            continue
        taken |= set(region.nodes)
        found.append(MeasuredRegion(region, layer))
    return found


def _layer_of(region: LayerRegion, layers: Sequence[Layer]) -> Layer | None:
    for layer in layers:
        if any(_matches(region.module, pattern) for pattern in layer.modules):
            if not layer.operations or layer.operations == signature(region):
                return layer
    return None


def _matches(name: str, pattern: str) -> bool:
    """Whether a name fits a pattern part by part: a star does not go over a dot."""
    parts = name.split(".")
    patterns = pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))
