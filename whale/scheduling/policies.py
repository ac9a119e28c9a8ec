"""Which keys and policies the passes of a search try.

The key of a job is about the time at which it would run in a pipeline that takes a new micro-batch
every so often:

    forward    slope T m + forward h(s)
    backward   slope T m + back (b(s) - b_end) + b_end + offset T

T is the work of the busiest device for one micro-batch; h(s), b(s) are the earliest starts of
forward and backward of stage s for a micro-batch that is alone, messages included, and b_end that
of the last stage. A high slope finishes old micro-batches first, a low one takes them together; a
low offset puts backwards first, a high one forwards; a negative `forward` prefers later stages.

No single choice is good for all costs. So the first few are those that won most often, and then
they are drawn with a fixed seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from whale.scheduling.list_pass import Policy
from whale.scheduling.problem import OrderProblem

SEED = 2023
ALWAYS = 1e3
"""an offset that no time outweighs"""


@dataclass(frozen=True)
class Keys:
    """The numbers of the formula above."""

    slope: float = 0.001
    forward: float = -1.0
    back: float = 1.0
    offset: float = -ALWAYS

    def of(self, problem: OrderProblem) -> list[float]:
        """The key of every job. Weight gradients get 0: these passes take them as fillers."""
        heads, backs = _alone(problem)
        interval = max(
            sum(problem.forward_s[s] + problem.whole_s[s] for s in chunks)
            for chunks in problem.chunks
        )
        stages = range(problem.graph.num_stages)
        many = range(problem.num_micro_batch)
        step = self.slope * interval
        end = min(backs)
        forwards = [step * m + self.forward * heads[s] for s in stages for m in many]
        backwards = [
            step * m + self.back * (backs[s] - end) + end + self.offset * interval
            for s in stages
            for m in many
        ]
        return forwards + backwards + [0.0] * problem.size


def policies(problem: OrderProblem, count: int) -> Iterator[tuple[Keys, Policy]]:
    """The first `count` ones, always the same."""
    num = problem.graph.num_devices
    quarter = num + num // 4
    half = num + num // 2
    first = [
        (Keys(0.2, 1.0, 1.0, ALWAYS), Policy(num, 0.25)),
        (Keys(0.25, 1.0, 1.0, 0.0), Policy(num + 1, 0.5)),
        (Keys(0.25, 1.0, 1.0, -ALWAYS), Policy(2 * num, 1.0, 0.5)),
        (Keys(0.001, -1.0, 1.0, -ALWAYS), Policy(None, 0.5)),
        (Keys(0.3, -1.0, 2.0, ALWAYS), Policy(half, 1.0, 0.5)),
        (Keys(0.25, 1.0, 0.5, ALWAYS), Policy(half, 0.5)),
        (Keys(0.2, 1.0, 0.5, -1.0), Policy(None, 1.0, 0.5)),
        (Keys(0.3, 1.0, 0.5, 1.0), Policy(num, 1.0)),
        (Keys(0.3, -1.0, 2.0, -ALWAYS), Policy(num, 0.25, 0.5)),
        (Keys(0.3, 1.0, 2.0, -1.0), Policy(quarter, 0.25, 0.5)),
        (Keys(0.3, 1.0, 2.0, -1.0), Policy(half, 0.5, 0.5)),
        (Keys(0.2, 1.0, 2.0, -1.0), Policy(num + 1, 0.25)),
        (Keys(0.001, -1.0, 2.0, 1.0), Policy(half, 0.25, 0.5)),
        (Keys(0.001, -1.0, 1.0, -ALWAYS), Policy(None, 1.0)),
    ]
    yield from first[:count]
    draw = random.Random(SEED)
    for _ in range(count - len(first)):
        keys = Keys(
            slope=draw.choice((0.001, 0.1, 0.2, 0.25, 0.3, 0.5, 1.0)),
            forward=draw.choice((1.0, 1.0, -1.0)),
            back=draw.choice((0.5, 1.0, 2.0)),
            offset=draw.choice((-ALWAYS, -2.0, -1.0, 0.0, 1.0, ALWAYS)),
        )
        admit = draw.choice((None, num, num + 1, quarter, half, 2 * num))
        yield (
            keys,
            Policy(admit=admit, delay=draw.choice((0.25, 0.5, 1.0)), wait=draw.choice((0.0, 0.5))),
        )


def _alone(problem: OrderProblem) -> tuple[list[float], list[float]]:
    """Earliest starts of forward and backward of each stage for a micro-batch that is alone."""
    heads = [0.0] * problem.graph.num_stages
    backs = [0.0] * problem.graph.num_stages
    for stage in range(problem.graph.num_stages):
        for producer, time in problem.producers[stage]:
            heads[stage] = max(heads[stage], heads[producer] + problem.forward_s[producer] + time)
    for stage in reversed(range(problem.graph.num_stages)):
        backs[stage] = heads[stage] + problem.forward_s[stage]
        for consumer, time in problem.gradient_consumers[stage]:
            backs[stage] = max(backs[stage], backs[consumer] + problem.input_s[consumer] + time)
    return heads, backs
