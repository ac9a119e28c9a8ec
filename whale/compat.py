"""Every private torch name that Whale uses, in one place, with the public thing that would replace it."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward

# torch.utils.pytree is not public yet; `torch.utils._pytree` is what torch.export itself takes apart its arguments with.
from torch.utils import _pytree as pytree

__all__ = [
    "all_user_frames",
    "backward_hooks_of_all_modules",
    "backward_hooks_of_module",
    "enter_autocast",
    "exit_autocast",
    "fake_mode",
    "hooks_of_tensor",
    "is_fake",
    "pytree",
    "run_backward",
    "schema",
    "tensor_stores",
]


def fake_mode() -> Any:
    """A mode under which tensors have shapes and no data. A public `torch.FakeTensorMode` would replace it."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def is_fake(value: Any) -> bool:
    """Whether a tensor has a shape and no data. A public `torch.is_fake` would replace it."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


def schema(target: Any) -> torch.FunctionSchema:
    """What an operation takes, writes and returns. Torch has no public way from an operation to its schema."""
    return target._schema


# Functions that fx graphs can call around a run of nodes; torch.autocast as a context manager cannot stand in a graph.
enter_autocast = torch.amp.autocast_mode._enter_autocast
exit_autocast = torch.amp.autocast_mode._exit_autocast


def tensor_stores(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor | None], dict[str, torch.Tensor | None]]:
    """The module's own parameters and buffers as dicts that can be written to. `setattr` checks types and would refuse fakes."""
    return module._parameters, module._buffers  # type: ignore[return-value]


def run_backward(roots: Sequence[torch.Tensor | GradientEdge], gradients: Sequence[torch.Tensor]) -> None:
    """`torch.autograd.backward` for gradients that are known to fit: it compares shapes as symbols, which takes as long as a small layer.

    A switch of `torch.autograd.backward` to leave its checks out would replace it.
    """
    _engine_run_backward(tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


# Torch has no public way to list hooks.


def hooks_of_tensor(tensor: torch.Tensor) -> list[Any]:
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return [hook for kind in kinds for hook in (getattr(tensor, kind, None) or {}).values()]


def backward_hooks_of_module(module: torch.nn.Module) -> list[Any]:
    return [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]


def backward_hooks_of_all_modules() -> list[Any]:
    kinds = ("_global_backward_hooks", "_global_backward_pre_hooks")
    return [hook for kind in kinds for hook in getattr(torch.nn.modules.module, kind).values()]


_TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep


@contextlib.contextmanager
def all_user_frames() -> Iterator[None]:
    """Nodes traced inside keep every frame of the user's code in `stack_trace`; torch keeps functions called `forward` only.

    An option of `torch.export` for full stack traces would replace it.
    """
    import torch.fx.proxy as proxy

    original_filter, original_traceback = proxy.TracerBase._filter_traceback_frames, proxy.CapturedTraceback
    proxy.TracerBase._filter_traceback_frames = lambda self, summary: summary  # type: ignore[method-assign, assignment]
    proxy.CapturedTraceback = _UserFrames  # type: ignore[assignment, misc, attr-defined]
    try:
        yield
    finally:
        proxy.TracerBase._filter_traceback_frames = original_filter  # type: ignore[method-assign]
        proxy.CapturedTraceback = original_traceback  # type: ignore[misc, attr-defined]


class _UserFrames:
    """The stack from the outermost `forward` inwards, without frames of torch. Torch would look up the source of all its own frames first,
    which takes a tenth of the time of an export."""

    DISPATCH = ("__torch_function__", "__torch_dispatch__")

    def __init__(self, frames: list[traceback.FrameSummary]) -> None:
        self.frames = frames

    @staticmethod
    def extract() -> _UserFrames:
        stack: list[tuple[str, int, str]] = []  # innermost first
        num_inside = 0
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            stack.append((code.co_filename, frame.f_lineno, code.co_name))
            if code.co_name == "forward":
                num_inside = len(stack)
            frame = frame.f_back
        own = [
            traceback.FrameSummary(file, line, name, lookup_line=False)
            for file, line, name in reversed(stack[:num_inside])
            if name == "forward" or not (file.startswith(_TORCH_FOLDER) or name in _UserFrames.DISPATCH)
        ]
        return _UserFrames(own)

    def summary(self) -> traceback.StackSummary:
        return traceback.StackSummary.from_list(self.frames)
