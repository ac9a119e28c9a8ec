"""`whale advise` and the hint of `whale plan`: a script, a cluster file, no devices."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from whale.cli import app, planning
from whale.report.advice_page import effect
from whale.search import advice
from whale.search.search import Search, search
from whale.search.tries import SearchProgress

SCRIPT = """
import torch, whale as wh
wh.init(CONFIG)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    def forward(self, x):
        return self.layers(x).square().mean()
wh.parallelize(Net(), torch.randn(16, 64), optimizer=lambda p: torch.optim.AdamW(p))
"""
CLUSTER = """
hosts:
  - {name: a, kind: quick, count: 2}
  - {name: b, kind: old, count: 1}
links:
  intra_host: {gb_per_s: 1, latency_us: 5}
  inter_host: {gb_per_s: 0.05, latency_us: 20}
kinds:
  quick: {tflop_per_s: 0.02, bf16_tflop_per_s: 0.02, fp16_tflop_per_s: 0.08, memory_gb: 1, gb_per_s: 40}
  old: {tflop_per_s: 0.004, memory_gb: 1, gb_per_s: 20}
"""


def files(folder: Path, config: str = "{}") -> tuple[str, str]:
    script = folder / "train.py"
    script.write_text(SCRIPT.replace("CONFIG", config))
    cluster = folder / "cluster.yaml"
    cluster.write_text(CLUSTER)
    return str(script), str(cluster)


def test_advise_gives_the_same_numbers_as_table_json_and_page(tmp_path: Path) -> None:
    script, cluster = files(tmp_path, '{"precision": "bf16"}')
    page, figures = tmp_path / "advice.html", tmp_path / "advice.json"
    result = CliRunner().invoke(
        app,
        ["advise", "--cluster", cluster, "--html", str(page), "--json", str(figures), script],
    )
    assert result.exit_code == 0, result.output
    data = json.loads(figures.read_text())
    steps = [plan["step_s"] for plan in data["plans"]]
    assert steps == sorted(steps) and len({plan["kind"] for plan in data["plans"]}) == len(steps)
    found = re.findall(r'data-key="([\w.]+)" data-value="([^"]+)"', page.read_text())
    assert found
    for key, value in found:
        place: object = data
        for part in key.split("."):
            place = place[int(part)] if isinstance(place, list) else place[part]  # type: ignore[index]
        assert float(value) == place
    kinds = {plan["kind"] for plan in data["plans"]}
    assert {"data parallel", "pipeline", "replicas that are not alike"} <= kinds
    assert all(change["ratio"] >= 1 for change in data["without"])
    assert all(change["ratio"] <= 1 for change in data["changes"])
    of_ranks = [rank for change in data["without"] for rank in change["ranks"]]
    assert {0, 1, 2} <= set(of_ranks)
    assert any("without rank 2" in change["what"] for change in data["without"])
    assert any("one more quick" in change["what"] for change in data["changes"])
    assert any("quick: bf16 (it has no tensor cores" in note for note in data["precision"])
    assert not any("one precision" in note for note in data["precision"])  # both want the same
    for host, place, number in (("a", 0, 2), ("b", 1, 1)):  # one line for each host
        line = f"--nnodes 2 --node-rank {place} --nproc-per-node {number} --master-addr a "
        assert f"# on {host}\nWHALE_CLUSTER={cluster} torchrun {line}" in data["launch"]
        assert line in result.output


def test_an_interrupt_gives_what_is_known_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while other clusters are looked at: one answer is there, and the plans are."""
    script, cluster = files(tmp_path)
    figures, page = tmp_path / "advice.json", tmp_path / "advice.html"
    asked = 0

    def interrupted(*args: object, **options: object) -> Search:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise KeyboardInterrupt
        return search(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(advice, "search", interrupted)
    words = ["advise", "--cluster", cluster, "--json", str(figures), "--html", str(page), script]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    data = json.loads(figures.read_text())
    assert data["interrupted"] and data["plans"]
    assert len(data["without"]) == 1 and not data["changes"]
    assert "Interrupted: " in result.output and "Interrupted: " in page.read_text()


def test_advise_ranks_what_the_script_asks_for(tmp_path: Path) -> None:
    script, cluster = files(tmp_path, '{"num_task_graph": 3}')
    figures = tmp_path / "advice.json"
    result = CliRunner().invoke(
        app, ["advise", "--cluster", cluster, "--json", str(figures), script]
    )
    assert result.exit_code == 0, result.output
    plans = json.loads(figures.read_text())["plans"]
    (own,) = [plan for plan in plans if plan["kind"] == "as the script asks for"]
    assert own["plan"] == '"num_task_graph": 3' and plans[0]["step_s"] <= own["step_s"]


def test_ctrl_c_gives_the_best_plan_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real signal, as soon as there is a plan."""
    script, cluster = files(tmp_path)

    def press(progress: SearchProgress) -> None:
        if progress.best is not None:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(planning, "show_progress", press)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest's workers ignore it
    try:
        result = CliRunner().invoke(app, ["plan", "--cluster", cluster, script])
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.exit_code == 0, result.output
    assert "interrupted" in result.output


def test_plan_says_what_the_search_would_give(tmp_path: Path) -> None:
    script, cluster = files(tmp_path, '{"num_task_graph": 3}')
    result = CliRunner().invoke(app, ["plan", "--cluster", cluster, script])
    assert result.exit_code == 0, result.output
    assert '"strategy": "auto"' in result.output


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(1.02, "2 % slower"), (1.4, "1.4x slower"), (0.5, "2x faster"), (1.001, "the same")],
)
def test_effects_in_words(ratio: float, text: str) -> None:
    assert effect(ratio) == text
    assert effect(float("inf")) == "nothing fits"
