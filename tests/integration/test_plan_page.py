"""The page of a plan: every number is the JSON's, nothing overlaps, and a real browser shows it
without an error.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import whale as wh
from whale.cli import app
from whale.report.svg import text_width
from whale.units import human_bytes, human_rate, human_seconds

SVG = "{http://www.w3.org/2000/svg}"
LAPTOP_WIDTH = 1366
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
SCRIPT = """
import torch
import whale as wh

wh.init({"num_task_graph": 2, "num_micro_batch": 4})
layers = [torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)) for _ in range(8)]
wh.parallelize(torch.nn.Sequential(*layers), torch.randn(32, 64), loss=lambda output, batch: output.square().mean(),
               optimizer=lambda parameters: torch.optim.AdamW(parameters))
"""
CLUSTER = """
hosts: [{name: big, kind: V100-16GB, count: 4}, {name: "a host with quite a <long> name", kind: P100, count: 4}]
"""
NUM_NUMBERS = 3 + 8 * (2 + 3 + 5 + 2)
"""step, samples/s, bubble; for each of 8 devices samples, FLOP, busy, wait, idle, five classes of
memory, their sum and the capacity
"""
OVERLAPS = """
<script>
const shown = [...document.querySelectorAll('h1, h2, p, td, th, .fact, svg text')].map(e => [e, e.getBoundingClientRect()]);
const found = [];
for (let i = 0; i < shown.length; i++) for (let j = i + 1; j < shown.length; j++) {
  const [a, x] = shown[i], [b, y] = shown[j];
  if (a.contains(b) || b.contains(a) || !x.width || !y.width) continue;
  const wide = Math.min(x.right, y.right) - Math.max(x.left, y.left), high = Math.min(x.bottom, y.bottom) - Math.max(x.top, y.top);
  if (wide > 1 && high > 2) found.push(a.textContent.slice(0, 40) + ' | ' + b.textContent.slice(0, 40));
}
const wide = document.documentElement.scrollWidth;
document.body.dataset.found = JSON.stringify({overlaps: found, width: window.innerWidth, needed: wide, number: shown.length});
</script>
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with plan.json, page.html and trace.json, made by the commands."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "cluster.yaml").write_text(CLUSTER)
    files = [
        "--cluster",
        str(folder / "cluster.yaml"),
        "--save",
        str(folder / "plan.json"),
        "--html",
        str(folder / "page.html"),
    ]
    files += ["--json", str(folder / "figures.json")]
    made = CliRunner().invoke(app, ["plan", str(folder / "train.py"), *files])
    assert made.exit_code == 0, made.output
    (folder / "plan.txt").write_text(made.output)
    shown = CliRunner().invoke(
        app, ["simulate", str(folder / "plan.json"), "--trace", str(folder / "trace.json")]
    )
    assert shown.exit_code == 0, shown.output
    (folder / "simulate.txt").write_text(shown.output)
    return folder


def predicted(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "figures.json").read_text())
    return found


def test_the_json_holds_the_timeline_and_what_each_device_does(folder: Path) -> None:
    found = predicted(folder)
    plan = wh.Plan.load(folder / "plan.json")
    timeline = json.loads(json.dumps(wh.simulate(plan).to_json()))
    assert {key: found[key] for key in timeline if key != "devices"} == {
        key: timeline[key] for key in timeline if key != "devices"
    }
    for device, simulated in zip(found["devices"], timeline["devices"], strict=True):
        assert {key: device[key] for key in simulated} == simulated
        assert (
            device["stages"] == list(plan.stages_of_rank(device["rank"]))
            and device["shard"] is None
        )
        assert sum(device["samples_of_micro_batches"]) == device["samples"]
    assert (
        sum(device["samples"] for device in found["devices"]) == 2 * plan.batch_size
    )  # each sample passes both stages
    assert sum(device["forward_flop"] for device in found["devices"]) == pytest.approx(
        sum(stage.forward_flop for stage in plan.stages)
    )
    assert [stage["ranks"] for stage in found["stages"]] == [
        list(plan.ranks_of_stage(stage.index)) for stage in plan.stages
    ]
    again = CliRunner().invoke(
        app, ["simulate", str(folder / "plan.json"), "--json", str(folder / "again.json")]
    )
    assert again.exit_code == 0 and json.loads((folder / "again.json").read_text()) == found


def check_numbers(page: str, expected: dict[str, Any]) -> int:
    """Every number of the page against the JSON; how many there are."""
    numbers = re.findall(r'<span data-key="([^"]+)" data-value="([^"]+)">([^<]*)</span>', page)
    for key, value, shown in numbers:
        found: Any = expected
        for part in html.unescape(key).split("."):
            found = found[int(part)] if isinstance(found, list) else found[part]
        assert float(value) == found, key
        if key.endswith("_s") and key != "samples_per_s":
            assert shown == human_seconds(found), key
        elif "bytes" in key:
            assert shown == human_bytes(found), key
    return len(numbers)


def test_every_number_of_the_page_is_the_jsons(folder: Path) -> None:
    assert check_numbers((folder / "page.html").read_text(), predicted(folder)) == NUM_NUMBERS


def test_the_page_needs_nothing_from_elsewhere(folder: Path) -> None:
    page = (folder / "page.html").read_text()
    used = re.findall(r'(?:src|href)="([^"]*)"|url\(([^)]*)\)|@import', page)
    assert used == [("data:,", "")]  # its script stands inside
    assert page.count("<script>") == page.count("<script") == 1
    assert not re.search(r"fetch|XMLHttpRequest|import\(|eval", page)
    assert set(re.findall(r"https?://[^\"' <]+", page)) == {
        "http://www.w3.org/2000/svg"
    }  # a name, not an address
    assert "a host with quite a &lt;long&gt; name" in page


def test_no_two_texts_of_a_picture_overlap(folder: Path) -> None:
    """Widths are those that letters of a usual font have; the browser's own measure is below."""
    pictures = re.findall(r"<svg.*?</svg>", (folder / "page.html").read_text(), re.DOTALL)
    assert len(pictures) == 4
    for picture in pictures:
        root = ElementTree.fromstring(picture)
        texts = []
        for text in root.iter(f"{SVG}text"):
            x = float(text.get("x", "0"))
            y = float(text.get("y", "0"))
            size = float(text.get("font-size", "0"))
            words = text.text or ""
            wide = text_width(words, size)
            left = x - {"middle": wide / 2, "end": wide}.get(text.get("text-anchor", ""), 0.0)
            assert left >= -1 and left + wide <= float(root.get("width", "0")) + 1, words
            texts.append((left, y - 0.75 * size, left + wide, y + 0.2 * size, words))
        for place, a in enumerate(texts):
            for b in texts[place + 1 :]:
                apart = a[2] <= b[0] + 1 or b[2] <= a[0] + 1 or a[3] <= b[1] or b[3] <= a[1]
                assert apart, (a[4], b[4])


def test_pictures_show_every_action_and_device(folder: Path) -> None:
    page = (folder / "page.html").read_text()
    timeline = predicted(folder)
    titles = set(re.findall(r"<title>([^<]*)</title>", page))
    for device in timeline["devices"]:
        for name, start, end in device["events"]:
            if name[0] in "FB" and end > start:
                assert f"{name}: {human_seconds(start)} to {human_seconds(end)}" in titles
        assert f"activations {human_bytes(device['peak_bytes']['activations'])}" in titles


def test_the_commands_print_step_devices_and_memory(folder: Path) -> None:
    timeline = predicted(folder)
    for file in ("plan.txt", "simulate.txt"):
        text = " ".join((folder / file).read_text().split())
        assert (
            f"Predicted step {human_seconds(timeline['step_s'])}, "
            f"{human_rate(timeline['samples_per_s'])} samples/s" in text
        )
        assert " ".join(timeline["limit"].split()) in text
        for device in timeline["devices"]:
            assert (
                f"{human_seconds(device['busy_s'])} "
                f"({100 * device['busy_s'] / timeline['step_s']:.0f} %)" in text
            )
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]


def test_simulate_and_compare_refuse_what_is_no_plan(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    for command in (["simulate", "plan.json"], ["compare", "plan.json", "plan.json"]):
        result = CliRunner().invoke(
            app, [command[0], *(str(tmp_path / name) for name in command[1:])]
        )
        assert result.exit_code == 2 and "is not a plan of `whale plan --save`" in result.stderr
    result = CliRunner().invoke(
        app,
        ["simulate", str(tmp_path / "plan.json"), "--trace", str(tmp_path / "no" / "trace.json")],
    )
    assert result.exit_code == 2 and "there is no folder" in result.stderr
    result = CliRunner().invoke(
        app, ["simulate", str(tmp_path / "plan.json"), "--json", str(tmp_path)]
    )
    assert result.exit_code == 2 and "is a folder; give a file" in result.stderr


def test_compare_says_in_words_what_differs(folder: Path, tmp_path: Path) -> None:
    plan = wh.Plan.load(folder / "plan.json")
    other = wh.plan(
        nn.Sequential(
            *(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8))
        ),
        torch.randn(32, 64),
        loss=lambda output, batch: output.square().mean(),
        cluster=8,
        config={"num_micro_batch": 2},
    )
    other.save(tmp_path / "other.json")
    result = CliRunner().invoke(
        app, ["compare", str(folder / "plan.json"), str(tmp_path / "other.json")]
    )
    assert result.exit_code == 1
    lines = result.output.splitlines()
    assert "devices: 4 x V100-16GB + 4 x P100 -> " + f"8 x {other.device_kinds[0]}" in lines
    assert (
        "parallelism: 2 VirtualDevices x 4 model replicas -> 1 VirtualDevice x 8 model replicas"
        in lines
    )
    assert "batch: 32 in 4 micro-batches -> 32 in 2" in lines
    assert "cuts: 2 stages -> 1 stage" in lines
    a = wh.simulate(plan)
    b = wh.simulate(other)
    assert f"predicted step: {human_seconds(a.step_s)} -> {human_seconds(b.step_s)}" in lines
    faster = max(a.samples_per_s / b.samples_per_s, b.samples_per_s / a.samples_per_s)
    assert any(f"is {faster:.3g} times faster" in line for line in lines)
    assert any(line.startswith("memory, most on rank") for line in lines)
    same = CliRunner().invoke(
        app, ["compare", str(folder / "plan.json"), str(folder / "plan.json")]
    )
    assert (same.exit_code, same.output) == (0, "both plans do the same\n")


@pytest.mark.skipif(
    BROWSER is None, reason="no Chromium here; `make test-all` installs Debian's where apt-get may"
)
def test_a_browser_shows_the_page_without_errors_or_overlaps(folder: Path, tmp_path: Path) -> None:
    assert BROWSER is not None
    page = tmp_path / "page.html"
    page.write_text((folder / "page.html").read_text().replace("</body>", f"{OVERLAPS}</body>"))
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--window-size={LAPTOP_WIDTH},900",
    ]
    options += [
        "--disable-background-networking",
        "--disable-sync",
        "--no-first-run",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    shown = subprocess.run(
        [BROWSER, *options, "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert shown.returncode == 0, shown.stderr
    assert "CONSOLE" not in shown.stderr
    match = re.search(r'data-found="([^"]*)"', shown.stdout)
    assert match is not None, "the page's script did not run"
    found = json.loads(html.unescape(match[1]))
    assert (
        found["width"] >= LAPTOP_WIDTH - 20
        and found["needed"] <= found["width"]
        and found["number"] > 100
    )
    assert found["overlaps"] == []
    assert check_numbers(shown.stdout, predicted(folder)) == NUM_NUMBERS
