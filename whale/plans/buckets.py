"""How large the buckets are in which gradients are summed: one rule for the runtime and for the
simulation.
"""

from __future__ import annotations

# then half of the gradients is summed under the backward; more buckets cost more than they hide:
# docs/log.md
MANY_BUCKETS = 2
SMALL_BUCKET_BYTES = (
    1024**2
)  # below, the time of a sum is latency; DistributedDataParallel begins with as much


def bucket_size(total_bytes: int, most_bytes: int) -> int:
    """Of gradients of `total_bytes`, where the config allows `most_bytes`. Nothing hides the last
    bucket: a small model gets small ones.
    """
    return min(most_bytes, max(total_bytes // MANY_BUCKETS, SMALL_BUCKET_BYTES))
