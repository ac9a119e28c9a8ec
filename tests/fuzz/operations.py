"""Operations of random models: lines of Python for a block that is being written."""

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
MOST_NUMBERS = 1500
"""of one value"""


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
{out}.diagonal(dim1=1, dim2=2).add_(0.3) | {out}.index_put_((torch.arange({out}.shape[0]), ids[:, 0] % {out}.shape[1]), torch.tensor(0.3))
{out}.masked_fill_(mask.flatten(1)[:, :1].reshape(-1, *[1] * ({out}.ndim - 1)), 0.2) | {out}.index_copy_(1, torch.tensor([0]), {b}[:, 1:2]) | {out}.addcmul_({b}, {b}, value=0.1)
{out}.unsqueeze(1).expand(-1, 2, *[-1] * ({out}.ndim - 1)).clone()[:, 0].mul_(2.0) | {out}[torch.arange({out}.shape[0]), 0] = {b}[:, 0] | {out}[:, 0], {out}[:, 1] = {out}[:, 1].clone(), {out}[:, 0].clone()
{out}.view({out}.shape[0], -1).t()[0].add_(0.1) | {out}[..., None][:, 0].sub_(0.2) | {out}.select(1, 0).lerp_({b}.select(1, 1), 0.5) | {out}.transpose_(1, 1).add_({b}.detach())
{out}.index_add_(1, torch.tensor([0]), {b}[:, :1]) | {out}.narrow(1, 0, 1).neg_() | {out}.scatter_(1, {b}[:, :1].detach().argmax(-1, keepdim=True) * 0, 0.2)"""
SCATTERED = """torch.index_put({a}, (torch.arange({a}.shape[0]), {i}.flatten(1)[:, 0] % {a}.shape[1]), torch.tensor(0.4))
{a}.index_put((torch.arange({a}.shape[0])[:, None], {i}.flatten(1) % {a}.shape[1]), {a}[:, :1] * 0.5, accumulate=True)
torch.scatter({a}, 1, {i} % {a}.shape[1], {b} * 0.5) | {a}.scatter_reduce(1, {i} % {a}.shape[1], {b}, "amax") | {a}.scatter_reduce(1, {i} % {a}.shape[1], {b}, "mean")
{a}.scatter_reduce(1, {i} % {a}.shape[1], {b}, "sum", include_self=False) | torch.zeros({a}.shape[0], 9).scatter_add(1, {i}.flatten(1) % 9, {i}.flatten(1) * {a}.flatten(1).mean(1, keepdim=True))
{a}.index_add(1, torch.tensor([1, 0]), {b}[:, :2]) | {a}.index_copy(1, torch.tensor([1, 0]), {b}[:, :2]) | {a}[:, torch.tensor([0, 1, 0])]
{a}.gather(-1, {a}.detach().argsort(-1)) | F.one_hot({i}.flatten(1)[:, 0] % {a}.shape[1], {a}.shape[1]).to({a}.dtype) * {a}.flatten(2).mean(-1)
torch.searchsorted(torch.linspace(-1.07, 1.07, 5), {a}.detach()).to({a}.dtype) * 0.1 + {a} | {a}[torch.arange({a}.shape[0])[:, None], {i}.flatten(1) % {a}.shape[1]]
{a}.take_along_dim({a}.detach().argmax(1, keepdim=True), 1)"""
MIXED_TYPES = """{a} + {i}.flatten(1)[:, :1].reshape(-1, *[1] * ({a}.ndim - 1)) * 0.1 | {a} * torch.tensor(2.0, dtype=torch.float32) | {a} + torch.ones((), dtype=torch.int32)
{i}.to(torch.int32) / 3 | {i} * 0.25 | {a}.detach().to(torch.float32).to(torch.float64) | ({i} > 1) * {i} * 0.5 | {i}.to(torch.uint8) + 0.5
torch.where({i} > 2, {i}, 0.5) | {a} * torch.arange({a}.shape[-1]) * 0.1 | torch.cat([{a}.flatten(1), {i}.flatten(1)], 1) | {i}.to(torch.int16).float().double() * 0.1
{a} - torch.eye({a}.shape[-1], dtype=torch.float32)[0] | torch.result_type({a}, {i}) == torch.float64 and {a} * 2 | {a} ** 2 * (({i} & 1).flatten(1).sum(1) > 1).reshape(-1, *[1] * ({a}.ndim - 1))
torch.bitwise_and({i}, 3) | {i}.bitwise_xor(1) | ({i} << 1) % 5 | torch.floor_divide({i}, 2) | torch.stack([{a}.flatten(1)[:, 0], {i}.flatten(1)[:, 0]], 1)"""
MOVED = """{a}.transpose(0, 1).softmax(0).transpose(0, 1) | {a}.transpose(0, 1).cumsum(0).transpose(0, 1) * 0.3 | {a}.movedim(0, -1).flip(0).movedim(-1, 0)
{a}.unsqueeze(0).expand(2, *[-1] * {a}.ndim).mean(0) | torch.stack([{a}, {b}]).sum(0) | torch.cat([{a}, {b}])[: {a}.shape[0]] | torch.cat([{a}, {b}]).chunk(2)[1]
{a}.repeat_interleave(2, 0)[::2] | {a}.repeat_interleave(2, 0).unflatten(0, (-1, 2)).sum(1) | {a}.repeat(2, *[1] * ({a}.ndim - 1)).unflatten(0, (2, -1)).mean(0)
{a}.flatten(0, 1).softmax(-1).unflatten(0, (-1, {a}.shape[1])) | {a}.flatten(0, 1).cumsum(-1).view({a}.shape) * 0.3 | torch.einsum("b...->...b", {a}).movedim(-1, 0)
{a}.transpose(0, 1).reshape({a}.shape[1], -1).tanh().reshape({a}.transpose(0, 1).shape).transpose(0, 1) | {a}.t().sin().t() | {a}.unsqueeze(1).transpose(0, 1).squeeze(0)
torch.broadcast_tensors({a}, {b}[:1].mean())[1] * 0 + {a} | {a}.swapdims(0, 1).contiguous().swapdims(0, 1) | {a}.reshape({a}.shape[0], 1, -1).squeeze(1)"""
IMAGES = """F.max_pool1d({a}, 2) | F.avg_pool1d({a}, 2, 1) | F.adaptive_avg_pool1d({a}, 3) | F.interpolate({a}, size=5, mode="linear") | F.unfold({a}.unsqueeze(1), 2).transpose(1, 2)
F.pad({a}, (1, 0), mode="circular") | F.pad({a}, (1, 1), mode="replicate") | F.instance_norm({a}) | F.local_response_norm({a}, 2) | F.pixel_shuffle({a}[:, :4].unsqueeze(-1), 2)
F.scaled_dot_product_attention({a}, {b}, {a}, is_causal=True) | F.scaled_dot_product_attention({a}, {b}, {b}, attn_mask=torch.ones({a}.shape[1], {a}.shape[1]).tril().bool())
F.grid_sample({a}.unsqueeze(1), torch.tanh({b}[:, :2, :2]).unsqueeze(1), align_corners=False) | F.channel_shuffle({a}.unsqueeze(-1), 2) | F.fold({a}[:, :4].transpose(1, 2).mT, (3, 4), 2)[..., 0]
torch.bmm({a}, torch.linalg.inv({a}.mT @ {a} + 2 * torch.eye({a}.shape[2]))) | torch.linalg.solve({a} @ {a}.mT + 2 * torch.eye({a}.shape[1]), {b}) | torch.logdet({a} @ {a}.mT + 2 * torch.eye({a}.shape[1]))
{a}.unsqueeze(1) @ {b}.unsqueeze(2).mT[:, :1] * 0.2 | torch.einsum("bij,bkj,bi->bk", {a}, {b}, {a}[..., 0]) * 0.1 | torch.einsum("bij,bij,b->b", {a}, {b}, {a}[:, 0, 0]) | torch.cumprod({a}.tanh(), 1)
F.bilinear({a}, {b}, torch.linspace(-0.4, 0.4, 2 * {a}.shape[2] ** 2).view(2, {a}.shape[2], -1)) | torch.trapezoid({a}, dim=-1) | torch.cov({a}[0]) * 0 + {a}.mean() * 0 + {a} @ {b}.mT"""
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
            "grouped",
            "transposed",
            "recurrent",
            "bag",
            "normed",
            "prelu",
            "bilinear",
        ]
    )
    if kind == "bag":
        i = block.pick("int", 2, 2)
        mode = rng.choice(["sum", "mean", "max"])
        init = f"{name} = nn.EmbeddingBag({NUM_WORDS}, {rng.choice([3, 4])}, mode='{mode}')"
        return Line(f"{{out}} = {name}({i} % {NUM_WORDS}) * 0.5", (init,))
    if kind == "words":
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
    elif kind == "grouped":
        places = len(shape) - 2
        init = f"{name} = nn.Conv{places}d({shape[1]}, {2 * shape[1]}, 2, stride={rng.choice([1, 2])}, padding=1, groups={shape[1]}{bias})"
    elif kind == "transposed":
        init = f"{name} = nn.ConvTranspose{len(shape) - 2}d({shape[1]}, 3, 2, stride={rng.choice([1, 2])}{bias})"
    elif kind == "recurrent":
        cell = rng.choice(["GRU", "LSTM", "RNN"])
        both = rng.choice(["", ", bidirectional=True"])
        init = f"{name} = nn.{cell}({shape[-1]}, 3, batch_first=True{both})"
        return Line(f"{{out}} = {name}({a})[0]", (init,))
    elif kind == "normed":
        init = f"{name} = nn.utils.parametrizations.weight_norm(nn.Linear({shape[-1]}, 4))"
    elif kind == "prelu":
        init = f"{name} = nn.PReLU({shape[1]})"
    elif kind == "bilinear":
        init = f"{name} = nn.Bilinear({shape[-1]}, {shape[-1]}, 3{bias})"
        return Line(f"{{out}} = {name}({a}, torch.tanh({a}))", (init,))
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
    kind = rng.choice(["count", "average", "last", "batch_norm", "batch_norm", "spectral"])
    if kind == "spectral":
        init = f"{name} = nn.utils.parametrizations.spectral_norm(nn.Linear({width}, 4))"
        return Line(f"{{out}} = {name}({a})", (init,), True)
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
    options = rng.choice(
        ["", "", ", affine=False", ", momentum=0.3", ", track_running_stats=False"]
    )
    init = f"{name} = nn.BatchNorm{norm}d({block.values[a].shape[1]}{options})"
    return Line(f"{{out}} = {name}({a})", (init,), True)


def over_samples(block: Block) -> Line:
    """Samples that know of each other: not additive."""
    a = block.pick("real", 2)
    text = block.rng.choice(
        ["{a} - {a}.mean(0, keepdim=True)", "{a} * {a}.mean(0)", "{a} + {a}.flip(0)", "{a} / (1 + {a}.abs().sum())", "{a}.softmax(0)",
         "{a} * torch.ones({a}.shape[0], 1).mean()", "{a} + {a}.cumsum(0) * 0.2", "{a} + {a}.roll(1) * 0.3", "{a} + {a}.roll(1, 0)", "{a} / (1 + {a}.norm())",
         "{a} + {a}.max() * 0.1", "{a} - {a}.amax(0)", "{a} * {a}.std(0)", "{a} + {a}.sort(0).values", "{a} * {a}.flatten(1).mean(1).softmax(0).reshape(-1, *[1] * ({a}.ndim - 1))",
         "{a} + torch.einsum('b...,b...->...', {a}, {a}) * 0.1", "{a} + ({a}.flatten(1) @ {a}.flatten(1).t()).mean(1).reshape(-1, *[1] * ({a}.ndim - 1)) * 0.1",
         "{a} + {a}[:1]", "{a} - {a}[-1:]", "torch.cat([{a}, -{a}])[::2] + {a}", "{a} + {a}.var((0, 1), unbiased=False)", "{a} * torch.arange({a}.shape[0]).reshape(-1, *[1] * ({a}.ndim - 1)) * 0.1",
         "{a}.masked_scatter({a} > 0.2, {a}.flip(1))", "{a} + {a}.mean() + {a}.square().mean().sqrt()", "{a} * (mask.double().mean() + 0.5)", "{a} + {a}.logsumexp(0)",
         "{a}.flatten().cumsum(0).view({a}.shape) * 0.1", "{a} + ids.double().mean() * {a}.detach().mean(0)", "{a} + {a}.median() * 0.1", "{a} + {a}.sum(0, keepdim=True).expand_as({a}) / {a}.shape[0]"]
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
    from_table(SCATTERED, 6, 2),
    from_table(MIXED_TYPES, 5, 2),
    from_table(MOVED, 6, 2),
    from_table(IMAGES, 5, 3, 3),
    (in_place, 9),
    (without_gradient, 2),
    (parameter, 9),
    (layer, 14),
    (state, 2),
]
