"""ResNet50 with very many classes on V100s: `replicate` for the features and `split` for the classifier, against pure data parallelism.

By simulation of the plans, under the assumptions of `large_classifier.yaml` (one number fitted). The bar is the shape of the paper's
figure: the hybrid is ahead at every size and its lead grows; with a million classes data parallelism is refused for its memory, and the
hybrid scales.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `python benchmarks/large_classifier.py` finds its neighbours, too

import whale as wh
from benchmarks.side_by_side import Claim, report
from models.resnet import ResNet, ResNetConfig
from whale.cluster.cluster import GIGA, Cluster, Device, DeviceKind, Link, device_kind

PAPER = yaml.safe_load((Path(__file__).parent / "large_classifier.yaml").read_text())
OPEN = PAPER["not_said"]
SIZES = (8, 16, 32)


def cluster(num_devices: int) -> Cluster:
    known, efficiency, per_host = device_kind("V100-32GB"), PAPER["fitted"]["efficiency"], PAPER["cluster"]["devices_per_host"]
    kind = DeviceKind("V100-32GB", efficiency * known.flop_per_s, known.memory_bytes, efficiency * known.bytes_per_s)
    links = [
        Link(PAPER["cluster"][name]["gb_per_s"] * GIGA, PAPER["cluster"][name]["latency_us"] / 1e6) for name in ("intra_host", "inter_host")
    ]
    return Cluster(tuple(Device(rank, f"host{rank // per_host}", rank % per_host, kind) for rank in range(num_devices)), *links)


def speed(num_classes: int, num_devices: int, hybrid: bool) -> tuple[float, dict[str, Any]]:
    """(samples/s, what is on a device)"""
    with torch.device("meta"):
        model = ResNet(ResNetConfig.resnet50(num_classes))
    if hybrid:
        wh.annotate(model, {"backbone": wh.replicate(num_devices), "classifier": wh.split(num_devices)})
        wh.set_default_strategy(wh.replicate(num_devices))
    number, size = num_devices * OPEN["samples_per_device"], OPEN["image_size"]
    batch = {"images": torch.zeros(number, 3, size, size, device="meta"), "labels": torch.zeros(number, dtype=torch.long, device="meta")}
    try:
        plan = wh.plan(model, batch, cluster=cluster(num_devices), config={"num_micro_batch": 1})
    finally:
        wh.set_default_strategy(None)
    timeline = wh.simulate(plan)
    found: dict[str, Any] = {"GB on a device": round(sum(timeline.devices[0].peak_bytes.values()) / GIGA, 1)}
    if hybrid:
        found["grid"] = plan.virtual_devices[0].grid.name if plan.virtual_devices[0].grid is not None else "none"
    return timeline.samples_per_s, found


def hundred_thousand() -> list[Claim]:
    claims, leads = [], []
    print(f"{'GPUs':>5}{'DP paper':>10}{'DP ours':>9}{'hybrid paper':>14}{'hybrid ours':>13}{'lead paper':>12}{'lead ours':>11}")
    for number in SIZES:
        (alone, _), (hybrid, details) = speed(100_000, number, False), speed(100_000, number, True)
        paper = [PAPER["published"][name][number] for name in ("data_parallel", "hybrid")]
        leads.append(hybrid / alone)
        print(f"{number:>5}{paper[0]:>10}{alone:>9.0f}{paper[1]:>14}{hybrid:>13.0f}{paper[1] / paper[0]:>12.2f}{leads[-1]:>11.2f}")
        details |= {"paper": round(paper[1] / paper[0], 2), "samples/s": {"data parallel": round(alone), "hybrid": round(hybrid)}}
        claims.append(Claim(f"100K classes, {number} GPUs: hybrid / data parallel", leads[-1], 1.0, at_most=False, details=details))
    growth = min(after / before for before, after in zip(leads, leads[1:]))
    claims.append(Claim("100K classes: the lead grows", growth, 1.0, at_most=False, details={"leads": [round(lead, 3) for lead in leads]}))
    return claims


def million() -> list[Claim]:
    try:
        speed(1_000_000, 8, False)
    except ValueError as error:
        print(f"1M classes, data parallel: {error}")
        refused = 1.0
    else:
        refused = 0.0
    speeds = {number: speed(1_000_000, number, True) for number in SIZES}
    scaling = speeds[32][0] / speeds[8][0] / 4
    details = {str(number): {"samples/s": round(found), **more} for number, (found, more) in speeds.items()}
    return [
        Claim("1M classes: data parallelism is refused for its memory", refused, 1.0, at_most=False, details={}),
        Claim("1M classes: scaling of the hybrid from 8 to 32 GPUs", scaling, 0.95, at_most=False, details=details),
    ]


def main() -> None:
    report("large_classifier", [*hundred_thousand(), *million()])


if __name__ == "__main__":
    main()
