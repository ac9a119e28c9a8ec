"""README and the pages of the site: links lead somewhere, and the files, commands and make targets
that they name are there.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import typer

import whale
from docs import site_pages
from tests.pages import blocks
from whale.cli import app

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
MADE = {"docs/results.md", "docs/reference/config.md", "docs/reference/commands.md"}
"""pages that exist in the site only (docs/site_pages.py)"""
HISTORY = {"log.md"}
"""tells of what was there once"""
LANGUAGES = {"console", "python", "yaml", "diff", "text", "html"}
COMMAND = re.compile(r"^(\$|whale|python|pip|make|torchrun|git|bash|sbatch|kubectl|ssh)\s")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s#]+)[^)]*\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            path = (page.parent / target).resolve()
            known = path.exists() or str(path.relative_to(ROOT)) in MADE
            assert known, f"{page.name}: {target}"


def anchors(page: Path) -> set[str]:
    """What headings of a page can be reached by, as the site and GitHub make them from the words."""
    found: set[str] = set()
    in_block = False
    for line in page.read_text().splitlines():
        in_block ^= line.startswith("```")
        heading = re.match(r"#+ +(.*)", line)
        if in_block or heading is None:
            continue
        words = re.sub(r"[^\w\s-]", "", heading[1]).strip().lower()
        found |= {re.sub(r"[-\s]+", "-", words), re.sub(r"\s", "-", words)}
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_anchors_of_links_are_headings(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)\s#:]*)#([^)\s]+)\)", page.read_text()):
        path = (page.parent / target).resolve() if target else page
        if path.exists():  # pages that are made from the code are checked by `make docs`
            assert anchor in anchors(path), f"{page.name}: {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_stand_in_blocks_that_are_run(page: Path) -> None:
    """tests/integration/test_pages.py runs console blocks; those that are not run say why."""
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{block.place}: a block of {block.language!r}"
        if block.language == "text":
            assert not any(map(COMMAND.match, block.lines)), f"{block.place}: use ```console"
        if block.reason_not_run is not None:
            assert len(block.reason_not_run) > 10, f"{block.place}: why is it not run?"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_commands_and_targets_exist(page: Path) -> None:
    if page.name in HISTORY:
        return
    text = page.read_text()
    for path in re.findall(r"\b((?:benchmarks|examples|deploy|tests/\w+)/[\w/]+\.\w+)", text):
        assert (ROOT / path).exists(), f"{page.name}: {path}"
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name in re.findall(r"(?:`|^|\$ )whale ([a-z]+)\b", text, re.MULTILINE):
        assert name in commands, f"{page.name}: whale {name}"
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for name in re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE):
        assert name in targets, f"{page.name}: make {name}"


def test_names_of_the_reference_are_there() -> None:
    """`make docs` takes their docstrings; every public name has a place."""
    names = re.findall(r"^::: ([\w.]+)", (ROOT / "docs/reference/api.md").read_text(), re.MULTILINE)
    assert len(names) > 10
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name
    shown = {name.rpartition(".")[2] for name in names}
    assert shown == set(whale.__all__) - {"Config"}  # which has a page of its own


def test_the_page_of_commands_shows_names_and_defaults() -> None:
    page = site_pages.commands_page()
    for row in (
        "| `PLAN.JSON` |  | written by whale plan --save |",
        "| `A.JSON` |  | one saved plan |",
        "| `-o`, `--output` | `cluster.yaml` | The cluster file to write. |",
        "| `FOLDER` | `runs` | where the runs are |",
        "| `--port` | `8080` | 0: any that is free |",
    ):
        assert row in page, row


def test_the_page_of_settings_shows_words_of_a_reader() -> None:
    page = site_pages.config_page()
    assert '| `num_task_graph` | int, "auto" or None | `None` |' in page
    assert "Annotated" not in page and "<function" not in page


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 250


def test_the_changelog_has_one_dated_section_for_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    _, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    dated = [section for section in sections if not section.startswith("[Unreleased]")]
    newest = re.match(r"\[(.*)\] - (20\d\d-\d\d-\d\d)\n", dated[0])
    assert newest is not None and newest[1] == whale.__version__
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {newest[1]}\ndate-released: {newest[2]}\n" in citation
    for section in sections:
        kinds = re.findall(r"^### (.*)", section, re.MULTILINE)
        assert len(set(kinds)) == len(kinds), f"a kind of change has two lists: {kinds}"
