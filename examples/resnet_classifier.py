"""ResNet with a classifier that is larger than everything before it: the backbone is copied, the
classes are split, on GPUs of two kinds.

    python examples/resnet_classifier.py                              one process, a small model
    whale run -n 4 examples/resnet_classifier.py                      4 CPU ranks: the same losses

    whale plan --cluster examples/resnet_classifier.yaml examples/resnet_classifier.py --large

The last one is ResNet50 with 100,000 classes on two RTX 3090 and two V100, and needs no GPU: the
faster cards get more images, every card has a part of the classes and computes only their scores,
and nobody ever holds all of them.

It prints, with 4 ranks,

    4 ranks: rank 0 has 500 of 2000 classes
    step 1/8  loss 7.5199
    ...
    step 8/8  loss 4.3521
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # models/ stands beside examples/

import whale as wh
from models.resnet import ResNet, ResNetConfig

NUM_SEEN = 16
"""classes that the data of this example has"""
NOISE = 0.2


def batches(number: int, size: int, pixels: int, num_classes: int) -> list[dict[str, Tensor]]:
    """Pictures of a few classes: the pattern of the class, and noise."""
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randn(NUM_SEEN, 3, pixels, pixels, generator=generator)
    made = []
    for _ in range(number):
        seen = torch.randint(NUM_SEEN, (size,), generator=generator)
        noise = torch.randn(size, 3, pixels, pixels, generator=generator)
        labels = seen * (num_classes // NUM_SEEN)
        made.append({"images": patterns[seen] + NOISE * noise, "labels": labels})
    return made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--large", action="store_true", help="ResNet50, 100,000 classes, 224 pixels"
    )
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    config = ResNetConfig.resnet50(100_000) if options.large else ResNetConfig.tiny(2000)
    # a plan looks at one batch only, and large pictures take memory
    num_batches = 1 if options.large else options.steps
    data = batches(
        num_batches,
        size=64 if options.large else 32,
        pixels=224 if options.large else 32,
        num_classes=config.num_classes,
    )
    # batch norm looks at a whole micro-batch: with one, results are those of one device
    wh.init({"num_micro_batch": 1, "seed": 1})

    def build() -> nn.Module:
        everyone = wh.num_devices()
        marks = {"backbone": wh.replicate(everyone), "classifier": wh.split(everyone)}
        return wh.annotate(ResNet(config), marks)

    engine = wh.parallelize(
        build, data[0], optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)
    )
    held = {name: parameter.shape[0] for name, parameter in engine.named_parameters()}
    if wh.rank() == 0:
        classes = f"{held['classifier.weight']} of {config.num_classes} classes"
        print(f"{wh.num_devices()} ranks: rank 0 has {classes}", flush=True)
    for step in range(options.steps):
        result = engine.step(data[step % num_batches])
        if wh.rank() == 0:
            print(f"step {step + 1}/{options.steps}  loss {result.loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
