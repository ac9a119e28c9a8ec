"""`whale schedule`: table, pictures and files from a real command line."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from typer.testing import CliRunner

from whale.cli import app
from whale.names import say_renamed
from whale.report import schedule_page
from whale.scheduling.compare import Question, compare

ARGUMENTS = ["schedule", "--devices", "4", "--micro-batches", "8", "--waves", "2"]


def test_the_table_names_every_schedule_with_its_bubble_and_peak() -> None:
    result = CliRunner(env={"COLUMNS": "140"}).invoke(app, [*ARGUMENTS, "--draw", "1f1b"])
    assert result.exit_code == 0, result.output
    found = re.findall(
        r"^ (\S.*?\S) +(\d+) +(\S+) +(\S+) +(\S+) +(\S+) +(\S+) +(\dx) *$",
        result.output,
        re.MULTILINE,
    )
    cells = {name: rest for name, *rest in found}
    # chunks, step, bubble %, lower bound, over it %, peak, weights: figures of the table of twelve
    # schedules
    assert cells["1f1b"] == ["1", "33", "27.3", "33", "0.0", "4", "1x"]
    assert cells["interleaved"][2:3] + cells["interleaved"][5:6] == ["8.6", "4.75"]
    assert cells["wave (Hanayo)"][2:3] + cells["wave (Hanayo)"][5:6] == ["11.1", "8"]
    assert cells["auto, wave"] == ["4", "24.75", "3.0", "24.75", "0.0", "4", "1x"]
    assert cells["chimera"][-1] == "2x"
    assert len(cells) == 8
    assert "1f1b: bubble 27.3 %" in result.output
    picture = [line for line in result.output.splitlines() if line.startswith("device 3")]
    # three forwards of idle time, then forward and backward 0; 129 columns for 33 units of time
    assert picture[0].split()[2].startswith("." * 12 + "0===0###")


def test_svg_and_html_hold_every_action(tmp_path: Path) -> None:
    drawing = tmp_path / "out.svg"
    page = tmp_path / "out.html"
    result = CliRunner().invoke(app, [*ARGUMENTS, "--svg", str(drawing), "--html", str(page)])
    assert result.exit_code == 0, result.output
    root = ElementTree.parse(drawing).getroot()
    titles = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    rows = compare(Question(num_devices=4, num_micro_batch=8, num_waves=2, tries=60))
    expected = sum(
        action.is_compute
        for row in rows
        for order in row.timeline.schedule.orders
        for action in order
    )
    assert len(titles) == expected
    assert "F0.0 from 0 to 1" in titles
    text = page.read_text()
    assert text.count("<tr") == 9
    assert "http://www.w3.org/2000/svg" in text
    assert "src=" not in text
    assert "href=" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--devices", "4", "--micro-batches", "0"],
            "whale schedule: num_micro_batch is 0; it must be at least 1",
        ),
        (
            ["--devices", "0", "--micro-batches", "4"],
            "whale schedule: 0 devices: at least 1 is needed",
        ),
        (
            ["--devices", "4", "--micro-batches", "4", "--waves", "0"],
            "0 waves: at least 1 is needed",
        ),
        (
            ["--devices", "4", "--micro-batches", "4", "--memory", "0.5"],
            "memory cap of 0.5, but one micro-batch alone saves 1 there",
        ),
        (
            ["--devices", "4", "--micro-batches", "4", "--draw", "waev"],
            "there is no schedule 'waev' to draw; did you mean",
        ),
        (
            ["--devices", "4", "--micro-batches", "4", "--svg", "no/such/folder/a.svg"],
            "there is no folder no/such/folder",
        ),
        (
            ["--devices", "4", "--micro-batches", "4", "--forward", "nan"],
            "forward is nan; a finite number is needed",
        ),
        (
            ["--devices", "4", "--micro-batches", "4", "--input-gradient", "2"],
            "input_share is 2.0; the input gradient is between 0 and 1",
        ),
    ],
)
def test_bad_input_is_reported(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["schedule", *arguments])
    assert result.exit_code == 2
    assert message in result.output


def test_odd_numbers_of_micro_batches_leave_chimera_out() -> None:
    rows = compare(Question(num_devices=3, num_micro_batch=5, num_waves=1, tries=20))
    assert "chimera" not in [row.name for row in rows]
    assert schedule_page.best(rows).timeline.step_s == min(row.timeline.step_s for row in rows)


def test_the_old_name_of_a_flag_still_works_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    say_renamed.cache_clear()
    arguments = ["schedule", "--devices", "2", "--micro-batches", "2", "--tries", "1"]
    new = CliRunner().invoke(app, [*arguments, "--input-gradient", "0.25"])
    assert not caplog.records
    for _ in range(2):
        old = CliRunner().invoke(app, [*arguments, "--input-share", "0.25"])
        assert old.exit_code == new.exit_code == 0 and old.output == new.output
    assert [record.getMessage() for record in caplog.records] == [
        "whale schedule: '--input-share' is now '--input-gradient'. "
        "The old name still works; change it."
    ]
