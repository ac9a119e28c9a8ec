"""Parts of tensors in checkpoints: a rank's shard as boxes of the whole tensor, and back. So any
grid loads what any other saved.

A shard that is cut in a fused dim is several boxes (one in each segment); each is a piece of its
own in the rank's file. Optimizer state that has the shape of its parameter is cut like it. A number
of its own (the step) is written by the rank of the first part. Anything else belongs to that very
part of the parameter (the row means of Adafactor): it is kept under a name of its own and fits only
the same cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from whale.checkpoint.boxes import Box, slices
from whale.checkpoint.errors import CheckpointError
from whale.checkpoint.writer import Part
from whale.plans.shards import Shard

Pieces = tuple[dict[str, Tensor], dict[str, Part]]
"""tensors and, for those that are not whole, where they lie; both by the name in the file"""
Read = Callable[[str, Box | None], Tensor]


def pieces(name: str, tensor: Tensor, shard: Shard, shape: Sequence[int]) -> Pieces:
    """A shard as it is written. `shape`: of the whole tensor."""
    if shard.ranges is None:
        return {name: tensor}, {}
    boxes = shard.boxes(shape)
    keys = [name] if len(boxes) == 1 else [f"{name}[{number}]" for number in range(len(boxes))]
    tensors = {key: tensor[slices(own)] for key, (_, own) in zip(keys, boxes, strict=True)}
    return tensors, {
        key: Part(tuple(shape), box, name) for key, (box, _) in zip(keys, boxes, strict=True)
    }


def state_pieces(
    name: str, tensor: Tensor, shard: Shard, shape: Sequence[int], is_first: bool
) -> Pieces:
    """A tensor of the optimizer state of a parameter. `is_first`: this rank writes the first part
    of the parameter.
    """
    if shard.ranges is None or tensor.shape == shard.shape:
        return pieces(name, tensor, shard, shape)
    if not tensor.dim():
        return ({name: tensor}, {}) if is_first else ({}, {})
    return {_own_name(name, shard): tensor}, {}


def read_shard(
    read: Read, name: str, shard: Shard, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """A shard, box by box: `read(name, box)` gives one; None for all."""
    if shard.ranges is None:
        return read(name, None)
    assert shard.shape is not None
    tensor = torch.empty(shard.shape, dtype=dtype)
    for box, own in shard.boxes(shape):
        tensor[slices(own)] = read(name, box)
    return tensor


def read_state(
    read: Read, shapes: Mapping[str, Sequence[int]], name: str, shard: Shard, shape: Sequence[int]
) -> Tensor:
    """A tensor of the optimizer state. `shapes`: of everything in the checkpoint; `shape`: of the
    whole parameter.
    """
    own = _own_name(name, shard)
    if own in shapes:
        return read(own, None)
    if name in shapes and (tuple(shapes[name]) == tuple(shape) and len(shape)):
        return read_shard(read, name, shard, shape, read(name, ((0, 0),) * len(shape)).dtype)
    if name in shapes and (shard.ranges is None or not len(shapes[name])):
        return read(name, None)
    raise CheckpointError(
        f"the optimizer state {name!r} belongs to another part of the parameter than this rank "
        "holds, and cannot be cut anew: "
        "load it with the grid and the number of devices that it was saved with, or start the "
        "optimizer afresh (weights=...)"
    )


def _own_name(name: str, shard: Shard) -> str:
    """Of what belongs to this very part: `optimizer/w/row of [0:4] x [2:6]`."""
    if shard.ranges is None:
        return name
    return f"{name} of " + " x ".join(
        "[" + ", ".join(f"{start}:{stop}" for start, stop in dim) + "]" for dim in shard.ranges
    )
