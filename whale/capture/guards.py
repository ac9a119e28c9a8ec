"""What `torch.export` leaves out without a word, noticed while it runs.

The exported graph keeps the forward only. Five things that PyTorch users write live in the backward
and vanish: custom `autograd.Function`s, hooks on tensors, backward hooks on modules, weights that
forward freezes for a while (`python_state` sees them), and `torch.utils.checkpoint`. The first four
may change gradients; the last is a wish about memory, which becomes a recompute request.

    with watch(model) as findings:
        program = torch.export.export(...)
    findings.checkpoints()          # recompute requests, in the order of the calls
    refuse(findings)                # ValueError when gradients may differ

How the calls are seen: `gelu = GeLUFunction.apply` and `from torch.utils.checkpoint import
checkpoint` bind the function long before Whale runs, so replacing an attribute would come too late.
Instead the *code* of the function is swapped while the watch is on (`code_swapped`): whoever holds
the function, and under whatever name, calls ours.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.fx.traceback import annotate
from torch.utils import checkpoint as torch_checkpoint

from whale.capture.errors import NOWHERE, CaptureError, Place, calling_place, module_names
from whale.capture.functions import CannotBecomeOperation, is_own_gradient, operation_of
from whale.compat import backward_hooks_of_all_modules, backward_hooks_of_module, hooks_of_tensor
from whale.names import names_of

FUNCTION = "function"
TENSOR_HOOK = "tensor hook"
MODULE_HOOK = "module hook"
SAVED_TENSOR_HOOK = "saved tensor hook"
FREEZING = "requires_grad changed in forward"
CHECKPOINT = "checkpoint"
PYTHON_RANDOM = "python random"
REBUILT = "buffer of another form"
KEPT = "state kept in Python"

RECOMPUTE_TAG = "recompute"
"""key in `node.meta["custom"]` of the nodes of a checkpointed region; the value is the region's
index in `Findings.checkpoints()`
"""

_TRY = {
    FUNCTION: (
        "define it with `torch.library.custom_op` and `register_autograd`: that survives the "
        "capture with its own backward"
    ),
    TENSOR_HOOK: (
        "put the change into the forward (scale the loss, `x.detach()`, a "
        "`torch.library.custom_op` with `register_autograd`), or change the gradients in the "
        "optimizer's `step`"
    ),
    MODULE_HOOK: (
        "remove the hook; put the change into the forward or the loss (a "
        "`torch.library.custom_op` with `register_autograd` has its own backward), or change the "
        "gradients in the optimizer's `step`"
    ),
    SAVED_TENSOR_HOOK: (
        "leave it out; ask for recomputation with `torch.utils.checkpoint` to save memory"
    ),
    FREEZING: (
        "call the module with weights that take no gradient: `torch.func.functional_call(module, "
        "{name: p.detach() for name, p in module.named_parameters()}, inputs)`"
    ),
    REBUILT: (
        "make it a function of the arguments of forward, or register the buffer with its final "
        "shape and type and update it in place"
    ),
    KEPT: (
        "make it a function of the arguments of forward, or make it a buffer of its final shape "
        "and type (`register_buffer`) and update that in place"
    ),
    CHECKPOINT: "nothing to do: Whale recomputes this region itself",
}


@dataclass(frozen=True)
class Finding:
    """One thing that the exported graph does not hold."""

    kind: str
    name: str
    """class of the Function, name of the hook, or name of the module inside the model"""
    place: str
    """`file.py:12` of the user's code: the call, or the definition of a hook that was there before
    """
    advice: str
    """what to do instead"""

    def describe(self) -> str:
        place = "" if self.place == str(NOWHERE) else f" at {self.place}"
        return f"{self.kind} `{self.name}`{place}. Try: {self.advice}"


@dataclass
class Findings:
    """Everything that a watch saw, in order."""

    entries: list[Finding] = field(default_factory=list)

    def add(self, kind: str, name: str, place: Place | str, advice: str = "") -> None:
        """Notes it once: the same line called for every layer is one finding. Checkpoints count
        each call.
        """
        finding = Finding(kind, name, str(place), advice or _TRY[kind])
        if kind == CHECKPOINT or finding not in self.entries:
            self.entries.append(finding)

    def of_kind(self, *kinds: str) -> list[Finding]:
        return [entry for entry in self.entries if entry.kind in kinds]

    def gradient_changes(self) -> list[Finding]:
        """What may make the gradients of the captured graph differ from the model's."""
        return self.of_kind(FUNCTION, TENSOR_HOOK, MODULE_HOOK, SAVED_TENSOR_HOOK, FREEZING)

    def memory(self) -> list[Finding]:
        """Tensors that the forward leaves to its next call."""
        return self.of_kind(REBUILT, KEPT)

    def checkpoints(self) -> list[Finding]:
        """Recompute requests; the i-th one is the nodes with `RECOMPUTE_TAG` i."""
        return self.of_kind(CHECKPOINT)


def refuse(findings: Findings) -> None:
    """Raises when something was found that may change gradients. For callers that cannot compare
    the gradients, or saw them differ.
    """
    changes = findings.gradient_changes()
    if changes:
        raise CaptureError(
            f"The captured model would lose {len(changes)} thing(s) that may change its gradients: "
            f"a capture keeps the forward only.{_listed(changes)}"
        )
    memory = findings.memory()
    if memory:
        # not a `CaptureError`, after which another form of capture is tried
        raise ValueError(
            "Forward gives another result in its next call: it reads what an earlier call left, "
            f"which no graph does.{_listed(memory)}"
        )
    draws = findings.of_kind(PYTHON_RANDOM)
    if draws:
        raise CaptureError(
            f"The forward draws random numbers outside torch {len(draws)} time(s), which no graph "
            f"can do.{_listed(draws)}"
        )


def _listed(findings: list[Finding]) -> str:
    return "".join(
        f"\n  {number}. {finding.describe()}" for number, finding in enumerate(findings, 1)
    )


# --- hooks that are there before the forward


def _definition(hook: Callable[..., Any]) -> tuple[str, str]:
    """(name, `file.py:12`) of where a hook was written."""
    hook = getattr(hook, "hook", hook)  # torch wraps hooks of parameters and modules in some cases
    while isinstance(hook, functools.partial):
        hook = hook.func
    function = getattr(hook, "__func__", hook)
    called = function if hasattr(function, "__code__") else type(hook).__call__
    code = getattr(called, "__code__", None)
    place = Place(code.co_filename, code.co_firstlineno, "", None) if code else NOWHERE
    return getattr(function, "__qualname__", type(hook).__qualname__), str(place)


def note_hooks(model: nn.Module, findings: Findings) -> None:
    """Notes backward hooks on the model's parameters and modules, and those for all modules. Call
    it while the parameters are the user's own.
    """

    def note(kind: str, owner: str, hook: Any) -> None:
        name, place = _definition(hook)
        findings.add(kind, f"{owner}: {name}", place)

    for name, parameter in model.named_parameters():
        for hook in hooks_of_tensor(parameter):
            # our own hook sends gradients off and changes none
            if not str(getattr(hook, "__module__", "")).startswith("whale."):
                note(TENSOR_HOOK, name, hook)
    for name, module in model.named_modules():
        for hook in backward_hooks_of_module(module):
            note(MODULE_HOOK, name or type(module).__name__, hook)
    for hook in backward_hooks_of_all_modules():
        note(MODULE_HOOK, "all modules", hook)


# --- calls during the forward


def _plain_call(*args: Any, _whale_handler: Any, **kwargs: Any) -> Any:
    return _whale_handler(*args, **kwargs)


class _WithClassCell:
    def call(*args: Any, _whale_handler: Any, **kwargs: Any) -> Any:
        # a method that says super() has a cell for its class, and code can only replace code with
        # the same number of cells
        __class__  # type: ignore[name-defined]  # noqa: B018
        return _whale_handler(*args, **kwargs)


@contextmanager
def code_swapped(function: Any, handler: Callable[..., Any]) -> Iterator[None]:
    """While on, every call of `function` by this thread calls `handler(original, *args)`, also
    through names that were bound before. Calls by other threads are no part of the capture.
    """
    code = function.__code__
    keyword_defaults = function.__kwdefaults__
    template = _WithClassCell.call if code.co_freevars else _plain_call
    original = FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    original.__kwdefaults__ = keyword_defaults
    thread = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return original(*args, **kwargs)
        return handler(original, *args, **kwargs)

    try:
        # the new code runs with torch's globals, so it gets its handler as the default of a keyword
        function.__kwdefaults__ = {"_whale_handler": call}
        function.__code__ = template.__code__
        yield
    finally:
        function.__code__ = code
        function.__kwdefaults__ = keyword_defaults


class _Watch:
    """The handlers of one watch."""

    def __init__(self, model: nn.Module, findings: Findings) -> None:
        self.findings = findings
        self.names = module_names(model)
        self.parameters = {id(parameter): name for name, parameter in model.named_parameters()}
        self.grad_enabled = torch.is_grad_enabled()

    def apply(self, original: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
        """`Function.apply` of any class."""
        if issubclass(cls, torch_checkpoint.CheckpointFunction):
            # what a reentrant checkpoint calls, when taken by itself
            function, _preserve_rng_state, *inputs = args
            return self._recomputed(function, tuple(inputs), {})
        where = f"{cls.__module__}.{cls.__qualname__}"
        if where == "torch.nn.modules._functions.BackwardHookFunction":
            self._module_hook()
        elif cls.__module__ == "torch._library.autograd":
            pass  # the backward of a `torch.library.custom_op`, which the exported graph keeps
        elif torch.is_grad_enabled() or not self.grad_enabled:
            if not kwargs and not is_own_gradient(original, cls, args):
                # an operation with the backward that the user wrote
                with suppress(CannotBecomeOperation):
                    return operation_of(cls, args)(*args)
            self.findings.add(FUNCTION, where.removeprefix("__main__."), calling_place(self.names))
        return original(cls, *args, **kwargs)

    def _module_hook(self) -> None:
        """A module with backward hooks runs. Those that `note_hooks` saw are known; others were
        added during the forward.
        """
        place = calling_place(self.names)
        name = place.module or place.class_name
        known = {entry.name.split(":")[0] for entry in self.findings.of_kind(MODULE_HOOK)}
        if known.isdisjoint({name, "all modules"}):
            self.findings.add(MODULE_HOOK, name or "a module", place)

    def tensor_hook(
        self, original: Callable[..., Any], tensor: torch.Tensor, hook: Callable[..., Any]
    ) -> Any:
        name = _definition(hook)[0]
        if id(tensor) in self.parameters:
            name = f"{self.parameters[id(tensor)]}: {name}"
        self.findings.add(TENSOR_HOOK, name, calling_place(self.names))
        return original(tensor, hook)

    def saved_tensor_hook(self, original: Callable[..., Any], hooks: Any) -> Any:
        cls = type(hooks)
        public = (torch.autograd.graph.saved_tensors_hooks, torch.autograd.graph.save_on_cpu)
        # other subclasses of torch are parts of other features
        if cls in public or cls.__module__.split(".")[0] != "torch":
            self.findings.add(SAVED_TENSOR_HOOK, cls.__qualname__, calling_place(self.names))
        return original(hooks)

    def checkpoint(
        self, original: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """`torch.utils.checkpoint.checkpoint`: runs the function, and tags its nodes."""
        del original
        # its own arguments out, the function's stay
        options = {name: kwargs.pop(name, None) for name in _CHECKPOINT_OPTIONS}
        context_fn = options["context_fn"]
        forward_context = context_fn()[0] if context_fn is not None else nullcontext()
        if hasattr(forward_context, "__torch_dispatch__"):
            forward_context = nullcontext()  # selective checkpointing: it only chooses what to save
        with forward_context:
            return self._recomputed(function, args, kwargs)

    def _recomputed(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        index = len(self.findings.checkpoints())
        place = calling_place(self.names)
        self.findings.add(CHECKPOINT, "", place)
        slot = len(self.findings.entries) - 1
        with _modules_called(self.names) as called, annotate({RECOMPUTE_TAG: index}):
            result = function(*args, **kwargs)
        name = _wrapped_module(function, self.names)
        if name is None:
            name = ", ".join(_outermost(called))
        # checkpoints inside of this one were noted after it: the entry keeps its place
        self.findings.entries[slot] = replace(self.findings.entries[slot], name=name)
        return result


_CHECKPOINT_OPTIONS = names_of(
    "use_reentrant context_fn determinism_check debug early_stop preserve_rng_state"
)


def _outermost(names: list[str]) -> list[str]:
    """Names of modules that are not inside another one of them."""
    found = []
    for name in names:
        others = [other for other in names if other != name]
        if not any(not other or name.startswith(other + ".") for other in others):
            found.append(name)
    return found


def _wrapped_module(function: Any, names: dict[int, str]) -> str | None:
    """Name of the module when the function is a module, or its `__call__` or `forward`, also inside
    a partial.
    """
    while isinstance(function, functools.partial):
        function = function.func
    if getattr(function, "__name__", "") in ("__call__", "forward", "_wrapped_call_impl"):
        function = getattr(function, "__self__", function)
    return names.get(id(function)) if isinstance(function, nn.Module) else None


@contextmanager
def _modules_called(names: dict[int, str]) -> Iterator[list[str]]:
    """Names of the model's modules that run inside."""
    called: list[str] = []

    def note(module: nn.Module, args: Any) -> None:
        del args
        name = names.get(id(module))
        if name is not None and name not in called:
            called.append(name)

    handle = torch.nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield called
    finally:
        handle.remove()


@contextmanager
def watch(model: nn.Module) -> Iterator[Findings]:
    """Notes what the graph of a `torch.export.export` inside will not hold, and lets checkpointed
    functions just run.

    Enter it while the parameters of `model` are still the user's (before they are replaced by fake
    ones): hooks sit on the tensors.
    """
    findings = Findings()
    note_hooks(model, findings)
    watcher = _Watch(model, findings)
    swapped: list[tuple[Any, Callable[..., Any]]] = [
        (vars(torch.autograd.Function)["apply"].__func__, watcher.apply),
        (torch.Tensor.register_hook, watcher.tensor_hook),
        (torch.Tensor.register_post_accumulate_grad_hook, watcher.tensor_hook),
        (torch.autograd.graph.saved_tensors_hooks.__enter__, watcher.saved_tensor_hook),
        # `checkpoint` is decorated; whoever holds it calls the function under the decorator
        (inspect.unwrap(torch_checkpoint.checkpoint), watcher.checkpoint),
    ]
    with ExitStack() as stack:
        for function, handler in swapped:
            stack.enter_context(code_swapped(function, handler))
        yield findings
    note_hooks(model, findings)
