"""One call of `torch.export` on a prepared model: fake weights, cloned inputs, only the loss (and
asked-for outputs) leave.

The traps that this module avoids are listed with figures in docs/capture.md.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import torch
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.traceback import annotate, preserve_node_meta

from whale.annotation import Mark, collect_forward_marks
from whale.capture.batch import BatchLayout, enlarge
from whale.capture.errors import (
    CaptureError,
    SizeConditions,
    both_paths,
    explain,
    fixes_size,
    hashes_size,
    limits_batch,
    raised_by_model,
    size_conditions,
)
from whale.capture.fake_weights import fake_weights, refill
from whale.capture.forward_state import ForwardState
from whale.capture.guards import Findings, watch
from whale.capture.lengths import MAX_BATCH
from whale.capture.model_call import (
    Loss,
    call_model,
    left_to_the_loss,
    loss_of,
    no_loss,
    output_leaves,
    taken_by_forward,
)
from whale.capture.progress import progress
from whale.capture.python_state import assigned_buffers_written, random_branches
from whale.capture.stand_ins import not_exporting, sizes_stay_symbols, stand_ins
from whale.capture.state_places import Change
from whale.compat import fake_mode, is_fake, tensor_stores
from whale.compat.exporting import export_patches

SECOND_CALL = "second call"
"""key in `node.meta["custom"]`: True for the nodes of the second of two calls, False for the copies
of buffers that it starts with
"""
MODEL_PREFIX = "model."  # the attribute of the wrapper that holds the user's model


@dataclass(frozen=True)
class Task:
    """What is captured of a model: its loss, on a type of device, under autocast or not."""

    loss: Loss | None
    device: str
    autocast: torch.dtype | None = None
    cache_folder: str | None = None
    """where captures are kept (`"capture_cache"`)"""

    def run(self, model: torch.nn.Module, batch: Any) -> tuple[Any, Callable[[], Any]]:
        """(output, function that gives its loss); both under autocast when that is asked for."""
        with self.precision():
            taken = batch if self.loss is None else taken_by_forward(model, batch)
            output = call_model(model, taken)

        def loss() -> Any:
            with self.precision():
                return loss_of(output, batch, self.loss)

        return output, loss

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device, self.autocast)


@dataclass
class Seen:
    """What the exported forward gave besides tensors. An object of its own: export takes back what
    forward writes on the module itself.
    """

    has_loss: bool = True
    output_is_loss: bool = False
    """the model gives the loss itself, not something that holds it"""
    output_structure: Any = None
    """pytree structure of the outputs (evaluation only)"""
    output_is_tensor: tuple[bool, ...] = ()
    """which leaves of that structure are tensors"""
    dropped_outputs: tuple[str, ...] = ()
    changed: Mapping[str, Change] = field(default_factory=dict)
    """what forward left in Python: name -> (before, after)"""
    rebuilt: tuple[str, ...] = ()
    """buffers that forward made anew, in another form"""


@dataclass
class Exported:
    """What one export gives, before the graph is made clean."""

    program: ExportedProgram
    forward_marks: list[Mark]
    findings: Findings
    seen: Seen
    left_to_the_loss: tuple[str, ...]
    """parts of the batch that the forward has no argument for"""


def export_model(
    model: torch.nn.Module,
    layout: BatchLayout,
    tensors: list[torch.Tensor],
    task: Task,
    with_outputs: bool = False,
    earlier: BatchLayout | None = None,
) -> Exported:
    """Exports `batch -> (loss,)` in the model's present mode; with outputs, `batch -> (loss if
    there is one, *output tensors)`. With `earlier` the model is called twice, first with a batch of
    that layout, and both calls give their results.
    """
    device = task.device
    mode = fake_mode()
    layouts = (layout,) if earlier is None else (earlier, layout)
    samples = enlarge(layout, tensors)
    if earlier is not None:
        empty = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in earlier.tensors]
        samples = [*enlarge(earlier, empty), *samples]
    # one fake tensor for each place: export merges two inputs that are one object
    # (labels=input_ids)
    with mode:
        inputs = [torch.empty(tuple(t.shape), dtype=t.dtype, device=device) for t in samples]
    with contextlib.ExitStack() as around:
        # before the weights become fake: hooks sit on the tensors
        findings = around.enter_context(watch(model))
        wrapper = _LossOf(model, layouts, task, with_outputs)
        state = ForwardState(model, task.loss)
        around.callback(state.restore)
        unused = around.enter_context(fake_weights(wrapper, mode, device))
        marks = around.enter_context(collect_forward_marks())
        attempt = _ExportAttempt(any_batch=earlier is None)  # two batches have two sizes
        for_exports: CaptureError | None = None
        while True:
            state.restore()
            unused()
            with size_conditions(model) as sizes:
                try:
                    program = _export(wrapper, inputs, findings, attempt)
                    _refuse_lost_writes(program)
                    break
                except Exception as error:
                    following = attempt.after(error, sizes, model)
                    if following is None or following.as_trained > attempt.as_trained:
                        went = _arguments_taken(model, layout, task)
                        explained = explain(error, model, sizes, went)
                        if following is None:
                            raise both_paths(for_exports, explained) from error
                        for_exports = explained
                    attempt = following
            marks.clear()
    left = []
    if task.loss is not None:
        left = left_to_the_loss(model, layout.rebuild(samples[-len(layout.tensors) :]))
    return Exported(program, marks, findings, wrapper.seen, tuple(left))


_READS_SIZE = re.compile(r"\bint\b|\blen\b")
_FLOAT_OF_SIZE = re.compile(r"\bfloat\(")


@dataclass(frozen=True)
class _ExportAttempt:
    """What an export tries beyond the plain form. Most models need nothing."""

    files: frozenset[str] = frozenset()
    """where `int(size)` and `len(tensor)` leave the size a symbol"""
    floats: frozenset[str] = frozenset()
    """where `float(size)` does; not in all files of the above, for `dtype=float` is another use"""
    any_batch: bool = True
    """the graph must hold for every number of samples; otherwise for those that its conditions name
    (`Conditions`): a branch on the batch size is the one that the sample batch takes
    """

    hashed: frozenset[str] = frozenset()
    """where `int(size)` gives a number that stands for it: these hash sizes (`SizeNumbers`)"""

    as_trained: bool = False
    """a model that asks `torch.compiler.is_exporting()` hears no: its path for exports fails"""

    def after(
        self, error: Exception, sizes: SizeConditions, model: torch.nn.Module
    ) -> _ExportAttempt | None:
        """What to try after this error; None: nothing helps."""
        if fixes_size(error):
            places = sizes.equations()
            reads = {place.file for place in places if _READS_SIZE.search(place.source)}
            floats = {place.file for place in places if _FLOAT_OF_SIZE.search(place.source)}
            following = replace(
                self, files=self.files | (reads - self.hashed), floats=self.floats | floats
            )
            return following if following != self else None
        if hashing := hashes_size(error) & self.files:
            return replace(self, files=self.files - hashing, hashed=self.hashed | hashing)
        if self.any_batch and limits_batch(error):
            return replace(self, any_batch=False)
        if not self.as_trained and raised_by_model(error, model):
            return replace(self, as_trained=True)
        return None


def _export(
    wrapper: _LossOf, inputs: list[torch.Tensor], findings: Findings, attempt: _ExportAttempt
) -> ExportedProgram:
    """`torch.export` with everything that Whale changes around it."""
    with (
        progress(type(wrapper.model).__name__) as shown,
        warnings.catch_warnings(),
        _no_graph_dump(),
        random_branches(wrapper.model, findings),
        stand_ins(),
        sizes_stay_symbols(attempt.files, attempt.hashed, attempt.floats),
        not_exporting() if attempt.as_trained else contextlib.nullcontext(),
        preserve_node_meta(),
        export_patches(shown.note),
    ):
        # not strict: dynamo refuses more models, and loses hooks and Functions all the same
        dims = [
            each for layout in wrapper.layouts for each in _symbolic_dims(layout, attempt.any_batch)
        ]
        # such as the list that recurrent layers keep of their weights: see `second_call`
        warnings.filterwarnings("ignore", r"The tensor attributes? .* assigned during export")
        return torch.export.export(wrapper, (inputs,), dynamic_shapes=(dims,), strict=False)


def _arguments_taken(model: torch.nn.Module, layout: BatchLayout, task: Task) -> str:
    """Which element of a batch went to which argument of `forward`, for messages; empty for
    keyword arguments.
    """
    batch = layout.rebuild([torch.empty(t.shape, device="meta") for t in layout.tensors])
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        return ""
    taken = batch if task.loss is None else taken_by_forward(model, batch)
    names = [name for name, each in signature(model.forward).parameters.items()]
    pairs = [f"[{place}] went to `{name}`" for place, name in enumerate(names[: len(taken)])]
    rest = [f"[{place}] to the loss" for place in range(len(taken), len(batch))]
    return ", ".join([*pairs, *rest])


class _LossOf(torch.nn.Module):
    """The model as it is exported: its loss leaves, on request also its output tensors."""

    def __init__(
        self,
        model: torch.nn.Module,
        layouts: Sequence[BatchLayout],
        task: Task,
        with_outputs: bool,
    ) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        self.layouts = layouts
        self.task = task
        self.with_outputs = with_outputs
        self.seen = Seen()

    def forward(self, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        earlier = self.layouts[0]
        layout = self.layouts[-1]
        if len(self.layouts) == 1:
            state = ForwardState(self.model, self.task.loss)
            results = self._call(layout, tensors)
            self.seen.changed = state.changed()
            return results
        number = len(earlier.tensors)
        with _own_buffers(self.model) as reset:
            first = self._call(earlier, tensors[:number], keep_rebuilt=True)
            reset()
            with annotate({SECOND_CALL: True}):
                return (*first, *self._call(layout, tensors[number:], keep_rebuilt=True))

    def _call(
        self, layout: BatchLayout, tensors: list[torch.Tensor], keep_rebuilt: bool = False
    ) -> tuple[torch.Tensor, ...]:
        _equal_sizes(layout, tensors)
        batch = layout.rebuild(tensors)
        with assigned_buffers_written(self.model, keep_rebuilt) as rebuilt:
            output, loss = self.task.run(self.model, batch)
            value = self._value(loss)
        self.seen.rebuilt = tuple(rebuilt)
        has_loss = isinstance(value, torch.Tensor) and value.ndim == 0 and value.is_floating_point()
        self.seen.output_is_loss = has_loss and value is output
        if not self.with_outputs:
            if not has_loss:
                raise CaptureError(no_loss(output, value, self.task.loss))
            return (value,)
        leaves, structure, dropped = output_leaves(output)
        seen = self.seen
        seen.has_loss = has_loss
        seen.output_structure = structure
        seen.output_is_tensor = tuple(leaf is not None for leaf in leaves)
        seen.dropped_outputs = tuple(dropped)
        outputs = [leaf for leaf in leaves if leaf is not None]
        return (value, *outputs) if has_loss else tuple(outputs)

    def _value(self, loss: Callable[[], Any]) -> Any:
        """What the loss function gives; None for the evaluation of a batch without labels."""
        try:
            return loss()
        except (AttributeError, KeyError, TypeError):
            if not self.with_outputs:
                raise
            return None


@contextlib.contextmanager
def _own_buffers(model: torch.nn.Module) -> Iterator[Callable[[], None]]:
    """Gives a function that puts buffers back to what they were at the beginning, but for those
    that forward made anew.
    """
    stores = [tensor_stores(module)[1] for module in model.modules()]
    before = [(store, dict(store)) for store in stores]
    copies: dict[int, torch.Tensor] = {}  # tied buffers stay tied
    with annotate({SECOND_CALL: False}):
        for old in (old for _, own in before for old in own.values()):
            if old is not None and id(old) not in copies:
                copies[id(old)] = old.clone()

    def reset() -> None:
        for store, own in before:
            for name, old in own.items():
                if old is not None and store.get(name) is old:
                    store[name] = copies[id(old)]

    try:
        yield reset
    finally:
        refill(before)


def _symbolic_dims(layout: BatchLayout, any_batch: bool) -> list[dict[int, Any] | None]:
    """Dims of each tensor that stay symbols in the graph: the samples, and lengths that vary. Every
    other dim is a number, and another number is another capture.
    """
    samples = Dim("batch", max=MAX_BATCH) if any_batch else Dim.DYNAMIC
    found: list[dict[int, Any] | None] = []
    for tensor in layout.tensors:
        # no named dims: those would have to name their limits (a table of positions) beforehand
        dims: dict[int, Any] = {dim: Dim.DYNAMIC for dim, _ in tensor.lengths}
        if tensor.batched:
            dims[0] = samples
        found.append(dims or None)
    return found


def _equal_sizes(layout: BatchLayout, tensors: Sequence[torch.Tensor]) -> None:
    """Tells the export which dims have one size in every batch, so that they become one symbol;
    `Conditions` holds batches to that. A name of dims (`Dim("batch")`) says it only at the end: a
    model that joins two inputs has a sum of two symbols until then.
    """
    sizes: dict[str, Any] = {}
    for tensor, described in zip(tensors, layout.tensors, strict=True):
        named = list(described.lengths)
        if described.batched:
            named.append((0, "batch"))
        for dim, name in named:
            first = sizes.setdefault(name, tensor.shape[dim])
            if first != tensor.shape[dim]:  # the export notes that they are equal
                raise ValueError(
                    f"{described.path} has the size {tensor.shape[dim]} in dim {dim}, another "
                    f"tensor of the batch {first}: both were said to be {name!r}"
                )


@contextlib.contextmanager
def _no_graph_dump() -> Iterator[None]:
    """An export that fails prints its half-made graph, pages of it, before the error that says what
    is wrong.
    """
    written = io.StringIO()
    dump = ""
    try:
        with contextlib.redirect_stderr(written):
            yield
    except Exception as error:
        dump = str(getattr(error, "partial_fx_graph", ""))
        raise
    finally:
        text = written.getvalue()
        sys.stderr.write(text.replace(dump + "\n", "") if dump else text)


def _refuse_lost_writes(program: ExportedProgram) -> None:
    """What is computed outside the graph leaves a fake constant behind and is otherwise lost
    without a word.
    """
    for spec in program.graph_signature.input_specs:
        # buffers that are not saved also stand in program.constants, and may be fake
        if spec.kind != InputKind.CONSTANT_TENSOR:
            continue
        name = str(spec.target)
        if is_fake(program.constants[name]):
            module = local_name(name).rpartition(".")[0] or "the model"
            raise CaptureError(
                f"a tensor made in `{module}` is written outside the graph (`loss.backward()` in "
                "forward, an operation that torch cannot trace): the capture would lose that. "
                "Try: operations of torch whose results are new tensors, `with torch.no_grad():` "
                "for values without gradient, and the formula of a gradient"
            )


def local_name(exported_name: str) -> str:
    """Name in the user's model: without the wrapper's prefix and the call number (`layer@2`)."""
    name = re.sub(r"@\d+", "", exported_name)
    return "" if name == MODEL_PREFIX[:-1] else name.removeprefix(MODEL_PREFIX)
