"""Metrics of a run: whale top, TensorBoard, and what is refused. The lines themselves:
test_data_and_metrics.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import whale as wh
from whale import metric_files
from whale.cli import app
from whale.metric_files import finished_file, last_metrics, metrics_file, read_metrics

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]


def train(folder: Path, num_steps: int, **options: object) -> list[wh.StepResult]:
    wh.init({"run_folder": str(folder), **options})
    model = torch.nn.Linear(4, 2)
    engine = wh.parallelize(
        model,
        torch.randn(6, 4),
        optimizer=lambda pairs: torch.optim.SGD(pairs, lr=0.1),
        loss=lambda output, batch: output.square().mean(),
    )
    results = [engine.step(torch.randn(6, 4)) for _ in range(num_steps)]
    engine.close()
    return results


def top(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["top", *map(str, words)], env={"COLUMNS": "200"})
    return done.exit_code, done.output


def copy_of(line: dict[str, object], **changes: object) -> str:
    return json.dumps(line | changes) + "\n"


def test_top_shows_the_last_step_of_every_rank(tmp_path: Path) -> None:
    results = train(tmp_path, 3)
    finished_file(tmp_path).unlink()  # still running
    line = read_metrics(tmp_path)[0][-1]
    # rank 1 is behind and has been silent for a while; rank 2 has written nothing yet
    metrics_file(tmp_path, 1).write_text(
        copy_of(line, rank=1, step=1, time=line["time"] - 60.0, memory_bytes=3 * 10**9)
    )
    metrics_file(tmp_path, 2).write_text('{"step": 0, "ti')
    exit_code, printed = top(tmp_path)
    assert exit_code == 0
    title, header, _, *rows = [text for text in printed.splitlines() if text.strip()]
    assert title.strip().startswith(
        f"step 2: loss {results[-1].loss:.6g}, gradient norm {results[-1].grad_norm:.4g}, "
        "learning rate 0.1"
    )
    assert header.split()[:3] == ["rank", "step", "samples/s"]
    assert [row.split()[:2] for row in rows] == [["0", "2"], ["1", "1"], ["2", "-"]]
    assert "silent" not in rows[0] and re.search(r"3(\.00)? GB +\d+ s ago \(silent\)", rows[1])


def test_top_of_nothing_says_where_metrics_come_from(tmp_path: Path) -> None:
    assert top(tmp_path) == (
        1,
        f"whale top: {tmp_path} has no metrics yet: give a run folder ('run_folder' of the "
        "config, 'runs/<script>' under whale run)\n",
    )
    assert top(tmp_path, "--every", "0") == (
        1,
        "whale top: --every 0: the time between two updates must be more than 0 s\n",
    )


def test_top_follows_a_run_on_a_terminal(tmp_path: Path) -> None:
    train(tmp_path, 1)
    finished_file(tmp_path).unlink()  # still running
    line = read_metrics(tmp_path)[0][-1]
    here, there = pty.openpty()
    environment = os.environ | {
        "COLUMNS": "200",
        "LINES": "20",
        "TERM": "xterm",
        "PYTHONPATH": str(ROOT),
    }
    process = subprocess.Popen(
        [str(BIN / "whale"), "top", str(tmp_path), "--every", "0.1"],
        stdout=there,
        stderr=there,
        env=environment,
    )
    os.close(there)
    try:
        assert "step 0: loss" in read_until(here, "step 0: loss")
        with metrics_file(tmp_path, 0).open("a") as file:
            file.write(copy_of(line, step=77))
        assert "step 77: loss" in read_until(here, "step 77: loss")
        process.send_signal(signal.SIGINT)
        read_until(here, None)
        assert process.wait(30) == 0
    finally:
        process.kill()
        os.close(here)


def read_until(terminal: int, text: str | None) -> str:
    """What appears on the terminal until the text is there, or until its program ends."""
    seen = ""
    deadline = time.monotonic() + 60.0
    with contextlib.suppress(OSError):  # the other side is closed
        while (text is None or text not in seen) and time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.2)[0]:
                seen += os.read(terminal, 1 << 16).decode(errors="replace")
    return seen


def test_a_killed_run_leaves_half_a_line(tmp_path: Path) -> None:
    """What the next run appends is still read."""
    (tmp_path / "metrics").mkdir()
    metrics_file(tmp_path, 0).write_text('{"step": 6}\n{"step": 7, "lo')
    assert last_metrics(tmp_path) == {0: {"step": 6}}
    train(tmp_path, 2)
    assert [line["step"] for line in read_metrics(tmp_path)[0]] == [6, 0, 1]


def test_the_last_line_of_a_long_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_files, "TAIL_BYTES", 100)
    (tmp_path / "metrics").mkdir()
    for cut in range(30):  # wherever the tail begins inside a line
        lines = [
            json.dumps({"step": step, "x": "é" * cut}, ensure_ascii=False) for step in range(20)
        ]
        metrics_file(tmp_path, 0).write_text("\n".join(lines) + "\n")
        assert last_metrics(tmp_path)[0] == {"step": 19, "x": "é" * cut}


# ---- TensorBoard


def test_tensorboard_needs_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as where it is not installed
    with pytest.raises(
        ValueError,
        match=r'"tensorboard": true needs the extra\. Try: pip install "whale-parallel\[tensorboard\]"',
    ):
        train(tmp_path, 1, tensorboard=True)


def test_tensorboard_needs_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WHALE_RUN_FOLDER", raising=False)
    wh.init({"tensorboard": True})
    with pytest.raises(
        ValueError, match=r'"tensorboard": true needs a place to write to\. Try: set "run_folder"'
    ):
        wh.parallelize(
            torch.nn.Linear(4, 2),
            torch.randn(6, 4),
            optimizer=torch.optim.SGD,
            loss=lambda output, batch: output.mean(),
        )


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    results = train(tmp_path, 3, tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [0, 1, 2]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(
        [result.loss for result in results], rel=1e-6
    )
