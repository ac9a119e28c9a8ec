"""Which precision the cards of a cluster want, by their rates of matrix products."""

from __future__ import annotations

from whale.planning.problem import HALF_PRECISIONS, Problem
from whale.units import compared

PRECISIONS = ("fp32", *HALF_PRECISIONS)
WORTH_IT = 1.05
"""times the rate: less is not worth a change"""
STEPS_DIFFER = (
    "Peak rates are not steps: something else (memory, messages, the slowest stage) may limit the "
    "step. Set the precision and run `whale plan` to see its step."
)


def precision_notes(problem: Problem) -> list[str]:
    """Sentences on each kind that another precision than the job's is faster on, then on all
    devices together, since all ranks compute in one. They compare peak rates, not steps.
    """
    asked = problem.dtype
    devices = problem.cluster.devices
    wanted = []
    notes = []
    for kind in dict.fromkeys(device.kind for device in devices):
        rates = {name: kind.rate(name) for name in (asked, *PRECISIONS)}
        best = max(rates, key=lambda name: rates[name])
        if rates[best] <= WORTH_IT * rates[asked]:
            continue
        wanted.append(best)
        is_slow = asked in HALF_PRECISIONS and rates[asked] <= kind.flop_per_s
        slow = " (it has no tensor cores for it)" if is_slow else ""
        notes.append(
            f"{kind.name}: {asked}{slow} multiplies at {_tera(rates[asked])} TFLOP/s; "
            f'"precision": "{best}" at {_tera(rates[best])}, '
            f"a peak rate of products {compared(rates[best] / rates[asked], 'higher', 'lower')}"
        )
    totals = {}
    for name in (*PRECISIONS, "tf32"):
        totals[name] = sum(device.kind.rate(name) for device in devices)
    has_tf32 = asked == "fp32" and all(device.kind.has_tf32 for device in devices)
    if has_tf32 and totals["tf32"] > WORTH_IT * totals["fp32"]:
        notes.append(
            'float32 products in TF32, torch.set_float32_matmul_precision("high"): '
            f"a peak rate of products "
            f"{compared(totals['tf32'] / totals['fp32'], 'higher', 'lower')}, all devices together"
        )
    best = max(PRECISIONS, key=lambda name: totals[name])
    if len(set(wanted)) > 1 or (wanted and best not in wanted):
        rates_of_all = ", ".join(f"{name} {_tera(totals[name])}" for name in PRECISIONS)
        notes.append(
            f'All ranks compute in one precision: "{best}" has the highest peak rate of products, '
            f"all devices together (TFLOP/s: {rates_of_all})"
        )
    if notes:
        notes.append(STEPS_DIFFER)
    return notes


def _tera(rate: float) -> str:
    return f"{rate / 1e12:.3g}"
