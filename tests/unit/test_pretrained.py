"""Pretrained safetensors in every layout, read by name and slice, and the export of a trained
model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

import whale as wh
from tests.unit.checkpoints import assert_same
from whale.checkpoint import (
    CheckpointError,
    PretrainedReader,
    export_safetensors,
)

# ---- pretrained weights


def pretrained_tensors() -> dict[str, Tensor]:
    return {f"h.{i}.weight": torch.full((64, 32), float(i)) for i in range(6)} | {
        "wte.weight": torch.randn(100, 32)
    }


def write_sharded(folder: Path, tensors: dict[str, Tensor], num_shards: int) -> Path:
    folder.mkdir()
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        some = dict(list(tensors.items())[shard::num_shards])
        safetensors.torch.save_file(some, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(some, file))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    )
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
    with pytest.raises(
        CheckpointError, match=r"no tensor 'wte\.wieght'\. Did you mean 'wte\.weight'"
    ):
        reader.read("wte.wieght")
    with pytest.raises(CheckpointError, match=r"has shape \[100, 32\]"):
        reader.read("wte.weight", ((0, 101), (0, 32)))
    reader.close()


def test_pretrained_reads_only_what_a_rank_needs(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.randn(512, 1024) for i in range(6)}
    folder = write_sharded(tmp_path / "sharded", tensors, 2)
    for box in (
        ((0, 512), (0, 1024)),
        ((100, 200), (0, 1024)),
        ((0, 512), (256, 512)),
    ):  # whole, rows, columns
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
        (
            ["h.0.w", "wte.w"],
            ["transformer.h.0.w", "transformer.wte.w", "lm_head.w"],
            "with 'transformer.'",
        ),
        (
            ["transformer.wte.w", "lm_head.w"],
            ["wte.w"],
            "without 'transformer.'",
        ),  # lm_head is tied
        (["transformer.wte.w", "score.w"], ["wte.w", "score.w"], "without 'transformer.'"),
        (["wte.w", "score.w"], ["transformer.wte.w", "score.w"], "with 'transformer.'"),
    ],
)
def test_names_match_with_a_prefix_more_or_less(
    tmp_path: Path, wanted: list[str], stored: list[str], how: str
) -> None:
    safetensors.torch.save_file(
        {name: torch.ones(2) for name in stored}, tmp_path / "model.safetensors"
    )
    aliases = {name: ("transformer.wte.w" if name == "lm_head.w" else name) for name in wanted}
    match = PretrainedReader(tmp_path).match(wanted, aliases)
    assert match.how == how
    assert match.stored.keys() == set(wanted) and set(match.stored.values()) <= set(stored)
    for name, found in match.stored.items():
        tail = "wte.w" if name == "lm_head.w" else name.removeprefix("transformer.")
        assert found.removeprefix("transformer.") == tail
    assert set(match.unexpected) == set(stored) - set(match.stored.values())


def test_names_that_do_not_match_are_listed(tmp_path: Path) -> None:
    safetensors.torch.save_file(
        {name: torch.ones(2) for name in ("a.x", "b.x")}, tmp_path / "model.safetensors"
    )
    reader = PretrainedReader(tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"lacks 2 of the 3 tensors that the model needs, the first are c\.x, d\.x\.",
    ):
        reader.match(["a.x", "c.x", "d.x"])
    with pytest.raises(CheckpointError, match=r"in more than one way .*wh\.Pretrained"):
        reader.match(["x"])


def test_pickles_are_refused_with_what_to_try(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    "shard",
    ["../other/model.safetensors", "/tmp/x.safetensors", "a/b.safetensors", "model.bin", 5, ".."],
)
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
    match = PretrainedReader(path).match(
        ["wte.weight", "lm_head.weight"],
        {"lm_head.weight": "wte.weight", "wte.weight": "wte.weight"},
    )
    assert match.stored == {"wte.weight": "wte.weight", "lm_head.weight": "wte.weight"}
    export_safetensors(path, {"x": torch.ones(1)})  # replaces
    assert list(safetensors.torch.load_file(path)) == ["x"] and [
        item.name for item in tmp_path.iterdir()
    ] == ["model.safetensors"]
    with pytest.raises(ValueError, match=r"must end in \.safetensors"):
        export_safetensors(tmp_path / "model.bin", {})


def test_a_hugging_face_model_both_ways(tmp_path: Path) -> None:
    """`save_pretrained` in shards is read into a model of ours; our export is read by
    `from_pretrained`.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(5)
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16)
    ).eval()
    batch = torch.arange(8)[None]
    expected = model(batch).logits
    model.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    model.transformer.save_pretrained(tmp_path / "base")  # without the prefix 'transformer.'
    for folder in ("theirs", "base"):
        other = GPT2LMHeadModel(model.config).eval()
        reader = PretrainedReader(tmp_path / folder)
        state = other.state_dict()
        match = reader.match(
            state, {"lm_head.weight": "transformer.wte.weight"}, [other.base_model_prefix]
        )
        assert match.unexpected == ()
        other.load_state_dict({name: reader.read(stored) for name, stored in match.stored.items()})
        assert torch.equal(other(batch).logits, expected)
    (tmp_path / "ours").mkdir()
    export_safetensors(tmp_path / "ours" / "model.safetensors", model.state_dict())
    model.config.save_pretrained(tmp_path / "ours")
    assert torch.equal(
        GPT2LMHeadModel.from_pretrained(tmp_path / "ours").eval()(batch).logits, expected
    )


class Normed(torch.nn.Module):
    """A buffer that is saved with the model, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(self.layer(x)) * self.scale).mean()


@pytest.mark.parametrize("prefix", ["", "model."])
def test_running_statistics_come_with_the_weights(tmp_path: Path, prefix: str) -> None:
    """A fine-tune that started from the statistics of a new model would evaluate wrongly without a
    word.
    """
    trained = Normed()
    for _ in range(3):
        trained(torch.randn(8, 4) * 3 + 5)
    state = {prefix + name: tensor for name, tensor in trained.state_dict().items()}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    wh.init()
    batch = torch.randn(8, 4)
    engine = wh.parallelize(
        Normed(),
        batch,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        weights=tmp_path / "model.safetensors",
    )
    for name, tensor in engine.full_state_dict().items():
        assert torch.equal(tensor, trained.state_dict()[name]), name
    trained.eval()
    assert engine.evaluate(batch).loss == pytest.approx(float(trained(batch).detach()), rel=1e-5)
