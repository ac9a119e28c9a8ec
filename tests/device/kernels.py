"""What an operation does on the test device: shapes on the host, values on the stream.

The result's shape comes from the operation's meta kernel, so the host never waits for values. Where
only values tell the shape (nonzero), the host waits, as on a GPU. Values are computed by the CPU
kernel on the stream's thread and copied into the result's block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.device.draws import DRAWN, Arguments, drawing, needs_the_cpu_generator, next_draw
from tests.device.memory import (
    NAME,
    allocate,
    bytes_of,
    is_on_device,
    launch,
    record_stream,
)
from tests.device.streams import counters, host_waits

aten = torch.ops.aten
CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


# ---- facts of an operation, from its schema


@dataclass(frozen=True)
class Facts:
    """What the schema of an operation says."""

    name: str
    arguments: tuple[str, ...]
    tensors: tuple[bool, ...]
    """which of its arguments are one tensor"""
    is_view: bool
    written: tuple[str, ...]
    """names of arguments that it writes"""
    outputs: tuple[str, ...]
    """those of them that only take its results: `out=` and the like"""
    returned: tuple[str, ...]
    """names of written arguments that it returns"""
    is_random: bool


@cache
def facts_of(op: Any) -> Facts:
    arguments = [each for each in op._schema.arguments if each.alias_info is not None]
    written = tuple(each.name for each in arguments if each.alias_info.is_write)
    outputs = tuple(each.name for each in arguments if each.alias_info.is_write and each.kwarg_only)
    aliases = [each.alias_info for each in op._schema.returns]
    is_view = bool(aliases) and all(each is not None and not each.is_write for each in aliases)
    names = {frozenset(each.alias_info.before_set): each.name for each in arguments}
    returned = []
    for alias in aliases:
        if alias is not None and alias.is_write:
            returned.append(names[frozenset(alias.before_set)])
    is_random = torch.Tag.nondeterministic_seeded in op.tags
    declared = op._schema.arguments
    return Facts(
        str(op),
        tuple(each.name for each in declared),
        tuple(str(each.type) == "Tensor" for each in declared),
        is_view,
        written,
        outputs,
        tuple(returned),
        is_random,
    )


# ---- any operation


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operation on tensors of the device; torch calls it for all that have no own function."""
    with torch._C.DisableTorchFunction():  # a mode of the program knows nothing of kernels
        if op in SPECIAL:
            return SPECIAL[op](*args, **kwargs)
        return _run_any(op, *args, **kwargs)


def _run_any(op: Any, *args: Any, **kwargs: Any) -> Any:
    facts = facts_of(op)
    if facts.is_view:
        # only sizes and strides change, the kernel looks at no memory
        return op.redispatch(CPU_KEYS, *args, **kwargs)
    args = _scalars_as_tensors(facts, args)
    leaves = _leaves((args, kwargs))
    _refuse_cpu_tensors(op, leaves)
    if facts.is_random and not facts.written and needs_the_cpu_generator(op):
        return _run_now(op, (args, kwargs), next_draw(list(args)))
    given: dict[str, Any] = {}
    written = []
    if facts.written:
        given = dict(zip(facts.arguments, args, strict=False)) | kwargs
        for name in facts.written:
            written += [leaf for leaf in _leaves(given.get(name)) if is_on_device(leaf)]
    if facts.returned:
        if facts.outputs:
            _launch_into(op, facts, (args, kwargs), written)
        else:
            _launch_on(op, facts, (args, kwargs), written, [])
        found = [given[name] for name in facts.returned]
        return found[0] if len(op._schema.returns) == 1 else tuple(found)
    if not op._schema.returns:
        _launch_on(op, facts, (args, kwargs), written, [])
        return None
    try:
        shapes, structure = _shapes_of_results(op, (args, kwargs))
    except (NotImplementedError, RuntimeError):  # no meta kernel, or the shape depends on values
        return _run_now(op, (args, kwargs))
    results = [_allocate_like(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in shapes]
    _launch_on(op, facts, (args, kwargs), written, results)
    return pytree.tree_unflatten(results, structure)


_known_shapes: dict[Any, tuple[list[Any], pytree.TreeSpec]] = {}
"""what meta kernels gave, by operation and shapes of its arguments: they take longer than we do"""


def _shapes_of_results(op: Any, arguments: Arguments) -> tuple[list[Any], pytree.TreeSpec]:
    """Results without data, flat, and how they belong together."""
    key = (op, _described(arguments[0]), tuple(arguments[1]), _described(arguments[1].values()))
    if key not in _known_shapes:
        _known_shapes[key] = pytree.tree_flatten(_call(op, _mapped(_meta_leaf, arguments)))
    return _known_shapes[key]


def _described(value: Any) -> Any:
    """What of an argument the shapes of results depend on; 1, 1.0 and True are not the same."""
    if isinstance(value, torch.Tensor):
        return (value.size(), value.stride(), value.dtype, value.device.type)
    if isinstance(value, (list, tuple, type({}.values()))):
        return tuple([_described(each) for each in value])
    return (type(value), value)


def _launch_on(
    op: Any, facts: Facts, arguments: Arguments, written: list[Any], results: list[Any]
) -> None:
    """Queues the operation on the current stream; `results` get its values there."""
    on_cpu = _mapped(_cpu_leaf, arguments)
    targets = [bytes_of(each) if is_on_device(each) else None for each in results]
    draw = next_draw([*written, *results]) if facts.is_random else None

    def work() -> None:
        if draw is None:
            found = _call(op, on_cpu)
        elif op in DRAWN:
            found = DRAWN[op](torch.Generator().manual_seed(draw), *on_cpu[0], **on_cpu[1])
        else:
            with drawing(op, draw, on_cpu) as chosen:
                found = _call(op, chosen)
        values = pytree.tree_leaves(found) if targets else []
        for target, value in zip(targets, values, strict=True):
            if target is None or value is None:
                continue
            if value.numel() or not target.numel():  # CPU kernels leave out what nobody reads
                target.copy_(value)

    reads = [leaf for leaf in _leaves(arguments) if is_on_device(leaf)]
    writes = [each for each in (*written, *results) if is_on_device(each)]
    launch(facts.name, work, reads, writes)


def _run_now(op: Any, arguments: Arguments, draw: int | None = None) -> Any:
    """An operation whose shapes depend on values: the host has to wait, on a GPU too."""
    host_waits(str(op))
    with drawing(op, draw, _mapped(_cpu_leaf, arguments)) as chosen:
        found = _call(op, chosen)
    return pytree.tree_map_only(torch.Tensor, to_device, found)


def to_device(value: torch.Tensor) -> torch.Tensor:
    result = _allocate_like(value)
    target = bytes_of(result)
    launch("to device", lambda: target.copy_(value), [], [result])
    return result


def _allocate_like(tensor: torch.Tensor) -> torch.Tensor:
    return allocate(tensor.size(), tensor.stride(), tensor.dtype)


def _call(op: Any, arguments: Arguments) -> Any:
    args, kwargs = arguments
    return op(*args, **kwargs)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """`function` of everything in lists, tuples and dicts; torch's own way takes ten times as long."""
    if isinstance(value, tuple):
        return tuple([_mapped(function, each) for each in value])
    if isinstance(value, list):
        return [_mapped(function, each) for each in value]
    if isinstance(value, dict):
        return {name: _mapped(function, each) for name, each in value.items()}
    return function(value)


def _leaves(value: Any) -> list[Any]:
    """Everything in lists, tuples and dicts."""
    found: list[Any] = []
    _mapped(found.append, value)
    return found


def _cpu_leaf(leaf: Any) -> Any:
    if is_on_device(leaf):
        return bytes_of(leaf)
    is_device = isinstance(leaf, torch.device) and leaf.type == NAME
    return torch.device("cpu") if is_device else leaf


def _meta_leaf(leaf: Any) -> Any:
    if is_on_device(leaf):
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
    is_device = isinstance(leaf, torch.device) and leaf.type == NAME
    return torch.device("meta") if is_device else leaf


def _scalars_as_tensors(facts: Facts, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """torch takes numbers out of 0-dim tensors on the way to Python; kernels want tensors."""
    found = []
    for is_tensor, value in zip(facts.tensors, args, strict=False):
        if is_tensor and isinstance(value, (bool, int, float)):
            dtype = torch.float64 if isinstance(value, float) else None
            value = torch.tensor(value, dtype=dtype)
        found.append(value)
    return tuple(found)


def _refuse_cpu_tensors(op: Any, leaves: Sequence[Any]) -> None:
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and leaf.ndim:
            raise RuntimeError(
                f"{op}: expected all tensors to be on the same device, but found at least two "
                f"devices, {NAME}:0 and cpu"
            )


def _launch_into(op: Any, facts: Facts, arguments: Arguments, outputs: list[Any]) -> None:
    """Queues an operation with `out=` arguments. Its kernel gets empty ones on the stream, since it
    may want them larger for a while, and the values are copied.
    """
    args, kwargs = arguments

    def empty(leaf: torch.Tensor) -> torch.Tensor:
        return torch.empty(0, dtype=leaf.dtype)

    free = {name: pytree.tree_map_only(torch.Tensor, empty, kwargs[name]) for name in facts.outputs}
    if any(tensor.numel() == 0 for tensor in outputs):  # they get the shape of the result
        shapes = pytree.tree_leaves(_call(op, _mapped(_meta_leaf, (args, kwargs))))
        for target, shape in zip(outputs, shapes, strict=False):
            _resize(target, shape.size())
    _launch_on(op, facts, (args, {**kwargs, **free}), [], outputs)


# ---- operations of the device itself


def _empty(
    size: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> torch.Tensor:
    memory_format = memory_format or torch.contiguous_format
    shape = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format)
    return _allocate_like(shape)


def _empty_strided(
    size: Any,
    stride: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> torch.Tensor:
    return allocate(size, stride, dtype or torch.get_default_dtype())


pinned_storages: dict[int, Any] = {}
"""host memory that was asked for with `pin_memory=True`, by address. It is held for ever, as torch's
allocator of pinned memory does: an address that came back would make other memory look pinned.
"""


def is_pinned(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage()._cdata in pinned_storages


def _copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`target.copy_(source)` where at least one of them is on the device."""
    if is_on_device(source) and is_on_device(target):
        here = bytes_of(source)
        there = bytes_of(target)
        launch("copy", lambda: there.copy_(here), [source], [target])
    elif is_on_device(target):
        _copy_to_device(source, target, non_blocking)
    else:
        _copy_to_host(source, target, non_blocking)
    return target


def _copy_to_device(source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> None:
    there = bytes_of(target)
    counters.incoming_bytes += source.numel() * source.element_size()
    if is_pinned(source) and non_blocking:
        # read when the stream gets there: whoever overwrites it before has a wrong result
        launch("copy to device", lambda: there.copy_(source), [], [target])
        return
    counters.pageable_copies += 1
    staged = source.clone()
    launch("copy to device", lambda: there.copy_(staged), [], [target])


def _copy_to_host(source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> None:
    here = bytes_of(source)
    there = target.detach()  # the stream's thread knows nothing of `no_grad`
    if non_blocking and target.is_floating_point():
        there.fill_(float("nan"))  # what is read before the copy has run
    launch("copy to host", lambda: there.copy_(here), [source], [])
    if not non_blocking or not is_pinned(target):  # a driver copies to other memory itself
        host_waits("copy to host")


def _item(tensor: torch.Tensor) -> Any:
    host_waits("item")
    return bytes_of(tensor).item()


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    host_waits("equal")
    return torch.equal(bytes_of(first), bytes_of(second))


def _set(
    tensor: torch.Tensor, storage: Any, offset: int = 0, size: Any = None, stride: Any = None
) -> torch.Tensor:
    op = aten.set_.source_Storage_storage_offset
    changed: torch.Tensor = op.redispatch(CPU_KEYS, tensor, storage, offset, size, stride)
    return changed


def _resize(tensor: torch.Tensor, size: Any, *, memory_format: Any = None) -> torch.Tensor:
    """A tensor of another size gets other memory, with the values that it had."""
    shape = torch.empty([int(number) for number in size], device="meta")
    if tuple(tensor.size()) != tuple(shape.size()):
        fresh = allocate(shape.size(), shape.stride(), tensor.dtype)
        kept = min(tensor.numel(), fresh.numel())
        if kept:
            here = bytes_of(tensor).reshape(-1)[:kept]
            there = bytes_of(fresh).reshape(-1)[:kept]
            launch("resize", lambda: there.copy_(here), [tensor], [fresh])
        _set(tensor, fresh.untyped_storage(), 0, list(shape.size()), list(shape.stride()))
    return tensor


def _convolution_backward(
    gradient: Any, x: Any, weight: Any, stride: Any, padding: Any, dilation: Any, *rest: Any
) -> Any:
    transposed, _, groups, wanted = rest
    num_outputs = weight.shape[1] * groups if transposed else weight.shape[0]
    bias_sizes = [num_outputs] if wanted[2] else None
    op = aten.convolution_backward.default
    return run(op, gradient, x, weight, bias_sizes, stride, padding, dilation, *rest)


def _grouped_mm(
    left: Any, right: Any, ends: Any = None, bias: Any = None, dtype: Any = None
) -> torch.Tensor:
    """One launch for all groups, as GPUs have it; torch's meta kernel takes only bfloat16."""
    if left.ndim == 2 and right.ndim == 2:
        shape = [len(ends), left.shape[0], right.shape[1]]
    else:
        shape = [*left.shape[:-1], right.shape[-1]]
    result = _empty(shape, dtype=left.dtype)
    op = aten._grouped_mm.default
    _launch_on(op, facts_of(op), ((left, right, ends, bias, dtype), {}), [], [result])
    return result


FOREACH = (aten._foreach_mul_.Scalar, aten._foreach_mul_.Tensor, aten._foreach_norm.Scalar)
"""one launch for a list, as GPUs have it; torch would take the list apart"""
SPECIAL: dict[Any, Callable[..., Any]] = {
    **{op: partial(_run_any, op) for op in FOREACH},
    aten._grouped_mm.default: _grouped_mm,
    aten.convolution_overrideable.default: lambda *args: run(aten.convolution.default, *args),
    aten.convolution_backward_overrideable.default: _convolution_backward,
    aten.resize_.default: _resize,
    aten.empty.memory_format: _empty,
    aten.empty_strided.default: _empty_strided,
    aten._copy_from.default: _copy,
    aten._copy_from_and_resize.default: _copy,
    aten._local_scalar_dense.default: _item,
    aten.equal.default: _equal,
    aten.nonzero.default: lambda tensor: _run_now(aten.nonzero.default, ((tensor,), {})),
    aten.set_.source_Storage_storage_offset: _set,
    aten.record_stream.default: record_stream,
    # `tensor.data = ...` may move a tensor between the CPU and the device, as with CUDA
    aten._has_compatible_shallow_copy_type.default: lambda a, b: True,
    aten.is_pinned.default: lambda tensor, device=None: is_pinned(tensor),
}
