"""The benchmark on measured GPUs takes whatever a folder has: other models and kinds, parts missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_measurements import Measurements, whale_kind
from benchmarks.real_gpus import (
    BlockRow,
    BlockWork,
    fitted,
    hold_out,
    margins_of,
    peak_memory,
    whole_steps,
)


def rows(num_layers: int, *tensor_parallel: int) -> list[dict[str, Any]]:
    """A block of 3 ms at one sample."""
    layer = {name: [0.001, 0.002, 0.0] for name in ("embedding", "block", "head")}
    return [
        {"micro_batch": 1, "tensor_parallel": width, "num_layers": num_layers, **layer}
        for width in tensor_parallel
    ]


def folder(path: Path, layers: dict[str, Any], plans: list[dict[str, Any]] | None) -> Measurements:
    (path / "layers.json").write_text(json.dumps(layers))
    if plans is not None:
        (path / "plans.json").write_text(json.dumps(plans))
    return Measurements(path)


def plan(model: str, *replicas: int) -> dict[str, Any]:
    """A stage for each number of replicas."""
    gpus = [{"kind": "GH-96", "gpus": 4}]
    stages = [
        {"layers": [place, place], "replicas": [gpus] * number, "tensor_parallel": [4] * number}
        for place, number in enumerate(replicas)
    ]
    step = {"micro_batch": 1, "batch": 4, "measured_step_s": 1.0}
    return {"id": f"site/{model}/{replicas}", "model": model, "stages": stages, **step}


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("V100-16", "V100-16GB"),
        ("GH-96", "GH200"),
        ("RTX-3090", "RTX-3090"),
        ("H100-80", "H100"),
        ("T4-16", "T4"),
        ("H100-94", None),
        ("T4-PCIe", None),
        ("B200-180", None),
        ("B200", None),
    ],
)
def test_names_of_kinds(name: str, known: str | None) -> None:
    kind = whale_kind(name)
    assert (None if kind is None else kind.name) == known


def test_a_folder_of_layers_alone(tmp_path: Path) -> None:
    """No plans, no network, no block on one GPU of a kind that is known."""
    layers = {"OPT-30": {"GH-96": rows(48, 4), "B200-180": rows(48, 1)}}
    measured = folder(tmp_path, layers, None)
    assert measured.plans == [] and measured.between_hosts("GH-96", "GH-96", 4) is None
    steps = whole_steps(measured)
    memory = peak_memory(measured, {})
    assert steps["rows"] == 0 and memory["rows on GH-96"] == 0
    assert margins_of({"blocks": {"blocks": 0}, "steps": steps, "memory": memory}) == {}


def test_plans_that_cannot_be_simulated_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = [plan("OPT-30", 1), plan("OPT-30", 2), plan("OPT-30", 2, 1), plan("LLAMA-4", 1)]
    steps = whole_steps(folder(tmp_path, {"OPT-30": {"GH-96": rows(48, 4)}}, plans))
    assert (steps["rows"], steps["sound"]) == (1, 1)
    said = capsys.readouterr().out
    for text in ("no link between GH-96", "other numbers of replicas", "LLAMA-4 is not known"):
        assert text in said


def test_rows_of_another_model_are_wrong(tmp_path: Path) -> None:
    layers = {
        "OPT-30": {"GH-96": rows(48, 1, 4), "A100-40": rows(48, 1)},
        "LLAMA-3-8": {"GH-96": rows(48, 1, 4), "A100-40": rows(32, 1)},
    }
    wrong = folder(tmp_path, layers, None).wrong_layers
    assert wrong["LLAMA-3-8", "GH-96"] == "all rows repeat those of OPT-30"
    assert not {("OPT-30", "GH-96"), ("LLAMA-3-8", "A100-40")} & set(wrong)


def block(model: str, kind: str, micro_batch: int) -> BlockRow:
    """A block that takes 1.1 times what the table of kinds says."""
    work = BlockWork(1e12 * micro_batch, 1e10 * micro_batch, 50.0)
    known = whale_kind(kind)
    assert known is not None
    return BlockRow(model, kind, micro_batch, work, 1.1 * work.seconds(known))


def test_constants_are_fitted_where_the_blocks_determine_them() -> None:
    kinds = ("V100-16", "A100-40")
    many = [block("OPT-350", kind, size) for kind in kinds for size in (1, 4)]
    change = fitted(many)
    assert change is not None
    for row in many:
        known = whale_kind(row.kind)
        assert known is not None and abs(row.error(change(known))) < 0.03
    few = [block("OPT-30", "A100-80", 1), block("OPT-30", "RTX-2080", 1)]  # three constants
    assert fitted(few) is None
    assert list(
        hold_out([*many, block("OPT-30", "V100-16", 1), block("OPT-30", "A100-40", 1)])
    ) == [
        "OPT-30 -> OPT-350",
        "OPT-350 -> OPT-30",
    ]
    others = [block("OPT-350", row.kind, 1) for row in few]
    assert hold_out([*few, *others]) == {}
