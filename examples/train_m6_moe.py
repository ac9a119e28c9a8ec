"""A small mixture of experts learns to say what is in a drawing: every rank has one expert of each
layer, everything else is data parallel.

    whale run -n 8 examples/train_m6_moe.py                8 experts on 8 ranks: in every layer
                                                           tokens travel to their experts and back
    python examples/train_m6_moe.py                        the same training in one process
    whale plan -n 8 examples/train_m6_moe.py               what is sharded how, and what it sends

The model (models/m6_moe.py) knows nothing of Whale: its experts are batched einsums, and one glob
puts them under `split`. With `--steps 12 --batch 16 --every 1` the first command prints

    8 ranks, 8 experts a layer, 27,232 numbers on rank 0
    step   1  loss 4.0787
    ...
    step  12  loss 1.1695
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # models/ stands beside examples/

import whale as wh
from models.drawings import Drawings
from models.m6_moe import M6MoE, M6MoEConfig


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60, help="training steps")
    parser.add_argument("--batch", type=int, default=32, help="drawings in a mini-batch")
    parser.add_argument("--experts", type=int, default=8, help="experts of each layer")
    parser.add_argument("--lr", type=float, default=5e-3, help="learning rate")
    parser.add_argument("--every", type=int, default=10, help="steps between two lines")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    wh.init({"clip_grad_norm": 1.0})
    wh.set_default_strategy(wh.replicate(wh.num_devices()))
    drawings = Drawings(options.steps * options.batch, 0, "train")

    def build() -> torch.nn.Module:
        return wh.annotate(
            M6MoE(M6MoEConfig.tiny(options.experts)), {"*.experts": wh.split(wh.num_devices())}
        )

    engine = wh.parallelize(
        build,
        drawings.batch(range(options.batch)),
        optimizer=lambda params: torch.optim.AdamW(params, lr=options.lr, betas=(0.9, 0.99)),
    )
    held = sum(parameter.numel() for _, parameter in engine.named_parameters())
    if os.environ.get("RANK", "0") == "0":
        print(
            f"{wh.num_devices()} ranks, {options.experts} experts a layer, {held:,} numbers on "
            "rank 0",
            flush=True,
        )
    for step in range(options.steps):
        result = engine.step(
            drawings.batch(range(step * options.batch, (step + 1) * options.batch))
        )
        if os.environ.get("RANK", "0") == "0" and (
            step % options.every == 0 or step + 1 == options.steps
        ):
            print(f"step {step + 1:>3}  loss {result.loss:.4f}", flush=True)
    engine.close()


if __name__ == "__main__":
    main()
