"""Runs Whale on ranks whose accelerator is the test device."""

from __future__ import annotations

from dataclasses import dataclass

from tests.device import streams
from tests.device.collectives import communicators
from tests.device.local_device import use_test_device
from tests.device.memory import NAME
from tests.device.streams import counters
from tests.integration.table import NUM_STEPS, PlanCase
from tests.integration.training import RankTrace, Subject, prepare_subject, train_on_rank


@dataclass(frozen=True)
class DeviceTrace:
    """What one rank saw, and what its device counted."""

    trace: RankTrace
    host_waits: dict[str, int]
    """by what was waited for and the line that asked"""
    num_launches: int
    communicator_sizes: list[int]
    """number of ranks in each communicator that this one is a member of"""


def prepare_on_device(name: str) -> Subject:
    """Runs in a model server: the model is captured for the device.

    Without the self-checks: autograd starts a thread for the device, after which nothing may fork.
    """
    use_test_device()
    return prepare_subject(name, NAME, check=False)


def check_on_device(subject: Subject) -> list[str]:
    """The notes of a capture with the self-checks, which run on the device."""
    checked = prepare_subject(subject.case.name, NAME)
    streams.synchronize()
    return checked.prepared.captured.notes  # type: ignore[union-attr]


def train_on_device(subject: Subject, plan: PlanCase, num_steps: int = NUM_STEPS) -> DeviceTrace:
    """One rank of the distributed run; raises what went wrong on its streams."""
    trace = train_on_rank(subject, plan, num_steps)
    host_waits = dict(counters.host_waits)
    sizes = [group.size() for group in communicators]
    num_launches = sum(counters.launches.values())
    streams.synchronize()  # raises races and early frees that nobody has noticed yet
    trace.gradients = {name: gradient.cpu() for name, gradient in trace.gradients.items()}
    return DeviceTrace(trace, host_waits, num_launches, sizes)
