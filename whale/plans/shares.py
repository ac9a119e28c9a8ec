"""How many samples each micro-batch and each device gets. The sum never changes: balance moves
samples, it drops none.

Even shares of n samples over k places: sizes differ by at most one, the larger first,

    share_i = floor(n / k) + (1 if i < n mod k else 0).                                        (1)

Best shares over heterogeneous devices. Device i needs f_i + m * t_i seconds for m > 0 samples,
nothing for none, and its memory takes at most c_i samples; each gets at least a (0, or 1 where
every device must take part):

    minimise over integers  max_i (f_i + share_i * t_i) [share_i > 0]
    subject to  sum_i share_i = n,  a <= share_i <= c_i.                                       (2)

`best_shares` gives the samples one by one to the device that would finish its next sample first,
ties to the lower index. Finishing times of a device only rise, so the n times handed out are the n
smallest that can be handed out, and any other choice has a larger one among them: so this is
optimal.

The time of the slowest device with 0, 1, ... n samples is the sequence of these finishing times
(`slowest_times`). It only rises as well, so a model replica made of several VirtualDevices is a
device in turn: with m samples it takes the longest of theirs, and (2) shares a micro-batch over
replicas in the same way (`shares_of_series`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

UNLIMITED = 2**62
"""samples: more than any mini-batch has"""


@dataclass(frozen=True)
class Load:
    """What samples cost on one device."""

    sample_s: float
    """t_i"""
    fixed_s: float = 0.0
    """f_i: what a micro-batch costs whatever its size"""
    most: int = UNLIMITED
    """c_i: samples that fit into its memory"""

    def seconds(self, num_samples: int) -> float:
        return self.fixed_s + num_samples * self.sample_s if num_samples else 0.0


Made = TypeVar("Made")


class DoesNotFit(ValueError):
    """Memory is too small for all samples."""


class NotEnoughMemory(DoesNotFit):
    """Memory is too small, with the numbers but without a suggestion: the planner looks for one by
    trying (`suggestions.py`).
    """

    def __init__(self, text: str, is_over_full: bool = False) -> None:
        """`is_over_full`: a device is, before the first sample."""
        super().__init__(text)
        self.is_over_full = is_over_full


def those_that_fit(makers: Iterable[Callable[[], Made]]) -> Iterator[Made]:
    """Gives what each call makes, without those that raise `DoesNotFit`; raises the last of these
    errors where nothing was made.
    """
    refused: DoesNotFit | None = None
    is_any_made = False
    for make in makers:
        try:
            made = make()
        except DoesNotFit as error:
            refused = error
            continue
        is_any_made = True
        yield made
    if refused is not None and not is_any_made:
        raise refused


def even_shares(total: int, count: int) -> tuple[int, ...]:
    """Line (1): `total` samples over `count` places. A share may be 0."""
    if count < 1 or total < 0:
        raise ValueError(
            f"cannot share {total} samples over {count} places; need at least 0 samples and 1 place"
        )
    share, rest = divmod(total, count)
    return (share + 1,) * rest + (share,) * (count - rest)


def micro_batch_sizes(batch_size: int, num_micro_batch: int) -> tuple[int, ...]:
    """Sizes of the contiguous micro-batches of one mini-batch; none is empty."""
    check_batch(batch_size, num_micro_batch, 1)
    return even_shares(batch_size, num_micro_batch)


def best_shares(total: int, loads: Sequence[Load], least: int = 0) -> tuple[int, ...]:
    """Line (2): the integer shares whose slowest device is fastest. A slow or full device may get
    `least` samples.
    """
    _check_loads(total, loads)
    alike = len({(load.sample_s, load.fixed_s) for load in loads}) == 1
    even = even_shares(total, len(loads))
    if alike and min(even) >= least and max(even) <= min(load.most for load in loads):
        return even  # also where nothing takes time, so that no share is better than another
    return _one_by_one(
        total, [load.seconds for load in loads], [load.most for load in loads], least
    )


def slowest_times(total: int, loads: Sequence[Load], least: int = 0) -> list[float]:
    """Seconds of the slowest device when `m` samples are shared best, for m = 0 .. total; infinity
    where they do not fit.
    """
    _check_loads(total, loads)
    if min(load.most for load in loads) < least:
        return [0.0] + [math.inf] * total
    first = least * len(loads)
    times = [0.0] * (total + 1)
    shares = [least] * len(loads)
    slowest = max(load.seconds(least) for load in loads)
    nexts = [
        (load.seconds(least + 1), index) for index, load in enumerate(loads) if load.most > least
    ]
    heapq.heapify(nexts)
    for number in range(1, total + 1):
        if number > first and nexts:
            finish, index = nexts[0]
            shares[index] += 1
            slowest = max(slowest, finish)
            if shares[index] < loads[index].most:
                heapq.heapreplace(nexts, (loads[index].seconds(shares[index] + 1), index))
            else:
                heapq.heappop(nexts)
        elif number > first:
            slowest = math.inf
        times[number] = slowest if number >= first else math.inf
    return times


def shares_of_series(
    total: int, series: Sequence[Sequence[float]], least: int = 0
) -> tuple[int, ...]:
    """Best shares over places where `series[i][m]` seconds pass with m samples; infinity: that many
    do not fit.
    """
    different = {id(each): each for each in series}  # replicas that are alike have one series
    alike = all(each == series[0] for each in different.values())
    even = even_shares(total, len(series))
    if alike and min(even) >= least and math.isfinite(series[0][max(even)]):
        return even
    most_of = {}
    for key, each in different.items():
        fitting = (number for number in range(total, -1, -1) if math.isfinite(each[number]))
        most_of[key] = next(fitting, -1)
    most = [most_of[id(each)] for each in series]
    return _one_by_one(total, [each.__getitem__ for each in series], most, least)


def _one_by_one(
    total: int, seconds: Sequence[Callable[[int], float]], most: Sequence[int], least: int
) -> tuple[int, ...]:
    """The greedy of line (2)."""
    low = [index for index, each in enumerate(most) if each < least]
    if low or sum(min(each, total) for each in most) < total:
        capacity = " + ".join(str(max(0, min(each, total))) for each in most)
        each_needs = f" and each of the {len(most)} at least {least}" if low else ""
        raise DoesNotFit(
            f"{total} samples are to be shared{each_needs}, but memory holds {capacity}"
        )
    if total < least * len(most):
        raise DoesNotFit(f"{total} samples cannot give {least} to each of {len(most)} places")
    shares = [least] * len(most)
    nexts = (
        [(seconds[index](least + 1), index) for index in range(len(most)) if most[index] > least]
        if total > least * len(most)
        else []
    )
    heapq.heapify(nexts)
    for _ in range(total - least * len(most)):
        _, index = nexts[0]
        shares[index] += 1
        if shares[index] < most[index] and shares[index] < total:
            heapq.heapreplace(nexts, (seconds[index](shares[index] + 1), index))
        else:
            heapq.heappop(nexts)
    return tuple(shares)


def _check_loads(total: int, loads: Sequence[Load]) -> None:
    if total < 0 or not loads:
        raise ValueError(
            f"cannot share {total} samples over {len(loads)} devices; need at least 0 samples and "
            "1 device"
        )
    for index, load in enumerate(loads):
        for seconds in (load.sample_s, load.fixed_s):
            if not (math.isfinite(seconds) and seconds >= 0):
                raise ValueError(
                    f"device {index} needs {seconds} seconds for a sample; give a finite number "
                    "that is not negative"
                )


def intervals(shares: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Sample intervals [start, stop) of consecutive shares, from sample 0."""
    return tuple(pairwise(accumulate(shares, initial=0)))


def check_batch(batch_size: int, num_micro_batch: int, num_devices_cutting: int) -> None:
    """Refuse a mini-batch that leaves a device without a sample.

    `num_devices_cutting`: over how many devices one micro-batch is cut, in all model replicas
    together. The smallest micro-batch has floor(batch_size / num_micro_batch) samples; cutting
    twice (replicas, then devices) leaves the same.
    """
    if batch_size < 1 or num_micro_batch < 1 or num_devices_cutting < 1:
        raise ValueError(
            f"batch size {batch_size}, num_micro_batch {num_micro_batch} and "
            f"{num_devices_cutting} devices must all be at least 1"
        )
    smallest = batch_size // num_micro_batch
    if smallest >= num_devices_cutting:
        return
    devices = f"{num_devices_cutting} device{'s' * (num_devices_cutting > 1)}"
    if num_micro_batch == 1:
        what = f"a mini-batch of {batch_size} samples cannot be cut over {devices}, each needs one"
    else:
        what = (
            f"batch size {batch_size} in {num_micro_batch} micro-batches leaves {smallest} samples "
            f"in the smallest one, but each is cut over {devices}, which need one each"
        )
    remedies = [f"a batch of at least {num_micro_batch * num_devices_cutting}"]
    largest_num_micro_batch = batch_size // num_devices_cutting
    if largest_num_micro_batch:
        remedies.append(f"num_micro_batch of at most {largest_num_micro_batch}")
    remedies.append("fewer devices")
    if num_devices_cutting > 1:
        remedies.append('pipeline stages, which do not cut it (`"num_task_graph"`)')
    raise ValueError(f"{what}. Try: {', or '.join(remedies)}")
