"""What was saved comes back under any other cut: tensors, values, and no more bytes read than a
rank needs.

"Ranks" are simulated in one process: they meet in a folder only, so threads or plain calls in turn
are the same thing.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.checkpoints import assert_same, cut, example, save_cut
from whale.checkpoint import (
    CheckpointError,
    Reader,
    TensorPart,
    assign_writers,
    find_checkpoints,
    take_snapshot,
    tensor_files,
)
from whale.checkpoint.format import decode, encode
from whale.checkpoint.pieces import byte_segments, why_not_cover

# ---- round trips


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("dim", [0, 1])
def test_what_was_saved_by_some_ranks_is_read_whole(
    tmp_path: Path, num_ranks: int, dim: int
) -> None:
    tensors = example()
    path = save_cut(tmp_path, tensors, num_ranks, dim)
    assert sorted(item.name for item in path.iterdir()) == [
        "index.json",
        *(f"rank_{rank:05d}.safetensors" for rank in range(num_ranks)),
    ]
    with Reader(tmp_path) as reader:
        assert (
            reader.step == 1
            and reader.values == {"step": 1}
            and reader.rank_values == [{"rank": rank} for rank in range(num_ranks)]
        )
        assert sorted(reader.names()) == sorted(tensors)
        for name, tensor in tensors.items():
            assert_same(reader.read(name), tensor)


@pytest.mark.parametrize(
    ("saved", "loaded"), [((3, 0), (2, 1)), ((2, 1), (4, 0)), ((4, 0), (3, 0)), ((1, 0), (5, 1))]
)
def test_another_cut_on_load(
    tmp_path: Path, saved: tuple[int, int], loaded: tuple[int, int]
) -> None:
    tensors = {
        name: tensor for name, tensor in example().items() if tensor.dim() >= 2 and tensor.numel()
    }
    save_cut(tmp_path, tensors, *saved)
    with Reader(tmp_path) as reader:
        for name, tensor in tensors.items():
            for piece, part in cut(tensor, *loaded):
                assert_same(reader.read(name, part.ranges), piece)


def test_any_box_of_a_tensor_of_many_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 4 KiB, so that boxes begin and end inside blocks; every box against torch's own
    slicing.
    """
    monkeypatch.setattr(tensor_files, "BLOCK_BYTES", 4096)
    monkeypatch.setattr("whale.checkpoint.commit.BLOCK_BYTES", 4096)
    tensor = torch.arange(40 * 50 * 9, dtype=torch.float32).reshape(40, 50, 9)
    save_cut(tmp_path, {"x": tensor}, 3, 1)
    chooser = random.Random(0)
    with Reader(tmp_path) as reader:
        assert max(len(piece.checksums) for piece in reader.index.tensors["x"].pieces) > 8 * 4
        for _ in range(150):
            box = tuple(
                tuple(sorted(chooser.choices(range(size + 1), k=2))) for size in tensor.shape
            )
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
    in_file = tensor_files.DTYPES[tensor_files.PAIRS.get(name, name)]
    file = find_checkpoints(tmp_path)[0] / "rank_00001.safetensors"
    assert safetensors.torch.load_file(file)["x"].dtype == in_file


def test_a_snapshot_does_not_change_with_training() -> None:
    weight = torch.ones(4)
    buffers: dict[str, Tensor] = {}
    first = take_snapshot({"w": weight}, {"list": (numbers := [1])}, buffers=buffers)
    weight.add_(1)
    numbers.append(2)
    assert first.tensors["w"].tolist() == [1] * 4 and first.values == {"list": [1]}
    again = take_snapshot({"w": weight}, buffers=buffers)
    assert (
        again.tensors["w"].data_ptr() == first.tensors["w"].data_ptr()
        and again.tensors["w"].tolist() == [2] * 4
    )


def test_a_part_of_the_wrong_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"w has shape \[4\], but its part is"):
        take_snapshot({"w": torch.ones(4)}, parts={"w": TensorPart((8,), ((2, 8),))})


@pytest.mark.parametrize(
    "tensor", [torch.ones(2, 2).to_sparse(), torch.ones(2).to(torch.float8_e5m2fnuz)]
)
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
    assert (
        max(load.values()) - min(load.values()) <= 10
    )  # no move of one tensor could balance it better


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
    ("value", "name"),
    [
        ({"f": print}, r"v\.f is a builtins\.builtin"),
        ([torch.ones(2)], r"v\[0\] is a tensor of shape \[2\]"),
    ],
)
def test_values_that_json_cannot_hold_are_refused_by_name(value: Any, name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        encode(value, "v")


@pytest.mark.parametrize(
    "value",
    [
        {"!call": "os.system"},
        {"!tensor": ["torch.float32", [1, 2], 3, "x"]},
        {"!tensor": 5},
        {"!float": "1e999"},
        {"!dict": [1]},
    ],
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
        boxes.extend(
            b
            for r in ((start, at), (at, stop))
            if r[0] < r[1]
            for b in [box[:dim] + (r,) + box[dim + 1 :]]
        )
    spoil = draw(st.sampled_from(["no", "drop", "twice", "move"]))
    place = draw(st.integers(0, len(boxes) - 1))
    if spoil == "drop":
        boxes.pop(place)
    elif spoil == "twice":
        boxes.append(boxes[place])
    elif spoil == "move":
        dim = draw(st.integers(0, len(shape) - 1))
        by = draw(st.integers(-2, 2))
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
    box = tuple(
        (start := data.draw(st.integers(0, size - 1)), data.draw(st.integers(start + 1, size)))
        for size in shape
    )
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
