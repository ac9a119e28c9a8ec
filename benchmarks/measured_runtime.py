"""How the runtime works whose steps were measured: Megatron with DeepSpeed's pipeline engine.

shares      every replica gets the same samples
schedule    1F1B in DeepSpeed's alternating steps: in each step a stage exchanges with its
            neighbours, then computes a forward or a backward
messages    blocking: both sides wait until it has arrived; the GPUs of a tensor-parallel group
            each send their part of an activation, so all together send it once
layers      measured times, with the communication of tensor parallelism inside
gradients   summed behind the last backward over the replicas of a stage, then the update

memory      24 bytes for each parameter of a GPU (weight, gradient, two averages of Adam, and two
            copies that the engine makes), what autograd saves of the micro-batches in flight,
            copies of the logits in the loss, and one number of bytes that no tensor explains
            (CUDA context, kernels, buffers of NCCL)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu_measurements import Measurements
from benchmarks.measured_models import MODELS, SEQUENCE, ModelShape

BYTES = 4
"""of a float32"""
BYTES_PER_PARAMETER = 24
LOGIT_COPIES = 4
"""logits, their exponentials, and a gradient of each"""


@dataclass(frozen=True)
class MeasuredStage:
    """One stage of a measured plan."""

    layers: tuple[int, int]
    kinds: tuple[str, ...]
    """kind of each replica"""
    tensor_parallel: tuple[int, ...]

    @property
    def numbers(self) -> range:
        return range(self.layers[0], self.layers[1] + 1)


@dataclass(frozen=True)
class MeasuredPlan:
    """One step that was run and timed."""

    name: str
    shape: ModelShape
    stages: tuple[MeasuredStage, ...]
    micro_batch: int
    batch: int
    step_s: float
    gradient_sum_s: float
    peak_bytes: float
    is_suspect: bool

    @property
    def num_replicas(self) -> int:
        return len(self.stages[0].kinds)

    @property
    def num_micro_batches(self) -> int:
        return self.batch // self.micro_batch // self.num_replicas


def read_plan(row: Mapping[str, Any]) -> MeasuredPlan | None:
    """A plan of the folder; None for a model that this script does not know."""
    shape = MODELS.get(row["model"])
    if shape is None:
        return None
    stages = []
    for stage in row["stages"]:
        kinds = tuple(replica[0]["kind"] for replica in stage["replicas"])
        stages.append(MeasuredStage(tuple(stage["layers"]), kinds, tuple(stage["tensor_parallel"])))
    return MeasuredPlan(
        row["id"],
        shape,
        tuple(stages),
        row["micro_batch"],
        row["batch"],
        row["measured_step_s"],
        row.get("measured_gradient_sum_s", 0.0),
        row.get("measured_peak_bytes", 0.0),
        bool(row.get("suspect")),
    )


# ---- time


@dataclass(frozen=True)
class Overheads:
    """Seconds that layer times and network curves do not hold: 0 is unfitted."""

    message_s: float = 0.0
    """of each message: a description of the tensor goes first, its parts are put together behind"""
    gradient_sum_s: float = 0.0
    """of the sum of gradients: they are copied into one buffer and back, all ranks meet before"""


@dataclass(frozen=True)
class StepParts:
    """What a step of a measured plan consists of, in seconds."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    messages: tuple[float, ...]
    num_micro_batches: int
    gradient_sum_s: float
    update_s: float

    def step_s(self, more: Overheads) -> float:
        """Seconds of the step."""
        messages = [message + more.message_s for message in self.messages]
        pipeline = pipeline_s(self.forward, self.backward, messages, self.num_micro_batches)
        gradients = self.gradient_sum_s + more.gradient_sum_s if self.gradient_sum_s else 0.0
        return pipeline + gradients + self.update_s


def step_parts(plan: MeasuredPlan, measured: Measurements) -> StepParts:
    """A step of the measured runtime; a ValueError where the folder has no times for it."""
    if any(len(stage.kinds) != plan.num_replicas for stage in plan.stages):
        raise ValueError(
            "stages with other numbers of replicas, which the measured runtime has not"
        )
    forward = []
    backward = []
    update = []
    for stage in plan.stages:
        times = [stage_seconds(plan, stage, replica, measured) for replica in _replicas(plan)]
        # replicas wait for each other in every sum of gradients: the slowest counts
        slowest = max(times, key=lambda each: each[0] + each[1])
        forward.append(slowest[0])
        backward.append(slowest[1])
        update.append(max(each[2] for each in times))
    messages = [message_s(plan, boundary, measured) for boundary in range(len(plan.stages) - 1)]
    sums = [ring_s(plan, stage, measured) for stage in plan.stages]
    return StepParts(
        tuple(forward),
        tuple(backward),
        tuple(messages),
        plan.num_micro_batches,
        max(sums),
        max(update),
    )


def _replicas(plan: MeasuredPlan) -> range:
    return range(plan.num_replicas)


def stage_seconds(
    plan: MeasuredPlan, stage: MeasuredStage, replica: int, measured: Measurements
) -> tuple[float, float, float]:
    """Forward, backward and update of a stage for one micro-batch."""
    kind = stage.kinds[replica]
    width = stage.tensor_parallel[replica]
    row = measured.row(plan.shape.name, kind, plan.micro_batch, width)
    if row is None:
        raise ValueError(
            f"no layer times of {plan.shape.name} on {kind} at micro-batch {plan.micro_batch}, "
            f"tensor_parallel {width}"
        )
    parts = [row.of(layer, plan.shape.num_layers) for layer in stage.numbers]
    forward, backward, update = (sum(part[place] for part in parts) for place in range(3))
    return forward, backward, update


def message_s(plan: MeasuredPlan, boundary: int, measured: Measurements) -> float:
    """Seconds of an activation from a stage to the next, or of its gradient back."""
    before = plan.stages[boundary]
    after = plan.stages[boundary + 1]
    num_bytes = plan.micro_batch * SEQUENCE * plan.shape.width * BYTES
    slowest = 0.0
    for replica in _replicas(plan):
        kinds = (before.kinds[replica], after.kinds[replica])
        num_gpus = min(before.tensor_parallel[replica], after.tensor_parallel[replica])
        link = measured.between_hosts(*kinds, num_gpus)
        if link is None:
            raise ValueError(f"no link between {kinds[0]} and {kinds[1]} with {num_gpus} GPUs")
        slowest = max(slowest, link.seconds(num_bytes))
    return slowest


def pipeline_s(
    forward: Sequence[float], backward: Sequence[float], messages: Sequence[float], number: int
) -> float:
    """Seconds until the last stage is done, where every message blocks both sides."""
    num_stages = len(forward)
    now = [0.0] * num_stages
    for step in range(2 * (number + num_stages - 1)):
        doing = [_micro_batch(step, stage, num_stages) for stage in range(num_stages)]
        for stage in range(1, num_stages):
            here, is_forward = doing[stage]
            there, _ = doing[stage - 1]
            if not is_forward:
                continue
            # the gradient of one micro-batch comes back, then the next activation goes
            num_messages = int(0 <= there < number) + int(0 <= here < number)
            if num_messages:
                start = max(now[stage], now[stage - 1])
                now[stage] = now[stage - 1] = start + num_messages * messages[stage - 1]
        for stage, (micro_batch, is_forward) in enumerate(doing):
            if 0 <= micro_batch < number:
                now[stage] += forward[stage] if is_forward else backward[stage]
    return max(now)


def _micro_batch(step: int, stage: int, num_stages: int) -> tuple[int, bool]:
    """(micro-batch, whether it is a forward) of a stage in one of DeepSpeed's alternating steps;
    numbers outside of the micro-batches: nothing.
    """
    is_forward = step % 2 == stage % 2
    if is_forward:
        return step // 2 - stage // 2, True
    if step % 2 == 0:
        return step // 2 - num_stages + (stage + 1) // 2, False
    return step // 2 - num_stages + 1 + stage // 2, False


def ring_s(plan: MeasuredPlan, stage: MeasuredStage, measured: Measurements) -> float:
    """Seconds of a ring over the replicas of a stage. The GPUs of a host each sum their own shard
    and share the way out.
    """
    number = plan.num_replicas
    if number < 2:
        return 0.0
    width = stage.tensor_parallel[0]
    num_bytes = parameters(plan.shape, stage.numbers) * BYTES
    slowest = 0.0
    for kinds in zip(stage.kinds, stage.kinds[1:]):
        link = measured.between_hosts(*kinds, width)
        if link is None:
            raise ValueError(f"no link between {kinds[0]} and {kinds[1]} with {width} GPUs")
        part = num_bytes / width / number
        slowest = max(slowest, 2 * (number - 1) / number * num_bytes / link.rate(part))
    return slowest


def parameters(shape: ModelShape, layers: Sequence[int]) -> int:
    """Parameters of these layers; embedding and head have a table each."""
    total = 0
    for layer in layers:
        if layer == 0:
            positions = 0 if shape.gated else SEQUENCE * shape.width
            total += shape.embedding_parameters + positions
        elif layer == shape.num_layers - 1:
            total += shape.embedding_parameters
        else:
            total += shape.block_parameters
    return total


# ---- memory


def peak_bytes(plan: MeasuredPlan, saved: tuple[float, float]) -> float:
    """Bytes of the fullest GPU, without those that no tensor explains. `saved`: what a block saves
    of one sample that tensor parallelism does not cut, and that it does.
    """
    fullest = 0.0
    num_stages = len(plan.stages)
    for place, stage in enumerate(plan.stages):
        width = stage.tensor_parallel[0]
        in_flight = min(num_stages - place, plan.num_micro_batches)
        static = BYTES_PER_PARAMETER * parameters(plan.shape, stage.numbers) / width
        blocks = sum(0 < layer < plan.shape.num_layers - 1 for layer in stage.numbers)
        sample = blocks * (saved[0] + saved[1] / width)
        if 0 in stage.numbers:
            sample += SEQUENCE * plan.shape.width * BYTES
        logits = 0.0
        if plan.shape.num_layers - 1 in stage.numbers:
            logits = LOGIT_COPIES * SEQUENCE * plan.shape.vocabulary * BYTES / width
        samples = plan.micro_batch * (in_flight * sample + logits)
        fullest = max(fullest, static + samples)
    return fullest
