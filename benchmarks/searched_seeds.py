"""The search against the hand-made plans of the seeds, by simulation: does `"strategy": "auto"`
without any annotation find plans that are at least as fast?

    ResNet50 + 100K classes on 8 V100        annotated: backbone replicated, classifier split
    M6-MoE (100 B) on 128 V100               annotated: experts split, the rest data parallel
    M6-10B on 256 V100                       8 stages, 35 micro-batches, recomputing
    BERT-Large on 8 V100 + 8 P100            data parallel, hardware-aware

M6-MoE is planned with SGD on both sides: a stack of experts that is cut gives Adafactor, which the
paper takes, other values, and the search only makes plans that are exact.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # `python benchmarks/searched_seeds.py` finds its neighbours, too

import whale as wh
from benchmarks import giant_models, large_classifier, reproduce_whale
from benchmarks.paper_models import capture
from benchmarks.side_by_side import Claim, report
from models.m6_moe import M6MoE, M6MoEConfig
from models.resnet import ResNet, ResNetConfig
from whale.cluster.cluster import Cluster
from whale.plans.plan import Plan
from whale.simulation.simulate import step_seconds

CLASSES = 100_000


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.1)


def classifier(num_devices: int = 8) -> tuple[Plan, Plan]:
    """(hand-made, searched)"""
    made = large_classifier.planned(CLASSES, num_devices, hybrid=True)
    with torch.device("meta"):
        model = ResNet(ResNetConfig.resnet50(CLASSES))
    number = num_devices * large_classifier.OPEN["samples_per_device"]
    size = large_classifier.OPEN["image_size"]
    batch = {
        "images": torch.zeros(number, 3, size, size, device="meta"),
        "labels": torch.zeros(number, dtype=torch.long, device="meta"),
    }
    cluster = large_classifier.cluster(num_devices)
    return made, wh.plan(model, batch, cluster=cluster, config={"strategy": "auto"})


def m6_moe(num_devices: int = 128) -> tuple[Plan, Plan]:
    config = M6MoEConfig.m6_moe_100b()
    plans = []
    for is_annotated in (True, False):
        with torch.device("meta"):
            model = M6MoE(config).half()
        settings: dict[str, Any] = {"num_micro_batch": 1}
        if is_annotated:
            wh.set_default_strategy(wh.replicate(num_devices))
            wh.annotate(model, {"*.experts": wh.split(num_devices)})
        else:
            settings = {"strategy": "auto"}
        cluster = Cluster.uniform(num_devices, kind="V100-32GB", devices_per_host=8)
        sample = giant_models.batch_of(config, giant_models.SAMPLES_PER_DEVICE * num_devices)
        try:
            plans.append(wh.plan(model, sample, cluster=cluster, config=settings, optimizer=sgd))
        finally:
            wh.set_default_strategy(None)
    return plans[0], plans[1]


def m6_10b(num_devices: int = 256) -> tuple[Plan, Plan]:
    model = capture("M6-10B")
    cluster = reproduce_whale.cluster(("V100-32GB", num_devices))
    batch_size = 35 * reproduce_whale.OPEN["m6_micro_batch"] * num_devices // 8
    settings = {"num_task_graph": 8, "num_micro_batch": 35, "recompute": True}
    made = model.plan(cluster, batch_size, 0.0, **settings)
    return made, model.searched_plan(cluster, batch_size, 0.0, recompute=True)


def bert_large() -> tuple[Plan, Plan]:
    model = capture("BERT-Large")
    cluster = reproduce_whale.cluster(("V100-32GB", 8), ("P100", 8))
    batch_size = reproduce_whale.OPEN["data_parallel_batch"]["BERT-Large"]
    return model.plan(cluster, batch_size), model.searched_plan(cluster, batch_size)


CASES: dict[str, Callable[[], tuple[Plan, Plan]]] = {
    "M6-10B on 256": m6_10b,
    "M6-MoE on 128": m6_moe,
    "ResNet50 + 100K classes on 8": classifier,
    "BERT-Large on 8 + 8": bert_large,
}
"""those that take longest first"""


def claim(name: str) -> Claim:
    start = time.process_time()
    made, found = CASES[name]()
    seconds = [step_seconds(plan).step_s for plan in (made, found)]
    choice = next(each.choice for each in found.decisions if each.what == "strategy")
    details = {
        "hand-made s": round(seconds[0], 4),
        "searched s": round(seconds[1], 4),
        "found": choice,
        "CPU s with both captures": round(time.process_time() - start, 1),
    }
    return Claim(f"{name}: hand-made / searched step", seconds[0] / seconds[1], 1.0, False, details)


def main() -> None:
    names = [name for name in CASES if not sys.argv[1:] or any(a in name for a in sys.argv[1:])]
    # two at a time, each in a process of its own
    with ProcessPoolExecutor(2, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        claims = list(pool.map(claim, names))
    report("searched_seeds", claims)


if __name__ == "__main__":
    main()
