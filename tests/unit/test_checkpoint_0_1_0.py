"""A checkpoint that Whale 0.1.0 wrote on two ranks loads here, and training continues as it did
there: `tests/data/make_checkpoint.py` made it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import whale as wh
from tests.data.make_checkpoint import (
    CONFIG,
    NUM_STEPS,
    endless,
    make_engine,
    make_loader,
    random_numbers,
)
from whale.checkpoint import Reader

SAVED = Path(__file__).parent.parent / "data" / "checkpoint_0_1_0"
EXPECTED: dict[str, Any] = json.loads((SAVED / "expected.json").read_text())
TOLERANCE = 1e-10
"""of the largest value, in float64: two ranks add in another order than one"""


def check_weights(state: dict[str, torch.Tensor], expected: dict[str, Any]) -> None:
    assert set(state) == set(expected)
    for name, tensor in state.items():
        wanted = torch.tensor(expected[name], dtype=torch.float64)
        torch.testing.assert_close(tensor, wanted, rtol=0, atol=TOLERANCE, msg=name)


def test_weights_optimizer_scheduler_random_state_and_data_position() -> None:
    wh.init(wh.Config(CONFIG))
    engine = make_engine()
    loader = make_loader(engine)
    assert engine.load(SAVED, data=loader) == NUM_STEPS == engine.step_count
    assert random_numbers() == EXPECTED["random"]
    assert loader.state_dict() == EXPECTED["data"]
    check_weights(engine.full_state_dict(), EXPECTED["weights"])
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    assert rates == pytest.approx(EXPECTED["learning_rates"], rel=1e-12)
    assert all(state["step"] == NUM_STEPS for state in engine.optimizer.state.values())
    # the steps after it need the averages of AdamW, the schedule of the learning rate and the order
    # of the samples
    steps = endless(loader)
    losses = [engine.step(next(steps)).loss for _ in EXPECTED["losses_after"]]
    assert losses == pytest.approx(EXPECTED["losses_after"], rel=TOLERANCE)
    check_weights(engine.full_state_dict(), EXPECTED["weights_after"])


def test_it_was_written_by_two_ranks_in_parts() -> None:
    with Reader(SAVED) as reader:
        assert set(reader.index.files) == {"rank_00000.safetensors", "rank_00001.safetensors"}
        assert len(reader.index.tensors["model/up.weight"].pieces) == 2
        whole = reader.read("model/up.weight")
    assert whole.tolist() == EXPECTED["weights"]["up.weight"]
