"""The update of a step that nobody waits for (issue 15, row 12): loss and norm are looked at one
step late, and a step with a number that is not finite changes nothing all the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale as wh
from tests.device.collectives import BACKEND
from tests.device.local_device import use_test_device
from tests.device.memory import NAME
from tests.device.settings import settings
from tests.device.streams import counters
from tests.ranks import ModelServer, preload
from whale.runtime.gradient_norm import scale_gradients
from whale.runtime.step_update import NonFiniteError

preload("tests.device.test_masked_update")
WIDTH = 6
BATCH_SIZE = 8
NUM_STEPS = 5
KERNEL_S = 0.001
"""what every kernel takes longer, so that the host is ahead of the device"""
EXACT = 1e-10


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    """Forks ranks that have the test device."""
    with ModelServer(use_test_device) as found:
        yield found


class Stack(nn.Module):
    """Experts, each with its own part of the features: all parameters are stacks of matrices."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // NUM_EXPERTS
        # larger and larger, so that no part has the norm of the whole
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, size, size).mul_(SCALES[:, None, None]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bed,edf->bef", x.unflatten(1, (NUM_EXPERTS, -1)), self.up).flatten(1)


NUM_EXPERTS = 2
SCALES = torch.tensor([0.1, 3.0])


def _model(is_stack: bool = False) -> nn.Module:
    torch.manual_seed(1)
    if is_stack:
        return Stack().double()
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers).double()


def _batch(step: int, bad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    batch = torch.randn(BATCH_SIZE, WIDTH, generator=generator, dtype=torch.float64)
    if bad:
        batch[-1, 0] = float("inf")
    return batch


def _loss(output: Tensor, batch: Tensor) -> Tensor:
    return (output - batch).square().mean()


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def _foreach(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, foreach=True)


def _halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def _plateau(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)


@dataclass(frozen=True)
class Row:
    """A job."""

    name: str
    optimizer: Callable[[Any], torch.optim.Optimizer]
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    bad_steps: tuple[int, ...] = ()
    stages: int = 1
    is_stack: bool = False


ROWS = [
    Row("AdamW", _adamw),
    Row("AdamW in 2 stages, LR scheduler", _adamw, _halving, {"num_micro_batch": 2}, (), 2),
    Row("clipping", _momentum, None, {"clip_grad_norm": 0.1}),
    Row("skip", _adamw, _halving, {"on_nonfinite": "skip"}, (2,)),
    Row("skip the first with momentum", _momentum, None, {"on_nonfinite": "skip"}, (0, 3)),
    Row("loss decides the rate", _adamw, _plateau, {"on_nonfinite": "skip"}, (1,)),
    Row("clip and continue", _foreach, None, {"clip_grad_norm": 0.1, "on_nonfinite": "continue"}),
]


@dataclass
class Outcome:
    losses: list[float]
    skipped: list[bool]
    rates: list[float]
    weights: dict[str, Tensor]
    waits_before_update: list[int] = field(default_factory=list)
    """host waits of each step until its update was launched"""
    waited_for: set[str] = field(default_factory=set)
    """what they were for"""


def _train_locally(row: Row) -> Outcome:
    """What local training does that leaves out steps with a loss that is not finite."""
    model = _model(row.is_stack)
    optimizer = row.optimizer(model.parameters())
    scheduler = row.scheduler(optimizer) if row.scheduler is not None else None
    outcome = Outcome([], [], [], {})
    for step in range(NUM_STEPS):
        batch = _batch(step, step in row.bad_steps)
        optimizer.zero_grad()
        loss = _loss(model(batch), batch)
        loss.backward()
        outcome.losses.append(loss.item())
        outcome.skipped.append(not loss.isfinite())
        if loss.isfinite():
            if "clip_grad_norm" in row.config:
                nn.utils.clip_grad_norm_(model.parameters(), row.config["clip_grad_norm"])
            optimizer.step()
            if row.scheduler is _plateau:
                scheduler.step(loss.item())
            elif scheduler is not None:
                scheduler.step()
        outcome.rates.append(optimizer.param_groups[0]["lr"])
    outcome.weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    return outcome


def _engine(row: Row) -> Any:
    model = _model()
    if row.stages == 2:
        wh.annotate(model, {"0|1": wh.replicate(1), "2": wh.replicate(1)})
    return wh.parallelize(
        model, _batch(0), optimizer=row.optimizer, scheduler=row.scheduler, loss=_loss
    )


def _train(_: None, row: Row) -> Outcome:
    """One rank. The results are looked at when all steps are launched."""
    wh.init({"check_batches": False, "check_replicas": 0, **row.config})
    engine = _engine(row)
    waits: list[int] = []
    waited_for: set[str] = set()

    def note(*_: Any) -> None:
        waits.append(sum(counters.host_waits.values()))
        waited_for.update(counters.host_waits)

    engine.optimizer.register_step_pre_hook(note)
    settings.kernel_s = KERNEL_S
    results = []
    for step in range(NUM_STEPS):
        batch = _batch(step, step in row.bad_steps)
        counters.clear()
        results.append(engine.step(batch))
    settings.kernel_s = 0.0
    return Outcome(
        [result.loss for result in results],
        [result.skipped for result in results],
        [result.learning_rate for result in results],
        engine.full_state_dict(),
        waits,
        waited_for,
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_no_wait_before_the_update(server: ModelServer, row: Row) -> None:
    """Row 12. Before, every step waited for its loss and norm before the update.

    Where a step may not count or its loss decides the learning rate, the host looks at the step
    before, which the device has long left, and never at this one.
    """
    reference = _train_locally(row)
    ranks = server.run(_train, 2, row, backend=BACKEND)
    for rank in ranks:
        assert rank.losses == pytest.approx(reference.losses, rel=EXACT, nan_ok=True)
        assert rank.skipped == reference.skipped
        assert rank.rates == pytest.approx(reference.rates)
        looks_back = row.scheduler is not None and row.config.get("on_nonfinite") == "skip"
        assert len(rank.waits_before_update) == NUM_STEPS
        assert max(rank.waits_before_update) <= looks_back, rank.waited_for
        assert rank.waits_before_update[0] == 0  # there is none before
    for name, tensor in reference.weights.items():
        torch.testing.assert_close(ranks[0].weights[name], tensor, rtol=EXACT, atol=EXACT)


def _adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.05)


CLIP_AND_CONTINUE = {"clip_grad_norm": 0.1, "on_nonfinite": "continue"}
"""updates that are never left out, of which the norm of all gradients is a number on the device"""
IN_PIECES = [
    Row("owners", _adafactor, None, CLIP_AND_CONTINUE),
    Row("norms of the whole", _adafactor, None, CLIP_AND_CONTINUE, is_stack=True),
]


def _train_split(_: None, row: Row) -> tuple[wh.Plan, dict[str, Tensor]]:
    """Plan and weights of a model whose products are cut over all ranks, under an optimizer that
    looks at whole parameters.
    """
    wh.init({"check_replicas": 0, **row.config})
    model = _model(row.is_stack)
    wh.annotate(model, {"": wh.split(2, grid=(1, 2, 1) if row.is_stack else None)})
    engine = wh.parallelize(model, _batch(0), optimizer=row.optimizer, loss=_loss)
    for step in range(NUM_STEPS):
        engine.step(_batch(step))
    return engine.plan, engine.full_state_dict()


@pytest.mark.parametrize("row", IN_PIECES, ids=lambda row: row.name)
def test_updates_in_pieces_are_not_one_call(server: ModelServer, row: Row) -> None:
    """Updates that are never left out went by one call of the optimizer: without the owners of whole
    parameters, which kept their first values, and without norms of the whole, so that each holder
    of a stack took the norm of its part for them.
    """
    reference = _train_locally(row)
    plan, state = server.run(_train_split, 2, row, backend=BACKEND)[0]
    assert plan.summed_norms == (("up",) if row.is_stack else ())
    assert bool(plan.owners) is not row.is_stack
    for name, tensor in reference.weights.items():
        torch.testing.assert_close(state[name], tensor, rtol=EXACT, atol=EXACT)


def _overflow(_: None, device: str) -> tuple[dict[str, Any], list[Any], dict[str, Tensor]]:
    """fp16: the second batch overflows. Gives the loss scale, the results and the weights."""
    wh.init({"precision": "fp16", "device": device, "check_replicas": 0})
    engine = wh.parallelize(
        _model().float(), _batch(0).float(), optimizer=_adamw, scheduler=_halving, loss=_loss
    )
    results = []
    for factor in (1.0, 1e3, 1.0):
        results.append(engine.step(_batch(1).float() * factor))
    seen = [(result.skipped, result.learning_rate, result.loss) for result in results]
    return engine._training.updater.loss_scale.state(), seen, engine.full_state_dict()


def test_an_overflow_is_found_on_the_device(server: ModelServer) -> None:
    """The weights are those of the CPU, whose host waits for every norm."""
    ((scale, results, weights),) = server.run(_overflow, 1, "auto", backend=BACKEND)
    ((cpu_scale, cpu_results, cpu_weights),) = server.run(_overflow, 1, "cpu")
    assert [skipped for skipped, _, _ in results] == [False, True, False]
    assert scale == cpu_scale and scale["num_skipped"] == 1
    for one, other in zip(results, cpu_results, strict=True):
        assert one == pytest.approx(other, rel=1e-2)
    for name, tensor in cpu_weights.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-2)


def _stop(_: None, row: Row) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor], float]:
    """Step 1 is wrong: the messages, weights after step 0, weights after the error, the rate."""
    wh.init({"check_replicas": 0})
    engine = _engine(row)
    engine.step(_batch(0))
    before = copy.deepcopy(engine.full_state_dict())
    messages = []
    rate = engine.optimizer.param_groups[0]["lr"]
    for step in (1, 2):
        try:
            engine.step(_batch(step, step == 1))
        except NonFiniteError as error:
            messages.append(str(error))
    assert engine.step_count == 1
    assert engine.optimizer.param_groups[0]["lr"] == rate
    after = copy.deepcopy(engine.full_state_dict())
    engine.step(_batch(1))
    return messages, before, after, engine.step(_batch(2)).loss


def test_a_late_error_leaves_the_weights_as_they_were(server: ModelServer) -> None:
    """The error comes with the next step; the weights are those before the wrong one, and training
    can continue from there.
    """
    row = Row("stop", _adamw, _halving)
    reference = _train_locally(Row("", _adamw, _halving))
    for messages, before, after, loss in server.run(_stop, 2, row, backend=BACKEND):
        assert len(messages) == 1 and messages[0].startswith("step 1: the loss is inf")
        assert "2.weight on rank" in messages[0] or "2.bias on rank" in messages[0]
        assert "The weights are unchanged" in messages[0]
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert loss == pytest.approx(reference.losses[2], rel=EXACT)


def _scaled(_: None, dtype: torch.dtype) -> tuple[int, list[Tensor]]:
    """Launches that multiply gradients by a number of the device, and what they give."""
    held = []
    for number in range(NUM_SCALED):
        values = torch.full((number + 1,), number + 1.0)
        tensor = nn.Parameter(torch.zeros(number + 1).to(NAME, dtype))
        tensor.grad = values.to(NAME, dtype)
        held.append(SimpleNamespace(tensor=tensor))
    factor = torch.full((), FACTOR, dtype=torch.float64).to(NAME)
    counters.clear()
    scale_gradients(held, factor)  # type: ignore[arg-type]
    num_launches = sum(counters.launches.values())
    return num_launches, [each.tensor.grad.cpu() for each in held]


NUM_SCALED = 7
FACTOR = 0.3
MOST_LAUNCHES = 4
"""the factor in the dtype of the product, a mark for what is not finite, and one for all gradients"""


HALF = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_gradients_are_scaled_in_one_launch(server: ModelServer, dtype: torch.dtype) -> None:
    """Low row of the table. Before: one launch for each gradient, three for one of 16 bits. Those of
    bfloat16 still take three: CUDA has no kernel for them.
    """
    ((num_launches, found),) = server.run(_scaled, 1, dtype, backend=BACKEND)
    most = 3 * NUM_SCALED if dtype is torch.bfloat16 else MOST_LAUNCHES
    assert num_launches <= most
    exact = torch.float32 if dtype in HALF else dtype
    for number, gradient in enumerate(found):
        expected = torch.tensor(number + 1.0, dtype=exact) * torch.tensor(FACTOR, dtype=exact)
        assert torch.equal(gradient, expected.to(dtype).expand(number + 1))


def _returns_early(_: None) -> tuple[bool, bool]:
    """Whether the device is still at work when a step returns, and after a look at its loss."""
    wh.init({"check_replicas": 0})
    engine = _engine(Row("", _adamw))
    engine.step(_batch(0))
    settings.kernel_s = KERNEL_S
    result = engine.step(_batch(1))
    device = engine._job.ranks.device
    is_over = device.is_over(device.event())
    settings.kernel_s = 0.0
    return is_over, result.loss > 0


def test_a_step_returns_before_the_device_is_done(server: ModelServer) -> None:
    ((is_over, has_loss),) = server.run(_returns_early, 1, backend=BACKEND)
    assert not is_over and has_loss
