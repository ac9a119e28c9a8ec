"""Which activations are recomputed in backward: only where memory asks for it, exactly, and
with its cost in the plan.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import whale as wh
from tests.exactness import Float64Mode
from tests.unit.clusters import devices
from whale import api
from whale.capture.batch import read_batch
from whale.capture.graph import CapturedGraph
from whale.cluster.cluster import Cluster
from whale.planning.cheap_regions import cheap_regions
from whale.planning.graph_facts import GraphFacts
from whale.plans.plan import Plan

pytestmark = pytest.mark.usefixtures("fresh_session")

WIDTH = 16
NUM_LAYERS = 8
BATCH_SIZE = 16


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.narrow(torch.tanh(self.wide(x)).square()))


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)  # type: ignore[arg-type]


def plan_of(cluster: Cluster | int, **config: object) -> Plan:
    return wh.plan(
        Net(), torch.randn(BATCH_SIZE, WIDTH), cluster=cluster, config=dict(config), optimizer=sgd
    )


def room_for(num_samples: float, num_devices: int = 1) -> int:
    """Bytes of one of so many devices on which so many samples fit when nothing is
    recomputed.
    """
    memory = plan_of(num_devices, recompute=False).memory[0]
    return math.ceil(memory.static_bytes + num_samples * memory.sample_bytes)


def why(plan: Plan) -> str | None:
    return next((decision.why for decision in plan.decisions if decision.what == "recompute"), None)


def test_nothing_is_recomputed_where_memory_suffices() -> None:
    plan = plan_of(devices(room_for(BATCH_SIZE)))
    assert plan.stages[0].num_recomputed == 0 and why(plan) is None


def test_a_plan_that_does_not_fit_without_fits_with_it_and_pays_in_time() -> None:
    tight = devices(room_for(0.5 * BATCH_SIZE))
    with pytest.raises(ValueError, match=r'does not fit.*Try: "recompute": "auto"'):
        plan_of(tight, recompute=False)
    plan = plan_of(tight)
    free = plan_of(devices(room_for(BATCH_SIZE)))
    assert 0 < plan.stages[0].num_recomputed <= plan.stages[0].num_regions
    assert plan.memory[0].total_bytes(BATCH_SIZE) <= tight.devices[0].kind.memory_bytes
    assert (
        free.loads[0].sample_s
        < plan.loads[0].sample_s
        <= 4 / 3 * free.loads[0].sample_s * (1 + 1e-9)
    )
    text = why(plan)
    assert (
        text is not None
        and text.startswith("memory asks for it: saves up to ")
        and "more work" in text
    )


def test_as_little_as_memory_asks_for_is_recomputed() -> None:
    counts = [plan_of(devices(room_for(part * BATCH_SIZE))).stages[0] for part in (0.9, 0.6, 0.4)]
    parts = [stage.num_recomputed / stage.num_regions for stage in counts]
    assert parts == sorted(parts) and parts[0] < parts[-1]


def test_what_fits_with_nothing_is_refused_with_numbers() -> None:
    with pytest.raises(
        ValueError,
        match=r"fit, even with all activations recomputed in backward: rank 0 \(k0\) has memory for \d+ ",
    ):
        plan_of(devices(room_for(0.1)))


def test_the_faster_of_moving_samples_and_computing_again_is_taken() -> None:
    # a device three times as fast with room for 9 of its 12 samples: computing some again (at most
    # 4/3 of the work) beats 7 on the slow one
    fast = plan_of(devices(room_for(9.5, 2), 10**9, rates=(3e12, 1e12)))
    assert fast.stages[0].num_recomputed > 0
    # with room for 7 of 8 one sample moves, which costs less than computing even one region again
    moved = plan_of(devices(room_for(7.5, 2), 10**9, rates=(1e12, 1.1e12)))
    assert moved.stages[0].num_recomputed == 0


def test_only_the_stages_that_are_short_of_memory_compute_again() -> None:
    free = plan_of(devices(10**9, 10**9), num_task_graph=2, num_micro_batch=4, recompute=False)
    first, second = (memory.total_bytes(4) for memory in free.memory)
    plan = plan_of(devices(int(first) - 1, int(second) + 1), num_task_graph=2, num_micro_batch=4)
    assert [stage.num_recomputed > 0 for stage in plan.stages] == [True, False]


def test_forced_and_forbidden_and_by_name() -> None:
    forced = plan_of(devices(10**9), recompute=True).stages[0]
    assert forced.num_recomputed == forced.num_regions > 0
    none = plan_of(devices(10**9), recompute=False)
    named = plan_of(devices(10**9), recompute=["layers.[0-3]"])
    assert named.memory[0].sample_bytes < none.memory[0].sample_bytes
    # half of the layers run their forward twice: 3 parts of work become 3.5
    assert named.loads[0].sample_s / none.loads[0].sample_s == pytest.approx(3.5 / 3, rel=0.02)
    with pytest.raises(ValueError, match=r"""'layer\.\*' matches no module of the model"""):
        plan_of(devices(10**9), recompute=["layer.*"])
    with pytest.raises(
        ValueError,
        match="'recompute' must be 'auto', True, False or a list of module names, not 'yes'",
    ):
        wh.Config(recompute="yes")


def step_losses(
    config: dict[str, object], dropout: float = 0.0
) -> tuple[list[float], dict[str, Tensor]]:
    wh.init(wh.Config(config))
    torch.manual_seed(1)
    data = [torch.randn(BATCH_SIZE, WIDTH) for _ in range(3)]
    engine = wh.parallelize(Net(dropout), data[0], optimizer=sgd)
    assert any(
        "recomputed" in name
        for name, _ in engine._shapes.first.chunks[0].module_for(1).named_modules()
    ) is bool(config.get("recompute"))
    return [engine.step(batch).loss for batch in data], engine.full_state_dict()


@pytest.mark.parametrize("recompute", [True, ["layers.[1-4]"]], ids=str)
def test_dropout_draws_the_same_numbers_again(recompute: object) -> None:
    with Float64Mode():
        kept, again = (
            step_losses({"num_micro_batch": 2, "recompute": each}, dropout=0.3)
            for each in (False, recompute)
        )
    assert kept[0] == again[0]
    for name, weight in kept[1].items():
        assert torch.equal(weight, again[1][name]), name


class Products(TorchDispatchMode):
    """Counts the products that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.number += func.overloadpacket in (torch.ops.aten.addmm, torch.ops.aten.mm)
        return func(*args, **(kwargs or {}))


def test_cheap_regions_are_exact_and_run_no_product_again() -> None:
    """Of every layer the square in front of its second product is made again."""
    found = []
    for is_cheap in (False, True):
        with Float64Mode():
            wh.init()
            torch.manual_seed(1)
            model = Net()
            batch = torch.randn(BATCH_SIZE, WIDTH)
            layout, tensors = read_batch(batch)
            prepared = api._prepare(model, layout, tensors, None, wh.Config(), "cpu")
            made = wh.plan(Net(), batch, cluster=1, optimizer=sgd)
            if is_cheap:
                made = _with_cheap_regions(made, prepared.captured)
            engine = wh.parallelize(model, batch, optimizer=sgd, prepared=prepared, plan=made)
            with Products() as products:
                losses = [engine.step(batch).loss for _ in range(2)]
            found.append((losses, engine.full_state_dict(), products.number))
    (kept, weights, number), (again, weights_again, number_again) = found
    assert kept == again and number == number_again > 0
    for name, weight in weights.items():
        assert torch.equal(weight, weights_again[name]), name


def _with_cheap_regions(plan: Plan, captured: CapturedGraph) -> Plan:
    """The plan with all of them recomputed."""
    nodes = list(captured.compute_nodes())
    facts = GraphFacts(captured)
    size = captured.batch_size
    regions = cheap_regions(nodes, nodes, facts.costs(size), facts.saved(size))
    kinds = [[str(node.target).split(".")[1] for node in region] for region in regions]
    assert kinds == [["square", "linear"]] * NUM_LAYERS
    places = tuple(tuple(map(nodes.index, region)) for region in regions)
    stage = replace(plan.stages[0], recomputed=places)
    return replace(plan, templates=(replace(plan.template, stages=(stage,)),))


class Counted(nn.Module):
    """Batch norm between layers: running statistics and the count of batches must be
    updated once.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.norm(torch.tanh(self.first(x))))).square().mean()


def test_buffers_are_never_updated_twice() -> None:
    with Float64Mode():
        wh.init(wh.Config({"recompute": True}))
        batch = torch.randn(BATCH_SIZE, WIDTH)
        engine = wh.parallelize(Counted(), batch, optimizer=sgd)
        local = Counted()
        optimizer = sgd(local.parameters())
        for _ in range(2):
            engine.step(batch)
            optimizer.zero_grad()
            local(batch).backward()
            optimizer.step()
        for name, tensor in engine.full_state_dict().items():
            assert torch.allclose(tensor, local.state_dict()[name], rtol=0, atol=1e-12), name


@pytest.mark.parametrize("num_micro_batch", [1, 2])
def test_the_plan_says_what_batch_norm_means_with_several_micro_batches(
    num_micro_batch: int,
) -> None:
    """And local training in such micro-batches really is what it says."""
    with Float64Mode():
        wh.init(wh.Config({"num_micro_batch": num_micro_batch}))
        batch = torch.randn(BATCH_SIZE, WIDTH)
        engine = wh.parallelize(Counted(), batch, optimizer=sgd)
        expected = sum(
            Counted()(part).item() / num_micro_batch for part in batch.chunk(num_micro_batch)
        )
        assert engine.step(batch).loss == pytest.approx(expected, rel=1e-12)
        said = [
            note
            for note in engine.plan.notes
            if "over each of the 2 micro-batches, not over the whole mini-batch" in note
        ]
        assert len(said) == num_micro_batch - 1 and all("self.norm(" in note for note in said)
