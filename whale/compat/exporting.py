"""What Whale changes in torch while a model is exported: every node keeps the lines of the user's
code, and no time is spent on what Whale does not read. Everything is taken back at the end.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from types import FrameType
from typing import Any

import torch

from whale.compat import patched

TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep


@contextlib.contextmanager
def export_patches(on_node: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Everything that Whale changes in torch around one `torch.export`, taken back at exit: lines
    of the user's code for every node, and no time for what Whale does not read. `on_node` is called
    for each of them.
    """
    with (
        patched(_UserFrames, "on_node", staticmethod(on_node)),
        _all_user_frames(),
        _without_unused_work(),
        _attention_by_form(),
        _recurrent_by_form(),
    ):
        yield


@contextlib.contextmanager
def _all_user_frames() -> Iterator[None]:
    """Nodes traced inside keep every frame of the user's code in `stack_trace`; torch keeps
    functions called `forward` only. An option of `torch.export` for full stack traces would replace
    it.
    """
    import torch.fx.proxy as proxy

    every_frame = patched(
        proxy.TracerBase, "_filter_traceback_frames", lambda self, summary: summary
    )
    with every_frame, patched(proxy, "CapturedTraceback", _UserFrames):
        yield


class _UserFrames:
    """The stack from the outermost `forward` inwards, without frames of torch. Torch would look up
    the source of all its own frames first, which takes a tenth of the time of an export."""

    DISPATCH = ("__torch_function__", "__torch_dispatch__")
    on_node: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, frames: list[tuple[str, int, str]]) -> None:
        self.frames = frames
        """(file, line, function), outermost first"""

    @staticmethod
    def extract() -> _UserFrames:
        _UserFrames.on_node()
        stack: list[tuple[str, int, str]] = []  # innermost first
        num_inside = 0
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            stack.append((code.co_filename, frame.f_lineno, code.co_name))
            if code.co_name == "forward":
                num_inside = len(stack)
            frame = frame.f_back
        frames = []
        for file, line, name in reversed(stack[:num_inside]):
            of_torch = name in _UserFrames.DISPATCH or file.startswith(TORCH_FOLDER)
            if name == "forward" or not of_torch:
                frames.append((file, line, name))
        return _UserFrames(frames)

    def summary(self) -> _UserFrames:
        return self

    def format(self) -> list[str]:
        """What torch joins to a node's `stack_trace`."""
        return [_frame_text(*frame) for frame in self.frames]


@lru_cache(maxsize=65536)  # a model calls the same lines in every layer
def _frame_text(file: str, line: int, name: str) -> str:
    return traceback.StackSummary.from_list(
        [traceback.FrameSummary(file, line, name, lookup_line=False)]
    ).format()[0]


@contextlib.contextmanager
def _without_unused_work() -> Iterator[None]:
    """Inside, `torch.export` leaves out what Whale does not read: 13 % of its calls of Python
    functions for a GPT.

    - Code of graph modules is written when they are called, which these never are (torch.fx has a
      lazy graph module; export makes others).
    - `node.meta["tensor_meta"]`: strides and memory formats in symbols; `node.meta["val"]` holds
      the same.
    An option of `torch.export` for the bare graph would replace it.
    """
    import torch.fx.experimental.proxy_tensor as proxy_tensor

    original = torch.fx.GraphModule.recompile

    def recompile(self: torch.fx.GraphModule) -> None:
        def forward(called: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            original(called)  # puts its own forward in the place of this one
            return type(called).forward(called, *args, **kwargs)

        type(self).forward = forward  # every graph module has a class of its own

    no_metadata = patched(proxy_tensor, "_extract_tensor_metadata", lambda *args, **kwargs: None)
    with no_metadata, patched(torch.fx.GraphModule, "recompile", recompile):
        yield


@contextlib.contextmanager
def _attention_by_form() -> Iterator[None]:
    """Inside, the shape of an attention's result is found once for each form of its arguments.

    To know that shape torch runs the whole formula on fake tensors, 20 operations for each layer.
    Where the first run showed that the result has the form of the query, a copy of the query stands
    for it from then on. A shape function of the operation would replace it.
    """
    operation = torch.ops.aten.scaled_dot_product_attention.default
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    like_query: dict[Any, bool] = {}

    def attention(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        forms = tuple(_form(value) for value in (query, *args, *sorted(kwargs.items())))
        if like_query.get(forms):
            return query.clone(memory_format=torch.contiguous_format)
        result: torch.Tensor = operation._op_dk(key, query, *args, **kwargs)
        like_query[forms] = _form(result) == _form(
            query.clone(memory_format=torch.contiguous_format)
        )
        return result

    if key in operation.py_kernels:  # torch has got a rule of its own
        yield
        return
    operation.py_impl(key)(attention)
    try:
        yield
    finally:
        del operation.py_kernels[key]
        operation._dispatch_cache.clear()


@contextlib.contextmanager
def _recurrent_by_form() -> Iterator[None]:
    """Inside, the shapes of what recurrent layers give are known without running them.

    Torch runs the formula of every time step on fake tensors to know them: 20 s for a GRU of 2
    layers and 128 steps. Shape functions of these operations would replace it.
    """
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    kernels: list[tuple[Any, Any]] = []
    for name in ("gru", "rnn_tanh", "rnn_relu", "lstm"):
        operation = getattr(torch.ops.aten, name).input
        kernels.append((operation, operation.py_kernels.get(key)))
        operation.py_kernels[key] = _lstm_form if name == "lstm" else _gru_form
        operation._dispatch_cache.clear()
    try:
        yield
    finally:
        for operation, kernel in kernels:
            del operation.py_kernels[key]
            if kernel is not None:
                operation.py_kernels[key] = kernel
            operation._dispatch_cache.clear()


def _gru_form(
    x: torch.Tensor,
    state: torch.Tensor,
    weights: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors like the outputs of all steps and the last state: (..., width of the state)."""
    width = state.shape[-1] * (2 if bidirectional else 1)
    return x.new_empty((*x.shape[:-1], width)), torch.empty_like(state)


def _lstm_form(
    x: torch.Tensor, states: Sequence[torch.Tensor], *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same for two states; that of the outputs may be a projection of the other."""
    out, last = _gru_form(x, states[0], *rest)
    return out, last, torch.empty_like(states[1])


def _form(value: Any) -> Any:
    """What the shape of a result may depend on."""
    if isinstance(value, torch.Tensor):
        sizes = (*value.shape, *value.stride())
        numbers = tuple(size if isinstance(size, int) else size.node.expr for size in sizes)
        return (numbers, value.dtype, value.device, value.requires_grad)
    return tuple(map(_form, value)) if isinstance(value, tuple) else value
