"""The table of operations against torch itself: what a row claims is tried on small tensors.

Every row that names dims has an example here. For each letter the tensors that have it are cut
unevenly in two, the operation runs on both parts, and the parts must be the parts of the whole
result, or add up to it. Linearity, FLOP, views and random draws are tried in the same way.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

import whale as wh
import whale.capture.ctc_loss  # registers whale.ctc_loss
import whale.capture.expert_product  # registers whale.expert_mm
from whale.capture.samples import RULES
from whale.dtypes import is_differentiable
from whale.operations.flops import Value
from whale.operations.nodes import op_name
from whale.operations.operation import Operation, Shapes
from whale.operations.row import PARTIAL, SAME, TABLE, Dims
from whale.operations.table import EXPANDS, SPLITS, VIEWS, is_random, row_of
from whale.sharding.options import options_of

aten = torch.ops.aten


def T(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def I(high: int, *shape: int) -> Tensor:  # noqa: E743
    return torch.randint(high, shape)


def B(*shape: int) -> Tensor:
    return torch.rand(shape) < 0.5


def unary(names: str, *shape: int, **kwargs: Any) -> list[tuple[Any, ...]]:
    return [(getattr(aten, name).default, (T(*shape),), kwargs) for name in names.split()]


def examples() -> list[tuple[Any, ...]]:
    """(operation, arguments, keywords)."""
    torch.manual_seed(0)
    square = T(3, 6, 6)
    positive = square @ square.mT + 10 * torch.eye(6, dtype=torch.float64)
    found: list[tuple[Any, ...]] = [
        *_elementwise(),
        *_reductions(),
        *_losses(),
        *_products(),
        *_layers(),
        *_views(),
        *_lookups(),
        *_other_arguments(),
    ]
    for name in ("inverse", "det", "logdet", "slogdet", "pinverse", "cholesky", "matrix_exp"):
        found.append((getattr(aten, name).default, (positive,)))
    for name in ("linalg_svdvals", "linalg_qr", "linalg_cholesky", "linalg_inv", "linalg_det"):
        found.append((getattr(aten, name).default, (positive,)))
    found += [
        (aten.linalg_slogdet.default, (positive,)),
        (aten.linalg_eigvalsh.default, (positive,)),
        (aten.linalg_eigh.default, (positive,)),
        (aten.linalg_svd.default, (positive,)),
        (aten.linalg_eig.default, (positive,)),
        (aten.linalg_pinv.atol_rtol_float, (positive,)),
        (aten.linalg_matrix_power.default, (positive, 2)),
        (aten.svd.default, (positive,)),
        (aten.qr.default, (positive,)),
        (aten.tril.default, (square,)),
        (aten.triu.default, (square, 1)),
        (aten.cov.default, (T(3, 6),)),
        (aten.corrcoef.default, (T(3, 6),)),
        (aten.linalg_eigvals.default, (positive,)),
        (aten.linalg_matrix_exp.default, (square,)),
        (aten.linalg_matrix_rank.atol_rtol_float, (positive,)),
        (aten.linalg_cond.default, (positive,)),
        (aten.linalg_lu.default, (positive,)),
        (aten.linalg_lu_factor.default, (positive,)),
        (aten.cholesky_inverse.default, (positive,)),
        *_solvers(positive),
    ]
    return found


def _solvers(matrices: Tensor) -> list[tuple[Any, ...]]:
    """Systems of equations, with right-hand sides that have fewer dims or more."""
    factors, pivots = torch.linalg.lu_factor(matrices)
    triangular = torch.linalg.cholesky(matrices)
    columns = T(3, 6, 2)
    tall = T(3, 6, 2)
    return [
        (aten.linalg_solve.default, (matrices, columns)),
        (aten.linalg_solve.default, (matrices, T(3, 6))),
        (aten.linalg_solve.default, (matrices, T(6, 2))),
        (aten.linalg_solve.default, (matrices, T(6))),
        (aten.linalg_solve.default, (matrices[0], T(4, 6, 2))),
        (aten.linalg_solve.default, (matrices, T(4, 1, 6, 2))),
        (aten.linalg_solve_triangular.default, (triangular, columns), {"upper": False}),
        (aten.triangular_solve.default, (columns, triangular.mT)),
        (aten.cholesky_solve.default, (columns, triangular)),
        (aten.lu_solve.default, (columns, factors, pivots)),
        (aten.linalg_lu_solve.default, (factors, pivots, columns)),
        (aten.linalg_lstsq.default, (tall, T(3, 6, 4))),
        (aten.linalg_lstsq.default, (tall, T(3, 6)), {"driver": "gels"}),
        (aten.linalg_lstsq.default, (tall, T(3, 6, 4)), {"driver": "gelsd"}),
    ]


def _other_arguments() -> list[tuple[Any, ...]]:
    """Arguments that change what a row says: negative dims, single numbers, factors, other types,
    broadcast operands.
    """
    x = T(3, 4, 6)
    z = torch.complex(T(3, 6), T(3, 6))
    quantiles = torch.tensor([0.2, 0.5], dtype=torch.float64)
    square = T(3, 6, 6)
    return [
        (aten.add.Tensor, (T(3, 1), T(6)), {"alpha": -0.5}),
        (aten.sub.Tensor, (T(6), T(3, 6)), {"alpha": 2}),
        (aten.subtract.Tensor, (T(6), T(3, 6)), {"alpha": 2}),
        (aten.rsub.Tensor, (T(3, 6), T(3, 1)), {"alpha": 3}),
        (aten.rsub.Scalar, (T(3, 6), 2.0)),
        (aten.mul.Tensor, (T(), T(3, 6))),
        (aten.mul.Tensor, (z, T(6))),
        (aten.div.Tensor, (I(9, 3, 6), T(6))),
        (aten.div.Tensor, (T(6), z)),
        (aten.div.Tensor_mode, (T(3, 6), T(6)), {"rounding_mode": "trunc"}),
        (aten.div.Tensor_mode, (T(3, 6), T(6)), {"rounding_mode": None}),
        (aten.where.ScalarSelf, (B(3, 6), 0.0, T(6))),
        (aten.where.ScalarSelf, (B(3, 6), 2.0, T(6))),
        (aten.where.Scalar, (B(3, 6), 0.0, 1.0)),
        (aten.where.self, (B(6), T(), T(3, 1))),
        (aten.masked_fill.Tensor, (T(3, 6), B(6), torch.tensor(0.0))),
        (aten.neg.default, (z,)),
        (aten.conj.default, (z,)),
        (aten.real.default, (z,)),
        (aten.zeros_like.default, (z,)),
        (aten.to.dtype, (T(3, 6), torch.complex128)),
        (aten.to.other, (T(3, 6), torch.zeros(2, 2, 2))),
        (aten.sum.dim_IntList, (T(), [0])),
        (aten.mean.dim, (T(), [-1])),
        (aten.sum.dim_IntList, (x, [])),
        (aten.sum.dim_IntList, (z, [-2, -1], True)),
        (aten.sum.default, (B(3, 6),)),
        (aten.mean.dim, (x, [0, -1], True)),
        (aten.nansum.default, (x, [-1], True)),
        (aten.count_nonzero.default, (B(3, 6),)),
        (aten.count_nonzero.dim_IntList, (x, [0, -1])),
        (aten.prod.default, (x,)),
        (aten.amax.default, (x,)),
        (aten.norm.Scalar, (x,)),
        (aten.linalg_norm.default, (x,)),
        (aten.linalg_norm.ord_str, (x, "nuc", [0, -1])),
        (aten.linalg_matrix_norm.default, (x, 1, [0, 2], True)),
        (aten.linalg_matrix_norm.str_ord, (x,)),
        (aten.argmax.default, (x, -2, True)),
        (aten.argmin.default, (x,)),
        (aten.kthvalue.default, (x, 2)),
        (aten.quantile.default, (x, quantiles, -1, True)),
        (aten.quantile.default, (x, quantiles[0], 0)),
        (aten.quantile.default, (x, quantiles)),
        (aten.quantile.scalar, (x, 0.5)),
        (aten.cosine_similarity.default, (T(4, 6), x, -1)),
        (aten.cosine_similarity.default, (T(4, 1), x, 0)),
        (aten.softmax.int, (x, -2)),
        (aten.softmax.int, (T(), 0)),
        (aten.glu.default, (x,)),
        (aten.renorm.default, (x, 1, -1, 0.5)),
        (aten.cumsum.default, (x, -1)),
        (aten.linear.default, (T(6), T(5, 6), T(5))),
        (aten.linear.default, (T(4, 6), T(6))),
        (aten.addmm.default, (T(1, 5), T(3, 6), T(6, 5)), {"beta": 0.5, "alpha": 2}),
        (aten.addmm.default, (T(3, 1), T(3, 6), T(6, 5)), {"beta": 0}),
        (aten.addmv.default, (T(1), T(3, 6), T(6)), {"beta": 2, "alpha": 3}),
        (aten.baddbmm.default, (T(5), T(4, 3, 6), T(4, 6, 5)), {"beta": 2, "alpha": 3}),
        (aten.baddbmm.default, (T(4, 1, 5), T(4, 3, 6), T(4, 6, 5))),
        (aten.addbmm.default, (T(5), T(4, 3, 6), T(4, 6, 5)), {"beta": 2, "alpha": 3}),
        (aten.matmul.default, (T(6), T(4, 6, 5))),
        (aten.matmul.default, (T(4, 3, 6), T(6, 5))),
        (aten.mm.default, (z, torch.complex(T(6, 5), T(6, 5)))),
        (aten.inner.default, (T(3, 6), T(5, 6))),
        (aten.einsum.default, ("...ij,jk", [T(2, 3, 6), T(6, 5)])),
        (aten.einsum.default, ("...i->i", [T(2, 3, 6)])),
        (aten.einsum.default, ("bii->b", [square])),
        (aten.einsum.default, ("bi,i,bj->j", [T(3, 6), T(6), T(3, 5)])),
        (aten.einsum.default, ("bi,bj->ij", [T(3, 6), T(1, 5)])),
        (aten.einsum.default, ("B i, a B", [T(3, 6), T(5, 3)])),
        (aten.linalg_pinv.atol_rtol_tensor, (square,), {"rtol": torch.tensor(1e-9)}),
        (aten.cov.default, (T(3, 6),), {"fweights": I(3, 6) + 1}),
        (aten.det.default, (T(6, 6),)),
        (aten.adjoint.default, (torch.complex(square, square),)),
        (aten.view.dtype, (T(3, 6), torch.int64)),
        (aten.squeeze.default, (T(3, 1, 6),)),
        (aten.view.default, (x, [6, 2, 6])),
        (aten.select.int, (x, -2, -1)),
        (aten.narrow.default, (x, -1, 2, 3)),
        (aten.slice.Tensor, (x, -1, -3, 5, 2)),
        (aten.unbind.int, (x, -1)),
        (aten.roll.default, (x, [1])),
        (aten.split.Tensor, (x, 4, -1)),
        (aten.tensor_split.sections, (x, 4, 2)),
        (aten.chunk.default, (x, 3, -1)),
        (aten.cat.default, ([x, x + 1], -1)),
        (aten.stack.default, ([x, x + 1], -1)),
        (aten.diff.default, (T(3, 6), 1, -1, T(3, 1), T(3, 2))),
        (aten.diff.default, (T(3, 6), 2)),
        (aten.select_scatter.default, (x, T(4, 6), -3, -1)),
        (aten.constant_pad_nd.default, (x, [0, 0, -1, 1], 2.0)),
        (aten.index_select.default, (x, -1, I(6, 5))),
        (aten.index.Tensor, (x, [I(3, 2)])),
        (aten.index.Tensor, (x, [None, None, I(6, 2, 1)])),
        (aten.index.Tensor, (x, [I(3, 5), I(4, 5)])),
        (aten.index.Tensor, (x, [None, torch.tensor([True, False, True, True])])),
        (aten.gather.default, (x, -1, I(6, 3, 2, 5))),
        (aten.gather.default, (T(), 0, torch.tensor(0))),
        (aten.take_along_dim.default, (x, I(4, 1, 2, 6), 1)),
        (aten.scatter.value, (x, -1, I(6, 3, 4, 1), 2.0)),
        (aten.mse_loss.default, (T(3, 1), T(3, 6), 1)),
        (aten.binary_cross_entropy_with_logits.default, (T(3, 6), T(3, 6), T(6), T(3, 1), 1)),
    ]


def _elementwise() -> list[tuple[Any, ...]]:
    x = T(3, 6)
    found: list[tuple[Any, ...]] = [
        (aten.add.Tensor, (x, T(6)), {"alpha": 2}),
        (aten.add.Tensor, (x, 1.0)),
        (aten.sub.Tensor, (x, T(3, 1))),
        (aten.subtract.Tensor, (x, T(6))),
        (aten.rsub.Tensor, (x, T(6))),
        (aten.mul.Tensor, (x, T(3, 1))),
        (aten.mul.Tensor, (x, 2.0)),
        (aten.multiply.Tensor, (x, T(6))),
        (aten.div.Tensor, (x, T(6))),
        (aten.div.Tensor_mode, (x, T(6)), {"rounding_mode": "floor"}),
        (aten.divide.Tensor, (x, T(6))),
        (aten.true_divide.Tensor, (x, T(6))),
        (aten.floor_divide.default, (x, T(6))),
        (aten.where.self, (B(3, 6), x, T(6))),
        (aten.where.ScalarOther, (B(3, 6), x, 0)),
        (aten.where.ScalarOther, (B(3, 6), x, 1)),
        (aten.masked_fill.Scalar, (x, B(3, 6), 0)),
        (aten.masked_fill.Scalar, (x, B(3, 6), 1)),
        (aten.lerp.Tensor, (x, T(3, 6), T(6))),
        (aten.fill.Scalar, (x, 2.0)),
        (aten.copy.default, (x, T(6))),
        (aten.to.dtype, (x, torch.float32)),
        (aten._to_copy.default, (x,), {"dtype": torch.float32}),
        (aten.type_as.default, (x, torch.zeros(1))),
        (aten.contiguous.default, (x.t(),)),
        (aten.dropout.default, (x, 0.0, True)),
        (aten.alpha_dropout.default, (x, 0.0, True)),
        (aten.feature_dropout.default, (T(3, 4, 6), 0.0, True)),
        (aten.native_dropout.default, (x, 0.0, True)),
        (aten.bernoulli.default, (torch.ones(3, 6),)),
        (aten.__and__.Tensor, (B(3, 6), B(6))),
        (aten.__or__.Tensor, (B(3, 6), B(6))),
        (aten.__xor__.Tensor, (B(3, 6), B(6))),
        (aten.full_like.default, (x, 2.0)),
        (aten.exp.default, (x,)),
    ]
    found += unary("neg real hardswish positive clone detach alias lift_fresh", 3, 6)
    found += unary("lift_fresh_copy zeros_like ones_like", 3, 6)
    found += [(aten.imag.default, (torch.complex(x, x),)), (aten.conj.default, (x,))]
    return found


def _reductions() -> list[tuple[Any, ...]]:
    x = T(3, 4, 6)
    found: list[tuple[Any, ...]] = [
        (aten.sum.dim_IntList, (x, [1])),
        (aten.sum.dim_IntList, (x, [0, 2], True)),
        (aten.mean.dim, (x, [-1])),
        (aten.mean.default, (x,)),
        (aten.nansum.default, (x, [0])),
        (aten.count_nonzero.dim_IntList, (x, [1])),
        (aten.prod.dim_int, (x, 1)),
        (aten.amax.default, (x, [1])),
        (aten.amin.default, (x, [1], True)),
        (aten.aminmax.default, (x,), {"dim": 1}),
        (aten.max.dim, (x, 1)),
        (aten.max.other, (x, T(6))),
        (aten.min.dim, (x, 1, True)),
        (aten.argmin.default, (x, 1)),
        (aten.any.dim, (B(3, 4, 6), 1)),
        (aten.all.dim, (B(3, 4, 6), 1)),
        (aten.var.correction, (x, [1])),
        (aten.std.correction, (x, [1])),
        (aten.var_mean.correction, (x, [1])),
        (aten.std_mean.correction, (x, [1])),
        (aten.norm.ScalarOpt_dim, (x, 2, [1])),
        (aten.median.dim, (x, 1)),
        (aten.nanmedian.dim, (x, 1)),
        (aten.mode.default, (x, 1)),
        (aten.kthvalue.default, (x, 2, 1)),
        (aten.linalg_vector_norm.default, (x, 2, [1])),
        (aten.linalg_norm.default, (x, None, [1])),
        (aten.linalg_matrix_norm.default, (x, 1)),
        (aten.logsumexp.default, (x, [1])),
        (aten.nanmean.default, (x, [1])),
        (aten.quantile.default, (x, torch.tensor([0.2, 0.5], dtype=torch.float64), 1)),
        (aten.nanquantile.scalar, (x, 0.5, 1, True)),
        (aten.cosine_similarity.default, (x, T(4, 6), 1)),
        (aten.softmax.int, (x, 1)),
        (aten.log_softmax.int, (x, 1)),
        (aten._softmax.default, (x, 1, False)),
        (aten._log_softmax.default, (x, 1, False)),
        (aten.glu.default, (x, 1)),
        (aten.renorm.default, (x, 2, 1, 0.5)),
        (aten.argmax.default, (x, 1)),
        (aten.argmax.default, (x,)),
    ]
    for name in ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"):
        found.append((getattr(aten, name).default, (x, 1)))
    return found


def _losses() -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    chances = torch.rand(3, 6, dtype=torch.float64) * 0.8 + 0.1
    signs = torch.where(B(3, 6), 1.0, -1.0).double()
    for how in (0, 1, 2):
        found += [
            (aten.mse_loss.default, (T(3, 6), T(3, 6), how)),
            (aten.l1_loss.default, (T(3, 6), T(3, 6), how)),
            (aten.smooth_l1_loss.default, (T(3, 6), T(3, 6), how)),
            (aten.huber_loss.default, (T(3, 6), T(3, 6), how)),
            (aten.binary_cross_entropy.default, (chances, chances, None, how)),
            (aten.binary_cross_entropy_with_logits.default, (T(3, 6), chances, None, None, how)),
            (aten.kl_div.default, (T(3, 6), chances, how)),
            (aten.poisson_nll_loss.default, (T(3, 6), chances, True, False, 1e-8, how)),
            (aten.soft_margin_loss.default, (T(3, 6), signs, how)),
            (aten.margin_ranking_loss.default, (T(3, 6), T(3, 6), signs, 0.1, how)),
            (aten.hinge_embedding_loss.default, (T(3, 6), signs, 1.0, how)),
        ]
    for how in (0, 2):
        found += [
            (aten.cross_entropy_loss.default, (T(6, 5), I(5, 6), None, how)),
            (aten.cross_entropy_loss.default, (T(6, 5, 3), I(5, 6, 3), None, how)),
            (aten.nll_loss_nd.default, (T(6, 5), I(5, 6), T(5), how)),
            (aten.nll_loss.default, (T(6, 5), I(5, 6), None, how)),
            (aten.nll_loss2d.default, (T(6, 5, 3, 4), I(5, 6, 3, 4), None, how)),
        ]
    spoken = T(7, 6, 5).log_softmax(-1)
    lengths = (torch.full((6,), 7), torch.full((6,), 3))
    found.append((torch.ops.whale.ctc_loss.default, (spoken, I(4, 6, 3) + 1, *lengths, 0, False)))
    return found


def _products() -> list[tuple[Any, ...]]:
    return [
        (aten.linear.default, (T(3, 4, 6), T(5, 6), T(5))),
        (aten.linear.default, (T(4, 6), T(5, 6))),
        (aten.addmm.default, (T(5), T(3, 6), T(6, 5))),
        (aten.addmm.default, (T(3, 5), T(3, 6), T(6, 5))),
        (aten.addmv.default, (T(3), T(3, 6), T(6))),
        (aten.mm.default, (T(3, 6), T(6, 5))),
        (aten.bmm.default, (T(4, 3, 6), T(4, 6, 5))),
        (aten.matmul.default, (T(4, 1, 3, 6), T(2, 6, 5))),
        (aten.matmul.default, (T(6), T(6, 5))),
        (aten.matmul.default, (T(2, 3, 6), T(6))),
        (aten.mv.default, (T(3, 6), T(6))),
        (aten.dot.default, (T(6), T(6))),
        (aten.inner.default, (T(6), T(6))),
        (aten.baddbmm.default, (T(4, 3, 5), T(4, 3, 6), T(4, 6, 5))),
        (aten.addbmm.default, (T(3, 5), T(4, 3, 6), T(4, 6, 5))),
        (aten.einsum.default, ("bik,bjk->bij", [T(4, 3, 6), T(4, 5, 6)])),
        (aten.einsum.default, ("...k,nk->...n", [T(4, 3, 6), T(5, 6)])),
        (aten.einsum.default, ("ij,jk", [T(3, 6), T(6, 5)])),
        (aten.cross.default, (T(4, 3, 6), T(1, 3, 6))),
        (aten.cross.default, (T(4, 6, 3), T(4, 6, 3), -1)),
        (aten.linalg_cross.default, (T(4, 1, 3), T(1, 6, 3))),
        (torch.ops.whale.expert_mm.default, (T(8, 6), T(3, 6, 5), I(3, 8), False)),
    ]


def _layers() -> list[tuple[Any, ...]]:
    image = T(3, 4, 8, 8)
    volume = T(3, 4, 8, 8, 8)
    heads = (T(3, 4, 6, 8), T(3, 4, 5, 8), T(3, 4, 5, 8))
    found: list[tuple[Any, ...]] = [
        (aten.embedding.default, (T(7, 5), I(7, 3, 6))),
        (aten.layer_norm.default, (T(3, 4, 6), [6], T(6), T(6))),
        (aten.layer_norm.default, (T(3, 4, 6), [4, 6])),
        (aten.native_layer_norm.default, (T(3, 4, 6), [6], T(6), T(6), 1e-5)),
        (aten.rms_norm.default, (T(3, 4, 6), [6], T(6))),
        (aten._fused_rms_norm.default, (T(3, 4, 6), [6], T(6), 1e-5)),
        (aten.scaled_dot_product_attention.default, heads),
        (aten.scaled_dot_product_attention.default, (*heads, T(6, 5))),
        (aten.scaled_dot_product_attention.default, (*heads, None, 0.0, True)),
        (aten.conv1d.default, (T(3, 4, 8), T(5, 4, 3), T(5))),
        (aten.conv2d.default, (image, T(5, 4, 3, 3), T(5))),
        (aten.conv2d.default, (image, T(4, 1, 3, 3), T(4), [1, 1], [0, 0], [1, 1], 4)),
        (aten.conv3d.default, (volume, T(5, 4, 3, 3, 3))),
        (aten.batch_norm.default, (image, *_statistics(), False, 0.1, 1e-5, False)),
        (aten.batch_norm.default, (image, *_statistics(), True, 0.1, 1e-5, False)),
        (aten.group_norm.default, (image, 2, T(4), T(4))),
        (aten.instance_norm.default, (image, T(4), T(4), None, None, True, 0.1, 1e-5, False)),
        (aten.upsample_nearest2d.default, (image, [4, 4])),
        (aten.upsample_bilinear2d.default, (image, [4, 4], False)),
        (aten.max_pool2d_with_indices.default, (image, [2, 2])),
    ]
    for space, source in ((1, T(3, 4, 8)), (2, image), (3, volume)):
        window = [2] * space
        for name in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool"):
            found.append((getattr(aten, f"{name}{space}d").default, (source, window)))
    return found


def _statistics() -> tuple[Tensor, ...]:
    return T(4), T(4), T(4), torch.rand(4, dtype=torch.float64) + 0.5


def _views() -> list[tuple[Any, ...]]:
    x = T(3, 4, 6)
    found: list[tuple[Any, ...]] = [
        (aten.view.default, (x, [3, 24])),
        (aten.view.default, (x, [12, 2, 3])),
        (aten.reshape.default, (T(6, 12), [6, 3, 4])),
        (aten.reshape.default, (T(6, 12), [72])),
        (aten._unsafe_view.default, (x, [12, 6])),
        (aten._reshape_alias.default, (x, [12, 6], [6, 1])),
        (aten.flatten.using_ints, (x, 1)),
        (aten.unflatten.int, (x, 2, [2, 3])),
        (aten.ravel.default, (x,)),
        (aten.view_as.default, (x, T(12, 6))),
        (aten.reshape_as.default, (x, T(12, 6))),
        (aten.squeeze.dim, (T(3, 1, 6), 1)),
        (aten.unsqueeze.default, (x, 1)),
        (aten.transpose.int, (x, 0, 2)),
        (aten.swapaxes.default, (x, 0, 2)),
        (aten.swapdims.default, (x, 0, 2)),
        (aten.t.default, (T(3, 6),)),
        (aten.permute.default, (x, [2, 0, 1])),
        (aten.movedim.int, (x, 0, 2)),
        (aten.moveaxis.int, (x, 0, 2)),
        (aten.numpy_T.default, (T(3, 6),)),
        (aten.mT.default, (x,)),
        (aten.adjoint.default, (x,)),
        (aten.expand.default, (T(3, 1, 6), [3, 4, 6])),
        (aten.expand_as.default, (T(1, 6), T(3, 6))),
        (aten.broadcast_to.default, (T(6), [3, 6])),
        (aten.slice.Tensor, (x, 1, 1, 3)),
        (aten.narrow.default, (x, 1, 1, 2)),
        (aten.select.int, (x, 1, 2)),
        (aten.unbind.int, (x, 1)),
        (aten.roll.default, (x, [1], [1])),
        (aten.flip.default, (x, [1])),
        (aten.flipud.default, (x,)),
        (aten.fliplr.default, (x,)),
        (aten.sort.default, (x, 1)),
        (aten.argsort.default, (x, 1)),
        (aten.topk.default, (x, 2, 1)),
        (aten.unfold.default, (x, 1, 2, 1)),
        (aten.diff.default, (x, 1, 1)),
        (aten.select_scatter.default, (x, T(3, 6), 1, 2)),
        (aten.slice_scatter.default, (x, T(3, 2, 6), 1, 1, 3)),
        (aten.split.Tensor, (x, 2, 2)),
        (aten.split.Tensor, (x, 4, 2)),
        (aten.split_with_sizes.default, (x, [2, 4], 2)),
        (aten.chunk.default, (T(4, 18), 3, 1)),
        (aten.tensor_split.sections, (x, 2, 2)),
        (aten.cat.default, ([x, T(3, 4, 6)], 2)),
        (aten.cat.default, ([x, T(3, 4, 2)], 2)),
        (aten.concat.default, ([x, T(3, 4, 6)], 1)),
        (aten.concatenate.default, ([x, T(3, 4, 6)], 1)),
        (aten.stack.default, ([x, T(3, 4, 6)], 1)),
        (aten.repeat_interleave.self_int, (x, 2, 1)),
        (aten.repeat.default, (x, [2, 1, 1, 2])),
        (aten.tile.default, (x, [2, 1])),
        (aten.pad.default, (x, [1, 1])),
        (aten.constant_pad_nd.default, (x, [1, 0, 0, 1])),
    ]
    return found


def _lookups() -> list[tuple[Any, ...]]:
    x = T(3, 4, 6)
    return [
        (aten.index_select.default, (x, 1, I(4, 5))),
        (aten.index.Tensor, (x, [None, I(4, 2, 5)])),
        (aten.gather.default, (x, 1, I(4, 3, 2, 6))),
        (aten.take_along_dim.default, (x, I(4, 3, 2, 6), 1)),
        (aten.scatter.src, (x, 1, I(1, 3, 1, 6), T(3, 1, 6))),
        (aten.scatter_add.default, (x, 1, I(4, 3, 2, 6), T(3, 2, 6))),
        (aten.one_hot.default, (I(5, 3, 4), 5)),
        (aten.embedding.default, (T(5, 6), I(5, 3, 4)), {"scale_grad_by_freq": True}),
        (aten.masked_scatter.default, (x, B(4, 6), x + 1)),
        (aten.take.default, (x, I(72, 3, 2))),
        (aten.put.default, (x, I(72, 3), T(3))),
        (aten.unique_consecutive.default, (x,)),
        (aten.unique_dim.default, (x, 1)),
        (aten.nonzero.default, (B(3, 6),)),
        (aten.kron.default, (T(3, 2), T(2, 3))),
        (aten.isin.Tensor_Tensor, (I(5, 3, 4), I(5, 2))),
    ]


EXAMPLES = examples()
WITHOUT_EXAMPLE = {
    "_grouped_mm": "has no CPU form in double precision; its letters all run special local code",
    "grouped_mm": "the same operation under another name",
    "grouped_mm_fallback": "belongs to transformers",
    "empty_like": "its values are not defined",
    "softmin": "is no operation of aten in this version",
}


# --------------------------------------------------------------------------------------------------
# an example as a node


class Call:
    """One example as a node of a graph, its tensors and its result."""

    def __init__(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        graph = Graph()

        def place(value: Any) -> Any:
            if isinstance(value, Tensor):
                node = graph.placeholder(f"x{len(graph.nodes)}")
                node.meta["val"] = value
                return node
            return [place(each) for each in value] if isinstance(value, list) else value

        placed = tuple(place(value) for value in args)
        named = {name: place(value) for name, value in kwargs.items()}
        self.node = graph.call_function(target, placed, named)
        self.result = target(*args, **kwargs)
        self.node.meta["val"] = self.result
        self.row = row_of(self.node)
        self.op = Operation(self.node, Shapes(None))  # type: ignore[arg-type]

    @property
    def inputs(self) -> list[Tensor]:
        return [node.meta["val"] for node in self.op.inputs]

    def dims(self) -> Dims | None:
        return self.row.dims(self.op) if self.row.dims is not None else None

    def run(self, inputs: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Results on other inputs. `shapes`: of the results, for what is given sizes."""
        if self.op.name in VIEWS:
            return [inputs[0].reshape(shapes[0])]
        if self.op.name in EXPANDS:
            return [inputs[0].expand(shapes[0])]
        if self.op.name in SPLITS:
            dim = int(self.op.argument("dim"))
            return list(torch.split(inputs[0], [shape[dim] for shape in shapes], dim))
        given = dict(zip(self.op.inputs, inputs, strict=True))

        def put(value: Any) -> Any:
            if isinstance(value, Node):
                return given.get(value, value.meta["val"])
            return [put(each) for each in value] if isinstance(value, list) else value

        args = tuple(put(value) for value in self.node.args)
        kwargs = {name: put(value) for name, value in self.node.kwargs.items()}
        return results_of(self.node.target(*args, **kwargs))  # type: ignore[operator]


def results_of(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, list | tuple) else [value]


@dataclass(frozen=True)
class Cut:
    """Where one tensor is cut in two: in each run of a dim, between two granules."""

    dim: int
    runs: int
    granules: int
    """in each run, the same number for all tensors that are cut together"""

    def part(self, tensor: Tensor, first: bool) -> Tensor:
        parts = []
        for run in tensor.chunk(self.runs, self.dim):
            unit = run.shape[self.dim] // self.granules
            size = unit * max(1, self.granules // 3)  # parts of different sizes
            parts.append(run.split([size, run.shape[self.dim] - size], self.dim)[not first])
        return torch.cat(parts, self.dim)


def identity(example: tuple[Any, ...]) -> str:
    return str(example[0]).replace("aten.", "")


def call_of(example: tuple[Any, ...]) -> Call:
    target, args = example[:2]
    return Call(target, args, example[2] if len(example) > 2 else {})


def same(found: Tensor, wanted: Tensor) -> bool:
    if found.shape != wanted.shape:
        return False
    if not is_differentiable(found):
        return bool(torch.equal(found, wanted))
    return bool(torch.allclose(found, wanted, rtol=1e-6, atol=1e-8, equal_nan=True))


# --------------------------------------------------------------------------------------------------
# tests


def test_every_row_with_dims_has_an_example() -> None:
    shown = {call_of(example).op.name for example in EXAMPLES}
    missing = {name for name, row in TABLE.items() if row.dims is not None} - shown
    assert missing <= set(WITHOUT_EXAMPLE), missing - set(WITHOUT_EXAMPLE)


@pytest.mark.parametrize("example", EXAMPLES, ids=identity)
def test_parts_along_a_letter_are_parts_of_the_result(example: tuple[Any, ...]) -> None:
    call = call_of(example)
    dims = call.dims()
    if dims is None:
        return
    assert [len(labels) for labels in dims.inputs] == [one.ndim for one in call.inputs]
    wanted = results_of(call.result)
    assert [len(labels) for labels in dims.outputs] == [one.ndim for one in wanted]
    letters = {label for labels in dims.inputs for label in labels if label is not None}
    for letter in sorted(letters):
        if dims.local.get(letter) in (None, "mean", "mean loss"):
            _check_letter(call, dims, letter, wanted)


def _batch_first_examples() -> list[tuple[Any, ...]]:
    """Rows that say only where the batch is: (operation, arguments)."""
    image = T(3, 4, 8, 8)
    volume = T(3, 4, 8, 8, 8)
    maxima = aten.max_pool2d_with_indices.default(image, [2, 2])
    highest = aten.max_pool3d_with_indices.default(volume, [2, 2, 2])
    one = [1, 1]
    return [
        (aten.convolution.default, (image, T(5, 4, 3, 3), None, one, one, one, False, [0, 0], 1)),
        (aten.conv_transpose1d.default, (T(3, 4, 8), T(4, 5, 3))),
        (aten.conv_transpose2d.input, (image, T(4, 5, 3, 3))),
        (aten.conv_transpose3d.input, (volume, T(4, 5, 3, 3, 3))),
        (aten.native_group_norm.default, (image, T(4), T(4), 3, 4, 64, 2, 1e-5)),
        (aten.im2col.default, (image, [2, 2], one, [0, 0], one)),
        (aten.col2im.default, (T(3, 16, 16), [8, 8], [2, 2], one, [0, 0], [2, 2])),
        (aten.pixel_shuffle.default, (image, 2)),
        (aten.pixel_unshuffle.default, (image, 2)),
        (aten._adaptive_avg_pool2d.default, (image, [3, 3])),
        (aten._adaptive_avg_pool3d.default, (volume, [3, 3, 3])),
        (aten.max_pool1d_with_indices.default, (T(3, 4, 8), [2])),
        (aten.max_pool3d_with_indices.default, (volume, [2, 2, 2])),
        (aten.max_unpool2d.default, (*maxima, [8, 8])),
        (aten.max_unpool3d.default, (*highest, [8, 8, 8], [2, 2, 2], [0, 0, 0])),
        (aten.grid_sampler.default, (image, T(3, 5, 5, 2), 0, 0, False)),
        (aten.grid_sampler_2d.default, (image, T(3, 5, 5, 2), 0, 0, False)),
        (aten.grid_sampler_3d.default, (volume, T(3, 5, 5, 5, 3), 0, 0, False)),
        (aten.upsample_nearest1d.default, (T(3, 4, 8), [5])),
        (aten.upsample_nearest3d.default, (volume, [5, 5, 5])),
        (aten.upsample_linear1d.default, (T(3, 4, 8), [5], False)),
        (aten.upsample_bicubic2d.default, (image, [5, 5], False)),
        (aten.upsample_trilinear3d.default, (volume, [5, 5, 5], False)),
        (aten._upsample_nearest_exact1d.default, (T(3, 4, 8), [5])),
        (aten._upsample_nearest_exact2d.default, (image, [5, 5])),
        (aten._upsample_nearest_exact3d.default, (volume, [5, 5, 5])),
        (aten._upsample_bilinear2d_aa.default, (image, [5, 5], False)),
        (aten._upsample_bicubic2d_aa.default, (image, [5, 5], False)),
    ]


def test_rows_name_the_rules_of_the_walk_over_the_samples() -> None:
    """A new operation is described in one place: its row names its rule, and each rule is used."""
    assert {row.samples for row in TABLE.values()} == set(RULES)


NAMES_ELSEWHERE = {
    "capture/check_parts.py": "what is drawn by a dropout is not compared",
    "capture/experts.py": "the pattern that it rewrites",
    "capture/functional.py": "values that were written past their gradient",
    "capture/losses.py": "the sums and means that it rewrites",
    "capture/ops.py": "`detach` stops gradients",
    "capture/out_of_place.py": "the inverse of each view",
    "capture/sample_pick_rules.py": "a rule of several operations tells them apart",
    "capture/samples.py": "`arange` counts samples, a `mean` is divided by their number",
    "capture/second_call.py": "a slice of everything is no slice",
    "capture/simplify.py": "the patterns that it rewrites",
    "capture/sizes.py": "a user writes `x[mask]` for `index`",
    "lowering/communication.py": "local forms that run in place of an operation",
    "lowering/program.py": "embeddings with sparse gradients",
    "planning/problem.py": "norms whose statistics devices would not share are refused",
    "sharding/describe.py": "what the plan lists when devices have parts of it",
    "sharding/expert_rows.py": "tokens travel for `expert_mm` alone",
    "sharding/local.py": "local forms that run in place of an operation",
}
"""modules that compare with the name of an operation, and why that is no fact for a row"""


def _asks_for_names(tree: ast.Module) -> bool:
    for statement in tree.body:
        if isinstance(statement, ast.ImportFrom):
            if {each.name for each in statement.names} & {"op_name", "aten_name"}:
                return True
    return False


def _compared_words(tree: ast.Module) -> set[str]:
    """Words in comparisons, and in the sets that a module begins with: it may look names up there."""
    places: list[ast.AST] = [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    words: set[str] = set()
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            places += [node for node in ast.walk(statement) if isinstance(node, ast.Set)]
    for place in places:
        for part in ast.walk(place):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                words.add(part.value)
    return words


def test_facts_about_operations_stand_in_the_table_alone() -> None:
    root = Path(wh.__file__).parent
    operations = TABLE.keys() - {"getitem"}  # Python's own
    found: set[str] = set()
    for path in root.rglob("*.py"):
        module = path.relative_to(root).as_posix()
        if module.startswith("operations/"):
            continue
        tree = ast.parse(path.read_text())
        if _asks_for_names(tree) and _compared_words(tree) & operations:
            found.add(module)
    assert found == set(NAMES_ELSEWHERE), found ^ set(NAMES_ELSEWHERE)


BATCH_FIRST = _batch_first_examples()
BATCH_FIRST_WITHOUT_EXAMPLE = {
    "_convolution": "`convolution` with switches of its backend",
    "_convolution_mode": "`convolution` with its padding by name",
    "fractional_max_pool2d": "draws its windows: their tensor holds samples and is no weight",
    "fractional_max_pool3d": "draws its windows",
}


def test_every_row_that_says_only_where_the_batch_is_has_an_example() -> None:
    shown = {str(example[0]).split(".")[1] for example in BATCH_FIRST}
    only = {name for name, row in TABLE.items() if row.batch_first and row.dims is None}
    assert only - shown == set(BATCH_FIRST_WITHOUT_EXAMPLE)


@pytest.mark.parametrize("example", BATCH_FIRST, ids=identity)
def test_parts_of_the_batch_are_parts_of_the_result(example: tuple[Any, ...]) -> None:
    """The leading tensors are cut in dim 0 after two of three samples, the others stay whole."""
    target, args = example
    name = str(target).split(".")[1]
    leading = TABLE[name].batch_first
    parts: list[list[Tensor]] = []
    for rows in (slice(0, 2), slice(2, 3)):
        cut = [arg[rows] if place < leading else arg for place, arg in enumerate(args)]
        if name == "native_group_norm":
            cut[3] = rows.stop - rows.start  # the number of samples, as an argument
        parts.append(results_of(target(*cut)))
    whole = results_of(target(*args))
    for place, wanted in enumerate(whole):
        assert same(torch.cat([part[place] for part in parts]), wanted)


def _cuts(dims: Dims, letter: str, tensors: Sequence[Tensor]) -> list[Cut | None]:
    """How each tensor is cut along a letter; dims of size 1 are broadcast."""
    runs = dims.segments.get(letter, (1,) * len(tensors))
    labels = (*dims.inputs, *dims.outputs)
    places: list[int | None] = []
    for tensor, names in zip(tensors, labels, strict=True):
        own = [dim for dim, name in enumerate(names) if name == letter and tensor.shape[dim] > 1]
        places.append(own[0] if own else None)
    granules = 0
    for tensor, dim, number in zip(tensors, places, runs, strict=True):
        if dim is not None:
            granules = gcd(granules, tensor.shape[dim] // number)
    if granules < 2:
        return [None] * len(tensors)
    return [
        None if dim is None else Cut(dim, number, granules)
        for dim, number in zip(places, runs, strict=True)
    ]


def _check_letter(call: Call, dims: Dims, letter: str, wanted: list[Tensor]) -> None:
    cuts = _cuts(dims, letter, [*call.inputs, *wanted])
    before = cuts[: len(call.inputs)]
    after = cuts[len(call.inputs) :]
    if not any(before):
        return
    found: list[list[Tensor]] = []
    shares: list[float] = []
    for first in (True, False):
        inputs = []
        share = 1.0
        for place, (tensor, cut) in enumerate(zip(call.inputs, before, strict=True)):
            if cut is not None:
                inputs.append(cut.part(tensor, first))
                share = inputs[-1].numel() / tensor.numel()
            elif letter in dims.sums and place in dims.added and not first:
                inputs.append(torch.zeros_like(tensor))  # added once
            else:
                inputs.append(tensor)
        shapes = []
        for tensor, cut in zip(wanted, after, strict=True):
            shapes.append(tuple((cut.part(tensor, first) if cut else tensor).shape))
        found.append(call.run(inputs, shapes))
        is_mean = dims.local.get(letter) in ("mean", "mean loss")
        shares.append(share if is_mean else 1.0)
    for place, (whole, cut) in enumerate(zip(wanted, after, strict=True)):
        if cut is None and dims.after.get(letter) == SAME:
            assert all(same(part[place], whole) for part in found), f"{letter} changes a result"
            continue
        if cut is None:
            assert letter in dims.sums, f"{letter} is in no result and not summed"
            total = found[0][place] * shares[0] + found[1][place] * shares[1]
            assert same(total.to(whole.dtype), whole), f"parts along {letter} do not add up"
            continue
        for part, first in zip(found, (True, False), strict=True):
            expected = cut.part(whole, first)
            assert same(part[place], expected), f"part of the result along {letter} differs"


@pytest.mark.parametrize("example", EXAMPLES, ids=identity)
def test_linear_in_its_groups(example: tuple[Any, ...]) -> None:
    call = call_of(example)
    shapes = [tuple(one.shape) for one in results_of(call.result)]
    for group in call.row.linear(call.op):
        if not all(is_differentiable(call.inputs[place]) for place in group):
            continue
        other = list(call.inputs)
        both = list(call.inputs)
        for place in group:
            other[place] = torch.randn_like(call.inputs[place])
            both[place] = call.inputs[place] + 3 * other[place]
        first = call.run(call.inputs, shapes)
        second = call.run(other, shapes)
        for one, two, sum_of_both in zip(first, second, call.run(both, shapes), strict=True):
            if one.dtype in (torch.float64, torch.complex128):
                assert same(sum_of_both, one + 3 * two)
            else:  # a cast rounds
                assert torch.allclose(sum_of_both, one + 3 * two, rtol=1e-4, atol=1e-4)


def test_a_partial_sum_of_numbers_is_not_rounded_to_integers() -> None:
    rounded = Call(aten.sum.dim_IntList, (T(3, 6), [1]), {"dtype": torch.int64})
    summed = Call(aten.sum.dim_IntList, (T(3, 6), [1]), {})
    assert not any(PARTIAL in option.inputs for option in options_of(rounded.op, {}))
    assert any(PARTIAL in option.inputs for option in options_of(summed.op, {}))


@pytest.mark.parametrize("example", EXAMPLES, ids=identity)
def test_options_name_dims_that_are_there(example: tuple[Any, ...]) -> None:
    call = call_of(example)
    tensors = [*call.inputs, *results_of(call.result)]
    for option in options_of(call.op, {}):
        for tensor, placement in zip(tensors, (*option.inputs, *option.outputs), strict=True):
            assert isinstance(placement, str) or placement < tensor.ndim


@pytest.mark.parametrize("example", EXAMPLES, ids=identity)
def test_what_only_moves_entries_makes_no_new_ones(example: tuple[Any, ...]) -> None:
    call = call_of(example)
    if not call.row.moves or call.dims() is None:  # a view of bits has no dims
        return
    if any(one.is_complex() for one in (*call.inputs, *results_of(call.result))):
        return  # `adjoint` conjugates; positions of samples are no complex numbers
    before = set(torch.cat([one.float().flatten() for one in call.inputs]).tolist())
    after = set(torch.cat([one.float().flatten() for one in results_of(call.result)]).tolist())
    assert after <= before


@pytest.mark.parametrize("example", EXAMPLES, ids=identity)
def test_what_costs_nothing_is_a_view(example: tuple[Any, ...]) -> None:
    call = call_of(example)
    if not call.row.free or op_name(call.node) == "_unsafe_view":
        return
    storage = call.inputs[0].untyped_storage().data_ptr()
    for result in results_of(call.result):
        assert result.untyped_storage().data_ptr() == storage


@pytest.mark.parametrize("example", _products(), ids=identity)
def test_flop_of_a_product_is_two_for_each_combination_of_its_letters(
    example: tuple[Any, ...],
) -> None:
    call = call_of(example)
    dims = call.dims()
    if call.row.flop is None or dims is None or call.op.name == "expert_mm":
        return
    sizes: dict[str, int] = {}
    for tensor, labels in zip(call.inputs, dims.inputs, strict=True):
        for label, size in zip(labels, tensor.shape, strict=True):
            sizes[str(label)] = max(size, sizes.get(str(label), 1))

    def as_value(value: Any) -> Any:
        if isinstance(value, Tensor):
            return Value(tuple(value.shape), value.dtype)
        return [as_value(each) for each in value] if isinstance(value, list) else value

    arguments = [as_value(value) for value in example[1]]
    assert call.row.flop(arguments, {}, as_value(call.result)) == 2 * prod(sizes.values())


@pytest.mark.parametrize("example", _products(), ids=identity)
def test_a_product_is_linear_in_its_factors(example: tuple[Any, ...]) -> None:
    call = call_of(example)
    groups = call.row.linear(call.op)
    for place in call.row.factors or ():
        assert any(place in group for group in groups)


PASSING = [each for each in EXAMPLES if call_of(each).row.passes_gradient_to is not None]


@pytest.mark.parametrize("example", PASSING, ids=identity)
def test_a_gradient_that_is_not_passed_on_lies_in_new_memory(example: tuple[Any, ...]) -> None:
    call = call_of(example)
    assert call.row.passes_gradient_to is not None
    receivers = call.row.passes_gradient_to(call.node)
    statistics = {call.op.slot("running_mean"), call.op.slot("running_var")}
    inputs: list[Tensor] = []
    for place, tensor in enumerate(call.inputs):
        inputs.append(tensor.clone())
        inputs[-1].requires_grad = is_differentiable(tensor) and place not in statistics
    shapes = [tuple(one.shape) for one in results_of(call.result)]
    results = [one for one in call.run(inputs, shapes) if one.requires_grad]
    leaves = [one for one in inputs if one.requires_grad]
    readers = [node for node, one in zip(call.op.inputs, inputs, strict=True) if one.requires_grad]
    if not results:
        return  # views of bits, and whole numbers
    given = [torch.randn_like(one) for one in results]
    gradients = torch.autograd.grad(results, leaves, given, allow_unused=True)
    num_entries = max(one.numel() for one in results)
    shared = {one.untyped_storage().data_ptr() for one in given}
    for node, gradient in zip(readers, gradients, strict=True):
        if gradient is None or 0 in gradient.stride():
            continue  # torch copies a gradient that is expanded
        if node in receivers and gradient.numel() == num_entries:
            continue
        storage = gradient.untyped_storage().data_ptr()
        assert storage not in shared, f"the gradient of {node} is not in new memory"
        shared.add(storage)


@pytest.mark.parametrize(
    ("target", "on", "off"),
    [
        (aten.dropout.default, (0.5, True), (0.5, False)),
        (aten.alpha_dropout.default, (0.5, True), (0.0, True)),
        (aten.feature_dropout.default, (0.5, True), (0.0, True)),
        (aten.native_dropout.default, (0.5, True), (0.0, True)),
        (aten.rrelu.default, (0.1, 0.9, True), (0.1, 0.9, False)),
    ],
    ids=str,
)
def test_random_when_it_draws(target: Any, on: tuple[Any, ...], off: tuple[Any, ...]) -> None:
    x = -torch.rand(4, 16, 3) - 0.1
    for settings in (on, off):
        call = Call(target, (x, *settings), {})
        torch.manual_seed(1)
        first = results_of(target(x, *settings))[0]
        torch.manual_seed(2)
        second = results_of(target(x, *settings))[0]
        assert is_random(call.node) is not torch.equal(first, second)
