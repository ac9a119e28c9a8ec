"""Methods that all ranks must call, called under `if rank == 0:`: named at once, with the line of
the script, and not by the words of a transport after its time is over.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ranks import RankError, run_ranks
from whale.distributed.calls import CallsDifferError, Meets
from whale.distributed.watch import EXIT_CODE, Watch, reporting, start_watch

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 20.0
SAVE = "engine.save_pretrained"
STEP = "engine.step"


def share(value: object) -> object:
    holder = [value]
    dist.broadcast_object_list(holder, src=0)
    return holder[0]


def watched() -> Watch:
    mine = start_watch(dist.get_rank(), 2, TIMEOUT_S, share)
    dist.barrier()  # all have joined the hub
    return mine


def meet_often() -> int:
    mine = watched()
    for _ in range(50):
        mine.note_call(STEP, Meets.NEVER)
        mine.note_call("engine.evaluate", Meets.AFTER_ANOTHER)
        mine.note_call("engine.evaluate", Meets.AFTER_ANOTHER)
        mine.note_call(SAVE, Meets.ALWAYS)
    return mine.call.number


def test_ranks_that_call_the_same_continue() -> None:
    assert run_ranks(meet_often, 2) == [200, 200]


def call_alone(rank: int, then_leaves: bool) -> str:
    """`rank` calls what the other does not; what it raises."""
    mine = watched()
    mine.note_call(STEP, Meets.NEVER)
    if mine.rank != rank:
        if then_leaves:
            mine.leave()
            return ""
        mine.note_call(STEP, Meets.NEVER)
        dist.barrier()  # for ever: the watch ends this rank
    with pytest.raises(CallsDifferError) as caught:
        mine.note_call(SAVE, Meets.ALWAYS)
    return str(caught.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_call_that_the_other_rank_never_makes(rank: int) -> None:
    said = run_ranks(call_alone, 2, rank, True)[rank]
    assert said.startswith(
        f"{SAVE} must be called by all ranks: rank {rank} called it, rank {1 - rank} ended its "
        "script after 1 call of the engine. Try: "
    )


def test_the_rank_that_called_something_else_is_ended() -> None:
    with pytest.raises(RankError, match=rf"Rank 1 of 2 died \(exit code {EXIT_CODE}\)"):
        run_ranks(call_alone, 2, 0, False)


def step_alone() -> str:
    """A loop of steps that is longer on rank 1; what it raises when rank 0 is gone."""
    mine = watched()
    mine.note_call(STEP, Meets.NEVER)
    if mine.rank == 0:
        mine.leave()
        dist.destroy_process_group()
        return ""
    with pytest.raises(CallsDifferError) as caught:
        mine.note_call(STEP, Meets.NEVER)  # raises if rank 0 has said goodbye already
        with reporting(mine, "step 1"):
            dist.barrier()  # gloo: connection closed by peer
    assert isinstance(caught.value.__cause__, RuntimeError | None)
    dist.destroy_process_group()  # there is nobody to say goodbye to
    return str(caught.value)


def test_a_loop_that_is_longer_on_one_rank() -> None:
    assert (
        "engine.step must be called by all ranks: rank 1 called it, rank 0 ended"
        in (run_ranks(step_alone, 2)[1])
    )


SCRIPT = """
import sys, torch, whale as wh

method, folder = sys.argv[1:]
wh.init()
torch.manual_seed(0)
net = torch.nn.Linear(6, 3)
x = torch.randn(8, 6)
engine = wh.parallelize(
    net, x, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), loss=lambda y, x: y.square().mean()
)
engine.step(x)
given = {"evaluate": (x,), "step": (x,)}
given |= dict.fromkeys(("full_state_dict", "full_gradients", "module", "gathered"), ())
if wh.rank() == 0:
    getattr(engine, method)(*given.get(method, (folder,)))
if method != "step":
    engine.step(x)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        *("save_pretrained", "full_state_dict", "module", "gathered", "evaluate"),
        *("save", "load", "step", "export", "trace", "full_gradients"),
    ],
)
def test_methods_under_if_rank_0(method: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "whale", "run", "-n", "2", str(script)]
    done = subprocess.run(
        [*command, method, str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode != 0
    assert f"engine.{method} must be called by all ranks: rank 0 called it, rank 1 " in done.stderr
    assert "gloo" not in done.stderr
    assert "Traceback" not in done.stderr
    if method != "step":  # the rank that waits can show the line
        assert "getattr(engine, method)" in done.stderr
