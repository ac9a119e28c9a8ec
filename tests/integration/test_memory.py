"""Weights once: no rank allocates what its plan does not give it, and a builder gives the same
weights on any number of ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import whale as wh
from tests.ranks import ModelServer, preload
from whale import api, scheduling
from whale.capture.batch import read_batch
from whale.capture.prepare import CapturedModel

pytestmark = pytest.mark.usefixtures("fresh_session")

preload("tests.integration.test_memory")

WIDTH = 8
NUM_LAYERS = 4
BATCH_SIZE = 12
MIB = 2**20


class Net(nn.Module):
    """Layers in a chain; `width` makes each weight as large as a test wants."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(NUM_LAYERS))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.norm(x).square().mean()


def make_batch(width: int = WIDTH, seed: int = 0) -> Tensor:
    return torch.randn(BATCH_SIZE, width, generator=torch.Generator().manual_seed(seed))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def cut(model: nn.Module, num_stages: int) -> nn.Module:
    """The layers in order over the stages; the first stages get the rest."""
    globs: list[list[str]] = [[] for _ in range(num_stages)]
    for layer in range(NUM_LAYERS):
        globs[layer * num_stages // NUM_LAYERS].append(f"layers.{layer}")
    return wh.annotate(model, {"|".join(glob): wh.replicate(1) for glob in globs})


def prepare_net() -> CapturedModel:
    """Runs once in the server: one capture serves every engine of every rank."""
    layout, tensors = read_batch(make_batch())
    return api._prepare(Net(), layout, tensors, None, wh.Config(), "cpu", check=True)


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer(prepare_net) as started:
        yield started


# ---- allocations while a job is set up
# --------------------------------------------------------------------------------


@dataclass
class Allocated:
    """Bytes of the CPU allocator, counted from the start of the block."""

    peak: int = 0
    at_end: int = 0


@contextmanager
def allocated() -> Iterator[Allocated]:
    """Every allocation and release of a tensor inside the block, as torch's allocator itself
    reports them.
    """
    found = Allocated()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        yield found
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None
    events = [
        event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    live = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        found.peak = max(found.peak, live)
    found.at_end = live


LARGE_WIDTH = 512  # a weight of 1 MiB
SLACK = MIB // 8  # the plan on its way to the ranks, the batch, biases


def build_large() -> nn.Module:
    return cut(Net(LARGE_WIDTH), 2)


class Drawn(nn.Module):
    """A layer that fills its weight when it is built, as much code does: that tensor must
    not stay.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(LARGE_WIDTH, LARGE_WIDTH) * 0.02)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def build_drawn() -> nn.Module:
    model = Net(1)
    model.layers = nn.ModuleList(Drawn() for _ in range(NUM_LAYERS))
    model.norm = nn.Identity()
    return cut(model, 2)


def build_large_table() -> nn.Module:
    """An embedding and its tied head at both ends."""

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(2048, 128)
            self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(NUM_LAYERS))
            self.head = nn.Linear(128, 2048, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, words: Tensor) -> Tensor:
            x = self.embedding(words)
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), words.flatten())

    return cut(Language(), 2)


LARGE: dict[str, Callable[[], nn.Module]] = {
    "plain": build_large,
    "drawn": build_drawn,
    "tied": build_large_table,
}


def set_up(prepared: CapturedModel, name: str) -> tuple[Allocated, int, int]:
    """(what was allocated, bytes of this rank's parameters, bytes of the largest tensor)."""
    wh.init()
    build = LARGE[name]
    batch = torch.randint(0, 2048, (4, 3)) if name == "tied" else make_batch(LARGE_WIDTH)
    with allocated() as found:
        engine = wh.parallelize(build, batch, optimizer=sgd)
    sizes = [
        parameter.numel() * parameter.element_size() for _, parameter in engine.named_parameters()
    ]
    return found, sum(sizes), max(sizes)


def test_the_measure_sees_what_is_allocated() -> None:
    with allocated() as found:
        kept = torch.empty(MIB, dtype=torch.uint8)
        torch.empty(2 * MIB, dtype=torch.uint8)
    assert (found.peak, found.at_end) == (3 * MIB, MIB)
    del kept


@pytest.mark.parametrize("name", ["plain", "drawn"])
def test_a_builder_never_allocates_more_than_this_ranks_parameters_and_one_tensor(
    server: ModelServer, name: str
) -> None:
    for found, own, largest in server.run(set_up, 2, name):
        assert 2 * MIB <= own < 3 * MIB and largest == MIB, "each rank holds two of the four layers"
        assert own <= found.peak <= own + largest + SLACK
        assert found.at_end <= own + SLACK


def test_tied_weights_are_allocated_once_for_each_holder(server: ModelServer) -> None:
    """The tied table lies on both ranks, and so does the buffer in which its gradient is summed."""
    for found, own, largest in server.run(set_up, 2, "tied"):
        assert largest == MIB
        bucket = largest
        assert found.peak <= own + bucket + largest + SLACK
        assert found.at_end <= own + bucket + SLACK


def test_wh_plan_of_a_builder_allocates_no_weight() -> None:
    with allocated() as found:
        wh.plan(build_large, make_batch(LARGE_WIDTH), cluster=2)
    assert found.peak < SLACK, "a plan needs shapes, not weights"


def keep_own_part(prepared: CapturedModel) -> tuple[set[str], set[str], set[str]]:
    """(names of this rank's parameters, parameters of the user's module that are real, those on
    meta).
    """
    wh.init()
    model = cut(Net(), 2)
    engine = wh.parallelize(model, make_batch(), optimizer=sgd, prepared=prepared)
    real = {name for name, parameter in model.named_parameters() if not parameter.is_meta}
    held = dict(engine.named_parameters())
    assert all(dict(model.named_parameters())[name] is held[name] for name in real), (
        "the module and the engine have the same tensors"
    )
    return (
        set(held),
        real,
        {name for name, parameter in model.named_parameters() if parameter.is_meta},
    )


def test_what_a_rank_does_not_hold_is_freed_in_the_users_module(server: ModelServer) -> None:
    (held, real, freed), (other_held, other_real, other_freed) = server.run(keep_own_part, 2)
    everything = {name for name, _ in Net().named_parameters()}
    assert held == real == other_freed and other_held == other_real == freed
    assert held == {"layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"}
    assert held | other_held == everything


# ---- micro-batches in flight
# ------------------------------------------------------------------------------------------

Flight = tuple[dict[int, int], tuple[int, ...], dict[int, float]]
"""engine.peak_in_flight, the proof's, and the peak measured in tensors that autograd keeps, in
micro-batches
"""


class Kept:
    """A tensor that autograd saves for backward."""

    alive = peak = made = 0

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        Kept.alive = Kept.alive + 1
        Kept.made = Kept.made + 1
        Kept.peak = max(Kept.peak, Kept.alive)
        weakref.finalize(self, Kept.gone)

    @staticmethod
    def gone() -> None:
        Kept.alive -= 1


def fly(prepared: CapturedModel, cases: list[tuple[int, int, str]]) -> list[Flight]:
    """One step for each (stages, micro-batches, schedule)."""
    flights = []
    for num_stages, num_micro_batch, schedule in cases:
        wh.init({"num_micro_batch": num_micro_batch, "schedule": schedule})
        engine = wh.parallelize(
            cut(Net(), num_stages), make_batch(), optimizer=sgd, prepared=prepared
        )
        Kept.alive = Kept.peak = Kept.made = 0
        with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
            engine.step(make_batch())
        (stage,) = engine.peak_in_flight
        proof = scheduling.check(engine.plan.schedule)
        flights.append(
            (
                engine.peak_in_flight,
                proof.peak_in_flight,
                {stage: Kept.peak / (Kept.made / num_micro_batch)},
            )
        )
    return flights


@pytest.mark.parametrize(("num_ranks", "stages"), [(4, (2, 4)), (3, (3,))])
def test_as_many_micro_batches_are_in_flight_as_the_schedule_says(
    server: ModelServer, num_ranks: int, stages: tuple[int, ...]
) -> None:
    """1F1B saves min(stages to the end, M) on each stage, GPipe all M: counted by the engine,
    proved before, and seen by autograd.
    """
    cases = [
        (num_stages, m, schedule)
        for num_stages in stages
        for m in (2, 6)
        for schedule in ("1f1b", "gpipe")
    ]
    for rank, flights in enumerate(server.run(fly, num_ranks, cases)):
        for (num_stages, num_micro_batch, schedule), (counted, proved, seen) in zip(
            cases, flights, strict=True
        ):
            stage = rank % num_stages
            expected = (
                num_micro_batch if schedule == "gpipe" else min(num_stages - stage, num_micro_batch)
            )
            assert counted == {stage: expected} == {stage: proved[stage]}
            assert seen == {stage: expected}, (
                f"autograd keeps tensors of {seen[stage]} micro-batches on stage {stage} of "
                f"{num_stages}"
            )


# ---- weights made by Whale
# --------------------------------------------------------------------------------------------


def built_state(prepared: CapturedModel, name: str, num_stages: int) -> dict[str, Tensor]:
    """The state that a builder gives before any training."""
    wh.init({"seed": 3})
    build, batch = BUILDERS[name]

    def marked() -> nn.Module:
        model = build()
        return wh.annotate(model, stage_globs(name, num_stages)) if num_stages > 1 else model

    engine = wh.parallelize(marked, batch(), optimizer=sgd, prepared=prepared)
    return engine.full_state_dict()


def stage_globs(name: str, num_stages: int) -> dict[str, Any]:
    prefix = "layers" if name == "net" else "transformer.h"
    ends = [layer * num_stages // NUM_LAYERS for layer in range(NUM_LAYERS)]
    groups = [
        "|".join(f"{prefix}.{layer}" for layer in range(NUM_LAYERS) if ends[layer] == stage)
        for stage in range(num_stages)
    ]
    return {group: wh.replicate(1) for group in groups}


def small_gpt2() -> nn.Module:
    import transformers

    sizes = {"n_embd": 16, "n_layer": NUM_LAYERS, "n_head": 2, "vocab_size": 50, "n_positions": 16}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)
    )


def words() -> dict[str, Tensor]:
    made = torch.randint(3, 50, (8, 6), generator=torch.Generator().manual_seed(0))
    return {"input_ids": made, "labels": made.clone()}


BUILDERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "net": (Net, make_batch),
    "gpt2": (small_gpt2, words),
}


def prepare_builder(name: str) -> CapturedModel:
    build, batch = BUILDERS[name]
    layout, tensors = read_batch(batch())
    return api._prepare(api.build_on_meta(build), layout, tensors, None, wh.Config(), "cpu")


@pytest.mark.parametrize("name", ["net", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_a_builder_gives_the_same_weights_on_any_number_of_ranks(name: str) -> None:
    """Equal to the bit on 1 rank, 2 stages, 4 stages and 2 stages twice; and they are those of no
    other seed.
    """
    model = BUILDERS[name][0]()
    with ModelServer(prepare_builder, name) as server:
        one = server.run_local(built_state, name, 1)
        others = [
            server.run(built_state, ranks, name, stages)[0]
            for ranks, stages in ((2, 2), (4, 4), (4, 2))
        ]
    assert set(one) == set(model.state_dict())
    for other in others:
        assert set(other) == set(one)
        for key, tensor in one.items():
            assert torch.equal(other[key], tensor), f"{key} depends on the number of ranks"
    model.load_state_dict(one, strict=True)
    weights = [tensor for key, tensor in one.items() if tensor.ndim == 2]
    same_shape = [
        (a, b)
        for place, a in enumerate(weights)
        for b in weights[place + 1 :]
        if a.shape == b.shape
    ]
    tied = 1 if name == "gpt2" else 0  # the embedding is the head
    assert sum(torch.equal(a, b) for a, b in same_shape) == tied, (
        "two modules got the same random numbers"
    )


def test_initial_weights_have_the_scale_of_local_construction() -> None:
    """Other numbers than local construction, from the same distribution."""
    torch.manual_seed(0)
    local = Net(256)
    made = wh.parallelize(lambda: Net(256), make_batch(256), optimizer=sgd).full_state_dict()
    for name, tensor in local.state_dict().items():
        assert made[name].std().item() == pytest.approx(tensor.std().item(), rel=0.15, abs=1e-7)
        assert made[name].mean().item() == pytest.approx(tensor.mean().item(), abs=0.02)


def test_the_seed_changes_the_weights() -> None:
    states = []
    for seed in (0, 0, 1):
        wh.init({"seed": seed})
        states.append(wh.parallelize(Net, make_batch(), optimizer=sgd).full_state_dict())
    assert torch.equal(states[0]["layers.0.weight"], states[1]["layers.0.weight"])
    assert not torch.equal(states[0]["layers.0.weight"], states[2]["layers.0.weight"])


class Scaled(nn.Module):
    """A parameter of its own, and nothing that says how it starts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale)


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def test_a_module_without_reset_parameters_is_named() -> None:
    with pytest.raises(ValueError) as caught:
        wh.parallelize(Wrapped, make_batch(), optimizer=sgd)
    message = str(caught.value)
    assert (
        "'body' (Scaled)" in message
        and "reset_parameters" in message
        and "init=lambda module, name:" in message
    )


def test_init_sets_what_the_default_cannot() -> None:
    """`init=` is called once for each module that holds tensors, with its name, and its values are
    what training starts from.
    """
    called: dict[str, type[nn.Module]] = {}

    def init(module: nn.Module, name: str) -> None:
        called[name] = type(module)
        if isinstance(module, Scaled):
            nn.init.constant_(module.scale, 2.0)
        else:
            module.reset_parameters()  # type: ignore[operator]

    state = wh.parallelize(Wrapped, make_batch(), optimizer=sgd, init=init).full_state_dict()
    assert torch.equal(state["body.scale"], torch.full((WIDTH,), 2.0))
    layers = {f"body.inner.layers.{layer}": nn.Linear for layer in range(NUM_LAYERS)}
    assert called == {"body": Scaled, "body.inner.norm": nn.LayerNorm, **layers}


def test_an_init_that_leaves_a_tensor_unset_is_refused() -> None:
    def init(module: nn.Module, name: str) -> None:
        if not isinstance(module, Scaled):
            module.reset_parameters()  # type: ignore[operator]

    with pytest.raises(ValueError, match=r"'body\.scale' was left without a value.*Scaled"):
        wh.parallelize(Wrapped, make_batch(), optimizer=sgd, init=init)
