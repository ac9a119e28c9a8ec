"""Model and sample batch in, one clean graph with a symbolic batch out: each pass in its order."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch.export.graph_signature import InputKind
from torch.fx import Graph, Node

from whale.annotation import Mark, marks_by_module
from whale.annotation.marks import FORWARD_TAG
from whale.capture.batch import BatchLayout
from whale.capture.experts import use_expert_mm
from whale.capture.export import Exported, Task, export_loss, export_outputs, local_name
from whale.capture.functional import make_functional
from whale.capture.graph import CapturedGraph, StateTensor
from whale.capture.guards import Findings
from whale.capture.inline import drop_asserts, inline_regions
from whale.capture.simplify import simplify
from whale.names import nearest

_STATE_KINDS = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
}


@dataclass
class Capture:
    """A clean graph, who marked what in it, and what was noticed on the way."""

    captured: CapturedGraph
    forward_marks: list[Mark]
    """scopes that `forward` entered, in order"""
    findings: Findings
    layout: BatchLayout
    output_structure: Any = None
    output_is_tensor: tuple[bool, ...] = ()
    has_loss: bool = True


def capture_training(
    model: torch.nn.Module, layout: BatchLayout, tensors: list[torch.Tensor], task: Task
) -> Capture:
    """The loss in training mode. Submodules that the user put in eval mode (frozen BatchNorm) stay
    so.
    """
    modes = [(module, module.training) for module in model.modules()]
    notes = []
    try:
        if not model.training:
            model.train()
            notes.append("the model was in eval mode; engine.step trains it in training mode")
        capture = _clean(export_loss(model, layout, tensors, task), model, layout)
    finally:
        for module, mode in modes:
            module.training = mode
    capture.captured.notes.extend(notes)
    return capture


def capture_evaluation(
    model: torch.nn.Module, layout: BatchLayout, tensors: list[torch.Tensor], task: Task
) -> Capture:
    """Loss and outputs in eval mode."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        return _clean(export_outputs(model, layout, tensors, task), model, layout)
    finally:
        for module, mode in modes:
            module.training = mode


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Every parameter and buffer name -> the first name of the same tensor. Found by identity: meta
    tensors have no address.
    """
    first: dict[int, str] = {}
    names = {}
    for kind in (
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    ):
        for name, tensor in kind:
            names[name] = first.setdefault(id(tensor), name)
    return names


def _clean(exported: Exported, model: torch.nn.Module, layout: BatchLayout) -> Capture:
    program = exported.program
    inline_regions(program.graph_module)
    graph = program.graph_module.graph
    drop_asserts(graph)
    state, constants = _lower_state(program, graph, tied_names(model), model)
    parameters = [
        node
        for node in graph.nodes
        if node.op == "get_attr" and state[str(node.target)].kind == "parameter"
    ]
    updates = make_functional(graph, parameters)
    simplify(graph)
    num_products = use_expert_mm(graph)
    _strip_names(graph)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    batched = next(
        node for node, described in zip(inputs, layout.tensors, strict=True) if described.batched
    )
    captured = CapturedGraph(
        graph=graph,
        inputs=layout.tensors,
        state=state,
        constants=constants,
        batch_symbol=batched.meta["val"].shape[0].node.expr,
        batch_size=max(layout.batch_size, 2),
        buffer_updates={
            str(node.target): value for node, value in updates.items() if node.op == "get_attr"
        },
    )
    captured.notes.extend(
        f"{t.path} has no batch dimension: every device gets it whole"
        for t in layout.tensors
        if not t.batched
    )
    captured.notes.extend(
        f"{path} is not a tensor and is left out of evaluation outputs"
        for path in exported.dropped_outputs
    )
    if num_products:
        captured.notes.append(
            f"{num_products} products of tokens with their experts are computed in the order of "
            "the tokens, not sorted"
        )
    captured.notes.extend(_left_to_the_loss(exported, model, layout, inputs))
    for name, (before, after) in exported.changed_numbers.items():
        captured.notes.append(
            f"forward changes {name} from {before} to {after}: the captured graph keeps what it "
            "did with it in this call"
        )
    recomputed = [finding.name for finding in exported.findings.checkpoints()]
    if recomputed:
        captured.notes.append(
            f"torch.utils.checkpoint: {len(recomputed)} regions ({recomputed[0]} first) are "
            "computed again in backward"
        )
    for finding in exported.findings.gradient_changes():
        captured.notes.append(
            f"{finding.kind} `{finding.name}` at {finding.place} is not run; the captured "
            "gradients agree with it"
        )
    return Capture(
        captured,
        exported.forward_marks,
        exported.findings,
        layout,
        exported.output_structure,
        exported.output_is_tensor,
        exported.has_loss,
    )


def _lower_state(
    program: Any, graph: Graph, ties: dict[str, str], model: torch.nn.Module
) -> tuple[dict[str, StateTensor], dict[str, torch.Tensor]]:
    """Turns the placeholders of parameters, buffers and constants into one `get_attr` node for each
    tensor.
    """
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    trainable = {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    }
    aliases: dict[str, list[str]] = {}
    for name, first in ties.items():
        if name != first:
            aliases.setdefault(first, []).append(name)
    state: dict[str, StateTensor] = {}
    constants: dict[str, torch.Tensor] = {}
    nodes: dict[str, Node] = {}
    top = placeholders[
        next(
            s.arg.name
            for s in program.graph_signature.input_specs
            if s.kind == InputKind.USER_INPUT
        )
    ]
    for spec in program.graph_signature.input_specs:
        kind = _STATE_KINDS.get(spec.kind)
        if kind is None:
            if spec.kind != InputKind.USER_INPUT:
                raise ValueError(
                    f"the model uses {spec.arg.name}, a {spec.kind.name} that Whale cannot place: "
                    "make it a tensor or a Python constant"
                )
            continue
        old = placeholders[spec.arg.name]
        name = local_name(spec.target)
        if kind == "constant":
            constants[name] = program.constants[spec.target]
        else:
            name = ties.get(name, name)
        if name not in nodes:
            with graph.inserting_before(top):
                nodes[name] = graph.create_node("get_attr", name)
            nodes[name].meta["val"] = old.meta["val"]
            state[name] = StateTensor(
                name,
                kind,
                tuple(old.meta["val"].shape),
                old.meta["val"].dtype,
                kind == "parameter" and name in trainable,
                tuple(aliases.get(name, ())),
            )
        old.replace_all_uses_with(nodes[name])
        graph.erase_node(old)
    return state, constants


def _left_to_the_loss(
    exported: Exported, model: torch.nn.Module, layout: BatchLayout, inputs: list[Node]
) -> list[str]:
    """What only the loss gets of the batch. What the loss does not use either may be a misspelt
    argument, which is refused.
    """
    left = exported.left_to_the_loss
    unused = {
        tensor.path for node, tensor in zip(inputs, layout.tensors, strict=True) if not node.users
    }
    for key in left:
        hint = nearest(key.strip("[']"), inspect.signature(model.forward).parameters)
        if key in unused and hint:
            raise ValueError(
                f"{key} of the batch: neither forward has an argument of this name, nor does the "
                f"loss use it.{hint}"
            )
    return (
        [f"{', '.join(left)}: forward has no such argument, only the loss gets it"] if left else []
    )


def _strip_names(graph: Graph) -> None:
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if stack:
            node.meta["nn_module_stack"] = {
                key: (local_name(name), kind)
                for key, (name, kind) in stack.items()
                if not name.startswith("_empty")
            }


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
