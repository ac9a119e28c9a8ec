"""How much memory the user's own optimizer needs: it is made for parameters without data, and makes one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from whale.capture.graph import CapturedGraph


def state_ratio(captured: CapturedGraph, make: Callable[[Iterator[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]) -> float | None:
    """Bytes of optimizer state for each byte of trainable parameters; None where the optimizer cannot run without data."""
    shapes = [state for state in captured.state.values() if state.kind == "parameter" and state.trainable]
    parameters = [
        (state.name, torch.nn.Parameter(torch.empty(state.shape, dtype=state.dtype, device="meta"))) for state in shapes
    ]
    total = sum(state.num_bytes for state in shapes)
    if not total:
        return 0.0
    try:
        optimizer = make(iter(parameters))
        for _, parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        held = sum(_num_bytes(value) for state in optimizer.state.values() for value in state.values())
    except Exception:  # whatever it does with values: it is asked for its size only, and planning goes on without
        return None
    return held / total


def _num_bytes(value: Any) -> int:
    """Scalars (the step count) are no memory worth counting."""
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) and value.dim() > 0 else 0
