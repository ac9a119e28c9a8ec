"""`whale profile` on real ranks: it measures something true, and its file is read by everything
that takes a cluster.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import whale as wh
from tests.ranks import preload, run_ranks
from whale.calibration import operations, turns
from whale.calibration.measure import MeasuredDevice, _cluster, _pairs
from whale.cli import app
from whale.cli.profile_ranks import describe_cluster, profile_model, profile_ranks
from whale.cluster.cluster import Device, Link, device_kind
from whale.cluster.kinds import MatmulRate
from whale.cluster.layer_times import LayerTimes
from whale.cluster.matching import RankPlace

preload("tests.integration.test_profile")

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart.py"


def profile_on(hosts: list[str], path: str) -> wh.Cluster:
    turns.MOST_S, turns.STRETCH_S = 0.0, 0.01  # one pass: rough figures will do
    operations.WIDTHS = {False: (16, 128)}
    rank = int(os.environ["RANK"])
    os.environ["WHALE_HOST"] = hosts[rank]
    os.environ["LOCAL_RANK"] = str(hosts[:rank].count(hosts[rank]))
    return profile_ranks(Path(path), "cpu")


def test_two_ranks_write_a_file_that_plans_and_matches(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    found = run_ranks(profile_on, 2, ["here", "here"], str(path))
    assert found[0] == found[1]
    cluster = wh.Cluster.load(path)
    assert [(device.host, device.local_rank) for device in cluster.devices] == [
        ("here", 0),
        ("here", 1),
    ]
    for device in cluster.devices:
        kind = device.kind
        assert {(point.dtype, point.size) for point in kind.matmul_rates} >= {
            ("fp32", 64),
            ("fp32", 256),
            ("bf16", 64),
        }
        largest = [point.flop_per_s for point in kind.matmul_rates if point.dtype == "fp32"][-1]
        assert kind.flop_per_s == pytest.approx(largest, rel=1e-5)
        # any computer made in this century, and none to come soon: units are right
        assert 1e8 < kind.flop_per_s < 1e13 and 1e8 < kind.bytes_per_s < 1e13
        assert (
            2**26
            < kind.memory_bytes
            <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2
        )
    assert cluster.all_reduce is not None
    for link in (cluster.intra_host, cluster.all_reduce):
        assert 1e6 < link.bytes_per_s < 1e12 and 1e-8 < link.latency_s < 1
    done = CliRunner().invoke(app, ["plan", "--cluster", str(path), str(QUICKSTART)])
    assert done.exit_code == 0, done.output
    assert "2 devices (" in done.output and "CPU-measured" in done.output


SCRIPT = """
import torch, whale as wh

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(8, 32)
        self.down = torch.nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))

def loss(output, batch):
    return output.square().mean(dim=-1).mean()

model = torch.nn.Sequential(*(Block() for _ in range(3)))
wh.init({"num_micro_batch": 1})
wh.annotate(model, {"*": wh.split(2, grid=(1, 2, 1))})
wh.parallelize(model, torch.zeros(4, 8), loss=loss)
"""


def profile_model_on(hosts: list[str], path: str, script: str) -> LayerTimes:
    turns.MOST_S, turns.STRETCH_S = 0.0, 0.001
    rank = int(os.environ["RANK"])
    os.environ["WHALE_HOST"] = hosts[rank]
    os.environ["LOCAL_RANK"] = str(hosts[:rank].count(hosts[rank]))
    return profile_model(Path(path), "cpu", Path(script), [])


@pytest.mark.parametrize(
    ("hosts", "widths"),
    [
        (["here", "here"], [1, 2]),
        pytest.param(["a", "b"], [1], marks=pytest.mark.slow),
        pytest.param(["a", "b", "b"], [1, 2], marks=pytest.mark.slow),
    ],
    ids=["one host", "two hosts", "one of three is alone"],
)
def test_layers_of_a_model_are_timed_whole_and_split(
    tmp_path: Path, hosts: list[str], widths: list[int]
) -> None:
    """On ranks of one host each layer is split over two; the planner takes both."""
    path = tmp_path / "cluster.yaml"
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    devices = [
        Device(rank, host, hosts[:rank].count(host), device_kind("CPU"))
        for rank, host in enumerate(hosts)
    ]
    link = Link(1e9, 1e-5)
    wh.Cluster(tuple(devices), link, link).save(path)
    found = run_ranks(profile_model_on, len(hosts), hosts, str(path), str(script))
    assert all(times == found[0] for times in found)
    written = wh.Cluster.load(path).layer_times
    assert written is not None
    (layer,) = written.layers
    assert layer.modules == ("0", "1", "2")
    rows = [(point.width, point.samples) for point in layer.times]
    assert rows == [(width, samples) for width in widths for samples in (1, 2, 4)]
    assert all(point.forward_s > 0 and point.backward_s > 0 for point in layer.times)
    if len(hosts) == 2:
        done = CliRunner().invoke(app, ["plan", "--cluster", str(path), str(script)])
        assert done.exit_code == 0, done.output
        assert ("3 split over 2 devices" in " ".join(done.output.split())) == (2 in widths)


@pytest.mark.slow
def test_hosts_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    run_ranks(profile_on, 3, ["a", "b", "b"], str(path))
    cluster = wh.Cluster.load(path)
    assert [(device.host, device.local_rank) for device in cluster.devices] == [
        ("a", 0),
        ("b", 0),
        ("b", 1),
    ]
    assert "between hosts" in describe_cluster(cluster) and "inside a host" in describe_cluster(
        cluster
    )


@pytest.mark.slow
def test_the_command_starts_its_ranks(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    words = [
        sys.executable,
        "-m",
        "whale",
        "profile",
        "-n",
        "1",
        "-o",
        str(path),
        "--device",
        "cpu",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=110, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "pass 1 over" in done.stderr and f"written to {path}" in done.stdout
    assert wh.Cluster.load(path).num_devices == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-o", "no/such/folder.yaml"], "there is no folder"),
        (["-n", "0"], "at least 1 rank"),
        (["--device", "tpu"], "auto, cpu, cuda or xpu"),
    ],
)
def test_wrong_words_are_refused(words: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["profile", *words])
    assert done.exit_code == 2 and message in done.output


def test_nearly_equal_devices_are_one_kind() -> None:
    base = replace(device_kind("CPU"), matmul_rates=(MatmulRate("fp32", 64, 1e10),))
    fast = replace(
        base, flop_per_s=base.flop_per_s * 1.06, matmul_rates=(MatmulRate("fp32", 64, 2e10),)
    )
    slow = replace(base, flop_per_s=base.flop_per_s / 2)
    figures = [
        MeasuredDevice(RankPlace("h", place), kind) for place, kind in enumerate((base, fast, slow))
    ]
    cluster = _cluster(figures, Link(1e9, 1e-5), Link(1e9, 1e-5), None)
    names = [device.kind.name for device in cluster.devices]
    assert names == ["CPU-measured", "CPU-measured", "CPU-measured-2"]
    assert cluster.devices[0].kind.flop_per_s == pytest.approx(base.flop_per_s * 1.03)
    assert cluster.devices[0].kind.matmul_rates == (MatmulRate("fp32", 64, 1.5e10),)


def test_pairs_cover_every_host_and_stay_few() -> None:
    assert _pairs("aaaabbbbcccc") == [(0, 1), (4, 5), (8, 9), (0, 4), (4, 8)]
    assert _pairs("a") == []
