"""Weights that others trained, in the Hugging Face layout: read straight into the shards, each rank
only what it needs. And the way back.

    model.safetensors                                   one file, or
    model.safetensors.index.json                        {"weight_map": {name: file}} and
    model-00001-of-00002.safetensors, ...               several

Links are followed here (the Hugging Face cache is made of them); a file is only ever parsed as
safetensors, so a bad one can do no more than be refused. These files have no checksums: sizes and
shapes are checked, content cannot be.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from whale.checkpoint.errors import CheckpointError, explain
from whale.checkpoint.pieces import Box, is_inside
from whale.checkpoint.tensor_files import (
    PAIRS,
    TensorFile,
    dtype_name,
    open_regular,
    sync_folder,
    write_tensors,
)
from whale.names import nearest

SINGLE = "model.safetensors"
SHARDED = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
MAX_INDEX_BYTES = 1 << 28
CONVERT = (
    "It may hold a program, so Whale never opens it. Convert it once where you trust it: "
    "`model = AutoModel.from_pretrained(...); model.save_pretrained(folder)` writes safetensors"
)


@dataclass(frozen=True)
class Match:
    """Which stored tensor each wanted name is."""

    stored: dict[str, str]
    """wanted name -> stored name"""
    unexpected: tuple[str, ...]
    """stored names that nobody wants"""
    how: str
    """what was done to the names, for the log; '' = they are the same"""


class PretrainedReader:
    """Opens a `.safetensors` file, or a folder in the Hugging Face layout."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files: dict[str, TensorFile] = {}
        self._index_bytes = 0
        self._file_of = self._find()

    def names(self) -> list[str]:
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file(name).tensors[name].shape

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    @property
    def num_bytes_read(self) -> int:
        return self._index_bytes + sum(file.num_bytes_read for file in self._files.values())

    def read(self, name: str, ranges: Box | None = None) -> Tensor:
        """A tensor, or the box `ranges` of it, on the CPU; only those bytes are read."""
        file = self._file(name)
        shape = file.tensors[name].shape
        if ranges is not None and not is_inside(ranges, shape):
            raise CheckpointError(
                f"{name} in {file.path} has shape {list(shape)}, it has no {ranges}"
            )
        return file.read(name, ranges)

    def match(
        self,
        wanted: Iterable[str],
        aliases: Mapping[str, str] | None = None,
        optional: Iterable[str] = (),
    ) -> Match:
        """Finds each wanted name among the stored ones, also when one side has a leading prefix
        (`model.`, `transformer.`) more.

        `aliases`: name -> first name of the same tied tensor: one of them is enough. `optional`:
        names that need not be there, such as buffers; they are found in the same way as the wanted
        ones.
        """
        names = list(wanted)
        ties: dict[str, list[str]] = {}
        for name in {**dict.fromkeys(names), **(aliases or {})}:
            ties.setdefault((aliases or {}).get(name, name), []).append(name)
        attempts = self._attempts(names)
        results = []
        for how, stored_name in attempts:
            found = {}
            for name in names:
                tied = ties[(aliases or {}).get(name, name)]
                hit = next(
                    (
                        stored
                        for each in [name, *tied]
                        if (stored := stored_name(each)) in self._file_of
                    ),
                    None,
                )
                if hit is not None:
                    found[name] = hit
            results.append((how, found))
        complete = [(how, found) for how, found in results if len(found) == len(names)]
        if not complete:
            raise CheckpointError(
                self._missing(names, max(results, key=lambda result: len(result[1]))[1])
            )
        how, found = complete[0]  # unchanged names come first
        if how and any(other != found for _, other in complete[1:]):
            raise CheckpointError(
                f"the names in {self.path} fit the model in more than one way "
                f"({', '.join(how for how, _ in complete)}). Try: `wh.Pretrained(path, rename=...)`"
                ", a function from the model's names to those of the file"
            )
        rename = dict(attempts)[how]
        found |= {name: rename(name) for name in optional if rename(name) in self._file_of}
        expected = set(found.values())
        for tied in ties.values():
            if len(tied) > 1:
                expected.update(tied)
        unexpected = tuple(name for name in self._file_of if name not in expected)
        return Match(found, unexpected, how)

    def _attempts(self, names: list[str]) -> list[tuple[str, _Rename]]:
        """Ways to turn a wanted name into a stored one, the plain one first."""
        dotted = [name for name in [*names, *self._file_of] if "." in name]
        heads = dict.fromkeys(name.partition(".")[0] + "." for name in dotted)
        attempts = [("", _Rename())]
        for head in heads:
            attempts.append((f"without {head!r}", _Rename(strip=head)))
            attempts.append((f"with {head!r}", _Rename(add=head, unless=frozenset(self._file_of))))
        return attempts

    def _missing(self, names: list[str], found: Mapping[str, str]) -> str:
        missing = [name for name in names if name not in found]
        return (
            f"{self.path} lacks {len(missing)} of the {len(names)} tensors that the model needs, "
            f"the first are {', '.join(missing[:3])}.{nearest(missing[0], self._file_of)} Is it of "
            f"another model? It holds {', '.join(list(self._file_of)[:3])}, ..."
        )

    def _find(self) -> dict[str, str]:
        """name -> file name."""
        if not self.path.exists():
            raise CheckpointError(
                f"{self.path} does not exist: give a .safetensors file or a folder that holds "
                f"{SINGLE} or {SHARDED}"
            )
        if self.path.is_file():
            if self.path.suffix in PICKLES:
                raise CheckpointError(f"{self.path} is a pickle. {CONVERT}")
            return dict.fromkeys(self._open(self.path.name, self.path).tensors, self.path.name)
        if (self.path / SHARDED).exists() and not (self.path / SINGLE).exists():
            return self._read_weight_map()
        if (self.path / SINGLE).exists():
            return dict.fromkeys(self._open(SINGLE, self.path / SINGLE).tensors, SINGLE)
        pickles = sorted(item.name for item in self.path.iterdir() if item.suffix in PICKLES)
        if pickles:
            raise CheckpointError(f"{self.path} holds only pickles ({pickles[0]}). {CONVERT}")
        raise CheckpointError(
            f"{self.path} holds neither {SINGLE} nor {SHARDED}: give a folder in the Hugging Face "
            "layout"
        )

    def _read_weight_map(self) -> dict[str, str]:
        file = self.path / SHARDED
        with os.fdopen(open_regular(file, follow_links=True), "rb") as opened:
            content = opened.read(MAX_INDEX_BYTES)
        self._index_bytes = len(content)
        try:
            found = json.loads(content)["weight_map"]
            if not isinstance(found, dict) or not found:
                raise ValueError("weight_map is empty")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{file} is not an index of shards: {error}") from None
        for name, shard in found.items():
            if (
                not isinstance(shard, str)
                or shard != os.path.basename(shard)
                or not shard.endswith(".safetensors")
                or "\\" in shard
            ):
                raise CheckpointError(
                    f"{file} says that {name[:200]} is in {str(shard)[:80]!r}: only .safetensors "
                    "files beside it are read"
                )
        return found

    def _file(self, name: str) -> TensorFile:
        if name not in self._file_of:
            raise CheckpointError(
                f"{self.path} has no tensor {name!r}.{nearest(name, self._file_of)}"
            )
        shard = self._file_of[name]
        file = self._files.get(shard) or self._open(shard, self.path / shard)
        if name not in file.tensors:
            raise CheckpointError(
                f"{file.path} does not hold {name}, though {SHARDED} says so: download the files "
                "again"
            )
        return file

    def _open(self, shard: str, path: Path) -> TensorFile:
        self._files[shard] = TensorFile(path, follow_links=True)
        return self._files[shard]


@dataclass(frozen=True)
class _Rename:
    strip: str = ""
    add: str = ""
    unless: frozenset[str] = frozenset()

    def __call__(self, name: str) -> str:
        if name in self.unless:
            return name
        return self.add + name.removeprefix(self.strip)


def export_safetensors(path: str | Path, state_dict: Mapping[str, Tensor]) -> Path:
    """Writes a state dict as one safetensors file that Hugging Face reads, aside first, then
    renamed into place.

    Of tied tensors the first name is written, as `save_pretrained` does; the file's metadata says
    what the others were.
    """
    final = Path(path)
    if final.suffix != ".safetensors":
        raise ValueError(f"{final} must end in .safetensors (Hugging Face looks for {SINGLE})")
    tensors: dict[str, Tensor] = {}
    first: dict[tuple[object, ...], str] = {}
    metadata = {"format": "pt"}
    for name, tensor in state_dict.items():
        key = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and key in first:
            metadata[name] = first[key]
            continue
        first[key] = name
        tensors[name] = tensor
        if dtype_name(tensor, name) in PAIRS:
            raise CheckpointError(
                f"{name} is {tensor.dtype}, which the safetensors format does not know. "
                "Try: export it as complex64, or save a checkpoint with engine.save"
            )
    aside = final.with_name(f".{final.name}.{os.getpid()}.part")
    try:
        os.makedirs(final.parent, exist_ok=True)
        aside.unlink(missing_ok=True)
        write_tensors(aside, tensors, metadata)
        os.replace(aside, final)
        sync_folder(final.parent)
    except OSError as error:
        # what stands in the way of the folder also stands in the way of this
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        raise explain(error, "exporting", final, needed) from error
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    return final
