"""Found plans that split operations or share states (ZeRO) train like local PyTorch, on real ranks:
losses of three steps and the weights after them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import whale as wh
from tests.ranks import preload, run_ranks

preload("tests.integration.test_search_split")

STEPS = 3
BATCH = 12
WIDTH = 16
CLASSES = 512
LENGTH = 20


class Classifier(nn.Module):
    """Nearly all its weights are those of its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH))
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.classifier(self.backbone(x)), labels)


class Experts(nn.Module):
    """Eight experts of which every sample visits all, after a layer that all have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Parameter(torch.randn(8, WIDTH, 4 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(8, 4 * WIDTH, WIDTH) / 8)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = torch.einsum("bd,edf->ebf", torch.tanh(self.first(x)), self.up)
        result = torch.einsum("ebf,efd->bd", torch.tanh(hidden), self.down)
        return F.cross_entropy(result, labels % WIDTH)


class Layers(nn.Module):
    """Activations that are larger than its weights, so that nothing is worth splitting."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = x.unsqueeze(1) * torch.linspace(0.5, 1.5, LENGTH, dtype=x.dtype)[:, None]
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.cross_entropy(x.mean(1), labels % WIDTH)


MODELS: dict[str, type[nn.Module]] = {
    "classifier": Classifier,
    "experts": Experts,
    "layers": Layers,
}


def model(name: str) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[name]().double()


def mini_batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    found = []
    for _ in range(STEPS):
        x = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, CLASSES, (BATCH,), generator=generator)
        found.append({"x": x, "labels": labels})
    return found


def cluster_file(number: int, memory_bytes: int = 10**9) -> str:
    """Slow devices on slow links: both compute and messages count."""
    devices = ", ".join(["{kind: slow}"] * number)
    kind = f"{{tflop_per_s: 0.000001, memory_gb: {memory_bytes / 1e9}, gb_per_s: 0.1}}"
    return (
        f"hosts: [{{name: localhost, devices: [{devices}]}}]\n"
        "links:\n  intra_host: {gb_per_s: 0.001, latency_us: 10}\n"
        f"kinds:\n  slow: {kind}\n"
    )


def adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)  # type: ignore[arg-type]


def train(
    file: str, name: str, settings: dict[str, object]
) -> tuple[list[float], dict[str, torch.Tensor] | None, str, int]:
    wh.init({"cluster": file, "strategy": "auto", **settings})
    batches = mini_batches()
    engine = wh.parallelize(model(name), batches[0], optimizer=adam)
    losses = [engine.step(batch).loss for batch in batches]
    weights = engine.full_state_dict()
    choice = next(each.choice for each in engine.plan.decisions if each.what == "strategy")
    return losses, weights if wh.rank() == 0 else None, choice, engine.plan.zero


def check(
    folder: Path, name: str, number: int, settings: dict[str, object], memory_bytes: int = 10**9
) -> tuple[str, int]:
    """Trains on so many ranks and locally, and gives what was chosen: (strategy, ZeRO level)."""
    (folder / "cluster.yaml").write_text(cluster_file(number, memory_bytes))
    results = run_ranks(train, number, str(folder / "cluster.yaml"), name, settings)
    local = model(name)
    optimizer = adam(local.parameters())
    losses = []
    for batch in mini_batches():
        optimizer.zero_grad()
        loss = local(**batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for found, _, choice, _ in results:
        assert found == pytest.approx(losses, rel=1e-11), choice
    weights = results[0][1]
    assert weights is not None
    for key, value in local.state_dict().items():
        torch.testing.assert_close(weights[key].to(value), value, rtol=1e-10, atol=1e-12)
    return results[0][2], results[0][3]


def test_a_large_classifier_is_split_and_trains_like_local(tmp_path: Path) -> None:
    choice, _ = check(tmp_path, "classifier", 2, {})
    assert "classifier" in choice and "split" in choice


def test_a_level_of_zero_that_was_set_holds_in_the_search(tmp_path: Path) -> None:
    _, level = check(tmp_path, "layers", 2, {"zero": 3, "num_task_graph": 1})
    assert level == 3


def test_zero_is_found_where_memory_is_short(tmp_path: Path) -> None:
    settings = {"num_task_graph": 1, "recompute": False, "num_micro_batch": 1}
    memory = short_memory("layers", 2)
    _, level = check(tmp_path, "layers", 2, settings, memory)
    assert level > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["classifier", "experts"])
@pytest.mark.parametrize("number", [2, 3, 4])
def test_split_models_train_like_local(name: str, number: int, tmp_path: Path) -> None:
    check(tmp_path, name, number, {})


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2, 3, "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_every_level_trains_like_local(name: str, level: int | str, tmp_path: Path) -> None:
    check(tmp_path, name, 3, {"zero": level})


def short_memory(name: str, number: int) -> int:
    """Bytes of a device that are too few for data parallelism and enough for ZeRO."""
    made = model(name)
    cluster = wh.Cluster.uniform(number)
    config = {"strategy": "data", "recompute": False}
    plan = wh.plan(made, mini_batches()[0], cluster=cluster, config=config, optimizer=adam)
    trained = sum(each.numel() * each.element_size() for each in made.parameters())
    memory = plan.memory[0]
    return round(memory.total_bytes(BATCH // number) - trained / 2)
