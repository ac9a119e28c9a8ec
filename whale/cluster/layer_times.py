"""Measured times of parts of a model: a file beside the cluster file, which `whale profile --model`
writes and which may hold times from elsewhere.

    source: whale profile --model train.py
    layers:
      - modules: [transformer.h.*]        # each module of these names is one such layer
        kind: A100-40GB
        operations: 5d0c21a97f3e          # may be left out; else only a layer that runs the same
        times:                            # samples, shard width, ms of its forward, of its backward
          - [1, 1, 2.31, 5.91]
          - [2, 1, 4.17, 11.6]

Between two measured numbers of samples, and beyond them, times are on the straight line through the
two nearest; one point alone gives times in proportion to the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from whale.cluster.file_numbers import NotNegative, Positive, Size
from whale.units import MILLISECONDS

SUFFIX = ".layers.yaml"
"""`cluster.yaml` has its layers in `cluster.layers.yaml`"""


@dataclass(frozen=True)
class LayerTime:
    """One measured point."""

    samples: int
    forward_s: float
    backward_s: float
    width: int = 1
    """devices over which the layer was sharded; what they say to each other is in the times"""


@dataclass(frozen=True)
class Layer:
    """A part of a model on one kind of device."""

    modules: tuple[str, ...]
    """names of modules, or patterns of them (`h.*`, a star within one part of the name)"""
    kind: str
    times: tuple[LayerTime, ...]
    operations: str = ""
    """what it runs, as `signature` in `costs/layer_times.py` gives it; empty: not compared"""

    @property
    def widths(self) -> frozenset[int]:
        """Numbers of devices over which it was measured."""
        return frozenset(time.width for time in self.times)

    def seconds(self, samples: float, width: int = 1) -> tuple[float, float]:
        """Seconds of forward and backward for so many samples; a ValueError where that width was
        not measured.
        """
        points = sorted((time for time in self.times if time.width == width), key=_samples)
        if not points:
            known = sorted({time.width for time in self.times})
            raise ValueError(
                f"layer {', '.join(self.modules)} on {self.kind}: no times of shard width {width}, "
                f"only of {', '.join(map(str, known))}"
            )
        forward = _rising([(point.samples, point.forward_s) for point in points])
        backward = _rising([(point.samples, point.backward_s) for point in points])
        return _line(forward, samples), _line(backward, samples)


@dataclass(frozen=True)
class LayerTimes:
    """All measured parts of a model."""

    layers: tuple[Layer, ...]
    source: str = ""

    def of_kind(self, kind: str) -> list[Layer]:
        """Layers measured on this kind of device; upper and lower case are the same."""
        return [layer for layer in self.layers if layer.kind.lower() == kind.lower()]


def _samples(time: LayerTime) -> int:
    return time.samples


def _rising(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Points of which none is below one before it: more samples that were measured faster than
    fewer met a better moment.
    """
    found: list[tuple[int, float]] = []
    for samples, seconds in points:
        found.append((samples, max(seconds, found[-1][1] if found else 0.0)))
    return found


def _line(points: Sequence[tuple[int, float]], samples: float) -> float:
    """Value at `samples` of the straight line through the two nearest points."""
    if len(points) == 1:
        return points[0][1] * samples / points[0][0]
    place = next((i for i, (size, _) in enumerate(points) if samples <= size), len(points) - 1)
    a, first = points[max(0, place - 1)]
    b, second = points[max(1, place)]
    # fewer samples than were measured never take less than in proportion to them
    return max(first + (second - first) * (samples - a) / (b - a), first * min(1.0, samples / a))


# ---- the file


class _Layer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    modules: Annotated[list[str], Field(min_length=1)]
    kind: str
    operations: str = ""
    times: Annotated[list[tuple[Size, Size, Positive, NotNegative]], Field(min_length=1)]


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")
    source: str = ""
    layers: list[_Layer]


def beside(cluster_file: str | Path) -> Path:
    """Where the layer times of a cluster file are."""
    return Path(cluster_file).with_suffix(SUFFIX)


def load_layer_times(path: str | Path) -> LayerTimes:
    """The times of a file; a ValueError names the file, the place in it and what is wrong."""
    try:
        content = yaml.safe_load(Path(path).read_text())
        file = _File.model_validate(content)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"layer times {path}: cannot be read: {error}") from None
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"])) or "the file"
        raise ValueError(
            f"layer times {path}: {where}: {problem['msg'][0].lower()}{problem['msg'][1:]}. A "
            "layer has modules, kind and times: [samples, width, forward ms, backward ms]"
        ) from None
    layers = []
    for each in file.layers:
        times = tuple(
            LayerTime(samples, forward / MILLISECONDS, backward / MILLISECONDS, width)
            for samples, width, forward, backward in each.times
        )
        layers.append(Layer(tuple(each.modules), each.kind, times, each.operations))
    return LayerTimes(tuple(layers), file.source)


def save_layer_times(times: LayerTimes, path: str | Path) -> None:
    """Writes a file that `load_layer_times` reads."""
    layers = []
    for layer in times.layers:
        entry: dict[str, Any] = {"modules": list(layer.modules), "kind": layer.kind}
        if layer.operations:
            entry["operations"] = layer.operations
        entry["times"] = [
            [
                time.samples,
                time.width,
                float(f"{time.forward_s * MILLISECONDS:.6g}"),
                float(f"{time.backward_s * MILLISECONDS:.6g}"),
            ]
            for time in layer.times
        ]
        layers.append(entry)
    content = {"source": times.source, "layers": layers}
    Path(path).write_text(yaml.safe_dump(content, sort_keys=False, default_flow_style=None))
