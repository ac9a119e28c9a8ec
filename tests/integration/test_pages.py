"""Commands in README and on the pages of the site run, and print what is shown below them, up to
numbers (tests/pages.py says how blocks are written).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests import pages

WITH_COMMANDS = [
    page
    for page in pages.PAGES
    if any(
        block.language == "console" and block.reason_not_run is None for block in pages.blocks(page)
    )
]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.stem)
def test_commands_print_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    complaints = [outcome.complaint for outcome in pages.outcomes(page, tmp_path)]
    assert complaints, "no command was run"
    wrong = [complaint for complaint in complaints if complaint]
    assert not wrong, "\n\n".join(wrong)


# ---- the script of README and of docs/moving.md before and after


def lines_of(name: str) -> list[str]:
    return [line.split("  #")[0].rstrip() for line in (pages.ROOT / name).read_text().splitlines()]


@pytest.mark.parametrize("page", ["README.md", "docs/moving.md"])
@pytest.mark.parametrize(
    ("script", "signs"), [("tests/data/train_ddp.py", " -"), ("tests/data/train.py", " +")]
)
def test_the_diff_of_a_page_is_that_of_two_scripts(page: str, script: str, signs: str) -> None:
    (diff,) = [block for block in pages.blocks(pages.ROOT / page) if block.language == "diff"]
    wanted = [line[1:].split("  #")[0].rstrip() for line in diff.lines if line[:1] in signs]
    there = iter(lines_of(script))
    for line in wanted:
        assert line in there, f"{script} has no line {line!r} at its place"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_both_scripts_of_the_readme_train_alike(tmp_path: Path) -> None:
    """DDP prints the loss of each rank's own half of the mini-batch, Whale that of the whole."""
    found = {}
    for name, command in {
        "ddp": f"torchrun --nproc-per-node 2 {pages.ROOT}/tests/data/train_ddp.py",
        "whale": f"whale run -n 2 {pages.ROOT}/tests/data/train.py",
        "alone": f"{sys.executable} {pages.ROOT}/tests/data/train.py",
    }.items():
        exit_code, printed = pages.run(command, tmp_path)
        assert exit_code == 0, printed
        losses: dict[int, list[float]] = {}
        for step, loss in re.findall(r"^step (\d+): loss ([\d.]+)$", printed, re.MULTILINE):
            losses.setdefault(int(step), []).append(float(loss))
        found[name] = [sum(each) / len(each) for _, each in sorted(losses.items())]
    assert len(found["ddp"]) == 5
    assert found["whale"] == pytest.approx(found["ddp"], rel=1e-4)
    assert found["alone"] == pytest.approx(found["whale"], rel=1e-4)


# ---- reading and comparing themselves


def test_output_is_compared_up_to_numbers() -> None:
    shown = ("step 12.5 ms,   3 samples/s", "...", "done in 4 s")
    assert not pages.difference(shown, "step 1.02 s, 1,234.5 samples/s\nmore\n\ndone in 80 ms\n")
    assert not pages.difference(shown, "step 3 us, 7 samples/s\ndone in 2 min\n")
    assert pages.difference(shown, "step 3 us, 7 samples/s\ndone at 2 s\n")
    assert pages.difference(shown, "something else\nstep 3 us, 7 samples/s\ndone in 2 s\n")
    assert pages.difference(("rank 0 fits",), "rank 0 fits\nrank 1 does not\n")
    assert not pages.difference(("┏━━┓", "a  b c"), "┏━━━━━━━┓\na        b\nc\n")
    assert pages.difference(("...", "the end"), "the end\nand more\n")
    assert pages.difference(("...", "b", "...", "a", "..."), "a\nb\n")


def test_what_a_page_says_about_its_blocks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- file: a.txt -->\n```text\nhello\n```\n"
        "```console\n$ cat a.txt\nhello\n$ echo 1 \\\n  2\n3 4\n```\n"
        "<!-- exits with 3 -->\n```console\n$ exit 3\n```\n"
        "<!-- not run: why -->\n```console\n$ never\n```\n"
        "```console\n$ echo wrong\nright\n$ exit 2\n```\n"
    )
    found = list(pages.blocks(page))
    assert [block.reason_not_run for block in found] == [None, None, None, "why", None]
    (tmp_path / "run").mkdir()
    ran = list(pages.outcomes(page, tmp_path / "run"))
    assert [outcome.command.text for outcome in ran] == [
        *("cat a.txt", "echo 1 \\\n  2", "exit 3", "echo wrong", "exit 2")
    ]
    # Block.place is below the root of the clone for real pages only
    assert [outcome.exit_code for outcome in ran] == [0, 0, 3, 0, 2]
    assert [bool(pages.difference(each.command.shown, each.printed)) for each in ran] == [
        *(False, False, False, True, False)
    ]
