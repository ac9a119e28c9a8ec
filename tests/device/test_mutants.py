"""Mistakes in the runtime that CPU ranks with gloo cannot show must be caught on the test device.

Each mutant breaks the runtime in one place, on every rank. It is caught by a race, an error of the
collectives, the numbers or the count of host waits; unbroken, the same job is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import Tensor

from tests.device.collectives import BACKEND
from tests.device.training import DeviceTrace, prepare_on_device, train_on_device
from tests.exactness import compare
from tests.integration.table import NUM_STEPS, PLANS, PlanCase
from tests.integration.training import Subject, merge, train_locally
from tests.ranks import ModelServer, RankError, preload
from tests.zoo import CASES
from whale.distributed import transport
from whale.runtime import actions, gradients

preload("tests.integration.training", "tests.device.training", "tests.device.test_mutants")

MODEL = "chain"
PLAN = next(plan for plan in PLANS if plan.name == "2 stages x DP 2")


# ---- the mutants, each changes classes of the process that it runs in


def nothing() -> None:
    """No mutant."""


def no_wait_for_a_message() -> None:
    """A received tensor is read before it has come."""

    def wait(self: transport.Transport, arrival: transport.Arrival) -> None:
        pass

    transport.Transport.wait = wait  # type: ignore[method-assign]


def no_wait_for_all_reduces() -> None:
    """The optimizer runs before gradients are summed."""

    def finish(self: gradients.GradientSynchroniser) -> None:
        pass

    gradients.GradientSynchroniser.finish = finish  # type: ignore[method-assign]


def a_tensor_let_go_too_early() -> None:
    """Nobody keeps a tensor until its message has left."""

    def issue(self: transport.Transport, tensor: Tensor, peer: int, tag: int) -> None:
        group, place = self._to[peer]
        work: Any = group.send([tensor], place, tag)
        work._tensors = ()

    transport.Transport._issue = issue  # type: ignore[method-assign]


def receives_in_another_order() -> None:
    """The first two receives of a step change places."""
    post_receives = actions.Pass.post_receives

    def post(self: actions.Pass, num_received: int = 0) -> None:
        if self.num_posted == 0 and len(self.receives) > 1:
            self.receives[1]._post(self)
            self.receives[0]._post(self)
            self.num_posted = 2
        post_receives(self, num_received)

    actions.Pass.post_receives = post  # type: ignore[method-assign]


def a_host_read_in_every_micro_batch() -> None:
    """A loss is looked at as soon as it is launched."""
    keep = actions.Forward._keep

    def keep_and_look(
        self: actions.Forward, state: actions.Pass, results: tuple[Tensor, ...]
    ) -> None:
        keep(self, state, results)
        if self.chunk.has_loss:
            results[self.num_results].item()

    actions.Forward._keep = keep_and_look  # type: ignore[method-assign]


def train_mutant(subject: Subject, plan: PlanCase, mutate: Callable[[], None]) -> DeviceTrace:
    """One rank with the mutant."""
    mutate()
    return train_on_device(subject, plan)


# ---- the tests


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer(prepare_on_device, MODEL) as found:
        yield found


def _train(server: ModelServer, mutate: Callable[[], None]) -> list[DeviceTrace]:
    return server.run(train_mutant, PLAN.num_ranks, PLAN, mutate, backend=BACKEND)


def _check(server: ModelServer, ranks: list[DeviceTrace]) -> None:
    """Raises unless the ranks trained as the CPU does."""
    reference = server.run_local(train_locally, PLAN)
    compare(reference, merge([rank.trace for rank in ranks], CASES[MODEL].build()))


@pytest.fixture(scope="module")
def unbroken(server: ModelServer) -> list[DeviceTrace]:
    return _train(server, nothing)


def test_without_a_mutant_all_is_exact(server: ModelServer, unbroken: list[DeviceTrace]) -> None:
    _check(server, unbroken)


@pytest.mark.parametrize(
    ("mutate", "said"),
    [
        (no_wait_for_a_message, r"race: aten\..* reads .* that testccl receive"),
        (no_wait_for_all_reduces, r"race: aten\..* reads .* that testccl all_reduce"),
        (a_tensor_let_go_too_early, r"testccl send .* may still (read|use)"),
    ],
)
def test_a_mutant_races(server: ModelServer, mutate: Callable[[], None], said: str) -> None:
    with pytest.raises(RankError, match=said):
        _train(server, mutate)


def test_receives_in_another_order_are_caught_by_the_numbers(server: ModelServer) -> None:
    """Both messages have one size, so that only the losses can show it."""
    ranks = _train(server, receives_in_another_order)
    with pytest.raises(AssertionError):
        _check(server, ranks)


def test_a_host_read_in_every_micro_batch_is_counted(
    server: ModelServer, unbroken: list[DeviceTrace]
) -> None:
    def num_reads(ranks: list[DeviceTrace]) -> int:
        found = []
        for rank in ranks:
            waits = rank.host_waits.items()
            found.append(sum(number for what, number in waits if "item at test_mutants" in what))
        return max(found)

    assert num_reads(unbroken) == 0
    mutant = num_reads(_train(server, a_host_read_in_every_micro_batch))
    assert mutant == NUM_STEPS * PLAN.num_micro_batch
