"""A job over two hosts with 2 + 1 devices: two network namespaces of this machine, joined by a
cable that can be cut.

Needs root and `ip` (iproute2); skipped with a message elsewhere. Started by examples/two_hosts.sh.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml

from tests.exactness import local_training, mean_square, three_layers

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
PORT = 29511  # in a network of its own, nobody else has it
START_S = 100.0
"""until the first step: five processes import torch on a busy machine"""
PROMISED_S = 30.0

SCRIPT = """
import json, os, sys, time
import torch
import whale as wh

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
wh.init({"num_micro_batch": 2, "timeout_s": 4.0})
model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6))
wh.annotate(model, {"0": wh.replicate(2), "2|4": wh.replicate(1)})
batches = [torch.randn(8, 6) for _ in range(3)]
engine = wh.parallelize(model, batches[0], optimizer=lambda p: torch.optim.SGD(p, lr=0.5), loss=lambda y, x: y.square().mean())
losses = [engine.step(batch).loss for batch in batches]
print(json.dumps({"rank": int(os.environ["RANK"]), "local_rank": int(os.environ["LOCAL_RANK"]), "losses": losses}), flush=True)
while "forever" in sys.argv:
    engine.step(batches[0])
    time.sleep(0.05)
"""


def plain_losses() -> list[float]:
    """The training of SCRIPT in plain PyTorch."""
    torch.manual_seed(0)
    model = three_layers()
    batches = [torch.randn(8, 6, dtype=torch.float64) for _ in range(3)]
    return local_training(
        model, batches, mean_square, lambda parameters: torch.optim.SGD(parameters, lr=0.5)
    ).losses


@dataclass
class Host:
    """A network namespace with one interface, `eth0`."""

    name: str
    address: str

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *words]

    def cut(self) -> None:
        run("ip", "-n", self.name, "link", "set", "eth0", "down")

    def processes(self) -> list[int]:
        listed = subprocess.run(
            ["ip", "netns", "pids", self.name], capture_output=True, text=True
        ).stdout
        return [int(word) for word in listed.split()]


def run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    if shutil.which("ip") is None:
        pytest.skip("no command `ip` here: install iproute2 to test several hosts")
    a, b = (
        Host(f"whale-{side}-{os.getpid()}", f"10.231.7.{number}")
        for number, side in enumerate("ab", 1)
    )
    try:
        try:
            for host in (a, b):
                run("ip", "netns", "add", host.name)
                run("ip", "-n", host.name, "link", "set", "lo", "up")
            run(
                "ip",
                "-n",
                a.name,
                "link",
                "add",
                "eth0",
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                b.name,
            )
            for host in (a, b):
                run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
                run("ip", "-n", host.name, "link", "set", "eth0", "up")
        except OSError as error:
            pytest.skip(f"network namespaces cannot be made here (needs root): {error}")
        yield a, b
    finally:
        for host in (a, b):
            for pid in host.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True)


@dataclass
class Side:
    """torchrun on one host."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def answers(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.output.splitlines() if line.startswith('{"rank"')]


def start(hosts: tuple[Host, Host], folder: Path, *arguments: str) -> tuple[Side, Side]:
    """2 devices on the first host, 1 on the second."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "PORT": str(PORT),
    }
    environment["PATH"] = os.pathsep.join((str(BIN), os.environ["PATH"]))
    sides = []
    for node_rank, (host, num_devices) in enumerate(zip(hosts, (2, 1), strict=True)):
        log = folder / f"host_{node_rank}.txt"
        words = [
            "bash",
            str(ROOT / "examples/two_hosts.sh"),
            str(node_rank),
            str(num_devices),
            hosts[0].address,
            str(script),
            *arguments,
        ]
        with log.open("wb") as output:
            process = subprocess.Popen(
                host.command(*words),
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        sides.append(Side(process, log))
    return sides[0], sides[1]


def wait_for(what: str, condition: object, sides: tuple[Side, Side], seconds: float) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(
                f"{what}: not within {seconds:.0f} "
                f"s\n{sides[0].output[-3000:]}\n---\n{sides[1].output[-3000:]}"
            )
        time.sleep(0.1)


def is_over(sides: tuple[Side, Side]) -> bool:
    return all(side.process.poll() is not None for side in sides)


def test_the_slurm_template_starts_every_host(tmp_path: Path) -> None:
    """Stand-ins for Slurm's commands start 2 hosts with 2 and 1 GPUs; the script gets its arguments
    as they were given.
    """
    stands = {
        "scontrol": 'printf "big1\\nsmall1\\n"',
        "srun": 'while [ "$1" != bash ]; do shift; done; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done',
        "nvidia-smi": "for _ in $(seq $((2 - SLURM_NODEID))); do echo GPU; done",
        "torchrun": 'printf "%s|" "$@"; echo',
    }
    for name, text in stands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "x",
        "SLURM_JOB_ID": "20007",
        "SLURM_NNODES": "2",
    }
    words = ["bash", str(ROOT / "deploy/slurm.sh"), "train.py", "--name", "two words"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = "--nnodes|2|--node-rank|{}|--nproc-per-node|{}|--rdzv-backend|static|--rdzv-endpoint|big1:20007|--rdzv-id|20007|"
    rest = "--max-restarts|0|--shutdown-timeout|5|train.py|--name|two words|"
    assert done.stdout.splitlines() == [expected.format(0, 2) + rest, expected.format(1, 1) + rest]


def test_the_kubernetes_template_is_whole() -> None:
    service, job = yaml.safe_load_all((ROOT / "deploy/kubernetes.yaml").read_text())
    pod = job["spec"]["template"]
    assert service["spec"]["selector"] == pod["metadata"]["labels"]
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    container = pod["spec"]["containers"][0]
    variables = {item["name"]: item["value"] for item in container["env"]}
    assert int(variables["NODES"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert (
        f"--master-addr {job['metadata']['name']}-0.{service['metadata']['name']} "
        in container["args"][0]
    )
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["spec"]["volumes"]
    }


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_and_one_devices_train_like_one(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    sides = start(hosts, tmp_path)
    wait_for("the end of the job", lambda: is_over(sides), sides, START_S)
    assert [side.process.returncode for side in sides] == [0, 0], sides[0].output + sides[1].output
    first = sides[0].answers()
    second = sides[1].answers()
    assert sorted((answer["rank"], answer["local_rank"]) for answer in first) == [(0, 0), (1, 1)]
    assert [(answer["rank"], answer["local_rank"]) for answer in second] == [(2, 0)]
    for answer in first + second:
        assert answer["losses"] == pytest.approx(plain_losses(), rel=1e-10)
    assert "whale:" not in sides[0].output + sides[1].output, "a normal end is silent"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cut_cable_ends_both_sides(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    sides = start(hosts, tmp_path, "forever")
    wait_for(
        "the first steps",
        lambda: len(sides[0].answers()) == 2 and sides[1].answers(),
        sides,
        START_S,
    )
    hosts[1].cut()
    cut_at = time.monotonic()
    wait_for(
        "the end of all ranks", lambda: is_over(sides), sides, 2 * PROMISED_S
    )  # torchrun itself may take longer than its ranks
    print(f"both torchruns ended {time.monotonic() - cut_at:.1f} s after the cut")
    assert all(side.process.returncode != 0 for side in sides)
    messages = [
        [line for line in side.output.splitlines() if line.startswith("whale: ")] for side in sides
    ]
    assert len(messages[0]) == len(messages[1]) == 1, messages
    assert re.match(
        r"whale: rank 2 has been silent for \d+ s: it hangs, is stopped or is cut off",
        messages[0][0],
    )
    assert "The others stood: rank" in messages[0][0]
    assert re.match(r"whale: rank 0 has been silent for \d+ s", messages[1][0])
    assert "The others stood: rank 2 at" in messages[1][0]
    assert "the network between the hosts" in messages[1][0]
    assert not hosts[0].processes() and not hosts[1].processes()
