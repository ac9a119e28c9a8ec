"""Giant mixtures of experts on V100-32GB, planned without weights: does the plan fit, how long is a
step, how long did planning take?

M6-MoE with 100 billion parameters on 128 devices and with a trillion on 480, Adafactor, in half
precision; experts are split over all devices, the rest is data parallel. Ten trillion on 512
devices do not fit on these alone: without other memories the refusal says what is missing; with 1.5
TB of memory on each of 64 hosts weights and gradients are at home there, with 256 GB on disks, too.
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # `python benchmarks/giant_models.py` finds its neighbours, too

import whale as wh
from benchmarks.side_by_side import Claim, report
from models.m6_moe import M6MoE, M6MoEConfig
from whale.cluster.cluster import GIGA, Cluster, Disk, HostMemory

LIMIT_S = 60.0
SAMPLES_PER_DEVICE = 8
HOSTS = {
    "1.5 TB a host": (HostMemory(1500 * GIGA, 100 * GIGA, 12 * GIGA, 48 * GIGA), None),
    "256 GB a host and disks": (
        HostMemory(256 * GIGA, 100 * GIGA, 12 * GIGA, 48 * GIGA),
        Disk(4000 * GIGA, 12 * GIGA, 8 * GIGA),
    ),
}
"""memory, and four solid state disks of 3 GB/s together; 8 GPUs share four links of PCIe 3"""
GIANTS = {"m6_moe_100b": 128, "m6_moe_1t": 480}


def batch_of(config: M6MoEConfig, number: int) -> dict[str, torch.Tensor]:
    words = torch.zeros(number, config.caption_length, dtype=torch.long, device="meta")
    prompts = torch.zeros(number, config.prompt_length, dtype=torch.long, device="meta")
    pixels = torch.zeros(
        number,
        config.num_channels,
        config.image_size,
        config.image_size,
        device="meta",
        dtype=torch.float16,
    )
    return {"pixels": pixels, "prompt_ids": prompts, "caption_ids": words, "labels": words}


def plan(
    config: M6MoEConfig,
    num_devices: int,
    memory: HostMemory | None = None,
    disk: Disk | None = None,
    num_micro_batch: int = 1,
) -> tuple[wh.Plan, float]:
    """(the plan, seconds that it took, capture included)"""
    start = time.perf_counter()
    with torch.device("meta"):
        model = M6MoE(config).half()
    wh.set_default_strategy(wh.replicate(num_devices))
    wh.annotate(model, {"*.experts": wh.split(num_devices)})
    cluster = Cluster.uniform(num_devices, kind="V100-32GB", devices_per_host=8)
    if memory is not None:
        cluster = cluster.with_memories(memory, disk)
    sample = batch_of(config, SAMPLES_PER_DEVICE * num_devices)
    try:
        made = wh.plan(
            model,
            sample,
            cluster=cluster,
            config={"num_micro_batch": num_micro_batch},
            optimizer=_adafactor,
        )
    finally:
        wh.set_default_strategy(None)
    return made, time.perf_counter() - start


def _adafactor(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor([parameter for _, parameter in named])


def main() -> None:
    claims = []
    for name, num_devices in GIANTS.items():
        made, seconds = plan(getattr(M6MoEConfig, name)(), num_devices)
        timeline = wh.simulate(made)
        used = [sum(device.peak_bytes.values()) for device in timeline.devices]
        details = {
            "grid": made.virtual_devices[0].grid.name
            if made.virtual_devices[0].grid is not None
            else "none",
            "GB on the fullest device": round(max(used) / GIGA, 1),
            "predicted step s": round(timeline.step_s, 3),
            "samples/s": round(timeline.samples_per_s, 1),
        }
        fits = max(used) <= made.memory[0].capacity_bytes
        claims.append(
            Claim(
                f"{name} on {num_devices}: seconds of planning / {LIMIT_S:.0f}",
                seconds / LIMIT_S,
                1.0,
                True,
                details,
            )
        )
        claims.append(Claim(f"{name} on {num_devices}: fits", float(fits), 1.0, False, {}))
        gc.collect()
    start = time.perf_counter()
    try:
        plan(M6MoEConfig.m6_moe_10t(), 512)
        refusal = ""
    except ValueError as error:
        refusal = str(error)
    seconds = time.perf_counter() - start
    claims.append(
        Claim("m6_moe_10t on 512: refused", float(bool(refusal)), 1.0, False, {"refusal": refusal})
    )
    claims.append(
        Claim(
            f"m6_moe_10t on 512: seconds of planning / {LIMIT_S:.0f}",
            seconds / LIMIT_S,
            1.0,
            True,
            {},
        )
    )
    for name, (memory, disk) in HOSTS.items():
        gc.collect()
        claims += with_hosts(name, memory, disk)
    report("giant_models", claims)


def with_hosts(name: str, memory: HostMemory, disk: Disk | None) -> list[Claim]:
    """Ten trillion parameters on 64 hosts of 8 devices with other memories beside them."""
    # what a layer of experts works with on 8 samples a device is more than is left beside it
    made, seconds = plan(M6MoEConfig.m6_moe_10t(), 512, memory, disk, num_micro_batch=2)
    timeline = wh.simulate(made)
    first = timeline.devices[0]
    assert first.away is not None
    details = {
        "predicted step s": round(timeline.step_s, 2),
        "samples/s": round(timeline.samples_per_s, 1),
        "GB on the fullest device": round(
            max(device.peak_total_bytes for device in timeline.devices) / GIGA, 1
        ),
        "GB of a host": {
            each: round(8 * first.away.in_memory(each) / GIGA, 1) for each in ("host", "disk")
        },
        "GB that a device moves in a step, in and out": {
            f"{each.what} {each.memory}": [
                round(each.in_bytes / GIGA, 1),
                round(each.out_bytes / GIGA, 1),
            ]
            for each in first.away.traffic
        },
        "decisions": [d.choice for d in made.decisions if d.what in ("memory", "offload")],
    }
    fits = all(
        device.peak_total_bytes <= device.memory_bytes
        and 8 * first.away.in_memory("host") <= memory.memory_bytes
        for device in timeline.devices
    )
    title = f"m6_moe_10t on 512, {name}"
    limit = Claim(
        f"{title}: seconds of planning / {LIMIT_S:.0f}", seconds / LIMIT_S, 1.0, True, details
    )
    return [limit, Claim(f"{title}: fits", float(fits), 1.0, False, {})]


if __name__ == "__main__":
    main()
