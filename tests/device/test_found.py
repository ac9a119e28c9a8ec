"""What was found wrong on accelerators by reading (issue 15, part 3), each as a test that failed
before it was mended. The row of the issue's table stands in each test.
"""

from __future__ import annotations

import pytest

from tests.device.local_device import use_test_device
from tests.device.memory import NAME
from tests.integration.training import prepare_subject
from tests.ranks import preload, run_ranks
from whale.planning.planner import fingerprint

preload("tests.integration.training", "tests.device.test_found")


# ---- row 1: devices in captured graphs


def _fingerprints(name: str) -> tuple[str, str]:
    """Of a model captured for the CPU and for the test device."""
    use_test_device()
    found = []
    for device in ("cpu", NAME):
        prepared = prepare_subject(name, device, check=False).prepared
        assert prepared is not None
        found.append(fingerprint(prepared.captured))
    return found[0], found[1]


@pytest.mark.parametrize("name", ["gpt2", "tied"])
def test_a_plan_made_on_the_cpu_fits_on_the_device(name: str) -> None:
    """Row 1: GPT-2 makes its positions on the device of its input."""
    ((on_cpu, on_device),) = run_ranks(_fingerprints, 1, name)
    assert on_cpu == on_device
