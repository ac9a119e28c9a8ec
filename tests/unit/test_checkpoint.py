"""Checkpoints: what was saved comes back under any other cut; what is damaged, torn or crafted is refused, and nothing is executed.

"Ranks" are simulated in one process: they meet in a folder only, so threads or plain calls in turn are the same thing.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from whale.checkpoint import (
    AsyncSaver,
    CheckpointError,
    Part,
    PretrainedReader,
    Reader,
    Snapshot,
    Target,
    assign_writers,
    export_safetensors,
    find_checkpoints,
    finish,
    merge_values,
    pack_optimizer,
    pack_rng,
    pack_scheduler,
    read_index,
    take_snapshot,
    tensor_files,
    unpack_optimizer,
    unpack_rng,
    unpack_scheduler,
    write_rank,
)
from whale.checkpoint.boxes import byte_segments, why_not_cover
from whale.checkpoint.json_values import decode, encode

SECOND = 1.0  # time-out of tests that wait for a rank that never comes


def cut(tensor: Tensor, num_ranks: int, dim: int) -> list[tuple[Tensor, Part]]:
    """`tensor` in `num_ranks` parts along `dim`, uneven when it does not divide."""
    bounds = [round(place * tensor.shape[dim] / num_ranks) for place in range(num_ranks + 1)]
    parts = []
    for start, stop in zip(bounds, bounds[1:]):
        ranges = tuple((start, stop) if each == dim else (0, size) for each, size in enumerate(tensor.shape))
        parts.append((tensor.narrow(dim, start, stop - start), Part(tuple(tensor.shape), ranges)))
    return parts


def example() -> dict[str, Tensor]:
    """One tensor of each kind that matters."""
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "model/a.weight": torch.randn(13, 7, generator=generator),
        "model/b.weight": torch.randn(5, 6, 4, generator=generator, dtype=torch.float64),
        "model/half": torch.randn(9, 8, generator=generator).bfloat16(),
        "model/flags": torch.rand(11, generator=generator) > 0.5,
        "model/scalar": torch.tensor(3.25),
        "model/empty": torch.zeros(0, 4),
        "model/counts": torch.arange(12).reshape(3, 4).t(),  # not contiguous
    }
    return tensors


def save_cut(
    folder: Path, tensors: dict[str, Tensor], num_ranks: int, dim: int, step: int = 1, save_id: str = "job_1", **options: Any
) -> Path:
    """Saves `tensors` from `num_ranks` ranks, all but the small ones cut along `dim`."""
    target = Target(folder, step, save_id)
    pieces: list[dict[str, Tensor]] = [{} for _ in range(num_ranks)]
    parts: list[dict[str, Part]] = [{} for _ in range(num_ranks)]
    for place, (name, tensor) in enumerate(tensors.items()):
        if tensor.dim() > dim and tensor.shape[dim] >= num_ranks:
            for rank, (piece, part) in enumerate(cut(tensor, num_ranks, dim)):
                pieces[rank][name], parts[rank][name] = piece, part
        else:
            pieces[place % num_ranks][name] = tensor
    for rank in reversed(range(num_ranks)):
        write_rank(target, rank, take_snapshot(pieces[rank], {"rank": rank}, parts[rank]))
    return finish(target, num_ranks, options.pop("values", {"step": step}), **options)


def assert_same(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape
    assert torch.equal(got, expected)


# ---- round trips


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("dim", [0, 1])
def test_what_was_saved_by_some_ranks_is_read_whole(tmp_path: Path, num_ranks: int, dim: int) -> None:
    tensors = example()
    path = save_cut(tmp_path, tensors, num_ranks, dim)
    assert sorted(item.name for item in path.iterdir()) == ["index.json", *(f"rank_{rank:05d}.safetensors" for rank in range(num_ranks))]
    with Reader(tmp_path) as reader:
        assert reader.step == 1 and reader.values == {"step": 1} and reader.rank_values == [{"rank": rank} for rank in range(num_ranks)]
        assert sorted(reader.names()) == sorted(tensors)
        for name, tensor in tensors.items():
            assert_same(reader.read(name), tensor)


@pytest.mark.parametrize(("saved", "loaded"), [((3, 0), (2, 1)), ((2, 1), (4, 0)), ((4, 0), (3, 0)), ((1, 0), (5, 1))])
def test_another_cut_on_load(tmp_path: Path, saved: tuple[int, int], loaded: tuple[int, int]) -> None:
    tensors = {name: tensor for name, tensor in example().items() if tensor.dim() >= 2 and tensor.numel()}
    save_cut(tmp_path, tensors, *saved)
    with Reader(tmp_path) as reader:
        for name, tensor in tensors.items():
            for piece, part in cut(tensor, *loaded):
                assert_same(reader.read(name, part.ranges), piece)


def test_any_box_of_a_tensor_of_many_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 4 KiB, so that boxes begin and end inside blocks; every box against torch's own slicing."""
    monkeypatch.setattr(tensor_files, "BLOCK_BYTES", 4096)
    monkeypatch.setattr("whale.checkpoint.writer.BLOCK_BYTES", 4096)
    tensor = torch.arange(40 * 50 * 9, dtype=torch.float32).reshape(40, 50, 9)
    save_cut(tmp_path, {"x": tensor}, 3, 1)
    chooser = random.Random(0)
    with Reader(tmp_path) as reader:
        assert max(len(piece.checksums) for piece in reader.index.tensors["x"].pieces) > 8 * 4
        for _ in range(150):
            box = tuple(tuple(sorted(chooser.choices(range(size + 1), k=2))) for size in tensor.shape)
            assert_same(reader.read("x", box), tensor[tuple(slice(*r) for r in box)])  # type: ignore[arg-type]


def test_rank_files_are_plain_safetensors(tmp_path: Path) -> None:
    tensors = example()
    path = save_cut(tmp_path, tensors, 1, 0)
    loaded = safetensors.torch.load_file(path / "rank_00000.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert_same(loaded[name], tensor)


@pytest.mark.parametrize("name", sorted(tensor_files.DTYPES))
def test_every_dtype(tmp_path: Path, name: str) -> None:
    raw = torch.randint(0, 2 if name == "BOOL" else 100, (6, 16), dtype=torch.uint8)
    tensor = raw.view(tensor_files.DTYPES[name])
    save_cut(tmp_path, {"x": tensor}, 2, 0)
    with Reader(tmp_path) as reader:
        got = reader.read("x")
        assert got.dtype == tensor.dtype and torch.equal(got.view(torch.uint8), raw)
    assert safetensors.torch.load_file(find_checkpoints(tmp_path)[0] / "rank_00001.safetensors")["x"].dtype == tensor.dtype


def test_a_snapshot_does_not_change_with_training() -> None:
    weight = torch.ones(4)
    buffers: dict[str, Tensor] = {}
    first = take_snapshot({"w": weight}, {"list": (numbers := [1])}, buffers=buffers)
    weight.add_(1)
    numbers.append(2)
    assert first.tensors["w"].tolist() == [1] * 4 and first.values == {"list": [1]}
    again = take_snapshot({"w": weight}, buffers=buffers)
    assert again.tensors["w"].data_ptr() == first.tensors["w"].data_ptr() and again.tensors["w"].tolist() == [2] * 4


def test_a_part_of_the_wrong_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"w has shape \[4\], but its part is"):
        take_snapshot({"w": torch.ones(4)}, parts={"w": Part((8,), ((2, 8),))})


@pytest.mark.parametrize("tensor", [torch.ones(2, 2).to_sparse(), torch.ones(2, dtype=torch.complex128)])
def test_tensors_that_files_cannot_hold_are_refused_by_name(tensor: Tensor) -> None:
    with pytest.raises(CheckpointError, match=r"model/x is torch\..*cannot hold that"):
        take_snapshot({"model/x": tensor})


def test_writers_are_the_same_everywhere_and_balanced() -> None:
    holders = {f"w{i}": (0, 1, 2, 3) for i in range(12)} | {"only": (2,)}
    sizes = dict.fromkeys(holders, 10) | {"only": 30}
    chosen = assign_writers(holders, sizes)
    assert chosen == assign_writers(dict(reversed(holders.items())), sizes)
    assert chosen["only"] == 2
    load = Counter[int]()
    for name, rank in chosen.items():
        assert rank in holders[name]
        load[rank] += sizes[name]
    assert max(load.values()) - min(load.values()) <= 10  # no move of one tensor could balance it better


# ---- values


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, None, True, "x"], "b": (1, (2, 3))},
        {1: "a", (2, 3): "b"},
        {"!tuple": [1]},
        Counter({30: 1, 80: 2}),
        float("inf"),
        [-float("inf"), 1e300, 0.1, 2**70],
        torch.tensor(0.1),
        torch.tensor(7),
    ],
)
def test_values_survive_json(value: Any) -> None:
    back = decode(json.loads(json.dumps(encode(value, "v"), allow_nan=False)))
    assert back == value and type(back) is type(value)


@pytest.mark.parametrize(
    ("value", "name"), [({"f": print}, r"v\.f is a builtins\.builtin"), ([torch.ones(2)], r"v\[0\] is a tensor of shape \[2\]")]
)
def test_values_that_json_cannot_hold_are_refused_by_name(value: Any, name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        encode(value, "v")


@pytest.mark.parametrize(
    "value", [{"!call": "os.system"}, {"!tensor": ["torch.float32", [1, 2], 3, "x"]}, {"!tensor": 5}, {"!float": "1e999"}, {"!dict": [1]}]
)
def test_crafted_values_are_refused(value: Any) -> None:
    if value == {"!tensor": ["torch.float32", [1, 2], 3, "x"]}:
        assert isinstance(decode(value), Tensor)  # too much, but still only numbers
        return
    with pytest.raises(CheckpointError, match="is marked"):
        decode(value)


# ---- exact cover


def brute_force_cover(boxes: list[Any], shape: tuple[int, ...]) -> bool:
    count = np.zeros(shape, dtype=int)
    for box in boxes:
        if any(not 0 <= start < stop <= size for (start, stop), size in zip(box, shape)):
            return False
        count[tuple(slice(*r) for r in box)] += 1
    return bool((count == 1).all())


@st.composite
def boxes_and_shape(draw: st.DrawFn) -> tuple[list[Any], tuple[int, ...]]:
    """A tensor cut again and again (so irregular grids too), then perhaps spoiled."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    boxes = [tuple((0, size) for size in shape)]
    for _ in range(draw(st.integers(0, 8))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        start, stop = box[dim]
        at = draw(st.integers(start, stop))
        boxes.extend(b for r in ((start, at), (at, stop)) if r[0] < r[1] for b in [box[:dim] + (r,) + box[dim + 1 :]])
    spoil = draw(st.sampled_from(["no", "drop", "twice", "move"]))
    place = draw(st.integers(0, len(boxes) - 1))
    if spoil == "drop":
        boxes.pop(place)
    elif spoil == "twice":
        boxes.append(boxes[place])
    elif spoil == "move":
        dim, by = draw(st.integers(0, len(shape) - 1)), draw(st.integers(-2, 2))
        side = draw(st.integers(0, 1))
        r = list(boxes[place][dim])
        r[side] += by
        boxes[place] = boxes[place][:dim] + (tuple(r),) + boxes[place][dim + 1 :]
    return draw(st.permutations(boxes)), shape


@given(boxes_and_shape())
def test_cover_check_agrees_with_counting(case: tuple[list[Any], tuple[int, ...]]) -> None:
    boxes, shape = case
    assert (why_not_cover(boxes, shape) == "") == brute_force_cover(boxes, shape)


def test_cover_check_of_many_pieces() -> None:
    grid = [((i, i + 1), (j, j + 1)) for i in range(64) for j in range(64)]
    assert why_not_cover(grid, (64, 64)) == ""
    assert "overlap" in why_not_cover([*grid[:-1], grid[5]], (64, 64))


@given(st.data())
def test_byte_segments_hold_exactly_the_box(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=0, max_size=4)))
    box = tuple((start := data.draw(st.integers(0, size - 1)), data.draw(st.integers(start + 1, size))) for size in shape)
    marked = np.zeros(shape, dtype=bool)
    marked[tuple(slice(*r) for r in box)] = True
    wanted = np.repeat(marked.reshape(-1), 4)
    grain = data.draw(st.sampled_from([1, 4, 8, 20]))
    got = np.zeros_like(wanted)
    segments = byte_segments(shape, box, 4, grain)
    for start, stop in segments:
        assert start % grain == 0 and not got[start:stop].any()
        got[start:stop] = True
    touched = [wanted[at : at + grain].any() for at in range(0, len(wanted), grain)]
    assert (got == np.repeat(touched, grain)[: len(wanted)]).all()
    assert all(a[1] < b[0] for a, b in zip(segments, segments[1:]))  # joined where they touch


# ---- bytes read


def test_a_rank_reads_at_most_5_percent_more_than_it_needs(tmp_path: Path) -> None:
    tensors = {f"model/{i}": torch.randn(700, 768) for i in range(8)}
    path = save_cut(tmp_path, tensors, 3, 0)
    total = sum(item.stat().st_size for item in path.iterdir())
    with Reader(tmp_path) as reader:
        for name in ["model/1", "model/6"]:
            assert_same(reader.read(name), tensors[name])
        needed = 2 * 700 * 768 * 4
        assert needed <= reader.num_bytes_read <= 1.05 * needed < total / 2


def test_a_slice_under_another_cut_reads_at_most_5_percent_more(tmp_path: Path) -> None:
    big = torch.randn(16384, 512)  # 32 MiB, cut by 2 when saved and by 3 when loaded
    save_cut(tmp_path, {"x": big}, 2, 0)
    for piece, part in cut(big, 3, 0):
        with Reader(tmp_path) as reader:
            assert_same(reader.read("x", part.ranges), piece)
            assert reader.num_bytes_read <= 1.05 * piece.numel() * 4


# ---- damage: each kind is refused with the file and the tensor, and nothing wrong is ever returned


def read_all(path: Path) -> dict[str, Tensor]:
    with Reader(path) as reader:
        return {name: reader.read(name) for name in reader.names()}


def rewrite_index(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Edits an index and gives it a right checksum again, as an attacker would."""
    content = json.loads((path / "index.json").read_bytes())
    change(content["index"])
    body = b'"index":' + json.dumps(content["index"], separators=(",", ":")).encode() + b"}\n"
    (path / "index.json").write_bytes(b'{"checksum":"' + hashlib.sha256(body).hexdigest().encode() + b'",' + body)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_cut(tmp_path / "checkpoints", example(), 2, 0)


def test_every_flipped_byte_is_found(saved: Path) -> None:
    """Bytes of each file in turn, header and data: reading must raise."""
    expected = example()
    for file in sorted(saved.iterdir()):
        content = file.read_bytes()
        for place in range(0, len(content), 3 if file.name != "index.json" else 17):
            spoiled = bytearray(content)
            spoiled[place] ^= 1 << (place % 8)
            file.write_bytes(spoiled)
            with pytest.raises(CheckpointError):
                read_all(saved)
        file.write_bytes(content)
    for name, tensor in read_all(saved).items():
        assert_same(tensor, expected[name])


def test_a_damaged_tensor_is_named_and_others_can_be_read(saved: Path) -> None:
    file = saved / "rank_00001.safetensors"
    content = bytearray(file.read_bytes())
    with tensor_file(file) as opened:
        stored = opened.tensors["model/a.weight"]
    content[stored.start + 5] ^= 255
    file.write_bytes(content)
    with Reader(saved) as reader:
        assert_same(reader.read("model/b.weight"), example()["model/b.weight"])
        with pytest.raises(CheckpointError, match=r"rank_00001\.safetensors is damaged inside 'model/a\.weight'"):
            reader.read("model/a.weight")
        assert_same(reader.read("model/a.weight", ((0, 3), (0, 7))), example()["model/a.weight"][:3])  # that part is in rank 0's file


def tensor_file(path: Path) -> Any:
    from contextlib import closing

    return closing(tensor_files.TensorFile(path))


@pytest.mark.parametrize("length", [0, 4, 100, -1])
@pytest.mark.parametrize("file", ["rank_00000.safetensors", "index.json"])
def test_a_truncated_file_is_refused(saved: Path, file: str, length: int) -> None:
    content = (saved / file).read_bytes()
    (saved / file).write_bytes(content[:length])
    with pytest.raises(CheckpointError, match=f"{file}.*cut short"):
        read_all(saved)
    assert find_checkpoints(saved.parent) == []


@pytest.mark.parametrize("file", ["rank_00001.safetensors", "index.json"])
def test_a_missing_file_is_refused(saved: Path, file: str) -> None:
    (saved / file).unlink()
    with pytest.raises(CheckpointError, match=f"{file} is missing"):
        Reader(saved)
    assert find_checkpoints(saved.parent) == []


def test_swapped_files_are_refused(tmp_path: Path) -> None:
    """Two ranks' files of the same size and header; and the same rank's file of another step."""
    tensor = torch.arange(8.0)
    one, two = (save_cut(tmp_path, {"x": tensor + step}, 2, 0, step, f"job_{step}") for step in (1, 2))
    files = [one / "rank_00000.safetensors", one / "rank_00001.safetensors", two / "rank_00000.safetensors"]
    contents = [file.read_bytes() for file in files]
    assert len({len(content) for content in contents}) == 1
    for a, b in itertools.combinations(range(3), 2):
        files[a].write_bytes(contents[b])
        with pytest.raises(CheckpointError, match="damaged inside 'x'"):
            read_all(one)
        files[a].write_bytes(contents[a])
    shutil.copy(two / "index.json", one / "index.json")
    with pytest.raises(CheckpointError, match=r"is not the file that|damaged"):
        read_all(one)


def test_an_edited_index_is_refused(saved: Path) -> None:
    content = (saved / "index.json").read_text()
    (saved / "index.json").write_text(content.replace('"step":1', '"step":9'))
    with pytest.raises(CheckpointError, match="was changed or cut short"):
        Reader(saved)


def first_piece(index: dict[str, Any]) -> dict[str, Any]:
    return index["tensors"]["model/a.weight"]["pieces"][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index["files"].update({"../../etc/passwd": {"num_bytes": 9, "checksum": ""}}), "only files like"),
        (lambda index: index["files"].update({"/etc/passwd": {"num_bytes": 9, "checksum": ""}}), "only files like"),
        (lambda index: index["files"].update({"rank_00000.safetensors\n": {"num_bytes": 9, "checksum": ""}}), "only files like"),
        (lambda index: first_piece(index).update(file="../x"), "is not listed"),
        (lambda index: first_piece(index).update(ranges=[[0, 99], [0, 7]]), "does not lie inside shape"),
        (lambda index: first_piece(index).update(ranges=[[-1, 6], [0, 7]]), "does not lie inside shape"),
        (lambda index: first_piece(index).update(ranges=[[0, 7], [0, 7]]), "overlap"),
        (lambda index: first_piece(index).update(ranges=[[0, 5], [0, 7]]), "hold 84 of the 91 elements"),
        (lambda index: first_piece(index).update(ranges=[["0", 6], [0, 7]]), "valid integer"),
        (lambda index: first_piece(index).update(ranges=[[0.0, 6], [0, 7]]), "valid integer"),
        (lambda index: first_piece(index).update(checksums=""), "digits of checksums"),
        (lambda index: first_piece(index).update(key="model/b.weight"), "belongs to another tensor too"),
        (lambda index: index["tensors"]["model/a.weight"].update(pieces=[]), "hold 0 of the 91"),
        (lambda index: index["tensors"]["model/a.weight"].update(shape=[1 << 40, 1 << 40]), "impossible"),
        (
            lambda index: index["tensors"]["model/scalar"].update(
                shape=[1 << 40], pieces=[{**index["tensors"]["model/scalar"]["pieces"][0], "ranges": [[0, 1 << 40]]}]
            ),
            "bytes",
        ),
        (lambda index: index["tensors"]["model/a.weight"].update(dtype="O"), "its dtype 'O'"),
        (lambda index: index["tensors"]["model/a.weight"].update(dtype="I32"), "they disagree about 'model/a.weight'"),
        (lambda index: index["tensors"].pop("model/a.weight"), "they disagree about 'model/a.weight'"),
        (lambda index: index.update(step=-3), "step -3"),
        (lambda index: index.update(block_bytes=1), "blocks of 1 bytes"),
        (lambda index: index.update(format=99), "format 99, this Whale reads 1"),
        (lambda index: index.update(__reduce__="os.system"), "Unexpected keyword|unexpected|Extra"),
        (lambda index: index["files"]["rank_00000.safetensors"].update(checksum="0" * 64), "is not the file that"),
    ],
)
def test_a_crafted_index_is_refused(saved: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    rewrite_index(saved, change)
    with pytest.raises(CheckpointError, match=message):
        read_all(saved)


def test_garbage_in_place_of_an_index_is_refused(saved: Path) -> None:
    for body in [
        b"",
        b"[]}",
        b'"index":' + b"[" * 100_000,
        b'"index":{"format":1}}',
        b'"index":{"format":1,"a":1}}',
        pickle.dumps({"a": 1}),
    ]:
        (saved / "index.json").write_bytes(b'{"checksum":"' + hashlib.sha256(body).hexdigest().encode() + b'",' + body)
        with pytest.raises(CheckpointError):
            Reader(saved)


@pytest.mark.parametrize("file", ["rank_00000.safetensors", "index.json"])
def test_a_link_out_of_the_folder_is_refused(saved: Path, tmp_path: Path, file: str) -> None:
    shutil.move(saved / file, tmp_path / "elsewhere")
    (saved / file).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=f"{file} is a symbolic link"):
        Reader(saved)


def test_a_pipe_in_place_of_a_file_does_not_hang(saved: Path) -> None:
    (saved / "index.json").unlink()
    os.mkfifo(saved / "index.json")
    with pytest.raises(CheckpointError, match="is not a plain file"):
        Reader(saved)


class Bomb:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_pickle_is_refused_and_not_opened(saved: Path, tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    size = (saved / "rank_00000.safetensors").stat().st_size
    for content in (bomb.ljust(size, b"\0"), b"PK\x03\x04".ljust(size, b"\0")):  # a bare pickle, and a zip as torch.save makes it
        (saved / "rank_00000.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match="looks like a pickle"):
            read_all(saved)
    assert not (tmp_path / "exploded").exists()
    pickle.loads(bomb)  # the bomb is a real one
    assert (tmp_path / "exploded").exists()


def test_pickles_lying_about_are_ignored(saved: Path, tmp_path: Path) -> None:
    for name in (".metadata", "optimizer.pt", "__0_0.distcp", "rank_00000.pkl"):
        (saved / name).write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    for name, tensor in read_all(saved).items():
        assert_same(tensor, example()[name])
    assert not (tmp_path / "exploded").exists()


def test_the_package_has_no_way_to_execute_a_file() -> None:
    source = "".join(path.read_text() for path in Path(tensor_files.__file__).parent.glob("*.py"))
    for word in (
        "import pickle",
        "torch.load(",
        "torch.save(",
        "eval(",
        "exec(",
        "allow_pickle",
        "import marshal",
        "import shelve",
        "__import__",
    ):
        assert word not in source


# ---- headers of safetensors files, which strangers write


def header_file(path: Path, header: Any, data: bytes = b"\0" * 16) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


GOOD = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    "header",
    [
        {"x": {**GOOD, "shape": [5]}},
        {"x": {**GOOD, "shape": [1 << 61]}},
        {"x": {**GOOD, "shape": [-4]}},
        {"x": {**GOOD, "shape": [4.0]}},
        {"x": {**GOOD, "data_offsets": [0, 1 << 40]}},
        {"x": {**GOOD, "data_offsets": [-16, 0]}},
        {"x": {**GOOD, "data_offsets": [16, 0]}},
        {"x": {**GOOD, "shape": [2], "data_offsets": [8, 16]}},
        {"x": GOOD, "y": GOOD},
        {"x": {**GOOD, "more": 1}},
        {"x": [1, 2]},
        [1, 2],
        b'{"x":' + json.dumps(GOOD).encode() + b',"x":' + json.dumps(GOOD).encode() + b"}",
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_a_crafted_header_is_refused(tmp_path: Path, header: Any) -> None:
    with pytest.raises(CheckpointError):
        PretrainedReader(header_file(tmp_path / "x.safetensors", header)).read("x")


def test_the_plain_header_of_these_is_accepted(tmp_path: Path) -> None:
    assert PretrainedReader(header_file(tmp_path / "x.safetensors", {"x": GOOD})).read("x").tolist() == [0] * 4


# ---- writing that fails


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        sys.platform != "linux"
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True).returncode
    ):
        pytest.skip("mounting a small file system needs root on Linux")
    yield folder
    subprocess.run(["umount", folder], check=True)


def saver_of(folder: Path, **options: Any) -> AsyncSaver:
    return AsyncSaver(folder, job_id="job", timeout_s=SECOND, **options)


def test_a_full_disk_keeps_earlier_checkpoints_and_training(small_disk: Path) -> None:
    saver = saver_of(small_disk)
    small, large = torch.randn(1000), torch.randn(400_000)
    saver.save(1, {"w": small}).wait()
    handle = saver.save(2, {"w": large})
    with pytest.raises(CheckpointError, match=r"disk is full: this file needs 1,600,000 bytes, [\d,]+ are free\. Free some space"):
        handle.wait()
    assert [item.name for item in small_disk.iterdir()] == ["step_00000001"]
    assert_same(read_all(small_disk)["w"], small)
    saver.save(3, {"w": small + 1}).wait()  # there is room again
    assert_same(read_all(small_disk)["w"], small + 1)
    with pytest.raises(CheckpointError, match="disk is full"):
        export_safetensors(small_disk / "model.safetensors", {"w": large})
    assert sorted(item.name for item in small_disk.iterdir()) == ["step_00000001", "step_00000003"]


def test_a_full_disk_of_another_rank_is_told_to_all(small_disk: Path) -> None:
    savers = [saver_of(small_disk, rank=rank, num_ranks=3) for rank in range(3)]
    handles = [saver.save(5, {f"w{rank}": torch.randn(400_000 if rank == 1 else 10)}) for rank, saver in enumerate(savers)]
    with pytest.raises(CheckpointError, match=r"rank 1 could not write its part.*disk is full"):
        handles[0].wait()
    with pytest.raises(CheckpointError, match=r"disk is full"):
        handles[1].wait()
    with pytest.raises(CheckpointError, match=r"rank 0 gave up"):
        handles[2].wait()
    assert list(small_disk.iterdir()) == []
    handles = [saver.save(5, {f"w{rank}": torch.full((10,), rank)}) for rank, saver in enumerate(savers)]
    assert {handle.wait() for handle in handles} == {small_disk / "step_00000005"}


def test_a_read_only_folder_says_so(small_disk: Path) -> None:
    saver = saver_of(small_disk)
    saver.save(1, {"w": torch.ones(3)}).wait()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(CheckpointError, match=r"read-only.*Save to a folder that you can write to"):
        saver.save(2, {"w": torch.ones(3)}).wait()
    assert read_all(small_disk)["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("how", ["read-only", "disk is full"])
def test_a_disk_that_fails_before_another_rank_has_written_ends_the_save(small_disk: Path, how: str) -> None:
    """The other rank cannot even leave a note: rank 0 finds out by itself, long before its patience is over."""
    saver = AsyncSaver(small_disk, job_id="job", rank=0, num_ranks=2, timeout_s=3600.0)
    handle = saver.save(1, {"w": torch.ones(3)})
    reports = small_disk / ".tmp_00000001_job_1" / "rank_00000.json"
    while not reports.exists():
        time.sleep(0.01)
    if how == "read-only":
        while subprocess.run(["mount", "-o", "remount,ro", small_disk], capture_output=True).returncode:
            time.sleep(0.01)
    else:
        with contextlib.suppress(OSError), (small_disk / "ballast").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
    with pytest.raises(CheckpointError, match=how):
        handle.wait(60.0)


def test_a_folder_without_permission_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write everywhere, so the refusal of the system is played."""

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "makedirs", refuse)
    with pytest.raises(CheckpointError, match="may not write there"):
        saver_of(tmp_path).save(2, {"w": torch.ones(3)}).wait()


LIMITED = """
import resource, sys, torch
from whale.checkpoint import AsyncSaver, CheckpointError, Reader

saver = AsyncSaver(sys.argv[1], job_id="job", timeout_s=5.0)
saver.save(1, {"w": torch.ones(1000)}).wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    saver.save(2, {"w": torch.ones(100_000)}).wait()
except CheckpointError as error:
    print(error)
saver.save(3, {"w": torch.full((1000,), 3.0)}).wait()
"""


def test_a_file_that_may_not_grow_keeps_earlier_checkpoints_and_training(tmp_path: Path) -> None:
    """A write that the system cuts short, on any machine: a full disk of the same kind needs root to be made."""
    done = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "a file of 400,000 bytes is larger than" in done.stdout and "Raise `ulimit -f`" in done.stdout
    assert sorted(item.name for item in tmp_path.iterdir()) == ["step_00000001", "step_00000003"]
    assert read_all(tmp_path)["w"].tolist() == [3.0] * 1000


def test_a_file_in_place_of_the_folder_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"writing .* failed: Not a directory"):
        saver_of(tmp_path / "file").save(2, {"w": torch.ones(3)}).wait()


class Crash(BaseException):
    """The process is gone: nothing that it does after this has any effect."""


OPERATIONS = ("open", "write", "fsync", "replace", "rename", "unlink", "rmdir", "mkdir")


RENAME = os.rename


class Faults:
    """Lets the first `allowed` operations on files through, then fails: one of them, or (a crash) all from there on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, allowed: int, error: BaseException) -> None:
        self.count, self.allowed, self.error = 0, allowed, error
        self.renamed = self.error_after_rename = False
        for name in OPERATIONS:
            monkeypatch.setattr(os, name, self.wrap(getattr(os, name)))

    def wrap(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            if self.count == self.allowed + 1 or (self.count > self.allowed and isinstance(self.error, Crash)):
                self.error_after_rename = self.renamed
                raise self.error
            self.renamed = self.renamed or real is RENAME
            return real(*arguments, **options)

        return call


def contents(step: int, save: int) -> dict[str, Tensor]:
    return {"x": torch.full((6, 2), float(100 * step + save)), "y": torch.full((3,), float(100 * step + save))}


def check_what_is_there(folder: Path, allowed: dict[int, set[int]]) -> list[int]:
    """Every checkpoint that is found loads, and is one of the saves of its step as a whole."""
    steps = []
    for path in find_checkpoints(folder):
        with Reader(path) as reader:
            got = {name: set(reader.read(name).reshape(-1).tolist()) for name in reader.names()}
        assert got.keys() == {"x", "y"} and got["x"] == got["y"] and len(got["x"]) == 1
        step, save = divmod(int(got["x"].pop()), 100)
        assert step == reader.step and save in allowed[step]
        steps.append(step)
    return steps


def two_saves(folder: Path) -> None:
    """Step 2 for the first time, then step 2 again, with the last two to be kept of steps 0 and 1."""
    save_cut(folder, contents(2, 1), 2, 0, step=2, save_id="job_2", keep=2)
    save_cut(folder, contents(2, 2), 2, 0, step=2, save_id="job_3", keep=2)


def prepared_folder(folder: Path) -> Path:
    for step in (0, 1):
        save_cut(folder, contents(step, 0), 2, 0, step=step, save_id=f"job_{step}")
    return folder


@pytest.mark.parametrize("kind", ["crash", "full"])
def test_a_failure_at_any_operation_never_leaves_a_checkpoint_that_loads_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    possible = {0: {0}, 1: {0}, 2: {1, 2}}
    outcomes = Counter[tuple[int, ...]]()
    template = prepared_folder(tmp_path / "template")
    for allowed in itertools.count():
        folder = shutil.copytree(template, tmp_path / f"{kind}{allowed}")
        error = Crash() if kind == "crash" else OSError(errno.ENOSPC, "No space left on device")
        with monkeypatch.context() as patch:
            faults = Faults(patch, allowed, error)
            try:
                two_saves(folder)
                raised: BaseException | None = None
            except (Crash, CheckpointError) as problem:
                raised = problem
        steps = check_what_is_there(folder, possible)
        outcomes[tuple(steps)] += 1
        assert 1 in steps and (raised is not None or 2 in steps)
        save_cut(folder, contents(3, 7), 1, 0, step=3, save_id="job_9", keep=2)  # and life goes on, other rank count included
        assert check_what_is_there(folder, {**possible, 3: {7}})[0] == 3
        leftovers = [item.name for item in folder.iterdir() if not item.name.startswith("step_")]
        assert leftovers == []
        if faults.count <= allowed:
            break
    assert allowed > 30  # there were that many operations to fail
    assert outcomes.keys() >= {(1, 0), (2, 1)}


def test_an_error_at_any_operation_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process lives, so the saver cleans up after itself; the earlier checkpoint stays; the next save works."""
    num_errors = 0
    for allowed in itertools.count():
        folder = tmp_path / str(allowed)
        saver = saver_of(folder, keep=1)
        saver.save(1, {"w": torch.ones(3)}).wait()
        with monkeypatch.context() as patch:
            faults = Faults(patch, allowed, OSError(errno.EIO, "Input/output error"))
            try:
                saver.save(2, {"w": torch.full((3,), 2.0)}).wait()
                was_saved = True
            except CheckpointError as error:
                assert "Input/output error. Check the disk" in str(error)
                was_saved = False
        num_errors += not was_saved
        names = {item.name for item in folder.iterdir()}
        if was_saved:
            assert "step_00000002" in names  # at worst the older one could not be removed
        elif faults.error_after_rename:
            assert "step_00000002" in names or "step_00000001" in names
        else:
            assert names == {"step_00000001"}
        assert all(set(read_all(path)["w"].tolist()) == {float(path.name[-1])} for path in find_checkpoints(folder))
        saver.save(3, {"w": torch.full((3,), 3.0)}).wait()
        assert [item.name for item in folder.iterdir()] == ["step_00000003"]
        if faults.count <= allowed:
            break
    assert num_errors > 10


def test_a_stale_folder_of_the_same_step_is_never_mixed_in(tmp_path: Path) -> None:
    """Rank 1 wrote step 5 before a crash; the next run of the job saves step 5 again and must not take that file."""
    write_rank(Target(tmp_path, 5, "first_1"), 1, Snapshot({"old": torch.ones(2)}, {}, {}))
    target = Target(tmp_path, 5, "second_1")
    write_rank(target, 0, Snapshot({"a": torch.zeros(2)}, {}, {}))
    with pytest.raises(CheckpointError, match=r"rank 1 of 2 did not write for 1 s.*same step and see the same folder"):
        finish(target, 2, {}, timeout_s=SECOND)
    assert find_checkpoints(tmp_path) == [] and not target.temporary.exists()


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (((0, 2),), ((2, 3),), "hold 3 of the 4"),
        (((0, 3),), ((2, 4),), "overlap"),
    ],
)
def test_ranks_that_do_not_fit_together_are_found_when_saving(tmp_path: Path, first: Any, second: Any, message: str) -> None:
    target = Target(tmp_path, 1, "job_1")
    for rank, ranges in enumerate((first, second)):
        size = ranges[0][1] - ranges[0][0]
        write_rank(target, rank, take_snapshot({"x": torch.ones(size)}, parts={"x": Part((4,), ranges)}))
    with pytest.raises(CheckpointError, match=f"'x' is wrong: .*{message}"):
        finish(target, 2, {})
    assert list(tmp_path.iterdir()) == []


# ---- which checkpoints stay


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    saver = saver_of(tmp_path, keep=2)
    for step in (3, 20, 100):
        saver.save(step, {"w": torch.full((2,), float(step))}).wait()
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step_00000100", "step_00000020"]
    saver.save(50, {"w": torch.full((2,), 50.0)}).wait()  # after going back to step 20: later steps are not this run's to remove
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step_00000100", "step_00000050", "step_00000020"]
    assert sorted(item.name[:5] for item in tmp_path.iterdir()) == ["step_"] * 3
    with pytest.raises(ValueError, match="keep=0"):
        saver_of(tmp_path, keep=0)


def test_a_living_save_of_another_job_is_not_removed(tmp_path: Path) -> None:
    theirs = Target(tmp_path, 1, "other_1")
    write_rank(theirs, 0, take_snapshot({"w": torch.ones(2)}))
    saver_of(tmp_path).save(2, {"w": torch.zeros(2)}).wait()
    assert finish(theirs, 1, {}).exists()
    abandoned = Target(tmp_path, 3, "third_1")
    write_rank(abandoned, 0, take_snapshot({"w": torch.ones(2)}))
    for item in (*abandoned.temporary.iterdir(), abandoned.temporary):
        os.utime(item, (1, 1))
    saver_of(tmp_path).save(4, {"w": torch.zeros(2)}).wait()
    assert not abandoned.temporary.exists()


# ---- beside training


def test_save_returns_before_the_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (go.wait(10), real(descriptor))[1])
    weight = torch.ones(5)
    handle = saver_of(tmp_path).save(1, {"w": weight}, {"lr": 0.5})
    weight.zero_()
    assert not handle.done() and find_checkpoints(tmp_path) == []
    go.set()
    assert handle.wait() == tmp_path / "step_00000001" and handle.done()
    assert read_all(tmp_path)["w"].tolist() == [1] * 5


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    saver = saver_of(tmp_path)
    handles = [saver.save(step, {"w": torch.full((1000,), float(step))}) for step in range(4)]
    assert all(handle.done() for handle in handles[:-1])
    handles[-1].wait()
    for step, path in enumerate(reversed(find_checkpoints(tmp_path))):
        assert read_all(path)["w"].unique().tolist() == [step]


def test_several_ranks_at_once(tmp_path: Path) -> None:
    tensor = torch.randn(30, 4)
    savers = [AsyncSaver(tmp_path, job_id="job", rank=rank, num_ranks=4, timeout_s=20) for rank in range(4)]
    for step in (1, 2):
        handles = []
        for saver, (piece, part) in zip(savers, cut(tensor * step, 4, 0)):
            handles.append(saver.save(step, {"x": piece}, {"from": saver._rank}, {"rank": saver._rank}, {"x": part}))
        assert {handle.wait() for handle in handles} == {tmp_path / f"step_{step:08d}"}
    with Reader(tmp_path) as reader:
        assert reader.values == {"from": 0} and [values["rank"] for values in reader.rank_values] == [0, 1, 2, 3]
        assert_same(reader.read("x"), tensor * 2)


def test_a_script_that_ends_after_save_still_gets_its_checkpoint(tmp_path: Path) -> None:
    script = (
        "import sys, torch; from whale.checkpoint import AsyncSaver\n"
        "AsyncSaver(sys.argv[1], job_id='job').save(7, {'w': torch.ones(300000)})"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=60)
    assert read_all(tmp_path)["w"].sum() == 300000


def test_values_that_cannot_be_saved_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"values\.sampler is a"):
        saver_of(tmp_path).save(1, {"w": torch.ones(1)}, {"sampler": object()})
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        Reader(tmp_path)


# ---- optimizers


def network() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4), torch.nn.Linear(4, 3))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
}


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, scheduler: Any = None) -> None:
    generator = torch.Generator().manual_seed(steps)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(7, 6, generator=generator)).pow(2).mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step(0.1) if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else scheduler.step()


def groups(model: torch.nn.Module, only: Callable[[str], bool] = lambda name: True) -> list[dict[str, Any]]:
    """Two groups, weights and biases, with different options; only the parameters that a rank holds."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if only(name)]
    return [
        {"params": [pair for pair in named if pair[0].endswith("weight")], "weight_decay": 0.1},
        {"params": [pair for pair in named if pair[0].endswith("bias")], "weight_decay": 0.0, "lr": 0.02},
    ]


def names_of(model: torch.nn.Module) -> dict[Any, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def assert_same_state(got: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, Tensor):
        assert isinstance(got, Tensor), where
        assert_same(got, expected)
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys(), where
        for key in expected:
            assert_same_state(got[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert type(got) is type(expected) and len(got) == len(expected), where
        for place, pair in enumerate(zip(got, expected)):
            assert_same_state(*pair, f"{where}[{place}]")
    else:
        assert got == expected, where


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_an_optimizer_comes_back_as_torch_itself_would_bring_it(tmp_path: Path, kind: str) -> None:
    model = network()
    optimizer = OPTIMIZERS[kind](groups(model))
    train(model, optimizer, 3)
    tensors, values = pack_optimizer(optimizer, names_of(model))
    saver_of(tmp_path).save(1, tensors, rank_values={"optimizer": values}).wait()

    ours, oracle = OPTIMIZERS[kind](groups(model)), OPTIMIZERS[kind](groups(model))
    oracle.load_state_dict(optimizer.state_dict())
    with Reader(tmp_path) as reader:
        unpack_optimizer(ours, names_of(model), reader.read, merge_values(v["optimizer"] for v in reader.rank_values))
    assert_same_state(ours.state_dict(), oracle.state_dict())


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adafactor"])
@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, 3), (3, 1), (3, 2)])
def test_training_goes_on_under_another_rank_count(tmp_path: Path, kind: str, saved_by: int, loaded_by: int) -> None:
    """Every rank holds some layers. Straight local training is the reference."""

    def on(rank: int, num_ranks: int) -> Callable[[str], bool]:
        return lambda name: int(name.partition(".")[0]) * num_ranks // 4 == rank

    straight = network()
    optimizer = OPTIMIZERS[kind](groups(straight))
    train(straight, optimizer, 3)
    middle = {name: tensor.clone() for name, tensor in straight.state_dict().items()}

    savers = [AsyncSaver(tmp_path, job_id="job", rank=rank, num_ranks=saved_by, timeout_s=20) for rank in range(saved_by)]
    handles = []
    for rank, saver in enumerate(savers):
        mine = [name for name, _ in straight.named_parameters() if on(rank, saved_by)(name)]
        tensors, values = pack_optimizer(optimizer, names_of(straight), only=mine)
        model_tensors = {f"model/{name}": middle[name] for name in mine}
        handles.append(saver.save(3, {**tensors, **model_tensors}, rank_values={"optimizer": values}))
    for handle in handles:
        handle.wait()
    train(straight, optimizer, 4)

    resumed = network()
    optimizers = []
    with Reader(tmp_path) as reader:
        with torch.no_grad():
            for name, parameter in resumed.named_parameters():
                parameter.copy_(reader.read(f"model/{name}"))
        merged = merge_values(values.get("optimizer") for values in reader.rank_values)
        for rank in range(loaded_by):
            own = OPTIMIZERS[kind](groups(resumed, on(rank, loaded_by)))
            for group in own.param_groups:
                group["lr"] = 123.0  # must come from the checkpoint
            unpack_optimizer(own, names_of(resumed), reader.read, merged)
            optimizers.append(own)

    class All:
        def zero_grad(self) -> None:
            [own.zero_grad() for own in optimizers]

        def step(self) -> None:
            [own.step() for own in optimizers]

    train(resumed, All(), 4)  # type: ignore[arg-type]
    for name, tensor in resumed.state_dict().items():
        assert_same(tensor, straight.state_dict()[name])


def test_optimizers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = network()
    optimizer = OPTIMIZERS["SGD"](groups(model))
    train(model, optimizer, 1)
    tensors, values = pack_optimizer(optimizer, names_of(model), only=["0.weight", "0.bias"])
    with pytest.raises(CheckpointError, match="state of SGD, this job uses Adam"):
        unpack_optimizer(OPTIMIZERS["Adam"](groups(model)), names_of(model), tensors.__getitem__, values)
    with pytest.raises(CheckpointError, match=r"no optimizer state for 2 parameters, the first are 2\.weight, 3\.weight"):
        unpack_optimizer(optimizer, names_of(model), tensors.__getitem__, values)
    first = network()
    one_group = OPTIMIZERS["SGD"](list(first[0].parameters()))
    with pytest.raises(
        CheckpointError, match=r"0\.weight and 0\.bias are both in group 0 now.*different lr, weight_decay|different weight_decay"
    ):
        unpack_optimizer(one_group, names_of(first), tensors.__getitem__, merge_values([values, None]))
    with pytest.raises(CheckpointError, match="not one of the model's"):
        pack_optimizer(optimizer, {})


class OddOptimizer(torch.optim.SGD):
    """Keeps a function in its state."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["schedule"] = print


def test_optimizer_state_that_cannot_be_saved_is_named() -> None:
    model = network()
    optimizer = OddOptimizer(model.parameters(), lr=0.1)
    train(model, optimizer, 1)
    with pytest.raises(CheckpointError, match=r"the state of OddOptimizer for 0\.weight\.schedule is a"):
        pack_optimizer(optimizer, names_of(model))


# ---- schedulers


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]),
    "Cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 9),
    "OneCycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.3, total_steps=12),
    "Cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, 3),
    "Plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "Sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=3), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "Warm restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
}


def learning_rates(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[list[float]]:
    rates = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step(0.1) if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else scheduler.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
    return rates


@pytest.mark.parametrize("kind", sorted(SCHEDULERS))
def test_a_scheduler_goes_on_where_it_was(tmp_path: Path, kind: str) -> None:
    model = network()
    optimizer = OPTIMIZERS["SGD"](groups(model))
    scheduler = SCHEDULERS[kind](optimizer)
    train(model, optimizer, 3, scheduler)
    tensors, values = pack_optimizer(optimizer, names_of(model))
    saver_of(tmp_path).save(1, tensors, {"optimizer": values, "scheduler": pack_scheduler(scheduler)}).wait()
    ours = OPTIMIZERS["SGD"](groups(model))
    other = SCHEDULERS[kind](ours)
    with Reader(tmp_path) as reader:
        unpack_optimizer(ours, names_of(model), reader.read, merge_values([reader.values["optimizer"]]))
        unpack_scheduler(other, reader.values["scheduler"], ours)
    assert learning_rates(ours, other, 5) == learning_rates(optimizer, scheduler, 5)


@pytest.mark.parametrize("kind", ["StepLR", "Cosine", "Sequential"])
def test_a_scheduler_fits_another_number_of_groups(tmp_path: Path, kind: str) -> None:
    """One group for each parameter: a rank that holds two of them has two groups, and takes their rates."""
    model = network()
    single = [{"params": [pair], "lr": 0.1 * (place + 1)} for place, pair in enumerate(model.named_parameters())]
    optimizer = torch.optim.SGD(single, lr=0.1)
    scheduler = SCHEDULERS[kind](optimizer)
    train(model, optimizer, 2, scheduler)
    _, values = pack_optimizer(optimizer, names_of(model))
    state = decode(json.loads(json.dumps(encode(pack_scheduler(scheduler), "s"))))
    ours = torch.optim.SGD([{"params": [pair]} for pair in list(model.named_parameters())[2:4]], lr=9.0)
    other = SCHEDULERS[kind](ours)
    unpack_optimizer(ours, names_of(model), {}.__getitem__, values)
    unpack_scheduler(other, state, ours)
    assert learning_rates(ours, other, 4) == [rates[2:4] for rates in learning_rates(optimizer, scheduler, 4)]


def test_a_scheduler_that_cannot_be_saved_is_named() -> None:
    optimizer = OPTIMIZERS["SGD"](network().parameters())

    class Holder:
        def __call__(self, step: int) -> float:
            return 1.0

    holder = Holder()
    holder.function = print  # type: ignore[attr-defined]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, holder)
    with pytest.raises(CheckpointError, match=r"the state of LambdaLR\.lr_lambdas\[0\]\.function is a"):
        pack_scheduler(scheduler)
    with pytest.raises(CheckpointError, match="state of StepLR, this job uses LambdaLR"):
        unpack_scheduler(scheduler, pack_scheduler(SCHEDULERS["StepLR"](optimizer)), optimizer)


# ---- random numbers


def draw() -> list[Any]:
    return [
        torch.rand(3).tolist(),
        random.random(),
        random.gauss(0, 1),
        np.random.rand(2).tolist(),
        np.random.randn(),
        torch.randn(1).item(),
    ]


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    random.gauss(0, 1), np.random.randn(), torch.randn(1)  # leaves half a pair of normal numbers in each
    tensors, values = pack_rng("rng/0/")
    saver_of(tmp_path).save(1, tensors, rank_values={"rng": values}).wait()
    expected = draw()
    torch.manual_seed(99), random.seed(99), np.random.seed(99)
    assert draw() != expected
    with Reader(tmp_path) as reader:
        unpack_rng("rng/0/", reader.read, reader.rank_values[0]["rng"])
    assert draw() == expected


@pytest.mark.parametrize("part", ["torch", "python", "numpy"])
def test_a_crafted_random_state_is_refused_and_changes_nothing(part: str) -> None:
    tensors, values = pack_rng("")
    before = draw()
    unpack_rng("", tensors.__getitem__, values)
    spoiled = {**tensors, part: torch.full_like(tensors[part], -1) if part != "torch" else tensors[part][:-9].clone()}
    with pytest.raises(CheckpointError, match="random number state"):
        unpack_rng("", spoiled.__getitem__, values)
    with pytest.raises(CheckpointError, match="random number state"):
        unpack_rng("", tensors.__getitem__, {**values, "numpy": {**values["numpy"], "position": 10**6}})
    assert draw() == before


# ---- pretrained weights


def pretrained_tensors() -> dict[str, Tensor]:
    return {f"h.{i}.weight": torch.full((64, 32), float(i)) for i in range(6)} | {"wte.weight": torch.randn(100, 32)}


def write_sharded(folder: Path, tensors: dict[str, Tensor], num_shards: int) -> Path:
    folder.mkdir()
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        some = dict(list(tensors.items())[shard::num_shards])
        safetensors.torch.save_file(some, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(some, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return folder


@pytest.fixture(params=["file", "folder", "sharded", "links"])
def pretrained(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    tensors = pretrained_tensors()
    if request.param == "sharded":
        return write_sharded(tmp_path / "sharded", tensors, 3)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "one").mkdir()
    real = tmp_path / ("blobs/abc123" if request.param == "links" else "one/model.safetensors")
    safetensors.torch.save_file(tensors, real, {"format": "pt"})
    if request.param == "links":  # the Hugging Face cache
        (tmp_path / "one" / "model.safetensors").symlink_to("../blobs/abc123")
    return tmp_path / "one" / "model.safetensors" if request.param == "file" else tmp_path / "one"


def test_pretrained_weights_are_read_by_name_and_slice(pretrained: Path) -> None:
    torch.manual_seed(0)
    reader = PretrainedReader(pretrained)
    tensors = pretrained_tensors()
    assert sorted(reader.names()) == sorted(tensors)
    torch.manual_seed(0)
    for name, tensor in pretrained_tensors().items():
        if name != "wte.weight":
            assert_same(reader.read(name), tensor)
        assert reader.shape(name) == tuple(tensor.shape)
    whole = reader.read("wte.weight")
    assert_same(reader.read("wte.weight", ((10, 20), (0, 32))), whole[10:20])
    assert_same(reader.read("wte.weight", ((3, 90), (5, 9))), whole[3:90, 5:9])
    with pytest.raises(CheckpointError, match=r"no tensor 'wte\.wieght'\. Did you mean 'wte\.weight'"):
        reader.read("wte.wieght")
    with pytest.raises(CheckpointError, match=r"has shape \[100, 32\]"):
        reader.read("wte.weight", ((0, 101), (0, 32)))
    reader.close()


def test_pretrained_reads_only_what_a_rank_needs(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.randn(512, 1024) for i in range(6)}
    folder = write_sharded(tmp_path / "sharded", tensors, 2)
    for box in (((0, 512), (0, 1024)), ((100, 200), (0, 1024)), ((0, 512), (256, 512))):  # whole, rows, columns
        reader = PretrainedReader(folder)
        for name in ("w1", "w2"):
            assert_same(reader.read(name, box), tensors[name][tuple(slice(*r) for r in box)])
        needed = 2 * 4 * (box[0][1] - box[0][0]) * (box[1][1] - box[1][0])
        assert needed <= reader.num_bytes_read <= 1.05 * needed
        reader.close()


@pytest.mark.parametrize(
    ("wanted", "stored", "how"),
    [
        (["h.0.w", "wte.w"], ["h.0.w", "wte.w"], ""),
        (["transformer.h.0.w", "transformer.wte.w"], ["h.0.w", "wte.w"], "without 'transformer.'"),
        (["h.0.w", "wte.w"], ["transformer.h.0.w", "transformer.wte.w", "lm_head.w"], "with 'transformer.'"),
        (["transformer.wte.w", "lm_head.w"], ["wte.w"], "without 'transformer.'"),  # lm_head is tied
        (["transformer.wte.w", "score.w"], ["wte.w", "score.w"], "without 'transformer.'"),
        (["wte.w", "score.w"], ["transformer.wte.w", "score.w"], "with 'transformer.'"),
    ],
)
def test_names_match_with_a_prefix_more_or_less(tmp_path: Path, wanted: list[str], stored: list[str], how: str) -> None:
    safetensors.torch.save_file({name: torch.ones(2) for name in stored}, tmp_path / "model.safetensors")
    aliases = {name: ("transformer.wte.w" if name == "lm_head.w" else name) for name in wanted}
    match = PretrainedReader(tmp_path).match(wanted, aliases)
    assert match.how == how
    assert match.stored.keys() == set(wanted) and set(match.stored.values()) <= set(stored)
    for name, found in match.stored.items():
        tail = "wte.w" if name == "lm_head.w" else name.removeprefix("transformer.")
        assert found.removeprefix("transformer.") == tail
    assert set(match.unexpected) == set(stored) - set(match.stored.values())


def test_names_that_do_not_match_are_listed(tmp_path: Path) -> None:
    safetensors.torch.save_file({name: torch.ones(2) for name in ("a.x", "b.x")}, tmp_path / "model.safetensors")
    reader = PretrainedReader(tmp_path)
    with pytest.raises(CheckpointError, match=r"lacks 2 of the 3 tensors that the model needs, the first are c\.x, d\.x\."):
        reader.match(["a.x", "c.x", "d.x"])
    with pytest.raises(CheckpointError, match="in more than one way"):
        reader.match(["x"])


def test_pickles_are_refused_with_the_way_out(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(CheckpointError, match=r"pickle.*save_pretrained"):
            PretrainedReader(path)
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "pytorch_model.bin").read_bytes())
    with pytest.raises(CheckpointError, match="looks like a pickle"):
        PretrainedReader(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        PretrainedReader(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds neither"):
        PretrainedReader(tmp_path / "empty")


@pytest.mark.parametrize("shard", ["../other/model.safetensors", "/tmp/x.safetensors", "a/b.safetensors", "model.bin", 5, ".."])
def test_an_index_of_shards_cannot_lead_out_of_the_folder(tmp_path: Path, shard: Any) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": shard}}))
    with pytest.raises(CheckpointError, match=r"only \.safetensors files beside it"):
        PretrainedReader(tmp_path)


def test_export_is_read_by_safetensors_and_ties_are_written_once(tmp_path: Path) -> None:
    shared = torch.randn(4, 3)
    state = {
        "wte.weight": shared,
        "h.bias": torch.randn(3).half(),
        "lm_head.weight": shared,
        "empty": torch.zeros(0),
        "none": torch.zeros(0),
    }
    path = export_safetensors(tmp_path / "model.safetensors", state)
    with safetensors.safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "lm_head.weight": "wte.weight"}
        assert set(opened.keys()) == state.keys() - {"lm_head.weight"}
        for name in opened.keys():  # noqa: SIM118
            assert_same(opened.get_tensor(name), state[name])
    match = PretrainedReader(path).match(["wte.weight", "lm_head.weight"], {"lm_head.weight": "wte.weight", "wte.weight": "wte.weight"})
    assert match.stored == {"wte.weight": "wte.weight", "lm_head.weight": "wte.weight"}
    export_safetensors(path, {"x": torch.ones(1)})  # replaces
    assert list(safetensors.torch.load_file(path)) == ["x"] and [item.name for item in tmp_path.iterdir()] == ["model.safetensors"]
    with pytest.raises(ValueError, match=r"must end in \.safetensors"):
        export_safetensors(tmp_path / "model.bin", {})


def test_a_hugging_face_model_both_ways(tmp_path: Path) -> None:
    """`save_pretrained` in shards is read into a model of ours; our export is read by `from_pretrained`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(5)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16)).eval()
    batch = torch.arange(8)[None]
    expected = model(batch).logits
    model.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    model.transformer.save_pretrained(tmp_path / "base")  # without the prefix 'transformer.'
    for folder in ("theirs", "base"):
        other = GPT2LMHeadModel(model.config).eval()
        reader = PretrainedReader(tmp_path / folder)
        state = other.state_dict()
        match = reader.match(state, {"lm_head.weight": "transformer.wte.weight"}, [other.base_model_prefix])
        assert match.unexpected == ()
        other.load_state_dict({name: reader.read(stored) for name, stored in match.stored.items()})
        assert torch.equal(other(batch).logits, expected)
    (tmp_path / "ours").mkdir()
    export_safetensors(tmp_path / "ours" / "model.safetensors", model.state_dict())
    model.config.save_pretrained(tmp_path / "ours")
    assert torch.equal(GPT2LMHeadModel.from_pretrained(tmp_path / "ours").eval()(batch).logits, expected)


def test_index_is_plain_data(saved: Path) -> None:
    """The index says what the issue asks for: name, global shape, index ranges, file, and a checksum for each file."""
    raw = json.loads((saved / "index.json").read_bytes())["index"]
    piece = raw["tensors"]["model/a.weight"]["pieces"][1]
    assert raw["tensors"]["model/a.weight"]["shape"] == [13, 7]
    assert (piece["file"], piece["ranges"]) == ("rank_00001.safetensors", [[6, 13], [0, 7]])
    assert all(len(info["checksum"]) == 64 for info in raw["files"].values())
    assert read_index(saved).step == 1
