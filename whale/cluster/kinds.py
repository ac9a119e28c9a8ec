"""Kinds of devices and what each can do at best: a table of known GPUs, and the name that a real
one is known by.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace

GIGA = 10**9
TERA = 10**12

DTYPES = ("fp32", "tf32", "bf16", "fp16")
"""what a rate may be given for; tf32 is float32 where `allow_tf32` of torch is set"""


@dataclass(frozen=True)
class MatmulRate:
    """One measured point: square matrices of `size` x `size`."""

    dtype: str
    size: int
    flop_per_s: float


@dataclass(frozen=True)
class OperationPoint:
    """One measured operation at one size."""

    name: str
    """`linear`"""
    work: float
    """FLOP of a product, bytes that any other operation moves"""
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class DeviceKind:
    """What one kind of device can do at best."""

    name: str
    flop_per_s: float
    """float32 multiply-adds on the ordinary cores (no tensor cores, no TF32), two FLOP each"""
    memory_bytes: int
    """0: not known, so nothing is refused for want of memory"""
    bytes_per_s: float
    """memory bandwidth"""
    tf32_flop_per_s: float | None = None
    """None in these three: no hardware for it, so it runs at the rate of float32"""
    bf16_flop_per_s: float | None = None
    fp16_flop_per_s: float | None = None
    matmul_rates: tuple[MatmulRate, ...] = ()
    """measured by `whale profile`; empty for figures of a data sheet"""
    operations: tuple[OperationPoint, ...] = ()
    """the same for operations in float32, forward and backward; where they are, the cost model goes
    by them
    """

    @property
    def is_cpu(self) -> bool:
        """Not an accelerator: whatever a rank does, it does on the core that computes."""
        return self.name.upper().startswith("CPU")

    def rate(self, dtype: str) -> float:
        """FLOP/s of matrix products in `fp32`, `tf32`, `bf16` or `fp16`."""
        own: Mapping[str, float | None] = {
            "fp32": self.flop_per_s,
            "tf32": self.tf32_flop_per_s,
            "bf16": self.bf16_flop_per_s,
            "fp16": self.fp16_flop_per_s,
        }
        if dtype not in own:
            raise ValueError(f"no rate for {dtype!r}; known are {', '.join(DTYPES)}")
        return own[dtype] or self.flop_per_s


# Peak figures of the makers' data sheets, for the SXM form where there is one, dense (half of a
# figure with sparsity). Half precision is with sums in float32, as torch asks for. "GB" is read as
# 10^9 bytes: a little less than the boards really have, which leaves memory for the driver.
# TFLOPS in float32 / TF32 / bfloat16 / float16:
#   P100       "NVIDIA Tesla P100" data sheet (SXM2): 10.6 / - / - / 21.2 (ordinary cores),
#              16 GB HBM2, 732 GB/s
#   V100       "NVIDIA V100" data sheet, January 2020 (SXM2): 15.7 / - / - / 125,
#              16 or 32 GB HBM2, 900 GB/s
#   T4         "NVIDIA T4" data sheet: 8.1 / - / - / 65, 16 GB GDDR6; 320 GB/s (256 bit x 10 Gb/s)
#   A10        "NVIDIA A10" data sheet: 31.2 / 62.5 / 125 / 125, 24 GB GDDR6, 600 GB/s
#   L4         "NVIDIA L4" data sheet: 30.3 / 60 / 121 / 121, 24 GB GDDR6, 300 GB/s
#   A100       "NVIDIA A100" data sheet (SXM4): 19.5 / 156 / 312 / 312;
#              40 GB HBM2, 1,555 GB/s; 80 GB HBM2e, 2,039 GB/s
#   H100       "NVIDIA H100" data sheet (SXM5): 67 / 494.5 / 989.5 / 989.5, 80 GB HBM3, 3.35 TB/s
#   RTX-3090   "NVIDIA Ampere GA102" white paper: 35.6 / 35.6 / 71 / 71, 24 GB GDDR6X, 936 GB/s
#   RTX-4090   "NVIDIA Ada" white paper: 82.6 / 82.6 / 165.2 / 165.2, 24 GB GDDR6X, 1,008 GB/s
#   CPU        not a data sheet: one core with AVX2 at 3 GHz (2 units x 8 lanes x 2 FLOP x 3 GHz
#              = 96 GFLOPS) with 4 GB and 10 GB/s, about what one rank has on a laptop
def _kind(
    name: str,
    tflop_per_s: tuple[float, float | None, float | None, float | None],
    memory_gb: int,
    gb_per_s: float,
) -> DeviceKind:
    fp32, tf32, bf16, fp16 = (None if rate is None else rate * TERA for rate in tflop_per_s)
    assert fp32 is not None
    return DeviceKind(name, fp32, memory_gb * GIGA, gb_per_s * GIGA, tf32, bf16, fp16)


_KINDS = (
    _kind("P100", (10.6, None, None, 21.2), 16, 732),
    _kind("V100-16GB", (15.7, None, None, 125), 16, 900),
    _kind("V100-32GB", (15.7, None, None, 125), 32, 900),
    _kind("T4", (8.1, None, None, 65), 16, 320),
    _kind("A10", (31.2, 62.5, 125, 125), 24, 600),
    _kind("L4", (30.3, 60, 121, 121), 24, 300),
    _kind("A100-40GB", (19.5, 156, 312, 312), 40, 1555),
    _kind("A100-80GB", (19.5, 156, 312, 312), 80, 2039),
    _kind("H100", (67, 494.5, 989.5, 989.5), 80, 3350),
    _kind("RTX-3090", (35.6, 35.6, 71, 71), 24, 936),
    _kind("RTX-4090", (82.6, 82.6, 165.2, 165.2), 24, 1008),
    _kind("CPU", (0.096, None, None, None), 4, 10),
)
DEVICE_KINDS = {kind.name: kind for kind in _KINDS}


def device_kind(name: str, own: Mapping[str, DeviceKind] | None = None) -> DeviceKind:
    """The kind of that name, upper or lower case: one of `own` or a built-in one."""
    by_lower_name = {kind.name.lower(): kind for kind in (*_KINDS, *(own or {}).values())}
    kind = by_lower_name.get(name.lower())
    if kind is None:
        longer = [
            known for known in by_lower_name if known.startswith(name.lower())
        ]  # `v100` means one of the V100s
        nearest = longer or difflib.get_close_matches(name.lower(), by_lower_name, n=2, cutoff=0.4)
        offer = " or ".join(repr(by_lower_name[near].name) for near in nearest)
        hint = (
            f"did you mean {offer}?"
            if offer
            else f"known are {', '.join(kind.name for kind in by_lower_name.values())}"
        )
        raise ValueError(f"unknown device kind {name!r}; {hint}")
    return kind


# Names as drivers give them ("Tesla V100-SXM2-32GB", "NVIDIA GeForce RTX 3090"), by the words that
# tell kinds apart. Boards that share
# such a word and are another kind (A100X, RTX 3090 Ti, RTX 4090 Laptop, H100 NVL) are not in the
# table and must not be taken for it.
_WORDS = {
    "P100": ("P100",),
    "V100": ("V100", "V100S"),
    "T4": ("T4",),
    "A10": ("A10",),
    "L4": ("L4",),
    "A100": ("A100",),
    "H100": ("H100",),
    "RTX-3090": ("3090",),
    "RTX-4090": ("4090",),
}
_OTHER_BOARDS = {"TI", "D", "LAPTOP", "NVL", "SUPER", "MIG"}


def recognise(driver_name: str, memory_bytes: int) -> DeviceKind | None:
    """The built-in kind of a device by its driver's name, with the memory that it really has; None
    when it is no known kind.
    """
    words = set(driver_name.upper().replace("-", " ").split())
    if words & _OTHER_BOARDS:
        return None
    for family, known_as in _WORDS.items():
        if words & set(known_as):
            members = [
                kind for kind in _KINDS if kind.name == family or kind.name.startswith(f"{family}-")
            ]
            nearest = min(members, key=lambda kind: abs(kind.memory_bytes - memory_bytes))
            return replace(nearest, memory_bytes=memory_bytes)
    return None
