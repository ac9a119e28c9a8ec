"""The exactness table: every model of `tests/zoo.py` under every plan below must train like local
PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BATCH_SIZE = 10  # not divisible by 3 or 4: shares and micro-batches are uneven
NUM_STEPS = 3


@dataclass(frozen=True)
class PlanCase:
    """One way to run a model."""

    name: str
    num_ranks: int
    config: dict[str, Any] = field(default_factory=dict)
    stages: tuple[int, ...] = ()
    """devices of each annotated stage: (2, 1) is replicate(2) -> replicate(1); none = no annotation
    """
    one_tensor: bool = False
    """labels=input_ids, the very same tensor object"""
    kinds: tuple[str, ...] = ()
    """kinds of devices by rank, for plans that balance; none = all alike"""
    only_for: tuple[str, ...] = ()
    """models that `make test` runs under this plan, the others are slow (tests/conftest.py); none
    named: all of them run
    """

    @property
    def num_micro_batch(self) -> int:
        return int(self.config.get("num_micro_batch", 1))


PLANS = (
    PlanCase("1 rank", 1, only_for=("chain", "gpt2", "batch_norm")),
    PlanCase("1 rank, 4 micro-batches", 1, {"num_micro_batch": 4}),
    PlanCase("DP 2", 2, only_for=("chain", "gpt2", "batch_norm")),
    PlanCase("DP 3, batch 10", 3),
    PlanCase("2 stages", 2, {"num_micro_batch": 5}, (1, 1)),
    PlanCase(
        "2 stages, gpipe, 4 of 10",
        2,
        {"num_micro_batch": 4, "schedule": "gpipe"},
        (1, 1),
        only_for=("branches", "bert", "vit"),
    ),
    PlanCase("3 stages", 3, {"num_micro_batch": 4}, (1, 1, 1)),
    PlanCase("2 stages x DP 2", 4, {"num_micro_batch": 2}, (1, 1)),
    PlanCase("replicate(2) -> replicate(1)", 3, {"num_micro_batch": 3}, (2, 1)),
    PlanCase(
        "replicate(1) -> replicate(3)",
        4,
        {"num_micro_batch": 2},
        (1, 3),
        only_for=("branches", "tied", "gpt2", "t5"),
    ),
    PlanCase("auto cut into 4", 4, {"num_micro_batch": 4, "num_task_graph": 4}),
    PlanCase("DP 2, V100 + T4", 2, {"strategy": "data"}, kinds=("V100-32GB", "T4")),
    PlanCase(
        "DP 3, one 160 times slower, 2 micro-batches",
        3,
        {"num_micro_batch": 2, "strategy": "data"},
        kinds=("P100", "CPU", "V100-16GB"),
    ),
    PlanCase(
        "2 stages x DP 2, mixed",
        4,
        {"num_micro_batch": 2},
        (1, 1),
        kinds=("T4", "V100-32GB", "P100", "V100-32GB"),
    ),
    PlanCase(
        "auto cut into 2 x DP 2, mixed",
        4,
        {"num_micro_batch": 2, "num_task_graph": 2},
        kinds=("T4", "A100-40GB", "T4", "V100-16GB"),
    ),
    PlanCase("2 stages, labels=input_ids", 2, {"num_micro_batch": 2}, (1, 1), one_tensor=True),
)


# ---- model replicas that are not alike


def _replica(*stages: list[int], **settings: Any) -> dict[str, Any]:
    return {"stages": list(stages), **settings}


UNLIKE_PLANS = (
    PlanCase(
        "1 device beside 2 stages",
        3,
        {"replicas": [_replica([0]), _replica([1], [2], num_micro_batch=2)]},
        only_for=("chain", "gpt2", "t5"),
    ),
    PlanCase(
        "1 device with 2 micro-batches beside 4 stages with 3",
        5,
        {
            "replicas": [
                _replica([4], samples=4, num_micro_batch=2),
                _replica([1], [0], [3], [2], num_micro_batch=3, schedule="auto"),
            ]
        },
        only_for=("chain", "t5"),
    ),
    PlanCase(
        "3 stages and 4 stages on 7 devices",
        7,
        {
            "replicas": [
                _replica([0], [1], [2], num_micro_batch=2, schedule="zero-bubble"),
                _replica([3], [4], [5], [6], num_micro_batch=3),
            ]
        },
        only_for=("gpt2",),
    ),
    PlanCase(
        "stages of 3 and 4 devices",
        7,
        {"replicas": [_replica([0, 1, 2], [3, 4, 5, 6])], "num_micro_batch": 2},
        only_for=("gpt2",),
    ),
    PlanCase(
        "2 alike beside 2 stages, the second on 2 devices",
        5,
        {"replicas": [_replica([1]), _replica([3]), _replica([2], [0, 4], samples=5)]},
        only_for=("chain",),
    ),
)
"""not for models with batch statistics, whose results depend on the micro-batches"""
