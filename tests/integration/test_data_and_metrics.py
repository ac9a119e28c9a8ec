"""Each rank loads its own samples only, and a run can be looked at: times, metrics, trace."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

import whale as wh
from tests.exactness import run_loss
from tests.integration.layers import (
    BATCH_SIZE,
    EXACT,
    NUM_CLASSES,
    WIDTH,
    build,
    in_two_stages,
    make_batch,
    sgd,
)
from tests.ranks import run_ranks
from whale.runtime.metrics import metrics_file

# ---- data
# -------------------------------------------------------------------------------------------------------------


class Counted(torch.utils.data.Dataset[dict[str, Tensor]]):
    """40 samples; every third label does not count. Notes which samples were read."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.x = torch.randn(
            40, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.read.append(index)
        return {
            "x": self.x[index],
            "labels": torch.tensor(-100 if index % 3 == 1 else index % NUM_CLASSES),
        }


def shuffled(epoch: int) -> list[int]:
    return torch.randperm(40, generator=torch.Generator().manual_seed(100 + epoch)).tolist()


def collated(dataset: Counted, samples: list[int]) -> dict[str, Tensor]:
    return torch.utils.data.default_collate([dataset[sample] for sample in samples])


def load(
    num_stages: int, position: dict[str, int] | None, num_steps: int
) -> tuple[list[float], list[int], dict[str, int]]:
    """(losses, samples that this rank read, position after the last step)."""
    wh.init({"num_micro_batch": 2})
    dataset = Counted()
    layers = [
        f"layers.[{4 * s // num_stages * 2}-{4 * (s + 1) // num_stages * 2 - 1}]"
        for s in range(num_stages)
    ]
    model = (
        wh.annotate(build(), {glob: wh.replicate(1) for glob in layers})
        if num_stages > 1
        else build()
    )
    engine = wh.parallelize(
        model,
        collated(dataset, shuffled(0)[:BATCH_SIZE]),
        optimizer=lambda pairs: torch.optim.SGD(pairs, lr=0.0),
    )
    dataset.read.clear()
    loader = engine.loader(dataset, BATCH_SIZE, sampler=shuffled)
    if position is not None:
        loader.load_state_dict(position)
    losses: list[float] = []
    while len(losses) < num_steps:
        for batch in loader:
            losses.append(engine.step(batch).loss)
            if len(losses) == num_steps:
                break
    return losses, dataset.read, loader.state_dict()


def expected_batches(num_steps: int) -> list[list[int]]:
    """4 full batches of 9 in each epoch; the 4 samples that are left over are not seen."""
    order = [
        samples[start : start + BATCH_SIZE]
        for samples in map(shuffled, range(2))
        for start in range(0, 36, BATCH_SIZE)
    ]
    return order[:num_steps]


def test_each_rank_loads_only_its_own_samples() -> None:
    """4 stages: the two in the middle read nothing of the batch. 2 stages x 2 replicas: half of the
    samples each.
    """
    batches = expected_batches(6)
    dataset = Counted()
    expected = [run_loss(build(), collated(dataset, samples), None).item() for samples in batches]
    for num_stages in (1, 2, 4):
        ranks = run_ranks(load, 4, num_stages, None, 6)
        for losses, _, position in ranks:
            assert losses == pytest.approx(expected, rel=EXACT)
            assert position == {"epoch": 1, "position": 2 * BATCH_SIZE}
        everything = [sample for samples in batches for sample in samples]
        per_stage = [
            [rank for rank in range(4) if rank % num_stages == stage] for stage in range(num_stages)
        ]
        for stage, members in enumerate(per_stage):
            read = sorted(sample for rank in members for sample in ranks[rank][1])
            assert read == (sorted(everything) if stage in (0, num_stages - 1) else []), (
                f"stage {stage} of {num_stages}"
            )
        assert all(len(read) < len(everything) or num_stages == 4 for _, read, _ in ranks)


def test_the_position_fits_another_number_of_ranks() -> None:
    """Stopped after 3 steps on 4 ranks, continued on 2 and on 1: the same samples, each once, over
    the end of the epoch.
    """
    dataset = Counted()
    batches = expected_batches(6)
    expected = [run_loss(build(), collated(dataset, samples), None).item() for samples in batches]
    (losses, _, position), *_ = run_ranks(load, 4, 2, None, 3)
    assert losses == pytest.approx(expected[:3], rel=EXACT) and position == {
        "epoch": 0,
        "position": 3 * BATCH_SIZE,
    }
    for num_ranks, num_stages in ((2, 2), (2, 1), (1, 1)):
        ranks = run_ranks(load, num_ranks, num_stages, position, 3)
        assert ranks[0][0] == pytest.approx(expected[3:], rel=EXACT)
        assert {sample for rank in ranks for sample in rank[1]} == {
            sample for samples in batches[3:] for sample in samples
        }


# ---- looking at a run
# -------------------------------------------------------------------------------------------------


def train_and_look(folder: str) -> tuple[list[float], list[str]]:
    """(losses, this rank's actions in the schedule)."""
    wh.init({"num_micro_batch": 3, "run_folder": folder})
    engine = wh.parallelize(in_two_stages(build()), make_batch(0), optimizer=sgd)
    losses = [engine.step(make_batch(step)).loss for step in range(3)]
    engine.trace(f"{folder}/trace.json")
    engine.close()
    return losses, [
        str(action) for action in engine.plan.schedule.orders[int(os.environ["RANK"]) % 2]
    ]


def test_metrics_and_trace_of_a_run(tmp_path: Path) -> None:
    """One line for each step and rank; in the trace every action of every rank, once and
    in order.
    """
    ranks = run_ranks(train_and_look, 4, str(tmp_path))
    assert len(list(metrics_file(tmp_path, 0).parent.glob("rank_*.jsonl"))) == 4
    for rank, (losses, _) in enumerate(ranks):
        lines = [json.loads(line) for line in metrics_file(tmp_path, rank).read_text().splitlines()]
        assert [line["step"] for line in lines] == [0, 1, 2] and [
            line["loss"] for line in lines
        ] == losses
        for line in lines:
            assert line["rank"] == rank and line["lr"] == 0.1 and line["memory_bytes"] > 0
            assert (
                line["samples_per_s"] == pytest.approx(BATCH_SIZE / line["total_s"])
                and line["grad_norm"] > 0
            )
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for rank, (_, actions) in enumerate(ranks):
        own = sorted(
            (event for event in events if event["ph"] == "X" and event["tid"] == rank),
            key=lambda event: event["ts"],
        )
        assert [event["name"] for event in own] == actions
        assert all(event["dur"] >= 0 for event in own)
