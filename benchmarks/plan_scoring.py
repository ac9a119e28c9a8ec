"""One simulator for plans of any planner, on measured layer times and network curves.

A plan is model replicas (`Line`): stages of layers on GPUs, a number of micro-batches and their
size. All plans are run in the same way, as Whale's runtime works:

    schedule    1F1B on every line
    messages    go while the GPUs compute; GPUs of a host share its network card
                (`simulation/communication.py`)
    gradients   summed over all holders of a layer, in buckets, while the last backward runs
    update      as measured, once all gradients are there

Layers that are cut over the GPUs of a host (tensor parallelism) have their measured times, which
hold their communication.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from benchmarks.gpu_measurements import LayerRow, Measurements
from benchmarks.measured_models import SEQUENCE, ModelShape
from benchmarks.measured_runtime import BYTES, parameters
from whale.cluster.network import Link, Network, PairLink
from whale.plans.plan import DEFAULT_BUCKET_BYTES
from whale.simulation.communication import AllReduce, Links


@dataclass(frozen=True)
class ScoredStage:
    """Some layers on one GPU, or cut over some GPUs of one host."""

    layers: tuple[tuple[int, float], ...]
    """(number of a layer, the part of it that runs here)"""
    gpu: int
    """number of the (first) GPU"""
    tensor_parallel: int = 1

    @property
    def whole_layers(self) -> frozenset[int]:
        return frozenset(number for number, _ in self.layers)


@dataclass(frozen=True)
class Line:
    """One model replica: stages in pipeline order."""

    stages: tuple[ScoredStage, ...]
    micro_batch: float
    num_micro_batches: int


@dataclass(frozen=True)
class ScoredCluster:
    """GPUs, hosts by hosts; kinds are those of the folder."""

    kinds: tuple[str, ...]
    hosts: tuple[str, ...]
    network: Network

    @staticmethod
    def of(counts: Mapping[str, int], measured: Measurements, gpus_a_host: int) -> ScoredCluster:
        """Hosts of so many GPUs of one kind, named after it: `A100-40.0`."""
        kinds = []
        hosts = []
        for kind, count in counts.items():
            for number in range(count):
                kinds.append(kind)
                hosts.append(f"{kind}.{number // gpus_a_host}")
        pairs = []
        for a in counts:
            for b in counts:
                link = link_between(measured, a, b, gpus_a_host)
                pairs.append(PairLink((f"{a}.*", f"{b}.*"), link))
        inside = [measured.inside_host(kind, gpus_a_host) for kind in counts]
        slowest = min((link for link in inside if link is not None), key=lambda x: x.bytes_per_s)
        network = Network(tuple(hosts), slowest, pairs[0].link, pair_links=tuple(pairs))
        return ScoredCluster(tuple(kinds), tuple(hosts), network)


def link_between(measured: Measurements, a: str, b: str, gpus_a_host: int) -> Link:
    """What one GPU reaches, and what all GPUs of a host reach together."""
    one = measured.between_hosts(a, b, 1)
    together = measured.between_hosts(a, b, gpus_a_host)
    assert one is not None and together is not None, f"no link between {a} and {b}"
    return Link(one.bytes_per_s, one.latency_s, one.curve, together.bytes_per_s)


@dataclass(frozen=True)
class Score:
    """What a plan reaches."""

    step_s: float
    compute_s: float
    """of the busiest GPU"""

    @property
    def steps_per_s(self) -> float:
        return 1.0 / self.step_s


class Scoring:
    """Simulates plans of one model on one cluster."""

    def __init__(self, shape: ModelShape, cluster: ScoredCluster, measured: Measurements) -> None:
        self.shape = shape
        self.cluster = cluster
        self.measured = measured

    # ---- times of stages

    def seconds(self, stage: ScoredStage, samples: float) -> tuple[float, float, float]:
        """Forward, backward and update of a stage for one micro-batch."""
        kind = self.cluster.kinds[stage.gpu]
        rows = [
            row
            for row in self.measured.layers[self.shape.name][kind]
            if row.tensor_parallel == stage.tensor_parallel
        ]
        if not rows:
            raise ValueError(f"no times on {kind} at tensor_parallel {stage.tensor_parallel}")
        total = [0.0, 0.0, 0.0]
        for number, part in stage.layers:
            for place in range(3):
                total[place] += part * self._layer(rows, number, samples, place)
        forward, backward, update = total
        return forward, backward, update

    def _layer(self, rows: Sequence[LayerRow], number: int, samples: float, place: int) -> float:
        points = sorted(
            (row.micro_batch, row.of(number, self.shape.num_layers)[place]) for row in rows
        )
        if place == 2:  # an update does not depend on the samples
            return points[0][1]
        return _interpolated(points, samples)

    # ---- a step

    def score(self, lines: Sequence[Line]) -> Score:
        """The step of a plan."""
        links = Links(self.cluster.network, 1.0)
        run = _Run(self, lines, links)
        run.simulate()
        compute = run.busy
        end = run.end_of_gradients()
        update = max(
            self.seconds(stage, line.micro_batch)[2] for line in lines for stage in line.stages
        )
        return Score(end + update, max(compute.values()))

    def bound_steps_per_s(self, batch: int) -> float:
        """Steps per second that no plan can beat: all GPUs compute all the time at the best size of
        a micro-batch, and nothing is sent.
        """
        samples_per_s = 0.0
        for kind in self.cluster.kinds:
            rows = [
                row
                for row in self.measured.layers[self.shape.name][kind]
                if row.tensor_parallel == 1
            ]
            samples_per_s += max(row.micro_batch / self._whole(row) for row in rows)
        return samples_per_s / batch

    def network_bound_s(self) -> float:
        """Seconds that the network card of a host needs at least where every host holds all
        weights: it sends the gradients once, at the best rate of any link.
        """
        fastest = max(
            (pair.link.card_bytes_per_s or pair.link.bytes_per_s)
            for pair in self.cluster.network.pair_links
        )
        return parameters(self.shape, range(self.shape.num_layers)) * BYTES / fastest

    def _whole(self, row: LayerRow) -> float:
        layers = (row.of(number, self.shape.num_layers) for number in range(self.shape.num_layers))
        return sum(forward + backward for forward, backward, _ in layers)


def _interpolated(points: Sequence[tuple[int, float]], samples: float) -> float:
    """On the straight line through the two nearest points."""
    if len(points) == 1:
        return points[0][1] * samples / points[0][0]
    place = next((i for i, (size, _) in enumerate(points) if samples <= size), len(points) - 1)
    (a, first), (b, second) = points[max(0, place - 1)], points[max(1, place)]
    return max(first + (second - first) * (samples - a) / (b - a), first * min(1.0, samples / a))


@dataclass
class _Worker:
    """A stage of a line, going through its order."""

    line: int
    stage: int
    order: list[tuple[str, int]]
    place: int = 0
    free_s: float = 0.0
    last_backward: tuple[float, float] = (0.0, 0.0)


class _Run:
    """One step, event by event."""

    def __init__(self, scoring: Scoring, lines: Sequence[Line], links: Links) -> None:
        self.scoring = scoring
        self.lines = lines
        self.links = links
        self.busy: dict[int, float] = {}
        self.workers: dict[tuple[int, int], _Worker] = {}
        self.times: dict[tuple[int, int], tuple[float, float, float]] = {}
        for index, line in enumerate(lines):
            for stage in range(len(line.stages)):
                order = one_forward_one_backward(stage, len(line.stages), line.num_micro_batches)
                self.workers[index, stage] = _Worker(index, stage, order)
                self.times[index, stage] = scoring.seconds(line.stages[stage], line.micro_batch)
        self.arrived: dict[tuple[int, int, str, int], float] = {}
        self.queue: list[tuple[float, int, int, int, str, int]] = []
        """(moment, 0: a result is sent, 1: an action may start, line, stage, action)"""

    def simulate(self) -> None:
        for worker in self.workers.values():
            self._try(worker, 0.0)
        while self.queue:
            now, what, line, stage, action, number = heapq.heappop(self.queue)
            worker = self.workers[line, stage]
            if what == 0:
                self._send(worker, action, number, now)
            elif worker.place < len(worker.order) and worker.order[worker.place] == (
                action,
                number,
            ):
                self._run(worker, max(now, worker.free_s))

    def _try(self, worker: _Worker, now: float) -> None:
        """Queues the next action of a stage if what it needs is there or on its way."""
        if worker.place == len(worker.order):
            return
        action, number = worker.order[worker.place]
        last = len(self.lines[worker.line].stages) - 1
        needs = (action == "F" and worker.stage > 0) or (action == "B" and worker.stage < last)
        there = self.arrived.get((worker.line, worker.stage, action, number)) if needs else 0.0
        if there is not None:
            start = max(now, there, worker.free_s)
            heapq.heappush(self.queue, (start, 1, worker.line, worker.stage, action, number))

    def _run(self, worker: _Worker, now: float) -> None:
        action, number = worker.order[worker.place]
        forward, backward, _ = self.times[worker.line, worker.stage]
        seconds = forward if action == "F" else backward
        gpu = self.lines[worker.line].stages[worker.stage].gpu
        self.busy[gpu] = self.busy.get(gpu, 0.0) + seconds
        worker.free_s = now + seconds
        worker.place += 1
        if action == "B":
            worker.last_backward = (now, now + seconds)
        heapq.heappush(self.queue, (worker.free_s, 0, worker.line, worker.stage, action, number))
        self._try(worker, worker.free_s)

    def _send(self, worker: _Worker, action: str, number: int, now: float) -> None:
        line = self.lines[worker.line]
        to = worker.stage + (1 if action == "F" else -1)
        if not 0 <= to < len(line.stages):
            return
        source = line.stages[worker.stage]
        target = line.stages[to]
        num_bytes = line.micro_batch * SEQUENCE * self.scoring.shape.width * BYTES
        # GPUs of a tensor-parallel group send their parts at the same time
        parts = min(source.tensor_parallel, target.tensor_parallel)
        arrival = now
        for part in range(parts):
            arrival = max(
                arrival,
                self.links.send(
                    f"{action}{number}",
                    source.gpu + part,
                    target.gpu + part,
                    num_bytes / parts,
                    now,
                ),
            )
        self.arrived[worker.line, to, action, number] = arrival
        self._try(self.workers[worker.line, to], now)

    # ---- gradients

    @cached_property
    def _holders(self) -> dict[tuple[tuple[int, int], ...], list[int]]:
        """Layers by the stages (line, stage) that hold them."""
        of_layer: dict[int, list[tuple[int, int]]] = {}
        for (line, stage), _ in self.workers.items():
            for number in self.lines[line].stages[stage].whole_layers:
                of_layer.setdefault(number, []).append((line, stage))
        found: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for number in sorted(of_layer, reverse=True):  # backward ends with the first layers
            found.setdefault(tuple(sorted(of_layer[number])), []).append(number)
        return found

    def end_of_gradients(self) -> float:
        """When all sums of gradients are over, as `simulation/simulate.py` times them."""
        end = max(worker.free_s for worker in self.workers.values())
        free: dict[tuple[tuple[int, int], ...], float] = {}
        by_closing = sorted(
            self._holders.items(),
            key=lambda item: max(self.workers[place].last_backward[1] for place in item[0]),
        )
        for holders, layers in by_closing:
            if len(holders) > 1:
                end = max(end, self._reduce(holders, layers, free))
        return end

    def _reduce(
        self,
        holders: tuple[tuple[int, int], ...],
        layers: Sequence[int],
        free: dict[tuple[tuple[int, int], ...], float],
    ) -> float:
        each = self._all_reduce(holders, layers)
        first = 0.0
        end = 0.0
        for place in holders:
            start, closed = self.workers[place].last_backward
            first = max(first, each.first_ready(closed, closed - start))
            end = max(end, each.end(closed, closed - start, free.get(holders, 0.0)))
        for host, seconds in each.leaving:
            end = max(end, self.links.book_card(host, seconds, max(first, free.get(holders, 0.0))))
        free[holders] = end
        return end

    def _all_reduce(self, holders: tuple[tuple[int, int], ...], layers: Sequence[int]) -> AllReduce:
        """A ring over the holders in the order of their GPUs. One that is cut over the GPUs of a
        host sends its parts at the same time.
        """
        network = self.links.network
        stages = [self.lines[line].stages[stage] for line, stage in holders]
        stages.sort(key=lambda stage: stage.gpu)
        num_bytes = float(parameters(self.scoring.shape, layers) * BYTES)
        num_buckets = max(1, math.ceil(num_bytes / DEFAULT_BUCKET_BYTES))
        number = len(stages)
        one_link = 2 * (number - 1) / number * num_bytes
        slowest = 0.0
        leaving: dict[str, float] = {}
        members: dict[str, int] = {}
        for stage in stages:
            host = network.hosts[stage.gpu]
            members[host] = members.get(host, 0) + stage.tensor_parallel
        for here, there in zip(stages, (*stages[1:], stages[0])):
            link = network.link(here.gpu, there.gpu)
            host = network.hosts[here.gpu]
            other = network.hosts[there.gpu]
            if host != other:
                link = link.together(min(members[host], members[other]))
            rate = link.rate(num_bytes / number / num_buckets)
            if host != other:
                leaving[host] = leaving.get(host, 0.0) + link.card_s(one_link)
            slowest = max(
                slowest, one_link / rate + 2 * (number - 1) * num_buckets * link.latency_s
            )
        ranks = tuple(stage.gpu for stage in stages)
        return AllReduce((0,), ranks, slowest, num_buckets, tuple(leaving.items()))


def one_forward_one_backward(stage: int, num_stages: int, number: int) -> list[tuple[str, int]]:
    """1F1B: ("F" or "B", micro-batch) of a stage, in order."""
    ahead = min(num_stages - stage - 1, number)
    order = [("F", k) for k in range(ahead)]
    for k in range(number):
        if ahead + k < number:
            order.append(("F", ahead + k))
        order.append(("B", k))
    return order
