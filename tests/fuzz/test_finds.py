"""What tests/fuzz found, each as a small model of its own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale as wh
from tests.ranks import run_ranks


class CutSum(nn.Module):
    """The sum over samples is one TaskGraph's, what divides it another one's."""

    def __init__(self, before: int = 2, behind: int = 1) -> None:
        super().__init__()
        self.before = before
        self.behind = behind
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with wh.replicate(self.before):
            total = self.first(x).square().sum()
        with wh.replicate(self.behind):
            return torch.tanh(x.new_ones(())) * total / x.shape[0]


def test_a_cut_behind_a_sum_over_samples_of_several_devices_is_refused() -> None:
    """One device's part was taken for the whole sum (seed 2014: half of the loss, no message)."""
    with pytest.raises(ValueError, match="is a sum over samples, and stage 1"):
        wh.plan(CutSum(2, 1), torch.randn(4, 4), cluster=3)
    with pytest.raises(ValueError, match="is a sum over samples, and stage 1"):
        wh.plan(CutSum(1, 2), torch.randn(4, 4), cluster=3)  # seed 3013: counted twice
    wh.plan(CutSum(), torch.randn(4, 4), cluster=1)


class DeadBeforeNoGrad(nn.Module):
    """An operation that nobody uses, and then a block without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * self.scale
        F.layer_norm(scaled, (6,))
        with torch.no_grad():
            cut = scaled * 2
        return self.layer(cut).square().mean()


def test_an_unused_operation_before_a_no_grad_block() -> None:
    """`torch.export` forgets that it uses its input, and erasing it failed (seed 3009)."""
    plan = wh.plan(DeadBeforeNoGrad(), torch.randn(4, 6), cluster=2)
    assert plan.num_devices == 2


class PartsCross(nn.Module):
    """Two of the results of one operation go into another stage."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6, dtype=torch.float64)
        self.second = nn.Linear(3, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        values, places = self.first(x).topk(3, dim=1)
        return (self.second(values) + self.second(places.to(values.dtype))).square().mean()


def train_parts(num_ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    wh.init()
    model = PartsCross()
    if num_ranks > 1:
        wh.annotate(model, {"first": wh.replicate(1), "second": wh.split(2)})
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    engine = wh.parallelize(model, x, optimizer=lambda pairs: torch.optim.SGD(pairs, lr=0.1))
    return [engine.step(x).loss for _ in range(2)], engine.full_state_dict()


def test_one_of_several_results_goes_into_a_split_stage() -> None:
    """A received `topk(...).indices` was looked for under another name (seed 20020: KeyError)."""
    losses, weights = train_parts(1)
    found, state = run_ranks(train_parts, 3, 3)[0]
    assert found == pytest.approx(losses, rel=1e-12)
    for name, tensor in weights.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-12, atol=1e-12)


class StatisticsOnly(nn.Module):
    """A batch norm whose result nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.norm(hidden)
        return self.last(torch.tanh(hidden)).square().mean()


def running_statistics(marks: dict[str, wh.Strategy]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    wh.init({"strategy": "data"} if not marks else {"colocate": True})
    model = StatisticsOnly().double()
    batch = torch.randn(8, 4, dtype=torch.float64)
    wh.annotate(model, marks)
    engine = wh.parallelize(model, batch, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    engine.step(batch)
    return engine.full_state_dict()


@pytest.mark.parametrize("beside", ["nothing", "split"])
def test_running_statistics_of_a_batch_norm_that_nobody_reads(beside: str) -> None:
    """They stayed as they were, under every plan (seed 5022)."""
    marks = {"first|norm": wh.replicate(2), "last": wh.split(2)} if beside == "split" else {}
    state, _ = run_ranks(running_statistics, 2, marks)
    torch.manual_seed(0)
    local = StatisticsOnly().double()
    local(torch.randn(8, 4, dtype=torch.float64))
    for name, value in local.named_buffers():
        torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-14)


class Sorting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3, dtype=torch.float64)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        return self.layer(x + hidden.argsort(-1)).square().mean()


class OnlySorted(nn.Module):
    """The last stage reads what the first one computes, but no gradient comes back."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6, dtype=torch.float64)
        self.last = Sorting()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x, self.first(x))


def train_sorted(schedule: str | None) -> dict[str, Tensor]:
    wh.init({"num_micro_batch": 2, "schedule": schedule} if schedule else {})
    model = OnlySorted()
    if schedule:
        wh.annotate(model, {"first": wh.replicate(1), "last": wh.replicate(1)})
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    engine = wh.parallelize(model, x, optimizer=lambda pairs: torch.optim.AdamW(pairs, lr=0.1))
    engine.step(x)
    return engine.full_state_dict()


@pytest.mark.parametrize("schedule", [None, "1f1b", "zero-bubble"])
def test_weights_without_a_gradient_stay_as_they_are(schedule: str | None) -> None:
    """They got a gradient of zeros from the next stage, and AdamW its weight decay (seed 700017)."""
    state, *_ = run_ranks(train_sorted, 2 if schedule else 1, schedule)
    local = OnlySorted()
    for name, value in local.first.state_dict(prefix="first.").items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=0)
    assert not torch.equal(state["last.layer.weight"], local.last.layer.weight)


class Stacked(nn.Module):
    """Joins the batch to itself under another name of `cat`, and takes the second half."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6, dtype=torch.float64)
        self.middle = nn.Sequential(Doubled(), nn.Linear(6, 6, dtype=torch.float64))
        self.last = nn.Linear(6, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x))))).square().mean()


class Doubled(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return torch.vstack([hidden, hidden])[-hidden.shape[0] :]


def loss_of_stacked() -> float:
    wh.init({"num_micro_batch": 1})
    model = Stacked()
    marks = {"first": wh.replicate(1), "middle": wh.split(2, (1, 1, 2)), "last": wh.replicate(1)}
    wh.annotate(model, marks)
    engine = wh.parallelize(model, stacked_batch(), optimizer=torch.optim.AdamW)
    return float(engine.step(stacked_batch()).loss)


def stacked_batch() -> Tensor:
    return torch.randn(9, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_a_vstack_of_samples_on_a_grid() -> None:
    """Nothing knew its order of rows, and each device took other ones than its own (seed 5150)."""
    expected = Stacked()(stacked_batch()).item()
    for loss in run_ranks(loss_of_stacked, 4):
        assert abs(loss - expected) < 1e-12


class ScaledByTheBatch(nn.Module):
    """A number of the whole batch is made on two devices and used on a third."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4, dtype=torch.float64)
        self.second = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        with wh.replicate(2):
            hidden = self.first(x)
            size = hidden.square().mean().sqrt()
        with wh.replicate(1):
            return self.second(hidden / size).sin().mean()


def gradients_of_scaled() -> dict[str, Tensor]:
    wh.init({"num_micro_batch": 1})
    batch = scaled_batch()
    engine = wh.parallelize(ScaledByTheBatch(), batch, optimizer=torch.optim.SGD)
    engine.step(batch)
    return engine.full_gradients()


def scaled_batch() -> Tensor:
    return torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_a_number_of_the_whole_batch_leaves_a_stage_of_two_devices() -> None:
    """Its gradient came back to one of them, which waited for the other one in the all-reduce of
    its backward (seed 20173: the job hung).
    """
    model = ScaledByTheBatch()
    model(scaled_batch()).backward()
    found, *_ = run_ranks(gradients_of_scaled, 3)
    for name, parameter in model.named_parameters():
        assert (found[name] - parameter.grad).abs().max() < 1e-12, name


class Overwritten(nn.Module):
    """What the first layer gives is written over: its weights get a gradient of zeros."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4, dtype=torch.float64)
        self.second = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden.copy_(x * 2)
        return self.second(hidden).square().mean()


def weights_of_overwritten(num_stages: int) -> dict[str, Tensor]:
    wh.init({"num_task_graph": num_stages} if num_stages > 1 else {"strategy": "data"})
    batch = scaled_batch()
    engine = wh.parallelize(
        Overwritten(), batch, optimizer=lambda pairs: torch.optim.AdamW(pairs, weight_decay=0.1)
    )
    engine.step(batch)
    return engine.full_state_dict()


@pytest.mark.parametrize("num_stages", [1, 2])
def test_what_is_written_over_has_a_gradient_of_zeros(num_stages: int) -> None:
    """AdamW let the weights decay locally, and left them alone in a job (seed 20309)."""
    model = Overwritten()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    model(scaled_batch()).backward()
    optimizer.step()
    found, *_ = run_ranks(weights_of_overwritten, 2, num_stages)
    for name, value in model.state_dict().items():
        assert (found[name] - value).abs().max() < 1e-12, name


class ComplexBesideOdd(nn.Module):
    """An odd number of entries crosses before the real view of a complex value."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Linear(4, 1, dtype=torch.float64)
        self.many = nn.Linear(4, 4, dtype=torch.float64)
        self.last = nn.Linear(8, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        with wh.replicate(1):
            one = self.one(x)
            many = torch.view_as_real(torch.fft.fft(self.many(x))).flatten(1)
        with wh.replicate(1):
            return (self.last(many) * one).square().mean()


def gradients_beside_odd() -> dict[str, Tensor]:
    wh.init({"num_micro_batch": 1})
    batch = scaled_batch()
    engine = wh.parallelize(ComplexBesideOdd(), batch, optimizer=torch.optim.SGD)
    engine.step(batch)
    return engine.full_gradients()


def test_a_real_view_of_a_complex_value_beside_an_odd_one() -> None:
    """Its gradient lay at an odd place of the message, where torch views nothing as complex (seed
    20958: the job stopped).
    """
    model = ComplexBesideOdd()
    model(scaled_batch()).backward()
    found, *_ = run_ranks(gradients_beside_odd, 2)
    for name, parameter in model.named_parameters():
        assert (found[name] - parameter.grad).abs().max() < 1e-12, name
