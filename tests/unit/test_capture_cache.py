"""`"capture_cache"`: a capture that is read from its file is the one that was made, and whatever it
depends on has a file of its own.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale as wh
from tests.exactness import Float64Mode
from tests.zoo import CASES
from whale import api
from whale.capture import cache as caching
from whale.capture.batch import read_batch
from whale.capture.cache_key import content_key
from whale.capture.export import Task
from whale.capture.lengths import declared
from whale.capture.prepare import CapturedModel
from whale.planning.planner import fingerprint

SCALE = 2.0


class Net(nn.Module):
    """Two layers, a constant that is no buffer, a global and a setting of its own."""

    def __init__(self, width: int = 8, power: float = 2.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, width)
        self.second = nn.Linear(width, 3)
        self.power = power
        self.table = torch.arange(3.0)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        out = self.second(torch.tanh(self.first(x)) * SCALE) + self.table
        return F.cross_entropy(out * self.power, labels)


def batch(size: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(size, 4, generator=generator),
        "labels": torch.arange(size) % 3,
    }


def capture(
    model: nn.Module,
    sample: Any,
    folder: Path,
    dynamic: Any = None,
    check: bool = True,
    loss: Any = None,
) -> CapturedModel:
    layout, tensors = read_batch(sample)
    layout = layout.with_lengths(declared(dynamic, layout).names)
    config = wh.Config({"capture_cache": str(folder)})
    return api._prepare(model, layout, tensors, loss, config, "cpu", check)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{caching.ENDING}"))


def is_cached(captured: CapturedModel) -> bool:
    return captured.capture.cached_in is not None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "captures"


def same(first: CapturedModel, second: CapturedModel) -> None:
    """Everything that a plan is made from."""
    assert fingerprint(first.captured) == fingerprint(second.captured)
    for one, other in zip(first.captured.graph.nodes, second.captured.graph.nodes, strict=True):
        for key in ("nn_module_stack", "stack_trace", "custom", "autocast"):
            assert one.meta.get(key) == other.meta.get(key), (one.name, key)
        assert first.kinds.get(one) == second.kinds.get(other)
    assert first.captured.notes == second.captured.notes
    assert first.captured.state == second.captured.state
    assert first.term_texts() == second.term_texts()
    assert str(first.conditions) == str(second.conditions)
    for name, tensor in first.captured.constants.items():
        torch.testing.assert_close(second.captured.constants[name], tensor, rtol=0, atol=0)


def test_a_cached_capture_is_the_one_that_was_made(folder: Path) -> None:
    made = capture(Net(), batch(), folder)
    assert not is_cached(made) and len(files(folder)) == 1
    read = capture(Net(), batch(), folder)
    assert is_cached(read)
    same(made, read)


def plan_of(model: nn.Module, sample: Any, folder: Path | None) -> dict[str, Any]:
    settings: dict[str, Any] = {"num_task_graph": 2, "num_micro_batch": 2}
    wh.init({**settings, "capture_cache": str(folder)} if folder else settings)
    plan: dict[str, Any] = json.loads(wh.plan(model, sample, cluster=2).to_json())
    return {name: value for name, value in plan.items() if name != "config"}


def test_the_plan_is_the_same(folder: Path) -> None:
    expected = plan_of(Net(), batch(), None)
    for _ in range(2):
        assert plan_of(Net(), batch(), folder) == expected
    assert len(files(folder)) == 1


FAST = ("gpt2", "complex")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each.name, marks=() if each.name in FAST else pytest.mark.slow)
        for each in CASES.values()
    ],
)
def test_models_of_the_zoo(name: str, folder: Path) -> None:
    case = CASES[name]
    with Float64Mode():
        made = capture(case.build(), case.batch(0, 6), folder, loss=case.loss)
        read = capture(case.build(), case.batch(0, 6), folder, loss=case.loss)
    assert is_cached(read), "the capture was not cached"
    same(made, read)


class Lengths(nn.Module):
    """Asks of its length that it is even and more than 8."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.places = nn.Embedding(64, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        hidden = self.embed(tokens) + self.places(torch.arange(length, device=tokens.device))
        halves = hidden.view(tokens.shape[0], length // 2, 2, 8).sum(2)
        if length > 8:
            halves = halves * 2
        return halves.square().mean()


def test_conditions_on_lengths_are_kept(folder: Path) -> None:
    sample = {"tokens": torch.randint(16, (4, 12))}
    dynamic = {"tokens": {1: "length"}}
    made = capture(Lengths(), sample, folder, dynamic)
    read = capture(Lengths(), sample, folder, dynamic)
    assert is_cached(read)
    assert fingerprint(made.captured) == fingerprint(read.captured)
    assert made.conditions is not None and read.conditions is not None
    for length in range(2, 40):
        layout, _ = read_batch({"tokens": torch.zeros(4, length, dtype=torch.long)})
        numbers = [each.conditions.numbers(layout) for each in (made, read)]  # type: ignore[union-attr]
        assert [bool(each) for each in numbers] == [length >= 10 and length % 2 == 0] * 2


def train(folder: Path | None) -> tuple[list[float], dict[str, Tensor]]:
    wh.init({"capture_cache": str(folder)} if folder else {})
    engine = wh.parallelize(
        Net().double(),
        {key: t.double() if t.is_floating_point() else t for key, t in batch().items()},
        optimizer=lambda pairs: torch.optim.SGD(pairs, lr=0.1),
    )
    steps = []
    for size in (6, 4, 5):
        data = batch(size)
        data["x"] = data["x"].double()
        steps.append(engine.step(data).loss)
    steps.append(engine.evaluate(data).loss)
    return steps, engine.full_state_dict()


def test_training_gives_the_same_numbers(folder: Path) -> None:
    losses, weights = train(None)
    for _ in range(2):
        found, state = train(folder)
        assert found == losses
        for name, tensor in weights.items():
            assert torch.equal(state[name], tensor)
    assert len(files(folder)) == 2  # training and evaluation


# --- what the key sees


def key(model: nn.Module, sample: Any = None, **task: Any) -> str:
    layout, _ = read_batch(sample or batch())
    return content_key(model, layout, Task(task.pop("loss", None), "cpu", **task), False)


def test_the_key_sees_what_the_graph_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    known = key(Net())
    assert key(Net()) == known
    other = Net()
    with torch.no_grad():
        other.first.weight.add_(1.0)
    assert key(other) == known, "values of weights are no part of a graph"
    assert key(Net(), batch(6)) == known
    frozen = Net()
    frozen.first.weight.requires_grad_(False)
    tied = Net(3)
    tied.table = tied.second.bias.detach().clone()
    loose = Net(3)
    loose.table = loose.second.bias.detach().clone()
    loose.second.bias = nn.Parameter(loose.second.bias.detach().clone())
    assert key(tied) == key(loose)
    tied.first.bias = tied.second.bias
    table = Net()
    table.table = torch.arange(3.0) + 1
    hooked = Net()
    hooked.first.register_forward_hook(lambda module, args, output: output * 2)
    renamed = Net()
    renamed.forward = lambda x, labels: F.cross_entropy(renamed.second(renamed.first(x)), labels)
    found = [
        known,
        key(Net(9)),
        key(Net(power=3.0)),
        key(Net().eval()),
        key(Net().double()),
        key(frozen),
        key(tied),
        key(table),
        key(hooked),
        key(renamed),
        key(Net(), batch(7)),
        key(Net(), {**batch(), "x": torch.randn(6, 4).double()}),
        key(Net(), autocast=torch.bfloat16),
        key(Net(), loss=lambda output, batch: output),
        key(Net(), loss=lambda output, batch: output * 2),
    ]
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    found.append(key(Net()))
    assert len(set(found)) == len(found)


def scaled(factor: float) -> Callable[[Any, Any], Tensor]:
    return lambda output, batch: output * factor


def test_the_key_sees_closures_and_partials() -> None:
    assert key(Net(), loss=scaled(2.0)) == key(Net(), loss=scaled(2.0))
    assert key(Net(), loss=scaled(2.0)) != key(Net(), loss=scaled(3.0))


def test_the_key_is_the_same_in_another_process(tmp_path: Path) -> None:
    """Sets and hashes of strings have another order there."""
    script = tmp_path / "model.py"
    script.write_text(SCRIPT)
    keys = set()
    for seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, str(script)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        keys.add(done.stdout)
    assert len(keys) == 1
    script.write_text(SCRIPT.replace("2 * self.layer", "3 * self.layer"))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout not in keys


SCRIPT = """
import torch
from whale.capture.batch import read_batch
from whale.capture.cache_key import content_key
from whale.capture.export import Task

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.names = {"left", "right", "middle", "above"}
    def forward(self, x):
        return (2 * self.layer(x)).square().mean()

layout, _ = read_batch(torch.zeros(4, 4))
print(content_key(Net(), layout, Task(None, "cpu"), False))
"""


def test_what_cannot_be_compared_is_not_cached(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net()
    model.lock = threading.Lock()  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING, "whale"):
        capture(model, batch(), folder)
    assert "Net is not cached: model.lock is a _thread.lock" in caplog.text
    assert not files(folder)


# --- files that are not taken


def damage_checksum(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


def damage_header(file: Path) -> None:
    file.write_bytes(b"not json\n" + file.read_bytes())


def make_outdated(file: Path) -> None:
    first, _, body = file.read_bytes().partition(b"\n")
    header = {**json.loads(first), "torch": "1.0.0"}
    file.write_bytes(json.dumps(header).encode() + b"\n" + body)


def rename_foreign(file: Path) -> None:
    first, _, body = file.read_bytes().partition(b"\n")
    header = {**json.loads(first), "key": "0" * 32}
    file.write_bytes(json.dumps(header).encode() + b"\n" + body)


def open_to_others(file: Path) -> None:
    file.chmod(0o666)


def make_link(file: Path) -> None:
    real = file.with_suffix(".real")
    file.rename(real)
    file.symlink_to(real)


def change_operation(file: Path) -> None:
    """A document that is whole and names something that is no operation."""
    first, _, body = file.read_bytes().partition(b"\n")
    body = body.replace(b"aten.tanh.default", b"aten.no_such.default")
    file.write_bytes(
        json.dumps(caching._header(json.loads(first)["key"], body)).encode() + b"\n" + body
    )


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (damage_checksum, "is torn: its checksum differs"),
        (damage_header, "has no header"),
        (make_outdated, "is of torch 1.0.0"),
        (rename_foreign, "is of the capture 000"),
        (open_to_others, "may be written by others (mode 666)"),
        (make_link, "cannot be opened"),
        (change_operation, "cannot be read"),
    ],
)
def test_a_file_that_is_not_taken_is_made_anew(
    damage: Callable[[Path], None],
    sentence: str,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    capture(Net(), batch(), folder)
    (file,) = files(folder)
    damage(file)
    with caplog.at_level(logging.WARNING, "whale"):
        again = capture(Net(), batch(), folder)
    assert not is_cached(again)
    assert sentence in caplog.text and "Net is captured anew" in caplog.text
    assert is_cached(capture(Net(), batch(), folder))


def test_a_graph_that_is_not_the_models_is_made_anew(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The check against the model sees what no key sees."""
    capture(Net(), batch(), folder)
    (file,) = files(folder)
    first, _, body = file.read_bytes().partition(b"\n")
    body = body.replace(b"aten.tanh.default", b"aten.sin.default")
    file.write_bytes(
        json.dumps(caching._header(json.loads(first)["key"], body)).encode() + b"\n" + body
    )
    with caplog.at_level(logging.WARNING, "whale"):
        again = capture(Net(), batch(), folder)
    assert not is_cached(again)
    assert "is not that of the model" in caplog.text
    assert is_cached(capture(Net(), batch(), folder))


def test_a_folder_that_others_may_write_to_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    folder.chmod(0o777)
    with pytest.raises(ValueError, match=r"others may write to .* \(mode 777\).*chmod 700"):
        capture(Net(), batch(), folder)


def test_a_folder_of_somebody_else_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(ValueError, match="belongs to user"):
        capture(Net(), batch(), folder)


def test_old_files_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "MOST_FILES", 2)
    for width in (5, 6, 7):
        capture(Net(width), batch(), folder, check=False)
    assert len(files(folder)) == 2
    assert not list(folder.glob("*.part"))
