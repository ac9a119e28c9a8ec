"""How good and how fast the search is, on one core and without weights.

    GPT-2 of 1.3 B on 2 RTX-3090 + 1 RTX-4090 + 4 V100, no setting     at most the step of the best plan
                                                                       by hand; under 30 s with the capture
    a model below 100 M parameters on 8 mixed devices                  under 1 s after the capture
    BERT-Large on 16 mixed devices                                     under 10 s after the capture
    GPT 96 x 12288 on 1,024 devices of 3 kinds                         under 60 s in all, under 2 GB

The best plan by hand of the first case (seven stages, 32 micro-batches, "schedule": "auto") took 1.86 s
(fp32) and 0.65 s (fp16) by the first cost model, which knew nothing of measured GPUs; both sides are
priced by today's here, and the old figures stand in the details. CPU seconds count, those of the clock
stand beside them: the search is one process and waits for nothing.

`--growth [NUMBER ...]`: the last model on 64 to 8,192 devices of 4 kinds as a table instead (8,192 in
under 3 minutes). `--by-hand`: the first case beside fourteen plans made by hand. `--only NAME`: one case.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # `python benchmarks/search.py` finds its neighbours, too

import whale as wh
from benchmarks.planning import (
    HEADS,
    LARGE_CLUSTER,
    LAYERS,
    LENGTH,
    MIXED_CLUSTER,
    WIDTH,
    after_capture,
    alone,
    cluster_of,
)
from benchmarks.side_by_side import Claim, report
from whale import api
from whale.capture.batch import read_batch
from whale.cluster.cluster import ETHERNET_50G, PCIE_3_X16, Device, device_kind
from whale.model_planner import ModelPlanner
from whale.simulation.simulate import step_seconds

UNLIMITED_BYTES = 10**13
LARGE_BYTES = 2e9
GROWTH_S = 180
"""CPU seconds, capture included, for any number of devices"""
GROWTH = (64, 256, 1024, 4096, 8192)
BY_HAND: list[dict[str, Any]] = [
    *({"num_micro_batch": count, "schedule": "1f1b"} for count in (2, 4, 8, 16, 32, 64)),
    *({"num_micro_batch": count, "schedule": "auto"} for count in (4, 8, 16, 32, 64)),
    {"num_micro_batch": 8, "schedule": "1f1b", "recompute": True},
    {"num_micro_batch": 32, "schedule": "wave"},
    {"num_micro_batch": 32, "schedule": "gpipe"},
]
"""settings beside seven stages, one on each device"""
BEST_BY_HAND: dict[str, Any] = {"num_micro_batch": 32, "schedule": "auto"}
FIRST_COSTS_S = {"default": 1.86, "fp16": 0.65}
"""its step by the first cost model"""
FOUR_KINDS = {"H100": 256, "A100-80GB": 256, "A100-40GB": 256, "V100-32GB": 256}
"""of 1,024 devices"""


def two_hosts() -> wh.Cluster:
    """The cluster of the 1.3 B case."""
    kinds = ["RTX-3090", "RTX-3090", "RTX-4090"] + ["V100-16GB"] * 4
    hosts = [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1), ("b", 2), ("b", 3)]
    devices = tuple(
        Device(rank, host, place, device_kind(kind))
        for rank, (kind, (host, place)) in enumerate(zip(kinds, hosts, strict=True))
    )
    return wh.Cluster(devices, PCIE_3_X16, ETHERNET_50G)


def gpt2(layers: int, width: int, heads: int, length: int) -> GPT2LMHeadModel:
    """GPT-2 without dropout, so that captures are alike."""
    with torch.device("meta"):
        return GPT2LMHeadModel(
            GPT2Config(
                n_layer=layers,
                n_embd=width,
                n_head=heads,
                n_positions=length,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                use_cache=False,
            )
        )


def searched(
    model: torch.nn.Module, words: torch.Tensor, cluster: wh.Cluster, settings: dict[str, Any]
) -> dict[str, Any]:
    """What was found, and the seconds that it took."""
    plan, clock, cpu = after_capture(model, words, cluster, settings)
    choice = next(each for each in plan.decisions if each.what == "strategy")
    left_out = [each.choice for each in plan.decisions if each.what == "devices left out"]
    return {
        "step_s": round(step_seconds(plan).step_s, 4),
        "plan": choice.choice,
        "why": choice.why,
        "left out": ", ".join(left_out) or "none",
        "seconds after the capture": round(clock[0], 2),
        "in all": round(clock[1], 1),
        "CPU seconds after the capture": round(cpu[0], 2),
        "CPU seconds in all": round(cpu[1], 1),
    }


Parts = dict[str, tuple[float, float]]
"""what is claimed -> (figure, most that is allowed)"""


def gpt_13(precision: str) -> dict[str, Any]:
    words = torch.zeros(64, 512, dtype=torch.long)
    found = searched(gpt2(24, 2048, 16, 512), words, two_hosts(), {"precision": precision})
    hand = Hand(precision)
    by_hand_s = hand.seconds(BEST_BY_HAND)
    assert by_hand_s is not None
    old_s = FIRST_COSTS_S[precision]
    found["all cards busy all the time s"] = round(hand.never_idle_s(), 4)
    parts: Parts = {
        "step": (found["step_s"], by_hand_s),
        "seconds with capture": (found["CPU seconds in all"], 30),
    }
    return {**found, f"by hand s (first cost model {old_s})": round(by_hand_s, 4), "parts": parts}


def gpt_13_fp32() -> dict[str, Any]:
    return gpt_13("default")


def gpt_13_fp16() -> dict[str, Any]:
    return gpt_13("fp16")


def small() -> dict[str, Any]:
    words = torch.zeros(64, 256, dtype=torch.long)
    cluster = cluster_of({"V100-32GB": 4, "T4": 4})
    found = searched(gpt2(8, 512, 8, 256), words, cluster, {})
    return {**found, "parts": {"seconds": (found["CPU seconds after the capture"], 1)}}


def bert() -> dict[str, Any]:
    with torch.device("meta"):
        model = BertForMaskedLM(
            BertConfig(num_hidden_layers=24, hidden_size=1024, num_attention_heads=16)
        )
    words = torch.zeros(64, 128, dtype=torch.long)
    found = searched(model, words, cluster_of(MIXED_CLUSTER), {})
    return {**found, "parts": {"seconds": (found["CPU seconds after the capture"], 10)}}


def gpt_large(num_devices: int = 1024, kinds: dict[str, int] | None = None) -> dict[str, Any]:
    words = torch.zeros(num_devices // 2, LENGTH, dtype=torch.long)
    wanted = kinds or LARGE_CLUSTER
    cluster = cluster_of({kind: number * num_devices // 1024 for kind, number in wanted.items()})
    found = searched(gpt2(LAYERS, WIDTH, HEADS, LENGTH), words, cluster, {})
    return {**found, "parts": {"seconds in all": (found["CPU seconds in all"], 60)}}


def claims_of(name: str, found: dict[str, Any]) -> list[Claim]:
    """The figures of a case as parts of what is allowed."""
    parts: Parts = found.pop("parts")
    if name == "gpt_large":
        parts["memory"] = (found["peak_bytes"], LARGE_BYTES)
    claims = []
    for what, (figure, limit) in parts.items():
        details = {"figure": figure, "allowed": limit, **found}
        claims.append(Claim(f"{name}: {what}", figure / limit, 1.0, at_most=True, details=details))
    return claims


# ---- growth


def at_size(num_devices: int) -> dict[str, Any]:
    """The large GPT on so many devices of 4 kinds, in a process of its own."""
    try:
        return alone(partial(gpt_large, num_devices, FOUR_KINDS))
    except ValueError as error:  # nothing fits
        return {"refused": str(error)}


def growth(numbers: tuple[int, ...]) -> None:
    """Seconds of the search by the number of devices, two sizes at a time, the largest first. Ends
    the process.
    """
    ordered = sorted(numbers, reverse=True)
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(ordered, pool.map(at_size, ordered), strict=True))
    claims = []
    print("devices  CPU s in all  after capture     GB  samples/s  plan")
    for number in sorted(numbers):
        row = found[number]
        if "refused" in row:
            print(f"{number:>7}  {row['refused']}")
            continue
        in_all = row["CPU seconds in all"]
        after = row["CPU seconds after the capture"]
        gigabytes = row["peak_bytes"] / 1e9
        rate = number / 2 / row["step_s"]
        print(
            f"{number:>7}  {in_all:>12}  {after:>13}  {gigabytes:>5.2f}  {rate:>9.2f}  {row['plan']}"
        )
        row.pop("parts")
        name = f"{number} devices of 4 kinds: CPU seconds with capture"
        claims.append(Claim(name, in_all / GROWTH_S, 1.0, at_most=True, details=row))
    report("search --growth", claims)


# ---- by hand


class Hand:
    """Plans of the 1.3 B case that a user makes by hand: seven stages, one on each device."""

    def __init__(self, precision: str) -> None:
        self.precision = precision
        self.model = gpt2(24, 2048, 16, 512)
        words = torch.zeros(64, 512, dtype=torch.long)
        self.layout, tensors = read_batch({"input_ids": words, "labels": words})
        config = wh.Config({"precision": precision})
        self.prepared = api._prepare(self.model, self.layout, tensors, None, config, "cpu")

    def seconds(self, settings: dict[str, Any], num_stages: int | None = 7) -> float | None:
        """Of a step; None where the plan does not fit. `num_stages`: None leaves all to the search."""
        stages = {} if num_stages is None else {"num_task_graph": num_stages}
        return self._seconds(two_hosts(), {**stages, **settings})

    def never_idle_s(self) -> float:
        """Seconds of a step in which no card ever waits: each takes the part of the model that it
        does in the same time as the others, with messages that cost nothing and memory without end.
        """
        steps_per_s = 0.0
        for device in two_hosts().devices:
            kind = replace(device.kind, memory_bytes=UNLIMITED_BYTES)
            alone = wh.Cluster((Device(0, "a", 0, kind),), PCIE_3_X16, ETHERNET_50G)
            step_s = self._seconds(alone, {"strategy": "data", "num_micro_batch": 1})
            assert step_s is not None
            steps_per_s += 1 / step_s
        return 1 / steps_per_s

    def _seconds(self, cluster: wh.Cluster, settings: dict[str, Any]) -> float | None:
        config = wh.Config({"precision": self.precision, **settings})
        planner = ModelPlanner(self.model, cluster, config, self.layout.batch_size)
        try:
            return step_seconds(planner.plan(self.prepared, {})).step_s
        except ValueError:
            return None


def by_hand(precision: str) -> dict[str, Any]:
    """The 1.3 B case: seconds of a step of plans made by hand, and of what the search finds."""
    hand = Hand(precision)
    steps: dict[str, float | None] = {}
    for settings in BY_HAND:
        name = ", ".join(f"{key} {value}" for key, value in settings.items())
        step_s = hand.seconds(settings)
        steps[name] = None if step_s is None else round(step_s, 4)
    found_s = hand.seconds({}, num_stages=None)
    assert found_s is not None
    return {
        "searched s": round(found_s, 4),
        "all cards busy all the time s": round(hand.never_idle_s(), 4),
        "by hand s": steps,
    }


def compare_by_hand() -> None:
    """Plans made by hand against what the search finds, both precisions at a time. Ends the process."""
    precisions = ("default", "fp16")
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(alone, [partial(by_hand, each) for each in precisions]))
    claims = []
    for precision, row in zip(precisions, found, strict=True):
        best_s = min(each for each in row["by hand s"].values() if each is not None)
        name = f"1.3 B, {precision}: best of {len(BY_HAND)} plans by hand / searched step"
        claims.append(Claim(name, best_s / row["searched s"], 1.0, at_most=False, details=row))
    report("search --by-hand", claims)


def main() -> None:
    if "--growth" in sys.argv[1:]:
        growth(tuple(map(int, sys.argv[2:])) or GROWTH)
    if "--by-hand" in sys.argv[1:]:
        compare_by_hand()
    cases = {each.__name__: each for each in (gpt_13_fp32, gpt_13_fp16, small, bert, gpt_large)}
    if "--only" in sys.argv[1:]:
        name = sys.argv[sys.argv.index("--only") + 1]
        cases = {name: cases[name]}
    claims = []
    for name, case in cases.items():
        claims.extend(claims_of(name, alone(case)))
    report("search", claims)


if __name__ == "__main__":
    main()
