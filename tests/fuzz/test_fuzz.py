"""Random models under random plans train like local PyTorch.

A refusal (ValueError) is an answer, too; another error or other numbers are a find, printed with
its seed and the model's source. `python -m tests.fuzz.running --start SEED --count 1` runs one seed
again. WHALE_FUZZ_SECONDS sets for how long the slow test looks (600), WHALE_FUZZ_SEED where it
starts.
"""

from __future__ import annotations

import os
import time

import pytest

from tests.fuzz.grammar import make_model
from tests.fuzz.plans import make_plan
from tests.fuzz.running import Tally, try_seed

BUDGET_S = float(os.environ.get("WHALE_FUZZ_SECONDS", "600"))
FIRST_SEED = int(os.environ.get("WHALE_FUZZ_SEED", "5000"))
MOST_REFUSED = 0.3
"""of all cases: more would mean that the grammar makes models that nobody writes"""


def test_a_seed_gives_the_same_model_and_plan_every_time() -> None:
    first = make_model(7)
    assert first == make_model(7) != make_model(8)
    assert make_plan(0, first) == make_plan(0, first)


@pytest.mark.parametrize("seed", [2001, 2006, 2010])
def test_random_models_train_like_local(seed: int) -> None:
    tally = Tally()
    try_seed(seed, tally, num_plans=2)
    assert not tally.finds, tally.finds[0]


@pytest.mark.slow
@pytest.mark.timeout(BUDGET_S + 300)
def test_many_random_models_train_like_local() -> None:
    tally = Tally()
    end = time.monotonic() + BUDGET_S
    seed = FIRST_SEED
    while time.monotonic() < end:
        try_seed(seed, tally)
        seed += 1
    print(f"seeds {FIRST_SEED} to {seed - 1}: {tally}")
    assert not tally.finds, f"{tally}\n" + "\n".join(tally.finds[:3])
    assert tally.refused.total() <= MOST_REFUSED * tally.num_cases, tally.refused.most_common(5)
