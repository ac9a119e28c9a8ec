"""How fast the core of this process is at a moment: fixed work, timed before and after whatever is
measured.

Another guest of the same processor makes a core up to twice as slow, for a second or for ten, and
no process here can see it. A process that shares the core by turns is another matter, and does not
count here: this is CPU time, which does not pass meanwhile.
"""

from __future__ import annotations

import time

import torch

NEARLY = 1.10
"""a core is fast when it is no slower than this, against its own best"""
BEST = 0.05
"""this part of all looks at a core are its best ones"""


class Speed:
    """Of one core, over the whole run. A device that is no core has no such neighbours: it always
    looks fast.
    """

    def __init__(self, is_core: bool = True) -> None:
        self._is_core = is_core
        self._looks: list[float] = []
        self._small = torch.ones(64, 64)
        self._large = torch.ones(192, 192)
        self._out = torch.empty(64, 64)
        self._out_large = torch.empty(192, 192)

    def look(self) -> float:
        """Seconds of about a millisecond of products, memory and calls."""
        if not self._is_core:
            self._looks.append(1e-3)
            return self._looks[-1]
        # what was measured before has used the caches: a look after a large copy took 1.1 to 1.15
        # times as long
        self._work()
        start = time.thread_time()
        self._work()
        self._looks.append(time.thread_time() - start)
        return self._looks[-1]

    def _work(self) -> None:
        torch.mm(self._large, self._large, out=self._out_large)
        for _ in range(60):
            torch.mm(self._small, self._small, out=self._out)
            torch.add(self._small, self._out, out=self._out)
            torch.relu_(self._out[:1])

    @property
    def best_s(self) -> float:
        """A look at this core when it is fast, as far as is known up to now."""
        return sorted(self._looks)[int(BEST * len(self._looks))]

    def slowness(self, look_s: float) -> float:
        """Against the best of this core."""
        return look_s / self.best_s
