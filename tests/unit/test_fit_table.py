"""Tables are whole at every width: no cell is missing or cut, no line is wider than the terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from whale.emulation.timeline import RankRecord
from whale.report.fit_table import WIDTH_OF_FILES, FitTable, add_row, make_table, wide_console
from whale.report.rehearsal import Rehearsal, _table
from whale.report.top import metrics_table

WIDTHS = pytest.mark.parametrize("width", [60, 80, 120, 140])


def lines_of(table: FitTable, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(table)
    return console.export_text().splitlines()


def wide() -> FitTable:
    table = make_table("A title", ("rank", "device"), [f"n{n}" for n in range(9)], num_keys=2)
    for rank in range(3):
        add_row(
            table, str(rank), "RTX-3090 on desk", *(f"{rank}{n}.5 ms (100 %)" for n in range(9))
        )
    return table


@WIDTHS
def test_a_table_that_is_too_wide_comes_in_parts(width: int) -> None:
    lines = lines_of(wide(), width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for rank in range(3):
        for number in range(9):
            assert text.count(f"{rank}{number}.5 ms (100 %)") == 1
    heads = [line for line in lines if line.startswith("rank   device")]
    assert len(heads) > 1  # each part says which rank and device
    assert text.count("A title") == 1 and "…" not in text


def test_a_table_that_fits_is_one() -> None:
    lines = lines_of(wide(), 400)
    assert sum(line.startswith("rank") for line in lines) == 1


def test_words_are_folded_before_a_table_is_parted() -> None:
    table = make_table("", ("rank", "device", "why"), ("time",))
    add_row(table, "0", "V100-16GB on rack", "it is the slowest of all devices here", "1.00 ms")
    lines = lines_of(table, 50)
    assert sum(line.startswith("rank") for line in lines) == 1
    assert max(map(len, lines)) <= 50
    words = " ".join(lines).split()
    assert {"V100-16GB", "slowest", "devices", "1.00"} <= set(words)


def test_a_word_that_is_too_long_is_broken_and_not_lost() -> None:
    table = make_table("", ("name",), ("time",))
    add_row(table, "transformer_blocks_0_" * 5, "1.00 ms")
    lines = lines_of(table, 60)
    letters = "".join(line.split()[0] for line in lines[2:])
    assert letters == "transformer_blocks_0_" * 5 and max(map(len, lines)) <= 60


def test_who_says_how_wide_output_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert wide_console().width == WIDTH_OF_FILES
    monkeypatch.setenv("COLUMNS", "80")
    assert wide_console().width == 80


@WIDTHS
def test_the_summary_of_a_rehearsal_is_whole(width: int, tmp_path: Path) -> None:
    records = [
        RankRecord(
            *(rank, kind, "desktop", 16 * 10**9, {"weights": 3.91e9}, [(0.0, 1.0)]),
            events=[("F0.0", 0.0, 1.0)],
            num_actions=1,
            num_overruns=0,
            worst_overrun=(0.0, ""),
            worst_ratio=1.0,
        )
        for rank, kind in enumerate(("RTX-3090", "RTX-4090", "V100-16GB"))
    ]
    events = [[("F0.0", 0.0, 1.0)]] * 3
    lines = lines_of(_table(Rehearsal(records, events, 1.0, 1.0, 1.0, False)), width)
    assert max(map(len, lines)) <= width
    assert width < 80 or sum(line.startswith("rank") for line in lines) == 1
    text = " ".join(" ".join(lines).split())
    for word in ("RTX-3090", "RTX-4090", "V100-16GB", "desktop", "3.91 GB", "16.0 GB"):
        assert word in text


LINE = {
    **{"time": 90.0, "step": 1234, "loss": 1.0, "grad_norm": 1.0, "lr": 1e-3},
    **{"samples_per_s": 1234.5, "total_s": 0.123, "compute_s": 0.1},
    **{"communication_s": 0.01, "bubble_s": 0.01, "model_flop_utilisation": 0.5},
    "memory_bytes": 15.5e9,
}
"""of a metrics file"""


def test_the_table_of_top_is_one_at_80_columns() -> None:
    lines = lines_of(metrics_table({0: LINE, 1: LINE, 2: None}, 100.0), 80)
    assert sum(line.startswith("rank") for line in lines) == 1 and max(map(len, lines)) <= 80


@WIDTHS
def test_large_numbers_of_top_are_whole(width: int) -> None:
    line = LINE | {"step": 123456, "samples_per_s": 1234567.8}
    lines = lines_of(metrics_table({0: line, 1: line | {"time": 9.0}, 2: None}, 100.0), width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for cell in ("123456", "1234567.8", "123 ms", "50.0 %", "15.5 GB", "(silent)"):
        assert cell in text
