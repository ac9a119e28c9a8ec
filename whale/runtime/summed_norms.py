"""Adafactor on parts of a stack of matrices (experts), exactly as on the whole
(`Plan.summed_norms`).

Of a stack cut over its experts each device has whole matrices, and the factors of their second
moments need nothing of the others. Two numbers are of all the stack:

    alpha = max(eps2, |p| / sqrt(n)) rho        denom = max(1, |u| / (sqrt(n) d))             (1)

with p the parameter, u its update and n the number of its elements. So while the optimizer steps,
torch's own code runs with |p|, |u| and n of the whole: squares of the norms of parts are summed
over their holders, which update such parameters in the same order. No rank ever has a whole stack.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from whale.distributed.ranks import Ranks
from whale.plans.shards import Shards

NORMS_OF_A_STEP = 2
"""|p| and |u| of line (1)"""


def holders_of(shards: Shards, name: str) -> tuple[int, ...]:
    """All ranks that hold something of a cut parameter."""
    found: set[int] = set()
    for shard in shards.of(name):
        if shard.ranges is None or shard.boxes(shard.whole_shape):
            found.update(shard.ranks)
    return tuple(sorted(found))


@dataclass
class _Stack:
    """A parameter of which this rank has a part."""

    name: str
    part: torch.nn.Parameter
    num_elements: int
    """of the whole"""
    num_copies: int
    """ranks that hold the same part"""
    group: dist.ProcessGroup | None
    num_norms: int = 0
    """asked for in this step"""


class SummedNorms:
    """Gives the optimizer of one rank norms of whole stacks, of which it updates parts."""

    def __init__(
        self,
        names: Sequence[str],
        updated: Mapping[str, torch.nn.Parameter],
        shapes: Mapping[str, Sequence[int]],
        shards: Shards,
        ranks: Ranks,
    ) -> None:
        """`updated`: parameters of the optimizer of this rank; `shapes`: of whole parameters."""
        self._device = ranks.device.name
        self._stacks: dict[int, _Stack] = {}
        """by the identity of the part"""
        for name in names:
            part = updated.get(name)
            if part is None or not part.numel():
                continue
            copies = len(shards.on(name, ranks.rank).ranks)
            group = ranks.group(holders_of(shards, name))
            number = math.prod(shapes[name])
            self._stacks[id(part)] = _Stack(name, part, number, copies, group)

    @contextmanager
    def of_the_whole(self, trained: Collection[str]) -> Iterator[None]:
        """Inside, the optimizer steps. `trained`: parameters that the loss of this step reaches."""
        due = []
        for stack in self._stacks.values():
            stack.num_norms = 0
            if stack.name in trained:
                due.append(stack)
                if stack.part.grad is None:  # no token came here; the others wait for its norm
                    stack.part.grad = torch.zeros_like(stack.part)
        with _WholeNorms(self._stacks, self._device):
            yield
        for stack in due:
            assert stack.num_norms == NORMS_OF_A_STEP, (
                f"Adafactor of torch {torch.__version__} asked for {stack.num_norms} norms of "
                f"{stack.name}"
            )


class _WholeNorms(TorchFunctionMode):
    """Norms and numbers of elements of stacks in place of those of their parts."""

    def __init__(self, stacks: Mapping[int, _Stack], device: str) -> None:
        super().__init__()
        self._stacks = stacks
        self._device = device
        self._stepped: _Stack | None = None
        """whose parameter had its norm taken last: the next norm is that of its update"""
        self._measured: tuple[Tensor, _Stack] | None = None
        """the tensor whose norm was taken last"""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.norm and result.dim() == 0:
            stack = self._stacks.get(id(args[0])) or self._stepped
            if stack is not None:
                return self._whole_norm(args[0], stack, result)
        if func is torch.Tensor.numel and self._measured is not None:
            tensor, stack = self._measured
            return stack.num_elements if tensor is args[0] else result
        return result

    def _whole_norm(self, tensor: Tensor, stack: _Stack, norm: Tensor) -> Tensor:
        assert tensor.shape == stack.part.shape, f"a norm of {list(tensor.shape)} in {stack.name}"
        stack.num_norms += 1
        self._measured = (tensor, stack)
        self._stepped = stack if tensor is stack.part else None
        squared = norm.detach().to(self._device, torch.float64).square() / stack.num_copies
        if stack.group is not None:
            dist.all_reduce(squared, group=stack.group)
        return squared.sqrt()
