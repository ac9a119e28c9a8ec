"""Real memory under ZeRO-3 on CPU ranks, by torch's allocator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import whale as wh
from tests.exactness import mean_square
from tests.ranks import run_ranks

WIDTH = 192
NUM_LAYERS = 12
NUM_SAMPLES = 8
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
MODEL_BYTES = NUM_LAYERS * LAYER_BYTES
SLACK = 0.05
"""of the model: small tensors of torch and Whale"""


def build() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(NUM_LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers)


def sgd(pairs: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(pairs, lr=0.1)


def peak_bytes(level: int) -> int:
    """Most bytes of tensors during a step, with weights and gradients, on this rank."""
    wh.init({"zero": level, "check_replicas": 0})
    sample = torch.randn(NUM_SAMPLES, WIDTH)
    engine = wh.parallelize(build(), sample, optimizer=sgd, loss=mean_square)
    engine.step(sample)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        engine.step(sample)
    grown = largest = 0
    events = [event for event in profile.events() if event.name == "[memory]"]
    for event in sorted(events, key=lambda event: event.time_range.start):
        grown += event.self_cpu_memory_usage
        largest = max(largest, grown)
    return largest + _resident_bytes(engine)


def _resident_bytes(engine: Any) -> int:
    """Weights, gradients and pool that are there between steps."""
    zero = engine._job.zero
    tensors: dict[int, int] = {}

    def count(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        tensors[storage.data_ptr()] = storage.nbytes()

    for tensor in engine._job.weights.values():
        count(tensor)
    for held in engine._training.held:
        if held.tensor.grad is not None:
            count(held.tensor.grad)
    if zero is not None:
        for tensor in zero.computing.values():
            count(tensor)
    return sum(tensors.values())


def test_four_ranks_hold_a_quarter_and_two_layers() -> None:
    """Weights and gradients: a quarter of each, two layers of weights (one in use, one on its way),
    two of gradients (the same), and activations.
    """
    activations = 2 * NUM_LAYERS * NUM_SAMPLES * WIDTH * 4
    allowed = 2 * MODEL_BYTES / 4 + 4 * LAYER_BYTES + activations + SLACK * MODEL_BYTES
    measured = run_ranks(peak_bytes, 4, 3)
    assert max(measured) <= allowed, f"{max(measured)} of {allowed:.0f}"
    assert min(run_ranks(peak_bytes, 4, 0)) >= 2 * MODEL_BYTES, "the measure misses something"
