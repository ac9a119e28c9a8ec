"""The watch leaves when a child of multiprocessing ends, after its other threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from whale.distributed.watch import Watch


def test_idle_threads_of_a_pool_do_not_keep_a_child_from_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They end when the interpreter waits for threads, which it does after the watch's finalizer."""
    left = threading.Event()
    watch = Watch.__new__(Watch)
    monkeypatch.setattr(watch, "leave", left.set)
    others = set(threading.enumerate()) - {threading.current_thread()}
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        there = [thread for thread in threading.enumerate() if thread not in others]
        monkeypatch.setattr(threading, "enumerate", lambda: there)
        watch._leave_after_threads()
        assert not left.is_set()
    assert left.wait(20)
