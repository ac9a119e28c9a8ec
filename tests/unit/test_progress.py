"""The line that says how far a capture is."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

import whale as wh
from whale.capture import progress as progress_module
from whale.capture.progress import CaptureProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def at_times(monkeypatch: pytest.MonkeyPatch, times: list[float]) -> None:
    remaining = iter(times)
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: next(remaining))


def test_begins_in_the_third_second_and_is_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    at_times(monkeypatch, [0.0, 2.9, 3.1, 3.1, 3.2, 3.7, 3.7])
    shown = CaptureProgress("Net", stream)
    for _ in range(4 * progress_module.LOOK_EVERY):
        shown.note()
    shown.finish()
    assert stream.getvalue() == (
        "\rcapturing Net ... 32 operations\rcapturing Net ... 64 operations\r\033[K"
    )


def test_a_file_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    at_times(monkeypatch, [0.0, 3.1, 3.1, 5.0])
    shown = CaptureProgress("Net", stream)
    for _ in range(2 * progress_module.LOOK_EVERY):
        shown.note()
    shown.finish()
    assert stream.getvalue() == "capturing Net ... 16 operations\n"


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        for _ in range(2 * progress_module.LOOK_EVERY):
            x = x.sin()
        return x.mean()


def test_a_capture_counts_its_operations(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[Any]
) -> None:
    monkeypatch.setattr(progress_module, "FIRST_S", 0.0)
    wh.plan(Deep(), torch.ones(4, 3), cluster=1)
    assert "capturing Deep ... 16 operations\n" in capsys.readouterr().err
