"""Random small models, written as Python source, and random plans for them; each follows from its
seed alone.

A model is a chain of two to four blocks. A block gets `h` (batch, LENGTH, WIDTH), the batch's
`ids` and `mask`, and what blocks before it left over (of any type: such values cross cuts). Inside,
every line applies one operation of `OPERATIONS` to values that are there. Lines are run as they are
written: one that torch refuses, or that gives something too large or not finite, is left out.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_SAMPLES = 5
"""while lines are tried: a size that no other dim has"""
LENGTH = 4
WIDTH = 6
NUM_WORDS = 7
NUM_CLASSES = 3
MOST_NUMBERS = 1500
"""of one value"""

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.set_default_dtype(torch.float64)
"""


@dataclass
class Line:
    """What one operation adds to a block."""

    text: str
    """statements; `{out}` is the name of the result"""
    init: tuple[str, ...] = ()
    """statements of `__init__`"""
    is_stateful: bool = False
    """it changes a buffer in a way that depends on the number of micro-batches"""


@dataclass
class Block:
    """A block while it is written: its lines, and the values and modules of a trial run."""

    rng: random.Random
    init: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)
    module: nn.Module = field(default_factory=nn.Module)
    is_stateful: bool = False
    num_attributes: int = 0
    num_values: int = 0

    def attribute(self) -> str:
        self.num_attributes += 1
        return f"self.a{self.num_attributes}"

    def pick(self, kind: str, at_least: int = 1, at_most: int = 4) -> str:
        """A value of this kind with that many dims, later ones more often. KeyError: none."""
        found = [
            name
            for name, value in self.values.items()
            if kind_of(value) == kind and at_least <= value.ndim <= at_most
        ]
        if not found:
            raise KeyError(kind)
        return found[-1] if self.rng.random() < 0.5 else self.rng.choice(found)

    def like(self, name: str) -> str:
        """Another value of the same shape and kind, or the same one."""
        value = self.values[name]
        return self.rng.choice(
            [
                other
                for other, tensor in self.values.items()
                if tensor.shape == value.shape and kind_of(tensor) == kind_of(value)
            ]
        )

    def dim(self, name: str) -> int:
        """A dim of the value that is not the batch."""
        rank = self.values[name].ndim
        if rank < 2:
            raise KeyError(name)
        return self.rng.choice([*range(1, rank), -1])

    def add(self, line: Line) -> bool:
        """Tries the line and keeps it when it works."""
        self.num_values += 1
        name = f"v{self.num_values}"
        text = line.text.replace("{out}", name)
        names = {"torch": torch, "nn": nn, "F": F, "self": self.module}
        scope: dict[str, Any] = dict(self.values)
        try:
            for statement in line.init:
                exec(statement, names)
            exec(text, names, scope)
        except Exception:
            return False
        if not is_usable(scope.get(name)):
            return False
        self.init += line.init
        self.lines += text.splitlines()
        self.values[name] = scope[name].detach()
        self.is_stateful = self.is_stateful or line.is_stateful
        return True


def kind_of(value: Tensor) -> str:
    if value.dtype == torch.bool:
        return "bool"
    if value.is_complex():
        return "complex"
    return "real" if value.is_floating_point() else "int"


def is_usable(value: Any) -> bool:
    """Whether a value may be worked on: a tensor with the batch in front, finite and small."""
    if not isinstance(value, Tensor) or not 1 <= value.ndim <= 4 or value.shape[0] != NUM_SAMPLES:
        return False
    if not 0 < value.numel() <= MOST_NUMBERS or value.dtype in (torch.float32, torch.complex64):
        return False
    return kind_of(value) in ("bool", "int") or bool((value.abs() < 100).all())


# ---- operations: each gives a line, or raises KeyError when nothing fits

Operation = Callable[[Block], Line]

PLAIN = """torch.tanh({a}) | torch.sigmoid({a}) | F.gelu({a}) | F.relu({a}) | torch.sin({a}) | F.silu({a})
torch.exp(-{a}.square()) | {a} * 0.5 | -{a} | {a}.abs() | F.softplus({a}) | {a}.clamp(-1.0, 1.0) | {a}.clone()
{a}.sign() * {a} | F.leaky_relu({a}, 0.1) | torch.sqrt({a}.square() + 1) | 1 / (1 + {a}.square()) | {a}.contiguous()
{a}.detach() * {a} | {a} + {a}.detach() | torch.pow({a}, 3) * 0.1 | torch.erf({a}) | F.dropout({a}, 0.0) | F.elu({a})
{a}.type_as({a}) | {a}.to(torch.float64) | torch.atan({a}) | 3 - {a} | torch.lerp({a}, {b}, 0.3) | {a} * 1.0
{a} + {b} | {a} - {b} | {a} * {b} | torch.maximum({a}, {b}) | torch.where({a} > {b}, {a}, 0.5 * {b})
torch.addcmul({a}, {b}, {b}, value=0.5) | torch.atan2({a}, {b}.abs() + 1) | {a} / (1 + {b}.abs()) | torch.zeros_like({a}) + {a}
torch.where(torch.isfinite({a}), {a}, 0.0) | {a}.masked_fill({a} > 0.5, 0.25) | torch.nan_to_num({a}) | F.hardtanh({a})
{a}.mul(2).sub({b}, alpha=0.5) | {a}.new_ones({a}.shape) * {b} | torch.full_like({a}, 0.5) * {a} | F.threshold({a}, 0.1, 0.0)"""
ALONG = """torch.softmax({a}, {d}) | F.log_softmax({a}, {d}) | {a}.cumsum({d}) * 0.3 | {a}.flip({d}) | {a}.roll(1, {d})
{a} - {a}.mean({d}, keepdim=True) | F.normalize({a}, dim={d}) | {a}.sort({d}).values | {a}.sum({d}) | {a}.mean({d}, keepdim=True)
{a}.amax({d}) | {a}.amin({d}, keepdim=True) | {a}.logsumexp({d}) | {a}.var({d}, unbiased=False) | {a}.max({d}).values
torch.linalg.vector_norm({a} + 0.1, dim={d}) | {a}.topk(2, dim={d}).values | {a}.prod({d}) | {a}.mean({d}) | {a} / (1 + {a}.abs().sum({d}, keepdim=True))
F.softmin({a}, {d}) | {a}.median({d}).values | {a}.std({d}, keepdim=True) | torch.logcumsumexp({a}, {d}) | {a}.kthvalue(2, dim={d}).values
{a}.select({d}, 0) | {a}.narrow({d}, 0, 2) | {a}.unsqueeze({d}) | {a}.repeat_interleave(2, dim={d}) | torch.cat([{a}, {b}], {d})
torch.stack([{a}, {b}], {d}) | torch.cat({a}.split(2, dim={d})[::-1], {d}) | {a}.unbind({d})[0] | torch.stack({a}.unbind({d}), 1)
torch.cat({a}.chunk(2, {d}), 1) | {a}.movedim({d}, 1) | {a}.index_select({d}, torch.tensor([1, 0])) | {a}.diff(dim={d}) | F.glu({a}, {d})
{a}.sum({d}, keepdim=True).expand_as({a}) | {a}.unfold({d}, 2, 1) | torch.cummax({a}, {d}).values | {a}.tensor_split(2, {d})[0]
{a}.unsqueeze({d}).expand(*[-1 if s == 1 else s for s in {a}.unsqueeze({d}).shape]) | {a}.mean(tuple(range(1, {a}.ndim)))"""
SHAPES = """{a}.flatten(1) | {a}.reshape({a}.shape[0], -1) | {a}.view({a}.size(0), -1) | {a}.transpose(1, 2) | {a}[:, 0] | {a}[:, 1:]
{a}[..., ::2] | {a}.transpose(1, -1).contiguous() | F.pad({a}, (1, 1)) | {a}[:, :, None] | {a}.unflatten(1, (2, -1)) | {a}.squeeze(1)
torch.diagonal({a}, dim1=1, dim2=2) | {a}.transpose(0, 1).tanh().transpose(0, 1) | {a}.permute(2, 0, 1).mul(2).permute(1, 2, 0)
{a}.flatten(0, 1).sin().unflatten(0, ({a}.shape[0], -1)) | {a}.tril() | {a}.triu(1) | torch.tril({a} @ {a}.transpose(1, 2))
{a}.repeat(1, 2, 1) | {a}[:, [1, 0]] | {a}.flatten(-2) | torch.rot90({a}, 1, (1, 2)) | {a}[:, -1:] | {a}.clone()
{a}.reshape(-1).cos().reshape({a}.shape) | {a}.mT | {a}.reshape(-1, {a}.shape[-1]).softmax(-1).view({a}.shape) | {a}.swapaxes(1, 2)"""
PRODUCTS = """torch.bmm({a}, {b}.transpose(1, 2)) * 0.3 | {a} @ {b}.mT * 0.3 | torch.einsum("bij,bkj->bik", {a}, {b}) * 0.3
F.scaled_dot_product_attention({a}, {b}, {b}) | torch.einsum("bij,bij->bi", {a}, {b}) | torch.einsum("bij->bji", {a})
torch.matmul({a}.softmax(-1), {b}.softmax(1).transpose(1, 2)) | torch.cdist({a}, {b} + 1) * 0.2 | torch.baddbmm({a} @ {b}.mT, {a}, {b}.mT) * 0.2
F.cosine_similarity({a}, {b}, dim=-1) | torch.cross({a}[..., :3], {b}[..., :3], dim=-1) | torch.einsum("bi...,bj...->bij", {a}, {b}) * 0.2"""
COMPLEX = """{z}.abs() | {z}.real | {z}.imag | {z}.conj() | torch.view_as_real({z}) | {z} * {z}.conj() | {z} * 0.5j | {z} / (1 + {z}.abs())
{z}.conj().imag | {z} + {z}.conj() | {z}.sum(-1) * 0.3 | {z}.mean(1) | torch.fft.ifft({z}, dim=-1) | {z}.flatten(1) | {z}.transpose(1, -1)
{z} @ {z}.mH * 0.2 | torch.fft.irfft({z}, dim=-1) | {z}.detach() + {z} | torch.cat([{z}, {z}.conj()], 1) | {z}[:, 0] | {z}.angle().cos()
torch.where({z}.real > 0, {z}, 0.5 * {z}) | {z}.square().real.tanh() | {z}.resolve_conj() * 1j | torch.stack([{z}.real, {z}.imag], -1) | {z}.clone()
torch.view_as_complex(torch.view_as_real({z}.resolve_conj()).flip(-1).contiguous()) | {z}.sgn() | torch.tanh({z} * 0.3) | {z}.cumsum(-1) * 0.3 | -{z}"""
TO_COMPLEX = """torch.complex({a}, {b}) | torch.fft.rfft({a}, dim=-1) * 0.4 | torch.fft.fft({a}, dim={d}, norm="ortho") | torch.polar({a}.abs() + 0.1, {b})
torch.view_as_complex({a}.unflatten(-1, (-1, 2)).contiguous()) | {a} * 1j | {a}.to(torch.complex128) | torch.fft.fft2({a}, dim=(1, -1), norm="ortho")"""
WHOLE = """{a}.argmax({d}) | ({a} > 0).sum({d}) | ids % 3 | ids.cumsum(1) | {a}.argsort({d}) | ids.flip(1) | mask.long() + ids | mask.sum(1)
torch.arange(4).expand_as(ids) | {a}.topk(2, dim={d}).indices | torch.where(mask, ids, 0) | torch.bucketize({a}.detach(), torch.linspace(-1.03, 1.03, 4))"""
BOOLEANS = """{a} > 0.013 | mask | ~mask | ids > 3 | ids.eq(ids.flip(1)) | mask & (ids > 2) | {a}.detach() < {b}.detach() - 0.017 | mask.logical_xor(ids > 1)"""
FROM_WHOLE = """{i}.to(torch.float64) * 0.2 | F.one_hot({i} % 4, 4).to(torch.float64) | {i}.double().mean(-1) * 0.1 | {a} * ({i}.double().sum() * 0 + 1)
({i} % 2).to({a}.dtype) | torch.gather({a}, 1, {i}.flatten(1) % {a}.shape[1]) | torch.take_along_dim({a}, {i} % {a}.shape[1], 1)
{a}[torch.arange({a}.shape[0]), {i}.flatten(1)[:, 0] % {a}.shape[1]] | torch.zeros_like({a}).scatter_add(1, {i} % {a}.shape[1], {a})
torch.scatter({a}, 1, {i}[:, :1] % {a}.shape[1], 0.5) | {a}.double() * (1 + {i}.double().flatten(1).mean(1)).reshape(-1, *[1] * ({a}.ndim - 1)) * 0.2"""
FROM_BOOLEANS = """torch.where({c}, {a}, 0.25) | {a}.masked_fill({c}, 0.5) | {c}.to({a}.dtype) * {a} | torch.where({c}, {a}, {b}) | {c}.double().mean(-1)
torch.where({c}.unsqueeze(-1), {a}, {b} * 0.5) | {a}.masked_fill(~{c}.unsqueeze(-1), 0.0) | ({a} * {c}.unsqueeze(-1)).sum(1) / {c}.sum(1, keepdim=True).clamp(min=1)"""
IN_PLACE = """{out}[:, 0] = 0.5 | {out}[..., 1:] += 0.3 | {out}.mul_(0.5) | {out}.add_({b}) | {out}[{out} > 1] = 1.0 | {out}.clamp_(max=0.7)
{out}[:, 0].copy_({out}[:, 1].clone()) | F.relu_({out}) | {out}.transpose(1, 2).add_(0.2) | {out}.masked_fill_({b} > 0.4, 0.0) | {out}.tanh_()
{out}[:, :1].zero_() | {out} *= {b} | {out}.view({out}.shape[0], -1)[:, ::2].mul_(2.0) | {out}[:, -1] = {b}[:, 0] | {out}.flatten(1).sigmoid_()
{out}.unsqueeze(1).sub_(0.1) | {out}.index_fill_(1, torch.tensor([0]), 0.3) | {out}[:, [0, 1]] = 0.1 | {out}.copy_({b} * 2) | {out} += {out}[:, :1].clone()
{out}.index_add_(1, torch.tensor([0]), {b}[:, :1]) | {out}.narrow(1, 0, 1).neg_() | {out}.scatter_(1, {b}[:, :1].detach().argmax(-1, keepdim=True) * 0, 0.2)"""
NO_GRAD = """{a} * 2 | {a}.softmax(-1) | {a}.tanh() | ({a} > 0).double() | {a}.clone().mul_(0.5)"""


def choices(table: str) -> list[str]:
    return [each.strip() for row in table.splitlines() for each in row.split(" | ")]


def from_table(
    table: str, weight: int, at_least: int = 1, at_most: int = 4
) -> tuple[Operation, int]:
    """An operation that takes one of the expressions."""
    found = choices(table)

    def operation(block: Block) -> Line:
        text = block.rng.choice(found)
        given: dict[str, Any] = {}
        if "{z}" in text:
            given["z"] = block.pick("complex", max(2, at_least), at_most)
        if "{i}" in text:
            given["i"] = block.pick("int", 1, 3)
        if "{c}" in text:
            given["c"] = block.pick("bool")
        if "{a}" in text:
            given["a"] = block.pick("real", at_least, at_most)
            given["b"] = block.like(given["a"])
        if "{d}" in text:
            given["d"] = block.dim(given["a"])
        return Line("{out} = " + fill(text, given))

    return operation, weight


def fill(text: str, given: dict[str, Any]) -> str:
    for key, value in given.items():
        text = text.replace("{" + key + "}", str(value))
    return text


def in_place(block: Block) -> Line:
    """A copy, a view of it taken before, and writes to it."""
    a = block.pick("real", 2)
    rng = block.rng
    writes = [
        fill(rng.choice(choices(IN_PLACE)), {"a": a, "b": block.like(a)})
        for _ in range(rng.randint(1, 3))
    ]
    start = rng.choice(["{out} = " + a + ".clone()", "{out} = " + a + " * 1.5"])
    if rng.random() < 0.4:
        return Line(
            "\n".join([start, "w = {out}[:, 0]", *writes, "{out} = {out} + w.unsqueeze(1)"])
        )
    return Line("\n".join([start, *writes]))


def without_gradient(block: Block) -> Line:
    a = block.pick("real", 2)
    text = fill(block.rng.choice(choices(NO_GRAD)), {"a": a})
    return Line("with torch.no_grad():\n    {out} = " + text)


def parameter(block: Block) -> Line:
    """A parameter or buffer of the value's shape without the batch, or of its last dim."""
    rng = block.rng
    is_complex = rng.random() < 0.25
    a = block.pick("complex" if is_complex else "real", 2)
    shape = list(block.values[a].shape[1:] if rng.random() < 0.5 else block.values[a].shape[-1:])
    dtype = ", dtype=torch.complex128" if is_complex else ""
    name = block.attribute()
    made = f"torch.randn({shape}{dtype}) * 0.5"
    frozen = rng.choice(["", "", ", requires_grad=False"])
    init = f"{name} = nn.Parameter({made}{frozen})"
    if rng.random() < 0.3:
        persistent = rng.choice(["", ", persistent=False"])
        init = f"self.register_buffer('{name[5:]}', {made}{persistent})"
    use = rng.choice(
        ["{a} * {p}", "{a} + {p}", "{a} * torch.exp(-{p}.abs())", "torch.addcmul({a}, {a}, {p})",
         "{a} - {p}.mean()", "{a} * ({p} * {p}).sum(-1, keepdim=True)", "torch.where({p}.abs() > 0.3, {a}, {p})",
         "{a} + {p}.detach()", "torch.stack([{a}, {p}.expand_as({a})], 1)"]
    )  # fmt: skip
    return Line("{out} = " + fill(use, {"a": a, "p": name}), (init,))


def layer(block: Block) -> Line:
    """A module of torch on the last dim, the channels or the words."""
    rng = block.rng
    name = block.attribute()
    kind = rng.choice(
        [
            "linear",
            "linear",
            "complex",
            "norm",
            "conv",
            "words",
            "rms",
            "group",
            "shared",
            "matrix",
            "attention",
        ]
    )
    if kind in ("words",):
        i = block.pick("int", 1, 2)
        size = rng.choice([3, 4, 6])
        padding = rng.choice(["", ", padding_idx=0"])
        init = f"{name} = nn.Embedding({NUM_WORDS}, {size}{padding})"
        return Line(f"{{out}} = {name}({i} % {NUM_WORDS}) * 0.5", (init,))
    a = block.pick("complex" if kind == "complex" else "real", 2)
    shape = block.values[a].shape
    bias = rng.choice(["", ", bias=False"])
    if kind == "complex":
        init = f"{name} = nn.Linear({shape[-1]}, {rng.randint(2, 6)}{bias}, dtype=torch.complex128)"
    elif kind == "norm":
        init = f"{name} = nn.LayerNorm({list(shape[rng.choice([-1, 1]) :])})"
    elif kind == "rms":
        init = f"{name} = nn.RMSNorm({shape[-1]})"
    elif kind == "group":
        init = f"{name} = nn.GroupNorm({rng.choice([1, 2])}, {shape[1]})"
    elif kind == "conv":
        size = rng.choice([1, 2, 3])
        init = f"{name} = nn.Conv{len(shape) - 2}d({shape[1]}, {rng.randint(2, 5)}, {size}, padding={rng.choice([0, 1])}{bias})"
    elif kind == "matrix":
        init = f"{name} = nn.Parameter(torch.randn({shape[-1]}, {rng.randint(2, 6)}) * 0.4)"
        use = rng.choice([f"{a} @ {name}", f"torch.matmul({a}, {name})", f"torch.einsum('...i,ij->...j', {a}, {name})",
                          f"torch.tensordot({a}, {name}, 1)", f"F.linear({a}, {name}.t())", f"{a} @ {name}.softmax(0)"])  # fmt: skip
        return Line("{out} = " + use, (init,))
    elif kind == "attention":
        init = (
            f"{name} = nn.MultiheadAttention({shape[-1]}, {rng.choice([1, 2])}, batch_first=True)"
        )
        return Line(f"{{out}} = {name}({a}, {a}, {a}, need_weights=False)[0]", (init,))
    elif kind == "shared":  # one layer, called twice
        init = f"{name} = nn.Linear({shape[-1]}, {shape[-1]}{bias})"
        return Line(f"{{out}} = {name}(torch.tanh({name}({a})))", (init,))
    else:
        init = f"{name} = nn.Linear({shape[-1]}, {rng.randint(2, 8)}{bias})"
    return Line(f"{{out}} = {name}({a})", (init,))


def state(block: Block) -> Line:
    """Buffers that change."""
    rng = block.rng
    name = block.attribute()
    short = name[5:]
    a = block.pick("real", 2)
    width = block.values[a].shape[-1]
    kind = rng.choice(["count", "average", "last", "batch_norm", "batch_norm"])
    if kind == "count":
        init = f"self.register_buffer('{short}', torch.zeros(()))"
        return Line(f"{name} += 1\n{{out}} = {a} / (1 + 0.1 * {name})", (init,), True)
    if kind == "average":
        init = f"self.register_buffer('{short}', torch.zeros({width}))"
        return Line(f"{{out}} = {a} + {name}\n{name}.mul_(0.9).add_(0.1)", (init,), True)
    if kind == "last":
        init = f"self.register_buffer('{short}', torch.zeros({width}))"
        other = block.attribute()
        more = f"{other} = nn.Parameter(torch.randn({width}))"
        text = f"with torch.no_grad():\n    {name}.lerp_({other}, 0.5)\n{{out}} = {a} * {other} + {name}"
        return Line(text, (init, more), True)
    norm = {2: 1, 3: 1, 4: 2}[block.values[a].ndim]
    init = f"{name} = nn.BatchNorm{norm}d({block.values[a].shape[1]})"
    return Line(f"{{out}} = {name}({a})", (init,), True)


def over_samples(block: Block) -> Line:
    """Samples that know of each other: not additive."""
    a = block.pick("real", 2)
    text = block.rng.choice(
        ["{a} - {a}.mean(0, keepdim=True)", "{a} * {a}.mean(0)", "{a} + {a}.flip(0)", "{a} / (1 + {a}.abs().sum())", "{a}.softmax(0)",
         "{a} * torch.ones({a}.shape[0], 1).mean()"]
    )  # fmt: skip
    return Line("{out} = " + fill(text, {"a": a}))


OPERATIONS: list[tuple[Operation, int]] = [
    from_table(PLAIN, 14),
    from_table(ALONG, 14, 2),
    from_table(SHAPES, 8, 2),
    from_table(PRODUCTS, 6, 3, 3),
    from_table(COMPLEX, 9),
    from_table(TO_COMPLEX, 4, 2),
    from_table(WHOLE, 4, 2),
    from_table(BOOLEANS, 3, 2),
    from_table(FROM_WHOLE, 5),
    from_table(FROM_BOOLEANS, 5),
    (in_place, 7),
    (without_gradient, 2),
    (parameter, 9),
    (layer, 14),
    (state, 2),
]


# ---- models


@dataclass(frozen=True)
class FuzzModel:
    """A model as source, and what a test must know of it."""

    seed: int
    source: str
    num_blocks: int
    is_stateful: bool
    """buffers change with each micro-batch: the reference has the same ones"""
    mixes: bool
    """samples know of each other: for one micro-batch only"""


def make_model(seed: int) -> FuzzModel:
    """The model of this seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return _make_model(seed)
        finally:
            torch.set_default_dtype(before)


def _make_model(seed: int) -> FuzzModel:
    rng = random.Random(seed)
    num_blocks = rng.randint(2, 4)
    mixes = rng.random() < 0.08
    stateless = rng.random() < 0.7
    blocks: list[Block] = []
    texts: list[str] = []
    calls: list[str] = []
    extra: dict[str, Tensor] = {}
    for number in range(num_blocks):
        block = Block(rng)
        block.values = {
            "h": torch.randn(NUM_SAMPLES, LENGTH, WIDTH),
            "ids": torch.randint(0, NUM_WORDS, (NUM_SAMPLES, LENGTH)),
            "mask": torch.rand(NUM_SAMPLES, LENGTH) > 0.4,
        }
        taken = [name for name in extra if rng.random() < 0.7]
        block.values |= {name: extra[name] for name in taken}
        operations = [(op, w) for op, w in OPERATIONS if not (stateless and op is state)]
        operations += [(over_samples, 6)] if mixes else []
        _write_lines(block, operations, rng.randint(2, 7))
        left = _left_over(block, number, last=number == num_blocks - 1)
        outputs = _outputs(block)
        results = ["out", *left.values()]
        block.lines.append(f"out = {outputs}")
        block.lines.append(f"return {', '.join(results)}")
        texts.append(_block_text(number, block, taken))
        arguments = ", ".join(["h", "ids", "mask", *taken])
        call = f"self.b{number}({arguments})"
        if rng.random() < 0.06:
            call = f"checkpoint(self.b{number}, {arguments}, use_reentrant=False)"
        calls.append(f"{', '.join(['h', *left])} = {call}")
        calls += _between(rng, number)
        extra |= {name: block.values[value] for name, value in left.items()}
        blocks.append(block)
    is_stateful = any(block.is_stateful for block in blocks)
    texts.append(_model_text(rng, num_blocks, calls, is_stateful))
    return FuzzModel(seed, HEAD + "\n\n".join(["", *texts]), num_blocks, is_stateful, mixes)


def _write_lines(block: Block, operations: list[tuple[Operation, int]], count: int) -> None:
    made = 0
    for _ in range(20 * count):
        operation = block.rng.choices([op for op, _ in operations], [w for _, w in operations])[0]
        try:
            line = operation(block)
        except (KeyError, IndexError):
            continue
        made += block.add(line)
        if made == count:
            return


def _left_over(block: Block, number: int, last: bool) -> dict[str, str]:
    """Values that later blocks may take: name outside -> name inside."""
    own = [name for name in block.values if name.startswith("v")]
    if last or not own:
        return {}
    count = block.rng.choice([0, 0, 1, 1, 2])
    chosen = block.rng.sample(own, min(count, len(own)))
    return {f"e{number}{place}": name for place, name in enumerate(chosen)}


def _outputs(block: Block) -> str:
    """Everything that nothing else has used, as one tensor (batch, LENGTH, WIDTH)."""
    text = "\n".join(block.lines)
    own = [name for name in block.values if name.startswith("v") and text.count(name) == 1]
    parts = []
    for name in own[-3:] or ["h"]:
        value = block.values[name]
        expression = name
        size = value.numel() // NUM_SAMPLES
        if value.is_complex():
            expression = f"torch.view_as_real({name}.resolve_conj())"
            size *= 2
        elif not value.is_floating_point():
            expression = f"{name}.to(torch.float64)"
        if tuple(value.shape[1:]) == (LENGTH, WIDTH) and not value.is_complex():
            parts.append(expression)
            continue
        module = block.attribute()
        block.init.append(f"{module} = nn.Linear({size}, {LENGTH * WIDTH})")
        rows = (
            f"{expression}.flatten(1)" if size > 1 or value.ndim > 1 else f"{expression}[:, None]"
        )
        parts.append(f"{module}({rows}).unflatten(1, ({LENGTH}, {WIDTH}))")
    joined = " + ".join(parts)
    return block.rng.choice(
        [
            f"torch.tanh({joined})",
            f"h + torch.tanh({joined})",
            f"F.layer_norm({joined}, ({WIDTH},))",
        ]
    )


def _between(rng: random.Random, number: int) -> list[str]:
    """Lines of the model itself after a block."""
    kind = rng.random()
    if kind < 0.15:
        return [f"kept{number} = h", "h = torch.where(mask[..., None], h, 0.5 * h)"]
    if kind < 0.3:
        return ["h = h + 0.5 * x"]
    if kind < 0.4:
        return ["h = h * self.scale", "h = h / (1 + h.abs())"]
    return []


def _block_text(number: int, block: Block, taken: list[str]) -> str:
    arguments = ", ".join(["self", "h", "ids", "mask", *taken])
    rows = [
        f"class Block{number}(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
    ]
    rows += [f"        {line}" for line in block.init]
    rows += [f"    def forward({arguments}):"]
    rows += [f"        {line}" for line in block.lines]
    return "\n".join(rows)


LOSSES = [
    "F.cross_entropy(self.head(h.mean(1)), labels)",
    "F.mse_loss(self.head(h).mean((1, 2)), target)",
    "(self.head(h).square().mean(-1) * mask).sum() / mask.sum()",
    "F.cross_entropy(self.head(h).flatten(0, 1), (ids % 3).flatten())",
    "self.head(h).square().flatten(1).sum(1).mean()",
    "F.l1_loss(self.head(h[:, 0])[:, 0], target)",
    "F.binary_cross_entropy_with_logits(self.head(h)[..., 0], mask.to(h.dtype))",
    "F.smooth_l1_loss(self.head(h[:, -1]), target[:, None].expand(-1, 3))",
    "F.nll_loss(self.head(h.amax(1)).log_softmax(-1), labels)",
    "-(F.logsigmoid(self.head(h).sum(-1)) * mask).mean()",
    "F.cross_entropy(self.head(h).transpose(1, 2), torch.where(mask, ids % 3, -100))",
    "self.head(h).abs().sum() / x.shape[0]",
]
COUNTED = ("mask.sum()", "-100")
"""losses with another denominator than the samples: local micro-batches would not give the same"""
PENALTIES = [
    "0.01 * self.scale.square().sum()",
    "0.02 * self.head.weight.abs().sum()",
    "0.01 * sum(p.square().sum() for p in self.b0.parameters() if p.is_floating_point())",
]


def _model_text(rng: random.Random, num_blocks: int, calls: list[str], is_stateful: bool) -> str:
    losses = [
        loss for loss in LOSSES if not (is_stateful and any(each in loss for each in COUNTED))
    ]
    terms = rng.sample(losses, rng.choice([1, 1, 2, 3]))
    terms += rng.sample(PENALTIES, rng.choice([0, 0, 1]))
    rows = ["class Model(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    rows += [f"        self.b{number} = Block{number}()" for number in range(num_blocks)]
    rows += [
        f"        self.scale = nn.Parameter(torch.randn({WIDTH}))",
        f"        self.head = nn.Linear({WIDTH}, {NUM_CLASSES})",
    ]
    if rng.random() < 0.2:
        rows.append("        tie(self)")
    rows += ["    def forward(self, x, ids, mask, labels, target):", "        h = x"]
    rows += [f"        {line}" for line in calls]
    rows += [f"        return {' + '.join(terms)}", "", TIE]
    return "\n".join(rows)


TIE = '''
def tie(model):
    """One parameter for the first two of the same shape in two blocks."""
    seen = {}
    for name, module in model.named_modules():
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            key = (tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
            if key in seen and seen[key][0].split(".")[0] != name.split(".")[0]:
                setattr(module, leaf, seen[key][1])
                return
            seen.setdefault(key, (name, parameter))
'''


def make_batch(seed: int, num_samples: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(num_samples, LENGTH, generator=generator) > 0.4
    mask[0, 0] = True
    return {
        "x": torch.randn(num_samples, LENGTH, WIDTH, generator=generator, dtype=torch.float64),
        "ids": torch.randint(0, NUM_WORDS, (num_samples, LENGTH), generator=generator),
        "mask": mask,
        "labels": torch.randint(0, NUM_CLASSES, (num_samples,), generator=generator),
        "target": torch.randn(num_samples, generator=generator, dtype=torch.float64),
    }


# ---- plans


@dataclass(frozen=True)
class FuzzPlan:
    """Devices, annotations and settings."""

    num_ranks: int
    marks: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    """(glob, ("replicate", d) or ("split", d, grid))"""
    config: tuple[tuple[str, Any], ...] = ()
    kinds: tuple[str, ...] = ()
    batch_size: int = 6


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
        ["data", "stages", "stages", "stages", "cut", "split", "split stages", "mixed"]
    )
    marks: list[tuple[str, tuple[Any, ...]]] = []
    num_ranks = rng.choice([2, 2, 3])
    if kind == "cut":
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
    kinds = tuple(rng.choice(KINDS) for _ in range(num_ranks)) if rng.random() < 0.25 else ()
    widths = [what[1] for _, what in marks if what[0] == "replicate"]
    widest = max(widths, default=1) if marks else num_ranks
    least = config["num_micro_batch"] * widest
    batch_size = max(least, rng.choice([4, 6, 7, 9])) + rng.choice([0, 0, 1, 2])
    return FuzzPlan(num_ranks, tuple(marks), tuple(config.items()), kinds, batch_size)


def _more_settings(rng: random.Random, config: dict[str, Any], is_pipeline: bool) -> None:
    if is_pipeline:
        config["schedule"] = rng.choice(
            ["1f1b", "1f1b", "gpipe", "zero-bubble", "wave", "interleaved", "auto"]
        )
    if rng.random() < 0.25:
        config["recompute"] = rng.choice([True, ["b0"], ["b1", "b0"]])
    if rng.random() < 0.2:
        config["share_memory"] = False
    if rng.random() < 0.2:
        config["bucket_bytes"] = 200
    if rng.random() < 0.1:
        config["keep_gathered"] = rng.choice([True, False])
