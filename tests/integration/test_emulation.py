"""Emulated jobs on real ranks: they train like local PyTorch, keep the times of their devices and
links, and fill their memory.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import whale as wh
from tests.exactness import local_training, mean_square
from tests.ranks import RankError, preload, run_ranks
from whale.cluster.cluster import Cluster
from whale.distributed.message import NUM_EPOCHS, Message
from whale.distributed.ranks import Ranks
from whale.emulation import emulation, pace
from whale.emulation.emulation import EmulatedPlatform
from whale.emulation.links import EmulatedTransport, NetworkCards
from whale.emulation.settings import EmulationSettings

preload("tests.integration.test_emulation")

NUM_STEPS = 3
UNLIKE = """
hosts: [{name: big, kind: V100-16GB, count: %d}, {name: small, kind: P100, count: %d}]
links: {intra_host: {gb_per_s: 100}, inter_host: {gb_per_s: 10, latency_us: 0.1}}
"""
"""links are fast, as the model is small: a microsecond would be stretched to a second"""
SMALL = """
hosts: [{name: big, kind: V100-16GB}, {name: small, kind: mouse}]
links: {inter_host: {gb_per_s: 10, latency_us: 0.1}}
kinds: {mouse: {tflop_per_s: 10, memory_gb: %s, gb_per_s: 500}}
"""


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with wh.replicate(1):
            self.first = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16))
        with wh.replicate(1):
            self.second = nn.Sequential(nn.Tanh(), nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def net() -> nn.Module:
    torch.manual_seed(0)
    return Halves().double()


def mini_batches() -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randn(8, 32, generator=random, dtype=torch.float64) for _ in range(NUM_STEPS)]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def plain_losses() -> list[float]:
    return local_training(net(), mini_batches(), mean_square, adam).losses


def train(
    settings: EmulationSettings, config: dict[str, Any], plan: wh.Plan | None = None
) -> tuple[list[float], float]:
    """Losses, and by how much times were stretched."""
    settings.pass_on()
    wh.init({"num_micro_batch": 2, **config})
    engine = wh.parallelize(net(), mini_batches()[0], optimizer=adam, loss=mean_square, plan=plan)
    losses = [engine.step(batch).loss for batch in mini_batches()]
    engine.close()
    platform = engine._job.platform
    assert isinstance(platform, EmulatedPlatform)
    return losses, platform.factor


def settings_for(folder: Path, cluster: str, stub: bool = False) -> EmulationSettings:
    (folder / "cluster.yaml").write_text(cluster)
    return EmulationSettings(str(folder / "cluster.yaml"), str(folder / "emulation"), stub)


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / "emulation" / name).read_text())


def check_against_simulation(folder: Path, config: dict[str, Any]) -> None:
    """The emulation predicts what `wh.simulate` does for the same plan, and its memory is filled as
    far.
    """
    plan = wh.plan(
        net(),
        mini_batches()[0],
        loss=mean_square,
        cluster=folder / "cluster.yaml",
        config=config,
        optimizer=adam,
    )
    timeline = wh.simulate(plan)
    predicted = read(folder, "prediction.json")
    assert predicted["step_s"] / predicted["factor"] == pytest.approx(timeline.step_s, rel=1e-9)
    assert predicted["gradients_s"] / predicted["factor"] == pytest.approx(
        timeline.gradients_s, rel=1e-9
    )
    for device, events in zip(timeline.devices, predicted["events"], strict=True):
        done = [
            name for name, _, _ in events if not name.startswith("receive")
        ]  # stretched times may round a wait of nothing up or down
        assert done == [
            event.name for event in device.events if not event.name.startswith("receive")
        ]
        assert read(folder, f"rank_{device.rank:05d}.json")["peak_bytes"] == pytest.approx(
            device.peak_bytes
        )


def test_emulated_training_is_exact_and_keeps_the_times_of_devices_and_links(
    tmp_path: Path,
) -> None:
    results = run_ranks(train, 2, settings_for(tmp_path, UNLIKE % (1, 1)), {})
    for losses, _ in results:
        assert losses == pytest.approx(plain_losses(), rel=1e-12)
    factor = results[0][1]
    records = [read(tmp_path, f"rank_{rank:05d}.json") for rank in range(2)]
    assert [record["kind"] for record in records] == ["V100-16GB", "P100"]
    check_against_simulation(tmp_path, {"num_micro_batch": 2})
    measured = [{name: (start, end) for name, start, end in record["events"]} for record in records]
    predicted = [
        {name: end - start for name, start, end in events}
        for events in read(tmp_path, "prediction.json")["events"]
    ]
    computed = [(rank, name) for rank in range(2) for name in predicted[rank] if name[0] in "FB"]
    assert len(computed) == 2 * 2 * 2
    for rank, name in computed:
        start, end = measured[rank][name]
        assert end - start >= 0.999 * predicted[rank][name]
    for micro_batch in range(
        2
    ):  # 4 samples of 16 doubles over 10 GB/s, 0.1 microseconds on the way
        sent = measured[0][f"send F 0>1.{micro_batch}"][0]
        arrived = measured[1][f"receive F 0>1.{micro_batch}"][1]
        assert arrived - sent >= factor * (4 * 16 * 8 / 1e10 + 1e-7)


def train_too_fast(
    settings: EmulationSettings, config: dict[str, Any]
) -> tuple[list[float], float, str]:
    """As if devices were so fast that no action here could be in time at first; also what this rank
    printed.
    """
    emulation.stretch_factor = lambda shortest_s: 1.0
    pace.LATE_S = 0.0
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        losses, factor = train(settings, config)
    return losses, factor, printed.getvalue()


@pytest.mark.parametrize(("num_micro_batch", "num_counted"), [(2, 2), (1, 1)])
def test_times_are_stretched_once_more_where_this_machine_is_too_slow(
    num_micro_batch: int, num_counted: int, tmp_path: Path
) -> None:
    """With one micro-batch the second step says how slow it is, and only the third counts."""
    config = {"num_micro_batch": num_micro_batch}
    results = run_ranks(train_too_fast, 2, settings_for(tmp_path, UNLIKE % (1, 1)), config)
    factor = results[0][1]
    assert factor > 1 and results[1][1] == factor
    said = [printed.count(f"are now stretched by {factor:.4g}") for _, _, printed in results]
    assert said == [1, 0]
    for losses, _, _ in results:
        assert losses == pytest.approx(plain_losses(), rel=1e-12)
    assert read(tmp_path, "prediction.json")["factor"] == factor
    check_against_simulation(tmp_path, config)
    predicted = read(tmp_path, "prediction.json")["events"]
    for rank in range(2):
        record = read(tmp_path, f"rank_{rank:05d}.json")
        assert 1 <= len(record["steps"]) <= num_counted
        measured = {name: end - start for name, start, end in record["events"]}
        wanted = {name: end - start for name, start, end in predicted[rank] if name[0] in "FB"}
        assert len(wanted) == record["num_actions"] / len(record["steps"]) == 2 * num_micro_batch
        assert all(measured[name] >= 0.999 * seconds for name, seconds in wanted.items())


def test_a_given_stretch_stays(tmp_path: Path) -> None:
    settings = replace(settings_for(tmp_path, UNLIKE % (1, 1)), stretch=3.0)
    results = run_ranks(train_too_fast, 2, settings, {})
    assert [factor for _, factor, _ in results] == [3.0, 3.0]


def test_a_wave_over_replicas_with_stub_chunks_does_the_actions_of_its_plan(tmp_path: Path) -> None:
    config = {"schedule": "wave", "num_micro_batch": 4}
    settings = settings_for(tmp_path, UNLIKE % (2, 2), stub=True)
    losses = [losses for losses, _ in run_ranks(train, 4, settings, config)]
    assert all(each == losses[0] for each in losses)
    plan = wh.plan(
        net(), mini_batches()[0], loss=mean_square, cluster=settings.cluster, config=config
    )
    schedule = plan.schedule
    assert len(plan.stages) == 4
    for rank in range(4):
        done = [name for name, _, _ in read(tmp_path, f"rank_{rank:05d}.json")["events"]]
        planned = [
            str(action)
            for action in schedule.orders[plan.place_of_rank(rank)[0]]
            if str(action) != "update"
        ]
        assert done == [*planned, "all-reduce"]
    check_against_simulation(tmp_path, config)
    peaks = read(tmp_path, "rank_00000.json")["peak_bytes"]
    trained = sum(plan.stages[stage].parameter_bytes for stage in plan.stages_of_rank(0))
    assert (peaks["weights"], peaks["gradients"], peaks["optimizer state"]) == (
        trained,
        trained,
        2 * trained,
    )


def on_grid() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 32)).double()


def train_on_grid(settings: EmulationSettings) -> list[float]:
    settings.pass_on()
    wh.init()
    model = wh.annotate(on_grid(), {"*": wh.split(4, (1, 2, 2))})
    engine = wh.parallelize(model, mini_batches()[0], optimizer=adam, loss=mean_square)
    losses = [engine.step(batch).loss for batch in mini_batches()]
    engine.close()
    return losses


@pytest.mark.parametrize("stub", [False, True])
def test_heterogeneous_devices_on_a_grid(stub: bool, tmp_path: Path) -> None:
    """Parts of weights are summed over lines of the grid: groups that nothing else asks for."""
    losses = run_ranks(train_on_grid, 4, settings_for(tmp_path, UNLIKE % (2, 2), stub))
    assert all(each == losses[0] for each in losses)
    if not stub:
        assert losses[0] == pytest.approx(
            local_training(on_grid(), mini_batches(), mean_square, adam).losses, rel=1e-12
        )


REPLICAS = [{"stages": [[0]], "samples": 4}, {"stages": [[2], [1]], "num_micro_batch": 2}]


def train_heterogeneous(settings: EmulationSettings) -> list[float]:
    settings.pass_on()
    wh.init({"replicas": REPLICAS})
    engine = wh.parallelize(on_grid(), mini_batches()[0], optimizer=adam, loss=mean_square)
    losses = [engine.step(batch).loss for batch in mini_batches()]
    engine.close()
    return losses


@pytest.mark.parametrize("stub", [False, True])
def test_model_replicas_that_are_not_alike(stub: bool, tmp_path: Path) -> None:
    """One V100 beside a pipeline of two P100: actions, predicted times and memory are those of the
    plan.
    """
    settings = settings_for(tmp_path, UNLIKE % (1, 2), stub)
    losses = run_ranks(train_heterogeneous, 3, settings)
    assert all(each == losses[0] for each in losses)
    if not stub:
        local = local_training(on_grid(), mini_batches(), mean_square, adam)
        assert losses[0] == pytest.approx(local.losses, rel=1e-12)
    plan = wh.plan(
        on_grid(),
        mini_batches()[0],
        loss=mean_square,
        cluster=settings.cluster,
        config={"replicas": REPLICAS},
        optimizer=adam,
    )
    timeline = wh.simulate(plan)
    predicted = read(tmp_path, "prediction.json")
    assert predicted["step_s"] / predicted["factor"] == pytest.approx(timeline.step_s, rel=1e-9)
    for rank in range(3):
        record = read(tmp_path, f"rank_{rank:05d}.json")
        view = plan.of_rank(rank)
        order = view.schedule.orders[view.place_of_rank(rank)[0]]
        planned = [str(action) for action in order if str(action) != "update"]
        assert [name for name, _, _ in record["events"]] == [*planned, "all-reduce"]
        assert record["peak_bytes"] == pytest.approx(timeline.devices[rank].peak_bytes)


@pytest.mark.parametrize(
    ("gigabytes", "message"),
    [
        (
            "1.0e-5",
            "is out of memory at the start: weights need 25.3 KB more, but only 10.0 KB of 10.0 "
            "KB are free",
        ),
        ("2.9e-5", "is out of memory at F1.0: activations need"),
        ("9.0e-5", "is out of memory at update: optimizer state need 50.7 KB more"),
    ],
)
def test_an_over_full_device_fails_as_a_real_one_would(
    gigabytes: str, message: str, tmp_path: Path
) -> None:
    """The plan was made without limits: the planner itself would refuse this cluster."""
    plan = wh.plan(
        net(), mini_batches()[0], loss=mean_square, cluster=2, config={"num_micro_batch": 2}
    )
    with pytest.raises(RankError) as error:
        run_ranks(train, 2, settings_for(tmp_path, SMALL % gigabytes), {}, plan)
    assert "rank 1 (an emulated mouse on small) " + message in str(error.value)


def arrivals(cluster_file: str, cards: str, num_bytes: float) -> list[float]:
    """When messages of two ranks that were sent at the same time arrive at a third, in seconds from
    then.
    """
    ranks = Ranks("cpu")
    transport = EmulatedTransport(
        ranks, [(0, 2), (1, 2)], Cluster.load(cluster_file), NetworkCards(Path(cards), 2), 1.0
    )
    transport.num_bytes = lambda message: num_bytes
    start: float = ranks.from_first(time.perf_counter())
    if ranks.rank < 2:
        transport.send(torch.ones(1), Message(2, ranks.rank * NUM_EPOCHS, ()))
        transport.drain()
        return []
    posted = [
        transport.post(torch.zeros(1), Message(source, source * NUM_EPOCHS, ()), "a message")
        for source in range(2)
    ]
    times = []
    for arrival in posted:
        transport.wait(arrival)
        times.append(time.perf_counter() - start)
    return times


def test_messages_come_when_their_link_allows_and_share_the_card_of_their_host(
    tmp_path: Path,
) -> None:
    (tmp_path / "cluster.yaml").write_text(UNLIKE % (2, 1))
    NetworkCards.create(tmp_path / "cards", 2)
    times = run_ranks(arrivals, 3, str(tmp_path / "cluster.yaml"), str(tmp_path / "cards"), 2e9)[2]
    assert min(times) >= 0.2 and max(times) >= 0.4  # 0.2 s each over 10 GB/s, one after the other
