"""The cost model against times measured on real GPUs.

    python benchmarks/real_gpus.py --measurements DIR

(a)  A block of each model by data sheets and the constants of `cluster/kinds.py` alone: forward and
     backward within 15 % of the measured time, the ratio of any two kinds within 12 %. Constants
     fitted again on one model, checked on the other, on the kinds that both have, both ways.
(b)  Whole steps of the measured plans, given layer times and network curves, simulated as the
     measured runtime works (`measured_runtime.py`): unfitted, and with two overheads fitted to the
     other rows (leave-one-out): at most 5 % on average over rows with sound inputs. Peak memory
     within 5 %, with one constant fitted in the same way.

Which inputs are unsound is found by rules, and said with the figures that contradict each other.
Where the measurements come from: `gpu_measurements.py`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.fx import Node

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # `python benchmarks/real_gpus.py` finds its neighbours, too

from benchmarks.gpu_measurements import Measurements, whale_kind
from benchmarks.measured_models import MODELS, SEQUENCE, BlocksOnly, ModelShape
from benchmarks.measured_runtime import (
    MeasuredPlan,
    Overheads,
    StepParts,
    peak_bytes,
    read_plan,
    step_parts,
)
from whale.api import _prepare
from whale.capture.batch import read_batch
from whale.capture.graph import CapturedGraph
from whale.cluster.kinds import TYPICAL, DeviceKind, Efficiency
from whale.config import Config
from whale.costs.costs import (
    backward_bytes,
    backward_factors,
    backward_seconds,
    node_costs,
    seconds,
)
from whale.costs.layer_times import module_names
from whale.costs.optimizers import update_work
from whale.costs.saved import saved_for_backward
from whale.lowering.weights import build_on_meta
from whale.operations.nodes import op_name
from whale.planning.stages import carries_gradient

BLOCK_WITHIN = 0.15
RATIO_WITHIN = 0.12
STEPS_WITHIN = 0.05
MEMORY_WITHIN = 0.05
IN_PLACE_PASSES = 6
"""The measured program masks its scores in place, in a view of another tensor. torch then copies the
gradient three times more (`CopySlices`: into a new tensor, out of it, and back), which a captured
graph, all of whose operations are out of place, does not do: 6 passes over the scores in backward.
"""
CONTRADICTS = 5.0
"""links between the same two hosts whose rates differ by more than this cannot both be right"""
OVERHEADS = tuple(
    Overheads(message / 4e3, gradients / 200)
    for message in range(0, 21)
    for gradients in range(0, 21)
)
"""0 to 5 ms a message, 0 to 100 ms a sum of gradients: tried to fit the rows"""


def say(text: str = "") -> None:
    print(text, flush=True)


# ---- (a) blocks by data sheets


@dataclass(frozen=True)
class BlockWork:
    """What one block asks of a device for one number of samples, as sums over its operations."""

    flop: float
    moved_bytes: float
    num_operations: float

    def seconds(self, kind: DeviceKind) -> float:
        """Line (1) of `costs/costs.py`, summed."""
        rate = kind.reached_flop_per_s("tf32")
        launched = self.num_operations * kind.efficiency.operation_s
        return self.flop / rate + self.moved_bytes * kind.byte_s + launched


@dataclass(frozen=True)
class CapturedBlock:
    """One block of a model, captured as Whale captures any."""

    shape: ModelShape
    captured: CapturedGraph
    nodes: tuple[Node, ...]

    @staticmethod
    def of(shape: ModelShape) -> CapturedBlock:
        model = build_on_meta(lambda: BlocksOnly(shape))
        layout, tensors = read_batch({"x": torch.empty(2, SEQUENCE, shape.width)})
        captured = _prepare(model, layout, tensors, None, Config(), "cpu").captured
        nodes = tuple(
            node
            for node in captured.compute_nodes()
            if any(name.startswith("blocks.") for name in module_names(node))
        )
        return CapturedBlock(shape, captured, nodes)

    def model_seconds(self, micro_batch: int, kind: DeviceKind) -> float:
        """Forward and backward by Whale's cost model, operation by operation."""
        gradients = carries_gradient(self.captured)
        costs = node_costs(self.captured, micro_batch)
        total = 0.0
        for node in self.nodes:
            cost = costs[node]
            factors = backward_factors(node, cost, gradients)
            moved = backward_bytes(node, costs, gradients)
            total += seconds(cost, kind, "tf32")
            total += sum(backward_seconds(cost, factors, kind, "tf32", moved))
            if op_name(node) == "masked_fill":
                total += IN_PLACE_PASSES * cost.output_bytes * kind.byte_s
        return total

    def work(self, micro_batch: int) -> BlockWork:
        """The same as three sums, which is what constants are fitted on."""
        ideal = DeviceKind("ideal", 1.0, 0, 1.0)
        none = replace(ideal, flop_per_s=float("inf"), bytes_per_s=float("inf"))
        # the cost model is linear in 1 / rate, 1 / bandwidth and the time of an operation
        flop = self.model_seconds(micro_batch, replace(none, flop_per_s=1.0))
        moved = self.model_seconds(micro_batch, replace(none, bytes_per_s=1.0))
        launched = replace(none, efficiency=Efficiency(operation_s=1.0))
        return BlockWork(flop, moved, self.model_seconds(micro_batch, launched))

    def saved_bytes(self) -> tuple[float, float]:
        """Bytes that autograd saves of a block for one sample: those that tensor parallelism leaves
        whole (as wide as the model) and those that it cuts.
        """
        saved = saved_for_backward(self.captured, 2)
        owner: dict[int, Node] = {}
        for node, storages in saved.result_of_node.items():
            for storage in storages:
                owner.setdefault(storage, node)
        found: set[int] = set()
        for node in self.nodes:
            found |= saved.of_node.get(node, frozenset())
        whole = 0.0
        cut = 0.0
        for storage in found:
            value = owner[storage].meta["val"] if storage in owner else None
            is_whole = isinstance(value, torch.Tensor) and value.shape[-1] == self.shape.width
            inside = storage in owner and "attention" in ".".join(module_names(owner[storage])[-1:])
            if is_whole and not inside:
                whole += saved.storages[storage].sample_bytes
            else:
                cut += saved.storages[storage].sample_bytes
        return whole, cut


@dataclass(frozen=True)
class BlockRow:
    """One measured block."""

    model: str
    kind: str
    micro_batch: int
    work: BlockWork
    measured_s: float

    def error(self, kind: DeviceKind) -> float:
        return self.work.seconds(kind) / self.measured_s - 1


def block_rows(measured: Measurements, blocks: dict[str, CapturedBlock]) -> list[BlockRow]:
    """All blocks of the folder at tensor_parallel 1 on kinds that Whale knows."""
    works: dict[tuple[str, int], BlockWork] = {}
    found = []
    for model, by_kind in measured.layers.items():
        if model not in blocks:
            say(f"{model}: not known by name, left out")
            continue
        for name, rows in by_kind.items():
            if (model, name) in measured.wrong_layers:
                say(f"{model} on {name}: left out, {measured.wrong_layers[model, name]}")
                continue
            if whale_kind(name) is None:
                say(f"{name}: not in Whale's table of kinds, left out")
                continue
            for row in rows:
                time_s = row.block[0] + row.block[1]
                if row.tensor_parallel != 1 or time_s <= 0:
                    continue
                key = (model, row.micro_batch)
                if key not in works:
                    works[key] = blocks[model].work(row.micro_batch)
                found.append(BlockRow(model, name, row.micro_batch, works[key], time_s))
    return found


def kind_of(row: BlockRow) -> DeviceKind:
    kind = whale_kind(row.kind)
    assert kind is not None
    return kind


def worst_ratio(rows: Sequence[BlockRow]) -> tuple[float, str]:
    """Largest error of the ratio of two kinds, for one model and number of samples."""
    worst = 0.0
    where = ""
    for a, b in itertools.combinations(rows, 2):
        if (a.model, a.micro_batch) == (b.model, b.micro_batch):
            quotient = (1 + a.error(kind_of(a))) / (1 + b.error(kind_of(b)))
            error = max(quotient, 1 / quotient) - 1
            if error > worst:
                worst = error
                where = f"{a.kind} / {b.kind}, {a.model}, {a.micro_batch} samples"
    return worst, where


def fitted(rows: Sequence[BlockRow]) -> Callable[[DeviceKind], DeviceKind] | None:
    """Kinds with constants that fit these rows best (least squares of relative errors): what
    products reach, what memory reaches, and the same for each kind that has a factor of its own.
    None where the rows do not determine them.
    """
    special = sorted({row.kind for row in rows if _factor(kind_of(row)) != 1.0})
    places = [*([""] if {row.kind for row in rows} - set(special) else []), *special]
    matrix = []
    target = []
    for row in rows:
        kind = kind_of(row)
        columns = [row.work.flop / kind.rate("tf32")]
        for place in places:
            is_own = (row.kind if row.kind in special else "") == place
            columns.append(row.work.moved_bytes / kind.bytes_per_s if is_own else 0.0)
        on_chip = row.work.moved_bytes / (kind.efficiency.on_chip_bytes_per_s or float("inf"))
        fixed = on_chip + row.work.num_operations * kind.efficiency.operation_s
        matrix.append(np.array(columns) / row.measured_s)
        target.append(1 - fixed / row.measured_s)
    found, _, rank, _ = np.linalg.lstsq(np.array(matrix), np.array(target), rcond=None)
    if rank < len(places) + 1 or min(found) <= 0:
        return None
    products = 1 / found[0]
    memory = {place: 1 / value for place, value in zip(places, found[1:], strict=True)}
    names = {whale_kind(name).name: name for name in special}  # type: ignore[union-attr]

    def with_constants(kind: DeviceKind) -> DeviceKind:
        own = float(memory[names.get(kind.name, "")])
        return replace(
            kind, efficiency=replace(kind.efficiency, products=float(products), memory=own)
        )

    return with_constants


def _factor(kind: DeviceKind) -> float:
    return kind.efficiency.memory / TYPICAL.memory


def hold_out(rows: Sequence[BlockRow]) -> dict[str, dict[str, float]]:
    """Constants fitted on one model, errors on another, on the kinds that both have."""
    found = {}
    models = sorted({row.model for row in rows})
    for here, there in itertools.permutations(models, 2):
        by_model = {name: {row.kind for row in rows if row.model == name} for name in (here, there)}
        both = by_model[here] & by_model[there]
        fit_on = [row for row in rows if row.model == here and row.kind in both]
        check_on = [row for row in rows if row.model == there and row.kind in both]
        if len(both) < 2:
            continue
        change = fitted(fit_on)
        if change is None:
            say(f"  {here}: its {len(fit_on)} blocks do not determine the constants, not fitted")
            continue
        errors = [abs(row.error(change(kind_of(row)))) for row in check_on]
        found[f"{here} -> {there}"] = {
            "kinds": float(len(both)),
            "worst": round(max(errors), 4),
            "mean": round(statistics.fmean(errors), 4),
        }
    return found


def blocks_by_data_sheet(
    measured: Measurements, blocks: dict[str, CapturedBlock]
) -> dict[str, Any]:
    rows = block_rows(measured, blocks)
    say("(a) a block's forward + backward by data sheet and constants, against the measured time")
    for model, kind in dict.fromkeys((row.model, row.kind) for row in rows):
        own = [row for row in rows if (row.model, row.kind) == (model, kind)]
        errors = "  ".join(f"{row.micro_batch}: {row.error(kind_of(row)):+.1%}" for row in own)
        say(f"  {model:12} {kind:10} samples {errors}")
    if not rows:
        say("  none: the folder has no block at tensor_parallel 1 that could be compared")
        return {"blocks": 0, "updates, predicted / measured": updates(measured)}
    errors = [abs(row.error(kind_of(row))) for row in rows]
    ratio, where = worst_ratio(rows)
    held = hold_out(rows)
    say(f"  worst {max(errors):.1%}, mean {statistics.fmean(errors):.1%} of {len(rows)} blocks")
    say(f"  ratio of two kinds: worst {ratio:.1%} ({where})")
    for pair, errors_of in held.items():
        say(f"  fitted {pair}: worst {errors_of['worst']:.1%}, mean {errors_of['mean']:.1%}")
    return {
        "blocks": len(rows),
        "worst": round(max(errors), 4),
        "mean": round(statistics.fmean(errors), 4),
        "worst ratio of two kinds": round(ratio, 4),
        "fitted on one model, checked on the other": held,
        "updates, predicted / measured": updates(measured),
    }


def updates(measured: Measurements) -> dict[str, float]:
    """Updates by what Adam launches tensor by tensor, against the measured ones (which hold what
    else the engine does in its step)."""
    work = update_work(
        lambda named: torch.optim.Adam([p for _, p in named], foreach=False), ["weight", "bias"]
    )
    found: dict[str, float] = {}
    for model, by_kind in measured.layers.items():
        shape = MODELS.get(model)
        for name, rows in by_kind.items() if shape is not None else ():
            kind = whale_kind(name)
            times = [row.block[2] for row in rows if row.tensor_parallel == 1 and row.block[2] > 0]
            if kind is None or work is None or not times or (model, name) in measured.wrong_layers:
                continue
            assert shape is not None
            # the folder spreads the whole update evenly over all layers
            total = shape.num_blocks * shape.block_parameters + 2 * shape.embedding_parameters
            predicted = work.seconds(4.0 * total, 12 * shape.num_blocks + 4, kind)
            found[f"{model} on {name}"] = round(
                predicted / (statistics.median(times) * shape.num_layers), 2
            )
    return found


# ---- (b) whole steps


@dataclass(frozen=True)
class StepRow:
    """A measured plan with its simulated step."""

    plan: MeasuredPlan
    parts: StepParts
    unsound: str
    """why its inputs cannot be right; empty: they may be"""

    @cached_property
    def errors(self) -> dict[Overheads, float]:
        """Relative errors of the step under all overheads that are tried."""
        return {more: self.parts.step_s(more) / self.plan.step_s - 1 for more in OVERHEADS}

    @property
    def unfitted(self) -> float:
        return self.errors[Overheads()]


def why_unsound(plan: MeasuredPlan, measured: Measurements) -> str:
    """What in the inputs of a plan contradicts itself; empty where nothing does."""
    if plan.is_suspect:
        return "marked in the folder: it shares a figure with another row that cannot be both"
    for stage in plan.stages:
        for kind, width in set(zip(stage.kinds, stage.tensor_parallel)):
            if (plan.shape.name, kind) in measured.wrong_layers:
                return measured.wrong_layers[plan.shape.name, kind]
            row = measured.row(plan.shape.name, kind, plan.micro_batch, width)
            for other in measured.layers[plan.shape.name][kind]:
                if row is None or other.tensor_parallel != width:
                    continue
                slower = row.block[0] + row.block[1] > other.block[0] + other.block[1]
                if other.micro_batch > row.micro_batch and slower:
                    return (
                        f"a block on {kind} at tensor_parallel {width} takes "
                        f"{1e3 * sum(row.block[:2]):.2f} ms for {row.micro_batch} samples and "
                        f"{1e3 * sum(other.block[:2]):.2f} ms for {other.micro_batch}"
                    )
    for before, after in itertools.pairwise(plan.stages):
        kinds = (before.kinds[0], after.kinds[0])
        links = [measured.between_hosts(*kinds, number) for number in (1, 2, 4, 8)]
        rates = [link.bytes_per_s / 1e9 for link in links if link is not None]
        if rates and max(rates) > CONTRADICTS * min(rates):
            return (
                f"the link between {kinds[0]} and {kinds[1]} carries {min(rates):.2f} GB/s for one "
                f"number of GPUs and {max(rates):.2f} for another"
            )
    return ""


def best_overheads(rows: Sequence[StepRow]) -> Overheads:
    """The overheads with the least mean error on these rows."""
    return min(OVERHEADS, key=lambda more: statistics.fmean(abs(row.errors[more]) for row in rows))


def whole_steps(measured: Measurements) -> dict[str, Any]:
    rows = []
    for entry in measured.plans:
        plan = read_plan(entry)
        if plan is None:
            say(f"{entry['id']}: model {entry['model']} is not known by name, left out")
            continue
        try:
            rows.append(StepRow(plan, step_parts(plan, measured), why_unsound(plan, measured)))
        except ValueError as error:
            say(f"{plan.name}: left out, {error}")
    say("\n(b) whole steps, simulated as the measured runtime works")
    if not rows:
        say("  none: the folder has no plan with layer times and links")
        return {"rows": 0, "sound": 0}
    sound = [row for row in rows if not row.unsound]
    held = {}
    for row in rows:
        others = [other for other in sound if other is not row]
        more = best_overheads(others) if len(others) > 1 else Overheads()
        held[row.plan.name] = row.errors[more]
        say(
            f"  {row.plan.name:34} measured {row.plan.step_s:8.3f} s  unfitted {row.unfitted:+7.1%}"
            f"  leave-one-out {held[row.plan.name]:+7.1%}  {row.unsound and 'unsound'}"
        )
    for row in rows:
        if row.unsound:
            say(f"  unsound: {row.plan.name}: {row.unsound}")
    result: dict[str, Any] = {
        "rows": len(rows),
        "sound": len(sound),
        "mean unfitted, all rows": round(statistics.fmean(abs(row.unfitted) for row in rows), 4),
        "unsound": {row.plan.name: row.unsound for row in rows if row.unsound},
    }
    if not sound:
        say("  no row has sound inputs")
        return result
    unfitted = statistics.fmean(abs(row.unfitted) for row in sound)
    fitted_mean = statistics.fmean(abs(held[row.plan.name]) for row in sound)
    best = best_overheads(sound)
    say(
        f"  {len(sound)} rows with sound inputs: mean error {unfitted:.1%} unfitted, "
        f"{fitted_mean:.1%} leave-one-out (fitted to all: {1e3 * best.message_s:.2f} ms a message, "
        f"{1e3 * best.gradient_sum_s:.0f} ms a sum of gradients)"
    )
    return {
        **result,
        "mean unfitted": round(unfitted, 4),
        "mean leave-one-out": round(fitted_mean, 4),
    }


# ---- peak memory


def peak_memory(measured: Measurements, blocks: dict[str, CapturedBlock]) -> dict[str, Any]:
    """Peak memory by what autograd saves of the captured block, and one number of bytes for each
    site (CUDA context, kernels, NCCL) fitted to its other rows. Plans on GH-96 alone are apart."""
    by_site: dict[tuple[str, bool], list[tuple[MeasuredPlan, float]]] = {}
    for entry in measured.plans:
        plan = read_plan(entry)
        if plan is not None and plan.peak_bytes:
            explained = peak_bytes(plan, blocks[plan.shape.name].saved_bytes())
            kinds = {kind for stage in plan.stages for kind in stage.kinds}
            site = (plan.name.split("/")[0], kinds == {"GH-96"})
            by_site.setdefault(site, []).append((plan, explained))
    say("\npeak memory of the fullest GPU")
    if not by_site:
        say("  none: the folder has no plan with a measured peak")
    worst = 0.0
    apart = {}
    for (_, is_main), rows in by_site.items():
        for plan, explained in rows:
            context = unexplained_bytes([row for row in rows if row[0] is not plan])
            error = (explained + context) / plan.peak_bytes - 1
            note = ""
            if explained > plan.peak_bytes:
                note = "impossible: less was measured than weights and activations have"
            say(
                f"  {plan.name:34} measured {plan.peak_bytes / 1e9:6.2f} GB  explained by tensors "
                f"{explained / 1e9:6.2f}  leave-one-out {error:+6.1%}  {note}"
            )
            if is_main:
                worst = max(worst, abs(error))
            else:
                apart[plan.name] = note or f"{error:+.1%}"
    on_main = sum(len(rows) for (_, is_main), rows in by_site.items() if is_main)
    return {
        "rows on GH-96": on_main,
        "worst on GH-96": round(worst, 4),
        "others, reported apart": apart,
    }


def unexplained_bytes(rows: Sequence[tuple[MeasuredPlan, float]]) -> float:
    """Bytes beside those of tensors with the least largest error on these rows; rows that measured
    less than their tensors have say nothing of it."""
    possible = [(plan.peak_bytes, known) for plan, known in rows if plan.peak_bytes > known]
    if not possible:
        return 0.0

    def worst(more: float) -> float:
        return max(abs((known + more) / peak - 1) for peak, known in possible)

    return min((step * 2e7 for step in range(500)), key=worst)


def margins_of(details: dict[str, Any]) -> dict[str, float]:
    """Each error as a part of what is allowed, of what the folder lets compare."""
    blocks, steps, memory = (details[name] for name in ("blocks", "steps", "memory"))
    margins = {}
    if "worst" in blocks:
        margins["block"] = blocks["worst"] / BLOCK_WITHIN
        margins["ratio of two kinds"] = blocks["worst ratio of two kinds"] / RATIO_WITHIN
        held = blocks["fitted on one model, checked on the other"].values()
        if held:
            margins["the other model"] = max(each["worst"] for each in held) / BLOCK_WITHIN
    if "mean leave-one-out" in steps:
        margins["steps"] = steps["mean leave-one-out"] / STEPS_WITHIN
    if memory["rows on GH-96"]:
        margins["memory"] = memory["worst on GH-96"] / MEMORY_WITHIN
    return margins


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--measurements", type=Path, required=True, help="folder with layers.json")
    measured = Measurements(parser.parse_args().measurements)
    wanted = {*measured.layers, *(plan["model"] for plan in measured.plans)}
    blocks = {name: CapturedBlock.of(MODELS[name]) for name in MODELS if name in wanted}
    details = {
        "blocks": blocks_by_data_sheet(measured, blocks),
        "steps": whole_steps(measured),
        "memory": peak_memory(measured, blocks),
    }
    margins = margins_of(details)
    if not margins:
        sys.exit("real_gpus: nothing in this folder can be compared")
    worst = max(margins.values())
    for name, value in margins.items():
        details[name] = {**details.get(name, {}), "ratio": round(value, 3), "target": 1.0}
    print(
        json.dumps(
            {
                "name": "real_gpus",
                "ratio": round(worst, 3),
                "target": 1.0,
                "ok": worst <= 1.0,
                "details": details,
            }
        )
    )
    sys.exit(0 if worst <= 1.0 else 1)


if __name__ == "__main__":
    main()
