"""Gathered tensors that are not kept for backward but gathered again there: less memory for more
messages.

Between `begin_watching` and `end_watching` autograd asks about every tensor that it wants to keep.
One that lies in the memory of a gathered tensor is not kept; a note of its place in it is. The
first backward that reads such a note sends the messages of the gather once more, and all who read
the same tensor share the result, which goes with the last of them.

All devices run the same operations in the same order, so they also gather again in the same order.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from whale.lowering.exchange import Groups, run
from whale.sharding.redistribution_steps import Redistribution


class Gathered:
    """One gather that can be repeated."""

    def __init__(self, source: Tensor, plan: Redistribution, groups: Groups) -> None:
        self.source = source.detach()
        self.plan = plan
        self.groups = groups
        self.num_readers = 0
        self._value: Tensor | None = None

    def take(self) -> Tensor:
        """The gathered tensor, for one of its readers."""
        value = (
            run(self.source, self.plan.forward, self.groups).contiguous()
            if self._value is None
            else self._value
        )
        self.num_readers -= 1
        self._value = value if self.num_readers > 0 else None
        return value


@dataclass(frozen=True)
class _Note:
    """A part of a gathered tensor, as a view of its memory."""

    gathered: Gathered
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """from the first number of the gathered tensor"""

    def tensor(self) -> Tensor:
        whole = self.gathered.take()
        return whole.as_strided(self.size, self.stride, whole.storage_offset() + self.offset)


class Watch:
    """What was gathered in one forward of a chunk, by address."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Tensor], Gathered]] = {}
        self.hooks = saved_tensors_hooks(self._keep, self._bring_back)

    def add(self, result: Tensor, gathered: Gathered) -> None:
        self._found[result.untyped_storage().data_ptr()] = weakref.ref(result), gathered

    def _keep(self, tensor: Tensor) -> Any:
        found = self._found.get(tensor.untyped_storage().data_ptr())
        whole = found[0]() if found is not None else None
        if (
            found is None or whole is None or tensor.dtype != whole.dtype
        ):  # another tensor, perhaps where a gathered one was
            return tensor
        found[1].num_readers += 1
        return _Note(
            found[1],
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset() - whole.storage_offset()),
        )

    @staticmethod
    def _bring_back(kept: Any) -> Tensor:
        return kept.tensor() if isinstance(kept, _Note) else kept


_open: list[Watch] = []


def begin_watching() -> Watch:
    watch = Watch()
    watch.hooks.__enter__()
    _open.append(watch)
    return watch


def end_watching(watch: Watch) -> None:
    _open.pop()
    watch.hooks.__exit__()


def note_gathered(result: Tensor, gathered: Gathered) -> None:
    """Called with what a gather gave, while it is watched."""
    if _open:
        _open[-1].add(result, gathered)
