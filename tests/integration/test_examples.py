"""Every example runs as its first lines say, with small settings: quickstart, the M6 demo, LoRA
from safetensors, two hosts.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_model

from tests.pages import difference
from whale.checkpoint import Reader

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
BIN = Path(sys.executable).parent
TIMEOUT_S = 230.0
"""of one job on a busy machine"""
NOT_OF_THE_SCRIPT = (
    "whale: ",
    "capturing ",
    "[W",
    "W1",
    "E1",
    "Loading",
    "Writing",
    "[transformers]",
)
"""beginnings of lines that whale, torch or transformers write beside the script"""
FLOAT32 = 1e-4
"""largest relative difference of losses, printed with 6 digits, between plans"""

pytestmark = pytest.mark.timeout(500)


def start(folder: Path, *words: str | Path, **variables: str) -> subprocess.Popen[str]:
    """A command of this environment, in a group of its own."""
    paths = os.pathsep.join((str(BIN), os.environ["PATH"]))
    environment = (
        os.environ
        | {"PATH": paths, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        | variables
    )
    return subprocess.Popen(
        list(map(str, words)),
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """What it printed; it must end well."""
    try:
        printed, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate()
        pytest.fail(f"not done within {TIMEOUT_S:.0f} s\n{printed[-3000:]}")
    assert process.returncode == 0, printed[-3000:]
    return printed


def run(folder: Path, *words: str | Path) -> str:
    return finish(start(folder, *words))


def losses(printed: str) -> list[float]:
    """The losses that the lines of progress show."""
    return [
        float(text) for text in re.findall(r"^step +\d+.* loss (\d+\.\d+)", printed, re.MULTILINE)
    ]


def check_head(script: Path, printed: str) -> None:
    """The lines under "prints" at the head of an example are those that it prints, and the last loss
    of a step there is that of the run. Words only where the run has other settings: `check_words`.
    """
    lines = check_words(script, printed)
    last = losses("\n".join(lines))
    assert last and losses(printed)[-1] == pytest.approx(last[-1], rel=0.02, abs=2e-3)


def check_words(script: Path, printed: str) -> list[str]:
    """The lines at the head of an example; they are those that it prints, up to numbers."""
    head = script.read_text().partition('"""\n\nfrom __future__')[0]
    _, found, expected = head.partition("prints")
    assert found, f"{script.name} does not say what it prints"
    lines = [line[4:] for line in expected.splitlines() if line.startswith("    ")]
    assert lines
    shown = [line for line in printed.splitlines() if not line.startswith(NOT_OF_THE_SCRIPT)]
    complaint = difference(tuple(lines), "\n".join(shown))
    assert not complaint, complaint
    return lines


# ---- quickstart, on one host and on two

QUICK = ("--steps", "11", "--batch", "32")


@pytest.fixture(scope="module")
def quickstart_alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run(tmp_path_factory.mktemp("alone"), "python", EXAMPLES / "quickstart.py", *QUICK)


def check_quickstart(printed: str, alone: str, num_replicas: int = 2) -> None:
    """The same losses in one process and in 2 stages."""
    replicas = "1 model replica" if num_replicas == 1 else f"{num_replicas} model replicas"
    assert f"2 stages x {replicas}, batch 32 in 4 micro-batches" in printed
    assert "1 stage" in alone
    check_words(EXAMPLES / "quickstart.py", printed)
    assert len(losses(printed)) == 3  # steps 1, 10, 11
    assert losses(printed) == pytest.approx(losses(alone), rel=FLOAT32)
    seen = [
        re.search(r"never seen: ([\d.]+)% right, loss ([\d.]+)", text) for text in (printed, alone)
    ]
    assert seen[0] is not None and seen[1] is not None
    assert float(seen[0][2]) == pytest.approx(float(seen[1][2]), rel=FLOAT32)


@pytest.mark.slow  # two hosts run the same program
def test_quickstart(quickstart_alone: str, tmp_path: Path) -> None:
    check_quickstart(
        run(tmp_path, "whale", "run", "-n", "4", EXAMPLES / "quickstart.py", *QUICK),
        quickstart_alone,
    )


@pytest.mark.parametrize("first_has", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_quickstart_on_two_hosts(quickstart_alone: str, tmp_path: Path, first_has: int) -> None:
    """Both hosts are this one here, in networks of their own in test_hosts.py."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    words = ("bash", EXAMPLES / "two_hosts.sh")
    script = (EXAMPLES / "quickstart.py", *QUICK)
    second = start(tmp_path, *words, "1", "1", "127.0.0.1", *script, PORT=port)
    first = start(tmp_path, *words, "0", str(first_has), "127.0.0.1", *script, PORT=port)
    printed = finish(first)
    assert losses(finish(second)) == [], "rank 0 is on host 0, and it alone prints"
    check_quickstart(printed, quickstart_alone, num_replicas=(first_has + 1) // 2)


# ---- the demo

SMALL = (
    "--steps",
    "6",
    "--batch",
    "8",
    "--save-every",
    "3",
    "--warmup",
    "2",
    "--every",
    "1",
    "--folder",
    "m6",
)


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    with Reader(checkpoint) as reader:
        return {name: reader.read(name) for name in reader.names("model/")}


def test_the_demo_and_how_it_resumes(tmp_path: Path) -> None:
    """4 ranks, 6 steps; then the end is lost, and one process continues from step 3 to the same
    weights.
    """
    printed = run(tmp_path, "whale", "run", "-n", "4", EXAMPLES / "train_m6.py", *SMALL)
    check_words(EXAMPLES / "train_m6.py", printed)
    assert "2 stages x 2 model replicas" in printed
    assert re.search(r"step 6/6  loss [\d.]+  \d+ samples/s  bubble \d+%  0 s left", printed)
    assert re.search(r"captions right +│ +[\d.]+% of the held-out drawings", printed)
    assert all(f"time of rank {rank}, stage {rank % 2}" in printed for rank in range(4))
    folder = tmp_path / "m6"
    last = folder / "checkpoints" / "step_00000006"
    for path in (
        last,
        folder / "metrics" / "rank_00003.jsonl",
        folder / "trace.json",
        folder / "plan.json",
    ):
        assert path.exists() and str(path.relative_to(tmp_path).parts[1]) in printed
    assert {
        event["tid"] for event in json.loads((folder / "trace.json").read_text())["traceEvents"]
    } >= set(range(4))
    expected = weights(last)
    shutil.rmtree(last)
    again = run(tmp_path, "python", EXAMPLES / "train_m6.py", *SMALL)
    assert "continuing from step 3; remove m6 to start anew" in again
    assert losses(again) == pytest.approx(losses(printed)[3:], rel=1e-3)  # printed with 4 digits
    found = weights(last)
    assert found.keys() == expected.keys()
    largest = max(tensor.abs().max() for tensor in expected.values())
    # Adam divides by small numbers in the first steps: rounding shows more than in the losses
    assert max((found[name] - expected[name]).abs().max() for name in found) < 1e-3 * largest


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_demo_learns_the_same_on_1_and_4_ranks(tmp_path: Path) -> None:
    """The main job whole. At least 90 % of the captions right; seeds differ by some percent, rank
    counts by no more.
    """
    found = {}
    for name, words in {"one": ("python",), "four": ("whale", "run", "-n", "4")}.items():
        process = start(tmp_path, *words, EXAMPLES / "train_m6.py", "--folder", name)
        printed, _ = process.communicate(timeout=700)
        assert process.returncode == 0, printed[-3000:]
        match = re.search(r"captions right +│ +([\d.]+)%", printed)
        assert match is not None, printed[-3000:]
        found[name] = float(match[1])
    print(f"captions right: {found}")
    assert min(found.values()) >= 90.0
    assert abs(found["one"] - found["four"]) <= 5.0


# ---- examples that stand alone


@pytest.mark.slow
def test_mixed_gpus(tmp_path: Path) -> None:
    """Trains on CPU ranks like one process, with the losses at the head of the file; the large model
    is planned onto the GPUs of its cluster file.
    """
    script = EXAMPLES / "mixed_gpus.py"
    alone = losses(run(tmp_path, "python", script))
    printed = run(tmp_path, "whale", "run", "-n", "4", script)
    assert losses(printed) == pytest.approx(alone, rel=FLOAT32)
    head = script.read_text().partition('"""\n\nfrom')[0]
    assert all(line in head for line in (f"loss {alone[0]:.4f}", f"loss {alone[-1]:.4f}"))
    cluster = EXAMPLES / "mixed_gpus.yaml"
    planned = run(tmp_path, "whale", "plan", "--cluster", cluster, script, "--large")
    assert "7 devices (2 x RTX-3090, 1 x RTX-4090, 4 x V100-16GB)" in planned
    match = re.search(r"Predicted step ([\d.]+) s", planned)
    assert match is not None and float(match[1]) <= 2.2  # data parallelism does not fit at all


@pytest.mark.slow
def test_pretraining_on_a_text_continues_on_other_ranks(tmp_path: Path) -> None:
    """And on the text beside it, without arguments, it prints what is at its head."""
    text = EXAMPLES / "whales.txt"
    script = EXAMPLES / "pretrain_text.py"
    alone = run(tmp_path, "python", script, "--steps", "60", "--folder", "one")
    head = losses(script.read_text().partition('"""\n\nfrom')[0].replace("    step", "step"))
    assert losses(alone)[:2] == pytest.approx(head[:2], rel=FLOAT32)
    run(tmp_path, "whale", "run", "-n", "2", script, text, "--steps", "40", "--folder", "two")
    again = run(tmp_path, "python", script, text, "--steps", "60", "--folder", "two")
    assert "continuing from step 40; remove two to start anew" in again
    assert losses(again)[-1] == pytest.approx(losses(alone)[-1], abs=1e-3)  # printed: 4 digits
    assert "the model writes: 'T" in again


@pytest.mark.slow
def test_resnet_with_a_split_classifier(tmp_path: Path) -> None:
    """Batch norm and loss over all ranks: the losses of one process. The large one is planned."""
    script = EXAMPLES / "resnet_classifier.py"
    alone = losses(run(tmp_path, "python", script))
    printed = run(tmp_path, "whale", "run", "-n", "4", script)
    assert losses(printed) == pytest.approx(alone, abs=2e-3)  # printed with 4 digits
    check_head(script, printed)
    cluster = EXAMPLES / "resnet_classifier.yaml"
    planned = run(tmp_path, "whale", "plan", "--cluster", cluster, script, "--large")
    assert "4 devices (2 x RTX-3090, 2 x V100-16GB)" in planned
    assert re.search(r"classifier: linear .* column-parallel", planned)


@pytest.mark.slow
def test_a_run_resumes_on_other_devices(tmp_path: Path) -> None:
    """4 ranks, then 2, then 1, under three plans: the losses of a run that was never interrupted."""
    script = EXAMPLES / "resume_elsewhere.py"
    whole = losses(run(tmp_path, "python", script, "--folder", "never_interrupted"))
    assert len(whole) == 12
    first = run(tmp_path, "whale", "run", "-n", "4", script, "--until", "6")
    second = run(tmp_path, "whale", "run", "-n", "2", script, "--until", "9")
    third = run(tmp_path, "python", script)
    assert "continuing from step 6 on 2 devices" in second
    found = [losses(first), losses(second), losses(third)]
    assert [len(each) for each in found] == [6, 3, 3]
    assert [*found[0], *found[1], *found[2]] == pytest.approx(
        whole, abs=2e-4
    )  # printed with 4 digits
    check_head(script, third)


@pytest.mark.slow
def test_the_notebook_shows_plan_and_timeline(tmp_path: Path) -> None:
    """Executed by a real kernel, cell by cell, as Jupyter does it."""
    nbclient = pytest.importorskip("nbclient", reason="make setup-integrations installs it")
    nbformat = pytest.importorskip("nbformat")
    for name in ("plan.ipynb", "mixed_gpus.yaml"):
        shutil.copyfile(EXAMPLES / name, tmp_path / name)
    notebook = nbformat.read(tmp_path / "plan.ipynb", as_version=4)
    nbformat.validate(notebook)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=200, resources=resources).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shown = ["".join(output.get("text", "") for output in cell.outputs) for cell in cells]
    pages = [
        "".join(output["data"].get("text/html", "") for output in cell.outputs if "data" in output)
        for cell in cells
    ]
    assert re.search(r"predicted: \d+ samples/s, a step of \d+ ms", shown[0])
    assert pages[1].startswith("<iframe") and "RTX-4090" in pages[1]
    assert float(re.search(r"above is ([\d.]+) times", shown[2])[1]) >= 1.0  # type: ignore[index]
    assert pages[3].count("<svg") == 2
    trained = json.loads(shown[4])
    assert len(trained) == 3 and trained[-1] < trained[0]


# ---- LoRA


@pytest.mark.slow
def test_lora_on_emulated_gpus(tmp_path: Path) -> None:
    """As the site's first page does it: two RTX 3090, an RTX 4090 and four V100 train the losses of
    one process, digit by digit up to the rounding of float32.
    """
    script = EXAMPLES / "finetune_lora.py"
    alone = run(tmp_path, "python", script)
    check_head(script, alone)
    cluster = EXAMPLES / "mixed_gpus.yaml"
    words = ("whale", "run", "--emulate", cluster, "--stretch", "100", script)
    process = start(tmp_path, *words)
    printed, _ = process.communicate(timeout=TIMEOUT_S)
    # on a busy machine times are off, and whale says so; losses are not
    assert process.returncode == 0 or "INVALID: " in printed, printed[-3000:]
    assert losses(printed) == pytest.approx(losses(alone), rel=FLOAT32)


@pytest.mark.slow
def test_lora_from_safetensors(tmp_path: Path) -> None:
    """Weights in several files, as Hugging Face writes them. Before the first update the loss is
    that of the pretrained model itself.
    """
    sys.path.insert(0, str(EXAMPLES))
    try:
        import finetune_lora
    finally:
        sys.path.remove(str(EXAMPLES))
    torch.manual_seed(4)
    pretrained = transformers.GPT2LMHeadModel(finetune_lora.config())
    pretrained.save_pretrained(tmp_path / "weights", max_shard_size="100KB")
    assert len(list((tmp_path / "weights").glob("*.safetensors"))) > 2
    words = (EXAMPLES / "finetune_lora.py", "--weights", tmp_path / "weights", "--steps", "11")
    alone = losses(run(tmp_path, "python", *words))
    printed = run(tmp_path, "whale", "run", "-n", "2", *words)
    assert losses(printed) == pytest.approx(alone, rel=FLOAT32)
    with torch.no_grad():
        first = pretrained(**finetune_lora.batches(1)[0]).loss.item()
    assert alone[0] == pytest.approx(first, rel=FLOAT32)
    assert alone[-1] < alone[0]
    model = finetune_lora.build()
    load_model(model, tmp_path / "runs/finetune_lora/model.safetensors", strict=True)
    trained = dict(model.named_parameters())
    for name, tensor in pretrained.named_parameters():
        mine = trained[name.replace("c_attn.", "c_attn.base.")]
        assert torch.equal(mine, tensor), f"{name} is frozen"
    assert any(bool(tensor.any()) for name, tensor in trained.items() if name.endswith(".up"))


@pytest.mark.slow
def test_m6_moe_trains_on_8_ranks_like_on_one(tmp_path: Path) -> None:
    """Every rank has one expert of each layer; the loss falls, as in one process."""
    settings = ("--steps", "12", "--batch", "16", "--every", "1")
    sharded = run(tmp_path, "whale", "run", "-n", "8", EXAMPLES / "train_m6_moe.py", *settings)
    check_head(EXAMPLES / "train_m6_moe.py", sharded)
    local = run(tmp_path, "python", EXAMPLES / "train_m6_moe.py", *settings)
    assert (
        losses(sharded)[0] == pytest.approx(losses(local)[0], rel=FLOAT32)
        and losses(sharded)[-1] < 0.6 * losses(sharded)[0]
    )
    held, whole = (
        int(re.search(r"([\d,]+) numbers", printed)[1].replace(",", ""))
        for printed in (sharded, local)
    )  # type: ignore[index]
    assert held < whole / 2


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--quantize",)])
def test_lora_by_the_trainer(tmp_path: Path, options: tuple[str, ...]) -> None:
    """The same evaluation loss on 1 rank and on 2 stages; the adapter generates."""
    pytest.importorskip("peft")
    script = EXAMPLES / "finetune_trainer.py"
    losses = []
    for name, words in (("one", ("python",)), ("two", ("whale", "run", "-n", "2"))):
        printed = run(tmp_path, *words, script, "--steps", "8", "--out", name, *options)
        found = re.search(r"evaluation loss ([\d.]+)", printed)
        assert found is not None, printed
        losses.append(float(found[1]))
        files = {path.name for path in (tmp_path / name / "adapter").iterdir()}
        assert {"adapter_config.json", "adapter_model.safetensors"} <= files
        assert ("continues 5 6 7 with" in printed) == (not options)
        if name == "one" and not options:
            check_words(script, printed)
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)
    planned = run(tmp_path, "whale", "plan", "--cluster", EXAMPLES / "unlike_memories.yaml", script)
    assert "large-card" in planned and "small-card" in planned


@pytest.mark.slow
def test_evaluation_and_generation(tmp_path: Path) -> None:
    script = EXAMPLES / "generate.py"
    printed = [
        run(tmp_path, *words, script) for words in (("python",), ("whale", "run", "-n", "2"))
    ]
    lines = [
        [line for line in text.splitlines() if line.startswith(("trained to", "continues"))]
        for text in printed
    ]
    check_words(script, printed[0])
    assert len(lines[0]) == 2
    assert lines[0][1] == lines[1][1]
    first, second = (re.findall(r"[\d.]+", each[0]) for each in lines)
    assert list(map(float, first[:2])) == pytest.approx(list(map(float, second[:2])), abs=2e-3)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "runs" / "generate" / "model")
    assert isinstance(loaded, transformers.GPT2LMHeadModel)
