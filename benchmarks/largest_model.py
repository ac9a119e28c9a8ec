"""The largest GPT (width 2048, layers counted) that trains with AdamW on one RTX-3090, one V100-16GB
and one RTX 2080 Ti: 24 + 16 + 11 GB, data parallel with ZeRO-3.

Parts by free memory against even parts, the rule of FSDP2: every rank holds a third and runs a
third of the samples, so the smallest device decides; that is the same as three of the smallest.
Both by the same accounting: the planner refuses what does not fit. No offload. Nothing is trained
here: a plan needs no weights.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # `python benchmarks/largest_model.py` finds its neighbours, too

import whale as wh
from benchmarks.gpt_layer import Layer
from benchmarks.side_by_side import Claim, report
from whale.cluster.cluster import (
    ETHERNET_50G,
    PCIE_3_X16,
    Cluster,
    Device,
    HostMemory,
    device_kind,
)
from whale.cluster.kinds import GIGA, TERA, DeviceKind
from whale.plans.shares import DoesNotFit

RTX_2080_TI = DeviceKind(
    "RTX-2080Ti", 13.4 * TERA, 11 * GIGA, 616 * GIGA, fp16_flop_per_s=53.8 * TERA
)
"""NVIDIA Turing white paper: TFLOPS in float32 and in float16 with sums in float32"""
KINDS = (device_kind("RTX-3090"), device_kind("V100-16GB"), RTX_2080_TI)
WIDTH = 2048
NUM_HEADS = 16
NUM_WORDS = 50_304
LENGTH = 1024
SAMPLES = 6
TARGET = 1.3


class Gpt(nn.Module):
    """Words in, the loss of the next word out; the embedding is tied."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer(WIDTH, NUM_HEADS) for _ in range(num_layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, NUM_WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(LENGTH, device=ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, NUM_WORDS), labels.view(-1))


def cluster(kinds: tuple[DeviceKind, ...]) -> Cluster:
    devices = tuple(Device(rank, "host", rank, kind) for rank, kind in enumerate(kinds))
    return Cluster(devices, PCIE_3_X16, ETHERNET_50G)


HOST = HostMemory(256 * GIGA, 60 * GIGA, 12 * GIGA, 36 * GIGA)
"""of the one host of the three: PCIe 3, a link for each"""


def plan(
    num_layers: int, kinds: tuple[DeviceKind, ...], offload: dict[str, str] | None = None
) -> wh.Plan | None:
    """None where it does not fit."""
    with torch.device("meta"):
        model = Gpt(num_layers)
    ids = torch.zeros(SAMPLES, LENGTH, dtype=torch.long, device="meta")
    config: dict[str, Any] = {"zero": 3, "offload": offload or False}
    devices = cluster(kinds).with_memories(HOST)
    try:
        return wh.plan(model, {"ids": ids, "labels": ids}, cluster=devices, config=config)
    except DoesNotFit:
        return None


def largest(
    kinds: tuple[DeviceKind, ...], low: int, high: int, offload: dict[str, str] | None = None
) -> tuple[int, wh.Plan]:
    """(most layers that fit, their plan); `low` fits, `high` does not."""
    best = plan(low, kinds, offload)
    assert best is not None, f"{low} layers should fit"
    while high - low > 1:
        middle = (low + high) // 2
        made = plan(middle, kinds, offload)
        if made is None:
            high = middle
        else:
            low, best = middle, made
    return low, best


def num_parameters(num_layers: int) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Gpt(num_layers).parameters())


def main() -> None:
    start = time.perf_counter()
    memory = [kind.memory_bytes for kind in KINDS]
    most = math.ceil(sum(memory) / (16 * 12 * WIDTH**2))
    smallest = KINDS[memory.index(min(memory))]
    even, _ = largest((smallest,) * len(KINDS), 1, most)
    ours, made = largest(KINDS, even, most)
    with_host, _ = largest(KINDS, ours, 2 * ours, {"optimizer": "host"})
    ratio = num_parameters(ours) / num_parameters(even)
    held = [
        sum(block.ends[i] - (block.ends[i - 1] if i else 0) for block in made.blocks)
        for i in range(len(KINDS))
    ]
    details = {
        "kinds": [kind.name for kind in KINDS],
        "layers": {"by free memory": ours, "even parts": even},
        "parameters": {"by free memory": num_parameters(ours), "even parts": num_parameters(even)},
        "layers with the optimizer on the host": with_host,
        "parameters with the optimizer on the host": num_parameters(with_host),
        "elements held": held,
        "samples": [share for share in made.shares[0].runs[0]] if made.shares else [],
        "memory of all over 3 x the smallest": sum(memory) / (len(KINDS) * min(memory)),
        "seconds": time.perf_counter() - start,
    }
    for rank, device in enumerate(made.memory):
        print(
            f"rank {rank} ({KINDS[rank].name}): weights {device.parameter_bytes / 1e9:.2f} GB, gradients "
            f"{device.gradient_bytes / 1e9:.2f}, optimizer {device.optimizer_bytes / 1e9:.2f}, "
            f"buffers {device.buffer_bytes / 1e9:.2f} of {device.capacity_bytes / 1e9:.2f}"
        )
    report("largest_model", [Claim("parameters", ratio, TARGET, False, details)])


if __name__ == "__main__":
    main()
