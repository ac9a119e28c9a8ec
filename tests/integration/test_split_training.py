"""What a job does beside its steps when parts of it are sharded: checkpoints, evaluation, loading,
initialisation, dropout, plan files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import whale as wh
from tests.exactness import Float64Mode
from tests.integration.test_split import MODELS, Subject, everything, prepare_model, scope
from tests.ranks import ModelServer, preload, run_ranks
from whale.emulation.stub import make_stub
from whale.plans.check import contradiction

preload("tests.integration.test_split_training")

WIDTH = 6
HIDDEN = 10
NUM_CLASSES = 5
NUM_SAMPLES = 24


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


# ---- checkpoints
# ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpt2() -> Iterator[ModelServer]:
    with ModelServer(prepare_model, "gpt2") as server:
        yield server


Marks = dict[str, tuple[Any, ...]]


def train(
    subject: Subject, marks: Marks, folder: Path, loads: bool
) -> tuple[list[float], dict[str, Tensor], float | None, float]:
    """Two steps and a save, or a load; then two steps: (losses, state, loss of an evaluation,
    gradient norm).
    """
    with Float64Mode():
        wh.init()
        wh.annotate(subject.model, {glob: scope(what) for glob, what in marks.items()})
        data = [MODELS[subject.name][1](step) for step in range(4)]
        engine = wh.parallelize(subject.model, data[0], optimizer=adamw, prepared=subject.prepared)
        if loads:
            assert engine.load(folder) == 2
        else:
            for batch in data[:2]:
                engine.step(batch)
            engine.save(folder).wait()
        results = [engine.step(batch) for batch in data[2:]]
        evaluated = engine.evaluate(MODELS[subject.name][1](9, 5)).loss
        return (
            [result.loss for result in results],
            engine.full_state_dict(),
            evaluated,
            results[-1].grad_norm,
        )


@pytest.mark.slow  # the next one is quick
def test_a_checkpoint_of_one_grid_continues_on_another_and_on_one_device(
    gpt2: ModelServer, tmp_path: Path
) -> None:
    """GPT-2's fused q, k and v are cut by heads: every device's part is several boxes. AdamW's
    state is cut like its parameters.
    """
    losses, state, evaluated, norm = gpt2.run(train, 1, {}, tmp_path / "local", False)[0]
    gpt2.run(train, 3, everything(3, (1, 3, 1)), tmp_path / "grid", False)
    for folder, num_ranks, marks in (
        ("grid", 1, {}),
        ("grid", 2, everything(2, (1, 1, 2))),
        ("local", 2, everything(2, (1, 2, 1))),
    ):
        got = gpt2.run(train, num_ranks, marks, tmp_path / folder, True)[0]
        assert got[0] == pytest.approx(losses, abs=1e-12)
        assert max(float((state[name] - got[1][name]).abs().max()) for name in state) < 1e-10
        assert got[2] == pytest.approx(evaluated, abs=1e-12) and got[3] == pytest.approx(
            norm, abs=1e-12
        )


# ---- a small model with everything else
# -------------------------------------------------------------------------------


class Net(nn.Module):
    """Data-parallel features, a sharded head; outputs beside the loss. Without labels there is one
    more, of weights that never train.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh())
        self.head = nn.Sequential(
            nn.Linear(HIDDEN, HIDDEN),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(HIDDEN, NUM_CLASSES),
        )
        self.extra = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        features = self.features(x)
        logits = self.head(features)
        if labels is None:
            return {"logits": logits, "extra": self.extra(features)}
        return {
            "loss": F.cross_entropy(logits, labels),
            "logits": logits,
            "mean": logits.mean(0),
            "sum": labels.sum(),
        }


class Data(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(NUM_SAMPLES, WIDTH, generator=generator)
        self.labels = torch.randint(0, NUM_CLASSES, (NUM_SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.labels[index]}

    def batch(self, start: int, stop: int) -> dict[str, Tensor]:
        return {"x": self.x[start:stop], "labels": self.labels[start:stop]}


def loss_of(output: Any, batch: Any) -> Tensor:
    return output["loss"]


def on(num_devices: int, grid: tuple[int, int, int], model: Any) -> Any:
    return wh.annotate(
        model, {"features": wh.replicate(num_devices), "head|extra": wh.split(num_devices, grid)}
    )


def everything_else(folder: Path) -> dict[str, Any]:
    """One rank of a job on a 2 x 2 grid."""
    found: dict[str, Any] = {}
    wh.init({"num_micro_batch": 2})
    data = Data()
    engine = wh.parallelize(
        on(4, (2, 2, 1), Net()), data.batch(0, 8), optimizer=adamw, loss=loss_of
    )
    found["held"] = sum(parameter.numel() for _, parameter in engine.named_parameters())
    found["whole"] = engine.step(data.batch(0, 8)).loss
    loader = engine.loader(data, 8)
    found["loader"] = [engine.step(batch).loss for batch in loader]
    found["state"] = engine.full_state_dict()
    evaluated = engine.evaluate(data.batch(0, 7), outputs=True)
    found["loss"] = evaluated.loss
    found["outputs"] = evaluated.outputs
    found["without labels"] = engine.evaluate({"x": data.x[:3]}, outputs=True).outputs
    engine.export(folder / "model.safetensors")
    engine.save(folder / "saved").wait()
    return found


def loaded(folder: Path) -> dict[str, Tensor]:
    """The weights on another grid."""
    wh.init()
    engine = wh.parallelize(
        on(2, (1, 1, 2), Net()), Data().batch(0, 8), optimizer=adamw, loss=loss_of
    )
    assert engine.load(folder) == 1 + NUM_SAMPLES // 8
    return engine.full_state_dict()


def test_loader_outputs_and_export_on_a_grid(tmp_path: Path) -> None:
    """Compared with the model itself, given the weights that the engine exported; the checkpoint is
    loaded on another grid.
    """
    from safetensors.torch import load_model

    ranks = run_ranks(everything_else, 4, tmp_path)
    data = Data()
    model = Net()
    load_model(model, tmp_path / "model.safetensors", strict=True)
    assert all(
        torch.equal(tensor, ranks[0]["state"][name]) for name, tensor in model.state_dict().items()
    )
    model.eval()
    expected = model(**data.batch(0, 7))
    assert ranks[0]["loss"] == pytest.approx(expected["loss"].item(), abs=1e-6)
    assert all(
        torch.allclose(ranks[0]["outputs"][name], expected[name], atol=1e-6)
        for name in ("logits", "mean", "sum")
    )
    assert all(
        torch.allclose(ranks[0]["without labels"][name], tensor, atol=1e-6)
        for name, tensor in model(data.x[:3]).items()
    )
    assert all(
        rank["loader"] == ranks[0]["loader"] and len(rank["loader"]) == NUM_SAMPLES // 8
        for rank in ranks
    )
    total = sum(parameter.numel() for parameter in model.parameters())
    assert max(rank["held"] for rank in ranks) < 0.7 * total, (
        "the head's weights are cut over four devices"
    )
    again = run_ranks(loaded, 2, tmp_path / "saved")[0]
    assert all(torch.equal(again[name], tensor) for name, tensor in ranks[0]["state"].items())


def initialised(grid: tuple[int, int, int]) -> dict[str, Tensor]:
    wh.init()
    size = grid[0] * grid[1] * grid[2]
    build_model = Net if size == 1 else lambda: on(size, grid, Net())
    engine = wh.parallelize(build_model, Data().batch(0, 8), optimizer=adamw, loss=loss_of)
    return engine.full_state_dict()


@pytest.mark.slow
def test_initial_weights_are_those_of_any_other_number_of_devices() -> None:
    local = run_ranks(initialised, 1, (1, 1, 1))[0]
    sharded = run_ranks(initialised, 4, (2, 2, 1))[0]
    assert all(torch.equal(local[name], sharded[name]) for name in local)


# ---- plan files, dropout, stub chunks
# -----------------------------------------------------------------------------------


def follow(path: Path) -> tuple[list[float], str]:
    """Two steps with dropout under a plan from a file, twice from the same start: (losses,
    grid).
    """
    losses = []
    for _ in range(2):
        wh.init({"seed": 3})
        torch.manual_seed(0)
        engine = wh.parallelize(
            on(2, (1, 2, 1), Net(dropout=0.3)),
            Data().batch(0, 8),
            optimizer=adamw,
            loss=loss_of,
            plan=path,
        )
        losses.append([engine.step(Data().batch(0, 8)).loss for _ in range(2)])
    assert losses[0] == losses[1], (
        "dropout draws from the seed, the step, the micro-batch and the stage"
    )
    grid = engine.plan.virtual_devices[0].grid
    assert grid is not None
    return losses[0], grid.name


def test_a_plan_file_with_a_grid_is_followed_and_dropout_repeats(tmp_path: Path) -> None:
    wh.init({"seed": 3})
    plan = wh.plan(on(2, (1, 2, 1), Net(dropout=0.3)), Data().batch(0, 8), loss=loss_of, cluster=2)
    plan.save(tmp_path / "plan.json")
    ranks = run_ranks(follow, 2, tmp_path / "plan.json")
    assert ranks[0] == ranks[1] and ranks[0][1] == "1 x 2 x 1"


def test_the_stub_of_a_plan_with_grids_has_the_same_grids() -> None:
    wh.init()
    plan = wh.plan(
        wh.annotate(Net(), {"features": wh.split(2), "head": wh.split(2)}),
        Data().batch(0, 8),
        loss=loss_of,
        cluster=4,
    )
    assert plan.figures is not None
    stub = make_stub(plan, plan.figures)
    assert [sharding.stage for sharding in stub.plan.shardings] == [
        0,
        1,
    ] and stub.plan.virtual_devices == plan.virtual_devices
    assert contradiction(stub.plan) is None
    assert not any(
        stored.is_cut for sharding in stub.plan.shardings for stored in sharding.stored.values()
    )
