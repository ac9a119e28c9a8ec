"""Optimizers that look at whole parameters (Muon, Adafactor) where a grid cuts these: each
parameter has one owner among its holders (`Plan.owners`), which updates it whole.

    collect   the first holder of each part sends its gradient to the owner
    update    the owner's optimizer has the whole parameter, and its state is whole too; both are on
              the host where parts of the parameter are
    scatter   the owner sends every holder its part of the new value

Owners are chosen so that all have about as much work (`planning/zero_blocks.py`). Under ZeRO alone
nothing of this is needed: parameters are not cut then, each lies whole on one rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from whale.distributed.ranks import Ranks
from whale.plans.shards import Shard, Shards


class WholeUpdates:
    """One rank's side. All holders of a parameter go through parameters in the same order."""

    def __init__(
        self,
        owners: Mapping[str, int],
        weights: Mapping[str, Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        shards: Shards,
        ranks: Ranks,
    ) -> None:
        """`weights`: this rank's parts, written by `scatter`; `shapes`: of whole parameters."""
        self._owners = dict(sorted(owners.items()))
        self._weights = weights
        self._shards = shards
        self._rank = ranks.rank
        self._device = ranks.device.name
        self._group = ranks.world  # the default group may not carry tensors of the device
        self.parameters: dict[str, torch.nn.Parameter] = {}
        """whole, of those that this rank owns"""
        for name, owner in self._owners.items():
            if owner == self._rank:
                self.parameters[name] = torch.nn.Parameter(weights[name].new_empty(shapes[name]))
        self.reload()

    def reload(self) -> None:
        """The owners take the values of all parts: at the start, and after a checkpoint."""
        with torch.no_grad():
            for name in self._owners:
                part = self._weights.get(name)
                own = self.parameters.get(name)
                self._to_owner(name, part, own.data if own is not None else None)

    def collect(self, trained: Collection[str]) -> None:
        """Gradients of all parts come to their owners."""
        with torch.no_grad():
            for name in self._owners:
                own = self.parameters.get(name)
                if name not in trained:
                    if own is not None:
                        own.grad = None
                    continue
                part = self._weights.get(name)
                gradient = part.grad if part is not None else None
                if part is not None and gradient is None:  # nothing here depends on it
                    gradient = torch.zeros_like(part)
                whole = torch.empty_like(own) if own is not None else None
                self._to_owner(name, gradient, whole)
                if own is not None:
                    own.grad = whole

    def scatter(self, trained: Collection[str]) -> None:
        """New values of all parts go to their holders."""
        with torch.no_grad():
            for name, owner in self._owners.items():
                if name not in trained:
                    continue
                operations: list[dist.P2POp] = []
                arriving: Tensor | None = None
                for shard in self._parts(name):
                    part = None
                    if owner == self._rank:
                        part = self._to_send(shard.take(self.parameters[name].data))
                    for holder in shard.ranks:
                        if holder == owner == self._rank and part is not None:
                            self._weights[name].copy_(part)
                        elif owner == self._rank and part is not None:
                            operations.append(dist.P2POp(dist.isend, part, holder, self._group))
                        elif holder == self._rank:
                            arriving = torch.empty_like(self._weights[name], device=self._device)
                            operations.append(dist.P2POp(dist.irecv, arriving, owner, self._group))
                _run(operations)
                if arriving is not None:
                    self._weights[name].copy_(arriving)

    def _parts(self, name: str) -> list[Shard]:
        """The parts of a parameter that hold something."""
        shape = next((s.whole_shape for s in self._shards.of(name) if s.ranges is not None), ())
        return [shard for shard in self._shards.of(name) if shard.boxes(shape)]

    def _to_owner(self, name: str, part: Tensor | None, whole: Tensor | None) -> None:
        """Puts the parts of all holders together in `whole`, on the owner."""
        owner = self._owners[name]
        operations: list[dist.P2POp] = []
        arriving: list[tuple[Shard, Tensor]] = []
        for shard in self._parts(name):
            source = shard.ranks[0]
            if source == owner == self._rank and whole is not None and part is not None:
                shard.put(part.detach(), whole)
            elif owner == self._rank and whole is not None:
                buffer = whole.new_empty(shard.shape or whole.shape, device=self._device)
                arriving.append((shard, buffer))
                operations.append(dist.P2POp(dist.irecv, buffer, source, self._group))
            elif source == self._rank and part is not None:
                sent = self._to_send(part.detach())
                operations.append(dist.P2POp(dist.isend, sent, owner, self._group))
        _run(operations)
        for shard, buffer in arriving:
            assert whole is not None
            shard.put(buffer.to(whole.device), whole)

    def _to_send(self, part: Tensor) -> Tensor:
        """A part where the group takes it from: on the device, in one piece."""
        return part.to(self._device).contiguous()


def _run(operations: list[dist.P2POp]) -> None:
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
