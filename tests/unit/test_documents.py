"""README and the pages of the site: links lead somewhere, and the files, commands and make targets
that they name are there.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from whale.cli import app

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
MADE = {"docs/results.md", "docs/reference/config.md", "docs/reference/commands.md"}
"""pages that exist in the site only (docs/site_pages.py)"""
HISTORY = {"log.md"}
"""tells of what was there once"""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s#]+)[^)]*\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            path = (page.parent / target).resolve()
            known = path.exists() or str(path.relative_to(ROOT)) in MADE
            assert known, f"{page.name}: {target}"


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


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 250
