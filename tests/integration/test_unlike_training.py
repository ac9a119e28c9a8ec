"""What a job does beside plain steps when its model replicas are not alike: shards that differ,
clipping, checkpoints under other layouts, evaluation, loading, dropout, fp16, refusals.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale as wh
from tests.ranks import ModelServer, preload
from whale import api
from whale.capture.batch import read_batch
from whale.capture.prepare import CapturedModel
from whale.planning.planner import fingerprint
from whale.planning.problem import Problem
from whale.planning.replica_drafts import GroupDrafts
from whale.planning.replica_specs import ReplicaSpec, StageSpec
from whale.planning.replicas import plan_of_replicas

preload("tests.integration.test_unlike_training")

WIDTH = 12
WORDS = 17
LENGTH = 5
BATCH_SIZE = 11
NUM_STEPS = 4
CLIP = 0.05
"""below the norms of all steps, so that every step is scaled"""
EXACT = 1e-10


class Net(nn.Module):
    """Words in, words out; the head is the embedding. Labels of -100 do not count, so that the mean
    is over another number in every part of the batch.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.up = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.words(ids)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + self.dropout(down(torch.tanh(up(x))))
        logits = F.linear(x, self.words.weight)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.transpose(1, 2), labels), "logits": logits}


def build(dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Net(dropout).to(dtype)


def batch(step: int, size: int = BATCH_SIZE) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, WORDS, (size, LENGTH), generator=generator)
    labels = torch.randint(0, WORDS, (size, LENGTH), generator=generator)
    labels[torch.rand(size, LENGTH, generator=generator) < 0.4] = -100
    return {"ids": ids, "labels": labels}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


LAYOUTS: dict[str, tuple[int, list[Any] | None]] = {
    "one rank": (1, None),
    "alike": (2, None),
    "1 + 2 stages": (
        3,
        [{"stages": [[0]]}, {"stages": [[1], [2]], "num_micro_batch": 3, "schedule": "auto"}],
    ),
    "2 stages in another order + 1": (
        3,
        [
            {"stages": [[2], {"ranks": [0], "start": "up.2"}], "samples": 4, "num_micro_batch": 2},
            {"stages": [[1]], "recompute": True, "num_micro_batch": 2},
        ],
    ),
    "whole + halves": (
        3,
        [
            {"stages": [[1]], "samples": 5},
            {"stages": [{"ranks": [0, 2], "split": True, "grid": [1, 2, 1]}], "num_micro_batch": 2},
        ],
    ),
    "halves + thirds": (
        5,
        [
            {"stages": [{"ranks": [0, 1], "split": True, "grid": [1, 2, 1]}]},
            {"stages": [{"ranks": [2, 3, 4], "split": True, "grid": [1, 3, 1]}]},
        ],
    ),
}


def prepare_net() -> CapturedModel:
    torch.set_num_threads(1)
    layout, tensors = read_batch(batch(0))
    return api._prepare(build(), layout, tensors, None, wh.Config(), "cpu", True)


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer(prepare_net) as made:
        yield made


def start(prepared: CapturedModel | None, layout: str, **settings: Any) -> Any:
    """The engine of one rank."""
    replicas = LAYOUTS[layout][1]
    wh.init(wh.Config({"clip_grad_norm": CLIP, "replicas": replicas, **settings}))
    return wh.parallelize(build(), batch(0), optimizer=adamw, prepared=prepared)


def train(
    prepared: CapturedModel, layout: str, folder: Path, steps: range
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """(losses, gradient norms, state) of these steps, after loading what earlier ones have saved;
    saves at the end.
    """
    engine = start(prepared, layout)
    if steps.start:
        assert engine.load(folder) == steps.start
    results = [engine.step(batch(step)) for step in steps]
    engine.save(folder).wait()
    return (
        [result.loss for result in results],
        [result.grad_norm for result in results],
        engine.full_state_dict(),
    )


def train_locally() -> tuple[list[float], list[float], dict[str, Tensor]]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    norms = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = model(**batch(step))["loss"]
        loss.backward()
        losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    return losses, norms, model.state_dict()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("1 + 2 stages", "alike"),
        ("2 stages in another order + 1", "1 + 2 stages"),
        ("alike", "whole + halves"),
        pytest.param("whole + halves", "one rank", marks=pytest.mark.slow),
        pytest.param("halves + thirds", "2 stages in another order + 1"),
        pytest.param("one rank", "halves + thirds", marks=pytest.mark.slow),
        pytest.param("whole + halves", "halves + thirds", marks=pytest.mark.slow),
    ],
)
def test_trains_like_local_and_resumes_under_another_layout(
    server: ModelServer, first: str, second: str, tmp_path: Path
) -> None:
    """AdamW, whose state is cut like its parameters, with clipping, which needs the norm of all
    gradients, each counted once.
    """
    half = NUM_STEPS // 2
    begun = server.run(train, LAYOUTS[first][0], first, tmp_path, range(half))
    ended = server.run(train, LAYOUTS[second][0], second, tmp_path, range(half, NUM_STEPS))
    losses, norms, state = train_locally()
    assert min(norms) > CLIP, "the test needs steps that are clipped"
    for rank in begun[1:]:
        assert rank[:2] == begun[0][:2]
    assert begun[0][0] + ended[0][0] == pytest.approx(losses, abs=EXACT)
    assert begun[0][1] + ended[0][1] == pytest.approx(norms, abs=EXACT)
    largest = max(float(tensor.abs().max()) for tensor in state.values())
    for name, tensor in state.items():
        assert float((ended[0][2][name] - tensor).abs().max()) <= EXACT * largest, name


def evaluate_and_load(
    prepared: CapturedModel, layout: str
) -> tuple[list[Any], list[float], list[int]]:
    """(evaluations of several sizes, losses of a sharded loader, samples that this rank reads)"""
    engine = start(prepared, layout)
    found = []
    for size in (BATCH_SIZE, 6, 23):
        result = engine.evaluate(batch(size, size), outputs=True)
        logits = result.outputs["logits"] if result.outputs is not None else None
        found.append((result.loss, logits))
    everything = batch(7, 3 * BATCH_SIZE)
    samples = [{key: value[i] for key, value in everything.items()} for i in range(3 * BATCH_SIZE)]
    losses = [engine.step(part).loss for part in engine.loader(samples, BATCH_SIZE)]
    losses.append(engine.step(batch(9, 9)).loss)  # another size of the mini-batch
    own = [i for a, b in engine.own_samples(BATCH_SIZE) for i in range(a, b)]
    return found, losses, own


@pytest.mark.parametrize("layout", ["1 + 2 stages", "whole + halves"])
def test_evaluates_and_loads_like_one_rank(server: ModelServer, layout: str) -> None:
    """Outputs come in the order of the samples; each rank of a loader reads its own samples, from
    which the numbers of labels that count are put together.
    """
    num_ranks = LAYOUTS[layout][0]
    found = server.run(evaluate_and_load, num_ranks, layout)
    (expected,) = server.run(evaluate_and_load, 1, "one rank")
    for rank in found:
        assert rank[1] == pytest.approx(expected[1], abs=EXACT)
    for (loss, logits), (right_loss, right_logits) in zip(found[0][0], expected[0], strict=True):
        assert loss == pytest.approx(right_loss, abs=EXACT)
        assert float((logits - right_logits).abs().max()) < EXACT
    read = [set(rank[2]) for rank in found]
    assert set().union(*read) == set(range(BATCH_SIZE))
    assert all(len(own) < BATCH_SIZE for own in read), "a rank reads samples of other replicas"


def without_a_rank(
    prepared: CapturedModel, folder: Path
) -> tuple[list[float], dict[str, Tensor], list[Any]]:
    """Rank 1 of 4 is left out, as a search may decide. The last steps are done twice: after them
    the checkpoint of before is loaded.
    """
    wh.init({"clip_grad_norm": CLIP})
    plan = None
    if wh.rank() == 0:
        problem = Problem(
            captured=prepared.captured,
            kinds=prepared.kinds,
            marks={},
            default_strategy=None,
            term_texts=prepared.term_texts(),
            not_additive=None,
            cluster=wh.Cluster.uniform(4, "CPU"),
            config=wh.Config(),
            batch_size=BATCH_SIZE,
        )
        one = ReplicaSpec((StageSpec((2,)),), num_samples=6)
        two = ReplicaSpec((StageSpec((3,)), StageSpec((0,))), num_micro_batch=2)
        model = fingerprint(prepared.captured)
        plan, _ = plan_of_replicas(GroupDrafts(problem, model), [one, two], may_leave_out=True)
        assert plan.left_out == (1,)
    engine = wh.parallelize(build(), batch(0), optimizer=adamw, prepared=prepared, plan=plan)
    losses = [engine.step(batch(step)).loss for step in range(2)]
    engine.save(folder).wait()
    for _ in range(2):
        assert engine.load(folder) == 2
        rest = [engine.step(batch(step)).loss for step in range(2, NUM_STEPS)]
    losses += rest
    evaluated = engine.evaluate(batch(0), outputs=True)
    return losses, engine.full_state_dict(), [evaluated.loss, engine.own_samples(BATCH_SIZE)]


def test_a_rank_that_is_left_out_does_nothing_and_waits(
    server: ModelServer, tmp_path: Path
) -> None:
    found = server.run(without_a_rank, 4, tmp_path)
    losses, _, state = train_locally()
    for rank in found:
        assert rank[0] == pytest.approx(losses, abs=EXACT)
        assert rank[2][0] == pytest.approx(found[0][2][0], abs=EXACT)
    assert found[1][2][1] == []
    for name, tensor in state.items():
        assert float((found[0][1][name] - tensor).abs().max()) <= 10 * EXACT, name


def with_dropout(_: CapturedModel, recompute: bool) -> list[float]:
    replicas = [
        {"stages": [[0]], "samples": 5, "recompute": recompute},
        {"stages": [[1], [2]], "num_micro_batch": 2, "recompute": recompute},
    ]
    wh.init({"replicas": replicas, "check_capture": False})
    engine = wh.parallelize(build(0.3), batch(0), optimizer=adamw)
    return [engine.step(batch(0)).loss for _ in range(2)]


def test_dropout_is_drawn_again_when_recomputed(server: ModelServer) -> None:
    """Weights of the second loss follow from gradients that recomputation would spoil if its
    dropout were another.
    """
    plain = server.run(with_dropout, 3, False)
    again = server.run(with_dropout, 3, True)
    assert plain[0] == plain[1] == plain[2]
    assert again[0] == pytest.approx(plain[0], abs=EXACT)
    assert plain[0][0] != pytest.approx(train_locally()[0][0], abs=1e-4), "nothing was dropped"


def with_fp16(_: CapturedModel, replicas: list[Any] | None) -> tuple[list[float], list[bool]]:
    wh.init({"precision": "fp16", "on_nonfinite": "skip", "replicas": replicas})
    engine = wh.parallelize(build(dtype=torch.float32), batch(0), optimizer=adamw)
    engine._training.updater.loss_scale.scale = 2.0**40  # overflows at first
    results = [engine.step(batch(step)) for step in range(3)]
    return [result.loss for result in results], [result.skipped for result in results]


def test_fp16_skips_a_step_on_all_ranks_or_none(server: ModelServer) -> None:
    found = server.run(with_fp16, 3, LAYOUTS["1 + 2 stages"][1])
    (expected,) = server.run(with_fp16, 1, None)
    for losses, skipped in found:
        assert skipped == expected[1] and skipped[0]
        assert losses == pytest.approx(expected[0], abs=2e-3)


# ---- what is refused


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)).square().mean()


class NotAdditive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).std()


UNLIKE = [{"stages": [[0]]}, {"stages": [[1], [2]]}]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"replicas": [{"stages": [[0], [1]]}]}, "no model replica has rank 2"),
        ({"replicas": [{"stages": [[0]]}, {"stages": [[0], [1], [2]]}]}, "rank 0 is in replica 0"),
        ({"replicas": [{"stages": [[0], [3]]}]}, "has rank 3, but there are 3 devices"),
        (
            {"replicas": [{"stages": [[0]], "samples": 9}, {"stages": [[1], [2]], "samples": 9}]},
            "9 \\+ 9 = 18, the mini-batch has 11",
        ),
        (
            {"replicas": [{"stages": [[0]], "samples": 9}, *UNLIKE[1:]], "num_micro_batch": 3},
            "2 of 11 samples are left",
        ),
        (
            {"replicas": [*UNLIKE[:1], {"stages": [[1], {"ranks": [2], "start": "up.9"}]}]},
            "no module of the model. Did you mean 'up.",
        ),
        ({"replicas": UNLIKE, "loss_per_micro_batch": True}, "micro-batches of their own"),
    ],
)
def test_bad_replicas_are_refused_by_name(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        wh.plan(build(), batch(0), cluster=3, config=config)


@pytest.mark.parametrize(
    ("model", "text"),
    [(Normed(), "a batch norm takes the statistics"), (NotAdditive(), "sum over samples")],
)
def test_results_that_depend_on_micro_batches_are_refused(model: nn.Module, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        wh.plan(model, torch.randn(8, WIDTH), cluster=3, config={"replicas": UNLIKE})


@pytest.mark.parametrize(
    "value", [[], [{"stages": []}], [{"stages": [[0, 0]]}], [{"stages": [[-1]]}], [{"stage": [[0]]}],
              [{"stages": [[0]], "samples": 0}], [{"stages": [[0]], "schedule": "fast"}], 3]
)  # fmt: skip
def test_config_refuses_other_forms(value: Any) -> None:
    with pytest.raises(ValueError, match="'replicas' must be a list like"):
        wh.Config({"replicas": value})
