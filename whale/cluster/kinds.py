"""Kinds of devices and what each can do at best: a table of known GPUs, and the name that a real
one is known by.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

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
class Efficiency:
    """How much of a data sheet's figures operations reach. An operation of n bytes and f FLOP takes

    f / (products x FLOP/s) + n / (memory x bytes/s) + n / on_chip_bytes_per_s + operation_s
    """

    products: float = 1.0
    """fraction of the FLOP/s that matrix products reach"""
    memory: float = 1.0
    """fraction of the memory bandwidth that is reached"""
    on_chip_bytes_per_s: float | None = None
    """rate at which the chip itself handles what comes from memory; None: no limit. It is what
    keeps fast memories from being reached as well as slow ones"""
    operation_s: float = 0.0
    """seconds that every operation takes beside its work: launch, and the tail of its kernel"""


EXACT = Efficiency()
"""for figures that were measured"""


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
    efficiency: Efficiency = EXACT
    """how much of these figures operations reach; measured rates and those of a cluster file are
    taken as they are
    """
    is_guess: bool = False
    """made from what the driver says of a device that the table does not know"""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Computed once: searches look up kinds very often. Of numbers alone, whose hashes are the
        same in every process that a kind may be sent to.
        """
        return hash((self.flop_per_s, self.memory_bytes, self.bytes_per_s))

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

    def reached_flop_per_s(self, dtype: str) -> float:
        """FLOP/s that products in this dtype reach."""
        return self.efficiency.products * self.rate(dtype)

    @property
    def reached_bytes_per_s(self) -> float:
        """Bytes per second that operations move from and to memory."""
        return 1.0 / self.byte_s

    @cached_property
    def byte_s(self) -> float:
        """Seconds for each byte that an operation moves."""
        on_chip = self.efficiency.on_chip_bytes_per_s
        return 1.0 / (self.efficiency.memory * self.bytes_per_s) + (1.0 / on_chip if on_chip else 0)

    @property
    def has_tf32(self) -> bool:
        """Whether float32 products may run in TF32 here."""
        return self.tf32_flop_per_s is not None


# How much of a data sheet is reached: four constants for all GPUs, fitted to the times of 43 blocks
# (OPT-350 and GPT-Neo-2.7 at 1 to 32 samples) on seven kinds that the authors of Sailor (SOSP'25)
# measured and published; docs/costs.md says how far each of them is off, benchmarks/real_gpus.py
# computes it again. The makers say nothing of it.
PRODUCTS_REACH = 0.91
MEMORY_REACHES = 0.91
ON_CHIP_BYTES_PER_S = 6.9e12
OPERATION_S = 10e-6
TYPICAL = Efficiency(PRODUCTS_REACH, MEMORY_REACHES, ON_CHIP_BYTES_PER_S, OPERATION_S)

# Two kinds that the same measurements show to be off by more than 5 %, as a factor of what memory
# reaches: the 80 GB form of the A100 (2,039 GB/s by its data sheet, hardly faster than the 40 GB
# form in fact), and the RTX 2080 Ti.
_MEMORY_FACTOR = {"A100-80GB": 0.85, "RTX-2080-Ti": 1.1}


# Peak figures of the makers' data sheets, for the SXM form where there is one, dense (half of a
# figure with sparsity). Half precision is with sums in float32, as torch asks for. "GB" is read as
# 10^9 bytes: a little less than the boards really have, which leaves memory for the driver.
# TFLOPS in float32 / TF32 / bfloat16 / float16:
#   P100         "NVIDIA Tesla P100" data sheet (SXM2): 10.6 / - / - / 21.2 (ordinary cores),
#                16 GB HBM2, 732 GB/s
#   V100         "NVIDIA V100" data sheet, January 2020 (SXM2): 15.7 / - / - / 125,
#                16 or 32 GB HBM2, 900 GB/s
#   T4           "NVIDIA T4" data sheet: 8.1 / - / - / 65, 16 GB GDDR6; 320 GB/s (256 bit x 10 Gb/s)
#   Titan-RTX    "NVIDIA Turing" white paper, TU102: 16.3 / - / - / 130.5, 24 GB GDDR6, 672 GB/s
#   RTX-2080-Ti  the same, reference clock: 13.4 / - / - / 53.8, 11 GB GDDR6, 616 GB/s
#   A10          "NVIDIA A10" data sheet: 31.2 / 62.5 / 125 / 125, 24 GB GDDR6, 600 GB/s
#   A40          "NVIDIA A40" data sheet: 37.4 / 74.8 / 149.7 / 149.7, 48 GB GDDR6, 696 GB/s
#   L4           "NVIDIA L4" data sheet: 30.3 / 60 / 121 / 121, 24 GB GDDR6, 300 GB/s
#   L40S         "NVIDIA L40S" data sheet: 91.6 / 183 / 362 / 362, 48 GB GDDR6, 864 GB/s
#   A100         "NVIDIA A100" data sheet (SXM4): 19.5 / 156 / 312 / 312;
#                40 GB HBM2, 1,555 GB/s; 80 GB HBM2e, 2,039 GB/s
#   H100         "NVIDIA H100" data sheet (SXM5): 67 / 494.5 / 989.5 / 989.5, 80 GB HBM3, 3.35 TB/s
#   H200         "NVIDIA H200" data sheet (SXM): as H100, 141 GB HBM3e, 4.8 TB/s
#   GH200        "NVIDIA GH200 Grace Hopper Superchip" data sheet: GPU as H100,
#                96 GB HBM3, 4 TB/s (the form with 144 GB HBM3e is another kind)
#   RTX-3060     "NVIDIA Ampere GA106", 12 GB form: 12.7 / 12.7 / 25.5 / 25.5, GDDR6, 360 GB/s
#   RTX-3080     "NVIDIA Ampere GA102" white paper: 29.8 / 29.8 / 59.5 / 59.5, 10 GB, 760 GB/s
#   RTX-3090     the same: 35.6 / 35.6 / 71 / 71, 24 GB GDDR6X, 936 GB/s
#   RTX-4080     "NVIDIA Ada" white paper: 48.7 / 48.7 / 97.5 / 97.5, 16 GB GDDR6X, 717 GB/s
#   RTX-4090     the same: 82.6 / 82.6 / 165.2 / 165.2, 24 GB GDDR6X, 1,008 GB/s
#   RTX-5090     "NVIDIA RTX Blackwell" white paper: 104.8 / 104.8 / 209.5 / 209.5,
#                32 GB GDDR7, 1,792 GB/s
#   MI250        "AMD Instinct MI250" data sheet, of which torch sees two devices; one of them:
#                45.3 (matrix cores) / - / 181 / 181, 64 GB HBM2e, 1,638 GB/s
#   MI300X       "AMD Instinct MI300X" data sheet: 163.4 / 653.7 / 1307.4 / 1307.4,
#                192 GB HBM3, 5.3 TB/s
#   CPU          not a data sheet: one core with AVX2 at 3 GHz (2 units x 8 lanes x 2 FLOP x 3 GHz
#                = 96 GFLOPS) with 4 GB and 10 GB/s, about what one rank has on a laptop
def _kind(
    name: str,
    tflop_per_s: tuple[float, float | None, float | None, float | None],
    memory_gb: int,
    gb_per_s: float,
) -> DeviceKind:
    fp32, tf32, bf16, fp16 = (None if rate is None else rate * TERA for rate in tflop_per_s)
    assert fp32 is not None
    reached = EXACT if name == "CPU" else TYPICAL
    factor = _MEMORY_FACTOR.get(name, 1.0)
    return DeviceKind(
        name,
        fp32,
        memory_gb * GIGA,
        gb_per_s * GIGA,
        tf32,
        bf16,
        fp16,
        efficiency=replace(reached, memory=factor * reached.memory),
    )


_KINDS = (
    _kind("P100", (10.6, None, None, 21.2), 16, 732),
    _kind("V100-16GB", (15.7, None, None, 125), 16, 900),
    _kind("V100-32GB", (15.7, None, None, 125), 32, 900),
    _kind("T4", (8.1, None, None, 65), 16, 320),
    _kind("Titan-RTX", (16.3, None, None, 130.5), 24, 672),
    _kind("RTX-2080-Ti", (13.4, None, None, 53.8), 11, 616),
    _kind("A10", (31.2, 62.5, 125, 125), 24, 600),
    _kind("A40", (37.4, 74.8, 149.7, 149.7), 48, 696),
    _kind("L4", (30.3, 60, 121, 121), 24, 300),
    _kind("L40S", (91.6, 183, 362, 362), 48, 864),
    _kind("A100-40GB", (19.5, 156, 312, 312), 40, 1555),
    _kind("A100-80GB", (19.5, 156, 312, 312), 80, 2039),
    _kind("H100", (67, 494.5, 989.5, 989.5), 80, 3350),
    _kind("H200", (67, 494.5, 989.5, 989.5), 141, 4800),
    _kind("GH200", (67, 494.5, 989.5, 989.5), 96, 4000),
    _kind("RTX-3060", (12.7, 12.7, 25.5, 25.5), 12, 360),
    _kind("RTX-3080", (29.8, 29.8, 59.5, 59.5), 10, 760),
    _kind("RTX-3090", (35.6, 35.6, 71, 71), 24, 936),
    _kind("RTX-4080", (48.7, 48.7, 97.5, 97.5), 16, 717),
    _kind("RTX-4090", (82.6, 82.6, 165.2, 165.2), 24, 1008),
    _kind("RTX-5090", (104.8, 104.8, 209.5, 209.5), 32, 1792),
    _kind("MI250", (45.3, None, 181, 181), 64, 1638),
    _kind("MI300X", (163.4, 653.7, 1307.4, 1307.4), 192, 5300),
    _kind("CPU", (0.096, None, None, None), 4, 10),
)
DEVICE_KINDS = {kind.name: kind for kind in _KINDS}


def device_kind(name: str, own: Mapping[str, DeviceKind] | None = None) -> DeviceKind:
    """The kind of that name, upper or lower case: one of `own` or a built-in one."""
    by_lower_name = {kind.name.lower(): kind for kind in (*_KINDS, *(own or {}).values())}
    kind = by_lower_name.get(name.lower())
    if kind is None:
        # `v100` means one of the V100s
        longer = [known for known in by_lower_name if known.startswith(name.lower())]
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
# tell kinds apart. Boards that share such a word and are another kind (A100X, RTX 3090 Ti,
# RTX 4090 Laptop, H100 NVL) are not in the table and must not be taken for it.
_WORDS: dict[str, tuple[set[str], ...]] = {
    "P100": ({"P100"},),
    "V100": ({"V100"}, {"V100S"}),
    "T4": ({"T4"},),
    "Titan-RTX": ({"TITAN", "RTX"},),
    "RTX-2080-Ti": ({"2080", "TI"},),
    "A10": ({"A10"},),
    "A40": ({"A40"},),
    "L4": ({"L4"},),
    "L40S": ({"L40S"},),
    "A100": ({"A100"},),
    "H100": ({"H100"},),
    "H200": ({"H200"},),
    "GH200": ({"GH200"},),
    "RTX-3060": ({"RTX", "3060"},),
    "RTX-3080": ({"RTX", "3080"},),
    "RTX-3090": ({"3090"},),
    "RTX-4080": ({"RTX", "4080"},),
    "RTX-4090": ({"4090"},),
    "RTX-5090": ({"RTX", "5090"},),
    "MI250": ({"MI250"}, {"MI250X/MI250"}),
    "MI300X": ({"MI300X"},),
}
_OTHER_BOARDS = {"TI", "D", "LAPTOP", "NVL", "SUPER", "MIG"}


def recognise(driver_name: str, memory_bytes: int) -> DeviceKind | None:
    """The built-in kind of a device by its driver's name, with the memory that it really has; None
    when it is no known kind.
    """
    words = set(driver_name.upper().replace("-", " ").split())
    for family, known_as in _WORDS.items():
        own = next((required for required in known_as if required <= words), None)
        if own is None or (words - own) & _OTHER_BOARDS:
            continue
        members = [kind for kind in _KINDS if f"{kind.name}-".startswith(f"{family}-")]
        nearest = min(members, key=lambda kind: abs(kind.memory_bytes - memory_bytes))
        return replace(nearest, memory_bytes=memory_bytes)
    return None
