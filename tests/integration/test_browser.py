"""The pages that people look at, in a real browser at 1400 and 800 pixels: nothing complains, nothing
is cut off. `WHALE_PICTURES=folder` writes a picture of each, to be looked at.
"""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests import browser
from tests.browser import Browser
from whale.cli import app
from whale.report.board import make_server

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "mixed_gpus.yaml"
SCRIPT = """
import torch
import whale as wh

wh.init()
layers = [torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024)) for _ in range(8)]
wh.parallelize(torch.nn.Sequential(*layers), torch.randn(64, 1024), loss=lambda output, batch: output.square().mean(),
               optimizer=lambda parameters: torch.optim.AdamW(parameters))
"""
WIDTHS = pytest.mark.parametrize("width", browser.WIDTHS)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(browser.PROGRAM is None, reason="no Chromium here: make browser"),
]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pages of `whale plan`, `advise` and `schedule`, and the plan."""
    folder = tmp_path_factory.mktemp("pages")
    script = folder / "train.py"
    script.write_text(SCRIPT)
    cluster = ["--cluster", str(CLUSTER)]
    for words in (
        ["plan", *cluster, "--html", "plan.html", "--save", "plan.json", str(script)],
        ["advise", *cluster, "--html", "advise.html", str(script)],
        ["schedule", "--devices", "8", "--micro-batches", "16", "--html", "schedule.html"],
    ):
        places = [
            str(folder / word) if word.endswith((".html", ".json")) else word for word in words
        ]
        done = CliRunner().invoke(app, places)
        assert done.exit_code == 0, done.output
    return folder


def check(chromium: Browser, address: str, width: int, ready: str = "true") -> str:
    """The text of a page that has neither complaints nor parts that cannot be seen."""
    folder = os.environ.get("WHALE_PICTURES")
    name = address.removesuffix(".html").rpartition("/")[2] or "board"
    picture = Path(folder, f"{name}_{width}.png") if folder else None
    shown = chromium.look(address, width, ready, picture)
    assert shown.errors == []
    assert shown.cut_off == []
    return shown.text


@WIDTHS
@pytest.mark.parametrize("name", ["plan", "advise", "schedule"])
def test_pages_of_commands(chromium: Browser, made: Path, name: str, width: int) -> None:
    text = check(chromium, (made / f"{name}.html").as_uri(), width)
    assert ("RTX-4090" if name != "schedule" else "zero-bubble") in text


# ---- whale board


@contextmanager
def served(server: http.server.ThreadingHTTPServer) -> Iterator[str]:
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    server.server_close()
    thread.join(5)


def line(step: int) -> str:
    parts = {"compute_s": 0.1, "communication_s": 0.2, "bubble_s": 0.3, "total_s": 0.6}
    values = {"step": step, "time": 100.0 + step, "loss": 2.0 / (1 + step), "samples_per_s": 10.0}
    return json.dumps(values | parts | {"memory_bytes": 5e8}) + "\n"


@WIDTHS
def test_the_board_while_a_run_is_written(
    chromium: Browser, made: Path, width: int, tmp_path: Path
) -> None:
    """A rank stands in the middle of a line; the page shows the steps before it."""
    run = tmp_path / "a_run_with_quite_a_long_name_as_people_give_them"
    (run / "metrics").mkdir(parents=True)
    (run / "plan.json").write_bytes((made / "plan.json").read_bytes())
    for rank in range(8):
        text = "".join(map(line, range(40))) + line(40)[:17]
        (run / "metrics" / f"rank_{rank:05d}.jsonl").write_text(text)
    with served(make_server(tmp_path, "127.0.0.1", 0)) as address:
        ready = "document.querySelectorAll('#ranks tbody tr').length === 8"
        assert "step 39, loss 0.05, 8 ranks" in check(chromium, address, width, ready)
        assert "RTX-4090" in check(chromium, f"{address}plan/{run.name}", width)


# ---- the site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str]]]:
    """Where it is served, and the names of its pages."""
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed: make docs installs it")
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        check=True,
        timeout=500,
    )
    pages = [str(page.relative_to(folder)) for page in sorted(folder.rglob("*.html"))]
    handler: Callable[..., _Quiet] = functools.partial(_Quiet, directory=str(folder))
    with served(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)) as address:
        yield address, pages


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        """Requests are not printed."""


@WIDTHS
def test_every_page_of_the_site(chromium: Browser, site: tuple[str, list[str]], width: int) -> None:
    address, pages = site
    assert len(pages) > 30
    wrong = {}
    for page in pages:
        try:
            check(chromium, address + page, width)
        except AssertionError as error:
            wrong[page] = str(error)
    assert not wrong, json.dumps(wrong, indent=1)
