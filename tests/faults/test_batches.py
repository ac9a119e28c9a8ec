"""Ranks that are given batches of unlike shapes after the steps in which values are compared: named at once, not after a stall."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WHALE = Path(sys.executable).parent / "whale"
TIMEOUT_S = 110.0

SCRIPT = """
import os, sys
import torch
import whale as wh

torch.manual_seed(0)
how, rank = sys.argv[1], int(os.environ["RANK"])
wh.init({"num_micro_batch": 2})  # stall_timeout_s is half an hour
model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6))
if how != "data parallel":
    wh.annotate(model, {"0": wh.replicate(1), "2": wh.replicate(1)})
x = torch.randn(8, 4, 6)
engine = wh.parallelize(model, x, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), loss=lambda y, x: y.square().mean())
for step in range(4):
    engine.step(x)
longer = torch.randn(8, 5, 6)
if how == "known shapes":  # both are captured: no rank captures again when they differ
    engine.step(longer)
if how == "evaluation":
    engine.evaluate(longer if rank == 1 else x)
else:
    for _ in range(3):
        engine.step(longer if rank == 1 else x)
print("it went on", engine.step_count)
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "how", ["known shapes", *(pytest.param(how, marks=pytest.mark.slow) for how in ("data parallel", "stages", "evaluation"))]
)
def test_unlike_shapes_are_named(tmp_path: Path, how: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = [str(WHALE), "run", "-n", "2", str(script), how]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, cwd=tmp_path)
    try:
        printed, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"it hangs\n{process.communicate()[0][-3000:]}")
    assert process.returncode != 0, printed
    assert "rank 1 was given another batch than rank 0: the batch [8, 5, 6], rank 0 has the batch [8, 4, 6]" in printed
    assert "Every rank must be given the same whole mini-batch" in printed
