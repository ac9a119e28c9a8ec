"""ResNet-50 (He et al., 2015, with the stride in the 3 x 3 convolution), plain PyTorch: no line of it knows Whale."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_BLOCKS = (3, 4, 6, 3)
WIDTHS = (64, 128, 256, 512)
EXPANSION = 4
"""channels that leave a block, in units of its width"""


class Block(nn.Module):
    """Three convolutions around a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = EXPANSION * width
        self.conv1, self.norm1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x_BCHW)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x_BCHW))


class ResNet50(nn.Module):
    """Images (batch, 3, height, width) in, logits (batch, classes) out."""

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        blocks, channels = [], 64
        for group, (number, width) in enumerate(zip(NUM_BLOCKS, WIDTHS, strict=True)):
            for place in range(number):
                blocks.append(Block(channels, width, 2 if group and not place else 1))
                channels = EXPANSION * width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y = self.blocks(self.stem(x_BCHW))
        logits: Tensor = self.head(y.mean(dim=(2, 3)))
        return logits


def classification_loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """For a batch of (images, labels)."""
    return F.cross_entropy(output, batch[1])


def images(batch_size: int, size: int = 224, num_classes: int = 1000) -> tuple[Tensor, Tensor]:
    """A batch without meaning, for planning and timing."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch_size, 3, size, size, generator=generator), torch.arange(batch_size) % num_classes
