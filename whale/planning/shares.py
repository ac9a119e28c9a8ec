"""How many samples each micro-batch and each device gets. The sum never changes: balance moves samples, it drops none.

Even shares of n samples over k places: sizes differ by at most one, the larger first,

    share_i = floor(n / k) + (1 if i < n mod k else 0).                                        (1)

Fair shares over devices that need t_i seconds for a sample:

    minimise over integers  max_i share_i * t_i   subject to   sum_i share_i = n.              (2)

Give the samples one by one to the device that would finish its next sample first, ties to the lower index. The finishing
times handed out are the n smallest of all {m * t_i}, and any other choice has a larger one among them: so this is optimal.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import accumulate, pairwise


def even_shares(total: int, count: int) -> tuple[int, ...]:
    """Line (1): `total` samples over `count` places. A share may be 0."""
    if count < 1 or total < 0:
        raise ValueError(f"cannot share {total} samples over {count} places; need at least 0 samples and 1 place")
    share, rest = divmod(total, count)
    return (share + 1,) * rest + (share,) * (count - rest)


def micro_batch_sizes(batch_size: int, num_micro_batch: int) -> tuple[int, ...]:
    """Sizes of the contiguous micro-batches of one mini-batch; none is empty."""
    check_batch(batch_size, num_micro_batch, 1)
    return even_shares(batch_size, num_micro_batch)


def fair_shares(total: int, seconds_per_sample: Sequence[float]) -> tuple[int, ...]:
    """Line (2): the integer shares whose slowest device is fastest. A slow device may get 0 samples."""
    if total < 0 or not seconds_per_sample:
        raise ValueError(f"cannot share {total} samples over {len(seconds_per_sample)} devices; need at least 0 samples and 1 device")
    for index, seconds in enumerate(seconds_per_sample):
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"device {index} needs {seconds} seconds for a sample; give a finite number that is not negative")
    if not any(seconds_per_sample):
        return even_shares(total, len(seconds_per_sample))  # nothing to do: no share is better than another
    shares = [0] * len(seconds_per_sample)
    next_finish = [(seconds, index) for index, seconds in enumerate(seconds_per_sample)]
    heapq.heapify(next_finish)
    for _ in range(total):
        _, index = next_finish[0]
        shares[index] += 1
        heapq.heapreplace(next_finish, ((shares[index] + 1) * seconds_per_sample[index], index))
    return tuple(shares)


def intervals(shares: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Sample intervals [start, stop) of consecutive shares, from sample 0."""
    return tuple(pairwise(accumulate(shares, initial=0)))


def check_batch(batch_size: int, num_micro_batch: int, num_devices_cutting: int) -> None:
    """Refuse a mini-batch that leaves a device without a sample.

    `num_devices_cutting`: over how many devices one micro-batch is cut, in all model replicas together. The smallest
    micro-batch has floor(batch_size / num_micro_batch) samples; cutting twice (replicas, then devices) leaves the same.
    """
    if batch_size < 1 or num_micro_batch < 1 or num_devices_cutting < 1:
        raise ValueError(
            f"batch size {batch_size}, num_micro_batch {num_micro_batch} and {num_devices_cutting} devices must all be at least 1"
        )
    smallest = batch_size // num_micro_batch
    if smallest >= num_devices_cutting:
        return
    largest_num_micro_batch = batch_size // num_devices_cutting
    smaller = f", or num_micro_batch of at most {largest_num_micro_batch}" if largest_num_micro_batch else ""
    raise ValueError(
        f"batch size {batch_size} in {num_micro_batch} micro-batches leaves {smallest} samples in the smallest one, "
        f"but each is cut over {num_devices_cutting} device{'s' * (num_devices_cutting > 1)}; "
        f"use a batch of at least {num_micro_batch * num_devices_cutting}{smaller}"
    )
