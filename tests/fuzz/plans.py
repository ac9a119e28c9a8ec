"""Random plans for random models; each follows from its seed and the model's."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tests.fuzz.grammar import FuzzModel


@dataclass(frozen=True)
class FuzzPlan:
    """Devices, annotations and settings."""

    num_ranks: int
    marks: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    """(glob, ("replicate", d) or ("split", d, grid))"""
    config: tuple[tuple[str, Any], ...] = ()
    kinds: tuple[str, ...] = ()
    batch_size: int = 6
    optimizer: str = "sgd"
    """a name of `OPTIMIZERS` of tests/fuzz/running.py"""
    smaller_at: int | None = None
    """step whose batch has one sample less; None: all batches have the same size"""


KINDS = ("T4", "V100-32GB", "P100", "A100-40GB")
GRIDS: dict[int, list[tuple[int, int, int] | None]] = {
    2: [None, (1, 2, 1), (1, 1, 2), (2, 1, 1)],
    3: [None, (1, 3, 1), (1, 1, 3)],
    4: [None, (2, 2, 1), (1, 2, 2), (1, 1, 4)],
}


def make_plan(seed: int, model: FuzzModel) -> FuzzPlan:
    """The plan of this seed for that model."""
    rng = random.Random(f"{model.seed} {seed}")
    config: dict[str, Any] = {"num_micro_batch": 1 if model.mixes else rng.choice([1, 2, 2, 3, 4])}
    kind = rng.choice(
        [
            "data",
            "data",
            "stages",
            "stages",
            "stages",
            "cut",
            "split",
            "split stages",
            "mixed",
            "unlike",
        ]
    )
    marks: list[tuple[str, tuple[Any, ...]]] = []
    num_ranks = rng.choice([2, 2, 3])
    if kind == "unlike" and not model.is_stateful:  # no local micro-batches are like theirs
        num_ranks = 3
        config["replicas"] = _unlike_replicas(rng, model)
        del config["num_micro_batch"]
    elif kind == "cut":
        config["num_task_graph"] = num_ranks if rng.random() < 0.7 else 2
        num_ranks = num_ranks if config["num_task_graph"] == num_ranks else 4
    elif kind == "split":
        num_ranks = rng.choice([2, 2, 3, 4])
        marks = [("*", ("split", num_ranks, rng.choice(GRIDS[num_ranks])))]
    elif kind == "mixed":  # some blocks sharded, the others data parallel, on the same devices
        config["colocate"] = True
        chosen = rng.randrange(model.num_blocks)
        others = "|".join(f"b{n}" for n in range(model.num_blocks) if n != chosen)
        marks = [
            (others, ("replicate", num_ranks)),
            (f"b{chosen}", ("split", num_ranks, rng.choice(GRIDS[num_ranks]))),
        ]
    elif kind != "data":
        num_stages = rng.randint(2, min(3, model.num_blocks))
        edges = [
            0,
            *sorted(rng.sample(range(1, model.num_blocks), num_stages - 1)),
            model.num_blocks,
        ]
        for start, stop in zip(edges, edges[1:]):
            glob = "|".join(f"b{number}" for number in range(start, stop))
            wide = rng.choice([1, 1, 2])
            is_split = kind == "split stages" and rng.random() < 0.6
            marks.append(
                (glob, ("split", 2, rng.choice(GRIDS[2])) if is_split else ("replicate", wide))
            )
        num_ranks = sum(what[1] for _, what in marks)
        if num_ranks == 2 and rng.random() < 0.15:
            num_ranks = 4
    _more_settings(
        rng, config, (bool(marks) and kind in ("stages", "split stages")) or kind == "cut"
    )
    if "replicas" in config:  # refused by name for replicas that are not alike
        config.pop("zero", None)
        config.pop("offload", None)
    kinds: tuple[str, ...] = ()
    if rng.random() < 0.25 and "offload" not in config:  # kinds say nothing of a host's memory
        kinds = tuple(rng.choice(KINDS) for _ in range(num_ranks))
    widths = [what[1] for _, what in marks if what[0] == "replicate"]
    widest = max(widths, default=1) if marks else num_ranks
    least = config.get("num_micro_batch", 2) * widest
    batch_size = max(least, rng.choice([4, 6, 7, 9])) + rng.choice([0, 0, 1, 2])
    smaller_at = 1 if batch_size > least and rng.random() < 0.3 else None
    optimizer = rng.choice(["sgd", "sgd", "momentum", "adamw"])
    settings = tuple(config.items())
    return FuzzPlan(num_ranks, tuple(marks), settings, kinds, batch_size, optimizer, smaller_at)


def _unlike_replicas(rng: random.Random, model: FuzzModel) -> list[dict[str, Any]]:
    """The whole model on one rank beside a pipeline of two."""
    count = 1 if model.mixes else rng.choice([1, 2])
    pipeline: dict[str, Any] = {"stages": [[1], [2]], "num_micro_batch": count}
    if rng.random() < 0.3:
        pipeline["recompute"] = True
    return [{"stages": [[0]]}, pipeline]


def _more_settings(rng: random.Random, config: dict[str, Any], is_pipeline: bool) -> None:
    if is_pipeline:
        config["schedule"] = rng.choice(
            ["1f1b", "1f1b", "gpipe", "zero-bubble", "wave", "interleaved", "auto"]
        )
    if rng.random() < 0.25:
        config["recompute"] = rng.choice([True, ["b0"], ["b1", "b0"]])
    if config.get("schedule") in ("wave", "interleaved") and rng.random() < 0.3:
        config["num_waves"] = 2
    if rng.random() < 0.3:
        config["zero"] = rng.choice([1, 2, 3, 3])
    if rng.random() < 0.2:
        config["offload"] = rng.choice(
            [
                {"optimizer": "host"},
                {"weights": "host"},
                {"activations": "host"},
                {"weights": "host", "gradients": "host"},
            ]
        )
    if rng.random() < 0.2:
        config["clip_grad_norm"] = 0.5
    if rng.random() < 0.2:
        config["share_memory"] = False
    if rng.random() < 0.2:
        config["bucket_bytes"] = 200
    if rng.random() < 0.1:
        config["keep_gathered"] = rng.choice([True, False])
