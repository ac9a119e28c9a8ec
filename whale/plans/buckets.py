"""How large the buckets are in which gradients are all-reduced: one rule for the runtime and for
the simulation.
"""

from __future__ import annotations

MANY_BUCKETS = 2
"""then half of the gradients is all-reduced under the backward; more buckets cost more than they
hide (docs/log.md)
"""
SMALL_BUCKET_BYTES = 1024**2
"""below, the time of an all-reduce is latency; DistributedDataParallel begins with as much"""


def bucket_size(total_bytes: int, most_bytes: int) -> int:
    """Bytes of one bucket for gradients of `total_bytes`, where the config allows `most_bytes`.
    Nothing hides the last bucket: a small model gets small ones.
    """
    return min(most_bytes, max(total_bytes // MANY_BUCKETS, SMALL_BUCKET_BYTES))
