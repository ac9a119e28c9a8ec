"""What the runtime itself costs: pipelines of 2 ranks, 16 micro-batches, 4 chunks on a device,
whose chunks have next to nothing to do.

The time of a step over the number of compute actions of a rank (forward, backward or its two
parts), messages, waiting and update included; beside it the same for the classes of torch that have
several chunks, on the same layers in the same run. Wanted: at most 0.35 ms. Messages go through
memory, as they do between CPU ranks of one host, and for a second time over gloo, which torch's
side uses. The floor of the latter stands beside it: the same messages in the same order, with
nothing in between.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # `python benchmarks/action_cost.py` finds its neighbours, too

import whale as wh
from benchmarks.side_by_side import Claim, Side, Times, alternate, report, run_ranks, say
from benchmarks.torch_schedules import TORCH, TorchJob, TorchSchedule, torch_side
from whale.distributed.message import Message
from whale.lowering.program import Program
from whale.runtime.messages import messages_of
from whale.scheduling import Kind

NUM_DEVICES = 2
NUM_MICRO_BATCH = 16
NUM_CHUNKS = 4
WIDTH = 4
MOST_MS = 0.35
ROUNDS = 30
STEPS_PER_BLOCK = 5
LIMIT_S = 90.0
OURS = {
    "whale wave": {"schedule": "wave", "num_waves": NUM_CHUNKS // 2},
    "whale zero-bubble wave": {"schedule": "zero-bubble", "num_waves": NUM_CHUNKS // 2},
}
OVER_GLOO = {
    f"{name}, over gloo": {**config, "share_memory": False} for name, config in OURS.items()
}
THEIRS = {
    "torch Interleaved1F1B v=4": TorchSchedule(pipelining.ScheduleInterleaved1F1B, NUM_CHUNKS),
    **{
        name: TORCH[name]
        for name in ("torch InterleavedZeroBubble v=4", "torch ZBV", "torch DualPipeV")
    },
}


class Chain(nn.Module):
    """A tiny layer for each chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH) for _ in range(NUM_DEVICES * NUM_CHUNKS)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(x, y)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(NUM_MICRO_BATCH, WIDTH, generator=generator) for _ in range(2))
    return x, y


def whale_sides(name: str) -> list[tuple[Side, int]]:
    """(the side, compute actions of this rank); over gloo also the floor"""
    torch.manual_seed(0)
    wh.init(
        {
            **(OURS | OVER_GLOO)[name],
            "num_task_graph": NUM_DEVICES,
            "num_micro_batch": NUM_MICRO_BATCH,
            "check_capture": False,
        }
    )
    engine = wh.parallelize(
        Chain(), batch(0), optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=1e-3)
    )
    engine.step(batch(0))
    (executor,) = engine.executors()
    count = sum(action.is_compute for action in executor.program.actions)
    sides = [(Side(name, lambda step: engine.step(batch(step))), count)]
    if name in OVER_GLOO:
        messages = messages_in_order(executor.program)
        sides.append(
            (Side(f"{name}: only its messages", lambda step: only_messages(messages)), count)
        )
    return sides


def messages_in_order(program: Program) -> list[tuple[bool, Message]]:
    """(whether this rank sends it, the message)"""
    actions = [action for action in program.actions if action.is_message]
    return [
        (action.kind is Kind.SEND, message)
        for action in actions
        for message in messages_of(program, action)
    ]


def only_messages(messages: list[tuple[bool, Message]]) -> None:
    """All receives are posted first, then everything is sent and waited for in the order of the
    program.
    """
    group = dist.group.WORLD
    assert group is not None
    x = torch.zeros(1, WIDTH)
    receives = iter(
        [
            group.recv([torch.empty(1, WIDTH)], message.peer, message.tag)
            for is_send, message in messages
            if not is_send
        ]
    )
    sends = []
    for is_send, message in messages:
        if is_send:
            sends.append(group.send([x], message.peer, message.tag))
        else:
            next(receives).wait()
    for work in sends:
        work.wait()


def their_side(name: str) -> tuple[Side, int]:
    kind = THEIRS[name]
    whole = "Interleaved1F1B" in name
    job = TorchJob(
        NUM_MICRO_BATCH,
        lambda stage, total: nn.Linear(WIDTH, WIDTH),
        nn.functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        batch,
    )
    return torch_side(name, kind, job), kind.num_chunks * NUM_MICRO_BATCH * (2 if whole else 3)


def measure() -> tuple[Times, dict[str, int]]:
    """Runs on every rank: times of all sides, and compute actions of each."""
    say("preparing all sides")
    made = [side for name in OURS | OVER_GLOO for side in whale_sides(name)] + [
        their_side(name) for name in THEIRS
    ]
    sides = {side.name: (side, count) for side, count in made}
    only = [
        Side(side.name, side.step) for side, _ in sides.values()
    ]  # the layers are not the same in all of them
    times = alternate(only, ROUNDS, STEPS_PER_BLOCK, LIMIT_S, warm_up=2)
    return times, {name: count for name, (_, count) in sides.items()}


def main() -> None:
    times, counts = run_ranks(measure, NUM_DEVICES)
    cost_ms = {name: times.median(name) / count * 1e3 for name, count in counts.items()}
    shown = {f"{name}, ms an action": round(cost, 3) for name, cost in cost_ms.items()}
    details = {**shown, "actions of a rank": counts, **times.details()}
    claims = []
    for name in OURS | OVER_GLOO:
        floor = (
            {"floor": round(cost_ms[f"{name}: only its messages"], 3)} if name in OVER_GLOO else {}
        )
        claims.append(
            Claim(
                f"{name}: ms an action",
                cost_ms[name],
                MOST_MS,
                at_most=True,
                details=floor or details,
            )
        )
    report("action_cost", claims)


if __name__ == "__main__":
    main()
