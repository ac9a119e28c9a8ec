"""What it costs to keep things outside of the devices: GPT with 6.7 billion parameters in half
precision on 8 V100-32GB of one host with 512 GB, PCIe 3. Planned and simulated, nothing is trained.

    optimizer      AdamW's states on the host, against the same step on devices that hold everything
    activations    on the host, at 16,384 tokens a sample, likewise

The bound beside each is what the links need for what must move, under everything else that the step
does: nothing can be faster. 8 GPUs of such a host share four links of 12 GB/s, two behind each
switch.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # `python benchmarks/offload.py` finds its neighbours, too

import whale as wh
from benchmarks.gpt_layer import Layer
from benchmarks.side_by_side import Claim, report
from whale.cluster.cluster import Cluster, HostMemory
from whale.cluster.kinds import GIGA
from whale.simulation.timeline import Timeline

WIDTH = 4096
NUM_LAYERS = 32
NUM_HEADS = 32
NUM_WORDS = 50_304
NUM_DEVICES = 8
TARGET = 1.05
HOST = HostMemory(512 * GIGA, 100 * GIGA, 12 * GIGA, 48 * GIGA)
"""two sockets with six channels of DDR4-2666 each reach about so much in copies"""


class Gpt(nn.Module):
    """Words in, the loss of the next word out."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, WIDTH)
        self.places = nn.Embedding(length, WIDTH)
        self.layers = nn.ModuleList(Layer(WIDTH, NUM_HEADS) for _ in range(NUM_LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.words.weight)
        return F.cross_entropy(logits.view(-1, NUM_WORDS).float(), labels.view(-1))


def devices(is_unlimited: bool) -> Cluster:
    cluster = Cluster.uniform(NUM_DEVICES, "V100-32GB").with_memories(HOST)
    if not is_unlimited:
        return cluster
    all_devices = [
        replace(device, kind=replace(device.kind, memory_bytes=0)) for device in cluster.devices
    ]
    return replace(cluster, devices=tuple(all_devices))


def simulated(
    length: int, samples: int, is_unlimited: bool = False, **config: Any
) -> tuple[wh.Plan, Timeline]:
    with torch.device("meta"):
        model = Gpt(length).half()
    ids = torch.zeros(samples, length, dtype=torch.long, device="meta")
    made = wh.plan(
        model,
        {"ids": ids, "labels": ids},
        cluster=devices(is_unlimited),
        config={"strategy": "data", "zero": 2, **config},
    )
    return made, wh.simulate(made)


def claim(name: str, held: Timeline, away: Timeline, made: wh.Plan) -> Claim:
    """The step with something elsewhere against 1.05 of the step that holds everything, or the
    bound of the links where that is more.
    """
    moved = away.devices[0].away
    assert moved is not None and made.figures is not None
    rate_in, rate_out = made_rates()
    links_s = max(
        sum(each.in_bytes for each in moved.traffic) / rate_in,
        sum(each.out_bytes for each in moved.traffic) / rate_out,
    )
    bound_s = max(TARGET * held.step_s, links_s)
    details = {
        "step that holds everything s": held.step_s,
        "step s": away.step_s,
        "seconds that the links need": links_s,
        "over the step that holds everything": away.step_s / held.step_s,
        "GB on the fullest device": max(d.peak_total_bytes for d in away.devices) / GIGA,
        "GB there, everything held": max(d.peak_total_bytes for d in held.devices) / GIGA,
        "GB on the host": sum(d.away.in_memory("host") for d in away.devices if d.away) / GIGA,
        "recomputed regions": [
            f"{stage.num_recomputed} of {stage.num_regions}" + " cheap" * stage.has_cheap_regions
            for stage in made.stages
        ],
        "seconds of transfers that nothing hides": away.devices[0].exposed_s,
        "updated on": moved.updated_on,
        "traffic of a device, GB": {
            f"{each.what} {each.memory}": [each.in_bytes / GIGA, each.out_bytes / GIGA]
            for each in moved.traffic
        },
    }
    return Claim(f"{name}: step / allowed", away.step_s / bound_s, 1.0, True, details)


def made_rates() -> tuple[float, float]:
    rate = HOST.bytes_per_s(NUM_DEVICES)
    return rate, rate


def main() -> None:
    start = time.perf_counter()
    claims = []
    _, held = simulated(1024, 128, is_unlimited=True, num_micro_batch=16)
    made, away = simulated(1024, 128, num_micro_batch=16, offload={"optimizer": "host"})
    claims.append(claim("optimizer on the host", held, away, made))
    _, held = simulated(16384, 8, is_unlimited=True)
    both = {"optimizer": "host", "activations": "host"}
    made, away = simulated(16384, 8, offload=both)
    claims.append(claim("activations on the host, 16k tokens", held, away, made))
    print(f"{time.perf_counter() - start:.0f} s")
    report("offload", claims)


if __name__ == "__main__":
    main()
