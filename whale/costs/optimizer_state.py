"""How much memory the user's own optimizer needs for its state: it is made, and makes one step,
without the user's weights.

First for parameters without data (`meta`). Optimizers that look at values cannot do that; they get
small parameters instead, each dim of a length that no other dim has, so that the shape of a state
tells which dims of its parameter it has:

    parameter [960, 1024, 21248] -> [2, 3, 5]         state [2, 3, 1] -> [960, 1024, 1]          (1)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from whale.capture.graph import CapturedGraph, StateTensor

MakeOptimizer = Callable[[Iterator[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]

LENGTHS = (2, 3, 5, 7, 11, 13, 17, 19)
"""of the dims of a small parameter"""


def state_ratio(captured: CapturedGraph, make: MakeOptimizer) -> float | None:
    """Bytes of optimizer state for each byte of trainable parameters; None where the optimizer runs
    in neither way.
    """
    trained = [
        state for state in captured.state.values() if state.kind == "parameter" and state.trainable
    ]
    total = sum(state.num_bytes for state in trained)
    if not total:
        return 0.0
    for device in ("meta", "cpu"):
        try:
            return _state_bytes(trained, make, device) / total
        except Exception:
            # whatever it does with values: only its size is asked for, and planning continues
            # without
            continue
    return None


def _state_bytes(trained: Sequence[StateTensor], make: MakeOptimizer, device: str) -> int:
    """Bytes of state for parameters on `meta` with the real shapes, elsewhere with small ones and
    line (1).
    """
    parameters = []
    for state in trained:
        shape = (
            state.shape
            if device == "meta"
            else tuple(length for _, length in zip(state.shape, LENGTHS, strict=False))
        )
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=state.dtype, device=device))
        parameter.grad = torch.ones_like(parameter)
        parameters.append(parameter)
    optimizer = make(
        iter(
            [(state.name, parameter) for state, parameter in zip(trained, parameters, strict=True)]
        )
    )
    optimizer.step()
    held = 0
    for state, parameter in zip(trained, parameters, strict=True):
        sizes = dict(zip(parameter.shape, state.shape, strict=True))
        held += sum(
            _num_bytes(value, sizes) for value in optimizer.state.get(parameter, {}).values()
        )
    return held


def _num_bytes(value: Any, sizes: dict[int, int]) -> int:
    """Scalars (the step count) are no memory worth counting. `sizes`: length of a dim -> its real
    length.
    """
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return 0
    return math.prod(sizes.get(size, size) for size in value.shape) * value.element_size()
