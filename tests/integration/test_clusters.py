"""Cluster files and running ranks: who gets which device, refusals on every rank, and uneven plans
that train like local PyTorch.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import whale as wh
from tests.exactness import local_training, mean_square
from tests.ranks import preload, run_ranks
from whale.cli import app
from whale.report.tables import samples_by_rank

preload("tests.integration.test_clusters")

ROOT = Path(__file__).parents[2]
TWO_HOSTS = "hosts: [{name: big1, kind: V100-32GB, count: 2}, {name: small1, kind: P100}]\n"


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 6)
    ).double()


def mini_batches(number: int = 3) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randn(10, 6, generator=random, dtype=torch.float64) for _ in range(number)]


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)  # type: ignore[arg-type]


def plain_losses() -> list[float]:
    return local_training(net(), mini_batches(), mean_square, sgd).losses


def run_as(hosts: list[str]) -> None:
    """This rank runs on `hosts[rank]`, as under one torchrun a host."""
    rank = int(os.environ["RANK"])
    os.environ["WHALE_HOST"] = hosts[rank]
    os.environ["LOCAL_RANK"] = str(hosts[:rank].count(hosts[rank]))


def devices_of_job(hosts: list[str], file: str) -> tuple[str, ...]:
    run_as(hosts)
    wh.init({"cluster": file})
    return wh.parallelize(
        net(), mini_batches()[0], optimizer=sgd, loss=mean_square
    ).plan.device_kinds


def message_of_job(hosts: list[str], file: str) -> str:
    with pytest.raises(ValueError) as error:
        devices_of_job(hosts, file)
    return str(error.value)


def test_ranks_get_the_devices_of_their_hosts(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(TWO_HOSTS)
    hosts = ["small1", "big1", "big1"]  # another order than in the file, unequal numbers
    assert (
        run_ranks(devices_of_job, 3, hosts, str(tmp_path / "cluster.yaml"))
        == [("P100", "V100-32GB", "V100-32GB")] * 3
    )


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        (
            ["big1", "big7"],
            "rank 1 runs on host 'big7', which is not in the cluster file (it has big1, small1). "
            "Did you mean 'big1'?",
        ),
        (
            ["small1", "small1"],
            "2 ranks (0, 1) run on host 'small1', which has 1 device in the cluster file",
        ),
    ],
)
def test_every_rank_refuses_with_the_same_words(
    hosts: list[str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "cluster.yaml").write_text(TWO_HOSTS)
    messages = run_ranks(message_of_job, 2, hosts, str(tmp_path / "cluster.yaml"))
    assert len(set(messages)) == 1 and message in messages[0]


def test_a_wrong_file_is_refused_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("hosts: [{name: big1, kind: V101}]")
    messages = run_ranks(message_of_job, 2, ["big1", "big1"], str(tmp_path / "cluster.yaml"))
    assert all("unknown device kind 'V101'" in message for message in messages)


def found_cluster() -> tuple[str, ...]:
    wh.init()
    return wh.parallelize(
        net(), mini_batches()[0], optimizer=sgd, loss=mean_square
    ).plan.device_kinds


def test_without_a_file_ranks_find_their_devices() -> None:
    assert run_ranks(found_cluster, 2) == [("CPU", "CPU")] * 2


UNEVEN = """
hosts: [{name: localhost, devices: [{kind: fast}, {kind: slow}]}]
kinds:
  fast: {tflop_per_s: 3, memory_gb: 4, gb_per_s: 30}
  slow: {tflop_per_s: 1, memory_gb: 4, gb_per_s: 10}
"""
NO_READING = UNEVEN.replace("gb_per_s: 30", "gb_per_s: 3000000").replace(
    "gb_per_s: 10", "gb_per_s: 1000000"
)
IDLE = UNEVEN.replace(
    "tflop_per_s: 1, memory_gb: 4, gb_per_s: 10", "tflop_per_s: 0.001, memory_gb: 4, gb_per_s: 0.01"
)


def train(
    file: str, config: dict[str, object], cuts: dict[str, int]
) -> tuple[list[float], list[list[int]], list[float]]:
    """(losses, samples of this rank in each micro-batch, outputs of an evaluation)"""
    wh.init({**config, "cluster": file})
    model = net()
    if cuts:
        wh.annotate(model, {glob: wh.replicate(count) for glob, count in cuts.items()})
    engine = wh.parallelize(model, mini_batches()[0], optimizer=sgd, loss=mean_square)
    losses = [engine.step(batch).loss for batch in mini_batches()]
    outputs = engine.evaluate(mini_batches()[0], outputs=True).outputs
    return (
        losses,
        [list(pair) for pair in engine.own_samples(10)],
        outputs.flatten().tolist() if outputs is not None else [],
    )


@pytest.mark.parametrize(
    ("cluster", "num_ranks", "config", "cuts", "shares"),
    [
        (
            UNEVEN,
            2,
            {"strategy": "data"},
            {},
            [9, 1],
        ),  # 3 times faster, and reading the weights takes the slow one as long as 2 samples
        (NO_READING, 2, {"strategy": "data"}, {}, [8, 2]),
        (NO_READING, 2, {"strategy": "data", "num_micro_batch": 2}, {}, [8, 2]),
        (UNEVEN, 2, {"num_micro_batch": 2}, {"0": 1, "2|4": 1}, [10, 10]),
        (IDLE, 2, {"strategy": "data"}, {}, [10, 0]),
        (IDLE, 2, {"strategy": "data", "num_micro_batch": 5}, {}, [10, 0]),
        (
            UNEVEN.replace("{kind: slow}", "{kind: slow}, {kind: slow}"),
            3,
            {"num_micro_batch": 2},
            {"0": 2, "2|4": 1},
            None,
        ),
        (
            IDLE.replace("{kind: slow}", "{kind: fast}, {kind: slow}"),
            3,
            {"num_micro_batch": 2},
            {"0": 1, "2|4": 2},
            None,
        ),
        (
            UNEVEN.replace("{kind: slow}", "{kind: slow}, {kind: slow}, {kind: fast}"),
            4,
            {"num_task_graph": 2},
            {},
            None,
        ),
    ],
    ids=[
        "DP",
        "DP by FLOP",
        "DP, 2 micro-batches",
        "2 stages",
        "idle",
        "idle, 5 micro-batches",
        "2 -> 1",
        "1 -> 2, one idle",
        "2 x DP 2",
    ],
)
def test_uneven_plans_train_like_local_pytorch(
    cluster: str,
    num_ranks: int,
    config: dict[str, object],
    cuts: dict[str, int],
    shares: list[int] | None,
    tmp_path: Path,
) -> None:
    (tmp_path / "cluster.yaml").write_text(cluster)
    results = run_ranks(train, num_ranks, str(tmp_path / "cluster.yaml"), config, cuts)
    if shares is not None:
        assert [sum(stop - start for start, stop in own) for _, own, _ in results] == shares
    for losses, _, _ in results:
        assert losses == pytest.approx(plain_losses(), rel=1e-12)
    model = trained_locally()
    assert results[0][2] == pytest.approx(model(mini_batches()[0]).flatten().tolist(), rel=1e-12)


def trained_locally() -> nn.Module:
    model = net()
    optimizer = sgd(model.parameters())
    for batch in mini_batches():
        optimizer.zero_grad()
        mean_square(model(batch), batch).backward()
        optimizer.step()
    return model


SCRIPT = """
import os
from tests.integration.test_clusters import mean_square, mini_batches, net, sgd
import whale as wh

wh.init({"strategy": "data", "num_micro_batch": 2})
engine = wh.parallelize(net(), mini_batches()[0], optimizer=sgd, loss=mean_square)
for batch in mini_batches():
    loss = engine.step(batch).loss
    if os.environ.get("RANK", "0") == "0":
        print("loss", repr(loss), engine.plan.device_kinds, flush=True)
"""


def whale(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "whale", *words],
        capture_output=True,
        text=True,
        timeout=110,
        env=environment,
    )


def test_whale_plan_and_run_take_a_cluster_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    script = tmp_path / "train.py"
    file.write_text("hosts: [{name: localhost, devices: [{kind: V100-32GB}, {kind: P100}]}]")
    script.write_text(SCRIPT)
    planned = CliRunner().invoke(
        app, ["plan", str(script), "--cluster", str(file), "--save", str(tmp_path / "plan.json")]
    )
    assert planned.exit_code == 0, planned.output
    assert "1 x V100-32GB, 1 x P100" in planned.stdout
    shares = [sum(each) for each in samples_by_rank(wh.Plan.load(tmp_path / "plan.json"))]
    assert sum(shares) == 10 and shares[0] > shares[1]
    done = whale("run", "--cluster", str(file), str(script))
    assert done.returncode == 0, done.stderr
    lines = [
        line.split(maxsplit=2) for line in done.stdout.splitlines() if line.startswith("loss ")
    ]
    assert [float(loss) for _, loss, _ in lines] == pytest.approx(plain_losses(), rel=1e-12)
    assert lines[0][2] == "('V100-32GB', 'P100')"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "-n", "3"], "gives this host 2 devices; ask for at most 2"),
        (["plan", "-n", "3"], "the cluster has 2 devices, 3 were asked for"),
    ],
)
def test_more_ranks_than_devices_are_refused_before_anything_starts(
    words: list[str], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "cluster.yaml"
    script = tmp_path / "train.py"
    file.write_text("hosts: [{name: localhost, kind: T4, count: 2}]")
    script.write_text("raise SystemExit('the script ran')")
    done = CliRunner().invoke(app, [*words, "--cluster", str(file), str(script)])
    assert done.exit_code == 2 and message in done.output and "the script ran" not in done.output


def train_from_loader(file: str) -> list[float]:
    """Each rank loads its own samples only: the idle one loads nothing."""
    wh.init({"cluster": file})
    samples = torch.cat(mini_batches())
    engine = wh.parallelize(net(), mini_batches()[0], optimizer=sgd, loss=mean_square)
    return [
        engine.step(batch).loss
        for batch in engine.loader(list(samples), batch_size=10, shuffle=False)
    ]


@pytest.mark.parametrize("cluster", [UNEVEN, IDLE], ids=["uneven", "idle"])
def test_ranks_load_what_their_share_needs(cluster: str, tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(cluster)
    for losses in run_ranks(train_from_loader, 2, str(tmp_path / "cluster.yaml")):
        assert losses == pytest.approx(plain_losses(), rel=1e-12)


TIGHT = """
hosts: [{name: localhost, devices: [{kind: a}, {kind: b}]}]
kinds:
  a: {tflop_per_s: 0.03, memory_gb: 0.009, gb_per_s: 10}
  b: {tflop_per_s: 0.03, memory_gb: 0.007, gb_per_s: 10}
"""


def warnings_of_larger_batches(file: str) -> tuple[list[str], list[int]]:
    """(what rank 0 says about steps of 16, 8, 128, and again 128 samples; how many samples of a
    micro-batch fit into the memory of each rank)
    """
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("whale").addHandler(handler)
    wh.init({"cluster": file, "recompute": False, "check_capture": False})
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    engine = wh.parallelize(model, torch.ones(16, 64, 256), optimizer=sgd, loss=mean_square)
    for size in (16, 8, 128, 128):
        engine.step(torch.ones(size, 64, 256))
    return [message for message in messages if "may not fit" in message], [
        load.most for load in engine.plan.loads
    ]


def test_a_larger_batch_than_planned_is_warned_of_once(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(TIGHT)
    (said, most), (silent, _) = run_ranks(
        warnings_of_larger_batches, 2, str(tmp_path / "cluster.yaml")
    )
    assert 0 < sum(most) < 128 and len(said) == 1 and not silent
    assert "a mini-batch of 128 samples may not fit: 2 of 2 devices" in said[0]
    assert f"memory for {most[0]}); planned were 16" in said[0]
