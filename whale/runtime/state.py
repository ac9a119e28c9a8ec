"""Tensors brought together on rank 0: the model's state, and evaluation outputs in sample order."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Node

from whale.capture.prepare import LOSS, CapturedModel
from whale.capture.sample_states import batch_dim
from whale.compat import pytree
from whale.distributed.ranks import Ranks
from whale.dtypes import as_moved, in_memory
from whale.lowering.program import Lowered, Program
from whale.plans.samples import SampleMap
from whale.plans.shards import Shard, Shards
from whale.runtime.executor import StepOutcome
from whale.runtime.result import Totals
from whale.runtime.shapes import evaluation_micro_batches


def gather_state(
    model: torch.nn.Module,
    weights: Mapping[str, Tensor],
    first_name: Mapping[str, str],
    shards: Shards,
    ranks: Ranks,
) -> dict[str, Tensor]:
    """The local model's `state_dict()` on rank 0, part by part from the first rank that
    holds each.
    """
    shapes = model.state_dict(keep_vars=True)
    first = {first_name[key]: tensor for key, tensor in shapes.items()}
    collected = gather_tensors(first, weights, shards, ranks)
    return {key: collected[first_name[key]] for key in shapes} if ranks.rank == 0 else {}


def gather_tensors(
    shapes: Mapping[str, Tensor], weights: Mapping[str, Tensor], shards: Shards, ranks: Ranks
) -> dict[str, Tensor]:
    """These tensors of the model, whole, on the CPU of rank 0, part by part from the first rank
    that holds each; none elsewhere. `shapes`: first name -> what has the whole shape and dtype.
    """
    collected: dict[str, Tensor] = {}
    for name in sorted(shapes):
        tensor = _gather(weights.get(name), shapes[name], shards.of(name), ranks)
        if tensor is not None:
            collected[name] = tensor
    return collected


def gather_gradients(
    model: torch.nn.Module,
    gradients: Mapping[str, Tensor],
    trained: Collection[str],
    shards: Shards,
    ranks: Ranks,
) -> dict[str, Tensor]:
    """The gradients of the parameters that were trained, whole, on rank 0."""
    parameters = dict(model.named_parameters())
    collected: dict[str, Tensor] = {}
    for name in sorted(trained):
        own = gradients.get(name)
        mine = next((shard for shard in shards.of(name) if ranks.rank in shard.ranks), None)
        if own is None and mine is not None:  # nothing here depends on it
            own = torch.zeros(
                mine.shape or parameters[name].shape,
                dtype=parameters[name].dtype,
                device=ranks.device.name,
            )
        elif own is not None and own.is_sparse:
            own = own.to_dense()
        tensor = _gather(own, parameters[name], shards.of(name), ranks)
        if tensor is not None:
            collected[name] = tensor
    return collected


def _gather(
    part: Tensor | None, like: Tensor, shards: Sequence[Shard], ranks: Ranks
) -> Tensor | None:
    """A whole tensor of the shape and type of `like`, on rank 0."""
    shape = tuple(like.shape)
    if len(shards) == 1 and shards[0].ranges is None:
        return _fetch(part, shape, like.dtype, shards[0].ranks[0], ranks)
    whole = torch.empty(shape, dtype=like.dtype) if ranks.rank == 0 else None
    for shard in shards:
        if shard.boxes(shape):
            fetched = _fetch(part, shard.shape or shape, like.dtype, shard.ranks[0], ranks)
            if whole is not None and fetched is not None:
                shard.put(fetched, whole)
    return whole


def _fetch(
    tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, owner: int, ranks: Ranks
) -> Tensor | None:
    """A tensor of rank `owner`, on the CPU of rank 0."""
    if ranks.rank == owner:
        assert tensor is not None
        if owner == 0:
            return tensor.detach().cpu().clone()
        own = in_memory(tensor.detach()).contiguous().to(ranks.device.name)
        dist.send(as_moved(own), 0, group=ranks.world)
    elif ranks.rank == 0:
        buffer = torch.empty(shape, dtype=dtype, device=ranks.device.name)
        dist.recv(as_moved(buffer), owner, group=ranks.world)
        return buffer.cpu()
    return None


def gather_outputs(
    lowered: Lowered, outcome: StepOutcome, program: Program, totals: Totals | None, ranks: Ranks
) -> Any:
    """The model's outputs as it would return them, on rank 0; None elsewhere."""
    prepared = lowered.prepared
    found: dict[Node, Tensor] = {}
    symbol = prepared.captured.batch_symbol
    samples = []
    for graph in lowered.graphs:
        number = evaluation_micro_batches(graph.plan, program.batch_size, prepared)
        samples.append(SampleMap(graph.plan, program.batch_size, number))
    for node in prepared.outputs:
        parts = _gather_parts(lowered, outcome, samples, node, ranks)
        if ranks.rank == 0:
            dim = batch_dim(node, symbol)
            found[node] = torch.cat(parts, dim) if dim is not None else reduce(torch.add, parts)
    if ranks.rank != 0:
        return None
    loss = (
        torch.tensor(totals.values()[0], dtype=prepared.terms[0].meta["val"].dtype)
        if totals is not None
        else None
    )
    leaves = [
        found[leaf] if isinstance(leaf, Node) else (loss if leaf == LOSS else None)
        for leaf in prepared.output_leaves
    ]
    return _rebuild(prepared, leaves)


def _gather_parts(
    lowered: Lowered,
    outcome: StepOutcome,
    samples: Sequence[SampleMap],
    node: Node,
    ranks: Ranks,
) -> list[Tensor]:
    """The parts of one output in the order of the samples (template, micro-batch, replica, device)
    on rank 0; none elsewhere. `samples`: of every template.

    Devices of a grid have a sum over all samples of their replica, so one of them gives it; what
    has no samples, one device in all.
    """
    has_samples = batch_dim(node, lowered.prepared.captured.batch_symbol) is not None
    owners: list[tuple[int, int]] = []
    for graph, own in zip(lowered.graphs, samples, strict=True):
        plan = graph.plan
        device = plan.virtual_devices[
            plan.stages[graph.assignment.result_stage[node]].virtual_device
        ]
        for micro_batch in range(own.num_micro_batch):
            for replica in range(plan.num_replicas):
                intervals = zip(
                    device.ranks[replica],
                    own.devices(micro_batch, replica, device.index),
                    strict=True,
                )
                holders = [(micro_batch, rank) for rank, (start, stop) in intervals if start < stop]
                owners += holders if has_samples or device.grid is None else holders[:1]
    if not has_samples and node not in lowered.prepared.summed_outputs:
        owners = owners[:1]
    stage = lowered.assignment.result_stage[node]
    place = lowered.outputs_of_stage(stage).index(node)
    parts = []
    for micro_batch, rank in owners:
        part = _exchange(
            outcome.outputs[stage, micro_batch][place] if rank == ranks.rank else None, rank, ranks
        )
        if part is not None:
            parts.append(part)
    return parts if ranks.rank == 0 else []


def _exchange(tensor: Tensor | None, owner: int, ranks: Ranks) -> Tensor | None:
    """A tensor of rank `owner` on the CPU of rank 0, as `_fetch` gives it, for a tensor whose shape
    only its owner knows.
    """
    if ranks.rank == owner:
        assert tensor is not None
        if owner == 0:
            return tensor.cpu()
        header = [tuple(tensor.shape), tensor.dtype]
        dist.send_object_list(header, 0)
        if tensor.numel():
            dist.send(as_moved(in_memory(tensor).contiguous()), 0, group=ranks.world)
    elif ranks.rank == 0:
        received: list[Any] = [None, None]
        dist.recv_object_list(received, owner)
        buffer = torch.empty(received[0], dtype=received[1], device=ranks.device.name)
        if buffer.numel():
            dist.recv(as_moved(buffer), owner, group=ranks.world)
        return buffer.cpu()
    return None


def _rebuild(prepared: CapturedModel, leaves: list[Tensor | None]) -> Any:
    """Puts the tensors back into the structure of the model's output; objects that are not tensors
    are None.
    """
    structure = prepared.capture.output_structure
    remaining = iter(leaves)
    slots = pytree.tree_unflatten(range(structure.num_leaves), structure)
    flags = prepared.capture.output_is_tensor
    return pytree.tree_map(lambda slot: next(remaining) if flags[slot] else None, slots)
