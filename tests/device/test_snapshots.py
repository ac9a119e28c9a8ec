"""Checkpoints beside training on an accelerator: the copy runs on a stream of its own, and the next
update waits for it there, not the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale as wh
from tests.device import streams
from tests.device.collectives import BACKEND
from tests.device.local_device import use_test_device
from tests.device.memory import forget_peak, used_memory
from tests.device.settings import settings
from tests.device.streams import counters
from tests.ranks import ModelServer, preload

preload("tests.device.test_snapshots")
WIDTH = 8
BATCH_SIZE = 6
KERNEL_S = 0.003
NUM_KERNELS = 20
"""what the device has to do before the copy"""


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    """Forks ranks that have the test device."""
    with ModelServer(use_test_device) as found:
        yield found


def _engine() -> Any:
    torch.manual_seed(1)
    wh.init({"check_replicas": 0, "check_batches": False})
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    return wh.parallelize(
        model.double(),
        _batch(0),
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.05),
        loss=lambda output, batch: (output - batch).square().mean(),
    )


def _batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH_SIZE, WIDTH, generator=generator, dtype=torch.float64)


def _save_between_steps(_: None, folder: str, waits: bool) -> tuple[bool, int, float, float]:
    """Whether the device was done when `save` returned, host waits of `save` and of the steps
    after it, the loss of a later step, and the same of an engine that was loaded.
    """
    engine = _engine()
    device = engine._job.ranks.device
    engine.step(_batch(0))
    engine._training.settle()
    streams.synchronize()
    settings.kernel_s = KERNEL_S
    busy = torch.ones(1, device=device.name)
    for _ in range(NUM_KERNELS):
        busy = busy + 1
    counters.clear()
    handle = engine.save(folder)
    if not waits:
        engine._training.updater._before_update.clear()
    num_waits = sum(counters.host_waits.values())
    is_over = all(device.is_over(moment) for _, moment in _arrivals(handle))
    engine.step(_batch(1))
    settings.kernel_s = 0.0
    loss = engine.step(_batch(2)).loss
    handle.wait()
    streams.synchronize()
    other = _engine()
    other.load(folder)
    other.step(_batch(1))
    return is_over, num_waits, loss, other.step(_batch(2)).loss


def _arrivals(handle: Any) -> Any:
    return handle.before_changes.__self__.arrivals


def test_a_snapshot_is_taken_beside_training(server: ModelServer, tmp_path: Path) -> None:
    """Before, `save` waited until the device had done all its work and all copies."""
    ((is_over, num_waits, loss, loaded),) = server.run(
        _save_between_steps, 1, str(tmp_path), True, backend=BACKEND
    )
    assert num_waits == 0
    assert not is_over
    assert loss == loaded


def test_an_update_that_does_not_wait_for_the_copy_is_a_race(
    server: ModelServer, tmp_path: Path
) -> None:
    """A mutant: the device finds that weights are written while they are copied."""
    with pytest.raises(Exception, match=r"race: .* copy to host"):
        server.run(_save_between_steps, 1, str(tmp_path), False, backend=BACKEND)


LARGE = 64
NUM_LAYERS = 6
LAYER_BYTES = 8 * LARGE * LARGE


def _loading_bytes(_: None, folder: str, offload: dict[str, str] | bool) -> int:
    """Most bytes that the device has more while a checkpoint is loaded."""
    wh.init({"check_replicas": 0, "check_batches": False, "offload": offload})
    layers = [nn.Linear(LARGE, LARGE, bias=False) for _ in range(NUM_LAYERS)]
    sample = torch.randn(BATCH_SIZE, LARGE, dtype=torch.float64)
    engine = wh.parallelize(
        nn.Sequential(*layers).double(),
        sample,
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.05),
        loss=lambda output, batch: (output - batch).square().mean(),
    )
    if not Path(folder).exists():
        engine.step(sample)
        engine.save(folder).wait()
    streams.synchronize()
    forget_peak()
    before = used_memory().now_bytes
    assert engine.load(folder) == 1
    streams.synchronize()
    return used_memory().peak_bytes - before


def test_states_of_the_host_are_loaded_block_by_block(server: ModelServer, tmp_path: Path) -> None:
    """A layer's states on the device at a time; before, all of them."""
    folder = str(tmp_path / "checkpoints")
    server.run(_loading_bytes, 1, folder, False, backend=BACKEND)
    (here,) = server.run(_loading_bytes, 1, folder, False, backend=BACKEND)
    (away,) = server.run(_loading_bytes, 1, folder, {"optimizer": "host"}, backend=BACKEND)
    assert here >= 2 * NUM_LAYERS * LAYER_BYTES, "the measure misses something"
    assert away <= 2 * 2 * LAYER_BYTES, f"{away / LAYER_BYTES:.1f} layers"
