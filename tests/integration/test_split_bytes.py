"""The bytes that a plan prints for a stage on a grid are those that its devices send: exchanges,
and numbers exchanged inside operations.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale as wh
from tests.integration.layers import sgd
from tests.ranks import preload, run_ranks
from whale.cluster.network import Link
from whale.lowering.exchange import sent

preload("tests.integration.test_split_bytes")

WIDTH = 64
LENGTH = 8
SAMPLES = 16
HOST = "host0"
ONLY_BYTES = Link(bytes_per_s=1e6, latency_s=0.0)
"""messages cost nothing but their bytes, so that norms and losses are cut along their width"""


class Net(nn.Module):
    """Both norms, a softmax over a dim that is not the last one, and losses with class weights and
    with probabilities.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.layer_norm = nn.LayerNorm(WIDTH)
        self.rms_norm = nn.RMSNorm(WIDTH)
        self.register_buffer("class_weights", torch.arange(1.0, WIDTH + 1))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.second(self.layer_norm(torch.tanh(self.first(x))))
        x = self.third(self.rms_norm(x)).transpose(1, 2).softmax(1).transpose(1, 2)
        logits = self.head(x).flatten(0, 1)
        labels = labels.flatten()
        probabilities = F.one_hot(labels, WIDTH).to(x.dtype)
        return F.cross_entropy(logits, labels, self.class_weights) + F.cross_entropy(
            logits, probabilities, reduction="sum"
        )


def count() -> tuple[int, float, Counter[str]]:
    """Bytes that this rank sent in a step, those of the plan, and the operations inside of which it
    exchanged numbers.
    """
    os.environ["WHALE_HOST"] = HOST
    torch.manual_seed(0)
    wh.init()
    batch = {
        "x": torch.randn(SAMPLES, LENGTH, WIDTH).bfloat16(),
        "labels": torch.randint(0, WIDTH, (SAMPLES, LENGTH)),
    }
    model = wh.annotate(Net().bfloat16(), {"*": wh.split(4, (2, 2, 1))})
    cluster = replace(wh.Cluster.uniform(4, "V100-16GB"), intra_host=ONLY_BYTES)
    engine = wh.parallelize(model, batch, optimizer=sgd, cluster=cluster)
    sent.reset()
    engine.step(batch)
    (sharding,) = engine.plan.shardings
    exchanging = Counter(
        each.what.split(": ")[1] for each in sharding.operations if each.exchanged_bytes
    )
    return (
        sent.num_bytes,
        sharding.sent_bytes + sum(each.exchanged_bytes for each in sharding.operations),
        exchanging,
    )


@pytest.mark.slow
def test_devices_send_what_the_plan_says() -> None:
    for counted, planned, exchanging in run_ranks(count, 4):
        assert counted == planned
        assert exchanging == {"layer_norm": 1, "rms_norm": 1, "softmax": 1, "cross_entropy_loss": 2}
