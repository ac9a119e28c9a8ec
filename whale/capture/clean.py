"""Makes an exported graph clean: one flat functional graph with a symbolic batch, the weights under
the names of the user's model.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from whale.annotation import FORWARD_TAG, Mark, marks_by_module
from whale.capture.batch import MIN_SAMPLES, BatchLayout
from whale.capture.experts import use_expert_mm
from whale.capture.export import Exported, local_name
from whale.capture.forward_state import numbers_of
from whale.capture.functional import make_functional
from whale.capture.graph import CapturedGraph, StateTensor
from whale.capture.guards import Findings
from whale.capture.inline import drop_asserts, inline_regions
from whale.capture.lengths import lengths_of
from whale.capture.out_of_place import refuse as refuse_write
from whale.capture.simplify import simplify
from whale.names import nearest
from whale.operations.operation import Shapes

_STATE_KINDS = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
}


@dataclass
class Capture:
    """A clean graph, the annotations in it, and what was noticed during the export."""

    captured: CapturedGraph
    forward_marks: list[Mark]
    """scopes that `forward` entered, in order"""
    findings: Findings
    layout: BatchLayout
    output_structure: Any = None
    output_is_tensor: tuple[bool, ...] = ()
    has_loss: bool = True
    output_is_loss: bool = False
    cached_in: Path | None = None
    """file that it was read from (`"capture_cache"`)"""


def _complete_users(graph: Graph) -> None:
    """Every node is among the users of its inputs.

    `torch.export` forgets a user where it moves operations into the sub-graph of a `no_grad` block
    (seen in 2.13), and erasing that user fails later.
    """
    for node in graph.nodes:
        for source in node.all_input_nodes:
            source.users.setdefault(node)


def _refuse_written_constants(updates: Mapping[Node, Node], constants: Mapping[str, Any]) -> None:
    """A rank has no place for the new value of a tensor that is no buffer of the model."""
    for owner, value in updates.items():
        if owner.op == "get_attr" and str(owner.target) in constants:
            refuse_write(
                value,
                "writes to a tensor that is no buffer of the model (of the loss, or a plain "
                "attribute), and the next step would not have what was written",
                "make it a buffer of the model (`register_buffer`), or give it in the batch",
            )


def clean(exported: Exported, model: torch.nn.Module, layout: BatchLayout) -> Capture:
    """The passes over the exported graph, in their order."""
    graph, state, constants, updates = flat_graph(exported.program, model)
    _refuse_written_constants(updates, constants)
    # only now: in a graph with writes an alias or a detach is not superfluous
    lengths = lengths_of(graph, layout)
    simplify(graph, {length.symbol: length.size for length in lengths})
    inputs = zip(graph.find_nodes(op="placeholder"), layout.tensors, strict=True)
    batched = next(node for node, tensor in inputs if tensor.batched)
    batch_symbol = batched.meta["val"].shape[0].node.expr
    num_products = use_expert_mm(graph, Shapes(batch_symbol))
    forget_device_indices(graph)
    _strip_names(graph)
    captured = CapturedGraph(
        graph=graph,
        inputs=layout.tensors,
        state=state,
        constants=constants,
        batch_symbol=batch_symbol,
        batch_size=max(layout.batch_size, MIN_SAMPLES),
        lengths=lengths,
        # a write to an input of the batch dies with the step
        buffer_updates={str(n.target): value for n, value in updates.items() if n.op == "get_attr"},
    )
    _refuse_misspelt_inputs(captured, exported.left_to_the_loss, model)
    captured.notes.extend(_notes(exported, layout, num_products))
    seen = exported.seen
    return Capture(
        captured,
        exported.forward_marks,
        exported.findings,
        layout,
        seen.output_structure,
        seen.output_is_tensor,
        seen.has_loss,
        seen.output_is_loss,
    )


def flat_graph(
    program: ExportedProgram, model: torch.nn.Module
) -> tuple[Graph, dict[str, StateTensor], dict[str, torch.Tensor], dict[Node, Node]]:
    """The exported graph as one flat graph without writes, with weights as `get_attr`; the state by
    name, the values of constants, and {written state: node with its value after the forward}.
    """
    graph = program.graph_module.graph
    _complete_users(graph)
    # first, so that all later passes see one flat graph
    inline_regions(program.graph_module)
    # assertions would tie their inputs to one stage, and hold for every batch that export accepts
    drop_asserts(graph)
    state, constants = _lower_state(program, graph, model)
    attributes = graph.find_nodes(op="get_attr")
    parameters = [node for node in attributes if state[str(node.target)].kind == "parameter"]
    return graph, state, constants, make_functional(graph, parameters)


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Every parameter and buffer name -> the first name of the same tensor. Found by identity: meta
    tensors have no address.
    """
    first: dict[int, str] = {}
    names = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            names[name] = first.setdefault(id(tensor), name)
    return names


def _lower_state(
    program: ExportedProgram, graph: Graph, model: torch.nn.Module
) -> tuple[dict[str, StateTensor], dict[str, torch.Tensor]]:
    """Turns the placeholders of parameters, buffers and constants into one `get_attr` node for each
    tensor. Returns the state by name, and the values of constants.
    """
    ties = tied_names(model)
    aliases: dict[str, list[str]] = {}
    for name, first in ties.items():
        if name != first:
            aliases.setdefault(first, []).append(name)
    trained = {
        name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad
    }
    placeholders = {node.name: node for node in graph.find_nodes(op="placeholder")}
    specs = program.graph_signature.input_specs
    first_input = next(spec.arg.name for spec in specs if spec.kind == InputKind.USER_INPUT)
    state: dict[str, StateTensor] = {}
    constants: dict[str, torch.Tensor] = {}
    nodes: dict[str, Node] = {}
    for spec in specs:
        if spec.kind == InputKind.USER_INPUT:
            continue
        kind = _STATE_KINDS.get(spec.kind)
        if kind is None:
            raise ValueError(
                f"the model uses {spec.arg.name}, a {spec.kind.name} that Whale cannot place. "
                "Try: make it a tensor or a Python constant"
            )
        old = placeholders[spec.arg.name]
        fake = old.meta["val"]
        target = str(spec.target)
        name = local_name(target)
        if kind == "constant":
            constants[name] = program.constants[target]
        else:
            name = ties.get(name, name)
        if name not in nodes:  # a tied tensor has one node, under its first name
            with graph.inserting_before(placeholders[first_input]):
                nodes[name] = graph.create_node("get_attr", name)
            nodes[name].meta["val"] = fake
            trainable = kind == "parameter" and name in trained
            shared_names = tuple(aliases.get(name, ()))
            state[name] = StateTensor(
                name, kind, tuple(fake.shape), fake.dtype, trainable, shared_names
            )
        old.replace_all_uses_with(nodes[name])
        graph.erase_node(old)
    return state, constants


def forget_device_indices(graph: Graph) -> None:
    """Operations that name a device (`arange(..., device=x.device)`) name only its type.

    Fake tensors lie on the device that is current while the model is captured, with its index;
    the same graph runs on every rank, each on its own current device.
    """
    for node in graph.nodes:
        node.args = map_aggregate(node.args, _without_index)  # type: ignore[assignment]
        node.kwargs = map_aggregate(node.kwargs, _without_index)  # type: ignore[assignment]


def _without_index(value: Any) -> Any:
    return torch.device(value.type) if isinstance(value, torch.device) else value


def _strip_names(graph: Graph) -> None:
    """Module names as in the user's model, without the wrapper that was exported."""
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if stack:
            node.meta["nn_module_stack"] = {
                key: (local_name(name), kind)
                for key, (name, kind) in stack.items()
                if not name.startswith("_empty")
            }


def _refuse_misspelt_inputs(
    captured: CapturedGraph, left_to_the_loss: tuple[str, ...], model: torch.nn.Module
) -> None:
    """Part of the batch that neither the forward nor the loss uses may be a misspelt argument."""
    arguments = inspect.signature(model.forward).parameters
    for node, tensor in zip(captured.placeholders, captured.inputs, strict=True):
        if node.users or tensor.path not in left_to_the_loss:
            continue
        hint = nearest(tensor.path.strip("[']"), arguments)
        if hint:
            raise ValueError(
                f"{tensor.path} of the batch: neither forward has an argument of this name, nor "
                f"does the loss use it.{hint}"
            )


def _notes(exported: Exported, layout: BatchLayout, num_products: int) -> list[str]:
    """Notes of the plan on this capture."""
    notes = []
    for tensor in layout.tensors:
        if not tensor.batched:
            notes.append(f"{tensor.path} has no batch dimension: every device gets it whole")
    for path in exported.seen.dropped_outputs:
        notes.append(f"{path} is not a tensor and is left out of evaluation outputs")
    if num_products:
        notes.append(
            f"{num_products} products of tokens with their experts are computed in the order of "
            "the tokens, not sorted"
        )
    if exported.left_to_the_loss:
        paths = ", ".join(exported.left_to_the_loss)
        notes.append(f"{paths}: forward has no such argument, only the loss gets it")
    for name, (before, after) in numbers_of(exported.seen.changed).items():
        notes.append(
            f"forward changes {name} from {before} to {after}: the captured graph keeps what it "
            "did with it in this call"
        )
    recomputed = exported.findings.checkpoints()
    if recomputed:
        notes.append(
            f"torch.utils.checkpoint: {len(recomputed)} regions ({recomputed[0].name} first) are "
            "recomputed in backward"
        )
    for finding in exported.findings.gradient_changes():
        notes.append(
            f"{finding.kind} `{finding.name}` at {finding.place} is not run; the captured "
            "gradients agree with it"
        )
    return notes


def operation_marks(capture: Capture, model: torch.nn.Module) -> dict[Node, Mark]:
    """Annotation of each operation that has one: a scope in `forward` is closest to it, then the
    innermost marked module around it.
    """
    by_module = marks_by_module(model)
    marks = {}
    for node in capture.captured.compute_nodes():
        tag = (node.meta.get("custom") or {}).get(FORWARD_TAG)
        if tag is not None:
            marks[node] = capture.forward_marks[tag]
            continue
        for name, _ in reversed((node.meta.get("nn_module_stack") or {}).values()):
            if name in by_module:
                marks[node] = by_module[name]
                break
    return marks
