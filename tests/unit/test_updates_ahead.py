"""Updates on the host under the next forward: when a plan has them, what the simulation makes of
them, and that they use what was there when they were queued.
"""

from __future__ import annotations

import random
import signal
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import whale as wh
from tests.unit.test_offload_plans import HOST, WIDTH, Net, plan
from whale.cluster.cluster import Cluster
from whale.plans.away import StageAhead
from whale.plans.check import contradiction
from whale.plans.plan import Plan
from whale.runtime.offloaded_states import STREAMED
from whale.runtime.updates_ahead import (
    LateBlocks,
    OptimizerNow,
    UpdateAheadError,
    UpdatesAhead,
)

PATIENCE_S = 600.0
"""a test that needs so long hangs"""
AT_HOME = {"weights": "host", "optimizer": "host", "gradients": "host"}


def decided(made: Plan) -> tuple[str, str]:
    """(choice, reason)"""
    (found,) = (each for each in made.decisions if each.what == "updates on the host")
    return found.choice, found.why


# ---- times


def test_a_forward_waits_block_by_block() -> None:
    """Against a loop over the blocks."""
    draws = random.Random(0)
    for _ in range(200):
        number = draws.randint(1, 6)
        start, before, update, compute = (draws.random() for _ in range(4))
        now = start
        for block in range(number):
            updated = before + (block + 1) * update / number
            now = max(now, updated) + compute / number
        found = StageAhead(update, number).end_s(start, compute, before)
        assert found == pytest.approx(now)
    assert StageAhead().end_s(1.0, 2.0, 9.0) == 3.0, "nothing to wait for"


def test_a_step_hides_updates_as_far_as_its_forward_is_long() -> None:
    made = plan(offload=AT_HOME)
    assert made.updates_ahead and decided(made)[0] == "under the next forward"
    ahead = wh.simulate(made)
    at_end = wh.simulate(replace(made, updates_ahead=False))
    update_s = at_end.devices[0].update_s
    forward_s = next(each.seconds for each in at_end.devices[0].events if each.name == "F0.0")
    number = len(made.blocks)
    # the first update has nothing to hide under, and the last forward nothing that hides
    longest = max(update_s / number, update_s + forward_s / number - forward_s, 0.0)
    assert ahead.devices[0].update_s == pytest.approx(longest)
    assert ahead.step_s == pytest.approx(at_end.step_s - update_s + longest)
    assert ahead.devices[0].ahead_s == pytest.approx(update_s - longest)
    assert ahead.devices[0].compute_s == pytest.approx(at_end.devices[0].compute_s)


def test_later_stages_have_the_way_of_the_first_micro_batch_besides() -> None:
    made = plan(2, offload=AT_HOME, num_task_graph=2, num_micro_batch=2)
    assert made.updates_ahead
    first, second = wh.simulate(made).devices
    assert second.update_s < first.update_s


# ---- the decision


def test_cpu_ranks_have_nothing_to_hide_under() -> None:
    devices = Cluster.uniform(2, "CPU").with_memories(HOST)
    config = {"strategy": "data", "offload": {"optimizer": "host"}}
    made = wh.plan(Net(), {"x": torch.zeros(8, WIDTH)}, cluster=devices, config=config)
    assert not made.updates_ahead and "CPU ranks" in decided(made)[1]
    # whoever sets it gets what the cost model says: nothing
    ahead = replace(made, updates_ahead=True)
    assert wh.simulate(ahead).step_s == wh.simulate(made).step_s


def test_compiled_chunks_stay_whole() -> None:
    made = plan(offload=AT_HOME, compile=True)
    assert not made.updates_ahead and '"compile"' in decided(made)[1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"blocks": ()}, "no block is updated on the host"),
        ({"owners": {"layers.0.weight": 0}}, "exchange parts of an update"),
    ],
)
def test_plans_that_cannot_be_are_refused(changes: dict[str, Any], words: str) -> None:
    made = plan(offload=AT_HOME)
    assert contradiction(made) is None
    assert words in (contradiction(replace(made, **changes)) or "")


# ---- updates


@pytest.mark.parametrize("kind", sorted(STREAMED, key=lambda kind: kind.__name__))
def test_an_update_has_the_gradients_and_options_of_its_step(kind: Any) -> None:
    """Gradients go, and the LR scheduler makes its step, before any update is made."""
    torch.manual_seed(0)
    own = [nn.Parameter(torch.randn(3, 4, dtype=torch.float64)) for _ in range(3)]
    local = [nn.Parameter(each.detach().clone()) for each in own]
    optimizers = [kind(each, lr=0.1) for each in (own, local)]
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in optimizers]
    for step in range(4):
        for mine, other in zip(own, local, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        optimizers[1].step()
        schedulers[1].step()
        if step == 0:  # the states come to be
            optimizers[0].step()
            schedulers[0].step()
            continue
        now = OptimizerNow(optimizers[0])
        queued = [now.of([each]) for each in own]
        schedulers[0].step()
        for mine in own:
            mine.grad = None
        for each in queued:
            each.step()
    for mine, other in zip(own, local, strict=True):
        assert torch.equal(mine, other)


def test_a_learning_rate_that_is_a_tensor_is_that_of_its_step() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=torch.tensor(0.5))
    parameter.grad = torch.ones(2)
    queued = OptimizerNow(optimizer).of([parameter])
    optimizer.param_groups[0]["lr"].fill_(100.0)
    queued.step()
    assert parameter.tolist() == [0.5, 0.5]


def test_an_update_that_fails_is_said_by_whoever_waits() -> None:
    ahead = UpdatesAhead(rank=3)
    done = []

    def fail() -> None:
        raise OSError("the disk is full")

    ahead.begin(0, ["a"], lambda: done.append(0))
    ahead.begin(1, ["b.weight", "b.bias"], fail)
    ahead.begin(2, ["c"], lambda: done.append(2))
    words = r"rank 3: the update of block 1 \(b.weight to b.bias\).*OSError: the disk is full"
    with pytest.raises(UpdateAheadError, match=words) as caught:
        ahead.wait_for_all()
    assert isinstance(caught.value.__cause__, OSError)
    for call in (lambda: ahead.wait(0), lambda: ahead.wait(2), ahead.wait_for_all, ahead.close):
        with pytest.raises(UpdateAheadError, match=words):
            call()
    assert done == [0], "nothing is updated behind an update that failed"
    ahead.forget()
    ahead.begin(0, ["a"], lambda: done.append(3))
    ahead.close()
    assert done == [0, 3]


def test_an_update_is_waited_for_again_after_ctrl_c() -> None:
    """Whoever saves the model then, which scripts do, must not read a block that is being written."""
    ahead = UpdatesAhead(rank=0)
    gate = threading.Event()
    done = []

    def slow() -> None:
        assert gate.wait(PATIENCE_S)
        done.append(0)

    ahead.begin(0, ["a"], slow)
    here = threading.get_ident()
    threading.Timer(0.2, lambda: signal.pthread_kill(here, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        ahead.wait(0)
    assert not done
    threading.Timer(0.2, gate.set).start()
    ahead.wait_for_all()
    assert done == [0]
    ahead.close()


def test_blocks_are_brought_once_and_when_they_are_needed() -> None:
    brought: list[int] = []
    late = LateBlocks(brought.append)
    late.need(0)
    late.expect([0, 1, 2])
    late.need(1)
    late.need(0, 1)
    assert brought == [1, 0]
    late.bring_all()
    late.bring_all()
    assert brought == [1, 0, 2]


def test_updates_go_in_the_order_of_their_use() -> None:
    ahead = UpdatesAhead(rank=0)
    gate = threading.Event()
    order: list[int] = []

    def slow() -> None:
        gate.wait()
        order.append(0)

    ahead.begin(0, ["a"], slow)
    ahead.begin(1, ["b"], lambda: order.append(1))
    assert order == [], "whoever queues does not wait"
    gate.set()
    ahead.wait(1)
    assert order == [0, 1]
    ahead.close()
