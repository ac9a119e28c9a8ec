"""An annotated model under the plan that the search takes for what is not marked trains like local
PyTorch, on real ranks. Losses of three steps and the weights after them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import whale as wh
from tests.exactness import mean_square
from tests.integration.test_search_training import STEPS, sgd
from tests.ranks import preload, run_ranks

preload("tests.integration.test_search_marked")

BATCH = 12
WIDTH = 16
LAYERS = 5
CLUSTER = """
hosts: [{name: localhost, devices: [{kind: fast}, {kind: slow}, {kind: slow}]}]
links:
  intra_host: {gb_per_s: 0.0005, latency_us: 10}
kinds:
  fast: {tflop_per_s: 0.0000024, memory_gb: 1, gb_per_s: 0.1}
  slow: {tflop_per_s: 0.000002, memory_gb: 1, gb_per_s: 0.1}
"""


def model() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*layers).double()


def mini_batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [
        torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64) for _ in range(STEPS)
    ]


def train(file: str) -> tuple[list[float], dict[str, torch.Tensor] | None, str, int]:
    wh.init({"cluster": file, "strategy": "auto"})
    batches = mini_batches()
    annotated = wh.annotate(model(), {"[34]": wh.split(2)})
    engine = wh.parallelize(annotated, batches[0], optimizer=sgd, loss=mean_square)
    losses = [engine.step(batch).loss for batch in batches]
    weights = engine.full_state_dict()
    why = next(each.why for each in engine.plan.decisions if each.what == "strategy")
    return losses, weights if wh.rank() == 0 else None, why, len(engine.plan.stages)


def test_the_unmarked_rest_trains_like_local_pytorch(tmp_path: Path) -> None:
    """Two devices for the mark do not divide three: the rest gets the third."""
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    results = run_ranks(train, 3, str(tmp_path / "cluster.yaml"))
    local = model()
    optimizer = sgd(local.parameters())
    losses = []
    for batch in mini_batches():
        optimizer.zero_grad()
        loss = mean_square(local(batch), batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for found, _, why, num_stages in results:
        assert found == pytest.approx(losses, rel=1e-11), why
        assert num_stages == 2 and "split(2); not marked" in why and "1 TaskGraph on 1" in why
    weights = results[0][1]
    assert weights is not None
    for name, value in local.state_dict().items():
        torch.testing.assert_close(weights[name].to(value), value, rtol=1e-10, atol=1e-12)
