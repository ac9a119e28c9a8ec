"""Candidates whose groups split operations: heavy parameters over a grid, everything else by
samples on the same devices.

    group_shapes        groups of devices that split together: all devices, or parts of a host
    split_candidates    for every group, number of micro-batches and set of heavy parameters
                        (`split_parts.py`): an estimate, and the candidate

An estimate is that of data parallelism on the same devices with the heavy parameters cut
(`Outline.with_split`: less to hold, to all-reduce and to update), and lines (1) of `split_parts.py`
for what is sent instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from whale.cluster.cluster import Cluster
from whale.search.candidate import ANY_GRID, Candidate, DeviceGroup, MemoryChoice, ReplicaChoice
from whale.search.estimate import Estimator
from whale.search.outline import Outline
from whale.search.point import Point, Shape
from whale.search.settings import OpenSettings
from whale.search.split_parts import LargeWeight, heavy_sets, large_weights

FEW_COUNTS = 6
"""numbers of micro-batches that are tried, from the least on"""


@dataclass(frozen=True)
class SplitCandidate:
    """A candidate with a grid, and what it is taken to do."""

    step_s: float
    """estimated"""
    candidate: Candidate


def group_shapes(cluster: Cluster) -> Iterator[Shape]:
    """One stage on groups that split together: all devices; the devices of each host, or parts of
    them of equal size, as one model replica each, where all hosts are alike.
    """
    everything = tuple(range(cluster.num_devices))
    yield Shape(((everything,),))
    hosts: dict[str, list[int]] = {}
    for device in cluster.devices:
        hosts.setdefault(device.host, []).append(device.rank)
    kinds = {tuple(cluster.devices[rank].kind for rank in ranks) for ranks in hosts.values()}
    if len(kinds) > 1:
        return
    per_host = len(next(iter(hosts.values())))
    for size in range(per_host, 1, -1):
        if per_host % size or size == cluster.num_devices:
            continue
        replicas = []
        for ranks in hosts.values():
            for start in range(0, per_host, size):
                replicas.append((tuple(ranks[start : start + size]),))
        yield Shape(tuple(replicas))


def split_candidates(
    outline: Outline, settings: OpenSettings, may_share: bool
) -> list[SplitCandidate]:
    """Candidates that fit by their estimates, the best first. `may_share`: model replicas may share
    a mini-batch.
    """
    weights = [each for each in large_weights(outline) if _may_cut(outline, each)]
    if not weights or settings.num_stages not in (None, 1):
        return []
    found: dict[Candidate, float] = {}
    memory = MemoryChoice(settings.recompute)
    for shape in group_shapes(outline.problem.cluster):
        number = len(shape.replicas[0][0])
        if not may_share and shape.num_replicas > 1:
            continue
        most = outline.problem.batch_size // shape.num_replicas
        for count in settings.micro_batches(most)[:FEW_COUNTS]:
            num_samples = outline.problem.batch_size / count / shape.num_replicas
            for heavy in heavy_sets(weights, num_samples, count, number):
                step_s = _estimate(outline, settings, shape, count, heavy)
                if step_s != float("inf"):
                    found[_candidate(shape, count, heavy, memory)] = step_s
    ranked = [SplitCandidate(step_s, candidate) for candidate, step_s in found.items()]
    return sorted(ranked, key=lambda each: each.step_s)


def _may_cut(outline: Outline, weight: LargeWeight) -> bool:
    """Whether results stay those of local training: an optimizer that looks at whole parameters
    gets vectors and matrices whole on one rank, but no stacks of them.
    """
    problem = outline.problem
    if not problem.updates_alone:
        return False
    shape = problem.captured.state[weight.name].shape
    return not problem.updates_whole or len(shape) <= 2


def _estimate(
    outline: Outline,
    settings: OpenSettings,
    shape: Shape,
    num_micro_batch: int,
    heavy: tuple[LargeWeight, ...],
) -> float:
    """Seconds of a step; infinite where it does not fit."""
    number = len(shape.replicas[0][0])
    cut = outline.with_split([each.name for each in heavy], number)
    estimate = Estimator(cut, settings.recompute).estimate(Point(shape, num_micro_batch))
    samples = outline.problem.batch_size / num_micro_batch / shape.num_replicas
    sent = sum(each.sent_bytes(samples, number) for each in heavy)
    cluster = outline.problem.cluster
    ranks = shape.replicas[0][0]
    return estimate.step_s + num_micro_batch * sent / cluster.ring_bytes_per_s(ranks)


def _candidate(
    shape: Shape, num_micro_batch: int, heavy: tuple[LargeWeight, ...], memory: MemoryChoice
) -> Candidate:
    names = tuple(each.name for each in heavy)
    replicas = []
    for stages in shape.replicas:
        group = DeviceGroup(stages[0], ANY_GRID, names)
        replicas.append(ReplicaChoice((group,), num_micro_batch, starts=(0,)))
    return Candidate(tuple(replicas), memory)
