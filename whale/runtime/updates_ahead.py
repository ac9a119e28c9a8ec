"""Updates on the host that run under the next forward, where the plan says so
(`Plan.updates_ahead`, docs/memory.md).

    UpdatesAhead   a thread that updates blocks one after the other, in the order of their use.
                   Gradients are final and the step is decided on when an update is queued, so it
                   gives what it would have given at once
    LateBlocks     whole weights (levels 1 and 2 of ZeRO) that are new on this rank, or on its host,
                   and come to the devices of all ranks of a block just before its first use
    OptimizerNow   an optimizer for some parameters with their gradients and options of now: the
                   next step drops gradients, and an LR scheduler changes options, while it works

The forward waits for each block in front of its first reader (`lowering/blocks.py`); whoever else
reads weights or states waits for all of them first (`Training.finish_ahead`).
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

logger = logging.getLogger("whale")


class UpdateAheadError(RuntimeError):
    """An update that ran under the next forward has failed; its cause is what went wrong."""


class UpdatesAhead:
    """The updates of one rank that are still to be made."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._thread: ThreadPoolExecutor | None = None
        self._pending: dict[int, Future[None]] = {}
        """by block, until somebody has waited for it"""
        self._failed: UpdateAheadError | None = None

    def begin(self, block: int, names: Sequence[str], update: Callable[[], None]) -> None:
        """Queues the update of a block. `names`: its parameters, for a message."""
        if self._thread is None:
            # one thread: blocks are done in the order in which the forward wants them
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="whale-updates")
        self._pending[block] = self._thread.submit(self._run, block, names, update)

    def _run(self, block: int, names: Sequence[str], update: Callable[[], None]) -> None:
        """Makes one update, in the thread. Behind one that failed nothing is updated any more."""
        if self._failed is not None:
            raise self._failed
        try:
            update()
        except Exception as error:
            what = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            self._failed = UpdateAheadError(
                f"rank {self._rank}: the update of block {block} ({what}) on the host, under the "
                f"forward of the next step, failed: {type(error).__name__}: {error}"
            )
            logger.error(str(self._failed))  # even if nobody asks for a weight any more
            raise self._failed from error

    def wait(self, block: int) -> None:
        """Returns when the block has its new weights; raises what went wrong, with any block."""
        if self._failed is not None:
            raise self._failed
        future = self._pending.get(block)
        if future is not None:
            future.result()
            del self._pending[block]  # only now: Ctrl-C may end the wait, and not the update

    def wait_for_all(self) -> None:
        """Returns when all blocks have their new weights and states."""
        for block in list(self._pending):
            self.wait(block)
        if self._failed is not None:
            raise self._failed

    def forget(self) -> None:
        """All weights and states are replaced: waits, and what went wrong no longer counts."""
        for future in self._pending.values():
            future.exception()
        self._pending.clear()
        self._failed = None

    def close(self) -> None:
        """Waits for all updates, and raises what went wrong; no more are queued."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self.wait_for_all()


class LateBlocks:
    """Blocks whose whole weights are brought when the forward first needs them. Ranks of a block
    need it at the same places of the same order, so they meet in the same calls.
    """

    def __init__(self, bring: Callable[[int], None]) -> None:
        """`bring`: returns when the new weights of a block are here. All its ranks call it."""
        self._bring = bring
        self._late: dict[int, None] = {}

    def expect(self, blocks: Iterable[int]) -> None:
        """These blocks have new weights, in the order of their use."""
        self._late.update(dict.fromkeys(blocks))

    def need(self, *blocks: int) -> None:
        """Returns when these blocks are here."""
        for block in blocks:
            if block in self._late:
                self._bring(block)
                del self._late[block]

    def bring_all(self) -> None:
        """Brings what no forward has needed yet. All ranks call it together."""
        self.need(*list(self._late))

    def forget(self) -> None:
        """All weights are replaced."""
        self._late.clear()


class OptimizerNow:
    """An optimizer with the gradients and options of now."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._empty = copy.copy(optimizer)
        self._empty.param_groups = []
        self._empty.state = defaultdict(dict)
        self._options: list[dict[str, Any]] = []
        """of every group; copies, since a learning rate may be a tensor that changes in place"""
        self._group_of: dict[int, int] = {}
        """id of a parameter -> its group"""
        for number, group in enumerate(optimizer.param_groups):
            options = {key: value for key, value in group.items() if key != "params"}
            self._options.append(copy.deepcopy(options))
            for parameter in group["params"]:
                self._group_of[id(parameter)] = number

    def of(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """An optimizer of the same kind for these parameters alone, as other objects in the same
        memory. What it changes in the state of one is changed for the given optimizer, too.
        """
        by_group: dict[int, list[torch.nn.Parameter]] = {}
        made = copy.copy(self._empty)
        made.state = defaultdict(dict)
        for parameter in parameters:
            same = torch.nn.Parameter(parameter.data, parameter.requires_grad)
            same.grad = parameter.grad
            made.state[same] = self._optimizer.state[parameter]
            by_group.setdefault(self._group_of[id(parameter)], []).append(same)
        made.param_groups = []
        for number, own in sorted(by_group.items()):
            made.param_groups.append({**self._options[number], "params": own})
        return made
