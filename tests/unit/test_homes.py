"""Homes on the host and on disk: what comes back is what went out, in any order and from any mix of
memories; optimizers and autograd do with it what they do without; files that are not what they were
are named.
"""

from __future__ import annotations

import copy
import json
import tempfile
import threading
import weakref
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import whale as wh
from whale.config import RUN_FOLDER_VARIABLE
from whale.devices import LocalDevice
from whale.plans.blocks import slots_of
from whale.runtime import activations as activations_module
from whale.runtime.activations import Activations, BackwardOrder
from whale.runtime.homes import BlockHomes, HomeMaker, HostMemoryError
from whale.runtime.offloaded_states import OffloadedStates, StateBlock
from whale.runtime.residence import Pool, Residence
from whale.runtime.spill import SPILL, SpillError, SpillFolder
from whale.scheduling import Action, Kind

DEVICE = LocalDevice()


def maker_in(folder: Path, what: str = "blocks") -> HomeMaker:
    return HomeMaker(DEVICE, lambda: SpillFolder(folder, 0, 1), what)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_use_finds_what_was_written_last(data: st.DataObject) -> None:
    """Blocks of any mix of memories, read and written in any order, announced or not."""
    number = data.draw(st.integers(1, 6))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=number, max_size=number))
    memories = data.draw(
        st.lists(st.sampled_from(("host", "disk")), min_size=number, max_size=number)
    )
    place = st.integers(0, number - 1)
    uses = data.draw(st.lists(st.tuples(place, st.booleans()), max_size=30))
    announced = data.draw(st.lists(place, max_size=30)) if data.draw(st.booleans()) else None
    with tempfile.TemporaryDirectory() as folder:
        maker = maker_in(Path(folder))
        homes = [maker.home(memory) for memory in memories]  # type: ignore[arg-type]
        pool = Pool(sizes, slots_of(sizes, [0] * number), [torch.float64] * number, "cpu")
        expected = []
        for block, home in enumerate(homes):
            expected.append(torch.full((sizes[block],), float(block), dtype=torch.float64))
            home.begin_store(block, expected[block]).wait()
        residence = Residence(pool, BlockHomes(homes))
        residence.begin([(block,) for block in announced or [use[0] for use in uses]])
        for step, (block, writes) in enumerate(uses):
            residence.need(block)
            assert torch.equal(pool.buffer(block), expected[block])
            if writes:
                pool.buffer(block).add_(step + 1)
                expected[block] = pool.buffer(block).clone()
                residence.changed(block)
        residence.drain()
        for block, home in enumerate(homes):
            assert torch.equal(home.where(block).view(torch.float64), expected[block])


# ---- optimizers


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3)).double()


OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (torch.optim.NAdam, {"lr": 0.01}),
    (torch.optim.RAdam, {"lr": 0.01}),
    (torch.optim.Adamax, {"lr": 0.01}),
    (torch.optim.Adagrad, {"lr": 0.01}),
    (torch.optim.Adadelta, {"lr": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    (torch.optim.Rprop, {"lr": 0.01}),
    (torch.optim.ASGD, {"lr": 0.01}),
    (torch.optim.Adafactor, {"lr": 0.01}),
]


@pytest.mark.parametrize("without", [0, 1], ids=["late", "gap"])
@pytest.mark.parametrize("at_home", [False, True])
@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=str)
def test_optimizers_step_as_ever(
    kind: Any, options: dict[str, Any], at_home: bool, without: int, tmp_path: Path
) -> None:
    """Three steps with states at home, one parameter without a gradient in the first or second;
    then all states, read from home.
    """
    plain = model()
    other = copy.deepcopy(plain)
    usual = kind(plain.parameters(), **options)
    offloaded = kind(other.parameters(), **options)
    maker = maker_in(tmp_path)
    parameters = list(other.parameters())
    blocks = [
        StateBlock(tuple(parameters[:2]), maker.home("host"), at_home),
        StateBlock(tuple(parameters[2:4]), maker.home("disk"), at_home),
    ]
    states = OffloadedStates(offloaded, blocks, DEVICE)
    for step in range(3):
        for each, net in ((usual, plain), (offloaded, other)):
            torch.manual_seed(step)
            each.zero_grad()
            net(torch.randn(5, 6, dtype=torch.float64)).square().mean().backward()
            if step == without:
                next(net.parameters()).grad = None
        usual.step()
        states.step()
        if kind is not torch.optim.ASGD:
            for parameter in parameters[:4]:
                kept = offloaded.state.get(parameter, {}).values()
                large = [each for each in kept if isinstance(each, Tensor) and each.numel() > 1]
                assert not large, "states are not at home"
    states.expand()
    for mine, theirs in zip(parameters, plain.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-12, atol=0)
        for key, value in usual.state[theirs].items():
            assert torch.allclose(
                torch.as_tensor(offloaded.state[mine][key]).double(),
                torch.as_tensor(value).double(),
                rtol=1e-12,
                atol=1e-300,
            ), key


@pytest.mark.parametrize("at_home", [False, True])
def test_states_that_come_late_behind_a_checkpoint(at_home: bool, tmp_path: Path) -> None:
    """Its block has memory for them from before: what is there moves, and is not written over."""
    other = model()
    parameters = list(other.parameters())[:2]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    block = StateBlock(tuple(parameters), maker_in(tmp_path).home("host"), at_home)
    states = OffloadedStates(optimizer, [block], DEVICE)
    first, second = parameters
    first.grad = torch.ones_like(first)
    second.grad = torch.ones_like(second)
    states.step()
    for _ in states.loaded_in_portions():  # of a step before the first one had a gradient
        optimizer.state.clear()
        optimizer.state[second]["momentum_buffer"] = torch.full_like(second, 2.0)
    second.grad = torch.zeros_like(second)
    states.step()
    states.expand()
    assert optimizer.state[second]["momentum_buffer"].tolist() == [1.8] * second.numel()
    assert optimizer.state[first]["momentum_buffer"].tolist() == torch.ones_like(first).tolist()


class Foreign(torch.optim.SGD):
    """An optimizer that nobody knows."""


@pytest.mark.parametrize("why", ["unknown", "hooks"])
def test_optimizers_that_are_not_known_to_be_exact_are_refused(why: str, tmp_path: Path) -> None:
    net = model()
    optimizer = (Foreign if why == "unknown" else torch.optim.SGD)(net.parameters(), lr=0.1)
    if why == "hooks":
        optimizer.register_step_post_hook(lambda *_: None)
    block = StateBlock(tuple(net.parameters()), maker_in(tmp_path).home("host"))
    with pytest.raises(ValueError, match=r"Foreign|hooks") as caught:
        OffloadedStates(optimizer, [block], DEVICE)
    assert "Try:" in str(caught.value)


# ---- activations


class Net(nn.Module):
    """Saves weights, views of one tensor, and the same tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 96)
        self.second = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            a, b, c = self.first(x).chunk(3, -1)
            x = torch.tanh(self.second(a * b + torch.sigmoid(c))) * a
        return x.square().sum()


ACTIONS = [Action(Kind.FORWARD, 0, 0), Action(Kind.FORWARD, 0, 1)] + [
    Action(Kind.BACKWARD, 0, 1),
    Action(Kind.BACKWARD, 0, 0),
]


@pytest.mark.parametrize("segment_bytes", [1, 4096, 1 << 30])
@pytest.mark.parametrize("memory", ["host", "disk"])
def test_gradients_are_those_of_autograd(
    memory: Any, segment_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two micro-batches in flight; twice, so that memory at home is used again."""
    monkeypatch.setattr(activations_module, "SEGMENT_BYTES", segment_bytes)
    torch.manual_seed(0)
    net = Net().double()
    home = maker_in(tmp_path).home(memory)
    activations = Activations({0: home}, DEVICE, net.parameters())
    for step in range(2):
        inputs = [torch.randn(8, 32, dtype=torch.float64) + step for _ in range(2)]
        expected = torch.autograd.grad(sum(map(net, inputs)), list(net.parameters()))
        activations.begin(BackwardOrder.of(ACTIONS), inputs)
        losses = []
        for micro_batch, x in enumerate(inputs):
            with activations.saving((0, micro_batch), ()):
                losses.append(net(x))
        net.zero_grad()
        for micro_batch in (1, 0):
            activations.begin_backward((0, micro_batch))
            losses[micro_batch].backward()
            activations.end_backward((0, micro_batch))
        for parameter, gradient in zip(net.parameters(), expected, strict=True):
            assert parameter.grad is not None
            assert torch.allclose(parameter.grad, gradient, rtol=1e-13, atol=1e-13)
    assert home.num_bytes_moved > 0


def test_what_went_out_is_on_its_way_while_the_rest_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backward right after its forward: the last segments never went out."""
    monkeypatch.setattr(activations_module, "SEGMENT_BYTES", 4096)
    net = Net().double()
    activations = Activations({0: maker_in(tmp_path).home("host")}, DEVICE, net.parameters())
    visit = (0, 0)
    activations.begin(BackwardOrder.of([ACTIONS[0], ACTIONS[3]]), ())
    with activations.saving(visit, ()):
        loss = net(torch.randn(8, 32, dtype=torch.float64))
    segments = activations._segments[visit]
    out = [segment for segment in segments if segment.block is not None]
    assert out and segments[-1] not in out
    activations.begin_backward(visit)
    assert [segment for segment in segments if segment.buffer is not None] == out[-1:]
    loss.backward()
    activations.end_backward(visit)


def test_a_tensor_that_is_written_to_after_it_was_saved_is_refused(tmp_path: Path) -> None:
    """Autograd refuses it, too, which would find it by its version."""
    activations = Activations({0: maker_in(tmp_path).home("host")}, DEVICE, ())
    activations.begin(BackwardOrder.of(ACTIONS), ())
    x = torch.randn(300, requires_grad=True)
    with (
        pytest.raises(RuntimeError, match="written to after it was saved") as caught,
        activations.saving((0, 0), ()),
    ):
        y = x * 2
        y.square()
        y.add_(1)
    advice = str(caught.value).partition("Try: ")[2]
    wh.Config(json.loads(f"{{{advice}}}"))  # what it says to try is taken


# ---- files


@pytest.mark.parametrize("what", ["gradients", "optimizer"])
def test_a_disk_without_a_folder_is_refused_before_the_first_step(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, gradients were refused in the first backward, on accelerators by a thread of torch."""
    monkeypatch.delenv(RUN_FOLDER_VARIABLE, raising=False)
    wh.init({"offload": {"weights": "host", "optimizer": "host", what: "disk"}})
    with pytest.raises(ValueError, match="needs a folder for its files"):
        wh.parallelize(
            nn.Linear(3, 3),
            torch.ones(4, 3),
            optimizer=torch.optim.AdamW,
            loss=lambda output, batch: output.mean(),
        )


def test_files_of_an_earlier_run_are_removed_unread(tmp_path: Path) -> None:
    for rank in range(3):
        left = tmp_path / SPILL / f"rank-{rank}"
        left.mkdir(parents=True)
        (left / "states-0.spill").write_bytes(b"old")
    folder = SpillFolder(tmp_path, 0, 2)
    assert sorted(path.name for path in (tmp_path / SPILL).iterdir()) == ["rank-0", "rank-1"]
    assert not list(folder.path.iterdir())
    assert not folder.map("states-0", 8).any()
    other = SpillFolder(tmp_path, 1, 2)
    folder.close()
    other.close()
    assert not (tmp_path / SPILL).exists()


def test_an_old_engine_does_not_remove_the_files_of_the_new_one(tmp_path: Path) -> None:
    """In a notebook the engine of a cell that is run again is let go after the new one is made."""
    old = SpillFolder(tmp_path, 0, 1)
    old.map("states-0", 8)
    new = SpillFolder(tmp_path, 0, 1)
    new.map("states-0", 8)
    old.close()
    new.check("states-0", 8)
    new.close()
    assert not (tmp_path / SPILL).exists()


@pytest.mark.parametrize("damage", ["torn", "gone"])
@pytest.mark.parametrize("way", ["fetch", "store"])
def test_a_file_that_is_not_what_it_was_is_named(damage: str, way: str, tmp_path: Path) -> None:
    home = maker_in(tmp_path, "states").home("disk")
    buffer = torch.arange(5000.0)
    home.begin_store(3, buffer).wait()
    (path,) = tmp_path.glob("**/*.spill")
    if damage == "torn":
        with path.open("r+b") as file:
            file.truncate(100)
    else:
        path.unlink()
    with pytest.raises(SpillError) as caught:
        (home.begin_fetch if way == "fetch" else home.begin_store)(3, buffer).wait()
    assert str(path) in str(caught.value) and "rank 0" in str(caught.value)
    assert "checkpoint" in str(caught.value)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(SpillError, match=r"rank 2.*cannot write.*Try:"):
        SpillFolder(tmp_path / "file", 2, 4)


def test_a_full_disk_is_named_with_its_numbers(small_disk: Path) -> None:
    home = maker_in(small_disk, "states").home("disk")
    home.begin_store(0, torch.ones(2048)).wait()
    with pytest.raises(SpillError, match=r"rank 0 cannot write .*states-1\.spill.*full.*Try:"):
        home.begin_store(1, torch.ones(32768))
    buffer = torch.zeros(2048)
    home.begin_fetch(0, buffer).wait()
    assert bool((buffer == 1).all()), "what was there before is damaged"


def test_host_memory_that_is_not_there_is_named_with_its_numbers(tmp_path: Path) -> None:
    """A petabyte: more than a process can address."""
    home = maker_in(tmp_path, "states").home("host")
    home.begin_store(0, torch.ones(2048)).wait()
    with pytest.raises(HostMemoryError, match=r"offload. of states cannot get 1\.13 PB.*Try:"):
        home.place(1, 1 << 50)
    buffer = torch.zeros(2048)
    home.begin_fetch(0, buffer).wait()
    assert bool((buffer == 1).all()), "what was there before is damaged"


class HoldingThread:
    """A thread that holds what it was called with for ever: it does not run again."""

    def __init__(self) -> None:
        self.held: list[Any] = []

    def submit(self, call: Any, *args: Any) -> Future[Any]:
        self.held.append(args)
        done: Future[Any] = Future()
        done.set_result(call(*args))
        return done


def test_what_was_copied_is_freed_by_those_who_wait_for_it(tmp_path: Path) -> None:
    """Else the states of a block stay until the thread that copied them runs again."""
    home = maker_in(tmp_path).home("disk")
    home._thread = HoldingThread()  # type: ignore[attr-defined]
    piece = torch.ones(32, dtype=torch.uint8)
    gone = weakref.ref(piece)
    home.begin_store_pieces(0, [(0, piece)], 32).wait()
    del piece
    assert gone() is None
    assert home.where(0).tolist() == [1] * 32


def test_a_closed_home_leaves_no_thread_behind(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    maker = maker_in(tmp_path, "closed")
    maker.home("disk").begin_store(0, torch.ones(4)).wait()
    assert set(threading.enumerate()) - before
    maker.close()
    assert not set(threading.enumerate()) - before
