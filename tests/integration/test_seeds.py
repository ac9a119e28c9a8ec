"""The snippets of the papers, as written there, on real ranks: each trains exactly like local
PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale as wh
from tests.exactness import Trace, compare, local_training
from tests.ranks import ModelServer, preload

preload("tests.integration.test_seeds")

WIDTH = 8
NUM_CLASSES = 3
NUM_STEPS = 2


class Stage(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class Plain(nn.Module):
    """A model without a word about Whale; the others below are the same model with marks."""

    def __init__(self) -> None:
        super().__init__()
        self.stage1 = Stage(2)
        self.stage2 = Stage(2)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stage2(self.stage1(x)))


class ScopesAtConstruction(Plain):
    """`with wh.replicate(1): model_stage1()`, as in the seed: modules built inside belong to the
    TaskGraph.
    """

    def __init__(self) -> None:
        nn.Module.__init__(self)
        with wh.replicate(1):
            self.stage1 = Stage(2)
        with wh.replicate(1):
            self.stage2 = Stage(2)
            self.head = nn.Linear(WIDTH, NUM_CLASSES)


class ScopesInForward(Plain):
    """The same words around operations."""

    def forward(self, x: Tensor) -> Tensor:
        with wh.replicate(1):
            x = self.stage1(x)
        with wh.replicate(1):
            return self.head(self.stage2(x))


class OneScopeInForward(Plain):
    """Only the first part is marked in `forward`; the default strategy takes the rest."""

    def forward(self, x: Tensor) -> Tensor:
        with wh.replicate(1):
            x = self.stage1(x)
        return self.head(self.stage2(x))


class Deep(nn.Module):
    """Enough layers for 8 TaskGraphs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Stage(16)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Classified(nn.Module):
    """One of the models above with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), labels)


def built(make: Callable[[], nn.Module]) -> nn.Module:
    """The same weights from the same seed, in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Classified(make()).double()


def make_batch(step: int, batch_size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(batch_size, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, NUM_CLASSES, (batch_size,), generator=generator)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def train(model: nn.Module, batch_size: int) -> tuple[Trace, wh.Plan]:
    """Some steps on this rank; the state of the trace is whole on rank 0 only, its gradients are
    this rank's.
    """
    data = [make_batch(step, batch_size) for step in range(NUM_STEPS)]
    engine = wh.parallelize(model, data[0], optimizer=sgd)
    losses = []
    gradients = {}
    for batch in data:
        losses.append(engine.step(batch).loss)
        gradients = gradients or {
            name: gradient.clone() for name, gradient in engine.gradients().items()
        }
    return Trace(losses, gradients, engine.full_state_dict()), engine.plan


def whole(traces: list[Trace]) -> Trace:
    """One trace of all ranks; holders of the same parameter must agree to the bit."""
    gradients: dict[str, Tensor] = {}
    for trace in traces:
        assert trace.losses == traces[0].losses, "ranks saw different losses"
        for name, gradient in trace.gradients.items():
            assert torch.equal(gradients.setdefault(name, gradient), gradient), (
                f"{name} has different gradients on two ranks"
            )
    return Trace(traces[0].losses, gradients, traces[0].weights)


def reference(make: Callable[[], nn.Module], batch_size: int) -> Trace:
    return local_training(
        built(make), [make_batch(step, batch_size) for step in range(NUM_STEPS)], None, sgd
    )


def warm_up() -> None:
    wh.plan(built(Plain), make_batch(0, 4), cluster=1)


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer(warm_up) as started:
        yield started


# ---- pipeline with 2 TaskGraphs
# ---------------------------------------------------------------------------------------


def two_task_graphs(prepared: None, how: str) -> tuple[Trace, wh.Plan, int]:
    wh.init(wh.Config({"num_micro_batch": 8}))
    if how == "annotate":
        model = wh.annotate(
            built(Plain),
            {"model.stage1": wh.replicate(1), "model.stage2|model.head": wh.replicate(1)},
        )
    elif how == "default strategy":
        wh.set_default_strategy(wh.replicate(1))
        model = built(OneScopeInForward)
    else:
        model = built({"construction": ScopesAtConstruction, "forward": ScopesInForward}[how])
    return *train(model, 17), wh.num_devices()


@pytest.mark.parametrize("how", ["construction", "forward", "annotate", "default strategy"])
def test_two_task_graphs_with_8_micro_batches(server: ModelServer, how: str) -> None:
    """Whichever way the two TaskGraphs are said: two stages, one model replica, and the training of
    the plain model.
    """
    ranks = server.run(two_task_graphs, 2, how)
    compare(reference(Plain, 17), whole([trace for trace, _, _ in ranks]))
    plan = ranks[0][1]
    assert [number for _, _, number in ranks] == [2, 2]
    assert (len(plan.task_graphs), len(plan.stages), plan.num_replicas, plan.num_micro_batch) == (
        2,
        2,
        1,
        8,
    )
    assert {name for name, stages in plan.holders.items() if stages == (0,)} == {
        n for n in plan.holders if n.startswith("model.stage1")
    }


def test_all_ways_give_the_same_plan_for_the_operations() -> None:
    """Scopes in forward, at construction and from outside end as the same stages and the same
    crossing.
    """
    plans = []
    for how in ("construction", "forward", "annotate"):
        wh.init()
        model = built(
            {"construction": ScopesAtConstruction, "forward": ScopesInForward, "annotate": Plain}[
                how
            ]
        )
        if how == "annotate":
            wh.annotate(
                model, {"model.stage1": wh.replicate(1), "model.stage2|model.head": wh.replicate(1)}
            )
        plans.append(wh.plan(model, make_batch(0, 17), cluster=2, config={"num_micro_batch": 8}))
    for plan in plans[1:]:
        assert plan.stage_of_operation == plans[0].stage_of_operation
        assert plan.schedule == plans[0].schedule
        assert [(c.source, c.destination, c.sample_bytes) for c in plan.crossings] == [
            (0, 1, WIDTH * 8)
        ]


def test_scopes_do_nothing_without_whale() -> None:
    """The same class runs as a plain model: a scope in forward changes no result."""
    x, labels = make_batch(0, 5)
    assert torch.equal(built(ScopesInForward)(x, labels), built(Plain)(x, labels))
    assert torch.equal(built(ScopesAtConstruction)(x, labels), built(Plain)(x, labels))


# ---- M6-10B: pipeline without a mark, and data parallelism around it
# --------------------------------------------------


def m6(prepared: None, batch_size: int) -> tuple[Trace, wh.Plan]:
    wh.init(wh.Config({"num_micro_batch": 35, "num_task_graph": 8}))
    return train(built(Deep), batch_size)


def test_8_task_graphs_with_35_micro_batches_on_8_ranks(server: ModelServer) -> None:
    """One sample for each micro-batch; every stage has work and its own parameters."""
    ranks = server.run(m6, 8, 35)
    compare(reference(Deep, 35), whole([trace for trace, _ in ranks]))
    plan = ranks[0][1]
    assert (len(plan.stages), plan.num_replicas, plan.num_micro_batch) == (8, 1, 35)
    assert all(stage.parameters for stage in plan.stages)
    assert {crossing.sample_bytes for crossing in plan.crossings} == {WIDTH * 8}


def test_16_devices_make_two_pipelines_of_the_same_8_task_graphs() -> None:
    """`M6-10B with Pipeline and DP`: more devices are more model replicas, without another word."""
    wh.init()
    plan = wh.plan(
        built(Deep),
        make_batch(0, 70),
        cluster=16,
        config={"num_micro_batch": 35, "num_task_graph": 8},
    )
    assert (len(plan.stages), plan.num_replicas) == (8, 2)
    assert sorted(
        rank for device in plan.virtual_devices for replica in device.ranks for rank in replica
    ) == list(range(16))


# ---- the default strategy
# ---------------------------------------------------------------------------------------------


def all_devices(prepared: None, how: str) -> tuple[Trace, wh.Plan]:
    """`wh.set_default_strategy(wh.replicate(total_gpus))`: the whole model on all devices, in one
    model replica.
    """
    wh.init()
    total_gpus = wh.num_devices()
    if how == "default":
        wh.set_default_strategy(wh.replicate(total_gpus))
    model = (
        built(Plain)
        if how != "scope"
        else wh.annotate(built(Plain), {"model": wh.replicate(total_gpus)})
    )
    return train(model, 10)


@pytest.mark.parametrize(("how", "num_replicas"), [("default", 1), ("scope", 1), ("nothing", 3)])
def test_replicate_on_all_devices_is_data_parallel(
    server: ModelServer, how: str, num_replicas: int
) -> None:
    """10 samples on 3 devices. Without a word there are 3 model replicas of one device each; the
    training is the same.
    """
    ranks = server.run(all_devices, 3, how)
    compare(reference(Plain, 10), whole([trace for trace, _ in ranks]))
    assert (ranks[0][1].num_replicas, len(ranks[0][1].virtual_devices)) == (num_replicas, 1)


def test_init_takes_the_default_strategy_back() -> None:
    wh.init()
    wh.set_default_strategy(wh.replicate(2))
    assert wh.plan(built(Plain), make_batch(0, 8), cluster=2).num_replicas == 1
    wh.init()
    assert wh.plan(built(Plain), make_batch(0, 8), cluster=2).num_replicas == 2


def test_num_devices_of_one_process_is_one() -> None:
    wh.init()
    assert wh.num_devices() == 1


def hybrid_of_replicate_and_split(num_devices: int) -> wh.Plan:
    """The second snippet of the seed, word for word."""
    wh.init()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with wh.replicate(num_devices):
                self.features = Stage(1)
            with wh.split(num_devices):
                self.classifier = nn.Linear(WIDTH, NUM_CLASSES)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.classifier(self.features(x)), labels)

    batch = torch.randn(4, WIDTH), torch.randint(0, NUM_CLASSES, (4,))
    return wh.plan(Net(), batch, cluster=num_devices)


def test_hybrid_of_replicate_and_split_is_one_stage_on_a_grid() -> None:
    assert hybrid_of_replicate_and_split(1).virtual_devices[0].grid is None
    plan = hybrid_of_replicate_and_split(4)
    assert len(plan.stages) == 1 and [part.strategy for part in plan.task_graphs] == [
        "replicate(4)",
        "split(4)",
    ]
    grid = plan.virtual_devices[0].grid
    assert grid is not None and grid.num_devices == 4
    stored = plan.shardings[0].stored
    assert not any(stored[name].is_cut for name in stored if name.startswith("features")), (
        "data parallel weights stay whole"
    )
    assert stored["classifier.weight"].is_cut
