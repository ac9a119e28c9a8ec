"""Measured times of operations, for any size: log-log between the points that `whale profile`
measured.

    below the smallest point    its time, which is overhead
    between two points          a straight line of the logarithms of work and time
    above the largest           in proportion to the work

Products were measured on square matrices. One of the same work that is not square moves more bytes
(a few rows times a large weight): they take their time at the memory's bandwidth besides.

An operation that was not measured itself goes by one that does about the same to memory
(`STANDS_FOR`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

from whale.cluster.kinds import DeviceKind

STANDS_FOR = {
    "linear": (
        "addmm",
        "mm",
        "einsum",
        "bilinear",
        "addbmm",
        "tensordot",
        "lstm",
        "gru",
        "rnn_tanh",
        "rnn_relu",
    ),
    "matmul": ("bmm", "baddbmm", "_grouped_mm", "expert_mm", "mv", "dot"),
    "conv2d": ("conv1d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    "mul": ("div", "where", "masked_fill", "dropout", "native_dropout"),
    "relu": (
        "neg",
        "clone",
        "_to_copy",
        "to",
        "type_as",
        "abs",
        "sign",
        "ge",
        "le",
        "gt",
        "lt",
        "eq",
        "ne",
        "hardtanh",
        "leaky_relu",
    ),
    "gelu": ("erf", "exp", "log", "sigmoid", "silu", "softplus", "mish", "logsigmoid", "elu"),
    "tanh": ("sin", "cos"),
    "pow": ("sqrt", "rsqrt", "reciprocal"),
    "softmax": ("log_softmax", "_safe_softmax", "logsumexp"),
    "layer_norm": ("rms_norm", "group_norm", "native_layer_norm"),
    "batch_norm": ("_native_batch_norm_legit", "native_batch_norm", "instance_norm"),
    "sum": (
        "mean",
        "amax",
        "max",
        "min",
        "argmax",
        "var",
        "norm",
        "linalg_vector_norm",
        "avg_pool2d",
        "adaptive_avg_pool2d",
    ),
    "max_pool2d": ("max_pool2d_with_indices", "max_pool1d"),
    "cross_entropy_loss": ("nll_loss", "nll_loss_nd", "mse_loss", "l1_loss"),
    "embedding": ("index", "gather", "index_select", "take_along_dim"),
    "transposed_copy": (
        "contiguous",
        "cat",
        "stack",
        "pad",
        "constant_pad_nd",
        "repeat",
        "roll",
        "flip",
    ),
}
"""measured operation -> others that are taken to need its time"""
OTHERS = "add"
"""for whatever is in no list: it moves bytes"""
VIEW = "view"
BATCH_NORM_OVER_DEVICES = "batch_norm_over_devices"
"""with the statistics of all ranks"""
WITHOUT_STATE = "sgd"
WITH_TWO_STATES = "adamw"
"""updates of one parameter of so many bytes, by an optimizer without state and by one that keeps
two averages
"""
PRODUCT = "linear"
_MEASURED_AS = {other: name for name, others in STANDS_FOR.items() for other in others}


@dataclass(frozen=True)
class Curve:
    """Times of one operation over its work, in logarithms."""

    work: tuple[float, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]

    def seconds(self, work: float, backward: bool) -> float:
        times = self.backward if backward else self.forward
        if work <= 0:
            return math.exp(times[0])
        at = math.log(work)
        place = bisect_right(self.work, at)
        if place == 0:
            return math.exp(times[0])
        if place == len(self.work):
            return math.exp(times[-1] + at - self.work[-1])
        share = (at - self.work[place - 1]) / (self.work[place] - self.work[place - 1])
        return math.exp(times[place - 1] + share * (times[place] - times[place - 1]))


@lru_cache(maxsize=256)
def curves(kind: DeviceKind) -> dict[str, Curve]:
    """Curves of a kind that was measured; empty for figures of a data sheet."""
    points: dict[str, dict[float, tuple[float, float]]] = {}
    for point in kind.operations:
        points.setdefault(point.name, {})[point.work] = (
            math.log(point.forward_s),
            math.log(point.backward_s),
        )
    found = {}
    for name, by_work in points.items():
        works = sorted(by_work)
        forward, backward = ([by_work[work][place] for work in works] for place in (0, 1))
        found[name] = Curve(
            tuple(math.log(work) for work in works), tuple(forward), tuple(backward)
        )
    return found


def measured_seconds(
    kind: DeviceKind, operation: str, flop: float, moved_bytes: float, backward: bool
) -> float | None:
    """Seconds of one call of `aten.linear` or the like; None where nothing was measured that could
    stand for it.
    """
    known = curves(kind)
    if not known:
        return None
    name = operation.removeprefix("aten.")
    if not flop and not moved_bytes:
        name = VIEW
    elif name not in known:
        name = _MEASURED_AS.get(name, OTHERS)
    curve = known.get(name)
    if curve is None:
        return None
    seconds = curve.seconds(flop or moved_bytes, backward)
    if name == PRODUCT and flop:
        square_bytes = 3 * 4.0 * (flop / 2) ** (2 / 3)
        seconds += max(0.0, moved_bytes - square_bytes) / kind.bytes_per_s * (2 if backward else 1)
    return seconds


def update_costs(kind: DeviceKind, state_ratio: float) -> tuple[float, float] | None:
    """Seconds of an update for each parameter, and for each byte of parameters, with `state_ratio`
    bytes of state for each of them.

    None where no update was measured. One that was measured at one size only takes no time beside
    its bytes.
    """
    found = []
    for name in (WITHOUT_STATE, WITH_TWO_STATES):
        points = sorted(
            (point.work, point.forward_s) for point in kind.operations if point.name == name
        )
        if not points:
            return None
        (small, small_s) = points[0]
        (large, large_s) = points[-1]
        byte_s = max(0.0, large_s - small_s) / (large - small) if large > small else small_s / small
        found.append((max(0.0, small_s - byte_s * small), byte_s))
    (call_s, byte_s), (call_2_s, byte_2_s) = found
    share = state_ratio / 2
    return call_s + share * (call_2_s - call_s), byte_s + share * (byte_2_s - byte_s)
