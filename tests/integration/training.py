"""Runs one model under one plan on real ranks, and the same model locally. The model is captured
once and inherited by the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import whale as wh
from tests.exactness import Float64Mode, Trace, local_training
from tests.integration.table import BATCH_SIZE, NUM_STEPS, PlanCase
from tests.zoo import CASES, Case
from whale import api
from whale.capture.batch import read_batch
from whale.capture.prepare import CapturedModel
from whale.cluster.cluster import ETHERNET_50G, PCIE_3_X16, Device, device_kind
from whale.costs.saved import saved_for_backward

LEARNING_RATE = 0.1


@dataclass
class Subject:
    """A model of the zoo, captured."""

    case: Case
    model: torch.nn.Module
    prepared: CapturedModel | None


def prepare_subject(name: str, device: str = "cpu", check: bool = True) -> Subject:
    """Runs in a model server: builds and captures once, with the self-checks (`check`).

    Where a model has labels of the shape of its input, the sample has one tensor for both: a
    capture that took them for one input would be wrong in every plan that trains with labels of
    their own.
    """
    torch.set_num_threads(1)
    case = CASES[name]
    model = case.build()
    with Float64Mode():
        layout, tensors = read_batch(batches(case, has_labels_like_input(case), 1)[0])
        prepared = api._prepare(model, layout, tensors, case.loss, wh.Config(), device, check)
        saved_for_backward(
            prepared.captured, layout.batch_size
        )  # torch keeps what its operations do, and every plan asks for it
    return Subject(case, model, prepared)


def has_labels_like_input(case: Case) -> bool:
    batch = case.batch(0, 2)
    return (
        isinstance(batch, dict)
        and "labels" in batch
        and "input_ids" in batch
        and batch["labels"].shape == batch["input_ids"].shape
    )


def batches(case: Case, one_tensor: bool, num_steps: int) -> list[Any]:
    made = [case.batch(step, BATCH_SIZE) for step in range(num_steps)]
    if one_tensor:
        made = [
            {**batch, "labels": batch["input_ids"]}
            if isinstance(batch, dict) and "input_ids" in batch
            else batch
            for batch in made
        ]
    return made


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def train_locally(subject: Subject, plan: PlanCase, num_steps: int = NUM_STEPS) -> Trace:
    """The reference: plain PyTorch on one process."""
    case = subject.case
    micro_batches = plan.num_micro_batch if case.batch_statistics else 1
    with Float64Mode():
        return local_training(
            case.build(),
            batches(case, plan.one_tensor, num_steps),
            case.loss,
            make_optimizer,
            micro_batches,
        )


@dataclass
class RankTrace:
    """What one rank saw."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    """whole state dict on rank 0, empty elsewhere"""
    held: list[str]


def engine_on_rank(subject: Subject, plan: PlanCase, **settings: Any) -> Any:
    """The engine of one rank; `settings` are added to the config of the plan."""
    case = subject.case
    model = subject.model
    wh.init(wh.Config(plan.config | settings))
    if plan.stages:
        globs = case.cuts(len(plan.stages))
        wh.annotate(
            model,
            {"|".join(glob): wh.replicate(d) for glob, d in zip(globs, plan.stages, strict=True)},
        )
    return wh.parallelize(
        model,
        batches(case, plan.one_tensor, 1)[0],
        optimizer=make_optimizer,
        loss=case.loss,
        prepared=subject.prepared,
        cluster=cluster_of(plan),
    )


def train_on_rank(subject: Subject, plan: PlanCase, num_steps: int = NUM_STEPS) -> RankTrace:
    """One rank of the distributed run."""
    case = subject.case
    with Float64Mode():
        data = batches(case, plan.one_tensor, num_steps)
        engine = engine_on_rank(subject, plan)
        losses = []
        gradients = {}
        for batch in data:
            losses.append(engine.step(batch).loss)
            if not gradients:
                gradients = {
                    name: gradient.clone() for name, gradient in engine.gradients().items()
                }
        return RankTrace(
            losses,
            gradients,
            engine.full_state_dict(),
            [name for name, _ in engine.named_parameters()],
        )


def cluster_of(plan: PlanCase) -> wh.Cluster | None:
    """The kinds that the ranks are taken for; all on this machine."""
    if not plan.kinds:
        return None
    devices = tuple(
        Device(rank, "localhost", rank, device_kind(kind)) for rank, kind in enumerate(plan.kinds)
    )
    return wh.Cluster(devices, PCIE_3_X16, ETHERNET_50G)


def merge(ranks: list[RankTrace], model: torch.nn.Module) -> Trace:
    """One trace of all ranks; holders of the same parameter must agree to the bit, and so must all
    losses.
    """
    gradients: dict[str, torch.Tensor] = {}
    for rank, trace in enumerate(ranks):
        assert trace.losses == ranks[0].losses, f"rank {rank} saw other losses than rank 0"
        for name, gradient in trace.gradients.items():
            assert torch.equal(gradients.setdefault(name, gradient), gradient), (
                f"{name} has another gradient on rank {rank}"
            )
    state = ranks[0].state
    parameters = {name for name, _ in model.named_parameters()}
    buffers = {name for name, _ in model.named_buffers()}
    return Trace(
        ranks[0].losses,
        gradients,
        {name: tensor for name, tensor in state.items() if name in parameters},
        {name: tensor for name, tensor in state.items() if name in buffers},
    )
