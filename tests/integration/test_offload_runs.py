"""Offload through runs: checkpoints between placements, ends that are clear, files that never stay,
and memory that is really free.
"""

from __future__ import annotations

import gc
import os
import signal
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale as wh
from tests.exactness import mean_square
from tests.ranks import RankError, run_ranks
from whale.runtime.engine import Engine

WIDTH = 256
NUM_LAYERS = 8
NUM_SAMPLES = 12
LAYER_BYTES = 8 * (WIDTH * WIDTH + WIDTH)
MODEL_BYTES = NUM_LAYERS * LAYER_BYTES
SMALL_BYTES = 1_000_000
"""objects of Python while a checkpoint is loaded: its index, and modules imported meanwhile"""


def build() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(NUM_LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers).double()


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(NUM_SAMPLES, WIDTH, generator=generator, dtype=torch.float64)


def adamw(pairs: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(pairs, lr=0.01)


def engine_of(settings: dict[str, Any]) -> Engine:
    wh.init({"strategy": "data", "check_replicas": 0, **settings})
    return wh.parallelize(build(), batch(0), optimizer=adamw, loss=mean_square)


# ---- checkpoints


def leg(settings: dict[str, Any], checkpoints: Path, num_steps: int) -> dict[str, Tensor]:
    """Continues for some steps and saves; the model on rank 0."""
    engine = engine_of(settings)
    engine.load(checkpoints)
    for _ in range(num_steps):
        engine.step(batch(engine.step_count))
    engine.save(checkpoints).wait()
    state = engine.full_state_dict()
    engine.close()
    return state


DISK = {"optimizer": "disk", "weights": "disk"}
LEGS = [
    (2, {"offload": {"optimizer": "disk"}}),
    (1, {}),
    (3, {"offload": {"optimizer": "host", "weights": "host"}, "zero": 3}),
    (2, {"zero": 1}),
    (1, {"offload": DISK}),
]


def test_checkpoints_go_between_placements(tmp_path: Path) -> None:
    """Saved offloaded, resumed on another number of ranks without, and the reverse."""
    state: dict[str, Tensor] = {}
    for number, (num_ranks, settings) in enumerate(LEGS):
        settings = {**settings, "run_folder": str(tmp_path / f"run{number}")}
        state = run_ranks(leg, num_ranks, settings, tmp_path / "checkpoints", 1)[0]
    _check_against_local(state, len(LEGS))


def _check_against_local(state: dict[str, Tensor], num_steps: int) -> None:
    """Weights after so many steps are those of local training."""
    model = build()
    optimizer = adamw(model.parameters())
    for step in range(num_steps):
        optimizer.zero_grad()
        mean_square(model(batch(step)), batch(step)).backward()
        optimizer.step()
    for name, tensor in model.state_dict().items():
        assert torch.allclose(state[name], tensor, rtol=1e-10, atol=1e-12), name


def loading_bytes(settings: dict[str, Any], checkpoints: Path) -> int:
    """Most bytes that loading takes beside what the job has."""
    engine = engine_of(settings)
    engine.step(batch(0))
    engine.load(checkpoints)  # imports what loading needs
    found = []
    for _ in range(3):
        gc.collect()
        tracemalloc.start()  # knows the arrays of numpy, into which files are read
        assert engine.load(checkpoints) == 1
        found.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    most = min(found)  # other threads, and what waits for the collector, are counted in some
    engine.close()
    return most


def test_loading_takes_no_more_than_a_block_of_what_lives_on_disk(tmp_path: Path) -> None:
    settings = {"offload": DISK, "run_folder": str(tmp_path)}
    checkpoints = tmp_path / "checkpoints"
    run_ranks(leg, 1, settings, checkpoints, 1)
    here = run_ranks(loading_bytes, 1, {"run_folder": str(tmp_path)}, checkpoints)[0]
    away = run_ranks(loading_bytes, 1, settings, checkpoints)[0]
    assert here >= 3 * MODEL_BYTES, "the measure misses something"
    assert away <= 2 * LAYER_BYTES + SMALL_BYTES, f"{away / LAYER_BYTES:.2f} layers"


# ---- faults


def disturbed(settings: dict[str, Any], fault: str) -> int:
    """Two steps; the first rank does something to its files, or to itself, after the first."""
    engine = engine_of(settings)
    engine.step(batch(0))
    own = Path(settings["run_folder"]) / "spill" / "rank-0"
    if engine.ranks.rank == 0 and fault != "nothing":
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        for path in own.glob("*.spill"):
            if fault == "torn":
                os.truncate(path, 8)
            else:
                path.unlink()
    engine.step(batch(1))
    num_files = len(list(own.glob("*.spill")))
    engine.close()
    return num_files


@pytest.mark.parametrize("fault", ["torn", pytest.param("gone", marks=pytest.mark.slow)])
def test_damaged_files_end_the_job_with_their_names(fault: str, tmp_path: Path) -> None:
    settings = {"offload": {"optimizer": "disk"}, "run_folder": str(tmp_path)}
    with pytest.raises(RankError) as caught:
        run_ranks(disturbed, 2, settings, fault)
    assert "SpillError: rank 0" in str(caught.value)
    assert str(tmp_path / "spill" / "rank-0" / "states-") in str(caught.value)


def test_what_a_killed_rank_left_is_gone_after_the_next_run(tmp_path: Path) -> None:
    settings = {"offload": {"optimizer": "disk"}, "run_folder": str(tmp_path)}
    with pytest.raises(RankError):
        run_ranks(disturbed, 2, settings, "kill")
    assert list(tmp_path.glob("spill/rank-0/*.spill")), "the test shows nothing"
    # a run that offloads nothing removes them, too
    run_ranks(disturbed, 1, {"run_folder": str(tmp_path)}, "nothing")
    assert not list(tmp_path.glob("spill/rank-0/*")) and not list(tmp_path.glob("spill/rank-1"))
    assert run_ranks(disturbed, 2, settings, "nothing")[0] > 0
    assert not (tmp_path / "spill").exists()


@pytest.mark.slow
def test_a_full_disk_in_the_middle_of_a_step_loses_no_more_than_that_step(
    tmp_path: Path, small_disk: Path
) -> None:
    """98 KB of activations of a micro-batch go to a disk of 64 KB when its forward is over."""
    checkpoints = tmp_path / "checkpoints"
    plain = {"run_folder": str(small_disk), "num_micro_batch": 2, "schedule": "gpipe"}
    run_ranks(leg, 2, plain, checkpoints, 1)
    with pytest.raises(RankError) as caught:
        run_ranks(leg, 2, {**plain, "offload": {"activations": "disk"}}, checkpoints, 1)
    assert "SpillError: rank" in str(caught.value) and "the disk is full" in str(caught.value)
    state = run_ranks(leg, 2, plain, checkpoints, 1)[0]
    _check_against_local(state, 2)
    assert not list(small_disk.glob("spill/*/*")), "files are left behind"


def test_a_folder_that_cannot_be_written_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    settings = {"offload": {"optimizer": "disk"}, "run_folder": str(tmp_path / "file" / "run")}
    with pytest.raises(RankError, match="cannot write"):
        run_ranks(disturbed, 2, settings, "nothing")


# ---- memory


def peak_bytes(settings: dict[str, Any]) -> int:
    """Most bytes of tensors during a step, those that stay between steps included."""
    engine = engine_of(settings)
    for step in range(2):
        engine.step(batch(step))
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        engine.step(batch(2))
    grown = largest = 0
    events = [event for event in profile.events() if event.name == "[memory]"]
    for event in sorted(events, key=lambda event: event.time_range.start):
        grown += event.self_cpu_memory_usage
        largest = max(largest, grown)
    optimizer = engine.optimizer
    assert optimizer is not None
    own = [*engine._job.weights.values()]
    own += [each.grad for _, each in engine.named_parameters() if each.grad is not None]
    for state in optimizer.state.values():
        own += [each for each in state.values() if isinstance(each, Tensor)]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in own}
    offloaded = engine._training.updater.offloaded
    pool = offloaded.pool_bytes if offloaded is not None else 0
    engine.close()
    return largest + sum(storages.values()) + pool


def test_states_on_disk_free_the_memory_that_they_took(tmp_path: Path) -> None:
    """All states but two blocks: one in its update, one on its way."""
    disk = {"offload": {"optimizer": "disk"}, "run_folder": str(tmp_path)}
    here = run_ranks(peak_bytes, 1, {"zero": 0})[0]
    away = run_ranks(peak_bytes, 1, disk)[0]
    saved = 2 * MODEL_BYTES - 2 * 2 * LAYER_BYTES
    assert here >= 4 * MODEL_BYTES, "the measure misses something"
    assert saved * 0.95 <= here - away, f"{here - away} of {saved} bytes"
