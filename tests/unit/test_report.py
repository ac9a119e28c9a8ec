"""What a plan looks like in the terminal, and plan files: a hand-made plan with numbers worked out
by hand.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import whale as wh
from whale import scheduling
from whale.names import listed
from whale.plans.file import diff
from whale.plans.plan import (
    PLAN_FORMAT,
    Crossing,
    Decision,
    Holding,
    LossTerm,
    Plan,
    PlannedDevice,
    Replica,
    ReplicaTemplate,
    Settings,
    Stage,
    TaskGraph,
)
from whale.plans.revise import revise
from whale.plans.samples import with_samples
from whale.plans.virtual_devices import VirtualDevice
from whale.report import plan_pictures, print_plan, render_plan, summary
from whale.report.tables import memory_table
from whale.simulation.memory import CLASSES
from whale.simulation.timeline import DeviceTimeline, Timeline
from whale.units import compared, count, human_bytes, human_flop, human_seconds, ranges


def hand_made() -> Plan:
    """2 model replicas of [2 devices, 1 device]; stages 0 and 2 on the two devices, stage 1 on the
    one: 6 devices.
    """
    graph = scheduling.StageGraph((0, 1, 0), ((0, 1), (1, 2)), ((0, 1),))
    template = ReplicaTemplate(
        grids=(None, None),
        stages=(
            Stage(0, 0, (0,), 20, 4.0e9, 0.0125, ("embed.weight", "a.weight"), 8_000_000),
            Stage(1, 1, (1,), 17, 2.5e12, 1.5, ("embed.weight",), 999),
            Stage(2, 0, (0,), 11, 0.8e9, 0.0025, ("c.weight",), 4_000_000),
        ),
        stage_of_operation=(0, 1, 2),
        crossings=(
            Crossing("hidden", 0, 1, 4096, True, True, 1e-4, "net.py:7: x = h[..., red]"),
            Crossing("bias", 1, 2, 512, False, False, 1e-5, "net.py:9: bias()"),
        ),
        tensors={
            "embed.weight": Holding((0, 1)),
            "a.weight": Holding((0,)),
            "c.weight": Holding((2,)),
            "mask": Holding((0, 1)),
        },
        schedule=scheduling.build("1f1b", graph, 3),
        loss_terms=(LossTerm(2, "nll, mean over [batch]"),),
    )
    plan = Plan(
        format=PLAN_FORMAT,
        model="0123456789abcdef",
        settings=Settings(),
        batch_size=20,
        num_micro_batch=3,
        devices=(PlannedDevice("V100-32GB", 1.0), PlannedDevice("P100", 1.0)),
        device_of_rank=(0, 0, 1) * 2,
        task_graphs=(
            TaskGraph(0, "encoder.[a-c]", "replicate(2)", 2, 0, 31, 4.8e9, 12_000_000),
            TaskGraph(1, "decoder", "replicate(1)", 1, 1, 17, 2.5e12, 999),
        ),
        templates=(template,),
        replicas=(Replica(0, ((0, 1), (2,))), Replica(0, ((3, 4), (5,)))),
        decisions=(Decision("schedule", "1f1b", "because [bold]numbers[/bold]"),),
        notes=("a note on aten.sort",),
    )
    return with_samples(plan)


def text_of(plan: Plan, width: int = 130) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    print_plan(plan, console)
    return console.export_text()


def row(text: str, *starts: str) -> str:
    """The only line whose first words are these, its words joined by one space."""
    found = [
        " ".join(line.split())
        for line in text.splitlines()
        if line.split()[: len(starts)] == list(starts)
    ]
    assert len(found) == 1, f"{len(found)} lines start with {starts}"
    return found[0]


def test_one_line() -> None:
    assert summary(hand_made()) == (
        "6 devices (4 x V100-32GB, 2 x P100): 3 stages x 2 model replicas, batch 20 in 3 "
        "micro-batches, schedule 1f1b"
    )


def test_task_graphs_have_their_numbers() -> None:
    text = text_of(hand_made())
    assert row(text, "0", "encoder.[a-c]") == "0 encoder.[a-c] replicate(2) 0 31 4.80 GFLOP 12.0 MB"
    assert row(text, "1", "decoder") == "1 decoder replicate(1) 1 17 2.50 TFLOP 999 B"


def test_each_device_has_its_part() -> None:
    """Micro-batches of 7, 7 and 6 samples; replicas get 4+3, 4+3 and 3+3 of them; two devices cut 4
    as 2+2 and 3 as 2+1.
    """
    text = text_of(hand_made())
    # stages 0 and 2: 4.8 GFLOP over 4 devices, 8 MB + 4 MB, 12.5 ms + 2.5 ms
    assert (
        row(text, "0", "0,", "2")
        == "0 0, 2 0 0-1 V100-32GB 2 each (2x), 2+1 (1x) 1.20 GFLOP 12.0 MB 15.0 ms"
    )
    assert row(text, "1", "3-4") == "1 3-4 V100-32GB 2+1"
    assert row(text, "1", "1") == "1 1 0 2 P100 4 (2x), 3 (1x) 1.25 TFLOP 999 B 1.50 s"
    assert row(text, "1", "5") == "1 5 P100 3"
    assert "of a device on average" in " ".join(text.split())


def test_crossings_count_bytes_of_the_mini_batch() -> None:
    text = text_of(hand_made())
    assert (
        row(text, "hidden") == "hidden 0 -> 1 4.10 KB 81.9 KB yes net.py:7: x = h[..., red]"
    )  # 20 samples of 4096
    # 512 bytes to each of the 4 devices of stage 2, for each of 3 micro-batches
    assert row(text, "bias") == "bias 1 -> 2 no samples 6.14 KB no net.py:9: bias()"


def test_the_rest_is_there() -> None:
    text = text_of(hand_made())
    assert "embed.weight: on stages 0-1" in text
    assert "mask" not in text  # a buffer on two stages is no tied weight
    assert "stage 2: nll, mean over [batch]" in text
    assert row(text, "schedule", "1f1b") == "schedule 1f1b because [bold]numbers[/bold]"
    assert "a note on aten.sort" in text
    picture = scheduling.draw(hand_made().schedule, width=130)
    assert all(line in text for line in picture.splitlines())
    assert (
        "drawn with backward = 2 x forward" in text
    )  # its bubble is another than that of the predicted step


def test_a_parameter_of_two_stages_on_one_device_is_no_exact_sum() -> None:
    plan = hand_made()
    shared = replace(plan.stages[2], parameters=("a.weight",))
    assert "at most 12.0 MB" in text_of(revise(plan, stages=(*plan.stages[:2], shared)))


@pytest.mark.parametrize("width", [60, 80, 100, 140, 200])
def test_every_width(width: int) -> None:
    """Nothing is wider than the terminal (but the picture, which says itself where it is clipped),
    and no number is cut off.
    """
    text = text_of(hand_made(), width)
    assert max(map(len, text.splitlines())) <= max(width, 60)
    assert width < 80 or all(
        number in text for number in ("1.20 GFLOP", "1.25 TFLOP", "15.0 ms", "81.9 KB")
    )


def test_a_large_plan_stays_short() -> None:
    """1,024 devices, 512 replicas, 200 crossings: lists are cut and say by how much."""
    plan = hand_made()
    many = tuple(Crossing(f"v{i}", 0, 1, 1000, True, True, 1e-5, "net.py:1: x") for i in range(200))
    devices = (
        VirtualDevice(0, tuple((2 * r,) for r in range(512))),
        VirtualDevice(1, tuple((2 * r + 1,) for r in range(512))),
    )
    large = revise(
        plan,
        batch_size=2048,
        virtual_devices=devices,
        crossings=many,
        device_seconds=(1.0,) * 1024,
        device_kinds=("P100",) * 1024,
    )
    text = text_of(large)
    assert len(text.splitlines()) < 80
    assert text.count("508 more") == 2  # of 512 replicas, for each of 2 VirtualDevices
    assert row(text, "...", "176") == "... 176 more 360 MB"  # 176 x 1000 bytes x 2048 samples
    assert summary(large).startswith("1024 devices (1024 x P100)")


@pytest.mark.parametrize("num_replicas", [5, 6])
def test_a_row_is_never_left_out_for_a_line_about_it(num_replicas: int) -> None:
    """Tables stop at 4 replicas, 24 crossings, 12 notes and 16 devices. One row more is shown; of
    two more, each table says so.
    """
    more = num_replicas - 4
    ranks = tuple((rank,) for rank in range(num_replicas))
    plan = revise(
        hand_made(),
        virtual_devices=(
            VirtualDevice(0, ranks),
            VirtualDevice(1, tuple((rank + num_replicas,) for (rank,) in ranks)),
        ),
        crossings=tuple(
            Crossing(f"v{i}", 0, 1, 1000, True, True, 1e-5, "net.py:1: x") for i in range(24 + more)
        ),
        notes=tuple(f"note {i}" for i in range(12 + more)),
        device_seconds=(1.0,) * 2 * num_replicas,
        device_kinds=("P100",) * 2 * num_replicas,
    )
    text = text_of(plan)
    assert text.count("2 more") == (4 if more == 2 else 0)
    assert " 1 more" not in text
    assert ("v24" in text and "note 12" in text) is (more == 1)
    devices = tuple(
        DeviceTimeline(rank, "P100", "h", (), (), dict.fromkeys(CLASSES, 0.0), 0)
        for rank in range(16 + more)
    )
    drawn = Console(file=(output := io.StringIO()), width=130)
    drawn.print(memory_table(Timeline(devices, (), 1.0, 1.0, 1)))
    assert (
        len(output.getvalue().splitlines()) == 2 + 1 + 17
    )  # heading and line, rows, and either the 17th or what is said of it
    assert ("... 2 more" in output.getvalue()) is (more == 2)


def test_lists_in_a_sentence_leave_out_two_or_more() -> None:
    assert listed([4, 5, 6], 2, "+") == "4+5+6"
    assert listed([4, 5, 6, 7], 2, "+") == "4+5 and 2 more"
    assert listed([], 2) == ""


def test_render_gives_something_for_rich() -> None:
    assert render_plan(hand_made()).renderables


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (human_bytes(0), "0 B"),
        (human_bytes(999), "999 B"),
        (human_bytes(1000), "1.00 KB"),
        (human_bytes(99_960), "100 KB"),
        (human_bytes(999_999), "1.00 MB"),
        (human_bytes(12_345_678), "12.3 MB"),
        (human_bytes(7e18), "7000 PB"),
        (human_flop(3.14e15), "3.14 PFLOP"),
        (human_seconds(0), "0 s"),
        (human_seconds(1e-16), "0 s"),
        (human_seconds(90), "90.0 s"),
        (human_seconds(0.9996), "1.00 s"),
        (human_seconds(0.000999), "999 us"),
        (human_seconds(3e-10), "0.30 ns"),
        (ranges([0, 1, 2, 5, 7, 8]), "0-2, 5, 7-8"),
        (ranges([]), ""),
        (compared(1.004, "slower", "faster"), "the same"),
        (compared(1.01, "slower", "faster"), "1 % slower"),
        (compared(1.0996, "slower", "faster"), "10 % slower"),
        (compared(1.1, "slower", "faster"), "1.1 times slower"),
        (compared(0.95, "slower", "faster"), "5 % faster"),
        (compared(1 / 1.01, "more", "less"), "0.99 % less"),
        (compared(0.5, "slower", "faster"), "2 times faster"),
        (compared(1 / 1234.5, "slower", "faster"), "1,234 times faster"),
        (compared(1.0, "slower", "faster", "as fast"), "as fast"),
        (count(1, "stage"), "1 stage"),
        (count(2, "micro-batch"), "2 micro-batches"),
    ],
)
def test_units(shown: str, expected: str) -> None:
    assert shown == expected


# ---- plan files


def test_a_saved_plan_is_the_plan(tmp_path: Path) -> None:
    hand_made().save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == hand_made()


def test_diff_names_what_changed() -> None:
    plan = hand_made()
    assert diff(plan, hand_made()) == []
    changed = revise(
        plan,
        notes=("another",),
        stages=(replace(plan.stages[0], parameter_bytes=9), *plan.stages[1:]),
    )
    assert diff(plan, changed) == [
        "notes[0]: a note on aten.sort -> another",
        "templates[0].stages[0].parameter_bytes: 8000000 -> 9",
    ]


def broken(**changes: Any) -> str:
    return json.dumps(json.loads(hand_made().to_json()) | changes)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (hand_made().to_json()[:400], "is not a plan"),
        ("", "is not a plan"),
        ("[1, 2]", "is not a plan"),
        (b"\xff\xfe\x00".decode("latin-1"), "is not a plan"),
        (
            broken(format=PLAN_FORMAT + 1),
            f"has plan format {PLAN_FORMAT + 1}, this Whale reads {PLAN_FORMAT}",
        ),
        (broken(batch_size="many"), "batch_size"),
        (broken(batch_size=None), "batch_size"),
        (broken(batch_size=-20), "batch_size is -20, which is negative"),
        (broken(num_devices=6), "fields that a plan does not have: num_devices"),
        (broken(replicas=[{"template": 0}]), "replicas.0"),
        (broken(device_of_rank=["first"]), "device_of_rank.0"),
        (
            json.dumps(
                {
                    key: value
                    for key, value in json.loads(hand_made().to_json()).items()
                    if key != "templates"
                }
            ),
            "templates",
        ),
    ],
)
def test_a_file_that_is_no_plan_is_refused_by_name(
    tmp_path: Path, content: str, named: str
) -> None:
    file = tmp_path / "some.json"
    file.write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=r"some\.json") as refused:
        Plan.load(file)
    assert named in str(refused.value)


class _Trap:
    """Unpickling it makes a folder."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.mark,)


@pytest.mark.parametrize("kind", ["pickle", "torch", "yaml"])
def test_a_crafted_plan_file_executes_nothing(tmp_path: Path, kind: str) -> None:
    mark = tmp_path / "executed"
    file = tmp_path / "plan.json"
    if kind == "pickle":
        file.write_bytes(pickle.dumps(_Trap(str(mark))))
    elif kind == "torch":
        torch.save({"plan": _Trap(str(mark))}, file)
    else:
        file.write_text(f"!!python/object/apply:os.mkdir [{mark}]")
    with pytest.raises(ValueError, match=r"plan\.json is not a plan"):
        Plan.load(file)
    assert not mark.exists()
    if kind == "pickle":  # the trap itself works
        pickle.loads(file.read_bytes())
        assert mark.exists()


def test_plans_and_timelines_show_themselves_in_a_notebook() -> None:
    """They look as what `whale plan --html` writes, and do no harm to the page around them."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    batch = (torch.randn(8, 4),)
    plan = wh.plan(model, batch, loss=lambda output, _: output.sum(), cluster=2)
    shown = plan._repr_html_()  # type: ignore[attr-defined]
    assert shown.startswith("<iframe") and "In plain words" in shown
    assert "<script" not in shown  # escaped, inside of the frame
    assert wh.simulate(plan)._repr_html_().count("<svg") == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("labels", "shown"),
    [
        (
            "transformer.wte .. transformer.h.3, transformer.h.20.ln_2 .. lm_head",
            "wte .. h.3, h.20.ln_2 .. lm_head",
        ),
        ("layers.0 .. layers.3", "layers.0 .. layers.3"),
        ("encoder.0.norm .. encoder.norm", "encoder.0.norm .. encoder.norm"),
        ("a.x .. b.y", "a.x .. b.y"),
        ("", ""),
    ],
)
def test_labels_of_stages_without_the_name_of_the_model(labels: str, shown: str) -> None:
    assert plan_pictures._without_model_name(labels) == shown
