"""Trains a random model under random plans on real ranks, and locally, and compares.

python -m tests.fuzz.running --start 1000 --seconds 300       many seeds
python -m tests.fuzz.running --start 1234 --count 1 --show    one seed again, with its source
python -m tests.fuzz.running --timeout 600                    on a busy machine
"""

from __future__ import annotations

import argparse
import linecache
import time
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import whale as wh
from tests.exactness import EXACT_FLOAT64, Trace, compare, local_training
from tests.fuzz.grammar import FuzzModel, make_batch, make_model
from tests.fuzz.plans import FuzzPlan, make_plan
from tests.ranks import PREPARE_TIMEOUT_S, ModelServer, RankError, preload
from whale import api
from whale.capture.batch import read_batch
from whale.capture.prepare import CapturedModel
from whale.cluster.cluster import ETHERNET_50G, PCIE_3_X16, Device, device_kind

preload("tests.fuzz.running")

NUM_STEPS = 3
NUM_PLANS = 3
LEARNING_RATE = 0.05
TIMEOUT_S = 60.0
NUDGE = 1e-15
"""of every weight, relative: about what rounding does in a step"""
NUDGES_ALLOWED = 100.0
MOST_ALLOWED = 1e-7
"""however much a model makes of rounding"""


@dataclass
class Subject:
    """A model that a server has captured."""

    model: FuzzModel
    module: nn.Module
    prepared: CapturedModel


def build(model: FuzzModel) -> nn.Module:
    """The module that the source describes; the same weights every time."""
    file = f"<model of seed {model.seed}>"
    linecache.cache[file] = (len(model.source), None, model.source.splitlines(True), file)
    module = types.ModuleType(f"fuzz_{model.seed}")
    exec(compile(model.source, file, "exec"), module.__dict__)
    torch.manual_seed(model.seed)
    made: nn.Module = module.Model().train()
    return made


def prepare(model: FuzzModel) -> Subject:
    torch.set_num_threads(1)
    module = build(model)
    layout, tensors = read_batch(make_batch(0, 6))
    # a loss that is not additive is taken apart in another way for one micro-batch
    config = wh.Config({"num_micro_batch": 1 if model.mixes else 2})
    return Subject(model, module, api._prepare(module, layout, tensors, None, config, "cpu", True))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda pairs: torch.optim.SGD(pairs, lr=LEARNING_RATE),
    "momentum": lambda pairs: torch.optim.SGD(pairs, lr=LEARNING_RATE, momentum=0.9),
    # a large epsilon: gradients near 0 would make rounding visible
    "adamw": lambda pairs: torch.optim.AdamW(pairs, lr=LEARNING_RATE, eps=1e-3),
}


def batches(plan: FuzzPlan) -> list[dict[str, torch.Tensor]]:
    return [make_batch(k, plan.batch_size - (k == plan.smaller_at)) for k in range(NUM_STEPS)]


def train_locally(model: FuzzModel, plan: FuzzPlan, nudge: float = 0.0) -> Trace:
    config = dict(plan.config)
    most = config.get("clip_grad_norm")

    def make_optimizer(pairs: Any) -> torch.optim.Optimizer:
        made = OPTIMIZERS[plan.optimizer](pairs)
        if most is not None:
            parameters = [parameter for _, parameter in pairs]
            made.register_step_pre_hook(
                lambda *_: torch.nn.utils.clip_grad_norm_(parameters, most) and None
            )
        return made

    number = config.get("num_micro_batch", 1) if model.is_stateful else 1
    module = build(model)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                parameter.mul_(1 + nudge)
    trace = local_training(module, batches(plan), None, make_optimizer, number)
    if most is not None:  # the engine gives gradients as the optimizer gets them
        torch.nn.utils.clip_grads_with_norm_(
            _with_gradients(trace), most, torch.nn.utils.get_total_norm(trace.gradients.values())
        )
    return trace


def _with_gradients(trace: Trace) -> list[torch.Tensor]:
    """Tensors that have the gradients of the trace, to be clipped where they are."""
    found = []
    for gradient in trace.gradients.values():
        holder = torch.empty_like(gradient)
        holder.grad = gradient
        found.append(holder)
    return found


def train_on_rank(subject: Subject, plan: FuzzPlan) -> Any:
    torch.set_default_dtype(torch.float64)
    wh.init(wh.Config(dict(plan.config)))
    marks = {}
    for glob, (kind, number, *grid) in plan.marks:
        marks[glob] = wh.split(number, *grid) if kind == "split" else wh.replicate(number)
    wh.annotate(subject.module, marks)
    data = batches(plan)
    engine = wh.parallelize(
        subject.module,
        data[0],
        optimizer=OPTIMIZERS[plan.optimizer],
        prepared=subject.prepared,
        cluster=cluster_of(plan),
    )
    losses = []
    gradients = {}
    for step, batch in enumerate(data):
        losses.append(engine.step(batch).loss)
        if step == 0:
            gradients = {name: each.clone() for name, each in engine.full_gradients().items()}
    return losses, gradients, engine.full_state_dict()


def cluster_of(plan: FuzzPlan) -> wh.Cluster | None:
    if not plan.kinds:
        return None
    devices = [Device(r, "localhost", r, device_kind(kind)) for r, kind in enumerate(plan.kinds)]
    return wh.Cluster(tuple(devices), PCIE_3_X16, ETHERNET_50G)


@dataclass
class Tally:
    """What came of the cases."""

    num_right: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    useless: Counter[str] = field(default_factory=Counter)
    """models that torch itself does not train"""
    finds: list[str] = field(default_factory=list)

    @property
    def num_cases(self) -> int:
        return self.num_right + self.refused.total() + len(self.finds)

    def __str__(self) -> str:
        return (
            f"{self.num_cases} cases: {self.num_right} right, {self.refused.total()} refused, "
            f"{len(self.finds)} finds"
        )


def try_seed(
    seed: int, tally: Tally, num_plans: int = NUM_PLANS, timeout_s: float = TIMEOUT_S
) -> None:
    """The model of this seed under some plans."""
    model = make_model(seed)
    try:
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        reference = train_locally(model, FuzzPlan(1, config=(("num_micro_batch", 1),)))
    except Exception as error:
        tally.useless[f"{type(error).__name__}: {error}"[:160]] += 1
        return
    finally:
        torch.set_default_dtype(before)
    if not all(map(torch.isfinite, map(torch.tensor, reference.losses))):
        return
    try:
        server = ModelServer(prepare, model, timeout_s=max(timeout_s, PREPARE_TIMEOUT_S))
    except RankError as error:
        _note(error, f"seed {seed}, capture", model, tally)
        return
    with server:
        for number in range(num_plans):
            plan = make_plan(number, model)
            what = f"seed {seed}, plan {number}: {plan}"
            try:
                _compare(server, model, plan, timeout_s)
                tally.num_right += 1
            except (RankError, AssertionError) as error:
                _note(error, what, model, tally)


def _compare(server: ModelServer, model: FuzzModel, plan: FuzzPlan, timeout_s: float) -> None:
    reference = server.run_local(_train_reference, plan)
    results = server.run(train_on_rank, plan.num_ranks, plan, timeout_s=timeout_s)
    losses, gradients, state = results[0]
    for rank, (others, _, _) in enumerate(results):
        assert others == losses, f"rank {rank} saw other losses than rank 0"
    weights = {name: state[name] for name in reference.weights}
    buffers = {name: state[name] for name in reference.buffers or {}}
    trace = Trace(losses, gradients, weights, buffers)
    try:
        compare(reference, trace)
    except AssertionError:
        # some models make much of rounding: a division by almost nothing, the distance of equal rows
        nudged = server.run_local(_train_reference, plan, NUDGE)
        allowed = NUDGES_ALLOWED * _difference(reference, nudged)
        if allowed <= EXACT_FLOAT64:
            raise
        compare(reference, trace, min(allowed, MOST_ALLOWED))


def _difference(first: Trace, second: Trace) -> float:
    """The largest difference of losses or weights, as a part of the largest of each."""
    found = [_relative(torch.tensor(first.losses), torch.tensor(second.losses))]
    for name, weight in first.weights.items():
        if weight.numel():
            found.append(_relative(weight, second.weights[name]))
    return max(found)


def _relative(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first - second).abs().max() / first.abs().max().clamp_min(1e-300))


def _train_reference(subject: Subject, plan: FuzzPlan, nudge: float = 0.0) -> Trace:
    return train_locally(subject.model, plan, nudge)


def _note(error: Exception, what: str, model: FuzzModel, tally: Tally) -> None:
    original = error.original if isinstance(error, RankError) else None
    if isinstance(original, ValueError):
        tally.refused[str(original)[:160]] += 1
        return
    tally.finds.append(f"{what}\n{str(error)[-3000:]}\n{model.source}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--start", type=int, default=1000)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--plans", type=int, default=NUM_PLANS)
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds of one case")
    parser.add_argument("--show", action="store_true", help="print source and refusals")
    options = parser.parse_args()
    tally = Tally()
    end = time.monotonic() + options.seconds
    for seed in range(options.start, options.start + options.count):
        if time.monotonic() > end:
            break
        seen = len(tally.finds)
        if options.show:
            print(make_model(seed).source)
        try_seed(seed, tally, options.plans, options.timeout)
        for find in tally.finds[seen:]:
            print("=" * 100, find, sep="\n", flush=True)
    print("=" * 100)
    for text, count in tally.refused.most_common(30):
        print(count, text)
    print("not trained by torch itself:", dict(tally.useless))
    print(f"seeds {options.start} to {seed}: {tally}")


if __name__ == "__main__":
    main()
