"""Reads a folder of measurements on real GPUs: layer times, network curves, whole steps.

The figures were measured and published by the authors of Sailor (SOSP'25) with their artifact
(github.com/eth-easl/sailor, MIT licence); they are no part of this repository. The folder holds
`layers.json`, `network.json`, `plans.json` and, for comparisons of planners, `rival_plans.json`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.measured_models import MODELS
from whale.cluster.kinds import GIGA, DeviceKind, device_kind
from whale.cluster.layer_times import Layer, LayerTime, LayerTimes
from whale.cluster.network import Link

KINDS = {
    "V100-16": "V100-16GB",
    "A100-40": "A100-40GB",
    "A100-80": "A100-80GB",
    "GH-96": "GH200",
    "RTX-2080": "RTX-2080-Ti",
}
"""names of the folder that are others in Whale's table of kinds"""
WRONG_LAYERS = {
    ("GPT-Neo-2.7", "GH-96"): "all rows repeat those of OPT-350, a model of a sixth of its work"
}
"""(model, kind) whose layer times cannot be right"""
CURVE_MB = tuple(2.0**power for power in range(-4, 11))
"""sizes of messages at which a polynomial becomes points of a curve"""
LATENCY_S = 20e-6
"""of a message, which the polynomials do not have"""


@dataclass(frozen=True)
class LayerRow:
    """Seconds of (forward, backward, update) of the three kinds of layers on one GPU."""

    micro_batch: int
    tensor_parallel: int
    embedding: tuple[float, float, float]
    block: tuple[float, float, float]
    head: tuple[float, float, float]

    def of(self, layer: int, num_layers: int) -> tuple[float, float, float]:
        """Times of a layer by its number: 0 is the embedding, the last one the head."""
        if layer == 0:
            return self.embedding
        return self.head if layer == num_layers - 1 else self.block


@dataclass(frozen=True)
class Measurements:
    """One folder."""

    folder: Path

    @cached_property
    def layers(self) -> dict[str, dict[str, list[LayerRow]]]:
        """Layer times by model and kind of GPU."""
        found: dict[str, dict[str, list[LayerRow]]] = {}
        for model, by_kind in self._read("layers.json").items():
            for kind, rows in by_kind.items():
                found.setdefault(model, {})[kind] = [
                    LayerRow(
                        row["micro_batch"],
                        row["tensor_parallel"],
                        *(tuple(row[layer]) for layer in ("embedding", "block", "head")),
                    )
                    for row in rows
                ]
        return found

    @cached_property
    def plans(self) -> list[dict[str, Any]]:
        """Whole steps; none where the folder has no file of them."""
        return list(self._read("plans.json")) if self._has("plans.json") else []

    @cached_property
    def rival_plans(self) -> list[dict[str, Any]]:
        return list(self._read("rival_plans.json"))

    def row(self, model: str, kind: str, micro_batch: int, tensor_parallel: int) -> LayerRow | None:
        """The times of one layer at one size; None: not measured."""
        for row in self.layers.get(model, {}).get(kind, []):
            if (row.micro_batch, row.tensor_parallel) == (micro_batch, tensor_parallel):
                return row
        return None

    def layer_times(self, model: str, modules: Mapping[str, str]) -> LayerTimes:
        """The times as the planner reads them. `modules`: names of the modules that are the
        `embedding`, a `block` and the `head`.
        """
        layers = []
        for kind, rows in self.layers[model].items():
            for layer, module in modules.items():
                times = []
                for row in rows:
                    forward, backward, _ = getattr(row, layer)
                    times.append(LayerTime(row.micro_batch, forward, backward, row.tensor_parallel))
                known = whale_kind(kind)
                name = kind if known is None else known.name
                layers.append(Layer((module,), name, tuple(times)))
        return LayerTimes(tuple(layers), "layers.json")

    @cached_property
    def wrong_layers(self) -> dict[tuple[str, str], str]:
        """(model, kind) whose layer times cannot be right -> why: those that are known, and those
        whose rows are another model's, number of blocks included.
        """
        found = dict(WRONG_LAYERS)
        for model, by_kind in self._read("layers.json").items():
            for kind, rows in by_kind.items():
                for other, others in self._read("layers.json").items():
                    if model not in MODELS or other == model or rows != others.get(kind):
                        continue
                    own = MODELS[model].num_blocks
                    if any(row.get("num_layers", own) != own for row in rows):
                        found.setdefault((model, kind), f"all rows repeat those of {other}")
        return found

    def between_hosts(self, a: str, b: str, gpus_a_host: int) -> Link | None:
        """The link between two hosts of these kinds with so many GPUs sending at once, all of them
        together; None: not measured.
        """
        rows = [
            row
            for row in self._network.get("between_hosts", [])
            if (row["from"], row["to"]) == (a, b)
        ]
        own = [row for row in rows if row["gpus_a_host"] == gpus_a_host]
        return _link(own[0]) if own else None

    def inside_host(self, kind: str, num_gpus: int) -> Link | None:
        """The link between GPUs of one host."""
        rows = [row for row in self._network.get("inside_a_host", []) if row["kind"] == kind]
        own = [row for row in rows if row["gpus"] == num_gpus]
        return _link(own[0]) if own else None

    @property
    def _network(self) -> dict[str, Any]:
        """Curves of links; none where the folder has no file of them."""
        return dict(self._read("network.json")) if self._has("network.json") else {}

    def _has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def _read(self, name: str) -> Any:
        path = self.folder / name
        if name not in self._files:
            if not path.exists():
                raise SystemExit(f"{path} is not there. Try: --measurements with its folder")
            self._files[name] = json.loads(path.read_text())
        return self._files[name]

    @cached_property
    def _files(self) -> dict[str, Any]:
        return {}


def whale_kind(name: str) -> DeviceKind | None:
    """The kind of Whale's table that the folder calls so; None: the table has none.

    The folder writes gigabytes behind a name (`V100-16`), the table only where there are several.
    """
    short, _, gigabytes = name.rpartition("-")
    for known in (KINDS.get(name, name), f"{name}GB", short):
        try:
            kind = device_kind(known)
        except ValueError:
            continue
        if known != short or gigabytes == str(kind.memory_bytes // GIGA):
            return kind
    return None


def is_known_model(name: str) -> bool:
    return name in MODELS


def _link(row: Mapping[str, Any]) -> Link:
    """Points of the measured polynomial: GB/s over log2 of the megabytes, at most the maximum."""
    a, b, c = row["gb_per_s_poly"]
    largest = row["gb_per_s_max"]
    points = []
    for size in CURVE_MB:
        x = math.log2(size)
        rate = min(max(a * x * x + b * x + c, c / 100), largest)
        points.append((size * 1e6, rate * GIGA))
    return Link(largest * GIGA, LATENCY_S, tuple(points))
