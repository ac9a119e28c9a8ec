"""Why a capture failed, in the user's words: which module, which line, what is wrong there, and
what to try.

`torch.export` stops with long messages about symbols and guards. `explain` turns each of them into
one `CaptureError`. Three steps:

1. where: the innermost line of the user's code and the innermost module, both read from the frames
   of the traceback (`locate`); constraints on the batch size come without a traceback, so
   `size_conditions` notes the place of each while it is made;
2. what: the first rule of `_RULES` that knows the exception says what is wrong and what to try;
3. otherwise it is an ordinary exception of the model's own code and is shown as it is.
"""

from __future__ import annotations

import inspect
import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import sympy
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from whale.compat import patched
from whale.compat.exporting import TORCH_FOLDER

Frames = Iterable[tuple[FrameType, int]]
"""frames, outermost first, each with the line number that was running"""

_WHALE_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PYTHON_FOLDER = sysconfig.get_paths()["stdlib"] + os.sep
_MAX_PLACES = 3
LOSS_CALLER = "loss_of"
"""the function of capture/model_call.py that calls the user's loss"""


class CaptureError(ValueError):
    """The model cannot be captured as it is written; the message says where, why and what to
    change.
    """


@dataclass(frozen=True)
class Place:
    """A line of the user's code, and the module whose forward was running."""

    file: str
    line: int
    source: str
    """text of the line, stripped"""
    module: str | None
    """name inside the model, `''` for the model itself, None when no module of the model was
    running
    """
    class_name: str = ""
    in_loss: bool = False
    """inside the user's loss function"""

    @property
    def inside(self) -> bool:
        """Whether it is in the model's forward or in the loss."""
        return self.module is not None or self.in_loss

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}" if self.file else "an unknown line"

    def describe(self) -> str:
        """Module, class, line and its text: `blocks.1` (Sub), model.py:12: `if x.sum() > 0:`."""
        where = f"{self}: `{self.source}`" if self.source else str(self)
        if self.in_loss:
            return f"the loss function, {where}"
        if self.module is None:
            return where
        module = f"`{self.module}`" if self.module else "the model itself"
        return f"{module} ({self.class_name}), {where}"


NOWHERE = Place(file="", line=0, source="", module=None)


# --- where


def is_user_file(file_name: str) -> bool:
    """The file is neither torch, Whale nor the standard library. Libraries of models (transformers,
    timm) count as user code.
    """
    if file_name == "<string>" or file_name.startswith("<frozen"):
        return False
    if file_name.startswith((TORCH_FOLDER, _WHALE_FOLDER)):
        return False
    return not file_name.startswith(_PYTHON_FOLDER) or "-packages" + os.sep in file_name


def module_names(model: nn.Module) -> dict[int, str]:
    """`id(module)` -> its first name in the model."""
    return {id(module): name for name, module in model.named_modules()}


def running_module(frame: FrameType) -> nn.Module | None:
    """The module whose method this frame is (`self`, whatever it is called)."""
    if not frame.f_code.co_argcount:
        return None
    owner = frame.f_locals.get(frame.f_code.co_varnames[0])
    # a function that merely takes a module, such as `torch.export.export(model)`, is not one of its
    # methods
    is_method = isinstance(owner, nn.Module) and hasattr(type(owner), frame.f_code.co_name)
    return owner if is_method else None


def locate(frames: Frames, names: dict[int, str]) -> Place:
    """Innermost user line and innermost module of the model. Frames outside the model's forward do
    not count when there is one.
    """
    line = NOWHERE
    owner = None
    in_loss = False
    for frame, number in frames:
        file_name = frame.f_code.co_filename
        if frame.f_code.co_name == LOSS_CALLER and file_name.startswith(_WHALE_FOLDER):
            in_loss = True
            line = NOWHERE
        module = running_module(frame)
        if module is not None and id(module) in names:
            if owner is None:
                line = NOWHERE
            owner = module
        if is_user_file(file_name):
            line = Place(file_name, number, linecache.getline(file_name, number).strip(), None)
    if in_loss:
        return replace(line, in_loss=True)
    if owner is None:
        return line
    return replace(line, module=names[id(owner)], class_name=type(owner).__name__)


def calling_place(names: dict[int, str] | None = None) -> Place:
    """The user's line that is running right now, for code that is called from inside a forward."""
    return locate(reversed(list(traceback.walk_stack(inspect.currentframe()))), names or {})


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from, outermost first."""
    current: BaseException | None = error
    seen: set[int] = set()
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _error_place(error: BaseException, names: dict[int, str]) -> tuple[BaseException, Place]:
    """The outermost exception of the chain that left the model's forward or the loss, and where."""
    for link in _chain(error):
        place = locate(traceback.walk_tb(link.__traceback__), names)
        if place.inside:
            return link, place
    return error, NOWHERE


# --- constraints on the batch size


@dataclass
class SizeConditions:
    """What the forward asked of symbolic sizes, in order, and where. torch itself keeps only a line
    inside torch.
    """

    conditions: list[tuple[sympy.Basic, Place]] = field(default_factory=list)

    def equations(self) -> list[Place]:
        """The first lines that put an equation on a size: these fix the batch or ask that it
        divides.
        """
        places = []
        for condition, place in self.conditions:
            if isinstance(condition, sympy.Eq) and place.file:
                places.append(place)
        # places outside of the model are the line that called Whale
        inside = [place for place in places if place.inside]
        return list(dict.fromkeys(inside or places))[:_MAX_PLACES]


class _PlacedGuards(list[Any]):
    """`ShapeEnv.guards` that notes the running line with each guard."""

    def __init__(self, found: SizeConditions, names: dict[int, str]) -> None:
        super().__init__()
        self._found = found
        self._names = names

    def append(self, guard: Any) -> None:
        super().append(guard)
        self._found.conditions.append((guard.expr, calling_place(self._names)))


@contextmanager
def size_conditions(model: nn.Module) -> Iterator[SizeConditions]:
    """Notes where conditions on sizes come from, while `torch.export.export` runs inside. The
    export makes its own `ShapeEnv`, hence the patch.
    """
    found = SizeConditions()
    names = module_names(model)
    original = ShapeEnv.__init__

    def with_places(self: ShapeEnv, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.guards = _PlacedGuards(found, names)

    with patched(ShapeEnv, "__init__", with_places):
        yield found


# --- what


_INSIDE_FORWARD = "inside"
_OUTSIDE_FORWARD = "outside"
_AFTER_FORWARD = "after"


@dataclass(frozen=True)
class _Rule:
    """One known way to fail. `kind` is looked for in the class names of the exception, `pattern` in
    its message.
    """

    kind: str
    pattern: str
    wrong: str
    advice: str
    when: str = _INSIDE_FORWARD
    """raised while the forward ran, before or after it, or after it because of a condition that the
    forward put on a size
    """

    at: str = ""
    """pattern of the class of the module and of the line"""

    def match(self, error: BaseException, place: Place) -> dict[str, str] | None:
        """The words of the pattern, or None when this rule does not know the error."""
        kinds = [cls.__name__ for cls in type(error).__mro__]
        if self.kind not in kinds or place.inside != (self.when == _INSIDE_FORWARD):
            return None
        if not re.search(self.at, f"{place.class_name} {place.source}"):
            return None
        match = re.search(self.pattern, str(error), re.DOTALL)
        if match is None:
            return None
        return {key: _readable(value or "") for key, value in match.groupdict().items()}


_OUTSIDE = (
    "or compute it outside the model and give it in the batch as a Python number (a new value is "
    "then a new capture)"
)
WRITE_EXPERTS = (
    "experts that each take their tokens: stack their weights, [expert, in, out], and write "
    "`torch.bmm(x.unsqueeze(1), stacked[chosen]).squeeze(1)` for tokens `x` and numbers of their "
    "experts `chosen`: Whale copies no weights for that, and each token meets its expert alone. Or "
    "give all tokens to each expert and weigh what comes, `out = out + expert(x) * (weight * "
    "(chosen == k)).sum(-1, keepdim=True)`. In a model of transformers: "
    '`experts_implementation="grouped_mm"`'
)
"""how a mixture of experts is written without a shape that depends on the routing"""
_RULES: tuple[_Rule, ...] = (
    _Rule(
        "GuardOnDataDependentSymNode",
        r"",
        "Python asks here which tokens an expert has, or which experts have tokens. The captured "
        "graph is the same for every batch",
        WRITE_EXPERTS,
        at=r"(?i)expert|moe\b|mixture",
    ),
    _Rule(
        "GuardOnDataDependentSymNode",
        r"",
        "`momentum=None` averages over all batches so far, by a count that torch makes a Python "
        "number",
        "give the batch norm a momentum (0.1 is torch's own)",
        at=r"^BatchNorm",
    ),
    _Rule(
        "GuardOnDataDependentSymNode",
        r"Could not extract specialized integer",
        "the value of a tensor becomes a Python integer here (`int()`, `.item()`, `.tolist()`, a "
        "size, a slice or a `range`). The captured graph is the same for every batch, so no Python "
        "number may depend on what the tensors hold",
        f"keep it a tensor (masks and `torch.where` instead of slices and loops), {_OUTSIDE}",
    ),
    _Rule(
        "GuardOnDataDependentSymNode",
        r"Size-like symbols: u\d",
        "Python needs a length that depends on what the tensors hold, as that of `x[mask]`, "
        "`masked_select`, `nonzero` and `unique` does. The captured graph is the same for every "
        "batch",
        'keep the full shape and mask it: `(F.mse_loss(x, y, reduction="none") * mask).sum() / '
        "mask.sum()` instead of `F.mse_loss(x[mask], y[mask])`",
    ),
    _Rule(
        "GuardOnDataDependentSymNode",
        r"",
        "Python needs the value of a tensor here (`if`, `while`, `assert`, `and`, `float()`, "
        "`int()` or a comparison of `.item()`). The captured graph has one path for every batch, "
        "so no Python decision may depend on what the tensors hold",
        "write both cases as tensors with `torch.where(condition, a, b)`; leave out a check that "
        "only spares work on nothing (`if mask.any():`); put checks under `if "
        "not torch.compiler.is_exporting():`; " + _OUTSIDE,
    ),
    _Rule(
        "DataDependentOutputException",
        r"(?P<operation>\S*)",
        "`{operation}` turns the values of tensors into a Python number or bool, which a captured "
        "graph cannot hold",
        "use the form that stays a tensor (`(a == b).all()` with `torch.where` for "
        f"`torch.equal`), {_OUTSIDE}",
    ),
    _Rule(
        "DynamicOutputShapeException",
        r"(?P<operation>\S*)",
        "the shape of the result of `{operation}` depends on what the tensors hold",
        "keep the full shape and mask it: `torch.where(mask, x, 0)` instead of `x[mask]`",
    ),
    _Rule(
        "UnsupportedOperatorException",
        r"(?P<operation>\S*)",
        "`{operation}` cannot be captured: torch does not know the shape of its result before it "
        "runs",
        "write it with other operations of torch, or wrap it with `torch.library.custom_op` (with "
        "`register_fake` and `register_autograd`)",
    ),
    _Rule(
        "AttributeError",
        r"^'Tensor' object has no attribute 'constant'$",
        "a `torch.func` transform inside of another one (vmap of grad, jacfwd of jacrev, hessian) "
        "cannot be captured",
        "write it with batched operations, and derivatives as formulas or by differences",
    ),
    _Rule(
        "TypeError",
        r"failed to unpack the object .* FakeTensor",
        "the value of a tensor becomes a size, as lengths do in `pack_padded_sequence`",
        "keep the full shape: give a recurrent layer the padded batch, and take the output of the "
        "last step of each sample by `output[torch.arange(len(x)), lengths - 1]`",
    ),
    _Rule(
        "TypeError",
        r"unhashable type: non-nested SymInt",
        "a number that the captured graph does not know is put into a set or made the key of a dict: "
        "the size of a dim that varies, or what `.tolist()` and `.item()` read from a tensor",
        f"compare sizes one by one instead of `set(sizes)`; what depends on values, keep a tensor, {_OUTSIDE}",
    ),
    _Rule(
        "RuntimeError",
        r"specialized it to be a constant \((?P<size>\d+)\)",
        "the forward fixes the batch size to {size}, the size of the sample batch. Whale runs it "
        "with other sizes (micro-batches)",
        "take the size from the tensor (`x.shape[0]`, or -1 in `view` and `reshape`) instead of "
        "the number {size}, "
        "and build masks, states and positions for `x.shape[0]` samples or for one that "
        "broadcasts. Dim 0 of a tensor of the batch is its "
        "samples: one that has {size} rows and no samples needs a sample batch of another size, "
        "and time does not come first",
        _AFTER_FORWARD,
    ),
    _Rule(
        "RuntimeError",
        r"Not all values of (?P<symbol>\w+).*?satisfy the generated guard "
        r"(?P<guard>[^\n]+?)\.?\s*(Specializations|\n|$)",
        "the forward works only for batch sizes with {guard}. Whale runs it with other sizes "
        "(micro-batches)",
        "write this step so that it works for every number of samples, without a branch or a "
        "`view` that depends on it",
        _AFTER_FORWARD,
    ),
    _Rule(
        "RuntimeError",
        r"\.numpy\(\) is not supported|Can't call numpy\(\)|Cannot copy out of meta tensor|"
        r"[Cc]annot .*data pointer",
        "the values of a tensor are read outside torch here (`.numpy()`, `.data_ptr()`, a C "
        "extension). During a capture tensors have shapes and no values",
        "use torch operations, or wrap this part with `torch.library.custom_op` (with "
        "`register_fake` and `register_autograd`)",
    ),
    _Rule(
        "RuntimeError",
        r"fake tensor in the exported program constant's list.*?"
        r"model attribute: (?P<attribute>\S+?)\.?lifted_tensor",
        "a tensor left the graph in `{attribute}`: `.data`, or a tensor that lives from one "
        "forward to the next",
        "use `.detach()` instead of `.data`; register a tensor that lives from step to step as a "
        "buffer and update it in place",
        _OUTSIDE_FORWARD,
    ),
    _Rule(
        "RuntimeError",
        r"(?P<message>.*not on the expected device.*|Unhandled FakeTensor Device Propagation.*|"
        r"Expected all tensors to be on the same device.*)",
        "tensors of two devices meet here ({message})",
        "make new tensors with `device=x.device`, and keep constants as buffers so that they move "
        "with the model",
    ),
    _Rule(
        "Exception",
        r"Found (?P<type><class .*?>) in output",
        "the model returns a {type}, which cannot leave a graph",
        "return the loss (a scalar tensor), something with `.loss`, or give `loss=` a function "
        "that makes the loss from the output",
        _OUTSIDE_FORWARD,
    ),
    _Rule(
        "Exception",
        r"Unsupported input type (?P<type><class .*?>)|to non-tensor type (?P<other><class .*?>)",
        "the batch holds a {type}{other}, which cannot enter a graph",
        "give tensors, numbers, strings, and lists, tuples and dicts of them; "
        "`torch.export.register_dataclass` for your own dataclass",
        _OUTSIDE_FORWARD,
    ),
    _Rule(
        "Exception",
        r"(?P<message>[^\n]*dynamic_shapes[^\n]*|Must provide a tree_name)",
        "the batch does not fit the signature of the forward; tensors that it only takes as "
        "`*args` or `**kwargs` have no name ({message})",
        "name each argument in the forward's signature, or wrap the model in a module whose "
        "forward names them",
        _OUTSIDE_FORWARD,
    ),
)


def _readable(text: str) -> str:
    """`L['x'].size()[0] % 2` -> `batch % 2`, on one line."""
    text = re.sub(r"L(\['?\w+'?\])+\.size\(\)\[0\]", "batch", text)
    return " ".join(text.split())


def _message(error: BaseException) -> str:
    return str(error).strip().rstrip(".") or "(no message)"


def _known(error: Exception, place: Place) -> tuple[_Rule, dict[str, str]] | None:
    for rule in _RULES:
        for link in _chain(error):
            if (words := rule.match(link, place)) is not None:
                return rule, words
    return None


_NUMBER_OF_SIZE = re.compile(r"\bmath\.\w+\(|\blinspace\(")
"""what makes a number of a size, which then holds for the sample batch only"""
_NUMBER_ADVICE = (
    "`math` and `torch.linspace` make a fixed number of a size. Compute with tensors: "
    "`torch.arange(n) / (n - 1)` for `linspace(0, 1, n)`, `torch.ones(n).sum().log()` for "
    "`math.log(n)`"
)

# the second: torch fails while it words the first, for a bound that is no whole number, as
# `3 * batch < 64` has one
_LIMITS_BATCH = ("satisfy the generated guard", "Expected op to be '==', got ")


def fixes_size(error: BaseException) -> bool:
    """Whether the export stopped because the forward made a number of a symbolic size."""
    return any("specialized it to be a constant" in str(link) for link in _chain(error))


def hashes_size(error: BaseException) -> set[str]:
    """Files through which an error went that says that a symbolic size has no hash; else none."""
    files: set[str] = set()
    for link in _chain(error):
        if "unhashable type: non-nested SymInt" in str(link):
            files |= {frame.filename for frame in traceback.extract_tb(link.__traceback__)}
    return files


def limits_batch(error: BaseException) -> bool:
    """Whether the export stopped because the forward does not take every number of samples."""
    return any(text in str(link) for link in _chain(error) for text in _LIMITS_BATCH)


def raised_by_model(error: Exception, model: nn.Module) -> bool:
    """Whether the code of the model or the loss raised it, and not torch for what that code does in
    an export.
    """
    _, place = _error_place(error, module_names(model))
    known = isinstance(error, CaptureError) or _known(error, place) is not None
    return place.inside and not known


_ABOUT_ARGUMENTS = (TypeError, ValueError, IndexError, RuntimeError, AssertionError)
"""what a forward raises that takes one tensor for another: types, shapes, the bool of a mask"""


def explain(
    error: Exception,
    model: nn.Module,
    sizes: SizeConditions | None = None,
    arguments: str = "",
) -> CaptureError:
    """One readable error for what stopped the capture of `model`; `raise explain(error, model,
    sizes) from error`.

    With `sizes`, noted by `size_conditions` during the export, conditions on the batch size have a
    line too. `arguments`: which element of the batch went to which argument; said where the forward
    may have got the wrong one.
    """
    if isinstance(error, CaptureError):
        return error
    raised, place = _error_place(error, module_names(model))
    places = [place] if place.inside else []
    went = ""
    if known := _known(error, place):
        rule, words = known
        wrong = rule.wrong.format(**words)
        advice = rule.advice.format(**words)
        if rule.when == _AFTER_FORWARD and sizes is not None:
            places = sizes.equations()
            if any(_NUMBER_OF_SIZE.search(each.source) for each in places):
                advice = _NUMBER_ADVICE
    elif place.in_loss:
        wrong = f"the loss raised {type(raised).__name__}: {_message(raised)}"
        advice = (
            "Whale calls `loss(output, batch)` with what the model gives and the whole batch: "
            '`loss=lambda output, batch: F.cross_entropy(output, batch["labels"])`'
        )
    elif place.inside:
        wrong = f"the forward raised {type(raised).__name__}: {_message(raised)}"
        advice = (
            "call the model on the sample batch without Whale; if it fails in the same way, the "
            "mistake is in this line"
        )
        if isinstance(raised, _ABOUT_ARGUMENTS) and not isinstance(raised, NotImplementedError):
            went = arguments
    else:
        wrong = f"torch.export raised {type(error).__name__}: {_message(error)}"
        advice = (
            "try `torch.export.export` on the model alone with `strict=False`; if that works, "
            "please report the model to us"
        )
    where = [f"  at {each.describe()}" for each in places] or [f"  in {type(model).__name__}"]
    lines = ["The model cannot be captured.", *where, f"  What is wrong: {wrong}."]
    if went:
        lines.append(f"  The batch has no names: {went}. If that is not meant, give it as a dict.")
    explained = CaptureError("\n".join([*lines, f"  Try: {advice}."]))
    explained.__cause__ = error
    return explained


def both_paths(for_exports: CaptureError | None, in_training: CaptureError) -> CaptureError:
    """One error of what stopped a model on its path for exports, if that was tried, and then on
    that of training.
    """
    if for_exports is None or str(for_exports) == str(in_training):
        return in_training
    return CaptureError(
        f"{for_exports}\n"
        "Tried again with `torch.compiler.is_exporting()` as in training, False:\n"
        f"{in_training}"
    )
