"""Settings of all tests: one thread for each process, no network, property tests without a time limit per example."""

from __future__ import annotations

import os
import sys

for name, value in {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}.items():
    os.environ.setdefault(name, value)  # before torch and transformers are imported

import hypothesis
import pytest
import torch

from tests import ranks

torch.set_num_threads(1)

# the machine of a test run is shared: a slow example is no failure, and the same examples come every time
hypothesis.settings.register_profile("whale", deadline=None, derandomize=True, max_examples=100)
hypothesis.settings.load_profile("whale")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers the tests of a file stay together, since they share captured models; those of the exactness table by model."""
    for item in items:
        call = getattr(item, "callspec", None)
        subject = call.params.get("subject", "") if call is not None else ""
        item.add_marker(pytest.mark.xdist_group(f"{item.path.name} {subject}"))
        few = getattr(call.params.get("plan"), "only_for", ()) if call is not None else ()
        if few and subject not in few:  # others show the same under this plan
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Tests on Hugging Face models: their servers fork from a process that has transformers imported already (4 s each otherwise)."""
    if "tests.zoo" in sys.modules:
        ranks.preload("transformers.modeling_utils")


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Every test starts from the same seed, whatever ran before."""
    torch.manual_seed(0)
