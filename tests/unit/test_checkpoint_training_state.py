"""Optimizers, schedulers and random numbers continue where they were, under another number of ranks
too.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.checkpoints import assert_same, saver_of
from whale.checkpoint import (
    AsyncSaver,
    CheckpointError,
    Reader,
    merge_values,
    pack_optimizer,
    pack_rng,
    pack_scheduler,
    unpack_optimizer,
    unpack_rng,
    unpack_scheduler,
)
from whale.checkpoint.format import decode, encode

# ---- optimizers


def network() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4), torch.nn.Linear(4, 3)
    )


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
}


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, scheduler: Any = None
) -> None:
    generator = torch.Generator().manual_seed(steps)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(7, 6, generator=generator)).pow(2).mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step(0.1) if isinstance(
                scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau
            ) else scheduler.step()


def groups(
    model: torch.nn.Module, only: Callable[[str], bool] = lambda name: True
) -> list[dict[str, Any]]:
    """Two groups, weights and biases, with different options; only the parameters that a rank
    holds.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if only(name)]
    return [
        {"params": [pair for pair in named if pair[0].endswith("weight")], "weight_decay": 0.1},
        {
            "params": [pair for pair in named if pair[0].endswith("bias")],
            "weight_decay": 0.0,
            "lr": 0.02,
        },
    ]


def names_of(model: torch.nn.Module) -> dict[Any, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def assert_same_state(got: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, Tensor):
        assert isinstance(got, Tensor), where
        assert_same(got, expected)
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys(), where
        for key in expected:
            assert_same_state(got[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert type(got) is type(expected) and len(got) == len(expected), where
        for place, pair in enumerate(zip(got, expected)):
            assert_same_state(*pair, f"{where}[{place}]")
    else:
        assert got == expected, where


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_an_optimizer_comes_back_as_torch_itself_would_bring_it(tmp_path: Path, kind: str) -> None:
    model = network()
    optimizer = OPTIMIZERS[kind](groups(model))
    train(model, optimizer, 3)
    tensors, values = pack_optimizer(optimizer, names_of(model))
    saver_of(tmp_path).save(1, tensors, rank_values={"optimizer": values}).wait()

    ours = OPTIMIZERS[kind](groups(model))
    oracle = OPTIMIZERS[kind](groups(model))
    oracle.load_state_dict(optimizer.state_dict())
    with Reader(tmp_path) as reader:
        unpack_optimizer(
            ours,
            names_of(model),
            reader.read,
            merge_values(v["optimizer"] for v in reader.rank_values),
        )
    assert_same_state(ours.state_dict(), oracle.state_dict())


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adafactor"])
@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, 3), (3, 1), (3, 2)])
def test_training_continues_under_another_rank_count(
    tmp_path: Path, kind: str, saved_by: int, loaded_by: int
) -> None:
    """Every rank holds some layers. Straight local training is the reference."""

    def on(rank: int, num_ranks: int) -> Callable[[str], bool]:
        return lambda name: int(name.partition(".")[0]) * num_ranks // 4 == rank

    straight = network()
    optimizer = OPTIMIZERS[kind](groups(straight))
    train(straight, optimizer, 3)
    middle = {name: tensor.clone() for name, tensor in straight.state_dict().items()}

    savers = [
        AsyncSaver(tmp_path, job_id="job", rank=rank, num_ranks=saved_by, timeout_s=20)
        for rank in range(saved_by)
    ]
    handles = []
    for rank, saver in enumerate(savers):
        mine = [name for name, _ in straight.named_parameters() if on(rank, saved_by)(name)]
        tensors, values = pack_optimizer(optimizer, names_of(straight), only=mine)
        model_tensors = {f"model/{name}": middle[name] for name in mine}
        handles.append(
            saver.save(3, {**tensors, **model_tensors}, rank_values={"optimizer": values})
        )
    for handle in handles:
        handle.wait()
    train(straight, optimizer, 4)

    resumed = network()
    optimizers = []
    with Reader(tmp_path) as reader:
        with torch.no_grad():
            for name, parameter in resumed.named_parameters():
                parameter.copy_(reader.read(f"model/{name}"))
        merged = merge_values(values.get("optimizer") for values in reader.rank_values)
        for rank in range(loaded_by):
            own = OPTIMIZERS[kind](groups(resumed, on(rank, loaded_by)))
            for group in own.param_groups:
                group["lr"] = 123.0  # must come from the checkpoint
            unpack_optimizer(own, names_of(resumed), reader.read, merged)
            optimizers.append(own)

    class All:
        def zero_grad(self) -> None:
            [own.zero_grad() for own in optimizers]

        def step(self) -> None:
            [own.step() for own in optimizers]

    train(resumed, All(), 4)  # type: ignore[arg-type]
    for name, tensor in resumed.state_dict().items():
        assert_same(tensor, straight.state_dict()[name])


def test_optimizers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = network()
    optimizer = OPTIMIZERS["SGD"](groups(model))
    train(model, optimizer, 1)
    tensors, values = pack_optimizer(optimizer, names_of(model), only=["0.weight", "0.bias"])
    with pytest.raises(CheckpointError, match="state of SGD, this job uses Adam"):
        unpack_optimizer(
            OPTIMIZERS["Adam"](groups(model)), names_of(model), tensors.__getitem__, values
        )
    with pytest.raises(
        CheckpointError,
        match=r"no optimizer state for 2 parameters, the first are 2\.weight, 3\.weight",
    ):
        unpack_optimizer(optimizer, names_of(model), tensors.__getitem__, values)
    first = network()
    one_group = OPTIMIZERS["SGD"](list(first[0].parameters()))
    with pytest.raises(
        CheckpointError,
        match=r"0\.weight and 0\.bias are both in group 0 now.*different lr, weight_decay|different weight_decay",
    ):
        unpack_optimizer(
            one_group, names_of(first), tensors.__getitem__, merge_values([values, None])
        )
    with pytest.raises(CheckpointError, match="not one of the model's"):
        pack_optimizer(optimizer, {})


class OddOptimizer(torch.optim.SGD):
    """Keeps a function in its state."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["schedule"] = print


def test_optimizer_state_that_cannot_be_saved_is_named() -> None:
    model = network()
    optimizer = OddOptimizer(model.parameters(), lr=0.1)
    train(model, optimizer, 1)
    with pytest.raises(
        CheckpointError, match=r"the state of OddOptimizer for 0\.weight\.schedule is a"
    ):
        pack_optimizer(optimizer, names_of(model))


# ---- schedulers


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]),
    "Cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 9),
    "OneCycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.3, total_steps=12),
    "Cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, 3),
    "Plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "Sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=3),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        [3],
    ),
    "Warm restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
}


def learning_rates(
    optimizer: torch.optim.Optimizer, scheduler: Any, steps: int
) -> list[list[float]]:
    rates = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step(0.1) if isinstance(
            scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau
        ) else scheduler.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
    return rates


@pytest.mark.parametrize("kind", sorted(SCHEDULERS))
def test_a_scheduler_continues_where_it_was(tmp_path: Path, kind: str) -> None:
    model = network()
    optimizer = OPTIMIZERS["SGD"](groups(model))
    scheduler = SCHEDULERS[kind](optimizer)
    train(model, optimizer, 3, scheduler)
    tensors, values = pack_optimizer(optimizer, names_of(model))
    saver_of(tmp_path).save(
        1, tensors, {"optimizer": values, "scheduler": pack_scheduler(scheduler)}
    ).wait()
    ours = OPTIMIZERS["SGD"](groups(model))
    other = SCHEDULERS[kind](ours)
    with Reader(tmp_path) as reader:
        unpack_optimizer(
            ours, names_of(model), reader.read, merge_values([reader.values["optimizer"]])
        )
        unpack_scheduler(other, reader.values["scheduler"], ours)
    assert learning_rates(ours, other, 5) == learning_rates(optimizer, scheduler, 5)


@pytest.mark.parametrize("kind", ["StepLR", "Cosine", "Sequential"])
def test_a_scheduler_fits_another_number_of_groups(tmp_path: Path, kind: str) -> None:
    """One group for each parameter: a rank that holds two of them has two groups, and takes their
    rates.
    """
    model = network()
    single = [
        {"params": [pair], "lr": 0.1 * (place + 1)}
        for place, pair in enumerate(model.named_parameters())
    ]
    optimizer = torch.optim.SGD(single, lr=0.1)
    scheduler = SCHEDULERS[kind](optimizer)
    train(model, optimizer, 2, scheduler)
    _, values = pack_optimizer(optimizer, names_of(model))
    state = decode(json.loads(json.dumps(encode(pack_scheduler(scheduler), "s"))))
    ours = torch.optim.SGD(
        [{"params": [pair]} for pair in list(model.named_parameters())[2:4]], lr=9.0
    )
    other = SCHEDULERS[kind](ours)
    unpack_optimizer(ours, names_of(model), {}.__getitem__, values)
    unpack_scheduler(other, state, ours)
    assert learning_rates(ours, other, 4) == [
        rates[2:4] for rates in learning_rates(optimizer, scheduler, 4)
    ]


def test_a_scheduler_that_cannot_be_saved_is_named() -> None:
    optimizer = OPTIMIZERS["SGD"](network().parameters())

    class Holder:
        def __call__(self, step: int) -> float:
            return 1.0

    holder = Holder()
    holder.function = print  # type: ignore[attr-defined]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, holder)
    with pytest.raises(
        CheckpointError, match=r"the state of LambdaLR\.lr_lambdas\[0\]\.function is a"
    ):
        pack_scheduler(scheduler)
    with pytest.raises(CheckpointError, match="state of StepLR, this job uses LambdaLR"):
        unpack_scheduler(scheduler, pack_scheduler(SCHEDULERS["StepLR"](optimizer)), optimizer)


# ---- random numbers


def draw() -> list[Any]:
    return [
        torch.rand(3).tolist(),
        random.random(),
        random.gauss(0, 1),
        np.random.rand(2).tolist(),
        np.random.randn(),
        torch.randn(1).item(),
    ]


def test_random_numbers_continue_where_they_were(tmp_path: Path) -> None:
    (
        random.gauss(0, 1),
        np.random.randn(),
        torch.randn(1),
    )  # leaves half a pair of normal numbers in each
    tensors, values = pack_rng("rng/0/")
    saver_of(tmp_path).save(1, tensors, rank_values={"rng": values}).wait()
    expected = draw()
    torch.manual_seed(99), random.seed(99), np.random.seed(99)
    assert draw() != expected
    with Reader(tmp_path) as reader:
        unpack_rng("rng/0/", reader.read, reader.rank_values[0]["rng"])
    assert draw() == expected


@pytest.mark.parametrize("part", ["torch", "python", "numpy"])
def test_a_crafted_random_state_is_refused_and_changes_nothing(part: str) -> None:
    tensors, values = pack_rng("")
    before = draw()
    unpack_rng("", tensors.__getitem__, values)
    spoiled = {
        **tensors,
        part: torch.full_like(tensors[part], -1) if part != "torch" else tensors[part][:-9].clone(),
    }
    with pytest.raises(CheckpointError, match="random number state"):
        unpack_rng("", spoiled.__getitem__, values)
    with pytest.raises(CheckpointError, match="random number state"):
        unpack_rng(
            "", tensors.__getitem__, {**values, "numpy": {**values["numpy"], "position": 10**6}}
        )
    assert draw() == before
