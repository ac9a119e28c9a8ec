"""The user's batch taken apart into tensors and constants, and put together again.

The batch size is the dim 0 that most tensors of the sample share. A tensor whose dim 0 is the batch
size is *batched*; every other tensor is given whole to every device, and listed in the plan. Python
numbers, strings and None are constants of the capture.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from whale.capture.graph import BatchTensor
from whale.compat import pytree
from whale.dtypes import as_bytes
from whale.names import nearest

MIN_SAMPLES = 2  # torch.export makes a dim of size 1 a constant


@dataclass(frozen=True)
class BatchLayout:
    """Structure of a batch: what every batch of the training must agree with."""

    structure: Any
    paths: tuple[str, ...]
    constants: tuple[tuple[int, Any], ...]
    """(place among the leaves, value) of everything that is not a tensor"""
    tensors: tuple[BatchTensor, ...]
    batch_size: int

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for batches that can run the same captured graph."""
        shapes = []
        for tensor in self.tensors:
            sizes: list[int | str] = list(tensor.shape)
            for dim, name in tensor.lengths:
                sizes[dim] = name
            rest = tuple(sizes[tensor.batched :])
            shapes.append((tensor.path, tensor.dtype, tensor.batched, rest))
        return tuple(shapes), tuple((place, repr(value)) for place, value in self.constants)

    def __str__(self) -> str:
        """Shapes and constants, for messages: `x [8, 16], labels [8]`."""
        constants = [f"{self.paths[place]} = {value!r}" for place, value in self.constants]
        return ", ".join(
            [f"{tensor.path} {list(tensor.shape)}" for tensor in self.tensors] + constants
        )

    @property
    def length_names(self) -> dict[tuple[str, int], str]:
        """(path, dim) -> name of dims that are to be symbols of the capture."""
        return {(tensor.path, dim): name for tensor in self.tensors for dim, name in tensor.lengths}

    def with_lengths(self, names: Mapping[tuple[str, int], str]) -> BatchLayout:
        """The layout with these dims, (path, dim) -> name, as lengths that vary."""
        tensors = []
        for tensor in self.tensors:
            dims = range(len(tensor.shape))
            found = tuple(
                (dim, names[tensor.path, dim]) for dim in dims if (tensor.path, dim) in names
            )
            tensors.append(replace(tensor, lengths=found))
        return replace(self, tensors=tuple(tensors))

    def rebuild(self, tensors: list[torch.Tensor]) -> Any:
        """The user's batch again, around these tensors."""
        constants = dict(self.constants)
        remaining = iter(tensors)
        leaves = [
            constants[place] if place in constants else next(remaining)
            for place in range(len(self.paths))
        ]
        return pytree.tree_unflatten(leaves, self.structure)

    def samples(self, tensors: Sequence[torch.Tensor], start: int, stop: int) -> list[torch.Tensor]:
        """Samples start to stop - 1 of these tensors; tensors without samples whole."""
        return [
            tensor[start:stop] if described.batched else tensor
            for tensor, described in zip(tensors, self.tensors, strict=True)
        ]


def read_batch(
    batch: Any, sample: BatchLayout | None = None
) -> tuple[BatchLayout, list[torch.Tensor]]:
    """Layout and tensors of a batch. With `sample`, the tensors that are batched there are batched
    here, and dicts have the order of those there.
    """
    # Hugging Face's BatchEncoding is a mapping, not a dict
    plain = dict(batch) if isinstance(batch, Mapping) else batch
    if sample is not None:
        plain = _in_order(plain, sample.structure)
    leaves, structure = pytree.tree_flatten_with_path(plain)
    paths = tuple(pytree.keystr(path) or "the batch" for path, _ in leaves)
    constants: list[tuple[int, Any]] = []
    tensors: dict[str, torch.Tensor] = {}
    for place, (path, (_, leaf)) in enumerate(zip(paths, leaves, strict=True)):
        if isinstance(leaf, torch.Tensor):
            tensors[path] = leaf
            continue
        if not isinstance(leaf, (int, float, str, bool, type(None), torch.dtype)):
            where = "the batch" if structure.is_leaf() else f"{path} of the batch"
            raise ValueError(
                f"{where} is a {type(leaf).__name__}: a batch holds tensors, numbers, strings "
                "and None"
            )
        constants.append((place, leaf))
    # the sample decides what is batched: in a later batch another dim 0 may happen to be equal
    batched_in_sample = {t.path: t.batched for t in sample.tensors} if sample is not None else {}
    sizes = {path: tensor.shape[0] for path, tensor in tensors.items() if tensor.ndim > 0}
    if not sizes:
        raise ValueError(
            "the batch holds no tensor with a batch dimension (its leaves: "
            f"{', '.join(paths) or 'none'})"
        )
    known = [size for path, size in sizes.items() if batched_in_sample.get(path)]
    batch_size = Counter(known or sizes.values()).most_common(1)[0][0]
    described = []
    for path, tensor in tensors.items():
        batched = sizes.get(path) == batch_size and batched_in_sample.get(path, True)
        described.append(BatchTensor(path, tuple(tensor.shape), tensor.dtype, batched))
    layout = BatchLayout(structure, paths, tuple(constants), tuple(described), batch_size)
    return layout, list(tensors.values())


def _in_order(part: Any, structure: Any) -> Any:
    """A part of a batch with the keys of its dicts in the order that they have in `structure`,
    further ones behind them: another order is another structure to pytree, and none to a model.
    """
    children = structure.children()
    if type(part) is dict and structure.type is dict:
        known = dict(zip(structure.context, children, strict=True))
        keys = [*(key for key in known if key in part), *(key for key in part if key not in known)]
        return {
            key: _in_order(part[key], known[key]) if key in known else part[key] for key in keys
        }
    if type(part) in (list, tuple) and structure.type is type(part) and len(part) == len(children):
        return type(part)(map(_in_order, part, children))
    return part


def check_agrees(layout: BatchLayout, sample: BatchLayout) -> None:
    """Refuses a batch that the sample batch did not prepare for. Other sizes of further dims are
    fine (a new capture).
    """
    if layout.paths != sample.paths or layout.structure != sample.structure:
        missing = [path for path in sample.paths if path not in layout.paths]
        unknown = [path for path in layout.paths if path not in sample.paths]
        hint = nearest(unknown[0], missing) if unknown and missing else ""
        differs = f"missing {missing or 'nothing'}, not in the sample {unknown or 'nothing'}"
        if not missing and not unknown:
            differs = "one has a list, tuple or dict where the other has another of them"
        raise ValueError(
            f"the batch disagrees with the sample batch: {differs}.{hint} "
            "Try: pass a sample batch of this form to wh.parallelize"
        )
    in_sample = {tensor.path: tensor for tensor in sample.tensors}
    for got in layout.tensors:
        expected = in_sample.get(got.path)
        if expected is None:
            continue  # None or a number there: a new capture
        if got.dtype != expected.dtype or len(got.shape) != len(expected.shape):
            raise ValueError(
                f"{got.path} of the batch is {_describe(got)}, but the sample batch had "
                f"{_describe(expected)}. Try: pass a sample batch of this form to wh.parallelize"
            )
        if expected.batched and not got.batched:
            raise ValueError(
                f"{got.path} has {got.shape[0]} samples, the rest of the batch "
                f"{layout.batch_size}: all batched tensors need the same dim 0"
            )


def enlarge(layout: BatchLayout, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """A sample of one repeated, so that the export keeps the batch symbolic."""
    if layout.batch_size >= MIN_SAMPLES:
        return tensors
    enlarged = []
    for tensor, described in zip(tensors, layout.tensors, strict=True):
        enlarged.append(torch.cat([tensor] * MIN_SAMPLES) if described.batched else tensor)
    return enlarged


def pad_lengths(batch: Any, multiple: int, values: Mapping[Any, Any], dim: int = 1) -> Any:
    """The batch with dim `dim` of these tensors padded at its end to a multiple, so that batches
    have few lengths: `wh.pad_lengths(batch, 64, {"input_ids": 0, "attention_mask": 0, "labels":
    -100})`. `values`: key (or place) of each tensor to pad -> what it is padded with.
    """
    if multiple < 1:
        raise ValueError(f"pad_lengths: the multiple must be at least 1, not {multiple}")
    items = dict(batch) if isinstance(batch, Mapping) else dict(enumerate(batch))
    unknown = [key for key in values if key not in items]
    if unknown:
        raise ValueError(
            f"pad_lengths: the batch has no {unknown[0]!r}."
            f"{nearest(str(unknown[0]), map(str, items))}"
        )
    for key, value in values.items():
        tensor = items[key]
        missing = -tensor.shape[dim] % multiple
        shape = list(tensor.shape)
        shape[dim] = missing
        items[key] = torch.cat([tensor, tensor.new_full(shape, value)], dim)
    if isinstance(batch, Mapping):
        return items
    return type(batch)(items[place] for place in range(len(items)))


def digest(tensors: list[torch.Tensor], paths: tuple[str, ...] = ()) -> bytes:
    """Hash of the batch's values: ranks compare it to see that they were given the same
    mini-batch.
    """
    state = hashlib.blake2b(repr(paths).encode(), digest_size=8)
    for tensor in tensors:
        state.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        state.update(as_bytes(tensor.detach()).cpu().numpy().data)
    return state.digest()


def _describe(tensor: BatchTensor) -> str:
    return (
        f"{str(tensor.dtype).removeprefix('torch.')} with {len(tensor.shape)} dims "
        f"{list(tensor.shape)}"
    )
