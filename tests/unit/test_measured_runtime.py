"""The two simulators of benchmarks on measurements: against arithmetic by hand, on a made-up folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu_measurements import Measurements
from benchmarks.measured_models import MODELS
from benchmarks.measured_runtime import Overheads, pipeline_s, read_plan, step_parts
from benchmarks.plan_scoring import (
    Line,
    ScoredCluster,
    ScoredStage,
    Scoring,
    one_forward_one_backward,
)
from benchmarks.vs_planners import replicas_of
from whale.config import Config

SHAPE = MODELS["OPT-350"]
WHOLE = tuple((number, 1.0) for number in range(SHAPE.num_layers))


@pytest.fixture
def measured(tmp_path: Path) -> Measurements:
    """V100s whose blocks take 1 s forward and 2 s backward a sample, links of 1 GB/s."""
    rows = [
        {
            "micro_batch": samples,
            "tensor_parallel": 1,
            "embedding": [0.0, 0.0, 0.0],
            "block": [1.0 * samples, 2.0 * samples, 0.5],
            "head": [0.0, 0.0, 0.0],
        }
        for samples in (1, 2)
    ]
    link = {"gb_per_s_poly": [0.0, 0.0, 1.0], "gb_per_s_max": 1.0}
    network = {
        "between_hosts": [
            {"from": "V100-16", "to": "V100-16", "gpus_a_host": number, **link} for number in (1, 4)
        ],
        "inside_a_host": [{"kind": "V100-16", "gpus": 4, **link}],
    }
    (tmp_path / "layers.json").write_text(json.dumps({"OPT-350": {"V100-16": rows}}))
    (tmp_path / "network.json").write_text(json.dumps(network))
    return Measurements(tmp_path)


def test_a_pipeline_without_messages_takes_its_steps() -> None:
    assert pipeline_s([1.0, 1.0], [2.0, 2.0], [0.0], 4) == pytest.approx((4 + 1) * 3)
    assert pipeline_s([1.0], [2.0], [], 4) == pytest.approx(12)


def test_blocking_messages_are_waited_for_on_both_sides() -> None:
    """One micro-batch: forward, message, forward and backward, message, backward."""
    assert pipeline_s([1.0, 3.0], [2.0, 5.0], [0.5], 1) == pytest.approx(1 + 0.5 + 3 + 5 + 0.5 + 2)
    assert pipeline_s([1.0] * 3, [2.0] * 3, [0.5] * 2, 1) == pytest.approx(9 + 4 * 0.5)


def test_a_measured_plan_of_two_replicas(measured: Measurements) -> None:
    replica = [{"kind": "V100-16", "gpus": 1}]
    plan = read_plan(
        {
            "id": "site/two",
            "model": "OPT-350",
            "stages": [{"layers": [0, 25], "replicas": [replica] * 2, "tensor_parallel": [1, 1]}],
            "micro_batch": 2,
            "batch": 8,
            "measured_step_s": 1.0,
        }
    )
    assert plan is not None
    parts = step_parts(plan, measured)
    assert parts.num_micro_batches == 2
    num_bytes = 4 * (24 * SHAPE.block_parameters + 2 * SHAPE.embedding_parameters + 2048 * 1024)
    assert parts.gradient_sum_s == pytest.approx(num_bytes / 1e9, rel=1e-6)  # 2 (k - 1) / k = 1
    expected = 2 * 24 * 6 + num_bytes / 1e9 + 24 * 0.5
    assert parts.step_s(Overheads()) == pytest.approx(expected)
    assert parts.step_s(Overheads(gradient_sum_s=1.0)) == pytest.approx(expected + 1)


def test_every_micro_batch_goes_forward_before_it_goes_back() -> None:
    for stage in range(3):
        order = one_forward_one_backward(stage, 3, 5)
        assert sorted(order) == sorted((what, k) for what in "FB" for k in range(5))
        for k in range(5):
            assert order.index(("F", k)) < order.index(("B", k))
        in_flight = 0
        for what, _ in order:
            in_flight += 1 if what == "F" else -1
            assert in_flight <= 3 - stage


def test_scores_by_hand(measured: Measurements) -> None:
    cluster = ScoredCluster.of({"V100-16": 8}, measured, 4)
    scoring = Scoring(SHAPE, cluster, measured)
    alone = scoring.score([Line((ScoredStage(WHOLE, 0),), 1.0, 3)])
    assert alone.step_s == pytest.approx(3 * 24 * 3 + 24 * 0.5)
    assert alone.compute_s == pytest.approx(3 * 24 * 3)
    # 8 GPUs at 1 sample / 72 s
    assert scoring.bound_steps_per_s(8) == pytest.approx(8 / 72 / 8)
    halves = (
        ScoredStage(tuple((number, 1.0) for number in range(13)), 0),
        ScoredStage(tuple((number, 1.0) for number in range(13, 26)), 4),
    )
    piped = scoring.score([Line(halves, 1.0, 4)])
    message = 2048 * 1024 * 4 / 1e9 + 20e-6
    # the middle of 1F1B: five times forward and backward of a stage, and messages at both ends
    assert piped.step_s == pytest.approx(5 * 36 + 12 * 0.5 + 2 * message, rel=1e-3)
    # two replicas on two hosts: gradients follow the last backward, mostly hidden by it
    two = scoring.score([Line((ScoredStage(WHOLE, gpu),), 1.0, 3) for gpu in (0, 4)])
    assert alone.step_s < two.step_s < alone.step_s + 1.7


def test_lines_as_replicas_of_whale() -> None:
    """A pipeline whose first stage is cut over two GPUs, and one that leaves GPU 3 out."""
    first = tuple((number, 1.0) for number in range(13))
    last = tuple((number, 1.0) for number in range(13, 26))
    lines = [
        Line((ScoredStage(first, 4, 2), ScoredStage(last, 2)), 2.0, 19),
        Line((ScoredStage(WHOLE, 1),), 2.0, 18),
    ]
    config = replicas_of(lines, [1, 2, 4, 5], "auto")
    assert config == [
        {
            "stages": [
                {"ranks": [2, 3], "split": True, "grid": [1, 2, 1]},
                {"ranks": [1], "start": "blocks.12"},
            ],
            "samples": 38,
            "num_micro_batch": 19,
            "schedule": "auto",
        },
        {"stages": [{"ranks": [0]}], "samples": 36, "num_micro_batch": 18, "schedule": "auto"},
    ]
    assert Config({"replicas": config}).replicas == config
