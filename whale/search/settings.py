"""What the user fixed, and what is open to the search."""

from __future__ import annotations

from dataclasses import dataclass

from whale.capture.graph import user_line
from whale.config import Config
from whale.operations.nodes import trains_batch_norm
from whale.planning.offload_auto import Try, may_offload, tries
from whale.planning.problem import Problem, buffers_of_micro_batches
from whale.planning.schedules import FIXED_ORDERS
from whale.search.candidate import MemoryChoice

COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""numbers of micro-batches that are tried"""
AUTO = "auto"
CHUNK_COUNTS = (1, 2, 4)
"""stages on each group of devices that are tried"""


@dataclass(frozen=True)
class OpenSettings:
    """What holds; None: open."""

    num_stages: int | None = None
    num_micro_batch: int | None = None
    schedule: str | None = None
    recompute: bool | str | tuple[str, ...] = AUTO
    num_waves: int | None = None
    asks_for_auto_schedule: bool = False
    """the user wrote `"schedule": "auto"`, which puts several stages on a group also where their
    number is given
    """
    zero: int | None = 0
    """the level of ZeRO; None: open, level 1 also where memory is not short"""
    zero_for_speed: bool = False
    """all levels of ZeRO are compared also where memory is not short: the user said "auto" """
    homes: tuple[Try, ...] = ()
    """what may be at home outside of the devices where memory is short, that which moves least
    first
    """
    may_split: bool = False
    """operations may be split over devices"""
    why_one_micro_batch: str | None = None
    """why the number of micro-batches stays 1 though the user did not set it"""

    @staticmethod
    def of(problem: Problem) -> OpenSettings:
        """What the config of a problem leaves open."""
        config = problem.config
        why = None
        count: int | None = None
        if not is_open(config, "num_micro_batch"):
            count = config.num_micro_batch
        else:
            is_asked = config.is_given("num_micro_batch")  # "auto": the user knows
            why = why_one(problem, is_asked)
            count = 1 if why is not None else None
        given = config.recompute
        return OpenSettings(
            num_stages=None if is_open(config, "num_task_graph") else config.num_task_graph,
            num_micro_batch=count,
            schedule=None if is_open(config, "schedule") else config.schedule,
            recompute=tuple(given) if isinstance(given, list) else given,
            num_waves=config.num_waves,
            asks_for_auto_schedule=config.is_given("schedule") and config.schedule == AUTO,
            zero=_zero(problem),
            zero_for_speed=config.zero == AUTO,
            homes=_homes(problem),
            may_split=True,
            why_one_micro_batch=why,
        )

    def micro_batches(self, most: int) -> list[int]:
        """Numbers of micro-batches to try, at most so many."""
        if self.num_micro_batch is not None:
            return [self.num_micro_batch] if self.num_micro_batch <= most else []
        return [count for count in COUNTS if count <= most]

    def memory_measures(self) -> tuple[MemoryChoice, ...]:
        """What a candidate may do about its memory, cheapest first. The first is what all
        candidates are tried with; the others come where memory is short.

        Each costs more time than the one before it: parts of what ranks hold alike (ZeRO) cost the
        same messages (level 1), some in every micro-batch (2), weights besides (3). What is at home
        in the memory of the host comes behind them.
        """
        levels = (0, 1, 2, 3) if self.zero is None else (self.zero,)
        on_devices = [MemoryChoice(self.recompute, level) for level in levels]
        elsewhere = [MemoryChoice(self.recompute, each.level, each.offload) for each in self.homes]
        return (*on_devices, *elsewhere)

    def schedule_of(self, num_groups: int) -> str:
        """The schedule of a replica with so many groups: made for its costs, where open."""
        if self.schedule is not None:
            return self.schedule
        return AUTO if num_groups > 1 else "1f1b"

    def chunk_counts(self, num_groups: int) -> list[int]:
        """Numbers of stages on each of so many groups of devices.

        A number of stages that the user gave is that of a model replica. Where waves are asked for,
        it may be that of the groups as well, as in a plan by hand.
        """
        if self.num_stages is None:
            return self._chunk_counts(num_groups)
        chunks, rest = divmod(self.num_stages, num_groups)
        is_asked = self.num_waves is None or chunks == 2 * self.num_waves
        found = [chunks] if chunks and not rest and is_asked else []
        if num_groups == self.num_stages and self._asks_for_waves:
            found = self._chunk_counts(num_groups)
        return found

    @property
    def _asks_for_waves(self) -> bool:
        has_waves = self.num_waves is not None or self.schedule in ("wave", "interleaved")
        return has_waves or self.asks_for_auto_schedule

    def _chunk_counts(self, num_groups: int) -> list[int]:
        """What waves and the schedule leave open, whatever the number of stages."""
        if num_groups == 1:
            return [1]
        if self.num_waves is not None:
            return [2 * self.num_waves]
        if self.schedule in ("wave", "interleaved"):
            return [2]
        return [1] if self.schedule in FIXED_ORDERS else list(CHUNK_COUNTS)


def _zero(problem: Problem) -> int | None:
    """The level of ZeRO that holds; None: open."""
    config = problem.config
    if not is_open(config, "zero"):
        assert isinstance(config.zero, int)
        return config.zero
    return None if problem.updates_alone else 0


def _homes(problem: Problem) -> tuple[Try, ...]:
    """Homes outside of the devices that the cluster has and the user left open."""
    if not may_offload(problem):
        return ()
    return tuple(each for each in tries(problem) if each.offload.is_any)


def is_open(config: Config, key: str) -> bool:
    """Whether a setting is the search's to choose: not given, or given as "auto"."""
    return not config.is_given(key) or getattr(config, key) in (AUTO, None)


def settled(config: Config) -> Config:
    """The config with the numbers that planning needs where the user said "auto"."""
    changes: dict[str, int | None] = {}
    if config.num_micro_batch == AUTO:  # type: ignore[comparison-overlap]
        changes["num_micro_batch"] = 1
    if config.num_task_graph == AUTO:  # type: ignore[comparison-overlap]
        changes["num_task_graph"] = None
    return config.replace(**changes) if changes else config


def why_one(problem: Problem, is_asked: bool) -> str | None:
    """Why results depend on the number of micro-batches by definition, if they do, and what lets
    there be more. `is_asked`: the user said "auto", which lets batch statistics be those of
    micro-batches.
    """
    captured = problem.captured
    if problem.not_additive is not None or any(
        "all_reduce" in node.meta for node in captured.compute_nodes()
    ):
        return (
            'the loss is no sum over samples; with "loss_per_micro_batch": true and a number, that '
            "of each micro-batch is taken alone"
        )
    changes = '"num_micro_batch" as a number or "auto" changes that'
    if problem.config.loss_per_micro_batch and not is_asked:
        return f'"loss_per_micro_batch": the loss depends on their number. {changes}'
    for node in captured.compute_nodes():
        if trains_batch_norm(node) and not is_asked:
            where = user_line(node)
            return f"batch norms ({where}) take their statistics over each of them. {changes}"
    changed = [] if is_asked else buffers_of_micro_batches(captured)
    if changed:
        line = user_line(captured.buffer_updates[changed[0]])
        return f"buffer {changed[0]} ({line}) changes with each of them. {changes}"
    return None
