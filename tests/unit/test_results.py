"""The page of results: every figure of README has a benchmark behind it, and lines of benchmarks
become tables.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import results
from docs import site_pages

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
    page = site_pages.results_page(tmp_path / "results.jsonl")
    assert r"| a \| b | 1.4 | at least 1.5 | **no** | whale 2.1 s |" in page
    assert r"](#mixed_gpus) | predicted | 1.4 | at least 1.5 | **0 of 1** |" in page
    assert page.index("{ #mixed_gpus }") < page.index("{ #planning }")  # as in the overview
    assert "`python benchmarks/mixed_gpus.py`" in page and "| machine | " in page
    assert f"\n2 of {len(results.BENCHMARKS)} benchmarks stand here" in page
    missing = page.partition("## Not taken yet")[2]
    assert "| `dp_vs_ddp` | measured on CPU | " in missing and "`planning`" not in missing
    (tmp_path / "none.jsonl").write_text("")
    empty = site_pages.results_page(tmp_path / "none.jsonl")
    assert "No results" in empty
    assert all(f"| `{each.name}` | {each.how} | " in empty for each in results.BENCHMARKS)


def test_a_row_of_a_commit_that_is_gone_says_so(tmp_path: Path) -> None:
    line = {"name": "planning", "ratio": 0.9, "target": 1.0, "ok": True}
    here = results.record(benchmark("planning"), line)
    gone = results.record(benchmark("search --by-hand"), line) | {"commit": "0000000"}
    assert not site_pages.is_lost(here)
    assert site_pages.is_lost(gone)
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in (here, gone)))
    page = site_pages.results_page(path)
    assert "| commit, date | `0000000` (no longer in the history), " in page
    end = page.partition("## Not taken yet")[2]
    assert "The commit of `search --by-hand` is not in the history" in end
    assert '- `python benchmarks/results.py "search --by-hand"`\n' in end
    assert "| `python benchmarks/results.py vs_planners --measurements DIR` |" in end


def test_the_overview_shows_the_case_with_the_worst_margin() -> None:
    line = {"name": "planning", "ratio": 0.9, "target": 1.0, "ok": True}
    cases = {"near": {"ratio": 0.9, "target": 1.0}, "far": {"ratio": 0.2, "target": 1.0}}
    made = results.record(benchmark("planning"), line | {"details": cases})
    row = site_pages._overview(made)
    assert row[2:5] == ["0.9", "at most 1.0", "2 of 2"]


def test_links_of_the_overview_lead_to_their_sections(tmp_path: Path) -> None:
    made = [
        results.record(each, {"name": each.script, "ratio": 1.0, "target": 1.0, "ok": True})
        for each in results.BENCHMARKS
    ]
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in made))
    page = site_pages.results_page(path)
    links = re.findall(r"\]\(#([^)]*)\) \|", page)
    sections = re.findall(r"\{ #(.*) \}$", page, re.MULTILINE)
    assert links == sections and len(set(links)) == len(results.BENCHMARKS)
    assert all(re.fullmatch(r"[\w-]+", link) for link in links)
