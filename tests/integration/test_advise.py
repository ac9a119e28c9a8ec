"""`whale advise` and the hint of `whale plan`: a script, a cluster file, no devices."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from whale.cli import app, planning
from whale.cluster.file import loads
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
    assert data["left_out"] == ["rank 2 (old on host b)"]  # so host b is not started
    (old,) = [change for change in data["without"] if "without rank 2" in change["what"]]
    assert old["ratio"] == 1  # what the best plan leaves out contributes nothing
    assert data["launch"].splitlines() == [
        "# on a",
        f"whale run --cluster {cluster} {script}",
        "# b needs no start: the plan leaves all of its devices out",
    ]
    assert "# b needs no start" in result.output
    one = tmp_path / "one.json"
    words = ["plan", "-n", "1", "--cluster", cluster, "--json", str(one), script]
    assert CliRunner().invoke(app, words).exit_code == 0
    alone = data["alone"]
    assert (alone["rank"], alone["device"], alone["kind"]) == (0, "quick", "one card alone")
    assert alone["step_s"] == pytest.approx(json.loads(one.read_text())["step_s"])
    assert "than the best card alone, quick (rank 0)" in result.output


@pytest.mark.slow
def test_a_model_that_no_card_holds_alone(tmp_path: Path) -> None:
    """Weights, gradients and the state of AdamW are 16 bytes for each of 24,960 parameters."""
    script, cluster = files(tmp_path)
    small = CLUSTER.replace("memory_gb: 1,", "memory_gb: 0.0003,")
    Path(cluster).write_text(small)
    page, figures = tmp_path / "advice.html", tmp_path / "advice.json"
    words = ["advise", "--cluster", cluster, "--html", str(page), "--json", str(figures), script]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    alone = json.loads(figures.read_text())["alone"]
    assert (alone["rank"], alone["step_s"]) == (0, None)
    match = re.search(r"does not fit on quick .* take (\d+) KB, it has 300 KB$", alone["plan"])
    assert match is not None and int(match[1]) == pytest.approx(24_960 * 16 / 1000, rel=0.05)
    for shown in (result.output, page.read_text()):
        assert "No card can train this model alone." in shown and "one card alone" in shown


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
    job = json.loads(figures.read_text())["job"]
    assert "takes the plan `as the script asks for`" in job and job in result.output
    assert job.endswith('For the first plan: "strategy": "auto" without "num_task_graph": 3.')


@pytest.mark.parametrize(
    ("config", "marks", "job"),
    [
        (
            {},
            {},
            "A job takes 1 stage on 2 devices with .* split, .*, 142 us: the search also counts",
        ),
        ({"num_micro_batch": 2}, {}, 'A job keeps "num_micro_batch": 2; these plans leave that'),
        ({}, {"*": 7}, "would be refused: .* without annotations"),
    ],
)
def test_advise_says_what_a_job_of_the_script_takes(
    tmp_path: Path, config: dict[str, int], marks: dict[str, int], job: str
) -> None:
    """Where that is not the first of the plans. Steps of this model are as long as what the runtime
    adds to two actions; of 3 devices, 7 are too many.
    """
    script, cluster = files(tmp_path, repr(config))
    scopes = ", ".join(f"{glob!r}: wh.replicate({number})" for glob, number in marks.items())
    text = Path(script).read_text()
    Path(script).write_text(text.replace("Net(), ", f"wh.annotate(Net(), {{{scopes}}}), "))
    figures = tmp_path / "advice.json"
    words = ["advise", "--cluster", cluster, "--json", str(figures), script]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    said = json.loads(figures.read_text())["job"]
    assert re.search(job, said) and said in result.output


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
    ("text", "message"),
    [
        ("print(1)", "ended without calling wh.parallelize"),
        ("raise SystemExit(3)", "ended with sys.exit(3)"),
        ("1 / 0", "failed before it reached wh.parallelize"),
        ("import whale\nwhale.init({'strategy': 'atuo'})", "Config: 'strategy' must be one of"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "advise"])
def test_messages_begin_with_the_command_that_was_typed(
    tmp_path: Path, command: str, text: str, message: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    result = CliRunner().invoke(app, [command, "-n", "2", str(script)])
    assert result.exit_code != 0
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"whale {command}: ") and message in last


HOSTS = """
hosts:
  - {name: a, devices: [{kind: T4, count: 2}, {kind: P100}]}
  - {name: b, kind: V100-16GB, count: 4}
"""


def test_only_hosts_that_take_part_are_started() -> None:
    """Ranks 0 to 2 are on host a, 3 to 6 on host b."""

    def lines(*ranks: int, hosts: str = HOSTS) -> list[str]:
        return planning.launch_lines(loads(hosts), ranks, "my file.yaml", "train.py -x").split("\n")

    def torchrun(place: int, number: int, first: str) -> str:
        return (
            f"WHALE_CLUSTER='my file.yaml' torchrun --nnodes 2 --node-rank {place} --nproc-per-node "
            f"{number} --master-addr {first} --master-port 29500 --shutdown-timeout 5 train.py -x"
        )

    both = ["# on a", torchrun(0, 3, "a"), "# on b", torchrun(1, 4, "a")]
    assert lines(*range(7)) == both
    # the last one of b is not started; of a the first, which does nothing, is
    fewer = ["# on a", torchrun(0, 3, "a"), "# on b", torchrun(1, 3, "a")]
    idle = (
        "# local rank 0 of a (T4) is started and idle: the plan leaves it out, and devices are "
        "found by local rank"
    )
    assert lines(1, 2, 3, 4, 5) == [*fewer, idle]
    run = "whale run --cluster 'my file.yaml' train.py -x"
    assert lines(3, 4, 5, 6) == [
        "# on b",
        run,
        "# a needs no start: the plan leaves all of its devices out",
    ]
    one_host = "hosts: [{name: c, kind: T4, count: 2}]"
    assert lines(0, 1, hosts=one_host) == [run]
    assert lines(0, hosts=one_host) == [run.replace("run", "run -n 1")]


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(1.02, "2 % slower"), (1.4, "1.4 times slower"), (0.5, "2 times faster"), (1.001, "the same")],
)
def test_effects_in_words(ratio: float, text: str) -> None:
    assert effect(ratio) == text
    assert effect(float("inf")) == "nothing fits"
