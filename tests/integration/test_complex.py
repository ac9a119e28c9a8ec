"""Complex values train like real ones: over gloo and through memory, in a backward of two parts,
recomputed, clipped, and from one checkpoint to another plan.

The exactness table (`tests/zoo.py`, "complex") and `test_split.py` hold the plans themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale as wh
from tests.exactness import EXACT_FLOAT32, EXACT_FLOAT64, Trace, compare, local_training
from tests.integration.table import PlanCase
from tests.integration.training import (
    Subject,
    batches,
    make_optimizer,
    merge,
    prepare_subject,
    train_locally,
    train_on_rank,
)
from tests.ranks import ModelServer, preload, run_ranks
from tests.zoo import CASES

preload("tests.integration.test_complex")


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer(prepare_subject, "complex") as made:
        yield made


GLOO = {"share_memory": False}
PLANS = (
    PlanCase("DP 2 over gloo", 2, GLOO),
    PlanCase("2 stages over gloo", 2, {**GLOO, "num_micro_batch": 2}, (1, 1)),
    PlanCase("2 stages, zero-bubble", 2, {"num_micro_batch": 4, "schedule": "zero-bubble"}, (1, 1)),
    PlanCase("2 stages, recomputed", 2, {"num_micro_batch": 2, "recompute": True}, (1, 1)),
)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_trains_like_local(server: ModelServer, plan: PlanCase) -> None:
    reference = server.run_local(train_locally, plan)
    traces = server.run(train_on_rank, plan.num_ranks, plan)
    compare(reference, merge(traces, CASES["complex"].build()))


# ---- checkpoints and clipping


def save_and_load(subject: Subject, plan: PlanCase, folder: Path, loads: bool) -> Any:
    """Two steps and a save, or a load; then two steps: (losses, state, gradient norm)."""
    wh.init(wh.Config({"clip_grad_norm": 0.1, **plan.config}))
    globs = subject.case.cuts(len(plan.stages)) if plan.stages else []
    wh.annotate(subject.model, {"|".join(glob): wh.replicate(1) for glob in globs})
    data = batches(subject.case, False, 4)
    engine = wh.parallelize(
        subject.model, data[0], optimizer=adamw, prepared=subject.prepared, loss=subject.case.loss
    )
    if loads:
        assert engine.load(folder) == 2
    else:
        for batch in data[:2]:
            engine.step(batch)
        engine.save(folder).wait()
    results = [engine.step(batch) for batch in data[2:]]
    return [result.loss for result in results], engine.full_state_dict(), results[-1].grad_norm


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def test_a_checkpoint_of_two_stages_continues_on_one_device(
    server: ModelServer, tmp_path: Path
) -> None:
    """Complex parameters, buffers and AdamW's complex state, with clipped gradients."""
    plan = PlanCase("2 stages", 2, {"num_micro_batch": 2}, (1, 1))
    losses, state, norm = server.run(save_and_load, 2, plan, tmp_path, False)[0]
    again = server.run(save_and_load, 1, PlanCase("1 rank", 1), tmp_path, True)[0]
    assert again[0] == pytest.approx(losses, abs=1e-12)
    assert again[2] == pytest.approx(norm, abs=1e-12)
    assert {name: tensor.dtype for name, tensor in again[1].items()} == {
        name: tensor.dtype for name, tensor in CASES["complex"].build().state_dict().items()
    }
    for name, tensor in state.items():
        assert float((tensor - again[1][name]).abs().max()) < 1e-10, name
    local = clipped_locally(4)
    assert norm == pytest.approx(local[1], abs=1e-10)
    for name, tensor in state.items():
        assert float((tensor - local[0][name]).abs().max()) < 1e-8, name


def clipped_locally(num_steps: int) -> tuple[dict[str, Tensor], float]:
    case = CASES["complex"]
    model = case.build()
    optimizer = adamw([parameter for parameter in model.parameters() if parameter.requires_grad])
    norm = 0.0
    for vectors, labels in batches(case, False, num_steps):
        optimizer.zero_grad()
        model(vectors, labels).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
    return model.state_dict(), norm


# ---- every type


class Small(nn.Module):
    """The model of the report: `Linear -> fft -> abs -> Linear`, with a filter of one type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.filter = nn.Parameter(torch.randn(6).to(dtype))
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.fft(self.first(x)) * self.filter
        return F.softplus(self.last(spectrum.abs())).mean()


DTYPES = {
    torch.float16: (torch.float32, EXACT_FLOAT32),
    torch.bfloat16: (torch.float32, EXACT_FLOAT32),
    torch.float32: (torch.float32, EXACT_FLOAT32),
    torch.complex64: (torch.float32, EXACT_FLOAT32),
    torch.float64: (torch.float64, EXACT_FLOAT64),
    torch.complex128: (torch.float64, EXACT_FLOAT64),
}
"""type of the filter: the type of the layers, and how exact training is"""
ROUNDED = {torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""weights of these types are rounded once for each device's gradient"""


def small(dtype: torch.dtype) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    wide = DTYPES[dtype][0]
    model = Small(dtype)
    model.first.to(wide)
    model.last.to(wide)
    return model, [torch.randn(6, 6, dtype=wide) for _ in range(2)]


def train_small(dtype: torch.dtype, marks: dict[str, int], config: dict[str, Any]) -> Any:
    model, data = small(dtype)
    wh.init(wh.Config(config))
    wh.annotate(model, {glob: wh.replicate(count) for glob, count in marks.items()})
    engine = wh.parallelize(model, data[0], optimizer=make_optimizer)
    losses = [engine.step(data[0]).loss]
    gradients = engine.full_gradients()
    losses.append(engine.step(data[1]).loss)
    return losses, gradients, engine.full_state_dict()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("marks", [{}, {"first": 1, "last": 1}], ids=["DP 2", "2 stages"])
def test_every_type_trains_like_local(dtype: torch.dtype, marks: dict[str, int]) -> None:
    model, data = small(dtype)
    reference = local_training(model, data, None, make_optimizer)
    reference.buffers = None
    config = {"num_micro_batch": 2} if marks else {}
    losses, gradients, state = run_ranks(train_small, 2, dtype, marks, config)[0]
    compare(reference, Trace(losses, gradients, state), ROUNDED.get(dtype, DTYPES[dtype][1]))
