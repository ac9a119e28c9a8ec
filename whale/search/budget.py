"""How much a search tries: counts, never seconds, so that every run gives the same plan."""

from __future__ import annotations

from dataclasses import dataclass

TINIEST = 40
TINY = 120
SMALL = 600
VAST = 100_000
"""operations of a model; of the last, times devices: the budgets of the search differ"""
FEW_DEVICES = 6
"""on so many, plans near to the best of the tiniest models are all drafted"""
MANY_DEVICES = 16
"""a draft on more devices takes seconds"""


@dataclass(frozen=True)
class Budget:
    """How much is tried."""

    estimates: int = 400
    cut_moves: int = 200
    """estimates of moved cuts, for each candidate that is drafted"""
    drafts: int = 8
    sure: int = 3
    """candidates that are drafted though their estimate is longer than the best step"""
    slower: float = 1.1
    """the others are drafted where their estimate is at most so many times the best step"""
    waves: int = 3
    """candidates with several stages on each group of devices that are drafted"""
    equal: int = 0
    """plans of an equal `num_task_graph` that are drafted"""
    heterogeneous: int = 2
    """candidates of replicas that are not alike that are drafted"""
    heterogeneous_slower: float = 1.02
    """those whose estimate is at most so many times the best step"""
    part_shapes: int = 1
    """shapes that are tried of every part of the devices with replicas of its own"""
    smaller: int = 2
    """candidates on fewer devices that are drafted"""
    split: int = 2
    """candidates that split the operations of heavy parameters that are drafted"""
    tensor: int = 1
    """candidates of tensor parallelism that are drafted"""
    zero: int = 3
    """candidates with ZeRO that are drafted, where memory is short"""
    neighbours: int = 24
    """points near to the best that are estimated"""
    nudges: int = 0
    """candidates that differ from one of the best in one cut, one number or one device that are
    drafted
    """
    nudged: int = 4
    """so many of the best are those that come first"""
    polished: int = 2
    """candidates that are drafted with several chunks, and with a full search for their order"""

    @staticmethod
    def for_problem(num_operations: int, num_devices: int) -> Budget:
        """Most for tiny models, whose drafts take milliseconds; little for small ones, which are
        not worth a long search; more for large ones. Estimates take longer on many devices.
        """
        estimates = max(60, 400 * 8 // max(8, num_devices))
        if num_operations < TINY:
            return Budget(
                estimates=estimates,
                drafts=30,
                equal=6,
                heterogeneous=24,
                heterogeneous_slower=1.45,
                part_shapes=4,
                smaller=6,
                nudges=_nudges(num_operations, num_devices),
            )
        if num_operations < SMALL:
            return Budget(
                estimates=min(estimates, 120),
                cut_moves=60,
                drafts=5,
                sure=1,
                waves=4,
                equal=2,
                heterogeneous=1,
                smaller=1,
                split=1,
                zero=2,
                neighbours=8,
                polished=1,
            )
        if num_operations * num_devices > VAST:
            return Budget(
                estimates=estimates,
                cut_moves=40,
                drafts=2,
                waves=0,
                heterogeneous=1,
                smaller=1,
                split=1,
                tensor=0,
                zero=0,
                neighbours=2,
                polished=0,
            )
        if num_devices > MANY_DEVICES:
            return Budget(
                estimates=max(estimates, 150),
                sure=1,
                slower=1.03,
                waves=0,
                heterogeneous=1,
                smaller=1,
                split=1,
                zero=1,
                neighbours=4,
                polished=1,
            )
        return Budget(estimates=estimates, drafts=12, waves=8, equal=6)


def _nudges(num_operations: int, num_devices: int) -> int:
    """Most on 5 and 6 devices, which can be arranged in most ways; few where drafts are slow."""
    if num_operations >= TINIEST or num_devices > FEW_DEVICES:
        return 40
    return 240 if num_devices < FEW_DEVICES - 1 else 480
