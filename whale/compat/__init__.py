"""Every private torch name that Whale uses, in one place, with the public thing that would replace
it. What Whale changes in torch while a model is exported is in `exporting.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._sympy.numbers
from torch.autograd.graph import GradientEdge, _engine_run_backward
from torch.optim import optimizer as torch_optimizer

# torch.utils.pytree is not public yet; `torch.utils._pytree` is what torch.export itself takes
# apart its arguments with.
from torch.utils import _pytree as pytree
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "ONLY_LOOKS",
    "AdaptiveOutput",
    "Operation",
    "OperationCounter",
    "OperationPacket",
    "StopRecomputation",
    "abort_process_groups",
    "active_modes",
    "at_numbers",
    "backward_hooks_of_all_modules",
    "backward_hooks_of_module",
    "causal_mask_detection",
    "conversion_of_modules",
    "endless",
    "enter_autocast",
    "exit_autocast",
    "fake_mode",
    "foreach_mul_",
    "foreach_mul_in_float32_",
    "foreach_norm",
    "fused_step",
    "has_fused_step",
    "has_step_hooks",
    "hooks_of_tensor",
    "is_fake",
    "is_function_transform",
    "is_wrapped_by_transform",
    "neg_view",
    "num_writes",
    "patched",
    "patched_item",
    "pytree",
    "run_backward",
    "schema",
    "size_functions",
    "stored_alike",
    "symbolic_number",
    "tensor_stores",
    "unsaved_buffers",
    "without_modes",
    "without_tracing",
]


def fake_mode() -> Any:
    """A mode under which tensors have shapes and no data. A public `torch.FakeTensorMode` would
    replace it.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def is_fake(value: Any) -> bool:
    """Whether a tensor has a shape and no data. A public `torch.is_fake` would replace it."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


def is_function_transform(node: torch.fx.Node) -> bool:
    """Whether a node is what `torch.func.vmap` leaves in a graph, or gives a value of
    `torch.func.grad` that has no memory of its own. A public list would do.
    """
    if getattr(node.target, "__module__", "") == "torch._functorch.predispatch":
        return True
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and is_wrapped_by_transform(value)


def is_wrapped_by_transform(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one that `torch.func.grad` computes with. Nothing public says it."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def schema(target: Any) -> torch.FunctionSchema:
    """What an operation takes, writes and returns. Torch has no public way from an operation to its
    schema.
    """
    return target._schema


Operation = torch._ops.OpOverload
OperationPacket = torch._ops.OpOverloadPacket
"""the types of `torch.ops.aten.add.Tensor` and `torch.ops.aten.add`; torch has no public name for
them
"""

endless = torch.utils._sympy.numbers.int_oo
"""the upper bound of a size without one"""

neg_view = torch._neg_view
"""a view that reads as the negative, which torch makes of `x.conj().imag`"""


def active_modes() -> list[Any]:
    """Modes that see every call of torch in this thread. Torch has no public way to list them."""
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]


@lru_cache(maxsize=1)
def size_functions() -> dict[str, Any]:
    """Functions that sizes are made of, by name: those of sympy, and torch's private ones."""
    import sympy
    from torch.utils._sympy import functions

    names = "Add Mul Pow Equality Unequality StrictLessThan LessThan StrictGreaterThan GreaterThan"
    found = {name: getattr(sympy, name) for name in [*names.split(), "And", "Or", "Not"]}
    for name, value in vars(functions).items():
        if isinstance(value, type) and issubclass(value, sympy.Basic):
            if value.__module__ == functions.__name__:
                found[name] = value
    return found


def symbolic_number(environment: Any, expression: Any, kind: str) -> Any:
    """A size of a fake tensor (`int`), or what is computed from sizes (`float`, `bool`)."""
    if kind == "bool":
        return environment.create_symboolnode(expression)
    if kind == "float":
        return environment.create_symfloatnode(expression, hint=None)
    return environment.create_symintnode(expression, hint=None)


# Functions that fx graphs can call around a run of nodes; torch.autocast as a context manager
# cannot stand in a graph.
enter_autocast = torch.amp.autocast_mode._enter_autocast
exit_autocast = torch.amp.autocast_mode._exit_autocast


def at_numbers(size: torch.SymInt, number_of: Callable[[str], int]) -> int:
    """A symbolic size with a number for each of its symbols. Public expressions of sizes would
    replace `size.node.expr`.
    """
    expression = size.node.expr
    return int(expression.subs({each: number_of(each.name) for each in expression.free_symbols}))


def tensor_stores(
    module: torch.nn.Module,
) -> tuple[dict[str, torch.Tensor | None], dict[str, torch.Tensor | None]]:
    """The module's own parameters and buffers as dicts that can be written to. `setattr` checks
    types and would refuse fakes.
    """
    return module._parameters, module._buffers  # type: ignore[return-value]


def hook_stores(module: torch.nn.Module) -> list[dict[int, object]]:
    """The module's hooks of all kinds, as dicts from which they can be taken. Public are only the
    handles, which whoever registers a hook is given.
    """
    named = vars(module).items()
    return [store for name, store in named if "_hooks" in name and isinstance(store, dict)]


def unsaved_buffers(module: torch.nn.Module) -> frozenset[str]:
    """Names of the module's own buffers that its state dict leaves out. A public
    `named_buffers(persistent=False)` would replace it.
    """
    return frozenset(module._non_persistent_buffers_set)


def run_backward(
    roots: Sequence[torch.Tensor | GradientEdge], gradients: Sequence[torch.Tensor]
) -> None:
    """`torch.autograd.backward` for gradients that are known to fit: it compares shapes as symbols,
    which takes as long as a small layer.

    A switch of `torch.autograd.backward` to leave its checks out would replace it.
    """
    _engine_run_backward(
        tuple(roots),
        tuple(gradients),
        False,
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


causal_mask_detection = torch.nn.modules.transformer._detect_is_causal_mask
"""reads the values of a mask; an argument of `nn.TransformerEncoder` to leave that out would
replace it (`is_causal` exists in its forward only)
"""


AdaptiveOutput = torch.nn.modules.adaptive._ASMoutput
"""what `nn.AdaptiveLogSoftmaxWithLoss` gives; a public name for it would replace this one"""


conversion_of_modules = torch.nn.Module._apply
"""what `.to`, `.float` and others of a module all call; a public one would replace it"""


def without_modes() -> Any:
    """Inside, tensors are real, also while a model is exported. `torch.export` has no public way to
    compute beside the graph.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def without_tracing() -> Any:
    """Inside, operations on fake tensors leave no nodes in the graph that is being exported."""
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    return disable_proxy_modes_tracing()


def stored_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors, real or fake, lie in the same memory."""
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


# Torch has no public way to list hooks.


def hooks_of_tensor(tensor: torch.Tensor) -> list[Any]:
    before_accumulation = getattr(tensor, "_backward_hooks", None) or {}
    after_accumulation = getattr(tensor, "_post_accumulate_grad_hooks", None) or {}
    return [*before_accumulation.values(), *after_accumulation.values()]


def backward_hooks_of_module(module: torch.nn.Module) -> list[Any]:
    return [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]


def backward_hooks_of_all_modules() -> list[Any]:
    module = torch.nn.modules.module
    return [
        *module._global_backward_hooks.values(),
        *module._global_backward_pre_hooks.values(),
    ]


def has_step_hooks(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether something runs before or after each `step()` and may tell how often that is called.
    Hooks can be added in public, not asked for.
    """
    hooks = [
        *torch_optimizer._global_optimizer_pre_hooks.values(),
        *torch_optimizer._global_optimizer_post_hooks.values(),
    ]
    for place in ("pre", "post"):
        hooks += getattr(optimizer, f"_optimizer_step_{place}_hooks", {}).values()
    return not all(hasattr(hook, ONLY_LOOKS) for hook in hooks)


ONLY_LOOKS = "whale_only_looks"
"""attribute of hooks of Whale's that change nothing, however often they run"""


def num_writes(tensor: torch.Tensor) -> int:
    """How often a tensor was written to in place. In public autograd only says so in its errors."""
    return int(tensor._version)


def abort_process_groups() -> None:
    """Gives up all communicators of this process without waiting for what is under way. The public
    `ProcessGroup.abort` does one, and torch has to forget them, too.
    """
    dist.distributed_c10d._abort_process_group()


def has_fused_step(optimizer: torch.optim.Optimizer, device_type: str) -> bool:
    """Whether torch has a fused kernel of this optimizer for all its parameters on that kind of
    device. A public question of `torch.optim` would replace it.
    """
    if device_type not in _get_fused_kernels_supported_devices():
        return False
    for group in optimizer.param_groups:
        if any(not parameter.is_floating_point() for parameter in group["params"]):
            return False
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


@contextlib.contextmanager
def fused_step(optimizer: torch.optim.Optimizer, found_inf: torch.Tensor) -> Iterator[None]:
    """`optimizer.step()` inside runs as a fused kernel, which changes nothing where `found_inf`, a
    bool on the device, is true. So does `torch.amp.GradScaler`, whose name for it is not public.
    """
    before = [group.get("fused") for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["fused"] = True
    with torch._C.DisableTorchFunction():  # kernels want float32, also under a mode that widens
        optimizer.found_inf = found_inf.float()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]
        for group, value in zip(optimizer.param_groups, before, strict=True):
            group["fused"] = value


# Operations on lists of tensors, one launch for all; torch.optim is built on them.
foreach_norm = torch._foreach_norm
foreach_mul_ = torch._foreach_mul_


def foreach_mul_in_float32_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiplies tensors of one dtype, 16 bits say, by a number of the device: products are float32
    and rounded once. This is the kernel by which torch.amp's GradScaler unscales gradients.
    """
    with torch._C.DisableTorchFunction():  # it wants float32, also under a mode that widens
        factor = factor.float()
        # 1 where a gradient is not finite; who needs it has looked at the norms before
        found_inf = torch.zeros_like(factor)
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, factor)


StopRecomputation: type[BaseException] = torch.utils.checkpoint._StopRecomputationError
"""ends a recomputation when all that was saved is there; a public thing would tell a context of
`context_fn` that it ended well
"""


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, attribute `name` of a module or class is `value`."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def patched_item(items: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    """Inside, the item `name` of a dict, the names of a module say, is `value`."""
    had = name in items
    original = items.get(name)
    items[name] = value
    try:
        yield
    finally:
        if had:
            items[name] = original
        else:
            del items[name]


class OperationCounter(TorchDispatchMode):
    """Counts the operations that run under it and the bytes that they read and write; numbers in
    tensors do not count. A public hook below autograd would replace the private module.
    """

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.moved_bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*args, *(kwargs or {}).values()]
        result = func(*args, **(kwargs or {}))
        written = [
            bool(each.alias_info and each.alias_info.is_write) for each in func._schema.arguments
        ]
        moved = 0.0
        for value, is_written in zip(given, [*written, *([False] * len(given))]):
            moved += _tensor_bytes(value) * (2 if is_written else 1)
        if not any(written):
            moved += _tensor_bytes(result)
        if moved:
            self.number += 1
            self.moved_bytes += moved
        return result


def _tensor_bytes(value: Any) -> int:
    """Bytes of a tensor, or of all in a list; one that holds a single number counts nothing."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size() if value.numel() > 1 else 0
    if isinstance(value, (list, tuple)):
        return sum(map(_tensor_bytes, value))
    return 0
