"""What accelerators ask of the code around them, as far as it shows without one: device numbers,
and how much memory is free (issue 15, rows 1 and 8 to 10).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import whale as wh
from whale import api
from whale.capture.batch import read_batch
from whale.capture.clean import forget_device_indices
from whale.capture.graph import CapturedGraph
from whale.planning.planner import fingerprint


class Positions(nn.Module):
    """Makes a tensor on the device of its input, as every model with positions does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.table(x) + self.table(places)).square().mean()  # type: ignore[no-any-return]


def _captured() -> CapturedGraph:
    layout, tensors = read_batch(torch.zeros(4, 5, dtype=torch.int64))
    return api._prepare(Positions(), layout, tensors, None, wh.Config(), "cpu").captured


def test_devices_are_no_part_of_the_fingerprint() -> None:
    """Row 1: `cuda:1` is what local rank 1 puts into its graph."""
    captured = _captured()
    before = fingerprint(captured)
    (arange,) = [node for node in captured.graph.nodes if "arange" in str(node.target)]
    arange.kwargs = {**arange.kwargs, "device": torch.device("cuda", 1)}
    assert fingerprint(captured) == before
    forget_device_indices(captured.graph)
    assert arange.kwargs["device"] == torch.device("cuda")
