"""The loss as a sum of terms: parts of the mini-batch must add up to the loss and gradients of
plain PyTorch on the whole.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.unit.loss_parts import CLASSES, TOKENS, Batch, Loss, Net, check, make_batch
from tests.unit.test_kinds import export_graph
from whale.capture.kinds import value_kinds
from whale.capture.losses import rewrite_loss
from whale.capture.samples import SampleFlow


def per_token(m: nn.Module, b: Batch) -> Tensor:
    return F.mse_loss(m(b["x"]), b["soft"], reduction="none").mean(-1)


def ce(m: nn.Module, b: Batch, **options: Any) -> Tensor:
    return F.cross_entropy(m(b["x"]).view(-1, CLASSES), b["y"].view(-1), **options)


def siamese(m: nn.Module, b: Batch) -> Tensor:
    both = m(torch.cat([b["x"], -b["x"]]))
    half = b["x"].shape[0]
    return F.l1_loss(both[:half], both[half:])


def penalty(m: nn.Module) -> Tensor:
    return 0.1 * sum(p.square().sum() for p in m.parameters())


ADDITIVE: dict[str, Loss] = {
    "ce ignore_index": ce,
    "ce dims after class": lambda m, b: F.cross_entropy(m(b["x"]).transpose(1, 2), b["y"]),
    "ce sum / num_items": lambda m, b: ce(m, b, reduction="sum") / b["num_items"],
    "ce class weights": lambda m, b: ce(m, b, weight=m.class_weight),
    "ce smoothing": lambda m, b: ce(m, b, label_smoothing=0.1),
    "ce weights and smoothing": lambda m, b: ce(m, b, weight=m.class_weight, label_smoothing=0.1),
    "ce probability targets": lambda m, b: F.cross_entropy(
        m(b["x"]).mean(1), b["soft"].mean(1).softmax(-1)
    ),
    "ce probabilities over tokens": lambda m, b: F.cross_entropy(
        m(b["x"]).transpose(1, 2), b["soft"].transpose(1, 2), label_smoothing=0.2
    ),
    "ce probabilities, weights": lambda m, b: F.cross_entropy(
        m(b["x"])[:, 0], b["soft"][:, 0], weight=m.class_weight
    ),
    "ce pseudo-labels": lambda m, b: F.cross_entropy(m(b["x"])[:, 0], m(b["x"])[:, 1].argmax(-1)),
    "ce label": lambda m, b: F.cross_entropy(m(b["x"])[:, -1], b["label"]),
    "nll": lambda m, b: F.nll_loss(m(b["x"]).log_softmax(-1).flatten(0, 1), b["y"].flatten()),
    "nll 2d": lambda m, b: F.nll_loss(
        m(b["x"]).log_softmax(-1).permute(0, 2, 1).unsqueeze(-1).contiguous(), b["y"].unsqueeze(-1)
    ),
    "mse": lambda m, b: F.mse_loss(m(b["x"]), b["soft"]),
    "mse sum": lambda m, b: F.mse_loss(m(b["x"]), b["soft"], reduction="sum"),
    "l1": lambda m, b: F.l1_loss(m(b["x"]), b["soft"]),
    "smooth l1": lambda m, b: F.smooth_l1_loss(m(b["x"]), b["soft"]),
    "huber": lambda m, b: F.huber_loss(m(b["x"]), b["soft"], delta=0.3),
    "bce": lambda m, b: F.binary_cross_entropy(m(b["x"]).sigmoid(), b["soft"]),
    "bce logits": lambda m, b: F.binary_cross_entropy_with_logits(
        m(b["x"]), b["soft"], pos_weight=m.class_weight
    ),
    "kl batchmean": lambda m, b: F.kl_div(
        m(b["x"]).log_softmax(-1), b["soft"].softmax(-1), reduction="batchmean"
    ),
    "kl mean": lambda m, b: F.kl_div(m(b["x"]).log_softmax(-1), b["soft"].softmax(-1)),
    "poisson nll": lambda m, b: F.poisson_nll_loss(m(b["x"]), b["soft"]),
    "cosine embedding": lambda m, b: F.cosine_embedding_loss(
        m(b["x"])[:, 0], b["soft"][:, 0], (b["label"] > 2).long() * 2 - 1
    ),
    "triplet inside a sample": lambda m, b: F.triplet_margin_loss(
        m(b["x"])[:, 0], m(b["x"])[:, 1], m(b["x"])[:, 2]
    ),
    "mean": lambda m, b: m(b["x"]).square().mean(),
    "mean over dims": lambda m, b: (m(b["x"]).square().mean((0, 1)) * m.class_weight).sum(),
    "sum": lambda m, b: m(b["x"]).square().sum(),
    "sum / samples": lambda m, b: m(b["x"]).square().sum() / b["x"].shape[0],
    "sum / elements": lambda m, b: m(b["x"]).square().sum() / m(b["x"]).numel(),
    "sum / sqrt samples": lambda m, b: m(b["x"]).square().sum() / b["x"].shape[0] ** 0.5,
    "masked mean": lambda m, b: (per_token(m, b) * b["mask"]).sum() / b["mask"].sum(),
    "masked mean eps": lambda m, b: (
        (per_token(m, b) * b["mask"]).sum() / (b["mask"].sum() + 1e-5) / 3
    ),
    "masked mean clamp": lambda m, b: (
        (per_token(m, b) * b["mask"]).sum() / b["mask"].sum().clamp(min=1)
    ),
    "masked sqrt": lambda m, b: (per_token(m, b) * b["mask"]).sum() / b["mask"].sum().sqrt(),
    "divided inside": lambda m, b: (per_token(m, b) * b["mask"] / b["mask"].sum()).sum(),
    "normalised mask": lambda m, b: (per_token(m, b) * (b["mask"] / b["mask"].sum())).sum(),
    "whole maximum": lambda m, b: (per_token(m, b) * b["mask"]).mean() / b["y"].max(),
    "nested means": lambda m, b: ((per_token(m, b) * b["mask"]).sum(1) / b["mask"].sum(1)).mean(),
    "weighted samples": lambda m, b: (
        (per_token(m, b).mean(1) * b["mask"][:, 1]).sum() / b["mask"][:, 1].sum()
    ),
    "class weight buffer in a denominator": lambda m, b: (
        (per_token(m, b).mean(1) * m.class_weight[b["label"]]).sum()
        / m.class_weight[b["label"]].sum()
    ),
    "learned temperature": lambda m, b: (
        F.cross_entropy(m(b["x"])[:, 0] * m.scale.exp(), b["label"]) * m.scale + m.scale.log()
    ),
    "two denominators and a penalty": lambda m, b: (
        ce(m, b) + 0.5 * F.mse_loss(m(b["x"]), b["soft"]) + penalty(m)
    ),
    "constant": lambda m, b: 1 - (2.0 - F.mse_loss(m(b["x"]), b["soft"])) * 3,
    "subtracted": lambda m, b: -(ce(m, b) - 2 * per_token(m, b).mean()) / 4,
    "torch.subtract of a penalty": lambda m, b: torch.subtract(ce(m, b), penalty(m), alpha=3),
    "torch.subtract from a penalty": lambda m, b: torch.subtract(penalty(m), ce(m, b)),
    "torch.subtract of a number": lambda m, b: torch.subtract(ce(m, b), 2.0),
    "torch.divide, torch.multiply": lambda m, b: torch.multiply(
        torch.true_divide(torch.divide(ce(m, b), 3), m.scale), torch.tensor(2.0)
    ),
    "where beside a sum": lambda m, b: torch.where(
        m.class_weight > 1, m(b["x"]).sum((0, 1)), m.class_weight * m.scale
    ).sum(),
    "sum over the samples, looked up": lambda m, b: (
        m(b["x"]).sum((0, 1))[torch.tensor([1, 1, 3])]
        + m(b["x"]).sum((0, 1)).gather(0, torch.tensor([4, 0, 0]))
    ).sum(),
    "linear without bias over the samples": lambda m, b: F.linear(
        m(b["x"])[:, 0].t(), b["soft"][:, 0].t()
    ).sum(),
    "stack sum": lambda m, b: torch.stack([ce(m, b), per_token(m, b).mean(), penalty(m)]).sum(),
    "stack mean": lambda m, b: torch.stack([ce(m, b), per_token(m, b).mean()]).mean(),
    "stack weighted": lambda m, b: (
        torch.stack([ce(m, b), per_token(m, b).mean()]) * m.class_weight[:2]
    ).sum(),
    "differences of sums": lambda m, b: m(b["x"]).sum((0, 1)).diff().sum(),
    "sum of a list": lambda m, b: sum([ce(m, b), per_token(m, b).mean(), penalty(m)]),
    "the same term twice": lambda m, b: (lambda loss: loss + (loss + penalty(m)))(ce(m, b)),
    "rows of a mask, all elements": lambda m, b: (
        m(b["x"])[b["mask"] > 0].square().sum() / m(b["x"])[b["mask"] > 0].numel()
    ),
    "inputs only": lambda m, b: ce(m, b) + b["mask"].mean(),
    "rows by position": lambda m, b: F.mse_loss(
        m(b["x"])[torch.arange(b["x"].shape[0]), b["label"]],
        b["soft"][torch.arange(b["x"].shape[0]), b["label"]],
    ),
    "gather": lambda m, b: (
        -m(b["x"]).log_softmax(-1).gather(2, b["y"].clamp(min=0).unsqueeze(-1)).mean()
    ),
    "siamese": lambda m, b: siamese(m, b),
    "siamese by a view": lambda m, b: F.l1_loss(
        *m(torch.cat([b["x"], -b["x"]])).view(2, -1, TOKENS, CLASSES).unbind(0)
    ),
    "rows of a mask": lambda m, b: per_token(m, b)[b["mask"] > 0].mean(),
    "rows of equal masks": lambda m, b: (
        (m(b["x"])[b["y"] != -100] - b["soft"][b["y"] != -100]).square().mean()
    ),
    "rows of a mask, counted": lambda m, b: (
        per_token(m, b)[b["mask"] > 0].sum() / b["y"][b["mask"] > 0].shape[0]
    ),
    "classes of rows": lambda m, b: F.cross_entropy(
        m(b["x"])[b["y"] != -100], b["y"][b["y"] != -100]
    ),
    "masked select": lambda m, b: per_token(m, b).masked_select(b["y"] != -100).mean(),
    "sequence first": lambda m, b: F.cross_entropy(
        m(b["x"]).transpose(0, 1).reshape(-1, CLASSES), b["y"].t().reshape(-1)
    ),
    "product over the samples": lambda m, b: torch.einsum(
        "bi,bj->ij", m(b["x"])[:, 0], b["soft"][:, 0]
    ).sum(),
    "matmul over the samples": lambda m, b: (m(b["x"])[:, 0].t() @ b["soft"][:, 0]).trace(),
}


@pytest.mark.parametrize("name", ADDITIVE)
def test_parts_add_up_to_the_whole(name: str) -> None:
    torch.manual_seed(0)
    check(Net().double(), make_batch(), ADDITIVE[name], 1e-12, [(4, 3, 3), (1, 9)])


def in_trace(loss: Loss) -> Loss:
    """torch.export keeps only the lines of functions named `forward` in its stack traces: this
    names a function so.
    """
    loss.__code__ = loss.__code__.replace(co_name="forward")  # type: ignore[attr-defined]
    return loss


@in_trace
def log_of_mean(m: nn.Module, b: Batch) -> Tensor:
    mean = m(b["x"]).square().mean()
    return torch.log(mean)


@in_trace
def product_of_means(m: nn.Module, b: Batch) -> Tensor:
    first = m(b["x"]).softmax(-1).mean((0, 1))
    second = F.one_hot(m(b["x"]).argmax(-1), CLASSES).double().mean((0, 1))
    return (first * second).sum() * CLASSES


@in_trace
def contrastive(m: nn.Module, b: Batch) -> Tensor:
    scores = m(b["x"])[:, 0] @ m(b["x"])[:, 1].t()
    return F.cross_entropy(scores, torch.arange(b["x"].shape[0]))


@in_trace
def centred(m: nn.Module, b: Batch) -> Tensor:
    h = m(b["x"])[:, 0]
    return (h - h.mean(0)).pow(4).mean()


@in_trace
def rolled(m: nn.Module, b: Batch) -> Tensor:
    h = m(b["x"])[:, 0]
    return F.triplet_margin_loss(h, m(b["x"])[:, 1], h.roll(1, 0))


@in_trace
def largest(m: nn.Module, b: Batch) -> Tensor:
    return m(b["x"]).square().mean((1, 2)).max()


@in_trace
def sqrt_of_mean(m: nn.Module, b: Batch) -> Tensor:
    return F.mse_loss(m(b["x"]), b["soft"]).sqrt()


@in_trace
def per_sample(m: nn.Module, b: Batch) -> Tensor:
    return m(b["x"]).mean((1, 2))


@in_trace
def targets_of_the_model(m: nn.Module, b: Batch) -> Tensor:
    h = m(b["x"])[:, 0]
    return F.cross_entropy(h, torch.where(h.max(-1).values > 0.2, h.argmax(-1), -100))


@in_trace
def masked_by_the_model(m: nn.Module, b: Batch) -> Tensor:
    confident = (m(b["x"]).softmax(-1).amax(-1) > 0.25).double()
    return (per_token(m, b) * confident).sum() / confident.sum()


@in_trace
def rows_of_other_masks(m: nn.Module, b: Batch) -> Tensor:
    return (per_token(m, b)[b["mask"] > 0] - b["soft"][:, :, 0][b["mask"] > 0.5]).square().mean()


@in_trace
def rows_picked_by_the_model(m: nn.Module, b: Batch) -> Tensor:
    h = per_token(m, b)
    return h[h > 0.3].mean()


@in_trace
def difference_to_a_weight(m: nn.Module, b: Batch) -> Tensor:
    return m(b["x"]).sum((0, 1)).diff(prepend=m.scale.view(1))[:2].sum()


REFUSED: dict[Loss, tuple[str, str]] = {
    difference_to_a_weight: ("diff(prepend=m.scale.view(1))", "`diff`"),
    log_of_mean: ("return torch.log(mean)", "`log`"),
    product_of_means: ("return (first * second).sum() * CLASSES", "`mul`"),
    contrastive: (
        'scores = m(b["x"])[:, 0] @ m(b["x"])[:, 1].t()',
        "every sample with every other",
    ),
    centred: ("return (h - h.mean(0)).pow(4).mean()", "combines each sample with"),
    rolled: (
        'return F.triplet_margin_loss(h, m(b["x"])[:, 1], h.roll(1, 0))',
        "`roll` works across the samples",
    ),
    largest: ('return m(b["x"]).square().mean((1, 2)).max()', "`max` is taken over all samples"),
    sqrt_of_mean: ('return F.mse_loss(m(b["x"]), b["soft"]).sqrt()', "`sqrt`"),
    per_sample: ('return m(b["x"]).mean((1, 2))', "one value for each sample"),
    targets_of_the_model: ("return F.cross_entropy(h, torch.where(", "computed by the model"),
    rows_of_other_masks: ("return (per_token(m, b)[b[", "different places"),
    rows_picked_by_the_model: ("return h[h > 0.3].mean()", "number is not known before the step"),
    masked_by_the_model: ("return (per_token(m, b) * confident).sum() / confident.sum()", "`div`"),
}


@pytest.mark.parametrize("loss", REFUSED, ids=lambda loss: loss.__name__)
def test_other_losses_are_refused_with_their_line(loss: Loss) -> None:
    line, reason = REFUSED[loss]
    captured = export_graph(Net().double(), make_batch(), loss)
    before = str(captured.graph)
    plan = rewrite_loss(captured, SampleFlow(captured, value_kinds(captured)))
    assert plan.not_additive is not None
    assert plan.terms == ()
    assert line in plan.not_additive.line and "test_losses.py:" in plan.not_additive.line
    assert (
        reason in plan.not_additive.message and plan.not_additive.line in plan.not_additive.message
    )
    assert str(captured.graph) == before


@pytest.mark.parametrize(
    "loss",
    [
        log_of_mean,
        product_of_means,
        centred,
        sqrt_of_mean,
        masked_by_the_model,
        ADDITIVE["two denominators and a penalty"],
    ],
)
def test_with_all_reduced_sums_other_losses_are_exact(loss: Loss) -> None:
    torch.manual_seed(0)
    plan = check(Net().double(), make_batch(), loss, 1e-12, [(4, 3, 3), (1, 9)], all_reduce=True)
    assert plan.reductions


@pytest.mark.parametrize("loss", [contrastive, rolled, largest], ids=lambda loss: loss.__name__)
def test_samples_compared_with_each_other_cannot_be_all_reduced(loss: Loss) -> None:
    captured = export_graph(Net().double(), make_batch(), loss)
    flow = SampleFlow(captured, value_kinds(captured), all_reduce=True)
    assert rewrite_loss(captured, flow).not_additive is not None


def test_sums_and_means_over_the_samples_are_what_is_all_reduced() -> None:
    captured = export_graph(Net().double(), make_batch(), product_of_means)
    means = [node for node in captured.graph.nodes if str(node.target) == "aten.mean.dim"]
    plan = rewrite_loss(captured, SampleFlow(captured, value_kinds(captured), all_reduce=True))
    # mean / samples in all x samples here
    assert [node.args[0].args[0] for node in plan.reductions] == means
    assert len(means) == 2


def test_terms_are_separate_outputs_with_their_words() -> None:
    @in_trace
    def loss(m: nn.Module, b: Batch) -> Tensor:
        return (
            ce(m, b)
            + 0.5 * F.mse_loss(m(b["x"]), b["soft"])
            + (per_token(m, b) * b["mask"]).sum() / b["mask"].sum()
            + penalty(m)
        )

    plan = check(Net().double(), make_batch(), loss, 1e-12, [(5, 5)])
    whats = [(term.what.split(",")[0], term.denominators) for term in plan.terms[:2]]
    assert whats == [
        ("cross_entropy_loss", ("number of targets that are not -100",)),
        ("mse_loss", ("number of samples",)),
    ]
    assert plan.terms[2].what == "sum, summed over the samples"
    assert 'b["mask"].sum()' in plan.terms[2].denominators[0]
    assert all(term.what == "does not depend on samples, counted once" for term in plan.terms[3:])
    assert len(plan.terms) == 4
    assert all("test_losses.py:" in term.line for term in plan.terms)


def test_whole_placeholders_follow_the_batch() -> None:
    captured = export_graph(
        Net().double(), make_batch(), ADDITIVE["two denominators and a penalty"]
    )
    names = [node.name for node in captured.graph.nodes if node.op == "placeholder"]
    rewrite_loss(captured, SampleFlow(captured, value_kinds(captured)))
    placeholders = [node for node in captured.graph.nodes if node.op == "placeholder"]
    assert [node.name for node in placeholders] == names + ["whole_0", "whole_1"]
    for node in placeholders[len(names) :]:
        assert node.meta["whole"] is True
        assert tuple(node.meta["val"].shape) == ()


def test_every_new_node_has_a_value_and_its_line() -> None:
    captured = export_graph(Net().double(), make_batch(), ADDITIVE["ce weights and smoothing"])
    old = set(captured.graph.nodes)
    rewrite_loss(captured, SampleFlow(captured, value_kinds(captured)))
    for node in captured.graph.nodes:
        if node not in old:
            assert "val" in node.meta, node
            assert (
                node.op == "placeholder" or "sym_size" in node.name or "stack_trace" in node.meta
            ), node
