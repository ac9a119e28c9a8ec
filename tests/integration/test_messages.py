"""What goes between stages on real ranks: one message an edge, memory of what is in flight, and no
mix-up between steps.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale as wh
from tests.ranks import preload, run_ranks
from whale import scheduling
from whale.devices import GLOO
from whale.distributed.message import NUM_EPOCHS, Message, MessagePiece
from whale.distributed.ranks import Ranks
from whale.distributed.transport import Transport

preload("tests.integration.test_messages")

WIDTH = 3
INSIDE = 40
"""of the tensors that cross, and of those inside a stage; cuts go where least bytes cross"""


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in parameters], lr=0.1)


class Block(nn.Module):
    def __init__(self, first: bool = False, last: bool = False) -> None:
        super().__init__()
        self.enter = nn.Linear(5 if first else WIDTH, INSIDE)
        self.leave = nn.Linear(INSIDE, 5 if last else WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.enter(x)))


class Chain(nn.Module):
    """Between blocks [batch, 3], inside a block [batch, 40]."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            Block(place == 0, place == num_blocks - 1) for place in range(num_blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


# ---- memory of boundaries


class Looks:
    """Stands where an emulation keeps time: after every action it counts the boundary tensors that
    this process holds.
    """

    def __init__(self) -> None:
        self.most = 0

    def finish(self, action: object, start: float) -> None:
        found = (
            each for each in gc.get_objects() if type(each) is Tensor and each.shape == (1, WIDTH)
        )
        self.most = max(self.most, len({each.untyped_storage().data_ptr() for each in found}))


def boundaries(num_micro_batch: int, num_blocks: int, schedule: dict[str, Any]) -> tuple[int, int]:
    """(the most boundary tensors that this rank held at a time, received inputs that the schedule
    keeps at most)
    """
    wh.init(
        {
            "num_micro_batch": num_micro_batch,
            "num_task_graph": 3,
            "check_capture": False,
            "num_posted_receives": 1,
            **schedule,
        }
    )
    torch.manual_seed(0)
    batch = (torch.randn(num_micro_batch, 5),)
    engine = wh.parallelize(Chain(num_blocks), batch, optimizer=sgd)
    assert len(engine.plan.stages) == num_blocks
    engine.step(batch)
    (executor,) = engine.executors()
    looks = executor.pace = Looks()  # type: ignore[assignment]
    engine.step(batch)
    proof = scheduling.check(engine.plan.schedule)
    return looks.most, sum(
        proof.peak_in_flight[stage] for stage in engine.plan.stages_of_rank(wh.rank()) if stage > 0
    )


def test_boundaries_of_1f1b_take_as_much_memory_however_many_micro_batches_there_are() -> None:
    """Three devices, window 1, gloo. Device 0 has sent 3 results before the first gradient comes,
    and waits for one gradient; device 2 keeps one received input, and has one gradient coming or
    going."""
    for count in (6, 12, 24):
        (first, _), _, (last, kept) = run_ranks(
            boundaries, 3, count, 3, {"schedule": "1f1b", "share_memory": False}
        )
        assert 3 <= first <= 5
        assert kept == 1 <= last <= 4


@pytest.mark.parametrize(
    "schedule",
    [{"schedule": "wave"}, {"schedule": "zero-bubble", "num_waves": 1}],
    ids=["wave", "zero-bubble wave"],
)
def test_boundaries_of_waves_take_what_the_schedule_keeps(schedule: dict[str, Any]) -> None:
    """Received inputs from forward to backward (and with a split backward the gradients that weight
    parts wait with), one receive ahead, and on each of two chunks something that comes or goes.
    Device 1 of the split one runs ahead: its results wait to be taken, too."""
    for rank, (most, kept) in enumerate(
        run_ranks(boundaries, 3, 9, 6, {**schedule, "share_memory": False})
    ):
        for_each = 1 if schedule["schedule"] == "wave" else 3 if rank == 1 else 2
        assert kept <= most <= kept * for_each + 5


# ---- several tensors in one message


class Several(nn.Module):
    """Three values cross: two trained ones, of which one has the batch in its second dim, and a
    mask made of the first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 6)
        self.two = nn.Linear(6, 4)
        self.three = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.tanh(self.one(x))
        b = self.two(x).t()
        mask = a.detach() > 0
        return self.end(a, b, mask)

    def end(self, a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
        return self.three(torch.cat([torch.where(mask, a, 2 * a), b.t()], dim=1)).square().mean()


def train_several(devices: tuple[int, int], count: bool) -> tuple[dict[str, Tensor], int]:
    """(weights after two steps, messages that this rank sent in one)"""
    wh.init({"num_micro_batch": 2, "check_capture": False})
    torch.manual_seed(0)
    model = Several().double()
    wh.annotate(model, {"one|two": wh.replicate(devices[0]), "three": wh.replicate(devices[1])})
    batch = (torch.randn(12, 6, dtype=torch.float64),)
    engine = wh.parallelize(model, batch, optimizer=sgd)
    engine.step(batch)
    transport = engine.executors()[0].transport
    assert transport is not None
    sent: list[Message] = []
    original = transport.send
    transport.send = lambda tensor, message: (sent.append(message), original(tensor, message))[1]  # type: ignore[method-assign]
    engine.step(batch)
    return engine.full_state_dict(), len(sent)


@pytest.mark.parametrize("devices", [(1, 1), (2, 1), (1, 2), (2, 3)])
def test_all_values_of_an_edge_go_in_one_message(devices: tuple[int, int]) -> None:
    torch.manual_seed(0)
    local = Several().double()
    x = torch.randn(12, 6, dtype=torch.float64)
    optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        local(x).backward()
        optimizer.step()
    answers = run_ranks(train_several, sum(devices), devices, True)
    for name, expected in local.state_dict().items():
        torch.testing.assert_close(answers[0][0][name], expected, rtol=1e-12, atol=1e-12)
    pairs = {(1, 1): 1, (2, 1): 2, (1, 2): 2, (2, 3): 4}[devices]  # of ranks whose samples overlap
    forward = sum(sent for _, sent in answers[: devices[0]])
    backward = sum(sent for _, sent in answers[devices[0] :])
    assert forward == backward == 2 * pairs  # micro-batches x pairs, three values each


# ---- steps are told apart


def mix_up(share_memory: bool) -> list[float]:
    """Rank 0 sends a message in a pass that rank 1 gives up before it receives it; the next pass
    sends another one over the same edge.
    """
    ranks = Ranks("cpu")
    transport = Transport(ranks, [(0, 1), (1, 0)], share_memory)
    message = Message(1 - ranks.rank, 5 * NUM_EPOCHS, (MessagePiece(0, None, (1,), torch.float32),))
    transport.begin()
    if ranks.rank == 0:
        transport.send(torch.tensor([1.0]), message)
    transport.begin()
    if ranks.rank == 0:
        transport.send(torch.tensor([2.0]), message)
        ranks.gather(None)
        return []
    buffer = torch.zeros(1)
    transport.wait(transport.post(buffer, message, "a message"))
    ranks.gather(None)
    return buffer.tolist()


@pytest.mark.parametrize("share_memory", [False, True], ids=["gloo", "memory"])
def test_a_message_that_a_failed_step_left_behind_is_not_taken_for_a_later_one(
    share_memory: bool,
) -> None:
    assert run_ranks(mix_up, 2, share_memory)[1] == [2.0]


def train_over_channels() -> tuple[list[tuple[int, int]], dict[str, Tensor]]:
    """A wave with messages matched by order, as on NCCL, over gloo. (world ranks in the group of
    each directed pair, weights)
    """
    original = Ranks.__init__

    def without_tags(self: Ranks, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.backend = replace(GLOO, has_tags=False)
        self.backends = [self.backend] * self.num_ranks

    Ranks.__init__ = without_tags  # type: ignore[method-assign]
    wh.init(
        {
            "num_micro_batch": 6,
            "num_task_graph": 3,
            "check_capture": False,
            "schedule": "zero-bubble",
            "num_waves": 1,
        }
    )
    torch.manual_seed(0)
    batch = (torch.randn(12, 5, dtype=torch.float64),)
    engine = wh.parallelize(Chain(12).double(), batch, optimizer=sgd)
    for _ in range(2):
        engine.step(batch)
    transport = engine.executors()[0].transport
    assert transport is not None
    groups = [group for routes in (transport._to, transport._from) for group, _ in routes.values()]
    assert len(set(map(id, groups))) == len(groups)
    return [
        tuple(torch.distributed.get_process_group_ranks(group)) for group in groups
    ], engine.full_state_dict()  # type: ignore[misc]


def test_each_directed_pair_has_its_own_channel_where_messages_are_matched_by_order() -> None:
    torch.manual_seed(0)
    x = torch.randn(12, 5, dtype=torch.float64)
    local = Chain(12).double()
    optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        local(x).backward()
        optimizer.step()
    answers = run_ranks(train_over_channels, 3)
    # one for each direction; the neighbours of device 1
    assert sorted(answers[1][0]) == [(0, 1), (1, 0), (1, 2), (2, 1)]
    for name, expected in local.state_dict().items():
        torch.testing.assert_close(answers[0][1][name], expected, rtol=1e-12, atol=1e-12)
