"""Registration of the test device with torch: `install()` once in a process, before its first tensor."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.device import kernels, streams
from tests.device.draws import random_state
from tests.device.kernels import SPECIAL
from tests.device.memory import NAME, forget_peak, record_stream, used_memory
from tests.device.settings import settings

aten = torch.ops.aten
LOWERED = """
linear matmul mm addmm bmm baddbmm conv1d conv2d conv3d scaled_dot_product_attention
"""
"""operations that autocast runs in the lower precision, those that matter"""
IN_FLOAT32 = """
layer_norm softmax.int log_softmax.int cross_entropy_loss nll_loss mse_loss pow.Tensor_Scalar sum
exp log
"""


class DeviceModule:
    """What `torch.cuda` is to CUDA: `torch.testgpu`."""

    Stream = streams.Stream
    Event = streams.Event
    _initialized = True  # torch.utils.checkpoint asks before it keeps random states

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def is_bf16_supported(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: object) -> None:
        pass

    def device(self, device: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def synchronize(self, device: object = None) -> None:
        streams.synchronize()

    def current_stream(self, device: object = None) -> streams.Stream:
        return streams.current_stream()

    def stream(self, stream: streams.Stream | None) -> contextlib.AbstractContextManager[None]:
        return streams.on_stream(stream)

    def manual_seed_all(self, seed: int) -> None:
        random_state.seed = seed
        random_state.offset = 0

    manual_seed = manual_seed_all

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        numbers = torch.tensor([random_state.seed, random_state.offset], dtype=torch.int64)
        return numbers.view(torch.uint8).clone()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        random_state.seed, random_state.offset = state.clone().view(torch.int64).tolist()

    def memory_allocated(self, device: object = None) -> int:
        return used_memory().now_bytes

    memory_reserved = memory_allocated

    def max_memory_allocated(self, device: object = None) -> int:
        return used_memory().peak_bytes

    def reset_peak_memory_stats(self, device: object = None) -> None:
        forget_peak()

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        free = settings.memory_bytes - settings.occupied_bytes - used_memory().now_bytes
        return free, settings.memory_bytes

    def empty_cache(self) -> None:
        pass

    def get_device_properties(self, device: object = None) -> SimpleNamespace:
        return SimpleNamespace(
            name="Test GPU",
            total_memory=settings.memory_bytes,
            major=8,
            minor=0,
            multi_processor_count=settings.num_multiprocessors,
        )

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def _autocast_kernel(op: Any, dtype: torch.dtype | None) -> Any:
    """`op` with its floating-point arguments cast; `dtype` None: to that of the autocast region."""
    excluded = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    floats = (torch.float32, torch.bfloat16, torch.float16)

    def run(*args: Any, **kwargs: Any) -> Any:
        wanted = dtype or torch.get_autocast_dtype(NAME)

        def cast(leaf: Any) -> Any:
            is_ours = isinstance(leaf, torch.Tensor) and leaf.device.type == NAME
            return leaf.to(wanted) if is_ours and leaf.dtype in floats else leaf

        with torch._C._ExcludeDispatchKeyGuard(excluded):
            args, kwargs = pytree.tree_map(cast, (args, kwargs))
            return op(*args, **kwargs)

    return run


def _register_autocast(library: Any) -> None:
    """The lists of CUDA's autocast that matter for our models."""
    for name in (LOWERED + IN_FLOAT32).split():
        base, _, overload = name.partition(".")
        op = getattr(getattr(aten, base), overload or "default")
        dtype = torch.float32 if name in IN_FLOAT32.split() else None
        library.impl(op, _autocast_kernel(op, dtype), "AutocastPrivateUse1")


def _patch_tensors() -> None:
    """Hooks that cannot be written in Python; a note of the storage stands for pinned memory."""
    real_empty = torch.empty

    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        made = real_empty(*args, **kwargs)
        if pin_memory:
            storage = made.untyped_storage()
            kernels.pinned_storages[storage._cdata] = storage
        return made

    def pin_memory(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
        pinned = empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor)

    torch.empty = empty
    torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign, assignment]
    torch.Tensor.is_pinned = kernels.is_pinned  # type: ignore[method-assign, assignment]
    # torch's own parser takes only streams that are made in C++
    torch.Tensor.record_stream = record_stream  # type: ignore[method-assign, assignment]


_libraries: list[Any] = []


def install() -> None:
    """Makes device `testgpu` known to torch in this process."""
    if _libraries:
        return
    _setup_privateuseone_for_python_backend(NAME, DeviceModule())
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(kernels.run, "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    own = torch.library.Library("aten", "IMPL")
    for op, function in SPECIAL.items():
        own.impl(op, function, "PrivateUse1")
    for key in ("Conjugate", "Negative"):
        # copies read such views themselves; torch would make a copy of the view first, for ever
        for op in (aten._copy_from.default, aten._copy_from_and_resize.default):
            own.impl(op, torch.library.fallthrough_kernel, key)
    _register_autocast(own)
    _libraries.extend([everything, own])
    _patch_tensors()
    os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    # torch makes its thread pool anew after a fork; two streams that ask first would both make it
    torch.set_num_threads(1)
    streams.restart_after_fork()
