"""The parts of an emulation, each against a formula or a hand-worked case. Times are bounded from
below only: the machine may be busy.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from tests.zoo import MAIN
from whale.api import _prepare
from whale.capture.batch import read_batch
from whale.cli import app
from whale.cluster.cluster import Cluster, Device, Link, Network
from whale.cluster.kinds import DeviceKind
from whale.config import Config
from whale.distributed.message import Message, MessagePiece
from whale.emulation.links import NetworkCards
from whale.emulation.memory import EmulatedMemory, EmulatedOutOfMemory, state_per_weight
from whale.emulation.pace import (
    HEADROOM,
    LONGEST_STEP_S,
    SHORTEST_S,
    Pace,
    Trial,
    enough_stretch,
    is_late,
    stretch_factor,
    wanted_stretch,
)
from whale.emulation.settings import RANK_BYTES, most_ranks
from whale.emulation.stub import make_stub
from whale.lowering.chunk import crossing_values
from whale.lowering.messages import MessagePart, build_bridges
from whale.planning.planner import make_plan
from whale.planning.problem import Problem
from whale.planning.stages import Assignment, apply_plan
from whale.plans.figures import Figures, StageFigures, StateFigures
from whale.plans.samples import SampleMap
from whale.report.rehearsal import Rehearsal, _verdict, picture, read_rehearsal, shares
from whale.scheduling import Action, Kind
from whale.scheduling.action import backward, forward
from whale.scheduling.memory import ActionMemory, Bytes
from whale.simulation.communication import ring_s
from whale.simulation.simulate import figures_in
from whale.simulation.times import Times

MOUSE = DeviceKind("mouse", 1e12, 1000, 1e11)


def test_an_action_takes_its_time_from_its_start() -> None:
    action = forward(0, 0)
    pace = Pace({action: 0.02})
    start = time.perf_counter()
    pace.finish(action, start)
    assert time.perf_counter() - start >= 0.02
    assert pace.num_actions == 1


def test_more_than_one_overrun_in_a_hundred_is_invalid() -> None:
    late = backward(1, 2)
    idle = Action(Kind.WEIGHT, 1, 2)
    pace = Pace({late: 0.001, forward(0, 0): 1e-9, idle: 0.0})
    pace.finish(late, time.perf_counter() - 0.5)
    assert (pace.num_overruns, pace.worst_overrun[1], pace.is_valid) == (
        1,
        "B1.2",
        False,
    ) and pace.worst_overrun[0] > 0.4
    assert pace.worst_ratio == pytest.approx(1 + pace.worst_overrun[0] / 0.001)
    pace.finish(
        idle, time.perf_counter() - 0.5
    )  # takes no time on the emulated device: nothing to be late for
    assert pace.num_actions == 1


def test_times_are_stretched_and_never_shrunk() -> None:
    assert stretch_factor(1e-3) * 1e-3 == pytest.approx(SHORTEST_S)
    assert stretch_factor(10.0) == 1.0


def test_the_stretch_is_enough_for_what_the_machine_needed() -> None:
    in_time = [1.0] * 40
    assert enough_stretch(7.0, in_time, 0.1) == 7.0
    assert enough_stretch(7.0, [], 0.1) == 7.0  # a first step of one micro-batch
    assert enough_stretch(7.0, [*in_time, 3.0], 0.1) == 7 * 3
    # one of a hundred may be late, two may not
    assert enough_stretch(7.0, [*[1.0] * 99, 3.0], 0.1) == 7.0
    assert enough_stretch(7.0, [*[1.0] * 98, 3.0, 5.0], 0.1) == 7 * 3


@pytest.mark.parametrize(
    ("late_s", "seconds", "wanted"),
    [
        (0.0009, 0.005, 1.0),  # less than 1 ms is not late
        (0.0015, 0.020, 1.0),  # nor is less than a tenth
        (0.002, 0.010, 2 * 1.2),  # twice what it took
        (0.020, 0.010, 20.0),  # 20 ms are a tenth of 200 ms
        (1.000, 0.010, 1000.0),
    ],
)
def test_what_a_late_action_wants(late_s: float, seconds: float, wanted: float) -> None:
    found = wanted_stretch(late_s, seconds)
    assert found == pytest.approx(wanted)
    if found > 1:  # as late again, and the same work: no overrun any more
        assert not is_late(late_s, found * seconds)
        assert (seconds + late_s) * HEADROOM <= found * seconds + 1e-12


def test_a_machine_that_is_too_busy_makes_no_step_endless() -> None:
    """Such a run is left to be INVALID."""
    assert enough_stretch(7.0, [1000.0], LONGEST_STEP_S / 4) == 4 * 7
    assert enough_stretch(7.0, [1000.0], 2 * LONGEST_STEP_S) == 7.0  # it is long already


def test_the_first_action_of_each_kind_says_nothing_about_the_next() -> None:
    trial = Trial()
    seconds = {forward(0, 0): 0.001, forward(0, 1): 0.001, backward(0, 0): 0.001}
    pace = Pace(seconds | {forward(0, 2): 60.0}, trial=trial)
    long_ago = time.perf_counter() - 70
    pace.finish(forward(0, 0), long_ago)
    assert not trial.wanted
    pace.finish(forward(0, 1), long_ago)
    pace.finish(forward(0, 2), time.perf_counter() - 60)
    assert len(trial.wanted) == 2
    assert trial.wanted[0] > 70_000 and trial.wanted[1] == 1
    pace.finish(backward(0, 0), long_ago)
    assert len(trial.wanted) == 2  # of one micro-batch: the next step says it


def test_stretching_once_more_forgets_what_was_late() -> None:
    pace = Pace({forward(0, 0): 0.001})
    pace.finish(forward(0, 0), time.perf_counter() - 5)
    pace.restretch(3.0)
    assert pace.seconds == {forward(0, 0): pytest.approx(0.003)}
    assert (pace.num_actions, pace.num_overruns, pace.worst_ratio) == (0, 0, 1.0)


def test_two_senders_of_a_host_share_its_card(tmp_path: Path) -> None:
    NetworkCards.create(tmp_path / "cards", 2)
    first, second = (
        NetworkCards(tmp_path / "cards", 2) for _ in range(2)
    )  # as two processes open them
    now = time.perf_counter()
    ends = first.book(0, 5.0), second.book(0, 5.0), second.book(1, 5.0)
    assert ends[0] >= now + 5 and ends[1] == pytest.approx(ends[0] + 5)
    assert ends[2] < ends[0] + 5  # another host's card was free


def test_the_ring_takes_the_time_of_its_slowest_link() -> None:
    fast = Link(100.0, 0.1)
    slow = Link(10.0, 0.5)
    # 4 devices: 6 steps of a quarter of 80 bytes, 2 s each, and 0.5 s of latency each
    assert ring_s(80, [fast, slow, fast, fast], 4) == pytest.approx(6 * (2 + 0.5))
    assert ring_s(80, [fast, slow, fast, fast], 4, num_buckets=3) == pytest.approx(
        6 * (2 + 3 * 0.5)
    )  # each bucket goes its own steps
    assert ring_s(80, [fast], 1) == 0


def small_memory(capacity_bytes: int = 1000) -> EmulatedMemory:
    memory = ActionMemory(
        saved=Bytes(10.0, 50.0), weight_gradient=Bytes(30.0), workspace=Bytes(5.0)
    )
    stages = (StageFigures({}, memory),)
    states = (StateFigures((0,), 300, 200, 20),)
    network = Network(("cellar",), Link(1.0, 0.0), Link(1.0, 0.0))
    figures = Figures(
        stages,
        states,
        network,
        update_s=(0.0,),
        memory_bytes=(capacity_bytes,),
        optimizer_ratio=2.0,
        batch_bytes=7,
    )
    kind = DeviceKind("mouse", 1e12, capacity_bytes, 1e11)
    return EmulatedMemory(
        Device(3, "cellar", 0, kind), figures, (0,), shared_bytes=0, bucket_bytes=0
    )


def note(memory: EmulatedMemory, action: Action, num_samples: int) -> None:
    memory.start(action, num_samples)
    memory.end(action, num_samples)


def test_memory_is_taken_and_given_back_action_by_action() -> None:
    memory = small_memory()
    memory.place_weights()
    for micro_batch in range(2):
        note(memory, forward(0, micro_batch), 4)
    assert memory.used == {
        "weights": 300,
        "gradients": 0,
        "optimizer state": 0,
        "activations": 2 * 90,
        "buffers": 20 + 7,
    }
    memory.start(Action(Kind.INPUT, 0, 0), 4)
    assert (
        memory.used["activations"] == 180 + 20 and memory.used["gradients"] == 0
    )  # with workspace
    memory.end(Action(Kind.INPUT, 0, 0), 4)
    assert (
        memory.used["activations"] == 90 + 4 * 30
    )  # inputs of layers and gradients of their results wait for the weight gradient
    note(memory, Action(Kind.WEIGHT, 0, 0), 4)
    assert memory.used["activations"] == 90 and memory.used["gradients"] == 200
    note(memory, backward(0, 1), 4)
    assert memory.used["activations"] == 0 and memory.used["gradients"] == 200
    assert sum(memory.peak.values()) == 300 + 200 + 90 + 20 + 20 + 7


def test_an_update_takes_what_the_simulation_counts() -> None:
    """Its own stage has 40 bytes beside the samples; another, that holds a part of the same
    weights, is on another device.
    """
    memory = small_memory(capacity_bytes=1047)
    stages = (
        replace(memory.figures.stages[0], gradient_workspace_bytes=40.0),
        replace(memory.figures.stages[0], gradient_workspace_bytes=900.0),
    )
    memory.figures = replace(memory.figures, stages=stages)
    memory.held = (replace(memory.held[0], stages=(0, 1)),)
    memory.place_weights()
    note(memory, forward(0, 0), 1)
    note(memory, backward(0, 0), 1)
    layer = nn.Linear(4, 4)
    adam = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 4)).sum().backward()
    adam.step()
    full = 300 + 20 + 7 + 200 + 2 * 200  # weights, buffers, batch, gradients, two averages
    memory.update(adam)
    assert sum(memory.peak.values()) == full + 2 * 40 and memory.total == full
    memory.device = replace(memory.device, kind=replace(memory.device.kind, memory_bytes=full + 79))
    with pytest.raises(EmulatedOutOfMemory, match="at update: activations need 80 B more"):
        memory.update(adam)


def test_an_over_full_device_names_rank_action_class_and_numbers() -> None:
    memory = small_memory(capacity_bytes=450)
    memory.place_weights()
    note(memory, forward(0, 0), 4)
    with pytest.raises(torch.OutOfMemoryError) as error:  # what a real device raises
        note(memory, forward(0, 1), 4)
    assert isinstance(error.value, EmulatedOutOfMemory)
    words = (
        "rank 3 (an emulated mouse on cellar) is out of memory at F0.1: activations need 90 B "
        "more, but only 33 B of 450 B are free"
    )
    assert words in str(error.value)
    with pytest.raises(EmulatedOutOfMemory, match=r"at B0\.0: gradients need 200 B more"):
        note(memory, backward(0, 0), 4)
    with pytest.raises(EmulatedOutOfMemory, match="at the start: weights need 300 B more"):
        small_memory(capacity_bytes=100).place_weights()


@pytest.mark.parametrize(
    ("factory", "expected"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0.0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1.0),
        (lambda p: torch.optim.AdamW(p), 2.0),
    ],
)
def test_optimizer_state_is_measured(factory: object, expected: float) -> None:
    layer = nn.Linear(4, 4)
    optimizer = factory(layer.parameters())  # type: ignore[operator]
    layer(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert state_per_weight(optimizer) == expected


# ---- stub chunks


def planned(cluster: Cluster, **config: object) -> tuple[object, Times, Assignment]:
    """A GPT-2 with two tied ends, cut into 4 stages."""
    case = next(case for case in MAIN if case.name == "gpt2")
    model = case.build()
    settings = Config({"num_micro_batch": 3, "num_task_graph": 4, **config})
    layout, tensors = read_batch(case.batch(0, 12))
    prepared = _prepare(model, layout, tensors, case.loss, settings, "cpu")
    plan, assignment = make_plan(
        Problem(
            prepared.captured,
            prepared.kinds,
            {},
            None,
            prepared.term_texts(),
            prepared.not_additive,
            cluster,
            settings,
            12,
        )
    )
    return prepared, Times(plan, figures_in(plan)), assignment


@pytest.fixture(scope="module")
def gpt2() -> tuple[object, Times, Assignment]:
    return planned(Cluster.uniform(8, devices_per_host=4))


def message_of(part: MessagePart) -> Message:
    shape = part.value.shape_for(part.num_samples)
    return Message(part.peer, 0, (MessagePiece(part.value.index, None, shape, part.value.dtype),))


def test_a_stub_has_the_stages_holders_and_messages_of_its_plan(
    gpt2: tuple[object, Times, Assignment],
) -> None:
    prepared, times, assignment = gpt2
    plan = times.plan
    stub = make_stub(times.plan, times.figures)
    assert stub.plan.schedule == plan.schedule
    assert set(stub.plan.holders.values()) == {holders for name, holders in plan.holders.items()}
    small = apply_plan(stub.plan, stub.prepared.captured, stub.prepared.kinds)
    for rank in range(plan.num_devices):
        found = []
        for each, graph, one in (
            (plan, prepared.captured, assignment),
            (stub.plan, stub.prepared.captured, small),
        ):  # type: ignore[attr-defined]
            bridges = build_bridges(
                each, one, crossing_values(graph, one), SampleMap(each, 12, 3), rank
            )
            messages = {}
            for key, parts in [*bridges.sending.items(), *bridges.receiving.items()]:
                messages[key] = sorted(
                    (
                        part.peer,
                        part.num_samples,
                        part.value.gradient,
                        stub.num_bytes(message_of(part))
                        if each is stub.plan
                        else torch.Size(part.value.shape_for(part.num_samples)).numel()
                        * part.value.dtype.itemsize,
                    )
                    for part in parts
                )
            found.append(messages)
        assert found[0] == found[1] and found[0]


# ---- report and command line


def test_shares_and_picture_of_a_hand_made_step() -> None:
    events = [
        ("F0.0", 0.0, 2.0),
        ("send F 0>1.0", 2.0, 2.0),
        ("receive B 1>0.0", 2.0, 5.0),
        ("B0.0", 5.0, 9.0),
        ("all-reduce", 9.0, 9.5),
    ]
    found = shares(events, 10.0)
    assert (found.busy, found.wait, found.idle) == pytest.approx((0.6, 0.35, 0.05))
    assert (
        picture([events], ["rank 0"], 10.0) == "rank 0  " + "0" * 20 + "." * 30 + "a" * 40 + "." * 5
    )


def test_an_invalid_run_is_called_invalid(tmp_path: Path) -> None:
    record = {
        "rank": 0, "kind": "V100", "host": "a", "memory_bytes": 1, "peak_bytes": {}, "steps": [[0.0, 2.0], [3.0, 4.0], [5.0, 6.5]],
        "events": [["F0.0", 5.0, 6.0]], "num_actions": 50, "num_overruns": 2, "worst_overrun": [0.03, "F0.1"],
        "worst_ratio": 3.0,
    }  # fmt: skip
    (tmp_path / "rank_00000.json").write_text(json.dumps(record))
    prediction = {
        "events": [[["F0.0", 0.0, 1.0]]],
        "step_s": 1.25,
        "gradients_s": 1.0,
        "factor": 7.0,
        "is_stub": False,
    }
    (tmp_path / "prediction.json").write_text(json.dumps(prediction))
    rehearsal = read_rehearsal(tmp_path)
    assert isinstance(rehearsal, Rehearsal) and rehearsal.step_s == 1.5
    words = _verdict(rehearsal)
    assert (
        words.startswith("INVALID: 2 of 50 actions (4.0 %)")
        and "the forward of stage 0, micro-batch 1 (F0.1) on rank 0, 30.0 ms late" in words
        and "--stretch 42" in words  # twice 7 x 3
    )


def test_a_rank_that_the_plan_leaves_out_has_no_times(tmp_path: Path) -> None:
    """It waits at the end of a step and runs ahead of the others: it counts for nothing."""
    record = {
        "rank": 0, "kind": "V100", "host": "a", "memory_bytes": 1, "peak_bytes": {}, "steps": [[3.0, 4.5]],
        "events": [["F0.0", 3.0, 4.0], ["all-reduce", 4.0, 4.5]], "num_actions": 1, "num_overruns": 0, "worst_overrun": [0.0, ""],
        "worst_ratio": 1.0,
    }  # fmt: skip
    left_out = record | {"rank": 1, "steps": [[0.5, 9.0]], "events": [], "num_actions": 0}
    for each in (record, left_out):
        (tmp_path / f"rank_{each['rank']:05d}.json").write_text(json.dumps(each))
    prediction = {"step_s": 1.25, "gradients_s": 1.0, "factor": 7.0, "is_stub": False}
    (tmp_path / "prediction.json").write_text(json.dumps(prediction | {"events": [[], []]}))
    rehearsal = read_rehearsal(tmp_path)
    assert rehearsal is not None and rehearsal.step_s == rehearsal.last_step_s == 1.5
    assert rehearsal.measured == [[("F0.0", 0.0, 1.0), ("all-reduce", 1.0, 1.5)], []]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "--lr 3 --emulate cluster.yaml",
            "whale run: --emulate stands behind the script and goes to it; options of whale run "
            "stand before it\n",
        ),
        (
            "-n 2 --stretch=4 -n 3",
            "whale run: -n, --stretch stand behind the script and go to it; options of whale run "
            "stand before it\n",
        ),
        ("--lr 3 emulate script arguments --help", ""),
    ],
)
def test_options_of_whale_run_behind_the_script_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, line: str
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    passed_on: list[list[str]] = []
    monkeypatch.setattr(
        "whale.cli.running._launch", lambda script, arguments, *_: passed_on.append(arguments)
    )
    result = CliRunner().invoke(app, ["run", "-n", "1", str(script), *words.split()])
    assert (result.exit_code, result.stderr) == (0, line)
    assert passed_on == [words.split()]


def refused(*words: str) -> str:
    result = CliRunner().invoke(app, ["run", *words])
    assert result.exit_code == 2
    return result.stderr


def test_a_cluster_larger_than_the_machine_is_refused_with_the_limit(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    script = tmp_path / "train.py"
    script.write_text("")
    file.write_text("hosts: [{name: a, kind: V100-16GB, count: 90000}]")
    message = refused("--emulate", str(file), str(script))
    assert (
        "has 90000 devices, but this machine can start about" in message
        and "each rank takes about 300 MB" in message
    )
    assert most_ranks(10 * RANK_BYTES + 1) == 10


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    script = tmp_path / "train.py"
    script.write_text("")
    file.write_text("hosts: [{name: a, kind: V100-16GB, count: 2}]")
    emulate = ("--emulate", str(file))
    assert "-n 3: --emulate starts one rank for each of the 2 devices" in refused(
        *emulate, "-n", "3", str(script)
    )
    assert "--stretch 0.5: times are stretched, never shrunk" in refused(
        *emulate, "--stretch", "0.5", str(script)
    )
    assert "--stub and --stretch belong to --emulate" in refused("--stub", str(script))
    assert "give one of them" in refused(*emulate, "--cluster", str(file), str(script))
    assert "no_such.yaml: No such file" in refused(
        "--emulate", str(tmp_path / "no_such.yaml"), str(script)
    )
