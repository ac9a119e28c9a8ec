"""The page of results: every figure of README has a benchmark behind it, and lines of benchmarks
become tables.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import results

ROOT = Path(__file__).parents[2]
CLAIM = {"ratio": 1.7, "target": 1.5, "at_most": False, "whale_s": 2.1, "parts": [1, 2]}


def benchmark(name: str) -> results.Benchmark:
    (found,) = [each for each in results.BENCHMARKS if each.name == name]
    return found


def test_benchmarks_that_readme_names_have_a_row() -> None:
    named = set(re.findall(r"benchmarks/(\w+)\.py", (ROOT / "README.md").read_text()))
    known = {each.name for each in results.BENCHMARKS}
    assert "mixed_gpus" in named
    assert named <= known
    assert all((ROOT / each.script).exists() for each in results.BENCHMARKS)


def test_claims_of_a_line_become_rows() -> None:
    line = {"name": "mixed_gpus", "ratio": 1.7, "target": 1.5, "ok": True}
    made = results.record(benchmark("mixed_gpus"), line | {"details": {"than FSDP": CLAIM, "x": 3}})
    assert list(made["claims"]) == ["than FSDP"]
    assert made["claims"]["than FSDP"]["ok"] and made["claims"]["than FSDP"]["details"] == {
        "whale_s": 2.1
    }
    assert re.fullmatch(r"[0-9a-f]{7,}", made["commit"]) and made["machine"] and made["date"]
    slow = results.record(benchmark("planning"), line | {"ok": False, "ratio": 1.2, "target": 1.0})
    assert not slow["claims"]["planning"]["ok"] and slow["claims"]["planning"]["at_most"]


def test_a_new_line_takes_the_place_of_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results.jsonl")
    line = {"name": "mixed_gpus", "ratio": 1.7, "target": 1.5, "ok": True}
    for ratio in (1.6, 1.4):
        made = results.record(
            benchmark("mixed_gpus"), line | {"details": {"a | b": CLAIM | {"ratio": ratio}}}
        )
        results.write(made)
    results.write(results.record(benchmark("planning"), line))
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 2
    pytest.importorskip("mkdocs")
    site_pages = pytest.importorskip("docs.site_pages")
    page = site_pages.results_page(tmp_path / "results.jsonl")
    assert r"| a \| b | 1.4 | at least 1.5 | **no** | whale_s 2.1 |" in page
    assert page.count("\n## ") == 2 and "python benchmarks/mixed_gpus.py" in page
    (tmp_path / "none.jsonl").write_text("")
    assert "No results" in site_pages.results_page(tmp_path / "none.jsonl")
