"""What is to be planned, and what cannot be cut over devices at all: a loss that is no sum over
samples, buffers that are computed from samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from whale.annotation import Mark, Strategy
from whale.capture.graph import CapturedGraph, user_line
from whale.capture.kinds import ValueKind
from whale.capture.losses import NotAdditive
from whale.cluster.cluster import Cluster
from whale.config import Config
from whale.costs.layer_times import measured_regions
from whale.costs.update_work import UpdateWork
from whale.operations.nodes import aten_name, named_args, op_name, trains_batch_norm
from whale.operations.table import CREATORS
from whale.planning.graph_facts import GraphFacts
from whale.planning.offload import Offload
from whale.planning.stages import RECOMPUTED, slice_stage
from whale.planning.workload import ADAM_STATE, Workload
from whale.plans.plan import Decision
from whale.plans.sharding import Sharding
from whale.plans.shares import micro_batch_sizes

HALF_PRECISIONS = ("bf16", "fp16")


@dataclass(frozen=True)
class Problem:
    """A captured model, the devices that there are, and what the user asked for."""

    captured: CapturedGraph
    """with the loss already split into terms"""
    kinds: Mapping[Node, ValueKind]
    marks: Mapping[Node, Mark]
    default_strategy: Strategy | None
    term_texts: tuple[str, ...]
    not_additive: NotAdditive | None
    """why the loss may not be cut over micro-batches or devices, if so"""
    cluster: Cluster
    config: Config
    batch_size: int
    optimizer_ratio: float = ADAM_STATE
    """bytes of optimizer state for each byte of trainable parameters"""
    mini_batch_size: int = 0
    """samples of the whole mini-batch where these devices run some of the model replicas, and get
    `batch_size` of them: the others, which hold the same weights, are planned apart
    (`replicas.py`). 0: `batch_size` is everything
    """
    update_work: UpdateWork | None = None
    """what an update of the user's optimizer launches; None: not known"""
    float32_precision: str = "highest"
    """`torch.get_float32_matmul_precision()`"""
    updates_whole: bool = False
    """the optimizer looks at whole parameters (Muon, Adafactor): each is updated by one rank"""
    updates_alone: bool = True
    """the optimizer looks at no other parameters when it updates one: they may lie on different
    ranks
    """
    offload: Offload | None = None
    """where tensors are at home, as `auto` tries it; None: as the config says"""
    is_trial: bool = False
    """only whether it fits is asked: the first draft that does is enough, with one chunk on a
    device where their number is free. Less is searched than for a plan, and nothing else, so that a
    plan can be made where a trial fits"""

    keeps_marks: bool = False
    """marked operations stay on the devices of their mark: where the number of chunks is open,
    there is one on a device, since several are cut by time alone
    """
    is_advised: bool = True
    """a refusal names changes that were tried and help (`suggestions.py`), which takes a while"""
    schedule_tries: int | None = None
    """size of the search for each order of actions; None: as large as the list scheduler's own
    budget allows
    """
    is_proved: bool = True
    """orders of actions are proved where they are made; False: by who takes one of many plans"""
    facts: GraphFacts = field(default=None, compare=False, repr=False)  # type: ignore[assignment]
    """of the captured graph, shared by all changed copies of a problem"""

    def __post_init__(self) -> None:
        if self.facts is None or self.facts.captured is not self.captured:
            object.__setattr__(self, "facts", GraphFacts(self.captured))

    @property
    def has_other_replicas(self) -> bool:
        """Gradients of all weights are summed with model replicas outside of this problem."""
        return self.mini_batch_size > 0

    @property
    def dtype(self) -> str:
        """The dtype in which products are computed: a key of `DeviceKind.rate`."""
        return product_dtype(self.config, self.cluster, self.float32_precision)

    @property
    def largest_micro_batch(self) -> int:
        return max(micro_batch_sizes(self.batch_size, self.config.num_micro_batch))

    def workload(self, share: int) -> Workload:
        """The cost model of this problem, exact where a device gets `share` samples of a
        micro-batch.
        """
        return Workload(
            self.captured,
            self.batch_size,
            self.facts.gradients,
            self.optimizer_ratio,
            self.dtype,
            share,
            self.mini_batch_size,
            self.update_work,
            self.cluster.layer_times,
            facts=self.facts,
        )


def product_dtype(config: Config, cluster: Cluster, float32_precision: str) -> str:
    """The dtype in which products are computed. TF32 only where every device has it: Whale has all
    ranks round alike (`whale.api`).
    """
    if config.dtype == "fp32" and float32_precision != "highest":
        if all(device.kind.has_tf32 for device in cluster.devices):
            return "tf32"
    return config.dtype


def precision_decision(problem: Problem) -> Decision | None:
    """What the plan says of float32 products; None where torch has its default."""
    precision = problem.float32_precision
    if precision == "highest" or problem.config.dtype != "fp32":
        return None
    why = f'torch.get_float32_matmul_precision() is "{precision}"'
    if problem.dtype == "tf32":
        return Decision("float32 products", "TF32", why)
    without = next(device for device in problem.cluster.devices if not device.kind.has_tf32)
    return Decision(
        "float32 products",
        "float32",
        f"{why}, but rank {without.rank} ({without.kind.name}) has no TF32 and all ranks round "
        "alike",
    )


def slow_products(problem: Problem) -> list[str]:
    """Sentences on kinds of accelerators without tensor cores for the 16 bits of the job: they
    multiply as fast as in float32, or slower than in the other 16 bits.
    """
    dtype = problem.config.dtype
    found = []
    for kind in dict.fromkeys(device.kind for device in problem.cluster.devices):
        rates = {name: kind.rate(name) for name in HALF_PRECISIONS}
        if kind.is_cpu or dtype not in rates or rates[dtype] > kind.flop_per_s:
            continue
        best = max(rates, key=lambda name: rates[name])
        text = (
            f"{kind.name} has no tensor cores for {dtype}: its products run at the rate of "
            f"float32, {rates[dtype] / 1e12:.3g} TFLOP/s"
        )
        if rates[best] > rates[dtype]:
            text += f'. Try: "precision": "{best}", {rates[best] / 1e12:.3g} TFLOP/s'
        found.append(text)
    return found


def layer_times_decision(problem: Problem, shardings: Iterable[Sharding]) -> Decision | None:
    """What the plan says of measured layers; None where there are none. `shardings`: of all stages
    on grids.
    """
    times = problem.cluster.layer_times
    if times is None:
        return None
    counts = []
    for kind in dict.fromkeys(device.kind.name for device in problem.cluster.devices):
        found = measured_regions(problem.captured, times, kind)
        counts.append(f"{len(found)} modules on {kind}")
    split: Counter[int] = Counter()
    for sharding in shardings:
        split[sharding.grid.num_devices] += len(sharding.measured)
    counts += [f"{number} split over {width} devices" for width, number in split.items() if number]
    return Decision("layer times", ", ".join(counts), f"measured: {times.source or 'elsewhere'}")


def check_loss_and_buffers(
    captured: CapturedGraph, not_additive: NotAdditive | None, widest: int, num_micro_batch: int
) -> None:
    """Refuses what may not be cut: `widest` is over how many devices a micro-batch is cut
    at most.
    """
    if not_additive is not None and (widest > 1 or num_micro_batch > 1):
        raise ValueError(not_additive.message)
    if widest > 1:
        _refuse_sample_buffers(captured)
        _refuse_other_batch_norms(captured)
    if num_micro_batch > 1:
        _refuse_repeated_updates(captured, num_micro_batch)


def _refuse_other_batch_norms(captured: CapturedGraph) -> None:
    """Lowering sums the statistics of `aten.batch_norm` over the devices that share a micro-batch;
    its kernels, called by themselves, would take those of each device alone.
    """
    for node in captured.compute_nodes():
        if trains_batch_norm(node) and aten_name(node) != "batch_norm":
            raise ValueError(
                f"`{op_name(node)}` ({user_line(node)}) would take the statistics of the samples "
                "of each device, not of the micro-batch. Try: torch.nn.functional.batch_norm, "
                "whose statistics are summed over the devices"
            )


def _refuse_repeated_updates(captured: CapturedGraph, num_micro_batch: int) -> None:
    """Buffers computed from what is known of the whole mini-batch (a mean of its inputs, say): each
    micro-batch would update them by the same again.
    """
    for name, value in captured.buffer_updates.items():
        if any(node.meta.get("whole") for node in slice_stage([value], RECOMPUTED, {}).inputs):
            raise ValueError(
                f"buffer {name} is computed from the whole mini-batch ({user_line(value)}), and "
                f"each of {num_micro_batch} micro-batches would update it again: local training "
                'does so once in a step. Try: "num_micro_batch": 1, or compute it in the loader '
                "and give it in the batch"
            )


def buffers_of_micro_batches(captured: CapturedGraph) -> list[str]:
    """Buffers that forward changes by what they were or by the samples, so that several
    micro-batches leave another value than one. Not those of batch norms, and no tables.
    """
    updates = captured.buffer_updates
    return [
        name
        for name, value in updates.items()
        if not name.endswith("num_batches_tracked") and _is_changed(value, updates)
    ]


def _is_changed(value: Node, updates: Mapping[str, Node]) -> bool:
    """Whether a new value is computed from the batch or from a buffer that has one."""
    waiting = [value]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        is_size = not isinstance(node.meta.get("val"), torch.Tensor | tuple | list)
        if is_size or op_name(node) in CREATORS:
            continue  # of a batch only its shape
        if node.op == "placeholder" or (node.op == "get_attr" and str(node.target) in updates):
            return True
        waiting += [each for each in node.all_input_nodes if each not in seen]
        seen.update(node.all_input_nodes)
    return False


def _refuse_sample_buffers(captured: CapturedGraph) -> None:
    """Buffers computed from samples would drift apart on the devices that share a micro-batch
    (BatchNorm's are summed over all).
    """
    for node in captured.compute_nodes():
        args = named_args(node) if op_name(node) == "instance_norm" else {}
        if args.get("use_input_stats") and args.get("running_mean") is not None:
            raise ValueError(
                f"instance norm with running statistics ({user_line(node)}): each device would "
                "keep other statistics. Try: track_running_stats=False, or this part on one "
                "device with one model replica"
            )
    for name, value in captured.buffer_updates.items():
        if slice_stage([value], RECOMPUTED, {}).inputs:
            raise ValueError(
                f"buffer {name} is computed from the samples ({user_line(value)}), so each device "
                "would get another value. Try: this part on one device with one model replica"
            )
