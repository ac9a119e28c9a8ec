"""The documentation site: it builds without a warning, and what is made from the code is there."""

from __future__ import annotations

import html
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from whale.config import Config

ROOT = Path(__file__).parents[2]


def words_of(page: Path) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", page.read_text()))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed: make docs installs it")
    # as in the Makefile: without it the theme talks about its successor, with that word in it
    quiet = {"NO_MKDOCS_2_WARNING": "true", "DISABLE_MKDOCS_2_WARNING": "true"}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | quiet,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WARNING" not in done.stderr
    config = words_of(tmp_path / "reference" / "config.html")
    assert all(name in config for name in Config.model_fields)
    commands = words_of(tmp_path / "reference" / "commands.html")
    assert all(f"whale {name}" in commands for name in ("run", "plan", "profile", "top"))
    assert "parallelize" in words_of(tmp_path / "reference" / "api.html")
    shutil.rmtree(tmp_path)
