"""What the hub decides, from made-up signs; and the watch between real processes where
nobody dies.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.ranks import RankError, run_ranks
from whale.distributed import hub, watch
from whale.distributed.causes import follows_from_another
from whale.distributed.hub import (
    GRACE_S,
    SETTLE_S,
    End,
    Hub,
    Process,
    SeenRank,
    all_raised,
    beat_s,
    judge,
    positions,
)
from whale.distributed.watch import EXIT_CODE, start_watch

TIMEOUT_S = 20.0
NOW = 1000.0


def ranks(*ends: tuple[End, float] | None) -> dict[int, SeenRank]:
    """Ranks heard of just now; an end and how many seconds ago it was."""
    found = {}
    for rank, end in enumerate(ends):
        seen = found[rank] = SeenRank(NOW if end is None else NOW - end[1], rank, f"F{rank}.0")
        if end is not None:
            seen.ended(end[0], "ValueError: no", NOW - end[1])
    return found


def cause(found: dict[int, SeenRank], now: float = NOW) -> int | None:
    verdict = judge(found, TIMEOUT_S, now)
    return verdict.cause if verdict is not None else None


SOON = 0.1
LATE = GRACE_S + 0.1


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([None, None], None),
        ([None, (End.DIED, SOON)], None),  # the whole job may be ending
        ([None, (End.DIED, LATE)], 1),
        ([(End.FOLLOWED, 0.01), (End.DIED, SOON)], 1),
        (
            [(End.FOLLOWED, 0.2), (End.DIED, SOON)],
            1,
        ),  # the error of rank 0 arrived before the end of rank 1 was seen
        ([(End.TERMINATED, 0.01), (End.DIED, SOON)], 1),
        ([None, (End.RAISED, SOON)], None),  # others may raise alike
        ([None, (End.RAISED, LATE)], 1),
        (
            [(End.DIED, 1.0), (End.RAISED, 2.0), (End.FOLLOWED, 0.1)],
            1,
        ),  # ended by its launcher after rank 1 raised
        ([(End.FOLLOWED, SOON), None], None),
        ([(End.FOLLOWED, LATE), None], 0),
        ([(End.FOLLOWED, SETTLE_S + 0.1), (End.TERMINATED, SETTLE_S)], 0),
        ([(End.TERMINATED, LATE), (End.TERMINATED, LATE)], None),  # the launcher ends the job
        ([None, (End.TERMINATED, LATE)], 1),  # somebody ended one rank
        ([(End.TERMINATED, SOON), (End.FOLLOWED, 0.01)], None),
    ],
)
def test_who_is_the_cause(ends: list[tuple[End, float] | None], expected: int | None) -> None:
    assert cause(ranks(*ends)) == expected


def test_the_verdict_waits_for_news_of_where_the_others_stand() -> None:
    """Rank 1 follows from rank 2's death at once; the last beat of rank 0 is older than that."""
    found = ranks(None, (End.FOLLOWED, SOON), (End.DIED, SOON))
    found[0].heard_at = NOW - SOON - 0.05
    assert cause(found) is None
    assert cause(found, NOW + 0.05) is None
    found[0].heard_at = NOW + 0.05
    found[0].position = "F0.3"
    verdict = judge(found, TIMEOUT_S, NOW + 0.05)
    assert verdict is not None
    assert verdict.cause == 2
    assert "rank 0 at F0.3" in verdict.text
    found[0].heard_at = NOW - SOON - 0.05
    assert cause(found, NOW + 2 * beat_s(3)) == 2  # it says nothing more: no reason to wait longer


def test_silence() -> None:
    found = ranks(None, None, None)
    found[2].heard_at = NOW - TIMEOUT_S
    assert cause(found) is None
    verdict = judge(found, TIMEOUT_S, NOW + 0.5)
    assert verdict is not None and verdict.cause == 2
    assert verdict.text == (
        "rank 2 has been silent for 20 s: it hangs, is stopped or is cut off. It was last heard "
        "of at F2.0. "
        "The others stood: rank 0 at F0.0; rank 1 at F1.0"
    )


def test_batches_of_different_shapes() -> None:
    """Only batches with the same number are compared: ranks need not be at the same place all the
    time.
    """
    found = ranks(None, None, None)
    found[0].batch = (7, "x [8, 4]")
    found[1].batch = (8, "x [8, 5]")
    assert cause(found) is None
    found[2].batch = (8, "x [8, 5]")
    assert cause(found) is None
    found[2].batch = (7, "x [8, 5]")
    verdict = judge(found, TIMEOUT_S, NOW)
    assert verdict is not None and (verdict.cause, verdict.standing) == (2, None)
    assert verdict.text == (
        "rank 2 was given another batch than rank 0: x [8, 5], rank 0 has x [8, 4]. Every rank "
        "must be given the same whole mini-batch. "
        "It stood at F2.0. The others stood: rank 0 at F0.0; rank 1 at F1.0"
    )
    found[1].ended(End.RAISED, "ValueError: no", NOW - LATE)  # a word of its own comes first
    verdict = judge(found, TIMEOUT_S, NOW)
    assert verdict is not None and verdict.cause == 1
    assert (
        "rank 1 failed at F1.0: ValueError: no. And rank 2 was given another batch" in verdict.text
    )


def test_a_rank_that_has_left_is_no_cause_and_is_not_concerned() -> None:
    found = ranks(None, None)
    found[1].has_left = True
    found[1].heard_at = NOW - 10 * TIMEOUT_S
    found[1].ended(End.DIED, "", NOW - LATE)
    assert cause(found) is None
    found = ranks(None, (End.DIED, LATE))
    found[0].has_left = True
    assert cause(found) is None


def test_all_alike() -> None:
    raised = (End.RAISED, LATE)
    assert all_raised(ranks(raised, raised).values())
    assert not all_raised(ranks(raised, None).values())
    assert not all_raised(ranks(raised, (End.FOLLOWED, 0.1)).values())
    assert cause(ranks(raised, (End.FOLLOWED, 0.1))) == 0


def test_positions_are_grouped() -> None:
    assert positions({2: "F1.0", 0: "F0.1", 1: "F1.0"}) == "rank 0 at F0.1; ranks 1, 2 at F1.0"


def test_beats_of_a_large_job_do_not_drown_the_hub() -> None:
    assert hub.beat_s(4) == hub.SHORTEST_BEAT_S
    assert 1000 / hub.beat_s(1000) <= 1000
    assert hub.beat_s(100_000) == hub.LONGEST_BEAT_S


def test_errors_that_follow() -> None:
    outer = RuntimeError("rank 0 waited")
    outer.__cause__ = RuntimeError(
        "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4"
    )
    assert follows_from_another(outer)
    assert follows_from_another(dist.DistBackendError("NCCL communicator was aborted"))
    assert not follows_from_another(RuntimeError("shape mismatch"))
    assert not follows_from_another(ValueError("bad batch"))


# ---- the hub, with ranks that are only sockets


@pytest.fixture
def started() -> Iterator[Hub]:
    made = Hub(2, TIMEOUT_S, is_local=True)
    yield made
    made.close()


def join(to: Hub, rank: int, token: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", to.port), timeout=10)
    greeting = {"token": token, "rank": rank, "position": "here", "host": "h", "pid": 1}
    connection.sendall(json.dumps(greeting).encode() + b"\n")
    return connection


def hear(connection: socket.socket, key: str) -> dict[str, object]:
    """The first message with this key."""
    lines = connection.makefile("r")
    while True:
        message = json.loads(lines.readline())
        if key in message:
            return message


def test_a_hub_tells_rank_1_where_all_stand(started: Hub) -> None:
    with join(started, 0, started.token), join(started, 1, started.token) as one:
        while (message := hear(one, "positions"))["positions"] != ["here", "here"]:
            pass
        assert message["beat"]


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"token": "guess", "rank": 0}\n',
        b'{"position": "x"}\n',
        b"[]\n",
    ],
)
def test_a_stranger_is_sent_away(started: Hub, words: bytes) -> None:
    with join(started, 0, started.token), join(started, 1, started.token) as one:
        with socket.create_connection(("127.0.0.1", started.port), timeout=10) as stranger:
            stranger.sendall(words)
            assert stranger.recv(100) == b""
        assert hear(one, "beat")
        assert all(seen.end is None for seen in started._ranks.values())


def test_the_cause_is_reported_last(capfd: pytest.CaptureFixture[str], started: Hub) -> None:
    """It may end this very process as soon as it knows."""
    with join(started, 0, started.token) as zero, join(started, 1, started.token) as one:
        hear(one, "positions")
        zero.sendall(b'{"failed": "ValueError: no", "follows": false, "position": "F0.1"}\n')
        one.shutdown(
            socket.SHUT_RDWR
        )  # died later: rank 0 is the cause, and there is no need to wait
        one_more = hear(zero, "verdict")["verdict"]
    assert isinstance(one_more, dict)
    assert (one_more["cause"], one_more["standing"]) == (0, None)
    assert capfd.readouterr().err == f"whale: {one_more['text']}\n"
    assert (
        one_more["text"]
        == "rank 0 failed at F0.1: ValueError: no. The others stood: rank 1 at here"
    )


# ---- real processes


def share(value: object) -> object:
    holder = [value]
    dist.broadcast_object_list(holder, src=0)
    return holder[0]


def raise_alike() -> int:
    """All ranks raise, catch and continue: nobody is ended, also when it happens again."""
    mine = start_watch(dist.get_rank(), 2, TIMEOUT_S, share)
    assert start_watch(dist.get_rank(), 2, 5.0, share) is mine and mine.timeout_s == 5.0
    for number in range(2):
        try:
            raise ValueError(f"batch {number}")
        except ValueError as error:
            mine.report_failure(error)
        dist.barrier()
    mine.leave()
    after = start_watch(dist.get_rank(), 2, TIMEOUT_S, share)
    assert after is not mine
    return os.getpid()


def test_errors_that_all_ranks_raise_end_nobody() -> None:
    assert len(run_ranks(raise_alike, 2)) == 2


def one_leaves_early() -> None:
    mine = start_watch(dist.get_rank(), 2, TIMEOUT_S, share)
    if dist.get_rank() == 1:
        mine.leave()
    time.sleep(GRACE_S + 1.0 if dist.get_rank() == 0 else 0.0)


def test_a_rank_that_ends_normally_disturbs_nobody() -> None:
    run_ranks(one_leaves_early, 2)


def raise_on_rank_1() -> None:
    mine = start_watch(dist.get_rank(), 2, TIMEOUT_S, share)
    if dist.get_rank() == 1:
        mine.report_failure(ValueError("only here"))
        time.sleep(60)  # its own time to end
    time.sleep(60)


def test_an_error_of_one_rank_ends_the_others() -> None:
    with pytest.raises(RankError, match=rf"Rank 0 of 2 died \(exit code {EXIT_CODE}\)"):
        run_ranks(raise_on_rank_1, 2)


FORKING = """
import os, signal, sys, time
from whale.distributed.watch import start_watch

mine = start_watch(0, 1, 20.0, lambda value: value)
handler = signal.getsignal(signal.SIGTERM)
ours, theirs = os.pipe()
child = os.fork()
if child == 0:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    os.write(theirs, b"x")
    time.sleep(60)
    os._exit(1)
os.read(ours, 1)  # what arrives in the very moment of the fork is lost, as with any handler of Python's
os.kill(child, signal.SIGTERM)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
if os.fork() == 0:
    sys.exit(0)  # its atexit must not say goodbye for us
os.wait()
time.sleep(0.5)
assert mine.hub._ranks[0].has_left is False
print("ready", flush=True)
time.sleep(60)
"""


def test_forked_children_and_sigterm() -> None:
    """A worker that loads data ends by SIGTERM as always, and not with the rank's voice; the rank
    itself ends a moment later.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", FORKING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()[1]
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 128 + signal.SIGTERM
    assert process.communicate()[1] == ""


def test_only_processes_of_this_host_are_killed() -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        Process("another host", sleeper.pid).kill()
        assert sleeper.poll() is None
        Process(Process.this().host, sleeper.pid).kill()
        assert sleeper.wait(timeout=10) == -signal.SIGKILL
    Process(Process.this().host, os.getpid()).kill()  # never itself


def test_no_watch_no_report() -> None:
    watch.report_failure(ValueError("in a process without a watch"))
