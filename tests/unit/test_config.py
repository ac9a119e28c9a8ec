"""Config: what it takes, what it refuses and in which words."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

from whale.config import Config, descriptions, document
from whale.names import nearest


def test_dict_and_keywords_give_the_same() -> None:
    config = Config({"num_micro_batch": 8}, seed=3)
    assert config == Config(num_micro_batch=8, seed=3)
    assert (config.num_micro_batch, config.seed, config.schedule) == (8, 3, "1f1b")
    assert config != Config(num_micro_batch=8)


def test_an_unknown_key_offers_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"no key 'num_microbatch'. Did you mean 'num_micro_batch'\?"
    ):
        Config({"num_microbatch": 8})
    with pytest.raises(ValueError, match=r"no key 'zzz'\. It has: "):
        Config(zzz=1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_micro_batch", 0),
        ("num_micro_batch", "8"),
        ("num_micro_batch", 8.0),
        ("num_micro_batch", True),
        ("num_micro_batch", None),
        ("num_task_graph", 0),
        ("colocate", 1),
        ("colocate", "yes"),
        ("schedule", "2f2b"),
        ("schedule", None),
        ("seed", -1),
        ("seed", 2**63),
        ("clip_grad_norm", 0.0),
        ("clip_grad_norm", float("nan")),
        ("clip_grad_norm", "1"),
        ("timeout_s", -3),
        ("timeout_s", float("inf")),
        ("max_captures", 0),
        ("bucket_bytes", 0),
        ("num_posted_receives", 0),
        ("device", "gpu7"),
    ],
)
def test_a_wrong_value_is_named(key: str, value: object) -> None:
    with pytest.raises(ValueError) as caught:
        Config({key: value})
    assert repr(key) in str(caught.value) and repr(value) in str(caught.value)


def test_a_key_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="'seed' is given twice"):
        Config({"seed": 1}, seed=1)


def test_something_else_than_a_dict_is_refused() -> None:
    with pytest.raises(ValueError, match="takes a dict"):
        Config(8)  # type: ignore[arg-type]


def test_numbers_become_the_type_of_the_field() -> None:
    config = Config(clip_grad_norm=1, num_micro_batch=np.int64(4))
    assert type(config.clip_grad_norm) is float and config.clip_grad_norm == 1.0
    assert type(config.num_micro_batch) is int and config.num_micro_batch == 4


def test_an_empty_run_folder_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHALE_RUN_FOLDER", "")
    assert Config().folder is None
    monkeypatch.setenv("WHALE_RUN_FOLDER", "runs/a")
    assert Config().folder == "runs/a"


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().seed = 3  # type: ignore[misc]


def test_to_dict_goes_through_json() -> None:
    config = Config(num_micro_batch=5, clip_grad_norm=0.5, num_task_graph=3, colocate=True)
    assert Config(json.loads(json.dumps(config.to_dict()))) == config


def test_replace_changes_only_what_is_named() -> None:
    config = Config(num_micro_batch=5)
    changed = config.replace(seed=9)
    assert (changed.num_micro_batch, changed.seed, config.seed) == (5, 9, 0)
    with pytest.raises(ValueError, match="no key 'sed'"):
        config.replace(sed=9)


def test_fingerprint_tells_every_field_apart() -> None:
    changes = {
        "num_micro_batch": 2, "num_task_graph": 2, "colocate": True, "schedule": "gpipe", "seed": 1, "loss_per_micro_batch": True,
        "clip_grad_norm": 1.0, "max_captures": 2, "bucket_bytes": 10, "timeout_s": 5.0, "check_capture": False, "check_batches": False,
        "device": "cpu", "num_posted_receives": 2, "precision": "bf16", "on_nonfinite": "skip", "stall_timeout_s": 7.0,
        "run_folder": "runs/x", "tensorboard": True, "keep_checkpoints": 1, "num_waves": 2, "cluster": "cluster.yaml",
        "share_memory": False, "compile": True,
        "recompute": ["layers.*"], "keep_gathered": False, "adapt": "on", "adapt_threshold": 0.5, "adapt_steps": 3,
    }  # fmt: skip
    assert set(changes) == set(Config().to_dict())
    prints = {Config({key: value}).fingerprint() for key, value in changes.items()} | {
        Config().fingerprint()
    }
    assert len(prints) == len(changes) + 1


def test_fingerprint_is_the_same_in_another_process() -> None:
    code = "from whale.config import Config; print(Config(seed=4).fingerprint())"
    settings = {"PYTHONHASHSEED": "77", "PYTHONPATH": "."}
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=settings
    )
    assert other.stdout.strip() == Config(seed=4).fingerprint()


def test_every_field_is_described() -> None:
    names = {item.name for item in dataclasses.fields(Config)}
    assert set(descriptions()) == names
    lines = document().splitlines()
    assert len(lines) == 2 + len(names)
    assert any(line.startswith("| `num_task_graph` | int or None | `None` | ") for line in lines)
    assert all(line.count(" | ") == 3 for line in lines[2:])


def test_nearest() -> None:
    assert nearest("Colocte", ["colocate", "seed"]) == " Did you mean 'colocate'?"
    assert nearest("xyz", ["colocate", "seed"]) == ""
    assert nearest("seed", []) == ""
