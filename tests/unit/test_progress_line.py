"""The progress line: when it is written, what it says, and when it stays away."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator

import pytest

from whale import progress


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def streams() -> Iterator[None]:
    before = sys.stdout, sys.stderr
    yield
    sys.stdout, sys.stderr = before
    progress._watched.clear()


def run(num_steps: int | None, steps: int, step_s: float = 4.0, speaks_at: int = 0) -> str:
    written = io.StringIO()
    clock = Clock()
    line = progress.ProgressLine(num_steps, written, clock)
    for step in range(1, steps + 1):
        clock.now += step_s
        if step == speaks_at:
            print("step", step)
        line.note(step, 8, lambda loss=1.0 / step: loss)
    return written.getvalue()


def test_says_step_loss_speed_and_time_left() -> None:
    lines = run(num_steps=10, steps=10).splitlines()
    # three steps of quiet after the first, then every 10 s, and the last step
    assert lines[0] == "step 4/10  loss 0.2500  2 samples/s  24 s left"
    assert lines[1].startswith("step 7/10") and lines[1].endswith("12 s left")
    assert lines[-1] == "step 10/10  loss 0.1000  2 samples/s  0 s left"


def test_without_a_number_of_steps_no_time_is_left() -> None:
    assert run(num_steps=None, steps=4) == "step 4  loss 0.2500  2 samples/s\n"


@pytest.mark.parametrize("speaks_at", [2, 5])
def test_a_script_that_prints_is_left_alone(speaks_at: int) -> None:
    progress.watch_output()
    assert len(run(num_steps=None, steps=20, speaks_at=speaks_at).splitlines()) == (
        0 if speaks_at == 2 else 1
    )


def test_a_progress_bar_counts_and_a_warning_does_not() -> None:
    progress.watch_output()
    line = progress.ProgressLine(None, io.StringIO(), Clock())
    sys.stderr.write("UserWarning: something is deprecated\n")
    assert not any(watched.is_used for watched in progress._watched)
    sys.stderr.write("\r 10%|#    | 1/10 [00:01<00:09]")
    assert any(watched.is_used for watched in progress._watched)
    assert line is not None


def test_only_rank_0_and_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(progress.PROGRESS_VARIABLE, raising=False)
    assert progress.open_progress(0, None) is None
    monkeypatch.setenv(progress.PROGRESS_VARIABLE, "1")
    assert progress.open_progress(1, None) is None
    assert progress.open_progress(0, None) is not None
