"""A small training job that saves, resumes and can be disturbed: what a user would write, and one
injector.

    whale run -n 2 --restarts 3 tests/faults/train.py FOLDER --steps 12

FOLDER holds `checkpoints`, `state` (the list of faults and what became of it) and in the end
`final.safetensors`. With a file `unlike` in it, rank 0 is a model replica of its own beside a
pipeline of the others.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale as wh
from tests.faults.injector import Injector
from whale.checkpoint import CheckpointError, Handle

WIDTH = 16
NUM_CLASSES = 3
NUM_LAYERS = 4
BATCH_SIZE, NUM_SAMPLES = 6, 32  # an epoch is 5 mini-batches: resuming crosses epochs
TIMEOUT_S = 6.0
"""silence that ends the job: short, and longer than a busy machine keeps a thread from running"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.cross_entropy(self.head(x), labels)


class Samples(torch.utils.data.Dataset[Any]):
    """Sample i, made from its number."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(WIDTH, generator=generator, dtype=torch.float64)
        return {"x": x, "labels": torch.randint(0, NUM_CLASSES, (), generator=generator)}


def build() -> Net:
    torch.manual_seed(0)
    return Net().double()


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def scheduler(made: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(made, step_size=2, gamma=0.9)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--keep", type=int, default=3)
    options = parser.parse_args()
    checkpoints = options.folder / "checkpoints"
    injector = Injector(int(os.environ.get("RANK", "0")), options.folder / "state")
    config = {"num_micro_batch": 2, "timeout_s": TIMEOUT_S, "keep_checkpoints": options.keep}
    model: nn.Module = build()
    if (options.folder / "unlike").exists():
        pipeline = [[rank] for rank in range(1, int(os.environ.get("WORLD_SIZE", "3")))]
        wh.init({**config, "replicas": [{"stages": [[0]]}, {"stages": pipeline}]})
    else:
        wh.init(config)
        model = wh.annotate(
            model,
            {
                "layers.[0-1]": wh.replicate(1),
                "layers.[2-3]|head": wh.replicate(wh.num_devices() - 1),
            },
        )
    sample = torch.utils.data.default_collate([Samples()[index] for index in range(BATCH_SIZE)])
    engine = wh.parallelize(model, sample, optimizer=optimizer, scheduler=scheduler)
    loader = engine.loader(Samples(), BATCH_SIZE, shuffle=True, seed=3)
    injector.start(checkpoints)
    engine.load(checkpoints, data=loader)
    handle: Handle | None = None
    while engine.step_count < options.steps:
        for batch in loader:
            injector.between_steps(engine.step_count)
            engine.step(batch)
            if engine.step_count % options.save_every == 0:
                with injector.save(engine.step_count, checkpoints, handle) as is_full:
                    handle = engine.save(checkpoints, data=loader)
                    if is_full:
                        try:
                            handle.wait()
                        except CheckpointError as error:
                            print(f"not saved: {error}", flush=True)
            if engine.step_count == options.steps:
                break
    engine.close()
    engine.export(options.folder / "final.safetensors")


if __name__ == "__main__":
    main()
