"""`engine.module`, `engine.save_pretrained`, and the model itself after `wh.parallelize`, against
the local model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import whale as wh
from tests.ranks import run_ranks
from whale.checkpoint import CheckpointError
from whale.runtime.local_model import SpreadModelError


def gpt2() -> transformers.GPT2LMHeadModel:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=16,
        n_head=2,
        vocab_size=32,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    )
    return transformers.GPT2LMHeadModel(config)


def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def trained_locally() -> transformers.GPT2LMHeadModel:
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(**batch()).loss.backward()
    optimizer.step()
    return model.eval()


def two_stages(model: nn.Module, prefix: str = "") -> wh.Engine:
    wh.init()
    globs = (f"{prefix}transformer.h.0", f"{prefix}transformer.h.1")
    wh.annotate(model, {glob: wh.replicate(1) for glob in globs})
    return wh.parallelize(
        model, batch(), optimizer=lambda pairs: torch.optim.SGD(pairs, lr=0.5), loss=None
    )


def prompt() -> Tensor:
    return torch.tensor([[5, 9, 3], [1, 2, 3]])


def uses(model: nn.Module) -> list[str]:
    """What the emptied model says to those who use it."""
    said = []
    for use in (
        lambda: model(**batch()),
        lambda: model.generate(prompt(), max_new_tokens=2),
        lambda: model.to(torch.float64),
        lambda: model.state_dict(),
    ):
        with pytest.raises(SpreadModelError) as refused:
            use()
        said.append(str(refused.value))
    return said


def on_two_ranks(folder: str) -> dict[str, Any]:
    model = gpt2()
    engine = two_stages(model)
    engine.step(batch())
    said = uses(model)
    first = engine.module()
    everywhere = engine.module(everywhere=True)
    engine.save_pretrained(folder, max_shard_size="4KB")
    after = uses(model)  # still, after a copy was made of it
    engine.step(batch())  # and it still trains
    copies = [copy for copy in (first, everywhere) if copy is not None]
    words = [copy.eval().generate(prompt(), max_new_tokens=4, do_sample=False) for copy in copies]
    tied = [copy.lm_head.weight is copy.transformer.wte.weight for copy in copies]
    return {"said": said + after, "words": words, "tied": tied}


def test_stages(tmp_path: Path) -> None:
    local = trained_locally()
    expected = local.generate(prompt(), max_new_tokens=4, do_sample=False)
    ranks = run_ranks(on_two_ranks, 2, str(tmp_path / "model"))
    assert [len(rank["words"]) for rank in ranks] == [2, 1]
    for rank in ranks:
        assert all(torch.equal(words, expected) for words in rank["words"])
        assert all(rank["tied"])
        assert all("engine.module()" in text for text in rank["said"])
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "model")
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    for name, tensor in local.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor)


def save_adapter(folder: str) -> list[str]:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    model = peft.get_peft_model(gpt2(), peft.LoraConfig(r=2, target_modules=["c_attn"]))
    engine = two_stages(model, "base_model.model.")
    for _ in range(2):  # the first step leaves A as it is: B is zero
        engine.step(batch())
    engine.save_pretrained(folder)
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.slow
def test_of_a_peft_model_only_the_adapter_is_saved(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    local = peft.get_peft_model(gpt2(), peft.LoraConfig(r=2, target_modules=["c_attn"]))
    optimizer = torch.optim.SGD([p for p in local.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        local(**batch()).loss.backward()
        optimizer.step()
    files = run_ranks(save_adapter, 2, str(tmp_path / "adapter"))[0]
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(files)
    assert not any(name.startswith("model") for name in files)
    loaded = peft.PeftModel.from_pretrained(gpt2(), tmp_path / "adapter")
    for name, tensor in local.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor)


def test_a_model_that_is_whole_here_may_be_used() -> None:
    model = gpt2()
    wh.init()
    engine = wh.parallelize(model, batch(), optimizer=lambda pairs: torch.optim.SGD(pairs, lr=0.5))
    engine.step(batch())
    expected = trained_locally()(**batch()).loss
    torch.testing.assert_close(model.eval()(**batch()).loss, expected)
    copied = engine.module()
    assert copied is not None and copied is not model
    torch.testing.assert_close(copied.eval()(**batch()).loss, expected)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    wh.init()
    engine = wh.parallelize(
        nn.Sequential(nn.Linear(2, 1)),
        torch.ones(2, 2),
        optimizer=lambda pairs: torch.optim.SGD(pairs, lr=0.5),
        loss=lambda output, _: output.sum(),
    )
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="file"):
        engine.save_pretrained(tmp_path / "file")
    engine.save_pretrained(tmp_path / "plain")
    assert [path.name for path in (tmp_path / "plain").iterdir()] == ["model.safetensors"]
