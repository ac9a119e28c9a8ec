"""`whale doctor`: facts of this host, and what is missing with its remedy."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from typer.testing import CliRunner

from whale import devices
from whale.cli import app
from whale.devices import CudaDevice, GpuProperties
from whale.devices.vendors import has_kernels
from whale.distributed import ranks
from whale.doctor import facts, gpu_check
from whale.doctor.facts import Fact, all_facts
from whale.doctor.rows import Outcome

GIB = 2**30


def _fact(found: list[Fact], name: str) -> Fact:
    (fact,) = [fact for fact in found if fact.name == name]
    return fact


def test_every_section_is_there() -> None:
    sections = {fact.section for fact in all_facts()}
    assert sections == {
        "software",
        "devices",
        "communication",
        "links",
        "memory",
        "compiler",
        "limits",
    }
    assert all(fact.advice for fact in all_facts() if fact.status != "ok")


def test_what_is_missing_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts.shutil, "which", lambda name: None)
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    monkeypatch.setattr(facts, "_version", lambda name: None)
    found = all_facts()
    assert _fact(found, "C++").status == "look"
    assert "Try: apt-get install g++" in _fact(found, "C++").advice
    assert _fact(found, "gloo").status == "missing"
    assert _fact(found, "torch").status == "missing"
    assert _fact(found, "transformers").status == "look"


def test_another_torch_than_the_tested_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _fact(all_facts(), "torch").status == "ok"
    monkeypatch.setattr(facts, "_version", lambda name: "2.15.0+cu130")
    fact = _fact(all_facts(), "torch")
    assert fact.status == "look"
    assert 'Try: pip install "torch==2.13.*"' in fact.advice


def test_little_shared_memory_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = facts.shutil._ntuple_diskusage(64 << 20, 0, 64 << 20)  # type: ignore[attr-defined]
    monkeypatch.setattr(facts.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(Path, "is_dir", lambda path: True)
    assert "--shm-size" in _fact(all_facts(), "/dev/shm").advice


class Gpu(CudaDevice):
    """Two GPUs that Whale's table does not know."""

    @staticmethod
    def count() -> int:
        return 2

    def free_memory_bytes(self) -> int:
        return 20 * GIB

    def gpu_properties(self) -> GpuProperties | None:
        return GpuProperties("Some GPU", 24 * GIB, (8, 9), 100)

    def reaches(self, other: int) -> bool:
        return other == 1


def test_accelerators_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "ACCELERATORS", [Gpu])
    found = all_facts()
    first = _fact(found, "cuda:0")
    assert first.value == "Some GPU, 25.8 GB, 21.5 GB free, 100 multiprocessors"
    assert "whale profile" in first.advice
    assert _fact(found, "cuda:0 reads memory of devices").value == "1"
    assert _fact(found, "cuda:1 reads memory of devices").value == "none"


CUDA_12_6 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]
CUDA_13_0 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((7, 0), CUDA_12_6, True),  # V100
        ((7, 0), CUDA_13_0, False),
        ((6, 0), CUDA_13_0, False),  # P100
        ((8, 9), CUDA_13_0, True),  # RTX 4090: kernels for 8.6 run on it
        ((12, 0), CUDA_12_6, False),  # RTX 5090
        ((12, 0), CUDA_13_0, True),
        ((12, 1), CUDA_13_0, True),
        ((13, 0), CUDA_13_0, True),  # compiled by the driver from compute_120
        ((9, 0), ["sm_90a"], True),
        ((9, 1), ["sm_90a"], False),  # of exactly 9.0 only
        ((8, 0), ["sm_86"], False),
        ((7, 0), ["a_new_name"], True),
    ],
)
def test_kernels_for_a_gpu(
    capability: tuple[int, int], architectures: list[str], runs: bool
) -> None:
    assert has_kernels(capability, architectures) is runs


def test_a_gpu_without_kernels_is_named_before_a_rank_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Volta(Gpu):
        def gpu_properties(self) -> GpuProperties | None:
            return GpuProperties("Tesla V100-SXM2-16GB", 16 * GIB, (7, 0), 80)

    monkeypatch.setattr(facts, "ACCELERATORS", [Volta])
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: CUDA_13_0)
    fact = _fact(all_facts(), "cuda:1 kernels")
    assert fact.status == "missing"
    assert "no kernels for compute capability 7.0 (Tesla V100-SXM2-16GB)" in fact.advice
    assert "Try: a build of torch 2.13 for CUDA 12.6" in fact.advice
    monkeypatch.setattr(ranks, "find_device", lambda name, local_rank: Volta(local_rank))
    with pytest.raises(ValueError, match=r"cuda:0 cannot be used: .* CUDA 12\.6"):
        ranks.Ranks()
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: CUDA_12_6)
    assert not [fact for fact in all_facts() if "kernels" in fact.name]


def test_without_accelerators_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    if devices.num_accelerators():
        pytest.skip("this host has some")
    fact = _fact(all_facts(), "accelerators")
    assert fact.status == "look"
    assert "Try:" in fact.advice


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "platform", lambda: "Linux-6.18.44-with-a-long-name")
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert "gloo" in result.output
    assert "…" not in result.output
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 1
    wrong = CliRunner().invoke(app, ["doctor", "--gpu", "-n", "0"])
    assert wrong.exit_code == 2


def test_a_host_without_gpus_is_reported(tmp_path: Path) -> None:
    """What `make gpu-check` does there: it fails, and says why; a report of CPU ranks would look
    like one of GPUs.
    """
    if devices.num_accelerators():
        pytest.skip("this host has some")
    report = tmp_path / "report.md"
    result = CliRunner().invoke(app, ["doctor", "--gpu", "-o", str(report)])
    assert result.exit_code == 1
    words = " ".join(result.output.split())
    assert "torch finds no accelerator on this host, so nothing was tried" in words
    assert "Try: a CUDA build of torch" in words
    assert not report.exists()


def test_a_report_of_cpu_ranks_says_so() -> None:
    outcomes = [Outcome("exactness", "1 micro-batch", True, "differs by 1e-16")]
    text = gpu_check.report([], outcomes, 2)
    assert ("No accelerator was tried" in text) == (not devices.num_accelerators())


def test_ranks_of_a_part_get_their_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "find_device", lambda: CudaDevice(0))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    with gpu_check._environment("one queue"):
        assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
        assert "CUBLAS_WORKSPACE_CONFIG" in os.environ
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    with gpu_check._environment("races"):
        assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


def test_a_runner_with_gpus_runs_the_check() -> None:
    """The CI job runs what a user runs, and keeps the report that the command writes."""
    root = Path(__file__).parents[2]
    job = yaml.safe_load((root / ".github/workflows/ci.yml").read_text())["jobs"]["gpu"]
    assert "self-hosted" in job["runs-on"]
    assert {"run": "make gpu-check"} in job["steps"]
    kept = job["steps"][-1]["with"]["path"]
    assert f"whale doctor --gpu -o {kept}" in (root / "Makefile").read_text()
