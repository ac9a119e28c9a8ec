"""Sums of batch norms over devices, beside the all-reduces of gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale as wh
from tests.device.collectives import BACKEND, TestGroup
from tests.device.local_device import use_test_device
from tests.ranks import ModelServer, preload

preload("tests.device.test_batch_norms")
WIDTH = 4
PATIENCE_S = 10.0
"""for a sum that nothing holds up"""
ONE_BUCKET_EACH = 1
"""byte of a bucket: none has room for a second parameter"""


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    """Forks ranks that have the test device."""
    with ModelServer(use_test_device) as found:
        yield found


class HeldAllReduce:
    """Lets the first all-reduce of a bucket begin when a sum that was launched after it is over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_passed: list[bool] = []
        """whether that sum did not wait for the bucket"""
        self._gate = threading.Event()
        self._is_launched = False
        self._launch = TestGroup._launch
        monkeypatch.setattr(TestGroup, "_launch", self._held_launch())

    def _held_launch(self) -> Callable[..., Any]:
        def held_launch(group: TestGroup, what: str, *rest: Any) -> Any:
            *tensors, run, is_async = rest
            if is_async and not self._is_launched:
                self._is_launched = True
                return self._launch(group, what, *tensors, lambda: self._wait_and(run), is_async)
            if not is_async and self._is_launched:
                return self._launch(group, what, *tensors, lambda: self._pass_after(run), is_async)
            return self._launch(group, what, *rest)

        return held_launch

    def _wait_and(self, run: Callable[[], object]) -> None:
        self.is_passed.append(self._gate.wait(PATIENCE_S))
        run()

    def _pass_after(self, run: Callable[[], object]) -> None:
        run()
        self._gate.set()


def _is_passed(_: None) -> list[bool]:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)]
    wh.init({"bucket_bytes": ONE_BUCKET_EACH, "check_replicas": 0, "check_batches": False})
    batch = torch.randn(8, WIDTH)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    engine = wh.parallelize(nn.Sequential(*layers), batch, optimizer=torch.optim.AdamW, loss=loss)
    assert [engine.plan.ranks_of_stage(stage.index) for stage in engine.plan.stages] == [(0, 1)]
    with pytest.MonkeyPatch.context() as monkeypatch:
        held = HeldAllReduce(monkeypatch)
        assert engine.step(batch).loss > 0
    return held.is_passed


def test_sums_of_batch_norms_do_not_wait_for_gradients(server: ModelServer) -> None:
    """Before, both had one communicator, which runs one after the other: the backward of a batch
    norm waited for all buckets that were under way.
    """
    for is_passed in server.run(_is_passed, 2, backend=BACKEND):
        assert is_passed == [True]
