"""What is said of ranks that call other methods of the engine than all must, from made-up calls."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from whale.distributed import hub as hub_module
from whale.distributed.calls import NO_CALL, Call, CallsDifferError, difference, have_met
from whale.distributed.hub import Hub
from whale.distributed.watch import Watch

SAVE = "engine.save_pretrained"
STEP = "engine.step"


@pytest.mark.parametrize(
    ("calls", "left"),
    [
        ([Call(5, STEP), Call(6, STEP)], []),  # ranks need not be at the same step
        ([Call(6, SAVE, waits=True), Call(5, STEP)], []),  # rank 1 may still come
        ([Call(6, SAVE, waits=True), Call(6, SAVE, waits=True)], []),
        ([Call(6, STEP), Call(6, STEP)], [1]),  # it has done all that rank 0 has
        ([NO_CALL, NO_CALL], [0]),
        ([Call(6, SAVE), Call(7, STEP)], []),  # rank 1 was there as well
    ],
)
def test_calls_that_may_be_the_same(calls: list[Call], left: list[int]) -> None:
    assert difference(dict(enumerate(calls)), set(left)) is None


@pytest.mark.parametrize(
    ("calls", "left", "rank", "said"),
    [
        (
            [Call(6, SAVE, waits=True), Call(5, STEP)],
            [1],
            0,
            "rank 0 called it, rank 1 ended its script after 5 calls of the engine. Try: take it "
            "out of `if rank == 0:`; rank 0 alone writes the files",
        ),
        (
            [Call(5, STEP), Call(6, SAVE, waits=True), Call(6, SAVE, waits=True), Call(1, STEP)],
            [0, 3],
            1,
            "ranks 1-2 called it, rank 0 ended its script after 5 calls of the engine, rank 3 "
            "ended its script after 1 call of the engine",
        ),
        (
            [Call(6, SAVE, waits=True), Call(6, STEP)],
            [],
            0,
            "rank 0 called it, rank 1 called engine.step in its place",
        ),
        (  # a rank that waits has not made the call yet, so rank 1 cannot be beyond it
            [Call(6, SAVE, waits=True), Call(8, STEP)],
            [],
            0,
            "rank 0 called it, rank 1 went on to engine.step without it",
        ),
        (
            [Call(6, STEP), Call(7, STEP), Call(6, "engine.update")],
            [],
            None,
            "rank 0 called it, rank 2 called engine.update in its place",
        ),
        (  # a loader that is longer on rank 0: it has sent messages, so its own error is gloo's
            [Call(11, STEP), Call(10, STEP)],
            [1],
            None,
            "rank 0 called it, rank 1 ended its script after 10 calls of the engine. Try: give "
            "every rank the same batches, and equally many",
        ),
    ],
)
def test_calls_that_differ(calls: list[Call], left: list[int], rank: int | None, said: str) -> None:
    found = difference(dict(enumerate(calls)), set(left))
    assert found is not None
    assert found[0] == rank
    assert " must be called by all ranks: " + said in found[1]


def test_rank_0_that_ended_after_the_same_calls_is_not_to_blame() -> None:
    watch = Watch(1, 2, timeout_s=20.0)
    watch.call = Call(3, STEP)
    lost = RuntimeError("gloo: connection closed by peer")
    watch.explain(lost)
    watch._hear_goodbye(3)
    watch.explain(lost)
    watch.call = Call(4, STEP)
    with pytest.raises(CallsDifferError, match="rank 1 called it, rank 0 ended its script after 3"):
        watch.explain(lost)


def test_all_have_met() -> None:
    there = Call(3, SAVE, waits=True)
    assert have_met({0: there, 1: there})
    assert not have_met({0: there, 1: Call(2, SAVE, waits=True)})
    assert not have_met({0: there, 1: Call(3, SAVE)})


# ---- the hub, with ranks that are only sockets


class Rank:
    """One rank's connection to a hub."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", hub.port), timeout=20)
        self._lines = self._socket.makefile("r")
        self.say({"token": hub.token, "rank": rank, "position": "here", "host": "h", "pid": 1})

    def say(self, message: dict[str, object]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def hear(self, *keys: str) -> dict[str, Any]:
        """The first message with one of these keys."""
        while True:
            message: dict[str, Any] = json.loads(self._lines.readline())
            if any(key in message for key in keys):
                return message

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


@pytest.fixture
def joined() -> Iterator[list[Rank]]:
    made = Hub(2, timeout_s=20.0, is_local=True)
    ranks = [Rank(made, rank) for rank in range(2)]
    yield ranks
    made.close()
    for rank in ranks:
        rank.close()


def test_ranks_meet_in_a_call(joined: list[Rank]) -> None:
    for number in (1, 2):
        for rank in joined:
            rank.say({"call": [number, SAVE, True]})
        for rank in joined:
            assert rank.hear("met", "verdict").get("met") == number
        joined[0].say({"call": [number, SAVE, True]})  # a beat says it again, late
    joined[0].say({"call": [3, STEP, False]})
    assert "verdict" not in joined[0].hear("beat", "verdict")


def test_the_rank_that_waits_says_what_is_wrong(
    joined: list[Rank], capfd: pytest.CaptureFixture[str]
) -> None:
    """It knows the line of its script; the hub prints nothing of its own."""
    joined[0].say({"call": [2, SAVE, True]})
    joined[1].say({"bye": True, "call": [1, STEP, False]})
    verdict = joined[0].hear("verdict")["verdict"]
    assert verdict["cause"] == 0
    assert "rank 1 ended its script after 1 call of the engine" in verdict["text"]
    assert capfd.readouterr().err == ""


def test_a_rank_that_dies_while_it_waits_is_named(
    joined: list[Rank], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot say anything itself."""
    monkeypatch.setattr(hub_module, "GRACE_S", 0.0)
    joined[1].say({"call": [2, SAVE, True]})
    joined[1].close()
    verdict = joined[0].hear("verdict")["verdict"]
    assert (verdict["cause"], verdict["is_refused_call"]) == (1, False)
    assert "rank 1 died without a word" in capfd.readouterr().err


def test_a_long_wait_is_explained_once(joined: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "AWAITED_S", 0.0)
    joined[0].say({"call": [2, SAVE, True]})
    rank, text = joined[1].hear("awaited")["awaited"]
    assert rank == 1
    assert text.startswith(
        f"{SAVE} must be called by all ranks: rank 0 called it and waits for rank 1. "
    )
    for _ in range(3):
        assert "awaited" not in joined[1].hear("beat", "awaited")
