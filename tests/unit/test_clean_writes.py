"""Writes in place become operations that make new tensors: every view and every later use sees what
the module saw.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.unit.clean_graphs import Case, case

# --- writes to whole tensors
# ------------------------------------------------------------------------------------------------


WHOLE: dict[str, Callable[[Any, Tensor], Any]] = {
    "add": lambda m, h: h.add_(m.scale, alpha=2),
    "add number": lambda m, h: h.add_(1),
    "mul": lambda m, h: h.mul_(m.scale),
    "div": lambda m, h: h.div_(m.scale),
    "pow tensor": lambda m, h: h.abs_().add_(0.1).pow_(m.scale),
    "relu": lambda m, h: h.relu_(),
    "F.relu": lambda m, h: F.relu(h, inplace=True),
    "F.dropout": lambda m, h: F.dropout(h, 0.5, inplace=True),
    "F.silu": lambda m, h: F.silu(h, inplace=True),
    "clamp": lambda m, h: h.clamp_(-0.1, 0.3),
    "fill": lambda m, h: h.fill_(2.0),
    "fill tensor": lambda m, h: h.fill_(m.scale.sum()),
    "zero": lambda m, h: h.zero_(),
    "copy": lambda m, h: h.copy_(m.scale),
    "copy transposed": lambda m, h: h.copy_((h * m.scale).t()).view(-1),
    "copy float32": lambda m, h: h.copy_(m.scale.float() * 3),
    "masked fill": lambda m, h: h.masked_fill_(h > 0, -1.0),
    "masked fill tensor": lambda m, h: h.masked_fill_(h > 0, m.scale.sum()),
    "masked scatter": lambda m, h: h.masked_scatter_(h > 0, (h * m.scale)),
    "index add": lambda m, h: h.index_add_(0, torch.tensor([0, 2]), h[:2] * m.scale),
    "index copy": lambda m, h: h.index_copy_(0, torch.tensor([0, 2]), h[:2] * m.scale),
    "index fill": lambda m, h: h.index_fill_(1, torch.tensor([0, 2]), 3.0),
    "index put": lambda m, h: h.index_put_((torch.tensor([0, 2]),), m.scale, accumulate=True),
    "scatter": lambda m, h: h.scatter_(
        1, torch.zeros(6, 1, dtype=torch.long), h[:, 1:2] * m.scale[0]
    ),
    "addmm": lambda m, h: h.addmm_(h.t() * 1, h * m.scale),
    "lerp": lambda m, h: h.lerp_(m.scale.expand(6, 6), 0.3),
    "tril": lambda m, h: h.tril_(),
    "bernoulli": lambda m, h: h.bernoulli_(0.5) + m.scale,
    "normal": lambda m, h: h.normal_(1.0, 2.0) + m.scale,
    "uniform": lambda m, h: h.uniform_(0.0, 2.0) + m.scale,
    "exponential": lambda m, h: h.exponential_() + m.scale,
    "detach": lambda m, h: h.mul(2).detach_().add_(1),
    "unsqueeze": lambda m, h: h.unsqueeze_(1).mul_(m.scale),
    "squeeze": lambda m, h: h.view(6, 1, 6).squeeze_(1).mul_(m.scale),
    "transpose": lambda m, h: h.transpose_(0, 1).mul_(m.scale),
    "t": lambda m, h: h.t_().mul_(m.scale),
    "chain": lambda m, h: h.mul_(2).add_(1).relu_().sub_(m.scale),
    "itself": lambda m, h: h.add_(h),
}


@pytest.mark.parametrize("name", WHOLE)
def test_in_place_result_and_the_tensor_itself_afterwards(name: str) -> None:
    def function(m: Case, h: Tensor) -> Tensor:
        before = h * 1
        result = WHOLE[name](m, h)
        return before.sin() + 0.1 * h.sum() + 0.01 * result.sum() + m.scale

    case(function)


@pytest.mark.parametrize("name", WHOLE)
def test_in_place_seen_through_an_earlier_view(name: str) -> None:
    if name in ("detach", "squeeze", "unsqueeze", "t", "transpose"):
        pytest.skip("changes no data, or another tensor's")

    def function(m: Case, h: Tensor) -> Tensor:
        h = h * 1
        row = h[2]
        flat = h.view(-1)
        WHOLE[name](m, h)
        return row * flat[:6] + m.scale

    case(function)


# --- writes to views
# --------------------------------------------------------------------------------------------------------


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "select": lambda h: h[:, 1],
    "select from the end": lambda h: h.select(1, -1),
    "slice": lambda h: h[1:3],
    "slice with step": lambda h: h[:, 1::2],
    "slice from the end": lambda h: h[:, -2:],
    "two slices": lambda h: h[1:4, 2:5],
    "slice of select": lambda h: h[3][1:4],
    "narrow": lambda h: h.narrow(1, 2, 3),
    "narrow from the end": lambda h: h.narrow(1, -1, 1),
    "view": lambda h: h.view(-1),
    "view 3-D": lambda h: h.view(6, 2, 3),
    "slice of view": lambda h: h.view(3, 12)[:, 2:7],
    "reshape": lambda h: h.reshape(3, 12),
    "flatten": lambda h: h.flatten(),
    "flatten nothing": lambda h: h.flatten(1),
    "unflatten": lambda h: h.unflatten(1, (2, 3)),
    "transpose": lambda h: h.transpose(0, 1),
    "t": lambda h: h.t(),
    "mT": lambda h: h.mT,
    "row of t": lambda h: h.t()[2],
    "permute": lambda h: h.view(6, 2, 3).permute(2, 0, 1),
    "permute negative": lambda h: h.view(6, 2, 3).permute(-1, 0, -2),
    "movedim": lambda h: h.view(6, 2, 3).movedim(0, 2),
    "movedim list": lambda h: h.view(6, 2, 3).movedim((0, 1), (1, 2)),
    "swapaxes": lambda h: h.swapaxes(0, 1),
    "unsqueeze": lambda h: h.unsqueeze(1),
    "unsqueeze last": lambda h: h.unsqueeze(-1),
    "squeeze": lambda h: h.view(6, 1, 6).squeeze(1),
    "squeeze all": lambda h: h.view(6, 1, 6, 1).squeeze(),
    "diagonal": lambda h: h.diagonal(),
    "diagonal above": lambda h: h.diagonal(1),
    "diagonal of dims": lambda h: h.view(6, 2, 3).diagonal(0, 1, 2),
    "alias": lambda h: h[...],
    "same dtype": lambda h: h.to(torch.float64),
    "contiguous": lambda h: h.contiguous(),
    "dropout off": lambda h: F.dropout(h, 0.0),
    "view as": lambda h: h.view_as(h),
    "expand to itself": lambda h: h.expand(6, 6),
}


@pytest.mark.parametrize("name", VIEWS)
def test_write_to_a_view_changes_the_base_and_other_views(name: str) -> None:
    def function(m: Case, h: Tensor) -> Tensor:
        h = h * 1
        other = h.view(36)[3:30]
        old = h.sin()
        part = VIEWS[name](h)
        part.mul_(m.scale[0]).add_(m.scale[1])
        again = VIEWS[name](h)
        later = part.cos()
        part.sub_(0.25)
        return (
            old
            + h * m.scale
            + other.sum()
            + 0.1 * later.sum()
            + part.sum()
            + 0.3 * again.square().sum()
        )

    case(function)


@pytest.mark.parametrize("name", VIEWS)
def test_write_to_the_base_changes_the_view(name: str) -> None:
    def function(m: Case, h: Tensor) -> Tensor:
        h = h * 1
        part = VIEWS[name](h)
        old = part.sin().sum()
        h.mul_(m.scale)
        return old + part.square().sum() + h

    case(function)


@pytest.mark.parametrize("kind", ["chunk", "split", "split_with_sizes", "unbind", "tensor_split"])
def test_write_to_a_part_of_a_split_without_gradient(kind: str) -> None:
    def function(m: Case, h: Tensor) -> Tensor:
        x = torch.ones(4, 6, dtype=torch.float64).cumsum(1)
        parts = {
            "chunk": lambda: x.chunk(2, 1),
            "split": lambda: x.split(2, 1),
            "split_with_sizes": lambda: x.split([1, 3, 2], 1),
            "unbind": lambda: x.unbind(1),
            "tensor_split": lambda: x.tensor_split(4, -1),
        }[kind]()
        parts[1].mul_(5)
        parts[-1].add_(3)
        return h * x.sum(0) + parts[1].sum() + 2 * parts[0].sum()

    case(function)


def test_items_and_masks() -> None:
    def function(m: Case, h: Tensor) -> Tensor:
        h = h * m.scale
        h[:, 0] = m.scale
        h[1] = 0.0
        h[h < 0] = 0.5
        h[torch.tensor([2, 3]), torch.tensor([1, 0])] = m.scale[:2]
        h[2:4, 1:3] += h[0:2, 1:3]
        return h

    case(function)


def test_residual_in_place_and_used_later() -> None:
    def function(m: Case, h: Tensor) -> Tensor:
        x = h.sin()
        y = x * m.scale
        x += y
        z = x.cos()
        x += z
        return x * z + y

    case(function)


def test_result_of_topk_written_in_place() -> None:
    case(lambda m, h: h + h.topk(2, dim=1)[0].mul_(m.scale[0]).sum())


def test_new_tensor_filled_in_parts() -> None:
    def function(m: Case, h: Tensor) -> Tensor:
        out = torch.zeros(6, 6, dtype=torch.float64)
        out[:, :3] = h[:, 3:]
        out[:, 3:] = h[:, :3] * m.scale[:3]
        return out.view(36).view(6, 6) + torch.empty_like(h).bernoulli_(0.5)

    case(function)


def test_constant_tensor_written_in_place_every_time_anew() -> None:
    def function(m: Case, h: Tensor) -> Tensor:
        constant = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], dtype=torch.float64)
        constant.mul_(2)
        return h * constant

    clean = case(function)
    assert not clean.updates


def test_out_argument() -> None:
    def function(m: Case, h: Tensor) -> Tensor:
        x = torch.ones(6, dtype=torch.float64)
        y = torch.zeros(6, 6, dtype=torch.float64)
        torch.mul(x, 3, out=y[2])
        return h * y

    case(function)


def test_many_writes_to_one_tensor() -> None:
    def function(m: Case, h: Tensor) -> Tensor:
        for _ in range(300):
            h.add_(0.01)
        return h

    case(function)
