"""Trackers of a run's figures against its metrics files, each with the real package."""

from __future__ import annotations

import importlib.util
import io
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import whale as wh
from tests.ranks import run_ranks
from whale.integrations.trackers import Mlflow, TensorBoard, TrackerFactory, Wandb
from whale.metric_files import read_finished, read_metrics
from whale.report.top import metrics_table

NUM_STEPS = 3


class Listed:
    """A tracker of one's own."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, float]] = []
        self.is_closed = False

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.steps.append((step, values["loss"]))

    def close(self) -> None:
        self.is_closed = True


def train(folder: Path | None, tracker: TrackerFactory | None) -> wh.Engine:
    torch.manual_seed(0)
    wh.init({} if folder is None else {"run_folder": str(folder)})
    engine = wh.parallelize(
        nn.Linear(4, 2),
        torch.randn(4, 4),
        optimizer=lambda pairs: torch.optim.SGD(pairs, lr=0.1),
        loss=lambda output, _: output.square().mean(),
    )
    if tracker is not None:
        engine.track(tracker)
    for _ in range(NUM_STEPS):
        engine.step(torch.randn(4, 4, generator=torch.Generator().manual_seed(1)))
    engine.close()
    return engine


def written(folder: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(folder)[0]]


def test_without_a_run_folder() -> None:
    own = Listed()
    train(None, lambda: own)
    assert [step for step, _ in own.steps] == list(range(NUM_STEPS))
    assert own.is_closed


def on_ranks(folder: str) -> tuple[int, list[tuple[int, float]]]:
    made: list[Listed] = []

    def tracker() -> Listed:
        made.append(Listed())
        return made[-1]

    train(Path(folder), tracker)
    return len(made), made[0].steps if made else []


def test_rank_0_alone_makes_and_feeds_it(tmp_path: Path) -> None:
    first, second = run_ranks(on_ranks, 2, str(tmp_path))
    assert (first[0], second[0]) == (1, 0)
    assert [loss for _, loss in first[1]] == written(tmp_path)


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tmp_path, lambda: TensorBoard(tmp_path / "board"))
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(written(tmp_path))


@pytest.mark.slow
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    train(tmp_path, lambda: Wandb(project="test", mode="offline", dir=str(tmp_path)))
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    end = time.monotonic() + 60.0  # wandb's own process may write after `finish` has returned
    content = file.read_bytes()
    while b"samples_per_s" not in content and time.monotonic() < end:
        time.sleep(0.2)
        content = file.read_bytes()
    assert b"samples_per_s" in content
    assert all(f"{loss!r}".encode() in content for loss in written(tmp_path))


@pytest.mark.slow
def test_mlflow_in_a_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    uri = (tmp_path / "mlruns").as_uri()
    train(tmp_path, lambda: Mlflow(uri, name="one", parameters={"lr": 0.1}))
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("whale")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params == {"lr": "0.1"}
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [metric.value for metric in history] == pytest.approx(written(tmp_path))


def test_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for make, extra in ((Wandb, "wandb"), (Mlflow, "mlflow"), (lambda: TensorBoard("x"), "tens")):
        with pytest.raises(ValueError, match=rf"pip install \"whale-parallel\[{extra}"):
            make()


def test_top_says_finished(tmp_path: Path) -> None:
    train(tmp_path, None)
    finished = read_finished(tmp_path)
    assert finished is not None and finished["step"] == NUM_STEPS - 1
    lines = {0: read_metrics(tmp_path)[0][-1]}
    later = lines[0]["time"] + 1000
    title = str(metrics_table(lines, later, finished).title)
    assert title.startswith(f"finished, step {NUM_STEPS - 1}: loss")
    seen = list(metrics_table(lines, later, finished).columns[-1].cells)
    assert not any("silent" in str(cell) for cell in seen)
    running = metrics_table(lines, later, None)
    assert str(running.title).startswith("step") and "silent" in str(
        next(iter(running.columns[-1].cells))
    )


def test_top_is_not_cut_off_at_80_columns(tmp_path: Path) -> None:
    line = {"time": 0.0, "step": 99_999, "loss": 5.39621, "grad_norm": 0.8469, "lr": 2e-4}
    line |= {"samples_per_s": 12_345.6, "total_s": 0.2384, "memory_bytes": 4.45e8}
    line |= {"compute_s": 0.1, "communication_s": 0.1, "bubble_s": 0.0384}
    line |= {"model_flop_utilisation": 8.7e-06}
    console = Console(file=io.StringIO(), width=80)
    console.print(metrics_table({100: line}, 2367.0, {"step": 99_999, "time": 0.0}))
    assert isinstance(console.file, io.StringIO)
    *_, head, _, row = console.file.getvalue().splitlines()
    assert head.split()[0] == "rank" and "…" not in head
    assert row.split()[0] == "100" and row.endswith("39 min ago")


def test_a_new_run_is_not_finished(tmp_path: Path) -> None:
    train(tmp_path, None)
    wh.init({"run_folder": str(tmp_path)})
    engine = wh.parallelize(
        nn.Linear(4, 2),
        torch.randn(4, 4),
        optimizer=lambda pairs: torch.optim.SGD(pairs, lr=0.1),
        loss=lambda output, _: output.square().mean(),
    )
    assert read_finished(tmp_path) is None
    engine.close()
    assert read_finished(tmp_path) is not None
