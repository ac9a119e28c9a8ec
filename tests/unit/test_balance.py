"""Memory and order of heterogeneous devices: predictions against what autograd saves, refusals with
numbers, and what they say to try.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import whale as wh
from tests.unit.clusters import devices
from whale.cluster.cluster import Cluster, Device, DeviceKind, Link, device_kind
from whale.cluster.file import loads
from whale.planning.balance import device_orders
from whale.planning.idle_devices import idle_ranks
from whale.planning.workload import INSIDE_OPERATIONS
from whale.plans.plan import Plan
from whale.plans.shares import DoesNotFit
from whale.report.tables import samples_by_rank
from whale.units import human_seconds

WIDTH = 32
NUM_LAYERS = 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters)  # type: ignore[arg-type]


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)  # type: ignore[arg-type]


def plan_of(
    cluster: Cluster, batch_size: int = 16, optimizer: object = adam, **config: object
) -> Plan:
    # what is tested here is the balance of a plan, not the search for another one
    given = {} if "num_task_graph" in config else {"strategy": "data"}
    settings = {"recompute": False, **given, **config}
    return wh.plan(
        Net(), torch.randn(batch_size, WIDTH), cluster=cluster, config=settings, optimizer=optimizer
    )  # type: ignore[arg-type]


PARAMETERS = NUM_LAYERS * (WIDTH * WIDTH + WIDTH) * 4


def saved_by_eager(batch_size: int) -> int:
    """Bytes that autograd saves in the model itself, beside weights and batch."""
    model = Net()
    batch = torch.randn(batch_size, WIDTH)
    given = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), batch)}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(batch)
    assert loss.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize(("optimizer", "states"), [(adam, 2), (sgd, 0), (None, 2)])
def test_predicted_memory_is_what_autograd_and_optimizer_keep(
    optimizer: object, states: int
) -> None:
    memory = plan_of(devices(10**9), 16, optimizer).memory[0]
    assert (memory.parameter_bytes, memory.gradient_bytes) == (PARAMETERS, PARAMETERS)
    assert memory.optimizer_bytes == states * PARAMETERS
    assert (
        memory.buffer_bytes == 16 * WIDTH * 4 + 8
    )  # the mini-batch, and the number of samples that the mean divides by
    working = 2 * WIDTH * 4  # two of the largest result
    assert 16 * (memory.sample_bytes - working) == pytest.approx(
        (1 + INSIDE_OPERATIONS) * saved_by_eager(16)
    )


def test_a_large_early_result_needs_no_memory_while_late_ones_are_still_saved() -> None:
    """100 wide, then six layers 50 wide: two gradients of 100 come when 300 numbers were let go, so
    two of 50 at the end need most.
    """
    narrow = [layer for _ in range(5) for layer in (torch.nn.Linear(50, 50), torch.nn.ReLU())]
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 100), torch.nn.ReLU(), torch.nn.Linear(100, 50), torch.nn.ReLU(), *narrow
    )
    figures = wh.plan(
        model, torch.randn(8, 4), loss=lambda output, batch: output.sum(), cluster=1
    ).figures
    assert figures is not None
    (stage,) = figures.stages
    assert stage.memory.saved.sample_bytes == 4 * (100 + 6 * 50)
    assert stage.memory.workspace.sample_bytes == pytest.approx(
        2 * 50 * 4 + INSIDE_OPERATIONS * stage.memory.saved.sample_bytes
    )


def test_an_update_that_needs_more_than_the_backward_counts() -> None:
    """One large weight and few samples: AdamW's two copies of it are more than the gradient that a
    backward works with.
    """

    def plan(memory: int) -> Plan:
        return wh.plan(
            nn.Linear(512, 512, bias=False),
            torch.randn(2, 512),
            loss=lambda y, batch: y.sum(),
            cluster=devices(memory),
        )

    needed = wh.simulate(plan(10**9)).devices[0].peak_total_bytes
    assert needed > 6 * 512 * 512 * 4  # weight, gradient, two averages, two copies
    assert wh.simulate(plan(int(needed) + 1)).devices[0].peak_total_bytes == needed
    with pytest.raises(DoesNotFit, match="before the first sample"):
        plan(int(needed) - 1)


def test_early_stages_keep_more_micro_batches() -> None:
    plan = plan_of(devices(10**9, 10**9, 10**9), num_micro_batch=4, num_task_graph=3)
    value = WIDTH * 4
    # 3, 2 and 1 in flight: the results of 2 layers each, and what came in (the batch itself is
    # there anyway); 2 to work with
    kept = (2, 3, 3)
    expected = [
        number * each + 2 + INSIDE_OPERATIONS * each
        for number, each in zip((3, 2, 1), kept, strict=True)
    ]
    assert [plan.memory[rank].sample_bytes / value for rank in range(3)] == pytest.approx(expected)


def test_shares_follow_speed_and_stop_at_memory() -> None:
    assert [
        sum(s) for s in samples_by_rank(plan_of(devices(10**9, 10**9, rates=(3e12, 1e12))))
    ] == [12, 4]
    free = plan_of(devices(10**9, 10**9, rates=(3e12, 1e12))).memory[0]
    tight = int(free.static_bytes + 9.5 * free.sample_bytes)  # memory for 9
    plan = plan_of(devices(tight, 10**9, rates=(3e12, 1e12)))
    assert [sum(s) for s in samples_by_rank(plan)] == [9, 7]
    why = next(decision.why for decision in plan.decisions if decision.what == "samples by rank")
    assert "memory of rank 0 is full" in why


def test_a_device_without_samples_is_said() -> None:
    plan = plan_of(devices(10**9, 10**9, rates=(1e12, 1e9)))
    assert [sum(s) for s in samples_by_rank(plan)] == [16, 0]
    assert any(
        "rank 1 gets nothing: one sample there would take longer" in decision.why
        for decision in plan.decisions
    )
    full = int(plan.memory[1].static_bytes + 0.5 * plan.memory[1].sample_bytes)
    plan = plan_of(devices(10**9, full))
    assert [sum(s) for s in samples_by_rank(plan)] == [16, 0]
    assert any(
        "rank 1 gets nothing: not even one sample fits into its memory" in decision.why
        for decision in plan.decisions
    )


def two_hosts(slow_link: Link, num_slow: int = 1) -> Cluster:
    """Two fast devices, and slow ones on another host."""
    fast = DeviceKind("fast", 1e12, 10**9, 1e12)
    slow = DeviceKind("slow", 1e9, 10**9, 1e12)
    members = [Device(rank, "a", rank, fast) for rank in range(2)]
    members += [Device(2 + place, "b", place, slow) for place in range(num_slow)]
    return Cluster(tuple(members), Link(1e12, 1e-6), slow_link)


@pytest.mark.parametrize("num_slow", [1, 2])
def test_a_plan_says_that_it_would_be_faster_without_a_device_that_gets_no_samples(
    num_slow: int,
) -> None:
    cluster = two_hosts(Link(1e9, 1e-3), num_slow)
    plan = plan_of(cluster)
    assert [sum(s) for s in samples_by_rank(plan)] == [8, 8] + [0] * num_slow
    alone = plan_of(Cluster(cluster.devices[:2], cluster.intra_host, cluster.inter_host))
    said = next(
        decision for decision in plan.decisions if decision.what == "devices without samples"
    )
    steps = [human_seconds(wh.simulate(each).step_s) for each in (alone, plan)]
    assert steps[0] != steps[1]
    assert said.choice == ("rank 2" if num_slow == 1 else "rank 2-3")
    assert (
        f"a predicted step takes {steps[0]}, with {'it' if num_slow == 1 else 'them'} {steps[1]}"
        in said.why
    )


def test_a_plan_does_not_speak_of_devices_that_cost_nothing() -> None:
    """Sums that take no time, and an update that takes everyone the same."""
    free = plan_of(devices(10**9, 10**9, rates=(1e12, 1e9)))
    assert [sum(s) for s in samples_by_rank(free)] == [16, 0]
    assert "devices without samples" not in [decision.what for decision in free.decisions]


def test_only_whole_replicas_can_be_left_out_where_several_stay() -> None:
    """Replicas of two devices each, sharing samples: one idle device in each of two replicas, then
    both of the second replica.
    """
    kinds = {"fast": 1e12, "slow": 1e8}

    def idle(*names: str) -> tuple[int, ...]:
        cluster = devices(*(10**9 for _ in names), rates=tuple(kinds[name] for name in names))
        with_pairs = wh.annotate(Net(), {"layers": wh.replicate(2)})
        plan = wh.plan(with_pairs, torch.randn(16, WIDTH), cluster=cluster, optimizer=adam)  # type: ignore[arg-type]
        return idle_ranks(plan)

    assert idle("fast", "fast", "slow", "slow") == (2, 3)
    assert idle("fast", "slow", "fast", "fast") == ()
    assert idle("fast", "slow", "slow", "slow") == (1, 2, 3)


def test_a_model_that_fits_nowhere_is_refused_with_numbers() -> None:
    with pytest.raises(DoesNotFit) as error:
        plan_of(devices(10**5, 10**5))
    text = str(error.value)
    assert "rank 0 (k0) has 100 KB and needs 135 KB before the first sample" in text
    assert "25.3 KB parameters" in text and "50.7 KB optimizer state" in text
    assert text.endswith(
        'Try: "num_task_graph": 2 instead of 1: 2 stages x 1 model replica on the same devices'
    )
    plan_of(devices(10**5, 10**5), num_task_graph=2)
    needed = 1e-3 * plan_of(devices(10**9, 10**9)).memory[0].static_bytes
    found = re.search(
        r"([\d.]+) KB are missing there, ([\d.]+) KB on 2 devices together: .*offload", text
    )
    assert found is not None, text
    assert [float(each) for each in found.groups()] == pytest.approx(
        [needed - 100, 2 * (needed - 100)], rel=0.01
    )


def test_a_model_that_does_not_fit_on_one_device_is_offered_a_second_one() -> None:
    memory = int(0.7 * plan_of(devices(10**9)).memory[0].least_bytes)
    with pytest.raises(
        DoesNotFit, match=r'Try: 1 more device like rank 0 .k0. and "num_task_graph": 2$'
    ):
        plan_of(devices(memory))
    plan_of(devices(memory, memory), num_task_graph=2)


def test_only_what_was_tried_is_said_to_be_tried() -> None:
    with pytest.raises(
        DoesNotFit, match=r"No change helps that was tried \(more stages, one at a time\)"
    ):
        plan_of(
            devices(10**3, 10**3)
        )  # without stages there is no number of devices that could help


def test_every_advice_works_and_one_less_does_not() -> None:
    free = plan_of(devices(10**9, 10**9)).memory[0]
    memory = int(
        free.static_bytes + 5.5 * free.sample_bytes
    )  # memory for 5 of the 8 samples of each
    with pytest.raises(
        DoesNotFit, match=r"a micro-batch of 16 samples does not fit: rank 0 .k0. has memory for 5"
    ) as error:
        plan_of(devices(memory, memory))
    text = str(error.value)
    found = re.search(
        r'"num_micro_batch": (\d+) instead of 1; a batch of (\d+) instead of 16; (\d+) more devices? like rank 0',
        text,
    )
    assert found is not None, text
    micro_batches, batch, more = map(int, found.groups())
    plan_of(devices(memory, memory), num_micro_batch=micro_batches)
    assert micro_batches == 2  # the next above 1
    plan_of(devices(memory, memory), batch)
    with pytest.raises(DoesNotFit):
        plan_of(devices(memory, memory), batch + 1)
    plan_of(devices(*[memory] * (2 + more)))
    with pytest.raises(DoesNotFit):
        plan_of(devices(*[memory] * (1 + more)))


def test_devices_beside_one_that_was_alone_are_counted_with_buckets_on_all() -> None:
    """Where gradients are summed with others, a device has less free memory than alone."""
    free = plan_of(devices(10**9), 260).memory[0]
    memory = int(free.static_bytes + free.gradient_bytes + 110 * free.sample_bytes)
    with pytest.raises(DoesNotFit) as error:
        plan_of(devices(memory), 260)
    found = re.search(r"(\d+) more devices? like rank 0", str(error.value))
    assert found is not None, str(error.value)
    plan_of(devices(*[memory] * (1 + int(found[1]))), 260)
    with pytest.raises(DoesNotFit):
        plan_of(devices(*[memory] * int(found[1])), 260)


@pytest.mark.parametrize(
    ("fraction", "refusal"),
    [(0.9, "a micro-batch of 256 samples does not fit"), (0.35, "no cut into 2 stages fits")],
)
def test_every_advice_for_a_pipeline_works_and_one_less_does_not(
    fraction: float, refusal: str
) -> None:
    """2 stages x 2 replicas with memory for a part of their samples."""
    shape = {"num_micro_batch": 2, "num_task_graph": 2}
    free = plan_of(devices(*[10**9] * 4), 512, **shape).memory[0]
    memory = int(free.static_bytes + fraction * 128 * free.sample_bytes)
    with pytest.raises(DoesNotFit, match=f"{refusal}.* Try: ") as error:
        plan_of(devices(*[memory] * 4), 512, **shape)
    text = str(error.value)
    micro_batches = re.search(r'"num_micro_batch": (\d+) instead of 2', text)
    batch = re.search(r"a batch of (\d+) instead of 512", text)
    more = re.search(r'(\d+) more devices like rank 0 \(k0\) and "num_task_graph": (\d+)', text)
    assert (
        micro_batches is not None
        and batch is not None
        and ('"recompute": "auto"' in text, more is not None) == (fraction > 0.5, fraction > 0.5)
    )
    trials: list[Callable[[int], Plan]] = [  # by how much less than offered
        lambda less: plan_of(
            devices(*[memory] * 4),
            512,
            **{**shape, "num_micro_batch": int(micro_batches[1]) - less},
        ),
        lambda less: plan_of(devices(*[memory] * 4), int(batch[1]) + 2 * less, **shape),
    ]
    if more is not None:
        number = int(more[1])
        stages = int(more[2])
        assert number == 2 * (stages - 2)  # in both replicas
        trials.append(
            lambda less: plan_of(
                devices(*[memory] * (4 + number - 2 * less)),
                512,
                **{**shape, "num_task_graph": stages - less},
            )
        )
        plan_of(devices(*[memory] * 4), 512, **shape, recompute="auto")
    for trial in trials:
        trial(0)
        with pytest.raises(DoesNotFit):
            trial(1)


def test_cuts_follow_speed() -> None:
    """Layers are alike: a stage on a device of twice the speed gets twice the layers."""
    plan = plan_of(devices(10**9, 10**9, rates=(2e12, 1e12)), num_micro_batch=4, num_task_graph=2)
    assert [stage.forward_flop for stage in plan.stages] == [
        4 * 2 * 16 * WIDTH * WIDTH,
        2 * 2 * 16 * WIDTH * WIDTH,
    ]


def test_cuts_of_a_wave_count_messages_where_they_are() -> None:
    """Two devices, one twice as fast, 12 layers, and a message that takes as long as half a layer
    of the slow one. The wave turns on the slow device, where nothing is sent: every chunk has one
    message, so the layers follow the speed alone. Counted at the turn as well, the message would
    take layers from the slow device."""
    layer_flop = 2 * 16 * WIDTH * WIDTH
    sent_bytes = 16 * WIDTH * 4
    kinds = [DeviceKind("fast", 2e6, 10**9, 1e18), DeviceKind("slow", 1e6, 10**9, 1e18)]
    link = Link(sent_bytes / (0.5 * layer_flop / kinds[1].flop_per_s), 0.0)
    pair = Cluster(
        tuple(Device(i, f"host{i}", 0, kind) for i, kind in enumerate(kinds)), link, link
    )
    config = {"num_micro_batch": 4, "num_task_graph": 2, "schedule": "wave", "num_waves": 1}
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(12)))
    plan = wh.plan(
        model, torch.randn(16, WIDTH), loss=lambda out, _: out.sum(), cluster=pair, config=config
    )
    assert [stage.virtual_device for stage in plan.stages] == [0, 1, 1, 0]
    assert [stage.forward_flop / layer_flop for stage in plan.stages] == [4, 2, 2, 4]


def test_cuts_follow_memory() -> None:
    """Equal speed, but the first device has memory for two layers only."""
    layer = (WIDTH * WIDTH + WIDTH) * 4 * 4  # with gradient and two states
    plan = plan_of(
        devices(int(2.9 * layer), 10**9), batch_size=2, num_micro_batch=2, num_task_graph=2
    )
    assert plan.memory[0].total_bytes(1) <= plan.memory[0].capacity_bytes
    small = plan.place_of_rank(0)[0]
    layers = [stage.parameter_bytes / (PARAMETERS / NUM_LAYERS) for stage in plan.stages]
    assert layers == ([2, 4] if small == 0 else [4, 2])


MIXED = loads(
    "hosts: [{name: a, devices: [{kind: P100}, {kind: V100-32GB}, {kind: P100}, {kind: "
    "V100-32GB}]}]"
)


def test_orders_of_four_devices_in_two_stages() -> None:
    orders = {order.name: order.ranks for order in device_orders(MIXED, 2, "fp32")}
    assert orders == {
        "rank order": (0, 1, 2, 3),
        "stage by stage, larger memory first": (
            1,
            0,
            3,
            2,
        ),  # replica 0: V100 then P100, replica 1 the same
        "replica by replica, equal devices": (1, 3, 0, 2),
    }
    assert (
        len(device_orders(MIXED, 1, "fp32"))
        == len(device_orders(Cluster.uniform(4, "T4"), 2, "fp32"))
        == 1
    )


def test_the_order_with_the_fastest_slowest_device_is_taken() -> None:
    plan = wh.plan(
        Net(),
        torch.randn(16, WIDTH),
        cluster=MIXED,
        config={"num_micro_batch": 2, "num_task_graph": 2},
    )
    decision = next(decision for decision in plan.decisions if decision.what == "order of devices")
    found = re.findall(r"(?:: |, )([a-z][a-z ,]*?) ([0-9.]+) (s|ms|us)", decision.why)
    times = {
        name: float(number) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit]
        for name, number, unit in found
    }
    assert times[decision.choice] == min(times.values())
    assert device_kind("V100-32GB").name in plan.device_kinds


@pytest.mark.parametrize(
    "make",
    [torch.optim.Adafactor, torch.optim.Adam, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)],
)
def test_state_of_any_optimizer_is_counted_as_it_really_is(
    make: Callable[[object], torch.optim.Optimizer],
) -> None:
    """Adafactor looks at values, so it cannot run without data; its state is a row and a column of
    each matrix.
    """
    model = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 7, bias=False))
    plan = wh.plan(
        model,
        torch.randn(4, 24),
        loss=lambda out, _: out.sum(),
        cluster=1,
        optimizer=lambda p: make([q for _, q in p]),
    )
    optimizer = make(list(model.parameters()))
    model(torch.randn(4, 24)).sum().backward()
    optimizer.step()
    held = [
        v
        for state in optimizer.state.values()
        for v in state.values()
        if isinstance(v, torch.Tensor) and v.dim()
    ]
    assert plan.memory[0].optimizer_bytes == sum(v.numel() * v.element_size() for v in held)


def test_a_grid_counts_its_parts() -> None:
    """Classifier cut over 4 devices: each holds a quarter of it and all of the rest, and sums
    gradients of the rest only.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 400, bias=False))
    wh.annotate(model, {"0": wh.replicate(4), "1": wh.split(4, grid=(1, 4, 1))})
    plan = wh.plan(
        model,
        torch.randn(16, WIDTH),
        loss=lambda out, _: -out.log_softmax(-1)[:, 0].mean(),
        cluster=4,
    )
    assert plan.figures is not None
    kept = {state.weight_bytes: state.groups(plan.ranks_of_stage) for state in plan.figures.states}
    assert kept == {WIDTH * WIDTH * 4: ((0, 1, 2, 3),), WIDTH * 400: ((0,), (1,), (2,), (3,))}
    timeline = wh.simulate(plan)
    assert (
        timeline.devices[0].peak_bytes["weights"]
        == WIDTH * WIDTH * 4 + WIDTH * 400
        == plan.memory[0].parameter_bytes
    )
