"""What is damaged, torn or crafted is refused by name, and nothing is ever executed."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.checkpoints import assert_same, example, read_all, save_cut
from whale.checkpoint import (
    CheckpointError,
    PretrainedReader,
    Reader,
    find_checkpoints,
    read_index,
    tensor_files,
)
from whale.checkpoint.tensor_files import COMPLEX

# ---- damage: each kind is refused with the file and the tensor, and nothing wrong is ever returned


def rewrite_index(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Edits an index and gives it a right checksum again, as an attacker would."""
    content = json.loads((path / "index.json").read_bytes())
    change(content["index"])
    body = b'"index":' + json.dumps(content["index"], separators=(",", ":")).encode() + b"}\n"
    (path / "index.json").write_bytes(
        b'{"checksum":"' + hashlib.sha256(body).hexdigest().encode() + b'",' + body
    )


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
        with pytest.raises(
            CheckpointError, match=r"rank_00001\.safetensors is damaged inside 'model/a\.weight'"
        ):
            reader.read("model/a.weight")
        assert_same(
            reader.read("model/a.weight", ((0, 3), (0, 7))), example()["model/a.weight"][:3]
        )  # that part is in rank 0's file


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
    one, two = (
        save_cut(tmp_path, {"x": tensor + step}, 2, 0, step, f"job_{step}") for step in (1, 2)
    )
    files = [
        one / "rank_00000.safetensors",
        one / "rank_00001.safetensors",
        two / "rank_00000.safetensors",
    ]
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
        (
            lambda index: index["files"].update(
                {"../../etc/passwd": {"num_bytes": 9, "checksum": ""}}
            ),
            "only files like",
        ),
        (
            lambda index: index["files"].update({"/etc/passwd": {"num_bytes": 9, "checksum": ""}}),
            "only files like",
        ),
        (
            lambda index: index["files"].update(
                {"rank_00000.safetensors\n": {"num_bytes": 9, "checksum": ""}}
            ),
            "only files like",
        ),
        (lambda index: first_piece(index).update(file="../x"), "is not listed"),
        (
            lambda index: first_piece(index).update(ranges=[[0, 99], [0, 7]]),
            "does not lie inside shape",
        ),
        (
            lambda index: first_piece(index).update(ranges=[[-1, 6], [0, 7]]),
            "does not lie inside shape",
        ),
        (lambda index: first_piece(index).update(ranges=[[0, 7], [0, 7]]), "overlap"),
        (
            lambda index: first_piece(index).update(ranges=[[0, 5], [0, 7]]),
            "hold 84 of the 91 elements",
        ),
        (lambda index: first_piece(index).update(ranges=[["0", 6], [0, 7]]), "valid integer"),
        (lambda index: first_piece(index).update(ranges=[[0.0, 6], [0, 7]]), "valid integer"),
        (lambda index: first_piece(index).update(checksums=""), "digits of checksums"),
        (
            lambda index: first_piece(index).update(key="model/b.weight"),
            "belongs to another tensor too",
        ),
        (lambda index: index["tensors"]["model/a.weight"].update(pieces=[]), "hold 0 of the 91"),
        (
            lambda index: index["tensors"]["model/a.weight"].update(shape=[1 << 40, 1 << 40]),
            "impossible",
        ),
        (
            lambda index: index["tensors"]["model/scalar"].update(
                shape=[1 << 40],
                pieces=[
                    {**index["tensors"]["model/scalar"]["pieces"][0], "ranges": [[0, 1 << 40]]}
                ],
            ),
            "bytes",
        ),
        (lambda index: index["tensors"]["model/a.weight"].update(dtype="O"), "its dtype 'O'"),
        (
            lambda index: index["tensors"]["model/a.weight"].update(dtype="I32"),
            "they disagree about 'model/a.weight'",
        ),
        (
            lambda index: index["tensors"].pop("model/a.weight"),
            "they disagree about 'model/a.weight'",
        ),
        (lambda index: index.update(step=-3), "step -3"),
        (lambda index: index.update(block_bytes=1), "blocks of 1 bytes"),
        (lambda index: index.update(format=99), "format 99, this Whale reads 1"),
        (lambda index: index.update(__reduce__="os.system"), "Unexpected keyword|unexpected|Extra"),
        (
            lambda index: index["files"]["rank_00000.safetensors"].update(checksum="0" * 64),
            "is not the file that",
        ),
    ],
)
def test_a_crafted_index_is_refused(
    saved: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
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
        (saved / "index.json").write_bytes(
            b'{"checksum":"' + hashlib.sha256(body).hexdigest().encode() + b'",' + body
        )
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
    for content in (
        bomb.ljust(size, b"\0"),
        b"PK\x03\x04".ljust(size, b"\0"),
    ):  # a bare pickle, and a zip as torch.save makes it
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
        {"__metadata__": {COMPLEX: '["x"]'}, "x": {**GOOD, "dtype": "F64", "shape": []}},
        {"__metadata__": {COMPLEX: '["x"]'}, "x": GOOD},
        {"__metadata__": {COMPLEX: "7"}, "x": GOOD},
        {"__metadata__": {COMPLEX: ["x"]}, "x": GOOD},
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
    assert (
        PretrainedReader(header_file(tmp_path / "x.safetensors", {"x": GOOD})).read("x").tolist()
        == [0] * 4
    )


def test_index_is_plain_data(saved: Path) -> None:
    """The index says what the issue asks for: name, global shape, index ranges, file, and a
    checksum for each file.
    """
    raw = json.loads((saved / "index.json").read_bytes())["index"]
    piece = raw["tensors"]["model/a.weight"]["pieces"][1]
    assert raw["tensors"]["model/a.weight"]["shape"] == [13, 7]
    assert (piece["file"], piece["ranges"]) == ("rank_00001.safetensors", [[6, 13], [0, 7]])
    assert all(len(info["checksum"]) == 64 for info in raw["files"].values())
    assert read_index(saved).step == 1
