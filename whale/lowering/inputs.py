"""The tensors of a mini-batch on the device of one rank: those that its stages read, and of them
only its own samples.

Values of the whole mini-batch (denominators of the loss: how many labels count) need all samples of
what they are computed from. A rank that is given whole batches copies these tensors whole; ranks
that load only their own samples (`engine.loader`) put them together.

On an accelerator a copy begins in pinned memory and runs beside compute, so that the batch of the
next step arrives while this one runs (`engine.prefetch`, `engine.loader`). On a CPU nothing is
copied: a sample is a slice of the user's tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from whale.capture.prepare import CapturedModel
from whale.devices import DeviceCopy
from whale.dtypes import as_bytes
from whale.lowering.chunk import Chunk
from whale.plans.plan import Plan
from whale.plans.slices import Interval

if TYPE_CHECKING:
    from whale.distributed.ranks import Ranks

aten = torch.ops.aten


@dataclass(frozen=True)
class CopiedBatch:
    """What a rank has of one mini-batch, on its way to the device."""

    tensors: Sequence[DeviceCopy]
    """by place among the inputs"""
    whole: Mapping[int, DeviceCopy]
    """place -> the same of all samples, where this rank needs it and `tensors` has only its own"""
    has_own_rows: bool
    """`tensors` have only this rank's samples, micro-batch after micro-batch"""


class BatchInputs:
    """Brings mini-batches to the chunks of one rank."""

    def __init__(
        self,
        plan: Plan,
        prepared: CapturedModel,
        chunks: Mapping[int, Chunk],
        ranks: Ranks,
        gives_rows: bool | None = None,
    ) -> None:
        """`gives_rows`: None where the ranks of a stage have all samples together. Model replicas
        that are not alike put rows together on all ranks; this one gives its rows or others have
        the same.
        """
        self._plan = plan
        self._prepared = prepared
        self._chunks = chunks
        self._ranks = ranks
        self._gives_rows = gives_rows

    # ---- what is read

    @cached_property
    def _read(self) -> frozenset[int]:
        """Places of placeholders that this rank's chunks read."""
        found: set[int] = set()
        for chunk in self._chunks.values():
            found.update(chunk.inputs)
        return frozenset(found)

    @cached_property
    def _stages_with_whole_values(self) -> list[int]:
        """Stages of this rank that read values of the whole mini-batch: placeholders behind the
        tensors of the batch.
        """
        num_inputs = len(self._prepared.captured.inputs)
        found = []
        for stage, chunk in self._chunks.items():
            if any(place >= num_inputs for place in chunk.inputs):
                found.append(stage)
        return found

    @property
    def _computes_whole_values(self) -> bool:
        """Whether this rank needs values of the whole mini-batch, or has to help others to them."""
        return bool(self._stages_with_whole_values) or self._gives_rows is not None

    @property
    def _read_whole(self) -> frozenset[int]:
        """Places of inputs that this rank needs of all samples."""
        return self._behind_whole_values if self._stages_with_whole_values else frozenset()

    @cached_property
    def _behind_whole_values(self) -> frozenset[int]:
        """Places of inputs of which whole-mini-batch values read more than the size."""
        graph = self._prepared.loss.whole_graph
        if graph is None:
            return frozenset()
        found = set()
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        for place, node in enumerate(placeholders):
            if any(user.target is not aten.sym_size.int for user in node.users):
                found.add(place)
        return frozenset(found)

    # ---- copying

    def copy(self, tensors: Sequence[Tensor], samples: Sequence[Interval]) -> CopiedBatch:
        """Begins to copy a whole mini-batch of which this rank trains on these samples, an interval
        for each micro-batch.
        """
        device = self._ranks.device
        on_host = all(tensor.device.type == "cpu" for tensor in tensors)
        cuts = device.is_accelerator and on_host
        copies = []
        whole = {}
        for place, tensor in enumerate(tensors):
            is_cut = cuts and self._prepared.captured.inputs[place].batched
            if is_cut and place in self._read_whole:
                whole[place] = device.start_copy(tensor)
            if is_cut and place in self._read:
                copies.append(device.start_copy(tensor, samples))
            elif place in self._read or place in self._read_whole:
                copies.append(device.start_copy(tensor))
            else:
                copies.append(DeviceCopy(tensor))
        return CopiedBatch(copies, whole, cuts)

    def copy_rows(self, tensors: Sequence[Tensor]) -> CopiedBatch:
        """Starts the copies of a batch of which this rank has only the rows of its own samples."""
        device = self._ranks.device
        read = self._read
        if self._computes_whole_values:
            read = read | self._behind_whole_values
        copies = []
        for place, tensor in enumerate(tensors):
            copies.append(device.start_copy(tensor) if place in read else DeviceCopy(tensor))
        return CopiedBatch(copies, {}, has_own_rows=True)

    # ---- the graph's placeholders

    def placeholders(self, batch: CopiedBatch, batch_size: int) -> list[Tensor]:
        """Tensors of the batch on this device, and the values that need all of a whole
        mini-batch.
        """
        here = [copy.take() for copy in batch.tensors]
        graph = self._prepared.loss.whole_graph
        if graph is None or not self._stages_with_whole_values:
            return here
        inputs = []
        for place, tensor in enumerate(here):
            is_batched = self._prepared.captured.inputs[place].batched
            if place in batch.whole:
                inputs.append(batch.whole[place].take())
            elif is_batched and batch.has_own_rows:
                inputs.append(self._only_size(tensor, batch_size))
            else:
                inputs.append(tensor)
        with torch.no_grad():
            return [*here, *graph(*inputs)]

    def placeholders_of_rows(
        self, batch: CopiedBatch, samples: Sequence[Interval], batch_size: int
    ) -> list[Tensor]:
        """Placeholders of a batch of which this rank has only the rows of `samples`: what
        whole-mini-batch values read is put together by all devices.
        """
        here = [copy.take() for copy in batch.tensors]
        graph = self._prepared.loss.whole_graph
        if graph is None or not self._computes_whole_values:
            return here
        described = self._prepared.captured.inputs
        if not here:  # no sample for this device; it takes part in the sums all the same
            device = self._ranks.device.name
            for given in described:
                here.append(torch.empty((0, *given.shape[1:]), dtype=given.dtype, device=device))
        group = self._group_with_all_samples()
        if self._gives_rows is False:
            samples = ()
        inputs = []
        for place, tensor in enumerate(here):
            if not described[place].batched:
                inputs.append(tensor)
            elif place in self._behind_whole_values:
                inputs.append(_whole_rows(tensor, samples, batch_size, group))
            else:
                inputs.append(self._only_size(tensor, batch_size))
        with torch.no_grad():
            return [*here, *graph(*inputs)]

    def _only_size(self, tensor: Tensor, batch_size: int) -> Tensor:
        """An input of which nothing but the size is read, of the size that the whole one has."""
        shape = tensor.shape[1:]
        row = torch.empty((1, *shape), dtype=tensor.dtype, device=self._ranks.device.name)
        return row.expand(batch_size, *shape)

    def _group_with_all_samples(self) -> dist.ProcessGroup | None:
        """Ranks that together read every sample once, this one included: on a grid, this place in
        all replicas.
        """
        if self._gives_rows is not None:
            return self._ranks.group(range(self._ranks.num_ranks))
        stage = min(self._stages_with_whole_values)
        device, _, place = self._plan.place_of_rank(self._ranks.rank)
        if self._plan.virtual_devices[device].grid is None:
            ranks = self._plan.ranks_of_stage(stage)
        else:
            ranks = tuple(members[place] for members in self._plan.virtual_devices[device].ranks)
        return self._ranks.group(ranks) if len(ranks) > 1 else None


def _whole_rows(
    tensor: Tensor,
    samples: Sequence[Interval],
    batch_size: int,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """The whole tensor on every device of a stage, each of which has its own rows."""
    full = tensor.new_zeros((batch_size, *tensor.shape[1:]))
    start = 0
    for first, last in samples:
        full[first:last] = tensor[start : start + last - first]
        start += last - first
    if group is not None:
        # every byte is zero on all devices but one
        dist.all_reduce(as_bytes(full.view(-1)), group=group)
    return full


def own_rows(samples: Sequence[Interval]) -> list[Interval]:
    """Where the samples of each micro-batch lie in tensors that have only these."""
    rows = []
    start = 0
    for first, last in samples:
        rows.append((start, start + last - first))
        start += last - first
    return rows
