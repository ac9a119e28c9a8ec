"""Errors of ranks are shown once each, and none is lost."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from whale.error_file import write_error
from whale.error_reports import (
    PACKAGE,
    TRACEBACK_VARIABLE,
    FailedElsewhereError,
    Report,
    Reports,
    as_record,
    is_refusal,
    report_of,
)
from whale.launcher import run_script


def failing(folder: Path, text: str) -> tuple[BaseException, Path]:
    """The error of a script, and the script."""
    script = folder / "train.py"
    script.write_text(text)
    with pytest.raises(BaseException) as error:
        run_script(script, [])
    return error.value, script


REFUSED = "import whale as wh\ndef start():\n    wh.init({'zeroo': 1})\nstart()\n"


def test_a_refusal_is_its_message_and_the_line_of_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TRACEBACK_VARIABLE, raising=False)
    report = report_of(*failing(tmp_path, REFUSED))
    assert report.is_refusal and not report.follows
    message, place, hint = report.text.splitlines()
    assert message.startswith("Config has no key 'zeroo'. Did you mean 'zero'?")
    assert place == f"  {tmp_path}/train.py, line 3: wh.init({{'zeroo': 1}})"
    assert f"{TRACEBACK_VARIABLE}=1" in hint
    monkeypatch.setenv(TRACEBACK_VARIABLE, "1")
    whole = report_of(*failing(tmp_path, REFUSED)).text
    assert "Traceback" in whole and "config.py" in whole and "in start" in whole


@pytest.mark.parametrize(
    "text",
    [
        "raise ValueError('of my own')",
        "int('x')",
        "import whale as wh\nwh.Config({'seed': type('Odd', (), {'__eq__': lambda *_: 1 / 0})()})",
    ],
)
def test_an_error_of_the_user_keeps_its_frames(tmp_path: Path, text: str) -> None:
    error, script = failing(tmp_path, text)
    report = report_of(error, script)
    if report.is_refusal:  # of the third: Whale looked at the type first
        assert isinstance(error, ValueError) and "seed" in str(error)
    else:
        assert "Traceback" in report.text and "train.py" in report.text
        assert "runpy" not in report.text


def test_what_python_raises_inside_whale_is_no_message_of_whale() -> None:
    with pytest.raises(ValueError) as broken:
        exec(compile("int('x')", str(PACKAGE / "somewhere.py"), "exec"))
    assert not is_refusal(broken.value)


def written(folder: Path, attempt: int, rank: int, report: Report | None) -> None:
    """As a rank writes it."""
    file = folder / "run" / f"attempt_{attempt}" / str(rank) / "error.json"
    file.parent.mkdir(parents=True)
    write_error(file, "text", None if report is None else as_record(report, rank))


def test_alike_errors_are_one_and_others_are_shown_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1, 3):
        written(tmp_path, 0, rank, Report("the same\n"))
    written(tmp_path, 0, 2, Report("another one\n"))
    written(tmp_path, 0, 4, Report("pages", follows="connection closed"))
    written(tmp_path, 0, 5, None)  # ended by the watch: has nothing to say
    with Reports(tmp_path):
        pass
    assert capsys.readouterr().err == (
        "\nranks 0-1, 3: the same\n\nrank 2: another one\n"
        "rank 4 ended because of it (connection closed)\n"
    )


def test_what_follows_from_nothing_known_is_shown_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, 0, 1, Report("pages of it\n", follows="connection closed"))
    with Reports(tmp_path):
        pass
    assert capsys.readouterr().err == "\nrank 1: pages of it\n"


def test_a_late_rank_and_a_later_attempt_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whale.error_reports.SETTLE_S", 0.0)
    reports = Reports(tmp_path)
    written(tmp_path, 0, 0, Report("the same\n"))
    reports.look()
    written(tmp_path, 0, 1, Report("the same\n"))
    reports.look()
    written(tmp_path, 1, 0, Report("the same\n"))
    torn = tmp_path / "run" / "attempt_1" / "1" / "error.json"
    torn.parent.mkdir()
    whole = json.dumps({"message": {"message": "x"}, **as_record(Report("torn\n"), 1)})
    torn.write_text(whole[:20])
    reports.look()
    torn.write_text(whole)
    reports.look(is_last=True)
    reports.look(is_last=True)
    assert capsys.readouterr().err == (
        "\nrank 0: the same\nrank 1: the same error\n\nrank 0: the same\n\nrank 1: torn\n"
    )


def test_a_rank_that_only_heard_of_it_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = FailedElsewhereError.of(0, "DoesNotFit: no plan fits. Try: less")
    follower = report_of(error, Path("train.py"))
    for rank in (1, 2):
        written(tmp_path, 0, rank, follower)
    written(tmp_path, 0, 0, Report("no plan fits. Try: less\n", is_refusal=True))
    with Reports(tmp_path):
        pass
    assert capsys.readouterr().err == (
        "\nrank 0: no plan fits. Try: less\n"
        "ranks 1-2 ended because of it (rank 0 failed while all ranks were preparing)\n"
    )


def test_errors_come_through_a_pickle_as_they_are() -> None:
    """Launchers of others, and `multiprocessing`, send an error of a rank to another process."""
    error = pickle.loads(pickle.dumps(FailedElsewhereError.of(3, "ValueError: no")))
    assert isinstance(error, FailedElsewhereError)
    assert str(error) == "rank 3 failed while all ranks were preparing: ValueError: no"
