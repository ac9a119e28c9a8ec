"""ResNet: sizes that are known from elsewhere, and that it learns."""

from __future__ import annotations

import torch

from models.resnet import ResNet, ResNetConfig


def test_resnet50_has_its_known_size() -> None:
    with torch.device("meta"):
        model = ResNet(ResNetConfig.resnet50())
        features = model.backbone(torch.empty(2, 3, 224, 224))
    assert sum(p.numel() for p in model.parameters()) == 25_557_032
    assert features.shape == (2, 2048)


def test_it_learns_colours() -> None:
    model = ResNet(ResNetConfig.tiny(num_classes=3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    labels = torch.arange(24) % 3
    images = torch.randn(24, 3, 16, 16) * 0.1
    images[torch.arange(24), labels] += 1.0
    losses = []
    for _ in range(12):
        loss = model(images, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
