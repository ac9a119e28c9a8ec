"""The command `whale` as a user types it. One multi-process job at a time; no test looks at a
clock.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from typer.testing import CliRunner, Result

from tests.exactness import local_training, mean_square, three_layers
from whale.cli import app, own_options_first
from whale.config import Config
from whale.launcher import QUIET, first_failure
from whale.plans.plan import Plan
from whale.report import summary
from whale.session import session

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart.py"
BIN = Path(sys.executable).parent
TIMEOUT_S = 110.0
"""of one command on a busy machine"""

TINY = """
import os, sys
import torch
import whale as wh

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
wh.init(wh.Config({"num_micro_batch": 2}))
model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6))
batches = [torch.randn(9, 6) for _ in range(3)]
optimizer = lambda params: torch.optim.SGD(params, lr=0.5)
engine = wh.parallelize(model, batches[0], optimizer=optimizer, loss=lambda output, batch: output.square().mean())
for batch in batches:
    loss = engine.step(batch).loss
    if os.environ.get("RANK", "0") == "0":
        print("loss", repr(loss), flush=True)
"""


def plain_losses() -> list[float]:
    """The training of TINY in plain PyTorch."""
    torch.manual_seed(0)
    model = three_layers()
    batches = [torch.randn(9, 6, dtype=torch.float64) for _ in range(3)]
    return local_training(
        model, batches, mean_square, lambda parameters: torch.optim.SGD(parameters, lr=0.5)
    ).losses


def script(folder: Path, text: str, name: str = "script.py") -> str:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return str(path)


def shell(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a command of this environment and waits for it."""
    command, *rest = map(str, words)
    # its own group, and all of it ended: a hung rank does not outlive its test
    process = subprocess.Popen(
        [str(BIN / command), *rest],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=ROOT,
    )
    try:
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        pytest.fail(
            f"{command} did not end within {TIMEOUT_S:.0f} s\n{stdout[-2000:]}\n{stderr[-2000:]}"
        )
    return subprocess.CompletedProcess(list(words), process.returncode, stdout, stderr)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts back what scripts change, for commands that run in this process."""
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(session, "config", session.config)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


def whale(*words: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, words)))


# ---- whale plan, show, diff


@pytest.fixture(scope="module")
def quickstart_plan(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Plan file of the quickstart on 4 devices, and what `whale plan` printed."""
    file = tmp_path_factory.mktemp("plans") / "plan.json"
    done = shell("whale", "plan", QUICKSTART, "-n", "4", "--save", file, "--batch", "32")
    assert done.returncode == 0, done.stderr
    return file, done.stdout


def test_plan_of_the_quickstart(quickstart_plan: tuple[Path, str]) -> None:
    file, printed = quickstart_plan
    plan = Plan.load(file)
    assert (
        summary(plan)
        == "4 devices (4 x CPU): 2 stages x 2 model replicas, batch 32 in 4 micro-batches, schedule 1f1b"
    )
    assert printed.startswith(summary(plan))
    assert printed.rstrip().endswith(f"saved as {file}")
    assert [device.ranks for device in plan.virtual_devices] == [((0,), (2,)), ((1,), (3,))]
    assert [crossing.sample_bytes for crossing in plan.crossings] == [
        16 * 48 * 4
    ]  # 16 tokens of 48 float32


def test_show_prints_what_plan_printed(quickstart_plan: tuple[Path, str]) -> None:
    file, printed = quickstart_plan
    shown = whale("show", file)
    assert shown.exit_code == 0
    assert shown.stdout.strip() == printed.replace(f"saved as {file}", "").strip()


def test_diff_like_diff(quickstart_plan: tuple[Path, str], tmp_path: Path) -> None:
    file, _ = quickstart_plan
    same = whale("diff", file, file)
    assert (same.exit_code, same.stdout) == (0, "no difference\n")
    other = tmp_path / "other.json"
    content = json.loads(file.read_text())
    label = content["task_graphs"][0]["label"]
    content["task_graphs"][0]["label"] = "other"
    other.write_text(json.dumps(content))
    changed = whale("diff", file, other)
    said = f"task_graphs[0].label: {label} -> other\n"
    assert (changed.exit_code, changed.stdout) == (1, said)


@pytest.mark.usefixtures("here")
def test_a_model_on_meta_is_planned_without_memory(tmp_path: Path) -> None:
    """Two layers of 160 GB each."""
    text = """
        import torch, whale as wh
        if __name__ == "__main__":
            wh.init({"num_micro_batch": 2})
            with torch.device("meta"):
                model = torch.nn.Sequential(*(torch.nn.Linear(200_000, 200_000, bias=False) for _ in range(2)))
            wh.annotate(model, {"0": wh.replicate(1), "1": wh.replicate(1)})
            wh.parallelize(model, torch.empty(8, 200_000, device="meta"), loss=lambda output, batch: output.mean())
    """
    done = whale("plan", "-n", "2", script(tmp_path, text))
    assert done.exit_code == 0, done.output
    assert (
        done.stdout.count("160 GB") == 8
    )  # each TaskGraph, each VirtualDevice, parameters and gradients of each device
    assert "800 KB" in done.stdout  # 200,000 float32 cross for each sample


@pytest.mark.usefixtures("here")
def test_a_refusal_is_one_message(tmp_path: Path) -> None:
    path = script(tmp_path, TINY)
    done = whale("plan", path, "-n", "16")
    assert done.exit_code == 1
    assert done.stderr.startswith("whale plan: batch size 9 in 2 micro-batches leaves 4 samples")
    assert len(done.stderr.splitlines()) == 1
    with_trace = whale("plan", path, "-n", "16", "--debug")
    assert with_trace.exit_code == 1
    assert "Traceback (most recent call last)" in with_trace.stderr
    assert "check_batch" in with_trace.stderr


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("text", "exit_code", "message"),
    [
        ("print('nothing to do')", 2, "ended without calling wh.parallelize"),
        ("import sys; sys.exit(0)", 2, "ended without calling wh.parallelize"),
        ("import sys; sys.exit(7)", 1, "ended with sys.exit(7) before it reached wh.parallelize"),
        ("raise ValueError('of my own')", 1, 'script.py", line 1, in <module>'),
        ("1 / 0", 1, "failed before it reached wh.parallelize"),
        (
            "import torch, whale as wh; wh.parallelize(lambda: 1 / 0, torch.ones(2, 3))",
            1,
            "failed inside of wh.parallelize",
        ),
        (
            "import whale as wh; wh.init({'num_micro_batches': 3})",
            1,
            "whale plan: Config has no key 'num_micro_batches'",
        ),
    ],
)
def test_scripts_without_a_plan(tmp_path: Path, text: str, exit_code: int, message: str) -> None:
    done = whale("plan", "-n", "2", script(tmp_path, text))
    assert done.exit_code == exit_code
    assert message in done.stderr
    assert "launcher.py" not in done.stderr  # no frames of ours in the user's traceback


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("-n 8 t.py --lr 3", "-n 8 t.py --lr 3"),
        ("t.py -n 8 --save p.json --lr 3", "-n 8 --save p.json t.py --lr 3"),
        ("t.py -n8 --save=p.json --debug x -n 4", "-n8 --save=p.json --debug t.py x -n 4"),
        ("t.py --lr 3 -n 4", "t.py --lr 3 -n 4"),
        ("-n 8 t.py -- -n 4 --debug", "-n 8 t.py -n 4 --debug"),
        ("--help", "--help"),
        ("t.py --help", "t.py --help"),
        ("t.py -n", "-n t.py"),
        ("", ""),
    ],
)
def test_options_around_the_script(typed: str, read: str) -> None:
    assert own_options_first(typed.split()) == read.split()


# ---- errors, and the small commands


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run -n 0 {script}", "whale run: -n 0: at least 1 rank is needed"),
        ("run -n 2 nowhere.py", "whale run: nowhere.py: no such file; give a Python script"),
        ("run -n 2 {folder}", "is a folder"),
        ("run --restarts -1 {script}", "--restarts -1"),
        ("plan -n 0 {script}", "whale plan: -n 0: at least 1 device is needed"),
        ("plan nowhere.py -n 2", "whale plan: nowhere.py: no such file"),
        ("plan {script} -n 2 --save {folder}/no/plan.json", "there is no folder"),
        ("advise -n 0 {script}", "whale advise: -n 0: at least 1 device is needed"),
        ("advise {script} --cluster nowhere.yaml", "whale advise: cluster file nowhere.yaml: "),
        ("show nowhere.json", "whale show: nowhere.json: No such file or directory"),
        ("show {folder}", "Is a directory"),
        ("show {script}", "script.py is not a plan"),
        ("show {contradiction}", "contradicts itself"),
        ("diff {contradiction} nowhere.json", "contradicts itself"),
    ],
)
def test_wrong_use_is_one_message(
    quickstart_plan: tuple[Path, str], tmp_path: Path, words: str, message: str
) -> None:
    places = {
        "script": script(tmp_path, "raise AssertionError('never run')"),
        "folder": tmp_path,
        "contradiction": tmp_path / "x.json",
    }
    (tmp_path / "x.json").write_text(
        json.dumps(json.loads(quickstart_plan[0].read_text()) | {"replicas": []})
    )
    done = whale(*words.format(**places).split())
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_config_lists_every_field() -> None:
    printed = whale("config").stdout
    for key, value in Config().to_dict().items():
        assert f"| `{key}` |" in printed and f"`{value!r}`" in printed


def test_version_and_help() -> None:
    assert re.fullmatch(r"whale \d+\.\d+\.\d+\n", whale("--version").stdout)
    for words in (["--help"], ["run", "--help"], ["plan", "--help"]):
        assert whale(*words).exit_code == 0


def test_the_commands_themselves_need_no_torch(quickstart_plan: tuple[Path, str]) -> None:
    """`whale.cli` under an empty package in the place of `whale`: what `whale/__init__.py` imports
    is not its doing.
    """
    program = f"""
        import sys, types
        package = types.ModuleType("whale")
        package.__path__ = [{str(ROOT / "whale")!r}]
        sys.modules["whale"] = package
        from whale.cli import app
        for words in (["--help"], ["show", {str(quickstart_plan[0])!r}], ["config"]):
            try:
                app(words)
            except SystemExit as stop:
                assert stop.code == 0
        print("torch imported:", "torch" in sys.modules)
    """
    done = shell("python", "-c", textwrap.dedent(program))
    assert done.stdout.splitlines()[-1:] == ["torch imported: False"], done.stderr


# ---- whale run


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(("python",), id="python"),
        # test_clusters.py compares a job of `whale run` with plain PyTorch, too; two_hosts.sh in
        # test_examples.py starts torchrun
        pytest.param(("whale", "run", "-n", "2"), id="whale run", marks=pytest.mark.slow),
        pytest.param(("torchrun", "--nproc-per-node", "2"), id="torchrun", marks=pytest.mark.slow),
    ],
)
def test_every_launcher_trains_like_plain_pytorch(
    tmp_path: Path, launcher: tuple[str, ...]
) -> None:
    done = shell(*launcher, script(tmp_path, TINY))
    assert done.returncode == 0, done.stderr
    losses = [
        float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("loss")
    ]
    assert losses == pytest.approx(plain_losses(), rel=1e-10)


def test_run_passes_arguments_and_environment_on(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'imported from the folder of the script'")
    text = """
        import os, sys, beside
        if __name__ == "__main__":
            known = {key: os.environ[key] for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS")}
            sys.stdout.write(f"{sys.argv[1:]} {known} {beside.NAME}\\n")
    """
    done = shell(
        "whale",
        "run",
        "-n",
        "2",
        script(tmp_path, text),
        "--lr",
        "3",
        "-n",
        "7",
        "--",
        "--debug",
        "--version",
        "a b",
    )
    assert done.returncode == 0, done.stderr
    words = ["--lr", "3", "-n", "7", "--", "--debug", "--version", "a b"]
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    for rank in range(2):
        known = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "OMP_NUM_THREADS": threads,
        }
        assert f"{words} {known} imported from the folder of the script\n" in done.stdout


def test_lines_of_several_ranks_come_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Python is asked not to buffer: every argument of `print` was a write of its own."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    text = """
        import os, time
        from pathlib import Path
        started = Path(__file__).parent / "started"
        started.mkdir(exist_ok=True)
        (started / os.environ["RANK"]).touch()
        while len(list(started.iterdir())) < 4:
            time.sleep(0.01)
        for number in range(300):
            print("rank", os.environ["RANK"], "line", number)
    """
    done = shell("whale", "run", "-n", "4", script(tmp_path, text))
    assert done.returncode == 0, done.stderr
    wanted = [f"rank {rank} line {number}" for rank in range(4) for number in range(300)]
    assert sorted(done.stdout.splitlines()) == sorted(wanted)


@pytest.mark.slow
def test_warnings_of_transformers_are_shown_once_and_errors_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in QUIET:
        monkeypatch.delenv(name, raising=False)
    text = """
        from transformers.utils import logging
        logger = logging.get_logger("transformers.some.model")
        logger.warning("this is repeated")
        logger.error("this is wrong")
        with logging.tqdm(range(1), desc="a bar") as bar:
            list(bar)
    """
    done = shell("whale", "run", "-n", "3", script(tmp_path, text))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("this is repeated") == 1
    assert done.stderr.count("this is wrong") == 3
    assert done.stderr.count("a bar: 100%") == 1
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "warning")  # what the user sets holds
    asked = shell("whale", "run", "-n", "2", tmp_path / "script.py")
    assert asked.stderr.count("this is repeated") == 2, asked.stderr


def test_run_names_the_rank_that_failed_first(tmp_path: Path) -> None:
    """Rank 1 fails; rank 0 notices and fails too, in the same second."""
    text = f"""
        import os, pathlib, time
        flag = pathlib.Path({str(tmp_path / "flag")!r})
        if os.environ["RANK"] == "1":
            try:
                raise ValueError("layer 3 has 7 rows")
            finally:
                flag.touch()
        while not flag.exists():
            time.sleep(0.01)
        time.sleep(0.2)
        raise RuntimeError("connection closed by rank 1")
    """
    done = shell("whale", "run", "-n", "2", script(tmp_path, text))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("whale run: rank 1 failed: ValueError: layer 3 has 7 rows")
    assert 'script.py", line 6, in <module>' in done.stderr
    assert "ChildFailedError" not in done.stderr
    assert "runpy" not in done.stderr


def test_run_starts_again(tmp_path: Path) -> None:
    """The first attempt fails, the second does not."""
    text = f"""
        import os, pathlib, sys
        flag = pathlib.Path({str(tmp_path / "flag")!r})
        if not flag.exists():
            flag.touch()
            sys.exit(5)
        print("second attempt")
    """
    path = script(tmp_path, text)
    again = shell("whale", "run", "-n", "1", "--restarts", "1", path)
    assert (again.returncode, again.stdout) == (0, "second attempt\n")
    (tmp_path / "flag").unlink()
    once = shell("whale", "run", "-n", "1", path)
    assert once.returncode == 5
    assert once.stderr.splitlines()[-1] == "whale run: rank 0 failed: sys.exit(5)"


AT_THE_END = """
import atexit, os, sys, threading, time

class CrashesWhenTornDown:
    def __del__(self):
        os.abort()

crashes = CrashesWhenTornDown()
atexit.register(print, "exit function", end=" ")
threading.Thread(target=lambda: (time.sleep(0.5), print("thread", end=" "))).start()
sys.exit({code})
"""


@pytest.mark.parametrize(("code", "exit_code"), [("", 0), ("3", 3), ("'of my own'", 1)])
def test_a_finished_rank_ends_without_taking_the_interpreter_apart(
    tmp_path: Path, code: str, exit_code: int
) -> None:
    """Threads are waited for, then exit functions run and output is flushed; what would crash the
    interpreter's end does not make a finished job a failed one.
    """
    done = shell("whale", "run", "-n", "1", script(tmp_path, AT_THE_END.format(code=code)))
    assert (done.returncode, done.stdout) == (exit_code, "thread exit function ")
    assert ("of my own" in done.stderr) == (exit_code == 1)


@pytest.mark.parametrize(("how", "exit_code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_no_rank_outlives_its_launcher(tmp_path: Path, how: signal.Signals, exit_code: int) -> None:
    text = f"""
        import os, pathlib, time
        pathlib.Path({str(tmp_path)!r}, "pid" + os.environ["RANK"]).write_text(str(os.getpid()))
        time.sleep(600)
    """
    command = [str(BIN / "whale"), "run", "-n", "2", script(tmp_path, text)]
    launcher = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_for(
        lambda: (
            len(list(tmp_path.glob("pid*"))) == 2
            and all(path.read_text() for path in tmp_path.glob("pid*"))
        )
    )
    ranks = [int(path.read_text()) for path in tmp_path.glob("pid*")]
    launcher.send_signal(how)
    _, stderr = launcher.communicate(timeout=TIMEOUT_S)
    assert launcher.returncode == exit_code
    wait_for(lambda: not any(map(is_running, ranks)))
    if how is not signal.SIGKILL:
        assert stderr.splitlines()[-1].endswith("all ranks are ended")
        assert "Traceback" not in stderr


def wait_for(condition: object) -> None:
    """Until it holds; fails after a while."""
    assert callable(condition)
    end = time.monotonic() + TIMEOUT_S / 2
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """A zombie, which only waits for its parent to look, has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def failure(
    folder: Path, rank: int, exit_code: int, text: str | None = None, time_ns: int = 0
) -> ProcessFailure:
    """The failure of a rank as torch's launcher hands it over."""
    file = folder / f"error{rank}.json"
    if text is not None:
        record = {
            "message": {"message": text, "extraInfo": {"timestamp": str(time_ns // 10**9)}},
            "time_ns": time_ns,
        }
        file.write_text(json.dumps(record))
    return ProcessFailure(local_rank=rank, pid=1, exitcode=exit_code, error_file=str(file))


def test_the_first_failure_is_the_cause(tmp_path: Path) -> None:
    now = 1_700_000_000 * 10**9
    late = failure(tmp_path, 0, 1, "RuntimeError: connection closed", now + 2000)
    early = failure(tmp_path, 1, 1, "ValueError: too long", now + 1000)
    ended = failure(tmp_path, 2, -signal.SIGTERM)  # by the launcher
    killed = failure(tmp_path, 3, -signal.SIGKILL)
    assert (
        str(first_failure({0: late, 1: early, 2: ended}))
        == "rank 1 failed: ValueError: too long (1 more failed after it)"
    )
    by_signal = first_failure({0: late, 1: early, 2: ended, 3: killed})
    assert (by_signal.rank, by_signal.exit_code, by_signal.num_failed) == (3, 137, 3)
    assert "signal 9 (SIGKILL" in by_signal.text
    assert first_failure({2: ended}).exit_code == 143


# ---- words that are not quite right


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "--htm", "x", "train.py"], "no option --htm. Did you mean '--html'?"),
        (["run", "-n", "2", "--restart=1", "train.py"], "--restart. Did you mean '--restarts'?"),
        (["top", "--onc", "runs"], "no option --onc. Did you mean '--once'?"),
        (["schedule", "--device", "4"], "no option --device. Did you mean '--devices'?"),
        (["run", "--nproc-per-node", "2", "t.py"], "--nproc-per-node. Did you mean '-n'?"),
        (["run", "--num_processes=2", "t.py"], "--num_processes. Did you mean '-n'?"),
        (["run", "--emulate", "train.py"], "train.py stands where --emulate wants its value"),
        (["plan", "--cluster", "train.py"], "Try: whale plan --cluster VALUE train.py"),
    ],
)
def test_misspelt_options_before_the_script(words: list[str], said: str) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cluster.yaml", "is no Python script. A cluster file stands behind --cluster"),
        ("plan.json", "is no Python script. A saved plan is for whale show"),
    ],
)
def test_a_file_that_is_no_script_is_not_run(tmp_path: Path, name: str, said: str) -> None:
    file = tmp_path / name
    file.touch()
    for command in ("run", "plan", "advise"):
        result = whale(command, file)
        assert result.exit_code == 2 and said in result.output


def test_a_misspelt_option_behind_the_script_is_named_when_the_script_refuses_it() -> None:
    result = CliRunner().invoke(app, ["plan", str(QUICKSTART), "-n", "2", "--htm", "x"])
    assert result.exit_code == 1
    assert "--htm was passed on to the script. Did you mean '--html'?" in result.output


def test_figures_given_where_a_plan_is_wanted(tmp_path: Path) -> None:
    script = tmp_path / "tiny.py"
    script.write_text(TINY)
    figures = tmp_path / "figures.json"
    made = CliRunner().invoke(app, ["plan", str(script), "-n", "2", "--json", str(figures)])
    assert made.exit_code == 0, made.output
    result = CliRunner().invoke(app, ["show", str(figures)])
    assert result.exit_code == 2
    assert "holds the figures of `--json`. Try: the file of `whale plan --save`" in result.output


SILENT = (
    TINY.replace(
        "batches = [torch.randn(9, 6) for _ in range(3)]", "batches = [torch.randn(9, 6)] * 8"
    )
    .replace('print("loss", repr(loss), flush=True)', "pass")
    .replace('"num_micro_batch": 2', '"num_micro_batch": 2, "num_steps": 8')
)


@pytest.mark.slow
def test_progress_of_a_silent_script(tmp_path: Path) -> None:
    for text, is_silent in ((SILENT, True), (TINY, False)):
        script = tmp_path / "script.py"
        script.write_text(text)
        done = subprocess.run(
            [str(BIN / "whale"), "run", "-n", "2", str(script)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        assert ("step 8/8  loss" in done.stdout and "left" in done.stdout) == is_silent
    shown = CliRunner().invoke(app, ["top", "--once", str(tmp_path / "runs" / "script")])
    assert "finished, step 2" in shown.output
