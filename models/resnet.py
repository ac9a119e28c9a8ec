"""ResNet: convolutions in blocks with a way around each block, then one linear layer over the
classes.

Blocks are bottlenecks: 1x1 down to `width` channels, 3x3, 1x1 up to 4 x `width`. The first block of
a later stage halves the image at its 3x3 convolution, and its way around is a 1x1 convolution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

EXPANSION = 4  # channels that leave a block, in units of its width


@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """Size of a ResNet."""

    num_classes: int
    blocks: tuple[int, ...]
    """in each stage"""
    width: int = 64
    """of the first stage; doubles with each stage"""

    @classmethod
    def resnet50(cls, num_classes: int = 1000) -> ResNetConfig:
        """25.6 million parameters with 1000 classes."""
        return cls(num_classes=num_classes, blocks=(3, 4, 6, 3))

    @classmethod
    def tiny(cls, num_classes: int = 10) -> ResNetConfig:
        return cls(num_classes=num_classes, blocks=(1, 1), width=4)

    @property
    def num_features(self) -> int:
        """What the classifier reads."""
        return self.width * 2 ** (len(self.blocks) - 1) * EXPANSION


class Block(nn.Module):
    """x + f(x), where f is three convolutions."""

    def __init__(self, num_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(num_channels, width, 1, bias=False)
        self.down_norm = nn.BatchNorm2d(width)
        self.middle = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.middle_norm = nn.BatchNorm2d(width)
        self.up = nn.Conv2d(width, EXPANSION * width, 1, bias=False)
        self.up_norm = nn.BatchNorm2d(EXPANSION * width)
        self.around: nn.Module = nn.Identity()
        if stride > 1 or num_channels != EXPANSION * width:
            self.around = nn.Sequential(
                nn.Conv2d(num_channels, EXPANSION * width, 1, stride, bias=False),
                nn.BatchNorm2d(EXPANSION * width),
            )

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.down_norm(self.down(x)))
        inner = F.relu(self.middle_norm(self.middle(inner)))
        return F.relu(self.up_norm(self.up(inner)) + self.around(x))


class Backbone(nn.Module):
    """Images (B, 3, height, width) -> features (B, num_features)."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, config.width, 7, 2, padding=3, bias=False)
        self.first_norm = nn.BatchNorm2d(config.width)
        stages = []
        num_channels = config.width
        for stage, count in enumerate(config.blocks):
            width = config.width * 2**stage
            for place in range(count):
                stages.append(Block(num_channels, width, 2 if stage and not place else 1))
                num_channels = EXPANSION * width
        self.blocks = nn.Sequential(*stages)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first_norm(self.first(images))), 3, 2, padding=1)
        return self.blocks(x).mean((2, 3))


class ResNet(nn.Module):
    """Images and, for the mean loss, their classes (B,)."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.backbone = Backbone(config)
        self.classifier = nn.Linear(config.num_features, config.num_classes)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits (B, classes), or the loss."""
        logits = self.classifier(self.backbone(images))
        return logits if labels is None else F.cross_entropy(logits, labels)
