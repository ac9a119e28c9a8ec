"""Updates under the next forward, held back: each begins when somebody waits for it and no moment
earlier. Whoever reads a weight or a state without waiting finds the old one, on every run.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

from whale.runtime.updates_ahead import UpdatesAhead

PATIENCE_S = 600.0
"""for somebody who waits, on a busy machine; a test that needs so long hangs"""


class HeldUpdates:
    """What happens with the updates of this process."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        """(`begun` | `updated` | `waited`, block), in the order in which it happened"""
        self._gates: dict[int, threading.Event] = {}
        """by block, in the order of its updates"""

    @property
    def num_updates(self) -> int:
        return sum(what == "updated" for what, _ in self.events)

    def held(self, block: int, update: Callable[[], None]) -> Callable[[], None]:
        """An update that begins when it is waited for."""
        self._gates.pop(block, None)
        gate = self._gates[block] = threading.Event()

        def run() -> None:
            assert gate.wait(PATIENCE_S), f"nobody waits for block {block}"
            self.events.append(("begun", block))
            update()
            self.events.append(("updated", block))

        return run

    def release(self, block: int) -> None:
        """Lets the update of a block begin, and those before it, which are in the same queue."""
        if block in self._gates:
            for each, gate in self._gates.items():
                gate.set()
                if each == block:
                    break

    def release_all(self) -> None:
        for gate in self._gates.values():
            gate.set()


@contextlib.contextmanager
def held_updates(waits: bool = True) -> Iterator[HeldUpdates]:
    """Inside, updates under the next forward are held back. `waits`: False: a mistake, made on
    purpose: nobody waits for a block, only for all of them at the end of a step.
    """
    held = HeldUpdates()
    begin = UpdatesAhead.begin
    wait = UpdatesAhead.wait
    others = {name: getattr(UpdatesAhead, name) for name in ("wait_for_all", "forget", "close")}

    def begin_held(
        self: UpdatesAhead, block: int, names: Sequence[str], update: Callable[[], None]
    ) -> None:
        begin(self, block, names, held.held(block, update))

    def wait_held(self: UpdatesAhead, block: int) -> None:
        if waits:
            is_queued = block in self._pending
            held.release(block)
            wait(self, block)
            if is_queued:
                held.events.append(("waited", block))

    def of_all(name: str) -> Callable[[UpdatesAhead], None]:
        def run(self: UpdatesAhead) -> None:
            held.release_all()
            if name != "forget":  # which raises nothing
                for block in list(self._pending):
                    wait(self, block)
            others[name](self)

        return run

    UpdatesAhead.begin = begin_held  # type: ignore[method-assign]
    UpdatesAhead.wait = wait_held  # type: ignore[method-assign]
    for name in others:
        setattr(UpdatesAhead, name, of_all(name))
    try:
        yield held
    finally:
        UpdatesAhead.begin = begin  # type: ignore[method-assign]
        UpdatesAhead.wait = wait  # type: ignore[method-assign]
        for name, function in others.items():
            setattr(UpdatesAhead, name, function)
