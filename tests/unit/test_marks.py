"""Marks on modules that are never called themselves."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import whale as wh
from whale.annotation import marks_by_module


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 1)})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.heads["a"](x).square().mean()


def test_a_mark_on_a_list_of_modules_is_its_members() -> None:
    model = wh.annotate(Layers(), {"blocks": wh.replicate(1), "heads": wh.replicate(1)})
    marks = marks_by_module(model)
    assert (
        marks["blocks.0"] is marks["blocks.1"] is marks["blocks"]
        and marks["heads.a"] is marks["heads"]
    )
    plan = wh.plan(model, torch.randn(4, 4), cluster=2, config={"num_micro_batch": 2})
    assert [graph.num_operations > 0 for graph in plan.task_graphs] == [True, True] and len(
        plan.stages
    ) == 2
