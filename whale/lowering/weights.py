"""The tensors that one rank holds: taken from a model with real weights, or initialised one module
at a time.

A rank never allocates a parameter that its plan does not give it. Initialisation draws from the
CPU's generator, seeded by (seed, module name), so a module gets the same values on any rank, any
device and any number of ranks: what the generator of a GPU gives depends on the GPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping

import torch

from whale.compat import tensor_stores
from whale.devices import device_of
from whale.dtypes import as_bytes, is_differentiable

Init = Callable[[torch.nn.Module, str], None]
"""initialises the parameters and buffers that stand directly in a module, given its name"""
Part = Callable[[str, torch.Tensor], torch.Tensor]
"""the part of a whole tensor, given its first name, that this rank holds: the tensor itself where
that is all of it
"""


def everything(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def has_real_weights(model: torch.nn.Module) -> bool:
    """True when no parameter is on `meta`; a mix is refused."""
    on_meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if on_meta and len(on_meta) < sum(1 for _ in model.parameters()):
        raise ValueError(
            f"parameter {on_meta[0]} is on meta while others are not ({len(on_meta)} in all): "
            "build the whole model in one way"
        )
    return not on_meta


def refuse_shared_memory(model: torch.nn.Module) -> None:
    """Two parameters may be one (`b.weight = a.weight`), but not two that share their memory: Whale
    places and updates each by itself.
    """
    seen: dict[int, list[tuple[int, int, str, torch.Tensor]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta or not tensor.numel() or not tensor.is_contiguous():
            continue
        start = int(tensor.storage_offset()) * tensor.element_size()
        stop = start + tensor.numel() * tensor.element_size()
        for other_start, other_stop, other_name, other in seen.setdefault(
            tensor.untyped_storage().data_ptr(), []
        ):
            if start < other_stop and other_start < stop and other is not tensor:
                raise ValueError(
                    f"{other_name} and {name} are two tensors in the same memory (`.data` of one "
                    "given to the other, or a view): trained each on its own, they would drift "
                    "apart. Tie them with one Parameter (`b.weight = a.weight`), or give each its "
                    "own memory (`.clone()`)"
                )
        seen[tensor.untyped_storage().data_ptr()].append((start, stop, name, tensor))


def take_weights(
    model: torch.nn.Module, held: Iterable[str], device: str, part: Part = everything
) -> dict[str, torch.Tensor]:
    """This rank's tensors of a model with real weights. Every parameter of the model that it does
    not hold, or holds only a part of, is replaced by an empty one on `meta`, of the whole shape:
    the model can still be captured."""
    wanted = set(held)
    tensors: dict[str, torch.Tensor] = {}
    replaced: dict[int, torch.Tensor] = {}  # tied tensors stay tied
    owned = list(named_tensors(model))
    for name, _, _, tensor in owned:
        if name in wanted:
            own = part(name, tensor)
            tensors[name] = _moved(own, device)
            if own is tensor:
                replaced[id(tensor)] = tensors[name]
    for _, owner, leaf, tensor in owned:
        if id(tensor) not in replaced:
            replaced[id(tensor)] = _emptied(tensor)
        _store_of(owner, leaf)[leaf] = replaced[id(tensor)]
    return tensors


def initialise_weights(
    model: torch.nn.Module,
    held: Iterable[str],
    names: Mapping[str, str],
    init: Init | None,
    seed: int,
    device: str,
    part: Part = everything,
) -> dict[str, torch.Tensor]:
    """Makes this rank's tensors of a model on `meta`. `names`: every tensor name -> first name of
    the same tensor.

    A module is initialised whole and on the CPU, then moved; of a tensor that is cut only the
    rank's part stays, and the model keeps the one on `meta`.
    """
    wanted = set(held)
    whole: dict[str, torch.Tensor] = {}
    initialiser = init or default_init(model)
    tensors: dict[str, torch.Tensor] = {}
    for module_name, module in model.named_modules():
        own: list[tuple[str, str]] = []  # (name in the module, name in the model)
        for store in tensor_stores(module):
            for leaf, tensor in store.items():
                if tensor is not None:
                    own.append((leaf, f"{module_name}.{leaf}" if module_name else leaf))
        mine = [(leaf, names[full]) for leaf, full in own if names[full] in wanted]
        if not any(first not in tensors for _, first in mine):
            _tie(module, [(leaf, first) for leaf, first in mine if first in whole], whole)
            continue
        before = {leaf: _store_of(module, leaf)[leaf] for leaf, _ in own}
        for leaf, _ in own:
            tensor = before[leaf]
            if tensor is not None and tensor.is_meta:
                _store_of(module, leaf)[leaf] = _unset_like(tensor)
        # torch.manual_seed reseeds accelerators, too: the user's random numbers must not change
        with device_of(torch.device(device)).fork_random(), torch.no_grad():
            torch.manual_seed(_module_seed(seed, module_name))
            initialiser(module, module_name)
        for leaf, full in own:
            tensor = _store_of(module, leaf)[leaf]
            assert tensor is not None
            first = names[full]
            if first not in wanted:
                _store_of(module, leaf)[leaf] = before[leaf]
                continue
            if first not in tensors:
                _check_set(tensor, full, module)
                own_part = part(first, tensor)
                tensors[first] = _moved(own_part, device)
                if own_part is tensor:
                    whole[first] = tensors[first]
            _store_of(module, leaf)[leaf] = whole.get(first, before[leaf])
    return tensors


def default_init(model: torch.nn.Module) -> Init:
    """Hugging Face's `_init_weights` where the model has one, else the module's own
    `reset_parameters`.
    """
    hugging_face = getattr(model, "_init_weights", None)

    def init(module: torch.nn.Module, name: str) -> None:
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
        if callable(hugging_face):
            hugging_face(module)
        elif not callable(reset):
            raise ValueError(
                f"module '{name}' ({type(module).__name__}) has parameters or buffers of its own "
                "and no reset_parameters(): give it one, or pass init=lambda module, name: ..., or "
                "pass a model that is already built"
            )

    return init


def build_on_meta(build: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """Calls the builder so that no parameter is ever allocated; buffers keep the values that the
    constructor gives them.
    """
    original = torch.nn.Module.register_parameter

    def register_on_meta(
        self: torch.nn.Module, name: str, param: torch.nn.Parameter | None
    ) -> None:
        if param is not None and not param.is_meta:
            written = vars(param)  # `param._no_weight_decay`, which an optimizer may ask for
            param = torch.nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
            vars(param).update(written)
        original(self, name, param)

    torch.nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        with _EmptyOnMeta():
            model = build()
    finally:
        torch.nn.Module.register_parameter = original  # type: ignore[method-assign]
    if not isinstance(model, torch.nn.Module):
        raise ValueError(
            f"the function given to wh.parallelize returned {type(model).__name__}: it must build "
            "and return a torch.nn.Module"
        )
    return model


class _EmptyOnMeta(torch.overrides.TorchFunctionMode):
    """`torch.empty` gives meta tensors: that is how modules allocate what they initialise
    afterwards.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def named_tensors(
    model: torch.nn.Module,
) -> Iterable[tuple[str, torch.nn.Module, str, torch.Tensor]]:
    """(full name, owner, name in the owner, tensor) of every parameter and buffer, under
    all names.
    """
    for module_name, module in model.named_modules(remove_duplicate=False):
        for store in tensor_stores(module):
            for leaf, tensor in store.items():
                if tensor is not None:
                    yield (f"{module_name}.{leaf}" if module_name else leaf), module, leaf, tensor


def digest_weights(model: torch.nn.Module) -> dict[str, str]:
    """Hash of each tensor, to see whether ranks were given the same model."""
    digests = {}
    for name, _, _, tensor in named_tensors(model):
        plain = as_bytes(tensor.detach()).cpu()
        digests[name] = hashlib.blake2b(plain.numpy().data, digest_size=8).hexdigest()
    return digests


def _store_of(module: torch.nn.Module, leaf: str) -> dict[str, torch.Tensor | None]:
    parameters, buffers = tensor_stores(module)
    return parameters if leaf in parameters else buffers


def _tie(
    module: torch.nn.Module, mine: list[tuple[str, str]], tensors: Mapping[str, torch.Tensor]
) -> None:
    for leaf, first in mine:
        _store_of(module, leaf)[leaf] = tensors[first]


def _unset_like(tensor: torch.Tensor) -> torch.Tensor:
    """Allocated on the CPU and filled with a value that no initialiser leaves behind."""
    if is_differentiable(tensor):
        fill = float("nan")
    else:
        fill = torch.iinfo(tensor.dtype).min if tensor.dtype != torch.bool else 0
    fresh = torch.full(tuple(tensor.shape), fill, dtype=tensor.dtype, device="cpu")
    return (
        torch.nn.Parameter(fresh, requires_grad=tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter)
        else fresh
    )


def _check_set(tensor: torch.Tensor, name: str, module: torch.nn.Module) -> None:
    if is_differentiable(tensor):
        unset = bool(tensor.isnan().any())
    elif tensor.dtype == torch.bool:
        unset = False
    else:
        unset = bool((tensor == torch.iinfo(tensor.dtype).min).any())
    if unset:
        raise ValueError(
            f"'{name}' was left without a value by the initialisation of its module "
            f"({type(module).__name__}): pass init=lambda module, name: ... that sets it, or pass "
            "a model that is already built"
        )


def _moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """The tensor on `device`, which has its index: a model that was put on a GPU before `wh.init`
    lies on the first one, whatever the rank.
    """
    if tensor.device == torch.device(device):
        return tensor
    moved = tensor.detach().to(device)
    return (
        torch.nn.Parameter(moved, requires_grad=tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter)
        else moved
    )


def _emptied(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return (
        torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter)
        else empty
    )


def _module_seed(seed: int, module_name: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(f"{seed}|{module_name}".encode(), digest_size=7).digest(), "little"
    )
