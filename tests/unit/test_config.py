"""Config: what it takes, what it refuses and in which words."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from whale.config import RENAMED_KEYS, Config, document, rows
from whale.devices import device_types
from whale.names import nearest, say_renamed


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


@pytest.mark.parametrize("value", [np.array([1, 2]), torch.tensor(2.5)], ids=["array", "tensor"])
def test_an_array_is_no_whole_number(value: object) -> None:
    with pytest.raises(ValueError, match="'num_micro_batch' must be a whole number"):
        Config(num_micro_batch=value)


def test_an_empty_run_folder_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHALE_RUN_FOLDER", "")
    assert Config().folder is None
    monkeypatch.setenv("WHALE_RUN_FOLDER", "runs/a")
    assert Config().folder == "runs/a"


def test_it_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
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


def test_every_field_can_be_set_and_comes_back() -> None:
    changes = {
        "strategy": "data",
        "num_micro_batch": 2, "num_task_graph": 2, "colocate": True, "schedule": "gpipe", "seed": 1, "loss_per_micro_batch": True,
        "clip_grad_norm": 1.0, "max_captures": 2, "bucket_bytes": 10, "timeout_s": 5.0, "check_capture": False, "check_batches": False,
            "check_replicas": 5, "capture_cache": "captures",
        "device": "cpu", "num_posted_receives": 2, "precision": "bf16", "on_nonfinite": "skip", "stall_timeout_s": 7.0,
        "run_folder": "runs/x", "num_steps": 9, "tensorboard": True, "keep_checkpoints": 1, "num_waves": 2, "cluster": "cluster.yaml",
        "share_memory": False, "compile": True,
        "recompute": ["layers.*"], "keep_gathered": False, "zero": 3, "optimizer_state": "bf16", "offload": False,
            "adapt": "on", "adapt_threshold": 0.5, "adapt_steps": 3,
        "replicas": [{"stages": [[0]]}, {"stages": [[1], [2]], "samples": 2}],
    }  # fmt: skip
    assert set(changes) == set(Config().to_dict())
    for key, value in changes.items():
        changed = Config({key: value})
        assert changed != Config() and changed.to_dict() == {**Config().to_dict(), key: value}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_micro_batch": 0}, "Config: 'num_micro_batch' must be at least 1, not 0."),
        (
            {"num_task_graph": "8"},
            "Config: 'num_task_graph' must be a whole number or None, not '8' of type str.",
        ),
        ({"seed": 2**63}, f"Config: 'seed' must be at most 2**63 - 1, not {2**63}."),
        ({"timeout_s": -3}, "Config: 'timeout_s' must be a finite number above 0, not -3."),
        ({"colocate": 1}, "Config: 'colocate' must be True or False, not 1 of type int."),
        (
            {"schedule": "1f1"},
            "Config: 'schedule' must be one of '1f1b', 'gpipe', 'interleaved', 'wave', "
            "'zero-bubble', 'auto', not '1f1'. Did you mean '1f1b'?",
        ),
        (
            {"keep_gathered": "no"},
            "Config: 'keep_gathered' must be 'auto', True or False, not 'no'.",
        ),
        ({"zero": 4}, "Config: 'zero' must be 0, 1, 2, 3 or 'auto', not 4."),
        (
            {"optimizer_state": "int4"},
            "Config: 'optimizer_state' must be one of 'fp32', 'bf16', 'int8', not 'int4'. Did you "
            "mean 'int8'?",
        ),
        (
            {"strategy": "atuo"},
            "Config: 'strategy' must be one of 'auto', 'data', not 'atuo'. Did you mean 'auto'?",
        ),
    ],
)
def test_messages_name_key_value_and_what_is_right(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Config(given)
    assert str(caught.value) == message


def test_a_renamed_key_still_works_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(RENAMED_KEYS, "old_seed", "seed")
    say_renamed.cache_clear()
    assert Config({"old_seed": 3}) == Config(seed=3) == Config().replace(old_seed=3)
    assert [record.getMessage() for record in caplog.records] == [
        "Config: 'old_seed' is now 'seed'. The old name still works; change it."
    ]
    with pytest.raises(ValueError, match="'old_seed' is now 'seed', and both are given"):
        Config({"old_seed": 3, "seed": 3})


def test_devices_are_those_of_the_device_interface() -> None:
    for name in device_types():
        assert Config(device=name).device == name
    with pytest.raises(
        ValueError, match="'device' must be 'auto', 'cpu', 'cuda' or 'xpu', not 'gpu'"
    ):
        Config(device="gpu")


def test_every_field_is_described() -> None:
    names = set(Config().to_dict())
    assert {key for key, _, _, meaning in rows() if meaning} == names
    lines = document().splitlines()
    assert len(lines) == 2 + len(names)
    for start in (
        '| `num_task_graph` | int, "auto" or None | `None` | ',
        '| `num_micro_batch` | int or "auto" | `1` | ',
        '| `strategy` | "auto", "data" or None | `None` | ',
        "| `recompute` | \"auto\", True, False or list of names | `'auto'` | ",
        "| `clip_grad_norm` | float or None | `None` | ",
        "| `colocate` | bool | `False` | ",
    ):
        assert any(line.startswith(start) for line in lines), start
    assert all(line.count(" | ") == 3 for line in lines[2:])


def test_nearest() -> None:
    assert nearest("Colocte", ["colocate", "seed"]) == " Did you mean 'colocate'?"
    assert nearest("xyz", ["colocate", "seed"]) == ""
    assert nearest("seed", []) == ""
