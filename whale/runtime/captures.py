"""Which captured graph runs a batch: one graph for all lengths where the model allows it.

The first batch whose dims differ from the sample's has the model captured anew with these dims as
symbols (or the user declared them: `wh.parallelize(..., dynamic=...)`, and it was so from the
start). That graph then runs every length that its conditions allow. A model that fixes its sizes is
captured once for each.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from whale.capture.batch import BatchLayout
from whale.capture.errors import CaptureError
from whale.capture.graph import CapturedGraph, user_line
from whale.capture.lengths import Numbers, Place, can_vary, varying
from whale.capture.prepare import CapturedModel
from whale.capture.python_numbers import Numbers as PythonValues
from whale.capture.python_numbers import PythonNumbers
from whale.distributed.ranks import Ranks
from whale.lowering.program import Assign, Lowered
from whale.operations.nodes import op_name
from whale.planning.planner import fingerprint

logger = logging.getLogger("whale")

MOST_LENGTHS = 64
"""sets of lengths whose programs are held; the one unused for longest goes first"""


@dataclass
class Family:
    """A captured graph with everything that was lowered from it."""

    prepared: CapturedModel
    layout: BatchLayout
    """of the batch that it was captured with, its lengths named"""
    assign: Assign
    """gives the stage of every operation"""
    is_planned: bool
    """the plan was made for this graph"""
    python: PythonValues = ()
    """numbers in Python that it was captured with"""
    symbolic: Lowered | None = None
    """for every length; None where layouts on a grid need numbers"""
    by_lengths: OrderedDict[tuple[int, ...], Lowered] = field(default_factory=OrderedDict)
    _numbers: dict[Any, Numbers | None] = field(default_factory=dict)
    """what `numbers` gave, by the sizes of a batch"""

    def numbers(self, layout: BatchLayout) -> Numbers | None:
        """The lengths of a batch; None where this graph is not for it."""
        if layout.with_lengths(self.layout.length_names).key != self.layout.key:
            return None
        conditions = self.prepared.conditions
        if conditions is None:
            return {}
        sizes = (layout.batch_size, *(tensor.shape for tensor in layout.tensors))
        if sizes not in self._numbers:
            if len(self._numbers) >= MOST_LENGTHS:
                self._numbers.clear()
            self._numbers[sizes] = conditions.numbers(layout)
        return self._numbers[sizes]

    def all_lowered(self) -> Iterator[Lowered]:
        if self.symbolic is not None:
            yield self.symbolic
        yield from self.by_lengths.values()


class Captures:
    """The graphs of one mode, training or evaluation."""

    def __init__(self, most: int, python: PythonNumbers, in_training: bool = True) -> None:
        self._most = most
        self._python = python
        """numbers that graphs of this mode may depend on: another mode may depend on others"""
        self._in_training = in_training
        self._families: list[Family] = []
        """the one unused for longest first"""
        self._refused: set[frozenset[Place]] = set()
        """dims that the model does not allow to be symbols"""
        self._first: Family | None = None
        self.num_captures = 0

    def add(self, family: Family) -> list[Lowered]:
        """Holds a graph that was captured just now; gives what had to go for it."""
        family.python = self._python.now(self._in_training)
        gone: list[Lowered] = []
        while len(self._families) >= self._most:
            gone += self._families.pop(0).all_lowered()
        self._families.append(family)
        self.num_captures += 1
        if self._first is None:
            self._first = family
        return gone

    def find(self, layout: BatchLayout) -> tuple[Family, Numbers] | None:
        """The graph for a batch and its lengths, captured with numbers in Python as they are now,
        if there is one.
        """
        return self._find(layout, self._python.now(self._in_training))

    def _find(
        self, layout: BatchLayout, python: PythonValues | None
    ) -> tuple[Family, Numbers] | None:
        for family in reversed(self._families):
            numbers = family.numbers(layout)
            if numbers is not None and (python is None or family.python == python):
                self._families.remove(family)
                self._families.append(family)
                return family, numbers
        return None

    def names(self) -> dict[Place, str]:
        """The lengths of the graph that was used last."""
        return self._families[-1].layout.length_names

    def find_with_other_numbers(self, layout: BatchLayout) -> Family | None:
        """A graph for a batch, with whatever numbers in Python it was captured."""
        found = self._find(layout, None)
        return found[0] if found is not None else None

    def other_numbers(self, family: Family | None = None) -> str | None:
        """A number in Python that is another one now than when this graph, or the first one, was
        captured; None: all are as they were.
        """
        family = family or self._first
        now = self._python.now(self._in_training)
        if family is None or family.python == now:
            return None
        return self._python.difference(family.python, now)

    def names_of_other_numbers(self) -> list[str]:
        """All numbers in Python that are others now than when the first graph was captured."""
        now = self._python.now(self._in_training)
        if self._first is None or self._first.python == now:
            return []
        return self._python.names_of_changed(self._first.python, now)

    def is_tensor_changed(self, family: Family) -> bool:
        """Whether a tensor beside the model was written to since this graph was captured."""
        now = self._python.now(self._in_training)
        return self._python.is_tensor_changed(family.python, now)

    def look_no_more_at_others(self, family: Family) -> None:
        """Forgets the numbers that are others now than when this graph was captured."""
        shortened = self._python.leave_out(family.python, self._python.now(self._in_training))
        known = [*self._families]
        if self._first is not None and all(each is not self._first for each in known):
            known.append(self._first)
        for each in known:
            each.python = shortened(each.python)

    def all_lowered(self) -> Iterator[Lowered]:
        for family in self._families:
            yield from family.all_lowered()

    def capture(
        self,
        layout: BatchLayout,
        known: Mapping[Place, str],
        capture: Callable[[BatchLayout], Family],
    ) -> Family:
        """Captures the model for a batch that no graph is for. Dims that differ from those of the
        first batch, and `known` ones, become symbols where the model allows it.
        """
        paths = {tensor.path for tensor in layout.tensors}
        names = {place: name for place, name in known.items() if place[0] in paths}
        if self._first is not None:
            names |= varying(self._first.layout, layout)
        wanted = frozenset(names)
        if names and wanted not in self._refused and can_vary(layout, names):
            try:
                return capture(layout.with_lengths(names))
            except CaptureError as error:
                self._refused.add(wanted)
                logger.warning("%s", captured_for_each(names, error))
        return capture(layout)


def captured_for_each(names: Mapping[Place, str], error: Exception) -> str:
    """The message to the user when these dims cannot be symbols."""
    dims = ", ".join(f"dim {dim} of {path}" for path, dim in names)
    lines = [line.strip() for line in str(error).splitlines()]
    reason = next((line for line in lines if line.startswith("What is wrong")), lines[0])
    places = [line for line in lines if line.startswith("at ")]
    where = f" ({places[0]})" if places else ""
    reason = reason.removeprefix("What is wrong: ").partition(", the size of the sample batch")[0]
    reason = reason.replace("the batch size", "a size").rstrip(".")
    return (
        f"the batches have different lengths ({dims}), and the model cannot be captured with these "
        f"as symbols: {reason}{where}. It is captured once for each length, which takes seconds "
        "each time. Try: pad all batches to few lengths, with `pad_to_multiple_of=64` of the "
        "collator or `wh.pad_lengths(batch, 64, ...)`"
    )


def same_on_all_ranks(
    prepared: CapturedModel, ranks: Ranks, what: str, advice: str
) -> CapturedModel:
    """The captured model, the same on all ranks; raises where it is another. Code that goes through
    a `set` runs in an order that differs between processes: then all take the canonical one.
    """
    if len(set(ranks.gather(fingerprint(prepared.captured)))) > 1:
        prepared = prepared.in_canonical_order()
        _refuse_other_autocast(prepared.captured, ranks)
    ranks.agree(what, fingerprint(prepared.captured), advice)
    return prepared


def computes_the_same(one: CapturedModel, other: CapturedModel) -> bool:
    """Whether two captures are the same graph with the same constants."""
    if fingerprint(one.captured) != fingerprint(other.captured):
        return False
    constants = other.captured.constants
    return all(
        torch.equal(value, constants[name]) for name, value in one.captured.constants.items()
    )


def _refuse_other_autocast(captured: CapturedGraph, ranks: Ranks) -> None:
    """Raises on every rank where autocast runs an operation in another dtype on another type of
    device: torch has a list of operations for each type.
    """
    found = []
    for node in captured.compute_nodes():
        value = node.meta.get("val")
        if node.meta.get("autocast") is not None and isinstance(value, Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            found.append((op_name(node), dtype, user_line(node)))
    everyone = ranks.gather((ranks.device.type, found))
    first_type, first = everyone[0]
    for rank, (device_type, others) in enumerate(everyone):
        if device_type == first_type:
            continue
        for (name, dtype, line), (other_name, other_dtype, _) in zip(first, others, strict=False):
            if (name, dtype) != (other_name, other_dtype):
                raise ValueError(
                    "autocast computes differently on the devices of this job, since torch has a "
                    f"list of operations for each type: {name} ({line}) gives {dtype} on rank 0 "
                    f"({first_type}), and rank {rank} ({device_type}) has {other_name} in "
                    f'{other_dtype} there. Try: "precision": "default", with a model in 16 bits '
                    "(`model.bfloat16()`) if that was the aim; or devices of one type"
                )


def what_changed(layout: BatchLayout, sample: BatchLayout) -> str:
    """How a batch differs from the sample, for messages."""
    for got, expected in zip(layout.tensors, sample.tensors, strict=False):
        if got.shape[1:] != expected.shape[1:]:
            return f"{got.path} is {list(got.shape)}, the sample was {list(expected.shape)}"
    constants: list[Any] = [value for _, value in layout.constants]
    return (
        f"constants of the batch are {constants}, in the sample "
        f"{[value for _, value in sample.constants]}"
    )
